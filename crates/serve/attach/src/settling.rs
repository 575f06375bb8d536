//! A device whose last user may not have ended in order.

use block::{Bufs, Ctx, Dev, Error, Info, Layer, Op};
use tokio::time::{Instant, sleep_until};

/// Holds up changes for a while.
///
/// Another process used the device and was killed. What it had sent may still be carried out, by a node that does not
/// run just now; whoever sends it again, or writes something newer there, would be undone. So nothing is changed before
/// that cannot happen any more. Reads and flushes do not wait.
///
/// That the device below is gone is not told before either: who ends because of it leaves no trace of what he had to wait
/// for.
#[derive(Debug)]
pub struct Settling {
    below: Dev,
    until: Instant,
}

impl Settling {
    /// Changes nothing of `below` before `until`.
    #[must_use]
    pub fn new(below: Dev, until: Instant) -> Self {
        Self { below, until }
    }
}

impl Layer for Settling {
    fn name(&self) -> &'static str {
        "settling"
    }

    fn info(&self) -> Info {
        self.below.info()
    }

    async fn submit(&self, op: Op, ctx: Ctx) -> Result<Bufs, Error> {
        match op {
            Op::Write { .. } | Op::Zero { .. } | Op::Unmap { .. } => sleep_until(self.until).await,
            Op::Read { .. } | Op::Map { .. } | Op::Flush => {}
        }
        let result = self.below.submit(op, &ctx).await;
        if matches!(result, Err(Error::Gone)) {
            sleep_until(self.until).await;
        }
        result
    }
}
