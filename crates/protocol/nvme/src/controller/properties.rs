//! Controller properties (NVMe Base 2.0, 3.1.3): CAP, VS, CC, CSTS, CRTO.

use super::Limits;
use super::error_log::{CommandError, field};
use crate::fabrics::Property;

/// NVMe 2.0.0.
pub(super) const VERSION: u32 = 2 << 16;

const CAP: u32 = 0x00;
const VS: u32 = 0x08;
const CC: u32 = 0x14;
const CSTS: u32 = 0x1c;
const CRTO: u32 = 0x68;

/// CAP: contiguous queues required; always so over fabrics.
const CAP_CQR: u64 = 1 << 16;
/// The controller is ready within 10 s, in units of 500 ms.
const READY_WITHIN: u64 = 20;
/// CAP.TO.
const CAP_TO: u64 = READY_WITHIN << 24;
/// CAP.CSS: the NVM command set, and a choice by command set identifier.
const CAP_CSS: u64 = (1 << 0 | 1 << 6) << 37;
/// CAP.CRMS: ready means with media.
const CAP_CRWMS: u64 = 1 << 59;
/// CRTO.CRWMT: ready with media. It is not below CAP.TO (NVMe Base 2.0, 3.1.3.19); Linux complains
/// of another one.
const CRTO_VALUE: u64 = READY_WITHIN;

const CC_EN: u32 = 1 << 0;
const CSTS_RDY: u32 = 1 << 0;
const CSTS_CFS: u32 = 1 << 1;
const CSTS_SHST: u32 = 0b11 << 2;
const CSTS_SHST_OCCURRING: u32 = 0b01 << 2;
const CSTS_SHST_COMPLETE: u32 = 0b10 << 2;

/// Effect of a change of CC.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CcChange {
    None,
    Reset,
    ShutDown,
}

#[derive(Debug)]
pub(super) struct Properties {
    cap: u64,
    cc: u32,
    csts: u32,
    discovery: bool,
}

/// `width` bits of CC from `low` on.
fn bits(cc: u32, low: u32, width: u32) -> u32 {
    cc >> low & ((1 << width) - 1)
}

impl Properties {
    pub(super) fn new(limits: &Limits, discovery: bool) -> Self {
        let entries = u64::from(limits.queue_entries.saturating_sub(1));
        let cap = entries | CAP_CQR | CAP_TO | CAP_CSS | CAP_CRWMS;
        Self { cap, cc: 0, csts: 0, discovery }
    }

    /// Whether commands are accepted.
    pub(super) fn is_ready(&self) -> bool {
        self.csts & (CSTS_RDY | CSTS_CFS | CSTS_SHST) == CSTS_RDY
    }

    /// Whether the host has enabled the controller and it started successfully.
    pub(super) fn is_enabled(&self) -> bool {
        self.csts & CSTS_RDY != 0
    }

    /// Sets CSTS.CFS after a fatal error.
    pub(super) fn set_fatal(&mut self) {
        self.csts |= CSTS_CFS;
    }

    /// Completes a shutdown in progress.
    pub(super) fn shut_down(&mut self) {
        if self.csts & CSTS_SHST == CSTS_SHST_OCCURRING {
            self.csts = self.csts & !CSTS_SHST | CSTS_SHST_COMPLETE;
        }
    }

    pub(super) fn get(&self, property: Property) -> Result<u64, CommandError> {
        match (property.offset, property.wide) {
            (CAP, true) => Ok(self.cap),
            (VS, false) => Ok(VERSION.into()),
            (CC, false) => Ok(self.cc.into()),
            (CSTS, false) => Ok(self.csts.into()),
            (CRTO, false) => Ok(CRTO_VALUE),
            (CAP | VS | CC | CSTS | CRTO, _) => Err(CommandError::field(field::CDW10)),
            _ => Err(CommandError::field(field::CDW11)),
        }
    }

    pub(super) fn set(&mut self, property: Property) -> Result<CcChange, CommandError> {
        if property.offset != CC {
            return Err(CommandError::field(field::CDW11));
        }
        if property.wide {
            return Err(CommandError::field(field::CDW10));
        }
        let value = u32::try_from(property.value & 0xffff_ffff).expect("32 bits");
        Ok(self.configure(value))
    }

    /// Handles a write of CC
    fn configure(&mut self, new: u32) -> CcChange {
        let old = std::mem::replace(&mut self.cc, new);
        let (was_enabled, enabled) = (old & CC_EN != 0, new & CC_EN != 0);
        if was_enabled && !enabled {
            self.csts = 0;
            return CcChange::Reset;
        }
        if enabled && !was_enabled {
            self.csts = if self.is_supported(new) { CSTS_RDY } else { CSTS_CFS };
        }
        let shutdown = |cc| bits(cc, 14, 2) != 0;
        if shutdown(new) && !shutdown(old) {
            self.csts = self.csts & !CSTS_SHST | CSTS_SHST_OCCURRING;
            return CcChange::ShutDown;
        }
        if !shutdown(new) {
            self.csts &= !CSTS_SHST;
        }
        CcChange::None
    }

    /// Command set (CSS), page size (MPS), arbitration (AMS) and entry sizes (IOSQES, IOCQES).
    fn is_supported(&self, cc: u32) -> bool {
        let entry_sizes = self.discovery || (bits(cc, 16, 4), bits(cc, 20, 4)) == (6, 4);
        let css = bits(cc, 4, 3);
        (css == 0 || css == 6) && bits(cc, 7, 4) == 0 && bits(cc, 11, 3) == 0 && entry_sizes
    }
}
