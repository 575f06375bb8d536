//! Moments at which a process can be told to end as by `kill -9`: nothing is flushed, no destructor runs.
//!
//! For tests with real processes. With the feature `fault-points`, `WINDROSE_FAULT=POINT:COUNT` in the environment
//! ends the process when it passes that point for the COUNT-th time; without the feature nobody looks, and [`pass`] is
//! nothing. This file has the list of the points; each of them is one call where it stands.

/// What names the point and the count in the environment.
pub const VARIABLE: &str = "WINDROSE_FAULT";

macro_rules! points {
    ($($(#[doc = $doc:literal])+ $point:ident = $name:literal;)+) => {
        /// A moment.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Point {
            $($(#[doc = $doc])+ $point,)+
        }

        impl Point {
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

points! {
    /// The node where a write enters has taken it; nobody else knows of it.
    EnteringTaken = "mirror.entering.taken";
    /// It has asked the primary for a place: ORDER is on the wire.
    EnteringOrdered = "mirror.entering.ordered";
    /// It has been told the place: GRANT has come, its own leg has nothing.
    EnteringGranted = "mirror.entering.granted";
    /// It has been told that all others have the write: DONE has come, its client has no answer.
    EnteringDone = "mirror.entering.done";
    /// The primary holds the range of a write; no place is given out.
    PrimaryAsked = "mirror.primary.asked";
    /// The primary has told the others the place: WRITE or GRANT is on the wire, its own leg has begun at most.
    PrimaryAnnounced = "mirror.primary.announced";
    /// The primary's own leg has a write; the others may have it.
    PrimaryApplied = "mirror.primary.applied";
    /// The primary knows that all have a write; nobody has been answered.
    PrimaryCommitted = "mirror.primary.committed";
    /// The regions of a change are durably marked; the leg has nothing of it.
    LegMarked = "mirror.leg.marked";
    /// A write with its place has come to another member; its leg has nothing.
    MemberReceived = "mirror.member.received";
    /// The leg of another member has the write; APPLIED is not said.
    MemberApplied = "mirror.member.applied";
    /// Another member has said APPLIED: it is on the wire.
    MemberConfirmed = "mirror.member.confirmed";
    /// A member has flushed for another; FLUSHED is not said.
    MemberFlushed = "mirror.member.flushed";
    /// A joiner has been accepted; it has nothing yet.
    JoinerAccepted = "mirror.joiner.accepted";
    /// The leg of a joiner has a copy; APPLIED is not said.
    JoinerCopied = "mirror.joiner.copied";
    /// The source of a resync has sent a copy.
    ResyncSent = "mirror.resync.sent";
    /// All is copied and flushed; the joiner's admission is not proposed.
    ResyncFlushed = "mirror.resync.flushed";
    /// A configuration is about to be adopted: the superblock has the old one.
    EpochAdopting = "mirror.epoch.adopting";
    /// A configuration is adopted: the superblock has it, nobody was told.
    EpochAdopted = "mirror.epoch.adopted";
    /// A new record is about to be put.
    RecordPutting = "mirror.record.putting";
    /// The store has answered the put of a record; the answer is not heeded.
    RecordPut = "mirror.record.put";
    /// A member has told its entries: STARTED is on the wire.
    ViewStarted = "mirror.view.started";
    /// The primary makes the members equal: a copy of an entry is on the wire.
    ViewCopying = "mirror.view.copying";
    /// The members are equal; OPEN is not said.
    ViewSettled = "mirror.view.settled";
    /// OPEN is on the wire.
    ViewOpened = "mirror.view.opened";
    /// `cluster init`: what the node is to be is written down, its inside has not begun again.
    InitWritten = "cluster.init.written";
    /// `cluster init`: the store has the cluster's record and none of the node's.
    InitBegun = "cluster.init.begun";
    /// `cluster init`: the node's records are copied; it is not in the list of nodes.
    InitCopied = "cluster.init.copied";
    /// `cluster init`: the node is in the list of nodes; its file does not say so.
    InitEntered = "cluster.init.entered";
    /// The file says that the node is a member; its own store has not been put aside.
    MemberWritten = "cluster.member.written";
    /// `cluster join`: a number is drawn; nothing is written down.
    JoinDrawn = "cluster.join.drawn";
    /// `cluster join`: what the node is to be is written down, its inside has not begun again.
    JoinWritten = "cluster.join.written";
    /// `cluster join`: the store has made room for the node's member, which has not started.
    JoinRoom = "cluster.join.room";
    /// `cluster join`: the node's member of the store has its vote; the node is not in the list of nodes.
    JoinPromoted = "cluster.join.promoted";
    /// `cluster join`: the node is in the list of nodes; its file does not say so.
    JoinEntered = "cluster.join.entered";
    /// `cluster leave`: what the node is to be is written down, its inside has not begun again.
    LeaveWritten = "cluster.leave.written";
    /// `cluster leave`: the node is in the list of nodes no more; its member of the store is there.
    LeaveStruck = "cluster.leave.struck";
    /// `cluster leave`: its member of the store is removed; its file is there.
    LeaveRemoved = "cluster.leave.removed";
    /// `cluster rotate`: the node that begins it has the new credentials in its file; the store has no record of it.
    RotateBegun = "cluster.rotate.begun";
    /// Another node has the new credentials in its file; it accepts nobody by them.
    RotateTaken = "cluster.rotate.taken";
    /// The file has the new credentials first; the node shows the old ones.
    RotateUsed = "cluster.rotate.used";
    /// The file has the new credentials only; the node accepts both.
    RotateForgotten = "cluster.rotate.forgotten";
    /// An image of a volume is made; the record does not say so.
    VolumeMade = "volume.made";
    /// All images of a new volume are made; the volume does not exist yet.
    VolumeFinishing = "volume.finishing";
    /// A new volume exists; whoever asked for it has no answer.
    VolumeFinished = "volume.finished";
    /// The image of a volume is erased; the record does not say so.
    VolumeErased = "volume.erased";
}

/// Why the environment does not say when to end.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadFault {
    /// It is not two words.
    #[error("{VARIABLE}={0}: POINT:COUNT is expected, COUNT from 1 on")]
    Form(String),
    /// There is no such point.
    #[error("{VARIABLE}: there is no point {0}; there are {all}", all = names())]
    Unknown(String),
}

fn names() -> String {
    Point::ALL.iter().map(|point| point.name()).collect::<Vec<_>>().join(", ")
}

#[cfg(any(test, feature = "fault-points"))]
fn parse(text: &str) -> Result<(Point, u64), BadFault> {
    let form = || BadFault::Form(text.to_owned());
    let (name, count) = text.split_once(':').ok_or_else(form)?;
    let count = count.parse().ok().filter(|count| *count > 0).ok_or_else(form)?;
    let point = Point::ALL.iter().find(|point| point.name() == name);
    Ok((*point.ok_or_else(|| BadFault::Unknown(name.to_owned()))?, count))
}

/// Looks at the environment, once, before anything else runs: what it asks for, in words.
///
/// # Errors
/// [`BadFault`].
pub fn arm() -> Result<Option<String>, BadFault> {
    #[cfg(feature = "fault-points")]
    let armed = armed::arm()?;
    #[cfg(not(feature = "fault-points"))]
    let armed = None;
    Ok(armed)
}

/// The process is at `point`.
#[inline(always)]
pub fn pass(point: Point) {
    #[cfg(feature = "fault-points")]
    armed::pass(point, false);
    #[cfg(not(feature = "fault-points"))]
    let _ = point;
}

/// What has been handed over to be sent brings the process to `point` as soon as it is on the wire.
#[inline(always)]
pub fn pass_when_sent(point: Point) {
    #[cfg(feature = "fault-points")]
    armed::pass(point, true);
    #[cfg(not(feature = "fault-points"))]
    let _ = point;
}

/// Something that was handed over has been sent.
#[inline(always)]
pub fn sent() {
    #[cfg(feature = "fault-points")]
    armed::sent();
}

#[cfg(feature = "fault-points")]
mod armed {
    use std::sync::OnceLock;
    use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

    use super::{BadFault, Point, VARIABLE, parse};

    struct Armed {
        point: Point,
        /// How often it is still passed, the last time included.
        left: AtomicU64,
    }

    static ARMED: OnceLock<Armed> = OnceLock::new();
    /// Whether the process ends with the next bytes that are sent.
    static SENDS: AtomicBool = AtomicBool::new(false);

    pub(super) fn arm() -> Result<Option<String>, BadFault> {
        let Some(text) = std::env::var_os(VARIABLE) else { return Ok(None) };
        let text = text.to_string_lossy().into_owned();
        let (point, count) = parse(&text)?;
        let _ = ARMED.set(Armed { point, left: AtomicU64::new(count) });
        Ok(Some(text))
    }

    pub(super) fn pass(point: Point, when_sent: bool) {
        let Some(armed) = ARMED.get().filter(|armed| armed.point == point) else { return };
        if armed.left.fetch_sub(1, Ordering::Relaxed) != 1 {
            return;
        }
        if when_sent {
            SENDS.store(true, Ordering::Relaxed);
        } else {
            crate::sys::end_at_once();
        }
    }

    pub(super) fn sent() {
        if SENDS.load(Ordering::Relaxed) {
            crate::sys::end_at_once();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn points_are_found_by_their_names_and_no_two_have_the_same() {
        for point in Point::ALL {
            assert_eq!(parse(&format!("{}:7", point.name())), Ok((*point, 7)));
        }
    }

    #[test]
    fn what_is_no_point_is_told_which_there_are() {
        let unknown = parse("mirror.primary.nowhere:1").unwrap_err().to_string();
        assert!(unknown.contains("no point mirror.primary.nowhere; there are "), "{unknown}");
        assert!(Point::ALL.iter().all(|point| unknown.contains(point.name())), "{unknown}");
        for text in ["", "mirror.leg.marked", "mirror.leg.marked:", "mirror.leg.marked:0", ":1x"] {
            assert_eq!(parse(text), Err(BadFault::Form(text.to_owned())));
        }
        assert!(matches!(parse(":1"), Err(BadFault::Unknown(_))));
    }
}
