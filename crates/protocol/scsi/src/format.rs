//! FORMAT UNIT (SBC-3 5.3): afterwards all blocks read as zeroes. There is one format, without
//! protection information and without defect lists.

use block::{Blocks, Lba, Request};

use crate::command::{AdmittedCommand, AdmittedOp, Outcome, ParsedCommand};
use crate::limits::MAX_PARAMETER_LIST;
use crate::reply::{Refusal, TransferLengths};
use crate::sense::{Sense, SenseCode};
use crate::unit::LogicalUnit;

const LONGLIST: u8 = 0x20;
const FMTDATA: u8 = 0x10;
const CMPLST: u8 = 0x08;
const DEFECT_LIST_FORMAT: u8 = 0x07;

/// The bits of byte 1 that are used. FMTPINFO requests protection information and is rejected as a
/// reserved field.
pub(crate) const OPTIONS: u8 = LONGLIST | FMTDATA | CMPLST | DEFECT_LIST_FORMAT;

/// FORMAT UNIT. Its parameter list contains its own length, so all that the transport brings is
/// accepted.
pub(crate) fn format(unit: &mut LogicalUnit, cmd: &ParsedCommand<'_>) -> Result<Outcome, Refusal> {
    let options = cmd.cdb.byte(1) & OPTIONS;
    if options & FMTDATA == 0 {
        if options != 0 {
            return Err(Sense::field(1, Some(7 - options.leading_zeros() as u8)).into());
        }
        unit.check_writable()?;
        return Ok(unit.accept(AdmittedOp::Format { list: None }));
    }
    unit.check_writable()?;
    let long_header = options & LONGLIST != 0;
    let header = if long_header { LONG_HEADER } else { SHORT_HEADER };
    if cmd.expected_transfer.data_out < header as u64 {
        return Err(Refusal::transfer_mismatch(TransferLengths::from_initiator(header as u64)));
    }
    let bytes = cmd.expected_transfer.data_out.min(u64::from(MAX_PARAMETER_LIST));
    Ok(Outcome::Accept(AdmittedCommand {
        op: AdmittedOp::Format { list: Some(long_header) },
        data_out: bytes as usize,
        data_in: 0,
        read_back: 0,
        full_transfer: TransferLengths::from_initiator(bytes),
        expected_data_in: 0,
    }))
}

/// The request for formatting; `None` for a device without blocks.
pub(crate) fn request(unit: &LogicalUnit, fua: bool) -> Option<Request> {
    let range = Blocks::new(Lba(0), unit.info.blocks);
    (range.count > 0).then(|| Request::Zero { range, unmap: unit.can_unmap(), fua })
}

const SHORT_HEADER: usize = 4;
const LONG_HEADER: usize = 8;
const PATTERN_HEADER: usize = 4;

const FOV: u8 = 0x80;
const DPRY_DCRT_STPF: u8 = 0x70;
const IP: u8 = 0x08;
const VENDOR_SPECIFIC: u8 = 0x01;

/// Checks a parameter list (SBC-3 5.3.2): it may only ask for zeroes. IMMED is ignored, and so is
/// everything about defect lists.
pub(crate) fn check(list: &[u8], long_header: bool, block_size: u32) -> Result<(), Sense> {
    const TOO_SHORT: Sense = Sense::illegal(SenseCode::PARAMETER_LIST_LENGTH_ERROR);
    let header_len = if long_header { LONG_HEADER } else { SHORT_HEADER };
    let (header, rest) = list.split_at_checked(header_len).ok_or(TOO_SHORT)?;
    let flags = header[1];
    if header[0] != 0 {
        // PROTECTION FIELD USAGE.
        return Err(Sense::parameter(0, Some(7 - header[0].leading_zeros() as u8)));
    }
    if flags & VENDOR_SPECIFIC != 0 {
        return Err(Sense::parameter(1, Some(0)));
    }
    if flags & FOV == 0 && flags & (DPRY_DCRT_STPF | IP) != 0 {
        return Err(Sense::parameter(1, Some(7)));
    }
    if long_header && header[2..4] != [0, 0] {
        // P_I_INFORMATION and PROTECTION INTERVAL EXPONENT.
        return Err(Sense::parameter(if header[2] == 0 { 3 } else { 2 }, None));
    }
    let defects_field = header_len / 2;
    if header[defects_field..].iter().any(|&byte| byte != 0) {
        return Err(Sense::parameter(defects_field as u16, None));
    }
    if flags & IP == 0 { Ok(()) } else { check_pattern(rest, header_len as u16, block_size) }
}

/// Checks an initialization pattern descriptor that begins at `at` (SBC-3 5.3.2.3).
fn check_pattern(list: &[u8], at: u16, block_size: u32) -> Result<(), Sense> {
    const TOO_SHORT: Sense = Sense::illegal(SenseCode::PARAMETER_LIST_LENGTH_ERROR);
    const DEFAULT: u8 = 0x00;
    const REPEAT: u8 = 0x01;
    let (header, rest) = list.split_at_checked(PATTERN_HEADER).ok_or(TOO_SHORT)?;
    if header[0] != 0 {
        // SI: no target can promise to overwrite the spare blocks of a medium.
        return Err(Sense::parameter(at, Some(7 - header[0].leading_zeros() as u8)));
    }
    let length = usize::from(u16::from_be_bytes([header[2], header[3]]));
    match header[1] {
        DEFAULT if length == 0 => Ok(()),
        REPEAT if (1..=block_size as usize).contains(&length) => {
            let pattern = rest.get(..length).ok_or(TOO_SHORT)?;
            match pattern.iter().all(|&byte| byte == 0) {
                true => Ok(()),
                false => Err(Sense::parameter(at + PATTERN_HEADER as u16, None)),
            }
        }
        DEFAULT | REPEAT => Err(Sense::parameter(at + 2, None)),
        _ => Err(Sense::parameter(at + 1, None)),
    }
}
