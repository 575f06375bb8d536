//! What controllers and namespaces report about themselves, validated.

use std::time::Duration;

use ::nvme::identify::{IdentifyController, IdentifyNamespace, NvmController};
use block::{Info, METADATA_LBA};
use zerocopy::FromBytes;

use super::connect::ConnectError;

/// Most data of one command, in bytes, even if a controller allows more.
const MAX_TRANSFER_BYTES: u64 = 4 << 20;

/// Most data sent in a capsule, in bytes, even if a controller allows more: other commands wait
/// behind it.
const MAX_IN_CAPSULE_BYTES: u32 = 256 * 1024;

/// Most bytes that a command without data covers, even if a controller allows more.
const MAX_DATALESS_BYTES: u32 = 32 << 20;

/// CNTRLTYPE of I/O controllers and of discovery controllers.
const TYPE_IO: u8 = 1;
const TYPE_DISCOVERY: u8 = 2;

/// Capabilities of a controller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ControllerCapabilities {
    /// Most data of one command, in bytes.
    pub max_transfer_bytes: u32,
    /// Most data in a capsule on an I/O queue, in bytes.
    pub in_capsule_bytes: u32,
    /// Most bytes that one Write Zeroes covers.
    pub max_zero_bytes: u32,
    /// Most bytes that one Verify covers.
    pub max_verify_bytes: u32,
    /// Most blocks that one range of a Dataset Management command frees.
    pub max_discard_blocks: u32,
    /// Command quiesce time: how long commands may run after their connection has ended (CQT, NVMe
    /// Base 2.1, 5.1.13.2.1); zero if not reported.
    pub quiesce: Duration,
    /// Granularity of the keep-alive timeout (KAS).
    pub keep_alive_unit: Duration,
    /// Compare.
    pub compare: bool,
    /// Dataset Management.
    pub dataset_management: bool,
    /// Write Zeroes.
    pub write_zeroes: bool,
    /// Verify.
    pub verify: bool,
    /// Fused Compare and Write.
    pub compare_and_write: bool,
    /// There may be a volatile write cache.
    pub volatile_cache: bool,
    /// Namespaces have access states.
    pub ana: bool,
    /// Highest identifier of a group of namespaces.
    pub ana_groups: u32,
    /// Highest namespace identifier.
    pub namespaces: u32,
    /// Supported events (OAES).
    pub events: u32,
}

impl ControllerCapabilities {
    /// Parses Identify data of the controller `id` of `subnqn`; `page_bytes` is the smallest memory
    /// page (CAP.MPSMIN).
    pub(super) fn parse(
        bytes: &[u8],
        (id, subnqn, is_discovery): (u16, &str, bool),
        page_bytes: u64,
    ) -> Result<Self, ConnectError> {
        let unusable = |why| Err(ConnectError::Unusable(why));
        let Ok((c, _)) = IdentifyController::read_from_prefix(bytes) else {
            return unusable("a truncated Identify structure");
        };
        // Controllers before NVMe 1.4 leave the type 0.
        let wanted = if is_discovery { TYPE_DISCOVERY } else { TYPE_IO };
        if c.cntrltype != wanted && c.cntrltype != 0 {
            return unusable("a controller of another type");
        }
        if c.cntlid.get() != id {
            return unusable("a controller with another identifier than it connected with");
        }
        let end = c.subnqn.iter().position(|b| *b == 0).unwrap_or(c.subnqn.len());
        if !is_discovery && c.subnqn[..end] != *subnqn.as_bytes() {
            return unusable("a controller of another subsystem");
        }
        let max_transfer = match c.mdts {
            0 => MAX_TRANSFER_BYTES,
            mdts => scaled(page_bytes, mdts),
        };
        let max_transfer = max_transfer.min(MAX_TRANSFER_BYTES);
        // IOCCSZ counts 16-byte units, of which the entry takes four. In-capsule data is used only
        // if it begins right behind the entry.
        let in_capsule = c.ioccsz.get().saturating_sub(4).saturating_mul(16);
        let in_capsule = if c.icdoff.get() == 0 { in_capsule } else { 0 };
        let oncs = |bit: u16| c.oncs.get() & 1 << bit != 0;
        Ok(Self {
            max_transfer_bytes: u32::try_from(max_transfer).unwrap_or(u32::MAX),
            in_capsule_bytes: in_capsule.min(MAX_IN_CAPSULE_BYTES),
            max_zero_bytes: MAX_DATALESS_BYTES,
            max_verify_bytes: MAX_DATALESS_BYTES,
            max_discard_blocks: u32::MAX,
            quiesce: Duration::from_millis(c.cqt.get().into()),
            keep_alive_unit: Duration::from_millis(100) * u32::from(c.kas.get()),
            compare: oncs(0),
            dataset_management: oncs(2),
            write_zeroes: oncs(3),
            verify: oncs(7),
            compare_and_write: c.fuses.get() & 1 != 0,
            volatile_cache: c.vwc & 1 != 0,
            ana: c.cmic & 1 << 3 != 0,
            ana_groups: c.nanagrpid.get(),
            namespaces: c.nn.get(),
            events: c.oaes.get(),
        })
    }

    /// Parses Identify data of the command set (CNS 06h); controllers before NVMe 2.0 have neither
    /// this structure nor these limits.
    pub(super) fn apply_command_set_limits(&mut self, bytes: Option<Vec<u8>>, page_bytes: u64) {
        let bytes = bytes.unwrap_or_default();
        let Ok((c, _)) = NvmController::read_from_prefix(&bytes) else { return };
        let most = |shift: u8| match shift {
            0 => MAX_DATALESS_BYTES,
            shift => {
                let most = scaled(page_bytes, shift).min(MAX_DATALESS_BYTES.into());
                u32::try_from(most).unwrap_or(MAX_DATALESS_BYTES)
            }
        };
        (self.max_zero_bytes, self.max_verify_bytes) = (most(c.wzsl), most(c.vsl));
        // DMRSL limits a range, DMSL a command; our commands have one range. 0: no limit.
        let ranges = [u64::from(c.dmrsl.get()), c.dmsl.get()];
        let most = ranges.into_iter().filter(|most| *most > 0).min();
        self.max_discard_blocks =
            most.map_or(u32::MAX, |most| u32::try_from(most).unwrap_or(u32::MAX));
    }
}

/// `unit` times two to the power of `shift`, which may be any number.
fn scaled(unit: u64, shift: u8) -> u64 {
    unit.saturating_mul(1u64.checked_shl(shift.into()).unwrap_or(u64::MAX))
}

/// Identity of a namespace's volume: its permanent identifiers (NVMe Base 2.0, 4.5.1).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Identity {
    /// UUID; zeroes if none.
    pub uuid: [u8; 16],
    /// NGUID; zeroes if none.
    pub nguid: [u8; 16],
    /// EUI-64; zeroes if none.
    pub eui64: [u8; 8],
}

impl Identity {
    /// Parses a list of Namespace Identification Descriptors (NVMe Base 2.0, 5.17.2.3).
    pub(super) fn parse(mut list: &[u8]) -> Self {
        const EUI64: u8 = 1;
        const NGUID: u8 = 2;
        const UUID: u8 = 3;
        let mut out = Self::default();
        while let Some(([kind, length, _, _], rest)) = list.split_first_chunk()
            && *kind != 0
            && let Some((id, rest)) = rest.split_at_checked(usize::from(*length))
        {
            match (*kind, id.len()) {
                (EUI64, 8) => out.eui64.copy_from_slice(id),
                (NGUID, 16) => out.nguid.copy_from_slice(id),
                (UUID, 16) => out.uuid.copy_from_slice(id),
                _ => {}
            }
            list = rest;
        }
        out
    }

    /// Whether it identifies a volume at all.
    #[must_use]
    pub fn is_known(&self) -> bool {
        *self != Self::default()
    }
}

/// Identity and attributes of a namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NamespaceDescription {
    /// Identity of its volume.
    pub identity: Identity,
    /// Size, block size and the like.
    pub info: Info,
    /// Blocks that one Write Zeroes covers; 0 if unsupported.
    pub zero_blocks: u32,
    /// Blocks that one Dataset Management command frees.
    pub discard_blocks: u32,
    /// Blocks that one Verify covers; 0 if unsupported.
    pub verify_blocks: u32,
    /// Whether Write Zeroes may free space and what is freed reads as zeroes.
    pub frees_by_zeroing: bool,
    /// Its ANA group (ANAGRPID).
    pub ana_group: u32,
}

impl NamespaceDescription {
    /// Parses Identify data of a namespace; `None` for one that cannot be used: inactive, with
    /// metadata or protection information, or with a block size other than 512 and 4096 bytes.
    pub(super) fn parse(
        bytes: &[u8],
        identity: Identity,
        abilities: &ControllerCapabilities,
    ) -> Option<Self> {
        /// NSFEAT: NPWG, NPDG and so on are valid.
        const OPTPERF: u8 = 1 << 4;
        /// NSATTR: write protected.
        const WRITE_PROTECTED: u8 = 1 << 0;
        /// DLFEAT: freed blocks read as zeroes; Write Zeroes may free.
        const READS_ZEROES: u8 = 0b001;
        const WRITE_ZEROES_FREES: u8 = 1 << 3;
        let (n, _) = IdentifyNamespace::read_from_prefix(bytes).ok()?;
        let format = n.lbaf.get(usize::from(n.flbas & 0xf | n.flbas >> 1 & 0x30))?;
        let block_size =
            1u32.checked_shl(format.lbads.into()).filter(|b| [512, 4096].contains(b))?;
        let blocks = n.nsze.get();
        if blocks == 0 || blocks > METADATA_LBA.0 || format.ms.get() != 0 || n.dps & 0b111 != 0 {
            return None;
        }
        let granularity =
            |field: u16| if n.nsfeat & OPTPERF != 0 { u32::from(field) + 1 } else { 1 };
        let physical = granularity(n.npwg.get()).saturating_mul(block_size);
        let frees_by_zeroing = abilities.write_zeroes
            && n.dlfeat & 0b111 == READS_ZEROES
            && n.dlfeat & WRITE_ZEROES_FREES != 0;
        let frees = frees_by_zeroing || abilities.dataset_management;
        let info = Info {
            block_size,
            blocks,
            metadata_blocks: 0,
            physical_block_size: physical,
            max_transfer_blocks: (abilities.max_transfer_bytes / block_size).clamp(1, 1 << 16),
            unmap_granularity_blocks: if frees { granularity(n.npdg.get()) } else { 0 },
            // Dataset Management is a hint: blocks that it does not free keep their contents.
            unmap_zeroes: frees_by_zeroing,
            volatile_cache: abilities.volatile_cache,
            native_fua: true,
            read_only: n.nsattr & WRITE_PROTECTED != 0,
            // The range of a Dataset Management command.
            overhead_bytes: if frees_by_zeroing || !frees { 0 } else { 4096 },
        };
        // Controllers before NVMe 1.3 have no list of identifiers.
        let identity = if identity.is_known() {
            identity
        } else {
            Identity { uuid: [0; 16], nguid: n.nguid, eui64: n.eui64 }
        };
        // NLB has 16 bits.
        let covers = |able: bool, bytes: u32| {
            if able { (bytes / block_size).clamp(1, 1 << 16) } else { 0 }
        };
        let zero_blocks = covers(abilities.write_zeroes, abilities.max_zero_bytes);
        let verify_blocks = covers(abilities.verify, abilities.max_verify_bytes);
        Some(Self {
            identity,
            info,
            zero_blocks,
            discard_blocks: abilities.max_discard_blocks,
            verify_blocks,
            frees_by_zeroing,
            ana_group: n.anagrpid.get(),
        })
    }

    /// Whether `now` is the same volume, possibly grown, at a controller with at least the same
    /// capabilities.
    pub(super) fn match_volume(&self, now: &Self) -> PathIdentity {
        let (info, others) = (&self.info, &now.info);
        if self.identity != now.identity || info.block_size != others.block_size {
            return PathIdentity::Different("it is another volume now");
        }
        if info.blocks > others.blocks {
            return PathIdentity::Different("it has become smaller");
        }
        let is_lesser = others.max_transfer_blocks < info.max_transfer_blocks
            || now.zero_blocks < self.zero_blocks
            || now.verify_blocks < self.verify_blocks
            || now.discard_blocks < self.discard_blocks
            || info.unmap_granularity_blocks > 0 && others.unmap_granularity_blocks == 0
            // What it frees may read as anything.
            || self.frees_by_zeroing && !now.frees_by_zeroing;
        if is_lesser {
            PathIdentity::Unavailable("its controller supports less")
        } else {
            PathIdentity::Same
        }
    }

    /// The capabilities that two controllers of one volume share.
    pub(super) fn intersection(&self, other: &Self) -> Self {
        let (a, b) = (&self.info, &other.info);
        let info = Info {
            blocks: a.blocks.min(b.blocks),
            max_transfer_blocks: a.max_transfer_blocks.min(b.max_transfer_blocks),
            physical_block_size: a.physical_block_size.max(b.physical_block_size),
            unmap_granularity_blocks: match (a.unmap_granularity_blocks, b.unmap_granularity_blocks)
            {
                (0, _) | (_, 0) => 0,
                (a, b) => a.max(b),
            },
            unmap_zeroes: a.unmap_zeroes && b.unmap_zeroes,
            volatile_cache: a.volatile_cache || b.volatile_cache,
            read_only: a.read_only || b.read_only,
            overhead_bytes: a.overhead_bytes.max(b.overhead_bytes),
            ..*a
        };
        Self {
            info,
            zero_blocks: self.zero_blocks.min(other.zero_blocks),
            discard_blocks: self.discard_blocks.min(other.discard_blocks),
            verify_blocks: self.verify_blocks.min(other.verify_blocks),
            frees_by_zeroing: self.frees_by_zeroing && other.frees_by_zeroing,
            ..*self
        }
    }

    /// The same with the size of `now`: while a device is open, only its size changes, and only
    /// upwards.
    pub(super) fn with_size_of(&self, now: &Self) -> Self {
        Self { info: Info { blocks: now.info.blocks.max(self.info.blocks), ..self.info }, ..*self }
    }
}

/// What is known of the volume that a path leads to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PathIdentity {
    /// Not verified, or not since it may have changed.
    Unknown,
    /// The expected volume.
    Same,
    /// Another volume.
    Different(&'static str),
    /// Missing, or temporarily lacking a needed capability.
    Unavailable(&'static str),
}

#[cfg(test)]
mod tests {
    use ::nvme::identify::LbaFormat;
    use zerocopy::IntoBytes;

    use super::*;

    const SUBNQN: &str = "nqn.2026-01.com.example:disk";

    fn controller() -> IdentifyController {
        let mut c = IdentifyController::zeroed();
        (c.cntrltype, c.cntlid, c.mdts, c.ioccsz) = (1, 9.into(), 8, 260.into());
        c.subnqn[..SUBNQN.len()].copy_from_slice(SUBNQN.as_bytes());
        c.oncs = 0xffff.into();
        c
    }

    fn abilities(c: &IdentifyController) -> Result<ControllerCapabilities, ConnectError> {
        ControllerCapabilities::parse(c.as_bytes(), (9, SUBNQN, false), 4096)
    }

    fn namespace() -> IdentifyNamespace {
        let mut n = IdentifyNamespace::zeroed();
        (n.nsze, n.nguid) = (1000.into(), [5; 16]);
        n.lbaf[0] = LbaFormat { ms: 0.into(), lbads: 12, rp: 0 };
        n
    }

    fn described(n: &IdentifyNamespace) -> Option<NamespaceDescription> {
        let abilities = abilities(&controller()).unwrap();
        NamespaceDescription::parse(n.as_bytes(), Identity::default(), &abilities)
    }

    /// NVMe Base 2.0, 5.17.2.1: structures of other controllers, and numbers of any size.
    #[test]
    fn implausible_controller_data_is_bounded() {
        let usual = abilities(&controller()).unwrap();
        assert_eq!((usual.max_transfer_bytes, usual.in_capsule_bytes), (1 << 20, 4096));
        let changed = |change: &dyn Fn(&mut IdentifyController)| {
            let mut c = controller();
            change(&mut c);
            abilities(&c)
        };
        assert!(changed(&|c| c.cntlid = 8.into()).is_err(), "another controller");
        assert!(changed(&|c| c.cntrltype = 2).is_err(), "a discovery controller");
        assert!(changed(&|c| c.subnqn[3] = b'x').is_err(), "another subsystem");
        assert!(changed(&|c| c.subnqn = [b'n'; 256]).is_err(), "a name without end");
        for (mdts, bytes) in [(0, 4 << 20), (1, 8192), (63, 4 << 20), (255, 4 << 20)] {
            assert_eq!(changed(&|c| c.mdts = mdts).unwrap().max_transfer_bytes, bytes, "{mdts}");
        }
        for (ioccsz, bytes) in [(0, 0), (3, 0), (4, 0), (5, 16), (u32::MAX, 256 << 10)] {
            let found = changed(&|c| c.ioccsz = ioccsz.into()).unwrap().in_capsule_bytes;
            assert_eq!(found, bytes, "{ioccsz}");
        }
        let elsewhere = changed(&|c| c.icdoff = 1.into()).unwrap();
        assert_eq!(elsewhere.in_capsule_bytes, 0, "data that does not begin behind the entry");
        assert!(
            ControllerCapabilities::parse(&[0; 100], (9, SUBNQN, false), 4096).is_err(),
            "cut off"
        );
        let mut quiescing = controller().as_bytes().to_vec();
        quiescing[386..388].copy_from_slice(&[0x34, 0x12]);
        let quiescing =
            ControllerCapabilities::parse(&quiescing, (9, SUBNQN, false), 4096).unwrap();
        let of = |a: ControllerCapabilities| a.quiesce.as_millis();
        assert_eq!((of(usual), of(quiescing)), (0, 0x1234), "CQT, bytes 387:386, in ms");
        let mut limited = usual;
        let limits =
            NvmController { vsl: 255, wzsl: 1, wusl: 0, dmrl: 0, dmrsl: 0.into(), dmsl: 0.into() };
        limited.apply_command_set_limits(Some(limits.as_bytes().to_vec()), 4096);
        assert_eq!((limited.max_zero_bytes, limited.max_verify_bytes), (8192, 32 << 20));
        for (dmrsl, dmsl, blocks) in [
            (0, 0, u32::MAX),
            (7, 0, 7),
            (0, 9, 9),
            (7, 9, 7),
            (9, 7, 7),
            (0, u64::MAX, u32::MAX),
            (u32::MAX, 1 << 32, u32::MAX),
        ] {
            let limits = NvmController { dmrsl: dmrsl.into(), dmsl: dmsl.into(), ..limits };
            limited.apply_command_set_limits(Some(limits.as_bytes().to_vec()), 4096);
            assert_eq!(limited.max_discard_blocks, blocks, "{dmrsl} {dmsl}");
        }
    }

    /// NVM Command Set 1.0, 4.1.5.1: unusable namespaces are refused.
    #[test]
    fn implausible_namespace_data_is_bounded() {
        let usual = described(&namespace()).unwrap();
        assert_eq!((usual.info.block_size, usual.info.blocks), (4096, 1000));
        assert_eq!((usual.identity.nguid, usual.zero_blocks), ([5; 16], 8192));
        let unusable = |change: &dyn Fn(&mut IdentifyNamespace)| {
            let mut n = namespace();
            change(&mut n);
            described(&n).is_none()
        };
        for lbads in [0, 8, 10, 13, 31, 32, 255] {
            assert!(unusable(&|n| n.lbaf[0].lbads = lbads), "{lbads}");
        }
        assert!(unusable(&|n| n.nsze = 0.into()), "inactive");
        assert!(unusable(&|n| n.nsze = u64::MAX.into()), "too large to be addressed");
        assert!(unusable(&|n| n.lbaf[0].ms = 8.into()), "metadata");
        assert!(unusable(&|n| n.dps = 1), "protection information");
        assert!(unusable(&|n| n.flbas = 0x6f), "format 63, which says nothing");
        let mut grown = usual;
        grown.info.blocks += 1;
        assert_eq!(usual.match_volume(&grown), PathIdentity::Same);
        assert!(matches!(grown.match_volume(&usual), PathIdentity::Different(_)));
        let other = Identity { uuid: [1; 16], ..usual.identity };
        let other = usual.match_volume(&NamespaceDescription { identity: other, ..usual });
        assert!(matches!(other, PathIdentity::Different(_)));
    }

    /// A path with fewer capabilities is used only if all commands stay within them.
    #[test]
    fn several_controllers_are_asked_for_what_each_can() {
        let usual = described(&namespace()).unwrap();
        let lesser = |change: &dyn Fn(&mut NamespaceDescription)| {
            let mut now = usual;
            change(&mut now);
            assert!(usual.match_volume(&now) != PathIdentity::Same, "{now:?}");
            for least in [usual.intersection(&now), now.intersection(&usual)] {
                assert_eq!(least.match_volume(&usual), PathIdentity::Same, "{least:?}");
                assert_eq!(least.match_volume(&now), PathIdentity::Same, "{least:?}");
            }
        };
        lesser(&|d| d.info.max_transfer_blocks = 1);
        lesser(&|d| d.zero_blocks = 0);
        lesser(&|d| d.discard_blocks = 1);
        lesser(&|d| d.verify_blocks = 0);
        lesser(&|d| d.info.blocks -= 1);
    }

    /// NVMe Base 2.0, 5.17.2.3.
    #[test]
    fn truncated_identifiers_are_read_as_far_as_possible() {
        let list = [&[1, 8, 0, 0][..], &[7; 8], &[2, 16, 0, 0], &[8; 16], &[3, 16, 0, 0]].concat();
        let found = Identity::parse(&list);
        assert_eq!((found.eui64, found.nguid, found.uuid), ([7; 8], [8; 16], [0; 16]), "cut off");
        assert!(!Identity::parse(&[9, 0, 0, 0, 0, 1]).is_known());
        assert!(!Identity::parse(&[2, 8, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1]).is_known(), "its length");
    }
}
