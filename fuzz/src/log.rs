//! The log's files: raw bytes, or records with right checksums that say anything.

use crate::script::Script;
use dunlin_fabric::log::{Disk, DiskError, DiskOptions};
use std::path::{Path, PathBuf};
use xxhash_rust::xxh3::{xxh3_64, xxh3_64_with_seed};

/// A directory of this process; in memory where the system has one there.
struct Scratch(PathBuf);

impl Scratch {
    fn new() -> Self {
        let root = Path::new("/dev/shm");
        let root = if root.is_dir() {
            root.to_owned()
        } else {
            std::env::temp_dir()
        };
        let thread = format!("{:?}", std::thread::current().id());
        let id: String = thread.chars().filter(char::is_ascii_digit).collect();
        let dir = root.join(format!("dunlin-fuzz-log-{}-{id}", std::process::id()));
        let _ = std::fs::remove_dir_all(&dir);
        std::fs::create_dir_all(&dir).expect("a scratch directory");
        Self(dir)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn segment(script: &mut Script<'_>, number: u64) -> Vec<u8> {
    const ID: u64 = 0xfeed;
    let mut file = b"dunlog01".to_vec();
    file.extend_from_slice(&number.to_le_bytes());
    file.extend_from_slice(&ID.to_le_bytes());
    let check = xxh3_64(&file);
    file.extend_from_slice(&check.to_le_bytes());
    file.resize(64, 0);
    let mut batch = 64u64;
    for _ in 0..script.byte() % 16 {
        let how = script.byte();
        let kind = [
            0u8,
            1,
            1,
            1,
            2,
            0x10,
            0x11,
            script.0.first().copied().unwrap_or(9),
        ][usize::from(how & 7)];
        let (term, index) = (script.number(), script.number());
        let n = usize::from(script.byte());
        let payload = script.bytes(n);
        let length = if how & 8 == 0 {
            payload.len() as u64
        } else {
            script.number()
        };
        if how & 16 == 0 {
            batch = file.len() as u64;
        } else if how & 32 != 0 {
            batch = script.number();
        }
        let start = file.len();
        file.extend_from_slice(&(0xd100_0000 | u32::from(kind)).to_le_bytes());
        file.extend_from_slice(&(length as u32).to_le_bytes());
        for word in [batch, term, index, 0] {
            file.extend_from_slice(&word.to_le_bytes());
        }
        file.extend_from_slice(payload);
        file.resize(start + 40 + payload.len().next_multiple_of(8), 0);
        let check = xxh3_64_with_seed(&file[start..], ID).wrapping_add(u64::from(how >> 7));
        file[start + 32..start + 40].copy_from_slice(&check.to_le_bytes());
    }
    let zeros = usize::from(script.byte()) * 8;
    file.resize(file.len() + zeros, 0);
    let n = usize::from(script.byte() % 32);
    file.extend_from_slice(script.bytes(n));
    file
}

/// Opening gives a log that holds together and is found again by the next opening, or an error that names a file.
pub fn log(bytes: &[u8]) {
    let scratch = Scratch::new();
    let dir = &scratch.0;
    let mut script = Script(bytes);
    let how = script.byte();
    for (bit, name) in [
        "promise",
        "snapshot",
        "log-0000000000000000",
        "log-0000000000000001",
    ]
    .into_iter()
    .enumerate()
    {
        if how & 1 << bit == 0 {
            continue;
        }
        let content = match (how & 16 == 0, bit) {
            (true, 2) => segment(&mut script, 0),
            (true, 3) => segment(&mut script, 1),
            (true, 1) => {
                let n = usize::from(script.byte());
                let body = script.bytes(n);
                [&xxh3_64(body).to_le_bytes(), body].concat()
            }
            (true, _) => {
                let mut slot = Vec::new();
                for _ in 0..3 {
                    slot.extend_from_slice(&script.number().to_le_bytes());
                }
                let check = xxh3_64(&slot);
                slot.extend_from_slice(&check.to_le_bytes());
                slot
            }
            (false, _) => {
                let n = usize::from(script.u16());
                script.bytes(n).to_vec()
            }
        };
        std::fs::write(dir.join(name), content).expect("a file");
    }
    let options = DiskOptions {
        segment_bytes: 8192,
        limit_bytes: None,
    };
    match Disk::open(dir, options.clone()) {
        Ok((disk, found)) => {
            drop(disk);
            assert!(
                found
                    .log
                    .windows(2)
                    .all(|pair| pair[0].stamp.index.0 + 1 == pair[1].stamp.index.0),
                "the log has a gap"
            );
            let (_, again) = Disk::open(dir, options).expect("what was opened opens again");
            assert_eq!(
                (again.hard_state, again.snapshot, again.log, again.cut),
                (found.hard_state, found.snapshot, found.log, None)
            );
        }
        Err(DiskError::Corrupt { file, .. }) => assert!(file.starts_with(dir)),
        Err(other) => panic!("{other}"),
    }
}
