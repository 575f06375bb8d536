//! The write-intent log of an image: writes, flushes, cleared marks and adopted configurations,
//! interrupted at any point, on disks that tear and corrupt data.
//!
//! The other images are modelled: when marks are cleared for an image, it equals this image at that
//! moment. After every crash, each block must equal the block of each other image, or its region
//! must be marked for that image.

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::rc::Rc;
use std::time::Duration;

use block::testing::TestClient;
use block::{Dev, Error};
use disk::Provisioning;
use image::{CreateImageOptions, FlatImage};
use intent_log::{
    AdoptError, ConfigAdoption, ExportedBitmap, IntentLog, LogDamage, LogOpenReport, OtherImage,
    Region, SUPERBLOCK_OFFSETS,
};
use rt::Core;
use rt::sim::{DiskFaults, DiskSetup, Host, HostSetup, Rng, TornDamage as Torn, World};
use uuid::Uuid;

use super::file::{IMAGE, VOLUME, open};
use super::storage::{check_no_memory_held, wait_disk_idle};

/// What the user of the log does wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mistake {
    None,
    /// Clears marks without a flush.
    ClearsUnflushed,
    /// Clears marks of regions written while the flush ran.
    SnapshotsLate,
    /// Writes before the mark is durable.
    WritesUnmarked,
}

/// Size of the volume and of its regions, in bytes.
const BYTES: u64 = 2 << 30;
const REGION: u64 = 64 << 10;

/// The regions in use: spread over several pages and cells, at their edges.
const REGIONS: [u32; 9] = [0, 1, 63, 1279, 1280, 10_239, 10_240, 20_481, 32_767];

/// Offset of the pages, and how many bytes of them are in use.
const PAGES: u64 = 524 << 10;
const PAGES_LEN: u64 = 4 * 4096;

/// Blocks used in each region: the first and the last.
const BLOCKS_PER_REGION: usize = 2;
const BLOCKS: usize = REGIONS.len() * BLOCKS_PER_REGION;

/// Other images that join and leave.
const OTHER_REPLICAS: usize = 5;

/// Virtual time limit.
const SCENARIO_TIMEOUT: Duration = Duration::from_secs(600);

fn image_id(n: usize) -> Uuid {
    Uuid::from_u128(0x100 + n as u128)
}

fn region_of(block: usize) -> u32 {
    REGIONS[block / BLOCKS_PER_REGION]
}

/// What one of the other images holds.
#[derive(Clone, Debug)]
struct Peer {
    /// The value of each block; `None`: a different value.
    contents: [Option<u64>; BLOCKS],
    /// Regions that it has asked to be marked.
    requested_regions: BTreeSet<u32>,
}

/// What is known from outside the log.
struct Model {
    /// The value of each block; `None`: unknown.
    contents: [Option<u64>; BLOCKS],
    /// Whether the block is being written.
    being_written: [bool; BLOCKS],
    peers: Vec<Peer>,
    /// Number of the last write.
    last: u64,
    /// Whether the log has certainly been created.
    log_created: bool,
    /// The highest epoch that was certainly adopted, and the highest that was tried.
    adopted_epoch: u64,
    attempted_epoch: u64,
    /// Whether the image was closed; `None`: unknown.
    closed: Option<bool>,
    /// The machine's boot number, and the boot in which the image was last opened, or might have
    /// been.
    boot: u128,
    opened: u128,
    /// Copies of the superblock that were damaged since the last open.
    damaged_superblocks: [bool; 2],
    /// Whether a power loss has torn a write in progress.
    torn: bool,
    /// Whether both copies of the superblock may have been lost since the last complete open. An
    /// interrupted open may have replaced them without a report.
    may_be_lost: bool,
}

/// What is known when the image is opened.
#[derive(Clone, Copy, Debug)]
struct StateBeforeOpen {
    closed: Option<bool>,
    boot: u128,
}

impl Model {
    /// The image is about to be opened. From now on it may be recorded as in use, and as opened in
    /// this boot.
    fn begin_open(&mut self) -> StateBeforeOpen {
        let before = StateBeforeOpen { closed: self.closed, boot: self.opened };
        if self.closed != Some(false) {
            self.closed = None;
        }
        self.opened = self.boot;
        let [a, b] = self.damaged_superblocks;
        self.may_be_lost |= a && b || (a || b) && self.torn;
        before
    }
}

struct IntentLogTestbed {
    world: World,
    host: Host,
    mistake: Mistake,
    block: usize,
    model: RefCell<Model>,
    stop: Cell<bool>,
}

/// One session on the image, from open to crash or close.
#[derive(Clone)]
struct OpenImage {
    bench: Rc<IntentLogTestbed>,
    client: TestClient,
    log: IntentLog,
}

/// Runs the scenario.
pub(crate) async fn run(world: World, mistake: Mistake) -> Result<(), String> {
    let (block, logical, physical) = *world.rng().pick(&[
        (512, 512, 512),
        (512, 512, 4096),
        (4096, 512, 4096),
        (4096, 4096, 4096),
    ]);
    let files = DiskSetup::file(0).blocks(logical, physical);
    let host = world.add_host("node", HostSetup { new_file_setup: files, ..HostSetup::default() });
    let how = CreateImageOptions {
        volume_id: VOLUME,
        block_size: block,
        size_bytes: Some(BYTES),
        provisioning: Provisioning::Thin,
        allow_page_cache: false,
        overwrite: false,
        keep_contents: false,
        claim: None,
    };
    let made = host.run(move |core| async move {
        FlatImage::create(&core, IMAGE.as_ref(), &how).await.map(drop).map_err(|e| e.to_string())
    });
    made.join().await.unwrap_or(Err("the creation does not end".into()))?;
    let peer = Peer { contents: [Some(0); BLOCKS], requested_regions: BTreeSet::new() };
    let model = Model {
        contents: [Some(0); BLOCKS],
        being_written: [false; BLOCKS],
        peers: vec![peer; OTHER_REPLICAS],
        last: 0,
        log_created: false,
        adopted_epoch: 0,
        attempted_epoch: 0,
        closed: Some(false),
        boot: 1,
        opened: 0,
        damaged_superblocks: [false; 2],
        torn: false,
        may_be_lost: false,
    };
    let (model, stop, block) = (RefCell::new(model), Cell::new(false), block as usize);
    let bench = Rc::new(IntentLogTestbed { world, host, mistake, block, model, stop });
    for _ in 0..bench.rng().between(2, 6) {
        bench.round().await?;
    }
    bench.last_round().await
}

impl IntentLogTestbed {
    fn rng(&self) -> &Rng {
        self.world.rng()
    }

    async fn pause(&self, most_ms: u64) {
        let most = Duration::from_millis(most_ms);
        tokio::time::sleep(self.rng().duration_between(Duration::ZERO, most)).await;
    }

    fn set_faults(&self, faults: &DiskFaults) {
        let disk = self.host.disk(IMAGE).expect("it was created");
        disk.set_faults(faults.clone());
    }

    fn draw_faults(&self) -> DiskFaults {
        let rng = self.rng();
        let mut faults = DiskFaults::default();
        if rng.chance(0.3) {
            faults.write_error = 0.02 * rng.unit();
            faults.sync_error = 0.02 * rng.unit();
            faults.stall = 0.02 * rng.unit();
            faults.stall_for = Duration::from_millis(200);
        }
        faults.torn = *rng.pick(&[0.0, 0.0, 0.5, 1.0]);
        // An atomic write unit becomes readable again only when all of it has been written.
        let unreadable = if self.block == 4096 { Torn::Unreadable } else { Torn::Garbage };
        faults.torn_damage = *rng.pick(&[Torn::Mixed { bytes: 512 }, Torn::Garbage, unreadable]);
        faults
    }

    /// Runs one session on the image, and ends it.
    async fn round(self: &Rc<Self>) -> Result<(), String> {
        let disk = self.host.disk(IMAGE).expect("it was created");
        wait_disk_idle(&disk).await;
        self.inject_bit_rot();
        let faults = self.draw_faults();
        self.set_faults(&faults);
        self.stop.set(false);
        let harmless = faults.write_error == 0.0 && faults.sync_error == 0.0;
        let bench = Rc::clone(self);
        self.host.run(move |core| async move {
            if let Err(e) = bench.run_workload(&core, harmless).await {
                bench.world.fail(e);
            }
            std::future::pending::<()>().await;
        });
        self.pause(2000).await;
        // When the process ends after a failed sync, the same data is lost as in a power cut.
        let power = !harmless || self.rng().chance(0.7);
        self.world.note(if power { "the power fails" } else { "the process is killed" });
        if power {
            self.host.power_cut();
        } else {
            self.host.kill();
        }
        let mut model = self.model.borrow_mut();
        model.boot += u128::from(power);
        model.torn |= power && faults.torn > 0.0;
        Ok(())
    }

    /// Corrupts bits of the medium: of a cell, or of copies of the superblock.
    fn inject_bit_rot(&self) {
        let (rng, mut model) = (self.rng(), self.model.borrow_mut());
        let disk = self.host.disk(IMAGE).expect("it was created");
        let flip = |at: u64| disk.flip_bit(at, u8::try_from(rng.below(8)).expect("below 8"));
        if rng.chance(0.15) {
            flip(PAGES + rng.below(PAGES_LEN));
        }
        for (copy, at) in SUPERBLOCK_OFFSETS.iter().enumerate() {
            if rng.chance(0.1) {
                self.world.note(format!("copy {copy} of the superblock rots"));
                flip(at + rng.below(264));
                model.damaged_superblocks[copy] = true;
            }
        }
    }

    /// Opens the image and uses it until it is closed or an operation fails, which must not happen
    /// if `harmless`.
    async fn run_workload(self: &Rc<Self>, core: &Core, harmless: bool) -> Result<(), String> {
        let session = match self.open(core).await {
            Ok(session) => session,
            Err(e) if harmless => return Err(e),
            Err(_) => return Ok(()),
        };
        session.check_all().await?;
        let mut work = tokio::task::JoinSet::new();
        for _ in 0..3 {
            let session = session.clone();
            work.spawn_local(async move { session.run_writes().await });
        }
        let (sweeper, changer) = (session.clone(), session.clone());
        work.spawn_local(async move { sweeper.run_sweeps().await });
        work.spawn_local(async move { changer.run_adoptions().await });
        if self.rng().chance(0.3) {
            self.pause(1000).await;
            self.stop.set(true);
        }
        while let Some(ended) = work.join_next().await {
            if let Err(e) = ended.map_err(|e| e.to_string())? {
                self.world.fail(e);
                // The other tasks have operations in flight, which must not be dropped.
                std::future::pending::<()>().await;
            }
        }
        if self.stop.get() {
            session.close().await?;
        }
        Ok(())
    }

    /// Opens the image and opens or creates its log.
    async fn open(self: &Rc<Self>, core: &Core) -> Result<OpenImage, String> {
        let before = self.model.borrow_mut().begin_open();
        let file = open(core, 0).await.map_err(|e| e.to_string())?;
        let area = file.log_area().await.map_err(|e| e.to_string())?;
        let boot = Uuid::from_u128(self.model.borrow().boot);
        let client = TestClient::new(&Dev::shared(Rc::clone(&file)), core.buffer_pool());
        let log = if file.label().has_intent_log {
            let opened = IntentLog::open(core, area, boot).await.map_err(|e| e.to_string());
            let (log, found) = opened?;
            if let Err(e) = self.check_open_result(&log, found, before) {
                self.world.fail(e.clone());
                return Err(e);
            }
            log
        } else if self.model.borrow().log_created {
            return Err("the log is missing".into());
        } else {
            IntentLog::create(core, area).await.map_err(|e| e.to_string())?
        };
        let mut model = self.model.borrow_mut();
        (model.log_created, model.torn, model.damaged_superblocks) = (true, false, [false; 2]);
        model.may_be_lost = false;
        model.closed = Some(false);
        model.being_written = [false; BLOCKS];
        Ok(OpenImage { bench: Rc::clone(self), client, log })
    }

    /// Whether the state found in the log is permitted.
    fn check_open_result(
        &self,
        log: &IntentLog,
        found: LogOpenReport,
        before: StateBeforeOpen,
    ) -> Result<(), String> {
        let mut model = self.model.borrow_mut();
        self.world.note(format!("found {found:?}"));
        let replaced_before = model.may_be_lost && log.was_lost() && found.adopted.is_none();
        if found.damage == LogDamage::SuperblockLost || replaced_before {
            if !model.may_be_lost {
                return Err("a log with a good superblock is lost".into());
            }
            model.adopted_epoch = 0;
            return Ok(());
        }
        if before.closed.is_some_and(|closed| found.was_closed != closed) {
            return Err(format!("{found:?} after {before:?}"));
        }
        if found.same_boot && model.boot != before.boot {
            return Err("another boot counts as the same".into());
        }
        let epoch = found.adopted.map_or(0, |adopted| adopted.epoch);
        if epoch < model.adopted_epoch || epoch > model.attempted_epoch {
            return Err(format!("epoch {epoch}; {} was adopted", model.adopted_epoch));
        }
        model.adopted_epoch = epoch;
        let alive = log.images().is_empty() || log.adopted().is_some();
        if alive { Ok(()) } else { Err("slots without a configuration".into()) }
    }

    /// Without faults: sets and clears marks, and closes the image.
    async fn last_round(self: &Rc<Self>) -> Result<(), String> {
        wait_disk_idle(&self.host.disk(IMAGE).expect("it was created")).await;
        self.set_faults(&DiskFaults::default());
        let bench = Rc::clone(self);
        let work = self.host.run(move |core| async move {
            let session = bench.open(&core).await?;
            session.check_all().await?;
            session.finish().await?;
            let images = session.log.images();
            drop(session);
            let session = bench.open(&core).await?;
            session.check_all().await?;
            if !session.log.is_clean(&images) || session.log.images() != images {
                return Err("it was closed clean, but is not clean".into());
            }
            drop(session);
            check_no_memory_held(core.buffer_pool())
        });
        match tokio::time::timeout(SCENARIO_TIMEOUT, work.join()).await {
            Ok(Some(result)) => result,
            Ok(None) => Err("the host crashed by itself".into()),
            Err(_) => Err(format!("it does not end within {SCENARIO_TIMEOUT:?}")),
        }
    }
}

impl OpenImage {
    fn rng(&self) -> &Rng {
        self.bench.rng()
    }

    fn is_stopped(&self) -> bool {
        self.bench.stop.get()
    }

    /// Position of a block: in bytes of the volume, and its number.
    fn block_position(&self, block: usize) -> (u64, u64) {
        let start = u64::from(region_of(block)) * REGION;
        let last = if block.is_multiple_of(BLOCKS_PER_REGION) {
            0
        } else {
            REGION - self.bench.block as u64
        };
        (start + last, (start + last) / self.bench.block as u64)
    }

    /// The number that fills a block; `None` if the block holds anything else.
    async fn read(&self, block: usize) -> Option<u64> {
        let data = self.client.read(self.block_position(block).1, 1).await.ok()?.to_vec();
        let (words, _) = data.as_chunks::<8>();
        let first = u64::from_le_bytes(words[0]);
        words.iter().all(|word| *word == words[0]).then_some(first)
    }

    /// Whether every block that differs on another image is marked for that image; makes all blocks
    /// known.
    async fn check_all(&self) -> Result<(), String> {
        for block in 0..BLOCKS {
            let now = self.read(block).await;
            self.bench.model.borrow_mut().contents[block] = now;
        }
        self.check_marks()?;
        for block in 0..BLOCKS {
            if self.bench.model.borrow().contents[block].is_none()
                && self.write(block).await.is_err()
            {
                break;
            }
        }
        Ok(())
    }

    /// The regions in use that are marked for an image.
    fn marked(&self, image: Uuid) -> BTreeSet<u32> {
        REGIONS.into_iter().filter(|r| self.log.is_dirty(image, Region(*r))).collect()
    }

    fn check_marks(&self) -> Result<(), String> {
        let model = self.bench.model.borrow();
        for n in 0..OTHER_REPLICAS {
            let Some(_) = self.log.dirty_count(image_id(n)) else { continue };
            let marked = self.marked(image_id(n));
            let peer = &model.peers[n];
            for block in (0..BLOCKS).filter(|block| !model.being_written[*block]) {
                let (has, now) = (peer.contents[block], model.contents[block]);
                if (has.is_none() || has != now) && !marked.contains(&region_of(block)) {
                    let region = region_of(block);
                    return Err(format!(
                        "block {block} is {now:?}, but {has:?} at image {n}: region {region} is not dirty"
                    ));
                }
            }
            if !peer.requested_regions.is_subset(&marked) {
                return Err(format!("image {n} lost dirty bits of {:?}", peer.requested_regions));
            }
        }
        Ok(())
    }

    async fn run_writes(&self) -> Result<(), String> {
        while !self.is_stopped() {
            self.bench.pause(20).await;
            let block = self.rng().index(BLOCKS);
            if self.bench.model.borrow().being_written[block] {
                continue;
            }
            if self.write(block).await == Err(Error::Gone) {
                return Ok(());
            }
        }
        Ok(())
    }

    /// Writes a block by the rules of the log.
    async fn write(&self, block: usize) -> Result<(), Error> {
        let (at, lba) = self.block_position(block);
        let range = at..at + self.bench.block as u64;
        let _touch = self.log.begin_op(range.clone());
        let number = {
            let mut model = self.bench.model.borrow_mut();
            model.being_written[block] = true;
            model.last += 1;
            model.last
        };
        let data = number.to_le_bytes().repeat(self.bench.block / 8);
        let data_write = self.client.write(lba, &data, false);
        let written = if self.log.is_hot(range.clone()) {
            data_write.await
        } else if self.bench.mistake == Mistake::WritesUnmarked {
            let (marked, written) = tokio::join!(self.log.mark(range), data_write);
            marked.and(written)
        } else {
            match self.log.mark(range).await {
                Ok(()) => data_write.await,
                Err(e) => {
                    self.bench.model.borrow_mut().being_written[block] = false;
                    return Err(e);
                }
            }
        };
        let mut model = self.bench.model.borrow_mut();
        model.contents[block] = written.is_ok().then_some(number);
        model.being_written[block] = false;
        written
    }

    async fn run_sweeps(&self) -> Result<(), String> {
        while !self.is_stopped() {
            self.bench.pause(60).await;
            let images: Vec<Uuid> =
                self.log.images().into_iter().filter(|_| self.rng().chance(0.8)).collect();
            if !self.sweep_marks(&images).await? {
                return Ok(());
            }
            if self.rng().chance(0.5) {
                self.log.tick();
            }
            if self.rng().chance(0.5) {
                let log = self.log.clone();
                let written = tokio::task::spawn_local(async move { log.write_back().await });
                if self.rng().chance(0.5) && !matches!(written.await, Ok(Ok(()))) {
                    return Ok(());
                }
            }
        }
        Ok(())
    }

    /// Flushes everything and clears the marks of some regions; false if that fails.
    async fn sweep_marks(&self, images: &[Uuid]) -> Result<bool, String> {
        let mut stamp = self.log.begin_flush();
        if self.bench.mistake != Mistake::ClearsUnflushed && self.client.flush().await.is_err() {
            return Ok(false);
        }
        if self.bench.mistake == Mistake::SnapshotsLate {
            stamp = self.log.begin_flush();
        }
        if self.rng().chance(0.3) {
            self.bench.pause(30).await;
        }
        let mut regions = if self.rng().chance(0.3) {
            self.log.idle_dirty_regions(images, 4)
        } else {
            REGIONS.into_iter().filter(|_| self.rng().chance(0.6)).map(Region).collect()
        };
        let unknown = |region: &Region| {
            let model = self.bench.model.borrow();
            (0..BLOCKS).any(|b| region_of(b) == region.0 && model.contents[b].is_none())
        };
        regions.retain(|region| !unknown(region));
        let before: Vec<_> = images.iter().map(|image| self.marked(*image)).collect();
        self.log.clear(images, regions, stamp);
        for (image, before) in images.iter().zip(before) {
            self.record_cleared(*image, &before)?;
        }
        Ok(true)
    }

    /// Another image equals this one where its marks are cleared.
    fn record_cleared(&self, image: Uuid, before: &BTreeSet<u32>) -> Result<(), String> {
        let after = self.marked(image);
        let mut model = self.bench.model.borrow_mut();
        let model = &mut *model;
        let n = (0..OTHER_REPLICAS).find(|n| image_id(*n) == image).expect("one of them");
        for region in before.difference(&after) {
            model.peers[n].requested_regions.remove(region);
            for block in (0..BLOCKS).filter(|block| region_of(*block) == *region) {
                if model.being_written[block] {
                    return Err(format!(
                        "the dirty bit of block {block} was cleared while it is written"
                    ));
                }
                model.peers[n].contents[block] = model.contents[block];
            }
        }
        Ok(())
    }

    /// Adopts configurations, and clears marks of the other images.
    async fn run_adoptions(&self) -> Result<(), String> {
        while !self.is_stopped() {
            let alive = if self.log.adopted().is_none() || self.rng().chance(0.3) {
                self.adopt().await?
            } else {
                self.merge_bitmap().await
            };
            if !alive {
                return Ok(());
            }
            self.bench.pause(400).await;
        }
        Ok(())
    }

    /// False if the log is gone.
    async fn adopt(&self) -> Result<bool, String> {
        let (rng, present) = (self.rng(), self.log.images());
        let mut others: Vec<usize> = (0..OTHER_REPLICAS).collect();
        rng.shuffle(&mut others);
        others.truncate(*rng.pick(&[0, 1, 1, 2, 2, 2, 3]));
        let mut next = ConfigAdoption {
            epoch: 0,
            config_id: Uuid::from_u128(1 + u128::from(rng.u64())),
            other_images: Vec::new(),
            in_sync_images: Vec::new(),
            inherited_generations: Vec::new(),
            in_sync_hint: [None; 3],
            boot_id: None,
        };
        {
            let model = &mut *self.bench.model.borrow_mut();
            for n in others {
                // An image that was new once, and for which no slot is certain, is new again.
                let empty = model.peers[n].contents == [None; BLOCKS];
                let new = (empty || rng.chance(0.15)) && !present.contains(&image_id(n));
                if new {
                    model.peers[n].contents = [None; BLOCKS];
                }
                next.other_images.push(OtherImage { image: image_id(n), is_new: new });
            }
            model.attempted_epoch += 1;
            next.epoch = model.attempted_epoch;
        }
        let (epoch, mut wanted) =
            (next.epoch, Vec::from_iter(next.other_images.iter().map(|o| o.image)));
        match self.log.adopt_config(next).await {
            Ok(()) => {}
            Err(AdoptError::Gone) => return Ok(false),
            Err(e) => return Err(e.to_string()),
        }
        self.bench.model.borrow_mut().adopted_epoch = epoch;
        let mut found = self.log.images();
        found.sort_unstable();
        wanted.sort_unstable();
        if found != wanted {
            return Err(format!("slots for {found:?} instead of {wanted:?}"));
        }
        self.check_marks()?;
        Ok(true)
    }

    async fn merge_bitmap(&self) -> bool {
        let images = self.log.images();
        let Some(n) = (0..OTHER_REPLICAS).find(|n| images.contains(&image_id(*n))) else {
            return true;
        };
        let (rng, shift) = (self.rng(), *self.rng().pick(&[16u32, 16, 18]));
        let asked: Vec<u32> = REGIONS.into_iter().filter(|_| rng.chance(0.2)).collect();
        let mut bits = vec![0; usize::try_from((BYTES >> shift) / 8).expect("small")];
        for region in &asked {
            let theirs = region >> (shift - 16);
            bits[theirs as usize / 8] |= 1 << (theirs % 8);
        }
        let theirs = ExportedBitmap { volume_bytes: BYTES, region_shift: shift, bits };
        let merged = self.log.merge_bitmap(image_id(n), &theirs).await;
        if merged.is_ok() {
            // Marks may have been cleared since, in memory.
            let marked = self.marked(image_id(n));
            let still = asked.into_iter().filter(|region| marked.contains(region));
            self.bench.model.borrow_mut().peers[n].requested_regions.extend(still);
        }
        merged.is_ok()
    }

    async fn close(&self) -> Result<(), String> {
        self.bench.model.borrow_mut().closed = None;
        if self.log.close().await.is_ok() {
            self.bench.model.borrow_mut().closed = Some(true);
        }
        let hot = REGIONS
            .iter()
            .any(|r| self.log.is_hot(u64::from(*r) * REGION..u64::from(*r) * REGION + 1));
        if hot { Err("hot after the end".into()) } else { Ok(()) }
    }

    /// Without faults: writes, clears all marks, and closes.
    async fn finish(&self) -> Result<(), String> {
        let failed = |what: &'static str| move |e: Error| format!("{what} without faults: {e}");
        if !self.adopt().await? || !self.merge_bitmap().await {
            return Err("the log is gone without faults".into());
        }
        for block in 0..BLOCKS {
            self.write(block).await.map_err(failed("a write"))?;
        }
        self.log.write_back().await.map_err(failed("a page"))?;
        let images = self.log.images();
        let stamp = self.log.begin_flush();
        self.client.flush().await.map_err(failed("a flush"))?;
        for image in &images {
            let before = self.marked(*image);
            self.log.clear(&[*image], self.log.dirty_regions(*image), stamp);
            self.record_cleared(*image, &before)?;
        }
        if !self.log.is_clean(&images) {
            return Err("dirty bits are never cleared".into());
        }
        self.log.close().await.map_err(|e| e.to_string())?;
        self.bench.model.borrow_mut().closed = Some(true);
        Ok(())
    }
}
