//! Whatever a peer sends on a mirror stream, the decoders answer with a value, and believe no length that is too long.
#![no_main]

use dunlin_core::disk::mirror::{Frame, HEADER_BYTES, Hello, MOST_PAYLOAD_BYTES};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    if let Some((head, payload)) = bytes.split_first_chunk::<HEADER_BYTES>() {
        if let Ok((frame, len)) = Frame::decode(head) {
            assert!(len <= MOST_PAYLOAD_BYTES);
            let _any = Frame::check(head, payload);
            let written = frame.header(payload);
            assert_eq!(Frame::decode(&written).map(|(frame, _)| frame), Ok(frame));
        }
    }
    if let Ok((hello, rest)) = Hello::decode(bytes) {
        assert_eq!(hello.encode().as_slice(), &bytes[..bytes.len() - rest.len()]);
    }
});
