//! Plays one scenario.

mod away;
mod boots;
mod keys;
mod moves;
mod ordered;
mod stopped;
mod stuck;
mod told;
mod verdict;

use dunlin_api::SyncFigures;
use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::{Duration, Instant, SystemTime};

use anyhow::{Context, Result, bail, ensure};
use dunlin_api::files::VmFile;
use nix::sys::signal::Signal;

use super::secrets::Secrets;
use super::{Action, Role, Scenario, Thawed};
use crate::client::{Answer, Boots, Broadcasts, Connection, Counter, CounterReport, CounterSpec};
use crate::cluster::{Cluster, HostStatus, VmPlan, all_take_part, await_service, in_a_testbed};
use crate::demo::service;
use crate::image::GuestImage;
use crate::testbed::{CpuShare, Testbed, TestbedSpec};

/// Nothing in a scenario may take longer than this, however busy the machine is.
const PATIENCE: Duration = Duration::from_secs(120);

/// A connection to the guest stands within this time, also where TCP has to ask for it several times.
const CONNECT: Duration = Duration::from_secs(40);

/// The host that is every VM's witness.
const WITNESS: &str = "c";

/// What all scenarios run with.
#[derive(Clone, Debug)]
pub struct World {
    /// The executable.
    pub dunlin: PathBuf,
    /// The guest.
    pub image: GuestImage,
}

/// What a scenario that passed has to tell.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// What the clients saw.
    pub clients: CounterReport,
    /// The longest gap that a fault cost, in microseconds.
    pub worst_gap_us: u64,
    /// Medians of the first primary's syncs before it died.
    pub syncs: Option<SyncFigures>,
    /// How often the clients were watched while nothing could leave, and for how long together.
    pub silences: (usize, Duration),
}

/// Plays `scenario` in a testbed of its own.
///
/// # Errors
/// When it does not go as it should; the daemons' logs are kept, and the error says where.
pub fn run(world: &World, scenario: &Scenario) -> Result<Outcome> {
    let three = TestbedSpec::three_hosts();
    let spec = TestbedSpec {
        host_cpu: scenario.cpu.map(CpuShare::percent),
        hosts: match moves::are_in(scenario) {
            true => three
                .hosts
                .into_iter()
                .chain(moves::SPARE_HOSTS.map(str::to_owned))
                .collect(),
            false => three.hosts,
        },
        ..TestbedSpec::three_hosts()
    };
    in_a_testbed(&scenario.name, &spec, &world.dunlin, |cluster| {
        play(cluster, world, scenario)
    })
}

fn play(cluster: &mut Cluster<'_>, world: &World, scenario: &Scenario) -> Result<Outcome> {
    let testbed = cluster.testbed();
    if scenario.durable {
        cluster.use_disks()?;
    }
    cluster.start_hosts()?;
    let plan = VmPlan {
        machine: scenario.machine,
        vcpus: scenario.vcpus,
        disk_mib: scenario.disk_mib,
        idle_cards: scenario.idle_cards,
        boots_from_disk: scenario.boots_from_disk,
        uefi: scenario.uefi,
        file: moves::with_standby(
            scenario,
            VmFile {
                sync: scenario.sync(),
                ..VmPlan::file()
            },
        ),
        ..VmPlan::redis(&scenario.policy)
    };
    let file = plan.write(testbed, &world.image)?;
    moves::make_ready(cluster, scenario)?;
    cluster.dunlin("a", &["up", &file.to_string_lossy()])?;
    let client = testbed.node("client");
    await_service(client, service(), PATIENCE)?;
    let broadcasts = match scenario.idle_cards {
        0 => None,
        _ => Some(Broadcasts::start(client)?),
    };
    let spec = CounterSpec {
        target: service(),
        connections: scenario.connections,
        together: scenario.steps.contains(&Action::AwaitMode("passive".to_owned())),
        // How long a fault may cost is another matter (`gap_limit_ms`): TCP sends again after twice as long each time, so a client
        // may hear that it is served again as late as the fault has lasted.
        give_up: PATIENCE,
    };
    let boots_anew = scenario.steps.iter().any(|action| {
        use Action::{KillAll, KillUnprotectedAndThaw, Reboot, RebootAndKill, RebootAndRecall, StopAlone};
        matches!(
            action,
            KillAll | KillUnprotectedAndThaw | StopAlone | Reboot | RebootAndKill | RebootAndRecall(_)
        )
    });
    let boots = match boots_anew {
        true => Boots::at_any_time(),
        false => Boots::never(),
    };
    let counter = Counter::start_over_boots(client, &spec, &boots)?;

    let mut stage = Stage {
        cluster,
        vm: plan.name.clone(),
        counter,
        dead: BTreeSet::new(),
        last_primary: None,
        syncs: None,
        moments: Vec::new(),
        frozen_at: SystemTime::UNIX_EPOCH,
        silences: Vec::new(),
    };
    for (number, action) in scenario.steps.iter().enumerate() {
        stage
            .act(action)
            .with_context(|| format!("step {} ({action:?})", number + 1))?;
    }
    let Stage {
        cluster,
        counter,
        dead,
        syncs,
        moments,
        silences,
        ..
    } = stage;
    let (clients, answers) = counter.finish()?;
    broadcasts.map(Broadcasts::finish).transpose()?;
    let worst_gap_us = verdict::judge(scenario, &clients, &answers, &moments, &silences)?;
    if scenario.audit && scenario.policy == "str" {
        let pre_copied = syncs.as_ref().map_or(0, |median| median.pre_copied);
        ensure!(pre_copied > 0, "no sync had a round while the VMs ran: {syncs:?}");
        let load_us = syncs.as_ref().map_or(0, |median| median.load_us);
        ensure!(load_us > 0, "a sync's load takes time: {syncs:?}");
    }
    no_oops(testbed)?;
    for host in &dead {
        cluster.start_host(host)?;
    }
    let serves = |hosts: &[HostStatus]| primary(hosts, &plan.name);
    let primary = cluster.await_status("a primary at the end", PATIENCE, serves)?;
    let looked = Secrets::of(cluster.dir())?.look(cluster)?;
    ensure!(
        looked.qemus > 0 && looked.bytes > 10_000,
        "no running VM was searched for secrets: mend the test ({looked:?})"
    );
    cluster.end(&primary, &plan.name)?;
    Ok(Outcome {
        clients,
        worst_gap_us,
        syncs,
        silences: (
            silences.len(),
            silences
                .iter()
                .map(|(from, to)| to.duration_since(*from).unwrap_or_default())
                .sum(),
        ),
    })
}

struct Stage<'cluster, 'testbed> {
    cluster: &'cluster mut Cluster<'testbed>,
    vm: String,
    counter: Counter,
    dead: BTreeSet<String>,
    /// Who served when all hosts were lost, if they were.
    last_primary: Option<String>,
    /// Of the first primary, before it died.
    syncs: Option<SyncFigures>,
    /// From each fault until the clients were served again.
    moments: Vec<(Instant, Instant)>,
    /// When the newest frozen host stood still.
    frozen_at: SystemTime,
    /// From when to when nothing could leave, by the machine's clock.
    silences: Vec<(SystemTime, SystemTime)>,
}

impl Stage<'_, '_> {
    fn act(&mut self, action: &Action) -> Result<()> {
        match action {
            Action::AwaitProtected => self.cluster.await_protected(&self.vm, PATIENCE).map(drop),
            Action::Answers => self.counter.await_more(100, PATIENCE),
            // Where all memory is compared a sync takes up to a second, and gives each client an answer.
            Action::AwaitAnswers(count) => {
                let at_most = PATIENCE.max(Duration::from_secs(*count));
                self.counter.await_more(*count, at_most)
            }
            Action::Flood => self.cluster.testbed().flood(self.cluster.hosts()),
            Action::HasOverheard => self.has_overheard(),
            Action::KillPrimary => {
                if self.syncs.is_none() {
                    let (primary, _) = self.protected()?;
                    let status = self.cluster.status(&primary)?;
                    self.syncs = status.vm(&self.vm).map(|vm| vm.sync.median.clone());
                }
                let (primary, at) = self.cluster.kill_primary(&[&self.vm], None, PATIENCE)?;
                self.dead.insert(primary.clone());
                self.taken_over(&primary, at)
            }
            Action::KillPrimaryDaemon => {
                let (primary, _) = self.protected()?;
                let at = Instant::now();
                self.cluster.kill_daemon(&primary)?;
                self.nothing_runs_on(&primary)?;
                self.dead.insert(primary.clone());
                self.taken_over(&primary, at)
            }
            Action::DieAt(role, line) => {
                let (primary, backup) = self.protected()?;
                let host = match role {
                    Role::Primary => primary,
                    Role::Backup => backup,
                    Role::Witness => self.with_role("witness")?,
                };
                let fault = format!("die-at={line}");
                self.cluster.dunlin(&host, &["inject", &self.vm, &fault])?;
                self.cluster.await_death(&host, PATIENCE)?;
                let at = Instant::now();
                self.nothing_runs_on(&host)?;
                self.dead.insert(host.clone());
                if *role == Role::Primary {
                    self.taken_over(&host, at)
                } else {
                    self.unprotected(at)
                }
            }
            Action::InterruptPrimary => self.stop_primary(Signal::SIGINT),
            Action::StopPrimary => self.stop_primary(Signal::SIGTERM),
            Action::StopAlone => self.stop_alone(),
            Action::KillAll => self.kill_all(),
            Action::AwaitBootOnLast => self.boots_on_last(),
            Action::KillBackup => {
                let backup = self.with_role("backup")?;
                let at = self.cluster.kill_host(&backup)?;
                self.dead.insert(backup);
                self.unprotected(at)
            }
            Action::KillWitness => {
                let witness = self.with_role("witness")?;
                let at = self.cluster.kill_host(&witness)?;
                self.dead.insert(witness);
                self.counter.await_more(50, PATIENCE)?;
                self.moments.push((at, Instant::now()));
                self.cluster.await_protected(&self.vm, PATIENCE).map(drop)
            }
            Action::KillOthers => {
                for role in ["backup", "witness"] {
                    self.dead.insert(self.with_role(role)?);
                }
                for host in self.dead.clone() {
                    self.cluster.kill_host(&host)?;
                }
                self.falls_silent()
            }
            Action::ProtectAlone => {
                let primary = self.with_role("primary")?;
                let at = Instant::now();
                self.cluster.dunlin(&primary, &["promote", "--force", &self.vm])?;
                self.unprotected(at)
            }
            Action::Restart => {
                for host in std::mem::take(&mut self.dead) {
                    self.cluster.start_host(&host)?;
                }
                Ok(())
            }
            Action::Replace => {
                for host in std::mem::take(&mut self.dead) {
                    self.cluster.renew_host(&host)?;
                    self.cluster.start_host(&host)?;
                    let primary = self.with_role("primary")?;
                    self.cluster.order(&primary, &["replace", &self.vm, &host])?;
                }
                Ok(())
            }
            Action::MoveBackup(host) => self.move_backup(host),
            Action::MoveWitness(host) => self.move_witness(host),
            Action::AwaitGone(host) => self.await_gone(host),
            Action::AwaitBackup(host) => self.await_backup(host),
            Action::AwaitCheckpoint => self.await_checkpoint(),
            Action::MemoryWasHeld(percent) => self.memory_was_held(*percent),
            Action::RestartHost(host) => self.restart(host),
            Action::AwaitAllLinked => {
                let vm = self.vm.clone();
                let all = |hosts: &[HostStatus]| all_take_part(hosts, &vm).then_some(());
                self.cluster
                    .await_status("every host takes part", PATIENCE, all)
                    .map(drop)
            }
            Action::RestartLast => {
                let last = self.last_primary.clone().context("no host was lost before")?;
                self.dead.remove(&last);
                self.cluster.start_host(&last)
            }
            Action::BootFromDisk => self.boot_from_disk(),
            Action::Freeze(roles) => {
                if *roles != [Role::Witness] {
                    self.protected()?;
                }
                // All are known before one of them stands still: while a backup alone does, the others agree to go on without it.
                let hosts = roles.iter().map(|role| self.with_role(role.as_str()));
                for host in hosts.collect::<Result<Vec<String>>>()? {
                    self.cluster.freeze(&host)?;
                }
                self.frozen_at = SystemTime::now();
                Ok(())
            }
            Action::AwaitDropped => self.dropped(),
            Action::AwaitSilence => {
                let at = Instant::now();
                self.falls_silent()?;
                self.silences.push((self.frozen_at, SystemTime::now()));
                self.moments.push((at, Instant::now()));
                Ok(())
            }
            Action::Thaw(which) => {
                for host in self.cluster.frozen() {
                    // In this testbed the witness is always the same.
                    if *which == Thawed::All || host == WITNESS {
                        self.cluster.thaw(&host);
                    }
                }
                Ok(())
            }
            Action::Stutter(times, ms) => self.stutter(*times, Duration::from_millis(*ms)),
            Action::SlowBackup(percent) => {
                // After a take-over nobody is the backup: whoever was slow is not to be it any more.
                let hosts = match with_role(&self.cluster.statuses(), &self.vm, "backup") {
                    Some(host) => vec![host],
                    None => self.cluster.running(),
                };
                for host in hosts {
                    let share = CpuShare::percent(*percent);
                    self.cluster.testbed().node(&host).set_cpu_share(Some(share))?;
                }
                Ok(())
            }
            Action::KillPrimaryAndThaw => self.kill_primary_and_thaw(),
            Action::KillUnprotectedAndThaw => self.kill_unprotected_and_thaw(),
            Action::CutPrimary => {
                let (primary, _) = self.protected()?;
                let at = Instant::now();
                self.cluster.testbed().cut_link(&primary)?;
                self.taken_over(&primary, at)
            }
            Action::CutBackup => {
                let backup = self.with_role("backup")?;
                let at = Instant::now();
                self.cluster.testbed().cut_link(&backup)?;
                self.unprotected(at)
            }
            Action::RestoreLinks => {
                for host in self.cluster.hosts().to_vec() {
                    self.cluster.testbed().restore_link(&host)?;
                }
                Ok(())
            }
            Action::PausePrimary(ms) => {
                let primary = self.with_role("primary")?;
                let at = Instant::now();
                let frozen = self.cluster.testbed().node(&primary).freeze()?;
                // The fault itself is a length of time; nothing is waited for here.
                std::thread::sleep(Duration::from_millis(*ms));
                drop(frozen);
                self.counter.await_more(50, PATIENCE)?;
                self.moments.push((at, Instant::now()));
                Ok(())
            }
            Action::LosePrimaryFor(away) => self.lose_primary(*away),
            Action::BreakPrimaryDisk(fault, told) => {
                let (primary, _) = self.protected()?;
                let at = Instant::now();
                self.cluster.dunlin(&primary, &["inject", &self.vm, fault])?;
                self.taken_over(&primary, at)?;
                self.told(&primary, told)?;
                self.told(&primary, "left-to-backup")
            }
            Action::BreakBackupDisk(fault) => {
                let (primary, backup) = self.protected()?;
                let before = self.count_told(&backup, "mirror-failed")?;
                let at = Instant::now();
                self.cluster.dunlin(&backup, &["inject", &self.vm, fault])?;
                self.cluster
                    .await_status("a backup that says what failed", PATIENCE, |_| {
                        let after = self.count_told(&backup, "mirror-failed").ok()?;
                        (after > before).then_some(())
                    })?;
                self.unprotected(at)?;
                self.told(&primary, "mirror-lost")
            }
            Action::Inject(role, fault) => {
                let host = self.with_role(role.as_str())?;
                self.cluster.dunlin(&host, &["inject", &self.vm, fault]).map(drop)
            }
            Action::MendDisks => {
                for host in self.cluster.running() {
                    if self.with_role("witness")? != host {
                        self.cluster.dunlin(&host, &["inject", &self.vm, "none"])?;
                    }
                }
                Ok(())
            }
            Action::AwaitTold(role, kind) => self.await_told(Some(*role), kind),
            // A host whose copy of the VM has just failed has no role, or that of a backup that is tried again.
            Action::AwaitToldByAny(kind) => self.await_told(None, kind),
            Action::AwaitSyncs(more) => self.syncs_without_loss(*more),
            Action::AwaitMode(mode) => self.cluster.await_status(mode, PATIENCE, |hosts| {
                let host = with_role(hosts, &self.vm, "primary")?;
                let vm = hosts.iter().find(|status| status.host == host)?.vm(&self.vm)?;
                (vm.sync.mode.as_str() == *mode).then_some(())
            }),
            Action::AwaitState(state) => self.cluster.await_status(state, PATIENCE, |hosts| {
                let host = with_role(hosts, &self.vm, "primary")?;
                let vm = hosts.iter().find(|status| status.host == host)?.vm(&self.vm)?;
                (vm.state.as_str() == *state).then_some(())
            }),
            Action::RotateKeys => self.rotate_keys(),
            Action::RevokeBackup => self.revoke_backup(),
            Action::HangBackup => self.hang_backup(),
            Action::HangPrimary => self.hang_primary(),
            Action::HangQemu => self.hang_qemu(),
            Action::BreakSwitchover => self.break_switchover(),
            Action::HalfLoad => self.half_load(),
            Action::NewTerms(times) => self.new_terms(*times),
            Action::Reboot => {
                self.reboot()?;
                self.counter.await_more(100, PATIENCE)
            }
            Action::RebootAndKill => self.reboot_and_kill(),
            Action::Remember(name) => self.remember(name),
            Action::RebootAndRecall(names) => self.reboot_and_recall(names),
            Action::Recall(names) => self.recall(names),
            Action::Switchover => self.switch_over(),
            Action::Policy(policy) => self.order_policy(policy),
        }
    }

    /// Each costs at most what an audit on a busy machine does.
    fn syncs_without_loss(&self, more: u64) -> Result<()> {
        let (primary, _) = self.cluster.await_protected(&self.vm, PATIENCE)?;
        let lost = self.count_told(&primary, "unprotected")?;
        let mut first = None;
        let patience = Duration::from_secs(2) * u32::try_from(more)?;
        self.cluster.await_status("syncs", patience, |hosts| {
            let status = hosts.iter().find(|status| status.host == primary)?;
            let count = status.vm(&self.vm)?.sync.count;
            (count >= *first.get_or_insert(count) + more).then_some(())
        })?;
        let lost = self.count_told(&primary, "unprotected")? - lost;
        ensure!(
            lost == 0,
            "the VM lost its backup {lost} times: {}",
            self.cluster.dunlin(&primary, &["events"])?
        );
        Ok(())
    }

    fn with_role(&self, role: &str) -> Result<String> {
        self.cluster
            .await_status(&format!("a {role}"), PATIENCE, |hosts| {
                with_role(hosts, &self.vm, role)
            })
    }

    fn taken_over(&mut self, old: &str, at: Instant) -> Result<()> {
        self.counter.await_more(50, PATIENCE)?;
        self.moments.push((at, Instant::now()));
        self.cluster.await_take_over(&self.vm, old, PATIENCE).map(drop)
    }
}

fn with_role(hosts: &[HostStatus], vm: &str, role: &str) -> Option<String> {
    let host = hosts
        .iter()
        .find(|host| host.vm(vm).is_some_and(|vm| vm.role.as_str() == role))?;
    Some(host.host.clone())
}

/// Tells the guest to `reboot`, to `poweroff`, or to `remember-NAME`, as a person in it would. Returns how that was taken, for people.
pub(super) fn order_guest(testbed: &Testbed, guest: SocketAddr, word: &str) -> Result<String> {
    // A guest that has obeyed answers no more.
    match ask_guest_within(
        testbed,
        guest,
        &["RPUSH", "dunlin:power", word],
        Duration::from_secs(5),
    ) {
        Ok(Answer::Integer(_)) => Ok("answered".to_owned()),
        Ok(other) => bail!("the guest was not told to {word}: it answers {other:?}"),
        // It may be obeyed before it is answered.
        Err(error) if error.downcast_ref::<std::io::Error>().is_some() => {
            Ok(format!("not answered: {error}"))
        }
        Err(error) => Err(error.context(format!("the guest was not told to {word}"))),
    }
}

/// A command to the guest's redis.
pub(super) fn ask_guest(testbed: &Testbed, guest: SocketAddr, words: &[&str]) -> Result<Answer> {
    ask_guest_within(testbed, guest, words, PATIENCE)
}

/// A command to the guest's redis, whose answer is waited for so long once it is connected.
pub(super) fn ask_guest_within(
    testbed: &Testbed,
    guest: SocketAddr,
    words: &[&str],
    at_most: Duration,
) -> Result<Answer> {
    let words: Vec<String> = words.iter().map(|word| (*word).to_owned()).collect();
    let asked = testbed
        .node("client")
        .spawn("ask-guest", move || -> Result<Answer> {
            let connection =
                Connection::open(guest, CONNECT).map_err(|error| anyhow::anyhow!("{guest}: {error}"));
            let words: Vec<&str> = words.iter().map(String::as_str).collect();
            Ok(connection?.ask(&words, at_most)?)
        })?;
    asked
        .join()
        .map_err(|_| anyhow::anyhow!("a client thread panicked"))??
}

fn primary(hosts: &[HostStatus], vm: &str) -> Option<String> {
    with_role(hosts, vm, "primary")
}

/// A backup whose memory was torn may run on for a while: its kernel is the first to notice.
pub(super) fn no_oops(testbed: &Testbed) -> Result<()> {
    for node in testbed.nodes() {
        for entry in std::fs::read_dir(node.home())?.flatten() {
            if entry.file_name().to_string_lossy().starts_with("serial-") {
                let text = String::from_utf8_lossy(&std::fs::read(entry.path())?).into_owned();
                let bad = [
                    "Oops",
                    "BUG:",
                    "Kernel panic",
                    "general protection",
                    "unable to handle",
                ];
                if let Some(line) = text
                    .lines()
                    .find(|line| bad.iter().any(|word| line.contains(word)))
                {
                    bail!("the guest's kernel on host {}: {line}", node.name());
                }
            }
        }
    }
    Ok(())
}
