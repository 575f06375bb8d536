//! What the host sends: ICReq, CapsuleCmd, H2CData, H2CTermReq.

use std::time::Duration;

use zerocopy::FromBytes;

use super::commands::{Command, Commands, Incoming, Stage};
use super::fatal::{End, Violation};
use super::{Action, Connection, IN_CAPSULE_BYTES, Phase, Tag};
use crate::entry::{Completion, Direction, FabricsType, Sqe, Transfer};
use crate::pdu::{
    COMMON_BYTES, CapsuleCmd, Common, DIGEST_BYTES, DIGEST_DATA, DIGEST_HEADER, Data, FLAG_DDGST,
    FLAG_HDGST, FLAG_LAST, FatalError, IcReq, MAX_HEADER_BYTES, MAX_HPDA, PFV_1_0, PduType,
    TermReq,
};
use crate::status::Status;

/// Byte offsets of the common header's fields, for FEI.
mod at {
    pub(super) const PDU_TYPE: u32 = 0;
    pub(super) const FLAGS: u32 = 1;
    pub(super) const HLEN: u32 = 2;
    pub(super) const PDO: u32 = 3;
    pub(super) const PLEN: u32 = 4;
    /// PFV of ICReq.
    pub(super) const PFV: u32 = 8;
    /// HPDA of ICReq.
    pub(super) const HPDA: u32 = 10;
}

const SCRATCH_BYTES: usize = 256;
const _: () = assert!(SCRATCH_BYTES >= MAX_HEADER_BYTES + DIGEST_BYTES);

/// Where reception stands within the byte stream.
#[derive(Debug)]
pub(super) struct Receiver {
    state: State,
    /// The header being received; also a place to throw bytes away.
    scratch: [u8; SCRATCH_BYTES],
    /// Valid bytes of a header at the start of `scratch`.
    header: usize,
    /// When the host began to send what it has not finished.
    since: Option<Duration>,
}

#[derive(Clone, Copy, Debug)]
enum State {
    /// `have` bytes of a header of `need` bytes are in the scratch space.
    Header {
        have: usize,
        need: usize,
    },
    /// In-capsule data waits for its command's admission and memory.
    Waiting(Payload),
    /// Bytes up to PDO are skipped.
    Padding(Payload),
    Data(Payload),
    /// `have` bytes of the data digest are in the scratch space.
    Digest {
        have: usize,
        payload: Payload,
    },
}

/// Data of the PDU being received.
#[derive(Clone, Copy, Debug)]
struct Payload {
    /// Whose data; `None`: thrown away.
    tag: Option<Tag>,
    padding: usize,
    length: u32,
    /// Bytes of it still to come.
    left: usize,
    digest: bool,
}

const NEXT_PDU: State = State::Header { have: 0, need: COMMON_BYTES };

impl Default for Receiver {
    fn default() -> Self {
        Self { state: NEXT_PDU, scratch: [0; SCRATCH_BYTES], header: 0, since: None }
    }
}

impl Receiver {
    /// Where the next bytes go.
    pub(super) fn space<'a>(&'a mut self, commands: &'a mut Commands) -> Option<&'a mut [u8]> {
        match &self.state {
            State::Header { have, need } => Some(&mut self.scratch[*have..*need]),
            State::Waiting(_) => None,
            State::Padding(p) => Some(&mut self.scratch[..p.padding.min(SCRATCH_BYTES)]),
            State::Digest { have, .. } => Some(&mut self.scratch[*have..DIGEST_BYTES]),
            State::Data(p) => {
                let sink = &mut self.scratch[..p.left.min(SCRATCH_BYTES)];
                let command = p.tag.and_then(|tag| commands.get_mut(tag));
                Some(command.and_then(|c| c.data.space(p.left)).unwrap_or(sink))
            }
        }
    }

    /// A place for bytes that nobody wants.
    pub(super) fn sink(&mut self) -> &mut [u8] {
        &mut self.scratch
    }

    /// The header received last, or as much of it as has come.
    pub(super) fn header(&self) -> &[u8] {
        &self.scratch[..self.header.min(MAX_HEADER_BYTES)]
    }

    /// Since when the host owes the rest of a PDU.
    pub(super) fn since(&self) -> Option<Duration> {
        self.since
    }

    /// The memory for the data of `tag` is there.
    pub(super) fn resume(&mut self, tag: Tag, now: Duration) {
        if let State::Waiting(p) = self.state
            && p.tag == Some(tag)
        {
            self.start(p, now);
        }
    }

    /// Nobody wants the in-capsule data of `tag` any more.
    pub(super) fn drop_waiting(&mut self, tag: Tag, now: Duration) {
        match &mut self.state {
            State::Waiting(p) if p.tag == Some(tag) => {
                let p = Payload { tag: None, ..*p };
                self.start(p, now);
            }
            State::Padding(p) | State::Data(p) | State::Digest { payload: p, .. }
                if p.tag == Some(tag) =>
            {
                p.tag = None;
            }
            _ => {}
        }
    }

    fn start(&mut self, payload: Payload, now: Duration) {
        self.since = Some(now);
        self.state =
            if payload.padding > 0 { State::Padding(payload) } else { State::Data(payload) };
    }

    fn next_pdu(&mut self) {
        self.since = None;
        self.state = NEXT_PDU;
    }
}

impl Connection {
    /// The first `n` bytes of the receive space have been filled.
    pub(super) fn advance(&mut self, n: usize) {
        match &mut self.receiver.state {
            State::Header { have, need } => {
                *have += n;
                let (have, need) = (*have, *need);
                self.receiver.header = have;
                self.receiver.since.get_or_insert(self.now);
                if have == need {
                    let result = if need == COMMON_BYTES { self.common() } else { self.header() };
                    if let Err(violation) = result {
                        self.violated(violation);
                    }
                }
            }
            State::Waiting(_) => {}
            State::Padding(p) => {
                p.padding = p.padding.saturating_sub(n);
                if p.padding == 0 {
                    self.receiver.state = State::Data(*p);
                }
            }
            State::Data(p) => {
                p.left = p.left.saturating_sub(n);
                let p = *p;
                if let Some(c) = p.tag.and_then(|tag| self.commands.get_mut(tag)) {
                    c.data.advance(n);
                }
                if p.left == 0 && p.digest {
                    self.receiver.state = State::Digest { have: 0, payload: p };
                } else if p.left == 0 {
                    self.payload_complete(p);
                }
            }
            State::Digest { have, payload } => {
                *have += n;
                if *have == DIGEST_BYTES {
                    let p = *payload;
                    self.check_data_digest(p);
                    self.payload_complete(p);
                }
            }
        }
    }

    fn check_data_digest(&mut self, payload: Payload) {
        let received = first_u32(&self.receiver.scratch);
        if let Some(c) = payload.tag.and_then(|tag| self.commands.get_mut(tag)) {
            let wrong = |crc| crc != received;
            c.data.corrupt |= c.data.checksum_of_last(payload.length).is_some_and(wrong);
        }
    }

    fn payload_complete(&mut self, payload: Payload) {
        self.receiver.next_pdu();
        let Some(tag) = payload.tag else { return };
        let Some(c) = self.commands.get_mut(tag) else { return };
        if c.data.filled >= c.host_bytes {
            self.data_complete(tag);
        }
    }

    /// The common header has come: which PDU is it, and how long is its header?
    fn common(&mut self) -> Result<(), Violation> {
        let common = self.read_common();
        let kind = common.kind();
        let (hlen, digests) = match kind {
            PduType::IcReq => (size_of::<IcReq>(), false),
            PduType::H2CTermReq => (size_of::<TermReq>(), false),
            PduType::CapsuleCmd => (size_of::<CapsuleCmd>(), true),
            PduType::H2CData => (size_of::<Data>(), true),
            _ => return Err(Violation::field(at::PDU_TYPE)),
        };
        let initializing = self.phase == Phase::Initializing;
        if kind != PduType::H2CTermReq && initializing != (kind == PduType::IcReq) {
            return Err(Violation::sequence());
        }
        if usize::from(common.hlen) != hlen {
            return Err(Violation::field(at::HLEN));
        }
        if digests && common.has(FLAG_HDGST) != self.header_digest {
            return Err(Violation::field(at::FLAGS));
        }
        let need = hlen + if digests && self.header_digest { DIGEST_BYTES } else { 0 };
        if (common.plen.get() as usize) < need {
            return Err(Violation::field(at::PLEN));
        }
        self.receiver.state = State::Header { have: COMMON_BYTES, need };
        Ok(())
    }

    /// The whole header has come, with its digest.
    fn header(&mut self) -> Result<(), Violation> {
        let common = self.read_common();
        let hlen = usize::from(common.hlen);
        if common.kind() == PduType::IcReq {
            return self.ic_req(common);
        }
        if common.kind() == PduType::H2CTermReq {
            return self.host_terminates(common);
        }
        if self.header_digest {
            self.receiver.header = hlen;
            let (header, rest) = self.receiver.scratch.split_at(hlen);
            let digest = first_u32(rest);
            if wire::crc32c(header) != digest {
                let error = FatalError::HeaderDigest;
                return Err(Violation { error, information: digest });
            }
        }
        let payload = self.payload(common, self.receiver.header_need())?;
        if common.kind() == PduType::CapsuleCmd {
            self.capsule(payload)
        } else {
            self.h2c_data(common, payload)
        }
    }

    fn read_common(&self) -> Common {
        let read = Common::read_from_prefix(&self.receiver.scratch);
        read.map(|(c, _)| c).expect("the scratch space is longer than any header")
    }

    /// Where the data of a PDU lies, behind `need` bytes of header; `None` without data.
    fn payload(&self, common: Common, need: usize) -> Result<Option<Payload>, Violation> {
        let plen = common.plen.get() as usize;
        if plen == need {
            return Ok(None);
        }
        if common.has(FLAG_DDGST) != self.data_digest {
            return Err(Violation::field(at::FLAGS));
        }
        let offset = usize::from(common.pdo);
        if offset < need || !offset.is_multiple_of(4) {
            return Err(Violation::field(at::PDO));
        }
        let trailer = if self.data_digest { DIGEST_BYTES } else { 0 };
        let left = plen.checked_sub(offset + trailer).filter(|&l| l > 0);
        let left = left.ok_or(Violation::field(at::PLEN))?;
        let length = u32::try_from(left).map_err(|_| Violation::field(at::PLEN))?;
        let padding = offset - need;
        Ok(Some(Payload { tag: None, padding, length, left, digest: self.data_digest }))
    }

    /// Receives the data of a PDU, if it has any; `None` as its tag throws it away.
    fn receive(&mut self, payload: Option<Payload>, tag: Option<Tag>) {
        match payload {
            None => self.receiver.next_pdu(),
            Some(p) => self.receiver.start(Payload { tag, ..p }, self.now),
        }
    }

    fn ic_req(&mut self, common: Common) -> Result<(), Violation> {
        let req = IcReq::read_from_prefix(&self.receiver.scratch);
        let (req, _) = req.expect("the scratch space is longer than any header");
        if common.plen.get() as usize != size_of::<IcReq>() {
            return Err(Violation::field(at::PLEN));
        }
        if req.pfv.get() != PFV_1_0 {
            let error = FatalError::UnsupportedParameter;
            return Err(Violation { error, information: at::PFV });
        }
        if req.hpda > MAX_HPDA {
            return Err(Violation::field(at::HPDA));
        }
        self.host_alignment = (usize::from(req.hpda) + 1) * 4;
        self.header_digest = req.digest & DIGEST_HEADER != 0;
        self.data_digest = req.digest & DIGEST_DATA != 0;
        self.send_ic_resp(req.digest & (DIGEST_HEADER | DIGEST_DATA));
        self.phase = Phase::Connecting;
        self.receiver.next_pdu();
        Ok(())
    }

    fn host_terminates(&mut self, common: Common) -> Result<(), Violation> {
        if common.plen.get() > TermReq::MAX_BYTES {
            return Err(Violation::field(at::PLEN));
        }
        let term = TermReq::read_from_prefix(&self.receiver.scratch);
        let error = term.map_or(FatalError(0), |(t, _)| FatalError(t.status.get()));
        self.finish(End::HostTerminated { error });
        Ok(())
    }

    fn capsule(&mut self, payload: Option<Payload>) -> Result<(), Violation> {
        let capsule = CapsuleCmd::read_from_prefix(&self.receiver.scratch);
        let sqe = capsule.expect("the scratch space is longer than any header").0.sqe;
        let length = payload.map_or(0, |p| p.length);
        if length > IN_CAPSULE_BYTES {
            return Err(Violation::field(at::PLEN));
        }
        if self.slots_taken() >= usize::from(self.queue.entries) {
            return Err(Violation::sequence());
        }
        let cid = sqe.cid.get();
        if let Err(status) = self.acceptable(&sqe, length) {
            self.respond(cid, Completion::failed(status));
            self.actions.push_back(Action::Refused { fuse: sqe.fuse(), status });
            self.receive(payload, None);
            return Ok(());
        }
        let direction = sqe.direction();
        let tag = self.commands.insert(Command {
            cid,
            stage: Stage::Arrived,
            to_host: direction == Direction::ToHost,
            in_capsule: length > 0,
            host_bytes: sqe.data_bytes(),
            since: Duration::ZERO,
            data: Incoming::default(),
            outcome: None,
        });
        self.actions.push_back(Action::Arrived { tag, sqe });
        self.receiver.since = None;
        self.receiver.state = match payload {
            Some(p) => State::Waiting(Payload { tag: Some(tag), ..p }),
            None => NEXT_PDU,
        };
        Ok(())
    }

    /// What the transport itself demands of a command that brings `length` bytes in its capsule.
    fn acceptable(&self, sqe: &Sqe, length: u32) -> Result<(), Status> {
        let connects = sqe.fabrics() == Some(FabricsType::Connect);
        if connects != (self.phase == Phase::Connecting) {
            // NVMe Base 2.0, 6.3: Connect first, and only once.
            return Err(Status::COMMAND_SEQUENCE.do_not_retry());
        }
        if self.commands.find(sqe.cid.get()).is_some() {
            return Err(Status::COMMAND_ID_CONFLICT.do_not_retry());
        }
        let direction = sqe.direction();
        if matches!(direction, Direction::None | Direction::Both) {
            return Ok(());
        }
        let in_capsule_ok = direction == Direction::ToController;
        let transfer = sqe.transfer().map_err(Status::do_not_retry)?;
        let refusal = match transfer {
            Transfer::InCapsule { .. } if !in_capsule_ok => Status::SGL_DESCRIPTOR_TYPE_INVALID,
            Transfer::InCapsule { offset, .. } if offset != 0 => Status::SGL_OFFSET_INVALID,
            Transfer::InCapsule { length: l, .. } if l != length => Status::DATA_SGL_LENGTH_INVALID,
            Transfer::Transport { .. } if length > 0 => Status::SGL_DESCRIPTOR_TYPE_INVALID,
            Transfer::InCapsule { .. } | Transfer::Transport { .. } => return Ok(()),
        };
        Err(refusal.do_not_retry())
    }

    fn h2c_data(&mut self, common: Common, payload: Option<Payload>) -> Result<(), Violation> {
        let pdu = Data::read_from_prefix(&self.receiver.scratch);
        let (pdu, _) = pdu.expect("the scratch space is longer than any header");
        let tag = Tag(pdu.transfer_tag.get());
        let asked = |c: &&mut Command| c.stage == Stage::Receiving && !c.in_capsule;
        let command = self.commands.get_mut(tag).filter(asked);
        let command = command.ok_or(Violation::field(Data::TRANSFER_TAG_AT))?;
        if command.cid != pdu.command_id.get() {
            return Err(Violation::field(Data::COMMAND_ID_AT));
        }
        let length = pdu.length.get();
        if payload.map_or(0, |p| p.length) != length || length == 0 {
            return Err(Violation::field(at::PLEN));
        }
        if length > self.config.max_h2c_data {
            return Err(Violation { error: FatalError::DataLimit, information: 0 });
        }
        let offset = pdu.offset.get();
        let left = command.host_bytes.saturating_sub(command.data.filled);
        if offset != command.data.filled || length > left {
            return Err(Violation { error: FatalError::DataOutOfRange, information: 0 });
        }
        if common.has(FLAG_LAST) && length < left {
            // The last of this transfer, and the transfer is not over.
            return Err(Violation::sequence());
        }
        self.receive(payload, Some(tag));
        Ok(())
    }
}

impl Receiver {
    /// Length of the header being received, with its digest.
    fn header_need(&self) -> usize {
        match self.state {
            State::Header { need, .. } => need,
            _ => self.header,
        }
    }
}

fn first_u32(bytes: &[u8]) -> u32 {
    bytes.first_chunk().map_or(0, |b| u32::from_le_bytes(*b))
}
