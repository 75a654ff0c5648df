//! New keys, authorities and revocation lists, as people and the other hosts bring them.
//!
//! **Decides**: who is told of them. **Flow**: `dunlin cluster rotate` and `revoke` ask each host's daemon, step by step ([`step`]); revocation lists are
//! asked for, too ([`hear_of_revocations`]). **Invariants**: those of `identity`. **Not here**: what is taken, and the files (`identity`).

use super::identity::{Files, KeysError, finish, lists, replace, trust};
use super::{Daemon, peers};
use crate::certificates;
use crate::config::Trust;
use dunlin_api::keys::{HostKeys, KeysStep};
use dunlin_api::{Answer, EventKind, Request};
use dunlin_fabric::keys::{self, revocation};
use std::collections::BTreeSet;
use std::io;
use std::sync::Arc;
use std::time::Duration;

/// The other hosts' revocation lists are asked for this often, besides when one of them comes back.
const ASK_AGAIN: Duration = Duration::from_secs(3600);

/// Does what a person, by way of a daemon of the cluster, asks of this host's keys.
pub fn step(daemon: &Daemon, step: KeysStep) -> Answer {
    // One at a time, its files included.
    let mut state = daemon.keys.state();
    let host = &daemon.host;
    let done = daemon.keys.files().and_then(|files| match step {
        KeysStep::Show => Ok(files.shown()),
        KeysStep::Begin => {
            let (key_pem, request) = keys::request_host(&host.name)?;
            state.pending = Some(key_pem);
            Ok(HostKeys {
                request: Some(request),
                ..files.shown()
            })
        }
        KeysStep::Finish { cert } => finish(&host.identity, files, &mut state, cert).inspect(|_| {
            let text = "this host shows a new certificate from now on; links that stand go on";
            host.events.push("", EventKind::KeysRenewed, text);
        }),
        KeysStep::Trust { ca, proof } => {
            trust(&host.identity, files, ca, proof.as_deref()).inspect(|shown| {
                let text = match keys::bundle(&shown.ca).len() {
                    1 => "this host believes one authority",
                    _ => "this host believes a new authority and the one before it",
                };
                host.events.push("", EventKind::AuthorityChanged, text);
            })
        }
        KeysStep::Revoke { crl } => revoke(daemon, files, &crl),
    });
    state.certificates = certificates::of(&daemon.keys.trust);
    match done {
        Ok(shown) => Answer::Keys(Box::new(shown)),
        Err(why) => Answer::refused(format!("host '{}': {why}", host.name)),
    }
}

fn revoke(daemon: &Daemon, mut files: Files, crl: &str) -> Result<HostKeys, KeysError> {
    if revocation::verified(crl, &files.ca.1).is_empty() {
        return Err(KeysError::StrangeList);
    }
    let before = lists(&files.crl.1, &files.ca.1);
    let now = lists(&format!("{before}{crl}"), &files.ca.1);
    if before == now {
        return Ok(files.shown());
    }
    files.crl.1 = now;
    let (identity, events) = (&daemon.host.identity, &daemon.host.events);
    let renewal = identity.prepare(&files.auth())?;
    let (path, text) = &files.crl;
    replace(path, text, 0o644).map_err(KeysError::of(path))?;
    let ended_links = identity.renew(renewal);
    let mut words = "certificates were revoked: whoever shows one is refused".to_owned();
    if ended_links > 0 {
        words = format!("{words}; {ended_links} links of a removed machine were ended");
    }
    events.push("", EventKind::CertificatesRevoked, words);
    Ok(HostKeys {
        ended_links,
        ..files.shown()
    })
}

/// Asks other hosts for their revocation lists, on a thread of its own: this host may have been away when a machine was removed.
pub fn hear_of_revocations(daemon: &Arc<Daemon>) -> io::Result<()> {
    if !matches!(daemon.keys.trust, Trust::Tls { .. }) {
        return Ok(());
    }
    let daemon = daemon.clone();
    let work = move || {
        let all: BTreeSet<String> = daemon
            .host
            .cluster
            .hosts
            .iter()
            .map(|host| host.name.clone())
            .collect();
        let mut hosts = all.clone();
        loop {
            hosts.remove(&daemon.host.name);
            hosts.iter().for_each(|host| hear_of(&daemon, host));
            let keys = &daemon.keys;
            let mut to_ask = keys.to_ask.lock();
            let timeout = keys
                .asked
                .wait_while_for(&mut to_ask, |hosts| hosts.is_empty(), ASK_AGAIN);
            hosts = match timeout.timed_out() {
                true => all.clone(),
                false => std::mem::take(&mut *to_ask),
            };
        }
    };
    std::thread::Builder::new()
        .name("revocations".into())
        .spawn(work)?;
    Ok(())
}

fn hear_of(daemon: &Daemon, host: &str) {
    let request = Request::Keys {
        host: host.to_owned(),
        ask: KeysStep::Show,
    };
    // One that is not there is asked when it is.
    if let Answer::Keys(shown) = peers::ask(daemon, host, &request)
        && !shown.crl.is_empty()
    {
        step(daemon, KeysStep::Revoke { crl: shown.crl });
    }
}
