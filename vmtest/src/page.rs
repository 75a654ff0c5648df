//! The page of real daemons in a real browser: each state that a person may meet, seen, photographed and used by keyboard.
//!
//! * **Decides:** what passes: axe-core finds nothing serious, nothing is wider than its window, all can be used by keyboard, nothing is
//!   changed without a second question, no text is executed, nothing is asked elsewhere.
//! * **Flow:** three hosts, the browser before the witness's page -> no VM, hostile events, a dead host -> a VM (or a bare program) healthy, handed over,
//!   unprotected after its host's death, refused, joining, healthy again -> twenty at once -> one host less.
//! * **Invariants:** (1) all that is shown comes from the daemons of the testbed; only the hostile events were put into a host's record by this test;
//!   (2) each state is waited for on the page itself before it is judged.
//! * **Source:** docs/page.md. **Not here:** how the browser is steered ([`browser`]), the API without a browser (`node/tests/api.rs`).

mod browser;
pub mod watched;

use dunlin_api::Role;
use dunlin_api::files::{ProgramNicTable, ProgramTable, VmFile};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, ensure};
use serde_json::json;

use crate::cluster::{Cluster, VmPlan, await_service, in_a_testbed};
use crate::demo::service;
use crate::image::GuestImage;
use crate::program::Plan;
use crate::testbed::{Testbed, TestbedSpec};
use browser::Browser;
pub use browser::Tools;

const PATIENCE: Duration = Duration::from_secs(120);
/// Whose page is looked at: a host that lives through all of it.
const SEEN_FROM: &str = "c";
/// So many at once.
const TWENTY: usize = 20;
/// Of them, so many have their second copy on the witness's host.
const ELSEWHERE: usize = 4;
/// How slow a cable is over which a copy of a VM is to be seen on its way.
const SLOW_KBIT: u64 = 40_000;
const QUEUE_MS: u64 = 200;

/// What is looked at.
#[derive(Clone, Debug)]
pub struct PageSpec {
    /// The executable.
    pub dunlin: PathBuf,
    /// The browser.
    pub tools: Tools,
    /// Of the VM; without one no VM is started.
    pub guest: Option<GuestImage>,
}

/// What was seen.
#[derive(Clone, Debug, Default)]
pub struct PageReport {
    /// The states, by the names of their pictures.
    pub states: Vec<String>,
    /// What axe-core found that is neither serious nor critical.
    pub notes: Vec<String>,
}

/// A person with the browser.
struct Person<'a> {
    browser: Browser,
    report: PageReport,
    say: &'a mut dyn FnMut(&str),
}

impl Person<'_> {
    fn sees(&mut self, state: &str) -> Result<()> {
        let begun = Instant::now();
        let notes = self.browser.shoot(state)?;
        let count = notes.len();
        self.report.notes.extend(notes);
        self.report.states.push(state.to_owned());
        (self.say)(&format!(
            "{state}: two windows, light and dark; axe-core: nothing serious, {count} notes ({:.1} s)",
            begun.elapsed().as_secs_f64()
        ));
        Ok(())
    }
}

/// Plays all of it. `say` gets a line for each thing that was seen.
///
/// # Errors
/// With the first thing that is not as it should be; the daemons' logs are kept.
pub fn test(spec: &PageSpec, say: &mut dyn FnMut(&str)) -> Result<PageReport> {
    in_a_testbed("page", &TestbedSpec::three_hosts(), &spec.dunlin, |cluster| {
        let hostile = remember_hostile_events(cluster)?;
        cluster.start_hosts()?;
        let (browser, version) = Browser::open(cluster, &spec.tools, SEEN_FROM)?;
        say(&format!("{version}, before the page of host {SEEN_FROM}"));
        let mut person = Person {
            browser,
            report: PageReport::default(),
            say,
        };
        without_a_vm(cluster, &mut person, &hostile)?;
        let testbed = cluster.testbed();
        one(
            cluster,
            &mut person,
            "program",
            "sessions",
            &Plan::redis(testbed)?.write(testbed)?,
        )?;
        if let Some(guest) = &spec.guest {
            let plan = VmPlan {
                name: "shop".to_owned(),
                ..VmPlan::redis("dunlin")
            };
            let file = plan.write(testbed, guest)?;
            one(cluster, &mut person, "vm", "shop", &file)?;
        }
        twenty(cluster, &mut person)?;
        person.browser.close()?;
        Ok(person.report)
    })
}

/// No VM; hostile texts; a host that is lost and comes again.
fn without_a_vm(cluster: &mut Cluster<'_>, person: &mut Person<'_>, hostile: &[String]) -> Result<()> {
    person.browser.awaits("#sum-title", "Nothing to protect")?;
    person.browser.awaits("title", "testbed – Dunlin")?;
    for host in ["a", "b", "c"] {
        person.browser.awaits(".host[data-reached=yes] h3", host)?;
    }
    person.browser.awaits(".event .of", "host c")?;
    person.browser.harmless(hostile)?;
    (person.say)(&format!(
        "{} hostile events are texts, and nothing else",
        hostile.len()
    ));
    person.sees("no-vm")?;
    cluster.kill_host("b")?;
    person.browser.awaits(".host[data-reached=no] h3", "b")?;
    person.browser.awaits("#sum-title", "Host b is not reached")?;
    person
        .browser
        .awaits("title", "! Host b is not reached – testbed – Dunlin")?;
    person.sees("error")?;
    cluster.start_host("b")?;
    person.browser.awaits(".host[data-reached=yes] h3", "b")
}

/// A VM or a bare program from its start to its end.
fn one(
    cluster: &mut Cluster<'_>,
    person: &mut Person<'_>,
    kind: &str,
    name: &str,
    file: &Path,
) -> Result<()> {
    let badge = ".vm .badge";
    cluster.dunlin("a", &["up", path(file)?])?;
    await_service(cluster.testbed().node("client"), service(), PATIENCE)?;
    let (primary, _) = cluster.await_protected(name, PATIENCE)?;
    person.browser.awaits(badge, "Protected")?;
    person.browser.awaits("#sum-title", "protected")?;
    person
        .browser
        .awaits("title", &format!("{name} – testbed – Dunlin"))?;
    person.sees(&format!("{kind}-healthy"))?;
    let places = person.browser.tabs()?;
    (person.say)(&format!("{kind}: the tabulator comes to all {places} places"));
    person.browser.cannot(name, "protect", "It is protected")?;
    for what in ["switchover", "down"] {
        person.browser.leaves(name, what)?;
    }
    let said = person.browser.order(name, "switchover", None)?;
    ensure!(
        said.contains("was handed over"),
        "a switchover by the page: {said}"
    );
    let (primary, _) = cluster.await_take_over(name, &primary, PATIENCE)?;
    cluster.await_protected(name, PATIENCE)?;
    person.browser.awaits(".seat[data-role=primary]", &primary)?;
    person.browser.awaits(badge, "Protected")?;
    (person.say)(&format!(
        "{kind}: handed over to host {primary} by keyboard, after a second question"
    ));

    cluster.kill_host(&primary)?;
    let (survivor, _) = cluster.await_take_over(name, &primary, PATIENCE)?;
    person.browser.awaits(".seat[data-role=primary]", &survivor)?;
    person.browser.awaits(badge, "Not protected")?;
    person.browser.awaits(".event .of", "took-over")?;
    person.sees(&format!("{kind}-after-a-fail-over"))?;
    person.browser.cannot(name, "switchover", "Only a protected VM")?;
    match kind {
        "vm" => {
            let refused = refused(person, name, "protect", "vm-refused")?;
            ensure!(
                refused.contains(&primary),
                "protection with its other host dead: {refused}"
            );
        }
        _ => person.browser.cannot(name, "protect", "by itself")?,
    }

    if kind == "vm" {
        // A copy over a slow cable, so that it is seen on its way. A small program's is there before anybody sees it.
        cluster.testbed().slow_link(&primary, SLOW_KBIT, QUEUE_MS)?;
        cluster.start_host(&primary)?;
        person.browser.awaits(badge, "Becoming protected")?;
        person.sees("vm-joining")?;
        cluster.testbed().mend_link(&primary)?;
    } else {
        cluster.start_host(&primary)?;
    }
    cluster.await_protected(name, PATIENCE)?;
    person.browser.awaits(badge, "Protected")?;
    person.sees(&format!("{kind}-protected-again"))?;
    let said = person.browser.order(name, "down", None)?;
    ensure!(said.contains("was shut down"), "an end by the page: {said}");
    person.browser.awaits("#sum-title", "Nothing to protect")?;
    (person.say)(&format!("{kind}: shut down by keyboard"));
    Ok(())
}

/// Twenty at once, and what becomes of them with one host less.
fn twenty(cluster: &mut Cluster<'_>, person: &mut Person<'_>) -> Result<()> {
    let begun = Instant::now();
    for number in 0..TWENTY {
        let file = small(cluster.testbed(), number)?;
        cluster.dunlin("a", &["up", path(&file)?])?;
    }
    cluster.await_status("twenty of twenty protected", PATIENCE, |hosts| {
        let protected = hosts.iter().flat_map(|host| &host.vms);
        let protected = protected.filter(|vm| vm.role == Role::Primary && vm.protected);
        (protected.count() == TWENTY).then_some(())
    })?;
    (person.say)(&format!(
        "{TWENTY} bare programs are protected after {:.0} s",
        begun.elapsed().as_secs_f64()
    ));
    person
        .browser
        .awaits("#sum-title", &format!("{TWENTY} VMs are protected"))?;
    person.sees("twenty")?;
    cluster.kill_host("b")?;
    let rest = TWENTY - ELSEWHERE - 5;
    person
        .browser
        .awaits("#sum-title", &format!("and {rest} more are not protected"))?;
    person.sees("twenty-and-a-dead-host")?;
    cluster.kill_host("a")?;
    person.browser.awaits("#sum-title", "not served")?;
    person.sees("not-served")?;
    let refused = refused(person, "service-20", "down", "refused")?;
    ensure!(
        !refused.contains("was shut down"),
        "an end without a majority: {refused}"
    );
    Ok(())
}

/// Orders what is refused; the pictures have the refusal in them.
fn refused(person: &mut Person<'_>, name: &str, what: &str, state: &str) -> Result<String> {
    let why = person.browser.order(name, what, Some(state))?;
    ensure!(
        !why.is_empty() && !why.contains('\n'),
        "a refusal of several lines: {why}"
    );
    person.report.states.push(state.to_owned());
    (person.say)(&format!("{state}: in one line: {why}"));
    Ok(why)
}

/// The file of one of twenty: as little as a program can be.
fn small(testbed: &Testbed, number: usize) -> Result<PathBuf> {
    let name = format!("service-{:02}", number + 1);
    let (members, witness) = match number {
        0..ELSEWHERE => (["a", "c"], "b"),
        _ => (["a", "b"], "c"),
    };
    let home = testbed.dir().to_str().context("a path of text")?;
    let command = ["/bin/busybox", "httpd", "-f", "-p", "8080", "-h", home];
    let (mac, address) = (
        format!("52:54:00:12:35:{number:02x}"),
        format!("10.77.4.{}/16", number + 1),
    );
    let nic = ProgramNicTable {
        bridge: Some("br0".to_owned()),
        ..ProgramNicTable::new(&mac, &address)
    };
    let program = ProgramTable {
        port: Some(8080),
        ..ProgramTable::new(command.map(str::to_owned).to_vec(), nic)
    };
    let text = toml::to_string(&VmFile {
        witness: Some(witness.to_owned()),
        program: Some(program),
        ..VmFile::new(&name, &members)
    })?;
    let file = testbed.dir().join(format!("{name}.toml"));
    std::fs::write(&file, text)?;
    Ok(file)
}

/// Puts events whose texts are attacks into the record of a host that has not begun: what another host, a guest's disk or a person's file could have
/// made it write. Returns the texts.
fn remember_hostile_events(cluster: &Cluster<'_>) -> Result<Vec<String>> {
    let texts = [
        "<script>window.hostile = 1</script>",
        "<img src=x onerror=\"window.hostile = 2\">",
        "\"><svg onload=window.hostile=3><a href=\"javascript:window.hostile=4\">press me</a>",
        "</p></li></ol></section></main><h1>Your cluster is gone</h1><iframe srcdoc=\"<script>parent.hostile=5</script>\">",
        "two\nlines\r\n\r\nevent: overview\ndata: {\"vms\":[]}\n\nand a \u{2028} third",
        "{{constructor.constructor('window.hostile=6')()}} ${window.hostile=7}",
        "\u{202e}desrever \u{feff}\u{0}\u{1b}[2J",
    ];
    let longest = "x".repeat(4000);
    let texts: Vec<String> = texts.into_iter().map(str::to_owned).chain([longest]).collect();
    let state = cluster.state(SEEN_FROM);
    std::fs::create_dir_all(&state)?;
    let since = SystemTime::now().duration_since(UNIX_EPOCH)?;
    let mut lines = String::new();
    for (seq, text) in texts.iter().enumerate() {
        // A kind that is known and one that is not; a name that no VM could have.
        let (kind, vm) = match seq % 2 {
            0 => ("protected", ""),
            _ => (
                "<b onclick=window.hostile=8>",
                "\"><img src=x onerror=window.hostile=9>",
            ),
        };
        let event = json!({
            "seq": seq, "time_ms": since.as_millis() as u64, "host": SEEN_FROM, "vm": vm, "kind": kind, "text": text,
        });
        lines.push_str(&format!("{event}\n"));
    }
    std::fs::write(state.join("events.jsonl"), lines).context("a host's record of events")?;
    Ok(texts)
}

fn path(path: &Path) -> Result<&str> {
    path.to_str().context("a path of text")
}
