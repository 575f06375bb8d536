//! The life cycle of a command.
//!
//! A command passes through [`LogicalUnit::admit`] when it arrives, [`LogicalUnit::start`] when its
//! data has arrived, and [`LogicalUnit::finish`] each time the volume has executed the request of a
//! [`Step::Run`]. Each may end it. Nothing here waits, reads a clock or accesses the volume.

use block::{BlockStatus, Bufs, Request, RequestError};
use reservation::{Change, Table};

use crate::cdb::Cdb;
use crate::command::{
    Admission, AdmittedCommand, AdmittedOp, CompletionAction, Outcome, ParsedCommand, PreparedStep,
    ReceivedCommand, RunningCommand, Step,
};
use crate::command_table::{CommandEntry, ConflictClass};
use crate::nexus::NexusId;
use crate::power::NOT_STARTED;
use crate::reply::{DataIn, Refusal, Reply, TransferLengths};
use crate::sense::{Sense, SenseCode, SenseKey};
use crate::status::Status;
use crate::unit::LogicalUnit;
use crate::{
    capacity, diagnostics, failure, format, mode, opcodes, provisioning, reservation_encoding,
    verify,
};

impl LogicalUnit {
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
        let entry = opcodes::TABLE.lookup(cmd.cdb).and_then(|e| e.supported(traits));
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
                let change =
                    reservation_encoding::parse_change(order, &data.to_vec(), &self.ports(nexus))?;
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
        self.fail_started(running.full_transfer, reservation_encoding::refusal_of(why))
    }

    /// Finishes a command with the table that its [`Step::ReadShared`] requested.
    #[expect(clippy::needless_pass_by_value, reason = "a command ends once")]
    pub fn finish_shared_read(&mut self, running: RunningCommand, table: &Table) -> Step {
        let CompletionAction::ReserveInData { action: question, allocation } = running.completion
        else {
            return self.fail_started(running.full_transfer, Status::Busy.into());
        };
        let mut data = reservation_encoding::reserve_in_data(question, table);
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
