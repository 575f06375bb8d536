//! Limits log lines that clients can cause.

use std::time::Duration;

use tokio::time::Instant;

/// Most lines per period, and the period.
const MAX_LINES: u32 = 10;
const LIMIT_PERIOD: Duration = Duration::from_secs(60);

/// Permits ten log lines a minute and counts suppressed ones, so that clients cannot flood the log.
#[derive(Debug, Default)]
pub struct LogLimit {
    period_start: Option<Instant>,
    lines: u32,
    suppressed: u64,
}

impl LogLimit {
    /// Whether a line may be logged now; if so, how many were suppressed before it.
    pub fn try_log(&mut self, now: Instant) -> Option<u64> {
        if self
            .period_start
            .is_none_or(|since| now.saturating_duration_since(since) >= LIMIT_PERIOD)
        {
            (self.period_start, self.lines) = (Some(now), 0);
        }
        if self.lines >= MAX_LINES {
            self.suppressed += 1;
            return None;
        }
        self.lines += 1;
        Some(std::mem::take(&mut self.suppressed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn at_most_ten_lines_a_minute_and_a_count_of_the_rest() {
        let (mut limit, now) = (LogLimit::default(), Instant::now());
        let lines =
            |limit: &mut LogLimit, now| (0..100).filter_map(|_| limit.try_log(now)).collect();
        let first: Vec<u64> = lines(&mut limit, now);
        assert_eq!(first, [0; 10]);
        assert_eq!(limit.try_log(now + LIMIT_PERIOD / 2), None);
        let next: Vec<u64> = lines(&mut limit, now + LIMIT_PERIOD);
        assert_eq!((next.len(), next[0], next[1]), (10, 91, 0));
    }
}
