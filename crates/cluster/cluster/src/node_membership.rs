//! The steps by which a node joins and leaves a cluster. Each step is idempotent, so that an
//! interrupted node starts over.
//!
//! The node carries them out and updates `cluster.json` accordingly.

use std::net::IpAddr;

use http::Uri;
use peer::NodeId;

use crate::admission;
use crate::identity::{LocalStoreMember, NodeIndex};
use crate::join_error::JoinError;
use crate::nodes::{self, ClusterRecord, NodeRecord};
use crate::store::etcd::{EtcdStore, MemberInfo};
use crate::store::{Change, MetadataStore, Precondition, StoreError};

/// Most voting members of a store that the nodes run: two more would be slower and hardly safer.
pub const MAX_STORE_MEMBERS: usize = 3;

/// Prefix of the names of store members.
const STORE_MEMBER_PREFIX: &str = "node-";

/// Retries a change until no concurrent commit conflicts.
macro_rules! until_unchanged {
    ($attempt:expr) => {
        loop {
            match $attempt {
                Err(JoinError::Store(StoreError::Conflict { .. })) => {}
                done => break done,
            }
        }
    };
}

/// Creates the cluster `record` in an empty store; succeeds if the store belongs to it already.
///
/// # Errors
/// [`JoinError`].
pub async fn create_cluster(
    meta: &dyn MetadataStore,
    record: &ClusterRecord,
) -> Result<(), JoinError> {
    until_unchanged!(create_cluster_once(meta, record).await)
}

async fn create_cluster_once(
    meta: &dyn MetadataStore,
    record: &ClusterRecord,
) -> Result<(), JoinError> {
    match nodes::get_cluster(meta).await? {
        Some((found, _)) if found.id == record.id => Ok(()),
        Some((found, _)) => Err(JoinError::OtherCluster { found: found.id }),
        None => Ok(meta.commit(vec![record.to_change(Precondition::Absent)]).await.map(drop)?),
    }
}

/// Copies all entries of `from` to `to`. Equal entries in `to` are left as they are.
///
/// # Errors
/// [`JoinError::KeyConflict`]; [`JoinError::Store`] of either store.
pub async fn copy_store(from: &dyn MetadataStore, to: &dyn MetadataStore) -> Result<(), JoinError> {
    let (entries, _) = from.list("").await?;
    for entry in entries {
        let (key, value) = (entry.key.clone(), Some(entry.contents()?.to_vec()));
        let change = Change { key, precondition: Precondition::Absent, value };
        match to.commit(vec![change]).await {
            Ok(_) => {}
            Err(StoreError::Conflict { .. }) => {
                let existing = to.get(&entry.key).await?;
                if existing.is_none_or(|existing| existing.value != entry.value) {
                    return Err(JoinError::KeyConflict { key: entry.key });
                }
            }
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

/// The record of `cluster`.
///
/// # Errors
/// [`JoinError`].
pub async fn cluster_record(
    meta: &dyn MetadataStore,
    cluster: uuid::Uuid,
) -> Result<ClusterRecord, JoinError> {
    match nodes::get_cluster(meta).await? {
        Some((found, _)) if found.id == cluster => Ok(found),
        Some((found, _)) => Err(JoinError::OtherCluster { found: found.id }),
        None => Err(JoinError::NoCluster),
    }
}

/// Adds the record of a new node under a free index; returns the index. A node that is already
/// recorded keeps its index.
///
/// # Errors
/// [`JoinError`].
pub async fn add_node(meta: &dyn MetadataStore, new: &NodeRecord) -> Result<NodeIndex, JoinError> {
    until_unchanged!(add_node_once(meta, new, EntryPath::Founding).await)
}

/// Like [`add_node`], for a node admitted by a token. Fails if its join request no longer exists:
/// the node was removed, or the request expired.
///
/// # Errors
/// [`JoinError`]; [`JoinError::Removed`].
pub async fn add_admitted_node(
    meta: &dyn MetadataStore,
    new: &NodeRecord,
) -> Result<NodeIndex, JoinError> {
    until_unchanged!(add_node_once(meta, new, EntryPath::Admission).await)
}

/// How a node enters a cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum EntryPath {
    /// It creates the cluster.
    Founding,
    /// It was admitted by a token.
    Admission,
}

async fn add_node_once(
    meta: &dyn MetadataStore,
    new: &NodeRecord,
    entry_path: EntryPath,
) -> Result<NodeIndex, JoinError> {
    let Some((cluster, revision)) = nodes::get_cluster(meta).await? else {
        return Err(JoinError::NoCluster);
    };
    let nodes = nodes::list_strict(meta).await?;
    if let Some(known) = nodes.get(&new.node) {
        return Ok(known.record.index);
    }
    let taken = |index: &NodeIndex| nodes.values().any(|n| n.record.index == *index);
    let index = NodeIndex::all().find(|index| !taken(index)).ok_or(JoinError::ClusterFull)?;
    let record = NodeRecord { index, ..new.clone() };
    // Rewrite the cluster's record: it makes concurrent entries conflict, since they list different
    // nodes.
    let mut changes = vec![
        cluster.to_change(Precondition::AtRevision(revision)),
        record.to_change(Precondition::Absent),
    ];
    if entry_path == EntryPath::Admission {
        changes
            .push(admission::admission_condition(meta, new.node).await?.ok_or(JoinError::Removed)?);
    }
    meta.commit(changes).await?;
    Ok(index)
}

/// Updates the record of a member; its index and whether it is drained stay unchanged.
///
/// # Errors
/// [`JoinError::Removed`]; [`JoinError::Store`].
pub async fn update_node(meta: &dyn MetadataStore, now: &NodeRecord) -> Result<(), JoinError> {
    until_unchanged!(update_node_once(meta, now).await)
}

async fn update_node_once(meta: &dyn MetadataStore, now: &NodeRecord) -> Result<(), JoinError> {
    let Some((stored, revision)) = nodes::get_node(meta, now.node).await? else {
        return Err(JoinError::Removed);
    };
    let record = NodeRecord { is_drained: stored.is_drained, index: stored.index, ..now.clone() };
    if record != stored {
        meta.commit(vec![record.to_change(Precondition::AtRevision(revision))]).await?;
    }
    Ok(())
}

/// Removes a node's record, if present, and its join requests: to return, it must ask again.
///
/// # Errors
/// [`JoinError::Store`].
pub async fn remove_node(meta: &dyn MetadataStore, node: NodeId) -> Result<(), JoinError> {
    until_unchanged!(remove_node_once(meta, node).await)
}

async fn remove_node_once(meta: &dyn MetadataStore, node: NodeId) -> Result<(), JoinError> {
    match node_removal(meta, node).await? {
        Some(changes) => Ok(meta.commit(changes).await.map(drop)?),
        None => Ok(()),
    }
}

/// Like [`remove_node`], for a node that is dead: fails while it is alive.
///
/// # Errors
/// [`JoinError::StillAlive`]; [`JoinError::Store`].
pub async fn remove_dead_node(meta: &dyn MetadataStore, node: NodeId) -> Result<(), JoinError> {
    until_unchanged!(remove_dead_node_once(meta, node).await)
}

async fn remove_dead_node_once(meta: &dyn MetadataStore, node: NodeId) -> Result<(), JoinError> {
    let alive = nodes::alive_key(node);
    if meta.get(&alive).await?.is_some() {
        return Err(JoinError::StillAlive { node });
    }
    if let Some(mut changes) = node_removal(meta, node).await? {
        changes.push(Change { key: alive, precondition: Precondition::Absent, value: None });
        meta.commit(changes).await?;
    }
    Ok(())
}

/// The changes that remove a node's record; `None` if there is none.
async fn node_removal(
    meta: &dyn MetadataStore,
    node: NodeId,
) -> Result<Option<Vec<Change>>, JoinError> {
    let key = nodes::node_key(node);
    let Some(stored) = meta.get(&key).await? else { return Ok(None) };
    let expect = Precondition::AtRevision(stored.revision);
    let mut changes = admission::join_removals(meta, node).await?;
    changes.push(Change { key, precondition: expect, value: None });
    Ok(Some(changes))
}

/// The entry of `own` among the store's members.
fn find_local_member<'a>(
    members: &'a [MemberInfo],
    own: &LocalStoreMember,
) -> Option<&'a MemberInfo> {
    members.iter().find(|m| m.peer_urls.contains(&own.peer_url))
}

/// Adds a member to the store as a learner, without a vote. Returns name and URL of all members, as
/// the new one needs them.
///
/// # Errors
/// [`JoinError::Store`]; [`JoinError::LearnerPending`] while another learner exists.
pub async fn add_learner(
    store: &EtcdStore,
    own: &LocalStoreMember,
) -> Result<Vec<(String, String)>, JoinError> {
    let mut members = store.members().await?;
    if find_local_member(&members, own).is_none() {
        if let Some(other) = members.iter().find(|m| m.is_learner) {
            return Err(JoinError::LearnerPending { member: member_label(other).to_owned() });
        }
        store.add_member(&own.peer_url, true).await?;
        members = store.members().await?;
    }
    let named = members.into_iter().flat_map(|m| {
        // A member that has never started has no name yet.
        let name = if m.name.is_empty() { own.name.clone() } else { m.name };
        m.peer_urls.into_iter().map(move |url| (name.clone(), url))
    });
    Ok(named.collect())
}

/// The name of a node's store member; node numbers are never reused.
#[must_use]
pub fn store_member_name(node: NodeId) -> String {
    format!("{STORE_MEMBER_PREFIX}{node}")
}

/// The node whose store member has this name.
#[must_use]
pub fn node_of_store_member(name: &str) -> Option<NodeId> {
    name.strip_prefix(STORE_MEMBER_PREFIX)?.parse().ok().map(NodeId)
}

/// A member's name, or its peer URL if it has never started.
#[must_use]
pub fn member_label(member: &MemberInfo) -> &str {
    match &*member.name {
        "" => member.peer_urls.first().map_or("without an address", String::as_str),
        name => name,
    }
}

/// Finds a member by its name or its peer URL, with or without scheme.
#[must_use]
pub fn find_member<'a>(members: &'a [MemberInfo], which: &str) -> Option<&'a MemberInfo> {
    let at =
        |url: &String| url == which || url.split_once("://").is_some_and(|(_, at)| at == which);
    let named =
        |m: &&MemberInfo| (m.name == which && !which.is_empty()) || m.peer_urls.iter().any(at);
    members.iter().find(named)
}

/// Promotes a learner to voter. etcd refuses until it has caught up.
///
/// # Errors
/// [`JoinError::Store`]; [`JoinError::Removed`].
pub async fn promote_learner(store: &EtcdStore, own: &LocalStoreMember) -> Result<(), JoinError> {
    let members = store.members().await?;
    match find_local_member(&members, own) {
        Some(member) if member.is_learner => Ok(store.promote_member(member.id).await?),
        Some(_) => Ok(()),
        None => Err(JoinError::Removed),
    }
}

/// Removes from the store the member called `name`, or one without a name (it has never started) at
/// one of the addresses `at`; never the only member.
///
/// # Errors
/// [`JoinError::Store`].
pub async fn remove_member(store: &EtcdStore, name: &str, at: &[IpAddr]) -> Result<(), JoinError> {
    let members = store.members().await?;
    match members.iter().find(|m| matches_node(m, name, at)) {
        Some(member) if members.len() > 1 => Ok(store.remove_member(member.id).await?),
        _ => Ok(()),
    }
}

fn matches_node(member: &MemberInfo, name: &str, at: &[IpAddr]) -> bool {
    let host = |url: &String| {
        let uri = url.parse::<Uri>().ok()?;
        uri.host()?.trim_start_matches('[').trim_end_matches(']').parse::<IpAddr>().ok()
    };
    let is_at = |url| host(url).is_some_and(|host| at.contains(&host));
    match &*member.name {
        "" => member.peer_urls.iter().any(is_at),
        own => own == name,
    }
}

/// Client URLs of the voters, the node's own first.
#[must_use]
pub fn voter_endpoints(members: &[MemberInfo], own: Option<&LocalStoreMember>) -> Vec<String> {
    let voters = members.iter().filter(|m| !m.is_learner);
    let mut urls: Vec<_> = voters.flat_map(|m| m.client_urls.iter().cloned()).collect();
    urls.sort();
    urls.dedup();
    urls.sort_by_key(|url| own.is_none_or(|own| own.client_url != *url));
    urls
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::time::Duration;

    use uuid::Uuid;

    use super::*;
    use crate::nodes::tests::{record, store};
    use crate::store::memory::{CallDelivery, CallKind, MemoryStore, MemoryStoreClient};

    const CLUSTER: Uuid = Uuid::from_u128(7);

    fn cluster() -> ClusterRecord {
        ClusterRecord {
            id: CLUSTER,
            next_node: 2,
            runs_own_store: true,
            lease_ms: 2000,
            grace_ms: 3000,
        }
    }

    fn put(key: &str, value: &str) -> Change {
        Change { key: key.into(), precondition: Precondition::Absent, value: Some(value.into()) }
    }

    /// A client that dies at its commit number `at`: before it takes effect, or without an answer.
    fn dies(model: &MemoryStore, at: usize, done: bool) -> MemoryStoreClient {
        let count = AtomicUsize::new(0);
        let delivery = move |call| match call {
            CallKind::Commit if count.fetch_add(1, Ordering::Relaxed) >= at => CallDelivery::Sent {
                request_delay: done.then_some(Duration::ZERO),
                response_delay: None,
            },
            _ => CallDelivery::IMMEDIATE,
        };
        model.client(Duration::from_secs(1), Box::new(delivery))
    }

    async fn contents(meta: &dyn MetadataStore) -> Vec<(String, String)> {
        let (entries, _) = meta.list("").await.unwrap();
        let text = |bytes| String::from_utf8(bytes).unwrap();
        entries.into_iter().map(|e| (e.key, text(e.value))).collect()
    }

    async fn move_in(
        from: &dyn MetadataStore,
        to: &dyn MetadataStore,
    ) -> Result<NodeIndex, JoinError> {
        create_cluster(to, &cluster()).await?;
        copy_store(from, to).await?;
        add_node(to, &record(1, 0)).await
    }

    #[tokio::test(start_paused = true)]
    async fn a_move_that_died_anywhere_is_carried_on() {
        let alone = MemoryStore::default();
        let from = store(&alone);
        let changes = vec![put("names/web", "1"), put("volumes/1", "{}"), put("volumes/2", "{}")];
        from.commit(changes).await.unwrap();
        let mut expected = None;
        for (at, done) in (0..6).flat_map(|at| [(at, false), (at, true)]) {
            let model = MemoryStore::default();
            let died = move_in(&from, &dies(&model, at, done)).await;
            // Five commits; nothing depends on the answer of the last one.
            assert_eq!(died.is_err(), at < 5, "{at}");
            let to = store(&model);
            assert_eq!(move_in(&from, &to).await.unwrap().get(), 0);
            let now = contents(&to).await;
            assert_eq!(&now, expected.get_or_insert(now.clone()), "{at} {done}");
            assert_eq!(now.len(), 5);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_store_that_is_not_ours_is_left_alone() {
        let (alone, model) = (MemoryStore::default(), MemoryStore::default());
        let (from, to) = (store(&alone), store(&model));
        from.commit(vec![put("volumes/1", "{}")]).await.unwrap();
        to.commit(vec![put("volumes/1", "other")]).await.unwrap();
        let clash = move_in(&from, &to).await.unwrap_err();
        assert_eq!(clash, JoinError::KeyConflict { key: "volumes/1".into() });
        let other = ClusterRecord { id: Uuid::from_u128(8), ..cluster() };
        let refused = create_cluster(&to, &other).await.unwrap_err();
        assert_eq!(refused, JoinError::OtherCluster { found: CLUSTER });
        let refused = cluster_record(&to, Uuid::from_u128(8)).await.unwrap_err();
        assert!(matches!(refused, JoinError::OtherCluster { .. }));
        let empty = MemoryStore::default();
        assert_eq!(cluster_record(&store(&empty), CLUSTER).await, Err(JoinError::NoCluster));
    }

    #[tokio::test(start_paused = true)]
    async fn joiners_at_the_same_time_differ() {
        let model = MemoryStore::default();
        create_cluster(&store(&model), &cluster()).await.unwrap();
        let joins = (2..18).map(|number| {
            // Slow answers, so that the commits conflict.
            let slow = CallDelivery::Sent {
                request_delay: Some(Duration::from_millis(3)),
                response_delay: Some(Duration::from_millis(3)),
            };
            let meta = Arc::new(model.client(Duration::from_secs(1), Box::new(move |_| slow)));
            async move {
                let new = record(number, 0);
                let index = add_node(&*meta, &new).await.unwrap();
                assert_eq!(add_node(&*meta, &new).await, Ok(index), "twice is once");
                (NodeId(number), index)
            }
        });
        let joined = futures_util::future::join_all(joins).await;
        let mut indices: Vec<_> = joined.iter().map(|(_, index)| index.get()).collect();
        indices.sort_unstable();
        assert_eq!(indices, (0..16).collect::<Vec<_>>());
        let meta = store(&model);
        assert_eq!(add_node(&meta, &record(18, 0)).await, Err(JoinError::ClusterFull));
        // An index is free again after its node has left.
        remove_node(&meta, NodeId(5)).await.unwrap();
        remove_node(&meta, NodeId(5)).await.unwrap();
        let freed = joined.iter().find(|(node, _)| node.0 == 5).unwrap().1;
        assert_eq!(add_node(&meta, &record(18, 0)).await, Ok(freed));
    }

    #[tokio::test(start_paused = true)]
    async fn a_record_is_brought_up_to_date_and_a_removed_node_told() {
        let model = MemoryStore::default();
        let meta = store(&model);
        create_cluster(&meta, &cluster()).await.unwrap();
        add_node(&meta, &record(1, 0)).await.unwrap();
        nodes::set_drained(&meta, NodeId(1), true).await.unwrap();
        let moved = NodeRecord { name: "other".into(), ..record(1, 3) };
        update_node(&meta, &moved).await.unwrap();
        let (stored, _) = nodes::get_node(&meta, NodeId(1)).await.unwrap().unwrap();
        assert_eq!(
            (stored.name.as_str(), stored.index.get(), stored.is_drained),
            ("other", 0, true)
        );
        remove_node(&meta, NodeId(1)).await.unwrap();
        assert_eq!(update_node(&meta, &moved).await, Err(JoinError::Removed));
    }

    #[tokio::test(start_paused = true)]
    async fn a_node_that_is_alive_again_is_not_removed_as_gone() {
        let model = MemoryStore::default();
        let meta = store(&model);
        create_cluster(&meta, &cluster()).await.unwrap();
        add_node(&meta, &record(2, 0)).await.unwrap();
        let alive = |expect, value| Change {
            key: nodes::alive_key(NodeId(2)),
            precondition: expect,
            value,
        };
        let at = meta.commit(vec![alive(Precondition::Absent, Some(vec![]))]).await.unwrap();
        let back = JoinError::StillAlive { node: NodeId(2) };
        assert_eq!(remove_dead_node(&meta, NodeId(2)).await, Err(back));
        assert!(nodes::get_node(&meta, NodeId(2)).await.unwrap().is_some());
        meta.commit(vec![alive(Precondition::AtRevision(at), None)]).await.unwrap();
        remove_dead_node(&meta, NodeId(2)).await.unwrap();
        remove_dead_node(&meta, NodeId(2)).await.unwrap();
        assert_eq!(nodes::get_node(&meta, NodeId(2)).await.unwrap(), None);
    }

    #[test]
    fn a_member_that_has_never_started_is_known_by_its_address() {
        let member = |name: &str, at: &str| MemberInfo {
            id: 1,
            name: name.into(),
            peer_urls: vec![format!("https://{at}:2380")],
            client_urls: Vec::new(),
            is_learner: true,
        };
        let at: Vec<IpAddr> = vec!["192.0.2.4".parse().unwrap(), "2001:db8::4".parse().unwrap()];
        let is_of_node_4 = |member| matches_node(&member, "node-4", &at);
        assert!(is_of_node_4(member("", "192.0.2.4")) && is_of_node_4(member("", "[2001:db8::4]")));
        assert!(is_of_node_4(member("node-4", "192.0.2.9")));
        // A named member is matched by its name only, whatever its address.
        assert!(!is_of_node_4(member("node-5", "192.0.2.4")));
        assert!(!is_of_node_4(member("", "192.0.2.5")) && !is_of_node_4(member("", "?")));
    }

    #[test]
    fn members_are_called_by_name_or_by_address() {
        let member = |name: &str, at: &str| MemberInfo {
            id: 1,
            name: name.into(),
            peer_urls: vec![format!("https://{at}")],
            client_urls: Vec::new(),
            is_learner: true,
        };
        let members = [member("node-1", "a:2380"), member("", "b:2380")];
        let found = |which| find_member(&members, which).map(member_label);
        assert_eq!(found("node-1"), Some("node-1"));
        assert_eq!(found("b:2380"), Some("https://b:2380"));
        assert_eq!(found("https://b:2380"), Some("https://b:2380"));
        assert_eq!((found(""), found("b"), found("2380")), (None, None, None));
    }

    #[test]
    fn the_own_member_is_asked_first() {
        let member = |at: &str, is_learner| MemberInfo {
            id: 1,
            name: at.into(),
            peer_urls: vec![format!("http://{at}:2380")],
            client_urls: vec![format!("http://{at}:2379")],
            is_learner,
        };
        let own = LocalStoreMember {
            name: "b".into(),
            peer_url: "http://b:2380".into(),
            client_url: "http://b:2379".into(),
        };
        let members = [member("a", false), member("b", false), member("c", true)];
        assert_eq!(voter_endpoints(&members, Some(&own)), ["http://b:2379", "http://a:2379"]);
        assert_eq!(voter_endpoints(&members, None), ["http://a:2379", "http://b:2379"]);
    }
}
