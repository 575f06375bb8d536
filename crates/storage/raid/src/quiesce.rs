//! Ends writing, to an extent or of this core, so that what it used may be used elsewhere.

use std::rc::Rc;

use block::Error;
use futures_util::future::join_all;
use smallvec::SmallVec;

use super::array::Array;
use super::extent::Extent;
use super::log_batch::EntryKind;
use super::members::AttachedMember;
use super::row_plan::StripSet;

/// The number of no extent.
const NO_EXTENT: u64 = u64::MAX;

impl Array {
    /// Ends all writing to an extent that is not used any more.
    pub(super) async fn quiesce_extent(&self, extent: &Extent) -> Result<(), Error> {
        self.flush().await?;
        self.save_maps().await?;
        // Another task may be saving its map.
        drop(extent.stripe_map.saved_sequence.lock().await);
        let each = extent.columns.iter().map(|column| self.release_column(*column));
        join_all(each).await.into_iter().collect()
    }

    /// Waits until no current log entry would be replayed after a crash, so that extents used here
    /// may be used elsewhere. Nothing may use those extents meanwhile.
    ///
    /// # Errors
    /// If entries must stay for log recovery, which runs when the pool is opened.
    pub async fn drain_logs(&self) -> Result<(), Error> {
        let members = self
            .members
            .all_attached()
            .into_iter()
            .filter(|(_, member)| !member.log.is_unwritten());
        let members: Vec<_> =
            members.map(|(n, member)| (n, member.log.next_sequence(), member)).collect();
        let is_drained = |(n, end, member): &(u16, u64, Rc<AttachedMember>)| {
            self.is_detached(*n) || member.log.tail() >= *end
        };
        loop {
            let freed = self.log_space_freed.notified();
            self.check_writable()?;
            if members.iter().all(is_drained) {
                break;
            }
            self.free_log_space(freed).await?;
        }
        let mut to = SmallVec::new();
        for (member, ..) in members {
            // The log of a member that is recorded as detached is never read.
            match self.is_detached(member) {
                true => self.detach_member(member, Error::Gone).await?,
                false => to.push((member, Vec::new())),
            }
        }
        if to.is_empty() {
            return Ok(());
        }
        // A batch header carries the tail; the entry itself is a dummy. It is written twice: the
        // next owner of the ring may tear one of the two with its first write.
        let kind = EntryKind::WriteIntent { stripes: 1, changed: StripSet::first(1) };
        for _ in 0..2 {
            let (_, positions) = self.append_to_logs((NO_EXTENT, 0), kind, to.clone()).await?;
            self.members.retire_entry(&positions);
        }
        self.log_space_freed.notify_waiters();
        Ok(())
    }

    /// Makes everything durable and leaves logs that need no recovery.
    ///
    /// # Errors
    /// If the detach of a member that failed could not be recorded.
    pub async fn close(&self) -> Result<(), Error> {
        self.flush().await?;
        self.save_maps().await?;
        self.drain_logs().await?;
        self.release_idle_checksums().await
    }
}
