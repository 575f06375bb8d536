//! Other people's programs. A test whose program is not installed says so; `./run test` installs
//! them.
#![allow(clippy::unwrap_used, dead_code)]

use std::process::{Command, Output, Stdio};

use rt::Core;

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
