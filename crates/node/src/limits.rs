//! Limits that the system puts on the process.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::config::Config;

/// Open files that a node needs beside those of its clients and volumes.
const OWN_FILES: u64 = 256;

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
    let connections = cores.saturating_mul(config.limits.connections as u64);
    let needed = connections.saturating_add(config.limits.volumes as u64).saturating_add(OWN_FILES);
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
