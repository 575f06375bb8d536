//! Plays a script of arbitrary bytes as a guest's memory: descriptors anywhere, headers, ranges.
//! Shared by the fuzz target and a property test. What must hold is asserted:
//!
//! * nothing panics, and whatever is there has an end;
//! * a request that is taken stays inside its disk, and its data is as long as its blocks;
//! * all that it may touch is inside the guest's memory.
#![allow(clippy::unwrap_used)]

use attach::vhost_user::config::{MAX_DISCARD_RANGES, MAX_RANGE_SECTORS};
use attach::vhost_user::memory::GuestMap;
use attach::vhost_user::request::{
    ChainRequest, Command, DiskLimits, MAX_DESCRIPTORS, read_request,
};
use block::Blocks;
use testkit::Script;
use vm_memory::{Bytes, GuestAddress};

/// The guest's memory: two stretches with a hole.
const HOLE: std::ops::Range<u64> = 0x2000..0x3000;
const END: u64 = 0x5000;

/// Mostly an address in memory.
fn address(script: &mut Script<'_>) -> u64 {
    match script.byte() {
        0xf8.. => u64::MAX - u64::from(script.half()),
        0xf0.. => u64::from(script.half()) << 16,
        _ => u64::from(script.half()) % END,
    }
}

/// Mostly a length that fits something.
fn length(script: &mut Script<'_>) -> u32 {
    match script.byte() {
        0xf8.. => u32::MAX - u32::from(script.half()),
        n @ 0xe0.. => u32::from(n & 7) * 16,
        n @ 0x80.. => u32::from(n & 7) * 512,
        n @ 0x40.. => u32::from(n & 31),
        n => u32::from(n & 1) + 16 * u32::from(n >> 1 & 1),
    }
}

fn descriptor(script: &mut Script<'_>, size: u16) -> [u8; 16] {
    let mut out = [0; 16];
    out[..8].copy_from_slice(&address(script).to_le_bytes());
    out[8..12].copy_from_slice(&length(script).to_le_bytes());
    let flags = script.byte();
    let indirect = u16::from(flags >= 0xe0) * 4;
    out[12..14].copy_from_slice(&(u16::from(flags & 3) | indirect).to_le_bytes());
    out[14..].copy_from_slice(&(u16::from(script.byte()) % (size + 1)).to_le_bytes());
    out
}

pub(crate) fn run(script: &[u8]) {
    let mut script = Script::new(script);
    let holes = [(0, HOLE.start), (HOLE.end, END - HOLE.end)];
    let guest =
        GuestMap::from_ranges(&holes.map(|(at, n)| (GuestAddress(at), n as usize))).unwrap();
    let shape = DiskLimits {
        block_size: if script.byte().is_multiple_of(2) { 512 } else { 4096 },
        blocks: u64::from(script.byte()),
        read_only: script.byte() > 0xe0,
        can_discard: script.byte() > 0x20,
    };
    let size = u16::from(script.byte() % 16) + 1;
    let table = address(&mut script);
    for i in 0..size {
        let place = GuestAddress(table.wrapping_add(16 * u64::from(i)));
        // Where there is no memory, there is no descriptor.
        let _ = guest.write_slice(&descriptor(&mut script, size), place);
    }
    while !script.is_empty() {
        let (at, what) = (address(&mut script), script.byte());
        let mut bytes = [0; 16];
        bytes[0] = [0, 1, 4, 8, 11, 13, 14, 0xff][usize::from(what % 8)];
        bytes[8..10].copy_from_slice(&(script.half() >> 4).to_le_bytes());
        if what >= 0x80 {
            bytes.iter_mut().for_each(|b| *b = script.byte());
        }
        let _ = guest.write_slice(&bytes, GuestAddress(at));
    }
    for head in 0..size + 1 {
        if let Ok(taken) = read_request(&guest, (GuestAddress(table), size), head, &shape) {
            judge(&guest, &taken, &shape);
        }
    }
}

fn judge(guest: &GuestMap, taken: &ChainRequest, shape: &DiskLimits) {
    guest.write_obj(0u8, taken.status).expect("the status is inside memory");
    let bytes = taken.data.len();
    assert!(bytes <= MAX_DESCRIPTORS as u64 * END, "bounded by memory and descriptors");
    let mut all = vec![0; usize::try_from(bytes).unwrap()];
    taken.data.read(guest, 0, &mut all).expect("the data is inside memory");
    let inside = |range: &Blocks| range.end().is_some_and(|end| end <= shape.blocks);
    let sectors = |range: &Blocks| range.count * u64::from(shape.block_size / 512);
    let changes = |yes: bool| assert!(yes && !shape.read_only);
    match &taken.command {
        Err(_) | Ok(Command::Flush) => {}
        Ok(Command::Read(range)) => {
            assert!(inside(range) && range.count * u64::from(shape.block_size) == bytes);
            taken.data.write(guest, 0, &all).expect("it is inside memory");
            assert_eq!(u64::from(taken.writable_bytes()), bytes + 1);
        }
        Ok(Command::Write(range)) => {
            changes(inside(range) && range.count * u64::from(shape.block_size) == bytes);
            assert_eq!(taken.writable_bytes(), 1);
        }
        Ok(Command::Discard(ranges)) => {
            changes(shape.can_discard && ranges.len() <= MAX_DISCARD_RANGES as usize);
            assert!(ranges.iter().all(|r| inside(r) && r.count > 0));
            assert!(ranges.iter().all(|r| sectors(r) <= u64::from(MAX_RANGE_SECTORS)));
        }
        Ok(Command::Zero { range, unmap }) => {
            changes(inside(range) && (shape.can_discard || !unmap));
        }
        Ok(Command::Identify) => assert!((1..=20).contains(&bytes)),
    }
}
