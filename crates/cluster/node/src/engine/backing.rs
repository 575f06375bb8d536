//! What volumes lie on: flat images in files, on block devices and in pools of disks.

use std::fmt::Display;
use std::path::{Path, PathBuf};
use std::rc::{Rc, Weak};

use api::{Backing, Code, PoolName};
use block::Dev;
use disk::{Claim, FileError, Label, Medium, Provisioning, Reason, Refusal};
use image::{self, Create, File, Open};
use mirror::{FreeBytes, FreeSpace};
use pool::{PoolError, PoolSeat};
use rt::Core;
use rt::disk::{DiskErrorKind, OpenReason};
use uuid::Uuid;

use super::mirrored;
use crate::record::{Place, PlaceStage, VolumeRecord};

/// Why a backing was refused or failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct BackingError {
    code: Code,
    message: String,
    /// The next step, where there is one.
    pub hint: Option<&'static str>,
    /// Whether the disk may have lost what it had completed: a sync has failed, or it is gone.
    pub(super) lost: bool,
    /// Whether another node has it, and a person may say that it is taken from that one.
    may_take_over: bool,
    /// Whether there may be an image there that cannot be read.
    pub(crate) is_unreadable: bool,
}

/// What is known of an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Image {
    /// Its own name.
    pub image: Uuid,
    /// Size of the volume in it, in bytes.
    pub size_bytes: u64,
    /// Number of its label; higher after every change of it.
    pub generation: u64,
}

impl BackingError {
    pub(crate) fn refused(message: impl Into<String>) -> Self {
        Self {
            code: Code::Backing,
            message: message.into(),
            hint: None,
            lost: false,
            may_take_over: false,
            is_unreadable: false,
        }
    }

    /// The same with the next step, where there is one.
    pub(crate) fn hinted(self, hint: Option<&'static str>) -> Self {
        Self { hint, ..self }
    }

    /// The image at `path` was given up while it was opened.
    pub(super) fn lost(path: &Path, why: &impl Display) -> Self {
        Self { lost: true, ..Self::refused(format!("{}: {why}", path.display())) }
    }

    /// What a pool refuses.
    pub(super) fn of_pool(pool: &PoolName, e: &PoolError) -> Self {
        let code = if e.is_no_space() { Code::NoSpace } else { Code::Backing };
        Self {
            code,
            message: format!("pool {pool}: {e}"),
            hint: e.hint(),
            lost: false,
            may_take_over: false,
            is_unreadable: false,
        }
    }

    /// What is wrong, where it is said already which pool it is about.
    pub(crate) fn of_that_pool(&self, pool: &PoolName) -> &str {
        let named = format!("pool {pool}: ");
        self.message.strip_prefix(&named).unwrap_or(&self.message)
    }

    /// The same with the command that takes the volume's image over, if that is what is in the way.
    fn of_volume(self, record: &VolumeRecord) -> Self {
        if !self.may_take_over {
            return self;
        }
        let (message, name) = (self.message, &record.name);
        let message = format!(
            "{message}; if that node will never use it again: windrose volume take-over {name}"
        );
        Self { message, ..self }
    }

    /// The kind of refusal, as the API tells it.
    #[must_use]
    pub fn code(&self) -> Code {
        self.code
    }
}

impl From<FileError> for BackingError {
    fn from(e: FileError) -> Self {
        let path = e.path.display();
        match e.reason {
            // The layer names a flag; here it is a setting of the node.
            Reason::Open(OpenReason::NoDirectIo) => Self {
                code: Code::Backing,
                message: format!("{path}: its file system has no direct I/O (O_DIRECT)"),
                hint: Some("set disks.buffered = true in the node's configuration to allow it"),
                lost: false,
                may_take_over: false,
                is_unreadable: false,
            },
            Reason::Disk(error) if error.kind == DiskErrorKind::Gone => {
                Self { lost: true, ..Self::refused(e.to_string()) }
            }
            Reason::Disk(error) if error.kind == DiskErrorKind::NoSpace => Self {
                code: Code::NoSpace,
                message: format!("{path}: there is not enough space"),
                hint: Some("free some space, or create a smaller or a thin volume"),
                lost: false,
                may_take_over: false,
                is_unreadable: false,
            },
            Reason::Open(OpenReason::PermissionDenied) => Self {
                code: Code::Backing,
                message: e.to_string(),
                hint: Some("the node's user needs to read and write it"),
                lost: false,
                may_take_over: false,
                is_unreadable: false,
            },
            Reason::Held(by) => {
                Self { may_take_over: by.may_take_over(), ..Self::refused(e.to_string()) }
            }
            Reason::Disk(_) | Reason::TornLabel | Reason::Overwritten(_) | Reason::BadLabel(_) => {
                Self { is_unreadable: true, ..Self::refused(e.to_string()) }
            }
            _ => Self::refused(e.to_string()),
        }
    }
}

/// Where an image lies, as its core reaches it.
pub(super) enum Ground<'a> {
    /// In a file or on a device of its own.
    Path(&'a Path),
    /// In a pool.
    Pool {
        /// The core's seat there.
        seat: &'a Rc<PoolSeat>,
        /// What the image is called in messages.
        name: &'a Path,
    },
}

impl Ground<'_> {
    /// The volume's part of a pool.
    async fn medium(seat: &PoolSeat, name: &Path, volume: Uuid) -> Result<Medium, BackingError> {
        let refused = |e: PoolError| {
            BackingError::refused(format!("{}: {e}", name.display())).hinted(e.hint())
        };
        seat.call(volume, &name.display().to_string());
        Ok(Medium::of(seat.open(volume).await.map_err(refused)?, name))
    }

    /// What tells how much space there is for more of an image there.
    pub(super) fn free_space(&self, core: &Core) -> Rc<dyn FreeSpace> {
        match *self {
            Self::Path(path) => Rc::new(FreeOnFileSystem { core: core.clone(), path: path.into() }),
            Self::Pool { seat, .. } => Rc::new(FreeInPool(Rc::downgrade(seat))),
        }
    }

    async fn create(&self, core: &Core, how: &Create) -> Result<File, BackingError> {
        Ok(match *self {
            Self::Path(path) => File::create(core, path, how).await?,
            Self::Pool { seat, name } => {
                let medium = Self::medium(seat, name, how.volume).await?;
                File::create_on(core, medium, how).await?
            }
        })
    }

    pub(super) async fn open(&self, core: &Core, what: &Open) -> Result<File, BackingError> {
        Ok(match *self {
            Self::Path(path) => File::open(core, path, what).await?,
            Self::Pool { seat, name } => {
                let medium = Self::medium(seat, name, what.volume).await?;
                File::open_on(core, medium, what).await?
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

/// The file system of an image.
#[derive(Debug)]
struct FreeOnFileSystem {
    core: Core,
    path: PathBuf,
}

impl FreeSpace for FreeOnFileSystem {
    fn free_bytes(&self) -> FreeBytes<'_> {
        let path = self.path.clone();
        let look = move || {
            // A device is its image's alone.
            let is_file = std::fs::metadata(&path).is_ok_and(|found| found.is_file());
            let space = rustix::fs::statvfs(&path).ok().filter(|_| is_file)?;
            Some(space.f_bavail.saturating_mul(space.f_frsize))
        };
        Box::pin(async move { self.core.offload(look).await.flatten() })
    }
}

/// The pool of an image, as long as anything of it is open here.
#[derive(Debug)]
struct FreeInPool(Weak<PoolSeat>);

impl FreeSpace for FreeInPool {
    fn free_bytes(&self) -> FreeBytes<'_> {
        let seat = self.0.upgrade();
        Box::pin(async move { seat?.free_bytes().await.ok() })
    }
}

/// How an image is to be made.
#[derive(Clone, Copy, Debug)]
pub(super) struct Making {
    /// Whether file systems without direct I/O may be used.
    pub(super) buffered: bool,
    /// Over whatever is there.
    pub(super) force: bool,
    /// Whether with an intent log.
    pub(super) mirrored: bool,
    /// For which node.
    pub(super) claim: Claim,
}

/// Makes the image of a new volume, with an intent log if it is `mirrored`. What was begun and failed
/// is taken back.
pub(super) async fn make(
    core: &Core,
    record: &VolumeRecord,
    place: &Place,
    ground: &Ground<'_>,
    how: Making,
) -> Result<Image, BackingError> {
    let Making { buffered, force, mirrored, claim } = how;
    let create = Create {
        volume: record.id,
        block_size: record.block_size.bytes(),
        bytes: (record.size_bytes > 0).then_some(record.size_bytes),
        provisioning: if record.thin { Provisioning::Thin } else { Provisioning::Full },
        buffered,
        force,
        keep_contents: false,
        claim: Some(claim),
    };
    let file = Rc::new(ground.create(core, &create).await?);
    if mirrored && let Err(e) = mirrored::make_log(core, &file).await {
        drop(file);
        erase(core, record, place, (buffered, claim)).await?;
        return Err(e);
    }
    Ok(image(file.label()))
}

fn image(label: Label) -> Image {
    Image { image: label.image, size_bytes: label.data_bytes, generation: label.generation }
}

/// Erases the image of a volume in a file or on a device: in a pool it goes with its part there. What holds something
/// else is left alone: it is not the volume's.
pub(super) async fn erase(
    core: &Core,
    record: &VolumeRecord,
    place: &Place,
    (buffered, claim): (bool, Claim),
) -> Result<(), BackingError> {
    let Some(path) = place.backing.path() else { return Ok(()) };
    // The name alone says whose it is, even before it has a label.
    let own = is_own_file(record.id, place);
    match image::delete(core, path, record.id, (buffered, own), Some(claim)).await {
        Ok(()) => Ok(()),
        Err(FileError { reason: Reason::Open(OpenReason::NotFound), .. }) => Ok(()),
        Err(e) if is_not_ours(&e.reason, place) => {
            tracing::warn!(volume = %record.name, "left alone: {e}");
            Ok(())
        }
        Err(e) => Err(e.into()),
    }
}

/// What the image of a volume is.
pub(super) async fn inspect(
    core: &Core,
    record: &VolumeRecord,
    place: &Place,
    ground: &Ground<'_>,
    buffered: bool,
) -> Result<Image, BackingError> {
    let label = match *ground {
        Ground::Path(path) => image::inspect(core, path, buffered).await?,
        Ground::Pool { .. } => {
            let (volume, generation) = (record.id, place.image_generation);
            ground
                .open(core, &Open { volume, generation, buffered, read_only: true, claim: None })
                .await?
                .label()
        }
    };
    if label.volume != record.id {
        let path = ground.name().display();
        return Err(BackingError::refused(format!("{path}: it is another volume's")));
    }
    Ok(image(label))
}

/// Whether there is nothing of the volume to erase.
fn is_not_ours(reason: &Reason, place: &Place) -> bool {
    match reason {
        Reason::NoLabel | Reason::NotAVolume(_) | Reason::OtherVolume { .. } => true,
        // Never begun, most likely for that very reason.
        Reason::TornLabel | Reason::BadLabel(_) | Reason::Open(_) => {
            matches!(place.stage, PlaceStage::Wanted { .. } | PlaceStage::Failed { .. })
        }
        _ => false,
    }
}

/// An open image.
pub(super) struct Backed {
    pub(super) file: Rc<File>,
}

/// Opens the image of a volume.
pub(super) async fn open(
    core: &Core,
    record: &VolumeRecord,
    place: &Place,
    ground: &Ground<'_>,
    (buffered, claim): (bool, Claim),
) -> Result<Backed, BackingError> {
    let (volume, generation, claim) = (record.id, place.image_generation, Some(claim));
    let what = Open { volume, generation, buffered, read_only: false, claim };
    let file = ground.open(core, &what).await.map_err(|e| e.of_volume(record))?;
    let file = Rc::new(file);
    let found = file.label().image;
    if let Some(image) = place.image.filter(|image| *image != found) {
        let path = ground.name().display();
        let message = format!("{path}: it is image {found}, the volume's on this node is {image}");
        return Err(BackingError {
            hint: Some(
                "put the file back, or have the copy replaced (windrose volume mirror replace)",
            ),
            ..BackingError::refused(message)
        });
    }
    if file.label().block_size != record.block_size.bytes() {
        let (path, found) = (ground.name().display(), file.label().block_size);
        let message = format!("{path}: its blocks have {found} bytes, the volume's have others");
        return Err(BackingError::refused(message));
    }
    Ok(Backed { file })
}

impl Backed {
    /// What a volume works on that only this node has.
    pub(super) fn dev(&self) -> Dev {
        Dev::shared(Rc::clone(&self.file))
    }

    /// Why it is used no more, if another machine has taken it.
    pub(super) fn lost(&self) -> Option<String> {
        let lost = self.file.lost()?;
        Some(format!("{}: it {}", self.file.path().display(), Refusal::Lost(lost.to)))
    }

    /// What is known of it.
    pub(super) fn image(&self) -> Image {
        image(self.file.label())
    }

    /// Makes it larger.
    pub(super) async fn grow(&self, size_bytes: u64) -> Result<Image, BackingError> {
        self.file.grow(size_bytes).await?;
        Ok(self.image())
    }
}

/// Whether a backing is a file that no other volume ever has.
fn is_own_file(volume: Uuid, place: &Place) -> bool {
    let Backing::File { path } = &place.backing else { return false };
    let name = path.file_name().and_then(|n| n.to_str()).unwrap_or_default();
    name.contains(&volume.to_string())
}
