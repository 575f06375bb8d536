//! Keys in their text form:

use std::fmt;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use crc_fast::{CrcAlgorithm, checksum};
use zeroize::Zeroizing;

use super::CipherSuite;
use super::psk::{HkdfLabelLayout, Psks, hkdf_expand_label};
use crate::auth::SecretBytes;

/// Prefix of a key.
const PREFIX: &str = "NVMeTLSkey-1:";

/// The configured key of a host and a subsystem; never printed.
#[derive(Clone, PartialEq, Eq)]
pub struct TlsKey {
    suite: CipherSuite,
    /// Whether it is first transformed with the host's name.
    transformed: bool,
    bytes: SecretBytes,
}

/// Why a text is not a key. Does not contain the text.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadKey {
    /// Wrong form.
    #[error("a key has the form NVMeTLSkey-1:hh:BASE64:")]
    Form,
    /// Unknown hash of the transformation.
    #[error("a key is transformed by 00 (nothing), 01 (SHA-256) or 02 (SHA-384)")]
    Transform,
    /// Not Base64.
    #[error("the third part of a key is not Base64")]
    Base64,
    /// A length that no key has, or not that of its hash.
    #[error(
        "a key has as many bytes as its hash, 32 (SHA-256) or 48 (SHA-384), and a checksum of 4"
    )]
    Length,
    /// Wrong checksum: mistyped or incomplete.
    #[error("the checksum of the key is wrong: it was mistyped")]
    Checksum,
}

impl TlsKey {
    /// Parses a key: `NVMeTLSkey-1:`, two digits for the hash of its transformation, `:`, and in
    /// Base64 the key with its CRC-32, `:`.
    ///
    /// # Errors
    /// [`BadKey`].
    pub fn parse(text: &str) -> Result<Self, BadKey> {
        let rest = text.strip_prefix(PREFIX).and_then(|rest| rest.strip_suffix(':'));
        let (transform, encoded) =
            rest.and_then(|rest| rest.split_once(':')).ok_or(BadKey::Form)?;
        let transform = match transform {
            "00" => None,
            digits => Some(CipherSuite::from_digits(digits).ok_or(BadKey::Transform)?),
        };
        let decoded = Zeroizing::new(STANDARD.decode(encoded).map_err(|_| BadKey::Base64)?);
        let (bytes, crc) = decoded.split_last_chunk().ok_or(BadKey::Length)?;
        let mut suites = CipherSuite::ALL.into_iter();
        let suite = suites.find(|s| s.key_len() == bytes.len()).ok_or(BadKey::Length)?;
        if transform.is_some_and(|of| of != suite) {
            return Err(BadKey::Length);
        }
        if u64::from(u32::from_le_bytes(*crc)) != checksum(CrcAlgorithm::Crc32IsoHdlc, bytes) {
            return Err(BadKey::Checksum);
        }
        let transformed = transform.is_some();
        Ok(Self { suite, transformed, bytes: SecretBytes::new(bytes.to_vec()) })
    }

    /// Cipher suite of this key.
    #[must_use]
    pub fn suite(&self) -> CipherSuite {
        self.suite
    }

    /// The PSKs derived from it for this host and this subsystem, in every way that hosts use.
    #[must_use]
    pub fn psks<'a>(&'a self, hostnqn: &'a str, subnqn: &'a str) -> Psks<'a> {
        Psks::new(self, hostnqn, subnqn)
    }

    /// The retained key (3.6.1); `None` if the host's name is too long.
    pub(super) fn retained(&self, layout: HkdfLabelLayout, hostnqn: &str) -> Option<SecretBytes> {
        if !self.transformed {
            return Some(self.bytes.clone());
        }
        hkdf_expand_label(self.suite.hash(), self.bytes.bytes(), layout, "HostNQN", hostnqn)
    }
}

impl fmt::Debug for TlsKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("TlsKey")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The first two are from `nvme gen-tls-key` 2.3, the others from Python's Base64 and CRC-32.
    #[test]
    fn keys_have_the_interchange_format() {
        for (text, suite, transformed) in [
            (
                "NVMeTLSkey-1:01:0QkSudaQUIS892CTNQHqj1hCLcYfg7th53njjkT/K02byNhe:",
                CipherSuite::Aes128Sha256,
                true,
            ),
            (
                "NVMeTLSkey-1:02:i1nGBt2koN6FxNc94NCqX05byeoU1Y1oung/stvgiClhcwCJUu4hIHQOHnr3XxQAdLgN5w==:",
                CipherSuite::Aes256Sha384,
                true,
            ),
            (
                "NVMeTLSkey-1:00:VRLbtnN9AQb2WXW3c9+wEf/DRLz0QuLdbYvEhwtdWwNf9LrZ:",
                CipherSuite::Aes128Sha256,
                false,
            ),
            (
                "NVMeTLSkey-1:00:VRLbtnN9AQb2WXW3c9+wEf/DRLz0QuLdbYvEhwtdWwP/w0S89ELi3W2LxIcLXVsDn8kXZQ==:",
                CipherSuite::Aes256Sha384,
                false,
            ),
        ] {
            let key = TlsKey::parse(text).unwrap();
            assert_eq!((key.suite(), key.transformed), (suite, transformed));
            assert_eq!(format!("{key:?}"), "TlsKey");
        }
    }

    #[test]
    fn invalid_keys_are_refused_with_a_reason() {
        for (text, why) in [
            ("", BadKey::Form),
            ("NVMeTLSkey-2:00:VRLbtnN9AQb2WXW3c9+wEf/DRLz0QuLdbYvEhwtdWwNf9LrZ:", BadKey::Form),
            ("NVMeTLSkey-1:00:VRLbtnN9AQb2WXW3c9+wEf/DRLz0QuLdbYvEhwtdWwNf9LrZ", BadKey::Form),
            ("NVMeTLSkey-1:", BadKey::Form),
            ("NVMeTLSkey-1:03:AAAA:", BadKey::Transform),
            ("NVMeTLSkey-1:1:AAAA:", BadKey::Transform),
            ("NVMeTLSkey-1:01:A!AA:", BadKey::Base64),
            ("NVMeTLSkey-1:01::", BadKey::Length),
            ("NVMeTLSkey-1:01:AAAA:", BadKey::Length),
            ("NVMeTLSkey-1:02:VRLbtnN9AQb2WXW3c9+wEf/DRLz0QuLdbYvEhwtdWwNf9LrZ:", BadKey::Length),
            ("NVMeTLSkey-1:01:VRLbtnN9AQb2WXW3c9+wEf/DRLz0QuLdbYvEhwtdWwNf9LrA:", BadKey::Checksum),
            ("NVMeTLSkey-1:01:WRLbtnN9AQb2WXW3c9+wEf/DRLz0QuLdbYvEhwtdWwNf9LrZ:", BadKey::Checksum),
        ] {
            assert_eq!(TlsKey::parse(text), Err(why), "{text}");
        }
    }
}
