//! A SCSI command from its arrival to its start: admission, memory, R2Ts.

use rt::buf::{Bufs, BufsMut, Class};
use rt::memory::PAGE;
use smallvec::SmallVec;
use zerocopy::big_endian::U32;

use super::Connection;
use super::action::{Action, Arrived, Direction};
use super::dispatch::Subject;
use super::send::Status;
use super::task::{Fate, Fault, Phase, Task, Transfer};
use crate::pdu::{Extended, FINAL, NO_TAG, R2t, RejectReason, ScsiCommand};
use crate::stream::{Sink, Tag};

/// Most commands for immediate delivery that may be outstanding; they take no place in the window.
const IMMEDIATE_COMMANDS: usize = 16;

impl Connection {
    /// A SCSI command has arrived; says where its immediate data goes.
    pub(super) fn on_command(&mut self) -> (Sink, Subject) {
        let command = *ScsiCommand::of(self.receiver.basic());
        let numbered = command.first & crate::pdu::IMMEDIATE == 0;
        let checked = self.check_command(&command, numbered);
        let extended_cdb = match checked {
            Ok(cdb) => cdb,
            Err(reason) => {
                if numbered {
                    self.window.answered();
                }
                self.reject(reason);
                return (Sink::Discard, Subject::Ignored);
            }
        };
        let (task, fault) = self.task_of(&command, numbered);
        let immediate = task.immediate;
        if !task.transfers.is_empty() {
            self.clock.expect_data(self.config.data_timeout);
        }
        let tag = self.tasks.insert(task);
        if let Some(fault) = fault {
            // The driver never hears of it.
            if let Some(task) = self.tasks.get(tag) {
                task.phase = Phase::Over;
            }
            self.fail(tag, fault);
        } else {
            let arrived = Arrived {
                tag,
                lun: command.lun,
                cdb: command.cdb,
                extended_cdb,
                attribute: command.attribute(),
                direction: direction(&command),
                expected_len: expected(&command),
            };
            self.push(tag, Action::Arrived(arrived));
        }
        if immediate {
            (Sink::Task(tag, 0), Subject::Command(tag))
        } else {
            (Sink::Discard, Subject::Ignored)
        }
    }

    /// RFC 7143 11.3: what a command must not say. Gives the rest of a long CDB.
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
        let ahs = Extended::parse(self.receiver.ahs());
        let ahs = ahs.map_err(|_| RejectReason::InvalidField)?;
        if (command.reads() && command.writes()) || ahs.bidirectional_read.is_some() {
            return Err(RejectReason::Unsupported);
        }
        // Data, or the promise of it, without W.
        if !command.writes() && (self.receiver.segment() > 0 || !command.is_final()) {
            return Err(RejectReason::InvalidField);
        }
        Ok(ahs.cdb.unwrap_or_default().into())
    }

    /// What to keep about a command, and what is wrong with its unsolicited data (RFC 7143
    /// 4.2.5.2, 11.4.7.2).
    fn task_of(&self, command: &ScsiCommand, numbered: bool) -> (Task, Option<Fault>) {
        let expected = expected(command);
        let immediate = u32::try_from(self.receiver.segment()).unwrap_or(u32::MAX);
        let burst = self.params.first_burst.min(expected);
        let mut fault = None;
        if immediate > burst {
            fault = Some(Fault::AMOUNT);
        }
        if immediate > 0 && !self.params.immediate_data {
            fault = Some(Fault::UNEXPECTED_DATA);
        }
        let mut transfers = SmallVec::new();
        if !command.is_final() {
            if self.params.initial_r2t {
                fault = Some(Fault::UNEXPECTED_DATA);
            }
            transfers.push(Transfer { ttt: NO_TAG, at: immediate, end: burst, data_sn: 0 });
        }
        let task = Task {
            itt: command.itt.get(),
            lun: command.lun,
            numbered,
            direction: direction(command),
            expected,
            phase: Phase::Arrived,
            fate: Fate::Live,
            told: false,
            queued: 0,
            awaited_by: 0,
            presented: 0,
            want: 0,
            asked: 0,
            granted: 0,
            data: BufsMut::new(),
            immediate: immediate > 0,
            unsolicited: if transfers.is_empty() { immediate } else { burst },
            transfers,
            next: 0,
            r2ts: 0,
            since: self.clock.now(),
            parked: None,
            sending: None,
        };
        (task, fault)
    }

    /// Answers [`Action::Arrived`]: the command takes `data_out` bytes, or none if it is not a
    /// write. Ignored for a command that has been ended.
    pub fn admit(&mut self, tag: Tag, data_out: u64) {
        let Some(task) = self.tasks.get(tag).filter(|t| t.phase == Phase::Arrived) else { return };
        task.phase = Phase::Admitted;
        if task.direction == Direction::Write {
            task.presented = data_out;
            task.want = u32::try_from(data_out).unwrap_or(u32::MAX).min(task.expected);
        }
        let coming = task.unsolicited.min(task.want);
        if coming > 0 && task.fate == Fate::Live {
            // The rest of the page comes with it.
            let page = u32::try_from(PAGE).expect("a page is small");
            let bytes =
                coming.checked_next_multiple_of(page).map_or(task.want, |n| n.min(task.want));
            task.asked = bytes;
            self.ask(tag, bytes, Class::Arriving);
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

    fn ask(&mut self, tag: Tag, bytes: u32, class: Class) {
        self.push(tag, Action::Grant { tag, bytes: bytes as usize, class });
    }

    /// Answers [`Action::Grant`]. Ignored for a command that has been ended.
    ///
    /// # Panics
    /// If the memory is not as much as was asked for.
    pub fn grant(&mut self, tag: Tag, memory: BufsMut) {
        let Some(task) = self.tasks.get(tag).filter(|t| t.phase == Phase::Admitted) else { return };
        if task.fate != Fate::Live {
            return;
        }
        let bytes: usize = memory.iter().map(|b| b.len()).sum();
        assert_eq!(bytes, (task.asked - task.granted) as usize, "memory for {tag:?}");
        task.granted = task.asked;
        task.data.extend(memory);
        self.unblock();
        self.advance(tag);
    }

    /// Goes on receiving data whose place has been decided.
    pub(super) fn unblock(&mut self) {
        let Some((tag, offset)) = self.receiver.waits_for() else { return };
        let end = offset.saturating_add(u32::try_from(self.receiver.segment()).unwrap_or(u32::MAX));
        if self.tasks.get(tag).is_none_or(|t| t.takes(end)) {
            self.receiver.resume();
        }
    }

    /// Takes an admitted command as far as it goes without the initiator or the driver.
    pub(super) fn advance(&mut self, tag: Tag) {
        let most = usize::from(self.params.max_outstanding_r2t);
        // Whole words, so that no padding comes between.
        let burst = self.params.max_burst & !3;
        let Some(task) = self.tasks.get(tag) else { return };
        let waits = task.asked > task.granted || task.is_unsolicited();
        if task.phase != Phase::Admitted || task.fate != Fate::Live || waits {
            return;
        }
        if task.granted < task.want {
            let bytes = task.want - task.granted;
            task.asked = task.want;
            return self.ask(tag, bytes, Class::Solicited);
        }
        while let Some(task) = self.tasks.get(tag)
            && task.next < task.want
            && task.transfers.len() < most
        {
            let len = (task.want - task.next).min(burst);
            self.send_r2t(tag, len);
        }
        let Some(task) = self.tasks.get(tag) else { return };
        if task.transfers.is_empty() {
            task.phase = Phase::Running;
            let data = Bufs::from(std::mem::take(&mut task.data));
            self.push(tag, Action::Run { tag, data });
        }
    }

    /// Asks the initiator for the next `len` bytes (RFC 7143 11.8).
    fn send_r2t(&mut self, tag: Tag, len: u32) {
        let (ttt, now) = (self.new_ttt(), self.clock.now());
        let Some(task) = self.tasks.get(tag) else { return };
        let mut pdu = R2t::zeroed();
        pdu.flags = FINAL;
        pdu.lun = task.lun;
        pdu.itt = U32::new(task.itt);
        pdu.ttt = U32::new(ttt);
        pdu.r2t_sn = U32::new(task.r2ts);
        pdu.offset = U32::new(task.next);
        pdu.desired_len = U32::new(len);
        let end = task.next + len;
        task.transfers.push(Transfer { ttt, at: task.next, end, data_sn: 0 });
        task.next = end;
        task.r2ts = task.r2ts.wrapping_add(1);
        task.since = now;
        self.clock.expect_data(self.config.data_timeout);
        self.send(pdu, Status::Tell);
    }

    /// The command will fail with `fault`. The initiator is told when all the data that is on
    /// its way has come (RFC 7143 7.8).
    pub(super) fn fail(&mut self, tag: Tag, fault: Fault) {
        let Some(task) = self.tasks.get(tag).filter(|t| t.fate == Fate::Live) else { return };
        task.fate = Fate::Failed(fault);
        task.data.clear();
        self.tell(tag);
        self.unblock();
        self.settle(tag);
    }

    /// Asks the driver to abort a command that it has not ended, once.
    pub(super) fn tell(&mut self, tag: Tag) {
        let Some(task) = self.tasks.get(tag) else { return };
        if task.phase != Phase::Over && !task.told {
            task.told = true;
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

/// Some initiators expect a length of commands that transfer nothing.
fn expected(command: &ScsiCommand) -> u32 {
    match direction(command) {
        Direction::None => 0,
        Direction::Read | Direction::Write => command.expected_len.get(),
    }
}
