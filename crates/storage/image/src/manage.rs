//! Creating, opening, growing and deleting images.
//!
//! Steps are ordered so that a crash leaves nothing of importance, a working image, or one whose
//! label says that its creation was not finished.

use std::path::Path;
use std::time::Duration;

use block::{Account, Bufs, Ctx, Epoch, MemoryClass};
use disk::label_copies::{self, LabelCopies};
use disk::{
    ByteRange, CLEAR_STEP_BYTES, ClaimRequest, ClaimSubject, DATA_OFFSET, DiskClaim, ImageError,
    ImageErrorReason, ImageLabel, ImageState, LABEL_BYTES, LABEL_OFFSETS, MAX_BYTES, Medium,
    MediumError, Provisioning, check_empty, check_unclaimed, clear_records, current_label,
    usable_bytes, write_zeroes, zero_range,
};
use rt::Core;
use rt::disk::{DiskError, DiskErrorKind, DiskKind, OpenError, OpenOptions, OpenReason};
use tokio::time::timeout;
use uuid::Uuid;

use super::{FlatImage, PAGE_BYTES};
/// A page between the labels that is never used: freeing it shows whether the medium can free
/// space.
const DISCARD_PROBE_OFFSET: u64 = 64 << 10;

/// How long a disk may take to be opened, to be examined, and to take a label.
const DISK_TIMEOUT: Duration = Duration::from_secs(60);

/// The outcome of `work` at the file or device at `path`, or [`ImageErrorReason::NotResponding`].
/// Requests in flight go on.
async fn with_disk_timeout<T>(
    path: &Path,
    work: impl Future<Output = Result<T, ImageError>>,
) -> Result<T, ImageError> {
    timeout(DISK_TIMEOUT, work)
        .await
        .unwrap_or_else(|_| Err(ImageErrorReason::NotResponding.at_path(path)))
}

/// The image to be created.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CreateImageOptions {
    /// Its volume.
    pub volume_id: Uuid,
    /// Size of a logical block in bytes: 512 or 4096.
    pub block_size: u32,
    /// Size of the volume in bytes, a multiple of the block size. `None`: as large as the device.
    pub size_bytes: Option<u64>,
    /// When its space is allocated.
    pub provisioning: Provisioning,
    /// Use the page cache where the file system has no direct I/O.
    pub allow_page_cache: bool,
    /// Overwrite existing contents.
    pub overwrite: bool,
    /// Keep a device's contents where the volume's data will be, instead of zeroing them.
    pub keep_contents: bool,
    /// The node that claims its disk, where other machines may reach it; `None` if the caller keeps
    /// them out.
    pub claim: Option<ClaimRequest>,
}

/// The image to be opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OpenImageOptions {
    /// The volume that it must hold.
    pub volume_id: Uuid,
    /// The label's generation when it was last seen, 0 if never: older ones are refused.
    pub min_generation: u64,
    /// Use the page cache where the file system has no direct I/O.
    pub allow_page_cache: bool,
    /// Open it read-only.
    pub read_only: bool,
    /// The node that claims its disk for writing, where other machines may reach it; `None` if the
    /// caller keeps them out.
    pub claim: Option<ClaimRequest>,
}

impl FlatImage {
    /// Creates an image in a new file, or in an empty file or block device, and opens it. Durable
    /// when this returns.
    ///
    /// # Errors
    /// [`ImageError`] says what is in the way. A file that was created for this is removed again.
    pub async fn create(
        core: &Core,
        path: &Path,
        how: &CreateImageOptions,
    ) -> Result<Self, ImageError> {
        check_size(how).map_err(|reason| reason.at_path(path))?;
        let options = OpenOptions::new().buffered(how.allow_page_cache);
        let made = match how.size_bytes {
            Some(_) => core.open_disk(path, options.create(DATA_OFFSET)).await,
            None => Err(OpenError { path: path.to_owned(), reason: OpenReason::Exists }),
        };
        let medium = match made {
            Err(OpenError { reason: OpenReason::Exists, .. }) => {
                let opened = async { Ok(core.open_disk(path, options).await?) };
                Medium::from(with_disk_timeout(path, opened).await?)
            }
            made => {
                let medium = made?.into();
                return Self::create_prepared(
                    core,
                    medium,
                    core.buffer_pool().account(),
                    how,
                    true,
                )
                .await;
            }
        };
        let memory = core.buffer_pool().account();
        let prepared =
            async { prepare(core, &medium, &memory, how).await.map_err(|why| why.at_path(path)) };
        with_disk_timeout(path, prepared).await?;
        Self::create_prepared(core, medium, memory, how, false).await
    }

    /// Creates an image on an empty medium, and opens it. Durable when this returns. A block device
    /// must be [`LABEL_AREA_BYTES`](disk::LABEL_AREA_BYTES) larger than the volume, and read as
    /// zeroes as [`Medium::from_dev`] says.
    ///
    /// # Errors
    /// [`ImageError`] says what is in the way.
    pub async fn create_on(
        core: &Core,
        medium: Medium,
        how: &CreateImageOptions,
    ) -> Result<Self, ImageError> {
        let memory = core.buffer_pool().account();
        let prepared = async {
            check_size(how)?;
            prepare(core, &medium, &memory, how).await
        };
        prepared.await.map_err(|reason| reason.at_path(medium.path()))?;
        Self::create_prepared(core, medium, memory, how, false).await
    }

    /// Creates an image on a prepared medium; `fresh` is a file that was created for it.
    async fn create_prepared(
        core: &Core,
        medium: Medium,
        memory: Account,
        how: &CreateImageOptions,
        fresh: bool,
    ) -> Result<Self, ImageError> {
        let created = initialize(core, &medium, &memory, how).await;
        // If another machine has claimed the disk meanwhile, it is left alone.
        if !matches!(created, Ok(_) | Err(ImageErrorReason::ClaimedElsewhere(_))) {
            let undone = timeout(DISK_TIMEOUT, undo_create(core, &medium, &memory, fresh));
            if undone.await.is_err() {
                tracing::warn!(path = %medium.path().display(), "the disk does not respond: an incomplete image remains");
            }
        }
        let (label, claim) = created.map_err(|reason| reason.at_path(medium.path()))?;
        let can_free = supports_discard(&medium, &memory, &label).await;
        Ok(Self::new(medium, memory, label, can_free, claim))
    }

    /// Opens an image. One damaged copy of its label is repaired.
    ///
    /// # Errors
    /// [`ImageError`] says what is wrong with it.
    pub async fn open(
        core: &Core,
        path: &Path,
        request: &OpenImageOptions,
    ) -> Result<Self, ImageError> {
        let options =
            OpenOptions::new().buffered(request.allow_page_cache).read_only(request.read_only);
        Self::open_on(core, core.open_disk(path, options).await?.into(), request).await
    }

    /// Opens an image on a medium; a disk must be opened accordingly.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub async fn open_on(
        core: &Core,
        medium: Medium,
        request: &OpenImageOptions,
    ) -> Result<Self, ImageError> {
        let medium = medium.with_read_only(request.read_only);
        let memory = core.buffer_pool().account();
        let opened = async {
            let copies = LabelCopies::read(&medium, &memory).await?;
            let label = current_label(&medium, &memory, &copies).await?;
            check_label(&medium, &label, request)?;
            if request.read_only {
                return Ok((label, None));
            }
            let claim = claim_disk(core, &medium, &memory, &label, request.claim).await?;
            // Its last owner may have changed it before it was claimed.
            let opened = async {
                let copies = if claim.is_some() {
                    LabelCopies::read(&medium, &memory).await?
                } else {
                    copies
                };
                let label = current_label(&medium, &memory, &copies).await?;
                check_label(&medium, &label, request)?;
                repair_labels(&medium, &memory, &copies, &label).await?;
                Ok(label)
            };
            match opened.await {
                Ok(label) => Ok((label, claim)),
                Err(reason) => {
                    release_claim(&medium, claim).await;
                    Err(reason)
                }
            }
        };
        let (label, claim) =
            opened.await.map_err(|reason: ImageErrorReason| reason.at_path(medium.path()))?;
        let can_free = supports_discard(&medium, &memory, &label).await;
        Ok(Self::new(medium, memory, label, can_free, claim))
    }

    /// Grows the volume to `bytes` bytes; the new blocks are zeroes. Does nothing if it has that
    /// size already. Works while the image is in use.
    ///
    /// # Errors
    /// [`ImageError`]; the volume keeps its old size then.
    pub async fn grow(&self, bytes: u64) -> Result<(), ImageError> {
        let _guard = self.label_lock.lock().await;
        let grown = self.grow_locked(bytes).await;
        self.note_label_result(grown)
    }

    /// Declares in the label that the image has an intent log: releases that do not know about
    /// logs refuse it from then on. Durable when this returns.
    ///
    /// # Errors
    /// [`ImageError`]
    pub(super) async fn declare_log(&self) -> Result<(), ImageError> {
        let _guard = self.label_lock.lock().await;
        let old = self.label.get();
        let new = ImageLabel {
            has_intent_log: true,
            generation: self.highest_generation.get() + 1,
            ..old
        };
        let declared = if old.has_intent_log { Ok(()) } else { self.replace_label(new).await };
        self.note_label_result(declared)
    }

    /// Gives the image a new identity: mirrors and intent logs that know it by the old one no
    /// longer recognise it, and assume nothing about its contents. Durable when this returns.
    ///
    /// # Errors
    /// [`ImageError`]
    pub async fn set_image_id(&self, image: Uuid) -> Result<(), ImageError> {
        let _guard = self.label_lock.lock().await;
        let generation = self.highest_generation.get() + 1;
        let renamed = self
            .replace_label(ImageLabel { image_id: image, generation, ..self.label.get() })
            .await;
        self.note_label_result(renamed)
    }

    /// Handles the result of a label change: a failed sync fails the image.
    pub(super) fn note_label_result(
        &self,
        changed: Result<(), ImageErrorReason>,
    ) -> Result<(), ImageError> {
        if let Err(ImageErrorReason::Disk(e)) = changed
            && e.kind == DiskErrorKind::Gone
        {
            self.is_failed.set(true);
        }
        changed.map_err(|reason| reason.at_path(self.path()))
    }

    /// Writes `new` as the label. The caller holds `label_lock`.
    async fn replace_label(&self, new: ImageLabel) -> Result<(), ImageErrorReason> {
        // A failed attempt may leave one copy with this generation: the next attempt takes a higher
        // one.
        self.highest_generation.set(new.generation);
        label_copies::replace_label(&self.medium, &self.memory, &new, 1).await?;
        self.label.set(new);
        Ok(())
    }

    async fn grow_locked(&self, bytes: u64) -> Result<(), ImageErrorReason> {
        let old = self.label.get();
        check_bytes(bytes, old.block_size)?;
        if bytes < old.data_bytes {
            return Err(ImageErrorReason::InvalidSize("a volume cannot become smaller"));
        }
        if bytes == old.data_bytes {
            return Ok(());
        }
        if old.has_intent_log {
            // Its log has no cells for the new blocks.
            return Err(ImageErrorReason::InvalidSize("a volume with an intent log cannot grow"));
        }
        let new =
            ImageLabel { data_bytes: bytes, generation: self.highest_generation.get() + 1, ..old };
        self.extend_storage(&old, &new).await?;
        let ctx = self.medium.ctx(&self.memory, 0).await;
        self.medium.sync(&ctx).await.inspect_err(|_| self.is_failed.set(true))?;
        drop(ctx);
        self.replace_label(new).await?;
        let mut info = self.info.get();
        info.blocks = bytes / u64::from(new.block_size);
        self.info.set(info);
        Ok(())
    }

    /// Provides zeroes after the old end, and allocated space if the image is thick. Never makes a
    /// file shorter than a label says that a failed attempt may have left.
    async fn extend_storage(
        &self,
        old: &ImageLabel,
        new: &ImageLabel,
    ) -> Result<(), ImageErrorReason> {
        let size = self.medium.current_size().await?;
        if self.medium.info().kind == DiskKind::BlockDevice {
            let needed = new.end_offset().next_multiple_of(self.io_unit);
            if size < needed {
                return Err(ImageErrorReason::TooSmall { bytes: size, needed });
            }
            if self.medium.is_prezeroed() {
                return Ok(());
            }
            return self
                .zero_new_range(ByteRange { start: old.end_offset(), end: new.end_offset() })
                .await;
        }
        if size < old.end_offset() {
            return Err(ImageErrorReason::Truncated { bytes: size, needed: old.end_offset() });
        }
        // Extend to whole pages first: a file that was appended to may end within a block, which
        // would not be accessible.
        let (from, to) = (size, file_length(new.data_bytes));
        if from < to {
            extend_file(&self.medium, to).await?;
        }
        // Leftovers of an interrupted attempt, or of another program.
        if old.end_offset() < size {
            self.zero_new_range(ByteRange {
                start: old.end_offset(),
                end: size.min(new.end_offset()),
            })
            .await?;
        }
        if self.is_thick {
            let space = self.medium.allocate(0, to).await;
            if space.is_err() && from < to {
                self.medium.set_len(from).await?;
            }
            space?;
        }
        Ok(())
    }

    async fn zero_new_range(&self, span: ByteRange) -> Result<(), ImageErrorReason> {
        let overhead = self.info.get().overhead_bytes as usize;
        let credit = self.memory.credit(overhead, MemoryClass::LocalIo).await;
        let ctx = Ctx::new(credit.expect("a pool has a page"), Epoch::default());
        for step in span.chunks(CLEAR_STEP_BYTES) {
            self.zero(step, !self.is_thick, &ctx).await.map_err(ImageErrorReason::ZeroingFailed)?;
        }
        Ok(())
    }
}

/// Claims the disk of an image for this machine.
async fn claim_disk(
    core: &Core,
    medium: &Medium,
    memory: &Account,
    label: &ImageLabel,
    claim: Option<ClaimRequest>,
) -> Result<Option<DiskClaim>, ImageErrorReason> {
    let (Some(disk), Some(claim)) = (medium.disk(), claim) else { return Ok(None) };
    let subject = ClaimSubject { set_id: label.volume_id, part_id: label.image_id };
    Ok(Some(DiskClaim::acquire(core, disk, memory, (subject, &claim), None).await?))
}

/// Releases the claim of a disk of which no image is open.
async fn release_claim(medium: &Medium, claim: Option<DiskClaim>) {
    let Some(claim) = claim else { return };
    if let Err(error) = claim.release().await {
        let path = medium.path().display();
        tracing::warn!(%path, %error, "the image was closed, but its owner record was not released: another node needs --take-over");
    }
}

/// Deletes an image: removes the file, or wipes a device's label and frees its space. It must not
/// be open, and, with a `claim`, not be claimed by another machine. With `force` it may hold
/// anything.
///
/// # Errors
/// [`ImageError`] says what is in the way.
pub async fn delete(
    core: &Core,
    path: &Path,
    volume: Uuid,
    (buffered, force): (bool, bool),
    claim: Option<ClaimRequest>,
) -> Result<(), ImageError> {
    let disk = core.open_disk(path, OpenOptions::new().buffered(buffered)).await?;
    let medium = &Medium::from(disk);
    let memory = core.buffer_pool().account();
    let deleted = async {
        if !force {
            let copies = LabelCopies::read(medium, &memory).await?;
            let found = current_label(medium, &memory, &copies).await?.volume_id;
            if found != volume {
                return Err(ImageErrorReason::WrongVolume { found, wanted: volume });
            }
        }
        check_owner(core, medium, &memory, claim).await?;
        match medium.info().kind {
            DiskKind::File => {
                let removed = core.remove_file(path).await;
                removed.map_err(|e| {
                    ImageErrorReason::RemoveFailed(e.raw_os_error().unwrap_or_default())
                })
            }
            DiskKind::BlockDevice => wipe(medium, &memory).await,
        }
    };
    deleted.await.map_err(|reason| reason.at_path(path))
}

/// Reads the label of a file or device that is not open for writing.
///
/// # Errors
/// [`ImageError`] says what is there instead.
pub async fn inspect(core: &Core, path: &Path, buffered: bool) -> Result<ImageLabel, ImageError> {
    let options = OpenOptions::new().buffered(buffered).read_only(true);
    inspect_on(core, &core.open_disk(path, options).await?.into()).await
}

/// Reads the label of a medium.
///
/// # Errors
/// As [`inspect`].
pub async fn inspect_on(core: &Core, medium: &Medium) -> Result<ImageLabel, ImageError> {
    let memory = core.buffer_pool().account();
    let found = async {
        let copies = LabelCopies::read(medium, &memory).await?;
        current_label(medium, &memory, &copies).await
    };
    found.await.map_err(|reason| reason.at_path(medium.path()))
}

/// Length of the file for a volume of `bytes`: whole pages, so that it fits any disk that it may be
/// moved to.
fn file_length(bytes: u64) -> u64 {
    (DATA_OFFSET + bytes).next_multiple_of(PAGE_BYTES)
}

fn check_size(how: &CreateImageOptions) -> Result<(), ImageErrorReason> {
    if !matches!(how.block_size, 512 | 4096) {
        return Err(ImageErrorReason::InvalidSize("blocks have 512 or 4096 bytes"));
    }
    how.size_bytes.map_or(Ok(()), |bytes| check_bytes(bytes, how.block_size))
}

fn check_bytes(bytes: u64, block_size: u32) -> Result<(), ImageErrorReason> {
    if bytes == 0 || !bytes.is_multiple_of(u64::from(block_size)) {
        return Err(ImageErrorReason::InvalidSize("the size is not a whole number of blocks"));
    }
    if bytes > MAX_BYTES {
        return Err(ImageErrorReason::InvalidSize("the size is above 256 TiB"));
    }
    Ok(())
}

/// Undoes a failed creation: removes the file, or frees its space, or erases the labels of a
/// device, one of which may say already that it is active.
async fn undo_create(core: &Core, medium: &Medium, memory: &Account, fresh: bool) {
    let path = medium.path();
    let undone = match (medium.info().kind, fresh) {
        (_, true) => core.remove_file(path).await.map_err(DiskError::from),
        (DiskKind::File, false) => truncate(medium, memory).await.map_err(DiskError::from),
        (DiskKind::BlockDevice, false) => {
            erase_labels(medium, memory).await.map_err(DiskError::from)
        }
    };
    if let Err(e) = undone {
        tracing::warn!(path = %path.display(), error = %e, "an incomplete image remains");
    }
}

/// Empties a file and syncs it: file systems with a journal keep its space in use until that is
/// durable.
async fn truncate(medium: &Medium, memory: &Account) -> Result<(), MediumError> {
    medium.set_len(0).await?;
    sync(medium, memory).await
}

async fn sync(medium: &Medium, memory: &Account) -> Result<(), MediumError> {
    let ctx = medium.ctx(memory, 0).await;
    medium.sync(&ctx).await
}

/// Checks that a file or device may be overwritten and is large enough; empties a file.
async fn prepare(
    core: &Core,
    medium: &Medium,
    memory: &Account,
    how: &CreateImageOptions,
) -> Result<(), ImageErrorReason> {
    let mut is_empty = false;
    if !how.overwrite || medium.is_prezeroed() {
        let checked = check_empty(medium, memory, how.keep_contents).await;
        is_empty = checked.is_ok();
        checked.or_else(|why| if how.overwrite { Ok(()) } else { Err(why) })?;
    }
    // An intended overwrite takes a disk from its owner, but not while that one uses it.
    let claim = how
        .claim
        .map(|claim| ClaimRequest { take_over: claim.take_over || how.overwrite, ..claim });
    check_owner(core, medium, memory, claim).await?;
    let size = medium.info().size;
    match (medium.info().kind, how.size_bytes) {
        (DiskKind::File, None) => Err(ImageErrorReason::InvalidSize("a file needs a size")),
        (DiskKind::File, Some(_)) => {
            truncate(medium, memory).await?;
            medium.set_len(DATA_OFFSET).await?;
            Ok(())
        }
        (DiskKind::BlockDevice, bytes) => {
            let needed = DATA_OFFSET + bytes.unwrap_or_else(|| u64::from(how.block_size));
            if size < needed {
                return Err(ImageErrorReason::TooSmall { bytes: size, needed });
            }
            check_bytes(volume_bytes(medium, how), how.block_size)?;
            if medium.is_prezeroed() && !is_empty && !how.keep_contents {
                // Zero it while the old label is still there: after a crash the device must not
                // pass for zeroed.
                zero_range(
                    medium,
                    memory,
                    ByteRange { start: DATA_OFFSET, end: usable_bytes(medium) },
                )
                .await?;
                sync(medium, memory).await?;
            }
            Ok(())
        }
    }
}

/// Refuses a disk that another machine has claimed.
async fn check_owner(
    core: &Core,
    medium: &Medium,
    memory: &Account,
    claim: Option<ClaimRequest>,
) -> Result<(), ImageErrorReason> {
    let (Some(disk), Some(claim)) = (medium.disk(), claim) else { return Ok(()) };
    Ok(check_unclaimed(core, disk, memory, &claim).await?)
}

/// Size of the volume to be created on a disk that is large enough.
fn volume_bytes(medium: &Medium, how: &CreateImageOptions) -> u64 {
    let block = u64::from(how.block_size);
    how.size_bytes.unwrap_or_else(|| (medium.info().size - DATA_OFFSET) / block * block)
}

fn check_label(
    medium: &Medium,
    label: &ImageLabel,
    request: &OpenImageOptions,
) -> Result<(), ImageErrorReason> {
    if label.volume_id != request.volume_id {
        return Err(ImageErrorReason::WrongVolume {
            found: label.volume_id,
            wanted: request.volume_id,
        });
    }
    if label.state == ImageState::Creating {
        return Err(ImageErrorReason::CreationUnfinished);
    }
    if label.generation < request.min_generation {
        return Err(ImageErrorReason::StaleCopy {
            found: label.generation,
            wanted: request.min_generation,
        });
    }
    let info = medium.info();
    let needed = label.end_offset().next_multiple_of(u64::from(info.logical_block));
    if info.size < needed {
        return Err(ImageErrorReason::Truncated { bytes: info.size, needed });
    }
    Ok(())
}

/// Writes `label` to the copies that differ, durably.
async fn repair_labels(
    medium: &Medium,
    memory: &Account,
    copies: &LabelCopies,
    label: &ImageLabel,
) -> Result<(), ImageErrorReason> {
    // The writer of the current copy may have crashed before its sync: until it is durable the
    // other copy must not be touched.
    label_copies::sync(medium, memory).await.inspect_err(|e| {
        let disk = medium.path().display();
        tracing::error!(%disk, error = %e, "the last unflushed writes may be lost");
    })?;
    for slot in copies.stale_copies(label) {
        tracing::warn!(disk = %medium.path().display(), slot, "repaired a copy of the label");
        label_copies::write_copy(medium, memory, label, slot).await?;
    }
    Ok(())
}

/// Labels a prepared disk, zeroes or allocates its space, and marks it as active.
async fn initialize(
    core: &Core,
    medium: &Medium,
    memory: &Account,
    how: &CreateImageOptions,
) -> Result<(ImageLabel, Option<DiskClaim>), ImageErrorReason> {
    let info = medium.info();
    let data_bytes = volume_bytes(medium, how);
    let label = ImageLabel {
        generation: 1,
        has_intent_log: false,
        optional_features: 0,
        volume_id: how.volume_id,
        image_id: core.random_uuid(),
        block_size: how.block_size,
        state: ImageState::Creating,
        provisioning: how.provisioning,
        data_offset: DATA_OFFSET,
        data_bytes,
        created: core.wall_clock(),
    };
    let labelled = async {
        if info.kind == DiskKind::BlockDevice {
            let ctx = medium.ctx(memory, 0).await;
            write_zeroes(medium, ByteRange { start: 0, end: DATA_OFFSET }, &ctx).await?;
        }
        // Until this is durable, a file is short enough to be examined completely: after a crash it
        // is recognised as empty.
        label_copies::replace_label(medium, memory, &label, 0).await?;
        Ok(())
    };
    timeout(DISK_TIMEOUT, labelled).await.unwrap_or(Err(ImageErrorReason::NotResponding))?;
    // From here on, if another machine does the same, one of the two finds the other's claim.
    let claim = how
        .claim
        .map(|claim| ClaimRequest { take_over: claim.take_over || how.overwrite, ..claim });
    let disk_claim = claim_disk(core, medium, memory, &label, claim).await?;
    match info.kind {
        DiskKind::BlockDevice if how.keep_contents || medium.is_prezeroed() => {}
        DiskKind::BlockDevice => {
            let whole = label.end_offset().next_multiple_of(u64::from(info.logical_block));
            zero_range(medium, memory, ByteRange { start: DATA_OFFSET, end: whole }).await?;
        }
        DiskKind::File => {
            let length = file_length(data_bytes);
            extend_file(medium, length).await?;
            if how.provisioning == Provisioning::Thick {
                medium.allocate(0, length).await?;
            }
        }
    }
    sync(medium, memory).await?;
    let label = ImageLabel { generation: 2, state: ImageState::Active, ..label };
    label_copies::replace_label(medium, memory, &label, 0).await?;
    Ok((label, disk_claim))
}

async fn extend_file(medium: &Medium, bytes: u64) -> Result<(), ImageErrorReason> {
    let lengthened = medium.set_len(bytes).await.map_err(DiskError::from);
    lengthened.map_err(|e| match e.kind {
        DiskErrorKind::PastEnd => {
            ImageErrorReason::InvalidSize("the file system does not support files of this size")
        }
        _ => e.into(),
    })
}

/// Erases the labels of a device.
async fn erase_labels(medium: &Medium, memory: &Account) -> Result<(), MediumError> {
    let size = medium.info().size;
    let ctx = medium.ctx(memory, 0).await;
    // A device that is deleted by force may be too small for labels.
    for at in LABEL_OFFSETS.into_iter().filter(|at| at + LABEL_BYTES as u64 <= size) {
        medium.write(at, Bufs::zeroes(LABEL_BYTES), &ctx).await?;
    }
    if let Some(disk) = medium.disk().filter(|_| size >= DATA_OFFSET) {
        clear_records(disk, memory).await?;
    }
    medium.sync(&ctx).await
}

/// Erases the labels of a device, and frees its space where that works.
async fn wipe(medium: &Medium, memory: &Account) -> Result<(), ImageErrorReason> {
    erase_labels(medium, memory).await?;
    // From here on it is deleted. If the device does not free the space, that is only logged.
    if let Err(e) = discard_all(medium, memory).await {
        let path = medium.path().display();
        tracing::warn!(%path, error = %e, "freeing the space of a deleted volume failed");
    }
    Ok(())
}

/// Frees all space of a device where that works.
async fn discard_all(medium: &Medium, memory: &Account) -> Result<(), MediumError> {
    let ctx = medium.ctx(memory, 0).await;
    for step in (ByteRange { start: 0, end: medium.info().size }).chunks(CLEAR_STEP_BYTES) {
        match medium.punch(step.start, step.len(), &ctx).await {
            Err(e) if e.is_unsupported() => return Ok(()),
            result => result?,
        }
    }
    medium.sync(&ctx).await
}

/// Whether the image frees space on unmap, and the disk can.
async fn supports_discard(medium: &Medium, memory: &Account, label: &ImageLabel) -> bool {
    if label.provisioning == Provisioning::Thick {
        return false;
    }
    let ctx = medium.ctx(memory, 0).await;
    medium.punch(DISCARD_PROBE_OFFSET, PAGE_BYTES, &ctx).await.is_ok()
}
