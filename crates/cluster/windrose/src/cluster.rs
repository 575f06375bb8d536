//! `windrose cluster …` and `windrose node drain|resume`.

use std::process::ExitCode;
use std::time::Duration;

use api::client::CallError;
use api::endpoint::{
    ApproveJoin, CreateToken, DrainNode, GetCluster, GetHealth, GetStatus, InitCluster,
    JoinCluster, LeaveCluster, ListJoins, ListTokens, ListVolumes, NoBody, RefuseJoin, ResumeNode,
    RevokeToken, RotateCredentials,
};
use api::{
    Cluster, ClusterStage, CreateTokenRequest, EntryId, InitClusterRequest, JoinClusterRequest,
    LeaveClusterRequest, NodeRole, NodeSelector,
};
use tokio::time::{Instant, sleep};

use crate::cli::{ClusterCommand, ConfirmArgs, NodeCommand, TokenArgs, TokenCommand};
use crate::exit::{CliError, FAILED, print_error_line};
use crate::remote::{NodeConnection, require_confirmation};
use crate::{files, output, recovery};

/// How long a node may take to reach a membership stage.
const STAGE_TIMEOUT: Duration = Duration::from_secs(60);

/// How often a node that waits for approval asks again.
const JOIN_POLL_INTERVAL: Duration = Duration::from_secs(2);

/// How long a node waits for the same thing before that is reported: a store and its members take a
/// moment to start.
const REPORT_DELAY: Duration = Duration::from_secs(2);

/// Pause between two polls.
const POLL_INTERVAL: Duration = Duration::from_millis(200);

pub(crate) async fn run(
    remote: NodeConnection,
    command: ClusterCommand,
) -> Result<ExitCode, CliError> {
    let client = &remote.client;
    match command {
        ClusterCommand::Init { insecure } => {
            client.call::<InitCluster>(&InitClusterRequest { insecure }).await?;
            wait_for_stage(&remote, ClusterStage::Member).await?;
        }
        ClusterCommand::Join(token) => join(&remote, &token, NodeRole::Data).await?,
        ClusterCommand::Witness(token) => join(&remote, &token, NodeRole::Witness).await?,
        ClusterCommand::Token { command } => run_token_command(&remote, command).await?,
        ClusterCommand::Joins => {
            let joins = client.call::<ListJoins>(&NoBody).await?;
            remote.print(&joins, output::joins)?;
        }
        ClusterCommand::Approve { id } => {
            let joins = client.call::<ApproveJoin>(&EntryId { id }).await?;
            remote.print(&joins, output::joins)?;
        }
        ClusterCommand::Refuse { id } => {
            let joins = client.call::<RefuseJoin>(&EntryId { id }).await?;
            remote.print(&joins, output::joins)?;
        }
        ClusterCommand::Rotate => {
            let cluster = client.call::<RotateCredentials>(&NoBody).await?;
            wait_for_rotation(&remote, cluster).await?;
        }
        ClusterCommand::Nodes => {
            let cluster = client.call::<GetCluster>(&NoBody).await?;
            remote.print(&cluster, output::cluster)?;
        }
        ClusterCommand::Recover { without, dry_run, confirm } => {
            let creates_store =
                recovery::recover_cluster(&remote, without, dry_run, &confirm).await?;
            if creates_store {
                wait_for_stage(&remote, ClusterStage::Member).await?;
                print_error_line(recovery::AFTER_NEW_STORE);
            }
        }
        ClusterCommand::Leave { node, force, confirm } => {
            let other = node.is_some();
            match &node {
                Some(node) if force => confirm_removal(&confirm, node)?,
                None if force => confirm_forced_leave(&remote, &confirm).await?,
                _ => {}
            }
            let cluster = client.call::<LeaveCluster>(&LeaveClusterRequest { node, force }).await?;
            if other {
                remote.print(&cluster, output::cluster)?;
            } else {
                wait_for_stage(&remote, ClusterStage::Standalone).await?;
            }
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// `windrose node drain` and `windrose node resume`.
pub(crate) async fn drain_or_resume(
    remote: NodeConnection,
    command: NodeCommand,
) -> Result<ExitCode, CliError> {
    let cluster = match command {
        NodeCommand::Drain { node } => {
            remote.client.call::<DrainNode>(&NodeSelector { node }).await?
        }
        NodeCommand::Resume { node } => {
            remote.client.call::<ResumeNode>(&NodeSelector { node }).await?
        }
        // Handled locally, without a request to the node.
        NodeCommand::AcceptDataDir { config, confirm } => {
            return crate::accept_data_dir::run(config.as_deref(), confirm.as_deref());
        }
    };
    remote.print(&cluster, output::cluster)?;
    Ok(ExitCode::SUCCESS)
}

/// Asks for confirmation: a node that forgets its cluster loses the records of all volumes: names,
/// access, secrets.
async fn confirm_forced_leave(
    remote: &NodeConnection,
    confirm: &ConfirmArgs,
) -> Result<(), CliError> {
    if confirm.yes {
        return Ok(());
    }
    let cluster = remote.client.call::<GetCluster>(&NoBody).await?;
    let status = remote.client.call::<GetStatus>(&NoBody).await?;
    let volumes = remote.client.call::<ListVolumes>(&NoBody).await.map(|list| list.volumes);
    let volumes: Vec<_> = volumes.unwrap_or_default().iter().map(|v| v.name.to_string()).collect();
    let known = match volumes.is_empty() {
        true => "the volumes of the cluster".to_owned(),
        false => format!("the volumes {}", volumes.join(", ")),
    };
    let id = cluster.id.map(|id| format!(" {id}")).unwrap_or_default();
    let name = status.node.name;
    let what = format!(
        "Node {name} leaves cluster{id} for good, without informing the other nodes: it loses the \
         records of {known} (their names, allowed initiators, secrets). It stops serving; the \
         images are kept."
    );
    let hint = format!("use --confirm {name} or --yes to do it without a prompt");
    require_confirmation(confirm, ("node", &name), &what, "removed", &hint)
}

/// Asks for confirmation: removing a node for good also removes the records of its replicas.
fn confirm_removal(confirm: &ConfirmArgs, node: &str) -> Result<(), CliError> {
    let what = format!(
        "{node} is removed from the cluster for good, with the records of its replicas. The \
         cluster can no longer use the data on its disks."
    );
    let hint = format!("use --confirm {node} or --yes to do it without a prompt");
    require_confirmation(confirm, ("node", node), &what, "removed", &hint)
}

/// `windrose cluster token`.
async fn run_token_command(
    remote: &NodeConnection,
    command: Option<TokenCommand>,
) -> Result<(), CliError> {
    let client = &remote.client;
    let request = match command {
        None => CreateTokenRequest::default(),
        Some(TokenCommand::Create { uses, unlimited, expires, witness, require_approval }) => {
            CreateTokenRequest {
                uses: (!unlimited).then_some(uses),
                lifetime_s: expires,
                role: witness.then_some(NodeRole::Witness),
                requires_approval: require_approval,
            }
        }
        Some(TokenCommand::List) => {
            let tokens = client.call::<ListTokens>(&NoBody).await?;
            return remote.print(&tokens, output::tokens);
        }
        Some(TokenCommand::Revoke { id }) => {
            let tokens = client.call::<RevokeToken>(&EntryId { id }).await?;
            return remote.print(&tokens, output::tokens);
        }
    };
    let created = client.call::<CreateToken>(&request).await?;
    remote.print(&created, |created| created.token.clone())?;
    print_error_line(&format!("windrose: {}", output::created_token(&created.info)));
    Ok(())
}

async fn join(remote: &NodeConnection, token: &TokenArgs, role: NodeRole) -> Result<(), CliError> {
    let token = match (&token.token, &token.file) {
        (Some(token), _) => token.clone(),
        (None, Some(file)) => files::read_line(file)?,
        (None, None) => return Err(CliError::new(FAILED, "no token given")),
    };
    let request = JoinClusterRequest { token, role };
    let mut reported = None;
    loop {
        let cluster = remote.client.call::<JoinCluster>(&request).await?;
        let (ClusterStage::Standalone, Some(what)) = (cluster.stage, cluster.waits_for) else {
            break;
        };
        if reported.as_ref() != Some(&what) {
            print_error_line(&format!("windrose: waiting: {what}"));
            reported = Some(what);
        }
        sleep(JOIN_POLL_INTERVAL).await;
    }
    wait_for_stage(remote, ClusterStage::Member).await
}

/// Waits until the node, which restarts in its process, has reached the stage `wanted` and serves.
async fn wait_for_stage(remote: &NodeConnection, wanted: ClusterStage) -> Result<(), CliError> {
    let deadline = Instant::now() + STAGE_TIMEOUT;
    let (mut waiting, mut reported) = (None, None);
    loop {
        let waits_for = match poll_node(remote).await {
            Ok((cluster, true)) if cluster.stage == wanted => {
                return remote.print(&cluster, output::cluster);
            }
            Ok((cluster, _)) => cluster.waits_for,
            // While the node restarts, connections break.
            Err(CallError::Unreachable { .. } | CallError::MalformedResponse { .. }) => None,
            Err(error @ CallError::Refused(_)) => return Err(error.into()),
        };
        if let Some(what) = waits_for
            && waiting.as_ref().is_none_or(|(known, _)| *known != what)
        {
            waiting = Some((what, Instant::now()));
        }
        if let Some((what, since)) = &waiting
            && since.elapsed() >= REPORT_DELAY
            && reported.as_ref() != Some(what)
        {
            print_error_line(&format!("windrose: waiting: {what}"));
            reported = Some(what.clone());
        }
        if Instant::now() > deadline {
            let why = waiting.map(|(what, _)| what);
            let why = why.unwrap_or_else(|| "the node does not respond yet".into());
            return Err(CliError::new(FAILED, format!("not done after {STAGE_TIMEOUT:?}: {why}"))
                .with_hint(
                    "the node retries automatically; `windrose cluster nodes` shows the progress",
                ));
        }
        sleep(POLL_INTERVAL).await;
    }
}

/// Waits until the cluster has a new secret and authority. The store may be away for moments while
/// its members restart.
async fn wait_for_rotation(remote: &NodeConnection, started: Cluster) -> Result<(), CliError> {
    let mut deadline = Instant::now() + STAGE_TIMEOUT;
    let mut cluster = started;
    let mut reported: Option<String> = None;
    // `stale_reason`: the store does not answer, so the state is unknown.
    while cluster.rotation.is_some() || cluster.stale_reason.is_some() {
        let progress = cluster.rotation.as_ref().map(output::rotation);
        if let Some(progress) = progress.filter(|progress| reported.as_ref() != Some(progress)) {
            deadline = Instant::now() + STAGE_TIMEOUT;
            print_error_line(&format!("windrose: {progress}"));
            reported = Some(progress);
        }
        if Instant::now() > deadline {
            let what = reported.or(cluster.stale_reason).unwrap_or_default();
            return Err(CliError::new(FAILED, format!("not done after {STAGE_TIMEOUT:?}: {what}")).with_hint(
                "the nodes continue automatically; windrose status shows what they wait for, and \
                 what to do",
            ));
        }
        sleep(POLL_INTERVAL).await;
        cluster = remote.client.call::<GetCluster>(&NoBody).await?;
    }
    print_error_line(
        "windrose: the secret and the authority of the cluster were replaced; earlier tokens are \
         revoked",
    );
    remote.print(&cluster, output::cluster)
}

/// The node's cluster state, and whether it serves.
async fn poll_node(remote: &NodeConnection) -> Result<(Cluster, bool), CallError> {
    let cluster = remote.client.call::<GetCluster>(&NoBody).await?;
    let health = remote.client.call::<GetHealth>(&NoBody).await?;
    Ok((cluster, health.serving))
}
