//! What a copy has written lies in layers, one over each file system of its host. The other host may have mounted others.
//!
//! Decides:    in which layer here what the other copy had written belongs.
//! Flow:       `Layers::of` a vacated copy -> what the other one had written is unpacked -> `settle`.
//! Invariants: 1. no link of the program's is followed: folders are opened one by one, below descriptors; 2. what the other host calls a layer leads
//!             nowhere but into the view, and no two names mean one place.
//! Source:     Linux, Documentation/filesystems/overlayfs.rst: what an upper folder may hold. Not here: the overlays (`inside::view`).

use rustix::fs::{
    AtFlags, Dir, FileType, Gid, Mode, OFlags, RenameFlags, Timespec, Timestamps, Uid, XattrFlags, fchmod,
    fchown, fgetxattr, fsetxattr, fstat, futimens, mkdirat, openat, renameat, renameat_with, statat,
    unlinkat,
};
use rustix::io::Errno;
use std::collections::BTreeSet;
use std::ffi::{CStr, OsStr, OsString};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

/// The layer over the root; that of `var/lib` is `u|var|lib`.
const ROOT: &str = "u0";
/// A folder with this mark shows nothing of what lies below it.
const OPAQUE: &CStr = c"trusted.overlay.opaque";

/// The folder of what is written over what is mounted at that place of a view.
#[must_use]
pub fn name_of(place: &Path) -> OsString {
    if place.as_os_str().is_empty() {
        return ROOT.into();
    }
    let mut name = b"u|".to_vec();
    for byte in place.as_os_str().as_bytes() {
        match byte {
            b'/' => name.push(b'|'),
            b'|' => name.extend(b"%7c"),
            b'%' => name.extend(b"%25"),
            byte => name.push(*byte),
        }
    }
    OsString::from_vec(name)
}

/// Nothing of what is no layer, and of the numbered layers of earlier builds.
#[must_use]
pub fn place_of(name: &OsStr) -> Option<PathBuf> {
    if name == ROOT {
        return Some(PathBuf::new());
    }
    let layer = name.as_bytes().strip_prefix(b"u|")?;
    let words = || layer.split(|byte| *byte == b'|');
    // Invariant 2.
    if words().any(|word| matches!(word, b"" | b"." | b"..")) {
        return None;
    }
    let steps = words().map(|word| {
        let mut plain = Vec::new();
        let mut rest = word;
        while let Some((first, others)) = rest.split_first() {
            let (byte, others) = match rest.get(..3) {
                Some(b"%7c") => (b'|', &rest[3..]),
                Some(b"%25") => (b'%', &rest[3..]),
                _ => (*first, others),
            };
            plain.push(byte);
            rest = others;
        }
        OsString::from_vec(plain)
    });
    let place: PathBuf = steps.collect();
    (name_of(&place) == name).then_some(place)
}

/// The layers of a copy, by what they are over.
pub(super) struct Layers(BTreeSet<PathBuf>);

impl Layers {
    /// Those that there are now.
    pub(super) fn of(written: BorrowedFd<'_>) -> io::Result<Self> {
        let names = names(written)?.into_iter();
        Ok(Self(names.filter_map(|name| place_of(&name)).collect()))
    }

    /// Into these layers, what lies in others, or in one of these though another is over it.
    pub(super) fn settle(&self, written: BorrowedFd<'_>) -> io::Result<()> {
        let is_of_earlier = |name: &OsString| name.as_bytes().starts_with(b"u") && place_of(name).is_none();
        for name in names(written)?.iter().filter(|name| is_of_earlier(name)) {
            if !names(folder(written, name)?.as_fd())?.is_empty() {
                let why = "the other host's build does not say where files were written over its mounts: upgrade it first";
                return Err(io::Error::other(why));
            }
        }
        let loaded = Self::of(written)?;
        // The deepest first: what goes up may go on.
        for place in loaded.0.iter().rev().filter(|place| !self.0.contains(*place)) {
            let from = folder(written, &name_of(place))?;
            let (above, rest) = self.above(place);
            let to = below(folder(written, &name_of(above))?, rest, Some(from.as_fd()))?;
            if let Some(to) = to {
                merge(from.as_fd(), to.as_fd())?;
            }
        }
        // The shallowest first: what goes down may go on.
        for place in self.0.iter().filter(|place| !place.as_os_str().is_empty()) {
            let (above, rest) = self.above(place);
            let from = below(folder(written, &name_of(above))?, rest, None)?;
            if let Some(from) = from {
                merge(from.as_fd(), folder(written, &name_of(place))?.as_fd())?;
            }
        }
        Ok(())
    }

    /// The nearest of these above a place, and the way from there.
    fn above<'p>(&'p self, place: &'p Path) -> (&'p Path, &'p Path) {
        let mut ways = place.ancestors().skip(1);
        let above = ways.find(|way| self.0.contains(*way)).unwrap_or(Path::new(""));
        (above, place.strip_prefix(above).unwrap_or(place))
    }
}

fn names(folder: BorrowedFd<'_>) -> io::Result<Vec<OsString>> {
    let mut names = Vec::new();
    for entry in Dir::read_from(folder)? {
        let entry = entry?;
        let name = OsStr::from_bytes(entry.file_name().to_bytes());
        if name != "." && name != ".." {
            names.push(name.to_owned());
        }
    }
    Ok(names)
}

fn folder(at: impl AsFd, name: &OsStr) -> Result<OwnedFd, Errno> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    openat(at, name, flags, Mode::empty())
}

/// The folder at the end of a way; nothing where the way leads to none. With `like` folders that are missing are made, like that one.
fn below(mut at: OwnedFd, way: &Path, like: Option<BorrowedFd<'_>>) -> io::Result<Option<OwnedFd>> {
    for name in way {
        at = match (folder(&at, name), like) {
            (Ok(next), _) => next,
            (Err(Errno::NOENT), Some(like)) => {
                mkdirat(&at, name, Mode::RWXU)?;
                let made = folder(&at, name)?;
                resemble(like, made.as_fd())?;
                made
            }
            (Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP), _) => return Ok(None),
            (Err(error), _) => return Err(error.into()),
        };
    }
    Ok(Some(at))
}

/// Moves all that is in a folder into another one.
fn merge(from: BorrowedFd<'_>, to: BorrowedFd<'_>) -> io::Result<()> {
    for name in names(from)? {
        match renameat_with(from, &name, to, &name, RenameFlags::NOREPLACE) {
            Ok(()) => {}
            Err(Errno::EXIST) if is_folder(from, &name)? && is_folder(to, &name)? => {
                let (inner, other) = (folder(from, &name)?, folder(to, &name)?);
                merge(inner.as_fd(), other.as_fd())?;
                resemble(inner.as_fd(), other.as_fd())?;
                unlinkat(from, &name, AtFlags::REMOVEDIR)?;
            }
            Err(Errno::EXIST) => renameat(from, &name, to, &name)?,
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

fn is_folder(at: BorrowedFd<'_>, name: &OsStr) -> Result<bool, Errno> {
    let about = statat(at, name, AtFlags::SYMLINK_NOFOLLOW)?;
    Ok(FileType::from_raw_mode(about.st_mode) == FileType::Directory)
}

/// Owner, rights, times, and whether it hides what lies below.
fn resemble(one: BorrowedFd<'_>, other: BorrowedFd<'_>) -> io::Result<()> {
    let about = fstat(one)?;
    fchown(
        other,
        Some(Uid::from_raw(about.st_uid)),
        Some(Gid::from_raw(about.st_gid)),
    )?;
    fchmod(other, Mode::from_raw_mode(about.st_mode))?;
    let mut mark = [0; 4];
    if let Ok(bytes) = fgetxattr(one, OPAQUE, &mut mark) {
        fsetxattr(other, OPAQUE, &mark[..bytes], XattrFlags::empty())?;
    }
    let times = Timestamps {
        last_access: Timespec {
            tv_sec: about.st_atime,
            tv_nsec: about.st_atime_nsec as _,
        },
        last_modification: Timespec {
            tv_sec: about.st_mtime,
            tv_nsec: about.st_mtime_nsec as _,
        },
    };
    Ok(futimens(other, &times)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn a_layer_is_named_by_its_place() {
        for (place, name) in [
            ("", "u0"),
            ("var/lib", "u|var|lib"),
            ("srv/a|b/50%", "u|srv|a%7cb|50%25"),
        ] {
            assert_eq!(name_of(Path::new(place)), name);
            assert_eq!(place_of(OsStr::new(name)), Some(PathBuf::from(place)));
        }
        for other in ["w0", "u", "u3", "root"] {
            assert_eq!(place_of(OsStr::new(other)), None, "{other}");
        }
        // Names that no build gives: out of the view, or another name of a place.
        for other in ["u|..|etc", "u|srv|..", "u|.", "u|", "u|a||b", "u|a|", "u|a%b"] {
            assert_eq!(place_of(OsStr::new(other)), None, "{other}");
        }
    }

    /// Files with their texts, as paths below the folder of layers.
    fn found(folder: &Path) -> Vec<(String, String)> {
        let mut found = Vec::new();
        let mut todo = vec![folder.to_owned()];
        while let Some(next) = todo.pop() {
            for entry in fs::read_dir(next).expect("a folder").flatten() {
                match entry.file_type().expect("its kind").is_dir() {
                    true => todo.push(entry.path()),
                    false => {
                        let path = entry.path();
                        let text = fs::read_to_string(&path).unwrap_or_default();
                        let short = path
                            .strip_prefix(folder)
                            .expect("it is below")
                            .display()
                            .to_string();
                        found.push((short, text));
                    }
                }
            }
        }
        found.sort();
        found
    }

    #[test]
    fn what_the_other_host_has_elsewhere_goes_to_where_it_is_seen() {
        let folder = tempfile::tempdir().expect("a folder");
        let at = |path: &str| folder.path().join(path);
        // Here /srv and /var/log are mounted; /var/lib is not, as it is there.
        for own in ["u0/var", "u|srv", "u|var|log", "w0"] {
            fs::create_dir_all(at(own)).expect("a layer");
        }
        let opened = fs::File::open(folder.path()).expect("it");
        let own = Layers::of(opened.as_fd()).expect("layers");
        for (path, text) in [
            ("u0/etc/kept", "etc"),
            ("u0/srv/deep/data", "srv"),
            ("u0/var/log/syslog", "log"),
            ("u|var|lib/app/state", "lib"),
            ("u|var|lib|app|run/pid", "run"),
        ] {
            let path = at(path);
            fs::create_dir_all(path.parent().expect("it has one")).expect("a folder");
            fs::write(path, text).expect("a file");
        }
        // What a program has put there leads nowhere.
        std::os::unix::fs::symlink("/etc", at("u0/var/spool")).expect("a link");
        fs::create_dir_all(at("u|var|spool|mail")).expect("a layer");
        fs::write(at("u|var|spool|mail/passwd"), "none of the host's").expect("a file");
        own.settle(opened.as_fd()).expect("settled");
        let found = found(folder.path());
        let found: Vec<(&str, &str)> = found.iter().map(|(path, text)| (&**path, &**text)).collect();
        let expected = [
            ("u0/etc/kept", "etc"),
            ("u0/var/lib/app/run/pid", "run"),
            ("u0/var/lib/app/state", "lib"),
            ("u0/var/spool", ""),
            ("u|srv/deep/data", "srv"),
            ("u|var|log/syslog", "log"),
            ("u|var|spool|mail/passwd", "none of the host's"),
        ];
        assert_eq!(found, expected);
    }

    #[test]
    fn what_an_earlier_build_wrote_over_a_mount_is_refused_and_not_lost() {
        let written = tempfile::tempdir().expect("a folder");
        fs::create_dir(written.path().join("u0")).expect("a layer");
        let opened = fs::File::open(written.path()).expect("it");
        let own = Layers::of(opened.as_fd()).expect("layers");
        fs::create_dir(written.path().join("u7")).expect("a layer");
        own.settle(opened.as_fd()).expect("nothing was written there");
        fs::write(written.path().join("u7/state"), "").expect("a file");
        let why = own.settle(opened.as_fd()).expect_err("it is not known where");
        assert!(why.to_string().contains("upgrade it first"), "{why}");
    }
}
