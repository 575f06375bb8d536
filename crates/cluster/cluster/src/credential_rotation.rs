//! Replaces a cluster's secret and certificate authority online (RFD 0038, 2.4).
//!
//! | key | holds | written by |
//! |---|---|---|
//! | `rotation` | [`RotationRecord`], while a rotation runs | the node that starts or completes it |
//! | `rotation/N` | [`NodeProgress`] of node N | node N; the node that seals for it |
//!
//! A node's credentials are in its `cluster.json` ([`LocalRotation`]). [`next_action`] decides a
//! node's next step and is pure: it handles neither credentials nor time. All nodes accept whatever
//! any node presents at any moment: a node presents the new credentials once all have them, and
//! drops the old ones once all present the new ones.

mod sealed_credentials;

use std::collections::{BTreeMap, BTreeSet};

use peer::NodeId;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::identity::{LocalRotation, RotationStep};
use crate::nodes::{decode, put_change};
use crate::store::{Change, Entry, MetadataStore, Precondition, Revision, StoreError};

pub use sealed_credentials::{
    CredentialsUnsealError, OneTimeKey, PublicKey, SealedCredentials, SealingContext,
    seal_credentials,
};

/// The key of the rotation's record.
pub const ROTATION_KEY: &str = "rotation";

/// Prefix of the keys of the nodes' progress.
pub const PROGRESS_KEY_PREFIX: &str = "rotation/";

/// Stage of a rotation; all nodes complete one before the next begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RotationStage {
    /// Each node receives the new credentials, and accepts them beside the old ones.
    #[serde(rename = "spread")]
    Distribute,
    /// Each node presents the new credentials, and still accepts the old ones.
    #[serde(rename = "use")]
    Activate,
    /// Each node drops the old ones.
    #[serde(rename = "finish")]
    DropOld,
}

/// A rotation in progress.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RotationRecord {
    /// Its identifier.
    pub id: Uuid,
    /// The current stage.
    pub stage: RotationStage,
    /// The node that started it and created the new credentials.
    #[serde(rename = "by")]
    pub started_by: u16,
    /// When it started, in seconds since 1970.
    #[serde(rename = "began_s")]
    pub started_s: u64,
}

/// A node's progress.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RotationProgress {
    /// It does not have the new credentials yet.
    #[serde(rename = "wants")]
    NeedsCredentials,
    /// It has them, presents the old ones, and accepts both.
    #[serde(rename = "has")]
    Received,
    /// It presents the new ones, and accepts both.
    #[serde(rename = "uses")]
    Active,
    /// It has dropped the old ones.
    Done,
}

/// What a node reports about itself.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NodeProgress {
    /// The node.
    pub node: u16,
    /// The rotation it reports on.
    #[serde(rename = "id")]
    pub rotation: Uuid,
    /// Its progress.
    pub progress: RotationProgress,
    /// The key to seal the new credentials for, while it needs them.
    #[serde(rename = "key")]
    pub sealing_key: Option<PublicKey>,
    /// The new credentials, sealed for that key by any node that has them.
    #[serde(rename = "sealed")]
    pub sealed_credentials: Option<SealedCredentials>,
}

impl From<RotationStep> for RotationProgress {
    fn from(step: RotationStep) -> Self {
        match step {
            RotationStep::Received => Self::Received,
            RotationStep::Active => Self::Active,
            RotationStep::Done => Self::Done,
        }
    }
}

/// The nodes' progress by node.
pub type ProgressByNode = BTreeMap<NodeId, (NodeProgress, Revision)>;

/// The stored state of a rotation.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StoredRotation {
    /// The rotation in progress.
    pub record: Option<(RotationRecord, Revision)>,
    /// What the nodes report.
    pub progress: ProgressByNode,
}

/// What a node's decision is based on.
#[derive(Clone, Copy, Debug)]
pub struct RotationView<'a> {
    /// The node.
    pub node: NodeId,
    /// The rotation in the node's file.
    pub local: Option<&'a LocalRotation>,
    /// Whether the running node, its store member included, presents and accepts what its file
    /// says.
    pub is_applied: bool,
    /// This process's key for sealed credentials.
    pub one_time_key: Option<PublicKey>,
    /// The stored state.
    pub stored: &'a StoredRotation,
    /// The nodes of the cluster.
    pub nodes: &'a BTreeSet<NodeId>,
}

/// A node's next step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RotationAction {
    /// Nothing to do; check again later.
    Wait,
    /// Drop from its file the credentials it does not present: their rotation is over, or never
    /// began.
    DiscardLocal,
    /// Generate a key, and ask for the new credentials to be sealed for it.
    RequestCredentials,
    /// Seal the credentials for another node.
    SealFor(NodeId),
    /// Open the sealed credentials, and write them into its file beside the old ones.
    ReceiveCredentials,
    /// Present and accept what its file says. Restart its store member if the accepted credentials
    /// changed.
    Apply,
    /// Report its progress to the other nodes.
    ReportProgress(RotationProgress),
    /// Swap new and old credentials in its file.
    ActivateNew,
    /// Drop the old ones from its file.
    DropOld,
    /// Record that all nodes enter this stage.
    AdvanceStage(RotationStage),
    /// Remove the rotation's records.
    RemoveRecords,
}

impl StoredRotation {
    /// A node's progress in the current rotation; `None` if it has reported none.
    fn node_progress(&self, node: NodeId) -> Option<&NodeProgress> {
        let (record, _) = self.record.as_ref()?;
        self.progress
            .get(&node)
            .map(|(reported, _)| reported)
            .filter(|reported| reported.rotation == record.id)
    }

    fn has_reached(&self, node: NodeId, progress: RotationProgress) -> bool {
        self.node_progress(node).is_some_and(|reported| reported.progress >= progress)
    }

    /// The nodes that the current stage waits for.
    #[must_use]
    pub fn lagging_nodes(&self, nodes: &BTreeSet<NodeId>) -> Vec<NodeId> {
        let Some((record, _)) = &self.record else { return Vec::new() };
        let goal = record.stage.required_progress();
        nodes.iter().copied().filter(|node| !self.has_reached(*node, goal)).collect()
    }
}

impl RotationStage {
    /// The progress that each node has at the end of this stage.
    fn required_progress(self) -> RotationProgress {
        match self {
            Self::Distribute => RotationProgress::Received,
            Self::Activate => RotationProgress::Active,
            Self::DropOld => RotationProgress::Done,
        }
    }
}

/// A node's next step.
#[must_use]
pub fn next_action(view: &RotationView<'_>) -> RotationAction {
    let RotationView { node, local, stored, nodes, .. } = *view;
    let Some((record, _)) = &stored.record else {
        return if local.is_some() { RotationAction::DiscardLocal } else { RotationAction::Wait };
    };
    let Some(local) = local else {
        return if are_credentials_lost(view, record) {
            RotationAction::RemoveRecords
        } else {
            next_action_without_credentials(view)
        };
    };
    if local.id != record.id {
        return RotationAction::DiscardLocal;
    }
    // Before its own step: the nodes waited for need the credentials first.
    if let Some(node) = pending_request(stored, nodes)
        && local.other_credentials.is_some()
    {
        return RotationAction::SealFor(node);
    }
    let progress = local.step.into();
    if !view.is_applied {
        return if is_restart_turn(view, progress) {
            RotationAction::Apply
        } else {
            RotationAction::Wait
        };
    }
    if !stored.has_reached(node, progress) {
        return RotationAction::ReportProgress(progress);
    }
    match (local.step, record.stage) {
        (RotationStep::Received, RotationStage::Activate | RotationStage::DropOld) => {
            RotationAction::ActivateNew
        }
        (RotationStep::Active, RotationStage::DropOld) => RotationAction::DropOld,
        _ if !stored.lagging_nodes(nodes).is_empty() => RotationAction::Wait,
        (_, RotationStage::Distribute) => RotationAction::AdvanceStage(RotationStage::Activate),
        (_, RotationStage::Activate) => RotationAction::AdvanceStage(RotationStage::DropOld),
        (_, RotationStage::DropOld) => RotationAction::RemoveRecords,
    }
}

/// Whether a node without the new credentials knows that they are lost: the node that created them
/// was removed, or is this one, and no other node has received them.
fn are_credentials_lost(view: &RotationView<'_>, record: &RotationRecord) -> bool {
    let by = NodeId(record.started_by);
    let is_gone = by == view.node || !view.nodes.contains(&by);
    is_gone
        && !view.nodes.iter().any(|node| view.stored.has_reached(*node, RotationProgress::Received))
}

fn next_action_without_credentials(view: &RotationView<'_>) -> RotationAction {
    match view.stored.node_progress(view.node) {
        Some(reported)
            if reported.sealing_key.is_some() && reported.sealing_key == view.one_time_key =>
        {
            match reported.sealed_credentials {
                Some(_) => RotationAction::ReceiveCredentials,
                None => RotationAction::Wait,
            }
        }
        _ => RotationAction::RequestCredentials,
    }
}

/// Whether this node may restart its store member. Members restart one by one, in node order, so
/// that a majority stays up.
fn is_restart_turn(view: &RotationView<'_>, progress: RotationProgress) -> bool {
    let mut before = view.nodes.iter().filter(|other| **other < view.node);
    progress == RotationProgress::Active
        || before.all(|other| view.stored.has_reached(*other, progress))
}

/// A node whose request for the new credentials is unanswered.
fn pending_request(stored: &StoredRotation, nodes: &BTreeSet<NodeId>) -> Option<NodeId> {
    let is_waiting = |node: &NodeId| {
        let reported = stored.node_progress(*node);
        reported.is_some_and(|reported| {
            reported.sealing_key.is_some() && reported.sealed_credentials.is_none()
        })
    };
    nodes.iter().copied().find(is_waiting)
}

/// Reads a rotation from the store. Damaged progress records are left out: their nodes write them
/// again.
///
/// # Errors
/// [`StoreError`]; [`StoreError::Damaged`] for a damaged record of the rotation.
pub async fn read_rotation(meta: &dyn MetadataStore) -> Result<StoredRotation, StoreError> {
    let Some(entry) = meta.get(ROTATION_KEY).await? else { return Ok(StoredRotation::default()) };
    let record = (decode(&entry)?, entry.revision);
    let (entries, _) = meta.list(PROGRESS_KEY_PREFIX).await?;
    Ok(StoredRotation {
        record: Some(record),
        progress: entries.iter().filter_map(progress_entry).collect(),
    })
}

fn progress_entry(entry: &Entry) -> Option<(NodeId, (NodeProgress, Revision))> {
    let reported = decode_progress(entry).ok()?;
    Some((NodeId(reported.node), (reported, entry.revision)))
}

/// Checks that an entry at [`ROTATION_KEY`] or under [`PROGRESS_KEY_PREFIX`] is valid.
///
/// # Errors
/// [`StoreError::Damaged`].
pub fn validate_entry(entry: &Entry) -> Result<(), StoreError> {
    if entry.key == ROTATION_KEY {
        return decode::<RotationRecord>(entry).map(drop);
    }
    decode_progress(entry).map(drop)
}

/// Decodes an entry under [`PROGRESS_KEY_PREFIX`].
fn decode_progress(entry: &Entry) -> Result<NodeProgress, StoreError> {
    let reported: NodeProgress = decode(entry)?;
    if progress_key(NodeId(reported.node)) != entry.key {
        let why = "it is the record of another node".to_owned();
        return Err(StoreError::Damaged { path: entry.key.clone(), why });
    }
    Ok(reported)
}

/// Key of a node's progress.
fn progress_key(node: NodeId) -> String {
    format!("{PROGRESS_KEY_PREFIX}{node}")
}

impl RotationRecord {
    /// The change that starts the rotation.
    #[must_use]
    pub fn creation(&self) -> Change {
        put_change(ROTATION_KEY.to_owned(), Precondition::Absent, self)
    }

    /// The change that enters `stage`, if the record is still of revision `at`.
    #[must_use]
    pub fn stage_change(&self, stage: RotationStage, at: Revision) -> Change {
        put_change(
            ROTATION_KEY.to_owned(),
            Precondition::AtRevision(at),
            &Self { stage, ..self.clone() },
        )
    }
}

/// Writes a node's progress.
///
/// # Errors
/// [`StoreError`]; [`StoreError::Conflict`] if it has changed since `held`, or the stored bytes are
/// damaged.
pub async fn write_progress(
    meta: &dyn MetadataStore,
    stored: &StoredRotation,
    reported: &NodeProgress,
) -> Result<(), StoreError> {
    let key = progress_key(NodeId(reported.node));
    let expect = match stored.progress.get(&NodeId(reported.node)) {
        Some((_, revision)) => Precondition::AtRevision(*revision),
        // An unlisted record is a damaged one.
        None => meta
            .get(&key)
            .await?
            .map_or(Precondition::Absent, |entry| Precondition::AtRevision(entry.revision)),
    };
    meta.commit(vec![put_change(key, expect, reported)]).await.map(drop)
}

/// Removes all records of the rotation in `held`.
///
/// # Errors
/// [`StoreError`]; [`StoreError::Conflict`] if something has changed since `held`.
pub async fn remove_records(
    meta: &dyn MetadataStore,
    stored: &StoredRotation,
) -> Result<(), StoreError> {
    let Some((_, revision)) = &stored.record else { return Ok(()) };
    let (entries, _) = meta.list(PROGRESS_KEY_PREFIX).await?;
    let removed = |key: String, revision| Change {
        key,
        precondition: Precondition::AtRevision(revision),
        value: None,
    };
    let mut changes = vec![removed(ROTATION_KEY.to_owned(), *revision)];
    changes.extend(entries.into_iter().map(|entry| removed(entry.key, entry.revision)));
    meta.commit(changes).await.map(drop)
}

#[cfg(test)]
mod tests;
