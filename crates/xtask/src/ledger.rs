//! What was checked and how it ended.

use anyhow::{Context, Result};
use std::{
    fmt,
    io::Write,
    path::{Path, PathBuf},
};

/// An error that is none: the check does not apply here, for the reason named.
#[derive(Debug)]
pub(crate) struct Skip(pub(crate) String);

impl fmt::Display for Skip {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Skip {}

/// Leaves a check with a reason.
pub(crate) fn skip<T>(reason: impl Into<String>) -> Result<T> {
    Err(Skip(reason.into()).into())
}

/// Counts and names. A ledger may write itself to a file, through which a tool run inside a namespace reports to
/// the one outside.
#[derive(Default)]
pub(crate) struct Ledger {
    pub(crate) passed: usize,
    pub(crate) failed: Vec<String>,
    pub(crate) skipped: Vec<(String, String)>,
    file: Option<PathBuf>,
}

impl Ledger {
    /// A ledger that writes every entry to `file` too.
    pub(crate) fn in_file(file: Option<PathBuf>) -> Self {
        Self { file, ..Self::default() }
    }

    pub(crate) fn pass(&mut self, count: usize) {
        self.passed += count;
        self.write(&["passed", &count.to_string()]);
    }

    pub(crate) fn fail(&mut self, name: &str) {
        self.failed.push(name.to_owned());
        self.write(&["failed", name]);
    }

    pub(crate) fn skip(&mut self, name: &str, reason: &str) {
        self.skipped.push((name.to_owned(), reason.to_owned()));
        self.write(&["skipped", name, reason]);
    }

    fn write(&self, fields: &[&str]) {
        let Some(path) = &self.file else { return };
        let clean: Vec<String> = fields.iter().map(|f| f.replace(['\t', '\n'], " ")).collect();
        let line = clean.join("\t") + "\n";
        let file = std::fs::OpenOptions::new().create(true).append(true).open(path);
        if let Err(error) = file.and_then(|mut file| file.write_all(line.as_bytes())) {
            eprintln!("cannot write {}: {error}", path.display());
        }
    }

    /// Adds what another ledger has written to `path`. A ledger that never came to its end counts as failed.
    pub(crate) fn merge(&mut self, path: &Path) -> Result<()> {
        let text = std::fs::read_to_string(path)
            .with_context(|| format!("nothing was reported through {}", path.display()))?;
        for line in text.lines() {
            let fields: Vec<&str> = line.split('\t').collect();
            match fields[..] {
                ["passed", count] => self.passed += count.parse::<usize>().unwrap_or(0),
                ["failed", name] => self.failed.push(name.to_owned()),
                ["skipped", name, reason] => {
                    self.skipped.push((name.to_owned(), reason.to_owned()));
                }
                _ => self.failed.push(format!("unreadable report: {line}")),
            }
        }
        Ok(())
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
        let mut inner = Ledger::in_file(Some(path.clone()));
        inner.pass(3);
        inner.fail("tab\tinside");
        inner.skip("guest", "no kernel");
        let mut outer = Ledger::default();
        outer.pass(1);
        outer.merge(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        assert_eq!(outer.verdict(), "4 passed, 1 failed, 1 skipped");
        assert_eq!(outer.failed, ["tab inside"]);
        assert!(outer.merge(&path).is_err(), "a report that was never written is an error");
    }
}
