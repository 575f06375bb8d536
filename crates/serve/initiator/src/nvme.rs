//! NVMe/TCP host (NVMe Base 2.0, NVM Command Set 1.0, NVMe/TCP Transport 1.0).
//!
//! * [`Queue`] is one connection: commands in, completions out.
//! * [`Controller`] is an association: it connects, keeps alive, listens, and reconnects after a
//!   loss.
//! * [`Namespace`] is a namespace of the subsystem, as a layer.
//! * [`discover`] lists the subsystems of a discovery controller.
//!
//! Everything belongs to one core. To use a controller from several cores, connect on each.

mod active_association;
mod admin;
mod connect;
mod controller;
mod discovery;
mod identity;
mod namespace;
mod options;
mod paths;
mod queue;
#[cfg(feature = "testing")]
pub mod testing;

pub use admin::AdminError;
pub use connect::ConnectError;
pub use controller::Controller;
pub use discovery::discover;
pub use identity::{ControllerCapabilities, Identity, NamespaceDescription};
pub use namespace::{CompareError, Namespace, NamespaceGone, OpenError};
pub use options::{Backoff, Options, Secrets};
pub use paths::PathPolicy;
pub use queue::{CommandSlot, CommandSlotPair, Queue, QueueEnd, Reply, Staging, Transport};
