use super::*;
use serde::de::DeserializeOwned;
use std::path::Path;
use toml::{Table, Value};

const CLUSTER: &str =
    "name = 't'\nid = '00112233445566778899aabbccddeeff'\n[[hosts]]\nname = 'a'\naddress = '10.0.0.1:7700'\n";
const HOST: &str = "host = 'a'\ncluster = 'cluster.toml'\nstate = '/var/lib/dunlin'\n";
const VM: &str = "name = 'v'\nmembers = ['a', 'b']\nwitness = 'c'\n[vm]\nmemory_mib = 64\n";
const PROGRAM: &str = "name = 'p'\nmembers = ['a', 'b']\nwitness = 'c'\n[program]\ncommand = ['/bin/true']\n\
     [[program.nics]]\nmac = '52:54:00:12:34:57'\naddress = '10.0.0.57/24'\n";

/// With every key that a person may want.
const WHOLE_VM: &str = r#"
name = "shop"
members = ["a", "b"]
witness = "c"
numbers = { a = 0, b = 1, c = 2 }
standby = "d"
standby_after = "1min"
standby_checkpoint = "30s"
policy = "remus"
speculative = true
storage = "colo"
copy_mib_per_s = 50
disk_memory_mib = 64
settle_when_idle = false
verify_disks = "36h"
verify_mib_per_s = 3
sync = { shortest_ms = 0.5, longest_ms = 80.0, quiet_ms = 500.0, period_ms = 20.0, staging_mib = 64, compare = "tree", ignore_http_date = true, audit = true }
memory = { log_mib = 8, inbound_mib = 9, outbound_mib = 10 }

[vm]
name = "shop"
accel = "kvm"
machine = "q35"
firmware = "uefi"
qemu = "/usr/bin/qemu-system-x86_64"
cpu = "host"
vcpus = 2
memory_mib = 512
memory_overcommit = true
kernel = "/boot/vmlinuz"
initrd = "/boot/initrd.img"
append = "console=\"ttyS0\""
nic_backend = "vhost-user"
run_as = "nobody"
sandbox = false
preload = "/usr/lib/p.so"
serial_log = "/var/log/shop"

[[vm.disks]]
path = "/srv/shop.qcow2"
format = "qcow2"
backing = true

[[vm.nics]]
mac = "52:54:00:12:34:56"
bridge = "br0"
tap = "shop0"
promiscuous = true
"#;

const WHOLE_PROGRAM: &str = r#"
name = "sessions"
members = ["a", "b"]
witness = "c"

[program]
command = ["/usr/bin/redis-server", "--save", ""]
root = "/srv/images/redis"
directory = "/var"
environment = { LANG = "C" }
user = "redis"
port = 6379
order = "batch"
patience_ms = 100
clock = "own"
chance = "agreed"
scratch_mib = 64
data = "/srv/s.img"
data_at = "/var/lib/redis"
data_mib = 64
memory_mib = 128
cpus = 1.5
tasks = 100
start_within_s = 5
restart = "on-failure"

[[program.nics]]
mac = "52:54:00:12:34:57"
bridge = "br0"
tap = "p0"
address = "10.0.0.57/24"
gateway = "10.0.0.1"
mtu = 1450
"#;

const WHOLE_HOST: &str = r#"
host = "a"
cluster = "cluster.toml"
state = "/var/lib/dunlin"
control = "/run/dunlin/b.sock"
metrics = "10.0.0.1:7701"
page = "off"
api = "[2001:db8::1]:7703"
notify_url = "https://example.com/x"
viewers = "dunlin-view"
operators = "dunlin-operate"
key = "key.pem"
cert = "cert.pem"
ca = "ca.pem"
secret = "secret"
insecure = true
"#;

const WHOLE_CLUSTER: &str = r#"
name = "mine"
id = "00112233445566778899aabbccddeeff"
durability = "disk"
election_ms = 100

[[hosts]]
name = "a"
address = "10.0.0.1:7700"
"#;

/// A kind of file: read, written, and read again.
trait File: serde::Serialize + DeserializeOwned + PartialEq + std::fmt::Debug + utoipa::ToSchema {}

impl File for ClusterFile {}
impl File for HostFile {}
impl File for VmFile {}

/// Reads a file, and holds what is written of it, in TOML and in JSON, to be read as the same.
fn there_and_back<T: File>(text: &str) -> Result<T, String> {
    let file: T = toml::from_str(text).map_err(|error| error.message().to_owned())?;
    let toml = toml::to_string(&file).expect("it is written");
    assert_eq!(toml::from_str::<T>(&toml).expect(&toml), file, "{toml}");
    let json = serde_json::to_string(&file).expect("it is written");
    assert_eq!(serde_json::from_str::<T>(&json).expect(&json), file, "{json}");
    Ok(file)
}

/// What stands in `more`, on top of `base`.
fn over(base: &mut Table, more: &Table) {
    for (key, value) in more {
        match (base.get_mut(key), value) {
            (Some(Value::Table(under)), Value::Table(over_it)) => over(under, over_it),
            _ => {
                base.insert(key.clone(), value.clone());
            }
        }
    }
}

/// An example may be a part of a file: on top of the least one of its kind it is a file.
fn is_an_example_of<T: File>(least: &str, example: &Table) -> Result<T, String> {
    let mut whole: Table = toml::from_str(least).expect("the least file");
    over(&mut whole, example);
    there_and_back(&toml::to_string(&whole).expect("it is written"))
}

/// The examples of a page: what stands between "```toml" and "```".
fn examples(page: &str) -> impl Iterator<Item = &str> {
    page.split("```toml\n")
        .skip(1)
        .map(|rest| match rest.split_once("```") {
            Some((example, _)) => example,
            None => rest,
        })
}

#[test]
fn every_example_in_the_documentation_is_read_and_written_as_the_same() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let pages = std::fs::read_dir(root.join("docs")).expect("the documentation");
    let pages = pages.map(|page| page.expect("a page").path());
    let pages = pages.filter(|page| page.extension().is_some_and(|kind| kind == "md"));
    let mut found = 0;
    for page in pages.chain([root.join("README.md")]) {
        let text = std::fs::read_to_string(&page).expect("a page");
        for example in examples(&text) {
            let table: Table = toml::from_str(example).expect(example);
            // What a test plays; it is read there.
            if table.contains_key("scenario") {
                continue;
            }
            let kinds = [
                is_an_example_of::<VmFile>(VM, &table).err(),
                is_an_example_of::<VmFile>(PROGRAM, &table).err(),
                is_an_example_of::<HostFile>(HOST, &table).err(),
                is_an_example_of::<ClusterFile>(CLUSTER, &table).err(),
            ];
            let is_one = kinds.iter().any(Option::is_none);
            assert!(is_one, "{}: {kinds:?}\n{example}", page.display());
            found += 1;
        }
    }
    assert!(found >= 8, "{found} examples");
}

#[test]
fn the_least_and_the_whole_file_of_each_kind_are_read_and_written_as_the_same() {
    for text in [VM, PROGRAM, WHOLE_VM, WHOLE_PROGRAM] {
        there_and_back::<VmFile>(text).expect(text);
    }
    for text in [HOST, WHOLE_HOST] {
        there_and_back::<HostFile>(text).expect(text);
    }
    for text in [CLUSTER, WHOLE_CLUSTER] {
        there_and_back::<ClusterFile>(text).expect(text);
    }
}

#[test]
fn the_whole_files_leave_no_key_out() {
    fn keys<T: DeserializeOwned>(table: &Table) {
        let mut table = table.clone();
        table.insert("no_such_key".to_owned(), 1.into());
        let Err(error) = table.clone().try_into::<T>() else {
            panic!("a key that is not known is taken")
        };
        let message = error.message();
        let (_, known) = message.split_once("expected").expect(message);
        for key in known.split('`').skip(1).step_by(2) {
            // A file is a VM's or a program's.
            let is_there = table.contains_key(key) || ["vm", "program"].contains(&key);
            assert!(is_there, "{key}");
        }
    }
    fn first(value: &Value) -> &Table {
        let table = value.as_array().and_then(|all| all.first()).unwrap_or(value);
        table.as_table().expect("a table")
    }
    let [vm, program, host, cluster] = [WHOLE_VM, WHOLE_PROGRAM, WHOLE_HOST, WHOLE_CLUSTER]
        .map(|text| toml::from_str::<Table>(text).expect("a file"));
    keys::<VmFile>(&vm);
    keys::<SyncTable>(first(&vm["sync"]));
    keys::<MemoryTable>(first(&vm["memory"]));
    keys::<VmTable>(first(&vm["vm"]));
    keys::<DiskTable>(first(&vm["vm"]["disks"]));
    keys::<NicTable>(first(&vm["vm"]["nics"]));
    keys::<ProgramTable>(first(&program["program"]));
    keys::<ProgramNicTable>(first(&program["program"]["nics"]));
    keys::<HostFile>(&host);
    keys::<ClusterFile>(&cluster);
    keys::<ClusterHost>(first(&cluster["hosts"]));
}

#[test]
fn what_is_filled_by_a_program_is_what_a_person_gets_who_writes_as_little() {
    let vm = VmFile {
        witness: Some("c".into()),
        vm: Some(VmTable::new(64)),
        ..VmFile::new("v", &["a", "b"])
    };
    assert_eq!(there_and_back(VM), Ok(vm));
    let nic = ProgramNicTable::new("52:54:00:12:34:57", "10.0.0.57/24");
    let program = VmFile {
        witness: Some("c".into()),
        program: Some(ProgramTable::new(vec!["/bin/true".into()], nic)),
        ..VmFile::new("p", &["a", "b"])
    };
    assert_eq!(there_and_back(PROGRAM), Ok(program));
    let host = HostFile::new("a", "cluster.toml".into(), "/var/lib/dunlin".into());
    assert_eq!(there_and_back(HOST), Ok(host));
    let only = ClusterHost {
        name: "a".into(),
        address: ([10, 0, 0, 1], 7700).into(),
    };
    let cluster = ClusterFile::new("t", "00112233445566778899aabbccddeeff", vec![only]);
    assert_eq!(there_and_back(CLUSTER), Ok(cluster));
}

#[test]
fn a_word_that_is_none_is_refused_with_those_that_are() {
    let of_vm = |line: &str| there_and_back::<VmFile>(&format!("{VM}{line}\n")).expect_err(line);
    assert_eq!(
        of_vm("machine = 'mac'"),
        "unknown variant `mac`, expected one of `pc`, `q35`, `microvm`"
    );
    assert_eq!(
        of_vm("[sync]\ncompare = 'forest'"),
        "unknown comparison 'forest': use list or tree"
    );
    assert!(of_vm("memroy_mib = 3").starts_with("unknown field `memroy_mib`, expected one of `name`"));
}

#[test]
fn what_is_as_it_would_be_without_a_word_is_not_written() {
    for text in [VM, PROGRAM, WHOLE_VM, WHOLE_PROGRAM] {
        let table: Table = toml::from_str(text).expect("a file");
        let file: VmFile = toml::from_str(text).expect("a file");
        let written: Table = toml::from_str(&toml::to_string(&file).expect("it is written")).expect("a file");
        assert_eq!(written, table);
    }
}

#[test]
fn the_schema_says_every_default() {
    fn hold<T: DeserializeOwned + PartialEq + std::fmt::Debug + utoipa::ToSchema>(least: &Table) {
        let file: T = least.clone().try_into().expect("a file");
        let schema = serde_json::to_value(T::schema()).expect("JSON");
        let required = schema["required"].as_array().cloned().unwrap_or_default();
        for (key, about) in schema["properties"].as_object().expect("keys") {
            let default = about.get("default").filter(|value| !value.is_null());
            if let Some(default) = default {
                let mut said = least.clone();
                let value = Value::try_from(default).expect("a value");
                said.insert(key.clone(), value);
                assert_eq!(said.try_into::<T>().expect(key), file, "{key}");
            }
            // Tables, lists, and what is nothing if it is left out, need no word.
            let is_empty =
                ["object", "array"].map(Into::into).contains(&about["type"]) || about["type"].is_array();
            let is_nothing =
                is_empty || ["sync", "memory", "vm", "program", "insecure", "name"].contains(&key.as_str());
            assert!(
                required.contains(&key.as_str().into()) || default.is_some() || is_nothing,
                "{key}: {about}"
            );
        }
    }
    let [vm, program, host, cluster] =
        [VM, PROGRAM, HOST, CLUSTER].map(|text| toml::from_str::<Table>(text).expect("a file"));
    hold::<VmFile>(&vm);
    hold::<VmTable>(vm["vm"].as_table().expect("a table"));
    hold::<SyncTable>(&Table::new());
    hold::<MemoryTable>(&Table::new());
    hold::<ProgramTable>(program["program"].as_table().expect("a table"));
    hold::<HostFile>(&host);
    hold::<ClusterFile>(&cluster);
}
