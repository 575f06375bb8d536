//! iSNS client of a target that registers itself (RFC 4171): messages to the server, and its
//! answers.
//!
//! ```text
//!    0 | iSNSP version 1       | function              |
//!    4 | length of the payload | flags                 |
//!    8 | transaction           | sequence              |
//!   12 | payload: attributes, each | tag | length | value, padded to 4 bytes |
//! ```
//!
//! A network entity serves targets together: a single node, or a whole cluster. It is registered as
//! a whole.

use std::net::{IpAddr, SocketAddr};

use zerocopy::big_endian::{U16, U32};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// The server's port (RFC 4171 9).
pub const PORT: u16 = 3205;

/// Largest payload of one message that is generated here, in bytes: far below what its length field
/// allows.
const MAX_PAYLOAD: usize = 32 << 10;

/// Largest answer in bytes, all its parts together.
pub const MAX_RESPONSE: usize = 1 << 20;

const VERSION: u16 = 1;

/// Function of a message
mod function {
    pub(super) const REGISTER: u16 = 0x0001;
    pub(super) const DEREGISTER: u16 = 0x0004;
    pub(super) const ANSWER: u16 = 0x8000;
}

/// Flags (RFC 4171 5.1.4).
mod flag {
    pub(super) const CLIENT: u16 = 0x8000;
    pub(super) const REPLACE: u16 = 0x1000;
    pub(super) const LAST: u16 = 0x0800;
    pub(super) const FIRST: u16 = 0x0400;
}

/// Attributes (RFC 4171 6.1).
mod tag {
    pub(super) const DELIMITER: u32 = 0;
    pub(super) const ENTITY: u32 = 1;
    pub(super) const ENTITY_PROTOCOL: u32 = 2;
    pub(super) const REGISTRATION_PERIOD: u32 = 6;
    pub(super) const PORTAL_ADDRESS: u32 = 16;
    pub(super) const PORTAL_PORT: u32 = 17;
    pub(super) const ISCSI_NAME: u32 = 32;
    pub(super) const ISCSI_NODE_TYPE: u32 = 33;
    pub(super) const GROUP_NAME: u32 = 48;
    pub(super) const GROUP_ADDRESS: u32 = 49;
    pub(super) const GROUP_PORT: u32 = 50;
    pub(super) const GROUP_TAG: u32 = 51;
}

/// Entity protocol iSCSI, node type target (RFC 4171 6.2.2, 6.4.2).
const ISCSI: u32 = 2;
const TARGET: u32 = 1;

/// The header of every message.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct Header {
    version: U16,
    function: U16,
    /// Bytes that follow.
    pub length: U16,
    flags: U16,
    transaction: U16,
    sequence: U16,
}

/// Bytes of a header.
pub const HEADER_LEN: usize = 12;

const _: () = assert!(size_of::<Header>() == HEADER_LEN);

#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct Attribute {
    tag: U32,
    length: U32,
}

/// An address at which a target is reached, and its portal group there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Portal {
    /// Address; no wildcard.
    pub at: SocketAddr,
    /// Tag of the portal group.
    pub group: u16,
}

/// A target.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Target {
    /// Its name.
    pub name: String,
    /// Its portals.
    pub portals: Vec<Portal>,
}

/// A network entity.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entity {
    /// Its unique identifier at the server.
    pub id: String,
    /// Its targets.
    pub targets: Vec<Target>,
}

/// Whether the earlier registration is deleted first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RegistrationMode {
    /// Deleted: something may have vanished.
    Replace,
    /// Kept: nothing has vanished.
    Refresh,
}

/// Why an answer is invalid or negative.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ResponseError {
    /// Not an iSNS message of the supported version.
    #[error("not an iSNS response")]
    NotIsns,
    /// Answer to another message.
    #[error("a response to another message")]
    WrongTransaction,
    /// Malformed attributes.
    #[error("its attributes are malformed")]
    Malformed,
    /// The server refused the request.
    #[error("the server refused: {}", status_text(*.0))]
    Refused(u32),
}

/// Text of a status
fn status_text(status: u32) -> String {
    let text = match status {
        1 => "unknown error",
        2 => "message format error",
        3 => "invalid registration",
        5 => "invalid query",
        6 => "source unknown",
        7 => "source absent",
        8 => "source unauthorized",
        9 => "no such entry",
        10 => "version not supported",
        11 => "internal error",
        12 => "busy",
        13 => "option not understood",
        14 => "invalid update",
        15 => "message not supported",
        20 => "ESI not available",
        21 => "invalid deregistration",
        22 => "registration feature not supported",
        _ => return format!("status {status}"),
    };
    format!("{text} (status {status})")
}

fn attribute(to: &mut Vec<u8>, tag: u32, value: &[u8]) {
    let length = value.len().next_multiple_of(4);
    let length_field = u32::try_from(length).expect("values are short");
    let head = Attribute { tag: U32::new(tag), length: U32::new(length_field) };
    to.extend_from_slice(head.as_bytes());
    to.extend_from_slice(value);
    to.resize(to.len() + length - value.len(), 0);
}

fn number(to: &mut Vec<u8>, tag: u32, value: u32) {
    attribute(to, tag, U32::new(value).as_bytes());
}

/// Text ends with a zero byte, which counts (RFC 4171 6.1).
fn text(to: &mut Vec<u8>, tag: u32, value: &str) {
    attribute(to, tag, &[value.as_bytes(), &[0]].concat());
}

/// IPv4 addresses are written as IPv6 ones (RFC 4171 6.3.1); bit 16 of a port would mean UDP.
fn address(to: &mut Vec<u8>, tags: [u32; 2], at: SocketAddr) {
    let ip = match at.ip() {
        IpAddr::V4(v4) => v4.to_ipv6_mapped(),
        IpAddr::V6(v6) => v6,
    };
    attribute(to, tags[0], &ip.octets());
    number(to, tags[1], at.port().into());
}

fn message(function: u16, flags: u16, transaction: u16, payload: &[u8]) -> Vec<u8> {
    let header = Header {
        version: U16::new(VERSION),
        function: U16::new(function),
        length: U16::new(u16::try_from(payload.len()).expect("bounded by PAYLOAD and a target")),
        flags: U16::new(flags | flag::CLIENT | flag::FIRST | flag::LAST),
        transaction: U16::new(transaction),
        sequence: U16::new(0),
    };
    [header.as_bytes(), payload].concat()
}

/// Leading attributes of a registration: source and key.
fn key(source: &str, entity: &str) -> Vec<u8> {
    let mut payload = Vec::new();
    text(&mut payload, tag::ISCSI_NAME, source);
    text(&mut payload, tag::ENTITY, entity);
    attribute(&mut payload, tag::DELIMITER, &[]);
    payload
}

/// A target and its portal groups (RFC 4171 5.6.5.1: the node before its groups).
fn target(to: &mut Vec<u8>, target: &Target) {
    text(to, tag::ISCSI_NAME, &target.name);
    number(to, tag::ISCSI_NODE_TYPE, TARGET);
    for portal in &target.portals {
        text(to, tag::GROUP_NAME, &target.name);
        address(to, [tag::GROUP_ADDRESS, tag::GROUP_PORT], portal.at);
        number(to, tag::GROUP_TAG, portal.group.into());
    }
}

impl Entity {
    /// Its source name: a registered target name. `None` without targets.
    #[must_use]
    pub fn source(&self) -> Option<&str> {
        self.targets.first().map(|target| target.name.as_str())
    }

    /// Messages that register the entity with its targets (DevAttrReg, RFC 4171 5.6.5.1): to be
    /// sent one after the other, each after the answer to the one before, numbered from
    /// `transaction`. Empty for an entity without targets, which is not registered.
    #[must_use]
    pub fn register(
        &self,
        mode: RegistrationMode,
        period_s: u32,
        transaction: u16,
    ) -> Vec<Vec<u8>> {
        let Some(source) = self.source() else { return Vec::new() };
        let mut payload = key(source, &self.id);
        text(&mut payload, tag::ENTITY, &self.id);
        number(&mut payload, tag::ENTITY_PROTOCOL, ISCSI);
        number(&mut payload, tag::REGISTRATION_PERIOD, period_s);
        let portals = self.targets.iter().flat_map(|t| t.portals.iter().map(|p| p.at));
        let mut portals: Vec<_> = portals.collect();
        portals.sort();
        portals.dedup();
        for at in portals {
            address(&mut payload, [tag::PORTAL_ADDRESS, tag::PORTAL_PORT], at);
        }
        let mut payloads = vec![payload];
        for one in &self.targets {
            let full = payloads.last().is_none_or(|p| p.len() > MAX_PAYLOAD / 2);
            if full {
                payloads.push(key(source, &self.id));
            }
            if let Some(last) = payloads.last_mut() {
                target(last, one);
            }
        }
        let flags =
            |n: u16| if n == 0 && mode == RegistrationMode::Replace { flag::REPLACE } else { 0 };
        let numbered = (0..).zip(&payloads);
        let register = function::REGISTER;
        numbered.map(|(n, p)| message(register, flags(n), transaction.wrapping_add(n), p)).collect()
    }

    /// The message that deregisters it (DevDereg, RFC 4171 5.6.5.4). `source` is a name that was
    /// registered with it.
    #[must_use]
    pub fn deregister(id: &str, source: &str, transaction: u16) -> Vec<u8> {
        let mut payload = Vec::new();
        text(&mut payload, tag::ISCSI_NAME, source);
        attribute(&mut payload, tag::DELIMITER, &[]);
        text(&mut payload, tag::ENTITY, id);
        message(function::DEREGISTER, 0, transaction, &payload)
    }
}

/// Assembles the answer to a message from its parts.
#[derive(Debug)]
pub struct ResponseAssembler {
    request: Header,
    parts: u16,
    payload: Vec<u8>,
}

impl ResponseAssembler {
    /// Expects the answer to `message`, which was generated here.
    #[must_use]
    pub fn awaiting(message: &[u8]) -> Option<Self> {
        let (asked, _) = Header::read_from_prefix(message).ok()?;
        Some(Self { request: asked, parts: 0, payload: Vec::new() })
    }

    /// Parses the next part's header: how many bytes follow, and whether it is the last part.
    ///
    /// # Errors
    /// [`ResponseError`].
    pub fn part(&mut self, header: &[u8; HEADER_LEN]) -> Result<(usize, bool), ResponseError> {
        let header = Header::read_from_bytes(header).map_err(|_| ResponseError::NotIsns)?;
        if header.version.get() != VERSION {
            return Err(ResponseError::NotIsns);
        }
        let function = self.request.function.get() | function::ANSWER;
        let (first, last) = (header.flags.get() & flag::FIRST, header.flags.get() & flag::LAST);
        // Some servers omit FIRST in an answer of one part; the sequence number suffices.
        let in_order = header.sequence.get() == self.parts && (self.parts == 0 || first == 0);
        let ours =
            header.function.get() == function && header.transaction == self.request.transaction;
        if !ours || !in_order {
            return Err(ResponseError::WrongTransaction);
        }
        let length = usize::from(header.length.get());
        if self.payload.len() + length > MAX_RESPONSE {
            return Err(ResponseError::Malformed);
        }
        self.parts = self.parts.checked_add(1).ok_or(ResponseError::Malformed)?;
        Ok((length, last != 0))
    }

    /// Adds the bytes after that header.
    pub fn add(&mut self, payload: &[u8]) {
        self.payload.extend_from_slice(payload);
    }

    /// The server's answer: its registration period in seconds, if given.
    ///
    /// # Errors
    /// [`ResponseError`].
    pub fn outcome(&self) -> Result<Option<u32>, ResponseError> {
        let (status, mut rest) =
            U32::read_from_prefix(&self.payload).map_err(|_| ResponseError::Malformed)?;
        if status.get() != 0 {
            return Err(ResponseError::Refused(status.get()));
        }
        let mut period = None;
        while !rest.is_empty() {
            let (head, after) =
                Attribute::read_from_prefix(rest).map_err(|_| ResponseError::Malformed)?;
            let length =
                usize::try_from(head.length.get()).map_err(|_| ResponseError::Malformed)?;
            let value = after.get(..length).filter(|_| length.is_multiple_of(4));
            let value = value.ok_or(ResponseError::Malformed)?;
            if head.tag.get() == tag::REGISTRATION_PERIOD {
                period = U32::read_from_bytes(value).ok().map(U32::get);
            }
            rest = &after[length..];
        }
        Ok(period)
    }
}

#[cfg(test)]
mod tests;
