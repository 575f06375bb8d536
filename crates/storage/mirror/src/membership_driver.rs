//! Carries out what the membership state machine asks of the store, and watches what it cannot see.

use std::pin::Pin;
use std::rc::Rc;
use std::time::Duration;

use block::{Epoch, Error};
use peer::{Link, Message, NodeId};
use rt::fault_point::{self, FaultPoint};

use super::config::{ConfigStore, MirrorConfig, PutOutcome, StoreUnavailable};
use super::membership::Event;
use super::replica::{Nodes, Replica};
use super::state::effects::ConfigPut;
use super::{LegLoss, bitmap_clearing, join, reachability};

/// How often a replica that does not serve reads its configuration from the store.
const CONFIG_POLL_INTERVAL: Duration = Duration::from_secs(1);

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
    /// Passes an event to the membership state machine.
    pub(super) fn handle_event(self: &Rc<Self>, event: Event) {
        self.step(|s, fx| s.handle_event(event, fx));
    }

    /// Reads the configuration from the store.
    pub(super) async fn read_config(self: Rc<Self>) {
        let result = self.config_store.read().await;
        if result.is_ok() {
            self.state_mut().store_silent_since = None;
        }
        let next_config_id =
            (u128::from(self.core.random_u64()) << 64) | u128::from(self.core.random_u64());
        self.handle_event(match result {
            Ok(config) => Event::ConfigRead { config, next_config_id },
            Err(StoreUnavailable) => Event::ConfigReadFailed,
        });
    }

    /// Puts a configuration to the store.
    pub(super) async fn put_config(self: Rc<Self>, put: ConfigPut) {
        let ConfigPut { number, epoch, config_id, next } = put;
        let members = next.in_sync.iter().map(|m| m.node.0).collect::<Vec<_>>();
        tracing::info!(epoch = next.epoch.0, ?members, "a new configuration is proposed");
        if !self.record_sole_generation(&next).await {
            self.handle_event(Event::PutCompleted(PutOutcome::Conflict));
            return;
        }
        fault_point::reach(FaultPoint::BeforeConfigPut);
        let outcome = self.config_store.put(epoch, config_id, &next).await;
        fault_point::reach(FaultPoint::ConfigPutAnswered);
        if outcome != PutOutcome::Unknown {
            self.state_mut().store_silent_since = None;
        }
        // The result of an earlier put, overtaken by another put to the store, tells nothing about
        // the present one.
        if self.state().put_count == number {
            self.handle_event(Event::PutCompleted(outcome));
        }
    }

    /// The leg has failed an operation. Returns whether this is the last member, whose clients get
    /// the error; any other member leaves, and the rest go on.
    pub(super) fn on_leg_error(self: &Rc<Self>, e: Error) -> bool {
        self.step(|s, fx| s.on_leg_error(e, fx))
    }

    /// Ends the attempt of `node`: no write waits for it any more.
    pub(super) fn drop_joiner(self: &Rc<Self>, node: NodeId) {
        self.step(|s, fx| s.drop_joiner(node, fx));
    }

    /// A session is up; the older one with that node, if any, has ended.
    pub(super) fn on_session_up(self: &Rc<Self>, link: Link) {
        let node = link.node();
        self.sessions.insert(link);
        self.step(|s, fx| s.on_session_up(node, fx));
    }

    /// A session has ended.
    pub(super) fn on_session_down(self: &Rc<Self>, node: NodeId, session: u64) {
        if self.sessions.remove(node, session) {
            self.step(|s, fx| s.on_session_down(node, session, fx));
        }
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
            if !self.is_closed() && !self.is_leg_lost() {
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
                && !self.is_leg_lost()
            {
                tracing::error!(
                    "the disk of this replica does not respond: this replica stops using it"
                );
                let loss = LegLoss::DiskUnresponsive;
                self.step(|s, fx| s.on_leg_error_with_loss(Error::Gone, loss, fx));
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
        let links = self.sessions.links();
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
}
