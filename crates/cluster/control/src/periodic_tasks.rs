//! Periodic tasks of a cluster node: it writes its report, repairs replicas, and balances
//! primaries.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use peer::NodeId;
use tokio::time::Instant;
use uuid::Uuid;

use super::{Control, repair, space};
use cluster::store::{Change, Precondition, StoreError};
use engine::{CoreReport, ReportScope, VolumeReport};
use records::reconcile::Observed;
use records::record::StoredVolumeRecord;
use status::clock_findings;
use status::report::{self, NodeReport};
use status::resync_progress::ResyncProgress;

/// Interval of the periodic tasks.
const INTERVAL: Duration = Duration::from_secs(5);

/// A node that has just started waits for others to return before it hands over primaries.
const REBALANCE_DELAY: Duration = Duration::from_secs(60);

/// First and longest pause before a lost image is reopened,
const REOPEN_BACKOFF_MIN: Duration = Duration::from_secs(10);
const REOPEN_BACKOFF_MAX: Duration = Duration::from_secs(600);

/// and how long beyond the pause it must stay open before the pause is reset.
const REOPEN_BACKOFF_RESET: Duration = Duration::from_secs(600);

/// A volume with its primary on this node.
#[derive(Clone, Debug)]
struct LedVolume {
    volume: Uuid,
    /// The other in-sync nodes that could be primary.
    candidates: Vec<NodeId>,
    /// The node that an operator prefers.
    preferred_primary: Option<NodeId>,
}

impl Control {
    /// Runs the periodic tasks for as long as the node runs.
    pub(super) async fn run_periodic_tasks(self) {
        let (mut progress, mut last_report) = (ResyncProgress::default(), None);
        let (mut reopenings, mut repairs) =
            (ReopenBackoff::default(), repair::RepairState::default());
        let mut requests = self.0.context.last_report_request.subscribe();
        let mut last_request = 0;
        loop {
            // Read before looking, so that the report is no older than the request that it answers.
            let request = *requests.borrow_and_update();
            if request != last_request {
                self.scan_images(false).await;
                last_request = request;
            }
            let cores = self.0.context.engine.report(ReportScope::All).await;
            // A core that does not report may have sessions that are missing here.
            let request = if cores.len() == self.0.context.engine.cores() { request } else { 0 };
            let report = NodeReport {
                answers_request: request,
                ..self.build_report(&cores, &mut progress).await
            };
            if let Err(error) = self.write_report(report, &mut last_report).await {
                tracing::debug!(%error, "cannot write this node's report to the store");
            }
            self.reopen_lost_images(&cores, &mut reopenings);
            self.rebalance_primaries().await;
            self.repair_replicas(&cores, &mut repairs).await;
            if self.is_drained() {
                self.apply_drain_to_all().await;
            }
            // The control plane holds the sender: this ends by a change or by the timeout.
            let _ = tokio::time::timeout(INTERVAL, requests.changed()).await;
        }
    }

    /// Reopens lost images, as their disks may respond by now. The other replicas go on meanwhile,
    /// and nothing is assumed about what these images hold. Runs in the background: a failing disk
    /// may be slow.
    fn reopen_lost_images(&self, cores: &[CoreReport], reopenings: &mut ReopenBackoff) {
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
            let volume = self.volume_name(id);
            tracing::info!(volume, "reopening an image that failed");
            self.close_volume(id, false).await;
            self.reconcile_locked(id).await;
        }
    }

    async fn build_report(
        &self,
        cores: &[CoreReport],
        progress: &mut ResyncProgress,
    ) -> NodeReport {
        let nothing: &[(StoredVolumeRecord, Observed)] = &[];
        let space =
            space::measure(self.this_node(), nothing, &self.0.context.settings.data_dir).await;
        let (bytes, free_bytes) = space.data_dir.unwrap_or_default();
        let mirrors = progress.report_mirrors(cores, self, Instant::now());
        let open_errors = self.open_errors();
        let sessions = self.session_counts(cores);
        let membership = self.0.context.cluster_membership.as_ref();
        let behind = membership
            .map(|membership| {
                clock_findings::clocks_behind(
                    &membership.store_members_behind(),
                    &membership.store_health(),
                )
            })
            .unwrap_or_default();
        let store_member_error = membership.and_then(|membership| membership.store_member_error());
        let pools = self.0.context.engine.pool_reports().await;
        let pools = pools.into_iter().map(|(name, report)| (name, report.free_bytes)).collect();
        let images = self.reported_images();
        NodeReport {
            data_dir_bytes: bytes,
            data_dir_free_bytes: free_bytes,
            mirrors,
            open_errors,
            sessions,
            clocks_behind_s: behind,
            store_member_error,
            pools,
            images,
            repair_after_s: self
                .0
                .context
                .settings
                .cluster
                .repair_after
                .map_or(0, |after| after.as_secs()),
            answers_request: 0,
        }
    }

    /// The volumes that cannot be opened here, and why.
    pub(super) fn open_errors(&self) -> BTreeMap<Uuid, String> {
        let all = self.0.context.volumes.all();
        let errors = all.into_iter().filter_map(|(stored, observed)| match observed {
            Observed::OpenFailed { reason } | Observed::EraseFailed { reason } => {
                Some((stored.record.id, reason))
            }
            _ => None,
        });
        errors.collect()
    }

    /// Writes the report if it has changed.
    async fn write_report(
        &self,
        report: NodeReport,
        last_report: &mut Option<NodeReport>,
    ) -> Result<(), StoreError> {
        if last_report.as_ref() == Some(&report) {
            return Ok(());
        }
        let key = report::report_key(self.this_node());
        let found = self.0.context.meta.get(&key).await?;
        let expect = found.map_or(Precondition::Absent, |e| Precondition::AtRevision(e.revision));
        let value = serde_json::to_vec(&report).expect("names and numbers always serialise");
        let change = Change { key, precondition: expect, value: Some(value) };
        self.0.context.meta.commit(vec![change]).await?;
        *last_report = Some(report);
        Ok(())
    }

    /// Hands over one primary, if an operator prefers another node or another node leads far fewer.
    pub(super) async fn rebalance_primaries(&self) {
        let Some(joined) = self.joined_cluster() else { return };
        let me = joined.node;
        let eligible = |node: NodeId| {
            let nodes = joined.nodes.borrow();
            nodes.get(&node).is_some_and(|n| n.is_alive && !n.record.is_drained)
        };
        let mut loads = BTreeMap::<NodeId, usize>::new();
        let mut led = Vec::new();
        for volume in self.0.context.volumes.open_volumes(me) {
            let Some((mirror, _)) = volume.mirror else { continue };
            *loads.entry(mirror.primary).or_default() += 1;
            if mirror.primary == me {
                let candidates =
                    mirror.others(me).map(|m| m.node).filter(|n| eligible(*n)).collect();
                let (volume, prefer) =
                    (volume.stored.record.id, volume.stored.record.preferred_primary);
                led.push(LedVolume { volume, candidates, preferred_primary: prefer });
            }
        }
        let balance = self.0.context.started.elapsed() >= REBALANCE_DELAY;
        for (volume, target) in plan_handovers(me, &led, &loads, balance) {
            if let Err(error) = self.0.context.engine.switch_primary(volume, target).await {
                tracing::info!(%volume, node = %target, %error, "primary handover failed");
            }
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
struct ReopenBackoff(BTreeMap<Uuid, (Instant, Duration)>);

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

/// The primaries to hand over, and to which node: all that an operator prefers elsewhere, and if
/// `balance` one that goes to a node which leads at least two fewer.
fn plan_handovers(
    me: NodeId,
    led: &[LedVolume],
    loads: &BTreeMap<NodeId, usize>,
    balance: bool,
) -> Vec<(Uuid, NodeId)> {
    let wanted = led.iter().filter_map(|l| {
        let target =
            l.preferred_primary.filter(|node| *node != me && l.candidates.contains(node))?;
        Some((l.volume, target))
    });
    let mut all: Vec<_> = wanted.collect();
    let load = |node: &NodeId| loads.get(node).copied().unwrap_or(0);
    let movable = led.iter().filter(|l| l.preferred_primary.is_none());
    let best = movable
        .flat_map(|l| l.candidates.iter().map(move |target| (l.volume, *target)))
        .filter(|(_, target)| load(target) + 2 <= load(&me))
        .min_by_key(|(_, target)| load(target));
    all.extend(best.filter(|_| balance));
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    const ME: NodeId = NodeId(1);
    const B: NodeId = NodeId(2);
    const C: NodeId = NodeId(3);

    fn led(volume: u128, heirs: &[NodeId], prefer: Option<NodeId>) -> LedVolume {
        LedVolume {
            volume: Uuid::from_u128(volume),
            candidates: heirs.to_vec(),
            preferred_primary: prefer,
        }
    }

    #[test]
    fn one_volume_goes_to_a_node_that_leads_far_fewer() {
        let all = [led(1, &[B], None), led(2, &[B, C], None)];
        let two = Uuid::from_u128(2);
        assert_eq!(plan_handovers(ME, &all, &[(ME, 2), (B, 1)].into(), true), [(two, C)]);
        assert_eq!(plan_handovers(ME, &all, &[(ME, 2), (B, 1), (C, 1)].into(), true), []);
        assert_eq!(plan_handovers(ME, &all, &[(ME, 2), (B, 1)].into(), false), []);
    }

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

    #[test]
    fn what_an_operator_wants_goes_first_and_stays() {
        let one = Uuid::from_u128(1);
        let even = [(ME, 1), (B, 1)].into();
        assert_eq!(plan_handovers(ME, &[led(1, &[B], Some(B))], &even, false), [(one, B)]);
        assert_eq!(
            plan_handovers(ME, &[led(1, &[C], Some(B))], &even, true),
            [],
            "it is not in sync"
        );
        let heavy = [(ME, 9), (B, 1)].into();
        assert_eq!(plan_handovers(ME, &[led(1, &[B], Some(ME))], &heavy, true), []);
    }
}
