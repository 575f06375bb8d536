//! Asymmetric logical unit access (SPC-4 5.15.2): through which nodes a unit can be used, and
//! REPORT TARGET PORT GROUPS (SPC-4 6.37).
//!
//! Each node that serves a unit is a target port group with one target port. Initiators cannot
//! change the states (TPGS 01b, implicit only); every initiator gets a unit attention for each
//! change.

use block::Access;
use zerocopy::big_endian::{U16, U32};
use zerocopy::{Immutable, IntoBytes, Unaligned};

use crate::command::{Outcome, ParsedCommand};
use crate::nexus::{AttentionScope, UnitAttention};
use crate::port_groups::{PortGroup, PortGroups};
use crate::reply::Refusal;
use crate::sense::Sense;
use crate::unit::LogicalUnit;

impl LogicalUnit {
    /// Sets the groups of a unit that several nodes serve: this node's, `own`, and `others`.
    /// Changes raise a unit attention for every initiator.
    pub fn set_port_groups(&mut self, own: PortGroup, others: &[PortGroup]) {
        let mut all: Vec<_> = others.iter().filter(|g| g.id != own.id).cloned().collect();
        let own_id = own.id;
        all.push(own);
        all.sort_unstable_by_key(|g| g.id);
        let groups = PortGroups { local: own_id, all };
        match self.groups.replace(groups) {
            // TPGS and the designators have changed.
            None => self.nexuses.raise(AttentionScope::All, UnitAttention::InquiryChanged),
            Some(old) if Some(&old) == self.groups.as_ref() => {}
            Some(_) => self.nexuses.raise(AttentionScope::All, UnitAttention::AccessChanged),
        }
    }

    /// Only this node serves the unit.
    pub fn clear_port_groups(&mut self) {
        if self.groups.take().is_some() {
            self.nexuses.raise(AttentionScope::All, UnitAttention::InquiryChanged);
        }
    }

    /// Sets the access state of this node; every initiator gets a unit attention. Does nothing if
    /// no other nodes serve the unit.
    pub fn set_access(&mut self, access: Access) {
        let Some(groups) = &mut self.groups else { return };
        let own = groups.local;
        for group in groups.all.iter_mut().filter(|g| g.id == own && g.access != access) {
            group.access = access;
            self.nexuses.raise(AttentionScope::All, UnitAttention::AccessChanged);
        }
    }

    /// The access state of this node; `None` if no other nodes serve the unit.
    #[must_use]
    pub fn access(&self) -> Option<Access> {
        let groups = self.groups.as_ref()?;
        groups.all.iter().find(|g| g.id == groups.local).map(|g| g.access)
    }

    /// This node's target port group.
    pub(crate) fn local_group(&self) -> Option<u16> {
        self.groups.as_ref().map(|g| g.local)
    }

    pub(crate) fn is_unavailable(&self) -> bool {
        self.access() == Some(Access::Unavailable)
    }
}

/// PARAMETER DATA FORMAT (byte 1 of the command).
pub(crate) const FORMAT: u8 = 0xe0;
const LENGTH_ONLY: u8 = 0x00;
const EXTENDED: u8 = 0x20;

/// FORMAT TYPE of the extended header.
const FORMAT_TYPE_EXTENDED: u8 = 0x10;

/// IMPLICIT TRANSITION TIME in seconds: how long initiators must tolerate a transition before the
/// path counts as failed. Transitions take seconds; a large value does no harm, as initiators use
/// another optimized node meanwhile.
const TRANSITION_TIME_S: u8 = 60;

/// Target port group descriptor with its one target port (SPC-4 6.37).
#[derive(IntoBytes, Immutable, Unaligned)]
#[repr(C)]
struct Descriptor {
    /// PREF (80h) and ASYMMETRIC ACCESS STATE (0Fh).
    state: u8,
    supported: u8,
    group: U16,
    reserved: u8,
    status: u8,
    vendor_specific: u8,
    ports: u8,
    reserved_too: U16,
    port: U16,
}

const _: () = assert!(size_of::<Descriptor>() == 12);

/// T_SUP, U_SUP and AO_SUP: the supported states.
const STATES: u8 = 0x80 | 0x08 | 0x01;

/// ASYMMETRIC ACCESS STATE (SPC-4 5.15.2.4).
fn state(access: Access) -> u8 {
    match access {
        Access::Optimized => 0x0,
        Access::Unavailable => 0x3,
        Access::Transitioning => 0xf,
    }
}

/// STATUS CODE: whether the unit has changed the state implicitly.
fn status(access: Access) -> u8 {
    const NONE: u8 = 0x00;
    const IMPLICIT: u8 = 0x02;
    if access == Access::Optimized { NONE } else { IMPLICIT }
}

/// REPORT TARGET PORT GROUPS.
pub(crate) fn report_target_port_groups(
    unit: &mut LogicalUnit,
    cmd: &ParsedCommand<'_>,
) -> Result<Outcome, Refusal> {
    let mut out = vec![0; 4];
    match cmd.cdb.byte(1) & FORMAT {
        LENGTH_ONLY => {}
        EXTENDED => out.extend([FORMAT_TYPE_EXTENDED, TRANSITION_TIME_S, 0, 0]),
        _ => return Err(Sense::field(1, Some(7)).into()),
    }
    let groups = unit.groups.iter().flat_map(|g| &g.all);
    for group in groups {
        let descriptor = Descriptor {
            state: state(group.access),
            supported: STATES,
            group: U16::new(group.id),
            reserved: 0,
            status: status(group.access),
            vendor_specific: 0,
            ports: 1,
            reserved_too: U16::ZERO,
            port: U16::new(group.port),
        };
        out.extend(descriptor.as_bytes());
    }
    let length = u32::try_from(out.len() - 4).unwrap_or(u32::MAX);
    out[..4].copy_from_slice(U32::new(length).as_bytes());
    Ok(Outcome::data(out, u64::from(cmd.cdb.u32(6))))
}
