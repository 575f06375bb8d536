//! Resource limits of the process.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use config::Config;

/// Open files that a node needs besides those of its clients and volumes.
const RESERVED_FILES: u64 = 256;

/// Most other nodes with replicas of a volume, and connections to each of them, besides those for
/// leases.
const MAX_PEERS: u64 = 2;
const CONNECTIONS_PER_PEER: u64 = 3;

/// Open files that a node with this configuration may need.
fn required_files(config: &Config, cores: u64) -> u64 {
    let connections = cores.saturating_mul(config.limits.connections as u64);
    let addresses = config.cluster.listen.len() + config.cluster.heartbeat.len();
    // An image; in a cluster also the mirror's connections, with one for leases at each address.
    let per_volume = match config.cluster.listen.is_empty() {
        true => 1,
        false => 1 + MAX_PEERS * (CONNECTIONS_PER_PEER + addresses as u64),
    };
    let volumes = per_volume.saturating_mul(config.limits.volumes as u64);
    connections.saturating_add(volumes).saturating_add(RESERVED_FILES)
}

/// Raises the limits of open files, for connections and volumes, and of locked memory, for the
/// buffers of direct I/O. Warns if the limit of open files is too low.
pub fn raise_process_limits(config: &Config) {
    for resource in [Resource::Nofile, Resource::Memlock] {
        let Rlimit { current, maximum } = getrlimit(resource);
        if current != maximum
            && let Err(error) = setrlimit(resource, Rlimit { current: maximum, maximum })
        {
            tracing::warn!(?resource, %error, "cannot raise a process limit");
        }
    }
    let cores = crate::core_count(config) as u64;
    let needed = required_files(config, cores);
    if let Some(allowed) = getrlimit(Resource::Nofile).current
        && allowed < needed
    {
        tracing::warn!(
            allowed,
            needed,
            "the limit of open files is too low for limits.connections and limits.volumes; raise \
             it (LimitNOFILE of the service) or lower those"
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mirrored_volumes_have_connections_with_the_other_nodes() {
        let mut config = Config::default();
        (config.limits.connections, config.limits.volumes) = (10, 1000);
        assert_eq!(required_files(&config, 2), 20 + 1000 + RESERVED_FILES);
        config.cluster.listen = vec!["192.0.2.1:7480".parse().unwrap()];
        config.cluster.heartbeat = vec!["198.51.100.1:7480".parse().unwrap()];
        assert_eq!(required_files(&config, 2), 20 + 11 * 1000 + RESERVED_FILES);
    }
}
