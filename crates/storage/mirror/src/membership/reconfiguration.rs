//! Reconfiguration: how a member changes the configuration (RFD 0010, 5.2 and 5.4 to 5.6).
//!
//! Every put follows a quorum read that began after the cause of the put: so an unavailable store
//! does not stop members that do not need it.

use std::time::Duration;

use block::Epoch;
use peer::{Incarnation, NodeId, PeerGenerations, ReplicaReport, Role};

use super::super::config::{InSyncMember as Listed, MirrorConfig, PutOutcome};
use super::{Action, ConfigChange, ConfigRefusal, LegState, MembershipMessage, MirrorMembership};

/// Reads of the configuration, one at a time.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct ConfigReads {
    /// A read is in flight; whether it began before the latest cause for a read.
    pub(super) in_flight: Option<StaleRead>,
    /// There is a hint that the configuration has changed.
    pub(super) change_hinted: bool,
    /// The next read must not begin before this.
    pub(super) not_before: Duration,
    /// Whether the last read was not answered.
    pub(super) is_store_unavailable: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct StaleRead(pub(super) bool);

impl ConfigReads {
    /// Requires a read that begins from now on.
    pub(super) fn require_fresh_read(&mut self) {
        match &mut self.in_flight {
            Some(stale) => *stale = StaleRead(true),
            None if !self.is_store_unavailable => self.not_before = Duration::ZERO,
            None => {}
        }
    }

    /// There is a hint that the configuration has changed.
    pub(super) fn request_read(&mut self) {
        self.change_hinted = true;
        self.require_fresh_read();
    }
}

/// A put whose outcome is unknown.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct PendingReconfiguration {
    pub(super) config: MirrorConfig,
    /// When it was first sent.
    pub(super) sent_at: Duration,
    /// Whether it removes a member.
    pub(super) excludes_member: bool,
    /// Whether the driver has not answered yet.
    pub(super) in_flight: bool,
}

/// Requested changes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct PendingRequests {
    pub(super) leave: bool,
    pub(super) switch_to: Option<NodeId>,
    pub(super) admit: Option<Listed>,
    pub(super) force_primary: bool,
}

impl PendingRequests {
    /// Whether any needs a read. Leaving is handled separately.
    fn has_any(&self) -> bool {
        self.switch_to.is_some() || self.admit.is_some() || self.force_primary
    }

    /// Drops the requests that were meant for the epoch that ended.
    pub(super) fn drop_at_epoch_end(&mut self) {
        (self.switch_to, self.admit) = (None, None);
    }
}

/// What to do about a request.
enum ChangeDecision {
    Put(MirrorConfig),
    Defer,
    Decline,
}

impl MirrorMembership {
    /// Whether there is a reason to read the configuration.
    pub(super) fn needs_config_read(&self, now: Duration) -> bool {
        let put = self.pending_put.as_ref();
        let no_put = put.is_none();
        self.config.is_none() && self.refusal.is_none()
            || self.config_reads.change_hinted
            || put.is_some_and(|p| !p.in_flight)
            || no_put
                && (self.pending_requests.has_any()
                    || self.leave_needs_read()
                    || self.may_take_over(now))
            || no_put && (!self.suspects(now).is_empty() || self.remaining_members(now).is_some())
    }

    /// The configuration, if it lists this replica as a member.
    pub(super) fn config_as_member(&self) -> Option<&MirrorConfig> {
        self.config
            .as_ref()
            .filter(|r| r.has_member(self.me, self.incarnation) && !self.is_incarnation_void)
    }

    pub(super) fn on_config_read(
        &mut self,
        now: Duration,
        config: MirrorConfig,
        next_config_id: u128,
    ) {
        let stale = self.config_reads.in_flight.take() == Some(StaleRead(true));
        self.config_reads.is_store_unavailable = false;
        let known = self.config.as_ref();
        if known.is_some_and(|k| k.epoch > config.epoch) && !self.settings.trusts_store() {
            if !stale {
                let image = known.map_or(self.image_summary.epoch, |k| k.epoch);
                self.refuse(ConfigRefusal::ImageAhead { image, store: config.epoch });
            }
            return;
        }
        if let Some(refusal) =
            self.config_conflict(&config).or_else(|| self.newer_epoch_at_peer(&config, stale))
        {
            self.config_reads.change_hinted = false;
            self.refuse(refusal);
            return;
        }
        let is_new = known.is_none_or(|k| k.epoch < config.epoch) || self.refusal.is_some();
        if is_new {
            self.learn_config(now, config);
        }
        if !stale {
            self.config_reads.change_hinted = false;
            self.reconfigure(now, next_config_id);
            if self.needs_config_read(now) {
                // The requested change is not possible yet.
                self.config_reads.not_before = now + self.settings.renewal_interval();
            }
        }
    }

    pub(super) fn on_config_read_failed(&mut self, now: Duration) {
        self.config_reads.in_flight = None;
        self.config_reads.is_store_unavailable = true;
        self.config_reads.not_before = now + self.settings.renewal_interval();
        if self.pending_put.is_some() {
            return;
        }
        let Some(state) = &mut self.member_state else { return };
        // This node may be the one that is cut off: the others need its leases.
        let mut readmitted = Vec::new();
        for peer in state.peer_leases.iter_mut().flatten().filter(|p| p.is_excluded) {
            (peer.is_excluded, peer.is_revoked) = (false, false);
            readmitted.push(peer.node());
        }
        if self.leg_state == LegState::Healthy {
            // Leaving must wait; serving need not.
            state.stopped_serving_at = None;
        }
        // A member whose lease was revoked serves again only in another view.
        if let Some(node) = readmitted.into_iter().find(|node| self.linked.contains(node)) {
            self.begin_next_round(node);
        }
    }

    /// A replica that was linked before the read began knows of an epoch unknown to the store; or
    /// one did that has no session now, which is why the configuration was refused before.
    fn newer_epoch_at_peer(&self, config: &MirrorConfig, stale: bool) -> Option<ConfigRefusal> {
        if self.settings.trusts_store() {
            return None;
        }
        let ahead = |epoch: Epoch, config_id: u128| {
            epoch > config.epoch || epoch == config.epoch && config_id != config.config_id
        };
        let is_unlinked = |node: NodeId| !self.peer_reports.contains_key(&node);
        match self.refusal {
            Some(refusal @ ConfigRefusal::PeerAhead { node, epoch, config_id })
                if ahead(epoch, config_id) && is_unlinked(node) && config.image(node).is_some() =>
            {
                Some(refusal)
            }
            _ if stale => None,
            _ => {
                let mut reports = self.peer_reports.iter();
                let (&node, report) = reports.find(|(_, s)| ahead(s.epoch, s.config_id))?;
                let (epoch, config_id) = (report.epoch, report.config_id);
                Some(ConfigRefusal::PeerAhead { node, epoch, config_id })
            }
        }
    }

    pub(super) fn on_put_completed(&mut self, now: Duration, outcome: PutOutcome) {
        let Some(put) = &mut self.pending_put else { return };
        put.in_flight = false;
        if outcome == PutOutcome::Committed {
            let config = put.config.clone();
            // Tell all replicas at once, instead of waiting for the change notice of the store.
            for replica in config.replicas.iter().filter(|r| r.node != self.me) {
                self.actions
                    .push(Action::Send(replica.node, MembershipMessage::NewerEpoch(config.epoch)));
            }
            self.learn_config(now, config);
        } else {
            self.config_reads.request_read();
        }
    }

    /// The configuration is current, by a read that began after all causes.
    fn reconfigure(&mut self, now: Duration, next_config_id: u128) {
        let Some(config) = self.config.clone() else { return };
        if let Some(put) = &mut self.pending_put {
            if !put.in_flight {
                put.in_flight = true;
                let (epoch, config_id) = (config.epoch, config.config_id);
                let next = put.config.clone();
                self.actions.push(Action::PutConfig { epoch, config_id, next });
            }
            return;
        }
        let is_forced = self.pending_requests.force_primary && self.member_state.is_none();
        let next = if self.member_state.is_some() {
            self.next_members(now, &config).or_else(|| self.requested_config(&config))
        } else {
            self.decline_leave();
            self.takeover_config(now, &config, next_config_id)
        };
        if let Some(next) = next {
            let mut next = next.next_epoch(next_config_id);
            next.history = self.next_history(&config, &next, is_forced);
            let stays = |m: &Listed| next.member(m.node).is_some();
            let excludes_member = !config.in_sync.iter().all(stays);
            let (epoch, config_id) = (config.epoch, config.config_id);
            self.pending_put = Some(PendingReconfiguration {
                config: next.clone(),
                sent_at: now,
                excludes_member,
                in_flight: true,
            });
            self.actions.push(Action::PutConfig { epoch, config_id, next });
        }
    }

    /// Whether the listed member is linked, and still has the listed incarnation.
    pub(super) fn is_linked_member(&self, listed: &Listed) -> bool {
        let matches_listing =
            |s: &ReplicaReport| s.role == Role::Member && s.incarnation == listed.incarnation;
        self.linked.contains(&listed.node)
            && self.peer_reports.get(&listed.node).is_some_and(matches_listing)
    }

    fn requested_config(&mut self, config: &MirrorConfig) -> Option<MirrorConfig> {
        if self.member_state.as_ref().is_some_and(|s| s.stopped_serving_at.is_some()) {
            return None;
        }
        if let Some(joiner) = self.pending_requests.admit {
            match self.config_with_joiner(config, joiner) {
                ChangeDecision::Defer => {}
                ChangeDecision::Put(next) => return Some(next),
                ChangeDecision::Decline => {
                    self.pending_requests.admit = None;
                    self.actions.push(Action::Decline(ConfigChange::Admit(joiner.node)));
                }
            }
        }
        let to = self.pending_requests.switch_to?;
        match self.config_with_primary(config, to) {
            ChangeDecision::Defer => None,
            ChangeDecision::Put(next) => Some(next),
            ChangeDecision::Decline => {
                self.pending_requests.switch_to = None;
                self.actions.push(Action::Decline(ConfigChange::SwitchPrimary(to)));
                None
            }
        }
    }

    fn config_with_joiner(&self, config: &MirrorConfig, joiner: Listed) -> ChangeDecision {
        let can_join = config.image(joiner.node).is_some() && config.member(joiner.node).is_none();
        if config.primary != self.me || !can_join || !self.is_view_active() {
            return ChangeDecision::Decline;
        }
        if self.excluded_nodes().next().is_some() {
            return ChangeDecision::Defer;
        }
        let mut next = config.clone();
        next.in_sync.push(joiner);
        next.in_sync.sort_unstable_by_key(|m| m.node);
        for replica in next.replicas.iter_mut().filter(|r| r.node == joiner.node) {
            replica.is_new = false;
        }
        ChangeDecision::Put(next)
    }

    fn config_with_primary(&self, config: &MirrorConfig, to: NodeId) -> ChangeDecision {
        if config.primary != self.me || to == self.me {
            return ChangeDecision::Decline;
        }
        match config.member(to) {
            Some(listed) if self.is_linked_member(&listed) => {}
            _ => return ChangeDecision::Decline,
        }
        if self.excluded_nodes().next().is_some() || !self.is_view_active() {
            return ChangeDecision::Defer;
        }
        ChangeDecision::Put(MirrorConfig { primary: to, ..config.clone() })
    }

    /// 5.6: the configuration with which a replica that is not a member may take over.
    fn takeover_config(
        &mut self,
        now: Duration,
        config: &MirrorConfig,
        next_config_id: u128,
    ) -> Option<MirrorConfig> {
        let force = std::mem::take(&mut self.pending_requests.force_primary);
        let replica = config.replicas.iter().find(|r| r.node == self.me);
        // A replica that was never in sync holds nothing worth serving; and nothing is to be forced
        // while a listed peer reports that it is a member.
        let can_force = replica.is_some_and(|r| !r.is_new)
            && !config.others(self.me).any(|m| self.claims_membership(&m));
        let can_take_over =
            replica.is_some() && self.leg_state != LegState::Lost && (can_force || !force);
        if force && !can_take_over {
            self.actions.push(Action::Decline(ConfigChange::ForcePrimary));
        }
        if !can_take_over || !(force || self.may_take_over(now)) {
            return None;
        }
        if std::mem::take(&mut self.is_incarnation_void) {
            // The earlier incarnation may still be listed, and must not be the one that takes over.
            let [_, _, _, _, _, _, _, _, low @ ..] = next_config_id.to_be_bytes();
            self.incarnation = Incarnation(u64::from_be_bytes(low));
        }
        let sole_member = vec![Listed { node: self.me, incarnation: self.incarnation }];
        let in_sync = self.initial_members(config).filter(|_| !force).unwrap_or(sole_member);
        let cold_start_epoch = config.next_epoch(next_config_id).epoch;
        Some(MirrorConfig { in_sync, primary: self.me, cold_start_epoch, ..config.clone() })
    }

    /// The members of a new volume: all replicas that its first configuration lists, if none of
    /// them was ever a member, all are present, and this one is to take over. No lease was granted
    /// and nothing was written, so there is no grace time to wait for, and no data that one could
    /// lack (5.6 e).
    fn initial_members(&self, config: &MirrorConfig) -> Option<Vec<Listed>> {
        let unused = |s: &ReplicaReport| {
            s.role == Role::Restarted && s.epoch == Epoch::default() && !s.is_rolled_back
        };
        let is_new_volume =
            config.is_initial() && unused(&self.public_report()) && !self.image_summary.is_log_lost;
        if !is_new_volume || self.takeover_candidate() != Some(self.me) {
            return None;
        }
        let present = |m: &Listed| {
            let incarnation = match self.peer_reports.get(&m.node) {
                _ if m.node == self.me => self.incarnation,
                report => report.filter(|s| unused(s))?.incarnation,
            };
            Some(Listed { node: m.node, incarnation })
        };
        config.in_sync.iter().map(present).collect()
    }

    /// Whether this replica has restarted and may take over after a total outage.
    fn may_take_over(&self, now: Duration) -> bool {
        let Some(config) = self.config.as_ref().filter(|_| self.role() == Role::Restarted) else {
            return false;
        };
        if self.initial_members(config).is_some() {
            return true;
        }
        let grace_is_over = now >= self.started_at + self.settings.grace();
        let has_member = config.others(self.me).any(|m| self.claims_membership(&m));
        let is_sole = config.in_sync.len() == 1;
        let all_restarted = || config.others(self.me).all(|m| self.claims_non_membership(&m));
        let is_complete =
            self.image_summary.is_complete() && self.peers_without_config().next().is_none();
        let allowed =
            is_sole || is_complete || all_restarted() && self.takeover_candidate() == Some(self.me);
        grace_is_over && !has_member && allowed && self.takeover_forbidden_by().is_none()
    }

    /// Linked replicas that have not read the configuration: they may know that this image is an
    /// older copy, and can report that only then (RFD 0032, attack 7).
    pub(super) fn peers_without_config(&self) -> impl Iterator<Item = NodeId> {
        let has_read = |node: &NodeId| {
            self.peer_reports.get(node).is_some_and(|report| {
                report.role != Role::Unknown || report.generations != PeerGenerations::default()
            })
        };
        self.linked.iter().copied().filter(move |node| !has_read(node))
    }

    /// Whether the listed replica reports that it is a member.
    pub(super) fn claims_membership(&self, listed: &Listed) -> bool {
        self.peer_reports.get(&listed.node).is_some_and(|s| s.role == Role::Member)
    }

    /// Whether the listed replica reports that it restarted or is out of sync.
    pub(super) fn claims_non_membership(&self, listed: &Listed) -> bool {
        let report = self.peer_reports.get(&listed.node);
        report.is_some_and(|s| matches!(s.role, Role::Restarted | Role::OutOfSync))
    }

    /// 5.6 c: the restarted member that takes over. An older copy does not.
    pub(super) fn takeover_candidate(&self) -> Option<NodeId> {
        let config = self.config.as_ref()?;
        let own = (self.me, self.public_report());
        let others = self.peer_reports.iter().map(|(&n, &s)| (n, s));
        others
            .chain([own])
            .filter(|(n, s)| {
                s.role == Role::Restarted && config.member(*n).is_some() && !s.is_rolled_back
            })
            .min_by_key(|(n, s)| (!s.same_boot, *n != config.primary, *n))
            .map(|(n, _)| n)
    }

    /// Sends the report of this replica to all peers, if it has changed.
    pub(super) fn send_reports(&mut self) {
        let report = self.public_report();
        if self.last_report == report {
            return;
        }
        self.last_report = report;
        for &node in &self.linked {
            let report = self.report_for(node);
            self.actions.push(Action::Send(node, MembershipMessage::ReplicaReport(report)));
        }
    }
}
