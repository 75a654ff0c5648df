//! `dunlin import` as a person runs it: what it prints and writes, and what a hostile file costs.
//!
//! **Not here**: what of a domain is carried over (`src/import/tests.rs`).

use std::fs::{self, File};
use std::io::Write;
use std::path::Path;
use std::process::{Command, Output};

#[path = "../../guest/tests/common/skipped.rs"]
mod skipped;

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

/// A cluster of three hosts, in `folder`, with their state there too.
fn init(folder: &Path) {
    let init = Command::new(env!("CARGO_BIN_EXE_dunlin"))
        .args(["init", "cluster", "--cluster", "mine"])
        .args(
            ["one=10.0.0.1:7700", "two=10.0.0.2:7700", "three=10.0.0.3:7700"]
                .map(|host| format!("--host={host}")),
        )
        .arg("--state")
        .arg(folder.join("state"))
        .current_dir(folder)
        .output()
        .expect("it runs");
    assert!(init.status.success());
}

#[test]
fn the_hosts_are_those_of_the_cluster_unless_they_are_named() {
    let folder = tempfile::tempdir().expect("a folder");
    fs::write(folder.path().join("shop.xml"), DOMAIN).expect("a domain");
    init(folder.path());
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

/// The cluster, and a domain with these words of variables.
fn with_variables(folder: &Path, nvram: &str) {
    if !folder.join("cluster").exists() {
        init(folder);
    }
    let (before, rest) = DOMAIN.split_once("<nvram ").expect("variables");
    let (_, after) = rest.split_once("</nvram>").expect("their end");
    fs::write(folder.join("shop.xml"), format!("{before}{nvram}{after}")).expect("a domain");
}

/// What is said of the variables: once, in one line, which is in the file, too.
fn said_of_variables(folder: &Path, host: &str, more: &[&str]) -> String {
    let config = format!("cluster/{host}/host.toml");
    let _ = fs::remove_file(folder.join("shop.toml"));
    let words = [&["--config", &config, "-o", "shop.toml"], more].concat();
    let output = import(folder, "shop.xml", &words);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{said}");
    let lines: Vec<&str> = said.lines().filter(|line| line.contains(" nvram ")).collect();
    let [line] = lines[..] else { panic!("{said}") };
    let written = fs::read_to_string(folder.join("shop.toml")).expect("the file");
    let (_, words) = line.split_once(" nvram ").expect("they are named");
    assert!(written.contains(&format!("# - nvram {words}\n")), "{written}");
    line.to_owned()
}

#[test]
fn a_uefi_s_own_variables_are_carried_or_a_line_says_why_not() {
    let ovmf = Path::new("/usr/share/OVMF");
    if !ovmf.join("OVMF_VARS_4M.fd").exists() {
        skipped::skip("variables are those of the package ovmf");
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    let folder = folder.path();
    let kept = folder.join("state/variables/shop.fd");
    // As a guest has written them: not those that a VM begins with.
    let own = folder.join("shop_VARS.fd");
    fs::copy(ovmf.join("OVMF_VARS_4M.ms.fd"), &own).expect("variables");
    let path = own.to_str().expect("text");
    let bytes = fs::read(&own).expect("variables");
    for nvram in [
        format!("<nvram template=\"/usr/share/OVMF/OVMF_VARS_4M.fd\">{path}</nvram>"),
        format!("<nvram type=\"file\" format=\"raw\"><source file=\"{path}\"/></nvram>"),
    ] {
        with_variables(folder, &nvram);
        let line = said_of_variables(folder, "one", &[]);
        assert!(
            line.starts_with("CARRIED  nvram ") && line.contains("copied to "),
            "{line}"
        );
        assert_eq!(fs::read(&kept).expect("the copy"), bytes);
        fs::remove_file(&kept).expect("removed");
    }
    // A host on which it does not start, and one that only prints.
    let line = said_of_variables(folder, "two", &["--members", "one,two"]);
    assert!(
        line.starts_with("LEFT OUT ") && line.contains("host 'one', on which the VM starts"),
        "{line}"
    );
    let printed = import(folder, "shop.xml", &["--config", "cluster/one/host.toml"]);
    assert!(String::from_utf8_lossy(&printed.stdout).contains("where a file is written (-o)"));
    assert!(!kept.exists());
    // As newer libvirt has them, and what does not fit.
    with_variables(folder, &format!("<nvram format=\"qcow2\">{path}</nvram>"));
    let line = said_of_variables(folder, "one", &[]);
    assert!(
        line.starts_with("LEFT OUT ") && line.contains("qcow2") && line.contains("qemu-img convert -O raw"),
        "{line}"
    );
    let plain = format!("<nvram>{path}</nvram>");
    with_variables(folder, &plain);
    for (what, words) in [
        (&b"QFI\xfb is how such an image begins"[..], "it is a qcow2 image"),
        (
            &vec![0xff; bytes.len()],
            "not laid out as in this host's OVMF_VARS_4M.fd",
        ),
        (
            &bytes[..131_072],
            "it has 131072 bytes and this host's OVMF_VARS_4M.fd has",
        ),
        (b"", "it has 0 bytes"),
    ] {
        fs::write(&own, what).expect("written");
        let line = said_of_variables(folder, "one", &[]);
        assert!(line.starts_with("LEFT OUT ") && line.contains(words), "{line}");
        assert!(!kept.exists(), "{line}");
    }
    fs::remove_file(&own).expect("removed");
    assert!(said_of_variables(folder, "one", &[]).contains("it cannot be read: No such file"));
    // Those of a VM that was here before are not replaced.
    fs::write(&own, &bytes).expect("written");
    fs::create_dir_all(kept.parent().expect("a folder")).expect("made");
    fs::write(&kept, "the guest's").expect("written");
    assert!(said_of_variables(folder, "one", &[]).contains("is there already"));
    assert_eq!(fs::read(&kept).expect("kept"), b"the guest's");
    // A VM's file that cannot be written takes its copy along.
    fs::remove_file(&kept).expect("removed");
    let words = [
        "--config",
        "cluster/one/host.toml",
        "-o",
        "no/such/folder/shop.toml",
    ];
    let output = import(folder, "shop.xml", &words);
    assert_eq!(output.status.code(), Some(2));
    assert!(!kept.exists());
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
