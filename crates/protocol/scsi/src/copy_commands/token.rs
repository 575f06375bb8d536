//! POPULATE TOKEN and WRITE USING TOKEN (SBC-3 5.7, 5.49; SPC-4 5.17.6; RFD 0018).

use std::rc::Rc;

use block::{Blocks, Bufs, Error, Lba};
use zerocopy::big_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, KnownLayout, Unaligned};

use super::{CLEARED, POPULATE_TOKEN, WRITE_USING_TOKEN, cscd_answer};
use crate::command::{
    AdmittedOp, CompletionAction, Outcome, ParsedCommand, PreparedStep, RunningCommand,
};
use crate::copy::{
    ANY_POINT_IN_TIME, CHANGE_VULNERABLE, CopyIoError, CopyOperation, CurrentSegment,
    DEFAULT_INACTIVITY_S, MAX_INACTIVITY_S, MAX_RANGES, ROD_TOKEN_LEN, Side, TokenParseError,
    TokenPlan, TokenRequest, TokenResult, max_token_blocks, parse_token,
};
use crate::failure;
use crate::nexus::NexusId;
use crate::reply::{DataIn, Refusal, Reply};
use crate::sense::{CopyFailurePoint, CscdAnswer, Sense, SenseCode, SenseKey};
use crate::status::Status;
use crate::unit::LogicalUnit;

const TOO_SHORT: Sense = Sense::illegal(SenseCode::PARAMETER_LIST_LENGTH_ERROR);

/// Header of the parameter list of POPULATE TOKEN.
#[derive(FromBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct PopulateTokenHeader {
    length: U16,
    /// RTV (02h), IMMED (01h).
    flags: u8,
    _reserved: u8,
    inactivity_s: U32,
    rod_type: U32,
    _reserved_too: [u8; 2],
    ranges_length: U16,
}

/// Header of the parameter list of WRITE USING TOKEN.
#[derive(FromBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct WriteUsingTokenHeader {
    length: U16,
    /// DEL_TKN (02h), IMMED (01h).
    flags: u8,
    _reserved: [u8; 5],
    /// OFFSET INTO ROD, in blocks.
    offset: U64,
    token: [u8; ROD_TOKEN_LEN],
    _reserved_too: [u8; 6],
    ranges_length: U16,
}

/// Block device range descriptor.
#[derive(FromBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct RangeDescriptor {
    at: U64,
    count: U32,
    _reserved: [u8; 4],
}

const RANGE_LEN: usize = size_of::<RangeDescriptor>();
const _: () = assert!(
    size_of::<PopulateTokenHeader>() == 16
        && size_of::<WriteUsingTokenHeader>() == 536
        && RANGE_LEN == 16
);

/// Fields, for field pointers.
const LENGTH_FIELD: u16 = 0;
const INACTIVITY_FIELD: u16 = 4;
const ROD_TYPE_FIELD: u16 = 8;

/// POPULATE TOKEN.
pub(crate) fn populate_token(
    unit: &mut LogicalUnit,
    cmd: &ParsedCommand<'_>,
) -> Result<Outcome, Refusal> {
    unit.accept_list(AdmittedOp::PopulateToken { id: cmd.cdb.u32(6) }, cmd.cdb.u32(10), cmd)
}

/// WRITE USING TOKEN.
pub(crate) fn write_using_token(
    unit: &mut LogicalUnit,
    cmd: &ParsedCommand<'_>,
) -> Result<Outcome, Refusal> {
    unit.check_writable()?;
    unit.accept_list(AdmittedOp::WriteUsingToken { id: cmd.cdb.u32(6) }, cmd.cdb.u32(10), cmd)
}

impl LogicalUnit {
    pub(crate) fn plan_populate(
        &mut self,
        nexus: NexusId,
        id: u32,
        data: &Bufs,
    ) -> Result<PreparedStep, Refusal> {
        const RTV: u8 = 0x02;
        let list = data.to_vec();
        let (header, rest) = PopulateTokenHeader::ref_from_prefix(&list).map_err(|_| TOO_SHORT)?;
        check_length(header.length, size_of::<PopulateTokenHeader>(), list.len())?;
        let inactivity_s = match header.inactivity_s.get() {
            0 => DEFAULT_INACTIVITY_S,
            seconds if seconds > MAX_INACTIVITY_S => {
                return Err(Sense::parameter(INACTIVITY_FIELD, None).into());
            }
            seconds => seconds,
        };
        let fits = [CHANGE_VULNERABLE, ANY_POINT_IN_TIME].contains(&header.rod_type.get());
        if header.flags & RTV != 0 && !fits {
            return Err(Sense::parameter(ROD_TYPE_FIELD, None).into());
        }
        let ranges = self.ranges(rest, header.ranges_length, size_of::<PopulateTokenHeader>())?;
        self.plan_token(nexus, id, POPULATE_TOKEN, TokenRequest::Populate { ranges, inactivity_s })
    }

    pub(crate) fn plan_write(
        &mut self,
        nexus: NexusId,
        id: u32,
        data: &Bufs,
    ) -> Result<PreparedStep, Refusal> {
        const DEL_TKN: u8 = 0x02;
        let list = data.to_vec();
        let (header, rest) =
            WriteUsingTokenHeader::ref_from_prefix(&list).map_err(|_| TOO_SHORT)?;
        check_length(header.length, size_of::<WriteUsingTokenHeader>(), list.len())?;
        let ranges = self.ranges(rest, header.ranges_length, size_of::<WriteUsingTokenHeader>())?;
        let token = parse_token(&header.token).map_err(|why| {
            Sense::illegal(match why {
                TokenParseError::Type => SenseCode::UNSUPPORTED_TOKEN_TYPE,
                TokenParseError::Length => SenseCode::INVALID_TOKEN_LENGTH,
            })
        })?;
        let forgets = header.flags & DEL_TKN != 0;
        let work = TokenRequest::Write {
            token,
            offset: header.offset.get(),
            ranges,
            delete_token: forgets,
        };
        self.plan_token(nexus, id, WRITE_USING_TOKEN, work)
    }

    /// The ranges of a list after a header of `header` bytes, without empty ones. A truncated last
    /// descriptor is ignored, as for UNMAP.
    fn ranges(&self, list: &[u8], length: U16, header: usize) -> Result<Vec<Blocks>, Sense> {
        let length_field = header as u16 - 2;
        let length = usize::from(length.get());
        let whole = length - length % RANGE_LEN;
        if whole == 0 || whole / RANGE_LEN > MAX_RANGES {
            return Err(Sense::parameter(length_field, None));
        }
        let list = list.get(..whole).ok_or(TOO_SHORT)?;
        let described = <[RangeDescriptor]>::ref_from_bytes(list).map_err(|_| TOO_SHORT)?;
        let field = |n: usize, byte: usize| (header + n * RANGE_LEN + byte) as u16;
        let (mut ranges, mut total): (Vec<Blocks>, u64) = (Vec::new(), 0);
        for (n, range) in described.iter().enumerate() {
            let range = Blocks::new(Lba(range.at.get()), u64::from(range.count.get()));
            if range.end().is_none_or(|end| end > self.info.blocks) {
                return Err(Sense::illegal(SenseCode::LBA_OUT_OF_RANGE));
            }
            if ranges.iter().any(|other| other.overlaps(&range)) {
                return Err(Sense::parameter(field(n, 0), None));
            }
            total += range.count;
            if total > max_token_blocks(self.info.block_size) {
                return Err(Sense::parameter(field(n, 8), None));
            }
            if range.count > 0 {
                ranges.push(range);
            }
        }
        Ok(ranges)
    }

    /// Registers the operation for its initiator.
    fn plan_token(
        &mut self,
        nexus: NexusId,
        id: u32,
        action: u8,
        work: TokenRequest,
    ) -> Result<PreparedStep, Refusal> {
        let operation = Rc::new(CopyOperation::new(Some(id), 0, action, false));
        let copies = self.nexuses.copies(nexus).ok_or(Status::TaskAborted)?;
        if copies.find(id).is_some_and(|known| known.is_running()) {
            return Err(Sense::illegal(SenseCode::OPERATION_IN_PROGRESS).into());
        }
        copies.insert(&operation)?;
        operation.begin_segment(CurrentSegment::new(None, None));
        let (TokenRequest::Populate { ranges, .. } | TokenRequest::Write { ranges, .. }) = &work;
        let blocks: u64 = ranges.iter().map(|r| r.count).sum();
        {
            let mut current = operation.current.borrow_mut();
            current.block_size = self.info.block_size;
            current.bytes = blocks * u64::from(self.info.block_size);
        }
        let plan = TokenPlan::new(work, Rc::clone(&operation));
        Ok(PreparedStep::Token(plan, CompletionAction::Token(operation)))
    }

    /// Completes a command after its [`Step::Token`](crate::Step::Token).
    pub fn finish_token(&mut self, running: RunningCommand, outcome: TokenResult) -> Reply {
        let RunningCommand { completion: after, full_transfer: wanted, .. } = running;
        let CompletionAction::Token(operation) = after else {
            return Reply::good(DataIn::None, wanted, 0);
        };
        let aborted = outcome == TokenResult::Aborted;
        let begun = operation.bytes_written.get() > 0;
        let refusal = match outcome {
            TokenResult::Created(token) => {
                let bytes = operation.current.borrow().bytes;
                operation.record_written(0, bytes);
                operation.token.replace(Some(token));
                None
            }
            TokenResult::Written => None,
            TokenResult::Aborted if operation.is_cleared() => Some(CLEARED.into()),
            TokenResult::Aborted => {
                Some(failure::refusal(Error::Aborted.into(), self.modes.tas, self.access()))
            }
            TokenResult::Invalid(fault) if begun => {
                let sense = fault.sense();
                Some(Sense { key: SenseKey::CopyAborted, ..sense }.into())
            }
            TokenResult::Invalid(fault) => Some(fault.sense().into()),
            TokenResult::Failed(side, error) => {
                let own = side == Side::Destination || operation.service_action == POPULATE_TOKEN;
                Some(if own { self.unit_refusal(error) } else { source_refusal(error) })
            }
        };
        let reply = match refusal {
            Some(refusal) => {
                Refusal { full_transfer: wanted, ..refusal }.into_reply(self.sense_format())
            }
            None => Reply::good(DataIn::None, wanted, 0),
        };
        operation.complete(&reply, aborted);
        reply
    }

    /// The answer of READ and WRITE.
    fn unit_refusal(&self, error: CopyIoError) -> Refusal {
        match error {
            CopyIoError::Volume(failure) => {
                failure::refusal(failure, self.modes.tas, self.access())
            }
            CopyIoError::ReservationConflict => Status::ReservationConflict.into(),
            CopyIoError::CheckCondition(sense) => sense.into(),
            CopyIoError::PathUnavailable => failure::UNAVAILABLE.into(),
        }
    }
}

/// The answer for failed reads of another unit.
fn source_refusal(error: CopyIoError) -> Refusal {
    let code = match cscd_answer(error) {
        Some(_) => SenseCode::THIRD_PARTY_DEVICE_FAILURE,
        None => SenseCode::COPY_TARGET_DEVICE_NOT_REACHABLE,
    };
    let answer = cscd_answer(error).map(|(status, sense)| CscdAnswer {
        is_destination: false,
        status,
        sense,
    });
    Sense::copy_aborted(code, CopyFailurePoint { segment: 0, field: None, cscd_answer: answer })
        .into()
}

/// Checks POPULATE TOKEN DATA LENGTH and the like: at least one range, and no more than the list
/// has.
fn check_length(length: U16, header: usize, list: usize) -> Result<(), Sense> {
    let length = usize::from(length.get()) + size_of::<U16>();
    if length < header + RANGE_LEN {
        return Err(Sense::parameter(LENGTH_FIELD, None));
    }
    if length > list { Err(TOO_SHORT) } else { Ok(()) }
}
