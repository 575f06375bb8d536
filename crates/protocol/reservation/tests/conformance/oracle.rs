//! What the clauses say, once more and in the plainest way, to hold the table against. Shared by
//! the property test here and the fuzz target `reservation`: bytes are read as a script of changes.
//! It is written from SPC-4 and shares no code with the crate; it keeps no order of anything.

use std::collections::{BTreeMap, BTreeSet};

use reservation::{
    Change, Enlisting, Field, Initiator, Kind, Notice, Notices, Party, Refusal, Rights, Table,
};

/// What was said to whom.
type Told = BTreeSet<(Party, u8)>;

#[derive(Debug, PartialEq, Eq)]
enum Verdict {
    Done,
    Nothing,
    Refused(Refusal),
}

/// The state that the clauses speak of.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Model {
    keys: BTreeMap<Party, u64>,
    /// Type and holder; where all hold it, nobody in particular.
    held: Option<(u8, Option<Party>)>,
    aptpl: bool,
    pr_generation: u32,
    sole: Option<(Party, u64)>,
    modes: u128,
    resets: u32,
}

const CONFLICT: Verdict = Verdict::Refused(Refusal::Conflict);
const FULL: Verdict = Verdict::Refused(Refusal::Full);

fn invalid(field: Field) -> Verdict {
    Verdict::Refused(Refusal::Parameter(field))
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
            keys: table.registrants().iter().map(|r| (r.party.clone(), r.key)).collect(),
            held: table.reservation.as_ref().map(|r| (r.kind.scsi(), r.holder.clone())),
            aptpl: table.persists,
            pr_generation: table.pr_generation,
            sole: table.sole.as_ref().map(|sole| (sole.party.clone(), sole.seat)),
            modes: table.modes,
            resets: table.resets,
        }
    }

    /// 5.12.10.
    fn holders(&self) -> BTreeSet<Party> {
        match &self.held {
            None => BTreeSet::new(),
            Some((_, Some(holder))) => BTreeSet::from([holder.clone()]),
            Some((_, None)) => self.keys.keys().cloned().collect(),
        }
    }

    /// 5.12.1: whether MODE SELECT is no conflict, of the unit's RESERVE as well.
    fn may_write(&self, by: &Party) -> bool {
        let kept_by_another = self.sole.as_ref().is_some_and(|(party, _)| party != by);
        let allowed = match &self.held {
            None => true,
            Some((1 | 3, _)) => self.holders().contains(by),
            Some(_) => self.keys.contains_key(by),
        };
        !kept_by_another && allowed
    }

    /// Everybody registered but one.
    fn others(&self, than: &Party) -> Vec<Party> {
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

    fn step(&mut self, by: &Party, seat: u64, change: &Change, told: &mut Told) -> Verdict {
        let mut say = |whom: Vec<Party>, what: Notice| {
            told.extend(whom.into_iter().map(|party| (party, what as u8)));
        };
        match change {
            Change::ReserveUnit | Change::ReleaseUnit => {
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
                    (Change::ReserveUnit, Some(false)) => CONFLICT,
                    (Change::ReserveUnit, _) => {
                        self.become_of(|model| model.sole = Some((by.clone(), seat)))
                    }
                    (_, Some(true)) => self.become_of(|model| model.sole = None),
                    _ => Verdict::Nothing,
                }
            }
            Change::Leave => {
                let mine = self.sole.as_ref().is_some_and(|(party, _)| party == by);
                self.become_of(|model| model.sole = if mine { None } else { model.sole.take() })
            }
            Change::Modes(_) if !self.may_write(by) => CONFLICT,
            Change::Modes(modes) => self.become_of(|model| model.modes = *modes),
            Change::ClearTasks => Verdict::Done,
            Change::Reset { .. } => {
                self.sole = None;
                self.modes = 0;
                self.resets = self.resets.wrapping_add(1);
                Verdict::Done
            }
            Change::Evict => {
                let sole = self.sole.take().map(|(party, _)| party);
                if self.keys.is_empty() && sole.is_none() {
                    return Verdict::Nothing;
                }
                let counts = !self.keys.is_empty();
                self.pr_generation = self.pr_generation.wrapping_add(u32::from(counts));
                say(self.keys.keys().cloned().chain(sole).collect(), Notice::ReservationsPreempted);
                self.keys.clear();
                self.held = None;
                Verdict::Done
            }
            _ if self.sole.is_some() => CONFLICT,
            _ => self.persistent(by, change, told),
        }
    }

    /// Changes the model, and says whether it did.
    fn become_of(&mut self, change: impl Fn(&mut Self)) -> Verdict {
        let before = self.clone();
        change(self);
        if *self == before { Verdict::Nothing } else { Verdict::Done }
    }

    /// PERSISTENT RESERVE OUT.
    fn persistent(&mut self, by: &Party, change: &Change, told: &mut Told) -> Verdict {
        if let Change::Register { .. } = change {
            return self.register(by, change, told);
        }
        if let Change::Enlist { action, persists } = change {
            let verdict = self.enlist(by, *action, told);
            let kept = matches!(verdict, Verdict::Refused(_));
            self.aptpl = persists.filter(|_| !kept).unwrap_or(self.aptpl);
            return verdict;
        }
        if let Change::Persist(persists) = change {
            return self.become_of(|model| model.aptpl = *persists);
        }
        let given = match change {
            Change::Reserve { key, .. }
            | Change::Release { key, .. }
            | Change::Clear { key }
            | Change::Preempt { key, .. }
            | Change::Move { key, .. } => *key,
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
                    return Verdict::Refused(Refusal::InvalidRelease);
                }
                self.held = None;
                if registrants_only(code) || all_registrants(code) {
                    let others = self.others(by).into_iter();
                    told.extend(others.map(|who| (who, Notice::ReservationsReleased as u8)));
                }
                Verdict::Done
            }
            Change::Clear { .. } => {
                let others = self.others(by).into_iter();
                told.extend(others.map(|who| (who, Notice::ReservationsPreempted as u8)));
                (self.keys, self.held) = (BTreeMap::new(), None);
                self.counted()
            }
            Change::Preempt { .. } => self.preempt(by, change, told),
            _ => self.move_to(by, change),
        }
    }

    fn counted(&mut self) -> Verdict {
        self.pr_generation = self.pr_generation.wrapping_add(1);
        Verdict::Done
    }

    fn register(&mut self, by: &Party, change: &Change, told: &mut Told) -> Verdict {
        let Change::Register { key, new_key, ignore_key, persists, ports, also } = change else {
            unreachable!()
        };
        let spec_i_pt = !also.is_empty();
        // The tables of 5.12.7, row by row.
        match (ignore_key, self.keys.get(by), *key, *new_key, spec_i_pt) {
            (true, _, _, _, true) => return invalid(Field::Also),
            (true, _, _, _, false) => {}
            (false, None, 0, 0, _) => return Verdict::Nothing,
            (false, None, 0, _, _) => {}
            (false, None, _, _, _) => return CONFLICT,
            (false, Some(own), given, _, _) if *own != given => return CONFLICT,
            (false, Some(_), _, _, true) => return invalid(Field::Also),
            (false, Some(_), _, _, false) => {}
        }
        // 5.12.7: the nexuses that it is about.
        let mut at: Vec<u16> = ports.clone();
        at.push(by.port);
        let own: BTreeSet<Party> =
            at.iter().map(|port| Party { initiator: by.initiator.clone(), port: *port }).collect();
        let mut all = own.clone();
        for initiator in also {
            for port in &at {
                let party = Party { initiator: initiator.clone(), port: *port };
                if self.keys.contains_key(&party) {
                    return invalid(Field::Initiator);
                }
                all.insert(party);
            }
        }
        let strange = |party: &Party| self.keys.get(party).is_some_and(|own| own != key);
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
                told.extend(left.map(|who| (who, Notice::ReservationsReleased as u8)));
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
    fn enlist(&mut self, by: &Party, action: Enlisting, told: &mut Told) -> Verdict {
        let (given, new) = match action {
            Enlisting::Register { new_key } => (None, Some(new_key)),
            Enlisting::Unregister { key } => (key, None),
            Enlisting::Replace { key, new_key } => (key, Some(new_key)),
        };
        if new == Some(0) {
            return invalid(Field::NewKey);
        }
        let own = self.keys.get(by).copied();
        let registers = matches!(action, Enlisting::Register { .. });
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
                    told.extend(left.map(|who| (who, Notice::ReservationsReleased as u8)));
                }
            }
        }
        self.counted()
    }

    fn preempt(&mut self, by: &Party, change: &Change, told: &mut Told) -> Verdict {
        let Change::Preempt { victim, kind, abort, .. } = change else { unreachable!() };
        let before = self.clone();
        let identifies_holder = match &self.held {
            Some((_, Some(holder))) => self.keys.get(holder) == Some(victim),
            Some((_, None)) => *victim == 0,
            None => false,
        };
        // 5.12.11.2.4.1.
        if *victim == 0 && self.held.is_some() && !identifies_holder {
            return invalid(Field::NewKey);
        }
        let hit: BTreeSet<Party> = before
            .keys
            .iter()
            .filter(|(_, key)| **key == *victim || *victim == 0)
            .map(|(party, _)| party.clone())
            .collect();
        if identifies_holder {
            // 5.12.11.2.4.3.
            let Some(kind) = kind else { return invalid(Field::Kind) };
            self.keys.retain(|party, _| party == by || !hit.contains(party));
            let code = kind.scsi();
            self.held = Some((code, (!all_registrants(code)).then(|| by.clone())));
            if before.held.as_ref().map(|(old, _)| *old) != Some(code) {
                let left = self.others(by).into_iter();
                told.extend(left.map(|who| (who, Notice::ReservationsReleased as u8)));
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
            told.insert((party, Notice::RegistrationsPreempted as u8));
        }
        if *abort {
            told.extend(hit.into_iter().map(|who| (who, Notice::Aborted as u8)));
        }
        self.counted()
    }

    fn move_to(&mut self, by: &Party, change: &Change) -> Verdict {
        let Change::Move { new_key, to, unregister, persists, .. } = change else { unreachable!() };
        // 5.12.8.
        match &self.held {
            None => return invalid(Field::Action),
            Some((_, Some(holder))) if holder == by => {}
            Some(_) => return CONFLICT,
        }
        if *new_key == 0 {
            return invalid(Field::NewKey);
        }
        if to.initiator == by.initiator {
            return invalid(Field::Initiator);
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
    fn rights(&self, party: &Party) -> Rights {
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
        Rights { reads: reads && sole, writes: writes && sole, registered, sole }
    }
}

/// Bytes of a script; zeroes once it has ended.
struct Script<'a>(&'a [u8]);

impl Script<'_> {
    fn byte(&mut self) -> u8 {
        let Some((first, rest)) = self.0.split_first() else { return 0 };
        self.0 = rest;
        *first
    }

    fn flag(&mut self) -> bool {
        self.byte() & 1 != 0
    }
}

/// A table, the model of it, and those who take part.
struct World {
    table: Table,
    model: Model,
    parties: Vec<Party>,
    /// An earlier table, and what was said since then.
    earlier: Table,
    since: Told,
}

/// Plays a script on `table`; panics where something does not hold.
pub(crate) fn play(table: Table, script: &[u8]) {
    let mut script = Script(script);
    let mut parties = Vec::new();
    for (name, session, port) in [("x", 1, 1), ("x", 1, 2), ("x", 2, 1), ("y", 1, 1), ("y", 1, 2)] {
        let initiator = Initiator::Iscsi { name: name.into(), isid: [session; 6] };
        parties.push(Party { initiator, port });
    }
    parties.push(Party { initiator: Initiator::Host([1; 16]), port: 0 });
    parties.extend(table.registrants().iter().take(20).map(|r| r.party.clone()));
    parties.extend(table.sole.iter().map(|sole| sole.party.clone()));
    let (model, earlier) = (Model::of(&table), table.clone());
    let mut world = World { table, model, parties, earlier, since: Told::new() };
    world.check();
    while !script.0.is_empty() {
        match script.byte() {
            0..=3 => world.power(&mut script),
            4..=9 => world.rest(),
            what => world.ask(what, &mut script),
        }
    }
}

impl World {
    fn somebody(&self, script: &mut Script<'_>) -> Party {
        self.parties[usize::from(script.byte()) % self.parties.len()].clone()
    }

    /// Perhaps another era, perhaps a node less.
    fn power(&mut self, script: &mut Script<'_>) {
        let [off, dead] = [script.flag(), script.flag()];
        let era = self.table.era.wrapping_add(u64::from(off));
        let old = std::mem::take(&mut self.table);
        self.table = old.as_of(era, |seat| !dead || seat % 2 == 0);
        if off {
            self.model.pr_generation = 0;
            self.model.modes = 0;
            self.model.sole = None;
            if !self.model.aptpl {
                self.model.keys.clear();
                self.model.held = None;
            }
            self.rest();
        }
        self.model.sole = self.model.sole.take().filter(|(_, seat)| !dead || seat % 2 == 0);
        self.check();
    }

    /// From here on another node sees nothing for a while.
    fn rest(&mut self) {
        self.earlier = self.table.clone();
        self.since.clear();
    }

    fn ask(&mut self, what: u8, script: &mut Script<'_>) {
        let by = self.somebody(script);
        let change = self.change(what, &by, script);
        let seat = u64::from(script.byte() % 4);
        let mut told = Told::new();
        let mut model = self.model.clone();
        let mut verdict = model.step(&by, seat, &change, &mut told);
        if verdict == Verdict::Done && self.table.generation == u64::MAX {
            verdict = FULL;
        }
        let next = match self.table.change(&by, seat, &change) {
            Ok(None) => return assert_eq!(verdict, Verdict::Nothing, "{change:?}"),
            Err(why) => return assert_eq!(verdict, Verdict::Refused(why), "{change:?}"),
            Ok(Some(next)) => next,
        };
        assert_eq!(verdict, Verdict::Done, "{change:?}");
        if matches!(change, Change::Modes(_) | Change::ClearTasks | Change::Reset { .. }) {
            told = self.told_to_all(&by, &change);
        }
        let old = std::mem::replace(&mut self.table, next);
        assert_eq!(self.table.generation, old.generation + 1);
        self.model = model;
        self.check();
        self.check_told(&old, &told, &change);
        self.since.extend(told);
        self.check_missed();
    }

    /// 6.11, SAM-5 6.3: what everybody is told, registered or not.
    fn told_to_all(&self, by: &Party, change: &Change) -> Told {
        let notice = match change {
            Change::Modes(_) => Notice::Modes,
            Change::ClearTasks => Notice::Aborted,
            Change::Reset { target: true } => Notice::TargetReset,
            _ => Notice::UnitReset,
        };
        let all_but_one = matches!(notice, Notice::Modes | Notice::Aborted);
        let all = self.parties.iter().filter(|who| !all_but_one || *who != by);
        all.map(|who| (who.clone(), notice as u8)).collect()
    }

    fn change(&self, what: u8, by: &Party, script: &mut Script<'_>) -> Change {
        let own = self.model.keys.get(by).copied().unwrap_or(0);
        let number = |script: &mut Script<'_>| u64::from(script.byte() % 4);
        let key = if script.byte() < 220 { own } else { number(script) };
        let kind = Kind::ALL[usize::from(script.byte()) % 6];
        match what {
            85..=89 => Change::Persist(script.flag()),
            70..=84 => Change::Enlist {
                action: self.enlisting(key, script),
                persists: script.flag().then(|| script.flag()),
            },
            0..=69 => Change::Register {
                key,
                new_key: number(script),
                ignore_key: script.byte() < 64,
                persists: script.flag(),
                ports: (0..u16::from(script.byte().saturating_sub(220) / 9)).collect(),
                also: (0..script.byte().saturating_sub(220) / 12)
                    .map(|_| self.somebody(script).initiator)
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
                victim: number(script),
                kind: (script.byte() < 250).then_some(kind),
                abort: script.flag(),
            },
            200..=214 => Change::Move {
                key,
                new_key: number(script),
                to: self.somebody(script),
                unregister: script.flag(),
                persists: script.flag(),
            },
            215..=224 => Change::ReserveUnit,
            225..=234 => Change::ReleaseUnit,
            235..=239 => Change::Leave,
            240..=246 => Change::Modes(u128::from(script.byte() % 3)),
            247..=248 => Change::ClearTasks,
            249..=251 => Change::Reset { target: script.flag() },
            _ => Change::Evict,
        }
    }

    fn enlisting(&self, key: u64, script: &mut Script<'_>) -> Enlisting {
        let key = Some(key).filter(|_| script.byte() < 200);
        let new_key = u64::from(script.byte() % 4);
        match script.byte() % 3 {
            0 => Enlisting::Register { new_key },
            1 => Enlisting::Unregister { key },
            _ => Enlisting::Replace { key, new_key },
        }
    }

    /// What holds of every table.
    fn check(&self) {
        let table = &self.table;
        assert_eq!(Model::of(table), self.model);
        assert!(table.registrants().is_sorted_by(|a, b| a.party < b.party));
        assert!(table.registrants().iter().all(|r| r.key != 0));
        assert!(table.reservation.is_none() || !table.registrants().is_empty());
        assert!(table.sole.is_none() || table.registrants().is_empty());
        if let Some(holder) = table.reservation.as_ref().and_then(|r| r.holder.as_ref()) {
            assert!(table.registrant(holder).is_some());
        }
        for party in &self.parties {
            let rights = table.rights(party);
            assert_eq!(rights, self.model.rights(party), "{party:?} {table:?}");
            assert!(!table.is_free() || rights.reads && rights.writes);
            assert_eq!(table.holds(party), self.model.holders().contains(party));
        }
        if table.generation > 0 {
            let bytes = table.encode();
            assert_eq!(Table::parse(&bytes).as_ref(), Ok(table));
            let chosen = Table::choose(&bytes, &bytes);
            assert_eq!(chosen, Ok((table.clone(), None)));
        }
    }

    /// Those are told who must be, and nobody else.
    fn check_told(&self, old: &Table, told: &Told, change: &Change) {
        for party in &self.parties {
            let said: BTreeSet<u8> =
                Table::notices(old, &self.table, party).iter().map(|n| n as u8).collect();
            let expected: BTreeSet<u8> =
                told.iter().filter(|(who, _)| who == party).map(|(_, what)| *what).collect();
            assert_eq!(said, expected, "{party:?} of {change:?}");
        }
    }

    /// Who has missed tables is told of what still matters.
    fn check_missed(&self) {
        let (old, new) = (&self.earlier, &self.table);
        for party in &self.parties {
            let said = Table::notices(old, new, party);
            let was = |notice: Notice| self.since.contains(&(party.clone(), notice as u8));
            let gone = old.registrant(party).is_some() && new.registrant(party).is_none();
            let reset = was(Notice::UnitReset) || was(Notice::TargetReset);
            let reset_said = |said: Notices| {
                said.contains(Notice::UnitReset) || said.contains(Notice::TargetReset)
            };
            assert!(!reset || reset_said(said));
            assert!(!was(Notice::Aborted) || said.contains(Notice::Aborted));
            let preempted =
                was(Notice::ReservationsPreempted) || was(Notice::RegistrationsPreempted);
            let preempted_said = said.contains(Notice::ReservationsPreempted)
                || said.contains(Notice::RegistrationsPreempted);
            assert!(!(gone && preempted) || preempted_said);
            if old.era == new.era && old.modes != new.modes && new.generation > old.generation + 1 {
                assert!(said.contains(Notice::Modes));
            }
        }
    }
}
