use super::*;

const LONG: Duration = Duration::from_secs(60);

fn ram() -> RamFile {
    RamFile::new("t", 4 * PAGE_BYTES as u64).expect("memory")
}

#[test]
fn what_was_taken_is_written_to_by_nobody_else() {
    let held = HeldMemory::default();
    let number = held.keep("v", ram(), LONG).expect("room");
    let write = |ram: &RamFile| ram.write_page(1, &[7; PAGE_BYTES]);
    assert!(matches!(held.write("v", number, LONG, write), Some(Ok(()))));
    let taken = held.take("v").expect("held");
    let map = taken.into_ram().populated().expect("a map");
    assert!(map.contains(1));
    assert!(held.write("v", number, LONG, write).is_none(), "it is taken");
    // Another one of the same VM is another one.
    held.keep("v", ram(), LONG).expect("room");
    assert!(held.write("v", number, LONG, write).is_none(), "its time is over");
}

/// What is looked at is the same file. Once it is a machine's, no checkpoint is made of it, by who looked at it before either.
#[test]
fn a_checkpoint_that_begins_goes_on_with_what_is_held_and_not_with_what_was_taken() {
    let held = HeldMemory::default();
    let bytes = 4 * PAGE_BYTES as u64;
    let (file, first) = held.begin("v", bytes, LONG).expect("room");
    let write = |page| move |ram: &RamFile| ram.write_page(page, &[7; PAGE_BYTES]);
    assert!(matches!(held.write("v", first, LONG, write(1)), Some(Ok(()))));
    assert!(file.populated().expect("a map").contains(1));
    let (file, second) = held.begin("v", bytes, LONG).expect("room");
    assert!(file.populated().expect("a map").contains(1), "it is gone on with");
    assert!(
        held.write("v", first, LONG, write(2)).is_none(),
        "by one at a time"
    );
    assert!(matches!(held.write("v", second, LONG, write(2)), Some(Ok(()))));
    let (file, _) = held.begin("v", 2 * bytes, LONG).expect("room");
    assert_eq!(
        file.populated().expect("a map").count(),
        0,
        "it is of another size"
    );

    let taken = held.take("v").expect("held");
    let (file, third) = held.begin("v", 2 * bytes, LONG).expect("room");
    assert!(matches!(held.write("v", third, LONG, write(3)), Some(Ok(()))));
    assert!(file.populated().expect("a map").contains(3));
    assert_eq!(taken.bytes(), 0, "nobody else writes to it");
}

/// It is taken while its feeder writes: the machine gets it when that is done.
#[test]
fn nobody_writes_into_what_a_machine_has() {
    let held = Arc::new(HeldMemory::default());
    let (_, number) = held.begin("v", 4 * PAGE_BYTES as u64, LONG).expect("room");
    let (begun, begins) = std::sync::mpsc::channel();
    let (goes_on, waits) = std::sync::mpsc::channel();
    let feeder = {
        let held = held.clone();
        std::thread::spawn(move || {
            held.write("v", number, LONG, |ram| {
                let _ = begun.send(());
                let waited = waits.recv_timeout(Duration::from_secs(10));
                waited.map_err(io::Error::other)?;
                std::thread::sleep(Duration::from_millis(100));
                ram.write_page(1, &[7; PAGE_BYTES])
            })
        })
    };
    begins.recv().expect("it writes");
    // Others have their turn meanwhile (invariant 4), or it waits in vain.
    held.keep("w", ram(), LONG).expect("room");
    held.forget("w");
    let _ = goes_on.send(());
    let taken = held.take("v").expect("held");
    assert!(taken.bytes() > 0, "the write had ended");
    assert!(matches!(feeder.join(), Ok(Some(Ok(())))));
}

#[test]
fn what_no_machine_was_made_of_is_held_on() {
    let held = HeldMemory::default();
    let full = ram();
    full.write_page(1, &[7; PAGE_BYTES]).expect("room");
    held.keep("v", full, LONG).expect("room");
    let taken = held.take("v").expect("held");
    held.give_back("v", taken);
    assert!(held.bytes() > 0);
    held.expire(Instant::now() + LONG / 2);
    assert!(held.holds("v"), "for as long as before");
    let taken = held.take("v").expect("held");
    held.keep("v", ram(), 2 * LONG).expect("room");
    held.give_back("v", taken);
    assert_eq!(held.bytes(), 0, "there is a newer one");
    held.expire(Instant::now() + LONG);
    assert!(held.holds("v"));
}

#[test]
fn what_is_held_gives_way_to_what_runs() {
    let held = HeldMemory::default();
    held.keep("late", ram(), 2 * LONG).expect("room");
    held.keep("soon", ram(), LONG).expect("room");
    held.give_way(|| LEFT_ALONE_BYTES);
    assert!(held.holds("soon") && held.holds("late"));
    let looks = std::cell::Cell::new(0);
    held.give_way(|| {
        looks.set(looks.get() + 1);
        LEFT_ALONE_BYTES - u64::from(looks.get() == 1)
    });
    assert!(!held.holds("soon") && held.holds("late"));
}

#[test]
fn everything_has_its_time() {
    let held = HeldMemory::default();
    let number = held.keep("v", ram(), Duration::ZERO).expect("room");
    held.keep("w", ram(), LONG).expect("room");
    assert!(
        held.write("v", number, LONG, |_| Ok(())).is_some(),
        "it begins anew"
    );
    let now = Instant::now();
    held.expire(now);
    assert!(held.holds("v") && held.holds("w"));
    held.expire(now + 2 * LONG);
    assert!(!held.holds("v") && !held.holds("w"));
}

#[test]
fn a_vm_that_is_to_run_here_gets_the_room() {
    let held = HeldMemory::default();
    for (vm, duration) in [("late", 2 * LONG), ("soon", LONG), ("own", LONG / 2)] {
        let full = ram();
        (0..4).for_each(|page| full.write_page(page, &[7; PAGE_BYTES]).expect("room"));
        held.keep(vm, full, duration).expect("room");
    }
    assert_eq!(held.unfilled_bytes(), 0, "they are full");
    let each = held.bytes() / 3;
    assert!(each >= 4 * PAGE_BYTES as u64);
    // A host with nothing left but what is held here.
    let available = std::cell::Cell::new(0);
    let looks = || available.replace(available.get() + each);
    held.make_room("own", each, looks);
    assert_eq!(held.bytes(), 3 * each, "its own is enough");
    available.set(0);
    held.make_room("own", 2 * each, looks);
    assert!(!held.holds("soon") && held.holds("late") && held.holds("own"));
    held.make_room("another", u64::MAX / 2, || 0);
    assert_eq!(held.bytes(), 0, "it gives all that there is");
}

#[test]
fn there_are_so_many_vms_and_no_more() {
    let held = HeldMemory::default();
    for vm in 0..MOST_VMS {
        held.keep(&vm.to_string(), ram(), LONG).expect("room");
    }
    assert!(held.keep("v", ram(), LONG).is_err());
    assert!(held.keep("7", ram(), LONG).is_ok(), "in place of the one before");
}
