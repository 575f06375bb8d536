//! A pool that is open, on all cores of its host, with the volumes that there are.

use std::cell::RefCell;
use std::path::PathBuf;
use std::rc::Rc;

use block::testing::Client;
use block::testing::register::{Checker, Initially, Loss, Outcome};
use block::testing::workload::Workload;
use block::{Blocks, Dev, Lba, Op};
use futures_util::future::{join_all, try_join_all};
use pool::{Mistake, NewPoolVolume, OpenPool, Pool, PoolSeat};
use rt::Core;
use rt::sim::World;
use uuid::Uuid;

use super::POOL;

/// Most volumes at once.
const VOLUMES: usize = 3;

/// How far a volume is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    There,
    /// It is being made, or deleted: after a crash it is there or not.
    Changing,
}

/// A volume, and what its blocks may hold.
#[derive(Debug)]
struct Volume {
    what: NewPoolVolume,
    /// Where it is used.
    span: Blocks,
    checker: Rc<RefCell<Checker>>,
    stage: Stage,
}

/// The volumes of a pool, as far as that is known outside of it.
#[derive(Debug)]
pub(super) struct Volumes {
    world: World,
    /// Bytes of an extent.
    extent: u64,
    all: RefCell<Vec<Volume>>,
}

impl Volumes {
    pub(super) fn new(world: &World, extent: u64) -> Rc<Self> {
        Rc::new(Self { world: world.clone(), extent, all: RefCell::default() })
    }

    /// A volume of another kind, which is being made from now on.
    pub(super) fn draw(&self) -> NewPoolVolume {
        let (rng, extent) = (self.world.rng(), self.extent);
        let (thick, block_size) = (rng.chance(0.3), *rng.pick(&[512u32, 4096]));
        // The end of a volume, which is not that of an extent, and where two meet.
        let bytes = if thick { extent / 2 } else { 2 * extent + (8 << 20) };
        let blocks = 1u64 << 20;
        let border = if thick { 0 } else { extent - blocks / 2 };
        let at = *rng.pick(&[0, border, border, bytes - blocks]);
        let block = u64::from(block_size);
        let span = Blocks::new(Lba(at / block), blocks / block / 4);
        let id = Uuid::from_u64_pair(0x78, rng.u64());
        let what = NewPoolVolume { id, bytes, block_size, thick };
        let checker = Rc::new(RefCell::new(Checker::new(1, block_size, Initially::Zeroes)));
        self.all.borrow_mut().push(Volume { what, span, checker, stage: Stage::Changing });
        what
    }

    pub(super) fn crash(&self, loss: Loss) {
        self.all.borrow().iter().for_each(|volume| volume.checker.borrow_mut().crash(loss));
    }

    fn set(&self, id: Uuid, stage: Stage) {
        let mut all = self.all.borrow_mut();
        all.iter_mut()
            .filter(|volume| volume.what.id == id)
            .for_each(|volume| volume.stage = stage);
    }

    fn forget(&self, id: Uuid) {
        self.all.borrow_mut().retain(|volume| volume.what.id != id);
    }

    /// Takes note of which there are.
    fn found(&self, pool: &Pool) -> Result<(), String> {
        let report = pool.report();
        let is_there = |volume: &Volume| report.volumes.iter().any(|v| v.id == volume.what.id);
        let mut all = self.all.borrow_mut();
        all.retain(|volume| volume.stage == Stage::There || is_there(volume));
        match all.iter().find(|volume| !is_there(volume)) {
            Some(lost) => Err(format!("volume {} is lost: {report:?}", lost.what.id)),
            None => {
                all.iter_mut().for_each(|volume| volume.stage = Stage::There);
                Ok(())
            }
        }
    }

    fn ids(&self) -> Vec<Uuid> {
        self.all.borrow().iter().map(|volume| volume.what.id).collect()
    }
}

/// A volume in use.
struct Used {
    id: Uuid,
    client: Client,
    load: Workload,
    span: Blocks,
    checker: Rc<RefCell<Checker>>,
}

/// What is open.
pub(super) struct Session {
    pub(super) pool: Rc<Pool>,
    cores: Vec<Core>,
    seats: Vec<Rc<PoolSeat>>,
    used: RefCell<Vec<Rc<Used>>>,
    volumes: Rc<Volumes>,
    depth: usize,
}

fn text(why: &impl ToString) -> String {
    why.to_string()
}

impl Session {
    /// Opens the pool on core 0, a seat on each, and all volumes, each on any core.
    pub(super) async fn open(
        cores: Vec<Core>,
        paths: Vec<PathBuf>,
        volumes: Rc<Volumes>,
        mistake: Mistake,
    ) -> Result<Self, String> {
        let what = OpenPool { id: POOL, paths, without: Vec::new(), buffered: false, claim: None };
        let pool = Pool::open_making(&cores[0], &what, mistake).await.map_err(|e| text(&e))?;
        let mut seats = Vec::new();
        for (ring, core) in (0u16..).zip(&cores) {
            // Simulated disks cannot be opened twice: all cores use the openings of the first one.
            let seat = PoolSeat::share(core, &pool, ring).await;
            seats.push(seat.map_err(|e| text(&e))?);
        }
        volumes.found(&pool)?;
        let depth = usize::try_from(volumes.world.rng().between(1, 12)).expect("small");
        let used = RefCell::default();
        let session = Self { pool, cores, seats, used, volumes, depth };
        for id in session.volumes.ids() {
            session.use_volume(id).await?;
        }
        session.audit().await?;
        Ok(session)
    }

    /// Opens a volume on any core.
    async fn use_volume(&self, id: Uuid) -> Result<(), String> {
        let rng = self.volumes.world.rng();
        let core = usize::try_from(rng.below(self.seats.len() as u64)).expect("few");
        let seat = &self.seats[core];
        let dev: Dev = seat.open(id).await.map_err(|e| text(&e))?;
        let new = || Client::new(&dev, self.cores[core].pool());
        let used = {
            let all = self.volumes.all.borrow();
            let volume = all.iter().find(|volume| volume.what.id == id);
            let volume = volume.ok_or("a volume that nobody knows")?;
            let (span, checker) = (volume.span, Rc::clone(&volume.checker));
            let load = Workload::new(new(), span, self.depth, rng.u64());
            Used { id, client: new(), load, span, checker }
        };
        self.used.borrow_mut().push(Rc::new(used));
        Ok(())
    }

    fn all_used(&self) -> Vec<Rc<Used>> {
        self.used.borrow().clone()
    }

    /// Reads all that is used.
    pub(super) async fn audit(&self) -> Result<(), String> {
        let all = self.all_used();
        let each = all.iter().map(|used| used.load.audit(&used.checker));
        join_all(each).await.into_iter().try_for_each(|audit| audit.map_err(|v| text(&v)))
    }

    /// So many operations on each volume, all of which have to succeed.
    pub(super) async fn run(&self, count: usize) -> Result<(), String> {
        let all = self.all_used();
        let each = all.iter().map(|used| used.load.run(&used.checker, count));
        for ended in join_all(each).await {
            ended.map_err(|v| text(&v))?;
        }
        let errors: Vec<_> = all.iter().flat_map(|used| used.load.take_errors()).collect();
        match errors.is_empty() {
            true => Ok(()),
            false => Err(format!("{errors:?}; {:?}", self.pool.report())),
        }
    }

    /// Something else than reads and writes, now and then.
    pub(super) async fn change(&self) -> Result<(), String> {
        let rng = self.volumes.world.rng();
        let all = self.all_used();
        let any = (!all.is_empty()).then(|| Rc::clone(rng.pick(&all)));
        drop(all);
        match (rng.below(40), any) {
            (0..4, Some(used)) => self.unmap(&used).await,
            (4, Some(used)) => {
                let id = used.id;
                drop(used);
                self.let_go(id);
                self.volumes.world.note(format!("volume {id} moves"));
                self.use_volume(id).await
            }
            (5, _) if self.volumes.ids().len() < VOLUMES => self.create().await,
            (6, Some(used)) if self.volumes.ids().len() > 1 => {
                let id = used.id;
                drop(used);
                self.delete(id).await
            }
            _ => Ok(()),
        }
    }

    fn let_go(&self, id: Uuid) {
        self.used.borrow_mut().retain(|used| used.id != id);
    }

    /// Makes one more.
    async fn create(&self) -> Result<(), String> {
        let what = self.volumes.draw();
        self.volumes.world.note(format!("{what:?} is made"));
        match self.pool.create_volume(&what).await {
            Ok(()) => {
                self.volumes.set(what.id, Stage::There);
                self.use_volume(what.id).await
            }
            Err(why) if why.is_no_space() => {
                self.volumes.forget(what.id);
                Ok(())
            }
            Err(why) => Err(format!("creating: {why}")),
        }
    }

    async fn delete(&self, id: Uuid) -> Result<(), String> {
        self.let_go(id);
        self.volumes.world.note(format!("volume {id} is deleted"));
        self.volumes.set(id, Stage::Changing);
        self.pool.delete_volume(id).await.map_err(|e| format!("deleting: {e}"))?;
        self.volumes.forget(id);
        Ok(())
    }

    /// Gives an extent back, while nobody uses the volume.
    async fn unmap(&self, used: &Used) -> Result<(), String> {
        let info = used.client.dev().info();
        let extent = u64::from(info.unmap_granularity_blocks);
        let Some(count) = info.blocks.checked_div(extent).filter(|count| *count > 0) else {
            return Ok(());
        };
        let index = self.volumes.world.rng().below(count);
        let (start, end) = (index * extent, (index + 1) * extent);
        let first = used.span.at.0.max(start);
        let last = (used.span.at.0 + used.span.count).min(end);
        let ticket = (first < last).then(|| {
            let range = Blocks::new(Lba(first), last - first);
            used.checker.borrow_mut().begin_unmap(range, info.unmap_zeroes)
        });
        let blocks = u32::try_from(extent).expect("an extent");
        let unmapped = used.client.submit(Op::Unmap { at: Lba(start), blocks }).await;
        let outcome = if unmapped.is_ok() { Outcome::Done } else { Outcome::Failed };
        ticket.into_iter().for_each(|ticket| used.checker.borrow_mut().end(ticket, outcome));
        unmapped.map_err(|why| format!("unmapping: {why}; {:?}", self.pool.report()))
    }

    /// An orderly end.
    pub(super) async fn close(self) -> Result<(), String> {
        self.used.take();
        let closed = self.seats.iter().map(|seat| seat.close());
        try_join_all(closed).await.map_err(|e| text(&e))?;
        self.pool.close().await.map_err(|e| text(&e))
    }
}
