//! What a member's log and its end say about it, and what follows.

use std::fmt;
use std::time::Duration;

use tokio::time::Instant;

use super::log::{Level, Line};

/// First pause before a restart, doubled with every failure up to the longest.
const FIRST_PAUSE: Duration = Duration::from_millis(200);
const LONGEST_PAUSE: Duration = Duration::from_secs(10);

/// A member that ran for so long begins to count anew.
const STEADY: Duration = Duration::from_secs(30);

/// How a member is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum State {
    /// It was started and does not serve yet.
    Starting,
    /// It serves its clients.
    Running,
    /// It ended, and is started again in a moment.
    Waiting {
        /// Why it ended.
        why: String,
    },
    /// No restart helps.
    Down(Defect),
    /// It was told to stop and has.
    Stopped,
}

/// What no restart mends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Defect {
    /// The cluster knows this member from before, and its data is not there.
    AlreadyBootstrapped,
    /// The cluster has removed it.
    Removed,
    /// Its data is damaged.
    Corrupt {
        /// What etcd says of it.
        why: String,
    },
}

impl fmt::Display for Defect {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::AlreadyBootstrapped => f.write_str(
                "the cluster knows this member, but its data is gone: this node has to leave the cluster \
                 and to join it again",
            ),
            Self::Removed => f.write_str(
                "this node was removed from the cluster: `windrose cluster leave --force` here, then it can \
                 join anew",
            ),
            Self::Corrupt { why } => write!(
                f,
                "its data is damaged ({why}): this node has to leave the cluster and to join it again; if \
                 no other member has the data, restore a snapshot (docs/guides/cluster-store.md)"
            ),
        }
    }
}

/// What damage is called in errors that end etcd, from 3.4 on. Nothing that a busy disk, a lock or
/// the network could be the cause of: a member that was taken for damaged stays down until somebody looks.
const DAMAGE: &[&str] = &[
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

/// What the system refuses, as Go names it. etcd may say that it could not read its data for that; they are whole, and it
/// runs again once there is room, say.
const REFUSED: &[&str] = &[
    "no space left on device",
    "disk quota exceeded",
    "read-only file system",
    "permission denied",
    "too many open files",
    "cannot allocate memory",
    "input/output error",
];

/// One life of the process.
#[derive(Debug, Default)]
pub(super) struct Life {
    defect: Option<Defect>,
    /// The last line that told of an end.
    last: Option<String>,
}

/// How a life ended.
#[derive(Debug)]
pub(super) struct End {
    /// It was told to.
    pub(super) stopped: bool,
    pub(super) why: String,
}

impl Life {
    /// Takes a line of the log; gives the state that it tells of.
    pub(super) fn line(&mut self, line: &Line) -> Option<State> {
        let text = line.text();
        if text.contains("has already been bootstrapped") {
            self.defect = Some(Defect::AlreadyBootstrapped);
        } else if line.message == "data-dir used by this member must be removed" {
            self.defect = Some(Defect::Removed);
        } else if line.level == Level::Fatal && is_damage(&text) {
            // What etcd says first names the file; what follows is the trace of it.
            self.defect.get_or_insert(Defect::Corrupt { why: text.clone() });
        }
        if line.level == Level::Fatal {
            self.last.get_or_insert(text);
        }
        line.message.starts_with("serving client traffic").then_some(State::Running)
    }

    /// What no restart mends, once it has ended.
    pub(super) fn defect(&self) -> Option<Defect> {
        self.defect.clone()
    }

    /// Why it ended, with what the system says of it.
    pub(super) fn why(&self, status: &str) -> String {
        self.last.as_ref().map_or_else(|| status.to_owned(), |last| format!("{status}: {last}"))
    }
}

fn is_damage(text: &str) -> bool {
    let says = |words: &[&str]| words.iter().any(|w| text.contains(w));
    says(DAMAGE) && !says(REFUSED)
}

/// How its lives went.
#[derive(Debug, Default)]
pub(super) struct Record {
    /// When the present one began.
    began: Option<Instant>,
    /// How many in a row failed before it.
    failures: u32,
    /// Why the last of them ended.
    why: Option<String>,
}

impl Record {
    /// It is started.
    pub(super) fn begins(&mut self, now: Instant) {
        self.began = Some(now);
    }

    /// It has ended for this reason.
    pub(super) fn ended(&mut self, now: Instant, why: String) {
        self.failures = if self.is_steady(now) { 1 } else { self.failures.saturating_add(1) };
        (self.began, self.why) = (None, Some(why));
    }

    /// How long to wait before it is started again.
    pub(super) fn pause(&self) -> Duration {
        pause(self.failures)
    }

    /// Why it ended last, unless it has run for long since then.
    pub(super) fn trouble(&self, now: Instant) -> Option<String> {
        self.why.clone().filter(|_| !self.is_steady(now))
    }

    fn is_steady(&self, now: Instant) -> bool {
        self.began.is_some_and(|began| now.duration_since(began) >= STEADY)
    }
}

/// How long to wait after so many failures in a row.
fn pause(failures: u32) -> Duration {
    let doubled = FIRST_PAUSE.saturating_mul(1 << failures.saturating_sub(1).min(16));
    doubled.min(LONGEST_PAUSE)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ended(lines: &[&str]) -> Option<Defect> {
        let mut life = Life::default();
        for line in lines {
            life.line(&Line::parse(line));
        }
        life.defect()
    }

    #[test]
    fn what_no_restart_mends_is_recognised() {
        // As etcd 3.4 says it.
        let known = r#"{"level":"fatal","msg":"discovery failed",
            "error":"member 20841a002de00821 has already been bootstrapped"}"#;
        assert_eq!(ended(&[known]), Some(Defect::AlreadyBootstrapped));
        let removed = [
            r#"{"level":"warn","msg":"server error",
                "error":"the member has been permanently removed from the cluster"}"#,
            r#"{"level":"warn","msg":"data-dir used by this member must be removed"}"#,
        ];
        assert_eq!(ended(&removed), Some(Defect::Removed));
        let wal = r#"{"level":"fatal","msg":"discovery failed",
            "error":"wal: max entry size limit exceeded"}"#;
        assert!(matches!(ended(&[wal]), Some(Defect::Corrupt { .. })));
        let database = [
            r#"{"level":"panic","msg":"failed to open database","error":"invalid database"}"#,
            "panic: failed to open database",
        ];
        let why = "failed to open database: invalid database".into();
        assert_eq!(ended(&database), Some(Defect::Corrupt { why }));
        // As 3.4.23 says it of a database with random bytes in its pages.
        for page in [
            "panic: freepages: failed to get all reachable pages (page 7546007322893194418: out of bounds: 27)",
            "panic: page 12 already freed",
            "panic: invalid page type: 9: 40",
        ] {
            assert!(matches!(ended(&[page]), Some(Defect::Corrupt { .. })), "{page}");
        }
    }

    #[test]
    fn what_a_restart_may_mend_is_not_a_defect() {
        let port = r#"{"level":"fatal","msg":"discovery failed",
            "error":"listen tcp 127.0.0.1:2380: bind: address already in use"}"#;
        assert_eq!(ended(&[port]), None);
        let locked = r#"{"level":"panic","msg":"failed to open database","error":"timeout"}"#;
        assert_eq!(ended(&[locked]), None);
        // It would make its log as long as it is to become before it reads on.
        let full = r#"{"level":"fatal","msg":"failed to read WAL, cannot be repaired",
            "error":"no space left on device"}"#;
        assert_eq!(ended(&[full]), None);
        // It is the other member that was removed.
        let other = r#"{"level":"warn","msg":"peer became inactive (message send to peer failed)",
            "error":"failed to dial (the member has been permanently removed from the cluster)"}"#;
        assert_eq!(ended(&[other]), None);
        let mut life = Life::default();
        life.line(&Line::parse(port));
        assert!(life.why("exit status: 1").ends_with("address already in use"));
    }

    #[test]
    fn it_runs_once_it_serves() {
        let mut life = Life::default();
        let serves = "serving client traffic insecurely; this is strongly discouraged!";
        for (message, state) in [("starting", None), (serves, Some(State::Running))] {
            let line = Line { level: Level::Debug, message: message.into(), error: String::new() };
            assert_eq!(life.line(&line), state);
        }
    }

    #[test]
    fn pauses_grow_and_are_forgotten() {
        assert_eq!(pause(1), FIRST_PAUSE);
        assert_eq!(pause(2), FIRST_PAUSE * 2);
        assert_eq!(pause(u32::MAX), LONGEST_PAUSE);
        let (mut record, mut now) = (Record::default(), Instant::now());
        let mut live = |ran, why: &str| {
            record.begins(now);
            now += ran;
            let before = record.trouble(now);
            record.ended(now, why.into());
            (before, record.pause(), record.trouble(now))
        };
        assert_eq!(live(STEADY * 2, "one"), (None, FIRST_PAUSE, Some("one".into())));
        assert_eq!(
            live(STEADY / 2, "two"),
            (Some("one".into()), FIRST_PAUSE * 2, Some("two".into()))
        );
        assert_eq!(live(STEADY, "three"), (None, FIRST_PAUSE, Some("three".into())));
    }
}
