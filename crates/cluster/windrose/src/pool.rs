//! `windrose pool …`.

use std::path::PathBuf;
use std::process::ExitCode;

use api::endpoint::{
    AddPoolDisks, ClearPoolErrors, DeletePool, ForcePoolOpen, GetPool, ListPools, Nothing,
    POOL_FORCE, PostPool, RemovePoolDisk, ReplacePoolDisk, ScrubPool,
};
use api::{
    AddDisks, ClearErrors, CreatePool, OpenPool, Pool, PoolDisk, PoolName, RemoveDisk, ReplaceDisk,
};

use crate::cli::{ConfirmArgs, CreatePoolArgs, OverwriteArgs, PoolCommand};
use crate::exit::{Failure, USAGE};
use crate::files::absolute;
use crate::remote::{Remote, ask_for_name, confirmed};
use crate::{recovery, show};
use wire::count;

pub(crate) async fn run(remote: Remote, command: PoolCommand) -> Result<ExitCode, Failure> {
    let client = &remote.client;
    let pool = match command {
        PoolCommand::List => {
            let list = client.call::<ListPools>(&Nothing).await?;
            remote.print(&list, show::pools)?;
            return Ok(ExitCode::SUCCESS);
        }
        PoolCommand::Import { pool, disk, name } => {
            recovery::import(&remote, pool, paths(&disk)?, name).await?;
            return Ok(ExitCode::SUCCESS);
        }
        PoolCommand::Delete { name, confirm, force } => {
            delete(&remote, &name, &confirm, force).await?;
            return Ok(ExitCode::SUCCESS);
        }
        PoolCommand::Create(args) => client.call::<PostPool>(&request(*args)?).await?,
        PoolCommand::Show { name } => client.call_on::<GetPool>(&name, &[], &Nothing).await?,
        PoolCommand::Add { name, disks, spare, overwrite } => {
            let (disks, overwrite) = (paths(&disks)?, identities(overwrite)?);
            let add = AddDisks { disks, spare, overwrite };
            client.call_on::<AddPoolDisks>(&name, &[], &add).await?
        }
        PoolCommand::Remove { name, disk, cancel } => {
            let remove = RemoveDisk { disk: named(&remote, &name, disk).await?, cancel };
            client.call_on::<RemovePoolDisk>(&name, &[], &remove).await?
        }
        PoolCommand::Replace { name, disk, with, overwrite } => {
            let (disk, with) = (named(&remote, &name, disk).await?, absolute(&with)?);
            let replace = ReplaceDisk { disk, with, overwrite: identities(overwrite)? };
            client.call_on::<ReplacePoolDisk>(&name, &[], &replace).await?
        }
        PoolCommand::Clear { name, disk } => {
            let disk = match disk {
                Some(disk) => Some(named(&remote, &name, disk).await?),
                None => None,
            };
            client.call_on::<ClearPoolErrors>(&name, &[], &ClearErrors { disk }).await?
        }
        PoolCommand::Scrub { name } => client.call_on::<ScrubPool>(&name, &[], &Nothing).await?,
        PoolCommand::Open { name, without, take_over, confirm } => {
            let open = open(&remote, &name, (without, take_over), confirm).await?;
            client.call_on::<ForcePoolOpen>(&name, &[], &open).await?
        }
    };
    remote.print(&pool, show::pool)?;
    Ok(ExitCode::SUCCESS)
}

fn request(args: CreatePoolArgs) -> Result<CreatePool, Failure> {
    let create = CreatePool {
        name: args.name,
        raid: args.raid,
        copies: args.copies,
        columns: args.columns,
        strip_bytes: args.strip,
        checksums: args.checksums,
        disks: paths(&args.disks)?,
        spares: paths(&args.spare)?,
        overwrite: identities(args.overwrite)?,
    };
    create.check().map_err(|e| Failure::new(USAGE, e.to_string()))?;
    Ok(create)
}

fn paths(paths: &[PathBuf]) -> Result<Vec<PathBuf>, Failure> {
    paths.iter().map(|path| absolute(path)).collect()
}

/// Disks that may be overwritten, as they were typed, and as paths from / on: only the node knows which are serial numbers.
fn identities(args: OverwriteArgs) -> Result<Vec<String>, Failure> {
    let mut all = Vec::new();
    for typed in args.overwrite {
        all.extend(as_path(&typed)?.filter(|path| *path != typed));
        all.push(typed);
    }
    Ok(all)
}

/// What was typed as a path from / on, if it may be a path: the node does not know our working directory.
fn as_path(typed: &str) -> Result<Option<String>, Failure> {
    const MARK: &str = "path:";
    let (mark, path) = match typed.strip_prefix(MARK) {
        Some(path) => (MARK, path),
        None if typed.contains('/') => ("", typed),
        None => return Ok(None),
    };
    let path = absolute(path.as_ref())?.into_os_string().into_string();
    let path = path.map_err(|_| Failure::new(USAGE, format!("{typed}: it is not UTF-8")))?;
    Ok(Some(format!("{mark}{path}")))
}

/// What a disk of a pool is called, for the node: a path from / on, unless it is a serial number.
async fn named(remote: &Remote, pool: &PoolName, typed: String) -> Result<String, Failure> {
    match as_path(&typed)? {
        Some(path) if path != typed => {
            let pool = remote.client.call_on::<GetPool>(pool, &[], &Nothing).await?;
            Ok(if is_serial(&pool, &typed) { typed } else { path })
        }
        _ => Ok(typed),
    }
}

fn is_serial(pool: &Pool, typed: &str) -> bool {
    let serial = typed.strip_prefix("serial:");
    let is =
        |disk: &PoolDisk| disk.serial.as_deref().is_some_and(|s| s == typed || serial == Some(s));
    pool.disks.iter().any(is)
}

/// Opens a pool without disks, or takes it over, after a human has said that he knows what that costs.
async fn open(
    remote: &Remote,
    name: &PoolName,
    (without, take_over): (Vec<String>, bool),
    confirm: Option<PoolName>,
) -> Result<OpenPool, Failure> {
    let mut disks = Vec::new();
    for typed in without {
        disks.push(named(remote, name, typed).await?);
    }
    let without = disks;
    let Some(confirm) = confirm else {
        // Finds out first whether it is there.
        let pool = remote.client.call_on::<GetPool>(name, &[], &Nothing).await?;
        let mut what = show::pool(&pool).trim_end().to_owned();
        if !without.is_empty() {
            what.push_str(&format!(
                "\nPool {name} is opened without these disks, for good: {}. What only they hold is LOST, \
                 acknowledged writes among it, and they never come back into it.",
                without.join(", ")
            ));
        }
        if take_over {
            what.push_str(&format!(
                "\nPool {name} is taken from the node that had it last. Make sure that this node is off, or \
                 will never use its disks again: should it still use them, it stops serving them."
            ));
        }
        ask_for_name(
            ("pool", name.as_str()),
            &what,
            "opened",
            &format!("--confirm {name} opens it without asking"),
        )?;
        return Ok(OpenPool { without, take_over, confirm: name.clone() });
    };
    Ok(OpenPool { without, take_over, confirm })
}

async fn delete(
    remote: &Remote,
    name: &PoolName,
    confirm: &ConfirmArgs,
    force: bool,
) -> Result<(), Failure> {
    if !confirm.yes {
        // Names what is about to be lost, and finds out first whether it is there.
        let pool = remote.client.call_on::<GetPool>(name, &[], &Nothing).await?;
        let what =
            format!("This deletes pool {name}, with its {}.", count(pool.disks.len(), "disk"));
        let hint = "--yes deletes without asking";
        confirmed(confirm, ("pool", name.as_str()), &what, "deleted", hint)?;
    }
    let flags: &[_] = if force { &[POOL_FORCE] } else { &[] };
    remote.client.call_on::<DeletePool>(name, flags, &Nothing).await?;
    remote.print(&serde_json::json!({ "deleted": name }), |_| format!("Pool {name} is deleted."))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_may_be_a_path_is_made_absolute() {
        for typed in ["S1", "3", "S4EV 1", "50%", "serial:S1", "number:3"] {
            assert_eq!(as_path(typed).unwrap(), None, "{typed}");
        }
        assert_eq!(as_path("/dev/sdb").unwrap().as_deref(), Some("/dev/sdb"));
        let here = std::env::current_dir().unwrap().join("a.img");
        let here = here.to_str().unwrap();
        assert_eq!(as_path("./a.img").unwrap().as_deref(), Some(here));
        assert_eq!(as_path("path:a.img").unwrap(), Some(format!("path:{here}")));
    }

    #[test]
    fn what_may_be_a_serial_number_is_sent_as_it_was_typed_as_well() {
        let overwrite = vec!["WD/1".to_owned(), "S1".to_owned(), "/dev/sdb".to_owned()];
        let here = std::env::current_dir().unwrap().join("WD/1");
        let sent = identities(OverwriteArgs { overwrite }).unwrap();
        assert_eq!(sent, [here.to_str().unwrap(), "WD/1", "S1", "/dev/sdb"]);
    }
}
