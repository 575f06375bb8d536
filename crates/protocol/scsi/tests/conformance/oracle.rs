//! Invariants for any input from initiators. Shared by the property test here and the fuzz target
//! `scsi_cdb`: bytes are read as a script of commands, replies of the volume and events.

use block::{
    Access, Account, Blocks, BufferPool, Bufs, Error, Info, Lba, MemoryClass, Request, RequestError,
};
use reservation::{Change, Initiator, ItNexus, Table};
use scsi::{
    Admission, AttentionScope, CopyFault, CopyIoError, CopyOutcome, CopyPlan, LogicalUnit, Lun,
    Nexus, NexusId, PortGroup, ReceivedCommand, Reply, RodToken, SENSE_MAX, SharedUnitState, Side,
    Status, Step, TargetPort, TokenFault, TokenPlan, TokenRequest, TokenResult, TransferLengths,
    UnitAttention, UnitConfig,
};
use testkit::Script;

const BLOCK: u32 = 512;
const MAX_TRANSFER: u32 = 16;
const LONGEST_LIST: usize = 4096;

const WRITE_SAME_10: u8 = 0x41;
const UNMAP: u8 = 0x42;
const COMPARE_AND_WRITE: u8 = 0x89;
const WRITE_SAME_16: u8 = 0x93;
const EXTENDED_COPY: u8 = 0x83;

/// Commands on blocks.
const OPCODES: [u8; 29] = [
    0x08, 0x0a, 0x28, 0x2a, 0x2e, 0x2f, 0x34, 0x35, 0x41, 0x42, 0x88, 0x89, 0x8a, 0x8e, 0x8f, 0x90,
    0x91, 0x93, 0x9e, 0xa8, 0xaa, 0xae, 0xaf, 0x1b, 0x15, 0x04, 0x1d, 0x8b, 0x9c,
];

/// `len` bytes that repeat a few of the script.
fn data(script: &mut Script<'_>, len: usize) -> Vec<u8> {
    let seed: [u8; 40] = script.bytes();
    seed.iter().copied().cycle().take(len).collect()
}

thread_local! {
    /// One pool for all scripts: a mapping each would be most of the work.
    static ACCOUNT: Account = BufferPool::new(1 << 20).expect("a small pool").account();
}

struct World {
    unit: LogicalUnit,
    blocks: u64,
    ids: Vec<NexusId>,
    /// The shared state.
    table: Table,
    account: Account,
}

/// Plays the script; panics where something does not hold.
pub(crate) fn run(script: &[u8]) {
    let mut script = Script::new(script);
    let mut world = World::new(&mut script);
    while !script.is_empty() {
        match script.byte() {
            0..=9 => world.event(&mut script),
            _ => world.command(&mut script),
        }
        assert!(world.unit.nexus_count() <= world.ids.len());
    }
}

impl World {
    fn new(script: &mut Script<'_>) -> Self {
        let [size, flags] = script.bytes();
        let blocks = [0, 1, 100, 1 << 20, 1 << 33, u64::MAX / 512][usize::from(size % 6)];
        let info = Info {
            block_size: BLOCK,
            blocks,
            metadata_blocks: 0,
            physical_block_size: [512, 4096, 1536][usize::from(flags >> 6) % 3],
            max_transfer_blocks: MAX_TRANSFER,
            unmap_granularity_blocks: u32::from(flags & 1) * 8,
            unmap_zeroes: flags & 2 != 0,
            volatile_cache: flags & 4 != 0,
            native_fua: false,
            read_only: size / 6 == 1,
            overhead_bytes: 0,
        };
        let config = UnitConfig {
            uuid: [flags; 16],
            product: "product".into(),
            revision: "1".into(),
            serial: "serial".into(),
            read_only: size / 6 == 2,
            thin: flags & 32 != 0,
            solid_state: true,
            max_transfer_blocks: u32::MAX,
            keeps_reservations: flags & 8 == 0,
        };
        let account = ACCOUNT.with(Account::clone);
        let mut world = Self {
            unit: LogicalUnit::new(config, info),
            blocks,
            ids: vec![],
            table: Table::default(),
            account,
        };
        world.join();
        world
    }

    fn join(&mut self) {
        let name = "i".repeat(self.ids.len() % 300);
        let target_port = TargetPort { device: name.clone(), name: name.clone(), relative_id: 1 };
        let nexus = Nexus { initiator_port: name, target_port };
        self.ids.push(self.unit.add_nexus(nexus).expect("there is room for a few"));
    }

    /// One of the initiators, perhaps one that has left.
    fn any_nexus(&self, script: &mut Script<'_>) -> NexusId {
        self.ids[usize::from(script.byte()) % self.ids.len()]
    }

    fn event(&mut self, script: &mut Script<'_>) {
        let id = self.any_nexus(script);
        match script.byte() % 9 {
            0 if self.ids.len() < 1000 => self.join(),
            1 => self.unit.remove_nexus(id),
            2 => self.alter(id, &Change::Reset { whole_target: false }),
            3 => self.alter(id, &Change::AdminClear),
            4 => self
                .unit
                .establish_attention(AttentionScope::Except(id), UnitAttention::CommandsCleared),
            5 => self.unit.set_access(access(script.byte())),
            6 => self.set_port_groups(script.byte()),
            7 => self.unit.set_space(self.place(script.byte()), self.place(script.byte())),
            _ => {
                self.unit.establish_attention(AttentionScope::Only(id), UnitAttention::LunsChanged);
            }
        }
    }

    /// Of which initiators there are four to the reservations.
    fn party(&self, id: NexusId) -> ItNexus {
        let at = self.ids.iter().position(|other| *other == id).unwrap_or(0);
        let name = format!("iqn.{}", at % 4);
        ItNexus { initiator: Initiator::Iscsi { name, isid: [0; 6] }, port: 1 }
    }

    fn alter(&mut self, by: NexusId, change: &Change) {
        let Ok(Some(next)) = self.table.with_change(&self.party(by), 1, change) else { return };
        for id in self.ids.clone() {
            self.unit.notify(id, Table::notifications(&self.table, &next, &self.party(id)));
        }
        self.table = next;
    }

    fn set_port_groups(&mut self, byte: u8) {
        let group = |n, access| PortGroup { id: n, port: n, name: "n".repeat(n.into()), access };
        match byte % 8 {
            0 => self.unit.clear_port_groups(),
            n => {
                let others: Vec<_> = (0..u16::from(n)).map(|n| group(n, access(byte))).collect();
                self.unit.set_port_groups(group(1, access(byte >> 4)), &others);
            }
        }
    }

    fn command(&mut self, script: &mut Script<'_>) {
        let id = self.any_nexus(script);
        let [shaped, out, into] = script.bytes();
        let (cdb, exact) =
            if shaped < 192 { self.shaped(script) } else { (script.bytes(), window(out)) };
        let data_out = if out < 128 { exact } else { window(out) };
        let window = TransferLengths { data_out, data_in: window(into) };
        let luns = [Lun::new(0), Lun::new(u16::from(out))].map(|l| l.expect("small numbers"));
        let known = SharedUnitState {
            rights: self.table.rights(&self.party(id)),
            mode_pages: self.table.mode_pages,
        };
        let arrival =
            ReceivedCommand { cdb: &cdb, expected_transfer: window, luns: &luns, shared: known };
        match self.unit.admit(id, &arrival) {
            Admission::Reply(reply) => check_reply(&reply, &cdb, window),
            Admission::Accept(command) => {
                assert!(command.data_out() as u64 <= window.data_out);
                assert!(command.data_in() as u64 <= window.data_in.next_multiple_of(512));
                let bound = (MAX_TRANSFER * BLOCK) as usize;
                assert!(command.data_out() <= bound.max(LONGEST_LIST));
                assert!(command.data_in() <= bound && command.read_back() <= bound);
                let data_in = command.data_in();
                let mut data = data(script, command.data_out());
                match cdb[0] {
                    UNMAP if shaped < 192 => self.shape_list(&mut data),
                    EXTENDED_COPY => shape_copy(&mut data, cdb[1] & 1 != 0),
                    _ => {}
                }
                let step = self.unit.start(id, command, self.bufs(&data));
                let reply = self.drive(id, step, data_in, script);
                check_reply(&reply, &cdb, window);
            }
        }
    }

    /// A command on blocks at the beginning or around the end of the device, and how much data
    /// it should come with.
    fn shaped(&self, script: &mut Script<'_>) -> ([u8; 16], u64) {
        let [which, flags, place, count] = script.bytes();
        let opcode = OPCODES[usize::from(which) % OPCODES.len()];
        let at = self.place(place);
        let count = u32::from(count) % (MAX_TRANSFER + 2);
        let mut cdb = [0; 16];
        (cdb[0], cdb[1]) = (opcode, if flags < 128 { 0 } else { flags & 0x1b });
        match opcode >> 5 {
            0 => (cdb[1], cdb[3], cdb[4]) = (0, at as u8, count as u8),
            _ if opcode == UNMAP => {
                cdb[7..9].copy_from_slice(&(8 + 16 * count as u16).to_be_bytes());
            }
            1 | 2 => {
                cdb[2..6].copy_from_slice(&(at as u32).to_be_bytes());
                cdb[7..9].copy_from_slice(&(count as u16).to_be_bytes());
            }
            5 => {
                cdb[2..6].copy_from_slice(&(at as u32).to_be_bytes());
                cdb[6..10].copy_from_slice(&count.to_be_bytes());
            }
            _ => {
                cdb[2..10].copy_from_slice(&at.to_be_bytes());
                cdb[10..14].copy_from_slice(&count.to_be_bytes());
            }
        }
        let data = match opcode {
            UNMAP => 8 + 16 * count,
            COMPARE_AND_WRITE => 2 * count * BLOCK,
            WRITE_SAME_10 | WRITE_SAME_16 => BLOCK,
            _ => count * BLOCK,
        };
        (cdb, u64::from(data))
    }

    /// A block near the beginning or the end.
    fn place(&self, code: u8) -> u64 {
        match code {
            0..=99 => u64::from(code),
            _ => self.blocks.saturating_add(20).saturating_sub(u64::from(code - 100)),
        }
    }

    /// Makes a list of descriptors of random bytes.
    fn shape_list(&self, list: &mut [u8]) {
        let Some((header, descriptors)) = list.split_at_mut_checked(8) else { return };
        header[2..4].copy_from_slice(&(descriptors.len() as u16).to_be_bytes());
        for descriptor in descriptors.chunks_exact_mut(16) {
            let (at, large, count) = (self.place(descriptor[0]), descriptor[1], descriptor[2]);
            let count = u32::from(count) << if large > 128 { 12 } else { 0 };
            descriptor[..8].copy_from_slice(&at.to_be_bytes());
            descriptor[8..12].copy_from_slice(&count.to_be_bytes());
        }
    }

    fn bufs(&self, bytes: &[u8]) -> Bufs {
        let credit =
            self.account.try_credit(bytes.len(), MemoryClass::LocalIo).expect("a free pool");
        rt::buf::copy_in(&credit, bytes)
    }

    fn drive(
        &mut self,
        id: NexusId,
        mut step: Step,
        data_in: usize,
        script: &mut Script<'_>,
    ) -> Reply {
        for _ in 0..3 {
            match step {
                Step::Reply(reply) => return reply,
                Step::Run(request, running) => {
                    self.check_request(&request, data_in);
                    step = self.unit.finish(running, result(&request, script));
                }
                Step::ChangeShared(change, running) => {
                    step = match self.table.with_change(&self.party(id), 1, &change) {
                        Err(why) => self.unit.finish_refused_change(running, why),
                        Ok(_) => {
                            self.alter(id, &change);
                            self.unit.finish(running, Ok(Bufs::new()))
                        }
                    };
                }
                Step::ReadShared(running) => {
                    step = self.unit.finish_shared_read(running, &self.table);
                }
                Step::Token(plan, running) => {
                    self.check_token(plan.request());
                    let outcome = tokened(&plan, script);
                    return self.unit.finish_token(running, outcome);
                }
                Step::Copy(plan, running) => {
                    assert!(plan.segments().len() <= 128);
                    let outcome = copied(&plan, script);
                    return self.unit.finish_copy(running, outcome);
                }
            }
        }
        panic!("a command takes at most two requests")
    }

    fn check_token(&self, work: &TokenRequest) {
        let (TokenRequest::Populate { ranges, .. } | TokenRequest::Write { ranges, .. }) = work;
        let mut total = 0;
        for (n, range) in ranges.iter().enumerate() {
            assert!(range.count > 0 && range.end().is_some_and(|end| end <= self.blocks));
            assert!(ranges[..n].iter().all(|other| !other.overlaps(range)));
            total += range.count;
        }
        assert!(ranges.len() <= 64 && total <= (256 << 20) / u64::from(BLOCK));
    }

    fn check_request(&self, request: &Request, data_in: usize) {
        let whole = |data: &Bufs| {
            assert!(!data.is_empty() && data.len().is_multiple_of(BLOCK as usize));
            assert!(data.len() <= (MAX_TRANSFER * BLOCK) as usize);
            data.len() as u64 / u64::from(BLOCK)
        };
        let inside = |at: Lba, count: u64| {
            let end = Blocks::new(at, count).end().expect("no overflow");
            assert!(count > 0 && end <= self.blocks, "{at}+{count} of {}", self.blocks);
        };
        match request {
            Request::Read { range } => {
                inside(range.at, range.count);
                assert_eq!(range.count * u64::from(BLOCK), data_in as u64);
            }
            Request::Write { at, data, .. }
            | Request::Compare { at, data }
            | Request::OrWrite { at, data, .. } => {
                inside(*at, whole(data));
            }
            Request::CompareAndWrite { at, compare, write, .. } => {
                assert_eq!(compare.len(), write.len());
                inside(*at, whole(compare));
            }
            Request::WriteSame { range, pattern, .. } => {
                assert_eq!(pattern.len(), BLOCK as usize);
                inside(range.at, range.count);
            }
            Request::Zero { range, .. } | Request::Verify { range } => {
                inside(range.at, range.count);
            }
            Request::Unmap { ranges } => {
                assert!(!ranges.is_empty() && ranges.len() <= 255);
                ranges.iter().for_each(|r| inside(r.at, r.count));
                assert!(ranges.iter().map(|r| r.count).sum::<u64>() <= 1 << 20);
            }
            Request::BlockStatus { range, max_runs: most } => {
                assert!(*most > 0);
                inside(range.at, range.count);
            }
            Request::DrainWrites { .. } => panic!("no command is only that"),
            Request::Flush => {}
        }
    }
}

/// Makes a parameter list with one end, if that fits, and segments between that and the unit
/// itself.
fn shape_copy(list: &mut [u8], long: bool) {
    let header = if long { 48 } else { 16 };
    let Some((head, rest)) = list.split_at_mut_checked(header) else { return };
    let Some((end, segments)) = rest.split_at_mut_checked(32) else { return };
    let count = segments.len() / 28;
    let length = (28 * count) as u16;
    let flags = head[15];
    head[..header].fill(0);
    if long {
        head[15] = flags & 3;
        (head[0], head[3], head[16], head[43]) = (1, 0x20, 0xff, 32);
        head[44..46].copy_from_slice(&length.to_be_bytes());
    } else {
        head[3] = 32;
        head[10..12].copy_from_slice(&length.to_be_bytes());
    }
    (end[0], end[1], end[5], end[7]) = (0xe4, 0, 0x03, end[7] % 22);
    for segment in segments.chunks_exact_mut(28) {
        let flags = segment[1] & 3;
        segment[..4].copy_from_slice(&[2, flags, 0, 24]);
    }
}

/// None, tiny, less than a block, blocks, more than any command wants.
fn window(code: u8) -> u64 {
    match code {
        0..=9 => 0,
        10..=19 => u64::from(code - 9) * 8,
        20..=39 => u64::from(code) * 25,
        40..=199 => u64::from(code - 39) * 512,
        200..=249 => 1 << 20,
        _ => u64::from(u32::MAX),
    }
}

fn result(request: &Request, script: &mut Script<'_>) -> Result<Bufs, RequestError> {
    let [what, at] = script.bytes();
    let at = Lba(u64::from(at) << 30);
    let error = match what {
        0 => Error::Unreadable { at },
        1 => Error::Corrupt { at },
        2 => Error::Unwritable { at },
        3 => Error::OutOfRange,
        4 => Error::NoSpace,
        5 => Error::ReadOnly,
        6 => Error::Fenced,
        7 => Error::Aborted,
        8 => Error::Gone,
        9 => return Err(RequestError::Miscompare { offset: at.0 }),
        _ => {
            return Ok(match request {
                Request::Read { range } => Bufs::zeroes(range.count as usize * BLOCK as usize),
                _ => Bufs::new(),
            });
        }
    };
    Err(RequestError::Device(error))
}

fn tokened(plan: &TokenPlan, script: &mut Script<'_>) -> TokenResult {
    let [what, wrote] = script.bytes();
    plan.record_command();
    let making = matches!(plan.request(), TokenRequest::Populate { .. });
    match what {
        0 => return TokenResult::Aborted,
        1 => return TokenResult::Invalid(TokenFault::TooManyTokens),
        _ if making => return TokenResult::Created(RodToken::new(&[0; 16], 1, BLOCK, [1; 5])),
        2 => return TokenResult::Written,
        _ => plan.record_written(u64::from(what) * u64::from(BLOCK), u64::from(wrote)),
    }
    match what % 3 {
        0 => TokenResult::Invalid(TokenFault::Cancelled),
        1 => TokenResult::Failed(Side::Source, CopyIoError::ReservationConflict),
        _ => TokenResult::Failed(Side::Destination, CopyIoError::PathUnavailable),
    }
}

fn copied(plan: &CopyPlan, script: &mut Script<'_>) -> CopyOutcome {
    let [what, segment, wrote] = script.bytes();
    for segment in plan.segments().iter().take(usize::from(segment)) {
        plan.begin_segment(segment);
        plan.set_segment_size(u64::MAX, BLOCK);
        plan.record_written(u64::from(wrote >> 6), u64::from(wrote) << 30);
        plan.record_command();
    }
    let (segment, side) =
        (u16::from(segment), if what > 127 { Side::Source } else { Side::Destination });
    let fault = match what % 8 {
        0 => return CopyOutcome::Aborted,
        1 => CopyFault::Unreachable(side),
        2 => CopyFault::OutOfRange(side),
        3 => CopyFault::Io(side, CopyIoError::ReservationConflict),
        4 => CopyFault::Io(side, CopyIoError::PathUnavailable),
        5 => CopyFault::Io(side, CopyIoError::Volume(Error::NoSpace.into())),
        6 => CopyFault::Io(side, CopyIoError::Volume(Error::Fenced.into())),
        _ => return CopyOutcome::Done,
    };
    CopyOutcome::Failed { segment, fault, on_this_unit: what & 8 != 0 }
}

fn check_reply(reply: &Reply, cdb: &[u8; 16], window: TransferLengths) {
    let len = reply.data.len() as u64;
    assert!(len <= window.data_in && len <= reply.full_transfer.data_in);
    if let Some(allocation) = allocation_length(cdb) {
        assert!(reply.full_transfer.data_in <= allocation, "{cdb:x?}");
    }
    if reply.status != Status::Good || cdb[0] != 0x83 {
        assert_eq!(reply.status == Status::CheckCondition, !reply.sense.is_empty());
    }
    if reply.status == Status::Good {
        assert_eq!(len, reply.full_transfer.data_in.min(window.data_in), "{cdb:x?}");
    } else {
        assert_eq!(len, 0);
    }
    match reply.sense.as_slice() {
        [] => {}
        [format, rest @ ..] => {
            let additional = usize::from(rest[6]);
            assert_eq!(reply.sense.len(), 8 + additional);
            assert!(reply.sense.len() <= SENSE_MAX);
            assert!(matches!(format, 0x70 | 0xf0 | 0x72));
        }
    }
}

/// SPC-4 4.2.5.6, for the commands that have an allocation length.
fn allocation_length(cdb: &[u8; 16]) -> Option<u64> {
    let number = |at: usize, len: usize| {
        cdb[at..at + len].iter().fold(0, |sum, byte| sum << 8 | u64::from(*byte))
    };
    match cdb[0] {
        0x03 | 0x1a => Some(number(4, 1)),
        0x12 | 0x1c => Some(number(3, 2)),
        0x37 | 0x4d | 0x5a => Some(number(7, 2)),
        0x84 | 0x9e => Some(number(10, 4)),
        0xa0 | 0xa3 | 0xb7 => Some(number(6, 4)),
        _ => None,
    }
}

fn access(byte: u8) -> Access {
    match byte % 3 {
        0 => Access::Optimized,
        1 => Access::Transitioning,
        _ => Access::Unavailable,
    }
}
