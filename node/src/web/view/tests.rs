use super::*;
use dunlin_api::files::ClusterHost;
use dunlin_api::{JoinProblem, PeerStatus, Progress};

fn cluster() -> Cluster {
    let host = |(number, name): (usize, &str)| ClusterHost {
        name: name.into(),
        address: format!("10.0.0.{}:7700", number + 1).parse().expect("an address"),
    };
    Cluster {
        name: "lab".into(),
        id: [0; 16],
        durability: dunlin_core::consensus::Durability::Memory,
        election_ms: 60,
        hosts: ["a", "b", "c"].into_iter().enumerate().map(host).collect(),
    }
}

/// The VM 'shop' as each of its hosts a, b (which can run it) and c (its witness) shows it.
fn vm(host: &str, role: &str, state: &str) -> VmStatus {
    let peers = ["a", "b", "c"].into_iter().filter(|peer| *peer != host);
    VmStatus {
        name: "shop".into(),
        role: Role::from(role),
        state: State::from(state),
        policy: "dunlin".into(),
        wants_protection: true,
        leader: Some("a".into()),
        term: 3,
        peers: peers
            .map(|peer| PeerStatus {
                host: peer.into(),
                connected: true,
                witness: peer == "c",
                ..PeerStatus::default()
            })
            .collect(),
        ..VmStatus::default()
    }
}

fn seen(vms: Vec<(&str, VmStatus)>) -> Overview {
    let heard = vms.into_iter().map(|(host, vm)| {
        let status = HostStatus {
            host: host.into(),
            vms: vec![vm],
            ..HostStatus::default()
        };
        let heard = Heard {
            status: Some(status),
            ..Heard::default()
        };
        (host.to_owned(), heard)
    });
    overview(&cluster(), "c", &heard.collect())
}

fn only(overview: &Overview) -> &VmView {
    assert_eq!(overview.vms.len(), 1, "{overview:?}");
    &overview.vms[0]
}

#[test]
fn a_healthy_vm_has_all_parts_and_the_reason_why_it_is_safe() {
    let mut primary = vm("a", "primary", "running");
    primary.protected = true;
    primary.sync.sum.bytes = 5;
    primary.sync.sum.device_bytes = 2;
    let seen = seen(vec![
        ("a", primary),
        ("b", vm("b", "backup", "running")),
        ("c", vm("c", "witness", "waiting")),
    ]);
    let vm = only(&seen);
    let parts = [&vm.primary, &vm.backup, &vm.witness].map(|part| part.as_deref().unwrap_or("-"));
    assert_eq!(parts, ["a", "b", "c"]);
    assert_eq!(vm.protection, Protection::Protected);
    assert!(
        vm.why.contains("Host b holds a complete second copy"),
        "{}",
        vm.why
    );
    assert_eq!(vm.figures.as_ref().map(|figures| figures.sent_bytes), Some(7));
    assert!(
        vm.hosts.iter().all(|host| host.linked.len() == 2),
        "{:?}",
        vm.hosts
    );
    assert!(seen.hosts.iter().all(|host| host.reached));
}

#[test]
fn a_host_that_is_not_heard_keeps_its_seat_and_says_nothing() {
    let mut primary = vm("a", "primary", "alone");
    primary.peers[0].connected = false;
    let seen = seen(vec![("a", primary), ("c", vm("c", "witness", "waiting"))]);
    let vm = only(&seen);
    assert_eq!((vm.backup.as_deref(), vm.witness.as_deref()), (None, Some("c")));
    assert_eq!(vm.hosts[1].role, Role::Unknown);
    assert_eq!(vm.protection, Protection::Unprotected);
    assert_eq!(vm.why, "Host b is not reached by its primary.");
    assert!(vm.todo.contains("Bring host b back"), "{}", vm.todo);
    assert!(!seen.hosts[1].reached);
}

#[test]
fn of_two_who_say_that_they_are_primary_the_newer_reign_counts() {
    let mut newer = vm("b", "primary", "alone");
    newer.term = 4;
    let seen = seen(vec![("a", vm("a", "primary", "quorum-lost")), ("b", newer)]);
    assert_eq!(only(&seen).primary.as_deref(), Some("b"));
    assert_eq!(only(&seen).protection, Protection::Unprotected);
}

#[test]
fn every_poor_state_has_a_reason() {
    let base = || vm("a", "primary", "alone");
    let with = |change: &dyn Fn(&mut VmStatus)| {
        let mut vm = base();
        change(&mut vm);
        seen(vec![("a", vm)])
    };
    let cases: [(Overview, Protection, &str); 9] = [
        (
            with(&|vm| vm.state = State::QuorumLost),
            Protection::Unprotected,
            "no majority",
        ),
        (
            with(&|vm| (vm.state, vm.why) = (State::Failed, "no such disk".into())),
            Protection::NotServed,
            "no such disk",
        ),
        (
            with(&|vm| {
                vm.join_problem = Some(JoinProblem {
                    why: "host 'b': no bridge br0".into(),
                    times: 3,
                    passes: false,
                });
            }),
            Protection::Unprotected,
            "No backup joins: host 'b': no bridge br0.",
        ),
        (
            with(&|vm| {
                vm.state = State::Joining;
                vm.progress = Some(Progress {
                    what: "memory".into(),
                    done: 30,
                    total: 40,
                });
            }),
            Protection::Joining,
            "memory, 75 %",
        ),
        (
            with(&|vm| vm.state = State::Joining),
            Protection::Joining,
            "being made",
        ),
        (with(&|_| {}), Protection::Unprotected, "Host b is there"),
        (
            with(&|vm| vm.wants_protection = false),
            Protection::NotAsked,
            "no second copy",
        ),
        (
            seen(vec![("c", {
                let mut vm = vm("c", "witness", "waiting");
                vm.leader = None;
                vm
            })]),
            Protection::NotServed,
            "1 of its 3 hosts answer",
        ),
        (
            seen(vec![("c", vm("c", "witness", "waiting"))]),
            Protection::NotServed,
            "Host a leads its group",
        ),
    ];
    for (seen, level, words) in cases {
        let vm = only(&seen);
        assert_eq!(vm.protection, level, "{vm:?}");
        assert!(vm.why.contains(words), "{words}: {}", vm.why);
        assert!(vm.why.ends_with('.') && !vm.why.contains('\n'), "{}", vm.why);
    }
}
