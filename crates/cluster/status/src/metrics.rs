//! Metrics for Prometheus, in the OpenMetrics text format, made from the same facts as the status.

use std::collections::HashMap;
use std::fmt;

use engine::{
    CommandKindReport, LATENCY_BOUNDS_US, LatencyHistogram, PoolDiskState, PoolReport, VolumeReport,
};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{
    DescriptorEncoder, EncodeCounterValue, EncodeGaugeValue, MetricEncoder, NoLabelSet, text,
};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::Registry;
use records::reconcile::Observed;
use records::record::StoredVolumeRecord;
use target::auth_throttle::AuthMethod;
use volume::CommandKind;

use crate::node_facts::NodeFacts;
use crate::verdict::assess;

/// Media type of the result of [`render`].
pub const MEDIA_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// The metrics of a node.
#[must_use]
pub fn render(facts: NodeFacts) -> String {
    let mut registry = Registry::with_prefix("windrose");
    registry.register_collector(Box::new(Metrics::new(facts)));
    let mut page = String::new();
    text::encode(&mut page, &registry).expect("a string takes whatever is written to it");
    page
}

#[derive(Debug)]
struct Metrics {
    facts: NodeFacts,
    /// Open volumes, by name: indices of the volume, of its core, and of its report there.
    open: Vec<(usize, usize, usize)>,
}

impl Collector for Metrics {
    fn encode(&self, mut to: DescriptorEncoder<'_>) -> fmt::Result {
        self.node(&mut to)?;
        self.cores(&mut to)?;
        self.volumes(&mut to)?;
        self.replicas(&mut to)?;
        self.pools(&mut to)?;
        self.disks(&mut to)?;
        self.commands(&mut to)
    }
}

type Labels<'a, const N: usize> = [(&'static str, &'a str); N];

/// Writes one gauge per item.
fn gauges<'a, const N: usize, V: EncodeGaugeValue>(
    to: &mut DescriptorEncoder<'_>,
    name: &str,
    help: &str,
    items: impl Iterator<Item = (Labels<'a, N>, V)>,
) -> fmt::Result {
    let mut metric = to.encode_descriptor(name, help, None, MetricType::Gauge)?;
    for (labels, value) in items {
        with_labels(&mut metric, &labels, |m| m.encode_gauge(&value))?;
    }
    Ok(())
}

/// Writes one counter per item.
fn counters<'a, const N: usize, V: EncodeCounterValue>(
    to: &mut DescriptorEncoder<'_>,
    name: &str,
    help: &str,
    items: impl Iterator<Item = (Labels<'a, N>, V)>,
) -> fmt::Result {
    let mut metric = to.encode_descriptor(name, help, None, MetricType::Counter)?;
    for (labels, value) in items {
        with_labels(&mut metric, &labels, |m| {
            m.encode_counter::<NoLabelSet, _, u64>(&value, None)
        })?;
    }
    Ok(())
}

fn with_labels<const N: usize>(
    metric: &mut MetricEncoder<'_>,
    labels: &Labels<'_, N>,
    write: impl FnOnce(&mut MetricEncoder<'_>) -> fmt::Result,
) -> fmt::Result {
    if N == 0 { write(metric) } else { write(&mut metric.encode_family(labels)?) }
}

fn single<V>(value: V) -> impl Iterator<Item = (Labels<'static, 0>, V)> {
    std::iter::once(([], value))
}

impl Metrics {
    fn new(facts: NodeFacts) -> Self {
        let mut reports = HashMap::new();
        for (c, core) in facts.cores.iter().enumerate() {
            reports.extend(core.volumes.iter().enumerate().map(|(r, report)| (report.id, (c, r))));
        }
        let locate = |(v, (stored, _)): (usize, &(StoredVolumeRecord, Observed))| {
            reports.get(&stored.record.id).map(|&(c, r)| (v, c, r))
        };
        let open = facts.volumes.iter().enumerate().filter_map(locate).collect();
        Self { facts, open }
    }

    fn node(&self, to: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let status = assess(&self.facts);
        let node = &status.node;
        let info = [("node", node.name.as_str()), ("version", node.version.as_str())];
        let mut metric =
            to.encode_descriptor("node", "The node and its version.", None, MetricType::Info)?;
        metric.encode_info(&info)?;
        gauges(to, "uptime_seconds", "Time since the start.", single(node.uptime_s))?;
        let verdict = "Verdict of the status: 0 safe, 1 at risk, 2 unavailable.";
        gauges(to, "verdict", verdict, single(status.verdict as i64))?;
        gauges(to, "sessions", "Sessions of initiators.", single(status.sessions))?;
        let (bytes, free) = (status.capacity.data_dir_bytes, status.capacity.data_dir_free_bytes);
        gauges(to, "data_dir_bytes", "Size of the data directory's file system.", single(bytes))?;
        gauges(
            to,
            "data_dir_free_bytes",
            "Free space in the data directory's file system.",
            single(free),
        )
    }

    fn cores(&self, to: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let names: Vec<_> = self.facts.cores.iter().map(|c| c.core.to_string()).collect();
        let cores = || {
            self.facts
                .cores
                .iter()
                .zip(&names)
                .map(|(core, name)| ([("core", name.as_str())], core))
        };
        let help = "Size of buffer memory.";
        gauges(to, "memory_bytes", help, cores().map(|(l, c)| (l, c.memory.total)))?;
        let help = "Buffer memory that is neither in use nor reserved.";
        gauges(to, "memory_free_bytes", help, cores().map(|(l, c)| (l, c.memory.free)))?;
        let help = "Commands that wait for buffer memory.";
        gauges(to, "memory_waiting_commands", help, cores().map(|(l, c)| (l, c.memory.waiting)))?;
        let help = "Waits for buffer memory that ended without any.";
        counters(
            to,
            "memory_wait_timeouts",
            help,
            cores().map(|(l, c)| (l, c.memory.timed_out_waits)),
        )?;
        let help = "How long buffer memory has been short; 0 if it is not.";
        let short = |c: &engine::CoreReport| {
            c.memory.shortage_duration.map_or(0, |short| short.as_secs().max(1))
        };
        gauges(to, "memory_shortage_seconds", help, cores().map(|(l, c)| (l, short(c))))?;
        let help = "Times a layer took more memory than it had reserved; a defect.";
        counters(to, "memory_overdrafts", help, cores().map(|(l, c)| (l, c.memory.overdrafts)))?;
        let help = "Connections, those that have not logged in included.";
        gauges(to, "connections", help, cores().map(|(l, c)| (l, c.sessions.len() as u64)))?;
        let help = "Connections refused because of a limit.";
        counters(
            to,
            "connections_refused",
            help,
            cores().map(|(l, c)| (l, c.refused_connections)),
        )?;
        self.clients(to)
    }

    /// Authentication of clients, on all cores and at the API.
    fn clients(&self, to: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let all = || {
            let cores = self.facts.cores.iter().map(|core| &core.clients);
            cores.chain([&self.facts.api_clients])
        };
        let help = "Attempts of clients to prove who they are that have failed.";
        let failed =
            |method: AuthMethod| all().map(|c| c.attempt_counts.failures[method as usize]).sum();
        let methods = AuthMethod::ALL.iter().map(|&m| ([("method", m.label())], failed(m)));
        counters::<1, u64>(to, "authentication_failures", help, methods)?;
        let help = "Attempts that had to wait, after failures of the same address.";
        let delayed: u64 = all().map(|c| c.attempt_counts.delayed).sum();
        counters(to, "authentication_delayed", help, single(delayed))?;
        let help = "Attempts that were refused without checking the secret: too many of the same address waited.";
        let refused: u64 = all().map(|c| c.attempt_counts.refused).sum();
        counters(to, "authentication_refused", help, single(refused))?;
        let help = "iSCSI sessions that another login of their initiator has ended.";
        counters(to, "sessions_replaced", help, single(all().map(|c| c.replaced).sum::<u64>()))
    }

    fn volumes(&self, to: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let volumes =
            || self.facts.volumes.iter().map(|(s, o)| ([("volume", s.record.name.as_str())], s, o));
        let help = "Whether the volume serves, at whichever node, as far as this one knows.";
        let serves = self.facts.served_filter();
        let online = self.facts.volumes.iter();
        let online = online.map(|v| ([("volume", v.0.record.name.as_str())], i64::from(serves(v))));
        gauges(to, "volume_online", help, online)?;
        let help = "Size of the volume.";
        gauges(to, "volume_size_bytes", help, volumes().map(|(l, s, _)| (l, s.record.size_bytes)))?;
        let help = "Replicas that the volume should have.";
        let wanted = volumes().map(|(l, s, _)| (l, u64::from(s.record.replicas_wanted)));
        gauges(to, "volume_replicas_wanted", help, wanted)?;
        let help = "Space that the volume takes in its file system, device or pool.";
        let allocated_bytes = |id| self.facts.space.allocated.get(&id).copied();
        let allocated = volumes().filter_map(|(l, s, _)| Some((l, allocated_bytes(s.record.id)?)));
        gauges(to, "volume_allocated_bytes", help, allocated)?;
        let help = "Commands in flight.";
        gauges(
            to,
            "volume_commands_in_flight",
            help,
            self.reports().map(|(l, r)| (l, r.in_flight)),
        )?;
        let help = "Commands that were asked to abort.";
        counters(to, "volume_aborts", help, self.reports().map(|(l, r)| (l, r.aborts)))?;
        let help = "Commands that waited for an overlapping command.";
        counters(to, "volume_range_waits", help, self.reports().map(|(l, r)| (l, r.overlaps)))?;
        let help = "Commands that waited for buffer memory.";
        counters(to, "volume_memory_waits", help, self.reports().map(|(l, r)| (l, r.memory_waits)))
    }

    fn replicas(&self, to: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let mirrors = || self.reports().filter_map(|(l, r)| Some((l, &r.mirror.as_ref()?.status)));
        let records = || mirrors().filter_map(|(l, s)| Some((l, s.config.as_ref()?)));
        let help = "Replicas of the volume.";
        gauges(to, "volume_replicas", help, records().map(|(l, r)| (l, r.replicas.len() as u64)))?;
        let help = "Replicas that are in sync.";
        let in_sync = records().map(|(l, r)| (l, r.in_sync.len() as u64));
        gauges(to, "volume_replicas_in_sync", help, in_sync)?;
        let help = "Bytes copied from this node to resync other replicas.";
        counters(to, "volume_resynced_bytes", help, mirrors().map(|(l, s)| (l, s.resynced_bytes)))
    }

    /// Pools of disks.
    fn pools(&self, to: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let all = || self.facts.pools.iter().map(|p| ([("pool", p.record.name.as_str())], p));
        let open = || all().filter_map(|(l, p)| Some((l, p.report.as_ref()?)));
        let help = "Whether the pool is open.";
        let online = all().map(|(l, p)| (l, i64::from(p.report.is_some())));
        gauges(to, "pool_online", help, online)?;
        let help = "Size of all disks of the pool that hold data.";
        gauges(to, "pool_raw_bytes", help, open().map(|(l, r)| (l, r.raw_bytes)))?;
        let help = "Space for volumes in the pool, at its RAID level.";
        gauges(to, "pool_usable_bytes", help, open().map(|(l, r)| (l, r.usable_bytes)))?;
        let help = "Space of the pool that volumes have.";
        gauges(to, "pool_allocated_bytes", help, open().map(|(l, r)| (l, r.allocated_bytes)))?;
        let help = "Space of the pool that volumes can still take.";
        gauges(to, "pool_free_bytes", help, open().map(|(l, r)| (l, r.free_bytes)))?;
        let help = "How many more disks may fail without loss of data; -1 if data is lost already.";
        let fault_tolerance = open().map(|(l, r)| (l, r.fault_tolerance.map_or(-1, i64::from)));
        gauges(to, "pool_fault_tolerance", help, fault_tolerance)?;
        let help = "Extents that a rebuild must still write, or that must still be moved.";
        gauges(to, "pool_stale_extents", help, open().map(|(l, r)| (l, r.stale_extents)))?;
        let scrubs = || open().filter_map(|(l, r)| Some((l, r.scrub.as_ref()?)));
        let help = "Rows (4 KiB of each disk of a stripe) that the last scrub repaired.";
        gauges(to, "pool_scrub_repaired_rows", help, scrubs().map(|(l, s)| (l, s.repaired_rows)))?;
        let help = "Rows that the last scrub could not repair.";
        gauges(
            to,
            "pool_scrub_unrecoverable_rows",
            help,
            scrubs().map(|(l, s)| (l, s.unrecoverable_rows)),
        )
    }

    /// Disks of pools.
    fn disks(&self, to: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let open = || {
            let pools = self.facts.pools.iter();
            pools.filter_map(|p| Some((("pool", p.record.name.as_str()), p.report.as_ref()?)))
        };
        let count = |report: &PoolReport, state| {
            report.disks.iter().filter(|disk| disk.state == state).count() as u64
        };
        let by_state = open().flat_map(|(pool, report)| {
            DISK_STATES.map(|(state, word)| ([pool, ("state", word)], count(report, state)))
        });
        gauges(to, "pool_disks", "Disks of the pool, by state.", by_state)?;
        let disks = || {
            open().flat_map(|(pool, report)| {
                report.disks.iter().map(move |d| ([pool, ("disk", d.serial.as_str())], d))
            })
        };
        let help = "Reads of the disk that failed.";
        counters(to, "pool_disk_read_errors", help, disks().map(|(l, d)| (l, d.read_errors)))?;
        let help = "Writes of the disk that failed.";
        counters(to, "pool_disk_write_errors", help, disks().map(|(l, d)| (l, d.write_errors)))?;
        let help = "Reads of the disk that returned data that does not match its checksum.";
        counters(
            to,
            "pool_disk_checksum_errors",
            help,
            disks().map(|(l, d)| (l, d.checksum_errors)),
        )?;
        let help = "Wrong or unreadable blocks of the disk that were written again.";
        let repaired = disks().map(|(l, d)| (l, d.repaired_blocks));
        counters(to, "pool_disk_repaired_blocks", help, repaired)?;
        let help = "Unreadable blocks of the disk that were given up as lost.";
        let unrepairable = disks().map(|(l, d)| (l, d.unrepairable_blocks));
        counters(to, "pool_disk_unrepairable_blocks", help, unrepairable)?;
        let help = "Whether the disk is far slower than the others, so that reads avoid it.";
        gauges(to, "pool_disk_slow", help, disks().map(|(l, d)| (l, i64::from(d.is_slow))))?;
        let help = "How often the disk became slow.";
        counters(to, "pool_disk_slow_episodes", help, disks().map(|(l, d)| (l, d.slow_episodes)))?;
        let help = "Reads that other disks answered because this disk was slow.";
        counters(
            to,
            "pool_disk_redirected_reads",
            help,
            disks().map(|(l, d)| (l, d.redirected_reads)),
        )
    }

    fn commands(&self, to: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let help = "Commands completed, failed ones included.";
        counters(to, "volume_commands", help, self.command_kinds().map(|(l, k)| (l, k.completed)))?;
        let help = "Commands that failed.";
        counters(
            to,
            "volume_commands_failed",
            help,
            self.command_kinds().map(|(l, k)| (l, k.failed)),
        )?;
        let help = "Commands that failed because there was no space for the volume's data.";
        let each = self.command_kinds().map(|(l, k)| (l, k.without_space));
        counters(to, "volume_commands_no_space", help, each)?;
        let help = "Payload transferred.";
        counters(
            to,
            "volume_payload_bytes",
            help,
            self.command_kinds().map(|(l, k)| (l, k.bytes)),
        )?;
        let help = "Time from acceptance to completion of a command.";
        let name = "volume_latency_seconds";
        let mut metric = to.encode_descriptor(name, help, None, MetricType::Histogram)?;
        for (labels, kind) in self.command_kinds() {
            if let Some(latency) = &kind.latency {
                with_labels(&mut metric, &labels, |m| histogram(m, latency))?;
            }
        }
        Ok(())
    }

    /// The open volumes, by name.
    fn reports(&self) -> impl Iterator<Item = (Labels<'_, 1>, &VolumeReport)> {
        self.open.iter().map(|&(v, c, r)| {
            let (stored, _) = &self.facts.volumes[v];
            ([("volume", stored.record.name.as_str())], &self.facts.cores[c].volumes[r])
        })
    }

    fn command_kinds(&self) -> impl Iterator<Item = (Labels<'_, 2>, &CommandKindReport)> {
        self.reports().flat_map(|([volume], report)| {
            CommandKind::ALL.map(|kind| ([volume, ("kind", kind_label(kind))], report.kind(kind)))
        })
    }
}

/// The states of disks and their labels.
const DISK_STATES: [(PoolDiskState, &str); 4] = [
    (PoolDiskState::Active, "active"),
    (PoolDiskState::Spare, "spare"),
    (PoolDiskState::Draining, "draining"),
    (PoolDiskState::Detached, "detached"),
];

fn histogram(metric: &mut MetricEncoder<'_>, latency: &LatencyHistogram) -> fmt::Result {
    // The encoder accumulates buckets itself, so it needs the count of each bucket.
    let mut below = 0;
    let mut buckets: Vec<_> = (LATENCY_BOUNDS_US.iter().zip(latency.cumulative))
        .map(|(us, at_most)| {
            let alone = at_most.saturating_sub(below);
            below = at_most;
            (*us as f64 / 1e6, alone)
        })
        .collect();
    buckets.push((f64::INFINITY, latency.count.saturating_sub(below)));
    metric.encode_histogram::<NoLabelSet>(latency.sum_s, latency.count, &buckets, None)
}

fn kind_label(kind: CommandKind) -> &'static str {
    match kind {
        CommandKind::Read => "read",
        CommandKind::Write => "write",
        CommandKind::Unmap => "unmap",
        CommandKind::Flush => "flush",
    }
}

#[cfg(test)]
mod tests {
    use cluster::store::Revision;
    use engine::CoreReport;
    use records::samples::record;

    use super::*;
    use crate::pool_status::PoolFacts;
    use crate::samples::volume_report;
    use crate::space::SpaceUsage;

    /// Facts of a node without volumes or pools.
    fn facts() -> NodeFacts {
        crate::samples::facts(Vec::new())
    }

    #[test]
    fn latencies_are_told_in_classes_that_add_up() {
        let record = record("v");
        let mut at_most = [7; LATENCY_BOUNDS_US.len()];
        (at_most[0], at_most[1]) = (2, 5);
        let read = CommandKindReport {
            completed: 9,
            failed: 1,
            without_space: 0,
            bytes: 4096,
            latency: Some(LatencyHistogram { cumulative: at_most, count: 9, sum_s: 0.5 }),
        };
        let kinds = [
            read,
            CommandKindReport::default(),
            CommandKindReport::default(),
            CommandKindReport::default(),
        ];
        let report = VolumeReport { kinds, in_flight: 3, ..volume_report(record.id) };
        let pool = rt::buf::BufferPool::new(16 << 20).unwrap().usage();
        let (sessions, guests, volumes) = (vec![], vec![], vec![report]);
        let mut clients = target::ClientReport::default();
        clients.attempt_counts.failures[AuthMethod::Dhchap as usize] = 3;
        (clients.attempt_counts.delayed, clients.replaced) = (5, 6);
        let core = CoreReport {
            core: 0,
            sessions,
            guests,
            refused_connections: 4,
            clients,
            memory: pool,
            volumes,
        };
        let image =
            records::record::ImageInfo { id: uuid::Uuid::nil(), size_bytes: 1, generation: 2 };
        let observed = Observed::Open { core: 0, image, published: None };
        let volumes = vec![(StoredVolumeRecord { record, revision: Revision(1) }, observed)];
        let allocated = [(volumes[0].0.record.id, 12)].into();
        let space = SpaceUsage { allocated, ..SpaceUsage::default() };
        let page = render(NodeFacts { volumes, cores: vec![core], space, ..facts() });
        for line in [
            "windrose_node_info{node=\"n\",version=\"0\"} 1",
            "windrose_volume_allocated_bytes{volume=\"v\"} 12",
            "windrose_volume_latency_seconds_bucket{le=\"0.00005\",volume=\"v\",kind=\"read\"} 2",
            "windrose_volume_latency_seconds_bucket{le=\"0.0001\",volume=\"v\",kind=\"read\"} 5",
            "windrose_volume_latency_seconds_bucket{le=\"10.0\",volume=\"v\",kind=\"read\"} 7",
            "windrose_volume_latency_seconds_bucket{le=\"+Inf\",volume=\"v\",kind=\"read\"} 9",
            "windrose_volume_latency_seconds_count{volume=\"v\",kind=\"read\"} 9",
            "windrose_volume_replicas{volume=\"v\"} 2",
            "windrose_volume_replicas_in_sync{volume=\"v\"} 1",
            "windrose_volume_resynced_bytes_total{volume=\"v\"} 77",
            "windrose_connections_refused_total{core=\"0\"} 4",
            "windrose_authentication_failures_total{method=\"dhchap\"} 3",
            "windrose_authentication_failures_total{method=\"chap\"} 0",
            "windrose_authentication_delayed_total 5",
            "windrose_sessions_replaced_total 6",
        ] {
            assert_eq!(page.lines().filter(|l| *l == line).count(), 1, "{line}\n{page}");
        }
        assert!(!page.contains("kind=\"write\"} 0.0"), "no latencies, no classes");
    }

    #[test]
    fn pools_are_told_with_their_disks() {
        let mut pool = crate::samples::pool_facts("tank");
        let report = pool.report.as_mut().unwrap();
        report.disks[1].state = PoolDiskState::Detached;
        (report.disks[2].read_errors, report.disks[2].repaired_blocks) = (5, 6);
        (report.disks[2].is_slow, report.disks[2].redirected_reads) = (true, 9);
        report.stale_extents = 8;
        let offline = PoolFacts { report: None, ..crate::samples::pool_facts("zoo") };
        let page = render(NodeFacts { pools: vec![pool, offline], ..facts() });
        for line in [
            "windrose_pool_online{pool=\"zoo\"} 0",
            "windrose_pool_online{pool=\"tank\"} 1",
            "windrose_pool_usable_bytes{pool=\"tank\"} 2199023255552",
            "windrose_pool_stale_extents{pool=\"tank\"} 8",
            "windrose_pool_fault_tolerance{pool=\"tank\"} 1",
            "windrose_pool_disks{pool=\"tank\",state=\"active\"} 2",
            "windrose_pool_disks{pool=\"tank\",state=\"detached\"} 1",
            "windrose_pool_disk_read_errors_total{pool=\"tank\",disk=\"S2\"} 5",
            "windrose_pool_disk_repaired_blocks_total{pool=\"tank\",disk=\"S2\"} 6",
            "windrose_pool_disk_slow{pool=\"tank\",disk=\"S2\"} 1",
            "windrose_pool_disk_slow{pool=\"tank\",disk=\"S0\"} 0",
            "windrose_pool_disk_redirected_reads_total{pool=\"tank\",disk=\"S2\"} 9",
        ] {
            assert_eq!(page.lines().filter(|l| *l == line).count(), 1, "{line}\n{page}");
        }
        assert!(!page.contains("bytes{pool=\"zoo\"}"), "nobody knows");
    }
}
