//! The little of MariaDB's protocol that a ledger needs: a start without a password, and queries as text.
//!
//! * **Decides:** nothing. * **Source:** MariaDB's "Client/Server Protocol": connecting, COM_QUERY, result set packets.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

/// What this client can do: long passwords, a database at the start, 4.1's protocol, transactions, 4.1's passwords, their plugin.
const CAPABILITIES: u32 = 1 | 8 | 0x200 | 0x2000 | 0x8000 | 0x8_0000;
/// UTF-8.
const CHARACTERS: u8 = 33;
/// No packet is longer; a ledger's answers are short.
const MOST_BYTES: u32 = 1 << 20;
const PLUGIN: &str = "mysql_native_password";
const QUERY: u8 = 3;
const OK: u8 = 0;
const END: u8 = 0xfe;
const ERROR: u8 = 0xff;
const NULL: u8 = 0xfb;

/// A row of values as text; nothing for a null.
pub type Row = Vec<Option<String>>;

/// One connection that is never renewed.
pub struct Mariadb {
    stream: TcpStream,
    /// The number of the next packet.
    next: u8,
}

impl Mariadb {
    /// Connects as `user` to `database`; no answer may take longer than `timeout`.
    ///
    /// # Errors
    /// No connection, or the server refuses.
    pub fn open(to: SocketAddr, user: &str, database: &str, timeout: Duration) -> io::Result<Self> {
        let stream = TcpStream::connect_timeout(&to, timeout)?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(timeout))?;
        let mut open = Self { stream, next: 0 };
        let greeting = open.packet()?;
        if greeting.first() != Some(&10) {
            return Err(invalid("a greeting of another version"));
        }
        open.write(&introduction(user, database))?;
        let mut answer = open.packet()?;
        // It may ask for the password in another way: there is none in any.
        if answer.first() == Some(&END) {
            open.write(&[])?;
            answer = open.packet()?;
        }
        match answer.first() {
            Some(&OK) => Ok(open),
            Some(&ERROR) => Err(refusal(&answer)),
            _ => Err(invalid("it wants more than no password")),
        }
    }

    /// Runs one statement, and waits for its end.
    ///
    /// # Errors
    /// Those of the connection; `Other` with the server's words when it refuses.
    pub fn query(&mut self, text: &str) -> io::Result<Vec<Row>> {
        self.next = 0;
        let mut message = vec![QUERY];
        message.extend(text.as_bytes());
        self.write(&message)?;
        let head = self.packet()?;
        match head.first() {
            Some(&OK) => return Ok(Vec::new()),
            Some(&ERROR) => return Err(refusal(&head)),
            None | Some(&NULL) => return Err(invalid("an answer that is no answer")),
            _ => {}
        }
        let columns = length(&mut &head[..])?;
        for _ in 0..columns {
            self.packet()?;
        }
        self.packet()?;
        let mut rows = Vec::new();
        loop {
            let packet = self.packet()?;
            match packet.first() {
                Some(&END) if packet.len() < 9 => return Ok(rows),
                Some(&ERROR) => return Err(refusal(&packet)),
                _ => rows.push(row(&packet, columns)?),
            }
        }
    }

    fn packet(&mut self) -> io::Result<Vec<u8>> {
        let mut head = [0; 4];
        self.stream.read_exact(&mut head)?;
        let bytes = u32::from_le_bytes([head[0], head[1], head[2], 0]);
        if bytes > MOST_BYTES {
            return Err(invalid("a packet of a senseless length"));
        }
        self.next = head[3].wrapping_add(1);
        let mut body = vec![0; bytes as usize];
        self.stream.read_exact(&mut body)?;
        Ok(body)
    }

    fn write(&mut self, body: &[u8]) -> io::Result<()> {
        let mut packet = (body.len() as u32).to_le_bytes()[..3].to_vec();
        packet.push(self.next);
        packet.extend(body);
        self.stream.write_all(&packet)
    }
}

fn introduction(user: &str, database: &str) -> Vec<u8> {
    let mut body = CAPABILITIES.to_le_bytes().to_vec();
    body.extend(MOST_BYTES.to_le_bytes());
    body.push(CHARACTERS);
    body.extend([0; 23]);
    body.extend(user.as_bytes());
    // The end of the name, and a password of no bytes.
    body.extend([0, 0]);
    for word in [database, PLUGIN] {
        body.extend(word.as_bytes());
        body.push(0);
    }
    body
}

fn invalid(what: &str) -> io::Error {
    io::Error::new(ErrorKind::InvalidData, format!("MariaDB: {what}"))
}

/// A code of two bytes, a state of six, and words.
fn refusal(packet: &[u8]) -> io::Error {
    let words = packet.get(9..).unwrap_or_default();
    io::Error::other(String::from_utf8_lossy(words).into_owned())
}

/// A number of one, two, three or eight bytes, which says itself how many.
fn length(bytes: &mut &[u8]) -> io::Result<usize> {
    let short = || invalid("a number that is cut off");
    let (first, rest) = bytes.split_first().ok_or_else(short)?;
    let more = match first {
        0xfc => 2,
        0xfd => 3,
        0xfe => 8,
        _ => 0,
    };
    let (number, rest) = rest.split_at_checked(more).ok_or_else(short)?;
    *bytes = rest;
    if more == 0 {
        return Ok(usize::from(*first));
    }
    let mut all = [0; 8];
    all[..more].copy_from_slice(number);
    usize::try_from(u64::from_le_bytes(all)).map_err(|_| short())
}

fn row(packet: &[u8], columns: usize) -> io::Result<Row> {
    let mut rest = packet;
    let mut row = Vec::new();
    for _ in 0..columns {
        if rest.first() == Some(&NULL) {
            rest = &rest[1..];
            row.push(None);
            continue;
        }
        let bytes = length(&mut rest)?;
        let (value, after) = rest
            .split_at_checked(bytes)
            .ok_or_else(|| invalid("a row that is cut off"))?;
        rest = after;
        row.push(Some(String::from_utf8_lossy(value).into_owned()));
    }
    Ok(row)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_and_refusals_are_read_and_nonsense_is_refused() {
        let packet = [&[3][..], b"abc", &[NULL], &[0xfc, 1, 0], b"d"].concat();
        let wanted = [Some("abc".to_owned()), None, Some("d".to_owned())];
        assert_eq!(row(&packet, 3).unwrap(), wanted);
        assert!(row(&packet[..3], 3).is_err());
        assert!(row(&[], 1).is_err() && row(&[0xfe, 1], 1).is_err());
        assert_eq!(
            refusal(b"\xff\x15\x04#28000Access denied").to_string(),
            "Access denied"
        );
        assert_eq!(refusal(b"\xff").to_string(), "");
    }
}
