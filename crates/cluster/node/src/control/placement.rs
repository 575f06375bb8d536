//! Which nodes get the copies of a volume: a pure function of the nodes that there are.

use std::cmp::Reverse;

use peer::NodeId;

/// A node that may get a copy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Candidate {
    /// The node.
    pub(super) node: NodeId,
    /// What it is called.
    pub(super) name: String,
    /// What it fails together with.
    pub(super) domain: String,
    /// Why it gets none now.
    pub(super) unfit: Option<&'static str>,
    /// Bytes that are free where it keeps volumes, as far as is known.
    pub(super) free_bytes: u64,
    /// Copies that it keeps.
    pub(super) copies: usize,
}

/// Chooses `count` nodes for a volume that has copies on `taken`: those that are named, and then
/// one after the other whichever shares its failure domain with none so far, has the most space,
/// the fewest copies, the lowest number.
///
/// # Errors
/// Says which node cannot be had, or how many there are.
pub(super) fn choose(
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
            return Err(format!("node {name} cannot keep two copies"));
        }
        if let Some(why) = candidate.unfit {
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
            .map(|c| c.domain.as_str())
            .collect();
        let better = |c: &&Candidate| {
            let shares = domains.contains(&c.domain.as_str());
            (shares, Reverse(c.free_bytes), c.copies, c.node)
        };
        let fit = all.iter().filter(|c| c.unfit.is_none() && !used(c));
        let Some(best) = fit.min_by_key(better) else {
            return Err(shortage(all, taken, chosen.len(), count));
        };
        chosen.push(best);
    }
    Ok(chosen.iter().map(|c| c.node).collect())
}

/// That no node can keep one more copy, and why each cannot.
pub(super) fn nobody(all: &[Candidate], taken: &[NodeId]) -> String {
    let others = all.iter().filter(|c| !taken.contains(&c.node));
    let why = others.filter_map(|c| Some(format!("{} {}", c.name, c.unfit?)));
    no_other_node(&why.collect::<Vec<_>>())
}

/// That no node can keep one more copy, for these reasons.
pub(super) fn no_other_node(why: &[String]) -> String {
    let why = if why.is_empty() { String::new() } else { format!(" ({})", why.join(", ")) };
    format!("no other node can keep a copy now{why}")
}

fn shortage(all: &[Candidate], taken: &[NodeId], found: usize, count: usize) -> String {
    let unfit = |c: &Candidate| Some(format!("{} {}", c.name, c.unfit?));
    let others: Vec<_> =
        all.iter().filter(|c| !taken.contains(&c.node)).filter_map(unfit).collect();
    let why = if others.is_empty() { String::new() } else { format!(" ({})", others.join(", ")) };
    let are = if count == 1 { "is" } else { "are" };
    format!("{} {are} needed and {found} can be had{why}", wire::count(count, "node"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn candidate(node: u16, domain: &str, free_bytes: u64) -> Candidate {
        Candidate {
            node: NodeId(node),
            name: format!("n{node}"),
            domain: domain.into(),
            unfit: None,
            free_bytes,
            copies: 0,
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
        assert_eq!(choose(&all, &[], &[], 2), Ok(nodes(&[2, 3])));
        assert_eq!(choose(&all, &nodes(&[2]), &[], 1), Ok(nodes(&[3])));
        assert_eq!(choose(&all, &nodes(&[2, 3, 4]), &[], 1), Ok(nodes(&[1])), "rather than none");
        assert_eq!(choose(&all, &[], &nodes(&[1]), 3), Ok(nodes(&[1, 3, 4])));
        let even = [candidate(2, "b", 1), candidate(1, "a", 1)];
        assert_eq!(choose(&even, &[], &[], 1), Ok(nodes(&[1])));
        let mut busy = even;
        busy[1].copies = 1;
        assert_eq!(choose(&busy, &[], &[], 1), Ok(nodes(&[2])));
    }

    #[test]
    fn what_is_in_the_way_is_named() {
        let mut all = [candidate(1, "a", 1), candidate(2, "b", 1)];
        all[1].unfit = Some("is drained");
        let refused = |taken: &[u16], named: &[u16], count| {
            choose(&all, &nodes(taken), &nodes(named), count).unwrap_err()
        };
        assert_eq!(refused(&[], &[2], 1), "node n2 is drained");
        assert_eq!(refused(&[], &[], 2), "2 nodes are needed and 1 can be had (n2 is drained)");
        assert_eq!(refused(&[1], &[1], 1), "node n1 cannot keep two copies");
        assert_eq!(refused(&[], &[1, 1], 2), "node n1 cannot keep two copies");
        assert_eq!(refused(&[], &[7], 1), "there is no node 7");
    }
}
