//! `windrose cluster …` and `windrose node drain|resume`.

use std::process::ExitCode;
use std::time::Duration;

use api::client::CallError;
use api::endpoint::{
    DrainNode, GetCluster, GetHealth, InitCluster, Nothing, PostJoin, PostLeave, PostToken,
    ResumeNode,
};
use api::{Cluster, ClusterStage, JoinCluster, LeaveCluster, NodeRole, WhichNode};
use tokio::time::{Instant, sleep};

use crate::cli::{ClusterCommand, NodeCommand, TokenArgs};
use crate::exit::{FAILED, Failure};
use crate::remote::Remote;
use crate::{files, show};

/// How long a node may take to become what it is to be.
const PATIENCE: Duration = Duration::from_secs(60);

/// Pause between two looks.
const PAUSE: Duration = Duration::from_millis(200);

pub(crate) async fn run(remote: Remote, command: ClusterCommand) -> Result<ExitCode, Failure> {
    let client = &remote.client;
    match command {
        ClusterCommand::Init => {
            client.call::<InitCluster>(&Nothing).await?;
            settled(&remote, ClusterStage::Member).await?;
        }
        ClusterCommand::Join(token) => join(&remote, &token, NodeRole::Data).await?,
        ClusterCommand::Witness(token) => join(&remote, &token, NodeRole::Witness).await?,
        ClusterCommand::Token => {
            let token = client.call::<PostToken>(&Nothing).await?;
            remote.print(&token, |t| t.token.clone())?;
        }
        ClusterCommand::Nodes => {
            let cluster = client.call::<GetCluster>(&Nothing).await?;
            remote.print(&cluster, show::cluster)?;
        }
        ClusterCommand::Leave { node, force } => {
            let other = node.is_some();
            let left = client.call::<PostLeave>(&LeaveCluster { node, force }).await?;
            if other {
                remote.print(&left, show::cluster)?;
            } else {
                settled(&remote, ClusterStage::Alone).await?;
            }
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// `windrose node drain` and `windrose node resume`.
pub(crate) async fn service(remote: Remote, command: NodeCommand) -> Result<ExitCode, Failure> {
    let cluster = match command {
        NodeCommand::Drain { node } => remote.client.call::<DrainNode>(&WhichNode { node }).await?,
        NodeCommand::Resume { node } => {
            remote.client.call::<ResumeNode>(&WhichNode { node }).await?
        }
        // No node is asked for it.
        NodeCommand::AcceptDataDir { config, confirm } => {
            return crate::accept::run(config.as_deref(), confirm.as_deref());
        }
    };
    remote.print(&cluster, show::cluster)?;
    Ok(ExitCode::SUCCESS)
}

async fn join(remote: &Remote, token: &TokenArgs, role: NodeRole) -> Result<(), Failure> {
    let token = match (&token.token, &token.file) {
        (Some(token), _) => token.clone(),
        (None, Some(file)) => files::line(file)?,
        (None, None) => return Err(Failure::new(FAILED, "no token is given")),
    };
    remote.client.call::<PostJoin>(&JoinCluster { token, role }).await?;
    settled(remote, ClusterStage::Member).await
}

/// Waits until the node, whose inside begins again, is what it is to be and serves.
async fn settled(remote: &Remote, wanted: ClusterStage) -> Result<(), Failure> {
    let deadline = Instant::now() + PATIENCE;
    let mut said = None;
    loop {
        let waits_for = match look(remote).await {
            Ok((cluster, true)) if cluster.stage == wanted => {
                return remote.print(&cluster, show::cluster);
            }
            Ok((cluster, _)) => cluster.waits_for,
            // While its inside begins again, connections end in the middle of whatever they do.
            Err(CallError::Unreachable { .. } | CallError::Protocol { .. }) => None,
            Err(error @ CallError::Refused(_)) => return Err(error.into()),
        };
        if waits_for.is_some() && waits_for != said {
            eprintln!("windrose: waiting: {}", waits_for.as_deref().unwrap_or_default());
            said.clone_from(&waits_for);
        }
        if Instant::now() > deadline {
            let why = waits_for.or(said).unwrap_or_else(|| "the node does not answer yet".into());
            return Err(Failure::new(FAILED, format!("not done after {PATIENCE:?}: {why}")).hint(
                "the node tries on by itself; `windrose cluster nodes` shows how far it is",
            ));
        }
        sleep(PAUSE).await;
    }
}

/// What the node is, and whether it serves.
async fn look(remote: &Remote) -> Result<(Cluster, bool), CallError> {
    let cluster = remote.client.call::<GetCluster>(&Nothing).await?;
    let health = remote.client.call::<GetHealth>(&Nothing).await?;
    Ok((cluster, health.serving))
}
