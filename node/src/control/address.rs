//! Where in the API a command asks: for each request its address, and the daemon's socket for HTTP.
//!
//! **Decides**: what a command says in HTTP. **Flow**: [`Request`] -> [`Address`] -> `http`. **Invariants**: 1. an address is one of the OpenAPI document
//! (`web::api`). 2. what takes more than lines has none: `exec` passes descriptors, a log's writer says more than one line; nor has what daemons ask each other.
//! **Not here**: HTTP itself.

use dunlin_api::Request;
use dunlin_api::keys::KeysStep;
use dunlin_api::log::LogRequest;
use hyper::Method;
use serde_json::{Value, json};
use std::fmt::Write;
use std::path::{Path, PathBuf};

/// What a command calls a daemon at its socket. A daemon from before commands spoke HTTP does not answer to it, and does nothing.
pub const NAME: &str = "dunlin";
/// The usual control socket, and the socket for HTTP beside it.
const USUAL: &str = "dunlin.sock";
const SOCKET: &str = "api.sock";

/// Where the socket for HTTP is, of a daemon with that control socket. Daemons may share a folder: only the usual one has the short name.
#[must_use]
pub fn beside(control: &Path) -> PathBuf {
    match control.file_stem() {
        Some(stem) if !control.ends_with(USUAL) => {
            let stem = stem.to_string_lossy();
            control.with_file_name(format!("{stem}-{SOCKET}"))
        }
        _ => control.with_file_name(SOCKET),
    }
}

/// One request in HTTP.
#[derive(Debug)]
pub struct Address {
    /// GET and so on.
    pub method: Method,
    /// As in the document: `/api/v1/vms/{vm}`.
    pub template: &'static str,
    /// What is put into it.
    name: String,
    query: Vec<(&'static str, String)>,
    /// What else is said; nothing for GET.
    pub body: Option<Value>,
}

impl Address {
    /// Of that request, if it has one.
    #[must_use]
    pub fn of(request: &Request) -> Option<Self> {
        let post = |template, name: &str, body| Self {
            method: Method::POST,
            template,
            name: name.to_owned(),
            query: Vec::new(),
            body: Some(body),
        };
        Some(match request {
            Request::Status => Self::get("/api/v1/status", ""),
            Request::Events {
                follow,
                from_now,
                since_ms,
            } => Self::get("/api/v1/events", "")
                .with("follow", Some(follow))
                .with("from_now", Some(from_now))
                .with("since_ms", since_ms.as_ref()),
            Request::Cluster => Self::get("/api/v1/cluster", ""),
            Request::Check { text, origin } => {
                post("/api/v1/check", "", json!({"text": text, "origin": origin}))
            }
            Request::Up { text, origin, from } => post(
                "/api/v1/vms",
                "",
                json!({"text": text, "origin": origin, "from": from}),
            ),
            Request::Failover { vm } => post("/api/v1/vms/{vm}/switchover", vm, json!({})),
            Request::Down { vm, now, force } => {
                post("/api/v1/vms/{vm}/down", vm, json!({"now": now, "force": force}))
            }
            Request::Policy { vm, policy } => post("/api/v1/vms/{vm}/policy", vm, json!({"policy": policy})),
            Request::Protect {
                vm,
                alone,
                from_disk,
                force_stale,
            } => {
                let how = json!({"alone": alone, "from_disk": from_disk, "force_stale": force_stale});
                post("/api/v1/vms/{vm}/protect", vm, how)
            }
            Request::Replace { vm, host } => post("/api/v1/vms/{vm}/replace", vm, json!({"host": host})),
            Request::Move {
                vm,
                backup,
                witness,
                standby,
                no_standby,
                unprotected_meanwhile,
            } => {
                let how = json!({"backup": backup, "witness": witness, "standby": standby, "no_standby": no_standby,
                    "unprotected_meanwhile": unprotected_meanwhile});
                post("/api/v1/vms/{vm}/move", vm, how)
            }
            Request::VerifyDisk { vm, repair } => {
                post("/api/v1/vms/{vm}/verify-disk", vm, json!({"repair": repair}))
            }
            Request::Inject { vm, disk, fault } => post(
                "/api/v1/vms/{vm}/inject",
                vm,
                json!({"disk": disk, "fault": fault}),
            ),
            Request::Logs {
                vm,
                lines,
                follow,
                differences,
            } => Self::get("/api/v1/vms/{vm}/printed", vm)
                .with("lines", Some(lines))
                .with("follow", Some(follow))
                .with("differences", differences.then_some(&true)),
            Request::Keys {
                host,
                ask: KeysStep::Show,
            } => Self::get("/api/v1/hosts/{host}/keys", host),
            Request::Keys { host, ask } => {
                post("/api/v1/hosts/{host}/keys", host, serde_json::to_value(ask).ok()?)
            }
            Request::Log(ask) => return Self::of_log(ask),
            Request::Exec { .. }
            | Request::Member
            | Request::Look { .. }
            | Request::Examine { .. }
            | Request::Prepare { .. }
            | Request::Install { .. }
            | Request::Undo { .. }
            | Request::Left { .. }
            | Request::Standing { .. }
            | Request::LastLife { .. }
            | Request::Remove { .. } => return None,
        })
    }

    fn of_log(ask: &LogRequest) -> Option<Self> {
        Some(match ask {
            LogRequest::Status { log: None } => Self::get("/api/v1/logs", ""),
            LogRequest::Status { log: Some(log) } => Self::get("/api/v1/logs/{log}", log),
            LogRequest::Create { log, hosts } => Self {
                method: Method::POST,
                body: Some(json!({"log": log, "hosts": hosts})),
                ..Self::get("/api/v1/logs", "")
            },
            LogRequest::Remove { log } => Self {
                method: Method::DELETE,
                ..Self::get("/api/v1/logs/{log}", log)
            },
            LogRequest::Read {
                log,
                from,
                follow,
                most,
            } => Self::get("/api/v1/logs/{log}/entries", log)
                .with("from", Some(from))
                .with("follow", Some(follow))
                .with("most", most.as_ref()),
            LogRequest::Write { .. }
            | LogRequest::Prepare { .. }
            | LogRequest::Install { .. }
            | LogRequest::Forget { .. } => return None,
        })
    }

    fn get(template: &'static str, name: &str) -> Self {
        Self {
            method: Method::GET,
            template,
            name: name.to_owned(),
            query: Vec::new(),
            body: None,
        }
    }

    fn with(mut self, key: &'static str, value: Option<&impl ToString>) -> Self {
        self.query.extend(value.map(|value| (key, value.to_string())));
        self
    }

    /// As it is asked for.
    #[must_use]
    pub fn path(&self) -> String {
        let mut path = match (self.template.find('{'), self.template.find('}')) {
            (Some(from), Some(to)) => {
                let (before, after) = (&self.template[..from], &self.template[to + 1..]);
                format!("{before}{}{after}", segment(&self.name))
            }
            _ => self.template.to_owned(),
        };
        for (at, (key, value)) in self.query.iter().enumerate() {
            // Writing to a String does not fail: here and below. Values are numbers and words.
            let _ = write!(path, "{}{key}={value}", if at == 0 { '?' } else { '&' });
        }
        path
    }
}

/// A name as a piece of a path.
fn segment(name: &str) -> String {
    let mut text = String::with_capacity(name.len());
    for byte in name.bytes() {
        match byte {
            b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'-' | b'_' | b'~' => text.push(char::from(byte)),
            // A dot too: '..' is no name but a way.
            _ => {
                let _ = write!(text, "%{byte:02X}");
            }
        }
    }
    text
}

/// One of each request that has an address.
#[cfg(test)]
pub fn examples() -> Vec<Request> {
    let (vm, text) = (|| "shop".to_owned(), || "name = 'shop'".to_owned());
    let log = |ask| Request::Log(ask);
    let keys = |ask| Request::Keys {
        host: "a".into(),
        ask,
    };
    let events = Request::Events {
        follow: true,
        from_now: false,
        since_ms: Some(1),
    };
    let protect = Request::Protect {
        vm: vm(),
        alone: true,
        from_disk: true,
        force_stale: true,
    };
    let read = LogRequest::Read {
        log: "jobs".into(),
        from: 1,
        follow: false,
        most: Some(1),
    };
    vec![
        Request::Status,
        events,
        Request::Cluster,
        Request::Check {
            text: text(),
            origin: vm(),
        },
        Request::Up {
            text: text(),
            origin: vm(),
            from: Some("b".to_owned()),
        },
        Request::Failover { vm: vm() },
        Request::Down {
            vm: vm(),
            now: true,
            force: true,
        },
        Request::Policy {
            vm: vm(),
            policy: "remus".into(),
        },
        protect,
        Request::Replace {
            vm: vm(),
            host: "b".into(),
        },
        Request::Move {
            vm: vm(),
            backup: Some("d".into()),
            witness: None,
            standby: None,
            no_standby: false,
            unprotected_meanwhile: true,
        },
        Request::VerifyDisk {
            vm: vm(),
            repair: true,
        },
        Request::Inject {
            vm: vm(),
            disk: 1,
            fault: "none".into(),
        },
        Request::Logs {
            vm: vm(),
            lines: 1,
            follow: true,
            differences: false,
        },
        Request::Logs {
            vm: vm(),
            lines: 1,
            follow: false,
            differences: true,
        },
        keys(KeysStep::Show),
        keys(KeysStep::Begin),
        keys(KeysStep::Revoke { crl: String::new() }),
        log(LogRequest::Status { log: None }),
        log(LogRequest::Status {
            log: Some("jobs".into()),
        }),
        log(LogRequest::Create {
            log: "jobs".into(),
            hosts: vec!["a".into()],
        }),
        log(LogRequest::Remove { log: "jobs".into() }),
        log(read),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn daemons_that_share_a_folder_have_sockets_of_their_own() {
        let of = |control: &str| beside(Path::new(control)).display().to_string();
        assert_eq!(of("/run/dunlin/dunlin.sock"), "/run/dunlin/api.sock");
        assert_eq!(of("/run/dunlin/b.sock"), "/run/dunlin/b-api.sock");
        assert_eq!(of("control"), "control-api.sock");
        // A relative control socket, and one in a folder with dots.
        assert_eq!(of("a.b/c.d.sock"), "a.b/c.d-api.sock");
    }

    #[test]
    fn a_name_is_one_piece_of_a_path_whatever_is_in_it() {
        let of = |vm: &str| {
            let request = Request::Failover { vm: vm.into() };
            Address::of(&request).expect("an address").path()
        };
        assert_eq!(of("shop-1"), "/api/v1/vms/shop-1/switchover");
        assert_eq!(
            of("../a b?\n{vm}"),
            "/api/v1/vms/%2E%2E%2Fa%20b%3F%0A%7Bvm%7D/switchover"
        );
        assert_eq!(of("é"), "/api/v1/vms/%C3%A9/switchover");
    }

    #[test]
    fn what_is_chosen_is_in_the_query_and_what_is_left_out_is_not() {
        let events = |since_ms| Request::Events {
            follow: true,
            from_now: false,
            since_ms,
        };
        let path = |request: Request| Address::of(&request).expect("an address").path();
        assert_eq!(path(events(None)), "/api/v1/events?follow=true&from_now=false");
        assert_eq!(
            path(events(Some(7))),
            "/api/v1/events?follow=true&from_now=false&since_ms=7"
        );
    }
}
