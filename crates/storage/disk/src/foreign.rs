//! Recognises what else a file or device may hold, so that nobody loses it to a label.
//!
//! libblkid is asked where it is ([`rt::disk::Disk::signatures`]). The list here finds the same formats without it, and some that it
//! does not know. The places and magics are those the formats publish.

use std::fmt;

use rt::disk::Signature;

/// How much of the beginning [`recognise`] wants to see, in bytes: VMFS has its magics behind the first and the second MiB.
pub(crate) const LOOK: usize = 4 << 20;
/// How much of the end.
pub(crate) const LOOK_BACK: usize = 1 << 20;

/// What was found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Foreign {
    /// Known formats, all that were found.
    Known(Vec<String>),
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
            Self::Known(what) => write!(f, "holds {}", what.join(" and ")),
            Self::Space { bytes } => write!(f, "has {bytes} bytes of space with unknown data"),
            Self::Unknown { at } => write!(f, "holds data of an unknown kind (at byte {at})"),
        }
    }
}

/// A magic and where it lies.
struct Magic {
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

const fn head(name: &'static str, at: usize, magic: &'static [u8]) -> Magic {
    Magic { name, place: Place::Head(at), magic }
}

const fn tail(name: &'static str, before_end: usize, magic: &'static [u8]) -> Magic {
    Magic { name, place: Place::Tail(before_end), magic }
}

/// What a disk of a pool is called.
pub const MEMBER: &str = "a disk of a pool";
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

/// What a format is called whose magic is not enough to be sure, as it has two bytes.
const WEAK: &[&str] =
    &[MBR, "a Minix file system", "an HFS file system", "an LVM1 physical volume"];

const MAGICS: &[Magic] = &[
    head(MEMBER, 0, b"WINDROSE MEMBER\n"),
    head(MEMBER, 512 << 10, b"WINDROSE MEMBER\n"),
    head(LUKS, 0, b"LUKS\xba\xbe"),
    // The second header of version 2, wherever the first one ends.
    head(LUKS, 0x4000, b"SKUL\xba\xbe"),
    head(LUKS, 0x8000, b"SKUL\xba\xbe"),
    head(LUKS, 0x1_0000, b"SKUL\xba\xbe"),
    head(LUKS, 0x2_0000, b"SKUL\xba\xbe"),
    head(LUKS, 0x4_0000, b"SKUL\xba\xbe"),
    head(LUKS, 0x8_0000, b"SKUL\xba\xbe"),
    head(LUKS, 0x10_0000, b"SKUL\xba\xbe"),
    head(LUKS, 0x20_0000, b"SKUL\xba\xbe"),
    head("an XFS file system", 0, b"XFSB"),
    head("an XFS log", 0, b"\xfe\xed\xba\xbe"),
    head("an ext2, ext3 or ext4 file system", 1080, &[0x53, 0xef]),
    head("a btrfs file system", 0x1_0040, b"_BHRfS_M"),
    head("an F2FS file system", 1024, &[0x10, 0x20, 0xf5, 0xf2]),
    head("an F2FS file system", 5120, &[0x10, 0x20, 0xf5, 0xf2]),
    head(BCACHE, 4120, BCACHE_MAGIC),
    head(BCACHEFS, 4120, BCACHE_MAGIC),
    head(BCACHEFS, 4120, BCACHEFS_MAGIC),
    head(BCACHEFS, (2 << 20) + 24, BCACHEFS_MAGIC),
    tail(BCACHEFS, (1 << 20) - 24, BCACHEFS_MAGIC),
    head("a VMFS file system", 2 << 20, b"\x5e\xf1\xab\x2f"),
    head("a VMFS volume", 1 << 20, b"\x0d\xd0\x01\xc0"),
    head(LVM, 0, b"LABELONE"),
    head(LVM, 512, b"LABELONE"),
    head(LVM, 1024, b"LABELONE"),
    head(LVM, 1536, b"LABELONE"),
    head("an LVM snapshot", 0, b"SnAp"),
    head("hashes of dm-verity", 0, b"verity\0\0"),
    head("data of dm-integrity", 0, b"integrt\0"),
    head("a VDO volume", 0, b"dmvdo001"),
    head("a disk of a Stratis pool", 512 + 4, b"!Stra0tis\x86\xff\x02^\x41rh"),
    head("a disk of a Stratis pool", 9 * 512 + 4, b"!Stra0tis\x86\xff\x02^\x41rh"),
    head(MD, 0, MD_MAGIC),
    head(MD, 4096, MD_MAGIC),
    tail(MD, 8192, MD_MAGIC),
    head("a Ceph OSD (BlueStore)", 0, b"bluestore block device"),
    head("a disk of Vitastor", 0, b"vITADisk"),
    tail(DRBD, 4096 - 60, b"\x83\x74\x02\x6b"),
    tail(DRBD, 4096 - 60, b"\x83\x74\x02\x6c"),
    tail(DRBD, 4096 - 60, b"\x83\x74\x02\x6d"),
    head("the control volume of DRBD Manage", 0, b"$DRBDmgr=q"),
    head("a log of DRBD Proxy", 0, b"DRBDdlh*"),
    head(SWAP, 4086, b"SWAPSPACE2"),
    head(SWAP, 4086, b"SWAP-SPACE"),
    head(SWAP, 0x1ff6, b"SWAPSPACE2"),
    head(SWAP, 0x3ff6, b"SWAPSPACE2"),
    head(SWAP, 0x7ff6, b"SWAPSPACE2"),
    head(SWAP, 0xfff6, b"SWAPSPACE2"),
    head(SUSPENDED, 0, b"\xed\xc3\x02\xe9\x98\x56\xe5\x0c"),
    head(SUSPENDED, 4086, b"S1SUSPEND"),
    head(SUSPENDED, 4086, b"S2SUSPEND"),
    head(SUSPENDED, 4086, b"ULSUSPEND"),
    head(SUSPENDED, 4086, b"LINHIB0001"),
    head("an NTFS file system", 3, b"NTFS    "),
    head("a ReFS file system", 3, b"ReFS\0"),
    head(BITLOCKER, 0, b"\xeb\x52\x90-FVE-FS-"),
    head(BITLOCKER, 0, b"\xeb\x58\x90-FVE-FS-"),
    head("a disk of Windows Storage Spaces", 0, b"SPACEDB "),
    head("a disk of Windows Storage Spaces", 4096, b"SPACEDB "),
    head("a dynamic disk of Windows (LDM)", 3072, b"PRIVHEAD"),
    tail("a dynamic disk of Windows (LDM)", 512, b"PRIVHEAD"),
    tail("a dynamic disk of Windows (LDM)", (1 << 20) - 512, b"TOCBLOCK"),
    head("an exFAT file system", 3, b"EXFAT   "),
    head(FAT, 82, b"FAT32   "),
    head(FAT, 82, b"MSWIN"),
    head(FAT, 54, b"FAT1"),
    head(FAT, 54, b"FAT     "),
    head(FAT, 54, b"MSDOS"),
    head("an APFS container", 32, b"NXSB"),
    head("a ReiserFS file system", 0x1_0034, b"ReIsEr"),
    head("a ReiserFS file system", 0x2034, b"ReIsErFs"),
    head("a Reiser4 file system", 0x1_0000, b"ReIsEr4"),
    head("a JFS file system", 0x8000, b"JFS1"),
    head("a GFS2 file system", 0x1_0000, b"\x01\x16\x19\x70"),
    head("an OCFS file system", 0x2000, b"OracleCFS"),
    head("an OCFS2 file system", 1024, b"OCFSV2"),
    head("an OCFS2 file system", 2048, b"OCFSV2"),
    head("an OCFS2 file system", 4096, b"OCFSV2"),
    head("an OCFS2 file system", 8192, b"OCFSV2"),
    head("a disk of Oracle ASM", 32, b"ORCLDISK"),
    head("a NILFS2 file system", 1030, &[0x34, 0x34]),
    head("a ScoutFS file system", 0x1_0004, b"\x8b\x42\x3c\x10"),
    head("a ScoutFS file system", 0x1_0004, b"\x10\x3c\x42\x8b"),
    head("an EROFS file system", 1024, b"\xe2\xe1\xf5\xe0"),
    head("an EXFS file system", 0, b"EXFS"),
    head("a Veritas file system", 1024, b"\xf5\xfc\x01\xa5"),
    head("a Veritas file system", 8192, b"\xa5\x01\xfc\xf5"),
    head("a NetWare file system", 4096, b"SPB5"),
    head("an HPFS file system", 8192, b"\x49\xe8\x95\xf9"),
    head("a BeFS file system", 32, b"BFS1"),
    head("a BeFS file system", 32, b"1SFB"),
    head("a BeFS file system", 544, b"BFS1"),
    head("an SCO BFS file system", 0, b"\xce\xfa\xad\x1b"),
    head(UFS, 0x255c, b"\x54\x19\x01\x00"),
    head(UFS, 0x255c, b"\x19\x01\x54\x19"),
    head(UFS, 0x1_055c, b"\x19\x01\x54\x19"),
    head("a zonefs file system", 0, b"SFOZ"),
    head("a UBI device", 0, b"UBI#"),
    head("a UBIFS file system", 0, b"\x31\x18\x10\x06"),
    head("a media pool of Micron", 0, b"mpoolDev"),
    head("a cramfs image", 0, b"\x45\x3d\xcd\x28"),
    head("a romfs image", 0, b"-rom1fs-"),
    head("an ISO 9660 file system", 0x8001, b"CD001"),
    head("a UDF file system", 0x8001, b"BEA01"),
    head("a UDF file system", 0x8001, b"NSR0"),
    head("a squashfs image", 0, b"hsqs"),
    head("a squashfs image", 0, b"sqsh"),
    head("a QEMU image (qcow2)", 0, b"QFI\xfb"),
    head("a VMware image", 0, b"KDMV"),
    head("a Hyper-V image (VHDX)", 0, b"vhdxfile"),
    head("a virtual PC image (VHD)", 0, b"conectix"),
    tail("a virtual PC image (VHD)", 512, b"conectix"),
    tail(RAID, 1024, b"Intel Raid ISM Cfg Sig. "),
    tail(RAID, 512, b"$XIDE$"),
    tail(RAID, 1024, b"NVIDIA  "),
    tail(RAID, 63 * 512, b"Promise Technology, Inc."),
    tail(RAID, 512, b"\xde\x11\xde\x11"),
    tail(RAID, 512, b"DPTM"),
    head(RAID, 4640, b"\xf0\x16\x78\x5a"),
    head(RAID, 4640, b"\xfd\x16\x78\x5a"),
    head(GPT, 512, b"EFI PART"),
    head(GPT, 4096, b"EFI PART"),
    tail(GPT, 512, b"EFI PART"),
    tail(GPT, 4096, b"EFI PART"),
    head("a Minix file system", 1040, &[0x7f, 0x13]),
    head("a Minix file system", 1040, &[0x8f, 0x13]),
    head("a Minix file system", 1040, &[0x68, 0x24]),
    head("a Minix file system", 1040, &[0x78, 0x24]),
    head("an HFS file system", 1024, b"BD"),
    head("an HFS file system", 1024, b"H+"),
    head("an HFS file system", 1024, b"HX"),
    head("an LVM1 physical volume", 0, b"HM"),
    head(MBR, 510, &[0x55, 0xaa]),
];

/// What people call what libblkid calls otherwise.
const KINDS: &[(&str, &str)] = &[
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

/// What is in a file or device of `size` bytes that begins with `head` and ends with `tail` (which overlap where it is small), and
/// in which libblkid finds `signatures`. `None` where nothing is found and both are all zeroes.
#[must_use]
pub(crate) fn recognise(
    head: &[u8],
    tail: &[u8],
    size: u64,
    signatures: &[Signature],
) -> Option<Foreign> {
    let mut all: Vec<String> = Vec::new();
    let mut add = |name: String| {
        // The same with what it was called says more.
        if !all.iter().any(|known| known.starts_with(&name)) {
            all.push(name);
        }
    };
    signatures.iter().map(named).for_each(&mut add);
    let magics = MAGICS.iter().filter(|m| m.is_in(head, tail)).map(|m| m.name);
    let others = [md_0_90(tail, size), zfs(head, tail, size)].into_iter().flatten();
    let magics: Vec<&str> = others.chain(magics).collect();
    let is_sure = |name: &&str| !WEAK.contains(name);
    // Two bytes may be a part of anything: they count where nothing else is known.
    // A label that was left in its second place says nothing of the first.
    let is_known = !signatures.is_empty() || magics.iter().any(|m| is_sure(m) && *m != MEMBER);
    magics.into_iter().filter(|m| !is_known || is_sure(m)).for_each(|m| add(m.to_owned()));
    if !all.is_empty() {
        return Some(Foreign::Known(all));
    }
    let in_tail = || first_byte(tail).map(|at| size.saturating_sub(tail.len() as u64) + at);
    let at = first_byte(head).or_else(in_tail)?;
    Some(Foreign::Unknown { at })
}

/// Where the first byte is that is not zero.
pub(crate) fn first_byte(bytes: &[u8]) -> Option<u64> {
    const PAGE: [u8; 4096] = [0; 4096];
    let (page, at) = (bytes.chunks(PAGE.len()).enumerate())
        .find(|(_, page)| **page != PAGE[..page.len()])
        .map(|(n, page)| (page, n * PAGE.len()))?;
    page.iter().position(|&b| b != 0).map(|within| (at + within) as u64)
}

/// What libblkid has found, as people call it.
fn named(found: &Signature) -> String {
    let known = KINDS.iter().find(|(kind, _)| *kind == found.kind);
    let what = match (known, found.kind.strip_prefix("ext"), found.is_table) {
        (Some((_, name)), ..) => (*name).to_owned(),
        (None, Some("2" | "3" | "4"), _) => "an ext2, ext3 or ext4 file system".to_owned(),
        (None, _, true) => format!("a partition table ({})", found.kind),
        (None, _, false) => format!("what libblkid calls {}", found.kind),
    };
    match &found.label {
        Some(label) => format!("{what} called {label:?}"),
        None => what,
    }
}

/// The oldest md superblock: in the last 64 KiB that are aligned to 64 KiB and whole.
fn md_0_90(tail: &[u8], size: u64) -> Option<&'static str> {
    const CHUNK: u64 = 64 << 10;
    let at = (size / CHUNK * CHUNK).checked_sub(CHUNK)?;
    let bytes = behind(tail, size, at)?;
    let is_one = bytes.starts_with(MD_MAGIC) || bytes.starts_with(MD_MAGIC_BIG);
    is_one.then_some(MD)
}

/// One of the four labels of a member of a ZFS pool: its uberblocks, one for each KiB at most, in either order of bytes.
fn zfs(head: &[u8], tail: &[u8], size: u64) -> Option<&'static str> {
    const LABEL: u64 = 256 << 10;
    const UBERBLOCKS: u64 = 128 << 10;
    const LITTLE: [u8; 8] = 0x00ba_b10c_u64.to_le_bytes();
    const BIG: [u8; 8] = 0x00ba_b10c_u64.to_be_bytes();
    let end = size / LABEL * LABEL;
    let labels = [Some(0), Some(LABEL), end.checked_sub(2 * LABEL), end.checked_sub(LABEL)];
    let has_one = labels.into_iter().flatten().any(|label| {
        let from = label + UBERBLOCKS;
        let in_head = usize::try_from(from).ok().and_then(|at| head.get(at..));
        let Some(bytes) = in_head.filter(|b| !b.is_empty()).or_else(|| behind(tail, size, from))
        else {
            return false;
        };
        let blocks = bytes.chunks(1024).take(128);
        blocks.into_iter().any(|block| block.starts_with(&LITTLE) || block.starts_with(&BIG))
    });
    has_one.then_some(ZFS)
}

/// What lies behind byte `at`, if the end reaches so far.
fn behind(tail: &[u8], size: u64, at: u64) -> Option<&[u8]> {
    let from_end = usize::try_from(size.checked_sub(at)?).ok()?;
    tail.get(tail.len().checked_sub(from_end)?..)
}

impl Magic {
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

    const SIZE: u64 = 1 << 30;

    fn found(head: &[u8], tail: &[u8], size: u64) -> Option<Foreign> {
        recognise(head, tail, size, &[])
    }

    fn known(name: &str) -> Foreign {
        Foreign::Known(vec![name.to_owned()])
    }

    #[test]
    fn every_magic_is_found_in_its_place() {
        for s in MAGICS {
            let (mut head, mut tail) = (vec![0; LOOK], vec![0; LOOK_BACK]);
            let (bytes, at) = match s.place {
                Place::Head(at) => (&mut head, at),
                Place::Tail(before) => (&mut tail, LOOK_BACK - before),
            };
            bytes[at..at + s.magic.len()].copy_from_slice(s.magic);
            let Some(Foreign::Known(names)) = found(&head, &tail, SIZE) else {
                panic!("{} is not found", s.name)
            };
            assert!(names.iter().any(|name| name == s.name), "{}: {names:?}", s.name);
        }
    }

    #[test]
    fn a_vmfs_partition_is_found_behind_the_first_mib() {
        let mut head = vec![0; LOOK];
        head[1 << 20..][..4].copy_from_slice(b"\x0d\xd0\x01\xc0");
        head[2 << 20..][..4].copy_from_slice(b"\x5e\xf1\xab\x2f");
        let says = found(&head, &[0; 512], SIZE).unwrap().to_string();
        assert_eq!(says, "holds a VMFS file system and a VMFS volume");
    }

    #[test]
    fn all_that_is_found_is_named_once() {
        let signature = |kind: &str, label: Option<&str>, is_table| Signature {
            kind: kind.to_owned(),
            label: label.map(str::to_owned),
            is_table,
            at: None,
        };
        let mut head = vec![0; LOOK];
        head[..4].copy_from_slice(b"XFSB");
        head[510..512].copy_from_slice(&[0x55, 0xaa]);
        let signatures = [
            signature("xfs", Some("back\"up"), false),
            signature("sun", None, true),
            signature("nss", None, false),
        ];
        let says = recognise(&head, &[], SIZE, &signatures).unwrap().to_string();
        assert_eq!(
            says,
            "holds an XFS file system called \"back\\\"up\" and a partition table (sun) and what libblkid calls nss"
        );
        // Without the library.
        assert_eq!(found(&head, &[], SIZE), Some(known("an XFS file system")));
        head[..4].fill(0);
        assert_eq!(found(&head, &[], SIZE), Some(known(MBR)));
        // Somebody has made partitions on what was a disk of a pool.
        head[512 << 10..][..16].copy_from_slice(b"WINDROSE MEMBER\n");
        let both = Foreign::Known(vec![MEMBER.to_owned(), MBR.to_owned()]);
        assert_eq!(found(&head, &[], SIZE), Some(both));
    }

    #[test]
    fn old_raid_superblocks_lie_on_64_kib() {
        for size in [1 << 30, (1 << 30) + 512, (1 << 30) + (64 << 10) - 512u64] {
            let at = size / 65536 * 65536 - 65536;
            let mut tail = vec![0; LOOK_BACK];
            let start = LOOK_BACK - usize::try_from(size - at).unwrap();
            tail[start..start + 4].copy_from_slice(MD_MAGIC);
            assert_eq!(found(&[0; LOOK], &tail, size), Some(known(MD)), "{size}");
        }
    }

    #[test]
    fn each_label_of_a_member_of_a_zfs_pool_tells() {
        let size = SIZE + (100 << 10);
        let block = 0x00ba_b10c_u64.to_be_bytes();
        // The newest uberblock lies anywhere among them.
        for at in [(128 << 10) + 5 * 1024, (384 << 10) + 127 * 1024] {
            let mut head = vec![0; LOOK];
            head[at..at + 8].copy_from_slice(&block);
            assert_eq!(found(&head, &[0; LOOK_BACK], size), Some(known(ZFS)), "{at}");
        }
        for label in [2, 1] {
            let at = size / (256 << 10) * (256 << 10) - label * (256 << 10) + (128 << 10) + 4096;
            let mut tail = vec![0; LOOK_BACK];
            let start = LOOK_BACK - usize::try_from(size - at).unwrap();
            tail[start..start + 8].copy_from_slice(&block);
            assert_eq!(found(&[0; LOOK], &tail, size), Some(known(ZFS)), "{label}");
        }
    }

    #[test]
    fn zeroes_are_nothing_and_all_else_is_something() {
        assert_eq!(found(&[0; LOOK], &[0; LOOK_BACK], SIZE), None);
        assert_eq!(found(&[], &[], 0), None);
        assert_eq!(found(&[0; 512], &[0; 512], 512), None);
        let mut some = vec![0; LOOK_BACK];
        some[LOOK_BACK - 1] = 1;
        let last = Foreign::Unknown { at: SIZE - 1 };
        assert_eq!(found(&[0; LOOK], &some, SIZE), Some(last.clone()));
        assert_eq!(found(&some, &some, SIZE), Some(Foreign::Unknown { at: (1 << 20) - 1 }));
        assert_eq!(last.to_string(), "holds data of an unknown kind (at byte 1073741823)");
    }
}
