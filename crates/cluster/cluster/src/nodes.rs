//! The records of a cluster and its nodes in the metadata store, and who of them is alive.
//!
//! | key | holds | written by |
//! |---|---|---|
//! | `cluster` | [`ClusterRecord`] | the first node; whoever joins takes a number from it |
//! | `nodes/ID` | [`NodeRecord`] | its node; `drained` by anybody |
//! | `alive/ID` | the node's version, on a lease | its node, while it runs |

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use peer::NodeId;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout_at};
use uuid::Uuid;

use crate::identity::{NodeIndex, Role};
use crate::meta::{Change, Entry, Expect, Meta, MetaError, Revision};

/// Key of the cluster's record.
pub const CLUSTER: &str = "cluster";

/// What keys of nodes' records begin with.
pub const NODES: &str = "nodes/";

/// What keys of signs of life begin with.
pub const ALIVE: &str = "alive/";

/// How long a node that has fallen silent is still taken for alive, at most.
pub const ALIVE_TTL: Duration = Duration::from_secs(10);

/// Longest time until the records are listed again, whatever the store tells.
const LIST_AGAIN: Duration = Duration::from_secs(30);

/// Pause before a store that does not answer is asked again.
const PAUSE: Duration = Duration::from_secs(1);

/// The cluster.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ClusterRecord {
    /// Its identity.
    pub id: Uuid,
    /// The number that the next node gets. None is given twice.
    pub next_node: u16,
    /// Whether the nodes run the store's members themselves.
    pub own_members: bool,
    /// How long a lease runs, in milliseconds; the same at all nodes.
    pub lease_ms: u64,
    /// How long a lease is waited out, in milliseconds; the same at all nodes.
    pub grace_ms: u64,
}

/// Where a node serves initiators, by protocol.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NodePortals {
    /// iSCSI.
    pub iscsi: Vec<SocketAddr>,
    /// NVMe/TCP I/O controllers.
    pub nvme: Vec<SocketAddr>,
    /// NVMe/TCP discovery.
    pub discovery: Vec<SocketAddr>,
}

/// A node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NodeRecord {
    /// Its number, never 0.
    #[serde(with = "number")]
    pub node: NodeId,
    /// Its index: no two nodes have the same at a time.
    pub index: NodeIndex,
    /// Its name.
    pub name: String,
    /// What it is for.
    pub role: Role,
    /// Where other nodes reach it with data, one address for each network.
    pub data: Vec<SocketAddr>,
    /// Where other nodes reach it with leases alone.
    pub heartbeat: Vec<SocketAddr>,
    /// Where it lets nodes in that join.
    pub join: Option<SocketAddr>,
    /// Where it serves initiators, with the addresses that it listens at.
    pub portals: NodePortals,
    /// Its data directory, where volumes without a path of their own lie.
    pub data_dir: PathBuf,
    /// What it fails together with.
    pub failure_domain: String,
    /// Its version of the program.
    pub version: String,
    /// Whether it is to keep out of service.
    pub drained: bool,
}

/// A node as another one sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeView {
    /// Its record.
    pub record: NodeRecord,
    /// Whether it runs, as far as the store knows.
    pub alive: bool,
}

/// The nodes that there are.
pub type Nodes = BTreeMap<NodeId, NodeView>;

/// A node's number among fields.
mod number {
    use peer::NodeId;
    use serde::{Deserialize, Deserializer, Serializer};

    pub(super) fn serialize<S: Serializer>(node: &NodeId, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_u16(node.0)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<NodeId, D::Error> {
        match u16::deserialize(from)? {
            0 => Err(serde::de::Error::custom("no node has number 0")),
            number => Ok(NodeId(number)),
        }
    }
}

/// Key of a node's record.
#[must_use]
pub fn key(node: NodeId) -> String {
    format!("{NODES}{node}")
}

/// Key of a node's sign of life.
#[must_use]
pub fn alive_key(node: NodeId) -> String {
    format!("{ALIVE}{node}")
}

/// The node that the rest of a key after its prefix names.
fn node(number: &str) -> Option<NodeId> {
    number.parse().ok().filter(|&n| n != 0).map(NodeId)
}

pub(crate) fn decode<T: DeserializeOwned + Serialize>(entry: &Entry) -> Result<T, MetaError> {
    let damaged = |why: String| MetaError::Damaged { path: entry.key.clone(), why };
    let contents = entry.contents()?;
    let record: T = serde_json::from_slice(contents).map_err(|e| damaged(e.to_string()))?;
    if encode(&record) != contents {
        return Err(damaged("a field is missing, unknown or there twice".into()));
    }
    Ok(record)
}

pub(crate) fn encode<T: Serialize>(record: &T) -> Vec<u8> {
    serde_json::to_vec(record).expect("names, numbers and lists always serialise")
}

/// Whether what an entry under [`NODES`] or [`CLUSTER`] holds can be believed.
///
/// # Errors
/// [`MetaError::Damaged`].
pub fn check(entry: &Entry) -> Result<(), MetaError> {
    if entry.key == CLUSTER {
        return decode::<ClusterRecord>(entry).map(drop);
    }
    let record: NodeRecord = decode(entry)?;
    if key(record.node) != entry.key {
        let why = "it is the record of another node".to_owned();
        return Err(MetaError::Damaged { path: entry.key.clone(), why });
    }
    Ok(())
}

pub(crate) fn put<T: Serialize>(key: String, expect: Expect, record: &T) -> Change {
    Change { key, expect, value: Some(encode(record)) }
}

/// The cluster's record; `None` in a store that belongs to none.
///
/// # Errors
/// [`MetaError`]; [`MetaError::Damaged`] for a damaged one.
pub async fn cluster(meta: &dyn Meta) -> Result<Option<(ClusterRecord, Revision)>, MetaError> {
    let Some(entry) = meta.get(CLUSTER).await? else { return Ok(None) };
    Ok(Some((decode(&entry)?, entry.revision)))
}

/// A node's record.
///
/// # Errors
/// As [`cluster`].
pub async fn get(
    meta: &dyn Meta,
    node: NodeId,
) -> Result<Option<(NodeRecord, Revision)>, MetaError> {
    let Some(entry) = meta.get(&key(node)).await? else { return Ok(None) };
    Ok(Some((decode(&entry)?, entry.revision)))
}

impl ClusterRecord {
    /// The change that writes it.
    #[must_use]
    pub fn put(&self, expect: Expect) -> Change {
        put(CLUSTER.to_owned(), expect, self)
    }
}

impl NodeRecord {
    /// The change that writes it.
    #[must_use]
    pub fn put(&self, expect: Expect) -> Change {
        put(key(self.node), expect, self)
    }
}

/// All nodes, and who of them is alive. A damaged record is left out, and the log says so.
///
/// # Errors
/// [`MetaError`].
pub async fn list(meta: &dyn Meta) -> Result<(Nodes, Revision), MetaError> {
    // The earlier revision: who follows from there misses no change between the two.
    let (alive, revision) = meta.list(ALIVE).await?;
    let (records, _) = meta.list(NODES).await?;
    let lives = |node: NodeId| alive.iter().any(|e| e.key == alive_key(node));
    let mut nodes = Nodes::new();
    for entry in &records {
        let named = entry.key.strip_prefix(NODES).and_then(node);
        match decode::<NodeRecord>(entry) {
            Ok(record) if Some(record.node) == named => {
                let alive = lives(record.node);
                nodes.insert(record.node, NodeView { record, alive });
            }
            Ok(_) => tracing::error!(key = entry.key, "it is the record of another node"),
            Err(error) => tracing::error!(%error, "a node is not seen"),
        }
    }
    Ok((nodes, revision))
}

/// Who of the nodes is alive, as the store knows now.
///
/// # Errors
/// [`MetaError`].
pub async fn alive(meta: &dyn Meta) -> Result<BTreeSet<NodeId>, MetaError> {
    let (alive, _) = meta.list(ALIVE).await?;
    let numbers = alive.iter().filter_map(|e| e.key.strip_prefix(ALIVE));
    Ok(numbers.filter_map(node).collect())
}

/// All nodes, every record of which can be read: whoever gives something that no two nodes may have does not
/// go by the rest.
///
/// # Errors
/// [`MetaError`].
pub async fn list_all(meta: &dyn Meta) -> Result<Nodes, MetaError> {
    let (records, _) = meta.list(NODES).await?;
    records.iter().try_for_each(check)?;
    Ok(list(meta).await?.0)
}

/// Keeps `told` equal to the nodes in the store, until nobody looks any more.
pub async fn follow(meta: &dyn Meta, told: watch::Sender<Nodes>) {
    while !told.is_closed() {
        match list(meta).await {
            Ok((nodes, revision)) => {
                told.send_if_modified(|old| {
                    let changed = *old != nodes;
                    *old = nodes;
                    changed
                });
                next_change(meta, revision).await;
            }
            Err(error) => {
                tracing::debug!(%error, "the nodes are not followed now");
                sleep(PAUSE).await;
            }
        }
    }
}

/// Waits until something has changed after `revision`, or it is time to look anyway.
async fn next_change(meta: &dyn Meta, revision: Revision) {
    let deadline = Instant::now() + LIST_AGAIN;
    let mut records = meta.watch(NODES, revision);
    let mut signs = meta.watch(ALIVE, revision);
    // A watch that ends has missed something: that is a change as well.
    let changed = async {
        tokio::select! {
            ended = records.next() => ended.is_err(),
            ended = signs.next() => ended.is_err(),
        }
    };
    if timeout_at(deadline, changed).await == Ok(true) {
        sleep(PAUSE).await;
    }
}

/// Sets or clears `drained` of a node. Says whether it was the other way before.
///
/// # Errors
/// [`MetaError`]; [`MetaError::Changed`] for a node that is not there.
pub async fn set_drained(meta: &dyn Meta, node: NodeId, drained: bool) -> Result<bool, MetaError> {
    loop {
        let Some((record, revision)) = get(meta, node).await? else {
            return Err(MetaError::Changed { key: key(node) });
        };
        if record.drained == drained {
            return Ok(false);
        }
        let record = NodeRecord { drained, ..record };
        match meta.commit(vec![record.put(Expect::At(revision))]).await {
            Ok(_) => return Ok(true),
            Err(MetaError::Changed { .. }) => {}
            Err(error) => return Err(error),
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::meta::model::{Fate, Model};
    use std::sync::Arc;

    pub(crate) fn store(model: &Model) -> impl Meta + use<> {
        model.client(Duration::from_secs(1), Box::new(|_| Fate::WELL))
    }

    pub(crate) fn record(number: u16, index: u8) -> NodeRecord {
        NodeRecord {
            data_dir: "/v".into(),
            node: NodeId(number),
            index: NodeIndex::new(index).unwrap(),
            name: format!("n{number}"),
            role: Role::Data,
            data: vec!["192.0.2.1:7480".parse().unwrap()],
            heartbeat: Vec::new(),
            portals: NodePortals::default(),
            join: None,
            failure_domain: "rack".into(),
            version: "1".into(),
            drained: false,
        }
    }

    /// What this version writes, every later one reads.
    #[test]
    fn the_golden_records_read() {
        let node = r#"{"node":3,"index":1,"name":"n3","role":"data","data":["192.0.2.1:7480"],
            "heartbeat":[],"join":"192.0.2.1:7481","portals":{"iscsi":["192.0.2.1:3260"],"nvme":[],"discovery":[]},
            "data_dir":"/v","failure_domain":"rack","version":"1","drained":false}"#;
        let mut expected = record(3, 1);
        expected.join = Some("192.0.2.1:7481".parse().unwrap());
        expected.portals.iscsi.push("192.0.2.1:3260".parse().unwrap());
        let entry =
            |key: String, value: &str| Entry::new(key, value.replace([' ', '\n'], ""), Revision(1));
        assert_eq!(decode::<NodeRecord>(&entry(key(NodeId(3)), node)).unwrap(), expected);
        let cluster = r#"{"id":"00000000-0000-0000-0000-000000000007","next_node":4,
            "own_members":true,"lease_ms":2000,"grace_ms":3000}"#;
        let record: ClusterRecord = decode(&entry(CLUSTER.into(), cluster)).unwrap();
        assert_eq!((record.id, record.next_node), (Uuid::from_u128(7), 4));
        let nobody = entry(key(NodeId(0)), &node.replace("\"node\":3", "\"node\":0"));
        assert!(decode::<NodeRecord>(&nobody).unwrap_err().to_string().contains("nodes/0"));
    }

    #[tokio::test(start_paused = true)]
    async fn who_follows_sees_nodes_come_and_live_and_go() {
        let model = Model::default();
        let meta = Arc::new(store(&model));
        let (tell, mut told) = watch::channel(Nodes::new());
        let followed = Arc::clone(&meta);
        let task = tokio::spawn(async move { follow(&*followed, tell).await });
        let at = meta.commit(vec![record(3, 0).put(Expect::Absent)]).await.unwrap();
        let seen = told.wait_for(|n| n.len() == 1).await.unwrap()[&NodeId(3)].clone();
        assert_eq!(seen, NodeView { record: record(3, 0), alive: false });
        let sign =
            Change { key: alive_key(NodeId(3)), expect: Expect::Absent, value: Some(vec![]) };
        meta.commit(vec![sign]).await.unwrap();
        told.wait_for(|n| n[&NodeId(3)].alive).await.unwrap();
        assert!(set_drained(&*meta, NodeId(3), true).await.unwrap());
        assert!(!set_drained(&*meta, NodeId(3), true).await.unwrap());
        told.wait_for(|n| n[&NodeId(3)].record.drained).await.unwrap();
        let (_, now) = get(&*meta, NodeId(3)).await.unwrap().unwrap();
        assert!(now > at);
        let gone = Change { key: key(NodeId(3)), expect: Expect::At(now), value: None };
        meta.commit(vec![gone]).await.unwrap();
        told.wait_for(Nodes::is_empty).await.unwrap();
        let absent = set_drained(&*meta, NodeId(3), true).await.unwrap_err();
        assert_eq!(absent, MetaError::Changed { key: "nodes/3".into() });
        drop(told);
        task.await.unwrap();
    }
}
