//! Admin and fabrics commands: who answers what.

use block::BufsMut;

use super::errors::{Fault, field};
use super::properties::Change;
use super::{ABORT_LIMIT, Controller, Event};
use crate::entry::{AdminOpcode, Completion, FabricsType, Fuse, Sqe};
use crate::fabrics::Property;
use crate::status::Status;
use crate::stream::Tag;

/// What is to be done about a command that has arrived on the admin queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It ends so, at once.
    Complete(Completion),
    /// It brings data: admit it, then pass the data to [`Controller::consume`].
    Receive {
        /// How many bytes.
        bytes: u32,
    },
    /// It returns data: admit it without data, then have [`Controller::produce`] fill buffers.
    Produce {
        /// How many bytes.
        bytes: u32,
    },
    /// It stays until [`Event::Complete`] ends it: admit it without data.
    Hold,
    /// Flush all namespaces of the controller; it ends as that does. Admit it without data.
    Flush,
    /// Have registrations of a namespace that keeps them, or of all (NSID FFFFFFFFh), outlive a
    /// loss of power or not; ends with success once that is in force. Admit it without data.
    Persist {
        /// Namespace.
        nsid: u32,
        /// Whether they do.
        persists: bool,
    },
    /// Ends with 1 if registrations of a namespace outlive a loss of power, else with 0. Admit it
    /// without data.
    TellPersistence {
        /// Namespace.
        nsid: u32,
    },
    /// Abort the command that queue `sqid` of this controller knows as `cid`, then end this one
    /// with [`Controller::abort_finished`].
    Abort {
        /// Queue.
        sqid: u16,
        /// Command identifier.
        cid: u16,
    },
}

impl Controller {
    /// A command has arrived on the admin queue.
    pub fn admin(&mut self, tag: Tag, sqe: &Sqe) -> Verdict {
        self.alive.touch();
        let verdict = match sqe.fabrics() {
            Some(kind) => self.fabrics(kind, sqe).map(Verdict::Complete),
            None => self.admin_command(tag, sqe),
        };
        verdict.unwrap_or_else(|fault| Verdict::Complete(self.refuse(0, sqe, fault)))
    }

    /// The data of a command whose verdict was [`Verdict::Receive`].
    pub fn consume(&mut self, sqe: &Sqe, data: &[u8]) -> Completion {
        let result = match AdminOpcode(sqe.opcode) {
            AdminOpcode::SetFeatures => self.set_features_data(sqe, data),
            _ => Err(Fault::at(Status::INVALID_OPCODE, 0)),
        };
        result.unwrap_or_else(|fault| self.refuse(0, sqe, fault))
    }

    /// Fills `buffers`, as many bytes as [`Verdict::Produce`] said. The data counts only if the
    /// completion is a success.
    pub fn produce(&mut self, sqe: &Sqe, buffers: &mut BufsMut) -> Completion {
        let result = match AdminOpcode(sqe.opcode) {
            AdminOpcode::Identify => self.produce_identify(sqe, buffers),
            AdminOpcode::GetLogPage => self.produce_log(sqe, buffers),
            AdminOpcode::GetFeatures => self.produce_features(sqe, buffers),
            _ => Err(Fault::at(Status::INVALID_OPCODE, 0)),
        };
        result.unwrap_or_else(|fault| self.refuse(0, sqe, fault))
    }

    fn admin_command(&mut self, tag: Tag, sqe: &Sqe) -> Result<Verdict, Fault> {
        if !self.properties.is_enabled() {
            return Err(Fault::at(Status::COMMAND_SEQUENCE, 0));
        }
        if sqe.fuse() != Fuse::None {
            return Err(Fault::field(field::FLAGS));
        }
        match AdminOpcode(sqe.opcode) {
            AdminOpcode::Identify => self.identify(sqe),
            AdminOpcode::GetLogPage => self.get_log(sqe),
            AdminOpcode::SetFeatures => self.set_features(sqe),
            AdminOpcode::GetFeatures => self.get_features(sqe),
            AdminOpcode::AsyncEventRequest => match self.events.hold(tag, sqe) {
                Ok(()) => Ok(Verdict::Hold),
                Err(status) => Err(Fault::new(status)),
            },
            AdminOpcode::KeepAlive => Ok(Verdict::Complete(Completion::OK)),
            AdminOpcode::Abort => self.abort(sqe),
            _ => Err(Fault::at(Status::INVALID_OPCODE, 0)),
        }
    }

    fn fabrics(&mut self, kind: FabricsType, sqe: &Sqe) -> Result<Completion, Fault> {
        let property = Property::parse(sqe).ok_or(Fault::field(field::CDW10));
        match kind {
            FabricsType::PropertyGet => self.properties.get(property?).map(Completion::ok),
            FabricsType::PropertySet => {
                match self.properties.set(property?)? {
                    Change::None => {}
                    Change::ShutDown => self.pending.push_back(Event::ShutDown),
                    Change::Reset => self.reset(),
                }
                Ok(Completion::OK)
            }
            FabricsType::Disconnect => Err(Fault::at(Status::INVALID_QUEUE_TYPE, field::NSID)),
            _ => Err(Fault::at(Status::INVALID_OPCODE, field::NSID)),
        }
    }

    /// CC.EN was cleared (NVMe Base 2.0, 3.7.2): what is held is gone without a completion, the
    /// I/O queues are gone, and features are what they were at first.
    fn reset(&mut self) {
        self.pending.push_back(Event::Reset);
        while let Some(tag) = self.events.take_any() {
            self.pending.push_back(Event::Forget { tag });
        }
        self.events.reset();
        self.features = super::Features::default();
        self.told = super::Told::default();
        self.queues = 1;
    }

    fn abort(&mut self, sqe: &Sqe) -> Result<Verdict, Fault> {
        let [a, b, c, d] = sqe.cdw(0).to_le_bytes();
        let (sqid, cid) = (u16::from_le_bytes([a, b]), u16::from_le_bytes([c, d]));
        if sqid > self.limits.io_queues || self.queues & 1 << sqid == 0 {
            return Err(Fault::field(field::CDW10));
        }
        if sqid == 0 {
            // Of admin commands only those that are held can be aborted; the others end soon.
            let held = self.events.take(cid);
            if let Some(tag) = held {
                let completion = Completion::failed(Status::ABORT_REQUESTED);
                self.pending.push_back(Event::Complete { tag, completion });
            }
            return Ok(Verdict::Complete(Completion::ok(u64::from(held.is_none()))));
        }
        if self.aborts >= ABORT_LIMIT {
            return Err(Fault::new(Status::ABORT_LIMIT));
        }
        self.aborts += 1;
        Ok(Verdict::Abort { sqid, cid })
    }

    /// Refuses a command whose buffer is not as long as what it asks for (SGLS bit 18 is 0).
    pub(super) fn exact_length(sqe: &Sqe, bytes: u32) -> Result<(), Fault> {
        if sqe.data_bytes() == bytes {
            return Ok(());
        }
        Err(Fault::at(Status::DATA_SGL_LENGTH_INVALID, field::SGL_LENGTH))
    }
}
