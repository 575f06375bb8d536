//! The source or destination of a copy (CSCD) as a parameter list names it, and its descriptor
//! (SPC-4 6.4).

use arrayvec::ArrayVec;
use zerocopy::big_endian::U16;
use zerocopy::{FromBytes, Immutable, KnownLayout, Unaligned};

use crate::designator::{Designator, unit_designators};
use crate::sense::{Sense, SenseCode};

/// Most CSCD descriptors of one list.
pub(crate) const MAX_CSCDS: usize = 8;

/// Longest designator that fits a descriptor.
const DESIGNATOR_MAX: usize = 20;

/// A logical unit as a parameter list names it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cscd {
    kind: u8,
    code_set: u8,
    id: ArrayVec<u8, DESIGNATOR_MAX>,
    peripheral: u8,
    block_length: u32,
}

impl Cscd {
    /// Whether it designates the unit of the volume with this identity.
    #[must_use]
    pub fn identifies(&self, uuid: &[u8; 16]) -> bool {
        unit_designators(uuid)
            .iter()
            .any(|d| (d.kind, d.code_set) == (self.kind, self.code_set) && d.id == self.id[..])
    }

    /// Whether its description allows a disk with this block size.
    #[must_use]
    pub fn matches_block_size(&self, block_size: u32) -> bool {
        const DISK: u8 = 0x00;
        self.peripheral == DISK && [0, block_size].contains(&self.block_length)
    }
}

/// Identification descriptor of a copy source or copy destination (SPC-4 6.4).
#[derive(FromBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct CscdDescriptor {
    kind: u8,
    /// LU ID TYPE, which is ignored (SPC-4), and PERIPHERAL DEVICE TYPE (1Fh).
    peripheral: u8,
    _relative_initiator_port: U16,
    code_set: u8,
    /// ASSOCIATION (30h) and DESIGNATOR TYPE (0Fh).
    designator: u8,
    _reserved: u8,
    length: u8,
    id: [u8; DESIGNATOR_MAX],
    /// PAD: matters only for inexact segments, which are rejected.
    _pad: u8,
    block_length: [u8; 3],
}

/// Length of a descriptor.
pub(super) const CSCD_LEN: usize = size_of::<CscdDescriptor>();

const _: () = assert!(CSCD_LEN == 32);

/// The supported descriptor type.
pub(crate) const IDENTIFICATION: u8 = 0xe4;

/// Parses the descriptors `list` that begin at byte `at` of a parameter list.
pub(super) fn parse_cscds(list: &[u8], at: usize) -> Result<Vec<Cscd>, Sense> {
    const ASSOCIATION: u8 = 0x30;
    const DESIGNATOR_TYPE: u8 = 0x0f;
    const CODE_SET: u8 = 0x0f;
    const PERIPHERAL: u8 = 0x1f;
    const PARTIAL: Sense = Sense::illegal(SenseCode::PARAMETER_LIST_LENGTH_ERROR);
    let ends = <[CscdDescriptor]>::ref_from_bytes(list).map_err(|_| PARTIAL)?;
    if ends.len() > MAX_CSCDS {
        return Err(Sense::illegal(SenseCode::TOO_MANY_TARGET_DESCRIPTORS));
    }
    let parse = |(n, end): (usize, &CscdDescriptor)| {
        let wrong =
            |byte: usize, bit| Err(Sense::parameter((at + n * CSCD_LEN + byte) as u16, bit));
        if end.kind != IDENTIFICATION {
            return Err(Sense::illegal(SenseCode::UNSUPPORTED_TARGET_DESCRIPTOR_TYPE));
        }
        if end.designator & ASSOCIATION != 0 {
            return wrong(5, Some(5)); // of a logical unit, or of none
        }
        let id = match end.id.get(..usize::from(end.length)) {
            Some(id) if !id.is_empty() => id,
            _ => return wrong(7, None),
        };
        let [high, middle, low] = end.block_length;
        Ok(Cscd {
            kind: end.designator & DESIGNATOR_TYPE,
            code_set: end.code_set & CODE_SET,
            id: id.iter().copied().collect::<ArrayVec<_, DESIGNATOR_MAX>>(),
            peripheral: end.peripheral & PERIPHERAL,
            block_length: u32::from_be_bytes([0, high, middle, low]),
        })
    };
    ends.iter().enumerate().map(parse).collect()
}

/// Parses a single identification descriptor.
pub(super) fn parse_cscd(descriptor: &[u8; CSCD_LEN]) -> Option<Cscd> {
    parse_cscds(descriptor, 0).ok()?.pop()
}

/// The identification descriptor of a unit with blocks of `block_size` bytes.
pub(super) fn cscd_descriptor(unit: &Designator, block_size: u32) -> [u8; CSCD_LEN] {
    let mut out = [0; CSCD_LEN];
    let len = unit.id.len().min(DESIGNATOR_MAX);
    (out[0], out[4], out[5], out[7]) = (IDENTIFICATION, unit.code_set, unit.kind, len as u8);
    out[8..8 + len].copy_from_slice(&unit.id[..len]);
    out[29..].copy_from_slice(&block_size.to_be_bytes()[1..]);
    out
}
