//! What travels with a checkpoint, as bytes: the connections and handshakes that have changed since the last one.
//!
//! Bytes of a long stream go ahead of their checkpoint, in parts of the same layout with a single connection, whose stream may end before what the
//! VM has said; the checkpoint itself tells the rest.
//!
//! Layout, all numbers big-endian: version (1 byte), how many flows follow (4); for each: 4 or 6 (1), the VM's address and port, the
//! peer's, bit 0 a handshake and bit 1 a connection follow (1; neither: the flow is gone), then these. Bytes of a stream are told once: a
//! connection says from which number on they follow, and the receiver has those before.
//!
//! Invariants: 1. total: any bytes give a value or an error, and nothing is taken into memory that is not in the message.
//! 2. what is decoded fits together (`una <= base`, edges near the stream), so that nothing later has to doubt it.
//! Not here: how the parts of several checkpoints come together (`replica.rs`).

use super::Flow;
use super::connection::{Connection, Pair, Phase, Reset, later};
use super::handshake::{Handshake, Offer};
use super::types::Link;
use crate::output::packet::before;
use crate::wire::{Reader, WireError};
use bytes::{BufMut, Bytes, BytesMut};
use std::net::{IpAddr, SocketAddr};

const VERSION: u8 = 1;
/// Ethernet with two tags.
const MOST_LINK_BYTES: usize = 22;
/// The least that a flow takes.
const LEAST_BYTES: usize = 1 + 6 + 6 + 1;

/// What a checkpoint says of one flow; nothing: it is gone.
pub(super) struct Change {
    pub(super) flow: Flow,
    pub(super) handshake: Option<Handshake>,
    /// Its bytes begin at `base`, which may be behind `una`.
    pub(super) connection: Option<Connection>,
}

type Known<'a> = (&'a Flow, Option<&'a Handshake>, Option<&'a Connection>);

/// A connection whose bytes up to `until` go ahead of the checkpoint.
pub(super) fn encode_ahead(flow: &Flow, connection: &Connection, until: u32) -> Bytes {
    let mut out = BytesMut::with_capacity(until.wrapping_sub(connection.first_untold()) as usize + 256);
    out.put_u8(VERSION);
    out.put_u32(1);
    put_flow(&mut out, flow, 2);
    put_connection(&mut out, connection, until);
    out.freeze()
}

pub(super) fn encode<'a>(flows: impl Iterator<Item = Known<'a>>) -> Bytes {
    let flows: Vec<Known> = flows.collect();
    let told = |(_, _, connection): &Known| connection.map_or(0, Connection::untold);
    let bytes: usize = flows.iter().map(|known| 256 + told(known)).sum();
    let mut out = BytesMut::with_capacity(bytes + 5);
    out.put_u8(VERSION);
    out.put_u32(0);
    let mut count = 0_u32;
    for (flow, handshake, connection) in flows {
        count += 1;
        let what = u8::from(handshake.is_some()) | u8::from(connection.is_some()) << 1;
        put_flow(&mut out, flow, what);
        if let Some(handshake) = handshake {
            put_handshake(&mut out, handshake);
        }
        if let Some(connection) = connection {
            put_connection(&mut out, connection, connection.nxt);
        }
    }
    out[1..5].copy_from_slice(&count.to_be_bytes());
    out.freeze()
}

pub(super) fn decode(bytes: Bytes) -> Result<Vec<Change>, WireError> {
    let mut reader = Reader::new(bytes);
    if reader.u8()? != VERSION {
        return Err(WireError::Invalid("version of speculation"));
    }
    let count = reader.u32()? as usize;
    if count > reader.left() / LEAST_BYTES {
        return Err(WireError::Short);
    }
    let mut changes = Vec::with_capacity(count);
    for _ in 0..count {
        changes.push(change(&mut reader)?);
    }
    reader.end()?;
    Ok(changes)
}

fn change(reader: &mut Reader) -> Result<Change, WireError> {
    let v6 = match reader.u8()? {
        4 => false,
        6 => true,
        _ => return Err(WireError::Invalid("family of an address")),
    };
    let flow = Flow {
        vm: end(reader, v6)?,
        peer: end(reader, v6)?,
    };
    let what = reader.u8()?;
    if what > 3 {
        return Err(WireError::Invalid("kind of flow"));
    }
    let handshake = (what & 1 != 0).then(|| handshake(reader)).transpose()?;
    let connection = (what & 2 != 0).then(|| connection(reader, flow)).transpose()?;
    Ok(Change {
        flow,
        handshake,
        connection,
    })
}

fn put_flow(out: &mut BytesMut, flow: &Flow, what: u8) {
    out.put_u8(if flow.vm.is_ipv4() { 4 } else { 6 });
    [flow.vm, flow.peer].iter().for_each(|end| put_end(out, end));
    out.put_u8(what);
}

fn put_end(out: &mut BytesMut, end: &SocketAddr) {
    match end.ip() {
        IpAddr::V4(v4) => out.put_slice(&v4.octets()),
        IpAddr::V6(v6) => out.put_slice(&v6.octets()),
    }
    out.put_u16(end.port());
}

fn end(reader: &mut Reader, v6: bool) -> Result<SocketAddr, WireError> {
    let ip: IpAddr = match v6 {
        false => reader.u32()?.to_be_bytes().into(),
        true => reader.u128()?.to_be_bytes().into(),
    };
    Ok(SocketAddr::new(ip, reader.u16()?))
}

fn put_link(out: &mut BytesMut, nic: u8, vlan: u32, link: &Link) {
    out.put_u8(nic);
    out.put_u32(vlan);
    for header in [&link.to_peer, &link.to_vm] {
        out.put_u8(header.len() as u8);
        out.put_slice(header);
    }
}

fn link(reader: &mut Reader) -> Result<(u8, u32, Link), WireError> {
    let (nic, vlan) = (reader.u8()?, reader.u32()?);
    let mut header = || {
        let length = usize::from(reader.u8()?);
        match length {
            // Its own bytes: as a part of what came it would keep all of that.
            0 | 14..=MOST_LINK_BYTES => Ok(Bytes::copy_from_slice(&reader.take(length)?)),
            _ => Err(WireError::Invalid("length of a link's header")),
        }
    };
    let link = Link {
        to_peer: header()?,
        to_vm: header()?,
    };
    Ok((nic, vlan, link))
}

fn put_option(out: &mut BytesMut, number: Option<u32>) {
    out.put_u8(u8::from(number.is_some()));
    out.put_u32(number.unwrap_or(0));
}

fn option(reader: &mut Reader) -> Result<Option<u32>, WireError> {
    let (there, number) = (flag(reader)?, reader.u32()?);
    Ok(there.then_some(number))
}

fn flag(reader: &mut Reader) -> Result<bool, WireError> {
    match reader.u8()? {
        0 => Ok(false),
        1 => Ok(true),
        _ => Err(WireError::Invalid("yes or no")),
    }
}

fn scale(number: Option<u32>) -> Result<Option<u8>, WireError> {
    match number {
        None => Ok(None),
        Some(scale @ 0..=14) => Ok(Some(scale as u8)),
        Some(_) => Err(WireError::Invalid("window scale")),
    }
}

fn put_offer(out: &mut BytesMut, offer: &Offer) {
    out.put_u32(offer.isn);
    out.put_u16(offer.window);
    out.put_u16(offer.mss);
    put_option(out, offer.scale.map(u32::from));
    out.put_u8(u8::from(offer.sack));
    put_option(out, offer.stamp);
}

fn offer(reader: &mut Reader) -> Result<Offer, WireError> {
    Ok(Offer {
        isn: reader.u32()?,
        window: reader.u16()?,
        mss: reader.u16()?.max(64),
        scale: scale(option(reader)?)?,
        sack: flag(reader)?,
        stamp: option(reader)?,
    })
}

fn put_handshake(out: &mut BytesMut, handshake: &Handshake) {
    put_link(out, handshake.nic, handshake.vlan, &handshake.link);
    out.put_u8(u8::from(handshake.by_vm));
    put_offer(out, &handshake.opener);
    out.put_u8(u8::from(handshake.answer.is_some()));
    if let Some(answer) = &handshake.answer {
        put_offer(out, answer);
    }
}

fn handshake(reader: &mut Reader) -> Result<Handshake, WireError> {
    let (nic, vlan, link) = link(reader)?;
    Ok(Handshake {
        nic,
        vlan,
        link,
        by_vm: flag(reader)?,
        opener: offer(reader)?,
        answer: flag(reader)?.then(|| offer(reader)).transpose()?,
        left_us: None,
        rtt_us: None,
        stamp: 0,
        exported: false,
    })
}

fn put_connection(out: &mut BytesMut, connection: &Connection, until: u32) {
    let c = connection;
    put_link(out, c.nic, c.vlan, &c.link);
    out.put_u8(match c.phase {
        Phase::Held { ended: false } => 1,
        Phase::Held { ended: true } => 2,
        Phase::ResetByPeer => 3,
        Phase::Probing { .. } | Phase::Speculative | Phase::Gone => 0,
    });
    put_option(out, c.scale.map(|(vm, _)| u32::from(vm)));
    put_option(out, c.scale.map(|(_, peer)| u32::from(peer)));
    let flags = [
        c.sack,
        c.stamps,
        c.draining,
        c.fin,
        c.fin_acked,
        c.reset != Reset::No,
        c.said.ece,
    ];
    flags.into_iter().for_each(|flag| out.put_u8(u8::from(flag)));
    [c.mss, c.said.window, c.client_window]
        .into_iter()
        .for_each(|number| out.put_u16(number));
    let numbers = [
        c.vm_start,
        c.peer_start,
        c.una,
        c.edge,
        c.said_edge,
        c.said.ack,
        c.said.echo,
        c.vm_stamp,
        c.client_nxt,
        c.client_stamp,
        c.last_stamp,
    ];
    numbers.into_iter().for_each(|number| out.put_u32(number));
    put_option(out, c.client_fin);
    let from = c.first_untold();
    out.put_u32(from);
    out.put_u32(until.wrapping_sub(from));
    // What is over keeps no bytes.
    let [skip, end] = [from, until].map(|at| (at.wrapping_sub(c.base) as usize).min(c.bytes.len()));
    let (head, tail) = c.bytes.as_slices();
    out.put_slice(&head[skip.min(head.len())..end.min(head.len())]);
    out.put_slice(&tail[skip.saturating_sub(head.len())..end.saturating_sub(head.len())]);
}

fn connection(reader: &mut Reader, flow: Flow) -> Result<Connection, WireError> {
    let (nic, vlan, link) = link(reader)?;
    let phase = match reader.u8()? {
        0 => Phase::Speculative,
        1 => Phase::Held { ended: false },
        2 => Phase::Held { ended: true },
        3 => Phase::ResetByPeer,
        _ => return Err(WireError::Invalid("phase of a connection")),
    };
    let (vm_scale, peer_scale) = (scale(option(reader)?)?, scale(option(reader)?)?);
    let mut flags = [false; 7];
    for place in &mut flags {
        *place = flag(reader)?;
    }
    let [sack, stamps, draining, fin, fin_acked, reset, ece] = flags;
    let (mss, window, client_window) = (reader.u16()?, reader.u16()?, reader.u16()?);
    let mut numbers = [0; 11];
    for place in &mut numbers {
        *place = reader.u32()?;
    }
    let [
        vm_start,
        peer_start,
        una,
        edge,
        said_edge,
        ack,
        echo,
        vm_stamp,
        client_nxt,
        client_stamp,
        last_stamp,
    ] = numbers;
    let client_fin = option(reader)?;
    let (base, length) = (reader.u32()?, reader.u32()?);
    let nxt = base.wrapping_add(length);
    let bytes = reader.take(length as usize)?;
    // A window is at most 2^30.
    let near = |number: u32| number.wrapping_sub(una) <= 1 << 31;
    if before(base, una)
        || before(nxt, base)
        || !near(nxt)
        || !near(edge)
        || fin_acked && (!fin || una != nxt)
    {
        return Err(WireError::Invalid("place in a stream"));
    }
    let offer = |isn: u32, scale, stamp: u32| Offer {
        isn: isn.wrapping_sub(1),
        window: 0,
        mss: mss.max(64),
        scale,
        sack,
        stamp: stamps.then_some(stamp),
    };
    let whole = Handshake {
        nic,
        vlan,
        link,
        by_vm: true,
        opener: offer(vm_start, vm_scale, vm_stamp),
        answer: Some(offer(peer_start, peer_scale, client_stamp)),
        left_us: None,
        rtt_us: None,
        stamp: 0,
        exported: true,
    };
    let said = Pair {
        ack,
        window,
        echo,
        ece,
    };
    let connection = Connection::begin(flow, &whole, None, Some(client_window), 0);
    let connection = connection.ok_or(WireError::Invalid("connection"))?;
    Ok(Connection {
        phase,
        draining,
        fin,
        fin_acked,
        reset: if reset { Reset::Said } else { Reset::No },
        una,
        released: una,
        nxt,
        written: base,
        base,
        edge,
        said_edge: later(said_edge, una),
        said,
        told: said,
        heard: (ack, window),
        vm_stamp,
        told_stamp: vm_stamp,
        client_nxt,
        client_stamp,
        client_fin,
        last_stamp,
        exported: nxt,
        bytes: Vec::from(bytes).into(),
        ..connection
    })
}
