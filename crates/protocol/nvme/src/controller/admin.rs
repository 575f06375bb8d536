//! Executes admin and fabrics commands.

use block::BufsMut;

use super::error_log::{CommandError, field};
use super::properties::CcChange;
use super::{ABORT_LIMIT, Controller, Event};
use crate::entry::{AdminOpcode, Completion, FabricsType, Fuse, Sqe};
use crate::fabrics::Property;
use crate::status::Status;
use crate::stream::Tag;

/// What to do about a command that has arrived on the admin queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AdminAction {
    /// Complete it at once.
    Complete(Completion),
    /// It sends data: admit it, then pass the data to [`Controller::consume`].
    Receive {
        /// Length in bytes.
        bytes: u32,
    },
    /// It returns data: admit it without data, then have [`Controller::produce`] fill buffers.
    Produce {
        /// Length in bytes.
        bytes: u32,
    },
    /// Hold it until [`Event::Complete`]: admit it without data.
    Hold,
    /// Flush all namespaces of the controller and complete it with the result. Admit it without
    /// data.
    Flush,
    /// Set whether registrations of a namespace with reservations, or of all (NSID FFFFFFFFh),
    /// persist through a power loss; complete it with success once that is in effect. Admit it
    /// without data.
    SetPersistence {
        /// Namespace.
        nsid: u32,
        /// Whether they persist.
        persist: bool,
    },
    /// Complete it with 1 if registrations of the namespace persist through a power loss, else with
    /// 0. Admit it without data.
    GetPersistence {
        /// Namespace.
        nsid: u32,
    },
    /// Abort the command `cid` of queue `sqid` of this controller, then complete this one with
    /// [`Controller::abort_finished`].
    Abort {
        /// Queue.
        sqid: u16,
        /// Command identifier.
        cid: u16,
    },
}

impl Controller {
    /// A command has arrived on the admin queue.
    pub fn admin(&mut self, tag: Tag, sqe: &Sqe) -> AdminAction {
        self.keep_alive.record_traffic();
        let verdict = match sqe.fabrics() {
            Some(kind) => self.fabrics(kind, sqe).map(AdminAction::Complete),
            None => self.admin_command(tag, sqe),
        };
        verdict.unwrap_or_else(|fault| AdminAction::Complete(self.refuse(0, sqe, fault)))
    }

    /// Handles the data of a command that returned [`AdminAction::Receive`].
    pub fn consume(&mut self, sqe: &Sqe, data: &[u8]) -> Completion {
        let result = match AdminOpcode(sqe.opcode) {
            AdminOpcode::SetFeatures => self.set_features_data(sqe, data),
            _ => Err(CommandError::at(Status::INVALID_OPCODE, 0)),
        };
        result.unwrap_or_else(|fault| self.refuse(0, sqe, fault))
    }

    /// Fills `buffers`, as many bytes as [`AdminAction::Produce`] said. The data is valid only if
    /// the completion is a success.
    pub fn produce(&mut self, sqe: &Sqe, buffers: &mut BufsMut) -> Completion {
        let result = match AdminOpcode(sqe.opcode) {
            AdminOpcode::Identify => self.produce_identify(sqe, buffers),
            AdminOpcode::GetLogPage => self.produce_log(sqe, buffers),
            AdminOpcode::GetFeatures => self.produce_features(sqe, buffers),
            _ => Err(CommandError::at(Status::INVALID_OPCODE, 0)),
        };
        result.unwrap_or_else(|fault| self.refuse(0, sqe, fault))
    }

    fn admin_command(&mut self, tag: Tag, sqe: &Sqe) -> Result<AdminAction, CommandError> {
        if !self.properties.is_enabled() {
            return Err(CommandError::at(Status::COMMAND_SEQUENCE, 0));
        }
        if sqe.fuse() != Fuse::None {
            return Err(CommandError::field(field::FLAGS));
        }
        match AdminOpcode(sqe.opcode) {
            AdminOpcode::Identify => self.identify(sqe),
            AdminOpcode::GetLogPage => self.get_log(sqe),
            AdminOpcode::SetFeatures => self.set_features(sqe),
            AdminOpcode::GetFeatures => self.get_features(sqe),
            AdminOpcode::AsyncEventRequest => match self.events.hold(tag, sqe) {
                Ok(()) => Ok(AdminAction::Hold),
                Err(status) => Err(CommandError::new(status)),
            },
            AdminOpcode::KeepAlive => Ok(AdminAction::Complete(Completion::OK)),
            AdminOpcode::Abort => self.abort(sqe),
            _ => Err(CommandError::at(Status::INVALID_OPCODE, 0)),
        }
    }

    fn fabrics(&mut self, kind: FabricsType, sqe: &Sqe) -> Result<Completion, CommandError> {
        let property = Property::parse(sqe).ok_or(CommandError::field(field::CDW10));
        match kind {
            FabricsType::PropertyGet => self.properties.get(property?).map(Completion::ok),
            FabricsType::PropertySet => {
                match self.properties.set(property?)? {
                    CcChange::None => {}
                    CcChange::ShutDown => self.pending_events.push_back(Event::ShutDown),
                    CcChange::Reset => self.reset(),
                }
                Ok(Completion::OK)
            }
            FabricsType::Disconnect => {
                Err(CommandError::at(Status::INVALID_QUEUE_TYPE, field::NSID))
            }
            _ => Err(CommandError::at(Status::INVALID_OPCODE, field::NSID)),
        }
    }

    /// CC.EN was cleared (NVMe Base 2.0, 3.7.2): drops held commands without a completion, removes
    /// the I/O queues and resets the features.
    fn reset(&mut self) {
        self.pending_events.push_back(Event::Reset);
        while let Some(tag) = self.events.take_any() {
            self.pending_events.push_back(Event::Discard { tag });
        }
        self.events.reset();
        self.features = super::Features::default();
        self.reservation_log = super::ReservationLog::default();
        self.queues = 1;
    }

    fn abort(&mut self, sqe: &Sqe) -> Result<AdminAction, CommandError> {
        let [a, b, c, d] = sqe.cdw(0).to_le_bytes();
        let (sqid, cid) = (u16::from_le_bytes([a, b]), u16::from_le_bytes([c, d]));
        if sqid > self.limits.io_queues || self.queues & 1 << sqid == 0 {
            return Err(CommandError::field(field::CDW10));
        }
        if sqid == 0 {
            // Only held admin commands can be aborted; the others end soon.
            let held = self.events.take(cid);
            if let Some(tag) = held {
                let completion = Completion::failed(Status::ABORT_REQUESTED);
                self.pending_events.push_back(Event::Complete { tag, completion });
            }
            return Ok(AdminAction::Complete(Completion::ok(u64::from(held.is_none()))));
        }
        if self.outstanding_aborts >= ABORT_LIMIT {
            return Err(CommandError::new(Status::ABORT_LIMIT));
        }
        self.outstanding_aborts += 1;
        Ok(AdminAction::Abort { sqid, cid })
    }

    /// Refuses a command whose buffer length differs from its data (SGLS bit 18 is 0).
    pub(super) fn check_exact_length(sqe: &Sqe, bytes: u32) -> Result<(), CommandError> {
        if sqe.data_bytes() == bytes {
            return Ok(());
        }
        Err(CommandError::at(Status::DATA_SGL_LENGTH_INVALID, field::SGL_LENGTH))
    }
}
