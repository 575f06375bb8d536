//! Sends PDUs: sequence numbers, lengths, digests, and data up to the send-ahead limit.

use frame::SendQueue;
use rt::buf::Bufs;
use std::time::Duration;
use zerocopy::big_endian::U32;

use super::tasks::{DataOutSequence, Task, TaskKind};
use super::{Connection, Phase, SEND_AHEAD_BYTES};
use crate::pdu::{
    BHS_LEN, DataOut, FINAL, IMMEDIATE, LoginRequest, LogoutReason, LogoutRequest, NO_TAG, NopOut,
    ScsiCommand, TaskFunction, TaskRequest, TextRequest, segment_len,
};
use crate::sequence_number::SequenceNumber;
use crate::stream::{self, Digests, Tag};

/// Attribute of a task: simple (RFC 7143 11.3.1).
const SIMPLE: u8 = 1;

/// The task tag of a login, of which there is one.
pub(super) const LOGIN_ITT: u32 = 0;

impl Connection {
    /// Digests begin with the full feature phase (RFC 7143 13.1).
    fn digests(&self) -> Digests {
        match self.phase {
            Phase::Running | Phase::LogoutRequested(_) => self.params.digests(),
            Phase::Login(_) | Phase::Closed => Digests::default(),
        }
    }

    fn push(&mut self, header: &[u8; BHS_LEN], data: impl FnOnce(&mut SendQueue, bool)) {
        let (before, digests) = (self.out.len(), self.digests());
        stream::push_header(&mut self.out, header, digests.header);
        data(&mut self.out, digests.data);
        self.queued_total += (self.out.len() - before) as u64;
    }

    fn push_bytes(&mut self, header: &[u8; BHS_LEN], data: &[u8]) {
        self.push(header, |out, digest| stream::push_bytes(out, data, digest));
    }

    fn push_data(&mut self, header: &[u8; BHS_LEN], data: &Bufs) {
        self.push(header, |out, digest| stream::push_data(out, data, digest));
    }

    fn ack_stat_sn(&self) -> U32 {
        U32::new(self.exp_stat_sn.unwrap_or_default().0)
    }

    /// RFC 7143 11.12. The session's first connection has identifier 0.
    pub(super) fn send_login(&mut self, flags: u8, text: &[u8]) {
        let mut pdu = LoginRequest::zeroed();
        pdu.first |= IMMEDIATE;
        pdu.flags = flags;
        pdu.data_len = segment_len(text.len());
        pdu.isid = self.config.isid;
        pdu.itt = U32::new(LOGIN_ITT);
        pdu.cmd_sn = U32::new(self.cmd_sn.0);
        pdu.exp_stat_sn = self.ack_stat_sn();
        self.push_bytes(pdu.as_bytes(), text);
    }

    /// Sends waiting commands as far as the target's window allows (RFC 7143 4.2.2.1).
    pub(super) fn send_pending(&mut self) {
        while !self.max_cmd_sn.is_before(self.cmd_sn)
            && let Some(tag) = self.pending.pop_front()
        {
            self.send_command(tag);
        }
    }

    /// A SCSI command with its immediate data; unsolicited data follows behind (RFC 7143 11.3,
    /// 13.10, 13.11).
    fn send_command(&mut self, tag: Tag) {
        let (itt, at, cmd_sn) = (self.tasks.itt(tag), self.queued_total, self.cmd_sn);
        let params = &self.params;
        let Some(task) = self.tasks.get(tag) else { return };
        let expected = task.expected();
        let mut pdu = ScsiCommand::zeroed();
        pdu.flags = FINAL | SIMPLE;
        if task.capacity > 0 {
            pdu.flags |= ScsiCommand::READ;
        }
        let mut data = Bufs::new();
        if !task.outgoing.is_empty() {
            pdu.flags |= ScsiCommand::WRITE;
            let unasked = expected.min(params.first_burst);
            let immediate =
                if params.immediate_data { unasked.min(params.target_max_segment) } else { 0 };
            task.solicited_bytes = if params.initial_r2t { immediate } else { unasked };
            data = task.outgoing.slice(0..immediate as usize);
            if task.solicited_bytes > immediate {
                pdu.flags &= !FINAL;
                let end = task.solicited_bytes;
                self.data_out_sequences.push_back(DataOutSequence {
                    tag,
                    ttt: NO_TAG,
                    at: immediate,
                    end,
                    data_sn: 0,
                });
            }
        }
        (task.queued_at, task.cmd_sn) = (Some(at), cmd_sn);
        (pdu.lun, pdu.cdb, pdu.itt) = (task.lun, task.cdb, U32::new(itt));
        pdu.data_len = segment_len(data.len());
        pdu.expected_len = U32::new(expected);
        pdu.cmd_sn = U32::new(cmd_sn.0);
        pdu.exp_stat_sn = self.ack_stat_sn();
        self.cmd_sn = cmd_sn.plus(1);
        self.push_data(pdu.as_bytes(), &data);
        self.record_queued_end(tag);
    }

    /// Records that the output just queued is this task's.
    fn record_queued_end(&mut self, tag: Tag) {
        let end = self.queued_total;
        if let Some(task) = self.tasks.get(tag) {
            task.queued_end = end;
        }
    }

    /// Sends a non-SCSI request. These are immediate: they have no position in the command order.
    pub(super) fn send_non_scsi(
        &mut self,
        kind: TaskKind,
        deadline: Option<Duration>,
        text: &[u8],
    ) -> Tag {
        let task = Task { kind, deadline, queued_at: Some(self.queued_total), ..Task::default() };
        let tag = self.tasks.insert(task);
        let itt = U32::new(self.tasks.itt(tag));
        let (cmd_sn, stat_sn) = (U32::new(self.cmd_sn.0), self.ack_stat_sn());
        match kind {
            TaskKind::Abort(victim) => self.send_abort(tag, victim),
            TaskKind::ResetUnit(lun) => {
                let mut pdu = TaskRequest::zeroed();
                pdu.flags = FINAL | TaskFunction::LogicalUnitReset.0;
                (pdu.lun, pdu.referenced) = (lun, U32::new(NO_TAG));
                self.send_task(itt, pdu);
            }
            TaskKind::Ping | TaskKind::KeepAlive => self.send_nop(itt, ([0; 8], NO_TAG)),
            TaskKind::Text => self.send_text(itt, ([0; 8], NO_TAG), text),
            TaskKind::Logout | TaskKind::RequestedLogout => {
                let mut pdu = LogoutRequest::zeroed();
                pdu.first |= IMMEDIATE;
                pdu.flags = FINAL | LogoutReason::CloseSession.0;
                (pdu.itt, pdu.cmd_sn, pdu.exp_stat_sn) = (itt, cmd_sn, stat_sn);
                self.push_bytes(pdu.as_bytes(), &[]);
            }
            TaskKind::Scsi => {}
        }
        tag
    }

    /// Sends ABORT TASK. An unsent command is dropped instead.
    fn send_abort(&mut self, tag: Tag, victim: Tag) {
        let itt = U32::new(self.tasks.itt(tag));
        let referenced = U32::new(self.tasks.itt(victim));
        let known = self.tasks.get(victim).filter(|t| t.kind == TaskKind::Scsi);
        let (lun, place) = match known {
            Some(task) => (task.lun, task.queued_at.map(|_| task.cmd_sn)),
            None => ([0; 8], None),
        };
        let Some(SequenceNumber(ref_cmd_sn)) = place else { return self.abort_unsent(tag, victim) };
        let mut pdu = TaskRequest::zeroed();
        pdu.flags = FINAL | TaskFunction::AbortTask.0;
        (pdu.lun, pdu.referenced, pdu.ref_cmd_sn) = (lun, referenced, U32::new(ref_cmd_sn));
        self.send_task(itt, pdu);
    }

    fn send_task(&mut self, itt: U32, mut pdu: TaskRequest) {
        pdu.first |= IMMEDIATE;
        (pdu.itt, pdu.cmd_sn) = (itt, U32::new(self.cmd_sn.0));
        pdu.exp_stat_sn = self.ack_stat_sn();
        self.push_bytes(pdu.as_bytes(), &[]);
    }

    fn send_nop(&mut self, itt: U32, (lun, ttt): ([u8; 8], u32)) {
        let mut pdu = NopOut::zeroed();
        pdu.first |= IMMEDIATE;
        pdu.flags = FINAL;
        (pdu.lun, pdu.itt, pdu.ttt) = (lun, itt, U32::new(ttt));
        pdu.cmd_sn = U32::new(self.cmd_sn.0);
        pdu.exp_stat_sn = self.ack_stat_sn();
        self.push_bytes(pdu.as_bytes(), &[]);
    }

    pub(super) fn send_text(&mut self, itt: U32, (lun, ttt): ([u8; 8], u32), text: &[u8]) {
        let mut pdu = TextRequest::zeroed();
        pdu.first |= IMMEDIATE;
        pdu.flags = FINAL;
        pdu.data_len = segment_len(text.len());
        (pdu.lun, pdu.itt, pdu.ttt) = (lun, itt, U32::new(ttt));
        pdu.cmd_sn = U32::new(self.cmd_sn.0);
        pdu.exp_stat_sn = self.ack_stat_sn();
        self.push_bytes(pdu.as_bytes(), text);
    }

    /// Generates output that the socket can take: answers to pings, and data.
    pub(super) fn fill_output(&mut self) {
        while self.out.len() < SEND_AHEAD_BYTES {
            if let Some(ping) = self.unanswered_pings.pop_front() {
                self.send_nop(U32::new(NO_TAG), ping);
            } else if let Some(mut transfer) = self.data_out_sequences.pop_front() {
                let more = self.send_data_out(&mut transfer);
                if more {
                    self.data_out_sequences.push_front(transfer);
                }
            } else {
                return;
            }
        }
    }

    /// Sends a Data-Out PDU (RFC 7143 11.7). Returns whether more follow.
    fn send_data_out(&mut self, transfer: &mut DataOutSequence) -> bool {
        let DataOutSequence { tag, ttt, at, end, data_sn } = *transfer;
        let itt = self.tasks.itt(tag);
        let most = self.params.target_max_segment;
        let Some(task) = self.tasks.get(tag) else { return false };
        let to = end.min(at.saturating_add(most));
        let data = task.outgoing.slice(at as usize..to as usize);
        let mut pdu = DataOut::zeroed();
        let last = to == end;
        if last {
            pdu.flags = FINAL;
            task.open_r2ts -= u16::from(ttt != NO_TAG);
        }
        pdu.lun = if ttt == NO_TAG { [0; 8] } else { task.lun };
        pdu.data_len = segment_len(data.len());
        (pdu.itt, pdu.ttt) = (U32::new(itt), U32::new(ttt));
        (pdu.data_sn, pdu.offset) = (U32::new(data_sn), U32::new(at));
        pdu.exp_stat_sn = self.ack_stat_sn();
        (transfer.at, transfer.data_sn) = (to, data_sn.wrapping_add(1));
        self.push_data(pdu.as_bytes(), &data);
        self.record_queued_end(tag);
        !last
    }
}
