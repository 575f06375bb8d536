//! The simulator's side of a [`crate::Core`].
//!
//! `Core` hands everything that reaches outside to a [`SimCore`]; [`crate::disk::Disk`] and
//! [`crate::net`] hand operations to a [`disk::SimDisk`], a [`net::SimListener`] and a
//! [`net::SimStream`]. Their methods mirror the real ones.

pub(crate) mod disk;
pub(crate) mod net;

use std::io;
use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use crate::disk::{Backend, DiskInfo, Engine, OpenError, OpenOptions};
use crate::net::{DetachedStream, ListenOptions, Listener, Stream};

/// One simulated core's share of its simulated system. None can be made yet.
pub(crate) enum SimCore {}

impl SimCore {
    pub(crate) fn disk_engine(&self) -> Engine {
        match *self {}
    }

    pub(crate) async fn open_disk(
        &self,
        _path: &Path,
        _how: OpenOptions,
    ) -> Result<(Backend, DiskInfo), OpenError> {
        match *self {}
    }

    pub(crate) async fn remove_file(&self, _path: &Path) -> io::Result<()> {
        match *self {}
    }

    pub(crate) async fn rename(&self, _from: &Path, _to: &Path) -> io::Result<()> {
        match *self {}
    }

    pub(crate) async fn sync_dir(&self, _dir: &Path) -> io::Result<()> {
        match *self {}
    }

    pub(crate) async fn listen(
        &self,
        _at: SocketAddr,
        _how: ListenOptions,
    ) -> io::Result<Listener> {
        match *self {}
    }

    pub(crate) async fn dial(&self, _to: SocketAddr) -> io::Result<Stream> {
        match *self {}
    }

    pub(crate) fn attach(&self, _stream: DetachedStream) -> io::Result<Stream> {
        match *self {}
    }

    pub(crate) fn random_u64(&self) -> u64 {
        match *self {}
    }

    pub(crate) fn wall_clock(&self) -> Duration {
        match *self {}
    }
}
