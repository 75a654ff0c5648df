//! Which build this program is.

/// The commit that this was built of, where whoever built it for others to install has said so.
pub const COMMIT: Option<&str> = option_env!("DUNLIN_COMMIT");

/// What other hosts and people are told: the version, and of a package the first letters of its commit.
pub fn name() -> String {
    let version = env!("CARGO_PKG_VERSION");
    match COMMIT {
        Some(commit) => format!("{version} ({})", commit.get(..12).unwrap_or(commit)),
        None => version.to_owned(),
    }
}
