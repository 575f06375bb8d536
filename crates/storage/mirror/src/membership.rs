//! Membership: which replica serves, when, and how the configuration changes (RFD 0010, 5).
//!
//! [`MirrorMembership`] is the view that one replica has of its volume, a pure state machine:
//! [`MirrorMembership::apply`] takes an event and returns actions. It reads no clock, draws no
//! random number and does no I/O; its driver does, and owns entries, legs and sessions.
//!
//! The duties of the driver:
//! * All times are of one clock, which goes on while the machine is suspended.
//! * It performs actions in order. It answers each [`Action::ReadConfig`] and each
//!   [`Action::PutConfig`] once, within a bounded time, and [`Action::BeginView`] and
//!   [`Action::Reconcile`] unless another view replaces theirs.
//! * It delivers messages of a session between its [`Event::LinkUp`] and its [`Event::LinkDown`],
//!   in the order of the lane.
//! * It asks [`MirrorMembership::may_serve`] after it has read the data, not only before (4.3).

mod generations;
mod interface;
mod lease;
mod lease_revocation;
mod reconfiguration;
mod removal;
mod view;

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use block::Epoch;
use peer::{
    ClockStamp, DataGeneration, Incarnation, NodeId, PeerGenerations, ReplicaReport, Role, View,
};

use self::lease::{PeerLease, to_clock_stamp};
use self::reconfiguration::{ConfigReads, PendingReconfiguration, PendingRequests, StaleRead};
use self::view::{MemberState, ViewPhase};
use super::config::{InSyncMember as Listed, MirrorConfig};

pub use generations::{JoinerComparison, RecordedGenerations};
pub use interface::{
    Action, ConfigChange, ConfigRefusal, Event, ImageSummary, LeaseSettings, MembershipMessage,
    NotServingReason, RollbackWitness, UnsafeLeaseSettings,
};

/// The state of the leg.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum LegState {
    Healthy,
    /// It failed an operation that other members did: it may lack data.
    Failed,
    /// It answers nothing any more.
    Lost,
}

/// The part of one replica in its volume.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct MirrorMembership {
    me: NodeId,
    incarnation: Incarnation,
    settings: LeaseSettings,
    /// When this process started.
    started_at: Duration,
    image_summary: ImageSummary,
    leg_state: LegState,
    /// This incarnation has dropped what it held: it is no member whatever the configuration says.
    is_incarnation_void: bool,
    linked: BTreeSet<NodeId>,
    /// The latest reports of linked replicas.
    peer_reports: BTreeMap<NodeId, ReplicaReport>,
    config: Option<MirrorConfig>,
    refusal: Option<ConfigRefusal>,
    /// Present while the configuration lists this incarnation.
    member_state: Option<MemberState>,
    config_reads: ConfigReads,
    /// A pending reconfiguration (5.2) of the present configuration.
    pending_put: Option<PendingReconfiguration>,
    pending_requests: PendingRequests,
    /// The generations that the image has recorded (RFD 0032).
    generations: RecordedGenerations,
    /// The last data generation that all members of a configuration have recorded.
    common_generation: Option<DataGeneration>,
    /// Nodes whose copies were rolled back, not yet noted in a configuration.
    rolled_back: Vec<NodeId>,
    last_report: ReplicaReport,
    actions: Vec<Action>,
}

impl MirrorMembership {
    /// A replica whose image has just been opened. `incarnation` must never have been used before.
    #[must_use]
    pub fn new(
        me: NodeId,
        incarnation: Incarnation,
        settings: LeaseSettings,
        now: Duration,
        image: ImageSummary,
    ) -> Self {
        let mut membership = Self {
            me,
            incarnation,
            settings,
            started_at: now,
            image_summary: image,
            leg_state: LegState::Healthy,
            is_incarnation_void: false,
            linked: BTreeSet::new(),
            peer_reports: BTreeMap::new(),
            config: None,
            refusal: None,
            member_state: None,
            config_reads: ConfigReads::default(),
            pending_put: None,
            pending_requests: PendingRequests::default(),
            generations: RecordedGenerations {
                generation: image.generation,
                is_log_lost: image.is_log_lost,
                by_image: Vec::new(),
            },
            common_generation: None,
            rolled_back: Vec::new(),
            last_report: replica_report(incarnation, image, Role::Unknown),
            actions: Vec::new(),
        };
        membership.last_report = membership.public_report();
        membership
    }

    /// Handles an event at `now`; returns the actions to perform. The first call must be made at
    /// once, with [`Event::Tick`].
    #[must_use]
    pub fn apply(&mut self, now: Duration, event: Event) -> Vec<Action> {
        match event {
            Event::Tick => {}
            Event::ConfigChanged => self.config_reads.request_read(),
            Event::ConfigRead { config, next_config_id } => {
                self.on_config_read(now, config, next_config_id);
            }
            Event::ConfigReadFailed => self.on_config_read_failed(now),
            Event::PutCompleted(outcome) => self.on_put_completed(now, outcome),
            Event::LinkUp(node) => self.link_up(node),
            Event::LinkDown(node) => {
                self.linked.remove(&node);
                self.peer_reports.remove(&node);
            }
            Event::Received(from, message) => self.on_message(now, from, message),
            Event::ViewBegun(view) => self.on_view_begun(now, view),
            Event::DoViewChange(from, view) => self.on_do_view_change(from, view),
            Event::Reconciled(view) => self.on_reconciled(view),
            Event::StartView(from, view) => self.on_start_view(from, view),
            Event::PeerStuck(node) => self.on_peer_stuck(node),
            Event::LegLost => {
                self.leg_state = LegState::Lost;
                if self.member_state.is_none() {
                    // A pending takeover. If the put was sent and takes effect, a read will show
                    // it.
                    self.pending_put = None;
                }
                self.stop_participating(now);
            }
            Event::JoinStarted(incarnation) => self.on_join_started(incarnation),
            Event::GenerationRecorded(generation) => self.note_common_generation(generation),
            Event::LegFailed => self.on_leg_failed(now),
            Event::Leave | Event::SwitchPrimary(_) | Event::Admit(_) | Event::ForcePrimary => {
                self.on_request(&event);
            }
            Event::CancelAdmission(node) => self.cancel_admission(node),
        }
        self.renew_leases(now);
        self.send_reports();
        if self.config_reads.in_flight.is_none()
            && now >= self.config_reads.not_before
            && self.needs_config_read(now)
        {
            self.config_reads.in_flight = Some(StaleRead(false));
            self.actions.push(Action::ReadConfig);
        }
        std::mem::take(&mut self.actions)
    }

    fn link_up(&mut self, node: NodeId) {
        self.linked.insert(node);
        self.peer_reports.remove(&node);
        let report = MembershipMessage::ReplicaReport(self.report_for(node));
        self.actions.push(Action::Send(node, report));
        self.begin_next_round(node);
    }

    fn on_message(&mut self, now: Duration, from: NodeId, message: MembershipMessage) {
        match message {
            MembershipMessage::ReplicaReport(report) => self.on_replica_report(from, report),
            MembershipMessage::LeaseRequest { epoch, incarnation, stamp } => {
                self.on_lease_request(now, from, epoch, incarnation, stamp);
            }
            MembershipMessage::LeaseGrant { epoch, incarnation, stamp } => {
                let is_current = self.config.as_ref().is_some_and(|r| r.epoch == epoch);
                let state = self
                    .member_state
                    .as_mut()
                    .filter(|_| is_current && incarnation == self.incarnation);
                let stopped = state.as_ref().and_then(|s| s.stopped_serving_at);
                if let Some(peer) = state.and_then(|s| s.peer_lease_mut(from)) {
                    peer.on_grant(stamp, now, stopped);
                }
            }
            MembershipMessage::NewerEpoch(epoch) => {
                if self.config.as_ref().is_none_or(|r| r.epoch < epoch) {
                    self.config_reads.request_read();
                }
            }
            MembershipMessage::RevokeLease { view, incarnation } => {
                self.on_revoke_lease(from, view, incarnation);
            }
            MembershipMessage::LeaseRevoked { view, incarnation } => {
                self.on_lease_revoked(from, view, incarnation);
            }
            MembershipMessage::StartViewChange { view, config } => {
                self.on_start_view_change(now, from, view, config);
            }
        }
    }

    fn on_replica_report(&mut self, from: NodeId, report: ReplicaReport) {
        if !self.linked.contains(&from) {
            return;
        }
        // The report is repeated where no lease traffic keeps the session alive.
        if self.peer_reports.insert(from, report) == Some(report) {
            return;
        }
        self.config_reads.require_fresh_read();
        if let Some(config) = &self.config
            && (report.epoch > config.epoch
                || report.epoch == config.epoch && report.config_id != config.config_id)
        {
            self.config_reads.request_read();
        }
    }

    /// 5.1: grants a lease, if this member may.
    fn on_lease_request(
        &mut self,
        now: Duration,
        from: NodeId,
        epoch: Epoch,
        requester: Incarnation,
        stamp: ClockStamp,
    ) {
        let Some(config) = &self.config else { return };
        if epoch < config.epoch {
            self.actions.push(Action::Send(from, MembershipMessage::NewerEpoch(config.epoch)));
        }
        if epoch > config.epoch {
            self.config_reads.request_read();
        }
        if epoch != config.epoch
            || self.pending_put.is_some()
            || self.leg_state != LegState::Healthy
        {
            return;
        }
        let Some(state) = &mut self.member_state else { return };
        let Some(peer) = state.peer_lease_mut(from) else { return };
        if peer.member.incarnation == requester && !peer.is_excluded {
            peer.grant(now);
            let message = MembershipMessage::LeaseGrant { epoch, incarnation: requester, stamp };
            self.actions.push(Action::Send(from, message));
            if peer.begin_request_back() {
                let stamp = to_clock_stamp(now);
                let message =
                    MembershipMessage::LeaseRequest { epoch, incarnation: self.incarnation, stamp };
                self.actions.push(Action::Send(from, message));
            }
        }
    }

    fn renew_leases(&mut self, now: Duration) {
        let (Some(state), Some(config)) = (&mut self.member_state, &self.config) else { return };
        if state.peer_leases.is_none() || now < state.renew_at {
            return;
        }
        state.renew_at = now + self.settings.renewal_interval();
        let (epoch, incarnation) = (config.epoch, self.incarnation);
        for peer in state.peer_leases() {
            let message =
                MembershipMessage::LeaseRequest { epoch, incarnation, stamp: to_clock_stamp(now) };
            self.actions.push(Action::Send(peer.node(), message));
        }
        self.revoke_leases();
    }

    fn on_peer_stuck(&mut self, node: NodeId) {
        let is_primary = self.is_primary();
        if let Some(peer) =
            self.member_state.as_mut().and_then(|s| s.peer_lease_mut(node)).filter(|_| is_primary)
            && !std::mem::replace(&mut peer.is_stuck, true)
        {
            self.config_reads.require_fresh_read();
        }
    }

    fn on_join_started(&mut self, incarnation: Incarnation) {
        let Some(config) = self.config.as_ref().filter(|_| self.member_state.is_none()) else {
            return;
        };
        self.incarnation = incarnation;
        self.is_incarnation_void = false;
        if self.leg_state == LegState::Failed {
            self.leg_state = LegState::Healthy;
        }
        self.image_summary.is_clean = false;
        (self.image_summary.epoch, self.image_summary.config_id) = (config.epoch, config.config_id);
    }

    /// A put cannot be taken back: the configuration may list the joiner already.
    fn cancel_admission(&mut self, node: NodeId) {
        if self.pending_admission().is_some_and(|joiner| joiner.node == node) {
            self.actions.push(Action::Decline(ConfigChange::CancelAdmission(node)));
        } else {
            self.pending_requests.admit =
                self.pending_requests.admit.filter(|joiner| joiner.node != node);
        }
    }

    fn on_request(&mut self, event: &Event) {
        match event {
            Event::Leave => self.pending_requests.leave = true,
            Event::SwitchPrimary(to) => self.pending_requests.switch_to = Some(*to),
            Event::Admit(joiner) => self.pending_requests.admit = Some(*joiner),
            _ if self.member_state.is_some() => {
                self.actions.push(Action::Decline(ConfigChange::ForcePrimary));
            }
            _ => self.pending_requests.force_primary = true,
        }
        self.config_reads.require_fresh_read();
    }
}

/// Queries.
impl MirrorMembership {
    /// When [`Event::Tick`] is due, unless something else happens before.
    #[must_use]
    pub fn next_timer(&self, now: Duration) -> Option<Duration> {
        let grace = self.settings.grace();
        let read_due = (self.config_reads.in_flight.is_none() && self.needs_config_read(now))
            .then_some(self.config_reads.not_before);
        let peers = self.member_state.iter().flat_map(MemberState::peer_leases);
        let suspected_at = |p: &PeerLease| p.suspect_at(&self.settings) + self.exclusion_delay();
        let peers = peers.flat_map(|p| {
            let expires_at = p.expires_at(&self.settings);
            [suspected_at(p), p.grace_ends_at(&self.settings)].into_iter().chain(expires_at)
        });
        let renewal_due =
            self.member_state.iter().filter(|s| s.peer_leases.is_some()).map(|s| s.renew_at);
        let takeover_due = (self.role() == Role::Restarted).then_some(self.started_at + grace);
        peers.chain(renewal_due).chain(read_due).chain(takeover_due).filter(|&at| at > now).min()
    }

    /// 5.3: whether data just read from the leg may be returned to a client.
    #[must_use]
    pub fn may_serve(&self, now: Duration) -> bool {
        let Some(state) = &self.member_state else { return false };
        let put = self.pending_put.as_ref();
        let blocked_by_put =
            put.is_some_and(|p| p.excludes_member || now >= p.sent_at + self.settings.lease());
        let is_leased = |p: &PeerLease| !p.is_excluded && p.is_held(now, &self.settings);
        let is_active = state.phase == ViewPhase::Active
            && state.stopped_serving_at.is_none()
            && !state.is_lease_revoked();
        is_active && !blocked_by_put && state.peer_leases().iter().all(is_leased)
    }

    /// The view whose messages are accepted: the last one begun.
    #[must_use]
    pub fn view(&self) -> Option<View> {
        self.member_state.as_ref().map(|s| s.view)
    }

    /// Whether the view is active; whether this member serves in it is up to [`Self::may_serve`].
    #[must_use]
    pub fn is_view_active(&self) -> bool {
        self.member_state.as_ref().is_some_and(|s| s.phase == ViewPhase::Active)
    }

    /// At the primary: the linked members that have not answered START VIEW CHANGE.
    #[must_use]
    pub fn missing_do_view_change(&self) -> Vec<NodeId> {
        let Some(state) = &self.member_state else { return Vec::new() };
        let ViewPhase::CollectingEntries { reported } = &state.phase else {
            return Vec::new();
        };
        let nodes = state.peer_leases().iter().map(PeerLease::node);
        nodes.filter(|n| self.linked.contains(n) && !reported.contains(n)).collect()
    }

    /// The joiner that a put of unknown outcome admits. From that put until the next configuration
    /// no round begins, and no write is acknowledged before the joiner has applied it.
    #[must_use]
    pub fn pending_admission(&self) -> Option<Listed> {
        let (put, config) = (self.pending_put.as_ref()?, self.config.as_ref()?);
        put.config.in_sync.iter().copied().find(|m| config.member(m.node).is_none())
    }

    /// Whether the data path has already reported the member on `node` as stuck.
    #[must_use]
    pub fn is_peer_stuck(&self, node: NodeId) -> bool {
        let peers = self.member_state.iter().flat_map(MemberState::peer_leases);
        peers.into_iter().any(|p| p.node() == node && p.is_stuck)
    }

    /// Whether this is a member, and the primary.
    #[must_use]
    pub fn is_primary(&self) -> bool {
        self.member_state.is_some() && self.primary() == Some(self.me)
    }

    /// The primary, by the configuration.
    #[must_use]
    pub fn primary(&self) -> Option<NodeId> {
        self.config.as_ref().map(|r| r.primary)
    }

    /// The latest configuration known.
    #[must_use]
    pub fn config(&self) -> Option<&MirrorConfig> {
        self.config.as_ref()
    }

    /// The present incarnation.
    #[must_use]
    pub fn incarnation(&self) -> Incarnation {
        self.incarnation
    }

    /// The latest clock stamp that the member on `node` has granted; write requests to it carry it
    /// (4.6).
    #[must_use]
    pub fn last_granted_stamp(&self, node: NodeId) -> Option<ClockStamp> {
        let peers = self.member_state.iter().flat_map(MemberState::peer_leases);
        peers.filter(|p| p.node() == node).find_map(PeerLease::clock_stamp)
    }

    /// The role of this replica, as it reports it. With a lost leg it is out of sync, although the
    /// configuration may still list it. With a failed leg it is a member as long as it is listed:
    /// it may hold data that no other replica has, or be the last member.
    #[must_use]
    pub fn role(&self) -> Role {
        match &self.config {
            _ if self.leg_state == LegState::Lost => Role::OutOfSync,
            _ if self.refusal.is_some() => Role::Unknown,
            None => Role::Unknown,
            Some(_) if self.member_state.is_some() => Role::Member,
            Some(config) if config.member(self.me).is_some() => Role::Restarted,
            Some(_) => Role::OutOfSync,
        }
    }

    /// The report for all peers alike.
    fn public_report(&self) -> ReplicaReport {
        let is_rolled_back = self.rolled_back_by().is_some();
        ReplicaReport {
            is_rolled_back,
            ..replica_report(self.incarnation, self.image_summary, self.role())
        }
    }

    /// Why it does not serve; `None` if it does.
    #[must_use]
    pub fn not_serving_reason(&self, now: Duration) -> Option<NotServingReason> {
        if self.may_serve(now) {
            return None;
        }
        if self.leg_state == LegState::Lost {
            return Some(NotServingReason::LegLost);
        }
        if let Some(refusal) = self.refusal {
            return Some(NotServingReason::Refused(refusal));
        }
        let Some(config) = &self.config else {
            return Some(NotServingReason::ConfigUnread {
                store_unavailable: self.config_reads.is_store_unavailable,
            });
        };
        Some(match &self.member_state {
            None if self.pending_put.is_some() => NotServingReason::Reconfiguring,
            None => self.non_member_reason(config),
            Some(state) => self.member_reason(state, config, now),
        })
    }

    fn non_member_reason(&self, config: &MirrorConfig) -> NotServingReason {
        if config.member(self.me).is_none() {
            return NotServingReason::OutOfSync(config.primary);
        }
        if let Some(member) = config.others(self.me).find(|m| self.claims_membership(m)) {
            return NotServingReason::AwaitingExclusion(member.node);
        }
        let unheard = config.others(self.me).filter(|m| !self.claims_non_membership(m));
        let unheard: Vec<_> = unheard.map(|m| m.node).collect();
        let candidate = self.takeover_candidate();
        if let Some(witness) = self.takeover_forbidden_by()
            && (candidate.is_none() || !unheard.is_empty())
        {
            return NotServingReason::RolledBack { witness, unheard };
        }
        let without_config: Vec<_> = self.peers_without_config().collect();
        match candidate {
            _ if self.image_summary.is_complete() && without_config.is_empty() => {
                NotServingReason::TakeoverPending(self.me)
            }
            _ if self.image_summary.is_complete() => {
                NotServingReason::AwaitingConfigRead(without_config)
            }
            Some(candidate) if unheard.is_empty() => NotServingReason::TakeoverPending(candidate),
            _ => NotServingReason::AwaitingRestartedMembers(unheard),
        }
    }

    fn member_reason(
        &self,
        state: &MemberState,
        config: &MirrorConfig,
        now: Duration,
    ) -> NotServingReason {
        let excluded: Vec<_> = self.excluded_nodes().collect();
        if self.pending_put.is_some() {
            return NotServingReason::Reconfiguring;
        }
        if !excluded.is_empty() {
            return NotServingReason::ExcludingMembers(excluded);
        }
        if state.phase == ViewPhase::NotParticipating {
            return NotServingReason::LegFailed;
        }
        if state.stopped_serving_at.is_some() {
            return NotServingReason::Leaving;
        }
        if state.is_lease_revoked() {
            return NotServingReason::LeaseRevoked(config.primary);
        }
        match &state.phase {
            ViewPhase::Draining { .. } => NotServingReason::Draining,
            ViewPhase::AwaitingPrimary => NotServingReason::AwaitingPrimary(config.primary),
            ViewPhase::CollectingEntries { reported } => {
                let missing = config.others(self.me).map(|m| m.node);
                NotServingReason::CollectingEntries(
                    missing.filter(|n| !reported.contains(n)).collect(),
                )
            }
            ViewPhase::Reconciling => NotServingReason::Reconciling,
            ViewPhase::Active | ViewPhase::NotParticipating => {
                let silent = state.peer_leases().iter().filter(|p| !p.is_held(now, &self.settings));
                NotServingReason::LeasesExpired(silent.map(PeerLease::node).collect())
            }
        }
    }
}

fn replica_report(incarnation: Incarnation, image: ImageSummary, role: Role) -> ReplicaReport {
    let ImageSummary { epoch, config_id, is_clean, same_boot, .. } = image;
    let (is_rolled_back, generations) = (false, PeerGenerations::default());
    ReplicaReport {
        incarnation,
        epoch,
        config_id,
        role,
        is_clean,
        same_boot,
        is_rolled_back,
        generations,
    }
}
