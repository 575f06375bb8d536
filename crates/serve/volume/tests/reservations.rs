//! Reservations of a volume on one node: which access is denied, and what a change waits for (RFD
//! 0013, 4 to 6).

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

use block::{
    Account, Blocks, BufferPool, Bufs, ChangeTracker, CommitFuture, CompareAndWriteFuture, Ctx,
    Dev, Epoch, Error, Info, Layer, Lba, METADATA_LBA, Mem, MemOptions, MemoryClass,
    MetadataObserver, Op, ReplicatedDevice, Request, RequestError,
};
use futures_util::FutureExt;
use reservation::{
    COPY_BYTES, Change, Initiator, ItNexus, Notification, Notifications, ReservationError,
    ReservationType, Table,
};
use rt::buf::copy_in;
use tokio::sync::{Semaphore, oneshot};
use tokio::task::{LocalSet, yield_now};
use volume::{ReservationChangeError, ReservationContext, ReservationGate, Volume, VolumeClient};

const BLOCK: usize = 512;

/// This node's replica of a disk: a byte of the first table is corrupt here, until it is rewritten.
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
        let table = matches!(op, Op::Read { at, .. } if at == METADATA_LBA);
        let found = self.dev.submit(op, &ctx).await?;
        if !table || !self.rot.get() {
            return Ok(found);
        }
        let mut bytes = found.to_vec();
        bytes[100] ^= 1;
        Ok(copy_in(ctx.credit(), &bytes))
    }
}

/// The node that orders the writes: another one, whose replica is intact or not.
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

impl ReplicatedDevice for Primary {
    fn compare_and_write<'a>(
        &'a self,
        at: Lba,
        compare: &'a Bufs,
        write: &'a Bufs,
        fua: bool,
        ctx: &'a Ctx,
    ) -> CompareAndWriteFuture<'a> {
        Box::pin(async move {
            if self.refuses {
                return Err(RequestError::Miscompare { offset: 0 });
            }
            let blocks = (write.len() / BLOCK) as u32;
            let found = self.dev.submit(Op::Read { at, blocks }, ctx).await?;
            if let Some(offset) = compare.first_difference(&found) {
                return Err(RequestError::Miscompare { offset: offset as u64 });
            }
            self.dev.submit(Op::Write { at, data: write.clone(), fua }, ctx).await?;
            self.mends.iter().filter(|_| at == METADATA_LBA).for_each(|rot| rot.set(false));
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

/// A disk that refuses to write past the volume for now.
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
        if self.fails.get() && matches!(op, Op::Write { at, .. } if at >= METADATA_LBA) {
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
        let inside = range.map_or(self.flushes.get(), |range| range.at < METADATA_LBA);
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
    gate: Rc<ReservationGate>,
    volume: Rc<Volume>,
    pool: BufferPool,
    account: Account,
    notified: Rc<RefCell<Vec<(u8, Notifications)>>>,
}

fn party(n: u8) -> ItNexus {
    let initiator = Initiator::Iscsi { name: "iqn.2026-01.example:i".into(), isid: [n; 6] };
    ItNexus { initiator, port: 1 }
}

fn standing(era: u64) -> ReservationContext {
    ReservationContext { power_epoch: era, incarnation: 1, serving_incarnations: vec![1] }
}

impl Bench {
    fn new() -> Self {
        let disk = Dev::new(Mem::new(MemOptions::new(BLOCK as u32, 4096)));
        let bench = Self::over(disk, true);
        bench.gate.set_context(standing(1));
        bench
    }

    /// A volume of this device.
    fn of(volume: Rc<Volume>) -> Self {
        let disk = Dev::new(Mem::new(MemOptions::new(BLOCK as u32, 8)));
        let bench = Self { volume, ..Self::over(disk, false) };
        bench.volume.enable_reservations(Rc::clone(&bench.gate), bench.pool.account());
        bench.gate.set_context(standing(1));
        bench
    }

    /// A node that opens the volume: with no standing as yet.
    fn over(disk: Dev, held: bool) -> Self {
        let pool = BufferPool::new(16 << 20).unwrap();
        let through = Rc::new(Semaphore::new(0));
        let hold_flushes = Rc::<Cell<bool>>::default();
        let flushes = Rc::clone(&hold_flushes);
        let layer = Held { dev: disk.clone(), through: held.then(|| Rc::clone(&through)), flushes };
        let volume = Volume::new(Dev::new(layer), Epoch::default());
        let (gate, account) = (Rc::new(ReservationGate::default()), pool.account());
        volume.enable_reservations(Rc::clone(&gate), pool.account());
        let notified = Rc::default();
        Self { disk, through, hold_flushes, gate, volume, pool, account, notified }
    }

    fn enter(&self, n: u8) -> Rc<VolumeClient> {
        let notified = Rc::clone(&self.notified);
        self.gate.attach_client(
            party(n),
            Box::new(move |notices| notified.borrow_mut().push((n, notices))),
        )
    }

    fn request(&self, at: u64) -> Request {
        let credit = self.account.try_credit(BLOCK, MemoryClass::LocalIo).unwrap();
        Request::Write { at: Lba(at), data: copy_in(&credit, &[7; BLOCK]), fua: false }
    }

    /// A write that has begun.
    fn write(&self, by: &Rc<VolumeClient>, at: u64) -> oneshot::Receiver<Result<(), RequestError>> {
        let (answer, answered) = oneshot::channel();
        let done =
            move |r: Result<Bufs, RequestError>| answer.send(r.map(drop)).unwrap_or_default();
        self.volume.start_for(by, self.request(at), &self.account, done);
        answered
    }

    async fn read(&self, by: &Rc<VolumeClient>) -> Result<(), RequestError> {
        let (answer, answered) = oneshot::channel();
        let done =
            move |r: Result<Bufs, RequestError>| answer.send(r.map(drop)).unwrap_or_default();
        let range = Blocks::new(Lba(9), 1);
        self.volume.start_for(by, Request::Read { range }, &self.account, done);
        self.through.add_permits(1);
        let result = answered.await.unwrap();
        if result.is_err() {
            self.through.forget_permits(1);
        }
        result
    }

    fn begin(
        &self,
        n: u8,
        change: Change,
    ) -> oneshot::Receiver<Result<(), ReservationChangeError>> {
        let (answer, answered) = oneshot::channel();
        self.volume.change_reservations(
            party(n),
            change,
            || true,
            move |r| answer.send(r).unwrap_or(()),
        );
        answered
    }

    async fn alter(&self, n: u8, change: Change) -> Result<(), ReservationChangeError> {
        self.begin(n, change).await.unwrap()
    }

    async fn register(&self, n: u8, persists: bool) {
        self.alter(n, register(n, persists)).await.unwrap();
    }
}

fn register(n: u8, persists: bool) -> Change {
    let (key, new_key, ignore_key) = (0, u64::from(n), true);
    Change::Register {
        key,
        new_key,
        ignore_key,
        persist: persists,
        ports: vec![],
        other_initiators: vec![],
    }
}

fn reserve(n: u8, kind: ReservationType) -> Change {
    Change::Reserve { key: u64::from(n), kind }
}

fn preempt(n: u8, victim: u8, abort: bool) -> Change {
    let kind = Some(ReservationType::WriteExclusive);
    Change::Preempt { key: u64::from(n), preempt_key: u64::from(victim), kind, abort }
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
        b.alter(1, reserve(1, ReservationType::WriteExclusive)).await.unwrap();
        assert_eq!(b.write(&two, 0).await.unwrap(), Err(RequestError::ReservationConflict));
        assert_eq!(b.read(&two).await, Ok(()));
        let written = b.write(&one, 0);
        b.through.add_permits(1);
        assert_eq!(written.await.unwrap(), Ok(()));
        assert!(!two.rights().can_write && one.rights().can_write);
        let refused = b.alter(2, reserve(2, ReservationType::WriteExclusive)).await;
        assert_eq!(refused, Err(ReservationChangeError::Rejected(ReservationError::Conflict)));
        b.alter(1, Change::Release { key: 1, kind: ReservationType::WriteExclusive })
            .await
            .unwrap();
        let written = b.write(&two, 0);
        b.through.add_permits(1);
        assert_eq!(written.await.unwrap(), Ok(()));
        assert_eq!(b.volume.read_reservations().await.unwrap().registrants().len(), 1);
        drop((one, two));
        assert_eq!(b.pool.usage().free, b.pool.usage().total, "memory was leaked");
    })
    .await;
}

/// Running commands of the preempted nexus have ended when PREEMPT is answered; waiting ones end at
/// once.
#[tokio::test]
async fn preempt_waits_for_commands_in_flight() {
    local(async {
        let b = Bench::new();
        let (_one, two) = (b.enter(1), b.enter(2));
        for n in [1, 2] {
            b.register(n, false).await;
        }
        b.alter(2, reserve(2, ReservationType::WriteExclusive)).await.unwrap();
        let mut under_way = b.write(&two, 0);
        let waits = b.write(&two, 0);
        quiet().await;
        let mut preempting = b.begin(1, preempt(1, 2, false));
        assert_eq!(
            waits.await.unwrap(),
            Err(RequestError::ReservationConflict),
            "it had not begun"
        );
        quiet().await;
        assert!(under_way.try_recv().is_err() && preempting.try_recv().is_err());
        assert_eq!(
            b.write(&two, 8).await.unwrap(),
            Err(RequestError::ReservationConflict),
            "already"
        );
        b.through.add_permits(1);
        assert_eq!(under_way.await.unwrap(), Ok(()), "it had begun: the truth is told");
        assert_eq!(preempting.await.unwrap(), Ok(()));
        let notified: Vec<_> =
            b.notified.borrow().iter().filter(|(n, _)| *n == 2).copied().collect();
        assert!(
            notified.iter().any(|(_, n)| n.contains(Notification::RegistrationsPreempted)),
            "{notified:?}"
        );
    })
    .await;
}

/// PREEMPT AND ABORT waits for the commands that it aborts, even if they would still be allowed.
#[tokio::test]
async fn preempt_and_abort_waits_for_readers() {
    local(async {
        let b = Bench::new();
        let (_one, two) = (b.enter(1), b.enter(2));
        for n in [1, 2] {
            b.register(n, false).await;
        }
        b.alter(1, reserve(1, ReservationType::WriteExclusive)).await.unwrap();
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

/// CLEAR TASK SET waits for the commands that it ends, of any nexus with any rights.
#[tokio::test]
async fn clear_task_set_waits_for_the_commands_it_ends() {
    local(async {
        let b = Bench::new();
        let two = b.enter(2);
        let mut under_way = b.write(&two, 0);
        quiet().await;
        let mut clearing = b.begin(1, Change::ClearTaskSet);
        quiet().await;
        assert!(under_way.try_recv().is_err() && clearing.try_recv().is_err());
        b.through.add_permits(1);
        assert_eq!(clearing.await.unwrap(), Ok(()));
        assert!(under_way.try_recv().is_ok());
        assert!(
            b.notified
                .borrow()
                .iter()
                .any(|(n, all)| *n == 2 && all.contains(Notification::AbortCommands))
        );
        b.through.add_permits(1);
        assert_eq!(b.write(&two, 0).await.unwrap(), Ok(()), "it goes on");
    })
    .await;
}

/// A key missing in READ KEYS is as reliable as after a PREEMPT: READ KEYS returns the table in
/// force.
#[tokio::test]
async fn preempted_keys_disappear_when_nothing_is_in_flight() {
    local(async {
        let b = Bench::new();
        let (_one, two) = (b.enter(1), b.enter(2));
        for n in [1, 2] {
            b.register(n, false).await;
        }
        b.alter(2, reserve(2, ReservationType::WriteExclusive)).await.unwrap();
        let mut under_way = b.write(&two, 0);
        quiet().await;
        let preempting = b.begin(1, preempt(1, 2, true));
        quiet().await;
        let volume = Rc::clone(&b.volume);
        let reading = tokio::task::spawn_local(async move { volume.read_reservations().await });
        // A change without effect is not in force any sooner.
        let again = b.begin(1, reserve(1, ReservationType::WriteExclusive));
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
async fn a_closed_gate_reopens() {
    local(async {
        let b = Bench::new();
        b.through.add_permits(1_000_000);
        let one = b.enter(1);
        b.register(1, false).await;
        // A piece of a table, as a resync writes it.
        b.gate.on_applied(Blocks::new(Lba(METADATA_LBA.0 + 1), 1), &Bufs::zeroes(BLOCK));
        let answered = Rc::new(Cell::new(0));
        // All that data on its way may have.
        for n in 0..23 {
            let account = b.pool.account();
            let credit = account.try_credit(512 << 10, MemoryClass::UnsolicitedData).unwrap();
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

/// A byte of a table that has rotted at one node, which others compare with a good one: it is
/// mended by the next change.
#[tokio::test]
async fn a_corrupt_table_at_one_node_is_repaired() {
    local(async {
        let disk = Dev::new(Mem::new(MemOptions::new(BLOCK as u32, 4096)));
        let rot = Rc::new(Cell::new(false));
        let own = Dev::new(Rotten { dev: disk.clone(), rot: Rc::clone(&rot) });
        let primary = Primary { dev: disk, mends: Some(Rc::clone(&rot)), refuses: false };
        let b = Bench::of(Volume::new_replicated(own, Rc::new(primary), Epoch::default()));
        b.register(1, false).await;
        rot.set(true);
        b.alter(1, reserve(1, ReservationType::WriteExclusive)).await.unwrap();
        assert!(!rot.get());
    })
    .await;
}

/// If it can not be mended, changes end with that.
#[tokio::test(start_paused = true)]
async fn a_table_that_never_compares_equal_is_reported() {
    local(async {
        let disk = Dev::new(Mem::new(MemOptions::new(BLOCK as u32, 4096)));
        let primary = Primary { dev: disk.clone(), mends: None, refuses: true };
        let b = Bench::of(Volume::new_replicated(disk, Rc::new(primary), Epoch::default()));
        let corrupt = Error::Corrupt { at: METADATA_LBA };
        assert_eq!(
            b.alter(1, register(1, false)).await,
            Err(ReservationChangeError::DeviceError(corrupt))
        );
    })
    .await;
}

/// A change that its initiator gave up with its session does not happen later.
#[tokio::test]
async fn a_cancelled_change_is_not_made() {
    local(async {
        let b = Bench::new();
        let wanted = Rc::new(Cell::new(true));
        let (answer, answered) = oneshot::channel();
        let first = b.begin(1, register(1, false));
        let asks = Rc::clone(&wanted);
        let done = move |r| answer.send(r).unwrap_or(());
        b.volume.change_reservations(party(2), register(2, false), move || asks.get(), done);
        wanted.set(false);
        first.await.unwrap().unwrap();
        assert_eq!(
            answered.await.unwrap(),
            Err(ReservationChangeError::DeviceError(Error::Aborted))
        );
        assert_eq!(b.volume.read_reservations().await.unwrap().registrants().len(), 1);
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
        let reserving = b.begin(1, reserve(1, ReservationType::WriteExclusive));
        let selecting = b.begin(2, Change::SetModePages(2));
        assert_eq!(reserving.await.unwrap(), Ok(()));
        let selected = selecting.await.unwrap();
        assert!(!two.rights().can_write);
        assert_eq!(selected, Err(ReservationChangeError::Rejected(ReservationError::Conflict)));
    })
    .await;
}

/// An SPC-2 reservation ends with the incarnation through which it was made: its holder is
/// notified, if it is still there.
#[tokio::test]
async fn a_lost_reserve_is_reported() {
    local(async {
        let b = Bench::new();
        let (_one, two) = (b.enter(1), b.enter(2));
        b.alter(1, Change::Spc2Reserve).await.unwrap();
        b.notified.borrow_mut().clear();
        // The node was put out, and is a member again as another incarnation.
        b.gate.set_context(ReservationContext {
            power_epoch: 1,
            incarnation: 5,
            serving_incarnations: vec![5, 9],
        });
        quiet().await;
        assert!(two.rights().passes_spc2);
        let expected =
            [(1, [Notification::ReservationsPreempted].into_iter().collect::<Notifications>())];
        let notified: Vec<_> =
            b.notified.borrow().iter().filter(|(_, n)| !n.is_empty()).copied().collect();
        assert_eq!(notified, expected);
    })
    .await;
}

/// A nexus is lost while nothing can be written, and its initiator is back and reserves anew before
/// that is over.
#[tokio::test(start_paused = true)]
async fn a_late_leave_takes_no_new_reserve() {
    local(async {
        let disk = Dev::new(Mem::new(MemOptions::new(BLOCK as u32, 4096)));
        let fails = Rc::new(Cell::new(false));
        let failing = Failing { dev: disk, fails: Rc::clone(&fails) };
        let b = Bench::of(Volume::new(Dev::new(failing), Epoch::default()));
        let (one, two) = (b.enter(1), b.enter(2));
        b.alter(1, Change::Spc2Reserve).await.unwrap();
        fails.set(true);
        drop(one);
        quiet().await;
        fails.set(false);
        let one = b.enter(1);
        b.alter(1, Change::Spc2Reserve).await.unwrap();
        assert!(one.rights().passes_spc2 && !two.rights().passes_spc2);
        tokio::time::sleep(Duration::from_secs(1)).await;
        assert!(one.rights().passes_spc2 && !two.rights().passes_spc2, "the new one stays");
        drop(one);
        tokio::time::sleep(Duration::from_secs(1)).await;
        assert!(two.rights().passes_spc2);
    })
    .await;
}

/// A reset ends commands in flight. Flushes wait for that, so it must not wait for them (seed
/// 400005 of the simulator).
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
        assert_eq!(b.alter(1, Change::Reset { whole_target: false }).await, Ok(()));
        assert!(!flushed.get());
        b.through.add_permits(1);
        quiet().await;
        assert!(flushed.get());
    })
    .await;
}

/// SPC-2 5.5.1: RESERVE ends with its nexus, for requests right after that.
#[tokio::test]
async fn reserve_ends_with_its_nexus() {
    local(async {
        let b = Bench::new();
        let (one, two) = (b.enter(1), b.enter(2));
        b.alter(1, Change::Spc2Reserve).await.unwrap();
        assert!(!two.rights().passes_spc2 && one.rights().passes_spc2);
        assert_eq!(b.read(&two).await, Err(RequestError::ReservationConflict));
        drop(one);
        assert!(two.rights().passes_spc2, "at once");
        assert_eq!(b.read(&two).await, Ok(()));
        quiet().await;
        assert_eq!(b.volume.read_reservations().await.unwrap().spc2_reservation, None);
        b.alter(2, Change::Spc2Reserve).await.unwrap();
        let one = b.enter(1);
        assert!(!one.rights().passes_spc2);
        b.alter(3, Change::Spc2Reserve).await.unwrap_err();
    })
    .await;
}

/// Who has something done beside its nexus is bound as the nexus is, and ends nothing with that.
#[tokio::test]
async fn operations_for_a_nexus_end_with_it() {
    local(async {
        let b = Bench::new();
        let _one = b.enter(1);
        b.alter(1, Change::Spc2Reserve).await.unwrap();
        let for_one = b.gate.client_on_behalf_of(party(1));
        let for_two = b.gate.client_on_behalf_of(party(2));
        assert_eq!(b.read(&for_one).await, Ok(()));
        assert_eq!(b.read(&for_two).await, Err(RequestError::ReservationConflict));
        drop((for_one, for_two));
        quiet().await;
        assert_eq!(
            b.read(&b.gate.client_on_behalf_of(party(2))).await,
            Err(RequestError::ReservationConflict)
        );
    })
    .await;
}

/// Commands on behalf of a nexus are waited for and ended like its own.
#[tokio::test]
async fn operations_for_a_nexus_are_preempted() {
    local(async {
        let b = Bench::new();
        b.register(1, false).await;
        b.register(2, false).await;
        b.alter(2, reserve(2, ReservationType::WriteExclusiveRegistrantsOnly)).await.unwrap();
        let for_one = b.gate.client_on_behalf_of(party(1));
        let mut under_way = b.write(&for_one, 0);
        let waits = b.write(&for_one, 0);
        quiet().await;
        let mut preempting = b.begin(2, preempt(2, 1, true));
        assert!(waits.await.unwrap().is_err(), "it had not begun");
        quiet().await;
        assert!(under_way.try_recv().is_err() && preempting.try_recv().is_err());
        assert_eq!(
            b.write(&for_one, 8).await.unwrap(),
            Err(RequestError::ReservationConflict),
            "already"
        );
        b.through.add_permits(1);
        assert_eq!(preempting.await.unwrap(), Ok(()));
        assert!(under_way.try_recv().is_ok(), "before PREEMPT AND ABORT is answered");
    })
    .await;
}

/// Until the context is known, commands wait.
#[tokio::test]
async fn commands_wait_until_the_table_is_read() {
    local(async {
        let first = Bench::new();
        first.register(1, true).await;
        first.alter(1, reserve(1, ReservationType::WriteExclusive)).await.unwrap();
        let b = Bench::over(first.disk.clone(), false);
        let two = b.enter(2);
        let mut write = b.write(&two, 0);
        quiet().await;
        assert!(write.try_recv().is_err(), "it has no standing");
        let aborted = b.write(&two, 8);
        quiet().await;
        b.gate.set_context(standing(1));
        assert_eq!(write.await.unwrap(), Err(RequestError::ReservationConflict));
        assert_eq!(aborted.await.unwrap(), Err(RequestError::ReservationConflict));
    })
    .await;
}

/// A write that arrived before the write cache was known to be off, or writes to be forbidden, is
/// not executed under the old state.
#[tokio::test]
async fn writes_are_not_carried_out_by_other_mode_pages() {
    local(async {
        let first = Bench::new();
        let _one = first.enter(1);
        first.alter(1, Change::SetModePages(5)).await.unwrap();
        let b = Bench::over(first.disk.clone(), false);
        let two = b.enter(2);
        let (early, read) = (b.write(&two, 0), b.read(&two));
        b.gate.set_context(standing(1));
        assert_eq!(read.await, Ok(()));
        assert_eq!(early.await.unwrap(), Err(RequestError::Device(Error::Fenced)));
        assert_eq!(two.mode_pages(), 5);
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
            first.alter(1, reserve(1, ReservationType::WriteExclusive)).await.unwrap();
            let b = Bench::over(first.disk.clone(), false);
            b.gate.set_context(standing(2));
            let expect = if persists { Err(RequestError::ReservationConflict) } else { Ok(()) };
            assert_eq!(b.write(&b.enter(2), 0).await.unwrap(), expect);
            let table = b.volume.read_reservations().await.unwrap();
            assert_eq!((table.registrants().len(), table.pr_generation), (persists.into(), 0));
        }
    })
    .await;
}

/// A table applied here by a mirror but not yet committed revokes rights and grants none.
#[tokio::test]
async fn uncommitted_changes_only_restrict() {
    local(async {
        let b = Bench::new();
        let (one, two) = (b.enter(1), b.enter(2));
        b.register(1, false).await;
        let table = b.volume.read_reservations().await.unwrap();
        let taking = table
            .with_change(&party(1), 1, &reserve(1, ReservationType::WriteExclusive))
            .unwrap()
            .unwrap();
        let blocks = COPY_BYTES / BLOCK;
        let noted = |table: &Table| {
            let credit = b.account.try_credit(COPY_BYTES, MemoryClass::LocalIo).unwrap();
            let range = Blocks::new(METADATA_LBA, blocks as u64);
            b.gate.on_applied(range, &copy_in(&credit, &table.encode()));
        };
        noted(&taking);
        assert!(!two.rights().can_write && one.rights().can_write, "before it is committed");
        assert!(b.gate.wait_in_force().now_or_never().is_none());
        quiet().await;
        assert!(two.rights().can_write, "it is not what the disk has");
        assert!(b.gate.wait_in_force().now_or_never().is_some());

        b.alter(1, reserve(1, ReservationType::WriteExclusive)).await.unwrap();
        noted(&Table::default());
        assert!(!two.rights().can_write, "given only when it is committed");
        quiet().await;
        assert!(!two.rights().can_write);
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
        b.gate.on_applied(Blocks::new(Lba(METADATA_LBA.0 + 1), 1), &Bufs::zeroes(BLOCK));
        let mut write = b.write(&one, 0);
        assert!(write.try_recv().is_err());
        b.through.add_permits(1);
        assert_eq!(write.await.unwrap(), Ok(()), "read again");
    })
    .await;
}

/// An unreadable table denies all access, and an administrator can reset it.
#[tokio::test(start_paused = true)]
async fn a_damaged_table() {
    local(async {
        let disk = Dev::new(Mem::new(MemOptions::new(BLOCK as u32, 4096)));
        let pool = BufferPool::new(1 << 20).unwrap();
        let credit = pool.account().try_credit(2 * COPY_BYTES, MemoryClass::LocalIo).unwrap();
        let ctx = Ctx::new(credit, Epoch::default());
        let data = copy_in(ctx.credit(), &[0xee; 2 * COPY_BYTES]);
        disk.submit(Op::Write { at: METADATA_LBA, data, fua: true }, &ctx).await.unwrap();
        let b = Bench::over(disk, false);
        b.gate.set_context(standing(1));
        let one = b.enter(1);
        tokio::time::sleep(Duration::from_secs(1)).await;
        let corrupt = Error::Corrupt { at: METADATA_LBA };
        assert_eq!(b.write(&one, 0).await.unwrap(), Err(corrupt.into()));
        assert_eq!(
            b.alter(1, register(1, false)).await,
            Err(ReservationChangeError::DeviceError(corrupt))
        );
        b.alter(1, Change::AdminClear).await.unwrap();
        assert_eq!(b.write(&one, 0).await.unwrap(), Ok(()));
    })
    .await;
}
