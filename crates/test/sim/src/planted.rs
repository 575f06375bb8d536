//! Small stores with one well-known mistake each. The simulator must find every mistake within few
//! seeds, and must pass the same store without it: this shows that the faults are effective, and
//! cause no false alarms.

mod counter_cells;
mod framed_echo;
mod leaf;
mod lease;
mod primary_backup;
mod two_copies;
mod versioned_sectors;

use ::mirror::Mistake as Flaw;
use ::pool::Mistake as Slip;
use disk::claim;
use rt::sim::World;

use crate::Scenario;
use crate::scenarios::file::{self, FlushBehaviour};
use crate::scenarios::intent_log::{self, Mistake};
use crate::scenarios::mirror::{self, CloneMode, ScenarioConfig};
use crate::scenarios::{iscsi, nvme, pool, shared_disks};

/// A store with and without its mistake.
#[derive(Clone, Copy, Debug)]
pub struct PlantedMistake {
    /// With the mistake.
    pub with_mistake: Scenario,
    /// Without it.
    pub without_mistake: Scenario,
    /// Seeds among which the mistake must show.
    pub detection_seeds: u64,
}

/// Whether a store makes its mistake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Variant {
    Correct,
    Mistaken,
}

macro_rules! planted {
    ($name:literal, $within:literal, $innocent:literal, $about:literal, $run:path) => {
        PlantedMistake {
            with_mistake: Scenario {
                name: concat!($name, "-wrong"),
                description: $about,
                test_seeds: $within,
                run: |w| Box::pin($run(w, Variant::Mistaken)),
            },
            without_mistake: Scenario {
                name: concat!($name, "-right"),
                description: concat!("the same without the mistake: ", $about),
                test_seeds: $innocent,
                run: |w| Box::pin($run(w, Variant::Correct)),
            },
            detection_seeds: $within,
        }
    };
    ($name:literal, $within:literal, $about:literal, $($run:tt)+) => {
        planted!($name, $within, $within, $about, $($run)+)
    };
}

fn flush_behaviour(variant: Variant) -> FlushBehaviour {
    match variant {
        Variant::Correct => FlushBehaviour::Performed,
        Variant::Mistaken => FlushBehaviour::Skipped,
    }
}

async fn file_no_flush(world: World, variant: Variant) -> Result<(), String> {
    file::run(world, flush_behaviour(variant)).await
}

async fn shared_heartbeat(world: World, variant: Variant) -> Result<(), String> {
    let mistake = match variant {
        Variant::Correct => claim::Mistake::None,
        Variant::Mistaken => claim::Mistake::IgnoresHeartbeat,
    };
    shared_disks::run(world, mistake).await
}

async fn iscsi_no_flush(world: World, variant: Variant) -> Result<(), String> {
    iscsi::run(world, flush_behaviour(variant)).await
}

async fn nvme_no_flush(world: World, variant: Variant) -> Result<(), String> {
    nvme::run(world, flush_behaviour(variant)).await
}

/// A user of an intent log, with one of its mistakes or without.
macro_rules! intent {
    ($name:ident, $mistake:ident) => {
        async fn $name(world: World, variant: Variant) -> Result<(), String> {
            let wrong = variant == Variant::Mistaken;
            intent_log::run(world, if wrong { Mistake::$mistake } else { Mistake::None }).await
        }
    };
}

intent!(intent_unflushed, ClearsUnflushed);
intent!(intent_late, SnapshotsLate);
intent!(intent_unmarked, WritesUnmarked);

/// A mirror, with one of its mistakes or without.
macro_rules! mirror {
    ($name:ident, $mistake:ident) => {
        mirror!($name, $mistake, mirror::run);
    };
    ($name:ident, $mistake:ident, $run:path) => {
        async fn $name(world: World, variant: Variant) -> Result<(), String> {
            let wrong = variant == Variant::Mistaken;
            let mistake = if wrong { Flaw::$mistake } else { Flaw::None };
            $run(world, ScenarioConfig { mistake, ..ScenarioConfig::default() }).await
        }
    };
}

mirror!(mirror_alone, AcknowledgesBeforeReplication);
mirror!(initiators_alone, AcknowledgesBeforeReplication, mirror::initiators::run);

mirror!(fencing_unsettled, FlushesBeforeMetadataApplied, mirror::fencing::run);
mirror!(fencing_late, AppliesMetadataLate, mirror::fencing::run);

mirror!(full_unequal, SkipsNoSpaceReplacement, mirror::full::run);
mirror!(full_told, ReportsPartialWrites, mirror::full::run);

mirror!(mirror_unmarked, SkipsIntentLog);
mirror!(mirror_lease, IgnoresLeases);
mirror!(mirror_resync, SkipsNewWritesDuringResync);
mirror!(mirror_entries, ReadsUncommitted);
mirror!(mirror_unequal, SkipsReconciliation);
mirror!(mirror_undrained, ReportsBeforeDrain);
mirror!(mirror_unseen, HidesChangeNotices);
mirror!(mirror_trusting, SkipsGenerationCheck);
mirror!(mirror_late_lineage, ClearsBeforeGeneration);
mirror!(mirror_led_back, TakesOverWhenRolledBack);
mirror!(mirror_restored, TrustsRestoredStore, mirror::store_rollback::run);

async fn mirror_cloned(world: World, variant: Variant) -> Result<(), String> {
    let lives = match variant {
        Variant::Correct => CloneMode::ClonesDetected,
        Variant::Mistaken => CloneMode::ClonesUndetected,
    };
    mirror::cloned::run(world, ScenarioConfig { clone_mode: lives, ..ScenarioConfig::default() })
        .await
}

/// A pool, with one of its mistakes or without.
macro_rules! pool {
    ($name:ident, $mistake:ident) => {
        async fn $name(world: World, variant: Variant) -> Result<(), String> {
            let wrong = variant == Variant::Mistaken;
            pool::run(world, if wrong { Slip::$mistake } else { Slip::None }).await
        }
    };
}

pool!(pool_set_back, TrustsRolledBackDisks);
pool!(pool_unproved, IgnoresProvenCommits);
pool!(pool_closes, SkipsVersionOnClose);
pool!(pool_writes, SkipsPeriodicVersions);

/// All of them.
#[must_use]
#[expect(clippy::too_many_lines, reason = "a list")]
pub fn planted_mistakes() -> Vec<PlantedMistake> {
    vec![
        planted!("ack-early", 20, "acknowledges a write before the sync", counter_cells::ack_early),
        planted!("sync-again", 40, "trusts a sync after a failed one", counter_cells::sync_again),
        planted!("two-copies", 40, "writes both copies of a record concurrently", two_copies::run),
        planted!("no-flush", 20, "answers a flush without flushing", leaf::no_flush),
        planted!("file-no-flush", 20, "an image whose flush does nothing", file_no_flush),
        planted!("iscsi-no-flush", 40, "a node whose flush does nothing", iscsi_no_flush),
        planted!("nvme-no-flush", 40, "a node whose flush does nothing", nvme_no_flush),
        planted!("intent-unflushed", 200, "clears dirty bits without a flush", intent_unflushed),
        planted!("intent-late", 200, "clears dirty bits of writes during the flush", intent_late),
        planted!("intent-unmarked", 200, "writes before its dirty bit is durable", intent_unmarked),
        planted!("no-fua", 20, "reports a write as durable that is not", leaf::no_fua),
        planted!("shared-sector", 20, "rewrites the neighbours of a block", leaf::shared_sector),
        planted!("zero-too-far", 20, "zeroes one block too many", leaf::zero_too_far),
        planted!("stamps", 20, "trusts whatever the disk returns", versioned_sectors::run),
        planted!(
            "lone-primary",
            40,
            "continues alone when the backup is silent",
            primary_backup::run
        ),
        planted!(
            "lease-before",
            40,
            "checks its lease before the work only",
            lease::checks_lease_before_work_only
        ),
        planted!("lease-drift", 40, "takes the peer's clock for its own", lease::ignores_drift),
        planted!("shared-disk", 200, 20, "claims a disk that is in use", shared_heartbeat),
        planted!("mirror-alone", 60, 2, "answers when one member has the write", mirror_alone),
        planted!(
            "initiators-alone",
            200,
            2,
            "answers initiators when one member has the write",
            initiators_alone
        ),
        planted!(
            "fencing-unsettled",
            60,
            2,
            "answers while the preempted initiator's writes are in flight",
            fencing_unsettled
        ),
        planted!("fencing-late", 60, 2, "revokes access only after the commit", fencing_late),
        planted!(
            "full-unequal",
            60,
            1,
            "rejects a no-space write and leaves copies different",
            full_unequal
        ),
        planted!("full-told", 200, 1, "reports a partial write as complete", full_told),
        planted!("mirror-unmarked", 60, 2, "writes without a dirty bit", mirror_unmarked),
        planted!("mirror-lease", 60, 2, "serves without a lease", mirror_lease),
        planted!("mirror-resync", 60, 2, "resyncs without mirroring new writes", mirror_resync),
        planted!("mirror-entries", 60, 2, "reads uncommitted data", mirror_entries),
        planted!("mirror-unequal", 60, 2, "activates a view before reconciliation", mirror_unequal),
        planted!(
            "mirror-undrained",
            60,
            2,
            "reports an operation before it has ended",
            mirror_undrained
        ),
        planted!(
            "mirror-unseen",
            60,
            2,
            "changes blocks without notifying the watcher",
            mirror_unseen
        ),
        planted!("pool-set-back", 2000, 2, "trusts a rolled-back disk", pool_set_back),
        planted!("pool-unproved", 2000, 2, "overwrites a disk with newer metadata", pool_unproved),
        planted!("pool-closes", 2000, 2, "closes without writing a version", pool_closes),
        planted!("pool-writes", 2000, 2, "writes for long without a periodic version", pool_writes),
        planted!("mirror-trusting", 200, 2, "trusts a rolled-back copy", mirror_trusting),
        planted!(
            "mirror-late-lineage",
            400,
            2,
            "clears dirty bits before others have recorded the generation",
            mirror_late_lineage
        ),
        planted!(
            "mirror-led-back",
            200,
            2,
            "becomes primary with a rolled-back copy",
            mirror_led_back
        ),
        planted!("mirror-cloned", 50, 2, "accepts a clone as the node", mirror_cloned),
        planted!("mirror-restored", 50, 2, "trusts a rolled-back store", mirror_restored),
        planted!("one-read", 20, "assumes that one read returns one message", framed_echo::run),
    ]
}

/// Their scenarios, for the command line.
#[must_use]
pub fn all() -> Vec<Scenario> {
    planted_mistakes().into_iter().flat_map(|p| [p.with_mistake, p.without_mistake]).collect()
}
