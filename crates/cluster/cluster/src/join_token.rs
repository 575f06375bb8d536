//! Join tokens: one word that an administrator copies to a joining node. It identifies the cluster,
//! the addresses that admit nodes, and the token's secret, and is good for joining only (RFD 0038,
//! 2.3).
//!
//! It is base64url (RFC 4648 5), without padding, of these bytes; numbers are big-endian:
//!
//! | bytes | |
//! |---|---|
//! | 1 | [`TOKEN_VERSION`] |
//! | 1 | trust anchor: 0 plain text, 1 administrator's CA, 2 the cluster's authority |
//! | 16 | UUID of the cluster |
//! | 4 | the token's identifier |
//! | 16 | its secret |
//! | 32 | SHA-256 of the authority's certificate; only for trust anchor 2 |
//! | 1 | how many addresses follow, 1 to 16 |
//! | each 7 or 19 | 4 or 6; the IP address; the port |
//! | 4 | CRC-32C of all preceding bytes |

use std::fmt;
use std::net::{IpAddr, SocketAddr};

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use ring::digest::{SHA256, digest};
use ring::rand::{SecureRandom, SystemRandom};
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};
use uuid::Uuid;

use crate::identity::TransportSecurity;

/// Token version that this program writes and reads.
pub const TOKEN_VERSION: u8 = 2;

/// Longest token, in characters.
pub const MAX_TOKEN_LEN: usize = 1024;

/// Most addresses in a token.
pub const MAX_ADDRESSES: usize = 16;

/// Identifier of a token or of a join request, readable by people: eight hex digits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ShortId(pub u32);

impl ShortId {
    /// Generates one; `None` if the system provides no random bytes.
    #[must_use]
    pub fn random() -> Option<Self> {
        random_bytes().map(|bytes| Self(u32::from_be_bytes(bytes)))
    }
}

impl fmt::Display for ShortId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:08x}", self.0)
    }
}

/// The text is not an identifier.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("an identifier is eight hex digits, such as 1a2b3c4d")]
pub struct InvalidShortId;

impl std::str::FromStr for ShortId {
    type Err = InvalidShortId;

    fn from_str(text: &str) -> Result<Self, InvalidShortId> {
        let is_hex = text.len() == 8 && text.bytes().all(|b| b.is_ascii_hexdigit());
        let number = u32::from_str_radix(text, 16).ok().filter(|_| is_hex);
        number.map(Self).ok_or(InvalidShortId)
    }
}

impl Serialize for ShortId {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for ShortId {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        String::deserialize(from)?.parse().map_err(de::Error::custom)
    }
}

/// Proves possession of a token: 128 random bits. Debug output never shows it.
#[derive(Clone, PartialEq, Eq)]
pub struct TokenSecret([u8; 16]);

impl TokenSecret {
    /// Builds a secret from these bytes.
    #[must_use]
    pub fn new(bytes: [u8; 16]) -> Self {
        Self(bytes)
    }

    /// Generates a secret; `None` if the system provides no random bytes.
    #[must_use]
    pub fn random() -> Option<Self> {
        random_bytes().map(Self)
    }

    /// Its SHA-256, which the store keeps. Inverting it means guessing 128 random bits.
    #[must_use]
    pub fn digest(&self) -> Sha256Digest {
        Sha256Digest::of(&self.0)
    }
}

impl fmt::Debug for TokenSecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("TokenSecret(..)")
    }
}

impl Serialize for TokenSecret {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_str(&URL_SAFE_NO_PAD.encode(self.0))
    }
}

impl<'de> Deserialize<'de> for TokenSecret {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        decode_base64(&String::deserialize(from)?)
            .map(Self)
            .ok_or_else(|| de::Error::custom("a secret has 16 bytes"))
    }
}

/// A SHA-256 digest, written in base64url.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sha256Digest(pub [u8; 32]);

impl Sha256Digest {
    /// The digest of these bytes.
    #[must_use]
    pub fn of(bytes: &[u8]) -> Self {
        let mut sum = [0; 32];
        sum.copy_from_slice(digest(&SHA256, bytes).as_ref());
        Self(sum)
    }
}

impl Serialize for Sha256Digest {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_str(&URL_SAFE_NO_PAD.encode(self.0))
    }
}

impl<'de> Deserialize<'de> for Sha256Digest {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        decode_base64(&String::deserialize(from)?)
            .map(Self)
            .ok_or_else(|| de::Error::custom("a SHA-256 has 32 bytes"))
    }
}

fn random_bytes<const N: usize>() -> Option<[u8; N]> {
    let mut bytes = [0; N];
    SystemRandom::new().fill(&mut bytes).ok().map(|()| bytes)
}

fn decode_base64<const N: usize>(text: &str) -> Option<[u8; N]> {
    URL_SAFE_NO_PAD.decode(text).ok()?.try_into().ok()
}

/// How a joining node recognises its token's cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TrustAnchor {
    /// Not at all: the cluster uses plain text.
    PlainText,
    /// By the CA that an administrator has given to both.
    AdministratorCa,
    /// By the cluster's own authority, whose certificate has this SHA-256.
    PinnedAuthority(Sha256Digest),
}

impl TrustAnchor {
    /// The trust anchor of a cluster with this protection; `None` if its authority is invalid.
    #[must_use]
    pub fn from_transport_security(protection: &TransportSecurity) -> Option<Self> {
        match protection {
            TransportSecurity::ClusterAuthority(authority) => {
                authority.fingerprint().ok().map(Sha256Digest).map(Self::PinnedAuthority)
            }
            TransportSecurity::AdministratorCertificates => Some(Self::AdministratorCa),
            TransportSecurity::PlainText => Some(Self::PlainText),
        }
    }

    /// Whether a cluster with this protection is the one the token names.
    #[must_use]
    pub fn matches(&self, protection: &TransportSecurity) -> bool {
        Self::from_transport_security(protection) == Some(*self)
    }
}

/// The contents of a token.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JoinToken {
    /// The cluster.
    pub cluster: Uuid,
    /// The token's identifier.
    pub id: ShortId,
    /// Proves possession of the token.
    pub secret: TokenSecret,
    /// How the cluster's nodes are recognised.
    pub trust_anchor: TrustAnchor,
    /// Where nodes accept join requests, at least one.
    pub addresses: Vec<SocketAddr>,
}

/// Why a text is not a valid token.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum JoinTokenError {
    /// The text is empty.
    #[error("the token is empty")]
    Empty,
    /// It has characters outside the alphabet, or is incomplete.
    #[error("the token is incomplete or invalid ({why})")]
    Malformed {
        /// What is wrong.
        why: &'static str,
    },
    /// Another version of the program created it.
    #[error(
        "the token has version {found}, this program supports version {TOKEN_VERSION}: run the \
         same version of windrose here and where the token was made, then make a new token there"
    )]
    UnsupportedVersion {
        /// Its version.
        found: u8,
    },
}

const TRUNCATED: JoinTokenError = JoinTokenError::Malformed { why: "it ends too early" };

/// Reads bytes from the front.
struct ByteReader<'a>(&'a [u8]);

impl ByteReader<'_> {
    fn take<const N: usize>(&mut self) -> Result<[u8; N], JoinTokenError> {
        let (head, rest) = self.0.split_first_chunk().ok_or(TRUNCATED)?;
        self.0 = rest;
        Ok(*head)
    }

    fn byte(&mut self) -> Result<u8, JoinTokenError> {
        self.take().map(|[byte]| byte)
    }

    fn address(&mut self) -> Result<SocketAddr, JoinTokenError> {
        let ip: IpAddr = match self.byte()? {
            4 => self.take::<4>()?.into(),
            6 => self.take::<16>()?.into(),
            _ => return Err(JoinTokenError::Malformed { why: "an address in it is invalid" }),
        };
        Ok(SocketAddr::new(ip, u16::from_be_bytes(self.take()?)))
    }
}

impl JoinToken {
    /// Parses a token. Surrounding white space is ignored.
    ///
    /// # Errors
    /// [`JoinTokenError`].
    pub fn parse(text: &str) -> Result<Self, JoinTokenError> {
        let mangled = |why| JoinTokenError::Malformed { why };
        let text = text.trim();
        if text.is_empty() {
            return Err(JoinTokenError::Empty);
        }
        if text.len() > MAX_TOKEN_LEN {
            return Err(mangled("it is too long"));
        }
        let bytes = URL_SAFE_NO_PAD
            .decode(text)
            .map_err(|_| mangled("it is not one word of letters, digits, - and _"))?;
        let (contents, sum) = bytes.split_last_chunk().ok_or(TRUNCATED)?;
        // Check the sum first: the version of a damaged token means nothing.
        if wire::crc32c(contents) != u32::from_be_bytes(*sum) {
            return Err(mangled("its checksum does not match"));
        }
        match contents.split_first() {
            Some((&TOKEN_VERSION, rest)) => Self::parse_fields(&mut ByteReader(rest)),
            Some((&found, _)) => Err(JoinTokenError::UnsupportedVersion { found }),
            None => Err(TRUNCATED),
        }
    }

    fn parse_fields(from: &mut ByteReader<'_>) -> Result<Self, JoinTokenError> {
        let kind = from.byte()?;
        let cluster = Uuid::from_bytes(from.take()?);
        let id = ShortId(u32::from_be_bytes(from.take()?));
        let secret = TokenSecret(from.take()?);
        let trust = match kind {
            0 => TrustAnchor::PlainText,
            1 => TrustAnchor::AdministratorCa,
            2 => TrustAnchor::PinnedAuthority(Sha256Digest(from.take()?)),
            _ => return Err(JoinTokenError::Malformed { why: "it is of an unknown kind" }),
        };
        let count = usize::from(from.byte()?);
        if count == 0 || count > MAX_ADDRESSES {
            return Err(JoinTokenError::Malformed { why: "it contains no addresses, or too many" });
        }
        let addresses = (0..count).map(|_| from.address()).collect::<Result<_, _>>()?;
        if !from.0.is_empty() {
            return Err(JoinTokenError::Malformed { why: "it has trailing data" });
        }
        Ok(Self { cluster, id, secret, trust_anchor: trust, addresses })
    }

    /// Encodes the token; [`Self::parse`] decodes it. Addresses beyond the first [`MAX_ADDRESSES`]
    /// are omitted.
    #[must_use]
    pub fn to_text(&self) -> String {
        let Self { cluster, id, secret, trust_anchor: trust, addresses } = self;
        let (kind, pin): (u8, &[u8]) = match trust {
            TrustAnchor::PlainText => (0, &[]),
            TrustAnchor::AdministratorCa => (1, &[]),
            TrustAnchor::PinnedAuthority(Sha256Digest(pin)) => (2, pin),
        };
        let mut bytes = vec![TOKEN_VERSION, kind];
        bytes.extend(cluster.as_bytes());
        bytes.extend(id.0.to_be_bytes());
        bytes.extend(secret.0);
        bytes.extend(pin);
        let addresses = &addresses[..addresses.len().min(MAX_ADDRESSES)];
        bytes.push(u8::try_from(addresses.len()).unwrap_or_default());
        for address in addresses {
            match address.ip() {
                IpAddr::V4(ip) => {
                    bytes.push(4);
                    bytes.extend(ip.octets());
                }
                IpAddr::V6(ip) => {
                    bytes.push(6);
                    bytes.extend(ip.octets());
                }
            }
            bytes.extend(address.port().to_be_bytes());
        }
        bytes.extend(wire::crc32c(&bytes).to_be_bytes());
        URL_SAFE_NO_PAD.encode(bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::certificate_authority::CertificateAuthority;

    fn token(trust: TrustAnchor) -> JoinToken {
        JoinToken {
            cluster: Uuid::from_u128(7),
            id: ShortId(0x1a2b_3c4d),
            secret: TokenSecret([0x5a; 16]),
            trust_anchor: trust,
            addresses: vec![
                "192.0.2.1:7481".parse().unwrap(),
                "[2001:db8::1]:7481".parse().unwrap(),
            ],
        }
    }

    #[test]
    fn a_token_reads_back_as_it_was_written() {
        for trust in [
            TrustAnchor::PlainText,
            TrustAnchor::AdministratorCa,
            TrustAnchor::PinnedAuthority(Sha256Digest([9; 32])),
        ] {
            let token = token(trust);
            let text = token.to_text();
            assert!(text.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-' || b == b'_'));
            assert_eq!(JoinToken::parse(&format!(" {text}\n")), Ok(token.clone()));
            // It is copied by hand: it must not begin with a dash, and must be short.
            assert!(text.starts_with('A') && text.len() < 160, "{text}");
            assert!(!format!("{token:?}").contains("90, 90"), "secrets stay out of logs");
        }
    }

    #[test]
    fn the_bytes_of_a_token_are_these() {
        let bytes = URL_SAFE_NO_PAD
            .decode(token(TrustAnchor::PinnedAuthority(Sha256Digest([9; 32]))).to_text())
            .unwrap();
        let mut expected =
            vec![2, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 7, 0x1a, 0x2b, 0x3c, 0x4d];
        expected.extend([0x5a; 16]);
        expected.extend([9; 32]);
        expected.extend([2, 4, 192, 0, 2, 1, 0x1d, 0x39]);
        expected.extend([6, 0x20, 1, 0x0d, 0xb8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0x1d, 0x39]);
        assert_eq!(bytes[..bytes.len() - 4], expected);
    }

    #[test]
    fn what_is_no_token_is_said_to_be_none() {
        let whole = token(TrustAnchor::PinnedAuthority(Sha256Digest([9; 32])));
        let text = whole.to_text();
        assert_eq!(JoinToken::parse(" \n"), Err(JoinTokenError::Empty));
        let half = &text[..text.len() / 2];
        let nowhere = JoinToken { addresses: Vec::new(), ..whole }.to_text();
        let long = "A".repeat(MAX_TOKEN_LEN + 1);
        // A mistyped token may begin with any byte.
        for bad in
            [half, "not a token", "+/+/", &nowhere, &long, "Ag", "AgAAAAAA", "abc", "abcdefgh"]
        {
            let refused = JoinToken::parse(bad).unwrap_err().to_string();
            assert!(refused.contains("incomplete or invalid"), "{bad}: {refused}");
        }
    }

    #[test]
    fn only_a_token_that_is_whole_is_said_to_be_of_another_version() {
        let whole = token(TrustAnchor::PinnedAuthority(Sha256Digest([9; 32]))).to_text();
        let mut bytes = URL_SAFE_NO_PAD.decode(whole).unwrap();
        bytes[0] = 7;
        let mangled = JoinTokenError::Malformed { why: "its checksum does not match" };
        assert_eq!(JoinToken::parse(&URL_SAFE_NO_PAD.encode(&bytes)), Err(mangled));
        let at = bytes.len() - 4;
        let sum = wire::crc32c(&bytes[..at]).to_be_bytes();
        bytes[at..].copy_from_slice(&sum);
        let other = JoinTokenError::UnsupportedVersion { found: 7 };
        assert_eq!(JoinToken::parse(&URL_SAFE_NO_PAD.encode(&bytes)), Err(other));
    }

    #[test]
    fn no_digit_of_a_token_changes_unseen() {
        let text = token(TrustAnchor::PinnedAuthority(Sha256Digest([9; 32]))).to_text();
        for at in 0..text.len() {
            let other = if text.as_bytes()[at] == b'A' { "B" } else { "A" };
            let mut bad = text.clone();
            bad.replace_range(at..=at, other);
            assert!(JoinToken::parse(&bad).is_err(), "{at}");
            assert!(JoinToken::parse(&text[..at]).is_err(), "{at} digits");
        }
    }

    #[test]
    fn a_token_fits_the_cluster_that_it_is_of() {
        let (own, other) =
            (CertificateAuthority::new().unwrap(), CertificateAuthority::new().unwrap());
        let trust =
            TrustAnchor::from_transport_security(&TransportSecurity::ClusterAuthority(own.clone()))
                .unwrap();
        assert!(
            trust.matches(&TransportSecurity::ClusterAuthority(own))
                && !trust.matches(&TransportSecurity::ClusterAuthority(other))
        );
        assert!(
            !trust.matches(&TransportSecurity::PlainText)
                && !TrustAnchor::PlainText.matches(&TransportSecurity::AdministratorCertificates)
        );
        assert!(
            TrustAnchor::AdministratorCa.matches(&TransportSecurity::AdministratorCertificates)
        );
    }

    #[test]
    fn identifiers_are_eight_hex_digits() {
        assert_eq!("1A2b3c4d".parse(), Ok(ShortId(0x1a2b_3c4d)));
        assert_eq!(ShortId(7).to_string(), "00000007");
        for bad in ["", "1a2b3c4", "1a2b3c4d5", "+1a2b3c4", "1a2b3c4g", "ä1a2b3"] {
            assert_eq!(bad.parse::<ShortId>(), Err(InvalidShortId), "{bad}");
        }
    }
}
