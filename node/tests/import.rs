//! `dunlin import` as a person runs it: what it prints and writes, and what a hostile file costs.
//!
//! **Not here**: what of a domain is carried over (`src/import/tests.rs`).

use std::fs::{self, File};
use std::io::Write;
use std::path::Path;
use std::process::{Command, Output};

const DOMAIN: &str = include_str!("../src/import/fixtures/virt-install-uefi.xml");
/// Address space that a command which refuses has: a few times what it has for a domain, and much less than a hostile file asks for.
const MOST_KIB: u64 = 200_000;

fn import(folder: &Path, file: &str, more: &[&str]) -> Output {
    let program = env!("CARGO_BIN_EXE_dunlin");
    let mut command = Command::new("sh");
    command
        .arg("-c")
        .arg(format!("ulimit -v {MOST_KIB}; exec \"$@\""))
        .args(["sh", program, "import", "--libvirt", file])
        .args(more)
        .env("PATH", "/usr/bin:/bin")
        .current_dir(folder);
    command.output().expect("it runs")
}

fn refuses(output: &Output, words: &str) {
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(
        said.lines().count() == 1 && said.contains(words),
        "{said:?} has not {words:?}"
    );
}

const HOSTS: [&str; 4] = ["--members", "a,b", "--witness", "c"];

#[test]
fn the_file_is_written_once_and_says_what_is_not_in_it() {
    let folder = tempfile::tempdir().expect("a folder");
    fs::write(folder.path().join("shop.xml"), DOMAIN).expect("a domain");
    let with_file: Vec<&str> = HOSTS.into_iter().chain(["-o", "shop.toml"]).collect();
    let first = import(folder.path(), "shop.xml", &with_file);
    let said = String::from_utf8_lossy(&first.stderr);
    assert!(first.status.success() && first.stdout.is_empty(), "{said}");
    let left_out = said.lines().filter(|line| line.starts_with("LEFT OUT ")).count();
    let written = fs::read_to_string(folder.path().join("shop.toml")).expect("the file");
    assert!(left_out > 20, "{said}");
    assert_eq!(
        written.lines().filter(|line| line.starts_with("# - ")).count(),
        left_out
    );
    // Without a file the text is all of stdout.
    let printed = import(folder.path(), "shop.xml", &HOSTS);
    assert_eq!(String::from_utf8_lossy(&printed.stdout), written);
    refuses(
        &import(folder.path(), "shop.xml", &with_file),
        "shop.toml: it is there already",
    );
    assert_eq!(
        fs::read_to_string(folder.path().join("shop.toml")).expect("the file"),
        written
    );
}

#[test]
fn the_hosts_are_those_of_the_cluster_unless_they_are_named() {
    let folder = tempfile::tempdir().expect("a folder");
    fs::write(folder.path().join("shop.xml"), DOMAIN).expect("a domain");
    let init = Command::new(env!("CARGO_BIN_EXE_dunlin"))
        .args(["init", "cluster", "--cluster", "mine"])
        .args([
            "--host",
            "one=10.0.0.1:7700",
            "--host",
            "two=10.0.0.2:7700",
            "--host",
            "three=10.0.0.3:7700",
        ])
        .current_dir(folder.path())
        .output()
        .expect("it runs");
    assert!(init.status.success());
    let config = ["--config", "cluster/two/host.toml"];
    let output = import(folder.path(), "shop.xml", &config);
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(
        text.contains("members = [\"two\", \"one\"]\nwitness = \"three\"\n"),
        "{text}"
    );
    refuses(
        &import(folder.path(), "shop.xml", &["--config", "none.toml"]),
        "--members A,B --witness C",
    );
}

#[test]
fn a_hostile_or_missing_file_costs_one_line() {
    let folder = tempfile::tempdir().expect("a folder");
    let write = |name: &str, text: &str| fs::write(folder.path().join(name), text).expect("a file");
    let mut entities = String::from("<!DOCTYPE domain [<!ENTITY e0 'ha'>");
    for number in 1..30 {
        let last = number - 1;
        entities.push_str(&format!(
            "<!ENTITY e{number} '{}'>",
            format!("&e{last};").repeat(10)
        ));
    }
    entities.push_str("]><domain><name>&e29;</name></domain>");
    write("entities.xml", &entities);
    write("deep.xml", &"<domain>".repeat(30_000));
    let mut large = File::create(folder.path().join("large.xml")).expect("a file");
    let megabyte = "<domain type='kvm'>".repeat((1 << 20) / 19);
    (0..100).for_each(|_| large.write_all(megabyte.as_bytes()).expect("written"));
    for (name, words) in [
        ("entities.xml", "no XML of a domain"),
        ("deep.xml", "no XML of a domain"),
        ("large.xml", "longer than 256 KiB"),
        ("none.xml", "none.xml: No such file"),
        ("/dev/zero", "longer than 256 KiB"),
    ] {
        refuses(&import(folder.path(), name, &HOSTS), words);
    }
    assert!(!folder.path().join("shop.toml").exists());
}

#[test]
fn a_refused_domain_is_a_line_for_each_reason_and_no_file() {
    let folder = tempfile::tempdir().expect("a folder");
    let domain = DOMAIN
        .replace("type=\"qcow2\"", "type=\"vmdk\"")
        .replace("q35-7.2", "virt-7.2");
    fs::write(folder.path().join("shop.xml"), domain).expect("a domain");
    let with_file: Vec<&str> = HOSTS.into_iter().chain(["-o", "shop.toml"]).collect();
    let output = import(folder.path(), "shop.xml", &with_file);
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert_eq!(
        said.lines().filter(|line| line.starts_with("REFUSED  ")).count(),
        2,
        "{said}"
    );
    assert!(
        said.ends_with("dunlin: 2 things have to be changed first; nothing was written\n"),
        "{said}"
    );
    assert!(!folder.path().join("shop.toml").exists());
}
