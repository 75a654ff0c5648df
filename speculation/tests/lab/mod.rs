//! A client's kernel and a VM's kernel, each a network namespace behind a TAP, and between them a host that acknowledges the VM's data
//! speculatively: epochs, releases, and deaths of the host with a rebuild from the last checkpoint.
//!
//! The VM's kernel cannot be put back to an earlier state. So a death comes as it would look to a VM that was put back: from the cut on nothing of
//! the VM is heard, and it hears nothing, while the old host goes on to speak to clients until it dies.

use dunlin_core::agreed::Frame;
use dunlin_core::offload::Offload;
use dunlin_core::output::{Ends, packet::FlowKey};
use dunlin_core::speculation::{Counts, Limits, Replica};
use dunlin_core::units::Epoch;
use dunlin_speculation::{Driver, Ports, Sockets, Tun};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::collections::VecDeque;
use std::io::Write;
use std::os::fd::AsFd;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::Instant;

/// Two cores are few: one lab at a time.
static ONE: Mutex<()> = Mutex::new(());

type Job = Box<dyn FnOnce() + Send>;

/// A network namespace, and a thread in it.
pub struct Place {
    jobs: Sender<Job>,
}

impl Place {
    /// With a TAP `eth0` and these addresses.
    pub fn new(v4: &str, v6: &str) -> std::io::Result<(Self, Tun)> {
        let (jobs, receiver): (Sender<Job>, Receiver<Job>) = channel();
        let place = Self { jobs };
        std::thread::spawn(move || receiver.into_iter().for_each(|job| job()));
        let tap = place.run(|| {
            nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNET)?;
            Tun::tap("eth0", false)
        })?;
        place.ip(&format!(
            "link set lo up\nlink set eth0 txqueuelen 10000 up\naddr add {v4}/24 dev eth0\n"
        ));
        place.tool(
            "ip",
            &["-6", "-batch", "-"],
            &format!("addr add {v6}/64 dev eth0 nodad\n"),
        );
        Ok((place, tap))
    }

    /// What `job` gives, done there.
    pub fn run<T: Send + 'static>(&self, job: impl FnOnce() -> T + Send + 'static) -> T {
        let (answer, wait) = sync_channel(1);
        let job = Box::new(move || answer.send(job()).expect("who asked waits"));
        self.jobs.send(job).expect("the place's thread");
        wait.recv().expect("the place's thread")
    }

    /// A thread there.
    pub fn spawn<T: Send + 'static>(&self, job: impl FnOnce() -> T + Send + 'static) -> JoinHandle<T> {
        // A thread is in the namespace of the one that made it.
        self.run(move || std::thread::spawn(job))
    }

    pub fn ip(&self, batch: &str) {
        self.tool("ip", &["-batch", "-"], batch);
    }

    pub fn tool(&self, name: &'static str, arguments: &[&'static str], input: &str) {
        let (arguments, input) = (arguments.to_vec(), input.to_owned());
        self.run(move || {
            let mut child = Command::new(name)
                .args(&arguments)
                .stdin(Stdio::piped())
                .spawn()
                .unwrap_or_else(|error| panic!("{name}: {error}"));
            let mut stdin = child.stdin.take().expect("piped");
            stdin.write_all(input.as_bytes()).expect("its input");
            drop(stdin);
            assert!(child.wait().expect("its end").success(), "{name}: {input}");
        });
    }

    /// Its host is switched off, as far as anybody can tell.
    pub fn vanish(&self) {
        let rules = "table inet gone {\n\
            chain in { type filter hook input priority 0; drop; }\n\
            chain out { type filter hook output priority 0; drop; }\n}\n";
        self.tool("nft", &["-f", "-"], rules);
    }

    /// Nothing arrives there any more.
    pub fn goes_deaf(&self) {
        let rules = "table inet gone {\n\
            chain in { type filter hook input priority 0; drop; }\n}\n";
        self.tool("nft", &["-f", "-"], rules);
    }

    /// It is there again.
    pub fn is_back(&self) {
        self.tool("nft", &["delete", "table", "inet", "gone"], "");
    }

    /// One of the kernel's counters for this namespace: `TcpExt` or `IpExt`, and its name.
    pub fn counter(&self, group: &'static str, name: &'static str) -> u64 {
        // `/proc/net` is that of the process's first thread.
        let all = self.run(|| std::fs::read_to_string("/proc/thread-self/net/netstat").expect("netstat"));
        let mut lines = all.lines().filter(|line| line.starts_with(group));
        let (names, values) = (lines.next().unwrap_or(""), lines.next().unwrap_or(""));
        let mut both = names.split_whitespace().zip(values.split_whitespace());
        let (_, value) = both.find(|(known, _)| *known == name).expect(name);
        value.parse().expect("a number")
    }

    pub fn sysctl(&self, name: &'static str, value: &'static str) {
        self.run(move || std::fs::write(format!("/proc/sys/net/{name}"), value).expect(name));
    }
}

/// What `job` gives in each network namespace in which this process has shadow sockets.
fn with_shadow_sockets<T: Send + 'static>(job: impl Fn() -> T + Clone + Send + 'static) -> Vec<T> {
    let mut given = vec![];
    for task in std::fs::read_dir("/proc/self/task").expect("threads") {
        let task = task.expect("a thread").path();
        // One that has ended meanwhile has no name.
        if std::fs::read_to_string(task.join("comm")).is_ok_and(|name| name.trim() == "shadow-sockets") {
            let namespace = std::fs::File::open(task.join("ns/net")).expect("its namespace");
            let job = job.clone();
            let done = std::thread::spawn(move || {
                nix::sched::setns(namespace, nix::sched::CloneFlags::CLONE_NEWNET).expect("into it");
                job()
            });
            given.push(done.join().expect("no panic"));
        }
    }
    given
}

/// What `ss` tells of the shadow sockets of this process.
pub fn shadow_sockets() -> String {
    let told = with_shadow_sockets(|| Command::new("ss").args(["-tinH"]).output().expect("ss").stdout);
    String::from_utf8_lossy(&told.concat()).into_owned()
}

/// Sets it where the shadow sockets of this process are.
pub fn set_for_shadow_sockets(name: &'static str, value: &'static str) {
    let set = with_shadow_sockets(move || std::fs::write(format!("/proc/sys/net/{name}"), value));
    assert!(
        set.iter().all(Result::is_ok) && !set.is_empty(),
        "{name}: {set:?}"
    );
}

/// What the host does.
#[derive(Clone)]
pub struct Plan {
    pub limits: Limits,
    pub mtu: u16,
    /// The TUN's packets may be larger than that, and without checksum.
    pub offload: bool,
    /// Deaths, in milliseconds from the start.
    pub kills: Vec<u64>,
}

impl Default for Plan {
    fn default() -> Self {
        Self {
            limits: Limits {
                window_bytes: 4 << 20,
                ..Limits::default()
            },
            mtu: 1500,
            offload: true,
            kills: vec![],
        }
    }
}

pub struct Lab {
    pub vm: Place,
    pub client: Place,
    stop: Arc<AtomicBool>,
    host: Option<JoinHandle<Counts>>,
    deaths: Arc<Mutex<u32>>,
    _one: MutexGuard<'static, ()>,
}

impl Lab {
    /// Starts it; the reason if that cannot be here.
    pub fn start(plan: Plan) -> Result<Self, String> {
        let one = ONE
            .lock()
            .unwrap_or_else(|of_a_failed_test| of_a_failed_test.into_inner());
        let why = |error: std::io::Error| format!("network namespaces and TAPs: {error} (root is needed)");
        let (vm, vm_tap) = Place::new("10.9.0.1", "fd09::1").map_err(why)?;
        let (client, client_tap) = Place::new("10.9.0.2", "fd09::2").map_err(why)?;
        let sockets = Sockets::open(plan.mtu, plan.offload).map_err(|error| error.to_string())?;
        let stop = Arc::new(AtomicBool::new(false));
        let deaths = Arc::new(Mutex::new(0));
        let mut host = Host {
            plan: plan.clone(),
            vm_tap,
            client_tap,
            held: VecDeque::new(),
            epoch: Epoch(1),
            began: Instant::now(),
            random: 0x9e37_79b9 ^ u64::from(std::process::id()),
            deaf: false,
        };
        let (ended, died) = (stop.clone(), deaths.clone());
        let host = std::thread::spawn(move || {
            let driver = Driver::new(plan.limits, sockets);
            host.run(driver, &ended, &died)
        });
        Ok(Self {
            vm,
            client,
            stop,
            host: Some(host),
            deaths,
            _one: one,
        })
    }

    pub fn deaths(&self) -> u32 {
        *self.deaths.lock().expect("no panic in the host")
    }

    /// Ends the host; what it counted since its last death.
    pub fn end(mut self) -> Counts {
        self.stop.store(true, Ordering::Relaxed);
        let host = self.host.take().expect("ended once");
        host.join().expect("the host's thread")
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}

struct Host {
    plan: Plan,
    vm_tap: Tun,
    client_tap: Tun,
    held: VecDeque<(Epoch, Frame)>,
    epoch: Epoch,
    began: Instant,
    random: u64,
    /// The VM is what it was at the last cut: it neither says nor hears anything.
    deaf: bool,
}

impl Ports for Host {
    fn to_vm(&mut self, frame: Frame) {
        if !self.deaf {
            self.vm_tap
                .write(Offload::default(), &frame.bytes)
                .expect("the VM's TAP");
        }
    }

    fn to_client(&mut self, frame: Frame, offload: Offload) {
        self.client_tap
            .write(offload, &frame.bytes)
            .expect("the client's TAP");
    }

    fn hold(&mut self, frame: Frame) {
        self.held.push_back((self.epoch, frame));
    }

    fn lift(&mut self, _key: FlowKey, _ticks: u32, _ends: Ends) {
        unreachable!("nothing is translated here");
    }
}

impl Host {
    fn now(&self) -> u64 {
        self.began.elapsed().as_micros() as u64
    }

    fn within(&mut self, from: u64, to: u64) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        from + self.random % (to - from)
    }

    fn run(&mut self, mut driver: Driver, stop: &AtomicBool, deaths: &Mutex<u32>) -> Counts {
        let mut replica = Replica::new(self.plan.limits);
        let (mut whole, mut cut_at) = (true, 25_000);
        let mut safe: VecDeque<(u64, Epoch)> = VecDeque::new();
        let mut kills: VecDeque<u64> = self.plan.kills.iter().map(|ms| ms * 1000).collect();
        let mut buffer = vec![0; 65536 + Offload::BYTES];
        let mut more = false;
        while !stop.load(Ordering::Relaxed) {
            let next = [Some(cut_at), safe.front().map(|(at, _)| *at), driver.deadline()];
            let next = next.into_iter().flatten().min().unwrap_or(cut_at);
            self.wait(&driver, if more { 0 } else { next });
            let now = self.now();
            self.hear_vm(&mut driver, &mut buffer);
            self.hear_client(&mut driver, &mut buffer);
            more = driver.turn(now, true, self).expect("the TUN");
            driver.flush(now, self).expect("the TUN");
            if now >= cut_at {
                // Drained: the VM's frames so far are of this epoch.
                self.hear_vm(&mut driver, &mut buffer);
                driver.flush(now, self).expect("the TUN");
                let part = driver.cut(now, self.epoch, whole);
                whole = false;
                replica.stage(self.epoch, part).expect("what the primary says");
                safe.push_back((now + self.within(2_000, 60_000), self.epoch));
                let ended = self.epoch;
                self.epoch = ended.next();
                cut_at = now + self.within(25_000, 50_000);
                if kills.front().is_some_and(|at| *at <= now) {
                    kills.pop_front();
                    self.deaf = true;
                    replica.complete(ended);
                    self.release(&mut driver, ended);
                    let dies_at = now + self.within(0, 30_000);
                    while self.now() < dies_at {
                        self.wait(&driver, dies_at);
                        self.hear_client(&mut driver, &mut buffer);
                        driver.turn(self.now(), true, self).expect("the TUN");
                    }
                    drop(driver);
                    self.held.clear();
                    safe.clear();
                    let sockets = Sockets::open(self.plan.mtu, self.plan.offload).expect("sockets again");
                    // What came to nobody meanwhile.
                    while self
                        .client_tap
                        .read(&mut buffer)
                        .expect("the client's TAP")
                        .is_some()
                    {}
                    self.deaf = false;
                    self.epoch = Epoch(ended.0 + 10);
                    let known = std::mem::replace(&mut replica, Replica::new(self.plan.limits));
                    driver = Driver::take_over(self.plan.limits, known, sockets, self.now(), self)
                        .expect("the TUN");
                    whole = true;
                    *deaths.lock().expect("no panic in a test") += 1;
                }
            }
            while let Some((_, epoch)) = safe.front().copied().filter(|(at, _)| *at <= now) {
                safe.pop_front();
                replica.complete(epoch);
                self.release(&mut driver, epoch);
            }
        }
        driver.core().counts()
    }

    fn wait(&self, driver: &Driver, until: u64) {
        let fds = [
            self.client_tap.as_fd(),
            driver.sockets().tun(),
            driver.sockets().events(),
            self.vm_tap.as_fd(),
        ];
        let count = if self.deaf { 3 } else { 4 };
        let mut fds: Vec<PollFd<'_>> = fds[..count]
            .iter()
            .map(|fd| PollFd::new(fd, PollFlags::IN))
            .collect();
        let left = until.saturating_sub(self.now()).min(50_000);
        let timeout = Timespec {
            tv_sec: 0,
            tv_nsec: (left * 1000) as _,
        };
        poll(&mut fds, Some(&timeout)).expect("poll");
    }

    fn release(&mut self, driver: &mut Driver, epoch: Epoch) {
        let now = self.now();
        while let Some((_, frame)) = self.held.pop_front_if_of(epoch) {
            driver.leaves(now, &frame);
            self.to_client(frame, Offload::default());
        }
        driver.released(now, epoch, self).expect("the TUN");
    }

    fn hear_vm(&mut self, driver: &mut Driver, buffer: &mut [u8]) {
        while let Some((_, bytes)) = self.vm_tap.read(buffer).expect("the VM's TAP") {
            let frame = Frame {
                nic: 0,
                bytes: bytes.to_vec().into(),
            };
            driver.vm_sent(self.now(), frame, self).expect("the TUN");
        }
    }

    fn hear_client(&mut self, driver: &mut Driver, buffer: &mut [u8]) {
        while let Some((_, bytes)) = self.client_tap.read(buffer).expect("the client's TAP") {
            let frame = Frame {
                nic: 0,
                bytes: bytes.to_vec().into(),
            };
            driver.client_sent(self.now(), frame, self).expect("the TUN");
        }
    }
}

trait Held {
    fn pop_front_if_of(&mut self, epoch: Epoch) -> Option<(Epoch, Frame)>;
}

impl Held for VecDeque<(Epoch, Frame)> {
    fn pop_front_if_of(&mut self, epoch: Epoch) -> Option<(Epoch, Frame)> {
        match self.front() {
            Some((of, _)) if *of <= epoch => self.pop_front(),
            _ => None,
        }
    }
}
