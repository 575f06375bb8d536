//! Derives a member's state from its log and exit, and when to restart it.

use std::fmt;
use std::time::Duration;

use tokio::time::Instant;

use super::etcd_log::{EtcdLogLevel, EtcdLogLine};

/// First pause before a restart, doubled with every failure up to the longest.
const MIN_RESTART_BACKOFF: Duration = Duration::from_millis(200);
const MAX_RESTART_BACKOFF: Duration = Duration::from_secs(10);

/// A process that ran for this long resets the failure count.
const STABLE_AFTER: Duration = Duration::from_secs(30);

/// State of a store member.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EtcdState {
    /// Started, not serving yet.
    Starting,
    /// Serving its clients.
    Running,
    /// Exited, about to be restarted.
    Restarting {
        /// Why it exited.
        why: String,
    },
    /// No restart helps.
    PermanentlyDown(PermanentFailure),
    /// Stopped on request.
    Stopped,
}

/// A failure that no restart repairs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PermanentFailure {
    /// The cluster knows this member, but its data is missing.
    DataLost,
    /// The cluster has removed it.
    Removed,
    /// Its data is damaged.
    Corrupt {
        /// etcd's message.
        why: String,
    },
}

impl fmt::Display for PermanentFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::DataLost => f.write_str(
                "the data of this member is lost: this node must leave the cluster and join it \
                 again",
            ),
            Self::Removed => f.write_str(
                "this node was removed from the cluster: run `windrose cluster leave --force` \
                 here, then join it again",
            ),
            Self::Corrupt { why } => write!(
                f,
                "its data is damaged ({why}): this node must leave the cluster and join it again; \
                 if no other member has the data, restore a snapshot \
                 (docs/guides/cluster-store.md)"
            ),
        }
    }
}

/// Texts by which fatal errors report damaged data, from 3.4 on. None that a busy disk, a lock or
/// the network could cause: a member wrongly taken for damaged stays down until an administrator
/// acts.
const CORRUPTION_MESSAGES: &[&str] = &[
    "wal:",
    "snap:",
    "crc mismatch",
    "checksum error",
    "invalid database",
    "failed to read WAL",
    "failed to recover v3 backend",
    "freepages:",
    "already freed",
    "invalid page type",
    "invalid freelist page",
];

/// System errors, as Go spells them. etcd may report them as a failure to read its data; the data
/// is whole, and etcd runs again once, for example, there is space.
const OS_ERROR_MESSAGES: &[&str] = &[
    "no space left on device",
    "disk quota exceeded",
    "read-only file system",
    "permission denied",
    "too many open files",
    "cannot allocate memory",
    "input/output error",
];

/// One run of the process.
#[derive(Debug, Default)]
pub(super) struct ProcessRun {
    permanent_failure: Option<PermanentFailure>,
    /// The last fatal line.
    fatal_line: Option<String>,
}

/// How a run ended.
#[derive(Debug)]
pub(super) struct ProcessExit {
    /// Whether it was told to stop.
    pub(super) was_requested: bool,
    pub(super) reason: String,
}

impl ProcessRun {
    /// Processes a line of the log; returns the state it implies.
    pub(super) fn process_line(&mut self, line: &EtcdLogLine) -> Option<EtcdState> {
        let text = line.text();
        if text.contains("has already been bootstrapped") {
            self.permanent_failure = Some(PermanentFailure::DataLost);
        } else if line.message == "data-dir used by this member must be removed" {
            self.permanent_failure = Some(PermanentFailure::Removed);
        } else if line.level == EtcdLogLevel::Fatal && is_corruption(&text) {
            // The first message names the file; later ones are its trace.
            self.permanent_failure.get_or_insert(PermanentFailure::Corrupt { why: text.clone() });
        }
        if line.level == EtcdLogLevel::Fatal {
            self.fatal_line.get_or_insert(text);
        }
        line.message.starts_with("serving client traffic").then_some(EtcdState::Running)
    }

    /// The permanent failure of this run, valid after it has exited.
    pub(super) fn permanent_failure(&self) -> Option<PermanentFailure> {
        self.permanent_failure.clone()
    }

    /// Why it exited, combined with the exit status.
    pub(super) fn exit_reason(&self, status: &str) -> String {
        self.fatal_line
            .as_ref()
            .map_or_else(|| status.to_owned(), |last| format!("{status}: {last}"))
    }
}

fn is_corruption(text: &str) -> bool {
    let says = |words: &[&str]| words.iter().any(|w| text.contains(w));
    says(CORRUPTION_MESSAGES) && !says(OS_ERROR_MESSAGES)
}

/// History of a member's runs.
#[derive(Debug, Default)]
pub(super) struct RestartHistory {
    /// When the present run started.
    started_at: Option<Instant>,
    /// Consecutive failures before it.
    failures: u32,
    /// Why the last run ended.
    last_exit: Option<String>,
}

impl RestartHistory {
    /// The process was started.
    pub(super) fn record_start(&mut self, now: Instant) {
        self.started_at = Some(now);
    }

    /// The process has exited for this reason.
    pub(super) fn record_exit(&mut self, now: Instant, why: String) {
        self.failures = if self.is_stable(now) { 1 } else { self.failures.saturating_add(1) };
        (self.started_at, self.last_exit) = (None, Some(why));
    }

    /// How long to wait before the next restart.
    pub(super) fn backoff(&self) -> Duration {
        restart_backoff(self.failures)
    }

    /// Why it last exited, unless it has run for long since then.
    pub(super) fn last_failure(&self, now: Instant) -> Option<String> {
        self.last_exit.clone().filter(|_| !self.is_stable(now))
    }

    fn is_stable(&self, now: Instant) -> bool {
        self.started_at.is_some_and(|began| now.duration_since(began) >= STABLE_AFTER)
    }
}

/// How long to wait after so many consecutive failures.
fn restart_backoff(failures: u32) -> Duration {
    let doubled = MIN_RESTART_BACKOFF.saturating_mul(1 << failures.saturating_sub(1).min(16));
    doubled.min(MAX_RESTART_BACKOFF)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ended(lines: &[&str]) -> Option<PermanentFailure> {
        let mut run = ProcessRun::default();
        for line in lines {
            run.process_line(&EtcdLogLine::parse(line));
        }
        run.permanent_failure()
    }

    #[test]
    fn what_no_restart_mends_is_recognised() {
        // As etcd 3.4 writes it.
        let known = r#"{"level":"fatal","msg":"discovery failed",
            "error":"member 20841a002de00821 has already been bootstrapped"}"#;
        assert_eq!(ended(&[known]), Some(PermanentFailure::DataLost));
        let removed = [
            r#"{"level":"warn","msg":"server error",
                "error":"the member has been permanently removed from the cluster"}"#,
            r#"{"level":"warn","msg":"data-dir used by this member must be removed"}"#,
        ];
        assert_eq!(ended(&removed), Some(PermanentFailure::Removed));
        let wal = r#"{"level":"fatal","msg":"discovery failed",
            "error":"wal: max entry size limit exceeded"}"#;
        assert!(matches!(ended(&[wal]), Some(PermanentFailure::Corrupt { .. })));
        let database = [
            r#"{"level":"panic","msg":"failed to open database","error":"invalid database"}"#,
            "panic: failed to open database",
        ];
        let why = "failed to open database: invalid database".into();
        assert_eq!(ended(&database), Some(PermanentFailure::Corrupt { why }));
        // As 3.4.23 reports a database with random bytes in its pages.
        for page in [
            "panic: freepages: failed to get all reachable pages (page 7546007322893194418: out of bounds: 27)",
            "panic: page 12 already freed",
            "panic: invalid page type: 9: 40",
        ] {
            assert!(matches!(ended(&[page]), Some(PermanentFailure::Corrupt { .. })), "{page}");
        }
    }

    #[test]
    fn what_a_restart_may_mend_is_not_a_defect() {
        let port = r#"{"level":"fatal","msg":"discovery failed",
            "error":"listen tcp 127.0.0.1:2380: bind: address already in use"}"#;
        assert_eq!(ended(&[port]), None);
        let locked = r#"{"level":"panic","msg":"failed to open database","error":"timeout"}"#;
        assert_eq!(ended(&[locked]), None);
        // etcd would extend its log to full length before it reads on.
        let full = r#"{"level":"fatal","msg":"failed to read WAL, cannot be repaired",
            "error":"no space left on device"}"#;
        assert_eq!(ended(&[full]), None);
        // The other member was removed, not this one.
        let other = r#"{"level":"warn","msg":"peer became inactive (message send to peer failed)",
            "error":"failed to dial (the member has been permanently removed from the cluster)"}"#;
        assert_eq!(ended(&[other]), None);
        let mut run = ProcessRun::default();
        run.process_line(&EtcdLogLine::parse(port));
        assert!(run.exit_reason("exit status: 1").ends_with("address already in use"));
    }

    #[test]
    fn it_runs_once_it_serves() {
        let mut run = ProcessRun::default();
        let serves = "serving client traffic insecurely; this is strongly discouraged!";
        for (message, state) in [("starting", None), (serves, Some(EtcdState::Running))] {
            let line = EtcdLogLine {
                level: EtcdLogLevel::Debug,
                message: message.into(),
                error: String::new(),
            };
            assert_eq!(run.process_line(&line), state);
        }
    }

    #[test]
    fn pauses_grow_and_are_forgotten() {
        assert_eq!(restart_backoff(1), MIN_RESTART_BACKOFF);
        assert_eq!(restart_backoff(2), MIN_RESTART_BACKOFF * 2);
        assert_eq!(restart_backoff(u32::MAX), MAX_RESTART_BACKOFF);
        let (mut record, mut now) = (RestartHistory::default(), Instant::now());
        let mut live = |ran, why: &str| {
            record.record_start(now);
            now += ran;
            let before = record.last_failure(now);
            record.record_exit(now, why.into());
            (before, record.backoff(), record.last_failure(now))
        };
        assert_eq!(live(STABLE_AFTER * 2, "one"), (None, MIN_RESTART_BACKOFF, Some("one".into())));
        assert_eq!(
            live(STABLE_AFTER / 2, "two"),
            (Some("one".into()), MIN_RESTART_BACKOFF * 2, Some("two".into()))
        );
        assert_eq!(live(STABLE_AFTER, "three"), (None, MIN_RESTART_BACKOFF, Some("three".into())));
    }
}
