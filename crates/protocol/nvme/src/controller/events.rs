//! Asynchronous events (NVMe Base 2.0, 5.2).
//!
//! One notice of a kind is sent, and no more of it until the host has read the log page. Later
//! changes are not lost: the log contains all.

use std::collections::{BTreeSet, VecDeque};

use crate::entry::{Completion, Sqe};
use crate::log::{LogId, MAX_CHANGED};
use crate::status::Status;
use crate::stream::Tag;

/// Asynchronous Event Requests that may be outstanding (AERL + 1).
pub(super) const LIMIT: usize = 4;

/// Event type: notice.
const TYPE_NOTICE: u64 = 0b010;
/// Event type: I/O command specific status.
const TYPE_IO_COMMAND: u64 = 0b110;

/// Kind of an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum EventKind {
    /// Namespace Attribute Changed.
    Namespaces,
    /// Asymmetric Namespace Access Change.
    Ana,
    /// Discovery Log Page Change.
    Discovery,
    /// Reservation Log Page Available.
    Reservations,
}

const KINDS: [EventKind; 4] =
    [EventKind::Namespaces, EventKind::Ana, EventKind::Discovery, EventKind::Reservations];

impl EventKind {
    /// Bit of the Asynchronous Event Configuration, and of OAES; 0 for events with a mask of their
    /// own.
    pub(super) const fn bit(self) -> u32 {
        match self {
            Self::Namespaces => 1 << 8,
            Self::Ana => 1 << 11,
            Self::Discovery => 1 << 31,
            Self::Reservations => 0,
        }
    }

    fn is_wanted(self, config: u32) -> bool {
        self.bit() == 0 || config & self.bit() != 0
    }

    /// Dword 0 of the completion: type, information, log page.
    fn result(self) -> u64 {
        let (kind, information, log) = match self {
            Self::Namespaces => (TYPE_NOTICE, 0x00, LogId::ChangedNamespaces),
            Self::Ana => (TYPE_NOTICE, 0x03, LogId::Ana),
            Self::Discovery => (TYPE_NOTICE, 0xf0, LogId::Discovery),
            Self::Reservations => (TYPE_IO_COMMAND, 0x00, LogId::Reservations),
        };
        kind | information << 8 | u64::from(log.0) << 16
    }
}

#[derive(Clone, Copy, Debug, Default)]
struct NoticeState {
    /// An event that the host was not told of.
    pending: bool,
    /// The host was told and has not read the log yet.
    sent: bool,
}

/// Event requests, pending events and their configuration.
#[derive(Debug, Default)]
pub(super) struct Events {
    requests: VecDeque<(Tag, u16)>,
    notices: [NoticeState; KINDS.len()],
    config: u32,
    changed: BTreeSet<u32>,
}

impl Events {
    /// Holds an Asynchronous Event Request until there is an event.
    pub(super) fn hold(&mut self, tag: Tag, sqe: &Sqe) -> Result<(), Status> {
        if self.requests.len() >= LIMIT {
            return Err(Status::EVENT_REQUEST_LIMIT.do_not_retry());
        }
        self.requests.push_back((tag, sqe.cid.get()));
        Ok(())
    }

    /// Removes a request that the host aborts.
    pub(super) fn take(&mut self, cid: u16) -> Option<Tag> {
        let i = self.requests.iter().position(|&(_, c)| c == cid)?;
        self.requests.remove(i).map(|(tag, _)| tag)
    }

    /// Removes any request, if there is one: the controller is reset.
    pub(super) fn take_any(&mut self) -> Option<Tag> {
        self.requests.pop_front().map(|(tag, _)| tag)
    }

    pub(super) fn config(&self) -> u32 {
        self.config
    }

    pub(super) fn configure(&mut self, config: u32) {
        self.config = config;
    }

    /// Reports an event.
    pub(super) fn notify(&mut self, kind: EventKind) {
        self.notices[kind as usize].pending = true;
    }

    /// Reports that a namespace was added, removed or changed.
    pub(super) fn namespace_changed(&mut self, nsid: u32) {
        self.notify(EventKind::Namespaces);
        // One more than the log can list: it then says "too many".
        if self.changed.len() <= MAX_CHANGED {
            self.changed.insert(nsid);
        }
    }

    /// Namespaces that have changed since the host last looked; `None` if too many.
    pub(super) fn changed(&self) -> Option<&BTreeSet<u32>> {
        (self.changed.len() <= MAX_CHANGED).then_some(&self.changed)
    }

    /// The host has read the log of `kind`: re-arms its event.
    pub(super) fn log_read(&mut self, kind: EventKind) {
        self.notices[kind as usize] = NoticeState::default();
        if kind == EventKind::Namespaces {
            self.changed.clear();
        }
    }

    /// The next request that can be answered, with its answer.
    pub(super) fn poll(&mut self) -> Option<(Tag, Completion)> {
        for kind in KINDS {
            let notice = &mut self.notices[kind as usize];
            if notice.pending && !notice.sent && kind.is_wanted(self.config) {
                let (tag, _) = self.requests.pop_front()?;
                *notice = NoticeState { pending: false, sent: true };
                return Some((tag, Completion::ok(kind.result())));
            }
        }
        None
    }

    /// Resets all state; the requests have been removed before.
    pub(super) fn reset(&mut self) {
        self.notices = Default::default();
        self.changed.clear();
        self.config = 0;
    }
}
