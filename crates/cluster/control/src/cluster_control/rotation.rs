//! Rotating the cluster's secret and authority (RFD 0038, 2.4): the API, and the status finding.

use api::{ApiError, Cluster, ErrorCode, Finding, Rotation, RotationStage, Severity};
use cluster::credential_rotation::{self, StoredRotation};
use cluster::identity::{ClusterCredentials, ClusterSecret};
use cluster::nodes::{self, NodeView, Nodes};

use super::ClusterControl;
use super::{identity_error, renew_protection};
use crate::context::now_s;
use crate::errors::{conflict, store_error};
use cluster::store::StoreError;
use membership::{ClusterMembership, RotationError};
use status::finding;

/// Hint while a rotation is in progress.
const IN_PROGRESS_HINT: &str =
    "windrose status shows which nodes it waits for; it completes once they have responded";

impl ClusterControl {
    /// Starts to rotate the cluster's secret, and its authority if it has its own.
    ///
    /// # Errors
    /// [`ErrorCode::Conflict`] for a node that is in no cluster, or while a rotation is in
    /// progress.
    pub async fn rotate_cluster(&self) -> Result<Cluster, ApiError> {
        let control = self.clone();
        self.0
            .context
            .run_to_completion(async move {
                let membership = control.require_membership()?;
                let protection = renew_protection(&membership.identity().transport_security)?;
                let secret = ClusterSecret::random().ok_or_else(|| {
                    ApiError::new(ErrorCode::Internal, "cannot get random bytes from the system")
                })?;
                let started = membership
                    .begin_rotation(
                        ClusterCredentials { secret, transport_security: protection },
                        now_s(),
                    )
                    .await;
                started.map_err(|e| rotation_error(&e))?;
                tracing::warn!("replacing the secret and the authority of the cluster");
                Ok(control.get_cluster().await)
            })
            .await
    }

    /// Fails while a rotation is in progress.
    pub(crate) async fn check_no_rotation(membership: &ClusterMembership) -> Result<(), ApiError> {
        match membership.rotation().await.map_err(|e| store_error(&e))?.record {
            Some(_) => Err(rotation_error(&RotationError::AlreadyInProgress)),
            None => Ok(()),
        }
    }

    /// The rotation in progress, and the nodes that it waits for.
    async fn read_rotation(&self) -> Result<Option<(Rotation, Vec<NodeView>)>, StoreError> {
        let Some(membership) = self
            .0
            .context
            .cluster_membership
            .as_ref()
            .filter(|_| self.0.context.joined_cluster().is_some())
        else {
            return Ok(None);
        };
        let stored = membership.rotation().await?;
        if stored.record.is_none() {
            return Ok(None);
        }
        let (nodes, _) = nodes::list_readable(membership.store()).await?;
        Ok(rotation_info(&stored, &nodes, membership.rotation_error()))
    }

    /// The rotation in progress.
    pub(crate) async fn get_rotation(&self) -> Result<Option<Rotation>, StoreError> {
        Ok(self.read_rotation().await?.map(|(rotation, _)| rotation))
    }

    /// The finding for a rotation in progress.
    pub(crate) async fn rotation_finding(&self) -> Option<Finding> {
        let (rotation, awaited) = self.read_rotation().await.ok().flatten()?;
        Some(rotation_text_finding(&rotation, &awaited))
    }
}

fn rotation_info(
    stored: &StoredRotation,
    nodes: &Nodes,
    problem: Option<String>,
) -> Option<(Rotation, Vec<NodeView>)> {
    let (record, _) = stored.record.as_ref()?;
    let numbers = nodes.keys().copied().collect();
    let awaited: Vec<_> =
        stored.lagging_nodes(&numbers).iter().filter_map(|node| nodes.get(node)).cloned().collect();
    let stage = match record.stage {
        credential_rotation::RotationStage::Distribute => RotationStage::Distribute,
        credential_rotation::RotationStage::Activate => RotationStage::Activate,
        credential_rotation::RotationStage::DropOld => RotationStage::DropOld,
    };
    let waits_for = awaited.iter().map(|view| view.record.name.clone()).collect();
    Some((Rotation { stage, started_s: record.started_s, waits_for, problem }, awaited))
}

fn rotation_text_finding(rotation: &Rotation, awaited: &[NodeView]) -> Finding {
    let what = "the secret and the authority of the cluster are being replaced";
    let unresponsive: Vec<_> = awaited
        .iter()
        .filter(|view| !view.is_alive)
        .map(|view| view.record.name.as_str())
        .collect();
    if let [first, ..] = unresponsive[..] {
        let names = unresponsive.join(", ");
        let message = format!("{what}; this waits for {names}, not responding");
        let hint = format!(
            "start windrose on {names}; if a node is lost for good: windrose cluster leave --node \
             {first} --force"
        );
        return finding(Severity::Warning, "rotation", message, Some(&hint));
    }
    let message = match &rotation.problem {
        Some(why) => format!("{what}; this node retries: {why}"),
        None => format!("{what}; this completes without your help"),
    };
    finding(Severity::Note, "rotation", message, None)
}

fn rotation_error(error: &RotationError) -> ApiError {
    let message = error.to_string();
    match error {
        RotationError::AlreadyInProgress => conflict(message, IN_PROGRESS_HINT),
        RotationError::NotAMember => conflict(message, "try again when this node has joined"),
        RotationError::Store(error) => store_error(error),
        RotationError::Identity(error) => identity_error(error),
        RotationError::StoreMemberDown(_)
        | RotationError::Tokens(_)
        | RotationError::Certificates(_)
        | RotationError::Membership(_)
        | RotationError::NoRandom(_) => ApiError::new(ErrorCode::Internal, message),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use cluster::credential_rotation::{NodeProgress, RotationProgress, RotationRecord};
    use cluster::store::Revision;
    use peer::NodeId;
    use uuid::Uuid;

    use super::*;
    use status::samples::node;

    #[test]
    fn who_is_waited_for_is_named_with_what_helps() {
        let id = Uuid::from_u128(1);
        let record = RotationRecord {
            id,
            stage: credential_rotation::RotationStage::Distribute,
            started_by: 1,
            started_s: 7,
        };
        let said = |n| NodeProgress {
            node: n,
            rotation: id,
            progress: RotationProgress::Received,
            sealing_key: None,
            sealed_credentials: None,
        };
        let progress = [1, 2].map(|n| (NodeId(n), (said(n), Revision(1))));
        let mut held = StoredRotation {
            record: Some((record, Revision(1))),
            progress: BTreeMap::from(progress),
        };
        let present: Nodes = [node(1, "a", true), node(2, "b", true), node(3, "c", false)].into();
        let (rotation, awaited) = rotation_info(&held, &present, None).unwrap();
        assert_eq!(
            (rotation.stage, &rotation.waits_for[..]),
            (RotationStage::Distribute, &["c".to_owned()][..])
        );
        let found = rotation_text_finding(&rotation, &awaited);
        assert_eq!(found.severity, Severity::Warning);
        assert!(found.message.contains("waits for c"), "{found:?}");
        assert!(found.hint.unwrap().contains("windrose cluster leave --node c --force"));
        let present: Nodes =
            present.into_iter().map(|(n, view)| (n, NodeView { is_alive: true, ..view })).collect();
        let (rotation, awaited) =
            rotation_info(&held, &present, Some("member x is away".into())).unwrap();
        let found = rotation_text_finding(&rotation, &awaited);
        assert!(
            found.severity == Severity::Note && found.message.contains("member x"),
            "{found:?}"
        );
        held.record = None;
        assert_eq!(rotation_info(&held, &present, None), None);
    }
}
