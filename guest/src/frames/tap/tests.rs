use super::*;
use std::process::Command;

/// A network namespace of this thread's own; `None` where that needs more rights than we have.
pub(in crate::frames) fn own_namespace() -> Option<()> {
    // SAFETY: only this thread moves.
    match unsafe { libc::unshare(libc::CLONE_NEWNET) } {
        0 => Some(()),
        _ => {
            crate::skipped::skip("it makes a network namespace, which needs root");
            None
        }
    }
}

pub(in crate::frames) fn ip(arguments: &str) -> String {
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
    // A child that another test starts just then has the descriptor, too, until it executes something.
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(20);
    while ip("-o link show").contains("dunlin0") {
        assert!(std::time::Instant::now() < deadline, "its card is still there");
    }
}

#[test]
fn what_is_for_others_does_not_come_by_a_filtered_tap() {
    let Some(()) = own_namespace() else { return };
    ip("link add br0 type bridge mcast_snooping 0");
    ip("link set br0 up");
    let a = Tap::open("tap-a", Some("br0")).unwrap();
    let b = Tap::open("tap-b", Some("br0")).unwrap();
    let (own, other) = ([2, 0, 0, 0, 0, 7], [2, 0, 0, 0, 0, 8]);
    let frame_to = |to: [u8; 6], sign: u8| {
        let mut frame = [&to[..], &[2, 0, 0, 0, 0, 9], &[0x88, 0xb5, sign]].concat();
        frame.resize(60, 0);
        frame
    };
    // Frames between two looks come in order: what is before the broadcast has passed, or never will.
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(20);
    let mut buffer = [0; 2048];
    let mut passed = |sign: u8| {
        let mut signs = Vec::new();
        while signs.last() != Some(&(2, sign)) {
            assert!(
                std::time::Instant::now() < deadline,
                "no broadcast crossed the bridge"
            );
            signs.clear();
            for (kind, to) in [(0, own), (1, other), (2, [0xff; 6])] {
                let mut frame = frame_to(to, sign);
                frame[15] = kind;
                assert!(a.write(&frame).unwrap());
            }
            let soon = std::time::Instant::now() + std::time::Duration::from_millis(50);
            crate::sys::wait_readable(b.as_fd(), soon).unwrap();
            while let Some(length) = b.read(&mut buffer).unwrap() {
                if length == 60 && buffer[12..14] == [0x88, 0xb5] && buffer[14] == sign {
                    signs.push((buffer[15], buffer[14]));
                }
            }
        }
        signs.iter().map(|(kind, _)| *kind).collect::<Vec<u8>>()
    };
    assert_eq!(passed(1), [0, 1, 2]);
    b.set_rx_filter(&[own]).unwrap();
    assert_eq!(passed(2), [0, 2]);
    b.set_rx_filter(&[own, other]).unwrap();
    assert_eq!(passed(3), [0, 1, 2]);
    b.set_rx_filter(&[own]).unwrap();
    assert_eq!(passed(4), [0, 2]);
    b.set_rx_filter(&[]).unwrap();
    assert_eq!(passed(5), [0, 1, 2]);
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
