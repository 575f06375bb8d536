//! SCSI commands: data in both directions, and completion (RFC 7143 11.4, 11.7, 11.8).

use super::Connection;
use super::receive::Subject;
use super::request::{Answer, Completion, Residual};
use super::tasks::{DataOutSequence, TaskKind};
use crate::pdu::{BHS_LEN, DataIn, FINAL, NO_TAG, R2t, ScsiResponse};
use crate::stream::{Sink, Tag};

/// Most bytes of sense data (SPC-4 4.5).
const MAX_SENSE: usize = 252;

impl Connection {
    /// Handles the header of a Data-In PDU: data of a command arrives in order, without gaps, and
    /// within the buffers. Sequence boundaries are ignored: tgt makes sequences longer than
    /// MaxBurstLength.
    pub(super) fn on_data_header(&mut self) -> Result<(Sink, Subject), &'static str> {
        let pdu = *DataIn::of(self.receiver.basic());
        let length = u32::try_from(self.receiver.segment_len()).map_err(|_| "too much data")?;
        let tag = self.find_request(pdu.itt.get(), |kind| kind == TaskKind::Scsi)?;
        let Some(task) = self.tasks.get(tag).filter(|t| t.capacity > 0) else {
            return Err("data for a command that reads nothing");
        };
        let (last, status) = (pdu.flags & FINAL != 0, pdu.flags & DataIn::STATUS != 0);
        if status && !last {
            return Err("a status before the end of the data");
        }
        if length == 0 && !status {
            return Err("data of no length");
        }
        if pdu.data_sn.get() != task.data_in_pdus {
            return Err("a Data-In out of order");
        }
        if pdu.offset.get() != task.received_bytes {
            return Err("data out of order");
        }
        if length > task.capacity - task.received_bytes {
            return Err("more data than was asked for");
        }
        task.data_in_pdus = task.data_in_pdus.wrapping_add(1);
        Ok((Sink::Task(tag, pdu.offset.get()), Subject::Data(tag)))
    }

    /// Handles a complete Data-In PDU.
    pub(super) fn on_data(&mut self, tag: Tag, header: &[u8; BHS_LEN]) -> Result<(), &'static str> {
        let pdu = DataIn::of(header);
        let length = u32::try_from(self.receiver.segment_len()).map_err(|_| "too much data")?;
        let status = pdu.flags & DataIn::STATUS != 0;
        self.check_counters(header, status)?;
        let Some(task) = self.tasks.get(tag) else { return Ok(()) };
        task.received_bytes += length;
        if status {
            let residual = residual(pdu.flags, pdu.residual.get(), task.capacity)?;
            let completion = Completion { status: pdu.status, residual, ..Completion::default() };
            self.answer(tag, Answer::Scsi(completion));
        }
        Ok(())
    }

    /// Handles an R2T: data is requested in order, once, and within the negotiated limits.
    pub(super) fn on_r2t(&mut self, pdu: &R2t) -> Result<(), &'static str> {
        let (most, max_burst) = (self.params.max_outstanding_r2t, self.params.max_burst);
        let tag = self.find_request(pdu.itt.get(), |kind| kind == TaskKind::Scsi)?;
        let Some(task) = self.tasks.get(tag).filter(|t| !t.outgoing.is_empty()) else {
            return Err("a request for data of a command that writes nothing");
        };
        let (at, length, ttt) = (pdu.offset.get(), pdu.desired_len.get(), pdu.ttt.get());
        if ttt == NO_TAG {
            return Err("a request for data without a tag");
        }
        if pdu.r2t_sn.get() != task.r2ts {
            return Err("an R2T out of order");
        }
        if task.open_r2ts >= most {
            return Err("more outstanding R2Ts than negotiated");
        }
        if length == 0 || length > max_burst {
            return Err("an R2T for no data or for more than negotiated");
        }
        let end = at.checked_add(length).filter(|&end| end as usize <= task.outgoing.len());
        let Some(end) = end.filter(|_| at == task.solicited_bytes) else {
            return Err("an R2T for data past the end or already sent");
        };
        task.solicited_bytes = end;
        task.r2ts = task.r2ts.wrapping_add(1);
        task.open_r2ts += 1;
        self.data_out_sequences.push_back(DataOutSequence { tag, ttt, at, end, data_sn: 0 });
        Ok(())
    }

    /// Handles the status of a command.
    pub(super) fn on_status(
        &mut self,
        pdu: &ScsiResponse,
        data: &[u8],
    ) -> Result<(), &'static str> {
        let tag = self.find_request(pdu.itt.get(), |kind| kind == TaskKind::Scsi)?;
        let sense = sense(data, self.receiver.segment_len())?.into();
        let Some(task) = self.tasks.get(tag) else { return Ok(()) };
        // RFC 7143 11.4.8: the number of PDUs sent. Some targets leave it zero.
        let came = task.data_in_pdus.max(task.r2ts);
        if pdu.response == ScsiResponse::COMPLETED && pdu.exp_data_sn.get() > came {
            return Err("missing data");
        }
        let residual = residual(pdu.flags, pdu.residual.get(), task.expected())?;
        let (response, status) = (pdu.response, pdu.status);
        self.answer(tag, Answer::Scsi(Completion { response, status, sense, residual }));
        Ok(())
    }
}

/// Sense data preceded by its length (RFC 7143 11.4.7), in a segment of `segment` bytes.
pub(super) fn sense(data: &[u8], segment: usize) -> Result<&[u8], &'static str> {
    let Some((length, sense)) = data.split_first_chunk() else {
        return if data.is_empty() { Ok(&[]) } else { Err("a truncated length of sense data") };
    };
    let length = usize::from(u16::from_be_bytes(*length));
    if length + 2 > segment {
        return Err("less sense data than its length");
    }
    Ok(&sense[..length.min(MAX_SENSE).min(sense.len())])
}

fn residual(flags: u8, count: u32, expected: u32) -> Result<Residual, &'static str> {
    let (over, under) = (flags & ScsiResponse::OVERFLOW != 0, flags & ScsiResponse::UNDERFLOW != 0);
    match (over, under) {
        (true, true) => Err("both overflow and underflow"),
        (false, true) if count > expected => Err("a residual larger than the transfer"),
        (false, true) if count > 0 => Ok(Residual::Under(count)),
        (true, false) if count > 0 => Ok(Residual::Over(count)),
        _ => Ok(Residual::None),
    }
}
