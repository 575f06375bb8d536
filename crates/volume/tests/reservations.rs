//! Reservations of a volume that one node has: who is kept out, and what a change waits for (RFD 0013, 4
//! to 6).
#![allow(clippy::unwrap_used)]

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

use block::{
    ASIDE, Account, Aside, Blocks, Bufs, Class, Ctx, Dev, Epoch, Error, Failure, Info, Layer, Lba,
    Mem, MemOptions, Op, Pool, Request,
};
use futures_util::FutureExt;
use reservation::{COPY_BYTES, Change, Initiator, Kind, Notice, Notices, Party, Refusal, Table};
use rt::buf::copy_in;
use tokio::sync::{Semaphore, oneshot};
use tokio::task::{LocalSet, yield_now};
use volume::{Caller, Gate, Standing, Unaltered, Volume};

const BLOCK: usize = 512;

/// A disk in memory that holds back what is done to the volume itself until it is let through.
#[derive(Clone)]
struct Held {
    dev: Dev,
    through: Option<Rc<Semaphore>>,
    /// Whether it holds back flushes as well.
    flushes: Rc<Cell<bool>>,
}

impl Layer for Held {
    fn name(&self) -> &'static str {
        "held"
    }

    fn info(&self) -> Info {
        self.dev.info()
    }

    async fn submit(&self, op: Op, ctx: Ctx) -> Result<Bufs, Error> {
        let range = op.range(BLOCK as u32);
        let inside = range.map_or(self.flushes.get(), |range| range.at < ASIDE);
        if let (true, Some(through)) = (inside, &self.through) {
            through.acquire().await.unwrap().forget();
        }
        // It has begun: aborts come too late.
        self.dev.submit(op, &ctx.shielded()).await
    }
}

struct Bench {
    disk: Dev,
    through: Rc<Semaphore>,
    hold_flushes: Rc<Cell<bool>>,
    gate: Rc<Gate>,
    volume: Rc<Volume>,
    pool: Pool,
    account: Account,
    told: Rc<RefCell<Vec<(u8, Notices)>>>,
}

fn party(n: u8) -> Party {
    let initiator = Initiator::Iscsi { name: "iqn.2026-01.example:i".into(), isid: [n; 6] };
    Party { initiator, port: 1 }
}

fn standing(era: u64) -> Standing {
    Standing { era, seat: 1, seats: vec![1] }
}

impl Bench {
    fn new() -> Self {
        let disk = Dev::new(Mem::new(MemOptions::new(BLOCK as u32, 4096)));
        let bench = Self::over(disk, true);
        bench.gate.set_standing(standing(1));
        bench
    }

    /// A node that opens the volume: with no standing as yet.
    fn over(disk: Dev, held: bool) -> Self {
        let pool = Pool::new(16 << 20).unwrap();
        let through = Rc::new(Semaphore::new(0));
        let hold_flushes = Rc::<Cell<bool>>::default();
        let flushes = Rc::clone(&hold_flushes);
        let layer = Held { dev: disk.clone(), through: held.then(|| Rc::clone(&through)), flushes };
        let volume = Volume::new(Dev::new(layer), Epoch::default());
        let (gate, account) = (Rc::new(Gate::default()), pool.account());
        volume.keep_reservations(Rc::clone(&gate), pool.account());
        let told = Rc::default();
        Self { disk, through, hold_flushes, gate, volume, pool, account, told }
    }

    fn enter(&self, n: u8) -> Rc<Caller> {
        let told = Rc::clone(&self.told);
        self.gate.enter(party(n), Box::new(move |notices| told.borrow_mut().push((n, notices))))
    }

    fn request(&self, at: u64) -> Request {
        let credit = self.account.try_credit(BLOCK, Class::Immediate).unwrap();
        Request::Write { at: Lba(at), data: copy_in(&credit, &[7; BLOCK]), fua: false }
    }

    /// A write that has begun.
    fn write(&self, by: &Rc<Caller>, at: u64) -> oneshot::Receiver<Result<(), Failure>> {
        let (answer, answered) = oneshot::channel();
        let done = move |r: Result<Bufs, Failure>| answer.send(r.map(drop)).unwrap_or_default();
        self.volume.start_for(by, self.request(at), &self.account, done);
        answered
    }

    async fn read(&self, by: &Rc<Caller>) -> Result<(), Failure> {
        let (answer, answered) = oneshot::channel();
        let done = move |r: Result<Bufs, Failure>| answer.send(r.map(drop)).unwrap_or_default();
        let range = Blocks::new(Lba(9), 1);
        self.volume.start_for(by, Request::Read { range }, &self.account, done);
        self.through.add_permits(1);
        let result = answered.await.unwrap();
        if result.is_err() {
            self.through.forget_permits(1);
        }
        result
    }

    fn begin(&self, n: u8, change: Change) -> oneshot::Receiver<Result<(), Unaltered>> {
        let (answer, answered) = oneshot::channel();
        self.volume.alter(party(n), change, move |r| answer.send(r).unwrap_or(()));
        answered
    }

    async fn alter(&self, n: u8, change: Change) -> Result<(), Unaltered> {
        self.begin(n, change).await.unwrap()
    }

    async fn register(&self, n: u8, persists: bool) {
        self.alter(n, register(n, persists)).await.unwrap();
    }
}

fn register(n: u8, persists: bool) -> Change {
    let (key, new_key, ignore_key) = (0, u64::from(n), true);
    Change::Register { key, new_key, ignore_key, persists, ports: vec![], also: vec![] }
}

fn reserve(n: u8, kind: Kind) -> Change {
    Change::Reserve { key: u64::from(n), kind }
}

fn preempt(n: u8, victim: u8, abort: bool) -> Change {
    let kind = Some(Kind::WriteExclusive);
    Change::Preempt { key: u64::from(n), victim: u64::from(victim), kind, abort }
}

/// Nothing more happens by itself.
async fn quiet() {
    for _ in 0..200 {
        yield_now().await;
    }
}

async fn local(test: impl Future<Output = ()>) {
    LocalSet::new().run_until(test).await;
}

#[tokio::test]
async fn a_reservation_keeps_others_out() {
    local(async {
        let b = Bench::new();
        let (one, two) = (b.enter(1), b.enter(2));
        b.register(1, false).await;
        b.alter(1, reserve(1, Kind::WriteExclusive)).await.unwrap();
        assert_eq!(b.write(&two, 0).await.unwrap(), Err(Failure::Conflict));
        assert_eq!(b.read(&two).await, Ok(()));
        let written = b.write(&one, 0);
        b.through.add_permits(1);
        assert_eq!(written.await.unwrap(), Ok(()));
        assert!(!two.rights().writes && one.rights().writes);
        let refused = b.alter(2, reserve(2, Kind::WriteExclusive)).await;
        assert_eq!(refused, Err(Unaltered::Refused(Refusal::Conflict)));
        b.alter(1, Change::Release { key: 1, kind: Kind::WriteExclusive }).await.unwrap();
        let written = b.write(&two, 0);
        b.through.add_permits(1);
        assert_eq!(written.await.unwrap(), Ok(()));
        assert_eq!(b.volume.reservations().await.unwrap().registrants().len(), 1);
        drop((one, two));
        assert_eq!(b.pool.usage().free, b.pool.usage().total, "memory was kept");
    })
    .await;
}

/// What the loser has begun is over when PREEMPT is answered, and what waits ends at once.
#[tokio::test]
async fn preempt_waits_for_what_is_under_way() {
    local(async {
        let b = Bench::new();
        let (_one, two) = (b.enter(1), b.enter(2));
        for n in [1, 2] {
            b.register(n, false).await;
        }
        b.alter(2, reserve(2, Kind::WriteExclusive)).await.unwrap();
        let mut under_way = b.write(&two, 0);
        let waits = b.write(&two, 0);
        quiet().await;
        let mut preempting = b.begin(1, preempt(1, 2, false));
        assert_eq!(waits.await.unwrap(), Err(Failure::Conflict), "it had not begun");
        quiet().await;
        assert!(under_way.try_recv().is_err() && preempting.try_recv().is_err());
        assert_eq!(b.write(&two, 8).await.unwrap(), Err(Failure::Conflict), "already");
        b.through.add_permits(1);
        assert_eq!(under_way.await.unwrap(), Ok(()), "it had begun: the truth is told");
        assert_eq!(preempting.await.unwrap(), Ok(()));
        let told: Vec<_> = b.told.borrow().iter().filter(|(n, _)| *n == 2).copied().collect();
        assert!(told.iter().any(|(_, n)| n.contains(Notice::RegistrationsPreempted)), "{told:?}");
    })
    .await;
}

/// PREEMPT AND ABORT waits for what it aborts, also where the loser might go on.
#[tokio::test]
async fn preempt_and_abort_waits_for_readers() {
    local(async {
        let b = Bench::new();
        let (_one, two) = (b.enter(1), b.enter(2));
        for n in [1, 2] {
            b.register(n, false).await;
        }
        b.alter(1, reserve(1, Kind::WriteExclusive)).await.unwrap();
        let ended = Rc::new(Cell::new(false));
        let (seen, range) = (Rc::clone(&ended), Blocks::new(Lba(0), 1));
        b.volume.start_for(&two, Request::Read { range }, &b.account, move |_| seen.set(true));
        quiet().await;
        let mut preempting = b.begin(1, preempt(1, 2, true));
        quiet().await;
        assert!(preempting.try_recv().is_err() && !ended.get());
        b.through.add_permits(1);
        preempting.await.unwrap().unwrap();
        assert!(ended.get());
    })
    .await;
}

/// CLEAR TASK SET waits for what it ends, whosever it is and whatever right it has.
#[tokio::test]
async fn clear_task_set_waits_for_what_it_ends() {
    local(async {
        let b = Bench::new();
        let two = b.enter(2);
        let mut under_way = b.write(&two, 0);
        quiet().await;
        let mut clearing = b.begin(1, Change::ClearTasks);
        quiet().await;
        assert!(under_way.try_recv().is_err() && clearing.try_recv().is_err());
        b.through.add_permits(1);
        assert_eq!(clearing.await.unwrap(), Ok(()));
        assert!(under_way.try_recv().is_ok());
        assert!(b.told.borrow().iter().any(|(n, all)| *n == 2 && all.contains(Notice::Aborted)));
        b.through.add_permits(1);
        assert_eq!(b.write(&two, 0).await.unwrap(), Ok(()), "it goes on");
    })
    .await;
}

/// A reset ends what is under way. Flushes wait for that, so it does not wait for them (seed 400005 of the
/// simulator).
#[tokio::test]
async fn a_reset_does_not_wait_for_flushes() {
    local(async {
        let b = Bench::new();
        let two = b.enter(2);
        b.hold_flushes.set(true);
        let flushed = Rc::new(Cell::new(false));
        let seen = Rc::clone(&flushed);
        b.volume.start_for(&two, Request::Flush, &b.account, move |_| seen.set(true));
        quiet().await;
        assert_eq!(b.alter(1, Change::Reset { target: false }).await, Ok(()));
        assert!(!flushed.get());
        b.through.add_permits(1);
        quiet().await;
        assert!(flushed.get());
    })
    .await;
}

/// SPC-2 5.5.1: RESERVE ends with its nexus, for those who ask right after.
#[tokio::test]
async fn reserve_ends_with_its_nexus() {
    local(async {
        let b = Bench::new();
        let (one, two) = (b.enter(1), b.enter(2));
        b.alter(1, Change::ReserveUnit).await.unwrap();
        assert!(!two.rights().sole && one.rights().sole);
        assert_eq!(b.read(&two).await, Err(Failure::Conflict));
        drop(one);
        assert!(two.rights().sole, "at once");
        assert_eq!(b.read(&two).await, Ok(()));
        quiet().await;
        assert_eq!(b.volume.reservations().await.unwrap().sole, None);
        b.alter(2, Change::ReserveUnit).await.unwrap();
        let one = b.enter(1);
        assert!(!one.rights().sole);
        b.alter(3, Change::ReserveUnit).await.unwrap_err();
    })
    .await;
}

/// Who has something done beside its nexus is bound as the nexus is, and ends nothing with that.
#[tokio::test]
async fn what_is_done_on_behalf_of_a_nexus_ends_without_it() {
    local(async {
        let b = Bench::new();
        let _one = b.enter(1);
        b.alter(1, Change::ReserveUnit).await.unwrap();
        let for_one = b.gate.on_behalf_of(party(1));
        let for_two = b.gate.on_behalf_of(party(2));
        assert_eq!(b.read(&for_one).await, Ok(()));
        assert_eq!(b.read(&for_two).await, Err(Failure::Conflict));
        drop((for_one, for_two));
        quiet().await;
        assert_eq!(b.read(&b.gate.on_behalf_of(party(2))).await, Err(Failure::Conflict));
    })
    .await;
}

/// What is done on behalf of a nexus is waited for, and cut off, as what it does itself.
#[tokio::test]
async fn what_is_done_on_behalf_of_a_nexus_is_preempted() {
    local(async {
        let b = Bench::new();
        b.register(1, false).await;
        b.register(2, false).await;
        b.alter(2, reserve(2, Kind::WriteExclusiveRegistrants)).await.unwrap();
        let for_one = b.gate.on_behalf_of(party(1));
        let mut under_way = b.write(&for_one, 0);
        let waits = b.write(&for_one, 0);
        quiet().await;
        let mut preempting = b.begin(2, preempt(2, 1, true));
        assert!(waits.await.unwrap().is_err(), "it had not begun");
        quiet().await;
        assert!(under_way.try_recv().is_err() && preempting.try_recv().is_err());
        assert_eq!(b.write(&for_one, 8).await.unwrap(), Err(Failure::Conflict), "already");
        b.through.add_permits(1);
        assert_eq!(preempting.await.unwrap(), Ok(()));
        assert!(under_way.try_recv().is_ok(), "before PREEMPT AND ABORT is answered");
    })
    .await;
}

/// Before it is known what holds, commands wait.
#[tokio::test]
async fn commands_wait_until_the_table_is_read() {
    local(async {
        let first = Bench::new();
        first.register(1, true).await;
        first.alter(1, reserve(1, Kind::WriteExclusive)).await.unwrap();
        let b = Bench::over(first.disk.clone(), false);
        let two = b.enter(2);
        let mut write = b.write(&two, 0);
        quiet().await;
        assert!(write.try_recv().is_err(), "it has no standing");
        let aborted = b.write(&two, 8);
        quiet().await;
        b.gate.set_standing(standing(1));
        assert_eq!(write.await.unwrap(), Err(Failure::Conflict));
        assert_eq!(aborted.await.unwrap(), Err(Failure::Conflict));
    })
    .await;
}

/// SPC-4 5.12.5: with APTPL a loss of power changes nothing, without it all is gone.
#[tokio::test]
async fn registrations_and_power() {
    local(async {
        for persists in [true, false] {
            let first = Bench::new();
            first.register(1, persists).await;
            first.alter(1, reserve(1, Kind::WriteExclusive)).await.unwrap();
            let b = Bench::over(first.disk.clone(), false);
            b.gate.set_standing(standing(2));
            let expect = if persists { Err(Failure::Conflict) } else { Ok(()) };
            assert_eq!(b.write(&b.enter(2), 0).await.unwrap(), expect);
            let table = b.volume.reservations().await.unwrap();
            assert_eq!((table.registrants().len(), table.pr_generation), (persists.into(), 0));
        }
    })
    .await;
}

/// What a mirror has applied here and nobody else yet takes rights and gives none.
#[tokio::test]
async fn what_is_not_committed_only_takes() {
    local(async {
        let b = Bench::new();
        let (one, two) = (b.enter(1), b.enter(2));
        b.register(1, false).await;
        let table = b.volume.reservations().await.unwrap();
        let taking =
            table.change(&party(1), 1, &reserve(1, Kind::WriteExclusive)).unwrap().unwrap();
        let blocks = COPY_BYTES / BLOCK;
        let noted = |table: &Table| {
            let credit = b.account.try_credit(COPY_BYTES, Class::Immediate).unwrap();
            let range = Blocks::new(ASIDE, blocks as u64);
            b.gate.changed(range, &copy_in(&credit, &table.encode()));
        };
        noted(&taking);
        assert!(!two.rights().writes && one.rights().writes, "before it is committed");
        assert!(b.gate.settled().now_or_never().is_none());
        quiet().await;
        assert!(two.rights().writes, "it is not what the disk has");
        assert!(b.gate.settled().now_or_never().is_some());

        b.alter(1, reserve(1, Kind::WriteExclusive)).await.unwrap();
        noted(&Table::default());
        assert!(!two.rights().writes, "given only when it is committed");
        quiet().await;
        assert!(!two.rights().writes);
    })
    .await;
}

/// A piece of a resync is no table: the gate closes until it has read again.
#[tokio::test]
async fn pieces_close_the_gate() {
    local(async {
        let b = Bench::new();
        let one = b.enter(1);
        b.register(1, false).await;
        b.gate.changed(Blocks::new(Lba(ASIDE.0 + 1), 1), &Bufs::zeroes(BLOCK));
        let mut write = b.write(&one, 0);
        assert!(write.try_recv().is_err());
        b.through.add_permits(1);
        assert_eq!(write.await.unwrap(), Ok(()), "read again");
    })
    .await;
}

/// A table that cannot be made out lets nobody in, and an administrator can begin anew.
#[tokio::test(start_paused = true)]
async fn a_damaged_table() {
    local(async {
        let disk = Dev::new(Mem::new(MemOptions::new(BLOCK as u32, 4096)));
        let pool = Pool::new(1 << 20).unwrap();
        let credit = pool.account().try_credit(2 * COPY_BYTES, Class::Immediate).unwrap();
        let ctx = Ctx::new(credit, Epoch::default());
        let data = copy_in(ctx.credit(), &[0xee; 2 * COPY_BYTES]);
        disk.submit(Op::Write { at: ASIDE, data, fua: true }, &ctx).await.unwrap();
        let b = Bench::over(disk, false);
        b.gate.set_standing(standing(1));
        let one = b.enter(1);
        tokio::time::sleep(Duration::from_secs(1)).await;
        let corrupt = Error::Corrupt { at: ASIDE };
        assert_eq!(b.write(&one, 0).await.unwrap(), Err(corrupt.into()));
        assert_eq!(b.alter(1, register(1, false)).await, Err(Unaltered::Failed(corrupt)));
        b.alter(1, Change::Evict).await.unwrap();
        assert_eq!(b.write(&one, 0).await.unwrap(), Ok(()));
    })
    .await;
}
