//! HELLO, PROOF, READY and REFUSED: how a connection begins (RFD 0010, 8.2).
//!
//! Their headers are of version 1 whatever is agreed, with frame number 0 and no field in use but
//! the lengths and checksums, and the status in REFUSED. The body of HELLO:
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
//! Later versions may append to it: what stands behind byte 104 is covered by the proofs and not
//! looked at.

use uuid::Uuid;
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::header::{Fields, HEADER_BYTES, Header, Type};
use super::{Bad, padding};
use crate::{Lane, Line, NodeId};

/// Length of HELLO's body in bytes, as far as this release knows it.
pub const HELLO_BYTES: usize = size_of::<Sent>();
/// Longest body of HELLO, in bytes, that is heard.
pub const MAX_HELLO_BYTES: usize = 512;
/// Length of PROOF's body in bytes.
pub const PROOF_BYTES: usize = 32;

/// Version of the headers of these frames.
const HANDSHAKE_VERSION: u8 = 1;

#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct Sent {
    min_version: u8,
    max_version: u8,
    line: u8,
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

/// What each end of a connection says first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hello {
    /// The lowest version of the protocol that it speaks.
    pub min_version: u8,
    /// The highest.
    pub max_version: u8,
    /// What the connection is for.
    pub line: Line,
    /// Most bytes of data in a message that it receives.
    pub max_data_bytes: u32,
    /// What it can do beyond the version; bits that the other does not know are ignored.
    pub features: u64,
    /// The cluster it belongs to.
    pub cluster: Uuid,
    /// The volume it speaks for.
    pub volume: Uuid,
    /// The session that the connection belongs to: drawn by the dialler, given back by the other.
    pub session: u128,
    /// The node it is.
    pub from: NodeId,
    /// The node it means.
    pub to: NodeId,
    /// Random bytes, new for each connection.
    pub challenge: [u8; 32],
}

wire::open_enum! {
    /// Why a connection is not wanted, as the refused side hears it.
    pub enum Refusal: u8 {
        /// It belongs to another cluster.
        Cluster = 1,
        /// There is no version of the protocol that both speak.
        Version = 2,
        /// It is meant for another node.
        Receiver = 3,
        /// It claims to come from the node that it goes to, or from none.
        Sender = 4,
        /// The volume is not here.
        Volume = 5,
        /// The node has no replica of the volume.
        Stranger = 6,
        /// The node with the higher number dials.
        Direction = 7,
        /// It does not know the cluster's secret.
        Proof = 8,
        /// One side wants TLS and the other does not.
        Security = 9,
        /// The answer does not fit what was asked: another volume, session or connection.
        Answer = 10,
    }
}

impl std::fmt::Display for Refusal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match *self {
            Self::Cluster => "it belongs to another cluster",
            Self::Version => "no version of the protocol in common",
            Self::Receiver => "it is meant for another node",
            Self::Sender => "its node number is taken",
            Self::Volume => "the volume is not here",
            Self::Stranger => "its node has no replica of the volume",
            Self::Direction => "the node with the higher number dials",
            Self::Proof => "it does not know the cluster's secret",
            Self::Security => "only one side is configured for TLS",
            Self::Answer => "its answer belongs to another connection",
            Self(_) => "a reason that this release does not know",
        })
    }
}

/// A frame of the handshake.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HandshakeFrame {
    /// Who one is, with the body as it was sent: the proofs cover it.
    Hello(Hello, Vec<u8>),
    /// That one knows the secret.
    Proof([u8; PROOF_BYTES]),
    /// All lanes are there.
    Ready,
    /// The connection is over.
    Refused(Refusal),
}

impl Hello {
    /// The body of HELLO.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        let sent = Sent {
            min_version: self.min_version,
            max_version: self.max_version,
            line: self.line.to_byte(),
            reserved: 0,
            max_data_bytes: U32::new(self.max_data_bytes),
            features: U64::new(self.features),
            cluster: self.cluster.into_bytes(),
            volume: self.volume.into_bytes(),
            session: self.session.to_be_bytes(),
            from: U16::new(self.from.0),
            to: U16::new(self.to.0),
            more_reserved: [0; 4],
            challenge: self.challenge,
        };
        sent.as_bytes().to_vec()
    }

    /// Reads the body of HELLO.
    ///
    /// # Errors
    /// [`Bad`], whatever the bytes are.
    pub fn parse(body: &[u8]) -> Result<Self, Bad> {
        let bad = |what| Bad::Field(Type::Hello, what);
        let (sent, _later) = Sent::read_from_prefix(body).map_err(|_| bad("length"))?;
        if sent.reserved != 0 || sent.more_reserved != [0; 4] {
            return Err(Bad::Reserved(Type::Hello));
        }
        if sent.min_version > sent.max_version {
            return Err(bad("version"));
        }
        Ok(Self {
            min_version: sent.min_version,
            max_version: sent.max_version,
            line: Line::from_byte(sent.line).ok_or(bad("connection"))?,
            max_data_bytes: sent.max_data_bytes.get(),
            features: sent.features.get(),
            cluster: Uuid::from_bytes(sent.cluster),
            volume: Uuid::from_bytes(sent.volume),
            session: u128::from_be_bytes(sent.session),
            from: NodeId(sent.from.get()),
            to: NodeId(sent.to.get()),
            challenge: sent.challenge,
        })
    }

    /// The whole frame of HELLO.
    #[must_use]
    pub fn to_frame(&self) -> Vec<u8> {
        frame(Fields::new(Type::Hello), &self.to_bytes())
    }
}

impl HandshakeFrame {
    /// The whole frame of a proof.
    #[must_use]
    pub fn proof(proof: [u8; PROOF_BYTES]) -> Vec<u8> {
        frame(Fields::new(Type::Proof), &proof)
    }

    /// The whole frame that says that all lanes are there.
    #[must_use]
    pub fn ready() -> Vec<u8> {
        frame(Fields::new(Type::Ready), &[])
    }

    /// The whole frame of a refusal.
    #[must_use]
    pub fn refused(why: Refusal) -> Vec<u8> {
        frame(Fields { status: why.0, ..Fields::new(Type::Refused) }, &[])
    }

    /// How many bytes follow this header in its frame, padding included.
    ///
    /// # Errors
    /// [`Bad`], whatever the bytes are.
    pub fn body_bytes(header: &[u8; HEADER_BYTES]) -> Result<usize, Bad> {
        let length = check(&Header::parse(header)?)?;
        Ok(length + padding(length))
    }

    /// Reads a frame; `body` is as long as [`Self::body_bytes`] said.
    ///
    /// # Errors
    /// [`Bad`], whatever the bytes are.
    pub fn parse(header: &[u8; HEADER_BYTES], body: &[u8]) -> Result<Self, Bad> {
        let header = Header::parse(header)?;
        let kind = header.fields.kind;
        let length = check(&header)?;
        let wrong = Bad::Length { kind, bytes: body.len() as u64 };
        if body.len() != length + padding(length) {
            return Err(wrong);
        }
        let (body, pad) = body.split_at_checked(length).ok_or(wrong)?;
        if pad.iter().any(|&b| b != 0) {
            return Err(Bad::Reserved(kind));
        }
        if wire::crc32c(body) != header.body_checksum {
            return Err(Bad::BodyChecksum(kind));
        }
        Ok(match kind {
            Type::Hello => Self::Hello(Hello::parse(body)?, body.to_vec()),
            Type::Proof => Self::Proof(body.try_into().map_err(|_| wrong)?),
            Type::Ready => Self::Ready,
            _ => Self::Refused(Refusal(header.fields.status)),
        })
    }
}

/// The length of the body of a frame that may stand in a handshake.
fn check(header: &Header) -> Result<usize, Bad> {
    let kind = header.fields.kind;
    let (bytes, length) = (u64::from(header.length), header.length as usize);
    let (least, limit) = match kind {
        Type::Hello => (HELLO_BYTES, MAX_HELLO_BYTES),
        Type::Proof => (PROOF_BYTES, PROOF_BYTES),
        Type::Ready | Type::Refused => (0, 0),
        _ => return Err(Bad::Type(kind)),
    };
    if header.version != HANDSHAKE_VERSION {
        return Err(Bad::Version(header.version));
    }
    if header.number != 0 {
        return Err(Bad::Gap { expected: 0, got: header.number });
    }
    let status = if kind == Type::Refused { header.fields.status } else { 0 };
    if header.fields != (Fields { status, ..Fields::new(kind) }) {
        return Err(Bad::Reserved(kind));
    }
    match length {
        _ if length > limit => Err(Bad::TooLong { kind, bytes, limit: limit as u64 }),
        _ if length < least => Err(Bad::Length { kind, bytes }),
        _ => Ok(length),
    }
}

fn frame(fields: Fields, body: &[u8]) -> Vec<u8> {
    let header = Header {
        fields,
        version: HANDSHAKE_VERSION,
        number: 0,
        length: u32::try_from(body.len()).expect("HELLO and PROOF are short"),
        body_checksum: wire::crc32c(body),
    };
    let mut out = header.to_bytes().to_vec();
    out.extend_from_slice(body);
    out.resize(out.len() + padding(body.len()), 0);
    out
}

impl Line {
    fn to_byte(self) -> u8 {
        match self {
            Self::Lane(Lane::Control) => 0,
            Self::Lane(Lane::Down) => 1,
            Self::Lane(Lane::Up) => 2,
            Self::Lease => 3,
        }
    }

    fn from_byte(byte: u8) -> Option<Self> {
        let known = [Lane::Control, Lane::Down, Lane::Up].map(Self::Lane);
        known.into_iter().chain([Self::Lease]).find(|line| line.to_byte() == byte)
    }
}
