//! Takes secrets out of what goes into a bundle: whole, line by line, and as bytes are printed.
//!
//! **Invariants**: 1. a line that has a part of a secret that is long enough to be told from chance is replaced whole. 2. the lines of a private key in PEM
//! are left out even if it is nobody's known. **Not here**: which secrets there are.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;

/// What stands in a secret's place.
pub const REMOVED: &str = "[removed: a secret]";
/// So many bytes of a secret in a row are a leak.
const PIECE: usize = 16;

pub struct Scrubber {
    needles: Vec<String>,
}

impl Scrubber {
    /// `secrets`: the text of key files and secret files, and addresses with secrets in them.
    pub fn new(secrets: impl IntoIterator<Item = String>) -> Self {
        let mut needles = Vec::new();
        for secret in secrets {
            let secret = secret.trim();
            let body: Vec<&str> = secret
                .lines()
                .map(str::trim)
                .filter(|line| !line.starts_with("---"))
                .collect();
            let is_pem = secret.starts_with("-----BEGIN");
            // The last line of a key may be too short to tell it from chance.
            let least = if is_pem { PIECE } else { 4 };
            needles.extend(
                body.iter()
                    .filter(|line| line.len() >= least)
                    .map(|line| (*line).to_owned()),
            );
            // Also as the bytes that it stands for are printed.
            let bytes = match is_pem {
                true => STANDARD.decode(body.concat()).unwrap_or_default(),
                false => secret.as_bytes().to_vec(),
            };
            needles.extend(bytes.chunks_exact(PIECE).flat_map(forms));
        }
        Self { needles }
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
            if is_key || self.needles.iter().any(|needle| line.contains(needle.as_str())) {
                scrubbed.push_str(REMOVED);
                scrubbed.push('\n');
            } else {
                scrubbed.push_str(line);
            }
        }
        scrubbed.into_bytes()
    }
}

/// How bytes may be printed.
fn forms(bytes: &[u8]) -> [String; 3] {
    let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    let list: Vec<String> = bytes.iter().map(u8::to_string).collect();
    [hex.to_uppercase(), hex, list.join(", ")]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_secret_is_taken_out_in_every_form_and_the_rest_stays() {
        let key = "-----BEGIN PRIVATE KEY-----\nAAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=\n-----END PRIVATE KEY-----\n";
        let scrubber = Scrubber::new([key.to_owned(), "what nobody else may know\n".to_owned()]);
        for leak in [
            "key AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8= read",
            "000102030405060708090a0b0c0d0e0f10",
            "000102030405060708090A0B0C0D0E0F10",
            "Tls([0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16])",
            "--secret what nobody else may know",
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
