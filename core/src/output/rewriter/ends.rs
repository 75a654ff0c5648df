//! How far a connection has ended, as far as somebody else has heard: speculation, whose shadow socket spoke with the client.

/// Which ends of a connection are closed, and known to be by the other end: the number after that end's FIN, as the VM here calls it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Ends {
    /// After the VM's.
    pub vm: Option<u32>,
    /// After the client's.
    pub peer: Option<u32>,
}

impl Ends {
    /// Both are.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.vm.is_some() && self.peer.is_some()
    }
}
