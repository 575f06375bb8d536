//! `windrose node accept-data-dir`: declares that the data directory is the right one as it is.

use std::path::Path;
use std::process::ExitCode;

use membership::anchor;

use crate::daemon;
use crate::exit::{CliError, FAILED, USAGE};
use crate::remote::{print_line, prompt_for_name};

/// Makes the next start accept the data directory as it is.
pub(crate) fn run(config: Option<&Path>, confirm: Option<&str>) -> Result<ExitCode, CliError> {
    let config = daemon::load_config(config)?;
    let (dir, anchor_dir) = (&config.data_dir, config.anchor_dir.as_deref());
    let failed = |e: &dyn std::fmt::Display| CliError::new(FAILED, e.to_string());
    let shown = dir.display();
    let in_use = anchor::is_in_use(dir).map_err(|e| failed(&format!("data_dir {shown}: {e}")))?;
    if in_use {
        return Err(CliError::new(FAILED, format!("data_dir {shown}: a node uses it"))
            .with_hint("stop that node first (systemctl stop windrose)"));
    }
    let Some(what) = anchor::describe_mismatch(dir, anchor_dir).map_err(|e| failed(&e))? else {
        print_line(&format!("data_dir {shown} matches its node: there is nothing to accept."))?;
        return Ok(ExitCode::SUCCESS);
    };
    let is_empty = !dir.join("store.redb").exists() && !dir.join("cluster.json").exists();
    let then = if is_empty {
        "The node then starts without any volume. Its old images are kept."
    } else {
        "The node then serves the volumes recorded in this directory."
    };
    let what = format!("data_dir {shown}: {what}\n{then}");
    match confirm {
        Some(name) if name == config.name => {}
        Some(_) => {
            let message = format!("nothing was accepted: the name of this node is {}", config.name);
            return Err(CliError::new(USAGE, message));
        }
        None => {
            let hint = format!("use --confirm {} to accept it without a prompt", config.name);
            prompt_for_name(("node", &config.name), &what, "changed", &hint)?;
        }
    }
    anchor::accept_data_dir(dir, anchor_dir).map_err(|e| failed(&e))?;
    print_line("Accepted. Start the node (systemctl start windrose).")?;
    Ok(ExitCode::SUCCESS)
}
