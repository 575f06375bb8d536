//! Identify (NVMe Base 2.0, 5.17).

use block::BufsMut;
use zerocopy::IntoBytes;
use zerocopy::little_endian::{U32, U64};

use super::admin::AdminAction;
use super::error_log::{CommandError, ENTRIES, field};
use super::events::{self, EventKind};
use super::page_writer::PageWriter;
use super::{ABORT_LIMIT, Controller, Namespace, keep_alive, properties};
use crate::connection::IN_CAPSULE_BYTES;
use crate::entry::{Completion, NSID_ALL, Sqe};
use crate::identify::{Cns, IDENTIFY_BYTES, IdentifyController, IdentifyNamespace, NvmController};
use crate::status::Status;

/// CMIC: several ports, several controllers, asymmetric access.
const CMIC: u8 = 1 << 0 | 1 << 1 | 1 << 3;
/// CTRATT: 128-bit host identifiers, traffic based keep alive.
const CTRATT: u32 = 1 << 0 | 1 << 6;
/// FRMW: one slot, read only.
const FRMW: u8 = 1 << 0 | 1 << 1;
/// LPA: effects log, offsets in logs, the logs of supported logs and features.
const LPA: u8 = 1 << 1 | 1 << 2 | 1 << 5;
/// ONCS: Compare, Dataset Management, Write Zeroes, Save and Select, reservations, Verify, Copy.
const ONCS: u16 = 1 << 0 | 1 << 2 | 1 << 3 | 1 << 4 | 1 << 5 | 1 << 7 | 1 << 8;
/// FUSES: Compare and Write.
const FUSES: u16 = 1 << 0;
/// OCFS: format 0, for namespaces without protection information.
const OCFS: u16 = 1 << 0;
/// OFCS: Disconnect.
const OFCS: u16 = 1 << 0;
/// VWC: there may be a volatile cache, and Flush takes the broadcast NSID.
const VWC: u8 = 1 << 0 | 0b11 << 1;
/// SGLS: SGLs, offsets into the capsule, transport data blocks.
const SGLS: u32 = 1 << 0 | 1 << 20 | 1 << 21;
/// ANACAP: all states are reported, groups of namespaces do not change.
const ANACAP: u8 = 0b1_1111 | 1 << 6;
/// ANATT in seconds.
const ANATT: u8 = 10;
/// Power of the one power state, in units of 10 mW; arbitrary.
const POWER: u16 = 2500;

/// Largest Verify and Write Zeroes as a power of two pages: 32 MiB. It stays within the 65,536
/// blocks that NLB can express.
const UNBOUNDED_TRANSFER_SHIFT: u8 = 13;

/// [`UNBOUNDED_TRANSFER_SHIFT`] in bytes.
pub(super) const MAX_DATALESS_BYTES: u64 = 4096 << UNBOUNDED_TRANSFER_SHIFT;

/// The NVM command set, the only one.
const CSI_NVM: u8 = 0;

/// A requested structure.
enum IdentifyPage<'a> {
    Namespace(Option<&'a Namespace>),
    Independent(Option<&'a Namespace>),
    Descriptors(&'a Namespace),
    Controller,
    ActiveAfter(u32),
    NvmNamespace,
    NvmController,
    CommandSets,
}

impl Controller {
    /// An Identify command has arrived.
    pub(super) fn identify(&self, sqe: &Sqe) -> Result<AdminAction, CommandError> {
        self.identify_page(sqe)?;
        Self::check_exact_length(sqe, IDENTIFY_BYTES)?;
        Ok(AdminAction::Produce { bytes: IDENTIFY_BYTES })
    }

    pub(super) fn produce_identify(
        &self,
        sqe: &Sqe,
        buffers: &mut BufsMut,
    ) -> Result<Completion, CommandError> {
        let (page, nsid) = (self.identify_page(sqe)?, sqe.nsid.get());
        let mut window = PageWriter::new(0, buffers);
        match page {
            IdentifyPage::Namespace(ns) => {
                let (state, _) = self.ana.state(nsid);
                let id = ns.map_or_else(IdentifyNamespace::zeroed, |ns| ns.identify(nsid, state));
                window.put(0, id.as_bytes());
            }
            IdentifyPage::Independent(Some(ns)) => window.put(0, ns.independent(nsid).as_bytes()),
            IdentifyPage::Independent(None) | IdentifyPage::NvmNamespace => {}
            IdentifyPage::Descriptors(ns) => window.put(0, &ns.descriptors()),
            IdentifyPage::Controller => window.put(0, self.identify_controller().as_bytes()),
            IdentifyPage::ActiveAfter(nsid) => {
                let after = self.namespaces.range(nsid.saturating_add(1)..);
                for (i, (nsid, _)) in (0..u64::from(IDENTIFY_BYTES / 4)).zip(after) {
                    window.put(i * 4, U32::new(*nsid).as_bytes());
                }
            }
            IdentifyPage::NvmController => {
                let (vsl, wzsl) = (UNBOUNDED_TRANSFER_SHIFT, UNBOUNDED_TRANSFER_SHIFT);
                let (dmrsl, dmsl) = (U32::new(0), U64::new(0));
                let id = NvmController { vsl, wzsl, wusl: 0, dmrl: 0, dmrsl, dmsl };
                window.put(0, id.as_bytes());
            }
            IdentifyPage::CommandSets => window.put(0, U64::new(1 << CSI_NVM).as_bytes()),
        }
        Ok(Completion::OK)
    }

    fn identify_page(&self, sqe: &Sqe) -> Result<IdentifyPage<'_>, CommandError> {
        let [cns, ..] = sqe.cdw(0).to_le_bytes();
        let [.., csi] = sqe.cdw(1).to_le_bytes();
        let nsid = sqe.nsid.get();
        let cns = Cns(cns);
        if self.is_discovery() && cns != Cns::Controller {
            return Err(CommandError::field(field::CDW10));
        }
        let by_command_set = matches!(
            cns,
            Cns::CommandSetNamespace | Cns::CommandSetController | Cns::CommandSetActiveNamespaces
        );
        if by_command_set && csi != CSI_NVM {
            return Err(CommandError::field(field::CDW11 + 3));
        }
        match cns {
            Cns::Namespace => Ok(IdentifyPage::Namespace(self.valid_namespace(nsid)?)),
            Cns::Controller => Ok(IdentifyPage::Controller),
            Cns::ActiveNamespaces | Cns::CommandSetActiveNamespaces => {
                if nsid >= NSID_ALL - 1 {
                    return Err(CommandError::at(Status::INVALID_NAMESPACE, field::NSID));
                }
                Ok(IdentifyPage::ActiveAfter(nsid))
            }
            Cns::Descriptors => {
                let inactive = CommandError::at(Status::INVALID_NAMESPACE, field::NSID);
                Ok(IdentifyPage::Descriptors(self.valid_namespace(nsid)?.ok_or(inactive)?))
            }
            Cns::CommandSetNamespace => {
                self.valid_namespace(nsid).map(|_| IdentifyPage::NvmNamespace)
            }
            Cns::CommandSetController => Ok(IdentifyPage::NvmController),
            Cns::IndependentNamespace => Ok(IdentifyPage::Independent(self.valid_namespace(nsid)?)),
            Cns::CommandSets => Ok(IdentifyPage::CommandSets),
            _ => Err(CommandError::field(field::CDW10)),
        }
    }

    /// The namespace with a valid identifier; `None` if it is inactive (NVMe Base 2.0, 3.2.1).
    pub(super) fn valid_namespace(&self, nsid: u32) -> Result<Option<&Namespace>, CommandError> {
        if nsid == 0 || nsid > self.limits.namespaces {
            return Err(CommandError::at(Status::INVALID_NAMESPACE, field::NSID));
        }
        Ok(self.namespaces.get(&nsid))
    }

    /// Data of every controller.
    fn identify_controller(&self) -> IdentifyController {
        let mut id = IdentifyController::zeroed();
        pad(&mut id.sn, &self.subsystem.serial);
        pad(&mut id.mn, &self.subsystem.model);
        pad(&mut id.fr, &self.subsystem.firmware);
        id.mdts = self.limits.mdts();
        id.cntlid = self.id.into();
        id.ver = properties::VERSION.into();
        id.ctratt = CTRATT.into();
        id.acl = ABORT_LIMIT - 1;
        id.aerl = u8::try_from(events::LIMIT - 1).expect("a small constant");
        id.frmw = FRMW;
        id.lpa = LPA;
        id.elpe = u8::try_from(ENTRIES - 1).expect("a small constant");
        id.kas = keep_alive::KAS.into();
        id.maxcmd = self.limits.queue_entries.into();
        id.sgls = SGLS.into();
        let nqn = self.subsystem.nqn.as_bytes();
        let n = nqn.len().min(id.subnqn.len() - 1);
        id.subnqn[..n].copy_from_slice(&nqn[..n]);
        id.ioccsz = ((64 + IN_CAPSULE_BYTES) / 16).into();
        id.iorcsz = 1.into();
        id.msdbd = 1;
        if self.is_discovery() {
            id.cntrltype = 2;
            id.oaes = EventKind::Discovery.bit().into();
        } else {
            self.identify_io_controller(&mut id);
        }
        id
    }

    /// Additional data of an I/O controller.
    fn identify_io_controller(&self, id: &mut IdentifyController) {
        id.cntrltype = 1;
        id.rab = 6;
        id.cmic = CMIC;
        id.oaes = (EventKind::Namespaces.bit() | EventKind::Ana.bit()).into();
        id.anatt = ANATT;
        id.cqt = self.subsystem.quiesce_ms.into();
        id.anacap = ANACAP;
        id.anagrpmax = self.limits.namespaces.into();
        id.nanagrpid = self.limits.namespaces.into();
        id.sqes = 0x66;
        id.cqes = 0x44;
        id.nn = self.limits.namespaces.into();
        id.mnan = self.limits.namespaces.into();
        id.oncs = ONCS.into();
        id.fuses = FUSES.into();
        id.ocfs = OCFS.into();
        id.ofcs = OFCS.into();
        id.vwc = VWC;
        id.psd0_mp = POWER.into();
    }
}

/// ASCII text padded with spaces, as NVMe writes it.
pub(super) fn pad(field: &mut [u8], text: &str) {
    field.fill(b' ');
    let printable = text.bytes().filter(|b| (0x20..0x7f).contains(b));
    for (to, from) in field.iter_mut().zip(printable) {
        *to = from;
    }
}
