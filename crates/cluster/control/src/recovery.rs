//! `windrose cluster recover`: replaces a lost store, or recovers volumes from their images (RFD
//! 0036, 5).

use api::{ApiError, ErrorCode, RecoverClusterRequest, RecoveryPlan, ReplacementStore};
use cluster::identity::MembershipStage;
use cluster::nodes;
use cluster::store::StoreError;
use uuid::Uuid;

use crate::Control;
use crate::cluster_control::{first_node_identity, identity_error, renew_protection};
use crate::errors::conflict;
use membership::ClusterMembership;
use status::UNTRUSTED_STORE_HINT;
use status::startup_wait::REJOIN_HINT;

impl Control {
    /// Recovers what can be recovered, or returns the plan.
    ///
    /// # Errors
    /// [`ErrorCode::Conflict`] says why nothing can be recovered here.
    pub async fn recover_cluster(
        &self,
        request: RecoverClusterRequest,
    ) -> Result<RecoveryPlan, ApiError> {
        self.0.context.check_data_node()?;
        let name = &self.0.context.settings.name;
        if let Some(confirm) = request.confirm.as_ref().filter(|confirm| *confirm != name) {
            let message = format!("the confirmation names {confirm}, but this node is {name}");
            return Err(ApiError::new(ErrorCode::InvalidRequest, message)
                .with_hint("confirm with the name of this node"));
        }
        if let Some(membership) =
            self.0.context.cluster_membership.clone().filter(|_| self.joined_cluster().is_none())
        {
            let control = self.clone();
            // This also works while the node does not serve.
            return control.recover_store(&membership, request.confirm.is_some()).await;
        }
        let volumes = self.0.volumes.clone();
        let recovery = async move { volumes.recover_volumes(&request).await };
        self.0.context.run_to_completion(recovery).await
    }

    /// Creates a new cluster in place of one whose store is lost.
    async fn recover_store(
        &self,
        membership: &ClusterMembership,
        confirmed: bool,
    ) -> Result<RecoveryPlan, ApiError> {
        let identity = membership.identity();
        if identity.stage != MembershipStage::Member {
            return Err(conflict(
                "this node is joining or leaving its cluster: there is nothing to recover",
                "wait until it has joined, or `windrose cluster leave --force`",
            ));
        }
        if let Some(wait) =
            self.0.context.startup_wait().filter(|wait| wait.is_removed_from_cluster)
        {
            return Err(conflict(
                format!("nothing was recovered: {}", wait.reason),
                &wait.next_step,
            ));
        }
        let why = store_lost_reason(
            nodes::get_cluster(membership.store()).await.map(|c| c.map(|(c, _)| c.id)),
            identity.cluster,
        )?;
        let lost = identity.endpoints.clone();
        let store = ReplacementStore {
            replaced_cluster: identity.cluster,
            lost_members: lost,
            reason: why,
        };
        let plan = RecoveryPlan {
            node: self.0.context.settings.name.clone(),
            store: Some(store),
            volumes: Vec::new(),
            unresponsive_nodes: Vec::new(),
            applied: confirmed,
        };
        if !confirmed {
            return Ok(plan);
        }
        let protection = renew_protection(&identity.transport_security)?;
        let next = first_node_identity(&self.0.context.settings, identity.node, protection)?;
        tracing::warn!(old = %identity.cluster, new = %next.cluster, "metadata store replaced by an operator");
        membership.move_to_new_cluster(&next).await.map_err(|e| identity_error(&e))?;
        self.0.context.restart.send_replace(true);
        Ok(plan)
    }
}

/// Why the store of a cluster is lost, by its answer; an error if it is not.
fn store_lost_reason(
    answer: Result<Option<Uuid>, StoreError>,
    cluster: Uuid,
) -> Result<String, ApiError> {
    match answer {
        Ok(Some(found)) if found == cluster => Err(conflict(
            "the cluster's store responds: it is not lost",
            "`windrose status` shows what this node waits for; recover missing volumes after it \
             has joined",
        )),
        // A second cluster would serve the same images.
        Ok(Some(found)) => Err(conflict(
            format!(
                "a store responds, but it belongs to another cluster ({found}), which replaced \
                 this node's"
            ),
            REJOIN_HINT,
        )),
        Err(error @ StoreError::TlsRejected { .. }) => Err(conflict(
            format!("a store responds, but rejects this node: {error}"),
            UNTRUSTED_STORE_HINT,
        )),
        Ok(None) => Ok("it is empty".to_owned()),
        Err(error) => Ok(error.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_store_that_answers_is_not_replaced() {
        let own = Uuid::from_u128(1);
        let refused = store_lost_reason(Ok(Some(own)), own).unwrap_err();
        assert!(refused.message.contains("it is not lost"), "{refused}");
        assert_eq!(store_lost_reason(Ok(None), own).unwrap(), "it is empty");
        let away =
            StoreError::Unreachable { store: "etcd".into(), why: "it does not answer".into() };
        assert!(store_lost_reason(Err(away), own).unwrap().contains("does not answer"));
    }

    #[test]
    fn a_node_whose_cluster_goes_on_in_another_store_begins_no_second_one() {
        let (own, other) = (Uuid::from_u128(1), Uuid::from_u128(2));
        let why = "invalid peer certificate: UnknownIssuer".to_owned();
        let untrusted = StoreError::TlsRejected { store: "etcd".into(), why };
        for answer in [Err(untrusted), Ok(Some(other))] {
            let refused = store_lost_reason(answer, own).unwrap_err();
            assert!(refused.message.contains("a store responds"), "{refused}");
            let hint = refused.hint.unwrap_or_default();
            assert!(hint.contains("windrose cluster leave --force"), "{hint}");
            assert!(hint.contains("join") && !hint.contains("recover"), "{hint}");
        }
    }
}
