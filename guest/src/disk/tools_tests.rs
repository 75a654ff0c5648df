//! The NBD clients of others against our server: `nbdinfo`, `nbdcopy` both ways, `qemu-io`, `qemu-img`, `fio` with verify.
//! A tool that is not installed fails its test: `cargo xtask setup` installs all of them.

use super::{
    nbd,
    tests::{Dir, Host, MIB},
    *,
};
use std::{fs, path::Path, process::Command, time::Instant};

struct Served {
    dir: Dir,
    host: Host,
    uri: String,
    socket: PathBuf,
}

fn serve(name: &str, mib: u64) -> Served {
    let dir = Dir::new(name);
    let host = Host::open(&dir.0, "a", mib, Storage::Gannet, Limits::default());
    host.disk.start_alone(Term(1)).unwrap();
    let socket = dir.0.join("nbd.sock");
    let disk = host.disk.clone();
    nbd::serve_path(&socket, move |stream| disk.serve(stream).unwrap()).unwrap();
    let uri = format!("nbd+unix:///disk0?socket={}", socket.display());
    Served {
        dir,
        host,
        uri,
        socket,
    }
}

/// Runs a tool.
fn run(tool: &str, args: &[&str]) -> String {
    let output = Command::new(tool).args(args).output();
    let output = output.unwrap_or_else(|error| panic!("{tool}: {error}: cargo xtask setup"));
    let text =
        String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{tool} {args:?}: {text}");
    text
}

fn pattern(path: &Path, len: usize) {
    let mut word = 1u64;
    let bytes: Vec<u8> = (0..len)
        .map(|at| {
            word = word.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            // Every third 64 KiB is a hole.
            if (at >> 16) % 3 == 2 {
                0
            } else {
                (word >> 56) as u8
            }
        })
        .collect();
    fs::write(path, bytes).unwrap();
}

#[test]
fn nbdinfo_sees_the_export_and_its_features() {
    let served = serve("nbdinfo", 8);
    let text = run("nbdinfo", &[&served.uri]);
    for line in [
        "export-size: 8388608",
        "can_fua: true",
        "can_flush: true",
        "can_trim: true",
        "can_zero: true",
        "can_multi_conn: true",
    ] {
        assert!(text.contains(line), "{line} is missing:\n{text}");
    }
    let list = run(
        "nbdinfo",
        &[
            "--list",
            &format!("nbd+unix:///?socket={}", served.socket.display()),
        ],
    );
    assert!(list.contains("export=\"disk0\""), "{list}");
    served.host.write(MIB, 1, 65536);
    let map = run("nbdinfo", &["--map", &served.uri]);
    assert!(map.contains("hole,zero") && map.contains("data"), "{map}");
    let wrong = format!("nbd+unix:///other?socket={}", served.socket.display());
    let output = Command::new("nbdinfo").arg(&wrong).output().unwrap();
    assert!(!output.status.success(), "an unknown export is refused");
}

#[test]
fn nbdcopy_both_ways_gives_the_same_bytes() {
    let served = serve("nbdcopy", 16);
    let (source, target) = (served.dir.0.join("source"), served.dir.0.join("target"));
    pattern(&source, (16 * MIB) as usize);
    let (from, to) = (source.to_str().unwrap(), target.to_str().unwrap());
    run("nbdcopy", &["--flush", from, &served.uri]);
    run("nbdcopy", &[&served.uri, to]);
    assert!(
        fs::read(&source).unwrap() == fs::read(&target).unwrap(),
        "there and back again"
    );
    assert!(
        fs::read(&source).unwrap() == fs::read(&served.host.image).unwrap(),
        "on the image"
    );
    // The good-bye of a client that has ended may not have been read yet.
    let until = Instant::now() + Duration::from_secs(20);
    while served.host.disk.in_flight() > 0 {
        assert!(Instant::now() < until, "a request is never answered");
        std::thread::yield_now();
    }
}

#[test]
fn qemu_io_reads_back_what_it_wrote() {
    let served = serve("qemu-io", 16);
    let commands = [
        "write -P 0x5a 0 64k",
        "write -f -P 0x11 1000k 3k",
        "write -z 4k 4k",
        "write -z -u 8k 4k",
        "discard 12k 4k",
        "aio_write -P 1 1M 256k",
        "aio_write -P 2 2M 256k",
        "aio_write -P 3 3M 256k",
        "aio_flush",
        "flush",
        "read -P 0x5a 0 4k",
        "read -P 0 4k 12k",
        "read -P 0x5a 16k 48k",
        "read -P 0x11 1000k 3k",
        "read -P 1 1M 256k",
        "read -P 3 3M 256k",
        "writev -P 7 512 512 1k",
        "read -P 7 512 1536",
    ];
    let mut args = vec!["-f", "raw"];
    for command in &commands {
        args.extend(["-c", command]);
    }
    args.push(&served.uri);
    let text = run("qemu-io", &args);
    assert!(
        !text.contains("verification failed") && !text.contains("rror"),
        "{text}"
    );
    let refused = Command::new("qemu-img")
        .args(["map", "-f", "raw"])
        .arg(&served.host.image)
        .output()
        .unwrap();
    assert!(
        !refused.status.success(),
        "a QEMU beside us is kept off the image by its own lock"
    );
}

#[test]
fn fio_verifies_random_writes_over_several_requests_in_flight() {
    let served = serve("fio", 16);
    let job = served.dir.0.join("job.fio");
    let text = format!(
        "[global]\nioengine=nbd\nuri={}\nrw=randwrite\nbsrange=512-64k\nbs_unaligned=0\niodepth=16\nsize=16m\n\
         verify=crc32c\nverify_fatal=1\nverify_state_save=0\ndo_verify=1\n[job]\n",
        served.uri
    );
    fs::write(&job, text).unwrap();
    let text = run("fio", &[job.to_str().unwrap()]);
    assert!(text.contains("err= 0"), "{text}");
}

#[test]
fn a_backup_serves_its_vm_as_a_disk_of_its_own() {
    let dir = Dir::new("tools-backup");
    let primary = Host::open(&dir.0, "a", 16, Storage::Gannet, Limits::default());
    let backup = Host::open(&dir.0, "b", 16, Storage::Gannet, Limits::default());
    primary.disk.start_alone(Term(1)).unwrap();
    super::tests::join(&primary, &backup, AttachOptions::default());
    super::tests::sync(&primary, &backup, 1);
    let socket = dir.0.join("nbd.sock");
    let disk = backup.disk.clone();
    nbd::serve_path(&socket, move |stream| disk.serve(stream).unwrap()).unwrap();
    let uri = format!("nbd+unix:///disk0?socket={}", socket.display());
    let (source, target) = (dir.0.join("source"), dir.0.join("target"));
    pattern(&source, (16 * MIB) as usize);
    run("nbdcopy", &["--flush", source.to_str().unwrap(), &uri]);
    run("nbdcopy", &[&uri, target.to_str().unwrap()]);
    assert!(
        fs::read(&source).unwrap() == fs::read(&target).unwrap(),
        "through the SVM buffer"
    );
    assert!(
        fs::read(&backup.image).unwrap().iter().all(|byte| *byte == 0),
        "the image is the last sync"
    );
    backup.disk.take_over(Term(2)).unwrap();
    assert!(
        fs::read(&source).unwrap() == fs::read(&backup.image).unwrap(),
        "on the image after the take-over"
    );
}

/// As QEMU gets its disk: one end of a socketpair, inherited.
#[test]
fn qemu_talks_over_an_inherited_socketpair() {
    use std::os::fd::{AsRawFd, OwnedFd};
    let dir = Dir::new("inherited");
    let host = Host::open(&dir.0, "a", 8, Storage::Gannet, Limits::default());
    host.disk.start_alone(Term(1)).unwrap();
    let (ours, theirs) = UnixStream::pair().unwrap();
    host.disk.serve(ours).unwrap();
    let theirs: OwnedFd = theirs.into();
    rustix::io::fcntl_setfd(&theirs, rustix::io::FdFlags::empty()).unwrap();
    let disk = format!(
        "driver=nbd,export=disk0,server.type=fd,server.str={}",
        theirs.as_raw_fd()
    );
    let image = [
        "--image-opts",
        disk.as_str(),
        "-c",
        "write -P 9 1M 64k",
        "-c",
        "flush",
        "-c",
        "read -P 9 1M 64k",
    ];
    let text = run("qemu-io", &image);
    assert!(!text.contains("failed"), "{text}");
    assert_eq!(host.image_byte(MIB), 9);
}
