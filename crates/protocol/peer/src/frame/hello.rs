//! HELLO, PROOF, READY and REFUSED: how a connection begins (RFD 0010, 8.2).
//!
//! Their headers are of version 1 whatever is negotiated, with frame number 0; only lengths and
//! checksums are used, and the status in REFUSED. The body of HELLO:
//!
//! ```text
//!  byte   0       1       2      3          4            8          16        32       48
//!       +-------+-------+------+----------+------------+----------+---------+--------+--------...
//!       | min   | max   | line | reserved | data bytes | features | cluster | volume | session
//!  64   +-------+-------+------+----------+------------+----------+---------+--------+--------...
//!       | from (2)      | to (2)          | reserved   | challenge (32) ... 104
//!       +---------------+-----------------+------------+--------...
//! ```
//!
//! Later versions may append to it: bytes after 104 are covered by the proofs and otherwise
//! ignored.

use uuid::Uuid;
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::header::{FrameType, HEADER_BYTES, Header, HeaderFields};
use super::{FrameError, padding};
use crate::{ConnectionPurpose, Lane, NodeId};

/// Length of the body of HELLO in bytes, as known to this release.
pub const HELLO_BYTES: usize = size_of::<WireHello>();
/// Longest accepted body of HELLO, in bytes.
pub const MAX_HELLO_BYTES: usize = 512;
/// Length of the body of PROOF in bytes.
pub const PROOF_BYTES: usize = 32;

/// Version of the headers of these frames.
const HANDSHAKE_VERSION: u8 = 1;

#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct WireHello {
    min_version: u8,
    max_version: u8,
    purpose: u8,
    reserved: u8,
    max_data_bytes: U32,
    features: U64,
    cluster: [u8; 16],
    volume: [u8; 16],
    session: [u8; 16],
    from: U16,
    to: U16,
    more_reserved: [u8; 4],
    challenge: [u8; 32],
}
const _: () = assert!(HELLO_BYTES == 104);

/// The first message of each end of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hello {
    /// The lowest version of the protocol that it speaks.
    pub min_version: u8,
    /// The highest version.
    pub max_version: u8,
    /// The purpose of the connection.
    pub purpose: ConnectionPurpose,
    /// Most bytes of data in a message that it receives.
    pub max_data_bytes: u32,
    /// Features beyond the version; unknown bits are ignored.
    pub features: u64,
    /// The cluster of the sender.
    pub cluster: Uuid,
    /// The volume of the connection.
    pub volume: Uuid,
    /// The session of the connection: drawn by the dialler, returned by the acceptor.
    pub session: u128,
    /// The node that sends.
    pub sender: NodeId,
    /// The node that is to receive.
    pub receiver: NodeId,
    /// Random bytes, new for each connection.
    pub challenge: [u8; 32],
}

wire::open_enum! {
    /// Why a connection is refused, as sent to the refused side.
    pub enum HandshakeRefusal: u8 {
        /// It belongs to another cluster.
        WrongCluster = 1,
        /// The sides have no common version of the protocol.
        NoCommonVersion = 2,
        /// It is meant for another node.
        WrongReceiver = 3,
        /// It claims to come from the node that it goes to, or from node 0.
        InvalidSender = 4,
        /// This node does not have the volume.
        UnknownVolume = 5,
        /// The node has no replica of the volume.
        UnknownNode = 6,
        /// Only the node with the higher number dials.
        WrongDirection = 7,
        /// It does not know the cluster's secret.
        InvalidProof = 8,
        /// One side wants TLS and the other does not.
        TlsMismatch = 9,
        /// The answer is for another volume, session or purpose.
        WrongAnswer = 10,
    }
}

impl std::fmt::Display for HandshakeRefusal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match *self {
            Self::WrongCluster => "it belongs to another cluster",
            Self::NoCommonVersion => "no version of the protocol in common",
            Self::WrongReceiver => "it is meant for another node",
            Self::InvalidSender => "its node number is taken",
            Self::UnknownVolume => "the node does not have the volume",
            Self::UnknownNode => "the dialling node has no replica of the volume",
            Self::WrongDirection => "the node with the higher number dials",
            Self::InvalidProof => "wrong cluster secret",
            Self::TlsMismatch => "only one side is configured for TLS",
            Self::WrongAnswer => "its proof belongs to another connection",
            Self(_) => "an unknown reason",
        })
    }
}

/// A frame of the handshake.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HandshakeFrame {
    /// The sender's HELLO, with its body as sent: the proofs cover it.
    Hello(Hello, Vec<u8>),
    /// The proof that the sender knows the secret.
    Proof([u8; PROOF_BYTES]),
    /// The acceptor has all lanes.
    Ready,
    /// The connection is refused.
    Refused(HandshakeRefusal),
}

impl Hello {
    /// Encodes the body of HELLO.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        let wire = WireHello {
            min_version: self.min_version,
            max_version: self.max_version,
            purpose: self.purpose.to_byte(),
            reserved: 0,
            max_data_bytes: U32::new(self.max_data_bytes),
            features: U64::new(self.features),
            cluster: self.cluster.into_bytes(),
            volume: self.volume.into_bytes(),
            session: self.session.to_be_bytes(),
            from: U16::new(self.sender.0),
            to: U16::new(self.receiver.0),
            more_reserved: [0; 4],
            challenge: self.challenge,
        };
        wire.as_bytes().to_vec()
    }

    /// Decodes the body of HELLO.
    ///
    /// # Errors
    /// [`FrameError`] for invalid bytes.
    pub fn parse(body: &[u8]) -> Result<Self, FrameError> {
        let invalid = |what| FrameError::InvalidField(FrameType::Hello, what);
        let (wire, _later) = WireHello::read_from_prefix(body).map_err(|_| invalid("length"))?;
        if wire.reserved != 0 || wire.more_reserved != [0; 4] {
            return Err(FrameError::ReservedNotZero(FrameType::Hello));
        }
        if wire.min_version > wire.max_version {
            return Err(invalid("version"));
        }
        Ok(Self {
            min_version: wire.min_version,
            max_version: wire.max_version,
            purpose: ConnectionPurpose::from_byte(wire.purpose).ok_or(invalid("connection"))?,
            max_data_bytes: wire.max_data_bytes.get(),
            features: wire.features.get(),
            cluster: Uuid::from_bytes(wire.cluster),
            volume: Uuid::from_bytes(wire.volume),
            session: u128::from_be_bytes(wire.session),
            sender: NodeId(wire.from.get()),
            receiver: NodeId(wire.to.get()),
            challenge: wire.challenge,
        })
    }

    /// Encodes HELLO as a frame.
    #[must_use]
    pub fn to_frame(&self) -> Vec<u8> {
        handshake_frame(HeaderFields::new(FrameType::Hello), &self.to_bytes())
    }
}

impl HandshakeFrame {
    /// Encodes PROOF as a frame.
    #[must_use]
    pub fn proof(proof: [u8; PROOF_BYTES]) -> Vec<u8> {
        handshake_frame(HeaderFields::new(FrameType::Proof), &proof)
    }

    /// Encodes READY as a frame.
    #[must_use]
    pub fn ready() -> Vec<u8> {
        handshake_frame(HeaderFields::new(FrameType::Ready), &[])
    }

    /// Encodes REFUSED as a frame.
    #[must_use]
    pub fn refused(refusal: HandshakeRefusal) -> Vec<u8> {
        handshake_frame(
            HeaderFields { status: refusal.0, ..HeaderFields::new(FrameType::Refused) },
            &[],
        )
    }

    /// Length of what follows this header in its frame, including padding.
    ///
    /// # Errors
    /// [`FrameError`] for invalid bytes.
    pub fn body_bytes(header: &[u8; HEADER_BYTES]) -> Result<usize, FrameError> {
        let length = handshake_body_bytes(&Header::parse(header)?)?;
        Ok(length + padding(length))
    }

    /// Decodes a frame; `body` must have the length [`Self::body_bytes`].
    ///
    /// # Errors
    /// [`FrameError`] for invalid bytes.
    pub fn parse(header: &[u8; HEADER_BYTES], body: &[u8]) -> Result<Self, FrameError> {
        let header = Header::parse(header)?;
        let kind = header.fields.kind;
        let length = handshake_body_bytes(&header)?;
        let wrong = FrameError::Length { kind, bytes: body.len() as u64 };
        if body.len() != length + padding(length) {
            return Err(wrong);
        }
        let (body, pad) = body.split_at_checked(length).ok_or(wrong)?;
        if pad.iter().any(|&b| b != 0) {
            return Err(FrameError::ReservedNotZero(kind));
        }
        if wire::crc32c(body) != header.body_checksum {
            return Err(FrameError::BodyChecksum(kind));
        }
        Ok(match kind {
            FrameType::Hello => Self::Hello(Hello::parse(body)?, body.to_vec()),
            FrameType::Proof => Self::Proof(body.try_into().map_err(|_| wrong)?),
            FrameType::Ready => Self::Ready,
            _ => Self::Refused(HandshakeRefusal(header.fields.status)),
        })
    }
}

/// Checks the header of a handshake frame; returns the length of its body.
fn handshake_body_bytes(header: &Header) -> Result<usize, FrameError> {
    let kind = header.fields.kind;
    let (bytes, length) = (u64::from(header.body_bytes), header.body_bytes as usize);
    let (least, limit) = match kind {
        FrameType::Hello => (HELLO_BYTES, MAX_HELLO_BYTES),
        FrameType::Proof => (PROOF_BYTES, PROOF_BYTES),
        FrameType::Ready | FrameType::Refused => (0, 0),
        _ => return Err(FrameError::UnknownType(kind)),
    };
    if header.version != HANDSHAKE_VERSION {
        return Err(FrameError::Version(header.version));
    }
    if header.frame_number != 0 {
        return Err(FrameError::WrongFrameNumber { expected: 0, found: header.frame_number });
    }
    let status = if kind == FrameType::Refused { header.fields.status } else { 0 };
    if header.fields != (HeaderFields { status, ..HeaderFields::new(kind) }) {
        return Err(FrameError::ReservedNotZero(kind));
    }
    match length {
        _ if length > limit => Err(FrameError::TooLong { kind, bytes, limit: limit as u64 }),
        _ if length < least => Err(FrameError::Length { kind, bytes }),
        _ => Ok(length),
    }
}

fn handshake_frame(fields: HeaderFields, body: &[u8]) -> Vec<u8> {
    let header = Header {
        fields,
        version: HANDSHAKE_VERSION,
        frame_number: 0,
        body_bytes: u32::try_from(body.len()).expect("HELLO and PROOF are short"),
        body_checksum: wire::crc32c(body),
    };
    let mut out = header.to_bytes().to_vec();
    out.extend_from_slice(body);
    out.resize(out.len() + padding(body.len()), 0);
    out
}

impl ConnectionPurpose {
    fn to_byte(self) -> u8 {
        match self {
            Self::Lane(Lane::Control) => 0,
            Self::Lane(Lane::Replication) => 1,
            Self::Lane(Lane::Requests) => 2,
            Self::Lease => 3,
        }
    }

    fn from_byte(byte: u8) -> Option<Self> {
        let known = [Lane::Control, Lane::Replication, Lane::Requests].map(Self::Lane);
        known.into_iter().chain([Self::Lease]).find(|purpose| purpose.to_byte() == byte)
    }
}
