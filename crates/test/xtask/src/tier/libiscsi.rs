//! libiscsi's conformance suite, test by test, against a volume.
//!
//! `tests/libiscsi-skips.txt` lists the tests that need not pass, each with its kind and reason. A
//! test of an optional feature that we lack must skip itself; a test with a bug of libiscsi may
//! pass with a newer release. Everything else must pass, including tests of newer releases.

use crate::{process::FinishedProcess, run_context::RunContext, server::IscsiLun};
use anyhow::{Context, Result, bail, ensure};
use probe::iscsi::Session;
use std::{
    collections::{BTreeMap, BTreeSet},
    process::Command,
    time::Duration,
};

const LIST: &str = "tests/libiscsi-skips.txt";
const TEST_LIMIT: Duration = Duration::from_secs(30);
/// Debian's libiscsi has more; far fewer means that the list was not parsed.
const TESTS_AT_LEAST: usize = 200;

/// A test without requirements: what the program prints around it, it prints around every test.
const SIMPLEST: &str = "TestUnitReady.Simple";

/// How many parts the families of tests have when a sample is run.
const SAMPLE_PARTS: usize = 3;

/// The family of a test, before the dot of its name.
fn family(test: &str) -> &str {
    test.split_once('.').map_or(test, |(family, _)| family)
}

/// How one test ended.
#[derive(Debug, PartialEq, Eq)]
enum Outcome {
    Passed,
    Skipped(String),
    Failed(String),
}

/// Why a test is on the list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SkipKind {
    /// It needs an optional feature.
    Unsupported,
    /// It has a bug.
    SuiteBug,
}

/// The verdict on a test.
#[derive(Debug, PartialEq, Eq)]
enum TestVerdict {
    Pass,
    Skip(String),
    Fail(String),
}

/// Makes a new unit with CHAP for this user; returns its address, including the user's secret.
pub(super) type EnableChap<'a> = &'a dyn Fn(&str) -> Result<String>;

/// Runs the suite against `unit` and destroys its data. CHAP tests use `guard`, or are left out
/// without it. With the name of a sample, runs one of [`SAMPLE_PARTS`] parts of the families.
pub(super) fn suite(
    context: &RunContext,
    unit: &IscsiLun,
    guard: Option<EnableChap<'_>>,
    sample: Option<&str>,
) -> Result<()> {
    let list = List::parse(&read_list(context)?)?;
    let tests = names()?;
    ensure!(tests.len() >= TESTS_AT_LEAST, "iscsi-test-cu lists only {} tests", tests.len());
    for absent in list.0.keys().filter(|name| !tests.contains(*name)) {
        context.display.line(&format!("  libiscsi {absent}: not in this build of the suite"));
    }
    let simplest = run_one(context, &unit.url(), SIMPLEST)?.success_output()?;
    let housekeeping = skips(&simplest);
    let families: BTreeSet<&str> = tests.iter().map(|test| family(test)).collect();
    let families = match sample {
        Some(what) => context.sample(what, families, SAMPLE_PARTS),
        None => families.into_iter().collect(),
    };
    let mut tests: Vec<&String> =
        tests.iter().filter(|test| families.contains(&family(test))).collect();
    // Commands of a test with a bug may still run when it ends, and reset the unit under the next.
    tests.sort_by_key(|test| list.has_bug(test));
    let mut passed = 0;
    for test in tests.iter().copied() {
        context.display.begin_step(&format!("libiscsi {test}"));
        let ended = match (wanted_user(test), guard) {
            (Some(user), Some(guard)) => guard(user).and_then(|url| run_one(context, &url, test)),
            _ if wants_protection(test) => run_protected(context, unit, test),
            _ => run_one(context, &unit.url(), test),
        };
        let outcome = match ended {
            Ok(ended) => {
                let around = housekeeping.repeat(paths(test));
                parse_outcome(&ended.output, ended.status.success(), &around)
            }
            Err(error) => Outcome::Failed(format!("{error:#}")),
        };
        let name = format!("libiscsi {test}");
        match list.entry(test, outcome) {
            TestVerdict::Pass => passed += 1,
            TestVerdict::Skip(why) => context.skip(&name, &why),
            TestVerdict::Fail(why) => context.fail(&name, &why),
        }
    }
    if passed > 0 {
        context.pass(passed, &format!("{passed} of libiscsi's {} tests", tests.len()));
    }
    Ok(())
}

fn read_list(context: &RunContext) -> Result<String> {
    std::fs::read_to_string(context.root.join(LIST)).with_context(|| format!("cannot read {LIST}"))
}

/// The listed tests, each with its kind and reason.
struct List(BTreeMap<String, (SkipKind, String)>);

impl List {
    /// One test on each line: its name, white space, the kind, a colon, the reason. `#` starts a
    /// comment.
    fn parse(text: &str) -> Result<Self> {
        let mut all = BTreeMap::new();
        for line in
            text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'))
        {
            let parts = line.split_once(char::is_whitespace).and_then(|(name, rest)| {
                let (kind, reason) = rest.split_once(':')?;
                Some((name, kind.trim(), reason.trim()))
            });
            let Some((name, kind, reason)) = parts else {
                bail!("{LIST}: {line} has no reason");
            };
            let kind = match kind {
                "lacks" => SkipKind::Unsupported,
                "mistake" => SkipKind::SuiteBug,
                other => bail!("{LIST}: {other} is no kind"),
            };
            if all.insert(name.to_owned(), (kind, reason.to_owned())).is_some() {
                bail!("{LIST}: {name} is there twice");
            }
        }
        Ok(Self(all))
    }

    /// Whether a test is listed because of a bug.
    fn has_bug(&self, test: &str) -> bool {
        self.0.get(test).is_some_and(|(kind, _)| *kind == SkipKind::SuiteBug)
    }

    /// The verdict on a test with this outcome.
    fn entry(&self, test: &str, outcome: Outcome) -> TestVerdict {
        let Some((kind, reason)) = self.0.get(test) else {
            return match outcome {
                Outcome::Passed => TestVerdict::Pass,
                Outcome::Skipped(why) => TestVerdict::Fail(format!("skipped itself: {why}")),
                Outcome::Failed(why) => TestVerdict::Fail(why),
            };
        };
        match (kind, outcome) {
            (SkipKind::Unsupported, Outcome::Skipped(_))
            | (SkipKind::SuiteBug, Outcome::Failed(_)) => {
                TestVerdict::Skip(format!("{}: {reason}", kind.told()))
            }
            (SkipKind::SuiteBug, Outcome::Passed) => TestVerdict::Pass,
            (SkipKind::Unsupported, Outcome::Passed) => {
                TestVerdict::Fail(format!("passes: remove it from {LIST}"))
            }
            (SkipKind::Unsupported, Outcome::Failed(why)) => TestVerdict::Fail(why),
            (SkipKind::SuiteBug, Outcome::Skipped(why)) => {
                TestVerdict::Fail(format!("skipped itself: {why}"))
            }
        }
    }
}

impl SkipKind {
    fn told(self) -> &'static str {
        match self {
            Self::Unsupported => "a disk lacks it",
            Self::SuiteBug => "libiscsi's mistake",
        }
    }
}

fn names() -> Result<BTreeSet<String>> {
    let out =
        Command::new("iscsi-test-cu").arg("--list").output().context("cannot run iscsi-test-cu")?;
    let text = String::from_utf8_lossy(&out.stdout);
    let all = text.lines().filter_map(|line| line.strip_prefix("ALL."));
    Ok(all.filter(|name| name.contains('.')).map(str::to_owned).collect())
}

/// How many sessions a test needs.
fn paths(test: &str) -> usize {
    if test.starts_with("MultipathIO.") { 2 } else { 1 }
}

fn run_one(context: &RunContext, url: &str, test: &str) -> Result<FinishedProcess> {
    let mut command = Command::new("iscsi-test-cu");
    command.args(["--dataloss", "--normal", "-t", &format!("ALL.{test}")]);
    command.args(std::iter::repeat_n(url, paths(test)));
    context.run(test, &mut command, TEST_LIMIT)
}

/// The CHAP user a test needs: some need one whose name looks like a number.
fn wanted_user(test: &str) -> Option<&'static str> {
    match test.strip_prefix("iSCSICHAP.")? {
        "HexName" => Some("0x74657374"),
        "Base64Name" => Some("0bdGVzdA"),
        _ => Some("test"),
    }
}

/// Whether a test needs a write-protected unit.
fn wants_protection(test: &str) -> bool {
    test.starts_with("ReadOnly.")
}

/// Runs a test while the unit is write-protected by its control mode page, which all initiators
/// share.
fn run_protected(context: &RunContext, unit: &IscsiLun, test: &str) -> Result<FinishedProcess> {
    let lun = u8::try_from(unit.lun).context("a small LUN")?;
    let initiator = "iqn.2026-01.test:protector";
    let mut session = Session::login(unit.portal, initiator, &unit.target, lun, 1)?;
    protect(&mut session, true).context("cannot write-protect the unit")?;
    let ended = run_one(context, &unit.url(), test);
    protect(&mut session, false).context("the unit stays write-protected")?;
    ended
}

/// Sets or clears SWP (SPC-4 7.5.8).
fn protect(session: &mut Session, swp: bool) -> Result<()> {
    const LIST_BYTES: usize = 16;
    const PAGE: usize = 4;
    const SWP: u8 = 0x08;
    let mut list = [0; LIST_BYTES];
    let mut cdb = [0; 16];
    cdb[..5].copy_from_slice(&[0x1a, 0x08, 0x0a, 0, LIST_BYTES as u8]);
    session.execute(&cdb, &[], &mut list)?;
    // MODE SELECT reserves the header fields that MODE SENSE returns.
    list[..PAGE].fill(0);
    list[PAGE + 4] = if swp { list[PAGE + 4] | SWP } else { list[PAGE + 4] & !SWP };
    cdb[..5].copy_from_slice(&[0x15, 0x10, 0, 0, LIST_BYTES as u8]);
    session.execute(&cdb, &list, &mut [])?;
    Ok(())
}

/// Parses CUnit's report of one test. `housekeeping` are the skip reasons that the program prints
/// before and after every test, where it clears reservations.
fn parse_outcome(output: &str, success: bool, housekeeping: &[&str]) -> Outcome {
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

/// The skip reasons in `output`.
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
        let read = |output: &str, success| parse_outcome(output, success, &[]);
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
        assert_eq!(parse_outcome(&said(2), true, &around), Outcome::Passed);
        assert_eq!(parse_outcome(&said(3), true, &around), Outcome::Skipped("no PRIN".to_owned()));
    }

    #[test]
    fn the_list_wants_kinds_and_reasons_and_no_twins() {
        let list =
            List::parse("# head\n\nA.B  mistake: of its own\nA.C   lacks:   it all\n").unwrap();
        assert_eq!(list.0["A.B"], (SkipKind::SuiteBug, "of its own".to_owned()));
        assert_eq!(list.0.len(), 2);
        for wrong in ["A.B\n", "A.B no reason\n", "A.B some: x\n", "A.B lacks: x\nA.B lacks: y\n"] {
            assert!(List::parse(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn each_kind_forgives_what_it_is_for() {
        let list = List::parse("L  lacks: a\nK  mistake: b\n").unwrap();
        let skipped = || Outcome::Skipped("s".into());
        let failed = || Outcome::Failed("f".into());
        let ends = |test| {
            [Outcome::Passed, skipped(), failed()].map(|o| match list.entry(test, o) {
                TestVerdict::Pass => "pass",
                TestVerdict::Skip(_) => "skip",
                TestVerdict::Fail(_) => "fail",
            })
        };
        assert_eq!(ends("L"), ["fail", "skip", "fail"]);
        assert_eq!(ends("K"), ["pass", "fail", "skip"]);
        assert_eq!(ends("other"), ["pass", "fail", "fail"]);
    }
}
