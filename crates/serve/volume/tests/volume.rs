//! A volume over a layer that watches the contract and answers when the test lets it.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

use block::{
    Account, BlockStatus, Blocks, BufferPool, Bufs, ChangeTracker, CommitFuture,
    CompareAndWriteFuture, Ctx, Dev, Epoch, Error, Info, Layer, Lba, MemoryClass, Op,
    ReplicatedDevice, Request, RequestError,
};
use rt::buf::copy_in;
use tokio::sync::Semaphore;
use tokio::task::{LocalSet, yield_now};
use volume::{CommandKind, Volume};

const BLOCK: usize = 512;
const BLOCKS: u64 = 4096;
const PATIENCE: Duration = Duration::from_secs(5);

/// A RAM disk that panics on overlapping operations, and that waits for a permit per operation.
#[derive(Default)]
struct Watched {
    bytes: RefCell<Vec<u8>>,
    running: RefCell<Vec<(Blocks, bool)>>,
    flushes: Cell<u32>,
    started: Cell<u32>,
    fails: Cell<Option<Error>>,
    panics: Cell<bool>,
    gate: Option<Semaphore>,
}

#[derive(Clone)]
struct Ram(Rc<Watched>);

impl Ram {
    fn new(gated: bool) -> Self {
        Self(Rc::new(Watched {
            bytes: RefCell::new(vec![0; BLOCKS as usize * BLOCK]),
            gate: gated.then(|| Semaphore::new(0)),
            ..Watched::default()
        }))
    }

    fn let_through(&self, operations: usize) {
        self.0.gate.as_ref().unwrap().add_permits(operations);
    }

    fn enter(&self, op: &Op) -> Option<(Blocks, bool)> {
        let entry = (op.range(BLOCK as u32)?, op.is_write());
        for (range, writes) in self.0.running.borrow().iter() {
            let clash = range.overlaps(&entry.0) && (*writes || entry.1);
            assert!(!clash, "{op:?} runs beside {range:?}");
        }
        self.0.running.borrow_mut().push(entry);
        Some(entry)
    }

    fn apply(&self, op: &Op, ctx: &Ctx) -> Bufs {
        let span = |at: Lba, blocks: u64| at.0 as usize * BLOCK..(at.0 + blocks) as usize * BLOCK;
        let mut bytes = self.0.bytes.borrow_mut();
        match op {
            Op::Read { at, blocks } => {
                return copy_in(ctx.credit(), &bytes[span(*at, u64::from(*blocks))]);
            }
            Op::Write { at, data, .. } => {
                data.copy_to(&mut bytes[span(*at, (data.len() / BLOCK) as u64)]);
            }
            Op::Zero { at, blocks, .. } | Op::Unmap { at, blocks } => {
                bytes[span(*at, u64::from(*blocks))].fill(0);
            }
            Op::BlockStatus { blocks, .. } => {
                return BlockStatus { blocks: *blocks, mapped: true }.into_bufs(ctx);
            }
            Op::Flush => self.0.flushes.set(self.0.flushes.get() + 1),
        }
        Bufs::new()
    }
}

impl Layer for Ram {
    fn name(&self) -> &'static str {
        "ram"
    }

    fn info(&self) -> Info {
        Info {
            block_size: BLOCK as u32,
            blocks: BLOCKS,
            metadata_blocks: 0,
            physical_block_size: 4096,
            max_transfer_blocks: 64,
            unmap_granularity_blocks: 8,
            unmap_zeroes: true,
            volatile_cache: true,
            native_fua: true,
            read_only: false,
            overhead_bytes: 0,
        }
    }

    async fn submit(&self, op: Op, ctx: Ctx) -> Result<Bufs, Error> {
        let entry = self.enter(&op);
        self.0.started.set(self.0.started.get() + 1);
        match &self.0.gate {
            Some(gate) => gate.acquire().await.expect("open").forget(),
            None => yield_now().await,
        }
        if let Some(entry) = entry {
            let mut running = self.0.running.borrow_mut();
            let i = running.iter().position(|e| *e == entry).unwrap();
            running.swap_remove(i);
        }
        assert!(!self.0.panics.take(), "the panic that the test asked for");
        match self.0.fails.get() {
            Some(error) => Err(error),
            None => Ok(self.apply(&op, &ctx)),
        }
    }
}

struct Bench {
    ram: Ram,
    volume: Rc<Volume>,
    pool: BufferPool,
    account: Account,
}

impl Bench {
    fn new(gated: bool) -> Self {
        let (ram, pool) = (Ram::new(gated), BufferPool::new(16 << 20).unwrap());
        let volume = Volume::new(Dev::new(ram.clone()), Epoch::default());
        let account = pool.account();
        Self { ram, volume, pool, account }
    }

    fn data(&self, byte: u8, blocks: usize) -> Bufs {
        let bytes = vec![byte; blocks * BLOCK];
        let credit = self.account.try_credit(bytes.len(), MemoryClass::LocalIo).unwrap();
        copy_in(&credit, &bytes)
    }

    fn write(&self, at: u64, byte: u8, blocks: usize) -> Request {
        Request::Write { at: Lba(at), data: self.data(byte, blocks), fua: false }
    }

    async fn run(&self, request: Request) -> Result<Bufs, RequestError> {
        self.volume.execute(request, &self.account).await
    }

    async fn byte_at(&self, at: u64) -> u8 {
        let data = self.run(read(at, 1)).await.unwrap().to_vec();
        assert!(data.iter().all(|b| *b == data[0]), "block {at} is torn");
        data[0]
    }

    fn all_memory_is_back(&self) {
        let usage = self.pool.usage();
        assert_eq!((usage.free, usage.overdrafts), (usage.total, 0));
    }
}

fn read(at: u64, count: u64) -> Request {
    Request::Read { range: range(at, count) }
}

fn range(at: u64, count: u64) -> Blocks {
    Blocks::new(Lba(at), count)
}

fn local(test: impl AsyncFnOnce()) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    LocalSet::new().block_on(&runtime, test());
}

async fn settle() {
    for _ in 0..50 {
        yield_now().await;
    }
}

/// A layer can then make its metadata for them durable together.
#[test]
fn ranges_of_one_unmap_are_under_way_at_once() {
    local(async || {
        let b = Bench::new(true);
        let ranges = (0..255).map(|n| range(n * 16, 8)).collect();
        let volume = Rc::clone(&b.volume);
        let account = b.account.clone();
        let unmap = tokio::task::spawn_local(async move {
            volume.execute(Request::Unmap { ranges }, &account).await
        });
        settle().await;
        assert_eq!(b.ram.0.started.get(), 64, "and no more");
        b.ram.let_through(64);
        settle().await;
        assert_eq!(b.ram.0.started.get(), 128);
        b.ram.let_through(255);
        unmap.await.unwrap().unwrap();
        assert_eq!(b.ram.0.started.get(), 255);
        b.all_memory_is_back();
    });
}

#[test]
fn ranges_of_one_unmap_that_touch_are_one_operation() {
    local(async || {
        let b = Bench::new(false);
        let pieces =
            [range(64, 8), range(8, 8), range(0, 8), range(16, 8), range(12, 6), range(9, 0)];
        b.run(b.write(0, 5, 64)).await.unwrap();
        let before = b.ram.0.started.get();
        b.run(Request::Unmap { ranges: pieces.to_vec() }).await.unwrap();
        assert_eq!(b.ram.0.started.get() - before, 2);
        assert_eq!((b.byte_at(0).await, b.byte_at(23).await, b.byte_at(24).await), (0, 0, 5));
    });
}

/// All that has begun comes to its end, and nothing else begins.
#[test]
fn an_unmap_that_fails_begins_nothing_more() {
    local(async || {
        let b = Bench::new(true);
        b.ram.0.fails.set(Some(Error::Gone));
        b.ram.let_through(1000);
        let ranges = (0..255).map(|n| range(n * 16, 8)).collect();
        let failed = b.run(Request::Unmap { ranges }).await;
        assert_eq!(failed.unwrap_err(), RequestError::from(Error::Gone));
        assert!(b.ram.0.running.borrow().is_empty());
        assert!(b.ram.0.started.get() < 255, "{} were begun", b.ram.0.started.get());
        b.all_memory_is_back();
    });
}

#[test]
fn every_request_does_what_it_says() {
    local(async || {
        let b = Bench::new(false);
        b.run(b.write(10, 7, 4)).await.unwrap();
        assert_eq!(b.byte_at(13).await, 7);

        let pattern = b.data(9, 1);
        b.run(Request::WriteSame { range: range(0, 2000), pattern, fua: true }).await.unwrap();
        assert_eq!((b.byte_at(0).await, b.byte_at(1999).await, b.byte_at(2000).await), (9, 9, 0));

        b.run(Request::Zero { range: range(5, 1), unmap: true, fua: false }).await.unwrap();
        b.run(Request::Unmap { ranges: vec![range(100, 8), range(0, 0), range(50, 1)] })
            .await
            .unwrap();
        for (at, byte) in [(5, 0), (6, 9), (107, 0), (108, 9), (50, 0), (49, 9)] {
            assert_eq!(b.byte_at(at).await, byte, "block {at}");
        }

        assert_eq!(b.run(Request::Verify { range: range(0, BLOCKS) }).await.unwrap().len(), 0);
        b.run(Request::Compare { at: Lba(20), data: b.data(9, 3) }).await.unwrap();
        b.run(Request::Flush).await.unwrap();
        assert_eq!(b.run(read(3, 0)).await.unwrap().len(), 0, "nothing asked, nothing given");
        b.all_memory_is_back();

        let stats = b.volume.stats();
        assert_eq!(stats.in_flight, 0);
        assert_eq!(stats.kinds[CommandKind::Flush as usize].completed, 1);
        assert!(stats.kinds[CommandKind::Read as usize].latency_us.is_some());
    });
}

#[test]
fn out_of_range_commands_are_refused_before_execution() {
    local(async || {
        let b = Bench::new(true);
        let fua = false;
        let requests = [
            read(BLOCKS, 1),
            read(u64::MAX, 2),
            read(0, 65),
            b.write(BLOCKS - 1, 1, 2),
            Request::Write { at: Lba(0), data: Bufs::zeroes(100), fua },
            Request::WriteSame { range: range(0, 1), pattern: b.data(1, 2), fua },
            Request::WriteSame { range: range(1, BLOCKS), pattern: b.data(1, 1), fua },
            Request::Zero { range: range(1, u64::MAX), unmap: true, fua },
            Request::Unmap { ranges: vec![range(0, 1), range(BLOCKS, 1)] },
            Request::Verify { range: range(BLOCKS - 1, 2) },
            Request::Compare { at: Lba(BLOCKS), data: b.data(0, 1) },
            Request::CompareAndWrite {
                at: Lba(0),
                compare: b.data(0, 1),
                write: b.data(0, 2),
                fua,
            },
        ];
        for request in requests {
            let shown = format!("{request:?}");
            let result = b.run(request).await;
            assert_eq!(result.unwrap_err(), Error::OutOfRange.into(), "{shown}");
        }
        assert_eq!(b.ram.0.started.get(), 0);
        b.all_memory_is_back();
    });
}

/// The layer below panics if two overlapping operations meet.
#[test]
fn overlapping_commands_never_meet_below() {
    local(async || {
        let b = Bench::new(false);
        let set = LocalSet::new();
        let done = Rc::new(Cell::new(0));
        let mut seed = 3u64;
        let mut next = |n: u64| {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963);
            (seed >> 33) % n
        };
        let total = 2000;
        for i in 0..total {
            let (at, count) = (next(60), 1 + next(16));
            let request = match next(5) {
                0 | 1 => b.write(at, i as u8, count as usize),
                2 => Request::Zero { range: range(at, count), unmap: true, fua: false },
                _ => read(at, count),
            };
            let done = Rc::clone(&done);
            b.volume.start(request, &b.account, move |r| {
                r.unwrap();
                done.set(done.get() + 1);
            });
        }
        set.run_until(async {
            while done.get() < total {
                yield_now().await;
            }
        })
        .await;
        b.all_memory_is_back();
        assert!(b.volume.stats().range_waits > 100);
    });
}

/// Also where the later one could be answered at once, and the earlier one needs a task.
#[test]
fn overlapping_commands_begin_in_the_order_in_which_they_came() {
    local(async || {
        let b = Bench::new(false);
        let all = Request::Zero { range: range(0, 64), unmap: false, fua: false };
        b.volume.start(all, &b.account, |r| drop(r.unwrap()));
        b.volume.start(b.write(0, 7, 1), &b.account, |r| drop(r.unwrap()));
        settle().await;
        assert_eq!(b.byte_at(0).await, 7);
        b.all_memory_is_back();
    });
}

#[test]
fn compare_and_write_is_one_step() {
    local(async || {
        let b = Bench::new(false);
        // A hundred contenders increment one block by compare and write; none is lost.
        let increments = (0..100).map(|_| async {
            loop {
                let seen = b.byte_at(8).await;
                let (compare, write) = (b.data(seen, 1), b.data(seen + 1, 1));
                let at = Lba(8);
                match b.run(Request::CompareAndWrite { at, compare, write, fua: false }).await {
                    Ok(_) => break,
                    Err(RequestError::Miscompare { offset }) => assert_eq!(offset, 0),
                    Err(e) => panic!("{e}"),
                }
            }
        });
        let mut all: Vec<_> = increments.map(Box::pin).collect();
        std::future::poll_fn(|cx| {
            all.retain_mut(|f| f.as_mut().poll(cx).is_pending());
            if all.is_empty() { std::task::Poll::Ready(()) } else { std::task::Poll::Pending }
        })
        .await;
        assert_eq!(b.byte_at(8).await, 100);
        b.all_memory_is_back();
    });
}

/// SBC-3 5.5: the longest transfer is more than one step, and every bit that was set stays.
#[test]
fn or_write_sets_bits_and_clears_none() {
    local(async || {
        let b = Bench::new(false);
        b.run(b.write(0, 0x0f, 64)).await.unwrap();
        b.run(Request::OrWrite { at: Lba(1), data: b.data(0x30, 62), fua: false }).await.unwrap();
        for (at, byte) in [(0, 0x0f), (1, 0x3f), (62, 0x3f), (63, 0x0f)] {
            assert_eq!(b.byte_at(at).await, byte, "block {at}");
        }
        let too_long = Request::OrWrite { at: Lba(0), data: b.data(1, 65), fua: false };
        assert_eq!(b.run(too_long).await.unwrap_err(), Error::OutOfRange.into());
        let outside = Request::OrWrite { at: Lba(BLOCKS - 1), data: b.data(1, 2), fua: false };
        assert_eq!(b.run(outside).await.unwrap_err(), Error::OutOfRange.into());
        let nothing = Request::OrWrite { at: Lba(BLOCKS), data: Bufs::new(), fua: false };
        assert_eq!(b.run(nothing).await.unwrap().len(), 0);
        b.all_memory_is_back();
    });
}

/// Eight contenders set a bit each, in a block that they all have to read first.
#[test]
fn or_write_is_one_step() {
    local(async || {
        let b = Bench::new(false);
        let bits = (0..8).map(|bit| {
            let data = b.data(1 << bit, 3);
            b.run(Request::OrWrite { at: Lba(7), data, fua: false })
        });
        futures_joined(bits.collect()).await;
        assert_eq!(b.byte_at(8).await, 0xff);
        b.all_memory_is_back();
    });
}

async fn futures_joined<T>(all: Vec<impl Future<Output = Result<T, RequestError>>>) {
    let mut all: Vec<_> = all.into_iter().map(Box::pin).collect();
    std::future::poll_fn(|cx| {
        all.retain_mut(|f| match f.as_mut().poll(cx) {
            std::task::Poll::Ready(done) => {
                done.map(drop).unwrap();
                false
            }
            std::task::Poll::Pending => true,
        });
        if all.is_empty() { std::task::Poll::Ready(()) } else { std::task::Poll::Pending }
    })
    .await;
}

/// Changes in flight when it is requested have ended when it is answered; reads do not delay it,
/// nor do later commands on other ranges.
#[test]
fn waiting_for_an_outcome_waits_for_writes() {
    local(async || {
        let b = Bench::new(true);
        let seen = Rc::new(RefCell::new(Vec::new()));
        let note = |name: &'static str| {
            let seen = Rc::clone(&seen);
            move |result: Result<Bufs, RequestError>| {
                result.unwrap();
                seen.borrow_mut().push(name);
            }
        };
        let settle = |at| Request::DrainWrites { ranges: vec![range(at, 2), range(40, 1)] };
        b.volume.start(b.write(8, 1, 1), &b.account, note("write"));
        b.volume.start(read(20, 1), &b.account, note("read"));
        b.volume.start(settle(20), &b.account, note("beside"));
        b.volume.start(settle(7), &b.account, note("behind"));
        for _ in 0..20 {
            yield_now().await;
        }
        assert_eq!(*seen.borrow(), ["beside"]);
        b.ram.0.gate.as_ref().unwrap().add_permits(9);
        for _ in 0..20 {
            yield_now().await;
        }
        seen.borrow_mut().sort_unstable();
        assert_eq!(*seen.borrow(), ["behind", "beside", "read", "write"]);
        let outside = Request::DrainWrites { ranges: vec![range(BLOCKS, 1)] };
        assert_eq!(b.run(outside).await.map(drop), Err(Error::OutOfRange.into()));
    });
}

/// A device used by several nodes: each of the first comparisons fails because another node was
/// faster.
struct Contended {
    ram: Ram,
    others: Cell<u32>,
    abort: RefCell<Option<volume::Command>>,
}

impl ReplicatedDevice for Contended {
    fn compare_and_write<'a>(
        &'a self,
        at: Lba,
        compare: &'a Bufs,
        write: &'a Bufs,
        _fua: bool,
        ctx: &'a Ctx,
    ) -> CompareAndWriteFuture<'a> {
        Box::pin(async move {
            yield_now().await;
            let from = at.0 as usize * BLOCK;
            let mut bytes = self.ram.0.bytes.borrow_mut();
            let here = &mut bytes[from..from + compare.len()];
            if self.others.get() > 0 {
                self.others.update(|n| n - 1);
                here.iter_mut().for_each(|byte| *byte ^= 0x80 >> self.others.get());
            }
            if let Some(command) = self.abort.take() {
                command.abort();
            }
            // As the mirror does: the comparison takes its memory in addition to the compared data.
            let found = copy_in(ctx.credit(), here);
            if let Some(offset) = compare.first_difference(&found) {
                return Err(RequestError::Miscompare { offset: offset as u64 });
            }
            write.copy_to(here);
            Ok(())
        })
    }

    fn change_tracker(&self) -> ChangeTracker {
        ChangeTracker::default()
    }

    fn await_commit<'a>(&'a self, _range: Blocks, _ctx: &'a Ctx) -> CommitFuture<'a> {
        Box::pin(std::future::ready(Ok(())))
    }
}

fn contended(b: &Bench, others: u32) -> (Rc<Contended>, Rc<Volume>) {
    let abort = RefCell::default();
    let contended = Rc::new(Contended { ram: b.ram.clone(), others: Cell::new(others), abort });
    let compares = Rc::clone(&contended) as Rc<dyn ReplicatedDevice>;
    let volume = Volume::new_replicated(Dev::new(b.ram.clone()), compares, Epoch::default());
    (contended, volume)
}

#[test]
fn or_write_is_one_step_over_several_nodes() {
    local(async || {
        let b = Bench::new(false);
        let (_contended, volume) = contended(&b, 3);
        let set = Request::OrWrite { at: Lba(0), data: b.data(0x01, 64), fua: true };
        volume.execute(set, &b.account).await.unwrap();
        // The others' three writes hit the first of two steps; none of them is lost.
        for (at, byte) in [(0, 0xe1), (31, 0xe1), (32, 0x01), (63, 0x01)] {
            assert_eq!(b.byte_at(at).await, byte, "block {at}");
        }
        b.all_memory_is_back();
    });
}

#[test]
fn a_starved_or_write_can_be_aborted() {
    local(async || {
        let b = Bench::new(false);
        let (contended, volume) = contended(&b, 1);
        let (sender, answer) = tokio::sync::oneshot::channel();
        let set = Request::OrWrite { at: Lba(0), data: b.data(0x01, 1), fua: false };
        let command = volume.start(set, &b.account, |result| drop(sender.send(result)));
        contended.abort.replace(Some(command));
        assert_eq!(answer.await.unwrap().unwrap_err(), Error::Aborted.into());
        assert_eq!(b.byte_at(0).await, 0x80);
        b.all_memory_is_back();
    });
}

#[test]
fn an_abort_is_answered_and_undoes_nothing() {
    local(async || {
        let b = Bench::new(true);
        let answers = Rc::new(RefCell::new(Vec::new()));
        let start = |name: &'static str, request| {
            let answers = Rc::clone(&answers);
            let done = move |r: Result<Bufs, RequestError>| {
                answers.borrow_mut().push((name, r.map(|d| d.len())));
            };
            b.volume.start(request, &b.account, done)
        };
        let running = start("running", b.write(0, 1, 1));
        let waiting = start("waiting", b.write(0, 2, 1));
        settle().await;
        running.abort();
        waiting.abort();
        settle().await;
        let aborted = Err(RequestError::Device(Error::Aborted));
        assert_eq!(*answers.borrow(), [("waiting", aborted)], "what runs is not called back");
        b.ram.let_through(1);
        settle().await;
        assert_eq!(answers.borrow()[1], ("running", Ok(0)), "it took effect and says so");
        b.ram.let_through(1);
        assert_eq!(b.byte_at(0).await, 1);
        assert_eq!(b.volume.stats().aborts, 2);
        assert!(b.volume.stats().kinds.iter().all(|k| k.failed == 0), "an abort is no failure");
        b.all_memory_is_back();
    });
}

#[test]
fn a_command_that_waits_for_memory_can_be_aborted() {
    local(async || {
        let b = Bench::new(true);
        let hog = b.pool.account();
        let all = hog.try_credit(16 << 20, MemoryClass::LocalIo).unwrap();
        let answer = Rc::new(Cell::new(None));
        let reply = Rc::clone(&answer);
        let command = b.volume.start(read(0, 1), &b.account, move |r| reply.set(Some(r.is_err())));
        settle().await;
        assert_eq!(answer.get(), None);
        assert_eq!(b.volume.stats().memory_waits, 1);
        command.abort();
        settle().await;
        assert_eq!(answer.get(), Some(true));
        drop(all);
        b.all_memory_is_back();
    });
}

/// RFD 0037: its initiator would wait without limit, and take the path for a good one.
#[test]
fn a_client_that_supports_retry_waits_for_memory_with_a_limit() {
    local(async || {
        let b = Bench::new(false);
        let client = b.pool.client_account(Duration::from_millis(50));
        let hog = b.pool.account();
        let all = hog.try_credit(16 << 20, MemoryClass::LocalIo).unwrap();
        for request in [read(0, 1), Request::Flush] {
            assert_eq!(
                b.volume.execute(request, &client).await.unwrap_err(),
                RequestError::NoMemory
            );
        }
        drop(all);
        b.volume.execute(read(0, 1), &client).await.unwrap();
        b.volume.execute(Request::Flush, &client).await.unwrap();
        let stats = b.volume.stats();
        assert!(stats.kinds.iter().all(|kind| kind.failed == 0), "no fault of the disk's");
        b.all_memory_is_back();
    });
}

#[test]
fn closing_waits_for_commands_and_flushes() {
    local(async || {
        let b = Bench::new(true);
        let done = Rc::new(Cell::new(false));
        let reply = Rc::clone(&done);
        b.volume.start(b.write(0, 5, 1), &b.account, move |r| reply.set(r.is_ok()));
        let (volume, account) = (Rc::clone(&b.volume), b.account.clone());
        let closing = tokio::task::spawn_local(async move { volume.close(&account).await });
        settle().await;
        assert!(!done.get() && !closing.is_finished());
        assert_eq!(b.run(read(0, 1)).await.unwrap_err(), Error::Gone.into());
        b.ram.let_through(2);
        closing.await.unwrap().unwrap();
        assert!(done.get());
        assert_eq!(b.ram.0.flushes.get(), 1);
    });
}

#[test]
fn a_command_continues_without_its_caller() {
    local(async || {
        let b = Bench::new(true);
        let (volume, account, request) =
            (Rc::clone(&b.volume), b.account.clone(), b.write(0, 6, 1));
        let caller = tokio::task::spawn_local(async move {
            let _ = volume.execute(request, &account).await;
        });
        settle().await;
        caller.abort();
        settle().await;
        b.ram.let_through(2);
        assert_eq!(b.byte_at(0).await, 6);
    });
}

#[test]
fn errors_from_below_reach_the_caller_as_they_are() {
    local(async || {
        let b = Bench::new(false);
        for error in [
            Error::Unreadable { at: Lba(3) },
            Error::Unwritable { at: Lba(3) },
            Error::NoSpace,
            Error::Gone,
            // Another node serves: counted as no failure.
            Error::Fenced,
        ] {
            b.ram.0.fails.set(Some(error));
            for request in [b.write(0, 1, 1), read(0, 1), Request::Flush] {
                assert_eq!(b.run(request).await.unwrap_err(), RequestError::Device(error));
            }
        }
        let stats = b.volume.stats();
        assert_eq!(stats.kinds.iter().map(|k| k.failed).sum::<u64>(), 12);
        b.all_memory_is_back();
    });
}

/// As many writes as a client's share of the pool has room for: each needs a page more.
#[test]
fn writes_that_fill_their_clients_share_still_finish() {
    local(async || {
        let b = Bench::new(false);
        let mut data = Vec::new();
        while let Some(credit) = b.account.try_credit(8 * BLOCK, MemoryClass::SolicitedData) {
            data.push(copy_in(&credit, &[7; 8 * BLOCK]));
        }
        let (all, answered) = (data.len(), Rc::new(Cell::new(0)));
        for (i, data) in data.into_iter().enumerate() {
            let answered = Rc::clone(&answered);
            let request = Request::Write { at: Lba(i as u64 % 512 * 8), data, fua: false };
            b.volume.start(request, &b.account, move |r| {
                answered.set(answered.get() + usize::from(r.is_ok()));
            });
        }
        for _ in 0..all {
            yield_now().await;
        }
        assert_eq!(answered.get(), all);
        b.all_memory_is_back();
    });
}

/// Reads that wait for memory do not block writes whose data holds that memory.
#[test]
fn however_many_reads_wait_for_memory_writes_that_hold_it_finish() {
    local(async || {
        let b = Bench::new(false);
        let mut data = Vec::new();
        while let Some(credit) = b.account.try_credit(BLOCK, MemoryClass::SolicitedData) {
            data.push(copy_in(&credit, &[7; BLOCK]));
        }
        let answered = Rc::new(Cell::new(0));
        let start = |request| {
            let answered = Rc::clone(&answered);
            b.volume.start(request, &b.account, move |r| {
                answered.set(answered.get() + usize::from(r.is_ok()));
            });
        };
        (0..3000).for_each(|_| start(read(0, 64)));
        settle().await;
        assert!(b.volume.stats().memory_waits > 0);
        assert_eq!(answered.get(), 0, "the writes' data is all that their client may have");
        let all = 3000 + data.len();
        for data in data {
            start(Request::Write { at: Lba(0), data, fua: false });
        }
        for _ in 0..4 * all {
            yield_now().await;
        }
        assert_eq!(answered.get(), all);
        b.all_memory_is_back();
    });
}

/// An NVMe client may keep as many on one block; those that are aborted end, the others run.
#[test]
fn thousands_of_commands_on_one_block_end_in_order() {
    local(async || {
        let b = Bench::new(true);
        let ended = Rc::new(RefCell::new(Vec::new()));
        let commands: Vec<_> = (0..4000)
            .map(|i| {
                let ended = Rc::clone(&ended);
                let request = Request::Zero { range: range(7, 1), unmap: false, fua: false };
                b.volume
                    .start(request, &b.account, move |r| ended.borrow_mut().push((i, r.is_ok())))
            })
            .collect();
        settle().await;
        assert_eq!(b.ram.0.started.get(), 1);
        let kept = |i: &usize| *i == 0 || i.is_multiple_of(100);
        let aborted = || (0..4000).filter(|i| !kept(i));
        aborted().rev().for_each(|i| commands[i].abort());
        while ended.borrow().len() < aborted().count() {
            yield_now().await;
        }
        assert!(ended.take().iter().all(|(i, done)| !kept(i) && !done));
        b.ram.let_through(40);
        while ended.borrow().len() < 40 {
            yield_now().await;
        }
        let in_order: Vec<_> = (0..4000).filter(kept).map(|i| (i, true)).collect();
        assert_eq!(*ended.borrow(), in_order);
        b.all_memory_is_back();
    });
}

#[test]
fn an_aborted_flush_does_not_fail_those_that_share_it() {
    local(async || {
        let b = Bench::new(true);
        let answers = Rc::new(RefCell::new(Vec::new()));
        let flush = || {
            let answers = Rc::clone(&answers);
            b.volume.start(Request::Flush, &b.account, move |r| answers.borrow_mut().push(r.err()))
        };
        let (_runs, aborted, _shares) = (flush(), flush(), flush());
        settle().await;
        aborted.abort();
        b.ram.let_through(2);
        settle().await;
        assert_eq!(*answers.borrow(), [None, None, None]);
        assert_eq!(b.ram.0.flushes.get(), 2);
    });
}

/// A command whose layer panics is still answered, and no longer in flight: otherwise its client,
/// and the closing of the volume, would wait for ever.
#[test]
fn a_panic_in_a_layer_ends_its_command() {
    local(async || {
        let b = Bench::new(false);
        let answers = Rc::new(RefCell::new(Vec::new()));
        let reply = Rc::clone(&answers);
        b.ram.0.panics.set(true);
        b.volume.start(b.write(0, 1, 1), &b.account, move |r| reply.borrow_mut().push(r.err()));
        settle().await;
        assert_eq!(*answers.borrow(), [Some(RequestError::Device(Error::Gone))]);
        assert_eq!(b.volume.stats().in_flight, 0);
        let close = b.volume.close(&b.account);
        tokio::time::timeout(PATIENCE, close).await.expect("it closes").unwrap();
        assert_eq!(b.ram.0.flushes.get(), 1);
        b.all_memory_is_back();
    });
}

/// The task of a command is dropped with its core.
#[test]
fn a_lost_command_is_answered_and_not_in_flight() {
    let b = Bench::new(true);
    let answers = Rc::new(RefCell::new(Vec::new()));
    let reply = Rc::clone(&answers);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let core = LocalSet::new();
    core.block_on(&runtime, async {
        b.volume.start(b.write(0, 1, 1), &b.account, move |r| reply.borrow_mut().push(r.err()));
        settle().await;
    });
    let permit = block::drop_permit::permit_drops();
    drop(core);
    drop(permit);
    assert_eq!(*answers.borrow(), [Some(RequestError::Device(Error::Gone))]);
    b.ram.let_through(1);
    local(async || {
        let close = b.volume.close(&b.account);
        tokio::time::timeout(PATIENCE, close).await.expect("it closes").unwrap();
    });
}
