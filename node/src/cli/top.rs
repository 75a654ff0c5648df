//! `top`: what each VM of this host costs and does per second, with the last minute of the one that is looked at; q, Esc or Ctrl-C ends it.
//!
//! **Decides**: how counters of two moments become rates. **Flow**: [`talk::status`] once a second -> [`Rates::between`] -> [`draw`].
//! **Invariants**: 1. a counter that went back, as after a daemon's restart or a take-over, makes no rate. 2. what an event's text holds does not steer
//! the terminal. **Not here**: the state of each VM in one line (`watch`), figures over days (docs/monitoring.md).

use super::{talk, watch};
use crate::daemon::BadInput;
use crate::events::{now_ms, utc};
use anyhow::Result;
use dunlin_api::{Event, HostStatus, Request, VmStatus};
use ratatui::Frame;
use ratatui::crossterm::event::{Event as Key, KeyCode, KeyEventKind};
use ratatui::layout::Constraint::{Fill, Length, Max};
use ratatui::layout::Layout;
use ratatui::style::{Style, Stylize};
use ratatui::text::Line;
use ratatui::widgets::{Block, Cell, Paragraph, Row, Sparkline, Table};
use std::collections::BTreeMap;
use std::io::IsTerminal;
use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};

/// Rates are of so long.
const PERIOD: Duration = Duration::from_secs(1);
/// So many of them are shown.
const KEPT: usize = 60;
/// Events that are shown, and how old they may be.
const EVENTS: usize = 5;
const RECENT_MS: u64 = 600_000;

const HEAD: [&str; 9] = [
    "VM",
    "role",
    "protection",
    "syncs/s",
    "stands",
    "sent/s",
    "in/s",
    "out/s",
    "held",
];

/// What a VM did in a second.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
struct Rates {
    syncs: f64,
    /// The part of the time in which it stood still for syncs, in percent.
    stands_percent: f64,
    sent_bytes: f64,
    frames_in: f64,
    frames_out: f64,
    /// How long an output was held on average; none if none left.
    held_ms: Option<f64>,
}

impl Rates {
    /// None where a counter went back.
    fn between(before: &VmStatus, after: &VmStatus, seconds: f64) -> Option<Self> {
        let more = |of: fn(&VmStatus) -> u64| after_minus(of(before), of(after));
        let released = more(|vm| vm.sync.compared.released)?;
        let held_us = more(|vm| vm.sync.compared.held_us)?;
        Some(Self {
            syncs: more(|vm| vm.sync.count)? / seconds,
            stands_percent: more(|vm| vm.sync.sum.pause_us)? / seconds / 1e4,
            sent_bytes: more(|vm| vm.sync.sum.bytes + vm.sync.sum.device_bytes)? / seconds,
            frames_in: more(|vm| vm.frames_in)? / seconds,
            frames_out: more(|vm| vm.frames_out)? / seconds,
            held_ms: (released > 0.0).then(|| held_us / released / 1e3),
        })
    }
}

fn after_minus(before: u64, after: u64) -> Option<f64> {
    after.checked_sub(before).map(|more| more as f64)
}

/// What is shown.
#[derive(Default)]
struct Board {
    status: HostStatus,
    at: Option<Instant>,
    /// Of each VM that is there, the newest last.
    rates: BTreeMap<String, Vec<Option<Rates>>>,
    events: Vec<Event>,
    chosen: usize,
}

impl Board {
    fn take(&mut self, status: HostStatus, events: Vec<Event>, now: Instant) {
        let seconds = self.at.map(|at| now.duration_since(at).as_secs_f64());
        self.rates
            .retain(|name, _| status.vms.iter().any(|vm| vm.name == *name));
        for vm in &status.vms {
            let before = self.status.vms.iter().find(|before| before.name == vm.name);
            let rates = before
                .zip(seconds)
                .and_then(|(before, seconds)| Rates::between(before, vm, seconds));
            let kept = self.rates.entry(vm.name.clone()).or_default();
            kept.push(rates);
            let surplus = kept.len().saturating_sub(KEPT);
            kept.drain(..surplus);
        }
        let surplus = events.len().saturating_sub(EVENTS);
        self.events = events.into_iter().skip(surplus).collect();
        self.chosen = self.chosen.min(status.vms.len().saturating_sub(1));
        (self.status, self.at) = (status, Some(now));
    }

    fn newest(&self, vm: &str) -> Option<Rates> {
        *self.rates.get(vm)?.last()?
    }

    /// The chosen VM's figure over the last minute.
    fn over_time(&self, of: fn(&Rates) -> f64) -> Vec<u64> {
        let chosen = self.status.vms.get(self.chosen);
        let rates = chosen.and_then(|vm| self.rates.get(&vm.name));
        let figures = rates.into_iter().flatten();
        figures
            .map(|rates| rates.as_ref().map_or(0, |rates| of(rates).round() as u64))
            .collect()
    }

    /// Whether it was a key to choose another VM by.
    fn press(&mut self, key: &Key) {
        let Key::Key(key) = key else { return };
        if key.kind != KeyEventKind::Press {
            return;
        }
        let last = self.status.vms.len().saturating_sub(1);
        match key.code {
            KeyCode::Down | KeyCode::Char('j') => self.chosen = (self.chosen + 1).min(last),
            KeyCode::Up | KeyCode::Char('k') => self.chosen = self.chosen.saturating_sub(1),
            _ => {}
        }
    }
}

/// Shows it until a person has seen enough.
pub fn run(socket: &Path) -> Result<ExitCode> {
    if !std::io::stdout().is_terminal() {
        return Err(BadInput("'top' needs a terminal; 'dunlin status --json' is for programs".into()).into());
    }
    let mut board = Board::default();
    board.take(talk::status(socket)?, recent(socket)?, Instant::now());
    // Also restored when something panics.
    let mut terminal = ratatui::try_init()?;
    let outcome = (|| {
        let mut due = Instant::now() + PERIOD;
        loop {
            terminal.draw(|frame| draw(frame, &board))?;
            if let Some(key) = watch::told(due.saturating_duration_since(Instant::now()))? {
                if watch::wants_to_leave(&key) {
                    return Ok(ExitCode::SUCCESS);
                }
                board.press(&key);
                continue;
            }
            board.take(talk::status(socket)?, recent(socket)?, Instant::now());
            due = Instant::now() + PERIOD;
        }
    })();
    ratatui::try_restore()?;
    outcome
}

fn recent(socket: &Path) -> Result<Vec<Event>> {
    let mut events = Vec::new();
    let asked = Request::Events {
        follow: true,
        from_now: false,
        since_ms: Some(now_ms().saturating_sub(RECENT_MS)),
    };
    talk::follow(socket, &asked, |event| {
        match event {
            Some(event) => events.push(event.clone()),
            None => return Ok(true),
        }
        Ok(false)
    })?;
    Ok(events)
}

fn draw(frame: &mut Frame<'_>, board: &Board) {
    let [table, charts, events, foot] =
        Layout::vertical([Fill(1), Max(6), Length(2 + board.events.len() as u16), Length(1)])
            .areas(frame.area());
    let widths = [
        Fill(2),
        Length(8),
        Length(14),
        Length(8),
        Length(8),
        Length(10),
        Length(8),
        Length(8),
        Length(9),
    ];
    let rows = board.status.vms.iter().enumerate().map(|(number, vm)| {
        let row = row(vm, board.newest(&vm.name));
        match number == board.chosen {
            true => row.reversed(),
            false => row,
        }
    });
    let title = format!(" host {} ", board.status.host);
    let rows = Table::new(rows, widths)
        .header(Row::new(HEAD).style(Style::new().bold()))
        .block(Block::bordered().title(title));
    frame.render_widget(rows, table);
    let [stands, sent] = Layout::horizontal([Fill(1), Fill(1)]).areas(charts);
    for (area, title, figures) in [
        (
            stands,
            " stands still for syncs, ms/s ",
            board.over_time(|rates| rates.stands_percent * 10.0),
        ),
        (
            sent,
            " sent by syncs, KiB/s ",
            board.over_time(|rates| rates.sent_bytes / 1024.0),
        ),
    ] {
        let most = figures.iter().max().copied().unwrap_or(0);
        let title = format!("{title}(most {most}) ");
        let chart = Sparkline::default()
            .data(figures)
            .block(Block::bordered().title(title));
        frame.render_widget(chart, area);
    }
    let lines = board.events.iter().map(|event| {
        let at = utc(event.time_ms).replace(" UTC", "");
        Line::from(format!("{at} {} {}: {}", event.vm, event.kind, event.text))
    });
    let lines =
        Paragraph::new(lines.collect::<Vec<_>>()).block(Block::bordered().title(" what happened last "));
    frame.render_widget(lines, events);
    frame.render_widget(Line::from("up, down: another VM   q: quit").dim(), foot);
}

fn row(vm: &VmStatus, rates: Option<Rates>) -> Row<'static> {
    let (protection, colour) = watch::protection(vm);
    let figure = |of: fn(&Rates) -> String| rates.as_ref().map_or_else(|| "-".to_owned(), of);
    Row::new([
        Cell::from(vm.name.clone()),
        Cell::from(vm.role.to_string()),
        Cell::from(protection).style(Style::new().fg(colour)),
        Cell::from(figure(|rates| format!("{:.1}", rates.syncs))),
        Cell::from(figure(|rates| format!("{:.1} %", rates.stands_percent))),
        Cell::from(figure(|rates| bytes(rates.sent_bytes))),
        Cell::from(figure(|rates| format!("{:.0}", rates.frames_in))),
        Cell::from(figure(|rates| format!("{:.0}", rates.frames_out))),
        Cell::from(figure(|rates| {
            rates
                .held_ms
                .map_or_else(|| "-".to_owned(), |ms| format!("{ms:.1} ms"))
        })),
    ])
}

fn bytes(bytes: f64) -> String {
    match bytes {
        bytes if bytes < 1024.0 => format!("{bytes:.0} B"),
        bytes if bytes < 1_048_576.0 => format!("{:.1} KiB", bytes / 1024.0),
        bytes => format!("{:.1} MiB", bytes / 1_048_576.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use dunlin_api::EventKind;
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;
    use ratatui::crossterm::event;

    fn vm(name: &str, syncs: u64, pause_us: u64, sent: u64) -> VmStatus {
        let mut vm = VmStatus {
            name: name.into(),
            role: "primary".into(),
            wants_protection: true,
            frames_in: syncs * 10,
            frames_out: syncs * 20,
            ..VmStatus::default()
        };
        vm.sync.count = syncs;
        (vm.sync.sum.pause_us, vm.sync.sum.bytes) = (pause_us, sent);
        (vm.sync.compared.released, vm.sync.compared.held_us) = (syncs * 2, syncs * 3_000);
        vm
    }

    fn host(vms: Vec<VmStatus>) -> HostStatus {
        HostStatus {
            host: "a".into(),
            vms,
            ..HostStatus::default()
        }
    }

    #[test]
    fn two_moments_make_rates_and_a_counter_that_went_back_makes_none() {
        let (before, after) = (vm("shop", 10, 1_000, 0), vm("shop", 30, 101_000, 4 << 20));
        let rates = Rates::between(&before, &after, 2.0).expect("rates");
        assert_eq!(
            rates,
            Rates {
                syncs: 10.0,
                stands_percent: 5.0,
                sent_bytes: f64::from(2 << 20),
                frames_in: 100.0,
                frames_out: 200.0,
                held_ms: Some(1.5),
            }
        );
        assert_eq!(Rates::between(&after, &before, 2.0), None);
        let still = Rates::between(&after, &after, 1.0).expect("rates");
        assert_eq!((still.syncs, still.held_ms), (0.0, None));
    }

    #[test]
    fn a_minute_is_kept_of_each_vm_that_is_there() {
        let mut board = Board::default();
        let begun = Instant::now();
        for second in 0..100 {
            let vms = vec![vm("mail", second, 0, 0), vm("shop", second, 0, 0)];
            board.take(host(vms), Vec::new(), begun + Duration::from_secs(second));
        }
        assert_eq!(board.rates["shop"].len(), KEPT);
        assert_eq!(board.over_time(|rates| rates.syncs), [1; KEPT]);
        let press = |code| Key::Key(event::KeyEvent::new(code, event::KeyModifiers::NONE));
        (0..5).for_each(|_| board.press(&press(KeyCode::Down)));
        assert_eq!(board.chosen, 1);
        board.take(
            host(vec![vm("mail", 100, 0, 0)]),
            Vec::new(),
            begun + Duration::from_secs(100),
        );
        assert!(!board.rates.contains_key("shop") && board.chosen == 0);
    }

    #[test]
    fn it_is_drawn_at_any_size_and_an_event_s_text_does_not_steer_the_terminal() {
        let mut board = Board::default();
        let begun = Instant::now();
        let hostile = Event {
            seq: 1,
            time_ms: 1_769_903_999_000,
            host: "a".into(),
            vm: "shop".into(),
            kind: EventKind::Unprotected,
            text: "\u{1b}[2J\u{7}gone\r\n<script>".into(),
        };
        board.take(host(vec![vm("shop", 0, 0, 0)]), Vec::new(), begun);
        board.take(
            host(vec![vm("shop", 7, 50_000, 3 << 20)]),
            vec![hostile],
            begun + PERIOD,
        );
        for (width, height) in [(120, 30), (40, 10), (10, 3), (1, 1)] {
            let mut terminal = Terminal::new(TestBackend::new(width, height)).expect("a terminal in memory");
            terminal.draw(|frame| draw(frame, &board)).expect("drawn");
            let text = terminal.backend().to_string();
            assert!(!text.contains(['\u{1b}', '\u{7}', '\r']), "{text:?}");
            if width == 120 {
                for wanted in [
                    "shop",
                    "NOT PROTECTED",
                    "7.0",
                    "5.0 %",
                    "3.0 MiB",
                    "1.5 ms",
                    "gone",
                ] {
                    assert!(text.contains(wanted), "{wanted}: {text}");
                }
            }
        }
    }
}
