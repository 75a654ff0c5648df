use super::*;
use crate::disk::{
    DiskConfig, Limits,
    link::{receive, send_now},
    tests::{Dir, Host},
};
use dunlin_core::disk::Generation;
use std::os::unix::net::UnixStream;

const TIB: u64 = 1 << 40;

fn hello(pair: [u8; 16]) -> Hello {
    Hello {
        size_bytes: 5 * TIB,
        generation: Generation::default(),
        consistent: true,
        pair,
        next_pair: [9; 16],
        storage: 0,
    }
}

#[test]
fn more_extents_than_one_frame_names_are_all_of_the_disk() {
    let extents = ExtentSet::whole(3 << 20);
    let says = |most_bytes| {
        let welcome = welcome(hello([7; 16]), &extents, most_bytes);
        let (hello, extents) = Hello::decode(&welcome).expect("a greeting");
        (hello.pair, extents.len())
    };
    let most_bytes = Hello::BYTES as u64 + 24;
    assert_eq!(says(most_bytes), ([7; 16], 24));
    assert_eq!(says(most_bytes - 1), ([0; 16], 0));
}

/// It could never join: its greeting was longer than any frame may be.
#[test]
fn a_host_with_five_tib_of_dirty_extents_greets() {
    let dir = Dir::new("five-tib");
    let (image, state_dir) = (dir.0.join("a.img"), dir.0.join("a"));
    let file = std::fs::File::create(&image).unwrap();
    file.set_len(5 * TIB).unwrap();
    std::fs::create_dir_all(&state_dir).unwrap();
    let map = [vec![0; 4096], vec![0xff; ((5 * TIB) >> 20) as usize / 8]].concat();
    std::fs::write(state_dir.join("disk0.dirty"), [b"DUNLDRT1", &map[8..]].concat()).unwrap();
    let host = Host::of(DiskConfig {
        name: "disk0".into(),
        image,
        format: Default::default(),
        state_dir,
        read_only: false,
        storage: Storage::Gannet,
        limits: Limits::default(),
        group: None,
    });
    let (mut primary, backup) = UnixStream::pair().unwrap();
    let backup = crate::disk::MirrorStream::from_unix(backup).unwrap();
    host.disk.start_backup(backup).unwrap();
    send_now(&mut primary, Frame::Hello, &hello([0; 16]).encode()).unwrap();
    let (frame, payload) = receive(&mut primary).expect("a frame that may be");
    assert_eq!(frame, Frame::Welcome);
    let (theirs, extents) = Hello::decode(&payload).expect("a greeting");
    assert_eq!((theirs.size_bytes, theirs.pair), (5 * TIB, [0; 16]));
    assert!(extents.is_empty());
}
