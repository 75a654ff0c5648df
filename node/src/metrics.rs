//! Prometheus metrics, served as text on a port; made from the same status that people see.
//!
//! **Decides**: types and labels. **Flow**: a scraper asks for `/metrics` -> `telling::status` -> [`page`]. **Invariants**: 1. a name that ends in
//! `_total` is a counter, and no other is; units are seconds and bytes. 2. what has a label for each kind has all kinds from the start.
//! **Source**: Prometheus' exposition format 0.0.4 and its rules for names. **Not here**: who asks ([`door`]), the figures ([`figures`]), alarms
//! (`monitoring/`), what each means to an operator (docs/monitoring.md).

mod door;
mod figures;

pub use door::serve;
use dunlin_api::HostStatus;
use dunlin_fabric::link::PROTOCOL_VERSION;
use prometheus::{CounterVec, Encoder, GaugeVec, Opts, Registry, TextEncoder};

/// One name with all its values.
enum Family {
    Counter(CounterVec),
    Gauge(GaugeVec),
}

impl Family {
    fn new(registry: &Registry, name: &str, help: &str, labels: &[&str]) -> prometheus::Result<Self> {
        let options = Opts::new(name, help);
        Ok(match name.ends_with("_total") {
            true => {
                let counter = CounterVec::new(options, labels)?;
                registry.register(Box::new(counter.clone()))?;
                Self::Counter(counter)
            }
            false => {
                let gauge = GaugeVec::new(options, labels)?;
                registry.register(Box::new(gauge.clone()))?;
                Self::Gauge(gauge)
            }
        })
    }

    fn set(&self, labels: &[&str], value: f64) {
        match self {
            // The page is made anew each time.
            Self::Counter(counter) => counter.with_label_values(labels).inc_by(value),
            Self::Gauge(gauge) => gauge.with_label_values(labels).set(value),
        }
    }
}

/// The whole page.
fn page(status: &HostStatus) -> prometheus::Result<String> {
    let registry = Registry::new();
    let family = |name: &str, help: &str, labels: &[&str]| Family::new(&registry, name, help, labels);
    for (name, help, figure) in figures::FIGURES {
        let family = family(name, help, &["vm"])?;
        for vm in &status.vms {
            family.set(&[&vm.name], figure(vm));
        }
    }
    for (name, help, figure) in figures::DISK_FIGURES {
        let family = family(name, help, &["vm", "disk"])?;
        for vm in &status.vms {
            for (number, disk) in vm.disks.iter().enumerate() {
                family.set(&[&vm.name, &number.to_string()], figure(disk));
            }
        }
    }
    for (name, help, figure) in figures::QUEUE_FIGURES {
        let family = family(name, help, &["vm", "queue"])?;
        for vm in &status.vms {
            for queue in &vm.queues {
                family.set(&[&vm.name, &queue.name], figure(queue));
            }
        }
    }
    of_vms(status, &registry)?;
    of_host(status, &registry)?;
    let mut text = Vec::new();
    TextEncoder::new().encode(&registry.gather(), &mut text)?;
    String::from_utf8(text).map_err(|error| prometheus::Error::Msg(error.to_string()))
}

/// What has a label of its own for each VM.
fn of_vms(status: &HostStatus, registry: &Registry) -> prometheus::Result<()> {
    let family = |name: &str, help: &str, label: &str| Family::new(registry, name, help, &["vm", label]);
    let bad = family(
        "dunlin_bad_input_total",
        "What the VM's other hosts said that was not believed (a few of 'checksum' are writes under way)",
        "what",
    )?;
    let reasons = family(
        "dunlin_syncs_by_reason_total",
        "Acknowledged syncs, by why they were started",
        "reason",
    )?;
    let steps = family(
        "dunlin_failover_seconds",
        "The last take-over on this host, step by step: detected, elected, applied, announced",
        "step",
    )?;
    let peers = family(
        "dunlin_peer_connected",
        "1 while the log's link to that host stands",
        "peer",
    )?;
    let role = family(
        "dunlin_role",
        "1 for the role of this host: primary, backup, witness, none",
        "role",
    )?;
    let state = family(
        "dunlin_state",
        "1 for the state of the VM here, in its first word",
        "state",
    )?;
    for vm in &status.vms {
        let name = vm.name.as_str();
        for (what, count) in figures::BAD_INPUT {
            bad.set(&[name, what], count(&vm.bad_input) as f64);
        }
        for (reason, count) in figures::REASONS {
            reasons.set(&[name, reason], count(&vm.sync.reasons) as f64);
        }
        for (step, us) in figures::STEPS {
            if let Some(last) = &vm.failover {
                steps.set(&[name, step], us(last) as f64 / 1e6);
            }
        }
        for peer in &vm.peers {
            peers.set(&[name, &peer.host], f64::from(u8::from(peer.connected)));
        }
        role.set(&[name, vm.role.as_str()], 1.0);
        state.set(&[name, vm.state.as_str()], 1.0);
    }
    Ok(())
}

/// What is this host's, whatever VMs it has.
fn of_host(status: &HostStatus, registry: &Registry) -> prometheus::Result<()> {
    let family = |name: &str, help: &str, labels: &[&str]| Family::new(registry, name, help, labels);
    let build = family(
        "dunlin_build_info",
        "1, with this host's name, program and protocol",
        &["host", "version", "protocol"],
    )?;
    build.set(
        &[
            &status.host,
            env!("CARGO_PKG_VERSION"),
            &PROTOCOL_VERSION.to_string(),
        ],
        1.0,
    );
    let refused = family(
        "dunlin_refused_connections_total",
        "Connections to this host that were refused, by what was wrong",
        &["what"],
    )?;
    for (what, count) in &status.refused {
        refused.set(&[what], *count as f64);
    }
    let expiry = family(
        "dunlin_certificate_expiry_timestamp_seconds",
        "When a certificate of this host ends, in seconds since 1970: the host's, the authority's",
        &["what"],
    )?;
    for certificate in &status.certificates {
        expiry.set(&[&certificate.what], certificate.expires_s as f64);
    }
    for (name, help, figure) in figures::NOTIFY_FIGURES {
        let family = family(name, help, &[])?;
        if let Some(notify) = &status.notify {
            family.set(&[], figure(notify) as f64);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
