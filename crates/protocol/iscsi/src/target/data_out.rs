//! Data of writes as it comes (RFC 7143 11.7).

use super::Connection;
use super::dispatch::Subject;
use super::task::{Fate, Fault};
use crate::pdu::{DataOut, NO_TAG, RejectReason};
use crate::stream::{Sink, Tag};

impl Connection {
    /// A Data-Out PDU has begun; says where its data goes. Data for commands that are over is
    /// dropped: it was on its way when they ended.
    pub(super) fn on_data_header(&mut self) -> (Sink, Subject) {
        const DROP: (Sink, Subject) = (Sink::Discard, Subject::Ignored);
        let pdu = *DataOut::of(self.receiver.basic());
        let len = u32::try_from(self.receiver.segment()).unwrap_or(u32::MAX);
        let (ttt, now) = (pdu.ttt.get(), self.clock.now());
        let Some(tag) = self.tasks.find(pdu.itt.get()) else { return DROP };
        let Some(task) = self.tasks.get(tag) else { return DROP };
        let Some(transfer) = task.transfers.iter_mut().find(|t| t.ttt == ttt) else {
            if task.fate == Fate::Live {
                self.on_stray_data(tag, ttt);
            }
            return DROP;
        };
        task.since = now;
        let fault = if pdu.data_sn.get() != transfer.data_sn {
            // RFC 7143 7.9: one is missing, as after a digest error.
            Some(Fault::DIGEST)
        } else if pdu.offset.get() != transfer.at {
            Some(Fault::OFFSET)
        } else if len > transfer.end.saturating_sub(transfer.at) {
            Some(Fault::AMOUNT)
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

    /// Data that was not asked for, or not with this tag.
    fn on_stray_data(&mut self, tag: Tag, ttt: u32) {
        if ttt == NO_TAG {
            return self.fail(tag, Fault::UNEXPECTED_DATA);
        }
        self.reject(RejectReason::InvalidField);
        self.fail(tag, Fault::TRANSFER_TAG);
    }

    /// A Data-Out PDU is there.
    pub(super) fn on_data(&mut self, tag: Tag, ttt: u32, intact: bool) {
        let last = DataOut::of(self.receiver.basic()).is_final();
        let len = u32::try_from(self.receiver.segment()).unwrap_or(u32::MAX);
        let Some(task) = self.tasks.get(tag) else { return };
        let Some(i) = task.transfers.iter().position(|t| t.ttt == ttt) else { return };
        let mut fault = (!intact).then_some(Fault::DIGEST);
        if task.fate == Fate::Live && intact {
            let transfer = &mut task.transfers[i];
            transfer.at += len;
            if ttt == NO_TAG {
                task.next = transfer.at;
            }
            // RFC 7143 11.4.7.2: what was asked for must be what comes, and unsolicited data
            // must be all of the first burst unless the command has less.
            let strict = ttt != NO_TAG || task.expected > transfer.end;
            if last && strict && transfer.at != transfer.end {
                fault = Some(Fault::AMOUNT);
            }
        }
        if last {
            task.transfers.remove(i);
        }
        self.after_data(tag, fault, intact);
    }

    /// A command's immediate data is there.
    pub(super) fn on_immediate_data(&mut self, tag: Tag, intact: bool) {
        let len = u32::try_from(self.receiver.segment()).unwrap_or(u32::MAX);
        let now = self.clock.now();
        let Some(task) = self.tasks.get(tag) else { return };
        task.immediate = false;
        task.next = len;
        task.since = now;
        self.after_data(tag, (!intact).then_some(Fault::DIGEST), intact);
    }

    fn after_data(&mut self, tag: Tag, fault: Option<Fault>, intact: bool) {
        if !intact {
            self.reject(RejectReason::DataDigest);
        }
        if let Some(fault) = fault {
            self.fail(tag, fault);
        }
        self.advance(tag);
        self.settle(tag);
    }
}
