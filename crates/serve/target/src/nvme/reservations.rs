//! Reservations of hosts: commands that change or report a volume's table, and notifications of
//! changes (RFD 0013, RFD 0019).

use std::cell::Cell;
use std::rc::Rc;

use block::{Bufs, BufsMut, Error};
use nvme::entry::NSID_ALL;
use nvme::{Completion, Sqe, Status, Tag, write_report};
use reservation::{Change, Notification, Notifications, Table};
use tokio::sync::oneshot;
use volume::ReservationChangeError;

use super::HostConnection;
use super::association::RETURN_DATA_CLASS;
use super::tasks::{PersistenceCommand, Task, Wait};
use crate::catalog::VolumeId;
use crate::nvme_controllers::Event;
use crate::served_volumes::ServedVolume;

/// A Reservation Report, in `memory`.
pub(super) fn report(table: &Table, mut memory: BufsMut) -> Bufs {
    write_report(table, &mut memory);
    memory.into()
}

impl HostConnection {
    /// Subscribes the admin queue to reservation changes by others, for all volumes of its
    /// controller.
    pub(super) fn watch_reservations(&mut self) {
        if self.queue.is_none_or(|queue| queue.qid != 0) {
            return;
        }
        let volumes = self.volumes();
        self.callers.borrow_mut().retain(|id, _| volumes.iter().any(|served| served.id == *id));
        for served in volumes {
            self.caller(&served);
        }
    }

    /// A change of a volume's reservations affects the host: the admin queue notifies it, the
    /// others end commands (NVMe Base 2.0, 7.2: Preempt and Abort).
    pub(super) fn on_reservation_notifications(
        &mut self,
        volume: VolumeId,
        notifications: Notifications,
    ) {
        let Some(queue) = self.queue else { return };
        let server = Rc::clone(self.server());
        let of_volume = |c: &mut nvme::Controller| -> Vec<u32> {
            let of = c.namespaces().iter().filter(|(_, ns)| ns.uuid == volume.0);
            of.map(|(nsid, _)| *nsid).collect()
        };
        for nsid in server.nvme.with_controller(queue.cntlid, of_volume).unwrap_or_default() {
            if queue.qid == 0 {
                server
                    .nvme
                    .with_controller(queue.cntlid, |c| c.reservations_changed(nsid, notifications));
            } else if notifications.contains(Notification::AbortCommands) {
                self.abort_preempted(nsid);
            }
        }
        self.on_controller();
    }

    /// Ends the commands for a namespace: at once those not yet in the volume, the others when the
    /// volume completes them.
    fn abort_preempted(&mut self, nsid: u32) {
        for tag in self.tasks.io_of(nsid) {
            match self.tasks.get(tag) {
                Some(Task::Running(running)) => {
                    running.is_preempted = true;
                    running.commands.abort();
                }
                // An earlier request of the preempted host must not undo the preemption.
                Some(Task::AccessingReservations { is_wanted: wanted, .. }) => wanted.set(false),
                Some(task @ (Task::Planned { .. } | Task::FusedFirst(_))) => {
                    let Some(sqe) = task.sqe() else { continue };
                    let completion = self.controller(|c, qid| c.fail_preempted(qid, &sqe));
                    self.complete(tag, completion, &Bufs::new());
                }
                _ => {}
            }
        }
    }

    /// An admin command about reservations begins.
    pub(super) fn on_persistence_command(&mut self, tag: Tag, sqe: Sqe, what: PersistenceCommand) {
        match what {
            PersistenceCommand::Get { nsid } => match self.volume(nsid) {
                Some(served) => self.read_reservations(tag, sqe, &served, None),
                None => self.complete_failed(tag, self.unavailable_status(nsid)),
            },
            PersistenceCommand::Set { nsid, persist: persists } => {
                let one =
                    || self.volume(nsid).map(|one| vec![one]).ok_or(self.unavailable_status(nsid));
                let volumes = if nsid == NSID_ALL { self.all_volumes() } else { one() };
                match volumes {
                    Ok(volumes) => self.change_reservations(
                        tag,
                        sqe,
                        &volumes,
                        Change::SetPersistence(persists),
                    ),
                    Err(status) => self.complete_failed(tag, status),
                }
            }
        }
    }

    /// Changes the reservations of volumes, one after the other, skipping those without any.
    pub(super) fn change_reservations(
        &mut self,
        tag: Tag,
        sqe: Sqe,
        of: &[Rc<ServedVolume>],
        change: Change,
    ) {
        let keepers: Vec<_> = of
            .iter()
            .filter_map(|s| Some((Rc::clone(&s.volume), self.caller(s).nexus()?.clone())))
            .collect();
        if keepers.is_empty() && sqe.nsid.get() != NSID_ALL {
            return self.complete_failed(tag, Status::INVALID_OPCODE.do_not_retry());
        }
        let Some((wait, wanted)) = self.begin_reservation_wait(tag, sqe, None) else { return };
        let (inbox, is_alive) = (self.context.inbox.clone(), Rc::clone(&self.is_alive));
        tokio::task::spawn_local(async move {
            let mut result = Ok(());
            for (volume, party) in keepers {
                let (answer, answered) = oneshot::channel();
                // A change that the host gave up with its connection must not happen later.
                let (is_alive, wanted) = (Rc::clone(&is_alive), Rc::clone(&wanted));
                let wanted = move || is_alive.get() && wanted.get();
                let done = move |result| {
                    // The receiver always waits to the end.
                    let _ = answer.send(result);
                };
                volume.change_reservations(party, change.clone(), wanted, done);
                result = answered
                    .await
                    .unwrap_or(Err(ReservationChangeError::DeviceError(Error::Aborted)));
                if result.is_err() {
                    break;
                }
            }
            inbox.push(Event::ReservationsChanged { tag, wait, result });
        });
    }

    pub(super) fn on_reservations_changed(
        &mut self,
        tag: Tag,
        wait: u64,
        result: Result<(), ReservationChangeError>,
    ) {
        let Some((sqe, _)) = self.take_reservation_wait(tag, wait) else { return };
        let completion = match result {
            Ok(()) => Completion::OK,
            Err(ReservationChangeError::Rejected(why)) => {
                self.controller(|c, qid| c.fail_refused_change(qid, &sqe, why))
            }
            Err(ReservationChangeError::DeviceError(e)) => {
                self.controller(|c, qid| c.fail(qid, &sqe, e.into()))
            }
        };
        self.complete(tag, completion, &Bufs::new());
    }

    /// Reads the reservations of a volume, for a `report` of so many bytes or for whether they
    /// persist.
    pub(super) fn read_reservations(
        &mut self,
        tag: Tag,
        sqe: Sqe,
        served: &ServedVolume,
        report: Option<u32>,
    ) {
        let Some((wait, _)) = self.begin_reservation_wait(tag, sqe, report) else { return };
        let (inbox, volume) = (self.context.inbox.clone(), Rc::clone(&served.volume));
        tokio::task::spawn_local(async move {
            let result = volume.read_reservations().await;
            inbox.push(Event::ReservationsRead { tag, wait, result });
        });
    }

    pub(super) fn on_reservations_read(
        &mut self,
        tag: Tag,
        wait: u64,
        result: Result<Table, Error>,
    ) {
        let Some((sqe, report)) = self.take_reservation_wait(tag, wait) else { return };
        let completion = match (result, report) {
            (Ok(table), Some(bytes)) => {
                self.tasks
                    .set(tag, Task::Reporting { table: Box::new(table), wait: Wait::default() });
                return self.on_grant(tag, bytes, RETURN_DATA_CLASS);
            }
            (Ok(table), None) => Completion::ok(table.persist.into()),
            (Err(e), _) => self.controller(|c, qid| c.fail(qid, &sqe, e.into())),
        };
        self.complete(tag, completion, &Bufs::new());
    }

    /// Starts a command's wait for its volume's table; returns the number of the wait, and the flag
    /// whether it is still wanted.
    fn begin_reservation_wait(
        &mut self,
        tag: Tag,
        sqe: Sqe,
        report: Option<u32>,
    ) -> Option<(u64, Rc<Cell<bool>>)> {
        let wanted = Rc::new(Cell::new(true));
        let task = Task::AccessingReservations {
            sqe,
            report,
            is_wanted: Rc::clone(&wanted),
            wait: Wait::default(),
        };
        self.tasks.set(tag, task);
        Some((self.tasks.begin_wait(tag)?, wanted))
    }

    /// Takes the command that waits under this number.
    fn take_reservation_wait(&mut self, tag: Tag, wait: u64) -> Option<(Sqe, Option<u32>)> {
        if !self.tasks.is_waiting(tag, wait) {
            return None;
        }
        match self.tasks.get(tag) {
            Some(Task::AccessingReservations { sqe, report, .. }) => Some((*sqe, *report)),
            _ => None,
        }
    }
}
