//! Command errors and their log (NVMe Base 2.0, 5.16.1.2).

use std::collections::VecDeque;

use zerocopy::IntoBytes;

use super::page_writer::PageWriter;
use crate::entry::Sqe;
use crate::log::ErrorEntry;
use crate::status::Status;

/// Entries that the log keeps (ELPE + 1).
pub(super) const ENTRIES: usize = 64;

/// Transport type TCP.
const TRTYPE_TCP: u8 = 3;

/// No field of the command is wrong.
const NO_LOCATION: u16 = 0xffff;

/// Byte offsets of the fields of a submission queue entry.
pub(super) mod field {
    pub(crate) const FLAGS: u16 = 1;
    pub(crate) const NSID: u16 = 4;
    pub(crate) const SGL_LENGTH: u16 = 32;
    pub(crate) const CDW10: u16 = 40;
    pub(crate) const CDW11: u16 = 44;
    pub(crate) const CDW12: u16 = 48;
    pub(crate) const CDW14: u16 = 56;
}

/// Why a command is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct CommandError {
    pub(super) status: Status,
    /// The wrong byte of the command (7:0), and bit in it (10:8).
    location: u16,
}

impl CommandError {
    /// The field at this byte is invalid.
    pub(super) fn field(byte: u16) -> Self {
        Self { status: Status::INVALID_FIELD.do_not_retry(), location: byte }
    }

    /// Another status, with the wrong byte.
    pub(super) fn at(status: Status, byte: u16) -> Self {
        Self { status: status.do_not_retry(), location: byte }
    }

    /// A status not caused by a field.
    pub(super) fn new(status: Status) -> Self {
        Self { status, location: NO_LOCATION }
    }
}

/// The latest errors, newest first.
#[derive(Debug, Default)]
pub(super) struct ErrorLog {
    entries: VecDeque<ErrorEntry>,
    count: u64,
}

impl ErrorLog {
    /// Entries ever made.
    pub(super) fn count(&self) -> u64 {
        self.count
    }

    /// Records a failed command (or, without one, an event of the controller). Returns its status
    /// with the More bit set.
    pub(super) fn record(
        &mut self,
        sqid: u16,
        sqe: Option<&Sqe>,
        lba: u64,
        fault: CommandError,
    ) -> Status {
        self.count += 1;
        let status = fault.status.with_log_entry();
        self.entries.truncate(ENTRIES - 1);
        self.entries.push_front(ErrorEntry {
            count: self.count.into(),
            sqid: sqid.into(),
            cid: sqe.map_or(u16::MAX, |s| s.cid.get()).into(),
            status: (status.field() << 1).into(),
            location: fault.location.into(),
            lba: lba.into(),
            nsid: sqe.map_or(0, |s| s.nsid.get()).into(),
            vendor: 0,
            trtype: TRTYPE_TCP,
            reserved: [0; 2],
            information: [0; 32],
        });
        status
    }

    pub(super) fn write(&self, window: &mut PageWriter<'_>) {
        for (i, entry) in (0u64..).zip(&self.entries) {
            window.put(i * size_of::<ErrorEntry>() as u64, entry.as_bytes());
        }
    }
}
