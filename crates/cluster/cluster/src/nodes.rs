//! The records of a cluster and its nodes in the metadata store, and which nodes are alive.
//!
//! | key | holds | written by |
//! |---|---|---|
//! | `cluster` | [`ClusterRecord`] | the first node; a joining node takes a number from it |
//! | `nodes/ID` | [`NodeRecord`] | its node; `drained` by any node |
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
use crate::store::{Change, Entry, MetadataStore, Precondition, Revision, StoreError};

/// Key of the cluster's record.
pub const CLUSTER_KEY: &str = "cluster";

/// Prefix of the keys of nodes' records.
pub const NODE_KEY_PREFIX: &str = "nodes/";

/// Prefix of the liveness keys.
pub const ALIVE_KEY_PREFIX: &str = "alive/";

/// How long a silent node still counts as alive, at most.
pub const ALIVE_TTL: Duration = Duration::from_secs(10);

/// Longest time between two listings of the records, whatever the watch reports.
const MAX_LIST_INTERVAL: Duration = Duration::from_secs(30);

/// Pause before a failed store call is retried.
const RETRY_PAUSE: Duration = Duration::from_secs(1);

/// The record of the cluster.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ClusterRecord {
    /// Its identity.
    pub id: Uuid,
    /// The number of the next node. No number is assigned twice.
    pub next_node: u16,
    /// Whether the nodes run the store members themselves.
    #[serde(rename = "own_members")]
    pub runs_own_store: bool,
    /// Lease duration, in milliseconds; the same at all nodes.
    pub lease_ms: u64,
    /// Lease grace period, in milliseconds; the same at all nodes.
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

/// The record of a node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NodeRecord {
    /// Its number, never 0.
    #[serde(with = "node_id_number")]
    pub node: NodeId,
    /// Its index, unique among the present nodes.
    pub index: NodeIndex,
    /// Its name.
    pub name: String,
    /// Its role.
    pub role: Role,
    /// Where other nodes reach it for data, one address for each network.
    #[serde(rename = "data")]
    pub data_addresses: Vec<SocketAddr>,
    /// Where other nodes reach it for leases only.
    #[serde(rename = "heartbeat")]
    pub heartbeat_addresses: Vec<SocketAddr>,
    /// Where it accepts join requests.
    #[serde(rename = "join")]
    pub join_address: Option<SocketAddr>,
    /// Where it serves initiators: the addresses it listens on.
    pub portals: NodePortals,
    /// Its data directory, the default place of volume images.
    pub data_dir: PathBuf,
    /// Its failure domain.
    pub failure_domain: String,
    /// Its version of the program.
    pub version: String,
    /// Whether it is drained.
    #[serde(rename = "drained")]
    pub is_drained: bool,
}

/// A node, as seen by other nodes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeView {
    /// Its record.
    pub record: NodeRecord,
    /// Whether its liveness key is present.
    pub is_alive: bool,
}

/// All nodes of the cluster.
pub type Nodes = BTreeMap<NodeId, NodeView>;

/// Serializes a node id as a number.
mod node_id_number {
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
pub fn node_key(node: NodeId) -> String {
    format!("{NODE_KEY_PREFIX}{node}")
}

/// A node's liveness key.
#[must_use]
pub fn alive_key(node: NodeId) -> String {
    format!("{ALIVE_KEY_PREFIX}{node}")
}

/// Parses the node id in a key, after its prefix.
fn parse_node_id(number: &str) -> Option<NodeId> {
    number.parse().ok().filter(|&n| n != 0).map(NodeId)
}

pub(crate) fn decode<T: DeserializeOwned + Serialize>(entry: &Entry) -> Result<T, StoreError> {
    let damaged = |why: String| StoreError::Damaged { path: entry.key.clone(), why };
    let contents = entry.contents()?;
    let record: T = serde_json::from_slice(contents).map_err(|e| damaged(e.to_string()))?;
    if encode(&record) != contents {
        return Err(damaged("a field is missing, unknown or duplicate".into()));
    }
    Ok(record)
}

pub(crate) fn encode<T: Serialize>(record: &T) -> Vec<u8> {
    serde_json::to_vec(record).expect("names, numbers and lists always serialise")
}

/// Checks that an entry under [`NODE_KEY_PREFIX`] or [`CLUSTER_KEY`] is valid.
///
/// # Errors
/// [`StoreError::Damaged`].
pub fn validate_entry(entry: &Entry) -> Result<(), StoreError> {
    if entry.key == CLUSTER_KEY {
        return decode::<ClusterRecord>(entry).map(drop);
    }
    let record: NodeRecord = decode(entry)?;
    if node_key(record.node) != entry.key {
        let why = "it is the record of another node".to_owned();
        return Err(StoreError::Damaged { path: entry.key.clone(), why });
    }
    Ok(())
}

pub(crate) fn put_change<T: Serialize>(key: String, expect: Precondition, record: &T) -> Change {
    Change { key, precondition: expect, value: Some(encode(record)) }
}

/// The cluster's record; `None` if the store belongs to no cluster.
///
/// # Errors
/// [`StoreError`]; [`StoreError::Damaged`] for a damaged one.
pub async fn get_cluster(
    meta: &dyn MetadataStore,
) -> Result<Option<(ClusterRecord, Revision)>, StoreError> {
    let Some(entry) = meta.get(CLUSTER_KEY).await? else { return Ok(None) };
    Ok(Some((decode(&entry)?, entry.revision)))
}

/// A node's record, and its revision.
///
/// # Errors
/// As [`get_cluster`].
pub async fn get_node(
    meta: &dyn MetadataStore,
    node: NodeId,
) -> Result<Option<(NodeRecord, Revision)>, StoreError> {
    let Some(entry) = meta.get(&node_key(node)).await? else { return Ok(None) };
    Ok(Some((decode(&entry)?, entry.revision)))
}

impl ClusterRecord {
    /// The change that writes it.
    #[must_use]
    pub fn to_change(&self, expect: Precondition) -> Change {
        put_change(CLUSTER_KEY.to_owned(), expect, self)
    }
}

impl NodeRecord {
    /// The change that writes it.
    #[must_use]
    pub fn to_change(&self, expect: Precondition) -> Change {
        put_change(node_key(self.node), expect, self)
    }
}

/// All nodes, and which of them are alive. Damaged records are logged and left out.
///
/// # Errors
/// [`StoreError`].
pub async fn list_readable(meta: &dyn MetadataStore) -> Result<(Nodes, Revision), StoreError> {
    // Return the earlier revision: a watch from there misses no change between the two lists.
    let (alive, revision) = meta.list(ALIVE_KEY_PREFIX).await?;
    let (records, _) = meta.list(NODE_KEY_PREFIX).await?;
    let is_alive = |node: NodeId| alive.iter().any(|e| e.key == alive_key(node));
    let mut nodes = Nodes::new();
    for entry in &records {
        let key_node = entry.key.strip_prefix(NODE_KEY_PREFIX).and_then(parse_node_id);
        match decode::<NodeRecord>(entry) {
            Ok(record) if Some(record.node) == key_node => {
                let alive = is_alive(record.node);
                nodes.insert(record.node, NodeView { record, is_alive: alive });
            }
            Ok(_) => tracing::error!(key = entry.key, "it is the record of another node"),
            Err(error) => tracing::error!(%error, "damaged node record; the node is ignored"),
        }
    }
    Ok((nodes, revision))
}

/// The nodes whose liveness keys are present now.
///
/// # Errors
/// [`StoreError`].
pub async fn list_alive(meta: &dyn MetadataStore) -> Result<BTreeSet<NodeId>, StoreError> {
    let (alive, _) = meta.list(ALIVE_KEY_PREFIX).await?;
    let keys = alive.iter().filter_map(|e| e.key.strip_prefix(ALIVE_KEY_PREFIX));
    Ok(keys.filter_map(parse_node_id).collect())
}

/// All nodes; fails if any record is damaged. For callers that assign something unique.
///
/// # Errors
/// [`StoreError`].
pub async fn list_strict(meta: &dyn MetadataStore) -> Result<Nodes, StoreError> {
    let (records, _) = meta.list(NODE_KEY_PREFIX).await?;
    records.iter().try_for_each(validate_entry)?;
    Ok(list_readable(meta).await?.0)
}

/// Keeps `sender` equal to the nodes in the store, until all receivers are dropped.
pub async fn watch_nodes(meta: &dyn MetadataStore, sender: watch::Sender<Nodes>) {
    while !sender.is_closed() {
        match list_readable(meta).await {
            Ok((nodes, revision)) => {
                sender.send_if_modified(|old| {
                    let changed = *old != nodes;
                    *old = nodes;
                    changed
                });
                wait_for_change(meta, revision).await;
            }
            Err(error) => {
                tracing::debug!(%error, "cannot watch the nodes");
                sleep(RETRY_PAUSE).await;
            }
        }
    }
}

/// Waits for a change after `revision`, at most [`MAX_LIST_INTERVAL`].
async fn wait_for_change(meta: &dyn MetadataStore, revision: Revision) {
    let deadline = Instant::now() + MAX_LIST_INTERVAL;
    let mut records = meta.watch(NODE_KEY_PREFIX, revision);
    let mut liveness = meta.watch(ALIVE_KEY_PREFIX, revision);
    // A watch that ends has missed changes: that counts as a change.
    let changed = async {
        tokio::select! {
            ended = records.next_event() => ended.is_err(),
            ended = liveness.next_event() => ended.is_err(),
        }
    };
    if timeout_at(deadline, changed).await == Ok(true) {
        sleep(RETRY_PAUSE).await;
    }
}

/// Sets or clears `drained` of a node. Returns whether that changed it.
///
/// # Errors
/// [`StoreError`]; [`StoreError::Conflict`] if there is no such node.
pub async fn set_drained(
    meta: &dyn MetadataStore,
    node: NodeId,
    drained: bool,
) -> Result<bool, StoreError> {
    loop {
        let Some((record, revision)) = get_node(meta, node).await? else {
            return Err(StoreError::Conflict { key: node_key(node) });
        };
        if record.is_drained == drained {
            return Ok(false);
        }
        let record = NodeRecord { is_drained: drained, ..record };
        match meta.commit(vec![record.to_change(Precondition::AtRevision(revision))]).await {
            Ok(_) => return Ok(true),
            Err(StoreError::Conflict { .. }) => {}
            Err(error) => return Err(error),
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::store::memory::{CallDelivery, MemoryStore};
    use std::sync::Arc;

    pub(crate) fn store(model: &MemoryStore) -> impl MetadataStore + use<> {
        model.client(Duration::from_secs(1), Box::new(|_| CallDelivery::IMMEDIATE))
    }

    pub(crate) fn record(number: u16, index: u8) -> NodeRecord {
        NodeRecord {
            data_dir: "/v".into(),
            node: NodeId(number),
            index: NodeIndex::new(index).unwrap(),
            name: format!("n{number}"),
            role: Role::Data,
            data_addresses: vec!["192.0.2.1:7480".parse().unwrap()],
            heartbeat_addresses: Vec::new(),
            portals: NodePortals::default(),
            join_address: None,
            failure_domain: "rack".into(),
            version: "1".into(),
            is_drained: false,
        }
    }

    /// Later versions must be able to read what this version writes.
    #[test]
    fn the_golden_records_read() {
        let node = r#"{"node":3,"index":1,"name":"n3","role":"data","data":["192.0.2.1:7480"],
            "heartbeat":[],"join":"192.0.2.1:7481","portals":{"iscsi":["192.0.2.1:3260"],"nvme":[],"discovery":[]},
            "data_dir":"/v","failure_domain":"rack","version":"1","drained":false}"#;
        let mut expected = record(3, 1);
        expected.join_address = Some("192.0.2.1:7481".parse().unwrap());
        expected.portals.iscsi.push("192.0.2.1:3260".parse().unwrap());
        let entry =
            |key: String, value: &str| Entry::new(key, value.replace([' ', '\n'], ""), Revision(1));
        assert_eq!(decode::<NodeRecord>(&entry(node_key(NodeId(3)), node)).unwrap(), expected);
        let cluster = r#"{"id":"00000000-0000-0000-0000-000000000007","next_node":4,
            "own_members":true,"lease_ms":2000,"grace_ms":3000}"#;
        let record: ClusterRecord = decode(&entry(CLUSTER_KEY.into(), cluster)).unwrap();
        assert_eq!((record.id, record.next_node), (Uuid::from_u128(7), 4));
        let no_node = entry(node_key(NodeId(0)), &node.replace("\"node\":3", "\"node\":0"));
        assert!(decode::<NodeRecord>(&no_node).unwrap_err().to_string().contains("nodes/0"));
    }

    #[tokio::test(start_paused = true)]
    async fn who_follows_sees_nodes_come_and_live_and_go() {
        let model = MemoryStore::default();
        let meta = Arc::new(store(&model));
        let (sender, mut receiver) = watch::channel(Nodes::new());
        let followed = Arc::clone(&meta);
        let task = tokio::spawn(async move { watch_nodes(&*followed, sender).await });
        let at = meta.commit(vec![record(3, 0).to_change(Precondition::Absent)]).await.unwrap();
        let seen = receiver.wait_for(|n| n.len() == 1).await.unwrap()[&NodeId(3)].clone();
        assert_eq!(seen, NodeView { record: record(3, 0), is_alive: false });
        let sign = Change {
            key: alive_key(NodeId(3)),
            precondition: Precondition::Absent,
            value: Some(vec![]),
        };
        meta.commit(vec![sign]).await.unwrap();
        receiver.wait_for(|n| n[&NodeId(3)].is_alive).await.unwrap();
        assert!(set_drained(&*meta, NodeId(3), true).await.unwrap());
        assert!(!set_drained(&*meta, NodeId(3), true).await.unwrap());
        receiver.wait_for(|n| n[&NodeId(3)].record.is_drained).await.unwrap();
        let (_, now) = get_node(&*meta, NodeId(3)).await.unwrap().unwrap();
        assert!(now > at);
        let gone = Change {
            key: node_key(NodeId(3)),
            precondition: Precondition::AtRevision(now),
            value: None,
        };
        meta.commit(vec![gone]).await.unwrap();
        receiver.wait_for(Nodes::is_empty).await.unwrap();
        let absent = set_drained(&*meta, NodeId(3), true).await.unwrap_err();
        assert_eq!(absent, StoreError::Conflict { key: "nodes/3".into() });
        drop(receiver);
        task.await.unwrap();
    }
}
