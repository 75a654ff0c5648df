//! Log payloads: `Agreed` and the agreed state (the log's snapshot) as bytes.
//!
//! Layout, big-endian: tag (1), then for frames: count (2), and per frame NIC (1), length (4), bytes; for a time: the monotonic clock (8), the
//! wall clock (8), frames as above; for a seed: its bytes (32); for hosts: count (1), and per host id (1), part (1), length of the name (1), name. A state ends with a
//! time where one was agreed.

use super::{Reader, WireError};
use crate::agreed::{
    Agreed, AgreedState, AgreedTime, Frame, HostPart, Hosts, Life, MOST_HOSTS, Part, ReplicaSet, SEED_BYTES,
};
use crate::policy::Policy;
use crate::units::{Epoch, ReplicaId};
use bytes::{BufMut, Bytes, BytesMut};

const FRAMES: u8 = 1;
const SYNC: u8 = 2;
const SYNC_DONE: u8 = 3;
const COMPLETE: u8 = 4;
const DOWN: u8 = 5;
const POLICY: u8 = 6;
const HOSTS: u8 = 7;
const TIMED: u8 = 8;
const SEED: u8 = 9;

/// In a snapshot: nobody has said otherwise than the VM's file.
const AS_IN_ITS_FILE: u8 = u8::MAX;

/// The most frames in one entry.
pub const MOST_FRAMES: usize = 256;

/// An entry's payload.
#[must_use]
pub fn encode(entry: &Agreed) -> Bytes {
    let mut out = BytesMut::new();
    match entry {
        Agreed::Frames(frames) => {
            out.reserve(1 + frames_bytes(frames));
            out.put_u8(FRAMES);
            put_frames(&mut out, frames);
        }
        Agreed::Timed { time, frames } => {
            out.reserve(17 + frames_bytes(frames));
            out.put_u8(TIMED);
            put_time(&mut out, *time);
            put_frames(&mut out, frames);
        }
        Agreed::Seed(seed) => {
            out.put_u8(SEED);
            out.put_slice(seed);
        }
        Agreed::Sync { epoch } => put_epoch(&mut out, SYNC, *epoch),
        Agreed::SyncDone { epoch } => put_epoch(&mut out, SYNC_DONE, *epoch),
        Agreed::Complete { set, epoch } => {
            put_epoch(&mut out, COMPLETE, *epoch);
            out.put_u64(set.0);
        }
        Agreed::Policy(policy) => {
            out.put_u8(POLICY);
            out.put_u8(policy.number());
        }
        Agreed::Hosts(hosts) => {
            out.put_u8(HOSTS);
            put_hosts(&mut out, hosts);
        }
        Agreed::Down => out.put_u8(DOWN),
    }
    out.freeze()
}

fn frames_bytes(frames: &[Frame]) -> usize {
    2 + frames.iter().map(|frame| 5 + frame.bytes.len()).sum::<usize>()
}

fn put_frames(out: &mut BytesMut, frames: &[Frame]) {
    assert!(frames.len() <= MOST_FRAMES, "a batch is cut by the caller");
    out.put_u16(frames.len() as u16);
    for frame in frames {
        out.put_u8(frame.nic);
        out.put_u32(frame.bytes.len() as u32);
        out.put_slice(&frame.bytes);
    }
}

fn frames(reader: &mut Reader) -> Result<Vec<Frame>, WireError> {
    let count = usize::from(reader.u16()?);
    if count > MOST_FRAMES {
        return Err(WireError::Invalid("frame count"));
    }
    let mut frames = Vec::with_capacity(count);
    for _ in 0..count {
        let nic = reader.u8()?;
        let len = reader.u32()? as usize;
        frames.push(Frame {
            nic,
            bytes: reader.take(len)?,
        });
    }
    Ok(frames)
}

fn put_time(out: &mut BytesMut, time: AgreedTime) {
    out.put_u64(time.monotonic_ns);
    out.put_u64(time.wall_ns);
}

fn time(reader: &mut Reader) -> Result<AgreedTime, WireError> {
    Ok(AgreedTime {
        monotonic_ns: reader.u64()?,
        wall_ns: reader.u64()?,
    })
}

fn put_hosts(out: &mut BytesMut, hosts: &[HostPart]) {
    assert!(hosts.len() <= MOST_HOSTS, "numbers are never used again");
    out.put_u8(hosts.len() as u8);
    for host in hosts {
        let name = host.name.as_bytes();
        assert!(
            name.len() <= HostPart::LONGEST_NAME,
            "the cluster's file is checked"
        );
        out.put_u8(host.id.0);
        out.put_u8(match host.part {
            Part::Copy => 0,
            Part::Witness => 1,
            Part::Gone => 2,
            Part::Standby => 3,
        });
        out.put_u8(name.len() as u8);
        out.put_slice(name);
    }
}

fn hosts(reader: &mut Reader) -> Result<Hosts, WireError> {
    let count = usize::from(reader.u8()?);
    if count > MOST_HOSTS {
        return Err(WireError::Invalid("host count"));
    }
    let mut hosts = Vec::with_capacity(count);
    for _ in 0..count {
        let id = ReplicaId(reader.u8()?);
        let part = match reader.u8()? {
            0 => Part::Copy,
            1 => Part::Witness,
            2 => Part::Gone,
            3 => Part::Standby,
            _ => return Err(WireError::Invalid("part")),
        };
        let len = usize::from(reader.u8()?);
        let name = String::from_utf8(reader.take(len)?.to_vec());
        let name = name.map_err(|_| WireError::Invalid("host name"))?;
        if usize::from(id.0) >= MOST_HOSTS || name.is_empty() {
            return Err(WireError::Invalid("host"));
        }
        hosts.push(HostPart { id, name, part });
    }
    Ok(hosts.into())
}

fn put_epoch(out: &mut BytesMut, tag: u8, epoch: Epoch) {
    out.put_u8(tag);
    out.put_u64(epoch.0);
}

/// An entry from its payload; frames share the payload's memory.
pub fn decode(payload: Bytes) -> Result<Agreed, WireError> {
    let mut reader = Reader::new(payload);
    let entry = match reader.u8()? {
        FRAMES => Agreed::Frames(frames(&mut reader)?),
        TIMED => Agreed::Timed {
            time: time(&mut reader)?,
            frames: frames(&mut reader)?,
        },
        SEED => {
            let seed = reader.take(SEED_BYTES)?;
            let seed = seed[..].try_into();
            Agreed::Seed(seed.map_err(|_| WireError::Invalid("seed"))?)
        }
        SYNC => Agreed::Sync {
            epoch: Epoch(reader.u64()?),
        },
        SYNC_DONE => Agreed::SyncDone {
            epoch: Epoch(reader.u64()?),
        },
        COMPLETE => {
            let epoch = Epoch(reader.u64()?);
            Agreed::Complete {
                set: ReplicaSet(reader.u64()?),
                epoch,
            }
        }
        POLICY => Agreed::Policy(policy(reader.u8()?)?),
        HOSTS => Agreed::Hosts(hosts(&mut reader)?),
        DOWN => Agreed::Down,
        _ => return Err(WireError::Invalid("entry tag")),
    };
    reader.end()?;
    Ok(entry)
}

fn policy(number: u8) -> Result<Policy, WireError> {
    Policy::numbered(number).ok_or(WireError::Invalid("policy"))
}

/// The agreed state, for a snapshot marker.
#[must_use]
pub fn encode_state(state: &AgreedState) -> Bytes {
    let mut out = BytesMut::new();
    out.put_u8(match state.life {
        Life::Fresh => 0,
        Life::Running => 1,
        Life::Down => 2,
    });
    out.put_u64(state.complete.0);
    out.put_u64(state.epoch.0);
    out.put_u8(state.policy.map_or(AS_IN_ITS_FILE, Policy::number));
    match &state.hosts {
        None => out.put_u8(AS_IN_ITS_FILE),
        Some(hosts) => {
            out.put_u8(HOSTS);
            put_hosts(&mut out, hosts);
        }
    }
    if state.time != AgreedTime::default() {
        put_time(&mut out, state.time);
    }
    out.freeze()
}

/// The agreed state from a snapshot marker; an empty one is a VM that never ran.
pub fn decode_state(bytes: Bytes) -> Result<AgreedState, WireError> {
    if bytes.is_empty() {
        return Ok(AgreedState::default());
    }
    let mut reader = Reader::new(bytes);
    let life = match reader.u8()? {
        0 => Life::Fresh,
        1 => Life::Running,
        2 => Life::Down,
        _ => return Err(WireError::Invalid("life")),
    };
    let state = AgreedState {
        life,
        complete: ReplicaSet(reader.u64()?),
        epoch: Epoch(reader.u64()?),
        policy: match reader.u8()? {
            AS_IN_ITS_FILE => None,
            number => Some(policy(number)?),
        },
        hosts: match reader.u8()? {
            AS_IN_ITS_FILE => None,
            HOSTS => Some(hosts(&mut reader)?),
            _ => return Err(WireError::Invalid("hosts")),
        },
        time: AgreedTime::default(),
    };
    if reader.left() == 0 {
        return Ok(state);
    }
    let time = time(&mut reader)?;
    reader.end()?;
    match time == AgreedTime::default() {
        true => Err(WireError::Invalid("time")),
        false => Ok(AgreedState { time, ..state }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn any_hosts() -> impl Strategy<Value = Hosts> {
        let part = prop::sample::select(vec![Part::Copy, Part::Witness, Part::Gone, Part::Standby]);
        let host = (0..MOST_HOSTS as u8, "[a-z0-9.-]{1,40}", part).prop_map(|(id, name, part)| HostPart {
            id: ReplicaId(id),
            name,
            part,
        });
        prop::collection::vec(host, 0..=MOST_HOSTS).prop_map(Hosts::from)
    }

    fn any_time() -> impl Strategy<Value = AgreedTime> {
        any::<(u64, u64)>().prop_map(|(monotonic_ns, wall_ns)| AgreedTime {
            monotonic_ns,
            wall_ns,
        })
    }

    fn any_entry() -> impl Strategy<Value = Agreed> {
        let frame =
            (any::<u8>(), prop::collection::vec(any::<u8>(), 0..100)).prop_map(|(nic, bytes)| Frame {
                nic,
                bytes: bytes.into(),
            });
        prop_oneof![
            prop::collection::vec(frame.clone(), 0..20).prop_map(Agreed::Frames),
            (any_time(), prop::collection::vec(frame, 0..20))
                .prop_map(|(time, frames)| Agreed::Timed { time, frames }),
            any::<[u8; SEED_BYTES]>().prop_map(Agreed::Seed),
            any::<u64>().prop_map(|epoch| Agreed::Sync { epoch: Epoch(epoch) }),
            any::<u64>().prop_map(|epoch| Agreed::SyncDone { epoch: Epoch(epoch) }),
            any::<(u64, u64)>().prop_map(|(set, epoch)| Agreed::Complete {
                set: ReplicaSet(set),
                epoch: Epoch(epoch)
            }),
            prop::sample::select(Policy::ALL.to_vec()).prop_map(Agreed::Policy),
            any_hosts().prop_map(Agreed::Hosts),
            Just(Agreed::Down),
        ]
    }

    proptest! {
        #[test]
        fn what_was_encoded_is_decoded(entry in any_entry()) {
            prop_assert_eq!(decode(encode(&entry)), Ok(entry));
        }

        #[test]
        fn a_state_is_decoded_as_it_was(
            policy in prop::option::of(prop::sample::select(Policy::ALL.to_vec())),
            hosts in prop::option::of(any_hosts()),
            set: u64,
            epoch: u64,
            time in any_time(),
        ) {
            let state = AgreedState { life: Life::Running, complete: ReplicaSet(set), epoch: Epoch(epoch), policy, hosts, time };
            prop_assert_eq!(decode_state(encode_state(&state)), Ok(state));
        }

        #[test]
        fn any_bytes_give_a_value_or_an_error(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let bytes = Bytes::from(bytes);
            if let Ok(entry) = decode(bytes.clone()) {
                prop_assert_eq!(encode(&entry), bytes.clone());
            }
            if let Ok(state) = decode_state(bytes.clone()) && !bytes.is_empty() {
                prop_assert_eq!(encode_state(&state), bytes);
            }
        }

        #[test]
        fn a_cut_entry_is_an_error(entry in any_entry(), cut in 1_usize..50) {
            let bytes = encode(&entry);
            prop_assume!(cut <= bytes.len());
            prop_assert!(decode(bytes.slice(..bytes.len() - cut)).is_err());
        }
    }
}
