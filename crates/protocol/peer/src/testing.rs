//! Drives single connections, for tests and fuzzing.

use std::rc::Rc;
use std::time::Duration;

use ::frame::SendQueue;
use tokio::io::{AsyncRead, AsyncWrite};

use crate::frame::ConnectionParams;
use crate::session_driver::{ReadyConnection, run_session};
use crate::{Outbox, PeerSessionEnd, SessionHandler};

/// Drives a connection after its handshake, until it ends. Both sides count frames from 0.
pub async fn drive<H, S>(
    handler: Rc<H>,
    session: u64,
    outbox: Outbox,
    params: ConnectionParams,
    stream: S,
) -> PeerSessionEnd
where
    H: SessionHandler,
    S: AsyncRead + AsyncWrite + Unpin + 'static,
{
    let connection = ReadyConnection { params, stream, preamble: SendQueue::default() };
    run_session(handler, session, outbox, vec![connection], Duration::from_secs(10)).await
}
