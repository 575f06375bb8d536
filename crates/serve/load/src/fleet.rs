//! All jobs of a measurement: cores, openings, a common start, and what the processors spent.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use block::{Class, Ctx, Dev, Epoch, Lba, Op};
use initiator::uri::Target;
use rt::{Core, Cores, CoresConfig, ProcessorTime, Submission, processor_time};
use tokio::sync::{Barrier, oneshot};
use tokio::task::JoinSet;
use tokio::time::{Instant, interval};

use crate::chance::Dice;
use crate::engine::{Progress, Runner};
use crate::job::{Amount, Job};
use crate::measured::Measured;
use crate::open::{self, Before, Held, Host, How, Pin, Sighting};
use crate::spec::Spec;

/// How often it is shown how things are.
const TICK: Duration = Duration::from_millis(500);

/// Memory of a core beside what operations take, in bytes.
const SLACK: u64 = 32 << 20;

/// How jobs are run.
#[derive(Clone, Debug)]
pub struct Plan {
    /// What is done.
    pub jobs: Vec<Job>,
    /// One core for each, bound to that processor if one is given; jobs are dealt out to them in turn.
    pub cpus: Vec<Option<usize>>,
    /// How long a core that waits looks for what comes before it sleeps; zero: it sleeps, as fio does.
    pub poll_window: Duration,
    /// A process whose processor time counts as the server's.
    pub server: Option<u32>,
    /// Who this machine is to NVMe controllers, if it has a name.
    pub host: Option<Host>,
}

/// Cores, ready to run jobs.
#[derive(Debug)]
pub struct Fleet {
    cores: Cores,
    plan: Plan,
    targets: Vec<Target>,
    /// What was found at the paths that were looked at: this, and nothing else, is what may be lost.
    seen: RefCell<BTreeMap<PathBuf, Sighting>>,
}

/// How one section, or one of its `numjobs`, went.
#[derive(Clone, Debug)]
pub struct Line {
    /// The job's name.
    pub name: String,
    /// Where it went.
    pub target: String,
    /// Which of `numjobs`; none where they are reported as one.
    pub clone: Option<u32>,
    /// How many are put together in this.
    pub clones: u32,
    /// The section's place in the job file.
    pub section: usize,
    /// What was measured.
    pub measured: Measured,
}

/// Processor time of a stretch of time.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Spent {
    /// The stretch.
    pub elapsed: Duration,
    /// By this process.
    pub client: ProcessorTime,
    /// By the server's, if it was named and told.
    pub server: Option<Duration>,
    /// Operations that were done meanwhile.
    pub ops: u64,
}

/// How everything went.
#[derive(Clone, Debug, Default)]
pub struct Outcome {
    /// Section by section.
    pub lines: Vec<Line>,
    /// What it took, all sections together; ramps and verification not counted.
    pub spent: Spent,
}

/// How things are.
#[derive(Clone, Copy, Debug, Default)]
pub struct Now {
    /// Since the jobs began.
    pub elapsed: Duration,
    /// How long they are going to take, ramps included, if time decides that.
    pub planned: Option<Duration>,
    /// Operations and bytes so far, by direction.
    pub moved: [(u64, u64); 3],
    /// Blocks that were read again so far.
    pub verified: u64,
}

/// What all openings of a group wait for.
struct Gates {
    ready: Barrier,
    through: Barrier,
    failed: AtomicBool,
}

/// One of the jobs of a group.
struct Member {
    section: usize,
    clone: u32,
    job: Job,
    how: How,
    progress: Arc<Progress>,
}

impl Fleet {
    /// Starts the cores. Nothing is opened yet.
    ///
    /// # Errors
    /// What is wrong with the plan, or missing, for people.
    pub fn start(mut plan: Plan) -> Result<Self, String> {
        let mut targets = Vec::new();
        for (n, job) in plan.jobs.iter_mut().enumerate() {
            let named =
                job.filename.as_deref().ok_or("no target: name a URI, a path or filename=")?;
            targets.push(Target::from_str(named).map_err(|e| e.to_string())?);
            // Sections differ, and each run does the same.
            if job.randrepeat {
                job.randseed.get_or_insert(0x89 + n as u64);
            }
        }
        check(&plan.jobs, &targets)?;
        let cores = CoresConfig {
            cpus: plan.cpus.clone(),
            pool_bytes_per_core: pool_bytes(&plan)?,
            poll_window: plan.poll_window,
            // As fio does (iodepth_batch_submit=1): what is kept until there is more of it lets a disk rest.
            submission: Submission::AtOnce,
            ..CoresConfig::default()
        };
        let cores = Cores::start(&cores).map_err(|e| format!("cannot start the cores: {e}"))?;
        Ok(Self { cores, plan, targets, seen: RefCell::default() })
    }

    /// The jobs, in order, and where they go.
    pub fn jobs(&self) -> impl Iterator<Item = (&Job, &Target)> {
        self.plan.jobs.iter().zip(&self.targets)
    }

    /// Looks at what writing to a path would destroy. What is there is all that will be: something else that is there when it
    /// is opened is refused.
    ///
    /// # Errors
    /// Why it cannot be looked at.
    pub async fn look(&self, path: PathBuf) -> Result<Before, String> {
        let core = &self.cores.handles()[0];
        let at = path.clone();
        let looked = core.run(async move |core| open::look(&core, &at).await).await;
        let seen = looked.map_err(|e| e.to_string())??;
        let before = seen.before.clone();
        self.seen.borrow_mut().insert(path, seen);
        Ok(before)
    }

    /// Runs everything, section by section where they wait for each other. `watch` is called now and then; what it returns
    /// says whether to go on.
    ///
    /// # Errors
    /// Why nothing, or not all, was measured. A job that failed while it ran is no error: [`Measured::failed`] says so.
    pub async fn run(&self, mut watch: impl FnMut(&Now) -> bool) -> Result<Outcome, String> {
        let mut outcome = Outcome::default();
        for mut group in self.groups() {
            let _held = self.hold(&mut group).await?;
            let spent = self.run_group(group, &mut outcome.lines, &mut watch).await?;
            outcome.spent.add(&spent);
            if outcome.lines.iter().any(|line| line.measured.failed.is_some()) {
                break;
            }
        }
        outcome.lines.sort_by_key(|line| (line.section, line.clone));
        Ok(outcome)
    }

    /// The jobs that run at the same time.
    fn groups(&self) -> Vec<Vec<Member>> {
        let mut groups: Vec<Vec<Member>> = Vec::new();
        for (section, (job, target)) in self.jobs().enumerate() {
            if groups.is_empty() || job.stonewall {
                groups.push(Vec::new());
            }
            let how = How {
                target: target.clone(),
                writes: job.rw.changes(),
                direct: job.direct,
                depth: job.iodepth,
                host: self.plan.host.clone(),
                pin: None,
            };
            let member = |clone| Member {
                section,
                clone,
                job: job.clone(),
                how: how.clone(),
                progress: Arc::default(),
            };
            if let Some(group) = groups.last_mut() {
                group.extend((0..job.numjobs).map(member));
            }
        }
        groups
    }

    /// Takes hold of the files and devices of a group, and makes those that there are not. They are held until what is
    /// returned is dropped.
    async fn hold(&self, group: &mut [Member]) -> Result<Vec<oneshot::Sender<()>>, String> {
        let mut paths: BTreeMap<PathBuf, (How, Option<u64>, bool)> = BTreeMap::new();
        for member in group.iter() {
            let Target::Path(path) = &member.how.target else { continue };
            let size = match member.job.size {
                Some(Amount::Bytes(size)) => Some(needed(&member.job, size)),
                _ => None,
            };
            let entry = paths.entry(path.clone());
            let (how, most, reads) = entry.or_insert_with(|| (member.how.clone(), None, false));
            how.writes |= member.how.writes;
            how.direct &= member.how.direct;
            *most = (*most).max(size);
            *reads |= member.job.rw.read;
        }
        let mut held = Vec::new();
        for (path, (how, size, reads)) in paths {
            let (release, released) = oneshot::channel::<()>();
            let (taken, result) = oneshot::channel();
            let (at, seen) = (path.clone(), self.seen.borrow().get(&path).cloned());
            let job = async move |core: Core| {
                let opened = take(&core, &at, how, (size, reads), seen).await;
                let (keep, told) = match opened {
                    Ok((held, made)) => {
                        let told = (held.pin().clone(), made);
                        (Some(held), Ok(told))
                    }
                    Err(e) => (None, Err(e)),
                };
                if taken.send(told).is_ok() && keep.is_some() {
                    // Ends when the sender is dropped.
                    let _ = released.await;
                }
            };
            self.cores.handles()[0].post(job).await.map_err(|e| e.to_string())?;
            let told = result.await.map_err(|_| "the core has stopped".to_owned())?;
            let (pin, made): (Pin, Option<Sighting>) = told?;
            held.push(release);
            let at =
                |member: &&mut Member| matches!(&member.how.target, Target::Path(p) if *p == path);
            group.iter_mut().filter(at).for_each(|member| member.how.pin = Some(pin.clone()));
            // What this process has made may be lost.
            self.seen.borrow_mut().extend(made.map(|made| (path, made)));
        }
        Ok(held)
    }

    async fn run_group(
        &self,
        group: Vec<Member>,
        lines: &mut Vec<Line>,
        watch: &mut impl FnMut(&Now) -> bool,
    ) -> Result<Spent, String> {
        let all = group.len() + 1;
        let gates = Arc::new(Gates {
            ready: Barrier::new(all),
            through: Barrier::new(all),
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
                let (section, clone, job) = (member.section, member.clone, member.job.clone());
                let target = member.how.target.to_string();
                let ran = core.run(async move |core| carry_out(&core, member, &gates).await).await;
                let measured = ran.map_err(|e| e.to_string()).flatten()?;
                Ok(Ended { section, clone, job, target, measured })
            });
        }
        let mut done = Vec::new();
        pass(&gates.ready, &mut running, &mut done).await?;
        let mut show = Show { began: Instant::now(), planned, progress: &progress, watch };
        let mut spent = None;
        if !gates.failed.load(Ordering::Acquire) {
            show.until(tokio::time::sleep(ramp)).await;
            let meter = Meter::start(self.plan.server, &progress);
            show.until(pass(&gates.through, &mut running, &mut done)).await?;
            spent = Some(meter.stop(self.plan.server, &progress));
        }
        show.until(async {
            while let Some(ended) = running.join_next().await {
                done.push(ended.map_err(|e| e.to_string()).flatten());
            }
        })
        .await;
        for ended in done {
            enter(lines, ended?);
        }
        spent.ok_or_else(|| "nothing was measured".to_owned())
    }
}

/// A job that has ended.
struct Ended {
    section: usize,
    clone: u32,
    job: Job,
    target: String,
    measured: Measured,
}

/// Waits until all jobs have come to a gate. One that ends before has failed, and the others wait in vain: unless it says so
/// at the gate itself.
async fn pass(
    gate: &Barrier,
    running: &mut JoinSet<Result<Ended, String>>,
    done: &mut Vec<Result<Ended, String>>,
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

/// Shows how things are while something is awaited.
struct Show<'a, W> {
    began: Instant,
    planned: Option<Duration>,
    progress: &'a [Arc<Progress>],
    watch: &'a mut W,
}

impl<W: FnMut(&Now) -> bool> Show<'_, W> {
    async fn until<T>(&mut self, what: impl Future<Output = T>) -> T {
        let mut what = std::pin::pin!(what);
        let mut ticks = interval(TICK);
        loop {
            tokio::select! {
                biased;
                done = &mut what => return done,
                _ = ticks.tick() => {}
            }
            let mut now =
                Now { elapsed: self.began.elapsed(), planned: self.planned, ..Now::default() };
            for progress in self.progress {
                for (sum, dir) in now.moved.iter_mut().zip(crate::job::Dir::ALL) {
                    let (ops, bytes) = progress.of(dir);
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

/// Processor time between two moments.
struct Meter {
    began: Instant,
    client: ProcessorTime,
    server: Option<Duration>,
    ops: u64,
}

impl Meter {
    fn start(server: Option<u32>, progress: &[Arc<Progress>]) -> Self {
        let (client, server) = (processor_time(), server.and_then(time_of));
        Self { began: Instant::now(), client, server, ops: ops(progress) }
    }

    fn stop(self, server: Option<u32>, progress: &[Arc<Progress>]) -> Spent {
        let now = processor_time();
        let server = server.and_then(time_of).zip(self.server);
        Spent {
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
    let of = |p: &Arc<Progress>| crate::job::Dir::ALL.iter().map(|dir| p.of(*dir).0).sum::<u64>();
    progress.iter().map(of).sum()
}

impl Spent {
    fn add(&mut self, other: &Self) {
        self.server = match (self.ops, self.server, other.server) {
            // The first.
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

/// Processor time that a process of this machine has used, all its threads; `None` where there is none, or it is not ours to
/// see (proc(5), `/proc/pid/stat`).
#[must_use]
pub fn time_of(process: u32) -> Option<Duration> {
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
    let (_, after_name) = stat.rsplit_once(')')?;
    let mut times = after_name.split_whitespace().skip(11);
    let mut next = || times.next()?.parse::<u64>().ok();
    let ticks = next()? + next()?;
    // A tick of these counters is a hundredth of a second on every Linux (USER_HZ).
    Some(Duration::from_millis(ticks * 10))
}

/// One job, from its opening to its end. Whatever happens, both gates are passed.
async fn carry_out(core: &Core, member: Member, gates: &Gates) -> Result<Measured, String> {
    let Member { section: _, clone, job, how, progress } = member;
    let ready = async {
        let dev = open::open(core, &how).await?;
        let spec = Spec::new(&job, clone, &dev.info(), core.random_u64())?;
        Runner::new(core, dev, spec, progress).await
    };
    let ready = ready.await.map_err(|e| format!("{}: {e}", job.name));
    if ready.is_err() {
        gates.failed.store(true, Ordering::Release);
    }
    gates.ready.wait().await;
    let mut runner = ready?;
    if gates.failed.load(Ordering::Acquire) {
        return Ok(Measured::default());
    }
    runner.run().await;
    gates.through.wait().await;
    runner.verify().await;
    Ok(runner.finish())
}

/// Takes hold of what was seen at a path; where that was nothing, a file is made, if its size is known, and filled if it is
/// going to be read. What was made is told.
async fn take(
    core: &Core,
    path: &Path,
    how: How,
    (size, reads): (Option<u64>, bool),
    seen: Option<Sighting>,
) -> Result<(Held, Option<Sighting>), String> {
    let seen = match seen {
        Some(seen) => seen,
        None => open::look(core, path).await?,
    };
    let absent = seen.before == Before::Absent;
    let Some(size) = size.filter(|_| absent) else {
        let held = open::hold(core, path, &how, (&seen, None)).await;
        let hint = |e| if absent { format!("{e}; with size a file is made") } else { e };
        return held.map(|held| (held, None)).map_err(hint);
    };
    let making = How { writes: true, ..how };
    let held = open::hold(core, path, &making, (&seen, Some(size))).await?;
    if reads {
        lay_out(core, &held.dev()).await.map_err(|e| format!("{}: {e}", path.display()))?;
    }
    let made = held.sighting(Before::Nothing);
    Ok((held, Some(made)))
}

/// Fills a new file: what reads of holes would measure is not a disk.
async fn lay_out(core: &Core, dev: &Dev) -> Result<(), String> {
    const STEP: u64 = 1 << 20;
    let info = dev.info();
    let block = u64::from(info.block_size);
    let bytes = 2 * STEP as usize + info.overhead as usize;
    let credit = core.pool().account().try_credit(bytes, Class::Immediate);
    let ctx = Ctx::new(credit.ok_or("too little memory")?, Epoch::default());
    let mut dice = Dice::new(core.random_u64());
    for at in (0..info.bytes()).step_by(STEP as usize) {
        let mut data = ctx.alloc(STEP.min(info.bytes() - at) as usize);
        data.iter_mut().for_each(|piece| dice.fill(piece));
        let op = Op::Write { at: Lba(at / block), data: data.into(), fua: false };
        dev.submit(op, &ctx).await.map_err(|e| e.to_string())?;
        // A file in memory is never waited for.
        rt::give_way().await;
    }
    dev.submit(Op::Flush, &ctx).await.map(drop).map_err(|e| e.to_string())
}

/// How long a file has to be for a job that uses `size` bytes of it.
fn needed(job: &Job, size: u64) -> u64 {
    let offset = if let Amount::Bytes(offset) = job.offset { offset } else { 0 };
    let moved = job.offset_increment.saturating_mul(u64::from(job.numjobs - 1));
    size.saturating_add(offset).saturating_add(moved)
}

/// Memory that each core needs, in bytes.
fn pool_bytes(plan: &Plan) -> Result<usize, String> {
    const MOST: u64 = 64 << 30;
    let of = |job: &Job| {
        let used = crate::job::Dir::ALL.into_iter().filter(|dir| job.rw.has(*dir));
        let largest = used.map(|dir| job.bs[dir.index()].1).max().unwrap_or(0);
        // Read, write, and what layers need beside.
        let each = 2 * largest.next_multiple_of(4096) + (64 << 10);
        each.saturating_mul(u64::from(job.iodepth))
    };
    let cores = plan.cpus.len().max(1) as u64;
    let jobs =
        plan.jobs.iter().map(|job| of(job).saturating_mul(u64::from(job.numjobs).div_ceil(cores)));
    let bytes = jobs.fold(SLACK, u64::saturating_add);
    if bytes > MOST {
        return Err("iodepth, bs and numjobs together take more than 64 GiB of memory".to_owned());
    }
    usize::try_from(bytes + bytes / 4).map_err(|e| e.to_string())
}

/// What cannot be verified: blocks that several jobs write, each in its own order.
fn check(jobs: &[Job], targets: &[Target]) -> Result<(), String> {
    let size = |job: &Job| if let Some(Amount::Bytes(size)) = job.size { size } else { u64::MAX };
    for job in jobs.iter().filter(|job| job.verify.is_some() && job.rw.write) {
        if job.numjobs > 1 && job.offset_increment < size(job) {
            return Err(format!(
                "{}: verify with numjobs={}: each needs its own part: size and an offset_increment of at least that",
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
                    "{} and {} use the same blocks at the same time, and one verifies: part them, or add stonewall",
                    a.name, b.name
                ));
            }
        }
    }
    Ok(())
}

/// Adds what a job has measured to the lines of the report.
fn enter(lines: &mut Vec<Line>, ended: Ended) {
    let Ended { section, clone, job, target, measured } = ended;
    let same = lines.iter_mut().find(|line| line.section == section && job.group_reporting);
    if let Some(line) = same {
        line.measured.add(&measured);
        line.clones += 1;
        return;
    }
    let one = job.group_reporting || job.numjobs == 1;
    let clone = (!one).then_some(clone);
    lines.push(Line { name: job.name, target, clone, clones: 1, section, measured });
}
