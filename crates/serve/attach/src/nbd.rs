//! An NBD server of one export, at a Unix socket or by TCP (`docs/rfd/0025-nbd.md`).
//!
//! [`serve`] is all that most callers need. Connections share the volume, so a flush on one covers what was
//! completed on all of them, and clients are told so (`NBD_FLAG_CAN_MULTI_CONN`).

mod options;
mod server;
mod session;

use std::rc::Rc;

pub use ::nbd::Address;
use rt::Core;

use volume::Volume;

pub use options::Options;
pub use server::{ServeError, Server};

/// Serves a volume until `stop` comes to its end: then nobody is let in any more, and what is in flight is answered.
/// The volume is the caller's to close.
///
/// Runs on the core that the volume lives on, in a `LocalSet`. If the future is dropped, connections are cut; what they
/// had begun comes to its end.
///
/// # Errors
/// [`ServeError`].
pub async fn serve(
    core: &Core,
    volume: &Rc<Volume>,
    at: &Address,
    options: Options,
    stop: impl Future<Output = ()>,
) -> Result<(), ServeError> {
    Server::bind(core, volume, at, options).await?.run(stop).await;
    Ok(())
}
