//! What logical units report about themselves, validated.

use std::rc::Rc;

use block::{Info, METADATA_LBA};

/// Most data of one command, in bytes, even if a unit allows more.
const MAX_TRANSFER_BYTES: u32 = 4 << 20;

/// Most bytes that a command without data covers, even if a unit allows more.
const MAX_DATALESS_BYTES: u32 = 32 << 20;

/// Most designators of a unit that are read.
const MAX_DESIGNATORS: usize = 32;

/// Identity of a unit's volume: its designators that are permanent and globally unique (SPC-4
/// 7.8.6).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Identity(Rc<[(u8, Box<[u8]>)]>);

impl Identity {
    /// Parses the page *Device Identification* (83h): designators of the unit itself, not of a
    /// port. EUI-64, NAA, SCSI name and UUID; without those, vendor-specific ones.
    pub(super) fn parse(page: &[u8]) -> Self {
        const VENDOR: u8 = 1;
        let mut found: Vec<(u8, Box<[u8]>)> = Vec::new();
        let mut rest = body(page);
        while let Some((&[_, kind, _, length], after)) = rest.split_first_chunk()
            && let Some((designator, after)) = after.split_at_checked(usize::from(length))
            && found.len() < MAX_DESIGNATORS
        {
            let (association, kind) = (kind >> 4 & 0b11, kind & 0xf);
            if association == 0
                && matches!(kind, VENDOR | 2 | 3 | 8 | 0xa)
                && !designator.is_empty()
            {
                found.push((kind, designator.into()));
            }
            rest = after;
        }
        if found.iter().any(|(kind, _)| *kind != VENDOR) {
            found.retain(|(kind, _)| *kind != VENDOR);
        }
        found.sort_unstable();
        Self(found.into())
    }

    /// Whether it identifies a volume at all.
    #[must_use]
    pub fn is_known(&self) -> bool {
        !self.0.is_empty()
    }

    /// Its designators: type and value (SPC-4 7.8.6.1).
    pub fn designators(&self) -> impl Iterator<Item = (u8, &[u8])> {
        self.0.iter().map(|(kind, value)| (*kind, &value[..]))
    }
}

/// Attributes and capabilities of a unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UnitAttributes {
    /// Size, block size and other attributes.
    pub info: Info,
    /// Blocks that one WRITE SAME covers.
    pub write_same_blocks: u32,
    /// Whether WRITE SAME may free space and what is freed reads as zeroes.
    pub frees_by_zeroing: bool,
    /// Blocks that one UNMAP covers; 0 if unsupported.
    pub unmap_blocks: u32,
    /// Blocks that one COMPARE AND WRITE covers; 0 if unsupported.
    pub compare_and_write_blocks: u8,
}

/// Identity and attributes of a logical unit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnitDescription {
    /// Identity of its volume.
    pub identity: Identity,
    /// Size, block size and other attributes.
    pub attributes: UnitAttributes,
}

/// Raw data read from a unit; unsupported pages are empty.
#[derive(Clone, Debug, Default)]
pub(super) struct UnitPages {
    pub(super) inquiry: Vec<u8>,
    pub(super) identification: Vec<u8>,
    pub(super) limits: Vec<u8>,
    pub(super) provisioning: Vec<u8>,
    pub(super) capacity: Vec<u8>,
    pub(super) caching: Vec<u8>,
}

/// The body of a vital product data page, as far as its length field says.
fn body(page: &[u8]) -> &[u8] {
    let Some((&[_, _, a, b], rest)) = page.split_first_chunk() else { return &[] };
    &rest[..rest.len().min(usize::from(u16::from_be_bytes([a, b])))]
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    bytes.get(at..).and_then(|b| b.first_chunk()).map_or(0, |b| u32::from_be_bytes(*b))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    bytes.get(at..).and_then(|b| b.first_chunk()).map_or(0, |b| u64::from_be_bytes(*b))
}

fn bit(bytes: &[u8], at: usize, bit: u8) -> bool {
    bytes.get(at).is_some_and(|b| b >> bit & 1 != 0)
}

/// A block limit where 0 means no limit.
fn bounded(reported: u64, max: u32) -> u32 {
    if reported == 0 { max } else { u32::try_from(reported).unwrap_or(max).min(max) }
}

impl UnitPages {
    /// Whether the unit is a disk (SPC-4 6.6.2).
    pub(super) fn is_disk(&self) -> bool {
        self.inquiry.first() == Some(&0)
    }

    /// Parses the pages; `None` for a unit that cannot be used: no disk, protection information, or
    /// a block size other than 512 and 4096 bytes.
    pub(super) fn describe(&self) -> Option<UnitDescription> {
        let capacity = self.capacity.get(..16)?;
        let block_size = u32_at(capacity, 8);
        let blocks = u64_at(capacity, 0).checked_add(1)?;
        // PROT_EN (SBC-3 5.16.2).
        let protected = bit(capacity, 12, 0);
        if !self.is_disk()
            || ![512, 4096].contains(&block_size)
            || protected
            || blocks > METADATA_LBA.0
        {
            return None;
        }
        let (limits, provisioning) = (&self.limits, &self.provisioning);
        let dataless = MAX_DATALESS_BYTES / block_size;
        // LBPME and LBPRZ; LBPU and LBPWS.
        let (thin, zeroes) = (bit(capacity, 14, 7), bit(capacity, 14, 6));
        let by_unmap = thin && bit(provisioning, 5, 7) && u32_at(limits, 24) > 0;
        let unmap_blocks = if by_unmap { u32_at(limits, 20).min(dataless) } else { 0 };
        let frees_by_zeroing = thin && zeroes && bit(provisioning, 5, 6);
        let frees = frees_by_zeroing || unmap_blocks > 0;
        let granularity = u32_at(limits, 28).clamp(1, dataless);
        let most = bounded(u32_at(limits, 8).into(), MAX_TRANSFER_BYTES / block_size);
        let modes = CachingMode::parse(&self.caching);
        let info = Info {
            block_size,
            blocks,
            metadata_blocks: 0,
            physical_block_size: block_size << (capacity[13] & 0xf),
            max_transfer_blocks: most.clamp(1, 1 << 16),
            unmap_granularity_blocks: if frees { granularity } else { 0 },
            // UNMAP is a hint: blocks that it does not free keep their contents.
            unmap_zeroes: frees_by_zeroing,
            volatile_cache: modes.write_cache,
            native_fua: modes.fua,
            read_only: modes.write_protected,
            // The UNMAP parameter list.
            overhead_bytes: if frees && !frees_by_zeroing { 4096 } else { 0 },
        };
        let attributes = UnitAttributes {
            info,
            write_same_blocks: bounded(u64_at(limits, 36), dataless),
            frees_by_zeroing,
            unmap_blocks,
            compare_and_write_blocks: limits.get(5).copied().unwrap_or(0),
        };
        Some(UnitDescription { identity: Identity::parse(&self.identification), attributes })
    }
}

/// The *Caching* mode page, read by MODE SENSE (6) (SBC-3 6.4.5).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct CachingMode {
    write_protected: bool,
    fua: bool,
    write_cache: bool,
}

impl CachingMode {
    /// Without the page, assume a volatile cache and no FUA.
    fn parse(bytes: &[u8]) -> Self {
        const CACHING: u8 = 0x08;
        const WCE: u8 = 2;
        let Some((&[_, _, device, descriptors], rest)) = bytes.split_first_chunk() else {
            return Self { write_protected: false, fua: false, write_cache: true };
        };
        let page = rest.get(usize::from(descriptors)..).unwrap_or_default();
        let is_caching = page.first().is_some_and(|code| code & 0x3f == CACHING) && page.len() > 2;
        Self {
            write_protected: device & 0x80 != 0,
            fua: device & 0x10 != 0,
            write_cache: !is_caching || bit(page, 2, WCE),
        }
    }
}

impl UnitDescription {
    /// Whether `now` is the same volume, possibly grown.
    #[must_use]
    pub fn is_same_volume_as(&self, now: &Self) -> bool {
        let (before, after) = (&self.attributes.info, &now.attributes.info);
        self.identity == now.identity
            && before.block_size == after.block_size
            && before.blocks <= after.blocks
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A disk of 1000 blocks of 4 KiB with a NAA.
    fn pages() -> UnitPages {
        let mut capacity = vec![0; 32];
        capacity[..8].copy_from_slice(&999u64.to_be_bytes());
        capacity[8..12].copy_from_slice(&4096u32.to_be_bytes());
        let identification =
            vec![0, 0x83, 0, 16, 1, 3, 0, 8, 6, 1, 2, 3, 4, 5, 6, 7, 1, 0x14, 0, 4];
        UnitPages { inquiry: vec![0; 36], identification, capacity, ..UnitPages::default() }
    }

    fn changed(change: impl FnOnce(&mut UnitPages)) -> Option<UnitDescription> {
        let mut pages = pages();
        change(&mut pages);
        pages.describe()
    }

    /// SBC-3 5.16, SPC-4 6.6: unusable units are refused.
    #[test]
    fn implausible_unit_data_is_bounded() {
        let usual = pages().describe().unwrap();
        let info = usual.attributes.info;
        assert_eq!((info.block_size, info.blocks, info.max_transfer_blocks), (4096, 1000, 1024));
        assert!(info.volatile_cache && !info.native_fua && !info.read_only);
        assert_eq!(usual.identity.designators().collect::<Vec<_>>().len(), 1);
        for size in [0u32, 1, 520, 1024, 8192, u32::MAX] {
            let found = changed(|p| p.capacity[8..12].copy_from_slice(&size.to_be_bytes()));
            assert_eq!(found, None, "{size}");
        }
        assert_eq!(changed(|p| p.capacity[..8].fill(0xff)), None, "too large to be addressed");
        assert_eq!(changed(|p| p.capacity[..8].fill(0x7f)), None, "too large to be addressed");
        assert_eq!(changed(|p| p.capacity.truncate(15)), None, "cut off");
        assert_eq!(changed(|p| p.capacity[12] = 1), None, "protection information");
        assert_eq!(changed(|p| p.inquiry[0] = 5), None, "no disk");
        assert_eq!(changed(|p| p.inquiry[0] = 0x20), None, "none there");
        assert_eq!(changed(|p| p.inquiry.clear()), None);
        assert_eq!(
            changed(|p| p.identification.clear()).map(|d| d.identity.is_known()),
            Some(false)
        );
    }

    /// SBC-3 6.5.3, 6.5.4: numbers of any size.
    #[test]
    fn limits_are_bounded() {
        let all = changed(|p| {
            p.limits = vec![0xff; 64];
            p.provisioning = vec![0xff; 8];
            p.capacity[12..].fill(0xfe);
            p.caching = vec![0xff; 255];
        });
        let parsed = all.unwrap().attributes;
        assert_eq!((parsed.write_same_blocks, parsed.unmap_blocks), (8192, 8192));
        assert_eq!(
            (parsed.info.max_transfer_blocks, parsed.info.unmap_granularity_blocks),
            (1024, 8192)
        );
        assert!(parsed.info.physical_block_size.is_multiple_of(4096) && parsed.frees_by_zeroing);
        let small = changed(|p| {
            p.limits = vec![0; 64];
            p.limits[11] = 1;
            p.limits[43] = 1;
            p.caching = vec![3, 0, 0x90, 0, 8, 10, 0];
        });
        let parsed = small.unwrap().attributes;
        assert_eq!((parsed.info.max_transfer_blocks, parsed.write_same_blocks), (1, 1));
        assert!(parsed.info.read_only && parsed.info.native_fua && !parsed.info.volatile_cache);
        assert_eq!((parsed.unmap_blocks, parsed.compare_and_write_blocks), (0, 0));
    }

    /// SPC-4 7.8.6: designators of the unit in any order; not of ports.
    #[test]
    fn truncated_designators_are_read_as_far_as_possible() {
        let of = |bytes: &[u8]| {
            let mut page = vec![0, 0x83, 0, u8::try_from(bytes.len()).unwrap()];
            page.extend(bytes);
            Identity::parse(&page)
        };
        let (a, b) = ([1u8, 3, 0, 2, 7, 7], [1u8, 2, 0, 2, 8, 8]);
        assert_eq!(of(&[a, b].concat()), of(&[b, a].concat()));
        assert_ne!(of(&a), of(&b));
        assert!(!of(&[1, 0x13, 0, 2, 7, 7]).is_known(), "of a port");
        assert!(!of(&[1, 4, 0, 4, 0, 0, 0, 1]).is_known(), "a relative port");
        assert!(!of(&[1, 3, 0, 9, 1, 1]).is_known(), "cut off");
        assert!(of(&[2, 1, 0, 2, 65, 65]).is_known(), "a vendor's own is better than none");
        assert_eq!(of(&[&[2, 1, 0, 2, 65, 65][..], &a].concat()), of(&a));
        let mut grown = pages().describe().unwrap();
        grown.attributes.info.blocks += 1;
        let usual = pages().describe().unwrap();
        assert!(usual.is_same_volume_as(&grown) && !grown.is_same_volume_as(&usual));
    }
}
