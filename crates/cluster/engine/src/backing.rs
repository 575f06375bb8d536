//! The images of volumes: in files, on block devices and in pools of disks.

use std::path::{Path, PathBuf};
use std::rc::{Rc, Weak};

use api::Backing;
use block::Dev;
use disk::{
    ClaimRefusal, ClaimRequest, ImageError, ImageErrorReason, ImageLabel, Medium, Provisioning,
};
use image::{self, CreateImageOptions, FlatImage, OpenImageOptions};
use mirror::{FreeBytesFuture, FreeSpace};
use pool::{CorePool, PoolError};
use rt::Core;
use rt::disk::OpenReason;
use uuid::Uuid;

use super::backing_error::BackingError;
use super::image_log;
use records::record::{ImageInfo, PlacementStage, ReplicaPlacement, VolumeRecord};

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
    if mirrored && let Err(e) = image_log::create(core, &file).await {
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
        let hint = "restore the file, or replace the replica (windrose volume mirror replace)";
        return Err(BackingError::refused(message).with_hint(Some(hint)));
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
