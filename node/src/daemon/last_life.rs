//! Whose disks a VM begins with that is started again after its end.
//!
//! * **Decides:** on which host it boots: where its disks are the newest; or that a person has to say so.
//! * **Flow:** a VM ends here -> [`note`], beside the state folder's other files, before what was known of the VM goes -> `dunlin up` asks all
//!   hosts ([`of`]) -> [`judge`] -> the file that all of them are given names that host first.
//! * **Invariants:** 1. Disks that are known to be older, or half a copy, are never begun with unless a person says so. 2. An image that
//!   somebody has written to since, or put in its place, is neither taken for the VM's newest nor written over by it without a word. 3. A life
//!   that has not written to them says nothing of how new they are: what an earlier one left counts.
//! * **Source:** as `vm::cold`, which finds the newest disk while the VM's state is still there. `dunlin down` takes that away, and the first
//!   member may be a host that the VM has left long ago. **Not here:** the marks of a bare program's data (`vm::program::images`).

use dunlin_api::{DiskStanding, ImageLife, LastLife};
use serde::{Deserialize, Serialize};
use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use xxhash_rust::xxh3::xxh3_64;

const FOLDER: &str = "last-lives";

/// What is remembered of one image.
#[derive(Debug, Serialize, Deserialize)]
struct Mark {
    image: PathBuf,
    life: u64,
    standing: Option<DiskStanding>,
    /// It is not newer than that.
    #[serde(default)]
    at_most: Option<DiskStanding>,
    stamp: Stamp,
}

/// How new the images are of a VM that has ended here.
#[derive(Debug, Default)]
pub struct Found {
    /// In their order; empty where that could not be found out.
    pub disks: Vec<DiskStanding>,
    /// None of them is newer, as far as that is known.
    pub at_most: Option<DiskStanding>,
}

/// By what one sees that somebody has written to a file, or has put another one in its place.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Stamp {
    inode: u64,
    bytes: u64,
    modified: (i64, i64),
    changed: (i64, i64),
    /// Times tell nothing of it.
    is_block_device: bool,
}

impl Stamp {
    fn of(image: &Path) -> io::Result<Self> {
        let found = fs::metadata(image)?;
        let is_block_device = found.file_type().is_block_device();
        // A device's node is made anew at each start of its host.
        let of_file = |value| if is_block_device { 0 } else { value };
        let at = |seconds, nanoseconds| {
            if is_block_device {
                (0, 0)
            } else {
                (seconds, nanoseconds)
            }
        };
        Ok(Self {
            inode: of_file(found.ino()),
            bytes: of_file(found.len()),
            modified: at(found.mtime(), found.mtime_nsec()),
            changed: at(found.ctime(), found.ctime_nsec()),
            is_block_device,
        })
    }
}

/// Where an image's mark is, and the image's whole path.
fn place(state: &Path, image: &Path) -> io::Result<(PathBuf, PathBuf)> {
    let image = fs::canonicalize(image)?;
    let name = format!("{:016x}.json", xxh3_64(image.as_os_str().as_encoded_bytes()));
    Ok((state.join(FOLDER).join(name), image))
}

/// Remembers, durably, how new a VM's images are that has ended here.
pub fn note(state: &Path, life: u64, images: &[PathBuf], found: &Found) -> io::Result<()> {
    let disks = &found.disks;
    // Invariant 3. Terms begin with 1.
    let is_unwritten = |disk: &DiskStanding| disk.consistent && disk.term == 0;
    if !disks.is_empty() && disks.iter().all(is_unwritten) {
        return Ok(());
    }
    let folder = state.join(FOLDER);
    fs::create_dir_all(&folder)?;
    forget_what_is_gone(&folder)?;
    for (number, image) in images.iter().enumerate() {
        let (path, image) = match place(state, image) {
            // Whoever has taken it away has taken the disk away.
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            found => found?,
        };
        let mark = Mark {
            stamp: Stamp::of(&image)?,
            image,
            life,
            standing: disks.get(number).copied(),
            at_most: found.at_most,
        };
        let new = path.with_extension("new");
        let mut file = File::create(&new)?;
        file.write_all(&serde_json::to_vec(&mark)?)?;
        file.sync_all()?;
        fs::rename(&new, &path)?;
    }
    File::open(&folder)?.sync_all()
}

/// So the folder has no more files than there are images.
fn forget_what_is_gone(folder: &Path) -> io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        // One that cannot be read stays: a person is told of it when its image is asked for.
        if read(&path).is_ok_and(|mark| mark.is_some_and(|mark| !mark.image.exists())) {
            fs::remove_file(path)?;
        }
    }
    Ok(())
}

/// What is there: nothing where there is no such file.
fn read(path: &Path) -> io::Result<Option<Mark>> {
    match fs::read(path) {
        Ok(bytes) => Ok(Some(serde_json::from_slice(&bytes)?)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// The mark of an image; none of one that is not there.
fn mark_of(state: &Path, image: &Path) -> io::Result<Option<Mark>> {
    match place(state, image) {
        Ok((path, image)) => Ok(read(&path)?.filter(|mark| mark.image == image)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// What this host remembers of these images.
pub fn of(state: &Path, images: &[PathBuf]) -> LastLife {
    let found: io::Result<Vec<Option<Mark>>> = images.iter().map(|image| mark_of(state, image)).collect();
    let Ok(found) = found else {
        return LastLife {
            unreadable: true,
            ..LastLife::default()
        };
    };
    let known = || found.iter().flatten();
    let number = known().map(|mark| mark.life).max();
    let is_as_left =
        |mark: &Mark| Some(mark.life) == number && Stamp::of(&mark.image).is_ok_and(|now| now == mark.stamp);
    let images: Vec<ImageLife> = found
        .iter()
        .map(|mark| ImageLife {
            known: mark.is_some(),
            standing: mark.as_ref().and_then(|mark| mark.standing),
        })
        .collect();
    LastLife {
        number,
        disks: standings_of(images.iter()),
        images,
        untouched: found.iter().all(|mark| mark.as_ref().is_some_and(is_as_left)),
        sure: known().all(|mark| !mark.stamp.is_block_device),
        unreadable: false,
        at_most: known()
            .map(|mark| mark.standing.or(mark.at_most))
            .max_by_key(|most| (most.is_none(), *most))
            .flatten(),
    }
}

/// Where a VM begins.
#[derive(Debug, PartialEq, Eq)]
pub enum Begin<'a> {
    /// On the first of its members.
    AsListed,
    /// There: its disks are the newest.
    On(&'a str),
    /// A person has to say whose disks count: of whom nobody knows it, who has the newest, and what is unclear.
    Unclear {
        /// The host that would begin.
        first: &'a str,
        /// The host whose disks are the newest, as far as is known.
        newest: &'a str,
        /// What is unclear.
        why: &'static str,
    },
}

/// What they remember without the images that no member knows, if there are such: those are new to the VM, and tell nothing of the others.
fn without_new_images<'a>(members: &[(&'a str, LastLife)]) -> Option<Vec<(&'a str, LastLife)>> {
    let is_new = |at: usize| {
        let known = |last: &LastLife| last.images.get(at).is_none_or(|image| image.known);
        !members.iter().any(|(_, last)| known(last))
    };
    let images = members
        .iter()
        .map(|(_, last)| last.images.len())
        .max()
        .unwrap_or(0);
    if !(0..images).any(is_new) {
        return None;
    }
    let of_known = |last: &LastLife| LastLife {
        disks: standings_of(
            (0..)
                .zip(&last.images)
                .filter(|(at, _)| !is_new(*at))
                .map(|(_, image)| image),
        ),
        ..last.clone()
    };
    let of_all = members.iter().map(|(host, last)| (*host, of_known(last)));
    Some(of_all.collect())
}

/// How new these were; nothing where that is not known of one of them.
fn standings_of<'a>(images: impl Iterator<Item = &'a ImageLife>) -> Vec<DiskStanding> {
    images
        .map(|image| image.standing)
        .collect::<Option<_>>()
        .unwrap_or_default()
}

/// Where a VM begins of whose images its members, in their order, remember this.
pub fn judge<'a>(members: &[(&'a str, LastLife)]) -> Begin<'a> {
    let known = without_new_images(members);
    let some_are_new = known.is_some();
    let members = known.as_deref().unwrap_or(members);
    let is_whole = |last: &LastLife| !last.disks.is_empty() && last.disks.iter().all(|disk| disk.consistent);
    // Also of what somebody has written to since: it was the newest until then.
    let rank = |last: &LastLife| {
        last.number
            .map(|number| (number, is_whole(last), last.disks.clone()))
    };
    // Of equals the first.
    let newest = members
        .iter()
        .rev()
        .max_by(|(_, one), (_, other)| rank(one).cmp(&rank(other)));
    let (Some((first, of_first)), Some((newest, of_newest))) = (members.first(), newest) else {
        return Begin::AsListed;
    };
    let unclear = |why| Begin::Unclear { first, newest, why };
    if let Some((host, _)) = members.iter().find(|(_, last)| last.unreadable) {
        return Begin::Unclear {
            first,
            newest: host,
            why: "what a host remembers of them in its state folder (last-lives) cannot be read",
        };
    }
    if of_newest.number.is_none() {
        return Begin::AsListed;
    }
    // Whoever was a backup until then has none that are newer than its primary's.
    let is_older = |last: &LastLife| {
        last.at_most
            .is_some_and(|most| of_newest.disks.iter().all(|disk| most <= *disk))
    };
    let may_be_newer = |last: &LastLife| {
        last.number == of_newest.number
            && last.disks.is_empty()
            && (of_newest.disks.is_empty() || !is_older(last))
    };
    if let Some((host, _)) = members.iter().find(|(_, last)| may_be_newer(last)) {
        return Begin::Unclear {
            first,
            newest: host,
            why: "how new they are there could not be read when the VM ended",
        };
    }
    if rank(of_first) == rank(of_newest) {
        // Whoever has put another image in its place has listed that host first.
        return match is_whole(of_first) || (!of_first.untouched && !some_are_new) {
            true => Begin::AsListed,
            false => unclear("they are half a copy, and no host has whole ones"),
        };
    }
    if of_first.number.is_none() {
        return unclear("the first host has others, which the VM has not had when it ended there");
    }
    if !of_first.untouched || !of_newest.untouched {
        return unclear("somebody has written to them since the VM ended, or put others in their place");
    }
    if !of_first.sure || !of_newest.sure {
        return unclear("of a block device nobody can tell whether somebody has written to it since");
    }
    match is_whole(of_newest) {
        true => Begin::On(newest),
        false => unclear("they are half a copy"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn disk(term: u64, primary: bool) -> DiskStanding {
        DiskStanding {
            consistent: true,
            term,
            primary,
            epoch: 7,
        }
    }

    fn known(disk: DiskStanding) -> ImageLife {
        ImageLife {
            known: true,
            standing: Some(disk),
        }
    }

    fn left(number: u64, disk: DiskStanding) -> LastLife {
        LastLife {
            number: Some(number),
            disks: vec![disk],
            untouched: true,
            sure: true,
            at_most: Some(disk),
            ..LastLife::default()
        }
    }

    fn found(disks: &[DiskStanding]) -> Found {
        Found {
            disks: disks.to_vec(),
            at_most: None,
        }
    }

    fn begins(a: &LastLife, b: &LastLife) -> Begin<'static> {
        judge(&[("a", a.clone()), ("b", b.clone())])
    }

    fn is_unclear(begin: &Begin<'_>) -> bool {
        matches!(
            begin,
            Begin::Unclear {
                first: "a",
                newest: "b",
                ..
            }
        )
    }

    #[test]
    fn invariant_1_a_vm_begins_where_its_disks_are_the_newest() {
        let (nothing, old, new) = (
            LastLife::default(),
            left(1, disk(1, true)),
            left(1, disk(2, true)),
        );
        assert_eq!(begins(&nothing, &nothing), Begin::AsListed);
        assert_eq!(begins(&new, &old), Begin::AsListed);
        assert_eq!(begins(&new, &nothing), Begin::AsListed);
        assert_eq!(begins(&old, &new), Begin::On("b"));
        // Written as the primary: also what no sync had brought to the other one.
        assert_eq!(begins(&left(1, disk(2, false)), &new), Begin::On("b"));
        assert_eq!(begins(&new, &new), Begin::AsListed);
        // Terms begin anew with each life.
        assert_eq!(
            begins(&left(1, disk(9, true)), &left(2, disk(1, true))),
            Begin::On("b")
        );
        assert_eq!(judge(&[]), Begin::AsListed);
    }

    #[test]
    fn invariant_1_half_a_copy_is_begun_with_by_nobody() {
        let whole = left(1, disk(1, false));
        let mut half = left(1, disk(2, false));
        half.disks[0].consistent = false;
        assert_eq!(begins(&half, &whole), Begin::On("b"));
        assert_eq!(begins(&whole, &half), Begin::AsListed);
        let of_a = |begin: &Begin<'_>| {
            matches!(
                begin,
                Begin::Unclear {
                    first: "a",
                    newest: "a",
                    ..
                }
            )
        };
        assert!(of_a(&begins(&half, &half)));
        // One of whom it could not be found out may have the newest.
        let unread = LastLife {
            disks: vec![],
            at_most: None,
            ..half.clone()
        };
        assert!(of_a(&begins(&unread, &whole)) && is_unclear(&begins(&whole, &unread)));
        let later = LastLife {
            number: Some(2),
            ..half
        };
        assert!(is_unclear(&begins(&whole, &later)));
    }

    #[test]
    fn invariant_1_a_backups_disks_that_could_not_be_read_are_older_than_its_primarys() {
        let unread = |term, primary| LastLife {
            disks: vec![],
            at_most: Some(DiskStanding {
                epoch: u64::MAX,
                ..disk(term, primary)
            }),
            ..left(1, disk(1, true))
        };
        let primary = left(1, disk(2, true));
        assert_eq!(begins(&primary, &unread(2, false)), Begin::AsListed);
        assert_eq!(begins(&unread(2, false), &primary), Begin::On("b"));
        // It was the primary before.
        assert_eq!(begins(&primary, &unread(1, true)), Begin::AsListed);
        // It may have taken over since, or have had the newest all the time.
        assert!(is_unclear(&begins(&primary, &unread(3, true))));
        assert!(is_unclear(&begins(&left(1, disk(2, false)), &unread(2, true))));
        assert!(is_unclear(&begins(&left(1, disk(2, false)), &unread(2, false))));
    }

    #[test]
    fn invariant_1_a_disk_that_is_new_hides_nobodys_newer_ones() {
        let with_new = |last: LastLife| LastLife {
            images: vec![known(last.disks[0]), ImageLife::default()],
            disks: vec![],
            untouched: false,
            ..last
        };
        let (old, new) = (left(1, disk(1, true)), left(1, disk(2, true)));
        // What is in it a person knows: it may have been filled on one host.
        let begin = begins(&with_new(old.clone()), &with_new(new.clone()));
        assert!(is_unclear(&begin), "{begin:?}");
        assert_eq!(
            begins(&with_new(new.clone()), &with_new(old.clone())),
            Begin::AsListed
        );
        assert_eq!(
            begins(&with_new(new.clone()), &with_new(new.clone())),
            Begin::AsListed
        );
        let half = |last: &LastLife| {
            let mut last = last.clone();
            last.disks[0].consistent = false;
            with_new(last)
        };
        let begin = begins(&half(&new), &half(&new));
        assert!(matches!(begin, Begin::Unclear { .. }), "{begin:?}");
        // One that one host has had is not new: it is the one to ask for.
        let of_both = LastLife {
            images: vec![known(disk(2, true)); 2],
            disks: vec![disk(2, true); 2],
            ..new.clone()
        };
        assert!(is_unclear(&begins(&with_new(new.clone()), &of_both)));
        // A build that does not tell which it knows is believed as before.
        let older = LastLife {
            images: vec![],
            ..with_new(new.clone())
        };
        let begin = begins(&with_new(old), &older);
        assert!(matches!(begin, Begin::Unclear { .. }), "{begin:?}");
    }

    #[test]
    fn invariant_2_what_somebody_has_put_there_is_a_persons_to_judge() {
        let (nothing, old, new) = (
            LastLife::default(),
            left(1, disk(1, true)),
            left(1, disk(2, true)),
        );
        let touched = |last: &LastLife| LastLife {
            untouched: false,
            ..last.clone()
        };
        let unsure = |last: &LastLife| LastLife {
            sure: false,
            ..last.clone()
        };
        for (a, b) in [
            (nothing.clone(), new.clone()),
            (touched(&old), new.clone()),
            (old.clone(), touched(&new)),
            (unsure(&old), new.clone()),
            (old.clone(), unsure(&new)),
        ] {
            let begin = begins(&a, &b);
            assert!(is_unclear(&begin), "{a:?} {b:?}: {begin:?}");
        }
        let unreadable = LastLife {
            unreadable: true,
            ..LastLife::default()
        };
        assert!(is_unclear(&begins(&new, &unreadable)));
        assert!(matches!(
            begins(&unreadable, &new),
            Begin::Unclear {
                first: "a",
                newest: "a",
                ..
            }
        ));
        // The host with the newest is listed first: whatever is there now is meant.
        assert_eq!(begins(&touched(&new), &old), Begin::AsListed);
        assert_eq!(begins(&unsure(&new), &old), Begin::AsListed);
    }

    #[test]
    fn invariant_3_a_life_that_ended_before_it_began_changes_nothing() {
        let state = tempfile::tempdir().expect("a folder");
        let images = [state.path().join("one")];
        fs::write(&images[0], "bytes").expect("an image");
        let fresh = DiskStanding {
            consistent: true,
            ..DiskStanding::default()
        };
        note(state.path(), 1, &images, &found(&[fresh])).expect("nothing to note");
        assert_eq!(
            of(state.path(), &images),
            LastLife {
                sure: true,
                images: vec![ImageLife::default()],
                ..LastLife::default()
            }
        );
        note(state.path(), 1, &images, &found(&[disk(2, true)])).expect("noted");
        let before = of(state.path(), &images);
        note(state.path(), 2, &images, &found(&[fresh])).expect("nothing to note");
        assert_eq!(of(state.path(), &images), before);
        let half = DiskStanding::default();
        note(state.path(), 2, &images, &found(&[half])).expect("noted: a copy has begun");
        assert_eq!(of(state.path(), &images).number, Some(2));
    }

    #[test]
    fn an_image_is_remembered_until_somebody_writes_to_it_or_takes_it_away() {
        let state = tempfile::tempdir().expect("a folder");
        let images = ["one", "two"].map(|name| state.path().join(name));
        for image in &images {
            fs::write(image, "bytes").expect("an image");
        }
        assert_eq!(of(state.path(), &images).number, None);
        let standings = [disk(1, true), disk(2, true)];
        note(state.path(), 3, &images, &found(&standings)).expect("noted");
        let last = LastLife {
            number: Some(3),
            disks: standings.to_vec(),
            untouched: true,
            sure: true,
            unreadable: false,
            at_most: Some(standings[1]),
            images: standings.map(known).to_vec(),
        };
        assert_eq!(of(state.path(), &images), last);
        // Another VM with one of them: it is a later life of that one alone.
        note(state.path(), 4, &images[..1], &found(&standings[..1])).expect("noted");
        assert!(!of(state.path(), &images).untouched);
        note(state.path(), 5, &images, &found(&standings)).expect("noted");
        assert!(of(state.path(), &images).untouched);
        fs::write(&images[1], "other").expect("written to");
        assert_eq!(
            of(state.path(), &images),
            LastLife {
                number: Some(5),
                untouched: false,
                ..last
            }
        );
        note(state.path(), 6, &images, &Found::default()).expect("noted");
        let unread = of(state.path(), &images);
        assert_eq!((unread.disks, unread.at_most), (vec![], None));
        let at_most = Some(disk(3, false));
        let backups = Found {
            at_most,
            ..Found::default()
        };
        note(state.path(), 6, &images, &backups).expect("noted");
        let unread = of(state.path(), &images);
        assert_eq!((unread.disks, unread.at_most), (vec![], at_most));
        let (mark, _) = place(state.path(), &images[1]).expect("its place");
        fs::write(&mark, "{").expect("damaged");
        assert!(of(state.path(), &images).unreadable);
        fs::remove_file(&images[0]).expect("taken away");
        note(state.path(), 7, &images, &Found::default()).expect("of the other one");
        assert_eq!(
            fs::read_dir(state.path().join(FOLDER)).expect("a folder").count(),
            1
        );
    }
}
