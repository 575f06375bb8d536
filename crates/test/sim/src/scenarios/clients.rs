//! Clients of a volume whose commands overlap, and what is demanded of the volume in the end.
//!
//! The register checker knows of each command when it began and how it ended and judges every
//! read; a tally that clients raise by COMPARE AND WRITE must in the end have counted every success
//! once.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

use block::testing::register::{Checker, Initially, Loss, Outcome, Ticket};
use block::{Account, Blocks, Bufs, Class, Error, Failure, Lba, Request, Run};
use rt::Core;
use rt::buf::copy_in;
use rt::sim::{Rng, World};
use tokio::sync::oneshot;
use volume::Volume;

use super::storage::memory_is_back;

/// Clients at once.
const CLIENTS: u64 = 6;

/// Commands of each client in the last round.
const LAST_ROUND: usize = 25;

/// How long a command may still be carried out by others when its node has given it up.
const DOUBT: Duration = Duration::from_secs(30);

/// Blocks at the start that hold the tally and nothing else.
const TALLY: u64 = 1;

/// What all clients of a world share.
pub(super) struct Shared {
    checker: RefCell<Checker>,
    rng: Rng,
    /// Times the tally was raised for sure, and times nobody knows.
    raised: Cell<u64>,
    perhaps: Cell<u64>,
    /// Commands that may yet be carried out, and since when.
    doubtful: RefCell<Vec<(Duration, Ticket)>>,
    world: World,
    violation: RefCell<Option<String>>,
    errors: RefCell<Vec<Error>>,
    /// Told of every crash.
    crashed: RefCell<Option<Watcher>>,
}

type Watcher = Box<dyn Fn(Loss)>;

impl Shared {
    pub(super) fn new(world: &World, block_size: u32) -> Rc<Self> {
        Rc::new(Self {
            checker: RefCell::new(Checker::new(1, block_size, Initially::Zeroes)),
            rng: Rng::new(world.seed(), "clients"),
            raised: Cell::new(0),
            perhaps: Cell::new(0),
            doubtful: RefCell::default(),
            world: world.clone(),
            violation: RefCell::default(),
            errors: RefCell::default(),
            crashed: RefCell::default(),
        })
    }

    /// Has `told` told of every crash.
    pub(super) fn on_crash(&self, told: impl Fn(Loss) + 'static) {
        self.crashed.replace(Some(Box::new(told)));
    }

    /// The clients are gone, with their host.
    pub(super) fn crash(&self, loss: Loss) {
        self.checker.borrow_mut().crash(loss);
        if let Some(told) = &*self.crashed.borrow() {
            told(loss);
        }
    }

    /// What nobody has heard of for so long has happened by now, or never will.
    pub(super) fn settle_doubts(&self) {
        let before = self.world.now().saturating_sub(DOUBT);
        let (old, new): (Vec<_>, Vec<_>) =
            self.doubtful.take().into_iter().partition(|(since, _)| *since < before);
        self.doubtful.replace(new);
        let mut checker = self.checker.borrow_mut();
        old.into_iter().for_each(|(_, ticket)| checker.end(ticket, Outcome::Failed));
    }

    fn doubt(&self, ticket: Ticket) {
        self.doubtful.borrow_mut().push((self.world.now(), ticket));
    }

    /// Blocks that were damaged on purpose.
    pub(super) fn damaged(&self, range: Blocks) {
        self.checker.borrow_mut().damaged(range);
    }

    /// What was noticed so far.
    pub(super) fn verdict(&self) -> Result<(), String> {
        self.violation.borrow_mut().take().map_or(Ok(()), Err)
    }
}

/// Clients at work on a volume until their host crashes.
pub(super) fn load(core: &Core, volume: &Rc<Volume>, shared: &Rc<Shared>) {
    for _ in 0..CLIENTS {
        let client = Client::new(core, volume, shared);
        tokio::task::spawn_local(async move {
            loop {
                client.command().await;
            }
        });
    }
}

/// Without faults: every command ends well, the tally is right, every block holds what it may, and
/// all memory comes back. The volume is closed then.
pub(super) async fn finish(
    core: &Core,
    volume: Rc<Volume>,
    shared: &Rc<Shared>,
) -> Result<(), String> {
    check(core, &volume, shared).await?;
    let account = core.pool().account();
    volume.close(&account).await.map_err(|e| format!("close: {e}"))?;
    drop((volume, account));
    memory_is_back(core.pool())
}

/// Without faults: every command ends well, the tally is right, every block holds what it may.
pub(super) async fn check(
    core: &Core,
    volume: &Rc<Volume>,
    shared: &Rc<Shared>,
) -> Result<(), String> {
    shared.errors.take();
    let checking = Client::new(core, volume, shared);
    checking.audit().await;
    let before = checking.read_tally().await.map_err(|e| format!("tally: {e}"))?;
    shared.raised.set(0);
    shared.perhaps.set(0);
    let clients: Vec<_> = (0..CLIENTS)
        .map(|_| {
            let client = Client::new(core, volume, shared);
            tokio::task::spawn_local(async move {
                for _ in 0..LAST_ROUND {
                    client.command().await;
                }
            })
        })
        .collect();
    for client in clients {
        client.await.map_err(|e| e.to_string())?;
    }
    let counted = checking.read_tally().await.map_err(|e| format!("tally: {e}"))? - before;
    let (raised, perhaps) = (shared.raised.get(), shared.perhaps.get());
    if !(raised..=raised + perhaps).contains(&counted) {
        return Err(format!("the tally counted {counted}: {raised} successes, {perhaps} unknown"));
    }
    checking.audit().await;
    let error = shared.errors.borrow().first().copied();
    error.map_or(Ok(()), |error| Err(format!("without faults: {error}")))
}

/// One client: one command at a time.
pub(super) struct Client {
    volume: Rc<Volume>,
    account: Account,
    shared: Rc<Shared>,
    /// What it has begun and not heard of.
    open: RefCell<Vec<Ticket>>,
    raising: Cell<bool>,
}

impl Client {
    pub(super) fn new(core: &Core, volume: &Rc<Volume>, shared: &Rc<Shared>) -> Self {
        let account = core.pool().account();
        let (open, raising) = (RefCell::default(), Cell::default());
        Self { volume: Rc::clone(volume), account, shared: Rc::clone(shared), open, raising }
    }

    /// It dies with its host, while others go on: what it has begun may happen or not.
    pub(super) fn abandon(&self) {
        self.open.take().into_iter().for_each(|t| self.shared.doubt(t));
        if self.raising.replace(false) {
            self.shared.perhaps.update(|n| n + 1);
        }
    }

    /// A command begins.
    fn begin(&self, begin: impl FnOnce(&mut Checker) -> Ticket) -> Ticket {
        let ticket = begin(&mut self.shared.checker.borrow_mut());
        self.open.borrow_mut().push(ticket);
        ticket
    }

    /// A command has ended.
    fn close(&self, ticket: Ticket) {
        self.open.borrow_mut().retain(|t| *t != ticket);
    }

    /// Reads everything.
    pub(super) async fn audit(&self) {
        let blocks = self.volume.info().blocks;
        for at in (TALLY..blocks).step_by(8) {
            // What could not be read is among the errors.
            let _ = self.read(Blocks::new(Lba(at), 8.min(blocks - at)), false).await;
        }
    }

    /// Writes what nobody can read any more.
    pub(super) async fn mend(&self) {
        let blocks = self.volume.info().blocks;
        for at in (TALLY..blocks).step_by(8) {
            let range = Blocks::new(Lba(at), 8.min(blocks - at));
            if self.read(range, false).await.is_err() {
                self.write(range, false).await;
            }
        }
    }

    /// Reads one block.
    pub(super) async fn read_block(&self, block: u64) -> Result<(), Failure> {
        self.read(Blocks::new(Lba(block), 1), false).await
    }

    /// Writes one block.
    pub(super) async fn write_block(&self, block: u64) {
        self.write(Blocks::new(Lba(block), 1), false).await;
    }

    /// Reads something, and goes on doing so where writes would wait.
    pub(super) async fn look(&self) {
        let _ = self.read(self.range(), false).await;
        let rng = &self.shared.rng;
        tokio::time::sleep(rng.time(Duration::ZERO, Duration::from_millis(100))).await;
    }

    fn block_size(&self) -> usize {
        self.volume.info().block_size as usize
    }

    /// A range in which clients meet often.
    fn range(&self) -> Blocks {
        let (rng, blocks) = (&self.shared.rng, self.volume.info().blocks);
        let count = if rng.chance(0.1) { rng.between(1, 40) } else { rng.between(1, 6) };
        let count = count.min(blocks - TALLY);
        Blocks::new(Lba(rng.between(TALLY, blocks - count)), count)
    }

    /// A command at random.
    pub(super) async fn command(&self) {
        let (rng, range) = (&self.shared.rng, self.range());
        let fua = rng.chance(0.2);
        match rng.below(20) {
            0..5 => drop(self.read(range, true).await),
            5..11 => self.write(range, fua).await,
            11 => {
                self.change(
                    range,
                    |c| c.begin_zero(range, fua),
                    |_, _| Request::Zero { range, unmap: fua, fua },
                )
                .await;
            }
            12 | 13 => self.unmap().await,
            14..17 => self.raise_tally().await,
            17 => {
                self.verify(range).await;
                self.map(range).await;
                self.keep_watch(range).await;
            }
            _ => self.flush().await,
        }
        if rng.chance(0.1) {
            tokio::time::sleep(rng.time(Duration::ZERO, Duration::from_millis(20))).await;
        }
    }

    /// Sends a request; now and then asks soon afterwards for its abort.
    async fn send(&self, request: Request, abort: bool) -> Result<Bufs, Failure> {
        let rng = &self.shared.rng;
        let (answer, result) = oneshot::channel();
        let command = self.volume.start(request, &self.account, move |r| {
            // The host may crash while nobody waits.
            let _ = answer.send(r);
        });
        if abort && rng.chance(0.1) {
            tokio::time::sleep(rng.time(Duration::ZERO, Duration::from_millis(10))).await;
            command.abort();
        }
        let result = result.await.unwrap_or(Err(Failure::Device(Error::Gone)));
        if let Err(Failure::Device(e)) = &result
            && *e != Error::Aborted
        {
            self.shared.errors.borrow_mut().push(*e);
        }
        if matches!(result, Err(Failure::Device(Error::Fenced))) {
            // As an initiator would: it tries its other path, and this one again in a while.
            tokio::time::sleep(rng.time(Duration::from_millis(100), Duration::from_secs(1))).await;
        }
        result
    }

    #[expect(clippy::needless_pass_by_value, reason = "errors are passed as they come")]
    fn object(&self, to: impl ToString) {
        self.shared.violation.borrow_mut().get_or_insert(to.to_string());
    }

    async fn memory(&self, blocks: u64) -> block::Credit {
        let bytes = usize::try_from(blocks).expect("small") * self.block_size();
        let credit = self.account.credit(bytes, Class::Immediate).await;
        credit.expect("the pool is larger than any command")
    }

    async fn read(&self, range: Blocks, abort: bool) -> Result<(), Failure> {
        let ticket = self.begin(|c| c.begin_read(range));
        let result = self.send(Request::Read { range }, abort).await;
        self.close(ticket);
        let mut checker = self.shared.checker.borrow_mut();
        match &result {
            Ok(data) => {
                if let Err(violation) = checker.end_read(ticket, data) {
                    self.object(violation);
                }
            }
            Err(_) => checker.end(ticket, Outcome::Failed),
        }
        result.map(drop)
    }

    async fn write(&self, range: Blocks, fua: bool) {
        self.change(
            range,
            |c| c.begin_write(range, 1, fua),
            |at, data| Request::Write { at, data, fua },
        )
        .await;
    }

    async fn change(
        &self,
        range: Blocks,
        begin: impl FnOnce(&mut Checker) -> Ticket,
        request: impl FnOnce(Lba, Bufs) -> Request,
    ) {
        let credit = self.memory(range.count).await;
        let ticket = self.begin(begin);
        let data = self.shared.checker.borrow().data(ticket, &credit);
        drop(credit);
        let result = self.send(request(range.at, data), true).await;
        self.end(&[ticket], &result);
    }

    fn end(&self, tickets: &[Ticket], result: &Result<Bufs, Failure>) {
        let outcome = if result.is_ok() { Outcome::Done } else { Outcome::Failed };
        for &ticket in tickets {
            self.close(ticket);
            // Another node may yet carry out what this one began.
            if matches!(result, Err(Failure::Device(Error::Fenced))) {
                self.shared.doubt(ticket);
            } else {
                self.shared.checker.borrow_mut().end(ticket, outcome);
            }
        }
    }

    async fn unmap(&self) {
        let count = self.shared.rng.below(4);
        let mut ranges: Vec<Blocks> = Vec::new();
        for _ in 0..count {
            let range = self.range();
            // Overlapping ranges of one command are one change to the checker's eyes.
            if ranges.iter().all(|r| !r.overlaps(&range)) {
                ranges.push(range);
            }
        }
        let zeroes = self.volume.info().unmap_zeroes;
        let begin = |&r: &Blocks| self.begin(|c| c.begin_unmap(r, zeroes));
        let tickets: Vec<_> = ranges.iter().map(begin).collect();
        let result = self.send(Request::Unmap { ranges }, true).await;
        self.end(&tickets, &result);
    }

    async fn verify(&self, range: Blocks) {
        let result = self.send(Request::Verify { range }, true).await;
        if let Err(Failure::Miscompare { .. }) = result {
            self.object("VERIFY compared something");
        }
    }

    /// Asks which blocks have nothing behind them: whoever is told so has read zeroes.
    async fn map(&self, range: Blocks) {
        let block = |n| Blocks::new(Lba(range.at.0 + n), 1);
        let tickets: Vec<_> =
            (0..range.count).map(|n| self.begin(|c| c.begin_read(block(n)))).collect();
        let result = self.send(Request::Map { range, most: 4 }, false).await;
        let runs = result.map(|data| Run::all_of(&data)).unwrap_or_default();
        let mapped = runs.iter().flat_map(|r| std::iter::repeat_n(r.mapped, r.blocks as usize));
        let told = mapped.chain(std::iter::repeat(true));
        let zeroes = Bufs::zeroes(self.block_size());
        for (ticket, mapped) in tickets.into_iter().zip(told) {
            self.close(ticket);
            let mut checker = self.shared.checker.borrow_mut();
            if mapped {
                checker.end(ticket, Outcome::Failed);
            } else if let Err(violation) = checker.end_read(ticket, &zeroes) {
                self.object(violation);
            }
        }
    }

    /// Watches blocks as whoever makes a token of them does: as long as nobody is seen to change them, they stay as they
    /// are, whichever node writes and whatever fails.
    async fn keep_watch(&self, range: Blocks) {
        let watch = self.volume.changes().watch(vec![range]);
        if self.send(Request::Settle { ranges: vec![range] }, false).await.is_err() {
            return;
        }
        let Ok(before) = self.send(Request::Read { range }, false).await else { return };
        if !watch.is_intact() {
            return;
        }
        let before = before.to_vec();
        for _ in 0..4 {
            tokio::time::sleep(Duration::from_millis(30)).await;
            let Ok(after) = self.send(Request::Read { range }, false).await else { return };
            if !watch.is_intact() {
                return;
            }
            if after.to_vec() != before {
                self.object("blocks have changed unseen");
            }
        }
    }

    /// Flushes; perhaps somebody asks for its abort.
    pub(super) async fn flush(&self) {
        let ticket = self.begin(Checker::begin_flush);
        let result = self.send(Request::Flush, true).await;
        self.end(&[ticket], &result);
    }

    async fn read_tally(&self) -> Result<u64, Failure> {
        let range = Blocks::new(Lba(0), TALLY);
        let data = self.send(Request::Read { range }, false).await?.to_vec();
        let value: [u8; 8] = data[..8].try_into().expect("eight bytes");
        if data.chunks_exact(8).any(|word| word != value) {
            self.object("the tally is torn");
        }
        Ok(u64::from_le_bytes(value))
    }

    /// Raises the tally by one, if nobody else does meanwhile.
    async fn raise_tally(&self) {
        let Ok(value) = self.read_tally().await else { return };
        let [compare, write] = [value, value + 1].map(|v| async move {
            copy_in(&self.memory(1).await, &v.to_le_bytes().repeat(self.block_size() / 8))
        });
        let (compare, write) = (compare.await, write.await);
        let request = Request::CompareAndWrite { at: Lba(0), compare, write, fua: false };
        let count = |what: &Cell<u64>| what.set(what.get() + 1);
        self.raising.set(true);
        let result = self.send(request, true).await;
        self.raising.set(false);
        match result {
            Ok(_) => count(&self.shared.raised),
            Err(
                Failure::Miscompare { .. }
                | Failure::Conflict
                | Failure::Busy
                | Failure::Device(Error::Aborted),
            ) => {}
            Err(Failure::Device(_)) => count(&self.shared.perhaps),
        }
    }
}
