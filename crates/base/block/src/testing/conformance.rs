//! The suite that every layer passes.
//!
//! A [`Subject`] makes devices of the layer under test; [`check`] tests each against everything
//! that the contract in the [crate documentation](crate) promises, and panics on a violation. What
//! a subject cannot do (grow, lose power …) is skipped; its methods say so.

use std::cell::RefCell;
use std::time::Duration;

use rt::buf::{BufferPool, Bufs, copy_in};

use super::faulty::OpKind;
use super::register::{Checker, CrashKind, InitialContents};
use super::workload::Workload;
use super::{Rng, TestClient};
use crate::{Blocks, Dev, Error, Info, Lba, METADATA_LBA, Op, drop_permit};

/// Smallest device, in bytes, that the suite can use.
pub const MIN_BYTES: u64 = 4 << 20;

/// Least memory in bytes that the pool of a subject must have.
pub const MIN_POOL: usize = 32 << 20;

/// Space in bytes that a file system may take, or give back, for its own records of a file.
const FS_RECORD_BYTES: u64 = 64 << 10;

/// A layer under test.
pub trait Subject {
    /// The pool that operations take their memory from; nothing else uses it.
    fn pool(&self) -> BufferPool;

    /// A new device of at least [`MIN_BYTES`] that reads as zeroes.
    fn fresh(&self) -> impl Future<Output = Dev>;

    /// Makes the device that was made last larger. False if it cannot be.
    fn grow(&self) -> impl Future<Output = bool>;

    /// Bytes of space that the last device takes; `None` if unknown.
    fn space_used(&self) -> impl Future<Output = Option<u64>>;

    /// Cuts the power under the last device and reopens it with everything above it. All other
    /// handles to it are gone. `None` if that cannot be done.
    fn cut_power(&self, seed: u64) -> impl Future<Output = Option<Dev>>;

    /// Makes the next operation of this kind on the last device fail with `error`, if it touches a
    /// medium. False if that cannot be done, or if the layer would hide it.
    fn fail_next(&self, kind: OpKind, error: Error) -> impl Future<Output = bool>;
}

/// Checks everything.
///
/// # Panics
/// Where the layer breaks the contract.
pub async fn check(subject: &impl Subject, seed: u64) {
    reads_return_what_was_written(&Fixture::new(subject).await, seed).await;
    check_memory_returned(subject).await;
    boundary_operations(&Fixture::new(subject).await).await;
    check_memory_returned(subject).await;
    zeroing(subject, &Fixture::new(subject).await).await;
    check_memory_returned(subject).await;
    unmapping(subject, &Fixture::new(subject).await).await;
    check_memory_returned(subject).await;
    block_status(&Fixture::new(subject).await).await;
    check_memory_returned(subject).await;
    random_operations(&Fixture::new(subject).await, seed).await;
    check_memory_returned(subject).await;
    metadata_area(&Fixture::new(subject).await, seed).await;
    check_memory_returned(subject).await;
    abort_and_drop(&Fixture::new(subject).await).await;
    check_memory_returned(subject).await;
    errors_are_passed_on(subject).await;
    check_memory_returned(subject).await;
    growth(subject, &Fixture::new(subject).await).await;
    check_memory_returned(subject).await;
    power_cuts(subject, seed).await;
    check_memory_returned(subject).await;
}

/// All memory was returned and no operation took more than declared.
async fn check_memory_returned(subject: &impl Subject) {
    let pool = subject.pool();
    for _ in 0..2000 {
        if pool.usage().free == pool.usage().total {
            break;
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let usage = pool.usage();
    assert_eq!(usage.overdrafts, 0, "operations took more memory than Info::overhead says");
    assert_eq!(usage.free, usage.total, "memory was leaked");
}

/// A device under test and its client.
struct Fixture {
    client: TestClient,
    info: Info,
}

impl Fixture {
    async fn new(subject: &impl Subject) -> Self {
        let dev = subject.fresh().await;
        let bench = Self::with_dev(&dev, &subject.pool());
        assert!(bench.info.bytes() >= MIN_BYTES, "the subject's devices are too small");
        bench
    }

    fn with_dev(dev: &Dev, pool: &BufferPool) -> Self {
        Self { client: TestClient::new(dev, pool), info: dev.info() }
    }

    fn block_bytes(&self) -> usize {
        self.info.block_size as usize
    }

    fn bytes(&self, blocks: u64) -> usize {
        usize::try_from(blocks).expect("fits memory") * self.block_bytes()
    }

    async fn expect(&self, at: u64, expected: &[u8]) {
        let blocks =
            u32::try_from(expected.len() / self.block_bytes()).expect("at most a transfer");
        let found = self.client.read(at, blocks).await.expect("read").to_vec();
        if found != expected {
            let odd = found.iter().zip(expected).position(|(a, b)| a != b);
            panic!("byte {odd:?} of a read of {blocks} blocks at {at} is wrong");
        }
    }
}

fn random_bytes(rng: &mut Rng, len: usize) -> Vec<u8> {
    let mut out = Vec::with_capacity(len + 8);
    while out.len() < len {
        out.extend_from_slice(&rng.u64().to_le_bytes());
    }
    out.truncate(len);
    out
}

/// The metadata area is zero at first, stores data, and is not part of the volume.
async fn metadata_area(b: &Fixture, seed: u64) {
    let count = b.info.metadata_blocks;
    let far = [METADATA_LBA.0 - 1, METADATA_LBA.0 + u64::from(count)];
    for at in far {
        assert_eq!(b.client.read(at, 1).await.map(drop), Err(Error::OutOfRange));
    }
    if count == 0 || count > b.info.max_transfer_blocks {
        return;
    }
    let len = b.bytes(u64::from(count));
    b.expect(METADATA_LBA.0, &vec![0; len]).await;
    let mut rng = Rng::new(seed);
    let (inside, beside) = (random_bytes(&mut rng, b.block_bytes()), random_bytes(&mut rng, len));
    for at in [0, b.info.blocks - 1] {
        b.client.write(at, &inside, false).await.expect("write");
    }
    b.client.write(METADATA_LBA.0, &beside, true).await.expect("write past the volume");
    b.expect(METADATA_LBA.0, &beside).await;
    for at in [0, b.info.blocks - 1] {
        b.expect(at, &inside).await;
    }
    let half = count / 2;
    b.client.zero(METADATA_LBA.0, half, false).await.expect("zero past the volume");
    let zeroes = vec![0; b.bytes(u64::from(half))];
    b.expect(METADATA_LBA.0, &[&zeroes[..], &beside[zeroes.len()..]].concat()).await;
}

/// Every start within two physical blocks, lengths around it and the largest, neighbours intact.
async fn reads_return_what_was_written(b: &Fixture, seed: u64) {
    let mut rng = Rng::new(seed);
    let physical = u64::from(b.info.physical_block_size / b.info.block_size).clamp(1, 16);
    let most = u64::from(b.info.max_transfer_blocks).min(b.info.blocks / 2);
    let window = most + 4 * physical;
    let mut model = vec![0u8; b.bytes(window)];
    let lengths: Vec<u64> = (1..=(2 * physical + 1).min(most)).collect();
    for at in 0..2 * physical {
        let longest = if at < 2 { most } else { 1 };
        for &blocks in lengths.iter().chain([&longest]) {
            let range = b.bytes(at)..b.bytes(at + blocks);
            let data = random_bytes(&mut rng, range.len());
            b.client.write(at, &data, rng.one_in(4)).await.expect("write");
            model[range.clone()].copy_from_slice(&data);
            b.expect(at, &model[range]).await;
            let start = at.saturating_sub(1);
            let end = (at + blocks + 1).min(start + most);
            b.expect(start, &model[b.bytes(start)..b.bytes(end)]).await;
        }
    }
    unaligned_memory(b, &mut rng).await;
}

/// Data in buffers that begin and end anywhere in memory.
async fn unaligned_memory(b: &Fixture, rng: &mut Rng) {
    let blocks = 40.min(u64::from(b.info.max_transfer_blocks));
    for cut in [1, 3, 511, 512, 513, 4095, 4097] {
        let bytes = random_bytes(rng, b.bytes(blocks));
        let ctx = b.client.ctx(bytes.len() + 1).await;
        let mut padded = vec![0];
        padded.extend_from_slice(&bytes);
        let shifted = copy_in(ctx.credit(), &padded).slice(1..padded.len());
        let mut data = Bufs::new();
        let mut at = 0;
        while at < bytes.len() {
            let end = bytes.len().min(at + cut);
            data.append(shifted.slice(at..end));
            at = end;
        }
        drop(shifted);
        b.client
            .dev()
            .submit(Op::Write { at: Lba(3), data, fua: false }, &ctx)
            .await
            .expect("write");
        drop(ctx);
        b.expect(3, &bytes).await;
    }
}

/// The last blocks work, those beyond do not, and refused operations change nothing.
async fn boundary_operations(b: &Fixture) {
    let (end, most) = (b.info.blocks, b.info.max_transfer_blocks);
    let blocks = most.min(u32::try_from(end).unwrap_or(u32::MAX));
    let start = end - u64::from(blocks);
    let data = random_bytes(&mut Rng::new(1), b.bytes(u64::from(blocks)));
    b.client.write(start, &data, true).await.expect("the largest write at the end");
    b.expect(start, &data).await;
    let one = &data[..b.block_bytes()];
    b.client.write(0, one, false).await.expect("the first block");
    b.client.write(end - 1, one, false).await.expect("the last block");
    for (at, count) in [(end, 1), (end - 1, 2), (u64::MAX, 1), (u64::MAX - 1, 2), (0, 0), (end, 0)]
    {
        let refused = Err(Error::OutOfRange);
        assert_eq!(b.client.read(at, count).await.map(drop), refused, "read {count} at {at}");
        assert_eq!(b.client.zero(at, count, true).await, refused, "zero {count} at {at}");
        assert_eq!(b.client.unmap(at, count).await, refused, "unmap {count} at {at}");
        let data = &data[..b.bytes(u64::from(count))];
        assert_eq!(b.client.write(at, data, false).await, refused, "write {count} at {at}");
    }
    assert_eq!(b.client.write(0, &data[1..], false).await, Err(Error::OutOfRange));
    if u64::from(most) < end {
        let too_long = b.client.read(0, most + 1).await.map(drop);
        assert_eq!(too_long, Err(Error::OutOfRange), "more than max_transfer_blocks");
    }
    b.expect(0, one).await;
    b.expect(end - 1, one).await;
}

/// Zeroed ranges read as zeroes at every alignment, neighbours keep what they hold.
async fn zeroing(subject: &impl Subject, b: &Fixture) {
    let granule = u64::from(b.info.unmap_granularity_blocks).clamp(1, 64);
    let window = 4 * granule.max(8);
    let mut rng = Rng::new(2);
    for unmap in [false, true] {
        for at in 0..granule.min(9) {
            for blocks in [1, granule - granule / 2, granule, granule + 1, 2 * granule + 3] {
                let mut model = random_bytes(&mut rng, b.bytes(window));
                b.client.write(0, &model, false).await.expect("write");
                let blocks = u32::try_from(blocks).expect("small");
                b.client.zero(at, blocks, unmap).await.expect("zero");
                model[b.bytes(at)..b.bytes(at + u64::from(blocks))].fill(0);
                b.expect(0, &model).await;
            }
        }
    }
    // Far more than one transfer carries.
    let all = u32::try_from(b.info.blocks).unwrap_or(u32::MAX);
    for unmap in [true, false] {
        b.client
            .write(b.info.blocks / 2, &random_bytes(&mut rng, b.block_bytes()), false)
            .await
            .expect("write");
        b.client.zero(0, all, unmap).await.expect("zero everything");
        b.expect(b.info.blocks / 2, &vec![0; b.block_bytes()]).await;
        if let (false, Some(used)) = (unmap, subject.space_used().await) {
            assert!(
                used >= u64::from(all) * u64::from(b.info.block_size),
                "space is not freed: {used}"
            );
        }
    }
}

/// Unmapped ranges read as declared, and really free space.
async fn unmapping(subject: &impl Subject, b: &Fixture) {
    let granule = u64::from(b.info.unmap_granularity_blocks);
    let mut rng = Rng::new(3);
    let window = 4 * granule.clamp(8, 64);
    for at in [0, 1, granule.saturating_sub(1)] {
        let mut model = random_bytes(&mut rng, b.bytes(window));
        b.client.write(0, &model, false).await.expect("write");
        let count = (granule + 2).min(window - at);
        b.client.unmap(at, u32::try_from(count).expect("small")).await.expect("unmap");
        let range = b.bytes(at)..b.bytes(at + count);
        if b.info.unmap_zeroes {
            model[range.clone()].fill(0);
            b.expect(0, &model).await;
        }
        b.expect(at + count, &model[range.end..]).await;
    }
    if granule == 0 || subject.space_used().await.is_none() {
        return;
    }
    let step = u64::from(b.info.max_transfer_blocks).min(b.info.blocks);
    let all = u32::try_from(b.info.blocks / granule * granule).expect("test devices are small");
    b.client.unmap(0, all).await.expect("unmap everything");
    b.client.flush().await.expect("flush");
    let empty = subject.space_used().await.expect("known before");
    let data = random_bytes(&mut rng, b.bytes(step));
    b.client.write(0, &data, false).await.expect("write");
    b.client.flush().await.expect("flush");
    let full = subject.space_used().await.expect("known before");
    assert!(
        full + FS_RECORD_BYTES >= empty + data.len() as u64,
        "data takes space: {empty} {full}"
    );
    b.client.unmap(0, all).await.expect("unmap everything");
    b.client.flush().await.expect("flush");
    let after = subject.space_used().await.expect("known before");
    assert!(after <= empty + FS_RECORD_BYTES, "unmapping frees: {empty} {full} {after}");
}

/// All written blocks are mapped, unmapped blocks read as zeroes, and the runs cover the range.
async fn block_status(b: &Fixture) {
    let granule = u64::from(b.info.unmap_granularity_blocks).clamp(8, 64);
    let window = (8 * granule).min(b.info.blocks);
    let data = random_bytes(&mut Rng::new(7), b.block_bytes());
    let mut written = Vec::new();
    for at in [0, 3, granule, 3 * granule + 1, window - 1, b.info.blocks - 1] {
        b.client.write(at, &data, false).await.expect("write");
        written.push(at);
    }
    let freed = u32::try_from(2 * granule).expect("small");
    b.client.unmap(3 * granule, freed).await.expect("unmap");
    written.retain(|at| !(3 * granule..5 * granule).contains(at));
    for start in [0, 1, 4 * granule] {
        let mut at = start;
        while at < window {
            let left = u32::try_from(window - at).expect("small");
            let run = b.client.block_status(at, left).await.expect("map");
            let end = at + u64::from(run.blocks);
            if !run.mapped {
                assert!(!written.iter().any(|w| (at..end).contains(w)), "{run:?} at {at}");
                for at in at..end {
                    b.expect(at, &vec![0; b.block_bytes()]).await;
                }
            }
            at = end;
        }
    }
    let last = b.info.blocks - 1;
    assert!(b.client.block_status(last, 1).await.expect("map").mapped);
    assert_eq!(b.client.block_status(last, 2).await, Err(Error::OutOfRange));
}

/// Random operations, one at a time and many, against the checker.
async fn random_operations(b: &Fixture, seed: u64) {
    let checker = RefCell::new(Checker::new(1, b.info.block_size, InitialContents::Zeroes));
    let count = b.info.blocks.min(4096);
    let spans = [Blocks::new(Lba(0), count), Blocks::new(Lba(b.info.blocks - count), count)];
    for (span, depth) in [(spans[0], 1), (spans[0], 16), (spans[1], 8)] {
        let span = if depth == 1 { Blocks::new(span.at, count.min(64)) } else { span };
        let workload = Workload::new(b.client.clone(), span, depth, seed ^ depth as u64);
        let checked = async {
            workload.run(&checker, 400).await?;
            workload.audit(&checker).await
        };
        checked.await.unwrap_or_else(|v| panic!("seed {seed}, depth {depth}: {v}"));
        assert_eq!(workload.take_errors(), [], "seed {seed}, depth {depth}");
    }
    let stats = b.client.dev().stats();
    assert_eq!((stats.in_flight, stats.errors), (0, 0));
}

/// An operation aborted before it starts does nothing; one that a crash drops keeps no memory.
async fn abort_and_drop(b: &Fixture) {
    let data = random_bytes(&mut Rng::new(4), b.block_bytes());
    b.client.write(5, &data, false).await.expect("write");
    let ctx = b.client.ctx(b.block_bytes()).await;
    ctx.abort();
    let zero = Op::Zero { at: Lba(5), blocks: 1, unmap: false, fua: false };
    assert_eq!(b.client.dev().submit(zero, &ctx).await.map(drop), Err(Error::Aborted));
    b.expect(5, &data).await;
    drop(ctx);
    for kind in [OpKind::Read, OpKind::Write, OpKind::Zero, OpKind::Flush] {
        let permit = drop_permit::permit_drops();
        let ctx = b.client.ctx(b.block_bytes()).await;
        let data = copy_in(ctx.credit(), &data);
        let op = op_of_kind(kind, 6, data);
        let mut op = Box::pin(b.client.dev().submit(op, &ctx));
        // Polled once, then never again.
        let _ = futures_util::poll!(&mut op);
        drop(op);
        drop(permit);
    }
    assert_eq!(b.client.dev().stats().in_flight, 0);
    // A disk may still be working on them; wait until it is done.
    tokio::time::sleep(Duration::from_millis(200)).await;
    b.expect(5, &data).await;
    b.client.flush().await.expect("flush");
}

fn op_of_kind(kind: OpKind, at: u64, data: Bufs) -> Op {
    let at = Lba(at);
    match kind {
        OpKind::Read => Op::Read { at, blocks: 1 },
        OpKind::Write => Op::Write { at, data, fua: true },
        OpKind::Zero => Op::Zero { at, blocks: 1, unmap: false, fua: false },
        OpKind::Unmap => Op::Unmap { at, blocks: 1 },
        OpKind::BlockStatus => Op::BlockStatus { at, blocks: 1 },
        OpKind::Flush => Op::Flush,
    }
}

/// An error from below is passed on, with an address inside the range, and is temporary; a failed
/// flush and a lost device are permanent.
async fn errors_are_passed_on(subject: &impl Subject) {
    let cases = [
        (OpKind::Read, Error::Unreadable { at: Lba(0) }),
        (OpKind::Write, Error::Unwritable { at: Lba(0) }),
        (OpKind::Write, Error::NoSpace),
        (OpKind::Flush, Error::Gone),
    ];
    for (kind, error) in cases {
        let b = Fixture::new(subject).await;
        let data = random_bytes(&mut Rng::new(5), b.bytes(8));
        b.client.write(16, &data, true).await.expect("write");
        if !subject.fail_next(kind, error).await {
            continue;
        }
        let result = match kind {
            OpKind::Read => b.client.read(16, 8).await.map(drop),
            OpKind::Write => b.client.write(16, &data, false).await,
            OpKind::Zero | OpKind::Unmap | OpKind::BlockStatus | OpKind::Flush => {
                b.client.flush().await
            }
        };
        let found = result.expect_err("the medium failed");
        match (found, error) {
            (Error::Unreadable { at }, Error::Unreadable { .. })
            | (Error::Unwritable { at }, Error::Unwritable { .. }) => {
                assert!((16..24).contains(&at.0), "{found} names a block outside 16..24");
            }
            _ => assert_eq!(found, error, "{kind:?}"),
        }
        assert_eq!(b.client.dev().stats().errors, 1);
        if error == Error::Gone {
            assert_eq!(b.client.read(0, 1).await.map(drop), Err(Error::Gone));
            assert_eq!(b.client.flush().await, Err(Error::Gone), "a failed flush is not retried");
            assert_eq!(b.client.write(0, &data, false).await, Err(Error::Gone));
        } else {
            b.client.write(16, &data, false).await.expect("the fault has passed");
            b.expect(16, &data).await;
        }
    }
}

/// A device grows while it is used, and the new blocks are zeroes.
async fn growth(subject: &impl Subject, b: &Fixture) {
    let before = b.info.blocks;
    let data = random_bytes(&mut Rng::new(6), b.block_bytes());
    b.client.write(before - 1, &data, false).await.expect("write");
    if !subject.grow().await {
        return;
    }
    let info = b.client.dev().info();
    assert!(info.blocks > before, "the device reports its new size");
    assert_eq!(Info { blocks: before, ..info }, b.info, "nothing else has changed");
    b.expect(before - 1, &data).await;
    b.expect(before, &vec![0; b.block_bytes()]).await;
    b.expect(info.blocks - 1, &vec![0; b.block_bytes()]).await;
    b.client.write(info.blocks - 1, &data, true).await.expect("write at the new end");
    b.expect(info.blocks - 1, &data).await;
    assert_eq!(b.client.read(info.blocks, 1).await.map(drop), Err(Error::OutOfRange));
}

/// What was flushed survives every power cut, and what was read after one stays. Part of [`check`];
/// by itself for many seeds.
///
/// # Panics
/// Where the layer breaks the contract.
pub async fn power_cuts(subject: &impl Subject, seed: u64) {
    let mut b = Fixture::new(subject).await;
    let mut checker = Checker::new(1, b.info.block_size, InitialContents::Zeroes);
    if !b.info.volatile_cache {
        checker = checker.write_through();
    }
    let checker = RefCell::new(checker);
    let mut rng = Rng::new(seed);
    for round in 0..12 {
        let span = Blocks::new(Lba(rng.below(9)), b.info.blocks.min(256));
        let depth = usize::try_from(rng.within(1, 16)).expect("small");
        let workload = Workload::new(b.client.clone(), span, depth, rng.u64());
        let ops = usize::try_from(rng.within(1, 120)).expect("small");
        let checked = async {
            workload.audit(&checker).await?;
            workload.run_until_crash(&checker, ops).await
        };
        checked.await.unwrap_or_else(|v| panic!("seed {seed}, round {round}: {v}"));
        assert_eq!(workload.take_errors(), [], "seed {seed}, round {round}");
        drop((workload, b));
        let Some(dev) = subject.cut_power(rng.u64()).await else { return };
        checker.borrow_mut().crash(CrashKind::PowerLoss);
        b = Fixture::with_dev(&dev, &subject.pool());
    }
}

#[cfg(test)]
mod tests;
