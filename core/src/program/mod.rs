//! What a bare server program needs beside what a VM needs: an order of *reading*, and outputs that can be counted.
//!
//! A program in a network namespace of its own speaks frames as a VM does: `output::packet` reads them, `output::rewriter`
//! translates the numbers of its connections. Three things are its own. `order` says when the next input may be delivered:
//! a VM's kernel and its programs are one state, a program that shares the host's kernel only agrees with its copy when
//! both *read* their inputs in the same order. `outputs` compares what the copies say, output by output, and goes on
//! after a difference: it serves a report, where `output::compare` serves a release. `time` says what time it is for all copies, and `pace`
//! when that is agreed anew: a VM's clock is its own, a program's is its host's.
//!
//! Source: APUS (GAIA 2.1.2): input coordinator and output checker. Not here: namespaces, sockets, how a program reads its clock (`dunlin-program`).

pub mod order;
pub mod outputs;
pub mod pace;
pub mod time;
