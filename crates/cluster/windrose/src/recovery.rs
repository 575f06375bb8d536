//! `windrose cluster recover`, `windrose volume orphans|adopt|discard`, `windrose pool import`.

use std::path::PathBuf;

use api::endpoint::{
    FindStrayPools, ListOrphans, Nothing, PostAdoption, PostDiscard, PostPoolImport, PostRecovery,
};
use api::{
    AdoptImage, DiscardImage, FindPools, ImportPool, PoolName, RecoverCluster, RecoveryPlan,
    VolumeName,
};

use crate::cli::{ConfirmArgs, VolumeCommand};
use crate::exit::{FAILED, Failure};
use crate::files::absolute;
use crate::remote::{Remote, confirmed};
use crate::show;

/// What is left to do once there is a new store.
pub(crate) const AFTER_NEW_STORE: &str = "\
The new store is there. Next:
  1. on each other node of the old cluster: windrose cluster leave --force, then windrose cluster join
     (or witness) with the token that windrose cluster token prints here
  2. when all of them are there: windrose cluster recover, once more, for the volumes";

/// What is done with images that no record names.
pub(crate) async fn images(remote: &Remote, command: VolumeCommand) -> Result<(), Failure> {
    match command {
        VolumeCommand::Orphans => {
            let orphans = remote.client.call::<ListOrphans>(&Nothing).await?;
            remote.print(&orphans, show::orphans)
        }
        VolumeCommand::Adopt { image, name, without, force, plan, confirm } => {
            let image = place(image)?;
            let ask = AdoptImage { image, name, without, force, plan: true };
            adopt(remote, ask, plan, &confirm).await
        }
        VolumeCommand::Discard { image, confirm } => {
            discard(remote, &place(image)?, &confirm).await
        }
        _ => Err(Failure::new(FAILED, "it is another command")),
    }
}

/// An image as the node knows it: it does not know our working directory.
fn place(typed: String) -> Result<String, Failure> {
    let in_pool = typed.split_once('/').is_some_and(|(pool, volume)| {
        pool.parse::<PoolName>().is_ok() && volume.parse::<uuid::Uuid>().is_ok()
    });
    if in_pool {
        return Ok(typed);
    }
    Ok(absolute(typed.as_ref())?.display().to_string())
}

async fn adopt(
    remote: &Remote,
    ask: AdoptImage,
    plan: bool,
    confirm: &ConfirmArgs,
) -> Result<(), Failure> {
    let would = remote.client.call::<PostAdoption>(&ask).await?;
    if plan {
        return remote.print(&would, |would| show::planned(&would.plan));
    }
    // Where nothing can be lost by it nobody is asked.
    if (ask.force || !ask.without.is_empty()) && !confirm.yes {
        let name = would
            .plan
            .name
            .as_ref()
            .map_or_else(|| would.plan.volume.to_string(), VolumeName::to_string);
        let what = format!(
            "{}\nWhat only other copies hold is LOST, acknowledged writes among it.",
            show::planned(&would.plan)
        );
        let hint = format!("--confirm {name} or --yes takes it without asking");
        confirmed(confirm, ("volume", &name), &what, "taken", &hint)?;
    }
    let adopted = remote.client.call::<PostAdoption>(&AdoptImage { plan: false, ..ask }).await?;
    remote.print(&adopted, |adopted| show::planned(&adopted.plan))
}

async fn discard(remote: &Remote, image: &str, confirm: &ConfirmArgs) -> Result<(), Failure> {
    let orphans = remote.client.call::<ListOrphans>(&Nothing).await?;
    let found = orphans.images.iter().find(|o| o.image == image);
    let volume = match found {
        Some(found) => found.volume,
        None => {
            let ask = AdoptImage {
                image: image.to_owned(),
                name: None,
                without: Vec::new(),
                force: true,
                plan: true,
            };
            remote.client.call::<PostAdoption>(&ask).await?.plan.volume
        }
    };
    let called = found.and_then(|f| f.listed_as.as_ref().or(f.name.as_ref()));
    let name = called.map_or_else(|| volume.to_string(), VolumeName::to_string);
    let what = format!(
        "This erases {image}, which holds volume {name} ({volume}): what it holds is LOST."
    );
    let hint = format!("--confirm {name} or --yes erases it without asking");
    confirmed(confirm, ("image of volume", &name), &what, "erased", &hint)?;
    let ask = DiscardImage { image: image.to_owned(), confirm: volume };
    remote.client.call::<PostDiscard>(&ask).await?;
    remote.print(&serde_json::json!({ "erased": image }), |_| format!("{image} is erased."))
}

/// Lists pools that the node does not know, or takes one.
pub(crate) async fn import(
    remote: &Remote,
    pool: Option<String>,
    disks: Vec<PathBuf>,
    name: Option<PoolName>,
) -> Result<(), Failure> {
    let Some(pool) = pool else {
        let found = remote.client.call::<FindStrayPools>(&FindPools { disks }).await?;
        return remote.print(&found, show::importable);
    };
    let imported = remote.client.call::<PostPoolImport>(&ImportPool { pool, name, disks }).await?;
    remote.print(&imported, |imported| {
        let volumes = imported.volumes.iter().map(show::planned);
        let volumes: Vec<_> = volumes.collect();
        format!("{}\n{}", show::pool(&imported.pool).trim_end(), volumes.join("\n"))
    })
}

/// Recovers the cluster; says whether a new store begins.
pub(crate) async fn cluster(
    remote: &Remote,
    without: Vec<String>,
    only_plan: bool,
    confirm: &ConfirmArgs,
) -> Result<bool, Failure> {
    let ask = RecoverCluster { confirm: None, without };
    let plan = remote.client.call::<PostRecovery>(&ask).await?;
    let nothing = plan.store.is_none() && plan.volumes.is_empty();
    if only_plan || nothing {
        remote.print(&plan, show::recovery)?;
        return Ok(false);
    }
    if plan.store.is_none() && plan.volumes.iter().all(|v| v.doubt.is_some()) {
        return Err(undecided(&plan));
    }
    let name = plan.node.clone();
    let hint = format!("--confirm {name} or --yes does it without asking; --plan only shows it");
    confirmed(confirm, ("node", &name), &show::recovery(&plan), "used to recover", &hint)?;
    let ask = RecoverCluster { confirm: Some(name), ..ask };
    let done = remote.client.call::<PostRecovery>(&ask).await?;
    remote.print(&done, show::recovery)?;
    if done.volumes.iter().any(|v| v.doubt.is_some()) {
        return Err(undecided(&done));
    }
    Ok(done.store.is_some())
}

/// Volumes about which nothing was done.
fn undecided(plan: &RecoveryPlan) -> Failure {
    let doubts = plan.volumes.iter().filter_map(|v| {
        let name = v.name.as_ref().map_or_else(|| v.volume.to_string(), VolumeName::to_string);
        Some(format!("volume {name}: {}", v.doubt.as_ref()?))
    });
    let doubts: Vec<_> = doubts.collect();
    Failure::new(FAILED, format!("not recovered: {}", doubts.join("; ")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_is_a_path_or_a_volume_of_a_pool() {
        let volume = "tank/3d813cbb-47fb-32ba-91df-831e1593ac29";
        assert_eq!(place(volume.into()).unwrap(), volume);
        assert_eq!(place("/v/a.img".into()).unwrap(), "/v/a.img");
        let here = std::env::current_dir().unwrap();
        assert_eq!(place("tank/a.img".into()).unwrap(), here.join("tank/a.img").to_str().unwrap());
    }
}
