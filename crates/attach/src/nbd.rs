//! An NBD server of one export, at a Unix socket or by TCP (`docs/rfd/0025-nbd.md`).
//!
//! [`serve`] is all that most callers need. Connections share the device, so a flush on one covers what was
//! completed on all of them, and clients are told so (`NBD_FLAG_CAN_MULTI_CONN`).

mod options;
mod server;
mod session;

use std::rc::Rc;

use ::nbd::Address;
use rt::Core;

use crate::Ordered;
pub use options::Options;
pub use server::{ServeError, Server};

/// Serves a device until `stop` comes to its end: then nobody is let in any more, what is in flight is answered, and
/// the device is flushed.
///
/// Runs on the core that the device lives on, in a `LocalSet`. If the future is dropped, connections are cut; what they
/// had begun comes to its end.
///
/// # Errors
/// [`ServeError`].
pub async fn serve(
    core: &Core,
    disk: &Rc<Ordered>,
    at: &Address,
    options: Options,
    stop: impl Future<Output = ()>,
) -> Result<(), ServeError> {
    Server::bind(core, disk, at, options).await?.run(stop).await
}
