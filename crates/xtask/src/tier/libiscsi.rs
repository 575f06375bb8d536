//! libiscsi's conformance suite, test by test, against a volume.
//!
//! `tests/libiscsi-expected-failures.txt` names the tests that do not pass yet. The list may only shrink: a test on it that
//! passes fails the run, and so does a test that fails, or skips itself, without being on it.

use crate::{house::House, process::Ended, server::Unit};
use anyhow::{Context, Result, bail, ensure};
use std::{
    collections::{BTreeMap, BTreeSet},
    process::Command,
    time::Duration,
};

const EXPECTED: &str = "tests/libiscsi-expected-failures.txt";
const TEST_LIMIT: Duration = Duration::from_secs(30);
/// Debian's libiscsi has this many; far fewer means that the list was not understood.
const TESTS_AT_LEAST: usize = 200;

/// A test that needs nothing: what the program says around it, it says around every test.
const SIMPLEST: &str = "TestUnitReady.Simple";

/// How one test ended.
#[derive(Debug, PartialEq, Eq)]
enum Outcome {
    Passed,
    Skipped(String),
    Failed(String),
}

/// Runs the suite against `unit`, whose content it destroys.
pub(super) fn suite(house: &House, unit: &Unit) -> Result<()> {
    let expected = Expected::parse(&read_list(house)?)?;
    let tests = names()?;
    ensure!(tests.len() >= TESTS_AT_LEAST, "iscsi-test-cu lists only {} tests", tests.len());
    for unknown in expected.reasons.keys().filter(|name| !tests.contains(*name)) {
        house.fail(
            &format!("libiscsi {unknown}"),
            "on the list, but there is no such test: remove it",
        );
    }
    let simplest = run_one(house, unit, SIMPLEST)?.ok()?;
    let housekeeping = skips(&simplest);
    let mut passed = 0;
    for test in &tests {
        house.display.working(&format!("libiscsi {test}"));
        let name = format!("libiscsi {test}");
        let outcome = match run_one(house, unit, test) {
            Ok(ended) => {
                let around = housekeeping.repeat(paths(test));
                verdict(&ended.output, ended.status.success(), &around)
            }
            Err(error) => Outcome::Failed(format!("{error:#}")),
        };
        match (outcome, expected.reasons.get(test)) {
            (Outcome::Passed, None) => passed += 1,
            (Outcome::Passed, Some(_)) => {
                house.fail(&name, &format!("passes: remove it from {EXPECTED}"));
            }
            (Outcome::Skipped(_) | Outcome::Failed(_), Some(reason)) => {
                house.skip(&name, &format!("expected: {reason}"));
            }
            (Outcome::Skipped(why), None) => house.fail(&name, &format!("skipped itself: {why}")),
            (Outcome::Failed(why), None) => house.fail(&name, &why),
        }
    }
    if passed > 0 {
        house.pass(passed, &format!("{passed} of libiscsi's {} tests", tests.len()));
    }
    Ok(())
}

fn read_list(house: &House) -> Result<String> {
    std::fs::read_to_string(house.root.join(EXPECTED))
        .with_context(|| format!("cannot read {EXPECTED}"))
}

/// The tests that are known not to pass, each with its reason.
struct Expected {
    reasons: BTreeMap<String, String>,
}

impl Expected {
    /// One test on a line: its name, white space, the reason. `#` starts a comment.
    fn parse(text: &str) -> Result<Self> {
        let mut reasons = BTreeMap::new();
        for line in
            text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'))
        {
            let Some((name, reason)) = line.split_once(char::is_whitespace) else {
                bail!("{EXPECTED}: {line} has no reason");
            };
            if reasons.insert(name.to_owned(), reason.trim().to_owned()).is_some() {
                bail!("{EXPECTED}: {name} is there twice");
            }
        }
        Ok(Self { reasons })
    }
}

fn names() -> Result<BTreeSet<String>> {
    let out =
        Command::new("iscsi-test-cu").arg("--list").output().context("cannot run iscsi-test-cu")?;
    let text = String::from_utf8_lossy(&out.stdout);
    let all = text.lines().filter_map(|line| line.strip_prefix("ALL."));
    Ok(all.filter(|name| name.contains('.')).map(str::to_owned).collect())
}

/// How many sessions a test wants.
fn paths(test: &str) -> usize {
    if test.starts_with("MultipathIO.") { 2 } else { 1 }
}

fn run_one(house: &House, unit: &Unit, test: &str) -> Result<Ended> {
    let mut command = Command::new("iscsi-test-cu");
    command.args(["--dataloss", "--normal", "-t", &format!("ALL.{test}")]);
    command.args(std::iter::repeat_n(unit.url(), paths(test)));
    house.run(test, &mut command, TEST_LIMIT)
}

/// Reads CUnit's report of one test. `housekeeping` are the reasons for skipping that the program gives before and after
/// every test, where it clears reservations.
fn verdict(output: &str, success: bool, housekeeping: &[&str]) -> Outcome {
    let counts: Vec<&str> = output
        .lines()
        .map(|line| line.split_whitespace().collect::<Vec<_>>())
        .find(|words| words.first() == Some(&"tests") && words.len() == 6)
        .map(|words| words[1..5].to_vec())
        .unwrap_or_default();
    if !success || counts != ["1", "1", "1", "0"] {
        return Outcome::Failed(output.trim().to_owned());
    }
    let mut said = skips(output);
    for own in housekeeping {
        if let Some(at) = said.iter().position(|reason| reason == own) {
            said.remove(at);
        }
    }
    match said.first() {
        Some(reason) => Outcome::Skipped((*reason).to_owned()),
        None => Outcome::Passed,
    }
}

/// The reasons for skipping something that `output` names.
fn skips(output: &str) -> Vec<&str> {
    output.lines().filter_map(|line| Some(line.split_once("[SKIPPED]")?.1.trim())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const PASSED: &str = "\
Run Summary:    Type  Total    Ran Passed Failed Inactive
              suites      1      1    n/a      0        0
               tests      1      1      1      0        0
             asserts      2      2      2      0      n/a
";

    #[test]
    fn reports_are_read() {
        let read = |output: &str, success| verdict(output, success, &[]);
        assert_eq!(read(PASSED, true), Outcome::Passed);
        let skipped = format!("    [SKIPPED] WRITE16 is not implemented.\n{PASSED}");
        assert_eq!(
            read(&skipped, true),
            Outcome::Skipped("WRITE16 is not implemented.".to_owned())
        );
        assert!(matches!(read(PASSED, false), Outcome::Failed(_)), "the exit status counts too");
        let failed =
            PASSED.replace("1      1      1      0        0", "1      1      0      1        0");
        assert!(matches!(read(&failed, true), Outcome::Failed(_)));
        let nothing_ran = PASSED.replace("1      1      1", "0      0      0");
        assert!(
            matches!(read(&nothing_ran, true), Outcome::Failed(_)),
            "a name that matches no test"
        );
    }

    #[test]
    fn what_the_program_skips_around_a_test_is_not_the_tests() {
        let around = ["no PRIN", "no PRIN"];
        let said = |times| format!("{}{PASSED}", "  [SKIPPED] no PRIN\n".repeat(times));
        assert_eq!(verdict(&said(2), true, &around), Outcome::Passed);
        assert_eq!(verdict(&said(3), true, &around), Outcome::Skipped("no PRIN".to_owned()));
    }

    #[test]
    fn the_list_wants_reasons_and_no_twins() {
        let list = Expected::parse("# head\n\nA.B  not yet\nA.C   later\n").unwrap();
        assert_eq!(list.reasons["A.B"], "not yet");
        assert_eq!(list.reasons.len(), 2);
        assert!(Expected::parse("A.B\n").is_err());
        assert!(Expected::parse("A.B x\nA.B y\n").is_err());
    }
}
