//! Points at which a test can make a process end as by `kill -9`: nothing is flushed, no destructor
//! runs.
//!
//! For tests with real processes. With the feature `fault-points`, `WINDROSE_FAULT=POINT:COUNT` in
//! the environment ends the process when it passes that point for the COUNT-th time; without the
//! feature [`reach`] does nothing. All points are listed in this file; each is one call in the
//! code.

/// Name of the environment variable.
pub const FAULT_ENV_VAR: &str = "WINDROSE_FAULT";

macro_rules! fault_points {
    ($($(#[doc = $doc:literal])+ $point:ident = $name:literal;)+) => {
        /// A point at which a test can end the process.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum FaultPoint {
            $($(#[doc = $doc])+ $point,)+
        }

        impl FaultPoint {
            /// All of them.
            pub const ALL: &[Self] = &[$(Self::$point,)+];

            /// Its name.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$point => $name,)+
                }
            }
        }
    };
}

fault_points! {
    /// The entry node of a write has accepted it; no other node knows of it.
    EntryWriteAccepted = "mirror.entering.taken";
    /// It has asked the primary for an op number: `WriteRequest` was sent.
    EntryWriteRequested = "mirror.entering.ordered";
    /// It has received the op number: `OpAssigned` has arrived, its own leg has nothing.
    EntryOpAssigned = "mirror.entering.granted";
    /// It knows that all others have the write: `PeersApplied` has arrived, its client has no
    /// answer.
    EntryPeersApplied = "mirror.entering.done";
    /// The primary has locked the range of a write; no op number is assigned.
    PrimaryRangeLocked = "mirror.primary.asked";
    /// The primary has announced the op number: `Write` or `OpAssigned` was sent, its own leg has
    /// begun at most.
    PrimaryOpSent = "mirror.primary.announced";
    /// The primary's own leg has a write; the others may have it.
    PrimaryLegApplied = "mirror.primary.applied";
    /// The primary knows that all have a write; no answer was sent.
    PrimaryCommitted = "mirror.primary.committed";
    /// The regions of a change are durably marked; the leg has nothing of it.
    RegionsMarked = "mirror.leg.marked";
    /// A write with its op number has reached another member; its leg has nothing.
    MemberWriteReceived = "mirror.member.received";
    /// The leg of another member has the write; `Applied` was not sent.
    MemberLegApplied = "mirror.member.applied";
    /// Another member has sent `Applied`.
    MemberAppliedSent = "mirror.member.confirmed";
    /// A member has flushed for another; `Flushed` was not sent.
    MemberFlushed = "mirror.member.flushed";
    /// A joiner has been accepted; it has no data yet.
    JoinerAccepted = "mirror.joiner.accepted";
    /// The leg of a joiner has a copy; `Applied` was not sent.
    JoinerCopyApplied = "mirror.joiner.copied";
    /// The source of a resync has sent a copy.
    ResyncCopySent = "mirror.resync.sent";
    /// Everything is copied and flushed; the joiner's admission is not proposed.
    ResyncFlushed = "mirror.resync.flushed";
    /// A configuration is about to be adopted: the superblock has the old one.
    BeforeConfigAdoption = "mirror.epoch.adopting";
    /// A configuration is adopted: the superblock has it, but no other node knows.
    ConfigAdopted = "mirror.epoch.adopted";
    /// A new record is about to be put.
    BeforeConfigPut = "mirror.record.putting";
    /// The store has answered the put of a record; the answer is not processed.
    ConfigPutAnswered = "mirror.record.put";
    /// A member has sent its prepared entries in `DoViewChange`.
    DoViewChangeSent = "mirror.view.started";
    /// The primary reconciles the members: a copy of an entry was sent.
    ReconciliationCopySent = "mirror.view.copying";
    /// The members are equal; `StartView` was not sent.
    MembersReconciled = "mirror.view.settled";
    /// `StartView` was sent.
    StartViewSent = "mirror.view.opened";
    /// `cluster init`: the node's new role is written to its file; the node has not restarted
    /// internally.
    InitRoleWritten = "cluster.init.written";
    /// `cluster init`: the store has the cluster's record, but not the node's.
    InitClusterRecordWritten = "cluster.init.begun";
    /// `cluster init`: the node's records are copied; it is not in the list of nodes.
    InitRecordsCopied = "cluster.init.copied";
    /// `cluster init`: the node is in the list of nodes; its file does not say so.
    InitNodeListed = "cluster.init.entered";
    /// The file says that the node is a member; its embedded store has not been moved aside.
    MembershipWritten = "cluster.member.written";
    /// `cluster join`: a number is drawn; nothing is written.
    JoinNumberDrawn = "cluster.join.drawn";
    /// `cluster join`: the node's new role is written to its file; the node has not restarted
    /// internally.
    JoinRoleWritten = "cluster.join.written";
    /// `cluster join`: the node is added as a member of the store; the member has not started.
    JoinStoreMemberAdded = "cluster.join.room";
    /// `cluster join`: the node's store member is a voter; the node is not in the list of nodes.
    JoinStoreVoter = "cluster.join.promoted";
    /// `cluster join`: the node is in the list of nodes; its file does not say so.
    JoinNodeListed = "cluster.join.entered";
    /// `cluster leave`: the node's new role is written to its file; the node has not restarted
    /// internally.
    LeaveRoleWritten = "cluster.leave.written";
    /// `cluster leave`: the node is no longer in the list of nodes; its store member still exists.
    LeaveNodeUnlisted = "cluster.leave.struck";
    /// `cluster leave`: its store member is removed; its file still exists.
    LeaveStoreMemberRemoved = "cluster.leave.removed";
    /// `cluster rotate`: the node that starts it has the new credentials in its file; the store has
    /// no record of it.
    RotationStarted = "cluster.rotate.begun";
    /// Another node has the new credentials in its file; it does not accept them from peers yet.
    RotationReceived = "cluster.rotate.taken";
    /// The file has the new credentials first; the node still presents the old ones.
    RotationNewFirst = "cluster.rotate.used";
    /// The file has only the new credentials; the node accepts both.
    RotationOldDropped = "cluster.rotate.forgotten";
    /// An image of a volume is created; the record does not say so.
    VolumeImageCreated = "volume.made";
    /// All images of a new volume are created; the volume does not exist yet.
    VolumeImagesComplete = "volume.finishing";
    /// A new volume exists; its creator has no answer.
    VolumeCreated = "volume.finished";
    /// The image of a volume is erased; the record does not say so.
    VolumeImageErased = "volume.erased";
}

/// Why `WINDROSE_FAULT` is invalid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FaultSpecError {
    /// It does not have two parts.
    #[error("{FAULT_ENV_VAR}={0}: POINT:COUNT is expected, COUNT from 1 on")]
    Malformed(String),
    /// There is no such point.
    #[error("{FAULT_ENV_VAR}: unknown fault point {0}; the fault points are {all}", all = all_point_names())]
    UnknownPoint(String),
}

fn all_point_names() -> String {
    FaultPoint::ALL.iter().map(|point| point.name()).collect::<Vec<_>>().join(", ")
}

#[cfg(any(test, feature = "fault-points"))]
fn parse(text: &str) -> Result<(FaultPoint, u64), FaultSpecError> {
    let form = || FaultSpecError::Malformed(text.to_owned());
    let (name, count) = text.split_once(':').ok_or_else(form)?;
    let count = count.parse().ok().filter(|count| *count > 0).ok_or_else(form)?;
    let point = FaultPoint::ALL.iter().find(|point| point.name() == name);
    Ok((*point.ok_or_else(|| FaultSpecError::UnknownPoint(name.to_owned()))?, count))
}

/// Reads the environment, once, before anything else runs; returns what is requested, as text.
///
/// # Errors
/// [`FaultSpecError`].
pub fn arm() -> Result<Option<String>, FaultSpecError> {
    #[cfg(feature = "fault-points")]
    let armed = armed::arm()?;
    #[cfg(not(feature = "fault-points"))]
    let armed = None;
    Ok(armed)
}

/// Whether [`reach`] does anything.
pub const ENABLED: bool = cfg!(feature = "fault-points");

/// The process has reached `point`.
#[inline(always)]
pub fn reach(point: FaultPoint) {
    #[cfg(feature = "fault-points")]
    armed::reach(point, false);
    #[cfg(not(feature = "fault-points"))]
    let _ = point;
}

/// The process reaches `point` as soon as the data queued for sending has been sent.
#[inline(always)]
pub fn reach_when_sent(point: FaultPoint) {
    #[cfg(feature = "fault-points")]
    armed::reach(point, true);
    #[cfg(not(feature = "fault-points"))]
    let _ = point;
}

/// Queued data has been sent.
#[inline(always)]
pub fn note_sent() {
    #[cfg(feature = "fault-points")]
    armed::note_sent();
}

#[cfg(feature = "fault-points")]
mod armed {
    use std::sync::OnceLock;
    use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

    use super::{FAULT_ENV_VAR, FaultPoint, FaultSpecError, parse};

    struct Armed {
        point: FaultPoint,
        /// Remaining passes, including the last one.
        left: AtomicU64,
    }

    static ARMED: OnceLock<Armed> = OnceLock::new();
    /// Whether the process ends with the next sent bytes.
    static SENDS: AtomicBool = AtomicBool::new(false);

    pub(super) fn arm() -> Result<Option<String>, FaultSpecError> {
        let Some(text) = std::env::var_os(FAULT_ENV_VAR) else { return Ok(None) };
        let text = text.to_string_lossy().into_owned();
        let (point, count) = parse(&text)?;
        let _ = ARMED.set(Armed { point, left: AtomicU64::new(count) });
        Ok(Some(text))
    }

    pub(super) fn reach(point: FaultPoint, when_sent: bool) {
        let Some(armed) = ARMED.get().filter(|armed| armed.point == point) else { return };
        if armed.left.fetch_sub(1, Ordering::Relaxed) != 1 {
            return;
        }
        if when_sent {
            SENDS.store(true, Ordering::Relaxed);
        } else {
            crate::sys::kill_self();
        }
    }

    pub(super) fn note_sent() {
        if SENDS.load(Ordering::Relaxed) {
            crate::sys::kill_self();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_fault_point_has_a_name_of_its_own() {
        for point in FaultPoint::ALL {
            assert_eq!(parse(&format!("{}:7", point.name())), Ok((*point, 7)));
        }
    }

    #[test]
    fn an_unknown_fault_point_is_refused_with_the_list_of_all() {
        let unknown = parse("mirror.primary.nowhere:1").unwrap_err().to_string();
        assert!(
            unknown.contains("unknown fault point mirror.primary.nowhere; the fault points are "),
            "{unknown}"
        );
        assert!(FaultPoint::ALL.iter().all(|point| unknown.contains(point.name())), "{unknown}");
        for text in ["", "mirror.leg.marked", "mirror.leg.marked:", "mirror.leg.marked:0", ":1x"] {
            assert_eq!(parse(text), Err(FaultSpecError::Malformed(text.to_owned())));
        }
        assert!(matches!(parse(":1"), Err(FaultSpecError::UnknownPoint(_))));
    }
}
