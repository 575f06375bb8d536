//! One connection: its machine, and its commands on their way to the device and back.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

use ::nbd::server::{Action, Answer, Command, Connection};
use ::nbd::{Errno, Extent, Tag};
use block::{Account, Blocks, Class, Credit, Error, Lba, Run};
use frame::Machine;
use target::conn::{Inbox, Protocol};
use tokio::task::spawn_local;

use super::server::Shared;
use crate::Ordered;

/// Longest read or write that begins where it arrives, in bytes; whatever takes longer is a task.
const SHORT_BYTES: u64 = 64 << 10;

/// Looks at what has space that one block status takes at most.
const LOOKS: usize = 64;

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
}

impl Session {
    pub(super) fn new(
        shared: &Rc<Shared>,
        machine: Connection,
        inbox: Inbox<Event>,
        chosen: Rc<Cell<bool>>,
    ) -> Self {
        let account = shared.core.pool().account();
        Self { machine, shared: Rc::clone(shared), inbox, account, chosen }
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

    fn start(&self, tag: Tag, command: Command) {
        let short = is_short(&command);
        let running = Running::new(self, tag);
        let (disk, account) = (Rc::clone(&self.shared.disk), self.account.clone());
        // In a box, for the future is moved, and not small.
        let mut work = Box::pin(async move {
            let answer = carry_out(&disk, command, &account).await;
            drop(account);
            running.answer(answer);
        });
        if !short || begin(work.as_mut()).is_pending() {
            spawn_local(work);
        }
    }
}

impl Protocol for Session {
    type Machine = Connection;
    type Event = Event;

    fn machine(&mut self) -> &mut Connection {
        &mut self.machine
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
/// failed.
struct Running {
    shared: Rc<Shared>,
    inbox: Inbox<Event>,
    tag: Tag,
    answer: Option<Answer>,
}

impl Running {
    fn new(session: &Session, tag: Tag) -> Self {
        session.shared.running.update(|n| n + 1);
        let (shared, inbox) = (Rc::clone(&session.shared), session.inbox.clone());
        Self { shared, inbox, tag, answer: None }
    }

    fn answer(mut self, answer: Answer) {
        self.answer = Some(answer);
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let answer = self.answer.take().unwrap_or(Answer::Failed(Errno::Io));
        self.inbox.push(Event::Done { tag: self.tag, answer });
        self.shared.running.update(|n| n - 1);
        if self.shared.running.get() == 0 {
            self.shared.ended.notify_waiters();
        }
    }
}

fn is_short(command: &Command) -> bool {
    match command {
        Command::Read { len, .. } => u64::from(*len) <= SHORT_BYTES,
        Command::Write { data, .. } => data.len() as u64 <= SHORT_BYTES,
        Command::Flush
        | Command::Trim { .. }
        | Command::WriteZeroes { .. }
        | Command::BlockStatus { .. } => false,
    }
}

/// Carries a command as far as it gets at once: to its end where memory answers, which saves it a task. Nobody
/// is woken for it: the task that goes on with it looks again first. A panic ends it as it ends a task.
fn begin(work: Pin<&mut impl Future<Output = ()>>) -> Poll<()> {
    let poll = AssertUnwindSafe(|| work.poll(&mut Context::from_waker(Waker::noop())));
    catch_unwind(poll).unwrap_or(Poll::Ready(()))
}

async fn carry_out(disk: &Ordered, command: Command, account: &Account) -> Answer {
    let block_size = u64::from(disk.info().block_size);
    // The machine has seen to it that both are whole blocks.
    let blocks = |at: u64, len: u32| Blocks::new(Lba(at / block_size), u64::from(len) / block_size);
    let done = match command {
        Command::Read { at, len } => {
            return disk.read(blocks(at, len), account).await.map_or_else(failed, Answer::Data);
        }
        Command::BlockStatus { at, len, one } => {
            let runs = disk.map(blocks(at, len), if one { 1 } else { LOOKS }, account).await;
            return runs.map_or_else(failed, |runs| extents(&runs, disk.info().block_size));
        }
        Command::Write { at, data, fua } => {
            disk.write(Lba(at / block_size), data, fua, account).await
        }
        Command::Flush => disk.flush(account).await,
        Command::Trim { at, len, fua } => match disk.unmap(blocks(at, len), account).await {
            Ok(()) if fua => disk.flush(account).await,
            done => done,
        },
        Command::WriteZeroes { at, len, hole, fua } => {
            disk.zero(blocks(at, len), hole, fua, account).await
        }
    };
    done.map_or_else(failed, |()| Answer::Done)
}

fn failed(error: Error) -> Answer {
    Answer::Failed(Errno::of(error))
}

fn extents(runs: &[Run], block_size: u32) -> Answer {
    let extent = |run: &Run| {
        let hole = !run.mapped;
        Extent { bytes: run.blocks.saturating_mul(block_size), hole, zero: hole }
    };
    Answer::Extents(runs.iter().map(extent).collect())
}
