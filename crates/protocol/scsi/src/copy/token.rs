//! POPULATE TOKEN and WRITE USING TOKEN (SBC-3 5.7, 5.49; SPC-4 5.17.6; RFD 0018).

use std::rc::Rc;

use block::{Blocks, Bufs, Error, Lba};
use zerocopy::big_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, KnownLayout, Unaligned};

use super::operation::{Current, Operation};
use super::plan::{CopyHandle, CopyTrouble, Side};
use super::rod::{self, NoToken, Presented, ROD_TOKEN_LEN, RodToken};
use super::{CLEARED, POPULATE_TOKEN, WRITE_USING_TOKEN, answer};
use crate::failure;
use crate::nexus::NexusId;
use crate::reply::{Data, Refusal, Reply, Status};
use crate::sense::{Code, CopyAnswer, CopyPoint, Key, Sense};
use crate::unit::{After, Incoming, LogicalUnit, Outcome, Prepared, Running, Todo};

/// Most ranges of one list.
pub(super) const MAX_RANGES: usize = 64;

/// Most that one token stands for, in bytes.
pub(super) const MAX_BYTES: u64 = 256 << 20;

/// How long a token lives that nobody uses, in seconds, if nothing is said, and at most.
pub(super) const DEFAULT_INACTIVITY_S: u32 = 60;
pub(super) const MAX_INACTIVITY_S: u32 = 600;

/// How long a token lives at most, in seconds.
pub const TOKEN_LIFETIME_S: u32 = 3600;

const TOO_SHORT: Sense = Sense::illegal(Code::PARAMETER_LIST_LENGTH_ERROR);

/// Header of the parameter list of POPULATE TOKEN.
#[derive(FromBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct Populate {
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
struct Write {
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
struct Range {
    at: U64,
    count: U32,
    _reserved: [u8; 4],
}

const RANGE_LEN: usize = size_of::<Range>();
const _: () = assert!(size_of::<Populate>() == 16 && size_of::<Write>() == 536 && RANGE_LEN == 16);

/// Fields, for field pointers.
const LENGTH_FIELD: u16 = 0;
const INACTIVITY_FIELD: u16 = 4;
const ROD_TYPE_FIELD: u16 = 8;
const OFFSET_FIELD: u16 = 8;

/// What is to be done with a token.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TokenWork {
    /// Make one for what these blocks of the unit hold now, that lives for so many seconds from each use.
    Populate {
        /// What it stands for, in this order.
        ranges: Vec<Blocks>,
        /// Inactivity timeout in seconds.
        inactivity_s: u32,
    },
    /// Write what one stands for to the unit.
    Write {
        /// The token.
        token: Presented,
        /// Block of what it stands for, with which to begin.
        offset: u64,
        /// Where to, in this order.
        ranges: Vec<Blocks>,
        /// Whether the token is to be forgotten afterwards.
        forgets: bool,
    },
}

/// What one POPULATE TOKEN or WRITE USING TOKEN asks for.
#[derive(Debug)]
pub struct TokenPlan {
    work: TokenWork,
    operation: Rc<Operation>,
}

/// How it ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TokenOutcome {
    /// The token is this.
    Made(RodToken),
    /// Everything was written.
    Written,
    /// It was given up because somebody asked for that.
    Aborted,
    /// Something is wrong with the token.
    Invalid(TokenFault),
    /// A read or a write failed, or was not allowed.
    Failed(Side, CopyTrouble),
}

/// What can be wrong with a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TokenFault {
    /// Nobody here has made it, nobody has used it for too long, or its volume has gone.
    Unknown,
    /// What it stood for has changed.
    Cancelled,
    /// Its data has blocks of another size.
    OtherBlocks,
    /// It stands for less.
    TooShort,
    /// There are as many tokens as there may be.
    NoRoom,
}

impl TokenFault {
    fn sense(self) -> Sense {
        Sense::illegal(match self {
            Self::Unknown => Code::TOKEN_UNKNOWN,
            Self::Cancelled => Code::TOKEN_CANCELLED,
            Self::OtherBlocks => Code::INVALID_TOKEN_OPERATION,
            Self::TooShort => return Sense::parameter(OFFSET_FIELD, None),
            Self::NoRoom => Code::INSUFFICIENT_RESOURCES_TO_CREATE_ROD_TOKEN,
        })
    }
}

impl TokenPlan {
    /// What is to be done.
    #[must_use]
    pub fn work(&self) -> &TokenWork {
        &self.work
    }

    /// To ask for its end, and to learn that somebody has.
    #[must_use]
    pub fn handle(&self) -> CopyHandle {
        CopyHandle::new(Rc::clone(&self.operation))
    }

    /// `len` bytes, from byte `at` of all ranges on, are written.
    pub fn wrote(&self, at: u64, len: u64) {
        self.operation.wrote(at, len);
    }

    /// A volume has done a command.
    pub fn command_done(&self) {
        self.operation.commands.update(|n| n.wrapping_add(1));
    }
}

impl Drop for TokenPlan {
    /// Nobody may come to tell what became of it.
    fn drop(&mut self) {
        self.operation.abandon();
    }
}

/// POPULATE TOKEN.
pub(crate) fn populate_token(
    unit: &mut LogicalUnit,
    cmd: &Incoming<'_>,
) -> Result<Outcome, Refusal> {
    unit.accept_list(Todo::PopulateToken { id: cmd.cdb.u32(6) }, cmd.cdb.u32(10), cmd)
}

/// WRITE USING TOKEN.
pub(crate) fn write_using_token(
    unit: &mut LogicalUnit,
    cmd: &Incoming<'_>,
) -> Result<Outcome, Refusal> {
    unit.check_writable()?;
    unit.accept_list(Todo::WriteUsingToken { id: cmd.cdb.u32(6) }, cmd.cdb.u32(10), cmd)
}

/// Most blocks that one token stands for.
pub(super) fn most_blocks(block_size: u32) -> u64 {
    MAX_BYTES / u64::from(block_size.max(1))
}

impl LogicalUnit {
    pub(crate) fn plan_populate(
        &mut self,
        nexus: NexusId,
        id: u32,
        data: &Bufs,
    ) -> Result<Prepared, Refusal> {
        const RTV: u8 = 0x02;
        let list = data.to_vec();
        let (header, rest) = Populate::ref_from_prefix(&list).map_err(|_| TOO_SHORT)?;
        check_length(header.length, size_of::<Populate>(), list.len())?;
        let inactivity_s = match header.inactivity_s.get() {
            0 => DEFAULT_INACTIVITY_S,
            seconds if seconds > MAX_INACTIVITY_S => {
                return Err(Sense::parameter(INACTIVITY_FIELD, None).into());
            }
            seconds => seconds,
        };
        let fits =
            [rod::CHANGE_VULNERABLE, rod::ANY_POINT_IN_TIME].contains(&header.rod_type.get());
        if header.flags & RTV != 0 && !fits {
            return Err(Sense::parameter(ROD_TYPE_FIELD, None).into());
        }
        let ranges = self.ranges(rest, header.ranges_length, size_of::<Populate>())?;
        self.plan_token(nexus, id, POPULATE_TOKEN, TokenWork::Populate { ranges, inactivity_s })
    }

    pub(crate) fn plan_write(
        &mut self,
        nexus: NexusId,
        id: u32,
        data: &Bufs,
    ) -> Result<Prepared, Refusal> {
        const DEL_TKN: u8 = 0x02;
        let list = data.to_vec();
        let (header, rest) = Write::ref_from_prefix(&list).map_err(|_| TOO_SHORT)?;
        check_length(header.length, size_of::<Write>(), list.len())?;
        let ranges = self.ranges(rest, header.ranges_length, size_of::<Write>())?;
        let token = rod::parse(&header.token).map_err(|why| {
            Sense::illegal(match why {
                NoToken::Type => Code::UNSUPPORTED_TOKEN_TYPE,
                NoToken::Length => Code::INVALID_TOKEN_LENGTH,
            })
        })?;
        let forgets = header.flags & DEL_TKN != 0;
        let work = TokenWork::Write { token, offset: header.offset.get(), ranges, forgets };
        self.plan_token(nexus, id, WRITE_USING_TOKEN, work)
    }

    /// The ranges of a list behind a header of `header` bytes, without the empty ones. A last descriptor that is cut off is
    /// ignored, as that of UNMAP is.
    fn ranges(&self, list: &[u8], length: U16, header: usize) -> Result<Vec<Blocks>, Sense> {
        let length_field = header as u16 - 2;
        let length = usize::from(length.get());
        let whole = length - length % RANGE_LEN;
        if whole == 0 || whole / RANGE_LEN > MAX_RANGES {
            return Err(Sense::parameter(length_field, None));
        }
        let list = list.get(..whole).ok_or(TOO_SHORT)?;
        let described = <[Range]>::ref_from_bytes(list).map_err(|_| TOO_SHORT)?;
        let field = |n: usize, byte: usize| (header + n * RANGE_LEN + byte) as u16;
        let (mut ranges, mut total): (Vec<Blocks>, u64) = (Vec::new(), 0);
        for (n, range) in described.iter().enumerate() {
            let range = Blocks::new(Lba(range.at.get()), u64::from(range.count.get()));
            if range.end().is_none_or(|end| end > self.info.blocks) {
                return Err(Sense::illegal(Code::LBA_OUT_OF_RANGE));
            }
            if ranges.iter().any(|other| other.overlaps(&range)) {
                return Err(Sense::parameter(field(n, 0), None));
            }
            total += range.count;
            if total > most_blocks(self.info.block_size) {
                return Err(Sense::parameter(field(n, 8), None));
            }
            if range.count > 0 {
                ranges.push(range);
            }
        }
        Ok(ranges)
    }

    /// From now on the operation is known to its initiator.
    fn plan_token(
        &mut self,
        nexus: NexusId,
        id: u32,
        action: u8,
        work: TokenWork,
    ) -> Result<Prepared, Refusal> {
        let operation = Rc::new(Operation::new(Some(id), 0, action, false));
        let copies = self.nexuses.copies(nexus).ok_or(Status::TaskAborted)?;
        if copies.find(id).is_some_and(|known| known.is_running()) {
            return Err(Sense::illegal(Code::OPERATION_IN_PROGRESS).into());
        }
        copies.begin(&operation)?;
        operation.segment_begins(Current::new(None, None));
        let (TokenWork::Populate { ranges, .. } | TokenWork::Write { ranges, .. }) = &work;
        let blocks: u64 = ranges.iter().map(|r| r.count).sum();
        {
            let mut current = operation.current.borrow_mut();
            current.block_size = self.info.block_size;
            current.bytes = blocks * u64::from(self.info.block_size);
        }
        let plan = TokenPlan { work, operation: Rc::clone(&operation) };
        Ok(Prepared::Token(plan, After::Token(operation)))
    }

    /// What a [`Step::Token`](crate::Step::Token) asked for has come to this.
    pub fn finish_token(&mut self, running: Running, outcome: TokenOutcome) -> Reply {
        let Running { after, wanted, .. } = running;
        let After::Token(operation) = after else { return Reply::good(Data::None, wanted, 0) };
        let aborted = outcome == TokenOutcome::Aborted;
        let begun = operation.bytes.get() > 0;
        let refusal = match outcome {
            TokenOutcome::Made(token) => {
                let bytes = operation.current.borrow().bytes;
                operation.wrote(0, bytes);
                operation.token.replace(Some(token));
                None
            }
            TokenOutcome::Written => None,
            TokenOutcome::Aborted if operation.is_cleared() => Some(CLEARED.into()),
            TokenOutcome::Aborted => {
                Some(failure::refusal(Error::Aborted.into(), self.modes.tas, self.access()))
            }
            TokenOutcome::Invalid(fault) if begun => {
                let sense = fault.sense();
                Some(Sense { key: Key::CopyAborted, ..sense }.into())
            }
            TokenOutcome::Invalid(fault) => Some(fault.sense().into()),
            TokenOutcome::Failed(side, trouble) => {
                let own = side == Side::Destination || operation.service_action == POPULATE_TOKEN;
                Some(if own { self.own_trouble(trouble) } else { source_trouble(trouble) })
            }
        };
        let reply = match refusal {
            Some(refusal) => Refusal { wanted, ..refusal }.into_reply(self.sense_format()),
            None => Reply::good(Data::None, wanted, 0),
        };
        operation.end(&reply, aborted);
        reply
    }

    /// As READ and WRITE are answered.
    fn own_trouble(&self, trouble: CopyTrouble) -> Refusal {
        match trouble {
            CopyTrouble::Failed(failure) => {
                failure::refusal(failure, self.modes.tas, self.access())
            }
            CopyTrouble::Conflict => Status::ReservationConflict.into(),
            CopyTrouble::Refused(sense) => sense.into(),
            CopyTrouble::Elsewhere => failure::UNAVAILABLE.into(),
        }
    }
}

/// What happened to the reads of another unit.
fn source_trouble(trouble: CopyTrouble) -> Refusal {
    let code = match answer(trouble) {
        Some(_) => Code::THIRD_PARTY_DEVICE_FAILURE,
        None => Code::COPY_TARGET_DEVICE_NOT_REACHABLE,
    };
    let answer =
        answer(trouble).map(|(status, sense)| CopyAnswer { destination: false, status, sense });
    Sense::copy_aborted(code, CopyPoint { segment: 0, field: None, answer }).into()
}

/// POPULATE TOKEN DATA LENGTH and its like: room for one range at least, and no more than there is.
fn check_length(length: U16, header: usize, list: usize) -> Result<(), Sense> {
    let length = usize::from(length.get()) + size_of::<U16>();
    if length < header + RANGE_LEN {
        return Err(Sense::parameter(LENGTH_FIELD, None));
    }
    if length > list { Err(TOO_SHORT) } else { Ok(()) }
}
