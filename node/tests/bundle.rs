//! No secret of a host is in what `dunlin support-bundle` writes beside a real daemon: not as it is, not in digits, not in base64, wherever it was put.

use std::collections::BTreeMap;
use std::fs;
use std::io::Read;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use base64::Engine;
use base64::engine::general_purpose::{STANDARD, URL_SAFE};
use daemon::{Host, ROOT};
use dunlin_vmtest::free_address;

#[path = "common/daemon.rs"]
#[allow(dead_code, reason = "other tests use the rest of it")]
mod daemon;

/// So many bytes in a row are a leak.
const PIECE: usize = 16;
const HOOK: &str = "/hooks/T0QPX7K2/b8W4mVtR9sLqZy31";
const TOKEN: &str = "dunlin1-q83vEjRWeJq83vEjRWeJq83vEjRWeA";

/// Everything by which a secret could be recognized.
struct Secret {
    name: &'static str,
    forms: Vec<Vec<u8>>,
}

impl Secret {
    fn of(name: &'static str, bytes: &[u8]) -> Self {
        let mut forms: Vec<Vec<u8>> = vec![bytes.to_vec()];
        let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        forms.push(hex.to_uppercase().into());
        forms.push(hex.into());
        for from in 0..3 {
            forms.push(STANDARD.encode(&bytes[from..]).trim_end_matches('=').into());
            forms.push(URL_SAFE.encode(&bytes[from..]).trim_end_matches('=').into());
        }
        Self { name, forms }
    }

    /// Of a PEM the bytes that it stands for.
    fn of_key(name: &'static str, pem: &str) -> Result<Self> {
        let body: String = pem.lines().filter(|line| !line.starts_with("---")).collect();
        let der = STANDARD.decode(&body)?;
        let mut secret = Self::of(name, &der);
        // As it is written in its file, in lines.
        secret.forms.extend(
            pem.lines()
                .filter(|line| line.len() >= PIECE && !line.starts_with("---"))
                .map(Into::into),
        );
        Ok(secret)
    }

    /// Any piece of any form; a line is the most that is looked for.
    fn is_in(&self, bytes: &[u8]) -> bool {
        let pieces: std::collections::HashSet<&[u8]> = self
            .forms
            .iter()
            .flat_map(|form| form.split(|byte| *byte == b'\n'))
            .flat_map(|line| line.windows(PIECE))
            .collect();
        bytes.windows(PIECE).any(|piece| pieces.contains(piece))
    }
}

/// The unpacked parts of the bundle, by their names.
fn unpacked(file: &Path) -> Result<BTreeMap<String, Vec<u8>>> {
    let mut archive = tar::Archive::new(flate2::read::GzDecoder::new(fs::File::open(file)?));
    let mut parts = BTreeMap::new();
    for entry in archive.entries()? {
        let mut entry = entry?;
        let name = String::from_utf8(entry.path_bytes().into_owned())?;
        let (_, name) = name.split_once('/').context("no folder")?;
        let mut words = Vec::new();
        entry.read_to_end(&mut words)?;
        parts.insert(name.to_owned(), words);
    }
    Ok(parts)
}

/// Puts every form of every secret where a person, or a log, may have put it.
fn plant(state: &Path, secrets: &[Secret]) -> Result<Vec<u8>> {
    let mut words = b"name = \"planted\"\n".to_vec();
    for form in secrets.iter().flat_map(|secret| &secret.forms) {
        words.extend_from_slice(b"append = \"x=");
        words.extend_from_slice(form);
        words.extend_from_slice(b"\"\n");
        // A part of it, from the middle on.
        words.extend_from_slice(b"# ");
        words.extend_from_slice(&form[form.len() / 3..]);
        words.push(b'\n');
    }
    words.extend_from_slice(format!("# say: dunlin cluster join {TOKEN}\n").as_bytes());
    words.extend_from_slice(b"memory_mib = 64\n");
    let folder = state.join("vms/planted");
    fs::create_dir_all(&folder)?;
    fs::write(folder.join("vm.toml"), &words)?;
    Ok(words)
}

/// `wanted`: a part's name, and words that have to be in it.
fn bundle(host: &Host, secrets: &[Secret], wanted: &[(&str, &str)]) -> Result<()> {
    let config = host.file();
    let etc = config.parent().context("its folder")?;
    let planted = plant(&etc.join("state"), secrets)?;
    let to = etc.join("bundle.tar.gz");
    let words = [
        "support-bundle",
        "--config",
        &config.to_string_lossy(),
        "--output",
        &to.to_string_lossy(),
    ];
    let output = host.say(ROOT, &words)?;
    ensure!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let parts = unpacked(&to)?;
    let always = [
        ("events.jsonl", "host-begins"),
        ("cluster.toml", "[[hosts]]"),
        ("vms/planted.toml", "memory_mib = 64"),
        ("vms/planted.toml", "[removed: a secret]"),
        ("cluster.jsonl", "\"host\":\"a\""),
        // Of the daemon that runs, and not of the command: the thread that writes its events down.
        ("threads.txt", " events: "),
        ("threads.txt", ", waits in "),
    ];
    for (name, there) in always.iter().chain(wanted) {
        let words = parts.get(*name).with_context(|| format!("no part {name}"))?;
        let words = String::from_utf8_lossy(words);
        ensure!(words.contains(there), "no {there} in {name}: {words}");
    }
    // Their names, too.
    let all: Vec<u8> = parts
        .iter()
        .flat_map(|(name, words)| [name.as_bytes(), b"\n", words].concat())
        .collect();
    let text = String::from_utf8_lossy(&all);
    for secret in secrets {
        ensure!(
            secret.is_in(&planted),
            "the search does not find {}: mend the test",
            secret.name
        );
        ensure!(!secret.is_in(&all), "{} is in the bundle", secret.name);
    }
    ensure!(!text.contains(&TOKEN[..PIECE]), "a token is in the bundle");
    Ok(())
}

#[test]
fn keys_the_authoritys_key_tokens_and_where_events_go_are_in_no_form_in_a_bundle() -> Result<()> {
    let mut host = Host::new()?;
    let config = host.file();
    let etc = config.parent().context("its folder")?;
    // As on the first host of a cluster.
    let authority = etc.join("../ca-key.pem");
    fs::copy(&authority, etc.join("ca-key.pem"))?;
    let metrics = free_address()?;
    host.configure(&format!(
        "notify_url = \"http://127.0.0.1:9{HOOK}\"\nmetrics = \"{metrics}\""
    ))?;
    host.start()?;
    let secrets = [
        Secret::of_key("the host's key", &fs::read_to_string(etc.join("key.pem"))?)?,
        Secret::of_key("the authority's key", &fs::read_to_string(authority)?)?,
        Secret::of("the path of notify_url", HOOK.as_bytes()),
    ];
    bundle(&host, &secrets, &[("metrics.txt", "# TYPE dunlin_")])
}

#[test]
fn a_shared_secret_is_in_no_form_in_a_bundle() -> Result<()> {
    let mut host = Host::new()?;
    let config = host.file();
    let etc = config.parent().context("its folder")?;
    let secret = "rK7wzT2mXq9LbVd4_nPs8Yc1-fGh3JuA";
    fs::write(etc.join("secret"), format!("{secret}\n"))?;
    let text = fs::read_to_string(&config)?;
    let trust = ["key =", "cert =", "ca ="];
    let kept: Vec<&str> = text
        .lines()
        .filter(|line| !trust.iter().any(|key| line.starts_with(key)))
        .collect();
    fs::write(&config, format!("secret = \"secret\"\n{}\n", kept.join("\n")))?;
    host.start()?;
    let none = [(
        "metrics.txt",
        "not to be had: host.toml names no address for metrics",
    )];
    bundle(
        &host,
        &[Secret::of("the shared secret", secret.as_bytes())],
        &none,
    )
}
