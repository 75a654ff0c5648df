//! Programs that do what a program should not: what becomes of them, and what a person is told, within seconds.
//!
//! * **Decides:** what passes: the service goes on where it can, and `status` or `events` say what happened in words that name it.
//! * **Flow:** [`super::server`] in both copies -> clients that count -> a command that makes it misbehave -> what is told.
//! * **Not here:** hosts that die (`stories`), unmodified servers (`services`).

use dunlin_api::{EventKind, State};
use std::process::Output;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use super::stories::await_alone;
use super::{ACKNOWLEDGED, CONNECTIONS, NAME, PATIENCE, Plan, down, server, up, whole};
use crate::client::{Answer, Connection, Counter, CounterSpec, Upload};
use crate::cluster::{Cluster, Event};
use crate::demo::service;

/// A person is told within this time what went wrong, on a machine however busy.
const TOLD_WITHIN: Duration = Duration::from_secs(30);
/// How many second copies are lost until it is told that they cannot be matched.
const MANY: usize = 3;
/// What a program that eats may have.
const MEMORY_MIB: u32 = 64;
/// The hosts of its copies: after an election in between the other one is the primary, which has seen nothing of what came before.
const COPIES: [&str; 2] = ["a", "b"];

impl Plan {
    /// [`server`], of some kind.
    pub fn odd(kind: &str, more: &[String]) -> Result<Self> {
        let own = std::env::current_exe()?;
        let own = own.to_str().context("a path of text")?;
        let mut lines = vec!["port = 6379".to_owned()];
        lines.extend_from_slice(more);
        Ok(Self {
            command: [own, server::COMMAND, kind, "6379"].map(str::to_owned).to_vec(),
            lines,
            standby_after: None,
        })
    }
}

/// Clients that count on keys of their own alone: such a server need not serve them in one order.
pub(super) fn count(cluster: &Cluster<'_>) -> Result<Counter> {
    let spec = CounterSpec {
        target: service(),
        connections: 4,
        together: false,
        give_up: PATIENCE,
    };
    Counter::start(cluster.testbed().node("client"), &spec)
}

/// One command from the client's network; nothing where there was no answer.
pub(super) fn ask(
    cluster: &Cluster<'_>,
    words: &'static [&'static str],
    within: Duration,
) -> Result<Option<Answer>> {
    let asked = cluster.testbed().node("client").spawn("odd", move || {
        Connection::open(service(), PATIENCE)?.ask(words, within)
    })?;
    let answer = asked
        .join()
        .map_err(|_| anyhow::anyhow!("the client panicked"))??;
    Ok(answer.ok())
}

/// What a host has told of this program: the one before it had the same name, and is forgotten.
pub(super) fn events(cluster: &Cluster<'_>, host: &str) -> Result<Vec<Event>> {
    let mut events = cluster.events(host)?;
    let before = events
        .iter()
        .rposition(|event| event.kind == EventKind::Forgotten);
    events.drain(..before.map_or(0, |last| last + 1));
    Ok(events)
}

/// Within seconds an event of that host has all these words.
pub(super) fn told(cluster: &Cluster<'_>, host: &str, words: &[&str]) -> Result<()> {
    let what = format!("host {host} tells of {words:?}");
    cluster.await_status(&what, TOLD_WITHIN, |_| {
        let events = events(cluster, host).ok()?;
        let tells = |text: &str| words.iter().all(|word| text.contains(word));
        events.iter().any(|event| tells(&event.text)).then_some(())
    })
}

pub(super) fn failed_on_both(cluster: &Cluster<'_>, words: &str) -> Result<()> {
    cluster.await_status(&format!("both hosts say {words:?}"), TOLD_WITHIN, |hosts| {
        let says = |name: &str| {
            let host = hosts.iter().find(|host| host.host == name);
            host.and_then(|host| host.vm(NAME))
                .is_some_and(|vm| vm.state == State::Failed && vm.why.contains(words))
        };
        (says("a") && says("b")).then_some(())
    })
}

/// A process for each connection: both copies fork alike, and a pid in an answer is the same in both. It survives its host.
pub(super) fn forks(cluster: &mut Cluster<'_>) -> Result<()> {
    up(cluster, &Plan::odd("forks", &[])?)?;
    let pid = ask(cluster, &["PID"], PATIENCE)?;
    ensure!(matches!(pid, Some(Answer::Integer(2..))), "a pid: {pid:?}");
    let counter = count(cluster)?;
    counter.await_more(ACKNOWLEDGED, PATIENCE)?;
    let (primary, _) = whole(cluster)?;
    ensure!(
        !events(cluster, &primary)?
            .iter()
            .any(|event| event.kind == EventKind::BackupLost && event.text.contains("something else")),
        "pids differ"
    );
    cluster.kill_host(&primary)?;
    counter
        .await_more(ACKNOWLEDGED, PATIENCE)
        .context("after the kill")?;
    let (clients, _) = counter.finish()?;
    ensure!(clients.is_clean(), "clients were let down: {clients:?}");
    cluster.start_host(&primary)?;
    down(cluster, "c")
}

/// It executes itself anew: what it knew is gone, as without Dunlin, in both copies; new clients are served by both.
pub(super) fn execs(cluster: &mut Cluster<'_>) -> Result<()> {
    up(cluster, &Plan::odd("threads", &[])?)?;
    let first = ask(cluster, &["INCR", "before"], PATIENCE)?;
    ensure!(first == Some(Answer::Integer(1)), "{first:?}");
    let gone = ask(cluster, &["EXEC"], PATIENCE)?;
    ensure!(gone.is_none(), "its connection goes with it: {gone:?}");
    let after = ask(cluster, &["GET", "before"], PATIENCE)?;
    ensure!(after == Some(Answer::Bulk(None)), "{after:?}");
    cluster.await_protected(NAME, PATIENCE)?;
    let counter = count(cluster)?;
    counter.await_more(ACKNOWLEDGED, PATIENCE)?;
    let (primary, _) = whole(cluster)?;
    cluster.kill_host(&primary)?;
    counter
        .await_more(ACKNOWLEDGED, PATIENCE)
        .context("after the kill")?;
    let (clients, _) = counter.finish()?;
    ensure!(clients.is_clean(), "clients were let down: {clients:?}");
    cluster.start_host(&primary)?;
    down(cluster, "c")
}

/// RDTSC in an answer: the copies differ by it each time. It is told what to do; the clients go on.
pub(super) fn reads_the_tsc(cluster: &mut Cluster<'_>) -> Result<()> {
    up(cluster, &Plan::odd("threads", &[])?)?;
    let counter = count(cluster)?;
    counter.await_more(ACKNOWLEDGED, PATIENCE)?;
    whole(cluster)?;
    let answer = ask(cluster, &["TSC"], PATIENCE)?;
    ensure!(matches!(answer, Some(Answer::Integer(_))), "{answer:?}");
    let primary = told_by_either(
        cluster,
        PATIENCE,
        &[
            "has said something else",
            "'dunlin program check' shows what differs",
            "from port 6379, after ",
            " bytes that are alike of the connection",
        ],
    )?;
    // What it was is for operators: the rest of an answer ":DIGITS", and another one.
    let shown = cluster.output(&primary, &["logs", "--differences", NAME])?;
    let shown = String::from_utf8_lossy(&shown.stdout).into_owned();
    let lines = |words: &str| shown.lines().filter(|line| line.contains(words)).count();
    ensure!(
        lines("the copy on host 'a' says there:") == 1
            && lines("the copy on host 'b' says there:") == 1
            && lines("..|") == 2,
        "both are shown: {shown:?}"
    );
    let events = events(cluster, &primary)?;
    ensure!(
        !events.iter().any(|event| event.text.contains("..|")),
        "no event has a byte of an answer"
    );
    let matched = super::figure(cluster, &primary, |program| program.matched)?;
    let differing = super::figure(cluster, &primary, |program| program.differing)?;
    ensure!(
        matched > 0 && differing > 0,
        "{matched} equal, {differing} differing"
    );
    counter.await_more(ACKNOWLEDGED, PATIENCE)?;
    // Once may be chance; whoever asks again and again makes it plain. On a busy machine a copy may be lost for what it does not say in time.
    for number in 2.. {
        cluster.await_protected(NAME, PATIENCE).context("another copy")?;
        ask(cluster, &["TSC"], PATIENCE)?;
        let many = |host: &&str| mismatches(cluster, host).is_ok_and(|times| times >= MANY);
        if COPIES.iter().any(many) {
            break;
        }
        // After an election by chance both hosts may have lost some.
        ensure!(number < 4 * MANY, "after {number} answers few copies were lost");
    }
    told_by_either(
        cluster,
        PATIENCE,
        &[
            "of the last 3 second copies within 10 minutes ",
            " have said something else and ",
            "may help",
            "keep it in a VM",
        ],
    )?;
    let (clients, _) = counter.finish()?;
    ensure!(clients.is_clean(), "clients were let down: {clients:?}");
    down(cluster, &primary)
}

/// How many second copies that host has lost for what they said, or did not say in time.
fn mismatches(cluster: &Cluster<'_>, host: &str) -> Result<usize> {
    let told = events(cluster, host)?.into_iter();
    let lost = told.filter(|event| event.kind == EventKind::BackupLost);
    let unlike = lost.filter(|event| {
        ["has said something else", "has not said within"]
            .iter()
            .any(|words| event.text.contains(words))
    });
    Ok(unlike.count())
}

/// Threads that race for their turns, while all clients count on one key: the second copies differ by that, one after the other. It is told what to
/// do; the clients hear the primary's copy alone, and go on.
pub(super) fn races(cluster: &mut Cluster<'_>) -> Result<()> {
    // With this order alone no input waits until the one before was read or answered: all threads are at work at once.
    let plan = Plan::odd("races", &["order = \"delivery\"".to_owned()])?;
    let (primary, _) = up(cluster, &plan)?;
    let counter = super::count(cluster, CONNECTIONS)?;
    let host = told_by_either(
        cluster,
        TOLD_WITHIN,
        &[
            "has said something else",
            "'dunlin program check' shows what differs",
            "from port 6379, after ",
            " bytes that are alike of ",
        ],
    )?;
    let differing = super::figure(cluster, &host, |program| program.differing)?;
    ensure!(differing > 0, "no output is counted as differing");
    counter
        .await_more(ACKNOWLEDGED, PATIENCE)
        .context("after the first loss")?;
    // Nobody has to ask for it: the clients are at work as soon as another copy is there. On a busy machine some are lost for another reason, and each
    // loss lengthens the pause before the next copy.
    told_by_either(
        cluster,
        4 * PATIENCE,
        &[
            "second copies within 10 minutes ",
            " have said something else and ",
            "order = \"answer\"",
            "may help",
            "keep it in a VM",
        ],
    )?;
    // A further one says nothing new.
    let lost = lost_in_all(cluster);
    cluster.await_status("a further second copy is lost", 4 * PATIENCE, |_| {
        (lost_in_all(cluster) > lost).then_some(())
    })?;
    counter
        .await_more(ACKNOWLEDGED, PATIENCE)
        .context("after the last loss")?;
    let (clients, _) = counter.finish()?;
    ensure!(clients.is_clean(), "clients were let down: {clients:?}");
    for host in COPIES {
        let all = events(cluster, host)?.into_iter();
        let unmatched = all.filter(|event| event.kind == EventKind::CannotBeMatched);
        let times = unmatched.count();
        ensure!(
            times <= 1,
            "host {host} told {times} times that it cannot be matched"
        );
    }
    down(cluster, &primary)
}

/// How many second copies were lost for what they said, or did not say in time, whoever was the primary.
fn lost_in_all(cluster: &Cluster<'_>) -> usize {
    let lost = COPIES.iter().filter_map(|host| mismatches(cluster, host).ok());
    lost.sum()
}

/// Within that time an event of either host has all these words: of which.
fn told_by_either(cluster: &Cluster<'_>, within: Duration, words: &[&str]) -> Result<String> {
    let what = format!("host a or b tells of {words:?}");
    cluster.await_status(&what, within, |_| {
        let tells = |host: &&str| {
            let events = events(cluster, host).unwrap_or_default();
            let has_all = |text: &str| words.iter().all(|word| text.contains(word));
            events.iter().any(|event| has_all(&event.text))
        };
        COPIES.iter().copied().find(tells).map(str::to_owned)
    })
}

/// Who never reads is served its inputs all the same, each after a bounded wait, and a person is told.
pub(super) fn never_reads(cluster: &mut Cluster<'_>) -> Result<()> {
    let (primary, _) = up(cluster, &Plan::odd("deaf", &["patience_ms = 100".to_owned()])?)?;
    for _ in 0..2 {
        let answer = ask(cluster, &["INCR", "a"], Duration::from_secs(2))?;
        ensure!(answer.is_none(), "{answer:?}");
    }
    told(cluster, &primary, &["did not read an input"])?;
    down(cluster, &primary)
}

/// An input that ends both copies: said on both hosts, with its exit code; nobody serves, and it is not begun again.
pub(super) fn exits(cluster: &mut Cluster<'_>) -> Result<()> {
    up(cluster, &Plan::odd("threads", &[])?)?;
    ask(cluster, &["EXIT", "7"], Duration::from_secs(2))?;
    failed_on_both(cluster, "ended with exit code 7")?;
    down(cluster, "b")
}

/// The same for one that crashes both. It is not fed that input again: no copy is left that could be.
pub(super) fn crashes_by_an_input(cluster: &mut Cluster<'_>) -> Result<()> {
    up(cluster, &Plan::odd("threads", &[])?)?;
    ask(cluster, &["CRASH"], Duration::from_secs(2))?;
    failed_on_both(cluster, "was ended by signal 6")?;
    for host in ["a", "b"] {
        told(
            cluster,
            host,
            &[
                "the same input has ended the copies on both hosts",
                "not given it again",
            ],
        )?;
    }
    down(cluster, "b")
}

/// It takes more memory than it may: both copies are killed for the same input, and both hosts say why. The hosts and what else
/// runs on them are not touched.
pub(super) fn fills_its_memory(cluster: &mut Cluster<'_>) -> Result<()> {
    let plan = Plan::odd(
        "threads",
        &[
            format!("memory_mib = {MEMORY_MIB}"),
            "tasks = 64".to_owned(),
            "cpus = 1.5".to_owned(),
        ],
    )?;
    let file = plan.write(cluster.testbed())?;
    let file = super::path(&file)?;
    let found = cluster.output("a", &["check", file])?;
    let said = String::from_utf8_lossy(&found.stdout).into_owned();
    if !said.contains("limits: a control group can be made") {
        // A host that cannot limit says so, and does not begin what was to be limited.
        ensure!(said.contains("limits: "), "nothing is said of limits: {said}");
        let Output { status, stderr, .. } = cluster.output("a", &["up", file])?;
        let said = String::from_utf8_lossy(&stderr).into_owned();
        ensure!(
            status.code() == Some(2) && said.contains("limits: ") && said.lines().count() == 1,
            "{status:?}: {said}"
        );
        return Ok(());
    }
    let (primary, _) = up(cluster, &plan)?;
    let fits = ask(cluster, &["EAT", "8"], PATIENCE)?;
    ensure!(fits == Some(Answer::Integer(8)), "{fits:?}");
    ask(cluster, &["EAT", "512"], Duration::from_secs(5))?;
    failed_on_both(cluster, &format!("memory_mib = {MEMORY_MIB}"))?;
    down(cluster, &primary)
}

/// A second copy that stands still while a client uploads acknowledges nothing, and owes no answer yet: it is late all the same.
pub(super) fn stands_still_in_an_upload(cluster: &mut Cluster<'_>) -> Result<()> {
    let (primary, backup) = up(cluster, &Plan::redis(cluster.testbed())?)?;
    let stop = ["exec", "--quiet", NAME, "--", "sh", "-c", "kill -STOP 2"];
    cluster.dunlin(&backup, &stop)?;
    let client = cluster.testbed().node("client").spawn("upload", || {
        let mut upload = Upload::open(service(), PATIENCE)?;
        upload.put()?;
        upload.check()
    })?;
    client
        .join()
        .map_err(|_| anyhow::anyhow!("the client panicked"))???;
    told(
        cluster,
        &primary,
        &["is dropped as the backup", "has not said within 15 s"],
    )?;
    cluster.await_protected(NAME, PATIENCE)?;
    down(cluster, &primary)
}

/// `dunlin exec`: in the copy, as its user, with its exit code; and what it changes there is in one copy alone.
pub(super) fn visitors(cluster: &mut Cluster<'_>) -> Result<()> {
    let (primary, backup) = up(cluster, &Plan::redis(cluster.testbed())?)?;
    let run = |host: &str, words: &[&str]| cluster.output(host, &[&["exec", NAME, "--"], words].concat());
    let of = |output: &Output| String::from_utf8_lossy(&output.stdout).trim().to_owned();
    for (host, role) in [(&primary, "primary"), (&backup, "backup")] {
        let output = run(
            host,
            &[
                "sh",
                "-c",
                "cat /proc/sys/kernel/hostname; cat /proc/2/comm; exit 7",
            ],
        )?;
        ensure!(output.status.code() == Some(7), "{output:?}");
        let lines = of(&output);
        ensure!(
            lines.starts_with("program\nredis"),
            "it is not in the copy: {lines}"
        );
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        ensure!(
            said.contains(role) && said.contains("nothing of it is replicated"),
            "{said}"
        );
    }
    let walls = of(&run(&primary, &["cat", "/proc/self/status"])?);
    let line = |name: &str| {
        walls
            .lines()
            .find_map(|line| line.strip_prefix(name))
            .map(|rest| rest.trim().to_owned())
    };
    ensure!(line("NoNewPrivs:").as_deref() == Some("1"), "{walls}");
    let bounds = line("CapBnd:").and_then(|bits| u64::from_str_radix(&bits, 16).ok());
    ensure!(
        bounds.is_some_and(|bits| bits & (1 << 21) == 0),
        "CAP_SYS_ADMIN is left to it: {bounds:?}"
    );
    ensure!(line("Seccomp:").as_deref() == Some("2"), "no filter: {walls}");
    // The program's next process has the same id in both copies: a visitor's is far away.
    let id: u32 = line("Pid:").context("a pid")?.parse()?;
    ensure!(id >= 31_000, "pid {id}");
    let killed = run(&primary, &["sh", "-c", "kill -9 $$"])?;
    ensure!(killed.status.code() == Some(128 + 9), "{killed:?}");
    let missing = run(&primary, &["no-such-command"])?;
    ensure!(missing.status.code() == Some(125), "{missing:?}");
    let witness = run("c", &["true"])?;
    let said = String::from_utf8_lossy(&witness.stderr).into_owned();
    ensure!(
        witness.status.code() == Some(125) && said.contains(&format!("host '{primary}'")),
        "{said}"
    );
    // Whoever asked and goes takes the command along.
    let mut deserted = cluster
        .command(&primary, &["exec", "--quiet", NAME, "--", "sleep", "4711"])?
        .spawn()?;
    let sleeps = || -> Result<bool> {
        let all = run(&primary, &["sh", "-c", "cat /proc/[0-9]*/cmdline"])?.stdout;
        let words = b"sleep\x004711";
        Ok(all.windows(words.len()).any(|part| part == words))
    };
    await_that("the command runs", &sleeps, true)?;
    deserted.kill()?;
    deserted.wait()?;
    await_that("the command is gone", &sleeps, false)?;
    let counter = count(cluster)?;
    counter.await_more(ACKNOWLEDGED, PATIENCE)?;
    let (clients, _) = counter.finish()?;
    ensure!(clients.is_clean(), "clients were let down: {clients:?}");
    cluster
        .await_protected(NAME, PATIENCE)
        .context("a visitor made the copies differ")?;
    down(cluster, &primary)?;
    let gone = run(&primary, &["true"])?;
    ensure!(gone.status.code() == Some(125), "{gone:?}");
    Ok(())
}

fn await_that(what: &str, looks: &dyn Fn() -> Result<bool>, wanted: bool) -> Result<()> {
    let until = Instant::now() + TOLD_WITHIN;
    while looks()? != wanted {
        ensure!(
            Instant::now() < until,
            "within {} s: {what}",
            TOLD_WITHIN.as_secs()
        );
        std::thread::sleep(Duration::from_millis(50));
    }
    Ok(())
}

/// `dunlin logs --follow`: what is printed comes, line by line.
pub(super) fn follows_logs(cluster: &mut Cluster<'_>) -> Result<()> {
    let command = "exec 3>&1; n=0; (while sleep 0.2; do n=$((n+1)); echo line $n; done) & exec ";
    let redis = Plan::redis(cluster.testbed())?;
    let words: Vec<String> = redis.command.iter().map(|word| format!("'{word}'")).collect();
    let plan = Plan {
        command: Plan::shell(&format!("{command}{}", words.join(" "))).command,
        lines: redis.lines,
        standby_after: None,
    };
    let (primary, _) = up(cluster, &plan)?;
    let mut follower = cluster.command(&primary, &["logs", "--follow", "--lines", "1", NAME])?;
    let mut follower = follower.stdout(std::process::Stdio::piped()).spawn()?;
    let stream = follower.stdout.take().context("its output")?;
    let lines = std::io::BufRead::lines(std::io::BufReader::new(stream));
    let numbers: Vec<u64> = lines
        .map_while(Result::ok)
        .filter_map(|line| line.strip_prefix("line ")?.parse().ok())
        .take(6)
        .collect();
    follower.kill()?;
    follower.wait()?;
    ensure!(numbers.len() == 6, "{numbers:?}");
    ensure!(
        numbers.windows(2).all(|pair| pair[1] == pair[0] + 1),
        "a line is missing or twice: {numbers:?}"
    );
    down(cluster, &primary)
}

/// Limits hold for a copy that was brought in while the program ran.
pub(super) fn a_new_copy_is_limited(cluster: &mut Cluster<'_>) -> Result<()> {
    let plan = Plan::odd("threads", &[format!("memory_mib = {MEMORY_MIB}")])?;
    let file = plan.write(cluster.testbed())?;
    let found = cluster.output("a", &["check", super::path(&file)?])?;
    if !String::from_utf8_lossy(&found.stdout).contains("limits: a control group can be made") {
        return Ok(());
    }
    let (primary, backup) = up(cluster, &plan)?;
    cluster.kill_host(&backup)?;
    await_alone(cluster, &primary)?;
    cluster.start_host(&backup)?;
    cluster.await_protected(NAME, PATIENCE)?;
    let (old, _) = cluster.switch_over(NAME, PATIENCE)?;
    let (serves, _) = cluster.await_take_over(NAME, &old, PATIENCE)?;
    ask(cluster, &["EAT", "512"], Duration::from_secs(5))?;
    told(cluster, &serves, &[&format!("memory_mib = {MEMORY_MIB}")])?;
    down(cluster, "b")
}
