//! The Diffie-Hellman groups of DH-HMAC-CHAP (NVMe Base 2.0, 8.13.5.2): those of RFC 7919, or none.

use std::sync::atomic::{AtomicU64, Ordering};

use crypto_bigint::modular::{BoxedMontyForm, BoxedMontyParams};
use crypto_bigint::{BoxedUint, Odd};
use zeroize::Zeroize;

use super::secret::SecretBytes;
use super::{FailureExplanation, TransactionRandomness};

/// Most bytes of a private exponent.
pub(super) const MAX_EXPONENT_LEN: usize = 56;

/// The generator of every group (RFC 7919, appendix A).
const GENERATOR: &[u8] = &[2];

/// A Diffie-Hellman group. The order is that of strength.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum DhGroup {
    /// None, 0: the challenge is used as it is.
    Null,
    /// ffdhe2048, 1.
    Ffdhe2048,
    /// ffdhe3072, 2.
    Ffdhe3072,
    /// ffdhe4096, 3.
    Ffdhe4096,
    /// ffdhe6144, 4.
    Ffdhe6144,
    /// ffdhe8192, 5.
    Ffdhe8192,
}

impl DhGroup {
    /// All of them, the weaker ones first.
    pub const ALL: [Self; 6] = [
        Self::Null,
        Self::Ffdhe2048,
        Self::Ffdhe3072,
        Self::Ffdhe4096,
        Self::Ffdhe6144,
        Self::Ffdhe8192,
    ];

    /// The group with this identifier.
    #[must_use]
    pub fn from_id(id: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|group| group.id() == id)
    }

    /// Its identifier.
    #[must_use]
    pub fn id(self) -> u8 {
        match self {
            Self::Null => 0,
            Self::Ffdhe2048 => 1,
            Self::Ffdhe3072 => 2,
            Self::Ffdhe4096 => 3,
            Self::Ffdhe6144 => 4,
            Self::Ffdhe8192 => 5,
        }
    }

    /// Its prime field; `None` for the null group.
    pub(super) fn field(self) -> Option<&'static PrimeField> {
        match self {
            Self::Null => None,
            Self::Ffdhe2048 => Some(&PrimeField { len: 256, offset: 560_316, exponent_len: 32 }),
            Self::Ffdhe3072 => Some(&PrimeField { len: 384, offset: 2_625_351, exponent_len: 40 }),
            Self::Ffdhe4096 => Some(&PrimeField { len: 512, offset: 5_736_041, exponent_len: 48 }),
            Self::Ffdhe6144 => Some(&PrimeField { len: 768, offset: 15_705_020, exponent_len: 48 }),
            Self::Ffdhe8192 => {
                Some(&PrimeField { len: 1024, offset: 10_965_728, exponent_len: 56 })
            }
        }
    }

    /// Checks a peer's public value; `None` for the null group.
    ///
    /// # Errors
    /// If it is invalid in this group, or present without a group.
    pub(super) fn check_public(self, value: &[u8]) -> Result<Option<Vec<u8>>, FailureExplanation> {
        match self.field() {
            Some(field) => {
                field.check_public(value).map(Some).ok_or(FailureExplanation::IncorrectPayload)
            }
            None if value.is_empty() => Ok(None),
            None => Err(FailureExplanation::IncorrectPayload),
        }
    }

    /// Length of a public value in bytes, as messages have it (DHVLEN).
    pub(super) fn dhvlen(self) -> u16 {
        self.field().map_or(0, |field| field.len)
    }
}

/// The field of integers modulo a safe prime.
#[derive(Debug)]
pub(super) struct PrimeField {
    /// Length of the prime in bytes.
    len: u16,
    /// The X of the prime's formula.
    offset: u64,
    /// Length of private exponents in bytes. RFC 7919 5.2 allows short ones, of twice the group's
    /// strength in bits, and appendix A gives the sizes: 225, 275, 325, 375 and 400. These are
    /// rounded up to full words.
    exponent_len: u16,
}

impl PrimeField {
    /// Length of the prime and of field elements, in bytes.
    fn bytes(&self) -> usize {
        usize::from(self.len)
    }

    /// RFC 7919, appendix A: 2^b - 2^(b-64) + (floor(2^(b-130) e) + X) 2^64 - 1. That is 64 set
    /// bits, the first b - 128 bits of e and X - 1 more, and 64 set bits again: because of them the
    /// -1 borrows 1 from the part before.
    fn prime(&self) -> Vec<u8> {
        let middle = (self.bytes() / 8).saturating_sub(2);
        let mut words: Vec<u64> = E.iter().take(middle).copied().collect();
        let mut carry = self.offset - 1;
        for word in words.iter_mut().rev() {
            let (sum, over) = word.overflowing_add(carry);
            *word = sum;
            carry = u64::from(over);
        }
        let words = [u64::MAX].into_iter().chain(words).chain([u64::MAX]);
        words.flat_map(u64::to_be_bytes).collect()
    }

    /// Checks a peer's public value and pads it to the length of the prime; `None` if invalid. RFC
    /// 7919 5.1: it must be more than 1 and less than p - 1, or the secret would be predictable. It
    /// may be shorter than the prime, as some hosts omit leading zeroes.
    fn check_public(&self, value: &[u8]) -> Option<Vec<u8>> {
        let zeroes = self.bytes().checked_sub(value.len())?;
        let value = [&vec![0; zeroes], value].concat();
        let mut one = vec![0; self.bytes()];
        *one.last_mut()? = 1;
        let mut largest = self.prime();
        // The prime is odd.
        *largest.last_mut()? ^= 1;
        (value > one && value < largest).then_some(value)
    }

    /// A private exponent. Its first bit is set, so that no random bytes lead to a public value
    /// that the peer must refuse.
    pub(super) fn exponent(&self, fresh: &TransactionRandomness) -> SecretBytes {
        let mut bytes: Vec<u8> =
            fresh.exponent.iter().take(self.exponent_len.into()).copied().collect();
        if let Some(first) = bytes.first_mut() {
            *first |= 0x80;
        }
        SecretBytes::new(bytes)
    }

    /// `base` to the power of `exponent`, as long as the prime. Its run time depends on their
    /// lengths alone.
    fn power(&self, base: &[u8], exponent: &SecretBytes) -> SecretBytes {
        let bits = u32::from(self.len) * 8;
        let number = |bytes: &[u8]| BoxedUint::from_be_slice_truncated(bytes, bits);
        let prime = Odd::new(number(&self.prime())).expect("its last 64 bits are set");
        let params = BoxedMontyParams::new_vartime(prime);
        let exponent_bits = u32::from(self.exponent_len) * 8;
        let mut exponent = number(exponent.bytes());
        let mut power =
            BoxedMontyForm::new(number(base), &params).pow_bounded_exp(&exponent, exponent_bits);
        let mut result = power.retrieve();
        let bytes = SecretBytes::new(result.to_be_bytes().into_vec());
        exponent.zeroize();
        power.zeroize();
        result.zeroize();
        bytes
    }
}

/// Exponentiations that the driver has to run: up to two, of about a millisecond each in the
/// smallest group and tens of milliseconds in the largest.
#[derive(Debug)]
pub struct DhComputation {
    id: u64,
    field: &'static PrimeField,
    exponent: SecretBytes,
    /// Whether to compute the own public value.
    wants_public: bool,
    /// The peer's public value, if the shared secret is to be computed.
    peer: Option<Vec<u8>>,
}

/// Result of a [`DhComputation`].
#[derive(Debug)]
pub struct DhResult {
    pub(super) id: u64,
    pub(super) public: Option<Vec<u8>>,
    pub(super) shared: Option<SecretBytes>,
}

/// Identifiers of computations in this process, so that no result is taken for another's.
static NEXT_COMPUTATION_ID: AtomicU64 = AtomicU64::new(1);

impl DhComputation {
    pub(super) fn new(
        field: &'static PrimeField,
        exponent: SecretBytes,
        own: bool,
        peer: Option<Vec<u8>>,
    ) -> Self {
        Self {
            id: NEXT_COMPUTATION_ID.fetch_add(1, Ordering::Relaxed),
            field,
            exponent,
            wants_public: own,
            peer,
        }
    }

    /// Identifier that its result carries.
    pub(super) fn id(&self) -> u64 {
        self.id
    }

    /// Runs the computation.
    #[must_use]
    pub fn run(self) -> DhResult {
        let power = |base: &[u8]| self.field.power(base, &self.exponent);
        let public = self.wants_public.then(|| power(GENERATOR).bytes().to_vec());
        let shared = self.peer.as_deref().map(power);
        DhResult { id: self.id, public, shared }
    }
}

/// The first 8064 bits of e = 2.718…: floor(2^8062 e).
#[rustfmt::skip]
#[expect(clippy::unreadable_literal, reason = "bits, not a number")]
const E: [u64; 126] = [
    0xadf85458a2bb4a9a, 0xafdc5620273d3cf1, 0xd8b9c583ce2d3695, 0xa9e13641146433fb,
    0xcc939dce249b3ef9, 0x7d2fe363630c75d8, 0xf681b202aec4617a, 0xd3df1ed5d5fd6561,
    0x2433f51f5f066ed0, 0x856365553ded1af3, 0xb557135e7f57c935, 0x984f0c70e0e68b77,
    0xe2a689daf3efe872, 0x1df158a136ade735, 0x30acca4f483a797a, 0xbc0ab182b324fb61,
    0xd108a94bb2c8e3fb, 0xb96adab760d7f468, 0x1d4f42a3de394df4, 0xae56ede76372bb19,
    0x0b07a7c8ee0a6d70, 0x9e02fce1cdf7e2ec, 0xc03404cd28342f61, 0x9172fe9ce98583ff,
    0x8e4f1232eef28183, 0xc3fe3b1b4c6fad73, 0x3bb5fcbc2ec22005, 0xc58ef1837d1683b2,
    0xc6f34a26c1b2effa, 0x886b4238611fcfdc, 0xde355b3b6519035b, 0xbc34f4def99c0238,
    0x61b46fc9d6e6c907, 0x7ad91d2691f7f7ee, 0x598cb0fac186d91c, 0xaefe130985139270,
    0xb4130c93bc437944, 0xf4fd4452e2d74dd3, 0x64f2e21e71f54bff, 0x5cae82ab9c9df69e,
    0xe86d2bc522363a0d, 0xabc521979b0deada, 0x1dbf9a42d5c4484e, 0x0abcd06bfa53ddef,
    0x3c1b20ee3fd59d7c, 0x25e41d2b669e1ef1, 0x6e6f52c3164df4fb, 0x7930e9e4e58857b6,
    0xac7d5f42d69f6d18, 0x7763cf1d55034004, 0x87f55ba57e31cc7a, 0x7135c886efb4318a,
    0xed6a1e012d9e6832, 0xa907600a918130c4, 0x6dc778f971ad0038, 0x092999a333cb8b7a,
    0x1a1db93d7140003c, 0x2a4ecea9f98d0acc, 0x0a8291cdcec97dcf, 0x8ec9b55a7f88a46b,
    0x4db5a851f44182e1, 0xc68a007e5e0dd902, 0x0bfd64b645036c7a, 0x4e677d2c38532a3a,
    0x23ba4442caf53ea6, 0x3bb454329b7624c8, 0x917bdd64b1c0fd4c, 0xb38e8c334c701c3a,
    0xcdad0657fccfec71, 0x9b1f5c3e4e46041f, 0x388147fb4cfdb477, 0xa52471f7a9a96910,
    0xb855322edb6340d8, 0xa00ef092350511e3, 0x0abec1fff9e3a26e, 0x7fb29f8c183023c3,
    0x587e38da0077d9b4, 0x763e4e4b94b2bbc1, 0x94c6651e77caf992, 0xeeaac0232a281bf6,
    0xb3a739c122611682, 0x0ae8db5847a67cbe, 0xf9c9091b462d538c, 0xd72b03746ae77f5e,
    0x62292c311562a846, 0x505dc82db854338a, 0xe49f5235c95b9117, 0x8ccf2dd5cacef403,
    0xec9d1810c6272b04, 0x5b3b71f9dc6b80d6, 0x3fdd4a8e9adb1e69, 0x62a69526d43161c1,
    0xa41d570d7938dad4, 0xa40e329ccff46aaa, 0x36ad004cf600c838, 0x1e425a31d951ae64,
    0xfdb23fcec9509d43, 0x687feb69edd1cc5e, 0x0b8cc3bdf64b10ef, 0x86b63142a3ab8829,
    0x555b2f747c932665, 0xcb2c0f1cc01bd702, 0x29388839d2af05e4, 0x54504ac78b758282,
    0x2846c0ba35c35f5c, 0x59160cc046fd8251, 0x541fc68c9c86b022, 0xbb7099876a460e74,
    0x51a8a93109703fee, 0x1c217e6c3826e52c, 0x51aa691e0e423cfc, 0x99e9e31650c1217b,
    0x624816cdad9a95f9, 0xd5b8019488d9c0a0, 0xa1fe3075a577e231, 0x83f81d4a3f2fa457,
    0x1efc8ce0ba8a4fe8, 0xb6855dfe72b0a66e, 0xded2fbabfbe58a30, 0xfafabe1c5d71a87e,
    0x2f741ef8c1fe86fe, 0xa6bbfde530677f0d, 0x97d11d49f7a8443d, 0x0822e506a9f4614e,
    0x011e2a94838ff88c, 0xd68c8bb7c51eef6d,
];

#[cfg(test)]
mod tests {
    use super::*;

    /// RFC 7919, appendix A. The hashes are those of the primes computed by another implementation
    /// of the formula, and of OpenSSL's.
    #[test]
    fn primes_are_those_of_rfc_7919() {
        for (group, expected) in DhGroup::ALL.into_iter().skip(1).zip(PRIMES) {
            let field = group.field().unwrap();
            let prime = field.prime();
            assert_eq!(prime.len(), usize::from(group.dhvlen()));
            assert_eq!((&prime[..8], &prime[prime.len() - 8..]), (&[0xff; 8][..], &[0xff; 8][..]));
            let hash = crate::auth::Hash::Sha256.digest(&prime);
            let hex: String = hash.as_ref().iter().map(|b| format!("{b:02x}")).collect();
            assert_eq!(hex, expected, "{group:?}");
            assert!(usize::from(field.exponent_len) <= MAX_EXPONENT_LEN);
        }
    }

    /// RFC 7919 5.1.
    #[test]
    fn weak_public_values_are_rejected() {
        let field = DhGroup::Ffdhe2048.field().unwrap();
        let prime = field.prime();
        let less = |n: u8| {
            let mut value = prime.clone();
            value[255] -= n;
            value
        };
        for bad in [vec![], vec![0], vec![1], vec![0; 256], less(0), less(1), vec![0xff; 256]] {
            assert_eq!(field.check_public(&bad), None);
        }
        assert_eq!(field.check_public(&[vec![0], less(2)].concat()), None);
        assert_eq!(field.check_public(&less(2)), Some(less(2)));
        assert_eq!(field.check_public(&[2]).unwrap(), [&[0; 255][..], &[2]].concat());
    }

    const PRIMES: [&str; 5] = [
        "9cd3b7f336872f46c09428d1bbc19877a4d440512cda8d1c1cf0cd6e33698966",
        "0eaf67db3a839156d5013494a5318a772b5697d270d721f37f092efc69ea5a17",
        "4648414224ac881b3d0dc59b466f96d06a558278776807797ecf1f66ff397b3e",
        "227ac9066b3ddd9e193670cda2388fa884f65ba0cf98b742d1fe77a6687c79c7",
        "770b14efaf6f049929c523113b3fa99a8d11dab1b18af3609590122075d19833",
    ];
}
