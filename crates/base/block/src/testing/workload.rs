//! Random operations, several at a time, judged by the register checker.

use std::cell::RefCell;

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use rt::buf::Bufs;

use super::register::{Checker, Outcome, Ticket, Violation};
use super::{Client, Rng};
use crate::{Blocks, Error, Lba, Op, crash};

/// A source of random operations on one stretch of a device. Operations in flight do not overlap,
/// as the contract demands.
#[derive(Debug)]
pub struct Workload {
    client: Client,
    span: Blocks,
    depth: usize,
    rng: RefCell<Rng>,
    errors: RefCell<Vec<Error>>,
}

/// One operation, before it begins.
#[derive(Clone, Copy, Debug)]
enum Step {
    Read(Blocks),
    Write(Blocks, bool),
    Zero(Blocks, bool, bool),
    Unmap(Blocks),
    Flush,
}

impl Step {
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
    pub fn new(client: Client, span: Blocks, depth: usize, seed: u64) -> Self {
        let (rng, errors) = (RefCell::new(Rng::new(seed)), RefCell::default());
        Self { client, span, depth, rng, errors }
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
        self.go(checker, count, true).await
    }

    /// Does `count` operations and drops what is then in flight, as a crash does. The caller tells
    /// the checker.
    ///
    /// # Errors
    /// As [`Self::run`].
    pub async fn run_until_crash(
        &self,
        checker: &RefCell<Checker>,
        count: usize,
    ) -> Result<(), Violation> {
        self.go(checker, count, false).await
    }

    /// Reads all of the stretch.
    ///
    /// # Errors
    /// The first block that the checker objects to.
    pub async fn audit(&self, checker: &RefCell<Checker>) -> Result<(), Violation> {
        let step = u64::from(self.client.dev().info().max_transfer_blocks).min(256);
        let end = self.span.at.0 + self.span.count;
        let mut at = self.span.at.0;
        while at < end {
            let count = step.min(end - at);
            self.one(checker, Step::Read(Blocks::new(Lba(at), count))).await?;
            at += count;
        }
        Ok(())
    }

    async fn go(
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
                result = result.and(next(&mut in_flight, &mut busy).await);
            }
            let mut step = self.choose();
            while step.range().is_some_and(|r| busy.iter().any(|b| b.overlaps(&r))) {
                result = result.and(next(&mut in_flight, &mut busy).await);
                step = self.choose();
            }
            if result.is_err() {
                break;
            }
            busy.extend(step.range());
            in_flight.push(async move { (step, self.one(checker, step).await) });
        }
        if finish {
            while !in_flight.is_empty() {
                result = result.and(next(&mut in_flight, &mut busy).await);
            }
        }
        let _permit = crash::permit();
        drop(in_flight);
        result
    }

    fn choose(&self) -> Step {
        let mut rng = self.rng.borrow_mut();
        let info = self.client.dev().info();
        let longest = u64::from(info.max_transfer_blocks).min(self.span.count);
        let count = match rng.below(16) {
            0 => rng.within(1, longest),
            1..4 => rng.within(1, longest.min(64)),
            _ => rng.within(1, longest.min(9)),
        };
        let at = Lba(self.span.at.0 + rng.below(self.span.count - count + 1));
        let range = Blocks::new(at, count);
        match rng.below(20) {
            0..7 => Step::Read(range),
            7..15 => Step::Write(range, rng.one_in(8)),
            15 | 16 => Step::Zero(range, rng.one_in(2), rng.one_in(4)),
            17 | 18 => Step::Unmap(range),
            _ => Step::Flush,
        }
    }

    async fn one(&self, checker: &RefCell<Checker>, step: Step) -> Result<(), Violation> {
        let info = self.client.dev().info();
        let carried = match step {
            Step::Read(r) | Step::Write(r, _) => r.count * u64::from(info.block_size),
            Step::Zero(..) | Step::Unmap(_) | Step::Flush => 0,
        };
        let ctx = self.client.ctx(usize::try_from(carried).expect("fits memory")).await;
        let count = |r: Blocks| u32::try_from(r.count).expect("at most a transfer");
        let (ticket, op) = {
            let mut checker = checker.borrow_mut();
            match step {
                Step::Read(r) => (checker.begin_read(r), Op::Read { at: r.at, blocks: count(r) }),
                Step::Write(r, fua) => {
                    let ticket = checker.begin_write(r, 1, fua);
                    let data = self.cut(checker.data(ticket, ctx.credit()));
                    (ticket, Op::Write { at: r.at, data, fua })
                }
                Step::Zero(r, unmap, fua) => {
                    let op = Op::Zero { at: r.at, blocks: count(r), unmap, fua };
                    (checker.begin_zero(r, fua), op)
                }
                Step::Unmap(r) => {
                    let op = Op::Unmap { at: r.at, blocks: count(r) };
                    (checker.begin_unmap(r, info.unmap_zeroes), op)
                }
                Step::Flush => (checker.begin_flush(), Op::Flush),
            }
        };
        let result = self.client.dev().submit(op, &ctx).await;
        self.judge(&mut checker.borrow_mut(), ticket, step, result)
    }

    fn judge(
        &self,
        checker: &mut Checker,
        ticket: Ticket,
        step: Step,
        result: Result<Bufs, Error>,
    ) -> Result<(), Violation> {
        match (step, result) {
            (Step::Read(_), Ok(data)) => return checker.end_read(ticket, &data),
            (_, Ok(_)) => checker.end(ticket, Outcome::Done),
            (_, Err(e)) => {
                self.errors.borrow_mut().push(e);
                checker.end(ticket, Outcome::Failed);
            }
        }
        Ok(())
    }

    /// The data in pieces of odd lengths, now and then: layers may not rely on aligned memory.
    fn cut(&self, data: Bufs) -> Bufs {
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

async fn next<F>(
    in_flight: &mut FuturesUnordered<F>,
    busy: &mut Vec<Blocks>,
) -> Result<(), Violation>
where
    F: Future<Output = (Step, Result<(), Violation>)>,
{
    let Some((step, result)) = in_flight.next().await else { return Ok(()) };
    if let Some(range) = step.range()
        && let Some(i) = busy.iter().position(|b| *b == range)
    {
        busy.swap_remove(i);
    }
    result
}
