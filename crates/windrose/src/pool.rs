//! `windrose pool …`.

use std::path::PathBuf;
use std::process::ExitCode;

use api::endpoint::{
    AddPoolDisks, DeletePool, ForcePoolOpen, GetPool, ListPools, Nothing, POOL_FORCE, PostPool,
    RemovePoolDisk, ReplacePoolDisk, ScrubPool,
};
use api::{AddDisks, CreatePool, OpenPool, PoolName, RemoveDisk, ReplaceDisk};

use crate::cli::{CreatePoolArgs, OverwriteArgs, PoolCommand};
use crate::exit::{Failure, USAGE};
use crate::files::absolute;
use crate::remote::{Remote, ask_for_name};
use crate::show;

pub(crate) async fn run(remote: Remote, command: PoolCommand) -> Result<ExitCode, Failure> {
    let client = &remote.client;
    let pool = match command {
        PoolCommand::List => {
            let list = client.call::<ListPools>(&Nothing).await?;
            remote.print(&list, show::pools)?;
            return Ok(ExitCode::SUCCESS);
        }
        PoolCommand::Delete { name, yes, force } => {
            delete(&remote, &name, yes, force).await?;
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
            let remove = RemoveDisk { disk: identity(disk)?, cancel };
            client.call_on::<RemovePoolDisk>(&name, &[], &remove).await?
        }
        PoolCommand::Replace { name, disk, with, overwrite } => {
            let (disk, with) = (identity(disk)?, absolute(&with)?);
            let replace = ReplaceDisk { disk, with, overwrite: identities(overwrite)? };
            client.call_on::<ReplacePoolDisk>(&name, &[], &replace).await?
        }
        PoolCommand::Scrub { name } => client.call_on::<ScrubPool>(&name, &[], &Nothing).await?,
        PoolCommand::Open { name, without, confirm } => {
            let open = open(&remote, &name, without, confirm).await?;
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

fn identities(args: OverwriteArgs) -> Result<Vec<String>, Failure> {
    args.overwrite.into_iter().map(identity).collect()
}

/// What a disk is called: the node does not know our working directory, if it is a path.
fn identity(typed: String) -> Result<String, Failure> {
    if !typed.contains('/') {
        return Ok(typed);
    }
    let path = absolute(typed.as_ref())?;
    path.into_os_string()
        .into_string()
        .map_err(|_| Failure::new(USAGE, format!("{typed}: it is not UTF-8")))
}

/// Opens a pool without disks, after a human has said that he knows what that costs.
async fn open(
    remote: &Remote,
    name: &PoolName,
    without: Vec<String>,
    confirm: Option<PoolName>,
) -> Result<OpenPool, Failure> {
    let without = without.into_iter().map(identity).collect::<Result<Vec<_>, _>>()?;
    let Some(confirm) = confirm else {
        // Finds out first whether it is there.
        let pool = remote.client.call_on::<GetPool>(name, &[], &Nothing).await?;
        let what = format!(
            "{}\nPool {name} is opened without these disks, for good: {}. What only they hold is LOST, \
             acknowledged writes among it, and they never come back into it.",
            show::pool(&pool).trim_end(),
            without.join(", ")
        );
        ask_for_name(
            ("pool", name.as_str()),
            &what,
            "opened",
            "--confirm NAME opens it without asking",
        )?;
        return Ok(OpenPool { without, confirm: name.clone() });
    };
    Ok(OpenPool { without, confirm })
}

async fn delete(remote: &Remote, name: &PoolName, yes: bool, force: bool) -> Result<(), Failure> {
    if !yes {
        // Names what is about to be lost, and finds out first whether it is there.
        let pool = remote.client.call_on::<GetPool>(name, &[], &Nothing).await?;
        let what = format!("This deletes pool {name}, with its {} disks.", pool.disks.len());
        let hint = "--yes deletes without asking";
        ask_for_name(("pool", name.as_str()), &what, "deleted", hint)?;
    }
    let flags: &[_] = if force { &[POOL_FORCE] } else { &[] };
    remote.client.call_on::<DeletePool>(name, flags, &Nothing).await?;
    remote.print(&serde_json::json!({ "deleted": name }), |_| format!("Pool {name} is deleted."))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_paths_are_made_absolute() {
        assert_eq!(identity("S1".into()).unwrap(), "S1");
        assert_eq!(identity("3".into()).unwrap(), "3");
        assert_eq!(identity("/dev/sdb".into()).unwrap(), "/dev/sdb");
        let here = std::env::current_dir().unwrap().join("a.img");
        assert_eq!(identity("./a.img".into()).unwrap(), here.to_str().unwrap());
    }
}
