use std::collections::VecDeque;

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;

use super::*;
use crate::authority::Authority;
use crate::identity::{ClusterSecret, Credentials, Protection};
use crate::meta::model::Model;
use crate::nodes::tests::store;

const CLUSTER: Uuid = Uuid::from_u128(7);
const FIRST: Uuid = Uuid::from_u128(1);

fn credentials(byte: u8) -> Credentials {
    Credentials { secret: ClusterSecret::new([byte; 32]), protection: Protection::Plain }
}

fn for_node(node: u16, secret: &ClusterSecret) -> For<'_> {
    For { cluster: CLUSTER, rotation: FIRST, node, secret }
}

#[test]
fn new_credentials_open_for_the_node_that_asked_and_knows_the_old_secret() {
    let old = ClusterSecret::new([1; 32]);
    let protection = Protection::Own(Authority::new().unwrap());
    let new = Credentials { protection, ..credentials(2) };
    let of = for_node(2, &old);
    let key = OneTimeKey::new().unwrap();
    let sealed = seal(&new, &of, key.public()).unwrap();
    let text = serde_json::to_string(&sealed).unwrap();
    assert_eq!(serde_json::from_str::<Sealed>(&text).unwrap(), sealed);
    assert_eq!(key.open(&of, &sealed), Ok(new.clone()));
    // Who does not know the secret can neither open nor seal.
    let stranger = ClusterSecret::new([3; 32]);
    for wrong in [for_node(3, &old), for_node(2, &stranger), For { rotation: CLUSTER, ..of }] {
        let key = OneTimeKey::new().unwrap();
        let sealed = seal(&new, &of, key.public()).unwrap();
        assert_eq!(key.open(&wrong, &sealed), Err(CannotUnseal));
        let key = OneTimeKey::new().unwrap();
        let sealed = seal(&new, &wrong, key.public()).unwrap();
        assert_eq!(key.open(&of, &sealed), Err(CannotUnseal));
    }
    // Nor does who has read all that was said, with another key of his own.
    assert_eq!(OneTimeKey::new().unwrap().open(&of, &sealed), Err(CannotUnseal));
}

#[test]
fn what_is_no_sealed_message_is_refused() {
    let old = ClusterSecret::new([1; 32]);
    let long = "A".repeat(100_000);
    for text in ["\"?\"", "1", &format!("\"{long}\"")] {
        assert!(serde_json::from_str::<Sealed>(text).is_err());
        assert!(serde_json::from_str::<PublicKey>(text).is_err());
    }
    for bytes in [&b""[..], &[0; 31], &[0; 32], &[0; 99]] {
        let text = serde_json::to_string(&URL_SAFE_NO_PAD.encode(bytes)).unwrap();
        let sealed: Sealed = serde_json::from_str(&text).unwrap();
        let opened = OneTimeKey::new().unwrap().open(&for_node(2, &old), &sealed);
        assert_eq!(opened, Err(CannotUnseal));
    }
    let zero: PublicKey = serde_json::from_str(&format!("\"{}\"", "A".repeat(43))).unwrap();
    assert!(seal(&credentials(2), &for_node(2, &old), zero).is_err(), "no key of anybody");
}

/// A node, as far as credentials go: those of generation `g` are the number `g`.
#[derive(Clone, Debug)]
struct Node {
    shows: u8,
    own: Option<OwnRotation>,
    /// What it and its member of the store show and accept, until they look at the file again.
    effect: (u8, Vec<u8>),
    /// Its process has asked with this key.
    key: Option<PublicKey>,
}

fn generation(credentials: &Credentials) -> u8 {
    (0..=9).find(|g| credentials.secret == ClusterSecret::new([*g; 32])).unwrap()
}

impl Node {
    fn new(generation: u8) -> Self {
        Self { shows: generation, own: None, effect: (generation, vec![generation]), key: None }
    }

    fn file(&self) -> (u8, Vec<u8>) {
        let other = self.own.as_ref().and_then(|own| own.other.as_ref()).map(generation);
        (self.shows, [Some(self.shows), other].into_iter().flatten().collect())
    }

    /// It starts again: what is not in its file is gone.
    fn starts(&mut self) {
        self.effect = self.file();
        self.key = None;
    }

    fn identity(&self) -> crate::identity::Identity {
        let Credentials { secret, protection } = credentials(self.shows);
        crate::identity::Identity {
            stage: crate::identity::Stage::Member,
            cluster: CLUSTER,
            node: NodeId(1),
            index: crate::identity::NodeIndex::new(0),
            role: crate::identity::Role::Data,
            secret,
            protection,
            rotation: self.own.clone(),
            endpoints: vec!["http://192.0.2.1:1".into()],
            member: None,
        }
    }

    fn change(&mut self, change: impl FnOnce(&mut crate::identity::Identity)) {
        let mut identity = self.identity();
        change(&mut identity);
        self.shows = generation(&identity.credentials());
        self.own = identity.rotation;
    }
}

/// A cluster whose nodes take turns as a seed says.
struct World {
    model: Model,
    nodes: BTreeMap<NodeId, Node>,
    random: u64,
    next: u8,
    /// What was begun, and is on its way to the store.
    on_its_way: Option<RotationRecord>,
}

impl World {
    fn new(seed: u64) -> Self {
        let nodes = (1..=3).map(|n| (NodeId(n), Node::new(0))).collect();
        let random = seed.wrapping_mul(2) + 1;
        Self { model: Model::default(), nodes, random, next: 1, on_its_way: None }
    }

    fn below(&mut self, bound: u64) -> u64 {
        self.random = self.random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(99);
        (self.random >> 33) % bound
    }

    /// Whoever shows something to whom: all accept it.
    fn check(&self) {
        for (one, shows) in &self.nodes {
            for (other, accepts) in &self.nodes {
                let (shows, accepts) = (shows.effect.0, &accepts.effect.1);
                assert!(accepts.contains(&shows), "{other} refuses {one}: {:?}", self.nodes);
            }
        }
    }

    /// What `node` decides now, with what it has read.
    async fn decides(&self, node: NodeId) -> (Action, Held) {
        let held = read(&store(&self.model)).await.unwrap();
        let present = self.nodes.keys().copied().collect();
        let at = &self.nodes[&node];
        let own = at.own.as_ref();
        let in_effect = at.effect == at.file();
        let view = View { node, own, in_effect, key: at.key, held: &held, present: &present };
        (decide(&view), held)
    }

    /// Begins one at `node`, unless one is under way there.
    async fn begins(&mut self, node: NodeId) {
        self.sends(node);
        self.arrives().await;
    }

    /// What was sent to the store arrives there, however late.
    async fn arrives(&mut self) {
        if let Some(record) = self.on_its_way.take() {
            let _ = store(&self.model).commit(vec![record.begin()]).await;
        }
    }

    fn sends(&mut self, node: NodeId) {
        let id = Uuid::from_u128(u128::from(self.next));
        let new = credentials(self.next);
        let at = self.nodes.get_mut(&node).unwrap();
        if at.own.is_some() {
            return;
        }
        at.change(|identity| identity.take(id, new));
        self.next += 1;
        self.on_its_way = Some(RotationRecord { id, stage: Stage::Spread, by: node.0, began_s: 0 });
    }

    /// Does what `node` has decided earlier, by what it had read then.
    async fn acts(&mut self, node: NodeId, action: Action, held: &Held) {
        let meta = store(&self.model);
        let Some(at) = self.nodes.get_mut(&node) else { return };
        let progress =
            |id, progress, key| NodeProgress { node: node.0, id, progress, key, sealed: None };
        let record = held.record.as_ref();
        let id = record.map(|(record, _)| record.id).unwrap_or_default();
        match action {
            Action::Rest => {}
            Action::Clear => at.change(|identity| identity.rotation = None),
            Action::Ask => {
                let key = OneTimeKey::new().unwrap().public();
                at.key = Some(key);
                let _ = say(&meta, held, &progress(id, Progress::Wants, Some(key))).await;
            }
            Action::Seal(to) => {
                let (said, _) = held.progress[&to].clone();
                let Some((new, old)) = at.identity().new_and_old() else { return };
                let of = For { cluster: CLUSTER, rotation: id, node: to.0, secret: &old };
                let sealed = Some(seal(&new, &of, said.key.unwrap()).unwrap());
                let _ = say(&meta, held, &NodeProgress { sealed, ..said }).await;
            }
            Action::Take => {
                // Keys are not kept here: whoever sealed has shown what is in it.
                let new = self.nodes.values().find_map(|other| {
                    let own = other.own.as_ref().filter(|own| own.id == id)?;
                    own.other.as_ref().and(other.identity().new_and_old()).map(|(new, _)| new)
                });
                let at = self.nodes.get_mut(&node).unwrap();
                match new {
                    Some(new) => at.change(|identity| identity.take(id, new)),
                    None => at.key = None,
                }
            }
            Action::PutInEffect => at.effect = at.file(),
            Action::Say(how) => {
                let _ = say(&meta, held, &progress(id, how, None)).await;
            }
            Action::Use => at.change(crate::identity::Identity::use_new),
            Action::Forget => at.change(crate::identity::Identity::forget_old),
            Action::Advance(stage) => {
                let (record, revision) = record.unwrap();
                let _ = meta.commit(vec![record.advance(stage, *revision)]).await;
            }
            Action::End => {
                let _ = end(&meta, held).await;
            }
        }
    }

    /// All nodes act until nobody has anything to do.
    async fn rests(&mut self) {
        for _ in 0..200 {
            let mut rest = true;
            for node in self.nodes.keys().copied().collect::<Vec<_>>() {
                let (action, held) = self.decides(node).await;
                rest &= action == Action::Rest;
                self.acts(node, action, &held).await;
                self.check();
            }
            if rest {
                return;
            }
        }
        panic!("it never ends: {:?}", self.nodes);
    }
}

/// Nodes decide, act late, start again and are removed in any order, and rotations follow each other.
#[tokio::test]
async fn whatever_a_node_shows_all_others_accept() {
    for seed in 0..100 {
        let mut world = World::new(seed);
        let mut late: VecDeque<(NodeId, Action, Held)> = VecDeque::new();
        for _ in 0..120 {
            let nodes: Vec<_> = world.nodes.keys().copied().collect();
            let node = nodes[usize::try_from(world.below(nodes.len() as u64)).unwrap()];
            match world.below(40) {
                0 if world.next < 5 && world.on_its_way.is_none() => world.sends(node),
                1 => {
                    world.nodes.get_mut(&node).unwrap().starts();
                    // What its process had decided is gone with it.
                    late.retain(|(other, ..)| *other != node);
                }
                2 if nodes.len() > 2 => drop(world.nodes.remove(&node)),
                3..5 => world.arrives().await,
                5..15 => {
                    if let Some((node, action, held)) = late.pop_front() {
                        world.acts(node, action, &held).await;
                    }
                }
                // One thing at a time at each node.
                _ if late.iter().any(|(other, ..)| *other == node) => {}
                _ => {
                    let (action, held) = world.decides(node).await;
                    late.push_back((node, action, held));
                }
            }
            world.check();
        }
        late.clear();
        world.arrives().await;
        world.rests().await;
        let held = read(&store(&world.model)).await.unwrap();
        assert_eq!(held, Held::default(), "seed {seed}");
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
            let held = read(&store(&world.model)).await.unwrap();
            let at = &world.nodes[&node];
            let in_effect = at.effect == at.file();
            let own = at.own.as_ref();
            let view = View { node, own, in_effect, key: at.key, held: &held, present: &all };
            let action = decide(&view);
            world.acts(node, action, &held).await;
        }
    }
    let held = read(&store(&world.model)).await.unwrap();
    assert_eq!(held.waits_for(&all), [NodeId(3)]);
    assert_eq!(held.record.as_ref().map(|(record, _)| record.stage), Some(Stage::Spread));
    assert!(world.nodes.values().all(|node| node.shows == 0 && node.effect.1 == [0, 1]));
    // It comes back with what it had.
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
    assert_eq!(read(&store(&world.model)).await.unwrap(), Held::default());
    assert!(world.nodes.values().all(|node| node.file() == (0, vec![0])));
}

#[tokio::test]
async fn what_is_damaged_in_the_store_is_said_anew() {
    let model = Model::default();
    let meta = store(&model);
    let record = RotationRecord { id: FIRST, stage: Stage::Spread, by: 1, began_s: 0 };
    let damaged =
        Change { key: key(NodeId(2)), expect: Expect::Absent, value: Some(b"{}".to_vec()) };
    meta.commit(vec![record.begin(), damaged]).await.unwrap();
    let held = read(&meta).await.unwrap();
    assert_eq!(held.progress, AllProgress::new());
    let progress = Progress::Has;
    let said = NodeProgress { node: 2, id: FIRST, progress, key: None, sealed: None };
    say(&meta, &held, &said).await.unwrap();
    let now = read(&meta).await.unwrap();
    assert!(now.is_at(NodeId(2), Progress::Has));
    // By what was read before, nothing is removed that has changed since.
    end(&meta, &now).await.unwrap();
    assert_eq!(meta.list(KEY).await.unwrap().0, []);
}
