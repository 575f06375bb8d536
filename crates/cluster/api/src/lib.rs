//! The REST API of a node, typed once.
//!
//! [`endpoint`] lists what can be asked: method, path, types of the body and of the answer. The
//! server routes by it, [`client`] calls by it, and [`openapi`] describes it; there is no second
//! definition. Every type that comes from outside checks itself while it is parsed, so what the
//! server holds is valid.

mod access;
pub mod client;
mod cluster;
pub mod endpoint;
mod error;
mod initiator;
mod invalid;
mod mirror;
mod name;
pub mod openapi;
mod pool;
mod recovery;
mod reservation;
mod session;
mod size;
mod status;
mod volume;

pub use access::{
    Access, Chap, ChapUser, Dhchap, DhchapHost, DhchapSecret, HostDhchap, HostTls, InitiatorChap,
    InitiatorUser, MutualChap, Secret, Tls, TlsHost, TlsKey,
};
pub use cluster::{
    BeginCluster, Cluster, ClusterNode, ClusterStage, ClusterToken, CreateToken, JoinCluster,
    JoinInfo, JoinList, JoinState, LeaveCluster, NodeRole, Rotation, RotationStage, StoreMember,
    TokenInfo, TokenList, TokenState, WhichId, WhichNode,
};
pub use error::{ApiError, Code};
pub use initiator::Initiator;
pub use invalid::Invalid;
pub use mirror::{
    AddCopy, CopyState, Differing, ForceCopy, RemoveCopy, ReplaceCopy, SetCopies, SwitchTo,
    TakeOver, UnreadableBytes, Verification, Verify, VolumeCopy,
};
pub use name::{PoolName, VolumeName};
pub use pool::{
    AddDisks, ClearErrors, CreatePool, DiskState, LostBlocks, MAX_DISKS, OpenPool, Pool,
    PoolCapacity, PoolDisk, PoolList, PoolState, Raid, Rebuild, RemoveDisk, ReplaceDisk, Scrub,
    check_strip,
};
pub use recovery::{
    AdoptImage, AdoptedImage, DiscardImage, FindPools, ImportPool, ImportablePool, ImportablePools,
    ImportedPool, NewStore, OrphanedImage, OrphanedImages, PlannedCopy, PlannedVolume,
    RecoverCluster, RecoveryPlan,
};
pub use reservation::{Registration, Reservations};
pub use session::{Protocol, Session, SessionList};
pub use size::{Size, check_volume_size};
pub use status::{
    Capacity, Finding, Health, Memory, NodeInfo, Severity, Status, Verdict, VolumeCounts,
};
pub use volume::{
    Backing, BlockSize, CreateVolume, CreateVolumes, CreatedVolume, CreatedVolumes, Grow,
    Initiators, IscsiExport, MAX_BATCH, MapVolume, NewBacking, NvmeExport, Protocols, TargetUnit,
    VhostUserExport, Volume, VolumeIo, VolumeList, VolumeState,
};
