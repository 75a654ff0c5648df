//! `status --watch` on a terminal: a table of the host's VMs that is always up to date; q, Esc or Ctrl-C ends it.

use super::talk;
use anyhow::{Result, bail};
use dunlin_api::{HostStatus, VmStatus};
use ratatui::Frame;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEventKind, KeyModifiers};
use ratatui::layout::Constraint::{Fill, Length};
use ratatui::layout::Layout;
use ratatui::style::{Color, Style, Stylize};
use ratatui::text::Line;
use ratatui::widgets::{Block, Cell, Row, Table};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use std::io::IsTerminal;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;
use std::time::Duration;

/// How often the daemon is asked when no key is pressed: figures change without events.
const REFRESH: Duration = Duration::from_millis(250);

const HEAD: [&str; 10] = [
    "VM",
    "role",
    "state",
    "served by",
    "protection",
    "epoch",
    "pause",
    "diverged",
    "held",
    "hosts",
];

/// Shows the table until a person has seen enough. Returns the last status.
pub fn run(socket: &Path) -> Result<HostStatus> {
    // Also restored when something panics.
    let mut terminal = ratatui::try_init()?;
    let outcome = (|| {
        loop {
            let status = talk::status(socket)?;
            terminal.draw(|frame| draw(frame, &status))?;
            if told(REFRESH)?.is_some_and(|event| wants_to_leave(&event)) {
                return Ok(status);
            }
        }
    })();
    ratatui::try_restore()?;
    outcome
}

/// What the terminal tells within that time, if anything.
///
/// # Errors
/// Where the terminal is gone.
pub fn told(within: Duration) -> Result<Option<Event>> {
    let stdin = std::io::stdin();
    let waits = match stdin.is_terminal() {
        true => {
            await_terminal(stdin.as_fd(), within)?;
            Duration::ZERO
        }
        false => within,
    };
    Ok(match event::poll(waits)? {
        true => Some(event::read()?),
        false => None,
    })
}

/// Waits for something to read. Of a terminal that is gone crossterm would read the end for ever, where nobody's SIGHUP ends the process.
fn await_terminal(terminal: BorrowedFd<'_>, within: Duration) -> Result<()> {
    let mut fds = [PollFd::from_borrowed_fd(terminal, PollFlags::IN)];
    match poll(&mut fds, Some(&within.try_into()?)) {
        // Another size of the window is told by a signal.
        Ok(_) | Err(Errno::INTR) => {}
        Err(error) => return Err(error.into()),
    }
    if fds[0].revents().intersects(PollFlags::HUP | PollFlags::ERR) {
        bail!("the terminal is gone");
    }
    Ok(())
}

/// Whether a person has seen enough.
pub fn wants_to_leave(event: &Event) -> bool {
    let Event::Key(key) = event else { return false };
    let interrupt = key.code == KeyCode::Char('c') && key.modifiers.contains(KeyModifiers::CONTROL);
    key.kind == KeyEventKind::Press && (interrupt || matches!(key.code, KeyCode::Char('q') | KeyCode::Esc))
}

fn draw(frame: &mut Frame<'_>, status: &HostStatus) {
    let [table, foot] = Layout::vertical([Fill(1), Length(1)]).areas(frame.area());
    let title = format!(" host {}, links protected by {} ", status.host, status.links);
    let widths = [
        Fill(2),
        Length(8),
        Fill(2),
        Length(10),
        Length(14),
        Length(9),
        Length(9),
        Length(9),
        Length(6),
        Fill(2),
    ];
    let rows = Table::new(status.vms.iter().map(row), widths)
        .header(Row::new(HEAD).style(Style::new().bold()))
        .block(Block::bordered().title(title));
    frame.render_widget(rows, table);
    let help = if status.vms.is_empty() {
        "no VMs; start one with 'dunlin up VM.TOML'   q: quit"
    } else {
        "q: quit"
    };
    frame.render_widget(Line::from(help).dim(), foot);
}

/// Whether a VM is protected, and the colour of that word.
pub fn protection(vm: &VmStatus) -> (&'static str, Color) {
    match (vm.wants_protection, vm.protected) {
        (true, true) => ("protected", Color::Green),
        (true, false) => ("NOT PROTECTED", Color::Red),
        (false, _) => ("not asked for", Color::Reset),
    }
}

fn row(vm: &VmStatus) -> Row<'static> {
    let (protection, colour) = protection(vm);
    let state = match &vm.progress {
        Some(progress) => format!("{} {} %", vm.state, 100 * progress.done / progress.total.max(1)),
        None => vm.state_in_words(),
    };
    let measured = |text: String| if vm.sync.count > 0 { text } else { "-".into() };
    let hosts = vm
        .peers
        .iter()
        .map(|peer| format!("{}{}", peer.host, if peer.connected { "" } else { "(!)" }))
        .collect::<Vec<_>>()
        .join(" ");
    Row::new([
        Cell::from(vm.name.clone()),
        Cell::from(vm.role.to_string()),
        Cell::from(state),
        Cell::from(vm.leader.clone().unwrap_or_else(|| "nobody".into())),
        Cell::from(protection).style(Style::new().fg(colour)),
        Cell::from(vm.epoch.to_string()),
        Cell::from(measured(format!(
            "{:.1} ms",
            vm.sync.median.pause_us as f64 / 1e3
        ))),
        Cell::from(measured(vm.sync.median.divergent.to_string())),
        Cell::from(vm.held_frames.to_string()),
        Cell::from(hosts),
    ])
}

#[cfg(test)]
mod tests {
    use super::*;
    use dunlin_api::State;
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;

    #[test]
    fn a_terminal_that_is_gone_is_no_endless_source_of_nothing() {
        let (terminal, screen) = std::os::unix::net::UnixStream::pair().expect("a pair");
        let await_it = |within| await_terminal(terminal.as_fd(), within);
        await_it(Duration::ZERO).expect("it is there, and says nothing");
        drop(screen);
        let gone = await_it(Duration::from_secs(60)).expect_err("it is gone");
        assert_eq!(gone.to_string(), "the terminal is gone");
    }

    #[test]
    fn an_unprotected_vm_cannot_be_overlooked() {
        let vm = VmStatus {
            name: "shop".into(),
            role: "primary".into(),
            state: State::Alone,
            wants_protection: true,
            ..VmStatus::default()
        };
        let status = HostStatus {
            host: "a".into(),
            vms: vec![vm],
            ..HostStatus::default()
        };
        let mut terminal = Terminal::new(TestBackend::new(140, 6)).expect("a terminal in memory");
        terminal.draw(|frame| draw(frame, &status)).expect("drawn");
        let text = terminal.backend().to_string();
        assert!(
            text.contains("shop") && text.contains("alone") && text.contains("NOT PROTECTED"),
            "{text}"
        );
    }

    #[test]
    fn q_leaves_and_other_keys_do_not() {
        let press = |code| Event::Key(event::KeyEvent::new(code, KeyModifiers::NONE));
        assert!(wants_to_leave(&press(KeyCode::Char('q'))));
        assert!(!wants_to_leave(&press(KeyCode::Char('x'))));
    }
}
