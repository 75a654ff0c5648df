//! Which figures there are: name, meaning, and where each is in a status. A name that ends in `_total` is a counter, every other one a
//! gauge; [docs/monitoring.md](../../../docs/monitoring.md) has all of them, and a test compares it with the page.

use dunlin_api::{
    BadInput, CheckpointStatus, DiskFigures, FailoverStatus, NotifyStatus, ProgramStatus, QueueFigures,
    Reasons, Verified, VmStatus,
};

fn verified(vm: &VmStatus, figure: fn(&Verified) -> f64) -> f64 {
    vm.verify.last.as_ref().map_or(0.0, figure)
}

fn of_checkpoint(vm: &VmStatus, figure: fn(&CheckpointStatus) -> f64) -> f64 {
    vm.checkpoint.as_ref().map_or(0.0, figure)
}

fn of_program(vm: &VmStatus, figure: fn(&ProgramStatus) -> u64) -> f64 {
    vm.program.as_ref().map_or(0.0, |program| figure(program) as f64)
}

pub type Figure = (&'static str, &'static str, fn(&VmStatus) -> f64);

/// Name, meaning, value.
pub const FIGURES: &[Figure] = &[
    (
        "dunlin_protected",
        "1 if a complete second copy of the VM exists",
        |vm| f64::from(u8::from(vm.protected)),
    ),
    (
        "dunlin_wants_protection",
        "1 if the VM's policy asks for a second copy",
        |vm| f64::from(u8::from(vm.wants_protection)),
    ),
    (
        "dunlin_join_failures",
        "Primary: how often in a row no backup could join (a VM's: for the same reason)",
        |vm| {
            vm.join_problem
                .as_ref()
                .map_or(0.0, |problem| f64::from(problem.times))
        },
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
        "Agreed entries that this host holds, which are those since the log was cut",
        |vm| vm.log_entries as f64,
    ),
    (
        "dunlin_queue_waits_total",
        "Times that the log or the buffer of held output was full, so that the network or the VM had to wait",
        |vm| vm.full as f64,
    ),
    (
        "dunlin_log_refused_total",
        "Times that the log began to refuse this host's own entries; they are proposed again",
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
        "Frames that left because both VMs, or both copies of a program, had said them",
        |vm| vm.sync.compared.matched as f64 + of_program(vm, |program| program.matched),
    ),
    (
        "dunlin_outputs_by_sync_total",
        "Frames that left because a sync covered them",
        |vm| vm.sync.compared.by_sync as f64,
    ),
    (
        "dunlin_output_differences_total",
        "Times that the outputs of the two VMs, or copies of a program, differed",
        |vm| vm.sync.compared.differences as f64 + of_program(vm, |program| program.differing),
    ),
    (
        "dunlin_program_inputs_total",
        "Inputs that were given to the copy of a bare program here",
        |vm| of_program(vm, |program| program.inputs),
    ),
    (
        "dunlin_program_inputs_together_total",
        "Of these, the ones that were given while others were unread (order = batch)",
        |vm| of_program(vm, |program| program.together),
    ),
    (
        "dunlin_program_inputs_not_read_total",
        "Of all inputs, the ones that it did not read within its patience",
        |vm| of_program(vm, |program| program.not_read),
    ),
    (
        "dunlin_program_inputs_lost_total",
        "Frames that the copy of a bare program here lost because too many waited to be read",
        |vm| of_program(vm, |program| program.lost),
    ),
    (
        "dunlin_program_restarts_total",
        "Times that a bare program that had ended everywhere was restarted on this host",
        |vm| of_program(vm, |program| program.begun_again),
    ),
    (
        "dunlin_output_held_seconds_total",
        "Total time that all frames that left were held",
        |vm| vm.sync.compared.held_us as f64 / 1e6,
    ),
    (
        "dunlin_answer_median_seconds",
        "Primary: median time that clients waited for the VM in the last second, from their payload's arrival at this host to the VM's next \
         frame out on the same connection. A sample of at most 250 waits, one connection at a time; 0: none waited, or shadow sockets answer",
        |vm| vm.answers.map_or(0.0, |answers| answers.p50_us as f64 / 1e6),
    ),
    (
        "dunlin_answer_p99_seconds",
        "The 99th percentile of the same; with few waits, the longest",
        |vm| vm.answers.map_or(0.0, |answers| answers.p99_us as f64 / 1e6),
    ),
    (
        "dunlin_change_overs_total",
        "Times that another mode of keeping the copies was chosen",
        |vm| vm.sync.change_overs as f64,
    ),
    ("dunlin_syncs_aborted_total", "Syncs that were given up", |vm| {
        vm.sync.aborted as f64
    }),
    (
        "dunlin_stalls_total",
        "Times that a protected VM made no progress, so that its session was ended",
        |vm| vm.stalls as f64,
    ),
    (
        "dunlin_session_wait_seconds",
        "How long the thread between the two copies has been in its present wait",
        |vm| vm.waits.as_ref().map_or(0.0, |wait| wait.us as f64 / 1e6),
    ),
    (
        "dunlin_disks_compared_timestamp_seconds",
        "When this host last compared all of both hosts' disks, in seconds since 1970; 0: it never has",
        |vm| verified(vm, |last| last.ended_ms as f64 / 1e3),
    ),
    (
        "dunlin_disks_compared_extents",
        "Pieces of 1 MiB that this comparison looked at",
        |vm| verified(vm, |last| last.extents as f64),
    ),
    (
        "dunlin_disks_differing_extents",
        "Of these, those that differed",
        |vm| verified(vm, |last| last.differing as f64),
    ),
    (
        "dunlin_checkpoint_timestamp_seconds",
        "Backup: when the standby's checkpoint of the VM's memory was last brought up to date, in seconds since 1970; 0: it has none from here",
        |vm| of_checkpoint(vm, |checkpoint| checkpoint.at_ms.unwrap_or(0) as f64 / 1e3),
    ),
    (
        "dunlin_checkpoint_sent_bytes_total",
        "Backup: memory that was sent for that checkpoint by this copy of the VM",
        |vm| of_checkpoint(vm, |checkpoint| checkpoint.sent_bytes_total as f64),
    ),
    (
        "dunlin_sync_paused_seconds_total",
        "Total time that the VM was paused for syncs",
        |vm| vm.sync.sum.pause_us as f64 / 1e6,
    ),
    (
        "dunlin_sync_sent_bytes_total",
        "Memory and device state that all syncs sent, in total",
        |vm| (vm.sync.sum.bytes + vm.sync.sum.device_bytes) as f64,
    ),
    (
        "dunlin_sync_pause_seconds",
        "Last sync: how long the VM was paused",
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

pub type BadFigure = (&'static str, fn(&BadInput) -> u64);

/// What other hosts said and was not believed, by what was wrong with it.
pub const BAD_INPUT: &[BadFigure] = &[
    ("message-too-short", |bad| bad.too_short),
    ("message-too-long", |bad| bad.too_long),
    ("message-unknown", |bad| bad.unknown),
    ("message-forbidden", |bad| bad.forbidden),
    ("link-broken", |bad| bad.links_broken),
    ("unknown-member", |bad| bad.unknown_members),
    ("checksum", |bad| bad.torn),
];

pub type QueueFigure = (&'static str, &'static str, fn(&QueueFigures) -> f64);

/// The same for each queue of a VM (docs/budgets.md).
pub const QUEUE_FIGURES: &[QueueFigure] = &[
    ("dunlin_queue_bytes", "What a queue holds", |queue| {
        queue.bytes as f64
    }),
    ("dunlin_queue_limit_bytes", "What a queue may hold", |queue| {
        queue.limit_bytes as f64
    }),
    (
        "dunlin_queue_dropped_total",
        "Frames or messages that found no room in a queue",
        |queue| queue.dropped as f64,
    ),
];

pub type DiskFigure = (&'static str, &'static str, fn(&DiskFigures) -> f64);

/// The same for each disk.
pub const DISK_FIGURES: &[DiskFigure] = &[
    (
        "dunlin_disk_dirty_bytes",
        "Parts of the disk that a peer may lack",
        |disk| disk.dirty_bytes as f64,
    ),
    (
        "dunlin_disk_queued_bytes",
        "Primary: mirrored writes that wait to be sent",
        |disk| disk.queued_bytes as f64,
    ),
    (
        "dunlin_disk_held_bytes",
        "Memory that the backup's buffers hold",
        |disk| disk.held_bytes as f64,
    ),
    (
        "dunlin_disk_peak_bytes",
        "Backup: the most that its buffers ever held",
        |disk| disk.peak_bytes as f64,
    ),
    (
        "dunlin_disk_compared_bytes_total",
        "Backup: bytes compared when idle",
        |disk| disk.compared_bytes as f64,
    ),
    (
        "dunlin_disk_settled_bytes_total",
        "Backup: bytes found equal when idle, and written to the image",
        |disk| disk.settled_bytes as f64,
    ),
    (
        "dunlin_disk_committed_bytes_total",
        "Backup: bytes written to the image by syncs",
        |disk| disk.committed_bytes as f64,
    ),
    (
        "dunlin_disk_light_seconds_total",
        "Backup: time that the comparison when idle took, its writes to the image included",
        |disk| disk.light_ns as f64 / 1e9,
    ),
    (
        "dunlin_disk_settles_total",
        "Backup: syncs that reached the image",
        |disk| disk.settles as f64,
    ),
    (
        "dunlin_disk_settle_seconds_total",
        "Backup: total time that these took, from their commit",
        |disk| disk.settle_ns as f64 / 1e9,
    ),
    (
        "dunlin_disk_asked_syncs_total",
        "Backup: syncs asked for because its buffers filled up",
        |disk| disk.asked_syncs as f64,
    ),
    (
        "dunlin_disk_delayed_writes_total",
        "Backup: writes of its VM that were delayed because its buffers were nearly full",
        |disk| disk.delayed_writes as f64,
    ),
];

pub type ReasonFigure = (&'static str, fn(&Reasons) -> u64);

/// Why syncs were started.
pub const REASONS: &[ReasonFigure] = &[
    ("idle", |reasons| reasons.idle),
    ("limit", |reasons| reasons.limit),
    ("quiet", |reasons| reasons.quiet),
    ("disk", |reasons| reasons.disk),
    ("differs", |reasons| reasons.differs),
    ("change-over", |reasons| reasons.change_over),
    ("memory", |reasons| reasons.memory),
];

pub type StepFigure = (&'static str, fn(&FailoverStatus) -> u64);

/// What the last take-over on this host was made of, in microseconds.
pub const STEPS: &[StepFigure] = &[
    ("detected", |last| last.detected_us),
    ("elected", |last| last.elected_us),
    ("applied", |last| last.applied_us),
    ("announced", |last| last.announced_us),
];

pub type NotifyFigure = (&'static str, &'static str, fn(&NotifyStatus) -> u64);

/// Events on their way to `notify_url`.
pub const NOTIFY_FIGURES: &[NotifyFigure] = &[
    (
        "dunlin_notifications_sent_total",
        "Events that notify_url has taken",
        |notify| notify.sent,
    ),
    (
        "dunlin_notifications_failed_total",
        "Attempts to send an event that failed; it is sent again",
        |notify| notify.failed,
    ),
    (
        "dunlin_notifications_lost_total",
        "Events that were not sent: refused by notify_url, or too many waited",
        |notify| notify.lost,
    ),
    (
        "dunlin_notifications_waiting",
        "Events that wait to be sent",
        |notify| notify.waiting,
    ),
];
