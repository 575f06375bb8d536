//! etcd's log: one JSON object a line, and plain text where it panics.

use serde::Deserialize;

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

    /// Into our own log. What ends etcd is a warning there: it is started again, and where that
    /// does not help the supervisor says so.
    pub(super) fn pass_on(&self) {
        let line = self.text();
        match self.level {
            Level::Trace => tracing::trace!(target: "etcd", "{line}"),
            Level::Debug => tracing::debug!(target: "etcd", "{line}"),
            Level::Warn | Level::Fatal => tracing::warn!(target: "etcd", "{line}"),
        }
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
}
