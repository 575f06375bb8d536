//! What a joining node is handed by a human: one word to copy, in which stands which cluster it is, where its nodes let
//! others in, and the token's secret. It opens nothing but that door (RFD 0038, 2.3).
//!
//! It is base64url (RFC 4648 5), without padding, of these bytes; numbers are big-endian:
//!
//! | bytes | |
//! |---|---|
//! | 1 | [`VERSION`] |
//! | 1 | what the door shows: 0 nothing (plain text), 1 a certificate of an administrator, 2 one of the cluster's authority |
//! | 16 | UUID of the cluster |
//! | 4 | the token's identifier |
//! | 16 | its secret |
//! | 32 | SHA-256 of the authority's certificate; only where there is one |
//! | 1 | how many addresses follow, 1 to 16 |
//! | each 7 or 19 | 4 or 6; the IP address; the port |
//! | 4 | CRC-32C of all before |

use std::fmt;
use std::net::{IpAddr, SocketAddr};

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use ring::digest::{SHA256, digest};
use ring::rand::{SecureRandom, SystemRandom};
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};
use uuid::Uuid;

use crate::identity::Protection;

/// Version of the form that this program writes and reads.
pub const VERSION: u8 = 2;

/// Longest token, in characters.
pub const MAX_TOKEN: usize = 1024;

/// Most addresses that a token names.
pub const MAX_ADDRESSES: usize = 16;

/// Identifier of a token or of a request to join, for people: eight hex digits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ShortId(pub u32);

impl ShortId {
    /// A random one; `None` if the system gives no random bytes.
    #[must_use]
    pub fn random() -> Option<Self> {
        random().map(|bytes| Self(u32::from_be_bytes(bytes)))
    }
}

impl fmt::Display for ShortId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:08x}", self.0)
    }
}

/// A text that is no identifier.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("an identifier is eight hex digits, such as 1a2b3c4d")]
pub struct BadId;

impl std::str::FromStr for ShortId {
    type Err = BadId;

    fn from_str(text: &str) -> Result<Self, BadId> {
        let is_hex = text.len() == 8 && text.bytes().all(|b| b.is_ascii_hexdigit());
        let number = u32::from_str_radix(text, 16).ok().filter(|_| is_hex);
        number.map(Self).ok_or(BadId)
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

/// What shows that somebody has a token: 128 random bits. Shows nothing of itself.
#[derive(Clone, PartialEq, Eq)]
pub struct TokenSecret([u8; 16]);

impl TokenSecret {
    /// The secret in these bytes.
    #[must_use]
    pub fn new(bytes: [u8; 16]) -> Self {
        Self(bytes)
    }

    /// A new one; `None` if the system gives no random bytes.
    #[must_use]
    pub fn random() -> Option<Self> {
        random().map(Self)
    }

    /// What the store has of it: its SHA-256. There are 128 random bits to be found before this helps anybody.
    #[must_use]
    pub fn digest(&self) -> Digest {
        Digest::of(&self.0)
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
        bytes_of(&String::deserialize(from)?)
            .map(Self)
            .ok_or_else(|| de::Error::custom("a secret has 16 bytes"))
    }
}

/// A SHA-256, in base64url.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Digest(pub [u8; 32]);

impl Digest {
    /// That of these bytes.
    #[must_use]
    pub fn of(bytes: &[u8]) -> Self {
        let mut sum = [0; 32];
        sum.copy_from_slice(digest(&SHA256, bytes).as_ref());
        Self(sum)
    }
}

impl Serialize for Digest {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_str(&URL_SAFE_NO_PAD.encode(self.0))
    }
}

impl<'de> Deserialize<'de> for Digest {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        bytes_of(&String::deserialize(from)?)
            .map(Self)
            .ok_or_else(|| de::Error::custom("a SHA-256 has 32 bytes"))
    }
}

fn random<const N: usize>() -> Option<[u8; N]> {
    let mut bytes = [0; N];
    SystemRandom::new().fill(&mut bytes).ok().map(|()| bytes)
}

fn bytes_of<const N: usize>(text: &str) -> Option<[u8; N]> {
    URL_SAFE_NO_PAD.decode(text).ok()?.try_into().ok()
}

/// By what a joining node knows that it speaks with the token's cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Trust {
    /// By nothing: the cluster speaks in plain text.
    Plain,
    /// By the certificates that an administrator has given both.
    Given,
    /// By the cluster's authority, whose certificate has this SHA-256.
    Own(Digest),
}

impl Trust {
    /// What a token of a cluster says that is protected so; `None` if its authority cannot be used.
    #[must_use]
    pub fn of(protection: &Protection) -> Option<Self> {
        match protection {
            Protection::Own(authority) => authority.fingerprint().ok().map(Digest).map(Self::Own),
            Protection::Given => Some(Self::Given),
            Protection::Plain => Some(Self::Plain),
        }
    }

    /// Whether a cluster that is protected so is the one that is meant.
    #[must_use]
    pub fn fits(&self, protection: &Protection) -> bool {
        Self::of(protection) == Some(*self)
    }
}

/// What a token says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Token {
    /// The cluster.
    pub cluster: Uuid,
    /// Which of its tokens.
    pub id: ShortId,
    /// What shows that somebody has it.
    pub secret: TokenSecret,
    /// By what the cluster's nodes are known.
    pub trust: Trust,
    /// Where nodes let others in, at least one.
    pub addresses: Vec<SocketAddr>,
}

/// Why something is no token.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadToken {
    /// Nothing is there.
    #[error("the token is empty")]
    Empty,
    /// It is not one word of the alphabet, or not all of it.
    #[error("the token was not copied whole, or is none ({why})")]
    Mangled {
        /// What is wrong.
        why: &'static str,
    },
    /// Another version of the program made it.
    #[error(
        "the token has version {found}, this program knows version {VERSION}: run the same version of windrose here and \
         where the token was made, and make a new one there"
    )]
    OtherVersion {
        /// Its version.
        found: u8,
    },
}

const SHORT: BadToken = BadToken::Mangled { why: "it ends too early" };

/// Takes bytes from the front.
struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn take<const N: usize>(&mut self) -> Result<[u8; N], BadToken> {
        let (head, rest) = self.0.split_first_chunk().ok_or(SHORT)?;
        self.0 = rest;
        Ok(*head)
    }

    fn byte(&mut self) -> Result<u8, BadToken> {
        self.take().map(|[byte]| byte)
    }

    fn address(&mut self) -> Result<SocketAddr, BadToken> {
        let ip: IpAddr = match self.byte()? {
            4 => self.take::<4>()?.into(),
            6 => self.take::<16>()?.into(),
            _ => return Err(BadToken::Mangled { why: "an address in it is none" }),
        };
        Ok(SocketAddr::new(ip, u16::from_be_bytes(self.take()?)))
    }
}

impl Token {
    /// What `text` says. Blanks around it are no part of it.
    ///
    /// # Errors
    /// [`BadToken`].
    pub fn parse(text: &str) -> Result<Self, BadToken> {
        let mangled = |why| BadToken::Mangled { why };
        let text = text.trim();
        if text.is_empty() {
            return Err(BadToken::Empty);
        }
        if text.len() > MAX_TOKEN {
            return Err(mangled("it is too long"));
        }
        let bytes = URL_SAFE_NO_PAD
            .decode(text)
            .map_err(|_| mangled("it is not one word of letters, digits, - and _"))?;
        let (said, sum) = bytes.split_last_chunk().ok_or(SHORT)?;
        // First: what is no token has no version.
        if wire::crc32c(said) != u32::from_be_bytes(*sum) {
            return Err(mangled("its checksum does not match"));
        }
        match said.split_first() {
            Some((&VERSION, rest)) => Self::read(&mut Reader(rest)),
            Some((&found, _)) => Err(BadToken::OtherVersion { found }),
            None => Err(SHORT),
        }
    }

    fn read(from: &mut Reader<'_>) -> Result<Self, BadToken> {
        let kind = from.byte()?;
        let cluster = Uuid::from_bytes(from.take()?);
        let id = ShortId(u32::from_be_bytes(from.take()?));
        let secret = TokenSecret(from.take()?);
        let trust = match kind {
            0 => Trust::Plain,
            1 => Trust::Given,
            2 => Trust::Own(Digest(from.take()?)),
            _ => return Err(BadToken::Mangled { why: "it is of an unknown kind" }),
        };
        let count = usize::from(from.byte()?);
        if count == 0 || count > MAX_ADDRESSES {
            return Err(BadToken::Mangled { why: "it names no addresses, or too many" });
        }
        let addresses = (0..count).map(|_| from.address()).collect::<Result<_, _>>()?;
        if !from.0.is_empty() {
            return Err(BadToken::Mangled { why: "it goes on too long" });
        }
        Ok(Self { cluster, id, secret, trust, addresses })
    }

    /// As [`Self::parse`] reads it. Addresses beyond the first [`MAX_ADDRESSES`] are left out.
    #[must_use]
    pub fn to_text(&self) -> String {
        let Self { cluster, id, secret, trust, addresses } = self;
        let (kind, pin): (u8, &[u8]) = match trust {
            Trust::Plain => (0, &[]),
            Trust::Given => (1, &[]),
            Trust::Own(Digest(pin)) => (2, pin),
        };
        let mut bytes = vec![VERSION, kind];
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
    use crate::authority::Authority;

    fn token(trust: Trust) -> Token {
        Token {
            cluster: Uuid::from_u128(7),
            id: ShortId(0x1a2b_3c4d),
            secret: TokenSecret([0x5a; 16]),
            trust,
            addresses: vec![
                "192.0.2.1:7481".parse().unwrap(),
                "[2001:db8::1]:7481".parse().unwrap(),
            ],
        }
    }

    #[test]
    fn a_token_reads_back_as_it_was_written() {
        for trust in [Trust::Plain, Trust::Given, Trust::Own(Digest([9; 32]))] {
            let token = token(trust);
            let text = token.to_text();
            assert!(text.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-' || b == b'_'));
            assert_eq!(Token::parse(&format!(" {text}\n")), Ok(token.clone()));
            // It is copied by hand: it begins with no dash, and is short.
            assert!(text.starts_with('A') && text.len() < 160, "{text}");
            assert!(!format!("{token:?}").contains("90, 90"), "secrets stay out of logs");
        }
    }

    #[test]
    fn the_bytes_of_a_token_are_these() {
        let bytes = URL_SAFE_NO_PAD.decode(token(Trust::Own(Digest([9; 32]))).to_text()).unwrap();
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
        let whole = token(Trust::Own(Digest([9; 32])));
        let text = whole.to_text();
        assert_eq!(Token::parse(" \n"), Err(BadToken::Empty));
        let half = &text[..text.len() / 2];
        let nowhere = Token { addresses: Vec::new(), ..whole }.to_text();
        let long = "A".repeat(MAX_TOKEN + 1);
        // What is typed by hand begins with any byte.
        for bad in
            [half, "not a token", "+/+/", &nowhere, &long, "Ag", "AgAAAAAA", "abc", "abcdefgh"]
        {
            let refused = Token::parse(bad).unwrap_err().to_string();
            assert!(refused.contains("not copied whole"), "{bad}: {refused}");
        }
    }

    #[test]
    fn only_a_token_that_is_whole_is_said_to_be_of_another_version() {
        let whole = token(Trust::Own(Digest([9; 32]))).to_text();
        let mut bytes = URL_SAFE_NO_PAD.decode(whole).unwrap();
        bytes[0] = 7;
        let mangled = BadToken::Mangled { why: "its checksum does not match" };
        assert_eq!(Token::parse(&URL_SAFE_NO_PAD.encode(&bytes)), Err(mangled));
        let at = bytes.len() - 4;
        let sum = wire::crc32c(&bytes[..at]).to_be_bytes();
        bytes[at..].copy_from_slice(&sum);
        let other = BadToken::OtherVersion { found: 7 };
        assert_eq!(Token::parse(&URL_SAFE_NO_PAD.encode(&bytes)), Err(other));
    }

    #[test]
    fn no_digit_of_a_token_changes_unseen() {
        let text = token(Trust::Own(Digest([9; 32]))).to_text();
        for at in 0..text.len() {
            let other = if text.as_bytes()[at] == b'A' { "B" } else { "A" };
            let mut bad = text.clone();
            bad.replace_range(at..=at, other);
            assert!(Token::parse(&bad).is_err(), "{at}");
            assert!(Token::parse(&text[..at]).is_err(), "{at} digits");
        }
    }

    #[test]
    fn a_token_fits_the_cluster_that_it_is_of() {
        let (own, other) = (Authority::new().unwrap(), Authority::new().unwrap());
        let trust = Trust::of(&Protection::Own(own.clone())).unwrap();
        assert!(trust.fits(&Protection::Own(own)) && !trust.fits(&Protection::Own(other)));
        assert!(!trust.fits(&Protection::Plain) && !Trust::Plain.fits(&Protection::Given));
        assert!(Trust::Given.fits(&Protection::Given));
    }

    #[test]
    fn identifiers_are_eight_hex_digits() {
        assert_eq!("1A2b3c4d".parse(), Ok(ShortId(0x1a2b_3c4d)));
        assert_eq!(ShortId(7).to_string(), "00000007");
        for bad in ["", "1a2b3c4", "1a2b3c4d5", "+1a2b3c4", "1a2b3c4g", "ä1a2b3"] {
            assert_eq!(bad.parse::<ShortId>(), Err(BadId), "{bad}");
        }
    }
}
