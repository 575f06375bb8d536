//! Locks of copies: the regions that a write changes are locked, once their write intents are in
//! the logs.

use block::Error;
use geometry::MAX_MEMBERS;

use super::array::Array;
use super::intent_locks::{IntentRegion, LockAttempt};
use super::log_batch::EntryKind;
use super::member_bits::MemberBits;
use super::mistake::Mistake;
use super::parity_log::LogPositions;

impl Array {
    /// Waits until the copies of these regions may be written on these members: an intent for each,
    /// made by `what`, is in the logs of all that are not detached. Pairs with
    /// [`Self::unlock_copies`].
    ///
    /// # Errors
    /// Those of [`Self::append_to_logs`].
    pub(super) async fn lock_copies(
        &self,
        regions: &[(IntentRegion, MemberBits)],
        intent: impl Fn(IntentRegion) -> EntryKind,
    ) -> Result<(), Error> {
        loop {
            let changed = self.log_space_freed.notified();
            self.check_writable()?;
            match self.intent_locks.try_lock(regions) {
                LockAttempt::Locked => return Ok(()),
                LockAttempt::Wait => changed.await,
                LockAttempt::LogIntent(region, members) => {
                    let mut logging =
                        IntentLogging { array: self, region, members, positions: None };
                    let changes = self.members.changes();
                    let numbers =
                        (0u16..).take(MAX_MEMBERS.into()).filter(|n| members >> n & 1 == 1);
                    let to = numbers.map(|member| (member, Vec::new())).collect();
                    let logged =
                        self.append_to_logs((region.0, region.1), intent(region), to).await?;
                    // A member attached meanwhile has a log without this entry.
                    logging.members = match self.members.changes() == changes {
                        _ if self.makes_mistake(Mistake::SkipsIntentOfLaterCopies) => {
                            MemberBits::MAX
                        }
                        true => members,
                        false => 0,
                    };
                    logging.positions = Some(logged.1);
                }
            }
        }
    }

    /// Notes that the copies of these regions are written, in region `written` of the extent;
    /// `durable` if already durable.
    pub(super) async fn unlock_copies(
        &self,
        regions: &[IntentRegion],
        written: u32,
        durable: bool,
    ) -> Result<(), Error> {
        let is_unflushed = self.members.is_volatile() && !durable;
        self.intent_locks.unlock(
            regions,
            written,
            is_unflushed.then(|| self.unflushed.borrow().flushes_begun()),
        );
        self.clear_write_intents(false);
        self.log_space_freed.notify_waiters();
        if self.intent_locks.is_flush_due() {
            self.flush().await?;
            self.clear_write_intents(false);
        }
        Ok(())
    }
}

/// A write intent that is being logged.
struct IntentLogging<'a> {
    array: &'a Array,
    region: IntentRegion,
    members: MemberBits,
    positions: Option<LogPositions>,
}

impl Drop for IntentLogging<'_> {
    fn drop(&mut self) {
        self.array.intent_locks.record_logged(self.region, self.members, self.positions.take());
        self.array.log_space_freed.notify_waiters();
    }
}
