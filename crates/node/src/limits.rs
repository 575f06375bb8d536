//! Limits that the system puts on the process.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Raises what may be raised: open files, for connections, and locked memory, for the buffers that
/// the kernel reads and writes directly.
pub fn raise() {
    for resource in [Resource::Nofile, Resource::Memlock] {
        let Rlimit { current, maximum } = getrlimit(resource);
        if current != maximum
            && let Err(error) = setrlimit(resource, Rlimit { current: maximum, maximum })
        {
            tracing::warn!(?resource, %error, "a limit of the process cannot be raised");
        }
    }
}
