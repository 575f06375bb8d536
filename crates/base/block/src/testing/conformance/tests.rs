//! The suite accepts correct layers and rejects wrong ones.

use std::rc::Rc;

use tokio::task::LocalSet;

use super::*;
use crate::testing::faulty::{Effect, Faults, Faulty, Rule};
use crate::{Ctx, Layer, Mem, MemOptions};

/// The planted defect of the layer.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Wrong {
    Nothing,
    Lie(OpKind, Effect),
    /// Takes memory that it did not declare.
    Greedy,
    /// Keeps memory after its end.
    Hoards,
    /// Declares a cache and no FUA, and loses FUA writes.
    NoFua,
    /// Unmaps without freeing.
    KeepsSpace,
    /// Frees space where zeroing must keep it.
    FreesZeroes,
    /// Unmapped blocks keep their contents.
    UnmapKeepsContents,
    /// Changes more than the range.
    ZeroesPages,
}

struct Layered {
    below: Dev,
    wrong: Wrong,
    hoard: Rc<RefCell<Vec<Bufs>>>,
}

impl Layer for Layered {
    fn name(&self) -> &'static str {
        "layered"
    }

    fn info(&self) -> Info {
        self.below.info()
    }

    async fn submit(&self, mut op: Op, ctx: Ctx) -> Result<Bufs, Error> {
        match (self.wrong, &mut op) {
            (Wrong::Greedy, _) => drop(Bufs::from(ctx.alloc(2 << 20))),
            (Wrong::Hoards, Op::Write { data, .. }) => {
                self.hoard.borrow_mut().push(data.clone());
            }
            (Wrong::NoFua, Op::Write { fua, .. }) => *fua = false,
            (Wrong::KeepsSpace, &mut Op::Unmap { at, blocks }) => {
                op = Op::Zero { at, blocks, unmap: false, fua: false };
            }
            (Wrong::FreesZeroes, Op::Zero { unmap, .. }) => *unmap = true,
            (Wrong::UnmapKeepsContents, Op::Unmap { .. }) => return Ok(Bufs::new()),
            (Wrong::ZeroesPages, Op::Zero { at, blocks, .. }) => {
                let page = u64::from(self.info().unmap_granularity_blocks);
                *blocks += u32::try_from(at.0 % page).unwrap();
                at.0 -= at.0 % page;
            }
            _ => {}
        }
        self.below.submit(op, &ctx).await
    }
}

struct Mems {
    pool: BufferPool,
    options: MemOptions,
    wrong: Wrong,
    hoard: Rc<RefCell<Vec<Bufs>>>,
    last: RefCell<Option<(Rc<Mem>, Faults)>>,
}

impl Mems {
    fn new(block_size: u32, volatile_cache: bool, wrong: Wrong) -> Self {
        let blocks = 2 * MIN_BYTES / u64::from(block_size);
        let options = MemOptions { volatile_cache, ..MemOptions::new(block_size, blocks) };
        let pool = BufferPool::new(MIN_POOL).unwrap();
        Self { pool, options, wrong, hoard: Rc::default(), last: RefCell::default() }
    }

    fn assemble(&self, mem: Rc<Mem>) -> Dev {
        let faults = Faults::new(1);
        if let Wrong::Lie(kind, effect) = self.wrong {
            faults.add(Rule::new(effect).on(&[kind]).after(3));
        }
        self.last.replace(Some((Rc::clone(&mem), faults.clone())));
        let below = Dev::new(Faulty::new(Dev::shared(mem), faults));
        Dev::new(Layered { below, wrong: self.wrong, hoard: Rc::clone(&self.hoard) })
    }

    fn last(&self) -> (Rc<Mem>, Faults) {
        self.last.borrow().clone().unwrap()
    }
}

impl Subject for Mems {
    fn pool(&self) -> BufferPool {
        self.pool.clone()
    }

    async fn fresh(&self) -> Dev {
        self.assemble(Rc::new(Mem::new(self.options)))
    }

    async fn grow(&self) -> bool {
        self.last().0.grow(self.options.blocks + 1000);
        true
    }

    async fn space_used(&self) -> Option<u64> {
        Some(self.last().0.space_used())
    }

    async fn cut_power(&self, seed: u64) -> Option<Dev> {
        let (mem, _) = self.last();
        let mut rng = Rng::new(seed);
        mem.cut_power(|n| usize::try_from(rng.below(n as u64)).unwrap());
        Some(self.assemble(mem))
    }

    async fn fail_next(&self, kind: OpKind, error: Error) -> bool {
        self.last().1.add(Rule::new(Effect::Fail(error)).on(&[kind]).times(1));
        true
    }
}

/// Whether the suite passes.
async fn passes(block_size: u32, volatile_cache: bool, wrong: Wrong) -> bool {
    let suite = async move {
        check(&Mems::new(block_size, volatile_cache, wrong), 1).await;
    };
    let local = LocalSet::new();
    let task = local.spawn_local(suite);
    local.run_until(task).await.is_ok()
}

#[tokio::test(start_paused = true)]
async fn memory_conforms() {
    for block_size in [512, 4096] {
        for volatile_cache in [false, true] {
            let conforms = passes(block_size, volatile_cache, Wrong::Nothing).await;
            assert!(conforms, "{block_size} {volatile_cache}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn each_faulty_layer_is_detected() {
    let lies = [
        Wrong::Lie(OpKind::Read, Effect::Ignore),
        Wrong::Lie(OpKind::Read, Effect::Misdirect(1)),
        Wrong::Lie(OpKind::Write, Effect::Ignore),
        Wrong::Lie(OpKind::Write, Effect::Misdirect(1)),
        Wrong::Lie(OpKind::Write, Effect::Tear),
        Wrong::Lie(OpKind::Zero, Effect::Ignore),
        Wrong::Lie(OpKind::Zero, Effect::Misdirect(1)),
        Wrong::Lie(OpKind::Unmap, Effect::Misdirect(1)),
        Wrong::Lie(OpKind::Flush, Effect::Ignore),
        Wrong::Greedy,
        Wrong::Hoards,
        Wrong::NoFua,
        Wrong::KeepsSpace,
        Wrong::FreesZeroes,
        Wrong::UnmapKeepsContents,
        Wrong::ZeroesPages,
    ];
    for wrong in lies {
        let passed = passes(512, true, wrong).await;
        assert!(!passed, "{wrong:?} was not noticed");
    }
}

#[tokio::test]
async fn space_runs_out_and_is_freed() {
    let options = MemOptions { max_space_bytes: 64 * 1024, ..MemOptions::new(512, 1 << 40) };
    let mem = Rc::new(Mem::new(options));
    let c = TestClient::new(&Dev::shared(Rc::clone(&mem)), &BufferPool::new(1 << 20).unwrap());
    for page in 0..16 {
        c.write(page << 30, &[1; 512], false).await.unwrap();
    }
    assert_eq!(c.write(1, &[2; 4096], false).await, Err(Error::NoSpace));
    assert_eq!(c.read(1, 1).await.unwrap().to_vec(), [0; 512], "a refused write does nothing");
    assert_eq!(c.zero(8, 1, false).await, Err(Error::NoSpace));
    c.zero(8, 1 << 20, true).await.expect("freeing takes no space");
    c.write(1, &[2; 512], false).await.expect("its page has space");
    c.unmap(15 << 30, 8).await.unwrap();
    c.write(1, &[2; 4096], false).await.unwrap();
    assert_eq!(mem.space_used(), 64 * 1024);
}

/// A device that keeps the writers' buffers behaves like any other, and frees them when dropped.
#[tokio::test]
async fn kept_buffers_are_the_same_device() {
    let keeping = MemOptions { keeps_buffers: true, ..MemOptions::new(512, 512) };
    let pool = BufferPool::new(MIN_POOL).unwrap();
    let of = |options| TestClient::new(&Dev::new(Mem::new(options)), &pool);
    let (plain, kept) = (of(MemOptions::new(512, 512)), of(keeping));
    let mut rng = Rng::new(7);
    let mut held = Vec::new();
    for round in 0..2000u64 {
        let at = rng.below(512);
        let blocks = rng.within(1, (512 - at).min(40)) as u32;
        match rng.below(5) {
            0 | 1 => {
                let bytes: Vec<u8> =
                    (0..blocks * 512).map(|i| (round + u64::from(i / 8)) as u8).collect();
                plain.write(at, &bytes, false).await.unwrap();
                kept.write(at, &bytes, false).await.unwrap();
            }
            2 => {
                let unmap = rng.one_in(2);
                plain.zero(at, blocks, unmap).await.unwrap();
                kept.zero(at, blocks, unmap).await.unwrap();
            }
            _ => {
                let (a, b) = (plain.read(at, blocks).await, kept.read(at, blocks).await);
                let (a, b) = (a.unwrap(), b.unwrap());
                assert!(a.same_bytes(&b), "round {round}: {blocks} blocks at {at}");
                held.push((a.to_vec(), a, b));
            }
        }
    }
    for (was, a, b) in held {
        assert!(was == a.to_vec() && was == b.to_vec(), "what was read has changed");
    }
    assert!(pool.usage().free < pool.usage().total, "it keeps what was written");
    drop((plain, kept));
    assert_eq!(pool.usage().free, pool.usage().total);
}
