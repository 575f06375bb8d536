//! Documentation of the settings, generated from their table.

use std::fmt::Write;

use super::settings::{DefaultValue, SETTINGS, Setting};

const INTRODUCTION: &str = "\
# Configuration

`windrose node --config FILE` reads a TOML file; without `--config` it reads
`/etc/windrose/windrose.toml`, and where there is none it runs with the defaults. Every setting is
optional. With an unknown setting or an invalid value, the node does not start; the error names the
file, the line, the setting and the allowed values. `windrose node --check --config FILE` only
checks the file.

A running node does not notice changes; restart it.

This page is generated from the program's own table of settings (`cargo test -p node` checks it).
";

/// `docs/guides/configuration.md`.
#[must_use]
pub fn guide() -> String {
    let mut page = INTRODUCTION.to_owned();
    let mut section = "";
    page.push_str("\n## At the top of the file\n");
    for setting in SETTINGS {
        if let Some((table, _)) = setting.key.split_once('.')
            && table != section
        {
            section = table;
            let _ = write!(page, "\n## `[{table}]`\n");
        }
        let _ = write!(page, "\n{}", entry(setting));
    }
    let _ = write!(page, "\n## All defaults\n\n```toml\n{}```\n", example());
    page
}

fn key_in_section(setting: &Setting) -> &'static str {
    setting.key.split_once('.').map_or(setting.key, |(_, key)| key)
}

fn entry(setting: &Setting) -> String {
    let default = match setting.default {
        DefaultValue::Value(toml) => format!("`{toml}`"),
        DefaultValue::Unset(what) => what.to_owned(),
    };
    format!(
        "### `{}`\n{}\n\n{}\n{}\n",
        key_in_section(setting),
        wrapped(setting.about, ""),
        wrapped(&format!("* Allowed: {}", setting.allowed), "  "),
        wrapped(&format!("* Default: {default}"), "  "),
    )
}

/// `text` in lines of at most 100 columns, of which those after the first begin with `indent`. A
/// word is never broken, and no line begins with what Markdown takes for a list.
fn wrapped(text: &str, indent: &str) -> String {
    const COLUMNS: usize = 100;
    let mut lines = vec![String::new()];
    for word in text.split_whitespace() {
        let line = lines.last_mut().expect("one at least");
        let has_room = line.chars().count() + 1 + word.chars().count() <= COLUMNS;
        if line.trim().is_empty() {
            line.push_str(word);
        } else if has_room || matches!(word, "*" | "-" | "+") {
            line.push(' ');
            line.push_str(word);
        } else {
            lines.push(format!("{indent}{word}"));
        }
    }
    lines.join("\n")
}

/// A configuration file with every setting in it, commented out.
#[must_use]
pub fn example() -> String {
    let mut text = String::new();
    let mut section = "";
    for setting in SETTINGS {
        if let Some((table, _)) = setting.key.split_once('.')
            && table != section
        {
            section = table;
            let _ = write!(text, "\n[{table}]\n");
        }
        let key = key_in_section(setting);
        let _ = match setting.default {
            DefaultValue::Value(toml) => writeln!(text, "#{key} = {toml}"),
            DefaultValue::Unset(what) => writeln!(text, "#{key} =      # {what}"),
        };
    }
    text
}

/// The manual page windrose.toml(5).
#[must_use]
pub fn manual() -> String {
    let mut page = String::from(
        ".TH windrose.toml 5\n.SH NAME\nwindrose.toml \\- configuration of a Windrose node\n\
         .SH DESCRIPTION\nRead by \\fBwindrose node\\fR from /etc/windrose/windrose.toml or from \
         the file that \\fB\\-\\-config\\fR names. Every setting is optional; with an unknown \
         setting or an invalid value, the node does not start. Keys below are written \
         SECTION.KEY.\n.SH SETTINGS\n",
    );
    for setting in SETTINGS {
        let default = match setting.default {
            DefaultValue::Value(toml) => toml,
            DefaultValue::Unset(what) => what,
        };
        let _ = writeln!(
            page,
            ".TP\n\\fB{}\\fR\n{}\n.br\nAllowed: {}.\n.br\nDefault: {}.",
            roff(setting.key),
            roff(setting.about),
            roff(setting.allowed),
            roff(default),
        );
    }
    page.push_str(".SH SEE ALSO\nwindrose(1), windrose\\-node(1)\n");
    page
}

/// Escapes `text` for roff.
fn roff(text: &str) -> String {
    let text = text.replace('\\', "\\e").replace('-', "\\-").replace('`', "");
    if text.starts_with(['.', '\'']) { format!("\\&{text}") } else { text }
}
