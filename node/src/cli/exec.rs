//! `exec`: a command in the copy of a bare program on this host, with the standard streams of this one.

use crate::control::client::Client;
use anyhow::{Context, Result, bail};
use dunlin_api::{Answer, Request};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::ExitCode;

pub(super) const EXAMPLES: &str = "\
Examples:
  dunlin exec sessions -- redis-cli dbsize
  dunlin exec sessions -- sh -c 'ss -tn; cat /proc/loadavg'

The command runs as the program's user, behind the program's walls, and sees the copy's files, processes and network. The program sees the
command, too. A command that changes the program's state changes it in one copy alone. If the program runs as root, only root may do this; else
operators may.

Exit codes: the command's own; 128 plus the signal's number if a signal ended it; 125 if it was not run.";

/// The daemon itself refuses, or cannot: none of what shells say of commands.
const NOT_RUN: u8 = 125;

/// Runs it; the exit code is the command's own.
pub fn run(socket: &Path, vm: String, command: Vec<String>, quiet: bool) -> Result<ExitCode> {
    let stream = UnixStream::connect(socket);
    let stream = match stream {
        Ok(stream) => stream,
        // In the words of all other commands.
        Err(_) => {
            return Client::connect(socket)
                .map(|_| ExitCode::from(NOT_RUN))
                .map_err(Into::into);
        }
    };
    let passes = stream.try_clone().context("the control socket")?;
    let mut client = Client::over(stream);
    client.ask(&Request::Exec { vm, command })?;
    loop {
        match client.next()? {
            Answer::Entered { text } => {
                if !quiet {
                    eprintln!("dunlin: {text}");
                }
                pass_streams(&passes).context("the control socket")?;
            }
            Answer::Exited { code } => return Ok(ExitCode::from(u8::try_from(code).unwrap_or(1))),
            Answer::Failed { why, .. } => {
                eprintln!("dunlin: {why}");
                return Ok(ExitCode::from(NOT_RUN));
            }
            Answer::Alive => {}
            _ => bail!("the daemon says what does not belong here (another version?)"),
        }
    }
}

fn pass_streams(socket: &UnixStream) -> std::io::Result<()> {
    let (input, output, error) = (std::io::stdin(), std::io::stdout(), std::io::stderr());
    let streams = [input.as_fd(), output.as_fd(), error.as_fd()];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(3))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    control.push(SendAncillaryMessage::ScmRights(&streams));
    sendmsg(socket, &[IoSlice::new(b"\n")], &mut control, SendFlags::NOSIGNAL)?;
    Ok(())
}
