//! Scans images: what an image's disk says about it, for images that no record names.

use std::fmt;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use api::{Backing, BlockSize, PoolName};
use disk::{ImageState, Provisioning};
use image::{self, FlatImage, OpenImageOptions};
use intent_log::{LogError, read_superblock};
use peer::NodeId;
use pool::{DiskInspection, PoolError};
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::Engine;
use super::backing::BackingHandle;
use super::backing_error::BackingError;
use super::core_engine::CoreEngine;
use super::pools::PoolAccess;
use records::record::image_description::ImageDescription;

/// The location of an image on this node.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ImageLocation {
    /// A file or a block device.
    Path(PathBuf),
    /// A volume of a pool.
    InPool(PoolName, Uuid),
}

/// What the intent log of an image says about the mirror that it was a replica of.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ScannedIntentLog {
    /// The image has no log: it was never a replica.
    #[serde(rename = "never")]
    Absent,
    /// The log cannot be read.
    #[serde(rename = "lost")]
    Unreadable(String),
    /// The configuration that the image adopted last.
    #[serde(rename = "has")]
    Present {
        /// Its epoch; 0 if none.
        epoch: u64,
        /// Its id.
        config: Uuid,
        /// The nodes in sync then, its own among them; empty if it was not in sync itself.
        in_sync: Vec<u16>,
    },
}

/// A scanned image.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ScannedImage {
    /// The volume whose data it holds.
    pub volume: Uuid,
    /// Its own id.
    #[serde(rename = "image")]
    pub id: Uuid,
    /// Generation of its label.
    pub generation: u64,
    /// Size of the volume, in bytes.
    pub size_bytes: u64,
    /// Size of a logical block.
    pub block_size: BlockSize,
    /// Whether space is allocated on write.
    pub thin: bool,
    /// Its part in a mirror.
    pub log: ScannedIntentLog,
    /// Its description of its volume.
    pub description: Option<ImageDescription>,
    /// Why the description cannot be read, if that is so.
    #[serde(rename = "undescribed")]
    pub description_error: Option<String>,
}

impl ImageLocation {
    /// The backing of an image here, as a record names it.
    #[must_use]
    pub fn backing(&self, device: bool) -> Backing {
        match self {
            Self::Path(path) if device => Backing::Device { path: path.clone() },
            Self::Path(path) => Backing::File { path: path.clone() },
            Self::InPool(pool, _) => Backing::Pool { pool: pool.clone() },
        }
    }

    /// Parses a location: an absolute path, or POOL/VOLUME.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        if text.starts_with('/') && !text.contains('\0') {
            return Some(Self::Path(text.into()));
        }
        let (pool, volume) = text.split_once('/')?;
        Some(Self::InPool(pool.parse().ok()?, volume.parse().ok()?))
    }
}

impl fmt::Display for ImageLocation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Path(path) => write!(f, "{}", path.display()),
            Self::InPool(pool, volume) => write!(f, "{pool}/{volume}"),
        }
    }
}

/// Scans an open image.
async fn scan_file(file: &Rc<FlatImage>) -> Result<ScannedImage, BackingError> {
    let label = file.label();
    let odd = || BackingError::refused(format!("{}: odd blocks", file.path().display()));
    let block_size = BlockSize::try_from(label.block_size).map_err(|_| odd())?;
    let log = match file.log_area().await {
        Err(_) => ScannedIntentLog::Absent,
        Ok(area) => match read_superblock(&*area).await {
            Err(LogError::NoLog) => ScannedIntentLog::Absent,
            Err(why) => ScannedIntentLog::Unreadable(why.to_string()),
            Ok(Err(why)) => ScannedIntentLog::Unreadable(why.to_string()),
            Ok(Ok(found)) => ScannedIntentLog::Present {
                epoch: found.adopted_epoch,
                config: found.config_id,
                in_sync: found
                    .in_sync_hint
                    .iter()
                    .flatten()
                    .filter_map(node_of)
                    .map(|n| n.0)
                    .collect(),
            },
        },
    };
    let described = match file.read_descriptor().await {
        Ok(None) => Ok(None),
        Ok(Some(found)) => ImageDescription::parse(&found.text).map(Some),
        Err(why) => Err(why.reason.to_string()),
    };
    Ok(ScannedImage {
        volume: label.volume_id,
        id: label.image_id,
        generation: label.generation,
        size_bytes: label.data_bytes,
        block_size,
        thin: label.provisioning == Provisioning::Thin,
        log,
        description_error: described.as_ref().err().cloned(),
        description: described.unwrap_or_default(),
    })
}

/// The node that a superblock names.
fn node_of(name: &Uuid) -> Option<NodeId> {
    u16::try_from(name.as_u128()).ok().filter(|n| *n > 0).map(NodeId)
}

impl CoreEngine {
    /// Opens an image that is not open, and runs `f` on it.
    async fn with_image<T>(
        &self,
        location: &ImageLocation,
        access: Option<PoolAccess>,
        read_only: bool,
        f: impl AsyncFnOnce(&Rc<FlatImage>) -> Result<T, BackingError>,
    ) -> Result<T, BackingError> {
        let buffered = self.is_buffered();
        match (location, access) {
            (ImageLocation::Path(path), _) => {
                let label = image::inspect(self.core(), path, buffered).await?;
                if label.state == ImageState::Creating {
                    let message = format!("{}: its creation was not completed", path.display());
                    return Err(BackingError::refused(message));
                }
                let (volume, generation) = (label.volume_id, label.generation);
                let claim = (!read_only).then(|| self.disk_claim());
                let what = OpenImageOptions {
                    volume_id: volume,
                    min_generation: generation,
                    allow_page_cache: buffered,
                    read_only,
                    claim,
                };
                f(&Rc::new(FlatImage::open(self.core(), path, &what).await?)).await
            }
            (ImageLocation::InPool(pool, volume), Some(access)) => {
                let core_pool = self.pools().attach(&access).await?;
                let name = Path::new(pool.as_str()).join(volume.to_string());
                let handle = BackingHandle::Pool { core_pool: &core_pool, name: &name };
                let volume = *volume;
                // The pool's own claims keep other machines away.
                let what = OpenImageOptions {
                    volume_id: volume,
                    min_generation: 0,
                    allow_page_cache: buffered,
                    read_only,
                    claim: None,
                };
                let done = match handle.open(self.core(), &what).await {
                    Ok(file) => f(&Rc::new(file)).await,
                    Err(e) => Err(e),
                };
                drop(core_pool);
                self.pools().detach(access.id()).await;
                done
            }
            (ImageLocation::InPool(pool, _), None) => {
                Err(BackingError::refused(format!("pool {pool} is not open")))
            }
        }
    }

    /// Scans the image of an open volume.
    async fn scan_open_image(&self, volume: Uuid) -> Result<ScannedImage, BackingError> {
        scan_file(&self.image_of(volume)?).await
    }
}

impl Engine {
    fn core_and_pool(
        &self,
        location: &ImageLocation,
    ) -> Result<(usize, Option<PoolAccess>), BackingError> {
        match location {
            ImageLocation::Path(_) => Ok((self.least_loaded(), None)),
            ImageLocation::InPool(pool, _) => {
                let entry = self.pool_entry(pool)?;
                Ok((self.least_loaded_for_pool(&entry), Some(entry.access)))
            }
        }
    }

    /// Scans an image that is not open.
    ///
    /// # Errors
    /// [`BackingError`] names what is there instead.
    pub async fn scan_image(&self, location: &ImageLocation) -> Result<ScannedImage, BackingError> {
        let (core, access) = self.core_and_pool(location)?;
        let location = location.clone();
        let find = move |k: Rc<CoreEngine>| async move {
            k.with_image(&location, access, true, async |file| scan_file(file).await).await
        };
        self.on_core(core, find).await?
    }

    /// Scans the image of an open volume.
    ///
    /// # Errors
    /// [`BackingError`].
    pub async fn scan_open_image(&self, volume: Uuid) -> Result<ScannedImage, BackingError> {
        self.on_core(self.core_of(volume)?, move |k| async move { k.scan_open_image(volume).await })
            .await?
    }

    /// Gives an image that is not open a new id, so that no mirror recognises it.
    ///
    /// # Errors
    /// [`BackingError`].
    pub async fn change_image_id(
        &self,
        location: &ImageLocation,
        name: Uuid,
    ) -> Result<(), BackingError> {
        let (core, access) = self.core_and_pool(location)?;
        let location = location.clone();
        let rename = move |k: Rc<CoreEngine>| async move {
            let rename = async |file: &Rc<FlatImage>| Ok(file.set_image_id(name).await?);
            k.with_image(&location, access, false, rename).await
        };
        self.on_core(core, rename).await?
    }

    /// Erases an image that is not open.
    ///
    /// # Errors
    /// [`BackingError`].
    pub async fn erase_image(
        &self,
        location: &ImageLocation,
        volume: Uuid,
    ) -> Result<(), BackingError> {
        let path = match location {
            ImageLocation::InPool(pool, id) => return self.delete_in_pool(pool, *id).await,
            ImageLocation::Path(path) => path.clone(),
        };
        let erase = move |k: Rc<CoreEngine>| async move {
            let buffered = k.is_buffered();
            Ok(image::delete(k.core(), &path, volume, (buffered, false), Some(k.disk_claim()))
                .await?)
        };
        self.on_core(self.least_loaded(), erase).await?
    }

    /// Writes `text` to the image of an open volume as its description.
    ///
    /// # Errors
    /// [`BackingError`].
    pub async fn write_description(&self, volume: Uuid, text: Vec<u8>) -> Result<(), BackingError> {
        self.on_core(
            self.core_of(volume)?,
            move |k| async move { k.write_description(volume, text) },
        )
        .await?
    }

    /// The pool disks at these paths, with the pools that their labels name.
    ///
    /// # Errors
    /// A core has stopped.
    pub async fn find_pool_disks(
        &self,
        paths: Vec<PathBuf>,
    ) -> Result<Vec<(PathBuf, Result<DiskInspection, PoolError>)>, BackingError> {
        let core = self.least_loaded();
        Ok(self.on_core(core, move |k| async move { k.pools().find_disks(paths).await }).await?)
    }
}
