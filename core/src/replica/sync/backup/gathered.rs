//! Where a sync is gathered on the backup, and what it is when it is whole. What is done with it: `staged`.

use super::{Epoch, Mode, Setup, Staged, Staging};

/// Where the sync that ends `epoch` is gathered.
pub(super) fn staging_of<'a>(
    staging: &'a mut Option<Staging>,
    setup: &Setup,
    epoch: Epoch,
) -> &'a mut Staging {
    staging.get_or_insert_with(|| Staging::new(epoch, setup.pages, setup.staging_bytes))
}

/// A sync that lies here whole.
#[derive(Debug)]
pub(super) struct Whole {
    pub(super) staged: Staged,
    pub(super) next: Mode,
    pub(super) audit: Option<u128>,
    pub(super) joining: bool,
}
