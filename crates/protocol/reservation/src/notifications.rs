//! The effect of a change on the other initiators.

use crate::nexus::ItNexus;
use crate::table::{ChangeEffect, Table};

/// A notification to one initiator, or an action for it, due once.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Notification {
    /// The unit was reset with all units of its target.
    TargetReset,
    /// The unit was reset.
    UnitReset,
    /// Another initiator changed the mode pages.
    ModePagesChanged,
    /// RESERVATIONS PREEMPTED: its registration was removed together with all others.
    ReservationsPreempted,
    /// RESERVATIONS RELEASED: the reservation that gave registrants rights has ended or changed.
    ReservationsReleased,
    /// REGISTRATIONS PREEMPTED: its registration was removed.
    RegistrationsPreempted,
    /// Its commands must be aborted, except the one that requested this.
    AbortCommands,
}

impl Notification {
    /// All of them.
    pub const ALL: [Self; 7] = [
        Self::TargetReset,
        Self::UnitReset,
        Self::ModePagesChanged,
        Self::ReservationsPreempted,
        Self::ReservationsReleased,
        Self::RegistrationsPreempted,
        Self::AbortCommands,
    ];

    const fn bit(self) -> u8 {
        1 << self as u8
    }
}

/// A set of notifications.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Notifications(u8);

impl Notifications {
    /// No notifications.
    pub const NONE: Self = Self(0);

    /// Whether the set is empty.
    #[must_use]
    pub const fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// Whether `notice` is in the set.
    #[must_use]
    pub const fn contains(self, notice: Notification) -> bool {
        self.0 & notice.bit() != 0
    }

    /// The union.
    #[must_use]
    pub const fn union(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// Each of them.
    pub fn iter(self) -> impl Iterator<Item = Notification> {
        Notification::ALL.into_iter().filter(move |notice| self.contains(*notice))
    }

    fn add(&mut self, notice: Notification, applies: bool) {
        self.0 |= if applies { notice.bit() } else { 0 };
    }
}

impl FromIterator<Notification> for Notifications {
    fn from_iter<I: IntoIterator<Item = Notification>>(notifications: I) -> Self {
        Self(notifications.into_iter().fold(0, |set, notice| set | notice.bit()))
    }
}

impl Table {
    /// The notifications for `nexus` when `new` replaces `old`. Exact if `new` is the direct
    /// successor of `old`. Otherwise (a node was away) it is inferred from the difference of the
    /// two, rather too much than too little.
    #[must_use]
    pub fn notifications(old: &Self, new: &Self, nexus: &ItNexus) -> Notifications {
        if (old.generation, old.power_epoch) == (new.generation, new.power_epoch) {
            // An SPC-2 reservation ends with the incarnation that made it, without a change of the
            // table.
            let lost = holds_spc2_reservation(old, nexus) && !holds_spc2_reservation(new, nexus);
            return lost.then_some(Notification::ReservationsPreempted).into_iter().collect();
        }
        let successor = old.power_epoch == new.power_epoch
            && old.generation.checked_add(1) == Some(new.generation);
        match &new.last_change {
            Some(last) if successor => {
                let is_author = last.by.as_ref() == Some(nexus);
                notifications_of_change(old, new, nexus, last.effect, is_author)
            }
            _ => notifications_of_difference(old, new, nexus),
        }
    }
}

/// The notifications of a change for a nexus; `is_author`: it made the change.
fn notifications_of_change(
    old: &Table,
    new: &Table,
    nexus: &ItNexus,
    what: ChangeEffect,
    is_author: bool,
) -> Notifications {
    let was_registered = old.registrant(nexus);
    let has = new.registrant(nexus).is_some();
    let mut notifications = Notifications::NONE;
    match what {
        ChangeEffect::Silent => {}
        // SPC-4 5.12.11.2.2 and 5.12.11.2.3.
        ChangeEffect::Released => {
            notifications.add(Notification::ReservationsReleased, has && !is_author);
        }
        // SPC-4 5.12.11.2.7.
        ChangeEffect::Cleared => {
            let lost = was_registered.is_some() || holds_spc2_reservation(old, nexus);
            notifications.add(Notification::ReservationsPreempted, lost && !is_author);
        }
        // SPC-4 5.12.11.2.4.3 e and f, 5.12.11.2.5 d, and for aborts 5.12.11.2.6, which makes no
        // exception for the author.
        ChangeEffect::Preempted { preempt_key, type_changed: changed, abort } => {
            let lost = was_registered.is_some() && !has;
            let hit = was_registered.is_some_and(|r| preempt_key == 0 || r.key == preempt_key);
            notifications.add(Notification::RegistrationsPreempted, lost && !is_author);
            notifications.add(Notification::ReservationsReleased, changed && has && !is_author);
            notifications.add(Notification::AbortCommands, abort && hit);
        }
        // SPC-4 6.11 and SAM-5 6.3.
        ChangeEffect::ModePagesChanged => {
            notifications.add(Notification::ModePagesChanged, !is_author);
        }
        // SAM-5 5.3.1: the author's own commands are its own affair.
        ChangeEffect::TasksCleared => notifications.add(Notification::AbortCommands, !is_author),
        ChangeEffect::Reset { whole_target: target } => {
            notifications.add(
                if target { Notification::TargetReset } else { Notification::UnitReset },
                true,
            );
        }
    }
    notifications
}

/// The notifications inferred from the difference of two tables.
fn notifications_of_difference(old: &Table, new: &Table, nexus: &ItNexus) -> Notifications {
    let was_registered = old.registrant(nexus).is_some();
    let has = new.registrant(nexus).is_some();
    let kind = |table: &Table| table.reservation.as_ref().map(|held| held.kind);
    let ended = kind(old).is_some() && kind(old) != kind(new);
    let mut notifications = Notifications::NONE;
    notifications.add(Notification::TargetReset, old.power_epoch != new.power_epoch);
    notifications.add(
        Notification::UnitReset,
        old.power_epoch == new.power_epoch && old.reset_count != new.reset_count,
    );
    notifications.add(Notification::ModePagesChanged, old.mode_pages != new.mode_pages);
    // By CLEAR, PREEMPT or, rarely, itself: these cannot be distinguished.
    notifications.add(Notification::RegistrationsPreempted, was_registered && !has);
    notifications.add(Notification::ReservationsPreempted, was_registered && !has);
    notifications.add(Notification::ReservationsReleased, was_registered && has && ended);
    // It is unknown whose commands. A late write is worse than a command sent twice.
    notifications.add(Notification::AbortCommands, new.abort_generation > old.generation);
    notifications
}

fn holds_spc2_reservation(table: &Table, nexus: &ItNexus) -> bool {
    table.spc2_reservation.as_ref().is_some_and(|spc2| spc2.nexus == *nexus)
}
