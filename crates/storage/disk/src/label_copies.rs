//! The two copies of a label on a disk: reading, choosing and replacing them.
//!
//! A label is replaced by writing one copy, syncing, then writing the other, and syncing again. An
//! interruption leaves at least one intact copy, of the old label or the new one, and the one with
//! the higher generation is current.

use rt::buf::{Account, copy_in};
use rt::disk::{DiskError, DiskErrorKind};

use crate::error::ImageErrorReason;
use crate::label::{ImageLabel, ImageLabelError, LABEL_BYTES, LABEL_OFFSETS};
use crate::medium::Medium;

/// The labels read from the two copies.
#[derive(Debug)]
pub struct LabelCopies(pub [Result<ImageLabel, ImageLabelError>; 2]);

impl LabelCopies {
    /// Reads both copies. One that cannot be read is damaged; one after the end of the disk does
    /// not exist.
    pub async fn read(medium: &Medium, memory: &Account) -> Result<Self, ImageErrorReason> {
        let mut found = [Err(ImageLabelError::NoMagic); 2];
        let mut last_error = None;
        for ((slot, at), found) in (0u16..).zip(LABEL_OFFSETS).zip(&mut found) {
            if at + LABEL_BYTES as u64 > medium.info().size {
                continue;
            }
            *found = match medium.read_bytes(memory, at, LABEL_BYTES).await {
                Ok(bytes) => {
                    let bytes: Box<[u8; LABEL_BYTES]> =
                        bytes.try_into().expect("as long as it was asked for");
                    ImageLabel::parse(&bytes, slot)
                }
                Err(e) => {
                    tracing::warn!(disk = %medium.path().display(), slot, error = %e, "label unreadable");
                    last_error = Some(e);
                    Err(ImageLabelError::Damaged)
                }
            };
        }
        match (last_error, &found) {
            // Neither copy is known.
            (Some(e), [Err(_), Err(_)]) => Err(e.into()),
            _ => Ok(Self(found)),
        }
    }

    /// The current label; `None` if there is none.
    pub fn newest_valid(&self) -> Result<Option<ImageLabel>, ImageErrorReason> {
        let newest = self.0.iter().filter_map(|s| s.as_ref().ok()).max_by_key(|l| l.generation);
        let strange = self.0.iter().filter_map(|s| s.as_ref().err()).find(|e| {
            matches!(
                e,
                ImageLabelError::UnsupportedVersion(_)
                    | ImageLabelError::UnsupportedFeatures(_)
                    | ImageLabelError::InvalidField(_)
            )
        });
        match (newest, strange, &self.0) {
            // An intact label that this release does not understand may be newer than the other.
            (_, Some(strange), _) => Err(ImageErrorReason::InvalidLabel(*strange)),
            (Some(label), None, _) => Ok(Some(*label)),
            (None, None, [Err(ImageLabelError::NoMagic), Err(ImageLabelError::NoMagic)]) => {
                Ok(None)
            }
            (None, None, _) => Err(ImageErrorReason::BothLabelsDamaged),
        }
    }

    /// The copies that differ from `label`; the older or damaged one comes first and is written
    /// first.
    pub fn stale_copies(&self, label: &ImageLabel) -> impl Iterator<Item = u16> {
        let mut differing: Vec<(u64, u16)> = (self.0.iter().zip(0u16..))
            .filter(|(found, _)| found.as_ref() != Ok(label))
            .map(|(found, slot)| (found.as_ref().map_or(0, |l| l.generation), slot))
            .collect();
        differing.sort_unstable();
        differing.into_iter().map(|(_, slot)| slot)
    }
}

/// Writes both copies of `label`, one after the other. `first` is the copy to begin with, the one
/// that may be lost.
pub async fn replace_label(
    medium: &Medium,
    memory: &Account,
    label: &ImageLabel,
    first: u16,
) -> Result<(), DiskError> {
    write_copy(medium, memory, label, first).await?;
    write_copy(medium, memory, label, 1 - first).await
}

/// Writes one copy durably. See [`sync`] for failures.
pub async fn write_copy(
    medium: &Medium,
    memory: &Account,
    label: &ImageLabel,
    slot: u16,
) -> Result<(), DiskError> {
    let bytes = label.to_bytes(slot);
    let ctx = medium.ctx(memory, LABEL_BYTES).await;
    let data = copy_in(ctx.credit(), &bytes);
    medium.write(LABEL_OFFSETS[usize::from(slot)], data, &ctx).await?;
    sync(medium, memory).await
}

/// Makes earlier writes durable. A failure is reported as [`DiskErrorKind::Gone`]: the disk must
/// not be used any more.
pub async fn sync(medium: &Medium, memory: &Account) -> Result<(), DiskError> {
    let ctx = medium.ctx(memory, 0).await;
    let synced = medium.sync(&ctx).await.map_err(DiskError::from);
    synced.map_err(|e| DiskError { kind: DiskErrorKind::Gone, ..e })
}
