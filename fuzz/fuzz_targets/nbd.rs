//! Whatever an NBD client sends in the handshake or as a request, the decoders answer with a value.
#![no_main]

use dunlin_guest::disk::nbd::{ExportInfo, handshake, proto};
use libfuzzer_sys::fuzz_target;
use std::io::{self, Read, Write};

/// The client's bytes; what the server says is dropped.
struct Script<'a>(&'a [u8]);

impl Read for Script<'_> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        self.0.read(out)
    }
}

impl Write for Script<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fuzz_target!(|bytes: &[u8]| {
    let info = ExportInfo {
        name: "disk0".into(),
        size_bytes: 1 << 20,
        read_only: false,
    };
    let mut script = Script(bytes);
    if let Ok(Some(_session)) = handshake::negotiate(&mut script, &info) {
        let mut head = [0; proto::REQUEST_BYTES];
        while script.read_exact(&mut head).is_ok() && proto::request(&head).is_ok() {}
    }
    let _any = proto::meta_request(bytes).map(|(_, queries)| queries.len());
    let _any = proto::info_request(bytes).map(|(_, asked)| asked.count());
});
