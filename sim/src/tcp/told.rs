//! What has left for a client on one connection: whichever VM speaks later has to have said and heard all of it.
//!
//! This is the two claims of docs/output.md from the other side: not frame by frame, with the backup's VM at hand, but at the moment in which a VM
//! begins to speak, wherever it has been.

use super::endpoint::Tcp;
use super::frame::{FIN, RST, Seg};

/// In the positions of the connection's two streams.
#[derive(Debug, Default)]
pub struct Told {
    accepted: bool,
    /// Of what the VM said.
    bytes: Vec<Option<u8>>,
    ended: bool,
    /// Of what the client said.
    acknowledged: u64,
}

impl Told {
    /// The answer to the client's SYN has left.
    pub fn accepts(&mut self) {
        self.accepted = true;
    }

    /// A segment has left that begins `at`, and acknowledges up to `ack`.
    pub fn left(&mut self, seg: &Seg, at: u64, ack: u64) {
        if seg.has(RST) {
            return;
        }
        self.acknowledged = self.acknowledged.max(ack);
        self.ended |= seg.has(FIN);
        for (n, byte) in seg.payload.iter().enumerate() {
            let at = at as usize - 1 + n;
            self.bytes.resize(self.bytes.len().max(at + 1), None);
            self.bytes[at] = Some(*byte);
        }
    }

    /// Whether a VM whose end of the connection is `copy` has said and heard that.
    pub fn is_explained_by(&self, copy: Option<&Tcp>) -> Result<(), String> {
        let Some(copy) = copy else {
            return match self.accepted {
                true => Err("it was accepted, and the VM does not know it".to_owned()),
                false => Ok(()),
            };
        };
        if copy.received < self.acknowledged {
            return Err(format!(
                "the VM has got {} of {} that were acknowledged",
                copy.received, self.acknowledged
            ));
        }
        if copy.max <= self.bytes.len() as u64 {
            let (said, told) = (copy.max - 1, self.bytes.len());
            return Err(format!("the VM has said {said} of {told} bytes that have left"));
        }
        let differs = |(told, said): (&Option<u8>, &u8)| told.is_some_and(|told| told != *said);
        if let Some(at) = self.bytes.iter().zip(&copy.out).position(differs) {
            return Err(format!("the VM has said another byte at {at}"));
        }
        match self.ended && !copy.closing {
            true => Err("the VM has not ended the stream".to_owned()),
            false => Ok(()),
        }
    }
}
