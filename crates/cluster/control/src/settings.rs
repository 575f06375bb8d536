//! The settings of the control plane.

use std::path::PathBuf;

use config::Config;
use engine::Portals;
use uuid::Uuid;

use crate::reserved_paths::ReservedPaths;

/// The part of the configuration that the control plane uses.
#[derive(Clone, Debug)]
pub struct ControlSettings {
    /// Name of the node.
    pub name: String,
    /// The node's data directory.
    pub data_dir: PathBuf,
    /// Identity of the data directory.
    pub data_dir_id: Uuid,
    /// Why the data directory has no anchor outside of it that identifies this node, if it has
    /// none.
    pub anchor_error: Option<String>,
    /// Whether iSCSI logins at a node that does not serve the volume are redirected to one that
    /// does.
    pub redirect: bool,
    /// The iSNS server to register with.
    pub isns: Option<String>,
    /// Prefix of the names of new iSCSI targets.
    pub iscsi_authority: String,
    /// Prefix of the names of new NVMe subsystems.
    pub nvme_authority: String,
    /// Most volumes.
    pub max_volumes: usize,
    /// Buffer memory of each core, in bytes.
    pub memory_bytes: u64,
    /// Free space below which the status warns, in percent of a file system; 0 for never.
    pub low_space_percent: u64,
    /// Addresses at which initiators are served.
    pub portals: Portals,
    /// Directory of the vhost-user sockets of virtual machines.
    pub vhost_user: Option<PathBuf>,
    /// Cluster settings.
    pub cluster: config::Cluster,
    /// The node's own files, on which no volume and no pool may lie.
    pub(crate) reserved_paths: ReservedPaths,
}

impl ControlSettings {
    /// The settings from `config`, with the addresses at which the node listens.
    #[must_use]
    pub fn new(config: &Config, portals: Portals) -> Self {
        Self {
            name: config.name.clone(),
            data_dir: config.data_dir.clone(),
            data_dir_id: Uuid::nil(),
            anchor_error: None,
            redirect: config.iscsi.redirect,
            isns: config.iscsi.isns.clone(),
            iscsi_authority: config.iscsi.authority.clone(),
            nvme_authority: config.nvme.authority.clone(),
            max_volumes: config.limits.volumes,
            memory_bytes: config.cores.memory_bytes,
            low_space_percent: config.disks.low_space_percent,
            portals,
            vhost_user: config.vhost_user.directory.clone(),
            cluster: config.cluster.clone(),
            reserved_paths: ReservedPaths::from_config(config),
        }
    }
}
