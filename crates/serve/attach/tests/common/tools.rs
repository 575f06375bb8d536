//! Other people's programs. A test whose program is not installed says so; `./run test` installs
//! them.
#![allow(clippy::unwrap_used, dead_code)]

use std::path::PathBuf;
use std::process::{Command, Output, Stdio};

use rt::Core;

pub(crate) fn installed(programs: &[&str]) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let dirs: Vec<PathBuf> =
        std::env::split_paths(&path).chain(["/usr/sbin".into(), "/sbin".into()]).collect();
    let missing = programs.iter().find(|p| !dirs.iter().any(|dir| dir.join(p).is_file()));
    if let Some(program) = missing {
        skipped(&format!("{program} is not installed"));
    }
    missing.is_none()
}

/// Says that this test could not test: in the file that `./run test` looks at, or on standard
/// output.
pub(crate) fn skipped(why: &str) {
    let test = std::thread::current().name().unwrap_or_default().to_owned();
    let Some(file) = std::env::var_os("WINDROSE_SKIPPED_TESTS") else {
        return println!("skipped: {test}: {why}");
    };
    let mut file = std::fs::OpenOptions::new().create(true).append(true).open(file).unwrap();
    std::io::Write::write_all(&mut file, format!("{test}: {why}\n").as_bytes()).unwrap();
}

/// Runs a program beside the core; what it printed.
pub(crate) async fn tool(core: &Core, program: &str, args: &[&str]) -> String {
    let Output { status, stdout, stderr } = outcome(core, program, args).await;
    let (out, err) = (String::from_utf8_lossy(&stdout), String::from_utf8_lossy(&stderr));
    assert!(status.success(), "{program} {args:?}: {status}\n{out}\n{err}");
    out.into_owned()
}

pub(crate) async fn outcome(core: &Core, program: &str, args: &[&str]) -> Output {
    let mut command = Command::new(program);
    command.args(args).stdin(Stdio::null());
    core.run_blocking(move || command.output().unwrap()).await.unwrap()
}
