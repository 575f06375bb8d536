//! The store member that a node of a cluster runs.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use cluster::identity::{LocalStoreMember, TransportSecurity};
use cluster::node_membership::store_member_name;
use peer::NodeId;

/// Client and peer port of the store members.
const CLIENT_PORT: u16 = 2379;
const PEER_PORT: u16 = 2380;

/// The program of the store is not installed.
#[derive(Debug, thiserror::Error)]
#[error("{} is not installed", .0.display())]
pub struct StoreProgramMissing(PathBuf);

/// The store member that this node is to run.
///
/// # Errors
/// [`StoreProgramMissing`].
pub fn own_store_member(
    cluster: &config::Cluster,
    at: SocketAddr,
    node: NodeId,
    protection: &TransportSecurity,
) -> Result<LocalStoreMember, StoreProgramMissing> {
    let store = &cluster.store;
    if !is_installed(&store.program) {
        return Err(StoreProgramMissing(store.program.clone()));
    }
    let scheme = protection.scheme();
    let url = |configured: Option<SocketAddr>, port| {
        format!("{scheme}://{}", configured.unwrap_or_else(|| SocketAddr::new(at.ip(), port)))
    };
    Ok(LocalStoreMember {
        name: store_member_name(node),
        peer_url: url(store.peer, PEER_PORT),
        client_url: url(store.client, CLIENT_PORT),
    })
}

fn is_installed(program: &Path) -> bool {
    if program.is_absolute() {
        return program.is_file();
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|dir| dir.join(program).is_file())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_are_looked_for_where_a_shell_would() {
        assert!(is_installed(Path::new("sh")) && is_installed(Path::new("/bin/sh")));
        assert!(!is_installed(Path::new("no-such-program")));
        assert!(!is_installed(Path::new("/bin")));
    }
}
