//! An input that ends both copies: found where both hosts' copies have ended after the same one, and told.
//!
//! Decides:    whether an input has ended both copies: then the program is not begun again (`restart`), and the input not given to it a third time.
//! Flow:       each delivery with a payload -> the last few are kept -> a copy ends -> the other host is asked whether its copy has ended
//!             too, and after which -> event.
//! Invariants: 1. (memory) [`KEPT`] frames are kept; 2. the asking ends after [`ASKS`] questions; 3. of what a client said nothing is told,
//!             but how long it was and a number by which the hosts know it again: whoever may look reads events, and so does `notify_url`.
//! Not here:   the end itself (`copies`).

use super::state::ProgramLoop;
use crate::config::VmConfig;
use crate::vm::{Host, ask_host};
use dunlin_api::{Answer, EventKind, Request};
use dunlin_core::agreed::Frame;
use dunlin_core::output::packet::{Direction, Parsed, parse};
use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use xxhash_rust::xxh3::xxh3_64;

/// A program may have been given a further input or two before its end was seen.
const KEPT: usize = 4;
/// How often the other host is asked, and how long it is waited between and for each answer.
const ASKS: usize = 20;
const BETWEEN: Duration = Duration::from_millis(500);
const WITHIN: Duration = Duration::from_secs(2);
/// An end that comes so long after an input is not that one's: a program that ends by its own clock, or by what it has filled.
const BY_INPUT_US: u64 = 5_000_000;

/// The last inputs that a copy was given, as they were agreed: so they are the same on both hosts.
#[derive(Default)]
pub(super) struct LastInputs {
    /// Each with when it was given.
    kept: VecDeque<(Frame, u64)>,
}

impl LastInputs {
    pub(super) fn given(&mut self, frame: &Frame, now_us: u64) {
        let payload = match parse(frame, Direction::ToVm) {
            Parsed::Tcp(segment) => segment.payload,
            Parsed::Datagram(datagram) => datagram.payload,
            _ => return,
        };
        if !payload.is_empty() {
            if self.kept.len() == KEPT {
                self.kept.pop_front();
            }
            self.kept.push_back((frame.clone(), now_us));
        }
    }

    /// The copy has ended: what it was given long ago did not do that.
    pub(super) fn ended(&mut self, now_us: u64) {
        self.kept
            .retain(|(_, given_us)| now_us.saturating_sub(*given_us) <= BY_INPUT_US);
    }

    /// Newest first, a line each.
    pub(super) fn lines(&self) -> Vec<String> {
        self.kept
            .iter()
            .rev()
            .filter_map(|(frame, _)| line(frame))
            .collect()
    }
}

fn payload(frame: &Frame) -> Option<(String, &[u8])> {
    let (key, number, payload) = match parse(frame, Direction::ToVm) {
        Parsed::Tcp(segment) => (segment.key, Some(segment.seq), segment.payload),
        Parsed::Datagram(datagram) => (datagram.key, None, datagram.payload),
        _ => return None,
    };
    let number = number.map_or_else(String::new, |number| format!(" (TCP {number})"));
    let from = format!("{}{number}", SocketAddr::new(key.peer, key.peer_port));
    Some((from, frame.bytes.get(payload)?))
}

fn line(frame: &Frame) -> Option<String> {
    let (from, payload) = payload(frame)?;
    // Short on purpose: enough to be known again beside length and place, not enough to try out what a password may have been.
    let known_by = xxh3_64(payload) as u16;
    Some(format!(
        "{} bytes from {from}, hash {known_by:04x}",
        payload.len()
    ))
}

impl ProgramLoop {
    /// The copy here has ended by itself.
    pub(super) fn ask_whether_both_ended(&self) {
        let inputs = self.own.last_inputs.lines();
        let Some(other) = self.other().filter(|_| !inputs.is_empty()) else {
            return;
        };
        let (host, config) = (self.host.clone(), self.config.clone());
        let other = config.host_name(other).to_owned();
        let work = move || ask(&host, &config, &other, &inputs);
        // Without it nothing is lost but the explanation.
        let _ = std::thread::Builder::new().name("ended-alike".into()).spawn(work);
    }
}

fn ask(host: &Arc<Host>, config: &VmConfig, other: &str, inputs: &[String]) {
    let vm = &config.name;
    for _ in 0..ASKS {
        std::thread::sleep(BETWEEN);
        let request = Request::Standing { vm: vm.clone() };
        let Answer::Standing(standing) = ask_host(host, other, &request, WITHIN, &mut |_| {}) else {
            continue;
        };
        if let Some(input) = inputs.iter().find(|input| standing.ended_after.contains(input)) {
            let text = format!(
                "the same input has ended the copies on both hosts: {input}. The program is not given it again, and not begun again: nobody \
                 serves. 'dunlin logs {vm}' has its last words; 'dunlin down {vm}' and 'dunlin up' begin it anew"
            );
            return host.events.push(vm, EventKind::PoisonInput, text);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use bytes::Bytes;

    /// A frame of a client, with this payload: Ethernet, IPv4, UDP.
    fn datagram(payload: &[u8]) -> Frame {
        let mut bytes = vec![0; 12];
        bytes.extend([8, 0, 0x45, 0]);
        bytes.extend((28 + payload.len() as u16).to_be_bytes());
        bytes.extend([0, 0, 0, 0, 64, 17, 0, 0, 10, 0, 0, 9, 10, 0, 0, 2]);
        bytes.extend([0x9c, 0x40, 0x1f, 0x90]);
        bytes.extend((8 + payload.len() as u16).to_be_bytes());
        bytes.extend([0, 0]);
        bytes.extend(payload);
        Frame {
            nic: 0,
            bytes: Bytes::from(bytes),
        }
    }

    #[test]
    fn what_is_told_of_an_input_is_not_what_it_said() {
        let mut inputs = LastInputs::default();
        inputs.given(&datagram(b"AUTH hunter2"), 0);
        inputs.given(&datagram(b"AUTH hunter3"), 0);
        let lines = inputs.lines();
        assert!(
            lines[0].starts_with("12 bytes from 10.0.0.9:40000, hash "),
            "{lines:?}"
        );
        assert!(
            lines
                .iter()
                .all(|line| !line.contains("AUTH") && !line.contains("hunter"))
        );
        assert_ne!(lines[0], lines[1], "another input is told from it");
        let mut other = LastInputs::default();
        other.given(&datagram(b"AUTH hunter3"), 0);
        assert_eq!(other.lines()[0], lines[0], "the other host knows it again");
    }

    #[test]
    fn an_input_of_long_ago_ends_nothing_whatever_came_after_it() {
        const SECOND_US: u64 = 1_000_000;
        let mut inputs = LastInputs::default();
        for (payload, second) in [(b"one", 0), (b"two", 60), (b"six", 119)] {
            inputs.given(&datagram(payload), second * SECOND_US);
        }
        let newest = inputs.lines()[0].clone();
        inputs.ended(120 * SECOND_US);
        assert_eq!(inputs.lines(), [newest]);
    }
}
