//! One connection: its machine and its commands in flight.

use std::cell::Cell;
use std::rc::{Rc, Weak};

use ::nbd::server::{Action, Answer, Command, Connection};
use ::nbd::{BlockStatusExtent, Errno, Tag};
use block::{
    Account, BlockStatus, Blocks, Bufs, Credit, Error, Info, Lba, MemoryClass, Request,
    RequestError,
};
use frame::Machine;
use rt::net::HangupMonitor;
use target::connection::{Inbox, Protocol};
use tokio::sync::Mutex;
use tokio::task::spawn_local;
use tokio::time::Instant;
use volume::Volume;

use crate::OutageSignal;

/// Most extents in one block status reply.
const MAX_RUNS: u16 = 64;

/// An event for a connection.
pub(super) enum Event {
    /// A command has completed.
    Done { tag: Tag, answer: Answer },
    /// Memory for the data of a write; `None` if that much can never be allocated.
    Memory { tag: Tag, bytes: u32, credit: Option<Credit> },
    /// The server stops.
    Stop,
}

/// The export that all sessions of a server share.
#[derive(Clone)]
pub(super) struct SharedExport {
    pub(super) volume: Rc<Volume>,
    /// Set when the volume is unreachable.
    pub(super) outage: OutageSignal,
    /// Held by a command that reads in several parts.
    pub(super) multipart_read_lock: Rc<Mutex<()>>,
}

/// A client's connection.
pub(super) struct Session {
    machine: Connection,
    export: SharedExport,
    inbox: Inbox<Event>,
    account: Account,
    export_chosen: Rc<Cell<bool>>,
    /// Dropped with the session, so that nothing keeps an ended connection open.
    line: Rc<HangupMonitor>,
    /// Whether the client was present at this wake-up, once checked.
    client_present: Cell<Option<bool>>,
}

/// Whether a client is present: its connection has not ended, not even behind unread data.
fn is_client_present(line: &Weak<HangupMonitor>) -> bool {
    line.upgrade().is_some_and(|line| !line.is_hung_up())
}

/// Whether a command changes data.
fn changes(command: &Command) -> bool {
    match command {
        Command::Write { .. } | Command::Trim { .. } | Command::WriteZeroes { .. } => true,
        Command::Read { .. } | Command::Flush | Command::BlockStatus { .. } => false,
    }
}

/// How a command is executed on the volume.
enum VolumePlan {
    /// One request.
    One(Request),
    /// A read that exceeds the volume's limit, and a write, in pieces of this many blocks.
    Read(Blocks, u64),
    Write(Lba, Bufs, bool, u64),
    /// Frees ranges, durably when answered.
    FreeAndFlush(Vec<Blocks>),
}

impl Session {
    pub(super) fn new(
        export: SharedExport,
        account: Account,
        machine: Connection,
        (inbox, line): (Inbox<Event>, HangupMonitor),
        chosen: Rc<Cell<bool>>,
    ) -> Self {
        Self {
            machine,
            export,
            inbox,
            account,
            export_chosen: chosen,
            line: Rc::new(line),
            client_present: Cell::new(None),
        }
    }

    /// Why its machine ended, for the log.
    pub(super) fn end(&self) -> Option<String> {
        self.machine.close_reason().map(|end| end.to_string())
    }

    /// Requests memory for the data of a write, before any of it is received.
    fn request_memory(&mut self, tag: Tag, bytes: u32) {
        match self.account.try_credit(bytes as usize, MemoryClass::UnsolicitedData) {
            Some(credit) => self.machine.grant(tag, credit.alloc(bytes as usize)),
            None => {
                let (account, inbox) = (self.account.clone(), self.inbox.clone());
                spawn_local(async move {
                    let credit =
                        account.credit(bytes as usize, MemoryClass::UnsolicitedData).await.ok();
                    inbox.push(Event::Memory { tag, bytes, credit });
                });
            }
        }
    }

    /// Whether the client is present; checked once per wake-up, during which no other task runs.
    fn is_client_present(&self) -> bool {
        let there = self.client_present.get().unwrap_or_else(|| !self.line.is_hung_up());
        self.client_present.set(Some(there));
        there
    }

    fn start(&self, tag: Tag, command: Command) {
        if changes(&command) && !self.is_client_present() {
            // The client may have reconnected and written newer data there.
            return self.inbox.evict();
        }
        let volume = &self.export.volume;
        let (info, kind) = (volume.info(), AnswerKind::of(&command));
        let (inbox, absence) = (self.inbox.clone(), self.export.outage.clone());
        let answering = PendingAnswer { inbox, tag, outage: absence, answer: None };
        match plan(command, &info) {
            VolumePlan::One(request) => {
                let done = move |result| answering.complete(kind, result, info.block_size);
                volume.start(request, &self.account, done);
            }
            pieces => {
                let (volume, account) = (Rc::clone(volume), self.account.clone());
                let one_by_one = Rc::clone(&self.export.multipart_read_lock);
                let line = Rc::downgrade(&self.line);
                spawn_local(async move {
                    let result =
                        execute_multipart(&volume, pieces, &account, (&one_by_one, &line)).await;
                    answering.complete(kind, result, info.block_size);
                });
            }
        }
    }
}

impl Protocol for Session {
    type Machine = Connection;
    type Event = Event;

    fn machine(&mut self) -> &mut Connection {
        &mut self.machine
    }

    /// A client sends no keep-alive; but a closed connection can be seen (RFD 0025, 7).
    fn on_wake(&mut self, _: Instant) {
        self.client_present.set(None);
    }

    fn act(&mut self) {
        while let Some(action) = self.machine.poll_action() {
            match action {
                Action::Grant { tag, bytes } => self.request_memory(tag, bytes),
                Action::Run { tag, command, .. } => self.start(tag, command),
            }
        }
        if !self.export_chosen.get() && self.machine.export().is_some() {
            self.export_chosen.set(true);
        }
    }

    fn on_event(&mut self, event: Event) {
        match event {
            Event::Done { tag, answer } => self.machine.answer(tag, answer),
            Event::Memory { tag, bytes, credit: Some(credit) } => {
                self.machine.grant(tag, credit.alloc(bytes as usize));
            }
            Event::Memory { tag, credit: None, .. } => self.machine.refuse(tag, Errno::NoMem),
            Event::Stop => {
                self.machine.shut_down();
                if self.machine.export().is_none() && !self.machine.is_closing() {
                    // No request is in flight that could be completed.
                    self.machine.close();
                }
            }
        }
    }
}

/// A command in flight. It is answered exactly once: if it ends otherwise, by a panic in a layer,
/// with an error. If the volume is unreachable, its connection ends instead.
struct PendingAnswer {
    inbox: Inbox<Event>,
    tag: Tag,
    outage: OutageSignal,
    answer: Option<Answer>,
}

impl PendingAnswer {
    fn complete(mut self, kind: AnswerKind, result: Result<Bufs, RequestError>, block_size: u32) {
        if result.as_ref().is_err_and(|failure| self.outage.set_if_cause(failure)) {
            // The rest of the inbox of such a connection is ignored.
            self.inbox.evict();
        }
        self.answer = Some(kind.answer(result, block_size));
    }
}

impl Drop for PendingAnswer {
    fn drop(&mut self) {
        let answer = self.answer.take().unwrap_or(Answer::Failed(Errno::Io));
        self.inbox.push(Event::Done { tag: self.tag, answer });
    }
}

/// The form of a command's answer.
#[derive(Clone, Copy)]
enum AnswerKind {
    Data,
    Extents,
    Nothing,
}

impl AnswerKind {
    fn of(command: &Command) -> Self {
        match command {
            Command::Read { .. } => Self::Data,
            Command::BlockStatus { .. } => Self::Extents,
            Command::Write { .. }
            | Command::Flush
            | Command::Trim { .. }
            | Command::WriteZeroes { .. } => Self::Nothing,
        }
    }

    fn answer(self, result: Result<Bufs, RequestError>, block_size: u32) -> Answer {
        let data = match result {
            Ok(data) => data,
            Err(RequestError::Device(error)) => {
                return Answer::Failed(Errno::from_block_error(error));
            }
            Err(
                RequestError::Miscompare { .. }
                | RequestError::ReservationConflict
                | RequestError::NoMemory,
            ) => {
                return Answer::Failed(Errno::Io);
            }
        };
        match self {
            Self::Data => Answer::Data(data),
            Self::Extents => extents(&BlockStatus::from_bufs(&data), block_size),
            Self::Nothing => Answer::Done,
        }
    }
}

fn plan(command: Command, info: &Info) -> VolumePlan {
    let block_size = u64::from(info.block_size);
    let most = u64::from(info.max_transfer_blocks);
    // The machine has checked that both are whole blocks.
    let at = |byte: u64| Lba(byte / block_size);
    let blocks = |byte: u64, len: u32| Blocks::new(at(byte), u64::from(len) / block_size);
    match command {
        Command::Read { at, len } => {
            let range = blocks(at, len);
            if range.count <= most {
                VolumePlan::One(Request::Read { range })
            } else {
                VolumePlan::Read(range, most)
            }
        }
        Command::Write { at: byte, data, fua } => {
            let at = at(byte);
            if data.len() as u64 / block_size <= most {
                return VolumePlan::One(Request::Write { at, data, fua });
            }
            VolumePlan::Write(at, data, fua, most)
        }
        Command::Flush => VolumePlan::One(Request::Flush),
        Command::Trim { at, len, fua: true } => VolumePlan::FreeAndFlush(vec![blocks(at, len)]),
        Command::Trim { at, len, fua: false } => {
            VolumePlan::One(Request::Unmap { ranges: vec![blocks(at, len)] })
        }
        Command::WriteZeroes { at, len, hole: unmap, fua } => {
            VolumePlan::One(Request::Zero { range: blocks(at, len), unmap, fua })
        }
        Command::BlockStatus { at, len, one } => {
            let most = if one { 1 } else { MAX_RUNS };
            VolumePlan::One(Request::BlockStatus { range: blocks(at, len), max_runs: most })
        }
    }
}

/// Executes a command that needs several requests. Not atomic: another command may see or overwrite
/// a part of it.
async fn execute_multipart(
    volume: &Rc<Volume>,
    plan: VolumePlan,
    account: &Account,
    (one_by_one, line): (&Mutex<()>, &Weak<HangupMonitor>),
) -> Result<Bufs, RequestError> {
    match plan {
        VolumePlan::One(request) => volume.execute(request, account).await,
        VolumePlan::FreeAndFlush(ranges) => {
            volume.execute(Request::Unmap { ranges }, account).await?;
            volume.execute(Request::Flush, account).await
        }
        VolumePlan::Read(range, most) => {
            // Pieces read are kept while others wait for memory: two such commands could deadlock.
            let _turn = one_by_one.lock().await;
            let mut out = Bufs::new();
            for range in range.chunks(most) {
                out.append(volume.execute(Request::Read { range }, account).await?);
            }
            Ok(out)
        }
        VolumePlan::Write(at, data, fua, most) => {
            let block_size = volume.info().block_size as usize;
            let whole = Blocks::new(at, (data.len() / block_size) as u64);
            let (mut done, mut rest) = (Bufs::new(), 0);
            for range in whole.chunks(most) {
                // A client that lost its connection may have reconnected and written newer data
                // that this would overwrite.
                if !is_client_present(line) {
                    return Err(Error::Aborted.into());
                }
                let end = rest + usize::try_from(range.count).unwrap_or(0) * block_size;
                let write = Request::Write { at: range.at, data: data.slice(rest..end), fua };
                done = volume.execute(write, account).await?;
                rest = end;
            }
            Ok(done)
        }
    }
}

fn extents(runs: &[BlockStatus], block_size: u32) -> Answer {
    if runs.is_empty() {
        return Answer::Failed(Errno::from_block_error(Error::OutOfRange));
    }
    let extent = |run: &BlockStatus| {
        let hole = !run.mapped;
        BlockStatusExtent { bytes: run.blocks.saturating_mul(block_size), hole, zero: hole }
    };
    Answer::Extents(runs.iter().map(extent).collect())
}
