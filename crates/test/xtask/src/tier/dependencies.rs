//! Licences and sources of the product's dependencies, against `deny.toml`.
//!
//! That file is cargo-deny's, which takes longer to build than this whole tier; `./run audit` runs
//! it and also checks for known vulnerabilities. Every run checks here what the lock file alone
//! shows.

use crate::{install, run_context::RunContext};
use anyhow::{Context, Result, bail, ensure};
use serde::Deserialize;
use spdx::{Expression, ParseMode};
use std::{collections::BTreeSet, time::Duration};

const DENY_VERSION: &str = "0.20.2";

const CRATES_IO: &str = "registry+https://github.com/rust-lang/crates.io-index";

/// The part of `deny.toml` that is checked here.
#[derive(Deserialize)]
struct Rules {
    graph: Graph,
    licenses: Licenses,
    bans: Bans,
}

#[derive(Deserialize)]
struct Graph {
    targets: Vec<String>,
}

#[derive(Deserialize)]
struct Licenses {
    allow: BTreeSet<String>,
}

#[derive(Deserialize)]
struct Bans {
    deny: Vec<Ban>,
}

#[derive(Deserialize)]
struct Ban {
    #[serde(rename = "crate")]
    name: String,
    reason: String,
}

/// The output of `cargo metadata`.
#[derive(Deserialize)]
struct Metadata {
    packages: Vec<Package>,
    resolve: Resolve,
}

#[derive(Deserialize)]
struct Resolve {
    nodes: Vec<Node>,
}

#[derive(Deserialize)]
struct Node {
    id: String,
}

#[derive(Deserialize)]
struct Package {
    id: String,
    name: String,
    /// Where it comes from; `None` for packages of this repository.
    source: Option<String>,
    license: Option<String>,
    dependencies: Vec<Dependency>,
}

#[derive(Deserialize)]
struct Dependency {
    name: String,
    req: String,
    path: Option<String>,
}

pub(super) fn check(context: &RunContext) {
    context.check("licences, bans and sources of dependencies", || {
        let path = context.root.join("deny.toml");
        let text = std::fs::read_to_string(&path)
            .with_context(|| format!("cannot read {}", path.display()))?;
        let rules: Rules = toml::from_str(&text).context("deny.toml")?;
        let mut cargo = context.cargo();
        cargo.args(["metadata", "--locked", "--format-version", "1"]);
        cargo.args(rules.graph.targets.iter().flat_map(|target| ["--filter-platform", target]));
        let said = cargo.output().context("cannot run cargo metadata")?;
        ensure!(said.status.success(), "{}", String::from_utf8_lossy(&said.stderr));
        let metadata: Metadata = serde_json::from_slice(&said.stdout).context("cargo metadata")?;
        let wrong = rule_violations(&metadata, &rules);
        ensure!(wrong.is_empty(), "{}", wrong.join("\n"));
        Ok(())
    });
}

/// The violations of the rules, one line each.
fn rule_violations(metadata: &Metadata, rules: &Rules) -> Vec<String> {
    let used: BTreeSet<&str> = metadata.resolve.nodes.iter().map(|node| &*node.id).collect();
    let used = metadata.packages.iter().filter(|package| used.contains(&*package.id));
    used.filter_map(|package| {
        let outcome = match &package.source {
            None => check_own_package(package),
            Some(source) => check_foreign_package(package, source, rules),
        };
        outcome.err().map(|why| format!("{}: {why}", package.name))
    })
    .collect()
}

/// A package of this repository must name the versions it uses.
fn check_own_package(package: &Package) -> Result<()> {
    let any = package.dependencies.iter().find(|used| used.req == "*" && used.path.is_none());
    match any {
        Some(any) => bail!("uses any version of {}", any.name),
        None => Ok(()),
    }
}

fn check_foreign_package(package: &Package, source: &str, rules: &Rules) -> Result<()> {
    ensure!(source == CRATES_IO, "comes from {source}");
    if let Some(ban) = rules.bans.deny.iter().find(|ban| ban.name == package.name) {
        bail!("is banned: {}", ban.reason);
    }
    let license = package.license.as_deref().context("does not say its licence")?;
    // Older packages write `A/B`.
    let expression = Expression::parse_mode(license, ParseMode::LAX)
        .map_err(|why| anyhow::anyhow!("its licence cannot be read: {why}"))?;
    let is_allowed = expression.evaluate(|one| rules.licenses.allow.contains(&one.to_string()));
    ensure!(is_allowed, "its licence is {license}");
    Ok(())
}

/// Runs all checks of cargo-deny, with the advisory database, which it downloads.
pub(crate) fn audit(context: &RunContext) -> Result<()> {
    install::cargo_tool(context, "deny", DENY_VERSION)?;
    context.check("cargo deny", || {
        let mut command = context.cargo();
        command.args(["deny", "--log-level", "error", "check"]);
        context.run("cargo deny", &mut command, Duration::from_secs(300))?.success_output()?;
        Ok(())
    });
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rules() -> Rules {
        let allow = ["MIT", "Apache-2.0 WITH LLVM-exception"].map(str::to_owned);
        let ban = Ban { name: "openssl-sys".to_owned(), reason: "not here".to_owned() };
        Rules {
            graph: Graph { targets: Vec::new() },
            licenses: Licenses { allow: allow.into() },
            bans: Bans { deny: vec![ban] },
        }
    }

    fn package(name: &str, license: Option<&str>, source: Option<&str>) -> Package {
        Package {
            id: name.to_owned(),
            name: name.to_owned(),
            source: source.map(str::to_owned),
            license: license.map(str::to_owned),
            dependencies: Vec::new(),
        }
    }

    fn faults_of(packages: Vec<Package>) -> Vec<String> {
        let nodes = packages.iter().map(|package| Node { id: package.id.clone() }).collect();
        rule_violations(&Metadata { packages, resolve: Resolve { nodes } }, &rules())
    }

    #[test]
    fn what_is_allowed_passes() {
        let here = Some(CRATES_IO);
        assert!(
            faults_of(vec![
                package("ours", None, None),
                package("a", Some("MIT"), here),
                package("b", Some("MIT/GPL-3.0"), here),
                package("c", Some("MIT AND Apache-2.0 WITH LLVM-exception"), here),
            ])
            .is_empty()
        );
    }

    #[test]
    fn what_is_not_is_named() {
        let here = Some(CRATES_IO);
        let any = Dependency { name: "x".to_owned(), req: "*".to_owned(), path: None };
        let loose = Package { dependencies: vec![any], ..package("ours", None, None) };
        let wrong = faults_of(vec![
            loose,
            package("a", Some("GPL-3.0"), here),
            package("b", Some("MIT AND GPL-3.0"), here),
            package("c", None, here),
            package("d", Some("MIT"), Some("git+https://example.org")),
            package("openssl-sys", Some("MIT"), here),
        ]);
        let expected = [
            "ours: uses any version of x",
            "a: its licence is GPL-3.0",
            "b: its licence is MIT AND GPL-3.0",
            "c: does not say its licence",
            "d: comes from git+https://example.org",
            "openssl-sys: is banned: not here",
        ];
        assert_eq!(wrong, expected);
    }
}
