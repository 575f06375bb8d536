//! Terminal output: one line for each finished step and, on a terminal, one updating line for the
//! running step. Without a terminal, a long step prints a line every minute.

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::{
    io::IsTerminal,
    sync::Mutex,
    time::{Duration, Instant},
};

/// How often a running step prints a line without a terminal.
const HEARTBEAT: Duration = Duration::from_secs(60);

/// The only module that prints.
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

    /// Prints a permanent line.
    pub(crate) fn line(&self, text: &str) {
        match &self.bar {
            Some(bar) => bar.suspend(|| println!("{text}")),
            None => println!("{text}"),
        }
    }

    /// Begins a step; it runs until the next one begins.
    pub(crate) fn begin_step(&self, what: &str) {
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

    /// Shows what the running step does, usually the last line of a program's output.
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
            let seconds = step.started.elapsed().as_secs();
            self.line(&format!("  ...   {} has run for {seconds} s: {text}", step.what));
        }
    }

    /// Clears the updating line while `body` writes to the terminal.
    pub(crate) fn suspend<T>(&self, body: impl FnOnce() -> T) -> T {
        if let Some(bar) = &self.bar {
            bar.set_draw_target(ProgressDrawTarget::hidden());
        }
        let result = body();
        if let Some(bar) = &self.bar {
            bar.set_draw_target(ProgressDrawTarget::stderr());
        }
        result
    }

    /// Removes the updating line.
    pub(crate) fn finish(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}
