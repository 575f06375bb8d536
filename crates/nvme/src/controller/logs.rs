//! Get Log Page (NVMe Base 2.0, 5.16).

use std::net::IpAddr;

use super::identify::{ANA_GROUP, MAX_NSID, Page};
use super::{Admin, Controller, DISCOVERY_NQN, Event, Portal};
use crate::Status;
use crate::entry::{AdminOpcode, Completion, NvmOpcode, Sqe};

/// Longest piece of a log that one command returns, in bytes.
const MAX_PIECE: u64 = 1 << 20;

/// Length of a discovery log entry and of its header, in bytes.
const DISCOVERY_ENTRY: usize = 1024;

/// Most namespaces that the changed namespace list names.
const MAX_CHANGED: usize = 1024;

impl Controller {
    pub(super) fn get_log_page(&mut self, sqe: &Sqe) -> Admin {
        let dw10 = sqe.cdw(0);
        let [id, ..] = dw10.to_le_bytes();
        let retain = dw10 >> 15 & 1 == 1;
        let dwords = u64::from(dw10 >> 16) | u64::from(sqe.cdw(1) & 0xffff) << 16;
        let offset = u64::from(sqe.cdw(2)) | u64::from(sqe.cdw(3)) << 32;
        let bytes = (dwords + 1) * 4;
        if bytes > MAX_PIECE || !offset.is_multiple_of(4) {
            return Admin::failed(Status::INVALID_FIELD.do_not_retry());
        }
        let log = match (id, self.discovery) {
            // Errors: none are recorded. Health: the volume's own state is for its node to tell.
            (0x01, _) => vec![0; 64],
            (0x02, false) => vec![0; 512],
            (0x03, false) => firmware_slots(),
            (0x04, false) => self.changed_namespaces(retain),
            (0x05, _) => self.effects(),
            (0x0c, false) => self.ana(),
            (0x70, true) => self.discovery_log(retain),
            _ => return Admin::failed(Status::INVALID_LOG_PAGE.do_not_retry()),
        };
        // A log ends in zeroes beyond its length; an offset beyond it is an error.
        let Some(rest) = usize::try_from(offset).ok().and_then(|o| log.get(o..)) else {
            return Admin::failed(Status::INVALID_FIELD.do_not_retry());
        };
        let mut data = rest.to_vec();
        data.resize(usize::try_from(bytes).unwrap_or(0), 0);
        Admin::Done(Completion::OK, data)
    }

    fn changed_namespaces(&mut self, retain: bool) -> Vec<u8> {
        let mut page = Page::new(4096);
        if self.changed.len() > MAX_CHANGED {
            page.put(0, &u32::MAX.to_le_bytes());
        } else {
            for (i, id) in self.changed.iter().enumerate() {
                page.put(i * 4, &id.to_le_bytes());
            }
        }
        if !retain {
            self.changed.clear();
        }
        self.event_read(Event::Namespaces, retain);
        page.0
    }

    /// Figure 210: which commands there are and what they do.
    fn effects(&self) -> Vec<u8> {
        const SUPPORTED: u32 = 1;
        const CHANGES_CONTENTS: u32 = 0b11;
        let mut page = Page::new(4096);
        let admin = [
            AdminOpcode::GetLogPage,
            AdminOpcode::Identify,
            AdminOpcode::Abort,
            AdminOpcode::SetFeatures,
            AdminOpcode::GetFeatures,
            AdminOpcode::AsyncEventRequest,
            AdminOpcode::KeepAlive,
        ];
        for opcode in admin {
            page.put(usize::from(opcode.0) * 4, &SUPPORTED.to_le_bytes());
        }
        let io = [
            (NvmOpcode::Flush, SUPPORTED),
            (NvmOpcode::Write, CHANGES_CONTENTS),
            (NvmOpcode::Read, SUPPORTED),
            (NvmOpcode::Compare, SUPPORTED),
            (NvmOpcode::WriteZeroes, CHANGES_CONTENTS),
            (NvmOpcode::DatasetManagement, CHANGES_CONTENTS),
            (NvmOpcode::Verify, SUPPORTED),
        ];
        if !self.discovery {
            for (opcode, effects) in io {
                page.put(1024 + usize::from(opcode.0) * 4, &effects.to_le_bytes());
            }
        }
        page.0
    }

    /// Figure 225: one group, optimized.
    fn ana(&self) -> Vec<u8> {
        let ids: Vec<u32> = self.subsystem.namespaces.keys().copied().collect();
        // As long as it can become, as hosts read it in pieces without looking at the count.
        let mut page = Page::new(16 + 32 + MAX_NSID as usize * 4);
        page.put(8, &1u16.to_le_bytes());
        let count = u32::try_from(ids.len()).unwrap_or(u32::MAX);
        page.put(16, &ANA_GROUP.to_le_bytes()).put(20, &count.to_le_bytes());
        page.put(32, &[0x01]);
        for (i, id) in ids.iter().enumerate().take(MAX_NSID as usize) {
            page.put(48 + i * 4, &id.to_le_bytes());
        }
        page.0
    }

    /// Figures 264 and 265.
    fn discovery_log(&mut self, retain: bool) -> Vec<u8> {
        let portals = &self.subsystem.portals;
        let mut page = Page::new(DISCOVERY_ENTRY * (1 + portals.len()));
        page.put(0, &self.subsystem.generation.to_le_bytes());
        page.put(8, &(portals.len() as u64).to_le_bytes());
        for (i, portal) in portals.iter().enumerate() {
            discovery_entry(&mut page, DISCOVERY_ENTRY * (1 + i), portal);
        }
        self.event_read(Event::Discovery, retain);
        page.0
    }
}

fn firmware_slots() -> Vec<u8> {
    let mut page = Page::new(512);
    page.put(0, &[1]).text(8, 8, env!("CARGO_PKG_VERSION"));
    page.0
}

fn discovery_entry(page: &mut Page, at: usize, portal: &Portal) {
    let family = match portal.address.ip() {
        IpAddr::V4(_) => 1,
        IpAddr::V6(_) => 2,
    };
    let kind = if portal.nqn == DISCOVERY_NQN { 3 } else { 2 };
    // TRTYPE TCP, ADRFAM, SUBTYPE; TREQ: a secure channel is not required.
    page.put(at, &[3, family, kind, 0b10]);
    // PORTID, CNTLID: dynamic; ASQSZ.
    page.put(at + 4, &1u16.to_le_bytes()).put(at + 6, &0xffffu16.to_le_bytes());
    page.put(at + 8, &32u16.to_le_bytes());
    page.text(at + 32, 32, &portal.address.port().to_string());
    page.put(at + 256, portal.nqn.as_bytes());
    page.text(at + 512, 256, &portal.address.ip().to_string());
}
