//! A device that misbehaves on purpose.
//!
//! [`Faulty`] passes operations on to a device; [`Faults`], its handle, holds the rules that say
//! which of them fail, wait, or return false results. The first matching rule decides. The same
//! seed and the same operations give the same faults.
//!
//! Errors and delays are what disks do. The lies ([`Effect::Ignore`], [`Effect::Misdirect`] …) are
//! what a wrong layer does: a test uses them to prove that it would have noticed.

use std::cell::RefCell;
use std::rc::Rc;
use std::time::Duration;

use rt::buf::{Bufs, copy_in};
use tokio::sync::Notify;

use super::Rng;
use crate::{Blocks, Ctx, Dev, Error, Info, Layer, Lba, Op};

/// What kind of operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum OpKind {
    /// [`Op::Read`].
    Read,
    /// [`Op::Write`].
    Write,
    /// [`Op::Zero`].
    Zero,
    /// [`Op::Unmap`].
    Unmap,
    /// [`Op::BlockStatus`].
    BlockStatus,
    /// [`Op::Flush`].
    Flush,
}

impl OpKind {
    /// All of them.
    pub const ALL: [Self; 6] =
        [Self::Read, Self::Write, Self::Zero, Self::Unmap, Self::BlockStatus, Self::Flush];

    /// The kind of `op`.
    #[must_use]
    pub fn of(op: &Op) -> Self {
        match op {
            Op::Read { .. } => Self::Read,
            Op::Write { .. } => Self::Write,
            Op::Zero { .. } => Self::Zero,
            Op::Unmap { .. } => Self::Unmap,
            Op::BlockStatus { .. } => Self::BlockStatus,
            Op::Flush => Self::Flush,
        }
    }
}

/// The effect on an operation. Errors that carry an address get the first block of the operation
/// that the rule covers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// It fails and does nothing. After [`Error::Gone`] all later operations fail likewise.
    Fail(Error),
    /// It is carried out and then reported as failed.
    FailAfter(Error),
    /// The first half of its blocks is written or zeroed, then it fails. Others just fail.
    FailHalfway(Error),
    /// It is carried out after a random time between the two.
    Delay(Duration, Duration),
    /// It is carried out once [`Faults::release`] is called.
    Stall,
    /// A lie: it does nothing and reports success; a read returns zeroes.
    Ignore,
    /// A lie: it happens this many blocks further on (backwards where that is outside).
    Misdirect(u64),
    /// A lie: a write's last block is half of the new contents and half of the old.
    Tear,
}

/// Which operations a rule applies to, and with what effect.
#[derive(Clone, Debug)]
pub struct Rule {
    kinds: Vec<OpKind>,
    range: Option<Blocks>,
    probability: f64,
    skip: u64,
    remaining: u64,
    effect: Effect,
}

impl Rule {
    /// `effect` for every operation.
    #[must_use]
    pub fn new(effect: Effect) -> Self {
        let kinds = OpKind::ALL.to_vec();
        Self { kinds, range: None, probability: 1.0, skip: 0, remaining: u64::MAX, effect }
    }

    /// Only operations of these kinds.
    #[must_use]
    pub fn on(mut self, kinds: &[OpKind]) -> Self {
        self.kinds = kinds.to_vec();
        self
    }

    /// Only operations that touch `range`; no flushes.
    #[must_use]
    pub fn within(mut self, range: Blocks) -> Self {
        self.range = Some(range);
        self
    }

    /// Only with probability `p`.
    #[must_use]
    pub fn with_probability(mut self, p: f64) -> Self {
        self.probability = p;
        self
    }

    /// Skips the first `n` operations that match.
    #[must_use]
    pub fn after(mut self, n: u64) -> Self {
        self.skip = n;
        self
    }

    /// Applies to `n` operations, then never again.
    #[must_use]
    pub fn times(mut self, n: u64) -> Self {
        self.remaining = n;
        self
    }

    /// Whether the rule applies now; counts.
    fn applies(&mut self, kind: OpKind, range: Option<Blocks>, rng: &mut Rng) -> bool {
        let covers = match (self.range, range) {
            (None, _) => true,
            (Some(mine), Some(range)) => mine.overlaps(&range),
            (Some(_), None) => false,
        };
        if !covers || self.remaining == 0 || !self.kinds.contains(&kind) {
            return false;
        }
        if self.skip > 0 {
            self.skip -= 1;
            return false;
        }
        if self.probability < 1.0 && !rng.chance(self.probability) {
            return false;
        }
        self.remaining = self.remaining.saturating_sub(1);
        true
    }
}

/// The handle to a [`Faulty`]: its rules. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Faults(Rc<FaultPlan>);

#[derive(Debug)]
struct FaultPlan {
    state: RefCell<State>,
    released: Notify,
}

#[derive(Debug)]
struct State {
    rules: Vec<Rule>,
    rng: Rng,
    is_gone: bool,
    hits: u64,
}

impl Faults {
    /// No faults yet; `seed` decides where a rule has a probability.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        let state = State { rules: Vec::new(), rng: Rng::new(seed), is_gone: false, hits: 0 };
        Self(Rc::new(FaultPlan { state: RefCell::new(state), released: Notify::new() }))
    }

    /// Adds a rule after the others.
    pub fn add(&self, rule: Rule) {
        self.0.state.borrow_mut().rules.push(rule);
    }

    /// Removes all rules; a failed device works again.
    pub fn clear(&self) {
        let mut state = self.0.state.borrow_mut();
        state.rules.clear();
        state.is_gone = false;
    }

    /// Lets all stalled operations go on.
    pub fn release(&self) {
        self.0.released.notify_waiters();
    }

    /// Number of operations that a rule affected.
    #[must_use]
    pub fn hits(&self) -> u64 {
        self.0.state.borrow().hits
    }

    fn select_effect(&self, op: &Op, block_size: u32) -> Option<(Effect, Lba)> {
        let mut state = self.0.state.borrow_mut();
        let State { rules, rng, is_gone: gone, hits: struck } = &mut *state;
        let range = op.range(block_size);
        let first = range.map_or(Lba(0), |r| r.at);
        if *gone {
            return Some((Effect::Fail(Error::Gone), first));
        }
        let i = rules.iter_mut().position(|r| r.applies(OpKind::of(op), range, rng))?;
        let rule = &rules[i];
        *struck += 1;
        *gone |= rule.effect == Effect::Fail(Error::Gone);
        let at = rule.range.map_or(first, |r| r.at.max(first));
        Some((rule.effect, at))
    }

    fn time_between(&self, shortest: Duration, longest: Duration) -> Duration {
        let nanos = |d: Duration| u64::try_from(d.as_nanos()).unwrap_or(u64::MAX);
        let nanos = self.0.state.borrow_mut().rng.within(nanos(shortest), nanos(longest));
        Duration::from_nanos(nanos)
    }
}

/// A device with faults.
#[derive(Debug)]
pub struct Faulty {
    below: Dev,
    faults: Faults,
}

impl Faulty {
    /// `below` with `faults`.
    #[must_use]
    pub fn new(below: Dev, faults: Faults) -> Self {
        Self { below, faults }
    }

    /// The device, and the handle to its faults.
    #[must_use]
    pub fn wrap(below: Dev, seed: u64) -> (Dev, Faults) {
        let faults = Faults::new(seed);
        (Dev::new(Self::new(below, faults.clone())), faults)
    }

    async fn apply_effect(
        &self,
        effect: Effect,
        at: Lba,
        op: Op,
        ctx: &Ctx,
    ) -> Result<Bufs, Error> {
        let info = self.below.info();
        match effect {
            Effect::Fail(e) => Err(with_address(e, at)),
            Effect::FailAfter(e) => {
                self.below.submit(op, ctx).await?;
                Err(with_address(e, at))
            }
            Effect::FailHalfway(e) => {
                if let Some(half) = first_half(op, info.block_size) {
                    self.below.submit(half, ctx).await?;
                }
                Err(with_address(e, at))
            }
            Effect::Delay(shortest, longest) => {
                tokio::time::sleep(self.faults.time_between(shortest, longest)).await;
                self.below.submit(op, ctx).await
            }
            Effect::Stall => {
                self.faults.0.released.notified().await;
                self.below.submit(op, ctx).await
            }
            Effect::Ignore => match op {
                Op::Read { blocks, .. } => {
                    Ok(Bufs::zeroes(blocks as usize * info.block_size as usize))
                }
                // Never report blocks as unmapped without asking the device.
                Op::BlockStatus { .. } => self.below.submit(op, ctx).await,
                _ => Ok(Bufs::new()),
            },
            Effect::Misdirect(by) => self.below.submit(shifted(op, by, &info), ctx).await,
            Effect::Tear => self.tear(op, ctx, info.block_size as usize).await,
        }
    }

    async fn tear(&self, op: Op, ctx: &Ctx, block: usize) -> Result<Bufs, Error> {
        let Op::Write { at, data, fua } = op else { return self.below.submit(op, ctx).await };
        let last = Lba(at.0 + (data.len() / block) as u64 - 1);
        let old = self.below.submit(Op::Read { at: last, blocks: 1 }, ctx).await?.to_vec();
        let mut torn = data.to_vec();
        let cut = torn.len() - block / 2;
        torn[cut..].copy_from_slice(&old[block / 2..]);
        let data = copy_in(ctx.credit(), &torn);
        self.below.submit(Op::Write { at, data, fua }, ctx).await
    }
}

impl Layer for Faulty {
    fn name(&self) -> &'static str {
        "faulty"
    }

    fn info(&self) -> Info {
        self.below.info()
    }

    async fn submit(&self, op: Op, ctx: Ctx) -> Result<Bufs, Error> {
        match self.faults.select_effect(&op, self.below.info().block_size) {
            None => self.below.submit(op, &ctx).await,
            Some((effect, at)) => self.apply_effect(effect, at, op, &ctx).await,
        }
    }
}

/// The error with its address replaced.
fn with_address(error: Error, at: Lba) -> Error {
    match error {
        Error::Unreadable { .. } => Error::Unreadable { at },
        Error::Corrupt { .. } => Error::Corrupt { at },
        Error::Unwritable { .. } => Error::Unwritable { at },
        Error::OutOfRange
        | Error::NoSpace
        | Error::ReadOnly
        | Error::Fenced
        | Error::Aborted
        | Error::Gone => error,
    }
}

/// The first half of what an operation changes; `None` if that is nothing.
fn first_half(op: Op, block_size: u32) -> Option<Op> {
    match op {
        Op::Write { at, data, fua } => {
            let half = data.len() / block_size as usize / 2 * block_size as usize;
            (half > 0).then(|| Op::Write { at, data: data.slice(0..half), fua })
        }
        Op::Zero { at, blocks, unmap, fua } => {
            (blocks > 1).then_some(Op::Zero { at, blocks: blocks / 2, unmap, fua })
        }
        Op::Read { .. } | Op::Unmap { .. } | Op::BlockStatus { .. } | Op::Flush => None,
    }
}

/// The operation `by` blocks further on, or before, whichever is inside the device.
fn shifted(mut op: Op, by: u64, info: &Info) -> Op {
    let end = op.range(info.block_size).and_then(|r| r.end());
    let (Op::Read { at, .. } | Op::Write { at, .. } | Op::Zero { at, .. } | Op::Unmap { at, .. }) =
        &mut op
    else {
        return op;
    };
    let fits = end.and_then(|end| end.checked_add(by)).is_some_and(|end| end <= info.blocks);
    at.0 = if fits { at.0 + by } else { at.0.saturating_sub(by) };
    op
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::TestClient;
    use crate::{BufferPool, Mem, MemOptions, drop_permit};

    fn disk() -> (TestClient, Faults) {
        let (dev, faults) = Faulty::wrap(Dev::new(Mem::new(MemOptions::new(512, 1000))), 1);
        (TestClient::new(&dev, &BufferPool::new(1 << 22).unwrap()), faults)
    }

    #[tokio::test]
    async fn errors_occur_where_and_as_often_as_configured() {
        let (c, faults) = disk();
        faults.add(
            Rule::new(Effect::Fail(Error::Unreadable { at: Lba(0) }))
                .on(&[OpKind::Read])
                .within(Blocks::new(Lba(10), 5))
                .after(1)
                .times(2),
        );
        c.read(8, 4).await.expect("spared");
        c.read(0, 10).await.expect("elsewhere");
        c.write(10, &[1; 512], false).await.expect("another kind");
        let fails = |at| Err(Error::Unreadable { at: Lba(at) });
        assert_eq!(c.read(8, 4).await.map(drop), fails(10));
        assert_eq!(c.read(12, 4).await.map(drop), fails(12));
        c.read(8, 4).await.expect("twice only");
        assert_eq!(faults.hits(), 2);
        faults.add(Rule::new(Effect::Fail(Error::Gone)).times(1));
        for _ in 0..2 {
            assert_eq!(c.flush().await, Err(Error::Gone));
        }
        faults.clear();
        c.flush().await.expect("back");
    }

    #[tokio::test]
    async fn failed_writes_leave_the_configured_data() {
        let (c, faults) = disk();
        let error = Error::Unwritable { at: Lba(0) };
        for (effect, expect) in [
            (Effect::Fail(error), [0u8, 0]),
            (Effect::FailHalfway(error), [1, 0]),
            (Effect::FailAfter(error), [1, 1]),
            (Effect::Ignore, [0, 0]),
            (Effect::Misdirect(2), [0, 0]),
            (Effect::Misdirect(u64::MAX), [0, 0]),
        ] {
            c.zero(0, 100, true).await.unwrap();
            faults.add(Rule::new(effect).on(&[OpKind::Write]).times(1));
            let ok = c.write(40, &[1; 1024], false).await.is_ok();
            assert_eq!(ok, matches!(effect, Effect::Ignore | Effect::Misdirect(_)), "{effect:?}");
            let found = c.read(40, 2).await.unwrap().to_vec();
            assert_eq!([found[0], found[512]], expect, "{effect:?}");
        }
        faults.add(Rule::new(Effect::Tear).on(&[OpKind::Write]).times(1));
        c.write(40, &[1; 1024], false).await.unwrap();
        let found = c.read(40, 2).await.unwrap().to_vec();
        assert!(found[..768].iter().all(|&b| b == 1) && found[768..].iter().all(|&b| b == 0));
    }

    #[tokio::test(start_paused = true)]
    async fn operations_are_delayed_and_stalled() {
        let (c, faults) = disk();
        let (short, long) = (Duration::from_millis(3), Duration::from_millis(9));
        faults.add(Rule::new(Effect::Delay(short, long)).on(&[OpKind::Read]));
        let since = tokio::time::Instant::now();
        c.read(0, 1).await.unwrap();
        assert!((short..=long + short).contains(&since.elapsed()));
        faults.add(Rule::new(Effect::Stall).on(&[OpKind::Flush]));
        let mut flush = Box::pin(c.flush());
        let waited = tokio::time::timeout(Duration::from_secs(100), &mut flush).await;
        assert!(waited.is_err());
        faults.release();
        flush.await.unwrap();
        faults.add(Rule::new(Effect::Stall));
        let forgotten = tokio::time::timeout(long, c.write(0, &[1; 512], false));
        let _permit = drop_permit::permit_drops();
        assert!(forgotten.await.is_err());
    }

    #[tokio::test]
    async fn the_same_seed_gives_the_same_faults() {
        let mut runs = Vec::new();
        for _ in 0..2 {
            let (c, faults) = disk();
            faults.add(Rule::new(Effect::Fail(Error::NoSpace)).with_probability(0.3));
            let mut run = Vec::new();
            for _ in 0..100 {
                run.push(c.flush().await.is_ok());
            }
            assert!((15..45).contains(&faults.hits()));
            runs.push(run);
        }
        assert_eq!(runs[0], runs[1]);
    }
}
