//! A service's VM on its hosts: the testbed, the daemons, the guest and its clients.
//!
//! * **Flow:** [`Standing::up`] -> windows ([`super::windows`]) -> [`Standing::end`], whose own failure voids no figure.
//! * **Not here:** what is measured ([`super::window`]).

use std::cell::RefCell;
use std::time::Duration;

use anyhow::{Context, Result, anyhow};

use super::BenchSpec;
use super::case::Case;
use super::clients::Clients;
use super::link::Link;
use super::report::BASELINE;
use super::wish::Wish;
use crate::cluster::{Cluster, VmPlan};
use crate::image::{self, GuestImage};
use crate::testbed::{CpuShare, Node, Shaper, Testbed, TestbedSpec};

/// Nothing takes longer than this, however busy the machine is.
pub const PATIENCE: Duration = Duration::from_secs(180);
/// The hosts.
pub const HOSTS: [&str; 3] = ["a", "b", "c"];

/// Builds a testbed whose hosts have their share of the CPU, but may use all of it until [`with_shares`].
pub fn testbed(host_cpu_percent: u32) -> Result<Testbed> {
    let testbed = Testbed::new(&TestbedSpec {
        host_cpu: Some(CpuShare::percent(host_cpu_percent)),
        ..TestbedSpec::three_hosts()
    })?;
    for host in HOSTS {
        testbed.node(host).set_cpu_share(None)?;
    }
    widen_ports(testbed.node("client"))?;
    Ok(testbed)
}

/// A client that opens a connection for each request keeps each one's port for a minute: a fast guest uses up the kernel's usual
/// 28,000 in a few windows.
fn widen_ports(client: &Node) -> Result<()> {
    const RANGE: &str = "/proc/sys/net/ipv4/ip_local_port_range";
    let written = client.spawn("ports", || std::fs::write(RANGE, "1025 65535"))?;
    let written = written
        .join()
        .map_err(|_| anyhow!("the thread that sets {RANGE} panicked"))??;
    written.with_context(|| format!("cannot write {RANGE}"))
}

/// From here on each host has its share: booting is not what is measured.
pub fn with_shares(testbed: &Testbed, host_cpu_percent: u32) -> Result<()> {
    for host in HOSTS {
        testbed
            .node(host)
            .set_cpu_share(Some(CpuShare::percent(host_cpu_percent)))?;
    }
    Ok(())
}

/// The daemons.
pub fn cluster<'testbed>(testbed: &'testbed Testbed, spec: &BenchSpec) -> Result<Cluster<'testbed>> {
    let mut cluster = Cluster::init(testbed, &spec.dunlin, &HOSTS)?;
    for host in HOSTS {
        cluster.start_host(host)?;
    }
    Ok(cluster)
}

/// The VM of a service under a policy, with what its label says of the VM's file.
///
/// # Errors
/// A line for its `[sync]` table is none, or the label's period.
pub fn plan(spec: &BenchSpec, service: &str, label: &str) -> Result<VmPlan> {
    let wish = Wish::of(label)?;
    let redis = VmPlan::redis(wish.policy);
    let memory_mib = image::service(service).map_or(redis.memory_mib, |service| service.memory_mib);
    Ok(VmPlan {
        name: service.to_owned(),
        memory_mib,
        disk_mib: spec.disk_mib,
        file: wish.into_file(spec.file()?),
        vcpus: spec.vcpus,
        ..redis
    })
}

/// The image of a service with the bench's further words for its kernel.
pub fn guest(spec: &BenchSpec, service: &str) -> Result<GuestImage> {
    let found = spec.images.iter().find(|(name, _)| name == service);
    let (_, image) = found.with_context(|| format!("no image of {service}"))?;
    let mut image = image.clone();
    for word in &spec.append {
        image.append.push(' ');
        image.append.push_str(word);
    }
    Ok(image)
}

/// The clients of a testbed for a service.
pub fn clients<'testbed>(testbed: &'testbed Testbed, spec: &BenchSpec, service: &str) -> Clients<'testbed> {
    Clients {
        root: spec.clients.clone(),
        node: testbed.node("client"),
        guest: image::GUEST_ADDRESS
            .split('/')
            .next()
            .and_then(|address| address.parse().ok())
            .expect("the guest's address"),
        port: image::service(service).map_or(image::REDIS_PORT, |service| service.port),
    }
}

/// Boots the service of `cases` under `policy`, lets `measure` have it, and ends it. The testbed's shares are on when `measure` begins.
///
/// # Errors
/// The outer when the VM cannot be had at all; the inner, beside what was measured, when it did not end as it should.
pub fn with_service<T>(
    spec: &BenchSpec,
    cases: &[Case],
    policy: &str,
    measure: impl FnOnce(&Service<'_>) -> T,
) -> Result<(T, Result<()>)> {
    let first = cases.first().context("no case")?;
    with_vm(spec, cases, plan(spec, first.service, policy)?, measure)
}

/// The same with a VM as `plan` has it.
///
/// # Errors
/// As [`with_service`].
pub fn with_vm<T>(
    spec: &BenchSpec,
    cases: &[Case],
    plan: VmPlan,
    measure: impl FnOnce(&Service<'_>) -> T,
) -> Result<(T, Result<()>)> {
    let first = cases.first().context("no case")?;
    let policy = plan.policy.as_str();
    let testbed = testbed(spec.host_cpu_percent)?;
    let (measured, down) = {
        let cluster = cluster(&testbed, spec)?;
        let begin = || -> Result<Clients<'_>> {
            let file = plan.write(&testbed, &guest(spec, first.service)?)?;
            cluster.dunlin("a", &["up", "--no-wait", &file.to_string_lossy()])?;
            let clients = clients(&testbed, spec, first.service);
            clients.await_service(first, PATIENCE)?;
            if policy != BASELINE {
                cluster.await_protected(&plan.name, PATIENCE)?;
            }
            with_shares(&testbed, spec.host_cpu_percent)?;
            Ok(clients)
        };
        let clients = begin().map_err(|error| {
            let kept = cluster.keep_logs(&format!("bench-{}-{policy}", first.service));
            error.context(format!("logs: {kept:?}"))
        })?;
        let service = Service {
            spec,
            testbed: &testbed,
            cluster: &cluster,
            plan: &plan,
            clients,
            cable: RefCell::new(Cable::default()),
        };
        let measured = measure(&service);
        let down = cluster.dunlin("a", &["down", "--now", &plan.name]).map(drop);
        if down.is_err() {
            cluster.keep_logs(&format!("bench-{}-down", first.service));
        }
        (measured, down)
    };
    let closed = testbed.close();
    Ok((measured, down.and(closed)))
}

/// A service that answers.
pub struct Service<'a> {
    /// What is measured.
    pub spec: &'a BenchSpec,
    /// The hosts.
    pub testbed: &'a Testbed,
    /// The daemons.
    pub cluster: &'a Cluster<'a>,
    /// The VM.
    pub plan: &'a VmPlan,
    /// Its clients.
    pub clients: Clients<'a>,
    /// Theirs.
    cable: RefCell<Cable<'a>>,
}

#[derive(Default)]
struct Cable<'a> {
    link: Link,
    /// Of any link but the plain one.
    shaper: Option<Shaper<'a>>,
}

impl Service<'_> {
    /// From now on this link lies between the clients and the VM's network; connections that cross it end where it is another one.
    ///
    /// # Errors
    /// When there is no such cable, or the one before did not work all the time.
    pub fn over(&self, link: Link) -> Result<()> {
        let mut cable = self.cable.borrow_mut();
        if cable.link == link {
            return Ok(());
        }
        if let Some(shaper) = std::mem::take(&mut *cable).shaper {
            shaper.finish()?;
        }
        let client = self.clients.node.name();
        let shape = link.shape(self.spec.seed);
        let shaper = shape.map(|shape| self.testbed.shape(client, shape)).transpose()?;
        *cable = Cable { link, shaper };
        Ok(())
    }

    /// How many frames the link has lost for want of room, which was not asked of it.
    pub fn crowded_out(&self) -> u64 {
        let cable = self.cable.borrow();
        cable
            .shaper
            .as_ref()
            .map_or(0, |shaper| shaper.counts().crowded_out)
    }
}
