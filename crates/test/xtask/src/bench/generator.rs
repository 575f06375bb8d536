//! Load generators that print JSON: `windrose bench`, which uses fio's names, and fio.

use super::LOAD_CPU;
use crate::{process::FinishedProcess, run_context::RunContext};
use anyhow::{Context, Result};
use serde_json::Value;
use std::{path::Path, process::Command, time::Duration};

/// A command pinned to the load's processor.
pub(super) fn command_on_load_cpu(program: &Path) -> Command {
    let mut command = Command::new("taskset");
    command.args(["-c", &LOAD_CPU.to_string()]).arg(program);
    command
}

/// Runs `windrose bench` with `words` against `target`, for about `seconds`; returns its JSON.
pub(super) fn run_windrose_bench(
    context: &RunContext,
    program: &Path,
    target: &str,
    words: &[String],
    seconds: u64,
) -> Result<Value> {
    let mut command = command_on_load_cpu(program);
    command.args(["bench", target, "--yes", "--json", "--cores=1"]).args(words);
    run_and_parse(context, "windrose bench", &mut command, seconds)
}

/// Runs `command`, for about `seconds`; returns its JSON.
pub(super) fn run_and_parse(
    context: &RunContext,
    what: &str,
    command: &mut Command,
    seconds: u64,
) -> Result<Value> {
    let limit = Duration::from_secs(seconds + 60);
    let output = context.run(what, command, limit).and_then(FinishedProcess::success_output)?;
    json_in(&output).with_context(|| format!("{what} printed no figures\n{output}"))
}

/// The text between the outer braces; warnings may surround it.
fn json_in(output: &str) -> Option<Value> {
    let (from, to) = (output.find('{')?, output.rfind('}')?);
    serde_json::from_str(output.get(from..=to)?).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_said_is_found_between_warnings() {
        let found = json_in("a warning\n{\"jobs\":[{\"read\":{}}]}\nanother").unwrap();
        assert!(found["jobs"][0]["read"].is_object());
        assert!(json_in("nothing").is_none());
    }
}
