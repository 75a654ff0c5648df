//! Scenarios of bare programs, which need no VM.

use std::path::Path;
use std::time::Instant;

use anyhow::Result;
use dunlin_vmtest::program;

use super::{Scenarios, fresh_seed};

/// Names that are parts of others, and mean themselves alone.
pub(super) const ALONE: [&str; 1] = ["program"];

/// What there is.
pub(super) const LIST: [(&str, &str); 4] = [
    ("program", "--story TEXT, quick"),
    ("program-joins", "--joins N"),
    ("program-services", "--kills N --programs NAMES"),
    ("program-kills", "--kills N --seed S"),
];

/// What is for these scenarios alone.
#[derive(clap::Args)]
pub(super) struct Programs {
    /// How many copies of a running program `program-joins` makes.
    #[arg(long, default_value_t = 200)]
    joins: usize,
    /// Only the stories of `program` whose names contain this.
    #[arg(long, value_name = "TEXT")]
    story: Option<String>,
    /// Only these programs in `program-services`, separated by commas: memcached, nginx, go, node, lighttpd, mariadb, mariadb-2, postgresql,
    /// postgresql-2 (these are played if none is named), mariadb-4, -8, -16, -ring-4, -ring-16, and the same of postgresql.
    #[arg(long, value_delimiter = ',', value_name = "NAMES")]
    programs: Vec<String>,
}

impl Default for Programs {
    fn default() -> Self {
        Self {
            joins: 200,
            story: None,
            programs: Vec::new(),
        }
    }
}

/// Plays those that are wanted.
pub(super) fn play(
    arguments: &Scenarios,
    dunlin: &Path,
    tell: &mut dyn FnMut(&str, Instant, Result<String>),
) {
    let own = &arguments.program;
    if arguments.wants("program", true) {
        let begun = Instant::now();
        let outcome = program::stories(dunlin, own.story.as_deref());
        tell("program", begun, outcome.map(|told| format!(", {told} stories")));
    }
    if arguments.wants("program-joins", false) {
        let begun = Instant::now();
        let outcome = program::joins(dunlin, own.joins);
        tell("program-joins", begun, outcome.map(|told| format!(", {told}")));
    }
    if arguments.wants("program-services", false) {
        let begun = Instant::now();
        let outcome = program::services::run(dunlin, &own.programs, arguments.kills, &mut |line| {
            println!("{line}")
        });
        tell(
            "program-services",
            begun,
            outcome.map(|played| format!(", {played} programs")),
        );
    }
    if arguments.wants("program-kills", false) {
        let begun = Instant::now();
        let seed = arguments.seed.unwrap_or_else(fresh_seed);
        println!("program-kills: --seed {seed} --kills {}", arguments.kills);
        let outcome = program::random::run(dunlin, arguments.kills, seed, &mut |line| println!("{line}"));
        tell("program-kills", begun, outcome.map(|said| format!(", {said}")));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn program_means_the_stories_alone_and_other_parts_of_names_mean_all_that_have_them() {
        let wants = |named: &str, name: &str| {
            let mut arguments = Scenarios::quick();
            (arguments.quick, arguments.names) = (false, vec![named.to_owned()]);
            arguments.wants(name, false)
        };
        assert!(wants("program", "program"));
        assert!(!wants("program", "program-joins"));
        assert!(wants("program-joins", "program-joins") && !wants("program-joins", "program"));
        assert!(wants("program-", "program-joins") && wants("speculative", "speculative-deaths"));
    }
}
