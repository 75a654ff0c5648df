//! What is to come in a world: each at its time.

/// What is to come.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Next {
    /// A message of the consensus: sender, receiver, its place in `mail`.
    Mail(u8, u8, u64),
    /// A deadline of the consensus.
    Tick(u8),
    /// A hard state, or writes, of this incarnation reached the disk.
    HardStatePersisted(u8, u32),
    Written(u8, u32),
    /// A dead host's link is noticed.
    LinkLost(u8, u8, u32),
    /// A link to a host that has started stands.
    LinkUp(u8, u8),
    /// A loop's turn.
    Turn(u8, u32),
    /// A client's input.
    Input,
    /// Clients and their network have something to do.
    Net,
    /// The next fault.
    Strike,
    /// A host dies.
    Kill(u8),
    /// A host starts again.
    Start(u8),
    /// A cut is healed.
    Heal(u8, u8),
    /// A host of this incarnation asks another one what it holds of the VM.
    Asked(u8, u32, u8),
    /// It has all answers that it gets.
    Judges(u8, u32),
    /// A person wants the VM to end, and asks that host, or any.
    Order(Option<u8>),
    /// QEMU has answered whether its guest was asked to switch itself off.
    GuestAsked(u8, u32),
    /// The guest does so.
    GuestLeaves(u8, u32),
    /// A host tells another one of the VM's end.
    EndTold(u8, u8),
    /// It has told all that it can reach.
    AllTold(u8, u32),
    /// All hosts but one die.
    Catastrophe,
    /// A person says so to that one.
    Promote(u8),
}
