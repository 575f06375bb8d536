//! NBD, sans-io: the network block device protocol, fixed newstyle, of both ends.
//!
//! The specification is `doc/proto.md` of <https://github.com/NetworkBlockDevice/nbd>; names of its
//! sections and constants stand where a rule is carried out.
//!
//! * [`server::Connection`] is the end that has the disk: it negotiates, takes requests, and hands them on
//!   as [`server::Action`]s.
//! * [`client::Connection`] is the end that uses it.
//! * [`message`] is what they say to each other.
//!
//! Both ends speak structured replies, size constraints and `base:allocation`. Neither speaks TLS, nor the
//! experimental extensions `EXTENDED_HEADERS` and `RESIZE`: they are answered as the specification wants of
//! those who do not know them. `docs/rfd/0025-nbd.md` says why; `docs/conformance/nbd.md` where what is tested.

mod address;
pub mod client;
mod export;
pub mod message;
pub mod server;

pub use address::{Address, DEFAULT_PORT};
pub use export::{Abilities, Export, Extent, Sizes};
pub use message::Errno;

/// Handle to a command in flight on one connection: dense, from 0, reused once the command is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Tag(u16);

impl Tag {
    /// The tag as an index, below the number of commands that may be in flight.
    #[must_use]
    pub fn index(self) -> usize {
        usize::from(self.0)
    }
}
