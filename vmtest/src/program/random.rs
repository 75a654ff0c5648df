//! Random kills under mixed load, and an outside word on what clients saw: could that history have happened on one redis?
//!
//! * **Decides:** what passes: the history of the registers is linearizable, the counters are right, no connection broke.
//! * **Flow:** redis on two hosts -> counters, registers -> at a moment by chance one of the three hosts dies -> it comes back -> again.
//! * **Source:** porcupine ([`crate::linear`]). **Not here:** the whole list of faults (`scenario::campaign`, with VMs).

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use super::{CONNECTIONS, NAME, PATIENCE, Plan, count, down, up, whole};
use crate::client::Boots;
use crate::client::registers::Registers;
use crate::cluster::{all_take_part, in_a_testbed};
use crate::demo::service;
use crate::linear;
use crate::random::Random;
use crate::testbed::TestbedSpec;

/// Who uses the registers.
const READERS: u64 = 4;
/// The longest that load runs between two kills, in milliseconds.
const REST_MS: u64 = 2_000;

/// Kills so many times. Returns what there is to tell.
///
/// # Errors
/// When something does not go as it should; the daemons' logs are kept, and the history beside them.
pub fn run(binary: &Path, kills: u32, seed: u64, say: &mut dyn FnMut(&str)) -> Result<String> {
    let checker = linear::checker()?;
    in_a_testbed("program-kills", &TestbedSpec::three_hosts(), binary, |cluster| {
        cluster.start_hosts()?;
        let mut random = Random::new(seed);
        up(cluster, &Plan::redis(cluster.testbed())?)?;
        let counter = count(cluster, CONNECTIONS)?;
        let client = cluster.testbed().node("client");
        let registers = Registers::start(client, service(), READERS, PATIENCE, &Boots::never())?;
        let mut killed = [0_u32; 3];
        for number in 1..=kills {
            std::thread::sleep(Duration::from_millis(random.below(REST_MS)));
            let (mut primary, backup) = whole(cluster)?;
            // Of six the primary's host four times.
            let (which, victim) = match random.below(6) {
                0 => (1, backup.clone()),
                1 => (2, "c".to_owned()),
                _ => (0, primary.clone()),
            };
            cluster.kill_host(&victim)?;
            killed[which] += 1;
            if which == 0 {
                cluster
                    .await_take_over(NAME, &victim, PATIENCE)
                    .with_context(|| format!("kill {number}"))?;
                primary = backup;
            }
            registers
                .await_more(READERS, PATIENCE)
                .with_context(|| format!("no answers after kill {number}, of host {victim}"))?;
            cluster.start_host(&victim)?;
            cluster.await_status(&format!("whole again after kill {number}"), PATIENCE, |hosts| {
                let host = hosts.iter().find(|host| host.host == primary)?;
                (host.vm(NAME)?.protected && all_take_part(hosts, NAME)).then_some(())
            })?;
            if number % 10 == 0 {
                say(&format!("program-kills: {number} of {kills}"));
            }
        }
        let (clients, _) = counter.finish()?;
        let history = registers.finish()?;
        ensure!(clients.is_clean(), "clients were let down: {clients:?}");
        ensure!(
            history.resets + history.refused + history.stuck == 0,
            "users of registers were let down: {} connections broken, {} answers refused, {} stuck",
            history.resets,
            history.refused,
            history.stuck
        );
        let said = linear::check(&checker, &history.operations, &cluster.dir().join("history"))?;
        down(cluster, "c")?;
        Ok(format!(
            "{} kills of the primary's host, {} of the backup's, {} of the witness, seed {seed}, {} counted, 0 lost; {said}",
            killed[0], killed[1], killed[2], clients.acknowledged
        ))
    })
}
