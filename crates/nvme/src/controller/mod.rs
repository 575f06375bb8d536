//! A controller: what the admin queue and the I/O queues of one association share.
//!
//! Pure: commands and data in, completions and data out. The driver owns it, keeps its clock and
//! tells it what the subsystem holds ([`Subsystem`]).

mod connect;
mod features;
mod identify;
mod io;
mod logs;

use std::collections::BTreeMap;
use std::time::Duration;

use block::Info;

pub use connect::{Connect, ConnectRefusal, DISCOVERY_NQN};
pub use io::{Io, Plan};

use crate::Status;
use crate::connection::Tag;
use crate::entry::{AdminOpcode, Completion, FabricsType, Sqe};

/// Asynchronous event requests that may wait at once.
const EVENT_REQUESTS: usize = 4;

/// Most I/O queues of a controller.
pub const MAX_IO_QUEUES: u16 = 64;

/// Log 2 of the largest transfer in units of 4 KiB (MDTS): 1 MiB.
pub const MDTS: u8 = 8;

/// A namespace of the subsystem.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Namespace {
    /// Identity of the volume.
    pub uuid: [u8; 16],
    /// What the volume is now.
    pub info: Info,
    /// Whether space is allocated as it is written.
    pub thin: bool,
}

/// Where a host can reach a subsystem.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Portal {
    /// The subsystem.
    pub nqn: String,
    /// Address and port.
    pub address: std::net::SocketAddr,
}

/// The subsystem as one host sees it.
#[derive(Clone, Debug, Default)]
pub struct Subsystem {
    /// Its qualified name.
    pub nqn: String,
    /// Serial number: at most 20 printable ASCII characters.
    pub serial: String,
    /// Namespaces by identifier; none in a discovery subsystem.
    pub namespaces: BTreeMap<u32, Namespace>,
    /// What discovery reports; empty elsewhere.
    pub portals: Vec<Portal>,
    /// Changes with every change of `portals`.
    pub generation: u64,
}

/// How an admin command ends.
#[derive(Debug)]
pub enum Admin {
    /// At once, with data for the host.
    Done(Completion, Vec<u8>),
    /// When an event happens ([`Controller::next_event`]).
    Waits,
    /// Another command is to be aborted; then this one ends with result 0, or with 1 if there was
    /// nothing to abort.
    Abort {
        /// Queue of the other command.
        queue: u16,
        /// Its identifier.
        cid: u16,
    },
}

impl Admin {
    const OK: Self = Self::Done(Completion::OK, Vec::new());

    fn failed(status: Status) -> Self {
        Self::Done(Completion::failed(status), Vec::new())
    }
}

/// Events that a host can be told about (NVMe Base 2.0, 5.2.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// Namespaces came, went or changed.
    Namespaces,
    /// The discovery log has changed.
    Discovery,
}

impl Event {
    /// Bit in the asynchronous event configuration, and in OAES.
    fn bit(self) -> u32 {
        match self {
            Self::Namespaces => 1 << 8,
            Self::Discovery => 1 << 31,
        }
    }

    /// Dword 0 of the completion: notice, information, log page.
    fn result(self) -> u64 {
        match self {
            Self::Namespaces => 0x04_00_02,
            Self::Discovery => 0x70_f0_02,
        }
    }
}

/// One controller.
#[derive(Debug)]
pub struct Controller {
    /// Identifier, unique in the subsystem.
    pub id: u16,
    /// The host, as Connect named it.
    pub host: [u8; 16],
    /// The host's qualified name.
    pub host_nqn: String,
    /// What it is a controller of.
    pub subsystem: Subsystem,
    discovery: bool,
    configuration: u32,
    shut_down: bool,
    keep_alive: Duration,
    event_mask: u32,
    event_requests: Vec<Tag>,
    /// Events that happened and have not been told, as bits.
    events: u32,
    /// Events told and not cleared by reading their log: not told again.
    masked: u32,
    changed: Vec<u32>,
}

impl Controller {
    /// A controller made by an admin Connect.
    #[must_use]
    pub fn new(id: u16, connect: &Connect, subsystem: Subsystem) -> Self {
        Self {
            id,
            host: connect.host,
            host_nqn: connect.host_nqn.clone(),
            discovery: connect.is_discovery(),
            subsystem,
            configuration: 0,
            shut_down: false,
            keep_alive: connect.keep_alive,
            event_mask: 0,
            event_requests: Vec::new(),
            events: 0,
            masked: 0,
            changed: Vec::new(),
        }
    }

    /// Whether it is a discovery controller.
    #[must_use]
    pub fn is_discovery(&self) -> bool {
        self.discovery
    }

    /// After so long without a command the association ends; `None`: never.
    #[must_use]
    pub fn keep_alive(&self) -> Option<Duration> {
        // NVMe Base 2.0, 3.9: with traffic based keep alive off, any command counts here; a
        // little patience costs nothing.
        (!self.keep_alive.is_zero()).then(|| self.keep_alive * 2)
    }

    /// Whether the host has enabled it (CC.EN) and not shut it down.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        self.configuration & 1 != 0 && !self.shut_down
    }

    /// Data that an admin command brings.
    ///
    /// # Errors
    /// The status of a command that brings data and must not.
    pub fn admin_data_out(&self, sqe: &Sqe) -> Result<u32, Status> {
        use crate::entry::Direction;
        match (sqe.fabrics(), sqe.direction()) {
            (Some(FabricsType::Connect), _) => Ok(connect::CONNECT_DATA),
            (None, Direction::ToController) => match AdminOpcode(sqe.opcode) {
                AdminOpcode::SetFeatures => Ok(0),
                _ => Err(Status::INVALID_OPCODE),
            },
            _ => Ok(0),
        }
    }

    /// Carries out an admin command. `tag` is kept for a command that [`Admin::Waits`].
    pub fn admin(&mut self, tag: Tag, sqe: &Sqe) -> Admin {
        if let Some(kind) = sqe.fabrics() {
            return self.fabrics(kind, sqe);
        }
        if !self.is_ready() {
            return Admin::failed(Status::COMMAND_SEQUENCE.do_not_retry());
        }
        match AdminOpcode(sqe.opcode) {
            AdminOpcode::Identify => self.identify(sqe),
            AdminOpcode::GetLogPage => self.get_log_page(sqe),
            AdminOpcode::GetFeatures => self.get_features(sqe),
            AdminOpcode::SetFeatures => self.set_features(sqe),
            AdminOpcode::KeepAlive => Admin::OK,
            AdminOpcode::AsyncEventRequest => {
                if self.event_requests.len() >= EVENT_REQUESTS {
                    return Admin::failed(Status::EVENT_REQUEST_LIMIT.do_not_retry());
                }
                self.event_requests.push(tag);
                Admin::Waits
            }
            AdminOpcode::Abort => {
                let [a, b, c, d] = sqe.cdw(0).to_le_bytes();
                let (queue, cid) = (u16::from_le_bytes([a, b]), u16::from_le_bytes([c, d]));
                Admin::Abort { queue, cid }
            }
            _ => Admin::failed(Status::INVALID_OPCODE.do_not_retry()),
        }
    }

    fn fabrics(&mut self, kind: FabricsType, sqe: &Sqe) -> Admin {
        match kind {
            FabricsType::PropertyGet => self.property_get(sqe),
            FabricsType::PropertySet => self.property_set(sqe),
            // A second Connect on a connected queue (NVMe Base 2.0, 6.3).
            FabricsType::Connect => Admin::failed(Status::COMMAND_SEQUENCE.do_not_retry()),
            _ => Admin::failed(Status::INVALID_OPCODE.do_not_retry()),
        }
    }

    /// NVMe Base 2.0, 6.4.
    fn property_get(&self, sqe: &Sqe) -> Admin {
        let eight = sqe.cdw(0) & 0x7 == 1;
        let value = match (sqe.cdw(1), eight) {
            (property::CAP, true) => property::CAPABILITIES,
            (property::VS, false) => u64::from(property::VERSION),
            (property::CC, false) => u64::from(self.configuration),
            (property::CSTS, false) => u64::from(self.status_property()),
            _ => return Admin::failed(Status::INVALID_FIELD.do_not_retry()),
        };
        Admin::Done(Completion::ok(value), Vec::new())
    }

    fn status_property(&self) -> u32 {
        let ready = self.configuration & 1;
        let shutdown = if self.shut_down { 0b10 << 2 } else { 0 };
        ready | shutdown
    }

    /// NVMe Base 2.0, 6.5 and 3.1.3.5.
    fn property_set(&mut self, sqe: &Sqe) -> Admin {
        if sqe.cdw(1) != property::CC || sqe.cdw(0) & 0x7 != 0 {
            return Admin::failed(Status::INVALID_FIELD.do_not_retry());
        }
        let value = sqe.cdw(2);
        let was_enabled = self.configuration & 1 != 0;
        self.configuration = value;
        if value & 1 != 0 && !was_enabled {
            self.shut_down = false;
        }
        if value >> 14 & 0b11 != 0 {
            self.shut_down = true;
        }
        if was_enabled && value & 1 == 0 {
            // A reset: what was set is forgotten.
            self.shut_down = false;
            (self.event_mask, self.events, self.masked) = (0, 0, 0);
            self.changed.clear();
        }
        Admin::OK
    }

    /// The subsystem is this now; events say what that changed.
    pub fn update(&mut self, subsystem: Subsystem) {
        let (old, new) = (&self.subsystem.namespaces, &subsystem.namespaces);
        let mut ids: Vec<u32> = old.keys().chain(new.keys()).copied().collect();
        ids.sort_unstable();
        ids.dedup();
        let changed: Vec<u32> = ids.into_iter().filter(|id| old.get(id) != new.get(id)).collect();
        if !changed.is_empty() {
            self.changed.extend(changed);
            self.changed.sort_unstable();
            self.changed.dedup();
            self.raise(Event::Namespaces);
        }
        if self.subsystem.portals != subsystem.portals {
            self.raise(Event::Discovery);
        }
        self.subsystem = subsystem;
    }

    fn raise(&mut self, event: Event) {
        if self.event_mask & event.bit() != 0 && self.masked & event.bit() == 0 {
            self.events |= event.bit();
        }
    }

    /// An event request to be ended, if an event and a request are there.
    pub fn next_event(&mut self) -> Option<(Tag, Completion)> {
        let event = [Event::Namespaces, Event::Discovery]
            .into_iter()
            .find(|e| self.events & e.bit() != 0)?;
        let tag = self.event_requests.pop()?;
        self.events &= !event.bit();
        self.masked |= event.bit();
        Some((tag, Completion::ok(event.result())))
    }

    /// The command is an event request; it was aborted.
    pub fn forget_event_request(&mut self, tag: Tag) -> bool {
        let before = self.event_requests.len();
        self.event_requests.retain(|t| *t != tag);
        before != self.event_requests.len()
    }

    /// A log was read, which allows its event to be told again, unless the host retains it.
    fn event_read(&mut self, event: Event, retain: bool) {
        if !retain {
            self.masked &= !event.bit();
        }
    }
}

/// Controller properties (NVMe Base 2.0, 3.1.3).
mod property {
    pub(super) const CAP: u32 = 0x00;
    pub(super) const VS: u32 = 0x08;
    pub(super) const CC: u32 = 0x14;
    pub(super) const CSTS: u32 = 0x1c;

    /// NVMe 2.0.
    pub(super) const VERSION: u32 = 0x0002_0000;

    const MQES: u64 = crate::MAX_QUEUE_ENTRIES as u64 - 1;
    /// Queues are contiguous.
    const CQR: u64 = 1 << 16;
    /// Time to become ready: at most 7.5 s.
    const TO: u64 = 15 << 24;
    /// The NVM command set.
    const CSS: u64 = 1 << 37;
    pub(super) const CAPABILITIES: u64 = MQES | CQR | TO | CSS;
}
