//! What commands to remote devices have in common, in every protocol.

use std::time::Duration;

use block::{Bufs, Error, Lba};

/// Delay before a command that was refused temporarily is sent again.
pub(crate) const RETRY_PAUSE: Duration = Duration::from_millis(100);

/// How often a command is sent whose path may have led to another device, or whose medium has
/// failed.
pub(crate) const MAX_TRIES: u32 = 3;

/// Why a comparison or a compare-and-write failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CompareError {
    /// The contents differ.
    #[error("the contents differ")]
    Miscompare,
    /// The answer was lost: read to find out whether the write happened.
    #[error("the connection was lost; whether the command was executed is unknown")]
    InDoubt,
    /// The device does not support the command, or not at this length.
    #[error("the target does not support this")]
    Unsupported,
    /// The device reported an error.
    #[error(transparent)]
    Device(#[from] Error),
}

/// The data of a command.
#[derive(Clone, Copy)]
pub(crate) enum CommandData<'a> {
    None,
    /// To the device.
    Out(&'a Bufs),
    /// This many bytes from the device.
    In(usize),
}

impl CommandData<'_> {
    pub(crate) fn len(self) -> usize {
        match self {
            Self::None => 0,
            Self::Out(data) => data.len(),
            Self::In(length) => length,
        }
    }
}

/// Splits a range into pieces of at most `most` blocks.
pub(crate) fn split_range(at: Lba, blocks: u32, most: u32) -> impl Iterator<Item = (Lba, u32)> {
    let most = most.max(1);
    let starts = (0..blocks).step_by(most as usize);
    starts.map(move |done| (Lba(at.0 + u64::from(done)), (blocks - done).min(most)))
}
