//! Members of a pool belong to one machine at a time ([RFD 0034](../../../../docs/rfd/0034-one-disk-two-machines.md)).
//!
//! Every disk has an owner record of its own: machines may reach some disks of a pool together, and others not.

use std::rc::Rc;

use disk::{Claim, Lost, NotTaken, Refusal, check_free};
use futures_util::future::join_all;
use rt::Core;
use rt::disk::{Disk, DiskError, DiskErrorKind};
use tokio::sync::mpsc;
use tokio::time::timeout;

use super::disk::MemberDisk;
use super::error::PoolError;
use super::label::Label;
use super::owner::Pool;
use super::writer::LONG_PATIENCE;

/// Who takes the disks of a pool, and who hears that another machine has taken one.
#[derive(Clone, Debug)]
pub(super) struct Ownership {
    /// None if the caller keeps other machines out.
    pub(super) claim: Option<Claim>,
    pub(super) told: Option<mpsc::UnboundedSender<Lost>>,
}

impl Ownership {
    /// The same without what a person has said for one opening.
    pub(super) fn without_statement(&self) -> Self {
        let claim = self.claim.map(|claim| Claim { take_over: false, ..claim });
        Self { claim, told: self.told.clone() }
    }
}

/// Why a disk of this pool is not taken, in words.
pub(super) fn not_taken(label: &Label, path: &std::path::Path, why: &NotTaken) -> String {
    let mut what = format!("{}: disk {} {why}", path.display(), label.serial);
    if let NotTaken::Refused(refusal) = why
        && refusal.may_take_over()
    {
        let name = label.name;
        what.push_str(&format!(
            "; if that node will never use pool {name} again: windrose pool open {name} --take-over"
        ));
    }
    what
}

/// That another machine has taken the pool.
pub(super) fn pool_lost(lost: &Lost) -> PoolError {
    let by = Refusal::Lost(lost.to.clone());
    PoolError::new(format!("the pool {by}: nothing is written to it here any more"))
        .hinting("close the pool on that node, then restart this one")
}

/// Takes a disk, unless it does not answer for a minute.
pub(super) async fn take_in_time(
    core: &Core,
    disk: &MemberDisk,
    ownership: &Ownership,
) -> Result<(), NotTaken> {
    let silent = NotTaken::Disk(DiskError { kind: DiskErrorKind::Gone, errno: 0 });
    timeout(LONG_PATIENCE, disk.take(core, ownership)).await.unwrap_or(Err(silent))
}

/// Takes all of these, each by itself.
///
/// # Errors
/// Which of them are other nodes': none is taken then.
pub(super) async fn take_all(
    core: &Core,
    disks: &[&MemberDisk],
    ownership: &Ownership,
) -> Result<Vec<Option<NotTaken>>, PoolError> {
    let all = join_all(disks.iter().map(|disk| take_in_time(core, disk, ownership))).await;
    let mut refused = Vec::new();
    for (disk, taken) in disks.iter().zip(&all) {
        if let Err(why @ NotTaken::Refused(_)) = taken {
            refused.push(not_taken(&disk.label(), disk.path(), why));
        }
    }
    if refused.is_empty() {
        return Ok(all.into_iter().map(Result::err).collect());
    }
    // Whatever was taken of a pool that another machine has.
    join_all(disks.iter().map(|disk| disk.release())).await;
    Err(PoolError::new(format!("another machine has its disks:\n  {}", refused.join("\n  "))))
}

/// Whether no other machine uses a disk that is to become a member.
///
/// # Errors
/// Which one does.
pub(super) async fn is_free(
    core: &Core,
    disk: &Disk,
    claim: Option<Claim>,
    overwrites: bool,
) -> Result<(), PoolError> {
    let Some(claim) = claim else { return Ok(()) };
    let claim = Claim { take_over: claim.take_over || overwrites, ..claim };
    let free = check_free(core, disk, &core.pool().account(), &claim).await;
    free.map_err(|why| PoolError::at(disk.path(), why))
}

impl Pool {
    /// Another machine has taken a disk. If it has taken it for this pool nothing is read or written any more.
    pub(super) fn hear_lost(&self, lost: &Lost) {
        let pool = self.writer.metadata().pool;
        // Else it is overwritten: one disk less.
        if lost.to.as_ref().is_some_and(|by| by.subject.set == pool) {
            self.writer.lose(&pool_lost(lost));
        }
    }
}

/// Gives all of these back.
pub(super) async fn release_all(disks: impl IntoIterator<Item = Rc<MemberDisk>>) {
    let all: Vec<_> = disks.into_iter().collect();
    join_all(all.iter().map(|disk| disk.release())).await;
}
