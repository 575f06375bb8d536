//! Identify (NVMe Base 2.0, 5.17).

use super::{Admin, Controller, EVENT_REQUESTS, Event, MDTS, Namespace, property};
use crate::connection::IN_CAPSULE_BYTES;
use crate::entry::{Completion, NSID_ALL, Sqe};
use crate::{MAX_QUEUE_ENTRIES, Status};

/// All Identify data structures have this length in bytes.
const BYTES: usize = 4096;

/// Largest namespace identifier.
pub(super) const MAX_NSID: u32 = 1024;

/// ANA group of all namespaces: this node serves them all.
pub(super) const ANA_GROUP: u32 = 1;

/// A page being filled in.
pub(super) struct Page(pub(super) Vec<u8>);

impl Page {
    pub(super) fn new(bytes: usize) -> Self {
        Self(vec![0; bytes])
    }

    pub(super) fn put(&mut self, at: usize, bytes: &[u8]) -> &mut Self {
        self.0[at..at + bytes.len()].copy_from_slice(bytes);
        self
    }

    /// ASCII, padded with spaces.
    pub(super) fn text(&mut self, at: usize, len: usize, text: &str) -> &mut Self {
        let field = &mut self.0[at..at + len];
        field.fill(b' ');
        for (to, from) in field.iter_mut().zip(text.bytes()) {
            *to = from;
        }
        self
    }
}

impl Controller {
    pub(super) fn identify(&self, sqe: &Sqe) -> Admin {
        let [cns, ..] = sqe.cdw(0).to_le_bytes();
        let nsid = sqe.nsid.get();
        let [_, _, _, csi] = sqe.cdw(1).to_le_bytes();
        let page = match cns {
            0x00 => self.namespace(nsid).map(|n| n.map_or_else(|| Page::new(BYTES), identify_ns)),
            0x01 => Ok(self.identify_controller()),
            0x02 => self.list(nsid),
            0x03 => self
                .namespace(nsid)
                .and_then(|n| n.map(descriptors).ok_or(Status::INVALID_NAMESPACE)),
            // The NVM command set has nothing to add to CNS 00h and 01h.
            0x05 if csi == 0 => self.namespace(nsid).map(|_| Page::new(BYTES)),
            0x06 if csi == 0 => Ok(Page::new(BYTES)),
            0x07 if csi == 0 => self.list(nsid),
            0x08 => self
                .namespace(nsid)
                .and_then(|n| n.map(identify_independent).ok_or(Status::INVALID_NAMESPACE)),
            0x1c => Ok(command_sets()),
            _ => Err(Status::INVALID_FIELD),
        };
        match page {
            Ok(page) => Admin::Done(Completion::OK, page.0),
            Err(status) => Admin::failed(status.do_not_retry()),
        }
    }

    /// `None` for an identifier that could exist and does not.
    fn namespace(&self, nsid: u32) -> Result<Option<&Namespace>, Status> {
        if nsid == 0 || nsid > MAX_NSID {
            return Err(Status::INVALID_NAMESPACE);
        }
        Ok(self.subsystem.namespaces.get(&nsid))
    }

    /// CNS 02h: identifiers above `after`.
    fn list(&self, after: u32) -> Result<Page, Status> {
        if after >= NSID_ALL - 1 {
            return Err(Status::INVALID_NAMESPACE);
        }
        let mut page = Page::new(BYTES);
        let ids = self.subsystem.namespaces.range(after + 1..).take(BYTES / 4);
        for (i, (id, _)) in ids.enumerate() {
            page.put(i * 4, &id.to_le_bytes());
        }
        Ok(page)
    }

    /// CNS 01h (figure 275).
    fn identify_controller(&self) -> Page {
        let mut p = Page::new(BYTES);
        let firmware = env!("CARGO_PKG_VERSION");
        p.text(4, 20, &self.subsystem.serial);
        p.text(24, 40, "Windrose volume").text(64, 8, firmware);
        // CMIC: several ports, several controllers, ANA.
        p.put(76, &[if self.discovery { 0b0011 } else { 0b1011 }, MDTS])
            .put(78, &self.id.to_le_bytes());
        p.put(80, &property::VERSION.to_le_bytes());
        let events = if self.discovery { Event::Discovery } else { Event::Namespaces };
        p.put(92, &events.bit().to_le_bytes());
        // CTRATT: 128-bit host identifiers.
        p.put(96, &1u32.to_le_bytes());
        // CNTRLTYPE.
        p.put(111, &[if self.discovery { 2 } else { 1 }]);
        let requests = u8::try_from(EVENT_REQUESTS - 1).expect("few");
        // ACL, AERL; FRMW: one read-only slot; LPA: effects log, log offsets.
        p.put(258, &[3, requests, 0b11, 0b110]);
        // KAS in 100 ms.
        p.put(320, &1u16.to_le_bytes());
        // ANATT in seconds; ANACAP: optimized; ANAGRPMAX, NANAGRPID.
        p.put(342, &[10, 0b1]).put(344, &ANA_GROUP.to_le_bytes()).put(348, &1u32.to_le_bytes());
        p.put(512, &[0x66, 0x44]).put(514, &MAX_QUEUE_ENTRIES.to_le_bytes());
        p.put(516, &MAX_NSID.to_le_bytes());
        // ONCS: Compare, Dataset Management, Write Zeroes, Verify.
        p.put(520, &0b1000_1101u16.to_le_bytes());
        // VWC: present, Flush takes all namespaces.
        p.put(525, &[0b111]);
        // SGLS: supported, dword granularity not demanded; offsets into the capsule.
        p.put(536, &(1u32 | 1 << 20).to_le_bytes()).put(540, &MAX_NSID.to_le_bytes());
        p.put(768, self.subsystem.nqn.as_bytes());
        if !self.discovery {
            p.put(1792, &((64 + IN_CAPSULE_BYTES) / 16).to_le_bytes());
        }
        p.put(1796, &1u32.to_le_bytes());
        // MSDBD: one descriptor.
        p.put(1803, &[1]);
        p
    }
}

/// LBADS: log 2 of the block size.
fn lba_shift(block_size: u32) -> u8 {
    u8::try_from(block_size.ilog2()).expect("at most 31")
}

/// CNS 00h (NVM Command Set 1.0, figure 97).
fn identify_ns(n: &Namespace) -> Page {
    let mut p = Page::new(BYTES);
    let info = &n.info;
    let blocks = info.blocks.to_le_bytes();
    p.put(0, &blocks).put(8, &blocks).put(16, &blocks);
    // NSFEAT: thin provisioning, NPWG and its like are there.
    p.put(24, &[u8::from(n.thin) | 1 << 4]);
    // NMIC: shared.
    p.put(30, &[1]);
    // DLFEAT: deallocated blocks read as zeroes, Write Zeroes may deallocate.
    p.put(33, &[if info.unmap_zeroes { 0b1001 } else { 0 }]);
    let grain = |bytes: u32| {
        let blocks = (bytes / info.block_size).max(1) - 1;
        u16::try_from(blocks).unwrap_or(u16::MAX).to_le_bytes()
    };
    let physical = grain(info.physical_block_size);
    let unmap = grain(info.unmap_granularity_blocks.max(1).saturating_mul(info.block_size));
    p.put(64, &physical).put(66, &physical).put(68, &unmap).put(70, &unmap);
    // NOWS.
    p.put(72, &physical);
    p.put(92, &ANA_GROUP.to_le_bytes());
    // NSATTR: write protected.
    p.put(99, &[u8::from(info.read_only)]);
    p.put(104, &n.uuid);
    p.put(128, &[0, 0, lba_shift(info.block_size), 0]);
    p
}

/// CNS 03h (figure 278): NGUID, UUID and command set.
fn descriptors(n: &Namespace) -> Page {
    let mut p = Page::new(BYTES);
    p.put(0, &[2, 16, 0, 0]).put(4, &n.uuid);
    p.put(20, &[3, 16, 0, 0]).put(24, &n.uuid);
    p.put(40, &[4, 1, 0, 0, 0]);
    p
}

/// CNS 08h (figure 280).
fn identify_independent(n: &Namespace) -> Page {
    let mut p = Page::new(BYTES);
    p.put(1, &[1]).put(4, &ANA_GROUP.to_le_bytes());
    // NSATTR; NSTAT: ready.
    p.put(8, &[u8::from(n.info.read_only)]).put(14, &[1]);
    p
}

/// CNS 1Ch: the one combination, of the NVM command set alone.
fn command_sets() -> Page {
    let mut p = Page::new(BYTES);
    p.put(0, &1u64.to_le_bytes());
    p
}
