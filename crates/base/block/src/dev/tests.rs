use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::task::{Context, Waker};

use rt::buf::{BufferPool, MemoryClass};

use super::*;
use crate::{Epoch, Lba};

/// A layer that records operations and stalls on request.
struct Probe {
    info: Info,
    seen: RefCell<Vec<Op>>,
    answers: RefCell<Vec<Result<Bufs, Error>>>,
    stalls: Cell<bool>,
    aborted: RefCell<Vec<bool>>,
}

impl Layer for Probe {
    fn name(&self) -> &'static str {
        "probe"
    }

    fn info(&self) -> Info {
        self.info
    }

    async fn submit(&self, op: Op, ctx: Ctx) -> Result<Bufs, Error> {
        let len = if let Op::Read { blocks, .. } = op { blocks as usize * 512 } else { 0 };
        self.aborted.borrow_mut().push(ctx.is_aborted());
        self.seen.borrow_mut().push(op);
        if self.stalls.get() {
            std::future::pending::<()>().await;
        }
        self.answers.borrow_mut().pop().unwrap_or_else(|| Ok(Bufs::zeroes(len)))
    }
}

const INFO: Info = Info {
    block_size: 512,
    blocks: 100,
    metadata_blocks: 0,
    physical_block_size: 4096,
    max_transfer_blocks: 16,
    unmap_granularity_blocks: 8,
    unmap_zeroes: true,
    volatile_cache: true,
    native_fua: false,
    read_only: false,
    overhead_bytes: 0,
};

fn probe(info: Info) -> (Rc<Probe>, Dev) {
    let probe = Rc::new(Probe {
        info,
        seen: RefCell::default(),
        answers: RefCell::default(),
        stalls: Cell::new(false),
        aborted: RefCell::default(),
    });
    (Rc::clone(&probe), Dev::shared(probe))
}

fn ctx() -> Ctx {
    let pool = BufferPool::new(1 << 20).unwrap();
    Ctx::new(pool.account().try_credit(1 << 16, MemoryClass::LocalIo).unwrap(), Epoch::default())
}

fn write(at: u64, bytes: usize, fua: bool) -> Op {
    Op::Write { at: Lba(at), data: Bufs::zeroes(bytes), fua }
}

fn read(at: u64, blocks: u32) -> Op {
    Op::Read { at: Lba(at), blocks }
}

#[tokio::test]
async fn invalid_operations_are_rejected() {
    let (probe, dev) = probe(INFO);
    let (unmap, fua) = (true, false);
    let far = |at| Op::Zero { at: Lba(at), blocks: 60, unmap, fua };
    for op in [
        read(0, 0),
        read(0, 17),
        read(100, 1),
        read(99, 2),
        read(u64::MAX, 1),
        write(0, 0, false),
        write(0, 511, false),
        write(0, 513, false),
        write(0, 17 * 512, false),
        write(99, 1024, false),
        far(41),
        Op::Unmap { at: Lba(0), blocks: 0 },
        Op::Unmap { at: Lba(1), blocks: u32::MAX },
    ] {
        let refused = dev.submit(op.clone(), &ctx()).await.map(drop);
        assert_eq!(refused, Err(Error::OutOfRange), "{op:?}");
    }
    assert!(probe.seen.borrow().is_empty());
    assert_eq!(dev.stats(), Stats::default(), "what is refused is not counted");
    for op in [read(84, 16), write(99, 512, false), far(40), Op::Flush] {
        dev.submit(op, &ctx()).await.unwrap();
    }
    assert_eq!(probe.seen.borrow().len(), 4);
}

#[tokio::test]
async fn a_read_only_device_refuses_writes_alone() {
    let (probe, dev) = probe(Info { read_only: true, ..INFO });
    let unmap = Op::Unmap { at: Lba(0), blocks: 1 };
    let zero = Op::Zero { at: Lba(0), blocks: 1, unmap: false, fua: false };
    for op in [write(0, 512, false), zero, unmap] {
        assert_eq!(dev.submit(op, &ctx()).await.map(drop), Err(Error::ReadOnly));
    }
    dev.submit(read(0, 1), &ctx()).await.unwrap();
    dev.submit(Op::Flush, &ctx()).await.unwrap();
    assert_eq!(probe.seen.borrow().len(), 2);
}

#[tokio::test]
async fn fua_becomes_a_flush_where_it_must() {
    let cases = [(true, true, true, 1), (true, false, false, 2), (false, false, false, 1)];
    for (volatile_cache, native_fua, passed_on, operations) in cases {
        let (probe, dev) = probe(Info { volatile_cache, native_fua, ..INFO });
        dev.submit(write(0, 512, true), &ctx()).await.unwrap();
        let seen = probe.seen.borrow();
        assert!(matches!(&seen[0], Op::Write { fua, .. } if *fua == passed_on));
        assert_eq!(seen.len(), operations);
        assert!(seen.get(1).is_none_or(|op| matches!(op, Op::Flush)));
        assert_eq!((dev.stats().writes, dev.stats().flushes), (1, operations as u64 - 1));
    }
}

#[tokio::test]
async fn a_failed_fua_is_a_failed_write() {
    let (probe, dev) = probe(INFO);
    probe.answers.replace(vec![Err(Error::Gone), Ok(Bufs::new())]);
    assert_eq!(dev.submit(write(0, 512, true), &ctx()).await.map(drop), Err(Error::Gone));
    probe.answers.replace(vec![Err(Error::NoSpace)]);
    assert_eq!(dev.submit(write(0, 512, true), &ctx()).await.map(drop), Err(Error::NoSpace));
    assert_eq!(probe.seen.borrow().len(), 3, "no flush after a failed write");
    assert_eq!(dev.stats().errors, 2);
}

#[tokio::test]
async fn an_abort_stops_what_has_not_begun() {
    let (probe, dev) = probe(INFO);
    let aborted = ctx();
    aborted.abort();
    assert_eq!(dev.submit(read(0, 1), &aborted).await.map(drop), Err(Error::Aborted));
    assert!(probe.seen.borrow().is_empty());
    dev.submit(write(0, 512, true), &aborted.shielded()).await.unwrap();
    assert_eq!(*probe.aborted.borrow(), [false, false]);
}

#[tokio::test]
async fn operations_are_counted() {
    let (probe, dev) = probe(INFO);
    dev.submit(read(0, 3), &ctx()).await.unwrap();
    dev.submit(write(0, 1024, false), &ctx()).await.unwrap();
    dev.submit(Op::Unmap { at: Lba(0), blocks: 50 }, &ctx()).await.unwrap();
    dev.submit(Op::Flush, &ctx()).await.unwrap();
    probe.answers.replace(vec![Err(Error::Unreadable { at: Lba(4) })]);
    dev.clone().submit(read(4, 1), &ctx()).await.unwrap_err();
    let expected = Stats {
        reads: 2,
        read_bytes: 2048,
        writes: 1,
        write_bytes: 1024,
        zeroes: 1,
        flushes: 1,
        errors: 1,
        in_flight: 0,
    };
    assert_eq!(dev.stats(), expected);
}

type Flight<'a> = Pin<Box<dyn Future<Output = ()> + 'a>>;

/// `op` in flight on a device that stalls.
fn begun(dev: &Dev, op: Op) -> Flight<'_> {
    let ctx = ctx();
    let mut flight: Flight<'_> = Box::pin(async move {
        let _ = dev.submit(op, &ctx).await;
    });
    assert!(flight.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
    flight
}

#[test]
fn losing_an_operation_in_flight_panics_unless_permitted() {
    let (probe, dev) = probe(INFO);
    probe.stalls.set(true);
    let flight = begun(&dev, read(0, 1));
    assert_eq!(dev.stats().in_flight, 1);
    assert!(catch_unwind(AssertUnwindSafe(|| drop(flight))).is_err());
    assert_eq!(dev.stats().in_flight, 0);
    let flight = begun(&dev, read(0, 1));
    let permit = drop_permit::permit_drops();
    drop(drop_permit::permit_drops());
    drop(flight);
    drop(permit);
    assert_eq!(dev.stats().in_flight, 0);
}

#[test]
fn overlapping_operations_panic_when_one_writes() {
    let (probe, dev) = probe(INFO);
    probe.stalls.set(true);
    let _permit = drop_permit::permit_drops();
    let panics = |op: Op| catch_unwind(AssertUnwindSafe(|| drop(begun(&dev, op)))).is_err();
    let in_flight = begun(&dev, write(8, 1024, false));
    assert!(panics(read(9, 1)) && panics(write(4, 5 * 512, false)));
    assert!(!panics(read(0, 8)) && !panics(read(10, 4)) && !panics(Op::Flush));
    drop(in_flight);
    assert!(!panics(write(8, 1024, false)), "a lost operation is over");
    let in_flight = begun(&dev, read(8, 2));
    assert!(panics(Op::Unmap { at: Lba(0), blocks: 9 }));
    assert!(!panics(read(8, 2)));
    drop(in_flight);
}

#[test]
fn a_layer_that_answers_with_too_little_panics() {
    let (probe, dev) = probe(INFO);
    probe.answers.replace(vec![Ok(Bufs::zeroes(512))]);
    let ctx = ctx();
    let mut flight = Box::pin(dev.submit(read(0, 2), &ctx));
    let poll = || flight.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_ready();
    assert!(catch_unwind(AssertUnwindSafe(poll)).is_err());
}

#[test]
fn contradictory_devices_are_not_assembled() {
    let wrong = [
        Info { block_size: 1024, ..INFO },
        Info { physical_block_size: 4097, ..INFO },
        Info { physical_block_size: 0, ..INFO },
        Info { blocks: u64::MAX / 2, ..INFO },
        Info { max_transfer_blocks: 0, ..INFO },
        Info { max_transfer_blocks: u32::MAX, ..INFO },
        Info { overhead_bytes: 100, ..INFO },
    ];
    for info in wrong {
        assert!(catch_unwind(AssertUnwindSafe(|| probe(info))).is_err(), "{info:?}");
    }
    assert_eq!(probe(INFO).1.info().bytes(), 51_200);
}
