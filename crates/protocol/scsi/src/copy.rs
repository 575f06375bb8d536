//! EXTENDED COPY and RECEIVE COPY RESULTS (SPC-4 5.17, 6.3 to 6.5, 6.22 to 6.25; RFD 0014).
//!
//! | module | subject |
//! |---|---|
//! | `list` | parameter lists, in both formats, to plans |
//! | `plan` | what a driver is to copy, and how that can fail |
//! | `operation` | what initiators can ask of a copy, while it runs and afterwards |
//! | `results` | the answers |
//! | `token` | POPULATE TOKEN and WRITE USING TOKEN (SBC-3 5.7, 5.49; RFD 0018) |
//! | `rod` | tokens |

mod list;
mod operation;
mod plan;
mod results;
mod rod;
mod token;

use std::rc::Rc;

use block::{Bufs, Error, Failure};

use operation::Current;
pub(crate) use operation::{Copies, Operation};
pub use plan::{
    CopyEnd, CopyExtent, CopyFault, CopyHandle, CopyOutcome, CopyPlan, CopySegment, CopyTrouble,
    Side, Whose,
};
pub(crate) use results::{
    abort, failed_segment_details, operating_parameters, page, rod_token_information, status_lid1,
    status_lid4,
};
pub use rod::{Presented, ROD_TOKEN_LEN, RodToken};
pub use token::{TOKEN_LIFETIME_S, TokenFault, TokenOutcome, TokenPlan, TokenWork};
pub(crate) use token::{populate_token, write_using_token};

use crate::failure;
use crate::nexus::NexusId;
use crate::reply::{Data, Refusal, Reply, Status};
use crate::sense::{Code, CopyAnswer, CopyField, CopyPoint, Key, Sense};
use crate::unit::{
    After, Incoming, Known, LogicalUnit, NOT_STARTED, Outcome, Prepared, Running, Todo,
};

/// Most ends that one list may name.
const MAX_ENDS: usize = 8;

/// Most segments of one list.
const MAX_SEGMENTS: usize = 128;

/// Most bytes of descriptors in one list.
const MAX_DESCRIPTORS: usize = MAX_ENDS * list::END_LEN + MAX_SEGMENTS * list::SEGMENT_LEN;

/// Most operations of one initiator that are known by their identifiers.
const MAX_OPERATIONS: usize = 16;

/// Most copies at a time, over all: as many commands as there may be.
const TOTAL_OPERATIONS: u16 = u16::MAX;

/// Longest segment in bytes: what its count can name, in the largest blocks.
const MAX_SEGMENT_BYTES: u32 = u16::MAX as u32 * 4096;

/// What COPY OPERATION ABORT leaves to the command that it ends (SPC-4 5.17.4.7).
const CLEARED: Sense = Sense::new(Key::CopyAborted, Code::COMMANDS_CLEARED_BY_DEVICE_SERVER);

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
    cmd: &Incoming<'_>,
) -> Result<Outcome, Refusal> {
    let long = cmd.cdb.byte(1) & 0x1f == EXTENDED_COPY_LID4;
    unit.accept_list(Todo::Copy { long }, cmd.cdb.u32(10), cmd)
}

impl LogicalUnit {
    /// Makes a plan of a parameter list, known to its initiator from now on.
    pub(crate) fn plan_copy(
        &mut self,
        nexus: NexusId,
        long: bool,
        data: &Bufs,
    ) -> Result<Prepared, Refusal> {
        let list = list::parse(&data.to_vec(), long)?;
        let action = if long { EXTENDED_COPY_LID4 } else { EXTENDED_COPY_LID1 };
        let operation = Rc::new(Operation::new(list.id, list.id_field, action, list.tells));
        let copies = self.nexuses.copies(nexus).ok_or(Status::TaskAborted)?;
        copies.begin(&operation)?;
        Ok(Prepared::Copy(CopyPlan::new(list, Rc::clone(&operation)), After::Copied(operation)))
    }

    /// What a [`Step::Copy`] asked for has come to this.
    pub fn finish_copy(&mut self, running: Running, outcome: CopyOutcome) -> Reply {
        let Running { after, wanted, .. } = running;
        let After::Copied(operation) = after else { return Reply::good(Data::None, wanted, 0) };
        let refusal = match outcome {
            CopyOutcome::Done => None,
            CopyOutcome::Aborted if operation.is_cleared() => Some(CLEARED.into()),
            CopyOutcome::Aborted => {
                let aborted = Error::Aborted.into();
                Some(failure::refusal(aborted, self.modes.tas, self.access()))
            }
            CopyOutcome::Failed { segment, fault, commanded } => {
                Some(self.copy_refusal(segment, fault, commanded, &operation.current.borrow()))
            }
        };
        let reply = match refusal {
            Some(refusal) => Refusal { wanted, ..refusal }.into_reply(self.sense_format()),
            None => {
                let told = operation.tells.then(|| Sense::copy_done(operation.segments.get()));
                let sense = told.map(|s| s.to_bytes(self.sense_format())).unwrap_or_default();
                Reply { sense, ..Reply::good(Data::None, wanted, 0) }
            }
        };
        operation.end(&reply, outcome == CopyOutcome::Aborted);
        reply
    }

    /// RFD 0014, 7. `commanded`: the end that failed is this unit.
    fn copy_refusal(
        &self,
        segment: u16,
        fault: CopyFault,
        commanded: bool,
        current: &Current,
    ) -> Refusal {
        // Of the unit itself there is no descriptor but the index that means it.
        let end = |side: Side| {
            let described = current.end(side == Side::Destination);
            described.unwrap_or(CopyField::Segment(side.index_field()))
        };
        let (code, field, answer) = match fault {
            CopyFault::Unreachable(side) => (Code::UNREACHABLE_COPY_TARGET, end(side), None),
            CopyFault::Mismatch(side) => (Code::INCORRECT_COPY_TARGET_DEVICE_TYPE, end(side), None),
            CopyFault::Inexact => {
                (Code::UNEXPECTED_INEXACT_SEGMENT, CopyField::Segment(list::COUNT_FIELD), None)
            }
            CopyFault::OutOfRange(side) => {
                (Code::NONE, CopyField::Segment(side.address_field()), None)
            }
            CopyFault::Failed(side, trouble) => match answer(trouble) {
                Some((status, sense)) => {
                    let destination = side == Side::Destination;
                    let answer = CopyAnswer { destination, status, sense };
                    (Code::THIRD_PARTY_DEVICE_FAILURE, end(side), Some(answer))
                }
                // As every command is answered: the initiator tries another node with the whole copy.
                None if commanded => return self.not_here(trouble),
                None => (Code::COPY_TARGET_DEVICE_NOT_REACHABLE, end(side), None),
            },
        };
        let point = CopyPoint { segment, field: Some(field), answer };
        let information = current.residual();
        Sense { information, ..Sense::copy_aborted(code, point) }.into()
    }

    fn not_here(&self, trouble: CopyTrouble) -> Refusal {
        match trouble {
            CopyTrouble::Failed(failure) => {
                failure::refusal(failure, self.modes.tas, self.access())
            }
            _ => failure::UNAVAILABLE.into(),
        }
    }

    /// Whether a copy may read or write the unit on behalf of an initiator of which `known` is known; of a
    /// write, whether it has to be durable when it completes.
    ///
    /// # Errors
    /// What READ(16) and WRITE(16) would be answered.
    pub fn admits_copy(&mut self, known: Known, writes: bool) -> Result<bool, CopyTrouble> {
        self.set_modes(known.modes);
        let rights = known.rights;
        if !rights.sole || !(if writes { rights.writes } else { rights.reads }) {
            return Err(CopyTrouble::Conflict);
        }
        if self.is_unavailable() {
            return Err(CopyTrouble::Elsewhere);
        }
        if self.stopped {
            return Err(CopyTrouble::Refused(NOT_STARTED));
        }
        if writes {
            self.check_writable().map_err(CopyTrouble::Refused)?;
        }
        Ok(self.writes_through())
    }
}

/// What an end would have answered an initiator; `None` if another node is to be asked.
fn answer(trouble: CopyTrouble) -> Option<(Status, Option<(Key, Code)>)> {
    let said = |s: Sense| Some((Status::CheckCondition, Some((s.key, s.code))));
    match trouble {
        CopyTrouble::Conflict => Some((Status::ReservationConflict, None)),
        CopyTrouble::Refused(sense) => said(sense),
        CopyTrouble::Elsewhere
        | CopyTrouble::Failed(Failure::Device(Error::Fenced | Error::Gone)) => None,
        CopyTrouble::Failed(failure) => {
            let refusal = failure::refusal(failure, false, None);
            Some((refusal.status, refusal.sense.map(|s| (s.key, s.code))))
        }
    }
}
