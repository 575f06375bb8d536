//! How a node comes into a cluster and out of it: steps over the store, each of which may be done
//! twice, so that whoever was interrupted begins again.
//!
//! What carries them out, and keeps `cluster.json` in step, is the node.

use std::net::IpAddr;

use http::Uri;
use peer::NodeId;

use crate::admission;
use crate::identity::{MAX_NODES, NodeIndex, OwnMember};
use crate::meta::etcd::{Etcd, MemberInfo};
use crate::meta::{Change, Expect, Meta, MetaError};
use crate::nodes::{self, ClusterRecord, NodeRecord};

/// Most members of a store of the nodes' own: two more would make it slower and hardly safer.
pub const MAX_MEMBERS: usize = 3;

/// Why a node does not get on.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum JoinError {
    /// The store.
    #[error(transparent)]
    Store(#[from] MetaError),
    /// The store belongs to another cluster.
    #[error("the store belongs to another cluster ({found}): each cluster has a store of its own")]
    OtherCluster {
        /// Which one.
        found: uuid::Uuid,
    },
    /// The store belongs to no cluster.
    #[error("the store belongs to no cluster; did `windrose cluster init` end well?")]
    NoCluster,
    /// The store has a key already, with other contents.
    #[error("the store has {key} already, with other contents: a new cluster takes a new store")]
    Clash {
        /// The key.
        key: String,
    },
    /// Every index is taken.
    #[error("the cluster has {MAX_NODES} nodes already; let one leave first")]
    Full,
    /// A setting is not what it is at the others.
    #[error("{setting} is {here} here and {there} in the cluster; set it to {there}")]
    Setting {
        /// Which one.
        setting: &'static str,
        /// Its value here.
        here: u64,
        /// Its value at the others.
        there: u64,
    },
    /// Another member has not learnt enough yet; etcd takes one learner at a time.
    #[error(
        "member {which} of the store has not learnt enough to vote, and only one learns at a time; if it does \
         not get on, `windrose cluster leave --node {which} --force` at a node of the cluster removes it"
    )]
    Learning {
        /// Its name, or where the others would reach it if it has never started.
        which: String,
    },
    /// The node's record is gone.
    #[error(
        "this node was removed from the cluster and serves nothing; `windrose cluster leave --force` \
         makes it a node by itself"
    )]
    Removed,
    /// A node that was to be removed as one that does not come back.
    #[error(
        "node {node} is alive again and stays in the cluster; `windrose cluster leave` there takes it out in order"
    )]
    Alive {
        /// Which one.
        node: NodeId,
    },
}

/// Changes a record until nobody else does at the same time.
macro_rules! until_unchanged {
    ($attempt:expr) => {
        loop {
            match $attempt {
                Err(JoinError::Store(MetaError::Changed { .. })) => {}
                done => break done,
            }
        }
    };
}

/// Begins the cluster `record` in an empty store, or finds that it has begun there.
///
/// # Errors
/// [`JoinError`].
pub async fn begin(meta: &dyn Meta, record: &ClusterRecord) -> Result<(), JoinError> {
    until_unchanged!(begin_once(meta, record).await)
}

async fn begin_once(meta: &dyn Meta, record: &ClusterRecord) -> Result<(), JoinError> {
    match nodes::cluster(meta).await? {
        Some((found, _)) if found.id == record.id => Ok(()),
        Some((found, _)) => Err(JoinError::OtherCluster { found: found.id }),
        None => Ok(meta.commit(vec![record.put(Expect::Absent)]).await.map(drop)?),
    }
}

/// Copies everything that `from` holds to `to`. What is there with the same contents is done.
///
/// # Errors
/// [`JoinError::Clash`]; [`JoinError::Store`] of either store.
pub async fn copy(from: &dyn Meta, to: &dyn Meta) -> Result<(), JoinError> {
    let (entries, _) = from.list("").await?;
    for entry in entries {
        let (key, value) = (entry.key.clone(), Some(entry.contents()?.to_vec()));
        let change = Change { key, expect: Expect::Absent, value };
        match to.commit(vec![change]).await {
            Ok(_) => {}
            Err(MetaError::Changed { .. }) => {
                let held = to.get(&entry.key).await?;
                if held.is_none_or(|held| held.value != entry.value) {
                    return Err(JoinError::Clash { key: entry.key });
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
pub async fn cluster_of(meta: &dyn Meta, cluster: uuid::Uuid) -> Result<ClusterRecord, JoinError> {
    match nodes::cluster(meta).await? {
        Some((found, _)) if found.id == cluster => Ok(found),
        Some((found, _)) => Err(JoinError::OtherCluster { found: found.id }),
        None => Err(JoinError::NoCluster),
    }
}

/// Writes the record of a new node, under a free index; gives the index. One that is there already
/// has its index.
///
/// # Errors
/// [`JoinError`].
pub async fn enter(meta: &dyn Meta, new: &NodeRecord) -> Result<NodeIndex, JoinError> {
    until_unchanged!(enter_once(meta, new, By::Beginning).await)
}

/// The same for a node that was let in by a token. Who was removed before it came, or long ago, does not enter.
///
/// # Errors
/// [`JoinError`]; [`JoinError::Removed`].
pub async fn enter_admitted(meta: &dyn Meta, new: &NodeRecord) -> Result<NodeIndex, JoinError> {
    until_unchanged!(enter_once(meta, new, By::Admission).await)
}

/// How a node comes into a cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum By {
    /// It begins it.
    Beginning,
    /// It was let in.
    Admission,
}

async fn enter_once(meta: &dyn Meta, new: &NodeRecord, by: By) -> Result<NodeIndex, JoinError> {
    let Some((cluster, revision)) = nodes::cluster(meta).await? else {
        return Err(JoinError::NoCluster);
    };
    let present = nodes::list_all(meta).await?;
    if let Some(known) = present.get(&new.node) {
        return Ok(known.record.index);
    }
    let taken = |index: &NodeIndex| present.values().any(|n| n.record.index == *index);
    let index = NodeIndex::all().find(|index| !taken(index)).ok_or(JoinError::Full)?;
    let record = NodeRecord { index, ..new.clone() };
    // The cluster's record as it was: whoever enters at the same time has read other nodes.
    let mut changes = vec![cluster.put(Expect::At(revision)), record.put(Expect::Absent)];
    if by == By::Admission {
        changes.push(admission::is_admitted(meta, new.node).await?.ok_or(JoinError::Removed)?);
    }
    meta.commit(changes).await?;
    Ok(index)
}

/// Brings the record of a member up to date; whether it is drained, and its index, are as they are.
///
/// # Errors
/// [`JoinError::Removed`]; [`JoinError::Store`].
pub async fn refresh(meta: &dyn Meta, now: &NodeRecord) -> Result<(), JoinError> {
    until_unchanged!(refresh_once(meta, now).await)
}

async fn refresh_once(meta: &dyn Meta, now: &NodeRecord) -> Result<(), JoinError> {
    let Some((held, revision)) = nodes::get(meta, now.node).await? else {
        return Err(JoinError::Removed);
    };
    let record = NodeRecord { drained: held.drained, index: held.index, ..now.clone() };
    if record != held {
        meta.commit(vec![record.put(Expect::At(revision))]).await?;
    }
    Ok(())
}

/// Removes the record of a node, if it is there, and of its request to join: if it comes again it asks anew.
///
/// # Errors
/// [`JoinError::Store`].
pub async fn strike(meta: &dyn Meta, node: NodeId) -> Result<(), JoinError> {
    until_unchanged!(strike_once(meta, node).await)
}

async fn strike_once(meta: &dyn Meta, node: NodeId) -> Result<(), JoinError> {
    match removal(meta, node).await? {
        Some(changes) => Ok(meta.commit(changes).await.map(drop)?),
        None => Ok(()),
    }
}

/// The same for a node that does not come back: not while it is alive.
///
/// # Errors
/// [`JoinError::Alive`]; [`JoinError::Store`].
pub async fn strike_gone(meta: &dyn Meta, node: NodeId) -> Result<(), JoinError> {
    until_unchanged!(strike_gone_once(meta, node).await)
}

async fn strike_gone_once(meta: &dyn Meta, node: NodeId) -> Result<(), JoinError> {
    let alive = nodes::alive_key(node);
    if meta.get(&alive).await?.is_some() {
        return Err(JoinError::Alive { node });
    }
    if let Some(mut changes) = removal(meta, node).await? {
        changes.push(Change { key: alive, expect: Expect::Absent, value: None });
        meta.commit(changes).await?;
    }
    Ok(())
}

/// What removes the record of a node; `None` if there is none.
async fn removal(meta: &dyn Meta, node: NodeId) -> Result<Option<Vec<Change>>, JoinError> {
    let key = nodes::key(node);
    let Some(held) = meta.get(&key).await? else { return Ok(None) };
    let expect = Expect::At(held.revision);
    let mut changes = admission::forget(meta, node).await?;
    changes.push(Change { key, expect, value: None });
    Ok(Some(changes))
}

/// The entry of `own` among the store's members.
fn find<'a>(members: &'a [MemberInfo], own: &OwnMember) -> Option<&'a MemberInfo> {
    members.iter().find(|m| m.peer_urls.contains(&own.peer_url))
}

/// Makes room for a member that is to join the store, as one that learns first and has no vote.
/// Gives all members as it has to be told them.
///
/// # Errors
/// [`JoinError::Store`]; [`JoinError::Learning`] for as long as somebody else learns.
pub async fn make_room(store: &Etcd, own: &OwnMember) -> Result<Vec<(String, String)>, JoinError> {
    let mut members = store.members().await?;
    if find(&members, own).is_none() {
        if let Some(other) = members.iter().find(|m| m.is_learner) {
            return Err(JoinError::Learning { which: called(other).to_owned() });
        }
        store.add_member(&own.peer_url, true).await?;
        members = store.members().await?;
    }
    let named = members.into_iter().flat_map(|m| {
        // One that has not started has no name yet.
        let name = if m.name.is_empty() { own.name.clone() } else { m.name };
        m.peer_urls.into_iter().map(move |url| (name.clone(), url))
    });
    Ok(named.collect())
}

/// What a member is called: where the others would reach it, if it has never started.
#[must_use]
pub fn called(member: &MemberInfo) -> &str {
    match &*member.name {
        "" => member.peer_urls.first().map_or("without an address", String::as_str),
        name => name,
    }
}

/// The member that `which` names: by its name, or by where the others reach it.
#[must_use]
pub fn member_called<'a>(members: &'a [MemberInfo], which: &str) -> Option<&'a MemberInfo> {
    let at =
        |url: &String| url == which || url.split_once("://").is_some_and(|(_, at)| at == which);
    let named =
        |m: &&MemberInfo| (m.name == which && !which.is_empty()) || m.peer_urls.iter().any(at);
    members.iter().find(named)
}

/// Gives a member its vote, which it gets when it has learnt enough.
///
/// # Errors
/// [`JoinError::Store`].
pub async fn promote(store: &Etcd, own: &OwnMember) -> Result<(), JoinError> {
    let members = store.members().await?;
    match find(&members, own) {
        Some(member) if member.is_learner => Ok(store.promote_member(member.id).await?),
        Some(_) => Ok(()),
        None => Err(JoinError::Removed),
    }
}

/// Removes the member called `name` from the store, unless it is the only one; or one that has never started, and so has no
/// name, at one of these addresses.
///
/// # Errors
/// [`JoinError::Store`].
pub async fn remove_member(store: &Etcd, name: &str, at: &[IpAddr]) -> Result<(), JoinError> {
    let members = store.members().await?;
    match members.iter().find(|m| is_member_of(m, name, at)) {
        Some(member) if members.len() > 1 => Ok(store.remove_member(member.id).await?),
        _ => Ok(()),
    }
}

fn is_member_of(member: &MemberInfo, name: &str, at: &[IpAddr]) -> bool {
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

/// Client URLs of the members that have a vote, the node's own first.
#[must_use]
pub fn endpoints(members: &[MemberInfo], own: Option<&OwnMember>) -> Vec<String> {
    let voters = members.iter().filter(|m| !m.is_learner);
    let mut urls: Vec<_> = voters.flat_map(|m| m.client_urls.iter().cloned()).collect();
    urls.sort();
    urls.dedup();
    urls.sort_by_key(|url| own.is_none_or(|own| own.client_url != *url));
    urls
}

/// Whether what has to be the same at all nodes is so here.
///
/// # Errors
/// [`JoinError::Setting`].
pub fn check_settings(
    cluster: &ClusterRecord,
    lease_ms: u64,
    grace_ms: u64,
) -> Result<(), JoinError> {
    let pairs = [
        ("cluster.lease_ms", lease_ms, cluster.lease_ms),
        ("cluster.grace_ms", grace_ms, cluster.grace_ms),
    ];
    match pairs.into_iter().find(|(_, here, there)| here != there) {
        Some((setting, here, there)) => Err(JoinError::Setting { setting, here, there }),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::time::Duration;

    use uuid::Uuid;

    use super::*;
    use crate::meta::model::{Call, Client, Fate, Model};
    use crate::nodes::tests::{record, store};

    const CLUSTER: Uuid = Uuid::from_u128(7);

    fn cluster() -> ClusterRecord {
        ClusterRecord {
            id: CLUSTER,
            next_node: 2,
            own_members: true,
            lease_ms: 2000,
            grace_ms: 3000,
        }
    }

    fn put(key: &str, value: &str) -> Change {
        Change { key: key.into(), expect: Expect::Absent, value: Some(value.into()) }
    }

    /// A client that dies at its commit number `at`: before it takes effect, or without an answer.
    fn dies(model: &Model, at: usize, done: bool) -> Client {
        let count = AtomicUsize::new(0);
        let fate = move |call| match call {
            Call::Commit if count.fetch_add(1, Ordering::Relaxed) >= at => {
                Fate::Sent { there: done.then_some(Duration::ZERO), back: None }
            }
            _ => Fate::WELL,
        };
        model.client(Duration::from_secs(1), Box::new(fate))
    }

    async fn contents(meta: &dyn Meta) -> Vec<(String, String)> {
        let (entries, _) = meta.list("").await.unwrap();
        let text = |bytes| String::from_utf8(bytes).unwrap();
        entries.into_iter().map(|e| (e.key, text(e.value))).collect()
    }

    async fn move_in(from: &dyn Meta, to: &dyn Meta) -> Result<NodeIndex, JoinError> {
        begin(to, &cluster()).await?;
        copy(from, to).await?;
        enter(to, &record(1, 0)).await
    }

    #[tokio::test(start_paused = true)]
    async fn a_move_that_died_anywhere_is_carried_on() {
        let alone = Model::default();
        let from = store(&alone);
        let changes = vec![put("names/web", "1"), put("volumes/1", "{}"), put("volumes/2", "{}")];
        from.commit(changes).await.unwrap();
        let mut expected = None;
        for (at, done) in (0..6).flat_map(|at| [(at, false), (at, true)]) {
            let model = Model::default();
            let died = move_in(&from, &dies(&model, at, done)).await;
            // Five commits; the last one's answer is what the rest do not wait for.
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
        let (alone, model) = (Model::default(), Model::default());
        let (from, to) = (store(&alone), store(&model));
        from.commit(vec![put("volumes/1", "{}")]).await.unwrap();
        to.commit(vec![put("volumes/1", "other")]).await.unwrap();
        let clash = move_in(&from, &to).await.unwrap_err();
        assert_eq!(clash, JoinError::Clash { key: "volumes/1".into() });
        let other = ClusterRecord { id: Uuid::from_u128(8), ..cluster() };
        let refused = begin(&to, &other).await.unwrap_err();
        assert_eq!(refused, JoinError::OtherCluster { found: CLUSTER });
        let refused = cluster_of(&to, Uuid::from_u128(8)).await.unwrap_err();
        assert!(matches!(refused, JoinError::OtherCluster { .. }));
        let nobody = Model::default();
        assert_eq!(cluster_of(&store(&nobody), CLUSTER).await, Err(JoinError::NoCluster));
    }

    #[tokio::test(start_paused = true)]
    async fn joiners_at_the_same_time_differ() {
        let model = Model::default();
        begin(&store(&model), &cluster()).await.unwrap();
        let joins = (2..18).map(|number| {
            // Slow answers, so that they get in each other's way.
            let slow = Fate::Sent {
                there: Some(Duration::from_millis(3)),
                back: Some(Duration::from_millis(3)),
            };
            let meta = Arc::new(model.client(Duration::from_secs(1), Box::new(move |_| slow)));
            async move {
                let new = record(number, 0);
                let index = enter(&*meta, &new).await.unwrap();
                assert_eq!(enter(&*meta, &new).await, Ok(index), "twice is once");
                (NodeId(number), index)
            }
        });
        let joined = futures_util::future::join_all(joins).await;
        let mut indices: Vec<_> = joined.iter().map(|(_, index)| index.get()).collect();
        indices.sort_unstable();
        assert_eq!(indices, (0..16).collect::<Vec<_>>());
        let meta = store(&model);
        assert_eq!(enter(&meta, &record(18, 0)).await, Err(JoinError::Full));
        // An index is free again when its node has left.
        strike(&meta, NodeId(5)).await.unwrap();
        strike(&meta, NodeId(5)).await.unwrap();
        let freed = joined.iter().find(|(node, _)| node.0 == 5).unwrap().1;
        assert_eq!(enter(&meta, &record(18, 0)).await, Ok(freed));
    }

    #[tokio::test(start_paused = true)]
    async fn a_record_is_brought_up_to_date_and_a_removed_node_told() {
        let model = Model::default();
        let meta = store(&model);
        begin(&meta, &cluster()).await.unwrap();
        enter(&meta, &record(1, 0)).await.unwrap();
        nodes::set_drained(&meta, NodeId(1), true).await.unwrap();
        let moved = NodeRecord { name: "other".into(), ..record(1, 3) };
        refresh(&meta, &moved).await.unwrap();
        let (held, _) = nodes::get(&meta, NodeId(1)).await.unwrap().unwrap();
        assert_eq!((held.name.as_str(), held.index.get(), held.drained), ("other", 0, true));
        strike(&meta, NodeId(1)).await.unwrap();
        assert_eq!(refresh(&meta, &moved).await, Err(JoinError::Removed));
    }

    #[tokio::test(start_paused = true)]
    async fn a_node_that_is_alive_again_is_not_removed_as_gone() {
        let model = Model::default();
        let meta = store(&model);
        begin(&meta, &cluster()).await.unwrap();
        enter(&meta, &record(2, 0)).await.unwrap();
        let alive = |expect, value| Change { key: nodes::alive_key(NodeId(2)), expect, value };
        let at = meta.commit(vec![alive(Expect::Absent, Some(vec![]))]).await.unwrap();
        let back = JoinError::Alive { node: NodeId(2) };
        assert_eq!(strike_gone(&meta, NodeId(2)).await, Err(back));
        assert!(nodes::get(&meta, NodeId(2)).await.unwrap().is_some());
        meta.commit(vec![alive(Expect::At(at), None)]).await.unwrap();
        strike_gone(&meta, NodeId(2)).await.unwrap();
        strike_gone(&meta, NodeId(2)).await.unwrap();
        assert_eq!(nodes::get(&meta, NodeId(2)).await.unwrap(), None);
    }

    #[test]
    fn settings_that_must_be_the_same_are_compared() {
        check_settings(&cluster(), 2000, 3000).unwrap();
        let other = check_settings(&cluster(), 2000, 4000).unwrap_err().to_string();
        assert!(other.contains("cluster.grace_ms is 4000 here and 3000"), "{other}");
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
        let is_of_node_4 = |member| is_member_of(&member, "node-4", &at);
        assert!(is_of_node_4(member("", "192.0.2.4")) && is_of_node_4(member("", "[2001:db8::4]")));
        assert!(is_of_node_4(member("node-4", "192.0.2.9")));
        // One with a name is what that says, and other addresses are others'.
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
        let found = |which| member_called(&members, which).map(called);
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
        let own = OwnMember {
            name: "b".into(),
            peer_url: "http://b:2380".into(),
            client_url: "http://b:2379".into(),
        };
        let members = [member("a", false), member("b", false), member("c", true)];
        assert_eq!(endpoints(&members, Some(&own)), ["http://b:2379", "http://a:2379"]);
        assert_eq!(endpoints(&members, None), ["http://a:2379", "http://b:2379"]);
    }
}
