//! Admin commands, as a host sends them.

use std::time::Duration;

use ::nvme::entry::AdminOpcode;
use ::nvme::fabrics::Property;
use ::nvme::host::{Command, LostCommand, Payload};
use ::nvme::identify::{Cns, IDENTIFY_BYTES};
use ::nvme::log::LogId;
use ::nvme::{Completion, Sqe, Status};
use block::{Account, MemoryClass};
use rt::buf::copy_in;

use super::queue::{Queue, Reply};

/// Most bytes of a log read by one command: every controller transfers at least one page.
const LOG_CHUNK_BYTES: usize = 4096;

/// Feature identifiers (NVMe Base 2.0, 5.27.1).
pub(super) mod feature {
    /// Number of Queues.
    pub(crate) const QUEUES: u8 = 0x07;
    /// Asynchronous Event Configuration.
    pub(crate) const EVENTS: u8 = 0x0b;
}

/// Why an admin command failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AdminError {
    /// The queue has ended.
    #[error("the queue has ended")]
    Lost(LostCommand),
    /// The controller refused the command.
    #[error("the controller answered {0:?}")]
    Refused(Status),
    /// The controller reported success but sent too little data or an invalid response.
    #[error("the controller sent an invalid response: {0}")]
    InvalidResponse(&'static str),
    /// Out of memory.
    #[error("no memory for a command")]
    NoMemory,
}

/// An admin queue, and what its commands need.
#[derive(Clone, Debug)]
pub(super) struct AdminQueue {
    pub(super) queue: Queue,
    pub(super) account: Account,
    pub(super) timeout: Duration,
}

impl AdminQueue {
    /// Sends a command with this payload.
    pub(super) async fn call(&self, sqe: Sqe, payload: Payload) -> Result<Reply, AdminError> {
        let timeout = Some(self.timeout);
        check_reply(self.queue.submit(Command { sqe, payload, timeout }).await)
    }

    /// Sends a command without data and returns its result.
    pub(super) async fn command(&self, sqe: Sqe) -> Result<u64, AdminError> {
        let reply = self.call(sqe, Payload::None).await?;
        reply.outcome.map(|c| c.result).map_err(AdminError::Lost)
    }

    /// Sends a command with `bytes` and returns its result.
    ///
    /// The memory is of the class that may use the whole pool: operations that wait for a lost
    /// controller hold memory, and this command is what brings it back.
    pub(super) async fn send(&self, sqe: Sqe, bytes: &[u8]) -> Result<u64, AdminError> {
        let credit = self.account.credit(bytes.len(), MemoryClass::LocalIo).await;
        let credit = credit.map_err(|_| AdminError::NoMemory)?;
        let data = Payload::ToController(copy_in(&credit, bytes));
        let reply = self.call(sqe, data).await?;
        reply.outcome.map(|c| c.result).map_err(AdminError::Lost)
    }

    /// Sends a command that returns up to `length` bytes.
    pub(super) async fn fetch(&self, sqe: Sqe, length: usize) -> Result<Vec<u8>, AdminError> {
        let credit = self.account.credit(length, MemoryClass::LocalIo).await;
        let credit = credit.map_err(|_| AdminError::NoMemory)?;
        let reply = self.call(sqe, Payload::ToHost(credit.alloc(length))).await?;
        let mut out: Vec<u8> = reply.buffers.iter().flat_map(|b| b.iter().copied()).collect();
        out.truncate(reply.transferred as usize);
        Ok(out)
    }

    /// Property Get (NVMe Base 2.0, 6.5).
    pub(super) async fn property(&self, offset: u32, wide: bool) -> Result<u64, AdminError> {
        self.command(Property::encode(0, offset, wide, None)).await
    }

    /// Property Set (NVMe Base 2.0, 6.6), of four bytes.
    pub(super) async fn set_property(&self, offset: u32, value: u32) -> Result<(), AdminError> {
        self.command(Property::encode(0, offset, false, Some(value.into()))).await.map(drop)
    }

    /// Set Features, of a feature without data.
    pub(super) async fn set_feature(&self, feature: u8, value: u32) -> Result<u64, AdminError> {
        let mut sqe = Sqe::new(AdminOpcode::SetFeatures.0, 0, 0);
        sqe.cdw10[0] = u32::from(feature).into();
        sqe.cdw10[1] = value.into();
        self.command(sqe).await
    }

    /// Identify (NVMe Base 2.0, 5.17): all of a structure.
    pub(super) async fn identify(&self, cns: Cns, nsid: u32) -> Result<Vec<u8>, AdminError> {
        let mut sqe = Sqe::new(AdminOpcode::Identify.0, 0, nsid);
        sqe.cdw10[0] = u32::from(cns.0).into();
        let bytes = self.fetch(sqe, IDENTIFY_BYTES as usize).await?;
        if bytes.len() < IDENTIFY_BYTES as usize {
            return Err(AdminError::InvalidResponse("a truncated Identify structure"));
        }
        Ok(bytes)
    }

    /// Get Log Page (NVMe Base 2.0, 5.16): `length` bytes, a multiple of 4, from `offset` on.
    /// `specific`: the log-specific field LSP.
    pub(super) async fn log(
        &self,
        (log, specific): (LogId, u8),
        offset: u64,
        length: usize,
    ) -> Result<Vec<u8>, AdminError> {
        let mut out = Vec::with_capacity(length);
        while out.len() < length {
            let piece = (length - out.len()).min(LOG_CHUNK_BYTES);
            let at = offset + out.len() as u64;
            let dwords = u32::try_from(piece / 4).unwrap_or(1) - 1;
            let mut sqe = Sqe::new(AdminOpcode::GetLogPage.0, 0, 0);
            let specific = u32::from(specific & 0x7f) << 8;
            sqe.cdw10[0] = (u32::from(log.0) | specific | (dwords & 0xffff) << 16).into();
            sqe.cdw10[1] = (dwords >> 16).into();
            sqe.cdw10[2] = low(at).into();
            sqe.cdw10[3] = low(at >> 32).into();
            let bytes = self.fetch(sqe, piece).await?;
            if bytes.len() < piece {
                return Err(AdminError::InvalidResponse("a truncated log page"));
            }
            out.extend(bytes);
        }
        Ok(out)
    }
}

/// The lower half of a number.
pub(super) fn low(number: u64) -> u32 {
    let [a, b, c, d, ..] = number.to_le_bytes();
    u32::from_le_bytes([a, b, c, d])
}

fn check_reply(reply: Reply) -> Result<Reply, AdminError> {
    match reply.outcome {
        Ok(Completion { status, .. }) if status.is_success() => Ok(reply),
        Ok(Completion { status, .. }) => Err(AdminError::Refused(status)),
        Err(lost) => Err(AdminError::Lost(lost)),
    }
}
