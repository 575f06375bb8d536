//! The initiators of a unit and what each of them has yet to be told.

use slab::Slab;

use crate::copy::Copies;
use crate::mode::THRESHOLDS;
use crate::sense::{Code, Key, Sense};

/// Most I_T nexuses of one unit.
pub const MAX_NEXUSES: usize = 4096;

/// An initiator port that talks to the unit through a target port (SAM-5 4.8).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Nexus {
    /// Name of the initiator port; iSCSI: `NAME,i,0xISID` (RFC 7143 4.4.1).
    pub initiator_port: String,
    /// The target port it comes through.
    pub target_port: TargetPort,
}

/// A port of the target, as VPD page 83h tells about it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TargetPort {
    /// SCSI name string of the target device; iSCSI: its name.
    pub device: String,
    /// SCSI name string of the port; iSCSI: `NAME,t,0xTPGT`.
    pub name: String,
    /// Relative target port identifier, from 1.
    pub relative_id: u16,
}

/// Names an I_T nexus of one unit; never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct NexusId {
    slot: usize,
    serial: u64,
}

impl NexusId {
    /// No initiator of any unit.
    pub(crate) const NOBODY: Self = Self { slot: usize::MAX, serial: u64::MAX };
}

/// The unit has [`MAX_NEXUSES`] already.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TooMany;

/// What initiators are told once, each by the first command that can carry it (SAM-5 5.14). What
/// stands first is told first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Attention {
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
    /// The reservation that gave this initiator rights is gone, or another.
    ReservationsReleased,
    /// Another initiator removed this one's registration.
    RegistrationsPreempted,
    /// A node is to be used in another way than before (SPC-4 5.15.2.3).
    AccessChanged,
    /// The capacity has changed.
    CapacityChanged,
    /// INQUIRY would answer differently now.
    InquiryChanged,
    /// REPORT LUNS would answer differently now.
    LunsChanged,
    /// There is less space left for a thin unit than an initiator wants.
    SpaceLow,
    /// A thin unit takes more space than an initiator wants.
    SpaceTaken,
}

const TOLD_IN_ORDER: [Attention; 15] = [
    Attention::PowerOn,
    Attention::TargetReset,
    Attention::UnitReset,
    Attention::NexusLoss,
    Attention::CommandsCleared,
    Attention::ModeChanged,
    Attention::ReservationsPreempted,
    Attention::ReservationsReleased,
    Attention::RegistrationsPreempted,
    Attention::AccessChanged,
    Attention::CapacityChanged,
    Attention::InquiryChanged,
    Attention::LunsChanged,
    Attention::SpaceLow,
    Attention::SpaceTaken,
];

impl Attention {
    /// The sense data that tells it.
    #[must_use]
    pub fn sense(self) -> Sense {
        let code = match self {
            Self::PowerOn => Code::POWER_ON_OR_RESET,
            Self::TargetReset => Code::SCSI_BUS_RESET,
            Self::UnitReset => Code::BUS_DEVICE_RESET,
            Self::NexusLoss => Code::NEXUS_LOSS,
            Self::CommandsCleared => Code::COMMANDS_CLEARED,
            Self::ModeChanged => Code::MODE_PARAMETERS_CHANGED,
            Self::ReservationsPreempted => Code::RESERVATIONS_PREEMPTED,
            Self::ReservationsReleased => Code::RESERVATIONS_RELEASED,
            Self::RegistrationsPreempted => Code::REGISTRATIONS_PREEMPTED,
            Self::AccessChanged => Code::ASYMMETRIC_ACCESS_STATE_CHANGED,
            Self::CapacityChanged => Code::CAPACITY_DATA_CHANGED,
            Self::InquiryChanged => Code::INQUIRY_DATA_CHANGED,
            Self::LunsChanged => Code::REPORTED_LUNS_CHANGED,
            Self::SpaceLow | Self::SpaceTaken => Code::THIN_PROVISIONING_SOFT_THRESHOLD_REACHED,
        };
        let sense = Sense::new(Key::UnitAttention, code);
        match self {
            // Which threshold: where its descriptor is in the mode page (SBC-3 4.7.3.7).
            Self::SpaceLow => sense.with_information(THRESHOLDS[0] as u64),
            Self::SpaceTaken => sense.with_information(THRESHOLDS[1] as u64),
            _ => sense,
        }
    }

    fn bit(self) -> u16 {
        1 << self as u8
    }

    /// A reset makes the initiator look at everything anew, so what waited before is moot
    /// (SAM-5 5.14). Resets stand first in the order, the strongest at the top.
    fn supersedes(self) -> bool {
        matches!(self, Self::PowerOn | Self::TargetReset | Self::UnitReset)
    }
}

/// Attentions that wait: a set, so it is bounded and nothing is told twice.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Waiting(u16);

impl Waiting {
    fn raise(&mut self, what: Attention) {
        if what.supersedes() {
            let stronger_resets = what.bit() - 1;
            if self.0 & stronger_resets != 0 {
                return;
            }
            self.0 = 0;
        }
        self.0 |= what.bit();
    }

    fn take_first(&mut self) -> Option<Attention> {
        if self.0 == 0 {
            return None;
        }
        let first = TOLD_IN_ORDER.into_iter().find(|a| self.0 & a.bit() != 0)?;
        self.0 &= !first.bit();
        Some(first)
    }
}

/// Who is to be told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Whom {
    /// This initiator.
    Only(NexusId),
    /// Everybody else.
    AllBut(NexusId),
    /// Everybody.
    All,
}

#[derive(Debug)]
struct Entry {
    serial: u64,
    nexus: Nexus,
    waiting: Waiting,
    copies: Copies,
}

/// All nexuses of a unit.
#[derive(Debug, Default)]
pub(crate) struct Nexuses {
    entries: Slab<Entry>,
    next_serial: u64,
}

impl Nexuses {
    pub(crate) fn add(&mut self, nexus: Nexus) -> Result<NexusId, TooMany> {
        if self.entries.len() >= MAX_NEXUSES {
            return Err(TooMany);
        }
        let serial = self.next_serial;
        self.next_serial += 1;
        let mut waiting = Waiting::default();
        waiting.raise(Attention::PowerOn);
        let slot = self.entries.insert(Entry { serial, nexus, waiting, copies: Copies::default() });
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

    /// The third-party copies that this initiator has asked for.
    pub(crate) fn copies(&mut self, id: NexusId) -> Option<&mut Copies> {
        let entry = self.entries.get_mut(id.slot)?;
        (entry.serial == id.serial).then_some(&mut entry.copies)
    }

    /// Ends all third-party copies, and forgets them.
    pub(crate) fn reset_copies(&mut self) {
        self.entries.iter_mut().for_each(|(_, entry)| entry.copies.reset());
    }

    pub(crate) fn len(&self) -> usize {
        self.entries.len()
    }

    pub(crate) fn raise(&mut self, whom: Whom, what: Attention) {
        for (slot, entry) in &mut self.entries {
            let id = NexusId { slot, serial: entry.serial };
            let told = match whom {
                Whom::Only(only) => id == only,
                Whom::AllBut(not) => id != not,
                Whom::All => true,
            };
            if told {
                entry.waiting.raise(what);
            }
        }
    }

    /// The next thing this initiator must be told, which counts as told.
    pub(crate) fn take_attention(&mut self, id: NexusId) -> Option<Attention> {
        self.waiting(id)?.take_first()
    }

    /// Nothing of the kind needs telling any more.
    pub(crate) fn forget(&mut self, id: NexusId, what: Attention) {
        if let Some(waiting) = self.waiting(id) {
            waiting.0 &= !what.bit();
        }
    }

    fn waiting(&mut self, id: NexusId) -> Option<&mut Waiting> {
        let entry = self.entries.get_mut(id.slot)?;
        (entry.serial == id.serial).then_some(&mut entry.waiting)
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
    fn attentions_are_told_once_and_in_order() {
        let mut all = Nexuses::default();
        let a = all.add(nexus(0)).unwrap();
        let b = all.add(nexus(1)).unwrap();
        assert_eq!(all.take_attention(a), Some(Attention::PowerOn));
        for _ in 0..3 {
            all.raise(Whom::AllBut(b), Attention::LunsChanged);
            all.raise(Whom::All, Attention::CapacityChanged);
        }
        assert_eq!(all.take_attention(a), Some(Attention::CapacityChanged));
        assert_eq!(all.take_attention(a), Some(Attention::LunsChanged));
        assert_eq!(all.take_attention(a), None);
        assert_eq!(all.take_attention(b), Some(Attention::PowerOn));
        assert_eq!(all.take_attention(b), Some(Attention::CapacityChanged));
        assert_eq!(all.take_attention(b), None);
    }

    /// SAM-5 5.14: a reset supersedes what waited; a power-on is not told twice.
    #[test]
    fn a_reset_supersedes() {
        let mut all = Nexuses::default();
        let a = all.add(nexus(0)).unwrap();
        all.raise(Whom::All, Attention::UnitReset);
        assert_eq!(all.take_attention(a), Some(Attention::PowerOn));
        assert_eq!(all.take_attention(a), None);
        all.raise(Whom::Only(a), Attention::ModeChanged);
        all.raise(Whom::All, Attention::UnitReset);
        assert_eq!(all.take_attention(a), Some(Attention::UnitReset));
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
        assert_eq!(all.add(nexus(0)), Err(TooMany));
    }

    #[test]
    fn the_order_is_the_declaration() {
        for (i, a) in TOLD_IN_ORDER.into_iter().enumerate() {
            assert_eq!(a as usize, i);
        }
    }
}
