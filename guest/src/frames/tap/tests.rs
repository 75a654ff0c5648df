use super::*;
use std::process::Command;

/// A network namespace of this thread's own; `None` where that needs more rights than we have.
fn own_namespace() -> Option<()> {
    // SAFETY: only this thread moves.
    match unsafe { libc::unshare(libc::CLONE_NEWNET) } {
        0 => Some(()),
        _ => {
            crate::skipped::skip("it makes a network namespace, which needs root");
            None
        }
    }
}

fn ip(arguments: &str) -> String {
    let output = Command::new("ip")
        .args(arguments.split(' '))
        .output()
        .expect("iproute2 is installed");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

#[test]
fn it_joins_the_bridge_carries_frames_and_vanishes_with_its_descriptor() {
    let Some(()) = own_namespace() else { return };
    ip("link add br0 type bridge");
    ip("link set br0 up");
    let a = Tap::open("dunlin%d", Some("br0")).unwrap();
    let b = Tap::open("tap-b", Some("br0")).unwrap();
    assert_eq!((a.name(), b.name()), ("dunlin0", "tap-b"));
    let links = ip("-o link show master br0");
    assert!(
        links.contains("dunlin0") && links.contains("tap-b") && links.contains("UP"),
        "{links}"
    );

    let frame = crate::frames::announce::gratuitous_arp([2, 0, 0, 0, 0, 9], [10, 0, 0, 9].into());
    // A new port forwards only when the bridge has taken it in, which it does from a work queue: send until it comes.
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(20);
    let mut buffer = [0; 2048];
    let got = loop {
        assert!(
            std::time::Instant::now() < deadline,
            "no frame crossed the bridge"
        );
        assert!(a.write(&frame).unwrap());
        let soon = std::time::Instant::now() + std::time::Duration::from_millis(50);
        crate::sys::wait_readable(b.as_fd(), soon).unwrap();
        match b.read(&mut buffer).unwrap() {
            Some(n) if buffer[..n] == frame => break n,
            _ => {} // the kernel's own router solicitations
        }
    };
    assert_eq!(got, frame.len());
    drop(a);
    assert!(!ip("-o link show").contains("dunlin0"));
}

#[test]
fn what_is_wrong_is_said() {
    let Some(()) = own_namespace() else { return };
    let error = Tap::open("t0", Some("nobridge")).unwrap_err().to_string();
    assert!(error.contains("t0") && error.contains("bridge"), "{error}");
    let _first = Tap::open("t1", None).unwrap();
    let error = Tap::open("t1", None).unwrap_err().to_string();
    assert!(error.contains("in use"), "{error}");
    assert!(Tap::open("a-name-that-is-too-long", None).is_err());
}
