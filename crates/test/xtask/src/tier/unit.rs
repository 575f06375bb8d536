//! `cargo test` over the workspace, its tests counted one by one.

use crate::{process, run_context::RunContext};
use anyhow::Result;
use std::{
    process::Command,
    time::{Duration, Instant},
};

/// Names the file in which tests record that they skipped themselves, for want of a program.
const SKIPPED_TESTS_ENV: &str = "WINDROSE_SKIPPED_TESTS";

/// So that nothing hangs forever: a slow machine takes ten minutes once everything is built.
const LIMIT: Duration = Duration::from_secs(2400);

/// The packages and features the tests are built with. Other builds with the same ones reuse the
/// results: they include the product as the tiers with real processes need it.
pub(super) const FEATURES: [&str; 3] = ["--workspace", "--features", "windrose/fault-points"];

pub(super) fn run(context: &RunContext) -> Result<()> {
    context.display.begin_step("cargo test");
    let begun = Instant::now();
    let built = context.build("cargo test --no-run", command(context).arg("--no-run"))?;
    if !built.status.success() {
        context.fail("cargo test --no-run", &process::tail(&built.output));
        return Ok(());
    }
    let mut command = command(context);
    let skips = context.scratch().join("skipped-tests");
    command.env(SKIPPED_TESTS_ENV, &skips);
    let ended = context.run("cargo test", &mut command, LIMIT)?;
    // Without the file, no test has skipped itself.
    let count = TestCounts::of(&ended.output, &std::fs::read_to_string(&skips).unwrap_or_default());
    let seconds = begun.elapsed().as_secs();
    if count.passed > 0 {
        context.is_product_built.set(true);
        context
            .pass(count.passed, &format!("{} tests of the workspace  {seconds} s", count.passed));
    }
    for test in &count.ignored {
        context.skip(test, "marked as ignored");
    }
    for (test, why) in &count.skipped {
        context.skip(test, why);
    }
    for test in &count.failed {
        context.fail(test, "");
    }
    if !ended.status.success() {
        let why = process::tail(&ended.output);
        if count.failed.is_empty() {
            context.fail("cargo test", &why);
        } else {
            context.display.line(&why);
        }
    }
    Ok(())
}

/// The cargo command that builds or runs the workspace's tests.
fn command(context: &RunContext) -> Command {
    let mut command = context.cargo();
    command.args(["test", "--locked", "--no-fail-fast"]).args(FEATURES);
    command
}

/// The counts of `cargo test`'s output.
#[derive(Default, Debug, PartialEq)]
struct TestCounts {
    passed: usize,
    failed: Vec<String>,
    ignored: Vec<String>,
    /// Tests that passed without testing because something is not installed, and what.
    skipped: Vec<(String, String)>,
}

impl TestCounts {
    /// `skipped` has a line `TEST: WHY` for each test that skipped itself. These count as passed in
    /// `output`.
    fn of(output: &str, skipped: &str) -> Self {
        let mut count = Self::default();
        for line in output.lines() {
            let Some(rest) = line.strip_prefix("test ") else { continue };
            match rest.rsplit_once(" ... ") {
                Some((_, "ok")) => count.passed += 1,
                Some((name, "FAILED")) => count.failed.push(name.to_owned()),
                Some((name, end)) if end.starts_with("ignored") => {
                    count.ignored.push(name.to_owned());
                }
                _ => {}
            }
        }
        let lines = skipped.lines().filter_map(|line| line.split_once(": "));
        count.skipped = lines.map(|(test, why)| (test.to_owned(), why.to_owned())).collect();
        count.passed = count.passed.saturating_sub(count.skipped.len());
        count
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tests_are_counted_by_their_own_lines() {
        let output = "\
running 3 tests
test buf::tests::fits ... ok
test buf::tests::grows ... FAILED
test slow ... ignored, takes an hour
test src/lib.rs - read (line 3) ... ok
test heals ... ok
test result: FAILED. 2 passed; 1 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.00s
";
        let expected = TestCounts {
            passed: 2,
            failed: vec!["buf::tests::grows".to_owned()],
            ignored: vec!["slow".to_owned()],
            skipped: vec![("heals".to_owned(), "etcd is not installed".to_owned())],
        };
        assert_eq!(TestCounts::of(output, "heals: etcd is not installed\n"), expected);
    }
}
