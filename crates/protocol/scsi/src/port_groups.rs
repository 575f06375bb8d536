//! The target port groups of a unit: the nodes that serve it, and its access state through each
//! (SPC-4 5.15.2).

use block::Access;

/// One node that serves a unit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PortGroup {
    /// Target port group identifier.
    pub id: u16,
    /// Relative target port identifier of its one port, from 1; unique among groups.
    pub port: u16,
    /// SCSI name string of that port; iSCSI: `NAME,t,0xTPGT`.
    pub name: String,
    /// The access state through it.
    pub access: Access,
}

/// All nodes that serve a unit.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct PortGroups {
    /// Identifier of this node's group; always in the list.
    pub(crate) local: u16,
    pub(crate) all: Vec<PortGroup>,
}

impl PortGroups {
    /// The relative target port identifiers of all nodes.
    pub(crate) fn ports(&self) -> impl Iterator<Item = u16> {
        self.all.iter().map(|group| group.port)
    }
}
