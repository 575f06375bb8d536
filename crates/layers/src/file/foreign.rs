//! Recognises what else a file or device may hold, so that nobody loses it to a label.
//!
//! The places and magics are those the formats publish; util-linux's libblkid knows the same.

use std::fmt;

/// How much of the beginning and of the end [`recognise`] wants to see, in bytes.
pub(super) const LOOK: usize = 1 << 20;

/// What was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Foreign {
    /// A known format.
    Known(&'static str),
    /// Data of no known format.
    Unknown {
        /// Where the first of it is, in bytes from the start.
        at: u64,
    },
    /// Nothing at either end, and yet it takes space.
    Space {
        /// How much, in bytes.
        bytes: u64,
    },
}

impl fmt::Display for Foreign {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Known(what) => write!(f, "holds {what}"),
            Self::Space { bytes } => write!(f, "has {bytes} bytes of space with unknown data"),
            Self::Unknown { at } => write!(f, "holds unknown data (at byte {at})"),
        }
    }
}

/// A magic and where it lies.
struct Signature {
    name: &'static str,
    /// In bytes from the start, or from the end.
    place: Place,
    magic: &'static [u8],
}

enum Place {
    Head(usize),
    /// The magic begins that many bytes before the end.
    Tail(usize),
}

const fn head(name: &'static str, at: usize, magic: &'static [u8]) -> Signature {
    Signature { name, place: Place::Head(at), magic }
}

const fn tail(name: &'static str, before_end: usize, magic: &'static [u8]) -> Signature {
    Signature { name, place: Place::Tail(before_end), magic }
}

const MD_MAGIC: &[u8] = &[0xfc, 0x4e, 0x2b, 0xa9];
const UBERBLOCK: &[u8] = &[0x0c, 0xb1, 0xba, 0x00, 0, 0, 0, 0];

/// In this order: what says more comes first (an MBR is also part of many others).
const SIGNATURES: &[Signature] = &[
    head("a disk of a pool", 0, b"WINDROSE MEMBER\n"),
    head("a LUKS encrypted volume", 0, b"LUKS\xba\xbe"),
    head("an XFS file system", 0, b"XFSB"),
    head("an ext2, ext3 or ext4 file system", 1080, &[0x53, 0xef]),
    head("a btrfs file system", 0x1_0040, b"_BHRfS_M"),
    head("an F2FS file system", 1024, &[0x10, 0x20, 0xf5, 0xf2]),
    head("a bcachefs or bcache device", 4120, &[0xc6, 0x85, 0x73, 0xf6, 0x4e, 0x1a, 0x45, 0xca]),
    head("an LVM physical volume", 0, b"LABELONE"),
    head("an LVM physical volume", 512, b"LABELONE"),
    head("an LVM physical volume", 1024, b"LABELONE"),
    head("an LVM physical volume", 1536, b"LABELONE"),
    head("a member of a Linux RAID (md)", 0, MD_MAGIC),
    head("a member of a Linux RAID (md)", 4096, MD_MAGIC),
    tail("a member of a Linux RAID (md)", 8192, MD_MAGIC),
    head("a Ceph OSD (BlueStore)", 0, b"bluestore block device"),
    head("a member of a ZFS pool", 128 << 10, UBERBLOCK),
    head("swap space", 4086, b"SWAPSPACE2"),
    head("swap space", 4086, b"SWAP-SPACE"),
    head("an NTFS file system", 3, b"NTFS    "),
    head("a BitLocker volume", 3, b"-FVE-FS-"),
    head("an exFAT file system", 3, b"EXFAT   "),
    head("a FAT file system", 82, b"FAT32   "),
    head("a FAT file system", 54, b"FAT1"),
    head("an ISO 9660 file system", 0x8001, b"CD001"),
    head("a squashfs image", 0, b"hsqs"),
    head("a QEMU image (qcow2)", 0, b"QFI\xfb"),
    head("a VMware image", 0, b"KDMV"),
    head("a Hyper-V image (VHDX)", 0, b"vhdxfile"),
    head("a virtual PC image (VHD)", 0, b"conectix"),
    tail("a virtual PC image (VHD)", 512, b"conectix"),
    head("a GPT partition table", 512, b"EFI PART"),
    head("a GPT partition table", 4096, b"EFI PART"),
    tail("a GPT partition table", 512, b"EFI PART"),
    tail("a GPT partition table", 4096, b"EFI PART"),
    head("a partition table (MBR)", 510, &[0x55, 0xaa]),
];

/// What is in a file or device of `size` bytes that begins with `head` and ends with `tail`
/// (which overlap where it is small). `None` where both are all zeroes.
#[must_use]
pub(super) fn recognise(head: &[u8], tail: &[u8], size: u64) -> Option<Foreign> {
    let known = SIGNATURES.iter().find(|s| s.is_in(head, tail)).map(|s| Foreign::Known(s.name));
    known.or_else(|| md_0_90(tail, size)).or_else(|| {
        let unknown = |bytes: &[u8], from: u64| {
            let at = bytes.iter().position(|&b| b != 0)?;
            Some(Foreign::Unknown { at: from + at as u64 })
        };
        unknown(head, 0).or_else(|| unknown(tail, size.saturating_sub(tail.len() as u64)))
    })
}

/// The oldest md superblock: in the last 64 KiB that are aligned to 64 KiB and whole.
fn md_0_90(tail: &[u8], size: u64) -> Option<Foreign> {
    const CHUNK: u64 = 64 << 10;
    let at = (size / CHUNK * CHUNK).checked_sub(CHUNK)?;
    let from_end = usize::try_from(size - at).ok()?;
    let start = tail.len().checked_sub(from_end)?;
    tail[start..].starts_with(MD_MAGIC).then_some(Foreign::Known("a member of a Linux RAID (md)"))
}

impl Signature {
    fn is_in(&self, head: &[u8], tail: &[u8]) -> bool {
        let place = match self.place {
            Place::Head(at) => head.get(at..),
            Place::Tail(before) => tail.len().checked_sub(before).and_then(|at| tail.get(at..)),
        };
        place.is_some_and(|bytes| bytes.starts_with(self.magic))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_signature_is_found_in_its_place() {
        for s in SIGNATURES {
            let (mut head, mut tail) = (vec![0; LOOK], vec![0; LOOK]);
            let (bytes, at) = match s.place {
                Place::Head(at) => (&mut head, at),
                Place::Tail(before) => (&mut tail, LOOK - before),
            };
            bytes[at..at + s.magic.len()].copy_from_slice(s.magic);
            assert_eq!(recognise(&head, &tail, 1 << 30), Some(Foreign::Known(s.name)));
        }
    }

    #[test]
    fn old_raid_superblocks_lie_on_64_kib() {
        for size in [1 << 30, (1 << 30) + 512, (1 << 30) + (64 << 10) - 512u64] {
            let at = size / 65536 * 65536 - 65536;
            let mut tail = vec![0; LOOK];
            let start = LOOK - usize::try_from(size - at).unwrap();
            tail[start..start + 4].copy_from_slice(MD_MAGIC);
            let found = recognise(&[0; LOOK], &tail, size);
            assert_eq!(found, Some(Foreign::Known("a member of a Linux RAID (md)")), "{size}");
        }
    }

    #[test]
    fn zeroes_are_nothing_and_all_else_is_something() {
        assert_eq!(recognise(&[0; LOOK], &[0; LOOK], 1 << 30), None);
        assert_eq!(recognise(&[], &[], 0), None);
        assert_eq!(recognise(&[0; 512], &[0; 512], 512), None);
        let mut some = vec![0; LOOK];
        some[LOOK - 1] = 1;
        let last = Foreign::Unknown { at: (1 << 30) - 1 };
        assert_eq!(recognise(&[0; LOOK], &some, 1 << 30), Some(last));
        assert_eq!(recognise(&some, &some, 1 << 30), Some(Foreign::Unknown { at: (1 << 20) - 1 }));
        assert_eq!(last.to_string(), "holds unknown data (at byte 1073741823)");
    }
}
