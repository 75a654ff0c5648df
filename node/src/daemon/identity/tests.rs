//! The steps on real files, without a daemon around them.

use super::*;
use dunlin_fabric::keys::revocation::{Reason, RevocationList};
use dunlin_fabric::keys::{Authority, make_ca, make_host, sign_host};

struct Place {
    folder: tempfile::TempDir,
    authority: Authority,
    identity: Identity,
    state: State,
}

impl Place {
    fn new() -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let authority = make_ca("mine").expect("an authority");
        let host = make_host(&authority, "a").expect("a host");
        for (name, text) in [
            ("key.pem", &host.key_pem),
            ("cert.pem", &host.cert_pem),
            ("ca.pem", &authority.keys.cert_pem),
        ] {
            std::fs::write(folder.path().join(name), text).expect("written");
        }
        let auth = read(folder.path()).auth();
        let state = State {
            pending: None,
            certificates: Vec::new(),
        };
        Self {
            identity: Identity::new([1; 16], "a", &[], Some(auth)).expect("its keys fit"),
            folder,
            authority,
            state,
        }
    }

    fn files(&self) -> Files {
        read(self.folder.path())
    }

    fn asks(&mut self) -> String {
        let (key, request) = keys::request_host("a").expect("a request");
        self.state.pending = Some(key);
        request
    }

    fn finish(&mut self, cert: &str) -> Result<HostKeys, KeysError> {
        finish(&self.identity, self.files(), &mut self.state, cert.to_owned())
    }

    fn trust(&self, ca: &str, proof: Option<&str>) -> Result<HostKeys, KeysError> {
        trust(&self.identity, self.files(), ca.to_owned(), proof)
    }

    fn names(&self) -> BTreeSet<String> {
        let entries = std::fs::read_dir(self.folder.path()).expect("a folder");
        let names = entries.map(|entry| entry.expect("an entry").file_name());
        names.map(|name| name.to_string_lossy().into_owned()).collect()
    }
}

fn read(folder: &Path) -> Files {
    let path = |name: &str| folder.join(name);
    Files::read(&path("key.pem"), &path("cert.pem"), &path("ca.pem")).expect("its files")
}

fn refused(outcome: Result<HostKeys, KeysError>, words: &str) {
    let why = outcome.expect_err(words).to_string();
    assert!(why.contains(words) && !why.contains('\n'), "{why}");
}

#[test]
fn only_the_certificate_that_was_asked_for_is_taken_and_nothing_else_is_touched() {
    let mut place = Place::new();
    let before = place.files();
    let stranger = make_ca("mine").expect("another authority");
    let request = place.asks();
    let sign = |authority: &Authority, host: &str| sign_host(authority, host, &request).expect("signed");
    let elsewhere = make_host(&place.authority, "a").expect("a host");
    refused(place.finish(&elsewhere.cert_pem), "waits for no such certificate");
    refused(place.finish("no certificate"), "waits for no such certificate");
    refused(place.finish(&sign(&stranger, "a")), "does not believe");
    let of_b = sign(&place.authority, "b");
    refused(place.finish(&of_b), "not for host \"a\"");
    assert_eq!(place.files().cert, before.cert);
    assert_eq!(place.files().key, before.key);

    let good = sign(&place.authority, "a");
    let shown = place.finish(&good).expect("it is taken");
    assert_eq!(shown.cert, good);
    let after = place.files();
    assert!(keys::is_for_key(&after.cert.1, &after.key.1) && after.key != before.key);
    assert_eq!(
        place.names(),
        ["ca.pem", "cert.pem", "key.pem"].map(str::to_owned).into(),
        "nothing is left behind"
    );
    refused(place.finish(&good), "waits for no such certificate");
}

#[test]
fn a_crash_at_any_moment_leaves_a_key_for_the_certificate() {
    let place = Place::new();
    let new = make_host(&place.authority, "a").expect("new keys");
    let (key, cert) = (
        place.folder.path().join("key.pem"),
        place.folder.path().join("cert.pem"),
    );
    let fits = |what: &str| {
        mend(&key, &cert).expect("mended");
        let files = place.files();
        assert!(keys::is_for_key(&files.cert.1, &files.key.1), "{what}");
        assert!(!next_to(&key).exists(), "{what}");
    };
    fits("nothing was begun");
    std::fs::write(next_to(&key), &new.key_pem[..40]).expect("written");
    fits("half of the key was written");
    std::fs::write(next_to(&key), &new.key_pem).expect("written");
    fits("the key was written");
    assert_ne!(place.files().key.1, new.key_pem, "its certificate never came");
    std::fs::write(next_to(&key), &new.key_pem).expect("written");
    std::fs::write(&cert, &new.cert_pem).expect("written");
    fits("the certificate was in place, and the key was not");
    assert_eq!(place.files().key.1, new.key_pem);
}

#[test]
fn an_authority_that_nobody_has_named_is_not_believed() {
    let mut place = Place::new();
    let (next, thief) = (make_ca("mine").expect("a"), make_ca("mine").expect("b"));
    let old = place.authority.keys.cert_pem.clone();
    let both = |other: &Authority| format!("{}{old}", other.keys.cert_pem);
    let proof = succession::name_successor(&place.authority, &next).expect("a proof");
    let own = succession::name_successor(&thief, &thief).expect("a proof");
    refused(place.trust(&both(&next), None), "was not named");
    refused(place.trust(&both(&thief), Some(&proof)), "was not named");
    refused(place.trust(&both(&thief), Some(&own)), "was not named");
    refused(place.trust("", None), "one authority");
    refused(place.trust(&old.repeat(3), None), "one authority");
    refused(
        place.trust(&next.keys.cert_pem, Some(&proof)),
        "its own certificate",
    );
    place.trust(&both(&next), Some(&proof)).expect("it was named");
    place.trust(&both(&next), None).expect("it is known by now");

    let request = place.asks();
    let cert = sign_host(&next, "a", &request).expect("signed");
    place.finish(&cert).expect("it is believed");
    place
        .trust(&next.keys.cert_pem, None)
        .expect("its certificate is of that one");
    refused(place.trust(&both(&next), None), "was not named");
    assert_eq!(keys::bundle(&place.files().ca.1).len(), 1);
}

#[test]
fn of_two_lists_the_newer_counts_and_an_authority_s_end_is_its_list_s_end() {
    let place = Place::new();
    let list = |number: u64, host: &str| {
        let mut list = RevocationList {
            number,
            ..RevocationList::default()
        };
        let cert = make_host(&place.authority, host).expect("a host").cert_pem;
        list.add(&cert, Reason::Removed, 1).expect("added");
        list.sign(&place.authority, 1).expect("signed")
    };
    let ca = &place.authority.keys.cert_pem;
    let (first, second) = (list(1, "b"), list(2, "c"));
    assert_eq!(lists(&format!("{second}{first}"), ca), second);
    assert_eq!(lists(&format!("{first}{second}"), ca), second);
    let other = make_ca("mine").expect("another").keys.cert_pem;
    assert_eq!(lists(&second, &other), "");
}
