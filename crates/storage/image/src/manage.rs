//! Creating, opening, growing and deleting images.
//!
//! Everything is ordered so that a crash leaves either nothing that matters, or an image that
//! works, or one that says that its creation was never finished.

use std::path::Path;
use std::time::Duration;

use block::{Account, Bufs, Class, Ctx, Epoch};
use disk::slots::{self, Slots};
use disk::{
    CLEAR_STEP, Claim, DATA_OFFSET, Failure, FileError, Hold, LABEL_BYTES, Label, MAX_BYTES,
    Medium, Provisioning, Reason, SLOTS, Span, State, Subject, check_empty, check_free, clear,
    clear_records, labelled, whole_units, write_zeroes,
};
use rt::Core;
use rt::disk::{DiskError, DiskErrorKind, DiskKind, OpenError, OpenOptions, OpenReason};
use tokio::time::timeout;
use uuid::Uuid;

use super::{File, PAGE};
/// A page between the labels that is never used: freeing it shows whether space can be freed.
const PROBE_AT: u64 = 64 << 10;

/// How long a disk may take to be opened, to say what it holds, and to take a label.
const PATIENCE: Duration = Duration::from_secs(60);

/// What comes of it at the file or device at `path`, or that it does not answer. What is under way there goes on.
async fn in_time<T>(
    path: &Path,
    work: impl Future<Output = Result<T, FileError>>,
) -> Result<T, FileError> {
    timeout(PATIENCE, work).await.unwrap_or_else(|_| Err(Reason::Silent.at(path)))
}

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
    /// Who makes it, where other machines may reach its disk; none if the caller keeps them out.
    pub claim: Option<Claim>,
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
    /// Who opens it to write, where other machines may reach its disk; none if the caller keeps them out.
    pub claim: Option<Claim>,
}

impl File {
    /// Creates an image in a new file, or in a file or block device that holds nothing, and opens
    /// it. Durable when this returns.
    ///
    /// # Errors
    /// [`FileError`] names what is in the way. A file that was made for this is removed again.
    pub async fn create(core: &Core, path: &Path, how: &Create) -> Result<Self, FileError> {
        check_size(how).map_err(|reason| reason.at(path))?;
        let options = OpenOptions::new().buffered(how.buffered);
        let made = match how.bytes {
            Some(_) => core.open_disk(path, options.create(DATA_OFFSET)).await,
            None => Err(OpenError { path: path.to_owned(), reason: OpenReason::Exists }),
        };
        let medium = match made {
            Err(OpenError { reason: OpenReason::Exists, .. }) => {
                let opened = async { Ok(core.open_disk(path, options).await?) };
                Medium::from(in_time(path, opened).await?)
            }
            made => {
                let medium = made?.into();
                return Self::make(core, medium, core.pool().account(), how, true).await;
            }
        };
        let memory = core.pool().account();
        let prepared =
            async { prepare(core, &medium, &memory, how).await.map_err(|why| why.at(path)) };
        in_time(path, prepared).await?;
        Self::make(core, medium, memory, how, false).await
    }

    /// Creates an image on a medium that holds nothing, and opens it. Durable when this returns.
    /// A device of blocks has to be [`LABEL_AREA_BYTES`](disk::LABEL_AREA_BYTES) larger than the volume; what it reads as
    /// elsewhere is [told](Medium::of).
    ///
    /// # Errors
    /// [`FileError`] names what is in the way.
    pub async fn create_on(core: &Core, medium: Medium, how: &Create) -> Result<Self, FileError> {
        let memory = core.pool().account();
        let prepared = async {
            check_size(how)?;
            prepare(core, &medium, &memory, how).await
        };
        prepared.await.map_err(|reason| reason.at(medium.path()))?;
        Self::make(core, medium, memory, how, false).await
    }

    /// Makes an image of a prepared medium, a file that was made for it if `fresh`.
    async fn make(
        core: &Core,
        medium: Medium,
        memory: Account,
        how: &Create,
        fresh: bool,
    ) -> Result<Self, FileError> {
        let made = fill(core, &medium, &memory, how).await;
        // What another machine has claimed meanwhile is that one's.
        if !matches!(made, Ok(_) | Err(Reason::Held(_))) {
            let taken = timeout(PATIENCE, take_back(core, &medium, &memory, fresh));
            if taken.await.is_err() {
                tracing::warn!(path = %medium.path().display(), "it does not answer: a half-made image is left behind");
            }
        }
        let (label, hold) = made.map_err(|reason| reason.at(medium.path()))?;
        let can_free = can_free(&medium, &memory, &label).await;
        Ok(Self::new(medium, memory, label, can_free, hold))
    }

    /// Opens an image. One bad copy of its label is repaired.
    ///
    /// # Errors
    /// [`FileError`] names what is wrong with it.
    pub async fn open(core: &Core, path: &Path, what: &Open) -> Result<Self, FileError> {
        let options = OpenOptions::new().buffered(what.buffered).read_only(what.read_only);
        Self::open_on(core, core.open_disk(path, options).await?.into(), what).await
    }

    /// Opens an image on a medium; a disk has to be open as it is wanted.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub async fn open_on(core: &Core, medium: Medium, what: &Open) -> Result<Self, FileError> {
        let medium = medium.for_reading(what.read_only);
        let memory = core.pool().account();
        let opened = async {
            let slots = Slots::read(&medium, &memory).await?;
            let label = labelled(&medium, &memory, &slots).await?;
            check_label(&medium, &label, what)?;
            if what.read_only {
                return Ok((label, None));
            }
            let hold = hold(core, &medium, &memory, &label, what.claim).await?;
            // Its last owner may have changed it until it was claimed.
            let opened = async {
                let slots =
                    if hold.is_some() { Slots::read(&medium, &memory).await? } else { slots };
                let label = labelled(&medium, &memory, &slots).await?;
                check_label(&medium, &label, what)?;
                repair(&medium, &memory, &slots, &label).await?;
                Ok(label)
            };
            match opened.await {
                Ok(label) => Ok((label, hold)),
                Err(reason) => {
                    give_back(&medium, hold).await;
                    Err(reason)
                }
            }
        };
        let (label, hold) = opened.await.map_err(|reason: Reason| reason.at(medium.path()))?;
        let can_free = can_free(&medium, &memory, &label).await;
        Ok(Self::new(medium, memory, label, can_free, hold))
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

    /// Gives the image a new name of its own: whoever knows it by the old one, a mirror or its intent log, knows it no
    /// more, and nothing is taken for granted of what it holds. Durable when this returns.
    ///
    /// # Errors
    /// [`FileError`]
    pub async fn rename_image(&self, image: Uuid) -> Result<(), FileError> {
        let _alone = self.changing_label.lock().await;
        let generation = self.generation.get() + 1;
        let renamed = self.relabel(Label { image, generation, ..self.label.get() }).await;
        self.judge(renamed)
    }

    /// What a change of the label has come to. One that failed to sync ends the image.
    pub(super) fn judge(&self, changed: Result<(), Reason>) -> Result<(), FileError> {
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
        slots::replace(&self.medium, &self.memory, &new, 1).await?;
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
        let ctx = self.medium.ctx(&self.memory, 0).await;
        self.medium.sync(&ctx).await.inspect_err(|_| self.dead.set(true))?;
        drop(ctx);
        self.relabel(new).await?;
        let mut info = self.info.get();
        info.blocks = bytes / u64::from(new.block_size);
        self.info.set(info);
        Ok(())
    }

    /// Makes zeroes, and space where it is wanted, behind the old end. Never makes a file shorter
    /// than a label that a failed attempt may have left says.
    async fn make_room(&self, old: &Label, new: &Label) -> Result<(), Reason> {
        let size = self.medium.measure().await?;
        if self.medium.info().kind == DiskKind::BlockDevice {
            let needed = new.end().next_multiple_of(self.unit);
            if size < needed {
                return Err(Reason::TooSmall { bytes: size, needed });
            }
            if self.medium.is_clean() {
                return Ok(());
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
            lengthen(&self.medium, to).await?;
        }
        // What an attempt that was cut short, or somebody else, left there.
        if old.end() < size {
            self.zero_new(Span { at: old.end(), end: size.min(new.end()) }).await?;
        }
        if self.keeps_space {
            let space = self.medium.allocate(0, to).await;
            if space.is_err() && from < to {
                self.medium.set_len(from).await?;
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

/// Takes the disk that an image lies on for this machine.
async fn hold(
    core: &Core,
    medium: &Medium,
    memory: &Account,
    label: &Label,
    claim: Option<Claim>,
) -> Result<Option<Hold>, Reason> {
    let (Some(disk), Some(claim)) = (medium.disk(), claim) else { return Ok(None) };
    let subject = Subject { set: label.volume, part: label.image };
    Ok(Some(Hold::take(core, disk, memory, (subject, &claim), None).await?))
}

/// Gives the disk back that an image lies on, of which nothing is open.
async fn give_back(medium: &Medium, hold: Option<Hold>) {
    let Some(hold) = hold else { return };
    if let Err(error) = hold.release().await {
        let path = medium.path().display();
        tracing::warn!(%path, %error, "it is not noted that the image is closed: another node needs --take-over");
    }
}

/// Deletes an image: removes the file, or wipes a device's label and frees its space. It must not
/// be open, and with a `claim` not another machine's. With `force` it may hold anything.
///
/// # Errors
/// [`FileError`] names what is in the way.
pub async fn delete(
    core: &Core,
    path: &Path,
    volume: Uuid,
    (buffered, force): (bool, bool),
    claim: Option<Claim>,
) -> Result<(), FileError> {
    let disk = core.open_disk(path, OpenOptions::new().buffered(buffered)).await?;
    let medium = &Medium::from(disk);
    let memory = core.pool().account();
    let deleted = async {
        if !force {
            let slots = Slots::read(medium, &memory).await?;
            let found = labelled(medium, &memory, &slots).await?.volume;
            if found != volume {
                return Err(Reason::OtherVolume { found, wanted: volume });
            }
        }
        check_owner(core, medium, &memory, claim).await?;
        match medium.info().kind {
            DiskKind::File => {
                let removed = core.remove_file(path).await;
                removed.map_err(|e| Reason::Remove(e.raw_os_error().unwrap_or_default()))
            }
            DiskKind::BlockDevice => wipe(medium, &memory).await,
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
    inspect_on(core, &core.open_disk(path, options).await?.into()).await
}

/// The label of a medium.
///
/// # Errors
/// As [`inspect`].
pub async fn inspect_on(core: &Core, medium: &Medium) -> Result<Label, FileError> {
    let memory = core.pool().account();
    let found = async {
        let slots = Slots::read(medium, &memory).await?;
        labelled(medium, &memory, &slots).await
    };
    found.await.map_err(|reason| reason.at(medium.path()))
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
async fn take_back(core: &Core, medium: &Medium, memory: &Account, fresh: bool) {
    let path = medium.path();
    let taken = match (medium.info().kind, fresh) {
        (_, true) => core.remove_file(path).await.map_err(DiskError::from),
        (DiskKind::File, false) => empty(medium, memory).await.map_err(DiskError::from),
        (DiskKind::BlockDevice, false) => unlabel(medium, memory).await.map_err(DiskError::from),
    };
    if let Err(e) = taken {
        tracing::warn!(path = %path.display(), error = %e, "a half-made image is left behind");
    }
}

/// Empties a file. What it held can be used once that is durable: file systems with a journal keep it
/// until then.
async fn empty(medium: &Medium, memory: &Account) -> Result<(), Failure> {
    medium.set_len(0).await?;
    sync(medium, memory).await
}

async fn sync(medium: &Medium, memory: &Account) -> Result<(), Failure> {
    let ctx = medium.ctx(memory, 0).await;
    medium.sync(&ctx).await
}

/// Makes sure that a file or device may be overwritten and is large enough; empties a file.
async fn prepare(
    core: &Core,
    medium: &Medium,
    memory: &Account,
    how: &Create,
) -> Result<(), Reason> {
    let mut is_empty = false;
    if !how.force || medium.is_clean() {
        let checked = check_empty(medium, memory, how.keep_contents).await;
        is_empty = checked.is_ok();
        checked.or_else(|why| if how.force { Ok(()) } else { Err(why) })?;
    }
    // Whoever overwrites a disk on purpose takes it from its owner, but not while that one uses it.
    let claim = how.claim.map(|claim| Claim { take_over: claim.take_over || how.force, ..claim });
    check_owner(core, medium, memory, claim).await?;
    let size = medium.info().size;
    match (medium.info().kind, how.bytes) {
        (DiskKind::File, None) => Err(Reason::Size("a file needs a size")),
        (DiskKind::File, Some(_)) => {
            empty(medium, memory).await?;
            medium.set_len(DATA_OFFSET).await?;
            Ok(())
        }
        (DiskKind::BlockDevice, bytes) => {
            let needed = DATA_OFFSET + bytes.unwrap_or_else(|| u64::from(how.block_size));
            if size < needed {
                return Err(Reason::TooSmall { bytes: size, needed });
            }
            check_bytes(data_bytes(medium, how), how.block_size)?;
            if medium.is_clean() && !is_empty && !how.keep_contents {
                // While its old label is there, whoever finds it after a crash does not take it for clean.
                clear(medium, memory, Span { at: DATA_OFFSET, end: whole_units(medium) }).await?;
                sync(medium, memory).await?;
            }
            Ok(())
        }
    }
}

/// Refuses a disk that another machine has.
async fn check_owner(
    core: &Core,
    medium: &Medium,
    memory: &Account,
    claim: Option<Claim>,
) -> Result<(), Reason> {
    let (Some(disk), Some(claim)) = (medium.disk(), claim) else { return Ok(()) };
    Ok(check_free(core, disk, memory, &claim).await?)
}

/// Size of the volume that is to be created on a disk that is large enough.
fn data_bytes(medium: &Medium, how: &Create) -> u64 {
    let block = u64::from(how.block_size);
    how.bytes.unwrap_or_else(|| (medium.info().size - DATA_OFFSET) / block * block)
}

fn check_label(medium: &Medium, label: &Label, what: &Open) -> Result<(), Reason> {
    if label.volume != what.volume {
        return Err(Reason::OtherVolume { found: label.volume, wanted: what.volume });
    }
    if label.state == State::Creating {
        return Err(Reason::Unfinished);
    }
    if label.generation < what.generation {
        return Err(Reason::Outdated { found: label.generation, wanted: what.generation });
    }
    let info = medium.info();
    let needed = label.end().next_multiple_of(u64::from(info.logical_block));
    if info.size < needed {
        return Err(Reason::Shrunk { bytes: info.size, needed });
    }
    Ok(())
}

/// Makes both copies say `label`, durably.
async fn repair(
    medium: &Medium,
    memory: &Account,
    slots: &Slots,
    label: &Label,
) -> Result<(), Reason> {
    // Whoever wrote the copy that counts may have died before its sync: until it is durable the other one
    // must not be touched.
    slots::sync(medium, memory).await.inspect_err(|e| {
        let disk = medium.path().display();
        tracing::error!(%disk, error = %e, "what was written last and never flushed may be lost");
    })?;
    for slot in slots.differing(label) {
        tracing::warn!(disk = %medium.path().display(), slot, "a copy of the label is repaired");
        slots::write(medium, memory, label, slot).await?;
    }
    Ok(())
}

/// Labels a prepared disk, puts space or zeroes behind the volume, and declares it usable.
async fn fill(
    core: &Core,
    medium: &Medium,
    memory: &Account,
    how: &Create,
) -> Result<(Label, Option<Hold>), Reason> {
    let info = medium.info();
    let data_bytes = data_bytes(medium, how);
    let label = Label {
        generation: 1,
        intent_log: false,
        optional: 0,
        volume: how.volume,
        image: core.random_uuid(),
        block_size: how.block_size,
        state: State::Creating,
        provisioning: how.provisioning,
        data_offset: DATA_OFFSET,
        data_bytes,
        created: core.wall_clock(),
    };
    let labelled = async {
        if info.kind == DiskKind::BlockDevice {
            let ctx = medium.ctx(memory, 0).await;
            write_zeroes(medium, Span { at: 0, end: DATA_OFFSET }, &ctx).await?;
        }
        // Until this is durable a file is no longer than what can be looked at whole: whoever finds it
        // after a crash sees that it holds nothing.
        slots::replace(medium, memory, &label, 0).await?;
        Ok(())
    };
    timeout(PATIENCE, labelled).await.unwrap_or(Err(Reason::Silent))?;
    // From here on another machine that does the same finds this claim, or this one finds the other's.
    let claim = how.claim.map(|claim| Claim { take_over: claim.take_over || how.force, ..claim });
    let hold = hold(core, medium, memory, &label, claim).await?;
    match info.kind {
        DiskKind::BlockDevice if how.keep_contents || medium.is_clean() => {}
        DiskKind::BlockDevice => {
            let whole = label.end().next_multiple_of(u64::from(info.logical_block));
            clear(medium, memory, Span { at: DATA_OFFSET, end: whole }).await?;
        }
        DiskKind::File => {
            let length = file_length(data_bytes);
            lengthen(medium, length).await?;
            if how.provisioning == Provisioning::Full {
                medium.allocate(0, length).await?;
            }
        }
    }
    sync(medium, memory).await?;
    let label = Label { generation: 2, state: State::Active, ..label };
    slots::replace(medium, memory, &label, 0).await?;
    Ok((label, hold))
}

async fn lengthen(medium: &Medium, bytes: u64) -> Result<(), Reason> {
    let lengthened = medium.set_len(bytes).await.map_err(DiskError::from);
    lengthened.map_err(|e| match e.kind {
        DiskErrorKind::PastEnd => Reason::Size("the file system has no files that large"),
        _ => e.into(),
    })
}

/// Takes the labels off a device.
async fn unlabel(medium: &Medium, memory: &Account) -> Result<(), Failure> {
    let size = medium.info().size;
    let ctx = medium.ctx(memory, 0).await;
    // A device that is deleted by force may be too small for labels.
    for at in SLOTS.into_iter().filter(|at| at + LABEL_BYTES as u64 <= size) {
        medium.write(at, Bufs::zeroes(LABEL_BYTES), &ctx).await?;
    }
    if let Some(disk) = medium.disk().filter(|_| size >= DATA_OFFSET) {
        clear_records(disk, memory).await?;
    }
    medium.sync(&ctx).await
}

/// Takes the labels off a device and frees its space where that works.
async fn wipe(medium: &Medium, memory: &Account) -> Result<(), Reason> {
    unlabel(medium, memory).await?;
    // From here on it is deleted. Space that the device does not take back is its own affair.
    if let Err(e) = free(medium, memory).await {
        let path = medium.path().display();
        tracing::warn!(%path, error = %e, "space of a deleted volume is not freed");
    }
    Ok(())
}

/// Frees all of a device where that works.
async fn free(medium: &Medium, memory: &Account) -> Result<(), Failure> {
    let ctx = medium.ctx(memory, 0).await;
    for step in (Span { at: 0, end: medium.info().size }).steps(CLEAR_STEP) {
        match medium.punch(step.at, step.len(), &ctx).await {
            Err(e) if e.is_unsupported() => return Ok(()),
            result => result?,
        }
    }
    medium.sync(&ctx).await
}

/// Whether the image gives space back, and the disk takes it.
async fn can_free(medium: &Medium, memory: &Account, label: &Label) -> bool {
    if label.provisioning == Provisioning::Full {
        return false;
    }
    let ctx = medium.ctx(memory, 0).await;
    medium.punch(PROBE_AT, PAGE, &ctx).await.is_ok()
}
