//! Receives the controller's PDUs:

use super::commands::PendingR2t;
use super::{CloseReason, Connection, Phase};
use crate::entry::Completion;
use crate::pdu::{
    CapsuleResp, CommonHeader, DataPdu, FLAG_LAST, FLAG_SUCCESS, FatalError, IcResp, MAX_HPDA,
    MIN_MAX_H2C_DATA, PFV_1_0, PduType, R2t, TermReq,
};
use crate::stream::{Digests, Payload, ReceiveEvent, Tag, Violation, at};

impl Connection {
    /// The first `n` bytes of the receive space have been filled.
    pub(super) fn advance(&mut self, n: usize) {
        let result = match self.receiver.advance(n, self.now, &mut self.commands) {
            ReceiveEvent::Incomplete | ReceiveEvent::Data(None) => return,
            ReceiveEvent::Common(common) => self.on_common_header(common),
            ReceiveEvent::Header(common) => self.on_header(common),
            ReceiveEvent::Data(Some(tag)) => return self.data_complete(tag),
        };
        if let Err(violation) = result {
            self.terminate(violation);
        }
    }

    /// The common header has arrived: determines the PDU and the length of its header.
    fn on_common_header(&mut self, common: CommonHeader) -> Result<(), Violation> {
        let kind = common.kind();
        let digests = Some(self.sender.digests);
        let (hlen, digests) = match kind {
            PduType::IcResp => (size_of::<IcResp>(), None),
            PduType::C2HTermReq => (size_of::<TermReq>(), None),
            PduType::CapsuleResp => (size_of::<CapsuleResp>(), digests),
            PduType::C2HData => (size_of::<DataPdu>(), digests),
            PduType::R2T => (size_of::<R2t>(), digests),
            _ => return Err(Violation::field(at::PDU_TYPE)),
        };
        let initializing = self.phase == Phase::Initializing;
        if kind != PduType::C2HTermReq && initializing != (kind == PduType::IcResp) {
            return Err(Violation::sequence());
        }
        self.receiver.expect_header(common, hlen, digests)
    }

    /// The whole header has arrived, with its digest.
    fn on_header(&mut self, common: CommonHeader) -> Result<(), Violation> {
        match common.kind() {
            PduType::IcResp => return self.on_ic_resp(common),
            PduType::C2HTermReq => return self.on_term_req(common),
            _ => {}
        }
        let payload = self.receiver.check_header(common, self.sender.digests)?;
        if common.kind() == PduType::C2HData {
            return self.on_c2h_data(common, payload);
        }
        if payload.is_some() {
            // Neither R2T nor CapsuleResp have data.
            return Err(Violation::field(at::PLEN));
        }
        self.receiver.next_pdu();
        if common.kind() == PduType::R2T { self.on_r2t() } else { self.on_response() }
    }

    /// NVMe/TCP 3.6.2.3.
    fn on_ic_resp(&mut self, common: CommonHeader) -> Result<(), Violation> {
        let resp: IcResp = self.receiver.pdu();
        if common.plen.get() as usize != size_of::<IcResp>() {
            return Err(Violation::field(at::PLEN));
        }
        if resp.pfv.get() != PFV_1_0 {
            let error = FatalError::UnsupportedParameter;
            return Err(Violation { error, information: at::PFV });
        }
        if resp.cpda > MAX_HPDA {
            return Err(Violation::field(at::ALIGNMENT));
        }
        let digests = Digests::from_bits(resp.digest);
        if resp.digest & !self.config.digests.bits() != 0 {
            return Err(Violation::field(at::DIGESTS));
        }
        let max_h2c_data = resp.max_h2c_data.get();
        if max_h2c_data < MIN_MAX_H2C_DATA || !max_h2c_data.is_multiple_of(4) {
            return Err(Violation::field(at::MAX_H2C_DATA));
        }
        self.max_h2c_data = max_h2c_data;
        self.sender.digests = digests;
        self.sender.alignment = (usize::from(resp.cpda) + 1) * 4;
        self.phase = Phase::Running;
        self.receiver.next_pdu();
        Ok(())
    }

    fn on_term_req(&mut self, common: CommonHeader) -> Result<(), Violation> {
        if common.plen.get() > TermReq::MAX_BYTES {
            return Err(Violation::field(at::PLEN));
        }
        let term: TermReq = self.receiver.pdu();
        let (error, information) = (FatalError(term.status.get()), term.information.get());
        self.finish(CloseReason::ControllerTerminated { error, information });
        Ok(())
    }

    /// NVMe/TCP 3.6.2.9. Data of a command arrives in order and without gaps.
    fn on_c2h_data(
        &mut self,
        common: CommonHeader,
        payload: Option<Payload>,
    ) -> Result<(), Violation> {
        let pdu: DataPdu = self.receiver.pdu();
        let unknown = Violation::field(DataPdu::COMMAND_ID_AT);
        let tag = self.find_sent(pdu.command_id.get()).ok_or(unknown)?;
        let command = self.commands.get_mut(tag).filter(|c| c.capacity > 0).ok_or(unknown)?;
        if command.last_received {
            return Err(Violation::sequence());
        }
        let length = pdu.agreed_length(payload)?;
        let left = command.capacity.saturating_sub(command.incoming.received);
        if pdu.offset.get() != command.incoming.received || length > left {
            return Err(Violation::out_of_range());
        }
        let last = common.has(FLAG_LAST);
        let succeeds = common.has(FLAG_SUCCESS);
        if succeeds && !last {
            return Err(Violation::field(at::FLAGS));
        }
        command.last_received = last;
        command.success_flag = succeeds;
        self.receiver.start_payload(payload, Some(tag), self.now);
        Ok(())
    }

    /// All data of a PDU has arrived.
    fn data_complete(&mut self, tag: Tag) {
        if self.commands.get_mut(tag).is_some_and(|c| c.success_flag) {
            self.complete(tag, Completion::OK);
        }
    }

    /// NVMe/TCP 3.6.2.10. Data of a command is requested in order and once.
    fn on_r2t(&mut self) -> Result<(), Violation> {
        let pdu: R2t = self.receiver.pdu();
        let unknown = Violation::field(DataPdu::COMMAND_ID_AT);
        let tag = self.find_sent(pdu.command_id.get()).ok_or(unknown)?;
        let command = self.commands.get_mut(tag).ok_or(unknown)?;
        if command.outgoing.is_empty() {
            // It has no data for the controller, or the capsule contained it.
            return Err(unknown);
        }
        if command.r2ts >= self.config.max_r2ts {
            return Err(Violation::limit());
        }
        let (at, length) = (pdu.offset.get(), pdu.length.get());
        let end = at.checked_add(length).filter(|&end| end as usize <= command.outgoing.len());
        let end = end.filter(|&end| at == command.solicited_bytes && end > at);
        let end = end.ok_or(Violation::out_of_range())?;
        command.solicited_bytes = end;
        command.r2ts += 1;
        self.pending_r2ts.push_back(PendingR2t { tag, ttag: pdu.transfer_tag.get(), at, end });
        Ok(())
    }

    /// NVMe/TCP 3.6.2.7.
    fn on_response(&mut self) -> Result<(), Violation> {
        let cqe = self.receiver.pdu::<CapsuleResp>().cqe;
        let tag = self.find_sent(cqe.cid.get());
        let tag = tag.ok_or(Violation::field(CapsuleResp::COMMAND_ID_AT))?;
        self.complete(tag, Completion { result: cqe.result.get(), status: cqe.status() });
        Ok(())
    }
}
