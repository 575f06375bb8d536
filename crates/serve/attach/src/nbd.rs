//! An NBD server with one export, on a Unix socket or TCP (`docs/rfd/0025-nbd.md`).
//!
//! [`serve`] is all that most callers need. Connections share the volume, so a flush on one covers
//! what was completed on all, which clients are told (`NBD_FLAG_CAN_MULTI_CONN`).

mod options;
mod server;
mod session;

use std::rc::Rc;

pub use ::nbd::Address;
use rt::Core;

use volume::Volume;

pub use options::Options;
pub use server::{ServeError, Server};

/// Serves a volume until `stop` completes: then accepts no more clients and answers what is in
/// flight. The caller closes the volume.
///
/// Runs on the volume's core, in a `LocalSet`. If the future is dropped, connections are cut;
/// requests already started complete.
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
