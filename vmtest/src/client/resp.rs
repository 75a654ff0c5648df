//! The little of redis' protocol that a counter needs, on one blocking connection.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use super::Boots;

/// How long one read waits before the caller is asked whether to go on.
const SLICE: Duration = Duration::from_millis(200);

/// An answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    /// `:N`
    Integer(i64),
    /// `+TEXT`
    Status(String),
    /// `-TEXT`: the server refuses.
    Error(String),
    /// `$LENGTH`, or nothing for a null.
    Bulk(Option<Vec<u8>>),
}

/// One connection that is never renewed.
pub struct Connection {
    stream: TcpStream,
    buffer: Vec<u8>,
}

impl Connection {
    /// Connects within `timeout`.
    pub fn open(to: SocketAddr, timeout: Duration) -> io::Result<Self> {
        let stream = TcpStream::connect_timeout(&to, timeout)?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(SLICE))?;
        Ok(Self {
            stream,
            buffer: Vec::with_capacity(256),
        })
    }

    /// As [`Self::open`], to a guest that may boot.
    pub fn open_over_boots(to: SocketAddr, give_up: Duration, boots: &Boots) -> io::Result<Self> {
        boots.connect(give_up, |timeout| {
            let open = Self::open(to, timeout)?;
            boots.watch(&open.stream)?;
            Ok(open)
        })
    }

    /// A peer that takes nothing for so long fails a send.
    pub fn set_write_timeout(&self, at_most: Duration) -> io::Result<()> {
        self.stream.set_write_timeout(Some(at_most))
    }

    /// Sends one command. A command of a few bytes always fits into the socket's buffer.
    pub fn send(&mut self, words: &[&str]) -> io::Result<()> {
        let mut text = format!("*{}\r\n", words.len());
        for word in words {
            text.push_str(&format!("${}\r\n{word}\r\n", word.len()));
        }
        self.stream.write_all(text.as_bytes())
    }

    /// Waits for one whole answer, until `deadline`.
    ///
    /// # Errors
    /// `TimedOut` at the deadline, `UnexpectedEof` when the server closed, `InvalidData` for what is no answer.
    pub fn receive(&mut self, deadline: Instant) -> io::Result<Answer> {
        loop {
            if let Some((answer, used)) = parse(&self.buffer)? {
                self.buffer.drain(..used);
                return Ok(answer);
            }
            let mut chunk = [0; 4096];
            match self.stream.read(&mut chunk) {
                Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
                Ok(count) => self.buffer.extend_from_slice(&chunk[..count]),
                Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                    if Instant::now() >= deadline {
                        return Err(ErrorKind::TimedOut.into());
                    }
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// One command and its answer.
    pub fn ask(&mut self, words: &[&str], timeout: Duration) -> io::Result<Answer> {
        self.send(words)?;
        self.receive(Instant::now() + timeout)
    }
}

fn invalid(what: &str) -> io::Error {
    io::Error::new(ErrorKind::InvalidData, format!("no redis answer: {what}"))
}

/// The first answer in `bytes` and its length, or nothing if it is not there whole.
fn parse(bytes: &[u8]) -> io::Result<Option<(Answer, usize)>> {
    let Some(end) = bytes.windows(2).position(|pair| pair == b"\r\n") else {
        return Ok(None);
    };
    let line = std::str::from_utf8(&bytes[..end]).map_err(|_| invalid("not text"))?;
    let used = end + 2;
    let number = |text: &str| text.parse::<i64>().map_err(|_| invalid(text));
    let Some(kind) = line.chars().next() else {
        return Err(invalid("an empty line"));
    };
    let rest = &line[kind.len_utf8()..];
    let answer = match kind {
        ':' => Answer::Integer(number(rest)?),
        '+' => Answer::Status(rest.to_owned()),
        '-' => Answer::Error(rest.to_owned()),
        '$' => {
            let Ok(length) = usize::try_from(number(rest)?) else {
                return Ok(Some((Answer::Bulk(None), used)));
            };
            let Some(data) = bytes.get(used..used + length) else {
                return Ok(None);
            };
            return match bytes.get(used + length..used + length + 2) {
                None => Ok(None),
                Some(b"\r\n") => Ok(Some((Answer::Bulk(Some(data.to_vec())), used + length + 2))),
                Some(_) => Err(invalid("a bulk string that does not end")),
            };
        }
        _ => return Err(invalid(line)),
    };
    Ok(Some((answer, used)))
}

#[cfg(test)]
mod tests {
    use super::{Answer, parse};

    #[test]
    fn answers_are_parsed_only_when_whole() {
        let cases: [(&[u8], Answer); 5] = [
            (b":42\r\n", Answer::Integer(42)),
            (b"+PONG\r\n", Answer::Status("PONG".into())),
            (b"-ERR no\r\n", Answer::Error("ERR no".into())),
            (b"$2\r\n17\r\n", Answer::Bulk(Some(b"17".to_vec()))),
            (b"$-1\r\n", Answer::Bulk(None)),
        ];
        for (bytes, answer) in cases {
            assert_eq!(parse(bytes).unwrap(), Some((answer, bytes.len())));
            for short in 0..bytes.len() {
                assert_eq!(parse(&bytes[..short]).unwrap(), None, "{:?}", &bytes[..short]);
            }
        }
    }

    #[test]
    fn nonsense_is_an_error() {
        for bytes in [
            &b"\r\n"[..],
            b":x\r\n",
            b"HTTP/1.1 200\r\n",
            b"$1\r\nab\r\n",
            b"\xff\xff\r\n",
        ] {
            assert!(parse(bytes).is_err(), "{bytes:?}");
        }
    }
}
