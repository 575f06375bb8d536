//! Chooses the nodes for the replicas of a volume: a pure function of the nodes.

use std::cmp::Reverse;

use api::{Backing, NewBacking};
use peer::NodeId;
use uuid::Uuid;

/// A node that may get a replica.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Candidate {
    /// The node.
    pub node: NodeId,
    /// Its name.
    pub name: String,
    /// Its failure domain.
    pub failure_domain: String,
    /// Why it is excluded now, if it is.
    pub exclusion: Option<&'static str>,
    /// Free bytes where it keeps volumes, as far as is known.
    pub free_bytes: u64,
    /// Replicas that it keeps.
    pub replicas: usize,
}

/// Chooses `count` nodes for a volume that has replicas on `taken`: the named ones, then one after
/// the other a node whose failure domain is unused so far, if there is one, with the most space,
/// the fewest replicas, the lowest number.
///
/// # Errors
/// Says which named node is not available, or how many are.
pub fn choose_nodes(
    all: &[Candidate],
    taken: &[NodeId],
    named: &[NodeId],
    count: usize,
) -> Result<Vec<NodeId>, String> {
    let find = |node: &NodeId| all.iter().find(|c| c.node == *node);
    let mut chosen: Vec<&Candidate> = Vec::new();
    for node in named {
        let candidate = find(node).ok_or_else(|| format!("there is no node {node}"))?;
        let name = &candidate.name;
        if taken.contains(node) || chosen.iter().any(|c| c.node == *node) {
            return Err(format!("node {name} cannot have two replicas"));
        }
        if let Some(why) = candidate.exclusion {
            return Err(format!("node {name} {why}"));
        }
        chosen.push(candidate);
    }
    while chosen.len() < count {
        let used = |c: &&Candidate| {
            taken.contains(&c.node) || chosen.iter().any(|chosen| chosen.node == c.node)
        };
        let domains: Vec<_> = (taken.iter().filter_map(find))
            .chain(chosen.iter().copied())
            .map(|c| c.failure_domain.as_str())
            .collect();
        let rank = |c: &&Candidate| {
            let shares = domains.contains(&c.failure_domain.as_str());
            (shares, Reverse(c.free_bytes), c.replicas, c.node)
        };
        let eligible = all.iter().filter(|c| c.exclusion.is_none() && !used(c));
        let Some(best) = eligible.min_by_key(rank) else {
            return Err(shortage_text(all, taken, chosen.len(), count));
        };
        chosen.push(best);
    }
    Ok(chosen.iter().map(|c| c.node).collect())
}

/// The error when no node can keep one more replica, with the reason for each.
pub(crate) fn no_candidate_text(all: &[Candidate], taken: &[NodeId]) -> String {
    let others = all.iter().filter(|c| !taken.contains(&c.node));
    let why = others.filter_map(|c| Some(format!("{} {}", c.name, c.exclusion?)));
    no_candidate_text_for(&why.collect::<Vec<_>>())
}

/// The error when no node can keep one more replica, for these reasons.
pub(crate) fn no_candidate_text_for(why: &[String]) -> String {
    let why = if why.is_empty() { String::new() } else { format!(" ({})", why.join(", ")) };
    format!("no other node can take a replica now{why}")
}

fn shortage_text(all: &[Candidate], taken: &[NodeId], found: usize, count: usize) -> String {
    let exclusion_text = |c: &Candidate| Some(format!("{} {}", c.name, c.exclusion?));
    let others: Vec<_> =
        all.iter().filter(|c| !taken.contains(&c.node)).filter_map(exclusion_text).collect();
    let why = if others.is_empty() { String::new() } else { format!(" ({})", others.join(", ")) };
    let are = if count == 1 { "is" } else { "are" };
    format!(
        "{} {are} needed, but only {found} can take a replica{why}",
        wire::plural(count, "node")
    )
}

/// The equivalent of a backing on another node, if it needs no path there.
pub fn equivalent_backing(backing: &Backing, volume: Uuid) -> Option<NewBacking> {
    match backing {
        Backing::Pool { pool } => Some(NewBacking::Pool { pool: pool.clone() }),
        Backing::File { path } => {
            let by_itself = format!("-{volume}.img");
            let name = path.file_name()?.to_str()?;
            name.ends_with(&by_itself).then_some(NewBacking::File { path: None })
        }
        Backing::Device { .. } => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn candidate(node: u16, domain: &str, free_bytes: u64) -> Candidate {
        Candidate {
            node: NodeId(node),
            name: format!("n{node}"),
            failure_domain: domain.into(),
            exclusion: None,
            free_bytes,
            replicas: 0,
        }
    }

    fn nodes(all: &[u16]) -> Vec<NodeId> {
        all.iter().copied().map(NodeId).collect()
    }

    #[test]
    fn copies_go_to_different_domains_and_where_space_is() {
        let all = [
            candidate(1, "a", 10),
            candidate(2, "a", 90),
            candidate(3, "b", 5),
            candidate(4, "c", 4),
        ];
        assert_eq!(choose_nodes(&all, &[], &[], 2), Ok(nodes(&[2, 3])));
        assert_eq!(choose_nodes(&all, &nodes(&[2]), &[], 1), Ok(nodes(&[3])));
        assert_eq!(
            choose_nodes(&all, &nodes(&[2, 3, 4]), &[], 1),
            Ok(nodes(&[1])),
            "rather than none"
        );
        assert_eq!(choose_nodes(&all, &[], &nodes(&[1]), 3), Ok(nodes(&[1, 3, 4])));
        let even = [candidate(2, "b", 1), candidate(1, "a", 1)];
        assert_eq!(choose_nodes(&even, &[], &[], 1), Ok(nodes(&[1])));
        let mut busy = even;
        busy[1].replicas = 1;
        assert_eq!(choose_nodes(&busy, &[], &[], 1), Ok(nodes(&[2])));
    }

    #[test]
    fn what_is_in_the_way_is_named() {
        let mut all = [candidate(1, "a", 1), candidate(2, "b", 1)];
        all[1].exclusion = Some("is drained");
        let refused = |taken: &[u16], named: &[u16], count| {
            choose_nodes(&all, &nodes(taken), &nodes(named), count).unwrap_err()
        };
        assert_eq!(refused(&[], &[2], 1), "node n2 is drained");
        assert_eq!(
            refused(&[], &[], 2),
            "2 nodes are needed, but only 1 can take a replica (n2 is drained)"
        );
        assert_eq!(refused(&[1], &[1], 1), "node n1 cannot have two replicas");
        assert_eq!(refused(&[], &[1, 1], 2), "node n1 cannot have two replicas");
        assert_eq!(refused(&[], &[7], 1), "there is no node 7");
    }

    #[test]
    fn only_what_every_node_has_is_made_by_itself() {
        let volume = Uuid::from_u128(7);
        let of = |path: &str| equivalent_backing(&Backing::File { path: path.into() }, volume);
        let own = format!("/var/lib/windrose/volumes/web-{volume}.img");
        assert_eq!(of(&own), Some(NewBacking::File { path: None }));
        assert_eq!(of("/srv/web.img"), None);
        assert_eq!(equivalent_backing(&Backing::Device { path: "/dev/sdb".into() }, volume), None);
        let pool: api::PoolName = "tank".parse().unwrap();
        let in_pool = Backing::Pool { pool: pool.clone() };
        assert_eq!(equivalent_backing(&in_pool, volume), Some(NewBacking::Pool { pool }));
    }
}
