//! Carries out the actions of the membership state machine, and watches what it cannot see.

use std::pin::Pin;
use std::rc::Rc;
use std::time::Duration;

use block::{Epoch, Error};
use peer::{Link, Message, NodeId, Role};
use rt::fault_point::{self, FaultPoint};

use super::config::{ConfigStore, MirrorConfig, PutOutcome, StoreUnavailable};
use super::membership::{Action, ConfigChange, Event, MembershipMessage};
use super::replica::{Nodes, Replica};
use super::session_handler::is_lease_message;
use super::{LegLoss, bitmap_clearing, join, reachability};

/// How often a replica that does not serve reads its configuration from the store.
const CONFIG_POLL_INTERVAL: Duration = Duration::from_secs(1);

/// Whether the event occurs all the time on an idle replica, and usually changes nothing.
fn is_periodic(event: &Event) -> bool {
    matches!(
        event,
        Event::Tick
            | Event::Received(
                _,
                MembershipMessage::LeaseRequest { .. } | MembershipMessage::LeaseGrant { .. }
            )
    )
}

type ConfigStoreFuture<'a, T> = Pin<Box<dyn Future<Output = T> + 'a>>;

/// A [`ConfigStore`] behind a pointer.
pub(super) trait DynConfigStore {
    fn read(&self) -> ConfigStoreFuture<'_, Result<MirrorConfig, StoreUnavailable>>;
    fn put<'a>(
        &'a self,
        after: Epoch,
        config_id: u128,
        config: &'a MirrorConfig,
    ) -> ConfigStoreFuture<'a, PutOutcome>;
    fn wait_changed(&self) -> ConfigStoreFuture<'_, ()>;
}

impl<R: ConfigStore> DynConfigStore for R {
    fn read(&self) -> ConfigStoreFuture<'_, Result<MirrorConfig, StoreUnavailable>> {
        Box::pin(ConfigStore::read(self))
    }

    fn put<'a>(
        &'a self,
        after: Epoch,
        config_id: u128,
        config: &'a MirrorConfig,
    ) -> ConfigStoreFuture<'a, PutOutcome> {
        Box::pin(ConfigStore::put(self, after, config_id, config))
    }

    fn wait_changed(&self) -> ConfigStoreFuture<'_, ()> {
        Box::pin(ConfigStore::wait_changed(self))
    }
}

impl Replica {
    /// Passes an event to the membership state machine, and performs the actions it returns.
    pub(super) fn handle_event(self: &Rc<Self>, event: Event) {
        if self.is_closed() {
            return;
        }
        let mut is_periodic = is_periodic(&event);
        let was_serving = self.state().was_serving;
        let actions = {
            let membership = &mut self.state_mut().membership;
            membership.set_generations(self.recorded_generations());
            membership.apply(self.core.now(), event)
        };
        for action in actions {
            is_periodic &= matches!(action, Action::Send(..));
            self.perform(action);
        }
        self.timer_signal.raise();
        self.lease_signal.raise();
        let is_serving = self.serving_view().is_some();
        if !is_periodic || was_serving != is_serving {
            self.signal.raise();
        }
        if is_periodic && was_serving && !is_serving {
            // A lease has expired: what to tell initiators depends on whether the store answers.
            self.handle_event(Event::ConfigChanged);
        }
    }

    fn perform(self: &Rc<Self>, action: Action) {
        match action {
            Action::ReadConfig => self.read_config(),
            Action::PutConfig { epoch, config_id, next } => self.put_config(epoch, config_id, next),
            Action::Send(node, message) => self.send_membership(node, message.into()),
            Action::BeginView { view, config } => self.begin_view(view, config),
            Action::SendDoViewChange(view) => self.send_do_view_change(view),
            Action::Reconcile(view) => self.start_reconciliation(view),
            Action::ActivateView(view) => self.activate_view(view),
            Action::BecomeOutOfSync => {
                self.on_out_of_sync();
                self.request_join();
            }
            Action::Refuse(reason) => {
                tracing::error!(why = %reason, "this replica stops serving: its configuration is contradicted");
                self.on_out_of_sync();
            }
            Action::Decline(change) => {
                tracing::warn!(?change, "a configuration change was declined");
                match change {
                    ConfigChange::Admit(node) => {
                        self.state_mut().joiners.clear_admission_proposed(node);
                        self.drop_joiner(node);
                    }
                    ConfigChange::Leave => self.state_mut().declined_leaves += 1,
                    _ => {}
                }
            }
        }
    }

    /// Sends a membership message; lease messages go over all paths.
    fn send_membership(&self, node: NodeId, message: Message) {
        self.state_mut().lease_dedup.note_sent(node, &message);
        let paths = self.state().lease_paths.clone().filter(|_| is_lease_message(&message));
        if let Some(paths) = paths {
            paths(node).iter().for_each(|path| path.send(message.clone()));
        }
        if let Some(link) = self.link(node) {
            link.send(message);
        }
    }

    fn read_config(self: &Rc<Self>) {
        let this = Rc::clone(self);
        self.note_store_request();
        self.spawn(async move {
            let result = this.config_store.read().await;
            if result.is_ok() {
                this.state_mut().store_silent_since = None;
            }
            let next_config_id =
                (u128::from(this.core.random_u64()) << 64) | u128::from(this.core.random_u64());
            this.handle_event(match result {
                Ok(config) => Event::ConfigRead { config, next_config_id },
                Err(StoreUnavailable) => Event::ConfigReadFailed,
            });
        });
    }

    fn put_config(self: &Rc<Self>, epoch: Epoch, config_id: u128, config: MirrorConfig) {
        let number = {
            let put_count = &mut self.state_mut().put_count;
            *put_count += 1;
            *put_count
        };
        let this = Rc::clone(self);
        self.note_store_request();
        self.spawn(async move {
            let members = config.in_sync.iter().map(|m| m.node.0).collect::<Vec<_>>();
            tracing::info!(epoch = config.epoch.0, ?members, "a new configuration is proposed");
            if !this.record_sole_generation(&config).await {
                this.handle_event(Event::PutCompleted(PutOutcome::Conflict));
                return;
            }
            fault_point::reach(FaultPoint::BeforeConfigPut);
            let outcome = this.config_store.put(epoch, config_id, &config).await;
            fault_point::reach(FaultPoint::ConfigPutAnswered);
            if outcome != PutOutcome::Unknown {
                this.state_mut().store_silent_since = None;
            }
            // The result of an earlier put, overtaken by another put to the store, tells nothing
            // about the present one.
            if this.state().put_count == number {
                this.handle_event(Event::PutCompleted(outcome));
            }
        });
    }

    /// Makes this replica check soon whether it may join.
    pub(super) fn request_join(&self) {
        self.state_mut().join_wanted = true;
        self.join_signal.raise();
    }

    /// The leg has failed an operation. Returns whether this is the last member, whose clients get
    /// the error; any other member leaves, and the rest go on.
    pub(super) fn on_leg_error(self: &Rc<Self>, e: Error) -> bool {
        self.on_leg_error_with_loss(e, LegLoss::DiskFailed)
    }

    /// As [`Self::on_leg_error`]; `loss` is why the leg is lost, if it is.
    fn on_leg_error_with_loss(self: &Rc<Self>, e: Error, loss: LegLoss) -> bool {
        if e == Error::NoSpace {
            self.note_no_space();
        }
        let is_member = self.state().membership.role() == Role::Member;
        if !is_member {
            self.fail_join_attempt();
        }
        let is_sole_member = is_member
            && self.others().is_empty()
            && self.state().membership.pending_admission().is_none();
        if is_sole_member {
            // A joiner may have applied the write that failed here: it has to begin again.
            let joiners: Vec<_> = self.state().joiners.attached().collect();
            joiners.into_iter().for_each(|node| self.drop_joiner(node));
        }
        if e == Error::Gone && !self.leg.is_lost() {
            tracing::error!("the leg of this replica is lost");
            self.leg.set_lost(loss);
            self.handle_event(Event::LegLost);
        } else if e != Error::Gone {
            tracing::error!(error = %e, alone = is_sole_member, "the leg of this replica has failed an operation");
            self.state_mut().leg_error = Some(e);
            self.handle_event(Event::LegFailed);
        }
        self.signal.raise();
        is_sole_member
    }

    /// The leg of a joiner has failed: tells the primary not to wait for it.
    fn fail_join_attempt(&self) {
        let Some(attempt) = self.join_attempt() else { return };
        self.end_join_attempt(join::AttemptEnd::Failed);
        let pause = self.settings.rejoin_delay;
        self.update_join_backoff(|attempts| attempts.with_leg_cooldown(self.core.now(), pause));
        if let Some(link) = self.primary_link() {
            link.send(Message::JoinAborted { incarnation: attempt.incarnation() });
        }
    }

    /// A session is up; the older one with that node, if any, has ended.
    pub(super) fn on_session_up(self: &Rc<Self>, link: Link) {
        let node = link.node();
        self.note_session_message(node);
        let old = self.state_mut().links.insert(node, link);
        if let Some(old) = old {
            old.close();
        }
        self.state_mut().unlinked_since.remove(&node);
        self.drop_joiner(node);
        self.handle_event(Event::LinkUp(node));
        self.update_join_backoff(join::JoinBackoff::after_invitation);
        self.request_join();
    }

    /// A session has ended.
    pub(super) fn on_session_down(self: &Rc<Self>, node: NodeId, session: u64) {
        let is_current = self.state().links.get(&node).is_some_and(|l| l.session() == session);
        if !is_current {
            return;
        }
        let old = self.state_mut().links.remove(&node);
        if let Some(link) = old {
            link.close();
        }
        let now = self.awake_now();
        self.state_mut().unlinked_since.insert(node, now);
        self.drop_joiner(node);
        if self.join_attempt().is_some_and(|j| j.session() == session) {
            self.end_join_attempt(join::AttemptEnd::Failed);
        }
        self.handle_event(Event::LinkDown(node));
    }

    /// Starts the background tasks, which run until the replica is closed.
    pub(super) fn spawn_tasks(self: &Rc<Self>) {
        let this = Rc::clone(self);
        self.spawn(async move { this.run_timer().await });
        let this = Rc::clone(self);
        self.spawn(async move { this.watch_config().await });
        let this = Rc::clone(self);
        self.spawn(async move { this.run_joiner().await });
        let this = Rc::clone(self);
        self.spawn(async move { this.run_bitmap_clearing().await });
        let this = Rc::clone(self);
        self.spawn(async move { this.run_watchdog().await });
        self.handle_event(Event::Tick);
    }

    async fn run_timer(self: Rc<Self>) {
        while !self.is_closed() {
            let now = self.core.now();
            let next = self.state().membership.next_timer(now);
            let has_changed = || {
                let closed = self.is_closed();
                closed || self.state().membership.next_timer(self.core.now()) != next
            };
            match next {
                None => self.timer_signal.until(|| has_changed().then_some(())).await,
                Some(next) => {
                    self.timer_signal.unless(has_changed, self.core.sleep_until(next)).await;
                    if self.core.now() >= next {
                        self.handle_event(Event::Tick);
                    }
                }
            }
        }
    }

    async fn watch_config(self: Rc<Self>) {
        while !self.is_closed() {
            let over = || self.is_closed();
            self.signal.unless(over, self.config_store.wait_changed()).await;
            self.handle_event(Event::ConfigChanged);
        }
    }

    async fn run_joiner(self: Rc<Self>) {
        while !self.is_closed() {
            let check = || {
                let wanted = std::mem::take(&mut self.state_mut().join_wanted);
                (wanted || self.is_closed()).then_some(())
            };
            // Check after a second in any case: a request may have been lost.
            let _ = tokio::time::timeout(join::JOIN_CHECK_INTERVAL, self.join_signal.until(check))
                .await;
            let is_ready =
                self.state().join_allowed && self.join_backoff().is_ready(self.core.now());
            if is_ready && !self.is_closed() {
                self.attempt_join().await;
            }
        }
    }

    async fn run_bitmap_clearing(self: Rc<Self>) {
        while !self.is_closed() {
            self.sleep(bitmap_clearing::CLEAR_INTERVAL).await;
            if !self.is_closed() && !self.leg.is_lost() {
                self.clear_idle_regions().await;
            }
        }
    }

    /// Finds operations that hang although their node is alive (RFD 0010, 4.8).
    async fn run_watchdog(self: Rc<Self>) {
        while !self.is_closed() {
            self.sleep(reachability::WATCHDOG_INTERVAL).await;
            // Not the system clock: while this process is stopped, it answers nothing and need not.
            self.state_mut().awake_clock += reachability::WATCHDOG_INTERVAL;
            self.poll_config();
            let before = |time| self.awake_now().saturating_sub(time);
            let (stuck_since, absent_since) =
                (before(self.settings.stuck_timeout), before(self.settings.absent_timeout));
            if self.leg.oldest_started_at().is_some_and(|started_at| started_at < stuck_since)
                && !self.leg.is_lost()
            {
                tracing::error!(
                    "the disk of this replica does not respond: this replica stops using it"
                );
                self.on_leg_error_with_loss(Error::Gone, LegLoss::DiskUnresponsive);
            }
            self.close_silent_sessions();
            if self.is_primary() {
                self.exclude_unresponsive(stuck_since, absent_since);
            } else {
                // Later than the primary detects members that no member reaches.
                self.report_unreachable(before(2 * self.settings.absent_timeout));
            }
            self.send_keepalives();
            self.check_free_space();
        }
    }

    /// While it does not serve, it reads the store repeatedly: it may have missed the change notice
    /// of the configuration it waits for.
    fn poll_config(self: &Rc<Self>) {
        let now = self.awake_now();
        if self.serving_view().is_none()
            && now >= self.state().config_polled_at + CONFIG_POLL_INTERVAL
        {
            self.state_mut().config_polled_at = now;
            self.handle_event(Event::ConfigChanged);
        }
    }

    /// Sends a report on sessions without lease traffic: the loss of a peer that lost power is only
    /// detected by sending.
    fn send_keepalives(&self) {
        let members = if self.serving_view().is_some() { self.others() } else { Nodes::new() };
        let links: Vec<_> = self.state().links.values().cloned().collect();
        for link in links.iter().filter(|link| !members.contains(&link.node())) {
            let report = self.state().membership.report_for(link.node());
            link.send(Message::ReplicaReport(report));
        }
    }

    /// Excludes members that have not answered since `stuck_since`, or have had no session since
    /// `absent_since`.
    fn exclude_unresponsive(self: &Rc<Self>, stuck_since: Duration, absent_since: Duration) {
        let mut unresponsive = self.state().sequencer.overdue(stuck_since);
        unresponsive.extend(self.peer_requests.overdue(stuck_since));
        unresponsive.extend(self.silent_joiners());
        if self.state().view_began_at < stuck_since
            && self.active_view() != self.state().membership.view()
        {
            unresponsive.extend(self.state().membership.missing_do_view_change());
        }
        unresponsive.extend(
            self.state()
                .unlinked_since
                .iter()
                .filter(|(_, at)| **at < absent_since)
                .map(|(n, _)| *n),
        );
        unresponsive.extend(self.unreachable_member());
        unresponsive.sort_unstable();
        unresponsive.dedup();
        for node in unresponsive {
            if self.others().contains(&node) {
                if !self.state().membership.is_peer_stuck(node) {
                    tracing::warn!(
                        node = node.0,
                        "a replica makes no progress although its node is alive"
                    );
                    self.handle_event(Event::PeerStuck(node));
                }
            } else {
                self.drop_joiner(node);
            }
        }
    }

    /// The joiner has ended its attempt.
    pub(super) fn drop_joiner_attempt(
        self: &Rc<Self>,
        node: NodeId,
        incarnation: peer::Incarnation,
    ) {
        let is_current = self.state_mut().joiners.get(node, incarnation).is_some();
        if is_current {
            self.drop_joiner(node);
        }
    }
}
