//! `windrose volume …`.

use std::path::Path;
use std::process::ExitCode;

use api::client::{CallError, Client};
use api::endpoint::{
    AddVolumeCopy, AllowInitiators, ClearChap, ClearReservations, DISCARD, DeleteVolume,
    DenyInitiators, FORCE, ForceVolume, GetReservations, GetVolume, GrowVolume, ListVolumes,
    MAP_FORCE, MapTarget, Nothing, PostVolume, PostVolumes, RemoveVolumeCopy, ReplaceVolumeCopy,
    SetChap, SetHostDhchap, SetHostTls, SetInitiatorChap, SetProtocols, SetVolumeCopies,
    SwitchVolume, TakeOverVolume, VerifyVolume,
};
use api::{
    AddCopy, Chap, CreateVolume, CreateVolumes, ForceCopy, Grow, HostDhchap, HostTls, Initiator,
    InitiatorChap, Initiators, MapVolume, NewBacking, RemoveCopy, ReplaceCopy, SetCopies, SwitchTo,
    TakeOver, Verify, Volume, VolumeName, VolumeState,
};

use crate::cli::{ConfirmArgs, CreateArgs, MirrorCommand, PlaceArgs, VolumeCommand, protocols};
use crate::exit::{FAILED, Failure, USAGE};
use crate::files::absolute;
use crate::remote::{Remote, ask_for_name, confirmed, tell};
use crate::{files, recovery, show};

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
        VolumeCommand::Create(args) => return create(&remote, *args).await,
        VolumeCommand::Grow { name, size } => {
            let grow = Grow { size_bytes: size.0 };
            let volume = client.call_on::<GrowVolume>(&name, &[], &grow).await?;
            print(&remote, &volume)?;
        }
        VolumeCommand::Mirror { command } => mirror(&remote, command).await?,
        VolumeCommand::Switch { name, to } => {
            let switch = SwitchTo { node: to };
            let volume = client.call_on::<SwitchVolume>(&name, &[], &switch).await?;
            print(&remote, &volume)?;
            if let Some(not_yet) = show::not_led_yet(&volume, &switch.node) {
                tell(&format!("windrose: {not_yet}"));
            }
        }
        VolumeCommand::Force { name, confirm } => force(&remote, &name, confirm).await?,
        VolumeCommand::TakeOver { name, confirm } => take_over(&remote, &name, confirm).await?,
        VolumeCommand::Reservations { name, clear, yes } => {
            reservations(&remote, &name, clear, yes).await?;
        }
        VolumeCommand::Delete { name, confirm, force, discard } => {
            delete(&remote, &name, &confirm, (force, discard)).await?;
        }
        command @ (VolumeCommand::Orphans
        | VolumeCommand::Adopt { .. }
        | VolumeCommand::Discard { .. }) => recovery::images(&remote, command).await?,
        VolumeCommand::Export { name, via } => {
            let volume = client.call_on::<SetProtocols>(&name, &[], &protocols(&via)).await?;
            print(&remote, &volume)?;
        }
        VolumeCommand::Target { name, join, own, lun, force } => {
            let own = own.then(|| name.to_string());
            let map = MapVolume { target: join.or(own), lun };
            map_target(&remote, &name, &map, force).await?;
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
        VolumeCommand::Chap { name, user, mutual, off: _, initiator } => {
            let chap = user.map(|user| files::chap(&user, mutual.as_ref())).transpose()?;
            let volume = chap_of(client, &name, initiator, chap).await?;
            print(&remote, &volume)?;
        }
        VolumeCommand::Dhchap { name, host, secret, ctrl_secret, off: _ } => {
            dhchap(&remote, &name, host, (secret.as_deref(), ctrl_secret.as_deref())).await?;
        }
        VolumeCommand::Tls { name, host, key, optional, off: _ } => {
            tls(&remote, &name, host, (key.as_deref(), optional)).await?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Puts a volume behind a target.
async fn map_target(
    remote: &Remote,
    name: &VolumeName,
    map: &MapVolume,
    force: bool,
) -> Result<(), Failure> {
    let flags: &[_] = if force { &[MAP_FORCE] } else { &[] };
    let volume = remote.client.call_on::<MapTarget>(name, flags, map).await?;
    print(remote, &volume)
}

/// Asks all initiators, or one, for CHAP, or no longer.
async fn chap_of(
    client: &Client,
    name: &VolumeName,
    initiator: Option<Initiator>,
    chap: Option<Chap>,
) -> Result<Volume, CallError> {
    match (initiator, chap) {
        (Some(initiator), chap) => {
            let ask = InitiatorChap { initiator, chap };
            client.call_on::<SetInitiatorChap>(name, &[], &ask).await
        }
        (None, Some(chap)) => client.call_on::<SetChap>(name, &[], &chap).await,
        (None, None) => client.call_on::<ClearChap>(name, &[], &Nothing).await,
    }
}

/// `windrose volume dhchap`: the files with the host's secret, if it shall have one, and the volume's.
async fn dhchap(
    remote: &Remote,
    name: &VolumeName,
    host: Initiator,
    (secret, controller): (Option<&Path>, Option<&Path>),
) -> Result<(), Failure> {
    let secrets = secret.map(|secret| files::dhchap(secret, controller)).transpose()?;
    let ask = HostDhchap { host, secrets };
    let volume = remote.client.call_on::<SetHostDhchap>(name, &[], &ask).await?;
    print(remote, &volume)
}

/// `windrose volume tls`: the file with the key, if the host shall have one, and whether it may come without.
async fn tls(
    remote: &Remote,
    name: &VolumeName,
    host: Initiator,
    (key, optional): (Option<&Path>, bool),
) -> Result<(), Failure> {
    let key = key.map(|key| files::tls(key, !optional)).transpose()?;
    let ask = HostTls { host, key };
    let volume = remote.client.call_on::<SetHostTls>(name, &[], &ask).await?;
    print(remote, &volume)
}

/// `windrose volume mirror …`.
async fn mirror(remote: &Remote, command: MirrorCommand) -> Result<(), Failure> {
    let client = &remote.client;
    let volume = match command {
        MirrorCommand::Add { name, on, place } => {
            let (force, backing) = (place.force, backing(place)?);
            let add = AddCopy { node: on, backing, force };
            client.call_on::<AddVolumeCopy>(&name, &[], &add).await?
        }
        MirrorCommand::Remove { name, on } => {
            let remove = RemoveCopy { node: on };
            client.call_on::<RemoveVolumeCopy>(&name, &[], &remove).await?
        }
        MirrorCommand::Replace { name, on, with, place } => {
            let (force, backing) = (place.force, backing(place)?);
            let replace = ReplaceCopy { node: on, with, backing, force };
            client.call_on::<ReplaceVolumeCopy>(&name, &[], &replace).await?
        }
        MirrorCommand::Set { name, replicas } => {
            client.call_on::<SetVolumeCopies>(&name, &[], &SetCopies { replicas }).await?
        }
        MirrorCommand::Verify { name, repair, keep } => {
            let undecided = repair && keep.is_none();
            let found = client.call_on::<VerifyVolume>(&name, &[], &Verify { keep }).await?;
            remote.print(&found, |found| show::verification(&name, found))?;
            if undecided && !found.differing.is_empty() {
                let message = "nothing was repaired: which of the copies is right is not known";
                let hint = format!(
                    "name the node whose contents are to be kept, the others' are overwritten there: \
                     windrose volume mirror verify {name} --repair --keep NODE"
                );
                return Err(Failure::new(FAILED, message).hint(hint));
            }
            if found.repaired_bytes < found.differing_bytes {
                let message = format!("the copies of volume {name} differ");
                let hint = format!(
                    "find out which one is right, then: windrose volume mirror verify {name} --repair --keep NODE"
                );
                return Err(Failure::new(FAILED, message).hint(hint));
            }
            return Ok(());
        }
    };
    print(remote, &volume)
}

/// Goes on with one copy, after a human has said that he knows what that costs.
async fn force(
    remote: &Remote,
    name: &VolumeName,
    confirm: Option<VolumeName>,
) -> Result<(), Failure> {
    let confirm = match confirm {
        Some(confirm) => confirm,
        None => {
            // Finds out first whether it is there.
            let volume = remote.client.call_on::<GetVolume>(name, &[], &Nothing).await?;
            let what = format!(
                "Volume {name} goes on with the copy of this node alone. What only other copies hold is LOST, \
                 acknowledged writes among it:\n{}\nMake sure that the other nodes are off.",
                show::copies(&volume.copies)
            );
            let hint = format!("--confirm {name} forces it without asking");
            ask(name, &what, "forced", &hint)?;
            name.clone()
        }
    };
    let volume = remote.client.call_on::<ForceVolume>(name, &[], &ForceCopy { confirm }).await?;
    print(remote, &volume)
}

/// Takes a volume's image from another node, after a human has said that he knows what that means.
async fn take_over(
    remote: &Remote,
    name: &VolumeName,
    confirm: Option<VolumeName>,
) -> Result<(), Failure> {
    let confirm = match confirm {
        Some(confirm) => confirm,
        None => {
            // Finds out first whether it is there.
            remote.client.call_on::<GetVolume>(name, &[], &Nothing).await?;
            let what = format!(
                "The image of volume {name} is taken from the node that had it last. Make sure that this node is \
                 off, or will never use it again: should it still use it, it stops serving it."
            );
            let hint = format!("--confirm {name} takes it over without asking");
            ask(name, &what, "taken over", &hint)?;
            name.clone()
        }
    };
    let take = TakeOver { confirm };
    let volume = remote.client.call_on::<TakeOverVolume>(name, &[], &take).await?;
    print(remote, &volume)
}

/// Shows the reservations of a volume; takes them away first, after a human has said that he knows what
/// that means.
async fn reservations(
    remote: &Remote,
    name: &VolumeName,
    clear: bool,
    yes: bool,
) -> Result<(), Failure> {
    let client = &remote.client;
    if clear && !yes {
        let found = client.call_on::<GetReservations>(name, &[], &Nothing).await?;
        let what = format!(
            "{}\nThis takes them away: hosts that keep each other out by them no longer do, and may write at once.",
            show::reservations(name, &found)
        );
        ask(name, &what, "freed", "--yes frees it without asking")?;
    }
    let found = match clear {
        true => client.call_on::<ClearReservations>(name, &[], &Nothing).await?,
        false => client.call_on::<GetReservations>(name, &[], &Nothing).await?,
    };
    remote.print(&found, |found| show::reservations(name, found))
}

fn print(remote: &Remote, volume: &Volume) -> Result<(), Failure> {
    remote.print(volume, |v| show::volume(v, remote.client.address()))
}

/// `windrose volume create`: one volume is shown as it is, of several each has a line.
async fn create(remote: &Remote, args: CreateArgs) -> Result<ExitCode, Failure> {
    let names = args.names.clone();
    let [first, others @ ..] = &names[..] else {
        return Err(Failure::new(USAGE, "no name is given"));
    };
    if !others.is_empty() && (args.place.path.is_some() || args.place.device.is_some()) {
        return Err(Failure::new(
            USAGE,
            "a file or a device holds one volume, and several are named",
        )
        .hint(
            "give one name, or let the node choose the files; volumes of one --pool may be several",
        ));
    }
    let like = request(args, first.clone())?;
    if others.is_empty() {
        let volume = remote.client.call::<PostVolume>(&like).await?;
        print(remote, &volume)?;
        return Ok(ExitCode::SUCCESS);
    }
    let volumes = names.into_iter().map(|name| CreateVolume { name, ..like.clone() }).collect();
    let created = remote.client.call::<PostVolumes>(&CreateVolumes { volumes }).await?;
    remote.print(&created, show::created)?;
    let failed = created.volumes.iter().filter(|one| one.volume.is_none()).count();
    if failed == 0 {
        return Ok(ExitCode::SUCCESS);
    }
    let all = wire::count(created.volumes.len(), "volume");
    Err(Failure::new(FAILED, format!("{failed} of {all} not created; those that were stay"))
        .hint("the same command again creates those that are missing"))
}

fn request(args: CreateArgs, name: VolumeName) -> Result<CreateVolume, Failure> {
    let force = args.place.force;
    let backing = backing(args.place)?;
    let chap = match &args.chap {
        Some(user) => Some(files::chap(user, args.chap_mutual.as_ref())?),
        None => None,
    };
    if let Some(size) = args.size {
        let checked = api::check_volume_size(size.0, args.block_size);
        checked.map_err(|e| Failure::new(USAGE, e.to_string()))?;
    }
    Ok(CreateVolume {
        name,
        size_bytes: args.size.map(|size| size.0),
        block_size: args.block_size,
        thin: !args.thick,
        backing,
        replicas: args.replicas,
        on: args.on,
        protocols: protocols(&args.via),
        allow: args.allow,
        chap,
        force,
    })
}

fn backing(place: PlaceArgs) -> Result<NewBacking, Failure> {
    if let Some(pool) = place.pool {
        return Ok(NewBacking::Pool { pool });
    }
    Ok(match (place.device, place.path) {
        (Some(path), _) => NewBacking::Device { path: absolute(&path)? },
        (None, Some(path)) => NewBacking::File { path: Some(absolute(&path)?) },
        (None, None) => NewBacking::File { path: None },
    })
}

async fn delete(
    remote: &Remote,
    name: &VolumeName,
    confirm: &ConfirmArgs,
    (force, discard): (bool, bool),
) -> Result<(), Failure> {
    let flags = [force.then_some(FORCE), discard.then_some(DISCARD)];
    let flags: Vec<_> = flags.into_iter().flatten().collect();
    if !confirm.yes {
        // Names what is about to be lost, and finds out first whether it is there.
        let volume = remote.client.call_on::<GetVolume>(name, &[], &Nothing).await?;
        let (size, copies) = (api::Size(volume.size_bytes), show::copies(&volume.copies));
        let what = format!("This deletes volume {name} ({size}) and all data on it ({copies}).");
        let hint = "--yes deletes without asking";
        confirmed(confirm, ("volume", name.as_str()), &what, "deleted", hint)?;
    }
    remote.client.call_on::<DeleteVolume>(name, &flags, &Nothing).await?;
    // It is still there while a node that does not run has a copy to erase.
    match remote.client.call_on::<GetVolume>(name, &[], &Nothing).await {
        Ok(volume) if volume.state == VolumeState::Deleting => {
            let deleting = serde_json::json!({ "deleting": name });
            remote.print(&deleting, |_| show::still_deleting(&volume))
        }
        _ => {
            let deleted = serde_json::json!({ "deleted": name });
            remote.print(&deleted, |_| format!("Volume {name} is deleted."))
        }
    }
}

/// Has somebody type the name of the volume that is to be `done` something to.
fn ask(name: &VolumeName, what: &str, done: &str, hint: &str) -> Result<(), Failure> {
    ask_for_name(("volume", name.as_str()), what, done, hint)
}
