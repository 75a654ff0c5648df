//! What QEMU, the guest and the mirror's other end send.

use crate::script::Script;
use dunlin_core::disk::mirror::{Frame, HEADER_BYTES, Hello, MOST_PAYLOAD_BYTES};
use dunlin_guest::disk::nbd::{ExportInfo, handshake, proto};
use dunlin_guest::frames::{Announcer, FRAME_BYTES_MAX, FrameError, StreamPort, announce::ADDRESSES_MAX};
use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;

/// Whatever a peer sends on a mirror stream: a value, and no length believed that is too long.
pub fn mirror(bytes: &[u8]) {
    if let Some((head, payload)) = bytes.split_first_chunk::<HEADER_BYTES>()
        && let Ok((frame, len)) = Frame::decode(head)
    {
        assert!(len <= MOST_PAYLOAD_BYTES);
        let _any = Frame::check(head, payload);
        let written = frame.header(payload);
        assert_eq!(Frame::decode(&written).map(|(frame, _)| frame), Ok(frame));
        assert_eq!(Frame::check(&written, payload), Ok(()));
    }
    if let Ok((hello, rest)) = Hello::decode(bytes) {
        assert_eq!(hello.encode().as_slice(), &bytes[..bytes.len() - rest.len()]);
    }
}

/// The client's bytes; what the server says is dropped.
struct Client<'a>(&'a [u8]);

impl Read for Client<'_> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        self.0.read(out)
    }
}

impl Write for Client<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Whatever an NBD client sends in the handshake or as a request.
pub fn nbd(bytes: &[u8]) {
    let info = ExportInfo {
        name: "disk0".into(),
        size_bytes: 1 << 20,
        read_only: false,
    };
    let mut client = Client(bytes);
    if let Ok(Some(_session)) = handshake::negotiate(&mut client, &info) {
        let mut head = [0; proto::REQUEST_BYTES];
        while client.read_exact(&mut head).is_ok() && proto::request(&head).is_ok() {}
    }
    let _any = proto::meta_request(bytes).map(|(_, queries)| queries.len());
    let _any = proto::info_request(bytes).map(|(_, asked)| asked.count());
}

/// QEMU's stream, cut anywhere: the frames are those that it holds, and a length that no NIC sends is an error.
pub fn frames(bytes: &[u8]) {
    let (mut port, end) = StreamPort::pair().expect("a socket pair");
    let mut qemu = UnixStream::from(end);
    let mut script = Script(bytes);
    let (mut sent, mut seen) = (Vec::new(), Vec::new());
    while !script.is_over() {
        let n = usize::from(script.u16());
        let piece = script.bytes(n);
        sent.extend_from_slice(piece);
        qemu.write_all(piece).expect("a megabyte fits into the socket");
        match port.read(|frame| seen.push(frame.to_vec())) {
            Ok(_) => {}
            Err(FrameError::Length(length)) => {
                assert!(length > FRAME_BYTES_MAX);
                break;
            }
            Err(other) => panic!("{other}"),
        }
    }
    let mut rest = &sent[..];
    for frame in &seen {
        let (prefix, after) = rest.split_first_chunk::<4>().expect("a prefix of every frame");
        assert_eq!(u32::from_be_bytes(*prefix) as usize, frame.len());
        assert_eq!(&after[..frame.len()], frame);
        rest = &after[frame.len()..];
    }
}

/// Frames of a guest, which may say anything: no more addresses are kept than agreed, each announced once.
pub fn announce(bytes: &[u8]) {
    let mac = [0x52, 0x54, 0, 0x12, 0x34, 0x56];
    let mut announcer = Announcer::new(mac);
    let mut script = Script(bytes);
    while !script.is_over() {
        let n = usize::from(script.byte());
        let mut frame = script.bytes(n).to_vec();
        if let Some(source) = frame.get_mut(6..12) {
            source.copy_from_slice(&mac);
        }
        announcer.learn(&frame);
    }
    let known = announcer.addresses().count();
    assert!(known <= ADDRESSES_MAX);
    assert_eq!(announcer.frames().len(), known.max(1));
}
