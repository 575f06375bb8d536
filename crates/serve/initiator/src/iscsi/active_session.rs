//! An established session: its connection, and the commands sent over it.

use std::cell::Cell;
use std::net::SocketAddr;
use std::time::Duration;

use ::iscsi::initiator::{
    Answer, AsyncNotification, Command, CompletedRequest, Completion, LostRequest, Payload, Request,
};
use ::iscsi::pdu::TaskOutcome;
use block::{Account, BufsMut, MemoryClass};
use scsi::{Address, Lun as Number};

use super::cdb::{self, Cdb};
use super::identity::{UnitDescription, UnitPages};
use super::link::{Link, SessionEnd};
use super::sense::{Sense, key};

/// SCSI statuses (SAM-5 5.3.1).
pub(super) mod status {
    pub(crate) const GOOD: u8 = 0x00;
    pub(crate) const CHECK_CONDITION: u8 = 0x02;
    pub(crate) const CONDITION_MET: u8 = 0x04;
    pub(crate) const BUSY: u8 = 0x08;
    pub(crate) const RESERVATION_CONFLICT: u8 = 0x18;
    pub(crate) const TASK_SET_FULL: u8 = 0x28;
    pub(crate) const ACA_ACTIVE: u8 = 0x30;
    pub(crate) const TASK_ABORTED: u8 = 0x40;
}

/// How often a query is repeated because the unit reported a unit attention instead.
const MAX_ATTENTIONS: usize = 16;

/// Bytes of the LUN list that are read at first, and at most.
const FIRST_LUN_LIST_BYTES: u32 = 4096;
pub(super) const MAX_LUN_LIST_BYTES: u32 = 8 + 8 * (Number::MAX as u32 + 1);

/// A SCSI status other than GOOD.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScsiFailure {
    /// SCSI status.
    pub status: u8,
    /// Its sense data.
    pub sense: Option<Sense>,
}

/// Why a query failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SessionError {
    /// The connection has ended.
    #[error("the connection has ended")]
    Lost(LostRequest),
    /// The target refused the command.
    #[error("the target answered {0:?}")]
    Refused(ScsiFailure),
    /// The target sent an invalid response.
    #[error("the target sent an invalid response: {0}")]
    InvalidResponse(&'static str),
    /// Out of memory.
    #[error("no memory for a command")]
    NoMemory,
}

/// Outcome of a command.
#[derive(Debug)]
pub(super) struct Reply {
    pub(super) outcome: Result<Completion, LostRequest>,
    pub(super) transferred: u32,
    pub(super) buffers: BufsMut,
}

impl Reply {
    fn of(done: Option<CompletedRequest>) -> Self {
        match done {
            Some(CompletedRequest {
                outcome: Ok(Answer::Scsi(completion)),
                transferred: moved,
                buffers,
                ..
            }) => Self { outcome: Ok(completion), transferred: moved, buffers },
            Some(CompletedRequest { outcome: Err(lost), transferred: moved, buffers, .. }) => {
                Self { outcome: Err(lost), transferred: moved, buffers }
            }
            Some(_) | None => {
                Self { outcome: Err(LostRequest::Unsent), transferred: 0, buffers: BufsMut::new() }
            }
        }
    }
}

/// The failure that a completion reports, if any.
pub(super) fn scsi_failure(completion: &Completion) -> ScsiFailure {
    ScsiFailure { status: completion.status, sense: Sense::parse(&completion.sense) }
}

/// Parses REPORT LUNS data (SPC-4 6.33); `None` if the list is longer than `room` bytes, where
/// `room` is below the maximum.
pub(super) fn parse_lun_list(list: &[u8], room: u32) -> Result<Option<Vec<u16>>, SessionError> {
    let Some((length, rest)) = list.split_first_chunk() else {
        return Err(SessionError::InvalidResponse("a truncated list of units"));
    };
    let length = u32::from_be_bytes(*length);
    if length > MAX_LUN_LIST_BYTES - 8 {
        return Err(SessionError::InvalidResponse("a list of units that is too long"));
    }
    if length + 8 > room {
        return Ok(None);
    }
    let entries = rest.get(4..).unwrap_or_default();
    let entries = &entries[..entries.len().min(length as usize)];
    let number = |entry: &[u8; 8]| match Address::parse(*entry) {
        Address::Unit(unit) => Some(unit.get()),
        Address::ReportLuns | Address::Unsupported => None,
    };
    let mut out: Vec<u16> = entries.as_chunks().0.iter().filter_map(number).collect();
    out.sort_unstable();
    out.dedup();
    Ok(Some(out))
}

/// An established session.
#[derive(Debug)]
pub(super) struct ActiveSession {
    link: Link,
    /// Address of the target, after all redirections.
    pub(super) address: SocketAddr,
    account: Account,
    timeout: Duration,
    /// How many unit attentions queries have received.
    attentions: Cell<u64>,
}

impl ActiveSession {
    /// The session of `link` with the target at `address`; each of its commands may take `timeout`.
    pub(super) fn new(
        link: Link,
        address: SocketAddr,
        account: Account,
        timeout: Duration,
    ) -> Self {
        Self { link, address, account, timeout, attentions: Cell::new(0) }
    }

    pub(super) fn is_up(&self) -> bool {
        self.link.is_open()
    }

    pub(super) async fn wait_end(&self) -> SessionEnd {
        self.link.wait_end().await
    }

    pub(super) fn close(&self) {
        self.link.close();
    }

    /// The next notification of the target.
    pub(super) async fn next_notification(&self) -> AsyncNotification {
        loop {
            if let Some(notice) = self.link.with(::iscsi::initiator::Connection::poll_notification)
            {
                return notice;
            }
            self.link.wait_notification().await;
        }
    }

    /// Sends a command and waits for its outcome.
    pub(super) async fn scsi(&self, unit: Number, cdb: Cdb, payload: Payload) -> Reply {
        Reply::of(self.link.submit(self.command(unit, cdb, payload)).await)
    }

    /// The same if `may` allows it once a slot is free; otherwise `None`.
    pub(super) async fn scsi_checked(
        &self,
        may: impl FnOnce() -> bool,
        (unit, cdb): (Number, Cdb),
        payload: impl FnOnce() -> Payload,
    ) -> Option<Reply> {
        let place = self.link.reserve().await;
        if !may() {
            return None;
        }
        let Some(place) = place else { return Some(Reply::of(None)) };
        Some(Reply::of(place.submit(self.command(unit, cdb, payload())).await))
    }

    fn command(&self, unit: Number, cdb: Cdb, payload: Payload) -> Command {
        let request = Request::Scsi { lun: unit.to_bytes(), cdb, payload };
        Command { request, timeout: Some(self.timeout) }
    }

    /// Sends a request that is no SCSI command.
    pub(super) async fn request(&self, request: Request) -> Result<Answer, SessionError> {
        let done =
            self.link.submit_unreserved(Command { request, timeout: Some(self.timeout) }).await;
        done.map_or(Err(LostRequest::Unsent), |done| done.outcome).map_err(SessionError::Lost)
    }

    /// LOGICAL UNIT RESET.
    pub(super) async fn reset(&self, unit: Number) -> Result<(), SessionError> {
        match self.request(Request::ResetUnit(unit.to_bytes())).await? {
            Answer::TaskManagement(TaskOutcome::Complete) => Ok(()),
            _ => Err(SessionError::InvalidResponse("the target did not reset a unit")),
        }
    }

    /// Logs out: the target forgets the session.
    pub(super) async fn log_out(&self) -> Result<(), SessionError> {
        self.request(Request::Logout).await.map(drop)
    }

    /// Sends a command that returns up to `length` bytes. Repeats it after unit attentions: callers
    /// read all of a unit's state anyway.
    ///
    /// The memory is of the class that may use the whole pool: operations that wait for a lost
    /// target hold memory, and this query is what brings the target back.
    pub(super) async fn fetch(
        &self,
        unit: Number,
        cdb: Cdb,
        length: usize,
    ) -> Result<Vec<u8>, SessionError> {
        let credit = self.account.credit(length, MemoryClass::LocalIo).await;
        let credit = credit.map_err(|_| SessionError::NoMemory)?;
        for _ in 0..MAX_ATTENTIONS {
            let payload =
                if length == 0 { Payload::None } else { Payload::ToHost(credit.alloc(length)) };
            let reply = self.scsi(unit, cdb, payload).await;
            let completion = reply.outcome.map_err(SessionError::Lost)?;
            if completion.response != 0 {
                return Err(SessionError::InvalidResponse("the session failed"));
            }
            let said = scsi_failure(&completion);
            let sense_key = said.sense.map(|s| s.key);
            match (completion.status, sense_key) {
                (status::GOOD, _) | (status::CHECK_CONDITION, Some(key::RECOVERED)) => {
                    let bytes = reply.buffers.iter().flat_map(|b| b.iter().copied());
                    return Ok(bytes.take(reply.transferred as usize).collect());
                }
                (status::CHECK_CONDITION, Some(key::UNIT_ATTENTION)) => {
                    self.attentions.update(|n| n + 1);
                }
                _ => return Err(SessionError::Refused(said)),
            }
        }
        Err(SessionError::InvalidResponse("a unit with too many redirected responses"))
    }

    /// The same for data that a unit may not have; then empty.
    async fn fetch_optional(
        &self,
        unit: Number,
        cdb: Cdb,
        length: usize,
    ) -> Result<Vec<u8>, SessionError> {
        match self.fetch(unit, cdb, length).await {
            Err(SessionError::Refused(refusal)) if is_unknown(&refusal) => Ok(Vec::new()),
            result => result,
        }
    }

    /// The units that this initiator may use, in order.
    pub(super) async fn luns(&self) -> Result<Vec<u16>, SessionError> {
        let mut room = FIRST_LUN_LIST_BYTES;
        loop {
            let list = self.fetch(Number::default(), cdb::report_luns(room), room as usize).await?;
            match parse_lun_list(&list, room)? {
                Some(units) => return Ok(units),
                None => room = MAX_LUN_LIST_BYTES,
            }
        }
    }

    /// Describes a unit; `None` if it does not exist or cannot be used. Repeats if the unit changes
    /// meanwhile.
    pub(super) async fn describe(
        &self,
        unit: Number,
    ) -> Result<Option<UnitDescription>, SessionError> {
        for _ in 0..MAX_ATTENTIONS {
            let (described, heard) = self.describe_once(unit).await?;
            if self.attentions.get() == heard {
                return Ok(described);
            }
        }
        Err(SessionError::InvalidResponse("a unit whose data keeps changing"))
    }

    /// Describes a unit once. Returns also the attention count from before anything that matters
    /// was read.
    async fn describe_once(
        &self,
        unit: Number,
    ) -> Result<(Option<UnitDescription>, u64), SessionError> {
        let inquiry = self.fetch_optional(unit, cdb::inquiry(None, 96), 96).await?;
        let pages = UnitPages { inquiry, ..UnitPages::default() };
        if !pages.is_disk() {
            return Ok((None, self.attentions.get()));
        }
        // READ CAPACITY receives the pending unit attentions.
        let capacity = self.fetch_optional(unit, cdb::read_capacity(32), 32).await?;
        let heard = self.attentions.get();
        let identification = self.page(unit, 0x83, 2048).await?;
        let limits = self.page(unit, 0xb0, 64).await?;
        let provisioning = self.page(unit, 0xb2, 64).await?;
        let caching = self.fetch_optional(unit, cdb::mode_sense(0x08, 192), 192).await?;
        let pages = UnitPages { capacity, identification, limits, provisioning, caching, ..pages };
        Ok((pages.describe(), heard))
    }

    async fn page(&self, unit: Number, page: u8, length: u16) -> Result<Vec<u8>, SessionError> {
        let bytes =
            self.fetch_optional(unit, cdb::inquiry(Some(page), length), length.into()).await?;
        // Some units return another page than the requested one.
        Ok(if bytes.get(1) == Some(&page) { bytes } else { Vec::new() })
    }

    /// Whether a unit reports a unit attention.
    pub(super) async fn has_changed(&self, unit: Number) -> bool {
        let reply = self.scsi(unit, cdb::TEST_UNIT_READY, Payload::None).await;
        let said = reply.outcome.as_ref().ok().map(scsi_failure);
        said.and_then(|said| said.sense).is_some_and(|sense| sense.key == key::UNIT_ATTENTION)
    }
}

/// Whether the refusal means that the command, a field or the unit does not exist.
fn is_unknown(refusal: &ScsiFailure) -> bool {
    refusal.sense.is_some_and(|sense| sense.key == key::ILLEGAL_REQUEST)
}
