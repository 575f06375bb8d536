//! Task Management Function Request (RFC 7143 11.5).
//!
//! ```text
//!    0 |.|I| 0x02      |1| Function    | reserved                    |
//!    4 | TotalAHSLen   | DataSegmentLength                           |
//!    8 | Logical Unit Number or reserved                             |
//!   16 | Initiator Task Tag                                          |
//!   20 | Referenced Task Tag or 0xffffffff                           |
//!   24 | CmdSN                                                       |
//!   28 | ExpStatSN                                                   |
//!   32 | RefCmdSN or reserved                                        |
//!   36 | ExpDataSN or reserved                                       |
//!   40 | reserved                                                    |
//! ```

use wire::open_enum;
use zerocopy::big_endian::U32;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::basic_header;

open_enum! {
    /// What is asked (RFC 7143 11.5.1).
    pub enum TaskFunction: u8 {
        /// Abort one task.
        AbortTask = 1,
        /// Abort all tasks of this session on the logical unit.
        AbortTaskSet = 2,
        /// Clear an auto contingent allegiance.
        ClearAca = 3,
        /// Abort all tasks on the logical unit.
        ClearTaskSet = 4,
        /// Reset the logical unit.
        LogicalUnitReset = 5,
        /// Reset all logical units of the target.
        TargetWarmReset = 6,
        /// Reset the target and end all sessions.
        TargetColdReset = 7,
        /// Move a task to this connection.
        TaskReassign = 8,
    }
}

/// A task management request.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct TaskRequest {
    /// Immediate bit and opcode.
    pub first: u8,
    /// Final bit and function.
    pub flags: u8,
    reserved: [u8; 2],
    /// Length of the additional header segments in units of four bytes.
    pub ahs_words: u8,
    /// Length of the data segment: none.
    pub data_len: [u8; 3],
    /// Logical unit number, for functions of that scope.
    pub lun: [u8; 8],
    /// Initiator task tag of this request.
    pub itt: U32,
    /// Initiator task tag of the task it is about.
    pub referenced: U32,
    /// Place in the command order.
    pub cmd_sn: U32,
    /// Next status the initiator expects.
    pub exp_stat_sn: U32,
    /// Place in the command order of the task it is about.
    pub ref_cmd_sn: U32,
    /// For reassignment: next data or R2T number the initiator expects.
    pub exp_data_sn: U32,
    reserved_end: [u8; 8],
}

basic_header!(TaskRequest, TaskRequest);

impl TaskRequest {
    /// What is asked.
    #[must_use]
    pub fn function(&self) -> TaskFunction {
        TaskFunction(self.flags & 0x7f)
    }
}
