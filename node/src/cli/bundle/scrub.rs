//! Takes secrets out of what goes into a bundle: whole, in pieces, and as bytes are printed.
//!
//! **Invariants**: 1. a line that has a part of a secret that is long enough to be told from chance is replaced whole: as text, in hexadecimal digits, in
//! base64 from whichever byte on, or as a list of bytes. 2. the lines of a private key in PEM, and those with a token that lets a host in, are left out
//! even if they are nobody's known. **Not here**: which secrets there are.

use base64::Engine;
use base64::engine::general_purpose::{STANDARD, URL_SAFE};
use std::collections::HashSet;

/// What stands in a secret's place.
pub const REMOVED: &str = "[removed: a secret]";
/// So many bytes of a secret in a row are a leak, and so many digits of its text.
const PIECE: usize = 16;
/// What a token begins with (fabric's `enroll`).
const TOKEN: &str = "dunlin1-";

pub struct Scrubber {
    needles: Vec<String>,
    /// Every piece of a secret's text and of its digits.
    pieces: HashSet<[u8; PIECE]>,
}

impl Scrubber {
    /// `secrets`: the bytes of key files and secret files, and addresses with secrets in them.
    pub fn new(secrets: impl IntoIterator<Item = Vec<u8>>) -> Self {
        let mut scrubber = Self {
            needles: Vec::new(),
            pieces: HashSet::new(),
        };
        for secret in secrets {
            scrubber.learn(secret.trim_ascii());
        }
        scrubber
    }

    fn learn(&mut self, secret: &[u8]) {
        let text = String::from_utf8_lossy(secret);
        let lines = text.lines().map(str::trim);
        let body: Vec<&str> = lines.filter(|line| !line.starts_with("---")).collect();
        let is_pem = text.starts_with("-----BEGIN");
        // The last line of a key may be too short to tell it from chance.
        let least = if is_pem { PIECE } else { 4 };
        let lines = body.iter().filter(|line| line.len() >= least);
        self.needles.extend(lines.map(|line| (*line).to_owned()));
        let body = body.concat();
        let bytes = match is_pem {
            true => STANDARD.decode(&body).unwrap_or_default(),
            false => secret.to_vec(),
        };
        // Other addresses may begin as this one does.
        let own = body.split_once("://").map_or(body.as_str(), |(_, own)| own);
        self.learn_pieces(own.as_bytes());
        // What of them is text, as a program prints that takes them for text.
        self.learn_pieces(&bytes);
        let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        self.learn_pieces(hex.to_uppercase().as_bytes());
        self.learn_pieces(hex.as_bytes());
        for from in 0..bytes.len().min(3) {
            self.learn_pieces(STANDARD.encode(&bytes[from..]).trim_end_matches('=').as_bytes());
            self.learn_pieces(URL_SAFE.encode(&bytes[from..]).trim_end_matches('=').as_bytes());
        }
        for piece in bytes.chunks_exact(PIECE) {
            let list: Vec<String> = piece.iter().map(u8::to_string).collect();
            self.needles.push(list.join(", "));
        }
    }

    fn learn_pieces(&mut self, text: &[u8]) {
        let pieces = text.windows(PIECE);
        self.pieces
            .extend(pieces.filter_map(|piece| <[u8; PIECE]>::try_from(piece).ok()));
    }

    fn is_in(&self, line: &str) -> bool {
        let whole = self.needles.iter().any(|needle| line.contains(needle.as_str()));
        whole
            || line.contains(TOKEN)
            || line
                .as_bytes()
                .windows(PIECE)
                .any(|piece| self.pieces.contains(piece))
    }

    /// `words` without what must not be told.
    pub fn scrub(&self, words: &[u8]) -> Vec<u8> {
        let text = String::from_utf8_lossy(words);
        let mut scrubbed = String::with_capacity(text.len());
        let mut in_key = false;
        for line in text.split_inclusive('\n') {
            let is_key = in_key || line.contains("PRIVATE KEY");
            in_key = match line.contains("PRIVATE KEY") {
                true => line.contains("BEGIN") && !line.contains("END"),
                // A key has some lines: what begins like one and does not end is not the rest of a file.
                false => in_key && !line.contains("-----") && !line.trim().is_empty(),
            };
            if is_key || self.is_in(line) {
                scrubbed.push_str(REMOVED);
                scrubbed.push('\n');
            } else {
                scrubbed.push_str(line);
            }
        }
        scrubbed.into_bytes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_secret_is_taken_out_in_every_form_and_the_rest_stays() {
        let key = "-----BEGIN PRIVATE KEY-----\nAAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=\n-----END PRIVATE KEY-----\n";
        let scrubber = Scrubber::new([key.into(), b"what nobody else may know\n".to_vec()]);
        for leak in [
            "key AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8= read",
            "000102030405060708090a0b0c0d0e0f10",
            "000102030405060708090A0B0C0D0E0F10",
            "Tls([0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16])",
            "--secret what nobody else may know",
            "cut short: hat nobody else may kn",
            "d2hhdCBub2JvZHkgZWxzZSBtYXkga25vdwo=",
            "in a list, from its second byte on: aGF0IG5vYm9keSBlbHNlIG1heQ",
            "wrapped: EBESExQVFhcYGRobHB0e",
            "say: dunlin cluster join dunlin1-abcdef",
        ] {
            let text = format!("before\n{leak}\nafter\n");
            let scrubbed = String::from_utf8(scrubber.scrub(text.as_bytes())).expect("text");
            assert_eq!(scrubbed, format!("before\n{REMOVED}\nafter\n"), "{leak}");
        }
        let stranger = "x\n-----BEGIN EC PRIVATE KEY-----\nabc\ndef\n-----END EC PRIVATE KEY-----\ny\n";
        let scrubbed = String::from_utf8(scrubber.scrub(stranger.as_bytes())).expect("text");
        assert!(
            !scrubbed.contains("abc") && !scrubbed.contains("def"),
            "{scrubbed}"
        );
        assert!(
            scrubbed.starts_with("x\n") && scrubbed.ends_with("\ny\n"),
            "{scrubbed}"
        );
        let plain = b"ready: host a\nno secret \xff here\n";
        assert!(scrubber.scrub(plain).starts_with(b"ready: host a\nno secret "));
    }
}
