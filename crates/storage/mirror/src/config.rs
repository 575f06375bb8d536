//! The configuration of a mirrored volume, as the metadata store keeps it (RFD 0010, 3.2).
//!
//! It is a JSON object, replaced whole, by compare-and-put, with the next epoch.

use std::future::Future;
use std::pin::Pin;

use block::Epoch;
use peer::{DataGeneration, Incarnation, NodeId};
use serde::{Deserialize, Serialize};
use uuid::Uuid;

/// Most replicas of one volume: three, and one that is to replace another.
pub const MAX_REPLICAS: usize = 4;

/// Longest configuration in bytes.
const MAX_CONFIG_BYTES: usize = 4096;

/// Which nodes have replicas, which of them are in sync, and which is the primary.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct MirrorConfig {
    /// The number of this configuration.
    pub epoch: Epoch,
    /// A random name: tells apart two configurations of the same epoch.
    pub config_id: u128,
    /// All replicas, by node.
    pub replicas: Vec<ConfigReplica>,
    /// The replicas that hold every acknowledged write, by node.
    pub in_sync: Vec<InSyncMember>,
    /// The member that orders writes.
    pub primary: NodeId,
    /// The latest epoch that began after all members had restarted, so that state kept in memory
    /// only is gone; zero if none did.
    pub cold_start_epoch: Epoch,
    /// The past of the copies (RFD 0032).
    pub history: CopyHistory,
}

/// What a configuration tells of the past of the copies.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct CopyHistory {
    /// Every member has recorded this generation: an image of a member without it is an older copy.
    pub generation: DataGeneration,
    /// The latest epoch that an operator began by forcing a primary.
    pub forced_epoch: Epoch,
    /// Nodes whose copies were rolled back and then resynced, since all copies were last found
    /// equal.
    pub rolled_back: Vec<NodeId>,
    /// The differences that the last verify found.
    pub mismatch: Option<ReplicaMismatch>,
}

/// Differences that a verify found.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ReplicaMismatch {
    /// Where the first difference begins, in bytes of the volume.
    pub offset_bytes: u64,
    /// Total bytes of the ranges that differ.
    pub bytes: u64,
    /// The nodes whose copies differ from the primary's.
    pub nodes: Vec<NodeId>,
    /// The node of the primary.
    pub primary: NodeId,
}

/// A replica of the volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ConfigReplica {
    /// Its node.
    pub node: NodeId,
    /// The name of its image, as in its label.
    pub image: Uuid,
    /// Whether it was never in sync: it holds no data of the volume yet.
    pub is_new: bool,
}

/// A replica in sync.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct InSyncMember {
    /// Its node.
    pub node: NodeId,
    /// Its incarnation when it was admitted.
    pub incarnation: Incarnation,
}

/// Why bytes are not a valid configuration.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MirrorConfigError {
    /// They are too long.
    #[error("the record has {0} bytes; the longest has {MAX_CONFIG_BYTES}")]
    TooLong(usize),
    /// They are not the expected JSON.
    #[error("the record is not valid: {0}")]
    Syntax(String),
    /// The configuration contradicts itself.
    #[error("the record contradicts itself: {0}")]
    Contradiction(&'static str),
}

/// Why the list of replicas cannot be changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReplicaChangeError {
    /// The image is listed already.
    #[error("image {0} is a replica already")]
    AlreadyListed(Uuid),
    /// The replica on the node is in sync: it must leave or be excluded first.
    #[error("the replica on node {0} is in sync: it has to leave first")]
    InSync(NodeId),
    /// The node has no replica.
    #[error("node {0} has no replica")]
    NoReplica(NodeId),
    /// The list is full.
    #[error("there are {MAX_REPLICAS} replicas already")]
    TooManyReplicas,
}

impl CopyHistory {
    /// Forgets the copy on `node`, which is gone.
    fn forget_node(&mut self, node: NodeId) {
        self.rolled_back.retain(|n| *n != node);
        if let Some(mismatch) = &mut self.mismatch {
            mismatch.nodes.retain(|n| *n != node);
        }
        self.mismatch = self.mismatch.take().filter(|d| !d.nodes.is_empty());
    }
}

impl MirrorConfig {
    /// The next configuration, in which `node` has the new `image` in place of its former one, if
    /// that was not in sync. `config_id` is a random number never used before; the result is to be
    /// put in place of this configuration (RFD 0010, 5.4).
    ///
    /// An image that was a replica once must not come back: its missing regions are unknown (attack
    /// 67).
    ///
    /// # Errors
    /// [`ReplicaChangeError`]
    pub fn with_replica(
        &self,
        node: NodeId,
        image: Uuid,
        config_id: u128,
    ) -> Result<Self, ReplicaChangeError> {
        if self.replicas.iter().any(|r| r.image == image) {
            return Err(ReplicaChangeError::AlreadyListed(image));
        }
        if self.member(node).is_some() {
            return Err(ReplicaChangeError::InSync(node));
        }
        let mut next = self.next_epoch(config_id);
        next.replicas.retain(|r| r.node != node);
        next.history.forget_node(node);
        if next.replicas.len() >= MAX_REPLICAS {
            return Err(ReplicaChangeError::TooManyReplicas);
        }
        next.replicas.push(ConfigReplica { node, image, is_new: true });
        next.replicas.sort_unstable_by_key(|r| r.node);
        Ok(next)
    }

    /// The next configuration, in which `node` has no replica; otherwise as [`Self::with_replica`].
    ///
    /// # Errors
    /// [`ReplicaChangeError`]
    pub fn without_replica(
        &self,
        node: NodeId,
        config_id: u128,
    ) -> Result<Self, ReplicaChangeError> {
        if self.image(node).is_none() {
            return Err(ReplicaChangeError::NoReplica(node));
        }
        if self.member(node).is_some() {
            return Err(ReplicaChangeError::InSync(node));
        }
        let mut next = self.next_epoch(config_id);
        next.replicas.retain(|r| r.node != node);
        next.history.forget_node(node);
        Ok(next)
    }

    /// The next configuration, after a verify of all members found these differences. `None` if
    /// this one says so already.
    #[must_use]
    pub fn with_comparison(
        &self,
        mismatch: Option<ReplicaMismatch>,
        config_id: u128,
    ) -> Option<Self> {
        let mut next = self.next_epoch(config_id);
        if mismatch.is_none() {
            // Out-of-sync replicas were not compared.
            next.history.rolled_back.retain(|node| self.member(*node).is_none());
        }
        next.history.mismatch = mismatch;
        (next.history != self.history).then_some(next)
    }

    /// The same configuration with the next epoch.
    pub(super) fn next_epoch(&self, config_id: u128) -> Self {
        Self { epoch: Epoch(self.epoch.0 + 1), config_id, ..self.clone() }
    }

    /// The member on `node`, if it has one.
    #[must_use]
    pub fn member(&self, node: NodeId) -> Option<InSyncMember> {
        self.in_sync.iter().copied().find(|m| m.node == node)
    }

    /// The image on `node`, if it has one.
    #[must_use]
    pub fn image(&self, node: NodeId) -> Option<Uuid> {
        self.replicas.iter().find(|r| r.node == node).map(|r| r.image)
    }

    /// Whether `node` is in sync under `incarnation`.
    #[must_use]
    pub fn has_member(&self, node: NodeId, incarnation: Incarnation) -> bool {
        self.in_sync.contains(&InSyncMember { node, incarnation })
    }

    /// Whether it is the first configuration of its volume, and no replica has been a member yet:
    /// the control plane lists the new images under an incarnation that none of them has.
    #[must_use]
    pub fn is_initial(&self) -> bool {
        let never_joined = |m: &InSyncMember| m.incarnation == Incarnation(0);
        self.epoch == Epoch(1) && self.in_sync.iter().all(never_joined)
    }

    /// The members except the one on `node`.
    pub fn others(&self, node: NodeId) -> impl Iterator<Item = InSyncMember> + '_ {
        self.in_sync.iter().copied().filter(move |m| m.node != node)
    }

    /// Encodes it for the store and for messages.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        let json = ConfigJson::from(self);
        serde_json::to_vec(&json).expect("numbers and strings have a JSON form")
    }

    /// Decodes what [`Self::to_bytes`] wrote. The bytes are not trusted.
    ///
    /// # Errors
    /// What is wrong with them.
    pub fn parse(bytes: &[u8]) -> Result<Self, MirrorConfigError> {
        if bytes.len() > MAX_CONFIG_BYTES {
            return Err(MirrorConfigError::TooLong(bytes.len()));
        }
        let json: ConfigJson =
            serde_json::from_slice(bytes).map_err(|e| MirrorConfigError::Syntax(e.to_string()))?;
        let config = json.to_config()?;
        config.check().map_err(MirrorConfigError::Contradiction)?;
        Ok(config)
    }

    /// Checks what holds for every configuration.
    fn check(&self) -> Result<(), &'static str> {
        let by_node = |nodes: &mut dyn Iterator<Item = NodeId>| {
            let nodes: Vec<_> = nodes.collect();
            nodes.is_sorted_by(|a, b| a < b) && nodes.first().is_none_or(|n| n.0 > 0)
        };
        if !by_node(&mut self.replicas.iter().map(|r| r.node)) {
            return Err("replicas are not listed by node, each node once");
        }
        if !by_node(&mut self.in_sync.iter().map(|m| m.node)) {
            return Err("members are not listed by node, each node once");
        }
        if self.replicas.len() > MAX_REPLICAS {
            return Err("too many replicas");
        }
        if self.in_sync.iter().any(|m| self.image(m.node).is_none()) {
            return Err("a member has no image");
        }
        if self.cold_start_epoch > self.epoch {
            return Err("its cold-start epoch is above its epoch");
        }
        let CopyHistory { generation, forced_epoch, rolled_back, mismatch } = &self.history;
        if generation.epoch > self.epoch || *forced_epoch > self.epoch {
            return Err("its history names an epoch above its own");
        }
        let nodes = mismatch.iter().map(|d| d.nodes.len()).chain([rolled_back.len()]);
        if nodes.max().is_some_and(|nodes| nodes > MAX_REPLICAS) {
            return Err("its history has too many nodes");
        }
        if self.member(self.primary).is_none() {
            return Err("the primary is not a member");
        }
        Ok(())
    }
}

/// The JSON form. Numbers above 2^53 are hexadecimal strings, because other readers would round
/// them.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct ConfigJson {
    epoch: u64,
    config: String,
    replicas: Vec<ReplicaJson>,
    in_sync: Vec<MemberJson>,
    primary: u16,
    #[serde(default)]
    born: u64,
    #[serde(default)]
    lineage: GenerationJson,
    #[serde(default)]
    forced: u64,
    #[serde(default)]
    set_back: Vec<u16>,
    #[serde(default)]
    differing: Option<MismatchJson>,
}

#[derive(Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct GenerationJson {
    epoch: u64,
    count: u32,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct MismatchJson {
    at_bytes: u64,
    bytes: u64,
    nodes: Vec<u16>,
    from: u16,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct ReplicaJson {
    node: u16,
    image: String,
    #[serde(default)]
    new: bool,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct MemberJson {
    node: u16,
    incarnation: String,
}

impl From<&MirrorConfig> for ConfigJson {
    fn from(r: &MirrorConfig) -> Self {
        let replica = |r: &ConfigReplica| ReplicaJson {
            node: r.node.0,
            image: r.image.to_string(),
            new: r.is_new,
        };
        let member = |m: &InSyncMember| MemberJson {
            node: m.node.0,
            incarnation: format!("{:016x}", m.incarnation.0),
        };
        Self {
            epoch: r.epoch.0,
            config: format!("{:032x}", r.config_id),
            replicas: r.replicas.iter().map(replica).collect(),
            in_sync: r.in_sync.iter().map(member).collect(),
            primary: r.primary.0,
            born: r.cold_start_epoch.0,
            lineage: GenerationJson {
                epoch: r.history.generation.epoch.0,
                count: r.history.generation.count,
            },
            forced: r.history.forced_epoch.0,
            set_back: r.history.rolled_back.iter().map(|n| n.0).collect(),
            differing: r.history.mismatch.as_ref().map(|d| MismatchJson {
                at_bytes: d.offset_bytes,
                bytes: d.bytes,
                nodes: d.nodes.iter().map(|n| n.0).collect(),
                from: d.primary.0,
            }),
        }
    }
}

impl ConfigJson {
    fn to_config(&self) -> Result<MirrorConfig, MirrorConfigError> {
        let u128_hex = |s: &str| u128::from_str_radix(s, 16);
        let u64_hex = |s: &str| u64::from_str_radix(s, 16);
        let syntax = |e: std::num::ParseIntError| MirrorConfigError::Syntax(e.to_string());
        let replica = |r: &ReplicaJson| {
            let image =
                Uuid::parse_str(&r.image).map_err(|e| MirrorConfigError::Syntax(e.to_string()))?;
            Ok(ConfigReplica { node: NodeId(r.node), image, is_new: r.new })
        };
        let member = |m: &MemberJson| {
            let incarnation = Incarnation(u64_hex(&m.incarnation).map_err(syntax)?);
            Ok(InSyncMember { node: NodeId(m.node), incarnation })
        };
        Ok(MirrorConfig {
            epoch: Epoch(self.epoch),
            config_id: u128_hex(&self.config).map_err(syntax)?,
            replicas: self
                .replicas
                .iter()
                .map(replica)
                .collect::<Result<_, MirrorConfigError>>()?,
            in_sync: self.in_sync.iter().map(member).collect::<Result<_, MirrorConfigError>>()?,
            primary: NodeId(self.primary),
            cold_start_epoch: Epoch(self.born),
            history: self.history(),
        })
    }

    fn history(&self) -> CopyHistory {
        let nodes = |nodes: &[u16]| nodes.iter().copied().map(NodeId).collect();
        let GenerationJson { epoch, count } = self.lineage;
        CopyHistory {
            generation: DataGeneration { epoch: Epoch(epoch), count },
            forced_epoch: Epoch(self.forced),
            rolled_back: nodes(&self.set_back),
            mismatch: self.differing.as_ref().map(|d| ReplicaMismatch {
                offset_bytes: d.at_bytes,
                bytes: d.bytes,
                nodes: nodes(&d.nodes),
                primary: NodeId(d.from),
            }),
        }
    }
}

/// The result of a put.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PutOutcome {
    /// The configuration was replaced.
    Committed,
    /// The stored configuration was not the expected one.
    Conflict,
    /// No answer: the put may take effect now, later or never.
    Unknown,
}

/// The store did not answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the metadata store does not respond")]
pub struct StoreUnavailable;

/// Stores the configuration of one volume: linearizable, shared by all nodes.
pub trait ConfigStore: 'static {
    /// The configuration as it is at some moment between call and answer.
    ///
    /// # Errors
    /// [`StoreUnavailable`], within a bounded time.
    fn read(&self) -> impl Future<Output = Result<MirrorConfig, StoreUnavailable>>;

    /// Replaces the configuration with epoch `after` and name `config_id` by `config`, or does
    /// nothing.
    fn put(
        &self,
        after: Epoch,
        config_id: u128,
        config: &MirrorConfig,
    ) -> impl Future<Output = PutOutcome>;

    /// Waits until the configuration may have changed. May return without a change; bounded in
    /// time.
    fn wait_changed(&self) -> impl Future<Output = ()>;
}

type ConfigStoreFuture<'a, T> = Pin<Box<dyn Future<Output = T> + 'a>>;

/// A [`ConfigStore`] behind a pointer.
pub(super) trait DynConfigStore {
    fn read(&self) -> ConfigStoreFuture<'_, Result<MirrorConfig, StoreUnavailable>>;
    fn put<'a>(
        &'a self,
        after: Epoch,
        config_id: u128,
        config: &'a MirrorConfig,
    ) -> ConfigStoreFuture<'a, PutOutcome>;
    fn wait_changed(&self) -> ConfigStoreFuture<'_, ()>;
}

impl<R: ConfigStore> DynConfigStore for R {
    fn read(&self) -> ConfigStoreFuture<'_, Result<MirrorConfig, StoreUnavailable>> {
        Box::pin(ConfigStore::read(self))
    }

    fn put<'a>(
        &'a self,
        after: Epoch,
        config_id: u128,
        config: &'a MirrorConfig,
    ) -> ConfigStoreFuture<'a, PutOutcome> {
        Box::pin(ConfigStore::put(self, after, config_id, config))
    }

    fn wait_changed(&self) -> ConfigStoreFuture<'_, ()> {
        Box::pin(ConfigStore::wait_changed(self))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record() -> MirrorConfig {
        MirrorConfig {
            epoch: Epoch(7),
            config_id: u128::MAX - 3,
            replicas: vec![
                ConfigReplica { node: NodeId(1), image: Uuid::from_u128(1), is_new: true },
                ConfigReplica { node: NodeId(2), image: Uuid::from_u128(2), is_new: false },
            ],
            in_sync: vec![InSyncMember { node: NodeId(2), incarnation: Incarnation(u64::MAX) }],
            primary: NodeId(2),
            cold_start_epoch: Epoch(3),
            history: CopyHistory {
                generation: DataGeneration { epoch: Epoch(6), count: 4 },
                forced_epoch: Epoch(2),
                rolled_back: vec![NodeId(1)],
                mismatch: Some(ReplicaMismatch {
                    offset_bytes: 4096,
                    bytes: 512,
                    nodes: vec![NodeId(2)],
                    primary: NodeId(1),
                }),
            },
        }
    }

    #[test]
    fn a_verify_without_mismatches_clears_the_history_of_in_sync_copies() {
        let before = record();
        let equal = before.with_comparison(None, 9).expect("it said that they differ");
        assert_eq!(equal.history.mismatch, None);
        assert_eq!(
            equal.history.rolled_back,
            [NodeId(1)],
            "it is not in sync, and was not compared"
        );
        assert_eq!(equal.with_comparison(None, 10), None);
        assert_eq!((equal.epoch, equal.check()), (Epoch(8), Ok(())));
        let again = equal.with_comparison(before.history.mismatch.clone(), 10);
        assert_eq!(again.expect("they differ").history, before.history);
    }

    #[test]
    fn a_config_round_trips() {
        assert_eq!(MirrorConfig::parse(&record().to_bytes()), Ok(record()));
    }

    #[test]
    fn an_added_replica_starts_with_an_empty_history() {
        let before = record();
        let after = before.with_replica(NodeId(3), Uuid::from_u128(3), 9).expect("there is room");
        let added = ConfigReplica { node: NodeId(3), image: Uuid::from_u128(3), is_new: true };
        assert_eq!(after.replicas, [&before.replicas[..], &[added]].concat());
        assert_eq!((after.epoch, after.config_id), (Epoch(8), 9));
        assert_eq!((&after.in_sync, after.primary), (&before.in_sync, before.primary));
        assert_eq!(after.check(), Ok(()));
    }

    #[test]
    fn a_replica_that_is_not_in_sync_is_replaced_and_removed() {
        let before = record();
        let after = before.with_replica(NodeId(1), Uuid::from_u128(7), 9).expect("not in sync");
        let [new, old] = after.replicas[..] else { panic!("{after:?}") };
        assert_eq!(new, ConfigReplica { node: NodeId(1), image: Uuid::from_u128(7), is_new: true });
        assert_eq!(old, before.replicas[1]);
        let left = after.without_replica(NodeId(1), 10).expect("not in sync");
        assert_eq!(left.replicas, [before.replicas[1]]);
        assert_eq!((left.epoch, left.check()), (Epoch(9), Ok(())));
    }

    #[test]
    fn the_history_of_a_copy_ends_with_its_removal() {
        let before = record();
        let after = before.with_replica(NodeId(1), Uuid::from_u128(7), 9).expect("not in sync");
        assert_eq!(after.history.rolled_back, []);
        assert_eq!(after.history.mismatch, before.history.mismatch, "that was of another");
        let mut differs = before;
        differs.history.mismatch.as_mut().expect("some").nodes = vec![NodeId(1)];
        let left = differs.without_replica(NodeId(1), 9).expect("not in sync");
        assert_eq!((left.history.rolled_back, left.history.mismatch), (vec![], None));
    }

    #[test]
    fn changes_of_in_sync_replicas_are_refused_by_name() {
        let one = Uuid::from_u128;
        let r = record();
        assert_eq!(
            r.with_replica(NodeId(3), one(2), 9),
            Err(ReplicaChangeError::AlreadyListed(one(2)))
        );
        assert_eq!(
            r.with_replica(NodeId(2), one(9), 9),
            Err(ReplicaChangeError::InSync(NodeId(2)))
        );
        assert_eq!(r.without_replica(NodeId(2), 9), Err(ReplicaChangeError::InSync(NodeId(2))));
        assert_eq!(r.without_replica(NodeId(3), 9), Err(ReplicaChangeError::NoReplica(NodeId(3))));
        let three = r.with_replica(NodeId(3), one(3), 9).expect("there is room");
        let full = three.with_replica(NodeId(4), one(4), 10).expect("there is room");
        assert_eq!(
            full.with_replica(NodeId(5), one(5), 11),
            Err(ReplicaChangeError::TooManyReplicas)
        );
        assert!(full.with_replica(NodeId(4), one(5), 11).is_ok(), "one for another");
    }

    type Spoil = fn(&mut MirrorConfig);

    #[test]
    fn inconsistent_configs_are_refused_with_a_reason() {
        let cases: [(Spoil, &str); 9] = [
            (|r| r.history.generation.epoch = Epoch(8), "its history names an epoch above its own"),
            (|r| r.history.forced_epoch = Epoch(8), "its history names an epoch above its own"),
            (|r| r.history.rolled_back = vec![NodeId(1); 5], "its history has too many nodes"),
            (|r| r.cold_start_epoch = Epoch(8), "its cold-start epoch is above its epoch"),
            (|r| r.primary = NodeId(1), "the primary is not a member"),
            (|r| r.replicas.truncate(1), "a member has no image"),
            (|r| r.replicas.reverse(), "replicas are not listed by node, each node once"),
            (|r| r.in_sync.push(r.in_sync[0]), "members are not listed by node, each node once"),
            (|r| r.in_sync.clear(), "the primary is not a member"),
        ];
        for (spoil, why) in cases {
            let mut r = record();
            spoil(&mut r);
            assert_eq!(
                MirrorConfig::parse(&r.to_bytes()),
                Err(MirrorConfigError::Contradiction(why))
            );
        }
    }

    #[test]
    fn foreign_bytes_are_refused() {
        let whole = record().to_bytes();
        for n in 0..whole.len() {
            assert!(matches!(MirrorConfig::parse(&whole[..n]), Err(MirrorConfigError::Syntax(_))));
        }
        assert_eq!(MirrorConfig::parse(&[b' '; 5000]), Err(MirrorConfigError::TooLong(5000)));
    }
}
