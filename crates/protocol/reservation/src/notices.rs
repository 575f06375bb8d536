//! What a change means for those who did not make it.

use crate::party::Party;
use crate::table::{Table, What};

/// What a party must be told, or have done to it, once.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Notice {
    /// The unit was reset with all units of its target.
    TargetReset,
    /// The unit was reset.
    UnitReset,
    /// Another changed the mode pages.
    Modes,
    /// RESERVATIONS PREEMPTED: its registration was removed with all others.
    ReservationsPreempted,
    /// RESERVATIONS RELEASED: the reservation that gave registrants rights is gone or another.
    ReservationsReleased,
    /// REGISTRATIONS PREEMPTED: its registration was removed.
    RegistrationsPreempted,
    /// Its commands are to be aborted, but for the one that asks for it.
    Aborted,
}

impl Notice {
    /// All of them.
    pub const ALL: [Self; 7] = [
        Self::TargetReset,
        Self::UnitReset,
        Self::Modes,
        Self::ReservationsPreempted,
        Self::ReservationsReleased,
        Self::RegistrationsPreempted,
        Self::Aborted,
    ];

    const fn bit(self) -> u8 {
        1 << self as u8
    }
}

/// A set of notices.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Notices(u8);

impl Notices {
    /// No notice.
    pub const NONE: Self = Self(0);

    /// Whether there is none.
    #[must_use]
    pub const fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// Whether `notice` is one of them.
    #[must_use]
    pub const fn contains(self, notice: Notice) -> bool {
        self.0 & notice.bit() != 0
    }

    /// Those of both.
    #[must_use]
    pub const fn union(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// Each of them.
    pub fn iter(self) -> impl Iterator<Item = Notice> {
        Notice::ALL.into_iter().filter(move |notice| self.contains(*notice))
    }

    fn add(&mut self, notice: Notice, applies: bool) {
        self.0 |= if applies { notice.bit() } else { 0 };
    }
}

impl FromIterator<Notice> for Notices {
    fn from_iter<I: IntoIterator<Item = Notice>>(notices: I) -> Self {
        Self(notices.into_iter().fold(0, |set, notice| set | notice.bit()))
    }
}

impl Table {
    /// What `party` must be told when `new` takes the place of `old`. It is exact if `new` is the
    /// successor of `old`. If there were tables in between (a node was away) it is what the
    /// difference of the two alone can mean, rather too much than too little.
    #[must_use]
    pub fn notices(old: &Self, new: &Self, party: &Party) -> Notices {
        if (old.generation, old.era) == (new.generation, new.era) {
            // With the seat through which it came a RESERVE is gone, though nobody has changed the table.
            let lost = is_sole(old, party) && !is_sole(new, party);
            return lost.then_some(Notice::ReservationsPreempted).into_iter().collect();
        }
        let successor = old.era == new.era && old.generation.checked_add(1) == Some(new.generation);
        match &new.last {
            Some(last) if successor => {
                let is_author = last.by.as_ref() == Some(party);
                told(old, new, party, last.what, is_author)
            }
            _ => difference(old, new, party),
        }
    }
}

/// What a change says to a party; `is_author`: it made the change.
fn told(old: &Table, new: &Table, party: &Party, what: What, is_author: bool) -> Notices {
    let had = old.registrant(party);
    let has = new.registrant(party).is_some();
    let mut notices = Notices::NONE;
    match what {
        What::Quiet => {}
        // SPC-4 5.12.11.2.2 and 5.12.11.2.3.
        What::Released => notices.add(Notice::ReservationsReleased, has && !is_author),
        // SPC-4 5.12.11.2.7.
        What::Cleared => {
            let lost = had.is_some() || is_sole(old, party);
            notices.add(Notice::ReservationsPreempted, lost && !is_author);
        }
        // SPC-4 5.12.11.2.4.3 e and f, 5.12.11.2.5 d, and for aborts 5.12.11.2.6, which makes no
        // exception of the one who asks.
        What::Preempted { victim, changed, abort } => {
            let lost = had.is_some() && !has;
            let hit = had.is_some_and(|r| victim == 0 || r.key == victim);
            notices.add(Notice::RegistrationsPreempted, lost && !is_author);
            notices.add(Notice::ReservationsReleased, changed && has && !is_author);
            notices.add(Notice::Aborted, abort && hit);
        }
        // SPC-4 6.11 and SAM-5 6.3.
        What::Modes => notices.add(Notice::Modes, !is_author),
        // SAM-5 5.3.1: who asks for it sees to its own commands.
        What::TasksCleared => notices.add(Notice::Aborted, !is_author),
        What::Reset { target } => {
            notices.add(if target { Notice::TargetReset } else { Notice::UnitReset }, true);
        }
    }
    notices
}

/// What may have happened to a party between two tables.
fn difference(old: &Table, new: &Table, party: &Party) -> Notices {
    let had = old.registrant(party).is_some();
    let has = new.registrant(party).is_some();
    let kind = |table: &Table| table.reservation.as_ref().map(|held| held.kind);
    let ended = kind(old).is_some() && kind(old) != kind(new);
    let mut notices = Notices::NONE;
    notices.add(Notice::TargetReset, old.era != new.era);
    notices.add(Notice::UnitReset, old.era == new.era && old.resets != new.resets);
    notices.add(Notice::Modes, old.modes != new.modes);
    // By CLEAR or by PREEMPT, which cannot be told apart; or by itself, which is seldom.
    notices.add(Notice::RegistrationsPreempted, had && !has);
    notices.add(Notice::ReservationsPreempted, had && !has);
    notices.add(Notice::ReservationsReleased, had && has && ended);
    // Whose commands is not known. A write of the wrong one is worse than a command sent twice.
    notices.add(Notice::Aborted, new.aborted > old.generation);
    notices
}

fn is_sole(table: &Table, party: &Party) -> bool {
    table.sole.as_ref().is_some_and(|sole| sole.party == *party)
}
