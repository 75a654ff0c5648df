//! Messages: what decodes is exactly what encodes.

use bytes::{Bytes, BytesMut};
use dunlin_core::wire::{agreed as entries, consensus as messages, sync as syncs};

pub fn agreed(bytes: &[u8]) {
    let bytes = Bytes::copy_from_slice(bytes);
    if let Ok(entry) = entries::decode(bytes.clone()) {
        assert_eq!(entries::encode(&entry), bytes);
    }
    if let Ok(state) = entries::decode_state(bytes) {
        assert_eq!(entries::decode_state(entries::encode_state(&state)), Ok(state));
    }
}

pub fn consensus(bytes: &[u8]) {
    let mut again = Vec::new();
    if let Ok(message) = messages::decode(bytes) {
        messages::encode(&message, &mut again);
        assert_eq!(again, bytes);
    }
    if let Ok(members) = messages::decode_members(bytes) {
        assert_eq!(messages::encode_members(&members), bytes);
    }
    again.clear();
    if let Ok(snapshot) = messages::decode_snapshot(bytes) {
        messages::encode_snapshot(&snapshot, &mut again);
        assert_eq!(again, bytes);
    }
    again.clear();
    if let Ok(entry) = messages::decode_entry(bytes) {
        messages::encode_entry(&entry, &mut again);
        assert_eq!(again, bytes);
    }
}

pub fn sync(bytes: &[u8]) {
    let Ok(message) = syncs::decode(Bytes::copy_from_slice(bytes)) else {
        return;
    };
    // Runs of pages may overlap on the wire; what comes of them does not.
    let mut again = BytesMut::new();
    syncs::encode(&message, &mut again).expect("no longer than what was read");
    let again = again.freeze();
    let told = u32::from_be_bytes(again[..4].try_into().expect("4 bytes")) as usize;
    assert_eq!(told, again.len() - 4);
    assert!(again.len() - 4 <= bytes.len());
    assert_eq!(syncs::decode(again.slice(4..)), Ok(message));
}
