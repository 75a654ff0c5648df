//! A client that uploads: one connection, SET after SET of large values, each answer checked, the last value read back.
//!
//! Each value is made of its own number, so that a value of another round, or a mixture of two, is told from the right one.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use super::resp::{Answer, Connection};

/// Bytes of one value.
pub const VALUE_BYTES: usize = 1 << 20;
const KEY: &str = "dunlin:upload";

/// One connection to a redis.
pub struct Upload {
    connection: Connection,
    give_up: Duration,
    number: u64,
    /// The longest time between a value's first byte and its answer.
    pub longest: Duration,
}

impl Upload {
    /// Connects; no answer may take longer than `give_up`.
    pub fn open(to: SocketAddr, give_up: Duration) -> Result<Self> {
        let connection = Connection::open(to, give_up).with_context(|| format!("connecting to {to}"))?;
        connection.set_write_timeout(give_up)?;
        Ok(Self {
            connection,
            give_up,
            number: 0,
            longest: Duration::ZERO,
        })
    }

    /// One more value.
    pub fn put(&mut self) -> Result<()> {
        self.number += 1;
        let (value, begun) = (value(self.number), Instant::now());
        let answer = self.connection.ask(&["SET", KEY, &value], self.give_up);
        let answer = answer.with_context(|| format!("value {} of {VALUE_BYTES} bytes", self.number))?;
        ensure!(
            answer == Answer::Status("OK".into()),
            "value {} was answered by {answer:?}",
            self.number
        );
        self.longest = self.longest.max(begun.elapsed());
        Ok(())
    }

    /// The service holds the value that was acknowledged last.
    pub fn check(&mut self) -> Result<()> {
        let answer = self.connection.ask(&["GET", KEY], self.give_up)?;
        let wanted = value(self.number);
        ensure!(
            answer == Answer::Bulk(Some(wanted.into_bytes())),
            "value {} was acknowledged, and something else is there",
            self.number
        );
        Ok(())
    }

    /// Bytes that were acknowledged.
    pub fn bytes(&self) -> u64 {
        self.number * VALUE_BYTES as u64
    }
}

fn value(number: u64) -> String {
    format!("{number:016x}").repeat(VALUE_BYTES / 16)
}

#[cfg(test)]
mod tests {
    use super::{VALUE_BYTES, value};

    #[test]
    fn values_are_full_and_differ_everywhere() {
        let (one, two) = (value(1), value(2));
        assert_eq!((one.len(), two.len()), (VALUE_BYTES, VALUE_BYTES));
        assert!(
            one.as_bytes()
                .chunks(16)
                .zip(two.as_bytes().chunks(16))
                .all(|(a, b)| a != b)
        );
    }
}
