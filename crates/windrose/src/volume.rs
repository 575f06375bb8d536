//! `windrose volume …`.

use std::io::{IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use api::endpoint::{
    AllowInitiators, ClearChap, DeleteVolume, DenyInitiators, FORCE, GetVolume, GrowVolume,
    ListVolumes, Nothing, PostVolume, SetChap, SetProtocols,
};
use api::{CreateVolume, Grow, Initiators, NewBacking, Volume, VolumeName};

use crate::cli::{CreateArgs, VolumeCommand};
use crate::exit::{FAILED, Failure, USAGE};
use crate::remote::Remote;
use crate::{files, show};

pub(crate) async fn run(remote: Remote, command: VolumeCommand) -> Result<ExitCode, Failure> {
    let client = &remote.client;
    match command {
        VolumeCommand::List => {
            let list = client.call::<ListVolumes>(&Nothing).await?;
            remote.print(&list, show::volumes)?;
        }
        VolumeCommand::Show { name } => {
            let volume = client.call_on::<GetVolume>(&name, &[], &Nothing).await?;
            print(&remote, &volume)?;
        }
        VolumeCommand::Create(args) => {
            let volume = client.call::<PostVolume>(&request(*args)?).await?;
            print(&remote, &volume)?;
        }
        VolumeCommand::Grow { name, size } => {
            let grow = Grow { size_bytes: size.0 };
            let volume = client.call_on::<GrowVolume>(&name, &[], &grow).await?;
            print(&remote, &volume)?;
        }
        VolumeCommand::Delete { name, yes, force } => delete(&remote, &name, yes, force).await?,
        VolumeCommand::Export { name, via } => {
            let volume = client.call_on::<SetProtocols>(&name, &[], &via.into()).await?;
            print(&remote, &volume)?;
        }
        VolumeCommand::Allow { name, initiators } => {
            let initiators = Initiators { initiators };
            let volume = client.call_on::<AllowInitiators>(&name, &[], &initiators).await?;
            print(&remote, &volume)?;
        }
        VolumeCommand::Deny { name, initiators } => {
            let initiators = Initiators { initiators };
            let volume = client.call_on::<DenyInitiators>(&name, &[], &initiators).await?;
            print(&remote, &volume)?;
        }
        VolumeCommand::Chap { name, user, mutual, off: _ } => {
            let volume = match user {
                Some(user) => {
                    let chap = files::chap(&user, mutual.as_ref())?;
                    client.call_on::<SetChap>(&name, &[], &chap).await?
                }
                None => client.call_on::<ClearChap>(&name, &[], &Nothing).await?,
            };
            print(&remote, &volume)?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn print(remote: &Remote, volume: &Volume) -> Result<(), Failure> {
    remote.print(volume, |v| show::volume(v, remote.client.address()))
}

fn request(args: CreateArgs) -> Result<CreateVolume, Failure> {
    let backing = match (args.device, args.path) {
        (Some(path), _) => NewBacking::Device { path: absolute(&path)? },
        (None, Some(path)) => NewBacking::File { path: Some(absolute(&path)?) },
        (None, None) => NewBacking::File { path: None },
    };
    let chap = match &args.chap {
        Some(user) => Some(files::chap(user, args.chap_mutual.as_ref())?),
        None => None,
    };
    if let Some(size) = args.size {
        let checked = api::check_volume_size(size.0, args.block_size);
        checked.map_err(|e| Failure::new(USAGE, e.to_string()))?;
    }
    Ok(CreateVolume {
        name: args.name,
        size_bytes: args.size.map(|size| size.0),
        block_size: args.block_size,
        thin: !args.thick,
        backing,
        protocols: args.via.into(),
        allow: args.allow,
        chap,
        force: args.force,
    })
}

/// The node does not know our working directory.
fn absolute(path: &Path) -> Result<PathBuf, Failure> {
    std::path::absolute(path).map_err(|e| Failure::new(USAGE, format!("{}: {e}", path.display())))
}

async fn delete(remote: &Remote, name: &VolumeName, yes: bool, force: bool) -> Result<(), Failure> {
    if !yes {
        // Names what is about to be lost, and finds out first whether it is there.
        let volume = remote.client.call_on::<GetVolume>(name, &[], &Nothing).await?;
        confirm(&volume)?;
    }
    let flags: &[_] = if force { &[FORCE] } else { &[] };
    remote.client.call_on::<DeleteVolume>(name, flags, &Nothing).await?;
    remote.print(&serde_json::json!({ "deleted": name }), |_| format!("Volume {name} is deleted."))
}

fn confirm(volume: &Volume) -> Result<(), Failure> {
    let name = &volume.name;
    if !std::io::stdin().is_terminal() {
        return Err(Failure::new(
            USAGE,
            format!("volume {name} is not deleted: nobody is there to confirm"),
        )
        .hint("--yes deletes without asking"));
    }
    eprint!(
        "This deletes volume {name} ({}) and all data on it ({}).\nType its name to go on: ",
        api::Size(volume.size_bytes),
        show::copies(&volume.copies)
    );
    let mut line = String::new();
    let read = std::io::stderr().flush().and_then(|()| std::io::stdin().read_line(&mut line));
    read.map_err(|e| Failure::new(FAILED, format!("standard input: {e}")))?;
    if line.trim() == name.as_str() {
        Ok(())
    } else {
        Err(Failure::new(FAILED, format!("volume {name} is not deleted: that was not its name")))
    }
}
