//! Flushes: make completed writes durable on all members, and retire their log entries.

use std::sync::atomic::Ordering;

use block::{Error, Op};
use futures_util::future::join_all;

use super::array::Array;
use super::extent::SlotId;
use super::mistake::Mistake;
use super::parity_log::LogPositions;

impl Array {
    /// Notes that what the entry covers is written in this region, on all members that are not
    /// detached; `durable` if already durable.
    pub(super) fn note_entry_written(
        &self,
        slot: SlotId,
        region: u32,
        positions: LogPositions,
        durable: bool,
    ) {
        if durable || !self.members.is_volatile() {
            self.members.retire_entry(&positions);
        } else {
            self.unflushed.borrow_mut().insert(slot, region, positions);
        }
        self.log_space_freed.notify_waiters();
    }

    /// Waits until no entry of the stripe may be needed for recovery.
    pub(super) async fn wait_durable(&self, slot: SlotId) -> Result<(), Error> {
        let waits = self.members.is_volatile() && !self.makes_mistake(Mistake::RewritesBeforeFlush);
        let unflushed = waits && self.unflushed.borrow().contains(&slot);
        if unflushed { self.flush().await } else { Ok(()) }
    }

    /// Makes completed writes durable on all attached members. A member that fails is detached.
    ///
    /// # Errors
    /// If the detach could not be recorded.
    pub(super) async fn flush(&self) -> Result<(), Error> {
        if !self.members.is_volatile() {
            return Ok(());
        }
        self.flush_coalescer.flush(|| self.flush_all()).await
    }

    async fn flush_all(&self) -> Result<(), Error> {
        let number = self.unflushed.borrow_mut().begin_flush();
        let each = self.members.all_attached().into_iter().map(|(n, m)| async move {
            if self.is_detached(n) {
                // What it lost is recorded only once all know that it is detached.
                return match self.makes_mistake(Mistake::FlushesBeforeDetachRecorded) {
                    true => Ok(()),
                    false => self.detach_member(n, Error::Gone).await,
                };
            }
            match m.disk.submit(Op::Flush, &self.memory.scratch).await {
                Ok(_) => Ok(()),
                Err(why) => {
                    m.disk.counters.write_errors.fetch_add(1, Ordering::Relaxed);
                    self.detach_member(n, why).await
                }
            }
        });
        join_all(each).await.into_iter().collect::<Result<(), _>>()?;
        let done = self.unflushed.borrow_mut().take_before(number);
        done.iter().for_each(|positions| self.members.retire_entry(positions));
        self.intent_locks.on_flushed(number);
        self.log_space_freed.notify_waiters();
        Ok(())
    }
}
