//! Where the daemon's own words go: into systemd's journal with their fields, or to standard error.
//!
//! **Decides**: which of the two, and what a field is called in the journal. **Flow**: `tracing` -> [`Journal`] -> one datagram for each word.
//! **Invariants**: 1. nobody waits for the journal, a VM's loop least of all: what it has no room for is lost, and the next that it takes says how
//! much that was. 2. a message reads as on standard error, with all its fields: as text the journal tells no less than by its fields. 3. what is sent
//! is bounded. **Source**: systemd's "Native Journal Protocol"; systemd.exec(5), JOURNAL_STREAM. `tracing-journald` speaks the same protocol,
//! but has neither of the first two. **Not here**: what is told, and how seriously (`events`, and whoever else has something to say).

use rustix::fs::fstat;
use std::fmt::{Debug, Write};
use std::io::{self, IsTerminal};
use std::os::fd::AsFd;
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use tracing::field::{Field, Visit};
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::fmt::FormatFields;
use tracing_subscriber::fmt::format::{DefaultFields, Writer};
use tracing_subscriber::layer::{Context, SubscriberExt};
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{EnvFilter, Layer};

const SOCKET: &str = "/run/systemd/journal/socket";
/// What 'journalctl -t' finds; the service's other lines have it by its unit.
const IDENTIFIER: &str = "dunlin";
/// Of a message the beginning counts: as much as the journal takes of a line on standard error.
const MOST_OF_MESSAGE: usize = 48 << 10;
/// And of each of its fields.
const MOST_OF_FIELD: usize = 4 << 10;

/// From here on `tracing`'s events are told: to the journal, where standard error leads there and it can be reached, or else to standard error.
pub fn begin() {
    let filter = filter(std::env::var("DUNLIN_LOG").ok().as_deref());
    let stream = std::env::var("JOURNAL_STREAM").unwrap_or_default();
    let is_journal = names(&stream, io::stderr());
    if is_journal && let Ok(journal) = Journal::open(Path::new(SOCKET)) {
        tracing_subscriber::registry().with(filter).with(journal).init();
        return;
    }
    let log = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(io::stderr)
        // That a line could not be written would be told to the same file, and a panic if that fails: the daemon's end.
        .log_internal_errors(false)
        .with_ansi(io::stderr().is_terminal());
    // The journal has the time of each line by itself.
    if is_journal {
        log.without_time().init();
    } else {
        log.init();
    }
}

/// What is told: as asked, or from `info` on. What a guest could have said without an end, at each look into its card's rings, is told only to who asks for it by its name.
fn filter(asked: Option<&str>) -> EnvFilter {
    let of = |asked: &str| EnvFilter::try_new(format!("virtio_queue=off,{asked}"));
    let asked = asked.filter(|asked| !asked.trim().is_empty()).unwrap_or("info");
    of(asked).unwrap_or_else(|_| of("info").unwrap_or_default())
}

/// Whether `stream`, systemd's `device:inode` of the journal's stream, is that open file: a shell that a service started has the variable, too, wherever
/// what it starts writes to.
fn names(stream: &str, file: impl AsFd) -> bool {
    let Some((device, inode)) = stream.split_once(':') else {
        return false;
    };
    fstat(file).is_ok_and(|file| device.parse() == Ok(file.st_dev) && inode.parse() == Ok(file.st_ino))
}

/// The journal's own socket.
struct Journal {
    socket: UnixDatagram,
    path: PathBuf,
    /// What it had no room for since it last took something.
    lost: Arc<AtomicU64>,
}

impl Journal {
    fn open(path: &Path) -> io::Result<Self> {
        let socket = UnixDatagram::unbound()?;
        socket.set_nonblocking(true)?;
        // Nothing, which the journal leaves out; but somebody has to be there.
        socket.send_to(&[], path)?;
        // Not connected: a journal that is started again has another socket.
        Ok(Self {
            socket,
            path: path.to_owned(),
            lost: Arc::default(),
        })
    }

    fn send(&self, mut datagram: Datagram) {
        let lost = self.lost.swap(0, Ordering::Relaxed);
        if lost > 0 {
            datagram.put("DUNLIN_LOST", &lost.to_string(), MOST_OF_FIELD);
        }
        if self.socket.send_to(&datagram.0, &self.path).is_err() {
            self.lost.fetch_add(lost + 1, Ordering::Relaxed);
        }
    }
}

impl<S: Subscriber> Layer<S> for Journal {
    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        let told = event.metadata();
        let mut datagram = Datagram::default();
        datagram.put("PRIORITY", priority(told.level()), MOST_OF_FIELD);
        datagram.put("SYSLOG_IDENTIFIER", IDENTIFIER, MOST_OF_FIELD);
        datagram.put("MESSAGE", &words(event), MOST_OF_MESSAGE);
        datagram.put("TARGET", told.target(), MOST_OF_FIELD);
        event.record(&mut datagram);
        self.send(datagram);
    }
}

/// The message and its fields, as standard error has them.
fn words(event: &Event<'_>) -> String {
    let mut words = String::new();
    // Writing to a String does not fail.
    let _ = DefaultFields::new().format_fields(Writer::new(&mut words), event);
    words
}

/// By syslog(3), as 'journalctl -p' asks for it.
fn priority(level: &Level) -> &'static str {
    match *level {
        Level::ERROR => "3",
        Level::WARN => "4",
        Level::INFO => "6",
        Level::DEBUG | Level::TRACE => "7",
    }
}

/// What is sent of one event: its name, a line's end, how many bytes its value has, the value, a line's end; for each field.
#[derive(Default)]
struct Datagram(Vec<u8>);

impl Datagram {
    fn put(&mut self, name: &str, value: &str, most: usize) {
        let mut end = value.len().min(most);
        while !value.is_char_boundary(end) {
            end -= 1;
        }
        self.0.extend_from_slice(name.as_bytes());
        self.0.push(b'\n');
        self.0.extend_from_slice(&(end as u64).to_le_bytes());
        self.0.extend_from_slice(&value.as_bytes()[..end]);
        self.0.push(b'\n');
    }
}

impl Visit for Datagram {
    fn record_str(&mut self, field: &Field, value: &str) {
        // The message is told already, and a host's own event is of no VM.
        if field.name() == "message" || value.is_empty() {
            return;
        }
        let letters = field.name().chars().map(|letter| match letter {
            letter if letter.is_ascii_alphanumeric() => letter.to_ascii_uppercase(),
            _ => '_',
        });
        let name: String = "DUNLIN_".chars().chain(letters).collect();
        self.put(&name, value, MOST_OF_FIELD);
    }

    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        let mut words = String::new();
        // Writing to a String does not fail.
        let _ = write!(words, "{value:?}");
        self.record_str(field, &words);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::events::Events;
    use dunlin_api::EventKind;
    use std::collections::BTreeMap;
    use std::fs::File;
    use std::os::unix::fs::MetadataExt;
    use std::time::Duration;

    /// A journal of the test's own: its socket, and a layer that sends there.
    fn journal(folder: &Path) -> (UnixDatagram, Journal) {
        let path = folder.join("socket");
        let socket = UnixDatagram::bind(&path).expect("a socket");
        // Only a test that fails waits that long.
        socket
            .set_read_timeout(Some(Duration::from_secs(20)))
            .expect("a timeout");
        let journal = Journal::open(&path).expect("it is there");
        assert_eq!(socket.recv(&mut [0; 1]).expect("a first word"), 0);
        (socket, journal)
    }

    /// A datagram's fields, as the protocol has them.
    fn received(socket: &UnixDatagram) -> BTreeMap<String, String> {
        let mut bytes = vec![0; 1 << 20];
        let length = socket.recv(&mut bytes).expect("a datagram");
        let (mut rest, mut fields) = (&bytes[..length], BTreeMap::new());
        while !rest.is_empty() {
            let end = rest.iter().position(|byte| *byte == b'\n').expect("a name");
            let name = String::from_utf8(rest[..end].to_vec()).expect("text");
            let (length, value) = rest[end + 1..].split_at(8);
            let length = u64::from_le_bytes(length.try_into().expect("eight bytes")) as usize;
            let (value, behind) = value.split_at(length);
            rest = behind.strip_prefix(b"\n").expect("a line's end");
            let value = String::from_utf8(value.to_vec()).expect("text");
            assert!(
                fields.insert(name, value).is_none(),
                "a field is told twice: {fields:?}"
            );
        }
        fields
    }

    #[test]
    fn standard_error_is_the_journal_only_where_systemd_names_it() {
        let folder = tempfile::tempdir().expect("a folder");
        let file = File::create(folder.path().join("a")).expect("a file");
        let other = File::create(folder.path().join("b")).expect("a file");
        let is = file.metadata().expect("its numbers");
        let stream = format!("{}:{}", is.dev(), is.ino());
        assert!(names(&stream, &file) && !names(&stream, &other));
        for stream in [
            "",
            ":",
            "8",
            "x:y",
            &format!("{}:", is.dev()),
            &format!("{stream} "),
        ] {
            assert!(!names(stream, &file), "'{stream}'");
        }
    }

    /// A ring is looked at a thousand times a second, and more.
    #[test]
    fn what_a_guest_could_have_said_without_an_end_is_told_only_to_who_asks_for_it() {
        struct Count(Arc<AtomicU64>);
        impl<S: Subscriber> Layer<S> for Count {
            fn on_event(&self, _event: &Event<'_>, _context: Context<'_, S>) {
                self.0.fetch_add(1, Ordering::Relaxed);
            }
        }
        for (asked, told) in [
            (None, 1),
            (Some(""), 1),
            (Some("info"), 1),
            (Some("dunlin=loudly"), 1),
            (Some("dunlin=info"), 1),
            (Some("info,virtio_queue=error"), 2),
        ] {
            let count = Arc::new(AtomicU64::new(0));
            let subscriber = tracing_subscriber::registry()
                .with(filter(asked))
                .with(Count(count.clone()));
            tracing::subscriber::with_default(subscriber, || {
                tracing::error!(target: "virtio_queue::queue", "an iterator's");
                tracing::error!(target: "dunlin::events", "ours");
            });
            assert_eq!(count.load(Ordering::Relaxed), told, "{asked:?}");
        }
    }

    #[test]
    fn no_journal_is_an_error_and_no_wait() {
        let folder = tempfile::tempdir().expect("a folder");
        assert!(Journal::open(&folder.path().join("socket")).is_err());
    }

    #[test]
    fn an_event_has_its_fields_and_its_tone_and_reads_as_before() {
        let folder = tempfile::tempdir().expect("a folder");
        let (socket, journal) = journal(folder.path());
        let events = Events::open("a", folder.path());
        let all = tracing_subscriber::registry().with(journal);
        tracing::subscriber::with_default(all, || {
            events.push("shop", EventKind::Protected, "a second copy is there");
            events.push("shop", EventKind::BackupLost, "host 'b' is gone");
            events.push("", EventKind::DiskError, "no\nsense");
            tracing::debug!(who.name = "ann", count = 3, "asks");
        });
        let good = received(&socket);
        assert_eq!(good["PRIORITY"], "6");
        assert_eq!(good["SYSLOG_IDENTIFIER"], "dunlin");
        assert_eq!(good["TARGET"], "dunlin::events");
        assert_eq!(
            (&*good["DUNLIN_VM"], &*good["DUNLIN_KIND"]),
            ("shop", "protected")
        );
        assert_eq!(
            good["MESSAGE"],
            "a second copy is there vm=\"shop\" kind=\"protected\""
        );
        assert_eq!(received(&socket)["PRIORITY"], "4");
        let bad = received(&socket);
        assert_eq!((&*bad["PRIORITY"], &*bad["DUNLIN_KIND"]), ("3", "disk-error"));
        assert!(bad["MESSAGE"].starts_with("no\nsense"), "{bad:?}");
        assert!(!bad.contains_key("DUNLIN_VM"));
        let other = received(&socket);
        assert_eq!(
            (&*other["DUNLIN_WHO_NAME"], &*other["DUNLIN_COUNT"]),
            ("ann", "3")
        );
        assert_eq!(other["PRIORITY"], "7");
    }

    #[test]
    fn whoever_logs_never_waits_for_a_journal_that_hangs_and_what_is_lost_is_counted() {
        let folder = tempfile::tempdir().expect("a folder");
        let (socket, journal) = journal(folder.path());
        let lost = journal.lost.clone();
        let mut sent = 0;
        // The kernel's queue of a datagram socket is some hundred long, and as many bytes as a sender may have under way.
        let all = tracing_subscriber::registry().with(journal);
        tracing::subscriber::with_default(all, || {
            while lost.load(Ordering::Relaxed) < 3 {
                tracing::info!("{sent}");
                sent += 1;
                assert!(sent < 1_000_000, "a queue without an end");
            }
            for seen in 0..sent - 3 {
                let fields = received(&socket);
                assert_eq!(fields["MESSAGE"], seen.to_string());
                assert!(!fields.contains_key("DUNLIN_LOST"));
            }
            tracing::info!("it goes on");
            tracing::info!("and on");
        });
        let next = received(&socket);
        assert_eq!((&*next["MESSAGE"], &*next["DUNLIN_LOST"]), ("it goes on", "3"));
        assert!(!received(&socket).contains_key("DUNLIN_LOST"));
    }

    #[test]
    fn what_is_sent_of_a_long_message_is_bounded_and_still_text() {
        let folder = tempfile::tempdir().expect("a folder");
        let (socket, journal) = journal(folder.path());
        let long = "ä".repeat(1 << 20);
        let all = tracing_subscriber::registry().with(journal);
        tracing::subscriber::with_default(all, || tracing::info!(vm = &*long, "x{long}"));
        let fields = received(&socket);
        assert_eq!(fields["MESSAGE"].len(), MOST_OF_MESSAGE - 1);
        assert_eq!(fields["DUNLIN_VM"].len(), MOST_OF_FIELD);
    }
}
