//! The versions of a pool's metadata as a state machine: queued requests are proposed as the next
//! version, members acknowledge it, and it is committed (RFD 0030, 5). Plain data:
//! [`MetadataWriter`](super::metadata_writer) writes, waits and answers.

use std::collections::VecDeque;

use pool_metadata::journal::JournalBlock;
use pool_metadata::quorum::{VoterSet, WriteTargets, check_write_quorum};
use pool_metadata::{Change, MemberId, MemberSet, Metadata};
use tokio::sync::oneshot;

use super::error::PoolError;

/// Changes that are made in one version, and the task that waits for that.
#[derive(Debug)]
pub(super) struct CommitRequest {
    changes: Vec<Change>,
    /// Whether all voters must know of the commit.
    waits_until_known: bool,
    reply: Option<oneshot::Sender<Result<(), PoolError>>>,
}

impl CommitRequest {
    /// A request to commit `changes`; it may wait until all voters know of the commit.
    pub(super) fn new(
        changes: Vec<Change>,
        waits_until_known: bool,
        reply: Option<oneshot::Sender<Result<(), PoolError>>>,
    ) -> Self {
        Self { changes, waits_until_known, reply }
    }

    /// Ends the request. The changes that were made stay made if no task waits any more.
    pub(super) fn complete(mut self, outcome: Result<(), PoolError>) {
        if let Some(reply) = self.reply.take() {
            let _ = reply.send(outcome);
        }
    }
}

/// A version that is being written.
#[derive(Debug)]
pub(super) struct Proposal {
    /// What the members get.
    pub(super) block: JournalBlock,
    /// The members that are voters in it.
    pub(super) voters: MemberSet,
    /// Whether a voter has failed to write it.
    has_failed: bool,
}

/// What follows from the answer of a member.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Acknowledgement {
    /// It holds the version.
    Written,
    /// It is a voter and failed: it gets no more versions, and the next one detaches it.
    VoterFailed,
    /// It is a learner and failed: it gets no more versions, and does not become a voter.
    LearnerFailed,
}

/// The queue of changes, and how far they are committed.
#[derive(Debug, Default)]
pub(super) struct VersionLog {
    /// The last version known to be committed.
    committed: u64,
    /// The last version of whose commit all voters know.
    commit_known: u64,
    queued: VecDeque<CommitRequest>,
    /// Requests whose version is not committed yet, or not yet known to be.
    pending: Vec<(u64, CommitRequest)>,
}

impl VersionLog {
    /// Continues from a version all of whose voters know that it is committed.
    pub(super) fn new(committed: u64) -> Self {
        Self { committed, commit_known: committed, ..Self::default() }
    }

    /// The last version known to be committed.
    pub(super) fn committed(&self) -> u64 {
        self.committed
    }

    /// The last version of whose commit all voters know.
    pub(super) fn commit_known(&self) -> u64 {
        self.commit_known
    }

    /// Queues a request.
    pub(super) fn enqueue(&mut self, request: CommitRequest) {
        self.queued.push_back(request);
    }

    /// Whether there is a version to write. A request that waits until its commit is known needs
    /// one more.
    pub(super) fn has_work(&self) -> bool {
        !self.queued.is_empty() || !self.pending.is_empty()
    }

    /// Makes the queued changes the next version of `metadata`, as far as they fit into a block.
    /// Requests that are refused end at once. `following` gets every version and holds the last
    /// one.
    ///
    /// # Errors
    /// The version may not be written: nothing more is.
    pub(super) fn propose(
        &mut self,
        metadata: &mut Metadata,
        following: MemberSet,
        declared_lost: MemberSet,
    ) -> Result<Proposal, PoolError> {
        let before = VoterSet::from_metadata(metadata);
        let previous_term = metadata.version_id().term_id;
        let committed = self.committed;
        metadata.begin_version(committed)?;
        let (changes, requests) = self.take_batch(metadata, following);
        let written = WriteTargets { following, current: following, declared_lost };
        check_write_quorum(&before, metadata, &written)
            .map_err(|why| PoolError::new(why.to_string()))?;
        let version_id = metadata.version_id();
        self.pending.extend(requests.into_iter().map(|request| (version_id.version, request)));
        let block = JournalBlock { version_id, previous_term, committed, changes };
        Ok(Proposal { block, voters: metadata.voters(), has_failed: false })
    }

    /// Applies queued requests as far as they fit into a block, and fails those that are refused.
    fn take_batch(
        &mut self,
        metadata: &mut Metadata,
        following: MemberSet,
    ) -> (Vec<Change>, Vec<CommitRequest>) {
        let (mut changes, mut applied, mut free_bytes) =
            (Vec::new(), Vec::new(), JournalBlock::capacity_bytes());
        while let Some(next) = self.queued.pop_front() {
            if let Some(id) = next.changes.iter().find_map(|c| failed_new_voter(c, following)) {
                let message = format!("disk {} failed while it was being added", id.0);
                next.complete(Err(PoolError::new(message)));
                continue;
            }
            let bytes: usize = next.changes.iter().map(Change::encoded_bytes).sum();
            if bytes > free_bytes {
                if applied.is_empty() && changes.is_empty() {
                    next.complete(Err(PoolError::new("the changes do not fit into one version")));
                    continue;
                }
                self.queued.push_front(next);
                break;
            }
            match next.changes.iter().try_for_each(|change| metadata.apply(change)) {
                Ok(()) => {
                    free_bytes -= bytes;
                    changes.extend(next.changes.iter().cloned());
                    applied.push(next);
                }
                Err(why) => next.complete(Err(why.into())),
            }
        }
        (changes, applied)
    }

    /// A member has written the version, or failed to.
    pub(super) fn acknowledge(
        &mut self,
        proposal: &mut Proposal,
        member: MemberId,
        is_written: bool,
    ) -> Acknowledgement {
        match (is_written, proposal.voters.contains(member)) {
            (true, _) => Acknowledgement::Written,
            (false, true) => {
                proposal.has_failed = true;
                self.detach_failed(member);
                Acknowledgement::VoterFailed
            }
            (false, false) => Acknowledgement::LearnerFailed,
        }
    }

    /// A voter has failed: the next version detaches it.
    pub(super) fn detach_failed(&mut self, member: MemberId) {
        let detach = CommitRequest::new(vec![Change::Detach(member)], true, None);
        self.queued.push_front(detach);
    }

    /// All members have answered: a version that all voters hold is committed, and they know of the
    /// commit that it records. Returns the requests that end with that.
    pub(super) fn commit(&mut self, proposal: &Proposal) -> Vec<CommitRequest> {
        if !proposal.has_failed {
            self.committed = proposal.block.version_id.version;
            self.commit_known = proposal.block.committed;
        }
        let (committed, known) = (self.committed, self.commit_known);
        let is_complete = |(version, request): &mut (u64, CommitRequest)| {
            *version <= if request.waits_until_known { known } else { committed }
        };
        self.pending.extract_if(.., is_complete).map(|(_, request)| request).collect()
    }

    /// Takes all requests, which get no answer from versions any more.
    pub(super) fn take_requests(&mut self) -> Vec<CommitRequest> {
        let pending = std::mem::take(&mut self.pending).into_iter().map(|(_, request)| request);
        std::mem::take(&mut self.queued).into_iter().chain(pending).collect()
    }
}

/// The member that `change` would make a voter, if it does not get every version: it has failed
/// since it was added as a learner, and must not become one.
fn failed_new_voter(change: &Change, following: MemberSet) -> Option<MemberId> {
    let (Change::AddMember { member, .. } | Change::Reattach { member, .. }) = change else {
        return None;
    };
    (!following.contains(*member)).then_some(*member)
}

#[cfg(test)]
mod tests {
    use super::*;
    use pool_metadata::samples::pool;

    type Reply = oneshot::Receiver<Result<(), PoolError>>;

    fn members(all: &[u16]) -> MemberSet {
        all.iter().copied().map(MemberId).collect()
    }

    fn request(log: &mut VersionLog, changes: Vec<Change>, waits_until_known: bool) -> Reply {
        let (reply, outcome) = oneshot::channel();
        log.enqueue(CommitRequest::new(changes, waits_until_known, Some(reply)));
        outcome
    }

    /// Writes one version: all of `following` answer, and those in `failing` fail.
    fn write(
        (log, metadata): (&mut VersionLog, &mut Metadata),
        following: &[u16],
        failing: &[u16],
    ) -> Proposal {
        let mut proposal = log.propose(metadata, members(following), MemberSet::default()).unwrap();
        for id in following {
            log.acknowledge(&mut proposal, MemberId(*id), !failing.contains(id));
        }
        log.commit(&proposal).into_iter().for_each(|request| request.complete(Ok(())));
        proposal
    }

    fn outcome(reply: &mut Reply) -> Option<bool> {
        reply.try_recv().ok().map(|outcome| outcome.is_ok())
    }

    #[test]
    fn a_version_is_committed_when_all_voters_have_written_it() {
        let (mut metadata, mut log) = (pool(3), VersionLog::new(1));
        let mut soon = request(&mut log, vec![Change::LogsRecovered], false);
        let mut known = request(&mut log, Vec::new(), true);
        write((&mut log, &mut metadata), &[0, 1, 2], &[]);
        assert_eq!((outcome(&mut soon), outcome(&mut known)), (Some(true), None));
        assert_eq!((log.committed(), log.commit_known()), (2, 1));
        assert!(log.has_work(), "the next version tells the voters of the commit");
        write((&mut log, &mut metadata), &[0, 1, 2], &[]);
        assert_eq!(outcome(&mut known), Some(true));
        assert!(!log.has_work());
    }

    #[test]
    fn the_next_version_detaches_a_voter_that_failed_and_commits_both() {
        let (mut metadata, mut log) = (pool(3), VersionLog::new(1));
        let mut change = request(&mut log, vec![Change::LogsRecovered], false);
        write((&mut log, &mut metadata), &[0, 1, 2], &[2]);
        assert_eq!((outcome(&mut change), log.committed()), (None, 1));
        let proposal = write((&mut log, &mut metadata), &[0, 1], &[]);
        assert_eq!(proposal.block.changes, [Change::Detach(MemberId(2))]);
        assert_eq!(proposal.voters, members(&[0, 1]));
        assert_eq!((outcome(&mut change), log.committed()), (Some(true), 3));
    }

    #[test]
    fn a_request_that_is_refused_fails_alone() {
        let (mut metadata, mut log) = (pool(3), VersionLog::new(1));
        let mut refused = request(&mut log, vec![Change::Detach(MemberId(9))], false);
        let mut applied = request(&mut log, vec![Change::LogsRecovered], false);
        let proposal = write((&mut log, &mut metadata), &[0, 1, 2], &[]);
        assert_eq!((outcome(&mut refused), outcome(&mut applied)), (Some(false), Some(true)));
        assert_eq!(proposal.block.changes, [Change::LogsRecovered]);
    }

    #[test]
    fn a_learner_that_failed_does_not_become_a_voter() {
        let (mut metadata, mut log) = (pool(3), VersionLog::new(1));
        let mut proposal =
            log.propose(&mut metadata, members(&[0, 1, 2, 3]), MemberSet::default()).unwrap();
        let answer = log.acknowledge(&mut proposal, MemberId(3), false);
        assert_eq!(answer, Acknowledgement::LearnerFailed);
        log.commit(&proposal);
        let reattach = Change::Reattach { member: MemberId(3), only_stale_regions: false };
        let mut admitted = request(&mut log, vec![reattach], true);
        write((&mut log, &mut metadata), &[0, 1, 2], &[]);
        assert_eq!((outcome(&mut admitted), log.committed()), (Some(false), 3));
    }

    #[test]
    fn requests_that_get_no_version_are_handed_back_in_order() {
        let (mut metadata, mut log) = (pool(3), VersionLog::new(1));
        let _first = request(&mut log, vec![Change::LogsRecovered], true);
        log.propose(&mut metadata, members(&[0, 1, 2]), MemberSet::default()).unwrap();
        let _second = request(&mut log, Vec::new(), false);
        let left: Vec<_> = log.take_requests().iter().map(|r| r.changes.len()).collect();
        assert_eq!((left, log.has_work()), (vec![0, 1], false));
    }

    #[test]
    fn a_version_that_may_not_be_written_is_no_proposal() {
        let (mut metadata, mut log) = (pool(3), VersionLog::new(1));
        let detach = [0, 1].map(|id| Change::Detach(MemberId(id))).to_vec();
        let _reply = request(&mut log, detach, true);
        assert!(log.propose(&mut metadata, members(&[0, 1, 2]), MemberSet::default()).is_err());
    }
}
