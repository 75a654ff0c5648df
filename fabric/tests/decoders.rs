//! Every decoder that a peer or a disk can feed: any bytes give a value or an error, never a panic, never a belief in what
//! was not sent. A failure prints the seed; `SEED=n cargo test -p dunlin-fabric --test decoders` repeats it.

use dunlin_fabric::link::{Hello, Purpose, Stream};
use dunlin_fabric::log::{Disk, DiskError, DiskOptions};
use dunlin_fabric::transport::ring::{Found, Place, RingReader};
use dunlin_fabric::transport::word::WordReader;
use dunlin_fabric::transport::{Memory, RegionId, Shm, Tcp, Transport, TransportError};
use std::io::Write;
use std::os::unix::net::UnixStream;

struct Dice(u64);

impl Dice {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
    fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }
    fn bytes(&mut self, n: usize) -> Vec<u8> {
        (0..n).map(|_| self.next() as u8).collect()
    }
}

/// Runs `test` for many seeds (or for `SEED`), naming the one that fails.
fn seeds(count: u64, test: impl Fn(&mut Dice) + std::panic::RefUnwindSafe) {
    let one = std::env::var("SEED").ok().and_then(|s| s.parse().ok());
    for seed in one.map_or(0..count, |s: u64| s..s + 1) {
        if let Err(why) = std::panic::catch_unwind(|| test(&mut Dice(seed))) {
            eprintln!("failed with SEED={seed}");
            std::panic::resume_unwind(why);
        }
    }
}

#[test]
fn hello_from_any_bytes() {
    let good = {
        let mut out = Vec::new();
        Hello {
            from: "b".into(),
            extra: vec![5; 40],
            ..Hello::new("vm", "a", Purpose::Log)
        }
        .encode(&[1; 16], &mut out);
        out
    };
    seeds(20_000, |dice| {
        let mut bytes = if dice.below(2) == 0 {
            good.clone()
        } else {
            let n = dice.below(200);
            dice.bytes(n)
        };
        for _ in 0..dice.below(4) {
            if !bytes.is_empty() {
                let at = dice.below(bytes.len());
                bytes[at] = dice.next() as u8;
            }
        }
        if let Some((cluster, hello)) = Hello::decode(&bytes) {
            let mut again = Vec::new();
            hello.encode(&cluster, &mut again);
            assert_eq!(again, bytes, "what decodes is what encodes");
        }
    });
}

/// A peer that sends frames of all kinds, mostly nearly right: nothing lands outside, nothing panics.
#[test]
fn tcp_frames_from_any_bytes() {
    seeds(400, |dice| {
        let (ours, theirs) = UnixStream::pair().unwrap();
        theirs.set_nonblocking(true).unwrap();
        let mut tcp = Tcp::new(Stream::local(ours, "peer")).unwrap();
        tcp.register(RegionId(1), 5, 4096).unwrap();
        let mut theirs = theirs;
        for _ in 0..50 {
            let length = [0, 8, 16, 64, 4096, 4104, 7, u32::MAX][dice.below(8)];
            let mut frame = length.to_le_bytes().to_vec();
            frame.extend_from_slice(&[dice.below(5) as u8, dice.below(6) as u8, 0, 0]);
            frame.extend_from_slice(&[5u64, 4, 6, dice.next()][dice.below(4)].to_le_bytes());
            frame.extend_from_slice(
                &[0u64, 8, 4088, 4096, 64, 3, dice.next(), u64::MAX - 7][dice.below(8)].to_le_bytes(),
            );
            let body = (length as usize).min(dice.below(5000));
            frame.extend_from_slice(&dice.bytes(body));
            if dice.below(10) == 0 {
                let n = dice.below(100);
                frame = dice.bytes(n);
            }
            let _ = theirs.write_all(&frame);
            match tcp.progress(1 << 20) {
                Ok(_) => assert_eq!(tcp.region(RegionId(1)).unwrap().bytes(), 4096),
                Err(TransportError::ProtocolViolation(_) | TransportError::Closed(_)) => return,
                Err(e) => panic!("{e}"),
            }
        }
    });
}

/// A peer on the Unix socket that sends messages without descriptors, or rubbish.
#[test]
fn shm_messages_from_any_bytes() {
    seeds(400, |dice| {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let mut shm = Shm::new(Stream::local(ours, "peer")).unwrap();
        for _ in 0..20 {
            let n = [32, 32, 32, 5, 100][dice.below(5)];
            let mut message = dice.bytes(n);
            message[0] = dice.below(5) as u8;
            message[1] = dice.below(6) as u8;
            let _ = theirs.write_all(&message);
            if let Err(e) = shm.progress(1 << 20) {
                assert!(!e.to_string().contains('\n'));
                return;
            }
        }
    });
}

/// Rings and words over memory that holds anything at all.
#[test]
fn rings_and_words_over_any_memory_believe_nothing() {
    seeds(300, |dice| {
        let memory = Memory::anonymous(8192).unwrap();
        let place = Place {
            region: RegionId(1),
            offset: 64,
            bytes: 4096,
        };
        let key = dice.next();
        let (mut ring, mut word) = (RingReader::new(place, 3, key), WordReader::new(0, key));
        let mut out = Vec::new();
        for _ in 0..50 {
            let mut bytes = dice.bytes(4160);
            if dice.below(2) == 0 {
                // A header that nearly fits: the right sequence and epoch, lengths of all kinds, no checksum.
                let length = [0u64, 1, 64, 4096, 4064, u64::from(u32::MAX), 1 << 32, 3 << 32][dice.below(8)];
                for (at, value) in [(64, 1u64), (72, length), (80, 3)] {
                    bytes[at..at + 8].copy_from_slice(&value.to_le_bytes());
                }
            }
            memory.copy_in(0, &bytes);
            assert_eq!(ring.next(&memory, &mut out), Found::Nothing);
            assert_eq!(word.get(&memory), None);
        }
        assert_eq!(ring.consumed(), 0);
    });
}

/// A log directory of rubbish: an error that names a file, or nothing found.
#[test]
fn a_log_from_any_bytes() {
    let dir = std::env::temp_dir().join(format!("dunlin-decoders-{}", std::process::id()));
    seeds(300, |dice| {
        let _ = std::fs::remove_dir_all(&dir);
        std::fs::create_dir_all(&dir).unwrap();
        for name in [
            "promise",
            "snapshot",
            "log-0000000000000000",
            "log-0000000000000001",
        ] {
            if dice.below(2) == 0 {
                let n = dice.below(10_000);
                let mut bytes = dice.bytes(n);
                if dice.below(2) == 0 && bytes.len() > 8 {
                    bytes[..8].copy_from_slice(b"dunlog01");
                }
                std::fs::write(dir.join(name), bytes).unwrap();
            }
        }
        match Disk::open(
            &dir,
            DiskOptions {
                segment_bytes: 8192,
                limit_bytes: None,
            },
        ) {
            Ok((_, found)) => {
                assert!(found.log.is_empty() && found.hard_state.is_none() && found.snapshot.is_none())
            }
            Err(DiskError::Corrupt { file, .. }) => assert!(file.starts_with(&dir)),
            Err(e) => panic!("{e}"),
        }
    });
    let _ = std::fs::remove_dir_all(&dir);
}
