//! What two members owe each other within one epoch (RFD 0010, 5.1).

use std::time::Duration;

use peer::{NodeId, Stamp};

use super::super::record::Member as Listed;
use super::Settings;

/// Another member, as this one sees it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Peer {
    pub(super) listed: Listed,
    /// When the newest of its promises was asked for.
    held: Option<Duration>,
    /// When the epoch began here: stands for a first promise of its where time is granted to it.
    since: Duration,
    /// When this member last promised it anything.
    given: Duration,
    /// When the newest of its promises was asked for that count for one who goes: it was alive when
    /// this member had stopped serving.
    pub(super) attested: Option<Duration>,
    /// No promise to it from now on; it is going to be put out.
    pub(super) excluded: bool,
    /// The data path has lost patience with it.
    pub(super) stuck: bool,
    /// Excluded, it has said that it serves no more in this view.
    pub(super) yielded: bool,
    /// It has been asked because it asked.
    asked_back: bool,
}

impl Peer {
    pub(super) fn new(listed: Listed, now: Duration) -> Self {
        Self {
            listed,
            held: None,
            since: now,
            given: now,
            attested: None,
            excluded: false,
            stuck: false,
            yielded: false,
            asked_back: false,
        }
    }

    pub(super) fn node(&self) -> NodeId {
        self.listed.node
    }

    /// Whether its promise is fresh: the one thing that lets this member serve beside it.
    pub(super) fn held(&self, now: Duration, settings: &Settings) -> bool {
        self.lapses_at(settings).is_some_and(|lapses| now < lapses)
    }

    /// Whether it is to be asked because it has asked: nothing it has promised in this epoch has come, and what
    /// it was asked before it had adopted the epoch it could not answer. Once: where its answers do not come,
    /// those who ask each other would never end.
    pub(super) fn is_asked_back(&mut self) -> bool {
        self.held.is_none() && !std::mem::replace(&mut self.asked_back, true)
    }

    #[cfg(test)]
    pub(super) fn times(&mut self) -> [Option<&mut Duration>; 3] {
        [self.held.as_mut(), Some(&mut self.since), Some(&mut self.given)]
    }

    /// When its promise runs out, if it has given one.
    pub(super) fn lapses_at(&self, settings: &Settings) -> Option<Duration> {
        self.held.map(|stamp| stamp + settings.lease())
    }

    pub(super) fn stamp(&self) -> Option<Stamp> {
        self.held.map(to_stamp)
    }

    /// It has promised, and this member had asked at `stamp`; it may have stopped serving before.
    pub(super) fn promised(&mut self, stamp: Stamp, now: Duration, stopped: Option<Duration>) {
        let asked = Duration::from_nanos(stamp.0);
        // A stamp of the future is not one of this life's.
        if asked <= now {
            self.held = self.held.max(Some(asked));
            if stopped.is_some_and(|stopped| asked >= stopped) {
                self.attested = self.attested.max(Some(asked));
            }
        }
    }

    /// Whether the volume may be left to it: it has promised something since this member stopped
    /// serving, and not long ago.
    pub(super) fn attests(&self, now: Duration, settings: &Settings) -> bool {
        self.attested.is_some_and(|asked| now < asked + settings.lease() / 2)
    }

    /// This member promises now.
    pub(super) fn promise(&mut self, now: Duration) {
        self.given = now;
    }

    /// When its silence makes this member ask the store; a new epoch grants a lease first.
    pub(super) fn doubted_at(&self, settings: &Settings) -> Duration {
        self.held.map_or(self.since, |held| held.max(self.since))
            + settings.lease()
            + settings.renewal()
    }

    /// When it holds no promise of this member any more, whatever its clock does.
    pub(super) fn released_at(&self, settings: &Settings) -> Duration {
        self.given + settings.grace()
    }

    /// Whether it has stopped serving for certain.
    pub(super) fn is_released(&self, now: Duration, settings: &Settings) -> bool {
        self.yielded || now >= self.released_at(settings)
    }

    /// Whoever is in the new view is taken back in.
    pub(super) fn take_back(&mut self) {
        (self.excluded, self.stuck, self.yielded) = (false, false, false);
    }
}

/// This node's clock as others carry it.
pub(super) fn to_stamp(now: Duration) -> Stamp {
    // 2^64 ns are 584 years of uptime.
    Stamp(u64::try_from(now.as_nanos()).unwrap_or(u64::MAX))
}
