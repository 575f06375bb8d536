//! Vital product data pages of INQUIRY (SPC-4 7.8, SBC-3 6.5).

use zerocopy::big_endian::{U16, U32, U64};
use zerocopy::{Immutable, IntoBytes, Unaligned};

use crate::copy_commands::third_party_copy_page;
use crate::designator::{
    BINARY, NAME_STRING, PORT_GROUP, RELATIVE_PORT, UTF_8, scsi_name_string, unit_designators,
};
use crate::nexus::{NexusId, TargetPort};
use crate::sense::SENSE_MAX;
use crate::space::threshold_exponent;
use crate::text::printable;
use crate::unit::LogicalUnit;

const SUPPORTED: u8 = 0x00;
const SERIAL: u8 = 0x80;
const IDENTIFICATION: u8 = 0x83;
const EXTENDED: u8 = 0x86;
const MODE_POLICY: u8 = 0x87;
const PORTS: u8 = 0x88;
const THIRD_PARTY_COPY: u8 = 0x8f;
const BLOCK_LIMITS: u8 = 0xb0;
const CHARACTERISTICS: u8 = 0xb1;
const PROVISIONING: u8 = 0xb2;

/// In ascending order (SPC-4 7.8, supported VPD pages).
const PAGES: [u8; 10] = [
    SUPPORTED,
    SERIAL,
    IDENTIFICATION,
    EXTENDED,
    MODE_POLICY,
    PORTS,
    THIRD_PARTY_COPY,
    BLOCK_LIMITS,
    CHARACTERISTICS,
    PROVISIONING,
];

const SERIAL_MAX: usize = 64;

/// Page `code` for the initiator of `nexus`; `None` if there is none.
pub(crate) fn page(unit: &LogicalUnit, nexus: NexusId, code: u8) -> Option<Vec<u8>> {
    let body = match code {
        SUPPORTED => PAGES.to_vec(),
        SERIAL => printable(&unit.config.serial, SERIAL_MAX).collect(),
        IDENTIFICATION => identification(unit, &unit.nexuses.get(nexus)?.target_port),
        EXTENDED => extended(unit.info.volatile_cache),
        MODE_POLICY => mode_policy(),
        PORTS => ports(unit, &unit.nexuses.get(nexus)?.target_port),
        THIRD_PARTY_COPY => third_party_copy_page(unit.info.block_size),
        BLOCK_LIMITS => block_limits(unit).as_bytes().to_vec(),
        CHARACTERISTICS => characteristics(unit.config.solid_state),
        PROVISIONING => provisioning(unit),
        _ => return None,
    };
    let mut out = vec![0, code];
    out.extend(u16::try_from(body.len()).unwrap_or(u16::MAX).to_be_bytes());
    out.extend(body);
    Some(out)
}

/// What a designator identifies (SPC-4 7.8, device identification).
#[derive(Clone, Copy)]
#[repr(u8)]
enum Association {
    Unit = 0x00,
    Port = 0x10,
    Target = 0x20,
}

/// Device identification (SPC-4 7.8).
fn identification(unit: &LogicalUnit, port: &TargetPort) -> Vec<u8> {
    let mut out = Vec::new();
    for d in unit_designators(&unit.config.uuid) {
        designator(&mut out, Association::Unit, d.kind, d.code_set, &d.id);
    }
    let [high, low] = port.relative_id.to_be_bytes();
    designator(&mut out, Association::Port, RELATIVE_PORT, BINARY, &[0, 0, high, low]);
    if let Some(group) = unit.local_group() {
        let [high, low] = group.to_be_bytes();
        designator(&mut out, Association::Port, PORT_GROUP, BINARY, &[0, 0, high, low]);
    }
    designator(&mut out, Association::Port, NAME_STRING, UTF_8, &scsi_name_string(&port.name));
    designator(&mut out, Association::Target, NAME_STRING, UTF_8, &scsi_name_string(&port.device));
    out
}

/// Mode page policy (SPC-4 7.8): all pages and subpages are shared by all initiators.
fn mode_policy() -> Vec<u8> {
    const ALL_PAGES: u8 = 0x3f;
    const ALL_SUBPAGES: u8 = 0xff;
    const SHARED: u8 = 0x00;
    vec![ALL_PAGES, ALL_SUBPAGES, SHARED, 0]
}

/// SCSI ports (SPC-4 7.8): those of all nodes that serve the unit, or the port of the command.
fn ports(unit: &LogicalUnit, asked: &TargetPort) -> Vec<u8> {
    let mut out = Vec::new();
    match &unit.groups {
        Some(groups) => groups.all.iter().for_each(|g| port(&mut out, g.port, &g.name)),
        None => port(&mut out, asked.relative_id, &asked.name),
    }
    out
}

/// Appends the descriptor of a target port. Its initiator ports are unknown.
fn port(out: &mut Vec<u8>, relative_id: u16, port_name: &str) {
    let mut designators = Vec::new();
    designator(
        &mut designators,
        Association::Port,
        NAME_STRING,
        UTF_8,
        &scsi_name_string(port_name),
    );
    let length = u16::try_from(designators.len()).expect("a designator is at most 256 bytes");
    out.extend([0; 2]);
    out.extend(relative_id.to_be_bytes());
    out.extend([0; 6]);
    out.extend(length.to_be_bytes());
    out.extend(designators);
}

/// Appends a designator; those of ports and targets carry the protocol, iSCSI.
fn designator(out: &mut Vec<u8>, of: Association, kind: u8, code_set: u8, id: &[u8]) {
    const ISCSI: u8 = 0x50;
    const PIV: u8 = 0x80;
    let (protocol, piv) = if matches!(of, Association::Unit) { (0, 0) } else { (ISCSI, PIV) };
    let len = u8::try_from(id.len()).expect("designators are at most 252 bytes");
    out.extend([protocol | code_set, piv | of as u8 | kind, 0, len]);
    out.extend(id);
}

/// Extended INQUIRY data (SPC-4 7.8), without its header.
fn extended(volatile_cache: bool) -> Vec<u8> {
    const SIMPSUP: u8 = 0x01;
    const V_SUP: u8 = 0x01;
    let mut body = vec![0; 60];
    body[1] = SIMPSUP;
    body[2] = if volatile_cache { V_SUP } else { 0 };
    body[9] = SENSE_MAX as u8;
    body
}

/// Block limits (SBC-3 6.5, SBC-4 for atomic writes), without the header.
#[derive(IntoBytes, Immutable, Unaligned)]
#[repr(C)]
struct BlockLimits {
    wsnz: u8,
    max_compare_and_write: u8,
    optimal_granularity: U16,
    max_transfer: U32,
    optimal_transfer: U32,
    max_prefetch: U32,
    max_unmap_blocks: U32,
    max_unmap_descriptors: U32,
    optimal_unmap_granularity: U32,
    unmap_alignment: U32,
    max_write_same: U64,
    max_atomic_transfer: U32,
    atomic_alignment: U32,
    atomic_granularity: U32,
    max_atomic_transfer_with_boundary: U32,
    max_atomic_boundary: U32,
}

const _: () = assert!(size_of::<BlockLimits>() == 60);

fn block_limits(unit: &LogicalUnit) -> BlockLimits {
    const WSNZ: u8 = 0x01;
    const UGAVALID: u32 = 0x8000_0000;
    let (limits, info) = (&unit.limits, &unit.info);
    let physical = info.physical_block_size / info.block_size.max(1);
    BlockLimits {
        wsnz: WSNZ,
        max_compare_and_write: limits.max_compare_and_write,
        optimal_granularity: U16::new(u16::try_from(physical).unwrap_or(0)),
        max_transfer: U32::new(limits.max_transfer),
        optimal_transfer: U32::ZERO,
        max_prefetch: U32::ZERO,
        max_unmap_blocks: U32::new(limits.max_unmap),
        max_unmap_descriptors: U32::new(u32::from(limits.max_unmap_descriptors)),
        optimal_unmap_granularity: U32::new(info.unmap_granularity_blocks),
        unmap_alignment: U32::new(if unit.can_unmap() { UGAVALID } else { 0 }),
        max_write_same: U64::new(u64::from(limits.max_write_same)),
        max_atomic_transfer: U32::new(limits.max_atomic),
        atomic_alignment: U32::new(limits.max_atomic),
        atomic_granularity: U32::new(limits.max_atomic),
        max_atomic_transfer_with_boundary: U32::ZERO,
        max_atomic_boundary: U32::ZERO,
    }
}

/// Block device characteristics (SBC-3 6.5), without the header.
fn characteristics(solid_state: bool) -> Vec<u8> {
    const NON_ROTATING: u8 = 0x01;
    const VBULS: u8 = 0x01; // VERIFY compares unmapped blocks too
    let mut body = vec![0; 60];
    body[1] = if solid_state { NON_ROTATING } else { 0 };
    body[4] = VBULS;
    body
}

/// Logical block provisioning (SBC-3 6.5), without the header.
fn provisioning(unit: &LogicalUnit) -> Vec<u8> {
    const LBPU_LBPWS_LBPWS10: u8 = 0xe0;
    const LBPRZ: u8 = 0x04;
    const FULL: u8 = 0;
    const RESOURCE: u8 = 1;
    const THIN: u8 = 2;
    let (mut flags, mut kind) = (0, FULL);
    if unit.can_unmap() {
        flags = LBPU_LBPWS_LBPWS10 | if unit.info.unmap_zeroes { LBPRZ } else { 0 };
        kind = if unit.config.thin { THIN } else { RESOURCE };
    }
    let exponent = match unit.space {
        Some(_) => threshold_exponent(unit.info.block_size) as u8,
        None => 0,
    };
    vec![exponent, flags, kind, 0]
}
