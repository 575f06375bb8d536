//! `windrose cluster …` and `windrose node drain|resume`.

use std::process::ExitCode;
use std::time::Duration;

use api::client::CallError;
use api::endpoint::{
    ApproveJoin, DrainNode, GetCluster, GetHealth, GetStatus, InitCluster, ListJoins, ListTokens,
    ListVolumes, Nothing, PostJoin, PostLeave, PostToken, RefuseJoin, ResumeNode, RevokeToken,
    RotateCluster,
};
use api::{
    BeginCluster, Cluster, ClusterStage, CreateToken, JoinCluster, LeaveCluster, NodeRole, WhichId,
    WhichNode,
};
use tokio::time::{Instant, sleep};

use crate::cli::{ClusterCommand, ConfirmArgs, NodeCommand, TokenArgs, TokenCommand};
use crate::exit::{FAILED, Failure};
use crate::remote::{Remote, confirmed, tell};
use crate::{files, recovery, show};

/// How long a node may take to become what it is to be.
const PATIENCE: Duration = Duration::from_secs(60);

/// Pause before a node that waits for approval asks again.
const ASK_AGAIN: Duration = Duration::from_secs(2);

/// How long the same is waited for before that is told: a store and its members take a moment to start.
const MOMENT: Duration = Duration::from_secs(2);

/// Pause between two looks.
const PAUSE: Duration = Duration::from_millis(200);

pub(crate) async fn run(remote: Remote, command: ClusterCommand) -> Result<ExitCode, Failure> {
    let client = &remote.client;
    match command {
        ClusterCommand::Init { insecure } => {
            client.call::<InitCluster>(&BeginCluster { insecure }).await?;
            settled(&remote, ClusterStage::Member).await?;
        }
        ClusterCommand::Join(token) => join(&remote, &token, NodeRole::Data).await?,
        ClusterCommand::Witness(token) => join(&remote, &token, NodeRole::Witness).await?,
        ClusterCommand::Token { command } => token(&remote, command).await?,
        ClusterCommand::Joins => {
            let joins = client.call::<ListJoins>(&Nothing).await?;
            remote.print(&joins, show::joins)?;
        }
        ClusterCommand::Approve { id } => {
            let joins = client.call::<ApproveJoin>(&WhichId { id }).await?;
            remote.print(&joins, show::joins)?;
        }
        ClusterCommand::Refuse { id } => {
            let joins = client.call::<RefuseJoin>(&WhichId { id }).await?;
            remote.print(&joins, show::joins)?;
        }
        ClusterCommand::Rotate => {
            let begun = client.call::<RotateCluster>(&Nothing).await?;
            rotated(&remote, begun).await?;
        }
        ClusterCommand::Nodes => {
            let cluster = client.call::<GetCluster>(&Nothing).await?;
            remote.print(&cluster, show::cluster)?;
        }
        ClusterCommand::Recover { without, plan, confirm } => {
            let begins = recovery::cluster(&remote, without, plan, &confirm).await?;
            if begins {
                settled(&remote, ClusterStage::Member).await?;
                tell(recovery::AFTER_NEW_STORE);
            }
        }
        ClusterCommand::Leave { node, force, confirm } => {
            let other = node.is_some();
            match &node {
                Some(node) if force => confirm_removal(&confirm, node)?,
                None if force => confirm_leaving(&remote, &confirm).await?,
                _ => {}
            }
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

/// A node that forgets its cluster loses the records of all volumes: names, access, secrets.
async fn confirm_leaving(remote: &Remote, confirm: &ConfirmArgs) -> Result<(), Failure> {
    if confirm.yes {
        return Ok(());
    }
    let cluster = remote.client.call::<GetCluster>(&Nothing).await?;
    let status = remote.client.call::<GetStatus>(&Nothing).await?;
    let volumes = remote.client.call::<ListVolumes>(&Nothing).await.map(|list| list.volumes);
    let volumes: Vec<_> = volumes.unwrap_or_default().iter().map(|v| v.name.to_string()).collect();
    let known = match volumes.is_empty() {
        true => "the volumes of the cluster".to_owned(),
        false => format!("the volumes {}", volumes.join(", ")),
    };
    let id = cluster.id.map(|id| format!(" {id}")).unwrap_or_default();
    let name = status.node.name;
    let what = format!(
        "Node {name} forgets cluster{id} without asking the other nodes, for good: it loses the records of {known} \
         (their names, who may use them, secrets). It serves nothing any more; the images stay where they are."
    );
    let hint = format!("--confirm {name} or --yes does it without asking");
    confirmed(confirm, ("node", &name), &what, "taken out", &hint)
}

/// A node that is removed for good takes the records of its copies with it.
fn confirm_removal(confirm: &ConfirmArgs, node: &str) -> Result<(), Failure> {
    let what = format!(
        "{node} is removed from the cluster for good, and the records of the copies that it keeps with it. What is on \
         its disks is of no use to the cluster from then on."
    );
    let hint = format!("--confirm {node} or --yes does it without asking");
    confirmed(confirm, ("node", node), &what, "removed", &hint)
}

/// `windrose cluster token`.
async fn token(remote: &Remote, command: Option<TokenCommand>) -> Result<(), Failure> {
    let client = &remote.client;
    let ask = match command {
        None => CreateToken::default(),
        Some(TokenCommand::Create { uses, unlimited, expires, witness, approve }) => CreateToken {
            uses: (!unlimited).then_some(uses),
            lasts_s: expires,
            role: witness.then_some(NodeRole::Witness),
            approve,
        },
        Some(TokenCommand::List) => {
            let tokens = client.call::<ListTokens>(&Nothing).await?;
            return remote.print(&tokens, show::tokens);
        }
        Some(TokenCommand::Revoke { id }) => {
            let tokens = client.call::<RevokeToken>(&WhichId { id }).await?;
            return remote.print(&tokens, show::tokens);
        }
    };
    let made = client.call::<PostToken>(&ask).await?;
    remote.print(&made, |made| made.token.clone())?;
    tell(&format!("windrose: {}", show::made_token(&made.info)));
    Ok(())
}

async fn join(remote: &Remote, token: &TokenArgs, role: NodeRole) -> Result<(), Failure> {
    let token = match (&token.token, &token.file) {
        (Some(token), _) => token.clone(),
        (None, Some(file)) => files::line(file)?,
        (None, None) => return Err(Failure::new(FAILED, "no token is given")),
    };
    let ask = JoinCluster { token, role };
    let mut said = None;
    loop {
        let cluster = remote.client.call::<PostJoin>(&ask).await?;
        let (ClusterStage::Alone, Some(what)) = (cluster.stage, cluster.waits_for) else { break };
        if said.as_ref() != Some(&what) {
            tell(&format!("windrose: waiting: {what}"));
            said = Some(what);
        }
        sleep(ASK_AGAIN).await;
    }
    settled(remote, ClusterStage::Member).await
}

/// Waits until the node, whose inside begins again, is what it is to be and serves.
async fn settled(remote: &Remote, wanted: ClusterStage) -> Result<(), Failure> {
    let deadline = Instant::now() + PATIENCE;
    let (mut waits, mut told) = (None, None);
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
        if let Some(what) = waits_for
            && waits.as_ref().is_none_or(|(known, _)| *known != what)
        {
            waits = Some((what, Instant::now()));
        }
        if let Some((what, since)) = &waits
            && since.elapsed() >= MOMENT
            && told.as_ref() != Some(what)
        {
            tell(&format!("windrose: waiting: {what}"));
            told = Some(what.clone());
        }
        if Instant::now() > deadline {
            let why = waits.map(|(what, _)| what);
            let why = why.unwrap_or_else(|| "the node does not answer yet".into());
            return Err(Failure::new(FAILED, format!("not done after {PATIENCE:?}: {why}")).hint(
                "the node tries on by itself; `windrose cluster nodes` shows how far it is",
            ));
        }
        sleep(PAUSE).await;
    }
}

/// Waits until the cluster has a new secret and authority. The store may be away for moments: its members start again.
async fn rotated(remote: &Remote, begun: Cluster) -> Result<(), Failure> {
    let mut deadline = Instant::now() + PATIENCE;
    let mut cluster = begun;
    let mut known: Option<String> = None;
    // Where the store does not answer, nobody knows.
    while cluster.rotation.is_some() || cluster.unread.is_some() {
        let how_far = cluster.rotation.as_ref().map(show::rotation);
        if let Some(how_far) = how_far.filter(|how_far| known.as_ref() != Some(how_far)) {
            deadline = Instant::now() + PATIENCE;
            tell(&format!("windrose: {how_far}"));
            known = Some(how_far);
        }
        if Instant::now() > deadline {
            let what = known.or(cluster.unread).unwrap_or_default();
            return Err(Failure::new(FAILED, format!("not done after {PATIENCE:?}: {what}")).hint(
                "the nodes go on by themselves; windrose status says what they wait for, and what helps",
            ));
        }
        sleep(PAUSE).await;
        cluster = remote.client.call::<GetCluster>(&Nothing).await?;
    }
    tell(
        "windrose: the secret and the authority of the cluster are new; tokens made before are revoked",
    );
    remote.print(&cluster, show::cluster)
}

/// What the node is, and whether it serves.
async fn look(remote: &Remote) -> Result<(Cluster, bool), CallError> {
    let cluster = remote.client.call::<GetCluster>(&Nothing).await?;
    let health = remote.client.call::<GetHealth>(&Nothing).await?;
    Ok((cluster, health.serving))
}
