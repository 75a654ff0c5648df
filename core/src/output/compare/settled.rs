//! What a SYN settles for all of its connection, in options beside the byte stream: by these each end reads the other's windows, acknowledgements and time stamps
//! from then on. A copy of the VM that has said others would misread what the client says after a take-over. A host under a flood of SYNs answers without any
//! (a SYN cookie), and its copy may not.
//!
//! Not here: what each says by itself, such as the largest segment (MSS): two copies cut otherwise anyway.

use crate::output::packet::Segment;
use bytes::Bytes;

/// Kinds of options (RFC 9293, 7323, 2018).
const END: u8 = 0;
const NOP: u8 = 1;
const WINDOW_SCALE: u8 = 3;
const SACK_PERMITTED: u8 = 4;

/// What two SYNs have to be alike in.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(super) struct Settled {
    window_scale: Option<u8>,
    sack: bool,
    timestamps: bool,
}

impl Settled {
    /// By a SYN in `frame`.
    pub(super) fn by(syn: &Segment, frame: &Bytes) -> Self {
        let mut settled = Self {
            timestamps: syn.timestamps.is_some(),
            ..Self::default()
        };
        let mut rest = &frame[syn.options.clone()];
        // What is cut short ends the list, as it does for Linux.
        while let [kind, behind @ ..] = rest
            && *kind != END
        {
            if *kind == NOP {
                rest = behind;
                continue;
            }
            let Some(&length) = behind.first() else { break };
            let Some((option, after)) = rest.split_at_checked(usize::from(length)) else {
                break;
            };
            match option {
                [WINDOW_SCALE, _, scale] => settled.window_scale = Some(*scale),
                [SACK_PERMITTED, _] => settled.sack = true,
                [] | [_] => break,
                _ => {}
            }
            rest = after;
        }
        settled
    }
}
