//! The two copies of a label on a disk: read, chosen, and replaced one after the other.
//!
//! A label is replaced by writing one copy, syncing, then writing the other, and syncing again. Whenever
//! that is cut short one whole copy is left, the old label or the new one, and the one with the
//! higher generation counts.

use rt::buf::{Account, copy_in};
use rt::disk::{DiskError, DiskErrorKind};

use crate::error::Reason;
use crate::label::{BadLabel, LABEL_BYTES, Label, SLOTS};
use crate::medium::Medium;

/// What the two places hold.
#[derive(Debug)]
pub struct Slots(pub [Result<Label, BadLabel>; 2]);

impl Slots {
    /// Reads both. A place that cannot be read, or that lies behind the end, counts as damaged.
    pub async fn read(medium: &Medium, memory: &Account) -> Result<Self, Reason> {
        let mut found = [Err(BadLabel::NoMagic); 2];
        let mut last_error = None;
        for ((slot, at), found) in (0u16..).zip(SLOTS).zip(&mut found) {
            if at + LABEL_BYTES as u64 > medium.info().size {
                continue;
            }
            *found = match read(medium, memory, at, LABEL_BYTES).await {
                Ok(bytes) => {
                    let bytes: Box<[u8; LABEL_BYTES]> =
                        bytes.try_into().expect("as long as it was asked for");
                    Label::parse(&bytes, slot)
                }
                Err(e) => {
                    tracing::warn!(disk = %medium.path().display(), slot, error = %e, "label unreadable");
                    last_error = Some(e);
                    Err(BadLabel::Damaged)
                }
            };
        }
        match (last_error, &found) {
            // Nothing can be said about what is there.
            (Some(e), [Err(_), Err(_)]) => Err(e.into()),
            _ => Ok(Self(found)),
        }
    }

    /// The label that counts; `None` where there is none.
    pub fn choose(&self) -> Result<Option<Label>, Reason> {
        let newest = self.0.iter().filter_map(|s| s.as_ref().ok()).max_by_key(|l| l.generation);
        let strange = self.0.iter().filter_map(|s| s.as_ref().err()).find(|e| {
            matches!(e, BadLabel::Version(_) | BadLabel::Features(_) | BadLabel::Field(_))
        });
        match (newest, strange, &self.0) {
            // A whole label that we do not understand may be newer than the one we do.
            (_, Some(strange), _) => Err(Reason::BadLabel(*strange)),
            (Some(label), None, _) => Ok(Some(*label)),
            (None, None, [Err(BadLabel::NoMagic), Err(BadLabel::NoMagic)]) => Ok(None),
            (None, None, _) => Err(Reason::TornLabel),
        }
    }

    /// The numbers of the places that do not hold `label`, first the one to be written first: the
    /// worse one.
    pub fn differing(&self, label: &Label) -> impl Iterator<Item = u16> {
        let mut differing: Vec<(u64, u16)> = (self.0.iter().zip(0u16..))
            .filter(|(found, _)| found.as_ref() != Ok(label))
            .map(|(found, slot)| (found.as_ref().map_or(0, |l| l.generation), slot))
            .collect();
        differing.sort_unstable();
        differing.into_iter().map(|(_, slot)| slot)
    }
}

/// Makes `label` the label: both copies, one after the other. `first` is the place to begin with,
/// the one that may be lost.
pub async fn replace(
    medium: &Medium,
    memory: &Account,
    label: &Label,
    first: u16,
) -> Result<(), DiskError> {
    write(medium, memory, label, first).await?;
    write(medium, memory, label, 1 - first).await
}

/// Makes one copy durable. See [`sync`] for failures.
pub async fn write(
    medium: &Medium,
    memory: &Account,
    label: &Label,
    slot: u16,
) -> Result<(), DiskError> {
    let bytes = label.to_bytes(slot);
    let ctx = medium.ctx(memory, LABEL_BYTES).await;
    let data = copy_in(ctx.credit(), &bytes);
    medium.write(SLOTS[usize::from(slot)], data, &ctx).await?;
    sync(medium, memory).await
}

/// Makes what was written durable. A failure is reported as [`DiskErrorKind::Gone`]: it ends the disk.
pub async fn sync(medium: &Medium, memory: &Account) -> Result<(), DiskError> {
    let ctx = medium.ctx(memory, 0).await;
    let synced = medium.sync(&ctx).await.map_err(DiskError::from);
    synced.map_err(|e| DiskError { kind: DiskErrorKind::Gone, ..e })
}

/// Reads `len` bytes, a multiple of the disk's blocks, in one piece.
pub async fn read(
    medium: &Medium,
    memory: &Account,
    at: u64,
    len: usize,
) -> Result<Box<[u8]>, DiskError> {
    /// Most that is held in pool memory at once.
    const STEP: usize = 256 << 10;
    let mut out = Vec::with_capacity(len);
    while out.len() < len {
        let step = STEP.min(len - out.len());
        let ctx = medium.ctx(memory, step).await;
        let read = medium.read(at + out.len() as u64, step, &ctx).await?;
        read.iter().for_each(|piece| out.extend_from_slice(piece));
    }
    Ok(out.into_boxed_slice())
}
