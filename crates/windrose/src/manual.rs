//! Manual pages: one for each command, one for the configuration file.

use std::fs;
use std::path::Path;

use clap::CommandFactory;

use crate::cli::Cli;
use crate::exit::{FAILED, Failure};

/// Writes all pages into `dir`.
pub(crate) fn write(dir: &Path) -> Result<(), Failure> {
    let failed = |e: std::io::Error| Failure::new(FAILED, format!("{}: {e}", dir.display()));
    fs::create_dir_all(dir).map_err(failed)?;
    clap_mangen::generate_to(Cli::command(), dir).map_err(failed)?;
    fs::write(dir.join("windrose.toml.5"), node::config::manual()).map_err(failed)
}
