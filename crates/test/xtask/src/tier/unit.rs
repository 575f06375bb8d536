//! `cargo test` over the workspace, its tests counted one by one.

use crate::{house::House, process};
use anyhow::Result;
use std::{
    process::Command,
    time::{Duration, Instant},
};

/// Names the file in which tests say that they could not test, for want of a program.
const SKIPS: &str = "WINDROSE_SKIPPED_TESTS";

/// So that nothing hangs for ever: a slow machine tests for ten minutes once all is built.
const LIMIT: Duration = Duration::from_secs(2400);

/// Of what, and with which features, the tests are built. Whoever builds a part of them in the same way finds it there: the
/// product is among them, as the tiers with real processes want it.
pub(super) const FEATURES: [&str; 3] = ["--workspace", "--features", "windrose/fault-points"];

pub(super) fn run(house: &House) -> Result<()> {
    house.display.working("cargo test");
    let begun = Instant::now();
    let built = house.build("cargo test --no-run", command(house).arg("--no-run"))?;
    if !built.status.success() {
        house.fail("cargo test --no-run", &process::tail(&built.output));
        return Ok(());
    }
    let mut command = command(house);
    let skips = house.scratch().join("skipped-tests");
    command.env(SKIPS, &skips);
    let ended = house.run("cargo test", &mut command, LIMIT)?;
    // No test has skipped itself where there is no file.
    let count = Count::of(&ended.output, &std::fs::read_to_string(&skips).unwrap_or_default());
    let seconds = begun.elapsed().as_secs();
    if count.passed > 0 {
        house.has_product.set(true);
        house.pass(count.passed, &format!("{} tests of the workspace  {seconds} s", count.passed));
    }
    for test in &count.ignored {
        house.skip(test, "marked as ignored");
    }
    for (test, why) in &count.skipped {
        house.skip(test, why);
    }
    for test in &count.failed {
        house.fail(test, "");
    }
    if !ended.status.success() {
        let why = process::tail(&ended.output);
        if count.failed.is_empty() {
            house.fail("cargo test", &why);
        } else {
            house.display.line(&why);
        }
    }
    Ok(())
}

/// The tests of the workspace, to be built or run.
fn command(house: &House) -> Command {
    let mut command = house.cargo();
    command.args(["test", "--locked", "--no-fail-fast"]).args(FEATURES);
    command
}

/// What `cargo test` printed, counted.
#[derive(Default, Debug, PartialEq)]
struct Count {
    passed: usize,
    failed: Vec<String>,
    ignored: Vec<String>,
    /// Tests that passed without testing, because something is not installed, and what.
    skipped: Vec<(String, String)>,
}

impl Count {
    /// `skipped` is what the tests wrote that could not test, each a line `TEST: WHY`. They count as passed in
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
        let expected = Count {
            passed: 2,
            failed: vec!["buf::tests::grows".to_owned()],
            ignored: vec!["slow".to_owned()],
            skipped: vec![("heals".to_owned(), "etcd is not installed".to_owned())],
        };
        assert_eq!(Count::of(output, "heals: etcd is not installed\n"), expected);
    }
}
