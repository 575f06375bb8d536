//! Format, lints, dependencies.

use crate::{house::House, install, ledger::skip};
use anyhow::Result;
use std::time::Duration;

const DENY_VERSION: &str = "0.20.2";

pub(super) fn run(house: &House) -> Result<()> {
    lint(house);
    dependencies(house);
    Ok(())
}

/// rustfmt and clippy, over the workspace and the fuzz targets beside it.
pub(crate) fn lint(house: &House) {
    let fuzz = house.root.join("fuzz/Cargo.toml").exists();
    house.check("rustfmt", || {
        let mut workspace = house.cargo();
        workspace.args(["fmt", "--all", "--check"]);
        house.run("cargo fmt", &mut workspace, Duration::from_secs(60))?.ok()?;
        if fuzz {
            let mut targets = house.cargo();
            targets.args(["fmt", "--manifest-path", "fuzz/Cargo.toml", "--check"]);
            house.run("cargo fmt", &mut targets, Duration::from_secs(60))?.ok()?;
        }
        Ok(())
    });
    house.check("clippy", || {
        let mut clippy = house.cargo();
        clippy.args(["clippy", "--workspace", "--all-targets", "--locked", "--", "-D", "warnings"]);
        house.run("cargo clippy", &mut clippy, Duration::from_secs(1200))?.ok()?;
        Ok(())
    });
}

fn dependencies(house: &House) {
    let deny = |what: &str, checks: &[&str]| {
        install::cargo_tool(house, "deny", DENY_VERSION)?;
        let mut command = house.cargo();
        command.args(["deny", "--log-level", "error", "check"]).args(checks);
        house.run(what, &mut command, Duration::from_secs(120))
    };
    house.check("licences, bans and sources of dependencies", || {
        deny("cargo deny", &["licenses", "bans", "sources"])?.ok()?;
        Ok(())
    });
    house.check("security advisories for dependencies", || {
        let ended = deny("cargo deny advisories", &["advisories"])?;
        if !ended.status.success() && ended.output.contains("failed to fetch advisory database") {
            return skip("the advisory database cannot be fetched from here");
        }
        ended.ok()?;
        Ok(())
    });
}
