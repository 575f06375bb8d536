//! Creating, opening, growing and deleting images.
//!
//! Everything is ordered so that a crash leaves either nothing that matters, or an image that
//! works, or one that says that its creation was never finished.

use std::path::Path;

use block::{Account, Bufs, Class, Ctx, Epoch};
use rt::Core;
use rt::disk::{Disk, DiskError, DiskErrorKind, DiskKind, OpenError, OpenOptions, OpenReason};
use uuid::Uuid;

use super::error::{FileError, Reason};
use super::foreign::{self, Foreign};
use super::label::{
    BadLabel, DATA_OFFSET, LABEL_BYTES, Label, MAX_BYTES, Provisioning, SLOTS, State,
};
use super::slots::{self, Slots};
use super::span::Span;
use super::{File, PAGE};

/// Most that is cleared by one call to the system, in bytes.
const CLEAR_STEP: u64 = 1 << 30;

/// Most that one write of zeroes covers, in bytes.
const ZERO_STEP: u64 = 1 << 20;

/// A page between the labels that is never used: freeing it shows whether space can be freed.
const PROBE_AT: u64 = 64 << 10;
/// Where a disk is looked at whose second label cannot be read.
const NEAR: usize = 256 << 10;

/// What to create.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Create {
    /// The volume whose data it will be.
    pub volume: Uuid,
    /// Size of a logical block in bytes: 512 or 4096.
    pub block_size: u32,
    /// Size of the volume in bytes, a multiple of the block size. `None`: as large as the device.
    pub bytes: Option<u64>,
    /// How space is put behind it.
    pub provisioning: Provisioning,
    /// Go through the page cache, where the file system has no direct I/O.
    pub buffered: bool,
    /// Overwrite whatever is there.
    pub force: bool,
    /// Leave a device's old contents where the volume's data will be, instead of zeroing them.
    pub keep_contents: bool,
}

/// What to open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Open {
    /// The volume that it must hold.
    pub volume: Uuid,
    /// The label's generation when it was last seen, 0 if never: older ones are refused.
    pub generation: u64,
    /// Go through the page cache, where the file system has no direct I/O.
    pub buffered: bool,
    /// Only read.
    pub read_only: bool,
}

impl File {
    /// Creates an image in a new file, or in a file or block device that holds nothing, and opens
    /// it. Durable when this returns.
    ///
    /// # Errors
    /// [`FileError`] names what is in the way. A file that was made for this is removed again.
    pub async fn create(core: &Core, path: &Path, how: &Create) -> Result<Self, FileError> {
        let refuse = |reason: Reason| reason.at(path);
        check_size(how).map_err(refuse)?;
        let options = OpenOptions::new().buffered(how.buffered);
        let made = match how.bytes {
            Some(_) => core.open_disk(path, options.create(DATA_OFFSET)).await,
            None => Err(OpenError { path: path.to_owned(), reason: OpenReason::Exists }),
        };
        let memory = core.pool().account();
        let (disk, fresh) = match made {
            Err(OpenError { reason: OpenReason::Exists, .. }) => {
                let disk = core.open_disk(path, options).await?;
                prepare(&disk, &memory, how).await.map_err(refuse)?;
                (disk, false)
            }
            made => (made?, true),
        };
        let made = fill(core, &disk, &memory, how).await;
        if made.is_err() {
            take_back(core, &disk, fresh).await;
        }
        let label = made.map_err(refuse)?;
        let can_free = can_free(&disk, &label).await;
        Ok(Self::new(disk, memory, label, can_free))
    }

    /// Opens an image. One bad copy of its label is repaired.
    ///
    /// # Errors
    /// [`FileError`] names what is wrong with it.
    pub async fn open(core: &Core, path: &Path, what: &Open) -> Result<Self, FileError> {
        let options = OpenOptions::new().buffered(what.buffered).read_only(what.read_only);
        let disk = core.open_disk(path, options).await?;
        let memory = core.pool().account();
        let opened = async {
            let slots = Slots::read(&disk, &memory).await?;
            let label = labelled(&disk, &memory, &slots).await?;
            check_label(&disk, &label, what)?;
            if !what.read_only {
                repair(&disk, &memory, &slots, &label).await?;
            }
            Ok(label)
        };
        let label = opened.await.map_err(|reason: Reason| reason.at(path))?;
        let can_free = can_free(&disk, &label).await;
        Ok(Self::new(disk, memory, label, can_free))
    }

    /// Makes the volume `bytes` large; the new blocks are zeroes. Nothing happens if it is
    /// that large already. Works while the image is in use.
    ///
    /// # Errors
    /// [`FileError`]; the volume then has its old size.
    pub async fn grow(&self, bytes: u64) -> Result<(), FileError> {
        let _alone = self.changing_label.lock().await;
        let grown = self.grow_alone(bytes).await;
        self.judge(grown)
    }

    /// Declares in the label that the image has an intent log: releases that do not know about
    /// logs refuse it from then on. Durable when this returns.
    ///
    /// # Errors
    /// [`FileError`]
    pub(super) async fn declare_log(&self) -> Result<(), FileError> {
        let _alone = self.changing_label.lock().await;
        let old = self.label.get();
        let new = Label { intent_log: true, generation: self.generation.get() + 1, ..old };
        let declared = if old.intent_log { Ok(()) } else { self.relabel(new).await };
        self.judge(declared)
    }

    /// What a change of the label has come to. One that failed to sync ends the image.
    fn judge(&self, changed: Result<(), Reason>) -> Result<(), FileError> {
        if let Err(Reason::Disk(e)) = changed
            && e.kind == DiskErrorKind::Gone
        {
            self.dead.set(true);
        }
        changed.map_err(|reason| reason.at(self.path()))
    }

    /// Makes `new` the label. Who calls has `changing_label`.
    async fn relabel(&self, new: Label) -> Result<(), Reason> {
        // A failed attempt may leave one copy with its number: the next one takes a higher.
        self.generation.set(new.generation);
        slots::replace(&self.disk, &self.memory, &new, 1).await?;
        self.label.set(new);
        Ok(())
    }

    async fn grow_alone(&self, bytes: u64) -> Result<(), Reason> {
        let old = self.label.get();
        check_bytes(bytes, old.block_size)?;
        if bytes < old.data_bytes {
            return Err(Reason::Size("a volume cannot become smaller"));
        }
        if bytes == old.data_bytes {
            return Ok(());
        }
        if old.intent_log {
            // Its log has no cells for the new blocks.
            return Err(Reason::Size("a volume with an intent log cannot grow"));
        }
        let new = Label { data_bytes: bytes, generation: self.generation.get() + 1, ..old };
        self.make_room(&old, &new).await?;
        self.disk.sync().await.map_err(|e| {
            self.dead.set(true);
            Reason::Disk(e)
        })?;
        self.relabel(new).await?;
        let mut info = self.info.get();
        info.blocks = bytes / u64::from(new.block_size);
        self.info.set(info);
        Ok(())
    }

    /// Makes zeroes, and space where it is wanted, behind the old end. Never makes a file shorter
    /// than a label that a failed attempt may have left says.
    async fn make_room(&self, old: &Label, new: &Label) -> Result<(), Reason> {
        let size = self.disk.measure().await?;
        if self.disk.info().kind == DiskKind::BlockDevice {
            let needed = new.end().next_multiple_of(self.unit);
            if size < needed {
                return Err(Reason::TooSmall { bytes: size, needed });
            }
            return self.zero_new(Span { at: old.end(), end: new.end() }).await;
        }
        if size < old.end() {
            return Err(Reason::Shrunk { bytes: size, needed: old.end() });
        }
        // Whole pages first: what somebody appended may end within a block, which cannot be
        // reached before.
        let (from, to) = (size, file_length(new.data_bytes));
        if from < to {
            lengthen(&self.disk, to).await?;
        }
        // What an attempt that was cut short, or somebody else, left there.
        if old.end() < size {
            self.zero_new(Span { at: old.end(), end: size.min(new.end()) }).await?;
        }
        if self.keeps_space {
            let space = self.disk.allocate(0, to).await;
            if space.is_err() && from < to {
                self.disk.set_len(from).await?;
            }
            space?;
        }
        Ok(())
    }

    async fn zero_new(&self, span: Span) -> Result<(), Reason> {
        let overhead = self.info.get().overhead as usize;
        let credit = self.memory.credit(overhead, Class::Immediate).await;
        let ctx = Ctx::new(credit.expect("a pool has a page"), Epoch::default());
        for step in span.steps(CLEAR_STEP) {
            self.zero(step, !self.keeps_space, &ctx).await.map_err(Reason::Failed)?;
        }
        Ok(())
    }
}

/// Deletes an image: removes the file, or wipes a device's label and frees its space. It must not
/// be open. With `force` it may hold anything.
///
/// # Errors
/// [`FileError`] names what is in the way.
pub async fn delete(
    core: &Core,
    path: &Path,
    volume: Uuid,
    buffered: bool,
    force: bool,
) -> Result<(), FileError> {
    let disk = core.open_disk(path, OpenOptions::new().buffered(buffered)).await?;
    let memory = core.pool().account();
    let deleted = async {
        if !force {
            let slots = Slots::read(&disk, &memory).await?;
            let found = labelled(&disk, &memory, &slots).await?.volume;
            if found != volume {
                return Err(Reason::OtherVolume { found, wanted: volume });
            }
        }
        match disk.info().kind {
            DiskKind::File => {
                let removed = core.remove_file(path).await;
                removed.map_err(|e| Reason::Remove(e.raw_os_error().unwrap_or_default()))
            }
            DiskKind::BlockDevice => wipe(&disk).await,
        }
    };
    deleted.await.map_err(|reason| reason.at(path))
}

/// The label of a file or device that nobody has open for writing.
///
/// # Errors
/// [`FileError`] names what is there instead.
pub async fn inspect(core: &Core, path: &Path, buffered: bool) -> Result<Label, FileError> {
    let options = OpenOptions::new().buffered(buffered).read_only(true);
    let disk = core.open_disk(path, options).await?;
    let memory = core.pool().account();
    let found = async {
        let slots = Slots::read(&disk, &memory).await?;
        labelled(&disk, &memory, &slots).await
    };
    found.await.map_err(|reason| reason.at(path))
}

/// Length of a file for a volume of `bytes`: whole pages, whatever disk it may be moved to.
fn file_length(bytes: u64) -> u64 {
    (DATA_OFFSET + bytes).next_multiple_of(PAGE)
}

fn check_size(how: &Create) -> Result<(), Reason> {
    if !matches!(how.block_size, 512 | 4096) {
        return Err(Reason::Size("blocks have 512 or 4096 bytes"));
    }
    how.bytes.map_or(Ok(()), |bytes| check_bytes(bytes, how.block_size))
}

fn check_bytes(bytes: u64, block_size: u32) -> Result<(), Reason> {
    if bytes == 0 || !bytes.is_multiple_of(u64::from(block_size)) {
        return Err(Reason::Size("the size is not a whole number of blocks"));
    }
    if bytes > MAX_BYTES {
        return Err(Reason::Size("the size is above 256 TiB"));
    }
    Ok(())
}

/// Takes back what a creation that failed has made: the file, or the space in it, or the labels of
/// a device, one of which may already say that it is usable.
async fn take_back(core: &Core, disk: &Disk, fresh: bool) {
    let path = disk.path();
    let taken = match (disk.info().kind, fresh) {
        (_, true) => core.remove_file(path).await.map_err(DiskError::from),
        (DiskKind::File, false) => empty(disk).await,
        (DiskKind::BlockDevice, false) => unlabel(disk).await,
    };
    if let Err(e) = taken {
        tracing::warn!(path = %path.display(), error = %e, "a half-made image is left behind");
    }
}

/// Empties a file. What it held can be used once that is durable: file systems with a journal keep it
/// until then.
async fn empty(disk: &Disk) -> Result<(), DiskError> {
    disk.set_len(0).await?;
    disk.sync().await
}

/// Makes sure that a file or device may be overwritten and is large enough; empties a file.
async fn prepare(disk: &Disk, memory: &Account, how: &Create) -> Result<(), Reason> {
    if !how.force {
        check_empty(disk, memory).await?;
    }
    let size = disk.info().size;
    match (disk.info().kind, how.bytes) {
        (DiskKind::File, None) => Err(Reason::Size("a file needs a size")),
        (DiskKind::File, Some(_)) => {
            empty(disk).await?;
            disk.set_len(DATA_OFFSET).await?;
            Ok(())
        }
        (DiskKind::BlockDevice, bytes) => {
            let needed = DATA_OFFSET + bytes.unwrap_or_else(|| u64::from(how.block_size));
            if size < needed {
                return Err(Reason::TooSmall { bytes: size, needed });
            }
            check_bytes(data_bytes(disk, how), how.block_size)
        }
    }
}

/// Size of the volume that is to be created on a disk that is large enough.
fn data_bytes(disk: &Disk, how: &Create) -> u64 {
    let block = u64::from(how.block_size);
    how.bytes.unwrap_or_else(|| (disk.info().size - DATA_OFFSET) / block * block)
}

/// Refuses whatever holds something.
async fn check_empty(disk: &Disk, memory: &Account) -> Result<(), Reason> {
    match Slots::read(disk, memory).await?.choose()? {
        // What a creation left that never ended may go; what somebody has put there since may not.
        Some(label) if label.state == State::Creating => {
            let known = match known_at_start(disk, memory, foreign::LOOK).await {
                // A creation that was cut off leaves sectors that cannot be read where its labels lie. Before
                // the second of them almost everything has its signature.
                Err(Reason::Disk(_)) => known_at_start(disk, memory, NEAR).await.unwrap_or(None),
                looked => looked?,
            };
            return known.map_or(Ok(()), |what| Err(Reason::Foreign(what)));
        }
        Some(label) => return Err(Reason::Labelled { volume: label.volume }),
        None => {}
    }
    if let Some(foreign) = look(disk, memory).await? {
        return Err(Reason::Foreign(foreign));
    }
    // In between there may be anything, unless there is no space for it.
    if disk.info().kind == DiskKind::File {
        let bytes = disk.allocated().await?;
        if bytes > 0 && disk.info().size > 2 * foreign::LOOK as u64 {
            return Err(Reason::Foreign(Foreign::Space { bytes }));
        }
    }
    Ok(())
}

/// What else a file or device without a label holds.
async fn look(disk: &Disk, memory: &Account) -> Result<Option<Foreign>, Reason> {
    let info = disk.info();
    let block = u64::from(info.logical_block);
    let whole = info.size / block * block;
    let look = (foreign::LOOK as u64).min(whole);
    let len = usize::try_from(look).expect("a megabyte");
    let head = slots::read(disk, memory, 0, len).await?;
    let tail = slots::read(disk, memory, whole - look, len).await?;
    // A file that ends within a block is nothing of ours, whatever it holds.
    let rest = (whole < info.size).then_some(Foreign::Unknown { at: whole });
    Ok(foreign::recognise(&head, &tail, whole).or(rest))
}

/// The label that counts, or what is there instead.
async fn labelled(disk: &Disk, memory: &Account, slots: &Slots) -> Result<Label, Reason> {
    match slots.choose()? {
        Some(label) => match overwriter(disk, memory, slots).await? {
            Some(what) => Err(Reason::Overwritten(what)),
            None => Ok(label),
        },
        None => Err(look(disk, memory).await?.map_or(Reason::NoLabel, Reason::NotAVolume)),
    }
}

/// A known format in the place of a lost copy of the label. Somebody uses the disk for something
/// else; repairing the copy would make that worse.
async fn overwriter(
    disk: &Disk,
    memory: &Account,
    slots: &Slots,
) -> Result<Option<Foreign>, Reason> {
    if !slots.0.contains(&Err(BadLabel::NoMagic)) {
        return Ok(None);
    }
    known_at_start(disk, memory, foreign::LOOK).await
}

/// What the first `bytes` of a disk are known to be, if they are another's.
async fn known_at_start(
    disk: &Disk,
    memory: &Account,
    bytes: usize,
) -> Result<Option<Foreign>, Reason> {
    let whole = disk.info().size / PAGE * PAGE;
    let len = usize::try_from(whole.min(bytes as u64)).expect("a megabyte");
    let head = slots::read(disk, memory, 0, len).await?;
    let found = foreign::recognise(&head, &[], disk.info().size);
    Ok(found.filter(|what| matches!(what, Foreign::Known(_))))
}

fn check_label(disk: &Disk, label: &Label, what: &Open) -> Result<(), Reason> {
    if label.volume != what.volume {
        return Err(Reason::OtherVolume { found: label.volume, wanted: what.volume });
    }
    if label.state == State::Creating {
        return Err(Reason::Unfinished);
    }
    if label.generation < what.generation {
        return Err(Reason::Outdated { found: label.generation, wanted: what.generation });
    }
    let info = disk.info();
    let needed = label.end().next_multiple_of(u64::from(info.logical_block));
    if info.size < needed {
        return Err(Reason::Shrunk { bytes: info.size, needed });
    }
    Ok(())
}

/// Makes both copies say `label`, durably.
async fn repair(disk: &Disk, memory: &Account, slots: &Slots, label: &Label) -> Result<(), Reason> {
    // Whoever wrote the copy that counts may have died before its sync: until it is durable the other one
    // must not be touched.
    slots::sync(disk).await.inspect_err(|e| {
        let disk = disk.path().display();
        tracing::error!(%disk, error = %e, "what was written last and never flushed may be lost");
    })?;
    for slot in slots.differing(label) {
        tracing::warn!(disk = %disk.path().display(), slot, "a copy of the label is repaired");
        slots::write(disk, memory, label, slot).await?;
    }
    Ok(())
}

/// Labels a prepared disk, puts space or zeroes behind the volume, and declares it usable.
async fn fill(core: &Core, disk: &Disk, memory: &Account, how: &Create) -> Result<Label, Reason> {
    let info = disk.info();
    let data_bytes = data_bytes(disk, how);
    let label = Label {
        generation: 1,
        intent_log: false,
        optional: 0,
        volume: how.volume,
        image: random_uuid(core),
        block_size: how.block_size,
        state: State::Creating,
        provisioning: how.provisioning,
        data_offset: DATA_OFFSET,
        data_bytes,
        created: core.wall_clock(),
    };
    if info.kind == DiskKind::BlockDevice {
        write_zeroes(disk, Span { at: 0, end: DATA_OFFSET }).await?;
    }
    // Until this is durable a file is no longer than what can be looked at whole: whoever finds it
    // after a crash sees that it holds nothing.
    slots::replace(disk, memory, &label, 0).await?;
    match info.kind {
        DiskKind::BlockDevice if how.keep_contents => {}
        DiskKind::BlockDevice => {
            let whole = label.end().next_multiple_of(u64::from(info.logical_block));
            clear(disk, Span { at: DATA_OFFSET, end: whole }).await?;
        }
        DiskKind::File => {
            let length = file_length(data_bytes);
            lengthen(disk, length).await?;
            if how.provisioning == Provisioning::Full {
                disk.allocate(0, length).await?;
            }
        }
    }
    disk.sync().await?;
    let label = Label { generation: 2, state: State::Active, ..label };
    slots::replace(disk, memory, &label, 0).await?;
    Ok(label)
}

async fn lengthen(disk: &Disk, bytes: u64) -> Result<(), Reason> {
    disk.set_len(bytes).await.map_err(|e| match e.kind {
        DiskErrorKind::PastEnd => Reason::Size("the file system has no files that large"),
        _ => e.into(),
    })
}

/// A random UUID (RFC 9562 5.4).
fn random_uuid(core: &Core) -> Uuid {
    let random = u128::from(core.random_u64()) << 64 | u128::from(core.random_u64());
    uuid::Builder::from_random_bytes(random.to_be_bytes()).into_uuid()
}

/// Takes the labels off a device.
async fn unlabel(disk: &Disk) -> Result<(), DiskError> {
    let size = disk.info().size;
    // A device that is deleted by force may be too small for labels.
    for at in SLOTS.into_iter().filter(|at| at + LABEL_BYTES as u64 <= size) {
        disk.write(at, Bufs::zeroes(LABEL_BYTES)).await?;
    }
    disk.sync().await
}

/// Takes the labels off a device and frees its space where that works.
async fn wipe(disk: &Disk) -> Result<(), Reason> {
    unlabel(disk).await?;
    // From here on it is deleted. Space that the device does not take back is its own affair.
    if let Err(e) = free(disk).await {
        let path = disk.path().display();
        tracing::warn!(%path, error = %e, "space of a deleted volume is not freed");
    }
    Ok(())
}

/// Frees all of a device where that works.
async fn free(disk: &Disk) -> Result<(), DiskError> {
    for step in (Span { at: 0, end: disk.info().size }).steps(CLEAR_STEP) {
        match disk.punch(step.at, step.len()).await {
            Err(e) if e.kind == DiskErrorKind::Unsupported => return Ok(()),
            result => result?,
        }
    }
    disk.sync().await
}

/// Whether the image gives space back, and the disk takes it.
async fn can_free(disk: &Disk, label: &Label) -> bool {
    label.provisioning == Provisioning::Thin && disk.punch(PROBE_AT, PAGE).await.is_ok()
}

/// Makes a span of whole blocks of the disk read as zeroes, without space where that works.
async fn clear(disk: &Disk, span: Span) -> Result<(), Reason> {
    for step in span.steps(CLEAR_STEP) {
        let done = match disk.punch(step.at, step.len()).await {
            Err(e) if e.kind == DiskErrorKind::Unsupported => disk.zero(step.at, step.len()).await,
            done => done,
        };
        match done {
            Err(e) if e.kind == DiskErrorKind::Unsupported => write_zeroes(disk, step).await?,
            done => done?,
        }
    }
    Ok(())
}

async fn write_zeroes(disk: &Disk, span: Span) -> Result<(), Reason> {
    for step in span.steps(ZERO_STEP) {
        let len = usize::try_from(step.len()).expect("a megabyte");
        disk.write(step.at, Bufs::zeroes(len)).await?;
    }
    Ok(())
}
