//! A file or block device of the system: how it is opened, what is known of it, plain calls, and
//! how they fail. Simulated disks have the same properties and errors.

mod blkid;
mod error;
mod file;
mod info;
mod open;
mod options;
mod properties;

pub use blkid::Signature;
pub use error::{DiskError, DiskErrorKind};
pub use info::{DiskInfo, DiskKind, Engine, SparseRun};
pub use options::{OpenError, OpenOptions, OpenReason};

pub(crate) use file::{
    ALLOCATE_MODE, FileDisk, PUNCH_MODE, Vectors, ZERO_MODE, read_vectors, write_vectors,
    zero_transfer_error,
};
pub(crate) use open::{open, remove_file, rename, sync_dir};
