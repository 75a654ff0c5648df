//! A Debian tree made of packages: what a service needs to run, unpacked beside the system.
//!
//! apt computes what a package depends on against an *empty* system, so the answer is the same on every machine that
//! has Debian's lists; what is installed here (perhaps another vendor's build of the same program) has no say.
//! Maintainer scripts are not run: a service's own preparation says what it needs of them.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

use super::packages::{self, Package};

/// Packages that only maintainer scripts, an init system or a person at the console would use.
const NOT_NEEDED: [&str; 34] = [
    "adduser",
    "ca-certificates",
    "ca-certificates-java",
    "debconf",
    "debianutils",
    "dmsetup",
    "dpkg",
    "gawk",
    "init-system-helpers",
    "iproute2",
    "java-common",
    "libc-l10n",
    "libcap2-bin",
    "libmagic-mgc",
    "libmpfr6",
    "libpam-modules",
    "libpam-modules-bin",
    "libsigsegv2",
    "locales",
    "lsb-base",
    "lsof",
    "mount",
    "openssl",
    "passwd",
    "procps",
    "psmisc",
    "rsync",
    "socat",
    "systemd",
    "sysvinit-utils",
    "tar",
    "ucf",
    "usrmerge",
    "util-linux",
];
/// The same by the beginning of the name. LLVM is PostgreSQL's compiler of queries, 120 MB and off in our guest.
const NOT_NEEDED_FAMILIES: [&str; 6] = [
    "perl",
    "libperl",
    "libllvm",
    "libz3",
    "util-linux-",
    "libsystemd-shared",
];
/// Directories that no service reads.
const NOT_READ: [&str; 7] = [
    "usr/share/doc",
    "usr/share/man",
    "usr/share/locale",
    "usr/share/lintian",
    "usr/share/info",
    "usr/share/bug",
    "usr/share/perl5",
];

/// Everything that `wanted` needs, as Debian's own archive has it now, in a fixed order.
pub fn closure(wanted: &[&str], cache: &Path) -> Result<Vec<Package>> {
    let preferences = cache.join("only-debian");
    // Another vendor's package of the same name would win by its version number.
    fs::write(
        &preferences,
        "Package: *\nPin: release o=Debian\nPin-Priority: 1001\n",
    )?;
    let output = Command::new("apt-get")
        .args(["-s", "-q", "--no-install-recommends"])
        .args(["-o", "Dir::State::status=/dev/null"])
        .args(["-o", "Dir::Etc::PreferencesParts=/nonexistent"])
        .arg("-o")
        .arg(format!("Dir::Etc::Preferences={}", preferences.display()))
        .arg("install")
        .args(wanted)
        .output()
        .context("apt-get is not here: guest images are made of Debian's packages")?;
    if !output.status.success() {
        let words = String::from_utf8_lossy(&output.stderr);
        let why = words.lines().find(|line| line.starts_with("E:")).unwrap_or("?");
        bail!(
            "apt cannot say what {} need: {why} (an old package list? 'apt-get update' renews it)",
            wanted.join(", ")
        );
    }
    let mut found = parse_simulation(&String::from_utf8_lossy(&output.stdout));
    found.retain(|package| is_needed(&package.name) || wanted.contains(&package.name.as_str()));
    found.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(found)
}

fn is_needed(name: &str) -> bool {
    let by_family = NOT_NEEDED_FAMILIES.iter().any(|family| name.starts_with(family));
    let of_perl = name.starts_with("lib") && name.ends_with("-perl");
    !(NOT_NEEDED.contains(&name) || by_family || of_perl)
}

/// Lines such as `Inst libc6 (2.36-9+deb12u10 Debian:12.11/stable [amd64]) []`.
fn parse_simulation(text: &str) -> Vec<Package> {
    let lines = text.lines().filter_map(|line| line.strip_prefix("Inst "));
    lines
        .filter_map(|line| {
            let (name, rest) = line.split_once(' ')?;
            let version = rest.trim_start_matches('(').split_whitespace().next()?;
            Some(Package {
                name: name.to_owned(),
                version: version.to_owned(),
            })
        })
        .collect()
}

/// Unpacks `packages` into the new directory `into`, with Debian's merged /usr, and without what no service reads.
pub fn unpack(packages: &[Package], cache: &Path, into: &Path) -> Result<()> {
    packages::download(packages, cache)?;
    fs::create_dir_all(into)?;
    for dir in ["bin", "sbin", "lib", "lib64"] {
        fs::create_dir_all(into.join("usr").join(dir))?;
        symlink(format!("usr/{dir}"), into.join(dir))?;
    }
    for package in packages {
        let deb = packages::downloaded(package, cache)?;
        let mut reader = Command::new("dpkg-deb")
            .arg("--fsys-tarfile")
            .arg(&deb)
            .stdout(Stdio::piped())
            .spawn()
            .context("dpkg-deb is not here")?;
        let stdout = reader.stdout.take().context("a piped stdout")?;
        let mut tar = Command::new("tar");
        tar.args(["-x", "--keep-directory-symlink", "--no-same-owner", "-C"])
            .arg(into)
            .stdin(stdout);
        for dir in NOT_READ {
            tar.arg(format!("--exclude=./{dir}/*"));
        }
        let unpacked = tar.status().context("tar is not here")?;
        if !reader.wait()?.success() || !unpacked.success() {
            bail!("{} is damaged: remove it and run again", deb.display());
        }
    }
    for dir in ["dev", "proc", "sys", "tmp", "data", "run", "modules", "work"] {
        fs::create_dir_all(into.join(dir))?;
    }
    Ok(())
}

/// Puts a static busybox in, as the shell and everything around it that the tree has not of its own.
pub fn add_busybox(root: &Path, busybox_root: &Path) -> Result<()> {
    let from = busybox_in(busybox_root)?;
    let to = root.join("usr/bin/busybox");
    if !to.exists() {
        fs::copy(from, &to).with_context(|| format!("cannot make {}", to.display()))?;
    }
    let output = Command::new(&to).arg("--list").output()?;
    for applet in String::from_utf8_lossy(&output.stdout).lines() {
        let missing = ["usr/bin", "usr/sbin"].iter().all(|dir| {
            // A dangling link of the package (to an alternative that was never set up) is there, too.
            fs::symlink_metadata(root.join(dir).join(applet)).is_err()
        });
        if missing {
            symlink("busybox", root.join("usr/bin").join(applet))?;
        }
    }
    Ok(())
}

/// The executable in an unpacked busybox-static.
pub fn busybox_in(busybox_root: &Path) -> Result<PathBuf> {
    ["usr/bin/busybox", "bin/busybox"]
        .map(|path| busybox_root.join(path))
        .into_iter()
        .find(|path| path.is_file())
        .context("busybox-static without a busybox")
}

/// Runs `script` with the tree as its root and as user `uid` of its own user namespace: a database makes its first
/// files with its own tools, which refuse to be root. Nobody has to be root for it, and nothing outside is touched.
pub fn run_inside(root: &Path, uid: u32, script: &str) -> Result<()> {
    let words = format!(
        "mount --rbind /dev \"$1/dev\" && exec unshare --user --map-user={uid} --map-group={uid} --root=\"$1\" \
         --wd=/ /usr/bin/busybox sh -e {script}"
    );
    let output = Command::new("unshare")
        .args([
            "--user",
            "--map-root-user",
            "--mount",
            "--",
            "sh",
            "-c",
            &words,
            "sh",
        ])
        .arg(root)
        .env_clear()
        .env(
            "PATH",
            "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        )
        .stdin(Stdio::null())
        .output()
        .context("unshare is not here: apt-get install util-linux")?;
    if !output.status.success() {
        let said = [output.stdout, output.stderr].concat();
        let said = String::from_utf8_lossy(&said).into_owned();
        let from = said.lines().count().saturating_sub(8);
        let last: Vec<&str> = said.lines().skip(from).collect();
        bail!(
            "{script} in {} failed ({}): {}",
            root.display(),
            output.status,
            last.join("; ")
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::{is_needed, parse_simulation};

    #[test]
    fn a_simulation_names_packages_and_versions() {
        let text = "Reading package lists...\nInst libc6 (2.36-9+deb12u10 Debian:12.11/stable [amd64]) []\n\
                    Inst mariadb-server (1:10.11.11-0+deb12u1 Debian:12.11/stable [amd64])\nConf libc6 (2.36-9 x)\n";
        let found = parse_simulation(text);
        let shown: Vec<String> = found.iter().map(ToString::to_string).collect();
        assert_eq!(
            shown,
            ["libc6 2.36-9+deb12u10", "mariadb-server 1:10.11.11-0+deb12u1"]
        );
    }

    #[test]
    fn libraries_stay_and_tools_of_maintainer_scripts_go() {
        for name in ["libc6", "libpq5", "postgresql-15", "libnode108", "php8.2-cgi"] {
            assert!(is_needed(name), "{name}");
        }
        for name in ["perl-base", "libdbi-perl", "systemd", "libllvm14", "dpkg"] {
            assert!(!is_needed(name), "{name}");
        }
    }
}
