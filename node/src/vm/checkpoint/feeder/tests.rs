use super::*;

fn ending() -> (Ending, Sender<Infallible>) {
    let (ends, endings) = bounded(1);
    let shared = Arc::default();
    (Ending { shared, endings }, ends)
}

fn vm_ended<T>(over: Result<T, Over>) -> bool {
    match over {
        Err(Over::Dropped { vm_ended }) => vm_ended,
        Err(Over::Broken(Broken(why))) => panic!("{why}"),
        Ok(_) => panic!("it goes on"),
    }
}

/// Its loop ends the machine, forgets the VM and its handle with it: the daemon may never look in between.
#[test]
fn a_feeder_that_is_dropped_knows_whether_the_vm_has_ended() {
    for is_over in [true, false] {
        let (ending, ends) = ending();
        assert!(ending.rest(Duration::ZERO).is_ok(), "it goes on");
        ending.shared.over.store(is_over, Ordering::SeqCst);
        drop(ends);
        assert_eq!(vm_ended(ending.rest(Duration::from_secs(60))), is_over);
    }
}

#[test]
fn a_feeder_whose_copy_has_gone_knows_whether_the_vm_has_ended() {
    let (ending, _ends) = ending();
    let memory = Arc::new(());
    assert!(ending.memory(&Arc::downgrade(&memory)).is_ok());
    ending.shared.over.store(true, Ordering::SeqCst);
    assert!(vm_ended(ending.memory(&Weak::<()>::new())));
    // The copy goes a moment before it is known why.
    let (ending, ends) = ending_and_soon_over();
    assert!(vm_ended(ending.memory(&Weak::<()>::new())));
    drop(ends);
}

fn ending_and_soon_over() -> (Ending, Sender<Infallible>) {
    let (ending, ends) = ending();
    let shared = ending.shared.clone();
    std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(100));
        shared.over.store(true, Ordering::SeqCst);
    });
    (ending, ends)
}
