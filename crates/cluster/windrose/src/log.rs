//! The node's log: for people, as JSON, and for systemd's journal.

use std::fmt;
use std::io::IsTerminal;
use std::os::unix::fs::MetadataExt;

use config::{Config, LogFormat, LogLevel};
use tracing::level_filters::LevelFilter;
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::fmt::format::{Writer, format};
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::registry::LookupSpan;

/// Starts the logging that `config` asks for, to standard error.
pub(crate) fn init_logging(config: &Config) {
    let level = match config.log.level {
        LogLevel::Error => LevelFilter::ERROR,
        LogLevel::Warn => LevelFilter::WARN,
        LogLevel::Info => LevelFilter::INFO,
        LogLevel::Debug => LevelFilter::DEBUG,
        LogLevel::Trace => LevelFilter::TRACE,
    };
    let log = tracing_subscriber::fmt().with_max_level(level).with_writer(std::io::stderr);
    // Ignore write errors of the log: reporting them would panic, and a closed log must not end the
    // node.
    let log = log.log_internal_errors(false);
    match (config.log.format, goes_to_journal()) {
        (LogFormat::Human, false) => log.with_ansi(std::io::stderr().is_terminal()).init(),
        // The journal adds the time, and the level as its priority.
        (LogFormat::Human, true) => log
            .with_ansi(false)
            .event_format(JournalPriority(format().without_time().with_level(false)))
            .init(),
        (LogFormat::Json, false) => log.json().flatten_event(true).init(),
        (LogFormat::Json, true) => {
            let lines = JournalPriority(format().json().flatten_event(true));
            log.json().event_format(lines).init();
        }
    }
}

/// Whether standard error is the journal's socket: compares device and inode (systemd.exec(5),
/// `JOURNAL_STREAM`).
fn goes_to_journal() -> bool {
    let named = std::env::var("JOURNAL_STREAM").unwrap_or_default();
    let real = std::fs::metadata("/proc/self/fd/2");
    real.is_ok_and(|real| named == format!("{}:{}", real.dev(), real.ino()))
}

/// Formats lines with a priority prefix for the journal (sd-daemon(3)).
struct JournalPriority<F>(F);

impl<S, N, F> FormatEvent<S, N> for JournalPriority<F>
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
    F: FormatEvent<S, N>,
{
    fn format_event(
        &self,
        context: &FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        write!(writer, "<{}>", priority(*event.metadata().level()))?;
        self.0.format_event(context, writer, event)
    }
}

/// The level's syslog(3) priority.
fn priority(level: Level) -> u8 {
    match level {
        Level::ERROR => 3,
        Level::WARN => 4,
        Level::INFO => 6,
        Level::DEBUG | Level::TRACE => 7,
    }
}
