//! A volume on a flat image: created, opened, used, grown and deleted, with crashes at any point.
//!
//! Clients whose commands overlap use the volume ([`super::clients`]) while the image grows. Every
//! round ends in a crash. Afterwards the image must open, with a size and contents that the
//! acknowledged operations permit; it may refuse only for faults that are not its own.

use std::cell::RefCell;
use std::path::Path;
use std::rc::Rc;
use std::time::Duration;

use block::testing::register::CrashKind;
use block::{Blocks, Bufs, Ctx, Dev, Epoch, Error, Info, Layer, Lba, Op};
use disk::{ImageError, ImageErrorReason, Provisioning};
use image::{CreateImageOptions, FlatImage, OpenImageOptions, delete};
use rt::Core;
use rt::disk::{DiskErrorKind, OpenReason};
use rt::sim::{
    DiskControl, DiskFaults, DiskSetup, Host, HostSetup, Rng, TornDamage, UnsyncedFate, World,
};
use tokio::sync::Notify;
use uuid::Uuid;
use volume::Volume;

use super::clients::{self, Client, ClientState};
use super::storage::{draw_faults, stop_host, wait_disk_idle};

/// Path of the image.
pub(super) const IMAGE: &str = "/images/volume";

/// The volume that it holds.
pub(super) const VOLUME: Uuid = Uuid::from_u128(0x1111_2222_3333_4444_8555_6666_7777_8888);

/// Offsets of the two label copies and of the data.
const LABEL_OFFSETS: [u64; 2] = [0, 512 << 10];
const DATA_OFFSET: u64 = 1 << 20;

/// The initial and the largest size of the volume, in bytes.
const INITIAL_BYTES: u64 = 32 << 10;
const MAX_BYTES: u64 = 256 << 10;

/// Unit that a power cut may damage, in bytes. Only where sizes are multiples of it is the end of
/// the data in use safe while the image grows past it.
const TEAR_BYTES: u64 = 4096;

/// Longest wait for a disk that a killed process still holds.
const BUSY_TIMEOUT: Duration = Duration::from_secs(60);

/// Virtual time limits.
const SCENARIO_TIMEOUT: Duration = Duration::from_secs(300);

/// Whether flushes are performed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FlushBehaviour {
    Performed,
    /// Flushes are acknowledged and not performed.
    Skipped,
}

/// An image whose flushes may be skipped.
pub(super) struct FlushSkippingLayer {
    file: Rc<FlatImage>,
    flushes: FlushBehaviour,
}

impl FlushSkippingLayer {
    pub(super) fn dev(file: &Rc<FlatImage>, flushes: FlushBehaviour) -> Dev {
        Dev::new(Self { file: Rc::clone(file), flushes })
    }
}

impl Layer for FlushSkippingLayer {
    fn name(&self) -> &'static str {
        "backing"
    }

    fn info(&self) -> Info {
        self.file.info()
    }

    async fn submit(&self, op: Op, ctx: Ctx) -> Result<Bufs, Error> {
        match (op, self.flushes) {
            (Op::Flush, FlushBehaviour::Skipped) => Ok(Bufs::new()),
            (op, _) => self.file.submit(op, ctx).await,
        }
    }
}

/// What is known of the image from acknowledged operations.
#[derive(Clone, Debug)]
struct ExpectedImage {
    /// The result of the last acknowledged creation, growth or open.
    generation: u64,
    bytes: u64,
    /// Sizes of growths that were never acknowledged.
    attempted: Vec<u64>,
    /// Whether both copies of the label are certainly intact.
    copies_whole: bool,
}

impl ExpectedImage {
    fn record_acknowledged(&mut self, file: &FlatImage) {
        let label = file.label();
        self.generation = label.generation;
        self.bytes = label.data_bytes;
        self.attempted.clear();
        self.copies_whole = true;
    }

    /// Checks what an opened image reports.
    fn check_image(&self, file: &FlatImage) -> Result<(), String> {
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
enum RoundKind {
    /// Clients run while the image grows.
    Load,
    /// The image grows without clients: a power cut damages only a label or a part not yet in use.
    Torn,
}

struct FileTestbed {
    world: World,
    host: Host,
    create_options: CreateImageOptions,
    /// The image grows by multiples of this many bytes.
    step: u64,
    flushes: FlushBehaviour,
    shared: Rc<ClientState>,
    known: Rc<RefCell<ExpectedImage>>,
    /// Notified when a growth begins.
    growing: Rc<Notify>,
}

/// Runs the scenario.
pub(crate) async fn run(world: World, flushes: FlushBehaviour) -> Result<(), String> {
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
    let setup =
        HostSetup { memory_bytes: 32 << 20, new_file_setup: files.clone(), ..HostSetup::default() };
    let host = world.add_host("node", setup);
    if on_device {
        let kind = rt::disk::DiskKind::BlockDevice;
        host.add_disk(IMAGE, DiskSetup { bytes: DATA_OFFSET + MAX_BYTES, kind, ..files });
    }
    let how = CreateImageOptions {
        volume_id: VOLUME,
        block_size,
        size_bytes: Some(INITIAL_BYTES),
        provisioning: *rng.pick(&[Provisioning::Thin, Provisioning::Thick]),
        allow_page_cache: false,
        overwrite: false,
        keep_contents: false,
        claim: None,
    };
    let shared = ClientState::new(&world, block_size);
    let known = ExpectedImage {
        generation: 0,
        bytes: INITIAL_BYTES,
        attempted: Vec::new(),
        copies_whole: false,
    };
    let known = Rc::new(RefCell::new(known));
    let step = if rng.chance(0.5) { TEAR_BYTES } else { u64::from(block_size) };
    let growing = Rc::new(Notify::new());
    let bench = FileTestbed {
        world: world.clone(),
        host,
        create_options: how,
        step,
        flushes,
        shared,
        known,
        growing,
    };
    bench.create().await?;
    bench.write_stale_contents();
    for _ in 0..rng.between(1, 3) {
        bench.round().await?;
    }
    bench.last_round().await?;
    bench.delete().await
}

/// Opens the image; waits while a killed process still holds it.
pub(super) async fn open(core: &Core, generation: u64) -> Result<Rc<FlatImage>, ImageError> {
    let what = OpenImageOptions {
        volume_id: VOLUME,
        min_generation: generation,
        allow_page_cache: false,
        read_only: false,
        claim: None,
    };
    let opened = async {
        loop {
            match FlatImage::open(core, Path::new(IMAGE), &what).await {
                Err(e) if e.reason == ImageErrorReason::Open(OpenReason::Busy) => {
                    tokio::time::sleep(Duration::from_millis(500)).await;
                }
                opened => return opened.map(Rc::new),
            }
        }
    };
    let busy = ImageErrorReason::Open(OpenReason::Busy);
    let timely = tokio::time::timeout(BUSY_TIMEOUT, opened).await;
    timely.unwrap_or_else(|_| Err(ImageError { path: IMAGE.into(), reason: busy }))
}

/// How a power cut treats blocks being written, for layers that promise to survive it.
fn draw_damage(rng: &Rng) -> (f64, TornDamage) {
    let damage = [TornDamage::Mixed { bytes: 512 }, TornDamage::Garbage, TornDamage::Unreadable];
    (*rng.pick(&[0.0, 0.5, 1.0]), *rng.pick(&damage))
}

impl FileTestbed {
    fn set_faults(&self, faults: &DiskFaults) {
        self.host.update_setup(|setup| setup.new_file_setup.faults = faults.clone());
        if let Some(disk) = self.disk() {
            disk.set_faults(faults.clone());
        }
    }

    fn disk(&self) -> Option<DiskControl> {
        self.host.disk(IMAGE)
    }

    async fn wait_disk_idle(&self) {
        if let Some(disk) = self.disk() {
            wait_disk_idle(&disk).await;
        }
    }

    fn crash(&self, faults: &DiskFaults) -> CrashKind {
        // When the process ends after a failed sync, the same data is lost as in a power cut; a
        // part promised to survive a power cut must not be torn by other faults.
        let power = faults.sync_error > 0.0 || faults.torn > 0.0 || self.world.rng().chance(0.75);
        let loss = stop_host(&self.host, &self.world, power);
        self.shared.crash(loss);
        loss
    }

    async fn pause(&self, most_ms: u64) {
        let most = Duration::from_millis(most_ms);
        tokio::time::sleep(self.world.rng().duration_between(Duration::ZERO, most)).await;
    }

    /// Creates the image, with retries.
    async fn create(&self) -> Result<(), String> {
        let (mut torn, mut attempts) = (false, self.world.rng().between(0, 3));
        loop {
            let rng = self.world.rng();
            let last = attempts == 0;
            let mut faults = if last { DiskFaults::default() } else { draw_faults(&self.world) };
            if !last {
                (faults.torn, faults.torn_damage) = draw_damage(rng);
            }
            self.set_faults(&faults);
            let (core_how, known) = (self.create_options, Rc::clone(&self.known));
            let work = self.host.run(move |core| create_or_open(core, core_how, torn, known));
            let patience = async {
                if last {
                    tokio::time::sleep(SCENARIO_TIMEOUT).await;
                } else {
                    self.pause(200).await;
                }
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
            self.wait_disk_idle().await;
            attempts -= 1;
        }
    }

    /// The space after the volume sometimes holds old data, and the volume grows into it.
    fn write_stale_contents(&self) {
        let Some(disk) = self.disk().filter(|_| self.world.rng().chance(0.5)) else { return };
        disk.resize(DATA_OFFSET + MAX_BYTES);
        let len = usize::try_from(MAX_BYTES - INITIAL_BYTES).expect("small");
        disk.write_durable(DATA_OFFSET + INITIAL_BYTES, &vec![0xa5; len]);
    }

    /// Waits for the moment of the crash: any moment, or one while the image grows.
    async fn wait_crash_time(&self) {
        if self.world.rng().chance(0.5) {
            self.growing.notified().await;
            self.pause(40).await;
        } else {
            std::future::pending::<()>().await;
        }
    }

    async fn round(&self) -> Result<(), String> {
        self.wait_disk_idle().await;
        let rng = self.world.rng();
        let torn = self.step == TEAR_BYTES && rng.chance(0.4);
        let kind = if torn { RoundKind::Torn } else { RoundKind::Load };
        let mut faults = draw_faults(&self.world);
        if kind == RoundKind::Torn {
            // Blocks that clients wrote before a kill must not be torn.
            self.host.power_cut();
            self.shared.crash(CrashKind::PowerLoss);
            (faults.torn, faults.torn_damage) = draw_damage(rng);
            faults.unsynced =
                *rng.pick(&[UnsyncedFate::Random, UnsyncedFate::Kept, UnsyncedFate::Lost]);
        }
        self.inject_bit_rot();
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
                    if innocent || !matches!(e.reason, ImageErrorReason::Disk(_)) {
                        world.fail(format!("opening with {known:?}: {e}"));
                    }
                    return;
                }
            };
            if let Err(e) = known.borrow().check_image(&file) {
                world.fail(e);
            }
            known.borrow_mut().record_acknowledged(&file);
            if kind == RoundKind::Load {
                let volume = Volume::new(FlushSkippingLayer::dev(&file, flushes), Epoch::default());
                clients::spawn_clients(&core, &volume, &shared);
            }
            if world.rng().chance(0.6) {
                grow(&world, &file, &known, &growing, step, innocent && spacious).await;
            }
            std::future::pending::<()>().await;
        });
        tokio::select! {
            biased;
            () = self.wait_crash_time() => {}
            () = self.pause(400) => {}
        }
        let loss = self.crash(&faults);
        if faults.torn > 0.0 && loss == CrashKind::PowerLoss {
            self.known.borrow_mut().copies_whole = false;
        }
        self.shared.first_violation()
    }

    /// Corrupts bits of the medium: of a copy of the label, which is repaired from the other, or of
    /// a data block, for which the image may then return anything.
    fn inject_bit_rot(&self) {
        let (rng, mut known) = (self.world.rng(), self.known.borrow_mut());
        let Some(disk) = self.disk() else { return };
        let bit = u8::try_from(rng.below(8)).expect("below 8");
        if known.copies_whole && rng.chance(0.3) {
            let at = rng.pick(&LABEL_OFFSETS) + rng.below(4096);
            self.world.note(format!("bit {bit} of byte {at} is flipped"));
            disk.flip_bit(at, bit);
            known.copies_whole = false;
        }
        if rng.chance(0.2) {
            let block = u64::from(self.create_options.block_size);
            // Spare the counter.
            let at = rng.between(block, known.bytes - 1);
            self.world.note(format!("bit {bit} of byte {at} of the data flips"));
            disk.flip_bit(DATA_OFFSET + at, bit);
            self.shared.mark_damaged(Blocks::new(Lba(at / block), 1));
        }
    }

    /// The file system becomes full or nearly full, or gets space again.
    fn limit_space(&self, limited: bool) {
        let pages = self.world.rng().below(8);
        let space = limited.then(|| self.host.space_used() + pages * 4096);
        self.host.update_setup(|setup| setup.space_bytes = space);
    }

    /// Without faults: everything works, growth included, and all memory is released.
    async fn last_round(&self) -> Result<(), String> {
        self.wait_disk_idle().await;
        self.limit_space(false);
        self.set_faults(&DiskFaults::default());
        let (shared, flushes) = (Rc::clone(&self.shared), self.flushes);
        let (step, known) = (self.step, Rc::clone(&self.known));
        let work = self.host.run(move |core| async move {
            let generation = known.borrow().generation;
            let file = open(&core, generation).await.map_err(|e| format!("{e}; {known:?}"))?;
            known.borrow().check_image(&file)?;
            let bytes = (file.label().data_bytes + step).min(MAX_BYTES);
            file.grow(bytes).await.map_err(|e| format!("growth: {e}"))?;
            let dev = FlushSkippingLayer::dev(&file, flushes);
            clients::check_and_close(&core, Volume::new(dev, Epoch::default()), &shared).await?;
            known.borrow_mut().record_acknowledged(&file);
            Ok(())
        });
        let ended = tokio::time::timeout(SCENARIO_TIMEOUT, work.join()).await;
        self.shared.first_violation()?;
        match ended {
            Ok(Some(result)) => result,
            Ok(None) => Err("the host crashed by itself".into()),
            Err(_) => Err(format!("a command did not end within {SCENARIO_TIMEOUT:?}")),
        }
    }

    /// Deletes the image, with a crash: afterwards it is complete or does not exist.
    async fn delete(&self) -> Result<(), String> {
        // Otherwise unreadable blocks that a growth left after the end would hide whether the image
        // exists.
        if let Some(disk) = self.disk() {
            disk.clear_faults();
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
        self.wait_disk_idle().await;
        let (shared, known) = (Rc::clone(&self.shared), Rc::clone(&self.known));
        let flushes = self.flushes;
        let found = self.host.run(move |core| async move {
            let generation = known.borrow().generation;
            match open(&core, generation).await {
                Ok(_) if deleted.is_some() => Err("a deleted image can be opened".into()),
                Ok(file) => {
                    known.borrow().check_image(&file)?;
                    let volume =
                        Volume::new(FlushSkippingLayer::dev(&file, flushes), Epoch::default());
                    Client::new(&core, &volume, &shared).audit().await;
                    shared.first_violation()
                }
                Err(e) => match e.reason {
                    ImageErrorReason::Open(OpenReason::NotFound)
                    | ImageErrorReason::NoLabel
                    | ImageErrorReason::NotAVolume(_) => Ok(()),
                    _ => Err(format!("after a deletion: {e}")),
                },
            }
        });
        let found = tokio::time::timeout(SCENARIO_TIMEOUT, found.join()).await;
        found.ok().flatten().unwrap_or_else(|| Err("it does not open in time".into()))
    }
}

/// Creates the image, unless an earlier attempt succeeded unacknowledged. `torn`: earlier attempts
/// may have left blocks with unknown contents.
async fn create_or_open(
    core: Core,
    how: CreateImageOptions,
    torn: bool,
    known: Rc<RefCell<ExpectedImage>>,
) -> Result<(), String> {
    let file = match open(&core, 0).await {
        Ok(file) => file,
        Err(e) => {
            let nothing = matches!(
                e.reason,
                ImageErrorReason::Open(OpenReason::NotFound)
                    | ImageErrorReason::CreationUnfinished
                    | ImageErrorReason::NoLabel
            );
            if !nothing && !torn {
                return Err(e.to_string());
            }
            let how = CreateImageOptions { overwrite: !nothing, ..how };
            let made = FlatImage::create(&core, Path::new(IMAGE), &how).await;
            Rc::new(made.map_err(|made| format!("{made}, after {e}"))?)
        }
    };
    if file.label().data_bytes != INITIAL_BYTES {
        return Err(format!("created with {:?}", file.label()));
    }
    known.borrow_mut().record_acknowledged(&file);
    Ok(())
}

/// Grows the image once or twice; must succeed if `must`.
async fn grow(
    world: &World,
    file: &Rc<FlatImage>,
    known: &Rc<RefCell<ExpectedImage>>,
    growing: &Notify,
    step: u64,
    must: bool,
) {
    let rng = world.rng();
    for _ in 0..rng.between(1, 2) {
        tokio::time::sleep(rng.duration_between(Duration::ZERO, Duration::from_millis(100))).await;
        let bytes = known.borrow().bytes + rng.between(1, 32) * step;
        if bytes > MAX_BYTES {
            return;
        }
        known.borrow_mut().attempted.push(bytes);
        known.borrow_mut().copies_whole = false;
        growing.notify_waiters();
        match file.grow(bytes).await {
            Ok(()) => known.borrow_mut().record_acknowledged(file),
            Err(e) if must => world.fail(format!("growth: {e}")),
            Err(e) => {
                let why = match e.reason {
                    ImageErrorReason::Disk(e) => e.kind,
                    // The file layer's name for errors of its own data path.
                    ImageErrorReason::ZeroingFailed(_) => DiskErrorKind::Other,
                    _ => return world.fail(format!("growth: {e}")),
                };
                world.note(format!("growth fails: {why:?}"));
            }
        }
    }
}
