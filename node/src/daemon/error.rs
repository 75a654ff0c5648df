//! What is said wherever somebody asks for what cannot be.

use dunlin_api::Answer;

/// Bad input: exit code 2.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct BadInput(pub String);

/// What takes more than lines in answer to one request.
pub fn by_control_alone() -> Answer {
    Answer::refused("this is asked by the control socket alone")
}
