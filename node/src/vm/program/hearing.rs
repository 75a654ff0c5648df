//! What the other host says on a session's stream while a copy, or its data, is carried.

use super::error::HeardError;
use crate::vm::session::link::Ends;
use crossbeam_channel::RecvTimeoutError;
use dunlin_core::wire::sync::SyncMessage;
use std::time::Duration;

pub(super) fn heard(link: &Ends, within: Duration) -> Result<SyncMessage, HeardError> {
    match link.incoming.recv_timeout(within) {
        Ok(Ok(SyncMessage::Refused { why })) => Err(HeardError::Refused(why)),
        Ok(Ok(message)) => Ok(message),
        Ok(Err(error)) => Err(error.into()),
        Err(RecvTimeoutError::Timeout) => Err(HeardError::Silent(within)),
        Err(RecvTimeoutError::Disconnected) => Err(HeardError::Ended),
    }
}

pub(super) fn unexpected(message: &SyncMessage) -> HeardError {
    HeardError::Unexpected(message.name())
}
