//! Callers from several addresses of this machine.

use std::io;
use std::net::{SocketAddr, TcpStream};

use rustix::net::{AddressFamily, SocketType, bind, connect, socket};

/// A connection from 127.0.0.`last`.
pub fn from(last: u8, to: SocketAddr) -> io::Result<TcpStream> {
    let socket = socket(AddressFamily::INET, SocketType::STREAM, None)?;
    bind(&socket, &SocketAddr::from(([127, 0, 0, last], 0)))?;
    connect(&socket, &to)?;
    Ok(socket.into())
}
