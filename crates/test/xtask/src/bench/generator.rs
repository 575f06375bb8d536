//! Load generators that print JSON: `windrose bench`, and fio, whose names it has.

use super::LOAD_CPU;
use crate::{house::House, process::Ended};
use anyhow::{Context, Result};
use serde_json::Value;
use std::{path::Path, process::Command, time::Duration};

/// A program on the processor of the load.
pub(super) fn pinned(program: &Path) -> Command {
    let mut command = Command::new("taskset");
    command.args(["-c", &LOAD_CPU.to_string()]).arg(program);
    command
}

/// What `windrose bench` with `words` says of `target`, after about `seconds`.
pub(super) fn ours(
    house: &House,
    program: &Path,
    target: &str,
    words: &[String],
    seconds: u64,
) -> Result<Value> {
    let mut command = pinned(program);
    command.args(["bench", target, "--yes", "--json", "--cores=1"]).args(words);
    said(house, "windrose bench", &mut command, seconds)
}

/// What `command` says, after about `seconds`.
pub(super) fn said(
    house: &House,
    what: &str,
    command: &mut Command,
    seconds: u64,
) -> Result<Value> {
    let limit = Duration::from_secs(seconds + 60);
    let output = house.run(what, command, limit).and_then(Ended::ok)?;
    json_in(&output).with_context(|| format!("{what} printed no figures\n{output}"))
}

/// What lies between the braces: around it are warnings.
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
