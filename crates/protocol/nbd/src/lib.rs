//! NBD, sans-io: the network block device protocol, fixed newstyle, of both ends.
//!
//! The specification is `doc/proto.md` of <https://github.com/NetworkBlockDevice/nbd>; names of its
//! sections and constants stand where a rule is carried out.
//!
//! * [`server::Connection`] is the server: it negotiates, receives requests, and passes them on as
//!   [`server::Action`]s.
//! * [`client::Connection`] is the client.
//! * [`message`] defines the messages.
//!
//! Both support structured replies, size constraints and `base:allocation`. Neither supports TLS or
//! the experimental extensions `EXTENDED_HEADERS` and `RESIZE`, which are refused as the
//! specification requires. `docs/rfd/0025-nbd.md` gives the reasons; `docs/conformance/nbd.md` maps
//! the specification to tests.

mod address;
pub mod client;
mod export;
pub mod message;
pub mod server;

pub use address::{Address, DEFAULT_PORT};
pub use export::{BlockStatusExtent, Export, SizeConstraints, TransmissionFlags};
pub use message::Errno;

/// Handle of a command in flight on one connection: dense, from 0, reused once the command has
/// ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Tag(u16);

impl Tag {
    /// The tag as an index, below the number of commands that may be in flight.
    #[must_use]
    pub fn index(self) -> usize {
        usize::from(self.0)
    }
}
