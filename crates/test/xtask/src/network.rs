//! The networks of a cluster on one machine: a network namespace for each node, two bridges (data
//! and heartbeat), and link cuts. Clients and guests use the bridge's own address.
//!
//! Where namespaces are not permitted, every node has its own loopback addresses and no link can be
//! cut.

use crate::{
    namespace::{self, ip},
    process::{Daemon, run_checked},
    run_context::RunContext,
    test_report::skip,
};
use anyhow::{Context, Result, bail};
use std::{
    fs,
    net::Ipv4Addr,
    path::{Path, PathBuf},
    process::Command,
    time::{Duration, Instant},
};

/// The bridges: one for data and initiators, one for leases.
const DATA_BRIDGE: &str = "data";
const HEARTBEAT_BRIDGE: &str = "beat";
/// How long a namespace may take to start.
const START_LIMIT: Duration = Duration::from_secs(10);

/// The traffic that is cut between two nodes. Links between nodes and initiators stay up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cut {
    /// The data network, with all traffic between nodes there.
    Data,
    /// The heartbeat network, with the leases.
    Heartbeat,
    /// Traffic between etcd members, and from nodes to them.
    Store,
}

impl Cut {
    /// The nft match expressions for packets from one node to another.
    fn matches(self, from: &NodeNetwork, to: &NodeNetwork) -> Vec<String> {
        let data = format!("ip saddr {} ip daddr {}", from.data, to.data);
        match self {
            Self::Data => vec![data],
            Self::Heartbeat => {
                vec![format!("ip saddr {} ip daddr {}", from.heartbeat, to.heartbeat)]
            }
            Self::Store => ["dport", "sport"]
                .map(|port| format!("{data} tcp {port} {{ 2379, 2380 }}"))
                .to_vec(),
        }
    }
}

/// A node's network.
pub(crate) struct NodeNetwork {
    /// Its address for initiators and for other nodes' data.
    pub(crate) data: Ipv4Addr,
    /// Its address for leases only.
    pub(crate) heartbeat: Ipv4Addr,
    number: u8,
    /// Keeps the namespace alive.
    namespace_holder: Option<Daemon>,
}

impl NodeNetwork {
    fn namespace(&self) -> Option<PathBuf> {
        Some(PathBuf::from(format!("/proc/{}/ns/net", self.namespace_holder.as_ref()?.id())))
    }

    /// The command prefix that runs a program in this network.
    pub(crate) fn prefix(&self) -> Vec<String> {
        let enter = |path: PathBuf| vec!["nsenter".to_owned(), format!("--net={}", path.display())];
        self.namespace().map(enter).unwrap_or_default()
    }

    /// Like [`Self::prefix`], pinned to `processor`.
    pub(crate) fn prefix_on(&self, processor: Option<usize>) -> Vec<String> {
        let pinned = |cpu: usize| ["taskset".to_owned(), "-c".to_owned(), cpu.to_string()];
        self.prefix().into_iter().chain(processor.into_iter().flat_map(pinned)).collect()
    }

    /// Whether the node has its own network namespace.
    pub(crate) fn is_separate(&self) -> bool {
        self.namespace_holder.is_some()
    }
}

/// The networks of a cluster.
pub(crate) struct Network {
    pub(crate) nodes: Vec<NodeNetwork>,
}

impl Network {
    /// Creates networks for `count` nodes.
    pub(crate) fn new(context: &RunContext, count: u8) -> Result<Self> {
        let mut network = Self { nodes: Vec::new() };
        if namespace::is_inside() {
            Self::build()?;
        }
        (0..count).try_for_each(|_| network.add(context).map(drop))?;
        Ok(network)
    }

    /// Creates the bridges.
    fn build() -> Result<()> {
        for (bridge, address) in
            [(DATA_BRIDGE, "10.98.1.254/24"), (HEARTBEAT_BRIDGE, "10.98.2.254/24")]
        {
            ip(&["link", "add", bridge, "type", "bridge"])?;
            ip(&["address", "add", address, "dev", bridge])?;
            ip(&["link", "set", bridge, "up"])?;
        }
        // Bridged packets must bypass iptables. The file is missing if br_netfilter was never
        // loaded.
        let _ = fs::write("/proc/sys/net/bridge/bridge-nf-call-iptables", "0");
        // Guests have their own tap and reach the nodes through this host.
        fs::write("/proc/sys/net/ipv4/ip_forward", "1").context("cannot forward packets")?;
        nft(
            "add table bridge cuts; add chain bridge cuts forward { type filter hook forward priority 0; }",
        )
    }

    /// Adds the network of one more node.
    pub(crate) fn add(&mut self, context: &RunContext) -> Result<&NodeNetwork> {
        let number = u8::try_from(self.nodes.len() + 1).context("too many nodes")?;
        let inside = namespace::is_inside();
        let node = if inside {
            NodeNetwork::new(context, number)?
        } else {
            NodeNetwork::on_loopback(number)
        };
        self.nodes.push(node);
        self.nodes.last().context("no place")
    }

    /// Whether each node has its own network namespace.
    pub(crate) fn is_separate(&self) -> bool {
        self.nodes.iter().all(NodeNetwork::is_separate)
    }

    /// Skips the check where links cannot be cut.
    fn can_cut(&self) -> Result<()> {
        if self.is_separate() {
            return Ok(());
        }
        skip("links can only be cut in namespaces")
    }

    /// Drops `cut` traffic from node `from` to node `to`; the other direction stays open.
    pub(crate) fn cut_one_way(&self, from: usize, to: usize, cut: Cut) -> Result<()> {
        self.can_cut()?;
        for what in cut.matches(&self.nodes[from], &self.nodes[to]) {
            nft(&format!("add rule bridge cuts forward {what} drop"))?;
        }
        Ok(())
    }

    /// Drops `cut` traffic between two nodes in both directions.
    pub(crate) fn cut(&self, one: usize, other: usize, cut: Cut) -> Result<()> {
        self.cut_one_way(one, other, cut)?;
        self.cut_one_way(other, one, cut)
    }

    /// Unplugs all of a node's cables, those to initiators included.
    pub(crate) fn unplug(&self, node: usize) -> Result<()> {
        self.can_cut()?;
        self.nodes[node].for_each_cable(|cable| ip(&["link", "set", cable, "down"]))
    }

    /// Checks that each cut drops exactly what it names and that healing restores it. Needs no
    /// listener: a refused connection shows that packets pass.
    pub(crate) fn check_cuts(&self) -> Result<()> {
        self.can_cut()?;
        let [first, second, ..] = &self.nodes[..] else { bail!("too few nodes") };
        let roads = |expected: [bool; 4], when: &str| -> Result<()> {
            let begun = Instant::now();
            loop {
                let found = [
                    first.can_reach(second.data, 9)?,
                    first.can_reach(second.data, 2379)?,
                    first.can_reach(second.heartbeat, 9)?,
                    second.can_reach(first.data, 9)?,
                ];
                if found == expected {
                    return Ok(());
                }
                // After a cable was unplugged, ARP has to resolve the address again.
                if begun.elapsed() > START_LIMIT {
                    bail!("{when}: data, store, heartbeat, data back: {found:?}");
                }
            }
        };
        roads([true; 4], "nothing cut")?;
        for (cut, expected) in [
            (Cut::Data, [false, false, true, false]),
            (Cut::Heartbeat, [true, true, false, true]),
            (Cut::Store, [true, false, true, true]),
        ] {
            self.cut(0, 1, cut)?;
            roads(expected, &format!("{cut:?}"))?;
            self.heal()?;
        }
        self.unplug(1)?;
        roads([false; 4], "unplugged")?;
        self.heal()?;
        roads([true; 4], "mended")
    }

    /// Bytes sent to `node` over the data network so far.
    pub(crate) fn bytes_to(&self, node: usize) -> Result<u64> {
        self.can_cut()?;
        let cable = format!("{DATA_BRIDGE}{}", self.nodes[node].number);
        let counters = fs::read_to_string("/proc/self/net/dev").context("no /proc/self/net/dev")?;
        bytes_sent(&counters, &cable).with_context(|| format!("nothing is known of {cable}"))
    }

    /// Restores all links.
    pub(crate) fn heal(&self) -> Result<()> {
        if !self.is_separate() {
            return Ok(());
        }
        nft("flush chain bridge cuts forward")?;
        self.nodes
            .iter()
            .try_for_each(|node| node.for_each_cable(|cable| ip(&["link", "set", cable, "up"])))
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        if self.is_separate() {
            // The cables go with their namespaces; the next tier starts with none of this.
            let _ = nft("delete table bridge cuts");
            let _ = ip(&["link", "delete", DATA_BRIDGE]);
            let _ = ip(&["link", "delete", HEARTBEAT_BRIDGE]);
        }
    }
}

impl NodeNetwork {
    fn on_loopback(number: u8) -> Self {
        let data = Ipv4Addr::new(127, 0, 1, number);
        let heartbeat = Ipv4Addr::new(127, 0, 2, number);
        Self { data, heartbeat, number, namespace_holder: None }
    }

    fn new(context: &RunContext, number: u8) -> Result<Self> {
        let mut command = Command::new("unshare");
        command.args(["--net", "sleep", "infinity"]);
        let mut holder = Daemon::start(context.scratch(), "network namespace", &mut command)?;
        let own = fs::read_link("/proc/self/ns/net").context("no network namespaces")?;
        let theirs = PathBuf::from(format!("/proc/{}/ns/net", holder.id()));
        holder.wait_until(START_LIMIT, || {
            fs::read_link(&theirs).is_ok_and(|namespace| namespace != own)
        })?;
        let data = Ipv4Addr::new(10, 98, 1, number);
        let heartbeat = Ipv4Addr::new(10, 98, 2, number);
        let network = Self { data, heartbeat, number, namespace_holder: Some(holder) };
        network.add_cable(DATA_BRIDGE, data)?;
        network.add_cable(HEARTBEAT_BRIDGE, heartbeat)?;
        network.inside(&["ip", "link", "set", "lo", "up"])?;
        network.inside(&["ip", "route", "add", "default", "via", "10.98.1.254"])?;
        Ok(network)
    }

    /// Adds a cable from `bridge` to an interface of the same name in the namespace.
    fn add_cable(&self, bridge: &str, address: Ipv4Addr) -> Result<()> {
        let (cable, holder) = (format!("{bridge}{}", self.number), self.holder()?.to_string());
        let peer = ["peer", "name", bridge, "netns", &holder];
        // The previous tier's cable may still exist: the kernel deletes namespaces asynchronously.
        let _ = ip(&["link", "delete", &cable]);
        ip(&[&["link", "add", &cable, "type", "veth"][..], &peer[..]].concat())?;
        ip(&["link", "set", &cable, "master", bridge, "up"])?;
        self.inside(&["ip", "address", "add", &format!("{address}/24"), "dev", bridge])?;
        self.inside(&["ip", "link", "set", bridge, "up"])
    }

    fn holder(&self) -> Result<u32> {
        Ok(self.namespace_holder.as_ref().context("no namespace")?.id())
    }

    fn for_each_cable(&self, each: impl Fn(&str) -> Result<()>) -> Result<()> {
        [DATA_BRIDGE, HEARTBEAT_BRIDGE]
            .iter()
            .try_for_each(|bridge| each(&format!("{bridge}{}", self.number)))
    }

    /// Whether a connection attempt is accepted or refused, rather than unanswered.
    fn can_reach(&self, address: Ipv4Addr, port: u16) -> Result<bool> {
        /// The exit status of timeout(1) after a timeout.
        const TOO_LATE: i32 = 124;
        let prefix = self.prefix();
        let (program, rest) = prefix.split_first().context("no namespace")?;
        let dial = format!("exec 3<> /dev/tcp/{address}/{port}");
        let out = Command::new(program)
            .args(rest)
            .args(["timeout", "1", "bash", "-c", &dial])
            .output()
            .context("cannot run bash")?;
        let said = String::from_utf8_lossy(&out.stderr);
        Ok(out.status.code() != Some(TOO_LATE) && !said.contains("No route to host"))
    }

    /// Runs a program in the namespace.
    fn inside(&self, words: &[&str]) -> Result<()> {
        let prefix = self.prefix();
        let (program, rest) = prefix.split_first().context("no namespace")?;
        run_checked(Command::new(Path::new(program)).args(rest).args(words))
    }
}

/// Runs nft in this tool's own namespace.
fn nft(script: &str) -> Result<()> {
    run_checked(Command::new("nft").arg(script))
}

/// Bytes `interface` has sent, from /proc/net/dev: eight receive counters, then the send counters.
fn bytes_sent(counters: &str, interface: &str) -> Option<u64> {
    let line = counters
        .lines()
        .find_map(|line| line.trim_start().strip_prefix(interface)?.strip_prefix(':'))?;
    line.split_whitespace().nth(8)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_belong_to_their_interface() {
        let text = "Inter-| Receive\n face |bytes\n data1: 10 1 0 0 0 0 0 0 77 2 0 0 0 0 0 0\ndata12:5 1 0 0 0 0 0 0 9 2 0 0 0 0 0 0\n";
        assert_eq!(bytes_sent(text, "data1"), Some(77));
        assert_eq!(bytes_sent(text, "data12"), Some(9));
        assert_eq!(bytes_sent(text, "data2"), None);
    }
}
