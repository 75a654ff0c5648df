//! The standby's side: holds what it is sent.

use super::{PATIENCE, Terms, send};
use crate::vm::held_memory::{self, HeldMemory, LEFT_ALONE_BYTES, Number};
use crate::vm::session::Broken;
use crate::vm::session::reader::Reader;
use dunlin_core::replica::sync::PAGES_AT_ONCE;
use dunlin_core::sync::compare::PAGE_BYTES;
use dunlin_core::sync::dirty::PageSet;
use dunlin_core::sync::staging::PageDelta;
use dunlin_core::wire::sync::SyncMessage;
use dunlin_fabric::link::{Hello, Stream, WriteHalf};
use dunlin_guest::memory::RamFile;
use dunlin_guest::probe::memory_available_bytes;
use std::io;

/// Why a host does not hold a VM's memory.
#[derive(Debug, thiserror::Error)]
enum NotHeld {
    #[error("it has a part in the VM itself")]
    HasPart,
    #[error(
        "no room for a checkpoint: {available_mib} MiB of memory are available, {needed_mib} MiB are needed"
    )]
    NoRoom { available_mib: u64, needed_mib: u64 },
    #[error(transparent)]
    None(#[from] held_memory::NotHeld),
}

/// Until the stream ends, or what was held of the VM has become a VM's. `has_part` says whether this host has a part in a VM.
pub fn receive(held: &HeldMemory, hello: &Hello, stream: Stream, has_part: &dyn Fn(&str) -> bool) {
    if let Err(Broken(why)) = receive_all(held, hello, stream, has_part) {
        tracing::info!(
            vm = hello.vm,
            from = hello.from,
            "a checkpoint is fed no more: {why}"
        );
    }
}

fn receive_all(
    held: &HeldMemory,
    hello: &Hello,
    stream: Stream,
    has_part: &dyn Fn(&str) -> bool,
) -> Result<(), Broken> {
    let broken = |error: io::Error| Broken::new("the checkpoint's stream", error);
    let terms = Terms::decode(&hello.extra).ok_or_else(|| Broken("it does not say for how long".into()))?;
    // A round takes as long as it takes, but it says something in that time.
    let silence = terms.every * 2 + PATIENCE;
    stream.set_read_timeout(Some(silence)).map_err(broken)?;
    stream.set_write_timeout(Some(PATIENCE)).map_err(broken)?;
    let (half, mut writer) = stream.split();
    let mut reader = Reader::new(half);
    let SyncMessage::Join { pages, .. } = reader.wait()? else {
        return Err(Broken("it begins otherwise".into()));
    };
    let (ram, number) = match begin(held, &hello.vm, u64::from(pages), terms, has_part) {
        Ok(begun) => begun,
        Err(why) => {
            let why = why.to_string();
            send(&mut writer, &SyncMessage::Refused { why: why.clone() })?;
            return Err(Broken(why));
        }
    };
    say_held(&ram, &mut writer)?;
    drop(ram);
    send(&mut writer, &SyncMessage::JoinReady)?;
    loop {
        match reader.wait()? {
            SyncMessage::Pages(deltas) => write(held, hello, number, terms, pages, &deltas)?,
            SyncMessage::JoinLast { epoch } => {
                // A round in which nothing has changed is one, too.
                write(held, hello, number, terms, pages, &[])?;
                send(&mut writer, &SyncMessage::Staged { epoch })?;
            }
            // The VM has ended: there will be no copy of it.
            SyncMessage::Refused { .. } => {
                held.end(&hello.vm, number);
                return Ok(());
            }
            other => return Err(Broken(format!("{} is not due", other.name()))),
        }
    }
}

/// What is here of that VM is gone on with, if it is of that size. It is held first and judged then: of several that begin at once each counts what the
/// others may still take, and a part in the VM that this host gets meanwhile finds the checkpoint.
fn begin(
    held: &HeldMemory,
    vm: &str,
    pages: u64,
    terms: Terms,
    has_part: &dyn Fn(&str) -> bool,
) -> Result<(RamFile, Number), NotHeld> {
    if has_part(vm) {
        // What is held of a copy that has ended here is for the next one, as it is.
        return Err(NotHeld::HasPart);
    }
    let (ram, number) = held.begin(vm, pages * PAGE_BYTES as u64, terms.held)?;
    let needed_bytes = held
        .unfilled_bytes()
        .saturating_add(held.promised.unfilled_bytes())
        .saturating_add(LEFT_ALONE_BYTES);
    let available_bytes = memory_available_bytes();
    if available_bytes < needed_bytes {
        held.end(vm, number);
        return Err(NotHeld::NoRoom {
            available_mib: available_bytes >> 20,
            needed_mib: needed_bytes >> 20,
        });
    }
    Ok((ram, number))
}

/// Whoever feeds it need not send that again.
fn say_held(ram: &RamFile, writer: &mut WriteHalf) -> Result<(), Broken> {
    let broken = |error: io::Error| Broken::new("reading what is held", error);
    let populated = ram.populated().map_err(broken)?;
    let populated = PageSet::from_runs(populated.iter().map(|page| (page as u32, 1)));
    for pages in populated.parts(PAGES_AT_ONCE) {
        let hashes = ram.hash_pages(pages.pages().map(u64::from)).map_err(broken)?;
        send(writer, &SyncMessage::Holds { pages, hashes })?;
    }
    Ok(())
}

fn write(
    held: &HeldMemory,
    hello: &Hello,
    number: Number,
    terms: Terms,
    pages: u32,
    deltas: &[PageDelta],
) -> Result<(), Broken> {
    let fits = |delta: &PageDelta| delta.at.page < pages && delta.bytes.len() == PAGE_BYTES;
    if !deltas.iter().all(fits) {
        return Err(Broken("a page that is none of the VM's".into()));
    }
    let write_all = |ram: &RamFile| {
        let mut deltas = deltas.iter();
        deltas.try_for_each(|delta| ram.write_page(u64::from(delta.at.page), &delta.bytes))
    };
    match held.write(&hello.vm, number, terms.held, write_all) {
        Some(written) => written.map_err(|error| Broken::new("writing the checkpoint", error)),
        None => Err(Broken("it is a VM's now, or its time is over".into())),
    }
}
