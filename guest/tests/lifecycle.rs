//! How a QEMU begins and ends: as whom, what it may do, what is said when it fails, what is left when we are killed.

mod common;

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use common::*;
use dunlin_guest::qemu::{QemuEvent, QmpError, StartError};
use dunlin_guest::{Machine, Ports, Qemu, Start, VmSpec};

/// A VM that needs no image: the firmware finds nothing to boot.
fn empty_vm() -> VmSpec {
    let mut spec = linux(Machine::Pc, 1);
    spec.memory_mib = 32;
    spec.nics.clear();
    spec.append = None;
    spec.initrd = None;
    spec
}

fn error_of(spec: &VmSpec) -> StartError {
    match Qemu::start(spec, Start::Boot, Ports::default()) {
        Ok(_) => panic!("it started"),
        Err(error) => error,
    }
}

fn status_field(pid: u32, field: &str) -> String {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status
        .lines()
        .find(|l| l.starts_with(&format!("{field}:")))
        .unwrap();
    line.split_whitespace().nth(1).unwrap().to_owned()
}

#[test]
fn it_runs_as_an_ordinary_user_behind_a_system_call_filter() {
    let _alone = one_at_a_time();
    let qemu = Qemu::start(&empty_vm(), Start::Boot, Ports::default()).unwrap();
    assert_eq!(status_field(qemu.pid(), "Seccomp"), "2");
    assert_eq!(status_field(qemu.pid(), "CapEff"), "0000000000000000");
    assert_ne!(status_field(qemu.pid(), "Uid"), "0");
    let environ = std::fs::read_to_string(format!("/proc/{}/environ", qemu.pid())).unwrap();
    assert!(
        !environ.contains("SECRET"),
        "the daemon's environment stays with the daemon"
    );
}

#[test]
fn its_main_loop_goes_before_its_virtual_cpus() {
    let _alone = one_at_a_time();
    let qemu = Qemu::start(&empty_vm(), Start::Boot, Ports::default()).unwrap();
    let nice = |thread: u64| -> i32 {
        let stat = std::fs::read_to_string(format!("/proc/{}/task/{thread}/stat", qemu.pid())).unwrap();
        let (_, rest) = stat.rsplit_once(')').unwrap();
        // The nineteenth field of proc(5); the third comes first here.
        rest.split_ascii_whitespace().nth(16).unwrap().parse().unwrap()
    };
    let cpus = qemu
        .qmp()
        .execute("query-cpus-fast", serde_json::json!({}))
        .unwrap();
    let cpu = nice(cpus[0]["thread-id"].as_u64().unwrap());
    let main_loop = nice(qemu.pid().into());
    assert!(main_loop < cpu, "main loop {main_loop}, virtual CPU {cpu}");
}

#[test]
fn stop_save_and_cont_answer_and_the_end_is_reported() {
    let _alone = one_at_a_time();
    let qemu = Qemu::start(&empty_vm(), Start::Boot, Ports::default()).unwrap();
    let mut states = vec![];
    for _ in 0..3 {
        qemu.stop_within(OBEYS).unwrap();
        states.push(qemu.save_devices(Duration::from_secs(60)).unwrap());
        qemu.cont_within(OBEYS).unwrap();
    }
    assert!(
        states
            .iter()
            .all(|s| s.starts_with(b"QEVM") && s.len() > 4000 && s.len() < 400_000)
    );
    let events = qemu.qmp().poll_events().unwrap();
    assert_eq!(
        events.iter().filter(|e| **e == QemuEvent::Stop).count(),
        3,
        "{events:?}"
    );
    let unknown = qemu.qmp().execute("no-such-command", serde_json::Value::Null);
    assert!(matches!(unknown, Err(QmpError::Refused { .. })));
    assert!(qemu.quit(Duration::from_secs(60)).unwrap().success());
    assert!(matches!(qemu.stop(), Err(QmpError::Closed)));
}

#[test]
fn a_failed_start_gives_qemus_own_line_and_leaves_no_process() {
    let _alone = one_at_a_time();
    let mut spec = empty_vm();
    spec.cpu = Some("abacus".into());
    let text = error_of(&spec).to_string();
    assert!(
        text.contains("abacus") && text.starts_with("QEMU did not start"),
        "{text}"
    );

    let mut spec = empty_vm();
    spec.kernel = Some("/no/such/kernel".into());
    assert!(matches!(error_of(&spec), StartError::File { key: "kernel", .. }));

    let mut spec = empty_vm();
    spec.qemu = Some("/no/such/qemu".into());
    assert!(error_of(&spec).to_string().contains("install it"));

    let mut spec = empty_vm();
    spec.qemu = Some("/bin/false".into());
    assert!(matches!(error_of(&spec), StartError::Ended { .. }));

    let mut spec = empty_vm();
    spec.run_as = Some("no-such-user".into());
    assert!(error_of(&spec).to_string().contains("no-such-user"));

    // Nothing of ours is left behind.
    let children = std::fs::read_dir("/proc").unwrap().filter_map(|e| {
        let stat = std::fs::read_to_string(e.ok()?.path().join("stat")).ok()?;
        let parent = stat
            .rsplit(')')
            .next()?
            .split_whitespace()
            .nth(1)?
            .parse::<u32>()
            .ok()?;
        (parent == std::process::id()).then_some(stat)
    });
    assert_eq!(children.collect::<Vec<_>>(), Vec::<String>::new());
}

#[test]
fn a_kernel_that_only_root_can_read_boots_all_the_same() {
    use std::os::unix::fs::PermissionsExt;
    let _alone = one_at_a_time();
    let mut spec = empty_vm();
    let secret = std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join("root-only-kernel");
    std::fs::copy(spec.kernel.unwrap(), &secret).unwrap();
    std::fs::set_permissions(&secret, std::fs::Permissions::from_mode(0o600)).unwrap();
    spec.kernel = Some(secret.clone());
    Qemu::start(&spec, Start::Boot, Ports::default()).unwrap();
    std::fs::remove_file(secret).unwrap();
}

/// More than 3 GiB on pc: the guest sees the file in two pieces, we see it whole.
#[test]
fn a_pc_with_five_gib_is_tracked_whole() {
    let _alone = one_at_a_time();
    let mut spec = linux(Machine::Pc, 1);
    spec.memory_mib = 5 * 1024;
    let mut pair = Pair::new(&spec, "GUEST-READY");
    let above: u64 = 3 << 18;
    assert!(
        pair.primary
            .qemu
            .memory()
            .populated()
            .unwrap()
            .iter()
            .any(|page| page > above)
    );
    let stats = pair.sync();
    assert!(stats.dirty_primary > 0);
    pair.assert_healthy();
}

/// Not a test of its own: the process that the next test kills.
#[test]
fn helper_daemon() {
    if std::env::var_os("DUNLIN_TEST_DAEMON").is_none() {
        return;
    }
    // The starting thread ends; QEMU must live on (invariant of qemu::spawn) until the process dies.
    let qemu = std::thread::spawn(|| Qemu::start(&empty_vm(), Start::Boot, Ports::default()).unwrap())
        .join()
        .unwrap();
    qemu.stop_within(OBEYS).unwrap();
    println!("\nqemu-pid {}", qemu.pid());
    loop {
        std::thread::park();
    }
}

#[test]
fn qemu_dies_with_a_killed_daemon() {
    let _alone = one_at_a_time();
    let mut daemon = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "helper_daemon", "--nocapture"])
        .env("DUNLIN_TEST_DAEMON", "1")
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let lines = BufReader::new(daemon.stdout.take().unwrap()).lines();
    let pid = lines
        .map_while(Result::ok)
        .find_map(|l| l.strip_prefix("qemu-pid ")?.parse::<i32>().ok());
    let pid = rustix::process::Pid::from_raw(pid.expect("the daemon started a QEMU")).unwrap();
    let pidfd = rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty()).unwrap();
    daemon.kill().unwrap();
    daemon.wait().unwrap();
    let timeout = rustix::event::Timespec {
        tv_sec: 60,
        tv_nsec: 0,
    };
    let mut waited = [rustix::event::PollFd::new(&pidfd, rustix::event::PollFlags::IN)];
    let since = Instant::now();
    assert_eq!(
        rustix::event::poll(&mut waited, Some(&timeout)).unwrap(),
        1,
        "QEMU outlived the daemon"
    );
    println!("QEMU ended {:?} after the daemon", since.elapsed());
}
