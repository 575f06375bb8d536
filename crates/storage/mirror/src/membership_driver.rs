//! Carries out what the membership state machine asks of the store, and watches what it cannot see.

use std::rc::Rc;

use block::Error;
use peer::{Link, Message, NodeId};
use rt::fault_point::{self, FaultPoint};

use super::config::{PutOutcome, StoreUnavailable};
use super::membership::Event;
use super::replica::Replica;
use super::state::Nodes;
use super::state::clearing::CLEAR_INTERVAL;
use super::state::effects::ConfigPut;
use super::state::reachability::WATCHDOG_INTERVAL;
use super::{LegLoss, join};

impl Replica {
    /// Passes an event to the membership state machine.
    pub(super) fn handle_event(self: &Rc<Self>, event: Event) {
        self.step(|s, fx| s.handle_event(event, fx));
    }

    /// Reads the configuration from the store.
    pub(super) async fn read_config(self: Rc<Self>) {
        let result = self.config_store.read().await;
        if result.is_ok() {
            self.step(|s, _| s.on_store_answer());
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
            self.step(|s, _| s.on_store_answer());
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
                let wanted = self.step(|s, _| s.take_join_wanted());
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
            self.sleep(CLEAR_INTERVAL).await;
            if !self.is_closed() && !self.is_leg_lost() {
                self.clear_idle_regions().await;
            }
        }
    }

    /// Finds operations that hang although their node is alive (RFD 0010, 4.8).
    async fn run_watchdog(self: Rc<Self>) {
        while !self.is_closed() {
            self.sleep(WATCHDOG_INTERVAL).await;
            self.step(|s, fx| {
                // Not the system clock: while this process is stopped, it answers nothing and need
                // not.
                s.awake_clock += WATCHDOG_INTERVAL;
                s.poll_config(fx);
            });
            let now = self.awake_now();
            let ago = |time| now.saturating_sub(time);
            let (stuck_before, absent_before) =
                (ago(self.settings.stuck_timeout), ago(self.settings.absent_timeout));
            if self.leg.oldest_started_at().is_some_and(|started_at| started_at < stuck_before)
                && !self.is_leg_lost()
            {
                tracing::error!(
                    "the disk of this replica does not respond: this replica stops using it"
                );
                let loss = LegLoss::DiskUnresponsive;
                self.step(|s, fx| s.on_leg_error_with_loss(Error::Gone, loss, fx));
            }
            self.close_silent_sessions();
            let overdue = self.peer_requests.overdue(stuck_before);
            self.step(|s, fx| {
                if s.is_primary() {
                    s.exclude_unresponsive(stuck_before, absent_before, overdue, fx);
                } else {
                    // Later than the primary detects members that no member reaches.
                    s.report_unreachable(ago(2 * self.settings.absent_timeout), fx);
                }
            });
            self.send_keepalives();
            self.check_free_space();
        }
    }

    /// Closes silent sessions whose nodes are alive, so that new ones may use other paths.
    fn close_silent_sessions(&self) {
        let links = self.sessions.links();
        for link in links.iter().filter(|l| !l.is_closed()) {
            if self.state().is_session_silent(link.node()) {
                tracing::warn!(
                    node = link.node().0,
                    "a session is silent although its node is alive"
                );
                link.close();
            }
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
}
