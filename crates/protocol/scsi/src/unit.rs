//! The logical unit: the state that all its initiators share, and the life cycle of a command.
//!
//! A command passes through [`LogicalUnit::admit`] when it arrives, [`LogicalUnit::start`] when its
//! data has arrived, and [`LogicalUnit::finish`] each time the volume has executed the request of a
//! [`Step::Run`]. Each may end it. Nothing here waits, reads a clock or accesses the volume.

use std::rc::Rc;

use block::{BlockStatus, Blocks, Bufs, Info, Lba, Request, RequestError};
use reservation::{Change, Rights, Table};

use crate::alua::PortGroups;
use crate::cdb::Cdb;
use crate::copy::{CopyOperation, CopyPlan, TokenPlan};
use crate::limits::Limits;
use crate::lun::Lun;
use crate::mode::ModeParameters;
use crate::nexus::{AttentionScope, Nexus, NexusId, Nexuses, TooManyNexuses, UnitAttention};
use crate::opcodes::{self, CommandEntry, ConflictClass, UnitCapabilities};
use crate::persistent_reservations::{self, ReserveInAction, ReserveOutCommand};
use crate::reply::{DataIn, Refusal, Reply, Status, TransferLengths};
use crate::sense::{Sense, SenseCode, SenseFormat, SenseKey};
use crate::space::ThinSpace;
use crate::{capacity, diagnostics, failure, format, mode, provisioning, verify};

/// The fixed properties of a unit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnitConfig {
    /// Identity of the volume; the same on every node that serves it.
    pub uuid: [u8; 16],
    /// PRODUCT IDENTIFICATION: at most 16 printable ASCII characters.
    pub product: String,
    /// PRODUCT REVISION LEVEL: at most 4 printable ASCII characters.
    pub revision: String,
    /// PRODUCT SERIAL NUMBER: at most 64 printable ASCII characters.
    pub serial: String,
    /// Whether writes are refused even if the device accepts them.
    pub read_only: bool,
    /// Whether it is thinly provisioned.
    pub thin: bool,
    /// Whether it is non-rotational.
    pub solid_state: bool,
    /// Most blocks that one command may move; a smaller limit of the device prevails.
    pub max_transfer_blocks: u32,
    /// Whether it supports persistent reservations, shared by all nodes that serve it.
    pub keeps_reservations: bool,
}

/// A received command.
#[derive(Clone, Copy, Debug)]
pub struct ReceivedCommand<'a> {
    /// The command descriptor block; padding after it is harmless.
    pub cdb: &'a [u8],
    /// The most that the transport will move in each direction for this command. iSCSI: the
    /// expected data transfer length, for the direction of its R and W bits (RFC 7143 11.3.4).
    pub expected_transfer: TransferLengths,
    /// The units that this initiator sees at this target, in ascending order.
    pub luns: &'a [Lun],
    /// The shared state of the unit, for this initiator.
    pub shared: SharedUnitState,
}

/// State that all nodes share for a unit (crate `reservation`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SharedUnitState {
    /// The initiator's rights by the reservations.
    pub rights: Rights,
    /// Changed mode page parameters (`Table::mode_pages`).
    pub mode_pages: u128,
}

impl SharedUnitState {
    /// Of a unit without reservations and with default mode pages.
    pub const DEFAULT: Self = Self { rights: Rights::ALL, mode_pages: 0 };
}

/// The decision about a received command.
#[derive(Debug)]
pub enum Admission {
    /// It has ended.
    Reply(Reply),
    /// Get its data, then [`LogicalUnit::start`] it.
    Accept(AdmittedCommand),
}

/// The next step of a command that has its data.
#[derive(Debug)]
pub enum Step {
    /// It has ended.
    Reply(Reply),
    /// Have the volume execute this, then [`LogicalUnit::finish`] it with the result.
    Run(Request, RunningCommand),
    /// Change the shared state on behalf of the initiator, then [`LogicalUnit::finish`] it, without
    /// data, with the result, or [`LogicalUnit::finish_refused_change`].
    ChangeShared(Change, RunningCommand),
    /// Read the shared state, then [`LogicalUnit::finish_shared_read`], or [`LogicalUnit::finish`]
    /// it with the error.
    ReadShared(RunningCommand),
    /// Copy this between volumes, then [`LogicalUnit::finish_copy`] it with the result.
    Copy(CopyPlan, RunningCommand),
    /// Create a token or write its data, then [`LogicalUnit::finish_token`] it with the result.
    Token(TokenPlan, RunningCommand),
}

/// An admitted command: checked, and waiting for its data, if any.
#[derive(Debug)]
pub struct AdmittedCommand {
    pub(crate) op: AdmittedOp,
    pub(crate) data_out: usize,
    pub(crate) data_in: usize,
    pub(crate) read_back: usize,
    pub(crate) full_transfer: TransferLengths,
    pub(crate) expected_data_in: u64,
}

impl AdmittedCommand {
    /// Bytes to get from the initiator, never more than the expected transfer; exactly so many go
    /// to [`LogicalUnit::start`].
    #[must_use]
    pub fn data_out(&self) -> usize {
        self.data_out
    }

    /// How much the command would move without a limit ([`Reply::full_transfer`]).
    #[must_use]
    pub fn full_transfer(&self) -> TransferLengths {
        self.full_transfer
    }

    /// Most bytes that the volume reads for the initiator.
    #[must_use]
    pub fn data_in(&self) -> usize {
        self.data_in
    }

    /// Bytes that the volume reads in addition, for comparing or verifying.
    #[must_use]
    pub fn read_back(&self) -> usize {
        self.read_back
    }
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum AdmittedOp {
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
    /// Compare with the data, repeated to the length of the range.
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
    PersistentReserveOut(ReserveOutCommand),
    Spc2Reserve,
    Spc2Release,
    PersistentReserveIn {
        action: ReserveInAction,
        allocation: u16,
    },
    OrWrite {
        at: Lba,
        fua: bool,
    },
    /// Without or with a parameter list, and then whether its header is the long one.
    Format {
        list: Option<bool>,
    },
    SelfTest,
    SendDiagnostic,
    /// Report mapped blocks.
    GetLbaStatus {
        range: Blocks,
        max_descriptors: u16,
        allocation: u32,
    },
    /// With a parameter list of the long or the short format.
    Copy {
        long: bool,
    },
    /// Create a token for the ranges of a parameter list, with this list identifier.
    PopulateToken {
        id: u32,
    },
    /// Write the data of a token.
    WriteUsingToken {
        id: u32,
    },
}

/// The operation of a command that has its data.
pub(crate) enum PreparedStep {
    Run(Request, CompletionAction),
    ChangeShared(Change, CompletionAction),
    ReadShared(CompletionAction),
    Copy(CopyPlan, CompletionAction),
    Token(TokenPlan, CompletionAction),
    /// There is nothing left to do.
    Done,
}

/// A command that the volume is executing.
#[derive(Debug)]
pub struct RunningCommand {
    pub(crate) completion: CompletionAction,
    pub(crate) full_transfer: TransferLengths,
    pub(crate) expected_data_in: u64,
}

#[derive(Debug)]
pub(crate) enum CompletionAction {
    Status,
    Data,
    Verify(Request),
    StopUnit,
    SetModes(ModeParameters),
    ReserveInData { action: ReserveInAction, allocation: u16 },
    SelfTest,
    LbaStatus { range: Blocks, allocation: u32 },
    Copy(Rc<CopyOperation>),
    Token(Rc<CopyOperation>),
}

/// [`ReceivedCommand`], parsed.
pub(crate) struct ParsedCommand<'a> {
    pub(crate) cdb: Cdb,
    pub(crate) nexus: NexusId,
    pub(crate) expected_transfer: TransferLengths,
    pub(crate) luns: &'a [Lun],
    pub(crate) rights: Rights,
}

/// The result of a command's own handler.
pub(crate) enum Outcome {
    /// Good, with so much data; `full_transfer` as in [`Reply::full_transfer`].
    Done {
        data: DataIn,
        full_transfer: TransferLengths,
    },
    Accept(AdmittedCommand),
}

impl Outcome {
    pub(crate) const GOOD: Self =
        Self::Done { data: DataIn::None, full_transfer: TransferLengths::NONE };

    /// `data`, truncated to the allocation length (SPC-4 4.2.5.6).
    pub(crate) fn data(mut data: Vec<u8>, allocation: u64) -> Self {
        data.truncate(usize::try_from(allocation).unwrap_or(usize::MAX));
        let full_transfer = TransferLengths::to_initiator(data.len() as u64);
        Self::Done { data: DataIn::Bytes(data), full_transfer }
    }
}

/// One volume as its initiators see it.
#[derive(Debug)]
pub struct LogicalUnit {
    pub(crate) config: UnitConfig,
    pub(crate) info: Info,
    pub(crate) limits: Limits,
    pub(crate) modes: ModeParameters,
    pub(crate) nexuses: Nexuses,
    pub(crate) stopped: bool,
    /// Target port groups, if several nodes serve the unit.
    pub(crate) groups: Option<PortGroups>,
    /// Used and available space, if known.
    pub(crate) space: Option<ThinSpace>,
}

impl LogicalUnit {
    /// A unit that is ready, with default mode pages and no initiators.
    #[must_use]
    pub fn new(config: UnitConfig, info: Info) -> Self {
        let limits = Limits::new(&config, &info);
        Self {
            config,
            info,
            limits,
            modes: ModeParameters::default(&info),
            nexuses: Nexuses::default(),
            stopped: false,
            groups: None,
            space: None,
        }
    }

    /// Sets the device's properties. Every initiator gets a unit attention for a new capacity.
    pub fn set_info(&mut self, info: Info) {
        if info.blocks != self.info.blocks {
            self.nexuses.raise(AttentionScope::All, UnitAttention::CapacityChanged);
        }
        self.limits = Limits::new(&self.config, &info);
        self.info = info;
    }

    /// Adds an initiator. Its first command reports a unit attention (SAM-5 6.3.1).
    ///
    /// # Errors
    /// [`TooManyNexuses`] when there are [`crate::MAX_NEXUSES`].
    pub fn add_nexus(&mut self, nexus: Nexus) -> Result<NexusId, TooManyNexuses> {
        self.nexuses.add(nexus)
    }

    /// Removes an initiator that left or was lost (SAM-5 6.3.4).
    pub fn remove_nexus(&mut self, id: NexusId) {
        self.nexuses.remove(id);
    }

    /// Number of initiators.
    #[must_use]
    pub fn nexus_count(&self) -> usize {
        self.nexuses.len()
    }

    /// The unit and its shared state were reset: it is started (SAM-5 6.3.2, 6.3.3). The transport
    /// aborts commands in flight and raises the attentions.
    pub fn reset(&mut self) {
        self.rearm_thresholds();
        self.stopped = false;
        self.nexuses.reset_copies();
    }

    /// Raises a unit attention for the initiators in `scope`.
    pub fn establish_attention(&mut self, scope: AttentionScope, what: UnitAttention) {
        self.nexuses.raise(scope, what);
    }

    /// Whether commands that one initiator aborts for another end with TASK ABORTED (TAS, SPC-4
    /// 7.5.8). If not, they end without an answer and the other gets
    /// [`UnitAttention::CommandsCleared`].
    #[must_use]
    pub fn task_aborted_status(&self) -> bool {
        self.modes.tas
    }

    /// The format of sense data (D_SENSE, SPC-4 7.5.8).
    #[must_use]
    pub fn sense_format(&self) -> SenseFormat {
        if self.modes.d_sense { SenseFormat::Descriptor } else { SenseFormat::Fixed }
    }

    /// Decides about a received command.
    pub fn admit(&mut self, nexus: NexusId, arrival: &ReceivedCommand<'_>) -> Admission {
        self.set_modes(arrival.shared.mode_pages);
        let cmd = ParsedCommand {
            cdb: Cdb::new(arrival.cdb),
            nexus,
            expected_transfer: arrival.expected_transfer,
            luns: arrival.luns,
            rights: arrival.shared.rights,
        };
        match self.dispatch(&cmd) {
            Ok(Outcome::Accept(command)) => Admission::Accept(command),
            Ok(Outcome::Done { data, full_transfer }) => {
                Admission::Reply(Reply::good(data, full_transfer, cmd.expected_transfer.data_in))
            }
            Err(refusal) => Admission::Reply(refusal.into_reply(self.sense_format())),
        }
    }

    fn dispatch(&mut self, cmd: &ParsedCommand<'_>) -> Result<Outcome, Refusal> {
        if self.nexuses.get(cmd.nexus).is_none() {
            // The nexus ended while its command was in transit: aborted with it (SAM-5 6.3.4).
            return Err(Status::TaskAborted.into());
        }
        let traits = self.capabilities();
        let entry = opcodes::lookup(cmd.cdb).and_then(|e| e.supported(traits));
        check_reservation(cmd, entry)?;
        if !entry.is_ok_and(|e| !e.ends_with_attention)
            && let Some(attention) = self.nexuses.take_attention(cmd.nexus)
        {
            return Err(attention.sense().into());
        }
        let entry = entry?;
        entry.check(cmd.cdb, traits)?;
        if entry.needs_available_path() && self.is_unavailable() {
            return Err(failure::UNAVAILABLE.into());
        }
        if entry.accesses_medium && self.stopped {
            return Err(NOT_STARTED.into());
        }
        (entry.handler)(self, cmd)
    }

    pub(crate) fn can_unmap(&self) -> bool {
        self.info.unmap_granularity_blocks > 0
    }

    pub(crate) fn capabilities(&self) -> UnitCapabilities {
        UnitCapabilities {
            can_unmap: self.can_unmap(),
            has_port_groups: self.groups.is_some(),
            keeps_reservations: self.config.keeps_reservations,
            writes_atomically: self.limits.max_atomic > 0,
        }
    }

    pub(crate) fn is_read_only(&self) -> bool {
        self.config.read_only || self.info.read_only
    }

    /// Starts an admitted command with its data, [`AdmittedCommand::data_out`] bytes.
    #[expect(clippy::needless_pass_by_value, reason = "an admitted command starts once")]
    pub fn start(&mut self, nexus: NexusId, command: AdmittedCommand, data: Bufs) -> Step {
        let AdmittedCommand { op, data_out, full_transfer, expected_data_in, .. } = command;
        let prepared = if data.len() == data_out {
            self.prepare(nexus, op, data)
        } else {
            Err(Sense::new(SenseKey::AbortedCommand, SenseCode::DATA_PHASE_ERROR).into())
        };
        let running = |completion| RunningCommand { completion, full_transfer, expected_data_in };
        match prepared {
            Ok(PreparedStep::Run(request, completion)) => Step::Run(request, running(completion)),
            Ok(PreparedStep::ChangeShared(change, completion)) => {
                Step::ChangeShared(change, running(completion))
            }
            Ok(PreparedStep::ReadShared(completion)) => Step::ReadShared(running(completion)),
            Ok(PreparedStep::Token(plan, completion)) => Step::Token(plan, running(completion)),
            Ok(PreparedStep::Copy(plan, completion)) => Step::Copy(plan, running(completion)),
            Ok(PreparedStep::Done) => {
                Step::Reply(Reply::good(DataIn::None, full_transfer, expected_data_in))
            }
            Err(refusal) => self.fail_started(full_transfer, refusal),
        }
    }

    /// Fails a command that has started.
    fn fail_started(&self, full_transfer: TransferLengths, refusal: Refusal) -> Step {
        let refusal = Refusal { full_transfer, ..refusal };
        Step::Reply(refusal.into_reply(self.sense_format()))
    }

    /// Whether the write cache is enabled, as set by MODE SELECT (WCE, SBC-3 6.4.5).
    #[must_use]
    pub fn write_cache(&self) -> bool {
        self.modes.wce
    }

    pub(crate) fn set_modes(&mut self, bits: u128) {
        let modes = ModeParameters::from_bits(bits, &self.info);
        if modes != self.modes {
            self.modes = modes;
            self.rearm_thresholds();
        }
    }

    /// Whether every write must be durable when it completes (WCE).
    pub(crate) fn writes_through(&self) -> bool {
        self.info.volatile_cache && !self.modes.wce
    }

    /// The operation of a command.
    fn prepare(
        &mut self,
        nexus: NexusId,
        op: AdmittedOp,
        data: Bufs,
    ) -> Result<PreparedStep, Refusal> {
        let (request, completion) = match op {
            AdmittedOp::ModeSelect { long_header } => {
                return Ok(self.select_modes(&data, long_header)?);
            }
            AdmittedOp::PersistentReserveOut(order) => {
                let change = persistent_reservations::parse_change(
                    order,
                    &data.to_vec(),
                    &self.ports(nexus),
                )?;
                return Ok(PreparedStep::ChangeShared(change, CompletionAction::Status));
            }
            AdmittedOp::Spc2Reserve => {
                return Ok(PreparedStep::ChangeShared(
                    Change::Spc2Reserve,
                    CompletionAction::Status,
                ));
            }
            AdmittedOp::Spc2Release => {
                return Ok(PreparedStep::ChangeShared(
                    Change::Spc2Release,
                    CompletionAction::Status,
                ));
            }
            AdmittedOp::PersistentReserveIn { action: question, allocation } => {
                return Ok(PreparedStep::ReadShared(CompletionAction::ReserveInData {
                    action: question,
                    allocation,
                }));
            }
            AdmittedOp::Unmap => {
                let ranges = provisioning::ranges(&data, &self.limits, self.info.blocks)?;
                if ranges.is_empty() {
                    return Ok(PreparedStep::Done);
                }
                (Request::Unmap { ranges }, CompletionAction::Status)
            }
            AdmittedOp::Read(range) => (Request::Read { range }, CompletionAction::Data),
            AdmittedOp::Verify(range) => (Request::Verify { range }, CompletionAction::Status),
            AdmittedOp::GetLbaStatus { range, max_descriptors: most, allocation } => (
                Request::BlockStatus { range, max_runs: most },
                CompletionAction::LbaStatus { range, allocation },
            ),
            AdmittedOp::Flush => (Request::Flush, CompletionAction::Status),
            AdmittedOp::Stop => (Request::Flush, CompletionAction::StopUnit),
            AdmittedOp::Format { list } => {
                if let Some(long_header) = list {
                    format::check(&data.to_vec(), long_header, self.info.block_size)?;
                }
                let through = self.writes_through();
                let Some(request) = format::request(self, through) else {
                    return Ok(PreparedStep::Done);
                };
                (request, CompletionAction::Status)
            }
            AdmittedOp::SelfTest => (diagnostics::self_test(), CompletionAction::SelfTest),
            AdmittedOp::PopulateToken { id } => return self.plan_populate(nexus, id, &data),
            AdmittedOp::WriteUsingToken { id } => return self.plan_write(nexus, id, &data),
            AdmittedOp::Copy { long } => return self.plan_copy(nexus, long, &data),
            AdmittedOp::SendDiagnostic => {
                diagnostics::check_page(&data.to_vec())?;
                return Ok(PreparedStep::Done);
            }
            writing => self.prepare_data(writing, data),
        };
        Ok(PreparedStep::Run(request, completion))
    }

    /// The same for commands that compare or write blocks.
    fn prepare_data(&self, op: AdmittedOp, data: Bufs) -> (Request, CompletionAction) {
        let through = self.writes_through();
        let request = match op {
            AdmittedOp::Write { at, fua } => Request::Write { at, data, fua: fua || through },
            AdmittedOp::WriteAndVerify { at, compare } => {
                let verify = verify::verify_written(at, &data, compare, self.info.block_size);
                return (Request::Write { at, data, fua: true }, CompletionAction::Verify(verify));
            }
            AdmittedOp::Compare(range) => {
                let data = verify::repeat_to_cover(data, range, self.info.block_size);
                Request::Compare { at: range.at, data }
            }
            AdmittedOp::CompareAndWrite { at, fua } => {
                verify::compare_then_write(at, &data, fua || through)
            }
            AdmittedOp::OrWrite { at, fua } => Request::OrWrite { at, data, fua: fua || through },
            AdmittedOp::WriteSame { range, unmap } => {
                provisioning::fill(range, data, unmap, through)
            }
            AdmittedOp::Zero { range, unmap } => Request::Zero { range, unmap, fua: through },
            _ => Request::Flush,
        };
        (request, CompletionAction::Status)
    }

    /// MODE SELECT. An initiator that disables the write cache will not flush, so earlier writes
    /// are flushed here. Also if it is disabled already: the flush for that may be in flight or
    /// have failed.
    fn select_modes(&self, list: &Bufs, long_header: bool) -> Result<PreparedStep, Sense> {
        let modes = mode::parse_mode_select(self, &list.to_vec(), long_header)?;
        if modes != self.modes {
            return Ok(PreparedStep::ChangeShared(
                Change::SetModePages(modes.bits(&self.info)),
                CompletionAction::SetModes(modes),
            ));
        }
        Ok(match modes.wce {
            true => PreparedStep::Done,
            false => PreparedStep::Run(Request::Flush, CompletionAction::Status),
        })
    }

    /// The relative target port identifiers of the target that an initiator uses.
    fn ports(&self, nexus: NexusId) -> Vec<u16> {
        match &self.groups {
            Some(groups) => groups.ports().collect(),
            None => {
                self.nexuses.get(nexus).map(|n| n.target_port.relative_id).into_iter().collect()
            }
        }
    }

    /// Ends a command whose [`Step::ChangeShared`] was rejected.
    #[expect(clippy::needless_pass_by_value, reason = "a command ends once")]
    pub fn finish_refused_change(
        &mut self,
        running: RunningCommand,
        why: reservation::ReservationError,
    ) -> Step {
        self.fail_started(running.full_transfer, persistent_reservations::refusal_of(why))
    }

    /// Finishes a command with the table that its [`Step::ReadShared`] requested.
    #[expect(clippy::needless_pass_by_value, reason = "a command ends once")]
    pub fn finish_shared_read(&mut self, running: RunningCommand, table: &Table) -> Step {
        let CompletionAction::ReserveInData { action: question, allocation } = running.completion
        else {
            return self.fail_started(running.full_transfer, Status::Busy.into());
        };
        let mut data = persistent_reservations::reserve_in_data(question, table);
        data.truncate(usize::from(allocation));
        let full_transfer = TransferLengths::to_initiator(data.len() as u64);
        Step::Reply(Reply::good(DataIn::Bytes(data), full_transfer, running.expected_data_in))
    }

    /// The volume has executed the request of a [`Step::Run`], with this result.
    pub fn finish(&mut self, running: RunningCommand, result: Result<Bufs, RequestError>) -> Step {
        let RunningCommand { completion, full_transfer, expected_data_in } = running;
        let data = match result {
            Ok(data) => data,
            Err(failure) => {
                let fault = if matches!(completion, CompletionAction::SelfTest) {
                    diagnostics::self_test_sense(failure)
                } else {
                    None
                };
                if let Some(sense) = fault {
                    return Step::Reply(Reply::check(&sense, self.sense_format()));
                }
                let refusal = failure::refusal(failure, self.modes.tas, self.access());
                return self.fail_started(full_transfer, refusal);
            }
        };
        let data = match completion {
            CompletionAction::Data => DataIn::Bufs(data),
            CompletionAction::LbaStatus { range, allocation } => {
                let mut status_data =
                    capacity::lba_status_data(range, &BlockStatus::from_bufs(&data));
                status_data.truncate(usize::try_from(allocation).unwrap_or(usize::MAX));
                let full_transfer = TransferLengths::to_initiator(status_data.len() as u64);
                return Step::Reply(Reply::good(
                    DataIn::Bytes(status_data),
                    full_transfer,
                    expected_data_in,
                ));
            }
            CompletionAction::Status
            | CompletionAction::SelfTest
            | CompletionAction::ReserveInData { .. }
            | CompletionAction::Copy(_)
            | CompletionAction::Token(_) => DataIn::None,
            CompletionAction::StopUnit => {
                self.stopped = true;
                DataIn::None
            }
            CompletionAction::SetModes(modes) => {
                self.modes = modes;
                self.rearm_thresholds();
                if !modes.wce {
                    let completion = CompletionAction::Status;
                    return Step::Run(
                        Request::Flush,
                        RunningCommand { completion, full_transfer, expected_data_in },
                    );
                }
                DataIn::None
            }
            CompletionAction::Verify(request) => {
                return Step::Run(
                    request,
                    RunningCommand {
                        completion: CompletionAction::Status,
                        full_transfer,
                        expected_data_in,
                    },
                );
            }
        };
        Step::Reply(Reply::good(data, full_transfer, expected_data_in))
    }
}

/// RESERVATION CONFLICT takes precedence over every CHECK CONDITION (SAM-5 5.3.3). The volume
/// checks reads and writes again when they begin.
fn check_reservation(
    cmd: &ParsedCommand<'_>,
    entry: Result<&CommandEntry, Sense>,
) -> Result<(), Refusal> {
    let rights = cmd.rights;
    let access = entry.map_or(ConflictClass::Spc2Only, |entry| entry.conflict_class_of(cmd.cdb));
    let conflicts = match access {
        ConflictClass::Never => false,
        ConflictClass::Spc2Only => !rights.passes_spc2,
        ConflictClass::Reads => !rights.passes_spc2 || !rights.can_read,
        ConflictClass::Writes => !rights.passes_spc2 || !rights.can_write,
    };
    if conflicts { Err(Status::ReservationConflict.into()) } else { Ok(()) }
}

/// The sense data of a unit that START STOP UNIT has stopped (SBC-3 5.25).
pub(crate) const NOT_STARTED: Sense =
    Sense::new(SenseKey::NotReady, SenseCode::INITIALIZING_COMMAND_REQUIRED);
