//! INQUIRY (SPC-4 6.6) and REPORT LUNS (SPC-4 6.33).

use zerocopy::big_endian::U16;
use zerocopy::{Immutable, IntoBytes, Unaligned};

use crate::command::{Outcome, ParsedCommand};
use crate::designator::VENDOR;
use crate::lun::{Lun, REPORT_LUNS_UNIT};
use crate::nexus::UnitAttention;
use crate::reply::Refusal;
use crate::sense::Sense;
use crate::text::ascii;
use crate::unit::LogicalUnit;
use crate::vpd;

/// PERIPHERAL QUALIFIER and PERIPHERAL DEVICE TYPE (SPC-4 6.6).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Peripheral {
    Disk = 0x00,
    WellKnown = 0x1e,
    /// There is a disk, but it is not connected now.
    NotConnected = 0x20,
    /// There is no unit, or its type is unknown.
    Absent = 0x7f,
}

/// Standard INQUIRY data (SPC-4 6.6).
#[derive(IntoBytes, Immutable, Unaligned)]
#[repr(C)]
struct StandardInquiry {
    peripheral: u8,
    removable: u8,
    version: u8,
    hisup_and_format: u8,
    additional_length: u8,
    tpgs_and_protect: u8,
    multiport: u8,
    command_queuing: u8,
    vendor: [u8; 8],
    product: [u8; 16],
    revision: [u8; 4],
    vendor_specific: [u8; 20],
    clocking: [u8; 2],
    versions: [U16; 8],
    reserved: [u8; 22],
}

const _: () = assert!(size_of::<StandardInquiry>() == 96);

const VERSION_SPC_4: u8 = 0x06;
const HISUP: u8 = 0x10;
const RESPONSE_DATA_FORMAT: u8 = 0x02;
const CMDQUE: u8 = 0x02;
/// Only the unit changes the states of target port groups (SPC-4 6.6, TPGS 01b).
const TPGS_IMPLICIT: u8 = 0x10;
/// There are several target ports.
const MULTIP: u8 = 0x10;
/// The unit supports third-party copies (3PC).
const THIRD_PARTY_COPY: u8 = 0x08;

/// SAM-5, SPC-4, SBC-3 and iSCSI, no version claimed (SPC-4 6.6).
const VERSIONS: [u16; 4] = [0x00a0, 0x0460, 0x04c0, 0x0960];

/// Standard INQUIRY data of a unit of this kind; `several`: several nodes serve it, each with a
/// port.
pub(crate) fn standard(
    peripheral: Peripheral,
    product: &str,
    revision: &str,
    several: bool,
) -> Vec<u8> {
    let mut versions = [U16::ZERO; 8];
    for (to, version) in versions.iter_mut().zip(VERSIONS) {
        *to = U16::new(version);
    }
    let data = StandardInquiry {
        peripheral: peripheral as u8,
        removable: 0,
        version: VERSION_SPC_4,
        hisup_and_format: HISUP | RESPONSE_DATA_FORMAT,
        additional_length: (size_of::<StandardInquiry>() - 5) as u8,
        tpgs_and_protect: if several { TPGS_IMPLICIT } else { 0 }
            | if peripheral == Peripheral::Disk { THIRD_PARTY_COPY } else { 0 },
        multiport: if several { MULTIP } else { 0 },
        command_queuing: CMDQUE,
        vendor: VENDOR,
        product: ascii(product),
        revision: ascii(revision),
        vendor_specific: [0; 20],
        clocking: [0; 2],
        versions,
        reserved: [0; 22],
    };
    data.as_bytes().to_vec()
}

const EVPD: u8 = 0x01;

/// INQUIRY.
pub(crate) fn inquiry(unit: &mut LogicalUnit, cmd: &ParsedCommand<'_>) -> Result<Outcome, Refusal> {
    let allocation = u64::from(cmd.cdb.u16(3));
    let page = cmd.cdb.byte(2);
    let data = if cmd.cdb.has(1, EVPD) {
        vpd::page(unit, cmd.nexus, page).ok_or(Sense::field(2, None))?
    } else if page != 0 {
        return Err(Sense::field(2, None).into());
    } else {
        let (config, several) = (&unit.config, unit.groups.is_some());
        standard(Peripheral::Disk, &config.product, &config.revision, several)
    };
    Ok(Outcome::data(data, allocation))
}

/// REPORT LUNS. The initiator thereby learns of the change that a pending attention would report
/// (SPC-4 6.33).
pub(crate) fn report_luns(
    unit: &mut LogicalUnit,
    cmd: &ParsedCommand<'_>,
) -> Result<Outcome, Refusal> {
    let outcome = lun_list(cmd)?;
    unit.nexuses.cancel_attention(cmd.nexus, UnitAttention::LunsChanged);
    Ok(outcome)
}

/// The answer of REPORT LUNS, the same from every unit of a target.
pub(crate) fn lun_list(cmd: &ParsedCommand<'_>) -> Result<Outcome, Refusal> {
    let (units, well_known): (&[Lun], &[[u8; 8]]) = match cmd.cdb.byte(2) {
        0x00 => (cmd.luns, &[]),
        0x01 => (&[], &[REPORT_LUNS_UNIT]),
        0x02 => (cmd.luns, &[REPORT_LUNS_UNIT]),
        _ => return Err(Sense::field(2, None).into()),
    };
    let bytes = 8 * (units.len() + well_known.len());
    let mut data = Vec::with_capacity(8 + bytes);
    data.extend(u32::try_from(bytes).unwrap_or(u32::MAX).to_be_bytes());
    data.extend([0; 4]);
    units.iter().for_each(|lun| data.extend(lun.to_bytes()));
    well_known.iter().for_each(|lun| data.extend(lun));
    Ok(Outcome::data(data, u64::from(cmd.cdb.u32(6))))
}
