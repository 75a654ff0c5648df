//! Cards whose TAPs are in a network namespace of the test's own.

use super::*;
use crate::config::Cluster;
use crate::skipped;
use dunlin_guest::spec::NicBackend;
use nix::sched::{CloneFlags, unshare};
use std::process::Command;

fn config() -> VmConfig {
    let cluster = Cluster::parse(
        "name = 't'\nid = '00112233445566778899aabbccddeeff'\nhosts = [{ name = 'a', address = '10.0.0.1:7700' }, \
         { name = 'b', address = '10.0.0.2:7700' }, { name = 'c', address = '10.0.0.3:7700' }]",
        "cluster.toml",
    );
    let text = "name = 'v'\nmembers = ['a', 'b']\nwitness = 'c'\n[vm]\nmemory_mib = 64\nkernel = '/boot/vmlinuz'\n\
                [[vm.nics]]\nmac = '52:54:00:12:34:56'\ntap = 'tap-a'\n[[vm.nics]]\nmac = '52:54:00:12:34:57'\ntap = 'tap-b'\n";
    VmConfig::parse(text, "v.toml", &cluster.expect("a cluster")).expect("a VM")
}

#[test]
fn a_tap_that_was_removed_is_waited_for_no_more_and_told_once() {
    if unshare(CloneFlags::CLONE_NEWNET).is_err() {
        return skipped::skip("it makes a network namespace, which needs root");
    }
    let pairs = (0..2).map(|_| FramePort::pair(NicBackend::Stream).expect("a socket"));
    let (ports, _theirs): (FramePorts, Vec<_>) = pairs.unzip();
    let mut nics = Nics::open(&config(), ports).expect("two TAPs");
    nics.read_taps();
    assert_eq!((nics.tap_fds().count(), nics.newly_gone().len()), (2, 0));
    let removed = Command::new("ip").args(["link", "del", "tap-a"]).status();
    assert!(removed.expect("iproute2 is installed").success());
    nics.read_taps();
    assert_eq!(nics.tap_fds().count(), 1, "its descriptor is readable for ever");
    assert_eq!(nics.newly_gone(), [(0, "tap-a".to_owned())]);
    nics.read_taps();
    nics.overhear(OVERHEAR_US);
    assert!(nics.newly_gone().is_empty());
}
