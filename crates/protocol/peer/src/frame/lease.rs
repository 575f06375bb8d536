//! ReplicaReport, LeaseRequest, LeaseGrant, NewerEpoch, RevokeLease and LeaseRevoked: reports and
//! leases.
//!
//! ```text
//!                epoch      id     second       body
//! ReplicaReport  adopted           incarnation  48 bytes: configuration id (16, as RFC 9562 4),
//!                                               role, flags (1 clean, 2 same boot, 4 rolled back),
//!                                               6 reserved, and generations: common epoch (8),
//!                                               cleared epoch (8), counts of both (4 each)
//! LeaseRequest   requested  stamp  incarnation
//! LeaseGrant     granted    stamp  incarnation
//! NewerEpoch     newer
//! RevokeLease    of view           incarnation
//! LeaseRevoked   of view           incarnation
//! ```

use block::Epoch;
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::header::{FrameType, HeaderFields};
use super::{FrameBody, FrameError};
use crate::{
    ClockStamp, DataGeneration, Incarnation, Message, PeerGenerations, ReplicaReport, Role, View,
};

const FLAG_CLEAN: u8 = 1;
const FLAG_SAME_BOOT: u8 = 2;
const FLAG_ROLLED_BACK: u8 = 4;

wire::open_enum! {
    /// A role, as it is sent.
    enum WireRole: u8 {
        Unknown = 0,
        Member = 1,
        Restarted = 2,
        OutOfSync = 3,
    }
}

#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct WireReplicaReport {
    config_id: [u8; 16],
    role: u8,
    flags: u8,
    reserved: [u8; 6],
    generations: WirePeerGenerations,
}

/// The generations that one replica has recorded with another, as sent.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(super) struct WirePeerGenerations {
    common_epoch: U64,
    cleared_epoch: U64,
    common_count: U32,
    cleared_count: U32,
}

/// Length of [`WirePeerGenerations`].
pub(super) const PEER_GENERATIONS_BYTES: usize = size_of::<WirePeerGenerations>();
const _: () = assert!(PEER_GENERATIONS_BYTES == 24);

impl From<&PeerGenerations> for WirePeerGenerations {
    fn from(generations: &PeerGenerations) -> Self {
        let PeerGenerations { common, last_cleared } = generations;
        Self {
            common_epoch: U64::new(common.epoch.0),
            cleared_epoch: U64::new(last_cleared.epoch.0),
            common_count: U32::new(common.count),
            cleared_count: U32::new(last_cleared.count),
        }
    }
}

impl From<WirePeerGenerations> for PeerGenerations {
    fn from(wire: WirePeerGenerations) -> Self {
        let generation = |epoch: U64, count: U32| DataGeneration {
            epoch: Epoch(epoch.get()),
            count: count.get(),
        };
        Self {
            common: generation(wire.common_epoch, wire.common_count),
            last_cleared: generation(wire.cleared_epoch, wire.cleared_count),
        }
    }
}

/// Length of the body of ReplicaReport.
pub(super) const REPLICA_REPORT_BYTES: usize = size_of::<WireReplicaReport>();
const _: () = assert!(REPLICA_REPORT_BYTES == 48);

pub(super) fn replica_report(report: &ReplicaReport) -> HeaderFields {
    HeaderFields::with_epoch(FrameType::ReplicaReport, report.epoch)
        .with_second(report.incarnation.0)
}

pub(super) fn replica_report_body(report: &ReplicaReport) -> FrameBody {
    let role = match report.role {
        Role::Unknown => WireRole::Unknown,
        Role::Member => WireRole::Member,
        Role::Restarted => WireRole::Restarted,
        Role::OutOfSync => WireRole::OutOfSync,
    };
    let flag = |flag, set: bool| if set { flag } else { 0 };
    let wire = WireReplicaReport {
        config_id: report.config_id.to_be_bytes(),
        role: role.0,
        flags: flag(FLAG_CLEAN, report.is_clean)
            | flag(FLAG_SAME_BOOT, report.same_boot)
            | flag(FLAG_ROLLED_BACK, report.is_rolled_back),
        reserved: [0; 6],
        generations: WirePeerGenerations::from(&report.generations),
    };
    FrameBody::Bytes(wire.as_bytes().to_vec())
}

pub(super) fn lease_message(
    kind: FrameType,
    epoch: Epoch,
    incarnation: Incarnation,
    stamp: ClockStamp,
) -> HeaderFields {
    HeaderFields::with_epoch(kind, epoch).with_id(stamp.0).with_second(incarnation.0)
}

pub(super) fn lease_revocation(
    kind: FrameType,
    view: View,
    incarnation: Incarnation,
) -> HeaderFields {
    HeaderFields::with_view(kind, view).with_second(incarnation.0)
}

pub(super) fn newer_epoch(epoch: Epoch) -> HeaderFields {
    HeaderFields::with_epoch(FrameType::NewerEpoch, epoch)
}

pub(super) fn parse_replica_report(
    fields: &HeaderFields,
    body: &[u8],
) -> Result<Message, FrameError> {
    let wire = WireReplicaReport::read_from_bytes(body).map_err(|_| fields.invalid("body"))?;
    let role = match WireRole(wire.role) {
        WireRole::Unknown => Role::Unknown,
        WireRole::Member => Role::Member,
        WireRole::Restarted => Role::Restarted,
        WireRole::OutOfSync => Role::OutOfSync,
        _ => return Err(fields.invalid("role")),
    };
    if wire.reserved != [0; 6]
        || wire.flags & !(FLAG_CLEAN | FLAG_SAME_BOOT | FLAG_ROLLED_BACK) != 0
    {
        return Err(FrameError::ReservedNotZero(fields.kind));
    }
    Ok(Message::ReplicaReport(ReplicaReport {
        incarnation: Incarnation(fields.second),
        epoch: Epoch(fields.epoch),
        config_id: u128::from_be_bytes(wire.config_id),
        role,
        is_clean: wire.flags & FLAG_CLEAN != 0,
        same_boot: wire.flags & FLAG_SAME_BOOT != 0,
        is_rolled_back: wire.flags & FLAG_ROLLED_BACK != 0,
        generations: wire.generations.into(),
    }))
}

pub(super) fn parse_lease_request(fields: &HeaderFields) -> Message {
    let (epoch, incarnation, stamp) = lease_parts(fields);
    Message::LeaseRequest { epoch, incarnation, stamp }
}

pub(super) fn parse_lease_grant(fields: &HeaderFields) -> Message {
    let (epoch, incarnation, stamp) = lease_parts(fields);
    Message::LeaseGrant { epoch, incarnation, stamp }
}

fn lease_parts(fields: &HeaderFields) -> (Epoch, Incarnation, ClockStamp) {
    (Epoch(fields.epoch), Incarnation(fields.second), ClockStamp(fields.id))
}

pub(super) fn parse_newer_epoch(fields: &HeaderFields) -> Message {
    Message::NewerEpoch { epoch: Epoch(fields.epoch) }
}

pub(super) fn parse_revoke_lease(fields: &HeaderFields) -> Message {
    Message::RevokeLease { view: fields.view(), incarnation: Incarnation(fields.second) }
}

pub(super) fn parse_lease_revoked(fields: &HeaderFields) -> Message {
    Message::LeaseRevoked { view: fields.view(), incarnation: Incarnation(fields.second) }
}
