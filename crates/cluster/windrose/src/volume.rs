//! `windrose volume …`.

use std::path::Path;
use std::process::ExitCode;

use api::client::{CallError, Client};
use api::endpoint::{
    AddReplica, AllowInitiators, ClearChap, ClearReservations, CreateVolume, CreateVolumes,
    DELETE_ALLOW_DATA_LOSS, DELETE_FORCE, DeleteVolume, DenyInitiators, ForcePrimary,
    GetReservations, GetVolume, GrowVolume, ListVolumes, MAP_FORCE, MapTarget, NoBody,
    RemoveReplica, ReplaceReplica, SetChap, SetHostDhchap, SetHostTls, SetInitiatorChap,
    SetProtocols, SetReplicaCount, SwitchPrimary, TakeOverVolume, VerifyVolume,
};
use api::{
    AddReplicaRequest, Chap, CreateVolumeRequest, CreateVolumesRequest, ForcePrimaryRequest,
    GrowVolumeRequest, HostDhchap, HostTls, Initiator, InitiatorChap, InitiatorList, MapVolume,
    NewBacking, RemoveReplicaRequest, ReplaceReplicaRequest, SetReplicaCountRequest,
    SwitchPrimaryRequest, TakeOver, Verify, Volume, VolumeName, VolumeState,
};

use crate::cli::{
    BackingArgs, ConfirmArgs, CreateVolumeArgs, ReplicaCommand, VolumeCommand, to_protocols,
};
use crate::exit::{CliError, FAILED, USAGE, print_error_line};
use crate::files::absolute;
use crate::remote::{NodeConnection, prompt_for_name, require_confirmation};
use crate::{files, output, recovery};

pub(crate) async fn run(
    remote: NodeConnection,
    command: VolumeCommand,
) -> Result<ExitCode, CliError> {
    let client = &remote.client;
    match command {
        VolumeCommand::List => {
            let list = client.call::<ListVolumes>(&NoBody).await?;
            remote.print(&list, output::volumes)?;
        }
        VolumeCommand::Show { name } => {
            let volume = client.call_on::<GetVolume>(&name, &[], &NoBody).await?;
            print_volume(&remote, &volume)?;
        }
        VolumeCommand::Create(args) => return create(&remote, *args).await,
        VolumeCommand::Grow { name, size } => {
            let grow = GrowVolumeRequest { size_bytes: size.0 };
            let volume = client.call_on::<GrowVolume>(&name, &[], &grow).await?;
            print_volume(&remote, &volume)?;
        }
        VolumeCommand::Mirror { command } => run_replica_command(&remote, command).await?,
        VolumeCommand::SwitchPrimary { name, to } => {
            switch_primary(&remote, &name, SwitchPrimaryRequest { node: to }).await?;
        }
        VolumeCommand::ForcePrimary { name, confirm } => {
            force_primary(&remote, &name, confirm).await?;
        }
        VolumeCommand::TakeOver { name, confirm } => take_over(&remote, &name, confirm).await?,
        VolumeCommand::Reservations { name, clear, yes } => {
            reservations(&remote, &name, clear, yes).await?;
        }
        VolumeCommand::Delete { name, confirm, force, discard } => {
            delete(&remote, &name, &confirm, (force, discard)).await?;
        }
        command @ (VolumeCommand::Orphans
        | VolumeCommand::Adopt { .. }
        | VolumeCommand::Discard { .. }) => recovery::run_image_command(&remote, command).await?,
        VolumeCommand::Export { name, protocols } => {
            let volume =
                client.call_on::<SetProtocols>(&name, &[], &to_protocols(&protocols)).await?;
            print_volume(&remote, &volume)?;
        }
        VolumeCommand::Target { name, join, own, lun, force } => {
            let own = own.then(|| name.to_string());
            let map = MapVolume { target: join.or(own), lun };
            map_target(&remote, &name, &map, force).await?;
        }
        VolumeCommand::Allow { name, initiators } => {
            let initiators = InitiatorList { initiators };
            let volume = client.call_on::<AllowInitiators>(&name, &[], &initiators).await?;
            print_volume(&remote, &volume)?;
        }
        VolumeCommand::Deny { name, initiators } => {
            let initiators = InitiatorList { initiators };
            let volume = client.call_on::<DenyInitiators>(&name, &[], &initiators).await?;
            print_volume(&remote, &volume)?;
        }
        VolumeCommand::Chap { name, user, mutual, off: _, initiator } => {
            let chap = user.map(|user| files::read_chap(&user, mutual.as_ref())).transpose()?;
            let volume = set_chap(client, &name, initiator, chap).await?;
            print_volume(&remote, &volume)?;
        }
        VolumeCommand::Dhchap { name, host, secret, ctrl_secret, off: _ } => {
            set_dhchap(&remote, &name, host, (secret.as_deref(), ctrl_secret.as_deref())).await?;
        }
        VolumeCommand::Tls { name, host, key, optional, off: _ } => {
            set_tls(&remote, &name, host, (key.as_deref(), optional)).await?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Makes another node the primary.
async fn switch_primary(
    remote: &NodeConnection,
    name: &VolumeName,
    switch: SwitchPrimaryRequest,
) -> Result<(), CliError> {
    let volume = remote.client.call_on::<SwitchPrimary>(name, &[], &switch).await?;
    print_volume(remote, &volume)?;
    if let Some(not_yet) = output::not_primary_yet(&volume, &switch.node) {
        print_error_line(&format!("windrose: {not_yet}"));
    }
    Ok(())
}

/// Maps a volume to a target.
async fn map_target(
    remote: &NodeConnection,
    name: &VolumeName,
    map: &MapVolume,
    force: bool,
) -> Result<(), CliError> {
    let flags: &[_] = if force { &[MAP_FORCE] } else { &[] };
    let volume = remote.client.call_on::<MapTarget>(name, flags, map).await?;
    print_volume(remote, &volume)
}

/// Turns CHAP on or off for all initiators, or for one.
async fn set_chap(
    client: &Client,
    name: &VolumeName,
    initiator: Option<Initiator>,
    chap: Option<Chap>,
) -> Result<Volume, CallError> {
    match (initiator, chap) {
        (Some(initiator), chap) => {
            let request = InitiatorChap { initiator, chap };
            client.call_on::<SetInitiatorChap>(name, &[], &request).await
        }
        (None, Some(chap)) => client.call_on::<SetChap>(name, &[], &chap).await,
        (None, None) => client.call_on::<ClearChap>(name, &[], &NoBody).await,
    }
}

/// `windrose volume dhchap`: reads the files with the host's secret, if it gets one, and the
/// volume's.
async fn set_dhchap(
    remote: &NodeConnection,
    name: &VolumeName,
    host: Initiator,
    (secret, controller): (Option<&Path>, Option<&Path>),
) -> Result<(), CliError> {
    let secrets = secret.map(|secret| files::read_dhchap(secret, controller)).transpose()?;
    let request = HostDhchap { host, secrets };
    let volume = remote.client.call_on::<SetHostDhchap>(name, &[], &request).await?;
    print_volume(remote, &volume)
}

/// `windrose volume tls`: reads the file with the key, if the host gets one, and whether TLS is
/// optional.
async fn set_tls(
    remote: &NodeConnection,
    name: &VolumeName,
    host: Initiator,
    (key, optional): (Option<&Path>, bool),
) -> Result<(), CliError> {
    let key = key.map(|key| files::read_tls_key(key, !optional)).transpose()?;
    let request = HostTls { host, key };
    let volume = remote.client.call_on::<SetHostTls>(name, &[], &request).await?;
    print_volume(remote, &volume)
}

/// `windrose volume mirror …`.
async fn run_replica_command(
    remote: &NodeConnection,
    command: ReplicaCommand,
) -> Result<(), CliError> {
    let client = &remote.client;
    let volume = match command {
        ReplicaCommand::Add { name, on, backing: args } => {
            let (force, backing) = (args.force, to_backing(args)?);
            let add = AddReplicaRequest { node: on, backing, force };
            client.call_on::<AddReplica>(&name, &[], &add).await?
        }
        ReplicaCommand::Remove { name, on } => {
            let remove = RemoveReplicaRequest { node: on };
            client.call_on::<RemoveReplica>(&name, &[], &remove).await?
        }
        ReplicaCommand::Replace { name, on, with, backing: args } => {
            let (force, backing) = (args.force, to_backing(args)?);
            let replace = ReplaceReplicaRequest { node: on, with, backing, force };
            client.call_on::<ReplaceReplica>(&name, &[], &replace).await?
        }
        ReplicaCommand::Set { name, replicas } => {
            client
                .call_on::<SetReplicaCount>(&name, &[], &SetReplicaCountRequest { replicas })
                .await?
        }
        ReplicaCommand::Verify { name, repair, source } => {
            let undecided = repair && source.is_none();
            let found = client.call_on::<VerifyVolume>(&name, &[], &Verify { source }).await?;
            remote.print(&found, |found| output::verification(&name, found))?;
            if undecided && !found.mismatches.is_empty() {
                let message = "nothing was repaired: it is unknown which of the replicas is right";
                let hint = format!(
                    "name the node whose data to keep; differing blocks of the others are \
                     overwritten: windrose volume mirror verify {name} --repair --source NODE"
                );
                return Err(CliError::new(FAILED, message).with_hint(hint));
            }
            if found.repaired_bytes < found.mismatched_bytes {
                let message = format!("the replicas of volume {name} differ");
                let hint = format!(
                    "find out which one is right, then run windrose volume mirror verify {name} \
                     --repair --source NODE"
                );
                return Err(CliError::new(FAILED, message).with_hint(hint));
            }
            return Ok(());
        }
    };
    print_volume(remote, &volume)
}

/// Continues with one replica, after the user has confirmed the consequences.
async fn force_primary(
    remote: &NodeConnection,
    name: &VolumeName,
    confirm: Option<VolumeName>,
) -> Result<(), CliError> {
    let confirm = match confirm {
        Some(confirm) => confirm,
        None => {
            // First check that the volume exists.
            let volume = remote.client.call_on::<GetVolume>(name, &[], &NoBody).await?;
            let what = format!(
                "Volume {name} will use the replica of this node alone. Data that only other \
                 replicas have is LOST, including acknowledged writes:\n{}\nMake sure that the \
                 other nodes are off.",
                output::replicas(&volume.replicas)
            );
            let hint = format!("use --confirm {name} to force it without a prompt");
            prompt(name, &what, "forced", &hint)?;
            name.clone()
        }
    };
    let volume =
        remote.client.call_on::<ForcePrimary>(name, &[], &ForcePrimaryRequest { confirm }).await?;
    print_volume(remote, &volume)
}

/// Takes over a volume's image from another node, after the user has confirmed the consequences.
async fn take_over(
    remote: &NodeConnection,
    name: &VolumeName,
    confirm: Option<VolumeName>,
) -> Result<(), CliError> {
    let confirm = match confirm {
        Some(confirm) => confirm,
        None => {
            // First check that the volume exists.
            remote.client.call_on::<GetVolume>(name, &[], &NoBody).await?;
            let what = format!(
                "The image of volume {name} is taken over from the node that used it last. Make \
                 sure that this node is off, or will never use it again: if it still uses it, it \
                 stops serving it."
            );
            let hint = format!("use --confirm {name} to take it over without a prompt");
            prompt(name, &what, "taken over", &hint)?;
            name.clone()
        }
    };
    let request = TakeOver { confirm };
    let volume = remote.client.call_on::<TakeOverVolume>(name, &[], &request).await?;
    print_volume(remote, &volume)
}

/// Shows the reservations of a volume; with `clear` removes them first, after the user has
/// confirmed the consequences.
async fn reservations(
    remote: &NodeConnection,
    name: &VolumeName,
    clear: bool,
    yes: bool,
) -> Result<(), CliError> {
    let client = &remote.client;
    if clear && !yes {
        let found = client.call_on::<GetReservations>(name, &[], &NoBody).await?;
        let what = format!(
            "{}\nThis removes them: hosts that rely on them for fencing are no longer fenced off, \
             and may write at once.",
            output::reservations(name, &found)
        );
        prompt(name, &what, "freed", "use --yes to clear them without a prompt")?;
    }
    let found = match clear {
        true => client.call_on::<ClearReservations>(name, &[], &NoBody).await?,
        false => client.call_on::<GetReservations>(name, &[], &NoBody).await?,
    };
    remote.print(&found, |found| output::reservations(name, found))
}

fn print_volume(remote: &NodeConnection, volume: &Volume) -> Result<(), CliError> {
    remote.print(volume, |v| output::volume(v, remote.client.address()))
}

/// `windrose volume create`: shows a single volume in full, and several as a line each.
async fn create(remote: &NodeConnection, args: CreateVolumeArgs) -> Result<ExitCode, CliError> {
    let names = args.names.clone();
    let [first, others @ ..] = &names[..] else {
        return Err(CliError::new(USAGE, "no name given"));
    };
    if !others.is_empty() && (args.backing.path.is_some() || args.backing.device.is_some()) {
        return Err(CliError::new(
            USAGE,
            "a file or a device holds one volume, but several names are given",
        )
        .with_hint("give one name, or let the node choose the files, or use --pool"));
    }
    let template = create_request(args, first.clone())?;
    if others.is_empty() {
        let volume = remote.client.call::<CreateVolume>(&template).await?;
        print_volume(remote, &volume)?;
        return Ok(ExitCode::SUCCESS);
    }
    let volumes =
        names.into_iter().map(|name| CreateVolumeRequest { name, ..template.clone() }).collect();
    let created = remote.client.call::<CreateVolumes>(&CreateVolumesRequest { volumes }).await?;
    remote.print(&created, output::created)?;
    let failed = created.volumes.iter().filter(|one| one.volume.is_none()).count();
    if failed == 0 {
        return Ok(ExitCode::SUCCESS);
    }
    let all = wire::plural(created.volumes.len(), "volume");
    Err(CliError::new(FAILED, format!("{failed} of {all} not created; the created ones are kept"))
        .with_hint("run the same command again to create the missing ones"))
}

fn create_request(
    args: CreateVolumeArgs,
    name: VolumeName,
) -> Result<CreateVolumeRequest, CliError> {
    let force = args.backing.force;
    let backing = to_backing(args.backing)?;
    let chap = match &args.chap {
        Some(user) => Some(files::read_chap(user, args.chap_mutual.as_ref())?),
        None => None,
    };
    if let Some(size) = args.size {
        let checked = api::check_volume_size(size.0, args.block_size);
        checked.map_err(|e| CliError::new(USAGE, e.to_string()))?;
    }
    Ok(CreateVolumeRequest {
        name,
        size_bytes: args.size.map(|size| size.0),
        block_size: args.block_size,
        thin: !args.thick,
        backing,
        replicas: args.replicas,
        nodes: args.on,
        protocols: to_protocols(&args.protocols),
        allow: args.allow,
        chap,
        force,
    })
}

fn to_backing(args: BackingArgs) -> Result<NewBacking, CliError> {
    if let Some(pool) = args.pool {
        return Ok(NewBacking::Pool { pool });
    }
    Ok(match (args.device, args.path) {
        (Some(path), _) => NewBacking::Device { path: absolute(&path)? },
        (None, Some(path)) => NewBacking::File { path: Some(absolute(&path)?) },
        (None, None) => NewBacking::File { path: None },
    })
}

async fn delete(
    remote: &NodeConnection,
    name: &VolumeName,
    confirm: &ConfirmArgs,
    (force, discard): (bool, bool),
) -> Result<(), CliError> {
    let flags = [force.then_some(DELETE_FORCE), discard.then_some(DELETE_ALLOW_DATA_LOSS)];
    let flags: Vec<_> = flags.into_iter().flatten().collect();
    if !confirm.yes {
        // Name what is about to be lost; first check that the volume exists.
        let volume = remote.client.call_on::<GetVolume>(name, &[], &NoBody).await?;
        let (size, copies) = (api::Size(volume.size_bytes), output::replicas(&volume.replicas));
        let what = format!("This deletes volume {name} ({size}) and all data on it ({copies}).");
        let hint = "use --yes to delete it without a prompt";
        require_confirmation(confirm, ("volume", name.as_str()), &what, "deleted", hint)?;
    }
    remote.client.call_on::<DeleteVolume>(name, &flags, &NoBody).await?;
    // The volume remains while a node that does not run has a replica to erase.
    match remote.client.call_on::<GetVolume>(name, &[], &NoBody).await {
        Ok(volume) if volume.state == VolumeState::Deleting => {
            let deleting = serde_json::json!({ "deleting": name });
            remote.print(&deleting, |_| output::still_deleting(&volume))
        }
        _ => {
            let deleted = serde_json::json!({ "deleted": name });
            remote.print(&deleted, |_| format!("Volume {name} is deleted."))
        }
    }
}

/// Makes the user type the name of the volume that is to be `done` something to.
fn prompt(name: &VolumeName, what: &str, done: &str, hint: &str) -> Result<(), CliError> {
    prompt_for_name(("volume", name.as_str()), what, done, hint)
}
