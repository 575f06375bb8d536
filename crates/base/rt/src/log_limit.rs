//! A limit of log lines about strangers.

use std::time::Duration;

use tokio::time::Instant;

/// How many lines there are at most in what time.
const LINES: u32 = 10;
const PERIOD: Duration = Duration::from_secs(60);

/// Lets ten lines a minute into the log and counts those that are left out, so that nobody fills it.
#[derive(Debug, Default)]
pub struct LogLimit {
    since: Option<Instant>,
    lines: u32,
    unlogged: u64,
}

impl LogLimit {
    /// Whether there may be a line now; then how many were left out before it.
    pub fn line(&mut self, now: Instant) -> Option<u64> {
        if self.since.is_none_or(|since| now.saturating_duration_since(since) >= PERIOD) {
            (self.since, self.lines) = (Some(now), 0);
        }
        if self.lines >= LINES {
            self.unlogged += 1;
            return None;
        }
        self.lines += 1;
        Some(std::mem::take(&mut self.unlogged))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_is_ten_lines_a_minute_and_the_number_of_the_others() {
        let (mut limit, now) = (LogLimit::default(), Instant::now());
        let lines = |limit: &mut LogLimit, now| (0..100).filter_map(|_| limit.line(now)).collect();
        let first: Vec<u64> = lines(&mut limit, now);
        assert_eq!(first, [0; 10]);
        assert_eq!(limit.line(now + PERIOD / 2), None);
        let next: Vec<u64> = lines(&mut limit, now + PERIOD);
        assert_eq!((next.len(), next[0], next[1]), (10, 91, 0));
    }
}
