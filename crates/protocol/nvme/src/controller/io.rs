//! Translates commands of the NVM command set to volume requests

use block::{Blocks, Bufs, Info, Lba, Request};
use reservation::Change;
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::copy::{self, CopyRequest};
use super::error_log::{CommandError, field};
use super::identify::MAX_DATALESS_BYTES;
use super::{Controller, Namespace, ReservationOp};
use crate::entry::{Completion, Fuse, NSID_ALL, NvmOpcode, Sqe};
use crate::fabrics;
use crate::log::AnaState;
use crate::status::Status;

/// Dword 12: force unit access.
const FUA: u32 = 1 << 30;
/// Dword 12 of Write Zeroes: may deallocate.
const DEAC: u32 = 1 << 25;
/// Dword 12 of Write Zeroes: the whole namespace (NVM Command Set 1.1); not supported.
const NSZ: u32 = 1 << 23;
/// Dword 11 of Dataset Management: deallocate.
const DEALLOCATE: u32 = 1 << 2;

/// Most data of each half of a Compare and Write in bytes: a host that never sends the second half
/// ties up at most twice that per queue.
const MAX_FUSED_BYTES: u32 = 8192;

/// Most ranges of a Dataset Management command.
const MAX_RANGES: usize = 256;

/// A range of Dataset Management.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct DeallocateRange {
    attributes: U32,
    blocks: U32,
    at: U64,
}
const _: () = assert!(size_of::<DeallocateRange>() == 16);

/// A validated command, except for its data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IoCommand {
    /// Namespace; [`NSID_ALL`] for a Flush of all.
    pub nsid: u32,
    /// Data from the host in bytes.
    pub data_out: u32,
    /// Its operation.
    pub op: IoOp,
}

/// Operation of an [`IoCommand`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IoOp {
    /// Read.
    Read(Blocks),
    /// Write.
    Write {
        /// First block.
        at: Lba,
        /// Whether it must be durable on completion.
        fua: bool,
    },
    /// Compare.
    Compare {
        /// First block.
        at: Lba,
    },
    /// Write Zeroes.
    Zero {
        /// What to zero.
        range: Blocks,
        /// Whether the space may be freed.
        unmap: bool,
        /// Whether it must be durable on completion.
        fua: bool,
    },
    /// Verify.
    Verify(Blocks),
    /// Dataset Management with Deallocate.
    Deallocate {
        /// Number of ranges in the data.
        ranges: u16,
    },
    /// Dataset Management without Deallocate: hints, which are ignored.
    Hints,
    /// Copy.
    Copy {
        /// Number of source ranges in the data.
        ranges: u16,
        /// First block of the destination.
        to: Lba,
        /// Whether it must be durable on completion.
        fua: bool,
    },
    /// Flush.
    Flush,
    /// A reservation command that changes reservations.
    Reservation(ReservationOp),
    /// Reservation Report.
    ReservationReport {
        /// Data to the host in bytes.
        bytes: u32,
    },
}

/// Work to execute for an [`IoCommand`].
#[derive(Clone, Debug)]
pub enum IoWork {
    /// Nothing.
    Nothing,
    /// A request to the volume.
    Volume(Request),
    /// A copy within the volume.
    Copy(CopyRequest),
    /// A change of the reservation table; pass refusals to [`Controller::fail_refused_change`].
    ChangeReservations(Change),
    /// Return the reservation table by [`super::write_report`].
    ReservationReport {
        /// Length in bytes.
        bytes: u32,
    },
}

impl IoCommand {
    /// Whether it is a Flush of all namespaces that the host sees.
    #[must_use]
    pub fn is_broadcast(&self) -> bool {
        self.nsid == NSID_ALL
    }

    /// If this and `second` are the halves of a Compare and Write: its first block, and whether it
    /// must be durable on completion.
    #[must_use]
    pub fn fused_with(&self, second: &Self) -> Option<(Lba, bool)> {
        let alike = self.nsid == second.nsid && self.data_out == second.data_out;
        match (self.op, second.op) {
            (IoOp::Compare { at }, IoOp::Write { at: to, fua }) if alike && at == to => {
                Some((at, fua))
            }
            _ => None,
        }
    }

    /// The work for this command. `data` is the host's data, `info` the device's properties.
    ///
    /// # Errors
    /// The status that ends the command.
    pub fn into_work(self, data: Bufs, info: &Info) -> Result<IoWork, Status> {
        Ok(IoWork::Volume(match self.op {
            IoOp::Read(range) => Request::Read { range },
            IoOp::Write { at, fua } => Request::Write { at, data, fua },
            IoOp::Compare { at } => Request::Compare { at, data },
            IoOp::Zero { range, unmap, fua } => Request::Zero { range, unmap, fua },
            IoOp::Verify(range) => Request::Verify { range },
            IoOp::Deallocate { ranges } => {
                let ranges = parse_deallocate_ranges(&data, ranges, info)?;
                if ranges.is_empty() {
                    return Ok(IoWork::Nothing);
                }
                Request::Unmap { ranges }
            }
            IoOp::Hints => return Ok(IoWork::Nothing),
            IoOp::Copy { ranges, to, fua } => {
                return CopyRequest::parse(&data, ranges, to, fua, info).map(IoWork::Copy);
            }
            IoOp::Flush => Request::Flush,
            IoOp::Reservation(op) => {
                return op.change(&data.to_vec()).map(IoWork::ChangeReservations);
            }
            IoOp::ReservationReport { bytes } => return Ok(IoWork::ReservationReport { bytes }),
        }))
    }
}

/// The first `count` ranges in the data of Dataset Management.
fn parse_deallocate_ranges(data: &Bufs, count: u16, info: &Info) -> Result<Vec<Blocks>, Status> {
    let mut bytes = [0; MAX_RANGES * size_of::<DeallocateRange>()];
    let wanted = usize::from(count) * size_of::<DeallocateRange>();
    if wanted > data.len().min(bytes.len()) {
        return Err(Status::DATA_SGL_LENGTH_INVALID.do_not_retry());
    }
    data.slice(0..wanted).copy_to(&mut bytes[..wanted]);
    let mut ranges = Vec::with_capacity(usize::from(count));
    for raw in bytes[..wanted].chunks_exact(size_of::<DeallocateRange>()) {
        let range = DeallocateRange::read_from_bytes(raw).map_err(|_| Status::INTERNAL_ERROR)?;
        let range = Blocks::new(Lba(range.at.get()), range.blocks.get().into());
        if range.end().is_none_or(|end| end > info.blocks) {
            return Err(Status::LBA_OUT_OF_RANGE.do_not_retry());
        }
        if range.count > 0 {
            ranges.push(range);
        }
    }
    Ok(ranges)
}

/// Why a fused operation is not executed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FusedError {
    /// One half arrived without the other.
    Missing,
    /// The halves cover different blocks.
    Mismatched,
}

impl Controller {
    /// The completion of a half of a fused operation that is not executed (NVMe Base 2.0, 3.4.2).
    pub fn fail_fused(&mut self, qid: u16, sqe: &Sqe, why: FusedError) -> Completion {
        let fault = match why {
            FusedError::Missing => CommandError::at(Status::MISSING_FUSED, field::FLAGS),
            FusedError::Mismatched => CommandError::field(field::CDW10),
        };
        self.refuse(qid, sqe, fault)
    }

    /// Handles a Disconnect of I/O queue `qid`: success if no other command of it is in flight
    /// (NVMe Base 2.0, 6.4).
    ///
    /// # Errors
    /// The completion that refuses it.
    pub fn disconnect(&mut self, qid: u16, sqe: &Sqe) -> Result<(), Completion> {
        if fabrics::is_disconnect(sqe) {
            return Ok(());
        }
        let fault = CommandError::at(Status::FABRICS_FORMAT, field::CDW10);
        Err(self.refuse(qid, sqe, fault))
    }

    /// A command has arrived on I/O queue `qid`.
    ///
    /// # Errors
    /// The completion that ends it at once.
    pub fn io(&mut self, qid: u16, sqe: &Sqe) -> Result<IoCommand, Completion> {
        self.keep_alive.record_traffic();
        self.io_command(sqe).map_err(|fault| self.refuse(qid, sqe, fault))
    }

    fn io_command(&mut self, sqe: &Sqe) -> Result<IoCommand, CommandError> {
        if !self.is_ready() {
            return Err(CommandError::at(Status::COMMAND_SEQUENCE, 0));
        }
        let nsid = sqe.nsid.get();
        let opcode = NvmOpcode(sqe.opcode);
        let is_fused = match (sqe.fuse(), opcode) {
            (Fuse::None, _) => false,
            (Fuse::First, NvmOpcode::Compare) | (Fuse::Second, NvmOpcode::Write) => true,
            _ => return Err(CommandError::field(field::FLAGS)),
        };
        if opcode == NvmOpcode::Flush && nsid == NSID_ALL {
            return Ok(IoCommand { nsid, data_out: 0, op: IoOp::Flush });
        }
        // NVMe Base 2.0, 3.2.1.4: an inactive identifier is an invalid field.
        let ns = *self.valid_namespace(nsid)?.ok_or(CommandError::field(field::NSID))?;
        self.check_accessible(nsid)?;
        let op = self.op(opcode, sqe, &ns)?;
        let data_out = match op {
            IoOp::Write { .. }
            | IoOp::Compare { .. }
            | IoOp::Deallocate { .. }
            | IoOp::Copy { .. }
            | IoOp::Reservation(_) => sqe.data_bytes(),
            _ => 0,
        };
        if is_fused && data_out > MAX_FUSED_BYTES {
            return Err(CommandError::at(Status::ATOMIC_WRITE_UNIT, field::CDW12));
        }
        Ok(IoCommand { nsid, data_out, op })
    }

    /// NVMe Base 2.0, 8.1: checks the access state. In the state Change the volume holds commands,
    /// and failed ones are answered then.
    fn check_accessible(&self, nsid: u32) -> Result<(), CommandError> {
        Err(CommandError::new(match self.ana.state(nsid).0 {
            AnaState::Inaccessible => Status::ANA_INACCESSIBLE,
            AnaState::PersistentLoss => Status::ANA_PERSISTENT_LOSS,
            _ => return Ok(()),
        }))
    }

    fn op(&mut self, opcode: NvmOpcode, sqe: &Sqe, ns: &Namespace) -> Result<IoOp, CommandError> {
        let fua = sqe.cdw(2) & FUA != 0 || !self.features.write_cache();
        match opcode {
            NvmOpcode::Read => {
                let range = self.data_range(sqe, ns)?;
                self.counters.reads += 1;
                self.counters.read_sectors += sectors(range, ns);
                Ok(IoOp::Read(range))
            }
            NvmOpcode::Write => {
                check_writable(ns)?;
                let range = self.data_range(sqe, ns)?;
                self.counters.writes += 1;
                self.counters.written_sectors += sectors(range, ns);
                Ok(IoOp::Write { at: range.at, fua })
            }
            NvmOpcode::Compare => {
                let range = self.data_range(sqe, ns)?;
                self.counters.reads += 1;
                self.counters.read_sectors += sectors(range, ns);
                Ok(IoOp::Compare { at: range.at })
            }
            NvmOpcode::WriteZeroes => {
                check_writable(ns)?;
                if sqe.cdw(2) & NSZ != 0 {
                    return Err(CommandError::field(field::CDW12 + 2));
                }
                let range = dataless_range(sqe, ns)?;
                Ok(IoOp::Zero { range, unmap: sqe.cdw(2) & DEAC != 0, fua })
            }
            NvmOpcode::Verify => Ok(IoOp::Verify(dataless_range(sqe, ns)?)),
            NvmOpcode::DatasetManagement => dataset_management(sqe, ns),
            NvmOpcode::Copy => {
                check_writable(ns)?;
                copy::parse(sqe, fua)
            }
            NvmOpcode::Flush => Ok(IoOp::Flush),
            NvmOpcode::ReservationRegister
            | NvmOpcode::ReservationAcquire
            | NvmOpcode::ReservationRelease
                if ns.keeps_reservations =>
            {
                let op = ReservationOp::parse(opcode, sqe)?;
                op.check_length(sqe)?;
                Ok(IoOp::Reservation(op))
            }
            NvmOpcode::ReservationReport if ns.keeps_reservations => self.reservation_report(sqe),
            _ => Err(CommandError::at(Status::INVALID_OPCODE, 0)),
        }
    }

    fn reservation_report(&self, sqe: &Sqe) -> Result<IoOp, CommandError> {
        /// Dword 11: the extended data structure.
        const EDS: u32 = 1 << 0;
        if sqe.cdw(1) & EDS == 0 {
            // Over fabrics host identifiers have 128 bits.
            return Err(CommandError::at(Status::HOST_ID_FORMAT, field::CDW11));
        }
        let bytes = (u64::from(sqe.cdw(0)) + 1) * 4;
        let bytes = u32::try_from(bytes).ok().filter(|n| *n <= self.limits.max_transfer_bytes);
        let bytes = bytes.ok_or(CommandError::field(field::CDW10))?;
        Self::check_exact_length(sqe, bytes)?;
        Ok(IoOp::ReservationReport { bytes })
    }

    /// The range of a command with data, whose length must match.
    fn data_range(&self, sqe: &Sqe, ns: &Namespace) -> Result<Blocks, CommandError> {
        let range = checked_range(sqe, ns)?;
        let bytes = range.count * u64::from(ns.info.block_size);
        let largest = u64::from(ns.info.max_transfer_blocks);
        if bytes > u64::from(self.limits.max_transfer_bytes) || range.count > largest {
            return Err(CommandError::field(field::CDW12));
        }
        let bytes = u32::try_from(bytes).expect("at most the largest transfer");
        Self::check_exact_length(sqe, bytes)?;
        Ok(range)
    }
}

/// SLBA and NLB, inside the namespace.
fn checked_range(sqe: &Sqe, ns: &Namespace) -> Result<Blocks, CommandError> {
    let range = Blocks::new(Lba(sqe.slba()), u64::from(sqe.cdw(2) & 0xffff) + 1);
    if range.end().is_none_or(|end| end > ns.info.blocks) {
        return Err(CommandError::at(Status::LBA_OUT_OF_RANGE, field::CDW10));
    }
    Ok(range)
}

/// The range of a command without data, up to WZSL and VSL.
fn dataless_range(sqe: &Sqe, ns: &Namespace) -> Result<Blocks, CommandError> {
    let range = checked_range(sqe, ns)?;
    if range.count * u64::from(ns.info.block_size) > MAX_DATALESS_BYTES {
        return Err(CommandError::field(field::CDW12));
    }
    Ok(range)
}

fn dataset_management(sqe: &Sqe, ns: &Namespace) -> Result<IoOp, CommandError> {
    let [ranges, ..] = sqe.cdw(0).to_le_bytes();
    let ranges = u16::from(ranges) + 1;
    // Hosts send the longest list regardless of the number of ranges (Linux does).
    let wanted = u32::from(ranges) * size_of::<DeallocateRange>() as u32;
    let longest = (MAX_RANGES * size_of::<DeallocateRange>()) as u32;
    if !(wanted..=longest).contains(&sqe.data_bytes()) {
        return Err(CommandError::at(Status::DATA_SGL_LENGTH_INVALID, field::SGL_LENGTH));
    }
    if sqe.cdw(1) & DEALLOCATE == 0 {
        return Ok(IoOp::Hints);
    }
    check_writable(ns)?;
    Ok(IoOp::Deallocate { ranges })
}

fn check_writable(ns: &Namespace) -> Result<(), CommandError> {
    if ns.info.read_only {
        Err(CommandError::at(Status::WRITE_PROTECTED, field::NSID))
    } else {
        Ok(())
    }
}

/// Size of a range in units of 512 bytes.
fn sectors(range: Blocks, ns: &Namespace) -> u64 {
    range.count * u64::from(ns.info.block_size / 512)
}
