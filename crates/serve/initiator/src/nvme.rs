//! NVMe over TCP, the host's role (NVMe Base 2.0, NVM Command Set 1.0, NVMe/TCP Transport 1.0).
//!
//! * [`Queue`] is one connection: commands in, completions out.
//! * [`Controller`] is an association: it is connected, kept alive, listened to, and connected again.
//! * [`Namespace`] is a volume behind it, as a layer.
//! * [`discover`] asks which subsystems there are.
//!
//! Everything belongs to one core. Who wants more of them connects to a controller on each.

mod admin;
mod connect;
mod controller;
mod discovery;
mod identity;
mod live;
mod namespace;
mod options;
mod paths;
mod queue;
#[cfg(feature = "testing")]
pub mod testing;

pub use admin::Failed;
pub use connect::ConnectError;
pub use controller::Controller;
pub use discovery::discover;
pub use identity::{Abilities, Described, Identity};
pub use namespace::{CompareError, Gone, Namespace, OpenError};
pub use options::{Backoff, Options, Secrets};
pub use paths::Policy;
pub use queue::{End, Pair, Place, Queue, Reply, Staging, Transport};
