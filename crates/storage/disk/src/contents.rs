//! Recognises what a disk holds, and zeroes it.

use block::{Account, Bufs, Ctx};
use futures_util::future::join_all;
use rt::disk::{Disk, DiskError, DiskKind};

use crate::byte_range::ByteRange;
use crate::error::ImageErrorReason;
use crate::label::{ImageLabel, ImageLabelError, ImageState};
use crate::label_copies::LabelCopies;
use crate::medium::{Medium, MediumError, PAGE};
use crate::signatures::{self, ExistingData};

/// Most bytes that one system call clears.
pub const CLEAR_STEP_BYTES: u64 = 1 << 30;
/// Most bytes of one write of zeroes.
const ZERO_STEP: u64 = 1 << 20;
/// How much of a disk is examined if its second label cannot be read.
const HEAD_BEFORE_SECOND_LABEL: usize = 256 << 10;
/// The bytes before a volume's data on a labelled disk: the volume's own contents are not taken for
/// another format.
const LABEL_AREA_LEN: usize = 1 << 20;
/// Most bytes that are read at once to examine a disk.
const PROBE_STEP_BYTES: usize = 1 << 20;
/// Size of a sample of a device between its ends, and how many are read at once.
const SAMPLE_BYTES: usize = 64 << 10;
const MAX_CONCURRENT_SAMPLES: usize = 8;

/// Checks that a file or device holds nothing.
///
/// # Errors
/// What it holds, or that it cannot be read.
pub async fn check_unused(disk: &Disk, memory: &Account) -> Result<(), ImageErrorReason> {
    check_empty(&Medium::from(disk.clone()), memory, false).await
}

/// Refuses a medium that holds anything; with `keep_contents`, only one with a known format, or
/// with data where labels will be.
pub async fn check_empty(
    medium: &Medium,
    memory: &Account,
    keep_contents: bool,
) -> Result<(), ImageErrorReason> {
    match LabelCopies::read(medium, memory).await?.newest_valid()? {
        // An unfinished image may be overwritten; what was put there since may not.
        Some(label) if label.state == ImageState::Creating => {
            let known = match known_format_at_start(medium, memory, LABEL_AREA_LEN).await {
                // An interrupted creation leaves unreadable sectors where its labels lie. Almost
                // every format has its signature before the second of them.
                Err(ImageErrorReason::Disk(_)) => {
                    known_format_at_start(medium, memory, HEAD_BEFORE_SECOND_LABEL)
                        .await
                        .unwrap_or(None)
                }
                result => result?,
            };
            return known.map_or(Ok(()), |what| Err(ImageErrorReason::HoldsOtherData(what)));
        }
        Some(label) => return Err(ImageErrorReason::HoldsVolume { volume: label.volume_id }),
        None => {}
    }
    let head_bytes = if keep_contents { LABEL_AREA_LEN } else { signatures::HEAD_BYTES };
    if let Some(foreign) = look(medium, memory, head_bytes).await? {
        return Err(ImageErrorReason::HoldsOtherData(foreign));
    }
    let is_device = medium.info().kind == DiskKind::BlockDevice && !medium.is_prezeroed();
    if is_device
        && !keep_contents
        && let Some(foreign) = sample_for_data(medium, memory, usable_bytes(medium)).await
    {
        return Err(ImageErrorReason::HoldsOtherData(foreign));
    }
    // Between its ends a file may hold anything, unless nothing is allocated.
    if medium.info().kind == DiskKind::File {
        let bytes = medium.allocated().await?;
        if bytes > 0 && medium.info().size > (head_bytes + signatures::TAIL_BYTES) as u64 {
            return Err(ImageErrorReason::HoldsOtherData(ExistingData::UnknownSpace { bytes }));
        }
    }
    Ok(())
}

/// What a medium without a label holds in its first `len` bytes and its last MiB, or what libblkid
/// finds.
async fn look(
    medium: &Medium,
    memory: &Account,
    len: usize,
) -> Result<Option<ExistingData>, ImageErrorReason> {
    let info = medium.info();
    let block = u64::from(info.logical_block);
    let whole = info.size / block * block;
    let head = read_range(medium, memory, 0, (len as u64).min(whole)).await?;
    let tail_len = (signatures::TAIL_BYTES as u64).min(whole);
    let tail = read_range(medium, memory, whole - tail_len, tail_len).await?;
    // A file that ends within a block is not ours, whatever it holds.
    let rest = (whole < info.size).then_some(ExistingData::UnknownData { at: whole });
    let signatures = medium.signatures().await;
    Ok(signatures::detect_formats(&head, &tail, whole, &signatures).or(rest))
}

async fn read_range(
    medium: &Medium,
    memory: &Account,
    at: u64,
    bytes: u64,
) -> Result<Vec<u8>, ImageErrorReason> {
    let mut all = Vec::new();
    for step in (ByteRange { start: at, end: at + bytes }).chunks(PROBE_STEP_BYTES as u64) {
        let len = usize::try_from(step.len()).expect("a megabyte");
        all.extend_from_slice(&medium.read_bytes(memory, step.start, len).await?);
    }
    Ok(all)
}

/// The first data found in samples of a device whose ends are empty. A sample that cannot be read
/// is skipped.
async fn sample_for_data(medium: &Medium, memory: &Account, whole: u64) -> Option<ExistingData> {
    let offsets = sample_offsets(whole, medium.info().is_rotational != Some(false));
    for group in offsets.chunks(MAX_CONCURRENT_SAMPLES) {
        let samples = group.iter().map(|&at| async move {
            let len =
                usize::try_from((whole - at).min(SAMPLE_BYTES as u64)).unwrap_or(SAMPLE_BYTES);
            let read = medium.read_bytes(memory, at, len).await.ok()?;
            signatures::first_nonzero(&read).map(|within| at + within)
        });
        if let Some(at) = join_all(samples).await.into_iter().flatten().next() {
            return Some(ExistingData::UnknownData { at });
        }
    }
    None
}

/// Offsets of the samples of a device of `whole` bytes: whole MiB, where partitions begin. A
/// rotating disk takes 10 ms for each.
fn sample_offsets(whole: u64, is_rotational: bool) -> Vec<u64> {
    const MIB: u64 = 1 << 20;
    const DENSE: u64 = 64 * MIB;
    let max_samples = if is_rotational { 256 } else { 1024 };
    let step = (whole / max_samples).next_multiple_of(MIB).max(4 * MIB);
    let from = signatures::HEAD_BYTES as u64;
    let end = whole.saturating_sub(signatures::TAIL_BYTES as u64);
    let dense = (from..DENSE.min(end)).step_by(usize::try_from(MIB).expect("a megabyte"));
    let sparse = (DENSE..end).step_by(usize::try_from(step).unwrap_or(usize::MAX));
    dense.chain(sparse).collect()
}

/// The known formats on a file or device, other than `own`.
///
/// # Errors
/// It cannot be read.
pub async fn other_known_formats(
    disk: &Disk,
    memory: &Account,
    own: &str,
) -> Result<Option<ImageErrorReason>, ImageErrorReason> {
    let found = look(&Medium::from(disk.clone()), memory, signatures::HEAD_BYTES).await?;
    let Some(ExistingData::KnownFormats(mut names)) = found else { return Ok(None) };
    names.retain(|name| name != own);
    Ok((!names.is_empty())
        .then_some(ImageErrorReason::HoldsOtherData(ExistingData::KnownFormats(names))))
}

/// The current label, or an error that says what is there instead.
pub async fn current_label(
    medium: &Medium,
    memory: &Account,
    copies: &LabelCopies,
) -> Result<ImageLabel, ImageErrorReason> {
    match copies.newest_valid()? {
        Some(label) => match overwriting_format(medium, memory, copies).await? {
            Some(what) => Err(ImageErrorReason::Overwritten(what)),
            None => Ok(label),
        },
        None => Err(look(medium, memory, LABEL_AREA_LEN)
            .await?
            .map_or(ImageErrorReason::NoLabel, ImageErrorReason::NotAVolume)),
    }
}

/// A known format in place of a lost copy of the label. The disk is in use for something else;
/// repairing the copy would damage that.
async fn overwriting_format(
    medium: &Medium,
    memory: &Account,
    copies: &LabelCopies,
) -> Result<Option<ExistingData>, ImageErrorReason> {
    if !copies.0.contains(&Err(ImageLabelError::NoMagic)) {
        return Ok(None);
    }
    known_format_at_start(medium, memory, LABEL_AREA_LEN).await
}

/// The known formats in the first `bytes` of a disk.
async fn known_format_at_start(
    medium: &Medium,
    memory: &Account,
    bytes: usize,
) -> Result<Option<ExistingData>, ImageErrorReason> {
    let whole = medium.info().size / PAGE * PAGE;
    let len = usize::try_from(whole.min(bytes as u64)).expect("a megabyte");
    let head = medium.read_bytes(memory, 0, len).await?;
    let found = signatures::detect_formats(&head, &[], medium.info().size, &[]);
    Ok(found.filter(|what| matches!(what, ExistingData::KnownFormats(_))))
}

/// The bytes of a device in whole blocks.
pub fn usable_bytes(medium: &Medium) -> u64 {
    let info = medium.info();
    info.size / u64::from(info.logical_block) * u64::from(info.logical_block)
}

/// Reads `len` bytes of a file or device from byte `at` on, a multiple of its blocks.
pub async fn read_disk(
    disk: &Disk,
    memory: &Account,
    at: u64,
    len: usize,
) -> Result<Box<[u8]>, DiskError> {
    Medium::from(disk.clone()).read_bytes(memory, at, len).await
}

/// Makes whole blocks of a file or device from byte `at` up to `end` read as zeroes, without
/// allocated space where that works.
pub async fn zero_disk_range(
    disk: &Disk,
    memory: &Account,
    at: u64,
    end: u64,
) -> Result<(), DiskError> {
    Ok(zero_range(&Medium::from(disk.clone()), memory, ByteRange { start: at, end }).await?)
}

/// Makes a range of whole blocks read as zeroes, without allocated space where that works.
pub async fn zero_range(
    medium: &Medium,
    memory: &Account,
    span: ByteRange,
) -> Result<(), MediumError> {
    let ctx = medium.ctx(memory, 0).await;
    for step in span.chunks(CLEAR_STEP_BYTES) {
        let done = match medium.punch(step.start, step.len(), &ctx).await {
            Err(e) if e.is_unsupported() => medium.zero(step.start, step.len(), &ctx).await,
            done => done,
        };
        match done {
            Err(e) if e.is_unsupported() => write_zeroes(medium, step, &ctx).await?,
            done => done?,
        }
    }
    Ok(())
}

/// Writes zeroes to a range of whole blocks.
///
/// # Errors
/// What the disk reports.
pub async fn write_zeroes(medium: &Medium, span: ByteRange, ctx: &Ctx) -> Result<(), MediumError> {
    for step in span.chunks(ZERO_STEP) {
        let len = usize::try_from(step.len()).expect("a megabyte");
        medium.write(step.start, Bufs::zeroes(len), ctx).await?;
    }
    Ok(())
}
