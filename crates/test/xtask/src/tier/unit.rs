//! The workspace's own tests. Cargo builds them; this tier runs their programs, several at a time,
//! and counts their tests one by one.
//!
//! `cargo test` would run the programs one after the other, although many of them wait most of the
//! time. Documentation has no tests: the style tier sees to it.

use crate::{
    parallel,
    process::{self, FinishedProcess},
    run_context::RunContext,
    selection::Selection,
};
use anyhow::Result;
use std::{
    path::{Path, PathBuf},
    process::Command,
    time::{Duration, Instant},
};

/// Name of the tier.
pub(super) const NAME: &str = "unit";

/// Names the file in which tests record that they skipped themselves, for want of a program.
const SKIPPED_TESTS_ENV: &str = "WINDROSE_SKIPPED_TESTS";

/// Names the sample to tests that leave something out in a run of all tests.
const SAMPLE_ENV: &str = "WINDROSE_SAMPLE";

/// So that nothing hangs forever: the longest program takes minutes on a slow machine.
const LIMIT: Duration = Duration::from_secs(1800);

/// The packages and features the tests are built with. Other builds with the same ones reuse the
/// results: they include the product as the tiers with real processes need it.
pub(super) const FEATURES: [&str; 3] = ["--workspace", "--features", "windrose/fault-points"];

/// Builds all tests, and with them the product and the simulator; returns the tests' programs.
pub(super) fn build(context: &RunContext) -> Result<Vec<TestProgram>> {
    context.display.begin_step("build the tests");
    let begun = Instant::now();
    let mut command = context.cargo_for_tests();
    command.args(["test", "--locked", "--no-run"]).args(FEATURES);
    command.arg("--message-format=json-render-diagnostics");
    let output = context.build("cargo test --no-run", &mut command)?.success_output()?;
    let programs = test_programs(&output);
    anyhow::ensure!(!programs.is_empty(), "cargo has built no tests");
    let seconds = begun.elapsed().as_secs();
    context.display.line(&format!("  built {} programs of tests  {seconds} s", programs.len()));
    context.is_product_built.set(true);
    Ok(programs)
}

/// Builds and runs all tests.
pub(super) fn run(context: &RunContext) -> Result<()> {
    let programs = build(context)?;
    let (display, logs, selection) = (&context.display, context.scratch(), context.selection);
    let skips = logs.join("skipped-tests");
    display.begin_step(&format!("{} programs of tests", programs.len()));
    let ended = parallel::map(&programs, parallel::processors() + 1, |program| {
        let begun = Instant::now();
        let mut command = program.command();
        command.env(SKIPPED_TESTS_ENV, &skips);
        if let Selection::Sample(number) = selection {
            command.env(SAMPLE_ENV, format!("{number:x}"));
        }
        let ended = process::run(display, logs, &program.name, &mut command, LIMIT);
        let seconds = begun.elapsed().as_secs_f64();
        if let Ok(FinishedProcess { output, .. }) = &ended {
            let count = TestOutcomes::of(output).passed.len();
            display
                .line(&format!("  ...   {}: {count} tests passed  {seconds:.1} s", program.name));
        }
        ended
    });
    let mut passed = 0;
    for (program, ended) in programs.iter().zip(ended) {
        match ended {
            Ok(ended) => passed += record(context, program, &ended),
            Err(error) => context.record_error(&program.name, &error),
        }
    }
    // Without the file, no test has skipped itself.
    let skipped = std::fs::read_to_string(&skips).unwrap_or_default();
    let skipped: Vec<_> = skipped.lines().filter_map(|line| line.split_once(": ")).collect();
    for (test, why) in &skipped {
        context.skip(test, why);
    }
    let passed = passed.saturating_sub(skipped.len());
    if passed > 0 {
        context.pass(passed, &format!("{passed} tests of the workspace"));
    }
    Ok(())
}

/// Records what one program printed; returns how many of its tests passed.
fn record(context: &RunContext, program: &TestProgram, ended: &FinishedProcess) -> usize {
    let outcomes = TestOutcomes::of(&ended.output);
    for (test, seconds) in &outcomes.passed {
        context.record_time(&format!("{}: {test}", program.name), *seconds);
    }
    for test in &outcomes.ignored {
        context.skip(test, "marked as ignored");
    }
    for test in &outcomes.failed {
        context.fail(&format!("{}: {test}", program.name), "");
    }
    if !ended.status.success() {
        let why = process::tail(&ended.output);
        if outcomes.failed.is_empty() {
            context.fail(&program.name, &format!("{}\n{why}", ended.status));
        } else {
            context.display.line(&why);
        }
    }
    outcomes.passed.len()
}

/// A program with tests, as cargo has built it.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct TestProgram {
    /// The package and, for integration tests, the program.
    name: String,
    path: PathBuf,
    /// The directory of the package, in which its tests run.
    directory: PathBuf,
}

impl TestProgram {
    /// The command that runs all its tests as `cargo test` does, more of them at a time, and has it
    /// tell how long each one takes. This is an unstable option of the test library, which it
    /// accepts with this variable.
    fn command(&self) -> Command {
        let mut command = Command::new(&self.path);
        command.args(["-Z", "unstable-options", "--report-time"]).env("RUSTC_BOOTSTRAP", "1");
        command.args(["--test-threads", &(parallel::processors() * 2).to_string()]);
        command.current_dir(&self.directory).env("CARGO_MANIFEST_DIR", &self.directory);
        command
    }
}

/// The programs of tests among cargo's messages; the largest first, because they take longest.
fn test_programs(messages: &str) -> Vec<TestProgram> {
    let messages = messages.lines().filter(|line| line.starts_with('{'));
    let programs = messages.filter_map(|line| test_program(&serde_json::from_str(line).ok()?));
    let mut programs: Vec<TestProgram> = programs.collect();
    let size = |path: &Path| std::fs::metadata(path).map_or(0, |metadata| metadata.len());
    programs.sort_by_cached_key(|program| std::cmp::Reverse(size(&program.path)));
    programs
}

/// The program that a message of cargo's describes, if it has tests.
fn test_program(message: &serde_json::Value) -> Option<TestProgram> {
    let text = |pointer: &str| message.pointer(pointer)?.as_str();
    if message.pointer("/profile/test")?.as_bool() != Some(true) {
        return None;
    }
    let path = PathBuf::from(text("/executable")?);
    let directory = Path::new(text("/manifest_path")?).parent()?.to_owned();
    let package = directory.file_name()?.to_str()?;
    let name = match (text("/target/kind/0")?, text("/target/name")?) {
        ("test", target) => format!("{package} {target}"),
        _ => package.to_owned(),
    };
    Some(TestProgram { name, path, directory })
}

/// The tests of a program by outcome.
#[derive(Default, Debug, PartialEq)]
struct TestOutcomes {
    /// With the seconds that each took; zero where unknown.
    passed: Vec<(String, f64)>,
    failed: Vec<String>,
    ignored: Vec<String>,
}

impl TestOutcomes {
    fn of(output: &str) -> Self {
        let mut outcomes = Self::default();
        for line in output.lines() {
            let Some(rest) = line.strip_prefix("test ") else { continue };
            let Some((name, end)) = rest.rsplit_once(" ... ") else { continue };
            let (name, end) = (name.to_owned(), end.trim());
            if end == "ok" || end.starts_with("ok <") {
                outcomes.passed.push((name, seconds(end).unwrap_or(0.0)));
            } else if end.starts_with("FAILED") {
                outcomes.failed.push(name);
            } else if end.starts_with("ignored") {
                outcomes.ignored.push(name);
            }
        }
        outcomes
    }
}

/// The duration in `ok <1.234s>`.
fn seconds(end: &str) -> Option<f64> {
    let (_, time) = end.split_once('<')?;
    time.strip_suffix("s>")?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tests_are_counted_by_their_own_lines() {
        let output = "\
running 4 tests
test buf::tests::fits ... ok <0.250s>
test buf::tests::grows ... FAILED <0.001s>
test slow ... ignored, takes an hour
test heals ... ok
test result: FAILED. 2 passed; 1 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.00s
";
        let expected = TestOutcomes {
            passed: vec![("buf::tests::fits".to_owned(), 0.25), ("heals".to_owned(), 0.0)],
            failed: vec!["buf::tests::grows".to_owned()],
            ignored: vec!["slow".to_owned()],
        };
        assert_eq!(TestOutcomes::of(output), expected);
    }

    #[test]
    fn programs_of_tests_are_found_among_the_messages_of_cargo() {
        let message = |kind: &str, name: &str, test: bool, executable: &str| {
            serde_json::json!({
                "reason": "compiler-artifact",
                "manifest_path": "/w/crates/cluster/node/Cargo.toml",
                "target": {"kind": [kind], "name": name},
                "profile": {"test": test},
                "executable": executable,
            })
            .to_string()
        };
        let messages = [
            "   Compiling node v0.1.0".to_owned(),
            message("lib", "node", true, "/t/node-1"),
            message("test", "all", true, "/t/all-2"),
            message("bin", "windrose", false, "/t/windrose"),
            "{\"reason\":\"build-finished\",\"success\":true}".to_owned(),
        ];
        let program = |name: &str, path: &str| TestProgram {
            name: name.to_owned(),
            path: PathBuf::from(path),
            directory: PathBuf::from("/w/crates/cluster/node"),
        };
        let found = test_programs(&messages.join("\n"));
        assert_eq!(found, [program("node", "/t/node-1"), program("node all", "/t/all-2")]);
    }
}
