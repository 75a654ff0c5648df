//! The little of PostgreSQL's protocol that a ledger needs: a start without a password, and simple queries.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use super::Boots;

/// How long one read waits before the deadline is looked at.
const SLICE: Duration = Duration::from_millis(200);
/// No message is longer; a ledger's answers are short.
const MOST_BYTES: usize = 16 << 20;

/// One connection that is never renewed.
pub struct Postgres {
    stream: TcpStream,
}

/// What a query brought.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Rows {
    /// Column values as text; nothing for a null.
    pub rows: Vec<Vec<Option<String>>>,
    /// The last command's tag, such as `COMMIT` or `INSERT 0 1`.
    pub tag: String,
}

impl Postgres {
    /// Connects as `user` to `database` within `timeout`.
    ///
    /// # Errors
    /// No connection, or the server refuses (while it still starts, for instance).
    pub fn open(to: SocketAddr, user: &str, database: &str, timeout: Duration) -> io::Result<Self> {
        let deadline = Instant::now() + timeout;
        let stream = TcpStream::connect_timeout(&to, timeout)?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(SLICE))?;
        Self { stream }.begin(user, database, deadline)
    }

    /// As [`Self::open`], to a guest that may boot.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub fn open_over_boots(
        to: SocketAddr,
        user: &str,
        database: &str,
        give_up: Duration,
        boots: &Boots,
    ) -> io::Result<Self> {
        boots.connect(give_up, |timeout| {
            let open = Self::open(to, user, database, timeout)?;
            boots.watch(&open.stream)?;
            Ok(open)
        })
    }

    fn begin(mut self, user: &str, database: &str, deadline: Instant) -> io::Result<Self> {
        let mut body = 196_608_u32.to_be_bytes().to_vec(); // version 3.0
        for word in ["user", user, "database", database, ""] {
            body.extend(word.as_bytes());
            body.push(0);
        }
        let mut message = (body.len() as u32 + 4).to_be_bytes().to_vec();
        message.extend(body);
        self.stream.write_all(&message)?;
        self.until_ready(deadline).map(|_| self)
    }

    /// Runs `text`, one or several statements, and waits for the end of all of it.
    ///
    /// # Errors
    /// `TimedOut`, `UnexpectedEof` when the server closed, `Other` with the server's words when it refuses.
    pub fn query(&mut self, text: &str, timeout: Duration) -> io::Result<Rows> {
        let mut message = vec![b'Q'];
        message.extend((text.len() as u32 + 5).to_be_bytes());
        message.extend(text.as_bytes());
        message.push(0);
        self.stream.write_all(&message)?;
        self.until_ready(Instant::now() + timeout)
    }

    fn until_ready(&mut self, deadline: Instant) -> io::Result<Rows> {
        let mut found = Rows::default();
        let mut refused = None;
        loop {
            let (kind, body) = self.message(deadline)?;
            match kind {
                b'Z' => return refused.map_or(Ok(found), Err),
                b'D' => found.rows.push(columns(&body)?),
                b'C' => found.tag = text_of(&body),
                b'E' => {
                    let words = io::Error::other(message_of(&body));
                    // Before the server is ready an error is its last word.
                    if self.is_closing(&body) {
                        return Err(words);
                    }
                    refused = Some(words);
                }
                b'R' if body.get(..4) != Some(&[0; 4]) => {
                    return Err(invalid("the server wants a password"));
                }
                _ => {}
            }
        }
    }

    fn is_closing(&self, error: &[u8]) -> bool {
        field(error, b'S').is_some_and(|severity| severity == "FATAL" || severity == "PANIC")
    }

    fn message(&mut self, deadline: Instant) -> io::Result<(u8, Vec<u8>)> {
        let mut head = [0; 5];
        self.fill(&mut head, deadline)?;
        let len = u32::from_be_bytes([head[1], head[2], head[3], head[4]]) as usize;
        if !(4..=MOST_BYTES).contains(&len) {
            return Err(invalid("a message of a senseless length"));
        }
        let mut body = vec![0; len - 4];
        self.fill(&mut body, deadline)?;
        Ok((head[0], body))
    }

    fn fill(&mut self, mut into: &mut [u8], deadline: Instant) -> io::Result<()> {
        while !into.is_empty() {
            match self.stream.read(into) {
                Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
                Ok(got) => into = &mut into[got..],
                Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                    if Instant::now() >= deadline {
                        return Err(ErrorKind::TimedOut.into());
                    }
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

fn invalid(what: &str) -> io::Error {
    io::Error::new(ErrorKind::InvalidData, format!("PostgreSQL: {what}"))
}

fn text_of(bytes: &[u8]) -> String {
    let end = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
    String::from_utf8_lossy(&bytes[..end]).into_owned()
}

fn field(error: &[u8], code: u8) -> Option<String> {
    error
        .split(|byte| *byte == 0)
        .find(|part| part.first() == Some(&code))
        .map(|part| text_of(&part[1..]))
}

fn message_of(error: &[u8]) -> String {
    field(error, b'M').unwrap_or_else(|| "an error without a message".into())
}

fn columns(body: &[u8]) -> io::Result<Vec<Option<String>>> {
    let short = || invalid("a row that is cut off");
    let count = u16::from_be_bytes(
        body.get(..2)
            .and_then(|bytes| bytes.try_into().ok())
            .ok_or_else(short)?,
    );
    let mut rest = &body[2..];
    let mut out = Vec::with_capacity(usize::from(count));
    for _ in 0..count {
        let (head, after) = rest.split_at_checked(4).ok_or_else(short)?;
        let len = i32::from_be_bytes(head.try_into().map_err(|_| short())?);
        rest = after;
        let Ok(len) = usize::try_from(len) else {
            out.push(None);
            continue;
        };
        let (value, after) = rest.split_at_checked(len).ok_or_else(short)?;
        out.push(Some(String::from_utf8_lossy(value).into_owned()));
        rest = after;
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_and_errors_are_read_and_nonsense_is_refused() {
        let row = [&[0, 2][..], &3i32.to_be_bytes(), b"abc", &(-1i32).to_be_bytes()].concat();
        assert_eq!(columns(&row).unwrap(), [Some("abc".to_owned()), None]);
        assert!(columns(&row[..6]).is_err());
        assert!(columns(&[]).is_err());
        assert_eq!(message_of(b"SFATAL\0Mno such thing\0\0"), "no such thing");
    }
}
