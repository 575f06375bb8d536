//! The seam: what every layer of a storage stack is, and the one way to call it.
//!
//! # The contract
//! * **Visibility.** A completed write is visible to every read submitted after it; it is not yet
//!   durable.
//! * **Durability.** [`Op::Flush`] makes durable every write completed before the flush was
//!   submitted. `fua` makes that one write durable and nothing else.
//! * **Order.** Concurrent operations are unordered. Overlapping operations of which one writes
//!   never run at once below a volume: the volume serialises them, layers rely on it.
//!   Debug builds panic on an overlap. [`Op::Map`] overlaps whatever it likes.
//! * **Atomicity.** One logical block is never torn: after a crash it holds the old or the new
//!   contents. A larger write may be partly done.
//! * **Failure.** A write that failed or was aborted leaves its range with the old or the new
//!   contents, block by block, and they stay. A failed flush ends the leaf: it is never retried
//!   and believed, and every later operation is [`Error::Gone`].
//! * **Cancellation** is never by drop. Whoever submits an operation polls it to completion; an
//!   abort ([`Ctx::abort`]) is a request, the completion is the truth. Dropping an operation in
//!   flight panics in debug builds (see [`crash`]).
//! * **Memory.** A read is answered in buffers that the callee takes from the operation's
//!   [`Ctx`] or that it has already; [`Info::overhead`] declares what a stack needs beyond the
//!   data itself. A layer keeps no scratch memory of an operation that it has completed, so the
//!   operations of a command that run one after another need one overhead, not many.

mod access;
mod aside;
mod changes;
mod compare;
pub mod crash;
mod ctx;
mod dev;
mod error;
mod fixed;
mod flush;
mod mem;
mod op;
mod overlay;
mod range_locks;
mod request;
mod run;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
mod unit_locks;

pub use access::{Access, AccessState};
pub use aside::{ASIDE, ASIDE_BYTES, Aside};
pub use changes::{Changes, Watch};
pub use compare::{CompareAndWrite, Compared, Settled};
pub use ctx::{Ctx, Epoch};
pub use dev::{Dev, Info, Layer, Stats, Submission};
pub use error::Error;
pub use fixed::fixed_credit;
pub use flush::FlushGate;
pub use mem::{Mem, MemOptions};
pub use op::{Blocks, Lba, Op};
pub use overlay::overlay;
pub use range_locks::{RangeLock, RangeLocks};
pub use request::{Failure, Request};
pub use rt::buf::{Account, Buf, BufMut, Bufs, BufsMut, Class, Credit, Pool, TooLarge, run_mut};
pub use run::Run;
pub use unit_locks::{UnitLock, UnitLocks};
