//! Keys that are exchanged while links stand, and machines that are refused from one moment to the next.

use super::*;
use crate::keys::revocation::{Reason, RevocationList};
use crate::keys::{Authority, KeyedCert, make_ca, make_host};
use crate::transport::{Tcp, Transport, TransportError};
use std::io::{ErrorKind, Read, Write};

const CLUSTER: [u8; 16] = [7; 16];
const PATIENCE: Duration = Duration::from_secs(30);

fn auth(keys: &KeyedCert, ca_pem: &str, crl_pem: Option<&str>) -> Auth {
    Auth::Tls {
        cert_pem: keys.cert_pem.clone(),
        key_pem: keys.key_pem.clone(),
        ca_pem: ca_pem.to_owned(),
        crl_pem: crl_pem.map(str::to_owned),
    }
}

fn identity(host: &str, auth: Auth) -> Identity {
    Identity::new(CLUSTER, host, &["a".into(), "b".into()], Some(auth)).unwrap()
}

fn list(ca: &Authority, revoked: &[(&KeyedCert, Reason)]) -> String {
    let mut list = RevocationList {
        number: 1,
        ..RevocationList::default()
    };
    for (keys, reason) in revoked {
        list.add(&keys.cert_pem, *reason, 1_800_000_000).unwrap();
    }
    list.sign(ca, 1_800_000_000).unwrap()
}

/// b calls a; what each says of it.
fn call(listener: &Listener, b: &Identity) -> (Result<Stream, LinkError>, Result<Stream, LinkError>) {
    let hello = Hello::new("", "a", Purpose::Control);
    let connected = connect(listener.local_addr(), b, &hello, PATIENCE).map(|(_, stream)| stream);
    let accepted = listener.accept_timeout(PATIENCE).expect("an outcome");
    let accepted = accepted
        .map(|(_, stream)| stream)
        .map_err(|refusal| refusal.error);
    (connected, accepted)
}

fn goes_on(one: &mut Stream, other: &mut Stream) {
    one.set_read_timeout(Some(PATIENCE)).unwrap();
    other.write_all(b"still here").unwrap();
    other.flush().unwrap();
    let mut said = [0; 10];
    one.read_exact(&mut said).unwrap();
    assert_eq!(&said, b"still here");
}

#[test]
fn new_keys_are_taken_up_while_links_stand_and_the_old_ones_are_refused() {
    let ca = make_ca("mine").unwrap();
    let ca_pem = ca.keys.cert_pem.as_str();
    let (of_a, old, new) = (
        make_host(&ca, "a").unwrap(),
        make_host(&ca, "b").unwrap(),
        make_host(&ca, "b").unwrap(),
    );
    let a = identity("a", auth(&of_a, ca_pem, None));
    let b = identity("b", auth(&old, ca_pem, None));
    let thief = identity("b", auth(&old, ca_pem, None));
    let listener = Listener::bind("127.0.0.1:0", a.clone()).unwrap();
    let (before, at_a) = call(&listener, &b);
    let (mut before, mut at_a) = (before.unwrap(), at_a.unwrap());

    b.renew(b.prepare(&auth(&new, ca_pem, None)).unwrap());
    let superseded = list(&ca, &[(&old, Reason::Superseded)]);
    let ended = a.renew(a.prepare(&auth(&of_a, ca_pem, Some(&superseded))).unwrap());
    assert_eq!(ended, 0);
    goes_on(&mut before, &mut at_a);
    let (connected, accepted) = call(&listener, &b);
    assert!(connected.is_ok() && accepted.is_ok());
    let (connected, accepted) = call(&listener, &thief);
    assert!(matches!(accepted, Err(LinkError::PeerRevoked)));
    let why = connected.err().expect("refused").to_string();
    assert!(
        why.contains("this host's certificate was revoked") && !why.contains('\n'),
        "{why}"
    );
    goes_on(&mut before, &mut at_a);
}

#[test]
fn a_removed_machine_is_cut_off_at_once_and_refused_on_both_sides() {
    let ca = make_ca("mine").unwrap();
    let ca_pem = ca.keys.cert_pem.as_str();
    let (of_a, of_b) = (make_host(&ca, "a").unwrap(), make_host(&ca, "b").unwrap());
    let a = identity("a", auth(&of_a, ca_pem, None));
    let b = identity("b", auth(&of_b, ca_pem, None));
    let listener = Listener::bind("127.0.0.1:0", a.clone()).unwrap();
    let (before, at_a) = call(&listener, &b);
    let (mut before, mut at_a) = (before.unwrap(), at_a.unwrap());
    let removed = list(&ca, &[(&of_b, Reason::Removed)]);
    let other = list(&make_ca("mine").unwrap(), &[(&of_b, Reason::Removed)]);
    let with = |crl: &str| a.prepare(&auth(&of_a, ca_pem, Some(crl))).unwrap();
    assert_eq!(
        a.renew(with(&other)),
        0,
        "another authority's list does not count"
    );
    goes_on(&mut before, &mut at_a);

    assert_eq!(a.renew(with(&removed)), 1);
    let mut word = [0; 1];
    before.set_read_timeout(Some(PATIENCE)).unwrap();
    assert!(
        matches!(before.read(&mut word), Ok(0) | Err(_)) && !matches!(at_a.read(&mut word), Ok(1)),
        "its link has ended"
    );
    let (connected, accepted) = call(&listener, &b);
    assert!(
        matches!(connected, Err(LinkError::Revoked)),
        "{:?}",
        connected.err()
    );
    assert!(matches!(accepted, Err(LinkError::PeerRevoked)));
    // And a calls nobody who shows that certificate.
    let listener = Listener::bind("127.0.0.1:0", b).unwrap();
    let hello = Hello::new("", "b", Purpose::Control);
    let called = connect(listener.local_addr(), &a, &hello, PATIENCE);
    assert!(matches!(called, Err(LinkError::PeerRevoked)));
    let refusal = listener
        .accept_timeout(PATIENCE)
        .expect("an outcome")
        .err()
        .expect("refused");
    assert!(matches!(refusal.error, LinkError::Revoked), "{refusal}");
}

/// A follower that took it for its leader's own end would vote for another at once, and a leader would count what it had heard.
#[test]
fn a_log_link_that_this_host_ends_is_no_word_of_the_peer_and_is_known_here_first() {
    let ca = make_ca("mine").unwrap();
    let ca_pem = ca.keys.cert_pem.as_str();
    let (of_a, of_b) = (make_host(&ca, "a").unwrap(), make_host(&ca, "b").unwrap());
    let a = identity("a", auth(&of_a, ca_pem, None));
    let b = identity("b", auth(&of_b, ca_pem, None));
    let listener = Listener::bind("127.0.0.1:0", a.clone()).unwrap();
    let (at_b, at_a) = call(&listener, &b);
    let (mut at_b, mut log) = (at_b.unwrap(), Tcp::new(at_a.unwrap()).unwrap());
    log.progress(1 << 20).unwrap();
    let removed = list(&ca, &[(&of_b, Reason::Removed)]);
    let renewal = a.prepare(&auth(&of_a, ca_pem, Some(&removed))).unwrap();
    assert_eq!(a.renew(renewal), 1);
    let nothing = |error: std::io::Error| matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut);
    let mut word = [0; 1];
    // For a moment only, so this can miss a fault, never invent one.
    at_b.set_read_timeout(Some(Duration::from_millis(50))).unwrap();
    assert!(at_b.read(&mut word).is_err_and(nothing), "it sees an end");
    let ended = log.progress(1 << 20);
    assert!(matches!(ended, Err(TransportError::GivenUp(_))), "{ended:?}");
    drop(log);
    at_b.set_read_timeout(Some(PATIENCE)).unwrap();
    assert!(!at_b.read(&mut word).is_err_and(nothing), "its end is there");
}

#[test]
fn one_authority_follows_another_without_a_moment_in_which_hosts_do_not_believe_each_other() {
    let (old, new) = (make_ca("mine").unwrap(), make_ca("mine").unwrap());
    let both = format!("{}{}", new.keys.cert_pem, old.keys.cert_pem);
    let host = |ca: &Authority, name: &str| make_host(ca, name).unwrap();
    let (a_old, b_old) = (host(&old, "a"), host(&old, "b"));
    let (a_new, b_new) = (host(&new, "a"), host(&new, "b"));
    let old_pem = old.keys.cert_pem.as_str();
    let new_pem = new.keys.cert_pem.as_str();
    // A list of the old authority says nothing of the new one's certificates, whatever their names.
    let of_old = list(&old, &[(&host(&old, "c"), Reason::Removed)]);
    let crl = Some(of_old.as_str());
    let a = identity("a", auth(&a_old, old_pem, crl));
    let b = identity("b", auth(&b_old, old_pem, crl));
    let listener = Listener::bind("127.0.0.1:0", a.clone()).unwrap();
    let (before, at_a) = call(&listener, &b);
    let (mut before, mut at_a) = (before.unwrap(), at_a.unwrap());
    let steps = [
        (&a, auth(&a_old, &both, crl)),
        (&b, auth(&b_old, &both, crl)),
        (&b, auth(&b_new, &both, crl)),
        (&a, auth(&a_new, &both, crl)),
        (&a, auth(&a_new, new_pem, crl)),
        (&b, auth(&b_new, new_pem, None)),
    ];
    for (number, (who, auth)) in steps.iter().enumerate() {
        who.renew(who.prepare(auth).unwrap());
        let (connected, accepted) = call(&listener, &b);
        assert!(connected.is_ok() && accepted.is_ok(), "after step {number}");
        goes_on(&mut before, &mut at_a);
    }
    let late = identity("b", auth(&b_old, &both, None));
    let (connected, accepted) = call(&listener, &late);
    assert!(connected.is_err() && matches!(accepted, Err(LinkError::Untrusted(_))));
}

#[test]
fn keys_that_do_not_fit_change_nothing() {
    let ca = make_ca("mine").unwrap();
    let ca_pem = ca.keys.cert_pem.as_str();
    let (of_a, of_b) = (make_host(&ca, "a").unwrap(), make_host(&ca, "b").unwrap());
    let a = identity("a", auth(&of_a, ca_pem, None));
    let mixed = KeyedCert {
        cert_pem: of_a.cert_pem.clone(),
        key_pem: of_b.key_pem.clone(),
    };
    for wrong in [
        auth(&of_b, ca_pem, None),
        auth(&mixed, ca_pem, None),
        auth(&of_a, "", None),
        Auth::Insecure,
    ] {
        assert!(matches!(a.prepare(&wrong), Err(LinkError::BadKeys(_))));
    }
    let insecure = Identity::new(CLUSTER, "a", &[], Some(Auth::Insecure)).unwrap();
    assert!(insecure.prepare(&auth(&of_a, ca_pem, None)).is_err());
}
