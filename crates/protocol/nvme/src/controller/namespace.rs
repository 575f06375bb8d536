//! A namespace, as a controller presents it.

use block::Info;

use super::copy;
use crate::identify::{IdentifyNamespace, IndependentNamespace};
use crate::log::AnaState;

/// NSFEAT: thin provisioning.
const NSFEAT_THIN: u8 = 1 << 0;
/// NSFEAT: identifiers are never used again.
const NSFEAT_UIDREUSE: u8 = 1 << 3;
/// NSFEAT: NPWG, NPWA, NPDG, NPDA and NOWS are valid.
const NSFEAT_OPTPERF: u8 = 1 << 4;
/// NMIC: may be reached through several controllers.
const NMIC_SHARED: u8 = 1 << 0;
/// RESCAP: all types, which may persist through power loss; IEKEY as since 1.3.
const RESCAP: u8 = 0xff;
/// NSATTR: write protected.
const NSATTR_WRITE_PROTECTED: u8 = 1 << 0;
/// DLFEAT: deallocated blocks read as zeroes.
const DLFEAT_ZEROES: u8 = 1;
/// DLFEAT: Write Zeroes knows the Deallocate bit.
const DLFEAT_WRITE_ZEROES: u8 = 1 << 3;
/// NSTAT: ready.
const NSTAT_READY: u8 = 1 << 0;

/// A namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Namespace {
    /// Properties of its device.
    pub info: Info,
    /// UUID; permanent, and the same on every node.
    pub uuid: [u8; 16],
    /// NGUID; permanent, and the same on every node.
    pub nguid: [u8; 16],
    /// EUI-64, if it has one.
    pub eui64: Option<[u8; 8]>,
    /// Whether space is allocated only when written.
    pub thin: bool,
    /// Allocated blocks; `None` if not measured, which is reported as all.
    pub used_blocks: Option<u64>,
    /// Whether it supports reservations.
    pub keeps_reservations: bool,
    /// Whether controllers of other nodes serve it too.
    pub is_shared: bool,
}

impl Namespace {
    /// Whether a host sees the same namespace as `other`. Allocated space is ignored, as events do
    /// not report it.
    pub(super) fn has_same_attributes(&self, other: &Self) -> bool {
        Self { used_blocks: None, ..*self } == Self { used_blocks: None, ..*other }
    }

    /// The reported utilization (NVM Command Set 1.0, 4.1.5.1): the full size unless thin, and
    /// nothing while inaccessible (Base 2.0, 8.1.3.3).
    fn utilization(&self, state: AnaState) -> u64 {
        let blocks = self.info.blocks;
        match (state, self.used_blocks.filter(|_| self.thin)) {
            (AnaState::Inaccessible, _) => 0,
            (_, Some(used)) => used.min(blocks),
            (_, None) => blocks,
        }
    }

    fn features(&self) -> u8 {
        let thin = if self.thin { NSFEAT_THIN } else { 0 };
        thin | NSFEAT_UIDREUSE | NSFEAT_OPTPERF
    }

    fn attributes(&self) -> u8 {
        if self.info.read_only { NSATTR_WRITE_PROTECTED } else { 0 }
    }

    fn reservations(&self) -> u8 {
        if self.keeps_reservations { RESCAP } else { 0 }
    }

    pub(super) fn identify(&self, nsid: u32, state: AnaState) -> IdentifyNamespace {
        let info = &self.info;
        let physical = info.physical_block_size / info.block_size.max(1);
        let write_granularity = zero_based(physical);
        let unmap_granularity = zero_based(info.unmap_granularity_blocks.max(physical));
        let mut id = IdentifyNamespace::zeroed();
        id.nsze = info.blocks.into();
        id.ncap = info.blocks.into();
        id.nuse = self.utilization(state).into();
        id.nsfeat = self.features();
        id.nmic = NMIC_SHARED;
        id.rescap = self.reservations();
        id.dlfeat = DLFEAT_WRITE_ZEROES | if info.unmap_zeroes { DLFEAT_ZEROES } else { 0 };
        id.npwg = write_granularity.into();
        id.npwa = write_granularity.into();
        id.npdg = unmap_granularity.into();
        id.npda = unmap_granularity.into();
        id.nows = write_granularity.into();
        (id.mssrl, id.mcl) =
            (copy::max_range_blocks(info).into(), copy::max_copy_blocks(info).into());
        id.msrc = copy::MAX_RANGES - 1;
        id.anagrpid = nsid.into();
        id.nsattr = self.attributes();
        id.nguid = self.nguid;
        id.eui64 = self.eui64.unwrap_or_default();
        id.lbaf[0].lbads = u8::try_from(info.block_size.max(1).ilog2()).expect("at most 31");
        id
    }

    pub(super) fn independent(&self, nsid: u32) -> IndependentNamespace {
        IndependentNamespace {
            nsfeat: self.features(),
            nmic: NMIC_SHARED,
            rescap: self.reservations(),
            fpi: 0,
            anagrpid: nsid.into(),
            nsattr: self.attributes(),
            reserved9: 0,
            nvmsetid: 0.into(),
            endgid: 0.into(),
            nstat: NSTAT_READY,
            reserved15: 0,
        }
    }

    /// The list of Namespace Identification Descriptors (NVMe Base 2.0, 5.17.2.3).
    pub(super) fn descriptors(&self) -> Vec<u8> {
        const NVM_COMMAND_SET: u8 = 0;
        let mut out = Vec::with_capacity(64);
        let mut add = |kind: u8, id: &[u8]| {
            let length = u8::try_from(id.len()).expect("identifiers are at most 16 bytes");
            out.extend_from_slice(&[kind, length, 0, 0]);
            out.extend_from_slice(id);
        };
        if let Some(eui64) = &self.eui64 {
            add(1, eui64);
        }
        add(2, &self.nguid);
        add(3, &self.uuid);
        add(4, &[NVM_COMMAND_SET]);
        out
    }
}

/// A number of blocks as a 0's based field.
fn zero_based(blocks: u32) -> u16 {
    u16::try_from(blocks.saturating_sub(1)).unwrap_or(u16::MAX)
}
