//! `windrose pool …`.

use std::path::PathBuf;
use std::process::ExitCode;

use api::endpoint::{
    AddPoolDisks, ClearPoolErrors, CreatePool, DeletePool, GetPool, ListPools, NoBody, OpenPool,
    POOL_FORCE, RemovePoolDisk, ReplacePoolDisk, ScrubPool,
};
use api::{
    AddDisks, ClearErrors, CreatePoolRequest, OpenPoolRequest, Pool, PoolDisk, PoolName,
    RemoveDisk, ReplaceDisk,
};

use crate::cli::{ConfirmArgs, CreatePoolArgs, OverwriteArgs, PoolCommand};
use crate::exit::{CliError, USAGE};
use crate::files::absolute;
use crate::remote::{NodeConnection, prompt_for_name, require_confirmation};
use crate::{output, recovery};
use wire::plural;

pub(crate) async fn run(
    remote: NodeConnection,
    command: PoolCommand,
) -> Result<ExitCode, CliError> {
    let client = &remote.client;
    let pool = match command {
        PoolCommand::List => {
            let list = client.call::<ListPools>(&NoBody).await?;
            remote.print(&list, output::pools)?;
            return Ok(ExitCode::SUCCESS);
        }
        PoolCommand::Import { pool, disk, name } => {
            recovery::import_pool(&remote, pool, absolute_paths(&disk)?, name).await?;
            return Ok(ExitCode::SUCCESS);
        }
        PoolCommand::Delete { name, confirm, force } => {
            delete(&remote, &name, &confirm, force).await?;
            return Ok(ExitCode::SUCCESS);
        }
        PoolCommand::Create(args) => client.call::<CreatePool>(&create_request(*args)?).await?,
        PoolCommand::Show { name } => client.call_on::<GetPool>(&name, &[], &NoBody).await?,
        PoolCommand::Add { name, disks, spare, overwrite } => {
            let (disks, overwrite) = (absolute_paths(&disks)?, overwrite_identities(overwrite)?);
            let add = AddDisks { disks, spare, overwrite };
            client.call_on::<AddPoolDisks>(&name, &[], &add).await?
        }
        PoolCommand::Remove { name, disk, cancel } => {
            let remove =
                RemoveDisk { disk: resolve_disk_name(&remote, &name, disk).await?, cancel };
            client.call_on::<RemovePoolDisk>(&name, &[], &remove).await?
        }
        PoolCommand::Replace { name, disk, with, overwrite } => {
            let (disk, with) = (resolve_disk_name(&remote, &name, disk).await?, absolute(&with)?);
            let replace = ReplaceDisk { disk, with, overwrite: overwrite_identities(overwrite)? };
            client.call_on::<ReplacePoolDisk>(&name, &[], &replace).await?
        }
        PoolCommand::Clear { name, disk } => {
            let disk = match disk {
                Some(disk) => Some(resolve_disk_name(&remote, &name, disk).await?),
                None => None,
            };
            client.call_on::<ClearPoolErrors>(&name, &[], &ClearErrors { disk }).await?
        }
        PoolCommand::Scrub { name } => client.call_on::<ScrubPool>(&name, &[], &NoBody).await?,
        PoolCommand::Open { name, without, take_over, confirm } => {
            let open = confirm_open(&remote, &name, (without, take_over), confirm).await?;
            client.call_on::<OpenPool>(&name, &[], &open).await?
        }
    };
    remote.print(&pool, output::pool)?;
    Ok(ExitCode::SUCCESS)
}

fn create_request(args: CreatePoolArgs) -> Result<CreatePoolRequest, CliError> {
    let create = CreatePoolRequest {
        name: args.name,
        raid: args.raid,
        copies: args.copies,
        columns: args.columns,
        chunk_bytes: args.chunk_size,
        checksums: args.checksums,
        disks: absolute_paths(&args.disks)?,
        spares: absolute_paths(&args.spare)?,
        overwrite: overwrite_identities(args.overwrite)?,
    };
    create.check().map_err(|e| CliError::new(USAGE, e.to_string()))?;
    Ok(create)
}

fn absolute_paths(paths: &[PathBuf]) -> Result<Vec<PathBuf>, CliError> {
    paths.iter().map(|path| absolute(path)).collect()
}

/// Disks that may be overwritten, both as typed and as absolute paths: only the node knows which
/// are serial numbers.
fn overwrite_identities(args: OverwriteArgs) -> Result<Vec<String>, CliError> {
    let mut all = Vec::new();
    for typed in args.overwrite {
        all.extend(absolute_if_path(&typed)?.filter(|path| *path != typed));
        all.push(typed);
    }
    Ok(all)
}

/// The argument as an absolute path, if it may be a path: the node does not know our working
/// directory.
fn absolute_if_path(typed: &str) -> Result<Option<String>, CliError> {
    const MARK: &str = "path:";
    let (mark, path) = match typed.strip_prefix(MARK) {
        Some(path) => (MARK, path),
        None if typed.contains('/') => ("", typed),
        None => return Ok(None),
    };
    let path = absolute(path.as_ref())?.into_os_string().into_string();
    let path = path.map_err(|_| CliError::new(USAGE, format!("{typed}: it is not UTF-8")))?;
    Ok(Some(format!("{mark}{path}")))
}

/// A pool disk's name for the node: an absolute path, unless it is a serial number.
async fn resolve_disk_name(
    remote: &NodeConnection,
    pool: &PoolName,
    typed: String,
) -> Result<String, CliError> {
    match absolute_if_path(&typed)? {
        Some(path) if path != typed => {
            let pool = remote.client.call_on::<GetPool>(pool, &[], &NoBody).await?;
            Ok(if is_serial(&pool, &typed) { typed } else { path })
        }
        _ => Ok(typed),
    }
}

fn is_serial(pool: &Pool, typed: &str) -> bool {
    let serial = typed.strip_prefix("serial:");
    let matches =
        |disk: &PoolDisk| disk.serial.as_deref().is_some_and(|s| s == typed || serial == Some(s));
    pool.disks.iter().any(matches)
}

/// Opens a pool without some disks, or takes it over, after the user has confirmed the
/// consequences.
async fn confirm_open(
    remote: &NodeConnection,
    name: &PoolName,
    (without, take_over): (Vec<String>, bool),
    confirm: Option<PoolName>,
) -> Result<OpenPoolRequest, CliError> {
    let mut disks = Vec::new();
    for typed in without {
        disks.push(resolve_disk_name(remote, name, typed).await?);
    }
    let without = disks;
    let Some(confirm) = confirm else {
        // First check that the pool exists.
        let pool = remote.client.call_on::<GetPool>(name, &[], &NoBody).await?;
        let mut what = output::pool(&pool).trim_end().to_owned();
        if !without.is_empty() {
            what.push_str(&format!(
                "\nPool {name} is opened without these disks, for good: {}. Data that only they \
                 have is LOST, including acknowledged writes, and they can never return to the \
                 pool.",
                without.join(", ")
            ));
        }
        if take_over {
            what.push_str(&format!(
                "\nPool {name} is taken over from the node that used it last. Make sure that this \
                 node is off, or will never use its disks again: if it still uses them, it stops \
                 serving them."
            ));
        }
        prompt_for_name(
            ("pool", name.as_str()),
            &what,
            "opened",
            &format!("use --confirm {name} to open it without a prompt"),
        )?;
        return Ok(OpenPoolRequest { without, take_over, confirm: name.clone() });
    };
    Ok(OpenPoolRequest { without, take_over, confirm })
}

async fn delete(
    remote: &NodeConnection,
    name: &PoolName,
    confirm: &ConfirmArgs,
    force: bool,
) -> Result<(), CliError> {
    if !confirm.yes {
        // Name what is about to be lost; first check that the pool exists.
        let pool = remote.client.call_on::<GetPool>(name, &[], &NoBody).await?;
        let what =
            format!("This deletes pool {name}, with its {}.", plural(pool.disks.len(), "disk"));
        let hint = "use --yes to delete it without a prompt";
        require_confirmation(confirm, ("pool", name.as_str()), &what, "deleted", hint)?;
    }
    let flags: &[_] = if force { &[POOL_FORCE] } else { &[] };
    remote.client.call_on::<DeletePool>(name, flags, &NoBody).await?;
    remote.print(&serde_json::json!({ "deleted": name }), |_| format!("Pool {name} is deleted."))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_may_be_a_path_is_made_absolute() {
        for typed in ["S1", "3", "S4EV 1", "50%", "serial:S1", "number:3"] {
            assert_eq!(absolute_if_path(typed).unwrap(), None, "{typed}");
        }
        assert_eq!(absolute_if_path("/dev/sdb").unwrap().as_deref(), Some("/dev/sdb"));
        let here = std::env::current_dir().unwrap().join("a.img");
        let here = here.to_str().unwrap();
        assert_eq!(absolute_if_path("./a.img").unwrap().as_deref(), Some(here));
        assert_eq!(absolute_if_path("path:a.img").unwrap(), Some(format!("path:{here}")));
    }

    #[test]
    fn what_may_be_a_serial_number_is_sent_as_it_was_typed_as_well() {
        let overwrite = vec!["WD/1".to_owned(), "S1".to_owned(), "/dev/sdb".to_owned()];
        let here = std::env::current_dir().unwrap().join("WD/1");
        let sent = overwrite_identities(OverwriteArgs { overwrite }).unwrap();
        assert_eq!(sent, [here.to_str().unwrap(), "WD/1", "S1", "/dev/sdb"]);
    }
}
