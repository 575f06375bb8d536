//! The networks of a cluster on one machine: a network namespace for each node, two bridges (data and heartbeat), and ways to
//! cut what runs over them. Clients and guests are at the bridge's own address.
//!
//! Where namespaces are not permitted every node has loopback addresses of its own; there nothing can be cut.

use crate::{
    house::House,
    ledger::skip,
    namespace::{self, ip},
    process::{Daemon, must},
};
use anyhow::{Context, Result, bail};
use std::{
    fs,
    net::Ipv4Addr,
    path::{Path, PathBuf},
    process::Command,
    time::{Duration, Instant},
};

/// The bridges: what nodes and initiators say to each other, and leases.
const DATA: &str = "data";
const BEAT: &str = "beat";
/// How long a namespace may take to come up.
const START_LIMIT: Duration = Duration::from_secs(10);

/// What is cut between two nodes. The link between a node and its initiators stays.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cut {
    /// The network of data, with all that nodes say to each other there.
    Data,
    /// The network of leases.
    Heartbeat,
    /// What members of the store say to each other, and the nodes to them.
    Store,
}

impl Cut {
    /// As nft writes it, for packets from one node to another.
    fn matches(self, from: &Place, to: &Place) -> Vec<String> {
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

/// Where a node is.
pub(crate) struct Place {
    /// Its address for initiators and for data of other nodes.
    pub(crate) data: Ipv4Addr,
    /// Its address for leases only.
    pub(crate) heartbeat: Ipv4Addr,
    number: u8,
    /// Keeps the namespace.
    holder: Option<Daemon>,
}

impl Place {
    fn namespace(&self) -> Option<PathBuf> {
        Some(PathBuf::from(format!("/proc/{}/ns/net", self.holder.as_ref()?.id())))
    }

    /// Words before a program that is to run there.
    pub(crate) fn prefix(&self) -> Vec<String> {
        let enter = |path: PathBuf| vec!["nsenter".to_owned(), format!("--net={}", path.display())];
        self.namespace().map(enter).unwrap_or_default()
    }

    /// The same for one that is to run there on `processor`.
    pub(crate) fn prefix_on(&self, processor: Option<usize>) -> Vec<String> {
        let pinned = |cpu: usize| ["taskset".to_owned(), "-c".to_owned(), cpu.to_string()];
        self.prefix().into_iter().chain(processor.into_iter().flat_map(pinned)).collect()
    }

    /// Whether it is a network of its own.
    pub(crate) fn is_separate(&self) -> bool {
        self.holder.is_some()
    }
}

/// The networks of a cluster.
pub(crate) struct Network {
    pub(crate) places: Vec<Place>,
}

impl Network {
    /// Networks for `count` nodes.
    pub(crate) fn new(house: &House, count: u8) -> Result<Self> {
        let mut network = Self { places: Vec::new() };
        if namespace::inside() {
            Self::build()?;
        }
        (0..count).try_for_each(|_| network.add(house).map(drop))?;
        Ok(network)
    }

    /// What the cables lead to.
    fn build() -> Result<()> {
        for (bridge, address) in [(DATA, "10.98.1.254/24"), (BEAT, "10.98.2.254/24")] {
            ip(&["link", "add", bridge, "type", "bridge"])?;
            ip(&["address", "add", address, "dev", bridge])?;
            ip(&["link", "set", bridge, "up"])?;
        }
        // A switch between two machines asks no firewall of theirs. Not there where this was never wanted.
        let _ = fs::write("/proc/sys/net/bridge/bridge-nf-call-iptables", "0");
        // Guests are behind a tap of their own, and reach the nodes over this host.
        fs::write("/proc/sys/net/ipv4/ip_forward", "1").context("cannot forward packets")?;
        nft(
            "add table bridge cuts; add chain bridge cuts forward { type filter hook forward priority 0; }",
        )
    }

    /// A place for one more node.
    pub(crate) fn add(&mut self, house: &House) -> Result<&Place> {
        let number = u8::try_from(self.places.len() + 1).context("too many nodes")?;
        let inside = namespace::inside();
        let place = if inside { Place::new(house, number)? } else { Place::on_loopback(number) };
        self.places.push(place);
        self.places.last().context("no place")
    }

    /// Whether each node has a network of its own.
    pub(crate) fn is_separate(&self) -> bool {
        self.places.iter().all(Place::is_separate)
    }

    /// Skips what needs links to cut where there are none.
    fn can_cut(&self) -> Result<()> {
        if self.is_separate() {
            return Ok(());
        }
        skip("links can only be cut in namespaces")
    }

    /// From now on nothing of `cut` comes from node `from` to node `to`; the way back stays open.
    pub(crate) fn cut_one_way(&self, from: usize, to: usize, cut: Cut) -> Result<()> {
        self.can_cut()?;
        for what in cut.matches(&self.places[from], &self.places[to]) {
            nft(&format!("add rule bridge cuts forward {what} drop"))?;
        }
        Ok(())
    }

    /// From now on nothing of `cut` passes between two nodes.
    pub(crate) fn cut(&self, one: usize, other: usize, cut: Cut) -> Result<()> {
        self.cut_one_way(one, other, cut)?;
        self.cut_one_way(other, one, cut)
    }

    /// Takes all of a node's cables out, those to initiators too.
    pub(crate) fn unplug(&self, node: usize) -> Result<()> {
        self.can_cut()?;
        self.places[node].cables(|cable| ip(&["link", "set", cable, "down"]))
    }

    /// Shows that each cut cuts what it names and nothing else, and that mending mends. Needs no process at the other end: that a
    /// connection is refused shows that packets pass.
    pub(crate) fn prove_cuts(&self) -> Result<()> {
        self.can_cut()?;
        let [first, second, ..] = &self.places[..] else { bail!("too few nodes") };
        let roads = |expected: [bool; 4], when: &str| -> Result<()> {
            let begun = Instant::now();
            loop {
                let found = [
                    first.reaches(second.data, 9)?,
                    first.reaches(second.data, 2379)?,
                    first.reaches(second.heartbeat, 9)?,
                    second.reaches(first.data, 9)?,
                ];
                if found == expected {
                    return Ok(());
                }
                // Behind a cable that was out, an address has to be asked for anew.
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

    /// Bytes that have gone to `node` over the network of data so far.
    pub(crate) fn bytes_to(&self, node: usize) -> Result<u64> {
        self.can_cut()?;
        let cable = format!("{DATA}{}", self.places[node].number);
        let counters = fs::read_to_string("/proc/self/net/dev").context("no /proc/self/net/dev")?;
        sent(&counters, &cable).with_context(|| format!("nothing is known of {cable}"))
    }

    /// Mends everything.
    pub(crate) fn heal(&self) -> Result<()> {
        if !self.is_separate() {
            return Ok(());
        }
        nft("flush chain bridge cuts forward")?;
        self.places
            .iter()
            .try_for_each(|place| place.cables(|cable| ip(&["link", "set", cable, "up"])))
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        if self.is_separate() {
            // The cables go with their namespaces; the next tier starts with none of this.
            let _ = nft("delete table bridge cuts");
            let _ = ip(&["link", "delete", DATA]);
            let _ = ip(&["link", "delete", BEAT]);
        }
    }
}

impl Place {
    fn on_loopback(number: u8) -> Self {
        let data = Ipv4Addr::new(127, 0, 1, number);
        let heartbeat = Ipv4Addr::new(127, 0, 2, number);
        Self { data, heartbeat, number, holder: None }
    }

    fn new(house: &House, number: u8) -> Result<Self> {
        let mut command = Command::new("unshare");
        command.args(["--net", "sleep", "infinity"]);
        let mut holder = Daemon::start(house.scratch(), "network namespace", &mut command)?;
        let own = fs::read_link("/proc/self/ns/net").context("no network namespaces")?;
        let theirs = PathBuf::from(format!("/proc/{}/ns/net", holder.id()));
        holder.wait_until(START_LIMIT, || {
            fs::read_link(&theirs).is_ok_and(|namespace| namespace != own)
        })?;
        let data = Ipv4Addr::new(10, 98, 1, number);
        let heartbeat = Ipv4Addr::new(10, 98, 2, number);
        let place = Self { data, heartbeat, number, holder: Some(holder) };
        place.wire(DATA, data)?;
        place.wire(BEAT, heartbeat)?;
        place.inside(&["ip", "link", "set", "lo", "up"])?;
        place.inside(&["ip", "route", "add", "default", "via", "10.98.1.254"])?;
        Ok(place)
    }

    /// A cable from `bridge` to an interface of the same name in the namespace.
    fn wire(&self, bridge: &str, address: Ipv4Addr) -> Result<()> {
        let (cable, holder) = (format!("{bridge}{}", self.number), self.holder()?.to_string());
        let peer = ["peer", "name", bridge, "netns", &holder];
        // That of the tier before goes with its namespace, whenever the kernel gets round to it.
        let _ = ip(&["link", "delete", &cable]);
        ip(&[&["link", "add", &cable, "type", "veth"][..], &peer[..]].concat())?;
        ip(&["link", "set", &cable, "master", bridge, "up"])?;
        self.inside(&["ip", "address", "add", &format!("{address}/24"), "dev", bridge])?;
        self.inside(&["ip", "link", "set", bridge, "up"])
    }

    fn holder(&self) -> Result<u32> {
        Ok(self.holder.as_ref().context("no namespace")?.id())
    }

    fn cables(&self, each: impl Fn(&str) -> Result<()>) -> Result<()> {
        [DATA, BEAT].iter().try_for_each(|bridge| each(&format!("{bridge}{}", self.number)))
    }

    /// Whether a connection from here is accepted or refused there, rather than unanswered.
    fn reaches(&self, address: Ipv4Addr, port: u16) -> Result<bool> {
        /// What timeout(1) ends with when it was needed.
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
        must(Command::new(Path::new(program)).args(rest).args(words))
    }
}

/// nftables, in this tool's own namespace.
fn nft(script: &str) -> Result<()> {
    must(Command::new("nft").arg(script))
}

/// Bytes that `interface` has sent, by /proc/net/dev: eight counters of what was received, then those of what was sent.
fn sent(counters: &str, interface: &str) -> Option<u64> {
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
        assert_eq!(sent(text, "data1"), Some(77));
        assert_eq!(sent(text, "data12"), Some(9));
        assert_eq!(sent(text, "data2"), None);
    }
}
