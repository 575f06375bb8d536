//! What a disk holds, and making it hold nothing.

use block::{Account, Bufs, Ctx};
use futures_util::future::join_all;
use rt::disk::{Disk, DiskError, DiskKind};

use crate::error::Reason;
use crate::foreign::{self, Foreign};
use crate::label::{BadLabel, Label, State};
use crate::medium::{Failure, Medium, PAGE};
use crate::slots::{self, Slots};
use crate::span::Span;

/// Most that is cleared by one call to the system, in bytes.
pub const CLEAR_STEP: u64 = 1 << 30;
/// Most that one write of zeroes covers, in bytes.
const ZERO_STEP: u64 = 1 << 20;
/// Where a disk is looked at whose second label cannot be read.
const NEAR: usize = 256 << 10;
/// What lies before a volume's data on a disk that has a label: nothing of the volume's own is taken for another format.
const LABEL_AREA: usize = 1 << 20;
/// Most that is read at once of what a disk holds, in bytes.
const LOOK_STEP: usize = 1 << 20;
/// How much of a device is read in each place where it is looked at between its ends, and in how many places at once.
const SAMPLE: usize = 64 << 10;
const SAMPLES_AT_ONCE: usize = 8;

/// Whether a file or device holds nothing.
///
/// # Errors
/// What it holds, or that it cannot be read.
pub async fn is_unused(disk: &Disk, memory: &Account) -> Result<(), Reason> {
    check_empty(&Medium::from(disk.clone()), memory, false).await
}

/// Refuses whatever holds something; if it `keeps` that, only what lies where labels will be, or is known.
pub async fn check_empty(medium: &Medium, memory: &Account, keeps: bool) -> Result<(), Reason> {
    match Slots::read(medium, memory).await?.choose()? {
        // What a creation left that never ended may go; what somebody has put there since may not.
        Some(label) if label.state == State::Creating => {
            let known = match known_at_start(medium, memory, LABEL_AREA).await {
                // A creation that was cut off leaves sectors that cannot be read where its labels lie. Before
                // the second of them almost everything has its signature.
                Err(Reason::Disk(_)) => known_at_start(medium, memory, NEAR).await.unwrap_or(None),
                looked => looked?,
            };
            return known.map_or(Ok(()), |what| Err(Reason::Foreign(what)));
        }
        Some(label) => return Err(Reason::Labelled { volume: label.volume }),
        None => {}
    }
    let ends = if keeps { LABEL_AREA } else { foreign::LOOK };
    if let Some(foreign) = look(medium, memory, ends).await? {
        return Err(Reason::Foreign(foreign));
    }
    let is_device = medium.info().kind == DiskKind::BlockDevice && !medium.is_clean();
    if is_device
        && !keeps
        && let Some(foreign) = sampled(medium, memory, whole_units(medium)).await
    {
        return Err(Reason::Foreign(foreign));
    }
    // In between there may be anything in a file, unless there is no space for it.
    if medium.info().kind == DiskKind::File {
        let bytes = medium.allocated().await?;
        if bytes > 0 && medium.info().size > (ends + foreign::LOOK_BACK) as u64 {
            return Err(Reason::Foreign(Foreign::Space { bytes }));
        }
    }
    Ok(())
}

/// What else a file or device without a label holds in its first `len` bytes and its last MiB, or libblkid finds.
async fn look(medium: &Medium, memory: &Account, len: usize) -> Result<Option<Foreign>, Reason> {
    let info = medium.info();
    let block = u64::from(info.logical_block);
    let whole = info.size / block * block;
    let head = read_look(medium, memory, 0, (len as u64).min(whole)).await?;
    let back = (foreign::LOOK_BACK as u64).min(whole);
    let tail = read_look(medium, memory, whole - back, back).await?;
    // A file that ends within a block is nothing of ours, whatever it holds.
    let rest = (whole < info.size).then_some(Foreign::Unknown { at: whole });
    let signatures = medium.signatures().await;
    Ok(foreign::recognise(&head, &tail, whole, &signatures).or(rest))
}

async fn read_look(
    medium: &Medium,
    memory: &Account,
    at: u64,
    bytes: u64,
) -> Result<Vec<u8>, Reason> {
    let mut all = Vec::new();
    for step in (Span { at, end: at + bytes }).steps(LOOK_STEP as u64) {
        let len = usize::try_from(step.len()).expect("a megabyte");
        all.extend_from_slice(&slots::read(medium, memory, step.at, len).await?);
    }
    Ok(all)
}

/// The first data that is seen in samples of a device whose ends hold nothing. A place that cannot be read tells nothing.
async fn sampled(medium: &Medium, memory: &Account, whole: u64) -> Option<Foreign> {
    let places = sample_places(whole, medium.info().rotational != Some(false));
    for group in places.chunks(SAMPLES_AT_ONCE) {
        let samples = group.iter().map(|&at| async move {
            let len = usize::try_from((whole - at).min(SAMPLE as u64)).unwrap_or(SAMPLE);
            let read = slots::read(medium, memory, at, len).await.ok()?;
            foreign::first_byte(&read).map(|within| at + within)
        });
        if let Some(at) = join_all(samples).await.into_iter().flatten().next() {
            return Some(Foreign::Unknown { at });
        }
    }
    None
}

/// Where a device of `whole` bytes is looked at between its ends: where partitions begin, in whole MiB. A disk that turns takes 10 ms
/// for each place.
fn sample_places(whole: u64, turns: bool) -> Vec<u64> {
    const MIB: u64 = 1 << 20;
    const DENSE: u64 = 64 * MIB;
    let most = if turns { 256 } else { 1024 };
    let step = (whole / most).next_multiple_of(MIB).max(4 * MIB);
    let from = foreign::LOOK as u64;
    let end = whole.saturating_sub(foreign::LOOK_BACK as u64);
    let dense = (from..DENSE.min(end)).step_by(usize::try_from(MIB).expect("a megabyte"));
    let sparse = (DENSE..end).step_by(usize::try_from(step).unwrap_or(usize::MAX));
    dense.chain(sparse).collect()
}

/// The known formats on a file or device whose own data does not count.
///
/// # Errors
/// That it cannot be read.
pub async fn known_formats(
    disk: &Disk,
    memory: &Account,
    own: &str,
) -> Result<Option<Reason>, Reason> {
    let found = look(&Medium::from(disk.clone()), memory, foreign::LOOK).await?;
    let Some(Foreign::Known(mut names)) = found else { return Ok(None) };
    names.retain(|name| name != own);
    Ok((!names.is_empty()).then_some(Reason::Foreign(Foreign::Known(names))))
}

/// The label that counts, or what is there instead.
pub async fn labelled(medium: &Medium, memory: &Account, slots: &Slots) -> Result<Label, Reason> {
    match slots.choose()? {
        Some(label) => match overwriter(medium, memory, slots).await? {
            Some(what) => Err(Reason::Overwritten(what)),
            None => Ok(label),
        },
        None => {
            Err(look(medium, memory, LABEL_AREA).await?.map_or(Reason::NoLabel, Reason::NotAVolume))
        }
    }
}

/// A known format in the place of a lost copy of the label. Somebody uses the disk for something
/// else; repairing the copy would make that worse.
async fn overwriter(
    medium: &Medium,
    memory: &Account,
    slots: &Slots,
) -> Result<Option<Foreign>, Reason> {
    if !slots.0.contains(&Err(BadLabel::NoMagic)) {
        return Ok(None);
    }
    known_at_start(medium, memory, LABEL_AREA).await
}

/// What the first `bytes` of a disk are known to be, if they are another's.
async fn known_at_start(
    medium: &Medium,
    memory: &Account,
    bytes: usize,
) -> Result<Option<Foreign>, Reason> {
    let whole = medium.info().size / PAGE * PAGE;
    let len = usize::try_from(whole.min(bytes as u64)).expect("a megabyte");
    let head = slots::read(medium, memory, 0, len).await?;
    let found = foreign::recognise(&head, &[], medium.info().size, &[]);
    Ok(found.filter(|what| matches!(what, Foreign::Known(_))))
}

/// The bytes of a device that can be reached.
pub fn whole_units(medium: &Medium) -> u64 {
    let info = medium.info();
    info.size / u64::from(info.logical_block) * u64::from(info.logical_block)
}

/// Reads `len` bytes of a file or device, a multiple of its blocks, from byte `at` on.
pub async fn read_disk(
    disk: &Disk,
    memory: &Account,
    at: u64,
    len: usize,
) -> Result<Box<[u8]>, DiskError> {
    slots::read(&Medium::from(disk.clone()), memory, at, len).await
}

/// Makes whole blocks of a file or device read as zeroes, from byte `at` up to `end`, without space where that works.
pub async fn clear_disk(disk: &Disk, memory: &Account, at: u64, end: u64) -> Result<(), DiskError> {
    Ok(clear(&Medium::from(disk.clone()), memory, Span { at, end }).await?)
}

/// Makes a span of whole blocks of the disk read as zeroes, without space where that works.
pub async fn clear(medium: &Medium, memory: &Account, span: Span) -> Result<(), Failure> {
    let ctx = medium.ctx(memory, 0).await;
    for step in span.steps(CLEAR_STEP) {
        let done = match medium.punch(step.at, step.len(), &ctx).await {
            Err(e) if e.is_unsupported() => medium.zero(step.at, step.len(), &ctx).await,
            done => done,
        };
        match done {
            Err(e) if e.is_unsupported() => write_zeroes(medium, step, &ctx).await?,
            done => done?,
        }
    }
    Ok(())
}

/// Writes zeroes over whole blocks of the disk.
///
/// # Errors
/// What the disk reports.
pub async fn write_zeroes(medium: &Medium, span: Span, ctx: &Ctx) -> Result<(), Failure> {
    for step in span.steps(ZERO_STEP) {
        let len = usize::try_from(step.len()).expect("a megabyte");
        medium.write(step.at, Bufs::zeroes(len), ctx).await?;
    }
    Ok(())
}
