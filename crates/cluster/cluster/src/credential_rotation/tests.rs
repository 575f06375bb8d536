use std::collections::VecDeque;

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;

use super::*;
use crate::certificate_authority::CertificateAuthority;
use crate::identity::{ClusterCredentials, ClusterSecret, TransportSecurity};
use crate::nodes::tests::store;
use crate::store::memory::MemoryStore;

const CLUSTER: Uuid = Uuid::from_u128(7);
const FIRST: Uuid = Uuid::from_u128(1);

fn credentials(byte: u8) -> ClusterCredentials {
    ClusterCredentials {
        secret: ClusterSecret::new([byte; 32]),
        transport_security: TransportSecurity::PlainText,
    }
}

fn for_node(node: u16, secret: &ClusterSecret) -> SealingContext<'_> {
    SealingContext { cluster: CLUSTER, rotation: FIRST, node, secret }
}

#[test]
fn new_credentials_open_for_the_node_that_asked_and_knows_the_old_secret() {
    let old = ClusterSecret::new([1; 32]);
    let protection = TransportSecurity::ClusterAuthority(CertificateAuthority::new().unwrap());
    let new = ClusterCredentials { transport_security: protection, ..credentials(2) };
    let of = for_node(2, &old);
    let key = OneTimeKey::new().unwrap();
    let sealed = seal_credentials(&new, &of, key.public()).unwrap();
    let text = serde_json::to_string(&sealed).unwrap();
    assert_eq!(serde_json::from_str::<SealedCredentials>(&text).unwrap(), sealed);
    assert_eq!(key.open(&of, &sealed), Ok(new.clone()));
    // Without the secret one can neither open nor seal.
    let stranger = ClusterSecret::new([3; 32]);
    for wrong in
        [for_node(3, &old), for_node(2, &stranger), SealingContext { rotation: CLUSTER, ..of }]
    {
        let key = OneTimeKey::new().unwrap();
        let sealed = seal_credentials(&new, &of, key.public()).unwrap();
        assert_eq!(key.open(&wrong, &sealed), Err(CredentialsUnsealError));
        let key = OneTimeKey::new().unwrap();
        let sealed = seal_credentials(&new, &wrong, key.public()).unwrap();
        assert_eq!(key.open(&of, &sealed), Err(CredentialsUnsealError));
    }
    // Nor can an eavesdropper with the secret and another key.
    assert_eq!(OneTimeKey::new().unwrap().open(&of, &sealed), Err(CredentialsUnsealError));
}

#[test]
fn what_is_no_sealed_message_is_refused() {
    let old = ClusterSecret::new([1; 32]);
    let long = "A".repeat(100_000);
    for text in ["\"?\"", "1", &format!("\"{long}\"")] {
        assert!(serde_json::from_str::<SealedCredentials>(text).is_err());
        assert!(serde_json::from_str::<PublicKey>(text).is_err());
    }
    for bytes in [&b""[..], &[0; 31], &[0; 32], &[0; 99]] {
        let text = serde_json::to_string(&URL_SAFE_NO_PAD.encode(bytes)).unwrap();
        let sealed: SealedCredentials = serde_json::from_str(&text).unwrap();
        let opened = OneTimeKey::new().unwrap().open(&for_node(2, &old), &sealed);
        assert_eq!(opened, Err(CredentialsUnsealError));
    }
    let zero: PublicKey = serde_json::from_str(&format!("\"{}\"", "A".repeat(43))).unwrap();
    assert!(
        seal_credentials(&credentials(2), &for_node(2, &old), zero).is_err(),
        "no key of any node"
    );
}

/// A model of a node's credentials: those of generation `g` are the number `g`.
#[derive(Clone, Debug)]
struct Node {
    shows: u8,
    own: Option<LocalRotation>,
    /// What it and its store member present and accept, until they read the file again.
    effect: (u8, Vec<u8>),
    /// The key its process has asked with.
    key: Option<PublicKey>,
}

fn generation(credentials: &ClusterCredentials) -> u8 {
    (0..=9).find(|g| credentials.secret == ClusterSecret::new([*g; 32])).unwrap()
}

impl Node {
    fn new(generation: u8) -> Self {
        Self { shows: generation, own: None, effect: (generation, vec![generation]), key: None }
    }

    fn file(&self) -> (u8, Vec<u8>) {
        let other =
            self.own.as_ref().and_then(|own| own.other_credentials.as_ref()).map(generation);
        (self.shows, [Some(self.shows), other].into_iter().flatten().collect())
    }

    /// It restarts: what is not in its file is lost.
    fn starts(&mut self) {
        self.effect = self.file();
        self.key = None;
    }

    fn identity(&self) -> crate::identity::ClusterIdentity {
        let ClusterCredentials { secret, transport_security: protection } = credentials(self.shows);
        crate::identity::ClusterIdentity {
            stage: crate::identity::MembershipStage::Member,
            cluster: CLUSTER,
            node: NodeId(1),
            index: crate::identity::NodeIndex::new(0),
            role: crate::identity::Role::Data,
            secret,
            transport_security: protection,
            rotation: self.own.clone(),
            endpoints: vec!["http://192.0.2.1:1".into()],
            member: None,
        }
    }

    fn change(&mut self, change: impl FnOnce(&mut crate::identity::ClusterIdentity)) {
        let mut identity = self.identity();
        change(&mut identity);
        self.shows = generation(&identity.credentials());
        self.own = identity.rotation;
    }
}

/// A cluster whose nodes act in an order that a seed determines.
struct World {
    model: MemoryStore,
    nodes: BTreeMap<NodeId, Node>,
    random: u64,
    next: u8,
    /// A rotation that was started, on its way to the store.
    in_flight: Option<RotationRecord>,
}

impl World {
    fn new(seed: u64) -> Self {
        let nodes = (1..=3).map(|n| (NodeId(n), Node::new(0))).collect();
        let random = seed.wrapping_mul(2) + 1;
        Self { model: MemoryStore::default(), nodes, random, next: 1, in_flight: None }
    }

    fn below(&mut self, bound: u64) -> u64 {
        self.random = self.random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(99);
        (self.random >> 33) % bound
    }

    /// Whatever any node presents, all nodes accept.
    fn check(&self) {
        for (one, presented) in &self.nodes {
            for (other, accepts) in &self.nodes {
                let (presented, accepts) = (presented.effect.0, &accepts.effect.1);
                assert!(accepts.contains(&presented), "{other} refuses {one}: {:?}", self.nodes);
            }
        }
    }

    /// What `node` decides now, and what it has read.
    async fn decides(&self, node: NodeId) -> (RotationAction, StoredRotation) {
        let stored = read_rotation(&store(&self.model)).await.unwrap();
        let present = self.nodes.keys().copied().collect();
        let at = &self.nodes[&node];
        let own = at.own.as_ref();
        let in_effect = at.effect == at.file();
        let view = RotationView {
            node,
            local: own,
            is_applied: in_effect,
            one_time_key: at.key,
            stored: &stored,
            nodes: &present,
        };
        (next_action(&view), stored)
    }

    /// Starts a rotation at `node`, unless one is in progress there.
    async fn begins(&mut self, node: NodeId) {
        self.sends(node);
        self.arrives().await;
    }

    /// A delayed write reaches the store.
    async fn arrives(&mut self) {
        if let Some(record) = self.in_flight.take() {
            let _ = store(&self.model).commit(vec![record.creation()]).await;
        }
    }

    fn sends(&mut self, node: NodeId) {
        let id = Uuid::from_u128(u128::from(self.next));
        let new = credentials(self.next);
        let at = self.nodes.get_mut(&node).unwrap();
        if at.own.is_some() {
            return;
        }
        at.change(|identity| identity.receive_new_credentials(id, new));
        self.next += 1;
        self.in_flight = Some(RotationRecord {
            id,
            stage: RotationStage::Distribute,
            started_by: node.0,
            started_s: 0,
        });
    }

    /// Carries out what `node` decided earlier, from what it had read then.
    #[expect(clippy::too_many_lines, reason = "one arm for each action")]
    async fn acts(&mut self, node: NodeId, action: RotationAction, stored: &StoredRotation) {
        let meta = store(&self.model);
        let Some(at) = self.nodes.get_mut(&node) else { return };
        let progress = |id, progress, key| NodeProgress {
            node: node.0,
            rotation: id,
            progress,
            sealing_key: key,
            sealed_credentials: None,
        };
        let record = stored.record.as_ref();
        let id = record.map(|(record, _)| record.id).unwrap_or_default();
        match action {
            RotationAction::Wait => {}
            RotationAction::DiscardLocal => at.change(|identity| identity.rotation = None),
            RotationAction::RequestCredentials => {
                let key = OneTimeKey::new().unwrap().public();
                at.key = Some(key);
                let _ = write_progress(
                    &meta,
                    stored,
                    &progress(id, RotationProgress::NeedsCredentials, Some(key)),
                )
                .await;
            }
            RotationAction::SealFor(to) => {
                let (reported, _) = stored.progress[&to].clone();
                let Some((new, old)) = at.identity().new_credentials_and_old_secret() else {
                    return;
                };
                let of =
                    SealingContext { cluster: CLUSTER, rotation: id, node: to.0, secret: &old };
                let sealed =
                    Some(seal_credentials(&new, &of, reported.sealing_key.unwrap()).unwrap());
                let _ = write_progress(
                    &meta,
                    stored,
                    &NodeProgress { sealed_credentials: sealed, ..reported },
                )
                .await;
            }
            RotationAction::ReceiveCredentials => {
                // The model keeps no keys: the sealing node's credentials show the contents.
                let new = self.nodes.values().find_map(|other| {
                    let own = other.own.as_ref().filter(|own| own.id == id)?;
                    own.other_credentials
                        .as_ref()
                        .and(other.identity().new_credentials_and_old_secret())
                        .map(|(new, _)| new)
                });
                let at = self.nodes.get_mut(&node).unwrap();
                match new {
                    Some(new) => at.change(|identity| identity.receive_new_credentials(id, new)),
                    None => at.key = None,
                }
            }
            RotationAction::Apply => at.effect = at.file(),
            RotationAction::ReportProgress(how) => {
                let _ = write_progress(&meta, stored, &progress(id, how, None)).await;
            }
            RotationAction::ActivateNew => {
                at.change(crate::identity::ClusterIdentity::activate_new_credentials);
            }
            RotationAction::DropOld => {
                at.change(crate::identity::ClusterIdentity::drop_old_credentials);
            }
            RotationAction::AdvanceStage(stage) => {
                let (record, revision) = record.unwrap();
                let _ = meta.commit(vec![record.stage_change(stage, *revision)]).await;
            }
            RotationAction::RemoveRecords => {
                let _ = remove_records(&meta, stored).await;
            }
        }
    }

    /// All nodes act until none has anything to do.
    async fn rests(&mut self) {
        for _ in 0..200 {
            let mut rest = true;
            for node in self.nodes.keys().copied().collect::<Vec<_>>() {
                let (action, stored) = self.decides(node).await;
                rest &= action == RotationAction::Wait;
                self.acts(node, action, &stored).await;
                self.check();
            }
            if rest {
                return;
            }
        }
        panic!("it never ends: {:?}", self.nodes);
    }
}

/// Nodes decide, act late, restart and are removed in any order, and rotations follow each other.
#[tokio::test]
async fn whatever_a_node_shows_all_others_accept() {
    for seed in 0..100 {
        let mut world = World::new(seed);
        let mut late: VecDeque<(NodeId, RotationAction, StoredRotation)> = VecDeque::new();
        for _ in 0..120 {
            let nodes: Vec<_> = world.nodes.keys().copied().collect();
            let node = nodes[usize::try_from(world.below(nodes.len() as u64)).unwrap()];
            match world.below(40) {
                0 if world.next < 5 && world.in_flight.is_none() => world.sends(node),
                1 => {
                    world.nodes.get_mut(&node).unwrap().starts();
                    // What its process had decided is lost with it.
                    late.retain(|(other, ..)| *other != node);
                }
                2 if nodes.len() > 2 => drop(world.nodes.remove(&node)),
                3..5 => world.arrives().await,
                5..15 => {
                    if let Some((node, action, stored)) = late.pop_front() {
                        world.acts(node, action, &stored).await;
                    }
                }
                // One action at a time at each node.
                _ if late.iter().any(|(other, ..)| *other == node) => {}
                _ => {
                    let (action, stored) = world.decides(node).await;
                    late.push_back((node, action, stored));
                }
            }
            world.check();
        }
        late.clear();
        world.arrives().await;
        world.rests().await;
        let stored = read_rotation(&store(&world.model)).await.unwrap();
        assert_eq!(stored, StoredRotation::default(), "seed {seed}");
        let shown: BTreeSet<_> = world.nodes.values().map(Node::file).collect();
        assert_eq!(shown.len(), 1, "seed {seed}: {:?}", world.nodes);
        assert!(world.nodes.values().all(|node| node.own.is_none()), "seed {seed}");
    }
}

#[tokio::test]
async fn a_node_that_is_away_is_waited_for_until_it_is_removed() {
    let mut world = World::new(1);
    world.begins(NodeId(1)).await;
    let away = world.nodes.remove(&NodeId(3)).unwrap();
    let all: BTreeSet<_> = (1..=3).map(NodeId).collect();
    for _ in 0..50 {
        for node in [NodeId(1), NodeId(2)] {
            let stored = read_rotation(&store(&world.model)).await.unwrap();
            let at = &world.nodes[&node];
            let in_effect = at.effect == at.file();
            let own = at.own.as_ref();
            let view = RotationView {
                node,
                local: own,
                is_applied: in_effect,
                one_time_key: at.key,
                stored: &stored,
                nodes: &all,
            };
            let action = next_action(&view);
            world.acts(node, action, &stored).await;
        }
    }
    let stored = read_rotation(&store(&world.model)).await.unwrap();
    assert_eq!(stored.lagging_nodes(&all), [NodeId(3)]);
    assert_eq!(
        stored.record.as_ref().map(|(record, _)| record.stage),
        Some(RotationStage::Distribute)
    );
    assert!(world.nodes.values().all(|node| node.shows == 0 && node.effect.1 == [0, 1]));
    // It comes back with its old file.
    world.nodes.insert(NodeId(3), away);
    world.rests().await;
    assert!(world.nodes.values().all(|node| node.file() == (1, vec![1])));
}

#[tokio::test]
async fn a_rotation_whose_credentials_are_lost_ends() {
    let mut world = World::new(1);
    world.begins(NodeId(1)).await;
    world.nodes.remove(&NodeId(1));
    world.rests().await;
    assert_eq!(read_rotation(&store(&world.model)).await.unwrap(), StoredRotation::default());
    assert!(world.nodes.values().all(|node| node.file() == (0, vec![0])));
}

#[tokio::test]
async fn what_is_damaged_in_the_store_is_said_anew() {
    let model = MemoryStore::default();
    let meta = store(&model);
    let record =
        RotationRecord { id: FIRST, stage: RotationStage::Distribute, started_by: 1, started_s: 0 };
    let damaged = Change {
        key: progress_key(NodeId(2)),
        precondition: Precondition::Absent,
        value: Some(b"{}".to_vec()),
    };
    meta.commit(vec![record.creation(), damaged]).await.unwrap();
    let stored = read_rotation(&meta).await.unwrap();
    assert_eq!(stored.progress, ProgressByNode::new());
    let progress = RotationProgress::Received;
    let reported = NodeProgress {
        node: 2,
        rotation: FIRST,
        progress,
        sealing_key: None,
        sealed_credentials: None,
    };
    write_progress(&meta, &stored, &reported).await.unwrap();
    let now = read_rotation(&meta).await.unwrap();
    assert!(now.has_reached(NodeId(2), RotationProgress::Received));
    // Nothing that has changed since it was read is removed.
    remove_records(&meta, &now).await.unwrap();
    assert_eq!(meta.list(ROTATION_KEY).await.unwrap().0, []);
}
