use super::*;

#[test]
fn short_long_and_unknown_are_values() {
    let mut bytes = Vec::new();
    encode(
        &Message::Lead {
            term: Term(1),
            commit: Index(2),
            beat: 3,
        },
        &mut bytes,
    );
    assert_eq!(decode(&bytes[..24]), Err(WireError::Short { missing_bytes: 1 }));
    bytes.push(0);
    assert_eq!(decode(&bytes), Err(WireError::Long { extra_bytes: 1 }));
    assert_eq!(
        decode(&[200]),
        Err(WireError::Unknown {
            what: "message kind",
            value: 200
        })
    );
    assert_eq!(decode(&[]), Err(WireError::Short { missing_bytes: 1 }));
}
