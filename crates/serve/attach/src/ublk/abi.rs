//! Data of control commands

use block::Info;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::request::SECTOR_BYTES;

/// Control commands
pub(super) mod command {
    pub(in crate::ublk) const GET_DEV_INFO: u32 = 0x8020_7502;
    pub(in crate::ublk) const ADD_DEV: u32 = 0xc020_7504;
    pub(in crate::ublk) const DEL_DEV: u32 = 0xc020_7505;
    pub(in crate::ublk) const START_DEV: u32 = 0xc020_7506;
    pub(in crate::ublk) const STOP_DEV: u32 = 0xc020_7507;
    pub(in crate::ublk) const SET_PARAMS: u32 = 0xc020_7508;
    pub(in crate::ublk) const GET_PARAMS: u32 = 0x8020_7509;
    pub(in crate::ublk) const START_USER_RECOVERY: u32 = 0xc020_7510;
    pub(in crate::ublk) const END_USER_RECOVERY: u32 = 0xc020_7511;
    pub(in crate::ublk) const GET_FEATURES: u32 = 0x8020_7513;
}

/// The device and its requests stay when its process ends.
const USER_RECOVERY: u64 = 1 << 3;
/// Unanswered requests are reissued to the next process.
const USER_RECOVERY_REISSUE: u64 = 1 << 4;
/// Data is copied through the character device.
const USER_COPY: u64 = 1 << 7;

/// Features requested from the driver (Linux 6.5).
pub(super) const FEATURES: u64 = USER_RECOVERY | USER_RECOVERY_REISSUE | USER_COPY;

const PARAM_BASIC: u32 = 1 << 0;
const PARAM_DISCARD: u32 = 1 << 1;
const ATTR_READ_ONLY: u32 = 1 << 0;
const ATTR_VOLATILE_CACHE: u32 = 1 << 2;
const ATTR_FUA: u32 = 1 << 3;

/// Longest range of one discard or write-zeroes, in sectors: 4 GiB.
const MAX_RANGE_SECTORS: u32 = 1 << 23;

/// Granularity of the page cache, and what file systems align to.
const PHYSICAL_BYTES: u32 = 4096;

/// State of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// No block device: not started yet, or stopped.
    Dead,
    /// A process serves it, or did until a moment ago.
    Live,
    /// Its process has ended; requests wait.
    Quiesced,
    /// Another state.
    Unknown(u16),
}

/// `struct ublksrv_ctrl_dev_info`.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub(super) struct DeviceInfo {
    pub(super) queues: u16,
    pub(super) depth: u16,
    pub(super) state: u16,
    pub(super) pad: u16,
    pub(super) max_bytes: u32,
    pub(super) id: u32,
    pub(super) pid: i32,
    pub(super) pad_again: u32,
    pub(super) flags: u64,
    /// Reserved for the server; the driver stores it.
    pub(super) tag: u64,
    pub(super) owner: [u32; 2],
    pub(super) reserved: [u64; 2],
}

const _: () = assert!(size_of::<DeviceInfo>() == 64);

impl DeviceInfo {
    pub(super) fn state(&self) -> State {
        match self.state {
            0 => State::Dead,
            1 => State::Live,
            2 => State::Quiesced,
            other => State::Unknown(other),
        }
    }

    /// Whether it was created here for the volume of this tag.
    pub(super) fn belongs_to(&self, tag: u64) -> bool {
        self.tag == tag && self.flags & FEATURES == FEATURES
    }
}

/// The tag that identifies a volume's devices: 64 bits that the driver stores for the server. Not
/// zero, as those of other programs are.
pub(super) fn tag_of(identity: u128) -> u64 {
    let [a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p] = identity.to_be_bytes();
    let high = u64::from_be_bytes([a, b, c, d, e, f, g, h]);
    let low = u64::from_be_bytes([i, j, k, l, m, n, o, p]);
    // "windrose" distinguishes it from programs that store something else there.
    high ^ low.rotate_left(32) ^ u64::from_be_bytes(*b"windrose")
}

/// The part of `struct ublk_params` that is used.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub struct Parameters {
    len: u32,
    types: u32,
    attributes: u32,
    logical_shift: u8,
    physical_shift: u8,
    io_opt_shift: u8,
    io_min_shift: u8,
    max_sectors: u32,
    chunk_sectors: u32,
    sectors: u64,
    virt_boundary_mask: u64,
    discard_alignment: u32,
    discard_granularity: u32,
    max_discard_sectors: u32,
    max_zeroes_sectors: u32,
    max_discard_segments: u16,
    reserved: u16,
    // Padding to the kernel's 8-byte alignment: unused, and not counted in `len`.
    rest: u32,
}

/// Used length of [`Parameters`].
const PARAMETERS_LEN: u32 = 60;

const _: () = assert!(size_of::<Parameters>() == PARAMETERS_LEN as usize + 4);

impl Parameters {
    /// The parameters of a volume's device, with requests of at most `max_bytes`.
    #[must_use]
    pub fn of(info: &Info, read_only: bool, max_bytes: u32) -> Self {
        let physical = info.physical_block_size.next_power_of_two().max(PHYSICAL_BYTES);
        let shift = |bytes: u32| bytes.trailing_zeros() as u8;
        let granularity = info.unmap_granularity_blocks.saturating_mul(info.block_size);
        let read_only = read_only || info.read_only;
        let discards = granularity > 0 && !read_only;
        Self {
            len: PARAMETERS_LEN,
            types: PARAM_BASIC | PARAM_DISCARD,
            // FUA writes are durable on completion, whatever the volume's storage.
            attributes: ATTR_VOLATILE_CACHE | ATTR_FUA | if read_only { ATTR_READ_ONLY } else { 0 },
            logical_shift: shift(info.block_size),
            physical_shift: shift(physical.min(1 << 16)),
            io_opt_shift: shift(physical.min(1 << 16)),
            io_min_shift: shift(physical.min(1 << 16)),
            max_sectors: max_bytes / SECTOR_BYTES,
            sectors: info.bytes() / u64::from(SECTOR_BYTES),
            discard_granularity: granularity.max(info.block_size),
            max_discard_sectors: if discards { MAX_RANGE_SECTORS } else { 0 },
            max_zeroes_sectors: if read_only { 0 } else { MAX_RANGE_SECTORS },
            max_discard_segments: 1,
            ..Self::default()
        }
    }

    /// Encodes them for the driver.
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut bytes = self.as_bytes().to_vec();
        bytes.truncate(PARAMETERS_LEN as usize);
        bytes
    }

    /// Encodes a query to the driver.
    pub(super) fn get_request() -> Vec<u8> {
        Self { len: PARAMETERS_LEN, ..Self::default() }.encode()
    }

    /// Decodes the driver's answer.
    pub(super) fn decode(bytes: &[u8]) -> Option<Self> {
        let mut whole = bytes.get(..PARAMETERS_LEN as usize)?.to_vec();
        whole.extend([0; 4]);
        Self::read_from_bytes(&whole).ok()
    }

    /// Why a device with these parameters does not fit the volume now, if it does not.
    pub(super) fn mismatch(&self, wanted: &Self) -> Option<&'static str> {
        let writable = |p: &Self| p.attributes & ATTR_READ_ONLY == 0;
        if self.logical_shift != wanted.logical_shift {
            Some("its blocks have another size than the volume's")
        } else if self.sectors > wanted.sectors {
            Some("it is larger than the volume")
        } else if writable(self) != writable(wanted) {
            Some("one is writable and the other read-only")
        } else {
            None
        }
    }

    /// Size of the device in bytes.
    pub(super) fn bytes(&self) -> u64 {
        self.sectors.saturating_mul(SECTOR_BYTES.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn info() -> Info {
        Info {
            block_size: 512,
            blocks: 1 << 20,
            metadata_blocks: 0,
            physical_block_size: 512,
            max_transfer_blocks: 2048,
            unmap_granularity_blocks: 8,
            unmap_zeroes: true,
            volatile_cache: true,
            native_fua: true,
            read_only: false,
            overhead_bytes: 0,
        }
    }

    #[test]
    fn parameters_are_laid_out_as_the_kernel_reads_them() {
        let bytes = Parameters::of(&info(), false, 1 << 20).encode();
        let words: Vec<u32> =
            bytes.as_chunks::<4>().0.iter().map(|word| u32::from_le_bytes(*word)).collect();
        let shifts = u32::from_le_bytes([9, 12, 12, 12]);
        let sizes = [2048, 0, 1 << 20, 0, 0, 0];
        let discard = [0, 4096, MAX_RANGE_SECTORS, MAX_RANGE_SECTORS, 1];
        assert_eq!(words, [&[60, 3, 12, shifts][..], &sizes, &discard].concat());
        let read = Parameters::decode(&bytes).unwrap();
        assert_eq!(read, Parameters::of(&info(), false, 1 << 20));
        assert_eq!(read.bytes(), 512 << 20);
        assert_eq!(Parameters::decode(&bytes[..59]), None);
    }

    #[test]
    fn read_only_devices_offer_no_changes() {
        let fixed = Parameters::of(&info(), true, 1 << 20);
        assert_eq!((fixed.max_discard_sectors, fixed.max_zeroes_sectors), (0, 0));
        assert_eq!(fixed.attributes, ATTR_VOLATILE_CACHE | ATTR_FUA | ATTR_READ_ONLY);
        let thick = Info { unmap_granularity_blocks: 0, ..info() };
        let thick = Parameters::of(&thick, false, 1 << 20);
        // The driver refuses a granularity of zero.
        assert_eq!((thick.max_discard_sectors, thick.discard_granularity), (0, 512));
        assert_eq!(thick.max_zeroes_sectors, MAX_RANGE_SECTORS);
    }

    #[test]
    fn a_device_that_was_left_fits_its_volume_or_is_left_alone() {
        let of = |info: &Info, read_only| Parameters::of(info, read_only, 1 << 20);
        let left = of(&info(), false);
        assert_eq!(left.mismatch(&of(&info(), false)), None);
        let grown = Info { blocks: 2 << 20, ..info() };
        assert_eq!(left.mismatch(&of(&grown, false)), None);
        let smaller = Info { blocks: 1 << 19, ..info() };
        assert!(left.mismatch(&of(&smaller, false)).is_some());
        assert!(left.mismatch(&of(&info(), true)).is_some());
        let wide = Info { block_size: 4096, blocks: 1 << 20, ..info() };
        assert!(left.mismatch(&of(&wide, false)).is_some());
    }

    #[test]
    fn a_device_is_known_by_its_volume() {
        let of = |tag| DeviceInfo { tag, flags: FEATURES | 1 << 6, ..DeviceInfo::default() };
        let (one, other) = (tag_of(1 << 100 | 1), tag_of(1 << 100 | 2));
        assert_ne!(one, other);
        assert!(of(one).belongs_to(one) && !of(one).belongs_to(other) && !of(0).belongs_to(one));
        assert!(!DeviceInfo { flags: 0, ..of(one) }.belongs_to(one));
        assert_ne!(tag_of(0), 0);
    }
}
