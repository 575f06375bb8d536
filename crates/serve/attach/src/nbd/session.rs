//! One connection: its machine, and its commands on their way to the volume and back.

use std::cell::Cell;
use std::rc::{Rc, Weak};

use ::nbd::server::{Action, Answer, Command, Connection};
use ::nbd::{Errno, Extent, Tag};
use block::{Account, Blocks, Bufs, Class, Credit, Error, Failure, Info, Lba, Request, Run};
use frame::Machine;
use rt::net::Line;
use target::conn::{Inbox, Protocol};
use tokio::sync::Mutex;
use tokio::task::spawn_local;
use tokio::time::Instant;
use volume::Volume;

use super::server::Shared;
use crate::Absence;

/// Most runs that one block status tells of.
const MOST_RUNS: u16 = 64;

/// What comes to a connection from elsewhere.
pub(super) enum Event {
    /// A command has ended.
    Done { tag: Tag, answer: Answer },
    /// Memory for the data of a write, or none: there can never be as much.
    Memory { tag: Tag, bytes: u32, credit: Option<Credit> },
    /// The server is to stop.
    Stop,
}

/// One connection of a client.
pub(super) struct Session {
    machine: Connection,
    shared: Rc<Shared>,
    inbox: Inbox<Event>,
    account: Account,
    chosen: Rc<Cell<bool>>,
    /// Goes with this, so that nothing keeps a connection open that has ended.
    line: Rc<Line>,
    /// Whether its client was there at this wake-up, if anybody has looked.
    there: Cell<Option<bool>>,
}

/// Whether a client is there: its connection has not ended, and its end does not wait behind what has not been read.
fn is_there(line: &Weak<Line>) -> bool {
    line.upgrade().is_some_and(|line| !line.is_cut())
}

/// Whether a command changes the export.
fn changes(command: &Command) -> bool {
    match command {
        Command::Write { .. } | Command::Trim { .. } | Command::WriteZeroes { .. } => true,
        Command::Read { .. } | Command::Flush | Command::BlockStatus { .. } => false,
    }
}

/// What a command is to the volume.
enum Plan {
    /// One request.
    One(Request),
    /// A read of more than the volume takes at once, and a write, in pieces of so many blocks.
    Read(Blocks, u64),
    Write(Lba, Bufs, bool, u64),
    /// What is freed is durable when it is answered.
    FreeAndFlush(Vec<Blocks>),
}

impl Session {
    pub(super) fn new(
        shared: &Rc<Shared>,
        machine: Connection,
        (inbox, line): (Inbox<Event>, Line),
        chosen: Rc<Cell<bool>>,
    ) -> Self {
        let account = shared.core.pool().account();
        Self {
            machine,
            shared: Rc::clone(shared),
            inbox,
            account,
            chosen,
            line: Rc::new(line),
            there: Cell::new(None),
        }
    }

    /// Why its machine has ended, for the log.
    pub(super) fn end(&self) -> Option<String> {
        self.machine.end().map(|end| end.to_string())
    }

    /// Memory for the data of a write, before any of it is received.
    fn provide(&mut self, tag: Tag, bytes: u32) {
        match self.account.try_credit(bytes as usize, Class::Arriving) {
            Some(credit) => self.machine.grant(tag, credit.alloc(bytes as usize)),
            None => {
                let (account, inbox) = (self.account.clone(), self.inbox.clone());
                spawn_local(async move {
                    let credit = account.credit(bytes as usize, Class::Arriving).await.ok();
                    inbox.push(Event::Memory { tag, bytes, credit });
                });
            }
        }
    }

    /// Whether the client is there; asked once a wake-up, in which nobody else has a turn.
    fn is_there(&self) -> bool {
        let there = self.there.get().unwrap_or_else(|| !self.line.is_cut());
        self.there.set(Some(there));
        there
    }

    fn start(&self, tag: Tag, command: Command) {
        if changes(&command) && !self.is_there() {
            // It may have come back, and have written something newer there.
            return self.inbox.evict();
        }
        let volume = &self.shared.volume;
        let (info, kind) = (volume.info(), Kind::of(&command));
        let (inbox, absence) = (self.inbox.clone(), self.shared.absence.clone());
        let answering = Answering { inbox, tag, absence, answer: None };
        match plan(command, &info) {
            Plan::One(request) => {
                let done = move |result| answering.with(kind, result, info.block_size);
                volume.start(request, &self.account, done);
            }
            pieces => {
                let (volume, account) = (Rc::clone(volume), self.account.clone());
                let one_by_one = Rc::clone(&self.shared.one_by_one);
                let line = Rc::downgrade(&self.line);
                spawn_local(async move {
                    let result = carry_out(&volume, pieces, &account, (&one_by_one, &line)).await;
                    answering.with(kind, result, info.block_size);
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

    /// A client says nothing by which it could be missed; but where it has closed its end, that can be seen (RFD 0025, 7).
    fn woken(&mut self, _: Instant) {
        self.there.set(None);
    }

    fn act(&mut self) {
        while let Some(action) = self.machine.poll_action() {
            match action {
                Action::Grant { tag, bytes } => self.provide(tag, bytes),
                Action::Run { tag, command, .. } => self.start(tag, command),
            }
        }
        if !self.chosen.get() && self.machine.export().is_some() {
            self.chosen.set(true);
        }
    }

    fn event(&mut self, event: Event) {
        match event {
            Event::Done { tag, answer } => self.machine.answer(tag, answer),
            Event::Memory { tag, bytes, credit: Some(credit) } => {
                self.machine.grant(tag, credit.alloc(bytes as usize));
            }
            Event::Memory { tag, credit: None, .. } => self.machine.refuse(tag, Errno::NoMem),
            Event::Stop => {
                self.machine.shut_down();
                if self.machine.export().is_none() && !self.machine.is_closing() {
                    // Nothing has begun that could be brought to its end.
                    self.machine.close();
                }
            }
        }
    }
}

/// A command that has begun. It is answered exactly once: one that ends otherwise, by a panic in a layer, has
/// failed. Where the volume is out of reach its connection ends instead.
struct Answering {
    inbox: Inbox<Event>,
    tag: Tag,
    absence: Absence,
    answer: Option<Answer>,
}

impl Answering {
    fn with(mut self, kind: Kind, result: Result<Bufs, Failure>, block_size: u32) {
        if result.as_ref().is_err_and(|failure| self.absence.explains(failure)) {
            // What is left in the inbox of such a connection is not looked at any more.
            self.inbox.evict();
        }
        self.answer = Some(kind.answer(result, block_size));
    }
}

impl Drop for Answering {
    fn drop(&mut self) {
        let answer = self.answer.take().unwrap_or(Answer::Failed(Errno::Io));
        self.inbox.push(Event::Done { tag: self.tag, answer });
    }
}

/// What a command is answered with.
#[derive(Clone, Copy)]
enum Kind {
    Data,
    Extents,
    Nothing,
}

impl Kind {
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

    fn answer(self, result: Result<Bufs, Failure>, block_size: u32) -> Answer {
        let data = match result {
            Ok(data) => data,
            Err(Failure::Device(error)) => return Answer::Failed(Errno::of(error)),
            Err(Failure::Miscompare { .. } | Failure::Conflict | Failure::Busy) => {
                return Answer::Failed(Errno::Io);
            }
        };
        match self {
            Self::Data => Answer::Data(data),
            Self::Extents => extents(&Run::all_of(&data), block_size),
            Self::Nothing => Answer::Done,
        }
    }
}

fn plan(command: Command, info: &Info) -> Plan {
    let block_size = u64::from(info.block_size);
    let most = u64::from(info.max_transfer_blocks);
    // The machine has seen to it that both are whole blocks.
    let at = |byte: u64| Lba(byte / block_size);
    let blocks = |byte: u64, len: u32| Blocks::new(at(byte), u64::from(len) / block_size);
    match command {
        Command::Read { at, len } => {
            let range = blocks(at, len);
            if range.count <= most {
                Plan::One(Request::Read { range })
            } else {
                Plan::Read(range, most)
            }
        }
        Command::Write { at: byte, data, fua } => {
            let at = at(byte);
            if data.len() as u64 / block_size <= most {
                return Plan::One(Request::Write { at, data, fua });
            }
            Plan::Write(at, data, fua, most)
        }
        Command::Flush => Plan::One(Request::Flush),
        Command::Trim { at, len, fua: true } => Plan::FreeAndFlush(vec![blocks(at, len)]),
        Command::Trim { at, len, fua: false } => {
            Plan::One(Request::Unmap { ranges: vec![blocks(at, len)] })
        }
        Command::WriteZeroes { at, len, hole: unmap, fua } => {
            Plan::One(Request::Zero { range: blocks(at, len), unmap, fua })
        }
        Command::BlockStatus { at, len, one } => {
            let most = if one { 1 } else { MOST_RUNS };
            Plan::One(Request::Map { range: blocks(at, len), most })
        }
    }
}

/// Carries out what is more than one request. It is not done as one: another command may see, or overwrite, a part of
/// it.
async fn carry_out(
    volume: &Rc<Volume>,
    plan: Plan,
    account: &Account,
    (one_by_one, line): (&Mutex<()>, &Weak<Line>),
) -> Result<Bufs, Failure> {
    match plan {
        Plan::One(request) => volume.execute(request, account).await,
        Plan::FreeAndFlush(ranges) => {
            volume.execute(Request::Unmap { ranges }, account).await?;
            volume.execute(Request::Flush, account).await
        }
        Plan::Read(range, most) => {
            // Pieces that have come are kept while others wait for memory: two such commands could wait for each other.
            let _turn = one_by_one.lock().await;
            let mut out = Bufs::new();
            for range in range.pieces(most) {
                out.append(volume.execute(Request::Read { range }, account).await?);
            }
            Ok(out)
        }
        Plan::Write(at, data, fua, most) => {
            let block_size = volume.info().block_size as usize;
            let whole = Blocks::new(at, (data.len() / block_size) as u64);
            let (mut done, mut rest) = (Bufs::new(), 0);
            for range in whole.pieces(most) {
                // A client that has lost its connection may be back, and have written something newer behind this.
                if !is_there(line) {
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

fn extents(runs: &[Run], block_size: u32) -> Answer {
    if runs.is_empty() {
        return Answer::Failed(Errno::of(Error::OutOfRange));
    }
    let extent = |run: &Run| {
        let hole = !run.mapped;
        Extent { bytes: run.blocks.saturating_mul(block_size), hole, zero: hole }
    };
    Answer::Extents(runs.iter().map(extent).collect())
}
