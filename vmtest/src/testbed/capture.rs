//! Who speaks for a VM: every frame that comes from its card, with the port of the switch where it came in.
//!
//! * **Decides:** nothing; it listens where nobody can deceive it, outside of all hosts.
//! * **Flow:** one packet socket for all ports of the switch (so the kernel's order of arrival is kept) -> a filter for the card's
//!   address -> [`Spoken`] for each change of the port.
//! * **Invariants:** frames are only looked at; what the kernel could not keep for us is counted.
//! * **Not here:** whether a change was right: that needs the daemons' words.

use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::SystemTime;

use anyhow::{Context, Result, anyhow};

use super::node::spawn_in;
use super::{Testbed, packet};

/// How long one look at the socket may take before the end is looked for.
const SLICE_MS: i64 = 100;
/// As much as the kernel may keep for us while this machine is busy.
const BUFFER_BYTES: libc::c_int = 8 << 20;

/// Frames that came through one port, one after the other, without any through another in between.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Spoken {
    /// The port's name: the host's.
    pub host: String,
    /// When the first was seen, by the machine's clock.
    pub first: SystemTime,
    /// When the last was.
    pub last: SystemTime,
    /// How many.
    pub frames: u64,
}

/// What was heard.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Speaker {
    /// Who spoke, in order.
    pub spoken: Vec<Spoken>,
    /// Frames that the kernel had no room for: unheard.
    pub missed: u64,
}

#[derive(Default)]
struct Shared {
    stop: AtomicBool,
    missed: AtomicU64,
    spoken: Mutex<Vec<Spoken>>,
}

/// Listens until it is dropped.
pub struct Capture {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<Result<Result<()>>>>,
}

impl Capture {
    /// Listens at the switch of `testbed` for frames of the card `mac`.
    pub fn start(testbed: &Testbed, mac: [u8; 6]) -> Result<Self> {
        let path = Path::new("/run/netns").join(testbed.switch());
        let network = File::open(&path).with_context(|| format!("cannot open {}", path.display()))?;
        let shared = Arc::new(Shared::default());
        let heard = Arc::clone(&shared);
        let thread = spawn_in(network, "capture", move || listen(mac, &heard))?;
        Ok(Self {
            shared,
            thread: Some(thread),
        })
    }

    /// What was heard so far.
    pub fn heard(&self) -> Speaker {
        let spoken = self.shared.spoken.lock();
        Speaker {
            spoken: spoken.clone(),
            missed: self.shared.missed.load(Ordering::Relaxed),
        }
    }

    /// Ends it.
    ///
    /// # Errors
    /// When it could not listen.
    pub fn finish(mut self) -> Result<Speaker> {
        self.shared.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            thread.join().map_err(|_| anyhow!("the capture panicked"))???;
        }
        Ok(self.heard())
    }
}

impl Drop for Capture {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn listen(mac: [u8; 6], shared: &Shared) -> Result<()> {
    let socket = open(mac).context("cannot listen at the switch")?;
    let mut names = BTreeMap::new();
    while !shared.stop.load(Ordering::Relaxed) {
        let Some((port, incoming)) = receive(&socket)? else {
            count_missed(&socket, shared);
            continue;
        };
        if !incoming {
            continue;
        }
        let name: &String = names.entry(port).or_insert_with(|| name_of(port));
        if name == super::BRIDGE {
            // The switch's own copy of a broadcast.
            continue;
        }
        let now = SystemTime::now();
        let mut spoken = shared.spoken.lock();
        match spoken.last_mut().filter(|last| last.host == *name) {
            Some(last) => {
                last.last = now;
                last.frames += 1;
            }
            None => spoken.push(Spoken {
                host: name.clone(),
                first: now,
                last: now,
                frames: 1,
            }),
        }
    }
    count_missed(&socket, shared);
    Ok(())
}

/// A socket that hears every frame from that card at every port of this network namespace.
fn open(mac: [u8; 6]) -> io::Result<OwnedFd> {
    let [a, b, c, d, e, f] = mac.map(u32::from);
    let instruction = |code: u32, jt, jf, k| libc::sock_filter {
        code: code as u16,
        jt,
        jf,
        k,
    };
    let load = libc::BPF_LD | libc::BPF_ABS;
    let equal = libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K;
    let mut program = [
        instruction(load | libc::BPF_W, 0, 0, 6),
        instruction(equal, 0, 3, a << 24 | b << 16 | c << 8 | d),
        instruction(load | libc::BPF_H, 0, 0, 10),
        instruction(equal, 0, 1, e << 8 | f),
        instruction(libc::BPF_RET | libc::BPF_K, 0, 0, 64),
        instruction(libc::BPF_RET | libc::BPF_K, 0, 0, 0),
    ];
    let filter = libc::sock_fprog {
        len: program.len() as u16,
        filter: program.as_mut_ptr(),
    };
    let slice = libc::timeval {
        tv_sec: 0,
        tv_usec: SLICE_MS * 1000,
    };
    // Nothing is heard before the filter is there.
    let socket = packet::socket(0)?;
    packet::set(&socket, libc::SOL_SOCKET, libc::SO_ATTACH_FILTER, &filter)?;
    packet::set(&socket, libc::SOL_SOCKET, libc::SO_RCVBUFFORCE, &BUFFER_BYTES)?;
    packet::set(&socket, libc::SOL_SOCKET, libc::SO_RCVTIMEO, &slice)?;
    packet::bind(&socket, None)?;
    Ok(socket)
}

/// The port of the next frame and whether it came in there; nothing if none came for a while.
fn receive(socket: &OwnedFd) -> io::Result<Option<(libc::c_int, bool)>> {
    let mut frame = [0_u8; 64];
    // SAFETY: a socket address of zeros is one without a family.
    let mut from: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
    let mut len = size_of_val(&from) as u32;
    // SAFETY: buffer, address and its length live across the call and are as long as is said.
    let got = unsafe {
        libc::recvfrom(
            socket.as_raw_fd(),
            frame.as_mut_ptr().cast(),
            frame.len(),
            0,
            (&raw mut from).cast(),
            &raw mut len,
        )
    };
    if got >= 0 {
        return Ok(Some((
            from.sll_ifindex,
            from.sll_pkttype != libc::PACKET_OUTGOING,
        )));
    }
    let error = io::Error::last_os_error();
    match error.raw_os_error() {
        // A port went down: it may come again.
        Some(libc::EAGAIN | libc::EINTR | libc::ENETDOWN) => Ok(None),
        _ => Err(error),
    }
}

fn count_missed(socket: &OwnedFd, shared: &Shared) {
    let mut figures = [0_u32; 2];
    let mut len = size_of_val(&figures) as u32;
    // SAFETY: the figures (packets, drops) live across the call and are as long as is said.
    let rc = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_PACKET,
            libc::PACKET_STATISTICS,
            figures.as_mut_ptr().cast(),
            &raw mut len,
        )
    };
    if rc == 0 {
        shared.missed.fetch_add(u64::from(figures[1]), Ordering::Relaxed);
    }
}

fn name_of(port: libc::c_int) -> String {
    let mut name = [0 as libc::c_char; libc::IF_NAMESIZE];
    // SAFETY: the buffer is as long as the call demands, and is read only after it was filled with a terminated name.
    let known = unsafe { !libc::if_indextoname(port as u32, name.as_mut_ptr()).is_null() };
    if !known {
        return format!("port {port}");
    }
    let bytes = name.iter().map(|&byte| byte as u8).take_while(|&byte| byte != 0);
    String::from_utf8_lossy(&bytes.collect::<Vec<u8>>()).into_owned()
}
