//! The transcripts' language.

use super::{BackupEvent, PrimaryEvent};
use crate::policy::Mode;
use crate::replica::sync::{Answer, Event, UnfitState, backup, primary};
use crate::sync::compare::tree::Walk;
use crate::sync::compare::{BLOCK_BYTES, BLOCKS_PER_PAGE, Compare, DivergentPage, hash_of_zeros};
use crate::sync::dirty::PageSet;
use crate::sync::staging::PageDelta;
use crate::units::{Epoch, Term};
use crate::wire::sync::SyncMessage;
use bytes::Bytes;

/// A line: a name, then `key=value`, flags, or words.
pub struct Words<'a>(Vec<&'a str>);

impl<'a> Words<'a> {
    pub fn of(line: &'a str) -> Self {
        Self(line.split_whitespace().collect())
    }

    pub fn first(&self) -> &'a str {
        self.0[0]
    }

    fn rest(&self) -> Words<'a> {
        Words(self.0[1..].to_vec())
    }

    fn value(&self, key: &str) -> Option<&'a str> {
        let prefixed = self.0.iter().filter_map(|word| word.split_once('='));
        prefixed.into_iter().find(|(k, _)| *k == key).map(|(_, v)| v)
    }

    fn number(&self, key: &str) -> u64 {
        let value = self.value(key);
        let value = value.unwrap_or_else(|| panic!("{:?} has no {key}", self.0));
        value.parse().expect("a number")
    }

    fn has(&self, flag: &str) -> bool {
        self.0.contains(&flag)
    }

    fn text(&self) -> String {
        self.0[1..].join(" ")
    }

    fn epoch(&self) -> Epoch {
        Epoch(self.number("epoch"))
    }

    fn next(&self) -> Mode {
        let name = self.value("next").expect("a mode");
        let named = |mode: &Mode| mode.name() == name;
        Mode::ALL.into_iter().find(named).expect("a mode")
    }

    /// `pages=1..4,7`, or none.
    fn pages(&self) -> PageSet {
        let runs = self
            .value("pages")
            .unwrap_or("")
            .split(',')
            .filter(|run| !run.is_empty());
        PageSet::from_runs(runs.map(|run| {
            let (first, end) = run.split_once("..").unwrap_or((run, ""));
            let first: u32 = first.parse().expect("a page");
            let end = end.parse().unwrap_or(first + 1);
            (first, end - first)
        }))
    }

    /// `of=a,a,b`: what each page holds.
    fn hashes(&self) -> Vec<u128> {
        let contents = self
            .value("of")
            .unwrap_or("")
            .split(',')
            .filter(|page| !page.is_empty());
        contents
            .flat_map(|content| [u128::from(content.as_bytes()[0]); BLOCKS_PER_PAGE])
            .collect()
    }

    /// `of=a,a,0`: what each page holds, a hash for each; 0 for zeros.
    fn page_hashes(&self) -> Vec<u128> {
        let hash = |hash| match hash == u128::from(b'0') {
            true => hash_of_zeros(),
            false => hash,
        };
        self.hashes()
            .into_iter()
            .step_by(BLOCKS_PER_PAGE)
            .map(hash)
            .collect()
    }

    fn deltas(&self) -> Vec<PageDelta> {
        let delta = |page| PageDelta {
            at: DivergentPage { page, blocks: 1 },
            bytes: vec![0; BLOCK_BYTES].into(),
        };
        self.pages().pages().map(delta).collect()
    }

    fn bytes(&self, key: &str) -> Bytes {
        Bytes::copy_from_slice(self.value(key).unwrap_or("").as_bytes())
    }

    pub fn primary(&self) -> primary::Setup {
        primary::Setup {
            term: Term(self.number("term")),
            pages: self.number("pages") as u32,
            active: self.has("active"),
            compare: self.compare(),
            audit: self.has("audit"),
            staging_bytes: (self.number("staging-kib") as usize) << 10,
        }
    }

    pub fn backup(&self) -> backup::Setup {
        let primary::Setup {
            term,
            pages,
            active,
            audit,
            staging_bytes,
            ..
        } = self.primary();
        backup::Setup {
            term,
            pages,
            active,
            audit,
            staging_bytes,
            says_held: self.has("says-held"),
        }
    }

    fn compare(&self) -> Compare {
        match self.has("tree") {
            true => Compare::Tree,
            false => Compare::List,
        }
    }

    /// `of=a,b level=1`: the nodes of the tree over such pages, so many levels below its root, all of them in question.
    fn nodes(&self) -> Vec<u128> {
        let mut walk = Walk::over(self.hashes());
        for _ in 0..self.number("level") {
            walk.descend(&vec![0xff; walk.answer_bytes()]);
        }
        walk.hashes()
    }

    /// `bits=0110,1`: a byte each, the first node's bit first.
    fn bits(&self) -> Bytes {
        let byte = |bits: &str| {
            let bits = bits.bytes().enumerate();
            bits.fold(0, |byte, (i, bit)| byte | u8::from(bit == b'1') << i)
        };
        let bytes: Vec<u8> = self.value("bits").unwrap_or("").split(',').map(byte).collect();
        bytes.into()
    }

    fn message(&self) -> SyncMessage {
        let more = self.has("more");
        match self.first() {
            "Join" => SyncMessage::Join {
                term: Term(self.number("term")),
                pages: self.number("pages") as u32,
                active: self.has("active"),
                compare: self.compare(),
            },
            "Holds" => SyncMessage::Holds {
                pages: self.pages(),
                hashes: self.page_hashes(),
            },
            "JoinReady" => SyncMessage::JoinReady,
            "Refused" => SyncMessage::Refused { why: self.text() },
            "Pages" => SyncMessage::Pages(self.deltas()),
            "JoinLast" => SyncMessage::JoinLast { epoch: self.epoch() },
            "Dirty" => SyncMessage::Dirty {
                epoch: self.epoch(),
                pages: self.pages(),
                more,
            },
            "PreCopy" => SyncMessage::PreCopy {
                epoch: self.epoch(),
                pages: self.pages(),
                more,
            },
            "Union" => SyncMessage::Union {
                epoch: self.epoch(),
                pages: self.pages(),
                more,
            },
            "Hashes" => SyncMessage::Hashes {
                epoch: self.epoch(),
                hashes: self.hashes(),
            },
            "Nodes" => SyncMessage::Nodes {
                epoch: self.epoch(),
                hashes: self.nodes(),
            },
            "Differ" => SyncMessage::Differ {
                epoch: self.epoch(),
                part: self.bits(),
            },
            "Delta" => SyncMessage::Delta {
                epoch: self.epoch(),
                deltas: self.deltas(),
            },
            "DeviceState" => SyncMessage::DeviceState {
                epoch: self.epoch(),
                part: self.bytes("state"),
            },
            "Connections" => SyncMessage::Connections {
                epoch: self.epoch(),
                part: self.bytes("connections"),
            },
            "ConnectionsAhead" => SyncMessage::ConnectionsAhead {
                epoch: self.epoch(),
                part: self.bytes("connections"),
            },
            "State" => SyncMessage::State {
                epoch: self.epoch(),
                next: self.next(),
                connections: self.bytes("connections"),
                device_state: self.bytes("state"),
            },
            "Ends" => SyncMessage::Ends {
                epoch: self.epoch(),
                agreed: self.has("agreed"),
            },
            "Audit" => SyncMessage::Audit {
                epoch: self.epoch(),
                hash: 1,
            },
            "Staged" => SyncMessage::Staged { epoch: self.epoch() },
            "Loaded" => SyncMessage::Loaded {
                epoch: self.epoch(),
                took_us: 5,
            },
            other => panic!("'{other}' is no message"),
        }
    }

    /// What both sides may hear; none if it is a word of the loop's.
    fn event<W>(&self) -> Option<Event<W>> {
        let answer = match self.first() {
            "word" => return None,
            "begins" => return Some(Event::Begins),
            "message" => return Some(Event::Message(self.rest().message())),
            "failed" => return Some(Event::Failed { why: self.text() }),
            "stream-ended" => return Some(Event::StreamEnded { why: self.text() }),
            "timed-out" => {
                let mirrored = self.value("mirrored").map_or(0, |it| it.parse().expect("bytes"));
                return Some(Event::TimedOut { mirrored });
            }
            "loop-ended" => return Some(Event::LoopEnded),
            "disks-copied" => Answer::DisksCopied,
            "mapped" => Answer::Mapped(self.pages()),
            "scanned" => Answer::Scanned(self.pages()),
            "resumed" => Answer::Resumed,
            "hashed" => Answer::Hashed(self.hashes()),
            "pages-hashed" => Answer::PagesHashed(self.page_hashes()),
            "deltas-sent" => Answer::DeltasSent {
                bytes: self.number("bytes"),
            },
            "state-sent" => Answer::StateSent {
                mirrored: self.number("mirrored"),
            },
            "state-fits" => Answer::StateChecked(Ok(())),
            "state-does-not-fit" => Answer::StateChecked(Err(UnfitState(self.text()))),
            "applied" => Answer::Applied { took_us: 5 },
            "took-over" => Answer::TookOver,
            other => panic!("'{other}' is no event"),
        };
        Some(Event::Answer(answer))
    }
}

/// An event from its line.
pub trait Parse {
    fn parse(line: &str) -> Self;
}

impl Parse for PrimaryEvent {
    fn parse(line: &str) -> Self {
        let words = Words::of(line);
        words.event().unwrap_or_else(|| {
            let word = words.rest();
            Self::Word(match word.first() {
                "precopy" => primary::Word::PreCopy { epoch: word.epoch() },
                "connections-ahead" => primary::Word::ConnectionsAhead {
                    epoch: word.epoch(),
                    part: word.bytes("connections"),
                },
                "sync" => primary::Word::Sync(primary::Order {
                    epoch: word.epoch(),
                    switchover: word.has("switchover"),
                    agreed: word.has("agreed"),
                    next: word.next(),
                }),
                "line-drawn" => primary::Word::LineDrawn {
                    connections: word.bytes("connections"),
                },
                "handed-over" => primary::Word::HandedOver,
                other => panic!("'{other}' is no word"),
            })
        })
    }
}

impl Parse for BackupEvent {
    fn parse(line: &str) -> Self {
        let words = Words::of(line);
        words.event().unwrap_or_else(|| {
            let word = words.rest();
            Self::Word(match word.first() {
                "epoch-ends" => backup::Word::EpochEnds { epoch: word.epoch() },
                "acknowledge" => backup::Word::Acknowledge,
                "drop" => backup::Word::Drop,
                "take-over" => backup::Word::TakeOver(Term(word.number("term"))),
                other => panic!("'{other}' is no word"),
            })
        })
    }
}

/// An effect as a line.
pub trait Render {
    fn render(&self) -> String;
}

fn pages(set: &PageSet) -> String {
    let runs: Vec<String> = set
        .runs()
        .map(|(first, count)| match count {
            1 => first.to_string(),
            _ => format!("{first}..{}", first + count),
        })
        .collect();
    format!("pages={}", runs.join(","))
}

fn deltas(deltas: &[PageDelta]) -> String {
    pages(&PageSet::from_runs(deltas.iter().map(|delta| (delta.at.page, 1))))
}

fn bits(part: &Bytes) -> String {
    let bytes: Vec<String> = part
        .iter()
        .map(|byte| format!("{:08b}", byte.reverse_bits()))
        .collect();
    bytes.join(",")
}

fn text(bytes: &Bytes) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn message(message: &SyncMessage) -> String {
    let name = message.name();
    let of = |epoch: &Epoch, rest: String| format!("{name} epoch={} {rest}", epoch.0);
    let list = |epoch: &Epoch, set: &PageSet, more: bool| {
        of(
            epoch,
            format!("{}{}", pages(set), if more { " more" } else { "" }),
        )
    };
    match message {
        SyncMessage::Join {
            term,
            pages,
            active,
            compare,
        } => {
            let tree = if *compare == Compare::Tree { " tree" } else { "" };
            format!("{name} term={} pages={pages} active={active}{tree}", term.0)
        }
        SyncMessage::Nodes { epoch, hashes } => of(epoch, format!("count={}", hashes.len())),
        SyncMessage::Differ { epoch, part } => of(epoch, format!("bits={}", bits(part))),
        SyncMessage::Refused { why } => format!("{name} {why}"),
        SyncMessage::Dirty { epoch, pages, more }
        | SyncMessage::Union { epoch, pages, more }
        | SyncMessage::PreCopy { epoch, pages, more } => list(epoch, pages, *more),
        SyncMessage::JoinLast { epoch } | SyncMessage::Staged { epoch } => of(epoch, String::new()),
        SyncMessage::Loaded { epoch, took_us } => of(epoch, format!("took_us={took_us}")),
        SyncMessage::Ends { epoch, agreed } => of(epoch, format!("agreed={agreed}")),
        SyncMessage::ConnectionsAhead { epoch, part } => of(epoch, format!("connections={}", text(part))),
        SyncMessage::JoinReady => name.to_owned(),
        other => panic!("{other:?} is the driver's, not a machine's"),
    }
    .trim_end()
    .to_owned()
}

impl Render for primary::Effect {
    fn render(&self) -> String {
        match self {
            Self::Send(sent) => format!("send {}", message(sent)),
            Self::HashPages(set) => format!("hash-pages {}", pages(set)),
            Self::SendPages(set) => format!("send-pages {}", pages(set)),
            Self::SendZeros(set) => format!("send-zeros {}", pages(set)),
            Self::Copy(set) => format!("copy {}", pages(set)),
            Self::MarkDisks(epoch) => format!("mark-disks epoch={}", epoch.0),
            Self::SendDeltas {
                epoch,
                pages: of,
                differing,
            } => format!(
                "send-deltas epoch={} of {}: {}",
                epoch.0,
                pages(of),
                pages(&PageSet::from_runs(differing.iter().map(|page| (page.page, 1))))
            ),
            Self::SendState {
                epoch,
                next,
                connections,
            } => format!(
                "send-state epoch={} next={} connections={}",
                epoch.0,
                next.name(),
                text(connections)
            ),
            // Its words are what people read.
            Self::End { why, broken } => {
                format!("End {{ why: {:?}, broken: {broken} }}", why.to_string())
            }
            other => format!("{other:?}"),
        }
    }
}

impl Render for backup::Effect {
    fn render(&self) -> String {
        match self {
            Self::Send(sent) => format!("send {}", message(sent)),
            Self::Tell(sent) => format!("tell {}", message(sent)),
            Self::WritePages(written) => format!("write {}", deltas(written)),
            Self::SendHashes { epoch, pages: of } => format!("send-hashes epoch={} {}", epoch.0, pages(of)),
            Self::Hash(of) => format!("hash {}", pages(of)),
            Self::CheckState(state) => format!("check-state {}", text(state)),
            Self::AwaitMirrors(epoch) => format!("await-mirrors epoch={}", epoch.0),
            Self::Apply { staged, run, audit } => format!(
                "apply epoch={} {} state={} run={run} audit={audit:?}",
                staged.epoch.0,
                deltas(&staged.deltas),
                text(&staged.device_state)
            ),
            Self::LoadKept(state) => format!("load-kept {}", text(state)),
            // Their words are what people read.
            Self::Report(backup::Report::Ended { why, torn }) => {
                format!("Report(Ended {{ why: {:?}, torn: {torn} }})", why.to_string())
            }
            Self::Report(backup::Report::TookOver(Err(why))) => {
                format!("Report(TookOver(Err({:?})))", why.to_string())
            }
            other => format!("{other:?}"),
        }
    }
}
