//! What a copy may take of its host: memory, processor time, processes; a control group of its own.
//!
//! Decides:    where that group is: below the daemon's own, by cgroups v2 where that has the controllers, else by v1.
//! Flow:       `Group::make` -> the keeper is put into it before it starts anything, so all that it starts is in it -> dropped with the copy.
//! Invariants: 1. a limit that is asked for is set, or there is no group and one line says why; 2. a group that is dropped is removed, at
//!             the latest when the next one is made or dropped: the kernel refuses while its last process ends.
//! Source:     cgroups(7), the kernel's cgroup-v2 and cgroup-v1 pages. Not here: what is said of a program that met a limit (`dunlin`).

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use std::fs::{self, File};
use std::io::{self, ErrorKind};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// The period in which processor time is counted, in microseconds: the kernel's own default.
const PERIOD_US: u64 = 100_000;
/// What is not the program's: the keeper and the copy's pid 1; while a copy is brought here who waits for CRIU, CRIU, and what that starts beside
/// the program's own.
const OURS: u64 = 8;
/// The leaf that the daemon is in where its unit has a subtree of its own (`DelegateSubgroup=`).
const LEAF: &str = "daemon";
/// How long a drop waits for the last process to go: it is under way.
const GOES_WITHIN: u32 = 20;
const LOOK_EVERY: Duration = Duration::from_millis(5);

/// Groups whose last process had not gone when they were dropped.
static LEFT: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());
static NEXT: AtomicU64 = AtomicU64::new(1);

/// What is asked for; nothing is no limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Limits {
    /// Memory, with what is written to files and what the kernel holds for it. Nothing of it is swapped out.
    pub memory_mib: Option<u32>,
    /// Processors, such as 1.5.
    pub cpus: Option<f64>,
    /// Processes and threads.
    pub tasks: Option<u32>,
}

impl Limits {
    /// Whether nothing is limited.
    #[must_use]
    pub fn is_none(&self) -> bool {
        *self == Self::default()
    }

    fn controllers(&self) -> Vec<&'static str> {
        let asked = [
            ("memory", self.memory_mib.is_some()),
            ("cpu", self.cpus.is_some()),
            ("pids", self.tasks.is_some()),
        ];
        asked
            .iter()
            .filter(|(_, is_asked)| *is_asked)
            .map(|(name, _)| *name)
            .collect()
    }

    /// Files and what to write there; the last member says whether the file may be missing (a kernel that does not count swap).
    fn settings(&self, version: Version) -> Vec<(&'static str, &'static str, String, bool)> {
        let mut settings = Vec::new();
        if let Some(mib) = self.memory_mib {
            let bytes = (u64::from(mib) << 20).to_string();
            settings.extend(match version {
                Version::One => [
                    ("memory", "memory.limit_in_bytes", bytes.clone(), false),
                    ("memory", "memory.memsw.limit_in_bytes", bytes, true),
                ],
                Version::Two => [
                    ("memory", "memory.max", bytes, false),
                    ("memory", "memory.swap.max", "0".to_owned(), true),
                ],
            });
        }
        if let Some(cpus) = self.cpus {
            let quota_us = (cpus * PERIOD_US as f64).round() as u64;
            match version {
                Version::One => settings.extend([
                    ("cpu", "cpu.cfs_period_us", PERIOD_US.to_string(), false),
                    ("cpu", "cpu.cfs_quota_us", quota_us.to_string(), false),
                ]),
                Version::Two => settings.push(("cpu", "cpu.max", format!("{quota_us} {PERIOD_US}"), false)),
            }
        }
        if let Some(tasks) = self.tasks {
            settings.push(("pids", "pids.max", (u64::from(tasks) + OURS).to_string(), false));
        }
        settings
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Version {
    One,
    Two,
}

/// The daemon's own place in a hierarchy, below which a group can be made.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Base {
    version: Version,
    /// What it can limit.
    controllers: Vec<String>,
    folder: PathBuf,
}

/// Why this host cannot limit what is asked for: one line.
#[derive(Debug, thiserror::Error)]
pub enum LimitsError {
    /// A file of the kernel's cannot be read or written.
    #[error("{}: {error}", .file.display())]
    File {
        /// Which.
        file: PathBuf,
        /// Its answer.
        error: io::Error,
    },
    /// Nothing here limits that.
    #[error("this host has no control group with the controller '{0}' (cgroups v2, or v1 with it)")]
    NoController(&'static str),
    /// The daemon lies in it itself.
    #[error(
        "{}: the daemon's own control group is not its to divide: start it by its systemd unit, which delegates one (systemd 254)",
        .0.display()
    )]
    NotDelegated(PathBuf),
}

impl LimitsError {
    fn of(file: &Path) -> impl FnOnce(io::Error) -> Self {
        let file = file.to_owned();
        move |error| Self::File { file, error }
    }
}

/// A group that limits.
#[derive(Debug)]
pub struct Group {
    /// With v1 one for each controller.
    folders: Vec<PathBuf>,
}

impl Group {
    /// With these limits; none where nothing is limited.
    ///
    /// # Errors
    /// Where this host cannot limit that.
    pub fn make(limits: &Limits) -> Result<Option<Self>, LimitsError> {
        if limits.is_none() {
            return Ok(None);
        }
        let read = |file: &str| fs::read_to_string(file).map_err(LimitsError::of(file.as_ref()));
        let bases = bases(&read("/proc/self/mountinfo")?, &read("/proc/self/cgroup")?);
        Self::below(&bases, limits).map(Some)
    }

    fn below(bases: &[Base], limits: &Limits) -> Result<Self, LimitsError> {
        sweep(Vec::new());
        let asked = limits.controllers();
        let has = |base: &Base, controller: &str| base.controllers.iter().any(|has| has == controller);
        let chosen: Vec<&Base> = match bases
            .iter()
            .find(|base| base.version == Version::Two && asked.iter().all(|asked| has(base, asked)))
        {
            Some(whole) => vec![whole],
            None => {
                let of = |asked: &&'static str| {
                    let one = bases
                        .iter()
                        .find(|base| base.version == Version::One && has(base, asked));
                    one.ok_or(LimitsError::NoController(asked))
                };
                let mut chosen: Vec<&Base> = Vec::new();
                for base in asked.iter().map(of) {
                    let base = base?;
                    if !chosen.contains(&base) {
                        chosen.push(base);
                    }
                }
                chosen
            }
        };
        let name = free_name(&chosen);
        let mut group = Self { folders: Vec::new() };
        for base in chosen {
            if base.version == Version::Two {
                let file = base.folder.join("cgroup.subtree_control");
                let words: Vec<String> = asked.iter().map(|name| format!("+{name}")).collect();
                fs::write(&file, words.join(" ")).map_err(|error| match error.kind() {
                    ErrorKind::ResourceBusy => LimitsError::NotDelegated(base.folder.clone()),
                    _ => LimitsError::of(&file)(error),
                })?;
            }
            let folder = base.folder.join(&name);
            fs::create_dir(&folder).map_err(LimitsError::of(&folder))?;
            group.folders.push(folder.clone());
            for (controller, file, text, may_be_missing) in limits.settings(base.version) {
                let file = folder.join(file);
                if !has(base, controller) || (may_be_missing && !file.exists()) {
                    continue;
                }
                fs::write(&file, &text).map_err(LimitsError::of(&file))?;
            }
        }
        Ok(group)
    }

    /// Puts a process into it; what that has started before stays where it is.
    ///
    /// # Errors
    /// Those of the kernel.
    pub fn add(&self, pid: u32) -> io::Result<()> {
        let mut folders = self.folders.iter();
        folders.try_for_each(|folder| fs::write(folder.join("cgroup.procs"), pid.to_string()))
    }

    /// Where a process writes "0" to be in it.
    ///
    /// # Errors
    /// Those of the kernel.
    pub fn doors(&self) -> io::Result<Vec<OwnedFd>> {
        let open = |folder: &PathBuf| File::options().write(true).open(folder.join("cgroup.procs"));
        self.folders
            .iter()
            .map(|folder| open(folder).map(OwnedFd::from))
            .collect()
    }

    /// How often the kernel has killed a process of it for want of memory.
    #[must_use]
    pub fn killed_for_memory(&self) -> u64 {
        let files = ["memory.events", "memory.oom_control"];
        let texts = self
            .folders
            .iter()
            .flat_map(|folder| files.map(|file| fs::read_to_string(folder.join(file)).unwrap_or_default()));
        texts.filter_map(|text| killed_of(&text)).sum()
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        sweep(std::mem::take(&mut self.folders));
    }
}

/// One that no group of these places has. A daemon that was killed may have had this one's number, as in a container that is begun again: what it
/// has left goes here, if it is empty.
fn free_name(bases: &[&Base]) -> String {
    loop {
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("dunlin-{}-{number}", std::process::id());
        let is_free = |base: &&Base| {
            let folder = base.folder.join(&name);
            fs::remove_dir(&folder).is_ok() || !folder.exists()
        };
        if bases.iter().all(is_free) {
            return name;
        }
    }
}

/// Removes the groups of daemons that were killed. One that has a process still stays.
pub fn forget_the_dead() {
    let read = |file: &str| fs::read_to_string(file).unwrap_or_default();
    for base in bases(&read("/proc/self/mountinfo"), &read("/proc/self/cgroup")) {
        forget_below(&base.folder);
    }
}

fn forget_below(folder: &Path) {
    // What cannot be read or removed now is looked at by the next daemon.
    let Ok(groups) = fs::read_dir(folder) else { return };
    for group in groups.flatten() {
        if group.file_name().to_str().is_some_and(is_of_the_dead) {
            let _ = fs::remove_dir(group.path());
        }
    }
}

fn is_of_the_dead(name: &str) -> bool {
    let numbers = name.strip_prefix("dunlin-").and_then(|rest| rest.split_once('-'));
    let numbers = numbers.and_then(|(pid, nth)| Some((pid.parse::<u32>().ok()?, nth.parse::<u64>().ok()?)));
    numbers.is_some_and(|(pid, _)| !Path::new(&format!("/proc/{pid}")).exists())
}

/// Removes these, and those that could not be removed before.
fn sweep(folders: Vec<PathBuf>) {
    let mut left = LEFT.lock();
    let looks = if folders.is_empty() { 1 } else { GOES_WITHIN };
    left.extend(folders);
    for look in 0..looks {
        left.retain(|folder| match fs::remove_dir(folder) {
            Ok(()) => false,
            Err(error) => error.kind() != ErrorKind::NotFound,
        });
        if left.is_empty() {
            return;
        }
        if look + 1 < looks {
            std::thread::sleep(LOOK_EVERY);
        }
    }
}

fn killed_of(text: &str) -> Option<u64> {
    text.lines()
        .find_map(|line| line.strip_prefix("oom_kill ")?.trim().parse().ok())
}

/// The daemon's places: what is mounted (proc(5), mountinfo), and where in it this process is (`/proc/self/cgroup`).
fn bases(mounts: &str, own: &str) -> Vec<Base> {
    let mounted = mounts.lines().filter_map(|line| {
        let (before, after) = line.split_once(" - ")?;
        let at = before.split(' ').nth(4)?;
        let mut after = after.split(' ');
        let kind = after.next()?;
        let options = after.nth(1)?;
        Some((PathBuf::from(at), kind, options))
    });
    let mut bases = Vec::new();
    for (at, kind, options) in mounted {
        let is = |line: &str| -> Option<String> {
            let mut parts = line.splitn(3, ':');
            let (number, names, path) = (parts.next()?, parts.next()?, parts.next()?);
            let is_it = match kind {
                "cgroup2" => number == "0",
                "cgroup" => {
                    !names.is_empty()
                        && names
                            .split(',')
                            .all(|name| options.split(',').any(|option| option == name))
                }
                _ => false,
            };
            is_it.then(|| path.trim_start_matches('/').to_owned())
        };
        let Some(path) = own.lines().find_map(is) else {
            continue;
        };
        let mut folder = at.join(&path);
        if !folder.is_dir() {
            // A container sees its own part as the whole.
            folder = at;
        }
        let (version, controllers) = if kind == "cgroup2" {
            // Beside itself: a group with processes of its own is not divided.
            if folder.file_name().is_some_and(|name| name == LEAF) {
                folder.pop();
            }
            let text = fs::read_to_string(folder.join("cgroup.controllers")).unwrap_or_default();
            (Version::Two, text.split_whitespace().map(str::to_owned).collect())
        } else {
            (Version::One, options.split(',').map(str::to_owned).collect())
        };
        bases.push(Base {
            version,
            controllers,
            folder,
        });
    }
    bases
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: Limits = Limits {
        memory_mib: Some(64),
        cpus: Some(1.5),
        tasks: Some(10),
    };

    fn base(version: Version, controllers: &[&str], folder: &Path) -> Base {
        Base {
            version,
            controllers: controllers.iter().map(|name| (*name).to_owned()).collect(),
            folder: folder.to_owned(),
        }
    }

    #[test]
    fn each_limit_is_written_where_its_version_has_it() {
        let text = |version| {
            let settings = ALL.settings(version).into_iter();
            settings
                .map(|(_, file, text, _)| format!("{file}={text}"))
                .collect::<Vec<_>>()
                .join(" ")
        };
        assert_eq!(
            text(Version::Two),
            "memory.max=67108864 memory.swap.max=0 cpu.max=150000 100000 pids.max=18"
        );
        assert_eq!(
            text(Version::One),
            "memory.limit_in_bytes=67108864 memory.memsw.limit_in_bytes=67108864 cpu.cfs_period_us=100000 cpu.cfs_quota_us=150000 pids.max=18"
        );
    }

    #[test]
    fn a_host_that_cannot_limit_says_which_controller_it_lacks() {
        let folder = tempfile::tempdir().expect("a folder");
        let bases = [
            base(Version::One, &["memory"], folder.path()),
            base(Version::Two, &["cpu"], folder.path()),
        ];
        let why = Group::below(&bases, &ALL)
            .expect_err("there is no pids")
            .to_string();
        assert!(why.contains("'cpu'") && !why.contains('\n'), "{why}");
        assert!(
            fs::read_dir(folder.path()).expect("a folder").next().is_none(),
            "something was made"
        );
    }

    #[test]
    fn v2_is_chosen_where_it_has_all_and_divided_first() {
        let folder = tempfile::tempdir().expect("a folder");
        let (one, two) = (folder.path().join("one"), folder.path().join("two"));
        fs::create_dir(&one).expect("made");
        fs::create_dir(&two).expect("made");
        let bases = [
            base(Version::One, &["memory", "cpu", "pids"], &one),
            base(Version::Two, &["memory", "cpu", "pids"], &two),
        ];
        let group = Group::below(&bases, &ALL).expect("a group");
        let divided = fs::read_to_string(two.join("cgroup.subtree_control")).expect("written");
        assert_eq!(divided, "+memory +cpu +pids");
        assert_eq!(group.folders.len(), 1);
        let max = fs::read_to_string(group.folders[0].join("memory.max")).expect("written");
        assert_eq!(max, "67108864");
        // No kernel empties this one.
        std::mem::forget(group);
    }

    /// One of them has a process still: its name is passed over.
    #[test]
    fn groups_of_a_daemon_of_the_same_number_are_in_nobodys_way() {
        let folder = tempfile::tempdir().expect("a folder");
        let base = base(Version::One, &[], folder.path());
        let next = NEXT.load(Ordering::Relaxed);
        let own = |number: u64| {
            let name = format!("dunlin-{}-{number}", std::process::id());
            folder.path().join(name)
        };
        // Other tests take names meanwhile.
        let left = next..next + 100;
        for number in left.clone() {
            fs::create_dir_all(own(number).join("a process")).expect("made");
        }
        let name = free_name(&[&base]);
        assert!(!left.map(own).any(|left| left.ends_with(&name)), "{name}");
        let empty = free_name(&[&base]);
        let number: u64 = empty.rsplit_once('-').expect("a number").1.parse().expect("one");
        for number in number + 1..number + 100 {
            fs::create_dir(own(number)).expect("made");
        }
        let name = free_name(&[&base]);
        assert!(!folder.path().join(&name).exists(), "{name} can be made");
    }

    #[test]
    fn groups_of_daemons_that_are_gone_are_removed_and_no_others() {
        let folder = tempfile::tempdir().expect("a folder");
        let own = format!("dunlin-{}-7", std::process::id());
        // No kernel has a process of that number.
        let others = [
            own.as_str(),
            "dunlin-1-1",
            "dunlin-x-1",
            "dunlin-4294967294",
            "other-4294967294-1",
        ];
        for name in others.iter().chain(&["dunlin-4294967294-12"]) {
            fs::create_dir(folder.path().join(name)).expect("made");
        }
        forget_below(folder.path());
        let left = fs::read_dir(folder.path()).expect("a folder").count();
        assert_eq!(left, others.len());
        assert!(!folder.path().join("dunlin-4294967294-12").exists());
    }

    #[test]
    fn places_are_read_from_what_the_kernel_tells() {
        let folder = tempfile::tempdir().expect("a folder");
        let at = folder.path().display();
        let mounts = format!(
            "31 24 0:27 / {at}/memory rw,relatime shared:9 - cgroup cgroup rw,memory\n\
             32 24 0:28 / {at}/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n\
             33 24 0:29 / {at}/unified rw - cgroup2 cgroup2 rw,nsdelegate\n\
             34 24 0:30 / /proc rw - proc proc rw\n\
             35 24 0:31 / {at}/systemd rw - cgroup cgroup rw,name=systemd\n"
        );
        let unified = folder.path().join("unified/dunlin.service");
        fs::create_dir_all(unified.join(LEAF)).expect("made");
        fs::write(unified.join("cgroup.controllers"), "cpu pids\n").expect("written");
        let own = "3:cpu,cpuacct:/\n2:memory:/here\n1:name=systemd:/\n0::/dunlin.service/daemon\n";
        let found = bases(&mounts, own);
        assert_eq!(found.len(), 4, "{found:?}");
        assert!(found[0].controllers.contains(&"memory".to_owned()) && found[0].version == Version::One);
        assert_eq!(found[2].folder, unified, "beside the daemon, not below it");
        assert_eq!(found[2].controllers, ["cpu", "pids"]);
        assert!(bases("nonsense\n", own).is_empty());
    }

    #[test]
    fn deaths_by_want_of_memory_are_counted_in_both_versions() {
        assert_eq!(
            killed_of("low 0\nhigh 0\nmax 12\noom 3\noom_kill 2\noom_group_kill 0\n"),
            Some(2)
        );
        assert_eq!(
            killed_of("oom_kill_disable 0\nunder_oom 0\noom_kill 1\n"),
            Some(1)
        );
        assert_eq!(killed_of(""), None);
    }
}
