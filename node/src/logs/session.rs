//! The conversations about a log: a writer's, a reader's, and one that is passed on to the host that leads.
//!
//! * **Flow:** a writer says `write`, hears `Open`, and then says a [`LogLine`] a line; each is answered, in the order of agreement.
//!   A thread writes the answers. On a host that does not lead, both directions are passed on over the authenticated link between
//!   daemons. A reader's thread takes batches of [`Retained`] and writes them.
//! * **Invariants:** 1. after a refusal nothing of the conversation is taken any more, so what a proposer has under way is
//!   always a stretch of its numbers. 2. [`UNDER_WAY`] proposals of a conversation are under way at most: then its lines are not read.
//!   3. a side that is gone is noticed, for something is said every [`ALIVE`]. 4. a log that ends here ends its conversations, also those
//!   that say nothing meanwhile.
//! * **Not here:** agreement (`run`).

use super::LogPort;
use super::retained::{Kept, Look};
use super::run::Asked;
use crate::control::server::AnswerTo;
use base64::Engine;
use base64::engine::general_purpose::STANDARD as BASE64;
use crossbeam_channel::{Receiver, RecvTimeoutError, bounded};
use dunlin_api::Answer;
use dunlin_api::log::{LogAnswer, LogLine};
use dunlin_core::logged::{MOST_ENTRY_BYTES, MOST_NAME_BYTES, Proposal};
use std::io::{self, BufRead, BufReader, BufWriter, Read, Write};
use std::time::{Duration, Instant};

/// Proposals of one conversation that are under way.
pub const UNDER_WAY: usize = 256;
/// A line is no longer than the largest entry in base64, and its number.
const MOST_LINE_BYTES: u64 = (MOST_ENTRY_BYTES * 4 / 3 + 256) as u64;
/// Something is said so often.
pub const ALIVE: Duration = Duration::from_secs(5);
/// What is said where the log has ended.
const GONE: &str = "the log is not on this host any more";
/// So long a leader is waited for.
pub const LEADER: Duration = Duration::from_secs(5);

/// Takes a writer's proposals on the host that leads, until it hangs up or something is refused. `end` hangs up on it.
pub fn write<W: Write + Send>(
    log: &LogPort,
    by: Option<String>,
    lines: impl Read,
    mut out: W,
    end: impl FnOnce(W) + Send,
) {
    // A line of the answers' and the refusal that ends it are more than what is under way.
    let (to_writer, answers) = bounded(UNDER_WAY + 2);
    let (take, given_back) = bounded::<()>(UNDER_WAY);
    std::thread::scope(|scope| {
        // Gone when the lines end: the answers end with the last one that is owed, and the scope waits for them.
        let reply = to_writer;
        let writer = std::thread::Builder::new().name("log-answers".into());
        let answering = writer.spawn_scoped(scope, move || {
            // Whoever listened has gone.
            let _ = tell(&answers, &given_back, &mut out, || log.retained().has_ended());
            end(out);
        });
        if let Err(error) = answering {
            tracing::error!("a thread for a log's answers: {error}");
            return;
        }
        let mut lines = BufReader::new(lines);
        let mut line = String::new();
        loop {
            line.clear();
            match (&mut lines).take(MOST_LINE_BYTES).read_line(&mut line) {
                Ok(0) | Err(_) => return,
                Ok(_) if line.trim().is_empty() => continue,
                Ok(_) => {}
            }
            let (number, proposal) = match understood(&line, by.as_ref()) {
                Ok(understood) => understood,
                Err((number, why)) => {
                    let again = false;
                    let _ = reply.try_send(LogAnswer::Refused { number, why, again });
                    return;
                }
            };
            // Invariant 2; an error is the answers' end.
            if take.send(()).is_err() {
                return;
            }
            let asked = Asked {
                proposal,
                number,
                reply: reply.clone(),
            };
            if !log.propose(asked) {
                // Another host may have the log: a new conversation is told.
                let (why, again) = (GONE.to_owned(), true);
                let _ = reply.try_send(LogAnswer::Refused { number, why, again });
                return;
            }
        }
    });
}

fn understood(line: &str, by: Option<&String>) -> Result<(u64, Proposal), (u64, String)> {
    let refused = |why: String| (0, why);
    if line.len() as u64 >= MOST_LINE_BYTES {
        return Err(refused(format!("an entry has at most {MOST_ENTRY_BYTES} bytes")));
    }
    let LogLine { number, data } = serde_json::from_str(line)
        .map_err(|error| refused(format!("the proposal cannot be understood: {error}")))?;
    let data = BASE64
        .decode(data)
        .map_err(|error| (number, format!("the proposal's data is no base64: {error}")))?;
    let proposal = Proposal {
        by: by.map(|name| (name.clone(), number)),
        data: data.into(),
    };
    match proposal.fault() {
        None => Ok((number, proposal)),
        Some(why) => Err((number, why)),
    }
}

/// Writes what is answered, until it ends or something was refused (invariant 1), or the log has ended (invariant 4).
fn tell(
    answers: &Receiver<LogAnswer>,
    given_back: &Receiver<()>,
    out: impl Write,
    has_ended: impl Fn() -> bool,
) -> io::Result<()> {
    let mut out = BufWriter::new(out);
    loop {
        match answers.recv_timeout(ALIVE) {
            Ok(answer) => {
                let _ = given_back.try_recv();
                let refused = matches!(answer, LogAnswer::Refused { .. });
                put(&mut out, &Answer::Log(answer))?;
                if refused {
                    return out.flush();
                }
                if answers.is_empty() {
                    out.flush()?;
                }
            }
            // What the loop was given in its last moment is answered by nobody.
            Err(RecvTimeoutError::Timeout) if has_ended() => return out.answer(&Answer::failed(GONE)),
            Err(RecvTimeoutError::Timeout) => out.answer(&Answer::Alive)?,
            Err(RecvTimeoutError::Disconnected) => return out.flush(),
        }
    }
}

fn put(out: &mut impl Write, answer: &Answer) -> io::Result<()> {
    serde_json::to_writer(&mut *out, answer)?;
    out.write_all(b"\n")
}

/// What is wrong with a proposer's name, if anything is.
pub fn name_fault(by: Option<&String>) -> Option<String> {
    let by = by.filter(|name| name.is_empty() || name.len() > MOST_NAME_BYTES)?;
    Some(format!(
        "a proposer's name has 1 to {MOST_NAME_BYTES} bytes, not {}",
        by.len()
    ))
}

/// Gives a reader the entries from `from` on.
pub fn read(log: &LogPort, from: u64, follow: bool, most: Option<u64>, out: impl Write) -> io::Result<()> {
    let mut out = BufWriter::new(out);
    let (mut next, mut left, mut said) = (from, most.unwrap_or(u64::MAX), Instant::now());
    loop {
        // Invariant 3, also where the log goes on with nothing that is news.
        let wait = match follow {
            true => ALIVE.saturating_sub(said.elapsed()),
            false => Duration::ZERO,
        };
        let entries = match log.retained().look(next, wait) {
            Look::Entries { batch, next: on } => {
                next = on;
                batch
            }
            Look::Compacted(first) => {
                put(&mut out, &Answer::Log(LogAnswer::Compacted { first }))?;
                let why =
                    format!("entry {next} is compacted: the oldest on this host is {first}; read from there");
                return out.answer(&Answer::failed(why));
            }
            Look::Ended => return out.answer(&Answer::failed(GONE)),
        };
        let none = entries.is_empty();
        for entry in entries {
            if left == 0 {
                break;
            }
            left -= 1;
            put(&mut out, &said_of(entry))?;
        }
        if left == 0 || (none && !follow) {
            return out.answer(&Answer::done(""));
        }
        if none {
            if said.elapsed() < ALIVE {
                continue;
            }
            put(&mut out, &Answer::Alive)?;
        }
        said = Instant::now();
        out.flush()?;
    }
}

fn said_of(entry: Kept) -> Answer {
    let (by, number) = entry.by.unzip();
    Answer::Log(LogAnswer::Entry {
        index: entry.index,
        term: entry.term,
        by,
        number,
        data: BASE64.encode(&entry.data),
    })
}

/// Passes on what one side says to the other, until either ends.
pub fn pass_on(mut from: impl Read, mut to: impl Write) {
    let mut buffer = vec![0; 64 << 10];
    loop {
        match from.read(&mut buffer) {
            Ok(0) => return,
            Ok(bytes) => {
                if to.write_all(&buffer[..bytes]).and_then(|()| to.flush()).is_err() {
                    return;
                }
            }
            // Nothing to say: whoever listens is not to hang up.
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) => {
                if to.write_all(b"\n").and_then(|()| to.flush()).is_err() {
                    return;
                }
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(_) => return,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixStream;

    #[test]
    fn a_writer_has_a_bounded_number_of_proposals_under_way() {
        let (port, asked) = crate::logs::tests::port();
        let (mut near, far) = UnixStream::pair().expect("a pair");
        let out = far.try_clone().expect("another end");
        let session = std::thread::spawn(move || {
            write(&port, Some("w".into()), &far, out, |out| {
                let _ = out.shutdown(std::net::Shutdown::Both);
            });
        });
        let lines: String = (1..=1000)
            .map(|number| format!("{{\"number\":{number},\"data\":\"\"}}\n"))
            .collect();
        near.write_all(lines.as_bytes()).expect("the socket takes them");
        let mut waiting = Vec::new();
        let patience = Duration::from_secs(60);
        while waiting.len() < UNDER_WAY {
            waiting.push(asked.recv_timeout(patience).expect("a proposal"));
        }
        // Nothing more comes until one is answered: looked at for a moment only, so this can miss a fault, never invent one.
        assert!(asked.recv_timeout(Duration::from_millis(20)).is_err());
        let first = waiting.remove(0);
        let agreed = LogAnswer::Agreed {
            number: first.number,
            index: 7,
            repeated: false,
        };
        first.reply.try_send(agreed).expect("room for an answer");
        let next = asked.recv_timeout(patience).expect("the next proposal");
        assert_eq!(next.number, UNDER_WAY as u64 + 1);
        let refused = LogAnswer::Refused {
            number: 2,
            why: "no".into(),
            again: true,
        };
        next.reply.try_send(refused).expect("room for an answer");
        // What was not read of the proposals makes the end a reset; the answers come before it.
        let mut said = Vec::new();
        if let Err(error) = near.read_to_end(&mut said) {
            assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset);
        }
        let said = String::from_utf8(said).expect("text");
        assert!(
            said.contains("\"index\":7") && said.lines().count() == 2,
            "{said}"
        );
        drop((waiting, next, asked));
        session.join().expect("the conversation ends");
    }

    /// A writer's conversation, and the writer's end of it.
    fn conversation(port: LogPort) -> (std::thread::JoinHandle<()>, BufReader<UnixStream>) {
        let (near, far) = UnixStream::pair().expect("a pair");
        let out = far.try_clone().expect("another end");
        let session = std::thread::spawn(move || {
            write(&port, None, &far, out, |out| {
                let _ = out.shutdown(std::net::Shutdown::Both);
            });
        });
        (session, BufReader::new(near))
    }

    fn next_line(said: &mut impl BufRead) -> String {
        let mut line = String::new();
        said.read_line(&mut line).expect("what is said");
        line
    }

    #[test]
    fn a_writer_hears_at_once_that_the_log_has_ended() {
        let (port, asked) = crate::logs::tests::port();
        let (session, mut said) = conversation(port);
        drop(asked);
        let line = b"{\"number\":7,\"data\":\"\"}\n";
        said.get_mut().write_all(line).expect("the socket takes it");
        let refused = next_line(&mut said);
        assert!(
            refused.contains("\"refused\"") && refused.contains("\"number\":7"),
            "{refused}"
        );
        assert_eq!(next_line(&mut said), "", "nothing follows");
        session.join().expect("the conversation ends");
    }

    #[test]
    fn a_writer_that_says_nothing_hears_that_the_log_has_ended() {
        let (port, _asked) = crate::logs::tests::port();
        port.retained().end();
        let (session, mut said) = conversation(port);
        let failed = next_line(&mut said);
        assert!(failed.contains(GONE), "{failed}");
        assert_eq!(next_line(&mut said), "", "nothing follows");
        session.join().expect("the conversation ends");
    }

    #[test]
    fn a_reader_that_has_gone_is_noticed_whatever_the_log_does() {
        let (port, _asked) = crate::logs::tests::port();
        let port = std::sync::Arc::new(port);
        port.retained().begin(1);
        let (near, far) = UnixStream::pair().expect("a pair");
        drop(near);
        let reader = std::thread::spawn({
            let port = port.clone();
            move || read(&port, 0, true, None, far)
        });
        // The log goes on meanwhile, with nothing that a reader is shown.
        let began = Instant::now();
        let mut last = 0;
        while !reader.is_finished() && began.elapsed() < ALIVE * 2 {
            last += 1;
            port.retained().push(vec![], last);
            std::thread::sleep(Duration::from_millis(20));
        }
        assert!(reader.is_finished(), "nobody noticed that the reader has gone");
        let ended = reader.join().expect("the reader");
        assert_eq!(ended.expect_err("it has gone").kind(), io::ErrorKind::BrokenPipe);
    }
}
