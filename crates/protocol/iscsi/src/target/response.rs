//! Completion of SCSI commands: data and status.

use arrayvec::ArrayVec;
use zerocopy::big_endian::U32;

use super::Connection;
use super::action::{CommandOutcome, Direction};
use super::dispatch::Subject;
use super::read_transfer::{CommandEnd, ReadTransfer, Residual};
use super::send::StatSnUse;
use super::task::{DeferredStatus, Disposition, Task, TaskPhase};
use crate::pdu::{DataIn, FINAL, NO_TAG, ScsiResponse};
use crate::stream::Tag;

/// SCSI status GOOD.
const GOOD: u8 = 0x00;

/// SCSI status CHECK CONDITION.
const CHECK_CONDITION: u8 = 0x02;

/// With this much waiting to be sent, read data is kept as data and not built into PDUs: short PDUs
/// use memory outside the pools.
const OUTPUT_HIGH_WATER: usize = 512 * 1024;

/// Most bytes of sense data (SPC-4 4.5).
const MAX_SENSE: usize = 252;

impl Connection {
    /// Completes a command. Its tag may be reused from now on. Ignored for unused tags.
    ///
    /// The response is sent once all announced data of the command has arrived (and been dropped),
    /// at once if none is in transit. A command that the initiator has aborted gets no response.
    pub fn complete(&mut self, tag: Tag, outcome: &CommandOutcome<'_>) {
        let Some(task) = self.tasks.get(tag).filter(|t| t.phase != TaskPhase::Ended) else {
            return;
        };
        task.phase = TaskPhase::Ended;
        task.data.clear();
        let queued = std::mem::take(&mut task.queued);
        let (fate, expects_data) = (task.disposition, task.expects_data());
        if fate == Disposition::Live && expects_data {
            let sense = outcome.sense.into();
            task.deferred_status = Some(DeferredStatus { status: outcome.status, sense });
        }
        if queued > 0 {
            self.actions.retain(|a| a.tag() != Some(tag));
        }
        match fate {
            Disposition::Live if !expects_data => self.answer(tag, outcome),
            Disposition::Live | Disposition::Failed(_) => {
                self.unblock();
                self.respond_if_data_done(tag);
            }
            Disposition::Aborted => self.retire(tag),
        }
    }

    /// Responds to a completed command if no data is in transit.
    pub(super) fn respond_if_data_done(&mut self, tag: Tag) {
        let Some(task) = self.tasks.get(tag) else { return };
        if task.phase != TaskPhase::Ended || task.expects_data() {
            return;
        }
        if task.read_transfer.is_some() {
            return;
        }
        let parked = task.deferred_status.take();
        match (task.disposition, parked) {
            (Disposition::Failed(fault), _) => {
                self.answer(tag, &CommandOutcome::status(CHECK_CONDITION, &fault.sense()));
            }
            (Disposition::Live, Some(p)) => {
                self.answer(tag, &CommandOutcome::status(p.status, &p.sense));
            }
            (Disposition::Live, None) | (Disposition::Aborted, _) => self.retire(tag),
        }
    }

    /// Removes a command without a response.
    pub(super) fn retire(&mut self, tag: Tag) {
        if let Some(task) = self.remove(tag) {
            self.task_ended(task.awaited_by);
        }
    }

    fn remove(&mut self, tag: Tag) -> Option<Task> {
        let task = self.tasks.remove(tag)?;
        if task.numbered {
            self.window.release();
        }
        if task.read_transfer.is_some() {
            self.blocked_reads.retain(|t| *t != tag);
        }
        let about = match self.subject {
            Subject::Command(t) | Subject::Data(t, _) => t == tag,
            Subject::Ignored | Subject::Request => false,
        };
        if about {
            self.subject = Subject::Ignored;
            self.unblock();
        }
        Some(task)
    }

    fn answer(&mut self, tag: Tag, outcome: &CommandOutcome<'_>) {
        let Some(task) = self.tasks.get(tag) else { return };
        let presented = match task.direction {
            Direction::Write => task.presented,
            Direction::Read | Direction::None => outcome.available.max(outcome.data.len() as u64),
        };
        let residual = Residual::of(task.expected, presented);
        let len = match task.direction {
            Direction::Read => outcome.data.len().min(task.expected as usize),
            Direction::Write | Direction::None => 0,
        };
        let end = CommandEnd { itt: task.itt, status: outcome.status, residual };
        if len == 0 {
            let r2ts = task.r2ts;
            self.remove(tag);
            return self.send_response(end, outcome.sense, r2ts);
        }
        let data = if len < outcome.data.len() {
            outcome.data.slice(0..len)
        } else {
            outcome.data.clone()
        };
        let sense = outcome.sense.into();
        let burst_end = self.burst();
        let mut sending = ReadTransfer { end, sense, data, position: 0, burst_end, pdus: 0 };
        // Reads are sent in the order in which they ended.
        if self.blocked_reads.is_empty() && self.send_read(tag, &mut sending) {
            return;
        }
        if let Some(task) = self.tasks.get(tag) {
            task.read_transfer = Some(Box::new(sending));
            self.blocked_reads.push_back(tag);
        }
    }

    /// Resumes reads that wait for space in the output.
    pub(super) fn resume_reads(&mut self) {
        while self.output.len() < OUTPUT_HIGH_WATER
            && let Some(&tag) = self.blocked_reads.front()
        {
            let sending = self.tasks.get(tag).and_then(|t| t.read_transfer.take());
            let Some(mut sending) = sending else {
                self.blocked_reads.pop_front();
                continue;
            };
            if self.send_read(tag, &mut sending) {
                self.blocked_reads.pop_front();
            } else if let Some(task) = self.tasks.get(tag) {
                task.read_transfer = Some(sending);
            }
        }
    }

    /// Longest sequence of Data-In PDUs: whole words, so that no padding is needed in between.
    fn burst(&self) -> usize {
        self.params.max_burst as usize & !3
    }

    /// Sends the data of a read as far as the output has space, then its status (RFC 7143 11.7):
    /// PDUs as long as the initiator accepts, sequences no longer than a burst; a good status is
    /// sent with the last PDU. Returns whether the command is finished.
    fn send_read(&mut self, tag: Tag, sending: &mut ReadTransfer) -> bool {
        let (end, len) = (sending.end, sending.data.len());
        let status_inside = end.status == GOOD && sending.sense.is_empty();
        let segment = self.params.initiator_max_segment as usize & !3;
        while sending.position < len {
            if self.output.len() >= OUTPUT_HIGH_WATER {
                return false;
            }
            let at = sending.position;
            let to = (at + segment).min(sending.burst_end).min(len);
            let mut pdu = DataIn::zeroed();
            pdu.itt = U32::new(end.itt);
            pdu.ttt = U32::new(NO_TAG);
            pdu.data_sn = U32::new(sending.pdus);
            pdu.offset = U32::new(u32::try_from(at).expect("the expected length has 32 bits"));
            let mut status = StatSnUse::None;
            if to == sending.burst_end || to == len {
                pdu.flags |= FINAL;
                sending.burst_end += self.burst();
            }
            if to == len && status_inside {
                pdu.flags |= DataIn::STATUS | end.residual.flags;
                pdu.status = end.status;
                pdu.residual = U32::new(end.residual.count);
                status = StatSnUse::Advance;
                self.remove(tag);
            }
            if to - at == len {
                self.send_data(pdu, status, &sending.data);
            } else {
                self.send_data(pdu, status, &sending.data.slice(at..to));
            }
            sending.position = to;
            sending.pdus += 1;
        }
        if !status_inside {
            self.remove(tag);
            self.send_response(end, &sending.sense, sending.pdus);
        }
        true
    }

    fn send_response(&mut self, end: CommandEnd, sense: &[u8], pdus: u32) {
        let mut pdu = ScsiResponse::zeroed();
        pdu.flags = FINAL | end.residual.flags;
        pdu.response = ScsiResponse::COMPLETED;
        pdu.status = end.status;
        pdu.itt = U32::new(end.itt);
        pdu.exp_data_sn = U32::new(pdus);
        pdu.residual = U32::new(end.residual.count);
        self.send_bytes(pdu, StatSnUse::Advance, &sense_segment(sense));
    }
}

/// RFC 7143 11.4.7: sense data preceded by its length.
pub(super) fn sense_segment(sense: &[u8]) -> ArrayVec<u8, { MAX_SENSE + 2 }> {
    let mut segment = ArrayVec::new();
    let sense = &sense[..sense.len().min(MAX_SENSE)];
    if let Ok(len) = u16::try_from(sense.len())
        && len > 0
    {
        segment.extend(len.to_be_bytes());
        segment.extend(sense.iter().copied());
    }
    segment
}
