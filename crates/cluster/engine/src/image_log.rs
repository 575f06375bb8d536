//! The intent log of an image.

use std::rc::Rc;

use image::FlatImage;
use intent_log::{IntentLog, LogDamage, LogError, LogOpenReport};
use rt::Core;
use uuid::Uuid;

use super::backing_error::BackingError;
use super::suspect_images::SuspectImages;

/// Creates the intent log of an image that has none.
pub(super) async fn create(core: &Core, file: &Rc<FlatImage>) -> Result<(), BackingError> {
    let refused = |e: LogError| log_error(file, &e);
    let log = IntentLog::create(core, file.log_area().await?).await.map_err(refused)?;
    log.close().await.map_err(|_| log_error(file, &LogError::Gone))
}

/// Opens the intent log of an image; creates it if the image is older than its node's cluster.
pub(super) async fn open(
    core: &Core,
    suspect_images: &SuspectImages,
    file: &Rc<FlatImage>,
) -> Result<(IntentLog, LogOpenReport), BackingError> {
    if !file.label().has_intent_log {
        create(core, file).await?;
    }
    let (path, image) = (file.path().display(), file.label().image_id);
    let area = file.log_area().await?;
    let suspect = suspect_images.is_marked(image).await;
    let boot = if suspect { Uuid::nil() } else { area.disk_session(core) };
    let opened = IntentLog::open(core, area, boot).await;
    let (log, found) = opened.map_err(|e| log_error(file, &e))?;
    if suspect {
        tracing::warn!(%path, "disk may have lost completed writes; image is suspect");
        if let Err(error) = suspect_images.clear(image).await {
            tracing::warn!(%path, %error, "cannot clear the suspect mark of an image");
        }
    }
    match found.damage {
        LogDamage::None => {}
        LogDamage::Cells(cells) => {
            tracing::warn!(%path, cells, "intent log partly damaged; resyncing more regions");
        }
        LogDamage::SuperblockLost => {
            tracing::error!(%path, "intent log lost; recreating it and resyncing everything");
        }
    }
    Ok((log, found))
}

fn log_error(file: &FlatImage, e: &LogError) -> BackingError {
    match e {
        LogError::Gone => BackingError::device_lost(file.path(), e),
        _ => BackingError::refused(format!("{}: {e}", file.path().display())),
    }
}
