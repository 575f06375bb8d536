//! The checks of a run and their outcomes.

use crate::process;
use anyhow::{Context, Result};
use std::{
    fmt,
    io::Write,
    path::{Path, PathBuf},
};

/// Not an error: the check does not apply here, for the reason named.
#[derive(Debug)]
pub(crate) struct Skip(pub(crate) String);

impl fmt::Display for Skip {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Skip {}

/// Ends a check as skipped, with a reason.
pub(crate) fn skip<T>(reason: impl Into<String>) -> Result<T> {
    Err(Skip(reason.into()).into())
}

/// Lines of a failure's reason repeated with the verdict, for readers of only the end of a run.
const REASON_LINES: usize = 12;
/// How many of the slowest checks are named with the verdict.
const SLOWEST: usize = 10;

/// A failed check and the last lines of its reason.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Failure {
    pub(crate) name: String,
    pub(crate) reason: String,
}

/// Counts and names of outcomes. The report can write itself to a file, through which a tool inside
/// a namespace reports to the outer one.
#[derive(Default)]
pub(crate) struct TestReport {
    pub(crate) passed: usize,
    pub(crate) failed: Vec<Failure>,
    pub(crate) skipped: Vec<(String, String)>,
    /// Seconds that checks took.
    times: Vec<(f64, String)>,
    file: Option<PathBuf>,
}

impl TestReport {
    /// A report that also writes every entry to `file`.
    pub(crate) fn in_file(file: Option<PathBuf>) -> Self {
        Self { file, ..Self::default() }
    }

    pub(crate) fn pass(&mut self, count: usize) {
        self.passed += count;
        self.write(["passed", &count.to_string(), ""]);
    }

    pub(crate) fn fail(&mut self, name: &str, why: &str) {
        let why = process::last_lines(why, REASON_LINES);
        self.write(["failed", name, &why]);
        self.failed.push(Failure { name: name.to_owned(), reason: why });
    }

    pub(crate) fn skip(&mut self, name: &str, reason: &str) {
        self.skipped.push((name.to_owned(), reason.to_owned()));
        self.write(["skipped", name, reason]);
    }

    /// Records how many seconds a check took.
    pub(crate) fn time(&mut self, name: &str, seconds: f64) {
        self.write(["time", name, &seconds.to_string()]);
        self.times.push((seconds, name.to_owned()));
    }

    /// Writes an entry as a line of JSON.
    fn write(&self, entry: [&str; 3]) {
        let Some(path) = &self.file else { return };
        let line = format!("{}\n", serde_json::json!(entry));
        let file = std::fs::OpenOptions::new().create(true).append(true).open(path);
        if let Err(error) = file.and_then(|mut file| file.write_all(line.as_bytes())) {
            eprintln!("cannot write {}: {error}", path.display());
        }
    }

    /// Adds the entries another report has written to `path`. An incomplete report counts as
    /// failed.
    pub(crate) fn merge(&mut self, path: &Path) -> Result<()> {
        let text = std::fs::read_to_string(path)
            .with_context(|| format!("nothing was reported through {}", path.display()))?;
        for line in text.lines() {
            let [kind, first, second]: [String; 3] = serde_json::from_str(line).unwrap_or_default();
            match (kind.as_str(), first, second) {
                ("passed", count, _) => self.passed += count.parse::<usize>().unwrap_or(0),
                ("failed", name, why) => self.failed.push(Failure { name, reason: why }),
                ("skipped", name, reason) => self.skipped.push((name, reason)),
                ("time", name, seconds) => self.times.push((seconds.parse().unwrap_or(0.0), name)),
                _ => {
                    let name = "unreadable report".to_owned();
                    self.failed.push(Failure { name, reason: line.to_owned() });
                }
            }
        }
        Ok(())
    }

    /// A line for each of the slowest checks, the slowest first.
    pub(crate) fn slowest(&self) -> Vec<String> {
        let mut times: Vec<&(f64, String)> = self.times.iter().collect();
        times.sort_by(|(one, _), (other, _)| other.total_cmp(one));
        times.truncate(SLOWEST);
        times.into_iter().map(|(seconds, name)| format!("{seconds:7.1} s  {name}")).collect()
    }

    /// The last line of every run.
    pub(crate) fn verdict(&self) -> String {
        let skipped = match self.skipped.len() {
            0 => String::new(),
            n => format!(", {n} skipped"),
        };
        format!("{} passed, {} failed{skipped}", self.passed, self.failed.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ledger_travels_through_its_file() {
        let path = std::env::temp_dir().join(format!("windrose-ledger-{}", std::process::id()));
        let mut inner = TestReport::in_file(Some(path.clone()));
        inner.pass(3);
        inner.fail("two\nlines", "for a reason\nof two");
        inner.skip("guest", "no kernel");
        inner.time("quick", 0.5);
        inner.time("slow", 61.25);
        let mut outer = TestReport::default();
        outer.pass(1);
        outer.merge(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        assert_eq!(outer.verdict(), "4 passed, 1 failed, 1 skipped");
        let (name, reason) = ("two\nlines".to_owned(), "for a reason\nof two".to_owned());
        assert_eq!(outer.failed, [Failure { name, reason }]);
        assert_eq!(outer.slowest(), ["   61.2 s  slow", "    0.5 s  quick"]);
        assert!(outer.merge(&path).is_err(), "a report that was never written is an error");
    }
}
