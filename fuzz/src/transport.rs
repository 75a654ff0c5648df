//! One-sided writes: what a broken peer, which knows every key, can land in our memory or send on our sockets.

use crate::script::Script;
use dunlin_fabric::link::Stream;
use dunlin_fabric::transport::ring::{Found, MESSAGE_MAX_BYTES, Place, RingReader, RingWriter};
use dunlin_fabric::transport::word::{SLOT_BYTES, WordReader};
use dunlin_fabric::transport::{Memory, RegionId, Shm, Tcp, Transport, TransportError};
use rustix::fs::{MemfdFlags, SealFlags};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
use std::io::{IoSlice, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use xxhash_rust::xxh3::xxh3_64;

const REGION: RegionId = RegionId(1);

/// Frames on a stream, cut anywhere, while regions come and go.
pub fn tcp(bytes: &[u8]) {
    let (ours, mut theirs) = UnixStream::pair().expect("a socket pair");
    theirs.set_nonblocking(true).expect("non-blocking");
    let mut tcp = Tcp::new(Stream::local(ours, "peer")).expect("a transport");
    let mut epoch = 5;
    tcp.register(REGION, epoch, 4096).expect("memory");
    let mut script = Script(bytes);
    while !script.is_over() {
        match script.byte() {
            0 => tcp.revoke(REGION),
            1 => {
                epoch += 1;
                tcp.register(REGION, epoch, 4096).expect("memory");
            }
            n => {
                let _full = theirs.write(script.bytes(usize::from(n)));
            }
        }
        match tcp.progress(1 << 20) {
            Ok(_) => {}
            Err(TransportError::ProtocolViolation(_) | TransportError::Closed(_)) => return,
            Err(other) => panic!("{other}"),
        }
        if let Some(memory) = tcp.region(REGION) {
            assert_eq!(memory.bytes(), 4096);
        }
        // What it grants must be usable up to its last word.
        for region in 0..4 {
            let region = RegionId(region);
            if let Some(grant) = tcp.granted(region) {
                tcp.write(region, grant.epoch, grant.bytes - 64, &[7; 64])
                    .expect("room for 64 bytes");
            }
        }
        match tcp.flush() {
            Ok(()) | Err(TransportError::Closed(_)) => {}
            Err(other) => panic!("{other}"),
        }
    }
}

fn memfd(bytes: u64, sealed: bool) -> OwnedFd {
    let fd =
        rustix::fs::memfd_create(c"fuzz", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).expect("memfd");
    rustix::fs::ftruncate(&fd, bytes).expect("its size");
    if sealed {
        rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW).expect("seals");
    }
    fd
}

/// Messages with any descriptors, or none.
pub fn shm(bytes: &[u8]) {
    let (ours, theirs) = UnixStream::pair().expect("a socket pair");
    theirs.set_nonblocking(true).expect("non-blocking");
    let mut shm = Shm::new(Stream::local(ours, "peer")).expect("a transport");
    let mut script = Script(bytes);
    for _ in 0..64 {
        if script.is_over() {
            break;
        }
        let mut fds = Vec::new();
        for _ in 0..script.byte() % 4 {
            let kind = script.byte();
            let size = [0, 64, 4096, 8192, 1 << 20][usize::from(kind >> 4) % 5];
            match kind % 4 {
                0 => fds.push(memfd(size, false)),
                1 | 2 => fds.push(memfd(size, true)),
                _ => fds
                    .push(rustix::event::eventfd(0, rustix::event::EventfdFlags::NONBLOCK).expect("eventfd")),
            }
        }
        let n = usize::from(script.byte());
        let message = script.bytes(if n >= 128 { 32 } else { n % 70 });
        let borrowed: Vec<BorrowedFd<'_>> = fds.iter().map(AsFd::as_fd).collect();
        let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !borrowed.is_empty() {
            control.push(SendAncillaryMessage::ScmRights(&borrowed));
        }
        let _full = rustix::net::sendmsg(
            &theirs,
            &[IoSlice::new(message)],
            &mut control,
            SendFlags::NOSIGNAL,
        );
        match shm.progress(1 << 20) {
            Ok(_) => {}
            Err(error) => {
                assert!(!error.to_string().contains('\n'));
                return;
            }
        }
        for region in 0..4 {
            let region = RegionId(region);
            if let Some(grant) = shm.granted(region) {
                shm.write(region, grant.epoch, grant.bytes - 64, &[7; 64])
                    .expect("mapped");
            }
        }
        shm.flush().expect("a bell is rung or not");
    }
}

/// Records and words with right checksums and wrong everything else, at any place of the ring, in any order.
pub fn ring(bytes: &[u8]) {
    const KEY: u64 = 0x1234_5678_9abc_def0;
    const EPOCH: u64 = 3;
    let place = Place {
        region: REGION,
        offset: 64,
        bytes: 4096,
    };
    let memory = Memory::anonymous(64 + 4096).expect("memory");
    let (mut reader, mut word) = (RingReader::new(place, EPOCH, KEY), WordReader::new(0, KEY));
    let mut out = Vec::new();
    let mut script = Script(bytes);
    let (mut seq, mut version) = (1u64, 0u64);
    while !script.is_over() {
        match script.byte() % 4 {
            // A record that nearly fits, where the reader looks next or anywhere.
            0 | 1 => {
                let tweak = script.byte();
                let n = usize::from(script.byte()) * if tweak & 1 == 0 { 1 } else { 16 };
                let mut payload = script.bytes(n).to_vec();
                let length = if tweak & 2 == 0 {
                    payload.len() as u64
                } else {
                    script.number() & 0xffff_ffff
                };
                let flags = u64::from(if tweak & 4 == 0 { 0 } else { script.byte() });
                let epoch = if tweak & 8 == 0 { EPOCH } else { script.number() };
                let at = if tweak & 16 == 0 {
                    (reader.consumed() % 4096) as usize
                } else {
                    (usize::from(script.u16()) % 4096) & !7
                };
                if tweak & 32 != 0 {
                    seq = script.number();
                }
                let words = [seq, length | flags << 32, epoch];
                // What the reader would hash, if the payload reached that far.
                let mut hashed = payload.clone();
                hashed.resize((length as usize).min(8192), 0);
                let mut all = Vec::new();
                for value in [words[0], words[1], words[2], xxh3_64(&hashed), KEY] {
                    all.extend_from_slice(&value.to_le_bytes());
                }
                let check = xxh3_64(&all);
                payload.resize(payload.len().next_multiple_of(8), 0);
                let mut record: Vec<u8> = [words[0], words[1], words[2], check]
                    .iter()
                    .flat_map(|w| w.to_le_bytes())
                    .collect();
                record.extend_from_slice(&payload);
                record.truncate(4096 - at);
                memory.copy_in(64 + at, &record);
                seq = seq.wrapping_add(1);
            }
            // A word.
            2 => {
                version = if script.byte() & 1 == 0 {
                    version.wrapping_add(1)
                } else {
                    script.number()
                };
                let mut slot: Vec<u8> = [version, script.number(), script.number(), script.number(), KEY]
                    .iter()
                    .flat_map(|w| w.to_le_bytes())
                    .collect();
                let check = xxh3_64(&slot);
                slot[32..].copy_from_slice(&check.to_le_bytes());
                memory.copy_in(0, &slot[..SLOT_BYTES.min(40)]);
            }
            // A hostile cursor for a writer: it may overwrite, but never believe more room than there is.
            _ => {
                let mut writer = RingWriter::new(place, EPOCH, KEY);
                let _believed = writer.give_back(script.number());
                assert!(writer.room() <= place.bytes);
            }
        }
        let before = reader.consumed();
        if reader.next(&memory, &mut out) == Found::Message {
            assert!(reader.consumed() > before);
            assert!(out.len() <= MESSAGE_MAX_BYTES);
        }
        assert_eq!(reader.consumed() % 32, 0);
        let _any = word.get(&memory);
    }
}
