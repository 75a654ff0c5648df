use super::*;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixListener;
use std::thread::JoinHandle;

/// A folder with both sockets, as a daemon has them.
struct Sockets {
    folder: tempfile::TempDir,
    api: Option<UnixListener>,
    control: UnixListener,
}

impl Sockets {
    fn new() -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let control = folder.path().join("dunlin.sock");
        Self {
            api: Some(UnixListener::bind(beside(&control)).expect("a socket")),
            control: UnixListener::bind(&control).expect("a socket"),
            folder,
        }
    }

    fn path(&self) -> PathBuf {
        self.folder.path().join("dunlin.sock")
    }

    /// Answers one request by HTTP with that text, and gives the request's head and body.
    fn answers(&mut self, text: &'static str) -> JoinHandle<String> {
        let listener = self.api.take().expect("once");
        std::thread::spawn(move || {
            let (stream, _) = listener.accept().expect("somebody");
            let mut said = String::new();
            let mut from = BufReader::new(&stream);
            let mut length = 0;
            loop {
                let mut line = String::new();
                from.read_line(&mut line).expect("a line of the head");
                if let Some(value) = line.to_lowercase().strip_prefix("content-length:") {
                    length = value.trim().parse().expect("a number");
                }
                said.push_str(&line);
                if line == "\r\n" {
                    break;
                }
            }
            let mut body = vec![0; length];
            from.read_exact(&mut body).expect("the body");
            (&stream).write_all(text.as_bytes()).expect("written");
            said + &String::from_utf8(body).expect("text")
        })
    }

    /// Answers one question on the control socket, and gives it.
    fn control_answers(&self) -> JoinHandle<String> {
        let listener = self.control.try_clone().expect("another");
        std::thread::spawn(move || {
            let (stream, _) = listener.accept().expect("somebody");
            let mut line = String::new();
            BufReader::new(&stream).read_line(&mut line).expect("a line");
            let answer = b"{\"answer\":\"done\",\"text\":\"by control\"}\n";
            (&stream).write_all(answer).expect("written");
            line
        })
    }
}

fn failover() -> Request {
    Request::Failover { vm: "shop".into() }
}

/// The last answer's words, and its code: 0 if it is done.
fn last(control: &Path, request: &Request) -> Result<(String, i32), ClientError> {
    match Conversation::connect(control)?.talk(request, |_| {})? {
        Answer::Done { text } => Ok((text, 0)),
        Answer::Failed { why, code } => Ok((why, code)),
        other => panic!("{other:?}"),
    }
}

const CHUNKED: &str =
    "HTTP/1.1 200 OK\r\nContent-Type: application/x-ndjson\r\nTransfer-Encoding: chunked\r\n\r\n";

#[test]
fn lines_come_one_by_one_however_they_are_cut() {
    let mut sockets = Sockets::new();
    let text = "HTTP/1.1 200 OK\r\nContent-Type: application/x-ndjson\r\nTransfer-Encoding: chunked\r\n\r\n\
                a\r\n{\"answer\":\r\n1d\r\n\"alive\"}\n{\"answer\":\"done\",\"te\r\nd\r\nxt\":\"moved\"}\n\r\n0\r\n\r\n";
    let asked = sockets.answers(text);
    let mut alive = 0;
    let answer = Conversation::connect(&sockets.path())
        .expect("connected")
        .talk(&failover(), |answer| {
            alive += u32::from(matches!(answer, Answer::Alive))
        })
        .expect("an answer");
    assert!(matches!(answer, Answer::Done { text } if text == "moved"));
    assert_eq!(alive, 1);
    let asked = asked.join().expect("joined");
    assert!(
        asked.starts_with("POST /api/v1/vms/shop/switchover HTTP/1.1\r\n"),
        "{asked}"
    );
    let asked = asked.to_lowercase();
    assert!(
        asked.contains("host: dunlin\r\n") && asked.contains("accept: application/x-ndjson\r\n"),
        "{asked}"
    );
}

#[test]
fn a_refusal_keeps_its_words_and_its_code() {
    for (text, wanted) in [
        (
            "HTTP/1.1 409 Conflict\r\nContent-Type: application/json\r\nContent-Length: 30\r\n\r\n{\"why\":\"they differ\",\"code\":4}",
            ("they differ", 4),
        ),
        (
            "HTTP/1.1 503 Service Unavailable\r\nContent-Type: text/plain\r\nContent-Length: 9\r\nConnection: close\r\n\r\ntoo many\n",
            ("too many", 2),
        ),
    ] {
        let mut sockets = Sockets::new();
        let asked = sockets.answers(text);
        let said = last(&sockets.path(), &failover()).expect("an answer");
        assert_eq!(said, (wanted.0.to_owned(), wanted.1));
        asked.join().expect("joined");
    }
}

#[test]
fn a_daemon_that_ends_half_way_has_gone() {
    for text in [
        "",
        CHUNKED,
        "HTTP/1.1 200 OK\r\nContent-Type: application/x-ndjson\r\n\r\n{\"answer\":",
    ] {
        let mut sockets = Sockets::new();
        let asked = sockets.answers(text);
        let why = last(&sockets.path(), &failover()).expect_err("no answer");
        assert!(matches!(why, ClientError::Gone), "{text:?}: {why}");
        asked.join().expect("joined");
    }
}

#[test]
fn a_daemon_from_before_is_asked_by_its_control_socket() {
    for text in [
        "HTTP/1.1 421 Misdirected Request\r\nContent-Length: 0\r\n\r\n",
        "HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n",
    ] {
        let mut sockets = Sockets::new();
        let (first, then) = (sockets.answers(text), sockets.control_answers());
        let said = last(&sockets.path(), &failover()).expect("an answer");
        assert_eq!(said, ("by control".into(), 0));
        first.join().expect("joined");
        assert!(then.join().expect("joined").contains("\"do\":\"failover\""));
    }
    // One that has no such socket, and one that was killed and left it behind.
    for is_left in [false, true] {
        let mut sockets = Sockets::new();
        drop(sockets.api.take());
        if !is_left {
            std::fs::remove_file(beside(&sockets.path())).expect("removed");
        }
        let then = sockets.control_answers();
        let said = last(&sockets.path(), &failover()).expect("an answer");
        assert_eq!(said.0, "by control");
        then.join().expect("joined");
    }
}

#[test]
fn what_takes_more_than_lines_goes_by_the_control_socket_and_nobody_there_is_one_line() {
    let sockets = Sockets::new();
    let then = sockets.control_answers();
    let exec = Request::Exec {
        vm: "shop".into(),
        command: vec!["true".into()],
    };
    assert_eq!(last(&sockets.path(), &exec).expect("an answer").0, "by control");
    then.join().expect("joined");
    // Somebody's socket beside one that is not there.
    std::fs::remove_file(sockets.path()).expect("removed");
    let why = last(&sockets.path(), &failover()).expect_err("nobody");
    assert!(matches!(why, ClientError::NoDaemon { .. }), "{why}");
}
