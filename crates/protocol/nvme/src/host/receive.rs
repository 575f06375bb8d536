//! What the controller sends: ICResp, R2T, C2HData, CapsuleResp, C2HTermReq.

use super::commands::Transfer;
use super::{Connection, End, Phase};
use crate::entry::Completion;
use crate::pdu::{
    CapsuleResp, Common, Data, FLAG_LAST, FLAG_SUCCESS, FatalError, IcResp, MAX_HPDA,
    MIN_MAX_H2C_DATA, PFV_1_0, PduType, R2t, TermReq,
};
use crate::stream::{Digests, Payload, Received, Tag, Violation, at};

impl Connection {
    /// The first `n` bytes of the receive space have been filled.
    pub(super) fn advance(&mut self, n: usize) {
        let result = match self.receiver.advance(n, self.now, &mut self.commands) {
            Received::Part | Received::Data(None) => return,
            Received::Common(common) => self.common(common),
            Received::Header(common) => self.header(common),
            Received::Data(Some(tag)) => return self.data_complete(tag),
        };
        if let Err(violation) = result {
            self.violated(violation);
        }
    }

    /// The common header has come: which PDU is it, and how long is its header?
    fn common(&mut self, common: Common) -> Result<(), Violation> {
        let kind = common.kind();
        let digests = Some(self.sender.digests);
        let (hlen, digests) = match kind {
            PduType::IcResp => (size_of::<IcResp>(), None),
            PduType::C2HTermReq => (size_of::<TermReq>(), None),
            PduType::CapsuleResp => (size_of::<CapsuleResp>(), digests),
            PduType::C2HData => (size_of::<Data>(), digests),
            PduType::R2T => (size_of::<R2t>(), digests),
            _ => return Err(Violation::field(at::PDU_TYPE)),
        };
        let initializing = self.phase == Phase::Initializing;
        if kind != PduType::C2HTermReq && initializing != (kind == PduType::IcResp) {
            return Err(Violation::sequence());
        }
        self.receiver.expect(common, hlen, digests)
    }

    /// The whole header has come, with its digest.
    fn header(&mut self, common: Common) -> Result<(), Violation> {
        match common.kind() {
            PduType::IcResp => return self.ic_resp(common),
            PduType::C2HTermReq => return self.controller_terminates(common),
            _ => {}
        }
        let payload = self.receiver.checked(common, self.sender.digests)?;
        if common.kind() == PduType::C2HData {
            return self.c2h_data(common, payload);
        }
        if payload.is_some() {
            // Neither R2T nor CapsuleResp have data.
            return Err(Violation::field(at::PLEN));
        }
        self.receiver.next_pdu();
        if common.kind() == PduType::R2T { self.r2t() } else { self.response() }
    }

    /// NVMe/TCP 3.6.2.3.
    fn ic_resp(&mut self, common: Common) -> Result<(), Violation> {
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

    fn controller_terminates(&mut self, common: Common) -> Result<(), Violation> {
        if common.plen.get() > TermReq::MAX_BYTES {
            return Err(Violation::field(at::PLEN));
        }
        let term: TermReq = self.receiver.pdu();
        let (error, information) = (FatalError(term.status.get()), term.information.get());
        self.finish(End::ControllerTerminated { error, information });
        Ok(())
    }

    /// NVMe/TCP 3.6.2.9. Data of a command comes in order and without holes.
    fn c2h_data(&mut self, common: Common, payload: Option<Payload>) -> Result<(), Violation> {
        let pdu: Data = self.receiver.pdu();
        let unknown = Violation::field(Data::COMMAND_ID_AT);
        let tag = self.known(pdu.command_id.get()).ok_or(unknown)?;
        let command = self.commands.get_mut(tag).filter(|c| c.room > 0).ok_or(unknown)?;
        if command.last {
            return Err(Violation::sequence());
        }
        let length = pdu.agreed_length(payload)?;
        let left = command.room.saturating_sub(command.incoming.filled);
        if pdu.offset.get() != command.incoming.filled || length > left {
            return Err(Violation::out_of_range());
        }
        let last = common.has(FLAG_LAST);
        let succeeds = common.has(FLAG_SUCCESS);
        if succeeds && !last {
            return Err(Violation::field(at::FLAGS));
        }
        command.last = last;
        command.succeeds = succeeds;
        self.receiver.start(payload, Some(tag), self.now);
        Ok(())
    }

    /// All data of a PDU has come.
    fn data_complete(&mut self, tag: Tag) {
        if self.commands.get_mut(tag).is_some_and(|c| c.succeeds) {
            self.complete(tag, Completion::OK);
        }
    }

    /// NVMe/TCP 3.6.2.10. Data of a command is asked for in order and once.
    fn r2t(&mut self) -> Result<(), Violation> {
        let pdu: R2t = self.receiver.pdu();
        let unknown = Violation::field(Data::COMMAND_ID_AT);
        let tag = self.known(pdu.command_id.get()).ok_or(unknown)?;
        let command = self.commands.get_mut(tag).ok_or(unknown)?;
        if command.outgoing.is_empty() {
            // It has no data for the controller, or the capsule brought it.
            return Err(unknown);
        }
        if command.r2ts >= self.config.r2ts {
            return Err(Violation::limit());
        }
        let (at, length) = (pdu.offset.get(), pdu.length.get());
        let end = at.checked_add(length).filter(|&end| end as usize <= command.outgoing.len());
        let end = end.filter(|&end| at == command.asked && end > at);
        let end = end.ok_or(Violation::out_of_range())?;
        command.asked = end;
        command.r2ts += 1;
        self.transfers.push_back(Transfer { tag, ttag: pdu.transfer_tag.get(), at, end });
        Ok(())
    }

    /// NVMe/TCP 3.6.2.7.
    fn response(&mut self) -> Result<(), Violation> {
        let cqe = self.receiver.pdu::<CapsuleResp>().cqe;
        let tag = self.known(cqe.cid.get());
        let tag = tag.ok_or(Violation::field(CapsuleResp::COMMAND_ID_AT))?;
        self.complete(tag, Completion { result: cqe.result.get(), status: cqe.status() });
        Ok(())
    }
}
