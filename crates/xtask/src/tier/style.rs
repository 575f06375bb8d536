//! Format, lints, dependencies.

use super::dependencies;
use crate::house::House;
use anyhow::Result;
use std::time::Duration;

pub(super) fn run(house: &House) -> Result<()> {
    lint(house);
    dependencies::check(house);
    Ok(())
}

/// rustfmt and clippy, over the workspace.
pub(crate) fn lint(house: &House) {
    house.check("rustfmt", || {
        let mut workspace = house.cargo();
        workspace.args(["fmt", "--all", "--check"]);
        house.run("cargo fmt", &mut workspace, Duration::from_secs(60))?.ok()?;
        Ok(())
    });
    house.check("clippy", || {
        let mut clippy = house.cargo();
        clippy.args(["clippy", "--workspace", "--all-targets", "--locked", "--", "-D", "warnings"]);
        house.run("cargo clippy", &mut clippy, Duration::from_secs(1200))?.ok()?;
        Ok(())
    });
    // With the features that it is shipped with, and no test's.
    house.check("clippy of the product by itself", || {
        let mut clippy = house.cargo();
        clippy.args(["clippy", "-p", "windrose", "--locked", "--", "-D", "warnings"]);
        house.run("cargo clippy", &mut clippy, Duration::from_secs(1200))?.ok()?;
        Ok(())
    });
}
