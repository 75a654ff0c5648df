//! The agreed clock as a program reads it: a page that its copy's host sets, and the vDSO's entries that lead to it.
//!
//! Decides:    nothing.
//! Flow:       keeper: `/dev/clock` of the copy's view -> the program, at its start: mapped, and the vDSO's entries become jumps into it
//!             (`inside::clock`) -> host: `Page::set`. A copy that was brought here by CRIU has the mapping, and a vDSO of its own kernel: `lead`.
//!             For agreed chance the vDSO's own is switched off.
//! Invariants: 1. each clock is one aligned word: whoever reads it while it is set has the old one or the new one; 2. nobody maps the file here: a
//!             program that is root may cut it short, and whoever has it mapped would die of that; 3. the mapping is at the same place in every process.
//! Source:     vdso(7); Linux, arch/x86/entry/vdso/vdso.lds.S for the entries. Not here: what time it is (`dunlin_core::program::time`), who makes
//!             the system call itself.

use crate::proc::text;
use dunlin_core::agreed::AgreedTime;
use object::{Object, ObjectSymbol};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// Where it lies in a copy's view.
pub(crate) const FILE: &str = "/dev/clock";
/// Where it lies in every process of a copy: between where executables lie and where the kernel puts what has no place of its own.
pub(crate) const AT: u64 = 0x6e00_0000_0000;
/// How long it is.
pub(crate) const BYTES: usize = 2 * CODE;
/// Where the code begins; the clocks are at the beginning, the monotonic one first.
const CODE: usize = 4096;
/// `movabs $..., %rax; jmp *%rax`.
const JUMP_BYTES: usize = 12;
/// No vDSO is longer.
const MOST_VDSO_BYTES: u64 = 1 << 20;

// What no clock of the machine's is, such as a thread's own, the kernel answers as ever.
core::arch::global_asm!(
    r#"
    .pushsection .rodata.dunlin_clock, "a"
    .balign 4096
    .global dunlin_clock_page
dunlin_clock_page:
5:  .quad 0                         # CLOCK_MONOTONIC in nanoseconds
6:  .quad 0                         # CLOCK_REALTIME in nanoseconds
    .balign 4096
    .global dunlin_clock_gettime
dunlin_clock_gettime:
    cmp edi, 11
    ja 4f
    mov eax, 1
    mov ecx, edi
    shl eax, cl
    test eax, 0xd2                  # MONOTONIC, MONOTONIC_RAW, MONOTONIC_COARSE, BOOTTIME
    jnz 2f
    test eax, 0x821                 # REALTIME, REALTIME_COARSE, TAI
    jz 4f
    mov rax, [rip + 6b]
    jmp 3f
2:  mov rax, [rip + 5b]
3:  xor edx, edx
    mov ecx, 1000000000
    div rcx
    mov [rsi], rax
    mov [rsi + 8], rdx
    xor eax, eax
    ret
4:  mov eax, 228
    syscall
    ret
    .global dunlin_clock_gettimeofday
dunlin_clock_gettimeofday:
    test rdi, rdi
    jz 2f
    mov rax, [rip + 6b]
    xor edx, edx
    mov ecx, 1000000000
    div rcx
    mov [rdi], rax
    mov rax, rdx
    xor edx, edx
    mov ecx, 1000
    div rcx
    mov [rdi + 8], rax
2:  test rsi, rsi
    jz 3f
    mov qword ptr [rsi], 0          # no time zone
3:  xor eax, eax
    ret
    .global dunlin_clock_time
dunlin_clock_time:
    mov rax, [rip + 6b]
    xor edx, edx
    mov ecx, 1000000000
    div rcx
    test rdi, rdi
    jz 2f
    mov [rdi], rax
2:  ret
    .global dunlin_no_getrandom
dunlin_no_getrandom:
    mov rax, -38                    # ENOSYS: whoever asked makes the system call
    ret
    .balign 4096
    .popsection
    "#
);

#[allow(unsafe_code, reason = "names of the bytes above")]
unsafe extern "C" {
    static dunlin_clock_page: u8;
    static dunlin_clock_gettime: u8;
    static dunlin_clock_gettimeofday: u8;
    static dunlin_clock_time: u8;
    static dunlin_no_getrandom: u8;
}

/// The file's bytes, with clocks that were not set.
fn image() -> &'static [u8] {
    // SAFETY: so many bytes lie there, and nobody changes them.
    unsafe { std::slice::from_raw_parts(&raw const dunlin_clock_page, BYTES) }
}

/// Makes it.
pub(crate) fn make(file: &File) -> io::Result<()> {
    file.write_all_at(image(), 0)
}

/// What of the vDSO leads to the page.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Leads {
    /// The clock's entries.
    pub clock: bool,
    /// The one for chance, where this kernel has it.
    pub chance: bool,
}

/// A copy's clock, from outside.
#[derive(Debug)]
pub struct Page(File);

impl Page {
    pub(crate) fn new(file: File) -> Self {
        Self(file)
    }

    /// It is that time for the copy from now on.
    ///
    /// # Errors
    /// Where there is no memory.
    pub fn set(&self, time: AgreedTime) -> io::Result<()> {
        // Invariant 1: the kernel copies words.
        self.0.write_all_at(&time.monotonic_ns.to_ne_bytes(), 0)?;
        self.0.write_all_at(&time.wall_ns.to_ne_bytes(), 8)
    }
}

/// What is to be written into a vDSO: where, from its beginning, and what.
pub(crate) type Jumps = Vec<(u64, [u8; JUMP_BYTES])>;

/// What this host's kernel lacks for agreed time or chance.
#[derive(Debug, thiserror::Error)]
pub enum PageError {
    /// Its processes have no vDSO.
    #[error("this kernel gives its processes no vDSO: clock = \"own\" does without")]
    NoVdso,
    /// Where the vDSO is cannot be read.
    #[error("the vDSO: {0}")]
    Unread(io::Error),
    /// The vDSO is somewhere else.
    #[error("the vDSO is not where the kernel says that it is")]
    NotThere,
    /// The vDSO is no executable.
    #[error("the vDSO: {0}")]
    Unknown(object::Error),
    /// An entry is missing, or too short for a jump.
    #[error("this kernel's vDSO has no {0} that is long enough: clock = \"own\" does without")]
    NoEntry(&'static str),
    /// Whose processes are whose is not told.
    #[error("this kernel does not tell a process' children (CONFIG_PROC_CHILDREN)")]
    NoChildren,
}

/// Whether this host's kernel has what agreed time or chance needs.
///
/// # Errors
/// What is missing.
pub fn can(leads: Leads) -> Result<(), PageError> {
    jumps(leads)?;
    match Path::new("/proc/thread-self/children").exists() {
        true => Ok(()),
        false => Err(PageError::NoChildren),
    }
}

/// Of this kernel's vDSO, which is the same in every process.
pub(crate) fn jumps(leads: Leads) -> Result<Jumps, PageError> {
    // SAFETY: a plain call.
    let at = unsafe { libc::getauxval(libc::AT_SYSINFO_EHDR) };
    if at == 0 {
        return Err(PageError::NoVdso);
    }
    let length = mapped("self", "[vdso]")
        .map_err(PageError::Unread)?
        .into_iter()
        .find(|(from, _)| *from == at)
        .map_or(0, |(from, to)| to - from);
    if length == 0 || length > MOST_VDSO_BYTES {
        return Err(PageError::NotThere);
    }
    // SAFETY: it is mapped there, readable, as long as this process lives.
    let vdso = unsafe { std::slice::from_raw_parts(at as *const u8, length as usize) };
    leading(vdso, leads)
}

fn leading(vdso: &[u8], leads: Leads) -> Result<Jumps, PageError> {
    let vdso = object::File::parse(vdso).map_err(PageError::Unknown)?;
    let entries = [
        ("__vdso_clock_gettime", &raw const dunlin_clock_gettime),
        ("__vdso_gettimeofday", &raw const dunlin_clock_gettimeofday),
        ("__vdso_time", &raw const dunlin_clock_time),
    ];
    let find = |name| {
        vdso.dynamic_symbols()
            .find(move |symbol| symbol.name() == Ok(name))
    };
    // Not every kernel's vDSO has it.
    let chance = ("__vdso_getrandom", &raw const dunlin_no_getrandom);
    let chance = (leads.chance && find(chance.0).is_some()).then_some(chance);
    let jump = |(name, to): (&'static str, *const u8)| {
        let symbol = find(name);
        let symbol = symbol.filter(|symbol| symbol.size() >= JUMP_BYTES as u64);
        let begins = symbol.ok_or(PageError::NoEntry(name))?.address();
        // SAFETY: both are names of bytes in one piece.
        let place = unsafe { to.offset_from(&raw const dunlin_clock_page) } as u64;
        let mut code = [0x48, 0xb8, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xe0];
        code[2..10].copy_from_slice(&(AT + place).to_le_bytes());
        Ok((begins, code))
    };
    let entries = entries.into_iter().filter(|_| leads.clock);
    entries.chain(chance).map(jump).collect()
}

/// Whether a process has it.
pub(crate) fn is_in(process: u32) -> io::Result<bool> {
    Ok(mapped(&process.to_string(), FILE)?
        .iter()
        .any(|(from, _)| *from == AT))
}

/// Leads the clock of a process that stands still, and was brought here with the page, to it. False where it has no page.
pub(crate) fn lead(process: u32, jumps: &Jumps) -> io::Result<bool> {
    if !is_in(process)? {
        return Ok(false);
    }
    let process = process.to_string();
    let memory = File::options().write(true).open(format!("/proc/{process}/mem"))?;
    for (vdso, _) in mapped(&process, "[vdso]")? {
        for (at, code) in jumps {
            memory.write_all_at(code, vdso + at)?;
        }
    }
    Ok(true)
}

/// Where a process has what is called so.
fn mapped(process: &str, name: &str) -> io::Result<Vec<(u64, u64)>> {
    let maps = text(format!("/proc/{process}/maps"))?;
    let of = |line: &str| {
        let (range, rest) = line.split_once(' ')?;
        let (from, to) = range.split_once('-')?;
        let parse = |text| u64::from_str_radix(text, 16).ok();
        (rest.split_whitespace().nth(4) == Some(name)).then_some((parse(from)?, parse(to)?))
    };
    Ok(maps.lines().filter_map(of).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsRawFd;

    #[test]
    fn this_kernels_vdso_has_all_entries_that_tell_the_time() {
        let leads = |clock, chance| jumps(Leads { clock, chance }).expect("a vDSO");
        assert!(leads(false, true).len() <= 1, "if it has one");
        let jumps = leads(true, false);
        assert_eq!(jumps.len(), 3);
        for (_, code) in jumps {
            let to = u64::from_le_bytes(code[2..10].try_into().expect("eight"));
            assert!((AT + CODE as u64..AT + BYTES as u64).contains(&to), "{to:x}");
        }
    }

    /// The code itself, called where it is mapped, for every clock that a program may ask for.
    #[test]
    fn each_clock_of_the_machine_is_the_pages_and_a_threads_own_is_the_kernels() {
        let file = tempfile::tempfile().expect("a file");
        make(&file).expect("written");
        let flags = libc::MAP_SHARED;
        let prot = libc::PROT_READ | libc::PROT_EXEC;
        // SAFETY: a new mapping of a file that stays as long as this test.
        let at = unsafe { libc::mmap(std::ptr::null_mut(), BYTES, prot, flags, file.as_raw_fd(), 0) };
        assert_ne!(at, libc::MAP_FAILED);
        let page = Page::new(file.try_clone().expect("a descriptor"));
        let time = AgreedTime {
            monotonic_ns: 7_000_000_123,
            wall_ns: 1_700_000_000_987_654_321,
        };
        page.set(time).expect("set");
        let code = |of: *const u8| {
            // SAFETY: both are names of bytes in one piece, which is mapped at `at`.
            unsafe {
                at.cast::<u8>()
                    .offset(of.offset_from(&raw const dunlin_clock_page))
            }
        };
        // SAFETY: the code there is a function of that kind.
        let gettime: extern "C" fn(libc::clockid_t, *mut libc::timespec) -> i32 =
            unsafe { std::mem::transmute(code(&raw const dunlin_clock_gettime)) };
        let mut said = libc::timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        for clock in [1, 4, 6, 7] {
            assert_eq!(gettime(clock, &raw mut said), 0);
            assert_eq!((said.tv_sec, said.tv_nsec), (7, 123), "{clock}");
        }
        for clock in [0, 5, 11] {
            assert_eq!(gettime(clock, &raw mut said), 0);
            assert_eq!(
                (said.tv_sec, said.tv_nsec),
                (1_700_000_000, 987_654_321),
                "{clock}"
            );
        }
        for clock in [libc::CLOCK_THREAD_CPUTIME_ID, libc::CLOCK_PROCESS_CPUTIME_ID] {
            assert_eq!(gettime(clock, &raw mut said), 0);
            assert!(said.tv_sec < 1_000_000, "{clock}: its own work");
        }
        assert_eq!(gettime(99, &raw mut said), -libc::EINVAL);
        // SAFETY: the code there is a function of that kind.
        let gettimeofday: extern "C" fn(*mut libc::timeval, *mut u64) -> i32 =
            unsafe { std::mem::transmute(code(&raw const dunlin_clock_gettimeofday)) };
        let mut of_day = libc::timeval {
            tv_sec: 0,
            tv_usec: 0,
        };
        let mut zone = u64::MAX;
        assert_eq!(gettimeofday(&raw mut of_day, &raw mut zone), 0);
        assert_eq!((of_day.tv_sec, of_day.tv_usec, zone), (1_700_000_000, 987_654, 0));
        assert_eq!(gettimeofday(std::ptr::null_mut(), std::ptr::null_mut()), 0);
        // SAFETY: the code there is a function of that kind.
        let time: extern "C" fn(*mut i64) -> i64 =
            unsafe { std::mem::transmute(code(&raw const dunlin_clock_time)) };
        let mut seconds = 0;
        assert_eq!((time(&raw mut seconds), seconds), (1_700_000_000, 1_700_000_000));
        assert_eq!(time(std::ptr::null_mut()), 1_700_000_000);
    }
}
