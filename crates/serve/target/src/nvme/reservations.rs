//! Reservations of hosts: commands that change or tell the table of a volume, and what hosts hear of
//! changes (RFD 0013, RFD 0019).

use std::cell::Cell;
use std::rc::Rc;

use block::{Bufs, BufsMut, Error};
use nvme::entry::NSID_ALL;
use nvme::{Completion, Sqe, Status, Tag, write_report};
use reservation::{Change, Notice, Notices, Table};
use tokio::sync::oneshot;
use volume::Unaltered;

use super::association::RETURNED;
use super::tasks::{Consultation, Task, Wait};
use super::{Event, Host};
use crate::catalog::VolumeId;
use crate::server::Served;

/// A Reservation Report, in memory that was got for it.
pub(super) fn report(table: &Table, mut memory: BufsMut) -> Bufs {
    write_report(table, &mut memory);
    memory.into()
}

impl Host {
    /// The admin queue hears of what others do to reservations, of all volumes of its controller.
    pub(super) fn listen(&mut self) {
        if self.seat.is_none_or(|seat| seat.qid != 0) {
            return;
        }
        let volumes = self.volumes();
        self.callers.borrow_mut().retain(|id, _| volumes.iter().any(|served| served.id == *id));
        for served in volumes {
            self.caller(&served);
        }
    }

    /// What a change of a volume's reservations means to the host: for the admin queue to tell, and
    /// for the others to end commands (NVMe Base 2.0, 7.2: Preempt and Abort).
    pub(super) fn on_told(&mut self, volume: VolumeId, notices: Notices) {
        let Some(seat) = self.seat else { return };
        let server = Rc::clone(self.server());
        let of_volume = |c: &mut nvme::Controller| -> Vec<u32> {
            let of = c.namespaces().iter().filter(|(_, ns)| ns.uuid == volume.0);
            of.map(|(nsid, _)| *nsid).collect()
        };
        for nsid in server.nvme.with(seat.cntlid, of_volume).unwrap_or_default() {
            if seat.qid == 0 {
                server.nvme.with(seat.cntlid, |c| c.reservations_changed(nsid, notices));
            } else if notices.contains(Notice::Aborted) {
                self.give_way(nsid);
            }
        }
        self.on_controller();
    }

    /// Ends the commands for a namespace: at once those that the volume does not have, the others
    /// when it says so.
    fn give_way(&mut self, nsid: u32) {
        for tag in self.tasks.io_of(nsid) {
            match self.tasks.get(tag) {
                Some(Task::Running(running)) => {
                    running.is_preempted = true;
                    running.commands.abort();
                }
                // What the loser asked for before must not undo what was done to it.
                Some(Task::Asking { wanted, .. }) => wanted.set(false),
                Some(task @ (Task::Planned { .. } | Task::Half(_))) => {
                    let Some(sqe) = task.sqe() else { continue };
                    let completion = self.controller(|c, qid| c.preempted(qid, &sqe));
                    self.complete(tag, completion, &Bufs::new());
                }
                _ => {}
            }
        }
    }

    /// An admin command about reservations begins.
    pub(super) fn on_consultation(&mut self, tag: Tag, sqe: Sqe, what: Consultation) {
        match what {
            Consultation::TellPersistence { nsid } => match self.volume(nsid) {
                Some(served) => self.consult(tag, sqe, &served, None),
                None => self.complete_failed(tag, self.not_here(nsid)),
            },
            Consultation::Persist { nsid, persists } => {
                let one = || self.volume(nsid).map(|one| vec![one]).ok_or(self.not_here(nsid));
                let volumes = if nsid == NSID_ALL { self.all_volumes() } else { one() };
                match volumes {
                    Ok(volumes) => self.alter(tag, sqe, &volumes, Change::Persist(persists)),
                    Err(status) => self.complete_failed(tag, status),
                }
            }
        }
    }

    /// Changes the reservations of volumes, one after the other, those that keep some.
    pub(super) fn alter(&mut self, tag: Tag, sqe: Sqe, of: &[Rc<Served>], change: Change) {
        let keepers: Vec<_> = of
            .iter()
            .filter_map(|s| Some((Rc::clone(&s.volume), self.caller(s).party()?.clone())))
            .collect();
        if keepers.is_empty() && sqe.nsid.get() != NSID_ALL {
            return self.complete_failed(tag, Status::INVALID_OPCODE.do_not_retry());
        }
        let Some((wait, wanted)) = self.asks(tag, sqe, None) else { return };
        let (inbox, lives) = (self.place.inbox.clone(), Rc::clone(&self.lives));
        tokio::task::spawn_local(async move {
            let mut result = Ok(());
            for (volume, party) in keepers {
                let (answer, answered) = oneshot::channel();
                // What a host has given up with its connection must not happen later.
                let (lives, wanted) = (Rc::clone(&lives), Rc::clone(&wanted));
                let wanted = move || lives.get() && wanted.get();
                let done = move |result| {
                    // Whoever waits for it does so to the end.
                    let _ = answer.send(result);
                };
                volume.alter(party, change.clone(), wanted, done);
                result = answered.await.unwrap_or(Err(Unaltered::Failed(Error::Aborted)));
                if result.is_err() {
                    break;
                }
            }
            inbox.push(Event::Altered { tag, wait, result });
        });
    }

    pub(super) fn on_altered(&mut self, tag: Tag, wait: u64, result: Result<(), Unaltered>) {
        let Some((sqe, _)) = self.asked(tag, wait) else { return };
        let completion = match result {
            Ok(()) => Completion::OK,
            Err(Unaltered::Refused(why)) => self.controller(|c, qid| c.refused(qid, &sqe, why)),
            Err(Unaltered::Failed(e)) => self.controller(|c, qid| c.failed(qid, &sqe, e.into())),
        };
        self.complete(tag, completion, &Bufs::new());
    }

    /// Looks up the reservations of a volume, for a `report` of so many bytes or for whether they
    /// persist.
    pub(super) fn consult(&mut self, tag: Tag, sqe: Sqe, served: &Served, report: Option<u32>) {
        let Some((wait, _)) = self.asks(tag, sqe, report) else { return };
        let (inbox, volume) = (self.place.inbox.clone(), Rc::clone(&served.volume));
        tokio::task::spawn_local(async move {
            let result = volume.reservations().await;
            inbox.push(Event::Consulted { tag, wait, result });
        });
    }

    pub(super) fn on_consulted(&mut self, tag: Tag, wait: u64, result: Result<Table, Error>) {
        let Some((sqe, report)) = self.asked(tag, wait) else { return };
        let completion = match (result, report) {
            (Ok(table), Some(bytes)) => {
                self.tasks
                    .set(tag, Task::Reporting { table: Box::new(table), wait: Wait::default() });
                return self.on_grant(tag, bytes, RETURNED);
            }
            (Ok(table), None) => Completion::ok(table.persists.into()),
            (Err(e), _) => self.controller(|c, qid| c.failed(qid, &sqe, e.into())),
        };
        self.complete(tag, completion, &Bufs::new());
    }

    /// A command begins to wait for its volume's table; the number that what comes has to bear, and
    /// whether it is wanted still.
    fn asks(&mut self, tag: Tag, sqe: Sqe, report: Option<u32>) -> Option<(u64, Rc<Cell<bool>>)> {
        let wanted = Rc::new(Cell::new(true));
        let task = Task::Asking { sqe, report, wanted: Rc::clone(&wanted), wait: Wait::default() };
        self.tasks.set(tag, task);
        Some((self.tasks.begin_wait(tag)?, wanted))
    }

    /// The command that has waited for this.
    fn asked(&mut self, tag: Tag, wait: u64) -> Option<(Sqe, Option<u32>)> {
        if !self.tasks.is_waiting(tag, wait) {
            return None;
        }
        match self.tasks.get(tag) {
            Some(Task::Asking { sqe, report, .. }) => Some((*sqe, *report)),
            _ => None,
        }
    }
}
