//! What a person types on the hosts, and what they read: kept for the book, and counted.
//!
//! * **Decides:** which of it is shown (a token is not, nor what apt says), and what counts as typed.
//! * **Not here:** looks of the trial's own at the hosts ([`Machine::run`]).

use std::fmt::Write as _;
use std::sync::Mutex;

use anyhow::Result;

use super::machine::Machine;

/// How a token begins: whoever reads a transcript is not to be let in by it.
const TOKEN: &str = "dunlin1-";
/// Lines of one answer that are shown; longer ones are cut in the middle.
const SHOWN: usize = 12;
/// Keys in a minute of somebody who types commands and not prose: 40 words of five letters.
const KEYS_A_MINUTE: f64 = 200.0;

/// All that was typed, in its order.
#[derive(Default)]
pub struct Transcript(Mutex<Typed>);

#[derive(Default)]
struct Typed {
    text: String,
    commands: usize,
    keys: usize,
}

impl Transcript {
    /// Types `command` on a host, and returns what it said.
    pub fn types(&self, machine: &Machine, command: &str) -> Result<String> {
        let said = machine.run(&format!("cd; {{ {command}; }} 2>&1"))?;
        self.reads(machine, command, &said);
        Ok(said)
    }

    /// What a command that waits has said so far.
    pub fn reads(&self, machine: &Machine, command: &str, said: &str) {
        self.note(machine.name(), command, said);
    }

    /// What was done without a keyboard.
    pub fn tells(&self, what: &str) {
        let mut typed = self.typed();
        let _ = writeln!(typed.text, "\n# {what}\n");
    }

    fn note(&self, host: &str, command: &str, said: &str) {
        let mut typed = self.typed();
        typed.commands += 1;
        // A token is pasted; the line ends with a key.
        let typed_in = without_tokens(command).replace("dunlin1-...", "");
        typed.keys += typed_in.chars().count() + 1;
        let _ = writeln!(typed.text, "root@{host}:~# {}", without_tokens(command));
        for line in shown(command, said) {
            let _ = writeln!(typed.text, "{}", without_tokens(&line));
        }
    }

    fn typed(&self) -> std::sync::MutexGuard<'_, Typed> {
        self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    /// The text, and how much was typed.
    pub fn finish(self) -> (String, Counted) {
        let typed = self
            .0
            .into_inner()
            .unwrap_or_else(std::sync::PoisonError::into_inner);
        let counted = Counted {
            commands: typed.commands,
            keys: typed.keys,
            minutes: typed.keys as f64 / KEYS_A_MINUTE,
        };
        (typed.text, counted)
    }
}

/// How much was typed.
pub struct Counted {
    commands: usize,
    keys: usize,
    /// For somebody who types [`KEYS_A_MINUTE`].
    pub minutes: f64,
}

impl std::fmt::Display for Counted {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            out,
            "{} commands, {} keys (tokens are pasted): {:.1} minutes of typing at {KEYS_A_MINUTE:.0} keys a minute",
            self.commands, self.keys, self.minutes
        )
    }
}

/// The lines that are shown of an answer.
fn shown(command: &str, said: &str) -> Vec<String> {
    if command.starts_with("apt") {
        return vec!["...".to_owned()];
    }
    let lines: Vec<&str> = said.lines().collect();
    if lines.len() <= SHOWN {
        return lines.into_iter().map(str::to_owned).collect();
    }
    let (first, last) = (SHOWN / 2, SHOWN - SHOWN / 2);
    let left_out = format!("... {} lines ...", lines.len() - SHOWN);
    let first = lines[..first].iter().copied().map(str::to_owned);
    let last = lines[lines.len() - last..].iter().copied().map(str::to_owned);
    first.chain([left_out]).chain(last).collect()
}

/// Each token's beginning, and dots for the rest of it.
fn without_tokens(text: &str) -> String {
    let mut left = String::new();
    let mut rest = text;
    while let Some(at) = rest.find(TOKEN) {
        left.push_str(&rest[..at + TOKEN.len()]);
        left.push_str("...");
        let after = &rest[at + TOKEN.len()..];
        let end = after.find(char::is_whitespace).unwrap_or(after.len());
        rest = &after[end..];
    }
    left.push_str(rest);
    left
}

#[cfg(test)]
mod tests {
    use super::{Transcript, shown, without_tokens};

    #[test]
    fn no_token_is_in_a_transcript() {
        let text =
            "on host b:\n  dunlin cluster join dunlin1-AbC_9\non host c:\n  dunlin cluster join dunlin1-xyz";
        assert_eq!(
            without_tokens(text),
            "on host b:\n  dunlin cluster join dunlin1-...\non host c:\n  dunlin cluster join dunlin1-..."
        );
        let transcript = Transcript::default();
        transcript.note(
            "b",
            "dunlin cluster join dunlin1-AbC_9",
            "joined by dunlin1-AbC_9\n",
        );
        let (text, counted) = transcript.finish();
        assert!(!text.contains("AbC"), "{text}");
        assert_eq!((counted.commands, counted.keys), (1, 21), "{counted}");
    }

    #[test]
    fn long_answers_are_cut_in_the_middle() {
        let said: String = (0..40).map(|line| format!("{line}\n")).collect();
        let lines = shown("dunlin check", &said);
        assert_eq!(
            (
                lines.len(),
                lines[0].as_str(),
                lines[6].as_str(),
                lines[12].as_str()
            ),
            (13, "0", "... 28 lines ...", "39")
        );
        assert_eq!(shown("apt-get install -y /dunlin.deb", &said), ["..."]);
    }
}
