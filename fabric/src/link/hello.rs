//! What it decides: the bytes of [`Hello`] and [`Welcome`]. **Flow**: `handshake` reads a frame, this decodes it.
//! **Invariants**: 1. decoding never panics and accepts exactly what encoding makes.
//! **Not here**: who is believed (`handshake`).

use super::version::BUILD_SINCE;

/// What a connection is for.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[repr(u8)]
pub enum Purpose {
    /// The agreed log of one VM: goes to `Group::add_link`.
    Log = 1,
    /// Memory pages and device state.
    Sync = 2,
    /// Disk writes.
    Mirror = 3,
    /// Daemon to daemon: everything that is not about one running VM.
    Control = 4,
    /// Memory pages for a host that has no part in the VM: since version 6.
    Checkpoint = 5,
}

/// The first thing said on an authenticated connection: who, about what, why.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Hello {
    /// The VM that this connection is about; empty for `Control`.
    pub vm: String,
    /// The connecting host. [`super::connect`] fills it in from the identity.
    pub from: String,
    /// The host that the connector means to reach: a wrong address is noticed.
    pub to: String,
    /// What for.
    pub purpose: Purpose,
    /// The connector's term in the VM's group, 0 if it has none.
    pub term: u64,
    /// The connector's QEMU, for the node to compare; empty if it has none.
    pub qemu_version: String,
    /// Anything that the purpose needs (a sync's epoch, a group's member id), opaque here, at most 4 KiB.
    pub extra: Vec<u8>,
}

/// The acceptor's consent.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Welcome {
    /// The accepting host.
    pub host: String,
    /// Its QEMU; empty if it has none.
    pub qemu_version: String,
}

/// So many characters of a build's name are kept.
const BUILD_SHOWN: usize = 64;
/// No field of a hello is longer than this.
const FIELD_MAX: usize = 4096;
/// No hello is longer than this.
pub(super) const HELLO_MAX: usize = 16 * 1024;

fn put(out: &mut Vec<u8>, bytes: &[u8]) {
    assert!(
        bytes.len() <= FIELD_MAX,
        "a hello's field has {} bytes, more than {FIELD_MAX}",
        bytes.len()
    );
    out.extend_from_slice(&(bytes.len() as u16).to_be_bytes());
    out.extend_from_slice(bytes);
}

struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn take(&mut self, n: usize) -> Option<&'a [u8]> {
        let (head, rest) = self.0.split_at_checked(n)?;
        self.0 = rest;
        Some(head)
    }
    fn bytes(&mut self) -> Option<&'a [u8]> {
        let n = usize::from(u16::from_be_bytes(self.take(2)?.try_into().ok()?));
        (n <= FIELD_MAX).then(|| self.take(n))?
    }
    fn string(&mut self) -> Option<String> {
        std::str::from_utf8(self.bytes()?).ok().map(str::to_owned)
    }
}

/// Appends which build speaks, in versions whose hellos and welcomes begin with it.
pub(super) fn put_build(version: u16, build: &str, out: &mut Vec<u8>) {
    if version >= BUILD_SINCE {
        put(out, build.as_bytes());
    }
}

/// The reverse: which build speaks, and what follows. A peer's word: in one line, and not a long one, whatever it sent.
pub(super) fn build_of(version: u16, bytes: &[u8]) -> Option<(Option<String>, &[u8])> {
    if version < BUILD_SINCE {
        return Some((None, bytes));
    }
    let mut r = Reader(bytes);
    let build = r.string()?;
    let build = build.chars().filter(|c| !c.is_control()).take(BUILD_SHOWN);
    Some((Some(build.collect()), r.0))
}

impl Hello {
    /// A hello with the usual fields; `from` is filled in by `connect`.
    #[must_use]
    pub fn new(vm: &str, to: &str, purpose: Purpose) -> Self {
        let (vm, to) = (vm.to_owned(), to.to_owned());
        Self {
            vm,
            from: String::new(),
            to,
            purpose,
            term: 0,
            qemu_version: String::new(),
            extra: Vec::new(),
        }
    }

    /// Appends the encoding, with the cluster's id in front.
    pub fn encode(&self, cluster_id: &[u8; 16], out: &mut Vec<u8>) {
        out.extend_from_slice(cluster_id);
        out.push(self.purpose as u8);
        out.extend_from_slice(&self.term.to_be_bytes());
        for field in [
            self.vm.as_bytes(),
            self.from.as_bytes(),
            self.to.as_bytes(),
            self.qemu_version.as_bytes(),
            &self.extra,
        ] {
            put(out, field);
        }
    }

    /// The reverse; `None` for anything that `encode` would not have made.
    #[must_use]
    pub fn decode(bytes: &[u8]) -> Option<([u8; 16], Self)> {
        let mut r = Reader(bytes);
        let cluster = r.take(16)?.try_into().ok()?;
        let purpose = match r.take(1)?[0] {
            1 => Purpose::Log,
            2 => Purpose::Sync,
            3 => Purpose::Mirror,
            4 => Purpose::Control,
            5 => Purpose::Checkpoint,
            _ => return None,
        };
        let term = u64::from_be_bytes(r.take(8)?.try_into().ok()?);
        let (vm, from, to, qemu_version) = (r.string()?, r.string()?, r.string()?, r.string()?);
        let extra = r.bytes()?.to_vec();
        r.0.is_empty().then_some((
            cluster,
            Self {
                vm,
                from,
                to,
                purpose,
                term,
                qemu_version,
                extra,
            },
        ))
    }
}

impl Welcome {
    pub(super) fn encode(&self, out: &mut Vec<u8>) {
        put(out, self.host.as_bytes());
        put(out, self.qemu_version.as_bytes());
    }

    pub(super) fn decode(bytes: &[u8]) -> Option<Self> {
        let mut r = Reader(bytes);
        let (host, qemu_version) = (r.string()?, r.string()?);
        r.0.is_empty().then_some(Self { host, qemu_version })
    }
}
