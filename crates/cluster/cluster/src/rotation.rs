//! How a cluster's secret and authority are replaced by new ones while it serves (RFD 0038, 2.4).
//!
//! | key | holds | written by |
//! |---|---|---|
//! | `rotation` | [`RotationRecord`]; there while one is under way | the node where it begins; who sees that all are done |
//! | `rotation/N` | [`NodeProgress`]: how far node N is | node N; who seals the new credentials for it |
//!
//! What a node has stands in its `cluster.json` ([`OwnRotation`]). [`decide`] says what it does next, and is pure: it holds no
//! credentials, and knows no time. Whatever a node shows at any moment, all others accept: it shows what is new once all have
//! that, and drops what is old once all show what is new.

mod sealed;

use std::collections::{BTreeMap, BTreeSet};

use peer::NodeId;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::identity::{OwnRotation, Step};
use crate::meta::{Change, Entry, Expect, Meta, MetaError, Revision};
use crate::nodes::{decode, put};

pub use sealed::{CannotUnseal, For, OneTimeKey, PublicKey, Sealed, seal};

/// The key of the rotation's record.
pub const KEY: &str = "rotation";

/// What keys of the nodes' progress begin with.
pub const NODES: &str = "rotation/";

/// What the nodes of a cluster do together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Stage {
    /// Each comes to have the new credentials, and accepts them beside the old ones.
    Spread,
    /// Each shows the new ones, and accepts the old ones as well.
    Use,
    /// Each forgets the old ones.
    Finish,
}

/// A rotation that is under way.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RotationRecord {
    /// Which one.
    pub id: Uuid,
    /// How far all nodes are.
    pub stage: Stage,
    /// The node where it was begun, which made the new credentials.
    pub by: u16,
    /// When, in seconds since 1970.
    pub began_s: u64,
}

/// How far a node is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Progress {
    /// It has yet to get the new credentials.
    Wants,
    /// It has them, and accepts both.
    Has,
    /// It shows the new ones, and accepts both.
    Uses,
    /// It has forgotten the old ones.
    Done,
}

/// What a node says of itself.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NodeProgress {
    /// The node.
    pub node: u16,
    /// Of which rotation it speaks.
    pub id: Uuid,
    /// How far it is.
    pub progress: Progress,
    /// By which key it wants the new credentials sealed; while it wants them.
    pub key: Option<PublicKey>,
    /// The new credentials, sealed for that key by any node that has them.
    pub sealed: Option<Sealed>,
}

impl From<Step> for Progress {
    fn from(step: Step) -> Self {
        match step {
            Step::Has => Self::Has,
            Step::Uses => Self::Uses,
            Step::Done => Self::Done,
        }
    }
}

/// The nodes' progress by node.
pub type AllProgress = BTreeMap<NodeId, (NodeProgress, Revision)>;

/// What the store holds of a rotation.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Held {
    /// The one that is under way.
    pub record: Option<(RotationRecord, Revision)>,
    /// What the nodes say.
    pub progress: AllProgress,
}

/// What a node knows when it decides what to do.
#[derive(Clone, Copy, Debug)]
pub struct View<'a> {
    /// The node.
    pub node: NodeId,
    /// What its file says.
    pub own: Option<&'a OwnRotation>,
    /// Whether it shows and accepts what its file says, its member of the store included.
    pub in_effect: bool,
    /// The key that this process can open what is sealed with.
    pub key: Option<PublicKey>,
    /// What the store holds.
    pub held: &'a Held,
    /// The nodes of the cluster.
    pub present: &'a BTreeSet<NodeId>,
}

/// What a node does next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Nothing; it looks again later.
    Rest,
    /// Forgets in its file whatever it does not show: the rotation that it stands there for is over, or never began.
    Clear,
    /// Makes a key, and asks for the new credentials to be sealed for it.
    Ask,
    /// Seals them for another node.
    Seal(NodeId),
    /// Opens what was sealed for it, and writes both into its file.
    Take,
    /// Shows and accepts what its file says. Its member of the store starts again where that accepts other ones than before.
    PutInEffect,
    /// Tells the others how far it is.
    Say(Progress),
    /// Swaps new and old in its file.
    Use,
    /// Drops the old ones from its file.
    Forget,
    /// Writes down that all go on with this stage.
    Advance(Stage),
    /// Removes the records.
    End,
}

impl Held {
    /// How far a node is in the rotation that is under way; `None` where it has said nothing of that.
    fn said(&self, node: NodeId) -> Option<&NodeProgress> {
        let (record, _) = self.record.as_ref()?;
        self.progress.get(&node).map(|(said, _)| said).filter(|said| said.id == record.id)
    }

    fn is_at(&self, node: NodeId, progress: Progress) -> bool {
        self.said(node).is_some_and(|said| said.progress >= progress)
    }

    /// Which of these nodes the present stage waits for.
    #[must_use]
    pub fn waits_for(&self, present: &BTreeSet<NodeId>) -> Vec<NodeId> {
        let Some((record, _)) = &self.record else { return Vec::new() };
        let goal = record.stage.goal();
        present.iter().copied().filter(|node| !self.is_at(*node, goal)).collect()
    }
}

impl Stage {
    /// Where each node is at the end of it.
    fn goal(self) -> Progress {
        match self {
            Self::Spread => Progress::Has,
            Self::Use => Progress::Uses,
            Self::Finish => Progress::Done,
        }
    }
}

/// What a node does next, by what it knows.
#[must_use]
pub fn decide(view: &View<'_>) -> Action {
    let View { node, own, held, present, .. } = *view;
    let Some((record, _)) = &held.record else {
        return if own.is_some() { Action::Clear } else { Action::Rest };
    };
    let Some(own) = own else {
        return if is_lost(view, record) { Action::End } else { wants(view) };
    };
    if own.id != record.id {
        return Action::Clear;
    }
    // Before its own turn: that comes when those have them that are waited for here.
    if let Some(node) = who_asks(held, present)
        && own.other.is_some()
    {
        return Action::Seal(node);
    }
    let progress = own.step.into();
    if !view.in_effect {
        return if is_its_turn(view, progress) { Action::PutInEffect } else { Action::Rest };
    }
    if !held.is_at(node, progress) {
        return Action::Say(progress);
    }
    match (own.step, record.stage) {
        (Step::Has, Stage::Use | Stage::Finish) => Action::Use,
        (Step::Uses, Stage::Finish) => Action::Forget,
        _ if !held.waits_for(present).is_empty() => Action::Rest,
        (_, Stage::Spread) => Action::Advance(Stage::Use),
        (_, Stage::Use) => Action::Advance(Stage::Finish),
        (_, Stage::Finish) => Action::End,
    }
}

/// Whether a node without them knows that the new credentials are gone: the node that made them is removed, or is this one,
/// and no other one has come to have them.
fn is_lost(view: &View<'_>, record: &RotationRecord) -> bool {
    let by = NodeId(record.by);
    let is_gone = by == view.node || !view.present.contains(&by);
    is_gone && !view.present.iter().any(|node| view.held.is_at(*node, Progress::Has))
}

fn wants(view: &View<'_>) -> Action {
    match view.held.said(view.node) {
        Some(said) if said.key.is_some() && said.key == view.key => match said.sealed {
            Some(_) => Action::Take,
            None => Action::Rest,
        },
        _ => Action::Ask,
    }
}

/// Members of the store start again one after the other, in the order of their nodes, so that most of them answer always.
fn is_its_turn(view: &View<'_>, progress: Progress) -> bool {
    let mut before = view.present.iter().filter(|other| **other < view.node);
    progress == Progress::Uses || before.all(|other| view.held.is_at(*other, progress))
}

/// A node that has asked for the new credentials and has not been given them.
fn who_asks(held: &Held, present: &BTreeSet<NodeId>) -> Option<NodeId> {
    let asks = |node: &NodeId| {
        let said = held.said(*node);
        said.is_some_and(|said| said.key.is_some() && said.sealed.is_none())
    };
    present.iter().copied().find(asks)
}

/// What the store holds of a rotation. What is damaged among the nodes' progress is left out: its node says it anew.
///
/// # Errors
/// [`MetaError`]; [`MetaError::Damaged`] for a damaged record of the rotation.
pub async fn read(meta: &dyn Meta) -> Result<Held, MetaError> {
    let Some(entry) = meta.get(KEY).await? else { return Ok(Held::default()) };
    let record = (decode(&entry)?, entry.revision);
    let (entries, _) = meta.list(NODES).await?;
    Ok(Held { record: Some(record), progress: entries.iter().filter_map(progress).collect() })
}

fn progress(entry: &Entry) -> Option<(NodeId, (NodeProgress, Revision))> {
    let said = said_in(entry).ok()?;
    Some((NodeId(said.node), (said, entry.revision)))
}

/// Whether what an entry at [`KEY`] or under [`NODES`] holds can be believed.
///
/// # Errors
/// [`MetaError::Damaged`].
pub fn check(entry: &Entry) -> Result<(), MetaError> {
    if entry.key == KEY {
        return decode::<RotationRecord>(entry).map(drop);
    }
    said_in(entry).map(drop)
}

/// What a node says in an entry under [`NODES`].
fn said_in(entry: &Entry) -> Result<NodeProgress, MetaError> {
    let said: NodeProgress = decode(entry)?;
    if key(NodeId(said.node)) != entry.key {
        let why = "it is the record of another node".to_owned();
        return Err(MetaError::Damaged { path: entry.key.clone(), why });
    }
    Ok(said)
}

/// The key of a node's progress.
fn key(node: NodeId) -> String {
    format!("{NODES}{node}")
}

impl RotationRecord {
    /// The change that begins it.
    #[must_use]
    pub fn begin(&self) -> Change {
        put(KEY.to_owned(), Expect::Absent, self)
    }

    /// The change that has all nodes go on with `stage`, from the record of that revision.
    #[must_use]
    pub fn advance(&self, stage: Stage, at: Revision) -> Change {
        put(KEY.to_owned(), Expect::At(at), &Self { stage, ..self.clone() })
    }
}

/// Writes what a node says.
///
/// # Errors
/// [`MetaError`]; [`MetaError::Changed`] where it has said something else since `held`, or damaged bytes are there.
pub async fn say(meta: &dyn Meta, held: &Held, said: &NodeProgress) -> Result<(), MetaError> {
    let key = key(NodeId(said.node));
    let expect = match held.progress.get(&NodeId(said.node)) {
        Some((_, revision)) => Expect::At(*revision),
        // Whatever is there is damaged.
        None => meta.get(&key).await?.map_or(Expect::Absent, |entry| Expect::At(entry.revision)),
    };
    meta.commit(vec![put(key, expect, said)]).await.map(drop)
}

/// Removes all records of the rotation in `held`.
///
/// # Errors
/// [`MetaError`]; [`MetaError::Changed`] where something has changed since `held`.
pub async fn end(meta: &dyn Meta, held: &Held) -> Result<(), MetaError> {
    let Some((_, revision)) = &held.record else { return Ok(()) };
    let (entries, _) = meta.list(NODES).await?;
    let removed = |key: String, revision| Change { key, expect: Expect::At(revision), value: None };
    let mut changes = vec![removed(KEY.to_owned(), *revision)];
    changes.extend(entries.into_iter().map(|entry| removed(entry.key, entry.revision)));
    meta.commit(changes).await.map(drop)
}

#[cfg(test)]
mod tests;
