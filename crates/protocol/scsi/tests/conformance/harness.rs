//! A test bench for a unit: a volume in memory below it, initiators above it.

use block::{
    Account, Blocks, BufferPool, Bufs, Error, Info, Lba, MemoryClass, Request, RequestError,
};
use reservation::{Change, Initiator, ItNexus, ReservationError, Table};
use scsi::{
    Admission, AdmittedCommand, CopyFault, CopyOutcome, CopyPlan, CopySegment, CscdTarget, DataIn,
    LogicalUnit, Lun, Nexus, NexusId, PresentedToken, ReceivedCommand, Reply, RodToken,
    SharedUnitState, Side, Status, Step, TargetPort, TokenFault, TokenPlan, TokenRequest,
    TokenResult, TransferLengths, UnitConfig,
};

pub(crate) const BLOCK: u64 = 512;
pub(crate) const BLOCKS: u64 = 1000;
pub(crate) const MAX_TRANSFER: u32 = 64;

pub(crate) fn info() -> Info {
    Info {
        block_size: BLOCK as u32,
        blocks: BLOCKS,
        metadata_blocks: 0,
        physical_block_size: 4096,
        max_transfer_blocks: MAX_TRANSFER,
        unmap_granularity_blocks: 8,
        unmap_zeroes: true,
        volatile_cache: true,
        native_fua: false,
        read_only: false,
        overhead_bytes: 0,
    }
}

pub(crate) fn config() -> UnitConfig {
    UnitConfig {
        uuid: *b"\x0f\x1e\x2d\x3c\x4b\x5a\x46\x97\x88\x79\x6a\x5b\x4c\x3d\x2e\x1f",
        product: "Volume".into(),
        revision: "0.1".into(),
        serial: "WR-0001".into(),
        read_only: false,
        thin: true,
        solid_state: true,
        max_transfer_blocks: 1 << 20,
        keeps_reservations: true,
    }
}

/// The nexus in the reservation table.
pub(crate) fn it_nexus(n: u32) -> ItNexus {
    let [_, _, isid @ ..] = u64::from(n).to_be_bytes();
    let name = "iqn.2025-01.example:host".to_owned();
    ItNexus { initiator: Initiator::Iscsi { name, isid }, port: 1 }
}

pub(crate) fn nexus(n: u32) -> Nexus {
    let target_port = TargetPort {
        device: "iqn.2025-01.example:disk".into(),
        name: "iqn.2025-01.example:disk,t,0x0001".into(),
        relative_id: 1,
    };
    Nexus { initiator_port: format!("iqn.2025-01.example:host,i,{n:#x}"), target_port }
}

/// A summary of a request, without its data.
pub(crate) fn describe_request(request: &Request) -> String {
    let span = |r: &Blocks| format!("{}+{}", r.at, r.count);
    let blocks = |at: &Lba, data: &Bufs| format!("{at}+{}", data.len() as u64 / BLOCK);
    let flag = |set: bool, name: &'static str| if set { name } else { "" };
    match request {
        Request::Read { range } => format!("read {}", span(range)),
        Request::Write { at, data, fua } => {
            format!("write {}{}", blocks(at, data), flag(*fua, " fua"))
        }
        Request::WriteSame { range, fua, .. } => {
            format!("same {}{}", span(range), flag(*fua, " fua"))
        }
        Request::Zero { range, unmap, fua } => {
            format!("zero {}{}{}", span(range), flag(*unmap, " unmap"), flag(*fua, " fua"))
        }
        Request::Unmap { ranges } => {
            format!("unmap {}", ranges.iter().map(span).collect::<Vec<_>>().join(","))
        }
        Request::Compare { at, data } => format!("compare {}", blocks(at, data)),
        Request::Verify { range } => format!("verify {}", span(range)),
        Request::CompareAndWrite { at, compare, fua, .. } => {
            format!("cas {}{}", blocks(at, compare), flag(*fua, " fua"))
        }
        Request::OrWrite { at, data, fua } => {
            format!("or {}{}", blocks(at, data), flag(*fua, " fua"))
        }
        Request::BlockStatus { range, max_runs: most } => {
            format!("map {} most {most}", span(range))
        }
        Request::DrainWrites { ranges } => {
            format!("settle {}", ranges.iter().map(span).collect::<Vec<_>>().join(","))
        }
        Request::Flush => "flush".into(),
    }
}

/// A summary of a reply: status or sense data.
pub(crate) fn describe_reply(reply: &Reply) -> String {
    match reply.status {
        Status::CheckCondition => match reply.sense[0] & 0x7f {
            0x70 => {
                format!("{:02x}/{:02x}/{:02x}", reply.sense[2], reply.sense[12], reply.sense[13])
            }
            _ => format!("{:02x}/{:02x}/{:02x}", reply.sense[1], reply.sense[2], reply.sense[3]),
        },
        other => format!("{other:?}"),
    }
}

/// The field pointer of sense data in fixed format: in the CDB?, byte, bit.
pub(crate) fn pointer(reply: &Reply) -> Option<(bool, u16, Option<u8>)> {
    let &[flags, high, low] = reply.sense.get(15..18)? else { return None };
    (flags & 0x80 != 0).then(|| {
        let bit = (flags & 0x08 != 0).then_some(flags & 7);
        (flags & 0x40 != 0, u16::from_be_bytes([high, low]), bit)
    })
}

/// The information field of sense data in fixed format.
pub(crate) fn information(reply: &Reply) -> Option<u32> {
    let field: [u8; 4] = reply.sense[3..7].try_into().expect("four bytes");
    (reply.sense[0] & 0x80 != 0).then(|| u32::from_be_bytes(field))
}

pub(crate) fn data(reply: &Reply) -> Vec<u8> {
    match &reply.data {
        DataIn::None => Vec::new(),
        DataIn::Bytes(b) => b.clone(),
        DataIn::Bufs(b) => b.to_vec(),
    }
}

pub(crate) struct Harness {
    pub(crate) unit: LogicalUnit,
    pub(crate) contents: Vec<u8>,
    /// Shapes of the requests that reached the volume.
    pub(crate) log: Vec<String>,
    /// An error that the volume returns instead of executing requests.
    pub(crate) fail: Option<RequestError>,
    /// How the next copy ends, without anything copied.
    pub(crate) copies: Option<CopyOutcome>,
    /// The result of the next transfer by token, and the bytes done by then.
    pub(crate) tokened: Option<TokenResult>,
    pub(crate) wrote: u64,
    /// Tokens, and their data.
    tokens: Vec<(RodToken, Vec<u8>)>,
    pub(crate) luns: Vec<Lun>,
    /// The shared state.
    pub(crate) table: Table,
    /// Who the initiators are.
    parties: Vec<(NexusId, ItNexus)>,
    account: Account,
}

impl Harness {
    /// A bench and an initiator that has received the power-on attention.
    pub(crate) fn new() -> (Self, NexusId) {
        Self::with(config(), info())
    }

    pub(crate) fn with(config: UnitConfig, info: Info) -> (Self, NexusId) {
        let mut bench = Self {
            unit: LogicalUnit::new(config, info),
            contents: vec![0; (info.blocks.min(BLOCKS) * u64::from(info.block_size)) as usize],
            log: Vec::new(),
            fail: None,
            copies: None,
            tokened: None,
            wrote: 0,
            tokens: Vec::new(),
            luns: vec![Lun::new(0).expect("a small number")],
            table: Table::default(),
            parties: Vec::new(),
            account: BufferPool::new(8 << 20).expect("a small pool").account(),
        };
        let id = bench.join(1);
        (bench, id)
    }

    /// One more initiator, which has received the power-on attention.
    pub(crate) fn join(&mut self, n: u32) -> NexusId {
        let id = self.join_with_attention(n);
        assert_eq!(describe_reply(&self.data_in(id, &[0; 6])), "06/29/00");
        id
    }

    /// One more initiator, with its power-on attention pending.
    pub(crate) fn join_with_attention(&mut self, n: u32) -> NexusId {
        let id = self.unit.add_nexus(nexus(n)).expect("there is room");
        self.parties.push((id, it_nexus(n)));
        id
    }

    /// An initiator is lost.
    pub(crate) fn leave(&mut self, id: NexusId) {
        self.unit.remove_nexus(id);
        self.change_shared(id, &Change::NexusLoss).expect("no nexus can be kept from that");
    }

    fn party(&self, id: NexusId) -> ItNexus {
        let found = self.parties.iter().find(|(other, _)| *other == id);
        found.map_or(ItNexus::ADMINISTRATOR, |(_, party)| party.clone())
    }

    pub(crate) fn shared_state(&self, id: NexusId) -> SharedUnitState {
        SharedUnitState {
            rights: self.table.rights(&self.party(id)),
            mode_pages: self.table.mode_pages,
        }
    }

    /// Changes the shared state as a volume does; an aborting initiator gets no notification.
    pub(crate) fn change_shared(
        &mut self,
        by: NexusId,
        change: &Change,
    ) -> Result<(), ReservationError> {
        let Some(next) = self.table.with_change(&self.party(by), 1, change)? else { return Ok(()) };
        for (id, party) in &self.parties {
            self.unit.notify(*id, Table::notifications(&self.table, &next, party));
        }
        self.table = next;
        Ok(())
    }

    pub(crate) fn bufs(&self, bytes: &[u8]) -> Bufs {
        let credit =
            self.account.try_credit(bytes.len(), MemoryClass::LocalIo).expect("a free pool");
        rt::buf::copy_in(&credit, bytes)
    }

    pub(crate) fn arrive(&mut self, id: NexusId, cdb: &[u8], window: TransferLengths) -> Admission {
        let known = self.shared_state(id);
        self.unit.admit(
            id,
            &ReceivedCommand { cdb, expected_transfer: window, luns: &self.luns, shared: known },
        )
    }

    /// A command without data from the initiator, which accepts any returned data.
    pub(crate) fn data_in(&mut self, id: NexusId, cdb: &[u8]) -> Reply {
        self.run(id, cdb, TransferLengths::to_initiator(1 << 32), &[])
    }

    /// A command that brings data.
    pub(crate) fn data_out(&mut self, id: NexusId, cdb: &[u8], out: &[u8]) -> Reply {
        self.run(id, cdb, TransferLengths::from_initiator(out.len() as u64), out)
    }

    pub(crate) fn run(
        &mut self,
        id: NexusId,
        cdb: &[u8],
        window: TransferLengths,
        out: &[u8],
    ) -> Reply {
        match self.arrive(id, cdb, window) {
            Admission::Reply(reply) => reply,
            Admission::Accept(command) => self.finish(id, command, out),
        }
    }

    pub(crate) fn finish(&mut self, id: NexusId, command: AdmittedCommand, out: &[u8]) -> Reply {
        let data = self.bufs(&out[..command.data_out()]);
        let mut step = self.unit.start(id, command, data);
        loop {
            match step {
                Step::Reply(reply) => return reply,
                Step::Run(request, running) => {
                    self.log.push(describe_request(&request));
                    let result = self.execute(request);
                    step = self.unit.finish(running, result);
                }
                Step::ChangeShared(change, running) => {
                    step = match self.change_shared(id, &change) {
                        Ok(()) => self.unit.finish(running, Ok(Bufs::new())),
                        Err(why) => self.unit.finish_refused_change(running, why),
                    };
                }
                Step::ReadShared(running) => {
                    step = self.unit.finish_shared_read(running, &self.table);
                }
                Step::Token(plan, running) => {
                    let outcome =
                        self.tokened.take().inspect(|_| plan.record_written(0, self.wrote));
                    let outcome = outcome.unwrap_or_else(|| self.token(&plan));
                    return self.unit.finish_token(running, outcome);
                }
                Step::Copy(plan, running) => {
                    let outcome = self.copies.take().unwrap_or_else(|| self.copy(&plan));
                    return self.unit.finish_copy(running, outcome);
                }
            }
        }
    }

    /// Makes and uses tokens of the one unit that there is.
    fn token(&mut self, plan: &TokenPlan) -> TokenResult {
        let span = |r: &Blocks| (r.at.0 * BLOCK) as usize..((r.at.0 + r.count) * BLOCK) as usize;
        match plan.request() {
            TokenRequest::Populate { ranges, .. } => {
                let data: Vec<u8> =
                    ranges.iter().flat_map(|r| self.contents[span(r)].to_vec()).collect();
                let random = [self.tokens.len() as u64; 5];
                let token = RodToken::new(&config().uuid, data.len() as u64, BLOCK as u32, random);
                self.tokens.push((token.clone(), data));
                TokenResult::Created(token)
            }
            TokenRequest::Write { token, offset, ranges, .. } => {
                let known = |token| self.tokens.iter().find(|(known, _)| known == token);
                let data = match token {
                    PresentedToken::Zeroes => vec![0; self.contents.len()],
                    PresentedToken::Data(token) => match known(token) {
                        Some((_, data)) => data.clone(),
                        None => return TokenResult::Invalid(TokenFault::Unknown),
                    },
                };
                let mut from = (offset * BLOCK) as usize;
                for range in ranges {
                    let to = span(range);
                    let next = from + to.len();
                    plan.record_written((from as u64) - offset * BLOCK, to.len() as u64);
                    self.contents[to].copy_from_slice(&data[from..next]);
                    from = next;
                }
                TokenResult::Written
            }
        }
    }

    /// Copies within the one unit that there is.
    fn copy(&mut self, plan: &CopyPlan) -> CopyOutcome {
        for (n, segment) in (0..).zip(plan.segments()) {
            plan.begin_segment(segment);
            if let Err(fault) = self.copy_segment(plan, segment) {
                return CopyOutcome::Failed { segment: n, fault, on_this_unit: true };
            }
        }
        CopyOutcome::Done
    }

    fn copy_segment(&mut self, plan: &CopyPlan, segment: &CopySegment) -> Result<(), CopyFault> {
        for side in [Side::Source, Side::Destination] {
            match plan.cscd(segment, side) {
                Some(CscdTarget::ThisUnit) => {}
                Some(CscdTarget::Named(end)) if !end.identifies(&config().uuid) => {
                    return Err(CopyFault::Unreachable(side));
                }
                Some(CscdTarget::Named(end)) if !end.matches_block_size(BLOCK as u32) => {
                    return Err(CopyFault::Mismatch(side));
                }
                Some(CscdTarget::Named(_)) => {}
                None => return Err(CopyFault::Unreachable(side)),
            }
        }
        let extent = segment.range(&info(), &info())?;
        self.log.push(format!("copy {}+{} to {}", extent.from, extent.bytes / BLOCK, extent.to));
        let from = (extent.from.0 * BLOCK) as usize;
        let bytes = self.contents[from..from + extent.bytes as usize].to_vec();
        self.put(extent.to, &bytes).expect("the extent fits");
        plan.set_segment_size(extent.bytes, BLOCK as u32);
        plan.record_written(0, extent.bytes);
        plan.record_command();
        Ok(())
    }

    /// The contents of the log, which is emptied.
    pub(crate) fn take_requests(&mut self) -> Vec<String> {
        std::mem::take(&mut self.log)
    }

    fn execute(&mut self, request: Request) -> Result<Bufs, RequestError> {
        if let Some(failure) = self.fail.take() {
            return Err(failure);
        }
        match request {
            Request::Read { range } => return Ok(self.bufs(self.slice(range)?)),
            Request::Write { at, data, .. } => self.put(at, &data.to_vec())?,
            Request::WriteSame { range, pattern, .. } => {
                self.put(range.at, &pattern.to_vec().repeat(range.count as usize))?;
            }
            Request::Zero { range, .. } => self.zero(range),
            Request::Unmap { ranges } => {
                ranges.into_iter().for_each(|range| self.zero(range));
            }
            Request::Compare { at, data } => self.compare(at, &data.to_vec())?,
            Request::Verify { range } => drop(self.slice(range)?),
            Request::CompareAndWrite { at, compare, write, .. } => {
                self.compare(at, &compare.to_vec())?;
                self.put(at, &write.to_vec())?;
            }
            Request::OrWrite { at, data, .. } => {
                let here = self.slice(Blocks::new(at, data.len() as u64 / BLOCK))?;
                let both: Vec<u8> = here.iter().zip(data.to_vec()).map(|(a, b)| a | b).collect();
                self.put(at, &both)?;
            }
            Request::BlockStatus { range, max_runs: most } => {
                let runs = self.map(range, most);
                return Ok(self.bufs(&runs));
            }
            Request::DrainWrites { .. } | Request::Flush => {}
        }
        Ok(Bufs::new())
    }

    /// Eight blocks in a row that are zeroes have no space, at an address that is a multiple of
    /// that.
    fn map(&self, range: Blocks, most: u16) -> Vec<u8> {
        let end = (range.at.0 + range.count).min(BLOCKS);
        let mut runs: Vec<(u32, u8)> = Vec::new();
        for at in range.at.0..end {
            let page = at / 8 * 8 * BLOCK;
            let page = &self.contents[page as usize..][..(8 * BLOCK) as usize];
            let mapped = u8::from(page.iter().any(|byte| *byte != 0));
            let full = runs.len() == usize::from(most);
            match runs.last_mut() {
                Some(last) if last.1 == mapped => last.0 += 1,
                _ if full => break,
                _ => runs.push((1, mapped)),
            }
        }
        let bytes = |&(count, mapped): &(u32, u8)| -> Vec<u8> {
            [&count.to_be_bytes()[..], &[mapped, 0, 0, 0]].concat()
        };
        runs.iter().flat_map(bytes).collect()
    }

    fn slice(&self, range: Blocks) -> Result<&[u8], RequestError> {
        let from = (range.at.0 * BLOCK) as usize;
        self.contents
            .get(from..from + (range.count * BLOCK) as usize)
            .ok_or(RequestError::Device(Error::OutOfRange))
    }

    fn put(&mut self, at: Lba, bytes: &[u8]) -> Result<(), RequestError> {
        let from = (at.0 * BLOCK) as usize;
        self.contents
            .get_mut(from..from + bytes.len())
            .ok_or(RequestError::Device(Error::OutOfRange))?
            .copy_from_slice(bytes);
        Ok(())
    }

    /// Of a device that is larger than the contents kept, only these.
    fn zero(&mut self, range: Blocks) {
        let end = (self.contents.len() as u64).min((range.at.0 + range.count) * BLOCK);
        let from = end.min(range.at.0 * BLOCK);
        self.contents[from as usize..end as usize].fill(0);
    }

    fn compare(&self, at: Lba, bytes: &[u8]) -> Result<(), RequestError> {
        let here = self.slice(Blocks::new(at, bytes.len() as u64 / BLOCK))?;
        match here.iter().zip(bytes).position(|(a, b)| a != b) {
            Some(offset) => Err(RequestError::Miscompare { offset: offset as u64 }),
            None => Ok(()),
        }
    }
}

/// A command on blocks in each length that it has: opcode, flags, address, count.
pub(crate) fn cdb(opcode: u8, flags: u8, at: u64, count: u32) -> Vec<u8> {
    let mut cdb = vec![opcode, flags];
    match opcode >> 5 {
        0 => {
            cdb[1] |= (at >> 16) as u8 & 0x1f;
            cdb.extend([(at >> 8) as u8, at as u8, count as u8, 0]);
        }
        1 | 2 => {
            cdb.extend((at as u32).to_be_bytes());
            cdb.push(0);
            cdb.extend((count as u16).to_be_bytes());
            cdb.push(0);
        }
        5 => {
            cdb.extend((at as u32).to_be_bytes());
            cdb.extend(count.to_be_bytes());
            cdb.extend([0, 0]);
        }
        _ => {
            cdb.extend(at.to_be_bytes());
            cdb.extend(count.to_be_bytes());
            cdb.extend([0, 0]);
        }
    }
    cdb
}

/// Blocks of the byte `fill`.
pub(crate) fn blocks(count: u32, fill: u8) -> Vec<u8> {
    vec![fill; count as usize * BLOCK as usize]
}
