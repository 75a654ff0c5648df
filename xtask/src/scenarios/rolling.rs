//! The stories with two builds of dunlin, by name alone: the older build takes some minutes.

use std::time::Instant;

use anyhow::Result;
use dunlin_vmtest::scenario::{World, rolling};

use super::Scenarios;
use crate::earlier;

/// The last commit whose builds speak protocol 2 and nothing else.
const OF_PROTOCOL_2: &str = "fa32a56ccc9ab53ce02df4af264cc955ce9e9e00";

/// From which build hosts are upgraded.
#[derive(clap::Args)]
pub struct From {
    /// The commit whose build the hosts run first in `rolling-upgrade`. Without it: the last commit of protocol 2.
    #[arg(long, default_value = OF_PROTOCOL_2, value_name = "COMMIT")]
    from: String,
}

impl Default for From {
    fn default() -> Self {
        Self {
            from: OF_PROTOCOL_2.to_owned(),
        }
    }
}

/// The stories that are asked for by name.
fn chosen(arguments: &Scenarios) -> impl Iterator<Item = rolling::Story> {
    let by_name = |story: &rolling::Story| !arguments.names.is_empty() && arguments.wants(story.0, false);
    rolling::STORIES.into_iter().filter(by_name)
}

/// Builds what they need, before this commit's build, which is to be the last one in the target folder.
pub fn prepare(arguments: &Scenarios) -> Result<()> {
    match chosen(arguments).next() {
        Some(_) => earlier::dunlin(&arguments.rolling.from).map(drop),
        None => Ok(()),
    }
}

/// Plays them.
pub fn play(arguments: &Scenarios, world: &World, tell: &mut dyn FnMut(&str, Instant, Result<String>)) {
    for story in chosen(arguments) {
        let begun = Instant::now();
        let outcome = earlier::dunlin(&arguments.rolling.from)
            .and_then(|older| rolling::run(world, &older, story))
            .map(|outcome| {
                format!(
                    ", protocols {} and {}: {} hosts exchanged, {} kills, {} acknowledged, 0 lost, worst gap {} ms",
                    outcome.protocols[0],
                    outcome.protocols[1],
                    outcome.exchanges,
                    outcome.kills,
                    outcome.acknowledged,
                    outcome.worst_gap_us / 1000
                )
            });
        tell(story.0, begun, outcome);
    }
}
