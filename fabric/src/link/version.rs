//! What it decides: in which version of the protocol two hosts speak.
//!
//! **Flow**: `handshake` greets with [`Versions`] -> [`Versions::common`] -> the highest version that both have.
//!
//! **Invariants**: 1. a build that has only one version, and says no range (2, [`GREETING_SINCE`]), reads our greeting as its own, and is answered as
//! by its equal. 2. the range is part of what both ends prove that they have said (`handshake`): where links are authenticated, nobody
//! between two hosts makes them speak an older version.
//!
//! **Trap**: a build of version 2 refuses every greeting that does not say 2, has no room for more, and logs each refusal. So the
//! greeting names the *oldest* version of the range where 2 had its only one, and the newest stands in the nonce, of which 22 bytes stay
//! random. By chance a nonce of version 2 says a range once in 2^64 connections; that connection fails, and the next one stands.
//!
//! **Not here**: what an entry of the agreed log may say while hosts differ (docs/upgrade.md).

use std::fmt;

/// The newest version of everything that hosts say to each other.
pub const PROTOCOL_VERSION: u16 = 7;

/// The oldest version that this build still speaks, with hosts that have nothing newer.
pub const OLDEST_PROTOCOL: u16 = 2;

/// Since this version the greeting has its length and its fields.
pub(super) const GREETING_SINCE: u16 = 2;

/// Since this version what both prove covers the version that was chosen, and each end says which build it is.
pub(super) const BUILD_SINCE: u16 = 3;

/// In a nonce: the newest version follows.
const MARK: &[u8; 8] = b"versions";
/// Bytes of a nonce that are random.
const RANDOM: usize = 22;

/// The versions of the protocol that a build speaks, without a gap.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Versions {
    /// The oldest one.
    pub oldest: u16,
    /// The newest one, not older than the oldest.
    pub newest: u16,
}

impl Versions {
    /// This build's.
    pub const OURS: Self = Self {
        oldest: OLDEST_PROTOCOL,
        newest: PROTOCOL_VERSION,
    };

    /// A build that speaks one version.
    #[must_use]
    pub fn only(version: u16) -> Self {
        Self {
            oldest: version,
            newest: version,
        }
    }

    /// Whether it is one of them.
    #[must_use]
    pub fn has(self, version: u16) -> bool {
        (self.oldest..=self.newest).contains(&version)
    }

    /// The highest version that both have; none if they have none in common.
    #[must_use]
    pub fn common(self, other: Self) -> Option<u16> {
        let highest = self.newest.min(other.newest);
        (highest >= self.oldest.max(other.oldest)).then_some(highest)
    }

    /// The one of these versions that is nearest to the other's: what a host without a common version is told.
    pub(super) fn nearest_to(self, other: Self) -> u16 {
        if other.newest < self.oldest {
            self.oldest
        } else {
            self.newest
        }
    }

    /// Writes the range into a nonce that is random so far.
    pub(super) fn mark(self, nonce: &mut [u8; 32]) {
        nonce[RANDOM..RANDOM + MARK.len()].copy_from_slice(MARK);
        nonce[RANDOM + MARK.len()..].copy_from_slice(&self.newest.to_be_bytes());
    }

    /// What a greeting says: its version, and the range if its nonce has one. The second is false for a build that knows no ranges.
    pub(super) fn said(version: u16, nonce: &[u8; 32]) -> (Self, bool) {
        let newest = u16::from_be_bytes([nonce[30], nonce[31]]);
        let marked = &nonce[RANDOM..RANDOM + MARK.len()] == MARK && newest >= version;
        let newest = if marked { newest } else { version };
        (
            Self {
                oldest: version,
                newest,
            },
            marked,
        )
    }
}

impl fmt::Display for Versions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.oldest == self.newest {
            write!(f, "version {}", self.oldest)
        } else {
            write!(f, "versions {} to {}", self.oldest, self.newest)
        }
    }
}

/// What two hosts found out of each other when a link began.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Spoken {
    /// The version in which they speak.
    pub version: u16,
    /// The peer's build, as it calls itself; none from builds that do not say it (version 2).
    pub build: Option<String>,
}

impl Spoken {
    /// Of a link without a handshake: within one build.
    pub(super) fn within_this_build() -> Self {
        Self {
            version: PROTOCOL_VERSION,
            build: None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(oldest: u16, newest: u16) -> Versions {
        Versions { oldest, newest }
    }

    #[test]
    fn the_highest_common_version_is_spoken() {
        for (one, other, common) in [
            (range(2, 3), range(2, 3), Some(3)),
            (range(2, 3), range(2, 2), Some(2)),
            (range(2, 3), range(3, 4), Some(3)),
            (range(2, 5), range(3, 4), Some(4)),
            (range(2, 3), range(4, 5), None),
            (range(3, 3), range(2, 2), None),
        ] {
            assert_eq!(one.common(other), common, "{one} with {other}");
            assert_eq!(other.common(one), common, "{other} with {one}");
        }
    }

    #[test]
    fn who_has_nothing_in_common_is_told_the_nearest() {
        assert_eq!(range(4, 6).nearest_to(range(2, 3)), 4);
        assert_eq!(range(2, 3).nearest_to(range(4, 6)), 3);
    }

    #[test]
    fn a_greeting_says_its_range_and_an_old_one_says_none() {
        let mut nonce = [0x5a; 32];
        assert_eq!(Versions::said(2, &nonce), (Versions::only(2), false));
        range(2, 7).mark(&mut nonce);
        assert_eq!(Versions::said(2, &nonce), (range(2, 7), true));
        assert_eq!(nonce[..RANDOM], [0x5a; RANDOM], "these stay random");
        // A range that ends before it begins is none.
        assert_eq!(Versions::said(9, &nonce), (Versions::only(9), false));
    }
}
