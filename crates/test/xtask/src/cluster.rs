//! A cluster of real processes: two data nodes and a witness, each with its own networks and a
//! member of a real etcd. Tests disturb it only by signals, link cuts and the product's command
//! line.

mod image;
mod store;

use crate::{
    network::Network,
    node::{ExportedVolume, Node, NodeOptions, Profile},
    run_context::RunContext,
};
use anyhow::{Context, Result, bail, ensure};
use image::Image;
use probe::multipath::{VolumeAddress, VolumePaths};
use rustix::{
    io::Errno,
    process::{Pid, Signal, kill_process},
};
use serde_json::Value;
use std::{
    fs,
    net::{IpAddr, SocketAddr},
    path::{Path, PathBuf},
    time::{Duration, Instant},
};
use store::members_of;

/// The data nodes and the witness, as indexes into [`Cluster::nodes`].
pub(crate) const NODE_A: usize = 0;
pub(crate) const NODE_B: usize = 1;
pub(crate) const WITNESS: usize = 2;
const NAMES: [&str; 3] = ["a", "b", "witness"];
/// The nodes that hold replicas.
const DATA_NODES: [usize; 2] = [NODE_A, NODE_B];

/// How long a cluster may take until all data is safe: a debug build on two busy cores.
const SAFE_TIMEOUT: Duration = Duration::from_secs(90);
const POLL: Duration = Duration::from_millis(200);

/// The nodes of a cluster, running or not.
pub(crate) struct Cluster {
    pub(crate) nodes: Vec<Node>,
    /// Dropped after the nodes.
    pub(crate) network: Network,
}

/// How far a node has joined a cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ClusterStage {
    Standalone,
    Member,
    /// Joining or leaving.
    Changing,
}

/// A volume with a replica on both data nodes.
pub(crate) struct MirroredVolume {
    pub(crate) name: String,
    /// As node a exports it.
    pub(crate) exported: ExportedVolume,
}

impl Cluster {
    /// Starts three standalone nodes.
    pub(crate) fn start(context: &RunContext, parent: &Path, profile: Profile) -> Result<Self> {
        Self::pinned(context, parent, profile, [None; 3])
    }

    /// Like [`Self::start`], with each node and its etcd member pinned to the given processor.
    pub(crate) fn pinned(
        context: &RunContext,
        parent: &Path,
        profile: Profile,
        processors: [Option<usize>; 3],
    ) -> Result<Self> {
        Self::start_with(
            context,
            parent,
            processors,
            &NodeOptions { profile, cores: 1, ..NodeOptions::default() },
        )
    }

    /// Like [`Self::pinned`], with further options for each node, except its address.
    pub(crate) fn start_with(
        context: &RunContext,
        parent: &Path,
        processors: [Option<usize>; 3],
        wishes: &NodeOptions<'_>,
    ) -> Result<Self> {
        let network = Network::new(context, 3)?;
        let node = |index: usize| -> Result<Node> {
            let node_network = &network.nodes[index];
            let more = format!(
                "[cluster]\nlisten = [\"{}:7480\"]\nheartbeat = [\"{}:7480\"]\n",
                node_network.data, node_network.heartbeat
            );
            let prefix = node_network.prefix_on(processors[index]);
            let prefix: Vec<&str> = prefix.iter().map(String::as_str).collect();
            // On loopback, guests reach only the nodes' first address, so ports tell the nodes
            // apart.
            let at = node_network.is_separate().then_some(IpAddr::V4(node_network.data));
            let wishes =
                NodeOptions { extra_config: &more, prefix: &prefix, listen_address: at, ..*wishes };
            Node::new(context, parent, NAMES[index], &wishes)
        };
        let mut nodes = (0..NAMES.len()).map(node).collect::<Result<Vec<_>>>()?;
        nodes.iter_mut().try_for_each(Node::start_without_waiting)?;
        nodes.iter_mut().try_for_each(Node::await_ready)?;
        Ok(Self { nodes, network })
    }

    /// Forms a cluster of the two data nodes.
    pub(crate) fn form_cluster(&self) -> Result<()> {
        self.nodes[NODE_A].command(&["cluster", "init"])?;
        let token = self.nodes[NODE_A].command(&["cluster", "token"])?;
        self.nodes[NODE_B].command(&["cluster", "join", "--token", token.trim()])?;
        self.add_witness()
    }

    /// Adds the witness to the cluster of node a.
    pub(crate) fn add_witness(&self) -> Result<()> {
        let token = self.nodes[NODE_A].command(&["cluster", "token"])?;
        self.nodes[WITNESS].command(&["cluster", "witness", "--token", token.trim()]).map(drop)
    }

    /// Creates a volume with a replica on both data nodes, accessible to every initiator.
    pub(crate) fn create(&self, name: &str, size: &str) -> Result<MirroredVolume> {
        self.create_with(name, size, &["--replicas", "2"])
    }

    /// Creates a volume accessible to every initiator, with these command-line arguments.
    pub(crate) fn create_with(
        &self,
        name: &str,
        size: &str,
        more: &[&str],
    ) -> Result<MirroredVolume> {
        let exported = self.nodes[NODE_A].create_with(name, size, more)?;
        self.await_safe()?;
        Ok(MirroredVolume { name: name.to_owned(), exported })
    }

    /// Makes `node` the primary of `volume`.
    pub(crate) fn make_primary(&self, volume: &MirroredVolume, node: usize) -> Result<()> {
        self.request_primary_switch(volume, NODE_A, node)?;
        self.await_safe()
    }

    /// How many pages the intent logs of both replicas have written so far.
    pub(crate) fn log_writes(&self, volume: &MirroredVolume) -> Result<[u64; 2]> {
        let written = |node: usize| self.image(volume, node)?.log_writes();
        Ok([written(NODE_A)?, written(NODE_B)?])
    }

    /// The paths of client `number` to `volume`: a portal on each data node, over iSCSI for half of
    /// the clients.
    pub(crate) fn paths(&self, volume: &MirroredVolume, number: u64) -> Result<VolumePaths> {
        let portals = |of: fn(&Node) -> SocketAddr| DATA_NODES.map(|n| of(&self.nodes[n])).to_vec();
        let ExportedVolume { unit, subsystem } = &volume.exported;
        Ok(if (number / 2).is_multiple_of(2) {
            let initiator = format!("iqn.2026-01.test:client{number}");
            let lun = u8::try_from(unit.lun).context("an odd LUN")?;
            let volume = VolumeAddress::Iscsi { initiator, target: unit.target.clone(), lun };
            VolumePaths { portals: portals(|node| node.iscsi), volume }
        } else {
            let host = format!("nqn.2026-01.test:client{number}");
            let volume = VolumeAddress::Nvme { host, subsystem: subsystem.nqn.clone() };
            VolumePaths { portals: portals(|node| node.nvme), volume }
        })
    }

    /// Waits until both data nodes report that all data is safe.
    pub(crate) fn await_safe(&self) -> Result<()> {
        let begun = Instant::now();
        for node in DATA_NODES {
            while !self.says_safe(node)? {
                if begun.elapsed() > SAFE_TIMEOUT {
                    let said = self.status(node)?;
                    bail!("node {}: not safe after {SAFE_TIMEOUT:?}\n{said}", NAMES[node]);
                }
                std::thread::sleep(POLL);
            }
        }
        Ok(())
    }

    /// Bytes sent to `node` over the data network so far, if they can be counted.
    pub(crate) fn bytes_to(&self, node: usize) -> Result<Option<u64>> {
        self.network.is_separate().then(|| self.network.bytes_to(node)).transpose()
    }

    /// Whether both data nodes report that all data is safe.
    pub(crate) fn is_safe(&self) -> Result<bool> {
        for node in DATA_NODES {
            if !self.says_safe(node)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn says_safe(&self, node: usize) -> Result<bool> {
        Ok(self.nodes[node].call(&["status"])?.status.success())
    }

    /// The node's `status` output, whatever its exit code.
    pub(crate) fn status(&self, node: usize) -> Result<String> {
        let status = self.nodes[node].call(&["status"])?;
        let (said, errors) = (status.stdout, status.stderr);
        Ok(format!("{}{}", String::from_utf8_lossy(&said), String::from_utf8_lossy(&errors)))
    }

    /// Waits until the status of `node` contains `words`.
    pub(crate) fn await_status_text(
        &self,
        node: usize,
        words: &str,
        limit: Duration,
    ) -> Result<()> {
        let begun = Instant::now();
        loop {
            let status = self.status(node)?;
            if status.contains(words) {
                return Ok(());
            }
            ensure!(begun.elapsed() < limit, "its status does not say \"{words}\":\n{status}");
            std::thread::sleep(POLL);
        }
    }

    /// Kills all nodes at once and restarts them after `meanwhile`.
    pub(crate) fn blackout(&mut self, meanwhile: impl FnOnce(&Self) -> Result<()>) -> Result<()> {
        self.nodes.iter_mut().try_for_each(Node::kill)?;
        meanwhile(self)?;
        self.nodes.iter_mut().try_for_each(Node::start_without_waiting)?;
        self.nodes.iter_mut().try_for_each(Node::await_ready)
    }

    /// Asks node `at` to make node `to` the primary whenever that is in sync.
    pub(crate) fn request_primary_switch(
        &self,
        volume: &MirroredVolume,
        at: usize,
        to: usize,
    ) -> Result<()> {
        self.nodes[at]
            .command(&["volume", "switch-primary", &volume.name, "--to", NAMES[to]])
            .map(drop)
    }

    /// Compares the replicas of a volume. Only the node with the primary does this, so it is asked.
    pub(crate) fn verify(&self, volume: &MirroredVolume) -> Result<()> {
        let shown = self.nodes[NODE_A].query(&["volume", "show", &volume.name])?;
        let copies = shown.pointer("/replicas").and_then(Value::as_array).context("no replicas")?;
        let primary = copies.iter().find(|c| c.get("primary") == Some(&true.into()));
        let name = primary.and_then(|copy| copy.get("node")?.as_str());
        let at = NAMES.iter().position(|node| Some(*node) == name).context("no primary")?;
        self.nodes[at].command(&["volume", "mirror", "verify", &volume.name]).map(drop)
    }

    /// How far a node has joined; an error while it does not answer.
    pub(crate) fn stage(&self, node: usize) -> Result<ClusterStage> {
        let cluster = self.nodes[node].query(&["cluster", "nodes"])?;
        let waits = cluster.get("waits_for").is_some_and(|why| !why.is_null());
        Ok(match cluster.get("stage").and_then(Value::as_str) {
            Some("standalone") => ClusterStage::Standalone,
            Some("member") if !waits => ClusterStage::Member,
            _ => ClusterStage::Changing,
        })
    }

    /// Whether `node` sees a rotation of the cluster's secret and authority; true while unknown.
    pub(crate) fn is_rotating(&self, node: usize) -> Result<bool> {
        let cluster = self.nodes[node].query(&["cluster", "nodes"])?;
        let is_there = |key| cluster.get(key).is_some_and(|value| !value.is_null());
        Ok(is_there("rotation") || is_there("stale_reason"))
    }

    /// How many nodes, and how many voting etcd members, a node sees.
    pub(crate) fn counts(&self, node: usize) -> Result<(usize, usize)> {
        let cluster = self.nodes[node].query(&["cluster", "nodes"])?;
        let list = |key| cluster.get(key).and_then(Value::as_array).context("an odd answer");
        let votes = |m: &&Value| m.get("voter").and_then(Value::as_bool) == Some(true);
        let members = list("store")?;
        ensure!(members.iter().filter(votes).count() == members.len(), "a member has no vote");
        Ok((list("nodes")?.len(), members.len()))
    }

    /// The etcd processes; they are children of the nodes.
    pub(crate) fn store_members(&self) -> Result<Vec<Pid>> {
        let members = self.nodes.iter().map(members_of).collect::<Result<Vec<_>>>()?;
        Ok(members.concat())
    }

    /// Kills the etcd member of `node` with SIGKILL, unless it has already ended.
    pub(crate) fn kill_store_member(&self, node: usize) -> Result<()> {
        let members = members_of(&self.nodes[node])?;
        members.into_iter().try_for_each(|member| match kill_process(member, Signal::KILL) {
            Ok(()) | Err(Errno::SRCH) => Ok(()),
            Err(error) => Err(error).context("cannot kill a member of the store"),
        })
    }

    /// Makes the etcd member of `node` the leader.
    pub(crate) fn move_store_leader(&self, node: usize) -> Result<()> {
        store::move_leader(&self.store_members()?, &members_of(&self.nodes[node])?)
    }

    /// Sends `signal` to all etcd members and to no other process.
    pub(crate) fn signal_store(&self, signal: Signal) -> Result<()> {
        let members = self.store_members()?;
        ensure!(members.len() == 3, "{} members of the store are running", members.len());
        for member in members {
            kill_process(member, signal).context("cannot signal a member of the store")?;
        }
        Ok(())
    }

    /// Stops all nodes in order, the witness last.
    pub(crate) fn stop(&mut self) -> Result<()> {
        for (node, name) in self.nodes.iter_mut().zip(NAMES) {
            let status = node.stop()?;
            ensure!(status.success(), "node {name} ended with {status}");
        }
        Ok(())
    }

    /// Prints the nodes' last log lines, without logins of initiators and etcd's messages.
    pub(crate) fn show_logs(&self, context: &RunContext) {
        const LINES: usize = 25;
        const LEFT_OUT: [&str; 2] = [" INFO target::", " WARN etcd: "];
        for (node, name) in self.nodes.iter().zip(NAMES) {
            let log = node.log().unwrap_or_else(|why| format!("{why:#}"));
            let told = |line: &&str| !LEFT_OUT.iter().any(|words| line.contains(words));
            let told: Vec<&str> = log.lines().filter(told).collect();
            let last = told[told.len().saturating_sub(LINES)..].join("\n");
            context.display.line(&format!("--- log of {name}\n{last}"));
        }
    }

    /// Allocated bytes of `volume` in each replica; holes are not counted.
    pub(crate) fn allocated(&self, volume: &MirroredVolume) -> Result<[u64; 2]> {
        let of = |node: usize| self.image(volume, node)?.allocated();
        Ok([of(NODE_A)?, of(NODE_B)?])
    }

    /// Compares the data of two volumes on each node, byte by byte.
    pub(crate) fn check_volumes_equal(
        &self,
        one: &MirroredVolume,
        other: &MirroredVolume,
    ) -> Result<()> {
        for node in DATA_NODES {
            let different = self.image(one, node)?.first_difference(&self.image(other, node)?)?;
            if let Some(at) = different {
                bail!("{} and {} differ at byte {at} at {}", one.name, other.name, NAMES[node]);
            }
        }
        Ok(())
    }

    fn image(&self, volume: &MirroredVolume, node: usize) -> Result<Image> {
        let path = find_image(&self.nodes[node].directory, &volume.name)?;
        Image::open(&path).with_context(|| format!("image {}", path.display()))
    }

    /// Compares the data of both replicas, byte by byte. No load may run; in-flight writes get a
    /// moment to complete.
    pub(crate) fn check_replicas_equal(&self, volume: &MirroredVolume) -> Result<()> {
        let images = [self.image(volume, NODE_A)?, self.image(volume, NODE_B)?];
        let begun = Instant::now();
        loop {
            let Some(different) = images[0].first_difference(&images[1])? else { return Ok(()) };
            if begun.elapsed() > Duration::from_secs(5) {
                bail!("the copies of {} differ at byte {different}", volume.name);
            }
            std::thread::sleep(POLL);
        }
    }
}

/// The images of `volume` below a node's directory.
pub(crate) fn images_of(node: &Path, volume: &str) -> Result<Vec<PathBuf>> {
    let directory = node.join("data/volumes");
    let entries =
        fs::read_dir(&directory).with_context(|| format!("cannot read {}", directory.display()))?;
    let prefix = format!("{volume}-");
    let named = |path: &PathBuf| {
        path.file_name().and_then(|name| name.to_str()).is_some_and(|n| n.starts_with(&prefix))
    };
    Ok(entries.flatten().map(|entry| entry.path()).filter(named).collect())
}

fn find_image(node: &Path, volume: &str) -> Result<PathBuf> {
    let mut found = images_of(node, volume)?;
    ensure!(found.len() == 1, "images of {volume}: {found:?}");
    Ok(found.remove(0))
}
