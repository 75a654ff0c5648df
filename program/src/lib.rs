//! A bare server program beside a VM: its namespaces, its card, its sockets, and a tester of whether copies of it agree.
//!
//! The network namespace is the machine: what a program sends and gets are frames on a card, as for a VM. Flow: a client's
//! frame -> `dunlin_core::program::order` -> every copy's card; a copy's frame -> `dunlin_core::program::outputs`, and the
//! first copy's -> the client. What decides is in the core; here is what touches the host: `inside` makes a copy's
//! namespaces and runs in them, `copy` holds it from outside, `sockets` looks at its queues, `answers` answers the system calls
//! that yield chance and time, `data` are the
//! images of files that outlive a copy, `quiet` and `rest` say whether a program is done, `page` is the clock that a service's program reads, `source` its chance, `guard` copies one that runs, `check` drives the tester.
//!
//! Not here: agreement between hosts, fail-over.

pub mod answers;
pub mod chance;
pub mod check;
pub mod copy;
pub mod data;
pub mod guard;
pub mod inside;
pub mod limits;
pub mod message;
pub mod options;
pub mod page;
pub mod printed;
mod proc;
pub mod quiet;
pub mod report;
mod rest;
pub mod sockets;
pub mod source;
pub mod tsc;
pub mod visit;
