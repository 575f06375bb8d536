//! `windrose cluster recover`, `windrose volume orphans|adopt|discard`, `windrose pool import`.

use std::path::PathBuf;

use api::endpoint::{
    AdoptImage, DiscardImage, FindImportablePools, ImportPool, ListOrphanedImages, NoBody,
    RecoverCluster,
};
use api::{
    AdoptImageRequest, DiscardImageRequest, FindPools, ImportPoolRequest, PoolName,
    RecoverClusterRequest, RecoveryPlan, VolumeName,
};

use crate::cli::{ConfirmArgs, VolumeCommand};
use crate::exit::{CliError, FAILED};
use crate::files::absolute;
use crate::output;
use crate::remote::{NodeConnection, require_confirmation};

/// The steps that remain after a new store was created.
pub(crate) const AFTER_NEW_STORE: &str = "\
The new store is ready. Next:
  1. on each other node of the old cluster: windrose cluster leave --force, then windrose cluster join
     (or witness) with the token that windrose cluster token prints here
  2. when all of them have joined: windrose cluster recover again, for the volumes";

/// Runs a command on images that no record names.
pub(crate) async fn run_image_command(
    remote: &NodeConnection,
    command: VolumeCommand,
) -> Result<(), CliError> {
    match command {
        VolumeCommand::Orphans => {
            let orphans = remote.client.call::<ListOrphanedImages>(&NoBody).await?;
            remote.print(&orphans, output::orphans)
        }
        VolumeCommand::Adopt { image, name, without, force, dry_run, confirm } => {
            let image = image_name(image)?;
            let request = AdoptImageRequest { image, name, without, force, dry_run: true };
            adopt(remote, request, dry_run, &confirm).await
        }
        VolumeCommand::Discard { image, confirm } => {
            discard(remote, &image_name(image)?, &confirm).await
        }
        _ => Err(CliError::new(FAILED, "it is another command")),
    }
}

/// An image's name for the node, which does not know our working directory.
fn image_name(typed: String) -> Result<String, CliError> {
    let in_pool = typed.split_once('/').is_some_and(|(pool, volume)| {
        pool.parse::<PoolName>().is_ok() && volume.parse::<uuid::Uuid>().is_ok()
    });
    if in_pool {
        return Ok(typed);
    }
    Ok(absolute(typed.as_ref())?.display().to_string())
}

async fn adopt(
    remote: &NodeConnection,
    request: AdoptImageRequest,
    dry_run: bool,
    confirm: &ConfirmArgs,
) -> Result<(), CliError> {
    let proposal = remote.client.call::<AdoptImage>(&request).await?;
    if dry_run {
        return remote.print(&proposal, |proposal| output::planned(&proposal.plan));
    }
    // Without possible data loss no confirmation is needed.
    if (request.force || !request.without.is_empty()) && !confirm.yes {
        let name = proposal
            .plan
            .name
            .as_ref()
            .map_or_else(|| proposal.plan.volume.to_string(), VolumeName::to_string);
        let what = format!(
            "{}\nData that only other replicas have is LOST, including acknowledged writes.",
            output::planned(&proposal.plan)
        );
        let hint = format!("use --confirm {name} or --yes to adopt it without a prompt");
        require_confirmation(confirm, ("volume", &name), &what, "taken", &hint)?;
    }
    let adopted =
        remote.client.call::<AdoptImage>(&AdoptImageRequest { dry_run: false, ..request }).await?;
    remote.print(&adopted, |adopted| output::planned(&adopted.plan))
}

async fn discard(
    remote: &NodeConnection,
    image: &str,
    confirm: &ConfirmArgs,
) -> Result<(), CliError> {
    let orphans = remote.client.call::<ListOrphanedImages>(&NoBody).await?;
    let found = orphans.images.iter().find(|o| o.image == image);
    let volume = match found {
        Some(found) => found.volume,
        None => {
            let request = AdoptImageRequest {
                image: image.to_owned(),
                name: None,
                without: Vec::new(),
                force: true,
                dry_run: true,
            };
            remote.client.call::<AdoptImage>(&request).await?.plan.volume
        }
    };
    let listed_name = found.and_then(|f| f.existing_volume.as_ref().or(f.name.as_ref()));
    let name = listed_name.map_or_else(|| volume.to_string(), VolumeName::to_string);
    let what =
        format!("This erases {image}, which contains volume {name} ({volume}): its data is LOST.");
    let hint = format!("use --confirm {name} or --yes to erase it without a prompt");
    require_confirmation(confirm, ("image of volume", &name), &what, "erased", &hint)?;
    let request = DiscardImageRequest { image: image.to_owned(), confirm: volume };
    remote.client.call::<DiscardImage>(&request).await?;
    remote.print(&serde_json::json!({ "erased": image }), |_| format!("{image} is erased."))
}

/// Lists pools that the node does not know, or imports one.
pub(crate) async fn import_pool(
    remote: &NodeConnection,
    pool: Option<String>,
    disks: Vec<PathBuf>,
    name: Option<PoolName>,
) -> Result<(), CliError> {
    let Some(pool) = pool else {
        let found = remote.client.call::<FindImportablePools>(&FindPools { disks }).await?;
        return remote.print(&found, output::importable);
    };
    let imported =
        remote.client.call::<ImportPool>(&ImportPoolRequest { pool, name, disks }).await?;
    remote.print(&imported, |imported| {
        let volumes = imported.volumes.iter().map(output::planned);
        let volumes: Vec<_> = volumes.collect();
        format!("{}\n{}", output::pool(&imported.pool).trim_end(), volumes.join("\n"))
    })
}

/// Recovers the cluster; returns whether it creates a new store.
pub(crate) async fn recover_cluster(
    remote: &NodeConnection,
    without: Vec<String>,
    only_plan: bool,
    confirm: &ConfirmArgs,
) -> Result<bool, CliError> {
    let request = RecoverClusterRequest { confirm: None, without };
    let plan = remote.client.call::<RecoverCluster>(&request).await?;
    let is_empty = plan.store.is_none() && plan.volumes.is_empty();
    if only_plan || is_empty {
        remote.print(&plan, output::recovery)?;
        return Ok(false);
    }
    if plan.store.is_none() && plan.volumes.iter().all(|v| v.ambiguity.is_some()) {
        return Err(undecided_error(&plan));
    }
    let name = plan.node.clone();
    let hint =
        format!("use --confirm {name} or --yes to do it without a prompt; --dry-run only shows it");
    require_confirmation(
        confirm,
        ("node", &name),
        &output::recovery(&plan),
        "used to recover",
        &hint,
    )?;
    let request = RecoverClusterRequest { confirm: Some(name), ..request };
    let done = remote.client.call::<RecoverCluster>(&request).await?;
    remote.print(&done, output::recovery)?;
    if done.volumes.iter().any(|v| v.ambiguity.is_some()) {
        return Err(undecided_error(&done));
    }
    Ok(done.store.is_some())
}

/// An error that names the volumes left undecided.
fn undecided_error(plan: &RecoveryPlan) -> CliError {
    let doubts = plan.volumes.iter().filter_map(|v| {
        let name = v.name.as_ref().map_or_else(|| v.volume.to_string(), VolumeName::to_string);
        Some(format!("volume {name}: {}", v.ambiguity.as_ref()?))
    });
    let doubts: Vec<_> = doubts.collect();
    CliError::new(FAILED, format!("not recovered: {}", doubts.join("; ")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_is_a_path_or_a_volume_of_a_pool() {
        let volume = "tank/3d813cbb-47fb-32ba-91df-831e1593ac29";
        assert_eq!(image_name(volume.into()).unwrap(), volume);
        assert_eq!(image_name("/v/a.img".into()).unwrap(), "/v/a.img");
        let here = std::env::current_dir().unwrap();
        assert_eq!(
            image_name("tank/a.img".into()).unwrap(),
            here.join("tank/a.img").to_str().unwrap()
        );
    }
}
