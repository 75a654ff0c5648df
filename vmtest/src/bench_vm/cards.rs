//! What a guest's card costs: the same guest behind a plain QEMU's TAP, and behind each of Dunlin's cards.
//!
//! * **Decides:** the ways that are compared. The plain one is `-netdev tap` as users have it without vhost (a kernel's, which these machines have not),
//!   with its offloads; no daemon is there. The relays are the way that was not taken: the same with a process between QEMU's TAP and the bridge ([`relay`]).
//! * **Flow:** round after round, for each way a VM ([`standing`]) -> each case once, behind a lead-in -> medians, and each way's share of the plain one.
//! * **Invariants:** the same guest, clients, bridges, and share of the CPU in every way; a window in which a client saw something wrong ends the run. One in which the VM lost its
//!   backup for a moment, or nothing ended, is said and has no figure.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result, ensure};
use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;
use serde::{Deserialize, Serialize};

use super::case::Case;
use super::clients::{Clients, Measured};
use super::machine::Machine;
use super::report::{BASELINE, median_of};
use super::{BenchSpec, relay, standing, window};
use crate::accel::RunsUnder;
use crate::image::{self, GuestImage, NicBackend};
use crate::testbed::{Node, Testbed};

/// One load behind one card.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct CardRow {
    /// The load.
    pub case: String,
    /// The card, and the policy.
    pub way: String,
    /// What its clients saw, by round; none where the window was lost.
    pub measured: Vec<Option<Measured>>,
}

/// The whole run.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct CardsReport {
    /// Where it was measured.
    pub machine: Machine,
    /// Case by case.
    pub rows: Vec<CardRow>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    Plain,
    /// Whether large frames are cut on their way, as Dunlin's are.
    Relay(bool),
    Ours(NicBackend, &'static str),
}

const WAYS: [Way; 7] = [
    Way::Plain,
    Way::Relay(false),
    Way::Relay(true),
    Way::Ours(NicBackend::Stream, BASELINE),
    Way::Ours(NicBackend::VhostUser, BASELINE),
    Way::Ours(NicBackend::Stream, "dunlin"),
    Way::Ours(NicBackend::VhostUser, "dunlin"),
];

impl Way {
    fn title(self) -> String {
        match self {
            Self::Plain => "plain TAP".to_owned(),
            Self::Relay(false) => "AF_PACKET relay".to_owned(),
            Self::Relay(true) => "AF_PACKET relay, cut".to_owned(),
            Self::Ours(card, policy) => format!("{} {policy}", card.name()),
        }
    }
}

/// The ways whose titles have one of these words in them, and the plain one; without a word all that are not relays.
///
/// # Errors
/// With all titles, for a word that is in none.
fn chosen(words: &[String]) -> Result<Vec<Way>> {
    for word in words {
        ensure!(
            WAYS.iter().any(|way| way.title().contains(word.as_str())),
            "no way '{word}': there are {}",
            WAYS.map(Way::title).join("; ")
        );
    }
    let is_meant = |way: &Way| match (way, words.is_empty()) {
        (Way::Plain, _) => true,
        (Way::Relay(_), true) => false,
        (Way::Ours(..), true) => true,
        (way, false) => words.iter().any(|word| way.title().contains(word.as_str())),
    };
    Ok(WAYS.into_iter().filter(is_meant).collect())
}

/// Measures the ways that `words` choose, `say`ing each window as it ends.
///
/// # Errors
/// When a VM cannot be had, a client saw something wrong, or a word chooses nothing.
pub fn run(spec: &BenchSpec, words: &[String], say: &mut dyn FnMut(&str)) -> Result<CardsReport> {
    let ways = chosen(words)?;
    let mut rows: BTreeMap<(usize, usize), CardRow> = BTreeMap::new();
    let mut services: Vec<&str> = spec.cases.iter().map(|case| case.service).collect();
    services.dedup();
    for round in 0..spec.rounds as usize {
        for (at, service) in services.iter().enumerate() {
            let cases: Vec<Case> = spec
                .cases
                .iter()
                .filter(|case| case.service == *service)
                .cloned()
                .collect();
            for turn in 0..ways.len() {
                // Each way comes at another place in each round.
                let number = (turn + round + at) % ways.len();
                let way = ways[number];
                let measured = behind(spec, way, &cases, say).with_context(|| way.title())?;
                for (case, measured) in cases.iter().zip(measured) {
                    if let Some(measured) = &measured {
                        say(&format!(
                            "round {} {} {}: {:.0}/s, p50 {:.2} ms",
                            round + 1,
                            case.title(),
                            way.title(),
                            measured.per_second,
                            measured.p50_ms
                        ));
                    }
                    let place = spec.cases.iter().position(|other| other.title() == case.title());
                    let row = rows
                        .entry((place.unwrap_or_default(), number))
                        .or_insert_with(|| CardRow {
                            case: case.title(),
                            way: way.title(),
                            measured: Vec::new(),
                        });
                    row.measured.push(measured);
                }
            }
        }
    }
    Ok(CardsReport {
        machine: spec.machine(),
        rows: rows.into_values().collect(),
    })
}

/// One VM, and each case once.
fn behind(
    spec: &BenchSpec,
    way: Way,
    cases: &[Case],
    say: &mut dyn FnMut(&str),
) -> Result<Vec<Option<Measured>>> {
    let (card, policy) = match way {
        Way::Plain => return behind_a_tap(spec, None, cases),
        Way::Relay(cuts) => return behind_a_tap(spec, Some(cuts), cases),
        Way::Ours(card, policy) => (card, policy),
    };
    let mut spec = spec.clone();
    for (_, image) in &mut spec.images {
        *image = image.clone().with_cards(card);
    }
    let (measured, ended) = standing::with_service(&spec, cases, policy, |service| {
        let each = cases.iter().map(|case| {
            let begun = window::lead_in(service, case, policy);
            let sample = begun.and_then(|begun| window::one(service, case, policy, 1, begun));
            match sample {
                Ok(sample) => Ok(Some(sample.load)),
                Err(lost) if lost.wrong => Err(anyhow::anyhow!(lost.why)),
                Err(lost) => {
                    say(&format!(
                        "lost a window of {} {}: {}",
                        case.title(),
                        way.title(),
                        lost.why
                    ));
                    Ok(None)
                }
            }
        });
        each.collect::<Result<Vec<Option<Measured>>>>()
    })?;
    ended?;
    measured
}

/// `relay`: frames pass a process, and whether it cuts large ones.
fn behind_a_tap(spec: &BenchSpec, relay: Option<bool>, cases: &[Case]) -> Result<Vec<Option<Measured>>> {
    let first = cases.first().context("no case")?;
    let testbed = standing::testbed(spec.host_cpu_percent)?;
    let measured = {
        let plain = Plain::boot(spec, &testbed, relay, first)?;
        let clients: Clients<'_> = standing::clients(&testbed, spec, first.service);
        clients.await_service(first, standing::PATIENCE)?;
        standing::with_shares(&testbed, spec.host_cpu_percent)?;
        let each = cases.iter().map(|case| {
            clients.run(case, window::ALONE_S, None)?;
            clients.run(case, case.window_s(spec.seconds), None).map(Some)
        });
        let measured = each.collect::<Result<Vec<Option<Measured>>>>();
        drop(plain);
        measured
    };
    testbed.close()?;
    measured
}

/// The TAP of a QEMU without Dunlin.
const TAP: &str = "plain0";
/// The relay's, on the bridge.
const OUTER: &str = "plain1";

/// That QEMU, on a host.
struct Plain<'testbed> {
    qemu: Child,
    relay: Option<Child>,
    host: &'testbed Node,
}

impl<'testbed> Plain<'testbed> {
    fn boot(spec: &BenchSpec, testbed: &'testbed Testbed, relay: Option<bool>, case: &Case) -> Result<Self> {
        let (host, image) = (testbed.node("a"), standing::guest(spec, case.service)?);
        let plan = standing::plan(spec, case.service, BASELINE)?;
        ip(host, &["tuntap", "add", "dev", TAP, "mode", "tap", "vnet_hdr"])?;
        let up: &[&str] = match relay {
            None => &["link", "set", TAP, "master", "br0", "up"],
            // The host itself says nothing there.
            Some(_) => &[
                "link",
                "set",
                TAP,
                "addrgenmode",
                "none",
                "txqueuelen",
                "10000",
                "up",
            ],
        };
        ip(host, up)?;
        let relay = relay.map(|cuts| relay::spawn(host, TAP, OUTER, cuts));
        let relay = relay.transpose()?;
        let mut command = host.command("qemu-system-x86_64")?;
        command
            .args(accelerator(&image))
            .args(["-machine", "pc", "-nodefaults", "-no-user-config"]);
        command.args(["-display", "none", "-serial", "none", "-monitor", "none"]);
        command.args([
            "-m",
            &plan.memory_mib.to_string(),
            "-smp",
            &plan.vcpus.to_string(),
        ]);
        command
            .arg("-kernel")
            .arg(&image.kernel)
            .arg("-initrd")
            .arg(&image.initrd);
        command.args([
            "-append",
            &format!("{}{}", image.append_for(image::GUEST_ADDRESS), clock(&image)),
        ]);
        command.args([
            "-netdev",
            &format!("tap,id=net0,ifname={TAP},script=no,downscript=no,vhost=off"),
        ]);
        let [a, b, c, d, e, f] = plan.mac();
        let mac = format!("{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{f:02x}");
        command.args([
            "-device",
            &format!("virtio-net-pci,netdev=net0,mac={mac},romfile="),
        ]);
        let begun = command.stdin(Stdio::null()).stdout(Stdio::null()).spawn();
        let qemu = begun.context("qemu-system-x86_64: 'cargo xtask setup' installs it")?;
        Ok(Self { qemu, relay, host })
    }
}

impl Drop for Plain<'_> {
    fn drop(&mut self) {
        // Each command of a node is the leader of its own process group.
        for child in [Some(&mut self.qemu), self.relay.as_mut()].into_iter().flatten() {
            let _ = killpg(Pid::from_raw(child.id() as i32), Signal::SIGKILL);
            let _ = child.wait();
        }
        // Unlike the daemon's it stays when nobody has it; what is left is said by the testbed.
        let _ = ip(self.host, &["link", "delete", TAP]);
    }
}

fn ip(host: &Node, arguments: &[&str]) -> Result<()> {
    let mut command: Command = host.command("ip")?;
    let status = command.args(arguments).status().context("ip")?;
    ensure!(status.success(), "ip {}: {status}", arguments.join(" "));
    Ok(())
}

fn accelerator(image: &GuestImage) -> [&'static str; 4] {
    match image.runs_under {
        RunsUnder::Tcg => ["-accel", "tcg", "-cpu", "max"],
        RunsUnder::Kvm => ["-accel", "kvm", "-cpu", "host"],
        RunsUnder::Assisted(_) => ["-accel", "kvm", "-cpu", "host,arch-capabilities=off"],
    }
}

/// A translated guest on a busy host does not find its timer where it looks for it.
fn clock(image: &GuestImage) -> &'static str {
    match image.runs_under {
        RunsUnder::Tcg => " no_timer_check",
        RunsUnder::Kvm | RunsUnder::Assisted(_) => "",
    }
}

/// Case by case, the plain TAP first.
#[must_use]
pub fn cards_table(report: &CardsReport) -> String {
    let mut text = format!("{}\n\n", report.machine.in_words());
    let _ = writeln!(
        text,
        "{:<28} {:<22} {:>9} {:>9} {:>16}",
        "case", "card and policy", "per s", "p50 ms", "share of plain"
    );
    for row in &report.rows {
        let plain = report
            .rows
            .iter()
            .find(|other| other.case == row.case && other.way == Way::Plain.title());
        let shares = plain.map(|plain| {
            let pairs = row.measured.iter().zip(&plain.measured);
            pairs
                .filter_map(|pair| match pair {
                    (Some(ours), Some(theirs)) => Some(ours.per_second / theirs.per_second),
                    _ => None,
                })
                .collect()
        });
        let of = |value: fn(&Measured) -> f64| median_of(row.measured.iter().flatten().map(value).collect());
        let _ = writeln!(
            text,
            "{:<28} {:<22} {:>9.0} {:>9.2} {:>16.2}",
            row.case,
            row.way,
            of(|measured| measured.per_second),
            of(|measured| measured.p50_ms),
            shares.map_or(f64::NAN, median_of)
        );
    }
    text
}
