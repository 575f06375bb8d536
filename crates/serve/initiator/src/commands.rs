//! What commands for devices elsewhere have in common, whichever protocol carries them.

use std::time::Duration;

use block::{Bufs, Error, Lba};

/// Pause before a command that was refused for now is sent again.
pub(crate) const PAUSE: Duration = Duration::from_millis(100);

/// Times that a command is sent that may have gone to another device than its own, or whose medium has failed.
pub(crate) const TRIES: u32 = 3;

/// How a comparison, or a compare and write, has failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CompareError {
    /// The contents are others.
    #[error("the contents differ")]
    Differs,
    /// Nobody knows whether it has been done: read, and see.
    #[error("the connection was lost; whether it was done is not known")]
    InDoubt,
    /// The other side does not know the command, or not of this length.
    #[error("the other side cannot do this")]
    Unsupported,
    /// The device failed it.
    #[error(transparent)]
    Device(#[from] Error),
}

/// The data of a command.
#[derive(Clone, Copy)]
pub(crate) enum Data<'a> {
    None,
    /// To the device.
    Out(&'a Bufs),
    /// So many bytes from it.
    In(usize),
}

impl Data<'_> {
    pub(crate) fn len(self) -> usize {
        match self {
            Self::None => 0,
            Self::Out(data) => data.len(),
            Self::In(length) => length,
        }
    }
}

/// A range, in pieces of this many blocks.
pub(crate) fn pieces(at: Lba, blocks: u32, most: u32) -> impl Iterator<Item = (Lba, u32)> {
    let most = most.max(1);
    let starts = (0..blocks).step_by(most as usize);
    starts.map(move |done| (Lba(at.0 + u64::from(done)), (blocks - done).min(most)))
}
