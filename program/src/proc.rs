//! The kernel's files about processes, as text.
//!
//! Decides:    nothing.
//! Invariants: 1. nobody is missed for its name: that may be any bytes, and PR_SET_NAME and exec cut one of ordinary Cyrillic or Chinese letters inside
//!             a letter.
//! Source:     proc(5), prctl(2). Not here: what is read out of it.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

/// As `fs::read_to_string`, which asks for the length first, of which these files know nothing, and then reads them in pieces; and which refuses
/// what is not UTF-8.
pub(crate) fn text(path: impl AsRef<Path>) -> io::Result<String> {
    let (mut file, mut all, mut piece) = (File::open(path)?, Vec::new(), [0; 4096]);
    loop {
        match file.read(&mut piece) {
            Ok(0) => break,
            Ok(length) => all.extend_from_slice(&piece[..length]),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(String::from_utf8_lossy(&all).into_owned())
}

/// Whether it says that the process or thread has ended. Anything else (too many open files) says nothing of it.
pub(crate) fn has_gone(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::NotFound || error.raw_os_error() == Some(libc::ESRCH)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_of_any_bytes_hides_nothing_behind_it() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("status");
        std::fs::write(&path, b"Name:\t\xd0\xbf\xd1\nNSpid:\t4711\t2\n").expect("written");
        let text = text(&path).expect("read");
        assert!(text.ends_with("\nNSpid:\t4711\t2\n"), "{text}");
    }

    #[test]
    fn only_who_has_gone_is_gone() {
        let missing = text("/proc/self/task/0/stat").expect_err("there is no such thread");
        assert!(has_gone(&missing));
        assert!(has_gone(&io::Error::from_raw_os_error(libc::ESRCH)));
        assert!(!has_gone(&io::Error::from_raw_os_error(libc::EMFILE)));
    }
}
