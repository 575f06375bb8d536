//! The keys that TLS uses (NVMe/TCP Transport 1.0c, 3.6.1.3), by HKDF (RFC 5869; RFC 8446, 7.1).

use std::fmt;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use zeroize::Zeroizing;

use super::{CipherSuite, Identity, TlsKey};
use crate::auth::{Hash, SecretBytes};

/// Constant hashed with the names.
const PURPOSE: &[u8] = b" NVMe-over-Fabrics";

/// Layout of HKDF's label.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum HkdfLabelLayout {
    /// By RFC 8446, 7.1.
    Standard,
    /// Without the lengths of its parts, and with the output length in x86 byte order: libnvme 1.7
    /// to 1.15.
    Unsized,
}

/// A PSK as TLS uses it, with its identity.
#[derive(Clone, PartialEq, Eq)]
pub struct Psk {
    identity: String,
    suite: CipherSuite,
    key: SecretBytes,
}

impl Psk {
    /// Its identity in a ClientHello.
    #[must_use]
    pub fn identity(&self) -> &str {
        &self.identity
    }

    /// Its cipher suite.
    #[must_use]
    pub fn suite(&self) -> CipherSuite {
        self.suite
    }

    /// The key itself, only for TLS.
    #[must_use]
    pub fn key(&self) -> &[u8] {
        self.key.bytes()
    }
}

impl fmt::Debug for Psk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Psk({})", self.identity)
    }
}

/// The PSKs that hosts may derive from a configured key, the specification's first. Two of them may
/// have the same identity.
#[derive(Debug)]
pub struct Psks<'a> {
    key: &'a TlsKey,
    hostnqn: &'a str,
    subnqn: &'a str,
    derivations: std::slice::Iter<'static, (HkdfLabelLayout, bool)>,
}

impl<'a> Psks<'a> {
    pub(super) fn new(key: &'a TlsKey, hostnqn: &'a str, subnqn: &'a str) -> Self {
        /// Layout, and whether the identity has a digest (version 1).
        const WAYS: [(HkdfLabelLayout, bool); 4] = [
            (HkdfLabelLayout::Standard, true),
            (HkdfLabelLayout::Standard, false),
            (HkdfLabelLayout::Unsized, true),
            (HkdfLabelLayout::Unsized, false),
        ];
        Self { key, hostnqn, subnqn, derivations: WAYS.iter() }
    }

    fn derive(&self, layout: HkdfLabelLayout, with_digest: bool) -> Option<Psk> {
        let suite = self.key.suite();
        let retained = self.key.retained(layout, self.hostnqn)?;
        let digest = with_digest.then(|| {
            let parts = [self.hostnqn.as_bytes(), b" ", self.subnqn.as_bytes(), PURPOSE];
            STANDARD.encode(suite.hash().hmac(retained.bytes(), &parts))
        });
        let (hostnqn, subnqn, of) = (self.hostnqn, self.subnqn, digest.as_deref());
        let identity = Identity { suite, hostnqn, subnqn, digest: of }.to_string();
        let context = match of {
            Some(digest) => &format!("{} {digest}", suite.digits()),
            None => &identity,
        };
        let key =
            hkdf_expand_label(suite.hash(), retained.bytes(), layout, "nvme-tls-psk", context)?;
        Some(Psk { identity, suite, key })
    }
}

impl Iterator for Psks<'_> {
    type Item = Psk;

    fn next(&mut self) -> Option<Psk> {
        loop {
            let &(layout, with_digest) = self.derivations.next()?;
            if let Some(psk) = self.derive(layout, with_digest) {
                return Some(psk);
            }
        }
    }
}

/// HKDF-Extract without salt, then HKDF-Expand-Label to the length of the hash; `None` if the
/// context is too long for the label.
pub(super) fn hkdf_expand_label(
    hash: Hash,
    key: &[u8],
    layout: HkdfLabelLayout,
    label: &str,
    context: &str,
) -> Option<SecretBytes> {
    const NO_SALT: [u8; Hash::MAX_LEN] = [0; Hash::MAX_LEN];
    /// Block counter of HKDF-Expand; the result is one block.
    const FIRST: [u8; 1] = [1];
    let len = u16::from(hash.hl());
    let label_len = [u8::try_from("tls13 ".len() + label.len()).ok()?];
    let context_len = [u8::try_from(context.len()).ok()];
    let (len, label_len, context_len) = match (layout, context_len) {
        (HkdfLabelLayout::Standard, [Some(n)]) => (len.to_be_bytes(), &label_len[..], vec![n]),
        (HkdfLabelLayout::Standard, [None]) => return None,
        (HkdfLabelLayout::Unsized, _) => (len.to_le_bytes(), &[][..], vec![]),
    };
    let parts: [&[u8]; 7] =
        [&len, label_len, b"tls13 ", label.as_bytes(), &context_len, context.as_bytes(), &FIRST];
    let extracted = Zeroizing::new(hash.hmac(&NO_SALT[..hash.len()], &[key]).as_ref().to_vec());
    Some(SecretBytes::new(hash.hmac(&extracted, &parts).as_ref().to_vec()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hex(bytes: &[u8]) -> String {
        bytes.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// The digests of the transformed keys are those of libnvme's own tests (`test/psk.c` of 1.16,
    /// with and without `compat`); all digests and keys were calculated by Python's `hmac` as well,
    /// from RFC 5869 and RFC 8446, 7.1.
    #[test]
    fn keys_match_other_implementations() {
        const HOST: &str = "nqn.psk-test-host";
        const SUBSYSTEM: &str = "nqn.psk-test-subsys";
        for (text, expected) in VECTORS {
            let key = TlsKey::parse(text).unwrap();
            let psks: Vec<_> = key.psks(HOST, SUBSYSTEM).collect();
            let digits = key.suite().digits();
            assert_eq!(psks.len(), 4);
            for (psk, (digest, bytes)) in psks.iter().zip(expected) {
                let version = u8::from(!digest.is_empty());
                let identity = format!("NVMe{version}R{digits} {HOST} {SUBSYSTEM} {digest}");
                assert_eq!(psk.identity(), identity.trim_end());
                assert_eq!(hex(psk.key()), bytes);
                assert_eq!(psk.suite(), key.suite());
                assert_eq!(format!("{psk:?}"), format!("Psk({})", psk.identity()));
                let named = Identity::parse(psk.identity().as_bytes()).unwrap();
                assert_eq!((named.hostnqn, named.subnqn), (HOST, SUBSYSTEM));
            }
        }
    }

    /// RFC 8446, 7.1: a context has at most 255 bytes. libnvme's old layout has none of that.
    #[test]
    fn names_too_long_for_a_label_have_fewer_keys() {
        let key = TlsKey::parse(VECTORS[1].0).unwrap();
        let (hostnqn, subnqn) = ("h".repeat(223), "s".repeat(223));
        let identities: Vec<_> =
            key.psks(&hostnqn, &subnqn).map(|psk| psk.identity().to_owned()).collect();
        let versions: Vec<_> = identities.iter().map(|identity| &identity[..5]).collect();
        assert_eq!(versions, ["NVMe1", "NVMe1", "NVMe0"]);
    }

    /// Digest and key of each way.
    type Derived = [(&'static str, &'static str); 4];

    const VECTORS: [(&str, Derived); 3] = [
        (
            "NVMeTLSkey-1:00:VRLbtnN9AQb2WXW3c9+wEf/DRLz0QuLdbYvEhwtdWwNf9LrZ:",
            [
                (
                    "quJVUJjp/BImWR0UQay/MjSfEgyAr6TyBOWybS/B404=",
                    "a45d08ee4639c7570729bb3e57e905e466a49a15ece5401af906830c4d3bdb0b",
                ),
                ("", "ec85300ba827726bd3bc4fc07f3a34aec5fe7c8ccac05fefc2f021c74e0df9ef"),
                (
                    "quJVUJjp/BImWR0UQay/MjSfEgyAr6TyBOWybS/B404=",
                    "d50f6d3dd79345b6e8217744524df5ac0dc66964ff70cc5fd18e1b9d57ce7fcf",
                ),
                ("", "e2b16189378b34adba9fec995ab479040cedec0bc7c6b47728ee4d8de6ff52ba"),
            ],
        ),
        (
            "NVMeTLSkey-1:01:VRLbtnN9AQb2WXW3c9+wEf/DRLz0QuLdbYvEhwtdWwNf9LrZ:",
            [
                (
                    "iSbjiStwJ/1TrTvDlt2fjFmzvsytOJelidNnA+X5lEU=",
                    "8fc3c0badfd4c0c66fa3ca33aadd0314f85536cc9bc47338b60f3e6e563786ca",
                ),
                ("", "05c6503551ad136e6ee32e6eeb3f6d500b69701d84ec71e328f65c7f51566f68"),
                (
                    "66GuqV08TsAGII39teWUfwQwizjv06Jy8jOcX3NAAzM=",
                    "b9f5ab2a41ba6e72a23a12066302a2f775fa6c0942c8e0b18ca8ac07edf305e2",
                ),
                ("", "09fb1983ac6d6d0353e7cae4f23daddd651c367fa347c59d9cf6936f5a83eafb"),
            ],
        ),
        (
            "NVMeTLSkey-1:02:VRLbtnN9AQb2WXW3c9+wEf/DRLz0QuLdbYvEhwtdWwP/w0S89ELi3W2LxIcLXVsDn8kXZQ==:",
            [
                (
                    "QhW2+Rp6RzHlNtCslyRxMnwJ11tKKhz8JCAQpQ+XUD8f9td1VeH5h53yz2wKJG1a",
                    "a2b2f943f479fc682555cec89857c80ed004ce92f32a973d5764155bb7e36b17a85368a0666d250afac9282dda2e62ca",
                ),
                (
                    "",
                    "f42ba63824cdfe421914c582921f85b5b5b7e2d4df084caeedc9be20b212e8bb0fe8a23e9d59a1c8fc6449da4970a78d",
                ),
                (
                    "RsKmYJ3nAn1ApjjMloJFbAkLPivONDAX/xW327YBUsn2eGShXSjCZvBaOxscLqmz",
                    "fcefe2e2a2e682b1447dcabf1ec268f78f08c63cd075753abcc8bda2c5c34d48d3014aa8d76ad80107e4f5c9f27e2149",
                ),
                (
                    "",
                    "2ee4754186a625b28a3936ef4a40d839c3ad958b2e017562ee07e2501f172ce999dc9c29033ea7ee33f814f192c13f47",
                ),
            ],
        ),
    ];
}
