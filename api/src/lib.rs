//! What is asked of a daemon, what it answers, and what it tells by itself: by HTTP, on the control socket, and between daemons; and the files that people write for
//! it ([`files`]).
//!
//! **Decides**: the shapes, and what their words mean. **Flow**: a [`Request`] -> [`Answer`]s, one JSON object a line; by HTTP the same types lie behind
//! addresses (docs/api.md), and the OpenAPI document is made of them. **Invariants**: 1. no state is a text to parse: a word of a closed set, and beside it a
//! reason for people. 2. what a host of another build says is taken: a field that came later has a default, and a word that is not known is kept as it is.
//! **Not here**: sockets, who may ask what, and how anything is done.
#![deny(missing_docs)]

mod answer;
mod certificate;
mod event;
mod figures;
pub mod files;
pub mod keys;
pub mod log;
mod member;
mod notify;
mod overview;
mod report;
mod request;
mod state;
mod status;
mod word;

pub use answer::{Answer, DiskStanding, ImageLife, LastLife, Note, Standing};
pub use certificate::Certificate;
pub use event::{Event, EventKind};
pub use figures::{AnswerFigures, ProgramStatus, QueueFigures, SpeculationFigures, SyncFigures};
pub use member::Member;
pub use notify::NotifyStatus;
pub use overview::{Figures, HostView, Overview, Protection, VmHost, VmView};
pub use report::{Facts, Found, Report};
pub use request::{Request, Ticket};
pub use state::{DiskRole, Mode, Role, State};
pub use status::{
    BadInput, CheckpointStatus, ComparedStatus, DiskFigures, FailoverStatus, HostStatus, JoinProblem, Pauses,
    PausesOf, PeerStatus, Progress, Reasons, SyncStatus, Verified, VerifyStatus, VmStatus, WaitStatus,
};

/// The version of the addresses: `/api/v1/...`.
pub const VERSION: &str = "v1";
