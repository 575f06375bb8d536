//! Clients of a volume whose commands overlap, and the final checks of the volume.
//!
//! The register checker knows when each command began and how it ended, and judges every read. The
//! counter that clients raise by COMPARE AND WRITE must in the end have counted every success
//! exactly once.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

use block::testing::register::{Checker, CrashKind, InitialContents, Outcome, Ticket};
use block::{Account, BlockStatus, Blocks, Bufs, Error, Lba, MemoryClass, Request, RequestError};
use rt::Core;
use rt::buf::copy_in;
use rt::sim::{Rng, World};
use tokio::sync::oneshot;
use volume::Volume;

use super::storage::check_no_memory_held;

/// Number of concurrent clients.
const CLIENTS: u64 = 6;

/// Commands of each client in the last round.
const LAST_ROUND: usize = 25;

/// How long other nodes may still carry out a command that its node has given up.
const UNKNOWN_OUTCOME_LIMIT: Duration = Duration::from_secs(30);

/// Blocks at the start that hold the counter and nothing else.
const COUNTER_BLOCKS: u64 = 1;

/// State shared by all clients of a world.
pub(super) struct ClientState {
    checker: RefCell<Checker>,
    rng: Rng,
    /// How often the counter was certainly raised, and how often the outcome is unknown.
    counted_increments: Cell<u64>,
    unknown_increments: Cell<u64>,
    /// Commands whose outcome is unknown, and since when.
    unknown_outcomes: RefCell<Vec<(Duration, Ticket)>>,
    world: World,
    violation: RefCell<Option<String>>,
    errors: RefCell<Vec<Error>>,
    /// Called on every crash.
    on_crash: RefCell<Option<CrashCallback>>,
}

type CrashCallback = Box<dyn Fn(CrashKind)>;

impl ClientState {
    pub(super) fn new(world: &World, block_size: u32) -> Rc<Self> {
        Rc::new(Self {
            checker: RefCell::new(Checker::new(1, block_size, InitialContents::Zeroes)),
            rng: Rng::new(world.seed(), "clients"),
            counted_increments: Cell::new(0),
            unknown_increments: Cell::new(0),
            unknown_outcomes: RefCell::default(),
            world: world.clone(),
            violation: RefCell::default(),
            errors: RefCell::default(),
            on_crash: RefCell::default(),
        })
    }

    /// Sets the callback for crashes.
    pub(super) fn on_crash(&self, callback: impl Fn(CrashKind) + 'static) {
        self.on_crash.replace(Some(Box::new(callback)));
    }

    /// The clients have died with their host.
    pub(super) fn crash(&self, loss: CrashKind) {
        self.checker.borrow_mut().crash(loss);
        if let Some(callback) = &*self.on_crash.borrow() {
            callback(loss);
        }
    }

    /// A command unanswered for so long has taken effect by now, or never will.
    pub(super) fn expire_unknown_outcomes(&self) {
        let before = self.world.now().saturating_sub(UNKNOWN_OUTCOME_LIMIT);
        let (old, new): (Vec<_>, Vec<_>) =
            self.unknown_outcomes.take().into_iter().partition(|(since, _)| *since < before);
        self.unknown_outcomes.replace(new);
        let mut checker = self.checker.borrow_mut();
        old.into_iter().for_each(|(_, ticket)| checker.end(ticket, Outcome::Failed));
    }

    fn mark_unknown(&self, ticket: Ticket) {
        self.unknown_outcomes.borrow_mut().push((self.world.now(), ticket));
    }

    /// Blocks that were damaged on purpose.
    pub(super) fn mark_damaged(&self, range: Blocks) {
        self.checker.borrow_mut().mark_damaged(range);
    }

    /// Violations found so far.
    pub(super) fn first_violation(&self) -> Result<(), String> {
        self.violation.borrow_mut().take().map_or(Ok(()), Err)
    }
}

/// Runs clients on a volume until their host crashes.
pub(super) fn spawn_clients(core: &Core, volume: &Rc<Volume>, shared: &Rc<ClientState>) {
    for _ in 0..CLIENTS {
        let client = Client::new(core, volume, shared);
        tokio::task::spawn_local(async move {
            loop {
                client.run_random_command().await;
            }
        });
    }
}

/// Without faults, every command succeeds, the counter is right, every block holds a permitted
/// value, and all memory is released. Closes the volume.
pub(super) async fn check_and_close(
    core: &Core,
    volume: Rc<Volume>,
    shared: &Rc<ClientState>,
) -> Result<(), String> {
    check(core, &volume, shared).await?;
    let account = core.buffer_pool().account();
    volume.close(&account).await.map_err(|e| format!("close: {e}"))?;
    drop((volume, account));
    check_no_memory_held(core.buffer_pool())
}

/// Without faults, every command succeeds, the counter is right, and every block holds a permitted
/// value.
pub(super) async fn check(
    core: &Core,
    volume: &Rc<Volume>,
    shared: &Rc<ClientState>,
) -> Result<(), String> {
    shared.errors.take();
    let checking = Client::new(core, volume, shared);
    checking.audit().await;
    let before = checking.read_counter().await.map_err(|e| format!("counter: {e}"))?;
    shared.counted_increments.set(0);
    shared.unknown_increments.set(0);
    let clients: Vec<_> = (0..CLIENTS)
        .map(|_| {
            let client = Client::new(core, volume, shared);
            tokio::task::spawn_local(async move {
                for _ in 0..LAST_ROUND {
                    client.run_random_command().await;
                }
            })
        })
        .collect();
    for client in clients {
        client.await.map_err(|e| e.to_string())?;
    }
    let counted = checking.read_counter().await.map_err(|e| format!("counter: {e}"))? - before;
    let (raised, perhaps) = (shared.counted_increments.get(), shared.unknown_increments.get());
    if !(raised..=raised + perhaps).contains(&counted) {
        return Err(format!(
            "the counter is {counted}: {raised} increments succeeded, {perhaps} are unknown"
        ));
    }
    checking.audit().await;
    let error = shared.errors.borrow().first().copied();
    error.map_or(Ok(()), |error| Err(format!("without faults: {error}")))
}

/// One client, which runs one command at a time.
pub(super) struct Client {
    volume: Rc<Volume>,
    account: Account,
    shared: Rc<ClientState>,
    /// Commands begun and not yet answered.
    open: RefCell<Vec<Ticket>>,
    incrementing: Cell<bool>,
}

impl Client {
    pub(super) fn new(core: &Core, volume: &Rc<Volume>, shared: &Rc<ClientState>) -> Self {
        let account = core.buffer_pool().account();
        let (open, raising) = (RefCell::default(), Cell::default());
        Self {
            volume: Rc::clone(volume),
            account,
            shared: Rc::clone(shared),
            open,
            incrementing: raising,
        }
    }

    /// The client dies with its host while others continue: its commands in flight may take effect
    /// or not.
    pub(super) fn abandon_pending(&self) {
        self.open.take().into_iter().for_each(|t| self.shared.mark_unknown(t));
        if self.incrementing.replace(false) {
            self.shared.unknown_increments.update(|n| n + 1);
        }
    }

    /// Begins a command.
    fn begin(&self, begin: impl FnOnce(&mut Checker) -> Ticket) -> Ticket {
        let ticket = begin(&mut self.shared.checker.borrow_mut());
        self.open.borrow_mut().push(ticket);
        ticket
    }

    /// Ends a command.
    fn close(&self, ticket: Ticket) {
        self.open.borrow_mut().retain(|t| *t != ticket);
    }

    /// Reads all blocks.
    pub(super) async fn audit(&self) {
        let blocks = self.volume.info().blocks;
        for at in (COUNTER_BLOCKS..blocks).step_by(8) {
            // Blocks that could not be read are among the errors.
            let _ = self.read(Blocks::new(Lba(at), 8.min(blocks - at)), false).await;
        }
    }

    /// Rewrites unreadable blocks.
    pub(super) async fn rewrite_unreadable(&self) {
        let blocks = self.volume.info().blocks;
        for at in (COUNTER_BLOCKS..blocks).step_by(8) {
            let range = Blocks::new(Lba(at), 8.min(blocks - at));
            if self.read(range, false).await.is_err() {
                self.write(range, false).await;
            }
        }
    }

    /// Reads one block.
    pub(super) async fn read_block(&self, block: u64) -> Result<(), RequestError> {
        self.read(Blocks::new(Lba(block), 1), false).await
    }

    /// Writes one block.
    pub(super) async fn write_block(&self, block: u64) {
        self.write(Blocks::new(Lba(block), 1), false).await;
    }

    /// Reads some blocks and pauses; a client that only reads continues while writes wait.
    pub(super) async fn read_and_pause(&self) {
        let _ = self.read(self.range(), false).await;
        let rng = &self.shared.rng;
        tokio::time::sleep(rng.duration_between(Duration::ZERO, Duration::from_millis(100))).await;
    }

    fn block_size(&self) -> usize {
        self.volume.info().block_size as usize
    }

    /// A range that clients often share.
    fn range(&self) -> Blocks {
        let (rng, blocks) = (&self.shared.rng, self.volume.info().blocks);
        let count = if rng.chance(0.1) { rng.between(1, 40) } else { rng.between(1, 6) };
        let count = count.min(blocks - COUNTER_BLOCKS);
        Blocks::new(Lba(rng.between(COUNTER_BLOCKS, blocks - count)), count)
    }

    /// A random command.
    pub(super) async fn run_random_command(&self) {
        let (rng, range) = (&self.shared.rng, self.range());
        let fua = rng.chance(0.2);
        match rng.below(20) {
            0..5 => drop(self.read(range, true).await),
            5..11 => self.write(range, fua).await,
            11 => {
                self.run_write(
                    range,
                    |c| c.begin_zero(range, fua),
                    |_, _| Request::Zero { range, unmap: fua, fua },
                )
                .await;
            }
            12 | 13 => self.unmap().await,
            14..17 => self.increment_counter().await,
            17 => {
                self.verify(range).await;
                self.read_allocation(range).await;
                self.check_change_watch(range).await;
            }
            _ => self.flush().await,
        }
        if rng.chance(0.1) {
            tokio::time::sleep(rng.duration_between(Duration::ZERO, Duration::from_millis(20)))
                .await;
        }
    }

    /// Sends a request; sometimes aborts it soon afterwards.
    async fn send(&self, request: Request, abort: bool) -> Result<Bufs, RequestError> {
        let rng = &self.shared.rng;
        let (answer, result) = oneshot::channel();
        let command = self.volume.start(request, &self.account, move |r| {
            // The host may crash before the answer is received.
            let _ = answer.send(r);
        });
        if abort && rng.chance(0.1) {
            tokio::time::sleep(rng.duration_between(Duration::ZERO, Duration::from_millis(10)))
                .await;
            command.abort();
        }
        let result = result.await.unwrap_or(Err(RequestError::Device(Error::Gone)));
        if let Err(RequestError::Device(e)) = &result
            && *e != Error::Aborted
        {
            self.shared.errors.borrow_mut().push(*e);
        }
        if matches!(result, Err(RequestError::Device(Error::Fenced))) {
            // As an initiator would: retries on its other path, and on this one later.
            tokio::time::sleep(
                rng.duration_between(Duration::from_millis(100), Duration::from_secs(1)),
            )
            .await;
        }
        result
    }

    #[expect(clippy::needless_pass_by_value, reason = "errors are passed as they come")]
    fn report_violation(&self, to: impl ToString) {
        self.shared.violation.borrow_mut().get_or_insert(to.to_string());
    }

    async fn memory(&self, blocks: u64) -> block::Credit {
        let bytes = usize::try_from(blocks).expect("small") * self.block_size();
        let credit = self.account.credit(bytes, MemoryClass::LocalIo).await;
        credit.expect("the pool is larger than any command")
    }

    async fn read(&self, range: Blocks, abort: bool) -> Result<(), RequestError> {
        let ticket = self.begin(|c| c.begin_read(range));
        let result = self.send(Request::Read { range }, abort).await;
        self.close(ticket);
        let mut checker = self.shared.checker.borrow_mut();
        match &result {
            Ok(data) => {
                if let Err(violation) = checker.end_read(ticket, data) {
                    self.report_violation(violation);
                }
            }
            Err(_) => checker.end(ticket, Outcome::Failed),
        }
        result.map(drop)
    }

    async fn write(&self, range: Blocks, fua: bool) {
        self.run_write(
            range,
            |c| c.begin_write(range, 1, fua),
            |at, data| Request::Write { at, data, fua },
        )
        .await;
    }

    async fn run_write(
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

    fn end(&self, tickets: &[Ticket], result: &Result<Bufs, RequestError>) {
        let outcome = if result.is_ok() { Outcome::Done } else { Outcome::Failed };
        for &ticket in tickets {
            self.close(ticket);
            // Another node may still carry out the command.
            if matches!(result, Err(RequestError::Device(Error::Fenced))) {
                self.shared.mark_unknown(ticket);
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
            // The checker treats overlapping ranges of one command as one change.
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
        if let Err(RequestError::Miscompare { .. }) = result {
            self.report_violation("VERIFY compared something");
        }
    }

    /// Asks which blocks are unallocated: these must read as zeroes.
    async fn read_allocation(&self, range: Blocks) {
        let block = |n| Blocks::new(Lba(range.at.0 + n), 1);
        let tickets: Vec<_> =
            (0..range.count).map(|n| self.begin(|c| c.begin_read(block(n)))).collect();
        let result = self.send(Request::BlockStatus { range, max_runs: 4 }, false).await;
        let runs = result.map(|data| BlockStatus::from_bufs(&data)).unwrap_or_default();
        let mapped = runs.iter().flat_map(|r| std::iter::repeat_n(r.mapped, r.blocks as usize));
        let padded = mapped.chain(std::iter::repeat(true));
        let zeroes = Bufs::zeroes(self.block_size());
        for (ticket, mapped) in tickets.into_iter().zip(padded) {
            self.close(ticket);
            let mut checker = self.shared.checker.borrow_mut();
            if mapped {
                checker.end(ticket, Outcome::Failed);
            } else if let Err(violation) = checker.end_read(ticket, &zeroes) {
                self.report_violation(violation);
            }
        }
    }

    /// Watches blocks as the holder of a copy-offload token does: while the watch reports no
    /// change, the blocks must not change, whichever node writes and whatever fails.
    async fn check_change_watch(&self, range: Blocks) {
        let watch = self.volume.change_tracker().watch(vec![range]);
        if self.send(Request::DrainWrites { ranges: vec![range] }, false).await.is_err() {
            return;
        }
        let Ok(before) = self.send(Request::Read { range }, false).await else { return };
        if !watch.is_unchanged() {
            return;
        }
        let before = before.to_vec();
        for _ in 0..4 {
            tokio::time::sleep(Duration::from_millis(30)).await;
            let Ok(after) = self.send(Request::Read { range }, false).await else { return };
            if !watch.is_unchanged() {
                return;
            }
            if after.to_vec() != before {
                self.report_violation("blocks changed without a notification");
            }
        }
    }

    /// Flushes; sometimes aborts the flush.
    pub(super) async fn flush(&self) {
        let ticket = self.begin(Checker::begin_flush);
        let result = self.send(Request::Flush, true).await;
        self.end(&[ticket], &result);
    }

    async fn read_counter(&self) -> Result<u64, RequestError> {
        let range = Blocks::new(Lba(0), COUNTER_BLOCKS);
        let data = self.send(Request::Read { range }, false).await?.to_vec();
        let value: [u8; 8] = data[..8].try_into().expect("eight bytes");
        if data.chunks_exact(8).any(|word| word != value) {
            self.report_violation("the counter is torn");
        }
        Ok(u64::from_le_bytes(value))
    }

    /// Raises the counter by one, unless another client does so meanwhile.
    async fn increment_counter(&self) {
        let Ok(value) = self.read_counter().await else { return };
        let [compare, write] = [value, value + 1].map(|v| async move {
            copy_in(&self.memory(1).await, &v.to_le_bytes().repeat(self.block_size() / 8))
        });
        let (compare, write) = (compare.await, write.await);
        let request = Request::CompareAndWrite { at: Lba(0), compare, write, fua: false };
        let count = |what: &Cell<u64>| what.set(what.get() + 1);
        self.incrementing.set(true);
        let result = self.send(request, true).await;
        self.incrementing.set(false);
        match result {
            Ok(_) => count(&self.shared.counted_increments),
            Err(
                RequestError::Miscompare { .. }
                | RequestError::ReservationConflict
                | RequestError::NoMemory
                | RequestError::Device(Error::Aborted),
            ) => {}
            Err(RequestError::Device(_)) => count(&self.shared.unknown_increments),
        }
    }
}
