//! Invariants of parsing any parameter list of EXTENDED COPY. Shared by the property test here and
//! the fuzz target `scsi_copy`.

use block::{BufferPool, Info, MemoryClass};
use scsi::{
    Admission, CopyOutcome, CopyPlan, CscdTarget, LogicalUnit, Lun, Nexus, NexusId, PresentedToken,
    ReceivedCommand, SharedUnitState, Side, Status, Step, TargetPort, TokenRequest, TokenResult,
    TransferLengths, UnitConfig,
};

/// Sends the bytes as lists of both formats; the first of them chooses the ends' sizes.
pub(crate) fn run(bytes: &[u8]) {
    let Some((&sizes, list)) = bytes.split_first() else { return };
    let list = &list[..list.len().min(4096)];
    for long in [false, true] {
        let (mut unit, nexus) = unit();
        send(&mut unit, nexus, list, &[0x83, u8::from(long)], sizes);
    }
    for action in [0x10, 0x11] {
        let (mut unit, nexus) = unit();
        send(&mut unit, nexus, list, &[0x83, action], sizes);
    }
}

fn info(large: bool, few: bool) -> Info {
    Info {
        block_size: if large { 4096 } else { 512 },
        blocks: if few { 1000 } else { u64::MAX / 4096 },
        physical_block_size: 4096,
        max_transfer_blocks: 64,
        unmap_granularity_blocks: 8,
        unmap_zeroes: true,
        volatile_cache: false,
        native_fua: false,
        read_only: false,
        overhead_bytes: 0,
        metadata_blocks: 0,
    }
}

fn unit() -> (LogicalUnit, NexusId) {
    let config = UnitConfig {
        uuid: [3; 16],
        product: "p".into(),
        revision: "1".into(),
        serial: "s".into(),
        read_only: false,
        thin: true,
        solid_state: true,
        max_transfer_blocks: 64,
        keeps_reservations: true,
    };
    let mut unit = LogicalUnit::new(config, info(false, false));
    let target_port = TargetPort { device: "t".into(), name: "t,t,0x1".into(), relative_id: 1 };
    let nexus = Nexus { initiator_port: "i".into(), target_port };
    let nexus = unit.add_nexus(nexus).expect("there is room");
    let known = SharedUnitState::DEFAULT;
    let ready = ReceivedCommand {
        cdb: &[0; 6],
        expected_transfer: TransferLengths::NONE,
        luns: &[],
        shared: known,
    };
    let _power_on = unit.admit(nexus, &ready);
    (unit, nexus)
}

fn send(unit: &mut LogicalUnit, nexus: NexusId, list: &[u8], command: &[u8; 2], sizes: u8) {
    let [a, b, c, d] = (list.len() as u32).to_be_bytes();
    let cdb = [command[0], command[1], 0, 0, 0, 0, 0, 0, 0, 0, a, b, c, d, 0, 0];
    let window = TransferLengths::from_initiator(list.len() as u64);
    let luns = [Lun::new(0).expect("a small number")];
    let arrival = ReceivedCommand {
        cdb: &cdb,
        expected_transfer: window,
        luns: &luns,
        shared: SharedUnitState::DEFAULT,
    };
    let command = match unit.admit(nexus, &arrival) {
        Admission::Reply(reply) => {
            assert!(reply.status == Status::Good && list.is_empty());
            return;
        }
        Admission::Accept(command) => command,
    };
    let pool = BufferPool::new(1 << 16).expect("a small pool");
    let credit = pool.account().try_credit(list.len(), MemoryClass::LocalIo).expect("a free pool");
    match unit.start(nexus, command, rt::buf::copy_in(&credit, list)) {
        Step::Reply(reply) => {
            assert_eq!(reply.status, Status::CheckCondition);
            assert_eq!(reply.sense[2], 0x05, "ILLEGAL REQUEST: nothing was begun");
        }
        Step::Token(plan, running) => {
            check_token(plan.request());
            let reply = unit.finish_token(running, TokenResult::Written);
            assert_eq!(reply.status, Status::Good);
        }
        Step::Copy(plan, running) => {
            check(&plan, sizes);
            let reply = unit.finish_copy(running, CopyOutcome::Done);
            assert_eq!(reply.status, Status::Good);
        }
        Step::Run(..) | Step::ChangeShared(..) | Step::ReadShared(_) => {
            panic!("a copy is no request")
        }
    }
}

/// Ranges lie in the unit, whose blocks have 512 bytes, and do not overlap; a token's own
/// description can be read.
fn check_token(work: &TokenRequest) {
    let (TokenRequest::Populate { ranges, .. } | TokenRequest::Write { ranges, .. }) = work;
    let blocks = info(false, false).blocks;
    for (n, range) in ranges.iter().enumerate() {
        assert!(range.count > 0 && range.end().is_some_and(|end| end <= blocks));
        assert!(ranges[..n].iter().all(|other| !other.overlaps(range)));
    }
    let total: u64 = ranges.iter().map(|range| range.count).sum();
    assert!(ranges.len() <= 64 && total <= (256 << 20) / 512);
    if let TokenRequest::Write { token: PresentedToken::Data(token), .. } = work {
        let _ = token.creator().is_some_and(|creator| creator.identifies(&[3; 16]));
    }
}

fn check(plan: &CopyPlan, sizes: u8) {
    let bit = |n: u8| sizes >> n & 1 == 1;
    let (source, destination) = (info(bit(0), bit(1)), info(bit(2), bit(3)));
    assert!(plan.segments().len() <= 128);
    for segment in plan.segments() {
        for side in [Side::Source, Side::Destination] {
            if let Some(CscdTarget::Named(end)) = plan.cscd(segment, side) {
                let _ = (end.identifies(&[3; 16]), end.matches_block_size(512));
            }
        }
        let Ok(extent) = segment.range(&source, &destination) else { continue };
        for (at, info) in [(extent.from, &source), (extent.to, &destination)] {
            let size = u64::from(info.block_size);
            assert!(extent.bytes.is_multiple_of(size));
            assert!(at.0 + extent.bytes / size <= info.blocks);
        }
        let step = 1 << 19;
        let first = if bit(5) { 4096 } else { step };
        let mut all: Vec<_> = extent.pieces(first, step, bit(4).then_some(512)).collect();
        all.sort_unstable();
        let mut end = 0;
        for (at, len) in all {
            assert!(at == end && (1..=step).contains(&len));
            end = at + len;
        }
        assert_eq!(end, extent.bytes);
    }
}
