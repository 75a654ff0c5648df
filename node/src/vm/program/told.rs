//! What threads tell the loop of a bare program: of a copy that is carried, of images, of what is to be run beside a copy.

use super::ahead::Stood;
use super::error::DataError;
use crate::vm::state::cold::AskError;
use bytes::Bytes;
use dunlin_api::Standing;
use dunlin_core::agreed::AgreedTime;
use dunlin_core::units::{Epoch, Index, ReplicaId};
use dunlin_program::answers::Answers;
use dunlin_program::copy::Copy;
use dunlin_program::data::mark::Mark;
use dunlin_program::source::Source;
use dunlin_program::visit::{Order, Rooms};
use std::sync::Arc;
use std::time::Duration;

/// How far it is.
#[derive(Debug)]
pub enum JoinStep {
    /// The other host has made room.
    RoomIsMade,
    /// The program is dumped, and stands still.
    Stands,
    /// It runs on.
    RunsOn(Stood),
    /// The copy runs on the other host.
    Loaded {
        /// How much was sent.
        bytes: u64,
    },
    /// The program was stopped, and cannot be let run.
    StandsStill(String),
    /// It cannot be.
    Failed(String),
}

/// A copy that was brought here, and runs.
pub struct Brought {
    /// It.
    pub copy: Copy,
    /// The newest entry whose inputs it has read.
    pub applied: Index,
    /// The epoch that it ended.
    pub epoch: Epoch,
    /// The connections that do not speak its own numbers.
    pub connections: Bytes,
    /// The order's own table.
    pub order: Bytes,
    /// Inputs that were unread together were read in another order once.
    pub one_at_a_time: bool,
    /// What time it is for it.
    pub time: AgreedTime,
    /// What answers its threads, where its chance is agreed.
    pub answers: Option<(Answers, Arc<Source>)>,
    /// How long the restore took.
    pub took: Duration,
}

/// What `dunlin exec` needs of a copy.
pub struct Visited {
    /// The copy's namespaces.
    pub rooms: Rooms,
    /// What is to run.
    pub order: Order,
    /// The copy's part.
    pub role: &'static str,
    /// It runs as root, who may read all that its host has.
    pub is_root: bool,
}

/// What was found.
pub struct Found {
    /// Of the image here.
    pub(in crate::vm) own: Result<Option<Mark>, DataError>,
    pub(in crate::vm) others: Vec<(ReplicaId, Result<Standing, AskError>)>,
}
