//! Whose process is at the other end of a connection on this machine.
//!
//! **Decides**: the user of a loopback connection, so that roles are the same by HTTP as on the control socket. **Flow**: both addresses of
//! an accepted connection -> the kernel's table of sockets -> a user's number. **Invariants**: 1. only an open connection's own socket counts:
//! one that its process has closed, or that has ended, belongs to nobody (the kernel shows such a one as root's). 2. who is not found is
//! refused. **Source**: proc_net_tcp.txt of the kernel's documentation. **Not here**: what the user may do (`daemon::roles`).

use std::fs::File;
use std::io::{self, BufRead, BufReader};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

/// The table is read in pieces: while others come and go, a look may miss one.
const LOOKS: usize = 4;

/// TCP_ESTABLISHED.
const OPEN: &str = "01";

/// The user whose socket is connected from `there` to `here`; none if no process of this machine holds it open.
pub fn of(here: SocketAddr, there: SocketAddr) -> io::Result<Option<u32>> {
    if !there.ip().to_canonical().is_loopback() {
        return Ok(None);
    }
    // A client may use an IPv6 socket for an IPv4 address.
    let tables = ["/proc/self/net/tcp", "/proc/self/net/tcp6"];
    for table in tables.repeat(LOOKS) {
        let file = match File::open(table) {
            // A machine without IPv6 has no such table.
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            file => file?,
        };
        if let Some(uid) = find(BufReader::new(file), here, there)? {
            return Ok(Some(uid));
        }
    }
    Ok(None)
}

fn find(table: impl BufRead, here: SocketAddr, there: SocketAddr) -> io::Result<Option<u32>> {
    for line in table.lines() {
        let line = line?;
        // Number, its own address, the other's, state, queues, timer, retransmissions, user, timeout, inode.
        let words: Vec<&str> = line.split_whitespace().take(10).collect();
        let [_, own, others, OPEN, _, _, _, uid, _, inode] = words[..] else {
            continue;
        };
        if inode != "0" && address(own) == Some(canonical(there)) && address(others) == Some(canonical(here))
        {
            return Ok(uid.parse().ok());
        }
    }
    Ok(None)
}

fn canonical(address: SocketAddr) -> (IpAddr, u16) {
    (address.ip().to_canonical(), address.port())
}

/// `0100007F:1F90`: words of the address in this machine's order of bytes, and the port.
fn address(text: &str) -> Option<(IpAddr, u16)> {
    let (ip, port) = text.split_once(':')?;
    let port = u16::from_str_radix(port, 16).ok()?;
    let word = |at: usize| {
        let digits = ip.get(8 * at..8 * (at + 1))?;
        Some(u32::from_str_radix(digits, 16).ok()?.to_ne_bytes())
    };
    let ip: IpAddr = match ip.len() {
        8 => Ipv4Addr::from(word(0)?).into(),
        32 => {
            let words = [word(0)?, word(1)?, word(2)?, word(3)?];
            let bytes: [u8; 16] = words.concat().try_into().ok()?;
            Ipv6Addr::from(bytes).to_canonical()
        }
        _ => return None,
    };
    Some((ip, port))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{Shutdown, TcpListener, TcpStream};

    #[test]
    fn an_open_connection_is_its_process_s_user_s_and_a_closed_one_nobody_s() {
        for name in ["127.0.0.1:0", "[::1]:0"] {
            let Ok(listener) = TcpListener::bind(name) else {
                // No IPv6 here.
                continue;
            };
            let here = listener.local_addr().expect("an address");
            let client = TcpStream::connect(here).expect("connected");
            let (served, there) = listener.accept().expect("accepted");
            let me = rustix::process::geteuid().as_raw();
            assert_eq!(of(here, there).expect("a table"), Some(me), "{name}");
            // The other end of the connection is another socket, with the addresses the other way round.
            assert_eq!(of(there, here).expect("a table"), Some(me));
            client.shutdown(Shutdown::Write).expect("shut");
            drop(client);
            assert_eq!(of(here, there).expect("a table"), None, "{name}");
            drop(served);
        }
    }

    #[test]
    fn what_is_not_an_open_socket_of_both_addresses_is_not_believed() {
        let line = |own: &str, others: &str, state: &str, inode: &str| {
            format!(
                "   3: {own} {others} {state} 00000000:00000000 00:00000000 00000000  1000        0 {inode} 1 0 20 4 30 10 -1\n"
            )
        };
        let (client, server) = ("0100007F:C350", "0100007F:1E16");
        let here = "127.0.0.1:7702".parse().expect("an address");
        let there = "127.0.0.1:50000".parse().expect("an address");
        let look = |text: String| find(text.as_bytes(), here, there).expect("read");
        assert_eq!(look(line(client, server, "01", "77")), Some(1000));
        let mapped = "0000000000000000FFFF00000100007F";
        let (long_client, long_server) = (format!("{mapped}:C350"), format!("{mapped}:1E16"));
        assert_eq!(look(line(&long_client, &long_server, "01", "77")), Some(1000));
        for wrong in [
            line(client, server, "06", "0"),
            line(client, server, "01", "0"),
            line(client, server, "05", "77"),
            line(server, client, "01", "77"),
            line("0100007F:C351", server, "01", "77"),
            "  sl  local_address rem_address   st\n".to_owned(),
            format!("x: {client}"),
            line("7F:C350", server, "01", "77"),
            line("é100007F:C350", server, "01", "77"),
        ] {
            assert_eq!(look(wrong.clone()), None, "{wrong}");
        }
        let far = "10.0.0.1:50000".parse().expect("an address");
        assert_eq!(of(here, far).expect("no table is asked"), None);
    }
}
