//! Recognises what else a file or device may hold, so that a label does not overwrite it.
//!
//! libblkid is used where available ([`rt::disk::Disk::signatures`]). The list here finds the same
//! formats without it, and some that it does not know. Offsets and magics are as published by the
//! formats.

use std::fmt;

use rt::disk::Signature;

/// Bytes of the beginning that [`detect_formats`] needs: VMFS has its magics after the first and
/// the second MiB.
pub(crate) const HEAD_BYTES: usize = 4 << 20;
/// Bytes of the end that it needs.
pub(crate) const TAIL_BYTES: usize = 1 << 20;

/// Existing data on a disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ExistingData {
    /// All known formats that were found.
    KnownFormats(Vec<String>),
    /// Data of no known format.
    UnknownData {
        /// Offset of its first byte.
        at: u64,
    },
    /// Both ends are empty, but space is allocated.
    UnknownSpace {
        /// How many bytes.
        bytes: u64,
    },
}

impl fmt::Display for ExistingData {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::KnownFormats(what) => write!(f, "holds {}", what.join(" and ")),
            Self::UnknownSpace { bytes } => {
                write!(f, "has {bytes} bytes of space with unknown data")
            }
            Self::UnknownData { at } => write!(f, "holds data of an unknown kind (at byte {at})"),
        }
    }
}

/// A magic and its location.
struct FormatMagic {
    name: &'static str,
    /// In bytes from the start, or from the end.
    location: MagicLocation,
    magic: &'static [u8],
}

enum MagicLocation {
    FromStart(usize),
    /// The magic begins that many bytes before the end.
    FromEnd(usize),
}

const fn at_start(name: &'static str, at: usize, magic: &'static [u8]) -> FormatMagic {
    FormatMagic { name, location: MagicLocation::FromStart(at), magic }
}

const fn at_end(name: &'static str, before_end: usize, magic: &'static [u8]) -> FormatMagic {
    FormatMagic { name, location: MagicLocation::FromEnd(before_end), magic }
}

/// Description of a disk of a pool.
pub const POOL_DISK: &str = "a disk of a pool";
const MD: &str = "a member of a Linux RAID (md)";
const MD_MAGIC: &[u8] = &[0xfc, 0x4e, 0x2b, 0xa9];
const MD_MAGIC_BIG: &[u8] = &[0xa9, 0x2b, 0x4e, 0xfc];
const LUKS: &str = "a LUKS encrypted volume";
const LVM: &str = "an LVM physical volume";
const BCACHE: &str = "a bcache device";
const BCACHEFS: &str = "a bcachefs file system";
const BCACHE_MAGIC: &[u8] = b"\xc6\x85\x73\xf6\x4e\x1a\x45\xca\x82\x65\xf5\x7f\x48\xba\x6d\x81";
const BCACHEFS_MAGIC: &[u8] = b"\xc6\x85\x73\xf6\x66\xce\x90\xa9\xd9\x6a\x60\xcf\x80\x3d\xf7\xef";
const ZFS: &str = "a member of a ZFS pool";
const SWAP: &str = "swap space";
const SUSPENDED: &str = "a suspended system in swap space";
const DRBD: &str = "the metadata of a DRBD device";
const BITLOCKER: &str = "a BitLocker volume";
const RAID: &str = "a member of a firmware RAID";
const FAT: &str = "a FAT file system";
const UFS: &str = "a UFS file system";
const GPT: &str = "a GPT partition table";
const MBR: &str = "a partition table (MBR)";

/// Formats whose magic of two bytes is not conclusive.
const WEAK_FORMATS: &[&str] =
    &[MBR, "a Minix file system", "an HFS file system", "an LVM1 physical volume"];

const MAGICS: &[FormatMagic] = &[
    at_start(POOL_DISK, 0, b"WINDROSE MEMBER\n"),
    at_start(POOL_DISK, 512 << 10, b"WINDROSE MEMBER\n"),
    at_start(LUKS, 0, b"LUKS\xba\xbe"),
    // The second header of version 2, at all its possible offsets.
    at_start(LUKS, 0x4000, b"SKUL\xba\xbe"),
    at_start(LUKS, 0x8000, b"SKUL\xba\xbe"),
    at_start(LUKS, 0x1_0000, b"SKUL\xba\xbe"),
    at_start(LUKS, 0x2_0000, b"SKUL\xba\xbe"),
    at_start(LUKS, 0x4_0000, b"SKUL\xba\xbe"),
    at_start(LUKS, 0x8_0000, b"SKUL\xba\xbe"),
    at_start(LUKS, 0x10_0000, b"SKUL\xba\xbe"),
    at_start(LUKS, 0x20_0000, b"SKUL\xba\xbe"),
    at_start("an XFS file system", 0, b"XFSB"),
    at_start("an XFS log", 0, b"\xfe\xed\xba\xbe"),
    at_start("an ext2, ext3 or ext4 file system", 1080, &[0x53, 0xef]),
    at_start("a btrfs file system", 0x1_0040, b"_BHRfS_M"),
    at_start("an F2FS file system", 1024, &[0x10, 0x20, 0xf5, 0xf2]),
    at_start("an F2FS file system", 5120, &[0x10, 0x20, 0xf5, 0xf2]),
    at_start(BCACHE, 4120, BCACHE_MAGIC),
    at_start(BCACHEFS, 4120, BCACHE_MAGIC),
    at_start(BCACHEFS, 4120, BCACHEFS_MAGIC),
    at_start(BCACHEFS, (2 << 20) + 24, BCACHEFS_MAGIC),
    at_end(BCACHEFS, (1 << 20) - 24, BCACHEFS_MAGIC),
    at_start("a VMFS file system", 2 << 20, b"\x5e\xf1\xab\x2f"),
    at_start("a VMFS volume", 1 << 20, b"\x0d\xd0\x01\xc0"),
    at_start(LVM, 0, b"LABELONE"),
    at_start(LVM, 512, b"LABELONE"),
    at_start(LVM, 1024, b"LABELONE"),
    at_start(LVM, 1536, b"LABELONE"),
    at_start("an LVM snapshot", 0, b"SnAp"),
    at_start("hashes of dm-verity", 0, b"verity\0\0"),
    at_start("data of dm-integrity", 0, b"integrt\0"),
    at_start("a VDO volume", 0, b"dmvdo001"),
    at_start("a disk of a Stratis pool", 512 + 4, b"!Stra0tis\x86\xff\x02^\x41rh"),
    at_start("a disk of a Stratis pool", 9 * 512 + 4, b"!Stra0tis\x86\xff\x02^\x41rh"),
    at_start(MD, 0, MD_MAGIC),
    at_start(MD, 4096, MD_MAGIC),
    at_end(MD, 8192, MD_MAGIC),
    at_start("a Ceph OSD (BlueStore)", 0, b"bluestore block device"),
    at_start("a disk of Vitastor", 0, b"vITADisk"),
    at_end(DRBD, 4096 - 60, b"\x83\x74\x02\x6b"),
    at_end(DRBD, 4096 - 60, b"\x83\x74\x02\x6c"),
    at_end(DRBD, 4096 - 60, b"\x83\x74\x02\x6d"),
    at_start("the control volume of DRBD Manage", 0, b"$DRBDmgr=q"),
    at_start("a log of DRBD Proxy", 0, b"DRBDdlh*"),
    at_start(SWAP, 4086, b"SWAPSPACE2"),
    at_start(SWAP, 4086, b"SWAP-SPACE"),
    at_start(SWAP, 0x1ff6, b"SWAPSPACE2"),
    at_start(SWAP, 0x3ff6, b"SWAPSPACE2"),
    at_start(SWAP, 0x7ff6, b"SWAPSPACE2"),
    at_start(SWAP, 0xfff6, b"SWAPSPACE2"),
    at_start(SUSPENDED, 0, b"\xed\xc3\x02\xe9\x98\x56\xe5\x0c"),
    at_start(SUSPENDED, 4086, b"S1SUSPEND"),
    at_start(SUSPENDED, 4086, b"S2SUSPEND"),
    at_start(SUSPENDED, 4086, b"ULSUSPEND"),
    at_start(SUSPENDED, 4086, b"LINHIB0001"),
    at_start("an NTFS file system", 3, b"NTFS    "),
    at_start("a ReFS file system", 3, b"ReFS\0"),
    at_start(BITLOCKER, 0, b"\xeb\x52\x90-FVE-FS-"),
    at_start(BITLOCKER, 0, b"\xeb\x58\x90-FVE-FS-"),
    at_start("a disk of Windows Storage Spaces", 0, b"SPACEDB "),
    at_start("a disk of Windows Storage Spaces", 4096, b"SPACEDB "),
    at_start("a dynamic disk of Windows (LDM)", 3072, b"PRIVHEAD"),
    at_end("a dynamic disk of Windows (LDM)", 512, b"PRIVHEAD"),
    at_end("a dynamic disk of Windows (LDM)", (1 << 20) - 512, b"TOCBLOCK"),
    at_start("an exFAT file system", 3, b"EXFAT   "),
    at_start(FAT, 82, b"FAT32   "),
    at_start(FAT, 82, b"MSWIN"),
    at_start(FAT, 54, b"FAT1"),
    at_start(FAT, 54, b"FAT     "),
    at_start(FAT, 54, b"MSDOS"),
    at_start("an APFS container", 32, b"NXSB"),
    at_start("a ReiserFS file system", 0x1_0034, b"ReIsEr"),
    at_start("a ReiserFS file system", 0x2034, b"ReIsErFs"),
    at_start("a Reiser4 file system", 0x1_0000, b"ReIsEr4"),
    at_start("a JFS file system", 0x8000, b"JFS1"),
    at_start("a GFS2 file system", 0x1_0000, b"\x01\x16\x19\x70"),
    at_start("an OCFS file system", 0x2000, b"OracleCFS"),
    at_start("an OCFS2 file system", 1024, b"OCFSV2"),
    at_start("an OCFS2 file system", 2048, b"OCFSV2"),
    at_start("an OCFS2 file system", 4096, b"OCFSV2"),
    at_start("an OCFS2 file system", 8192, b"OCFSV2"),
    at_start("a disk of Oracle ASM", 32, b"ORCLDISK"),
    at_start("a NILFS2 file system", 1030, &[0x34, 0x34]),
    at_start("a ScoutFS file system", 0x1_0004, b"\x8b\x42\x3c\x10"),
    at_start("a ScoutFS file system", 0x1_0004, b"\x10\x3c\x42\x8b"),
    at_start("an EROFS file system", 1024, b"\xe2\xe1\xf5\xe0"),
    at_start("an EXFS file system", 0, b"EXFS"),
    at_start("a Veritas file system", 1024, b"\xf5\xfc\x01\xa5"),
    at_start("a Veritas file system", 8192, b"\xa5\x01\xfc\xf5"),
    at_start("a NetWare file system", 4096, b"SPB5"),
    at_start("an HPFS file system", 8192, b"\x49\xe8\x95\xf9"),
    at_start("a BeFS file system", 32, b"BFS1"),
    at_start("a BeFS file system", 32, b"1SFB"),
    at_start("a BeFS file system", 544, b"BFS1"),
    at_start("an SCO BFS file system", 0, b"\xce\xfa\xad\x1b"),
    at_start(UFS, 0x255c, b"\x54\x19\x01\x00"),
    at_start(UFS, 0x255c, b"\x19\x01\x54\x19"),
    at_start(UFS, 0x1_055c, b"\x19\x01\x54\x19"),
    at_start("a zonefs file system", 0, b"SFOZ"),
    at_start("a UBI device", 0, b"UBI#"),
    at_start("a UBIFS file system", 0, b"\x31\x18\x10\x06"),
    at_start("a media pool of Micron", 0, b"mpoolDev"),
    at_start("a cramfs image", 0, b"\x45\x3d\xcd\x28"),
    at_start("a romfs image", 0, b"-rom1fs-"),
    at_start("an ISO 9660 file system", 0x8001, b"CD001"),
    at_start("a UDF file system", 0x8001, b"BEA01"),
    at_start("a UDF file system", 0x8001, b"NSR0"),
    at_start("a squashfs image", 0, b"hsqs"),
    at_start("a squashfs image", 0, b"sqsh"),
    at_start("a QEMU image (qcow2)", 0, b"QFI\xfb"),
    at_start("a VMware image", 0, b"KDMV"),
    at_start("a Hyper-V image (VHDX)", 0, b"vhdxfile"),
    at_start("a virtual PC image (VHD)", 0, b"conectix"),
    at_end("a virtual PC image (VHD)", 512, b"conectix"),
    at_end(RAID, 1024, b"Intel Raid ISM Cfg Sig. "),
    at_end(RAID, 512, b"$XIDE$"),
    at_end(RAID, 1024, b"NVIDIA  "),
    at_end(RAID, 63 * 512, b"Promise Technology, Inc."),
    at_end(RAID, 512, b"\xde\x11\xde\x11"),
    at_end(RAID, 512, b"DPTM"),
    at_start(RAID, 4640, b"\xf0\x16\x78\x5a"),
    at_start(RAID, 4640, b"\xfd\x16\x78\x5a"),
    at_start(GPT, 512, b"EFI PART"),
    at_start(GPT, 4096, b"EFI PART"),
    at_end(GPT, 512, b"EFI PART"),
    at_end(GPT, 4096, b"EFI PART"),
    at_start("a Minix file system", 1040, &[0x7f, 0x13]),
    at_start("a Minix file system", 1040, &[0x8f, 0x13]),
    at_start("a Minix file system", 1040, &[0x68, 0x24]),
    at_start("a Minix file system", 1040, &[0x78, 0x24]),
    at_start("an HFS file system", 1024, b"BD"),
    at_start("an HFS file system", 1024, b"H+"),
    at_start("an HFS file system", 1024, b"HX"),
    at_start("an LVM1 physical volume", 0, b"HM"),
    at_start(MBR, 510, &[0x55, 0xaa]),
];

/// Our descriptions of formats that libblkid names otherwise.
const BLKID_NAMES: &[(&str, &str)] = &[
    ("BitLocker", BITLOCKER),
    ("LVM2_member", LVM),
    ("VMFS", "a VMFS file system"),
    ("VMFS_volume_member", "a VMFS volume"),
    ("bcache", BCACHE),
    ("bcachefs", BCACHEFS),
    ("btrfs", "a btrfs file system"),
    ("ceph_bluestore", "a Ceph OSD (BlueStore)"),
    ("crypto_LUKS", LUKS),
    ("dos", MBR),
    ("drbd", DRBD),
    ("exfat", "an exFAT file system"),
    ("f2fs", "an F2FS file system"),
    ("gpt", GPT),
    ("iso9660", "an ISO 9660 file system"),
    ("linux_raid_member", MD),
    ("ntfs", "an NTFS file system"),
    ("ReFS", "a ReFS file system"),
    ("swap", SWAP),
    ("swsuspend", SUSPENDED),
    ("vfat", FAT),
    ("xfs", "an XFS file system"),
    ("zfs_member", ZFS),
];

/// What a file or device of `size` bytes holds that begins with `head` and ends with `tail` (which
/// overlap if it is small), and in which libblkid finds `signatures`. `None` if nothing is found
/// and both are all zeroes.
#[must_use]
pub(crate) fn detect_formats(
    head: &[u8],
    tail: &[u8],
    size: u64,
    signatures: &[Signature],
) -> Option<ExistingData> {
    let mut all: Vec<String> = Vec::new();
    let mut add = |name: String| {
        // The description with a file system label says more.
        if !all.iter().any(|known| known.starts_with(&name)) {
            all.push(name);
        }
    };
    signatures.iter().map(signature_name).for_each(&mut add);
    let magics = MAGICS.iter().filter(|m| m.matches(head, tail)).map(|m| m.name);
    let others = [md_0_90(tail, size), zfs_label(head, tail, size)].into_iter().flatten();
    let magics: Vec<&str> = others.chain(magics).collect();
    let is_sure = |name: &&str| !WEAK_FORMATS.contains(name);
    // Two bytes may occur in any data: such formats count only if nothing else is known. A leftover
    // second copy of a pool label says nothing about the start of the disk.
    let is_known = !signatures.is_empty() || magics.iter().any(|m| is_sure(m) && *m != POOL_DISK);
    magics.into_iter().filter(|m| !is_known || is_sure(m)).for_each(|m| add(m.to_owned()));
    if !all.is_empty() {
        return Some(ExistingData::KnownFormats(all));
    }
    let in_tail = || first_nonzero(tail).map(|at| size.saturating_sub(tail.len() as u64) + at);
    let at = first_nonzero(head).or_else(in_tail)?;
    Some(ExistingData::UnknownData { at })
}

/// Offset of the first nonzero byte.
pub(crate) fn first_nonzero(bytes: &[u8]) -> Option<u64> {
    const PAGE: [u8; 4096] = [0; 4096];
    let (page, at) = (bytes.chunks(PAGE.len()).enumerate())
        .find(|(_, page)| **page != PAGE[..page.len()])
        .map(|(n, page)| (page, n * PAGE.len()))?;
    page.iter().position(|&b| b != 0).map(|within| (at + within) as u64)
}

/// Our description of what libblkid has found.
fn signature_name(found: &Signature) -> String {
    let known = BLKID_NAMES.iter().find(|(kind, _)| *kind == found.kind);
    let what = match (known, found.kind.strip_prefix("ext"), found.is_partition_table) {
        (Some((_, name)), ..) => (*name).to_owned(),
        (None, Some("2" | "3" | "4"), _) => "an ext2, ext3 or ext4 file system".to_owned(),
        (None, _, true) => format!("a partition table ({})", found.kind),
        (None, _, false) => format!("data that libblkid calls {}", found.kind),
    };
    match &found.label {
        Some(label) => format!("{what} called {label:?}"),
        None => what,
    }
}

/// The oldest md superblock: in the last whole 64 KiB chunk of the device.
fn md_0_90(tail: &[u8], size: u64) -> Option<&'static str> {
    const CHUNK: u64 = 64 << 10;
    let at = (size / CHUNK * CHUNK).checked_sub(CHUNK)?;
    let bytes = tail_from(tail, size, at)?;
    let is_one = bytes.starts_with(MD_MAGIC) || bytes.starts_with(MD_MAGIC_BIG);
    is_one.then_some(MD)
}

/// One of the four labels of a ZFS pool member: an array of uberblocks, at most one per KiB, in
/// either byte order.
fn zfs_label(head: &[u8], tail: &[u8], size: u64) -> Option<&'static str> {
    const LABEL: u64 = 256 << 10;
    const UBERBLOCKS: u64 = 128 << 10;
    const LITTLE: [u8; 8] = 0x00ba_b10c_u64.to_le_bytes();
    const BIG: [u8; 8] = 0x00ba_b10c_u64.to_be_bytes();
    let end = size / LABEL * LABEL;
    let labels = [Some(0), Some(LABEL), end.checked_sub(2 * LABEL), end.checked_sub(LABEL)];
    let has_one = labels.into_iter().flatten().any(|label| {
        let from = label + UBERBLOCKS;
        let in_head = usize::try_from(from).ok().and_then(|at| head.get(at..));
        let Some(bytes) = in_head.filter(|b| !b.is_empty()).or_else(|| tail_from(tail, size, from))
        else {
            return false;
        };
        let blocks = bytes.chunks(1024).take(128);
        blocks.into_iter().any(|block| block.starts_with(&LITTLE) || block.starts_with(&BIG))
    });
    has_one.then_some(ZFS)
}

/// The bytes from `at` on, if `tail` reaches that far.
fn tail_from(tail: &[u8], size: u64, at: u64) -> Option<&[u8]> {
    let from_end = usize::try_from(size.checked_sub(at)?).ok()?;
    tail.get(tail.len().checked_sub(from_end)?..)
}

impl FormatMagic {
    fn matches(&self, head: &[u8], tail: &[u8]) -> bool {
        let bytes_at = match self.location {
            MagicLocation::FromStart(at) => head.get(at..),
            MagicLocation::FromEnd(before) => {
                tail.len().checked_sub(before).and_then(|at| tail.get(at..))
            }
        };
        bytes_at.is_some_and(|bytes| bytes.starts_with(self.magic))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIZE: u64 = 1 << 30;

    fn found(head: &[u8], tail: &[u8], size: u64) -> Option<ExistingData> {
        detect_formats(head, tail, size, &[])
    }

    fn known(name: &str) -> ExistingData {
        ExistingData::KnownFormats(vec![name.to_owned()])
    }

    #[test]
    fn each_magic_is_found_at_its_offset() {
        for s in MAGICS {
            let (mut head, mut tail) = (vec![0; HEAD_BYTES], vec![0; TAIL_BYTES]);
            let (bytes, at) = match s.location {
                MagicLocation::FromStart(at) => (&mut head, at),
                MagicLocation::FromEnd(before) => (&mut tail, TAIL_BYTES - before),
            };
            bytes[at..at + s.magic.len()].copy_from_slice(s.magic);
            let Some(ExistingData::KnownFormats(names)) = found(&head, &tail, SIZE) else {
                panic!("{} is not found", s.name)
            };
            assert!(names.iter().any(|name| name == s.name), "{}: {names:?}", s.name);
        }
    }

    #[test]
    fn a_vmfs_partition_is_found_after_the_first_mib() {
        let mut head = vec![0; HEAD_BYTES];
        head[1 << 20..][..4].copy_from_slice(b"\x0d\xd0\x01\xc0");
        head[2 << 20..][..4].copy_from_slice(b"\x5e\xf1\xab\x2f");
        let says = found(&head, &[0; 512], SIZE).unwrap().to_string();
        assert_eq!(says, "holds a VMFS file system and a VMFS volume");
    }

    #[test]
    fn each_format_is_named_once() {
        let signature = |kind: &str, label: Option<&str>, is_table| Signature {
            kind: kind.to_owned(),
            label: label.map(str::to_owned),
            is_partition_table: is_table,
            magic_offset: None,
        };
        let mut head = vec![0; HEAD_BYTES];
        head[..4].copy_from_slice(b"XFSB");
        head[510..512].copy_from_slice(&[0x55, 0xaa]);
        let signatures = [
            signature("xfs", Some("back\"up"), false),
            signature("sun", None, true),
            signature("nss", None, false),
        ];
        let says = detect_formats(&head, &[], SIZE, &signatures).unwrap().to_string();
        assert_eq!(
            says,
            "holds an XFS file system called \"back\\\"up\" and a partition table (sun) and data that libblkid calls nss"
        );
        // Without the library.
        assert_eq!(found(&head, &[], SIZE), Some(known("an XFS file system")));
        head[..4].fill(0);
        assert_eq!(found(&head, &[], SIZE), Some(known(MBR)));
        // A former disk of a pool was partitioned.
        head[512 << 10..][..16].copy_from_slice(b"WINDROSE MEMBER\n");
        let both = ExistingData::KnownFormats(vec![POOL_DISK.to_owned(), MBR.to_owned()]);
        assert_eq!(found(&head, &[], SIZE), Some(both));
    }

    #[test]
    fn old_raid_superblocks_are_aligned_to_64_kib() {
        for size in [1 << 30, (1 << 30) + 512, (1 << 30) + (64 << 10) - 512u64] {
            let at = size / 65536 * 65536 - 65536;
            let mut tail = vec![0; TAIL_BYTES];
            let start = TAIL_BYTES - usize::try_from(size - at).unwrap();
            tail[start..start + 4].copy_from_slice(MD_MAGIC);
            assert_eq!(found(&[0; HEAD_BYTES], &tail, size), Some(known(MD)), "{size}");
        }
    }

    #[test]
    fn each_label_of_a_zfs_member_is_detected() {
        let size = SIZE + (100 << 10);
        let block = 0x00ba_b10c_u64.to_be_bytes();
        // The newest uberblock lies anywhere among them.
        for at in [(128 << 10) + 5 * 1024, (384 << 10) + 127 * 1024] {
            let mut head = vec![0; HEAD_BYTES];
            head[at..at + 8].copy_from_slice(&block);
            assert_eq!(found(&head, &[0; TAIL_BYTES], size), Some(known(ZFS)), "{at}");
        }
        for label in [2, 1] {
            let at = size / (256 << 10) * (256 << 10) - label * (256 << 10) + (128 << 10) + 4096;
            let mut tail = vec![0; TAIL_BYTES];
            let start = TAIL_BYTES - usize::try_from(size - at).unwrap();
            tail[start..start + 8].copy_from_slice(&block);
            assert_eq!(found(&[0; HEAD_BYTES], &tail, size), Some(known(ZFS)), "{label}");
        }
    }

    #[test]
    fn only_zeroes_count_as_empty() {
        assert_eq!(found(&[0; HEAD_BYTES], &[0; TAIL_BYTES], SIZE), None);
        assert_eq!(found(&[], &[], 0), None);
        assert_eq!(found(&[0; 512], &[0; 512], 512), None);
        let mut some = vec![0; TAIL_BYTES];
        some[TAIL_BYTES - 1] = 1;
        let last = ExistingData::UnknownData { at: SIZE - 1 };
        assert_eq!(found(&[0; HEAD_BYTES], &some, SIZE), Some(last.clone()));
        assert_eq!(
            found(&some, &some, SIZE),
            Some(ExistingData::UnknownData { at: (1 << 20) - 1 })
        );
        assert_eq!(last.to_string(), "holds data of an unknown kind (at byte 1073741823)");
    }
}
