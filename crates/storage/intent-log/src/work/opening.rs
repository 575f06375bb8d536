//! Making a log, and opening it again, whatever a crash or the disk has left of it.

use std::rc::Rc;

use block::Error;
use disk::{FileError, LOG_TRANSFER_MAX, Label, LogArea};
use peer::Lineage;
use rt::Core;
use rt::disk::{DiskError, DiskErrorKind};
use uuid::Uuid;

use super::super::cell::{CELLS_PER_PAGE, PAGE_BYTES, parse_page};
use super::super::superblock::SUPERBLOCK_BYTES;
use super::super::{
    BadCell, BadGeometry, BadSuperblock, BadSuperblocks, Geometry, LogId, Marks,
    SUPERBLOCK_OFFSETS, Slot, SlotEntry, State, Superblock, choose,
};
use super::adoption::Adopted;
use super::book::Book;
use super::pages::Pages;
use super::{Inner, IntentLog};

/// Pages that are read at once.
const STEP: usize = LOG_TRANSFER_MAX / PAGE_BYTES;

/// What was found when a log was opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Found {
    /// What of it was bad.
    pub damage: Damage,
    /// Whether the machine has not been started again since the image was last opened.
    pub same_boot: bool,
    /// Whether the image was closed in order.
    pub closed: bool,
    /// What the image has adopted; `None` if nothing yet, or if nobody knows any more.
    pub adopted: Option<Adopted>,
}

/// What was bad about a log, and has been repaired.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Damage {
    /// Nothing.
    None,
    /// So many cells, whose regions are all marked in all slots now.
    Cells(u32),
    /// Both copies of the superblock: every region is marked for everybody, and what the image has
    /// adopted is unknown.
    Lost,
}

/// Why a log cannot be made or opened.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LogError {
    /// The image has no log.
    #[error("the image has no intent log")]
    Absent,
    /// The image has one already.
    #[error("the image has an intent log already")]
    Present,
    /// It is not for this release, or not for such a volume: it must be left alone.
    #[error("the image's intent log has {0}")]
    Strange(BadSuperblock),
    /// No log suits such a volume.
    #[error("no intent log: {0}")]
    Geometry(#[from] BadGeometry),
    /// The label did not take it.
    #[error("{0}")]
    Label(#[from] FileError),
    /// The disk failed; the image is to be given up.
    #[error("the image's intent log cannot be written")]
    Gone,
}

impl From<Error> for LogError {
    fn from(_: Error) -> Self {
        Self::Gone
    }
}

type Copies = [Result<Superblock, BadSuperblock>; 2];

impl IntentLog {
    /// Makes a log for the image that `area` is part of, with nothing marked and no slot taken, and
    /// declares it in the label. A crash leaves an image without a log, or with a whole one.
    ///
    /// No write may be in flight or admitted: what the image holds now counts as known to whoever gets
    /// a slot later without being new.
    ///
    /// # Errors
    /// [`LogError`]
    pub async fn create(core: &Core, area: Rc<dyn LogArea>) -> Result<Self, LogError> {
        let label = area.label();
        if label.intent_log {
            return Err(LogError::Present);
        }
        let geometry = Geometry::new(label.data_bytes)?;
        let superblock = first(core, &label, geometry);
        let log = Inner::new(area, fresh(Marks::none(geometry), superblock.log), superblock);
        log.replace(superblock, 0).await?;
        let pages = log.rounds.borrow().book.pages();
        log.persist(pages).await?;
        log.replace(Superblock { state: State::Active, ..superblock }, 0).await?;
        log.area.declare().await?;
        Ok(Self(log))
    }

    /// Opens the log of the image that `area` is part of, repairs what is bad, and notes durably that
    /// the image is in use. `boot` is [`LogArea::boot`], to compare with what the image was in sync in; nil if its
    /// disk may not have kept what it had completed, which is noted as well.
    ///
    /// # Errors
    /// [`LogError`]
    pub async fn open(
        core: &Core,
        area: Rc<dyn LogArea>,
        boot: Uuid,
    ) -> Result<(Self, Found), LogError> {
        let label = area.label();
        if !label.intent_log {
            return Err(LogError::Absent);
        }
        // After a kill the page cache may show what the disk does not hold yet.
        area.sync().await?;
        let copies = read_superblocks(&*area).await?;
        match choose(copies, label.image) {
            Err(BadSuperblocks::Strange(why)) => Err(LogError::Strange(why)),
            Err(lost) => rebuild(core, area, lost).await,
            Ok(found) => {
                let geometry = found.geometry(label.data_bytes).map_err(LogError::Strange)?;
                let counts = usize::from(copies[0] != Ok(found));
                let (log, damage) = match found.state {
                    State::Empty => (begin_again(core, area, found, geometry).await?, Damage::None),
                    State::Active => resume(area, found, geometry).await?,
                };
                // The copy that counts goes last.
                let slots = found.slots.map(|slot| SlotEntry { all_marked: false, ..slot });
                let old = log.superblock.get();
                let same_boot = found.boot == boot && !boot.is_nil();
                // It stays as it is: what the image has been through since it was last in sync counts.
                let boot = if boot.is_nil() { boot } else { old.boot };
                let new = Superblock { state: State::Active, opened: true, slots, boot, ..old };
                log.replace(new, 1 - counts).await?;
                let closed = !found.opened && found.state == State::Active;
                let adopted = found.adopted();
                Ok((Self(log), Found { damage, same_boot, closed, adopted }))
            }
        }
    }
}

/// A log whose pages were never written.
fn fresh(marks: Marks, log: LogId) -> Book {
    let cells = marks.geometry().cells() as usize;
    Book::new(marks, log, vec![0; cells])
}

/// A log that was being made: nothing is marked, for nothing was admitted.
async fn begin_again(
    core: &Core,
    area: Rc<dyn LogArea>,
    found: Superblock,
    geometry: Geometry,
) -> Result<Rc<Inner>, LogError> {
    // Under another name, so that no cell of the first attempt can be taken for one of this.
    let superblock = Superblock { log: LogId(core.random_u64()), ..found };
    let log = Inner::new(area, fresh(Marks::none(geometry), superblock.log), superblock);
    let pages = log.rounds.borrow().book.pages();
    log.persist(pages).await?;
    Ok(log)
}

/// A log in use: all marks are read, and bad cells written again.
async fn resume(
    area: Rc<dyn LogArea>,
    found: Superblock,
    geometry: Geometry,
) -> Result<(Rc<Inner>, Damage), LogError> {
    let path = area.path().to_owned();
    let read = read_cells(&*area, found.log, geometry).await?;
    let mut changed = Pages::NONE;
    for (cell, why) in &read.bad {
        tracing::warn!(image = %path.display(), cell, %why, "a cell of the intent log was bad");
        changed = changed.with(cell / CELLS_PER_PAGE as u32);
    }
    let mut book = Book::new(read.marks, found.log, read.generations);
    book.pages().without(changed).iter().for_each(|page| book.found(page));
    for (slot, entry) in Slot::ALL.into_iter().zip(&found.slots) {
        if entry.all_marked {
            changed = book.begin(slot, Marks::set_all);
        }
    }
    let log = Inner::new(area, book, found);
    log.persist(changed).await?;
    let bad = u32::try_from(read.bad.len()).expect("no more than there are cells");
    Ok((log, if bad == 0 { Damage::None } else { Damage::Cells(bad) }))
}

/// The superblock of a log that is being made: nothing is adopted, nobody has a slot. The first one
/// that is written has generation 1.
fn first(core: &Core, label: &Label, geometry: Geometry) -> Superblock {
    Superblock {
        state: State::Empty,
        generation: 0,
        log: LogId(core.random_u64()),
        image: label.image,
        region_shift: geometry.shift(),
        cells: geometry.cells(),
        epoch: 0,
        config: Uuid::nil(),
        boot: Uuid::nil(),
        opened: true,
        lineage: Lineage::default(),
        slots: [SlotEntry::default(); 3],
        hint: [None; 3],
    }
}

/// A log whose superblock is lost: everything is marked. All pages come first, then the superblock,
/// active at once: a crash on the way must not lose the marks.
async fn rebuild(
    core: &Core,
    area: Rc<dyn LogArea>,
    why: BadSuperblocks,
) -> Result<(IntentLog, Found), LogError> {
    tracing::error!(image = %area.path().display(), %why, "the intent log was lost");
    let label = area.label();
    let geometry = Geometry::new(label.data_bytes)?;
    let generation = if let BadSuperblocks::Differ(generation) = why { generation } else { 0 };
    let state = State::Active;
    let forgotten = [SlotEntry { forgotten: true, ..SlotEntry::default() }; 3];
    let first = first(core, &label, geometry);
    let superblock = Superblock { state, generation, slots: forgotten, ..first };
    let log = Inner::new(area, fresh(Marks::all(geometry), superblock.log), superblock);
    let pages = log.rounds.borrow().book.pages();
    log.persist(pages).await?;
    log.replace(superblock, 0).await?;
    let found = Found { damage: Damage::Lost, same_boot: false, closed: false, adopted: None };
    Ok((IntentLog(log), found))
}

/// What reading has found: nothing, if that was all the disk gave.
fn given<T>(read: Result<T, DiskError>) -> Result<Option<T>, LogError> {
    match read {
        Ok(bytes) => Ok(Some(bytes)),
        Err(e) if e.kind == DiskErrorKind::Gone => Err(LogError::Gone),
        Err(_) => Ok(None),
    }
}

/// The superblock of an image's log, which may be in use: only read.
///
/// # Errors
/// [`LogError::Absent`]; [`LogError::Gone`].
pub async fn read_superblock(
    area: &dyn LogArea,
) -> Result<Result<Superblock, BadSuperblocks>, LogError> {
    let label = area.label();
    if !label.intent_log {
        return Err(LogError::Absent);
    }
    Ok(choose(read_superblocks(area).await?, label.image))
}

async fn read_superblocks(area: &dyn LogArea) -> Result<Copies, LogError> {
    let mut copies: Copies = [Err(BadSuperblock::Unreadable); 2];
    for ((copy, at), place) in (0u16..).zip(SUPERBLOCK_OFFSETS).zip(&mut copies) {
        if let Some(bytes) = given(area.read(at, SUPERBLOCK_BYTES).await)? {
            let bytes = bytes.try_into().expect("as long as it was asked for");
            *place = Superblock::parse(&bytes, copy);
        }
    }
    Ok(copies)
}

/// All cells of a log.
struct Cells {
    marks: Marks,
    generations: Vec<u64>,
    bad: Vec<(u32, BadCell)>,
}

async fn read_cells(area: &dyn LogArea, log: LogId, geometry: Geometry) -> Result<Cells, LogError> {
    let (marks, generations) = (Marks::none(geometry), vec![0; geometry.cells() as usize]);
    let mut cells = Cells { marks, generations, bad: Vec::new() };
    for first in (0..geometry.pages()).step_by(STEP) {
        let last = geometry.pages().min(first + STEP as u32);
        for (page, bytes) in (first..last).zip(read_pages(area, geometry, first..last).await?) {
            cells.add(log, page, bytes.as_deref());
        }
    }
    Ok(cells)
}

/// The bytes of some pages, each for itself if they do not come together.
async fn read_pages(
    area: &dyn LogArea,
    geometry: Geometry,
    pages: std::ops::Range<u32>,
) -> Result<Vec<Option<Vec<u8>>>, LogError> {
    let at = |page| geometry.page_offset(page).expect("a page of the log");
    let together = area.read(at(pages.start), pages.len() * PAGE_BYTES).await;
    if let Some(bytes) = given(together)? {
        return Ok(bytes.chunks(PAGE_BYTES).map(|page| Some(page.to_vec())).collect());
    }
    let mut out = Vec::new();
    for page in pages {
        out.push(given(area.read(at(page), PAGE_BYTES).await)?);
    }
    Ok(out)
}

impl Cells {
    fn add(&mut self, log: LogId, page: u32, bytes: Option<&[u8]>) {
        let bytes: Option<&[u8; PAGE_BYTES]> = bytes.and_then(|bytes| bytes.try_into().ok());
        let found = match bytes {
            Some(bytes) => parse_page(bytes, log, page),
            None => std::array::from_fn(|_| Err(BadCell::Unreadable)),
        };
        for cell in found.iter().flatten() {
            if let Some(generation) = self.generations.get_mut(cell.index as usize) {
                *generation = cell.generation;
            }
        }
        self.bad.extend(self.marks.add_page(page, &found));
    }
}
