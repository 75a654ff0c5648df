//! Where a process' own memory is: its heap, its threads' arenas and stacks, or what it has mapped.

use std::collections::BTreeMap;

/// Own memory by the kind of its mapping: KiB, and how many mappings have any.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Places(BTreeMap<&'static str, (u64, usize)>);

impl Places {
    /// As the kernel says it now; of a process that has ended, nothing.
    pub fn of(pid: i32) -> Self {
        Self::read(&std::fs::read_to_string(format!("/proc/{pid}/smaps")).unwrap_or_default())
    }

    fn read(smaps: &str) -> Self {
        let mut places = Self::default();
        let mut kind = "other";
        for line in smaps.lines() {
            let mut words = line.split_whitespace();
            let first = words.next().unwrap_or_default();
            if let Some(name) = first.strip_suffix(':') {
                let kib = words.next().and_then(|word| word.parse().ok()).unwrap_or(0);
                if name == "Anonymous" && kib > 0 {
                    let place = places.0.entry(kind).or_default();
                    *place = (place.0 + kib, place.1 + 1);
                }
            } else if let Some((from, to)) = first.split_once('-') {
                // Permissions, offset, device, inode; then what it is of.
                let of = words.nth(4).unwrap_or_default();
                let number = |text| u64::from_str_radix(text, 16).unwrap_or(0);
                kind = kind_of(of, number(to).saturating_sub(number(from)));
            }
        }
        places
    }

    /// What differs from an earlier look, for people.
    pub fn since(&self, then: &Self) -> String {
        let kinds = self.0.iter().map(|(kind, now)| {
            let before = then.0.get(kind).copied().unwrap_or_default();
            format!(
                "{kind} {} -> {} KiB in {} -> {} mappings",
                before.0, now.0, before.1, now.1
            )
        });
        kinds.collect::<Vec<_>>().join(", ")
    }
}

fn kind_of(of: &str, bytes: u64) -> &'static str {
    /// As large as a coroutine's stack in QEMU; a thread's is larger, and its part of glibc's arenas larger still or smaller.
    const COROUTINE: u64 = 1 << 20;
    const THREAD: u64 = 8 << 20;
    match of {
        "[heap]" => "heap",
        "[stack]" => "stack",
        "" if bytes < COROUTINE => "small mappings",
        "" if bytes == COROUTINE => "mappings of 1 MiB",
        "" if bytes <= THREAD => "mappings to 8 MiB",
        "" => "larger mappings",
        _ => "files",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn own_memory_is_found_where_the_kernel_says_it_is() {
        let smaps = "55d0-65d0 rw-p 00000000 00:00 0                          [heap]\n\
                     Size:               4 kB\nAnonymous:          40 kB\nVmFlags: rd wr\n\
                     7f00000000-7f00100000 rw-p 00000000 00:00 0 \nAnonymous:          12 kB\n\
                     7f10000000-7f10100000 rw-p 00000000 00:00 0 \nAnonymous:           8 kB\n\
                     7f20000000-7f20001000 r--p 00000000 08:01 77             /usr/lib/x.so\nAnonymous:           4 kB\n\
                     7f30000000-7f30001000 rw-p 00000000 00:00 0 \nAnonymous:           0 kB\n";
        let places = Places::read(smaps);
        assert_eq!(
            places.0,
            BTreeMap::from([
                ("heap", (40, 1)),
                ("mappings of 1 MiB", (20, 2)),
                ("files", (4, 1))
            ])
        );
        let said = places.since(&Places::default());
        assert!(said.contains("heap 0 -> 40 KiB in 0 -> 1 mappings"), "{said}");
    }
}
