//! Records: what the store holds of volumes, and the data directory of pools.
//!
//! * [`record`]: the record of a volume, its replicas, exports and secrets;
//! * [`pool_records`]: the records of a node's pools of disks;
//! * [`catalog`]: what initiators see of the volumes;
//! * [`reconcile`]: decides the next step for a volume; pure.

pub mod catalog;
pub mod pool_records;
pub mod reconcile;
pub mod record;
#[cfg(any(test, feature = "testing"))]
pub mod samples;
