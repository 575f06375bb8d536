//! What a measurement is of, and its figures.

use serde_json::{Value, json};
use std::fmt;

/// A client's operation, 4 KiB each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Operation {
    /// `iscsi-perf`, random.
    RandomRead,
    /// A random read with [`minimal_client`](super::minimal_client).
    MinimalClientRead,
    /// A random write with it.
    MinimalClientWrite,
    /// `qemu-img bench -w`, sequential.
    Write,
    /// The bare echo, without storage.
    Echo,
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::RandomRead => "random read",
            Self::MinimalClientRead => "random read, lean client",
            Self::MinimalClientWrite => "random write, lean client",
            Self::Write => "write",
            Self::Echo => "echo",
        })
    }
}

/// The load of a client.
pub(super) struct Load {
    pub(super) operation: Operation,
    pub(super) depth: u32,
    pub(super) seconds: u64,
}

/// The result of one run of a client.
#[derive(Clone, Copy, Debug)]
pub(super) struct Figures {
    pub(super) per_second: f64,
    /// Latency in microseconds: the median for the minimal client, otherwise the mean, which is the
    /// depth over the rate, since the clients keep the depth filled.
    pub(super) latency_us: f64,
    /// Processor time of the server for each operation, in microseconds.
    pub(super) server_us: f64,
}

/// Figures and what they belong to.
#[derive(Clone, Debug)]
pub(super) struct Sample {
    pub(super) server: &'static str,
    pub(super) backing: &'static str,
    pub(super) operation: Operation,
    pub(super) depth: u32,
    pub(super) figures: Figures,
}

impl Sample {
    pub(super) fn new(
        server: &'static str,
        backing: &'static str,
        load: &Load,
        figures: Figures,
    ) -> Self {
        Self { server, backing, operation: load.operation, depth: load.depth, figures }
    }

    pub(super) fn json(&self) -> Value {
        json!({
            "server": self.server,
            "backing": self.backing,
            "operation": self.operation.to_string(),
            "depth": self.depth,
            "per_second": self.figures.per_second,
            "latency_us": self.figures.latency_us,
            "server_us": self.figures.server_us,
        })
    }
}
