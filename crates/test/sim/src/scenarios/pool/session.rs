//! An open pool, on all cores of its host, with its volumes.

use std::cell::RefCell;
use std::path::PathBuf;
use std::rc::Rc;

use block::testing::TestClient;
use block::testing::register::{Checker, CrashKind, InitialContents, Outcome};
use block::testing::workload::Workload;
use block::{Blocks, Dev, Lba, Op};
use futures_util::future::{join_all, try_join_all};
use pool::{CorePool, Mistake, NewPoolVolume, OpenPool, Pool};
use rt::Core;
use rt::sim::World;
use uuid::Uuid;

use super::POOL;

/// Most volumes at a time.
const VOLUMES: usize = 3;

/// Lifecycle of a volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum VolumeStage {
    Exists,
    /// It is being created or deleted: after a crash it exists or not.
    Changing,
}

/// A volume, and the values that its blocks may hold.
#[derive(Debug)]
struct ExpectedVolume {
    spec: NewPoolVolume,
    /// The blocks in use.
    span: Blocks,
    checker: Rc<RefCell<Checker>>,
    stage: VolumeStage,
}

/// The volumes of a pool, as far as the scenario knows.
#[derive(Debug)]
pub(super) struct ExpectedVolumes {
    world: World,
    /// Bytes of an extent.
    extent: u64,
    all: RefCell<Vec<ExpectedVolume>>,
}

impl ExpectedVolumes {
    pub(super) fn new(world: &World, extent: u64) -> Rc<Self> {
        Rc::new(Self { world: world.clone(), extent, all: RefCell::default() })
    }

    /// Draws a new volume, whose creation begins now.
    pub(super) fn draw_new_volume(&self) -> NewPoolVolume {
        let (rng, extent) = (self.world.rng(), self.extent);
        let (thick, block_size) = (rng.chance(0.3), *rng.pick(&[512u32, 4096]));
        // Volume ends that are not extent ends, and blocks at an extent border.
        let bytes = if thick { extent / 2 } else { 2 * extent + (8 << 20) };
        let blocks = 1u64 << 20;
        let border = if thick { 0 } else { extent - blocks / 2 };
        let at = *rng.pick(&[0, border, border, bytes - blocks]);
        let block = u64::from(block_size);
        let span = Blocks::new(Lba(at / block), blocks / block / 4);
        let id = Uuid::from_u64_pair(0x78, rng.u64());
        let what = NewPoolVolume { id, bytes, block_size, is_thick: thick };
        let checker = Rc::new(RefCell::new(Checker::new(1, block_size, InitialContents::Zeroes)));
        self.all.borrow_mut().push(ExpectedVolume {
            spec: what,
            span,
            checker,
            stage: VolumeStage::Changing,
        });
        what
    }

    pub(super) fn crash(&self, loss: CrashKind) {
        self.all.borrow().iter().for_each(|volume| volume.checker.borrow_mut().crash(loss));
    }

    fn set(&self, id: Uuid, stage: VolumeStage) {
        let mut all = self.all.borrow_mut();
        all.iter_mut()
            .filter(|volume| volume.spec.id == id)
            .for_each(|volume| volume.stage = stage);
    }

    fn forget(&self, id: Uuid) {
        self.all.borrow_mut().retain(|volume| volume.spec.id != id);
    }

    /// Records which volumes exist.
    fn check_listed(&self, pool: &Pool) -> Result<(), String> {
        let report = pool.report();
        let is_there =
            |volume: &ExpectedVolume| report.volumes.iter().any(|v| v.id == volume.spec.id);
        let mut all = self.all.borrow_mut();
        all.retain(|volume| volume.stage == VolumeStage::Exists || is_there(volume));
        match all.iter().find(|volume| !is_there(volume)) {
            Some(lost) => Err(format!("volume {} is lost: {report:?}", lost.spec.id)),
            None => {
                all.iter_mut().for_each(|volume| volume.stage = VolumeStage::Exists);
                Ok(())
            }
        }
    }

    fn ids(&self) -> Vec<Uuid> {
        self.all.borrow().iter().map(|volume| volume.spec.id).collect()
    }
}

/// A volume in use.
struct OpenVolume {
    id: Uuid,
    client: TestClient,
    load: Workload,
    span: Blocks,
    checker: Rc<RefCell<Checker>>,
}

/// The open pool and its volumes.
pub(super) struct Session {
    pub(super) pool: Rc<Pool>,
    cores: Vec<Core>,
    core_pools: Vec<Rc<CorePool>>,
    open_volumes: RefCell<Vec<Rc<OpenVolume>>>,
    volumes: Rc<ExpectedVolumes>,
    depth: usize,
}

fn text(why: &impl ToString) -> String {
    why.to_string()
}

impl Session {
    /// Opens the pool on core 0, attaches every core, and opens each volume on a random core.
    pub(super) async fn open(
        cores: Vec<Core>,
        paths: Vec<PathBuf>,
        volumes: Rc<ExpectedVolumes>,
        mistake: Mistake,
    ) -> Result<Self, String> {
        let what =
            OpenPool { id: POOL, paths, missing_disks: Vec::new(), buffered: false, claim: None };
        let pool =
            Pool::open_with_mistake(&cores[0], &what, mistake).await.map_err(|e| text(&e))?;
        let mut core_pools = Vec::new();
        for (ring, core) in (0u16..).zip(&cores) {
            // Simulated disks cannot be opened twice: all cores use the openings of the first one.
            let core_pool = CorePool::attach_on_owner_core(core, &pool, ring).await;
            core_pools.push(core_pool.map_err(|e| text(&e))?);
        }
        volumes.check_listed(&pool)?;
        let depth = usize::try_from(volumes.world.rng().between(1, 12)).expect("small");
        let used = RefCell::default();
        let session = Self { pool, cores, core_pools, open_volumes: used, volumes, depth };
        for id in session.volumes.ids() {
            session.open_volume(id).await?;
        }
        session.audit().await?;
        Ok(session)
    }

    /// Opens a volume on any core.
    async fn open_volume(&self, id: Uuid) -> Result<(), String> {
        let rng = self.volumes.world.rng();
        let core = usize::try_from(rng.below(self.core_pools.len() as u64)).expect("few");
        let core_pool = &self.core_pools[core];
        let dev: Dev = core_pool.open_volume(id).await.map_err(|e| text(&e))?;
        let new = || TestClient::new(&dev, self.cores[core].buffer_pool());
        let used = {
            let all = self.volumes.all.borrow();
            let volume = all.iter().find(|volume| volume.spec.id == id);
            let volume = volume.ok_or("an unknown volume")?;
            let (span, checker) = (volume.span, Rc::clone(&volume.checker));
            let load = Workload::new(new(), span, self.depth, rng.u64());
            OpenVolume { id, client: new(), load, span, checker }
        };
        self.open_volumes.borrow_mut().push(Rc::new(used));
        Ok(())
    }

    fn all_used(&self) -> Vec<Rc<OpenVolume>> {
        self.open_volumes.borrow().clone()
    }

    /// Reads all blocks in use.
    pub(super) async fn audit(&self) -> Result<(), String> {
        let all = self.all_used();
        let each = all.iter().map(|used| used.load.audit(&used.checker));
        join_all(each).await.into_iter().try_for_each(|audit| audit.map_err(|v| text(&v)))
    }

    /// Runs this many operations on each volume; all of them must succeed.
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

    /// Sometimes runs an operation other than a read or write.
    pub(super) async fn run_random_change(&self) -> Result<(), String> {
        let rng = self.volumes.world.rng();
        let all = self.all_used();
        let any = (!all.is_empty()).then(|| Rc::clone(rng.pick(&all)));
        drop(all);
        match (rng.below(40), any) {
            (0..4, Some(used)) => self.unmap(&used).await,
            (4, Some(used)) => {
                let id = used.id;
                drop(used);
                self.close_volume(id);
                self.volumes.world.note(format!("volume {id} moves"));
                self.open_volume(id).await
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

    fn close_volume(&self, id: Uuid) {
        self.open_volumes.borrow_mut().retain(|used| used.id != id);
    }

    /// Creates one more volume.
    async fn create(&self) -> Result<(), String> {
        let what = self.volumes.draw_new_volume();
        self.volumes.world.note(format!("{what:?} is made"));
        match self.pool.create_volume(&what).await {
            Ok(()) => {
                self.volumes.set(what.id, VolumeStage::Exists);
                self.open_volume(what.id).await
            }
            Err(why) if why.is_no_space() => {
                self.volumes.forget(what.id);
                Ok(())
            }
            Err(why) => Err(format!("creating: {why}")),
        }
    }

    async fn delete(&self, id: Uuid) -> Result<(), String> {
        self.close_volume(id);
        self.volumes.world.note(format!("volume {id} is deleted"));
        self.volumes.set(id, VolumeStage::Changing);
        self.pool.delete_volume(id).await.map_err(|e| format!("deleting: {e}"))?;
        self.volumes.forget(id);
        Ok(())
    }

    /// Deallocates an extent while the volume is not in use.
    async fn unmap(&self, used: &OpenVolume) -> Result<(), String> {
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

    /// Closes everything in order.
    pub(super) async fn close(self) -> Result<(), String> {
        self.open_volumes.take();
        let closed = self.core_pools.iter().map(|core_pool| core_pool.close());
        try_join_all(closed).await.map_err(|e| text(&e))?;
        self.pool.close().await.map_err(|e| text(&e))
    }
}
