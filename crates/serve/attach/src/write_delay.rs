//! Delays writes after the last user of a device may have ended abnormally.

use block::{Bufs, Ctx, Dev, Error, Info, Layer, Op};
use tokio::time::{Instant, sleep_until};

/// Delays changes for a while.
///
/// Another process used the device and was killed. Its last writes may still be executed later, by
/// a node that is currently stopped, and would undo a retry or a newer write. So nothing is changed
/// before that is no longer possible. Reads and flushes are not delayed.
///
/// Failures of the device below are delayed as well: a user that exits because of them leaves no
/// record of what it had to wait for.
#[derive(Debug)]
pub struct WriteDelay {
    below: Dev,
    until: Instant,
}

impl WriteDelay {
    /// Delays changes of `below` until `until`.
    #[must_use]
    pub fn new(below: Dev, until: Instant) -> Self {
        Self { below, until }
    }
}

impl Layer for WriteDelay {
    fn name(&self) -> &'static str {
        "settling"
    }

    fn info(&self) -> Info {
        self.below.info()
    }

    async fn submit(&self, op: Op, ctx: Ctx) -> Result<Bufs, Error> {
        match op {
            Op::Write { .. } | Op::Zero { .. } | Op::Unmap { .. } => sleep_until(self.until).await,
            Op::Read { .. } | Op::BlockStatus { .. } | Op::Flush => {}
        }
        let result = self.below.submit(op, &ctx).await;
        if matches!(result, Err(Error::Gone)) {
            sleep_until(self.until).await;
        }
        result
    }
}
