//! STANDING, RENEW, PROMISE, NEWER, YIELD and YIELDED: who one is, and leases.
//!
//! ```text
//!            epoch    id      second        body
//! STANDING   adopted          incarnation   48 bytes: config (16, as RFC 9562 4), role, flags
//!                                           (1 clean, 2 same boot, 4 older), 6 reserved, and lineages: epoch
//!                                           reached (8), epoch cleared (8), counts of both (4 each)
//! RENEW      asked    stamp   incarnation
//! PROMISE    given    stamp   incarnation
//! NEWER      newer
//! YIELD      view              incarnation
//! YIELDED    view              incarnation
//! ```

use block::Epoch;
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::header::{Fields, Type};
use super::{Bad, Body};
use crate::{Incarnation, Lineage, Message, Role, SharedLineage, Stamp, Standing, View};

const CLEAN: u8 = 1;
const SAME_BOOT: u8 = 2;
const OLDER: u8 = 4;

wire::open_enum! {
    /// A role, as it is sent.
    enum SentRole: u8 {
        Unknown = 0,
        Member = 1,
        Returned = 2,
        Outside = 3,
    }
}

#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct Sent {
    config: [u8; 16],
    role: u8,
    flags: u8,
    reserved: [u8; 6],
    shared: SentShared,
}

/// What one replica has recorded about another, as it is sent.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(super) struct SentShared {
    reached_epoch: U64,
    cleared_epoch: U64,
    reached_count: U32,
    cleared_count: U32,
}

/// Length of [`SentShared`].
pub(super) const SHARED_BYTES: usize = size_of::<SentShared>();
const _: () = assert!(SHARED_BYTES == 24);

impl From<&SharedLineage> for SentShared {
    fn from(shared: &SharedLineage) -> Self {
        let SharedLineage { reached, cleared } = shared;
        Self {
            reached_epoch: U64::new(reached.epoch.0),
            cleared_epoch: U64::new(cleared.epoch.0),
            reached_count: U32::new(reached.count),
            cleared_count: U32::new(cleared.count),
        }
    }
}

impl From<SentShared> for SharedLineage {
    fn from(sent: SentShared) -> Self {
        let lineage =
            |epoch: U64, count: U32| Lineage { epoch: Epoch(epoch.get()), count: count.get() };
        Self {
            reached: lineage(sent.reached_epoch, sent.reached_count),
            cleared: lineage(sent.cleared_epoch, sent.cleared_count),
        }
    }
}

/// Length of STANDING's body.
pub(super) const STANDING_BYTES: usize = size_of::<Sent>();
const _: () = assert!(STANDING_BYTES == 48);

pub(super) fn standing(standing: &Standing) -> Fields {
    Fields::of_epoch(Type::Standing, standing.epoch).second(standing.incarnation.0)
}

pub(super) fn standing_body(standing: &Standing) -> Body {
    let role = match standing.role {
        Role::Unknown => SentRole::Unknown,
        Role::Member => SentRole::Member,
        Role::Returned => SentRole::Returned,
        Role::Outside => SentRole::Outside,
    };
    let flag = |flag, set: bool| if set { flag } else { 0 };
    let sent = Sent {
        config: standing.config.to_be_bytes(),
        role: role.0,
        flags: flag(CLEAN, standing.clean)
            | flag(SAME_BOOT, standing.same_boot)
            | flag(OLDER, standing.older),
        reserved: [0; 6],
        shared: SentShared::from(&standing.shared),
    };
    Body::Bytes(sent.as_bytes().to_vec())
}

pub(super) fn lease(kind: Type, epoch: Epoch, incarnation: Incarnation, stamp: Stamp) -> Fields {
    Fields::of_epoch(kind, epoch).id(stamp.0).second(incarnation.0)
}

pub(super) fn yielding(kind: Type, view: View, incarnation: Incarnation) -> Fields {
    Fields::of_view(kind, view).second(incarnation.0)
}

pub(super) fn newer(epoch: Epoch) -> Fields {
    Fields::of_epoch(Type::Newer, epoch)
}

pub(super) fn parse_standing(fields: &Fields, body: &[u8]) -> Result<Message, Bad> {
    let sent = Sent::read_from_bytes(body).map_err(|_| fields.bad("body"))?;
    let role = match SentRole(sent.role) {
        SentRole::Unknown => Role::Unknown,
        SentRole::Member => Role::Member,
        SentRole::Returned => Role::Returned,
        SentRole::Outside => Role::Outside,
        _ => return Err(fields.bad("role")),
    };
    if sent.reserved != [0; 6] || sent.flags & !(CLEAN | SAME_BOOT | OLDER) != 0 {
        return Err(Bad::Reserved(fields.kind));
    }
    Ok(Message::Standing(Standing {
        incarnation: Incarnation(fields.second),
        epoch: Epoch(fields.epoch),
        config: u128::from_be_bytes(sent.config),
        role,
        clean: sent.flags & CLEAN != 0,
        same_boot: sent.flags & SAME_BOOT != 0,
        older: sent.flags & OLDER != 0,
        shared: sent.shared.into(),
    }))
}

pub(super) fn parse_renew(fields: &Fields) -> Message {
    let (epoch, incarnation, stamp) = lease_parts(fields);
    Message::Renew { epoch, incarnation, stamp }
}

pub(super) fn parse_promise(fields: &Fields) -> Message {
    let (epoch, incarnation, stamp) = lease_parts(fields);
    Message::Promise { epoch, incarnation, stamp }
}

fn lease_parts(fields: &Fields) -> (Epoch, Incarnation, Stamp) {
    (Epoch(fields.epoch), Incarnation(fields.second), Stamp(fields.id))
}

pub(super) fn parse_newer(fields: &Fields) -> Message {
    Message::Newer { epoch: Epoch(fields.epoch) }
}

pub(super) fn parse_yield(fields: &Fields) -> Message {
    Message::Yield { view: fields.view(), incarnation: Incarnation(fields.second) }
}

pub(super) fn parse_yielded(fields: &Fields) -> Message {
    Message::Yielded { view: fields.view(), incarnation: Incarnation(fields.second) }
}
