//! A command on its way through the logical unit: as it was received, parsed, admitted, prepared
//! and running.
//!
//! [`LogicalUnit`](crate::LogicalUnit) has the functions that lead from one to the next.

use std::rc::Rc;

use block::{Blocks, Lba, Request};
use reservation::{Change, Rights};

use crate::cdb::Cdb;
use crate::copy::{CopyOperation, CopyPlan, TokenPlan};
use crate::lun::Lun;
use crate::mode_parameters::ModeParameters;
use crate::nexus::NexusId;
use crate::reply::{DataIn, Reply, TransferLengths};
use crate::reservation_encoding::{ReserveInAction, ReserveOutCommand};

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
    /// Get its data, then [`LogicalUnit::start`](crate::LogicalUnit::start) it.
    Accept(AdmittedCommand),
}

/// The next step of a command that has its data.
#[derive(Debug)]
pub enum Step {
    /// It has ended.
    Reply(Reply),
    /// Have the volume execute this, then [`LogicalUnit::finish`](crate::LogicalUnit::finish) it
    /// with the result.
    Run(Request, RunningCommand),
    /// Change the shared state on behalf of the initiator, then
    /// [`LogicalUnit::finish`](crate::LogicalUnit::finish) it, without data, with the result, or
    /// [`LogicalUnit::finish_refused_change`](crate::LogicalUnit::finish_refused_change).
    ChangeShared(Change, RunningCommand),
    /// Read the shared state, then
    /// [`LogicalUnit::finish_shared_read`](crate::LogicalUnit::finish_shared_read), or
    /// [`LogicalUnit::finish`](crate::LogicalUnit::finish) it with the error.
    ReadShared(RunningCommand),
    /// Copy this between volumes, then
    /// [`LogicalUnit::finish_copy`](crate::LogicalUnit::finish_copy) it with the result.
    Copy(CopyPlan, RunningCommand),
    /// Create a token or write its data, then
    /// [`LogicalUnit::finish_token`](crate::LogicalUnit::finish_token) it with the result.
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
    /// to [`LogicalUnit::start`](crate::LogicalUnit::start).
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
