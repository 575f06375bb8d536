//! Properties of an open file or block device.

use std::fs::{self, File};
use std::os::fd::AsFd;
use std::os::unix::fs::{FileExt, MetadataExt};

use super::info::{DiskInfo, DiskKind};
use super::options::{OpenOptions, OpenReason};
use crate::sys::{self, DirectAlign};

/// Smallest block size, in bytes.
const MIN_BLOCK_BYTES: u32 = 512;

/// Physical block size of file systems and flash, in bytes, if not reported.
const DEFAULT_PHYSICAL_BLOCK: u32 = 4096;

pub(crate) fn read_disk_info(
    file: &File,
    kind: DiskKind,
    size: u64,
    on_memory: bool,
    how: OpenOptions,
) -> Result<DiskInfo, OpenReason> {
    let metadata = OpenReason::from_result(file.metadata())?;
    let queue = SysfsDevice::new(match kind {
        DiskKind::File => metadata.dev(),
        DiskKind::BlockDevice => metadata.rdev(),
    });
    // Block devices are never opened through the page cache.
    let direct = kind == DiskKind::BlockDevice || (!how.buffered && !on_memory);
    let align = match direct {
        true => direct_align(file, kind, size, &queue)?,
        false => DirectAlign { memory: 1, offset: MIN_BLOCK_BYTES },
    };
    let physical = match kind {
        DiskKind::File => DEFAULT_PHYSICAL_BLOCK,
        DiskKind::BlockDevice => OpenReason::from_result(sys::block_sizes(file.as_fd()))?.1,
    };
    if align.offset > DEFAULT_PHYSICAL_BLOCK {
        return Err(OpenReason::BlocksTooLarge(align.offset));
    }
    let block_device = kind == DiskKind::BlockDevice;
    // Linux opens a write-protected device for writing and refuses the writes.
    if block_device && !how.read_only && OpenReason::from_result(sys::is_read_only(file.as_fd()))? {
        return Err(OpenReason::ReadOnly);
    }
    Ok(DiskInfo {
        size,
        logical_block: align.offset,
        physical_block: plausible_physical(physical, align.offset),
        memory_align: align.memory,
        kind,
        can_punch: !block_device || queue.queue_number("write_zeroes_max_bytes") != Some(0),
        can_zero: block_device || !on_memory,
        has_volatile_cache: match kind {
            // A file's metadata needs a sync even without a volatile cache.
            DiskKind::File => !on_memory,
            DiskKind::BlockDevice => !queue.is_write_through(),
        },
        is_rotational: queue.queue_number("rotational").map(|n| n != 0),
        read_only: how.read_only,
        is_shareable: match kind {
            DiskKind::File => {
                direct && !OpenReason::from_result(sys::is_on_local_fs(file.as_fd()))?
            }
            DiskKind::BlockDevice => true,
        },
        attachment_number: queue.attachment_number(),
    })
}

/// The serial number of the disk behind a block device, empty if there is none.
pub(crate) fn serial(file: &File, kind: DiskKind) -> String {
    match (kind, file.metadata()) {
        (DiskKind::BlockDevice, Ok(metadata)) => SysfsDevice::new(metadata.rdev()).serial(),
        _ => String::new(),
    }
}

/// The physical block size. Some drives report odd numbers (NVMe can report any multiple of its
/// blocks); anything but a power of two is replaced by the default.
fn plausible_physical(claimed: u32, logical: u32) -> u32 {
    if claimed.is_power_of_two() {
        claimed.max(logical)
    } else {
        DEFAULT_PHYSICAL_BLOCK.max(logical)
    }
}

fn direct_align(
    file: &File,
    kind: DiskKind,
    size: u64,
    queue: &SysfsDevice,
) -> Result<DirectAlign, OpenReason> {
    if kind == DiskKind::BlockDevice {
        let (logical, _) = OpenReason::from_result(sys::block_sizes(file.as_fd()))?;
        let alignment = OpenReason::from_result(sys::direct_align(file.as_fd()))?;
        let memory = alignment.map_or(logical, |a| a.memory.max(1));
        return Ok(DirectAlign { memory, offset: logical.max(MIN_BLOCK_BYTES) });
    }
    if let Some(alignment) = OpenReason::from_result(sys::direct_align(file.as_fd()))? {
        // The flag was accepted but has no effect: every transfer would go through the cache.
        if alignment.offset == 0 {
            return Err(OpenReason::NoDirectIo);
        }
        return Ok(DirectAlign {
            memory: alignment.memory.max(1),
            offset: alignment.offset.max(MIN_BLOCK_BYTES),
        });
    }
    let device = queue.queue_number("logical_block_size").and_then(|n| u32::try_from(n).ok());
    let offset = match device {
        Some(offset) => offset.max(MIN_BLOCK_BYTES),
        None => probe_block_size(file, size)?,
    };
    Ok(DirectAlign { memory: offset, offset })
}

/// Finds the smallest block that a direct read accepts, if not reported: kernels before 6.1 on file
/// systems without a block device of their own.
fn probe_block_size(file: &File, size: u64) -> Result<u32, OpenReason> {
    #[repr(align(4096))]
    struct Page([u8; 4096]);
    let mut page = Page([0; 4096]);
    for block in [MIN_BLOCK_BYTES, DEFAULT_PHYSICAL_BLOCK] {
        if size < u64::from(block) {
            continue;
        }
        match file.read_at(&mut page.0[..block as usize], 0) {
            Ok(_) => return Ok(block),
            Err(e) if e.raw_os_error() == Some(libc::EINVAL) => {}
            Err(e) => return Err(OpenReason::from_io(&e)),
        }
    }
    if size < u64::from(DEFAULT_PHYSICAL_BLOCK) {
        Ok(DEFAULT_PHYSICAL_BLOCK)
    } else {
        Err(OpenReason::NoDirectIo)
    }
}

/// The attributes of a block device and of its request queue in sysfs; empty if there is no such
/// device.
struct SysfsDevice {
    device: u64,
}

impl SysfsDevice {
    fn new(device: u64) -> Self {
        Self { device }
    }

    /// An attribute of the device, or for a partition of its disk, one directory up.
    fn disk_attribute(&self, name: &str) -> Option<String> {
        let attribute = |up| String::from_utf8(self.attribute(&format!("{up}{name}"))?).ok();
        ["", "../"].into_iter().find_map(attribute)
    }

    fn attribute(&self, name: &str) -> Option<Vec<u8>> {
        let (major, minor) = (libc::major(self.device), libc::minor(self.device));
        fs::read(format!("/sys/dev/block/{major}:{minor}/{name}")).ok()
    }

    fn serial(&self) -> String {
        match self.attribute("partition").map(|number| normalize_text(&number)) {
            None => serial_of(|name| self.attribute(name), ""),
            Some(n) => {
                serial_of(|name| self.attribute(&format!("../{name}")), &format!("-part{n}"))
            }
        }
    }

    fn queue_attribute(&self, name: &str) -> Option<String> {
        self.disk_attribute(&format!("queue/{name}"))
    }

    fn queue_number(&self, name: &str) -> Option<u64> {
        self.queue_attribute(name)?.trim().parse().ok()
    }

    /// Every disk that appears gets a new number (`diskseq`, Linux 5.15), even if it was present
    /// before.
    fn attachment_number(&self) -> u64 {
        self.disk_attribute("diskseq").and_then(|number| number.trim().parse().ok()).unwrap_or(0)
    }

    fn is_write_through(&self) -> bool {
        self.queue_attribute("write_cache").is_some_and(|s| s.trim() == "write through")
    }
}

/// Longest serial number, in bytes.
const SERIAL_BYTES: usize = 64;

/// The first attribute that identifies the disk, with `suffix` appended.
fn serial_of(attribute: impl Fn(&str) -> Option<Vec<u8>>, suffix: &str) -> String {
    /// The attribute, the length of its header, and the prefix to add.
    const PLACES: [(&str, usize, &str); 7] = [
        ("device/serial", 0, ""),
        ("device/wwid", 0, ""),
        ("wwid", 0, ""),
        // The header of a page of vital product data (SPC-5 7.7.1).
        ("device/vpd_pg80", 4, ""),
        // Disks of virtual machines (virtio).
        ("serial", 0, ""),
        ("dm/uuid", 0, ""),
        ("loop/backing_file", 0, "loop:"),
    ];
    let found = PLACES.iter().find_map(|(name, skip, prefix)| {
        let bytes = attribute(name)?;
        let number = normalize_text(bytes.get(*skip..)?);
        (!number.is_empty()).then_some((number, prefix))
    });
    let Some((number, prefix)) = found else { return String::new() };
    let room = SERIAL_BYTES.saturating_sub(prefix.len() + suffix.len());
    format!("{prefix}{}{suffix}", last_bytes(&number, room))
}

/// The printable characters of a text, trimmed, with runs of blanks reduced to one.
fn normalize_text(bytes: &[u8]) -> String {
    let text = String::from_utf8_lossy(bytes);
    let printed: String = text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
    printed.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// The last `most` bytes of a text: serial numbers of one model differ at the end.
fn last_bytes(text: &str, most: usize) -> &str {
    let mut from = text.len().saturating_sub(most);
    while !text.is_char_boundary(from) {
        from += 1;
    }
    text[from..].trim_start()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn serial_numbers_are_found_in_order_and_tidied() {
        let of = |attributes: &[(&str, &[u8])], suffix: &str| {
            let find = |name: &str| attributes.iter().find(|(n, _)| *n == name);
            serial_of(|name| find(name).map(|(_, bytes)| bytes.to_vec()), suffix)
        };
        assert_eq!(of(&[], "-part1"), "");
        let nvme: &[(&str, &[u8])] = &[("wwid", b"eui.0025\n"), ("device/serial", b" S4EV 1 \n")];
        assert_eq!(of(nvme, ""), "S4EV 1");
        assert_eq!(of(nvme, "-part12"), "S4EV 1-part12");
        let blank: &[(&str, &[u8])] = &[("device/serial", b"  \n"), ("wwid", b"eui.0025\n")];
        assert_eq!(of(blank, ""), "eui.0025");
        let scsi: &[(&str, &[u8])] = &[("device/vpd_pg80", b"\0\x80\0\x08  WD-1234")];
        assert_eq!(of(scsi, ""), "WD-1234");
        assert_eq!(of(&[("device/vpd_pg80", b"\0\x80\0")], ""), "", "cut short");
        assert_eq!(of(&[("loop/backing_file", b"/images/a b\n")], ""), "loop:/images/a b");
        assert_eq!(of(&[("dm/uuid", b"\n"), ("serial", b"virtual\n")], ""), "virtual");
        let ata = b"t10.ATA     WDC WD40EFRX-68N32N0              \x01     WD-WCC7K0000001\n";
        let ata = of(&[("device/wwid", ata)], "");
        assert_eq!(ata, "t10.ATA WDC WD40EFRX-68N32N0 WD-WCC7K0000001");
    }

    #[test]
    fn long_serial_numbers_keep_their_end() {
        let long = format!("{}\u{e9}{}", "x".repeat(90), "7".repeat(50));
        let of = |prefix: &str, suffix: &str| {
            let attribute = |name: &str| (name == prefix).then(|| long.clone().into_bytes());
            serial_of(attribute, suffix)
        };
        assert_eq!(of("wwid", ""), format!("{}\u{e9}{}", "x".repeat(12), "7".repeat(50)));
        let part = of("loop/backing_file", "-part300");
        assert_eq!(
            (part.len(), part.starts_with("loop:"), part.ends_with("7-part300")),
            (63, true, true)
        );
    }

    #[test]
    fn implausible_physical_block_sizes_are_ignored() {
        for (claimed, logical, expected) in [
            (512, 512, 512),
            (4096, 512, 4096),
            (65536, 512, 65536),
            (512, 4096, 4096),
            (0, 512, 4096),
            (1536, 512, 4096),
            (5120, 512, 4096),
        ] {
            assert_eq!(plausible_physical(claimed, logical), expected, "{claimed}");
        }
    }
}
