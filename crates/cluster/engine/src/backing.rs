//! The images of volumes: in files, on block devices and in pools of disks.

use std::fmt::Display;
use std::path::{Path, PathBuf};
use std::rc::{Rc, Weak};

use api::{Backing, ErrorCode, PoolName};
use block::Dev;
use disk::{
    ClaimRefusal, ClaimRequest, ImageError, ImageErrorReason, ImageLabel, Medium, Provisioning,
};
use image::{self, CreateImageOptions, FlatImage, OpenImageOptions};
use mirror::{FreeBytesFuture, FreeSpace};
use pool::{CorePool, PoolError};
use rt::Core;
use rt::disk::{DiskErrorKind, OpenReason};
use uuid::Uuid;

use super::mirrored_volume;
use records::record::{ImageInfo, PlacementStage, ReplicaPlacement, VolumeRecord};

/// Why an operation on an image was refused or failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct BackingError {
    code: ErrorCode,
    message: String,
    /// The next step for the user, if there is one.
    pub hint: Option<&'static str>,
    /// Whether the disk may have lost completed writes: a sync failed, or the disk is gone.
    pub(super) device_lost: bool,
    /// Whether another node owns the image, and an operator may take it over from that node.
    can_take_over: bool,
    /// Whether an image that cannot be read may be there.
    pub is_unreadable: bool,
}

impl BackingError {
    /// The backing cannot be used, for the reason that `message` gives.
    pub fn refused(message: impl Into<String>) -> Self {
        Self {
            code: ErrorCode::Backing,
            message: message.into(),
            hint: None,
            device_lost: false,
            can_take_over: false,
            is_unreadable: false,
        }
    }

    /// The same error with this next step.
    pub fn with_hint(self, hint: Option<&'static str>) -> Self {
        Self { hint, ..self }
    }

    /// The disk of the image at `path` was lost while the image was opened.
    pub(super) fn device_lost(path: &Path, why: &impl Display) -> Self {
        Self { device_lost: true, ..Self::refused(format!("{}: {why}", path.display())) }
    }

    /// An error of a pool.
    pub(super) fn from_pool_error(pool: &PoolName, e: &PoolError) -> Self {
        let code = if e.is_no_space() { ErrorCode::NoSpace } else { ErrorCode::Backing };
        Self {
            code,
            message: format!("pool {pool}: {e}"),
            hint: e.hint(),
            device_lost: false,
            can_take_over: false,
            is_unreadable: false,
        }
    }

    /// The message without the name of the pool, for callers that name it themselves.
    pub fn message_without_pool(&self, pool: &PoolName) -> &str {
        let named = format!("pool {pool}: ");
        self.message.strip_prefix(&named).unwrap_or(&self.message)
    }

    /// The same error, naming the command that takes over the image if another node owns it.
    fn with_takeover_hint(self, record: &VolumeRecord) -> Self {
        if !self.can_take_over {
            return self;
        }
        let (message, name) = (self.message, &record.name);
        let message = format!(
            "{message}; if that node will never use it again: windrose volume take-over {name}"
        );
        Self { message, ..self }
    }

    /// The error code in the API.
    #[must_use]
    pub fn code(&self) -> ErrorCode {
        self.code
    }
}

impl From<ImageError> for BackingError {
    fn from(e: ImageError) -> Self {
        let path = e.path.display();
        match e.reason {
            // The lower layer names a flag; here it is a setting of the node.
            ImageErrorReason::Open(OpenReason::NoDirectIo) => Self {
                code: ErrorCode::Backing,
                message: format!("{path}: its file system has no direct I/O (O_DIRECT)"),
                hint: Some("set disks.buffered = true in the node's configuration to allow it"),
                device_lost: false,
                can_take_over: false,
                is_unreadable: false,
            },
            ImageErrorReason::Disk(error) if error.kind == DiskErrorKind::Gone => {
                Self { device_lost: true, ..Self::refused(e.to_string()) }
            }
            ImageErrorReason::Disk(error) if error.kind == DiskErrorKind::NoSpace => Self {
                code: ErrorCode::NoSpace,
                message: format!("{path}: there is not enough space"),
                hint: Some("free some space, or create a smaller or a thin volume"),
                device_lost: false,
                can_take_over: false,
                is_unreadable: false,
            },
            ImageErrorReason::Open(OpenReason::PermissionDenied) => Self {
                code: ErrorCode::Backing,
                message: e.to_string(),
                hint: Some("give the node's user permission to read and write it"),
                device_lost: false,
                can_take_over: false,
                is_unreadable: false,
            },
            ImageErrorReason::ClaimedElsewhere(by) => {
                Self { can_take_over: by.can_take_over(), ..Self::refused(e.to_string()) }
            }
            ImageErrorReason::Disk(_)
            | ImageErrorReason::BothLabelsDamaged
            | ImageErrorReason::Overwritten(_)
            | ImageErrorReason::InvalidLabel(_) => {
                Self { is_unreadable: true, ..Self::refused(e.to_string()) }
            }
            _ => Self::refused(e.to_string()),
        }
    }
}

/// Where an image lies, for the core that opens it.
pub(super) enum BackingHandle<'a> {
    /// In a file or on a device of its own.
    Path(&'a Path),
    /// In a pool.
    Pool {
        /// The core's attachment to the pool.
        core_pool: &'a Rc<CorePool>,
        /// What the image is called in messages.
        name: &'a Path,
    },
}

impl BackingHandle<'_> {
    /// The volume in a pool that holds the image.
    async fn pool_medium(
        core_pool: &CorePool,
        name: &Path,
        volume: Uuid,
    ) -> Result<Medium, BackingError> {
        let refused = |e: PoolError| {
            BackingError::refused(format!("{}: {e}", name.display())).with_hint(e.hint())
        };
        core_pool.set_volume_name(volume, &name.display().to_string());
        Ok(Medium::from_dev(core_pool.open_volume(volume).await.map_err(refused)?, name))
    }

    /// Reports how much space is left for the image to grow into.
    pub(super) fn free_space(&self, core: &Core) -> Rc<dyn FreeSpace> {
        match *self {
            Self::Path(path) => {
                Rc::new(FileSystemFreeSpace { core: core.clone(), path: path.into() })
            }
            Self::Pool { core_pool, .. } => Rc::new(PoolFreeSpace(Rc::downgrade(core_pool))),
        }
    }

    async fn create(
        &self,
        core: &Core,
        how: &CreateImageOptions,
    ) -> Result<FlatImage, BackingError> {
        Ok(match *self {
            Self::Path(path) => FlatImage::create(core, path, how).await?,
            Self::Pool { core_pool, name } => {
                let medium = Self::pool_medium(core_pool, name, how.volume_id).await?;
                FlatImage::create_on(core, medium, how).await?
            }
        })
    }

    pub(super) async fn open(
        &self,
        core: &Core,
        what: &OpenImageOptions,
    ) -> Result<FlatImage, BackingError> {
        Ok(match *self {
            Self::Path(path) => FlatImage::open(core, path, what).await?,
            Self::Pool { core_pool, name } => {
                let medium = Self::pool_medium(core_pool, name, what.volume_id).await?;
                FlatImage::open_on(core, medium, what).await?
            }
        })
    }

    fn name(&self) -> &Path {
        match *self {
            Self::Path(path) => path,
            Self::Pool { name, .. } => name,
        }
    }
}

/// Free space of the file system of an image.
#[derive(Debug)]
struct FileSystemFreeSpace {
    core: Core,
    path: PathBuf,
}

impl FreeSpace for FileSystemFreeSpace {
    fn free_bytes(&self) -> FreeBytesFuture<'_> {
        let path = self.path.clone();
        let look = move || {
            // A device has no space to share.
            let is_file = std::fs::metadata(&path).is_ok_and(|found| found.is_file());
            let space = rustix::fs::statvfs(&path).ok().filter(|_| is_file)?;
            Some(space.f_bavail.saturating_mul(space.f_frsize))
        };
        Box::pin(async move { self.core.run_blocking(look).await.flatten() })
    }
}

/// Free space of the pool of an image, while this core has a volume of that pool open.
#[derive(Debug)]
struct PoolFreeSpace(Weak<CorePool>);

impl FreeSpace for PoolFreeSpace {
    fn free_bytes(&self) -> FreeBytesFuture<'_> {
        let core_pool = self.0.upgrade();
        Box::pin(async move { core_pool?.free_bytes().await.ok() })
    }
}

/// How to create an image.
#[derive(Clone, Copy, Debug)]
pub(super) struct CreateOptions {
    /// Whether file systems without direct I/O may be used.
    pub(super) buffered: bool,
    /// Whether to overwrite what is there.
    pub(super) force: bool,
    /// Whether to create an intent log.
    pub(super) mirrored: bool,
    /// The claim of the node that owns it.
    pub(super) claim: ClaimRequest,
}

/// Creates the image of a new volume, with an intent log if it is `mirrored`. Removes a partly
/// created image if that fails.
pub(super) async fn create(
    core: &Core,
    record: &VolumeRecord,
    placement: &ReplicaPlacement,
    handle: &BackingHandle<'_>,
    how: CreateOptions,
) -> Result<ImageInfo, BackingError> {
    let CreateOptions { buffered, force, mirrored, claim } = how;
    let create = CreateImageOptions {
        volume_id: record.id,
        block_size: record.block_size.bytes(),
        size_bytes: (record.size_bytes > 0).then_some(record.size_bytes),
        provisioning: if record.thin { Provisioning::Thin } else { Provisioning::Thick },
        allow_page_cache: buffered,
        overwrite: force,
        keep_contents: false,
        claim: Some(claim),
    };
    let file = Rc::new(handle.create(core, &create).await?);
    if mirrored && let Err(e) = mirrored_volume::create_log(core, &file).await {
        drop(file);
        erase(core, record, placement, (buffered, claim)).await?;
        return Err(e);
    }
    Ok(image_info(file.label()))
}

fn image_info(label: ImageLabel) -> ImageInfo {
    ImageInfo { id: label.image_id, size_bytes: label.data_bytes, generation: label.generation }
}

/// Erases the image of a volume in a file or on a device; an image in a pool goes with its volume
/// in the pool. Leaves alone anything that does not belong to the volume.
pub(super) async fn erase(
    core: &Core,
    record: &VolumeRecord,
    placement: &ReplicaPlacement,
    (buffered, claim): (bool, ClaimRequest),
) -> Result<(), BackingError> {
    let Some(path) = placement.backing.path() else { return Ok(()) };
    // The name alone shows that the file is the volume's, even before it has a label.
    let own = is_named_after_volume(record.id, placement);
    match image::delete(core, path, record.id, (buffered, own), Some(claim)).await {
        Ok(()) => Ok(()),
        Err(ImageError { reason: ImageErrorReason::Open(OpenReason::NotFound), .. }) => Ok(()),
        Err(e) if holds_nothing_of_volume(&e.reason, placement) => {
            tracing::warn!(volume = %record.name, "not erased: {e}");
            Ok(())
        }
        Err(e) => Err(e.into()),
    }
}

/// Reads the identity of a volume's image.
pub(super) async fn inspect(
    core: &Core,
    record: &VolumeRecord,
    placement: &ReplicaPlacement,
    handle: &BackingHandle<'_>,
    buffered: bool,
) -> Result<ImageInfo, BackingError> {
    let label = match *handle {
        BackingHandle::Path(path) => image::inspect(core, path, buffered).await?,
        BackingHandle::Pool { .. } => {
            let (volume, generation) = (record.id, placement.image_generation);
            handle
                .open(
                    core,
                    &OpenImageOptions {
                        volume_id: volume,
                        min_generation: generation,
                        allow_page_cache: buffered,
                        read_only: true,
                        claim: None,
                    },
                )
                .await?
                .label()
        }
    };
    if label.volume_id != record.id {
        let path = handle.name().display();
        return Err(BackingError::refused(format!("{path}: it is the image of another volume")));
    }
    Ok(image_info(label))
}

/// Whether nothing of the volume is there to erase.
fn holds_nothing_of_volume(reason: &ImageErrorReason, placement: &ReplicaPlacement) -> bool {
    match reason {
        ImageErrorReason::NoLabel
        | ImageErrorReason::NotAVolume(_)
        | ImageErrorReason::WrongVolume { .. } => true,
        // Creating it probably failed for this very reason.
        ImageErrorReason::BothLabelsDamaged
        | ImageErrorReason::InvalidLabel(_)
        | ImageErrorReason::Open(_) => {
            matches!(
                placement.stage,
                PlacementStage::Creating { .. } | PlacementStage::Failed { .. }
            )
        }
        _ => false,
    }
}

/// An open image.
pub(super) struct OpenImage {
    pub(super) file: Rc<FlatImage>,
}

/// Opens the image of a volume.
pub(super) async fn open(
    core: &Core,
    record: &VolumeRecord,
    placement: &ReplicaPlacement,
    handle: &BackingHandle<'_>,
    (buffered, claim): (bool, ClaimRequest),
) -> Result<OpenImage, BackingError> {
    let (volume, generation, claim) = (record.id, placement.image_generation, Some(claim));
    let what = OpenImageOptions {
        volume_id: volume,
        min_generation: generation,
        allow_page_cache: buffered,
        read_only: false,
        claim,
    };
    let file = handle.open(core, &what).await.map_err(|e| e.with_takeover_hint(record))?;
    let file = Rc::new(file);
    let found = file.label().image_id;
    if let Some(image) = placement.image.filter(|image| *image != found) {
        let path = handle.name().display();
        let message =
            format!("{path}: it is image {found}, but the volume's image on this node is {image}");
        return Err(BackingError {
            hint: Some("restore the file, or replace the replica (windrose volume mirror replace)"),
            ..BackingError::refused(message)
        });
    }
    if file.label().block_size != record.block_size.bytes() {
        let (path, found) = (handle.name().display(), file.label().block_size);
        let message = format!("{path}: its blocks have {found} bytes, unlike the volume's");
        return Err(BackingError::refused(message));
    }
    Ok(OpenImage { file })
}

impl OpenImage {
    /// The device of a volume without a mirror.
    pub(super) fn dev(&self) -> Dev {
        Dev::shared(Rc::clone(&self.file))
    }

    /// Why it is no longer used, if another machine took it over.
    pub(super) fn claim_lost(&self) -> Option<String> {
        let lost = self.file.lost_claim()?;
        Some(format!(
            "{}: it {}",
            self.file.path().display(),
            ClaimRefusal::ClaimedByOther(lost.new_owner)
        ))
    }

    /// Its identity.
    pub(super) fn info(&self) -> ImageInfo {
        image_info(self.file.label())
    }

    /// Grows it.
    pub(super) async fn grow(&self, size_bytes: u64) -> Result<ImageInfo, BackingError> {
        self.file.grow(size_bytes).await?;
        Ok(self.info())
    }
}

/// Whether the backing is a file named after this volume, which no other volume can use.
fn is_named_after_volume(volume: Uuid, placement: &ReplicaPlacement) -> bool {
    let Backing::File { path } = &placement.backing else { return false };
    let name = path.file_name().and_then(|n| n.to_str()).unwrap_or_default();
    name.contains(&volume.to_string())
}
