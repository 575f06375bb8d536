//! The write-intent log of an image: writes, flushes, cleared marks, adopted configurations, cut off at
//! any point, on disks that tear and rot.
//!
//! The other images are imagined: when marks are taken in the name of one, it has at that moment what
//! the image has. After every crash each block must hold what each of the others has, or its region
//! must be marked for that one.

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::rc::Rc;
use std::time::Duration;

use block::testing::Client;
use block::{Dev, Error};
use disk::Provisioning;
use image::{Create, File};
use intent_log::{
    AdoptError, Adoption, Bitmap, Damage, Found, IntentLog, Other, Region, SUPERBLOCK_OFFSETS,
};
use rt::Core;
use rt::sim::{Damage as Torn, DiskFaults, DiskSetup, Host, HostSetup, Rng, World};
use uuid::Uuid;

use super::file::{IMAGE, VOLUME, open};
use super::storage::{memory_is_back, settle};

/// What the owner of the log does wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mistake {
    None,
    /// Takes marks without a flush.
    ClearsUnflushed,
    /// Takes marks of what was written while the flush ran.
    StampsLate,
    /// Writes while the mark is on its way.
    WritesUnmarked,
}

/// Size of the volume and of its regions, in bytes.
const BYTES: u64 = 2 << 30;
const REGION: u64 = 64 << 10;

/// The regions that are used: of several pages and cells, at their edges.
const REGIONS: [u32; 9] = [0, 1, 63, 1279, 1280, 10_239, 10_240, 20_481, 32_767];

/// Where the pages are, and how many bytes of them are in use.
const PAGES: u64 = 524 << 10;
const PAGES_LEN: u64 = 4 * 4096;

/// Blocks that are used in each region: its first and its last.
const PER_REGION: usize = 2;
const BLOCKS: usize = REGIONS.len() * PER_REGION;

/// Other images that come and go.
const OTHERS: usize = 5;

/// Virtual time in which the end must come.
const PATIENCE: Duration = Duration::from_secs(600);

fn image(n: usize) -> Uuid {
    Uuid::from_u128(0x100 + n as u128)
}

fn region_of(block: usize) -> u32 {
    REGIONS[block / PER_REGION]
}

/// What one of the others has.
#[derive(Clone, Debug)]
struct Peer {
    /// In each block; `None`: something else.
    has: [Option<u64>; BLOCKS],
    /// Regions that it has asked to be marked.
    owed: BTreeSet<u32>,
}

/// What is known from outside.
struct Model {
    /// What each block holds; `None`: nobody knows.
    now: [Option<u64>; BLOCKS],
    /// Whether it is being written.
    busy: [bool; BLOCKS],
    peers: Vec<Peer>,
    /// Number of the last write.
    last: u64,
    /// Whether the log has been made, for sure.
    made: bool,
    /// The highest epoch that was adopted for sure, and the highest that was tried.
    adopted: u64,
    tried: u64,
    /// Whether the image was closed; `None`: perhaps.
    closed: Option<bool>,
    /// The machine's boot, and the one in which the image was last opened, or was tried to be.
    boot: u128,
    opened: u128,
    /// Copies of the superblock that were damaged since the last opening.
    harmed: [bool; 2],
    /// Whether the power has torn what was being written.
    torn: bool,
}

/// What is known when the image is opened.
#[derive(Clone, Copy, Debug)]
struct Before {
    closed: Option<bool>,
    boot: u128,
}

impl Model {
    /// The image is about to be opened. From now on it may count as in use, and as opened in this boot.
    fn opens(&mut self) -> Before {
        let before = Before { closed: self.closed, boot: self.opened };
        if self.closed != Some(false) {
            self.closed = None;
        }
        self.opened = self.boot;
        before
    }
}

struct Bench {
    world: World,
    host: Host,
    mistake: Mistake,
    block: usize,
    model: RefCell<Model>,
    stop: Cell<bool>,
}

/// One life of the image.
#[derive(Clone)]
struct Life {
    bench: Rc<Bench>,
    client: Client,
    log: IntentLog,
}

/// Plays it.
pub(crate) async fn play(world: World, mistake: Mistake) -> Result<(), String> {
    let (block, logical, physical) = *world.rng().pick(&[
        (512, 512, 512),
        (512, 512, 4096),
        (4096, 512, 4096),
        (4096, 4096, 4096),
    ]);
    let files = DiskSetup::file(0).blocks(logical, physical);
    let host = world.add_host("node", HostSetup { files, ..HostSetup::default() });
    let how = Create {
        volume: VOLUME,
        block_size: block,
        bytes: Some(BYTES),
        provisioning: Provisioning::Thin,
        buffered: false,
        force: false,
        keep_contents: false,
        claim: None,
    };
    let made = host.run(move |core| async move {
        File::create(&core, IMAGE.as_ref(), &how).await.map(drop).map_err(|e| e.to_string())
    });
    made.join().await.unwrap_or(Err("the creation does not end".into()))?;
    let peer = Peer { has: [Some(0); BLOCKS], owed: BTreeSet::new() };
    let model = Model {
        now: [Some(0); BLOCKS],
        busy: [false; BLOCKS],
        peers: vec![peer; OTHERS],
        last: 0,
        made: false,
        adopted: 0,
        tried: 0,
        closed: Some(false),
        boot: 1,
        opened: 0,
        harmed: [false; 2],
        torn: false,
    };
    let (model, stop, block) = (RefCell::new(model), Cell::new(false), block as usize);
    let bench = Rc::new(Bench { world, host, mistake, block, model, stop });
    for _ in 0..bench.rng().between(2, 6) {
        bench.round().await?;
    }
    bench.last_round().await
}

impl Bench {
    fn rng(&self) -> &Rng {
        self.world.rng()
    }

    async fn pause(&self, most_ms: u64) {
        let most = Duration::from_millis(most_ms);
        tokio::time::sleep(self.rng().time(Duration::ZERO, most)).await;
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
        // What the disk writes at once can be read again only when all of it was written.
        let unreadable = if self.block == 4096 { Torn::Unreadable } else { Torn::Garbage };
        faults.damage = *rng.pick(&[Torn::Mixed { bytes: 512 }, Torn::Garbage, unreadable]);
        faults
    }

    /// A life of the image, and its end.
    async fn round(self: &Rc<Self>) -> Result<(), String> {
        let disk = self.host.disk(IMAGE).expect("it was created");
        settle(&disk).await;
        self.rot();
        let faults = self.draw_faults();
        self.set_faults(&faults);
        self.stop.set(false);
        let harmless = faults.write_error == 0.0 && faults.sync_error == 0.0;
        let bench = Rc::clone(self);
        self.host.run(move |core| async move {
            if let Err(e) = bench.live(&core, harmless).await {
                bench.world.fail(e);
            }
            std::future::pending::<()>().await;
        });
        self.pause(2000).await;
        // A failed sync loses what a power cut loses, when the process ends.
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

    /// Bits of the medium change: of a cell, or of copies of the superblock.
    fn rot(&self) {
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
                model.harmed[copy] = true;
            }
        }
    }

    /// Opens the image and uses it until it is closed or something fails, as it may if not `harmless`.
    async fn live(self: &Rc<Self>, core: &Core, harmless: bool) -> Result<(), String> {
        let life = match self.open(core).await {
            Ok(life) => life,
            Err(e) if harmless => return Err(e),
            Err(_) => return Ok(()),
        };
        life.judge().await?;
        let mut work = tokio::task::JoinSet::new();
        for _ in 0..3 {
            let life = life.clone();
            work.spawn_local(async move { life.writes().await });
        }
        let (sweeper, changer) = (life.clone(), life.clone());
        work.spawn_local(async move { sweeper.sweeps().await });
        work.spawn_local(async move { changer.changes().await });
        if self.rng().chance(0.3) {
            self.pause(1000).await;
            self.stop.set(true);
        }
        while let Some(ended) = work.join_next().await {
            if let Err(e) = ended.map_err(|e| e.to_string())? {
                self.world.fail(e);
                // The others have operations in flight, which must not be dropped.
                std::future::pending::<()>().await;
            }
        }
        if self.stop.get() {
            life.close().await?;
        }
        Ok(())
    }

    /// Opens the image and its log, or makes that.
    async fn open(self: &Rc<Self>, core: &Core) -> Result<Life, String> {
        let before = self.model.borrow_mut().opens();
        let file = open(core, 0).await.map_err(|e| e.to_string())?;
        let area = file.log_area().await.map_err(|e| e.to_string())?;
        let boot = Uuid::from_u128(self.model.borrow().boot);
        let client = Client::new(&Dev::shared(Rc::clone(&file)), core.pool());
        let log = if file.label().intent_log {
            let opened = IntentLog::open(core, area, boot).await.map_err(|e| e.to_string());
            let (log, found) = opened?;
            self.judge_opening(&log, found, before)?;
            log
        } else if self.model.borrow().made {
            return Err("the log has vanished".into());
        } else {
            IntentLog::create(core, area).await.map_err(|e| e.to_string())?
        };
        let mut model = self.model.borrow_mut();
        (model.made, model.torn, model.harmed) = (true, false, [false; 2]);
        model.closed = Some(false);
        model.busy = [false; BLOCKS];
        Ok(Life { bench: Rc::clone(self), client, log })
    }

    /// Whether what was found of the log can be so.
    fn judge_opening(&self, log: &IntentLog, found: Found, before: Before) -> Result<(), String> {
        let mut model = self.model.borrow_mut();
        self.world.note(format!("found {found:?}"));
        if found.damage == Damage::Lost {
            let [a, b] = model.harmed;
            if !(a && b || (a || b) && model.torn) {
                return Err("a log with a good superblock is lost".into());
            }
            model.adopted = 0;
            return Ok(());
        }
        if before.closed.is_some_and(|closed| found.closed != closed) {
            return Err(format!("{found:?} after {before:?}"));
        }
        if found.same_boot && model.boot != before.boot {
            return Err("another boot is taken for the same".into());
        }
        let epoch = found.adopted.map_or(0, |adopted| adopted.epoch);
        if epoch < model.adopted || epoch > model.tried {
            return Err(format!("epoch {epoch}; {} was adopted", model.adopted));
        }
        model.adopted = epoch;
        let alive = log.images().is_empty() || log.adopted().is_some();
        if alive { Ok(()) } else { Err("slots without a configuration".into()) }
    }

    /// No faults: marks come and go, and the image is closed.
    async fn last_round(self: &Rc<Self>) -> Result<(), String> {
        settle(&self.host.disk(IMAGE).expect("it was created")).await;
        self.set_faults(&DiskFaults::default());
        let bench = Rc::clone(self);
        let work = self.host.run(move |core| async move {
            let life = bench.open(&core).await?;
            life.judge().await?;
            life.end().await?;
            let images = life.log.images();
            drop(life);
            let life = bench.open(&core).await?;
            life.judge().await?;
            if !life.log.is_clean(&images) || life.log.images() != images {
                return Err("it was closed clean, and is not".into());
            }
            drop(life);
            memory_is_back(core.pool())
        });
        match tokio::time::timeout(PATIENCE, work.join()).await {
            Ok(Some(result)) => result,
            Ok(None) => Err("the host crashed by itself".into()),
            Err(_) => Err(format!("it does not end within {PATIENCE:?}")),
        }
    }
}

impl Life {
    fn rng(&self) -> &Rng {
        self.bench.rng()
    }

    fn stopped(&self) -> bool {
        self.bench.stop.get()
    }

    /// Where a block is: in bytes of the volume, and by number.
    fn place(&self, block: usize) -> (u64, u64) {
        let start = u64::from(region_of(block)) * REGION;
        let last =
            if block.is_multiple_of(PER_REGION) { 0 } else { REGION - self.bench.block as u64 };
        (start + last, (start + last) / self.bench.block as u64)
    }

    /// The number that a block is filled with; `None` if there is anything else.
    async fn read(&self, block: usize) -> Option<u64> {
        let data = self.client.read(self.place(block).1, 1).await.ok()?.to_vec();
        let (words, _) = data.as_chunks::<8>();
        let first = u64::from_le_bytes(words[0]);
        words.iter().all(|word| *word == words[0]).then_some(first)
    }

    /// Whether everything in which another image differs is marked for it; makes all blocks known.
    async fn judge(&self) -> Result<(), String> {
        for block in 0..BLOCKS {
            let now = self.read(block).await;
            self.bench.model.borrow_mut().now[block] = now;
        }
        self.judge_marks()?;
        for block in 0..BLOCKS {
            if self.bench.model.borrow().now[block].is_none() && self.write(block).await.is_err() {
                break;
            }
        }
        Ok(())
    }

    /// Those of the regions in use that are marked for an image.
    fn marked(&self, image: Uuid) -> BTreeSet<u32> {
        REGIONS.into_iter().filter(|r| self.log.is_marked(image, Region(*r))).collect()
    }

    fn judge_marks(&self) -> Result<(), String> {
        let model = self.bench.model.borrow();
        for n in 0..OTHERS {
            let Some(_) = self.log.marked_count(image(n)) else { continue };
            let marked = self.marked(image(n));
            let peer = &model.peers[n];
            for block in (0..BLOCKS).filter(|block| !model.busy[*block]) {
                let (has, now) = (peer.has[block], model.now[block]);
                if (has.is_none() || has != now) && !marked.contains(&region_of(block)) {
                    let region = region_of(block);
                    return Err(format!(
                        "block {block} is {now:?}, and {has:?} at image {n}: region {region} is not marked"
                    ));
                }
            }
            if !peer.owed.is_subset(&marked) {
                return Err(format!("image {n} lost marks of {:?}", peer.owed));
            }
        }
        Ok(())
    }

    async fn writes(&self) -> Result<(), String> {
        while !self.stopped() {
            self.bench.pause(20).await;
            let block = self.rng().index(BLOCKS);
            if self.bench.model.borrow().busy[block] {
                continue;
            }
            if self.write(block).await == Err(Error::Gone) {
                return Ok(());
            }
        }
        Ok(())
    }

    /// Writes a block as the log demands.
    async fn write(&self, block: usize) -> Result<(), Error> {
        let (at, lba) = self.place(block);
        let range = at..at + self.bench.block as u64;
        let _touch = self.log.begin(range.clone());
        let number = {
            let mut model = self.bench.model.borrow_mut();
            model.busy[block] = true;
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
                    self.bench.model.borrow_mut().busy[block] = false;
                    return Err(e);
                }
            }
        };
        let mut model = self.bench.model.borrow_mut();
        model.now[block] = written.is_ok().then_some(number);
        model.busy[block] = false;
        written
    }

    async fn sweeps(&self) -> Result<(), String> {
        while !self.stopped() {
            self.bench.pause(60).await;
            let images: Vec<Uuid> =
                self.log.images().into_iter().filter(|_| self.rng().chance(0.8)).collect();
            if !self.sweep(&images).await? {
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

    /// Flushes everywhere, and takes marks of some regions; false if that fails.
    async fn sweep(&self, images: &[Uuid]) -> Result<bool, String> {
        let mut stamp = self.log.flush_begins();
        if self.bench.mistake != Mistake::ClearsUnflushed && self.client.flush().await.is_err() {
            return Ok(false);
        }
        if self.bench.mistake == Mistake::StampsLate {
            stamp = self.log.flush_begins();
        }
        if self.rng().chance(0.3) {
            self.bench.pause(30).await;
        }
        let mut regions = if self.rng().chance(0.3) {
            self.log.sweepable(images, 4)
        } else {
            REGIONS.into_iter().filter(|_| self.rng().chance(0.6)).map(Region).collect()
        };
        let unknown = |region: &Region| {
            let model = self.bench.model.borrow();
            (0..BLOCKS).any(|b| region_of(b) == region.0 && model.now[b].is_none())
        };
        regions.retain(|region| !unknown(region));
        let before: Vec<_> = images.iter().map(|image| self.marked(*image)).collect();
        self.log.clear(images, regions, stamp);
        for (image, before) in images.iter().zip(before) {
            self.cleared(*image, &before)?;
        }
        Ok(true)
    }

    /// Another image has what this one has, where its marks have gone.
    fn cleared(&self, image: Uuid, before: &BTreeSet<u32>) -> Result<(), String> {
        let after = self.marked(image);
        let mut model = self.bench.model.borrow_mut();
        let model = &mut *model;
        let n = (0..OTHERS).find(|n| self::image(*n) == image).expect("one of them");
        for region in before.difference(&after) {
            model.peers[n].owed.remove(region);
            for block in (0..BLOCKS).filter(|block| region_of(*block) == *region) {
                if model.busy[block] {
                    return Err(format!("a mark was taken from block {block} while it is written"));
                }
                model.peers[n].has[block] = model.now[block];
            }
        }
        Ok(())
    }

    /// Adopts configurations, and takes marks of others.
    async fn changes(&self) -> Result<(), String> {
        while !self.stopped() {
            let alive = if self.log.adopted().is_none() || self.rng().chance(0.3) {
                self.adopt().await?
            } else {
                self.merge().await
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
        let mut others: Vec<usize> = (0..OTHERS).collect();
        rng.shuffle(&mut others);
        others.truncate(*rng.pick(&[0, 1, 1, 2, 2, 2, 3]));
        let mut next = Adoption {
            epoch: 0,
            config: Uuid::from_u128(1 + u128::from(rng.u64())),
            others: Vec::new(),
            members: Vec::new(),
            inherited: Vec::new(),
            hint: [None; 3],
            boot: None,
        };
        {
            let model = &mut *self.bench.model.borrow_mut();
            for n in others {
                // Who was new once, and never got a slot for sure, is new again.
                let empty = model.peers[n].has == [None; BLOCKS];
                let new = (empty || rng.chance(0.15)) && !present.contains(&image(n));
                if new {
                    model.peers[n].has = [None; BLOCKS];
                }
                next.others.push(Other { image: image(n), new });
            }
            model.tried += 1;
            next.epoch = model.tried;
        }
        let (epoch, mut wanted) = (next.epoch, Vec::from_iter(next.others.iter().map(|o| o.image)));
        match self.log.adopt(next).await {
            Ok(()) => {}
            Err(AdoptError::Gone) => return Ok(false),
            Err(e) => return Err(e.to_string()),
        }
        self.bench.model.borrow_mut().adopted = epoch;
        let mut found = self.log.images();
        found.sort_unstable();
        wanted.sort_unstable();
        if found != wanted {
            return Err(format!("slots for {found:?} instead of {wanted:?}"));
        }
        self.judge_marks()?;
        Ok(true)
    }

    async fn merge(&self) -> bool {
        let images = self.log.images();
        let Some(n) = (0..OTHERS).find(|n| images.contains(&image(*n))) else { return true };
        let (rng, shift) = (self.rng(), *self.rng().pick(&[16u32, 16, 18]));
        let asked: Vec<u32> = REGIONS.into_iter().filter(|_| rng.chance(0.2)).collect();
        let mut bits = vec![0; usize::try_from((BYTES >> shift) / 8).expect("small")];
        for region in &asked {
            let theirs = region >> (shift - 16);
            bits[theirs as usize / 8] |= 1 << (theirs % 8);
        }
        let theirs = Bitmap { volume_bytes: BYTES, region_shift: shift, bits };
        let merged = self.log.merge(image(n), &theirs).await;
        if merged.is_ok() {
            // Marks may have been taken since they were set, in memory.
            let marked = self.marked(image(n));
            let still = asked.into_iter().filter(|region| marked.contains(region));
            self.bench.model.borrow_mut().peers[n].owed.extend(still);
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

    /// Everything works: writes, marks that all go at last, the end.
    async fn end(&self) -> Result<(), String> {
        let failed = |what: &'static str| move |e: Error| format!("{what} without faults: {e}");
        if !self.adopt().await? || !self.merge().await {
            return Err("the log is gone without faults".into());
        }
        for block in 0..BLOCKS {
            self.write(block).await.map_err(failed("a write"))?;
        }
        self.log.write_back().await.map_err(failed("a page"))?;
        let images = self.log.images();
        let stamp = self.log.flush_begins();
        self.client.flush().await.map_err(failed("a flush"))?;
        for image in &images {
            let before = self.marked(*image);
            self.log.clear(&[*image], self.log.marked(*image), stamp);
            self.cleared(*image, &before)?;
        }
        if !self.log.is_clean(&images) {
            return Err("marks stay for ever".into());
        }
        self.log.close().await.map_err(|e| e.to_string())?;
        self.bench.model.borrow_mut().closed = Some(true);
        Ok(())
    }
}
