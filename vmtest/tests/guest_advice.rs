//! The script for guests, `guest/advice/dunlin-guest`, in a root folder of its own and in a guest.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use anyhow::{Context, Result, ensure};
use dunlin_vmtest::{image, paths};

/// What a guest does instead of its init: two families with a default route each, and a route that has a first window of its own.
/// No line has a double quote, since the kernel's command line puts all of it into two.
const TRIAL: &str = "mount -t proc proc /proc; mount -t sysfs sysfs /sys;
while read -r module; do insmod /modules/$module.ko; done < /modules/order;
ip link set lo up; ip link set eth0 up; ip addr add 10.0.0.2/24 dev eth0; ip addr add fd77::2/64 dev eth0 nodad;
ip route add default via 10.0.0.1; ip -6 route add default via fd77::1; ip route add 10.9.0.0/16 via 10.0.0.1 initcwnd 30;
tell() { echo $1; ip -4 route; ip -6 route; echo hystart $(cat /sys/module/tcp_cubic/parameters/hystart);
sysctl net.ipv4.tcp_wmem net.ipv4.tcp_rmem net.ipv4.tcp_slow_start_after_idle; };
tell BEFORE; dash /etc/dunlin/dunlin-guest set bulk; tell SET; dash /etc/dunlin/dunlin-guest undo; tell AFTER; echo END; poweroff -f";

fn guest(root: &Path, words: &[&str]) -> Result<Output> {
    Ok(Command::new("sh")
        .arg(paths::workspace().join("guest/advice/dunlin-guest"))
        .args(words)
        .env("DUNLIN_ROOT", root)
        .output()?)
}

fn files(folder: &Path) -> Result<Vec<String>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        if path.is_dir() {
            found.extend(files(&path)?);
        } else {
            found.push(fs::read_to_string(path)?);
        }
    }
    found.sort();
    Ok(found)
}

#[test]
fn what_was_set_is_listed_and_taken_back() -> Result<()> {
    let root = tempfile::tempdir()?;
    let words = ["set", "no-timestamps", "no-kaslr", "zero-freed"];
    // Twice is as good as once.
    for _ in 0..2 {
        assert!(guest(root.path(), &words)?.status.success());
    }
    let expected = [
        "GRUB_CMDLINE_LINUX=\"$GRUB_CMDLINE_LINUX nokaslr\"\nGRUB_CMDLINE_LINUX=\"$GRUB_CMDLINE_LINUX init_on_free=1\"\n",
        "net.ipv4.tcp_timestamps=0\n",
    ];
    assert_eq!(files(root.path())?, expected);
    let listed = String::from_utf8(guest(root.path(), &["list"])?.stdout)?;
    let set: Vec<&str> = listed
        .lines()
        .filter(|line| line.ends_with(" set"))
        .filter_map(|line| line.split_whitespace().next())
        .collect();
    assert_eq!(set, ["no-timestamps", "no-kaslr", "zero-freed"]);
    assert!(guest(root.path(), &["undo"])?.status.success());
    assert!(files(root.path())?.is_empty());
    Ok(())
}

#[test]
fn a_wrong_word_changes_nothing_and_is_told_in_one_line() -> Result<()> {
    let root = tempfile::tempdir()?;
    for words in [
        &["set", "no-kaslr", "no-clocks"][..],
        &["set", "no/kaslr"],
        &["set"],
        &["sett", "no-kaslr"],
        &["undo", "no-kaslr"],
        &[],
    ] {
        let output = guest(root.path(), words)?;
        let told = String::from_utf8(output.stderr)?;
        assert_eq!(output.status.code(), Some(2), "{words:?}: {told}");
        assert!(
            told.lines().count() == 1 && told.starts_with("dunlin-guest: "),
            "{words:?}: {told}"
        );
        assert!(files(root.path())?.is_empty(), "{words:?}");
    }
    Ok(())
}

/// What the guest's console said in [`TRIAL`].
fn trial() -> Result<String> {
    let nginx = image::service("nginx")?;
    let image = image::ensure_service(nginx, &paths::guest_images(), &mut |line| eprintln!("{line}"))?;
    let words = TRIAL.replace('\n', " ");
    let append = format!("{} rdinit=/bin/dash -- -c \"{words}\"", image.append);
    let output = Command::new("timeout")
        .args(["--kill-after=5", "120", "qemu-system-x86_64"])
        .args(
            "-accel tcg -machine pc -nodefaults -no-user-config -no-reboot -display none -serial stdio"
                .split(' '),
        )
        .args(["-m", &nginx.memory_mib.to_string()])
        .args("-netdev hubport,id=net0,hubid=0 -device virtio-net-pci,netdev=net0,romfile=".split(' '))
        .arg("-kernel")
        .arg(&image.kernel)
        .arg("-initrd")
        .arg(&image.initrd)
        .args(["-append", &append])
        .stdin(std::process::Stdio::null())
        .output()
        .context("qemu-system-x86_64: 'cargo xtask setup' installs it")?;
    let said = String::from_utf8_lossy(&output.stdout).replace('\r', "");
    ensure!(
        output.status.success() && said.contains("\nEND\n"),
        "{}: {said}{}",
        output.status,
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(said)
}

#[test]
fn bulk_is_set_on_all_routes_of_a_guest_and_taken_back() -> Result<()> {
    let said = trial()?;
    let part = |from: &str, to: &str| {
        let (_, rest) = said.split_once(&format!("{from}\n"))?;
        Some(rest.split_once(&format!("{to}\n"))?.0.to_owned())
    };
    let parts = [("BEFORE", "SET"), ("SET", "AFTER"), ("AFTER", "END")].map(|(from, to)| part(from, to));
    let [Some(before), Some(set), Some(after)] = parts else {
        panic!("{said}");
    };
    for (destination, window) in [
        ("default via 10.0.0.1 ", "initcwnd 100"),
        ("10.0.0.0/24 ", "initcwnd 100"),
        ("default via fd77::1 ", "initcwnd 100"),
        ("fd77::/64 ", "initcwnd 100"),
        ("10.9.0.0/16 ", "initcwnd 30"),
    ] {
        let route = set.lines().find(|line| line.starts_with(destination));
        assert!(route.is_some_and(|route| route.contains(window)), "{said}");
    }
    assert!(!before.contains("initcwnd 100"), "{said}");
    for setting in [
        "net.ipv4.tcp_wmem = 4096 16384 33554432",
        "net.ipv4.tcp_rmem = 4096 131072 33554432",
        "net.ipv4.tcp_slow_start_after_idle = 0",
        "hystart 0",
    ] {
        assert!(set.replace('\t', " ").contains(setting), "{said}");
        assert!(!before.replace('\t', " ").contains(setting), "{said}");
    }
    // The link-local route comes a second after the card is up; `set` says what it cannot do without systemd.
    let told = |part: &str| -> Vec<String> {
        part.lines()
            .filter(|line| !line.starts_with("fe80:") && !line.starts_with("without systemd"))
            .map(str::to_owned)
            .collect()
    };
    assert_eq!(told(&after), told(&before), "{said}");
    Ok(())
}

#[test]
fn bulk_lasts_by_a_service_and_leaves_no_file() -> Result<()> {
    let root = tempfile::tempdir()?;
    for _ in 0..2 {
        assert!(guest(root.path(), &["set", "bulk"])?.status.success());
    }
    let in_root = |path: &str| fs::read_to_string(root.path().join(path));
    assert_eq!(
        in_root("etc/tmpfiles.d/90-dunlin.conf")?,
        "w /sys/module/tcp_cubic/parameters/hystart - - - - 0\n"
    );
    let unit = in_root("etc/systemd/system/dunlin-routes.service")?;
    assert!(unit.contains("\nExecStart=/bin/sh /usr/local/lib/dunlin/dunlin-guest routes\n"));
    // By the link, so it is begun at each boot.
    assert_eq!(
        in_root("etc/systemd/system/multi-user.target.wants/dunlin-routes.service")?,
        unit
    );
    assert_eq!(
        in_root("usr/local/lib/dunlin/dunlin-guest")?,
        fs::read_to_string(paths::workspace().join("guest/advice/dunlin-guest"))?
    );
    assert_eq!(
        in_root("etc/sysctl.d/90-dunlin.conf")?,
        "net.ipv4.tcp_slow_start_after_idle=0\nnet.ipv4.tcp_wmem=4096 16384 33554432\nnet.ipv4.tcp_rmem=4096 131072 33554432\n"
    );
    assert!(guest(root.path(), &["undo"])?.status.success());
    assert!(files(root.path())?.is_empty());
    Ok(())
}
