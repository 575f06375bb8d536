//! Claims of a pool's disks: one machine at a time uses them ([RFD
//! 0034](../../../../docs/rfd/0034-one-disk-two-machines.md)).
//!
//! Every disk has its own owner record, because other machines may reach only some of a pool's
//! disks.

use std::rc::Rc;

use disk::{ClaimError, ClaimRefusal, ClaimRequest, LostClaim, check_unclaimed};
use futures_util::future::join_all;
use rt::Core;
use rt::disk::{Disk, DiskError, DiskErrorKind};
use tokio::time::timeout;

use super::error::PoolError;
use super::member_disk::{ClaimSettings, LONG_DISK_TIMEOUT, MemberDisk};
use super::member_label::MemberLabel;

/// Why a disk of this pool cannot be claimed, as text.
pub(super) fn claim_error_text(
    label: &MemberLabel,
    path: &std::path::Path,
    why: &ClaimError,
) -> String {
    let mut what = format!("{}: disk {} {why}", path.display(), label.serial);
    if let ClaimError::Refused(refusal) = why
        && refusal.can_take_over()
    {
        let name = label.pool_name;
        what.push_str(&format!(
            "; if that node will never use pool {name} again: windrose pool open {name} --take-over"
        ));
    }
    what
}

/// The error that another machine has claimed the pool.
pub(super) fn pool_claim_lost(lost: &LostClaim) -> PoolError {
    let by = ClaimRefusal::ClaimedByOther(lost.new_owner.clone());
    PoolError::new(format!("the pool {by}: this node stops writing to it"))
        .with_hint("close the pool on that node, then restart this one")
}

/// Claims a disk, unless it does not answer for a minute.
pub(super) async fn acquire_with_timeout(
    core: &Core,
    disk: &MemberDisk,
    claim_settings: &ClaimSettings,
) -> Result<(), ClaimError> {
    let unresponsive = ClaimError::DiskFailed(DiskError { kind: DiskErrorKind::Gone, errno: 0 });
    timeout(LONG_DISK_TIMEOUT, disk.acquire_claim(core, claim_settings))
        .await
        .unwrap_or(Err(unresponsive))
}

/// Claims all of these disks, each by itself.
///
/// # Errors
/// Which of them belong to other nodes; none is claimed then.
pub(super) async fn acquire_all(
    core: &Core,
    disks: &[&MemberDisk],
    claim_settings: &ClaimSettings,
) -> Result<Vec<Option<ClaimError>>, PoolError> {
    let all =
        join_all(disks.iter().map(|disk| acquire_with_timeout(core, disk, claim_settings))).await;
    let mut refused = Vec::new();
    for (disk, claimed) in disks.iter().zip(&all) {
        if let Err(why @ ClaimError::Refused(_)) = claimed {
            refused.push(claim_error_text(&disk.label(), disk.path(), why));
        }
    }
    if refused.is_empty() {
        return Ok(all.into_iter().map(Result::err).collect());
    }
    // Release what was claimed of a pool that another machine has.
    join_all(disks.iter().map(|disk| disk.release_claim())).await;
    Err(PoolError::new(format!("another machine has its disks:\n  {}", refused.join("\n  "))))
}

/// Checks that no other machine uses a disk that is to become a member.
///
/// # Errors
/// Which machine does.
pub(super) async fn check_unclaimed_or_taken_over(
    core: &Core,
    disk: &Disk,
    claim: Option<ClaimRequest>,
    overwrites: bool,
) -> Result<(), PoolError> {
    let Some(claim) = claim else { return Ok(()) };
    let claim = ClaimRequest { take_over: claim.take_over || overwrites, ..claim };
    let free = check_unclaimed(core, disk, &core.buffer_pool().account(), &claim).await;
    free.map_err(|why| PoolError::on_disk(disk.path(), why))
}

/// Releases the claims of all of these disks.
pub(super) async fn release_all(disks: impl IntoIterator<Item = Rc<MemberDisk>>) {
    let all: Vec<_> = disks.into_iter().collect();
    join_all(all.iter().map(|disk| disk.release_claim())).await;
}
