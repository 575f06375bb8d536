//! What the host sends: ICReq, CapsuleCmd, H2CData, H2CTermReq.

use std::time::Duration;

use super::commands::{Command, Stage};
use super::fatal::End;
use super::{Action, Connection, IN_CAPSULE_BYTES, Phase, Tag};
use crate::entry::{Completion, Direction, FabricsType, Sqe, Transfer};
use crate::pdu::{
    CapsuleCmd, Common, Data, FLAG_LAST, FatalError, IcReq, MAX_HPDA, PFV_1_0, PduType, TermReq,
};
use crate::status::Status;
use crate::stream::{Digests, Incoming, Payload, Received, Violation, at};

impl Connection {
    /// The first `n` bytes of the receive space have been filled.
    pub(super) fn advance(&mut self, n: usize) {
        let result = match self.receiver.advance(n, self.now, &mut self.commands) {
            Received::Part | Received::Data(None) => return,
            Received::Common(common) => self.common(common),
            Received::Header(common) => self.header(common),
            Received::Data(Some(tag)) => return self.payload_complete(tag),
        };
        if let Err(violation) = result {
            self.violated(violation);
        }
    }

    fn payload_complete(&mut self, tag: Tag) {
        let Some(c) = self.commands.get_mut(tag) else { return };
        if c.data.filled >= c.host_bytes {
            self.data_complete(tag);
        }
    }

    /// The common header has come: which PDU is it, and how long is its header?
    fn common(&mut self, common: Common) -> Result<(), Violation> {
        let kind = common.kind();
        let digests = Some(self.sender.digests);
        let (hlen, digests) = match kind {
            PduType::IcReq => (size_of::<IcReq>(), None),
            PduType::H2CTermReq => (size_of::<TermReq>(), None),
            PduType::CapsuleCmd => (size_of::<CapsuleCmd>(), digests),
            PduType::H2CData => (size_of::<Data>(), digests),
            _ => return Err(Violation::field(at::PDU_TYPE)),
        };
        let initializing = self.phase == Phase::Initializing;
        if kind != PduType::H2CTermReq && initializing != (kind == PduType::IcReq) {
            return Err(Violation::sequence());
        }
        self.receiver.expect(common, hlen, digests)
    }

    /// The whole header has come, with its digest.
    fn header(&mut self, common: Common) -> Result<(), Violation> {
        match common.kind() {
            PduType::IcReq => return self.ic_req(common),
            PduType::H2CTermReq => return self.host_terminates(common),
            _ => {}
        }
        let payload = self.receiver.checked(common, self.sender.digests)?;
        if common.kind() == PduType::CapsuleCmd {
            self.capsule(payload)
        } else {
            self.h2c_data(common, payload)
        }
    }

    fn ic_req(&mut self, common: Common) -> Result<(), Violation> {
        let req: IcReq = self.receiver.pdu();
        if common.plen.get() as usize != size_of::<IcReq>() {
            return Err(Violation::field(at::PLEN));
        }
        if req.pfv.get() != PFV_1_0 {
            let error = FatalError::UnsupportedParameter;
            return Err(Violation { error, information: at::PFV });
        }
        if req.hpda > MAX_HPDA {
            return Err(Violation::field(at::ALIGNMENT));
        }
        let digests = Digests::from_bits(req.digest);
        self.send_ic_resp(digests.bits());
        self.sender.digests = digests;
        self.sender.alignment = (usize::from(req.hpda) + 1) * 4;
        self.phase = Phase::Connecting;
        self.receiver.next_pdu();
        Ok(())
    }

    fn host_terminates(&mut self, common: Common) -> Result<(), Violation> {
        if common.plen.get() > TermReq::MAX_BYTES {
            return Err(Violation::field(at::PLEN));
        }
        let error = FatalError(self.receiver.pdu::<TermReq>().status.get());
        self.finish(End::HostTerminated { error });
        Ok(())
    }

    fn capsule(&mut self, payload: Option<Payload>) -> Result<(), Violation> {
        let sqe = self.receiver.pdu::<CapsuleCmd>().sqe;
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
            self.receiver.start(payload, None, self.now);
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
        self.receiver.wait(payload, tag);
        Ok(())
    }

    /// What the transport itself demands of a command that brings `length` bytes in its capsule.
    fn acceptable(&self, sqe: &Sqe, length: u32) -> Result<(), Status> {
        let connects = sqe.fabrics() == Some(FabricsType::Connect);
        if connects != (self.phase == Phase::Connecting) {
            // NVMe Base 2.0, 6.3: Connect first, and only once.
            return Err(Status::COMMAND_SEQUENCE.do_not_retry());
        }
        if self.commands.has(sqe.cid.get()) {
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
        let pdu: Data = self.receiver.pdu();
        let tag = Tag(pdu.transfer_tag.get());
        let asked = |c: &&mut Command| c.stage == Stage::Receiving && !c.in_capsule;
        let command = self.commands.get_mut(tag).filter(asked);
        let command = command.ok_or(Violation::field(Data::TRANSFER_TAG_AT))?;
        if command.cid != pdu.command_id.get() {
            return Err(Violation::field(Data::COMMAND_ID_AT));
        }
        let length = pdu.agreed_length(payload)?;
        if length > self.config.max_h2c_data {
            return Err(Violation::limit());
        }
        let offset = pdu.offset.get();
        let left = command.host_bytes.saturating_sub(command.data.filled);
        if offset != command.data.filled || length > left {
            return Err(Violation::out_of_range());
        }
        if common.has(FLAG_LAST) && length < left {
            // The last of this transfer, and the transfer is not over.
            return Err(Violation::sequence());
        }
        self.receiver.start(payload, Some(tag), self.now);
        Ok(())
    }
}
