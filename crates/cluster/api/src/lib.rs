//! The REST API of a node, typed once.
//!
//! [`endpoint`] lists the endpoints: method, path, types of the body and of the response. The
//! server routes by it, [`client`] calls by it, and [`openapi`] describes it; there is no second
//! definition. Every type from outside validates itself while it is parsed, so what the server
//! holds is valid.

mod access;
pub mod client;
mod cluster;
pub mod endpoint;
mod error;
mod initiator;
mod invalid_value;
mod name;
pub mod openapi;
mod pool;
mod recovery;
mod replica;
mod reservation;
mod session;
mod size;
mod status;
mod volume;

pub use access::{
    Access, Chap, ChapUser, Dhchap, DhchapHost, DhchapSecret, HostDhchap, HostTls, InitiatorChap,
    InitiatorChapUser, MutualChap, Secret, Tls, TlsHost, TlsKey,
};
pub use cluster::{
    Cluster, ClusterNode, ClusterStage, CreateTokenRequest, CreatedToken, EntryId,
    InitClusterRequest, JoinClusterRequest, JoinInfo, JoinList, JoinState, LeaveClusterRequest,
    NodeRole, NodeSelector, Rotation, RotationStage, StoreMember, TokenInfo, TokenList, TokenState,
};
pub use error::{ApiError, ErrorCode};
pub use initiator::Initiator;
pub use invalid_value::InvalidValue;
pub use name::{PoolName, VolumeName};
pub use pool::{
    AddDisks, ClearErrors, CreatePoolRequest, DiskState, LostBlocks, MAX_DISKS, OpenPoolRequest,
    Pool, PoolCapacity, PoolDisk, PoolList, PoolState, RaidLevel, Rebuild, RemoveDisk, ReplaceDisk,
    Scrub, check_chunk_size,
};
pub use recovery::{
    AdoptImageRequest, AdoptedImage, DiscardImageRequest, FindPools, ImportPoolRequest,
    ImportablePool, ImportablePools, ImportedPool, OrphanedImage, OrphanedImages, PlannedReplica,
    PlannedVolume, RecoverClusterRequest, RecoveryPlan, ReplacementStore,
};
pub use replica::{
    AddReplicaRequest, ByteRange, ForcePrimaryRequest, MismatchRange, RemoveReplicaRequest,
    ReplaceReplicaRequest, ReplicaState, SetReplicaCountRequest, SwitchPrimaryRequest, TakeOver,
    Verification, Verify, VolumeReplica,
};
pub use reservation::{Registration, Reservations};
pub use session::{Protocol, Session, SessionList};
pub use size::{Size, check_volume_size};
pub use status::{
    Capacity, Finding, Health, Memory, NodeInfo, Severity, Status, Verdict, VolumeCounts,
};
pub use volume::{
    Backing, BlockSize, CreateVolumeRequest, CreateVolumeResult, CreateVolumeResults,
    CreateVolumesRequest, GrowVolumeRequest, InitiatorList, IscsiExport, MAX_VOLUMES_PER_REQUEST,
    MapVolume, NewBacking, NvmeExport, Protocols, TargetLun, VhostUserExport, Volume, VolumeIo,
    VolumeList, VolumeState,
};
