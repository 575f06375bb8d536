//! When an out-of-sync replica may begin a join attempt (RFD 0010, 6.6).

use std::time::Duration;

/// The least and the longest pause after a failed attempt.
const BACKOFF_MIN: Duration = Duration::from_secs(1);
const BACKOFF_MAX: Duration = Duration::from_secs(60);

/// A failure this long after the previous one counts as the first of a row.
const FAILURE_RESET_AFTER: Duration = Duration::from_secs(120);

/// A member that is excluded this soon after its admission counts as a failed attempt. Longer than
/// the other members take to exclude it.
const MIN_MEMBERSHIP: Duration = Duration::from_secs(30);

/// When an out-of-sync replica may begin a join attempt. Repeated failures are spaced out, so that
/// they do not take all the time of disks and network; an attempt after a success need not wait.
#[derive(Clone, Copy, Debug, Default)]
pub(in super::super) struct JoinBackoff {
    /// Attempts in a row that failed after the primary had accepted them: they cost copying.
    failures: u32,
    /// Attempts in a row that the primary did not answer.
    timeouts: u32,
    /// When the last attempt failed.
    last_failed_at: Duration,
    /// When the last attempt was admitted, if this replica has not been excluded since.
    admitted_at: Option<Duration>,
    /// Until when no attempt begins, because the leg failed one.
    leg_cooldown_until: Duration,
}

impl JoinBackoff {
    pub(in super::super) fn is_ready(&self, now: Duration) -> bool {
        let pause = backoff_delay(self.failures.max(self.timeouts));
        now >= self.leg_cooldown_until && now >= self.last_failed_at + pause
    }

    /// An accepted attempt has failed.
    pub(in super::super) fn after_failure(self, now: Duration) -> Self {
        let failures =
            if now > self.last_failed_at + FAILURE_RESET_AFTER { 0 } else { self.failures };
        Self { failures: failures.saturating_add(1), timeouts: 0, last_failed_at: now, ..self }
    }

    /// The primary has not answered an attempt.
    pub(in super::super) fn after_timeout(self, now: Duration) -> Self {
        Self { timeouts: self.timeouts.saturating_add(1), last_failed_at: now, ..self }
    }

    /// The primary serves and invites joiners, or there is a new session with it.
    pub(in super::super) fn after_invitation(self) -> Self {
        Self { timeouts: 0, ..self }
    }

    /// The leg has failed an attempt: the next begins after `pause` at the earliest.
    pub(in super::super) fn with_leg_cooldown(self, now: Duration, pause: Duration) -> Self {
        Self { leg_cooldown_until: now + pause, ..self }
    }

    /// An attempt has succeeded: this replica is a member.
    pub(in super::super) fn after_admission(self, now: Duration) -> Self {
        Self { admitted_at: Some(now), timeouts: 0, ..self }
    }

    /// This replica was excluded. If that was soon after its admission, the attempt counts as
    /// failed.
    pub(in super::super) fn after_exclusion(self, now: Duration) -> Self {
        match self.admitted_at {
            None => self,
            Some(admitted_at) if now < admitted_at + MIN_MEMBERSHIP => {
                Self { admitted_at: None, ..self }.after_failure(now)
            }
            Some(_) => Self { admitted_at: None, failures: 0, ..self },
        }
    }
}

/// The pause after so many failures in a row.
fn backoff_delay(failures: u32) -> Duration {
    match failures {
        0 | 1 => Duration::ZERO,
        n => (BACKOFF_MIN * (1 << (n - 2).min(16))).min(BACKOFF_MAX),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    /// How long after `now` the next attempt may begin, in whole seconds.
    fn pause_after(attempts: &JoinBackoff, now: Duration) -> u64 {
        let waited = (0..=100).find(|n| attempts.is_ready(now + SECOND * *n));
        u64::from(waited.expect("it may begin at some time"))
    }

    #[test]
    fn repeated_join_failures_back_off() {
        let (mut attempts, mut now) = (JoinBackoff::default(), SECOND);
        let mut pauses = Vec::new();
        for _ in 0..9 {
            now += SECOND / 10;
            attempts = attempts.after_failure(now);
            pauses.push(pause_after(&attempts, now));
            now += SECOND * u32::try_from(pauses[pauses.len() - 1]).unwrap();
        }
        assert_eq!(pauses, [0, 1, 2, 4, 8, 16, 32, 60, 60]);
        now += FAILURE_RESET_AFTER + SECOND;
        assert_eq!(
            pause_after(&attempts.after_failure(now), now),
            0,
            "what is long ago is forgiven"
        );
    }

    #[test]
    fn repeated_early_exclusions_back_off() {
        let (mut attempts, mut now) = (JoinBackoff::default(), SECOND);
        let mut pauses = Vec::new();
        for _ in 0..4 {
            attempts = attempts.after_admission(now).after_exclusion(now + SECOND);
            now += SECOND;
            pauses.push(pause_after(&attempts, now));
            now += SECOND * 8;
        }
        assert_eq!(pauses, [0, 1, 2, 4]);
    }

    #[test]
    fn successful_joins_in_quick_succession_do_not_back_off() {
        let (mut attempts, mut now) = (JoinBackoff::default(), SECOND);
        for _ in 0..20 {
            attempts = attempts.after_admission(now);
            now += MIN_MEMBERSHIP;
            attempts = attempts.after_exclusion(now);
            assert!(attempts.is_ready(now));
        }
        // One success ends a row of failures.
        let failing =
            attempts.after_failure(now).after_failure(now).after_failure(now).after_failure(now);
        assert_eq!(pause_after(&failing, now), 4);
        let admitted = failing.after_admission(now).after_exclusion(now + MIN_MEMBERSHIP);
        assert_eq!(
            pause_after(&admitted.after_failure(now + MIN_MEMBERSHIP), now + MIN_MEMBERSHIP),
            0
        );
    }

    #[test]
    fn a_primary_that_serves_again_is_asked_immediately() {
        let mut attempts = JoinBackoff::default();
        for _ in 0..8 {
            attempts = attempts.after_timeout(SECOND);
        }
        assert_eq!(pause_after(&attempts, SECOND), 60);
        assert_eq!(pause_after(&attempts.after_invitation(), SECOND), 0);
        let both = attempts
            .after_failure(SECOND)
            .after_failure(SECOND)
            .after_failure(SECOND)
            .after_timeout(SECOND)
            .after_invitation();
        assert_eq!(pause_after(&both, SECOND), 2, "what has cost copies is not forgiven by it");
    }

    #[test]
    fn a_leg_that_failed_a_join_backs_off() {
        let attempts =
            JoinBackoff::default().after_failure(SECOND).with_leg_cooldown(SECOND, SECOND * 10);
        assert_eq!(pause_after(&attempts, SECOND), 10);
        assert_eq!(pause_after(&attempts.after_admission(SECOND), SECOND), 10);
    }
}
