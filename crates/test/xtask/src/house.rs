//! The house as every command sees it: where things lie, where to write, how to report.

use crate::{
    cleanup::Scratch,
    display::Display,
    ledger::{Ledger, Skip},
    process::{self, Ended},
};
use anyhow::{Context, Result};
use std::{
    cell::{Cell, RefCell},
    path::{Path, PathBuf},
    process::Command,
    time::{Duration, Instant},
};

/// Set inside a namespace: the file through which the tool outside learns what was checked.
pub(crate) const REPORT: &str = "WINDROSE_REPORT";
/// Set inside a namespace: the scratch directory of the tool outside.
pub(crate) const SCRATCH: &str = "WINDROSE_SCRATCH";

/// One run of this tool.
pub(crate) struct House {
    /// The repository.
    pub(crate) root: PathBuf,
    /// Where cargo builds.
    pub(crate) target: PathBuf,
    pub(crate) display: Display,
    /// Only checks with this in their names are wanted, in tiers that heed it.
    pub(crate) only: String,
    /// Whether this run has built the product for tests.
    pub(crate) has_product: Cell<bool>,
    scratch: Scratch,
    /// Directories elsewhere that go with this run.
    more: RefCell<Vec<Scratch>>,
    ledger: RefCell<Ledger>,
}

impl House {
    pub(crate) fn open() -> Result<Self> {
        let root = std::env::current_dir().context("no current directory")?;
        let target = match std::env::var_os("CARGO_TARGET_DIR") {
            Some(directory) => root.join(directory),
            None => root.join("target"),
        };
        let parent = std::env::var_os(SCRATCH).map_or_else(std::env::temp_dir, PathBuf::from);
        let scratch = Scratch::new(&parent)?;
        let ledger = RefCell::new(Ledger::in_file(std::env::var_os(REPORT).map(PathBuf::from)));
        Ok(Self {
            root,
            target,
            display: Display::new(),
            only: String::new(),
            has_product: Cell::new(false),
            scratch,
            more: RefCell::default(),
            ledger,
        })
    }

    /// Whether the check or part called `name` is wanted.
    pub(crate) fn wants(&self, name: &str) -> bool {
        name.contains(&self.only)
    }

    /// Where this run may write; gone when it ends.
    pub(crate) fn scratch(&self) -> &Path {
        self.scratch.path()
    }

    /// A new empty directory in the scratch directory.
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

    /// A directory on a memory file system, for disks that cost nothing; gone when this run ends.
    pub(crate) fn memory_directory(&self) -> Result<PathBuf> {
        self.elsewhere(Path::new("/dev/shm"))
    }

    /// A directory beside the build, on whatever disk that is; gone when this run ends.
    pub(crate) fn build_directory(&self) -> Result<PathBuf> {
        self.elsewhere(&self.target)
    }

    fn elsewhere(&self, parent: &Path) -> Result<PathBuf> {
        let scratch = Scratch::new(parent)?;
        let path = scratch.path().to_owned();
        self.more.borrow_mut().push(scratch);
        Ok(path)
    }

    /// A cargo command in the repository.
    pub(crate) fn cargo(&self) -> Command {
        cargo_in(&self.root)
    }

    /// Builds something. A build may take as long as it works: machines differ, and this one may be busy.
    pub(crate) fn build(&self, what: &str, command: &mut Command) -> Result<Ended> {
        process::build(&self.display, self.scratch(), what, command)
    }

    /// Runs `command` to its end, showing its last line meanwhile.
    pub(crate) fn run(&self, what: &str, command: &mut Command, limit: Duration) -> Result<Ended> {
        process::run(&self.display, self.scratch(), what, command, limit)
    }

    /// One check: runs `body`, prints one line, enters the outcome. True when it passed.
    pub(crate) fn check(&self, name: &str, body: impl FnOnce() -> Result<()>) -> bool {
        self.display.working(name);
        let begun = Instant::now();
        let outcome = body();
        let seconds = begun.elapsed().as_secs_f64();
        match outcome {
            Ok(()) => {
                self.ledger.borrow_mut().pass(1);
                self.display.line(&format!("  ok    {name}  {seconds:.1} s"));
                true
            }
            Err(error) => {
                self.enter_error(name, &error);
                false
            }
        }
    }

    /// Enters an error: a skip if it is one, a failure otherwise.
    pub(crate) fn enter_error(&self, name: &str, error: &anyhow::Error) {
        match error.downcast_ref::<Skip>() {
            Some(Skip(reason)) => self.skip(name, reason),
            None => self.fail(name, &format!("{error:#}")),
        }
    }

    /// Enters `count` checks that passed, told by one line.
    pub(crate) fn pass(&self, count: usize, line: &str) {
        self.ledger.borrow_mut().pass(count);
        self.display.line(&format!("  ok    {line}"));
    }

    pub(crate) fn fail(&self, name: &str, why: &str) {
        self.ledger.borrow_mut().fail(name, why);
        self.display.line(&format!("  FAIL  {name}"));
        for line in why.lines() {
            self.display.line(&format!("        {line}"));
        }
    }

    pub(crate) fn skip(&self, name: &str, reason: &str) {
        self.ledger.borrow_mut().skip(name, reason);
        self.display.line(&format!("  skip  {name}: {reason}"));
    }

    pub(crate) fn with_ledger<T>(&self, look: impl FnOnce(&mut Ledger) -> T) -> T {
        look(&mut self.ledger.borrow_mut())
    }
}

/// A cargo command in `root` that builds what any other cargo builds there: a cargo that has started this process has
/// told it things that build scripts look at.
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

/// Whether cargo sets this variable for programs that it starts, and no user does.
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

    /// What chooses a toolchain, and nothing else.
    const PLAIN: [&str; 7] = [
        "PATH",
        "HOME",
        "CARGO_HOME",
        "RUSTUP_HOME",
        "RUSTUP_TOOLCHAIN",
        "RUSTUP_AUTO_INSTALL",
        "TMPDIR",
    ];

    /// A repository with a script `run` like ours, and a package that looks at its environment as `ring` does.
    fn repository(scratch: &Scratch) -> PathBuf {
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

    /// What cargo says of the package that looks at its environment: `Compiling`, `Dirty` or `Fresh`.
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
        let scratch = Scratch::new(&std::env::temp_dir()).unwrap();
        let root = repository(&scratch);
        let plain = |program: &str| {
            let mut command = Command::new(program);
            command.current_dir(&root);
            said(&mut command, |_| false)
        };
        assert_eq!(plain("cargo"), "Compiling");
        assert_eq!(plain("./run"), "Fresh", "./run after cargo build");
        assert_eq!(plain("cargo"), "Fresh", "cargo build after ./run");
        // Also where a cargo has started the tool: as it has started this test.
        assert!(std::env::var_os("CARGO_MANIFEST_DIR").is_some(), "cargo runs the tests");
        assert_eq!(said(&mut cargo_in(&root), is_of_cargo), "Fresh", "the tool under cargo");
    }
}
