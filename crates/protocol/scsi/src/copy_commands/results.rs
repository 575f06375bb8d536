//! RECEIVE COPY RESULTS, COPY OPERATION ABORT, and VPD page 8Fh (SPC-4 6.22 to 6.25, 6.3, 7.8.17).

use std::rc::Rc;

use zerocopy::IntoBytes;
use zerocopy::big_endian::{U16, U32, U64};
use zerocopy::{Immutable, Unaligned};

use super::{
    COPY_OPERATION_ABORT, COPY_STATUS_LID1, COPY_STATUS_LID4, EXTENDED_COPY_LID1,
    EXTENDED_COPY_LID4, FAILED_SEGMENT_DETAILS, OPERATING_PARAMETERS, POPULATE_TOKEN,
    ROD_TOKEN_INFORMATION, WRITE_USING_TOKEN,
};
use crate::command::{Outcome, ParsedCommand};
use crate::copy::{
    BLOCK_TO_BLOCK, CHANGE_VULNERABLE, CopyOperation, CopyState, DEFAULT_INACTIVITY_S,
    IDENTIFICATION, MAX_BYTES, MAX_CSCDS, MAX_DESCRIPTORS, MAX_INACTIVITY_S, MAX_OPERATIONS,
    MAX_RANGES, MAX_SEGMENTS, ROD_TOKEN_LEN, TOKEN_LIFETIME_S, ZEROES, max_token_blocks,
};
use crate::reply::Refusal;
use crate::sense::Sense;
use crate::status::Status;
use crate::unit::LogicalUnit;

/// Most concurrent copies in all: as many as there may be commands.
const TOTAL_OPERATIONS: u16 = u16::MAX;

/// Longest segment in bytes: the largest count with the largest blocks.
const MAX_SEGMENT_BYTES: u32 = u16::MAX as u32 * 4096;

/// Supported descriptor types, in ascending order.
const DESCRIPTORS: [u8; 2] = [BLOCK_TO_BLOCK, IDENTIFICATION];

/// The operation of this initiator whose identifier is at byte 2, in one byte or four.
fn find_operation(
    unit: &mut LogicalUnit,
    cmd: &ParsedCommand<'_>,
    id: u32,
) -> Result<Rc<CopyOperation>, Refusal> {
    let copies = unit.nexuses.copies(cmd.nexus).ok_or(Status::TaskAborted)?;
    copies.find(id).ok_or(Sense::field(2, None).into())
}

/// COPY OPERATION ABORT (SPC-4 6.3, 5.17.4.7). The aborted command is answered when its I/O has
/// ended, this one at once.
pub(crate) fn abort(unit: &mut LogicalUnit, cmd: &ParsedCommand<'_>) -> Result<Outcome, Refusal> {
    let operation = find_operation(unit, cmd, cmd.cdb.u32(2))?;
    if !operation.is_running() {
        return Err(Sense::field(2, None).into());
    }
    operation.clear();
    Ok(Outcome::GOOD)
}

/// Parameter data of RECEIVE COPY STATUS(LID1) (SPC-4 6.25).
#[derive(IntoBytes, Immutable, Unaligned)]
#[repr(C)]
struct StatusLid1 {
    available: U32,
    status: u8,
    segments: U16,
    units: u8,
    transferred: U32,
}

const _: () = assert!(size_of::<StatusLid1>() == 12);

/// COPY COMMAND STATUS.
const IN_PROGRESS: u8 = 0x00;
const DONE: u8 = 0x01;
const FAILED: u8 = 0x02;

/// TRANSFER COUNT UNITS.
const BYTES: u8 = 0x00;
const MEBIBYTES: u8 = 0x02;
const BLOCKS: u8 = 0xf1;

/// RECEIVE COPY STATUS(LID1). The result is reported once.
pub(crate) fn status_lid1(
    unit: &mut LogicalUnit,
    cmd: &ParsedCommand<'_>,
) -> Result<Outcome, Refusal> {
    let operation = find_operation(unit, cmd, u32::from(cmd.cdb.byte(2)))?;
    let status = match *operation.state.borrow() {
        CopyState::Running => IN_PROGRESS,
        CopyState::Done => DONE,
        CopyState::Aborted { .. } | CopyState::Failed { .. } => FAILED,
    };
    if status != IN_PROGRESS && operation.status_reported.replace(true) {
        return Err(Sense::field(2, None).into());
    }
    let bytes = operation.bytes_written.get();
    let (units, transferred) = match u32::try_from(bytes) {
        Ok(bytes) => (BYTES, bytes),
        Err(_) => (MEBIBYTES, u32::try_from(bytes >> 20).unwrap_or(u32::MAX)),
    };
    let data = StatusLid1 {
        available: U32::new((size_of::<StatusLid1>() - 4) as u32),
        status,
        segments: U16::new(operation.segments_processed.get()),
        units,
        transferred: U32::new(transferred),
    };
    Ok(Outcome::data(data.as_bytes().to_vec(), u64::from(cmd.cdb.u32(10))))
}

/// RECEIVE COPY FAILURE DETAILS(LID1) (SPC-4 6.23): the status and the sense data of the command.
/// They are discarded once reported completely, or if not requested.
pub(crate) fn failed_segment_details(
    unit: &mut LogicalUnit,
    cmd: &ParsedCommand<'_>,
) -> Result<Outcome, Refusal> {
    const STATUS_AT: usize = 56;
    let operation = find_operation(unit, cmd, u32::from(cmd.cdb.byte(2)))?;
    if operation.is_running() || operation.service_action != EXTENDED_COPY_LID1 {
        return Err(Sense::field(2, None).into());
    }
    let mut data = vec![0; 4];
    if let CopyState::Failed { status, sense } | CopyState::Aborted { status, sense } =
        &*operation.state.borrow()
        && !operation.details_reported.get()
    {
        data.resize(STATUS_AT, 0);
        data.extend([*status as u8, 0]);
        data.extend((sense.len() as u16).to_be_bytes());
        data.extend(sense.iter());
        let available = (data.len() - 4) as u32;
        data[..4].copy_from_slice(&available.to_be_bytes());
    }
    let allocation = u64::from(cmd.cdb.u32(10));
    if allocation == 0 || allocation >= data.len() as u64 {
        operation.details_reported.set(true);
    }
    Ok(Outcome::data(data, allocation))
}

/// Parameter data of RECEIVE COPY STATUS(LID4) (SPC-4 6.24), without the sense data after it.
#[derive(IntoBytes, Immutable, Unaligned)]
#[repr(C)]
struct StatusLid4 {
    available: U32,
    service_action: u8,
    status: u8,
    counter: U16,
    delay_ms: U32,
    completion: u8,
    sense_field: u8,
    sense_length: u8,
    units: u8,
    transferred: U64,
    segments: U16,
    reserved: [u8; 6],
}

const _: () = assert!(size_of::<StatusLid4>() == 32);

/// RECEIVE ROD TOKEN INFORMATION (SPC-4 6.26): as RECEIVE COPY STATUS(LID4), counted in blocks,
/// followed by the created token, if any.
pub(crate) fn rod_token_information(
    unit: &mut LogicalUnit,
    cmd: &ParsedCommand<'_>,
) -> Result<Outcome, Refusal> {
    let operation = find_operation(unit, cmd, cmd.cdb.u32(2))?;
    if ![POPULATE_TOKEN, WRITE_USING_TOKEN].contains(&operation.service_action) {
        return Err(Sense::field(2, None).into());
    }
    let mut data = status_data(&operation, BLOCKS);
    match &*operation.token.borrow() {
        Some(token) => {
            // Two bytes without meaning for a block device, and the token.
            data.extend((2 + ROD_TOKEN_LEN as u32).to_be_bytes());
            data.extend([0, 0]);
            data.extend(token.bytes());
        }
        None => data.extend([0; 4]),
    }
    let available = (data.len() - 4) as u32;
    data[..4].copy_from_slice(&available.to_be_bytes());
    Ok(Outcome::data(data, u64::from(cmd.cdb.u32(10))))
}

/// RECEIVE COPY STATUS(LID4).
pub(crate) fn status_lid4(
    unit: &mut LogicalUnit,
    cmd: &ParsedCommand<'_>,
) -> Result<Outcome, Refusal> {
    let operation = find_operation(unit, cmd, cmd.cdb.u32(2))?;
    Ok(Outcome::data(status_data(&operation, BYTES), u64::from(cmd.cdb.u32(10))))
}

/// Progress and result of an operation; bytes moved are counted in `units`.
fn status_data(operation: &CopyOperation, units: u8) -> Vec<u8> {
    const IN_FOREGROUND: u8 = 0x11;
    const TERMINATED: u8 = 0x60;
    const NOTHING_NEW_COMES: u32 = 0xffff_fffe;
    const NO_ESTIMATE: u32 = 0xffff_ffff;
    let unit = if units == BLOCKS { operation.current.borrow().block_size.max(1) } else { 1 };
    let (status, completion, mut sense) = match &*operation.state.borrow() {
        CopyState::Running => (IN_FOREGROUND, 0, Vec::new()),
        CopyState::Done => (DONE, Status::Good as u8, Vec::new()),
        CopyState::Aborted { .. } => (TERMINATED, Status::TaskAborted as u8, Vec::new()),
        CopyState::Failed { status, sense } => (FAILED, *status as u8, sense.to_vec()),
    };
    let sense_length = sense.len();
    sense.resize(sense_length.next_multiple_of(4), 0);
    let delay = if status == IN_FOREGROUND { NO_ESTIMATE } else { NOTHING_NEW_COMES };
    let header = StatusLid4 {
        available: U32::new((size_of::<StatusLid4>() - 4 + sense.len()) as u32),
        service_action: operation.service_action,
        status,
        counter: U16::new(operation.commands_completed.get()),
        delay_ms: U32::new(delay),
        completion,
        sense_field: sense.len() as u8,
        sense_length: sense_length as u8,
        units,
        transferred: U64::new(operation.bytes_written.get() / u64::from(unit)),
        segments: U16::new(operation.segments_processed.get()),
        reserved: [0; 6],
    };
    [header.as_bytes(), &sense].concat()
}

/// Parameter data of RECEIVE COPY OPERATING PARAMETERS (SPC-4 6.22), without the list of
/// descriptors.
#[derive(IntoBytes, Immutable, Unaligned)]
#[repr(C)]
struct OperatingParameters {
    available: U32,
    snlid: u8,
    reserved: [u8; 3],
    max_cscds: U16,
    max_segments: U16,
    max_descriptors: U32,
    max_segment_bytes: U32,
    max_inline: U32,
    held_data: U32,
    max_stream: U32,
    reserved_too: U16,
    total_copies: U16,
    max_copies: u8,
    granularities: [u8; 3],
    reserved_more: [u8; 3],
    descriptors: u8,
}

const _: () = assert!(size_of::<OperatingParameters>() == 44);

/// RECEIVE COPY OPERATING PARAMETERS.
pub(crate) fn operating_parameters(
    _unit: &mut LogicalUnit,
    cmd: &ParsedCommand<'_>,
) -> Result<Outcome, Refusal> {
    const SNLID: u8 = 0x01;
    let header = OperatingParameters {
        available: U32::new((size_of::<OperatingParameters>() - 4 + DESCRIPTORS.len()) as u32),
        snlid: SNLID,
        reserved: [0; 3],
        max_cscds: U16::new(MAX_CSCDS as u16),
        max_segments: U16::new(MAX_SEGMENTS as u16),
        max_descriptors: U32::new(MAX_DESCRIPTORS as u32),
        max_segment_bytes: U32::new(MAX_SEGMENT_BYTES),
        max_inline: U32::ZERO,
        held_data: U32::ZERO,
        max_stream: U32::ZERO,
        reserved_too: U16::ZERO,
        total_copies: U16::new(TOTAL_OPERATIONS),
        max_copies: MAX_OPERATIONS as u8,
        granularities: [0; 3],
        reserved_more: [0; 3],
        descriptors: DESCRIPTORS.len() as u8,
    };
    let data = [header.as_bytes(), &DESCRIPTORS].concat();
    Ok(Outcome::data(data, u64::from(cmd.cdb.u32(10))))
}

/// Third-party copy VPD page (SPC-4 7.8.17), without the header.
pub(crate) fn third_party_copy_page(block_size: u32) -> Vec<u8> {
    const COMMANDS: u16 = 0x0001;
    const PARAMETERS: u16 = 0x0004;
    const TYPES: u16 = 0x0008;
    const END_IDS: u16 = 0x000c;
    const GENERAL: u16 = 0x8001;
    let supported = [
        &[
            0x83,
            5,
            EXTENDED_COPY_LID1,
            EXTENDED_COPY_LID4,
            POPULATE_TOKEN,
            WRITE_USING_TOKEN,
            COPY_OPERATION_ABORT,
        ][..],
        &[
            0x84,
            5,
            COPY_STATUS_LID1,
            OPERATING_PARAMETERS,
            FAILED_SEGMENT_DETAILS,
            COPY_STATUS_LID4,
            ROD_TOKEN_INFORMATION,
        ],
    ]
    .concat();
    let mut out = Vec::new();
    token_limits(&mut out, block_size);
    push_descriptor(&mut out, COMMANDS, &[&[supported.len() as u8][..], &supported].concat());
    let mut parameters = vec![0; 4];
    parameters.extend((MAX_CSCDS as u16).to_be_bytes());
    parameters.extend((MAX_SEGMENTS as u16).to_be_bytes());
    parameters.extend((MAX_DESCRIPTORS as u32).to_be_bytes());
    parameters.extend([0; 16]); // no inline data
    push_descriptor(&mut out, PARAMETERS, &parameters);
    push_descriptor(&mut out, TYPES, &[&[DESCRIPTORS.len() as u8][..], &DESCRIPTORS].concat());
    // In addition to the indexes of a list: the unit itself.
    push_descriptor(&mut out, END_IDS, &[0, 2, 0xff, 0xff]);
    token_features(&mut out);
    let mut general = u32::from(TOTAL_OPERATIONS).to_be_bytes().to_vec();
    general.extend((MAX_OPERATIONS as u32).to_be_bytes());
    general.extend(MAX_SEGMENT_BYTES.to_be_bytes());
    general.extend([0; 20]);
    push_descriptor(&mut out, GENERAL, &general);
    out
}

/// Block device ROD token limits (SBC-3 6.5).
fn token_limits(out: &mut Vec<u8>, block_size: u32) {
    const LIMITS: u16 = 0x0000;
    let mut limits = vec![0; 6];
    limits.extend((MAX_RANGES as u16).to_be_bytes());
    limits.extend(MAX_INACTIVITY_S.to_be_bytes());
    limits.extend(DEFAULT_INACTIVITY_S.to_be_bytes());
    let most = max_token_blocks(block_size);
    // The maximum is also the optimum: every command has a cost.
    limits.extend([most.to_be_bytes(), most.to_be_bytes()].concat());
    push_descriptor(out, LIMITS, &limits);
}

/// ROD token features and supported ROD types (SPC-4 7.8.17).
fn token_features(out: &mut Vec<u8>) {
    const FEATURES: u16 = 0x0106;
    const TYPES: u16 = 0x0108;
    const BLOCK_DEVICE: [u8; 4] = [0, 0, 0, 0x2c];
    const TOKEN_IN: u8 = 0x02;
    const TOKEN_OUT: u8 = 0x01;
    const TYPE_LEN: usize = 64;
    // REMOTE TOKENS is zero: tokens of other copy managers are unknown here.
    let mut features = vec![0; 12];
    // A change or a restart may end a token at any time.
    features.extend([0, TOKEN_LIFETIME_S, MAX_INACTIVITY_S].map(u32::to_be_bytes).concat());
    features.extend([0; 18]);
    let mut blocks = BLOCK_DEVICE.to_vec();
    blocks.extend([0; 4]); // no granularity
    blocks.extend([MAX_BYTES; 4].map(u64::to_be_bytes).concat());
    blocks.extend([0; 8]);
    features.extend((blocks.len() as u16).to_be_bytes());
    features.extend(blocks);
    push_descriptor(out, FEATURES, &features);
    let supported = [(CHANGE_VULNERABLE, TOKEN_IN | TOKEN_OUT), (ZEROES, TOKEN_IN)];
    let mut types = vec![0; 2];
    types.extend(((supported.len() * TYPE_LEN) as u16).to_be_bytes());
    for (kind, how) in supported {
        let mut body = kind.to_be_bytes().to_vec();
        body.push(how);
        body.resize(TYPE_LEN, 0);
        types.extend(body);
    }
    push_descriptor(out, TYPES, &types);
}

/// Appends a third-party copy descriptor, padded to a multiple of four bytes.
fn push_descriptor(out: &mut Vec<u8>, kind: u16, body: &[u8]) {
    let length = body.len().next_multiple_of(4);
    out.extend(kind.to_be_bytes());
    out.extend((length as u16).to_be_bytes());
    out.extend(body);
    out.extend(std::iter::repeat_n(0, length - body.len()));
}
