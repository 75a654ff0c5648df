//! The daemon's log as a list of events: unlike `dunlin events` it outlives the daemon.

use dunlin_api::EventKind;
use std::time::{Duration, SystemTime};

use anyhow::{Context, Result};

use super::Cluster;

/// A line of a daemon's log that is an event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Logged {
    /// When.
    pub at: SystemTime,
    /// Of which host.
    pub host: String,
    /// What, in one word.
    pub kind: EventKind,
}

impl Cluster<'_> {
    /// The events of all hosts since the testbed began, in the order of their times.
    pub fn logged(&self) -> Result<Vec<Logged>> {
        let mut all = Vec::new();
        for host in &self.hosts {
            let path = self.log(host);
            let Ok(text) = std::fs::read_to_string(&path) else {
                continue;
            };
            for line in text.lines() {
                if let Some(kind) = kind_of(line) {
                    let at = time_of(event_of(line))
                        .with_context(|| format!("{}: no time: {line}", path.display()))?;
                    all.push(Logged {
                        at,
                        host: host.clone(),
                        kind: kind.into(),
                    });
                }
            }
        }
        all.sort_by_key(|event| event.at);
        Ok(all)
    }
}

pub(super) fn kind_of(line: &str) -> Option<&str> {
    field_of(line, "kind")
}

/// Of which VM an event tells.
pub(super) fn vm_of(line: &str) -> Option<&str> {
    field_of(line, "vm")
}

/// What a person has named may stand before it: fields are at the end.
fn field_of<'line>(line: &'line str, name: &str) -> Option<&'line str> {
    let value = line.rsplit_once(&format!(" {name}=\""))?.1;
    value.split_once('"').map(|(value, _)| value)
}

/// The event that ends `line`: what the daemon prints goes to the same file, and the end of its line may come behind an event.
fn event_of(line: &str) -> &str {
    const TIME: usize = "2026-11-22T15:16:00.123456".len();
    let event = line.find("Z ").and_then(|end| line.get(end.checked_sub(TIME)?..));
    event.unwrap_or(line)
}

/// `2026-11-22T15:16:00.123456Z`, at the line's beginning.
fn time_of(line: &str) -> Option<SystemTime> {
    let (date, rest) = line.split_once('T')?;
    let (time, _) = rest.split_once('Z')?;
    let mut date = date.splitn(3, '-').map(|part| part.parse::<u64>().ok());
    let (year, month, day) = (date.next()??, date.next()??, date.next()??);
    let mut time = time.splitn(3, ':');
    let (hour, minute): (u64, u64) = (time.next()?.parse().ok()?, time.next()?.parse().ok()?);
    let second: f64 = time.next()?.parse().ok()?;
    // Years begin in March here, so that a leap day is the last one.
    let (year, month) = if month > 2 {
        (year, month - 3)
    } else {
        (year - 1, month + 9)
    };
    let days = year * 365 + year / 4 - year / 100 + year / 400 + (month * 153 + 2) / 5 + day - 1;
    let days = days.checked_sub(719_468)?;
    let seconds = (days * 24 + hour) * 3600 + minute * 60;
    Some(SystemTime::UNIX_EPOCH + Duration::from_secs(seconds) + Duration::from_secs_f64(second))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_and_the_kind_of_an_event_are_read() {
        let line =
            "2024-02-29T12:30:05.250000Z  INFO dunlin::events: this host leads vm=\"redis\" kind=\"elected\"";
        assert_eq!(kind_of(line), Some("elected"));
        let at = time_of(line)
            .unwrap()
            .duration_since(SystemTime::UNIX_EPOCH)
            .unwrap();
        assert_eq!(at.as_millis(), 1_709_209_805_250);
        let first = time_of("1970-01-01T00:00:00.000000Z x").unwrap();
        assert_eq!(first, SystemTime::UNIX_EPOCH);
        assert_eq!(kind_of("2024-02-29T12:30:05.25Z  INFO dunlin: ready"), None);
        assert_eq!(time_of("ready: T"), None);
        let torn = format!("ready: host d, control socket /d/control.sock{line}");
        assert_eq!((event_of(&torn), event_of(line)), (line, line));
    }
}
