//! A volume on a flat image: created, opened, used, grown and deleted, and cut off at any point of that.
//!
//! Clients whose commands overlap use the volume ([`super::clients`]); beside them the image
//! grows. Every round ends in a crash. Afterwards the image must open, with a size and contents
//! that what was acknowledged permits; it may refuse only what is not its fault.

use std::cell::RefCell;
use std::path::Path;
use std::rc::Rc;
use std::time::Duration;

use block::testing::register::Loss;
use block::{Blocks, Bufs, Ctx, Dev, Epoch, Error, Info, Layer, Lba, Op};
use disk::{FileError, Provisioning, Reason};
use image::{Create, File, Open, delete};
use rt::Core;
use rt::disk::{DiskErrorKind, OpenReason};
use rt::sim::{Damage, DiskControl, DiskFaults, DiskSetup, Host, HostSetup, Rng, Unsynced, World};
use tokio::sync::Notify;
use uuid::Uuid;
use volume::Volume;

use super::clients::{self, Client, Shared};
use super::storage::{draw_faults, end, settle};

/// Where the image is.
pub(super) const IMAGE: &str = "/images/volume";

/// The volume that it holds.
pub(super) const VOLUME: Uuid = Uuid::from_u128(0x1111_2222_3333_4444_8555_6666_7777_8888);

/// Where the label's two copies and the data are.
const SLOTS: [u64; 2] = [0, 512 << 10];
const DATA: u64 = 1 << 20;

/// The first size of the volume and the largest, in bytes.
const FIRST: u64 = 32 << 10;
const LARGEST: u64 = 256 << 10;

/// What a power cut may damage as a whole, in bytes. Only where sizes are multiples of it the end of the
/// data in use is safe while the part behind it is made.
const TORN: u64 = 4096;

/// Longest wait for a disk that a killed process still has in use.
const BUSY: Duration = Duration::from_secs(60);

/// Virtual time in which these must end.
const PATIENCE: Duration = Duration::from_secs(300);

/// Whether a flush is what it says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Flushes {
    Honest,
    /// Answered, and nothing is done.
    Skipped,
}

/// An image whose flushes may be left out.
pub(super) struct Backing {
    file: Rc<File>,
    flushes: Flushes,
}

impl Backing {
    pub(super) fn dev(file: &Rc<File>, flushes: Flushes) -> Dev {
        Dev::new(Self { file: Rc::clone(file), flushes })
    }
}

impl Layer for Backing {
    fn name(&self) -> &'static str {
        "backing"
    }

    fn info(&self) -> Info {
        self.file.info()
    }

    async fn submit(&self, op: Op, ctx: Ctx) -> Result<Bufs, Error> {
        match (op, self.flushes) {
            (Op::Flush, Flushes::Skipped) => Ok(Bufs::new()),
            (op, _) => self.file.submit(op, ctx).await,
        }
    }
}

/// What is known of the image from outside, by whoever was told.
#[derive(Clone, Debug)]
struct Known {
    /// What the last acknowledged creation, growth or opening said.
    generation: u64,
    bytes: u64,
    /// Sizes of growths whose end was never acknowledged.
    attempted: Vec<u64>,
    /// Whether both copies of the label are whole, for sure.
    copies_whole: bool,
}

impl Known {
    fn acknowledged(&mut self, file: &File) {
        let label = file.label();
        self.generation = label.generation;
        self.bytes = label.data_bytes;
        self.attempted.clear();
        self.copies_whole = true;
    }

    /// Judges what an image says that has been opened.
    fn judge(&self, file: &File) -> Result<(), String> {
        let (label, info) = (file.label(), file.info());
        if label.data_bytes != info.blocks * u64::from(info.block_size) {
            return Err(format!("{label:?} and {info:?}"));
        }
        if label.data_bytes != self.bytes && !self.attempted.contains(&label.data_bytes) {
            return Err(format!("{} bytes after {self:?}", label.data_bytes));
        }
        Ok(())
    }
}

/// What a round does besides crashing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Round {
    /// Clients at work, beside them growth.
    Load,
    /// Growth alone: what power damages then is a label or a part that is not in use yet.
    Torn,
}

struct Bench {
    world: World,
    host: Host,
    how: Create,
    /// The image grows by multiples of this many bytes.
    step: u64,
    flushes: Flushes,
    shared: Rc<Shared>,
    known: Rc<RefCell<Known>>,
    /// Told when a growth begins.
    growing: Rc<Notify>,
}

/// Plays it.
pub(crate) async fn play(world: World, flushes: Flushes) -> Result<(), String> {
    let rng = world.rng();
    let (block_size, (logical, physical)) = *rng.pick(&[
        (512, (512, 512)),
        (512, (512, 4096)),
        (512, (4096, 4096)),
        (4096, (512, 4096)),
        (4096, (4096, 4096)),
    ]);
    let mut files = DiskSetup::file(0).blocks(logical, physical);
    (files.can_punch, files.can_zero) = (rng.chance(0.7), rng.chance(0.7));
    let on_device = rng.chance(0.3);
    let setup = HostSetup { pool_bytes: 32 << 20, files: files.clone(), ..HostSetup::default() };
    let host = world.add_host("node", setup);
    if on_device {
        let kind = rt::disk::DiskKind::BlockDevice;
        host.add_disk(IMAGE, DiskSetup { bytes: DATA + LARGEST, kind, ..files });
    }
    let how = Create {
        volume: VOLUME,
        block_size,
        bytes: Some(FIRST),
        provisioning: *rng.pick(&[Provisioning::Thin, Provisioning::Full]),
        buffered: false,
        force: false,
        keep_contents: false,
        claim: None,
    };
    let shared = Shared::new(&world, block_size);
    let known = Known { generation: 0, bytes: FIRST, attempted: Vec::new(), copies_whole: false };
    let known = Rc::new(RefCell::new(known));
    let step = if rng.chance(0.5) { TORN } else { u64::from(block_size) };
    let growing = Rc::new(Notify::new());
    let bench = Bench { world: world.clone(), host, how, step, flushes, shared, known, growing };
    bench.create().await?;
    bench.leave_old_contents();
    for _ in 0..rng.between(1, 3) {
        bench.round().await?;
    }
    bench.last_round().await?;
    bench.delete().await
}

/// Opens the image, waiting while a killed process still has it in use.
pub(super) async fn open(core: &Core, generation: u64) -> Result<Rc<File>, FileError> {
    let what = Open { volume: VOLUME, generation, buffered: false, read_only: false, claim: None };
    let opened = async {
        loop {
            match File::open(core, Path::new(IMAGE), &what).await {
                Err(e) if e.reason == Reason::Open(OpenReason::Busy) => {
                    tokio::time::sleep(Duration::from_millis(500)).await;
                }
                opened => return opened.map(Rc::new),
            }
        }
    };
    let busy = Reason::Open(OpenReason::Busy);
    let timely = tokio::time::timeout(BUSY, opened).await;
    timely.unwrap_or_else(|_| Err(FileError { path: IMAGE.into(), reason: busy }))
}

/// How power treats blocks that are just being written, for layers that promise to survive it.
fn draw_damage(rng: &Rng) -> (f64, Damage) {
    let damage = [Damage::Mixed { bytes: 512 }, Damage::Garbage, Damage::Unreadable];
    (*rng.pick(&[0.0, 0.5, 1.0]), *rng.pick(&damage))
}

impl Bench {
    fn set_faults(&self, faults: &DiskFaults) {
        self.host.set_up(|setup| setup.files.faults = faults.clone());
        if let Some(disk) = self.disk() {
            disk.set_faults(faults.clone());
        }
    }

    fn disk(&self) -> Option<DiskControl> {
        self.host.disk(IMAGE)
    }

    async fn settle(&self) {
        if let Some(disk) = self.disk() {
            settle(&disk).await;
        }
    }

    fn crash(&self, faults: &DiskFaults) -> Loss {
        // A failed sync loses what a power cut loses, when the process ends; and a part that was
        // promised to a power cut is not torn by anything else.
        let power = faults.sync_error > 0.0 || faults.torn > 0.0 || self.world.rng().chance(0.75);
        let loss = end(&self.host, &self.world, power);
        self.shared.crash(loss);
        loss
    }

    async fn pause(&self, most_ms: u64) {
        let most = Duration::from_millis(most_ms);
        tokio::time::sleep(self.world.rng().time(Duration::ZERO, most)).await;
    }

    /// Creates the image, in as many attempts as it takes.
    async fn create(&self) -> Result<(), String> {
        let (mut torn, mut attempts) = (false, self.world.rng().between(0, 3));
        loop {
            let rng = self.world.rng();
            let last = attempts == 0;
            let mut faults = if last { DiskFaults::default() } else { draw_faults(&self.world) };
            if !last {
                (faults.torn, faults.damage) = draw_damage(rng);
            }
            self.set_faults(&faults);
            let (core_how, known) = (self.how, Rc::clone(&self.known));
            let work = self.host.run(move |core| make(core, core_how, torn, known));
            let patience = async {
                if last { tokio::time::sleep(PATIENCE).await } else { self.pause(200).await }
            };
            let ended = tokio::select! {
                biased;
                ended = work.join() => ended,
                () = patience => None,
            };
            match ended {
                Some(Ok(())) => return Ok(()),
                Some(Err(e)) if faults == DiskFaults::default() => {
                    return Err(format!("creation: {e}"));
                }
                None if last => return Err("the creation does not end".into()),
                Some(Err(_)) | None => {}
            }
            self.crash(&faults);
            torn |= faults.torn > 0.0;
            self.settle().await;
            attempts -= 1;
        }
    }

    /// Behind the volume there is now and then what somebody else left there: what it grows into.
    fn leave_old_contents(&self) {
        let Some(disk) = self.disk().filter(|_| self.world.rng().chance(0.5)) else { return };
        disk.resize(DATA + LARGEST);
        let len = usize::try_from(LARGEST - FIRST).expect("small");
        disk.poke(DATA + FIRST, &vec![0xa5; len]);
    }

    /// Waits for the moment of a crash: any, or one while the image grows.
    async fn crash_time(&self) {
        if self.world.rng().chance(0.5) {
            self.growing.notified().await;
            self.pause(40).await;
        } else {
            std::future::pending::<()>().await;
        }
    }

    async fn round(&self) -> Result<(), String> {
        self.settle().await;
        let rng = self.world.rng();
        let torn = self.step == TORN && rng.chance(0.4);
        let kind = if torn { Round::Torn } else { Round::Load };
        let mut faults = draw_faults(&self.world);
        if kind == Round::Torn {
            // What clients wrote before a kill is not to be torn.
            self.host.power_cut();
            self.shared.crash(Loss::Unflushed);
            (faults.torn, faults.damage) = draw_damage(rng);
            faults.unsynced = *rng.pick(&[Unsynced::Drawn, Unsynced::Kept, Unsynced::Lost]);
        }
        self.rot();
        self.limit_space(rng.chance(0.2));
        self.set_faults(&faults);
        let (shared, flushes) = (Rc::clone(&self.shared), self.flushes);
        let world = self.world.clone();
        let innocent = faults == DiskFaults::default();
        let spacious = self.host.space_limit().is_none();
        let (step, known) = (self.step, Rc::clone(&self.known));
        let growing = Rc::clone(&self.growing);
        self.host.run(move |core| async move {
            let generation = known.borrow().generation;
            let file = match open(&core, generation).await {
                Ok(file) => file,
                Err(e) => {
                    if innocent || !matches!(e.reason, Reason::Disk(_)) {
                        world.fail(format!("opening with {known:?}: {e}"));
                    }
                    return;
                }
            };
            if let Err(e) = known.borrow().judge(&file) {
                world.fail(e);
            }
            known.borrow_mut().acknowledged(&file);
            if kind == Round::Load {
                let volume = Volume::new(Backing::dev(&file, flushes), Epoch::default());
                clients::load(&core, &volume, &shared);
            }
            if world.rng().chance(0.6) {
                grow(&world, &file, &known, &growing, step, innocent && spacious).await;
            }
            std::future::pending::<()>().await;
        });
        tokio::select! {
            biased;
            () = self.crash_time() => {}
            () = self.pause(400) => {}
        }
        let loss = self.crash(&faults);
        if faults.torn > 0.0 && loss == Loss::Unflushed {
            self.known.borrow_mut().copies_whole = false;
        }
        self.shared.verdict()
    }

    /// Bits of the medium change: of a copy of the label, which is made good from the other, or of a
    /// block of data, in whose place the image may return anything.
    fn rot(&self) {
        let (rng, mut known) = (self.world.rng(), self.known.borrow_mut());
        let Some(disk) = self.disk() else { return };
        let bit = u8::try_from(rng.below(8)).expect("below 8");
        if known.copies_whole && rng.chance(0.3) {
            let at = rng.pick(&SLOTS) + rng.below(4096);
            self.world.note(format!("bit {bit} of byte {at} flips"));
            disk.flip_bit(at, bit);
            known.copies_whole = false;
        }
        if rng.chance(0.2) {
            let block = u64::from(self.how.block_size);
            // Not the tally.
            let at = rng.between(block, known.bytes - 1);
            self.world.note(format!("bit {bit} of byte {at} of the data flips"));
            disk.flip_bit(DATA + at, bit);
            self.shared.damaged(Blocks::new(Lba(at / block), 1));
        }
    }

    /// The file system is full, or nearly; or has space again.
    fn limit_space(&self, limited: bool) {
        let pages = self.world.rng().below(8);
        let space = limited.then(|| self.host.space_used() + pages * 4096);
        self.host.set_up(|setup| setup.space = space);
    }

    /// No faults: everything works, also growth, and all memory comes back.
    async fn last_round(&self) -> Result<(), String> {
        self.settle().await;
        self.limit_space(false);
        self.set_faults(&DiskFaults::default());
        let (shared, flushes) = (Rc::clone(&self.shared), self.flushes);
        let (step, known) = (self.step, Rc::clone(&self.known));
        let work = self.host.run(move |core| async move {
            let generation = known.borrow().generation;
            let file = open(&core, generation).await.map_err(|e| format!("{e}; {known:?}"))?;
            known.borrow().judge(&file)?;
            let bytes = (file.label().data_bytes + step).min(LARGEST);
            file.grow(bytes).await.map_err(|e| format!("growth: {e}"))?;
            let dev = Backing::dev(&file, flushes);
            clients::finish(&core, Volume::new(dev, Epoch::default()), &shared).await?;
            known.borrow_mut().acknowledged(&file);
            Ok(())
        });
        let ended = tokio::time::timeout(PATIENCE, work.join()).await;
        self.shared.verdict()?;
        match ended {
            Ok(Some(result)) => result,
            Ok(None) => Err("the host crashed by itself".into()),
            Err(_) => Err(format!("a command did not end within {PATIENCE:?}")),
        }
    }

    /// The image is deleted, and that is cut off: it is there whole, or there is none.
    async fn delete(&self) -> Result<(), String> {
        // Else what a growth left unreadable behind the end hides whether there is anything.
        if let Some(disk) = self.disk() {
            disk.heal();
        }
        let work = self.host.run(move |core| async move {
            delete(&core, Path::new(IMAGE), VOLUME, (false, false), None).await
        });
        let deleted = tokio::select! {
            biased;
            deleted = work.join() => deleted,
            () = self.pause(60) => None,
        };
        if let Some(Err(e)) = &deleted {
            return Err(format!("deletion: {e}"));
        }
        self.crash(&DiskFaults::default());
        self.settle().await;
        let (shared, known) = (Rc::clone(&self.shared), Rc::clone(&self.known));
        let flushes = self.flushes;
        let found = self.host.run(move |core| async move {
            let generation = known.borrow().generation;
            match open(&core, generation).await {
                Ok(_) if deleted.is_some() => Err("it was deleted, and opens".into()),
                Ok(file) => {
                    known.borrow().judge(&file)?;
                    let volume = Volume::new(Backing::dev(&file, flushes), Epoch::default());
                    Client::new(&core, &volume, &shared).audit().await;
                    shared.verdict()
                }
                Err(e) => match e.reason {
                    Reason::Open(OpenReason::NotFound)
                    | Reason::NoLabel
                    | Reason::NotAVolume(_) => Ok(()),
                    _ => Err(format!("after a deletion: {e}")),
                },
            }
        });
        let found = tokio::time::timeout(PATIENCE, found.join()).await;
        found.ok().flatten().unwrap_or_else(|| Err("it does not open in time".into()))
    }
}

/// Creates the image, unless an earlier attempt has finished without anybody knowing.
/// `torn`: earlier attempts may have left blocks in which nobody can tell what was there.
async fn make(
    core: Core,
    how: Create,
    torn: bool,
    known: Rc<RefCell<Known>>,
) -> Result<(), String> {
    let file = match open(&core, 0).await {
        Ok(file) => file,
        Err(e) => {
            let nothing = matches!(
                e.reason,
                Reason::Open(OpenReason::NotFound) | Reason::Unfinished | Reason::NoLabel
            );
            if !nothing && !torn {
                return Err(e.to_string());
            }
            let how = Create { force: !nothing, ..how };
            let made = File::create(&core, Path::new(IMAGE), &how).await;
            Rc::new(made.map_err(|made| format!("{made}, after {e}"))?)
        }
    };
    if file.label().data_bytes != FIRST {
        return Err(format!("created with {:?}", file.label()));
    }
    known.borrow_mut().acknowledged(&file);
    Ok(())
}

/// Lets the image grow once or twice; `must` succeed.
async fn grow(
    world: &World,
    file: &Rc<File>,
    known: &Rc<RefCell<Known>>,
    growing: &Notify,
    step: u64,
    must: bool,
) {
    let rng = world.rng();
    for _ in 0..rng.between(1, 2) {
        tokio::time::sleep(rng.time(Duration::ZERO, Duration::from_millis(100))).await;
        let bytes = known.borrow().bytes + rng.between(1, 32) * step;
        if bytes > LARGEST {
            return;
        }
        known.borrow_mut().attempted.push(bytes);
        known.borrow_mut().copies_whole = false;
        growing.notify_waiters();
        match file.grow(bytes).await {
            Ok(()) => known.borrow_mut().acknowledged(file),
            Err(e) if must => world.fail(format!("growth: {e}")),
            Err(e) => {
                let why = match e.reason {
                    Reason::Disk(e) => e.kind,
                    // What the file layer calls its own data path's errors.
                    Reason::Failed(_) => DiskErrorKind::Other,
                    _ => return world.fail(format!("growth: {e}")),
                };
                world.note(format!("growth fails: {why:?}"));
            }
        }
    }
}
