//! The mode pages: their values, and which can be changed (SPC-4 7.5, SBC-3 6.4).

use arrayvec::ArrayVec;

use crate::mode_parameters::ModeParameters;
use crate::space::THRESHOLDS;
use crate::unit::LogicalUnit;

/// Page code and subpage code.
pub(super) type Id = (u8, u8);

const RECOVERY: Id = (0x01, 0x00);
const RECONNECT: Id = (0x02, 0x00);
const CACHING: Id = (0x08, 0x00);
const CONTROL: Id = (0x0a, 0x00);
const CONTROL_EXTENSION: Id = (0x0a, 0x01);
const POWER: Id = (0x1a, 0x00);
const EXCEPTIONS: Id = (0x1c, 0x00);
const PROVISIONING: Id = (0x1c, 0x02);

/// In ascending order (SPC-4 6.13).
const PAGES: [Id; 8] =
    [RECOVERY, RECONNECT, CACHING, CONTROL, CONTROL_EXTENSION, POWER, EXCEPTIONS, PROVISIONING];

pub(super) type Ids = ArrayVec<Id, { PAGES.len() }>;

const LBPERE: u8 = 0x80;
const WCE: u8 = 0x04;
const D_SENSE: u8 = 0x04;
const SWP: u8 = 0x08;
const TAS: u8 = 0x40;
const ENABLED: u8 = 0x80;

const PAGE_MAX: usize = 40;
pub(super) type Page = ArrayVec<u8, PAGE_MAX>;

/// Features of a unit that affect its pages.
#[derive(Clone, Copy)]
pub(super) struct UnitFeatures {
    /// A volatile cache.
    volatile_cache: bool,
    /// Known space usage.
    measured_space: bool,
}

impl LogicalUnit {
    pub(super) fn mode_features(&self) -> UnitFeatures {
        UnitFeatures {
            volatile_cache: self.info.volatile_cache,
            measured_space: self.space.is_some(),
        }
    }

    /// The pages of this unit, in ascending order.
    pub(super) fn pages(&self) -> Ids {
        let has_space = self.space.is_some();
        PAGES.into_iter().filter(|&page| page != PROVISIONING || has_space).collect()
    }
}

/// A page's header followed by zeroes; `len` is the total length in bytes.
fn empty_page((code, subpage): Id, len: u8) -> Page {
    const SPF: u8 = 0x40;
    let mut page = Page::new();
    if subpage == 0 {
        page.extend([code, len - 2]);
    } else {
        page.extend([SPF | code, subpage, 0, len - 4]);
    }
    while page.len() < usize::from(len) {
        page.push(0);
    }
    page
}

/// A page with these values.
pub(super) fn values(id: Id, modes: &ModeParameters, features: UnitFeatures) -> Page {
    const AWRE_ARRE: u8 = 0xc0;
    const GLTSD: u8 = 0x02;
    const UNRESTRICTED_REORDERING: u8 = 0x10;
    const DEXCPT: u8 = 0x08;
    const AVAILABLE: u8 = 0x01;
    const USED: u8 = 0x02;
    const ARMED_INCREASING: u8 = 0x01;
    let mut page = changeable_values(id, modes, features);
    match id {
        RECOVERY => page[2] = AWRE_ARRE,
        CONTROL => {
            page[2] |= GLTSD;
            page[3] |= UNRESTRICTED_REORDERING;
            page[8..10].fill(0xff); // commands may be refused with BUSY without limit of time
        }
        EXCEPTIONS => page[2] = DEXCPT,
        PROVISIONING => {
            let [low, taken] = THRESHOLDS;
            page[low + 1] = AVAILABLE;
            page[taken] |= ARMED_INCREASING;
            page[taken + 1] = USED;
        }
        _ => {}
    }
    page
}

/// A page with a one for each changeable bit.
pub(super) fn changeable(id: Id, features: UnitFeatures) -> Page {
    changeable_values(id, &ModeParameters::all_changeable(), features)
}

/// A page with only the changeable bits of `modes`, and zeroes elsewhere.
fn changeable_values(id: Id, modes: &ModeParameters, features: UnitFeatures) -> Page {
    let bit = |set: bool, bit: u8| if set { bit } else { 0 };
    let len = match id {
        CACHING => 20,
        RECONNECT => 16,
        CONTROL_EXTENSION | PROVISIONING => 32,
        POWER => 40,
        _ => 12,
    };
    let mut page = empty_page(id, len);
    match id {
        RECOVERY => page[7] = bit(features.measured_space && modes.reports_thresholds, LBPERE),
        CACHING => page[2] = bit(features.volatile_cache && modes.wce, WCE),
        CONTROL => {
            page[2] = bit(modes.d_sense, D_SENSE);
            page[4] = bit(modes.swp, SWP);
            page[5] = bit(modes.tas, TAS);
        }
        PROVISIONING => {
            for (at, threshold) in THRESHOLDS.into_iter().zip(modes.thresholds) {
                page[at] = bit(threshold.enabled, ENABLED);
                page[at + 4..at + 8].copy_from_slice(&threshold.count.to_be_bytes());
            }
        }
        _ => {}
    }
    page
}

/// `modes` with the values of a page whose changeable bits have been checked.
pub(super) fn with_page(
    mut modes: ModeParameters,
    id: Id,
    page: &[u8],
    features: UnitFeatures,
) -> ModeParameters {
    match id {
        RECOVERY if features.measured_space => modes.reports_thresholds = page[7] & LBPERE != 0,
        CACHING if features.volatile_cache => modes.wce = page[2] & WCE != 0,
        CONTROL => {
            modes.d_sense = page[2] & D_SENSE != 0;
            modes.swp = page[4] & SWP != 0;
            modes.tas = page[5] & TAS != 0;
        }
        PROVISIONING => {
            for (at, threshold) in THRESHOLDS.into_iter().zip(&mut modes.thresholds) {
                let count = page[at + 4..at + 8].iter();
                threshold.enabled = page[at] & ENABLED != 0;
                threshold.count = count.fold(0, |sum, byte| sum << 8 | u32::from(*byte));
            }
        }
        _ => {}
    }
    modes
}
