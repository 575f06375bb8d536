//! Random operations, several at a time, judged by the register checker.

use std::cell::RefCell;

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use rt::buf::Bufs;

use super::register::{Checker, Outcome, Ticket, Violation};
use super::{Rng, TestClient};
use crate::{Blocks, Error, Lba, Op, drop_permit};

/// A source of random operations on one range of a device. Operations in flight do not overlap, as
/// the contract demands.
#[derive(Debug)]
pub struct Workload {
    client: TestClient,
    range: Blocks,
    depth: usize,
    rng: RefCell<Rng>,
    errors: RefCell<Vec<Error>>,
}

/// One operation, before it begins.
#[derive(Clone, Copy, Debug)]
enum WorkloadOp {
    Read(Blocks),
    Write(Blocks, bool),
    Zero(Blocks, bool, bool),
    Unmap(Blocks),
    Flush,
}

impl WorkloadOp {
    fn range(self) -> Option<Blocks> {
        match self {
            Self::Read(r) | Self::Write(r, _) | Self::Zero(r, ..) | Self::Unmap(r) => Some(r),
            Self::Flush => None,
        }
    }
}

impl Workload {
    /// Operations on `span`, up to `depth` at a time.
    #[must_use]
    pub fn new(client: TestClient, span: Blocks, depth: usize, seed: u64) -> Self {
        let (rng, errors) = (RefCell::new(Rng::new(seed)), RefCell::default());
        Self { client, range: span, depth, rng, errors }
    }

    /// The errors that operations ended with since the last call.
    #[must_use]
    pub fn take_errors(&self) -> Vec<Error> {
        self.errors.take()
    }

    /// Does `count` operations and waits for all.
    ///
    /// # Errors
    /// The first read that the checker objects to.
    pub async fn run(&self, checker: &RefCell<Checker>, count: usize) -> Result<(), Violation> {
        self.run_ops(checker, count, true).await
    }

    /// Does `count` operations and drops those then in flight, as a crash does. The caller reports
    /// the crash to the checker.
    ///
    /// # Errors
    /// As [`Self::run`].
    pub async fn run_until_crash(
        &self,
        checker: &RefCell<Checker>,
        count: usize,
    ) -> Result<(), Violation> {
        self.run_ops(checker, count, false).await
    }

    /// Reads the whole range.
    ///
    /// # Errors
    /// The first block that the checker objects to.
    pub async fn audit(&self, checker: &RefCell<Checker>) -> Result<(), Violation> {
        let step = u64::from(self.client.dev().info().max_transfer_blocks).min(256);
        let end = self.range.at.0 + self.range.count;
        let mut at = self.range.at.0;
        while at < end {
            let count = step.min(end - at);
            self.run_op(checker, WorkloadOp::Read(Blocks::new(Lba(at), count))).await?;
            at += count;
        }
        Ok(())
    }

    async fn run_ops(
        &self,
        checker: &RefCell<Checker>,
        count: usize,
        finish: bool,
    ) -> Result<(), Violation> {
        let mut in_flight = FuturesUnordered::new();
        let mut busy: Vec<Blocks> = Vec::new();
        let mut result = Ok(());
        for _ in 0..count {
            if in_flight.len() >= self.depth {
                result = result.and(await_one(&mut in_flight, &mut busy).await);
            }
            let mut step = self.choose_op();
            while step.range().is_some_and(|r| busy.iter().any(|b| b.overlaps(&r))) {
                result = result.and(await_one(&mut in_flight, &mut busy).await);
                step = self.choose_op();
            }
            if result.is_err() {
                break;
            }
            busy.extend(step.range());
            in_flight.push(async move { (step, self.run_op(checker, step).await) });
        }
        if finish {
            while !in_flight.is_empty() {
                result = result.and(await_one(&mut in_flight, &mut busy).await);
            }
        }
        let _permit = drop_permit::permit_drops();
        drop(in_flight);
        result
    }

    fn choose_op(&self) -> WorkloadOp {
        let mut rng = self.rng.borrow_mut();
        let info = self.client.dev().info();
        let longest = u64::from(info.max_transfer_blocks).min(self.range.count);
        let count = match rng.below(16) {
            0 => rng.within(1, longest),
            1..4 => rng.within(1, longest.min(64)),
            _ => rng.within(1, longest.min(9)),
        };
        let at = Lba(self.range.at.0 + rng.below(self.range.count - count + 1));
        let range = Blocks::new(at, count);
        match rng.below(20) {
            0..7 => WorkloadOp::Read(range),
            7..15 => WorkloadOp::Write(range, rng.one_in(8)),
            15 | 16 => WorkloadOp::Zero(range, rng.one_in(2), rng.one_in(4)),
            17 | 18 => WorkloadOp::Unmap(range),
            _ => WorkloadOp::Flush,
        }
    }

    async fn run_op(&self, checker: &RefCell<Checker>, step: WorkloadOp) -> Result<(), Violation> {
        let info = self.client.dev().info();
        let carried = match step {
            WorkloadOp::Read(r) | WorkloadOp::Write(r, _) => r.count * u64::from(info.block_size),
            WorkloadOp::Zero(..) | WorkloadOp::Unmap(_) | WorkloadOp::Flush => 0,
        };
        let ctx = self.client.ctx(usize::try_from(carried).expect("fits memory")).await;
        let count = |r: Blocks| u32::try_from(r.count).expect("at most a transfer");
        let (ticket, op) = {
            let mut checker = checker.borrow_mut();
            match step {
                WorkloadOp::Read(r) => {
                    (checker.begin_read(r), Op::Read { at: r.at, blocks: count(r) })
                }
                WorkloadOp::Write(r, fua) => {
                    let ticket = checker.begin_write(r, 1, fua);
                    let data = self.fragment_buffers(checker.data(ticket, ctx.credit()));
                    (ticket, Op::Write { at: r.at, data, fua })
                }
                WorkloadOp::Zero(r, unmap, fua) => {
                    let op = Op::Zero { at: r.at, blocks: count(r), unmap, fua };
                    (checker.begin_zero(r, fua), op)
                }
                WorkloadOp::Unmap(r) => {
                    let op = Op::Unmap { at: r.at, blocks: count(r) };
                    (checker.begin_unmap(r, info.unmap_zeroes), op)
                }
                WorkloadOp::Flush => (checker.begin_flush(), Op::Flush),
            }
        };
        let result = self.client.dev().submit(op, &ctx).await;
        self.record_result(&mut checker.borrow_mut(), ticket, step, result)
    }

    fn record_result(
        &self,
        checker: &mut Checker,
        ticket: Ticket,
        step: WorkloadOp,
        result: Result<Bufs, Error>,
    ) -> Result<(), Violation> {
        match (step, result) {
            (WorkloadOp::Read(_), Ok(data)) => return checker.end_read(ticket, &data),
            (_, Ok(_)) => checker.end(ticket, Outcome::Done),
            (_, Err(e)) => {
                self.errors.borrow_mut().push(e);
                checker.end(ticket, Outcome::Failed);
            }
        }
        Ok(())
    }

    /// Sometimes splits the data into odd lengths: layers may not rely on aligned memory.
    fn fragment_buffers(&self, data: Bufs) -> Bufs {
        let mut rng = self.rng.borrow_mut();
        if !rng.one_in(6) {
            return data;
        }
        let mut out = Bufs::new();
        let mut at = 0;
        while at < data.len() {
            let piece = usize::try_from(rng.within(1, 9000)).expect("small");
            let end = data.len().min(at + piece);
            out.append(data.slice(at..end));
            at = end;
        }
        out
    }
}

async fn await_one<F>(
    in_flight: &mut FuturesUnordered<F>,
    busy: &mut Vec<Blocks>,
) -> Result<(), Violation>
where
    F: Future<Output = (WorkloadOp, Result<(), Violation>)>,
{
    let Some((step, result)) = in_flight.next().await else { return Ok(()) };
    if let Some(range) = step.range()
        && let Some(i) = busy.iter().position(|b| *b == range)
    {
        busy.swap_remove(i);
    }
    result
}
