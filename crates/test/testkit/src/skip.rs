//! Tests that this machine cannot run. `./run test` installs what they need.

use std::fs::OpenOptions;
use std::io::Write;
use std::path::PathBuf;

/// Where a program is installed.
#[must_use]
pub fn find_program(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let system = ["/usr/sbin", "/sbin"].map(PathBuf::from);
    let mut found = std::env::split_paths(&path).chain(system).map(|at| at.join(name));
    found.find(|program| program.is_file())
}

/// Whether these programs are installed; if not, reports that the test is skipped.
#[must_use]
pub fn installed(programs: &[&str]) -> bool {
    let missing = programs.iter().find(|program| find_program(program).is_none());
    if let Some(program) = missing {
        skipped(&format!("{program} is not installed"));
    }
    missing.is_none()
}

/// Reports that the test of this thread was skipped: in the file that `./run test` reads, or on
/// standard output.
pub fn skipped(why: &str) {
    let test = std::thread::current().name().unwrap_or_default().to_owned();
    let Some(file) = std::env::var_os("WINDROSE_SKIPPED_TESTS") else {
        println!("skipped: {test}: {why}");
        return;
    };
    let mut file = OpenOptions::new().create(true).append(true).open(file).unwrap();
    file.write_all(format!("{test}: {why}\n").as_bytes()).unwrap();
}
