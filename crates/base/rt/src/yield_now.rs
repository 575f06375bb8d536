//! Yielding to other tasks of a core.

use std::future::poll_fn;
use std::task::Poll;

/// Lets the tasks of the core that are ready run first. Unlike [`tokio::task::yield_now`] it does
/// not poll sockets and timers, which costs a system call.
pub async fn yield_to_ready_tasks() {
    let mut given = false;
    poll_fn(|cx| {
        if std::mem::replace(&mut given, true) {
            return Poll::Ready(());
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    })
    .await;
}
