//! One connection by itself, for tests and fuzzing.

use std::rc::Rc;
use std::time::Duration;

use ::frame::SendQueue;
use tokio::io::{AsyncRead, AsyncWrite};

use crate::driver::{Connection, run};
use crate::frame::Rules;
use crate::{End, Handler, Outbox};

/// Drives a connection on which the handshake is over, to its end. Both sides count frames from 0.
pub async fn drive<H, S>(
    handler: Rc<H>,
    session: u64,
    outbox: Outbox,
    rules: Rules,
    stream: S,
) -> End
where
    H: Handler,
    S: AsyncRead + AsyncWrite + Unpin + 'static,
{
    let connection = Connection { rules, stream, first: SendQueue::default() };
    run(handler, session, outbox, vec![connection], Duration::from_secs(10)).await
}
