//! The language of the repository: words that the glossary bans, lines of prose that are too long,
//! modules without documentation.

use super::text_files::TextFiles;
use anyhow::{Context, Result};
use std::{
    collections::BTreeSet,
    path::{Path, PathBuf},
};

/// Columns of a line of prose: comments and Markdown.
const MAX_COLUMNS: usize = 100;

/// Where the banned words are.
const GLOSSARY: &str = "docs/GLOSSARY.md";

/// The heading of the banned words there.
const BANNED: &str = "## Words that are not used";

/// A place where the language is not as it should be.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Finding {
    file: PathBuf,
    /// From 1.
    line: usize,
    what: String,
}

impl std::fmt::Display for Finding {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}:{}: {}", self.file.display(), self.line, self.what)
    }
}

/// A word that is not used, and what is said instead.
#[derive(Clone, Debug, PartialEq, Eq)]
struct BannedWord {
    word: String,
    instead: String,
}

/// Everything that is wrong in the repository with these files, in order.
///
/// # Errors
/// That there is no glossary.
pub(super) fn findings(files: &TextFiles) -> Result<Vec<Finding>> {
    let glossary = files.iter().find(|(path, _)| path == Path::new(GLOSSARY));
    let (_, glossary) = glossary.with_context(|| format!("there is no {GLOSSARY}"))?;
    let banned = banned_words(glossary);
    let mut all = unknown_names(glossary, &identifiers(files));
    all.extend(files.iter().flat_map(|(path, text)| of_file(path, text, &banned)));
    all.sort();
    Ok(all)
}

fn of_file(path: &Path, text: &str, banned: &[BannedWord]) -> Vec<Finding> {
    let at = |(line, what): (usize, String)| Finding { file: path.to_owned(), line, what };
    let is_glossary = path == Path::new(GLOSSARY);
    let mut found = Vec::new();
    if !is_glossary {
        found.extend(used_banned_words(text, banned).map(at));
    }
    let is_rust = path.extension().is_some_and(|e| e == "rs");
    found.extend(if is_rust { long_comments(text) } else { long_paragraphs(text) }.map(at));
    if is_rust {
        found.extend(compiled_examples(text).map(at));
    }
    if is_module(path) && !is_documented(text) {
        found.push(at((1, "the module does not say what it is for (//!)".to_owned())));
    }
    found
}

/// The words of the glossary's table of those that are not used: a word in the first column, what
/// to say in the second.
fn banned_words(glossary: &str) -> Vec<BannedWord> {
    let section = glossary.split(BANNED).nth(1).unwrap_or_default();
    let rows = section.lines().filter(|line| line.starts_with("| `"));
    let words = rows.flat_map(|row| {
        let mut cells = row.trim_matches('|').split('|').map(str::trim);
        let (words, instead) = (cells.next().unwrap_or_default(), cells.next().unwrap_or_default());
        let instead = instead.replace('`', "");
        let words = words.split(',').map(|word| word.trim().trim_matches('`').to_owned());
        words.map(move |word| BannedWord { word, instead: instead.clone() }).collect::<Vec<_>>()
    });
    words.collect()
}

/// The lines that have a banned word, as a word of its own or as a part of a name in camel or snake
/// case.
fn used_banned_words<'a>(
    text: &'a str,
    banned: &'a [BannedWord],
) -> impl Iterator<Item = (usize, String)> + 'a {
    text.lines().enumerate().flat_map(move |(n, line)| {
        let used = banned.iter().filter(move |banned| has_word(line, &banned.word));
        used.map(move |b| (n + 1, format!("`{}` is not used: {}", b.word, b.instead)))
    })
}

fn has_word(line: &str, word: &str) -> bool {
    let is_part = |c: char| c.is_ascii_alphanumeric();
    line.match_indices(word).any(|(at, _)| {
        let before = line[..at].chars().next_back();
        let after = line[at + word.len()..].chars().next();
        !before.is_some_and(is_part) && !after.is_some_and(is_part)
    })
}

/// Lines that are a comment and too long. A line that has no blank to break it at is left alone.
fn long_comments(text: &str) -> Box<dyn Iterator<Item = (usize, String)> + '_> {
    let lines = text.lines().enumerate().filter(|(_, line)| {
        let comment = line.trim_start();
        let words = comment.trim_start_matches(['/', '!']).trim_start();
        comment.starts_with("//")
            && is_long(line)
            && words.contains(' ')
            && !words.starts_with('|')
            && !is_drawing(words)
    });
    Box::new(lines.map(too_long))
}

/// Code blocks in documentation that rustdoc would compile and run as tests. The `unit` tier does
/// not run these: an example that has to work belongs into a test or into `examples`.
fn compiled_examples(text: &str) -> impl Iterator<Item = (usize, String)> + '_ {
    let mut is_code = false;
    let lines = text.lines().enumerate().filter(move |(_, line)| {
        let comment = ["//! ", "/// "].iter().find_map(|mark| line.trim_start().strip_prefix(mark));
        let Some(language) = comment.and_then(|c| c.trim_start().strip_prefix("```")) else {
            return false;
        };
        is_code = !is_code;
        is_code && matches!(language.trim(), "" | "rust" | "no_run" | "should_panic")
    });
    lines.map(|(n, _)| (n + 1, "an example that nothing compiles: mark it ```text".to_owned()))
}

/// Lines of Markdown that are too long: neither a table, nor code, nor a single address.
fn long_paragraphs(text: &str) -> Box<dyn Iterator<Item = (usize, String)> + '_> {
    let (mut is_code, mut is_measured) = (false, false);
    let lines = text.lines().enumerate().filter(move |(_, line)| {
        let trimmed = line.trim_start();
        // What a measurement has written.
        is_measured = (is_measured || trimmed.starts_with("<!-- measured: "))
            && !trimmed.starts_with("<!-- end of measured: ");
        if trimmed.starts_with("```") {
            is_code = !is_code;
        }
        let breaks = trimmed.trim_start_matches(['*', '-', '#', ' ']).contains(' ');
        !is_code && !is_measured && !trimmed.starts_with(['|', '<']) && is_long(line) && breaks
    });
    Box::new(lines.map(too_long))
}

/// Whether a line of a comment is a drawing, or columns of a table, or arguments of a command.
fn is_drawing(words: &str) -> bool {
    words.contains("   ") || words.contains(" | ") || words.contains("] [")
}

fn too_long((n, line): (usize, &str)) -> (usize, String) {
    (n + 1, format!("{} columns of prose, at most {MAX_COLUMNS}", line.chars().count()))
}

fn is_long(line: &str) -> bool {
    line.chars().count() > MAX_COLUMNS
}

/// Whether `path` is a module of a crate: tests beside the code say by their names what they are
/// for.
fn is_module(path: &Path) -> bool {
    let is_rust = path.extension().is_some_and(|e| e == "rs");
    let is_source = path.components().any(|part| part.as_os_str() == "src");
    is_rust
        && is_source
        && !path.components().any(|part| part.as_os_str() == "tests")
        && path.file_name().is_some_and(|name| name != "tests.rs")
}

fn is_documented(text: &str) -> bool {
    let mut lines = text.lines().skip_while(|line| line.starts_with("#!["));
    lines.next().is_some_and(|line| line.starts_with("//!"))
}

/// Names in the last column of the glossary's tables that no source has.
fn unknown_names(glossary: &str, known: &BTreeSet<String>) -> Vec<Finding> {
    let terms = glossary.split(BANNED).next().unwrap_or_default();
    let rows = terms.lines().enumerate().filter(|(_, line)| line.starts_with("| "));
    let mut found = Vec::new();
    for (n, row) in rows {
        let code = row.trim_matches('|').rsplit('|').next().unwrap_or_default();
        for name in code.split('`').skip(1).step_by(2).flat_map(words) {
            if name.len() > 1 && !known.contains(name) {
                let what = format!("no source has the name `{name}`");
                found.push(Finding { file: GLOSSARY.into(), line: n + 1, what });
            }
        }
    }
    found
}

fn words(text: &str) -> impl Iterator<Item = &str> {
    text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_').filter(|word| !word.is_empty())
}

/// Every word of the sources, and the names of their files and folders.
fn identifiers(files: &[(PathBuf, String)]) -> BTreeSet<String> {
    let mut all = BTreeSet::new();
    for (path, text) in files.iter().filter(|(path, _)| path.starts_with("crates")) {
        let name = path.with_extension("");
        let parts = name.components().map(|part| part.as_os_str().to_string_lossy());
        all.extend(parts.map(|part| part.replace('-', "_")));
        all.extend(words(text).map(str::to_owned));
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: &str = "# Glossary\n\n| term | meaning | whose term | in the code |\n|---|---|---|---|\n\
        | view | a period | VR | `View` |\n\n## Words that are not used\n\n| word | instead |\n|---|---|\n\
        | `Frobs`, `unfrobbed` | `StartView`; *not committed* |\n";

    fn wrong(path: &str, text: &str) -> Vec<String> {
        let all = of_file(Path::new(path), text, &banned_words(PAGE));
        all.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn a_banned_word_is_found_wherever_it_stands() {
        let found = wrong("crates/a/b/src/x.rs", "//! A module.\nfn unfrobbed_writes() {}\n");
        assert_eq!(
            found,
            ["crates/a/b/src/x.rs:2: `unfrobbed` is not used: StartView; *not committed*"]
        );
        assert_eq!(wrong("docs/a.md", "The Frobs of a view.\n").len(), 1);
        assert!(wrong("docs/a.md", "Frobsx and xunfrobbed are other words.\n").is_empty());
        assert!(wrong(GLOSSARY, "Frobs\n").is_empty(), "it names them");
    }

    #[test]
    fn a_long_line_of_prose_is_found() {
        let long = "word ".repeat(21);
        assert_eq!(
            wrong("docs/guides/a.md", &long),
            ["docs/guides/a.md:1: 105 columns of prose, at most 100"]
        );
        let source = format!("//! A module.\n    /// {long}\n");
        assert_eq!(wrong("crates/a/b/src/x.rs", &source).len(), 1);
        let fine = format!("```\n{long}\n```\n| {long} |\n* {}\n", "x".repeat(120));
        assert!(wrong("docs/guides/a.md", &fine).is_empty(), "code, tables and addresses may be");
    }

    #[test]
    fn an_example_that_nothing_compiles_is_found() {
        let example = |language: &str| {
            wrong(
                "crates/a/b/src/x.rs",
                &format!("//! A module.\n/// ```{language}\n/// f();\n/// ```\nfn f() {{}}\n"),
            )
        };
        assert_eq!(example("").len(), 1);
        assert_eq!(example("rust").len(), 1);
        assert!(example("text").is_empty());
    }

    #[test]
    fn a_module_without_documentation_is_found() {
        assert_eq!(wrong("crates/a/b/src/x.rs", "use std::fmt;\n").len(), 1);
        assert!(wrong("crates/a/b/src/x.rs", "#![no_std]\n//! A module.\n").is_empty());
        assert!(wrong("crates/a/b/src/x/tests.rs", "use super::*;\n").is_empty());
    }

    #[test]
    fn a_name_that_no_source_has_is_found_in_the_glossary() {
        let known = BTreeSet::from(["View".to_owned()]);
        assert!(unknown_names(PAGE, &known).is_empty());
        let found = unknown_names(PAGE, &BTreeSet::new());
        assert_eq!(found[0].to_string(), "docs/GLOSSARY.md:5: no source has the name `View`");
    }
}
