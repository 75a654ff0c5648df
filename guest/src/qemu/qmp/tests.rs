//! A QEMU that answers as it should, late, or not at all.

use super::*;
use std::io::{BufRead, BufReader, Write};
use std::sync::mpsc;

const GREETING: &str = "{\"QMP\": {\"version\": {\"qemu\": {\"micro\": 22, \"minor\": 2, \"major\": 7}, \"package\": \"Debian\"}, \"capabilities\": []}}\r\n";

/// A QEMU that answers each line it gets with the next text of the script.
fn scripted(script: &'static [&'static str]) -> UnixStream {
    let (ours, theirs) = UnixStream::pair().unwrap();
    std::thread::spawn(move || {
        let mut lines = BufReader::new(theirs.try_clone().unwrap()).lines();
        (&theirs).write_all(GREETING.as_bytes()).unwrap();
        for text in script {
            lines.next();
            (&theirs).write_all(text.as_bytes()).unwrap();
        }
    });
    ours
}

#[test]
fn events_beside_answers_are_kept_and_an_unknown_one_harms_nothing() {
    let ours = scripted(&[
        "{\"return\": {}, \"id\": 1}\r\n",
        "{\"event\": \"STOP\"}\r\n{\"event\": \"FROM_THE_FUTURE\", \"data\": {\"x\": 1}}\r\n{\"return\": {\"a\": 5}, \"id\": 2}\r\n{\"event\": \"SHUTDOWN\", \"data\": {\"guest\": true, \"reason\": \"guest-shutdown\"}}\r\n",
    ]);
    let (qmp, version) = Qmp::handshake(ours, PATIENCE).unwrap();
    assert_eq!(version, "7.2.22 Debian");
    assert_eq!(qmp.execute("stop", Value::Null).unwrap()["a"], 5);
    let mut events = vec![];
    while let Ok(more) = qmp.poll_events() {
        events.extend(more);
    }
    let shutdown = QemuEvent::Shutdown {
        guest: true,
        reason: "guest-shutdown".into(),
    };
    assert_eq!(
        events,
        [
            QemuEvent::Stop,
            QemuEvent::Other("FROM_THE_FUTURE".into()),
            shutdown
        ]
    );
    assert!(matches!(qmp.poll_events(), Err(QmpError::Closed)));
    assert!(matches!(qmp.execute("cont", Value::Null), Err(QmpError::Closed)));
}

#[test]
fn events_that_nobody_asks_for_are_bounded_and_a_shutdown_outlasts_the_rest() {
    let (ours, _theirs) = UnixStream::pair().unwrap();
    let mut connection = Connection {
        stream: ours,
        unread: vec![],
        events: VecDeque::new(),
        next_id: 0,
        closed: false,
    };
    connection.queue_event(&json!({"event": "SHUTDOWN", "data": {"guest": true, "reason": "r"}}));
    for _ in 0..3 * MOST_EVENTS {
        connection.queue_event(&json!({"event": "STOP"}));
        connection.queue_event(&json!({"event": "RESUME"}));
        assert!(connection.events.len() <= MOST_EVENTS, "it grows without bound");
    }
    assert!(matches!(
        connection.events[0],
        QemuEvent::Shutdown { guest: true, .. }
    ));
    assert_eq!(
        connection.events.back(),
        Some(&QemuEvent::Resume),
        "the newest is kept"
    );
    for _ in 0..2 * MOST_EVENTS {
        connection.queue_event(&json!({"event": "GUEST_PANICKED"}));
    }
    assert_eq!(connection.events.len(), MOST_EVENTS);
}

#[test]
fn a_command_that_is_only_asked_for_is_waited_for_until_its_event() {
    // An event of the same name that came before does not count, nor does another one.
    let ours = scripted(&[
        "{\"return\": {}, \"id\": 1}\r\n{\"event\": \"RESET\", \"data\": {\"guest\": false}}\r\n",
        "{\"return\": {}, \"id\": 2}\r\n{\"event\": \"STOP\"}\r\n",
    ]);
    let (qmp, _) = Qmp::handshake(ours.try_clone().unwrap(), PATIENCE).unwrap();
    assert!(matches!(
        qmp.execute_until("system_reset", &QemuEvent::Reset { guest: false }),
        Err(QmpError::Closed)
    ));
    let ours = scripted(&[
        "{\"return\": {}, \"id\": 1}\r\n",
        "{\"return\": {}, \"id\": 2}\r\n{\"event\": \"STOP\"}\r\n{\"event\": \"RESET\", \"data\": {\"guest\": false}}\r\n",
    ]);
    let (qmp, _) = Qmp::handshake(ours, PATIENCE).unwrap();
    qmp.execute_until("system_reset", &QemuEvent::Reset { guest: false })
        .unwrap();
    assert_eq!(
        qmp.poll_events().unwrap(),
        [QemuEvent::Stop, QemuEvent::Reset { guest: false }]
    );
}

#[test]
fn a_refusal_carries_qemus_words() {
    let ours = scripted(&[
        "{\"return\": {}, \"id\": 1}\r\n",
        "{\"id\": 2, \"error\": {\"class\": \"GenericError\", \"desc\": \"no such thing\"}}\r\n",
    ]);
    let (qmp, _) = Qmp::handshake(ours, PATIENCE).unwrap();
    let error = qmp.execute("x-y", Value::Null).unwrap_err().to_string();
    assert_eq!(error, "QEMU refuses x-y: no such thing");
}

const PATIENCE: Duration = Duration::from_secs(60);
const SHORT: Duration = Duration::from_millis(200);

/// A QEMU that says its greeting, takes our capabilities, and answers nothing any more; with its end of the socket.
fn hung() -> (Qmp, BufReader<UnixStream>) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    (&theirs).write_all(GREETING.as_bytes()).unwrap();
    (&theirs).write_all(b"{\"return\": {}, \"id\": 1}\r\n").unwrap();
    theirs.set_read_timeout(Some(PATIENCE)).unwrap();
    let (qmp, _) = Qmp::handshake(ours, PATIENCE).unwrap();
    let mut theirs = BufReader::new(theirs);
    theirs.read_line(&mut String::new()).unwrap();
    (qmp, theirs)
}

fn next_line(theirs: &mut BufReader<UnixStream>) -> Value {
    let mut line = String::new();
    theirs.read_line(&mut line).unwrap();
    serde_json::from_str(&line).unwrap()
}

/// Gives `command` while another one has no answer; what became of it, and how long that took.
fn behind_another(
    qmp: &Qmp,
    theirs: &mut BufReader<UnixStream>,
    command: impl Fn() -> Result<(), QmpError>,
) -> (Result<(), QmpError>, Duration) {
    std::thread::scope(|scope| {
        let (done, is_done) = mpsc::channel();
        scope.spawn(move || {
            let first = qmp.execute_within("query-status", Value::Null, PATIENCE);
            done.send(first.is_ok()).unwrap();
        });
        assert_eq!(next_line(theirs)["execute"], "query-status");
        let began = Instant::now();
        let second = command();
        let took = began.elapsed();
        // Lets the first one end, whatever has become of the second.
        theirs
            .get_mut()
            .write_all(b"{\"return\": {}, \"id\": 2}\r\n")
            .unwrap();
        assert!(is_done.recv_timeout(PATIENCE).unwrap());
        (second, took)
    })
}

#[test]
fn invariant_4_a_command_waits_for_its_turn_no_longer_than_for_its_answer() {
    let (qmp, mut theirs) = hung();
    let stop = || qmp.execute_within("stop", Value::Null, SHORT).map(drop);
    let (stopped, took) = behind_another(&qmp, &mut theirs, stop);
    assert!(matches!(stopped, Err(QmpError::NotTold(command, _)) if command == "stop"));
    assert!(took >= SHORT && took < PATIENCE / 2, "{took:?}");
    // Whoever has had no turn has told nothing, and harms nobody who comes later.
    theirs
        .get_mut()
        .write_all(b"{\"return\": {}, \"id\": 3}\r\n")
        .unwrap();
    qmp.execute("query-status", Value::Null).unwrap();
    assert_eq!(next_line(&mut theirs)["execute"], "query-status");
}

#[test]
fn a_turn_that_comes_in_time_leaves_what_is_left_for_the_answer() {
    let (qmp, mut theirs) = hung();
    std::thread::scope(|scope| {
        let first = scope.spawn(|| qmp.execute_within("query-status", Value::Null, SHORT));
        assert_eq!(next_line(&mut theirs)["execute"], "query-status");
        let began = Instant::now();
        let second = qmp.execute_within("cont", Value::Null, 10 * SHORT);
        let took = began.elapsed();
        assert!(matches!(first.join().unwrap(), Err(QmpError::Timeout(..))));
        assert!(
            matches!(second, Err(QmpError::Timeout(..))),
            "it had its turn: {second:?}"
        );
        // The first one has had a part of it; two bounds one after the other would be more.
        assert!(took >= 10 * SHORT && took < PATIENCE, "{took:?}");
    });
}

#[test]
fn what_qemu_must_know_of_is_told_though_another_command_has_no_answer() {
    let (qmp, mut theirs) = hung();
    let (told, _) = behind_another(&qmp, &mut theirs, || qmp.tell("cont", SHORT));
    told.unwrap();
    assert_eq!(next_line(&mut theirs)["execute"], "cont");
    // Its answer is nobody's.
    theirs
        .get_mut()
        .write_all(b"{\"return\": {}}\r\n{\"return\": {\"a\": 1}, \"id\": 3}\r\n")
        .unwrap();
    assert_eq!(qmp.execute("query-status", Value::Null).unwrap()["a"], 1);
}

#[test]
fn invariant_5_nobody_waits_for_a_qemu_that_reads_nothing() {
    let (qmp, _theirs) = hung();
    let mut commands = 0;
    let refused = loop {
        match qmp.execute_within("stop", Value::Null, Duration::ZERO) {
            Err(QmpError::Timeout(..)) => commands += 1,
            other => break other,
        }
    };
    assert!(matches!(refused, Err(QmpError::NotTold(..))), "{refused:?}");
    assert!(commands > 10, "{commands} were told");
}
