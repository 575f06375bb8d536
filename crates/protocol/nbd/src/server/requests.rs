//! Requests in flight: a dense slab, so that a tag is an index.

use crate::Tag;
use crate::message::Cmd;

/// State needed to answer a request.
#[derive(Clone, Copy, Debug)]
pub(super) struct PendingRequest {
    pub(super) kind: Cmd,
    pub(super) cookie: u64,
    pub(super) at: u64,
    /// In bytes.
    pub(super) len: u32,
    /// `NBD_CMD_FLAG_FUA`, `NBD_CMD_FLAG_REQ_ONE`.
    pub(super) fua: bool,
    pub(super) one: bool,
}

#[derive(Debug, Default)]
pub(super) struct Requests {
    slots: Vec<Option<PendingRequest>>,
    free: Vec<u16>,
}

impl Requests {
    pub(super) fn len(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The caller limits their number.
    pub(super) fn insert(&mut self, taken: PendingRequest) -> Tag {
        let index = self.free.pop().unwrap_or_else(|| {
            self.slots.push(None);
            u16::try_from(self.slots.len() - 1).expect("in_flight is a u16")
        });
        self.slots[usize::from(index)] = Some(taken);
        Tag(index)
    }

    pub(super) fn get(&self, tag: Tag) -> Option<&PendingRequest> {
        self.slots.get(tag.index())?.as_ref()
    }

    pub(super) fn len_of(&self, tag: Tag) -> Option<usize> {
        self.get(tag).map(|taken| taken.len as usize)
    }

    pub(super) fn remove(&mut self, tag: Tag) -> Option<PendingRequest> {
        let taken = self.slots.get_mut(tag.index())?.take()?;
        self.free.push(tag.0);
        Some(taken)
    }
}
