//! Whose turn it is on a core.

use std::future::poll_fn;
use std::task::Poll;

/// Lets those tasks of the core go first that are ready. Sockets and timers are not looked at meanwhile, which would cost a
/// system call: that is the difference to [`tokio::task::yield_now`].
pub async fn give_way() {
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
