//! `dunlin log`: a shared log from a shell.

use crate::control::client::{Client, ClientError};
use crate::control::http::Conversation;
use crate::daemon::BadInput;
use anyhow::{Context, Result, bail};
use base64::Engine;
use base64::engine::general_purpose::STANDARD as BASE64;
use clap::Subcommand;
use dunlin_api::log::{LogAnswer, LogLine, LogRequest, LogStatus};
use dunlin_api::{Answer, Request};
use std::io::{BufRead, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};

/// A year: longer than anybody waits, and a time that there is.
const LONGEST_WAIT_S: u64 = 365 * 86_400;
/// A pause between two tries.
const PAUSE: Duration = Duration::from_millis(100);

/// What to do with a log.
#[derive(Subcommand)]
pub enum Log {
    /// Makes a log on these hosts. All of them have to answer
    Create {
        /// Its name: letters, digits, '-', '_' and '.'
        log: String,
        /// Its hosts. With three of them, the log survives the loss of any one
        #[arg(required = true)]
        hosts: Vec<String>,
    },
    /// Proposes an entry, or without DATA each line of the standard input. Prints where each entry is in the log, once it is agreed
    #[command(
        after_help = "Each line that is printed is NUMBER INDEX. While the leader changes, a proposal is repeated, but it counts only \
                            once."
    )]
    Propose {
        /// The log
        log: String,
        /// The entry
        data: Option<String>,
        /// The proposer's name, to go on after an interruption; without it, a random one
        #[arg(long, value_name = "NAME")]
        by: Option<String>,
        /// The number of the first proposal. Each number of a proposer counts once; they begin with 1 and have no gaps
        #[arg(long, default_value_t = 1, requires = "by")]
        number: u64,
        /// How long a proposal is repeated while nobody takes it, for example while the log's leader changes
        #[arg(long, default_value_t = 60, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(..=LONGEST_WAIT_S))]
        wait: u64,
    },
    /// Prints agreed entries, each as INDEX, a tab and the entry
    Read {
        /// The log
        log: String,
        /// The first index to print; without it, the oldest one that is kept
        #[arg(long, default_value_t = 0)]
        from: u64,
        /// Print at most this many entries
        #[arg(long)]
        most: Option<u64>,
        /// Go on with new entries as they are agreed
        #[arg(long, short)]
        follow: bool,
        /// Print JSON, one object a line, with the entry in base64
        #[arg(long)]
        json: bool,
    },
    /// Shows the state of this host's logs, and which host leads each
    Status {
        /// Only this log
        log: Option<String>,
        /// Print JSON, one object a line
        #[arg(long)]
        json: bool,
    },
    /// Removes a log from all its hosts, with all that is in it
    Remove {
        /// The log
        log: String,
    },
}

/// Does it.
pub fn run(socket: &Path, what: Log) -> Result<ExitCode> {
    match what {
        Log::Create { log, hosts } => {
            super::talk::simple(socket, &Request::Log(LogRequest::Create { log, hosts }))
        }
        Log::Remove { log } => super::talk::simple(socket, &Request::Log(LogRequest::Remove { log })),
        Log::Status { log, json } => status(socket, log, json),
        Log::Read {
            log,
            from,
            most,
            follow,
            json,
        } => {
            let ask = LogRequest::Read {
                log,
                from,
                follow,
                most,
            };
            read(socket, ask, json)
        }
        Log::Propose {
            log,
            data,
            by,
            number,
            wait,
        } => {
            let by = match by {
                Some(by) => by,
                None => format!("cli-{:016x}", u64::from_be_bytes(dunlin_fabric::keys::random()?)),
            };
            Proposer {
                socket,
                log,
                by,
                wait: Duration::from_secs(wait),
                session: None,
            }
            .run(data, number)
        }
    }
}

fn failed(why: String, code: i32) -> anyhow::Error {
    match code {
        2 => BadInput(why).into(),
        _ => anyhow::anyhow!(why),
    }
}

fn status(socket: &Path, log: Option<String>, json: bool) -> Result<ExitCode> {
    let mut client = Conversation::connect(socket)?;
    client.ask(&Request::Log(LogRequest::Status { log }))?;
    loop {
        match client.next()? {
            Answer::Log(LogAnswer::Status(status)) if json => println!("{}", serde_json::to_string(&status)?),
            Answer::Log(LogAnswer::Status(status)) => show(&status),
            Answer::Failed { why, code } => return Err(failed(why, code)),
            answer if answer.is_last() => return Ok(ExitCode::SUCCESS),
            _ => {}
        }
    }
}

fn show(status: &LogStatus) {
    let LogStatus {
        name,
        leader,
        first,
        last,
        entries,
        bytes,
        ..
    } = status;
    let leader = leader.as_deref().unwrap_or("nobody");
    let hosts: Vec<String> = status
        .hosts
        .iter()
        .map(|host| format!("{}{}", host.host, if host.connected { "" } else { " (away)" }))
        .collect();
    println!(
        "{name}: {}; led by {leader}, term {}; {entries} entries of {bytes} bytes from {first} to {last}; on {}",
        status.state_in_words(),
        status.term,
        hosts.join(", ")
    );
}

fn read(socket: &Path, ask: LogRequest, json: bool) -> Result<ExitCode> {
    let mut client = Conversation::connect(socket)?;
    client.ask(&Request::Log(ask))?;
    let mut out = std::io::stdout().lock();
    loop {
        match client.next()? {
            Answer::Log(LogAnswer::Entry { index, data, .. }) if !json => {
                let data = BASE64.decode(data).context("the daemon's answer is no base64")?;
                write!(out, "{index}\t")?;
                out.write_all(&data)?;
                out.write_all(b"\n")?;
            }
            Answer::Log(answer @ LogAnswer::Entry { .. }) => {
                writeln!(out, "{}", serde_json::to_string(&answer)?)?
            }
            Answer::Failed { why, code } => return Err(failed(why, code)),
            answer if answer.is_last() => return Ok(ExitCode::SUCCESS),
            _ => out.flush()?,
        }
    }
}

/// What becomes of a try.
enum Tried {
    Agreed { index: u64 },
    Again(String),
}

struct Proposer<'a> {
    socket: &'a Path,
    log: String,
    by: String,
    wait: Duration,
    session: Option<Client<UnixStream>>,
}

impl Proposer<'_> {
    fn run(&mut self, data: Option<String>, first: u64) -> Result<ExitCode> {
        if let Some(data) = data {
            self.propose(first, data.as_bytes())?;
            return Ok(ExitCode::SUCCESS);
        }
        for (number, line) in (first..).zip(std::io::stdin().lock().split(b'\n')) {
            self.propose(number, &line.context("reading the standard input")?)?;
        }
        Ok(ExitCode::SUCCESS)
    }

    fn propose(&mut self, number: u64, data: &[u8]) -> Result<()> {
        let line = LogLine {
            number,
            data: BASE64.encode(data),
        };
        let until = Instant::now() + self.wait;
        loop {
            let why = match self.attempt(&line) {
                Ok(Tried::Agreed { index }) => {
                    println!("{number} {index}");
                    // Whoever waits for the line may be a pipe.
                    std::io::stdout().flush()?;
                    return Ok(());
                }
                Ok(Tried::Again(why)) => why,
                Err(error) => match error.downcast_ref::<ClientError>() {
                    Some(ClientError::Gone | ClientError::Io(_)) => error.to_string(),
                    _ => return Err(error),
                },
            };
            self.session = None;
            if Instant::now() >= until {
                bail!("proposal {number} of '{}': {why}", self.by);
            }
            std::thread::sleep(PAUSE); // nothing tells when somebody leads
        }
    }

    fn attempt(&mut self, line: &LogLine) -> Result<Tried> {
        let session = match &mut self.session {
            Some(session) => session,
            None => {
                let mut client = Client::connect(self.socket)?;
                client.ask(&Request::Log(LogRequest::Write {
                    log: self.log.clone(),
                    by: Some(self.by.clone()),
                }))?;
                match client.next()? {
                    Answer::Log(LogAnswer::Open { .. }) => {}
                    Answer::Failed { why, code: 2 } => return Err(BadInput(why).into()),
                    Answer::Failed { why, .. } => return Ok(Tried::Again(why)),
                    other => bail!("the daemon answers something else: {other:?}"),
                }
                self.session.insert(client)
            }
        };
        session.say(line)?;
        loop {
            match session.next()? {
                Answer::Log(LogAnswer::Agreed { number, index, .. }) if number == line.number => {
                    return Ok(Tried::Agreed { index });
                }
                Answer::Log(LogAnswer::Refused { why, again: true, .. }) => return Ok(Tried::Again(why)),
                Answer::Log(LogAnswer::Refused { why, .. }) => return Err(BadInput(why).into()),
                Answer::Failed { why, .. } => return Ok(Tried::Again(why)),
                _ => {}
            }
        }
    }
}
