//! What it decides: whether clients' TCP connections outlive a VM's hosts: the production `Output` on both of them, in whole worlds.
//!
//! Flow: model clients (`crate::tcp`) -> a network that lies ([`net`]) -> whoever takes inputs -> the log, or at once -> each host's guest, in its
//! [`machine`] -> its `Output` -> what that lets out -> the clients. What a host's loop does with its `Output` at joins, syncs and take-overs is
//! here as it is in the daemon ([`hooks`]).
//!
//! The guests pick their own numbers, cut their segments at their own whim and lose inputs inside, and some of what they answer is a clock's or
//! a counter's: the copies differ, and syncs mend that.
//!
//! Checked from outside: each client's stream is what the service must answer, in one set of numbers, and no connection is reset that nobody
//! meant to; what leaves under protection the other host's VM has said, and has got what it acknowledges; a VM that begins to speak
//! explains all that has left; the counter never goes back; when the faults end all clients finish; what is held stays within its budget.
//!
//! A VM that boots from its disk has lost its connections: then clients begin anew.
//!
//! Not here: datagrams, and what a mode costs (`sync::change_over`): modes change by a whim.

pub mod hooks;
pub mod machine;
pub mod net;
pub mod trigger;
