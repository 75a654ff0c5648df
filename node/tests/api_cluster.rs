//! The API on three real daemons: any of them shows and steers all of the cluster.
//!
//! Needs root and what `cargo xtask setup` installs; told as skipped without root.

use std::io::Write;
use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use document::Document;
use dunlin_vmtest::cluster::{Cluster, in_a_testbed};
use dunlin_vmtest::is_root;
use dunlin_vmtest::program::Plan;
use dunlin_vmtest::testbed::TestbedSpec;
use http::{Said, request, speak};
use serde_json::{Value, json};

#[path = "common/document.rs"]
mod document;
#[path = "common/http.rs"]
mod http;
#[path = "../../guest/tests/common/skipped.rs"]
mod skipped;

/// No wait is longer, on a machine however busy.
const PATIENCE: Duration = Duration::from_secs(90);

/// Asked of the witness, done by the primary: said again where its backup had just been lost, or no other host could be elected in time.
fn switch_over(cluster: &Cluster<'_>) -> Result<Said> {
    let until = Instant::now() + PATIENCE;
    loop {
        let said = order(cluster, "c", "/api/v1/vms/sessions/switchover", &json!({}))?;
        if said.status != 409 {
            ensure!(said.status == 200, "{said:?}");
            return Ok(said);
        }
        ensure!(Instant::now() < until, "{said:?}");
        await_view(cluster, "c", |view| {
            view["protection"] == "protected" && view["primary"] == "a"
        })?;
    }
}

/// What the page of a host of the testbed answers, to a process there.
fn on(cluster: &Cluster<'_>, host: &str, text: &str) -> Result<Said> {
    let page = "127.0.0.1:7702".parse()?;
    speak(cluster.testbed().node(host).command("/bin/bash")?, page, text)
}

/// The program of the testbed's plan, as `host` sees it, when it is as wanted.
fn await_view(cluster: &Cluster<'_>, host: &str, wanted: impl Fn(&Value) -> bool) -> Result<Value> {
    let until = Instant::now() + PATIENCE;
    loop {
        let said = on(cluster, host, &request("GET", "/api/v1/overview", &[], ""))?;
        let overview = said.json()?;
        let view = &overview["vms"][0];
        if wanted(view) {
            return Ok(overview);
        }
        ensure!(Instant::now() < until, "host {host} still sees {overview:#}");
    }
}

/// An order, as `host` takes it.
fn ordered(cluster: &Cluster<'_>, host: &str, path: &str, body: &Value) -> Result<String> {
    let me = on(cluster, host, &request("GET", "/api/v1/me", &[], ""))?.json()?;
    let token = me["token"].as_str().context("a token")?;
    let headers = [("X-Dunlin-Token", token)];
    Ok(request("POST", path, &headers, &body.to_string()))
}

fn order(cluster: &Cluster<'_>, host: &str, path: &str, body: &Value) -> Result<Said> {
    on(cluster, host, &ordered(cluster, host, path, body)?)
}

/// What the page of a host answers to the same request on so many connections. One process opens them all and asks on each before it
/// reads: to start one for each would take longer than an answer does.
fn at_once(cluster: &Cluster<'_>, host: &str, count: usize, text: &str) -> Result<Vec<Said>> {
    const SCRIPT: &str = "text=$(cat); \
        for ((n = 0; n < $1; n++)); do exec {fd}<>/dev/tcp/127.0.0.1/7702 || exit; all+=($fd); done; \
        for fd in ${all[@]}; do printf %s \"$text\" >&$fd; done; \
        for fd in ${all[@]}; do cat <&$fd; printf '\\0'; done";
    let mut shell = cluster.testbed().node(host).command("timeout")?;
    let mut child = shell
        .arg(PATIENCE.as_secs().to_string())
        .args(["/bin/bash", "-c", SCRIPT, "bash", &count.to_string()])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()?;
    let mut input = child.stdin.take().context("its input")?;
    input.write_all(text.as_bytes())?;
    drop(input);
    let output = child.wait_with_output()?;
    let answers = String::from_utf8_lossy(&output.stdout);
    answers.split_terminator('\0').map(Said::of).collect()
}

/// Questions to a host that stands still take their time: no more than 16 are under way, and looking goes on meanwhile.
fn places_for_long_requests_are_bounded(cluster: &mut Cluster<'_>, file: &str) -> Result<()> {
    let text = ordered(cluster, "c", "/api/v1/check", &json!({"text": file}))?;
    cluster.freeze("b")?;
    let asking = &*cluster;
    let (said, seen, took) = std::thread::scope(|scope| {
        let asked = scope.spawn(|| at_once(asking, "c", 24, &text));
        let begun = Instant::now();
        let seen = on(asking, "c", &request("GET", "/api/v1/overview", &[], ""));
        let took = begun.elapsed();
        let said = asked.join().unwrap_or_else(|_| bail!("a thread panicked"));
        (said, seen, took)
    });
    cluster.thaw("b");
    let (said, seen) = (said?, seen?);
    ensure!(seen.status == 200 && took < PATIENCE, "{seen:?}");
    let busy = said.iter().filter(|said| said.status == 503).count();
    let told = said
        .iter()
        .filter(|said| matches!(said.status, 200 | 409))
        .count();
    ensure!(
        busy >= 8 && busy + told == 24,
        "{busy} were busy, {told} told: {said:?}"
    );
    ensure!(
        said.iter()
            .all(|said| said.status != 503 || said.head.contains("retry-after: 5"))
    );
    Ok(())
}

#[test]
fn a_cluster_is_seen_and_steered_from_any_host() -> Result<()> {
    if !is_root() {
        skipped::skip("network namespaces need root");
        return Ok(());
    }
    let dunlin = Path::new(env!("CARGO_BIN_EXE_dunlin"));
    in_a_testbed("page-api", &TestbedSpec::three_hosts(), dunlin, |cluster| {
        cluster.start_hosts()?;
        let file = std::fs::read_to_string(Plan::redis(cluster.testbed())?.write(cluster.testbed())?)?;
        let checked = order(
            cluster,
            "c",
            "/api/v1/check",
            &json!({"text": file, "origin": "sessions.toml"}),
        )?;
        ensure!(
            checked.status == 200
                && checked.json()?["found"]
                    .as_array()
                    .is_some_and(|found| found.len() > 2),
            "{checked:?}"
        );
        let said = order(cluster, "a", "/api/v1/vms", &json!({"text": file}))?;
        ensure!(said.status == 200, "{said:?}");
        // The witness shows all of it: what others have said is put together.
        let overview = await_view(cluster, "c", |view| {
            view["protection"] == "protected" && view["backup"] == "b"
        })?;
        let view = &overview["vms"][0];
        ensure!(
            view["primary"] == "a" && view["witness"] == "c" && view["program"] == true,
            "{view:#}"
        );
        let document = on(cluster, "c", &request("GET", "/api/v1/openapi.json", &[], ""))?.json()?;
        let document = Document::of(document)?;
        document.check("get", "/api/v1/overview", 200, &overview)?;
        let one = on(cluster, "b", &request("GET", "/api/v1/vms/sessions", &[], ""))?;
        document.check("get", "/api/v1/vms/{vm}", 200, &one.json()?)?;
        let status = on(cluster, "a", &request("GET", "/api/v1/status", &[], ""))?;
        document.check("get", "/api/v1/status", 200, &status.json()?)?;

        let said = switch_over(cluster)?;
        document.check("post", "/api/v1/vms/{vm}/switchover", 200, &said.json()?)?;
        await_view(cluster, "c", |view| view["primary"] == "b")?;
        cluster.kill_host("a")?;
        let overview = await_view(cluster, "c", |view| {
            view["protection"] == "unprotected" && view["hosts"][0]["role"] == "unknown"
        })?;
        ensure!(
            overview["hosts"][0]["reached"] == false && overview["hosts"][0]["problem"].is_string(),
            "{overview:#}"
        );
        ensure!(
            overview["vms"][0]["why"]
                .as_str()
                .is_some_and(|why| !why.is_empty()),
            "{overview:#}"
        );
        places_for_long_requests_are_bounded(cluster, &file)?;
        // Whoever stood still has to be heard again first.
        let until = Instant::now() + PATIENCE;
        loop {
            let said = order(cluster, "c", "/api/v1/vms/sessions/down", &json!({"now": true}))?;
            if said.status == 200 {
                break;
            }
            ensure!(said.status == 409 && Instant::now() < until, "{said:?}");
        }
        await_view(cluster, "c", Value::is_null).map(drop)
    })
}
