//! Appends entries to the parity logs of several members at once.

use std::rc::Rc;

use block::{Buf, Error};
use futures_util::future::join_all;
use smallvec::SmallVec;
use tokio::sync::futures::Notified;

use super::array::Array;
use super::extent::SlotId;
use super::log_batch::{EntryKind, LogEntry};
use super::members::AttachedMember;
use super::parity_log::LogPositions;

impl Array {
    /// Appends an entry to the logs of these members, each with blocks of its own. Returns when it
    /// is durable in all that are not detached then, with its number and positions.
    ///
    /// # Errors
    /// If the detach of a member could not be recorded, or writes have stopped.
    pub(super) async fn append_to_logs(
        &self,
        slot: SlotId,
        kind: EntryKind,
        to: SmallVec<[(u16, Vec<Buf>); 2]>,
    ) -> Result<(u64, LogPositions), Error> {
        self.reserve_log_space(&to).await?;
        let number = self.take_entry_number();
        let entry = LogEntry { number, extent: slot.0, slot: slot.1, kind };
        let each = to.into_iter().map(|(member, blocks)| async move {
            let Some(attached) = self.members.attached(member) else {
                return (member, Err(Error::Gone));
            };
            (member, attached.log.append(entry, blocks, &self.memory.scratch).await)
        });
        let mut positions = LogPositions::new();
        for (member, outcome) in join_all(each).await {
            match outcome {
                Ok(batch) => positions.push((member, batch)),
                Err(why) => self.detach_member(member, why).await?,
            }
        }
        Ok((number, positions))
    }

    /// Waits until all these logs have space for an entry, and reserves it in all at once: a caller
    /// that holds space in one log never waits for another.
    async fn reserve_log_space(&self, to: &[(u16, Vec<Buf>)]) -> Result<(), Error> {
        loop {
            // Created before the check, so that no notification is missed.
            let freed = self.log_space_freed.notified();
            self.check_writable()?;
            let logs: SmallVec<[Rc<AttachedMember>; 2]> =
                to.iter().filter_map(|(member, _)| self.members.attached(*member)).collect();
            if logs.iter().all(|member| member.log.has_space()) {
                logs.iter().for_each(|member| member.log.reserve());
                return Ok(());
            }
            self.free_log_space(freed).await?;
        }
    }

    /// Retires entries if it can; else waits for `freed`.
    pub(super) async fn free_log_space(&self, freed: Notified<'_>) -> Result<(), Error> {
        let is_unflushed = self.unflushed.borrow().has_entries();
        if is_unflushed || self.intent_locks.has_intents_awaiting_flush() {
            self.flush().await?;
        } else if !self.clear_write_intents(true) && !self.save_maps().await? {
            freed.await;
        }
        Ok(())
    }
}
