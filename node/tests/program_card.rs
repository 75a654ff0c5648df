//! The card of a copy is what its file says.

#[path = "common/copies.rs"]
mod copies;
#[path = "../../guest/tests/common/skipped.rs"]
mod skipped;

use std::process::Command;

#[test]
fn a_card_takes_no_more_than_its_network() {
    if !rustix::process::geteuid().is_root() {
        return skipped::skip("a program's namespaces need root");
    }
    let mut spec = copies::spec(23, &["/bin/true"]);
    spec.card.mtu = 1450;
    let copy = copies::prepare("the copy", &spec, None);
    let output = Command::new("nsenter")
        .arg(format!("--net=/proc/{}/ns/net", copy.keeper()))
        .args(["ip", "-o", "link", "show", "eth0"])
        .output()
        .expect("nsenter");
    let told = String::from_utf8_lossy(&output.stdout);
    assert!(told.contains(" mtu 1450 "), "{told} {output:?}");
}
