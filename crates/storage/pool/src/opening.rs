//! Which disks there are, what they turn out to be, and who of them is believed.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use disk::{Claim, NotTaken};
use futures_util::future::join_all;
use rt::Core;
use rt::disk::{Disk, OpenOptions, OpenReason};
use tokio::time::timeout;
use uuid::Uuid;
use wire::Text;

use super::Mistake;
use super::called::{self, Called, disk_argument, is_identity};
use super::disk::{MemberDisk, Unusable, read_label};
use super::error::PoolError;
use super::label::{Label, State};
use super::metadata::{MemberId, Members, Metadata, Stamp, Standing};
use super::multihost::{Ownership, is_free, not_taken, release_all, take_all, take_in_time};
use super::vote::{self, Known, Witness, contradicts};
use super::writer::{LONG_PATIENCE, PATIENCE};

/// What a disk says that it is of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Inspected {
    /// The pool.
    pub pool: Uuid,
    /// What it is called.
    pub name: String,
    /// The member's number.
    pub member: u16,
    /// The serial number of the disk that it was made on.
    pub serial: String,
    /// How many cores may have volumes of the pool.
    pub rings: u16,
}

/// Pool and member that the disk at `path` says it is of; none if it has no label of a pool.
///
/// # Errors
/// That it cannot be read, or not within a minute, or has a label that cannot be used.
pub async fn inspect(
    core: &Core,
    path: &Path,
    buffered: bool,
) -> Result<Option<Inspected>, PoolError> {
    let how = OpenOptions::new().buffered(buffered).read_only(true);
    let label = async {
        let disk = core.open_disk(path, how).await?;
        label_of(core, &disk).await
    };
    // As long as an opening gives it: who has not answered is in use until it does.
    Ok(if_it_answers(path, label).await?.map(|label| Inspected {
        pool: label.pool,
        name: label.name.to_string(),
        member: label.number.0,
        serial: label.serial.to_string(),
        rings: label.rings,
    }))
}

/// What comes of it at the disk at `path`, or that it does not answer, within a minute.
pub(super) async fn if_it_answers<T>(
    path: &Path,
    work: impl Future<Output = Result<T, PoolError>>,
) -> Result<T, PoolError> {
    let silent = |_| Err(PoolError::at(path, "it does not answer: see to its cable and power"));
    timeout(LONG_PATIENCE, work).await.unwrap_or_else(silent)
}

/// The label of a disk that is a member of a pool; none if it is not.
async fn label_of(core: &Core, disk: &Disk) -> Result<Option<Label>, PoolError> {
    let path = disk.path();
    let found = read_label(disk, &core.pool().account()).await;
    let label = found.map_err(|why| PoolError::at(path, why))?;
    let label = label.map_err(|why| PoolError::at(path, format!("holds {why}")))?;
    Ok(label.filter(|label| label.state != State::Removed))
}

/// What is at a path.
#[derive(Debug)]
pub(super) enum At {
    /// A member of a pool, by its identity.
    Member { pool: Uuid, member: Uuid },
    /// A disk that somebody uses.
    Busy,
    /// Neither, or nothing.
    Nothing,
}

/// What is at `path`, now: nothing that takes longer than ten seconds to say it.
pub(super) async fn at(core: &Core, path: &Path, buffered: bool) -> At {
    timeout(PATIENCE, seen_at(core, path, buffered)).await.unwrap_or(At::Nothing)
}

async fn seen_at(core: &Core, path: &Path, buffered: bool) -> At {
    let how = OpenOptions::new().buffered(buffered).read_only(true);
    let disk = match core.open_disk(path, how).await {
        Ok(disk) => disk,
        Err(why) if why.reason == OpenReason::Busy => return At::Busy,
        Err(_) => return At::Nothing,
    };
    match label_of(core, &disk).await {
        Ok(Some(label)) => At::Member { pool: label.pool, member: label.member },
        Ok(None) | Err(_) => At::Nothing,
    }
}

/// The disk at `path`, if it is of the pool.
///
/// # Errors
/// Why it is not used though it may be, in words.
async fn look(
    core: &Core,
    pool: Uuid,
    path: &Path,
    buffered: bool,
) -> Result<Option<MemberDisk>, String> {
    let note = |what: &dyn std::fmt::Display| format!("{}: {what}", path.display());
    let how = OpenOptions::new().buffered(buffered);
    let disk = core.open_disk(path, how).await.map_err(|why| why.to_string())?;
    let memory = core.pool().account();
    let label = read_label(&disk, &memory).await.map_err(|why| note(&why))?;
    let label = match label.map_err(|why| note(&why))? {
        Some(label) if label.pool != pool => return Ok(None),
        Some(label) if label.state == State::Removed => {
            return Err(note(&"was removed from the pool"));
        }
        Some(label) => label,
        None => return Ok(None),
    };
    let (size, had, serial) = (disk.info().size, label.layout.bytes, label.serial);
    if size < had {
        return Err(note(&format!("disk {serial} has {size} bytes and had {had}: it is not used")));
    }
    Ok(Some(MemberDisk::new(disk, memory, label)))
}

/// A disk of the pool, and what it knows.
#[derive(Debug)]
struct Found {
    disk: Rc<MemberDisk>,
    known: Option<Metadata>,
}

impl Found {
    /// The last version that it proves to be committed, by its metadata, or if that is damaged by its label.
    fn committed(&self) -> Option<Stamp> {
        let label = self.disk.label();
        match &self.known {
            Some(known) => known.committed(),
            None => Some(label.opened).filter(|_| label.state == State::Made),
        }
    }

    /// What its label proves if it is damaged.
    fn witness(&self) -> Option<Witness> {
        let label = self.disk.label();
        let committed = self.committed().filter(|_| self.known.is_none())?;
        let Label { number: member, member: uuid, serial, .. } = label;
        Some(Witness { member, uuid, serial, committed })
    }
}

/// The disks of a pool that are there.
#[derive(Debug, Default)]
pub(super) struct Disks {
    found: Vec<Found>,
    /// What was wrong with others, one line each.
    notes: Vec<String>,
}

/// What a pool goes on from.
#[derive(Debug)]
pub(super) struct Start {
    pub(super) metadata: Metadata,
    /// Those that hold it, or what led to it.
    pub(super) supporters: BTreeMap<MemberId, Rc<MemberDisk>>,
    /// Those of them that do not hold it yet.
    pub(super) behind: Vec<MemberId>,
    /// Those that come back: with what is marked, and was under way in the era that they knew, or everything.
    pub(super) returning: Vec<Returning>,
    pub(super) excused: Members,
    pub(super) forced: bool,
}

impl Disks {
    /// Looks for the disks of `pool` at these paths, takes them for this machine, and finds out what they know. Whatever is
    /// something else is passed over.
    ///
    /// # Errors
    /// Which disks are another machine's, but for those of `without`.
    pub(super) async fn find(
        core: &Core,
        pool: Uuid,
        paths: &[PathBuf],
        (buffered, without): (bool, &[String]),
        ownership: &Ownership,
    ) -> Result<Self, PoolError> {
        let (all, disks) = Self::look_for(core, pool, paths, buffered).await;
        let is_said_gone = |disk: &MemberDisk| {
            let (serial, path) = (disk.label().serial, disk.path());
            without.iter().any(|name| serial.as_str() == name || path == Path::new(name))
        };
        let (gone, disks): (Vec<_>, Vec<_>) = disks.into_iter().partition(is_said_gone);
        let each: Vec<_> = disks.iter().collect();
        let taken = take_all(core, &each, ownership).await?;
        Ok(all.with_known(gone, disks, taken).await)
    }

    /// The same of disks that are out of the pool: those that are another machine's are left alone.
    async fn find_each(
        core: &Core,
        pool: Uuid,
        paths: &[PathBuf],
        buffered: bool,
        ownership: &Ownership,
    ) -> Self {
        let (all, disks) = Self::look_for(core, pool, paths, buffered).await;
        let taken = join_all(disks.iter().map(|disk| take_in_time(core, disk, ownership))).await;
        let taken = taken.into_iter().map(Result::err).collect();
        all.with_known(Vec::new(), disks, taken).await
    }

    /// All that could be taken, each with what it knows, and those that are gone for good.
    async fn with_known(
        mut self,
        gone: Vec<MemberDisk>,
        disks: Vec<MemberDisk>,
        taken: Vec<Option<NotTaken>>,
    ) -> Self {
        let mut there = gone;
        for (disk, why_not) in disks.into_iter().zip(taken) {
            match why_not {
                None => there.push(disk),
                Some(why) => self.notes.push(not_taken(&disk.label(), disk.path(), &why)),
            }
        }
        let known = join_all(there.iter().map(|disk| timeout(LONG_PATIENCE, disk.known()))).await;
        for (disk, known) in there.into_iter().zip(known) {
            match known {
                Ok(known) => self.add(disk, known),
                Err(_) => self.note(disk.path(), "it does not answer"),
            }
        }
        self
    }

    /// Gives all of them back: the pool is not opened.
    pub(super) async fn release(&self) {
        release_all(self.found.iter().map(|found| Rc::clone(&found.disk))).await;
    }

    async fn look_for(
        core: &Core,
        pool: Uuid,
        paths: &[PathBuf],
        buffered: bool,
    ) -> (Self, Vec<MemberDisk>) {
        let (mut all, mut places) = (Self::default(), Vec::new());
        for path in paths {
            if !places.contains(&path) {
                places.push(path);
            }
        }
        // One that does not answer keeps the others waiting once, and not one after the other.
        let looks = places.into_iter().map(|path| async move {
            let seen = timeout(LONG_PATIENCE, look(core, pool, path, buffered)).await;
            seen.unwrap_or_else(|_| Err(format!("{}: it does not answer", path.display())))
        });
        let mut disks = Vec::new();
        for seen in join_all(looks).await {
            match seen {
                Ok(Some(disk)) => disks.push(disk),
                Ok(None) => {}
                Err(note) => all.notes.push(note),
            }
        }
        all.without_twins(&mut disks);
        (all, disks)
    }

    fn note(&mut self, path: &Path, what: impl std::fmt::Display) {
        self.notes.push(format!("{}: {what}", path.display()));
    }

    fn add(&mut self, disk: MemberDisk, known: Result<Metadata, Unusable>) {
        // It may be made again from the others.
        if let Err(why) = &known {
            self.note(disk.path(), format!("disk {}: {why}", disk.label().serial));
        }
        self.found.push(Found { disk: Rc::new(disk), known: known.ok() });
    }

    /// Two with one identity are a disk and its copy: nobody knows which is which.
    fn without_twins(&mut self, disks: &mut Vec<MemberDisk>) {
        let uuids: Vec<Uuid> = disks.iter().map(|disk| disk.label().member).collect();
        let is_twin = |uuid: Uuid| uuids.iter().filter(|u| **u == uuid).count() > 1;
        let twins: Vec<_> = disks.extract_if(.., |disk| is_twin(disk.label().member)).collect();
        for twin in twins {
            let member = twin.label().member;
            let what = format!("there is another disk with its identity {member}: neither is used");
            self.note(twin.path(), what);
        }
    }

    /// What is wrong with others than those that were found, for messages.
    fn with_notes(&self, what: impl std::fmt::Display) -> String {
        let mut message = what.to_string();
        self.notes.iter().for_each(|note| message.push_str(&format!("\n  {note}")));
        message
    }

    /// The identities that a person means by serial numbers, paths, numbers of members, or themselves.
    fn named(&self, names: &[String]) -> Result<Vec<Uuid>, PoolError> {
        let known = || self.found.iter().filter_map(|found| found.known.as_ref());
        let labels: Vec<_> = self.found.iter().map(|f| (f.disk.label(), f.disk.path())).collect();
        let path_of = |uuid| labels.iter().find(|(l, _)| l.member == uuid).map(|(_, path)| *path);
        let mut all: Vec<Called<'_, Uuid>> = Vec::new();
        let is_new = |all: &[Called<'_, Uuid>], uuid| all.iter().all(|known| known.key != uuid);
        // Of another history as well: it may be the wrong one.
        for (id, m) in known().flat_map(Metadata::members) {
            if is_new(&all, m.uuid) {
                all.push(called::called(m.uuid, id, m, path_of(m.uuid)));
            }
        }
        // Those that are damaged know nothing.
        for (label, path) in &labels {
            let (key, number, serial) = (label.member, label.number.0, label.serial.as_str());
            if is_new(&all, key) {
                all.push(Called { key, number, serial, path: Some(path), uuid: key });
            }
        }
        names.iter().map(|name| called::find(name, &all)).collect()
    }

    /// Who of them is believed.
    pub(super) fn believe(&self, without: &[String], mistake: Mistake) -> Result<Start, PoolError> {
        for note in &self.notes {
            tracing::warn!("{note}");
        }
        let without = self.named(without)?;
        let known: Vec<Known<'_>> = (self.found.iter())
            .filter_map(|found| {
                let (label, metadata) = (found.disk.label(), found.known.as_ref()?);
                let number = metadata.member_of(label.member).map_or(label.number, |(id, _)| id);
                Some(Known { member: number, uuid: label.member, metadata })
            })
            .collect();
        let damaged: Vec<Witness> = self.found.iter().filter_map(Found::witness).collect();
        let believed = vote::open_making(mistake, &known, &damaged, &without);
        let believed = believed.map_err(|why| PoolError::new(self.with_notes(why)))?;
        let metadata = believed.metadata.clone();
        let mut start = Start {
            supporters: BTreeMap::new(),
            behind: Vec::new(),
            returning: Vec::new(),
            excused: believed.excused,
            forced: believed.forced,
            metadata,
        };
        for found in &self.found {
            start.add(found, believed.supporters);
        }
        start.bear(self, &without)?;
        Ok(start)
    }
}

/// Whether one that knows of `stamp` had everything up to version `least` of this history.
fn has(metadata: &Metadata, stamp: Stamp, least: u64) -> bool {
    metadata.follows(stamp) && stamp.version >= least
}

/// The era that a member knew last that is out, if it lacks no more than what is marked, and what was under way then; `knew` it
/// had to, and has it by what is `known` of it.
fn era_of(pool: &Metadata, knew: u64, state: State, known: Option<&Metadata>) -> Option<u64> {
    // One that was being made again knows more than it has.
    let known = known.filter(|known| state == State::Made && has(pool, known.stamp(), knew))?;
    Some(known.era())
}

/// A member that was out, as it was found again: lacking everything if it knows no era.
#[derive(Debug)]
pub(super) struct Returning {
    pub(super) id: MemberId,
    pub(super) disk: Rc<MemberDisk>,
    pub(super) era: Option<u64>,
}

/// A disk that proves to be committed what the pool does not know of: the pool was opened from older ones without it.
#[derive(Debug)]
pub(super) struct Newer {
    pub(super) id: MemberId,
    pub(super) path: PathBuf,
    pub(super) serial: Text,
    pub(super) committed: Stamp,
}

/// Disks at these paths that are members of `pool` and out of it: those that may come back, and those that may not be overwritten.
pub(super) async fn find_absent(
    core: &Core,
    pool: &Metadata,
    paths: &[PathBuf],
    buffered: bool,
    ownership: &Ownership,
) -> (Vec<Returning>, Vec<Newer>) {
    let disks = Disks::find_each(core, pool.pool, paths, buffered, ownership).await;
    let (mut absent, mut newer) = (Vec::new(), Vec::new());
    for found in &disks.found {
        let label = found.disk.label();
        let Some((id, member)) = pool.member_of(label.member) else { continue };
        let Standing::Out { knew, .. } = member.standing else { continue };
        match found.committed().filter(|committed| contradicts(pool, *committed)) {
            Some(committed) => {
                let path = found.disk.path().to_owned();
                newer.push(Newer { id, path, serial: label.serial, committed });
            }
            None => {
                let era = era_of(pool, knew, label.state, found.known.as_ref());
                absent.push(Returning { id, disk: Rc::clone(&found.disk), era });
            }
        }
    }
    (absent, newer)
}

/// Says that a disk knows less than it must have known, if that is so.
fn say_set_back(pool: &Metadata, disk: &MemberDisk, knows: Option<Stamp>, knew: u64) {
    let Some(knows) = knows.filter(|knows| knows.version < knew) else { return };
    let (path, serial) = (disk.path().display(), disk.label().serial);
    tracing::error!(
        pool = %pool.name, %path, %serial, version = knows.version, had = knew,
        "a disk of the pool was set back to an older state (a snapshot or a backup of it was put back?): all of it is made again from the others"
    );
}

impl Start {
    fn add(&mut self, found: &Found, supporters: Members) {
        let (disk, label) = (Rc::clone(&found.disk), found.disk.label());
        let Some((id, member)) = self.metadata.member_of(label.member) else {
            tracing::warn!(path = %disk.path().display(), "it is no disk of the pool any more");
            return;
        };
        let knows = found.known.as_ref().map(Metadata::stamp);
        if self.excused.has(id) {
            return;
        }
        match member.standing {
            Standing::Out { knew, .. } => {
                let era = era_of(&self.metadata, knew, label.state, found.known.as_ref());
                if knows.is_some_and(|stamp| stamp.version < knew) {
                    say_set_back(&self.metadata, &disk, knows, knew);
                }
                self.returning.push(Returning { id, disk, era });
            }
            _ if supporters.has(id) => {
                if knows != Some(self.metadata.stamp()) {
                    self.behind.push(id);
                }
                self.supporters.insert(id, disk);
            }
            // Set back, of another history, or damaged: it is out with this opening, and comes back with nothing of what it has. What
            // is marked is what was written since others knew it out, and not what it has lost.
            _ => {
                say_set_back(&self.metadata, &disk, knows, self.metadata.counted());
                self.returning.push(Returning { id, disk, era: None });
            }
        }
    }

    /// With all supporters holding what the pool goes on from. One that does not take it supports nothing.
    pub(super) async fn brought_up(mut self) -> Self {
        let (bytes, version) = (self.metadata.snapshot(), self.metadata.stamp().version);
        for id in std::mem::take(&mut self.behind) {
            let Some(disk) = self.supporters.get(&id) else { continue };
            if let Err(why) = disk.put_snapshot(&bytes, version).await {
                tracing::error!(path = %disk.path().display(), error = %why, "a disk of the pool is out");
                self.supporters.remove(&id);
            }
        }
        self
    }

    /// Members with a vote that are not there: they are out from now on.
    pub(super) fn missing(&self) -> Vec<MemberId> {
        let voters = self.metadata.voters();
        voters.iter().filter(|id| !self.supporters.contains_key(id)).collect()
    }

    /// Refuses what would lose data, unless a person has said so.
    fn bear(&self, disks: &Disks, without: &[Uuid]) -> Result<(), PoolError> {
        let there: Members = self.supporters.keys().copied().collect();
        let lost: Vec<_> = self.metadata.lost(there).collect();
        let unsaid = self
            .metadata
            .members()
            .filter(|(id, m)| !there.has(*id) && m.taken() > 0 && !without.contains(&m.uuid));
        let unsaid: Vec<String> =
            unsaid.map(|(id, m)| format!("{} ({})", m.serial, id.0)).collect();
        if lost.is_empty() || unsaid.is_empty() {
            for volume in lost.iter().filter_map(|id| self.metadata.volume(*id)) {
                tracing::error!(volume = %volume.uuid, "blocks of the volume are lost");
            }
            return Ok(());
        }
        let volumes = lost.iter().filter_map(|id| self.metadata.volume(*id));
        let volumes: Vec<String> = volumes.map(|volume| volume.uuid.to_string()).collect();
        let what = format!(
            "blocks of volumes {} would be lost: disks {} are missing",
            volumes.join(", "),
            unsaid.join(", ")
        );
        Err(PoolError::new(disks.with_notes(what)).hinting(
            "put the disks back; if they are gone for good: windrose pool open NAME --without DISK",
        ))
    }
}

/// A disk that is to become a member: a block device, or a file that exists and has its size.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewDisk {
    /// Where it is.
    pub path: PathBuf,
    /// Identities of disks that may be overwritten, as a person typed them: serial numbers, or paths of those that have none.
    pub overwrite: Vec<String>,
}

/// Opens a disk that is to become a member, if it holds nothing, or may be overwritten. It has to answer within a minute.
pub(super) async fn open_new(
    core: &Core,
    new: &NewDisk,
    buffered: bool,
    claim: Option<Claim>,
) -> Result<Disk, PoolError> {
    if_it_answers(&new.path, opened_if_unused(core, new, buffered, claim)).await
}

async fn opened_if_unused(
    core: &Core,
    new: &NewDisk,
    buffered: bool,
    claim: Option<Claim>,
) -> Result<Disk, PoolError> {
    let disk = core.open_disk(&new.path, OpenOptions::new().buffered(buffered)).await?;
    let (path, serial) = (new.path.display().to_string(), disk.serial().to_owned());
    let overwrites = is_identity(&new.overwrite, &serial, &path);
    is_free(core, &disk, claim, overwrites).await?;
    if overwrites {
        return Ok(disk);
    }
    let identity = disk_argument(if serial.is_empty() { &path } else { &serial });
    let memory = core.pool().account();
    let label = read_label(&disk, &memory).await.map_err(|why| PoolError::at(&new.path, why))?;
    let holds = match label {
        Ok(None) => disk::is_unused(&disk, &memory).await.err().map(|why| why.to_string()),
        // What it had of the pool may go; what somebody has put there since may not.
        Ok(Some(Label { state: State::Removed, .. })) => {
            let known = disk::known_formats(&disk, &memory, disk::MEMBER).await;
            known.unwrap_or_else(Some).map(|why| why.to_string())
        }
        Ok(Some(label)) => Some(format!("belongs to pool {} ({})", label.name, label.pool)),
        Err(why) => Some(format!("holds {why}")),
    };
    match holds {
        None => Ok(disk),
        Some(what) => {
            let what = what.trim_end_matches("; --force overwrites it");
            let message = format!("{path}: {what}; --overwrite {identity} overwrites it");
            Err(PoolError::new(message))
        }
    }
}
