//! One connection: what the client calls its numbers, and what the VM here calls them.

use super::ends::Ends;
use crate::output::packet::{Segment, Timestamps, before};

/// Ticks by which the VM's timestamps jump ahead when another host begins to speak for it: ten seconds of Linux's.
pub(super) const MARGIN_TICKS: u32 = 10_000;

/// An echo is believed of a segment whose numbers are no further than this from what the VM here has said and acknowledged.
const NEAR_BYTES: u32 = 64 << 20;
/// So far may an echo be ahead of what the VM here has said, in ticks: more than four hours.
const MOST_AHEAD_TICKS: i32 = 1 << 24;

/// How far the VM's sequence numbers are from the ones that the client knows.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Numbers {
    /// The VM here opened or accepted it with `isn`; the client has not yet said what it was told.
    Open {
        /// The VM's initial sequence number.
        isn: u32,
        /// The other end's, if the VM accepted it.
        peer_isn: Option<u32>,
    },
    /// A client's number is the VM's number and this.
    Known(u32),
}

/// A FIN: what acknowledges it, and whether that came.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Fin {
    /// The number after it, in its sender's VM's numbers.
    pub(super) end: u32,
    /// Whether the receiver has acknowledged it.
    pub(super) acknowledged: bool,
}

/// The timestamps of a connection before the last take-over: the client goes on echoing them for a while.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Past {
    /// What was added to the VM's timestamps then.
    pub(super) ticks: u32,
    /// What the first word after the take-over must reach, in the client's numbers, if the client has echoed anything.
    pub(super) floor: Option<u32>,
    /// The first timestamp after the take-over, in the client's numbers, once there was one.
    pub(super) first: Option<u32>,
    /// The time before the take-over before, if it may be that nothing was said between the two.
    pub(super) older: Option<Older>,
}

/// Timestamps below `until`, in the client's numbers, are the VM's and `ticks`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Older {
    pub(super) ticks: u32,
    pub(super) until: u32,
}

impl Past {
    fn ticks_of(&self, echo: u32) -> u32 {
        let older = self.older.filter(|older| before(echo, older.until));
        older.map_or(self.ticks, |older| older.ticks)
    }

    /// Whether `echo` is of a word that the host before this one said after its own take-over, whose first word this host
    /// was not told of: that one may have been raised to `until`, and then more than `ticks` was added.
    fn may_be_raised(&self, echo: u32) -> bool {
        self.older.is_some_and(|older| !before(echo, older.until))
    }
}

/// One connection, as far as this host knows. Numbers are the VM's own unless they say otherwise.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Connection {
    pub(super) numbers: Numbers,
    /// The ISN it was opened with here: what tells a repeated SYN from a new connection.
    pub(super) isn: Option<u32>,
    /// A client's timestamp is the VM's and this; nothing: and the common raise.
    pub(super) ticks: Option<u32>,
    /// After the last number that the VM here has sent, once that is sure.
    pub(super) sent: Option<u32>,
    /// What the client has acknowledged.
    pub(super) heard_ack: Option<u32>,
    /// What the VM here has acknowledged.
    pub(super) said_ack: Option<u32>,
    /// The last timestamp of the VM here.
    pub(super) said_ticks: Option<u32>,
    /// The last of the VM's timestamps that the client has echoed, in the client's numbers.
    pub(super) echo: Option<u32>,
    /// What was different about its timestamps before the last take-over.
    pub(super) past: Option<Past>,
    pub(super) vm_fin: Option<Fin>,
    pub(super) peer_fin: Option<Fin>,
    /// Where the client's reset stood. The VM may have lost it inside: then it goes on, and must not hear other numbers.
    pub(super) reset: Option<u32>,
    /// The VM has begun another connection between the same ends. Its SYN is still held: until that leaves, what leaves
    /// is of this one, but all that comes is for the other.
    pub(super) superseded: bool,
}

/// The later of two numbers on the circle.
fn later(old: Option<u32>, new: u32) -> Option<u32> {
    Some(old.filter(|old| before(new, *old)).unwrap_or(new))
}

impl Connection {
    /// One that the VM here and the client number alike.
    pub(super) fn alike() -> Self {
        Self::with(Numbers::Known(0))
    }

    /// For the other host's table: one that the VM has reset when it had acknowledged `received`. Nothing else is told of it,
    /// and nothing of a client's reset where the numbers are alike.
    pub(super) fn ended(received: u32) -> Self {
        Self {
            reset: Some(received),
            ..Self::alike()
        }
    }

    /// What such a one says.
    pub(super) fn ended_at(&self) -> Option<u32> {
        self.reset.filter(|received| *self == Self::ended(*received))
    }

    pub(super) fn with(numbers: Numbers) -> Self {
        Self {
            numbers,
            isn: None,
            ticks: None,
            sent: None,
            heard_ack: None,
            said_ack: None,
            said_ticks: None,
            echo: None,
            past: None,
            vm_fin: None,
            peer_fin: None,
            reset: None,
            superseded: false,
        }
    }

    /// The one that this SYN or SYN-ACK of the VM here begins.
    pub(super) fn opened(syn: &Segment) -> Self {
        let peer_isn = syn.ack_flag().then(|| syn.ack.wrapping_sub(1));
        Self {
            isn: Some(syn.seq),
            sent: Some(syn.seq_end()),
            ..Self::with(Numbers::Open {
                isn: syn.seq,
                peer_isn,
            })
        }
    }

    pub(super) fn is_open(&self) -> bool {
        matches!(self.numbers, Numbers::Open { .. })
    }

    /// Nothing is known of it but what the client said.
    pub(super) fn is_silent(&self) -> bool {
        let untouched = self.numbers == Numbers::Known(0) && self.ticks.is_none();
        untouched && self.said_ack.is_none() && self.vm_fin.is_none()
    }

    /// Both ends have said and heard that it is over.
    pub(super) fn is_closed(&self) -> bool {
        let acknowledged = |fin: Option<Fin>| fin.is_some_and(|fin| fin.acknowledged);
        acknowledged(self.vm_fin) && acknowledged(self.peer_fin)
    }

    /// These ends are closed, and the other ones have heard of it.
    pub(super) fn close(&mut self, ends: Ends) {
        let heard = |end| Fin {
            end,
            acknowledged: true,
        };
        self.vm_fin = ends.vm.map(heard).or(self.vm_fin);
        self.peer_fin = ends.peer.map(heard).or(self.peer_fin);
    }

    /// Nothing more of it matters to the client.
    pub(super) fn is_over(&self) -> bool {
        self.reset.is_some() || self.is_closed()
    }

    /// How far the VM here has acknowledged what the client said, of a connection that the client has opened and not reset.
    pub(super) fn received(&self) -> Option<u32> {
        self.said_ack.filter(|_| !self.is_open() && self.reset.is_none())
    }

    /// Whether another host would get this connection's numbers wrong without being told.
    pub(super) fn is_worth_telling(&self) -> bool {
        let unsettled = self
            .past
            .is_some_and(|past| past.floor.is_some() && past.first.is_none());
        // The client may repeat its end when the VM has forgotten the connection.
        let ends = self.peer_fin.is_some();
        let alike = self.numbers == Numbers::Known(0) && self.ticks.is_none() && !unsettled && !ends;
        !alike && !self.superseded
    }

    /// What to add to the VM's numbers for the client.
    pub(super) fn delta(&self) -> Option<u32> {
        match self.numbers {
            Numbers::Known(delta) => Some(delta),
            Numbers::Open { .. } => None,
        }
    }

    /// The VM here said `segment`.
    pub(super) fn said(&mut self, segment: &Segment) {
        if segment.syn() {
            if let Numbers::Open { peer_isn, .. } = &mut self.numbers
                && segment.ack_flag()
            {
                *peer_isn = Some(segment.ack.wrapping_sub(1));
            }
        } else if self.sent.is_none() && !self.tells_what_was_sent(segment) {
            // Not sure yet: `sent` stays unknown, and nothing is clamped.
        } else {
            self.sent = later(self.sent, segment.seq_end());
        }
        if segment.ack_flag() {
            self.said_ack = later(self.said_ack, segment.ack);
            // Nothing comes behind a client's end: what the VM has got more than that of was none.
            self.peer_fin = (self.peer_fin).filter(|fin| fin.acknowledged || !before(fin.end, segment.ack));
            if let Some(fin) = &mut self.peer_fin {
                fin.acknowledged |= !before(segment.ack, fin.end);
            }
        }
        if let Some(Timestamps { value, .. }) = segment.timestamps {
            self.said_ticks = later(self.said_ticks, value);
        }
        if segment.fin() {
            let acknowledged = self.vm_fin.is_some_and(|fin| fin.acknowledged);
            let end = segment.seq_end();
            self.vm_fin = Some(Fin { end, acknowledged });
        }
    }

    /// After a sync this host does not know how far the VM has sent. A segment with bytes may be sent for the second
    /// time; one without them carries the next number, unless it is a keep-alive, which steps back by one.
    fn tells_what_was_sent(&self, segment: &Segment) -> bool {
        segment.is_pure_ack() && self.heard_ack.is_some_and(|ack| !before(segment.seq, ack))
    }

    /// An acknowledgement for the VM, in its numbers: of nothing that it has not sent, or Linux would drop the segment
    /// with all that it carries.
    pub(super) fn clamped(&self, ack: u32) -> u32 {
        self.sent.filter(|sent| before(*sent, ack)).unwrap_or(ack)
    }

    /// Whether `segment` of the VM, a RST, ends it. A RST that answers a stray segment carries that one's numbers.
    pub(super) fn ends_with(&self, segment: &Segment) -> bool {
        self.sent.is_none_or(|sent| sent == segment.seq)
    }

    /// What the client is told in place of `segment`, a reset: the VM has forgotten the connection, both ends of which are
    /// closed, and the client repeats itself, because what acknowledged its end never left or got lost. Without
    /// replication there is no such client: the VM forgets when its own FIN is acknowledged, and that FIN would have
    /// acknowledged the client's. But the client may have heard another VM's, which did not.
    pub(super) fn last_word(&self, segment: &Segment) -> Option<u32> {
        let (vm, peer) = self.vm_fin.zip(self.peer_fin)?;
        let is_answer = segment.rst() && !segment.ack_flag() && segment.payload.is_empty();
        (self.is_closed() && is_answer && segment.seq == vm.end).then_some(peer.end)
    }

    /// The first word of the client since the VM here opened it: the client repeats the number that *it* was told.
    pub(super) fn learn(&mut self, segment: &Segment, raise: u32) {
        let Numbers::Open { isn, peer_isn } = self.numbers else {
            return;
        };
        let fits = match (segment.syn(), segment.rst(), peer_isn) {
            // The answer to the VM's SYN: accepted or refused.
            (true, false, None) | (false, true, None) => true,
            (true, false, Some(peer_isn)) => segment.seq == peer_isn,
            // The third step of the handshake, or what came in its place: within the first window, which is never scaled.
            (false, false, Some(peer_isn)) => segment.seq.wrapping_sub(peer_isn).wrapping_sub(1) <= 0xffff,
            // The other end has heard the SYN of a dead primary, and does not take this host's for the same connection.
            (false, false, None) => self.past.is_some(),
            _ => false,
        };
        // A VM that sent bytes with or right behind its SYN leaves it open how many of them are acknowledged.
        let only_syn = self.sent == Some(isn.wrapping_add(1));
        if !fits || !only_syn || !segment.ack_flag() {
            return;
        }
        self.numbers = Numbers::Known(segment.ack.wrapping_sub(isn).wrapping_sub(1));
        if let (Some(found), Some(said)) = (segment.timestamps, self.said_ticks)
            && found.echo != 0
        {
            let ticks = found.echo.wrapping_sub(said);
            match &mut self.past {
                // The numbers are alike, so this host repeats a SYN from before the last sync, and its clock is right, too.
                // The echo may be older than a take-over: it tells about the past only.
                None if self.numbers == Numbers::Known(0) => {
                    let (floor, first) = (None, None);
                    let older = None;
                    self.past = (ticks != raise).then_some(Past {
                        ticks,
                        floor,
                        first,
                        older,
                    });
                }
                None => self.ticks = (ticks != raise).then_some(ticks),
                // The client heard another host, before this one took over: what that added is past already.
                Some(past)
                    if self.numbers != Numbers::Known(0)
                        || past.first.is_none_or(|first| before(found.echo, first)) =>
                {
                    let floor = Some(found.echo.wrapping_add(MARGIN_TICKS));
                    *past = Past {
                        ticks,
                        floor,
                        first: None,
                        older: None,
                    };
                }
                Some(_) => {}
            }
        }
    }

    /// The client said `segment`, which is whole; its acknowledgement is `ack` in the VM's numbers.
    /// `raise` is what connections without their own figure add to timestamps.
    pub(super) fn heard(&mut self, segment: &Segment, ack: Option<u32>, raise: u32) {
        if segment.rst() && self.said_ack == Some(segment.seq) {
            self.reset = Some(segment.seq);
        }
        if let Some(ack) = ack {
            self.heard_ack = later(self.heard_ack, ack);
            if let Some(fin) = &mut self.vm_fin {
                fin.acknowledged |= !before(ack, fin.end);
            }
        }
        if let Some(found) = segment.timestamps
            && segment.ack_flag()
            && found.echo != 0
            && self.believes(segment, found.echo, raise)
        {
            self.echo = later(self.echo, found.echo);
        }
        if segment.fin() && self.peer_fin.is_none_or(|fin| !fin.acknowledged) {
            let end = segment.seq_end();
            // Anybody can send one with the ports of a connection; the client's lies behind all that the VM has got. A connection of that name that had ended
            // for its clients only would be forgotten, and the real end not be told to the other host.
            if self.said_ack.is_none_or(|ack| !before(end, ack)) {
                // The one that the VM has acknowledged may have come before anything was known here.
                let acknowledged = self.said_ack.is_some_and(|ack| !before(ack, end));
                self.peer_fin = Some(Fin { end, acknowledged });
            }
        }
    }

    /// Whether `echo` is one of this connection's. Anybody can send a segment; after a take-over no word comes below what was echoed, and one
    /// that lies half a circle ahead makes the client throw away all that follows.
    fn believes(&self, segment: &Segment, echo: u32, raise: u32) -> bool {
        let near = |a: u32, b: u32| (a.wrapping_sub(b) as i32).unsigned_abs() <= NEAR_BYTES;
        let ack = self.delta().map(|delta| segment.ack.wrapping_sub(delta));
        let fits = match (self.said_ack, self.sent.zip(ack)) {
            // The VM has opened it, and acknowledged nothing yet.
            (None, Some((sent, ack))) => near(ack, sent),
            (Some(said), Some((sent, ack))) => near(segment.seq, said) && near(ack, sent),
            (Some(said), None) => near(segment.seq, said),
            (None, None) => false,
        };
        // The primary's clock may be ahead of the one here, but not by hours.
        let ahead = |said: u32| {
            let outside = said.wrapping_add(self.ticks.unwrap_or(raise));
            echo.wrapping_sub(outside) as i32
        };
        fits && self.said_ticks.is_none_or(|said| ahead(said) <= MOST_AHEAD_TICKS)
    }

    /// Another host spoke until now, and added `raise` to timestamps; this one adds `more` to that.
    pub(super) fn take_over(&mut self, raise: u32, more: u32) {
        let silent = self.past.filter(|past| past.first.is_none());
        let unsettled = silent.and_then(|past| past.floor);
        // As far as this host knows, nothing was said since the take-over before: echoes below the floor of then are older still.
        let older = silent.and_then(|past| {
            past.older.or(past.floor.map(|until| Older {
                ticks: past.ticks,
                until,
            }))
        });
        let reached = match (self.echo, unsettled) {
            (Some(echo), unsettled) => later(unsettled, echo),
            (None, unsettled) => unsettled,
        };
        self.past = Some(Past {
            ticks: self.ticks.unwrap_or(raise),
            floor: reached.map(|reached| reached.wrapping_add(more)),
            first: None,
            older,
        });
        self.ticks = self.ticks.map(|ticks| ticks.wrapping_add(more));
    }

    /// The client's name for the VM's timestamp `value`. After a take-over the first word settles what is added.
    pub(super) fn ticks_out(&mut self, value: u32, raise: u32) -> u32 {
        let mut outside = value.wrapping_add(self.ticks.unwrap_or(raise));
        if let Some(past) = &mut self.past
            && past.first.is_none()
        {
            if let Some(floor) = past.floor.filter(|floor| before(outside, *floor)) {
                self.ticks = Some(floor.wrapping_sub(value));
                outside = floor;
            }
            past.first = Some(outside);
        }
        outside
    }

    /// The VM's name for the timestamp `echo` that the client repeats: never one that the VM here has not yet said. Where
    /// that cannot be told it is 0, which is no echo.
    pub(super) fn ticks_in(&mut self, echo: u32, raise: u32) -> u32 {
        // Before the first word here, it can be another host's only that has spoken since the take-over.
        let old = self
            .past
            .filter(|past| past.first.or(past.floor).is_none_or(|first| before(echo, first)));
        // Without a first word here its floor still holds: who has spoken said at least that, and the VM here may never say what has brought it.
        if old.is_none() && self.past.is_some_and(|past| past.first.is_some()) {
            self.past = None;
        }
        let ticks = old.map_or(self.ticks.unwrap_or(raise), |past| past.ticks_of(echo));
        let inside = echo.wrapping_sub(ticks);
        match self.said_ticks {
            Some(said) if ticks != 0 && before(said, inside) => said,
            None if old.is_some_and(|past| past.may_be_raised(echo)) => 0,
            _ => inside,
        }
    }
}
