//! Key identities in a ClientHello

use std::fmt;

use super::CipherSuite;

/// Length in bytes of the longest NQN.
const NQN_BYTES: usize = 223;

/// An identity: purpose, host and subsystem of a key.
///
/// ```text
/// NVMe1R01 HOSTNQN SUBNQN DIGEST      version 1 (TP 8018)
/// NVMe0R01 HOSTNQN SUBNQN             version 0 (TP 8011)
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Identity<'a> {
    /// Cipher suite of the key.
    pub suite: CipherSuite,
    /// The host.
    pub hostnqn: &'a str,
    /// The subsystem.
    pub subnqn: &'a str,
    /// The digest of the key, in Base64; version 0 has none.
    pub digest: Option<&'a str>,
}

impl<'a> Identity<'a> {
    /// Parses an identity of a configured key (`R`); `None` if invalid or of an unknown version.
    #[must_use]
    pub fn parse(bytes: &'a [u8]) -> Option<Self> {
        let text = std::str::from_utf8(bytes).ok()?;
        let mut parts = text.split(' ');
        let head = parts.next()?;
        let (version, digits) = head.strip_prefix("NVMe")?.split_once('R')?;
        let suite = CipherSuite::from_digits(digits)?;
        let (hostnqn, subnqn) = (nqn(parts.next()?)?, nqn(parts.next()?)?);
        let digest = match version {
            "0" => None,
            "1" => Some(parts.next().filter(|digest| !digest.is_empty())?),
            _ => return None,
        };
        parts.next().is_none().then_some(Self { suite, hostnqn, subnqn, digest })
    }
}

/// `text`, if it is a valid NQN.
fn nqn(text: &str) -> Option<&str> {
    let is_one = !text.is_empty() && text.len() <= NQN_BYTES && !text.contains(char::is_control);
    is_one.then_some(text)
}

impl fmt::Display for Identity<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (version, digits) = (u8::from(self.digest.is_some()), self.suite.digits());
        write!(f, "NVMe{version}R{digits} {} {}", self.hostnqn, self.subnqn)?;
        self.digest.map_or(Ok(()), |digest| write!(f, " {digest}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn identities_read_back_as_they_are_written() {
        let (hostnqn, subnqn) = ("nqn.2026-01.com.example:h", "nqn.2026-01.com.example:s");
        for suite in CipherSuite::ALL {
            for digest in [None, Some("iSbjiStwJ/1TrTvDlt2fjFmzvsytOJelidNnA+X5lEU=")] {
                let identity = Identity { suite, hostnqn, subnqn, digest };
                assert_eq!(Identity::parse(identity.to_string().as_bytes()), Some(identity));
            }
        }
    }

    #[test]
    fn unknown_identities_have_no_key() {
        let long = format!("NVMe0R01 {} nqn.s", "x".repeat(224));
        for text in [
            "",
            "NVMe",
            "NVMe0R01",
            "NVMe0R01 nqn.h",
            "NVMe0R01 nqn.h ",
            "NVMe0R01  nqn.s",
            "NVMe0R01 nqn.h nqn.s ",
            "NVMe0R01 nqn.h nqn.s digest",
            "NVMe1R01 nqn.h nqn.s",
            "NVMe1R01 nqn.h nqn.s ",
            "NVMe1R01 nqn.h nqn.s digest more",
            "NVMe0G01 nqn.h nqn.s",
            "NVMe2R01 nqn.h nqn.s digest",
            "NVMe0R03 nqn.h nqn.s",
            "NVMe0R1 nqn.h nqn.s",
            "Client_identity",
            "NVMe0R01 nqn.h\0 nqn.s",
            &long,
        ] {
            assert_eq!(Identity::parse(text.as_bytes()), None, "{text}");
        }
        assert_eq!(Identity::parse(b"NVMe0R01 nqn.\xff nqn.s"), None);
    }
}
