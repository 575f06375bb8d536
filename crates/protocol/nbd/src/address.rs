//! Addresses of servers.

use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;

/// The port that IANA assigned to NBD.
pub const DEFAULT_PORT: u16 = 10809;

/// Where a server listens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Address {
    /// A Unix socket.
    Unix(PathBuf),
    /// TCP, usually port [`DEFAULT_PORT`].
    Tcp(SocketAddr),
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unix(path) => path.display().fmt(f),
            Self::Tcp(address) => address.fmt(f),
        }
    }
}
