//! The simulated disk behind [`crate::disk::Disk`].

use crate::buf::{Bufs, BufsMut};
use crate::disk::DiskError;

/// A simulated disk. None can be made yet.
#[derive(Debug)]
pub(crate) enum SimDisk {}

impl SimDisk {
    pub(crate) async fn read(&self, _at: u64, _into: BufsMut) -> Result<BufsMut, DiskError> {
        match *self {}
    }

    pub(crate) async fn write(&self, _at: u64, _data: Bufs) -> Result<(), DiskError> {
        match *self {}
    }

    pub(crate) async fn sync(&self) -> Result<(), DiskError> {
        match *self {}
    }

    pub(crate) async fn punch(&self, _at: u64, _bytes: u64) -> Result<(), DiskError> {
        match *self {}
    }

    pub(crate) async fn zero(&self, _at: u64, _bytes: u64) -> Result<(), DiskError> {
        match *self {}
    }

    pub(crate) async fn allocate(&self, _at: u64, _bytes: u64) -> Result<(), DiskError> {
        match *self {}
    }

    pub(crate) async fn set_len(&self, _bytes: u64) -> Result<(), DiskError> {
        match *self {}
    }

    pub(crate) async fn allocated(&self) -> Result<u64, DiskError> {
        match *self {}
    }
}
