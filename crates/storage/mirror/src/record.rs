//! The configuration of a mirrored volume, as the metadata store keeps it (RFD 0010, 3.2).
//!
//! A record is a JSON object. It is changed whole, by compare-and-put, to the next epoch.

use std::future::Future;

use block::Epoch;
use peer::{Incarnation, Lineage, NodeId};
use serde::{Deserialize, Serialize};
use uuid::Uuid;

/// Most replicas of one volume: three, and one that replaces another.
pub const MAX_REPLICAS: usize = 4;

/// Longest record in bytes.
const MAX_BYTES: usize = 4096;

/// Who has the volume, who of them is in sync, and who puts writes in order.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Record {
    /// Counts the records of this volume.
    pub epoch: Epoch,
    /// Random name of this very record: tells it from another one of the same epoch.
    pub config: u128,
    /// All that have an image of the volume, by node.
    pub replicas: Vec<Replica>,
    /// Those of them that hold every answered write, by node.
    pub in_sync: Vec<Member>,
    /// The one of these that puts writes in order.
    pub primary: NodeId,
    /// The latest epoch that began after all members had ended, with all that lived in memory alone;
    /// zero: none has.
    pub born: Epoch,
    /// What is known of the copies' past (RFD 0032).
    pub history: History,
}

/// What a record says of the copies' past.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct History {
    /// Every member has reached this lineage: an image of a member that has not is an older copy.
    pub lineage: Lineage,
    /// The latest epoch in which an operator made one copy go on, whatever the others had.
    pub forced: Epoch,
    /// Nodes whose copies came back older than they had been, and were copied anew, since all copies
    /// were compared and found equal.
    pub set_back: Vec<NodeId>,
    /// What the last comparison of all copies found different.
    pub differing: Option<Differing>,
}

/// What a comparison of all copies found different.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Differing {
    /// The first range, in bytes of the volume.
    pub at_bytes: u64,
    /// How many bytes were in ranges that differ.
    pub bytes: u64,
    /// The nodes whose copies differ from the primary's.
    pub nodes: Vec<NodeId>,
    /// The node that was primary.
    pub from: NodeId,
}

/// An image of the volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Replica {
    /// Where it is.
    pub node: NodeId,
    /// Its name, as in its label.
    pub image: Uuid,
    /// Whether it holds nothing of the volume yet: it was never in sync.
    pub new: bool,
}

/// A replica in sync.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Member {
    /// Where it is.
    pub node: NodeId,
    /// Its incarnation when it was taken in.
    pub incarnation: Incarnation,
}

/// Why a record is not one.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadRecord {
    /// It is longer than any.
    #[error("the record has {0} bytes; the longest has {MAX_BYTES}")]
    TooLong(usize),
    /// It is not the JSON that was expected.
    #[error("the record is not valid: {0}")]
    Syntax(String),
    /// It says something that cannot be.
    #[error("the record contradicts itself: {0}")]
    Contradiction(&'static str),
}

/// Why replicas are not changed as somebody wants it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadChange {
    /// The image is listed already.
    #[error("image {0} is a replica already")]
    Listed(Uuid),
    /// What is on the node is in sync, by the record: it goes by leaving, or when others put it out.
    #[error("the replica on node {0} is in sync: it has to leave first")]
    InSync(NodeId),
    /// The node has no replica.
    #[error("node {0} has no replica")]
    Absent(NodeId),
    /// There are as many as there can be.
    #[error("there are {MAX_REPLICAS} replicas already")]
    Full,
}

impl History {
    /// The copy on `node` is no more.
    fn forget(&mut self, node: NodeId) {
        self.set_back.retain(|n| *n != node);
        if let Some(differing) = &mut self.differing {
            differing.nodes.retain(|n| *n != node);
        }
        self.differing = self.differing.take().filter(|d| !d.nodes.is_empty());
    }
}

impl Record {
    /// The next record, in which `node` has `image`, which is new: in place of what it had, if that was
    /// not in sync. `config` is a random number that was never used before; to be put in place of this
    /// record (RFD 0010, 5.4).
    ///
    /// An image that has been a replica once must not come back: nothing knows what it lacks (attack 67).
    ///
    /// # Errors
    /// [`BadChange`]
    pub fn with_replica(&self, node: NodeId, image: Uuid, config: u128) -> Result<Self, BadChange> {
        if self.replicas.iter().any(|r| r.image == image) {
            return Err(BadChange::Listed(image));
        }
        if self.member(node).is_some() {
            return Err(BadChange::InSync(node));
        }
        let mut next = self.next(config);
        next.replicas.retain(|r| r.node != node);
        next.history.forget(node);
        if next.replicas.len() >= MAX_REPLICAS {
            return Err(BadChange::Full);
        }
        next.replicas.push(Replica { node, image, new: true });
        next.replicas.sort_unstable_by_key(|r| r.node);
        Ok(next)
    }

    /// The next record, in which `node` has no replica any more; otherwise as
    /// [`Self::with_replica`].
    ///
    /// # Errors
    /// [`BadChange`]
    pub fn without_replica(&self, node: NodeId, config: u128) -> Result<Self, BadChange> {
        if self.image(node).is_none() {
            return Err(BadChange::Absent(node));
        }
        if self.member(node).is_some() {
            return Err(BadChange::InSync(node));
        }
        let mut next = self.next(config);
        next.replicas.retain(|r| r.node != node);
        next.history.forget(node);
        Ok(next)
    }

    /// The next record, after all copies in sync were compared: these differences were found. `None` if it
    /// says so already.
    #[must_use]
    pub fn with_comparison(&self, differing: Option<Differing>, config: u128) -> Option<Self> {
        let mut next = self.next(config);
        if differing.is_none() {
            // What is not in sync was not compared.
            next.history.set_back.retain(|node| self.member(*node).is_none());
        }
        next.history.differing = differing;
        (next.history != self.history).then_some(next)
    }

    /// The same in the next epoch.
    pub(super) fn next(&self, config: u128) -> Self {
        Self { epoch: Epoch(self.epoch.0 + 1), config, ..self.clone() }
    }

    /// The member on `node`, if it has one.
    #[must_use]
    pub fn member(&self, node: NodeId) -> Option<Member> {
        self.in_sync.iter().copied().find(|m| m.node == node)
    }

    /// The image on `node`, if it has one.
    #[must_use]
    pub fn image(&self, node: NodeId) -> Option<Uuid> {
        self.replicas.iter().find(|r| r.node == node).map(|r| r.image)
    }

    /// Whether `node` is in sync under `incarnation`.
    #[must_use]
    pub fn has(&self, node: NodeId, incarnation: Incarnation) -> bool {
        self.in_sync.contains(&Member { node, incarnation })
    }

    /// Whether it is the first record of its volume, and no replica has been a member yet: the
    /// control plane lists the images that it has made, under an incarnation that none has.
    #[must_use]
    pub fn is_first(&self) -> bool {
        let nobody = |m: &Member| m.incarnation == Incarnation(0);
        self.epoch == Epoch(1) && self.in_sync.iter().all(nobody)
    }

    /// The members but the one on `node`.
    pub fn others(&self, node: NodeId) -> impl Iterator<Item = Member> + '_ {
        self.in_sync.iter().copied().filter(move |m| m.node != node)
    }

    /// As it is stored and sent.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        let text = Text::from(self);
        serde_json::to_vec(&text).expect("numbers and strings have a JSON form")
    }

    /// Reads what [`Self::to_bytes`] wrote. Bytes come from outside: nothing about them is assumed.
    ///
    /// # Errors
    /// What is wrong with them.
    pub fn parse(bytes: &[u8]) -> Result<Self, BadRecord> {
        if bytes.len() > MAX_BYTES {
            return Err(BadRecord::TooLong(bytes.len()));
        }
        let text: Text =
            serde_json::from_slice(bytes).map_err(|e| BadRecord::Syntax(e.to_string()))?;
        let record = text.record()?;
        record.check().map_err(BadRecord::Contradiction)?;
        Ok(record)
    }

    /// What every record holds to.
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
        if self.born > self.epoch {
            return Err("it was born after itself");
        }
        let History { lineage, forced, set_back, differing } = &self.history;
        if lineage.epoch > self.epoch || *forced > self.epoch {
            return Err("its history is not over");
        }
        let nodes = differing.iter().map(|d| d.nodes.len()).chain([set_back.len()]);
        if nodes.max().is_some_and(|nodes| nodes > MAX_REPLICAS) {
            return Err("its history has too many nodes");
        }
        if self.member(self.primary).is_none() {
            return Err("the primary is not a member");
        }
        Ok(())
    }
}

/// The JSON. Numbers above 2^53 are hexadecimal strings, for other readers' sake.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Text {
    epoch: u64,
    config: String,
    replicas: Vec<ReplicaText>,
    in_sync: Vec<MemberText>,
    primary: u16,
    #[serde(default)]
    born: u64,
    #[serde(default)]
    lineage: LineageText,
    #[serde(default)]
    forced: u64,
    #[serde(default)]
    set_back: Vec<u16>,
    #[serde(default)]
    differing: Option<DifferingText>,
}

#[derive(Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct LineageText {
    epoch: u64,
    count: u32,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct DifferingText {
    at_bytes: u64,
    bytes: u64,
    nodes: Vec<u16>,
    from: u16,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct ReplicaText {
    node: u16,
    image: String,
    #[serde(default)]
    new: bool,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct MemberText {
    node: u16,
    incarnation: String,
}

impl From<&Record> for Text {
    fn from(r: &Record) -> Self {
        let replica =
            |r: &Replica| ReplicaText { node: r.node.0, image: r.image.to_string(), new: r.new };
        let member = |m: &Member| MemberText {
            node: m.node.0,
            incarnation: format!("{:016x}", m.incarnation.0),
        };
        Self {
            epoch: r.epoch.0,
            config: format!("{:032x}", r.config),
            replicas: r.replicas.iter().map(replica).collect(),
            in_sync: r.in_sync.iter().map(member).collect(),
            primary: r.primary.0,
            born: r.born.0,
            lineage: LineageText {
                epoch: r.history.lineage.epoch.0,
                count: r.history.lineage.count,
            },
            forced: r.history.forced.0,
            set_back: r.history.set_back.iter().map(|n| n.0).collect(),
            differing: r.history.differing.as_ref().map(|d| DifferingText {
                at_bytes: d.at_bytes,
                bytes: d.bytes,
                nodes: d.nodes.iter().map(|n| n.0).collect(),
                from: d.from.0,
            }),
        }
    }
}

impl Text {
    fn record(&self) -> Result<Record, BadRecord> {
        let long = |s: &str| u128::from_str_radix(s, 16);
        let short = |s: &str| u64::from_str_radix(s, 16);
        let bad = |e: std::num::ParseIntError| BadRecord::Syntax(e.to_string());
        let replica = |r: &ReplicaText| {
            let image = Uuid::parse_str(&r.image).map_err(|e| BadRecord::Syntax(e.to_string()))?;
            Ok(Replica { node: NodeId(r.node), image, new: r.new })
        };
        let member = |m: &MemberText| {
            let incarnation = Incarnation(short(&m.incarnation).map_err(bad)?);
            Ok(Member { node: NodeId(m.node), incarnation })
        };
        Ok(Record {
            epoch: Epoch(self.epoch),
            config: long(&self.config).map_err(bad)?,
            replicas: self.replicas.iter().map(replica).collect::<Result<_, BadRecord>>()?,
            in_sync: self.in_sync.iter().map(member).collect::<Result<_, BadRecord>>()?,
            primary: NodeId(self.primary),
            born: Epoch(self.born),
            history: self.history(),
        })
    }

    fn history(&self) -> History {
        let nodes = |nodes: &[u16]| nodes.iter().copied().map(NodeId).collect();
        let LineageText { epoch, count } = self.lineage;
        History {
            lineage: Lineage { epoch: Epoch(epoch), count },
            forced: Epoch(self.forced),
            set_back: nodes(&self.set_back),
            differing: self.differing.as_ref().map(|d| Differing {
                at_bytes: d.at_bytes,
                bytes: d.bytes,
                nodes: nodes(&d.nodes),
                from: NodeId(d.from),
            }),
        }
    }
}

/// What became of a put.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Put {
    /// The record is the new one.
    Done,
    /// It was not the expected one.
    Refused,
    /// No answer: it may take effect now, later or never.
    Unknown,
}

/// The store did not answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the metadata store does not answer")]
pub struct Unreachable;

/// Where the record of one volume is kept: linearizable, shared by all nodes.
pub trait Records: 'static {
    /// The record as it is at some moment between call and answer.
    ///
    /// # Errors
    /// [`Unreachable`], within a bounded time.
    fn read(&self) -> impl Future<Output = Result<Record, Unreachable>>;

    /// Replaces the record of epoch `after` and name `config` by `record`, or does nothing.
    fn put(&self, after: Epoch, config: u128, record: &Record) -> impl Future<Output = Put>;

    /// Waits until the record may have changed. May end without cause; bounded in time.
    fn changed(&self) -> impl Future<Output = ()>;
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record() -> Record {
        Record {
            epoch: Epoch(7),
            config: u128::MAX - 3,
            replicas: vec![
                Replica { node: NodeId(1), image: Uuid::from_u128(1), new: true },
                Replica { node: NodeId(2), image: Uuid::from_u128(2), new: false },
            ],
            in_sync: vec![Member { node: NodeId(2), incarnation: Incarnation(u64::MAX) }],
            primary: NodeId(2),
            born: Epoch(3),
            history: History {
                lineage: Lineage { epoch: Epoch(6), count: 4 },
                forced: Epoch(2),
                set_back: vec![NodeId(1)],
                differing: Some(Differing {
                    at_bytes: 4096,
                    bytes: 512,
                    nodes: vec![NodeId(2)],
                    from: NodeId(1),
                }),
            },
        }
    }

    #[test]
    fn a_comparison_without_differences_ends_what_was_said_of_those_in_sync() {
        let before = record();
        let equal = before.with_comparison(None, 9).expect("it said that they differ");
        assert_eq!(equal.history.differing, None);
        assert_eq!(equal.history.set_back, [NodeId(1)], "it is not in sync, and was not compared");
        assert_eq!(equal.with_comparison(None, 10), None);
        assert_eq!((equal.epoch, equal.check()), (Epoch(8), Ok(())));
        let again = equal.with_comparison(before.history.differing.clone(), 10);
        assert_eq!(again.expect("they differ").history, before.history);
    }

    #[test]
    fn is_read_as_it_was_written() {
        assert_eq!(Record::parse(&record().to_bytes()), Ok(record()));
    }

    #[test]
    fn a_replica_is_added_as_a_new_one() {
        let before = record();
        let after = before.with_replica(NodeId(3), Uuid::from_u128(3), 9).expect("there is room");
        let added = Replica { node: NodeId(3), image: Uuid::from_u128(3), new: true };
        assert_eq!(after.replicas, [&before.replicas[..], &[added]].concat());
        assert_eq!((after.epoch, after.config), (Epoch(8), 9));
        assert_eq!((&after.in_sync, after.primary), (&before.in_sync, before.primary));
        assert_eq!(after.check(), Ok(()));
    }

    #[test]
    fn a_replica_that_is_not_in_sync_is_replaced_and_removed() {
        let before = record();
        let after = before.with_replica(NodeId(1), Uuid::from_u128(7), 9).expect("not in sync");
        let [new, old] = after.replicas[..] else { panic!("{after:?}") };
        assert_eq!(new, Replica { node: NodeId(1), image: Uuid::from_u128(7), new: true });
        assert_eq!(old, before.replicas[1]);
        let left = after.without_replica(NodeId(1), 10).expect("not in sync");
        assert_eq!(left.replicas, [before.replicas[1]]);
        assert_eq!((left.epoch, left.check()), (Epoch(9), Ok(())));
    }

    #[test]
    fn what_was_said_of_a_copy_ends_with_it() {
        let before = record();
        let after = before.with_replica(NodeId(1), Uuid::from_u128(7), 9).expect("not in sync");
        assert_eq!(after.history.set_back, []);
        assert_eq!(after.history.differing, before.history.differing, "that was of another");
        let mut differs = before;
        differs.history.differing.as_mut().expect("some").nodes = vec![NodeId(1)];
        let left = differs.without_replica(NodeId(1), 9).expect("not in sync");
        assert_eq!((left.history.set_back, left.history.differing), (vec![], None));
    }

    #[test]
    fn replicas_that_may_not_be_changed_are_named() {
        let one = Uuid::from_u128;
        let r = record();
        assert_eq!(r.with_replica(NodeId(3), one(2), 9), Err(BadChange::Listed(one(2))));
        assert_eq!(r.with_replica(NodeId(2), one(9), 9), Err(BadChange::InSync(NodeId(2))));
        assert_eq!(r.without_replica(NodeId(2), 9), Err(BadChange::InSync(NodeId(2))));
        assert_eq!(r.without_replica(NodeId(3), 9), Err(BadChange::Absent(NodeId(3))));
        let three = r.with_replica(NodeId(3), one(3), 9).expect("there is room");
        let full = three.with_replica(NodeId(4), one(4), 10).expect("there is room");
        assert_eq!(full.with_replica(NodeId(5), one(5), 11), Err(BadChange::Full));
        assert!(full.with_replica(NodeId(4), one(5), 11).is_ok(), "one for another");
    }

    type Spoil = fn(&mut Record);

    #[test]
    fn contradictions_are_named() {
        let cases: [(Spoil, &str); 9] = [
            (|r| r.history.lineage.epoch = Epoch(8), "its history is not over"),
            (|r| r.history.forced = Epoch(8), "its history is not over"),
            (|r| r.history.set_back = vec![NodeId(1); 5], "its history has too many nodes"),
            (|r| r.born = Epoch(8), "it was born after itself"),
            (|r| r.primary = NodeId(1), "the primary is not a member"),
            (|r| r.replicas.truncate(1), "a member has no image"),
            (|r| r.replicas.reverse(), "replicas are not listed by node, each node once"),
            (|r| r.in_sync.push(r.in_sync[0]), "members are not listed by node, each node once"),
            (|r| r.in_sync.clear(), "the primary is not a member"),
        ];
        for (spoil, why) in cases {
            let mut r = record();
            spoil(&mut r);
            assert_eq!(Record::parse(&r.to_bytes()), Err(BadRecord::Contradiction(why)));
        }
    }

    #[test]
    fn foreign_bytes_are_refused() {
        let whole = record().to_bytes();
        for n in 0..whole.len() {
            assert!(matches!(Record::parse(&whole[..n]), Err(BadRecord::Syntax(_))));
        }
        assert_eq!(Record::parse(&[b' '; 5000]), Err(BadRecord::TooLong(5000)));
    }
}
