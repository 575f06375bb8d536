//! The example of a layer passes the suite that every layer passes.
#![allow(clippy::unwrap_used, reason = "a test fails where it unwraps nothing")]

#[path = "../examples/offset.rs"]
#[allow(dead_code, unreachable_pub, reason = "it is a program of its own")]
mod example;

use std::cell::RefCell;
use std::rc::Rc;

use block::testing::conformance::{self, MIN_BYTES, MIN_POOL, Subject};
use block::testing::faulty::{Effect, Faults, Faulty, OpKind, Rule};
use block::{BufferPool, Dev, Error, Mem, MemOptions};
use example::Offset;

/// Blocks below that are not this layer's.
const OFFSET: u64 = 24;

/// An offset over a faulty device in memory, which loses at a power cut what was not flushed.
struct OverMemory {
    pool: BufferPool,
    block_size: u32,
    mem: RefCell<Option<(Rc<Mem>, Faults)>>,
}

impl OverMemory {
    fn stack(&self, mem: Rc<Mem>) -> Dev {
        let (faulty, faults) = Faulty::wrap(Dev::shared(Rc::clone(&mem)), 1);
        self.mem.replace(Some((mem, faults)));
        Dev::new(Offset::new(faulty, OFFSET))
    }
}

impl Subject for OverMemory {
    fn pool(&self) -> BufferPool {
        self.pool.clone()
    }

    async fn fresh(&self) -> Dev {
        let blocks = MIN_BYTES / u64::from(self.block_size) + OFFSET;
        let options =
            MemOptions { volatile_cache: true, ..MemOptions::new(self.block_size, blocks) };
        self.stack(Rc::new(Mem::new(options)))
    }

    async fn grow(&self) -> bool {
        let mem = self.mem.borrow();
        let (mem, _) = mem.as_ref().unwrap();
        mem.grow(2 * MIN_BYTES / u64::from(self.block_size) + OFFSET);
        true
    }

    async fn space_used(&self) -> Option<u64> {
        self.mem.borrow().as_ref().map(|(mem, _)| mem.space_used())
    }

    async fn cut_power(&self, _: u64) -> Option<Dev> {
        let (mem, _) = self.mem.take().unwrap();
        mem.cut_power(|_| 0);
        Some(self.stack(mem))
    }

    async fn fail_next(&self, kind: OpKind, error: Error) -> bool {
        let mem = self.mem.borrow();
        let (_, faults) = mem.as_ref().unwrap();
        faults.add(Rule::new(Effect::Fail(error)).on(&[kind]).times(1));
        true
    }
}

#[test]
fn the_example_of_a_layer_conforms() {
    for block_size in [512, 4096] {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        let pool = BufferPool::new(MIN_POOL).unwrap();
        let subject = OverMemory { pool, block_size, mem: RefCell::default() };
        let suite = conformance::check(&subject, 1);
        tokio::task::LocalSet::new().block_on(&runtime, suite);
    }
}
