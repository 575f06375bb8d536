//! What is asked of the core, and how it is answered.

use block::{Bufs, Credit};
use fuser::{
    Errno, ReplyAttr, ReplyData, ReplyEmpty, ReplyEntry, ReplyLseek, ReplyStatfs, ReplyWrite,
};
use tokio::sync::oneshot;

/// What there is: the directory, and the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Node {
    Root,
    File,
}

/// Something to do on the core.
pub(super) enum Job {
    /// What is at a name.
    Entry(Node, ReplyEntry),
    Attributes(Node, ReplyAttr),
    /// The file shall have another size.
    Resize(u64, ReplyAttr),
    Space(ReplyStatfs),
    /// Memory for the data of a write, which waits for it.
    Memory(usize, oneshot::Sender<Credit>),
    Read(u64, u32, ReplyData),
    Write(Write, ReplyWrite),
    Flush(ReplyEmpty),
    Zero(Zero, ReplyEmpty),
    /// Where the next data is, or the next hole, from this byte on.
    Seek(u64, Sought, ReplyLseek),
}

/// A write, with its data.
pub(super) struct Write {
    /// First byte.
    pub(super) at: u64,
    /// New contents, behind as many bytes of no meaning as its first block has before them.
    pub(super) data: Bufs,
    pub(super) lead: usize,
    /// Where its memory is from, with more for a block that it covers in part.
    pub(super) credit: Credit,
    /// Durable when it is answered.
    pub(super) durable: bool,
}

/// A range that shall read as zeroes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Zero {
    pub(super) at: u64,
    pub(super) len: u64,
    /// Whether its space may be freed.
    pub(super) unmap: bool,
    /// Whether the file would have to grow for what lies behind its end.
    pub(super) grows: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Sought {
    Data,
    Hole,
}

/// An answer that the kernel waits for. It is given once; one that is dropped says that something failed (the library
/// sees to that).
pub(super) trait Answer: 'static {
    type Given: 'static;
    fn give(self, given: Self::Given);
    fn fail(self, why: Errno);
}

impl Answer for ReplyData {
    type Given = Bufs;

    fn give(self, data: Bufs) {
        let mut buffers = data.iter();
        match (buffers.next(), buffers.next()) {
            (Some(all), None) => self.data(all),
            // The library sends one piece. It is gone when this returns, so there is one of them at a time.
            _ => self.data(&data.to_vec()),
        }
    }

    fn fail(self, why: Errno) {
        self.error(why);
    }
}

/// Of a write of so many bytes.
pub(super) struct Written(pub(super) ReplyWrite, pub(super) u32);

impl Answer for Written {
    type Given = ();

    fn give(self, (): ()) {
        self.0.written(self.1);
    }

    fn fail(self, why: Errno) {
        self.0.error(why);
    }
}

impl Answer for ReplyEmpty {
    type Given = ();

    fn give(self, (): ()) {
        self.ok();
    }

    fn fail(self, why: Errno) {
        self.error(why);
    }
}

impl Answer for ReplyLseek {
    type Given = Option<u64>;

    /// Where it is, if it is anywhere.
    fn give(self, place: Option<u64>) {
        match place.and_then(|at| i64::try_from(at).ok()) {
            Some(at) => self.offset(at),
            None => self.error(Errno::ENXIO),
        }
    }

    fn fail(self, why: Errno) {
        self.error(why);
    }
}
