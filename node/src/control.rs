//! How a daemon is talked to: by HTTP (`address`, `http`), and on the control socket, one JSON object a line. What is said is in the crate `dunlin-api`.

pub mod address;
pub mod client;
pub mod http;
pub mod server;
