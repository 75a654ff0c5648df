//! What a copy's program has read: its sockets' queues, asked of the kernel in the copy's network namespace.
//!
//! Decides:    which sockets nobody will read any more.
//! Flow:       `order`'s question -> netlink, one request and its answer at once -> `Found`.
//! Invariants: 1. a connection that its program has not accepted yet is unread, not gone.
//! Source:     sock_diag(7); tcp_diag: `idiag_rqueue` is what was taken in and not read, `tcpi_bytes_received` what was taken in:
//!             only both together tell of a segment that waits while the program holds the socket's lock.
//! Not here:   when to ask.

use dunlin_core::program::order::{Found, Of, Question};
use netlink_packet_core::{NLM_F_DUMP, NLM_F_REQUEST, NetlinkHeader, NetlinkMessage, NetlinkPayload};
use netlink_packet_sock_diag::SockDiagMessage;
use netlink_packet_sock_diag::constants::{
    AF_INET, AF_INET6, IPPROTO_TCP, IPPROTO_UDP, TCP_CLOSE, TCP_CLOSING, TCP_FIN_WAIT1, TCP_FIN_WAIT2,
    TCP_LAST_ACK, TCP_LISTEN, TCP_TIME_WAIT,
};
use netlink_packet_sock_diag::inet::nlas::Nla;
use netlink_packet_sock_diag::inet::{ExtensionFlags, InetRequest, InetResponse, SocketId, StateFlags};
use rustix::net::{RecvFlags, SendFlags, recv, send};
use std::collections::BTreeSet;
use std::io;
use std::net::{IpAddr, Ipv4Addr};
use std::os::fd::BorrowedFd;

/// Any socket: no cookie of one.
const ANY: [u8; 8] = [0xff; 8];
const NOBODY: IpAddr = IpAddr::V4(Ipv4Addr::UNSPECIFIED);
/// The kernel fills at most this much at once (Documentation/userspace-api/netlink).
const ANSWER_BYTES: usize = 32 << 10;
/// Questions in one request: their answers, of less than a KiB each, have room in a socket of the usual size before anybody reads them.
const MOST_AT_ONCE: usize = 32;

/// Answers questions by the queues of the copy that they are about, in their order.
///
/// # Errors
/// Those of the netlink socket.
pub fn look(queues: BorrowedFd<'_>, questions: &[Question]) -> io::Result<Vec<Found>> {
    let mut all = Vec::with_capacity(questions.len());
    for questions in questions.chunks(MOST_AT_ONCE) {
        let mut found = vec![Found::Gone; questions.len()];
        let requests: Vec<InetRequest> = questions.iter().map(request_of).collect();
        ask(queues, &requests, NLM_F_REQUEST, &mut |number, socket| {
            found[number] = found_of(&socket, questions[number].of);
        })?;
        all.extend(found);
    }
    Ok(all)
}

fn request_of(question: &Question) -> InetRequest {
    let key = &question.key;
    let (peer, peer_port) = match question.of {
        Of::Listener => (NOBODY, 0),
        Of::Connection | Of::Datagrams => (key.peer, key.peer_port),
    };
    InetRequest {
        family: AF_INET,
        protocol: if question.of == Of::Datagrams {
            IPPROTO_UDP
        } else {
            IPPROTO_TCP
        },
        extensions: ExtensionFlags::INFO,
        states: StateFlags::all(),
        socket_id: SocketId {
            source_port: key.vm_port,
            destination_port: peer_port,
            source_address: key.vm,
            destination_address: peer,
            interface_id: 0,
            cookie: ANY,
        },
    }
}

/// The ports that the copy listens at, TCP.
///
/// # Errors
/// Those of the netlink socket.
pub fn listeners(queues: BorrowedFd<'_>) -> io::Result<BTreeSet<u16>> {
    let mut ports = BTreeSet::new();
    for (family, any) in [
        (AF_INET, NOBODY),
        (AF_INET6, IpAddr::V6(std::net::Ipv6Addr::UNSPECIFIED)),
    ] {
        let request = InetRequest {
            family,
            protocol: IPPROTO_TCP,
            extensions: ExtensionFlags::empty(),
            states: StateFlags::LISTEN,
            socket_id: SocketId {
                source_port: 0,
                destination_port: 0,
                source_address: any,
                destination_address: any,
                interface_id: 0,
                cookie: ANY,
            },
        };
        let mut add = |_, socket: InetResponse| {
            let id = &socket.header.socket_id;
            if !id.source_address.is_loopback() {
                ports.insert(id.source_port);
            }
        };
        ask(queues, &[request], NLM_F_REQUEST | NLM_F_DUMP, &mut add)?;
    }
    Ok(ports)
}

fn found_of(socket: &InetResponse, of: Of) -> Found {
    let header = &socket.header;
    let ending = matches!(
        header.state,
        TCP_FIN_WAIT1 | TCP_FIN_WAIT2 | TCP_CLOSING | TCP_LAST_ACK | TCP_CLOSE
    );
    // A UDP socket is in the state "closed" while it is connected to nobody; it always has an inode.
    // Where a connection is over the kernel names who listens at its port.
    let over = of == Of::Connection && matches!(header.state, TCP_TIME_WAIT | TCP_LISTEN);
    if over || (ending && header.inode == 0) {
        return Found::Gone;
    }
    let received = socket.nlas.iter().find_map(|nla| match nla {
        Nla::TcpInfo(info) => Some(info.bytes_received),
        _ => None,
    });
    Found::Socket {
        received: received.unwrap_or(0),
        unread: header.recv_queue,
    }
}

/// Hands each socket of the answers to `each`, with the number of its request; none where there is no such socket.
fn ask(
    queues: BorrowedFd<'_>,
    requests: &[InetRequest],
    flags: u16,
    each: &mut dyn FnMut(usize, InetResponse),
) -> io::Result<()> {
    let mut bytes = Vec::new();
    for (number, request) in requests.iter().enumerate() {
        let mut header = NetlinkHeader::default();
        header.flags = flags;
        header.sequence_number = number as u32;
        let mut message = NetlinkMessage::new(header, SockDiagMessage::InetRequest(request.clone()).into());
        message.finalize();
        let begin = bytes.len();
        bytes.resize(begin + message.buffer_len(), 0);
        message.serialize(&mut bytes[begin..]);
    }
    send(queues, &bytes, SendFlags::empty())?;
    let bad = |error: netlink_packet_core::DecodeError| {
        io::Error::new(io::ErrorKind::InvalidData, error.to_string())
    };
    let is_dump = flags & NLM_F_DUMP != 0;
    let mut answer = vec![0; ANSWER_BYTES];
    let (mut left, mut wrong) = (requests.len(), None);
    while left > 0 {
        // The kernel answers before `send` returns, or as soon as there is room: it never waits for anybody.
        let (length, _) = match recv(queues, &mut answer[..], RecvFlags::empty()) {
            Ok(read) => read,
            Err(error) => {
                // What else was answered is no answer to the next question.
                while recv(queues, &mut answer[..], RecvFlags::DONTWAIT).is_ok() {}
                return Err(error.into());
            }
        };
        let mut at = 0;
        while at < length {
            let message = NetlinkMessage::<SockDiagMessage>::deserialize(&answer[at..length]).map_err(bad)?;
            let number = message.header.sequence_number as usize;
            at += (message.header.length as usize).next_multiple_of(4).max(16);
            let is_last = match message.payload {
                NetlinkPayload::InnerMessage(SockDiagMessage::InetResponse(socket)) => {
                    if number < requests.len() {
                        each(number, *socket);
                    }
                    !is_dump
                }
                NetlinkPayload::Done(_) => true,
                NetlinkPayload::Error(error) => {
                    // All answers are read before an error is told: the next question would get what is left of them.
                    let error = error.to_io();
                    wrong = wrong.or((error.kind() != io::ErrorKind::NotFound).then_some(error));
                    true
                }
                _ => !is_dump,
            };
            left = left.saturating_sub(usize::from(is_last));
        }
    }
    wrong.map_or(Ok(()), Err)
}
