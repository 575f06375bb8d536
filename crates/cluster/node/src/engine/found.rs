//! What an image is, as its disk tells: what is left to go by where no record names it.

use std::fmt;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use api::{Backing, BlockSize, PoolName};
use disk::{Provisioning, State};
use image::{self, File, Open};
use intent_log::{LogError, read_superblock};
use peer::NodeId;
use pool::{Inspected, PoolError};
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::Engine;
use super::backing::{BackingError, Ground};
use super::keeper::Keeper;
use super::pools::PoolDoor;
use crate::record::description::Description;

/// Where an image is on this node.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ImagePlace {
    /// A file or a block device.
    Path(PathBuf),
    /// A volume of a pool.
    InPool(PoolName, Uuid),
}

/// What the intent log of an image tells of the mirror that it was a copy of.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FoundLog {
    /// It has none: it was never a copy of a mirror.
    Never,
    /// It cannot be read: nobody knows.
    Lost(String),
    /// What the image has adopted last.
    Has {
        /// The epoch; 0 if none.
        epoch: u64,
        /// The configuration's name.
        config: Uuid,
        /// The numbers of the nodes in sync then, its own among them; nobody if it was not in sync itself.
        in_sync: Vec<u16>,
    },
}

/// An image, as its disk tells.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FoundImage {
    /// The volume whose data it holds.
    pub volume: Uuid,
    /// Its own name.
    pub image: Uuid,
    /// Number of its label.
    pub generation: u64,
    /// Size of the volume, in bytes.
    pub size_bytes: u64,
    /// Size of a logical block.
    pub block_size: BlockSize,
    /// Whether space is taken when it is written.
    pub thin: bool,
    /// What it was in a mirror.
    pub log: FoundLog,
    /// What it tells of its volume.
    pub description: Option<Description>,
    /// Why it tells nothing, if something is wrong.
    pub undescribed: Option<String>,
}

impl ImagePlace {
    /// What a record says of such a place.
    #[must_use]
    pub fn backing(&self, device: bool) -> Backing {
        match self {
            Self::Path(path) if device => Backing::Device { path: path.clone() },
            Self::Path(path) => Backing::File { path: path.clone() },
            Self::InPool(pool, _) => Backing::Pool { pool: pool.clone() },
        }
    }

    /// The place that somebody means by `text`: an absolute path, or POOL/VOLUME.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        if text.starts_with('/') && !text.contains('\0') {
            return Some(Self::Path(text.into()));
        }
        let (pool, volume) = text.split_once('/')?;
        Some(Self::InPool(pool.parse().ok()?, volume.parse().ok()?))
    }
}

impl fmt::Display for ImagePlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Path(path) => write!(f, "{}", path.display()),
            Self::InPool(pool, volume) => write!(f, "{pool}/{volume}"),
        }
    }
}

/// What an open image tells.
async fn look_at(file: &Rc<File>) -> Result<FoundImage, BackingError> {
    let label = file.label();
    let odd = || BackingError::refused(format!("{}: odd blocks", file.path().display()));
    let block_size = BlockSize::try_from(label.block_size).map_err(|_| odd())?;
    let log = match file.log_area().await {
        Err(_) => FoundLog::Never,
        Ok(area) => match read_superblock(&*area).await {
            Err(LogError::Absent) => FoundLog::Never,
            Err(why) => FoundLog::Lost(why.to_string()),
            Ok(Err(why)) => FoundLog::Lost(why.to_string()),
            Ok(Ok(found)) => FoundLog::Has {
                epoch: found.epoch,
                config: found.config,
                in_sync: found.hint.iter().flatten().filter_map(node_of).map(|n| n.0).collect(),
            },
        },
    };
    let described = match file.descriptor().await {
        Ok(None) => Ok(None),
        Ok(Some(found)) => Description::parse(&found.text).map(Some),
        Err(why) => Err(why.reason.to_string()),
    };
    Ok(FoundImage {
        volume: label.volume,
        image: label.image,
        generation: label.generation,
        size_bytes: label.data_bytes,
        block_size,
        thin: label.provisioning == Provisioning::Thin,
        log,
        undescribed: described.as_ref().err().cloned(),
        description: described.unwrap_or_default(),
    })
}

/// The node that a superblock remembers.
fn node_of(name: &Uuid) -> Option<NodeId> {
    u16::try_from(name.as_u128()).ok().filter(|n| *n > 0).map(NodeId)
}

impl Keeper {
    /// Opens an image that nobody has open, and does something with it.
    async fn with_image<T>(
        &self,
        place: &ImagePlace,
        door: Option<PoolDoor>,
        read_only: bool,
        f: impl AsyncFnOnce(&Rc<File>) -> Result<T, BackingError>,
    ) -> Result<T, BackingError> {
        let buffered = self.is_buffered();
        match (place, door) {
            (ImagePlace::Path(path), _) => {
                let label = image::inspect(self.core(), path, buffered).await?;
                if label.state == State::Creating {
                    let message = format!("{}: its creation was never finished", path.display());
                    return Err(BackingError::refused(message));
                }
                let (volume, generation) = (label.volume, label.generation);
                let claim = (!read_only).then(|| self.disk_claim());
                let what = Open { volume, generation, buffered, read_only, claim };
                f(&Rc::new(File::open(self.core(), path, &what).await?)).await
            }
            (ImagePlace::InPool(pool, volume), Some(door)) => {
                let seat = self.pools().sit(&door).await?;
                let name = Path::new(pool.as_str()).join(volume.to_string());
                let ground = Ground::Pool { seat: &seat, name: &name };
                let volume = *volume;
                // The pool keeps other machines out.
                let what = Open { volume, generation: 0, buffered, read_only, claim: None };
                let done = match ground.open(self.core(), &what).await {
                    Ok(file) => f(&Rc::new(file)).await,
                    Err(e) => Err(e),
                };
                drop(seat);
                self.pools().rise(door.id()).await;
                done
            }
            (ImagePlace::InPool(pool, _), None) => {
                Err(BackingError::refused(format!("pool {pool} is not open")))
            }
        }
    }

    /// What an image of an open volume tells.
    async fn look_at_open(&self, volume: Uuid) -> Result<FoundImage, BackingError> {
        look_at(&self.image_of(volume)?).await
    }
}

impl Engine {
    fn door_to(&self, place: &ImagePlace) -> Result<(usize, Option<PoolDoor>), BackingError> {
        match place {
            ImagePlace::Path(_) => Ok((self.least_loaded(), None)),
            ImagePlace::InPool(pool, _) => {
                let home = self.pool_home(pool)?;
                Ok((self.least_loaded_of(&home), Some(home.door)))
            }
        }
    }

    /// What an image tells that nobody has open.
    ///
    /// # Errors
    /// [`BackingError`] says what is there instead.
    pub async fn find_image(&self, place: &ImagePlace) -> Result<FoundImage, BackingError> {
        let (core, door) = self.door_to(place)?;
        let place = place.clone();
        let find = move |k: Rc<Keeper>| async move {
            k.with_image(&place, door, true, async |file| look_at(file).await).await
        };
        self.on(core, find).await?
    }

    /// What the image of an open volume tells.
    ///
    /// # Errors
    /// [`BackingError`].
    pub async fn find_open_image(&self, volume: Uuid) -> Result<FoundImage, BackingError> {
        self.on(self.home(volume)?, move |k| async move { k.look_at_open(volume).await }).await?
    }

    /// Gives an image that nobody has open a new name of its own, so that no mirror knows it any more.
    ///
    /// # Errors
    /// [`BackingError`].
    pub async fn rename_image(&self, place: &ImagePlace, name: Uuid) -> Result<(), BackingError> {
        let (core, door) = self.door_to(place)?;
        let place = place.clone();
        let rename = move |k: Rc<Keeper>| async move {
            let rename = async |file: &Rc<File>| Ok(file.rename_image(name).await?);
            k.with_image(&place, door, false, rename).await
        };
        self.on(core, rename).await?
    }

    /// Erases an image that nobody has open.
    ///
    /// # Errors
    /// [`BackingError`].
    pub async fn erase_image(&self, place: &ImagePlace, volume: Uuid) -> Result<(), BackingError> {
        let path = match place {
            ImagePlace::InPool(pool, id) => return self.delete_in_pool(pool, *id).await,
            ImagePlace::Path(path) => path.clone(),
        };
        let erase = move |k: Rc<Keeper>| async move {
            let buffered = k.is_buffered();
            Ok(image::delete(k.core(), &path, volume, (buffered, false), Some(k.disk_claim()))
                .await?)
        };
        self.on(self.least_loaded(), erase).await?
    }

    /// Has the image of an open volume tell `text` of it.
    ///
    /// # Errors
    /// [`BackingError`].
    pub async fn describe(&self, volume: Uuid, text: Vec<u8>) -> Result<(), BackingError> {
        self.on(self.home(volume)?, move |k| async move { k.describe(volume, text) }).await?
    }

    /// The disks of pools at these paths, and of which pools they say they are.
    ///
    /// # Errors
    /// A core has stopped.
    pub async fn find_pool_disks(
        &self,
        paths: Vec<PathBuf>,
    ) -> Result<Vec<(PathBuf, Result<Inspected, PoolError>)>, BackingError> {
        let core = self.least_loaded();
        Ok(self.on(core, move |k| async move { k.pools().find_disks(paths).await }).await?)
    }
}
