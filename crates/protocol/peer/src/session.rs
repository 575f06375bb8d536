//! Setting up a session, without I/O: who may connect, which version they speak, with what proof,
//! and when all lanes are there (RFD 0010, 8.1 and 8.2).

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use ring::hmac;
use uuid::Uuid;

use crate::frame::{
    HandshakeRefusal, Hello, MAX_DATA_BYTES, MAX_VERSION, MIN_VERSION, PROOF_BYTES,
};
use crate::tls::Tls;
use crate::{ConnectionPurpose, Lane, NodeId};

/// Most partial sessions kept per node; a further one replaces the oldest.
const MAX_PARTIAL_SESSIONS: usize = 4;

/// Most refusals remembered, so that each is logged once.
const MAX_REMEMBERED: usize = 64;

/// The first and the longest pause between dial attempts.
const DIAL_BACKOFF: [Duration; 2] = [Duration::from_millis(100), Duration::from_secs(2)];

/// Bit of [`Hello::features`]: TLS follows HELLO.
pub const FEATURE_TLS: u64 = 1;

/// The secret of the cluster: 32 random bytes, never shown. Clones share what
/// [`PeerSecret::replace`] sets.
#[derive(Clone)]
pub struct PeerSecret(Arc<RwLock<ProofKeys>>);

/// The key that signs proofs, and another that is accepted.
struct ProofKeys {
    signing: hmac::Key,
    also_accepted: Option<hmac::Key>,
}

fn hmac_key(bytes: &[u8; 32]) -> hmac::Key {
    hmac::Key::new(hmac::HMAC_SHA256, bytes)
}

impl PeerSecret {
    /// The secret in these bytes.
    #[must_use]
    pub fn new(bytes: &[u8; 32]) -> Self {
        Self(Arc::new(RwLock::new(ProofKeys { signing: hmac_key(bytes), also_accepted: None })))
    }

    /// Signs proofs of new connections with `own`, and accepts proofs by that or by `other` (RFD
    /// 0038, 2.4).
    pub fn replace(&self, own: &[u8; 32], other: Option<&[u8; 32]>) {
        let keys = ProofKeys { signing: hmac_key(own), also_accepted: other.map(hmac_key) };
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = keys;
    }

    /// The proof of `side`: HMAC-SHA256 over the side and both HELLOs, which contain both
    /// identities and both challenges. So it is valid for one connection and one direction.
    #[must_use]
    pub fn prove(&self, side: Side, hellos: &HelloPair<'_>) -> [u8; PROOF_BYTES] {
        let keys = self.0.read().unwrap_or_else(PoisonError::into_inner);
        let mut proof = [0; PROOF_BYTES];
        proof.copy_from_slice(hmac::sign(&keys.signing, &hellos.signed(side)).as_ref());
        proof
    }

    /// Whether `proof` is valid for `side`; takes the same time for every wrong one.
    #[must_use]
    pub fn verifies(&self, side: Side, hellos: &HelloPair<'_>, proof: &[u8; PROOF_BYTES]) -> bool {
        let keys = self.0.read().unwrap_or_else(PoisonError::into_inner);
        let signed = hellos.signed(side);
        let is_signed_by = |key| hmac::verify(key, &signed, proof).is_ok();
        is_signed_by(&keys.signing) | keys.also_accepted.as_ref().is_some_and(is_signed_by)
    }
}

impl fmt::Debug for PeerSecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("PeerSecret(..)")
    }
}

/// An end of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// The end that dialled.
    Dialler,
    /// The end that was dialled.
    Acceptor,
}

/// The bodies of both HELLOs of a connection, as sent.
#[derive(Clone, Copy, Debug)]
pub struct HelloPair<'a> {
    /// The dialler's.
    pub dialler: &'a [u8],
    /// The acceptor's.
    pub acceptor: &'a [u8],
}

impl HelloPair<'_> {
    fn signed(&self, side: Side) -> Vec<u8> {
        let label: &[u8; 16] = match side {
            Side::Dialler => b"windrose dialler",
            Side::Acceptor => b"windrose accept\0",
        };
        let mut out = label.to_vec();
        // The length separates the two HELLOs unambiguously.
        out.extend_from_slice(&(self.dialler.len() as u64).to_le_bytes());
        out.extend_from_slice(self.dialler);
        out.extend_from_slice(self.acceptor);
        out
    }
}

/// The identity and the abilities of a replica.
#[derive(Clone, Debug)]
pub struct PeerIdentity {
    /// The cluster.
    pub cluster: Uuid,
    /// The cluster's secret.
    pub secret: PeerSecret,
    /// The node, not 0.
    pub node: NodeId,
    /// The volume.
    pub volume: Uuid,
    /// Lowest and highest protocol version that it speaks.
    pub versions: (u8, u8),
    /// Most bytes of data in a message that it receives, at most [`MAX_DATA_BYTES`]. Twice as many,
    /// plus what the layers need, must fit in memory of class `PeerRequest`.
    pub max_data_bytes: u32,
    /// TLS for all connections, if the cluster uses it: all nodes, or none.
    pub tls: Option<Tls>,
}

impl PeerIdentity {
    /// The replica of `volume` on `node`, with the abilities of this release.
    #[must_use]
    pub fn new(cluster: Uuid, secret: PeerSecret, node: NodeId, volume: Uuid) -> Self {
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

    /// Features beyond the version: `FEATURE_*`.
    fn features(&self) -> u64 {
        if self.tls.is_some() { FEATURE_TLS } else { 0 }
    }

    /// Its HELLO on a connection to `to`.
    #[must_use]
    pub fn hello(
        &self,
        to: NodeId,
        purpose: ConnectionPurpose,
        session: u128,
        challenge: [u8; 32],
    ) -> Hello {
        Hello {
            min_version: self.versions.0,
            max_version: self.versions.1,
            purpose,
            max_data_bytes: self.max_data_bytes,
            features: self.features(),
            cluster: self.cluster,
            volume: self.volume,
            session,
            sender: self.node,
            receiver: to,
            challenge,
        }
    }

    /// Checks the HELLO of a dialler, and negotiates the parameters.
    ///
    /// # Errors
    /// Why it is refused. The caller checks whether its node has a replica.
    pub fn check_dialler(&self, theirs: &Hello) -> Result<NegotiatedParams, HandshakeRefusal> {
        if theirs.cluster != self.cluster {
            return Err(HandshakeRefusal::WrongCluster);
        }
        if theirs.receiver != self.node {
            return Err(HandshakeRefusal::WrongReceiver);
        }
        if theirs.sender == self.node || theirs.sender == NodeId(0) {
            return Err(HandshakeRefusal::InvalidSender);
        }
        if theirs.volume != self.volume {
            return Err(HandshakeRefusal::UnknownVolume);
        }
        if theirs.sender < self.node {
            return Err(HandshakeRefusal::WrongDirection);
        }
        self.negotiate(theirs)
    }

    /// Checks the answer `theirs` to the HELLO `ours`, and negotiates the parameters.
    ///
    /// # Errors
    /// Why it is refused.
    pub fn check_acceptor(
        &self,
        ours: &Hello,
        theirs: &Hello,
    ) -> Result<NegotiatedParams, HandshakeRefusal> {
        if theirs.cluster != self.cluster {
            return Err(HandshakeRefusal::WrongCluster);
        }
        if theirs.receiver != self.node || theirs.sender != ours.receiver {
            return Err(HandshakeRefusal::WrongReceiver);
        }
        let expected = (ours.volume, ours.session, ours.purpose);
        if (theirs.volume, theirs.session, theirs.purpose) != expected {
            return Err(HandshakeRefusal::WrongAnswer);
        }
        self.negotiate(theirs)
    }

    fn negotiate(&self, theirs: &Hello) -> Result<NegotiatedParams, HandshakeRefusal> {
        let versions = (theirs.min_version, theirs.max_version);
        let version =
            highest_common(self.versions, versions).ok_or(HandshakeRefusal::NoCommonVersion)?;
        if (self.features() ^ theirs.features) & FEATURE_TLS != 0 {
            return Err(HandshakeRefusal::TlsMismatch);
        }
        let max_data_bytes = self.max_data_bytes.min(theirs.max_data_bytes).min(MAX_DATA_BYTES);
        Ok(NegotiatedParams {
            version,
            features: self.features() & theirs.features,
            max_data_bytes,
        })
    }
}

/// The parameters that both ends of a connection use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NegotiatedParams {
    /// Version of the protocol.
    pub version: u8,
    /// Features of both ends.
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

/// The sessions of one replica whose lanes are not all there.
#[derive(Debug)]
pub struct SessionAssembly<S>(BTreeMap<NodeId, VecDeque<PartialSession<S>>>);

#[derive(Debug)]
struct PartialSession<S> {
    nonce: u128,
    negotiated: NegotiatedParams,
    first_lane_at: Duration,
    lanes: [Option<S>; 3],
}

impl<S> Default for SessionAssembly<S> {
    fn default() -> Self {
        Self(BTreeMap::new())
    }
}

impl<S> SessionAssembly<S> {
    /// Adds a lane of session `nonce`; `now` is of any monotonic clock. Returns all lanes once they
    /// are complete, in the order of [`Lane`].
    ///
    /// A duplicate lane, or one with other parameters, ends the attempt: its connections are
    /// dropped.
    #[must_use]
    pub fn add(
        &mut self,
        now: Duration,
        (node, nonce, negotiated): (NodeId, u128, NegotiatedParams),
        lane: Lane,
        stream: S,
    ) -> Option<[S; 3]> {
        let sessions = self.0.entry(node).or_default();
        let index = sessions.iter().position(|p| p.nonce == nonce);
        let mut session = index.and_then(|i| sessions.remove(i)).unwrap_or_else(|| {
            PartialSession { nonce, negotiated, first_lane_at: now, lanes: Default::default() }
        });
        let slot = &mut session.lanes[lane as usize];
        if slot.is_some() || session.negotiated != negotiated {
            return None;
        }
        *slot = Some(stream);
        match session.lanes {
            [Some(control), Some(replication), Some(requests)] => {
                // Earlier attempts of the node are obsolete.
                self.0.remove(&node);
                Some([control, replication, requests])
            }
            lanes => {
                sessions.push_back(PartialSession { lanes, ..session });
                if sessions.len() > MAX_PARTIAL_SESSIONS {
                    sessions.pop_front();
                }
                None
            }
        }
    }

    /// Drops sessions that have waited for `limit`.
    pub fn expire(&mut self, now: Duration, limit: Duration) {
        self.0.retain(|_, sessions| {
            sessions.retain(|p| now < p.first_lane_at + limit);
            !sessions.is_empty()
        });
    }

    /// Drops the partial sessions of `node`.
    pub fn forget(&mut self, node: NodeId) {
        self.0.remove(&node);
    }
}

/// The pauses between dial attempts.
#[derive(Clone, Copy, Debug)]
pub struct DialBackoff(Duration);

impl Default for DialBackoff {
    fn default() -> Self {
        Self(DIAL_BACKOFF[0])
    }
}

impl DialBackoff {
    /// The next pause: between half and all of a time that doubles with each call, chosen by
    /// `random`, so that nodes do not dial in step.
    #[must_use]
    pub fn next(&mut self, random: u64) -> Duration {
        let full = self.0;
        self.0 = (full * 2).min(DIAL_BACKOFF[1]);
        let half_ms = u64::try_from(full.as_millis() / 2).unwrap_or(u64::MAX);
        full / 2 + Duration::from_millis(random % (half_ms + 1))
    }
}

/// Remembers the last message about each subject, so that it is logged once and not at each
/// attempt.
#[derive(Debug)]
pub struct LogDedup<K, W>(BTreeMap<K, W>);

impl<K, W> Default for LogDedup<K, W> {
    fn default() -> Self {
        Self(BTreeMap::new())
    }
}

impl<K: Ord, W: PartialEq> LogDedup<K, W> {
    /// Whether `what` differs from the last message about `subject`.
    #[must_use]
    pub fn is_news(&mut self, subject: K, what: W) -> bool {
        if self.0.get(&subject) == Some(&what) {
            return false;
        }
        // Anyone can claim to be any node: limit what is remembered.
        if self.0.len() >= MAX_REMEMBERED {
            self.0.clear();
        }
        self.0.insert(subject, what);
        true
    }

    /// Makes the next message about `subject` count as new.
    pub fn forget(&mut self, subject: &K) {
        self.0.remove(subject);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn identity(node: u16) -> PeerIdentity {
        let secret = PeerSecret::new(&[7; 32]);
        PeerIdentity::new(Uuid::from_u128(1), secret, NodeId(node), Uuid::from_u128(2))
    }

    fn hello(from: u16, to: u16) -> Hello {
        identity(from).hello(NodeId(to), ConnectionPurpose::Lane(Lane::Requests), 5, [9; 32])
    }

    #[test]
    fn the_highest_version_in_common_is_spoken() {
        assert_eq!(highest_common((1, 1), (1, 1)), Some(1));
        assert_eq!(highest_common((1, 2), (2, 3)), Some(2));
        assert_eq!(highest_common((3, 4), (1, 9)), Some(4));
        assert_eq!(highest_common((1, 2), (3, 4)), None);
        let newer = PeerIdentity { versions: (1, 2), ..identity(1) };
        let theirs = Hello { max_version: 3, ..hello(2, 1) };
        assert_eq!(newer.check_dialler(&theirs).map(|a| a.version), Ok(2));
    }

    /// RFD 0010, 8.2.
    #[test]
    fn a_refused_peer_gets_the_reason() {
        let of = |change: &dyn Fn(&mut Hello)| {
            let mut hello = hello(2, 1);
            change(&mut hello);
            identity(1).check_dialler(&hello).unwrap_err()
        };
        let versions = |h: &mut Hello| (h.min_version, h.max_version) = (2, 3);
        assert_eq!(of(&versions), HandshakeRefusal::NoCommonVersion);
        assert_eq!(of(&|h| h.cluster = Uuid::nil()), HandshakeRefusal::WrongCluster);
        assert_eq!(of(&|h| h.receiver = NodeId(3)), HandshakeRefusal::WrongReceiver);
        assert_eq!(of(&|h| h.sender = NodeId(1)), HandshakeRefusal::InvalidSender);
        assert_eq!(of(&|h| h.sender = NodeId(0)), HandshakeRefusal::InvalidSender);
        assert_eq!(of(&|h| h.volume = Uuid::nil()), HandshakeRefusal::UnknownVolume);
        assert_eq!(of(&|h| h.features = FEATURE_TLS), HandshakeRefusal::TlsMismatch);
        assert_eq!(identity(3).check_dialler(&hello(2, 3)), Err(HandshakeRefusal::WrongDirection));
        let negotiated =
            identity(1).check_dialler(&Hello { features: 6, max_data_bytes: 512, ..hello(2, 1) });
        assert_eq!(
            negotiated,
            Ok(NegotiatedParams { version: 1, features: 0, max_data_bytes: 512 })
        );
    }

    #[test]
    fn a_proof_of_another_connection_is_refused() {
        let (ours, theirs) = (hello(2, 1), hello(1, 2));
        assert!(identity(2).check_acceptor(&ours, &theirs).is_ok());
        let of = |theirs| identity(2).check_acceptor(&ours, &theirs).unwrap_err();
        assert_eq!(of(Hello { sender: NodeId(3), ..theirs }), HandshakeRefusal::WrongReceiver);
        assert_eq!(of(Hello { session: 6, ..theirs }), HandshakeRefusal::WrongAnswer);
        assert_eq!(
            of(Hello { purpose: ConnectionPurpose::Lease, ..theirs }),
            HandshakeRefusal::WrongAnswer
        );
        assert_eq!(of(Hello { volume: Uuid::nil(), ..theirs }), HandshakeRefusal::WrongAnswer);
        assert_eq!(of(Hello { cluster: Uuid::nil(), ..theirs }), HandshakeRefusal::WrongCluster);
    }

    #[test]
    fn a_proof_holds_for_one_side_of_one_connection() {
        let (secret, hellos) =
            (PeerSecret::new(&[7; 32]), HelloPair { dialler: b"ab", acceptor: b"c" });
        let proof = secret.prove(Side::Dialler, &hellos);
        assert!(secret.verifies(Side::Dialler, &hellos, &proof));
        assert!(!secret.verifies(Side::Acceptor, &hellos, &proof), "reflected");
        let moved = HelloPair { dialler: b"a", acceptor: b"bc" };
        assert!(!secret.verifies(Side::Dialler, &moved, &proof), "another connection");
        assert!(!PeerSecret::new(&[8; 32]).verifies(Side::Dialler, &hellos, &proof), "no secret");
        assert!(!format!("{secret:?}").contains('7'));
    }

    #[test]
    fn a_session_is_complete_with_all_lanes_of_one_nonce() {
        let negotiated = NegotiatedParams { version: 1, features: 0, max_data_bytes: 512 };
        let mut assembly = SessionAssembly::default();
        let mut add = |ms, nonce, lane, stream| {
            let attempt = (NodeId(2), nonce, negotiated);
            assembly.add(Duration::from_millis(ms), attempt, lane, stream)
        };
        assert_eq!(add(0, 1, Lane::Replication, 'd'), None);
        assert_eq!(add(1, 2, Lane::Replication, 'x'), None);
        assert_eq!(add(2, 1, Lane::Requests, 'u'), None);
        assert_eq!(add(3, 2, Lane::Replication, 'y'), None, "twice: that attempt is over");
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
        let mut backoff = DialBackoff::default();
        let pauses: Vec<_> = (0..7).map(|_| backoff.next(u64::MAX / 3).as_millis()).collect();
        let least = [50, 100, 200, 400, 800, 1000, 1000];
        assert!(pauses.iter().zip(least).all(|(&p, l)| (l..=2 * l).contains(&p)), "{pauses:?}");
    }

    #[test]
    fn a_refusal_is_news_once() {
        let mut dedup = LogDedup::default();
        assert!(dedup.is_news(1, 'a') && !dedup.is_news(1, 'a') && dedup.is_news(1, 'b'));
        dedup.forget(&1);
        assert!(dedup.is_news(1, 'b'));
        assert!((0..1000).all(|subject| dedup.is_news(subject, 'c') || subject == 1));
        assert!(dedup.0.len() <= MAX_REMEMBERED);
    }
}
