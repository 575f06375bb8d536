//! Reservations (NVMe Base 2.0, 8.19): translates commands to changes of the table shared by all
//! nodes, reports that table, and notifies hosts of changes made by others.

use std::collections::{BTreeMap, VecDeque};

use block::BufsMut;
use reservation::{
    Change, Initiator, ItNexus, Notification, Notifications, NvmeRegisterAction, ReservationError,
    ReservationType, Table,
};
use sha2::{Digest, Sha256};
use zerocopy::{FromZeros, IntoBytes};

use super::Controller;
use super::error_log::{CommandError, field};
use super::events;
use super::page_writer::PageWriter;
use crate::entry::{Completion, NSID_ALL, NvmOpcode, Sqe};
use crate::fabrics::CNTLID_DYNAMIC;
use crate::log::{ReservationEntry, ReservationNotificationType};
use crate::reservation_data::{
    AcquireAction, RegisterAction, ReleaseAction, ReportHeader, ReportRegistrant, ReservationKeys,
};
use crate::status::Status;

/// Notifications that a controller keeps for its host; the oldest are dropped first.
const MAX_NOTIFICATIONS: usize = 64;

/// Length of the longest data of a reservation command.
const KEYS_BYTES: u32 = size_of::<ReservationKeys>() as u32;

/// Dword 10: IEKEY.
const IGNORE_KEY: u32 = 1 << 3;

/// A command that changes reservations, as far as its dwords say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReservationOp {
    /// Reservation Register.
    Register {
        /// RREGA.
        action: RegisterAction,
        /// IEKEY.
        ignore_key: bool,
        /// CPTPL.
        persist: Option<bool>,
    },
    /// Reservation Acquire.
    Acquire {
        /// RACQA.
        action: AcquireAction,
        /// RTYPE.
        kind: ReservationType,
    },
    /// Reservation Release, action Release.
    Release {
        /// RTYPE.
        kind: ReservationType,
    },
    /// Reservation Release, action Clear.
    Clear,
}

impl ReservationOp {
    /// Parses the dwords of such a command.
    pub(super) fn parse(opcode: NvmOpcode, sqe: &Sqe) -> Result<Self, CommandError> {
        let [low, kind, ..] = sqe.cdw(0).to_le_bytes();
        let action = low & 0b111;
        let ignores_key = sqe.cdw(0) & IGNORE_KEY != 0;
        // IEKEY is only for registrants that have lost their key.
        if ignores_key && opcode != NvmOpcode::ReservationRegister {
            return Err(CommandError::field(field::CDW10));
        }
        let kind = || ReservationType::from_nvme(kind).ok_or(CommandError::field(field::CDW10 + 1));
        match opcode {
            NvmOpcode::ReservationRegister if action <= RegisterAction::Replace.0 => {
                let persists = match sqe.cdw(0) >> 30 {
                    0b00 => None,
                    0b10 => Some(false),
                    0b11 => Some(true),
                    _ => return Err(CommandError::field(field::CDW10 + 3)),
                };
                Ok(Self::Register {
                    action: RegisterAction(action),
                    ignore_key: ignores_key,
                    persist: persists,
                })
            }
            NvmOpcode::ReservationAcquire if action <= AcquireAction::PreemptAndAbort.0 => {
                Ok(Self::Acquire { action: AcquireAction(action), kind: kind()? })
            }
            NvmOpcode::ReservationRelease if action == ReleaseAction::Release.0 => {
                Ok(Self::Release { kind: kind()? })
            }
            NvmOpcode::ReservationRelease if action == ReleaseAction::Clear.0 => Ok(Self::Clear),
            _ => Err(CommandError::field(field::CDW10)),
        }
    }

    /// Length of the used part of its data in bytes.
    fn data_bytes(self) -> u32 {
        match self {
            Self::Register { .. } | Self::Acquire { .. } => KEYS_BYTES,
            Self::Release { .. } | Self::Clear => KEYS_BYTES / 2,
        }
    }

    /// Refuses data of another length. Linux sends both keys with every command.
    pub(super) fn check_length(self, sqe: &Sqe) -> Result<(), CommandError> {
        if (self.data_bytes()..=KEYS_BYTES).contains(&sqe.data_bytes()) {
            return Ok(());
        }
        Err(CommandError::at(Status::DATA_SGL_LENGTH_INVALID, field::SGL_LENGTH))
    }

    /// The change of the table. `data` is the host's data.
    ///
    /// # Errors
    /// [`Status::DATA_SGL_LENGTH_INVALID`] for data that is too short.
    pub(super) fn change(self, data: &[u8]) -> Result<Change, Status> {
        let short = Status::DATA_SGL_LENGTH_INVALID.do_not_retry();
        let mut keys = ReservationKeys::new_zeroed();
        let len = self.data_bytes() as usize;
        let data = data.get(..len).ok_or(short)?;
        keys.as_mut_bytes()[..len].copy_from_slice(data);
        let (key, other) = (keys.current.get(), keys.other.get());
        Ok(match self {
            Self::Register { action, ignore_key: ignores_key, persist: persists } => {
                let key = (!ignores_key).then_some(key);
                let action = match action {
                    RegisterAction::Register => NvmeRegisterAction::Register { new_key: other },
                    RegisterAction::Unregister => NvmeRegisterAction::Unregister { key },
                    // Linux unregisters this way (IOC_PR_REGISTER with key 0).
                    _ if other == 0 => NvmeRegisterAction::Unregister { key },
                    _ => NvmeRegisterAction::Replace { key, new_key: other },
                };
                Change::NvmeRegister { action, persist: persists }
            }
            Self::Acquire { action: AcquireAction::Acquire, kind } => Change::Reserve { key, kind },
            Self::Acquire { action, kind } => {
                let abort = action == AcquireAction::PreemptAndAbort;
                Change::Preempt { key, preempt_key: other, kind: Some(kind), abort }
            }
            Self::Release { kind } => Change::Release { key, kind },
            Self::Clear => Change::Clear { key },
        })
    }
}

/// Writes the data of Reservation Report, as much as `buffers` hold (NVMe Base 2.0, 7.5).
/// Controllers are dynamic, so each registrant is listed once, without a controller identifier.
pub fn write_report(table: &Table, buffers: &mut BufsMut) {
    let mut window = PageWriter::new(0, buffers);
    let mut header = ReportHeader::new_zeroed();
    header.generation = table.pr_generation.into();
    header.kind = table.reservation.as_ref().map_or(0, |held| held.kind.nvme());
    let registrants = table.registrants();
    header.registrants = u16::try_from(registrants.len()).unwrap_or(u16::MAX).into();
    header.persist = table.persist.into();
    window.put(0, header.as_bytes());
    for (i, registrant) in (0u64..).zip(registrants) {
        let mut entry = ReportRegistrant::new_zeroed();
        entry.cntlid = CNTLID_DYNAMIC.into();
        entry.status = table.is_holder(&registrant.nexus).into();
        entry.key = registrant.key.into();
        entry.host_id = host_id(&registrant.nexus);
        let at = size_of::<ReportHeader>() as u64 + i * size_of::<ReportRegistrant>() as u64;
        window.put(at, entry.as_bytes());
    }
}

/// The host identifier of a registrant. That of an iSCSI nexus is derived from its name, so that
/// registrants differ, identically on every node.
fn host_id(party: &ItNexus) -> [u8; 16] {
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

/// Unread notifications for the host of a controller about its registrations, and their masks.
#[derive(Debug, Default)]
pub(super) struct ReservationLog {
    entries: VecDeque<(u64, ReservationNotificationType, u32)>,
    /// Number of notifications so far.
    count: u64,
    /// Reservation Notification Mask by namespace.
    masks: BTreeMap<u32, u8>,
}

impl ReservationLog {
    /// Writes the oldest notification; zeroes if none.
    pub(super) fn write(&self, window: &mut PageWriter<'_>) {
        let Some(&(count, kind, nsid)) = self.entries.front() else { return };
        let mut entry = ReservationEntry::new_zeroed();
        entry.count = count.into();
        entry.kind = kind.0;
        entry.available = u8::try_from(self.entries.len() - 1).unwrap_or(u8::MAX);
        entry.nsid = nsid.into();
        window.put(0, entry.as_bytes());
    }

    /// Removes the oldest notification, which the host has read. Returns whether there are more.
    pub(super) fn pop_read(&mut self) -> bool {
        self.entries.pop_front();
        !self.entries.is_empty()
    }

    /// Reservation Notification Mask of a namespace.
    pub(super) fn mask(&self, nsid: u32) -> u8 {
        self.masks.get(&nsid).copied().unwrap_or_default()
    }
}

impl Controller {
    /// Handles `notices` about a change of a namespace's table. Those that concern the host's
    /// registration are kept for it to read (NVMe Base 2.0, 8.19.1).
    pub fn reservations_changed(&mut self, nsid: u32, notices: Notifications) {
        let mask = self.reservation_log.mask(nsid);
        for notice in notices.iter() {
            let kind = match notice {
                Notification::RegistrationsPreempted => {
                    ReservationNotificationType::RegistrationPreempted
                }
                Notification::ReservationsReleased => {
                    ReservationNotificationType::ReservationReleased
                }
                Notification::ReservationsPreempted => {
                    ReservationNotificationType::ReservationPreempted
                }
                _ => continue,
            };
            if mask & 1 << kind.0 != 0 {
                continue;
            }
            self.reservation_log.count += 1;
            self.reservation_log.entries.push_back((self.reservation_log.count, kind, nsid));
            if self.reservation_log.entries.len() > MAX_NOTIFICATIONS {
                self.reservation_log.entries.pop_front();
            }
            self.events.notify(events::EventKind::Reservations);
        }
    }

    /// The completion of a command that the table refused; logs it.
    pub fn fail_refused_change(
        &mut self,
        qid: u16,
        sqe: &Sqe,
        why: ReservationError,
    ) -> Completion {
        let fault = match why {
            ReservationError::Conflict => {
                CommandError::new(Status::RESERVATION_CONFLICT.do_not_retry())
            }
            ReservationError::InvalidRelease => CommandError::field(field::CDW10 + 1),
            ReservationError::InvalidField(_) => CommandError::field(field::CDW10),
            ReservationError::InsufficientResources => {
                CommandError::new(Status::INTERNAL_ERROR.do_not_retry())
            }
        };
        self.refuse(qid, sqe, fault)
    }

    /// The completion of a command aborted by Preempt and Abort, or possibly so: a host that still
    /// has access retries it.
    pub fn fail_preempted(&mut self, qid: u16, sqe: &Sqe) -> Completion {
        self.refuse(qid, sqe, CommandError::new(Status::PREEMPTED_AND_ABORTED))
    }

    /// The namespaces with reservations that a feature addresses; `all`: accept the broadcast
    /// identifier.
    pub(super) fn namespaces_with_reservations(
        &self,
        nsid: u32,
        all: bool,
    ) -> Result<Vec<u32>, CommandError> {
        if nsid == NSID_ALL && all {
            let keepers = self.namespaces.iter().filter(|(_, ns)| ns.keeps_reservations);
            return Ok(keepers.map(|(nsid, _)| *nsid).collect());
        }
        if nsid == NSID_ALL {
            return Err(CommandError::field(field::NSID));
        }
        let ns = self.valid_namespace(nsid)?.filter(|ns| ns.keeps_reservations);
        ns.map(|_| vec![nsid]).ok_or(CommandError::field(field::NSID))
    }

    /// Set Features, Reservation Notification Mask.
    pub(super) fn set_notification_mask(
        &mut self,
        nsid: u32,
        value: u32,
    ) -> Result<(), CommandError> {
        const ALL: u8 = 0b1110;
        let [mask, ..] = value.to_le_bytes();
        for nsid in self.namespaces_with_reservations(nsid, true)? {
            self.reservation_log.masks.insert(nsid, mask & ALL);
        }
        Ok(())
    }
}
