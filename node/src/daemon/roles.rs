//! Who may ask what, on the control socket and by HTTP on this machine.
//!
//! **Decides**: the role of whoever connects, and the role that a request needs. **Flow**: the connection's peer (its user, as the kernel says) ->
//! [`Roles::of`], by the groups that host.toml names -> [`Roles::check`] before anything of the request is done.
//! **Invariants**: 1. without a group in host.toml the socket is for root alone; by the network people have the role that their certificate says, and it is never root's. 2. a new request has no role by omission: [`needed`] is a
//! complete match. 3. nobody but an administrator makes a host run a program, or open a file, that an administrator has not put into a VM's file;
//! but in a bare program's copy an operator may run a command as the program's own user, who is not root (`exec`).
//! 4. users cost a bounded number of threads each, and none can keep root out.
//! **Source**: unix(7), SO_PEERCRED. **Not here**: other hosts, which are believed by their keys (`peers`, `identity`).

use crate::config::HostConfig;
use dunlin_api::keys::KeysStep;
use dunlin_api::log::LogRequest;
use dunlin_api::{Answer, Request};
use dunlin_fabric::keys::person::{Person, PersonRole};
use nix::errno::Errno;
use nix::unistd::{Gid, Group, Uid, User, getgrouplist};
use parking_lot::Mutex;
use rustix::net::sockopt::socket_peercred;
use serde::Serialize;
use std::collections::BTreeMap;
use std::ffi::CString;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use utoipa::ToSchema;

/// Conversations of one user at once, and of all users but administrators.
const MOST_EACH: usize = 64;
const MOST_IN_ALL: usize = 256;

/// What a user may do. Each role includes the ones before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Role {
    /// May look.
    Viewer,
    /// May also start, stop and switch over VMs that an administrator has prepared.
    Operator,
    /// May do everything.
    Administrator,
}

/// Why nobody can be told apart as host.toml says.
#[derive(Debug, thiserror::Error)]
pub enum RolesError {
    /// Nobody could be in it.
    #[error("host.toml: {key}: there is no group '{group}' on this host ('groupadd {group}' makes one)")]
    NoGroup {
        /// Where it is named.
        key: &'static str,
        /// It.
        group: String,
    },
    /// The system does not say.
    #[error("host.toml: {key}: group '{group}': {error}")]
    Group {
        /// Where it is named.
        key: &'static str,
        /// It.
        group: String,
        /// The system's answer.
        #[source]
        error: Errno,
    },
}

/// The kernel does not say who is at the other end.
#[derive(Debug, thiserror::Error)]
#[error("nobody knows who asks: {0}")]
pub struct NobodyKnows(#[source] rustix::io::Errno);

/// Who talks.
#[derive(Debug)]
pub struct Who {
    name: String,
    role: Option<Role>,
    /// By a certificate, from another machine.
    is_certified: bool,
}

/// The groups that host.toml names, and who is inside just now.
pub struct Roles {
    viewers: Option<String>,
    operators: Option<String>,
    /// The files of VMs that operators may start.
    files: PathBuf,
    inside: Mutex<BTreeMap<String, usize>>,
}

/// A conversation; dropped, it gives its place back.
#[derive(Default)]
pub struct Place(Option<(Arc<Roles>, String)>);

impl Roles {
    /// As host.toml says. A group that is not there is an error.
    pub fn new(config: &HostConfig) -> Result<Arc<Self>, RolesError> {
        for (key, group) in [("viewers", &config.viewers), ("operators", &config.operators)] {
            let Some(group) = group else { continue };
            match Group::from_name(group) {
                Ok(Some(_)) => {}
                Ok(None) => {
                    let group = group.clone();
                    return Err(RolesError::NoGroup { key, group });
                }
                Err(error) => {
                    let group = group.clone();
                    return Err(RolesError::Group { key, group, error });
                }
            }
        }
        Ok(Arc::new(Self {
            viewers: config.viewers.clone(),
            operators: config.operators.clone(),
            files: config.vm_files.clone(),
            inside: Mutex::default(),
        }))
    }

    /// Whether anybody but root may connect.
    pub fn is_open(&self) -> bool {
        self.viewers.is_some() || self.operators.is_some()
    }

    /// A place for a conversation with that user; none if it has too many.
    pub fn enter(self: &Arc<Self>, stream: &UnixStream) -> Option<Place> {
        self.enter_user(socket_peercred(stream).ok()?.uid.as_raw())
    }

    /// Whether that user may do everything, whatever host.toml says.
    pub fn is_administrator(&self, uid: u32) -> bool {
        is_root(uid)
    }

    /// The same for a conversation by HTTP.
    pub fn enter_user(self: &Arc<Self>, uid: u32) -> Option<Place> {
        match is_root(uid) {
            true => Some(Place(None)),
            false => self.take(uid),
        }
    }

    /// The same for a person with a certificate, who has places of their own.
    pub fn enter_person(self: &Arc<Self>, name: &str) -> Option<Place> {
        self.take(format!("person {name}"))
    }

    fn take(self: &Arc<Self>, whose: impl ToString) -> Option<Place> {
        let whose = whose.to_string();
        let mut inside = self.inside.lock();
        let all: usize = inside.values().sum();
        let own = inside.get(&whose).copied().unwrap_or_default();
        if own >= MOST_EACH || all >= MOST_IN_ALL {
            return None;
        }
        inside.insert(whose.clone(), own + 1);
        Some(Place(Some((self.clone(), whose))))
    }

    /// Who talks, by the system's own list of users and groups.
    pub fn of(&self, stream: &UnixStream) -> Result<Who, NobodyKnows> {
        let peer = socket_peercred(stream).map_err(NobodyKnows)?;
        Ok(self.of_user(peer.uid.as_raw(), Some(peer.gid.as_raw())))
    }

    /// Who that user is; with the group that its process has, where the kernel tells it.
    pub fn of_user(&self, uid: u32, gid: Option<u32>) -> Who {
        let user = User::from_uid(Uid::from_raw(uid)).ok().flatten();
        let gid = gid.map(Gid::from_raw).or(user.as_ref().map(|user| user.gid));
        let name = user.map_or_else(|| format!("uid {uid}"), |user| user.name);
        if is_root(uid) {
            let role = Some(Role::Administrator);
            return Who::user(name, role);
        }
        let mut groups: Vec<Gid> = gid.into_iter().collect();
        if let (Ok(user), Some(gid)) = (CString::new(name.as_str()), gid) {
            // A user that is on no list has the process's own group alone.
            groups.extend(getgrouplist(&user, gid).unwrap_or_default());
        }
        let is_in = |group: &Option<String>| {
            let group = group
                .as_deref()
                .and_then(|name| Group::from_name(name).ok().flatten());
            group.is_some_and(|group| groups.contains(&group.gid))
        };
        let role = match (is_in(&self.operators), is_in(&self.viewers)) {
            (true, _) => Some(Role::Operator),
            (false, true) => Some(Role::Viewer),
            (false, false) => None,
        };
        Who::user(name, role)
    }

    /// Whether that is theirs to ask; else one line that says whose it is.
    pub fn check(&self, who: &Who, request: &Request) -> Result<(), Answer> {
        let Who { name, role, .. } = who;
        let needed = needed(request);
        let Some(role) = *role else {
            return Err(Answer::refused(format!(
                "user '{name}' may not talk to this daemon: it listens to root, and to the groups that 'viewers' and 'operators' in \
                 host.toml name"
            )));
        };
        if role < needed {
            let whose = match (needed, &self.operators) {
                (Role::Operator, _) if who.is_certified => {
                    format!(
                        "people with the role operator ('dunlin cluster person {name} --role operator' makes such a certificate)"
                    )
                }
                _ if who.is_certified => "root, on the host itself".to_owned(),
                (Role::Operator, Some(group)) => format!("members of group '{group}', and root"),
                _ => "root".to_owned(),
            };
            return Err(Answer::refused(format!(
                "{} '{name}' may not do that ('{}'): it is for {whose}",
                who.kind(),
                kind(request)
            )));
        }
        // A check starts the QEMU that the file names, as the user that it names, and looks for its files as root.
        let does = match request {
            Request::Up { text, .. } => Some(("start", text)),
            Request::Check { text, .. } => Some(("check", text)),
            _ => None,
        };
        match does {
            Some((does, text)) if role < Role::Administrator && !is_prepared(&self.files, text) => {
                Err(Answer::refused(format!(
                    "{} '{name}' may {does} only VMs that root has prepared: none of the files in {} has this text",
                    who.kind(),
                    self.files.display()
                )))
            }
            _ => Ok(()),
        }
        .inspect(|()| {
            if role < Role::Administrator && needed > Role::Viewer {
                tracing::info!(who.name = name, who.kind = who.kind(), "asks for '{}'", kind(request));
            }
        })
    }
}

impl Who {
    fn user(name: String, role: Option<Role>) -> Self {
        Self {
            name,
            role,
            is_certified: false,
        }
    }

    /// Whoever may do everything.
    #[cfg(test)]
    pub fn root() -> Self {
        Self::user("root".into(), Some(Role::Administrator))
    }

    /// A person of whom a certificate says what they may do. Nobody is an administrator by one.
    pub fn person(person: &Person) -> Self {
        let role = match person.role {
            PersonRole::Viewer => Role::Viewer,
            PersonRole::Operator => Role::Operator,
        };
        Self {
            name: person.name.clone(),
            role: Some(role),
            is_certified: true,
        }
    }

    /// What they are, for a message.
    pub fn kind(&self) -> &'static str {
        match self.is_certified {
            true => "person",
            false => "user",
        }
    }

    /// The user's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// What it may do, if anything.
    pub fn role(&self) -> Option<Role> {
        self.role
    }

    /// Whether the daemon waits for this one however long it takes.
    pub fn is_administrator(&self) -> bool {
        self.role == Some(Role::Administrator)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let Some((roles, whose)) = &self.0 else { return };
        let mut inside = roles.inside.lock();
        if let Some(own) = inside.get_mut(whose) {
            *own -= 1;
            if *own == 0 {
                inside.remove(whose);
            }
        }
    }
}

/// Root, or whoever the daemon runs as.
fn is_root(uid: u32) -> bool {
    uid == 0 || uid == rustix::process::geteuid().as_raw()
}

/// A VM's file names a program and files of the host, all of which its daemon opens as root: an operator chooses among files that root
/// has put there (invariant 3).
fn is_prepared(folder: &Path, text: &str) -> bool {
    let Ok(entries) = std::fs::read_dir(folder) else {
        return false;
    };
    let files = entries.flatten().map(|entry| entry.path());
    files
        .filter(|path| path.extension().is_some_and(|kind| kind == "toml"))
        .any(|path| std::fs::read_to_string(path).is_ok_and(|there| there == text))
}

/// The request's name on the socket.
fn kind(request: &Request) -> String {
    let value = serde_json::to_value(request).unwrap_or_default();
    value["do"].as_str().unwrap_or("?").to_owned()
}

/// Who may ask that.
fn needed(request: &Request) -> Role {
    match request {
        Request::Status | Request::Events { .. } | Request::Cluster | Request::Check { .. } => Role::Viewer,
        Request::Log(LogRequest::Status { .. }) => Role::Viewer,
        // What a program prints may be its users' business.
        // So may what it can be made to do beside its work; as root it could read all that the host has (`exec`).
        Request::Logs { .. } | Request::Exec { .. } => Role::Operator,
        Request::Keys {
            ask: KeysStep::Show, ..
        } => Role::Viewer,
        Request::Up { from: None, .. }
        | Request::Down { force: false, .. }
        | Request::Failover { .. }
        | Request::Policy { .. }
        | Request::Protect { alone: false, .. }
        | Request::VerifyDisk { .. } => Role::Operator,
        Request::Log(LogRequest::Write { .. } | LogRequest::Read { .. }) => Role::Operator,
        // What is against the group's agreement, what changes hosts and keys, and what is for daemons to ask.
        Request::Down { force: true, .. }
        // Older disks may count then.
        | Request::Up { from: Some(_), .. }
        | Request::Protect { alone: true, .. }
        | Request::Replace { .. }
        | Request::Move { .. }
        | Request::Inject { .. }
        | Request::Keys { .. }
        | Request::Member
        | Request::Look { .. }
        | Request::Examine { .. }
        | Request::Prepare { .. }
        | Request::Install { .. }
        | Request::Undo { .. }
        | Request::Left { .. }
        | Request::Standing { .. }
        | Request::LastLife { .. }
        | Request::Remove { .. }
        | Request::Log(
            LogRequest::Create { .. }
            | LogRequest::Remove { .. }
            | LogRequest::Prepare { .. }
            | LogRequest::Install { .. }
            | LogRequest::Forget { .. },
        ) => Role::Administrator,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn roles(viewers: Option<&str>, operators: Option<&str>, files: &Path) -> Arc<Roles> {
        Arc::new(Roles {
            viewers: viewers.map(str::to_owned),
            operators: operators.map(str::to_owned),
            files: files.to_owned(),
            inside: Mutex::default(),
        })
    }

    fn who(role: Option<Role>) -> Who {
        Who::user("ann".into(), role)
    }

    fn up(text: &str) -> Request {
        Request::Up {
            text: text.into(),
            origin: "shop.toml".into(),
            from: None,
        }
    }

    #[test]
    fn each_role_is_refused_what_is_above_it_with_a_line_that_says_whose_it_is() {
        let folder = tempfile::tempdir().expect("a folder");
        let roles = roles(Some("look"), Some("run"), folder.path());
        let vm = || "shop".to_owned();
        let down = |force| Request::Down {
            vm: vm(),
            now: false,
            force,
        };
        let protect = |alone| Request::Protect {
            vm: vm(),
            alone,
            from_disk: false,
            force_stale: false,
        };
        let look = Request::Status;
        let exec = Request::Exec {
            vm: vm(),
            command: vec!["true".into()],
        };
        let keys = |ask| Request::Keys {
            host: "b".into(),
            ask,
        };
        let cases = [
            (&look, Role::Viewer),
            (&keys(KeysStep::Show), Role::Viewer),
            (&down(false), Role::Operator),
            (&Request::Failover { vm: vm() }, Role::Operator),
            (&exec, Role::Operator),
            (&protect(false), Role::Operator),
            (&down(true), Role::Administrator),
            (&protect(true), Role::Administrator),
            (&keys(KeysStep::Begin), Role::Administrator),
            (&Request::Remove { vm: vm() }, Role::Administrator),
        ];
        for (request, least) in cases {
            for role in [Role::Viewer, Role::Operator, Role::Administrator] {
                let outcome = roles.check(&who(Some(role)), request);
                assert_eq!(outcome.is_ok(), role >= least, "{role:?}: {request:?}");
                if let Err(Answer::Failed { why, code }) = outcome {
                    assert_eq!(code, 2);
                    assert!(
                        why.contains("ann") && why.contains("root") && !why.contains('\n'),
                        "{why}"
                    );
                    assert_eq!(why.contains("'run'"), least == Role::Operator, "{why}");
                }
            }
            assert!(roles.check(&who(None), request).is_err(), "{request:?}");
        }
    }

    #[test]
    fn an_operator_starts_what_root_has_prepared_and_nothing_else() {
        let folder = tempfile::tempdir().expect("a folder");
        let roles = roles(None, Some("run"), folder.path());
        let operator = who(Some(Role::Operator));
        assert!(roles.check(&operator, &up("name = 'shop'")).is_err());
        std::fs::write(folder.path().join("shop.toml"), "name = 'shop'").expect("written");
        std::fs::write(folder.path().join("notes.txt"), "name = 'other'").expect("written");
        assert!(roles.check(&operator, &up("name = 'shop'")).is_ok());
        for other in ["name = 'other'", "name = 'shop' ", ""] {
            assert!(roles.check(&operator, &up(other)).is_err(), "{other}");
            assert!(roles.check(&who(Some(Role::Administrator)), &up(other)).is_ok());
        }
        assert!(
            roles
                .check(&who(Some(Role::Viewer)), &up("name = 'shop'"))
                .is_err()
        );
    }

    #[test]
    fn a_user_has_so_many_conversations_and_gets_their_places_back() {
        let roles = roles(Some("look"), None, Path::new("/no/such/folder"));
        let mut places: Vec<Place> = (0..MOST_EACH).filter_map(|_| roles.take(1000)).collect();
        assert_eq!(places.len(), MOST_EACH);
        assert!(roles.take(1000).is_none());
        assert!(roles.take(1001).is_some(), "another user is not kept out");
        places.pop();
        assert!(roles.take(1000).is_some());
        let crowd = (2000..3000).filter_map(|uid| roles.take(uid));
        places.extend(crowd);
        assert_eq!(places.len(), MOST_IN_ALL, "users are many, and threads are not");
        drop(places);
        assert!(roles.inside.lock().is_empty());
    }
}
