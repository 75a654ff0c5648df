//! The namespaces of a bare program's copy: what it is kept from, where it prints, its data in them.
//!
//! Not here: when there is one (`copies`, `carrying`).

use super::error::{DataError, FileError, PrepareError};
use crate::config::ProgramSpec;
use dunlin_program::chance::{Seed, words};
use dunlin_program::copy::{Copy, Inside, Prints};
use dunlin_program::data::Image;
use dunlin_program::limits::Group;
use dunlin_program::message::{Mounted, Spec, Walls};
use dunlin_program::options::{self, CheckError};
use dunlin_program::printed::Printed;
use std::path::Path;

/// A file in the program's folder: it has run here.
pub(super) const RAN: &str = "ran";

/// What the copy here prints.
pub const PRINTED: &str = "program.log";

/// So that a daemon that is started again does not begin it again.
pub(super) fn note_that_it_ran(folder: &Path) -> Result<(), FileError> {
    std::fs::write(folder.join(RAN), []).map_err(FileError::of(folder))
}

/// The file for what it prints; what it printed before it was begun again stays.
pub(super) fn printed(path: &Path, again: bool) -> Result<Printed, FileError> {
    let printed = match again {
        true => Printed::go_on(path),
        false => Printed::create(path),
    };
    printed.map_err(FileError::of(path))
}

/// What the program is kept from, and so whoever runs something beside it.
pub(super) fn walls(program: &ProgramSpec) -> Result<Walls, CheckError> {
    let user = program.user.as_deref().map(options::user).transpose();
    Ok(Walls {
        user: user?,
        root: program.root.clone(),
        scratch_mib: program.scratch_mib,
        agreed_chance: None,
        agreed_clock: false,
        data: None,
        tells_tsc: false,
        clock_page: program.agreed.clock,
        chance: None,
    })
}

/// By its number: a host may have several accounts with root's.
pub(super) fn is_root(walls: &Walls) -> bool {
    walls.user.is_none_or(|(user, _)| user == 0)
}

/// Its namespaces, with its data's image in them, if it has one.
pub(super) fn prepare(
    program: &ProgramSpec,
    seed: Seed,
    printed: Result<Printed, FileError>,
    image: Option<Image>,
) -> Result<Copy, PrepareError> {
    let attached = image.map(Image::attach).transpose();
    let attached = attached.map_err(DataError::Image)?;
    let mut walls = walls(program)?;
    walls.chance = program.agreed.chance.then(|| words(seed, 1));
    walls.data = program
        .data
        .as_ref()
        .zip(attached.as_ref())
        .map(|(data, attached)| Mounted {
            device: attached.device().to_owned(),
            at: data.at.clone(),
        });
    let group = Group::make(&program.limits)?;
    let spec = Spec {
        command: program.command.clone(),
        directory: program.directory.clone(),
        environment: program.environment.clone(),
        card: program.card.clone(),
        walls: Some(walls),
    };
    let inside = Inside {
        program: "/proc/self/exe".into(),
        arguments: vec!["program".into(), "inside".into()],
    };
    let copy = Copy::prepare(
        "the program's copy",
        &inside,
        &spec,
        Prints::Kept(Some(printed?)),
        group,
        attached,
    );
    Ok(copy?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whoever_has_roots_number_is_root_whatever_its_name() {
        let of = |user| Walls {
            user,
            root: "/".into(),
            scratch_mib: 1,
            agreed_chance: None,
            agreed_clock: false,
            data: None,
            tells_tsc: false,
            clock_page: false,
            chance: None,
        };
        assert!(is_root(&of(None)), "nobody is named");
        assert!(is_root(&of(Some((0, 0)))));
        assert!(is_root(&of(Some((0, 100)))), "'toor', of another group");
        assert!(!is_root(&of(Some((65_534, 0)))));
    }
}
