//! Limits that the system puts on the process.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::config::Config;

/// Open files that a node needs beside those of its clients and volumes.
const OWN_FILES: u64 = 256;

/// Nodes that may have copies of a volume beside this one, and connections of a session with each,
/// without those for leases.
const OTHERS: u64 = 2;
const LANES: u64 = 3;

/// Files that a node may have open by its configuration.
fn files(config: &Config, cores: u64) -> u64 {
    let connections = cores.saturating_mul(config.limits.connections as u64);
    let addresses = config.cluster.listen.len() + config.cluster.heartbeat.len();
    // An image, and in a cluster what its mirror says to the others: leases by every address.
    let of_volume = match config.cluster.listen.is_empty() {
        true => 1,
        false => 1 + OTHERS * (LANES + addresses as u64),
    };
    let volumes = of_volume.saturating_mul(config.limits.volumes as u64);
    connections.saturating_add(volumes).saturating_add(OWN_FILES)
}

/// Raises what may be raised: open files, for connections and volumes, and locked memory, for the
/// buffers that the kernel reads and writes directly. Says so where that is too little.
pub fn raise(config: &Config) {
    for resource in [Resource::Nofile, Resource::Memlock] {
        let Rlimit { current, maximum } = getrlimit(resource);
        if current != maximum
            && let Err(error) = setrlimit(resource, Rlimit { current: maximum, maximum })
        {
            tracing::warn!(?resource, %error, "a limit of the process cannot be raised");
        }
    }
    let cores = crate::engine::core_count(config) as u64;
    let needed = files(config, cores);
    if let Some(allowed) = getrlimit(Resource::Nofile).current
        && allowed < needed
    {
        tracing::warn!(
            allowed,
            needed,
            "the process may open too few files for limits.connections and limits.volumes; raise \
             the limit (LimitNOFILE of the service) or lower those"
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
        assert_eq!(files(&config, 2), 20 + 1000 + OWN_FILES);
        config.cluster.listen = vec!["192.0.2.1:7480".parse().unwrap()];
        config.cluster.heartbeat = vec!["198.51.100.1:7480".parse().unwrap()];
        assert_eq!(files(&config, 2), 20 + 11 * 1000 + OWN_FILES);
    }
}
