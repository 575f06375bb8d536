//! `windrose node accept-data-dir`: a statement that the data directory is the right one as it is.

use std::path::Path;
use std::process::ExitCode;

use node::anchor;

use crate::daemon;
use crate::exit::{FAILED, Failure, USAGE};
use crate::remote::{ask_for_name, write};

/// Has the next start use the data directory as it is.
pub(crate) fn run(config: Option<&Path>, confirm: Option<&str>) -> Result<ExitCode, Failure> {
    let config = daemon::load(config)?;
    let (dir, anchor_dir) = (&config.data_dir, config.anchor_dir.as_deref());
    let failed = |e: &dyn std::fmt::Display| Failure::new(FAILED, e.to_string());
    let shown = dir.display();
    let in_use = anchor::is_in_use(dir).map_err(|e| failed(&format!("data_dir {shown}: {e}")))?;
    if in_use {
        return Err(Failure::new(FAILED, format!("data_dir {shown}: a node uses it"))
            .hint("stop that node first (systemctl stop windrose)"));
    }
    let Some(what) = anchor::mismatch(dir, anchor_dir).map_err(|e| failed(&e))? else {
        write(&format!("data_dir {shown} is as it was: there is nothing to accept."))?;
        return Ok(ExitCode::SUCCESS);
    };
    let is_empty = !dir.join("store.redb").exists() && !dir.join("cluster.json").exists();
    let then = if is_empty {
        "The node then begins anew, without any volume. Images that it had stay where they are."
    } else {
        "The node then serves what this directory says."
    };
    let what = format!("data_dir {shown}: {what}\n{then}");
    match confirm {
        Some(name) if name == config.name => {}
        Some(_) => {
            let message = format!("nothing was accepted: this node is called {}", config.name);
            return Err(Failure::new(USAGE, message));
        }
        None => {
            let hint = format!("--confirm {} accepts it without asking", config.name);
            ask_for_name(("node", &config.name), &what, "told so", &hint)?;
        }
    }
    anchor::accept(dir, anchor_dir).map_err(|e| failed(&e))?;
    write("Accepted. Start the node (systemctl start windrose).")?;
    Ok(ExitCode::SUCCESS)
}
