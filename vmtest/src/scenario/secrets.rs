//! No secret is where others can read it: not in a log, not in a process list, not in what the daemons say.
//!
//! * **Decides:** what a leak looks like: a private key's text or bytes, or the shared secret, as text, in hexadecimal
//!   digits, or as Rust prints a list of bytes.
//! * **Flow:** [`Secrets::of`] reads what `dunlin init` made -> [`Secrets::look`] searches all that a running cluster shows.
//! * **Not here:** who may read the files themselves (the executable's own tests).

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::cluster::Cluster;

/// So many bytes of a secret in a row are a leak.
const PIECE: usize = 16;

/// What must not be seen, in every form in which it could be.
pub struct Secrets {
    needles: Vec<String>,
}

/// Where was looked.
#[derive(Clone, Copy, Debug, Default)]
pub struct Looked {
    /// Processes, QEMUs among them.
    pub processes: usize,
    /// QEMUs.
    pub qemus: usize,
    /// Bytes of logs and answers.
    pub bytes: usize,
}

impl Secrets {
    /// The secrets of the cluster in `dir`.
    ///
    /// # Errors
    /// When there are none: then the test looks in the wrong place.
    pub fn of(dir: &Path) -> Result<Self> {
        let mut needles = Vec::new();
        collect(dir, &mut needles)?;
        ensure!(
            !needles.is_empty(),
            "no secrets in {}: mend the test",
            dir.display()
        );
        needles.push("PRIVATE KEY".to_owned());
        Ok(Self { needles })
    }

    /// Searches logs, process lists, `status` and `events` of all running hosts.
    pub fn look(&self, cluster: &Cluster<'_>) -> Result<Looked> {
        let mut looked = Looked::default();
        for host in cluster.running() {
            let node = cluster.testbed().node(&host);
            for entry in fs::read_dir(node.home())?.flatten() {
                if entry.path().extension().is_some_and(|ext| ext == "log") {
                    self.search(
                        &mut looked,
                        &entry.path().display().to_string(),
                        &fs::read(entry.path())?,
                    )?;
                }
            }
            for pid in node.pids() {
                // A process may end meanwhile: then nobody can list it either.
                let read = |what: &str| fs::read(format!("/proc/{pid}/{what}")).unwrap_or_default();
                looked.processes += 1;
                looked.qemus += usize::from(read("comm").starts_with(b"qemu"));
                for what in ["cmdline", "environ"] {
                    self.search(
                        &mut looked,
                        &format!("host {host}: {what} of process {pid}"),
                        &read(what),
                    )?;
                }
            }
            for arguments in [
                &["status"][..],
                &["status", "--json"],
                &["events"],
                &["events", "--json"],
            ] {
                let output = cluster.output(&host, arguments)?;
                let name = format!("dunlin {} on host {host}", arguments.join(" "));
                self.search(&mut looked, &name, &output.stdout)?;
                self.search(&mut looked, &name, &output.stderr)?;
            }
        }
        Ok(looked)
    }

    /// Searches what a host would give to whoever helps.
    pub fn look_in_bundle(&self, cluster: &Cluster<'_>, host: &str) -> Result<()> {
        let file = cluster.testbed().dir().join(format!("bundle-{host}.tar.gz"));
        let config = cluster.host_file(host);
        let (to, config) = (file.to_string_lossy(), config.to_string_lossy());
        cluster.dunlin(host, &["support-bundle", "--config", &config, "--output", &to])?;
        let output = Command::new("tar")
            .arg("-xzOf")
            .arg(&file)
            .output()
            .context("tar is not here")?;
        let text = String::from_utf8_lossy(&output.stdout);
        for part in ["\"links\":", "host-begins", "host = ", "[[hosts]]", "MemTotal"] {
            ensure!(
                output.status.success() && text.contains(part),
                "no {part} in the bundle of host {host}"
            );
        }
        self.search(
            &mut Looked::default(),
            &format!("the bundle of host {host}"),
            &output.stdout,
        )
    }

    fn search(&self, looked: &mut Looked, place: &str, bytes: &[u8]) -> Result<()> {
        looked.bytes += bytes.len();
        let text = String::from_utf8_lossy(bytes);
        // Never the needle itself: this message goes to a log, too.
        ensure!(!self.are_in(&text), "a secret is in {place}");
        Ok(())
    }

    fn are_in(&self, text: &str) -> bool {
        self.needles.iter().any(|needle| text.contains(needle.as_str()))
    }
}

fn collect(dir: &Path, needles: &mut Vec<String>) -> Result<()> {
    for entry in fs::read_dir(dir)
        .with_context(|| format!("cannot read {}", dir.display()))?
        .flatten()
    {
        let (path, name) = (entry.path(), entry.file_name().to_string_lossy().into_owned());
        if path.is_dir() {
            collect(&path, needles)?;
        } else if name.ends_with("key.pem") {
            let text = fs::read_to_string(&path)?;
            let lines = text.lines().filter(|line| !line.starts_with("---"));
            let body: Vec<&str> = lines.collect();
            needles.extend(
                body.iter()
                    .filter(|line| line.len() >= PIECE)
                    .map(|line| (*line).to_owned()),
            );
            let key = base64(&body.concat()).with_context(|| format!("{} is no PEM", path.display()))?;
            needles.extend(key.chunks_exact(PIECE).flat_map(forms));
        } else if name == "secret" {
            let secret = fs::read(&path)?;
            needles.push(String::from_utf8_lossy(&secret).trim().to_owned());
            needles.extend(secret.chunks_exact(PIECE).flat_map(forms));
        }
    }
    Ok(())
}

/// How bytes may be printed.
fn forms(bytes: &[u8]) -> [String; 2] {
    let hex = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    let list: Vec<String> = bytes.iter().map(u8::to_string).collect();
    [hex, list.join(", ")]
}

fn base64(text: &str) -> Option<Vec<u8>> {
    let digits = text.trim_end_matches('=').bytes().map(|digit| {
        Some(match digit {
            b'A'..=b'Z' => digit - b'A',
            b'a'..=b'z' => digit - b'a' + 26,
            b'0'..=b'9' => digit - b'0' + 52,
            b'+' => 62,
            b'/' => 63,
            _ => return None,
        })
    });
    let digits: Vec<u8> = digits.collect::<Option<_>>()?;
    let whole = digits.chunks(4).flat_map(|four| {
        let bits = four
            .iter()
            .fold(0_u32, |bits, &digit| bits << 6 | u32::from(digit))
            << (6 * (4 - four.len()));
        let [_, bytes @ ..] = bits.to_be_bytes();
        bytes.into_iter().take(four.len() * 6 / 8)
    });
    Some(whole.collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_secret_is_found_in_every_form() {
        let dir = tempfile::tempdir().expect("a folder");
        let host = dir.path().join("a");
        fs::create_dir(&host).expect("a host's folder");
        let pem = "-----BEGIN PRIVATE KEY-----\nAAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=\n-----END PRIVATE KEY-----\n";
        fs::write(host.join("key.pem"), pem).expect("a key");
        fs::write(host.join("secret"), "what nobody else may know\n").expect("a secret");
        let secrets = Secrets::of(dir.path()).expect("secrets");
        for leak in [
            "key AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8= read",
            "000102030405060708090a0b0c0d0e0f10",
            "Tls([0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16])",
            "--secret what nobody else may know",
            "-----BEGIN PRIVATE KEY-----",
        ] {
            assert!(secrets.are_in(leak), "{leak}");
        }
        assert!(!secrets.are_in("ready: host a of cluster testbed at 10.77.1.1:7700"));
        fs::remove_dir_all(&host).expect("removed");
        assert!(Secrets::of(dir.path()).is_err(), "a test that looks for nothing");
    }
}
