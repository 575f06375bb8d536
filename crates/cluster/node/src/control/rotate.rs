//! Replacing the cluster's secret and authority (RFD 0038, 2.4): what the API asks, and what status says of it.

use ::cluster::identity::{ClusterSecret, Credentials};
use ::cluster::nodes::{self, NodeView, Nodes};
use ::cluster::rotation::{self, Held};
use api::{ApiError, Cluster, Code, Finding, Rotation, RotationStage, Severity};

use super::cluster::{conflict, identity_error, renewed};
use super::create::now_s;
use super::status::finding;
use super::{Control, store_error};
use crate::meta::MetaError;
use crate::part::{Part, RotateError};

/// What helps while one is under way.
const WAIT: &str =
    "windrose status says which nodes it waits for; it ends by itself once they have answered";

impl Control {
    /// Begins to replace the cluster's secret, and its authority if it has one of its own.
    ///
    /// # Errors
    /// [`Code::Conflict`] for a node that is in no cluster, or while one is under way.
    pub async fn rotate_cluster(&self) -> Result<Cluster, ApiError> {
        let control = self.clone();
        self.detached(async move {
            let part = control.member_part()?;
            let protection = renewed(&part.identity().protection)?;
            let secret = ClusterSecret::random()
                .ok_or_else(|| ApiError::new(Code::Internal, "the system gives no random bytes"))?;
            let begun = part.rotate(Credentials { secret, protection }, now_s()).await;
            begun.map_err(|e| rotate_error(&e))?;
            tracing::warn!("the secret and the authority of the cluster are replaced by new ones");
            Ok(control.cluster().await)
        })
        .await
    }

    /// Refuses what has to wait until no rotation is under way.
    pub(super) async fn check_no_rotation(part: &Part) -> Result<(), ApiError> {
        match part.rotation().await.map_err(|e| store_error(&e))?.record {
            Some(_) => Err(rotate_error(&RotateError::UnderWay)),
            None => Ok(()),
        }
    }

    /// The rotation that is under way, and the nodes it waits for.
    async fn look_at_rotation(&self) -> Result<Option<(Rotation, Vec<NodeView>)>, MetaError> {
        let Some(part) = self.0.part.as_ref().filter(|_| self.membership().is_some()) else {
            return Ok(None);
        };
        let held = part.rotation().await?;
        if held.record.is_none() {
            return Ok(None);
        }
        let (present, _) = nodes::list(part.store()).await?;
        Ok(shown(&held, &present, part.rotation_trouble()))
    }

    /// The rotation that is under way.
    pub(super) async fn rotation(&self) -> Result<Option<Rotation>, MetaError> {
        Ok(self.look_at_rotation().await?.map(|(rotation, _)| rotation))
    }

    /// What there is to say of it.
    pub(super) async fn rotation_finding(&self) -> Option<Finding> {
        let (rotation, awaited) = self.look_at_rotation().await.ok().flatten()?;
        Some(told(&rotation, &awaited))
    }
}

fn shown(
    held: &Held,
    present: &Nodes,
    problem: Option<String>,
) -> Option<(Rotation, Vec<NodeView>)> {
    let (record, _) = held.record.as_ref()?;
    let numbers = present.keys().copied().collect();
    let awaited: Vec<_> =
        held.waits_for(&numbers).iter().filter_map(|node| present.get(node)).cloned().collect();
    let stage = match record.stage {
        rotation::Stage::Spread => RotationStage::Spread,
        rotation::Stage::Use => RotationStage::Use,
        rotation::Stage::Finish => RotationStage::Finish,
    };
    let waits_for = awaited.iter().map(|view| view.record.name.clone()).collect();
    Some((Rotation { stage, began_s: record.began_s, waits_for, problem }, awaited))
}

fn told(rotation: &Rotation, awaited: &[NodeView]) -> Finding {
    let what = "the secret and the authority of the cluster are being replaced";
    let silent: Vec<_> =
        awaited.iter().filter(|view| !view.alive).map(|view| view.record.name.as_str()).collect();
    if let [first, ..] = silent[..] {
        let names = silent.join(", ");
        let message = format!("{what}; this waits for {names}, without a sign of life");
        let hint = format!(
            "start windrose on {names}; a node that does not come back: windrose cluster leave --node {first} --force"
        );
        return finding(Severity::Warning, "rotation", message, Some(&hint));
    }
    let message = match &rotation.problem {
        Some(why) => format!("{what}; this node tries on: {why}"),
        None => format!("{what}; that ends by itself"),
    };
    finding(Severity::Note, "rotation", message, None)
}

fn rotate_error(error: &RotateError) -> ApiError {
    let message = error.to_string();
    match error {
        RotateError::UnderWay => conflict(message, WAIT),
        RotateError::NoMember => conflict(message, "try again once it has come"),
        RotateError::Store(error) => store_error(error),
        RotateError::Identity(error) => identity_error(error),
        RotateError::MemberAway(_)
        | RotateError::Tokens(_)
        | RotateError::Protection(_)
        | RotateError::Part(_)
        | RotateError::Random(_) => ApiError::new(Code::Internal, message),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use ::cluster::meta::Revision;
    use ::cluster::rotation::{NodeProgress, Progress, RotationRecord};
    use peer::NodeId;
    use uuid::Uuid;

    use super::*;
    use crate::control::members::tests::node;

    #[test]
    fn who_is_waited_for_is_named_with_what_helps() {
        let id = Uuid::from_u128(1);
        let record = RotationRecord { id, stage: rotation::Stage::Spread, by: 1, began_s: 7 };
        let said =
            |n| NodeProgress { node: n, id, progress: Progress::Has, key: None, sealed: None };
        let progress = [1, 2].map(|n| (NodeId(n), (said(n), Revision(1))));
        let mut held =
            Held { record: Some((record, Revision(1))), progress: BTreeMap::from(progress) };
        let present: Nodes = [node(1, "a", true), node(2, "b", true), node(3, "c", false)].into();
        let (rotation, awaited) = shown(&held, &present, None).unwrap();
        assert_eq!(
            (rotation.stage, &rotation.waits_for[..]),
            (RotationStage::Spread, &["c".to_owned()][..])
        );
        let found = told(&rotation, &awaited);
        assert_eq!(found.severity, Severity::Warning);
        assert!(found.message.contains("waits for c"), "{found:?}");
        assert!(found.hint.unwrap().contains("windrose cluster leave --node c --force"));
        let present: Nodes =
            present.into_iter().map(|(n, view)| (n, NodeView { alive: true, ..view })).collect();
        let (rotation, awaited) = shown(&held, &present, Some("member x is away".into())).unwrap();
        let found = told(&rotation, &awaited);
        assert!(
            found.severity == Severity::Note && found.message.contains("member x"),
            "{found:?}"
        );
        held.record = None;
        assert_eq!(shown(&held, &present, None), None);
    }
}
