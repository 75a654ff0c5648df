//! Whether a guest runs under an accelerator as the tests need it: it boots, it is saved, and it is loaded in place, again and again.
//!
//! * **Decides:** that. **Flow:** [`super::choose`] -> two QEMUs, no network, no consensus -> a sentence or an error.
//! * **Invariants:** each load is seen to have brought a guest that answers.
//! * **Not here:** the order of a sync (`guest/`), faults (`scenario`).

use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use dunlin_api::files;
use dunlin_guest::frames::FramePort;
use dunlin_guest::{Accel, NicSpec, PAGE_BYTES, Ports, Qemu, Start, VmSpec};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use crate::image::GuestImage;

/// Loads in place. A guest that cannot be loaded has died by then.
const LOADS: u32 = 10;
/// The firmware alone takes several seconds where it is interpreted.
const BOOT: Duration = Duration::from_secs(90);
const ANSWER: Duration = Duration::from_secs(10);
const OURS: [u8; 6] = [0x52, 0x54, 0, 0x77, 0, 1];

pub(super) struct Vm {
    pub(super) qemu: Qemu,
    frames: FramePort,
}

impl Vm {
    pub(super) fn start(spec: &VmSpec, how: Start) -> Result<Vm> {
        let (frames, theirs) = FramePort::pair(spec.nic_backend)?;
        let ports = Ports {
            frames: vec![theirs],
            ram_writers: frames.ram_writer().into_iter().collect(),
            nbd: vec![],
            ram: None,
        };
        let qemu = Qemu::start(spec, how, ports)?;
        Ok(Vm { qemu, frames })
    }

    /// The guest says who has its address.
    fn answers(&mut self, who: &str) -> Result<()> {
        let deadline = Instant::now() + ANSWER;
        let mut answered = false;
        while !answered {
            if Instant::now() > deadline {
                bail!("{who} does not answer; its console: {}", self.last_words());
            }
            self.frames.queue(&who_has_the_guest());
            self.frames.flush()?;
            let mut waited = [PollFd::new(self.frames.as_fd(), PollFlags::POLLIN)];
            poll(&mut waited, PollTimeout::from(100u8))?;
            let is_answer = |frame: &[u8]| frame.starts_with(&OURS) && frame[12..14] == [8, 6];
            self.frames.read(|frame| answered |= is_answer(frame))?;
        }
        Ok(())
    }

    fn last_words(&self) -> String {
        let text = self.qemu.console().text();
        let lines: Vec<&str> = text.lines().rev().take(3).collect();
        format!(
            "{:?}, QEMU: {:?}",
            lines.join(" / "),
            self.qemu.stderr().text().trim()
        )
    }
}

/// The VM of a probe.
pub(super) fn spec(image: &GuestImage) -> VmSpec {
    let preload = match &image.runs_under {
        super::RunsUnder::Assisted(assisted) => assisted.preload.as_path(),
        _ => std::path::Path::new(""),
    };
    let table = image.runs_under.table(128, preload);
    VmSpec {
        accel: match table.accel {
            files::Accel::Auto => Accel::Auto,
            files::Accel::Kvm => Accel::Kvm,
            files::Accel::Tcg => Accel::Tcg,
        },
        cpu: table.cpu,
        preload: table.preload,
        run_as: table.run_as,
        kernel: Some(image.kernel.clone()),
        initrd: Some(image.initrd.clone()),
        append: Some(image.append.clone()),
        nics: vec![NicSpec {
            mac: "52:54:00:77:00:02".to_owned(),
            bridge: None,
            tap: None,
            promiscuous: false,
        }],
        ..VmSpec::new("probe", table.memory_mib)
    }
}

/// Runs it; the answer is what was seen.
pub fn run(image: &GuestImage) -> Result<String> {
    let spec = spec(image);
    let begun = Instant::now();
    let mut primary = Vm::start(&spec, Start::Boot)?;
    let ready = "starting redis";
    if !primary.qemu.console().wait_for(ready, BOOT) {
        bail!("a guest does not boot within {BOOT:?}: {}", primary.last_words());
    }
    primary.answers("a booted guest")?;
    let booted = begun.elapsed();
    let mut backup = Vm::start(&spec, Start::Incoming)?;
    let mut colo = backup
        .qemu
        .take_colo()
        .context("an incoming VM has a COLO port")?;

    primary.qemu.stop()?;
    let state = primary.qemu.save_state(true)?;
    copy(&primary.qemu, &backup.qemu)?;
    colo.enable(&state)?;
    for load in 0..LOADS {
        primary.qemu.cont()?;
        primary.answers("the primary")?;
        backup.answers(&format!("the backup after {load} loads in place"))?;
        colo.request()?;
        primary.qemu.stop()?;
        let state = primary.qemu.save_state(false)?;
        let write = || copy(&primary.qemu, &backup.qemu).map_err(std::io::Error::other);
        colo.load(&state, write)?;
    }
    primary.qemu.kill()?;
    colo.failover()?;
    backup.answers("the backup that took over")?;
    Ok(format!(
        "a guest booted in {:.1} s, was saved and loaded {} times, and answers after a take-over",
        booted.as_secs_f64(),
        LOADS + 1
    ))
}

/// All that differs.
pub(super) fn copy(from: &Qemu, to: &Qemu) -> Result<()> {
    let mut pages = from.memory().populated()?;
    pages.unite(&to.memory().populated()?);
    let (mut new, mut old) = ([0; PAGE_BYTES], [0; PAGE_BYTES]);
    for page in pages.iter() {
        from.memory().copy_page(page, &mut new);
        to.memory().copy_page(page, &mut old);
        if new != old {
            to.memory().write_page(page, &new);
        }
    }
    Ok(())
}

fn who_has_the_guest() -> Vec<u8> {
    let mut frame = [&[0xff; 6][..], &OURS, &[8, 6, 0, 1, 8, 0, 6, 4, 0, 1]].concat();
    frame.extend([&OURS[..], &[10, 77, 0, 1], &[0; 6], &[10, 77, 0, 10]].concat());
    frame
}
