//! The NVMe over TCP protocol machine, sans-io.
