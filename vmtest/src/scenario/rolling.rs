//! Two builds of dunlin in one cluster: hosts are upgraded, or put back, one after the other, under clients that check every answer.
//!
//! * **Decides:** that a VM of hosts of two builds is protected, handed over and taken over as one of equal hosts; that each two hosts speak
//!   the newest version of the protocol that both have, and say so; that nothing acknowledged is lost.
//! * **Flow:** [`STORIES`] say who changes in which order -> [`run`] plays one: a host's daemon ends, its other build begins, the VM is protected
//!   again. While builds are mixed the primary's host dies twice: the newer build takes over from the older one, and the other way round.
//! * **Invariants:** no daemon tells another one in its log that it does not understand it.
//! * **Not here:** packages (`cargo xtask package --try`), the greeting's bytes (`fabric/src/link/version_tests.rs`).

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use nix::sys::signal::Signal;
use serde::Deserialize;

use super::World;
use crate::client::{Counter, CounterSpec};
use crate::cluster::{Cluster, VmPlan, await_service, in_a_testbed};
use crate::testbed::TestbedSpec;
use crate::traces;

const PATIENCE: Duration = Duration::from_secs(120);
const GIVE_UP: Duration = Duration::from_secs(60);
/// Answers that clients get between two steps.
const ANSWERS: u64 = 100;

/// What is done to the cluster.
#[derive(Clone, Copy)]
pub enum Step {
    /// The build of whatever host has this role is exchanged for the other one. The primary's daemon hands its VM over as it ends.
    Exchange(&'static str),
    /// The same, after a person has handed the VM over: the host is the backup by then.
    SwitchoverAndExchange,
    /// The primary's host dies as a whole, and comes back with the build that it had.
    KillPrimary,
}

/// One story: its name, whether all hosts begin with the newer build, and what is done.
pub type Story = (&'static str, bool, &'static [Step]);

/// All of them.
pub const STORIES: [Story; 2] = [
    (
        "rolling-upgrade",
        false,
        &[
            Step::Exchange("witness"),
            Step::Exchange("backup"),
            // The older build is the primary: the newer one takes over. Then the other way round.
            Step::KillPrimary,
            Step::KillPrimary,
            Step::SwitchoverAndExchange,
            Step::KillPrimary,
        ],
    ),
    (
        "rolling-upgrade-and-back",
        true,
        &[
            Step::Exchange("primary"),
            Step::KillPrimary,
            Step::KillPrimary,
            Step::Exchange("witness"),
            Step::Exchange("witness"),
            Step::Exchange("backup"),
        ],
    ),
];

/// What a story has to tell.
pub struct Outcome {
    /// Answers to all clients.
    pub acknowledged: u64,
    /// The longest time without an answer on any one connection, in microseconds.
    pub worst_gap_us: u64,
    /// How often a host's build was exchanged.
    pub exchanges: usize,
    /// How often a primary's host was killed.
    pub kills: usize,
    /// The newest version of the protocol that the older build and the newer one know.
    pub protocols: [u16; 2],
}

/// A build, and what it says of itself.
struct Build {
    binary: PathBuf,
    protocol: u16,
}

impl Build {
    fn of(binary: &Path) -> Result<Self> {
        #[derive(Deserialize)]
        struct Which {
            protocol: u16,
        }
        let said = Command::new(binary).args(["version", "--json"]).output()?;
        let which: Which =
            serde_json::from_slice(&said.stdout).context("what 'dunlin version --json' says")?;
        Ok(Self {
            binary: binary.to_path_buf(),
            protocol: which.protocol,
        })
    }
}

/// Plays one with the world's build and an `older` one, in a testbed of its own.
///
/// # Errors
/// When it does not go as it should; the daemons' logs are kept.
pub fn run(world: &World, older: &Path, (name, from_newer, steps): Story) -> Result<Outcome> {
    let builds = [Build::of(older)?, Build::of(&world.dunlin)?];
    let first = &builds[usize::from(from_newer)].binary;
    in_a_testbed(name, &TestbedSpec::three_hosts(), first, |cluster| {
        let plan = VmPlan::redis("dunlin");
        let mut stage = Stage {
            newer: match from_newer {
                true => cluster.hosts().iter().cloned().collect(),
                false => BTreeSet::new(),
            },
            cluster,
            builds: &builds,
            vm: plan.name.clone(),
        };
        stage.play(world, &plan, steps)
    })
}

struct Stage<'s, 'testbed> {
    cluster: &'s mut Cluster<'testbed>,
    builds: &'s [Build; 2],
    /// The hosts that run the newer build.
    newer: BTreeSet<String>,
    vm: String,
}

impl Stage<'_, '_> {
    fn play(&mut self, world: &World, plan: &VmPlan, steps: &[Step]) -> Result<Outcome> {
        self.cluster.start_hosts()?;
        let file = plan.write(self.cluster.testbed(), &world.image)?;
        self.cluster.dunlin("a", &["up", &file.to_string_lossy()])?;
        let client = self.cluster.testbed().node("client");
        await_service(client, plan.service(), PATIENCE)?;
        self.settled().context("at first")?;
        let spec = CounterSpec {
            target: plan.service(),
            connections: 4,
            together: true,
            give_up: GIVE_UP,
        };
        let counter = Counter::start(client, &spec)?;
        counter.await_more(ANSWERS, PATIENCE)?;
        let (mut exchanges, mut kills) = (0, 0);
        for (number, step) in steps.iter().enumerate() {
            match *step {
                Step::Exchange(role) => {
                    let host = self.host_of(role)?;
                    self.exchange(&host)?;
                    exchanges += 1;
                }
                Step::SwitchoverAndExchange => {
                    let host = self.host_of("primary")?;
                    self.cluster.dunlin(&host, &["failover", &self.vm])?;
                    self.settled()?;
                    counter.await_more(ANSWERS, PATIENCE)?;
                    self.exchange(&host)?;
                    exchanges += 1;
                }
                Step::KillPrimary => {
                    let (host, _) = self.cluster.await_protected(&self.vm, PATIENCE)?;
                    self.cluster.kill_host(&host)?;
                    self.cluster.await_take_over(&self.vm, &host, PATIENCE)?;
                    counter.await_more(ANSWERS, PATIENCE)?;
                    self.cluster.start_host(&host)?;
                    kills += 1;
                }
            }
            self.settled().with_context(|| {
                let newer: Vec<&str> = self.newer.iter().map(String::as_str).collect();
                format!("after step {}, with the newer build on {newer:?}", number + 1)
            })?;
            counter.await_more(ANSWERS, PATIENCE)?;
        }
        let (clients, _) = counter.finish()?;
        ensure!(clients.is_clean(), "clients were let down: {clients:?}");
        self.nobody_was_refused()?;
        self.cluster.dunlin("a", &["down", "--now", &self.vm])?;
        let left = traces::after_down(self.cluster)?;
        ensure!(left.is_empty(), "left after down: {}", left.join(", "));
        for host in self.cluster.running() {
            self.cluster.stop_host(&host, Signal::SIGTERM)?;
        }
        Ok(Outcome {
            acknowledged: clients.acknowledged,
            worst_gap_us: clients.longest_gap_us,
            exchanges,
            kills,
            protocols: [self.builds[0].protocol, self.builds[1].protocol],
        })
    }

    fn host_of(&self, role: &str) -> Result<String> {
        let vm = &self.vm;
        let what = format!("a host is the VM's {role}");
        self.cluster.await_status(&what, PATIENCE, |hosts| {
            let mut hosts = hosts.iter();
            let with = hosts.find(|host| host.vm(vm).is_some_and(|vm| vm.role.as_str() == role))?;
            Some(with.host.clone())
        })
    }

    /// As a package does it: the daemon ends and hands its VMs over, and the other build begins.
    fn exchange(&mut self, host: &str) -> Result<()> {
        let was_primary = self.host_of("primary")? == host;
        let gets_newer = !self.newer.contains(host);
        self.cluster.stop_host(host, Signal::SIGTERM)?;
        let build = &self.builds[usize::from(gets_newer)];
        self.cluster.install(host, &build.binary);
        self.cluster.start_host(host)?;
        if gets_newer {
            self.newer.insert(host.to_owned());
        } else {
            self.newer.remove(host);
        }
        if was_primary {
            let begun = Instant::now();
            let (primary, _) = self.cluster.await_protected(&self.vm, PATIENCE)?;
            ensure!(
                primary != host,
                "host {host} serves again {:?} after its start: it did not hand its VM over",
                begun.elapsed()
            );
        }
        Ok(())
    }

    /// The newest version of the protocol that this host knows.
    fn knows(&self, host: &str) -> u16 {
        self.builds[usize::from(self.newer.contains(host))].protocol
    }

    /// The VM is protected, all links stand, and hosts that can say it say in which version they speak.
    fn settled(&self) -> Result<()> {
        self.cluster.await_protected(&self.vm, PATIENCE)?;
        let lowest = self.cluster.hosts().iter().map(|host| self.knows(host)).min();
        let what = "all hosts are linked, and speak the newest version that both ends of a link know";
        self.cluster.await_status(what, PATIENCE, |hosts| {
            if hosts.len() < self.cluster.hosts().len() {
                return None;
            }
            for status in hosts {
                let vm = status.vm(&self.vm)?;
                if !vm.peers.iter().all(|peer| peer.connected) {
                    return None;
                }
                if !self.newer.contains(&status.host) {
                    continue;
                }
                let own = self.knows(&status.host);
                let right = vm.peers.iter().all(|peer| {
                    let common = own.min(self.knows(&peer.host));
                    peer.protocol == Some(common) && peer.version.is_some() == (common >= 3)
                });
                if !right || status.protocol != own || vm.protocol != lowest || status.version.is_empty() {
                    return None;
                }
            }
            Some(())
        })
    }

    /// No daemon, of either build, met a greeting, an entry or a message that it does not know.
    fn nobody_was_refused(&self) -> Result<()> {
        for host in self.cluster.hosts() {
            let text = fs::read_to_string(self.cluster.log(host))?;
            let bad = [
                "protocol version",
                "another version",
                "cannot be understood",
                "changed on its way",
            ];
            let line = text
                .lines()
                .find(|line| bad.iter().any(|words| line.contains(words)));
            ensure!(line.is_none(), "host {host}: {}", line.unwrap_or_default());
        }
        Ok(())
    }
}
