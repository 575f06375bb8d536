//! etcd's log: one JSON object per line, and plain text when it panics.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::Deserialize;
use tokio::time::Instant;

/// How long repeats of a warning are counted before it is logged again.
const REPEAT_INTERVAL: Duration = Duration::from_secs(600);

/// Most distinct warnings tracked; etcd has a few dozen.
const MAX_WARNING_KINDS: usize = 64;

/// Severity of a line, by etcd's levels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum EtcdLogLevel {
    /// etcd's `debug`.
    Trace,
    /// etcd's `info`.
    Debug,
    /// etcd continues, with difficulty.
    Warn,
    /// etcd exits.
    Fatal,
}

/// A parsed line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct EtcdLogLine {
    pub(super) level: EtcdLogLevel,
    pub(super) message: String,
    /// Its error text.
    pub(super) error: String,
}

#[derive(Deserialize)]
struct LogLineJson {
    level: String,
    msg: String,
    #[serde(default)]
    error: String,
}

impl EtcdLogLine {
    pub(super) fn parse(line: &str) -> Self {
        let Ok(LogLineJson { level, msg, error }) = serde_json::from_str(line) else {
            return Self::parse_plain(line);
        };
        let level = match level.as_str() {
            "debug" => EtcdLogLevel::Trace,
            "info" => EtcdLogLevel::Debug,
            "warn" | "error" => EtcdLogLevel::Warn,
            _ => EtcdLogLevel::Fatal,
        };
        Self { level, message: msg, error }
    }

    /// A line without JSON: a panic message or its stack trace.
    fn parse_plain(line: &str) -> Self {
        let ends = line.starts_with("panic: ") || line.starts_with("fatal error: ");
        let level = if ends { EtcdLogLevel::Fatal } else { EtcdLogLevel::Debug };
        Self { level, message: line.to_owned(), error: String::new() }
    }

    /// The line as a single text.
    pub(super) fn text(&self) -> String {
        match self.error.as_str() {
            "" => self.message.clone(),
            error => format!("{}: {error}", self.message),
        }
    }
}

/// Limits etcd's warnings in our own log. etcd repeats each many times a minute while a member is
/// away or a disk is slow; the status reports what matters.
#[derive(Debug, Default)]
pub(super) struct WarningLimiter(BTreeMap<String, RepeatedWarning>);

/// A warning that has been logged.
#[derive(Debug)]
struct RepeatedWarning {
    since: Instant,
    /// How often it repeated since then, and its last text.
    count: u32,
    last: String,
}

impl WarningLimiter {
    /// Takes a line; returns the lines to log now, with their levels. A fatal line becomes a
    /// warning: etcd is restarted, and if that does not help the supervisor says so.
    pub(super) fn filter(
        &mut self,
        now: Instant,
        line: &EtcdLogLine,
    ) -> Vec<(EtcdLogLevel, String)> {
        let mut to_log = self.report_repeats(now);
        let text = line.text();
        if line.level != EtcdLogLevel::Warn {
            to_log.push((line.level, text));
            return to_log;
        }
        let full = self.0.len() >= MAX_WARNING_KINDS && !self.0.contains_key(&line.message);
        let kind = if full { String::new() } else { line.message.clone() };
        if let Some(repeated) = self.0.get_mut(&kind) {
            repeated.count = repeated.count.saturating_add(1);
            repeated.last.clone_from(&text);
            to_log.push((EtcdLogLevel::Debug, text));
        } else {
            self.0.insert(kind, RepeatedWarning { since: now, count: 0, last: String::new() });
            to_log.push((EtcdLogLevel::Warn, text));
        }
        to_log
    }

    /// Summarises the repeats whose interval has passed.
    fn report_repeats(&mut self, now: Instant) -> Vec<(EtcdLogLevel, String)> {
        let mut to_log = Vec::new();
        self.0.retain(|_, repeated| {
            if now.duration_since(repeated.since) < REPEAT_INTERVAL {
                return true;
            }
            if repeated.count == 0 {
                return false;
            }
            let (times, minutes) =
                (wire::plural(repeated.count, "more time"), REPEAT_INTERVAL.as_secs() / 60);
            let text = format!("{} ({times} within {minutes} minutes)", repeated.last);
            to_log.push((EtcdLogLevel::Warn, text));
            (repeated.since, repeated.count) = (now, 0);
            true
        });
        to_log
    }
}

/// Writes a line of etcd to our own log.
pub(super) fn emit((level, line): (EtcdLogLevel, String)) {
    match level {
        EtcdLogLevel::Trace => tracing::trace!(target: "etcd", "{line}"),
        EtcdLogLevel::Debug => tracing::debug!(target: "etcd", "{line}"),
        EtcdLogLevel::Warn | EtcdLogLevel::Fatal => tracing::warn!(target: "etcd", "{line}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_etcd_are_read() {
        let line = EtcdLogLine::parse(
            r#"{"level":"warn","ts":"2026-01-01T00:00:00.000Z","caller":"etcdmain/etcd.go:176",
                "msg":"failed to start etcd","error":"no space","n":1}"#,
        );
        assert_eq!(
            (line.level, line.text()),
            (EtcdLogLevel::Warn, "failed to start etcd: no space".into())
        );
        assert_eq!(EtcdLogLine::parse(r#"{"level":"panic","msg":"x"}"#).level, EtcdLogLevel::Fatal);
        assert_eq!(EtcdLogLine::parse("panic: failed to open database").level, EtcdLogLevel::Fatal);
        assert_eq!(
            EtcdLogLine::parse("\tgo.uber.org/zap/logger.go:251 +0x59").level,
            EtcdLogLevel::Debug
        );
        assert_eq!(EtcdLogLine::parse("{\"level\":").level, EtcdLogLevel::Debug);
    }

    #[tokio::test(start_paused = true)]
    async fn a_warning_that_etcd_repeats_is_told_once_in_ten_minutes_with_its_number() {
        let mut warnings = WarningLimiter::default();
        let begun = Instant::now();
        let line = |level: &str, msg: &str, n: u64| {
            EtcdLogLine::parse(&format!(r#"{{"level":"{level}","msg":"{msg}","error":"{n}"}}"#))
        };
        let mut logged = Vec::new();
        // A member is away for half an hour, and two others log it twice a second.
        for n in 0..3600 {
            let now = begun + Duration::from_millis(n * 500);
            for message in ["prober detected unhealthy status", "lost the TCP stream"] {
                logged.extend(warnings.filter(now, &line("warn", message, n)));
            }
            logged.extend(warnings.filter(now, &line("info", "compacted", n)));
        }
        let warned: Vec<_> =
            logged.iter().filter(|(level, _)| *level >= EtcdLogLevel::Warn).collect();
        assert_eq!(warned.len(), 6, "{warned:?}");
        assert_eq!(warned[0].1, "prober detected unhealthy status: 0");
        let after = warned.iter().find(|(_, text)| text.contains("more times"));
        let is = "lost the TCP stream: 1199 (1199 more times within 10 minutes)";
        assert_eq!(after.map(|(_, text)| &**text), Some(is));
        assert_eq!(logged.len(), 3 * 3600 + 4, "all lines are there for who asks for details");
        // Fatal lines are logged each time.
        for n in 0..3 {
            let fatal = warnings.filter(begun, &line("fatal", "failed to start etcd", n));
            assert_eq!(fatal.last().map(|(level, _)| *level), Some(EtcdLogLevel::Fatal));
        }
    }

    #[tokio::test(start_paused = true)]
    async fn warnings_that_are_never_the_same_take_no_more_memory() {
        let mut warnings = WarningLimiter::default();
        let logged = |n: u64, warnings: &mut WarningLimiter| {
            let line = EtcdLogLine::parse(&format!(r#"{{"level":"warn","msg":"number {n}"}}"#));
            warnings.filter(Instant::now(), &line)
        };
        let loud =
            (0..10_000).filter(|n| logged(*n, &mut warnings)[0].0 == EtcdLogLevel::Warn).count();
        assert_eq!((loud, warnings.0.len()), (MAX_WARNING_KINDS + 1, MAX_WARNING_KINDS + 1));
    }
}
