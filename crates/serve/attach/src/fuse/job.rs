//! Requests to the core, and their answers.

use block::{Bufs, Credit};
use fuser::{
    Errno, ReplyAttr, ReplyData, ReplyEmpty, ReplyEntry, ReplyLseek, ReplyStatfs, ReplyWrite,
};
use tokio::sync::oneshot;

/// The directory or the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Node {
    Root,
    File,
}

/// A request to the core.
pub(super) enum FuseJob {
    /// Look up a name.
    Lookup(Node, ReplyEntry),
    Attributes(Node, ReplyAttr),
    /// Change the file's size.
    Resize(u64, ReplyAttr),
    StatFs(ReplyStatfs),
    /// Allocate memory for the data of a write, which waits for it.
    Memory(usize, oneshot::Sender<Credit>),
    Read(u64, u32, ReplyData),
    Write(WriteJob, ReplyWrite),
    Flush(ReplyEmpty),
    Zero(ZeroJob, ReplyEmpty),
    /// Find the next data, or the next hole, from this byte on.
    Seek(u64, SeekKind, ReplyLseek),
}

/// A write, with its data.
pub(super) struct WriteJob {
    /// First byte.
    pub(super) at: u64,
    /// New contents, after as many unused bytes as its first block has before the write.
    pub(super) data: Bufs,
    pub(super) leading_bytes: usize,
    /// The credit of its memory, with some for a partially covered block.
    pub(super) credit: Credit,
    /// Whether it must be durable when it is answered.
    pub(super) durable: bool,
}

/// A range to zero.
#[derive(Clone, Copy, Debug)]
pub(super) struct ZeroJob {
    pub(super) at: u64,
    pub(super) len: u64,
    /// Whether its space may be freed.
    pub(super) unmap: bool,
    /// Whether it would grow the file.
    pub(super) extends_file: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SeekKind {
    Data,
    Hole,
}

/// An answer that the kernel waits for, given once; dropping it answers with an error (the library
/// sees to that).
pub(super) trait FuseReply: 'static {
    type Value: 'static;
    fn reply(self, given: Self::Value);
    fn fail(self, why: Errno);
}

impl FuseReply for ReplyData {
    type Value = Bufs;

    fn reply(self, data: Bufs) {
        let mut buffers = data.iter();
        match (buffers.next(), buffers.next()) {
            (Some(all), None) => self.data(all),
            // The library sends one contiguous piece. The copy is freed when this returns, so only
            // one exists at a time.
            _ => self.data(&data.to_vec()),
        }
    }

    fn fail(self, why: Errno) {
        self.error(why);
    }
}

/// The answer to a write of this many bytes.
pub(super) struct WriteReply(pub(super) ReplyWrite, pub(super) u32);

impl FuseReply for WriteReply {
    type Value = ();

    fn reply(self, (): ()) {
        self.0.written(self.1);
    }

    fn fail(self, why: Errno) {
        self.0.error(why);
    }
}

impl FuseReply for ReplyEmpty {
    type Value = ();

    fn reply(self, (): ()) {
        self.ok();
    }

    fn fail(self, why: Errno) {
        self.error(why);
    }
}

impl FuseReply for ReplyLseek {
    type Value = Option<u64>;

    /// The position, if found.
    fn reply(self, position: Option<u64>) {
        match position.and_then(|at| i64::try_from(at).ok()) {
            Some(at) => self.offset(at),
            None => self.error(Errno::ENXIO),
        }
    }

    fn fail(self, why: Errno) {
        self.error(why);
    }
}
