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
    // The copy goes before it is known why: its owner says so, and drops this.
    let (ending, ends) = self::ending();
    let shared = ending.shared.clone();
    let owner = std::thread::spawn(move || {
        shared.over.store(true, Ordering::SeqCst);
        drop(ends);
    });
    assert!(vm_ended(ending.memory(&Weak::<()>::new())));
    owner.join().expect("its owner");
}
