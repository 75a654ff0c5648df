//! Prometheus metrics, served as text on a local port; made from the same status that people see.

use crate::control::{BadInput, DiskFigures, HostStatus, QueueFigures, VmStatus};
use crate::daemon::{Daemon, requests};
use prometheus::{Encoder, GaugeVec, Opts, Registry, TextEncoder};
use std::net::SocketAddr;
use std::sync::Arc;

type Figure = (&'static str, &'static str, fn(&VmStatus) -> f64);

/// Name, meaning, value.
const FIGURES: &[Figure] = &[
    (
        "dunlin_protected",
        "1 if a complete second copy of the VM exists",
        |vm| f64::from(u8::from(vm.protected)),
    ),
    ("dunlin_term", "Consensus term", |vm| vm.term as f64),
    ("dunlin_epoch", "Running epoch", |vm| vm.epoch as f64),
    (
        "dunlin_log_lag_entries",
        "Agreed entries that are not applied here yet",
        |vm| vm.committed.saturating_sub(vm.applied) as f64,
    ),
    (
        "dunlin_log_entries",
        "Agreed entries that this host holds: those since the log was cut",
        |vm| vm.log_entries as f64,
    ),
    (
        "dunlin_queue_waits_total",
        "Times that the log was full, or what output is held in, so that the network or the VM had to wait",
        |vm| vm.full as f64,
    ),
    (
        "dunlin_log_refused_total",
        "Times that the log began to refuse entries of its own, which are said again",
        |vm| vm.unsaid as f64,
    ),
    (
        "dunlin_held_frames",
        "Outbound frames that wait for a sync",
        |vm| vm.held_frames as f64,
    ),
    ("dunlin_frames_in_total", "Frames given to the VM", |vm| {
        vm.frames_in as f64
    }),
    (
        "dunlin_frames_out_total",
        "Frames released to the network",
        |vm| vm.frames_out as f64,
    ),
    ("dunlin_syncs_total", "Acknowledged syncs", |vm| {
        vm.sync.count as f64
    }),
    (
        "dunlin_outputs_matched_total",
        "Frames that left because both VMs had said them",
        |vm| vm.sync.compared.matched as f64,
    ),
    (
        "dunlin_outputs_by_sync_total",
        "Frames that left because a sync covered them",
        |vm| vm.sync.compared.by_sync as f64,
    ),
    (
        "dunlin_output_differences_total",
        "Times that the two VMs said something else",
        |vm| vm.sync.compared.differences as f64,
    ),
    (
        "dunlin_output_held_seconds_total",
        "How long all frames that left were held, together",
        |vm| vm.sync.compared.held_us as f64 / 1e6,
    ),
    (
        "dunlin_change_overs_total",
        "Times that another manner of keeping the copies was chosen",
        |vm| vm.sync.change_overs as f64,
    ),
    ("dunlin_syncs_aborted_total", "Syncs that were given up", |vm| {
        vm.sync.aborted as f64
    }),
    (
        "dunlin_stalls_total",
        "Times that a protected VM did not get on, so that its session was ended",
        |vm| vm.stalls as f64,
    ),
    (
        "dunlin_session_wait_seconds",
        "How long the thread between the two copies has waited for what it waits for",
        |vm| vm.waits.as_ref().map_or(0.0, |wait| wait.us as f64 / 1e6),
    ),
    (
        "dunlin_sync_pause_seconds",
        "Last sync: how long the VM stood still",
        |vm| vm.sync.last.pause_us as f64 / 1e6,
    ),
    (
        "dunlin_sync_total_seconds",
        "Last sync: from the stop to the acknowledgement",
        |vm| vm.sync.last.total_us as f64 / 1e6,
    ),
    (
        "dunlin_sync_dirty_pages",
        "Last sync: dirty pages of both VMs together",
        |vm| vm.sync.last.united as f64,
    ),
    (
        "dunlin_sync_divergent_pages",
        "Last sync: pages that differed",
        |vm| vm.sync.last.divergent as f64,
    ),
    (
        "dunlin_sync_memory_bytes",
        "Last sync: bytes of memory sent",
        |vm| vm.sync.last.bytes as f64,
    ),
];

type BadFigure = (&'static str, fn(&BadInput) -> u64);

/// What other hosts said and was not believed, by what was wrong with it.
const BAD_INPUT: &[BadFigure] = &[
    ("message-too-short", |bad| bad.too_short),
    ("message-too-long", |bad| bad.too_long),
    ("message-unknown", |bad| bad.unknown),
    ("message-forbidden", |bad| bad.forbidden),
    ("link-broken", |bad| bad.links_broken),
    ("unknown-member", |bad| bad.unknown_members),
    ("checksum", |bad| bad.torn),
];

type QueueFigure = (&'static str, &'static str, fn(&QueueFigures) -> u64);

/// The same for each queue of a VM (docs/budgets.md).
const QUEUE_FIGURES: &[QueueFigure] = &[
    ("dunlin_queue_bytes", "What a queue holds", |queue| queue.bytes),
    ("dunlin_queue_limit_bytes", "What a queue may hold", |queue| {
        queue.limit_bytes
    }),
    (
        "dunlin_queue_dropped_total",
        "Frames or messages that found no room in a queue",
        |queue| queue.dropped,
    ),
];

type DiskFigure = (&'static str, &'static str, fn(&DiskFigures) -> u64);

/// The same for each disk.
const DISK_FIGURES: &[DiskFigure] = &[
    (
        "dunlin_disk_dirty_bytes",
        "Parts of the disk that a peer may lack",
        |disk| disk.dirty_bytes,
    ),
    (
        "dunlin_disk_queued_bytes",
        "Primary: mirrored writes that wait to be sent",
        |disk| disk.queued_bytes,
    ),
    (
        "dunlin_disk_held_bytes",
        "Memory that the backup's buffers hold",
        |disk| disk.held_bytes,
    ),
    (
        "dunlin_disk_peak_bytes",
        "Backup: the most that its buffers ever held",
        |disk| disk.peak_bytes,
    ),
    (
        "dunlin_disk_compared_bytes_total",
        "Backup: compared when idle",
        |disk| disk.compared_bytes,
    ),
    (
        "dunlin_disk_settled_bytes_total",
        "Backup: found equal when idle, and brought to the image",
        |disk| disk.settled_bytes,
    ),
    (
        "dunlin_disk_committed_bytes_total",
        "Backup: brought to the image by syncs",
        |disk| disk.committed_bytes,
    ),
    (
        "dunlin_disk_light_ns_total",
        "Backup: time that the comparison when idle took, with what it brought to the image",
        |disk| disk.light_ns,
    ),
    (
        "dunlin_disk_settles_total",
        "Backup: syncs that reached the image",
        |disk| disk.settles,
    ),
    (
        "dunlin_disk_settle_ns_total",
        "Backup: time that these took in all, from their commit",
        |disk| disk.settle_ns,
    ),
    (
        "dunlin_disk_asked_syncs_total",
        "Backup: syncs asked for because its buffers filled up",
        |disk| disk.asked_syncs,
    ),
    (
        "dunlin_disk_delayed_writes_total",
        "Backup: writes of its VM that were delayed because its buffers were nearly full",
        |disk| disk.delayed_writes,
    ),
];

/// Serves metrics until the daemon ends.
pub fn serve(address: SocketAddr, daemon: &Arc<Daemon>) -> anyhow::Result<()> {
    let server = tiny_http::Server::http(address).map_err(|error| anyhow::anyhow!("{error}"))?;
    let daemon = daemon.clone();
    std::thread::Builder::new()
        .name("metrics".into())
        .spawn(move || {
            for request in server.incoming_requests() {
                let response = match page(&requests::status(&daemon)) {
                    Ok(text) => tiny_http::Response::from_string(text),
                    Err(error) => tiny_http::Response::from_string(error.to_string()).with_status_code(500),
                };
                // A scraper that has gone asks again.
                let _ = request.respond(response);
            }
        })?;
    Ok(())
}

/// The whole page.
fn page(status: &HostStatus) -> prometheus::Result<String> {
    let registry = Registry::new();
    for (name, help, figure) in FIGURES {
        let gauge = GaugeVec::new(Opts::new(*name, *help), &["vm"])?;
        for vm in &status.vms {
            gauge.with_label_values(&[&vm.name]).set(figure(vm));
        }
        registry.register(Box::new(gauge))?;
    }
    for (name, help, figure) in DISK_FIGURES {
        let gauge = GaugeVec::new(Opts::new(*name, *help), &["vm", "disk"])?;
        for vm in &status.vms {
            for (number, disk) in vm.disks.iter().enumerate() {
                let labels = [vm.name.as_str(), &number.to_string()];
                gauge.with_label_values(&labels).set(figure(disk) as f64);
            }
        }
        registry.register(Box::new(gauge))?;
    }
    for (name, help, figure) in QUEUE_FIGURES {
        let gauge = GaugeVec::new(Opts::new(*name, *help), &["vm", "queue"])?;
        for vm in &status.vms {
            for queue in &vm.queues {
                let labels = [vm.name.as_str(), queue.name.as_str()];
                gauge.with_label_values(&labels).set(figure(queue) as f64);
            }
        }
        registry.register(Box::new(gauge))?;
    }
    let bad = GaugeVec::new(
        Opts::new(
            "dunlin_bad_input_total",
            "What the VM's other hosts said and was not believed (a few of 'checksum' are writes under way)",
        ),
        &["vm", "what"],
    )?;
    for vm in &status.vms {
        for (what, count) in BAD_INPUT {
            bad.with_label_values(&[vm.name.as_str(), what])
                .set(count(&vm.bad_input) as f64);
        }
    }
    registry.register(Box::new(bad))?;
    let refused = GaugeVec::new(
        Opts::new(
            "dunlin_refused_connections_total",
            "Connections to this host that were refused",
        ),
        &["what"],
    )?;
    for (what, count) in &status.refused {
        refused.with_label_values(&[what]).set(*count as f64);
    }
    registry.register(Box::new(refused))?;
    let role = GaugeVec::new(
        Opts::new("dunlin_role", "1 for the role of this host"),
        &["vm", "role"],
    )?;
    for vm in &status.vms {
        role.with_label_values(&[&vm.name, &vm.role]).set(1.0);
    }
    registry.register(Box::new(role))?;
    let mut text = Vec::new();
    TextEncoder::new().encode(&registry.gather(), &mut text)?;
    String::from_utf8(text).map_err(|error| prometheus::Error::Msg(error.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_not_believed_is_counted_by_what_was_wrong() {
        let vm = VmStatus {
            name: "shop".into(),
            queues: vec![QueueFigures {
                name: "inbound".into(),
                bytes: 5,
                limit_bytes: 9,
                dropped: 2,
            }],
            full: 4,
            unsaid: 1,
            bad_input: BadInput {
                too_short: 3,
                links_broken: 1,
                ..BadInput::default()
            },
            ..VmStatus::default()
        };
        let status = HostStatus {
            vms: vec![vm],
            refused: [("other-cluster".to_owned(), 7)].into(),
            ..HostStatus::default()
        };
        let page = page(&status).expect("a page");
        for line in [
            "dunlin_bad_input_total{vm=\"shop\",what=\"message-too-short\"} 3",
            "dunlin_bad_input_total{vm=\"shop\",what=\"message-too-long\"} 0",
            "dunlin_bad_input_total{vm=\"shop\",what=\"link-broken\"} 1",
            "dunlin_queue_bytes{queue=\"inbound\",vm=\"shop\"} 5",
            "dunlin_queue_limit_bytes{queue=\"inbound\",vm=\"shop\"} 9",
            "dunlin_queue_dropped_total{queue=\"inbound\",vm=\"shop\"} 2",
            "dunlin_queue_waits_total{vm=\"shop\"} 4",
            "dunlin_log_refused_total{vm=\"shop\"} 1",
            "dunlin_refused_connections_total{what=\"other-cluster\"} 7",
        ] {
            assert!(page.lines().any(|found| found == line), "no {line} in {page}");
        }
    }
}
