//! How many files the daemon may hold open: as many as under the package's unit, however it was started.
//!
//! A shell, and many a service manager, begins what it starts with 1,024, though the daemon may take more: a few programs of many processes, each of which
//! listens for a copy's threads, take that.
//!
//! Source: getrlimit(2). Not here: what takes them.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// `LimitNOFILE` of the package's unit. No more: what the daemon starts begins with it too, and some programs look through all that they may have.
const WANTED: u64 = 65_536;

/// Lets this process have them, as far as it may.
pub fn as_many_as_wanted() {
    let Some(more) = raised(&getrlimit(Resource::Nofile)) else {
        return;
    };
    if let Err(error) = setrlimit(Resource::Nofile, more) {
        tracing::warn!("the daemon's limit of open files: {error}");
    }
}

fn raised(has: &Rlimit) -> Option<Rlimit> {
    let most = has.maximum.map_or(WANTED, |most| most.min(WANTED));
    // None is no limit.
    (most > has.current?).then_some(Rlimit {
        current: Some(most),
        maximum: has.maximum,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_is_raised_as_far_as_it_may_be_and_never_lowered() {
        let to = |current, maximum| raised(&Rlimit { current, maximum }).and_then(|limit| limit.current);
        assert_eq!(to(Some(1024), Some(524_288)), Some(WANTED));
        assert_eq!(to(Some(1024), None), Some(WANTED));
        assert_eq!(to(Some(1024), Some(4096)), Some(4096));
        assert_eq!(to(Some(4096), Some(4096)), None);
        assert_eq!(to(Some(100_000), Some(524_288)), None);
        assert_eq!(to(None, None), None);
    }
}
