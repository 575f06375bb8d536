//! Facts for tests.
#![allow(
    clippy::unwrap_used,
    clippy::missing_panics_doc,
    reason = "a test fails where it unwraps nothing"
)]

use api::NodeInfo;
use block::{Access, Epoch};
use cluster::identity::{NodeIndex, Role};
use cluster::nodes::{NodePortals, NodeRecord, NodeView};
use cluster::store::Revision;
use engine::{
    CommandKindReport, CoreReport, MirrorReport, PoolDiskState, PoolReport, PoolVolumeReport,
    Redundancy, VolumeReport,
};
use mirror::MirrorStatus;
use mirror::config::{ConfigReplica, CopyHistory, InSyncMember, MirrorConfig};
use peer::{Incarnation, NodeId, View};
use records::reconcile::Observed;
use records::record::StoredVolumeRecord;
use records::samples::record;
use target::ClientReport;
use uuid::Uuid;

use crate::node_facts::NodeFacts;
use crate::pool_status::{PoolFacts, PoolObserved};
use crate::space::{FileSystemSpace, SpaceUsage};

/// A data node; `alive`: whether the store knows it to be alive.
#[must_use]
pub fn node(number: u16, name: &str, alive: bool) -> (NodeId, NodeView) {
    let node = NodeId(number);
    let record = NodeRecord {
        node,
        index: NodeIndex::new(0).unwrap(),
        name: name.into(),
        role: Role::Data,
        data_addresses: Vec::new(),
        heartbeat_addresses: Vec::new(),
        portals: NodePortals::default(),
        data_dir: "/v".into(),
        join_address: None,
        failure_domain: String::new(),
        version: String::new(),
        is_drained: false,
    };
    (node, NodeView { record, is_alive: alive })
}

/// A report of a mirror with two replicas, one in sync.
#[must_use]
pub fn mirror() -> MirrorReport {
    let replica = |n| ConfigReplica { node: NodeId(n), image: Uuid::nil(), is_new: false };
    let in_sync = vec![InSyncMember { node: NodeId(1), incarnation: Incarnation(1) }];
    let replicas = vec![replica(1), replica(2)];
    let record = MirrorConfig {
        epoch: Epoch(1),
        config_id: 1,
        replicas,
        in_sync,
        primary: NodeId(1),
        cold_start_epoch: Epoch::default(),
        history: CopyHistory::default(),
    };
    let status = MirrorStatus {
        config: Some(record),
        view: View::default(),
        not_serving: None,
        linked: Vec::new(),
        resyncs: Vec::new(),
        unreadable_data: Vec::new(),
        resynced_bytes: 77,
        dirty_regions: Vec::new(),
        region_bytes: 65536,
        leg_error: None,
        is_full: false,
        leg_loss: None,
        read_errors: 0,
        failed_resyncs: Vec::new(),
        newer_replicas: Vec::new(),
        store_silent_for: None,
    };
    MirrorReport { status, access: Access::Optimized }
}

/// A report of an idle volume with that mirror.
#[must_use]
pub fn volume_report(id: Uuid) -> VolumeReport {
    VolumeReport {
        id,
        kinds: [(); 4].map(|()| CommandKindReport::default()),
        in_flight: 0,
        aborts: 0,
        overlaps: 0,
        memory_waits: 0,
        mirror: Some(mirror()),
        claim_lost: None,
        is_dead: false,
        reservations_error: None,
    }
}

/// A RAID 5 over three disks, with one volume.
#[must_use]
pub fn pool_report(name: &str) -> PoolReport {
    let disk = |member: u16| engine::PoolDiskReport {
        member_id: member,
        id: Uuid::from_u128(member.into()),
        serial: format!("S{member}"),
        path: Some(format!("/dev/sd{member}").into()),
        bytes: 1 << 40,
        extents: 10,
        extent_capacity: 100,
        state: PoolDiskState::Active,
        stale_extents: 0,
        has_no_target: false,
        errors_since_s: None,
        read_errors: 0,
        write_errors: 0,
        checksum_errors: 0,
        repaired_blocks: 0,
        unrepairable_blocks: 0,
        is_slow: false,
        slow_episodes: 0,
        redirected_reads: 0,
    };
    let volume = PoolVolumeReport {
        id: Uuid::from_u128(9),
        bytes: 1 << 30,
        allocated_bytes: 1 << 29,
        fault_tolerance: Some(1),
    };
    PoolReport {
        id: Uuid::from_u128(7),
        name: name.into(),
        redundancy: Redundancy::Parity,
        columns: 3,
        strip_bytes: 65536,
        has_checksums: false,
        raw_bytes: 3 << 40,
        usable_bytes: 2 << 40,
        allocated_bytes: 1 << 29,
        free_bytes: (2 << 40) - (1 << 29),
        fault_tolerance: Some(1),
        disks: vec![disk(0), disk(1), disk(2)],
        volumes: vec![volume],
        lost_ranges: Vec::new(),
        unrepaired_ranges: Vec::new(),
        unrepaired_truncated: false,
        stale_extents: 0,
        scrub: None,
        write_error: None,
    }
}

/// A healthy open pool.
#[must_use]
pub fn pool_facts(name: &str) -> PoolFacts {
    PoolFacts {
        record: records::samples::pool_record(name),
        observed: PoolObserved::Open,
        report: Some(pool_report(name)),
        rebuild: None,
        volumes: vec![(Uuid::from_u128(9), "web".into())],
    }
}

/// Facts of a standalone node with these volumes, which serves.
#[must_use]
pub fn facts(volumes: Vec<(StoredVolumeRecord, Observed)>) -> NodeFacts {
    NodeFacts {
        node: NodeInfo {
            name: "n".into(),
            version: "0".into(),
            pid: 1,
            uptime_s: 2,
            data_dir: "/v".into(),
            cores: 1,
            disk_backend: "io_uring".into(),
        },
        serving: true,
        startup_wait: None,
        volumes,
        damaged_records: Vec::new(),
        store_trouble: None,
        rival_process: None,
        anchor_error: None,
        is_plaintext: false,
        unreadable_secrets: Vec::new(),
        image_findings: Vec::new(),
        join_findings: Vec::new(),
        cluster: None,
        cores: Vec::new(),
        api_clients: ClientReport::default(),
        space: SpaceUsage { data_dir: Some((100 << 30, 50 << 30)), ..SpaceUsage::default() },
        pools: Vec::new(),
        damaged_pools: Vec::new(),
        low_space_percent: 10,
    }
}

/// All volumes in one file system.
pub fn with_space(facts: &mut NodeFacts, bytes: u64, free: u64) {
    let volumes = facts.volumes.iter().map(|(s, _)| s.record.id).collect();
    let home = FileSystemSpace { path: "/srv".into(), bytes, free, volumes };
    facts.space.file_systems = vec![home];
}

/// A volume of this name, and its state on this node. Any initiator may access it.
#[must_use]
pub fn volume(name: &str, observed: Observed) -> (StoredVolumeRecord, Observed) {
    let mut record = record(name);
    record.allow.insert(api::Initiator::Any);
    (StoredVolumeRecord { record, revision: Revision(1) }, observed)
}

/// The state of a volume that is open here.
#[must_use]
pub fn open() -> Observed {
    let image = records::record::ImageInfo { id: Uuid::nil(), size_bytes: 1, generation: 2 };
    Observed::Open { core: 0, image, published: None }
}

/// A core with one volume.
#[must_use]
pub fn core(id: Uuid) -> CoreReport {
    let report = VolumeReport { mirror: None, ..volume_report(id) };
    CoreReport {
        core: 0,
        sessions: Vec::new(),
        guests: Vec::new(),
        refused_connections: 0,
        clients: ClientReport::default(),
        memory: rt::buf::BufferPool::new(16 << 20).unwrap().usage(),
        volumes: vec![report],
    }
}
