//! NVM Command Set 1.0: what I/O commands ask of a volume, and what is refused before that.

use crate::common::driver::{Outcome, Session, Target};
use crate::common::{BLOCKS, namespace, pattern, rw};
use block::{Error, RequestError};
use nvme::entry::{AdminOpcode, NSID_ALL, NvmOpcode, Sgl};
use nvme::testing::ScriptedHost;
use nvme::{Limits, Sqe, Status};

const FUA: u32 = 1 << 30;
const DEAC: u32 = 1 << 25;

fn flagged(mut sqe: Sqe, flags: u32) -> Sqe {
    sqe.cdw10[2] = (sqe.cdw(2) | flags).into();
    sqe
}

/// A command on blocks that carries no data.
fn dataless(opcode: NvmOpcode, at: u64, blocks: u32) -> Sqe {
    let mut sqe = rw(opcode, 0, at, blocks);
    sqe.sgl = Sgl::transport(0);
    sqe
}

fn deallocate(s: &mut Session, ranges: &[(u64, u32)], bytes: usize) -> Outcome {
    let mut data: Vec<u8> = ranges
        .iter()
        .flat_map(|(at, n)| [&[0; 4][..], &n.to_le_bytes(), &at.to_le_bytes()].concat())
        .collect();
    data.resize(bytes, 0xee);
    let mut sqe = Sqe::new(NvmOpcode::DatasetManagement.0, 0, 1);
    sqe.cdw10[0] = (ranges.len() as u32 - 1).into();
    sqe.cdw10[1] = 4.into();
    s.io(sqe, &data)
}

/// NVM Command Set 1.0, 3.2.4, 3.2.6, 3.2.1, 3.2.8, 3.2.7; NVMe Base 2.0, 7.1.
#[test]
fn commands_reach_the_volume() {
    for host in [ScriptedHost::default(), ScriptedHost::with_digests()] {
        let mut s = Session::ready_with(Target::default(), host);
        let (small, large) = (pattern(1, 4096), pattern(2, 1 << 20));
        s.io(rw(NvmOpcode::Write, 0, 8, 8), &small).ok();
        s.io(flagged(rw(NvmOpcode::Write, 0, 2048, 2048), FUA), &large).ok();
        assert_eq!(s.io(rw(NvmOpcode::Read, 0, 8, 8), &[]).ok().data, small);
        assert_eq!(s.io(rw(NvmOpcode::Read, 0, 2048, 2048), &[]).ok().data, large);
        s.io(rw(NvmOpcode::Compare, 0, 8, 8), &small).ok();
        let differs = s.io(rw(NvmOpcode::Compare, 0, 9, 8), &small);
        assert_eq!(differs.code(), Status::COMPARE_FAILURE);
        s.io(flagged(dataless(NvmOpcode::WriteZeroes, 8, 8), DEAC | FUA), &[]).ok();
        s.io(dataless(NvmOpcode::WriteZeroes, 0, 4096), &[]).ok();
        s.io(dataless(NvmOpcode::Verify, 0, 16), &[]).ok();
        s.io(Sqe::new(NvmOpcode::Flush.0, 0, 1), &[]).ok();
        s.io(Sqe::new(NvmOpcode::Flush.0, 0, NSID_ALL), &[]).ok();
        assert_eq!(
            s.target.requests,
            [
                "write 8+4096 fua false",
                "write 2048+1048576 fua true",
                "read 8+8",
                "read 2048+2048",
                "compare 8+4096",
                "compare 9+4096",
                "zero 8+8 unmap true fua true",
                "zero 0+4096 unmap false fua false",
                "verify 0+16",
                "flush",
                "flush",
            ]
        );
    }
}

/// NVM Command Set 1.0, 3.2.3: ranges to free; hosts may send a longer list than they use.
#[test]
fn dataset_management_frees_ranges() {
    let mut s = Session::ready();
    deallocate(&mut s, &[(8, 16), (100, 0), (4000, 96)], 48).ok();
    deallocate(&mut s, &[(0, 1)], 4096).ok();
    assert_eq!(s.target.requests, ["unmap 8+16 4000+96", "unmap 0+1"]);
    let most: Vec<(u64, u32)> = (0..256).map(|i| (i * 16, 1)).collect();
    deallocate(&mut s, &most, 4096).ok();
    deallocate(&mut s, &[(0, 0)], 16).ok();
    assert_eq!(s.target.requests.len(), 3, "nothing to free is no request");
    for outside in [(BLOCKS, 1), (BLOCKS - 1, 2), (u64::MAX, 1), (u64::MAX, u32::MAX)] {
        let refused = deallocate(&mut s, &[(0, 8), outside], 32);
        assert_eq!(refused.code(), Status::LBA_OUT_OF_RANGE, "{outside:?}");
    }
    let short = deallocate(&mut s, &[(0, 1), (8, 1)], 16);
    assert_eq!(short.code(), Status::DATA_SGL_LENGTH_INVALID);
    let long = deallocate(&mut s, &[(0, 1)], 4112);
    assert_eq!(long.code(), Status::DATA_SGL_LENGTH_INVALID);
    let mut hint = Sqe::new(NvmOpcode::DatasetManagement.0, 0, 1);
    hint.cdw10[1] = 3.into();
    hint.sgl = Sgl::transport(16);
    s.io(hint, &[]).ok();
    assert_eq!(s.target.requests.len(), 3, "hints are not taken");
}

/// NVM Command Set 1.0, 3.2: ranges outside of the namespace, lengths that do not fit, before any
/// memory is taken.
#[test]
fn ranges_and_lengths_are_checked() {
    let mut s = Session::ready();
    s.target.withhold = true;
    let with = |sqe: Sqe, bytes: u32| Sqe { sgl: Sgl::transport(bytes), ..sqe };
    let write = NvmOpcode::Write;
    let mut cases = vec![
        (with(rw(write, 0, 0, 8), 4095), Status::DATA_SGL_LENGTH_INVALID),
        (with(rw(write, 0, 0, 8), 8192), Status::DATA_SGL_LENGTH_INVALID),
        (with(rw(NvmOpcode::Read, 0, 0, 8), 0), Status::DATA_SGL_LENGTH_INVALID),
        (rw(write, 0, 0, 2049), Status::INVALID_FIELD),
        (rw(NvmOpcode::Read, 0, 0, 4096), Status::INVALID_FIELD),
        (flagged(dataless(NvmOpcode::WriteZeroes, 0, 8), 1 << 23), Status::INVALID_FIELD),
    ];
    for opcode in [NvmOpcode::Read, write, NvmOpcode::Compare] {
        for (at, blocks) in [(BLOCKS, 1), (BLOCKS - 7, 8), (u64::MAX, 1), (u64::MAX - 6, 8)] {
            cases.push((rw(opcode, 0, at, blocks), Status::LBA_OUT_OF_RANGE));
        }
    }
    for opcode in [NvmOpcode::WriteZeroes, NvmOpcode::Verify] {
        cases.push((dataless(opcode, 1, BLOCKS as u32), Status::LBA_OUT_OF_RANGE));
    }
    for (sqe, status) in cases {
        let refused = s.io(sqe, &[]);
        assert_eq!(refused.code(), status, "{sqe:?}");
        assert!(refused.status.is_do_not_retry());
    }
    assert!(s.target.wanting.is_empty() && s.target.requests.is_empty());
}

/// NVMe Base 2.0, 3.2.1: namespaces that do not exist; commands that do not exist; fused ones.
#[test]
fn namespaces_and_opcodes_are_checked() {
    let mut s = Session::ready();
    let on = |nsid: u32| Sqe { nsid: nsid.into(), ..rw(NvmOpcode::Read, 0, 0, 8) };
    assert_eq!(s.io(on(0), &[]).code(), Status::INVALID_NAMESPACE);
    assert_eq!(s.io(on(2), &[]).code(), Status::INVALID_FIELD, "inactive");
    assert_eq!(s.io(on(1025), &[]).code(), Status::INVALID_NAMESPACE);
    assert_eq!(s.io(on(NSID_ALL), &[]).code(), Status::INVALID_NAMESPACE);
    for opcode in [0x04, 0x0f, 0x1d, 0x7d, 0x80, 0xff] {
        let refused = s.io(Sqe::new(opcode, 0, 1), &[]);
        assert_eq!(refused.code(), Status::INVALID_OPCODE, "{opcode:#x}");
    }
    for (opcode, fuse, blocks, status) in [
        (NvmOpcode::Read, 1, 8, Status::INVALID_FIELD),
        (NvmOpcode::Read, 2, 8, Status::INVALID_FIELD),
        (NvmOpcode::Write, 1, 8, Status::INVALID_FIELD),
        (NvmOpcode::Compare, 2, 8, Status::INVALID_FIELD),
        (NvmOpcode::Compare, 3, 8, Status::INVALID_FIELD),
        (NvmOpcode::Compare, 1, 17, Status::ATOMIC_WRITE_UNIT),
        (NvmOpcode::Write, 2, 17, Status::ATOMIC_WRITE_UNIT),
    ] {
        let mut sqe = rw(opcode, 0, 0, blocks);
        sqe.flags |= fuse;
        assert_eq!(s.io(sqe, &[]).code(), status, "{opcode:?} {fuse}");
    }
}

/// Source ranges of a Copy; `bytes` of data in all.
fn copy(s: &mut Session, to: u64, ranges: &[(u64, u16)], bytes: usize) -> Outcome {
    let mut data: Vec<u8> = ranges
        .iter()
        .flat_map(|(at, n)| {
            let zeroes = [0xee; 14];
            [&[0xee; 8][..], &at.to_le_bytes(), &(n - 1).to_le_bytes(), &zeroes].concat()
        })
        .collect();
    data.resize(bytes, 0xee);
    let mut sqe = Sqe::new(NvmOpcode::Copy.0, 0, 1);
    (sqe.cdw10[0], sqe.cdw10[1]) = ((to as u32).into(), ((to >> 32) as u32).into());
    sqe.cdw10[2] = (ranges.len() as u32 - 1).into();
    s.io(sqe, &data)
}

/// NVM Command Set 1.0, 3.2.2: what a copy may ask for, and what Identify says of that.
#[test]
fn copies_are_checked() {
    let mut s = Session::ready();
    copy(&mut s, 100, &[(0, 8), (BLOCKS - 1, 1)], 64).ok();
    copy(&mut s, 0, &[(0, 8)], 4096).ok();
    assert_eq!(s.target.requests, ["copy 0+8 4095+1 to 100 fua false", "copy 0+8 to 0 fua false"]);
    let most: Vec<_> = (0..128).map(|_| (0, 8)).collect();
    copy(&mut s, 0, &most, 4096).ok();
    s.target.requests.clear();
    let mut identify = Sqe::new(AdminOpcode::Identify.0, 0, 1);
    identify.sgl = Sgl::transport(4096);
    let id = s.admin(identify).ok().data;
    assert_eq!(id[74..81], [0xff, 0xff, 0, 0, 2, 0, 127], "MSSRL, MCL, MSRC");
    for (to, ranges, bytes, status) in [
        (0, &[(BLOCKS - 7, 8)][..], 32, Status::LBA_OUT_OF_RANGE),
        (0, &[(0, 1), (u64::MAX, 1)], 64, Status::LBA_OUT_OF_RANGE),
        (BLOCKS - 8, &[(0, 8), (0, 1)], 64, Status::LBA_OUT_OF_RANGE),
        (u64::MAX, &[(0, 1)], 32, Status::LBA_OUT_OF_RANGE),
        (0, &[(0, 1), (0, 1)], 32, Status::DATA_SGL_LENGTH_INVALID),
        (0, &[(0, 1)], 4128, Status::DATA_SGL_LENGTH_INVALID),
        (0, &[(0, 1); 129], 4096, Status::COMMAND_SIZE_LIMIT),
    ] {
        let refused = copy(&mut s, to, ranges, bytes);
        assert_eq!(refused.code(), status, "{to} {ranges:?}");
        assert!(refused.status.is_do_not_retry());
    }
    let mut other = Sqe::new(NvmOpcode::Copy.0, 0, 1);
    other.cdw10[2] = (1 << 8).into();
    other.sgl = Sgl::transport(32);
    assert_eq!(s.io(other, &[]).code(), Status::INVALID_FIELD, "a format that is not offered");
    assert!(s.target.requests.is_empty());
}

/// 3.2.2: a copy is as long as MSSRL and MCL have it, whatever the namespace has room for.
#[test]
fn long_copies_are_refused() {
    let mut target = Target::default();
    let mut ns = namespace();
    (ns.info.block_size, ns.info.blocks) = (4096, 1 << 20);
    target.namespaces.insert(1, ns);
    let mut s = Session::ready_with(target, ScriptedHost::default());
    assert_eq!(copy(&mut s, 0, &[(0, 8193)], 32).code(), Status::COMMAND_SIZE_LIMIT);
    let three = [(0, 8192), (0, 8192), (0, 1)];
    assert_eq!(copy(&mut s, 0, &three, 96).code(), Status::COMMAND_SIZE_LIMIT);
    copy(&mut s, 0, &three[..2], 64).ok();
}

/// NVMe Base 2.0, 8.12: a namespace that is write protected.
#[test]
fn a_write_protected_namespace_refuses_writes() {
    let mut target = Target::default();
    let mut ns = namespace();
    ns.info.read_only = true;
    target.namespaces.insert(1, ns);
    let mut s = Session::ready_with(target, ScriptedHost::default());
    for sqe in [rw(NvmOpcode::Write, 0, 0, 32), dataless(NvmOpcode::WriteZeroes, 0, 8)] {
        assert_eq!(s.io(sqe, &[]).code(), Status::WRITE_PROTECTED);
    }
    assert_eq!(deallocate(&mut s, &[(0, 8)], 16).code(), Status::WRITE_PROTECTED);
    assert_eq!(copy(&mut s, 0, &[(8, 8)], 32).code(), Status::WRITE_PROTECTED);
    s.io(rw(NvmOpcode::Read, 0, 0, 8), &[]).ok();
}

/// NVMe Base 2.0, 5.27.1.4: with the cache turned off every write is durable, also those before.
#[test]
fn without_a_write_cache_writes_are_durable() {
    let mut s = Session::ready();
    let mut off = Sqe::new(AdminOpcode::SetFeatures.0, 0, 0);
    off.cdw10[0] = 6.into();
    s.admin(off).ok();
    // It is off already, but who knows whether that flush went well.
    s.admin(off).ok();
    s.io(rw(NvmOpcode::Write, 0, 0, 8), &pattern(1, 4096)).ok();
    s.io(dataless(NvmOpcode::WriteZeroes, 0, 8), &[]).ok();
    let expected =
        ["flush all", "flush all", "write 0+4096 fua true", "zero 0+8 unmap false fua true"];
    assert_eq!(s.target.requests, expected);
}

/// NVM Command Set 1.0, 4.1.5.1: blocks of 4 KiB; WZSL bounds Write Zeroes below what NLB can say.
#[test]
fn large_blocks() {
    let mut target = Target::default();
    let mut ns = namespace();
    ns.info.block_size = 4096;
    ns.info.blocks = 1 << 20;
    ns.info.max_transfer_blocks = 256;
    target.namespaces.insert(1, ns);
    target.limits = Limits { max_transfer_bytes: 1 << 17, ..Limits::default() };
    let mut s = Session::ready_with(target, ScriptedHost::default());
    let zeroes = |n| dataless(NvmOpcode::WriteZeroes, 0, n);
    assert_eq!(s.io(zeroes(8193), &[]).code(), Status::INVALID_FIELD);
    let mut read = rw(NvmOpcode::Read, 0, 0, 33);
    read.sgl = Sgl::transport(33 * 4096);
    assert_eq!(s.io(read, &[]).code(), Status::INVALID_FIELD, "beyond MDTS");
}

/// Every failure of a volume becomes the status that the table says.
#[test]
fn volume_errors_have_their_status() {
    let mut s = Session::ready();
    for (error, status) in [
        (Error::NoSpace, Status::CAPACITY_EXCEEDED),
        (Error::Fenced, Status::ANA_TRANSITION),
        (Error::Gone, Status::INTERNAL_ERROR),
    ] {
        s.target.fail = Some(RequestError::Device(error));
        let failed = s.io(rw(NvmOpcode::Write, 0, 0, 8), &pattern(1, 4096));
        assert_eq!(failed.code(), status);
    }
}
