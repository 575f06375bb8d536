//! The cached checksums of columns, where members have a checksum layer: written back and forgotten
//! when a column changes its owner.

use std::rc::Rc;
use std::time::Duration;

use block::{Error, Op};
use geometry::{Column, RowChecksums};

use super::array::Array;

/// How often a member is probed while its checksums are written.
const REPLY_CHECK_INTERVAL: Duration = Duration::from_secs(1);

impl Array {
    /// Writes back and forgets the checksums of a column that is, or was to be, unused from now on.
    ///
    /// # Errors
    /// If the detach of a member that failed could not be recorded.
    pub async fn release_column(&self, column: Column) -> Result<(), Error> {
        let release = async move |checksums: Rc<dyn RowChecksums>| {
            checksums.release_unit(column.first_row).await
        };
        self.with_checksums(column.member, release).await
    }

    /// Forgets the cached checksums of a column that comes from another owner.
    pub(super) fn adopt_column(&self, column: &Column) {
        let attached = self.members.attached(column.member);
        let checksums = attached.and_then(|attached| attached.checksums.clone());
        checksums.into_iter().for_each(|checksums| checksums.forget_unit(column.first_row));
    }

    /// Writes back all checksums of areas without writes since the last call.
    ///
    /// # Errors
    /// If the detach of a member that failed could not be recorded.
    pub async fn write_back_cold_checksums(&self) -> Result<(), Error> {
        for (member, _) in self.members.all_attached() {
            let write_back =
                async |checksums: Rc<dyn RowChecksums>| checksums.write_back_cold().await;
            self.with_checksums(member, write_back).await?;
        }
        Ok(())
    }

    /// Writes back the checksums of all areas without writes in progress: another owner may write
    /// there from now on.
    ///
    /// # Errors
    /// If the detach of a member that failed could not be recorded.
    pub async fn release_idle_checksums(&self) -> Result<(), Error> {
        for (member, _) in self.members.all_attached() {
            let release = async |checksums: Rc<dyn RowChecksums>| checksums.release_idle().await;
            self.with_checksums(member, release).await?;
        }
        Ok(())
    }

    /// Runs `what` on the checksums of an attached member. On failure the member is detached; if it
    /// does not respond, this waits until it is detached.
    async fn with_checksums(
        &self,
        member: u16,
        operation: impl AsyncFnOnce(Rc<dyn RowChecksums>) -> Result<(), Error> + 'static,
    ) -> Result<(), Error> {
        let Some(attached) = self.members.attached(member).filter(|_| !self.is_detached(member))
        else {
            return Ok(());
        };
        let Some(checksums) = attached.checksums.clone() else { return Ok(()) };
        // An operation on a disk must not be dropped, so it runs as a task.
        let running = tokio::task::spawn_local(async move { operation(checksums).await });
        let detached = async {
            while !self.is_detached(member) {
                tokio::time::sleep(REPLY_CHECK_INTERVAL).await;
                // This lets the health monitor see whether it responds.
                if let Ok(probe) = attached.disk.begin(Op::Flush, &self.memory.scratch, 0) {
                    let _ = probe.spawn_orphaned().await;
                }
            }
        };
        tokio::select! {
            biased;
            finished = running => match finished.unwrap_or(Err(Error::Gone)) {
                Ok(()) => Ok(()),
                Err(why) => self.detach_member(member, why).await,
            },
            () = detached => Ok(()),
        }
    }
}
