//! What can be asked of a node.

use http::Method;
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use utoipa::ToSchema;

use crate::{
    AddCopy, AddDisks, AdoptImage, AdoptedImage, BeginCluster, Chap, ClearErrors, Cluster,
    ClusterToken, Code, CreatePool, CreateToken, CreateVolume, CreateVolumes, CreatedVolumes,
    DiscardImage, FindPools, ForceCopy, Grow, Health, HostDhchap, HostTls, ImportPool,
    ImportablePools, ImportedPool, InitiatorChap, Initiators, JoinCluster, JoinList, LeaveCluster,
    MapVolume, OpenPool, OrphanedImages, Pool, PoolList, Protocols, RecoverCluster, RecoveryPlan,
    RemoveCopy, RemoveDisk, ReplaceCopy, ReplaceDisk, Reservations, SessionList, SetCopies, Status,
    SwitchTo, TakeOver, TokenList, Verification, Verify, Volume, VolumeList, WhichId, WhichNode,
};

/// A yes-or-no parameter in the query of an endpoint.
#[derive(Clone, Copy, Debug)]
pub struct Flag {
    /// Its name.
    pub name: &'static str,
    /// What it does when it is `true`.
    pub about: &'static str,
}

/// Something to ask a node. The server routes by it, the client calls by it.
pub trait Endpoint {
    /// Name in the OpenAPI description, unique.
    const ID: &'static str;
    /// HTTP method.
    const METHOD: Method;
    /// Path; `{name}` stands for the name of a volume, or of a pool.
    const PATH: &'static str;
    /// HTTP status of an answer.
    const STATUS: u16;
    /// What it does, in a sentence.
    const SUMMARY: &'static str;
    /// Parameters in the query.
    const FLAGS: &'static [Flag];
    /// Refusals to expect, beside those that every endpoint has.
    const REFUSALS: &'static [Code];
    /// Body of the request; [`Nothing`] where there is none.
    type Body: Payload;
    /// Body of the answer; [`Nothing`] where there is none.
    type Answer: Payload;
}

/// A body, or none.
pub trait Payload: Serialize + DeserializeOwned + Send + 'static {
    /// Whether there is a body at all.
    const EMPTY: bool;
    /// Name of its schema.
    fn schema_name() -> Option<String>;
    /// Its schema and those it refers to.
    fn schemas(into: &mut Schemas);
}

/// Named schemas, as utoipa collects them.
pub type Schemas = Vec<(String, utoipa::openapi::RefOr<utoipa::openapi::schema::Schema>)>;

/// No body.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Nothing;

impl Payload for Nothing {
    const EMPTY: bool = true;

    fn schema_name() -> Option<String> {
        None
    }

    fn schemas(_: &mut Schemas) {}
}

impl<T: ToSchema + Serialize + DeserializeOwned + Send + 'static> Payload for T {
    const EMPTY: bool = false;

    fn schema_name() -> Option<String> {
        Some(T::name().into_owned())
    }

    fn schemas(into: &mut Schemas) {
        into.push((T::name().into_owned(), T::schema()));
        T::schemas(into);
    }
}

/// Declares endpoints: a type for each, and [`visit`], which hands every one of them on.
macro_rules! endpoints {
    ($($(#[$doc:meta])* $name:ident $method:ident $path:literal $body:ty => $status:literal $answer:ty;
        $summary:literal; $(flag $flag:expr;)* refuses [$($refusal:expr),*];)*) => {
        $(
            $(#[$doc])*
            #[derive(Clone, Copy, Debug)]
            pub struct $name;

            impl Endpoint for $name {
                const ID: &'static str = stringify!($name);
                const METHOD: Method = Method::$method;
                const PATH: &'static str = $path;
                const STATUS: u16 = $status;
                const SUMMARY: &'static str = $summary;
                const FLAGS: &'static [Flag] = &[$($flag),*];
                const REFUSALS: &'static [Code] = &[$($refusal),*];
                type Body = $body;
                type Answer = $answer;
            }
        )*

        /// Something to do with every endpoint.
        pub trait Visit {
            /// Does it with one.
            fn endpoint<E: Endpoint>(&mut self);
        }

        /// Hands every endpoint to `visitor`.
        pub fn visit(visitor: &mut impl Visit) {
            $(visitor.endpoint::<$name>();)*
        }
    };
}

/// The flag of [`DeleteVolume`].
pub const FORCE: Flag =
    Flag { name: "force", about: "Delete the volume even while initiators are logged in to it." };

/// The other flag of [`DeleteVolume`].
pub const DISCARD: Flag = Flag {
    name: "discard",
    about: "Delete the volume even while no copy of it serves: what its copies hold is lost unseen.",
};

/// The flag of [`MapTarget`].
pub const MAP_FORCE: Flag =
    Flag { name: "force", about: "Do it even while initiators are logged in to the volume." };

/// The flag of [`DeletePool`].
pub const POOL_FORCE: Flag = Flag {
    name: "force",
    about: "Forget the pool even if it cannot be opened. What its disks hold stays on them.",
};

endpoints! {
    /// Is the node there?
    GetHealth GET "/v1/health" Nothing => 200 Health;
        "Says whether the node answers and serves.";
        refuses [];

    /// Is my data safe?
    GetStatus GET "/v1/status" Nothing => 200 Status;
        "Says whether the data is safe, and why.";
        refuses [];

    /// Who is logged in?
    ListSessions GET "/v1/sessions" Nothing => 200 SessionList;
        "Lists the sessions of initiators.";
        refuses [];

    /// Which volumes are there?
    ListVolumes GET "/v1/volumes" Nothing => 200 VolumeList;
        "Lists the volumes.";
        refuses [];

    /// Create a volume.
    PostVolume POST "/v1/volumes" CreateVolume => 201 Volume;
        "Creates a volume. Repeating a request gives the volume that it created.";
        refuses [Code::Exists, Code::Backing, Code::NoSpace];

    /// Create several volumes.
    PostVolumes POST "/v1/volume-batches" CreateVolumes => 200 CreatedVolumes;
        "Creates several volumes, some at a time, and says of each what became of it.";
        refuses [];

    /// One volume.
    GetVolume GET "/v1/volumes/{name}" Nothing => 200 Volume;
        "Shows a volume.";
        refuses [Code::NotFound];

    /// Delete a volume and its data.
    DeleteVolume DELETE "/v1/volumes/{name}" Nothing => 204 Nothing;
        "Deletes a volume and its data.";
        flag FORCE;
        flag DISCARD;
        refuses [Code::NotFound, Code::InUse, Code::Conflict, Code::Backing];

    /// Make a volume larger.
    GrowVolume POST "/v1/volumes/{name}/grow" Grow => 200 Volume;
        "Makes a volume larger while it serves.";
        refuses [Code::NotFound, Code::Conflict, Code::Backing, Code::NoSpace];

    /// Add a copy of a volume.
    AddVolumeCopy POST "/v1/volumes/{name}/mirror/add" AddCopy => 200 Volume;
        "Adds a copy of a volume on another node, and begins to bring it in sync.";
        refuses [Code::NotFound, Code::Conflict, Code::Backing, Code::NoSpace];

    /// Remove a copy of a volume.
    RemoveVolumeCopy POST "/v1/volumes/{name}/mirror/remove" RemoveCopy => 200 Volume;
        "Removes a copy of a volume, unless it is the last one that is in sync.";
        refuses [Code::NotFound, Code::Conflict];

    /// Replace a copy of a volume.
    ReplaceVolumeCopy POST "/v1/volumes/{name}/mirror/replace" ReplaceCopy => 200 Volume;
        "Replaces a copy of a volume by one on another node, or a lost one by a new one.";
        refuses [Code::NotFound, Code::Conflict, Code::Backing, Code::NoSpace];

    /// Choose how many copies a volume is to have.
    SetVolumeCopies POST "/v1/volumes/{name}/mirror/set" SetCopies => 200 Volume;
        "Sets how many copies a volume is to have. A copy that it lacks then is made by itself (cluster.repair_after_s).";
        refuses [Code::NotFound, Code::Conflict];

    /// Compare the copies of a volume.
    VerifyVolume POST "/v1/volumes/{name}/mirror/verify" Verify => 200 Verification;
        "Compares the copies of a volume. To be asked at the node of the primary copy.";
        refuses [Code::NotFound, Code::Conflict];

    /// Choose who puts writes in order.
    SwitchVolume POST "/v1/volumes/{name}/switch" SwitchTo => 200 Volume;
        "Makes the copy of a node the one that puts writes in order, as long as it is in sync.";
        refuses [Code::NotFound, Code::Conflict];

    /// Go on with one copy, whatever is lost.
    ForceVolume POST "/v1/volumes/{name}/force" ForceCopy => 200 Volume;
        "Has the copy of the node that is asked go on alone. Acknowledged writes may be lost.";
        refuses [Code::NotFound, Code::Conflict];

    /// Take a volume's image from the node that had it last.
    TakeOverVolume POST "/v1/volumes/{name}/take-over" TakeOver => 200 Volume;
        "Opens a volume whose image another node had last and has not released. Refused while that node uses it.";
        refuses [Code::NotFound, Code::Conflict, Code::Backing];

    /// Choose the protocols that export a volume.
    SetProtocols PUT "/v1/volumes/{name}/protocols" Protocols => 200 Volume;
        "Chooses the protocols that export a volume.";
        refuses [Code::NotFound, Code::Conflict];

    /// Choose the target and the number of a volume.
    MapTarget PUT "/v1/volumes/{name}/target" MapVolume => 200 Volume;
        "Puts a volume behind the iSCSI target and the NVMe subsystem of another one, or its own, or gives it another number.";
        flag MAP_FORCE;
        refuses [Code::NotFound, Code::InUse, Code::Conflict];

    /// Let initiators reach a volume.
    AllowInitiators POST "/v1/volumes/{name}/allow" Initiators => 200 Volume;
        "Lets initiators reach a volume.";
        refuses [Code::NotFound, Code::Conflict];

    /// Stop initiators from reaching a volume.
    DenyInitiators POST "/v1/volumes/{name}/deny" Initiators => 200 Volume;
        "Stops initiators from reaching a volume, those that are logged in too.";
        refuses [Code::NotFound, Code::Conflict];

    /// Ask iSCSI initiators of a volume for CHAP.
    SetChap PUT "/v1/volumes/{name}/chap" Chap => 200 Volume;
        "Asks iSCSI initiators of a volume to authenticate with CHAP.";
        refuses [Code::NotFound, Code::Conflict];

    /// Ask no longer.
    ClearChap DELETE "/v1/volumes/{name}/chap" Nothing => 200 Volume;
        "Lets iSCSI initiators reach a volume by their name alone.";
        refuses [Code::NotFound, Code::Conflict];

    /// Ask one iSCSI initiator of a volume for CHAP of its own.
    SetInitiatorChap PUT "/v1/volumes/{name}/chap/initiator" InitiatorChap => 200 Volume;
        "Asks one iSCSI initiator of a volume for a user and secret of its own, or no longer.";
        refuses [Code::NotFound, Code::Conflict];

    /// Ask one NVMe host of a volume for a proof.
    SetHostDhchap PUT "/v1/volumes/{name}/dhchap" HostDhchap => 200 Volume;
        "Asks one NVMe host of a volume to prove that it has a secret (DH-HMAC-CHAP), or for its name alone.";
        refuses [Code::NotFound, Code::Conflict];

    /// Have one NVMe host of a volume come by TLS.
    SetHostTls PUT "/v1/volumes/{name}/tls" HostTls => 200 Volume;
        "Gives one NVMe host of a volume the key of TLS that it has to come by, or may, or takes it away.";
        refuses [Code::NotFound, Code::Conflict];

    /// Who has reserved a volume?
    GetReservations GET "/v1/volumes/{name}/reservations" Nothing => 200 Reservations;
        "Shows the reservations of a volume. To be asked at a node that serves it.";
        refuses [Code::NotFound, Code::Backing];

    /// Take the reservations of a volume away.
    ClearReservations DELETE "/v1/volumes/{name}/reservations" Nothing => 200 Reservations;
        "Takes all registrations and reservations of a volume away, whoever holds them.";
        refuses [Code::NotFound, Code::Backing];

    /// Which pools of disks are there?
    ListPools GET "/v1/pools" Nothing => 200 PoolList;
        "Lists the pools of the node's disks.";
        refuses [];

    /// Create a pool.
    PostPool POST "/v1/pools" CreatePool => 201 Pool;
        "Creates a pool of disks of this node. Repeating a request gives the pool that it created.";
        refuses [Code::Exists, Code::Conflict, Code::Backing];

    /// One pool.
    GetPool GET "/v1/pools/{name}" Nothing => 200 Pool;
        "Shows a pool and its disks.";
        refuses [Code::NotFound];

    /// Delete a pool.
    DeletePool DELETE "/v1/pools/{name}" Nothing => 204 Nothing;
        "Deletes a pool without volumes: its disks are free again.";
        flag POOL_FORCE;
        refuses [Code::NotFound, Code::Conflict, Code::Backing];

    /// Add disks to a pool.
    AddPoolDisks POST "/v1/pools/{name}/add" AddDisks => 200 Pool;
        "Adds disks to a pool, for data or as spares.";
        refuses [Code::NotFound, Code::Conflict, Code::Backing, Code::NoSpace];

    /// Take a disk out of a pool.
    RemovePoolDisk POST "/v1/pools/{name}/remove" RemoveDisk => 200 Pool;
        "Takes a disk out of a pool. What lies on it is moved to others first; this begins it.";
        refuses [Code::NotFound, Code::Conflict, Code::Backing, Code::NoSpace];

    /// Replace a disk of a pool.
    ReplacePoolDisk POST "/v1/pools/{name}/replace" ReplaceDisk => 200 Pool;
        "Puts a disk in the place of one that has failed, or is to go. This begins it.";
        refuses [Code::NotFound, Code::Conflict, Code::Backing, Code::NoSpace];

    /// Read and compare all of a pool.
    ScrubPool POST "/v1/pools/{name}/scrub" Nothing => 200 Pool;
        "Begins to read and compare all of a pool, and to repair what is wrong.";
        refuses [Code::NotFound, Code::Conflict, Code::Backing];

    /// Forget errors of a pool's disks.
    ClearPoolErrors POST "/v1/pools/{name}/clear" ClearErrors => 200 Pool;
        "Has the errors of a disk, or of all disks of a pool, counted anew, as when a cable was replaced.";
        refuses [Code::NotFound, Code::Conflict, Code::Backing];

    /// Open a pool without disks that are gone.
    ForcePoolOpen POST "/v1/pools/{name}/open" OpenPool => 200 Pool;
        "Opens a pool without disks that are gone for good, what only they hold is lost; or takes it over from a node that is gone.";
        refuses [Code::NotFound, Code::Conflict, Code::Backing];

    /// Which pools do disks hold that the node does not know?
    FindStrayPools POST "/v1/pool-imports/find" FindPools => 200 ImportablePools;
        "Lists the pools that disks of this machine hold and that the node does not know.";
        refuses [Code::Conflict];

    /// Take a pool that the node does not know.
    PostPoolImport POST "/v1/pool-imports" ImportPool => 200 ImportedPool;
        "Takes a pool that the node does not know, and the volumes in it that no record names.";
        refuses [Code::NotFound, Code::Exists, Code::Conflict, Code::Backing];

    /// Which images does no record name?
    ListOrphans GET "/v1/images" Nothing => 200 OrphanedImages;
        "Lists the images on the node that no record names as the copy of a volume.";
        refuses [];

    /// Take an image as a volume.
    PostAdoption POST "/v1/images/adopt" AdoptImage => 200 AdoptedImage;
        "Takes an image that no record names as a volume, or says what would become of it.";
        refuses [Code::Exists, Code::Conflict, Code::Backing];

    /// Erase an image.
    PostDiscard POST "/v1/images/discard" DiscardImage => 204 Nothing;
        "Erases an image that no record names. What it holds is lost.";
        refuses [Code::Conflict, Code::Backing];

    /// The cluster and its nodes.
    GetCluster GET "/v1/cluster" Nothing => 200 Cluster;
        "Shows the cluster that the node is of, its nodes and the members of its store.";
        refuses [];

    /// Begin a cluster.
    InitCluster POST "/v1/cluster/init" BeginCluster => 202 Cluster;
        "Makes this node the first of a new cluster. Its volumes stay; its inside begins again.";
        refuses [Code::Conflict];

    /// Join a cluster.
    PostJoin POST "/v1/cluster/join" JoinCluster => 202 Cluster;
        "Makes this node one of a cluster that is there. Its inside begins again. If a human has to approve it, it stays alone and says in `waits_for` what it waits for: ask again.";
        refuses [Code::Conflict];

    /// Leave the cluster.
    PostLeave POST "/v1/cluster/leave" LeaveCluster => 202 Cluster;
        "Takes this node, or one that does not come back, out of the cluster.";
        refuses [Code::Conflict, Code::NotFound];

    /// Recover the cluster.
    PostRecovery POST "/v1/cluster/recover" RecoverCluster => 200 RecoveryPlan;
        "Makes a new store if the cluster's is lost, and volumes from what images tell; or says what would be done.";
        refuses [Code::Conflict];

    /// What lets another node in.
    PostToken POST "/v1/cluster/tokens" CreateToken => 201 ClusterToken;
        "Makes a token with which other nodes join. Each request makes another one.";
        refuses [Code::Conflict];

    /// Which tokens are there?
    ListTokens GET "/v1/cluster/tokens" Nothing => 200 TokenList;
        "Lists the tokens with which other nodes join.";
        refuses [Code::Conflict];

    /// Take a token back.
    RevokeToken POST "/v1/cluster/tokens/revoke" WhichId => 200 TokenList;
        "Takes a token back: it lets nobody in any more. Repeating it changes nothing.";
        refuses [Code::Conflict, Code::NotFound];

    /// Who wants to join?
    ListJoins GET "/v1/cluster/joins" Nothing => 200 JoinList;
        "Lists the nodes that have asked to join the cluster.";
        refuses [Code::Conflict];

    /// Let a node in.
    ApproveJoin POST "/v1/cluster/joins/approve" WhichId => 200 JoinList;
        "Lets a node in that waits for it. Repeating it changes nothing.";
        refuses [Code::Conflict, Code::NotFound];

    /// Keep a node out.
    RefuseJoin POST "/v1/cluster/joins/refuse" WhichId => 200 JoinList;
        "Keeps a node out that waits to be let in. Repeating it changes nothing.";
        refuses [Code::Conflict, Code::NotFound];

    /// Replace the cluster's secret.
    RotateCluster POST "/v1/cluster/rotate" Nothing => 202 Cluster;
        "Has the nodes replace the cluster's secret and authority by new ones, while they serve. Tokens are revoked. `rotation` of the cluster says how far they are.";
        refuses [Code::Conflict];

    /// Keep a node out of service.
    DrainNode POST "/v1/cluster/drain" WhichNode => 200 Cluster;
        "Keeps a node out of service.";
        refuses [Code::Conflict, Code::NotFound];

    /// Let a node serve again.
    ResumeNode POST "/v1/cluster/resume" WhichNode => 200 Cluster;
        "Lets a drained node serve again.";
        refuses [Code::Conflict, Code::NotFound];
}
