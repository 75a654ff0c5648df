//! QEMU's messages to a card, on a thread of the card's own.
//!
//! Decides:    which of them `vhost` gets, which takes some that come for a breach of the protocol.
//! Flow:       QEMU's socket -> [`answer`]'s thread -> [`Card`].
//! Invariants: 1. one message is taken at a time, by one of the two; 2. nothing that the guest has set ends the card.
//! Source:     QEMU docs/interop/vhost-user.rst.
//! Not here:   what follows from a message (`card`).

use std::io::{self, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;

use rustix::net::RecvFlags;
use vhost::vhost_user::message::FrontendReq;
use vhost::vhost_user::{BackendReqHandler, Error, VhostUserBackendReqHandler};

use super::card::{Card, Waits};

/// Before a message's content: request, flags and size, 32 bits each.
const HEAD_BYTES: usize = 12;
/// A whole `SET_VRING_ENABLE`: a ring's number and whether it is enabled, 32 bits each.
const ENABLE_BYTES: usize = HEAD_BYTES + 8;
/// A whole `SET_VRING_ADDR`: a ring's number and flags, then descriptors, used ring, available ring and log, 64 bits each.
const ADDRESS_BYTES: usize = HEAD_BYTES + 40;
/// Among a message's flags: QEMU waits for an answer.
const NEED_REPLY: u32 = 8;
/// The flags of an answer, of the protocol's one version.
const REPLY: u32 = 5;

/// QEMU enables a card's rings when it makes the card (`peer_attach` in hw/net/virtio-net.c), before the guest has agreed on any feature; and it hands on where the guest
/// has put a ring, which may be no place for one. `vhost` takes either for a breach of the protocol. Such a message is taken here; true: there was one.
fn taken_here(mut socket: &UnixStream, card: &Card) -> io::Result<bool> {
    let mut message = [0; ADDRESS_BYTES];
    // That QEMU has gone, `vhost` sees as well.
    let Ok((got, _)) =
        rustix::io::retry_on_intr(|| rustix::net::recv(socket, &mut message[..], RecvFlags::PEEK))
    else {
        return Ok(false);
    };
    let word = |at: usize| u32::from_ne_bytes([0, 1, 2, 3].map(|byte| message[4 * at + byte]));
    let long = |at: usize| u64::from(word(at)) | u64::from(word(at + 1)) << 32;
    let [request, flags, size, ring] = [0, 1, 2, 3].map(word);
    let is_whole = |bytes: usize| got >= bytes && size as usize == bytes - HEAD_BYTES;
    if request == FrontendReq::SET_VRING_ENABLE as u32 && is_whole(ENABLE_BYTES) {
        if card.has_features() || flags & NEED_REPLY != 0 {
            return Ok(false);
        }
        let is_enabled = word(4) == 1;
        socket.read_exact(&mut message[..ENABLE_BYTES])?;
        let enabled = card.set_vring_enable(ring, is_enabled);
        return enabled.map(|()| true).map_err(io::Error::other);
    }
    if request == FrontendReq::SET_VRING_ADDR as u32 && is_whole(ADDRESS_BYTES) {
        let [descriptors, used, available] = [5, 7, 9].map(long);
        // What virtio asks of each (2.6, "Split Virtqueues").
        if descriptors % 16 == 0 && used % 4 == 0 && available % 2 == 0 {
            return Ok(false);
        }
        socket.read_exact(&mut message)?;
        card.put_nowhere(ring).map_err(io::Error::other)?;
        if flags & NEED_REPLY != 0 {
            // Followed: 0, in 64 bits.
            let answer = [request, REPLY, 8, 0, 0].map(u32::to_ne_bytes);
            socket.write_all(answer.as_flattened())?;
        }
        return Ok(true);
    }
    Ok(false)
}

/// All messages of one QEMU; why they end, if QEMU has not.
fn messages(listener: UnixListener, card: &Arc<Card>) -> io::Result<Option<String>> {
    let (socket, _) = listener.accept()?;
    card.waits_on(Waits::ForMessages(socket.try_clone()?));
    drop(listener);
    let first = socket.try_clone()?;
    let mut handler = BackendReqHandler::from_stream(socket, card.clone());
    loop {
        if taken_here(&first, card)? {
            continue;
        }
        match handler.handle_request() {
            Ok(()) | Err(Error::SocketRetry(_)) => {}
            Err(Error::Disconnected | Error::SocketBroken(_) | Error::PartialMessage) => return Ok(None),
            Err(error) => return Ok(Some(error.to_string())),
        }
    }
}

/// Answers the QEMU that connects, on a thread of the card's own, until either end closes.
pub(super) fn answer(listener: UnixListener, card: Arc<Card>) -> io::Result<()> {
    card.waits_on(Waits::ForQemu(listener.try_clone()?));
    let work = move || {
        let why = match messages(listener, &card) {
            Ok(why) => why.unwrap_or_default(),
            Err(error) => error.to_string(),
        };
        card.end(why);
    };
    std::thread::Builder::new().name("card".into()).spawn(work)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::frames::VhostUserPort;
    use std::os::fd::AsRawFd;
    use std::time::Duration;

    fn say(qemu: &mut UnixStream, words: &[u32]) {
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
        qemu.write_all(&bytes).expect("the card listens");
    }

    fn hear(qemu: &mut UnixStream) -> [u32; 5] {
        let mut answer = [0; 20];
        qemu.read_exact(&mut answer).expect("the card answers");
        std::array::from_fn(|at| u32::from_ne_bytes([0, 1, 2, 3].map(|byte| answer[4 * at + byte])))
    }

    #[test]
    fn a_ring_at_an_odd_place_is_no_breach_of_the_protocol() {
        const VERSION: u32 = 1;
        let (mut port, theirs) = VhostUserPort::pair().expect("a card");
        let path = format!("/proc/self/fd/{}", theirs.as_raw_fd());
        let mut qemu = UnixStream::connect(path).expect("the card listens");
        (qemu.set_read_timeout(Some(Duration::from_secs(10)))).expect("a socket");
        let (ask, address) = (
            FrontendReq::GET_FEATURES as u32,
            FrontendReq::SET_VRING_ADDR as u32,
        );
        for (odd, flags) in [
            ([0x1008, 0x3000, 0x2000], 0),
            ([0x1000, 0x3002, 0x2001], NEED_REPLY),
        ] {
            let [descriptors, used, available] = odd;
            let head = [address, VERSION | flags, 40, 1, 0];
            let places = [descriptors, 0, used, 0, available, 0, 0, 0];
            say(&mut qemu, &[&head[..], &places[..]].concat());
            if flags == NEED_REPLY {
                assert_eq!(hear(&mut qemu), [address, REPLY, 8, 0, 0], "it is followed");
            }
            say(&mut qemu, &[ask, VERSION, 0]);
            assert_eq!(hear(&mut qemu)[..3], [ask, REPLY, 8], "the card lives");
        }
        assert_eq!(port.read(|_| ()).expect("the card lives"), 0);
    }
}
