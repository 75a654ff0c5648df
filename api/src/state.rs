//! What a host is for a VM, and how the VM is there, as words.

use crate::word::words;

words! {
    /// A host's part in a VM.
    #[derive(Default)]
    Role {
        /// It runs the VM that clients talk to.
        Primary = "primary",
        /// It has the second copy, or gets it.
        Backup = "backup",
        /// It agrees, and has no copy.
        Witness = "witness",
        /// It has no part in running the VM now.
        #[default]
        None = "none",
        /// It is not heard: nobody knows. Only in the overview.
        Unknown = "unknown",
    }
}

words! {
    /// How a VM or a bare program is on a host. `why` beside it says more, where there is more to say.
    #[derive(Default)]
    State {
        /// Its QEMU or its program starts.
        Starting = "starting",
        /// Primary: a copy follows, or none is asked for. Backup: it follows.
        Running = "running",
        /// A second copy is being made.
        Joining = "joining",
        /// Primary: nobody follows, though that is asked for.
        Alone = "alone",
        /// Primary: the policy was set to `none` for a while.
        ProtectionPaused = "protection-paused",
        /// Primary: its VM stands still until its disk has room.
        DiskFull = "disk-full",
        /// Primary: too few hosts answer, so that nothing may leave.
        QuorumLost = "quorum-lost" | "no-majority",
        /// This host runs nothing, and waits for what the group says.
        #[default]
        Waiting = "waiting",
        /// It was shut down everywhere.
        Stopped = "stopped",
        /// A bare program's copy here has ended with its daemon.
        Lost = "lost",
        /// It does not get on; `why` is the wait of docs/waits.md.
        Stalled = "stalled",
        /// A bare program has ended everywhere, and is to be begun again.
        Restarting = "restarting",
        /// It does not run here any more.
        Failed = "failed",
    }
}

words! {
    /// How the two copies of a VM are kept.
    #[derive(Default)]
    Mode {
        /// Both run on agreed inputs, and output leaves when both have said it.
        Match = "match",
        /// Both run on agreed inputs, and output leaves with a sync.
        Active = "active",
        /// The backup holds the last sync's state, and output leaves with a sync.
        Passive = "passive",
        /// There is no second copy.
        #[default]
        None = "",
    }
}

words! {
    /// What a VM's disk is for on a host.
    #[derive(Default)]
    DiskRole {
        /// Nobody writes it.
        #[default]
        Idle = "idle",
        /// The VM writes it, and nobody else has the writes.
        Alone = "alone",
        /// The VM writes it, and the backup gets the writes.
        Primary = "primary",
        /// It takes the primary's writes.
        Backup = "backup",
    }
}
