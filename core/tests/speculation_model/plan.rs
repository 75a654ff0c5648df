//! What a random conversation is made of, and what was seen of it.

use dunlin_core::speculation::Limits;

/// Put back on purpose, to see that the checks find it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Broken {
    /// An epoch is released when it ends.
    ReleasesEarly,
    /// The backup's checkpoint of connections is one older than its VM.
    OlderState,
    /// Handshakes in progress and connections do not travel.
    ForgetsAll,
    /// The backup's VM runs although connections are ahead of their clients.
    RunsTooSoon,
    /// What a held connection's clock is ahead of the VM's is added nowhere.
    LiftsNothing,
}

#[derive(Clone, Debug)]
pub struct Plan {
    pub seed: u64,
    pub clients: usize,
    pub loss_percent: u8,
    /// On the way into the VM, and out of it.
    pub vm_loss_percent: u8,
    pub kills: Vec<u64>,
    pub stamps: bool,
    pub sack: bool,
    pub scale: Option<u8>,
    pub mss: u16,
    pub epoch_us: u64,
    /// From the end of an epoch to its release.
    pub safe_us: u64,
    pub download: u64,
    pub upload: u64,
    /// A client reads so often.
    pub read_us: u64,
    /// The VM opens connections, too.
    pub vm_opens: bool,
    /// All connections are given back then, as soon as that can be.
    pub drain_us: Option<u64>,
    /// What may be kept of all connections together.
    pub budget: Option<usize>,
    /// One that was given back does not come back before that.
    pub again_us: u64,
    /// Then another mode is wished for: one in which the backup's VM runs, or the passive one.
    pub modes: Vec<u64>,
    pub broken: Option<Broken>,
}

#[derive(Clone, Debug, Default)]
pub struct Seen {
    pub begun: u64,
    pub take_overs: u64,
    pub to_clients: u64,
    pub bytes: u64,
    pub ahead: u64,
    pub most_outstanding: usize,
    /// How often the backup's VM began to run, and took over while it did.
    pub runs: u64,
    pub take_overs_of_running: u64,
    pub ended_us: u64,
}

impl Plan {
    /// Modes change: the translation of numbers is behind speculation.
    pub fn translated(&self) -> bool {
        !self.modes.is_empty()
    }
}

pub(super) fn limits(plan: &Plan) -> Limits {
    let all = Limits::default();
    Limits {
        window_bytes: 64 << 10,
        total_bytes: plan.budget.unwrap_or(all.total_bytes),
        again_us: plan.again_us,
        ahead_bytes: 200 + (plan.seed % 4000) as u32,
        translated: plan.translated(),
        ..all
    }
}
