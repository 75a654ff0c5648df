//! What the tester found, for people and as JSON.
//!
//! Decides:    the verdict.
//! Not here:   what is compared (`dunlin_core::program::outputs`).

use dunlin_core::program::order;
use dunlin_core::program::outputs::{FirstDifference, SHOWN_BYTES, Tally};
use std::fmt::Write;

use crate::tsc::Reads;

/// What a run of the tester found.
#[derive(Clone, Debug)]
pub struct Report {
    /// How many copies ran.
    pub copies: usize,
    /// What was compared.
    pub tally: Tally,
    /// The first difference.
    pub first: Option<FirstDifference>,
    /// What was delivered.
    pub inputs: order::Counters,
    /// From the first input to the last output, in microseconds.
    pub took_us: u64,
    /// What ended, and how: a copy, or the client. One line each.
    pub ends: Vec<String>,
    /// Some copies ended, others did not, or otherwise.
    pub ended_apart: bool,
    /// What makes the run worth nothing: one line each.
    pub faults: Vec<String>,
    /// Who has read the processor's own clock, if that was to be told.
    pub tsc: Option<Reads>,
}

/// What it comes to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Verdict {
    /// All copies said the same.
    Equal,
    /// They did not.
    Different,
    /// Nothing can be said: no output and no end, or a client that failed.
    Nothing,
}

impl Report {
    /// What it comes to. A difference is one, whatever else went wrong.
    #[must_use]
    pub fn verdict(&self) -> Verdict {
        if !self.tally.is_equal() || self.ended_apart {
            Verdict::Different
        } else if !self.faults.is_empty() || self.tally.outputs() + self.tally.ends_equal == 0 {
            Verdict::Nothing
        } else {
            Verdict::Equal
        }
    }

    /// Differing outputs of 1,000.
    #[must_use]
    pub fn per_thousand(&self) -> f64 {
        1000.0 * self.tally.differing as f64 / self.tally.outputs().max(1) as f64
    }

    /// For people; ends in a line with the verdict.
    #[must_use]
    pub fn text(&self) -> String {
        let mut text = String::new();
        let tally = &self.tally;
        let mut say = |line: std::fmt::Arguments<'_>| {
            // A String takes everything.
            let _ = writeln!(text, "{line}");
        };
        say(format_args!(
            "outputs      {} compared ({} bytes), {} equal, {} differing: {:.1} of 1,000",
            tally.outputs(),
            tally.bytes,
            tally.equal,
            tally.differing,
            self.per_thousand()
        ));
        say(format_args!(
            "connections  {} ended alike, {} not; {} lost sight of",
            tally.ends_equal, tally.ends_differing, tally.lost_sight
        ));
        let seconds = self.took_us as f64 / 1e6;
        say(format_args!(
            "inputs       {} in {seconds:.1} s ({:.0} a second); {} were not waited for to the end, {} lost",
            self.inputs.inputs,
            self.inputs.inputs as f64 / seconds.max(1e-6),
            self.inputs.impatient,
            self.inputs.lost
        ));
        let tsc = self.tsc.as_ref().map(Reads::lines).unwrap_or_default();
        for line in tsc.iter().chain(&self.ends).chain(&self.faults) {
            say(format_args!("{line}"));
        }
        if let Some(first) = &self.first {
            text.push_str(&difference(first));
        }
        let verdict = match self.verdict() {
            Verdict::Equal => "EQUAL: all copies said the same",
            Verdict::Different => "DIFFERENT: the copies do not say the same",
            Verdict::Nothing => "NOTHING: there is nothing to compare",
        };
        let _ = writeln!(text, "check: {verdict}");
        text
    }

    /// One object.
    #[must_use]
    pub fn json(&self) -> serde_json::Value {
        let tally = &self.tally;
        let first = self.first.as_ref().map(|first| {
            serde_json::json!({
                "client": format!("{}:{}", first.key.peer, first.key.peer_port),
                "port": first.key.vm_port,
                "output": first.number,
                "copy": first.copy + 1,
                "at": first.at,
                "input": hexdump(&first.input, 0),
                "copy_1": hexdump(&first.first, first.shown_from),
                "other": hexdump(&first.other, first.shown_from),
            })
        });
        let tsc = self.tsc.as_ref().map(|reads| {
            serde_json::json!({
                "reads": reads.by_program(),
                "reads_of_the_loader": reads.by_loader(),
                "places": reads.places(),
            })
        });
        serde_json::json!({
            "verdict": match self.verdict() {
                Verdict::Equal => "equal",
                Verdict::Different => "different",
                Verdict::Nothing => "nothing",
            },
            "copies": self.copies,
            "outputs": tally.outputs(),
            "bytes": tally.bytes,
            "equal": tally.equal,
            "differing": tally.differing,
            "differing_of_1000": self.per_thousand(),
            "connections_ended_alike": tally.ends_equal,
            "connections_ended_apart": tally.ends_differing,
            "lost_sight": tally.lost_sight,
            "inputs": self.inputs.inputs,
            "not_waited_for": self.inputs.impatient,
            "inputs_lost": self.inputs.lost,
            "took_us": self.took_us,
            "ends": self.ends,
            "faults": self.faults,
            "first_difference": first,
            "tsc": tsc,
        })
    }
}

fn difference(first: &FirstDifference) -> String {
    let key = &first.key;
    let mut text = format!(
        "first difference: output {} of the conversation of {}:{} with port {}, copy {}, byte {}\n",
        first.number,
        key.peer,
        key.peer_port,
        key.vm_port,
        first.copy + 1,
        first.at
    );
    let parts = [
        (
            format!("after the input (its first {SHOWN_BYTES} bytes at most)"),
            &first.input,
            0,
        ),
        ("copy 1 said".to_owned(), &first.first, first.shown_from),
        (
            format!("copy {} said", first.copy + 1),
            &first.other,
            first.shown_from,
        ),
    ];
    for (title, bytes, from) in parts {
        let _ = writeln!(text, "  {title}:");
        if bytes.is_empty() {
            text.push_str("    nothing\n");
        }
        for line in hexdump(bytes, from) {
            let _ = writeln!(text, "    {line}");
        }
    }
    text
}

/// Sixteen bytes a line: where they lie (the first one at `from`), in hexadecimal, and as text where they are.
pub fn hexdump(bytes: &[u8], from: usize) -> Vec<String> {
    let line = |(n, part): (usize, &[u8])| {
        let hex: String = part.iter().map(|byte| format!("{byte:02x} ")).collect();
        let is_text = |byte: &u8| (0x20..0x7f).contains(byte);
        let text: String = part
            .iter()
            .map(|byte| if is_text(byte) { char::from(*byte) } else { '.' })
            .collect();
        format!("{:06x}  {hex:<48} |{text}|", from + 16 * n)
    };
    bytes.chunks(16).enumerate().map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report() -> Report {
        Report {
            copies: 2,
            tally: Tally {
                equal: 999,
                ..Tally::default()
            },
            first: None,
            inputs: order::Counters::default(),
            took_us: 1_000_000,
            ends: Vec::new(),
            ended_apart: false,
            faults: Vec::new(),
            tsc: None,
        }
    }

    #[test]
    fn the_verdict_is_the_worst_that_is_known_for_certain() {
        assert_eq!(report().verdict(), Verdict::Equal);
        let mut differs = report();
        differs.tally.differing = 1;
        differs.faults.push("client: exit code 1".to_owned());
        assert_eq!(differs.verdict(), Verdict::Different);
        assert!((differs.per_thousand() - 1.0).abs() < 1e-9);
        let mut apart = report();
        apart.ended_apart = true;
        assert_eq!(apart.verdict(), Verdict::Different);
        let mut silent = report();
        silent.tally.equal = 0;
        assert_eq!(silent.verdict(), Verdict::Nothing);
        let mut failed = report();
        failed.faults.push("client: exit code 1".to_owned());
        assert_eq!(failed.verdict(), Verdict::Nothing);
    }

    #[test]
    fn a_hexdump_says_where_and_what() {
        assert_eq!(
            hexdump(b":41\r\n", 0x20),
            ["000020  3a 34 31 0d 0a                                   |:41..|"]
        );
        assert_eq!(hexdump(&[0; 17], 0).len(), 2);
    }
}
