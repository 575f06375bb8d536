//! Receives the host's PDUs:

use std::time::Duration;

use super::close_reason::CloseReason;
use super::commands::{Command, CommandStage};
use super::{Action, Connection, IN_CAPSULE_BYTES, Phase, Tag};
use crate::entry::{Completion, DataLocation, Direction, FabricsType, Sqe};
use crate::pdu::{
    CapsuleCmd, CommonHeader, DataPdu, FLAG_LAST, FatalError, IcReq, MAX_HPDA, PFV_1_0, PduType,
    TermReq,
};
use crate::status::Status;
use crate::stream::{Digests, IncomingData, Payload, ReceiveEvent, Violation, at};

impl Connection {
    /// The first `n` bytes of the receive space have been filled.
    pub(super) fn advance(&mut self, n: usize) {
        let result = match self.receiver.advance(n, self.now, &mut self.commands) {
            ReceiveEvent::Incomplete | ReceiveEvent::Data(None) => return,
            ReceiveEvent::Common(common) => self.on_common_header(common),
            ReceiveEvent::Header(common) => self.on_header(common),
            ReceiveEvent::Data(Some(tag)) => return self.payload_complete(tag),
        };
        if let Err(violation) = result {
            self.terminate(violation);
        }
    }

    fn payload_complete(&mut self, tag: Tag) {
        let Some(c) = self.commands.get_mut(tag) else { return };
        if c.incoming.received >= c.host_bytes {
            self.data_complete(tag);
        }
    }

    /// The common header has arrived: determines the PDU and the length of its header.
    fn on_common_header(&mut self, common: CommonHeader) -> Result<(), Violation> {
        let kind = common.kind();
        let digests = Some(self.sender.digests);
        let (hlen, digests) = match kind {
            PduType::IcReq => (size_of::<IcReq>(), None),
            PduType::H2CTermReq => (size_of::<TermReq>(), None),
            PduType::CapsuleCmd => (size_of::<CapsuleCmd>(), digests),
            PduType::H2CData => (size_of::<DataPdu>(), digests),
            _ => return Err(Violation::field(at::PDU_TYPE)),
        };
        let initializing = self.phase == Phase::Initializing;
        if kind != PduType::H2CTermReq && initializing != (kind == PduType::IcReq) {
            return Err(Violation::sequence());
        }
        self.receiver.expect_header(common, hlen, digests)
    }

    /// The whole header has arrived, with its digest.
    fn on_header(&mut self, common: CommonHeader) -> Result<(), Violation> {
        match common.kind() {
            PduType::IcReq => return self.on_ic_req(common),
            PduType::H2CTermReq => return self.on_term_req(common),
            _ => {}
        }
        let payload = self.receiver.check_header(common, self.sender.digests)?;
        if common.kind() == PduType::CapsuleCmd {
            self.on_capsule(payload)
        } else {
            self.on_h2c_data(common, payload)
        }
    }

    fn on_ic_req(&mut self, common: CommonHeader) -> Result<(), Violation> {
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

    fn on_term_req(&mut self, common: CommonHeader) -> Result<(), Violation> {
        if common.plen.get() > TermReq::MAX_BYTES {
            return Err(Violation::field(at::PLEN));
        }
        let error = FatalError(self.receiver.pdu::<TermReq>().status.get());
        self.finish(CloseReason::HostTerminated { error });
        Ok(())
    }

    fn on_capsule(&mut self, payload: Option<Payload>) -> Result<(), Violation> {
        let sqe = self.receiver.pdu::<CapsuleCmd>().sqe;
        let length = payload.map_or(0, |p| p.length);
        if length > IN_CAPSULE_BYTES {
            return Err(Violation::field(at::PLEN));
        }
        if self.slots_taken() >= usize::from(self.queue.entries) {
            return Err(Violation::sequence());
        }
        let cid = sqe.cid.get();
        if let Err(status) = self.check_capsule(&sqe, length) {
            self.respond(cid, Completion::failed(status));
            self.actions.push_back(Action::CommandRefused { fuse: sqe.fuse(), status });
            self.receiver.start_payload(payload, None, self.now);
            return Ok(());
        }
        let direction = sqe.direction();
        let tag = self.commands.insert(Command {
            cid,
            stage: CommandStage::Arrived,
            to_host: direction == Direction::ToHost,
            in_capsule: length > 0,
            host_bytes: sqe.data_bytes(),
            r2t_sent_at: Duration::ZERO,
            incoming: IncomingData::default(),
            early_completion: None,
        });
        self.actions.push_back(Action::CommandArrived { tag, sqe });
        self.receiver.block_on(payload, tag);
        Ok(())
    }

    /// Transport rules for a command with `length` bytes in its capsule.
    fn check_capsule(&self, sqe: &Sqe, length: u32) -> Result<(), Status> {
        let connects = sqe.fabrics() == Some(FabricsType::Connect);
        if connects != (self.phase == Phase::Connecting) {
            // NVMe Base 2.0, 6.3: Connect first, and only once.
            return Err(Status::COMMAND_SEQUENCE.do_not_retry());
        }
        if self.commands.contains(sqe.cid.get()) {
            return Err(Status::COMMAND_ID_CONFLICT.do_not_retry());
        }
        let direction = sqe.direction();
        if matches!(direction, Direction::None | Direction::Both) {
            return Ok(());
        }
        let in_capsule_ok = direction == Direction::ToController;
        let transfer = sqe.data_location().map_err(Status::do_not_retry)?;
        let refusal = match transfer {
            DataLocation::InCapsule { .. } if !in_capsule_ok => Status::SGL_DESCRIPTOR_TYPE_INVALID,
            DataLocation::InCapsule { offset, .. } if offset != 0 => Status::SGL_OFFSET_INVALID,
            DataLocation::InCapsule { length: l, .. } if l != length => {
                Status::DATA_SGL_LENGTH_INVALID
            }
            DataLocation::Transport { .. } if length > 0 => Status::SGL_DESCRIPTOR_TYPE_INVALID,
            DataLocation::InCapsule { .. } | DataLocation::Transport { .. } => return Ok(()),
        };
        Err(refusal.do_not_retry())
    }

    fn on_h2c_data(
        &mut self,
        common: CommonHeader,
        payload: Option<Payload>,
    ) -> Result<(), Violation> {
        let pdu: DataPdu = self.receiver.pdu();
        let tag = Tag(pdu.transfer_tag.get());
        let asked = |c: &&mut Command| c.stage == CommandStage::Receiving && !c.in_capsule;
        let command = self.commands.get_mut(tag).filter(asked);
        let command = command.ok_or(Violation::field(DataPdu::TRANSFER_TAG_AT))?;
        if command.cid != pdu.command_id.get() {
            return Err(Violation::field(DataPdu::COMMAND_ID_AT));
        }
        let length = pdu.agreed_length(payload)?;
        if length > self.config.max_h2c_data {
            return Err(Violation::limit());
        }
        let offset = pdu.offset.get();
        let left = command.host_bytes.saturating_sub(command.incoming.received);
        if offset != command.incoming.received || length > left {
            return Err(Violation::out_of_range());
        }
        if common.has(FLAG_LAST) && length < left {
            // Marked as the last of its transfer, but the transfer is incomplete.
            return Err(Violation::sequence());
        }
        self.receiver.start_payload(payload, Some(tag), self.now);
        Ok(())
    }
}
