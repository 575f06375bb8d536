//! Manual pages: one per command, and one for the configuration file.

use std::fs;
use std::io::Write;
use std::path::Path;

use clap::{Command, CommandFactory};
use clap_mangen::Man;

use crate::cli::Cli;
use crate::examples;
use crate::exit::{CliError, FAILED};

/// Writes all pages into `dir`.
pub(crate) fn write_pages(dir: &Path) -> Result<(), CliError> {
    let failed = |e: std::io::Error| CliError::new(FAILED, format!("{}: {e}", dir.display()));
    fs::create_dir_all(dir).map_err(failed)?;
    let mut root = Cli::command().disable_help_subcommand(true);
    root.build();
    write_page_tree(&root, "", dir).map_err(failed)?;
    fs::write(dir.join("windrose.toml.5"), config::manual()).map_err(failed)
}

/// Writes the page of a command and of its subcommands; `words` is the command's path.
fn write_page_tree(command: &Command, words: &str, dir: &Path) -> std::io::Result<()> {
    for sub in command.get_subcommands().filter(|sub| !sub.is_hide_set()) {
        let longer = format!("{words} {}", sub.get_name());
        write_page_tree(sub, longer.trim_start(), dir)?;
    }
    let man = Man::new(command.clone());
    let mut page = Vec::new();
    man.render_title(&mut page)?;
    man.render_name_section(&mut page)?;
    Man::new(without_globals(command)).render_synopsis_section(&mut page)?;
    man.render_description_section(&mut page)?;
    if command.get_arguments().any(|arg| !arg.is_hide_set()) {
        man.render_options_section(&mut page)?;
    }
    if command.get_subcommands().any(|sub| !sub.is_hide_set()) {
        man.render_subcommands_section(&mut page)?;
    }
    examples_section(&mut page, command, words)?;
    if let Some(codes) = command.get_after_help() {
        let codes = codes.to_string();
        writeln!(page, ".SH \"EXIT STATUS\"\n.nf")?;
        codes
            .lines()
            .skip(1)
            .try_for_each(|line| writeln!(page, "{}", escape_roff(line.trim_start())))?;
        writeln!(page, ".fi")?;
    }
    if command.get_version().is_some() {
        man.render_version_section(&mut page)?;
    }
    fs::write(dir.join(man.get_filename()), page)
}

/// The command for the synopsis: global options have a section of their own.
fn without_globals(command: &Command) -> Command {
    command.clone().mut_args(|arg| match arg.is_global_set() {
        true => arg.hide(true),
        false => arg,
    })
}

/// The command's own examples, or one of each subcommand if it has none.
fn examples_section(page: &mut Vec<u8>, command: &Command, words: &str) -> std::io::Result<()> {
    let subcommand_examples = || {
        let shown = command.get_subcommands().filter(|sub| !sub.is_hide_set());
        let first = |sub: &Command| {
            examples::first_example(format!("{words} {}", sub.get_name()).trim_start())
        };
        shown.filter_map(first).collect()
    };
    let examples = examples::examples_for(words).map_or_else(subcommand_examples, <[_]>::to_vec);
    writeln!(page, ".SH EXAMPLES")?;
    for (what, line) in examples {
        writeln!(page, ".TP\n{}:\n\\fB{}\\fR", escape_roff(what), escape_roff(line))?;
    }
    Ok(())
}

/// Escapes text for roff.
fn escape_roff(text: &str) -> String {
    let text = text.replace('\\', "\\e").replace('-', "\\-");
    if text.starts_with(['.', '\'']) { format!("\\&{text}") } else { text }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn manual_pages_have_examples_and_their_exit_codes() {
        let dir = tempfile::tempdir().unwrap();
        write_pages(dir.path()).unwrap();
        let page = |name: &str| fs::read_to_string(dir.path().join(name)).unwrap();
        let create = page("windrose-volume-create.1");
        let example = "With replicas on two nodes:\n\\fBwindrose volume create web \\-\\-size 100G \
            \\-\\-replicas 2";
        assert!(create.contains(".SH EXAMPLES\n") && create.contains(example), "{create}");
        for entry in fs::read_dir(dir.path()).unwrap() {
            let name = entry.unwrap().file_name().into_string().unwrap();
            let examples =
                page(&name).split_once(".SH EXAMPLES\n").map(|(_, examples)| examples.to_owned());
            if name.ends_with(".1") {
                assert!(examples.is_some_and(|text| text.starts_with(".TP\n")), "{name}");
            }
        }
        let group = page("windrose-volume-mirror.1");
        assert!(group.contains("\\fBwindrose volume mirror add "), "{group}");
        let (_, synopsis) = create.split_once(".SH SYNOPSIS\n").unwrap();
        let (synopsis, _) = synopsis.split_once(".SH ").unwrap();
        assert!(synopsis.contains("size") && !synopsis.contains("api"), "{synopsis}");
        let root = page("windrose.1");
        assert!(root.contains(".SH \"EXIT STATUS\"\n.nf\n0  done"), "{root}");
        // Global options come after the command's own.
        let own = create.find("\\fB\\-\\-size\\fR").unwrap();
        let global = create.find(".SH \"GLOBAL OPTIONS\"").unwrap();
        assert!(own < global, "{create}");
        assert!(page("windrose.toml.5").contains("windrose.toml"));
    }

    #[test]
    fn text_is_no_roff() {
        assert_eq!(escape_roff(".x \\ -y"), "\\&.x \\e \\-y");
    }
}
