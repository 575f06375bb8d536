//! Format, lints, language, imports, dependencies.

mod circles;
#[cfg(test)]
mod floors;
mod prose;
mod text_files;

use super::dependencies;
use crate::run_context::RunContext;
use anyhow::Result;
use std::time::Duration;

pub(super) fn run(context: &RunContext) -> Result<()> {
    let files = text_files::read(&context.root)?;
    context.check("language: words, lines, documentation of modules", || {
        none_found(&prose::findings(&files)?)
    });
    context.check("imports without circles", || none_found(&circles::findings(&files)));
    lint(context);
    dependencies::check(context);
    Ok(())
}

fn none_found(findings: &[impl ToString]) -> Result<()> {
    let lines: Vec<String> = findings.iter().map(ToString::to_string).collect();
    anyhow::ensure!(lines.is_empty(), "{} findings:\n{}", lines.len(), lines.join("\n"));
    Ok(())
}

/// rustfmt and clippy, over the workspace.
pub(crate) fn lint(context: &RunContext) {
    context.check("rustfmt", || {
        let mut workspace = context.cargo();
        workspace.args(["fmt", "--all", "--check"]);
        context.run("cargo fmt", &mut workspace, Duration::from_secs(60))?.success_output()?;
        Ok(())
    });
    clippy(context, "clippy", &["--workspace", "--all-targets"]);
    // With the features that it is shipped with, and no test's.
    clippy(context, "clippy of the product by itself", &["-p", "windrose"]);
}

fn clippy(context: &RunContext, name: &str, what: &[&str]) {
    context.check(name, || {
        let mut clippy = context.cargo();
        clippy.arg("clippy").args(what).args(["--locked", "--", "-D", "warnings"]);
        context.build("cargo clippy", &mut clippy)?.success_output()?;
        Ok(())
    });
}

#[cfg(test)]
mod tests {
    use std::{fs, path::Path};

    /// The paragraphs of a page that are cut in two: one stops in the middle of a sentence, and the
    /// next one is no list, or begins in the middle of one. What stands before or behind code may
    /// be a part of a sentence.
    fn cut_paragraphs(page: &str) -> Vec<&str> {
        let is_prose = |block: &str| {
            block.starts_with(|c: char| c.is_alphabetic() || "`*[\"".contains(c))
                && !block.starts_with("* ")
        };
        let mut found = Vec::new();
        for text in page.split("```").step_by(2) {
            let blocks: Vec<&str> = text.split("\n\n").map(str::trim).collect();
            for pair in blocks.windows(2).filter(|pair| is_prose(pair[0])) {
                let ends = pair[0].ends_with(|c: char| ".:!?)*`_|∎>]".contains(c));
                let is_cut = !ends && (is_prose(pair[1]) || pair[1].starts_with('#'));
                if is_cut || pair[1].starts_with(char::is_lowercase) {
                    found.push(pair[0].lines().next().unwrap_or_default());
                }
            }
        }
        found
    }

    #[test]
    fn no_paragraph_of_the_docs_is_cut_in_two() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../..");
        let mut wrong = Vec::new();
        for directory in ["docs/guides", "docs/rfd", "docs/format", "docs/conformance"] {
            for entry in fs::read_dir(root.join(directory)).unwrap() {
                let path = entry.unwrap().path();
                if path.extension().is_none_or(|e| e != "md") {
                    continue;
                }
                let page = fs::read_to_string(&path).unwrap();
                let cut = cut_paragraphs(&page);
                wrong.extend(cut.iter().map(|line| format!("{}: {line}", path.display())));
            }
        }
        assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    }

    #[test]
    fn a_paragraph_that_was_inserted_into_a_sentence_is_found() {
        let page = "See to cables; do not\n\nOne that stops is not let in.\npull another disk.\n";
        assert_eq!(cut_paragraphs(page), ["See to cables; do not"]);
        assert_eq!(cut_paragraphs("A sentence.\n\npull it.\n"), ["A sentence."]);
        assert_eq!(cut_paragraphs("Do not\n\n## Pull\n\nNow.\n"), ["Do not"]);
        let fine =
            "Say of them that\n\n* one\n* two\n\n```sh\npull it\n```\n\n| a | b |\n\nThe end.\n";
        assert!(cut_paragraphs(fine).is_empty());
    }
}
