//! The nodes of a cluster: which can be probed, and how commands name them.

use cluster::identity::Role;
use cluster::nodes::{NodeView, Nodes};

/// Whether a node can be probed: a witness accepts no connections.
pub fn can_be_probed(view: &NodeView) -> bool {
    view.record.role == Role::Data
}

/// How a command names a node: by its name, or by number if the name is ambiguous.
pub fn node_argument(nodes: &Nodes, view: &NodeView) -> String {
    let NodeView { record, .. } = view;
    let mut others = nodes.values().filter(|other| other.record.node != record.node);
    let is_number = record.name.parse::<u16>().is_ok();
    match is_number || others.any(|other| other.record.name == record.name) {
        true => record.node.to_string(),
        false => record.name.clone(),
    }
}
