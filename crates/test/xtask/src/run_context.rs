//! What every command shares: paths, scratch space, the report.

use crate::{
    cleanup::ScratchDir,
    display::Display,
    process::{self, FinishedProcess},
    selection::Selection,
    test_report::{Skip, TestReport},
};
use anyhow::{Context, Result};
use std::{
    cell::{Cell, RefCell},
    path::{Path, PathBuf},
    process::Command,
    time::{Duration, Instant},
};

/// Set inside a namespace: the file that reports the checks to the outer tool.
pub(crate) const REPORT_ENV: &str = "WINDROSE_REPORT";
/// Set inside a namespace: the scratch directory of the outer tool.
pub(crate) const SCRATCH_ENV: &str = "WINDROSE_SCRATCH";

/// The compiler of builds for tests.
const TEST_COMPILER: &str = "crates/test/xtask/rustc-for-tests.sh";

/// One run of this tool.
pub(crate) struct RunContext {
    /// The root of the repository.
    pub(crate) root: PathBuf,
    /// Cargo's target directory.
    pub(crate) target: PathBuf,
    pub(crate) display: Display,
    /// Runs only checks whose name contains this, in tiers that support it.
    pub(crate) name_filter: String,
    /// What tiers that have more checks than time run.
    pub(crate) selection: Selection,
    /// Whether this run has built the product for tests.
    pub(crate) is_product_built: Cell<bool>,
    scratch: ScratchDir,
    /// Directories elsewhere that are removed with this run.
    extra_scratch: RefCell<Vec<ScratchDir>>,
    report: RefCell<TestReport>,
}

impl RunContext {
    pub(crate) fn open() -> Result<Self> {
        let root = std::env::current_dir().context("no current directory")?;
        let target = match std::env::var_os("CARGO_TARGET_DIR") {
            Some(directory) => root.join(directory),
            None => root.join("target"),
        };
        let parent = std::env::var_os(SCRATCH_ENV).map_or_else(std::env::temp_dir, PathBuf::from);
        let scratch = ScratchDir::new(&parent)?;
        let ledger =
            RefCell::new(TestReport::in_file(std::env::var_os(REPORT_ENV).map(PathBuf::from)));
        Ok(Self {
            target,
            display: Display::new(),
            name_filter: String::new(),
            selection: Selection::of_commit(&root),
            is_product_built: Cell::new(false),
            scratch,
            extra_scratch: RefCell::default(),
            report: ledger,
            root,
        })
    }

    /// Whether the filter selects the check or part called `name`.
    pub(crate) fn matches_filter(&self, name: &str) -> bool {
        name.contains(&self.name_filter)
    }

    /// Chooses one of `parts` equal parts of the items called `what`, or all of them, and prints
    /// the choice.
    pub(crate) fn sample<'a>(
        &self,
        what: &str,
        items: impl IntoIterator<Item = &'a str>,
        parts: usize,
    ) -> Vec<&'a str> {
        let items: Vec<&str> = items.into_iter().collect();
        let count = items.len();
        let chosen = self.selection.part_of(what, items, parts);
        if chosen.len() < count {
            let list = chosen.join(", ");
            self.display.line(&format!("  sample of {what}: {} of {count}: {list}", chosen.len()));
        }
        chosen
    }

    /// The scratch directory of this run; removed at its end.
    pub(crate) fn scratch(&self) -> &Path {
        self.scratch.path()
    }

    /// Creates an empty directory in the scratch directory.
    pub(crate) fn directory(&self, name: &str) -> Result<PathBuf> {
        let path = self.scratch().join(name);
        if path.exists() {
            std::fs::remove_dir_all(&path)
                .with_context(|| format!("cannot empty {}", path.display()))?;
        }
        std::fs::create_dir_all(&path)
            .with_context(|| format!("cannot create {}", path.display()))?;
        Ok(path)
    }

    /// Creates a directory on tmpfs, for fast disks; removed at the end of this run.
    pub(crate) fn memory_directory(&self) -> Result<PathBuf> {
        self.directory_in(Path::new("/dev/shm"))
    }

    /// Creates a directory beside the build, on its disk; removed at the end of this run.
    pub(crate) fn build_directory(&self) -> Result<PathBuf> {
        self.directory_in(&self.target)
    }

    fn directory_in(&self, parent: &Path) -> Result<PathBuf> {
        let scratch = ScratchDir::new(parent)?;
        let path = scratch.path().to_owned();
        self.extra_scratch.borrow_mut().push(scratch);
        Ok(path)
    }

    /// A cargo command in the repository.
    pub(crate) fn cargo(&self) -> Command {
        cargo_in(&self.root)
    }

    /// A cargo command that builds for tests. All builds for tests use it, because cargo keeps what
    /// it builds with another compiler apart.
    pub(crate) fn cargo_for_tests(&self) -> Command {
        let mut cargo = self.cargo();
        cargo.env("RUSTC_WORKSPACE_WRAPPER", self.root.join(TEST_COMPILER));
        cargo
    }

    /// Runs a build. It has no time limit while it makes progress: machines differ and may be busy.
    pub(crate) fn build(&self, what: &str, command: &mut Command) -> Result<FinishedProcess> {
        process::build(&self.display, self.scratch(), what, command)
    }

    /// Runs `command` to completion, showing its last line meanwhile.
    pub(crate) fn run(
        &self,
        what: &str,
        command: &mut Command,
        limit: Duration,
    ) -> Result<FinishedProcess> {
        process::run(&self.display, self.scratch(), what, command, limit)
    }

    /// Runs one check, prints a line and records the outcome. True if it passed.
    pub(crate) fn check(&self, name: &str, body: impl FnOnce() -> Result<()>) -> bool {
        self.display.begin_step(name);
        let begun = Instant::now();
        let outcome = body();
        let seconds = begun.elapsed().as_secs_f64();
        match outcome {
            Ok(()) => {
                self.record_time(name, seconds);
                self.report.borrow_mut().pass(1);
                self.display.line(&format!("  ok    {name}  {seconds:.1} s"));
                true
            }
            Err(error) => {
                self.record_error(name, &error);
                false
            }
        }
    }

    /// Records an error: a skip if it is one, otherwise a failure.
    pub(crate) fn record_error(&self, name: &str, error: &anyhow::Error) {
        match error.downcast_ref::<Skip>() {
            Some(Skip(reason)) => self.skip(name, reason),
            None => self.fail(name, &format!("{error:#}")),
        }
    }

    /// Records how many seconds a check took.
    pub(crate) fn record_time(&self, name: &str, seconds: f64) {
        self.report.borrow_mut().time(name, seconds);
    }

    /// Records `count` passed checks, printed as one line.
    pub(crate) fn pass(&self, count: usize, line: &str) {
        self.report.borrow_mut().pass(count);
        self.display.line(&format!("  ok    {line}"));
    }

    pub(crate) fn fail(&self, name: &str, why: &str) {
        self.report.borrow_mut().fail(name, why);
        self.display.line(&format!("  FAIL  {name}"));
        for line in why.lines() {
            self.display.line(&format!("        {line}"));
        }
    }

    pub(crate) fn skip(&self, name: &str, reason: &str) {
        self.report.borrow_mut().skip(name, reason);
        self.display.line(&format!("  skip  {name}: {reason}"));
    }

    pub(crate) fn with_report<T>(&self, look: impl FnOnce(&mut TestReport) -> T) -> T {
        look(&mut self.report.borrow_mut())
    }
}

/// A cargo command in `root` that reuses what any other cargo built there. A cargo that started
/// this process has set variables that build scripts look at; they are removed.
fn cargo_in(root: &Path) -> Command {
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    for (name, _) in std::env::vars_os() {
        if name.to_str().is_some_and(is_of_cargo) {
            cargo.env_remove(name);
        }
    }
    cargo.current_dir(root);
    cargo
}

/// Whether cargo sets this variable for programs it starts, and users do not.
fn is_of_cargo(name: &str) -> bool {
    const PREFIXES: [&str; 5] =
        ["CARGO_PKG_", "CARGO_MANIFEST_", "CARGO_BIN_", "CARGO_CFG_", "CARGO_FEATURE_"];
    const NAMES: [&str; 5] =
        ["CARGO", "CARGO_CRATE_NAME", "CARGO_PRIMARY_PACKAGE", "CARGO_TARGET_TMPDIR", "OUT_DIR"];
    NAMES.contains(&name) || PREFIXES.iter().any(|prefix| name.starts_with(prefix))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{ffi::OsStr, fs};

    /// Only what selects a toolchain.
    const PLAIN: [&str; 7] = [
        "PATH",
        "HOME",
        "CARGO_HOME",
        "RUSTUP_HOME",
        "RUSTUP_TOOLCHAIN",
        "RUSTUP_AUTO_INSTALL",
        "TMPDIR",
    ];

    /// A repository with a script `run` like ours and a package that reads its environment as
    /// `ring` does.
    fn repository(scratch: &ScratchDir) -> PathBuf {
        let ours = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../..");
        let root = scratch.path().to_owned();
        let write = |path: &str, text: &str| {
            let path = root.join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        for name in ["run", "rust-toolchain.toml"] {
            fs::copy(ours.join(name), root.join(name)).unwrap();
        }
        let package = |name: &str| {
            format!("[package]\nname = \"{name}\"\nversion = \"0.1.0\"\nedition = \"2024\"\n")
        };
        write(
            "Cargo.toml",
            "[workspace]\nresolver = \"3\"\nmembers = [\"crates/test/*\"]\n[workspace.package]\nrust-version = \"1.90\"\n",
        );
        write("crates/test/looks/Cargo.toml", &package("looks"));
        write("crates/test/looks/src/lib.rs", "");
        write(
            "crates/test/looks/build.rs",
            "fn main() { for name in [\"CARGO_MANIFEST_DIR\", \"CARGO_PKG_NAME\", \"OUT_DIR\"] { \
             println!(\"cargo:rerun-if-env-changed={name}\"); } }",
        );
        write("crates/test/xtask/Cargo.toml", &package("xtask"));
        write(
            "crates/test/xtask/src/main.rs",
            "fn main() { std::process::Command::new(\"cargo\").args(std::env::args().skip(1)).status().unwrap(); }",
        );
        root
    }

    /// What cargo prints for the package that reads its environment: `Compiling`, `Dirty` or
    /// `Fresh`.
    fn said(command: &mut Command, keeps: fn(&str) -> bool) -> String {
        for (name, _) in std::env::vars_os() {
            let known =
                |name: &OsStr| name.to_str().is_some_and(|n| PLAIN.contains(&n) || keeps(n));
            if !known(&name) {
                command.env_remove(name);
            }
        }
        let out = command.args(["build", "-v", "--offline", "-p", "looks"]).output().unwrap();
        let text = String::from_utf8_lossy(&out.stderr).into_owned();
        assert!(out.status.success(), "{text}");
        let line = text.lines().find(|line| line.contains("looks v0.1.0"));
        let verb = line.and_then(|line| line.split_whitespace().next());
        verb.unwrap_or_else(|| panic!("{text}")).to_owned()
    }

    #[test]
    fn run_and_cargo_build_do_not_make_each_other_stale() {
        let scratch = ScratchDir::new(&std::env::temp_dir()).unwrap();
        let root = repository(&scratch);
        let plain = |program: &str| {
            let mut command = Command::new(program);
            command.current_dir(&root);
            said(&mut command, |_| false)
        };
        assert_eq!(plain("cargo"), "Compiling");
        assert_eq!(plain("./run"), "Fresh", "./run after cargo build");
        assert_eq!(plain("cargo"), "Fresh", "cargo build after ./run");
        // Also if cargo started the tool, as it started this test.
        assert!(std::env::var_os("CARGO_MANIFEST_DIR").is_some(), "cargo runs the tests");
        assert_eq!(said(&mut cargo_in(&root), is_of_cargo), "Fresh", "the tool under cargo");
    }
}
