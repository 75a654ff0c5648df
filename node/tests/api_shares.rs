//! Places for requests by HTTP that take long are shared: no user holds them all, and nobody but root holds root's.
//!
//! Needs root, to become other users; told as skipped without it.

use std::fs;
use std::net::TcpListener;
use std::sync::mpsc::channel;
use std::thread::spawn;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use daemon::{Host, OPERATOR, ROOT, User, VIEWER};
use dunlin_vmtest::is_root;
use http::{Said, request};
use serde_json::json;

#[path = "common/daemon.rs"]
#[allow(dead_code, reason = "other tests have other users")]
mod daemon;
#[path = "common/http.rs"]
#[allow(dead_code, reason = "other tests have TCP")]
mod http;
#[path = "../../guest/tests/common/skipped.rs"]
mod skipped;

/// What one user may have under way, and what all may have.
const EACH: usize = 4;
const ALL: usize = 16;
/// No wait is longer, on a machine however busy.
const PATIENCE: Duration = Duration::from_secs(90);
const FILE: &str = "name = \"shop\"\nmembers = [\"b\", \"c\"]\nwitness = \"d\"\npolicy = \"none\"\n[vm]\nmemory_mib = 64\n[[vm.disks]]\npath = \"/no/such/disk\"\n";

/// What so many requests of that user, all said at once, are answered, in the order of the answers.
fn at_once(host: &Host, user: User, count: usize) -> impl Iterator<Item = Result<Said>> + use<> {
    let (tell, told) = channel();
    for _ in 0..count {
        let (api, tell) = (host.socket().with_file_name("api.sock"), tell.clone());
        let asked = request("POST", "/api/v1/check", &[], &json!({"text": FILE}).to_string());
        spawn(move || tell.send(http::by_socket(&api, (user.1, user.2), &asked)));
    }
    told.into_iter()
}

#[test]
fn one_user_has_a_share_of_the_places_for_long_requests_and_root_has_its_own() -> Result<()> {
    if !is_root() {
        skipped::skip("becoming another user needs root");
        return Ok(());
    }
    // Hosts that let everybody connect and say nothing: whoever asks them waits until their time is over.
    let silent = [(); 3].map(|()| TcpListener::bind("127.0.0.1:0"));
    let mut others = Vec::new();
    for (name, listener) in ["b", "c", "d"].iter().zip(&silent) {
        let listener = listener.as_ref().ok().context("a socket")?;
        others.push((*name, listener.local_addr()?.port()));
    }
    let mut host = Host::beside(&others)?;
    host.configure("page = \"off\"\nviewers = \"daemon\"\noperators = \"games\"")?;
    let prepared = host.file().with_file_name("vms");
    fs::create_dir_all(&prepared)?;
    fs::write(prepared.join("shop.toml"), FILE)?;
    host.start()?;
    let begun = Instant::now();
    let mut greedy = at_once(&host, OPERATOR, ALL);
    // Those beyond the share do not wait.
    for _ in 0..ALL - EACH {
        let said = greedy.next().context("an answer")??;
        let why = said.json()?["why"].as_str().unwrap_or_default().to_owned();
        ensure!(
            said.status == 429 && why.starts_with("user 'games' has 4 requests under way already"),
            "{said:?}"
        );
        ensure!(
            said.head.contains("retry-after: ") && !why.contains('\n'),
            "{said:?}"
        );
    }
    // While these are under way, others have places.
    let mut free = [VIEWER, ROOT].map(|user| (user.0, at_once(&host, user, 1)));
    for (name, answers) in &mut free {
        let said = answers.next().context("an answer")??;
        ensure!(said.status == 200, "{name}: {said:?}");
    }
    for said in greedy {
        let said = said?;
        ensure!(said.status == 200, "{said:?}");
    }
    // And they come back.
    let said = at_once(&host, OPERATOR, 1).next().context("an answer")??;
    ensure!(said.status == 200, "{said:?}");
    ensure!(begun.elapsed() < PATIENCE, "{:?}", begun.elapsed());
    Ok(())
}
