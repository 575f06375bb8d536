//! Reservations (NVMe Base 2.0, 8.19): commands as changes of the table that all nodes keep, what
//! tells of that table, and what a host is told of changes that others make.

use std::collections::{BTreeMap, VecDeque};

use block::BufsMut;
use reservation::{Change, Enlisting, Initiator, Kind, Notice, Notices, Party, Refusal, Table};
use sha2::{Digest, Sha256};
use zerocopy::{FromZeros, IntoBytes};

use super::Controller;
use super::errors::{Fault, field};
use super::events;
use super::window::Window;
use crate::entry::{Completion, NSID_ALL, NvmOpcode, Sqe};
use crate::fabrics::CNTLID_DYNAMIC;
use crate::log::{ReservationEntry, ReservationNotice};
use crate::reserving::{
    AcquireAction, Keys, RegisterAction, ReleaseAction, ReportHeader, ReportRegistrant,
};
use crate::status::Status;

/// Notices that a controller keeps for its host; the oldest go first.
const MOST_NOTICES: usize = 64;

/// Length of the longest data of a reservation command.
const KEYS_BYTES: u32 = size_of::<Keys>() as u32;

/// Dword 10: IEKEY.
const IGNORE_KEY: u32 = 1 << 3;

/// A command that changes who may use a namespace, as far as its dwords say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReservationOp {
    /// Reservation Register.
    Register {
        /// RREGA, a known one.
        action: RegisterAction,
        /// IEKEY.
        ignores_key: bool,
        /// CPTPL.
        persists: Option<bool>,
    },
    /// Reservation Acquire.
    Acquire {
        /// RACQA, a known one.
        action: AcquireAction,
        /// RTYPE.
        kind: Kind,
    },
    /// Reservation Release, action Release.
    Release {
        /// RTYPE.
        kind: Kind,
    },
    /// Reservation Release, action Clear.
    Clear,
}

impl ReservationOp {
    /// Reads the dwords of such a command.
    pub(super) fn parse(opcode: NvmOpcode, sqe: &Sqe) -> Result<Self, Fault> {
        let [low, kind, ..] = sqe.cdw(0).to_le_bytes();
        let action = low & 0b111;
        let ignores_key = sqe.cdw(0) & IGNORE_KEY != 0;
        // IEKEY is for registrants that have lost their key, and for nobody else.
        if ignores_key && opcode != NvmOpcode::ReservationRegister {
            return Err(Fault::field(field::CDW10));
        }
        let kind = || Kind::from_nvme(kind).ok_or(Fault::field(field::CDW10 + 1));
        match opcode {
            NvmOpcode::ReservationRegister if action <= RegisterAction::Replace.0 => {
                let persists = match sqe.cdw(0) >> 30 {
                    0b00 => None,
                    0b10 => Some(false),
                    0b11 => Some(true),
                    _ => return Err(Fault::field(field::CDW10 + 3)),
                };
                Ok(Self::Register { action: RegisterAction(action), ignores_key, persists })
            }
            NvmOpcode::ReservationAcquire if action <= AcquireAction::PreemptAndAbort.0 => {
                Ok(Self::Acquire { action: AcquireAction(action), kind: kind()? })
            }
            NvmOpcode::ReservationRelease if action == ReleaseAction::Release.0 => {
                Ok(Self::Release { kind: kind()? })
            }
            NvmOpcode::ReservationRelease if action == ReleaseAction::Clear.0 => Ok(Self::Clear),
            _ => Err(Fault::field(field::CDW10)),
        }
    }

    /// Length of what counts of its data in bytes.
    fn data_bytes(self) -> u32 {
        match self {
            Self::Register { .. } | Self::Acquire { .. } => KEYS_BYTES,
            Self::Release { .. } | Self::Clear => KEYS_BYTES / 2,
        }
    }

    /// Refuses data of another length. Linux sends both keys with every command.
    pub(super) fn check_length(self, sqe: &Sqe) -> Result<(), Fault> {
        if (self.data_bytes()..=KEYS_BYTES).contains(&sqe.data_bytes()) {
            return Ok(());
        }
        Err(Fault::at(Status::DATA_SGL_LENGTH_INVALID, field::SGL_LENGTH))
    }

    /// What it asks of the table. `data` is what the host sent.
    ///
    /// # Errors
    /// [`Status::DATA_SGL_LENGTH_INVALID`] for data that is too short.
    pub(super) fn change(self, data: &[u8]) -> Result<Change, Status> {
        let short = Status::DATA_SGL_LENGTH_INVALID.do_not_retry();
        let mut keys = Keys::new_zeroed();
        let len = self.data_bytes() as usize;
        let data = data.get(..len).ok_or(short)?;
        keys.as_mut_bytes()[..len].copy_from_slice(data);
        let (key, other) = (keys.current.get(), keys.other.get());
        Ok(match self {
            Self::Register { action, ignores_key, persists } => {
                let key = (!ignores_key).then_some(key);
                let action = match action {
                    RegisterAction::Register => Enlisting::Register { new_key: other },
                    RegisterAction::Unregister => Enlisting::Unregister { key },
                    // So Linux unregisters (IOC_PR_REGISTER of the key 0).
                    _ if other == 0 => Enlisting::Unregister { key },
                    _ => Enlisting::Replace { key, new_key: other },
                };
                Change::Enlist { action, persists }
            }
            Self::Acquire { action: AcquireAction::Acquire, kind } => Change::Reserve { key, kind },
            Self::Acquire { action, kind } => {
                let abort = action == AcquireAction::PreemptAndAbort;
                Change::Preempt { key, victim: other, kind: Some(kind), abort }
            }
            Self::Release { kind } => Change::Release { key, kind },
            Self::Clear => Change::Clear { key },
        })
    }
}

/// What Reservation Report returns, as many bytes of it as `buffers` hold (NVMe Base 2.0, 7.5).
/// Controllers are dynamic, so each registrant is listed once, without one.
pub fn write_report(table: &Table, buffers: &mut BufsMut) {
    let mut window = Window::new(0, buffers);
    let mut header = ReportHeader::new_zeroed();
    header.generation = table.pr_generation.into();
    header.kind = table.reservation.as_ref().map_or(0, |held| held.kind.nvme());
    let registrants = table.registrants();
    header.registrants = u16::try_from(registrants.len()).unwrap_or(u16::MAX).into();
    header.persists = table.persists.into();
    window.put(0, header.as_bytes());
    for (i, registrant) in (0u64..).zip(registrants) {
        let mut entry = ReportRegistrant::new_zeroed();
        entry.cntlid = CNTLID_DYNAMIC.into();
        entry.status = table.holds(&registrant.party).into();
        entry.key = registrant.key.into();
        entry.host_id = host_id(&registrant.party);
        let at = size_of::<ReportHeader>() as u64 + i * size_of::<ReportRegistrant>() as u64;
        window.put(at, entry.as_bytes());
    }
}

/// A party by a host identifier. That of an iSCSI nexus is made of its name, so that registrants
/// can be told from one another, and is the same at every node.
fn host_id(party: &Party) -> [u8; 16] {
    match &party.initiator {
        Initiator::Host(id) => *id,
        Initiator::Iscsi { name, isid } => {
            let mut hash = Sha256::new();
            hash.update(name);
            hash.update([0]);
            hash.update(isid);
            hash.update(party.port.to_be_bytes());
            let digest: [u8; 32] = hash.finalize().into();
            std::array::from_fn(|i| digest[i])
        }
    }
}

/// What the host of a controller has not read yet of what others did to its registrations, and
/// what it does not want to hear of.
#[derive(Debug, Default)]
pub(super) struct Told {
    entries: VecDeque<(u64, ReservationNotice, u32)>,
    /// Notices so far.
    count: u64,
    /// Reservation Notification Mask by namespace.
    masks: BTreeMap<u32, u8>,
}

impl Told {
    /// The oldest notice; zeroes without one.
    pub(super) fn write(&self, window: &mut Window<'_>) {
        let Some(&(count, kind, nsid)) = self.entries.front() else { return };
        let mut entry = ReservationEntry::new_zeroed();
        entry.count = count.into();
        entry.kind = kind.0;
        entry.available = u8::try_from(self.entries.len() - 1).unwrap_or(u8::MAX);
        entry.nsid = nsid.into();
        window.put(0, entry.as_bytes());
    }

    /// The host has read the oldest notice; whether there are more.
    pub(super) fn was_read(&mut self) -> bool {
        self.entries.pop_front();
        !self.entries.is_empty()
    }

    /// Reservation Notification Mask of a namespace.
    pub(super) fn mask(&self, nsid: u32) -> u8 {
        self.masks.get(&nsid).copied().unwrap_or_default()
    }
}

impl Controller {
    /// A change of the table of a namespace means `notices` to the host. What concerns its
    /// registration is kept for it to read (NVMe Base 2.0, 8.19.1).
    pub fn reservations_changed(&mut self, nsid: u32, notices: Notices) {
        let mask = self.told.mask(nsid);
        for notice in notices.iter() {
            let kind = match notice {
                Notice::RegistrationsPreempted => ReservationNotice::RegistrationPreempted,
                Notice::ReservationsReleased => ReservationNotice::ReservationReleased,
                Notice::ReservationsPreempted => ReservationNotice::ReservationPreempted,
                _ => continue,
            };
            if mask & 1 << kind.0 != 0 {
                continue;
            }
            self.told.count += 1;
            self.told.entries.push_back((self.told.count, kind, nsid));
            if self.told.entries.len() > MOST_NOTICES {
                self.told.entries.pop_front();
            }
            self.events.notify(events::Kind::Reservations);
        }
    }

    /// How a command ends that the table refuses; that is logged.
    pub fn refused(&mut self, qid: u16, sqe: &Sqe, why: Refusal) -> Completion {
        let fault = match why {
            Refusal::Conflict => Fault::new(Status::RESERVATION_CONFLICT.do_not_retry()),
            Refusal::InvalidRelease => Fault::field(field::CDW10 + 1),
            Refusal::Parameter(_) => Fault::field(field::CDW10),
            Refusal::Full => Fault::new(Status::INTERNAL_ERROR.do_not_retry()),
        };
        self.refuse(qid, sqe, fault)
    }

    /// How a command ends that gave way to Preempt and Abort, or may have: a host that has lost
    /// nothing by it sends it again.
    pub fn preempted(&mut self, qid: u16, sqe: &Sqe) -> Completion {
        self.refuse(qid, sqe, Fault::new(Status::PREEMPTED_AND_ABORTED))
    }

    /// The namespaces of a feature that those which keep reservations have; `all`: the broadcast
    /// identifier stands for all of them.
    pub(super) fn keepers(&self, nsid: u32, all: bool) -> Result<Vec<u32>, Fault> {
        if nsid == NSID_ALL && all {
            let keepers = self.namespaces.iter().filter(|(_, ns)| ns.keeps_reservations);
            return Ok(keepers.map(|(nsid, _)| *nsid).collect());
        }
        if nsid == NSID_ALL {
            return Err(Fault::field(field::NSID));
        }
        let ns = self.valid(nsid)?.filter(|ns| ns.keeps_reservations);
        ns.map(|_| vec![nsid]).ok_or(Fault::field(field::NSID))
    }

    /// Set Features, Reservation Notification Mask.
    pub(super) fn mask_notices(&mut self, nsid: u32, value: u32) -> Result<(), Fault> {
        const ALL: u8 = 0b1110;
        let [mask, ..] = value.to_le_bytes();
        for nsid in self.keepers(nsid, true)? {
            self.told.masks.insert(nsid, mask & ALL);
        }
        Ok(())
    }
}
