//! A SCSI command from its arrival to its start: admission, memory, R2Ts.

use rt::buf::{Bufs, BufsMut, MemoryClass};
use rt::memory::PAGE;
use smallvec::SmallVec;
use zerocopy::big_endian::U32;

use super::Connection;
use super::action::{Action, ArrivedCommand, Direction};
use super::dispatch::Subject;
use super::send::StatSnUse;
use super::task::{DataOutSequence, Disposition, Task, TaskPhase, TransferFault};
use crate::pdu::{AdditionalHeaders, FINAL, NO_TAG, R2t, RejectReason, ScsiCommand};
use crate::stream::{Sink, Tag};

/// Most commands for immediate delivery that may be outstanding; they do not count in the window.
const IMMEDIATE_COMMANDS: usize = 16;

impl Connection {
    /// Handles the header of a SCSI command and decides where its immediate data goes.
    pub(super) fn on_command(&mut self) -> (Sink, Subject) {
        let command = *ScsiCommand::of(self.receiver.basic());
        let numbered = command.first & crate::pdu::IMMEDIATE == 0;
        let checked = self.check_command(&command, numbered);
        let extended_cdb = match checked {
            Ok(cdb) => cdb,
            Err(reason) => {
                if numbered {
                    self.window.release();
                }
                self.reject(reason);
                return (Sink::Discard, Subject::Ignored);
            }
        };
        let (task, fault) = self.task_of(&command, numbered);
        let immediate = task.immediate;
        if !task.data_out_sequences.is_empty() {
            self.timers.expect_data(self.config.data_timeout);
        }
        let tag = self.tasks.insert(task);
        if let Some(fault) = fault {
            // The driver never sees it.
            if let Some(task) = self.tasks.get(tag) {
                task.phase = TaskPhase::Ended;
            }
            self.fail(tag, fault);
        } else {
            let arrived = ArrivedCommand {
                tag,
                lun: command.lun,
                cdb: command.cdb,
                extended_cdb,
                attribute: command.attribute(),
                direction: direction(&command),
                expected_len: expected(&command),
            };
            self.push(tag, Action::CommandArrived(arrived));
        }
        if immediate {
            (Sink::Task(tag, 0), Subject::Command(tag))
        } else {
            (Sink::Discard, Subject::Ignored)
        }
    }

    /// RFC 7143 11.3: validates a command. Returns the rest of a long CDB.
    fn check_command(
        &self,
        command: &ScsiCommand,
        numbered: bool,
    ) -> Result<Box<[u8]>, RejectReason> {
        let itt = command.itt.get();
        if itt == NO_TAG {
            return Err(RejectReason::InvalidField);
        }
        if self.tasks.find(itt).is_some() {
            return Err(RejectReason::TaskInProgress);
        }
        let immediate = self.tasks.len().saturating_sub(self.window.outstanding());
        if !numbered && immediate >= IMMEDIATE_COMMANDS {
            return Err(RejectReason::TooManyImmediate);
        }
        let ahs = AdditionalHeaders::parse(self.receiver.ahs());
        let ahs = ahs.map_err(|_| RejectReason::InvalidField)?;
        if (command.reads() && command.writes()) || ahs.bidirectional_read.is_some() {
            return Err(RejectReason::Unsupported);
        }
        // Data, or announced data, without W.
        if !command.writes() && (self.receiver.segment_len() > 0 || !command.is_final()) {
            return Err(RejectReason::InvalidField);
        }
        Ok(ahs.cdb.unwrap_or_default().into())
    }

    /// The task of a command, and what is wrong with its unsolicited data (RFC 7143 4.2.5.2,
    /// 11.4.7.2).
    fn task_of(&self, command: &ScsiCommand, numbered: bool) -> (Task, Option<TransferFault>) {
        let expected = expected(command);
        let immediate = u32::try_from(self.receiver.segment_len()).unwrap_or(u32::MAX);
        let burst = self.params.first_burst.min(expected);
        let mut fault = None;
        if immediate > burst {
            fault = Some(TransferFault::AMOUNT);
        }
        if immediate > 0 && !self.params.immediate_data {
            fault = Some(TransferFault::UNEXPECTED_DATA);
        }
        let mut transfers = SmallVec::new();
        if !command.is_final() {
            if self.params.initial_r2t {
                fault = Some(TransferFault::UNEXPECTED_DATA);
            }
            transfers.push(DataOutSequence { ttt: NO_TAG, at: immediate, end: burst, data_sn: 0 });
        }
        let task = Task {
            itt: command.itt.get(),
            lun: command.lun,
            numbered,
            direction: direction(command),
            expected,
            phase: TaskPhase::Arrived,
            disposition: Disposition::Live,
            abort_requested: false,
            queued: 0,
            awaited_by: 0,
            presented: 0,
            receive_len: 0,
            memory_requested: 0,
            memory_granted: 0,
            data: BufsMut::new(),
            immediate: immediate > 0,
            unsolicited: if transfers.is_empty() { immediate } else { burst },
            data_out_sequences: transfers,
            next_unrequested: 0,
            r2ts: 0,
            last_data_at: self.timers.now(),
            deferred_status: None,
            read_transfer: None,
        };
        (task, fault)
    }

    /// Answers [`Action::CommandArrived`]: the command takes `data_out` bytes, or none if it is not
    /// a write. Ignored for a command that has ended.
    pub fn admit(&mut self, tag: Tag, data_out: u64) {
        let Some(task) = self.tasks.get(tag).filter(|t| t.phase == TaskPhase::Arrived) else {
            return;
        };
        task.phase = TaskPhase::Admitted;
        if task.direction == Direction::Write {
            task.presented = data_out;
            task.receive_len = u32::try_from(data_out).unwrap_or(u32::MAX).min(task.expected);
        }
        let coming = task.unsolicited.min(task.receive_len);
        if coming > 0 && task.disposition == Disposition::Live {
            // Memory is allocated in whole pages.
            let page = u32::try_from(PAGE).expect("a page is small");
            let bytes = coming
                .checked_next_multiple_of(page)
                .map_or(task.receive_len, |n| n.min(task.receive_len));
            task.memory_requested = bytes;
            self.request_memory(tag, bytes, MemoryClass::UnsolicitedData);
        } else {
            self.advance(tag);
        }
        self.unblock();
    }

    fn push(&mut self, tag: Tag, action: Action) {
        if let Some(task) = self.tasks.get(tag) {
            task.queued += 1;
        }
        self.actions.push_back(action);
    }

    fn request_memory(&mut self, tag: Tag, bytes: u32, class: MemoryClass) {
        self.push(tag, Action::Grant { tag, bytes: bytes as usize, class });
    }

    /// Answers [`Action::Grant`]. Ignored for a command that has ended.
    ///
    /// # Panics
    /// If the size of the memory differs from the requested one.
    pub fn grant(&mut self, tag: Tag, memory: BufsMut) {
        let Some(task) = self.tasks.get(tag).filter(|t| t.phase == TaskPhase::Admitted) else {
            return;
        };
        if task.disposition != Disposition::Live {
            return;
        }
        let bytes: usize = memory.iter().map(|b| b.len()).sum();
        assert_eq!(
            bytes,
            (task.memory_requested - task.memory_granted) as usize,
            "memory for {tag:?}"
        );
        task.memory_granted = task.memory_requested;
        task.data.extend(memory);
        self.unblock();
        self.advance(tag);
    }

    /// Resumes reception of data whose destination has been decided.
    pub(super) fn unblock(&mut self) {
        let Some((tag, offset)) = self.receiver.blocked_on() else { return };
        let end =
            offset.saturating_add(u32::try_from(self.receiver.segment_len()).unwrap_or(u32::MAX));
        if self.tasks.get(tag).is_none_or(|t| t.can_receive_to(end)) {
            self.receiver.resume();
        }
    }

    /// Advances an admitted command as far as possible without the initiator or the driver.
    pub(super) fn advance(&mut self, tag: Tag) {
        let most = usize::from(self.params.max_outstanding_r2t);
        // Whole words, so that no padding is needed in between.
        let burst = self.params.max_burst & !3;
        let Some(task) = self.tasks.get(tag) else { return };
        let waits = task.memory_requested > task.memory_granted || task.is_unsolicited();
        if task.phase != TaskPhase::Admitted || task.disposition != Disposition::Live || waits {
            return;
        }
        if task.memory_granted < task.receive_len {
            let bytes = task.receive_len - task.memory_granted;
            task.memory_requested = task.receive_len;
            return self.request_memory(tag, bytes, MemoryClass::SolicitedData);
        }
        while let Some(task) = self.tasks.get(tag)
            && task.next_unrequested < task.receive_len
            && task.data_out_sequences.len() < most
        {
            let len = (task.receive_len - task.next_unrequested).min(burst);
            self.send_r2t(tag, len);
        }
        let Some(task) = self.tasks.get(tag) else { return };
        if task.data_out_sequences.is_empty() {
            task.phase = TaskPhase::Running;
            let data = Bufs::from(std::mem::take(&mut task.data));
            self.push(tag, Action::Run { tag, data });
        }
    }

    /// Requests the next `len` bytes from the initiator (RFC 7143 11.8).
    fn send_r2t(&mut self, tag: Tag, len: u32) {
        let (ttt, now) = (self.new_ttt(), self.timers.now());
        let Some(task) = self.tasks.get(tag) else { return };
        let mut pdu = R2t::zeroed();
        pdu.flags = FINAL;
        pdu.lun = task.lun;
        pdu.itt = U32::new(task.itt);
        pdu.ttt = U32::new(ttt);
        pdu.r2t_sn = U32::new(task.r2ts);
        pdu.offset = U32::new(task.next_unrequested);
        pdu.desired_len = U32::new(len);
        let end = task.next_unrequested + len;
        task.data_out_sequences.push(DataOutSequence {
            ttt,
            at: task.next_unrequested,
            end,
            data_sn: 0,
        });
        task.next_unrequested = end;
        task.r2ts = task.r2ts.wrapping_add(1);
        task.last_data_at = now;
        self.timers.expect_data(self.config.data_timeout);
        self.send(pdu, StatSnUse::Report);
    }

    /// Fails the command with `fault`, once all data in transit has arrived (RFC 7143 7.8).
    pub(super) fn fail(&mut self, tag: Tag, fault: TransferFault) {
        let Some(task) = self.tasks.get(tag).filter(|t| t.disposition == Disposition::Live) else {
            return;
        };
        task.disposition = Disposition::Failed(fault);
        task.data.clear();
        self.request_abort(tag);
        self.unblock();
        self.respond_if_data_done(tag);
    }

    /// Asks the driver to abort a command that it has not ended, once.
    pub(super) fn request_abort(&mut self, tag: Tag) {
        let Some(task) = self.tasks.get(tag) else { return };
        if task.phase != TaskPhase::Ended && !task.abort_requested {
            task.abort_requested = true;
            self.push(tag, Action::Abort { tag });
        }
    }
}

fn direction(command: &ScsiCommand) -> Direction {
    if command.reads() {
        Direction::Read
    } else if command.writes() {
        Direction::Write
    } else {
        Direction::None
    }
}

/// Some initiators set an expected length for commands that transfer nothing.
fn expected(command: &ScsiCommand) -> u32 {
    match direction(command) {
        Direction::None => 0,
        Direction::Read | Direction::Write => command.expected_len.get(),
    }
}
