//! The endpoints of a node's API.

use http::Method;
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use utoipa::ToSchema;

use crate::{
    AddDisks, AddReplica, AdoptImage, AdoptedImage, Chap, ClearErrors, Cluster, CreatePool,
    CreateToken, CreateVolume, CreateVolumeResults, CreateVolumes, CreatedToken, DiscardImage,
    EntryId, ErrorCode, FindPools, ForcePrimary, GrowVolumeRequest, Health, HostDhchap, HostTls,
    ImportPool, ImportablePools, ImportedPool, InitClusterRequest, InitiatorChap, InitiatorList,
    JoinCluster, JoinList, LeaveCluster, MapVolume, NodeSelector, OpenPool, OrphanedImages, Pool,
    PoolList, Protocols, RecoverCluster, RecoveryPlan, RemoveDisk, RemoveReplica, ReplaceDisk,
    ReplaceReplica, Reservations, SessionList, SetReplicaCount, Status, SwitchPrimary, TakeOver,
    TokenList, Verification, Verify, Volume, VolumeList,
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
    description: "Delete the volume even while no copy of it serves: what its copies hold is lost unseen.",
};

/// The flag of [`MapTarget`].
pub const MAP_FORCE: QueryFlag = QueryFlag {
    name: "force",
    description: "Do it even while initiators are logged in to the volume.",
};

/// The flag of [`DeletePool`].
pub const POOL_FORCE: QueryFlag = QueryFlag {
    name: "force",
    description: "Forget the pool even if it cannot be opened. What its disks hold stays on them.",
};

endpoints! {
    /// Check that the node answers.
    GetHealth GET "/v1/health" NoBody => 200 Health;
        "Says whether the node answers and serves.";
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
    PostVolume POST "/v1/volumes" CreateVolume => 201 Volume;
        "Creates a volume. Repeating a request gives the volume that it created.";
        refuses [ErrorCode::Exists, ErrorCode::Backing, ErrorCode::NoSpace];

    /// Create several volumes.
    PostVolumes POST "/v1/volume-batches" CreateVolumes => 200 CreateVolumeResults;
        "Creates several volumes, some at a time, and says of each what became of it.";
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
        "Makes a volume larger while it serves.";
        refuses [ErrorCode::NotFound, ErrorCode::Conflict, ErrorCode::Backing, ErrorCode::NoSpace];

    /// Add a replica of a volume.
    AddVolumeCopy POST "/v1/volumes/{name}/mirror/add" AddReplica => 200 Volume;
        "Adds a copy of a volume on another node, and begins to bring it in sync.";
        refuses [ErrorCode::NotFound, ErrorCode::Conflict, ErrorCode::Backing, ErrorCode::NoSpace];

    /// Remove a replica of a volume.
    RemoveVolumeCopy POST "/v1/volumes/{name}/mirror/remove" RemoveReplica => 200 Volume;
        "Removes a copy of a volume, unless it is the last one that is in sync.";
        refuses [ErrorCode::NotFound, ErrorCode::Conflict];

    /// Replace a replica of a volume.
    ReplaceVolumeCopy POST "/v1/volumes/{name}/mirror/replace" ReplaceReplica => 200 Volume;
        "Replaces a copy of a volume by one on another node, or a lost one by a new one.";
        refuses [ErrorCode::NotFound, ErrorCode::Conflict, ErrorCode::Backing, ErrorCode::NoSpace];

    /// Set the number of replicas of a volume.
    SetVolumeCopies POST "/v1/volumes/{name}/mirror/set" SetReplicaCount => 200 Volume;
        "Sets how many copies a volume is to have. A copy that it lacks then is made by itself (cluster.repair_after_s).";
        refuses [ErrorCode::NotFound, ErrorCode::Conflict];

    /// Compare the replicas of a volume.
    VerifyVolume POST "/v1/volumes/{name}/mirror/verify" Verify => 200 Verification;
        "Compares the copies of a volume. To be asked at the node of the primary copy.";
        refuses [ErrorCode::NotFound, ErrorCode::Conflict];

    /// Choose the primary of a volume.
    SwitchVolume POST "/v1/volumes/{name}/switch" SwitchPrimary => 200 Volume;
        "Makes the copy of a node the one that puts writes in order, as long as it is in sync.";
        refuses [ErrorCode::NotFound, ErrorCode::Conflict];

    /// Continue with one replica, whatever is lost.
    ForceVolume POST "/v1/volumes/{name}/force" ForcePrimary => 200 Volume;
        "Has the copy of the node that is asked go on alone. Acknowledged writes may be lost.";
        refuses [ErrorCode::NotFound, ErrorCode::Conflict];

    /// Take over a volume's image from its last owner.
    TakeOverVolume POST "/v1/volumes/{name}/take-over" TakeOver => 200 Volume;
        "Opens a volume whose image another node had last and has not released. Refused while that node uses it.";
        refuses [ErrorCode::NotFound, ErrorCode::Conflict, ErrorCode::Backing];

    /// Choose the protocols that export a volume.
    SetProtocols PUT "/v1/volumes/{name}/protocols" Protocols => 200 Volume;
        "Chooses the protocols that export a volume.";
        refuses [ErrorCode::NotFound, ErrorCode::Conflict];

    /// Choose the target and LUN of a volume.
    MapTarget PUT "/v1/volumes/{name}/target" MapVolume => 200 Volume;
        "Puts a volume behind the iSCSI target and the NVMe subsystem of another one, or its own, or gives it another number.";
        flag MAP_FORCE;
        refuses [ErrorCode::NotFound, ErrorCode::InUse, ErrorCode::Conflict];

    /// Let initiators reach a volume.
    AllowInitiators POST "/v1/volumes/{name}/allow" InitiatorList => 200 Volume;
        "Lets initiators reach a volume.";
        refuses [ErrorCode::NotFound, ErrorCode::Conflict];

    /// Stop initiators from reaching a volume.
    DenyInitiators POST "/v1/volumes/{name}/deny" InitiatorList => 200 Volume;
        "Stops initiators from reaching a volume, those that are logged in too.";
        refuses [ErrorCode::NotFound, ErrorCode::Conflict];

    /// Require CHAP from the iSCSI initiators of a volume.
    SetChap PUT "/v1/volumes/{name}/chap" Chap => 200 Volume;
        "Asks iSCSI initiators of a volume to authenticate with CHAP.";
        refuses [ErrorCode::NotFound, ErrorCode::Conflict];

    /// Stop requiring CHAP.
    ClearChap DELETE "/v1/volumes/{name}/chap" NoBody => 200 Volume;
        "Lets iSCSI initiators reach a volume by their name alone.";
        refuses [ErrorCode::NotFound, ErrorCode::Conflict];

    /// Require CHAP with its own credentials from one iSCSI initiator.
    SetInitiatorChap PUT "/v1/volumes/{name}/chap/initiator" InitiatorChap => 200 Volume;
        "Asks one iSCSI initiator of a volume for a user and secret of its own, or no longer.";
        refuses [ErrorCode::NotFound, ErrorCode::Conflict];

    /// Require DH-HMAC-CHAP from one NVMe host.
    SetHostDhchap PUT "/v1/volumes/{name}/dhchap" HostDhchap => 200 Volume;
        "Asks one NVMe host of a volume to prove that it has a secret (DH-HMAC-CHAP), or for its name alone.";
        refuses [ErrorCode::NotFound, ErrorCode::Conflict];

    /// Set the TLS key of one NVMe host.
    SetHostTls PUT "/v1/volumes/{name}/tls" HostTls => 200 Volume;
        "Gives one NVMe host of a volume the key of TLS that it has to come by, or may, or takes it away.";
        refuses [ErrorCode::NotFound, ErrorCode::Conflict];

    /// Show the reservations of a volume.
    GetReservations GET "/v1/volumes/{name}/reservations" NoBody => 200 Reservations;
        "Shows the reservations of a volume. To be asked at a node that serves it.";
        refuses [ErrorCode::NotFound, ErrorCode::Backing];

    /// Remove the reservations of a volume.
    ClearReservations DELETE "/v1/volumes/{name}/reservations" NoBody => 200 Reservations;
        "Takes all registrations and reservations of a volume away, whoever holds them.";
        refuses [ErrorCode::NotFound, ErrorCode::Backing];

    /// List the disk pools.
    ListPools GET "/v1/pools" NoBody => 200 PoolList;
        "Lists the pools of the node's disks.";
        refuses [];

    /// Create a pool.
    PostPool POST "/v1/pools" CreatePool => 201 Pool;
        "Creates a pool of disks of this node. Repeating a request gives the pool that it created.";
        refuses [ErrorCode::Exists, ErrorCode::Conflict, ErrorCode::Backing];

    /// Show a pool.
    GetPool GET "/v1/pools/{name}" NoBody => 200 Pool;
        "Shows a pool and its disks.";
        refuses [ErrorCode::NotFound];

    /// Delete a pool.
    DeletePool DELETE "/v1/pools/{name}" NoBody => 204 NoBody;
        "Deletes a pool without volumes: its disks are free again.";
        flag POOL_FORCE;
        refuses [ErrorCode::NotFound, ErrorCode::Conflict, ErrorCode::Backing];

    /// Add disks to a pool.
    AddPoolDisks POST "/v1/pools/{name}/add" AddDisks => 200 Pool;
        "Adds disks to a pool, for data or as spares.";
        refuses [ErrorCode::NotFound, ErrorCode::Conflict, ErrorCode::Backing, ErrorCode::NoSpace];

    /// Remove a disk from a pool.
    RemovePoolDisk POST "/v1/pools/{name}/remove" RemoveDisk => 200 Pool;
        "Takes a disk out of a pool. What lies on it is moved to others first; this begins it.";
        refuses [ErrorCode::NotFound, ErrorCode::Conflict, ErrorCode::Backing, ErrorCode::NoSpace];

    /// Replace a disk of a pool.
    ReplacePoolDisk POST "/v1/pools/{name}/replace" ReplaceDisk => 200 Pool;
        "Puts a disk in the place of one that has failed, or is to go. This begins it.";
        refuses [ErrorCode::NotFound, ErrorCode::Conflict, ErrorCode::Backing, ErrorCode::NoSpace];

    /// Scrub a pool.
    ScrubPool POST "/v1/pools/{name}/scrub" NoBody => 200 Pool;
        "Begins to read and compare all of a pool, and to repair what is wrong.";
        refuses [ErrorCode::NotFound, ErrorCode::Conflict, ErrorCode::Backing];

    /// Reset the error counts of a pool's disks.
    ClearPoolErrors POST "/v1/pools/{name}/clear" ClearErrors => 200 Pool;
        "Has the errors of a disk, or of all disks of a pool, counted anew, as when a cable was replaced.";
        refuses [ErrorCode::NotFound, ErrorCode::Conflict, ErrorCode::Backing];

    /// Open a pool without lost disks, or take it over.
    ForcePoolOpen POST "/v1/pools/{name}/open" OpenPool => 200 Pool;
        "Opens a pool without disks that are gone for good, what only they hold is lost; or takes it over from a node that is gone.";
        refuses [ErrorCode::NotFound, ErrorCode::Conflict, ErrorCode::Backing];

    /// List pools on disks that the node does not know.
    FindStrayPools POST "/v1/pool-imports/find" FindPools => 200 ImportablePools;
        "Lists the pools that disks of this machine hold and that the node does not know.";
        refuses [ErrorCode::Conflict];

    /// Import a pool that the node does not know.
    PostPoolImport POST "/v1/pool-imports" ImportPool => 200 ImportedPool;
        "Takes a pool that the node does not know, and the volumes in it that no record names.";
        refuses [ErrorCode::NotFound, ErrorCode::Exists, ErrorCode::Conflict, ErrorCode::Backing];

    /// List the images that no record names.
    ListOrphans GET "/v1/images" NoBody => 200 OrphanedImages;
        "Lists the images on the node that no record names as the copy of a volume.";
        refuses [];

    /// Adopt an image as a volume.
    PostAdoption POST "/v1/images/adopt" AdoptImage => 200 AdoptedImage;
        "Takes an image that no record names as a volume, or says what would become of it.";
        refuses [ErrorCode::Exists, ErrorCode::Conflict, ErrorCode::Backing];

    /// Erase an image.
    PostDiscard POST "/v1/images/discard" DiscardImage => 204 NoBody;
        "Erases an image that no record names. What it holds is lost.";
        refuses [ErrorCode::Conflict, ErrorCode::Backing];

    /// The cluster and its nodes.
    GetCluster GET "/v1/cluster" NoBody => 200 Cluster;
        "Shows the cluster that the node is of, its nodes and the members of its store.";
        refuses [];

    /// Create a cluster.
    InitCluster POST "/v1/cluster/init" InitClusterRequest => 202 Cluster;
        "Makes this node the first of a new cluster. Its volumes stay; its inside begins again.";
        refuses [ErrorCode::Conflict];

    /// Join a cluster.
    PostJoin POST "/v1/cluster/join" JoinCluster => 202 Cluster;
        "Makes this node one of a cluster that is there. Its inside begins again. If a human has to approve it, it stays alone and says in `waits_for` what it waits for: ask again.";
        refuses [ErrorCode::Conflict];

    /// Leave the cluster.
    PostLeave POST "/v1/cluster/leave" LeaveCluster => 202 Cluster;
        "Takes this node, or one that does not come back, out of the cluster.";
        refuses [ErrorCode::Conflict, ErrorCode::NotFound];

    /// Recover the cluster.
    PostRecovery POST "/v1/cluster/recover" RecoverCluster => 200 RecoveryPlan;
        "Makes a new store if the cluster's is lost, and volumes from what images tell; or says what would be done.";
        refuses [ErrorCode::Conflict];

    /// Create a join token.
    PostToken POST "/v1/cluster/tokens" CreateToken => 201 CreatedToken;
        "Makes a token with which other nodes join. Each request makes another one.";
        refuses [ErrorCode::Conflict];

    /// List the join tokens.
    ListTokens GET "/v1/cluster/tokens" NoBody => 200 TokenList;
        "Lists the tokens with which other nodes join.";
        refuses [ErrorCode::Conflict];

    /// Revoke a join token.
    RevokeToken POST "/v1/cluster/tokens/revoke" EntryId => 200 TokenList;
        "Takes a token back: it lets nobody in any more. Repeating it changes nothing.";
        refuses [ErrorCode::Conflict, ErrorCode::NotFound];

    /// List the join requests.
    ListJoins GET "/v1/cluster/joins" NoBody => 200 JoinList;
        "Lists the nodes that have asked to join the cluster.";
        refuses [ErrorCode::Conflict];

    /// Approve a join request.
    ApproveJoin POST "/v1/cluster/joins/approve" EntryId => 200 JoinList;
        "Lets a node in that waits for it. Repeating it changes nothing.";
        refuses [ErrorCode::Conflict, ErrorCode::NotFound];

    /// Refuse a join request.
    RefuseJoin POST "/v1/cluster/joins/refuse" EntryId => 200 JoinList;
        "Keeps a node out that waits to be let in. Repeating it changes nothing.";
        refuses [ErrorCode::Conflict, ErrorCode::NotFound];

    /// Replace the cluster's credentials.
    RotateCluster POST "/v1/cluster/rotate" NoBody => 202 Cluster;
        "Has the nodes replace the cluster's secret and authority by new ones, while they serve. Tokens are revoked. `rotation` of the cluster says how far they are.";
        refuses [ErrorCode::Conflict];

    /// Drain a node.
    DrainNode POST "/v1/cluster/drain" NodeSelector => 200 Cluster;
        "Keeps a node out of service.";
        refuses [ErrorCode::Conflict, ErrorCode::NotFound];

    /// Resume a drained node.
    ResumeNode POST "/v1/cluster/resume" NodeSelector => 200 Cluster;
        "Lets a drained node serve again.";
        refuses [ErrorCode::Conflict, ErrorCode::NotFound];
}
