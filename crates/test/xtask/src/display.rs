//! What the person at the terminal sees: one plain line for everything that has ended and, on a terminal, one moving
//! line for what is going on. Without a terminal a long step says every minute that it is still alive.

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::{
    io::IsTerminal,
    sync::Mutex,
    time::{Duration, Instant},
};

/// How often a step without a terminal reports that it still runs.
const HEARTBEAT: Duration = Duration::from_secs(60);

/// The one place that prints.
pub(crate) struct Display {
    bar: Option<ProgressBar>,
    step: Mutex<Step>,
}

struct Step {
    what: String,
    started: Instant,
    reported: Instant,
}

impl Display {
    pub(crate) fn new() -> Self {
        let terminal = std::io::stderr().is_terminal() && std::io::stdout().is_terminal();
        let bar = terminal.then(|| {
            let style =
                ProgressStyle::with_template("  {spinner} {prefix} {elapsed} {wide_msg:.dim}")
                    .unwrap_or_else(|_| ProgressStyle::default_spinner());
            let bar = ProgressBar::new_spinner().with_style(style);
            bar.enable_steady_tick(Duration::from_millis(120));
            bar
        });
        let now = Instant::now();
        let step = Mutex::new(Step { what: String::new(), started: now, reported: now });
        Self { bar, step }
    }

    /// A line that stays.
    pub(crate) fn line(&self, text: &str) {
        match &self.bar {
            Some(bar) => bar.suspend(|| println!("{text}")),
            None => println!("{text}"),
        }
    }

    /// A step begins; it is the running one until the next begins.
    pub(crate) fn working(&self, what: &str) {
        let now = Instant::now();
        if let Ok(mut step) = self.step.lock() {
            *step = Step { what: what.to_owned(), started: now, reported: now };
        }
        if let Some(bar) = &self.bar {
            bar.set_prefix(what.to_owned());
            bar.set_message("");
            bar.reset_elapsed();
        }
    }

    /// What the running step is doing right now, usually the last line of a program's output.
    pub(crate) fn detail(&self, text: &str) {
        match &self.bar {
            Some(bar) => bar.set_message(text.to_owned()),
            None => self.heartbeat(text),
        }
    }

    fn heartbeat(&self, text: &str) {
        let Ok(mut step) = self.step.lock() else { return };
        if step.reported.elapsed() >= HEARTBEAT {
            step.reported = Instant::now();
            println!(
                "  ...   {} has run for {} s: {text}",
                step.what,
                step.started.elapsed().as_secs()
            );
        }
    }

    /// Runs `body` while something else writes to the terminal.
    pub(crate) fn hidden<T>(&self, body: impl FnOnce() -> T) -> T {
        if let Some(bar) = &self.bar {
            bar.set_draw_target(ProgressDrawTarget::hidden());
        }
        let result = body();
        if let Some(bar) = &self.bar {
            bar.set_draw_target(ProgressDrawTarget::stderr());
        }
        result
    }

    /// Takes the moving line away.
    pub(crate) fn finish(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}
