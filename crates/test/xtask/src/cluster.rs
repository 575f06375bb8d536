//! A cluster as processes: two data nodes and a witness, each with networks of its own and a member of a real etcd; formed,
//! watched and disturbed by nothing but signals, the links between them and the product's command line.

mod image;
mod store;

use crate::{
    house::House,
    network::Network,
    node::{Exported, Node, Profile, Wishes},
};
use anyhow::{Context, Result, bail, ensure};
use image::Image;
use probe::paths::{Paths, Volume};
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

/// The data nodes and the witness, by their place in [`Cluster::nodes`].
pub(crate) const A: usize = 0;
pub(crate) const B: usize = 1;
pub(crate) const WITNESS: usize = 2;
const NAMES: [&str; 3] = ["a", "b", "witness"];
/// The nodes that keep data.
const DATA_NODES: [usize; 2] = [A, B];

/// How long a cluster may take until everything is safe again: a debug build on two busy cores.
const RECOVERY: Duration = Duration::from_secs(90);
const POLL: Duration = Duration::from_millis(200);

/// The cluster, its members running or not.
pub(crate) struct Cluster {
    pub(crate) nodes: Vec<Node>,
    /// After the nodes, so that it goes last.
    pub(crate) network: Network,
}

/// How far a node has come into a cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stage {
    Alone,
    Member,
    /// On its way in or out.
    Between,
}

/// A volume with a copy on both data nodes.
pub(crate) struct Mirrored {
    pub(crate) name: String,
    /// As node a exports it.
    pub(crate) exported: Exported,
}

impl Cluster {
    /// Three nodes that know nothing of each other, running.
    pub(crate) fn start(house: &House, parent: &Path, profile: Profile) -> Result<Self> {
        Self::pinned(house, parent, profile, [None; 3])
    }

    /// The same, each on the processor that it is given, with its member of the store.
    pub(crate) fn pinned(
        house: &House,
        parent: &Path,
        profile: Profile,
        processors: [Option<usize>; 3],
    ) -> Result<Self> {
        Self::with(house, parent, processors, &Wishes { profile, cores: 1, ..Wishes::default() })
    }

    /// The same with what else is wanted of each node, but for where it is.
    pub(crate) fn with(
        house: &House,
        parent: &Path,
        processors: [Option<usize>; 3],
        wishes: &Wishes<'_>,
    ) -> Result<Self> {
        let network = Network::new(house, 3)?;
        let node = |index: usize| -> Result<Node> {
            let place = &network.places[index];
            let more = format!(
                "[cluster]\nlisten = [\"{}:7480\"]\nheartbeat = [\"{}:7480\"]\n",
                place.data, place.heartbeat
            );
            let prefix = place.prefix_on(processors[index]);
            let prefix: Vec<&str> = prefix.iter().map(String::as_str).collect();
            // On loopback guests reach nodes only at its first address, so there ports tell nodes apart.
            let at = place.is_separate().then_some(IpAddr::V4(place.data));
            let wishes = Wishes { more: &more, prefix: &prefix, at, ..*wishes };
            Node::new(house, parent, NAMES[index], &wishes)
        };
        let mut nodes = (0..NAMES.len()).map(node).collect::<Result<Vec<_>>>()?;
        nodes.iter_mut().try_for_each(Node::launch)?;
        nodes.iter_mut().try_for_each(Node::await_ready)?;
        Ok(Self { nodes, network })
    }

    /// Makes a cluster of them.
    pub(crate) fn form(&self) -> Result<()> {
        self.nodes[A].command(&["cluster", "init"])?;
        let token = self.nodes[A].command(&["cluster", "token"])?;
        self.nodes[B].command(&["cluster", "join", "--token", token.trim()])?;
        self.add_witness()
    }

    /// Takes the witness into the cluster of node a.
    pub(crate) fn add_witness(&self) -> Result<()> {
        let token = self.nodes[A].command(&["cluster", "token"])?;
        self.nodes[WITNESS].command(&["cluster", "witness", "--token", token.trim()]).map(drop)
    }

    /// A volume with a copy on both data nodes, for everybody.
    pub(crate) fn create(&self, name: &str, size: &str) -> Result<Mirrored> {
        self.create_with(name, size, &["--replicas", "2"])
    }

    /// A volume for everybody, as these words say.
    pub(crate) fn create_with(&self, name: &str, size: &str, more: &[&str]) -> Result<Mirrored> {
        let exported = self.nodes[A].create_with(name, size, more)?;
        self.await_safe()?;
        Ok(Mirrored { name: name.to_owned(), exported })
    }

    /// Has `node` put the writes of `volume` in order.
    pub(crate) fn lead(&self, volume: &Mirrored, node: usize) -> Result<()> {
        self.switch(volume, A, node)?;
        self.await_safe()
    }

    /// How many pages the intent logs of both copies have written so far.
    pub(crate) fn log_writes(&self, volume: &Mirrored) -> Result<[u64; 2]> {
        let written = |node: usize| self.image(volume, node)?.log_writes();
        Ok([written(A)?, written(B)?])
    }

    /// Where client `number` finds `volume`: a portal of each data node, of iSCSI for half of the clients.
    pub(crate) fn paths(&self, volume: &Mirrored, number: u64) -> Result<Paths> {
        let portals = |of: fn(&Node) -> SocketAddr| DATA_NODES.map(|n| of(&self.nodes[n])).to_vec();
        let Exported { unit, subsystem } = &volume.exported;
        Ok(if (number / 2).is_multiple_of(2) {
            let initiator = format!("iqn.2026-01.test:client{number}");
            let lun = u8::try_from(unit.lun).context("an odd LUN")?;
            let volume = Volume::Unit { initiator, target: unit.target.clone(), lun };
            Paths { portals: portals(|node| node.iscsi), volume }
        } else {
            let host = format!("nqn.2026-01.test:client{number}");
            let volume = Volume::Subsystem { host, subsystem: subsystem.nqn.clone() };
            Paths { portals: portals(|node| node.nvme), volume }
        })
    }

    /// Waits until both data nodes say that all data are safe.
    pub(crate) fn await_safe(&self) -> Result<()> {
        let begun = Instant::now();
        for node in DATA_NODES {
            while !self.says_safe(node)? {
                if begun.elapsed() > RECOVERY {
                    let said = self.status(node)?;
                    bail!("node {}: not safe after {RECOVERY:?}\n{said}", NAMES[node]);
                }
                std::thread::sleep(POLL);
            }
        }
        Ok(())
    }

    /// Bytes that have gone to `node` over the network of data so far, where that can be counted.
    pub(crate) fn bytes_to(&self, node: usize) -> Result<Option<u64>> {
        self.network.is_separate().then(|| self.network.bytes_to(node)).transpose()
    }

    /// Whether both data nodes say that all data are safe.
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

    /// What a node says of itself and the cluster, whatever that is.
    pub(crate) fn status(&self, node: usize) -> Result<String> {
        let status = self.nodes[node].call(&["status"])?;
        let (said, errors) = (status.stdout, status.stderr);
        Ok(format!("{}{}", String::from_utf8_lossy(&said), String::from_utf8_lossy(&errors)))
    }

    /// Waits until the status of `node` says `words`.
    pub(crate) fn await_words(&self, node: usize, words: &str, limit: Duration) -> Result<()> {
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

    /// Ends all nodes at once, and starts them after `meanwhile`.
    pub(crate) fn blackout(&mut self, meanwhile: impl FnOnce(&Self) -> Result<()>) -> Result<()> {
        self.nodes.iter_mut().try_for_each(Node::kill)?;
        meanwhile(self)?;
        self.nodes.iter_mut().try_for_each(Node::launch)?;
        self.nodes.iter_mut().try_for_each(Node::await_ready)
    }

    /// Asks node `at` to have node `to` put the writes of `volume` in order whenever it is in sync.
    pub(crate) fn switch(&self, volume: &Mirrored, at: usize, to: usize) -> Result<()> {
        self.nodes[at].command(&["volume", "switch", &volume.name, "--to", NAMES[to]]).map(drop)
    }

    /// Compares the copies of a volume. The node of the primary copy is asked: only that one does it.
    pub(crate) fn verify(&self, volume: &Mirrored) -> Result<()> {
        let shown = self.nodes[A].query(&["volume", "show", &volume.name])?;
        let copies = shown.pointer("/copies").and_then(Value::as_array).context("no copies")?;
        let primary = copies.iter().find(|c| c.get("primary") == Some(&true.into()));
        let name = primary.and_then(|copy| copy.get("node")?.as_str());
        let at = NAMES.iter().position(|node| Some(*node) == name).context("no primary")?;
        self.nodes[at].command(&["volume", "mirror", "verify", &volume.name]).map(drop)
    }

    /// How far a node has come; an error while it does not answer.
    pub(crate) fn stage(&self, node: usize) -> Result<Stage> {
        let cluster = self.nodes[node].query(&["cluster", "nodes"])?;
        let waits = cluster.get("waits_for").is_some_and(|why| !why.is_null());
        Ok(match cluster.get("stage").and_then(Value::as_str) {
            Some("alone") => Stage::Alone,
            Some("member") if !waits => Stage::Member,
            _ => Stage::Between,
        })
    }

    /// Whether the secret and the authority of the cluster are being replaced, as a node sees it; true while it does not know.
    pub(crate) fn rotates(&self, node: usize) -> Result<bool> {
        let cluster = self.nodes[node].query(&["cluster", "nodes"])?;
        let is_there = |key| cluster.get(key).is_some_and(|value| !value.is_null());
        Ok(is_there("rotation") || is_there("unread"))
    }

    /// How many nodes, and members of the store with a vote, a node sees.
    pub(crate) fn counts(&self, node: usize) -> Result<(usize, usize)> {
        let cluster = self.nodes[node].query(&["cluster", "nodes"])?;
        let list = |key| cluster.get(key).and_then(Value::as_array).context("an odd answer");
        let votes = |m: &&Value| m.get("votes").and_then(Value::as_bool) == Some(true);
        let members = list("store")?;
        ensure!(members.iter().filter(votes).count() == members.len(), "somebody has no vote");
        Ok((list("nodes")?.len(), members.len()))
    }

    /// The members of the store, as processes: children of the nodes.
    pub(crate) fn store_members(&self) -> Result<Vec<Pid>> {
        let members = self.nodes.iter().map(members_of).collect::<Result<Vec<_>>>()?;
        Ok(members.concat())
    }

    /// Ends the member of the store that `node` runs, as `kill -9` does, unless it has ended by itself.
    pub(crate) fn kill_store_member(&self, node: usize) -> Result<()> {
        let members = members_of(&self.nodes[node])?;
        members.into_iter().try_for_each(|member| match kill_process(member, Signal::KILL) {
            Ok(()) | Err(Errno::SRCH) => Ok(()),
            Err(error) => Err(error).context("cannot kill a member of the store"),
        })
    }

    /// Has the member of the store that `node` runs lead it.
    pub(crate) fn move_store_leader(&self, node: usize) -> Result<()> {
        store::move_leader(&self.store_members()?, &members_of(&self.nodes[node])?)
    }

    /// Sends `signal` to all members of the store, and to nothing else.
    pub(crate) fn signal_store(&self, signal: Signal) -> Result<()> {
        let members = self.store_members()?;
        ensure!(members.len() == 3, "{} members of the store are running", members.len());
        for member in members {
            kill_process(member, signal).context("cannot signal a member of the store")?;
        }
        Ok(())
    }

    /// Ends all nodes in order, the witness last.
    pub(crate) fn stop(&mut self) -> Result<()> {
        for (node, name) in self.nodes.iter_mut().zip(NAMES) {
            let status = node.stop()?;
            ensure!(status.success(), "node {name} ended with {status}");
        }
        Ok(())
    }

    /// What the nodes have logged last, but for the coming and going of initiators and what their stores say.
    pub(crate) fn show_logs(&self, house: &House) {
        const LINES: usize = 25;
        const LEFT_OUT: [&str; 2] = [" INFO target::", " WARN etcd: "];
        for (node, name) in self.nodes.iter().zip(NAMES) {
            let log = node.log().unwrap_or_else(|why| format!("{why:#}"));
            let told = |line: &&str| !LEFT_OUT.iter().any(|words| line.contains(words));
            let told: Vec<&str> = log.lines().filter(told).collect();
            let last = told[told.len().saturating_sub(LINES)..].join("\n");
            house.display.line(&format!("--- log of {name}\n{last}"));
        }
    }

    /// How many bytes of `volume` each copy keeps, holes not counted.
    pub(crate) fn allocated(&self, volume: &Mirrored) -> Result<[u64; 2]> {
        let of = |node: usize| self.image(volume, node)?.allocated();
        Ok([of(A)?, of(B)?])
    }

    /// Compares the data of two volumes at each node, byte by byte.
    pub(crate) fn volumes_are_equal(&self, one: &Mirrored, other: &Mirrored) -> Result<()> {
        for node in DATA_NODES {
            let different = self.image(one, node)?.first_difference(&self.image(other, node)?)?;
            if let Some(at) = different {
                bail!("{} and {} differ at byte {at} at {}", one.name, other.name, NAMES[node]);
            }
        }
        Ok(())
    }

    fn image(&self, volume: &Mirrored, node: usize) -> Result<Image> {
        let path = find_image(&self.nodes[node].directory, &volume.name)?;
        Image::open(&path).with_context(|| format!("image {}", path.display()))
    }

    /// Compares the data of both copies, byte by byte. No load may run; what was in flight gets a moment to land.
    pub(crate) fn copies_are_equal(&self, volume: &Mirrored) -> Result<()> {
        let images = [self.image(volume, A)?, self.image(volume, B)?];
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
