//! A copy of a program behind walls, with a card of its own.

use dunlin_program::copy::{Copy, Inside, Prints};
use dunlin_program::data::Attached;
use dunlin_program::message::{Card, Spec, Walls};

/// Of this command, with the address 10.213.`network`.2.
pub fn spec(network: u8, command: &[&str]) -> Spec {
    Spec {
        command: command.iter().map(|word| (*word).to_owned()).collect(),
        directory: "/".into(),
        environment: vec![("PATH".into(), "/usr/sbin:/usr/bin:/bin".into())],
        card: Card {
            address: [10, 213, network, 2].into(),
            prefix: 24,
            gateway: None,
            mtu: 1500,
            mac: [0x52, 0x54, 0, 0, 0, network],
        },
        walls: Some(Walls {
            user: None,
            root: "/".into(),
            scratch_mib: 64,
            agreed_chance: None,
            agreed_clock: false,
            tells_tsc: false,
            clock_page: false,
            data: None,
            chance: None,
        }),
    }
}

/// Its namespaces.
pub fn prepare(name: &str, spec: &Spec, data: Option<Attached>) -> Copy {
    let inside = Inside {
        program: env!("CARGO_BIN_EXE_dunlin").into(),
        arguments: vec!["program".into(), "inside".into()],
    };
    Copy::prepare(name, &inside, spec, Prints::Kept(None), None, data).expect("its namespaces")
}
