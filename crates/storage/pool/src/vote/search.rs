//! The claim of RFD 0030, section 5, searched for a history in which it does not hold.
//!
//! Each disk holds the version that was last written to it. A writer opens by rule O with any disks there, and then makes
//! versions by rule D: one that changes nothing, drops any members, lets one return, adds one or removes one, with or without
//! saying what counts. At any time it writes its newest version to any disk there, or is cut off. So each version reaches any
//! subset, in any order, before or after the next one is made, those that it drops included. A version counts when all with a
//! vote in it hold it or what followed: nothing is acknowledged that does not count, so nothing is asked of what is
//! acknowledged alone. It is breadth first, over all that can be, with each state looked at once: `(members and others;
//! openings; versions of each)` up to (2; 2; 3), (3; 2; 2), (3; 3; 1), (4; 1; 2), (4; 3; 1), and with disks that are added
//! (1 and 1; 2; 2), (1 and 2; 1; 3), (2 and 1; 2; 2), or with numbers used again (2 and 1; 1; 4), (3 and 1; 1; 3); and one
//! opening more, of which only is asked what it would open. That is 1.5 million states at most, 3.7 million together.
//!
//! No statements are made: with one that is false the claim is none.
//!
//! **Disks that are set back.** Whenever nobody writes, any disks are set back, one after the other, each to any version that it held
//! before. Then what counts may be lost, as nobody may be there who knows of it. What is asked then: that all which any disk there
//! proves to be committed led to what is opened; that nobody is believed to have what it has not, as it was set back behind that; that
//! it is opened wherever it would be if those that were set back were not there, unless two histories have been gone on with; and
//! that with all there it is said which disks are older, if it is refused.

use std::collections::VecDeque;
use std::fmt::Write as _;

use rustc_hash::FxHashMap;
use uuid::Uuid;
use wire::Text;

use super::super::metadata::{Change, MemberId, Members, Metadata, Standing};
use super::{Known, RULES, Refusal, Roll, Rules, Written, is_up_to_date};

/// Most disks of a world.
const DISKS: usize = 4;

/// Most versions that a disk is remembered to have held before the one that it holds.
const PAST: usize = 5;

/// A set of disks, a bit for each.
type Disks = u8;

fn has(disks: Disks, disk: usize) -> bool {
    disks >> disk & 1 != 0
}

fn each(disks: Disks) -> impl Iterator<Item = usize> {
    (0..DISKS).filter(move |disk| has(disks, *disk))
}

fn subsets(disks: Disks) -> impl Iterator<Item = Disks> {
    (0..1u8 << DISKS).filter(move |some| some & !disks == 0)
}

/// How far is searched, and by which rules.
#[derive(Clone, Copy)]
struct Scope {
    rules: Rules,
    /// Disks that are members at first, all with a vote.
    members: usize,
    /// Disks that may be added later, behind those.
    others: usize,
    /// How often the pool is opened; it is looked whether it could be once more.
    openings: u8,
    /// Versions of an opening, with its first.
    versions: u8,
    /// Whether the first disk that may be added gets the number of the last member, and members may be removed.
    removes: bool,
    /// Whether it is also looked whether the pool can be opened at all.
    alive: bool,
    /// Whether disks are set back.
    sets_back: bool,
}

const SCOPE: Scope = Scope {
    rules: RULES,
    members: 0,
    others: 0,
    openings: 2,
    versions: 2,
    removes: false,
    alive: true,
    sets_back: false,
};

/// What a version changes, and in which way it is not another that changes the same.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
struct Step {
    opened: bool,
    twin: u8,
    out: Disks,
    back: Disks,
    remove: Disks,
    add: Disks,
    counted: u64,
}

/// A version in the tree of all that were made.
struct Node {
    metadata: Metadata,
    parent: u32,
    /// Disks with a vote.
    voters: Disks,
    /// Disks with a vote in a version that it asks about.
    asked: Disks,
}

/// Who writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Writer {
    here: Disks,
    head: u32,
    left: u8,
}

/// What there is at one time. Version 0 is nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct State {
    held: [u32; DISKS],
    /// The last version that counts.
    counted: u32,
    writer: Option<Writer>,
    /// What each disk held before, in ascending order, and then zeroes; nothing where none is set back.
    past: [[u32; PAST]; DISKS],
    /// Disks that were set back, and not written since.
    older: Disks,
    /// Whether any was set back, ever.
    was_set_back: bool,
    /// Whether something that counts has been lost by that, so that there may be two histories.
    is_forked: bool,
}

/// How one state comes of another.
#[derive(Clone, Copy, Debug)]
enum Move {
    Opens { here: Disks, head: u32 },
    Makes(u32),
    Writes(usize),
    Cut,
    SetsBack(usize, u32),
}

/// How each state was come to first.
type Came = FxHashMap<State, Option<(State, Move)>>;

/// What an opening came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Opens {
    At {
        head: u32,
        /// Whether somebody supports it who lacks what it knows to be committed.
        by_stale: bool,
    },
    TwoTruths,
    Older,
    Few,
}

/// What is wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wrong {
    /// A version that counts did not lead to what is opened.
    Lost,
    /// Two versions count, and neither led to the other.
    Forked,
    /// Two may be opened of which neither led to the other, though nobody said anything.
    TwoTruths,
    /// All disks are there, or all with a vote since the last version of which the last that counts says that it does, and
    /// the pool cannot be opened. Or it could be if disks that were set back were not there.
    Stuck,
    /// A disk proves to be committed what did not lead to what is opened.
    Contradicts,
    /// A disk that was set back is believed to have what it has lost.
    Stale,
    /// It is not said which disks are older.
    Unnamed,
}

#[derive(Debug)]
struct Found {
    wrong: Wrong,
    history: String,
}

/// What was searched.
#[derive(Debug)]
struct Searched {
    states: usize,
    /// Versions.
    made: usize,
    /// Sets of disks, with what they know, for which it was asked what may be opened.
    asked: usize,
    found: Option<Found>,
}

struct World {
    scope: Scope,
    nodes: Vec<Node>,
    children: FxHashMap<(u32, Step), Option<u32>>,
    opens: FxHashMap<[u32; DISKS], Opens>,
}

impl World {
    fn new(scope: Scope) -> (Self, State) {
        let metadata = Metadata::new(
            Uuid::from_u128(1),
            Text::new("tank"),
            crate::metadata::tests::raid5(3),
            1,
        );
        let nothing = Node { metadata, parent: 0, voters: 0, asked: 0 };
        let mut world = Self {
            scope,
            nodes: vec![nothing],
            children: FxHashMap::default(),
            opens: FxHashMap::default(),
        };
        let all = (1 << scope.members) - 1;
        let first = world.child(0, Step { opened: true, add: all, ..Step::default() });
        let first = first.expect("it can be made");
        let second = world.child(first, Step { counted: 1, ..Step::default() });
        let second = second.expect("it can be made");
        let mut held = [0; DISKS];
        held[..scope.members].fill(second);
        let state = State {
            held,
            counted: second,
            writer: None,
            past: [[0; PAST]; DISKS],
            older: 0,
            was_set_back: false,
            is_forked: false,
        };
        (world, state)
    }

    fn number(&self, disk: usize) -> MemberId {
        let reused = self.scope.removes && disk >= self.scope.members;
        MemberId(u16::try_from(if reused { disk - 1 } else { disk }).unwrap())
    }

    fn uuid(disk: usize) -> Uuid {
        Uuid::from_u128(100 + disk as u128)
    }

    fn disk(uuid: Uuid) -> usize {
        usize::try_from(uuid.as_u128() - 100).unwrap()
    }

    fn disks(&self) -> Disks {
        (1 << (self.scope.members + self.scope.others)) - 1
    }

    /// The version that a step makes, if it can be made.
    fn child(&mut self, parent: u32, step: Step) -> Option<u32> {
        if let Some(made) = self.children.get(&(parent, step)) {
            return *made;
        }
        let made = self.make(parent, step);
        self.children.insert((parent, step), made);
        made
    }

    fn make(&mut self, parent: u32, step: Step) -> Option<u32> {
        let id = u32::try_from(self.nodes.len()).unwrap();
        let mut metadata = self.nodes[parent as usize].metadata.clone();
        metadata.start(step.counted).ok()?;
        let mut changes = Vec::new();
        if step.opened {
            changes
                .push(Change::Opened { id: Uuid::from_u128(1000 + u128::from(id)), forced: false });
        }
        changes.extend(each(step.out).map(|d| Change::Out(self.number(d))));
        changes.extend(each(step.remove).map(|d| Change::Remove(self.number(d))));
        changes
            .extend(each(step.back).map(|d| Change::Back { member: self.number(d), marked: true }));
        changes.extend(each(step.add).map(|d| Change::Add {
            member: self.number(d),
            uuid: Self::uuid(d),
            serial: Text::new(&format!("S{d}")),
            units: 1,
            room: 64,
            units_at: 1 << 20,
            spare: false,
        }));
        for change in &changes {
            metadata.apply(change).ok()?;
        }
        let votes = metadata.members().filter(|(_, m)| m.standing.votes());
        let voters = votes.fold(0, |all, (_, m)| all | 1 << Self::disk(m.uuid));
        let asked = self.asked(parent, &metadata) | voters;
        self.nodes.push(Node { metadata, parent, voters, asked });
        Some(id)
    }

    /// Disks with a vote in a version before `metadata`, and not before the last of which it knows that it counts.
    fn asked(&self, parent: u32, metadata: &Metadata) -> Disks {
        let (mut at, mut asked) = (parent, 0);
        while self.nodes[at as usize].metadata.stamp().version >= metadata.counted() && at != 0 {
            asked |= self.nodes[at as usize].voters;
            at = self.nodes[at as usize].parent;
        }
        asked
    }

    /// Whether one version led to another, or is it: what the rules have to find out, known.
    fn led(&self, from: u32, to: u32) -> bool {
        let mut at = to;
        while at > from {
            at = self.nodes[at as usize].parent;
        }
        at == from
    }

    /// The last version of which a version knows that it counts: what the rules have to find out, known.
    fn committed(&self, id: u32) -> u32 {
        let counted = self.nodes[id as usize].metadata.counted();
        let mut at = id;
        while at != 0 && self.nodes[at as usize].metadata.stamp().version > counted {
            at = self.nodes[at as usize].parent;
        }
        at
    }

    fn known(&self, held: &[u32; DISKS]) -> Vec<Known<'_>> {
        let there = (0..DISKS).filter(|disk| held[*disk] != 0);
        let known = there.map(|disk| Known {
            member: self.number(disk),
            uuid: Self::uuid(disk),
            metadata: &self.nodes[held[disk] as usize].metadata,
        });
        known.collect()
    }

    fn open(&mut self, held: [u32; DISKS]) -> Opens {
        if let Some(opens) = self.opens.get(&held) {
            return *opens;
        }
        let opens = match self.scope.rules.open(&self.known(&held), &[], &[]) {
            Ok(believed) => {
                let stamp = believed.metadata.stamp();
                let same = |id: &&u32| self.nodes[**id as usize].metadata.stamp() == stamp;
                let head = *held.iter().filter(|id| **id != 0).find(same).unwrap();
                let supports = |d: &usize| {
                    let member = believed.metadata.member_of(Self::uuid(*d));
                    held[*d] != 0 && member.is_some_and(|(id, _)| believed.supporters.has(id))
                };
                let least = self.committed(head);
                let by_stale = (0..DISKS).filter(supports).any(|disk| !self.led(least, held[disk]));
                Opens::At { head, by_stale }
            }
            Err(Refusal::TwoTruths(_)) => Opens::TwoTruths,
            Err(Refusal::Older(older)) if !older.older.is_empty() => Opens::Older,
            Err(_) => Opens::Few,
        };
        self.opens.insert(held, opens);
        opens
    }

    /// A step of which no version is left, so that two openings are two.
    fn fresh(&mut self, state: &State, parent: u32, mut step: Step) -> Option<u32> {
        loop {
            let id = self.child(parent, step)?;
            let left = state.held.iter().any(|held| self.led(id, *held));
            if !left || !step.opened {
                return Some(id);
            }
            step.twin += 1;
        }
    }

    /// What the writer may make next.
    fn steps(&self, state: &State, writer: Writer) -> Vec<Step> {
        let Scope { members, others, removes, .. } = self.scope;
        let head = &self.nodes[writer.head as usize];
        let opened = writer.left == self.scope.versions;
        let counted = self.nodes[state.counted as usize].metadata.stamp().version;
        let known = head.metadata.counted();
        let out =
            head.metadata.members().filter(|(_, m)| matches!(m.standing, Standing::Out { .. }));
        let out = out.fold(0u8, |all, (_, m)| all | 1 << Self::disk(m.uuid));
        let here = writer.here;
        let mut kinds: Vec<Step> =
            subsets(head.voters).map(|out| Step { opened, out, ..Step::default() }).collect();
        let plain = Step { opened, ..Step::default() };
        kinds.extend(each(out & here).map(|d| Step { back: 1 << d, ..plain }));
        let mine = |disk: usize| head.metadata.member_of(Self::uuid(disk)).is_some();
        let free = (members..members + others).filter(|d| has(here, *d) && !mine(*d));
        kinds.extend(free.map(|d| Step { add: 1 << d, ..plain }));
        if removes {
            let all = (0..DISKS).filter(|d| mine(*d));
            kinds.extend(all.map(|d| Step { remove: 1 << d, ..plain }));
        }
        let mut steps = kinds.clone();
        steps.iter_mut().for_each(|step| step.counted = known);
        if counted > known && self.led(state.counted, writer.head) {
            kinds.iter_mut().for_each(|step| step.counted = counted);
            steps.extend(kinds);
        }
        steps
    }

    fn may_write(&self, state: &State, writer: Writer, next: u32) -> bool {
        let (before, next) = (&self.nodes[writer.head as usize], &self.nodes[next as usize]);
        let ours = each(writer.here).filter(|d| next.metadata.member_of(Self::uuid(*d)).is_some());
        let stamp = |d: usize| self.nodes[state.held[d] as usize].metadata.stamp();
        let following = ours.filter(|d| is_up_to_date(&before.metadata, stamp(*d)));
        let (mut written, head) = (Written::default(), before.metadata.stamp());
        for disk in following {
            let member = self.number(disk);
            written.following = written.following.with(member);
            if stamp(disk) == head {
                written.current = written.current.with(member);
            }
        }
        self.scope.rules.may_count(&Roll::of(&before.metadata), &next.metadata, &written).is_ok()
    }

    /// The last version that counts once `state` is so, or that two count.
    fn counts(&self, state: &State, head: u32) -> Result<u32, Wrong> {
        let mut at = head;
        while at != 0 && at != state.counted {
            let node = &self.nodes[at as usize];
            if each(node.voters).all(|d| self.led(at, state.held[d])) {
                return if self.led(state.counted, at) { Ok(at) } else { Err(Wrong::Forked) };
            }
            at = node.parent;
        }
        Ok(state.counted)
    }

    /// What follows of a state in which somebody writes.
    fn writes(&mut self, state: &State, writer: Writer) -> Result<Vec<(Move, State)>, Wrong> {
        let mut next = vec![(Move::Cut, State { writer: None, ..*state })];
        for disk in each(writer.here).filter(|d| state.held[*d] != writer.head) {
            let mut written = *state;
            written.held[disk] = writer.head;
            if self.scope.sets_back {
                written.past[disk] = with(written.past[disk], state.held[disk]);
                written.older &= !(1 << disk);
            }
            written.counted = self.counts(&written, writer.head)?;
            next.push((Move::Writes(disk), written));
        }
        if writer.left == 0 {
            return Ok(next);
        }
        for step in self.steps(state, writer) {
            let Some(head) = self.fresh(state, writer.head, step) else { continue };
            if self.may_write(state, writer, head) {
                let writer = Writer { head, left: writer.left - 1, ..writer };
                next.push((Move::Makes(head), State { writer: Some(writer), ..*state }));
            }
        }
        Ok(next)
    }

    /// What follows of a state in which nobody writes: any disks may be there.
    fn opened(&mut self, state: &State) -> Result<Vec<(Move, State)>, Wrong> {
        let mut next = Vec::new();
        for here in subsets(self.disks()) {
            let mut held = state.held;
            (0..DISKS).filter(|d| !has(here, *d)).for_each(|d| held[d] = 0);
            let opens = self.open(held);
            if state.was_set_back {
                self.check_set_back(state, &held, opens)?;
            }
            let head = match opens {
                Opens::At { by_stale: true, .. } => return Err(Wrong::Stale),
                Opens::At { head, .. } if state.was_set_back => head,
                Opens::At { head, .. } if self.led(state.counted, head) => head,
                Opens::At { .. } => return Err(Wrong::Lost),
                _ if state.was_set_back => continue,
                Opens::TwoTruths if self.scope.alive => return Err(Wrong::TwoTruths),
                Opens::Older | Opens::Few if self.scope.alive && self.is_all(&held) => {
                    return Err(Wrong::Stuck);
                }
                Opens::TwoTruths | Opens::Older | Opens::Few => continue,
            };
            let mut state = *state;
            if !self.led(state.counted, head) {
                state.is_forked = true;
                state.counted = self.committed(head);
            }
            let writer = Writer { here, head, left: self.scope.versions };
            let state = State { writer: Some(writer), ..state };
            next.push((Move::Opens { here, head }, state));
        }
        if self.scope.sets_back {
            next.extend(set_back(state));
        }
        Ok(next)
    }

    /// What has to hold of an opening after disks were set back.
    fn check_set_back(
        &mut self,
        state: &State,
        held: &[u32; DISKS],
        opens: Opens,
    ) -> Result<(), Wrong> {
        if let Opens::At { head, .. } = opens {
            let mut there = held.iter().filter(|id| **id != 0);
            let is_proved = |id: &u32| self.led(self.committed(*id), head);
            return if there.all(is_proved) { Ok(()) } else { Err(Wrong::Contradicts) };
        }
        let proved = |id: &u32| held.iter().any(|by| !self.led(self.committed(*by), *id));
        let lacks = |disk: usize| held[disk] != 0 && proved(&held[disk]);
        if opens == Opens::Few && self.is_all(held) && each(state.older).any(lacks) {
            return Err(Wrong::Unnamed);
        }
        let mut others = *held;
        each(state.older).for_each(|disk| others[disk] = 0);
        let would = !state.is_forked && matches!(self.open(others), Opens::At { .. });
        if would && self.scope.alive { Err(Wrong::Stuck) } else { Ok(()) }
    }

    /// Whether all are there that have a vote in a version that one of those there asks about, and that is somebody.
    fn is_all(&self, held: &[u32; DISKS]) -> bool {
        let asked = held.iter().fold(0, |all, id| all | self.nodes[*id as usize].asked);
        asked != 0 && each(asked).all(|d| held[d] != 0)
    }

    fn next(&mut self, state: &State) -> Result<Vec<(Move, State)>, Wrong> {
        match state.writer {
            Some(writer) => self.writes(state, writer),
            None => self.opened(state),
        }
    }
}

/// Versions that a disk held, with one more.
fn with(past: [u32; PAST], held: u32) -> [u32; PAST] {
    if held == 0 || past.contains(&held) {
        return past;
    }
    let mut all: Vec<u32> = past.into_iter().filter(|id| *id != 0).chain([held]).collect();
    all.sort_unstable();
    assert!(all.len() <= PAST, "so many versions on one disk");
    all.resize(PAST, 0);
    all.try_into().expect("as long")
}

/// Any disk set back to anything that it held, if it was not since it was written.
fn set_back(state: &State) -> Vec<(Move, State)> {
    let mut next = Vec::new();
    for disk in (0..DISKS).filter(|disk| !has(state.older, *disk)) {
        for version in state.past[disk].into_iter().filter(|id| *id != 0 && *id != state.held[disk])
        {
            let mut older = *state;
            older.past[disk] = with(older.past[disk], older.held[disk]);
            older.held[disk] = version;
            older.older |= 1 << disk;
            older.was_set_back = true;
            next.push((Move::SetsBack(disk, version), older));
        }
    }
    next
}

/// Most states that are looked at.
const MOST: usize = 8_000_000;

fn search(scope: Scope) -> Searched {
    let (mut world, first) = World::new(scope);
    let mut came: Came = FxHashMap::default();
    came.insert(first, None);
    let mut cut = vec![first];
    let mut found = None;
    // Each round is an opening; the last one only looks whether there could be one more.
    'rounds: for round in 0..=scope.openings {
        let mut queue = VecDeque::from(std::mem::take(&mut cut));
        while let Some(state) = queue.pop_front() {
            let next = world.next(&state);
            let next = match next {
                Err(wrong) => {
                    found = Some(Found { wrong, history: tell(&world, &came, state) });
                    break 'rounds;
                }
                Ok(mut next) => {
                    if round == scope.openings {
                        next.retain(|(how, _)| matches!(how, Move::SetsBack(..)));
                    }
                    next
                }
            };
            assert!(came.len() < MOST, "too large a scope: {round} {}", queue.len());
            for (how, next) in next {
                came.entry(next).or_insert_with(|| {
                    if next.writer.is_some() || matches!(how, Move::SetsBack(..)) {
                        queue.push_back(next);
                    } else {
                        cut.push(next);
                    }
                    Some((state, how))
                });
            }
        }
    }
    let (states, made, asked) = (came.len(), world.nodes.len(), world.opens.len());
    Searched { states, made, asked, found }
}

fn letters(disks: Disks) -> String {
    each(disks).map(|d| char::from(b'A' + u8::try_from(d).unwrap())).collect()
}

/// How it came to a state.
fn tell(world: &World, came: &Came, last: State) -> String {
    let mut moves = Vec::new();
    let mut at = last;
    while let Some((before, how)) = came[&at] {
        moves.push(how);
        at = before;
    }
    let mut text = String::new();
    for how in moves.iter().rev() {
        match how {
            Move::Opens { here, head } => write!(text, "{} open #{head}; ", letters(*here)),
            Move::Makes(id) => {
                let node = &world.nodes[*id as usize];
                let (version, counted) = (node.metadata.stamp().version, node.metadata.counted());
                let voters = letters(node.voters);
                write!(
                    text,
                    "make #{id} of #{}: version {version}, voters {voters}, {counted} counts; ",
                    node.parent
                )
            }
            Move::Writes(disk) => write!(text, "write {}; ", letters(1 << disk)),
            Move::Cut => writeln!(text, "cut."),
            Move::SetsBack(disk, id) => write!(text, "set {} back to #{id}; ", letters(1 << disk)),
        }
        .unwrap();
    }
    let held: Vec<_> =
        (0..DISKS).map(|d| format!("{}: #{}", letters(1 << d), last.held[d])).collect();
    write!(text, "Held: {}; the last that counts: #{}", held.join(", "), last.counted).unwrap();
    text
}

/// Says what was searched (`cargo test -- --nocapture`), and that nothing was found.
#[track_caller]
fn finds_nothing(scope: Scope) {
    let Scope { members, others, openings, versions, .. } = scope;
    let Searched { states, made, asked, found } = search(scope);
    println!(
        "{members} members and {others} others, {openings} openings of {versions} versions: {states} \
         states, {made} versions, {asked} openings"
    );
    assert!(found.is_none(), "{found:?}");
}

#[track_caller]
fn finds(wrong: Wrong, scope: Scope) {
    let found = search(scope).found.expect("it is found");
    println!("{}", found.history);
    assert_eq!(found.wrong, wrong, "{}", found.history);
}

#[test]
fn two_members_lose_nothing_that_counts() {
    finds_nothing(Scope { members: 2, versions: 3, ..SCOPE });
}

#[test]
fn three_members_lose_nothing_that_counts() {
    finds_nothing(Scope { members: 3, openings: 3, versions: 1, ..SCOPE });
    finds_nothing(Scope { members: 3, ..SCOPE });
}

#[test]
fn four_members_lose_nothing_that_counts() {
    finds_nothing(Scope { members: 4, openings: 1, ..SCOPE });
    finds_nothing(Scope { members: 4, openings: 3, versions: 1, ..SCOPE });
}

#[test]
fn members_that_are_added_lose_nothing_that_counts() {
    finds_nothing(Scope { members: 1, others: 1, ..SCOPE });
    finds_nothing(Scope { members: 1, others: 2, openings: 1, versions: 3, ..SCOPE });
    finds_nothing(Scope { members: 2, others: 1, ..SCOPE });
}

#[test]
fn numbers_that_are_used_again_lose_nothing_that_counts() {
    let scope = Scope { others: 1, removes: true, openings: 1, ..SCOPE };
    finds_nothing(Scope { members: 2, versions: 4, ..scope });
    finds_nothing(Scope { members: 3, versions: 3, ..scope });
}

/// The claim needs only what it names: who else has a vote decides whether the pool can be opened.
#[test]
fn a_writer_that_gives_votes_to_anybody_loses_nothing_that_counts() {
    let rules = Rules { needs_all: false, brings_up: false, picks: false, ..RULES };
    let scope = Scope { rules, alive: false, ..SCOPE };
    finds_nothing(Scope { members: 2, ..scope });
    finds_nothing(Scope { members: 3, ..scope });
    finds_nothing(Scope { members: 4, versions: 1, ..scope });
    finds_nothing(Scope { members: 2, others: 1, versions: 1, ..scope });
}

#[test]
fn that_half_is_enough_to_open_is_found() {
    let rules = Rules { enough: |voters, supporters| supporters * 2 >= voters, ..RULES };
    finds(Wrong::Lost, Scope { rules, members: 2, alive: false, ..SCOPE });
}

#[test]
fn that_only_the_newest_version_is_asked_about_is_found() {
    let rules = Rules { asked: |window| &window[window.len() - 1..], ..RULES };
    finds(Wrong::Lost, Scope { rules, members: 4, versions: 1, alive: false, ..SCOPE });
}

#[test]
fn that_whoever_is_there_supports_is_found() {
    let rules = Rules { supports: |_, _| true, ..RULES };
    finds(Wrong::Lost, Scope { rules, members: 3, alive: false, ..SCOPE });
}

#[test]
fn that_more_than_half_may_be_dropped_is_found() {
    let rules = Rules { may_drop: |voters, dropped| dropped * 2 <= voters + 1, ..RULES };
    finds(Wrong::Lost, Scope { rules, members: 3, alive: false, ..SCOPE });
}

#[test]
fn that_all_versions_are_asked_at_once_what_is_dropped_is_found() {
    let all = |window: &[(u64, Members)]| {
        vec![window.iter().fold((0, Members::default()), |all, (_, some)| (0, all.1.or(*some)))]
    };
    let rules = Rules { groups: all, ..RULES };
    finds(
        Wrong::Lost,
        Scope { rules, members: 2, others: 2, openings: 1, versions: 3, alive: false, ..SCOPE },
    );
}

#[test]
fn that_a_member_has_a_vote_before_it_is_brought_up_is_found() {
    let rules = Rules { brings_up: false, ..RULES };
    finds(Wrong::Stuck, Scope { rules, members: 1, others: 1, ..SCOPE });
}

#[test]
fn that_a_member_that_is_not_there_keeps_its_vote_is_found() {
    let rules = Rules { needs_all: false, ..RULES };
    finds(Wrong::Stuck, Scope { rules, members: 3, versions: 1, ..SCOPE });
}

#[test]
fn that_a_person_is_asked_where_nothing_is_at_stake_is_found() {
    let rules = Rules { picks: false, ..RULES };
    finds(Wrong::TwoTruths, Scope { rules, members: 3, versions: 1, ..SCOPE });
}

const SETS_BACK: Scope = Scope { sets_back: true, ..SCOPE };

#[test]
fn what_any_disk_proves_to_be_committed_led_to_what_is_opened_after_disks_were_set_back() {
    finds_nothing(Scope { members: 2, ..SETS_BACK });
    finds_nothing(Scope { members: 3, openings: 1, ..SETS_BACK });
    finds_nothing(Scope { members: 3, versions: 1, ..SETS_BACK });
    finds_nothing(Scope { members: 4, openings: 1, versions: 1, ..SETS_BACK });
    finds_nothing(Scope { members: 1, others: 1, ..SETS_BACK });
    finds_nothing(Scope { members: 2, others: 1, versions: 1, ..SETS_BACK });
}

#[test]
fn that_a_disk_that_was_set_back_supports_what_came_after_is_found() {
    let rules = Rules { supports: Metadata::follows, ..RULES };
    finds(Wrong::Stale, Scope { rules, members: 3, openings: 1, ..SETS_BACK });
}

#[test]
fn that_what_disks_prove_is_not_heeded_is_found() {
    let rules = Rules { contradicts: |_, _| false, ..RULES };
    finds(Wrong::Contradicts, Scope { rules, members: 3, openings: 1, ..SETS_BACK });
}
