//! Collects the facts about this node from which its status and its metrics follow.

use std::sync::PoisonError;

use api::{Health, NodeInfo, Status};
use engine::ReportScope;
use status::node_facts::NodeFacts;
use status::verdict::assess;
use target::ClientReport;
use tokio::time::Instant;

use super::Control;

impl Control {
    /// Whether the node responds and serves.
    #[must_use]
    pub fn get_health(&self) -> Health {
        Health { version: env!("CARGO_PKG_VERSION").to_owned(), serving: self.is_serving() }
    }

    /// Returns the status of the node.
    pub async fn get_status(&self) -> Status {
        assess(&self.facts(ReportScope::All).await)
    }

    /// Collects the facts for status and metrics.
    pub async fn facts(&self, scope: ReportScope) -> NodeFacts {
        let settings = &self.0.context.settings;
        let volumes = self.0.context.volumes.all();
        let (report, look) =
            (self.0.context.engine.report(scope), self.0.volumes.space_of(&volumes));
        let (cores, space, pools) = tokio::join!(report, look, self.0.pools.pool_facts());
        let damaged_pools = self.0.pools.damaged();
        let damaged_pools = damaged_pools.iter().map(ToString::to_string).collect();
        let cluster = self.0.context.cluster_view(&cores).await;
        let store_answers = cluster.as_ref().map(|cluster| cluster.store.error.is_none());
        let mut joins = match store_answers {
            Some(answers) => self.0.cluster.join_findings(answers).await,
            None => Vec::new(),
        };
        if store_answers == Some(true) {
            joins.extend(self.0.cluster.rotation_finding().await);
        }
        let records = volumes.iter().map(|(stored, _)| &stored.record);
        let unreadable_secrets = self.0.secrets.unreadable_secrets(records).await;
        NodeFacts {
            node: NodeInfo {
                name: settings.name.clone(),
                version: env!("CARGO_PKG_VERSION").to_owned(),
                pid: std::process::id(),
                uptime_s: self.0.context.started.elapsed().as_secs(),
                data_dir: settings.data_dir.clone(),
                cores: u32::try_from(self.0.context.engine.cores()).unwrap_or(u32::MAX),
                disk_backend: self.0.context.engine.disk_backend().to_owned(),
            },
            serving: self.is_serving(),
            startup_wait: self.0.context.startup_wait(),
            volumes,
            damaged_records: self.0.context.volumes.damaged_records(),
            store_trouble: self.0.context.meta.problem().await.ok().flatten(),
            rival_process: self
                .0
                .context
                .cluster_membership
                .as_ref()
                .and_then(|membership| membership.rival())
                .map(|incarnation| incarnation.describe_location()),
            anchor_error: settings.anchor_error.clone(),
            is_plaintext: self.0.cluster.is_plaintext_cluster(),
            unreadable_secrets,
            cores,
            api_clients: self.api_clients(),
            space,
            pools,
            damaged_pools,
            low_space_percent: settings.low_space_percent,
            image_findings: self.0.volumes.image_findings(),
            join_findings: joins,
            cluster,
        }
    }
}

impl Control {
    fn api_clients(&self) -> ClientReport {
        let failures = self.0.cluster.api_auth_failures();
        let guesses = failures.lock().unwrap_or_else(PoisonError::into_inner);
        let failing = guesses.failing(Instant::now());
        let (proven, proofs) = (guesses.proven(), guesses.counts());
        ClientReport {
            failing_clients: failing,
            proven,
            attempt_counts: proofs,
            ..ClientReport::default()
        }
    }
}
