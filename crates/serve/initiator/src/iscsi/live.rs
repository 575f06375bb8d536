//! A session that is up: its connection, and what is asked of units through it.

use std::cell::Cell;
use std::net::SocketAddr;
use std::time::Duration;

use ::iscsi::initiator::{Answer, Command, Completion, Done, Lost, Notice, Payload, Request};
use ::iscsi::pdu::TaskOutcome;
use block::{Account, BufsMut, Class};
use scsi::{Address, Lun as Number};

use super::cdb::{self, Cdb};
use super::connect::Connector;
use super::identity::{Described, Pages};
use super::link::{End, Link};
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

/// Times that a question is asked again because something else had to be said first.
const ATTENTIONS: usize = 16;

/// Bytes of a list of units that are read at first, and at most.
const LUNS_BYTES: u32 = 4096;
pub(super) const MOST_LUNS_BYTES: u32 = 8 + 8 * (Number::MAX as u32 + 1);

/// What a target has answered that is no success.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// SCSI status.
    pub status: u8,
    /// What its sense data says.
    pub sense: Option<Sense>,
}

/// Why a question has no answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Failed {
    /// The connection has ended.
    #[error("the connection has ended")]
    Lost(Lost),
    /// The target has refused it.
    #[error("the target answered {0:?}")]
    Refused(Refusal),
    /// The target makes no sense.
    #[error("the target makes no sense: {0}")]
    Nonsense(&'static str),
    /// There is no memory for it.
    #[error("no memory for a command")]
    NoMemory,
}

/// What has become of a command.
#[derive(Debug)]
pub(super) struct Reply {
    pub(super) outcome: Result<Completion, Lost>,
    pub(super) moved: u32,
    pub(super) buffers: BufsMut,
}

impl Reply {
    fn of(done: Option<Done>) -> Self {
        match done {
            Some(Done { outcome: Ok(Answer::Scsi(completion)), moved, buffers, .. }) => {
                Self { outcome: Ok(completion), moved, buffers }
            }
            Some(Done { outcome: Err(lost), moved, buffers, .. }) => {
                Self { outcome: Err(lost), moved, buffers }
            }
            Some(_) | None => {
                Self { outcome: Err(Lost::Unsent), moved: 0, buffers: BufsMut::new() }
            }
        }
    }
}

/// What a completion says that is no success.
pub(super) fn refusal(completion: &Completion) -> Refusal {
    Refusal { status: completion.status, sense: Sense::parse(&completion.sense) }
}

/// Reads what REPORT LUNS gives (SPC-4 6.33); `None` if all of it needs more than `room` bytes, which are fewer than the
/// most then.
pub(super) fn units(list: &[u8], room: u32) -> Result<Option<Vec<u16>>, Failed> {
    let Some((length, rest)) = list.split_first_chunk() else {
        return Err(Failed::Nonsense("a part of a list of units"));
    };
    let length = u32::from_be_bytes(*length);
    if length > MOST_LUNS_BYTES - 8 {
        return Err(Failed::Nonsense("a list of units without end"));
    }
    if length + 8 > room {
        return Ok(None);
    }
    let entries = rest.get(4..).unwrap_or_default();
    let entries = &entries[..entries.len().min(length as usize)];
    let number = |entry: &[u8; 8]| match Address::parse(*entry) {
        Address::Unit(unit) => Some(unit.get()),
        Address::ReportLuns | Address::Nowhere => None,
    };
    let mut out: Vec<u16> = entries.as_chunks().0.iter().filter_map(number).collect();
    out.sort_unstable();
    out.dedup();
    Ok(Some(out))
}

/// A session.
#[derive(Debug)]
pub(super) struct Live {
    link: Link,
    /// Where the target is, after all redirections.
    pub(super) at: SocketAddr,
    account: Account,
    timeout: Duration,
    /// How often a question has heard that something has changed.
    attentions: Cell<u64>,
}

impl Live {
    pub(super) fn new(link: Link, connector: &Connector, at: SocketAddr) -> Self {
        let timeout = connector.options.command_timeout;
        let (account, attentions) = (connector.account.clone(), Cell::new(0));
        Self { link, at, account, timeout, attentions }
    }

    pub(super) fn is_up(&self) -> bool {
        self.link.is_open()
    }

    pub(super) async fn ended(&self) -> End {
        self.link.ended().await
    }

    pub(super) fn close(&self) {
        self.link.close();
    }

    /// What the target tells by itself, next.
    pub(super) async fn notice(&self) -> Notice {
        loop {
            if let Some(notice) = self.link.with(::iscsi::initiator::Connection::poll_notice) {
                return notice;
            }
            self.link.news().await;
        }
    }

    /// Sends a command, and waits for its end.
    pub(super) async fn scsi(&self, unit: Number, cdb: Cdb, payload: Payload) -> Reply {
        Reply::of(self.link.submit(self.command(unit, cdb, payload)).await)
    }

    /// The same, if `may` says so when there is room for it; `None` where it does not.
    pub(super) async fn scsi_if(
        &self,
        may: impl FnOnce() -> bool,
        (unit, cdb): (Number, Cdb),
        payload: impl FnOnce() -> Payload,
    ) -> Option<Reply> {
        let place = self.link.place().await;
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

    /// Asks for what is no command.
    pub(super) async fn ask(&self, request: Request) -> Result<Answer, Failed> {
        let done = self.link.submit_now(Command { request, timeout: Some(self.timeout) }).await;
        done.map_or(Err(Lost::Unsent), |done| done.outcome).map_err(Failed::Lost)
    }

    /// LOGICAL UNIT RESET.
    pub(super) async fn reset(&self, unit: Number) -> Result<(), Failed> {
        match self.ask(Request::ResetUnit(unit.to_bytes())).await? {
            Answer::Managed(TaskOutcome::Complete) => Ok(()),
            _ => Err(Failed::Nonsense("it does not reset a unit")),
        }
    }

    /// Takes leave: the target forgets the session.
    pub(super) async fn log_out(&self) -> Result<(), Failed> {
        self.ask(Request::Logout).await.map(drop)
    }

    /// Sends a command that returns up to `length` bytes, and gives them. What a unit has to say first is
    /// heard and asked over: who asks looks at everything anyway.
    ///
    /// The memory is of the class that may use all of the pool: what waits for a target to come back holds
    /// memory, and this is what brings it back.
    pub(super) async fn fetch(
        &self,
        unit: Number,
        cdb: Cdb,
        length: usize,
    ) -> Result<Vec<u8>, Failed> {
        let credit = self.account.credit(length, Class::Immediate).await;
        let credit = credit.map_err(|_| Failed::NoMemory)?;
        for _ in 0..ATTENTIONS {
            let payload =
                if length == 0 { Payload::None } else { Payload::ToHost(credit.alloc(length)) };
            let reply = self.scsi(unit, cdb, payload).await;
            let completion = reply.outcome.map_err(Failed::Lost)?;
            if completion.response != 0 {
                return Err(Failed::Nonsense("it failed by itself"));
            }
            let said = refusal(&completion);
            let sense_key = said.sense.map(|s| s.key);
            match (completion.status, sense_key) {
                (status::GOOD, _) | (status::CHECK_CONDITION, Some(key::RECOVERED)) => {
                    let bytes = reply.buffers.iter().flat_map(|b| b.iter().copied());
                    return Ok(bytes.take(reply.moved as usize).collect());
                }
                (status::CHECK_CONDITION, Some(key::UNIT_ATTENTION)) => {
                    self.attentions.update(|n| n + 1);
                }
                _ => return Err(Failed::Refused(said)),
            }
        }
        Err(Failed::Nonsense("a unit that never comes to the point"))
    }

    /// The same, of what a unit may not have: nothing then.
    async fn perhaps(&self, unit: Number, cdb: Cdb, length: usize) -> Result<Vec<u8>, Failed> {
        match self.fetch(unit, cdb, length).await {
            Err(Failed::Refused(refusal)) if is_unknown(&refusal) => Ok(Vec::new()),
            result => result,
        }
    }

    /// The units that this initiator may use, in order.
    pub(super) async fn luns(&self) -> Result<Vec<u16>, Failed> {
        let mut room = LUNS_BYTES;
        loop {
            let list = self.fetch(Number::default(), cdb::report_luns(room), room as usize).await?;
            match units(&list, room)? {
                Some(units) => return Ok(units),
                None => room = MOST_LUNS_BYTES,
            }
        }
    }

    /// What a unit is; `None` for one that there is not, or that cannot be used. One that changes while it is looked at is
    /// looked at again.
    pub(super) async fn describe(&self, unit: Number) -> Result<Option<Described>, Failed> {
        for _ in 0..ATTENTIONS {
            let (described, heard) = self.look(unit).await?;
            if self.attentions.get() == heard {
                return Ok(described);
            }
        }
        Err(Failed::Nonsense("a unit that is never the same twice"))
    }

    /// The same by one look, and which attention was heard before what counts was asked.
    async fn look(&self, unit: Number) -> Result<(Option<Described>, u64), Failed> {
        let inquiry = self.perhaps(unit, cdb::inquiry(None, 96), 96).await?;
        let pages = Pages { inquiry, ..Pages::default() };
        if !pages.is_disk() {
            return Ok((None, self.attentions.get()));
        }
        // READ CAPACITY hears what the unit has to say first.
        let capacity = self.perhaps(unit, cdb::read_capacity(32), 32).await?;
        let heard = self.attentions.get();
        let identification = self.page(unit, 0x83, 2048).await?;
        let limits = self.page(unit, 0xb0, 64).await?;
        let provisioning = self.page(unit, 0xb2, 64).await?;
        let caching = self.perhaps(unit, cdb::mode_sense(0x08, 192), 192).await?;
        let pages = Pages { capacity, identification, limits, provisioning, caching, ..pages };
        Ok((pages.describe(), heard))
    }

    async fn page(&self, unit: Number, page: u8, length: u16) -> Result<Vec<u8>, Failed> {
        let bytes = self.perhaps(unit, cdb::inquiry(Some(page), length), length.into()).await?;
        // Some units answer with a page of their choice.
        Ok(if bytes.get(1) == Some(&page) { bytes } else { Vec::new() })
    }

    /// Whether a unit has something to say.
    pub(super) async fn has_changed(&self, unit: Number) -> bool {
        let reply = self.scsi(unit, cdb::TEST_UNIT_READY, Payload::None).await;
        let said = reply.outcome.as_ref().ok().map(refusal);
        said.and_then(|said| said.sense).is_some_and(|sense| sense.key == key::UNIT_ATTENTION)
    }
}

/// Whether the unit does not know what was asked, or is not there: an invalid command, or field, or unit.
fn is_unknown(refusal: &Refusal) -> bool {
    refusal.sense.is_some_and(|sense| sense.key == key::ILLEGAL_REQUEST)
}
