//! The commands of third-party copies: EXTENDED COPY, RECEIVE COPY RESULTS and those for tokens
//! (SPC-4 5.17, 6.3 to 6.5, 6.22 to 6.25; RFD 0014).
//!
//! | module | subject |
//! |---|---|
//! | `results` | the state and the results of copies, and the limits of all copies |
//! | `token` | POPULATE TOKEN and WRITE USING TOKEN (SBC-3 5.7, 5.49; RFD 0018) |

mod results;
mod token;

use std::rc::Rc;

use block::{Bufs, Error, RequestError};

pub(crate) use results::{
    abort, failed_segment_details, operating_parameters, rod_token_information, status_lid1,
    status_lid4, third_party_copy_page,
};
pub(crate) use token::{populate_token, write_using_token};

use crate::command::{
    AdmittedOp, CompletionAction, Outcome, ParsedCommand, PreparedStep, RunningCommand,
    SharedUnitState,
};
use crate::copy::{
    COUNT_FIELD, CopyFault, CopyIoError, CopyOperation, CopyOutcome, CopyPlan, CurrentSegment,
    Side, parse_parameter_list,
};
use crate::failure;
use crate::nexus::NexusId;
use crate::power::NOT_STARTED;
use crate::reply::{DataIn, Refusal, Reply};
use crate::sense::{CopyFailurePoint, CopyFieldPointer, CscdAnswer, Sense, SenseCode, SenseKey};
use crate::status::Status;
use crate::unit::LogicalUnit;

/// The sense data of a command that COPY OPERATION ABORT ends (SPC-4 5.17.4.7).
const CLEARED: Sense =
    Sense::new(SenseKey::CopyAborted, SenseCode::COMMANDS_CLEARED_BY_DEVICE_SERVER);

/// Service actions.
pub(crate) const EXTENDED_COPY_LID1: u8 = 0x00;
pub(crate) const EXTENDED_COPY_LID4: u8 = 0x01;
pub(crate) const POPULATE_TOKEN: u8 = 0x10;
pub(crate) const WRITE_USING_TOKEN: u8 = 0x11;
pub(crate) const COPY_OPERATION_ABORT: u8 = 0x1c;
pub(crate) const COPY_STATUS_LID1: u8 = 0x00;
pub(crate) const OPERATING_PARAMETERS: u8 = 0x03;
pub(crate) const FAILED_SEGMENT_DETAILS: u8 = 0x04;
pub(crate) const COPY_STATUS_LID4: u8 = 0x05;
pub(crate) const ROD_TOKEN_INFORMATION: u8 = 0x07;

/// EXTENDED COPY(LID1), (LID4).
pub(crate) fn extended_copy(
    unit: &mut LogicalUnit,
    cmd: &ParsedCommand<'_>,
) -> Result<Outcome, Refusal> {
    let long = cmd.cdb.byte(1) & 0x1f == EXTENDED_COPY_LID4;
    unit.accept_list(AdmittedOp::Copy { long }, cmd.cdb.u32(10), cmd)
}

impl LogicalUnit {
    /// Makes a plan from a parameter list, and registers the operation for its initiator.
    pub(crate) fn plan_copy(
        &mut self,
        nexus: NexusId,
        long: bool,
        data: &Bufs,
    ) -> Result<PreparedStep, Refusal> {
        let list = parse_parameter_list(&data.to_vec(), long)?;
        let action = if long { EXTENDED_COPY_LID4 } else { EXTENDED_COPY_LID1 };
        let operation = Rc::new(CopyOperation::new(list.id, list.id_field, action, list.g_sense));
        let copies = self.nexuses.copies(nexus).ok_or(Status::TaskAborted)?;
        copies.insert(&operation)?;
        Ok(PreparedStep::Copy(
            CopyPlan::new(list.cscds, list.cscds_offset, list.segments, Rc::clone(&operation)),
            CompletionAction::Copy(operation),
        ))
    }

    /// Completes a command after its [`Step::Copy`](crate::Step::Copy).
    pub fn finish_copy(&mut self, running: RunningCommand, outcome: CopyOutcome) -> Reply {
        let RunningCommand { completion: after, full_transfer, .. } = running;
        let CompletionAction::Copy(operation) = after else {
            return Reply::good(DataIn::None, full_transfer, 0);
        };
        let refusal = match outcome {
            CopyOutcome::Done => None,
            CopyOutcome::Aborted if operation.is_cleared() => Some(CLEARED.into()),
            CopyOutcome::Aborted => {
                let aborted = Error::Aborted.into();
                Some(failure::refusal(aborted, self.modes.tas, self.access()))
            }
            CopyOutcome::Failed { segment, fault, on_this_unit: commanded } => {
                Some(self.segment_refusal(segment, fault, commanded, &operation.current.borrow()))
            }
        };
        let reply = match refusal {
            Some(refusal) => Refusal { full_transfer, ..refusal }.into_reply(self.sense_format()),
            None => {
                let report =
                    operation.g_sense.then(|| Sense::copy_done(operation.segments_processed.get()));
                let sense = report.map(|s| s.to_bytes(self.sense_format())).unwrap_or_default();
                Reply { sense, ..Reply::good(DataIn::None, full_transfer, 0) }
            }
        };
        operation.complete(&reply, outcome == CopyOutcome::Aborted);
        reply
    }

    /// RFD 0014, 7. `commanded`: the failed source or destination is this unit.
    fn segment_refusal(
        &self,
        segment: u16,
        fault: CopyFault,
        commanded: bool,
        current: &CurrentSegment,
    ) -> Refusal {
        // The unit itself has no descriptor, only a reserved index.
        let end = |side: Side| {
            let described = current.cscd_field(side == Side::Destination);
            described.unwrap_or(CopyFieldPointer::Segment(side.index_field()))
        };
        let (code, field, answer) = match fault {
            CopyFault::Unreachable(side) => (SenseCode::UNREACHABLE_COPY_TARGET, end(side), None),
            CopyFault::Mismatch(side) => {
                (SenseCode::INCORRECT_COPY_TARGET_DEVICE_TYPE, end(side), None)
            }
            CopyFault::Inexact => (
                SenseCode::UNEXPECTED_INEXACT_SEGMENT,
                CopyFieldPointer::Segment(COUNT_FIELD),
                None,
            ),
            CopyFault::OutOfRange(side) => {
                (SenseCode::NONE, CopyFieldPointer::Segment(side.address_field()), None)
            }
            CopyFault::Io(side, error) => match cscd_answer(error) {
                Some((status, sense)) => {
                    let destination = side == Side::Destination;
                    let answer = CscdAnswer { is_destination: destination, status, sense };
                    (SenseCode::THIRD_PARTY_DEVICE_FAILURE, end(side), Some(answer))
                }
                // As for every command: the initiator retries the whole copy on another node.
                None if commanded => return self.unit_failure_refusal(error),
                None => (SenseCode::COPY_TARGET_DEVICE_NOT_REACHABLE, end(side), None),
            },
        };
        let point = CopyFailurePoint { segment, field: Some(field), cscd_answer: answer };
        let information = current.residual();
        Sense { information, ..Sense::copy_aborted(code, point) }.into()
    }

    fn unit_failure_refusal(&self, error: CopyIoError) -> Refusal {
        match error {
            CopyIoError::Volume(failure) => {
                failure::refusal(failure, self.modes.tas, self.access())
            }
            _ => failure::UNAVAILABLE.into(),
        }
    }

    /// Whether a copy may read or write the unit on behalf of an initiator with shared state
    /// `known`; for a write, whether it must be durable when it completes.
    ///
    /// # Errors
    /// The answer that READ(16) or WRITE(16) would get.
    pub fn check_copy_access(
        &mut self,
        known: SharedUnitState,
        writes: bool,
    ) -> Result<bool, CopyIoError> {
        self.set_modes(known.mode_pages);
        let rights = known.rights;
        if !rights.passes_spc2 || !(if writes { rights.can_write } else { rights.can_read }) {
            return Err(CopyIoError::ReservationConflict);
        }
        if self.is_unavailable() {
            return Err(CopyIoError::PathUnavailable);
        }
        if self.stopped {
            return Err(CopyIoError::CheckCondition(NOT_STARTED));
        }
        if writes {
            self.check_writable().map_err(CopyIoError::CheckCondition)?;
        }
        Ok(self.writes_through())
    }
}

/// The answer of a CSCD, as an initiator would have got it; `None` if another node must be used.
fn cscd_answer(error: CopyIoError) -> Option<(Status, Option<(SenseKey, SenseCode)>)> {
    let said = |s: Sense| Some((Status::CheckCondition, Some((s.key, s.code))));
    match error {
        CopyIoError::ReservationConflict => Some((Status::ReservationConflict, None)),
        CopyIoError::CheckCondition(sense) => said(sense),
        CopyIoError::PathUnavailable
        | CopyIoError::Volume(RequestError::Device(Error::Fenced | Error::Gone)) => None,
        CopyIoError::Volume(failure) => {
            let refusal = failure::refusal(failure, false, None);
            Some((refusal.status, refusal.sense.map(|s| (s.key, s.code))))
        }
    }
}
