//! What may not take for ever: logins, silence, the rest of a PDU, answers.

use std::time::Duration;

use super::request::End;
use super::tasks::Kind;
use super::{Connection, Phase};

/// What the machine knows of time. Durations are since the connection began.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Clock {
    now: Duration,
    /// When the target last said anything.
    heard: Duration,
    /// When the ping was sent that is in flight.
    pinged: Option<Duration>,
    /// When to look for requests that have run out of time; never later than the first does.
    due: Option<Duration>,
}

impl Clock {
    pub(super) fn now(&self) -> Duration {
        self.now
    }

    pub(super) fn heard(&mut self) {
        self.heard = self.now;
    }

    /// The ping in flight has been answered.
    pub(super) fn ponged(&mut self) {
        self.pinged = None;
    }

    /// A request has to be answered by then.
    pub(super) fn expect(&mut self, deadline: Option<Duration>) {
        self.due = [self.due, deadline].into_iter().flatten().min();
    }
}

impl Connection {
    pub(super) fn next_deadline(&self) -> Option<Duration> {
        match self.phase {
            Phase::Closed => None,
            Phase::Login(_) => Some(self.config.login_timeout),
            Phase::Running => {
                [self.silence(), self.rest(), self.clock.due].into_iter().flatten().min()
            }
            Phase::Leaving(until) => [Some(until), self.silence(), self.rest(), self.clock.due]
                .into_iter()
                .flatten()
                .min(),
        }
    }

    /// When silence has lasted too long: for a ping, or for the answer to one.
    fn silence(&self) -> Option<Duration> {
        let config = &self.config;
        if config.ping_after.is_zero() {
            return None;
        }
        Some(match self.clock.pinged {
            Some(at) => at.max(self.clock.heard) + config.ping_timeout,
            None => self.clock.heard + config.ping_after,
        })
    }

    /// When the rest of a PDU has stayed away for too long.
    fn rest(&self) -> Option<Duration> {
        let unfinished = !self.receiver.is_between();
        unfinished.then(|| self.clock.heard + self.config.receive_timeout)
    }

    pub(super) fn at(&mut self, now: Duration) {
        self.clock.now = self.clock.now.max(now);
        let now = self.clock.now;
        if self.next_deadline().is_none_or(|at| now < at) {
            return;
        }
        match self.phase {
            Phase::Login(_) => return self.finish(End::LoginTimeout),
            Phase::Leaving(until) if now >= until => return self.finish(End::Overstayed),
            _ => {}
        }
        if self.rest().is_some_and(|at| now >= at) {
            return self.finish(End::ReceiveTimeout);
        }
        // Most requests that the deadline was set for have ended long ago.
        self.clock.due = self.tasks.first_deadline();
        if self.clock.due.is_some_and(|at| now >= at) {
            return self.finish(End::CommandTimeout);
        }
        if self.silence().is_some_and(|at| now >= at) {
            if self.clock.pinged.is_some() {
                return self.finish(End::PingTimeout);
            }
            self.clock.pinged = Some(now);
            self.send_other(Kind::KeepAlive, None, &[]);
        }
    }
}
