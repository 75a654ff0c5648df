use super::*;
use dunlin_api::files::{
    ClusterFile, ClusterHost, DiskTable, HostFile, MemoryTable, NicTable, ProgramNicTable, ProgramTable,
    RestartPolicy, SyncTable, VmFile, VmTable,
};
use dunlin_core::agreed::Part;
use std::collections::BTreeSet;
use std::time::Duration;

const ID: &str = "00112233445566778899aabbccddeeff";

fn cluster() -> Cluster {
    let text = format!(
        "name = 't'\nid = '{ID}'\n[[hosts]]\nname = 'a'\naddress = '10.0.0.1:7700'\n\
         [[hosts]]\nname = 'b'\naddress = '10.0.0.2:7700'\n[[hosts]]\nname = 'c'\naddress = '10.0.0.3:7700'\n"
    );
    Cluster::parse(&text, "cluster.toml").expect("a good cluster file")
}

fn vm(top: &str) -> Result<VmConfig, ConfigError> {
    VmConfig::parse(
        &format!("{top}\n[vm]\nmemory_mib = 64\nkernel = '/boot/vmlinuz'\n"),
        "vm.toml",
        &cluster(),
    )
}

const GOOD: &str = "name = 'v'\nmembers = ['a', 'b']\nwitness = 'c'\npolicy = 'plover'";

#[test]
fn a_good_vm_file_gives_a_group_of_three() {
    let vm = vm(GOOD).expect("a good file");
    let names: Vec<_> = vm
        .group
        .iter()
        .map(|host| (host.name.as_str(), host.member.witness))
        .collect();
    assert_eq!(names, [("a", false), ("b", false), ("c", true)]);
}

#[test]
fn every_mistake_is_one_line_that_names_the_file() {
    let mistakes = [
        (GOOD.replace("policy", "polisy"), "polisy"),
        (GOOD.replace("'plover'", "'plovr'"), "unknown policy 'plovr'"),
        (
            GOOD.replace("['a', 'b']", "['a', 'a']"),
            "host 'a' is named twice",
        ),
        (
            GOOD.replace("['a', 'b']", "['a', 'x']"),
            "host 'x' is not in the cluster",
        ),
        (
            GOOD.replace("witness = 'c'", ""),
            "needs two hosts in members, and a witness",
        ),
        (GOOD.replace("'v'", "'../v'"), "name has to be"),
        (format!("{GOOD}\nsync.shortest_ms = 500.0"), "shortest_ms"),
        (
            format!("{GOOD}\nstorage = 'raid'"),
            "storage: 'raid' is none of gannet, colo, sync",
        ),
        (
            format!("{GOOD}\ncopy_mib_per_s = 9999999"),
            "copy_mib_per_s is from",
        ),
        (format!("{GOOD}\ncopy_mib_per_s = -1"), "line 5"),
        (
            format!("{GOOD}\nspeculative = true"),
            "goes with policies 'remus' and 'dunlin', and here it is 'plover'",
        ),
        (
            format!("{GOOD}\ndisk_memory_mib = 1"),
            "disk_memory_mib is from 8",
        ),
        (
            format!("{GOOD}\nverify_disks = 'now and then'"),
            "'now and then' is none of never, daily",
        ),
        (
            format!("{GOOD}\nverify_disks = '9s'"),
            "a time from 10s to 366days",
        ),
        (
            format!("{GOOD}\nverify_mib_per_s = 0"),
            "verify_mib_per_s is from 1",
        ),
    ];
    for (text, expected) in mistakes {
        let message = vm(&text).expect_err(&text).to_string();
        assert!(
            message.contains(expected),
            "{message:?} does not say {expected:?}"
        );
        assert!(
            message.starts_with("vm.toml: "),
            "{message:?} does not name the file"
        );
        assert_eq!(message.lines().count(), 1, "{message:?}");
    }
}

#[test]
fn an_id_has_32_digits_and_hosts_differ() {
    for id in ["12", &"é".repeat(16), &"x".repeat(32)] {
        let wrong = ClusterFile {
            id: id.to_owned(),
            ..cluster().file()
        };
        let said = Cluster::of(wrong, "cluster.toml").expect_err(id).to_string();
        assert_eq!(
            said,
            "cluster.toml: id has to be 32 hexadecimal digits; 'dunlin init' makes one"
        );
    }
    let mut twice = cluster().file();
    twice.hosts[1].address = twice.hosts[0].address;
    let said = Cluster::of(twice, "cluster.toml").expect_err("one address");
    assert!(said.to_string().contains("the same name or address"), "{said}");
}

#[test]
fn a_vm_says_how_its_disks_are_replicated() {
    use dunlin_guest::disk::Storage;
    let plain = vm(GOOD).expect("a good file").disks;
    assert_eq!((plain.storage, plain.copy_bytes_per_s), (Storage::Gannet, 0));
    assert_eq!(
        plain.limits,
        Default::default(),
        "512 MiB is what the port takes by itself"
    );
    for (name, storage) in Storage::NAMES {
        let text = format!("{GOOD}\nstorage = '{name}'\ncopy_mib_per_s = 50\ndisk_memory_mib = 64");
        let disks = vm(&text).expect("a good file").disks;
        assert_eq!((disks.storage, disks.copy_bytes_per_s), (storage, 50 << 20));
        assert_eq!(disks.limits.most_bytes, 64 << 20);
    }
}

#[test]
fn a_vm_says_how_often_its_disks_are_compared() {
    let day = std::time::Duration::from_secs(86_400);
    let plain = vm(GOOD).expect("a good file").disks;
    assert_eq!(
        (plain.verify_every, plain.verify_bytes_per_s),
        (Some(7 * day), 16 << 20)
    );
    for (text, every) in [
        ("never", None),
        ("daily", Some(day)),
        ("monthly", Some(30 * day)),
        ("36h", Some(day * 3 / 2)),
    ] {
        let text = format!("{GOOD}\nverify_disks = '{text}'\nverify_mib_per_s = 3");
        let disks = vm(&text).expect("a good file").disks;
        assert_eq!((disks.verify_every, disks.verify_bytes_per_s), (every, 3 << 20));
    }
}

#[test]
fn a_vm_without_a_word_on_it_is_kept_by_what_pays() {
    let plain = vm(&GOOD.replace("policy = 'plover'", "")).expect("a good file");
    assert_eq!(plain.policy, dunlin_core::policy::Policy::Dunlin);
}

#[test]
fn a_cluster_is_written_as_it_was_read() {
    let text = format!(
        "name = 't'\nid = '{ID}'\ndurability = 'disk'\nelection_ms = 90\nhosts = [{{ name = 'a', address = '10.0.0.1:7700' }}]"
    );
    let read = Cluster::parse(&text, "cluster.toml").expect("a good file");
    assert_eq!(read.file(), parse(&text, "cluster.toml").expect("a good file"));
    let begun = Cluster::begin("new", &[("a".into(), ([10, 0, 0, 1], 7700).into())], "x").expect("a cluster");
    let again = Cluster::of(begun.file(), "x").expect("a good file");
    assert_eq!((again.id, again.name), (begun.id, begun.name));
}

#[test]
fn the_words_of_a_vm_file_are_the_engine_s() {
    use dunlin_api::files::{POLICIES, STORAGES};
    let policies: BTreeSet<_> = dunlin_core::policy::Policy::ALL
        .map(|policy| policy.name())
        .into();
    assert_eq!(policies, POLICIES.into());
    let storages: BTreeSet<_> = dunlin_guest::disk::Storage::NAMES.map(|(name, _)| name).into();
    assert_eq!(storages, STORAGES.into());
    // What stands for a key that is left out is what the engine begins with.
    let plain = vm(&GOOD.replace("policy = 'plover'", "")).expect("a good file");
    assert_eq!(plain.disks.storage, dunlin_guest::disk::Storage::default());
    assert_eq!(plain.sync.compare, dunlin_core::sync::compare::Compare::default());
}

/// What a type takes, in its own words: the error for a key that it does not know names all others.
fn keys_of<T: serde::de::DeserializeOwned>() -> BTreeSet<String> {
    let error = parse::<T>("no_such_key = 1", "x")
        .err()
        .expect("an unknown key")
        .to_string();
    let (_, expected) = error.split_once("expected").expect("it says what is expected");
    expected
        .split('`')
        .skip(1)
        .step_by(2)
        .map(str::to_owned)
        .collect()
}

/// The keys in the first column of the table under a heading.
fn keys_under(page: &str, heading: &str) -> BTreeSet<String> {
    let (_, section) = page
        .split_once(&format!("\n{heading}\n"))
        .unwrap_or_else(|| panic!("docs/configuration.md has no heading '{heading}'"));
    let section = section.split("\n#").next().unwrap_or_default();
    let rows = section.lines().filter_map(|line| line.strip_prefix("| `"));
    rows.filter_map(|row| Some(row.split_once('`')?.0.to_owned()))
        .collect()
}

#[test]
fn every_key_is_in_the_documentation_and_no_other() {
    let page = include_str!("../../../docs/configuration.md");
    for (heading, keys) in [
        ("## cluster.toml", keys_of::<ClusterFile>()),
        ("### Each `[[hosts]]`", keys_of::<ClusterHost>()),
        ("## host.toml", keys_of::<HostFile>()),
        ("## A VM's file", keys_of::<VmFile>()),
        ("### `[sync]`", keys_of::<SyncTable>()),
        ("### `[memory]`", keys_of::<MemoryTable>()),
        ("### `[vm]`", keys_of::<VmTable>()),
        ("### Each `[[vm.disks]]`", keys_of::<DiskTable>()),
        ("### Each `[[vm.nics]]`", keys_of::<NicTable>()),
        ("### `[program]`", keys_of::<ProgramTable>()),
        ("### Each `[[program.nics]]`", keys_of::<ProgramNicTable>()),
    ] {
        assert!(keys.len() > 1, "{heading}: {keys:?}");
        assert_eq!(keys_under(page, heading), keys, "{heading}");
    }
}

#[test]
fn a_mistake_at_the_beginning_of_a_line_is_on_that_line() {
    let message = Cluster::parse("name = 'c'\nid = '00'\nelektion = 1\n", "cluster.toml")
        .expect_err("an unknown key")
        .to_string();
    assert!(
        message.starts_with("cluster.toml: line 3: unknown field `elektion`"),
        "{message}"
    );
}

const PROGRAM: &str = "name = 'p'\nmembers = ['a', 'b']\nwitness = 'c'\n[program]\ncommand = ['/usr/bin/redis-server', '--save', '']\n\
     [[program.nics]]\nmac = '52:54:00:12:34:57'\nbridge = 'br0'\naddress = '10.0.0.57/24'\n";

#[test]
fn a_program_stands_in_a_vms_place() {
    let config = VmConfig::parse(PROGRAM, "p.toml", &cluster()).expect("a good file");
    let program = config.program.expect("a program");
    assert_eq!(program.command.len(), 3);
    assert_eq!(
        (program.card.address.to_string().as_str(), program.card.prefix),
        ("10.0.0.57", 24)
    );
    assert_eq!(program.reading.order, dunlin_core::program::order::Order::Batch);
    assert!(program.reading.adapts);
    // Both copies have the same environment, whatever the daemons have.
    assert!(program.environment.iter().any(|(name, _)| name == "PATH"));
    assert_eq!(config.spec.nics[0].bridge.as_deref(), Some("br0"));
    assert!(vm(GOOD).expect("a VM").program.is_none());
}

#[test]
fn a_program_may_have_its_inputs_in_batches() {
    let text = PROGRAM.replace("[program]", "[program]\norder = 'batch'");
    let config = VmConfig::parse(&text, "p.toml", &cluster()).expect("a good file");
    let order = config.program.expect("a program").reading.order;
    assert_eq!(order, dunlin_core::program::order::Order::Batch);
}

fn with_data(lines: &str) -> String {
    PROGRAM.replace("[program]", &format!("[program]\n{lines}"))
}

#[test]
fn a_program_may_have_data_and_says_where() {
    let text = with_data("data = '/var/lib/dunlin/s.img'\ndata_at = '/var/lib/redis'");
    let config = VmConfig::parse(&text, "p.toml", &cluster()).expect("a good file");
    let data = config.program.and_then(|program| program.data).expect("data");
    assert_eq!((data.at.to_str(), data.mib), (Some("/var/lib/redis"), 256));
}

#[test]
fn a_program_may_have_its_own_root_and_be_begun_again() {
    let of = |lines: &str| {
        let config = VmConfig::parse(&with_data(lines), "p.toml", &cluster()).expect("a good file");
        config.program.expect("a program")
    };
    let plain = of("");
    assert!(!plain.has_own_root() && plain.restart == RestartPolicy::Never);
    let program = of("root = '/srv/images/redis'\nrestart = 'on-failure'");
    assert!(program.has_own_root());
    assert_eq!(program.root.to_str(), Some("/srv/images/redis"));
    assert_eq!(program.restart, RestartPolicy::OnFailure);
    assert_eq!(of("restart = 'always'").restart.name(), "always");
}

#[test]
fn a_mistake_in_a_programs_file_is_one_line_that_names_it() {
    let card = &PROGRAM[PROGRAM.find("[[program.nics]]").expect("a card")..];
    let mistakes = [
        (PROGRAM.replace("/usr/bin/", ""), "program.command"),
        (
            PROGRAM.replace("['/usr/bin/redis-server', '--save', '']", "[]"),
            "program.command",
        ),
        (
            PROGRAM.replace("10.0.0.57/24", "10.0.0.57"),
            "program.nics.address",
        ),
        (PROGRAM.replace("52:54", "53:54"), "unicast MAC"),
        (format!("{PROGRAM}{card}"), "one card"),
        (
            PROGRAM.replace("[program]", "[program]\norder = 'sometimes'"),
            "sometimes",
        ),
        (
            PROGRAM.replace("[program]", "[program]\npatience_ms = 0"),
            "patience_ms",
        ),
        (format!("{PROGRAM}\nmtu = 9000"), "program.nics.mtu"),
        (with_data("root = 'srv'"), "program.root"),
        (with_data("root = '/srv/../etc'"), "program.root"),
        (with_data("root = '/proc/1/root'"), "program.root"),
        (with_data("root = '/srv/a:b'"), "program.root"),
        (with_data("restart = 'on-abort'"), "on-abort"),
        (
            with_data("data = 'sessions.img'\ndata_at = '/srv'"),
            "program.data",
        ),
        (with_data("data = '/s.img'"), "program.data_at"),
        (with_data("data_mib = 64"), "program.data"),
        (with_data("data = '/s.img'\ndata_at = '/'"), "program.data_at"),
        (
            with_data("data = '/s.img'\ndata_at = '/srv/../etc'"),
            "program.data_at",
        ),
        (
            with_data("data = '/s.img'\ndata_at = '/proc/1'"),
            "program.data_at",
        ),
        (
            with_data("data = '/srv/s.img'\ndata_at = '/srv'"),
            "program.data_at",
        ),
        (
            with_data("data = '/s.img'\ndata_at = '/srv'\ndata_mib = 4"),
            "program.data_mib",
        ),
        (
            PROGRAM.replace("[program]", "policy = 'remus'\n[program]"),
            "policy 'dunlin'",
        ),
        (
            format!("{PROGRAM}[vm]\nmemory_mib = 64\nkernel = '/k'\n"),
            "either [vm] or [program]",
        ),
    ];
    for (text, words) in mistakes {
        let error = VmConfig::parse(&text, "p.toml", &cluster())
            .expect_err(words)
            .to_string();
        assert!(
            error.starts_with("p.toml: ") && error.contains(words) && !error.contains('\n'),
            "{words}: {error}"
        );
    }
}

#[test]
fn a_host_that_comes_has_a_number_that_nobody_had() {
    let mut vm = vm(GOOD).expect("a good file");
    let mut all = cluster();
    all.hosts.extend(["d", "e"].map(|name| {
        ClusterHost {
            name: name.into(),
            address: format!("10.0.1.{}:7700", name.as_bytes()[0])
                .parse()
                .expect("an address"),
        }
    }));
    let numbers = |vm: &VmConfig| -> Vec<(String, u8, bool)> {
        let host = |host: &vm::GroupHost| (host.name.clone(), host.member.id.0, host.member.witness);
        vm.group.iter().map(host).collect()
    };
    let mut highest = vm.newest_number();
    for (leaves, comes) in [
        ("b", "d"),
        ("a", "e"),
        ("c", "b"),
        ("d", "a"),
        ("e", "d"),
        ("a", "c"),
    ] {
        let hosts = vm.moved(leaves, comes, &all).expect("it can be");
        assert_eq!(newest(&hosts), highest + 1, "{leaves} -> {comes}");
        let moved = vm.with_hosts(&hosts, &all).expect("a good file");
        assert_eq!(moved.hosts(), hosts, "what is written is what is read");
        assert_eq!(moved.member(comes).map(|one| one.id.0), Some(highest + 1));
        assert!(moved.member(leaves).is_none());
        assert_eq!(
            moved.host_name(vm.member(leaves).expect("it was there").id),
            leaves
        );
        assert_eq!(moved.group.len(), 3);
        (vm, highest) = (moved, highest + 1);
    }
    assert_eq!(
        numbers(&vm),
        [
            ("d".into(), 7, false),
            ("c".into(), 8, false),
            ("b".into(), 5, true)
        ]
    );
    for (leaves, comes, why) in [
        ("d", "x", "not in the cluster"),
        ("d", "b", "has a part in VM 'v' already"),
        ("a", "e", "has no part"),
    ] {
        let said = vm
            .moved(leaves, comes, &all)
            .expect_err("it cannot be")
            .to_string();
        assert!(said.contains(why), "{said}");
    }
    // Until there are no more: then it says what to do.
    let refused = (0..64).find_map(|turn| {
        let (leaves, comes) = if turn % 2 == 0 { ("d", "e") } else { ("e", "d") };
        match vm.moved(leaves, comes, &all) {
            Ok(hosts) => {
                vm = vm.with_hosts(&hosts, &all).expect("a good file");
                None
            }
            Err(why) => Some(why.to_string()),
        }
    });
    let refused = refused.expect("numbers end");
    assert!(
        refused.contains("64 hosts") && refused.contains("dunlin down"),
        "{refused}"
    );
    assert_eq!(vm.newest_number(), 63);
}

#[test]
fn a_person_s_file_keeps_its_words_when_hosts_move() {
    let text = "# The shop.\nname = 'v' # its name\nmembers = ['a', 'b'] # two\npolicy = 'none'\n\n[vm] # small\nmemory_mib = 64\nkernel = '/k'\n\n\
                [[vm.nics]]\nmac = '52:54:00:12:34:56' # known to the switch\nbridge = 'br0'\n";
    let vm = VmConfig::parse(text, "vm.toml", &cluster()).expect("a good file");
    let hosts = vm.moved("b", "c", &cluster()).expect("it can be");
    let moved = vm.with_hosts(&hosts, &cluster()).expect("a good file");
    for words in [
        "# The shop.",
        "# its name",
        "# small",
        "# known to the switch",
        "bridge = 'br0'",
    ] {
        assert!(moved.text.contains(words), "{words} is lost: {}", moved.text);
    }
    assert_eq!(moved.spec.nics.len(), 1);
    assert_eq!(&*moved.group[1].name, "c");
    assert!(!moved.text.contains("witness"), "it had none");
}

#[test]
fn numbers_that_cannot_be_are_refused() {
    for (numbers, why) in [
        ("{ a = 0, b = 1 }", "'c' is not in numbers"),
        ("{ a = 0, b = 1, c = 1 }", "each host has its own"),
        ("{ a = 0, b = 1, c = 64 }", "from 0 to 63"),
        ("{ a = 0, b = 1, c = 300 }", "line 5"),
    ] {
        let said = vm(&format!("{GOOD}\nnumbers = {numbers}")).expect_err("no such numbers");
        assert!(said.to_string().contains(why), "{numbers}: {said}");
    }
}

fn with_d() -> Cluster {
    let mut all = cluster();
    all.hosts.push(ClusterHost {
        name: "d".into(),
        address: ([10, 0, 0, 4], 7700).into(),
    });
    all
}

#[test]
fn a_standby_leaves_its_place_to_the_host_whose_part_it_got() {
    let parse = |top: &str| {
        let text = format!("{top}\n[vm]\nmemory_mib = 64\nkernel = '/boot/vmlinuz'\n");
        VmConfig::parse(&text, "vm.toml", &with_d())
    };
    let mut vm = parse(&format!("{GOOD}\nstandby = 'd' # a spare one")).expect("a good file");
    let after = vm.standby.as_ref().map(|standby| standby.after);
    assert_eq!(after, Some(Duration::from_secs(30)));
    let slept = vm.clone();
    let mut lists = Vec::new();
    for (leaves, comes) in [("a", "d"), ("b", "a"), ("c", "b")] {
        let hosts = vm.moved(leaves, comes, &with_d()).expect("it can be");
        vm = vm.with_hosts(&hosts, &with_d()).expect("a good file");
        assert_eq!(vm.standby_host(), Some(leaves), "{comes} was the standby");
        lists.push(hosts);
    }
    assert_eq!(vm.standby.as_ref().map(|standby| standby.after), after);
    // A host that slept over the first lists knows the same of the last one.
    let woken = slept.with_hosts(&lists[1], &with_d()).expect("a good file");
    assert_eq!(woken.standby_host(), Some("b"));
    for (standby, why) in [
        ("standby = 'a'", "'a' has a part in the VM already"),
        ("standby = 'd'\nstandby_after = '10ms'", "no time from 1s to 1day"),
        ("standby = 'd'\nstandby_after = 'soon'", "no time from 1s to 1day"),
        (
            "standby_checkpoint = '10ms'",
            "standby_checkpoint = '10ms' is no time",
        ),
        (
            "standby = 'd'\nstandby_checkpoint = 'often'",
            "is no time from 1s to 1day",
        ),
    ] {
        let said = parse(&format!("{GOOD}\n{standby}")).expect_err("no such standby");
        assert!(said.to_string().contains(why), "{standby}: {said}");
    }
    parse(&format!("{GOOD}\nstandby = 'x'"))
        .expect("one that has left the cluster keeps no VM from starting");
    let alone = "name = 'v'\nmembers = ['a']\npolicy = 'none'\nstandby = 'd'";
    let said = parse(alone).expect_err("nothing to stand by for");
    assert!(said.to_string().contains("no standby for one"), "{said}");
}

#[test]
fn a_list_that_names_a_standby_says_who_it_is_whatever_a_file_says() {
    let mut all = with_d();
    all.hosts.push(ClusterHost {
        name: "e".into(),
        address: ([10, 0, 0, 5], 7700).into(),
    });
    let parse = |top: &str| {
        let text = format!("{top}\n[vm]\nmemory_mib = 64\nkernel = '/boot/vmlinuz'\n");
        VmConfig::parse(&text, "vm.toml", &all).expect("a good file")
    };
    for file in [
        GOOD.to_owned(),
        format!("{GOOD}\nstandby = 'd'\nstandby_after = '7s'"),
    ] {
        let slept = parse(&file);
        let mut vm = slept.clone();
        for standby in [Some("e"), Some("d"), None, Some("e")] {
            let hosts = vm.with_standby(standby, &all).expect("it can be");
            let newest = vm.newest_number();
            vm = vm.with_hosts(&hosts, &all).expect("a good file");
            assert_eq!((vm.standby_host(), vm.newest_number()), (standby, newest + 1));
            assert_eq!(vm.group, slept.group, "nobody has another part");
            let woken = slept.with_hosts(&hosts, &all).expect("a good file");
            assert_eq!(woken.standby_host(), standby, "a host that slept, with {file}");
        }
        // It gets a part, and its place goes to the other one, also for a host that slept over all of it.
        let hosts = vm.moved("b", "e", &all).expect("it can be");
        let moved = vm.with_hosts(&hosts, &all).expect("a good file");
        let woken = slept.with_hosts(&hosts, &all).expect("a good file");
        assert_eq!(
            (moved.standby_host(), woken.standby_host()),
            (Some("b"), Some("b"))
        );
        assert!(moved.member("b").is_none() && moved.member("e").is_some());
        // A group of which somebody speaks an older version gets the list without that word, and each host knows it by itself.
        let older = readable_by(&hosts, Some(4));
        assert!(older.iter().all(|host| host.part != Part::Standby), "{older:?}");
        assert_eq!(readable_by(&hosts, None), older);
        assert_eq!(readable_by(&hosts, Some(5)), hosts);
        let followed = vm.with_hosts(&older, &all).expect("a good file");
        assert_eq!(followed.standby_host(), Some("b"));
    }
    for (standby, why) in [
        ("a", "has a part in VM 'v' already"),
        ("x", "'x' is not in the cluster"),
    ] {
        let said = parse(GOOD)
            .with_standby(Some(standby), &all)
            .expect_err("no such standby");
        assert!(said.to_string().contains(why), "{said}");
    }
}
