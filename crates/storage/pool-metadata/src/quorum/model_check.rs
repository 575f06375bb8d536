//! Model check of the quorum rules: searches for a history in which the claim of RFD 0030, section
//! 5, does not hold.
//!
//! Each disk holds the version that was last written to it. A writer opens by rule O with any disks
//! present, and then makes versions by rule D: one that changes nothing, detaches any members,
//! reattaches one, adds one or removes one, with or without recording a commit. At any time it
//! writes its newest version to any present disk, or crashes. So each version reaches any subset of
//! the disks, in any order, before or after the next one is made, including disks that it drops. A
//! version is committed when all of its voters hold it or a descendant. Only committed versions are
//! acknowledged, so acknowledgements need no check of their own. The search is breadth first and
//! visits each state once. Scopes, as `(members and others; terms; versions of each)`: up to (2; 2;
//! 3), (3; 2; 2), (3; 3; 1), (4; 1; 2), (4; 3; 1), with disks that are added (1 and 1; 2; 2), (1
//! and 2; 1; 3), (2 and 1; 2; 2), or with numbers used again (2 and 1; 1; 4), (3 and 1; 1; 3); and
//! one term more, of which only the opening is checked. That is 1.5 million states at most, 3.7
//! million together.
//!
//! No disks are declared lost: with a false declaration the claim does not hold.
//!
//! **Rolled-back disks.** While there is no writer, any disks are rolled back, one after the other,
//! each to any version that it held before. Then committed versions may be lost, because no present
//! disk may know of them. The checks are then: every commit that a present disk proves is an
//! ancestor of what is opened; no disk is a supporter that was rolled back behind what it must
//! have; the pool opens wherever it would without the rolled-back disks, unless two histories have
//! been continued; and if it is refused with all disks present, the error names the older ones.

use std::collections::VecDeque;
use std::fmt::Write as _;

use rustc_hash::FxHashMap;
use uuid::Uuid;
use wire::ShortText;

use super::super::metadata::{Change, MemberId, MemberSet, Metadata, PoolMemberState};
use super::{
    MemberMetadata, QuorumRules, RULES, RecoveryError, VoterSet, WriteTargets, holds_all_committed,
};

/// Most disks of a world.
const DISKS: usize = 4;

/// Most versions that a disk is remembered to have held before the one that it holds.
const MAX_HELD_VERSIONS: usize = 5;

/// A set of disks, a bit for each.
type DiskBits = u8;

fn contains(disks: DiskBits, disk: usize) -> bool {
    disks >> disk & 1 != 0
}

fn each(disks: DiskBits) -> impl Iterator<Item = usize> {
    (0..DISKS).filter(move |disk| contains(disks, *disk))
}

fn subsets(disks: DiskBits) -> impl Iterator<Item = DiskBits> {
    (0..1u8 << DISKS).filter(move |some| some & !disks == 0)
}

/// The bounds of the search, and the rules.
#[derive(Clone, Copy)]
struct SearchBounds {
    rules: QuorumRules,
    /// Disks that are members at first, all of them voters.
    members: usize,
    /// Disks that may be added later, numbered after those.
    addable: usize,
    /// How often the pool is opened; one more opening is only checked.
    terms: u8,
    /// Versions of a term, including its first.
    versions_per_term: u8,
    /// Whether the first disk to be added gets the number of the last member, and members may be
    /// removed.
    reuses_ids: bool,
    /// Whether it is also checked that the pool can be opened.
    checks_liveness: bool,
    /// Whether disks are rolled back.
    rolls_back: bool,
}

const DEFAULT_BOUNDS: SearchBounds = SearchBounds {
    rules: RULES,
    members: 0,
    addable: 0,
    terms: 2,
    versions_per_term: 2,
    reuses_ids: false,
    checks_liveness: true,
    rolls_back: false,
};

/// The change of a version; `twin` tells versions with the same change apart.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
struct Step {
    starts_term: bool,
    twin: u8,
    detach: DiskBits,
    reattach: DiskBits,
    remove: DiskBits,
    add: DiskBits,
    committed: u64,
}

/// A version in the tree of all versions.
struct VersionNode {
    metadata: Metadata,
    parent: u32,
    /// Disks that are voters.
    voters: DiskBits,
    /// Disks that are voters of any version in its voter history.
    quorum_disks: DiskBits,
}

/// The writer, if there is one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Writer {
    present: DiskBits,
    head: u32,
    versions_left: u8,
}

/// The state of the model. Version 0 means none.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct State {
    held: [u32; DISKS],
    /// The last committed version.
    committed: u32,
    writer: Option<Writer>,
    /// The versions that each disk held before, in ascending order, then zeroes; empty if no disks
    /// are rolled back.
    held_before: [[u32; MAX_HELD_VERSIONS]; DISKS],
    /// Disks that were rolled back, and not written since.
    rolled_back: DiskBits,
    /// Whether any disk was ever rolled back.
    was_rolled_back: bool,
    /// Whether a committed version has been lost by that, so that there may be two histories.
    is_forked: bool,
}

/// A transition from one state to another.
#[derive(Clone, Copy, Debug)]
enum Transition {
    Open { here: DiskBits, head: u32 },
    MakeVersion(u32),
    Write(usize),
    Cut,
    RollBack(usize, u32),
}

/// The predecessor of each state on the shortest path.
type Predecessors = FxHashMap<State, Option<(State, Transition)>>;

/// The result of opening.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum OpenResult {
    Opened {
        head: u32,
        /// Whether a supporter lacks what the version knows to be committed.
        by_stale: bool,
    },
    SplitBrain,
    RolledBack,
    NoQuorum,
}

/// A violation of the claim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Violation {
    /// A committed version is no ancestor of what is opened.
    CommitLost,
    /// Two committed versions have diverged.
    Forked,
    /// Two diverged versions may be opened, though no disk was declared lost.
    SplitBrain,
    /// The pool cannot be opened though all disks are present, or all voters of the versions in the
    /// voter histories of the present disks. Or it could be opened without the rolled-back disks.
    Stuck,
    /// A commit that a disk proves is no ancestor of what is opened.
    ProvenCommitLost,
    /// A rolled-back disk is a supporter although it has lost commits.
    StaleSupporter,
    /// The error does not name the rolled-back disks.
    RolledBackNotNamed,
}

#[derive(Debug)]
struct Counterexample {
    violation: Violation,
    history: String,
}

/// The result of a search.
#[derive(Debug)]
struct SearchResult {
    states: usize,
    /// Versions made.
    versions: usize,
    /// Sets of disks, with their versions, for which opening was evaluated.
    openings: usize,
    counterexample: Option<Counterexample>,
}

struct ModelState {
    scope: SearchBounds,
    nodes: Vec<VersionNode>,
    children: FxHashMap<(u32, Step), Option<u32>>,
    open_results: FxHashMap<[u32; DISKS], OpenResult>,
}

impl ModelState {
    fn new(bounds: SearchBounds) -> (Self, State) {
        let metadata =
            Metadata::new(Uuid::from_u128(1), ShortText::new("tank"), crate::samples::raid5(3), 1);
        let nothing = VersionNode { metadata, parent: 0, voters: 0, quorum_disks: 0 };
        let mut model = Self {
            scope: bounds,
            nodes: vec![nothing],
            children: FxHashMap::default(),
            open_results: FxHashMap::default(),
        };
        let all = (1 << bounds.members) - 1;
        let first = model.child(0, Step { starts_term: true, add: all, ..Step::default() });
        let first = first.expect("it can be made");
        let second = model.child(first, Step { committed: 1, ..Step::default() });
        let second = second.expect("it can be made");
        let mut held = [0; DISKS];
        held[..bounds.members].fill(second);
        let state = State {
            held,
            committed: second,
            writer: None,
            held_before: [[0; MAX_HELD_VERSIONS]; DISKS],
            rolled_back: 0,
            was_rolled_back: false,
            is_forked: false,
        };
        (model, state)
    }

    fn number(&self, disk: usize) -> MemberId {
        let reused = self.scope.reuses_ids && disk >= self.scope.members;
        MemberId(u16::try_from(if reused { disk - 1 } else { disk }).unwrap())
    }

    fn uuid(disk: usize) -> Uuid {
        Uuid::from_u128(100 + disk as u128)
    }

    fn disk(uuid: Uuid) -> usize {
        usize::try_from(uuid.as_u128() - 100).unwrap()
    }

    fn all_disks(&self) -> DiskBits {
        (1 << (self.scope.members + self.scope.addable)) - 1
    }

    /// The version that a step makes, if it is allowed.
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
        metadata.begin_version(step.committed).ok()?;
        let mut changes = Vec::new();
        if step.starts_term {
            changes.push(Change::StartTerm {
                term_id: Uuid::from_u128(1000 + u128::from(id)),
                is_forced: false,
            });
        }
        changes.extend(each(step.detach).map(|d| Change::Detach(self.number(d))));
        changes.extend(each(step.remove).map(|d| Change::RemoveMember(self.number(d))));
        changes.extend(
            each(step.reattach)
                .map(|d| Change::Reattach { member: self.number(d), only_stale_regions: true }),
        );
        changes.extend(each(step.add).map(|d| Change::AddMember {
            member: self.number(d),
            uuid: Self::uuid(d),
            serial: ShortText::new(&format!("S{d}")),
            physical_extents: 1,
            snapshot_blocks: 64,
            extents_at: 1 << 20,
            is_spare: false,
        }));
        for change in &changes {
            metadata.apply(change).ok()?;
        }
        let votes = metadata.members().filter(|(_, m)| m.state.is_voter());
        let voters = votes.fold(0, |all, (_, m)| all | 1 << Self::disk(m.uuid));
        let asked = self.quorum_disks(parent, &metadata) | voters;
        self.nodes.push(VersionNode { metadata, parent, voters, quorum_disks: asked });
        Some(id)
    }

    /// Voters of the versions before `metadata`, from the last one that it knows to be committed.
    fn quorum_disks(&self, parent: u32, metadata: &Metadata) -> DiskBits {
        let (mut id, mut voters) = (parent, 0);
        while self.nodes[id as usize].metadata.version_id().version >= metadata.committed_version()
            && id != 0
        {
            voters |= self.nodes[id as usize].voters;
            id = self.nodes[id as usize].parent;
        }
        voters
    }

    /// Whether one version is the other or its ancestor, by the tree, which the rules cannot see.
    fn is_ancestor(&self, from: u32, to: u32) -> bool {
        let mut at = to;
        while at > from {
            at = self.nodes[at as usize].parent;
        }
        at == from
    }

    /// The last version that a version knows to be committed, by the tree, which the rules cannot
    /// see.
    fn committed(&self, id: u32) -> u32 {
        let committed = self.nodes[id as usize].metadata.committed_version();
        let mut ancestor = id;
        while ancestor != 0
            && self.nodes[ancestor as usize].metadata.version_id().version > committed
        {
            ancestor = self.nodes[ancestor as usize].parent;
        }
        ancestor
    }

    fn known(&self, held: &[u32; DISKS]) -> Vec<MemberMetadata<'_>> {
        let present = (0..DISKS).filter(|disk| held[*disk] != 0);
        let known = present.map(|disk| MemberMetadata {
            member: self.number(disk),
            uuid: Self::uuid(disk),
            metadata: &self.nodes[held[disk] as usize].metadata,
        });
        known.collect()
    }

    fn open(&mut self, held: [u32; DISKS]) -> OpenResult {
        if let Some(result) = self.open_results.get(&held) {
            return *result;
        }
        let result = match self.scope.rules.recover(&self.known(&held), &[], &[]) {
            Ok(recovered) => {
                let version_id = recovered.metadata.version_id();
                let same =
                    |id: &&u32| self.nodes[**id as usize].metadata.version_id() == version_id;
                let head = *held.iter().filter(|id| **id != 0).find(same).unwrap();
                let supports = |d: &usize| {
                    let member = recovered.metadata.find_member(Self::uuid(*d));
                    held[*d] != 0 && member.is_some_and(|(id, _)| recovered.supporters.contains(id))
                };
                let committed = self.committed(head);
                let by_stale = (0..DISKS)
                    .filter(supports)
                    .any(|disk| !self.is_ancestor(committed, held[disk]));
                OpenResult::Opened { head, by_stale }
            }
            Err(RecoveryError::SplitBrain(_)) => OpenResult::SplitBrain,
            Err(RecoveryError::RolledBackDisks(older)) if !older.rolled_back.is_empty() => {
                OpenResult::RolledBack
            }
            Err(_) => OpenResult::NoQuorum,
        };
        self.open_results.insert(held, result);
        result
    }

    /// The version of a step that no disk holds yet, so that two terms are distinct.
    fn fresh_version(&mut self, state: &State, parent: u32, mut step: Step) -> Option<u32> {
        loop {
            let id = self.child(parent, step)?;
            let left = state.held.iter().any(|held| self.is_ancestor(id, *held));
            if !left || !step.starts_term {
                return Some(id);
            }
            step.twin += 1;
        }
    }

    /// The steps that the writer may take next.
    fn steps(&self, state: &State, writer: Writer) -> Vec<Step> {
        let SearchBounds { members, addable, reuses_ids: removes_members, .. } = self.scope;
        let head = &self.nodes[writer.head as usize];
        let opened = writer.versions_left == self.scope.versions_per_term;
        let committed = self.nodes[state.committed as usize].metadata.version_id().version;
        let known = head.metadata.committed_version();
        let detached = head
            .metadata
            .members()
            .filter(|(_, m)| matches!(m.state, PoolMemberState::Detached { .. }));
        let detached = detached.fold(0u8, |all, (_, m)| all | 1 << Self::disk(m.uuid));
        let present = writer.present;
        let mut kinds: Vec<Step> = subsets(head.voters)
            .map(|detached| Step { starts_term: opened, detach: detached, ..Step::default() })
            .collect();
        let plain = Step { starts_term: opened, ..Step::default() };
        kinds.extend(each(detached & present).map(|d| Step { reattach: 1 << d, ..plain }));
        let is_member = |disk: usize| head.metadata.find_member(Self::uuid(disk)).is_some();
        let free = (members..members + addable).filter(|d| contains(present, *d) && !is_member(*d));
        kinds.extend(free.map(|d| Step { add: 1 << d, ..plain }));
        if removes_members {
            let all = (0..DISKS).filter(|d| is_member(*d));
            kinds.extend(all.map(|d| Step { remove: 1 << d, ..plain }));
        }
        let mut steps = kinds.clone();
        steps.iter_mut().for_each(|step| step.committed = known);
        if committed > known && self.is_ancestor(state.committed, writer.head) {
            kinds.iter_mut().for_each(|step| step.committed = committed);
            steps.extend(kinds);
        }
        steps
    }

    fn may_write(&self, state: &State, writer: Writer, next: u32) -> bool {
        let (before, next) = (&self.nodes[writer.head as usize], &self.nodes[next as usize]);
        let ours =
            each(writer.present).filter(|d| next.metadata.find_member(Self::uuid(*d)).is_some());
        let version_id_of = |d: usize| self.nodes[state.held[d] as usize].metadata.version_id();
        let following = ours.filter(|d| holds_all_committed(&before.metadata, version_id_of(*d)));
        let (mut targets, head) = (WriteTargets::default(), before.metadata.version_id());
        for disk in following {
            let member = self.number(disk);
            targets.following = targets.following.with(member);
            if version_id_of(disk) == head {
                targets.current = targets.current.with(member);
            }
        }
        self.scope
            .rules
            .check_write_quorum(
                &VoterSet::from_metadata(&before.metadata),
                &next.metadata,
                &targets,
            )
            .is_ok()
    }

    /// The last committed version once `state` is reached; an error if two diverged ones are.
    fn committed_after(&self, state: &State, head: u32) -> Result<u32, Violation> {
        let mut id = head;
        while id != 0 && id != state.committed {
            let node = &self.nodes[id as usize];
            if each(node.voters).all(|d| self.is_ancestor(id, state.held[d])) {
                return if self.is_ancestor(state.committed, id) {
                    Ok(id)
                } else {
                    Err(Violation::Forked)
                };
            }
            id = node.parent;
        }
        Ok(state.committed)
    }

    /// The transitions of a state with a writer.
    fn writer_transitions(
        &mut self,
        state: &State,
        writer: Writer,
    ) -> Result<Vec<(Transition, State)>, Violation> {
        let mut next = vec![(Transition::Cut, State { writer: None, ..*state })];
        for disk in each(writer.present).filter(|d| state.held[*d] != writer.head) {
            let mut written = *state;
            written.held[disk] = writer.head;
            if self.scope.rolls_back {
                written.held_before[disk] =
                    with_version(written.held_before[disk], state.held[disk]);
                written.rolled_back &= !(1 << disk);
            }
            written.committed = self.committed_after(&written, writer.head)?;
            next.push((Transition::Write(disk), written));
        }
        if writer.versions_left == 0 {
            return Ok(next);
        }
        for step in self.steps(state, writer) {
            let Some(head) = self.fresh_version(state, writer.head, step) else { continue };
            if self.may_write(state, writer, head) {
                let writer = Writer { head, versions_left: writer.versions_left - 1, ..writer };
                next.push((
                    Transition::MakeVersion(head),
                    State { writer: Some(writer), ..*state },
                ));
            }
        }
        Ok(next)
    }

    /// The transitions of a state without a writer: any disks may be present.
    fn open_transitions(&mut self, state: &State) -> Result<Vec<(Transition, State)>, Violation> {
        let mut next = Vec::new();
        for present in subsets(self.all_disks()) {
            let mut held = state.held;
            (0..DISKS).filter(|d| !contains(present, *d)).for_each(|d| held[d] = 0);
            let result = self.open(held);
            if state.was_rolled_back {
                self.check_rolled_back_open(state, &held, result)?;
            }
            let head = match result {
                OpenResult::Opened { by_stale: true, .. } => return Err(Violation::StaleSupporter),
                OpenResult::Opened { head, .. } if state.was_rolled_back => head,
                OpenResult::Opened { head, .. } if self.is_ancestor(state.committed, head) => head,
                OpenResult::Opened { .. } => return Err(Violation::CommitLost),
                _ if state.was_rolled_back => continue,
                OpenResult::SplitBrain if self.scope.checks_liveness => {
                    return Err(Violation::SplitBrain);
                }
                OpenResult::RolledBack | OpenResult::NoQuorum
                    if self.scope.checks_liveness && self.are_all_voters_present(&held) =>
                {
                    return Err(Violation::Stuck);
                }
                OpenResult::SplitBrain | OpenResult::RolledBack | OpenResult::NoQuorum => continue,
            };
            let mut state = *state;
            if !self.is_ancestor(state.committed, head) {
                state.is_forked = true;
                state.committed = self.committed(head);
            }
            let writer = Writer { present, head, versions_left: self.scope.versions_per_term };
            let state = State { writer: Some(writer), ..state };
            next.push((Transition::Open { here: present, head }, state));
        }
        if self.scope.rolls_back {
            next.extend(rollback_transitions(state));
        }
        Ok(next)
    }

    /// Checks an opening after disks were rolled back.
    fn check_rolled_back_open(
        &mut self,
        state: &State,
        held: &[u32; DISKS],
        result: OpenResult,
    ) -> Result<(), Violation> {
        if let OpenResult::Opened { head, .. } = result {
            let mut present = held.iter().filter(|id| **id != 0);
            let is_proved = |id: &u32| self.is_ancestor(self.committed(*id), head);
            return if present.all(is_proved) { Ok(()) } else { Err(Violation::ProvenCommitLost) };
        }
        let is_behind =
            |id: &u32| held.iter().any(|by| !self.is_ancestor(self.committed(*by), *id));
        let lacks = |disk: usize| held[disk] != 0 && is_behind(&held[disk]);
        if result == OpenResult::NoQuorum
            && self.are_all_voters_present(held)
            && each(state.rolled_back).any(lacks)
        {
            return Err(Violation::RolledBackNotNamed);
        }
        let mut others = *held;
        each(state.rolled_back).for_each(|disk| others[disk] = 0);
        let would_open = !state.is_forked && matches!(self.open(others), OpenResult::Opened { .. });
        if would_open && self.scope.checks_liveness { Err(Violation::Stuck) } else { Ok(()) }
    }

    /// Whether all voters in the voter histories of the present disks are present, and there are
    /// any.
    fn are_all_voters_present(&self, held: &[u32; DISKS]) -> bool {
        let voters = held.iter().fold(0, |all, id| all | self.nodes[*id as usize].quorum_disks);
        voters != 0 && each(voters).all(|d| held[d] != 0)
    }

    fn transitions(&mut self, state: &State) -> Result<Vec<(Transition, State)>, Violation> {
        match state.writer {
            Some(writer) => self.writer_transitions(state, writer),
            None => self.open_transitions(state),
        }
    }
}

/// The versions that a disk held, with one more.
fn with_version(past: [u32; MAX_HELD_VERSIONS], held: u32) -> [u32; MAX_HELD_VERSIONS] {
    if held == 0 || past.contains(&held) {
        return past;
    }
    let mut all: Vec<u32> = past.into_iter().filter(|id| *id != 0).chain([held]).collect();
    all.sort_unstable();
    assert!(all.len() <= MAX_HELD_VERSIONS, "so many versions on one disk");
    all.resize(MAX_HELD_VERSIONS, 0);
    all.try_into().expect("as long")
}

/// Each disk, unless rolled back since its last write, rolled back to each version that it held.
fn rollback_transitions(state: &State) -> Vec<(Transition, State)> {
    let mut next = Vec::new();
    for disk in (0..DISKS).filter(|disk| !contains(state.rolled_back, *disk)) {
        for version in
            state.held_before[disk].into_iter().filter(|id| *id != 0 && *id != state.held[disk])
        {
            let mut older = *state;
            older.held_before[disk] = with_version(older.held_before[disk], older.held[disk]);
            older.held[disk] = version;
            older.rolled_back |= 1 << disk;
            older.was_rolled_back = true;
            next.push((Transition::RollBack(disk, version), older));
        }
    }
    next
}

/// Most states to visit.
const MAX_STATES: usize = 8_000_000;

fn search(scope: SearchBounds) -> SearchResult {
    let (mut world, first) = ModelState::new(scope);
    let mut came: Predecessors = FxHashMap::default();
    came.insert(first, None);
    let mut cut = vec![first];
    let mut found = None;
    // Each round is a term; the last one only checks whether one more could start.
    'rounds: for round in 0..=scope.terms {
        let mut queue = VecDeque::from(std::mem::take(&mut cut));
        while let Some(state) = queue.pop_front() {
            let next = world.transitions(&state);
            let next = match next {
                Err(wrong) => {
                    found = Some(Counterexample {
                        violation: wrong,
                        history: describe_history(&world, &came, state),
                    });
                    break 'rounds;
                }
                Ok(mut next) => {
                    if round == scope.terms {
                        next.retain(|(how, _)| matches!(how, Transition::RollBack(..)));
                    }
                    next
                }
            };
            assert!(came.len() < MAX_STATES, "too large a scope: {round} {}", queue.len());
            for (how, next) in next {
                came.entry(next).or_insert_with(|| {
                    if next.writer.is_some() || matches!(how, Transition::RollBack(..)) {
                        queue.push_back(next);
                    } else {
                        cut.push(next);
                    }
                    Some((state, how))
                });
            }
        }
    }
    let (states, made, asked) = (came.len(), world.nodes.len(), world.open_results.len());
    SearchResult { states, versions: made, openings: asked, counterexample: found }
}

fn letters(disks: DiskBits) -> String {
    each(disks).map(|d| char::from(b'A' + u8::try_from(d).unwrap())).collect()
}

/// Describes the path to a state.
fn describe_history(world: &ModelState, came: &Predecessors, last: State) -> String {
    let mut moves = Vec::new();
    let mut at = last;
    while let Some((before, how)) = came[&at] {
        moves.push(how);
        at = before;
    }
    let mut text = String::new();
    for how in moves.iter().rev() {
        match how {
            Transition::Open { here, head } => write!(text, "{} open #{head}; ", letters(*here)),
            Transition::MakeVersion(id) => {
                let node = &world.nodes[*id as usize];
                let (version, committed) =
                    (node.metadata.version_id().version, node.metadata.committed_version());
                let voters = letters(node.voters);
                write!(
                    text,
                    "make #{id} of #{}: version {version}, voters {voters}, {committed} counts; ",
                    node.parent
                )
            }
            Transition::Write(disk) => write!(text, "write {}; ", letters(1 << disk)),
            Transition::Cut => writeln!(text, "cut."),
            Transition::RollBack(disk, id) => {
                write!(text, "set {} back to #{id}; ", letters(1 << disk))
            }
        }
        .unwrap();
    }
    let held: Vec<_> =
        (0..DISKS).map(|d| format!("{}: #{}", letters(1 << d), last.held[d])).collect();
    write!(text, "Held: {}; the last that counts: #{}", held.join(", "), last.committed).unwrap();
    text
}

/// Prints what was searched (`cargo test -- --nocapture`), and checks that there is no
/// counterexample.
#[track_caller]
fn finds_nothing(scope: SearchBounds) {
    let SearchBounds {
        members, addable: others, terms: openings, versions_per_term: versions, ..
    } = scope;
    let SearchResult { states, versions: made, openings: asked, counterexample: found } =
        search(scope);
    println!(
        "{members} members and {others} others, {openings} openings of {versions} versions: {states} \
         states, {made} versions, {asked} openings"
    );
    assert!(found.is_none(), "{found:?}");
}

#[track_caller]
fn finds(wrong: Violation, scope: SearchBounds) {
    let found = search(scope).counterexample.expect("it is found");
    println!("{}", found.history);
    assert_eq!(found.violation, wrong, "{}", found.history);
}

#[test]
fn two_members_lose_no_committed_version() {
    finds_nothing(SearchBounds { members: 2, versions_per_term: 3, ..DEFAULT_BOUNDS });
}

#[test]
fn three_members_lose_no_committed_version() {
    finds_nothing(SearchBounds { members: 3, terms: 3, versions_per_term: 1, ..DEFAULT_BOUNDS });
    finds_nothing(SearchBounds { members: 3, ..DEFAULT_BOUNDS });
}

#[test]
fn four_members_lose_no_committed_version() {
    finds_nothing(SearchBounds { members: 4, terms: 1, ..DEFAULT_BOUNDS });
    finds_nothing(SearchBounds { members: 4, terms: 3, versions_per_term: 1, ..DEFAULT_BOUNDS });
}

#[test]
fn added_members_lose_no_committed_version() {
    finds_nothing(SearchBounds { members: 1, addable: 1, ..DEFAULT_BOUNDS });
    finds_nothing(SearchBounds {
        members: 1,
        addable: 2,
        terms: 1,
        versions_per_term: 3,
        ..DEFAULT_BOUNDS
    });
    finds_nothing(SearchBounds { members: 2, addable: 1, ..DEFAULT_BOUNDS });
}

#[test]
fn reused_member_ids_lose_no_committed_version() {
    let scope = SearchBounds { addable: 1, reuses_ids: true, terms: 1, ..DEFAULT_BOUNDS };
    finds_nothing(SearchBounds { members: 2, versions_per_term: 4, ..scope });
    finds_nothing(SearchBounds { members: 3, versions_per_term: 3, ..scope });
}

/// The claim does not need these rules: they only decide whether the pool can be opened.
#[test]
fn voters_that_were_not_caught_up_lose_no_committed_version() {
    let rules = QuorumRules {
        voters_must_be_present: false,
        voters_must_be_caught_up: false,
        resolves_uncommitted_forks: false,
        ..RULES
    };
    let scope = SearchBounds { rules, checks_liveness: false, ..DEFAULT_BOUNDS };
    finds_nothing(SearchBounds { members: 2, ..scope });
    finds_nothing(SearchBounds { members: 3, ..scope });
    finds_nothing(SearchBounds { members: 4, versions_per_term: 1, ..scope });
    finds_nothing(SearchBounds { members: 2, addable: 1, versions_per_term: 1, ..scope });
}

#[test]
fn finds_that_half_is_no_quorum() {
    let rules = QuorumRules { is_quorum: |voters, supporters| supporters * 2 >= voters, ..RULES };
    finds(
        Violation::CommitLost,
        SearchBounds { rules, members: 2, checks_liveness: false, ..DEFAULT_BOUNDS },
    );
}

#[test]
fn finds_quorum_of_newest_version_only() {
    let rules = QuorumRules { quorum_versions: |window| &window[window.len() - 1..], ..RULES };
    finds(
        Violation::CommitLost,
        SearchBounds {
            rules,
            members: 4,
            versions_per_term: 1,
            checks_liveness: false,
            ..DEFAULT_BOUNDS
        },
    );
}

#[test]
fn finds_support_by_presence() {
    let rules = QuorumRules { supports: |_, _| true, ..RULES };
    finds(
        Violation::CommitLost,
        SearchBounds { rules, members: 3, checks_liveness: false, ..DEFAULT_BOUNDS },
    );
}

#[test]
fn finds_dropping_a_majority() {
    let rules = QuorumRules { may_drop: |voters, dropped| dropped * 2 <= voters + 1, ..RULES };
    finds(
        Violation::CommitLost,
        SearchBounds { rules, members: 3, checks_liveness: false, ..DEFAULT_BOUNDS },
    );
}

#[test]
fn finds_one_drop_check_for_all_versions() {
    let all = |window: &[(u64, MemberSet)]| {
        vec![
            window.iter().fold((0, MemberSet::default()), |all, (_, some)| (0, all.1.union(*some))),
        ]
    };
    let rules = QuorumRules { drop_groups: all, ..RULES };
    finds(
        Violation::CommitLost,
        SearchBounds {
            rules,
            members: 2,
            addable: 2,
            terms: 1,
            versions_per_term: 3,
            checks_liveness: false,
            ..DEFAULT_BOUNDS
        },
    );
}

#[test]
fn finds_a_voter_that_was_not_caught_up() {
    let rules = QuorumRules { voters_must_be_caught_up: false, ..RULES };
    finds(Violation::Stuck, SearchBounds { rules, members: 1, addable: 1, ..DEFAULT_BOUNDS });
}

#[test]
fn finds_an_absent_voter() {
    let rules = QuorumRules { voters_must_be_present: false, ..RULES };
    finds(
        Violation::Stuck,
        SearchBounds { rules, members: 3, versions_per_term: 1, ..DEFAULT_BOUNDS },
    );
}

#[test]
fn finds_unnecessary_split_brain() {
    let rules = QuorumRules { resolves_uncommitted_forks: false, ..RULES };
    finds(
        Violation::SplitBrain,
        SearchBounds { rules, members: 3, versions_per_term: 1, ..DEFAULT_BOUNDS },
    );
}

const ROLLBACK_SCOPE: SearchBounds = SearchBounds { rolls_back: true, ..DEFAULT_BOUNDS };

#[test]
fn every_proven_commit_is_an_ancestor_of_the_recovered_version() {
    finds_nothing(SearchBounds { members: 2, ..ROLLBACK_SCOPE });
    finds_nothing(SearchBounds { members: 3, terms: 1, ..ROLLBACK_SCOPE });
    finds_nothing(SearchBounds { members: 3, versions_per_term: 1, ..ROLLBACK_SCOPE });
    finds_nothing(SearchBounds { members: 4, terms: 1, versions_per_term: 1, ..ROLLBACK_SCOPE });
    finds_nothing(SearchBounds { members: 1, addable: 1, ..ROLLBACK_SCOPE });
    finds_nothing(SearchBounds { members: 2, addable: 1, versions_per_term: 1, ..ROLLBACK_SCOPE });
}

#[test]
fn finds_support_by_a_rolled_back_disk() {
    let rules = QuorumRules { supports: Metadata::descends_from, ..RULES };
    finds(
        Violation::StaleSupporter,
        SearchBounds { rules, members: 3, terms: 1, ..ROLLBACK_SCOPE },
    );
}

#[test]
fn finds_ignored_proven_commits() {
    let rules = QuorumRules { diverges: |_, _| false, ..RULES };
    finds(
        Violation::ProvenCommitLost,
        SearchBounds { rules, members: 3, terms: 1, ..ROLLBACK_SCOPE },
    );
}
