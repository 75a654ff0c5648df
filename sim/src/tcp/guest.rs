//! A guest: a service whose answers depend on the bytes of their own connection only (but for clocks and a counter), on a TCP that
//! picks its own numbers.
//!
//! A request is a kind, a length and so many bytes.

use super::endpoint::{Tcp, reset_for};
use super::frame::{ACK, RST, SYN, Seg, read, write};
use super::random::{Random, mix};
use dunlin_core::agreed::Frame;
use std::collections::{BTreeMap, VecDeque};

/// What a client can ask for.
pub const ASK: u8 = 0;
/// An answer that begins with the time: no two VMs give the same.
pub const CLOCK: u8 = 1;
/// An answer, and the end of the connection.
pub const QUIT: u8 = 2;
/// The end without an answer: a reset.
pub const ABORT: u8 = 3;

/// An answer that begins with how many of its kind there were, on all connections. Two VMs that were given the same in another
/// order say something else.
pub const COUNT: u8 = 4;

/// How many bytes of an answer a clock takes, or the counter.
pub const OWN_BYTES: usize = 8;

/// How many connections of one client a guest remembers that are over.
const REMEMBERED: usize = 2;

/// What every copy of the service answers, but for the clock and the counter.
pub fn answer(request: &[u8]) -> Vec<u8> {
    let seed = request.iter().fold(7, |seed, byte| mix(seed ^ u64::from(*byte)));
    let length = OWN_BYTES + (seed % 500) as usize;
    (0..length).map(|n| mix(seed + n as u64 / 4) as u8).collect()
}

#[derive(Clone, Debug)]
pub struct Served {
    pub tcp: Tcp,
    read_to: usize,
}

/// The state of a VM.
#[derive(Clone, Debug, Default)]
pub struct Guest {
    /// All that there ever were; over ones are history.
    pub served: Vec<Served>,
    live: BTreeMap<usize, usize>,
    ring: VecDeque<Frame>,
    /// What it has counted.
    counter: u64,
}

impl Guest {
    /// An input in the NIC's ring.
    pub fn queue(&mut self, frame: Frame) {
        self.ring.push_back(frame);
    }

    pub fn has_work(&self) -> bool {
        !self.ring.is_empty()
    }

    /// The newest connection of `client` that began with `iss`.
    pub fn connection(&self, client: usize, iss: u32) -> Option<&Tcp> {
        self.served
            .iter()
            .rev()
            .map(|served| &served.tcp)
            .find(|tcp| tcp.client() == client && tcp.irs == iss)
    }

    /// Forgets connections that are over, but for the newest: no client asks for an older one.
    pub fn forget_history(&mut self) {
        let mut newer = BTreeMap::<usize, usize>::new();
        let mut is_kept: Vec<bool> = (self.served.iter().enumerate().rev())
            .map(|(at, served)| {
                let client = served.tcp.client();
                let newer = newer.entry(client).or_default();
                *newer += 1;
                *newer <= REMEMBERED || self.live.get(&client) == Some(&at)
            })
            .collect();
        is_kept.reverse();
        for live in self.live.values_mut() {
            *live = is_kept[..*live].iter().filter(|kept| **kept).count();
        }
        let mut each = is_kept.into_iter();
        self.served.retain(|_| each.next().unwrap_or(true));
    }

    /// Whether it has heard what no TCP should ever hear. Echoes may be `most_ahead` ticks ahead of its clock.
    pub fn no_trouble(&mut self, most_ahead: i32) -> Result<(), String> {
        for served in &mut self.served {
            let ahead = std::mem::take(&mut served.tcp.echo_ahead);
            if ahead > most_ahead {
                return Err(format!(
                    "a guest heard an echo {ahead} ticks ahead of its own clock"
                ));
            }
            if let Some(trouble) = &served.tcp.trouble {
                return Err(format!("a guest heard {trouble}"));
            }
        }
        Ok(())
    }

    /// When it has to do something without an input.
    pub fn timer(&self) -> Option<u64> {
        self.live
            .values()
            .filter_map(|at| self.served[*at].tcp.timer())
            .min()
    }

    /// Works off one input, if there is one, and whatever is due. It may lose the input inside.
    pub fn work(&mut self, now: u64, loses: bool, random: &mut Random) -> Vec<Frame> {
        let mut said = Vec::new();
        if let Some(frame) = self.ring.pop_front()
            && !loses
            && let Some(seg) = read(&frame)
        {
            self.input(&seg, now, random, &mut said);
        }
        for at in self.live.values() {
            let served = &mut self.served[*at];
            served.serve(now, &mut self.counter, random, &mut said);
            served.tcp.poll(now, random, &mut said);
        }
        let served = &self.served;
        self.live.retain(|_, at| {
            let tcp = &served[*at].tcp;
            !(tcp.is_dead() || tcp.is_done() && tcp.passive_close)
        });
        said.iter().map(write).collect()
    }

    fn input(&mut self, seg: &Seg, now: u64, random: &mut Random, said: &mut Vec<Seg>) {
        let opens = seg.flags & (SYN | ACK | RST) == SYN;
        if let Some(at) = self.live.get(&seg.client) {
            let tcp = &mut self.served[*at].tcp;
            // Its last words may still be repeated; a newer connection of the same name ends that.
            let next = tcp.irs.wrapping_add(tcp.received as u32);
            if !(opens && tcp.is_done() && (seg.seq.wrapping_sub(next) as i32) > 0) {
                return tcp.receive(seg, now, random, said);
            }
        }
        if opens {
            let (tcp, syn) = Tcp::accept(seg, random.number(), random.number(), now);
            self.live.insert(seg.client, self.served.len());
            self.served.push(Served { tcp, read_to: 0 });
            said.push(syn);
        } else if !seg.has(RST) {
            said.push(reset_for(seg));
        }
    }
}

impl Served {
    fn serve(&mut self, now: u64, counter: &mut u64, random: &mut Random, said: &mut Vec<Seg>) {
        while let [kind, length, rest @ ..] = &self.tcp.incoming[self.read_to..]
            && let Some(request) = rest.get(..usize::from(*length))
            && !self.tcp.closing
            && !self.tcp.is_dead()
        {
            if *kind == ABORT {
                said.push(self.tcp.abort(now));
                return;
            }
            let mut answer = answer(request);
            if *kind == CLOCK {
                answer[..OWN_BYTES].copy_from_slice(&random.draw().to_be_bytes());
            }
            if *kind == COUNT {
                *counter += 1;
                answer[..OWN_BYTES].copy_from_slice(&counter.to_be_bytes());
            }
            self.tcp.closing = *kind == QUIT;
            self.read_to += 2 + request.len();
            self.tcp.out.extend(answer);
        }
        if self.tcp.peer_fin.is_some_and(|fin| self.tcp.received > fin) {
            self.tcp.closing = true;
        }
    }
}
