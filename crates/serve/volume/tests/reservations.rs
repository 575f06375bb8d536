//! Reservations of a volume that one node has: who is kept out, and what a change waits for (RFD 0013, 4
//! to 6).

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

use block::{
    ASIDE, Account, Aside, Blocks, Bufs, Changes, Class, CompareAndWrite, Compared, Ctx, Dev,
    Epoch, Error, Failure, Info, Layer, Lba, Mem, MemOptions, Op, Pool, Request, Settled,
};
use futures_util::FutureExt;
use reservation::{COPY_BYTES, Change, Initiator, Kind, Notice, Notices, Party, Refusal, Table};
use rt::buf::copy_in;
use tokio::sync::{Semaphore, oneshot};
use tokio::task::{LocalSet, yield_now};
use volume::{Caller, Gate, Standing, Unaltered, Volume};

const BLOCK: usize = 512;

/// This node's copy of a disk: of the first table a byte has rotted here, as long as nobody writes it anew.
struct Rotten {
    dev: Dev,
    rot: Rc<Cell<bool>>,
}

impl Layer for Rotten {
    fn name(&self) -> &'static str {
        "rotten"
    }

    fn info(&self) -> Info {
        self.dev.info()
    }

    async fn submit(&self, op: Op, ctx: Ctx) -> Result<Bufs, Error> {
        let table = matches!(op, Op::Read { at, .. } if at == ASIDE);
        let found = self.dev.submit(op, &ctx).await?;
        if !table || !self.rot.get() {
            return Ok(found);
        }
        let mut bytes = found.to_vec();
        bytes[100] ^= 1;
        Ok(copy_in(ctx.credit(), &bytes))
    }
}

/// Whoever puts the writes in order: another node, whose copy is well, or not.
struct Primary {
    dev: Dev,
    mends: Option<Rc<Cell<bool>>>,
    refuses: bool,
}

impl std::fmt::Debug for Primary {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Primary")
    }
}

impl CompareAndWrite for Primary {
    fn compare_and_write<'a>(
        &'a self,
        at: Lba,
        compare: &'a Bufs,
        write: &'a Bufs,
        fua: bool,
        ctx: &'a Ctx,
    ) -> Compared<'a> {
        Box::pin(async move {
            if self.refuses {
                return Err(Failure::Miscompare { offset: 0 });
            }
            let blocks = (write.len() / BLOCK) as u32;
            let found = self.dev.submit(Op::Read { at, blocks }, ctx).await?;
            if let Some(offset) = compare.first_difference(&found) {
                return Err(Failure::Miscompare { offset: offset as u64 });
            }
            self.dev.submit(Op::Write { at, data: write.clone(), fua }, ctx).await?;
            self.mends.iter().filter(|_| at == ASIDE).for_each(|rot| rot.set(false));
            Ok(())
        })
    }

    fn changes(&self) -> Changes {
        Changes::default()
    }

    fn settle<'a>(&'a self, _range: Blocks, _ctx: &'a Ctx) -> Settled<'a> {
        Box::pin(std::future::ready(Ok(())))
    }
}

/// A disk that refuses to write beside the volume for now.
struct Failing {
    dev: Dev,
    fails: Rc<Cell<bool>>,
}

impl Layer for Failing {
    fn name(&self) -> &'static str {
        "failing"
    }

    fn info(&self) -> Info {
        self.dev.info()
    }

    async fn submit(&self, op: Op, ctx: Ctx) -> Result<Bufs, Error> {
        if self.fails.get() && matches!(op, Op::Write { at, .. } if at >= ASIDE) {
            return Err(Error::Fenced);
        }
        self.dev.submit(op, &ctx).await
    }
}

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

    /// A volume of this device.
    fn of(volume: Rc<Volume>) -> Self {
        let disk = Dev::new(Mem::new(MemOptions::new(BLOCK as u32, 8)));
        let bench = Self { volume, ..Self::over(disk, false) };
        bench.volume.keep_reservations(Rc::clone(&bench.gate), bench.pool.account());
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
        self.volume.alter(party(n), change, || true, move |r| answer.send(r).unwrap_or(()));
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

/// Who finds a key gone may rely on it as on a PREEMPT of his own: READ KEYS tells what is in force.
#[tokio::test]
async fn keys_are_gone_when_nothing_is_under_way() {
    local(async {
        let b = Bench::new();
        let (_one, two) = (b.enter(1), b.enter(2));
        for n in [1, 2] {
            b.register(n, false).await;
        }
        b.alter(2, reserve(2, Kind::WriteExclusive)).await.unwrap();
        let mut under_way = b.write(&two, 0);
        quiet().await;
        let preempting = b.begin(1, preempt(1, 2, true));
        quiet().await;
        let volume = Rc::clone(&b.volume);
        let reading = tokio::task::spawn_local(async move { volume.reservations().await });
        // What would be answered at once, for it changes nothing, is no sooner in force.
        let again = b.begin(1, reserve(1, Kind::WriteExclusive));
        quiet().await;
        assert!(under_way.try_recv().is_err() && !reading.is_finished());
        b.through.add_permits(1);
        let table = reading.await.unwrap().unwrap();
        assert!(under_way.try_recv().is_ok());
        assert!(table.registrants().iter().all(|r| r.key == 1));
        assert_eq!((preempting.await.unwrap(), again.await.unwrap()), (Ok(()), Ok(())));
    })
    .await;
}

/// Commands that wait at a closed gate have all memory that such commands may have. The gate opens.
#[tokio::test]
async fn a_closed_gate_opens_whatever_waits_at_it() {
    local(async {
        let b = Bench::new();
        b.through.add_permits(1_000_000);
        let one = b.enter(1);
        b.register(1, false).await;
        // A piece of a table, as a resync writes it.
        b.gate.changed(Blocks::new(Lba(ASIDE.0 + 1), 1), &Bufs::zeroes(BLOCK));
        let answered = Rc::new(Cell::new(0));
        // All that data on its way may have.
        for n in 0..23 {
            let account = b.pool.account();
            let credit = account.try_credit(512 << 10, Class::Arriving).unwrap();
            let data = copy_in(&credit, &vec![1; 512 << 10]);
            drop(credit);
            let write = Request::Write { at: Lba(n % 2 * 1024), data, fua: false };
            let answered = Rc::clone(&answered);
            b.volume.start_for(&one, write, &account, move |_| answered.update(|n| n + 1));
        }
        for _ in 0..100 {
            quiet().await;
        }
        assert_eq!(answered.get(), 23, "{:?}", b.pool.usage());
    })
    .await;
}

/// A byte of a table that has rotted at one node, which others compare with a good one: it is mended by the next change.
#[tokio::test]
async fn a_rotten_table_at_one_node_is_mended() {
    local(async {
        let disk = Dev::new(Mem::new(MemOptions::new(BLOCK as u32, 4096)));
        let rot = Rc::new(Cell::new(false));
        let own = Dev::new(Rotten { dev: disk.clone(), rot: Rc::clone(&rot) });
        let primary = Primary { dev: disk, mends: Some(Rc::clone(&rot)), refuses: false };
        let b = Bench::of(Volume::shared(own, Rc::new(primary), Epoch::default()));
        b.register(1, false).await;
        rot.set(true);
        b.alter(1, reserve(1, Kind::WriteExclusive)).await.unwrap();
        assert!(!rot.get());
    })
    .await;
}

/// If it can not be mended, changes end with that.
#[tokio::test(start_paused = true)]
async fn a_table_that_never_compares_is_told() {
    local(async {
        let disk = Dev::new(Mem::new(MemOptions::new(BLOCK as u32, 4096)));
        let primary = Primary { dev: disk.clone(), mends: None, refuses: true };
        let b = Bench::of(Volume::shared(disk, Rc::new(primary), Epoch::default()));
        let corrupt = Error::Corrupt { at: ASIDE };
        assert_eq!(b.alter(1, register(1, false)).await, Err(Unaltered::Failed(corrupt)));
    })
    .await;
}

/// What its initiator has given up with its session does not happen later.
#[tokio::test]
async fn a_change_that_nobody_wants_any_more_is_not_made() {
    local(async {
        let b = Bench::new();
        let wanted = Rc::new(Cell::new(true));
        let (answer, answered) = oneshot::channel();
        let first = b.begin(1, register(1, false));
        let asks = Rc::clone(&wanted);
        let done = move |r| answer.send(r).unwrap_or(());
        b.volume.alter(party(2), register(2, false), move || asks.get(), done);
        wanted.set(false);
        first.await.unwrap().unwrap();
        assert_eq!(answered.await.unwrap(), Err(Unaltered::Failed(Error::Aborted)));
        assert_eq!(b.volume.reservations().await.unwrap().registrants().len(), 1);
    })
    .await;
}

/// MODE SELECT of one that has lost its right while it waited.
#[tokio::test]
async fn mode_pages_are_changed_by_right() {
    local(async {
        let b = Bench::new();
        let (_one, two) = (b.enter(1), b.enter(2));
        b.register(1, false).await;
        let reserving = b.begin(1, reserve(1, Kind::WriteExclusive));
        let selecting = b.begin(2, Change::Modes(2));
        assert_eq!(reserving.await.unwrap(), Ok(()));
        let selected = selecting.await.unwrap();
        assert!(!two.rights().writes);
        assert_eq!(selected, Err(Unaltered::Refused(Refusal::Conflict)));
    })
    .await;
}

/// A RESERVE goes with the seat through which it came: its holder is told, if it is there still.
#[tokio::test]
async fn a_lost_reserve_is_told() {
    local(async {
        let b = Bench::new();
        let (_one, two) = (b.enter(1), b.enter(2));
        b.alter(1, Change::ReserveUnit).await.unwrap();
        b.told.borrow_mut().clear();
        // The node was put out, and is a member again as another incarnation.
        b.gate.set_standing(Standing { era: 1, seat: 5, seats: vec![5, 9] });
        quiet().await;
        assert!(two.rights().sole);
        let expected = [(1, [Notice::ReservationsPreempted].into_iter().collect::<Notices>())];
        let told: Vec<_> = b.told.borrow().iter().filter(|(_, n)| !n.is_empty()).copied().collect();
        assert_eq!(told, expected);
    })
    .await;
}

/// A nexus is lost while nothing can be written, and its initiator is back and reserves anew before that is over.
#[tokio::test(start_paused = true)]
async fn a_late_leave_takes_no_new_reserve() {
    local(async {
        let disk = Dev::new(Mem::new(MemOptions::new(BLOCK as u32, 4096)));
        let fails = Rc::new(Cell::new(false));
        let failing = Failing { dev: disk, fails: Rc::clone(&fails) };
        let b = Bench::of(Volume::new(Dev::new(failing), Epoch::default()));
        let (one, two) = (b.enter(1), b.enter(2));
        b.alter(1, Change::ReserveUnit).await.unwrap();
        fails.set(true);
        drop(one);
        quiet().await;
        fails.set(false);
        let one = b.enter(1);
        b.alter(1, Change::ReserveUnit).await.unwrap();
        assert!(one.rights().sole && !two.rights().sole);
        tokio::time::sleep(Duration::from_secs(1)).await;
        assert!(one.rights().sole && !two.rights().sole, "the new one stays");
        drop(one);
        tokio::time::sleep(Duration::from_secs(1)).await;
        assert!(two.rights().sole);
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

/// A write that came before it is known that the write cache is off, or that nobody may write, is not carried out as if it
/// were not so.
#[tokio::test]
async fn writes_are_not_carried_out_by_other_mode_pages() {
    local(async {
        let first = Bench::new();
        let _one = first.enter(1);
        first.alter(1, Change::Modes(5)).await.unwrap();
        let b = Bench::over(first.disk.clone(), false);
        let two = b.enter(2);
        let (early, read) = (b.write(&two, 0), b.read(&two));
        b.gate.set_standing(standing(1));
        assert_eq!(read.await, Ok(()));
        assert_eq!(early.await.unwrap(), Err(Failure::Device(Error::Fenced)));
        assert_eq!(two.modes(), 5);
        assert_eq!(b.write(&two, 0).await.unwrap(), Ok(()));
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
