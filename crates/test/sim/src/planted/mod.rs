//! Small stores with one well-known mistake each. The simulator must find every mistake within few
//! seeds, and the same store without it must pass them all: that is how we know that the faults
//! bite and that they do not bite the innocent.

mod copies;
mod frames;
pub(crate) mod leaf;
mod lease;
mod ledger;
mod pair;
mod stamps;

use ::mirror::Mistake as Flaw;
use ::pool::Mistake as Slip;
use disk::claim;
use rt::sim::World;

use crate::Scenario;
use crate::scenarios::file::{self, Flushes};
use crate::scenarios::intent::{self, Mistake};
use crate::scenarios::mirror::{self, LivesPlan, Plan};
use crate::scenarios::{iscsi, nvme, pool, shared};

/// A store with and without its mistake.
#[derive(Clone, Copy, Debug)]
pub struct Planted {
    /// With the mistake.
    pub wrong: Scenario,
    /// Without it.
    pub right: Scenario,
    /// Seeds among which the mistake must show.
    pub within: u64,
}

/// Whether a store makes its mistake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Variant {
    Right,
    Wrong,
}

macro_rules! planted {
    ($name:literal, $within:literal, $innocent:literal, $about:literal, $play:path) => {
        Planted {
            wrong: Scenario {
                name: concat!($name, "-wrong"),
                about: $about,
                test_seeds: $within,
                play: |w| Box::pin($play(w, Variant::Wrong)),
            },
            right: Scenario {
                name: concat!($name, "-right"),
                about: concat!("the same without the mistake: ", $about),
                test_seeds: $innocent,
                play: |w| Box::pin($play(w, Variant::Right)),
            },
            within: $within,
        }
    };
    ($name:literal, $within:literal, $about:literal, $($play:tt)+) => {
        planted!($name, $within, $within, $about, $($play)+)
    };
}

fn flushes(variant: Variant) -> Flushes {
    match variant {
        Variant::Right => Flushes::Honest,
        Variant::Wrong => Flushes::Skipped,
    }
}

async fn file_no_flush(world: World, variant: Variant) -> Result<(), String> {
    file::play(world, flushes(variant)).await
}

async fn shared_heartbeat(world: World, variant: Variant) -> Result<(), String> {
    let mistake = match variant {
        Variant::Right => claim::Mistake::None,
        Variant::Wrong => claim::Mistake::IgnoresHeartbeat,
    };
    shared::play(world, mistake).await
}

async fn iscsi_no_flush(world: World, variant: Variant) -> Result<(), String> {
    iscsi::play(world, flushes(variant)).await
}

async fn nvme_no_flush(world: World, variant: Variant) -> Result<(), String> {
    nvme::play(world, flushes(variant)).await
}

/// An owner of an intent log, with one of his mistakes or without.
macro_rules! intent {
    ($name:ident, $mistake:ident) => {
        async fn $name(world: World, variant: Variant) -> Result<(), String> {
            let wrong = variant == Variant::Wrong;
            intent::play(world, if wrong { Mistake::$mistake } else { Mistake::None }).await
        }
    };
}

intent!(intent_unflushed, ClearsUnflushed);
intent!(intent_late, StampsLate);
intent!(intent_unmarked, WritesUnmarked);

/// A mirror, with one of its mistakes or without.
macro_rules! mirror {
    ($name:ident, $mistake:ident) => {
        mirror!($name, $mistake, mirror::play);
    };
    ($name:ident, $mistake:ident, $play:path) => {
        async fn $name(world: World, variant: Variant) -> Result<(), String> {
            let wrong = variant == Variant::Wrong;
            let mistake = if wrong { Flaw::$mistake } else { Flaw::None };
            $play(world, Plan { mistake, ..Plan::default() }).await
        }
    };
}

mirror!(mirror_alone, AcknowledgesAlone);
mirror!(initiators_alone, AcknowledgesAlone, mirror::initiators::play);

mirror!(fencing_unsettled, FlushesUnsettled, mirror::fencing::play);
mirror!(fencing_late, TellsAsideLate, mirror::fencing::play);

mirror!(full_unequal, RefusesUnequal, mirror::full::play);
mirror!(full_told, TellsRefused, mirror::full::play);

mirror!(mirror_unmarked, SkipsIntentLog);
mirror!(mirror_lease, IgnoresLease);
mirror!(mirror_resync, ResyncsWithoutNewWrites);
mirror!(mirror_entries, ReadsThroughEntries);
mirror!(mirror_unequal, OpensUnequal);
mirror!(mirror_undrained, TellsUndrained);
mirror!(mirror_unseen, HidesChanges);
mirror!(mirror_trusting, TrustsJoiners);
mirror!(mirror_late_lineage, ClearsBeforeLineage);
mirror!(mirror_led_back, LeadsWhenOlder);
mirror!(mirror_restored, BelievesOlderStore, mirror::restored::play);

async fn mirror_cloned(world: World, variant: Variant) -> Result<(), String> {
    let lives = match variant {
        Variant::Right => LivesPlan::Claimed,
        Variant::Wrong => LivesPlan::Ignored,
    };
    mirror::cloned::play(world, Plan { lives, ..Plan::default() }).await
}

/// A pool, with one of its mistakes or without.
macro_rules! pool {
    ($name:ident, $mistake:ident) => {
        async fn $name(world: World, variant: Variant) -> Result<(), String> {
            let wrong = variant == Variant::Wrong;
            pool::play(world, if wrong { Slip::$mistake } else { Slip::None }).await
        }
    };
}

pool!(pool_set_back, BelievesSetBack);
pool!(pool_unproved, IgnoresProofs);
pool!(pool_closes, ClosesUnversioned);
pool!(pool_writes, WritesUnversioned);

/// All of them.
#[must_use]
pub fn pairs() -> Vec<Planted> {
    vec![
        planted!("ack-early", 20, "acknowledges before the sync", ledger::ack_early),
        planted!("sync-again", 40, "believes a sync after a failed one", ledger::sync_again),
        planted!("two-copies", 40, "writes both copies of a record at once", copies::play),
        planted!("no-flush", 20, "answers a flush and does nothing", leaf::no_flush),
        planted!("file-no-flush", 20, "an image whose flush does nothing", file_no_flush),
        planted!("iscsi-no-flush", 40, "a node whose flush does nothing", iscsi_no_flush),
        planted!("nvme-no-flush", 40, "a node whose flush does nothing", nvme_no_flush),
        planted!("intent-unflushed", 200, "takes marks without a flush", intent_unflushed),
        planted!("intent-late", 200, "takes marks of writes during the flush", intent_late),
        planted!("intent-unmarked", 200, "writes while the mark is on its way", intent_unmarked),
        planted!("no-fua", 20, "calls a write durable that is not", leaf::no_fua),
        planted!("shared-sector", 20, "rewrites the neighbours of a block", leaf::shared_sector),
        planted!("zero-too-far", 20, "zeroes one block too many", leaf::zero_too_far),
        planted!("stamps", 20, "believes whatever the disk returns", stamps::play),
        planted!("lone-primary", 40, "goes on alone when the backup is silent", pair::play),
        planted!("lease-before", 40, "looks at its lease before the work", lease::looks_before),
        planted!("lease-drift", 40, "takes its clock for its peer's", lease::ignores_drift),
        planted!("shared-disk", 200, 20, "takes a disk whoever uses it", shared_heartbeat),
        planted!("mirror-alone", 60, 2, "answers when one has it", mirror_alone),
        planted!(
            "initiators-alone",
            200,
            2,
            "answers initiators when one has it",
            initiators_alone
        ),
        planted!(
            "fencing-unsettled",
            60,
            2,
            "answers while the loser's writes are under way",
            fencing_unsettled
        ),
        planted!("fencing-late", 60, 2, "takes rights after the commit", fencing_late),
        planted!("full-unequal", 60, 1, "refuses, and leaves copies different", full_unequal),
        planted!("full-told", 200, 1, "takes a part of a write for all of it", full_told),
        planted!("mirror-unmarked", 60, 2, "writes without a mark", mirror_unmarked),
        planted!("mirror-lease", 60, 2, "serves without a lease", mirror_lease),
        planted!("mirror-resync", 60, 2, "copies, and forgets what is new", mirror_resync),
        planted!("mirror-entries", 60, 2, "reads what may not stay", mirror_entries),
        planted!("mirror-unequal", 60, 2, "opens before all are equal", mirror_unequal),
        planted!("mirror-undrained", 60, 2, "tells before it has ended", mirror_undrained),
        planted!("mirror-unseen", 60, 2, "changes blocks behind a watcher's back", mirror_unseen),
        planted!("pool-set-back", 2000, 2, "believes a disk that was set back", pool_set_back),
        planted!("pool-unproved", 2000, 2, "overwrites a disk that knows more", pool_unproved),
        planted!("pool-closes", 2000, 2, "closes without a version", pool_closes),
        planted!("pool-writes", 2000, 2, "writes for long in one version", pool_writes),
        planted!("mirror-trusting", 200, 2, "believes a copy that was set back", mirror_trusting),
        planted!(
            "mirror-late-lineage",
            400,
            2,
            "takes marks before others have recorded it",
            mirror_late_lineage
        ),
        planted!("mirror-led-back", 200, 2, "leads with a copy that was set back", mirror_led_back),
        planted!("mirror-cloned", 50, 2, "takes a clone for the node", mirror_cloned),
        planted!("mirror-restored", 50, 2, "believes a store that was set back", mirror_restored),
        planted!("one-read", 20, "takes one read for one message", frames::play),
    ]
}

/// Their scenarios, for the command line.
#[must_use]
pub fn all() -> Vec<Scenario> {
    pairs().into_iter().flat_map(|p| [p.wrong, p.right]).collect()
}
