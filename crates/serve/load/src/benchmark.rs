//! Runs all jobs of a benchmark: cores, opened targets, a common start, and processor time.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use block::{Ctx, Dev, Epoch, Lba, MemoryClass, Op};
use initiator::uri::Target;
use rt::{Core, Cores, CoresConfig, ProcessorTime, SubmissionMode, processor_time};
use tokio::sync::{Barrier, oneshot};
use tokio::task::JoinSet;
use tokio::time::{Instant, interval};

use crate::engine::{JobRunner, Progress};
use crate::job::{Amount, Job};
use crate::measurement::Measurement;
use crate::open::{
    self, ExistingContents, HostIdentity, LockedTarget, OpenSpec, PathInspection, PinnedFile,
};
use crate::random::SplitMix64;
use crate::spec::JobSpec;

/// Interval of progress reports.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(500);

/// Memory of a core besides that of operations, in bytes.
const CORE_OVERHEAD_BYTES: u64 = 32 << 20;

/// Jobs and how to run them.
#[derive(Clone, Debug)]
pub struct BenchmarkPlan {
    /// The jobs.
    pub jobs: Vec<Job>,
    /// A core per entry, bound to that processor if given; jobs are distributed round-robin.
    pub cpus: Vec<Option<usize>>,
    /// How long an idle core polls before it sleeps; zero: it sleeps at once, as fio does.
    pub poll_window: Duration,
    /// A process whose processor time counts as the server's.
    pub server: Option<u32>,
    /// Identity of this machine towards NVMe controllers, if configured.
    pub host: Option<HostIdentity>,
}

/// Started cores, ready to run jobs.
#[derive(Debug)]
pub struct Benchmark {
    cores: Cores,
    plan: BenchmarkPlan,
    targets: Vec<Target>,
    /// The inspected paths and their contents, which alone may be overwritten.
    inspected: RefCell<BTreeMap<PathBuf, PathInspection>>,
}

/// Result of a section, or of one of its `numjobs`.
#[derive(Clone, Debug)]
pub struct JobResult {
    /// The job's name.
    pub name: String,
    /// Its target.
    pub target: String,
    /// Which of `numjobs`; `None` if they are reported as one.
    pub instance: Option<u32>,
    /// How many jobs this result sums up.
    pub instances: u32,
    /// Index of the section in the job file.
    pub section: usize,
    /// What was measured.
    pub measurement: Measurement,
}

/// Processor time of an interval.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct CpuUsage {
    /// Length of the interval.
    pub elapsed: Duration,
    /// Used by this process.
    pub client: ProcessorTime,
    /// Used by the server's process, if given and readable.
    pub server: Option<Duration>,
    /// Operations completed in the interval.
    pub ops: u64,
}

/// Results of a benchmark.
#[derive(Clone, Debug, Default)]
pub struct Outcome {
    /// Results by section.
    pub results: Vec<JobResult>,
    /// Processor time of all sections, without ramps and verification.
    pub cpu_usage: CpuUsage,
}

/// Progress so far.
#[derive(Clone, Copy, Debug, Default)]
pub struct ProgressSnapshot {
    /// Time since the jobs began.
    pub elapsed: Duration,
    /// Planned duration with ramps, if limited by time.
    pub planned: Option<Duration>,
    /// Operations and bytes so far, by direction.
    pub by_direction: [(u64, u64); 3],
    /// Blocks verified so far.
    pub verified: u64,
}

/// Barriers that all jobs of a group pass together.
struct GroupBarriers {
    ready: Barrier,
    finished: Barrier,
    failed: AtomicBool,
}

/// A job of a group.
struct GroupJob {
    section: usize,
    instance: u32,
    job: Job,
    open_spec: OpenSpec,
    progress: Arc<Progress>,
}

impl Benchmark {
    /// Starts the cores. Nothing is opened yet.
    ///
    /// # Errors
    /// What is wrong with or missing in the plan, as text.
    pub fn start(mut plan: BenchmarkPlan) -> Result<Self, String> {
        let mut targets = Vec::new();
        for (n, job) in plan.jobs.iter_mut().enumerate() {
            let named =
                job.filename.as_deref().ok_or("no target: name a URI, a path or filename=")?;
            targets.push(Target::from_str(named).map_err(|e| e.to_string())?);
            // Sections differ from each other, but every run is the same.
            if job.randrepeat {
                job.randseed.get_or_insert(0x89 + n as u64);
            }
        }
        check_verifiable(&plan.jobs, &targets)?;
        let cores = CoresConfig {
            cpus: plan.cpus.clone(),
            memory_bytes_per_core: pool_bytes(&plan)?,
            poll_window: plan.poll_window,
            // As fio (iodepth_batch_submit=1): holding operations back for a batch would let a disk
            // idle.
            submission: SubmissionMode::Immediate,
            ..CoresConfig::default()
        };
        let cores = Cores::start(&cores).map_err(|e| format!("cannot start the cores: {e}"))?;
        Ok(Self { cores, plan, targets, inspected: RefCell::default() })
    }

    /// The jobs in order, with their targets.
    pub fn jobs(&self) -> impl Iterator<Item = (&Job, &Target)> {
        self.plan.jobs.iter().zip(&self.targets)
    }

    /// Determines what writing to a path would destroy. Opening refuses anything else that is there
    /// by then.
    ///
    /// # Errors
    /// Why the path cannot be inspected.
    pub async fn inspect(&self, path: PathBuf) -> Result<ExistingContents, String> {
        let core = &self.cores.handles()[0];
        let at = path.clone();
        let looked = core.run(async move |core| open::inspect_path(&core, &at).await).await;
        let seen = looked.map_err(|e| e.to_string())??;
        let before = seen.contents.clone();
        self.inspected.borrow_mut().insert(path, seen);
        Ok(before)
    }

    /// Runs all jobs, section by section where they wait for each other. `watch` is called
    /// periodically; it returns whether to continue.
    ///
    /// # Errors
    /// Why the benchmark could not run, or not completely. A job that fails while it runs is no
    /// error: see [`Measurement::failure`].
    pub async fn run(
        &self,
        mut watch: impl FnMut(&ProgressSnapshot) -> bool,
    ) -> Result<Outcome, String> {
        let mut outcome = Outcome::default();
        for mut group in self.groups() {
            let _held = self.lock_targets(&mut group).await?;
            let spent = self.run_group(group, &mut outcome.results, &mut watch).await?;
            outcome.cpu_usage.add(&spent);
            if outcome.results.iter().any(|line| line.measurement.failure.is_some()) {
                break;
            }
        }
        outcome.results.sort_by_key(|line| (line.section, line.instance));
        Ok(outcome)
    }

    /// The jobs that run at the same time.
    fn groups(&self) -> Vec<Vec<GroupJob>> {
        let mut groups: Vec<Vec<GroupJob>> = Vec::new();
        for (section, (job, target)) in self.jobs().enumerate() {
            if groups.is_empty() || job.stonewall {
                groups.push(Vec::new());
            }
            let how = OpenSpec {
                target: target.clone(),
                writes: job.rw.changes(),
                direct: job.direct,
                depth: job.iodepth,
                host: self.plan.host.clone(),
                pin: None,
            };
            let member = |clone| GroupJob {
                section,
                instance: clone,
                job: job.clone(),
                open_spec: how.clone(),
                progress: Arc::default(),
            };
            if let Some(group) = groups.last_mut() {
                group.extend((0..job.numjobs).map(member));
            }
        }
        groups
    }

    /// Locks the files and devices of a group and creates missing files. They stay locked until the
    /// result is dropped.
    async fn lock_targets(
        &self,
        group: &mut [GroupJob],
    ) -> Result<Vec<oneshot::Sender<()>>, String> {
        let mut paths: BTreeMap<PathBuf, (OpenSpec, Option<u64>, bool)> = BTreeMap::new();
        for member in group.iter() {
            let Target::Path(path) = &member.open_spec.target else { continue };
            let size = match member.job.size {
                Some(Amount::Bytes(size)) => Some(required_len(&member.job, size)),
                _ => None,
            };
            let entry = paths.entry(path.clone());
            let (how, most, reads) =
                entry.or_insert_with(|| (member.open_spec.clone(), None, false));
            how.writes |= member.open_spec.writes;
            how.direct &= member.open_spec.direct;
            *most = (*most).max(size);
            *reads |= member.job.rw.read;
        }
        let mut held = Vec::new();
        for (path, (how, size, reads)) in paths {
            let (release, released) = oneshot::channel::<()>();
            let (taken, result) = oneshot::channel();
            let (at, seen) = (path.clone(), self.inspected.borrow().get(&path).cloned());
            let job = async move |core: Core| {
                let opened = lock_or_create(&core, &at, how, (size, reads), seen).await;
                let (keep, pinned) = match opened {
                    Ok((held, made)) => {
                        let pinned = (held.pin().clone(), made);
                        (Some(held), Ok(pinned))
                    }
                    Err(e) => (None, Err(e)),
                };
                if taken.send(pinned).is_ok() && keep.is_some() {
                    // Ends when the sender is dropped.
                    let _ = released.await;
                }
            };
            self.cores.handles()[0].post(job).await.map_err(|e| e.to_string())?;
            let pinned = result.await.map_err(|_| "the core has stopped".to_owned())?;
            let (pin, made): (PinnedFile, Option<PathInspection>) = pinned?;
            held.push(release);
            let at = |member: &&mut GroupJob| matches!(&member.open_spec.target, Target::Path(p) if *p == path);
            group.iter_mut().filter(at).for_each(|member| member.open_spec.pin = Some(pin.clone()));
            // Files that this process created may be overwritten.
            self.inspected.borrow_mut().extend(made.map(|made| (path, made)));
        }
        Ok(held)
    }

    async fn run_group(
        &self,
        group: Vec<GroupJob>,
        lines: &mut Vec<JobResult>,
        watch: &mut impl FnMut(&ProgressSnapshot) -> bool,
    ) -> Result<CpuUsage, String> {
        let all = group.len() + 1;
        let gates = Arc::new(GroupBarriers {
            ready: Barrier::new(all),
            finished: Barrier::new(all),
            failed: AtomicBool::new(false),
        });
        let progress: Vec<Arc<Progress>> = group.iter().map(|m| Arc::clone(&m.progress)).collect();
        let ramp = group.iter().map(|m| m.job.ramp_time).max().unwrap_or_default();
        let planned = group.iter().map(|m| Some(m.job.runtime? + m.job.ramp_time)).max().flatten();
        let mut running = JoinSet::new();
        for (n, member) in group.into_iter().enumerate() {
            let core = self.cores.handles()[n % self.cores.handles().len()].clone();
            let gates = Arc::clone(&gates);
            running.spawn(async move {
                let (section, clone, job) = (member.section, member.instance, member.job.clone());
                let target = member.open_spec.target.to_string();
                let ran = core.run(async move |core| run_job(&core, member, &gates).await).await;
                let measured = ran.map_err(|e| e.to_string()).flatten()?;
                Ok(FinishedJob { section, instance: clone, job, target, measurement: measured })
            });
        }
        let mut done = Vec::new();
        wait_at_barrier(&gates.ready, &mut running, &mut done).await?;
        let mut show =
            ProgressReporter { began: Instant::now(), planned, progress: &progress, watch };
        let mut spent = None;
        if !gates.failed.load(Ordering::Acquire) {
            show.report_until(tokio::time::sleep(ramp)).await;
            let meter = CpuMeter::start(self.plan.server, &progress);
            show.report_until(wait_at_barrier(&gates.finished, &mut running, &mut done)).await?;
            spent = Some(meter.stop(self.plan.server, &progress));
        }
        show.report_until(async {
            while let Some(ended) = running.join_next().await {
                done.push(ended.map_err(|e| e.to_string()).flatten());
            }
        })
        .await;
        for ended in done {
            add_result(lines, ended?);
        }
        spent.ok_or_else(|| "no operation was measured".to_owned())
    }
}

/// A finished job.
struct FinishedJob {
    section: usize,
    instance: u32,
    job: Job,
    target: String,
    measurement: Measurement,
}

/// Waits until all jobs have reached a barrier. A job that ends before it has failed, and the
/// others would wait in vain unless it passes the barrier itself.
async fn wait_at_barrier(
    gate: &Barrier,
    running: &mut JoinSet<Result<FinishedJob, String>>,
    done: &mut Vec<Result<FinishedJob, String>>,
) -> Result<(), String> {
    let mut gate = std::pin::pin!(gate.wait());
    loop {
        tokio::select! {
            biased;
            _ = &mut gate => return Ok(()),
            Some(ended) = running.join_next() => match ended.map_err(|e| e.to_string()).flatten() {
                Ok(ended) => done.push(Ok(ended)),
                Err(e) => return Err(e),
            },
        }
    }
}

/// Reports progress while a future is awaited.
struct ProgressReporter<'a, W> {
    began: Instant,
    planned: Option<Duration>,
    progress: &'a [Arc<Progress>],
    watch: &'a mut W,
}

impl<W: FnMut(&ProgressSnapshot) -> bool> ProgressReporter<'_, W> {
    async fn report_until<T>(&mut self, what: impl Future<Output = T>) -> T {
        let mut what = std::pin::pin!(what);
        let mut ticks = interval(PROGRESS_INTERVAL);
        loop {
            tokio::select! {
                biased;
                done = &mut what => return done,
                _ = ticks.tick() => {}
            }
            let mut now = ProgressSnapshot {
                elapsed: self.began.elapsed(),
                planned: self.planned,
                ..ProgressSnapshot::default()
            };
            for progress in self.progress {
                for (sum, dir) in now.by_direction.iter_mut().zip(crate::job::Dir::ALL) {
                    let (ops, bytes) = progress.counts(dir);
                    *sum = (sum.0 + ops, sum.1 + bytes);
                }
                now.verified += progress.verified();
            }
            if !(self.watch)(&now) {
                self.progress.iter().for_each(|progress| progress.stop());
            }
        }
    }
}

/// Measures processor time between two moments.
struct CpuMeter {
    began: Instant,
    client: ProcessorTime,
    server: Option<Duration>,
    ops: u64,
}

impl CpuMeter {
    fn start(server: Option<u32>, progress: &[Arc<Progress>]) -> Self {
        let (client, server) = (processor_time(), server.and_then(process_cpu_time));
        Self { began: Instant::now(), client, server, ops: ops(progress) }
    }

    fn stop(self, server: Option<u32>, progress: &[Arc<Progress>]) -> CpuUsage {
        let now = processor_time();
        let server = server.and_then(process_cpu_time).zip(self.server);
        CpuUsage {
            elapsed: self.began.elapsed(),
            client: ProcessorTime {
                user: now.user.saturating_sub(self.client.user),
                system: now.system.saturating_sub(self.client.system),
                voluntary_switches: now.voluntary_switches - self.client.voluntary_switches,
                involuntary_switches: now.involuntary_switches - self.client.involuntary_switches,
            },
            server: server.map(|(now, before)| now.saturating_sub(before)),
            ops: ops(progress) - self.ops,
        }
    }
}

fn ops(progress: &[Arc<Progress>]) -> u64 {
    let of =
        |p: &Arc<Progress>| crate::job::Dir::ALL.iter().map(|dir| p.counts(*dir).0).sum::<u64>();
    progress.iter().map(of).sum()
}

impl CpuUsage {
    fn add(&mut self, other: &Self) {
        self.server = match (self.ops, self.server, other.server) {
            // The first sample.
            (0, None, server) => server,
            (_, Some(a), Some(b)) => Some(a + b),
            _ => None,
        };
        self.elapsed += other.elapsed;
        self.client.user += other.client.user;
        self.client.system += other.client.system;
        self.client.voluntary_switches += other.client.voluntary_switches;
        self.client.involuntary_switches += other.client.involuntary_switches;
        self.ops += other.ops;
    }
}

/// Processor time used by all threads of a local process; `None` if it does not exist or is not
/// readable (proc(5), `/proc/pid/stat`).
#[must_use]
pub fn process_cpu_time(process: u32) -> Option<Duration> {
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
    let (_, after_name) = stat.rsplit_once(')')?;
    let mut times = after_name.split_whitespace().skip(11);
    let mut next = || times.next()?.parse::<u64>().ok();
    let ticks = next()? + next()?;
    // A tick is a hundredth of a second on every Linux (USER_HZ).
    Some(Duration::from_millis(ticks * 10))
}

/// Runs one job from opening to end. It passes both barriers whatever happens.
async fn run_job(
    core: &Core,
    member: GroupJob,
    gates: &GroupBarriers,
) -> Result<Measurement, String> {
    let GroupJob { section: _, instance: clone, job, open_spec: how, progress } = member;
    let ready = async {
        let dev = open::open(core, &how).await?;
        let spec = JobSpec::new(&job, clone, &dev.info(), core.random_u64())?;
        JobRunner::new(core, dev, spec, progress).await
    };
    let ready = ready.await.map_err(|e| format!("{}: {e}", job.name));
    if ready.is_err() {
        gates.failed.store(true, Ordering::Release);
    }
    gates.ready.wait().await;
    let mut runner = ready?;
    if gates.failed.load(Ordering::Acquire) {
        return Ok(Measurement::default());
    }
    runner.run().await;
    gates.finished.wait().await;
    runner.verify().await;
    Ok(runner.finish())
}

/// Locks what was found at a path. If there was nothing and the size is known, creates a file, and
/// fills it if it will be read. Returns also what was created.
async fn lock_or_create(
    core: &Core,
    path: &Path,
    how: OpenSpec,
    (size, reads): (Option<u64>, bool),
    seen: Option<PathInspection>,
) -> Result<(LockedTarget, Option<PathInspection>), String> {
    let seen = match seen {
        Some(seen) => seen,
        None => open::inspect_path(core, path).await?,
    };
    let absent = seen.contents == ExistingContents::Absent;
    let Some(size) = size.filter(|_| absent) else {
        let held = open::lock_target(core, path, &how, (&seen, None)).await;
        let hint = |e| if absent { format!("{e}; give size to create a file") } else { e };
        return held.map(|held| (held, None)).map_err(hint);
    };
    let making = OpenSpec { writes: true, ..how };
    let held = open::lock_target(core, path, &making, (&seen, Some(size))).await?;
    if reads {
        lay_out(core, &held.dev()).await.map_err(|e| format!("{}: {e}", path.display()))?;
    }
    let made = held.inspection(ExistingContents::Empty);
    Ok((held, Some(made)))
}

/// Fills a new file: reading holes would not measure the disk.
async fn lay_out(core: &Core, dev: &Dev) -> Result<(), String> {
    const STEP: u64 = 1 << 20;
    let info = dev.info();
    let block = u64::from(info.block_size);
    let bytes = 2 * STEP as usize + info.overhead_bytes as usize;
    let credit = core.buffer_pool().account().try_credit(bytes, MemoryClass::LocalIo);
    let ctx = Ctx::new(credit.ok_or("too little memory")?, Epoch::default());
    let mut dice = SplitMix64::new(core.random_u64());
    for at in (0..info.bytes()).step_by(STEP as usize) {
        let mut data = ctx.alloc(STEP.min(info.bytes() - at) as usize);
        data.iter_mut().for_each(|piece| dice.fill(piece));
        let op = Op::Write { at: Lba(at / block), data: data.into(), fua: false };
        dev.submit(op, &ctx).await.map_err(|e| e.to_string())?;
        // A file in memory never makes a task wait.
        rt::yield_to_ready_tasks().await;
    }
    dev.submit(Op::Flush, &ctx).await.map(drop).map_err(|e| e.to_string())
}

/// Length that a file needs for a job that uses `size` bytes of it.
fn required_len(job: &Job, size: u64) -> u64 {
    let offset = if let Amount::Bytes(offset) = job.offset { offset } else { 0 };
    let moved = job.offset_increment.saturating_mul(u64::from(job.numjobs - 1));
    size.saturating_add(offset).saturating_add(moved)
}

/// Memory that each core needs, in bytes.
fn pool_bytes(plan: &BenchmarkPlan) -> Result<usize, String> {
    const MAX_POOL_BYTES: u64 = 64 << 30;
    let of = |job: &Job| {
        let used = crate::job::Dir::ALL.into_iter().filter(|dir| job.rw.has(*dir));
        let largest = used.map(|dir| job.bs[dir.index()].1).max().unwrap_or(0);
        // Read and write buffers, and the needs of layers.
        let each = 2 * largest.next_multiple_of(4096) + (64 << 10);
        each.saturating_mul(u64::from(job.iodepth))
    };
    let cores = plan.cpus.len().max(1) as u64;
    let jobs =
        plan.jobs.iter().map(|job| of(job).saturating_mul(u64::from(job.numjobs).div_ceil(cores)));
    let bytes = jobs.fold(CORE_OVERHEAD_BYTES, u64::saturating_add);
    if bytes > MAX_POOL_BYTES {
        return Err("iodepth, bs and numjobs together take more than 64 GiB of memory".to_owned());
    }
    usize::try_from(bytes + bytes / 4).map_err(|e| e.to_string())
}

/// Refuses to verify blocks that several jobs write, each in its own order.
fn check_verifiable(jobs: &[Job], targets: &[Target]) -> Result<(), String> {
    let size = |job: &Job| if let Some(Amount::Bytes(size)) = job.size { size } else { u64::MAX };
    for job in jobs.iter().filter(|job| job.verify.is_some() && job.rw.write) {
        if job.numjobs > 1 && job.offset_increment < size(job) {
            return Err(format!(
                "{}: verify with numjobs={}: each job needs its own range: set size, and offset_increment to at least that",
                job.name, job.numjobs
            ));
        }
    }
    let part = |job: &Job| {
        let from = if let Amount::Bytes(offset) = job.offset { offset } else { 0 };
        let moved = job.offset_increment.saturating_mul(u64::from(job.numjobs - 1));
        (from, from.saturating_add(moved).saturating_add(size(job)))
    };
    for (n, (a, at)) in jobs.iter().zip(targets).enumerate() {
        let beside = jobs.iter().zip(targets).skip(n + 1).take_while(|(job, _)| !job.stonewall);
        for (b, bt) in beside {
            let verifies = a.verify.is_some() || b.verify.is_some();
            let ((a0, a1), (b0, b1)) = (part(a), part(b));
            let meet = at == bt && a0 < b1 && b0 < a1;
            if verifies && meet && (a.rw.changes() || b.rw.changes()) {
                return Err(format!(
                    "{} and {} use the same blocks concurrently, and one verifies: separate their ranges or add stonewall",
                    a.name, b.name
                ));
            }
        }
    }
    Ok(())
}

/// Adds a job's measurement to the report.
fn add_result(lines: &mut Vec<JobResult>, ended: FinishedJob) {
    let FinishedJob { section, instance: clone, job, target, measurement: measured } = ended;
    let same = lines.iter_mut().find(|line| line.section == section && job.group_reporting);
    if let Some(line) = same {
        line.measurement.add(&measured);
        line.instances += 1;
        return;
    }
    let one = job.group_reporting || job.numjobs == 1;
    let clone = (!one).then_some(clone);
    lines.push(JobResult {
        name: job.name,
        target,
        instance: clone,
        instances: 1,
        section,
        measurement: measured,
    });
}
