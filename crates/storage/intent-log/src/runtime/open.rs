//! Creating a log, and opening it again after a crash or with damage.

use std::rc::Rc;

use block::Error;
use disk::{ImageError, ImageLabel, LOG_TRANSFER_MAX, LogArea};
use peer::DataGeneration;
use rt::Core;
use rt::disk::{DiskError, DiskErrorKind};
use uuid::Uuid;

use super::super::cell::{CELLS_PER_PAGE, PAGE_BYTES, parse_page};
use super::super::superblock::SUPERBLOCK_BYTES;
use super::super::{
    CellError, Geometry, LogGeometryError, LogId, LogState, NoUsableSuperblock, SUPERBLOCK_OFFSETS,
    Slot, SlotBitmaps, SlotEntry, Superblock, SuperblockError, choose_superblock,
};
use super::config_adoption::AdoptedConfig;
use super::dirty_bitmap::DirtyBitmap;
use super::page_set::PageSet;
use super::{IntentLog, LogShared};

/// Pages that are read at a time.
const PAGES_PER_READ: usize = LOG_TRANSFER_MAX / PAGE_BYTES;

/// What was found when a log was opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LogOpenReport {
    /// The damage found.
    pub damage: LogDamage,
    /// Whether the machine has not been rebooted since the image was last opened.
    pub same_boot: bool,
    /// Whether the image was closed in order.
    pub was_closed: bool,
    /// The adopted configuration; `None` if none yet, or if it is unknown.
    pub adopted: Option<AdoptedConfig>,
}

/// Damage of a log, already repaired.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogDamage {
    /// Nothing.
    None,
    /// This many cells; their regions are now dirty in all slots.
    Cells(u32),
    /// Both copies of the superblock: every region is dirty in all slots, and the adopted
    /// configuration is unknown.
    SuperblockLost,
}

/// Why a log cannot be created or opened.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LogError {
    /// The image has no log.
    #[error("the image has no intent log")]
    NoLog,
    /// The image has one already.
    #[error("the image has an intent log already")]
    AlreadyExists,
    /// It has an unknown format version or does not suit the volume: it must not be changed.
    #[error("the image's intent log has {0}")]
    Unsupported(SuperblockError),
    /// Such a volume can have no log.
    #[error("no intent log: {0}")]
    Geometry(#[from] LogGeometryError),
    /// The label could not be updated.
    #[error("{0}")]
    Label(#[from] ImageError),
    /// The disk failed; the image must not be used any more.
    #[error("the image's intent log cannot be written")]
    Gone,
}

impl From<Error> for LogError {
    fn from(_: Error) -> Self {
        Self::Gone
    }
}

type SuperblockCopies = [Result<Superblock, SuperblockError>; 2];

impl IntentLog {
    /// Creates a log for the image that contains `area`, with nothing dirty and no slot in use, and
    /// declares it in the label. After a crash the image has no log, or a complete one.
    ///
    /// No write may be in flight or admitted: whatever the image holds now counts as known to
    /// images that get a slot later without being new.
    ///
    /// # Errors
    /// [`LogError`]
    pub async fn create(core: &Core, area: Rc<dyn LogArea>) -> Result<Self, LogError> {
        let label = area.label();
        if label.has_intent_log {
            return Err(LogError::AlreadyExists);
        }
        let geometry = Geometry::new(label.data_bytes)?;
        let superblock = new_superblock(core, &label, geometry);
        let log = LogShared::new(
            area,
            unwritten_bitmap(SlotBitmaps::none(geometry), superblock.log_id),
            superblock,
        );
        log.write_superblock(superblock, 0).await?;
        let pages = log.writer.borrow().bitmap.all_pages();
        log.persist(pages).await?;
        log.write_superblock(Superblock { state: LogState::Active, ..superblock }, 0).await?;
        log.area.declare_log().await?;
        Ok(Self(log))
    }

    /// Opens the log of the image that contains `area`, repairs damage, and records durably that
    /// the image is in use. `boot` is [`LogArea::disk_session`], to compare with the one in which
    /// the image was last in sync; nil if its disk may have lost completed writes, which is
    /// recorded too.
    ///
    /// # Errors
    /// [`LogError`]
    pub async fn open(
        core: &Core,
        area: Rc<dyn LogArea>,
        boot: Uuid,
    ) -> Result<(Self, LogOpenReport), LogError> {
        let label = area.label();
        if !label.has_intent_log {
            return Err(LogError::NoLog);
        }
        // After a kill, the page cache may show what is not on disk yet.
        area.sync().await?;
        let copies = read_superblocks(&*area).await?;
        match choose_superblock(copies, label.image_id) {
            Err(NoUsableSuperblock::Unsupported(why)) => Err(LogError::Unsupported(why)),
            Err(why) => recreate_all_dirty(core, area, why).await,
            Ok(found) => {
                let geometry = found.geometry(label.data_bytes).map_err(LogError::Unsupported)?;
                let valid = usize::from(copies[0] != Ok(found));
                let (log, damage) = match found.state {
                    LogState::Initializing => {
                        (recreate(core, area, found, geometry).await?, LogDamage::None)
                    }
                    LogState::Active => load(area, found, geometry).await?,
                };
                // The valid copy is overwritten last.
                let slots = found.slots.map(|slot| SlotEntry { is_all_dirty: false, ..slot });
                let old = log.superblock.get();
                let same_boot = found.boot_id == boot && !boot.is_nil();
                // A session is only cleared here: it names the one in which the image was last in
                // sync.
                let boot = if boot.is_nil() { boot } else { old.boot_id };
                let updated = Superblock {
                    state: LogState::Active,
                    in_use: true,
                    slots,
                    boot_id: boot,
                    ..old
                };
                log.write_superblock(updated, 1 - valid).await?;
                let was_closed = !found.in_use && found.state == LogState::Active;
                let adopted = found.adopted();
                Ok((Self(log), LogOpenReport { damage, same_boot, was_closed, adopted }))
            }
        }
    }
}

/// A bitmap whose pages were never written.
fn unwritten_bitmap(bitmaps: SlotBitmaps, log: LogId) -> DirtyBitmap {
    let cells = bitmaps.geometry().cell_count() as usize;
    DirtyBitmap::new(bitmaps, log, vec![0; cells])
}

/// A log whose creation was interrupted: nothing is dirty, since no write was admitted.
async fn recreate(
    core: &Core,
    area: Rc<dyn LogArea>,
    found: Superblock,
    geometry: Geometry,
) -> Result<Rc<LogShared>, LogError> {
    // With a new id, so that no cell of the first attempt is taken for one of this log.
    let superblock = Superblock { log_id: LogId(core.random_u64()), ..found };
    let log = LogShared::new(
        area,
        unwritten_bitmap(SlotBitmaps::none(geometry), superblock.log_id),
        superblock,
    );
    let pages = log.writer.borrow().bitmap.all_pages();
    log.persist(pages).await?;
    Ok(log)
}

/// A log in use: reads all dirty bits, and rewrites bad cells.
async fn load(
    area: Rc<dyn LogArea>,
    found: Superblock,
    geometry: Geometry,
) -> Result<(Rc<LogShared>, LogDamage), LogError> {
    let path = area.path().to_owned();
    let read = read_cells(&*area, found.log_id, geometry).await?;
    let mut changed = PageSet::NONE;
    for (cell, why) in &read.bad {
        tracing::warn!(image = %path.display(), cell, %why, "a cell of the intent log was damaged");
        changed = changed.with(cell / CELLS_PER_PAGE as u32);
    }
    let mut bitmap = DirtyBitmap::new(read.marks, found.log_id, read.generations);
    bitmap.all_pages().without(changed).iter().for_each(|page| bitmap.note_durable(page));
    for (slot, entry) in Slot::ALL.into_iter().zip(&found.slots) {
        if entry.is_all_dirty {
            changed = bitmap.initialize_slot(slot, SlotBitmaps::set_all);
        }
    }
    let log = LogShared::new(area, bitmap, found);
    log.persist(changed).await?;
    let bad = u32::try_from(read.bad.len()).expect("no more than there are cells");
    Ok((log, if bad == 0 { LogDamage::None } else { LogDamage::Cells(bad) }))
}

/// The superblock of a new log: nothing adopted, no slot in use. The first one written has
/// generation 1.
fn new_superblock(core: &Core, label: &ImageLabel, geometry: Geometry) -> Superblock {
    Superblock {
        state: LogState::Initializing,
        generation: 0,
        log_id: LogId(core.random_u64()),
        image: label.image_id,
        region_shift: geometry.region_shift(),
        cells: geometry.cell_count(),
        adopted_epoch: 0,
        config_id: Uuid::nil(),
        boot_id: Uuid::nil(),
        in_use: true,
        data_generation: DataGeneration::default(),
        slots: [SlotEntry::default(); 3],
        in_sync_hint: [None; 3],
    }
}

/// A log whose superblock is lost: everything is dirty. Writes all pages first, then the
/// superblock, active at once: a crash in between must not lose the dirty bits.
async fn recreate_all_dirty(
    core: &Core,
    area: Rc<dyn LogArea>,
    why: NoUsableSuperblock,
) -> Result<(IntentLog, LogOpenReport), LogError> {
    tracing::error!(image = %area.path().display(), %why, "the intent log was lost");
    let label = area.label();
    let geometry = Geometry::new(label.data_bytes)?;
    let generation = if let NoUsableSuperblock::Differ(generation) = why { generation } else { 0 };
    let state = LogState::Active;
    let lost_slots = [SlotEntry { history_lost: true, ..SlotEntry::default() }; 3];
    let template = new_superblock(core, &label, geometry);
    let superblock = Superblock { state, generation, slots: lost_slots, ..template };
    let log = LogShared::new(
        area,
        unwritten_bitmap(SlotBitmaps::all(geometry), superblock.log_id),
        superblock,
    );
    let pages = log.writer.borrow().bitmap.all_pages();
    log.persist(pages).await?;
    log.write_superblock(superblock, 0).await?;
    let report = LogOpenReport {
        damage: LogDamage::SuperblockLost,
        same_boot: false,
        was_closed: false,
        adopted: None,
    };
    Ok((IntentLog(log), report))
}

/// The result of a read; none if the data is unreadable.
fn readable<T>(read: Result<T, DiskError>) -> Result<Option<T>, LogError> {
    match read {
        Ok(bytes) => Ok(Some(bytes)),
        Err(e) if e.kind == DiskErrorKind::Gone => Err(LogError::Gone),
        Err(_) => Ok(None),
    }
}

/// The superblock of an image's log, which may be in use: read-only.
///
/// # Errors
/// [`LogError::NoLog`]; [`LogError::Gone`].
pub async fn read_superblock(
    area: &dyn LogArea,
) -> Result<Result<Superblock, NoUsableSuperblock>, LogError> {
    let label = area.label();
    if !label.has_intent_log {
        return Err(LogError::NoLog);
    }
    Ok(choose_superblock(read_superblocks(area).await?, label.image_id))
}

async fn read_superblocks(area: &dyn LogArea) -> Result<SuperblockCopies, LogError> {
    let mut copies: SuperblockCopies = [Err(SuperblockError::Unreadable); 2];
    for ((copy, at), entry) in (0u16..).zip(SUPERBLOCK_OFFSETS).zip(&mut copies) {
        if let Some(bytes) = readable(area.read(at, SUPERBLOCK_BYTES).await)? {
            let bytes = bytes.try_into().expect("as long as it was asked for");
            *entry = Superblock::parse(&bytes, copy);
        }
    }
    Ok(copies)
}

/// All cells of a log, as read.
struct LoadedCells {
    marks: SlotBitmaps,
    generations: Vec<u64>,
    bad: Vec<(u32, CellError)>,
}

async fn read_cells(
    area: &dyn LogArea,
    log: LogId,
    geometry: Geometry,
) -> Result<LoadedCells, LogError> {
    let (bitmaps, generations) =
        (SlotBitmaps::none(geometry), vec![0; geometry.cell_count() as usize]);
    let mut cells = LoadedCells { marks: bitmaps, generations, bad: Vec::new() };
    for first in (0..geometry.page_count()).step_by(PAGES_PER_READ) {
        let last = geometry.page_count().min(first + PAGES_PER_READ as u32);
        for (page, bytes) in (first..last).zip(read_pages(area, geometry, first..last).await?) {
            cells.add(log, page, bytes.as_deref());
        }
    }
    Ok(cells)
}

/// The bytes of some pages; read one by one if reading them together fails.
async fn read_pages(
    area: &dyn LogArea,
    geometry: Geometry,
    pages: std::ops::Range<u32>,
) -> Result<Vec<Option<Vec<u8>>>, LogError> {
    let at = |page| geometry.page_offset(page).expect("a page of the log");
    let together = area.read(at(pages.start), pages.len() * PAGE_BYTES).await;
    if let Some(bytes) = readable(together)? {
        return Ok(bytes.chunks(PAGE_BYTES).map(|page| Some(page.to_vec())).collect());
    }
    let mut out = Vec::new();
    for page in pages {
        out.push(readable(area.read(at(page), PAGE_BYTES).await)?);
    }
    Ok(out)
}

impl LoadedCells {
    fn add(&mut self, log: LogId, page: u32, bytes: Option<&[u8]>) {
        let bytes: Option<&[u8; PAGE_BYTES]> = bytes.and_then(|bytes| bytes.try_into().ok());
        let found = match bytes {
            Some(bytes) => parse_page(bytes, log, page),
            None => std::array::from_fn(|_| Err(CellError::Unreadable)),
        };
        for cell in found.iter().flatten() {
            if let Some(generation) = self.generations.get_mut(cell.index as usize) {
                *generation = cell.generation;
            }
        }
        self.bad.extend(self.marks.add_page(page, &found));
    }
}
