//! Hostile clients: whatever is sent, the server answers or hangs up; it never panics, never touches a byte outside the
//! export, and never takes more memory than it said. `DUNLIN_NBD_ROUNDS` sets how many clients are tried.

use super::{Connection, Export, ExportInfo, handshake, proto};
use bytes::Bytes;
use std::{
    io::{self, Read, Write},
    os::unix::net::UnixStream,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

const SIZE: u64 = 64 << 10;

struct Rng(u64);

impl Rng {
    fn next(&mut self) -> u64 {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        self.0 >> 20
    }

    fn below(&mut self, most: u64) -> u64 {
        self.next() % most
    }
}

/// A disk that notices every access outside it.
struct Watched(Mutex<Vec<u8>>);

impl Watched {
    fn check(offset: u64, len: u64) {
        assert!(
            offset.checked_add(len).is_some_and(|end| end <= SIZE && len > 0),
            "N1: {len} bytes at {offset}"
        );
    }
}

impl Export for Watched {
    fn info(&self) -> ExportInfo {
        ExportInfo {
            name: "disk0".into(),
            size_bytes: SIZE,
            read_only: false,
        }
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        Self::check(offset, out.len() as u64);
        out.copy_from_slice(&self.0.lock().unwrap()[offset as usize..offset as usize + out.len()]);
        Ok(())
    }

    fn write(&self, offset: u64, data: Bytes, _fua: bool) -> io::Result<()> {
        Self::check(offset, data.len() as u64);
        self.0.lock().unwrap()[offset as usize..offset as usize + data.len()].copy_from_slice(&data);
        Ok(())
    }

    fn zero(&self, offset: u64, len: u64, _unmap: bool, _fua: bool) -> io::Result<()> {
        Self::check(offset, len);
        self.0.lock().unwrap()[offset as usize..(offset + len) as usize].fill(0);
        Ok(())
    }

    fn flush(&self) -> io::Result<()> {
        Ok(())
    }

    fn status(&self, offset: u64, len: u64) -> io::Result<Vec<(u64, bool)>> {
        Self::check(offset, len);
        Ok(vec![(len, true)])
    }
}

fn rounds() -> u64 {
    std::env::var("DUNLIN_NBD_ROUNDS")
        .ok()
        .and_then(|text| text.parse().ok())
        .unwrap_or(300)
}

/// A client's flags and options, as a well-behaved one sends them.
fn greeting() -> Vec<u8> {
    let mut bytes = 3u32.to_be_bytes().to_vec();
    let mut option = |raw: u32, data: &[u8]| {
        bytes.extend(proto::IHAVEOPT.to_be_bytes());
        bytes.extend(raw.to_be_bytes());
        bytes.extend((data.len() as u32).to_be_bytes());
        bytes.extend(data);
    };
    option(8, &[]);
    let meta = [
        &5u32.to_be_bytes()[..],
        b"disk0",
        &1u32.to_be_bytes(),
        &15u32.to_be_bytes(),
        b"base:allocation",
    ];
    option(10, &meta.concat());
    option(
        7,
        &[
            &5u32.to_be_bytes()[..],
            b"disk0",
            &1u16.to_be_bytes(),
            &3u16.to_be_bytes(),
        ]
        .concat(),
    );
    bytes
}

fn request(rng: &mut Rng) -> Vec<u8> {
    let interesting = [
        0,
        1,
        511,
        4096,
        SIZE - 1,
        SIZE,
        SIZE + 1,
        u64::MAX,
        u64::MAX - 4095,
        1 << 63,
    ];
    let command = rng.below(10) as u16;
    let offset = interesting[rng.below(10) as usize];
    let len = [0, 1, 512, 4096, 65536, 65537, 32 << 20, (32 << 20) + 1, u32::MAX][rng.below(9) as usize];
    let mut bytes = 0x2560_9513u32.to_be_bytes().to_vec();
    bytes.extend((rng.below(32) as u16).to_be_bytes());
    bytes.extend(command.to_be_bytes());
    bytes.extend(rng.next().to_be_bytes());
    bytes.extend(offset.to_be_bytes());
    bytes.extend(len.to_be_bytes());
    if command == 1 && len <= 65537 {
        bytes.resize(bytes.len() + len as usize, 7);
    }
    bytes
}

fn attack(seed: u64, make: impl Fn(&mut Rng) -> Vec<u8>) {
    let mut rng = Rng(seed);
    let (mut client, server) = UnixStream::pair().unwrap();
    let in_flight = Arc::new(AtomicU64::new(0));
    let export = Arc::new(Watched(Mutex::new(vec![0; SIZE as usize])));
    let (ended, wait) = std::sync::mpsc::channel();
    let mut connection = Connection::start(server, export, in_flight.clone(), move |why| {
        drop(ended.send(why))
    })
    .unwrap();
    let bytes = make(&mut rng);
    let mut drain = client.try_clone().unwrap();
    let reader = std::thread::spawn(move || io::copy(&mut drain, &mut io::sink()));
    // The server may hang up in the middle: that is an answer.
    let _sent = client.write_all(&bytes);
    let _gone = client.shutdown(std::net::Shutdown::Write);
    wait.recv_timeout(Duration::from_secs(20))
        .unwrap_or_else(|_| panic!("seed {seed}: the server neither answered nor hung up, or it panicked"));
    connection.close();
    let _read = reader.join().unwrap();
    assert_eq!(in_flight.load(Ordering::Acquire), 0, "seed {seed}");
}

#[test]
fn noise_is_answered_or_hung_up_on() {
    for seed in 0..rounds() {
        attack(seed, |rng| {
            (0..rng.below(2000)).map(|_| rng.next() as u8).collect()
        });
    }
}

#[test]
fn a_damaged_greeting_is_answered_or_hung_up_on() {
    for seed in 0..rounds() {
        attack(seed, |rng| {
            let mut bytes = greeting();
            for _ in 0..rng.below(4) + 1 {
                let at = rng.below(bytes.len() as u64) as usize;
                bytes[at] = rng.next() as u8;
            }
            bytes.truncate(rng.below(bytes.len() as u64 * 2) as usize + 1);
            bytes
        });
    }
}

#[test]
fn requests_beyond_the_export_or_beyond_sense_are_refused() {
    for seed in 0..rounds() {
        attack(seed, |rng| {
            let mut bytes = greeting();
            for _ in 0..rng.below(30) {
                bytes.extend(request(rng));
            }
            if rng.below(4) == 0 {
                let at = rng.below(bytes.len() as u64) as usize;
                bytes[at] ^= 1 << rng.below(8);
            }
            bytes
        });
    }
}

#[test]
fn decoders_take_any_bytes() {
    let mut rng = Rng(1);
    for _ in 0..rounds() * 200 {
        let bytes: Vec<u8> = (0..rng.below(64)).map(|_| (rng.next() % 7) as u8).collect();
        let _any = proto::info_request(&bytes).map(|(_, asked)| asked.count());
        let _any = proto::meta_request(&bytes).map(|(_, queries)| queries.len());
        if let Some(head) = bytes.first_chunk() {
            let _any = proto::option_head(head);
        }
        if let Some(head) = bytes.first_chunk() {
            let _any = proto::request(head);
        }
        if let Some(flags) = bytes.first_chunk() {
            let _any = proto::client_flags(*flags);
        }
    }
    assert_eq!(
        proto::meta_request(&[0, 0, 0, 0, 0xff, 0xff, 0xff, 0xff]),
        Err(proto::ProtoError::Malformed)
    );
}

/// A stream from memory, as the fuzzer uses it.
struct Script(io::Cursor<Vec<u8>>);

impl Read for Script {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        self.0.read(out)
    }
}

impl Write for Script {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[test]
fn an_unknown_export_and_an_unknown_option_are_refused_and_the_talk_goes_on() {
    let info = ExportInfo {
        name: "disk0".into(),
        size_bytes: SIZE,
        read_only: false,
    };
    let session = handshake::negotiate(&mut Script(io::Cursor::new(greeting())), &info)
        .unwrap()
        .unwrap();
    assert!(session.structured && session.allocation);
    let other = ExportInfo {
        name: "disk1".into(),
        ..info.clone()
    };
    let ended = handshake::negotiate(&mut Script(io::Cursor::new(greeting())), &other).unwrap();
    assert_eq!(ended, None, "refused, and then the script ends");
    let mut bytes = 1u32.to_be_bytes().to_vec();
    for (raw, data) in [(99u32, &b"?"[..]), (5, b""), (1, b"")] {
        bytes.extend(proto::IHAVEOPT.to_be_bytes());
        bytes.extend(raw.to_be_bytes());
        bytes.extend((data.len() as u32).to_be_bytes());
        bytes.extend(data);
    }
    let session = handshake::negotiate(&mut Script(io::Cursor::new(bytes)), &info).unwrap();
    assert_eq!(
        session,
        Some(handshake::Session::default()),
        "EXPORT_NAME after two refusals"
    );
}
