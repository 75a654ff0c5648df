//! What it decides: what a VM's TCP and its clients say to each other, over a network that loses, repeats and reorders.
//!
//! Flow: a [`client::Client`] says segments -> the network (`network`) -> a [`guest::Guest`] takes them off its ring and answers -> the network
//! -> the client, which checks what it must see.
//!
//! Invariants: those of a client's stream (`client`): byte for byte what the service must answer, in one set of numbers, without a reset that
//! nobody meant.
//!
//! It is here for whole worlds (`crate::whole`); core's test `conversations` includes it by its path. Not here: what lies between the network and
//! the guest, which is what the two look at.

pub mod client;
pub mod endpoint;
pub mod frame;
pub mod guest;
pub mod network;
pub mod random;
mod told;
