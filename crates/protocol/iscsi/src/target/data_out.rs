//! Reception of write data

use super::Connection;
use super::dispatch::Subject;
use super::task::{Disposition, TransferFault};
use crate::pdu::{DataOut, NO_TAG, RejectReason};
use crate::stream::{Sink, Tag};

impl Connection {
    /// Handles the header of a Data-Out PDU and decides where its data goes. Data of ended commands
    /// is dropped: it was in transit when they ended.
    pub(super) fn on_data_header(&mut self) -> (Sink, Subject) {
        const DROP: (Sink, Subject) = (Sink::Discard, Subject::Ignored);
        let pdu = *DataOut::of(self.receiver.basic());
        let len = u32::try_from(self.receiver.segment_len()).unwrap_or(u32::MAX);
        let (ttt, now) = (pdu.ttt.get(), self.timers.now());
        let Some(tag) = self.tasks.find(pdu.itt.get()) else { return DROP };
        let Some(task) = self.tasks.get(tag) else { return DROP };
        let Some(transfer) = task.data_out_sequences.iter_mut().find(|t| t.ttt == ttt) else {
            if task.disposition == Disposition::Live {
                self.on_stray_data(tag, ttt);
            }
            return DROP;
        };
        task.last_data_at = now;
        let fault = if pdu.data_sn.get() != transfer.data_sn {
            // RFC 7143 7.9: a PDU is missing, as after a digest error.
            Some(TransferFault::DIGEST)
        } else if pdu.offset.get() != transfer.at {
            Some(TransferFault::OFFSET)
        } else if len > transfer.end.saturating_sub(transfer.at) {
            Some(TransferFault::AMOUNT)
        } else {
            None
        };
        transfer.data_sn = transfer.data_sn.wrapping_add(1);
        if let Some(fault) = fault {
            self.fail(tag, fault);
            return (Sink::Discard, Subject::Data(tag, ttt));
        }
        (Sink::Task(tag, pdu.offset.get()), Subject::Data(tag, ttt))
    }

    /// Data that was not requested, or with a wrong tag.
    fn on_stray_data(&mut self, tag: Tag, ttt: u32) {
        if ttt == NO_TAG {
            return self.fail(tag, TransferFault::UNEXPECTED_DATA);
        }
        self.reject(RejectReason::InvalidField);
        self.fail(tag, TransferFault::TRANSFER_TAG);
    }

    /// Handles a complete Data-Out PDU.
    pub(super) fn on_data(&mut self, tag: Tag, ttt: u32, intact: bool) {
        let last = DataOut::of(self.receiver.basic()).is_final();
        let len = u32::try_from(self.receiver.segment_len()).unwrap_or(u32::MAX);
        let Some(task) = self.tasks.get(tag) else { return };
        let Some(i) = task.data_out_sequences.iter().position(|t| t.ttt == ttt) else { return };
        let mut fault = (!intact).then_some(TransferFault::DIGEST);
        if task.disposition == Disposition::Live && intact {
            let transfer = &mut task.data_out_sequences[i];
            transfer.at += len;
            if ttt == NO_TAG {
                task.next_unrequested = transfer.at;
            }
            // RFC 7143 11.4.7.2: requested data must arrive exactly, and unsolicited data must fill
            // the first burst unless the command has less.
            let strict = ttt != NO_TAG || task.expected > transfer.end;
            if last && strict && transfer.at != transfer.end {
                fault = Some(TransferFault::AMOUNT);
            }
        }
        if last {
            task.data_out_sequences.remove(i);
        }
        self.after_data(tag, fault, intact);
    }

    /// Handles a command's immediate data.
    pub(super) fn on_immediate_data(&mut self, tag: Tag, intact: bool) {
        let len = u32::try_from(self.receiver.segment_len()).unwrap_or(u32::MAX);
        let now = self.timers.now();
        let Some(task) = self.tasks.get(tag) else { return };
        task.immediate = false;
        task.next_unrequested = len;
        task.last_data_at = now;
        self.after_data(tag, (!intact).then_some(TransferFault::DIGEST), intact);
    }

    fn after_data(&mut self, tag: Tag, fault: Option<TransferFault>, intact: bool) {
        if !intact {
            self.reject(RejectReason::DataDigest);
        }
        if let Some(fault) = fault {
            self.fail(tag, fault);
        }
        self.advance(tag);
        self.respond_if_data_done(tag);
    }
}
