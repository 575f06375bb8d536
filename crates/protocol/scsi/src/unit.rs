//! The logical unit: the state that all its initiators share, and the life of a command.
//!
//! A command passes through [`LogicalUnit::admit`] when it arrives, [`LogicalUnit::start`] when
//! its data has, and [`LogicalUnit::finish`] each time the volume has done what a [`Step::Run`]
//! asked for. Each may end it. Nothing here waits, reads a clock or touches the volume.

use std::rc::Rc;

use block::{Blocks, Bufs, Failure, Info, Lba, Request, Run};
use reservation::{Change, Rights, Table};

use crate::cdb::Cdb;
use crate::copy::{CopyPlan, Operation, TokenPlan};
use crate::limits::Limits;
use crate::lun::Lun;
use crate::mode::Modes;
use crate::nexus::{Attention, Nexus, NexusId, Nexuses, TooMany, Whom};
use crate::opcodes::{self, Access, Entry, Traits};
use crate::persistent::{self, Order, Question};
use crate::ports::Groups;
use crate::reply::{Data, Refusal, Reply, Status, Transfer};
use crate::sense::{Code, Format, Key, Sense};
use crate::space::Space;
use crate::{capacity, diagnose, failure, format, mode, provisioning, verify};

/// What a unit is, for as long as it lives.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LunConfig {
    /// Identity of the volume; the same on every node that serves it.
    pub uuid: [u8; 16],
    /// PRODUCT IDENTIFICATION: at most 16 printable ASCII characters.
    pub product: String,
    /// PRODUCT REVISION LEVEL: at most 4 printable ASCII characters.
    pub revision: String,
    /// PRODUCT SERIAL NUMBER: at most 64 printable ASCII characters.
    pub serial: String,
    /// Whether writes are refused whatever the device says.
    pub read_only: bool,
    /// Whether there may be fewer blocks of space than blocks of address.
    pub thin: bool,
    /// Whether seeking costs nothing.
    pub solid_state: bool,
    /// Most blocks that one command may move; a smaller limit of the device prevails.
    pub max_transfer_blocks: u32,
    /// Whether persistent reservations are kept, by all nodes that serve it.
    pub keeps_reservations: bool,
}

/// A command that came in.
#[derive(Clone, Copy, Debug)]
pub struct Arrival<'a> {
    /// The command descriptor block; padding behind it does no harm.
    pub cdb: &'a [u8],
    /// The most that the transport will move either way for this command. iSCSI: the expected
    /// data transfer length, for the direction that its R and W bits name (RFC 7143 11.3.4).
    pub window: Transfer,
    /// The units that this initiator sees at this target, in ascending order.
    pub luns: &'a [Lun],
    /// What all nodes know of the unit, as far as this initiator is concerned.
    pub known: Known,
}

/// What all nodes that serve a unit know of it alike (crate `reservation`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Known {
    /// What the initiator may do, by the reservations.
    pub rights: Rights,
    /// What of the mode pages is not as it was at first (`Table::modes`).
    pub modes: u128,
}

impl Known {
    /// Of a unit that nobody has reserved or changed.
    pub const NOTHING: Self = Self { rights: Rights::ALL, modes: 0 };
}

/// What to do with a command that came in.
#[derive(Debug)]
pub enum Admission {
    /// It is over.
    Reply(Reply),
    /// Get its data, then [`LogicalUnit::start`] it.
    Accept(Command),
}

/// What to do with a command that has its data.
#[derive(Debug)]
pub enum Step {
    /// It is over.
    Reply(Reply),
    /// Have the volume do this, then [`LogicalUnit::finish`] it with what became of it.
    Run(Request, Running),
    /// Change what all nodes know on behalf of the initiator, then [`LogicalUnit::finish`] it, without data, with
    /// what became of it, or [`LogicalUnit::refused`].
    Alter(Change, Running),
    /// Look up what all nodes know, then [`LogicalUnit::consulted`], or [`LogicalUnit::finish`] it
    /// with why that failed.
    Consult(Running),
    /// Copy this between volumes, then [`LogicalUnit::finish_copy`] it with what became of it.
    Copy(CopyPlan, Running),
    /// Make a token or write what it stands for, then [`LogicalUnit::finish_token`] it with what became of it.
    Token(TokenPlan, Running),
}

/// An admitted command: checked, and waiting for its data if it has any.
#[derive(Debug)]
pub struct Command {
    pub(crate) todo: Todo,
    pub(crate) data_out: usize,
    pub(crate) data_in: usize,
    pub(crate) read_back: usize,
    pub(crate) wanted: Transfer,
    pub(crate) window_in: u64,
}

impl Command {
    /// Bytes to get from the initiator, never more than the window; exactly so many go to
    /// [`LogicalUnit::start`].
    #[must_use]
    pub fn data_out(&self) -> usize {
        self.data_out
    }

    /// What the command moves if the window is no limit ([`Reply::wanted`]).
    #[must_use]
    pub fn wanted(&self) -> Transfer {
        self.wanted
    }

    /// Most bytes that the volume reads for the initiator.
    #[must_use]
    pub fn data_in(&self) -> usize {
        self.data_in
    }

    /// Bytes that the volume has to read besides: what is compared or verified.
    #[must_use]
    pub fn read_back(&self) -> usize {
        self.read_back
    }
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum Todo {
    Read(Blocks),
    Write {
        at: Lba,
        fua: bool,
    },
    WriteAndVerify {
        at: Lba,
        compare: bool,
    },
    Verify(Blocks),
    /// Compare with the data, repeated as often as the range is long in multiples of it.
    Compare(Blocks),
    CompareAndWrite {
        at: Lba,
        fua: bool,
    },
    WriteSame {
        range: Blocks,
        unmap: bool,
    },
    Zero {
        range: Blocks,
        unmap: bool,
    },
    Unmap,
    ModeSelect {
        long_header: bool,
    },
    Flush,
    Stop,
    PersistentReserve(Order),
    ReserveUnit,
    ReleaseUnit,
    Ask {
        question: Question,
        allocation: u16,
    },
    OrWrite {
        at: Lba,
        fua: bool,
    },
    /// With or without a parameter list; if with one, whether its header is the long one.
    Format {
        list: Option<bool>,
    },
    SelfTest,
    Diagnostic,
    /// Tell what has space.
    Map {
        range: Blocks,
        most: u16,
        allocation: u32,
    },
    /// With a parameter list of the long format, or of the short one.
    Copy {
        long: bool,
    },
    /// Make a token for what a parameter list names, under this list identifier.
    PopulateToken {
        id: u32,
    },
    /// Write what a token stands for.
    WriteUsingToken {
        id: u32,
    },
}

/// What a command that has its data comes to.
pub(crate) enum Prepared {
    Run(Request, After),
    Alter(Change, After),
    Consult(After),
    Copy(CopyPlan, After),
    Token(TokenPlan, After),
    /// There is nothing left to do.
    Done,
}

/// A command that the volume works on.
#[derive(Debug)]
pub struct Running {
    pub(crate) after: After,
    pub(crate) wanted: Transfer,
    pub(crate) window_in: u64,
}

#[derive(Debug)]
pub(crate) enum After {
    Status,
    Data,
    Verify(Request),
    Stopped,
    Modes(Modes),
    Answer { question: Question, allocation: u16 },
    Tested,
    Mapped { range: Blocks, allocation: u32 },
    Copied(Rc<Operation>),
    Token(Rc<Operation>),
}

/// [`Arrival`], taken apart.
pub(crate) struct Incoming<'a> {
    pub(crate) cdb: Cdb,
    pub(crate) nexus: NexusId,
    pub(crate) window: Transfer,
    pub(crate) luns: &'a [Lun],
    pub(crate) rights: Rights,
}

/// What a command's own code makes of it.
pub(crate) enum Outcome {
    /// Good, with so much data; `wanted` as in [`Reply::wanted`].
    Done {
        data: Data,
        wanted: Transfer,
    },
    Accept(Command),
}

impl Outcome {
    pub(crate) const GOOD: Self = Self::Done { data: Data::None, wanted: Transfer::NONE };

    /// `data`, cut to the allocation length (SPC-4 4.2.5.6).
    pub(crate) fn data(mut data: Vec<u8>, allocation: u64) -> Self {
        data.truncate(usize::try_from(allocation).unwrap_or(usize::MAX));
        let wanted = Transfer::to_initiator(data.len() as u64);
        Self::Done { data: Data::Bytes(data), wanted }
    }
}

/// One volume as its initiators see it.
#[derive(Debug)]
pub struct LogicalUnit {
    pub(crate) config: LunConfig,
    pub(crate) info: Info,
    pub(crate) limits: Limits,
    pub(crate) modes: Modes,
    pub(crate) nexuses: Nexuses,
    pub(crate) stopped: bool,
    /// Target port groups, if several nodes serve the unit.
    pub(crate) groups: Option<Groups>,
    /// What space it takes and has, if somebody measures that.
    pub(crate) space: Option<Space>,
}

impl LogicalUnit {
    /// A unit that is ready, has its default mode pages and no initiator.
    #[must_use]
    pub fn new(config: LunConfig, info: Info) -> Self {
        let limits = Limits::new(&config, &info);
        Self {
            config,
            info,
            limits,
            modes: Modes::default(&info),
            nexuses: Nexuses::default(),
            stopped: false,
            groups: None,
            space: None,
        }
    }

    /// The device is `info` now. A new capacity is told to every initiator.
    pub fn set_info(&mut self, info: Info) {
        if info.blocks != self.info.blocks {
            self.nexuses.raise(Whom::All, Attention::CapacityChanged);
        }
        self.limits = Limits::new(&self.config, &info);
        self.info = info;
    }

    /// An initiator came. Its first command is told so (SAM-5 6.3.1).
    ///
    /// # Errors
    /// [`TooMany`] when there are [`crate::MAX_NEXUSES`].
    pub fn add_nexus(&mut self, nexus: Nexus) -> Result<NexusId, TooMany> {
        self.nexuses.add(nexus)
    }

    /// An initiator left or was lost (SAM-5 6.3.4).
    pub fn remove_nexus(&mut self, id: NexusId) {
        self.nexuses.remove(id);
    }

    /// Initiators at present.
    #[must_use]
    pub fn nexuses(&self) -> usize {
        self.nexuses.len()
    }

    /// The unit was reset, with what all nodes know of it: it runs (SAM-5 6.3.2, 6.3.3). Commands in flight are
    /// the transport's to abort, and it has everybody told.
    pub fn reset(&mut self) {
        self.rearm();
        self.stopped = false;
        self.nexuses.reset_copies();
    }

    /// Has `whom` told `what` with their next command.
    pub fn attend(&mut self, whom: Whom, what: Attention) {
        self.nexuses.raise(whom, what);
    }

    /// Whether commands that one initiator aborts for another end with TASK ABORTED (TAS, SPC-4
    /// 7.5.8). If not, they end without a word and the other is told
    /// [`Attention::CommandsCleared`].
    #[must_use]
    pub fn task_aborted_status(&self) -> bool {
        self.modes.tas
    }

    /// The format of sense data that initiators want (D_SENSE, SPC-4 7.5.8).
    #[must_use]
    pub fn sense_format(&self) -> Format {
        if self.modes.d_sense { Format::Descriptor } else { Format::Fixed }
    }

    /// Decides about a command that came in.
    pub fn admit(&mut self, nexus: NexusId, arrival: &Arrival<'_>) -> Admission {
        self.set_modes(arrival.known.modes);
        let cmd = Incoming {
            cdb: Cdb::new(arrival.cdb),
            nexus,
            window: arrival.window,
            luns: arrival.luns,
            rights: arrival.known.rights,
        };
        match self.consider(&cmd) {
            Ok(Outcome::Accept(command)) => Admission::Accept(command),
            Ok(Outcome::Done { data, wanted }) => {
                Admission::Reply(Reply::good(data, wanted, cmd.window.data_in))
            }
            Err(refusal) => Admission::Reply(refusal.into_reply(self.sense_format())),
        }
    }

    fn consider(&mut self, cmd: &Incoming<'_>) -> Result<Outcome, Refusal> {
        if self.nexuses.get(cmd.nexus).is_none() {
            // The nexus went while its command was on the way: aborted with it (SAM-5 6.3.4).
            return Err(Status::TaskAborted.into());
        }
        let traits = self.traits();
        let entry = opcodes::of(cmd.cdb).and_then(|e| e.supported(traits));
        check_reservation(cmd, entry)?;
        if !entry.is_ok_and(|e| !e.tells_attention)
            && let Some(attention) = self.nexuses.take_attention(cmd.nexus)
        {
            return Err(attention.sense().into());
        }
        let entry = entry?;
        entry.check(cmd.cdb, traits)?;
        if entry.needs_path() && self.is_unavailable() {
            return Err(failure::UNAVAILABLE.into());
        }
        if entry.on_medium && self.stopped {
            return Err(NOT_STARTED.into());
        }
        (entry.run)(self, cmd)
    }

    pub(crate) fn can_unmap(&self) -> bool {
        self.info.unmap_granularity_blocks > 0
    }

    pub(crate) fn traits(&self) -> Traits {
        Traits {
            can_unmap: self.can_unmap(),
            has_groups: self.groups.is_some(),
            keeps_reservations: self.config.keeps_reservations,
            writes_atomically: self.limits.atomic > 0,
        }
    }

    pub(crate) fn is_read_only(&self) -> bool {
        self.config.read_only || self.info.read_only
    }

    /// Starts an admitted command with its data, [`Command::data_out`] bytes.
    #[expect(clippy::needless_pass_by_value, reason = "an admitted command starts once")]
    pub fn start(&mut self, nexus: NexusId, command: Command, data: Bufs) -> Step {
        let Command { todo, data_out, wanted, window_in, .. } = command;
        let prepared = if data.len() == data_out {
            self.prepare(nexus, todo, data)
        } else {
            Err(Sense::new(Key::AbortedCommand, Code::DATA_PHASE_ERROR).into())
        };
        let running = |after| Running { after, wanted, window_in };
        match prepared {
            Ok(Prepared::Run(request, after)) => Step::Run(request, running(after)),
            Ok(Prepared::Alter(change, after)) => Step::Alter(change, running(after)),
            Ok(Prepared::Consult(after)) => Step::Consult(running(after)),
            Ok(Prepared::Token(plan, after)) => Step::Token(plan, running(after)),
            Ok(Prepared::Copy(plan, after)) => Step::Copy(plan, running(after)),
            Ok(Prepared::Done) => Step::Reply(Reply::good(Data::None, wanted, window_in)),
            Err(refusal) => self.ends(wanted, refusal),
        }
    }

    /// A command that has started ends so.
    fn ends(&self, wanted: Transfer, refusal: Refusal) -> Step {
        let refusal = Refusal { wanted, ..refusal };
        Step::Reply(refusal.into_reply(self.sense_format()))
    }

    /// Whether the write cache is on, as MODE SELECT left it (WCE, SBC-3 6.4.5).
    #[must_use]
    pub fn write_cache(&self) -> bool {
        self.modes.wce
    }

    pub(crate) fn set_modes(&mut self, bits: u128) {
        let modes = Modes::from_bits(bits, &self.info);
        if modes != self.modes {
            self.modes = modes;
            self.rearm();
        }
    }

    /// Whether every write has to be durable when it completes (WCE).
    pub(crate) fn writes_through(&self) -> bool {
        self.info.volatile_cache && !self.modes.wce
    }

    /// What a command comes to.
    fn prepare(&mut self, nexus: NexusId, todo: Todo, data: Bufs) -> Result<Prepared, Refusal> {
        let (request, after) = match todo {
            Todo::ModeSelect { long_header } => return Ok(self.select_modes(&data, long_header)?),
            Todo::PersistentReserve(order) => {
                let change = persistent::change(order, &data.to_vec(), &self.ports(nexus))?;
                return Ok(Prepared::Alter(change, After::Status));
            }
            Todo::ReserveUnit => return Ok(Prepared::Alter(Change::ReserveUnit, After::Status)),
            Todo::ReleaseUnit => return Ok(Prepared::Alter(Change::ReleaseUnit, After::Status)),
            Todo::Ask { question, allocation } => {
                return Ok(Prepared::Consult(After::Answer { question, allocation }));
            }
            Todo::Unmap => {
                let ranges = provisioning::ranges(&data, &self.limits, self.info.blocks)?;
                if ranges.is_empty() {
                    return Ok(Prepared::Done);
                }
                (Request::Unmap { ranges }, After::Status)
            }
            Todo::Read(range) => (Request::Read { range }, After::Data),
            Todo::Verify(range) => (Request::Verify { range }, After::Status),
            Todo::Map { range, most, allocation } => {
                (Request::Map { range, most }, After::Mapped { range, allocation })
            }
            Todo::Flush => (Request::Flush, After::Status),
            Todo::Stop => (Request::Flush, After::Stopped),
            Todo::Format { list } => {
                if let Some(long_header) = list {
                    format::check(&data.to_vec(), long_header, self.info.block_size)?;
                }
                let through = self.writes_through();
                let Some(request) = format::request(self, through) else {
                    return Ok(Prepared::Done);
                };
                (request, After::Status)
            }
            Todo::SelfTest => (diagnose::self_test(), After::Tested),
            Todo::PopulateToken { id } => return self.plan_populate(nexus, id, &data),
            Todo::WriteUsingToken { id } => return self.plan_write(nexus, id, &data),
            Todo::Copy { long } => return self.plan_copy(nexus, long, &data),
            Todo::Diagnostic => {
                diagnose::check(&data.to_vec())?;
                return Ok(Prepared::Done);
            }
            writing => self.prepare_data(writing, data),
        };
        Ok(Prepared::Run(request, after))
    }

    /// The same for what compares or writes blocks.
    fn prepare_data(&self, todo: Todo, data: Bufs) -> (Request, After) {
        let through = self.writes_through();
        let request = match todo {
            Todo::Write { at, fua } => Request::Write { at, data, fua: fua || through },
            Todo::WriteAndVerify { at, compare } => {
                let verify = verify::written(at, &data, compare, self.info.block_size);
                return (Request::Write { at, data, fua: true }, After::Verify(verify));
            }
            Todo::Compare(range) => {
                let data = verify::repeated(data, range, self.info.block_size);
                Request::Compare { at: range.at, data }
            }
            Todo::CompareAndWrite { at, fua } => {
                verify::compare_then_write(at, &data, fua || through)
            }
            Todo::OrWrite { at, fua } => Request::OrWrite { at, data, fua: fua || through },
            Todo::WriteSame { range, unmap } => provisioning::fill(range, data, unmap, through),
            Todo::Zero { range, unmap } => Request::Zero { range, unmap, fua: through },
            _ => Request::Flush,
        };
        (request, After::Status)
    }

    /// MODE SELECT. Who turns the write cache off will not flush: what was written before must not need it.
    /// So it is flushed also where it is off already: the flush for that may be on its way or have
    /// failed.
    fn select_modes(&self, list: &Bufs, long_header: bool) -> Result<Prepared, Sense> {
        let modes = mode::wanted(self, &list.to_vec(), long_header)?;
        if modes != self.modes {
            return Ok(Prepared::Alter(Change::Modes(modes.bits(&self.info)), After::Modes(modes)));
        }
        Ok(match modes.wce {
            true => Prepared::Done,
            false => Prepared::Run(Request::Flush, After::Status),
        })
    }

    /// The relative target port identifiers of the target that an initiator came to.
    fn ports(&self, nexus: NexusId) -> Vec<u16> {
        match &self.groups {
            Some(groups) => groups.ports().collect(),
            None => {
                self.nexuses.get(nexus).map(|n| n.target_port.relative_id).into_iter().collect()
            }
        }
    }

    /// A change was refused that a [`Step::Alter`] asked for.
    #[expect(clippy::needless_pass_by_value, reason = "a command ends once")]
    pub fn refused(&mut self, running: Running, why: reservation::Refusal) -> Step {
        self.ends(running.wanted, persistent::refused(why))
    }

    /// What all nodes know is this, which a [`Step::Consult`] asked for.
    #[expect(clippy::needless_pass_by_value, reason = "a command ends once")]
    pub fn consulted(&mut self, running: Running, table: &Table) -> Step {
        let After::Answer { question, allocation } = running.after else {
            return self.ends(running.wanted, Status::Busy.into());
        };
        let mut data = persistent::answer(question, table);
        data.truncate(usize::from(allocation));
        let wanted = Transfer::to_initiator(data.len() as u64);
        Step::Reply(Reply::good(Data::Bytes(data), wanted, running.window_in))
    }

    /// The volume has done what a [`Step::Run`] asked for, with this result.
    pub fn finish(&mut self, running: Running, result: Result<Bufs, Failure>) -> Step {
        let Running { after, wanted, window_in } = running;
        let data = match result {
            Ok(data) => data,
            Err(failure) => {
                let fault =
                    if matches!(after, After::Tested) { diagnose::found(failure) } else { None };
                if let Some(sense) = fault {
                    return Step::Reply(Reply::check(&sense, self.sense_format()));
                }
                let refusal = failure::refusal(failure, self.modes.tas, self.access());
                return self.ends(wanted, refusal);
            }
        };
        let data = match after {
            After::Data => Data::Bufs(data),
            After::Mapped { range, allocation } => {
                let mut told = capacity::statuses(range, &Run::all_of(&data));
                told.truncate(usize::try_from(allocation).unwrap_or(usize::MAX));
                let wanted = Transfer::to_initiator(told.len() as u64);
                return Step::Reply(Reply::good(Data::Bytes(told), wanted, window_in));
            }
            After::Status
            | After::Tested
            | After::Answer { .. }
            | After::Copied(_)
            | After::Token(_) => Data::None,
            After::Stopped => {
                self.stopped = true;
                Data::None
            }
            After::Modes(modes) => {
                self.modes = modes;
                self.rearm();
                if !modes.wce {
                    let after = After::Status;
                    return Step::Run(Request::Flush, Running { after, wanted, window_in });
                }
                Data::None
            }
            After::Verify(request) => {
                return Step::Run(request, Running { after: After::Status, wanted, window_in });
            }
        };
        Step::Reply(Reply::good(data, wanted, window_in))
    }
}

/// RESERVATION CONFLICT goes before every CHECK CONDITION (SAM-5 5.3.3). The volume judges once more, what reads or
/// writes, when it begins.
fn check_reservation(cmd: &Incoming<'_>, entry: Result<&Entry, Sense>) -> Result<(), Refusal> {
    let rights = cmd.rights;
    let access = entry.map_or(Access::Alone, |entry| entry.access_of(cmd.cdb));
    let conflicts = match access {
        Access::Free => false,
        Access::Alone => !rights.sole,
        Access::Reads => !rights.sole || !rights.reads,
        Access::Writes => !rights.sole || !rights.writes,
    };
    if conflicts { Err(Status::ReservationConflict.into()) } else { Ok(()) }
}

/// What a unit says that START STOP UNIT has stopped (SBC-3 5.25).
pub(crate) const NOT_STARTED: Sense =
    Sense::new(Key::NotReady, Code::INITIALIZING_COMMAND_REQUIRED);
