//! The endpoints of a node's API.

use http::Method;
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use utoipa::ToSchema;

use crate::{
    AddDisks, AddReplicaRequest, AdoptImageRequest, AdoptedImage, Chap, ClearErrors, Cluster,
    CreatePoolRequest, CreateTokenRequest, CreateVolumeRequest, CreateVolumeResults,
    CreateVolumesRequest, CreatedToken, DiscardImageRequest, EntryId, ErrorCode, FindPools,
    ForcePrimaryRequest, GrowVolumeRequest, Health, HostDhchap, HostTls, ImportPoolRequest,
    ImportablePools, ImportedPool, InitClusterRequest, InitiatorChap, InitiatorList,
    JoinClusterRequest, JoinList, LeaveClusterRequest, MapVolume, NodeSelector, OpenPoolRequest,
    OrphanedImages, Pool, PoolList, Protocols, RecoverClusterRequest, RecoveryPlan, RemoveDisk,
    RemoveReplicaRequest, ReplaceDisk, ReplaceReplicaRequest, Reservations, SessionList,
    SetReplicaCountRequest, Status, SwitchPrimaryRequest, TakeOver, TokenList, Verification,
    Verify, Volume, VolumeList,
};

/// A boolean query parameter of an endpoint.
#[derive(Clone, Copy, Debug)]
pub struct QueryFlag {
    /// Its name.
    pub name: &'static str,
    /// What it does when it is `true`.
    pub description: &'static str,
}

/// An endpoint. The server routes by it, the client calls by it.
pub trait Endpoint {
    /// Name in the OpenAPI description, unique.
    const OPERATION_ID: &'static str;
    /// HTTP method.
    const METHOD: Method;
    /// Path; `{name}` stands for the name of a volume or a pool.
    const PATH: &'static str;
    /// HTTP status of a successful response.
    const STATUS: u16;
    /// What it does, in a sentence.
    const SUMMARY: &'static str;
    /// Query parameters.
    const FLAGS: &'static [QueryFlag];
    /// Error codes to expect, besides those of every endpoint.
    const ERROR_CODES: &'static [ErrorCode];
    /// Body of the request; [`NoBody`] if there is none.
    type Body: Payload;
    /// Body of the response; [`NoBody`] if there is none.
    type Response: Payload;
}

/// A body of a request or response, or none.
pub trait Payload: Serialize + DeserializeOwned + Send + 'static {
    /// Whether there is no body.
    const IS_EMPTY: bool;
    /// Name of its schema.
    fn schema_name() -> Option<String>;
    /// Adds its schema and those it refers to.
    fn schemas(into: &mut Schemas);
}

/// Named schemas, as utoipa collects them.
pub type Schemas = Vec<(String, utoipa::openapi::RefOr<utoipa::openapi::schema::Schema>)>;

/// No body.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NoBody;

impl Payload for NoBody {
    const IS_EMPTY: bool = true;

    fn schema_name() -> Option<String> {
        None
    }

    fn schemas(_: &mut Schemas) {}
}

impl<T: ToSchema + Serialize + DeserializeOwned + Send + 'static> Payload for T {
    const IS_EMPTY: bool = false;

    fn schema_name() -> Option<String> {
        Some(T::name().into_owned())
    }

    fn schemas(into: &mut Schemas) {
        into.push((T::name().into_owned(), T::schema()));
        T::schemas(into);
    }
}

/// Declares the endpoints: a type for each, and [`visit`], which visits all of them.
macro_rules! endpoints {
    ($($(#[$doc:meta])* $name:ident $method:ident $path:literal $body:ty => $status:literal $answer:ty;
        $summary:literal; $(flag $flag:expr;)* refuses [$($refusal:expr),*];)*) => {
        $(
            $(#[$doc])*
            #[derive(Clone, Copy, Debug)]
            pub struct $name;

            impl Endpoint for $name {
                const OPERATION_ID: &'static str = stringify!($name);
                const METHOD: Method = Method::$method;
                const PATH: &'static str = $path;
                const STATUS: u16 = $status;
                const SUMMARY: &'static str = $summary;
                const FLAGS: &'static [QueryFlag] = &[$($flag),*];
                const ERROR_CODES: &'static [ErrorCode] = &[$($refusal),*];
                type Body = $body;
                type Response = $answer;
            }
        )*

        /// An operation on every endpoint.
        pub trait EndpointVisitor {
            /// Visits one endpoint.
            fn endpoint<E: Endpoint>(&mut self);
        }

        /// Visits every endpoint.
        pub fn visit(visitor: &mut impl EndpointVisitor) {
            $(visitor.endpoint::<$name>();)*
        }
    };
}

/// The flag of [`DeleteVolume`].
pub const DELETE_FORCE: QueryFlag = QueryFlag {
    name: "force",
    description: "Delete the volume even while initiators are logged in to it.",
};

/// The other flag of [`DeleteVolume`].
pub const DELETE_ALLOW_DATA_LOSS: QueryFlag = QueryFlag {
    name: "discard",
    description: "Delete the volume even while no replica serves it: its data is lost unchecked.",
};

/// The flag of [`MapTarget`].
pub const MAP_FORCE: QueryFlag = QueryFlag {
    name: "force",
    description: "Do it even while initiators are logged in to the volume.",
};

/// The flag of [`DeletePool`].
pub const POOL_FORCE: QueryFlag = QueryFlag {
    name: "force",
    description: "Remove the record of the pool even if it cannot be opened. The data on its disks \
        is kept.",
};

endpoints! {
    /// Check that the node answers.
    GetHealth GET "/v1/health" NoBody => 200 Health;
        "Says whether the node responds and serves.";
        refuses [];

    /// Show the status: whether the data is safe.
    GetStatus GET "/v1/status" NoBody => 200 Status;
        "Says whether the data is safe, and why.";
        refuses [];

    /// List the sessions of initiators.
    ListSessions GET "/v1/sessions" NoBody => 200 SessionList;
        "Lists the sessions of initiators.";
        refuses [];

    /// List the volumes.
    ListVolumes GET "/v1/volumes" NoBody => 200 VolumeList;
        "Lists the volumes.";
        refuses [];

    /// Create a volume.
    CreateVolume POST "/v1/volumes" CreateVolumeRequest => 201 Volume;
        "Creates a volume. Repeating a request returns the volume that it created.";
        refuses [ErrorCode::Exists, ErrorCode::Backing, ErrorCode::NoSpace];

    /// Create several volumes.
    CreateVolumes POST "/v1/volume-batches" CreateVolumesRequest => 200 CreateVolumeResults;
        "Creates several volumes, a few at a time, and returns the result for each.";
        refuses [];

    /// Show a volume.
    GetVolume GET "/v1/volumes/{name}" NoBody => 200 Volume;
        "Shows a volume.";
        refuses [ErrorCode::NotFound];

    /// Delete a volume and its data.
    DeleteVolume DELETE "/v1/volumes/{name}" NoBody => 204 NoBody;
        "Deletes a volume and its data.";
        flag DELETE_FORCE;
        flag DELETE_ALLOW_DATA_LOSS;
        refuses [ErrorCode::NotFound, ErrorCode::InUse, ErrorCode::Conflict, ErrorCode::Backing];

    /// Make a volume larger.
    GrowVolume POST "/v1/volumes/{name}/grow" GrowVolumeRequest => 200 Volume;
        "Makes a volume larger while it is in use.";
        refuses [ErrorCode::NotFound, ErrorCode::Conflict, ErrorCode::Backing, ErrorCode::NoSpace];

    /// Add a replica of a volume.
    AddReplica POST "/v1/volumes/{name}/mirror/add" AddReplicaRequest => 200 Volume;
        "Adds a replica of a volume on another node, and begins to resync it.";
        refuses [ErrorCode::NotFound, ErrorCode::Conflict, ErrorCode::Backing, ErrorCode::NoSpace];

    /// Remove a replica of a volume.
    RemoveReplica POST "/v1/volumes/{name}/mirror/remove" RemoveReplicaRequest => 200 Volume;
        "Removes a replica of a volume, unless it is the last one in sync.";
        refuses [ErrorCode::NotFound, ErrorCode::Conflict];

    /// Replace a replica of a volume.
    ReplaceReplica POST "/v1/volumes/{name}/mirror/replace" ReplaceReplicaRequest => 200 Volume;
        "Replaces a replica of a volume with one on another node, or a lost one with a new one.";
        refuses [ErrorCode::NotFound, ErrorCode::Conflict, ErrorCode::Backing, ErrorCode::NoSpace];

    /// Set the number of replicas of a volume.
    SetReplicaCount POST "/v1/volumes/{name}/mirror/set" SetReplicaCountRequest => 200 Volume;
        "Sets the wanted number of replicas of a volume. Missing replicas are created \
         automatically (cluster.repair_after_s).";
        refuses [ErrorCode::NotFound, ErrorCode::Conflict];

    /// Compare the replicas of a volume.
    VerifyVolume POST "/v1/volumes/{name}/mirror/verify" Verify => 200 Verification;
        "Compares the replicas of a volume. Send it to the node of the primary.";
        refuses [ErrorCode::NotFound, ErrorCode::Conflict];

    /// Choose the primary of a volume.
    SwitchPrimary POST "/v1/volumes/{name}/switch-primary" SwitchPrimaryRequest => 200 Volume;
        "Makes the replica of a node the primary, as long as it is in sync.";
        refuses [ErrorCode::NotFound, ErrorCode::Conflict];

    /// Continue with one replica, whatever is lost.
    ForcePrimary POST "/v1/volumes/{name}/force-primary" ForcePrimaryRequest => 200 Volume;
        "Makes the replica of this node the primary, without the others. Acknowledged writes may \
         be lost.";
        refuses [ErrorCode::NotFound, ErrorCode::Conflict];

    /// Take over a volume's image from its last owner.
    TakeOverVolume POST "/v1/volumes/{name}/take-over" TakeOver => 200 Volume;
        "Opens a volume whose image another node used last and has not released. Refused while \
         that node uses it.";
        refuses [ErrorCode::NotFound, ErrorCode::Conflict, ErrorCode::Backing];

    /// Choose the protocols that export a volume.
    SetProtocols PUT "/v1/volumes/{name}/protocols" Protocols => 200 Volume;
        "Chooses the protocols that export a volume.";
        refuses [ErrorCode::NotFound, ErrorCode::Conflict];

    /// Choose the target and LUN of a volume.
    MapTarget PUT "/v1/volumes/{name}/target" MapVolume => 200 Volume;
        "Exports a volume through the iSCSI target and NVMe subsystem of another one, or through \
         its own, or changes its LUN.";
        flag MAP_FORCE;
        refuses [ErrorCode::NotFound, ErrorCode::InUse, ErrorCode::Conflict];

    /// Let initiators reach a volume.
    AllowInitiators POST "/v1/volumes/{name}/allow" InitiatorList => 200 Volume;
        "Allows initiators to access a volume.";
        refuses [ErrorCode::NotFound, ErrorCode::Conflict];

    /// Stop initiators from reaching a volume.
    DenyInitiators POST "/v1/volumes/{name}/deny" InitiatorList => 200 Volume;
        "Ends the access of initiators to a volume, and their sessions.";
        refuses [ErrorCode::NotFound, ErrorCode::Conflict];

    /// Require CHAP from the iSCSI initiators of a volume.
    SetChap PUT "/v1/volumes/{name}/chap" Chap => 200 Volume;
        "Requires CHAP authentication from the iSCSI initiators of a volume.";
        refuses [ErrorCode::NotFound, ErrorCode::Conflict];

    /// Stop requiring CHAP.
    ClearChap DELETE "/v1/volumes/{name}/chap" NoBody => 200 Volume;
        "Requires no CHAP authentication from the iSCSI initiators of a volume.";
        refuses [ErrorCode::NotFound, ErrorCode::Conflict];

    /// Require CHAP with its own credentials from one iSCSI initiator.
    SetInitiatorChap PUT "/v1/volumes/{name}/chap/initiator" InitiatorChap => 200 Volume;
        "Sets or removes the CHAP user and secret of one iSCSI initiator of a volume.";
        refuses [ErrorCode::NotFound, ErrorCode::Conflict];

    /// Require DH-HMAC-CHAP from one NVMe host.
    SetHostDhchap PUT "/v1/volumes/{name}/dhchap" HostDhchap => 200 Volume;
        "Sets or removes the secret (DH-HMAC-CHAP) with which one NVMe host of a volume must \
         authenticate.";
        refuses [ErrorCode::NotFound, ErrorCode::Conflict];

    /// Set the TLS key of one NVMe host.
    SetHostTls PUT "/v1/volumes/{name}/tls" HostTls => 200 Volume;
        "Sets or removes the TLS key with which one NVMe host of a volume must or may connect.";
        refuses [ErrorCode::NotFound, ErrorCode::Conflict];

    /// Show the reservations of a volume.
    GetReservations GET "/v1/volumes/{name}/reservations" NoBody => 200 Reservations;
        "Shows the reservations of a volume. Send it to a node that serves it.";
        refuses [ErrorCode::NotFound, ErrorCode::Backing];

    /// Remove the reservations of a volume.
    ClearReservations DELETE "/v1/volumes/{name}/reservations" NoBody => 200 Reservations;
        "Removes all registrations and reservations of a volume.";
        refuses [ErrorCode::NotFound, ErrorCode::Backing];

    /// List the disk pools.
    ListPools GET "/v1/pools" NoBody => 200 PoolList;
        "Lists the disk pools of the node.";
        refuses [];

    /// Create a pool.
    CreatePool POST "/v1/pools" CreatePoolRequest => 201 Pool;
        "Creates a pool from disks of this node. Repeating a request returns the pool that it \
         created.";
        refuses [ErrorCode::Exists, ErrorCode::Conflict, ErrorCode::Backing];

    /// Show a pool.
    GetPool GET "/v1/pools/{name}" NoBody => 200 Pool;
        "Shows a pool and its disks.";
        refuses [ErrorCode::NotFound];

    /// Delete a pool.
    DeletePool DELETE "/v1/pools/{name}" NoBody => 204 NoBody;
        "Deletes a pool without volumes. Its disks can be reused.";
        flag POOL_FORCE;
        refuses [ErrorCode::NotFound, ErrorCode::Conflict, ErrorCode::Backing];

    /// Add disks to a pool.
    AddPoolDisks POST "/v1/pools/{name}/add" AddDisks => 200 Pool;
        "Adds disks to a pool, for data or as spares.";
        refuses [ErrorCode::NotFound, ErrorCode::Conflict, ErrorCode::Backing, ErrorCode::NoSpace];

    /// Remove a disk from a pool.
    RemovePoolDisk POST "/v1/pools/{name}/remove" RemoveDisk => 200 Pool;
        "Begins to remove a disk from a pool. Its data is first moved to other disks.";
        refuses [ErrorCode::NotFound, ErrorCode::Conflict, ErrorCode::Backing, ErrorCode::NoSpace];

    /// Replace a disk of a pool.
    ReplacePoolDisk POST "/v1/pools/{name}/replace" ReplaceDisk => 200 Pool;
        "Begins to replace a disk with another one.";
        refuses [ErrorCode::NotFound, ErrorCode::Conflict, ErrorCode::Backing, ErrorCode::NoSpace];

    /// Scrub a pool.
    ScrubPool POST "/v1/pools/{name}/scrub" NoBody => 200 Pool;
        "Begins a scrub of a pool: reads all of it, and repairs damaged blocks.";
        refuses [ErrorCode::NotFound, ErrorCode::Conflict, ErrorCode::Backing];

    /// Reset the error counts of a pool's disks.
    ClearPoolErrors POST "/v1/pools/{name}/clear" ClearErrors => 200 Pool;
        "Resets the error counters of a disk, or of all disks of a pool, for example after a cable \
         was replaced.";
        refuses [ErrorCode::NotFound, ErrorCode::Conflict, ErrorCode::Backing];

    /// Open a pool without lost disks, or take it over.
    OpenPool POST "/v1/pools/{name}/open" OpenPoolRequest => 200 Pool;
        "Opens a pool without disks that are lost for good, with the data that only they have; or \
         takes it over from a node that is lost.";
        refuses [ErrorCode::NotFound, ErrorCode::Conflict, ErrorCode::Backing];

    /// List pools on disks that the node does not know.
    FindImportablePools POST "/v1/pool-imports/find" FindPools => 200 ImportablePools;
        "Lists the pools on disks of this machine that the node does not know.";
        refuses [ErrorCode::Conflict];

    /// Import a pool that the node does not know.
    ImportPool POST "/v1/pool-imports" ImportPoolRequest => 200 ImportedPool;
        "Imports a pool that the node does not know; its volumes can then be adopted.";
        refuses [ErrorCode::NotFound, ErrorCode::Exists, ErrorCode::Conflict, ErrorCode::Backing];

    /// List the images that no record names.
    ListOrphanedImages GET "/v1/images" NoBody => 200 OrphanedImages;
        "Lists the images on the node that no record references as the replica of a volume.";
        refuses [];

    /// Adopt an image as a volume.
    AdoptImage POST "/v1/images/adopt" AdoptImageRequest => 200 AdoptedImage;
        "Adopts an image that no record references as a volume, or shows what would be done.";
        refuses [ErrorCode::Exists, ErrorCode::Conflict, ErrorCode::Backing];

    /// Erase an image.
    DiscardImage POST "/v1/images/discard" DiscardImageRequest => 204 NoBody;
        "Erases an image that no record references. Its data is lost.";
        refuses [ErrorCode::Conflict, ErrorCode::Backing];

    /// The cluster and its nodes.
    GetCluster GET "/v1/cluster" NoBody => 200 Cluster;
        "Shows the cluster of the node, its nodes and the members of its store.";
        refuses [];

    /// Create a cluster.
    InitCluster POST "/v1/cluster/init" InitClusterRequest => 202 Cluster;
        "Makes this node the first of a new cluster. Its volumes are kept; its services restart.";
        refuses [ErrorCode::Conflict];

    /// Join a cluster.
    JoinCluster POST "/v1/cluster/join" JoinClusterRequest => 202 Cluster;
        "Joins this node to an existing cluster; its services restart. If the join needs approval, \
         the node stays standalone and `waits_for` says what it waits for: repeat the request \
         after the approval.";
        refuses [ErrorCode::Conflict];

    /// Leave the cluster.
    LeaveCluster POST "/v1/cluster/leave" LeaveClusterRequest => 202 Cluster;
        "Removes this node, or one that is lost for good, from the cluster.";
        refuses [ErrorCode::Conflict, ErrorCode::NotFound];

    /// Recover the cluster.
    RecoverCluster POST "/v1/cluster/recover" RecoverClusterRequest => 200 RecoveryPlan;
        "Creates a new store if the cluster's is lost, and recovers volumes from their images; or \
         shows what would be done.";
        refuses [ErrorCode::Conflict];

    /// Create a join token.
    CreateToken POST "/v1/cluster/tokens" CreateTokenRequest => 201 CreatedToken;
        "Creates a token with which other nodes join. Each request creates another one.";
        refuses [ErrorCode::Conflict];

    /// List the join tokens.
    ListTokens GET "/v1/cluster/tokens" NoBody => 200 TokenList;
        "Lists the tokens with which other nodes join.";
        refuses [ErrorCode::Conflict];

    /// Revoke a join token.
    RevokeToken POST "/v1/cluster/tokens/revoke" EntryId => 200 TokenList;
        "Revokes a token: no node can join with it any more. Repeating it changes nothing.";
        refuses [ErrorCode::Conflict, ErrorCode::NotFound];

    /// List the join requests.
    ListJoins GET "/v1/cluster/joins" NoBody => 200 JoinList;
        "Lists the nodes that have asked to join the cluster.";
        refuses [ErrorCode::Conflict];

    /// Approve a join request.
    ApproveJoin POST "/v1/cluster/joins/approve" EntryId => 200 JoinList;
        "Approves the join request of a node. Repeating it changes nothing.";
        refuses [ErrorCode::Conflict, ErrorCode::NotFound];

    /// Refuse a join request.
    RefuseJoin POST "/v1/cluster/joins/refuse" EntryId => 200 JoinList;
        "Refuses the join request of a node. Repeating it changes nothing.";
        refuses [ErrorCode::Conflict, ErrorCode::NotFound];

    /// Replace the cluster's credentials.
    RotateCredentials POST "/v1/cluster/rotate" NoBody => 202 Cluster;
        "Replaces the cluster's secret and authority with new ones, while the nodes serve. Tokens \
         are revoked. `rotation` of the cluster shows the progress.";
        refuses [ErrorCode::Conflict];

    /// Drain a node.
    DrainNode POST "/v1/cluster/drain" NodeSelector => 200 Cluster;
        "Drains a node: it stops serving volumes.";
        refuses [ErrorCode::Conflict, ErrorCode::NotFound];

    /// Resume a drained node.
    ResumeNode POST "/v1/cluster/resume" NodeSelector => 200 Cluster;
        "Resumes a drained node: it serves volumes again.";
        refuses [ErrorCode::Conflict, ErrorCode::NotFound];
}
