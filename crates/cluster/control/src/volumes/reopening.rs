//! Reopens images that were lost while the node runs.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use engine::{CoreReport, ReportScope, VolumeReport};
use peer::NodeId;
use tokio::time::Instant;
use uuid::Uuid;

use super::VolumeControl;

/// First and longest pause before a lost image is reopened,
const REOPEN_BACKOFF_MIN: Duration = Duration::from_secs(10);
const REOPEN_BACKOFF_MAX: Duration = Duration::from_secs(600);

/// and how long beyond the pause it must stay open before the pause is reset.
const REOPEN_BACKOFF_RESET: Duration = Duration::from_secs(600);

impl VolumeControl {
    /// Reopens lost images, as their disks may respond by now. The other replicas go on meanwhile,
    /// and nothing is assumed about what these images hold. Runs in the background: a failing disk
    /// may be slow.
    pub(crate) fn reopen_lost_images(&self, cores: &[CoreReport], reopenings: &mut ReopenBackoff) {
        let lost = cores
            .iter()
            .flat_map(|core| &core.volumes)
            .filter(|v| should_reopen(v, self.this_node()));
        let lost = lost.map(|v| v.id).collect();
        for id in reopenings.due(lost, Instant::now()) {
            let Ok(change) = Arc::clone(&self.0.context.change_lock).try_read_owned() else {
                return;
            };
            let control = self.clone();
            tokio::spawn(async move {
                control.reopen_image(id).await;
                drop(change);
            });
        }
    }

    async fn reopen_image(&self, id: Uuid) {
        let lock = self.0.context.volumes.lock_of(id);
        let _held = lock.lock().await;
        // Read again: it may have been reopened meanwhile.
        let reports = self.0.context.engine.report(ReportScope::One(id)).await;
        let mut volumes = reports.iter().flat_map(|core| &core.volumes);
        if volumes.any(|volume| volume.id == id && should_reopen(volume, self.this_node())) {
            let volume = self.0.context.volume_name(id);
            tracing::info!(volume, "reopening an image that failed");
            self.close_volume(id, false).await;
            self.reconcile_locked(id).await;
        }
    }
}

/// Whether to reopen an image: it was lost, and other nodes go on with the volume. The last replica
/// is not reopened: its last writes may be lost, and clients must not continue unaware of that.
fn should_reopen(report: &VolumeReport, me: NodeId) -> bool {
    let Some(mirror) = &report.mirror else { return false };
    let others_go_on = mirror.status.config.as_ref().is_some_and(|record| {
        record.member(me).is_none() && record.image(me).is_some() && !record.in_sync.is_empty()
    });
    // An image that another machine has claimed stays closed.
    mirror.status.leg_loss.is_some() && others_go_on && report.claim_lost.is_none()
}

/// When each lost image was last reopened, and the pause before the next time.
#[derive(Debug, Default)]
pub(crate) struct ReopenBackoff(BTreeMap<Uuid, (Instant, Duration)>);

impl ReopenBackoff {
    /// Those of `lost` that are due to be reopened. The pause grows with each loss.
    fn due(&mut self, lost: Vec<Uuid>, now: Instant) -> Vec<Uuid> {
        self.0.retain(|_, (last, pause)| now < *last + 2 * *pause + REOPEN_BACKOFF_RESET);
        let is_due = |id: &Uuid| self.0.get(id).is_none_or(|(last, pause)| now >= *last + *pause);
        let due: Vec<_> = lost.into_iter().filter(is_due).collect();
        for id in &due {
            let (last, pause) = self.0.entry(*id).or_insert((now, REOPEN_BACKOFF_MIN / 2));
            (*last, *pause) = (now, (*pause * 2).min(REOPEN_BACKOFF_MAX));
        }
        due
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ME: NodeId = NodeId(1);
    const B: NodeId = NodeId(2);
    const C: NodeId = NodeId(3);

    #[test]
    fn an_image_that_is_given_up_again_and_again_is_opened_ever_more_rarely() {
        let (mut reopenings, begin) = (ReopenBackoff::default(), Instant::now());
        let id = Uuid::from_u128(1);
        let mut at = Vec::new();
        for second in 0..1300 {
            let now = begin + Duration::from_secs(second);
            if !reopenings.due(vec![id], now).is_empty() {
                at.push(second);
            }
        }
        assert_eq!(at, [0, 10, 30, 70, 150, 310, 630, 1230]);
        let later = begin + Duration::from_secs(1230 + 2 * 600 + 600);
        assert!(reopenings.due(Vec::new(), later).is_empty());
        assert_eq!(reopenings.due(vec![id], later), [id], "it was well for long");
        assert!(reopenings.due(vec![id], later + Duration::from_secs(9)).is_empty());
        assert_eq!(reopenings.due(vec![id], later + Duration::from_secs(10)), [id]);
    }

    /// Reopens an image if other replicas go on; not the last replica, nor one that another machine
    /// has claimed.
    #[test]
    fn only_images_that_others_go_on_without_are_opened_again() {
        let volume = status::samples::volume_report(Uuid::from_u128(1));
        let lost = |in_sync: &[NodeId]| {
            let mut volume = volume.clone();
            let status = &mut volume.mirror.as_mut().unwrap().status;
            status.leg_loss = Some(mirror::LegLoss::DiskUnresponsive);
            let record = status.config.as_mut().unwrap();
            record.in_sync.retain(|member| in_sync.contains(&member.node));
            volume
        };
        assert!(!should_reopen(&volume, B), "it is well");
        assert!(should_reopen(&lost(&[ME]), B));
        assert!(!should_reopen(&lost(&[ME]), ME), "it is the last");
        assert!(!should_reopen(&lost(&[ME]), C), "it is no copy of the volume any more");
        let taken = VolumeReport { claim_lost: Some("node 9 has it".into()), ..lost(&[ME]) };
        assert!(!should_reopen(&taken, B));
    }
}
