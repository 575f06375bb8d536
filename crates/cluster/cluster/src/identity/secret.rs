//! The cluster's secret, as stored in files and tokens.

use std::fmt::{self, Write};

use ring::rand::{SecureRandom, SystemRandom};
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

/// The shared secret of a cluster's nodes: 32 random bytes, written as hex digits. Debug output
/// never shows it.
#[derive(Clone, PartialEq, Eq)]
pub struct ClusterSecret([u8; 32]);

impl ClusterSecret {
    /// Builds a secret from these bytes.
    #[must_use]
    pub fn new(bytes: [u8; 32]) -> Self {
        Self(bytes)
    }

    /// Generates a secret; `None` if the system provides no random bytes.
    #[must_use]
    pub fn random() -> Option<Self> {
        let mut bytes = [0; 32];
        SystemRandom::new().fill(&mut bytes).ok()?;
        Some(Self(bytes))
    }

    /// The secret in the form that peer links use.
    #[must_use]
    pub fn to_peer_secret(&self) -> peer::PeerSecret {
        peer::PeerSecret::new(&self.0)
    }

    /// Makes `links` authenticate with this secret, and also accept `other`.
    pub fn install_in(&self, links: &peer::PeerSecret, other: Option<&Self>) {
        links.replace(&self.0, other.map(|other| &other.0));
    }

    /// The bytes, for key derivation.
    pub(crate) fn bytes(&self) -> &[u8; 32] {
        &self.0
    }
}

impl fmt::Debug for ClusterSecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ClusterSecret(..)")
    }
}

impl Serialize for ClusterSecret {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        let mut hex = String::with_capacity(64);
        for byte in self.0 {
            let _ = write!(hex, "{byte:02x}");
        }
        to.serialize_str(&hex)
    }
}

impl<'de> Deserialize<'de> for ClusterSecret {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let hex = String::deserialize(from)?;
        parse_hex(&hex).map(Self).ok_or_else(|| de::Error::custom("a secret has 64 hex digits"))
    }
}

fn parse_hex(hex: &str) -> Option<[u8; 32]> {
    let digits: Option<Vec<_>> = hex.chars().map(|c| c.to_digit(16)).collect();
    let digits = digits.filter(|digits| digits.len() == 64)?;
    let mut bytes = [0; 32];
    for (byte, pair) in bytes.iter_mut().zip(digits.chunks_exact(2)) {
        *byte = u8::try_from(pair[0] << 4 | pair[1]).ok()?;
    }
    Some(bytes)
}
