//! Periodic tasks of a cluster node: it writes its report, repairs replicas, and balances
//! primaries.

use std::collections::BTreeMap;
use std::time::Duration;

use tokio::time::Instant;
use uuid::Uuid;

use crate::Control;
use crate::volumes::reopening::ReopenBackoff;
use crate::volumes::repair::RepairState;
use crate::volumes::space;
use cluster::store::{Change, Precondition, StoreError};
use engine::{CoreReport, ReportScope};
use records::reconcile::Observed;
use records::record::StoredVolumeRecord;
use status::clock_findings;
use status::report::{self, NodeReport};
use status::resync_progress::ResyncProgress;
use status::volume_status::merge_sessions;

/// Interval of the periodic tasks.
const INTERVAL: Duration = Duration::from_secs(5);

impl Control {
    /// Runs the periodic tasks for as long as the node runs.
    pub(super) async fn run_periodic_tasks(self) {
        let (mut progress, mut last_report) = (ResyncProgress::default(), None);
        let (mut reopenings, mut repairs) = (ReopenBackoff::default(), RepairState::default());
        let mut requests = self.0.context.last_report_request.subscribe();
        let mut last_request = 0;
        loop {
            // Read before looking, so that the report is no older than the request that it answers.
            let request = *requests.borrow_and_update();
            if request != last_request {
                self.0.volumes.scan_images(false).await;
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
            self.0.volumes.reopen_lost_images(&cores, &mut reopenings);
            self.0.volumes.rebalance_primaries().await;
            self.0.volumes.repair_replicas(&cores, &mut repairs).await;
            if self.0.context.is_drained() {
                self.0.volumes.apply_drain_to_all().await;
            }
            // The control plane holds the sender: this ends by a change or by the timeout.
            let _ = tokio::time::timeout(INTERVAL, requests.changed()).await;
        }
    }

    async fn build_report(
        &self,
        cores: &[CoreReport],
        progress: &mut ResyncProgress,
    ) -> NodeReport {
        let nothing: &[(StoredVolumeRecord, Observed)] = &[];
        let space =
            space::measure(self.0.context.this_node(), nothing, &self.0.context.settings.data_dir)
                .await;
        let (bytes, free_bytes) = space.data_dir.unwrap_or_default();
        let mirrors = progress.report_mirrors(cores, &*self.0.context, Instant::now());
        let open_errors = self.0.context.volumes.open_errors();
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
        let images = self.0.volumes.reported_images();
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

    /// Numbers of initiator sessions here, by volume.
    fn session_counts(&self, cores: &[CoreReport]) -> BTreeMap<Uuid, u32> {
        let volumes = self.0.context.volumes.all();
        let ids: BTreeMap<_, _> =
            volumes.iter().map(|(s, _)| (&s.record.name, s.record.id)).collect();
        let mut counts = BTreeMap::new();
        for name in merge_sessions(&volumes, cores).iter().flat_map(|s| &s.volumes) {
            if let Some(id) = ids.get(name) {
                *counts.entry(*id).or_default() += 1;
            }
        }
        counts
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
        let key = report::report_key(self.0.context.this_node());
        let found = self.0.context.meta.get(&key).await?;
        let expect = found.map_or(Precondition::Absent, |e| Precondition::AtRevision(e.revision));
        let value = serde_json::to_vec(&report).expect("names and numbers always serialise");
        let change = Change { key, precondition: expect, value: Some(value) };
        self.0.context.meta.commit(vec![change]).await?;
        *last_report = Some(report);
        Ok(())
    }
}
