//! The table of scenarios, a row a story, by what happens in it.

mod away;
mod deaths;
mod disks;
mod guests;
mod keys;
mod ordered;

use super::{Action, Action::*, Scenario};

/// Every scenario.
pub fn all() -> Vec<Scenario> {
    [
        deaths::all(),
        ordered::all(),
        away::all(),
        disks::all(),
        guests::all(),
        keys::all(),
    ]
    .concat()
}

/// Clients have got on.
const ANSWERS: Action = AwaitAnswers(100);

const THERE_AND_BACK: [Action; 9] = [
    AwaitProtected,
    ANSWERS,
    KillPrimary,
    ANSWERS,
    Restart,
    AwaitProtected,
    ANSWERS,
    KillPrimary,
    ANSWERS,
];
