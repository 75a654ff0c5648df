//! The translation as bytes, for the host that gets a copy of the VM.
//!
//! Layout, all numbers big-endian: the version (1 byte), the common raise (4), how many connections follow (4); then for
//! each: NIC (1), VLAN (4), 4 or 6 (1), the VM's address, the peer's address, the ports (2 and 2), and fifteen numbers, each
//! with a bit in the four bytes before them that says whether it is there. Two more bits say whose end was acknowledged.

use super::connection::{Connection, Fin, Numbers, Older, Past};
use super::{MOST_CONNECTIONS, TableError};
use crate::output::packet::{FlowKey, TCP};
use crate::wire::{Reader, WireError, sync};
use bytes::{BufMut, Bytes, BytesMut};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

const VERSION: u8 = 2;
/// The least that a connection takes.
const LEAST_BYTES: usize = 6 + 8 + 4 + 4;
/// How many numbers a connection can have.
const NUMBERS: usize = 15;
/// Where the ends are among them.
const VM_FIN: usize = 11;
const PEER_FIN: usize = 12;
/// The end is acknowledged.
const VM_FIN_ACKNOWLEDGED: u32 = 1 << NUMBERS;
const PEER_FIN_ACKNOWLEDGED: u32 = 1 << (NUMBERS + 1);

/// The most that a table takes: it travels in one message, together with a part of the device state.
const MOST_BYTES: usize = 9 + MOST_CONNECTIONS * (6 + 2 * 16 + 4 + 4 + 4 * NUMBERS);
const _: () = assert!(MOST_BYTES + sync::parts::PART_BYTES + 64 <= sync::MOST_BYTES);

/// What a table says.
pub(super) type Table = (u32, Vec<(FlowKey, Connection)>);

/// Writes `raise` and `connections`, at most `MOST_CONNECTIONS` of them.
pub(super) fn encode<'a>(raise: u32, connections: impl Iterator<Item = &'a (FlowKey, Connection)>) -> Bytes {
    let mut out = BytesMut::new();
    out.put_u8(VERSION);
    out.put_u32(raise);
    out.put_u32(0);
    let mut count = 0_u32;
    for (key, connection) in connections {
        count += 1;
        put_key(&mut out, key);
        let numbers = numbers_of(connection);
        let acknowledged = |fin: Option<Fin>, bit| match fin {
            Some(Fin {
                acknowledged: true, ..
            }) => bit,
            _ => 0,
        };
        let present = (0..NUMBERS)
            .filter(|n| numbers[*n].is_some())
            .fold(0, |bits, n| bits | 1 << n)
            | acknowledged(connection.vm_fin, VM_FIN_ACKNOWLEDGED)
            | acknowledged(connection.peer_fin, PEER_FIN_ACKNOWLEDGED);
        out.put_u32(present);
        numbers
            .into_iter()
            .flatten()
            .for_each(|number| out.put_u32(number));
    }
    out[5..9].copy_from_slice(&count.to_be_bytes());
    out.freeze()
}

/// Reads what `encode` wrote.
pub(super) fn decode(bytes: &Bytes) -> Result<Table, TableError> {
    let mut from = Reader::new(bytes.clone());
    if from.u8()? != VERSION {
        return Err(TableError::Version);
    }
    let raise = from.u32()?;
    let count = from.u32()? as usize;
    // Checked before anything is allocated.
    if count > MOST_CONNECTIONS || count * LEAST_BYTES > from.left() {
        return Err(WireError::Invalid("count of connections").into());
    }
    let mut connections = Vec::with_capacity(count);
    for _ in 0..count {
        let key = take_key(&mut from)?;
        let present = from.u32()?;
        let without = |fin: usize, acknowledged| present & acknowledged != 0 && present & 1 << fin == 0;
        if present >> (NUMBERS + 2) != 0
            || without(VM_FIN, VM_FIN_ACKNOWLEDGED)
            || without(PEER_FIN, PEER_FIN_ACKNOWLEDGED)
        {
            return Err(WireError::Invalid("set of numbers").into());
        }
        let mut numbers = [None; NUMBERS];
        for (n, number) in numbers.iter_mut().enumerate() {
            if present & 1 << n != 0 {
                *number = Some(from.u32()?);
            }
        }
        connections.push((
            key,
            connection_of(numbers, present).ok_or(WireError::Invalid("connection"))?,
        ));
    }
    from.end()?;
    Ok((raise, connections))
}

/// What of a connection the other host cannot find out for itself.
fn numbers_of(connection: &Connection) -> [Option<u32>; NUMBERS] {
    let (delta, peer_isn) = match connection.numbers {
        Numbers::Known(delta) => (Some(delta), None),
        Numbers::Open { peer_isn, .. } => (None, peer_isn),
    };
    let end = |fin: Option<Fin>| fin.map(|fin| fin.end);
    let past = connection.past;
    // A connection in the middle of its handshake cannot be followed without what it said so far.
    let (sent, said_ticks) = match connection.numbers {
        Numbers::Known(_) => (None, None),
        Numbers::Open { .. } => (connection.sent, connection.said_ticks),
    };
    [
        delta,
        peer_isn,
        connection.isn,
        sent,
        said_ticks,
        connection.ticks,
        past.map(|past| past.ticks),
        past.and_then(|past| past.floor),
        past.and_then(|past| past.first),
        past.and_then(|past| past.older).map(|older| older.ticks),
        past.and_then(|past| past.older).map(|older| older.until),
        end(connection.vm_fin),
        end(connection.peer_fin),
        connection.echo,
        connection.reset,
    ]
}

fn connection_of(numbers: [Option<u32>; NUMBERS], present: u32) -> Option<Connection> {
    let [
        delta,
        peer_isn,
        isn,
        sent,
        said_ticks,
        ticks,
        past,
        floor,
        first,
        older,
        until,
        vm_fin,
        peer_fin,
        echo,
        reset,
    ] = numbers;
    let numbers = match delta {
        Some(delta) => Numbers::Known(delta),
        None => Numbers::Open { isn: isn?, peer_isn },
    };
    let fin = |end: Option<u32>, bit| {
        end.map(|end| Fin {
            end,
            acknowledged: present & bit != 0,
        })
    };
    Some(Connection {
        isn,
        sent,
        said_ticks,
        ticks,
        echo,
        past: past.map(|ticks| Past {
            ticks,
            floor,
            first,
            older: older.zip(until).map(|(ticks, until)| Older { ticks, until }),
        }),
        vm_fin: fin(vm_fin, VM_FIN_ACKNOWLEDGED),
        peer_fin: fin(peer_fin, PEER_FIN_ACKNOWLEDGED),
        reset,
        ..Connection::with(numbers)
    })
}

/// Which connection.
pub(crate) fn put_key(out: &mut BytesMut, key: &FlowKey) {
    out.put_u8(key.nic);
    out.put_u32(key.vlan);
    out.put_u8(if key.vm.is_ipv4() { 4 } else { 6 });
    for address in [key.vm, key.peer] {
        match address {
            IpAddr::V4(v4) => out.put_slice(&v4.octets()),
            IpAddr::V6(v6) => out.put_slice(&v6.octets()),
        }
    }
    out.put_u16(key.vm_port);
    out.put_u16(key.peer_port);
}

/// Reads what `put_key` wrote.
///
/// # Errors
/// If it is none.
pub(crate) fn take_key(from: &mut Reader) -> Result<FlowKey, WireError> {
    let (nic, vlan, family) = (from.u8()?, from.u32()?, from.u8()?);
    let mut address = || match family {
        4 => Ok(IpAddr::V4(Ipv4Addr::from(from.u32()?))),
        6 => Ok(IpAddr::V6(Ipv6Addr::from(from.u128()?))),
        _ => Err(WireError::Invalid("kind of address")),
    };
    let (vm, peer) = (address()?, address()?);
    Ok(FlowKey {
        nic,
        vlan,
        vm,
        peer,
        vm_port: from.u16()?,
        peer_port: from.u16()?,
        protocol: TCP,
    })
}
