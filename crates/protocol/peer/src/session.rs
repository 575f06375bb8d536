//! What makes a session, without I/O: who may speak, in which version, with what proof, and when all
//! lanes are there (RFD 0010, 8.1 and 8.2).

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use ring::hmac;
use uuid::Uuid;

use crate::frame::{Hello, MAX_DATA_BYTES, MAX_VERSION, MIN_VERSION, PROOF_BYTES, Refusal};
use crate::tls::Tls;
use crate::{Lane, Line, NodeId};

/// Half-made sessions of one node that are kept; a further one takes the place of the oldest.
const MAX_PENDING: usize = 4;

/// Refusals that are remembered, so that each is logged once.
const MAX_SAID: usize = 64;

/// First and longest pause between attempts to dial.
const BACKOFF: [Duration; 2] = [Duration::from_millis(100), Duration::from_secs(2)];

/// Bit of [`Hello::features`]: what follows HELLO is TLS.
pub const FEATURE_TLS: u64 = 1;

/// What all nodes of a cluster know and nobody else: 32 random bytes. Shows nothing of itself. Clones share what
/// [`Secret::replace`] sets.
#[derive(Clone)]
pub struct Secret(Arc<RwLock<Keys>>);

/// By what a node proves itself, and what else it accepts.
struct Keys {
    own: hmac::Key,
    other: Option<hmac::Key>,
}

fn hmac_key(bytes: &[u8; 32]) -> hmac::Key {
    hmac::Key::new(hmac::HMAC_SHA256, bytes)
}

impl Secret {
    /// The secret in these bytes.
    #[must_use]
    pub fn new(bytes: &[u8; 32]) -> Self {
        Self(Arc::new(RwLock::new(Keys { own: hmac_key(bytes), other: None })))
    }

    /// Has new connections proved by `own`, and accepts who proves itself by that or by `other` (RFD 0038, 2.4).
    pub fn replace(&self, own: &[u8; 32], other: Option<&[u8; 32]>) {
        let keys = Keys { own: hmac_key(own), other: other.map(hmac_key) };
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = keys;
    }

    /// What `side` proves its knowledge with: HMAC-SHA256 over its side and both HELLOs, in which
    /// both identities and both challenges are. So it holds for one connection and one direction.
    #[must_use]
    pub fn prove(&self, side: Side, hellos: &Hellos<'_>) -> [u8; PROOF_BYTES] {
        let keys = self.0.read().unwrap_or_else(PoisonError::into_inner);
        let mut proof = [0; PROOF_BYTES];
        proof.copy_from_slice(hmac::sign(&keys.own, &hellos.signed(side)).as_ref());
        proof
    }

    /// Whether `proof` is that of `side`; takes as long for every wrong one.
    #[must_use]
    pub fn verifies(&self, side: Side, hellos: &Hellos<'_>, proof: &[u8; PROOF_BYTES]) -> bool {
        let keys = self.0.read().unwrap_or_else(PoisonError::into_inner);
        let signed = hellos.signed(side);
        let is_by = |key| hmac::verify(key, &signed, proof).is_ok();
        is_by(&keys.own) | keys.other.as_ref().is_some_and(is_by)
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(..)")
    }
}

/// One of the two ends of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// It dialled.
    Dialler,
    /// It was dialled.
    Acceptor,
}

/// The bodies of both HELLOs of a connection, as they were sent.
#[derive(Clone, Copy, Debug)]
pub struct Hellos<'a> {
    /// The dialler's.
    pub dialler: &'a [u8],
    /// The acceptor's.
    pub acceptor: &'a [u8],
}

impl Hellos<'_> {
    fn signed(&self, side: Side) -> Vec<u8> {
        let label: &[u8; 16] = match side {
            Side::Dialler => b"windrose dialler",
            Side::Acceptor => b"windrose accept\0",
        };
        let mut out = label.to_vec();
        // A length, so that no byte can be taken for the other HELLO's.
        out.extend_from_slice(&(self.dialler.len() as u64).to_le_bytes());
        out.extend_from_slice(self.dialler);
        out.extend_from_slice(self.acceptor);
        out
    }
}

/// Who a replica is, and what it can do.
#[derive(Clone, Debug)]
pub struct Identity {
    /// The cluster.
    pub cluster: Uuid,
    /// The cluster's secret.
    pub secret: Secret,
    /// The node, not 0.
    pub node: NodeId,
    /// The volume.
    pub volume: Uuid,
    /// Lowest and highest version of the protocol that it speaks.
    pub versions: (u8, u8),
    /// Most bytes of data in a message that it receives, at most [`MAX_DATA_BYTES`]. Twice as many
    /// and what the layers need must fit in memory of class `Ordered`.
    pub max_data_bytes: u32,
    /// TLS around all connections, for clusters that want it: all nodes, or none.
    pub tls: Option<Tls>,
}

impl Identity {
    /// The replica of `volume` on `node`, with all that this release can do.
    #[must_use]
    pub fn new(cluster: Uuid, secret: Secret, node: NodeId, volume: Uuid) -> Self {
        Self {
            cluster,
            secret,
            node,
            volume,
            versions: (MIN_VERSION, MAX_VERSION),
            max_data_bytes: MAX_DATA_BYTES,
            tls: None,
        }
    }

    /// What it can do beyond the version: `FEATURE_*`.
    fn features(&self) -> u64 {
        if self.tls.is_some() { FEATURE_TLS } else { 0 }
    }

    /// What it says first on a connection to `to`.
    #[must_use]
    pub fn hello(&self, to: NodeId, line: Line, session: u128, challenge: [u8; 32]) -> Hello {
        Hello {
            min_version: self.versions.0,
            max_version: self.versions.1,
            line,
            max_data_bytes: self.max_data_bytes,
            features: self.features(),
            cluster: self.cluster,
            volume: self.volume,
            session,
            from: self.node,
            to,
            challenge,
        }
    }

    /// What was agreed with a node that dialled with `theirs`.
    ///
    /// # Errors
    /// Why it is not wanted. Whether its node has a replica is the caller's to know.
    pub fn accepts(&self, theirs: &Hello) -> Result<Agreed, Refusal> {
        if theirs.cluster != self.cluster {
            return Err(Refusal::Cluster);
        }
        if theirs.to != self.node {
            return Err(Refusal::Receiver);
        }
        if theirs.from == self.node || theirs.from == NodeId(0) {
            return Err(Refusal::Sender);
        }
        if theirs.volume != self.volume {
            return Err(Refusal::Volume);
        }
        if theirs.from < self.node {
            return Err(Refusal::Direction);
        }
        self.agree(theirs)
    }

    /// What was agreed with a node that was sent `ours` and answered `theirs`.
    ///
    /// # Errors
    /// Why it is not wanted.
    pub fn takes(&self, ours: &Hello, theirs: &Hello) -> Result<Agreed, Refusal> {
        if theirs.cluster != self.cluster {
            return Err(Refusal::Cluster);
        }
        if theirs.to != self.node || theirs.from != ours.to {
            return Err(Refusal::Receiver);
        }
        let asked = (ours.volume, ours.session, ours.line);
        if (theirs.volume, theirs.session, theirs.line) != asked {
            return Err(Refusal::Answer);
        }
        self.agree(theirs)
    }

    fn agree(&self, theirs: &Hello) -> Result<Agreed, Refusal> {
        let versions = (theirs.min_version, theirs.max_version);
        let version = highest_common(self.versions, versions).ok_or(Refusal::Version)?;
        if (self.features() ^ theirs.features) & FEATURE_TLS != 0 {
            return Err(Refusal::Security);
        }
        let max_data_bytes = self.max_data_bytes.min(theirs.max_data_bytes).min(MAX_DATA_BYTES);
        Ok(Agreed { version, features: self.features() & theirs.features, max_data_bytes })
    }
}

/// What both ends of a connection go by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Agreed {
    /// Version of the protocol.
    pub version: u8,
    /// What both can do.
    pub features: u64,
    /// Most bytes of data in a message.
    pub max_data_bytes: u32,
}

/// The highest version in both ranges, lowest and highest each.
#[must_use]
pub fn highest_common(a: (u8, u8), b: (u8, u8)) -> Option<u8> {
    let highest = a.1.min(b.1);
    (highest >= a.0.max(b.0)).then_some(highest)
}

/// The sessions whose lanes are not all there, of one replica.
#[derive(Debug)]
pub struct Assembly<S>(BTreeMap<NodeId, VecDeque<Pending<S>>>);

#[derive(Debug)]
struct Pending<S> {
    nonce: u128,
    agreed: Agreed,
    since: Duration,
    lanes: [Option<S>; 3],
}

impl<S> Default for Assembly<S> {
    fn default() -> Self {
        Self(BTreeMap::new())
    }
}

impl<S> Assembly<S> {
    /// A lane of session `nonce` is there, at `now` of any clock that runs on. All lanes once they
    /// are complete, in the order of [`Lane`].
    ///
    /// A lane that is there twice, or in which something else was agreed, ends the attempt: its
    /// connections are dropped.
    #[must_use]
    pub fn add(
        &mut self,
        now: Duration,
        (node, nonce, agreed): (NodeId, u128, Agreed),
        lane: Lane,
        stream: S,
    ) -> Option<[S; 3]> {
        let of_node = self.0.entry(node).or_default();
        let known = of_node.iter().position(|p| p.nonce == nonce);
        let mut pending = known.and_then(|i| of_node.remove(i)).unwrap_or_else(|| Pending {
            nonce,
            agreed,
            since: now,
            lanes: Default::default(),
        });
        let place = &mut pending.lanes[lane as usize];
        if place.is_some() || pending.agreed != agreed {
            return None;
        }
        *place = Some(stream);
        match pending.lanes {
            [Some(control), Some(down), Some(up)] => {
                // What the node began before this is over.
                self.0.remove(&node);
                Some([control, down, up])
            }
            lanes => {
                of_node.push_back(Pending { lanes, ..pending });
                if of_node.len() > MAX_PENDING {
                    of_node.pop_front();
                }
                None
            }
        }
    }

    /// Drops those that have waited for `limit`.
    pub fn expire(&mut self, now: Duration, limit: Duration) {
        self.0.retain(|_, of_node| {
            of_node.retain(|p| now < p.since + limit);
            !of_node.is_empty()
        });
    }

    /// Drops what `node` began.
    pub fn forget(&mut self, node: NodeId) {
        self.0.remove(&node);
    }
}

/// How long a dialler waits before it tries again.
#[derive(Clone, Copy, Debug)]
pub struct Backoff(Duration);

impl Default for Backoff {
    fn default() -> Self {
        Self(BACKOFF[0])
    }
}

impl Backoff {
    /// The next pause: between a half and all of a time that doubles with each call, as `random`
    /// decides, so that nodes that began together do not go on together.
    #[must_use]
    pub fn next(&mut self, random: u64) -> Duration {
        let full = self.0;
        self.0 = (full * 2).min(BACKOFF[1]);
        let half_ms = u64::try_from(full.as_millis() / 2).unwrap_or(u64::MAX);
        full / 2 + Duration::from_millis(random % (half_ms + 1))
    }
}

/// What was said of whom last, so that it is said once and not with each attempt.
#[derive(Debug)]
pub struct Said<K, W>(BTreeMap<K, W>);

impl<K, W> Default for Said<K, W> {
    fn default() -> Self {
        Self(BTreeMap::new())
    }
}

impl<K: Ord, W: PartialEq> Said<K, W> {
    /// Whether `what` is news of `whom`.
    #[must_use]
    pub fn is_news(&mut self, whom: K, what: W) -> bool {
        if self.0.get(&whom) == Some(&what) {
            return false;
        }
        // Anybody can claim to be anybody: what is remembered has a bound.
        if self.0.len() >= MAX_SAID {
            self.0.clear();
        }
        self.0.insert(whom, what);
        true
    }

    /// The next thing said of `whom` is news.
    pub fn forget(&mut self, whom: &K) {
        self.0.remove(whom);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn identity(node: u16) -> Identity {
        let secret = Secret::new(&[7; 32]);
        Identity::new(Uuid::from_u128(1), secret, NodeId(node), Uuid::from_u128(2))
    }

    fn hello(from: u16, to: u16) -> Hello {
        identity(from).hello(NodeId(to), Line::Lane(Lane::Up), 5, [9; 32])
    }

    #[test]
    fn the_highest_version_in_common_is_spoken() {
        assert_eq!(highest_common((1, 1), (1, 1)), Some(1));
        assert_eq!(highest_common((1, 2), (2, 3)), Some(2));
        assert_eq!(highest_common((3, 4), (1, 9)), Some(4));
        assert_eq!(highest_common((1, 2), (3, 4)), None);
        let newer = Identity { versions: (1, 2), ..identity(1) };
        let theirs = Hello { max_version: 3, ..hello(2, 1) };
        assert_eq!(newer.accepts(&theirs).map(|a| a.version), Ok(2));
    }

    /// RFD 0010, 8.2.
    #[test]
    fn who_is_not_wanted_hears_why() {
        let of = |change: &dyn Fn(&mut Hello)| {
            let mut hello = hello(2, 1);
            change(&mut hello);
            identity(1).accepts(&hello).unwrap_err()
        };
        let versions = |h: &mut Hello| (h.min_version, h.max_version) = (2, 3);
        assert_eq!(of(&versions), Refusal::Version);
        assert_eq!(of(&|h| h.cluster = Uuid::nil()), Refusal::Cluster);
        assert_eq!(of(&|h| h.to = NodeId(3)), Refusal::Receiver);
        assert_eq!(of(&|h| h.from = NodeId(1)), Refusal::Sender);
        assert_eq!(of(&|h| h.from = NodeId(0)), Refusal::Sender);
        assert_eq!(of(&|h| h.volume = Uuid::nil()), Refusal::Volume);
        assert_eq!(of(&|h| h.features = FEATURE_TLS), Refusal::Security);
        assert_eq!(identity(3).accepts(&hello(2, 3)), Err(Refusal::Direction));
        let agreed =
            identity(1).accepts(&Hello { features: 6, max_data_bytes: 512, ..hello(2, 1) });
        assert_eq!(agreed, Ok(Agreed { version: 1, features: 0, max_data_bytes: 512 }));
    }

    #[test]
    fn an_answer_to_another_connection_is_not_taken() {
        let (ours, theirs) = (hello(2, 1), hello(1, 2));
        assert!(identity(2).takes(&ours, &theirs).is_ok());
        let of = |theirs| identity(2).takes(&ours, &theirs).unwrap_err();
        assert_eq!(of(Hello { from: NodeId(3), ..theirs }), Refusal::Receiver);
        assert_eq!(of(Hello { session: 6, ..theirs }), Refusal::Answer);
        assert_eq!(of(Hello { line: Line::Lease, ..theirs }), Refusal::Answer);
        assert_eq!(of(Hello { volume: Uuid::nil(), ..theirs }), Refusal::Answer);
        assert_eq!(of(Hello { cluster: Uuid::nil(), ..theirs }), Refusal::Cluster);
    }

    #[test]
    fn a_proof_holds_for_one_side_of_one_connection() {
        let (secret, hellos) = (Secret::new(&[7; 32]), Hellos { dialler: b"ab", acceptor: b"c" });
        let proof = secret.prove(Side::Dialler, &hellos);
        assert!(secret.verifies(Side::Dialler, &hellos, &proof));
        assert!(!secret.verifies(Side::Acceptor, &hellos, &proof), "reflected");
        let moved = Hellos { dialler: b"a", acceptor: b"bc" };
        assert!(!secret.verifies(Side::Dialler, &moved, &proof), "another connection");
        assert!(!Secret::new(&[8; 32]).verifies(Side::Dialler, &hellos, &proof), "no secret");
        assert!(!format!("{secret:?}").contains('7'));
    }

    #[test]
    fn a_session_is_complete_with_all_lanes_of_one_nonce() {
        let agreed = Agreed { version: 1, features: 0, max_data_bytes: 512 };
        let mut assembly = Assembly::default();
        let mut add = |ms, nonce, lane, stream| {
            let of = (NodeId(2), nonce, agreed);
            assembly.add(Duration::from_millis(ms), of, lane, stream)
        };
        assert_eq!(add(0, 1, Lane::Down, 'd'), None);
        assert_eq!(add(1, 2, Lane::Down, 'x'), None);
        assert_eq!(add(2, 1, Lane::Up, 'u'), None);
        assert_eq!(add(3, 2, Lane::Down, 'y'), None, "twice: that attempt is over");
        assert_eq!(add(4, 1, Lane::Control, 'c'), Some(['c', 'd', 'u']));
        assert_eq!(add(5, 1, Lane::Control, 'c'), None, "a new attempt, not that one");
        assert_eq!(add(6, 7, Lane::Control, 'c'), None);
        for nonce in 8..=11 {
            assert_eq!(add(7, nonce, Lane::Control, 'c'), None);
        }
        assert_eq!(assembly.0[&NodeId(2)].front().map(|p| p.nonce), Some(8), "bounded");
        assembly.expire(Duration::from_millis(16), Duration::from_millis(10));
        assert_eq!(assembly.0.len(), 1);
        assembly.expire(Duration::from_millis(17), Duration::from_millis(10));
        assert!(assembly.0.is_empty());
    }

    #[test]
    fn pauses_double_up_to_two_seconds() {
        let mut backoff = Backoff::default();
        let pauses: Vec<_> = (0..7).map(|_| backoff.next(u64::MAX / 3).as_millis()).collect();
        let least = [50, 100, 200, 400, 800, 1000, 1000];
        assert!(pauses.iter().zip(least).all(|(&p, l)| (l..=2 * l).contains(&p)), "{pauses:?}");
    }

    #[test]
    fn a_refusal_is_news_once() {
        let mut said = Said::default();
        assert!(said.is_news(1, 'a') && !said.is_news(1, 'a') && said.is_news(1, 'b'));
        said.forget(&1);
        assert!(said.is_news(1, 'b'));
        assert!((0..1000).all(|whom| said.is_news(whom, 'c') || whom == 1));
        assert!(said.0.len() <= MAX_SAID);
    }
}
