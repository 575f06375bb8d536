//! The block device interface: what every layer of a storage stack implements, and the one way to
//! call it.
//!
//! # The contract
//! * **Visibility.** A completed write is visible to every read submitted after it; it is not yet
//!   durable.
//! * **Durability.** [`Op::Flush`] makes durable every write completed before the flush was
//!   submitted. `fua` makes that one write durable and nothing else.
//! * **Order.** Concurrent operations are unordered. Overlapping operations of which one writes
//!   never run at once below a volume: the volume serialises them, layers rely on it.
//!   Debug builds panic on an overlap. [`Op::BlockStatus`] may overlap anything.
//! * **Atomicity.** One logical block is never torn: after a crash it holds the old or the new
//!   contents. A larger write may be partly done.
//! * **Failure.** A write that failed or was aborted leaves its range with the old or the new
//!   contents, block by block, and these do not change. A failed flush ends the device: retrying it
//!   proves nothing, and every later operation fails with [`Error::Gone`].
//! * **Cancellation** is never by drop. The caller polls every operation to completion; an abort
//!   ([`Ctx::abort`]) is a request, the completion is the result. Dropping an operation in flight
//!   panics in debug builds (see [`drop_permit`]).
//! * **Memory.** A read is answered in buffers that the callee takes from the operation's
//!   [`Ctx`] or that it has already; [`Info::overhead_bytes`] declares what a stack needs beyond
//!   the data itself. A layer keeps no scratch memory of an operation that it has completed, so the
//!   operations of a command that run one after another need one overhead, not many.

mod access;
mod block_status;
mod change_tracker;
mod copy_into;
mod ctx;
mod dev;
pub mod drop_permit;
mod error;
mod flush_coalescer;
mod keyed_locks;
mod mem;
mod op;
mod range_locks;
mod replicated_device;
mod request;
mod reserve_memory;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
mod volume_metadata;

pub use access::{Access, AccessState};
pub use block_status::BlockStatus;
pub use change_tracker::{ChangeTracker, ChangeWatch};
pub use copy_into::copy_into;
pub use ctx::{Ctx, Epoch};
pub use dev::{Dev, Info, Layer, Stats, Submission};
pub use error::Error;
pub use flush_coalescer::FlushCoalescer;
pub use keyed_locks::{KeyedLock, KeyedLocks};
pub use mem::{Mem, MemOptions};
pub use op::{Blocks, Lba, Op};
pub use range_locks::{RangeLock, RangeLocks};
pub use replicated_device::{CommitFuture, CompareAndWriteFuture, ReplicatedDevice};
pub use request::{Request, RequestError};
pub use reserve_memory::reserve_memory;
pub use rt::buf::{
    Account, Buf, BufMut, BufferPool, Bufs, BufsMut, Credit, CreditTooLarge, MemoryClass, run_mut,
};
pub use volume_metadata::{METADATA_BYTES, METADATA_LBA, MetadataObserver};
