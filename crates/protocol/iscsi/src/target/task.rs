//! SCSI commands in progress.

use std::time::Duration;

use hashbrown::HashMap;
use rt::buf::BufsMut;
use rustc_hash::FxBuildHasher;
use slab::Slab;
use smallvec::SmallVec;

use super::action::Direction;
use super::answer::Sending;
use crate::pdu::NO_TAG;
use crate::stream::{Owners, Tag};

/// One SCSI command, from its arrival until its status has been sent.
#[derive(Debug)]
pub(super) struct Task {
    pub(super) itt: u32,
    pub(super) lun: [u8; 8],
    /// Whether it takes a place in the command window.
    pub(super) numbered: bool,
    pub(super) direction: Direction,
    /// Bytes the initiator expects to transfer.
    pub(super) expected: u32,
    pub(super) phase: Phase,
    pub(super) fate: Fate,
    /// Whether the driver knows that it is to be aborted.
    pub(super) told: bool,
    /// Actions about it that have not been taken.
    pub(super) queued: u8,
    /// Task management requests that wait for its end, one bit each.
    pub(super) awaited_by: u8,
    /// Bytes the command takes in all, as the driver says.
    pub(super) presented: u64,
    /// Bytes of its data that are received: what it takes and the initiator has.
    pub(super) want: u32,
    /// Bytes of memory asked for and given.
    pub(super) asked: u32,
    pub(super) granted: u32,
    pub(super) data: BufsMut,
    /// Whether immediate data is arriving.
    pub(super) immediate: bool,
    /// Length of the unsolicited data, immediate data included.
    pub(super) unsolicited: u32,
    /// Sequences of Data-Out PDUs that are expected.
    pub(super) transfers: SmallVec<[Transfer; 1]>,
    /// First byte that has neither arrived nor been asked for.
    pub(super) next: u32,
    /// R2Ts sent.
    pub(super) r2ts: u32,
    /// When data last came or was asked for.
    pub(super) since: Duration,
    /// Its end, while data is still expected.
    pub(super) parked: Option<Parked>,
    /// Its data, while the output has no room for it.
    pub(super) sending: Option<Box<Sending>>,
}

/// How far a command has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    /// The driver decides about it.
    Arrived,
    /// Its data is being received.
    Admitted,
    /// The driver runs it.
    Running,
    /// The driver has ended it, or never knew of it.
    Over,
}

/// Whether a command's outcome is its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fate {
    /// It is.
    Live,
    /// It fails with this, whatever the driver says.
    Failed(Fault),
    /// The initiator gets no answer.
    Aborted,
}

/// Additional sense code and qualifier of a fault in the transfer; the sense key is ABORTED
/// COMMAND (RFC 7143 11.4.7.2, SPC-4 annex D).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Fault(pub(super) u8, pub(super) u8);

impl Fault {
    /// UNEXPECTED UNSOLICITED DATA.
    pub(super) const UNEXPECTED_DATA: Self = Self(0x0c, 0x0c);
    /// NOT ENOUGH UNSOLICITED DATA; "incorrect amount of data" in the RFC.
    pub(super) const AMOUNT: Self = Self(0x0c, 0x0d);
    /// PROTOCOL SERVICE CRC ERROR.
    pub(super) const DIGEST: Self = Self(0x47, 0x05);
    /// INVALID TARGET PORT TRANSFER TAG RECEIVED.
    pub(super) const TRANSFER_TAG: Self = Self(0x4b, 0x01);
    /// DATA OFFSET ERROR.
    pub(super) const OFFSET: Self = Self(0x4b, 0x05);
    /// INITIATOR RESPONSE TIMEOUT.
    pub(super) const TIMEOUT: Self = Self(0x4b, 0x06);

    /// Fixed-format sense data (SPC-4 4.5.3).
    pub(super) fn sense(self) -> [u8; 18] {
        let mut sense = [0; 18];
        (sense[0], sense[2], sense[7]) = (0x70, 0x0b, 10);
        (sense[12], sense[13]) = (self.0, self.1);
        sense
    }
}

/// A sequence of Data-Out PDUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Transfer {
    /// The R2T it answers; [`NO_TAG`] for unsolicited data.
    pub(super) ttt: u32,
    /// Next byte.
    pub(super) at: u32,
    /// Byte behind the last one.
    pub(super) end: u32,
    /// Number of the next PDU.
    pub(super) data_sn: u32,
}

/// How a command ended whose data is still expected.
#[derive(Clone, Debug)]
pub(super) struct Parked {
    pub(super) status: u8,
    pub(super) sense: Box<[u8]>,
}

impl Task {
    /// Whether the initiator is about to send data for it.
    pub(super) fn expects_data(&self) -> bool {
        self.immediate || !self.transfers.is_empty()
    }

    /// Whether data up to `end` can be received, be it into nowhere.
    pub(super) fn takes(&self, end: u32) -> bool {
        let undecided = match self.phase {
            Phase::Arrived => true,
            Phase::Admitted => self.granted < self.want.min(end),
            Phase::Running | Phase::Over => false,
        };
        !undecided || self.fate != Fate::Live
    }

    /// Whether unsolicited data may still come.
    pub(super) fn is_unsolicited(&self) -> bool {
        self.immediate || self.transfers.iter().any(|t| t.ttt == NO_TAG)
    }

    /// Memory for the bytes from `at` on, `None` where they are not wanted.
    fn space(&mut self, at: usize, max: usize) -> Option<&mut [u8]> {
        let wanted = (self.want as usize).checked_sub(at).filter(|&n| n > 0)?;
        if self.fate != Fate::Live {
            return None;
        }
        let (mut start, max) = (at, max.min(wanted));
        for part in &mut self.data {
            if start < part.len() {
                let end = part.len().min(start + max);
                return Some(&mut part[start..end]);
            }
            start -= part.len();
        }
        None
    }
}

/// All commands in progress, by tag and by initiator task tag.
#[derive(Debug, Default)]
pub(super) struct Tasks {
    slab: Slab<Task>,
    by_itt: HashMap<u32, Tag, FxBuildHasher>,
}

impl Tasks {
    pub(super) fn len(&self) -> usize {
        self.slab.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.slab.is_empty()
    }

    pub(super) fn insert(&mut self, task: Task) -> Tag {
        let itt = task.itt;
        let tag = Tag(u32::try_from(self.slab.insert(task)).expect("bounded by the window"));
        self.by_itt.insert(itt, tag);
        tag
    }

    pub(super) fn remove(&mut self, tag: Tag) -> Option<Task> {
        let task = self.slab.try_remove(tag.0 as usize)?;
        self.by_itt.remove(&task.itt);
        Some(task)
    }

    pub(super) fn get(&mut self, tag: Tag) -> Option<&mut Task> {
        self.slab.get_mut(tag.0 as usize)
    }

    pub(super) fn find(&self, itt: u32) -> Option<Tag> {
        self.by_itt.get(&itt).copied()
    }

    /// Tags of all commands for which `which` holds.
    pub(super) fn select(&self, which: impl Fn(&Task) -> bool) -> Vec<Tag> {
        let tag = |key| Tag(u32::try_from(key).expect("tags are 32 bits"));
        self.slab.iter().filter(|(_, t)| which(t)).map(|(key, _)| tag(key)).collect()
    }

    /// When the one of the commands that expect Data-Out PDUs which waits longest heard of it.
    pub(super) fn longest_wait(&self) -> Option<Duration> {
        let waiting = self.slab.iter().filter(|(_, t)| !t.transfers.is_empty());
        waiting.map(|(_, t)| t.since).min()
    }
}

impl Owners for Tasks {
    fn space(&mut self, tag: Tag, at: usize, max: usize) -> Option<&mut [u8]> {
        self.get(tag)?.space(at, max)
    }
}
