//! What may happen to a bare program on two hosts, one story after the other in one testbed.

use dunlin_api::State;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use nix::sys::signal::Signal;

use super::holds::Holds;
use super::{
    ACKNOWLEDGED, CONNECTIONS, NAME, PATIENCE, Plan, away, batch, count, data, down, guard, moves, oddities,
    path, restart, root, time, up, whole,
};
use crate::client::{Connection, Counter};
use crate::cluster::{Cluster, all_take_part, in_a_testbed};
use crate::demo::service;
use crate::testbed::TestbedSpec;

/// Starts of both copies in one story: more than what [`Holds`] takes for no leak.
const STARTS: usize = 20;
/// A program that does not begin to serve says so within this time.
const SOON: Duration = Duration::from_secs(30);

type Story = (&'static str, fn(&mut Cluster<'_>) -> Result<()>);

/// What is played in one testbed, one after the other.
const STORIES: [Story; 41] = [
    ("two primaries die, one after the other", guard::two_die),
    ("switchover after switchover", guard::few_joins),
    ("the primary's host dies", primary_dies),
    ("the primary's daemon alone dies", daemon_dies),
    ("the backup's host dies", backup_dies),
    ("the witness dies", witness_dies),
    ("a planned switchover", hands_over),
    ("a daemon is told to end", daemon_ends),
    ("the primary's host stands still", away::primary_stands_still),
    ("the backup's host stands still", away::backup_stands_still),
    ("the primary's cable is pulled", away::primary_is_cut_off),
    ("nobody hears the primary's host", away::primary_is_mute),
    ("answers that no two copies give alike", differs),
    ("answers that tell the agreed time", time::is_told_alike),
    ("answers that are drawn by agreed chance", time::is_drawn_alike),
    ("TLS handshakes by agreed chance", time::shakes_hands_alike),
    ("inputs of many clients at once", batch::is_read_alike),
    (
        "inputs that were not read alike are kept apart",
        batch::are_kept_apart,
    ),
    (
        "no batches where nobody waits in epoll",
        batch::is_not_for_threads,
    ),
    ("programs that do not serve", does_not_serve),
    ("a program that forks", oddities::forks),
    ("a program that executes itself anew", oddities::execs),
    ("a program that answers with RDTSC", oddities::reads_the_tsc),
    ("a program whose threads race", oddities::races),
    ("a program that never reads", oddities::never_reads),
    ("an input that makes both copies exit", oddities::exits),
    ("an input that crashes both copies", oddities::crashes_by_an_input),
    ("a program that fills its memory", oddities::fills_its_memory),
    ("a new copy is limited as well", oddities::a_new_copy_is_limited),
    (
        "a second copy that stands still in an upload",
        oddities::stands_still_in_an_upload,
    ),
    ("commands beside a program", oddities::visitors),
    ("what it prints is followed", oddities::follows_logs),
    ("a restart by each policy", restart::each_policy),
    ("no restart after poison", restart::not_after_poison),
    ("no restart after down", restart::not_after_down),
    ("data outlive a restart", data::outlive_a_restart),
    ("data and chance that is drawn anew", data::draw_anew),
    ("a root directory of its own", root::is_its_own),
    ("data cannot be had", data::cannot_be_had),
    (
        "data outlive what was agreed in memory",
        data::outlive_what_was_agreed,
    ),
    ("start after start", leaves_nothing),
];

/// Those of data that outlive all hosts: what is agreed is on disks, too.
const OF_DATA: [Story; 5] = [
    ("data outlive two primaries", data::outlive_two_primaries),
    ("data outlive all hosts", data::outlive_all_hosts),
    ("a torn image is not begun from", data::torn_is_not_begun_from),
    ("data of a program that was ended", data::stay_ended),
    (
        "an image that is not there is waited for",
        data::gone_is_waited_for,
    ),
];

/// Those whose parts go to other hosts.
const OF_MOVES: [Story; 5] = [
    ("a dead backup's part moves", moves::dead_backup),
    ("sleeping hosts' parts move", moves::sleeping_hosts),
    ("a sleeping primary's part moves", moves::sleeping_primary),
    ("living hosts' parts move", moves::living_hosts),
    ("a standby gets dead hosts' parts", moves::standby),
];

/// The same with data, and with what is agreed on disks.
const OF_DATA_MOVES: [Story; 1] = [("data move along", moves::with_data)];

/// Plays them all. Returns how many there were.
///
/// # Errors
/// When one does not go as it should; the daemons' logs are kept.
pub fn run(binary: &std::path::Path, named: Option<&str>) -> Result<usize> {
    let chosen = |stories: &[Story]| -> Vec<Story> {
        let is_chosen = |name: &str| named.is_none_or(|named| name.contains(named));
        stories
            .iter()
            .copied()
            .filter(|(name, _)| is_chosen(name))
            .collect()
    };
    let (stories, of_data) = (chosen(&STORIES), chosen(&OF_DATA));
    let (of_moves, of_data_moves) = (chosen(&OF_MOVES), chosen(&OF_DATA_MOVES));
    let count = stories.len() + of_data.len() + of_moves.len() + of_data_moves.len();
    ensure!(count > 0, "no story of bare programs has {named:?} in its name");
    if !stories.is_empty() {
        in_a_testbed(
            "program-stories",
            &TestbedSpec::three_hosts(),
            binary,
            |cluster| play(cluster, &stories),
        )?;
    }
    if !of_data.is_empty() {
        in_a_testbed("program-data", &TestbedSpec::three_hosts(), binary, |cluster| {
            cluster.use_disks()?;
            play(cluster, &of_data)
        })?;
    }
    if !of_moves.is_empty() {
        in_a_testbed("program-moves", &moves::five_hosts(), binary, |cluster| {
            play(cluster, &of_moves)
        })?;
    }
    if !of_data_moves.is_empty() {
        in_a_testbed("program-data-moves", &moves::five_hosts(), binary, |cluster| {
            cluster.use_disks()?;
            play(cluster, &of_data_moves)
        })?;
    }
    Ok(count)
}

fn play(cluster: &mut Cluster<'_>, stories: &[Story]) -> Result<()> {
    cluster.start_hosts()?;
    for (name, story) in stories {
        let begun = Instant::now();
        story(cluster).with_context(|| (*name).to_owned())?;
        println!("program: {name} ({:.1} s)", begun.elapsed().as_secs_f64());
    }
    for host in cluster.running() {
        cluster.stop_host(&host, Signal::SIGTERM)?;
    }
    Ok(())
}

/// Clients count before and after what `happens` to the hosts, and nothing is lost. Then all hosts run again, and it is ended.
fn under_load(
    cluster: &mut Cluster<'_>,
    happens: impl FnOnce(&mut Cluster<'_>, &str, &str) -> Result<()>,
) -> Result<()> {
    under_counted_load(cluster, |cluster, primary, backup, _| {
        happens(cluster, primary, backup)
    })
}

/// The same where what happens is watched by the clients' answers.
pub(super) fn under_counted_load(
    cluster: &mut Cluster<'_>,
    happens: impl FnOnce(&mut Cluster<'_>, &str, &str, &Counter) -> Result<()>,
) -> Result<()> {
    let plan = Plan::redis(cluster.testbed())?;
    under_load_of(&plan, cluster, happens)
}

fn under_load_of(
    plan: &Plan,
    cluster: &mut Cluster<'_>,
    happens: impl FnOnce(&mut Cluster<'_>, &str, &str, &Counter) -> Result<()>,
) -> Result<()> {
    up(cluster, plan)?;
    let counter = count(cluster, CONNECTIONS)?;
    counter.await_more(ACKNOWLEDGED, PATIENCE)?;
    let (primary, backup) = whole(cluster)?;
    happens(cluster, &primary, &backup, &counter)?;
    counter
        .await_more(ACKNOWLEDGED, PATIENCE)
        .context("no answers afterwards")?;
    let (clients, _) = counter.finish()?;
    ensure!(clients.is_clean(), "clients were let down: {clients:?}");
    let running = cluster.running();
    for host in cluster.hosts().to_vec() {
        if !running.contains(&host) {
            cluster.start_host(&host)?;
        }
    }
    // Whoever is asked finds who leads.
    down(cluster, "c")
}

fn primary_dies(cluster: &mut Cluster<'_>) -> Result<()> {
    under_load(cluster, |cluster, primary, _| {
        cluster.kill_host(primary)?;
        cluster.await_take_over(NAME, primary, PATIENCE).map(drop)
    })
}

/// Its copy has to go with it, and no other speaks before.
fn daemon_dies(cluster: &mut Cluster<'_>) -> Result<()> {
    under_load(cluster, |cluster, primary, _| {
        cluster.kill_daemon(primary)?;
        cluster.await_take_over(NAME, primary, PATIENCE)?;
        // A process that is being killed is still listed for a moment.
        let (host, until) = (cluster.testbed().node(primary), Instant::now() + SOON);
        while !host.pids().is_empty() {
            let late = Instant::now() > until;
            ensure!(!late, "host {primary}: processes {:?}", host.pids());
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(())
    })
}

fn backup_dies(cluster: &mut Cluster<'_>) -> Result<()> {
    under_load(cluster, |cluster, primary, backup| {
        cluster.kill_host(backup)?;
        await_alone(cluster, primary)
    })
}

fn witness_dies(cluster: &mut Cluster<'_>) -> Result<()> {
    under_load(cluster, |cluster, _, _| {
        cluster.kill_host("c")?;
        cluster.await_protected(NAME, PATIENCE)?;
        cluster.start_host("c")?;
        cluster.await_status("the witness takes part", PATIENCE, |hosts| {
            all_take_part(hosts, NAME).then_some(())
        })?;
        let (primary, _) = whole(cluster)?;
        cluster.kill_host(&primary)?;
        cluster.await_take_over(NAME, &primary, PATIENCE).map(drop)
    })
}

fn hands_over(cluster: &mut Cluster<'_>) -> Result<()> {
    under_load(cluster, |cluster, _, _| {
        let (old, _) = cluster.switch_over(NAME, PATIENCE)?;
        cluster.await_take_over(NAME, &old, PATIENCE).map(drop)
    })
}

fn daemon_ends(cluster: &mut Cluster<'_>) -> Result<()> {
    under_load(cluster, |cluster, primary, _| {
        cluster.stop_host(primary, Signal::SIGTERM)?;
        cluster.await_take_over(NAME, primary, PATIENCE).map(drop)
    })
}

/// The copies have clocks of their own: a client that asks for the time makes them differ. The service goes on, and says that it is
/// not protected, and why.
fn differs(cluster: &mut Cluster<'_>) -> Result<()> {
    let mut plan = Plan::redis(cluster.testbed())?;
    plan.lines.push("clock = \"own\"".to_owned());
    under_load_of(&plan, cluster, |cluster, primary, _, _| {
        let asked = cluster.testbed().node("client").spawn("time", || {
            let mut connection = Connection::open(service(), PATIENCE)?;
            let microseconds = "return redis.call('TIME')[2]";
            connection.ask(&["EVAL", microseconds, "0"], PATIENCE).map(drop)
        })?;
        cluster.await_status("the backup dropped for what it said", PATIENCE, |_| {
            let events = cluster.events(primary).ok()?;
            let differs = |text: &str| text.contains("its copy has said something else");
            events.iter().any(|event| differs(&event.text)).then_some(())
        })?;
        asked
            .join()
            .map_err(|_| anyhow::anyhow!("the client panicked"))??
            .context("no answer to who asks for the time")?;
        // A new copy is made of the primary, who was right.
        cluster.await_protected(NAME, PATIENCE).map(drop)
    })
}

/// Many copies begin and end: no process, card or file of theirs stays, and none of the daemons keeps a descriptor, a thread or a mount.
fn leaves_nothing(cluster: &mut Cluster<'_>) -> Result<()> {
    let plan = Plan::redis(cluster.testbed())?;
    let mut first = None;
    for number in 1..=STARTS {
        up(cluster, &plan).with_context(|| format!("start {number}"))?;
        down(cluster, "a").with_context(|| format!("end {number}"))?;
        // The first ones may begin something that stays: a thread of a library, a descriptor for chance.
        if number == 2 {
            first = Some(Holds::of_both(cluster, "a")?);
        }
    }
    let first = first.context("two starts")?;
    Holds::await_no_more_than(cluster, "a", &first).with_context(|| format!("after {STARTS} starts"))?;
    Ok(())
}

pub(super) fn await_alone(cluster: &Cluster<'_>, primary: &str) -> Result<()> {
    cluster.await_status("the program runs alone", PATIENCE, |hosts| {
        let host = hosts.iter().find(|host| host.host == primary)?;
        host.vm(NAME)
            .is_some_and(|vm| vm.state == State::Alone && !vm.protected)
            .then_some(())
    })
}

/// One that ends, one that goes into the background, one that is not there: each is told in one line, with what it said last.
fn does_not_serve(cluster: &mut Cluster<'_>) -> Result<()> {
    let cases = [
        (
            "echo no such table; exit 7",
            "ended with exit code 7; its last words: no such table",
        ),
        ("sleep 600 & exit 0", "has to stay in the foreground"),
        ("kill -11 $$", "was ended by signal 11"),
    ];
    for (command, words) in cases {
        let file = Plan::shell(command).write(cluster.testbed())?;
        let output = cluster.output("a", &["up", path(&file)?])?;
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        ensure!(
            output.status.code() == Some(1) && said.contains(words),
            "{command}: {:?}: {said}",
            output.status
        );
        cluster.await_status("both copies have failed", SOON, |hosts| {
            let failed = |name: &str| {
                let host = hosts.iter().find(|host| host.host == name);
                host.and_then(|host| host.vm(NAME))
                    .is_some_and(|vm| vm.state == State::Failed)
            };
            (failed("a") && failed("b")).then_some(())
        })?;
        down(cluster, "b").with_context(|| command.to_owned())?;
    }
    let nowhere = Plan {
        command: vec!["/no/such/server".to_owned()],
        lines: Vec::new(),
        standby_after: None,
    };
    let file = nowhere.write(cluster.testbed())?;
    let output = cluster.output("a", &["up", path(&file)?])?;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    ensure!(
        output.status.code() == Some(2) && said.contains("/no/such/server") && said.lines().count() == 1,
        "{:?}: {said}",
        output.status
    );
    Ok(())
}
