//! Images that are not plain files: qcow2 by a `qemu-storage-daemon`, and block devices. Each is the disk of a pair, through a
//! join, a sync and a take-over. Where the machine cannot (no root, no FUSE, no loop devices) the test is told as skipped.

use super::tests::{Dir, Host, MIB, join, sync};
use super::*;
use std::{io, path::Path, process::Command};

/// Runs a tool of the system.
fn run(tool: &str, args: &[&str]) -> String {
    let output = Command::new(tool).args(args).output();
    let output = output.unwrap_or_else(|error| panic!("{tool}: {error}: cargo xtask setup"));
    let words = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{tool} {args:?}: {}", words.trim());
    String::from_utf8_lossy(&output.stdout).trim().to_owned()
}

/// Whether this machine lets us use that device, as root; else the test is told as skipped.
fn may_use(device: &str) -> bool {
    // SAFETY: no arguments.
    let is_root = unsafe { libc::geteuid() } == 0;
    let opened = std::fs::File::options().read(true).write(true).open(device);
    match opened {
        Ok(_) if is_root => return true,
        Ok(_) => crate::skipped::skip("it mounts and attaches images, which needs root"),
        Err(error) => crate::skipped::skip(&format!("{device}: {error}")),
    }
    false
}

fn config(dir: &Path, name: &str, image: PathBuf, format: DiskFormat) -> DiskConfig {
    DiskConfig {
        name: "disk0".into(),
        image,
        format,
        state_dir: dir.join(name),
        read_only: false,
        storage: Storage::Gannet,
        limits: Limits::default(),
        group: None,
    }
}

/// What a pair does, whatever the images are; leaves `b` alone with what its VM wrote.
fn pair_of(a: DiskConfig, b: DiskConfig) -> Host {
    let (primary, backup) = (Host::of(a), Host::of(b));
    primary.disk.start_alone(Term(1)).unwrap();
    primary.write(5 * MIB + 3, 9, 100_000);
    join(&primary, &backup, AttachOptions::default());
    sync(&primary, &backup, 1);
    assert_eq!(backup.byte(5 * MIB + 50), 9, "the first copy");
    primary.write(0, 1, 4096);
    nbd::Export::zero(&*primary.disk, 5 * MIB, 64 << 10, true, true).unwrap();
    sync(&primary, &backup, 2);
    assert!(backup.disk.wait_settled(Duration::from_secs(10)).unwrap());
    let report = primary
        .disk
        .verify(VerifyOptions::default(), |_, _| ControlFlow::Continue(()))
        .unwrap();
    assert_eq!(report.different, [], "the images are equal");
    backup.write(MIB, 3, 8192);
    primary.end();
    backup.disk.take_over(Term(2)).unwrap();
    assert_eq!(
        [0, MIB, 5 * MIB, 5 * MIB + (65 << 10)].map(|at| backup.byte(at)),
        [1, 3, 0, 9]
    );
    backup
}

#[test]
fn what_lies_outside_an_image_is_an_error_and_no_panic() {
    let dir = Dir::new("outside");
    let path = dir.0.join("a.img");
    std::fs::File::create(&path).unwrap().set_len(MIB).unwrap();
    let image = image::Image::open(&path, false, Arc::default(), None).unwrap();
    let invalid = |done: io::Result<()>| done.unwrap_err().kind() == io::ErrorKind::InvalidInput;
    for offset in [image.size_bytes(), u64::MAX - 1] {
        assert!(invalid(image.read(offset, &mut [0; 2])));
        assert!(invalid(image.write(offset, &[0; 2])));
        assert!(invalid(image.zero(offset, 2, true)));
        assert!(invalid(image.status(offset, 2).map(drop)));
    }
}

#[test]
fn a_pair_of_qcow2_images_is_replicated_and_left_whole() {
    let dir = Dir::new("qcow2");
    if !may_use("/dev/fuse") {
        return;
    }
    let [a, b] = ["a", "b"].map(|name| {
        let image = dir.0.join(format!("{name}.qcow2"));
        run(
            "qemu-img",
            &["create", "-q", "-f", "qcow2", image.to_str().unwrap(), "8M"],
        );
        image
    });
    let wrong = check(&a, DiskFormat::Raw).unwrap_err().to_string();
    assert!(
        wrong.contains("format = \"qcow2\"") && !wrong.contains('\n'),
        "{wrong}"
    );
    check(&a, DiskFormat::Qcow2).unwrap();
    let mounts = std::fs::read_to_string("/proc/self/mounts").unwrap();
    let left = pair_of(
        config(&dir.0, "sa", a, DiskFormat::Qcow2),
        config(&dir.0, "sb", b.clone(), DiskFormat::Qcow2),
    );
    let in_use = check(&b, DiskFormat::Qcow2).unwrap_err().to_string();
    assert!(in_use.contains("in use by another VM"), "{in_use}");
    drop(left);
    assert_eq!(
        std::fs::read_to_string("/proc/self/mounts").unwrap(),
        mounts,
        "nothing is left mounted"
    );
    // QEMU's own tools are the judges of what is in the file.
    run("qemu-img", &["check", "-q", b.to_str().unwrap()]);
    let read = [
        "read -P 1 0 4k",
        "read -P 3 1M 8k",
        "read -P 0 5M 64k",
        "read -P 9 5184k 1k",
    ];
    let mut args = vec!["-f", "qcow2"];
    read.iter().for_each(|command| args.extend(["-c", command]));
    args.push(b.to_str().unwrap());
    let text = run("qemu-io", &args);
    assert!(!text.contains("failed"), "{text}");
}

/// A loop device, gone with the test.
struct Loop(PathBuf);

impl Loop {
    fn new(file: &Path) -> Self {
        std::fs::File::create(file).unwrap().set_len(8 * MIB).unwrap();
        Self(run("losetup", &["--find", "--show", file.to_str().unwrap()]).into())
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        run("losetup", &["--detach", &self.0.to_string_lossy()]);
    }
}

#[test]
fn a_pair_of_block_devices_is_replicated_and_kept_from_others() {
    let dir = Dir::new("loop");
    if !may_use("/dev/loop-control") {
        return;
    }
    let [a, b] = ["a", "b"].map(|name| Loop::new(&dir.0.join(format!("{name}.img"))));
    let left = pair_of(
        config(&dir.0, "sa", a.0.clone(), DiskFormat::Raw),
        config(&dir.0, "sb", b.0.clone(), DiskFormat::Raw),
    );
    let in_use = check(&b.0, DiskFormat::Raw).unwrap_err().to_string();
    assert!(in_use.contains("in use by another VM or is mounted"), "{in_use}");
    drop(left);
    let bytes = std::fs::read(dir.0.join("b.img")).unwrap();
    assert_eq!(
        (bytes[0], bytes[MIB as usize], bytes[5 * MIB as usize]),
        (1, 3, 0)
    );
}

#[test]
fn q3_no_file_is_opened_because_an_image_names_it() {
    let dir = Dir::new("backed");
    let secret = dir.0.join("secret.img");
    std::fs::write(&secret, vec![7; 1 << 20]).unwrap();
    let path = |name: &str| dir.0.join(name).to_str().unwrap().to_owned();
    let (base, backed, apart) = (path("secret.img"), path("backed.qcow2"), path("apart.qcow2"));
    run(
        "qemu-img",
        &["create", "-q", "-f", "qcow2", "-b", &base, "-F", "raw", &backed],
    );
    let data = format!("data_file={},data_file_raw=on", path("data.raw"));
    run(
        "qemu-img",
        &["create", "-q", "-f", "qcow2", "-o", &data, &apart, "1M"],
    );
    let refused = |image: &str, format| check(Path::new(image), format).unwrap_err().to_string();
    let why = refused(&backed, DiskFormat::Qcow2);
    assert!(why.contains(&base) && why.contains("backing = true"), "{why}");
    for format in [DiskFormat::Qcow2, DiskFormat::BackedQcow2] {
        let why = refused(&apart, format);
        assert!(why.contains("has its data in another file"), "{why}");
    }
    if may_use("/dev/fuse") {
        check(Path::new(&backed), DiskFormat::BackedQcow2).unwrap();
    }
    let lying = path("lying.qcow2");
    std::fs::write(&lying, b"QFI\xfb and no more").unwrap();
    assert!(!refused(&lying, DiskFormat::Qcow2).contains('\n'));
}
