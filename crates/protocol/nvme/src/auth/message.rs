//! The messages of DH-HMAC-CHAP (NVMe Base 2.0, 8.13.4 and 8.13.5), as Authentication Send and
//! Receive carry them.
//!
//! ```text
//!  byte   0    1    2 .. 3  4 .. 5  6     7     8       9      10 .. 11  12 .. 15  16 ..
//!       +----+----+-------+-------+-----+-----+-------+------+---------+---------+------------
//!  Neg. | 00 | 00 | 0     | T_ID  |SC_C |NAPD | descriptors of 64 bytes each
//!  Chal.| 01 | 01 | 0     | T_ID  | HL  | 0   | hash  | group| DHVLEN  | S1      | C1, value
//!  Reply| 01 | 02 | 0     | T_ID  | HL  | 0   | CVALID| 0    | DHVLEN  | S2      | R1, C2, value
//!  Succ1| 01 | 03 | 0     | T_ID  | HL  | 0   | RVALID| 0                        | R2
//!  Succ2| 01 | 04 | 0     | T_ID  | 0                                            |
//!  Fail2| 00 | F0 | 0     | T_ID  | 01  | why |
//!  Fail1| 00 | F1 | 0     | T_ID  | 01  | why |
//! ```
//!
//! HL is the length of each response and challenge; those of Reply and Success1 take their space
//! even if invalid. Reserved bytes are written as 0 and ignored when read.

use zerocopy::little_endian::{U16, U32};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::group::DhGroup;
use super::hash::Hash;
use super::{AuthPolicy, FailureExplanation};

/// Type of messages common to all authentication protocols.
const COMMON: u8 = 0x00;
/// Type of DH-HMAC-CHAP messages; also the protocol's identifier in AUTH_Negotiate.
const DH_HMAC_CHAP: u8 = 0x01;
/// The one reason code: authentication failure.
const REASON_FAILED: u8 = 0x01;

/// Kind of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum MessageKind {
    Negotiate,
    Challenge,
    Reply,
    Success1,
    Success2,
    Failure2,
    Failure1,
}

impl MessageKind {
    const ALL: [Self; 7] = [
        Self::Negotiate,
        Self::Challenge,
        Self::Reply,
        Self::Success1,
        Self::Success2,
        Self::Failure2,
        Self::Failure1,
    ];

    /// AUTH_TYPE and AUTH_ID.
    fn code(self) -> (u8, u8) {
        match self {
            Self::Negotiate => (COMMON, 0x00),
            Self::Challenge => (DH_HMAC_CHAP, 0x01),
            Self::Reply => (DH_HMAC_CHAP, 0x02),
            Self::Success1 => (DH_HMAC_CHAP, 0x03),
            Self::Success2 => (DH_HMAC_CHAP, 0x04),
            Self::Failure2 => (COMMON, 0xf0),
            Self::Failure1 => (COMMON, 0xf1),
        }
    }
}

/// Header of all messages.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(super) struct MessageHeader {
    auth_type: u8,
    auth_id: u8,
    reserved: [u8; 2],
    transaction: U16,
}
const _: () = assert!(size_of::<MessageHeader>() == 6);

impl MessageHeader {
    fn new(kind: MessageKind, transaction: u16) -> Self {
        let (auth_type, auth_id) = kind.code();
        Self { auth_type, auth_id, reserved: [0; 2], transaction: transaction.into() }
    }

    /// Parses the header; `None` if it is incomplete.
    pub(super) fn read(bytes: &[u8]) -> Option<Self> {
        Some(Self::read_from_prefix(bytes).ok()?.0)
    }

    /// Kind of the message; `None` if unknown.
    pub(super) fn kind(&self) -> Option<MessageKind> {
        MessageKind::ALL.into_iter().find(|kind| kind.code() == (self.auth_type, self.auth_id))
    }

    /// T_ID.
    pub(super) fn transaction(&self) -> u16 {
        self.transaction.get()
    }
}

/// The beginning of AUTH_Negotiate.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct NegotiateHead {
    head: MessageHeader,
    sc_c: u8,
    napd: u8,
}
const _: () = assert!(size_of::<NegotiateHead>() == 8);

/// A protocol descriptor of AUTH_Negotiate, that of DH-HMAC-CHAP.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct Descriptor {
    auth_id: u8,
    reserved: u8,
    halen: u8,
    dhlen: u8,
    hashes: [u8; 30],
    groups: [u8; 30],
}
const _: () = assert!(size_of::<Descriptor>() == 64);

/// AUTH_Negotiate (NVMe Base 2.0, 8.13.5.2).
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Negotiate {
    /// SC_C: the requested secure channel concatenation; 0 for none.
    pub(super) concatenation: u8,
    /// Hashes and groups of DH-HMAC-CHAP, if the host offers that.
    pub(super) offer: Option<(Vec<u8>, Vec<u8>)>,
}

impl Negotiate {
    pub(super) fn parse(bytes: &[u8]) -> Option<Self> {
        let (head, rest) = NegotiateHead::read_from_prefix(bytes).ok()?;
        let descriptors = <[Descriptor]>::ref_from_bytes(rest).ok()?;
        if descriptors.len() != usize::from(head.napd) {
            return None;
        }
        let offer = match descriptors.iter().find(|d| d.auth_id == DH_HMAC_CHAP) {
            Some(d) => Some((
                d.hashes.get(..usize::from(d.halen))?.to_vec(),
                d.groups.get(..usize::from(d.dhlen))?.to_vec(),
            )),
            None => None,
        };
        Some(Self { concatenation: head.sc_c, offer })
    }

    /// Encodes an offer of what the policy allows.
    pub(super) fn encode(transaction: u16, policy: &AuthPolicy) -> Vec<u8> {
        let mut descriptor = Descriptor {
            auth_id: DH_HMAC_CHAP,
            reserved: 0,
            halen: 0,
            dhlen: 0,
            hashes: [0; 30],
            groups: [0; 30],
        };
        for (at, hash) in descriptor.hashes.iter_mut().zip(policy.hashes()) {
            *at = hash.id();
            descriptor.halen += 1;
        }
        for (at, group) in descriptor.groups.iter_mut().zip(policy.groups()) {
            *at = group.id();
            descriptor.dhlen += 1;
        }
        let head = MessageHeader::new(MessageKind::Negotiate, transaction);
        let head = NegotiateHead { head, sc_c: 0, napd: 1 };
        [head.as_bytes(), descriptor.as_bytes()].concat()
    }
}

/// The beginning of DH-HMAC-CHAP_Challenge, and of DH-HMAC-CHAP_Reply, where `first` is CVALID and
/// `second` is reserved.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct ExchangeHead {
    head: MessageHeader,
    hl: u8,
    reserved: u8,
    first: u8,
    second: u8,
    dhvlen: U16,
    sequence: U32,
}
const _: () = assert!(size_of::<ExchangeHead>() == 16);

/// DH-HMAC-CHAP_Challenge (NVMe Base 2.0, 8.13.5.3).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Challenge<'a> {
    pub(super) transaction: u16,
    pub(super) hash: Hash,
    pub(super) group: DhGroup,
    pub(super) sequence: u32,
    pub(super) challenge: &'a [u8],
    /// The controller's public value; empty without a group.
    pub(super) public: &'a [u8],
}

impl<'a> Challenge<'a> {
    /// Parses the message, which may be followed by the rest of a larger buffer.
    pub(super) fn parse(bytes: &'a [u8], policy: &AuthPolicy) -> Result<Self, FailureExplanation> {
        let payload = FailureExplanation::IncorrectPayload;
        let (head, rest) = ExchangeHead::read_from_prefix(bytes).map_err(|_| payload)?;
        let hash =
            policy.choose_hash(&[head.first], None).ok_or(FailureExplanation::HashUnusable)?;
        let group = policy.choose_group(&[head.second]).ok_or(FailureExplanation::GroupUnusable)?;
        let (challenge, rest) = rest.split_at_checked(hash.len()).ok_or(payload)?;
        let public = rest.get(..usize::from(head.dhvlen.get())).ok_or(payload)?;
        if head.hl != hash.hl() {
            return Err(payload);
        }
        let (transaction, sequence) = (head.head.transaction(), head.sequence.get());
        Ok(Self { transaction, hash, group, sequence, challenge, public })
    }

    pub(super) fn encode(&self) -> Vec<u8> {
        let head = ExchangeHead {
            head: MessageHeader::new(MessageKind::Challenge, self.transaction),
            hl: self.hash.hl(),
            reserved: 0,
            first: self.hash.id(),
            second: self.group.id(),
            dhvlen: self.group.dhvlen().into(),
            sequence: self.sequence.into(),
        };
        [head.as_bytes(), self.challenge, self.public].concat()
    }
}

/// DH-HMAC-CHAP_Reply (NVMe Base 2.0, 8.13.5.4).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Reply<'a> {
    pub(super) response: &'a [u8],
    /// The host's challenge, if it has one (CVALID).
    pub(super) challenge: Option<&'a [u8]>,
    pub(super) sequence: u32,
    /// The host's public value; empty without a group.
    pub(super) public: &'a [u8],
}

impl<'a> Reply<'a> {
    /// Parses the message; `None` if it is invalid or has another hash.
    pub(super) fn parse(bytes: &'a [u8], hash: Hash) -> Option<Self> {
        let (head, rest) = ExchangeHead::read_from_prefix(bytes).ok()?;
        let (response, rest) = rest.split_at_checked(hash.len())?;
        let (challenge, public) = rest.split_at_checked(hash.len())?;
        let proper = head.hl == hash.hl() && public.len() == usize::from(head.dhvlen.get());
        let challenge = match head.first {
            0 => None,
            1 => Some(challenge),
            _ => return None,
        };
        proper.then_some(Self { response, challenge, sequence: head.sequence.get(), public })
    }

    pub(super) fn encode(&self, transaction: u16, hash: Hash, group: DhGroup) -> Vec<u8> {
        let head = ExchangeHead {
            head: MessageHeader::new(MessageKind::Reply, transaction),
            hl: hash.hl(),
            reserved: 0,
            first: u8::from(self.challenge.is_some()),
            second: 0,
            dhvlen: group.dhvlen().into(),
            sequence: self.sequence.into(),
        };
        let nothing = vec![0; hash.len()];
        let challenge = self.challenge.unwrap_or(&nothing);
        [head.as_bytes(), self.response, challenge, self.public].concat()
    }
}

/// The beginning of DH-HMAC-CHAP_Success1, and all of DH-HMAC-CHAP_Success2.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct SuccessHead {
    head: MessageHeader,
    hl: u8,
    reserved: u8,
    rvalid: u8,
    reserved2: [u8; 7],
}
const _: () = assert!(size_of::<SuccessHead>() == 16);

/// DH-HMAC-CHAP_Success1 (NVMe Base 2.0, 8.13.5.5).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Success1<'a> {
    /// The controller's response, if requested (RVALID).
    pub(super) response: Option<&'a [u8]>,
}

impl<'a> Success1<'a> {
    /// Parses the message, which may be followed by the rest of a larger buffer; `None` if it is
    /// invalid or has another hash.
    pub(super) fn parse(bytes: &'a [u8], hash: Hash) -> Option<Self> {
        let (head, rest) = SuccessHead::read_from_prefix(bytes).ok()?;
        match head.rvalid {
            0 => Some(Self { response: None }),
            1 if head.hl == hash.hl() => Some(Self { response: Some(rest.get(..hash.len())?) }),
            _ => None,
        }
    }

    pub(super) fn encode(&self, transaction: u16, hash: Hash) -> Vec<u8> {
        let head = SuccessHead {
            head: MessageHeader::new(MessageKind::Success1, transaction),
            hl: hash.hl(),
            reserved: 0,
            rvalid: u8::from(self.response.is_some()),
            reserved2: [0; 7],
        };
        let nothing = vec![0; hash.len()];
        [head.as_bytes(), self.response.unwrap_or(&nothing)].concat()
    }
}

/// Whether this is a complete
pub(super) fn is_success2(bytes: &[u8]) -> bool {
    bytes.len() == size_of::<SuccessHead>()
}

/// DH-HMAC-CHAP_Success2.
pub(super) fn success2(transaction: u16) -> Vec<u8> {
    let head = MessageHeader::new(MessageKind::Success2, transaction);
    SuccessHead { head, hl: 0, reserved: 0, rvalid: 0, reserved2: [0; 7] }.as_bytes().to_vec()
}

/// AUTH_Failure1 and AUTH_Failure2 (NVMe Base 2.0, 8.13.4).
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct Failure {
    head: MessageHeader,
    reason: u8,
    explanation: u8,
}
const _: () = assert!(size_of::<Failure>() == 8);

/// The reason of the peer's failure; `None` if it gives none.
pub(super) fn read_failure(bytes: &[u8]) -> Option<FailureExplanation> {
    let (failure, _) = Failure::read_from_prefix(bytes).ok()?;
    Some(FailureExplanation(failure.explanation))
}

/// AUTH_Failure1, with which a controller refuses a host.
pub(super) fn failure1(transaction: u16, explanation: FailureExplanation) -> Vec<u8> {
    failure(MessageKind::Failure1, transaction, explanation)
}

/// AUTH_Failure2, with which a host refuses a controller.
pub(super) fn failure2(transaction: u16, explanation: FailureExplanation) -> Vec<u8> {
    failure(MessageKind::Failure2, transaction, explanation)
}

fn failure(kind: MessageKind, transaction: u16, explanation: FailureExplanation) -> Vec<u8> {
    let head = MessageHeader::new(kind, transaction);
    let failure = Failure { head, reason: REASON_FAILED, explanation: explanation.0 };
    failure.as_bytes().to_vec()
}
