//! What a running program has in memory goes to the other host before the program stands still.
//!
//! * **Decides:** when all of its memory is taken while it stands still, as without this.
//! * **Flow:** memory is read into a folder of its own, and sent -> CRIU begins, and is held -> the program stands still: CRIU takes all but its
//!   memory, which is compared meanwhile -> what differs is taken.
//! * **Invariants:** 1. what goes wrong here while the program runs costs no join: it is taken whole then, and that is told; so is what goes
//!   wrong in CRIU afterwards, unless it was killed; 2. what is below the images was sent.
//! * **Not here:** how (`dunlin_program::guard`); the rest of a join (`carrying`).

use dunlin_program::guard::{
    Ahead, Criu, GuardError, Held, Left, Place, Still, Unchanged, Undumped, compose,
};
use std::fs;
use std::path::Path;

/// In the folder that all is carried in.
pub(super) const FOLDER: &str = "ahead";

/// Before the program stands still.
pub(super) enum Prepared {
    /// Its memory has been read, and CRIU is held.
    Ahead(Ahead, Box<Held>),
    /// It is to be taken whole, for that reason.
    Whole(String),
}

/// The program stands still, and CRIU has ended.
pub(super) enum Dumped {
    /// Some of its memory may be still as it was sent.
    Ahead {
        still: Still,
        unchanged: Unchanged,
        /// The kernel notices who writes to it as long as it is there.
        _kept: Ahead,
    },
    /// All is in the images.
    Whole(String),
}

/// How its memory was taken.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum How {
    /// In part before it stood still.
    Ahead(Left),
    /// While it stood still, for that reason.
    Whole(String),
}

/// What a program's standing still came to.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Stood {
    /// How its memory was taken.
    pub how: How,
    /// From before its first process was stopped until after its last one was let run.
    pub for_us: u64,
}

impl std::fmt::Display for Stood {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
        write!(f, "it stood still for {:.0} ms, ", self.for_us as f64 / 1e3)?;
        match &self.how {
            How::Ahead(left) => write!(
                f,
                "{:.1} MiB of its memory had gone ahead, {:.1} MiB were taken then",
                mib(left.below_bytes),
                mib(left.taken_bytes)
            )
            .and_then(|()| match left.compared_bytes {
                0 => Ok(()),
                bytes => write!(f, ", {:.1} MiB were compared", mib(bytes)),
            }),
            How::Whole(why) => write!(f, "its memory was taken whole then: {why}"),
        }
    }
}

impl Prepared {
    pub(super) fn of(criu: &Criu, place: &Place, folder: &Path) -> Self {
        let ahead = place.go_ahead(&folder.join(FOLDER));
        let prepared = ahead.and_then(|ahead| Ok(Self::Ahead(ahead, Box::new(criu.hold(place, folder)?))));
        prepared.unwrap_or_else(|why| Self::Whole(why.to_string()))
    }

    /// What is to be sent of it.
    pub(super) fn folder(&self) -> Option<&Path> {
        match self {
            Self::Ahead(ahead, _) => Some(ahead.folder()),
            Self::Whole(_) => None,
        }
    }
}

/// Has the program stand still, and takes all that is not its memory; where that fails, all.
pub(super) fn dump(
    criu: &Criu,
    prepared: Prepared,
    place: &Place,
    folder: &Path,
) -> Result<Dumped, GuardError> {
    let why = match prepared {
        Prepared::Ahead(ahead, held) => {
            // A program that does not stand still is not taken at all.
            let still = held.stop(place)?;
            match beside(&ahead, *held, &still) {
                Ok(unchanged) => {
                    return Ok(Dumped::Ahead {
                        still,
                        unchanged,
                        _kept: ahead,
                    });
                }
                // Its processes may be in CRIU's code, and leave it when they run: a second try would take that for theirs.
                Err(Undumped {
                    why,
                    in_the_middle: true,
                }) => return Err(why),
                Err(undumped) => undumped.why.to_string(),
            }
        }
        Prepared::Whole(why) => why,
    };
    // What the first try has left would be taken for a part of the second one.
    let _ = fs::remove_dir_all(folder.join("images"));
    criu.dump(place, folder)?;
    Ok(Dumped::Whole(why))
}

/// CRIU's work is not on the memory that is compared.
fn beside(ahead: &Ahead, held: Held, still: &Still) -> Result<Unchanged, Undumped> {
    std::thread::scope(|scope| {
        let comparing = scope.spawn(|| ahead.compare(still));
        let dumped = held.dump();
        let compared = comparing.join();
        dumped?;
        let ended = || GuardError::of("the memory that went ahead", &"its comparison has ended");
        compared.unwrap_or_else(|_| Err(ended())).map_err(|why| Undumped {
            why,
            in_the_middle: false,
        })
    })
}

impl Dumped {
    /// Takes what is left. The program stands still.
    pub(super) fn finish(&self, folder: &Path) -> Result<How, GuardError> {
        match self {
            Self::Ahead { still, unchanged, .. } => compose(still, unchanged, folder).map(How::Ahead),
            Self::Whole(why) => Ok(How::Whole(why.clone())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_left_is_told_or_why_all_was() {
        let left = Left {
            below_bytes: 100 << 20,
            taken_bytes: 3 << 19,
            compared_bytes: 0,
        };
        let stood = |how| Stood { how, for_us: 41_700 }.to_string();
        assert_eq!(
            stood(How::Ahead(left)),
            "it stood still for 42 ms, 100.0 MiB of its memory had gone ahead, 1.5 MiB were taken then"
        );
        let compared_bytes = 101 << 20;
        let told = stood(How::Ahead(Left {
            compared_bytes,
            ..left
        }));
        assert!(
            told.ends_with("were taken then, 101.0 MiB were compared"),
            "{told}"
        );
        assert_eq!(
            stood(How::Whole("no room".to_owned())),
            "it stood still for 42 ms, its memory was taken whole then: no room"
        );
    }
}
