//! The other hosts' connections: each is handed to its VM's loop, or answered here if it is a request.

use super::peers::PATIENCE;
use super::{Daemon, requests};
use crate::control::server::{AnswerTo, read_request};
use crate::logs::hello_name;
use crate::vm::event::LoopEvent;
use crate::vm::receive_checkpoint;
use anyhow::Result;
use dunlin_api::log::LogRequest;
use dunlin_api::{Answer, Request};
use dunlin_fabric::link::{Hello, Listener, NotWelcome, Policy, Purpose, Stream, Welcome};
use std::io::Read;
use std::sync::Arc;

/// Who may connect for what.
pub fn policy(daemon: &Arc<Daemon>) -> Policy {
    let daemon = daemon.clone();
    Arc::new(move |hello: &Hello| {
        let known = || match log_name(hello) {
            Some(log) => daemon.logs().contains_key(log),
            None => daemon.vms().contains_key(&hello.vm),
        };
        // A standby has no part in the VM.
        let of_a_part = !matches!(hello.purpose, Purpose::Control | Purpose::Checkpoint);
        if of_a_part && !known() {
            return Err(NotWelcome(format!("VM '{}' is not known here", hello.vm)));
        }
        Ok(Welcome::default())
    })
}

/// Accepts peers on a thread of its own.
pub fn accept(daemon: &Arc<Daemon>, listener: Listener) -> Result<()> {
    let daemon = daemon.clone();
    std::thread::Builder::new().name("peers".into()).spawn(move || {
        loop {
            match listener.accept() {
                Ok((hello, stream)) => route(&daemon, hello, stream),
                Err(refusal) => tracing::warn!("{refusal}"),
            }
        }
    })?;
    Ok(())
}

fn route(daemon: &Arc<Daemon>, hello: Hello, stream: Stream) {
    if hello.purpose == Purpose::Log {
        daemon.keys.ask_soon(&hello.from);
    }
    if !matches!(hello.purpose, Purpose::Control | Purpose::Checkpoint) {
        if let Some(log) = log_name(&hello) {
            if let Some(log) = daemon.logs().get(log) {
                log.accepted(hello, stream);
            }
            return;
        }
        if let Some(vm) = daemon.vms().get(&hello.vm) {
            vm.send(LoopEvent::Accepted(hello, stream));
        }
        return;
    }
    let daemon = daemon.clone();
    let work = move || match hello.purpose {
        Purpose::Checkpoint => {
            let has_part = |vm: &str| daemon.vms().contains_key(vm);
            receive_checkpoint(&daemon.host.held_memory, &hello, stream, &has_part);
        }
        _ => serve(&daemon, &hello, stream),
    };
    if let Err(error) = std::thread::Builder::new()
        .name("peer-request".into())
        .spawn(work)
    {
        tracing::error!("a thread for another host's request: {error}");
    }
}

/// The log that a connection is about, if it is about one.
fn log_name(hello: &Hello) -> Option<&str> {
    let name = hello.vm.strip_prefix(&hello_name(""))?;
    (hello.purpose == Purpose::Log).then_some(name)
}

fn serve(daemon: &Arc<Daemon>, hello: &Hello, stream: Stream) {
    let timeouts = stream
        .set_read_timeout(Some(PATIENCE))
        .and_then(|()| stream.set_write_timeout(Some(PATIENCE)));
    if timeouts.is_err() {
        return;
    }
    let (mut read, mut write) = stream.split();
    let answer = match read_request((&mut read).take(u64::MAX)) {
        Ok(Some(Request::Log(LogRequest::Write { log, by }))) => {
            return super::logs::write_here(daemon, &log, by, read, write);
        }
        Ok(Some(request)) if request.is_for_peers() => {
            tracing::debug!("host '{}' asks: {request:?}", hello.from);
            requests::from_peer(daemon, request, &mut |answer| {
                // Whoever asked may have gone: here and below.
                let _ = write.answer(answer);
            })
        }
        Ok(Some(_)) => Answer::refused("this is not for other hosts to ask"),
        Ok(None) => return,
        Err(refusal) => refusal,
    };
    let _ = write.answer(&answer);
}
