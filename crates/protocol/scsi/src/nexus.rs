//! The initiators of a unit and their pending unit attentions.

use slab::Slab;

use crate::copy::CopyOperations;
use crate::sense::{Sense, SenseCode, SenseKey};
use crate::space::THRESHOLDS;

/// Most I_T nexuses of one unit.
pub const MAX_NEXUSES: usize = 4096;

/// An initiator port that accesses the unit through a target port (SAM-5 4.8).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Nexus {
    /// Name of the initiator port; iSCSI: `NAME,i,0xISID` (RFC 7143 4.4.1).
    pub initiator_port: String,
    /// The target port it comes through.
    pub target_port: TargetPort,
}

/// A port of the target, as VPD page 83h reports it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TargetPort {
    /// SCSI name string of the target device; iSCSI: its name.
    pub device: String,
    /// SCSI name string of the port; iSCSI: `NAME,t,0xTPGT`.
    pub name: String,
    /// Relative target port identifier, from 1.
    pub relative_id: u16,
}

/// Identifies an I_T nexus of one unit; never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct NexusId {
    slot: usize,
    serial: u64,
}

impl NexusId {
    /// No nexus of any unit.
    pub(crate) const NONE: Self = Self { slot: usize::MAX, serial: u64::MAX };
}

/// The unit has [`MAX_NEXUSES`] already.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TooManyNexuses;

/// Unit attentions, each reported once by the first command that can carry it (SAM-5 5.14), in this
/// order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum UnitAttention {
    /// The unit was powered on, or this initiator is new to it.
    PowerOn,
    /// The target was reset.
    TargetReset,
    /// The logical unit was reset.
    UnitReset,
    /// The nexus was lost and is back.
    NexusLoss,
    /// Another initiator cleared this one's commands.
    CommandsCleared,
    /// Another initiator changed mode pages.
    ModeChanged,
    /// Another initiator cleared all registrations.
    ReservationsPreempted,
    /// The reservation that gave this initiator rights has ended or changed.
    ReservationsReleased,
    /// Another initiator removed this one's registration.
    RegistrationsPreempted,
    /// The access state of a node has changed (SPC-4 5.15.2.3).
    AccessChanged,
    /// The capacity has changed.
    CapacityChanged,
    /// INQUIRY data has changed.
    InquiryChanged,
    /// The LUN inventory has changed.
    LunsChanged,
    /// A thin unit has less available space than an initiator's threshold.
    SpaceLow,
    /// A thin unit uses more space than an initiator's threshold.
    SpaceUsed,
}

const BY_PRIORITY: [UnitAttention; 15] = [
    UnitAttention::PowerOn,
    UnitAttention::TargetReset,
    UnitAttention::UnitReset,
    UnitAttention::NexusLoss,
    UnitAttention::CommandsCleared,
    UnitAttention::ModeChanged,
    UnitAttention::ReservationsPreempted,
    UnitAttention::ReservationsReleased,
    UnitAttention::RegistrationsPreempted,
    UnitAttention::AccessChanged,
    UnitAttention::CapacityChanged,
    UnitAttention::InquiryChanged,
    UnitAttention::LunsChanged,
    UnitAttention::SpaceLow,
    UnitAttention::SpaceUsed,
];

impl UnitAttention {
    /// Its sense data.
    #[must_use]
    pub fn sense(self) -> Sense {
        let code = match self {
            Self::PowerOn => SenseCode::POWER_ON_OR_RESET,
            Self::TargetReset => SenseCode::SCSI_BUS_RESET,
            Self::UnitReset => SenseCode::BUS_DEVICE_RESET,
            Self::NexusLoss => SenseCode::NEXUS_LOSS,
            Self::CommandsCleared => SenseCode::COMMANDS_CLEARED,
            Self::ModeChanged => SenseCode::MODE_PARAMETERS_CHANGED,
            Self::ReservationsPreempted => SenseCode::RESERVATIONS_PREEMPTED,
            Self::ReservationsReleased => SenseCode::RESERVATIONS_RELEASED,
            Self::RegistrationsPreempted => SenseCode::REGISTRATIONS_PREEMPTED,
            Self::AccessChanged => SenseCode::ASYMMETRIC_ACCESS_STATE_CHANGED,
            Self::CapacityChanged => SenseCode::CAPACITY_DATA_CHANGED,
            Self::InquiryChanged => SenseCode::INQUIRY_DATA_CHANGED,
            Self::LunsChanged => SenseCode::REPORTED_LUNS_CHANGED,
            Self::SpaceLow | Self::SpaceUsed => SenseCode::THIN_PROVISIONING_SOFT_THRESHOLD_REACHED,
        };
        let sense = Sense::new(SenseKey::UnitAttention, code);
        match self {
            // The threshold: the offset of its descriptor in the mode page (SBC-3 4.7.3.7).
            Self::SpaceLow => sense.with_information(THRESHOLDS[0] as u64),
            Self::SpaceUsed => sense.with_information(THRESHOLDS[1] as u64),
            _ => sense,
        }
    }

    fn bit(self) -> u16 {
        1 << self as u8
    }

    /// After a reset the initiator rereads everything, so earlier attentions are dropped (SAM-5
    /// 5.14). Resets come first in the order, the strongest at the top.
    fn supersedes(self) -> bool {
        matches!(self, Self::PowerOn | Self::TargetReset | Self::UnitReset)
    }
}

/// Pending attentions: a set, so it is bounded and nothing is reported twice.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct PendingAttentions(u16);

impl PendingAttentions {
    fn raise(&mut self, what: UnitAttention) {
        if what.supersedes() {
            let stronger_resets = what.bit() - 1;
            if self.0 & stronger_resets != 0 {
                return;
            }
            self.0 = 0;
        }
        self.0 |= what.bit();
    }

    fn take_first(&mut self) -> Option<UnitAttention> {
        if self.0 == 0 {
            return None;
        }
        let first = BY_PRIORITY.into_iter().find(|a| self.0 & a.bit() != 0)?;
        self.0 &= !first.bit();
        Some(first)
    }
}

/// The initiators that get an attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AttentionScope {
    /// This initiator.
    Only(NexusId),
    /// All but this initiator.
    Except(NexusId),
    /// All initiators.
    All,
}

#[derive(Debug)]
struct NexusEntry {
    serial: u64,
    nexus: Nexus,
    pending: PendingAttentions,
    copies: CopyOperations,
}

/// All nexuses of a unit.
#[derive(Debug, Default)]
pub(crate) struct Nexuses {
    entries: Slab<NexusEntry>,
    next_serial: u64,
}

impl Nexuses {
    pub(crate) fn add(&mut self, nexus: Nexus) -> Result<NexusId, TooManyNexuses> {
        if self.entries.len() >= MAX_NEXUSES {
            return Err(TooManyNexuses);
        }
        let serial = self.next_serial;
        self.next_serial += 1;
        let mut waiting = PendingAttentions::default();
        waiting.raise(UnitAttention::PowerOn);
        let slot = self.entries.insert(NexusEntry {
            serial,
            nexus,
            pending: waiting,
            copies: CopyOperations::default(),
        });
        Ok(NexusId { slot, serial })
    }

    pub(crate) fn remove(&mut self, id: NexusId) {
        if self.get(id).is_some() {
            self.entries.remove(id.slot);
        }
    }

    pub(crate) fn get(&self, id: NexusId) -> Option<&Nexus> {
        let entry = self.entries.get(id.slot)?;
        (entry.serial == id.serial).then_some(&entry.nexus)
    }

    /// The third-party copies of this initiator.
    pub(crate) fn copies(&mut self, id: NexusId) -> Option<&mut CopyOperations> {
        let entry = self.entries.get_mut(id.slot)?;
        (entry.serial == id.serial).then_some(&mut entry.copies)
    }

    /// Aborts and forgets all third-party copies.
    pub(crate) fn reset_copies(&mut self) {
        self.entries.iter_mut().for_each(|(_, entry)| entry.copies.reset());
    }

    pub(crate) fn len(&self) -> usize {
        self.entries.len()
    }

    pub(crate) fn raise(&mut self, scope: AttentionScope, what: UnitAttention) {
        for (slot, entry) in &mut self.entries {
            let id = NexusId { slot, serial: entry.serial };
            let applies = match scope {
                AttentionScope::Only(only) => id == only,
                AttentionScope::Except(not) => id != not,
                AttentionScope::All => true,
            };
            if applies {
                entry.pending.raise(what);
            }
        }
    }

    /// Takes the next pending attention of this initiator.
    pub(crate) fn take_attention(&mut self, id: NexusId) -> Option<UnitAttention> {
        self.pending(id)?.take_first()
    }

    /// Removes a pending attention.
    pub(crate) fn cancel_attention(&mut self, id: NexusId, what: UnitAttention) {
        if let Some(waiting) = self.pending(id) {
            waiting.0 &= !what.bit();
        }
    }

    fn pending(&mut self, id: NexusId) -> Option<&mut PendingAttentions> {
        let entry = self.entries.get_mut(id.slot)?;
        (entry.serial == id.serial).then_some(&mut entry.pending)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nexus(n: usize) -> Nexus {
        let target_port = TargetPort {
            device: "iqn.2025-01.example:t".into(),
            name: "iqn.2025-01.example:t,t,0x0001".into(),
            relative_id: 1,
        };
        Nexus { initiator_port: format!("iqn.2025-01.example:i{n},i,0x0"), target_port }
    }

    #[test]
    fn attentions_are_reported_once_and_in_order() {
        let mut all = Nexuses::default();
        let a = all.add(nexus(0)).unwrap();
        let b = all.add(nexus(1)).unwrap();
        assert_eq!(all.take_attention(a), Some(UnitAttention::PowerOn));
        for _ in 0..3 {
            all.raise(AttentionScope::Except(b), UnitAttention::LunsChanged);
            all.raise(AttentionScope::All, UnitAttention::CapacityChanged);
        }
        assert_eq!(all.take_attention(a), Some(UnitAttention::CapacityChanged));
        assert_eq!(all.take_attention(a), Some(UnitAttention::LunsChanged));
        assert_eq!(all.take_attention(a), None);
        assert_eq!(all.take_attention(b), Some(UnitAttention::PowerOn));
        assert_eq!(all.take_attention(b), Some(UnitAttention::CapacityChanged));
        assert_eq!(all.take_attention(b), None);
    }

    /// SAM-5 5.14: a reset supersedes pending attentions; a power-on is not reported twice.
    #[test]
    fn a_reset_supersedes() {
        let mut all = Nexuses::default();
        let a = all.add(nexus(0)).unwrap();
        all.raise(AttentionScope::All, UnitAttention::UnitReset);
        assert_eq!(all.take_attention(a), Some(UnitAttention::PowerOn));
        assert_eq!(all.take_attention(a), None);
        all.raise(AttentionScope::Only(a), UnitAttention::ModeChanged);
        all.raise(AttentionScope::All, UnitAttention::UnitReset);
        assert_eq!(all.take_attention(a), Some(UnitAttention::UnitReset));
        assert_eq!(all.take_attention(a), None);
    }

    #[test]
    fn an_id_outlives_its_nexus_without_harm() {
        let mut all = Nexuses::default();
        let old = all.add(nexus(0)).unwrap();
        all.remove(old);
        let new = all.add(nexus(1)).unwrap();
        assert_eq!(all.get(old), None);
        assert_eq!(all.take_attention(old), None);
        all.remove(old);
        assert_eq!((all.len(), all.get(new)), (1, Some(&nexus(1))));
    }

    #[test]
    fn there_is_a_bound() {
        let mut all = Nexuses::default();
        for n in 0..MAX_NEXUSES {
            all.add(nexus(n)).unwrap();
        }
        assert_eq!(all.add(nexus(0)), Err(TooManyNexuses));
    }

    #[test]
    fn the_order_is_the_declaration() {
        for (i, a) in BY_PRIORITY.into_iter().enumerate() {
            assert_eq!(a as usize, i);
        }
    }
}
