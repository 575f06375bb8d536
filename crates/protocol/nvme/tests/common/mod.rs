//! The controller's side of a connection for tests: a driver that joins machines, controllers and
//! one disk in memory. The host's side is [`nvme::testing`].
#![allow(dead_code, clippy::unwrap_used, missing_docs, unreachable_pub)]

pub mod driver;

use std::collections::BTreeMap;

use block::Info;
use nvme::fabrics::CNTLID_DYNAMIC;
use nvme::{Connect, Namespace, Sqe, Status};

pub const HOSTNQN: &str = "nqn.2014-08.org.nvmexpress:uuid:6d0a3c1e-0000-4000-8000-000000000001";
pub const SUBNQN: &str = "nqn.2026-01.example.windrose:volume-1";

/// Size of the disk in blocks of 512 bytes.
pub const BLOCKS: u64 = 4096;

pub fn info() -> Info {
    Info {
        block_size: 512,
        blocks: BLOCKS,
        metadata_blocks: 0,
        physical_block_size: 4096,
        max_transfer_blocks: 2048,
        unmap_granularity_blocks: 8,
        unmap_zeroes: true,
        volatile_cache: true,
        native_fua: true,
        read_only: false,
        overhead_bytes: 0,
    }
}

pub fn namespace() -> Namespace {
    let (uuid, nguid) = ([0x11; 16], [0x22; 16]);
    Namespace {
        info: info(),
        uuid,
        nguid,
        eui64: Some([0x33; 8]),
        thin: true,
        used_blocks: None,
        keeps_reservations: true,
        is_shared: false,
    }
}

pub fn namespaces() -> BTreeMap<u32, Namespace> {
    BTreeMap::from([(1, namespace())])
}

pub fn connect(qid: u16, cntlid: u16) -> Connect {
    Connect {
        qid,
        sqsize: if qid == 0 { 31 } else { 127 },
        flow_control: true,
        kato_ms: if qid == 0 { 5_000 } else { 0 },
        host_id: [7; 16],
        hostnqn: HOSTNQN.into(),
        subnqn: SUBNQN.into(),
        cntlid: if qid == 0 { CNTLID_DYNAMIC } else { cntlid },
    }
}

/// A read or write of `blocks` from `at`.
pub fn rw(opcode: nvme::entry::NvmOpcode, cid: u16, at: u64, blocks: u32) -> Sqe {
    let mut sqe = Sqe::new(opcode.0, cid, 1);
    sqe.cdw10[0] = (at as u32).into();
    sqe.cdw10[1] = ((at >> 32) as u32).into();
    sqe.cdw10[2] = (blocks - 1).into();
    sqe.sgl = nvme::entry::Sgl::transport(blocks * 512);
    sqe
}

/// Bytes that differ from place to place.
pub fn pattern(seed: u64, length: usize) -> Vec<u8> {
    let mut x = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut byte = || {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        x.to_le_bytes()[3]
    };
    (0..length).map(|_| byte()).collect()
}

pub fn code(status: Status) -> Status {
    status.code()
}
