//! A small server that misbehaves as it is told: what the stories of bare programs run. It is this test's own executable again.
//!
//! * **Decides:** nothing. * **Flow:** `xtask program-server KIND` -> INCR and GET of redis' protocol, so that [`crate::client::Counter`]
//!   can check it, and the commands of [`answer`].
//! * **Not here:** what is expected of whom (`oddities`).

use nix::errno::Errno;
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use parking_lot::Mutex;
use std::collections::{BTreeMap, HashMap};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail};

/// No word of a request is longer.
const LONGEST: usize = 1 << 16;
/// So long after it was told to it ends: longer than what Dunlin takes for the input's doing (5 s).
pub const LATER: Duration = Duration::from_secs(7);
/// Its name as a command of xtask.
pub const COMMAND: &str = "program-server";
/// So often a thread of `races` lets others go first between its reading of a request and its turn.
const YIELDS: usize = 50;
/// Where a server that has executed itself finds its listening socket.
const SOCKET: &str = "DUNLIN_TEST_SOCKET";

type Values = Arc<Mutex<HashMap<String, i64>>>;

/// Serves until it is killed.
///
/// # Errors
/// Where it cannot listen.
pub fn run(kind: &str, port: u16) -> Result<ExitCode> {
    let listener = match std::env::var(SOCKET) {
        // SAFETY: the process that executed this one has left it open for it.
        Ok(number) => unsafe { TcpListener::from_raw_fd(number.parse()?) },
        Err(_) => TcpListener::bind(("0.0.0.0", port)).context("its port")?,
    };
    if kind == "backwards" {
        return backwards(&listener);
    }
    let values = Values::default();
    let descriptor = listener.as_raw_fd();
    for stream in listener.incoming() {
        let stream = stream?;
        stream.set_nodelay(true)?;
        let values = values.clone();
        match kind {
            // Whoever asks is never read.
            "deaf" => std::mem::forget(stream),
            "forks" => {
                // SAFETY: this process has one thread.
                match unsafe { libc::fork() } {
                    0 => {
                        let _ = serve(stream, &values, descriptor, 0);
                        // SAFETY: no destructor of the parent's is the child's.
                        unsafe { libc::_exit(0) }
                    }
                    ..0 => bail!("fork: {}", io::Error::last_os_error()),
                    // SAFETY: collects children that have ended.
                    _ => while unsafe { libc::waitpid(-1, std::ptr::null_mut(), libc::WNOHANG) } > 0 {},
                }
            }
            "threads" => {
                std::thread::spawn(move || serve(stream, &values, descriptor, 0));
            }
            "races" => {
                std::thread::spawn(move || serve(stream, &values, descriptor, YIELDS));
            }
            other => bail!("there is no kind {other:?}: threads, races, forks, deaf, backwards"),
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// One thread that waits for all of its clients in one `epoll`, and answers first whom it was told of last.
fn backwards(listener: &TcpListener) -> Result<ExitCode> {
    let listener_fd = listener.as_raw_fd();
    let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
    let told_of = |fd: i32| EpollEvent::new(EpollFlags::EPOLLIN, fd as u64);
    epoll.add(listener, told_of(listener_fd))?;
    let mut clients: HashMap<i32, BufReader<TcpStream>> = HashMap::new();
    let values = Values::default();
    let mut events = [EpollEvent::empty(); 64];
    loop {
        let count = match epoll.wait(&mut events, EpollTimeout::NONE) {
            // A copy of it was taken.
            Err(Errno::EINTR) => continue,
            told => told?,
        };
        for event in events[..count].iter().rev() {
            let fd = event.data() as i32;
            if fd == listener_fd {
                let (stream, _) = listener.accept()?;
                stream.set_nodelay(true)?;
                epoll.add(&stream, told_of(stream.as_raw_fd()))?;
                clients.insert(stream.as_raw_fd(), BufReader::new(stream));
                continue;
            }
            let client = clients.get_mut(&fd).context("a client that it knows")?;
            let answered = (|| -> Result<()> {
                // What was read is told of no more: all that came with it is answered now.
                loop {
                    let said = answer(&request(client)?, &values, listener_fd)?;
                    client.get_mut().write_all(said.as_bytes())?;
                    if client.buffer().is_empty() {
                        return Ok(());
                    }
                }
            })();
            if answered.is_err() {
                // With its descriptor it leaves the epoll.
                clients.remove(&fd);
            }
        }
    }
}

/// One client's thread, or process. With `yields` it races with the others: whoever is through first has its turn first. That decides what each is
/// told of a key that several count on; no count is lost, and none is given twice.
fn serve(stream: TcpStream, values: &Values, listener: i32, yields: usize) -> Result<()> {
    let mut reader = BufReader::new(stream.try_clone()?);
    let mut writer = stream;
    loop {
        let words = request(&mut reader)?;
        // Nothing is held meanwhile.
        for _ in 0..yields {
            std::thread::yield_now();
        }
        let said = answer(&words, values, listener)?;
        writer.write_all(said.as_bytes())?;
    }
}

fn answer(words: &[String], values: &Values, listener: i32) -> Result<String> {
    let mut values = values.lock();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    Ok(match words[..] {
        ["INCR", key] => {
            let value = values.entry(key.to_owned()).or_default();
            *value += 1;
            format!(":{value}\r\n")
        }
        ["GET", key] => match values.get(key) {
            Some(value) => bulk(&value.to_string()),
            None => "$-1\r\n".to_owned(),
        },
        ["PID"] => format!(":{}\r\n", std::process::id()),
        // No call that anything could answer in its place.
        ["TSC"] => format!(":{}\r\n", time_stamp() >> 1),
        ["EXIT", code] => std::process::exit(code.parse()?),
        ["CRASH"] => std::process::abort(),
        // Not by an input: long after it.
        ["LATER", how] => {
            let how = how.to_owned();
            std::thread::spawn(move || {
                std::thread::sleep(LATER);
                match how.parse() {
                    Ok(code) => std::process::exit(code),
                    Err(_) => std::process::abort(),
                }
            });
            ":1\r\n".to_owned()
        }
        ["EXEC"] => {
            execute_itself(listener)?;
            String::new()
        }
        ["EAT", mib] => {
            let wanted: usize = mib.parse()?;
            let mut eaten = BTreeMap::new();
            for n in 0..wanted {
                // Touched, so that it is there.
                eaten.insert(n, vec![n as u8 | 1; 1 << 20]);
            }
            format!(":{}\r\n", eaten.len())
        }
        _ => "-ERR unknown command\r\n".to_owned(),
    })
}

fn bulk(text: &str) -> String {
    format!("${}\r\n{text}\r\n", text.len())
}

fn time_stamp() -> u64 {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: it reads a counter.
    return unsafe { core::arch::x86_64::_rdtsc() };
    #[cfg(not(target_arch = "x86_64"))]
    0
}

/// The same server in the same process, with its listening socket and nothing else of what it had.
fn execute_itself(listener: i32) -> Result<()> {
    // SAFETY: plain calls: the socket outlives the exec, everything else does not.
    unsafe { libc::fcntl(listener, libc::F_SETFD, 0) };
    let mut arguments = std::env::args_os();
    let program = arguments.next().context("its name")?;
    Err(Command::new(program)
        .args(arguments)
        .env(SOCKET, listener.to_string())
        .exec()
        .into())
}

fn request(reader: &mut impl BufRead) -> Result<Vec<String>> {
    let count = number(reader, '*')?;
    let word = |_| {
        let length = number(reader, '$')?;
        let mut bytes = vec![0; length + 2];
        reader.read_exact(&mut bytes)?;
        bytes.truncate(length);
        Ok(String::from_utf8(bytes)?)
    };
    (0..count).map(word).collect()
}

fn number(reader: &mut impl BufRead, kind: char) -> Result<usize> {
    let mut line = String::new();
    if reader.take(LONGEST as u64).read_line(&mut line)? == 0 {
        bail!("the client has gone");
    }
    let number = line
        .trim_end()
        .strip_prefix(kind)
        .context("no request")?
        .parse()?;
    match number <= LONGEST {
        true => Ok(number),
        false => bail!("{number} is too long"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_counts_and_knows_what_it_has_counted() {
        let values = Values::default();
        let ask = |text: &str| {
            let words = request(&mut text.as_bytes()).expect("a request");
            answer(&words, &values, -1).expect("an answer")
        };
        assert_eq!(ask("*2\r\n$3\r\nGET\r\n$1\r\na\r\n"), "$-1\r\n");
        assert_eq!(ask("*2\r\n$4\r\nINCR\r\n$1\r\na\r\n"), ":1\r\n");
        assert_eq!(ask("*2\r\n$4\r\nINCR\r\n$1\r\na\r\n"), ":2\r\n");
        assert_eq!(ask("*2\r\n$3\r\nGET\r\n$1\r\na\r\n"), "$1\r\n2\r\n");
        assert!(ask("*1\r\n$4\r\nQUIT\r\n").starts_with('-'));
        assert!(request(&mut "*1\r\n$99999999\r\n".as_bytes()).is_err());
    }
}
