//! An independent model of the clauses, as simple as possible, to compare the table with. Shared by
//! the property test here and the fuzz target `reservation`: bytes are read as a script of changes.
//! It is written from SPC-4 and shares no code with the crate; it keeps nothing sorted.

use std::collections::{BTreeMap, BTreeSet};

use reservation::{
    Change, Initiator, InvalidField, ItNexus, Notification, Notifications, NvmeRegisterAction,
    ReservationError, ReservationType, Rights, Table,
};
use testkit::Script;

/// Notifications per nexus.
type ExpectedNotifications = BTreeSet<(ItNexus, u8)>;

#[derive(Debug, PartialEq, Eq)]
enum Verdict {
    Done,
    Nothing,
    Refused(ReservationError),
}

/// The state that the clauses speak of.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Model {
    keys: BTreeMap<ItNexus, u64>,
    /// Type and holder; no particular one if all registrants hold it.
    held: Option<(u8, Option<ItNexus>)>,
    aptpl: bool,
    pr_generation: u32,
    sole: Option<(ItNexus, u64)>,
    modes: u128,
    resets: u32,
}

const CONFLICT: Verdict = Verdict::Refused(ReservationError::Conflict);
const FULL: Verdict = Verdict::Refused(ReservationError::InsufficientResources);

fn invalid(field: InvalidField) -> Verdict {
    Verdict::Refused(ReservationError::InvalidField(field))
}

/// 6.15.3.4: 5 and 6 are registrants only, 7 and 8 all registrants.
fn registrants_only(code: u8) -> bool {
    code == 5 || code == 6
}

fn all_registrants(code: u8) -> bool {
    code == 7 || code == 8
}

impl Model {
    fn of(table: &Table) -> Self {
        Self {
            keys: table.registrants().iter().map(|r| (r.nexus.clone(), r.key)).collect(),
            held: table.reservation.as_ref().map(|r| (r.kind.scsi(), r.holder.clone())),
            aptpl: table.persist,
            pr_generation: table.pr_generation,
            sole: table
                .spc2_reservation
                .as_ref()
                .map(|sole| (sole.nexus.clone(), sole.incarnation)),
            modes: table.mode_pages,
            resets: table.reset_count,
        }
    }

    /// 5.12.10.
    fn holders(&self) -> BTreeSet<ItNexus> {
        match &self.held {
            None => BTreeSet::new(),
            Some((_, Some(holder))) => BTreeSet::from([holder.clone()]),
            Some((_, None)) => self.keys.keys().cloned().collect(),
        }
    }

    /// 5.12.1: whether MODE SELECT is no conflict, of the unit's RESERVE as well.
    fn may_write(&self, by: &ItNexus) -> bool {
        let kept_by_another = self.sole.as_ref().is_some_and(|(party, _)| party != by);
        let allowed = match &self.held {
            None => true,
            Some((1 | 3, _)) => self.holders().contains(by),
            Some(_) => self.keys.contains_key(by),
        };
        !kept_by_another && allowed
    }

    /// All registrants but one.
    fn others(&self, than: &ItNexus) -> Vec<ItNexus> {
        self.keys.keys().filter(|party| *party != than).cloned().collect()
    }

    /// The bytes of a table with these registrations, and what it keeps free.
    fn overflows(&self) -> bool {
        let names: BTreeSet<Vec<u8>> = self
            .keys
            .keys()
            .map(|party| match &party.initiator {
                Initiator::Iscsi { name, .. } => [b"i", name.as_bytes()].concat(),
                Initiator::Host(id) => [b"h", &id[..]].concat(),
            })
            .collect();
        let names: usize = names.iter().map(|name| name.len() + 1).sum();
        self.keys.len() > 1024 || 144 + 24 * self.keys.len() + names + 450 > 45056
    }

    /// 5.12.11.2.1 and 5.12.10: a reservation whose holders are gone is released; the type it had.
    fn release_orphan(&mut self) -> Option<u8> {
        let orphan = match &self.held {
            Some((_, Some(holder))) => !self.keys.contains_key(holder),
            Some((_, None)) => self.keys.is_empty(),
            None => false,
        };
        if orphan { self.held.take().map(|(code, _)| code) } else { None }
    }

    fn step(
        &mut self,
        by: &ItNexus,
        node_incarnation: u64,
        change: &Change,
        expected_notifications: &mut ExpectedNotifications,
    ) -> Verdict {
        let mut say = |whom: Vec<ItNexus>, what: Notification| {
            expected_notifications.extend(whom.into_iter().map(|party| (party, what as u8)));
        };
        match change {
            Change::Spc2Reserve | Change::Spc2Release => {
                // 5.12.3.
                let shared = self.held.as_ref().is_some_and(|(code, _)| *code >= 5);
                if self.holders().contains(by) || shared && self.keys.contains_key(by) {
                    return Verdict::Nothing;
                }
                if !self.keys.is_empty() {
                    return CONFLICT;
                }
                let mine = self.sole.as_ref().map(|(party, _)| party == by);
                match (change, mine) {
                    (Change::Spc2Reserve, Some(false)) => CONFLICT,
                    (Change::Spc2Reserve, _) => {
                        self.become_of(|model| model.sole = Some((by.clone(), node_incarnation)))
                    }
                    (_, Some(true)) => self.become_of(|model| model.sole = None),
                    _ => Verdict::Nothing,
                }
            }
            Change::NexusLoss => {
                let mine = self.sole.as_ref().is_some_and(|(party, _)| party == by);
                self.become_of(|model| model.sole = if mine { None } else { model.sole.take() })
            }
            Change::SetModePages(_) if !self.may_write(by) => CONFLICT,
            Change::SetModePages(modes) => self.become_of(|model| model.modes = *modes),
            Change::ClearTaskSet => Verdict::Done,
            Change::Reset { .. } => {
                self.sole = None;
                self.modes = 0;
                self.resets = self.resets.wrapping_add(1);
                Verdict::Done
            }
            Change::AdminClear => {
                let sole = self.sole.take().map(|(party, _)| party);
                if self.keys.is_empty() && sole.is_none() {
                    return Verdict::Nothing;
                }
                let counts = !self.keys.is_empty();
                self.pr_generation = self.pr_generation.wrapping_add(u32::from(counts));
                say(
                    self.keys.keys().cloned().chain(sole).collect(),
                    Notification::ReservationsPreempted,
                );
                self.keys.clear();
                self.held = None;
                Verdict::Done
            }
            _ if self.sole.is_some() => CONFLICT,
            _ => self.persistent(by, change, expected_notifications),
        }
    }

    /// Changes the model, and says whether it did.
    fn become_of(&mut self, change: impl Fn(&mut Self)) -> Verdict {
        let before = self.clone();
        change(self);
        if *self == before { Verdict::Nothing } else { Verdict::Done }
    }

    /// PERSISTENT RESERVE OUT.
    fn persistent(
        &mut self,
        by: &ItNexus,
        change: &Change,
        expected_notifications: &mut ExpectedNotifications,
    ) -> Verdict {
        if let Change::Register { .. } = change {
            return self.register(by, change, expected_notifications);
        }
        if let Change::NvmeRegister { action, persist: persists } = change {
            let verdict = self.nvme_register(by, *action, expected_notifications);
            let kept = matches!(verdict, Verdict::Refused(_));
            self.aptpl = persists.filter(|_| !kept).unwrap_or(self.aptpl);
            return verdict;
        }
        if let Change::SetPersistence(persists) = change {
            return self.become_of(|model| model.aptpl = *persists);
        }
        let given = match change {
            Change::Reserve { key, .. }
            | Change::Release { key, .. }
            | Change::Clear { key }
            | Change::Preempt { key, .. }
            | Change::RegisterAndMove { key, .. } => *key,
            _ => unreachable!("no PERSISTENT RESERVE OUT"),
        };
        if self.keys.get(by) != Some(&given) {
            return CONFLICT;
        }
        let holds = self.holders().contains(by);
        match change {
            Change::Reserve { kind, .. } => match &self.held {
                None => {
                    let code = kind.scsi();
                    self.held = Some((code, (!all_registrants(code)).then(|| by.clone())));
                    Verdict::Done
                }
                Some((code, _)) if holds && *code == kind.scsi() => Verdict::Nothing,
                Some(_) => CONFLICT,
            },
            Change::Release { .. } if !holds => Verdict::Nothing,
            Change::Release { kind, .. } => {
                let code = self.held.as_ref().map_or(0, |(code, _)| *code);
                if code != kind.scsi() {
                    return Verdict::Refused(ReservationError::InvalidRelease);
                }
                self.held = None;
                if registrants_only(code) || all_registrants(code) {
                    let others = self.others(by).into_iter();
                    expected_notifications
                        .extend(others.map(|who| (who, Notification::ReservationsReleased as u8)));
                }
                Verdict::Done
            }
            Change::Clear { .. } => {
                let others = self.others(by).into_iter();
                expected_notifications
                    .extend(others.map(|who| (who, Notification::ReservationsPreempted as u8)));
                (self.keys, self.held) = (BTreeMap::new(), None);
                self.counted()
            }
            Change::Preempt { .. } => self.preempt(by, change, expected_notifications),
            _ => self.register_and_move(by, change),
        }
    }

    fn counted(&mut self) -> Verdict {
        self.pr_generation = self.pr_generation.wrapping_add(1);
        Verdict::Done
    }

    fn register(
        &mut self,
        by: &ItNexus,
        change: &Change,
        expected_notifications: &mut ExpectedNotifications,
    ) -> Verdict {
        let Change::Register {
            key,
            new_key,
            ignore_key,
            persist: persists,
            ports,
            other_initiators: also,
        } = change
        else {
            unreachable!()
        };
        let spec_i_pt = !also.is_empty();
        // The tables of 5.12.7, row by row.
        match (ignore_key, self.keys.get(by), *key, *new_key, spec_i_pt) {
            (true, _, _, _, true) => return invalid(InvalidField::SpecIPt),
            (true, _, _, _, false) => {}
            (false, None, 0, 0, _) => return Verdict::Nothing,
            (false, None, 0, _, _) => {}
            (false, None, _, _, _) => return CONFLICT,
            (false, Some(own), given, _, _) if *own != given => return CONFLICT,
            (false, Some(_), _, _, true) => return invalid(InvalidField::SpecIPt),
            (false, Some(_), _, _, false) => {}
        }
        // 5.12.7: the nexuses that it is about.
        let mut at: Vec<u16> = ports.clone();
        at.push(by.port);
        let own: BTreeSet<ItNexus> = at
            .iter()
            .map(|port| ItNexus { initiator: by.initiator.clone(), port: *port })
            .collect();
        let mut all = own.clone();
        for initiator in also {
            for port in &at {
                let party = ItNexus { initiator: initiator.clone(), port: *port };
                if self.keys.contains_key(&party) {
                    return invalid(InvalidField::TransportId);
                }
                all.insert(party);
            }
        }
        let strange = |party: &ItNexus| self.keys.get(party).is_some_and(|own| own != key);
        if !ignore_key && own.iter().any(strange) {
            return CONFLICT;
        }
        if *new_key == 0 {
            if !own.iter().any(|party| self.keys.contains_key(party)) {
                return Verdict::Nothing;
            }
            self.keys.retain(|party, _| !own.contains(party));
            if self.release_orphan().is_some_and(registrants_only) {
                let left = self.others(by).into_iter();
                expected_notifications
                    .extend(left.map(|who| (who, Notification::ReservationsReleased as u8)));
            }
        } else {
            self.keys.extend(all.into_iter().map(|party| (party, *new_key)));
            if self.overflows() {
                return FULL;
            }
        }
        self.aptpl = *persists;
        self.counted()
    }

    /// NVMe Base 2.0, 7.3.
    fn nvme_register(
        &mut self,
        by: &ItNexus,
        action: NvmeRegisterAction,
        expected_notifications: &mut ExpectedNotifications,
    ) -> Verdict {
        let (given, new) = match action {
            NvmeRegisterAction::Register { new_key } => (None, Some(new_key)),
            NvmeRegisterAction::Unregister { key } => (key, None),
            NvmeRegisterAction::Replace { key, new_key } => (key, Some(new_key)),
        };
        if new == Some(0) {
            return invalid(InvalidField::NewKey);
        }
        let own = self.keys.get(by).copied();
        let registers = matches!(action, NvmeRegisterAction::Register { .. });
        let fits = match own {
            None => registers,
            Some(own) => {
                if registers {
                    new == Some(own)
                } else {
                    given.is_none_or(|key| key == own)
                }
            }
        };
        if !fits {
            return CONFLICT;
        }
        match new {
            Some(new) => {
                self.keys.insert(by.clone(), new);
                if self.overflows() {
                    return FULL;
                }
            }
            None => {
                self.keys.remove(by);
                if self.release_orphan().is_some_and(registrants_only) {
                    let left = self.others(by).into_iter();
                    expected_notifications
                        .extend(left.map(|who| (who, Notification::ReservationsReleased as u8)));
                }
            }
        }
        self.counted()
    }

    fn preempt(
        &mut self,
        by: &ItNexus,
        change: &Change,
        expected_notifications: &mut ExpectedNotifications,
    ) -> Verdict {
        let Change::Preempt { preempt_key: victim, kind, abort, .. } = change else {
            unreachable!()
        };
        let before = self.clone();
        let identifies_holder = match &self.held {
            Some((_, Some(holder))) => self.keys.get(holder) == Some(victim),
            Some((_, None)) => *victim == 0,
            None => false,
        };
        // 5.12.11.2.4.1.
        if *victim == 0 && self.held.is_some() && !identifies_holder {
            return invalid(InvalidField::NewKey);
        }
        let hit: BTreeSet<ItNexus> = before
            .keys
            .iter()
            .filter(|(_, key)| **key == *victim || *victim == 0)
            .map(|(party, _)| party.clone())
            .collect();
        if identifies_holder {
            // 5.12.11.2.4.3.
            let Some(kind) = kind else { return invalid(InvalidField::Type) };
            self.keys.retain(|party, _| party == by || !hit.contains(party));
            let code = kind.scsi();
            self.held = Some((code, (!all_registrants(code)).then(|| by.clone())));
            if before.held.as_ref().map(|(old, _)| *old) != Some(code) {
                let left = self.others(by).into_iter();
                expected_notifications
                    .extend(left.map(|who| (who, Notification::ReservationsReleased as u8)));
            }
        } else {
            // 5.12.11.2.5.
            if !before.keys.values().any(|key| key == victim) {
                return CONFLICT;
            }
            self.keys.retain(|_, key| key != victim);
            self.release_orphan();
        }
        for party in before.others(by).into_iter().filter(|who| !self.keys.contains_key(who)) {
            expected_notifications.insert((party, Notification::RegistrationsPreempted as u8));
        }
        if *abort {
            expected_notifications
                .extend(hit.into_iter().map(|who| (who, Notification::AbortCommands as u8)));
        }
        self.counted()
    }

    fn register_and_move(&mut self, by: &ItNexus, change: &Change) -> Verdict {
        let Change::RegisterAndMove { new_key, to, unregister, persist: persists, .. } = change
        else {
            unreachable!()
        };
        // 5.12.8.
        match &self.held {
            None => return invalid(InvalidField::ServiceAction),
            Some((_, Some(holder))) if holder == by => {}
            Some(_) => return CONFLICT,
        }
        if *new_key == 0 {
            return invalid(InvalidField::NewKey);
        }
        if to.initiator == by.initiator {
            return invalid(InvalidField::TransportId);
        }
        self.keys.insert(to.clone(), *new_key);
        self.held = self.held.take().map(|(code, _)| (code, Some(to.clone())));
        if *unregister {
            self.keys.remove(by);
        }
        self.aptpl = *persists;
        if self.overflows() { FULL } else { self.counted() }
    }

    /// 5.12.1 and SPC-2 5.5.1.
    fn rights(&self, party: &ItNexus) -> Rights {
        let registered = self.keys.contains_key(party);
        let sole = self.sole.as_ref().is_none_or(|(owner, _)| owner == party);
        let holds = self.holders().contains(party);
        let (reads, writes) = match self.held.as_ref().map(|(code, _)| *code) {
            None => (true, true),
            Some(_) if holds => (true, true),
            Some(1) => (true, false),
            Some(3) => (false, false),
            Some(5 | 7) => (true, registered),
            _ => (registered, registered),
        };
        Rights {
            can_read: reads && sole,
            can_write: writes && sole,
            is_registered: registered,
            passes_spc2: sole,
        }
    }
}

/// A table, the model of it, and those who take part.
struct World {
    table: Table,
    model: Model,
    parties: Vec<ItNexus>,
    /// An earlier table, and what was said since then.
    earlier: Table,
    since: ExpectedNotifications,
}

/// Plays a script on `table`; panics where something does not hold.
pub(crate) fn run(table: Table, script: &[u8]) {
    let mut script = Script::new(script);
    let mut parties = Vec::new();
    for (name, session, port) in [("x", 1, 1), ("x", 1, 2), ("x", 2, 1), ("y", 1, 1), ("y", 1, 2)] {
        let initiator = Initiator::Iscsi { name: name.into(), isid: [session; 6] };
        parties.push(ItNexus { initiator, port });
    }
    parties.push(ItNexus { initiator: Initiator::Host([1; 16]), port: 0 });
    parties.extend(table.registrants().iter().take(20).map(|r| r.nexus.clone()));
    parties.extend(table.spc2_reservation.iter().map(|sole| sole.nexus.clone()));
    let (model, earlier) = (Model::of(&table), table.clone());
    let mut world = World { table, model, parties, earlier, since: ExpectedNotifications::new() };
    world.check();
    while !script.is_empty() {
        match script.byte() {
            0..=3 => world.power(&mut script),
            4..=9 => world.snapshot_table(),
            what => world.apply_random_change(what, &mut script),
        }
    }
}

impl World {
    fn any_nexus(&self, script: &mut Script<'_>) -> ItNexus {
        self.parties[usize::from(script.byte()) % self.parties.len()].clone()
    }

    /// Perhaps a new power epoch, perhaps a node less.
    fn power(&mut self, script: &mut Script<'_>) {
        let [off, dead] = [script.flag(), script.flag()];
        let era = self.table.power_epoch.wrapping_add(u64::from(off));
        let old = std::mem::take(&mut self.table);
        self.table = old.as_of(era, |node_incarnation| !dead || node_incarnation % 2 == 0);
        if off {
            self.model.pr_generation = 0;
            self.model.modes = 0;
            self.model.sole = None;
            if !self.model.aptpl {
                self.model.keys.clear();
                self.model.held = None;
            }
            self.snapshot_table();
        }
        self.model.sole = self
            .model
            .sole
            .take()
            .filter(|(_, node_incarnation)| !dead || node_incarnation % 2 == 0);
        self.check();
    }

    /// From here on another node sees nothing for a while.
    fn snapshot_table(&mut self) {
        self.earlier = self.table.clone();
        self.since.clear();
    }

    fn apply_random_change(&mut self, what: u8, script: &mut Script<'_>) {
        let by = self.any_nexus(script);
        let change = self.change(what, &by, script);
        let node_incarnation = u64::from(script.byte() % 4);
        let mut expected_notifications = ExpectedNotifications::new();
        let mut model = self.model.clone();
        let mut verdict = model.step(&by, node_incarnation, &change, &mut expected_notifications);
        if verdict == Verdict::Done && self.table.generation == u64::MAX {
            verdict = FULL;
        }
        let next = match self.table.with_change(&by, node_incarnation, &change) {
            Ok(None) => return assert_eq!(verdict, Verdict::Nothing, "{change:?}"),
            Err(why) => return assert_eq!(verdict, Verdict::Refused(why), "{change:?}"),
            Ok(Some(next)) => next,
        };
        assert_eq!(verdict, Verdict::Done, "{change:?}");
        if matches!(change, Change::SetModePages(_) | Change::ClearTaskSet | Change::Reset { .. }) {
            expected_notifications = self.notifications_for_all(&by, &change);
        }
        let old = std::mem::replace(&mut self.table, next);
        assert_eq!(self.table.generation, old.generation + 1);
        self.model = model;
        self.check();
        self.check_notifications(&old, &expected_notifications, &change);
        self.since.extend(expected_notifications);
        self.check_missed();
    }

    /// 6.11, SAM-5 6.3: notifications for every nexus, registered or not.
    fn notifications_for_all(&self, by: &ItNexus, change: &Change) -> ExpectedNotifications {
        let notice = match change {
            Change::SetModePages(_) => Notification::ModePagesChanged,
            Change::ClearTaskSet => Notification::AbortCommands,
            Change::Reset { whole_target: true } => Notification::TargetReset,
            _ => Notification::UnitReset,
        };
        let all_but_one =
            matches!(notice, Notification::ModePagesChanged | Notification::AbortCommands);
        let all = self.parties.iter().filter(|who| !all_but_one || *who != by);
        all.map(|who| (who.clone(), notice as u8)).collect()
    }

    fn change(&self, what: u8, by: &ItNexus, script: &mut Script<'_>) -> Change {
        let own = self.model.keys.get(by).copied().unwrap_or(0);
        let number = |script: &mut Script<'_>| u64::from(script.byte() % 4);
        let key = if script.byte() < 220 { own } else { number(script) };
        let kind = ReservationType::ALL[usize::from(script.byte()) % 6];
        match what {
            85..=89 => Change::SetPersistence(script.flag()),
            70..=84 => Change::NvmeRegister {
                action: self.random_nvme_register(key, script),
                persist: script.flag().then(|| script.flag()),
            },
            0..=69 => Change::Register {
                key,
                new_key: number(script),
                ignore_key: script.byte() < 64,
                persist: script.flag(),
                ports: (0..u16::from(script.byte().saturating_sub(220) / 9)).collect(),
                other_initiators: (0..script.byte().saturating_sub(220) / 12)
                    .map(|_| self.any_nexus(script).initiator)
                    .collect(),
            },
            90..=129 => Change::Reserve { key, kind },
            130..=149 => Change::Release {
                key,
                kind: self
                    .table
                    .reservation
                    .as_ref()
                    .filter(|_| script.flag())
                    .map_or(kind, |r| r.kind),
            },
            150..=154 => Change::Clear { key },
            155..=199 => Change::Preempt {
                key,
                preempt_key: number(script),
                kind: (script.byte() < 250).then_some(kind),
                abort: script.flag(),
            },
            200..=214 => Change::RegisterAndMove {
                key,
                new_key: number(script),
                to: self.any_nexus(script),
                unregister: script.flag(),
                persist: script.flag(),
            },
            215..=224 => Change::Spc2Reserve,
            225..=234 => Change::Spc2Release,
            235..=239 => Change::NexusLoss,
            240..=246 => Change::SetModePages(u128::from(script.byte() % 3)),
            247..=248 => Change::ClearTaskSet,
            249..=251 => Change::Reset { whole_target: script.flag() },
            _ => Change::AdminClear,
        }
    }

    fn random_nvme_register(&self, key: u64, script: &mut Script<'_>) -> NvmeRegisterAction {
        let key = Some(key).filter(|_| script.byte() < 200);
        let new_key = u64::from(script.byte() % 4);
        match script.byte() % 3 {
            0 => NvmeRegisterAction::Register { new_key },
            1 => NvmeRegisterAction::Unregister { key },
            _ => NvmeRegisterAction::Replace { key, new_key },
        }
    }

    /// The invariants of every table.
    fn check(&self) {
        let table = &self.table;
        assert_eq!(Model::of(table), self.model);
        assert!(table.registrants().is_sorted_by(|a, b| a.nexus < b.nexus));
        assert!(table.registrants().iter().all(|r| r.key != 0));
        assert!(table.reservation.is_none() || !table.registrants().is_empty());
        assert!(table.spc2_reservation.is_none() || table.registrants().is_empty());
        if let Some(holder) = table.reservation.as_ref().and_then(|r| r.holder.as_ref()) {
            assert!(table.registrant(holder).is_some());
        }
        for party in &self.parties {
            let rights = table.rights(party);
            assert_eq!(rights, self.model.rights(party), "{party:?} {table:?}");
            assert!(!table.is_unreserved() || rights.can_read && rights.can_write);
            assert_eq!(table.is_holder(party), self.model.holders().contains(party));
        }
        if table.generation > 0 {
            let bytes = table.encode();
            assert_eq!(Table::parse(&bytes).as_ref(), Ok(table));
            let chosen = Table::recover(&bytes, &bytes);
            assert_eq!(chosen, Ok((table.clone(), None)));
        }
    }

    /// Exactly the right nexuses are notified.
    fn check_notifications(
        &self,
        old: &Table,
        expected_notifications: &ExpectedNotifications,
        change: &Change,
    ) {
        for party in &self.parties {
            let said: BTreeSet<u8> =
                Table::notifications(old, &self.table, party).iter().map(|n| n as u8).collect();
            let expected: BTreeSet<u8> = expected_notifications
                .iter()
                .filter(|(who, _)| who == party)
                .map(|(_, what)| *what)
                .collect();
            assert_eq!(said, expected, "{party:?} of {change:?}");
        }
    }

    /// A nexus whose node missed tables is notified of what still matters.
    fn check_missed(&self) {
        let (old, new) = (&self.earlier, &self.table);
        for party in &self.parties {
            let said = Table::notifications(old, new, party);
            let was = |notice: Notification| self.since.contains(&(party.clone(), notice as u8));
            let gone = old.registrant(party).is_some() && new.registrant(party).is_none();
            let reset = was(Notification::UnitReset) || was(Notification::TargetReset);
            let reset_said = |said: Notifications| {
                said.contains(Notification::UnitReset) || said.contains(Notification::TargetReset)
            };
            assert!(!reset || reset_said(said));
            assert!(
                !was(Notification::AbortCommands) || said.contains(Notification::AbortCommands)
            );
            let preempted = was(Notification::ReservationsPreempted)
                || was(Notification::RegistrationsPreempted);
            let preempted_said = said.contains(Notification::ReservationsPreempted)
                || said.contains(Notification::RegistrationsPreempted);
            assert!(!(gone && preempted) || preempted_said);
            if old.power_epoch == new.power_epoch
                && old.mode_pages != new.mode_pages
                && new.generation > old.generation + 1
            {
                assert!(said.contains(Notification::ModePagesChanged));
            }
        }
    }
}
