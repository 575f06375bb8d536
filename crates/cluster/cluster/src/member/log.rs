//! etcd's log: one JSON object a line, and plain text where it panics.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::Deserialize;
use tokio::time::Instant;

/// How long a warning that is repeated is counted before it is told again.
const PERIOD: Duration = Duration::from_secs(600);

/// Warnings that are told apart; etcd has a few dozen.
const MAX_KINDS: usize = 64;

/// How much a line matters, in etcd's words.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Level {
    /// Told to nobody but the curious.
    Trace,
    /// What etcd does.
    Debug,
    /// It gets on, with difficulty.
    Warn,
    /// It ends.
    Fatal,
}

/// A line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Line {
    pub(super) level: Level,
    pub(super) message: String,
    /// What it says went wrong.
    pub(super) error: String,
}

#[derive(Deserialize)]
struct Json {
    level: String,
    msg: String,
    #[serde(default)]
    error: String,
}

impl Line {
    pub(super) fn parse(line: &str) -> Self {
        let Ok(Json { level, msg, error }) = serde_json::from_str(line) else {
            return Self::plain(line);
        };
        let level = match level.as_str() {
            "debug" => Level::Trace,
            "info" => Level::Debug,
            "warn" | "error" => Level::Warn,
            _ => Level::Fatal,
        };
        Self { level, message: msg, error }
    }

    /// The end of a process that panicked, and the trace after it.
    fn plain(line: &str) -> Self {
        let ends = line.starts_with("panic: ") || line.starts_with("fatal error: ");
        let level = if ends { Level::Fatal } else { Level::Debug };
        Self { level, message: line.to_owned(), error: String::new() }
    }

    /// The line as one text.
    pub(super) fn text(&self) -> String {
        match self.error.as_str() {
            "" => self.message.clone(),
            error => format!("{}: {error}", self.message),
        }
    }
}

/// etcd's warnings in our own log. It repeats each many times a minute while a member is away or a disk is
/// slow: what matters to people, the status says in other words.
#[derive(Debug, Default)]
pub(super) struct Warnings(BTreeMap<String, Repeated>);

/// A warning that has been told.
#[derive(Debug)]
struct Repeated {
    since: Instant,
    /// How often it came since then, and what it said last.
    times: u32,
    last: String,
}

impl Warnings {
    /// Takes a line; gives those that go into our own log now, with their levels. What ends etcd is a warning
    /// there: it is started again, and where that does not help the supervisor says so.
    pub(super) fn take(&mut self, now: Instant, line: &Line) -> Vec<(Level, String)> {
        let mut told = self.end_periods(now);
        let text = line.text();
        if line.level != Level::Warn {
            told.push((line.level, text));
            return told;
        }
        let full = self.0.len() >= MAX_KINDS && !self.0.contains_key(&line.message);
        let kind = if full { String::new() } else { line.message.clone() };
        if let Some(repeated) = self.0.get_mut(&kind) {
            repeated.times = repeated.times.saturating_add(1);
            repeated.last.clone_from(&text);
            told.push((Level::Debug, text));
        } else {
            self.0.insert(kind, Repeated { since: now, times: 0, last: String::new() });
            told.push((Level::Warn, text));
        }
        told
    }

    /// Tells of what was repeated, where its period is over.
    fn end_periods(&mut self, now: Instant) -> Vec<(Level, String)> {
        let mut told = Vec::new();
        self.0.retain(|_, repeated| {
            if now.duration_since(repeated.since) < PERIOD {
                return true;
            }
            if repeated.times == 0 {
                return false;
            }
            let (times, minutes) =
                (wire::count(repeated.times, "more time"), PERIOD.as_secs() / 60);
            let text = format!("{} ({times} within {minutes} minutes)", repeated.last);
            told.push((Level::Warn, text));
            (repeated.since, repeated.times) = (now, 0);
            true
        });
        told
    }
}

/// A line of etcd, into our own log.
pub(super) fn write((level, line): (Level, String)) {
    match level {
        Level::Trace => tracing::trace!(target: "etcd", "{line}"),
        Level::Debug => tracing::debug!(target: "etcd", "{line}"),
        Level::Warn | Level::Fatal => tracing::warn!(target: "etcd", "{line}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_etcd_are_read() {
        let line = Line::parse(
            r#"{"level":"warn","ts":"2026-01-01T00:00:00.000Z","caller":"etcdmain/etcd.go:176",
                "msg":"failed to start etcd","error":"no space","n":1}"#,
        );
        assert_eq!(
            (line.level, line.text()),
            (Level::Warn, "failed to start etcd: no space".into())
        );
        assert_eq!(Line::parse(r#"{"level":"panic","msg":"x"}"#).level, Level::Fatal);
        assert_eq!(Line::parse("panic: failed to open database").level, Level::Fatal);
        assert_eq!(Line::parse("\tgo.uber.org/zap/logger.go:251 +0x59").level, Level::Debug);
        assert_eq!(Line::parse("{\"level\":").level, Level::Debug);
    }

    #[tokio::test(start_paused = true)]
    async fn a_warning_that_etcd_repeats_is_told_once_in_ten_minutes_with_its_number() {
        let mut warnings = Warnings::default();
        let begun = Instant::now();
        let line = |level: &str, msg: &str, n: u64| {
            Line::parse(&format!(r#"{{"level":"{level}","msg":"{msg}","error":"{n}"}}"#))
        };
        let mut told = Vec::new();
        // A member is away for half an hour, and two others say so twice a second.
        for n in 0..3600 {
            let now = begun + Duration::from_millis(n * 500);
            for message in ["prober detected unhealthy status", "lost the TCP stream"] {
                told.extend(warnings.take(now, &line("warn", message, n)));
            }
            told.extend(warnings.take(now, &line("info", "compacted", n)));
        }
        let warned: Vec<_> = told.iter().filter(|(level, _)| *level >= Level::Warn).collect();
        assert_eq!(warned.len(), 6, "{warned:?}");
        assert_eq!(warned[0].1, "prober detected unhealthy status: 0");
        let after = warned.iter().find(|(_, text)| text.contains("more times"));
        let is = "lost the TCP stream: 1199 (1199 more times within 10 minutes)";
        assert_eq!(after.map(|(_, text)| &**text), Some(is));
        assert_eq!(told.len(), 3 * 3600 + 4, "all lines are there for who asks for details");
        // What ends it is told each time.
        for n in 0..3 {
            let fatal = warnings.take(begun, &line("fatal", "failed to start etcd", n));
            assert_eq!(fatal.last().map(|(level, _)| *level), Some(Level::Fatal));
        }
    }

    #[tokio::test(start_paused = true)]
    async fn warnings_that_are_never_the_same_take_no_more_memory() {
        let mut warnings = Warnings::default();
        let told = |n: u64, warnings: &mut Warnings| {
            let line = Line::parse(&format!(r#"{{"level":"warn","msg":"number {n}"}}"#));
            warnings.take(Instant::now(), &line)
        };
        let loud = (0..10_000).filter(|n| told(*n, &mut warnings)[0].0 == Level::Warn).count();
        assert_eq!((loud, warnings.0.len()), (MAX_KINDS + 1, MAX_KINDS + 1));
    }
}
