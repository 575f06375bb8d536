//! What stands in for pools until they are made: volumes are sparse files beside the first disk, and every disk
//! begins with a text that tells of all of it. Nothing of it outlives the change that brings the real ones.

#![allow(
    missing_docs,
    clippy::missing_errors_doc,
    clippy::must_use_candidate,
    clippy::unused_async
)]

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fmt::{self, Display};
use std::fs;
use std::io::{Read, Seek, Write};
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use block::{Dev, Mem, MemOptions};
use rt::Core;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::file::{Create, File, FileError, Open};
use crate::raid::geometry::Level;

const MAGIC: &[u8; 8] = b"WRSTANDI";
const TEXT: usize = 64 << 10;
const PIECE: u64 = 16 << 20;
/// What stands in for `file::LABEL_AREA_BYTES`.
pub const LABEL_AREA_BYTES: u64 = 1 << 20;

pub struct NewDisk {
    pub path: PathBuf,
    pub overwrite: Option<String>,
}

pub struct CreatePool {
    pub id: Uuid,
    pub name: String,
    pub level: Level,
    pub columns: Option<u16>,
    pub strip_bytes: u32,
    pub rings: u16,
    pub disks: Vec<NewDisk>,
    pub spares: Vec<NewDisk>,
    pub buffered: bool,
}

pub struct OpenPool {
    pub id: Uuid,
    pub paths: Vec<PathBuf>,
    pub without: Vec<String>,
    pub buffered: bool,
}

pub struct NewPoolVolume {
    pub id: Uuid,
    pub bytes: u64,
    pub block_size: u32,
    pub thick: bool,
}

#[derive(Clone, Debug)]
pub struct PoolError {
    what: String,
    no_space: bool,
    hint: Option<&'static str>,
}

impl PoolError {
    fn new(what: impl Into<String>) -> Self {
        Self { what: what.into(), no_space: false, hint: None }
    }

    pub fn is_no_space(&self) -> bool {
        self.no_space
    }

    pub fn hint(&self) -> Option<&'static str> {
        self.hint
    }
}

impl Display for PoolError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.what)
    }
}

impl std::error::Error for PoolError {}

#[derive(Clone, Serialize, Deserialize)]
struct Text {
    id: Uuid,
    name: String,
    /// Copies; 0 for RAID 5, -1 for RAID 6.
    level: i32,
    columns: u16,
    strip_bytes: u32,
    version: u64,
    member: u16,
    disks: Vec<DiskText>,
    /// Bytes, and whether all of them are taken.
    volumes: BTreeMap<Uuid, (u64, bool)>,
    home: PathBuf,
}

#[derive(Clone, Serialize, Deserialize)]
struct DiskText {
    member: u16,
    id: Uuid,
    serial: String,
    path: Option<PathBuf>,
    bytes: u64,
    spare: bool,
    out: bool,
}

type Shared = Arc<Mutex<Text>>;

fn lock(shared: &Shared) -> MutexGuard<'_, Text> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

fn failed(path: &Path) -> impl Fn(std::io::Error) -> PoolError {
    move |e| PoolError::new(format!("{}: {e}", path.display()))
}

fn read(path: &Path) -> Result<Option<Text>, PoolError> {
    let mut bytes = vec![0; TEXT];
    let mut file = fs::File::open(path).map_err(failed(path))?;
    let n = file.read(&mut bytes).map_err(failed(path))?;
    let Some(text) = bytes[..n].strip_prefix(MAGIC) else { return Ok(None) };
    let end = text.iter().position(|b| *b == 0).unwrap_or(text.len());
    Ok(serde_json::from_slice(&text[..end]).ok())
}

fn write(text: &mut Text) -> Result<(), PoolError> {
    text.version += 1;
    for disk in text.disks.iter().filter(|d| !d.out) {
        let Some(path) = &disk.path else { continue };
        let own = Text { member: disk.member, ..text.clone() };
        let mut bytes = MAGIC.to_vec();
        bytes.extend(serde_json::to_vec(&own).map_err(|e| PoolError::new(e.to_string()))?);
        bytes.resize(TEXT, 0);
        let put = || {
            let mut file = fs::OpenOptions::new().write(true).open(path)?;
            file.write_all(&bytes)?;
            file.sync_all()
        };
        put().map_err(failed(path))?;
    }
    Ok(())
}

fn new_disk(disk: &NewDisk, member: u16, spare: bool) -> Result<DiskText, PoolError> {
    let path = &disk.path;
    let mut file = fs::File::open(path).map_err(failed(path))?;
    let bytes = file.seek(std::io::SeekFrom::End(0)).map_err(failed(path))?;
    let (mut first, serial) = ([0; 8], path.display().to_string());
    file.rewind().and_then(|()| file.read(&mut first)).map_err(failed(path))?;
    if first != [0; 8] && disk.overwrite.as_ref() != Some(&serial) {
        let what = match read(path)? {
            Some(text) => format!("{serial}: it is a disk of pool {}", text.name),
            None => format!("{serial}: it holds something"),
        };
        return Err(PoolError { hint: Some("--overwrite it"), ..PoolError::new(what) });
    }
    if bytes < 4 * PIECE {
        return Err(PoolError::new(format!("{serial}: it is too small")));
    }
    let path = Some(path.clone());
    Ok(DiskText { member, id: Uuid::new_v4(), serial, path, bytes, spare, out: false })
}

pub struct Pool {
    shared: Shared,
    scrubbed: RefCell<Option<ScrubReport>>,
}

impl Pool {
    pub async fn create(_core: &Core, what: &CreatePool) -> Result<Rc<Self>, PoolError> {
        let (mut disks, mut count) = (Vec::new(), 0);
        for (disk, spare) in
            what.disks.iter().map(|d| (d, false)).chain(what.spares.iter().map(|d| (d, true)))
        {
            disks.push(new_disk(disk, count, spare)?);
            count += 1;
        }
        let data = u16::try_from(what.disks.len()).unwrap_or(u16::MAX);
        let (level, even) = match what.level {
            Level::Copies(n) => (i32::from(n), data - data % n.max(1)),
            Level::Parity => (0, data),
            Level::DoubleParity => (-1, data),
        };
        let columns = what.columns.unwrap_or(even);
        if data < columns || columns == 0 || level < 1 && columns < 3 {
            return Err(PoolError::new(format!("{data} disks are too few")));
        }
        let first = what.disks.first().map(|d| d.path.clone());
        let home = first.ok_or_else(|| PoolError::new("no disks"))?;
        let mut text = Text {
            id: what.id,
            name: what.name.clone(),
            level,
            columns,
            strip_bytes: what.strip_bytes,
            version: 0,
            member: 0,
            disks,
            volumes: BTreeMap::new(),
            home,
        };
        write(&mut text)?;
        Ok(Self::of(text))
    }

    fn of(text: Text) -> Rc<Self> {
        Rc::new(Self { shared: Arc::new(Mutex::new(text)), scrubbed: RefCell::default() })
    }

    pub async fn open(_core: &Core, what: &OpenPool) -> Result<Rc<Self>, PoolError> {
        let mut found = BTreeMap::new();
        for path in &what.paths {
            if let Ok(Some(text)) = read(path)
                && text.id == what.id
            {
                found.insert(text.member, (path.clone(), text));
            }
        }
        let newest = found.values().map(|(_, text)| text).max_by_key(|t| t.version).cloned();
        let Some(mut text) = newest else {
            return Err(PoolError::new("none of its disks is there"));
        };
        for disk in text.disks.iter_mut() {
            disk.path = found.get(&disk.member).map(|(path, _)| path.clone());
        }
        let there = text.disks.iter().filter(|d| d.path.is_some() && !d.out).count();
        let all = text.disks.iter().filter(|d| !d.out).count();
        let missing = text.disks.iter().filter(|d| d.path.is_none() && !d.out);
        let named = |d: &DiskText| {
            what.without.iter().any(|w| *w == d.serial || *w == d.member.to_string())
        };
        let unnamed: Vec<_> = missing.filter(|d| !named(d)).map(|d| d.serial.clone()).collect();
        if there * 2 <= all && !unnamed.is_empty() {
            let what =
                format!("{} of its {all} disks are missing: {}", all - there, unnamed.join(", "));
            return Err(PoolError { hint: Some("connect them"), ..PoolError::new(what) });
        }
        for disk in text.disks.iter_mut().filter(|d| d.path.is_none()) {
            disk.out = true;
        }
        write(&mut text)?;
        Ok(Self::of(text))
    }

    pub async fn close(&self) -> Result<(), PoolError> {
        Ok(())
    }

    pub async fn destroy(&self) -> Result<(), PoolError> {
        let text = lock(&self.shared);
        if !text.volumes.is_empty() {
            return Err(PoolError::new("it has volumes"));
        }
        for path in text.disks.iter().filter_map(|d| d.path.as_ref()) {
            let zero = || fs::OpenOptions::new().write(true).open(path)?.write_all(&[0; TEXT]);
            zero().map_err(failed(path))?;
        }
        Ok(())
    }

    pub fn report(&self) -> PoolReport {
        let t = lock(&self.shared);
        let level = match t.level {
            0 => Level::Parity,
            -1 => Level::DoubleParity,
            n => Level::Copies(u16::try_from(n).unwrap_or(1)),
        };
        let (full, data) = match level {
            Level::Copies(n) => (n - 1, t.columns / n),
            Level::Parity => (1, t.columns - 1),
            Level::DoubleParity => (2, t.columns - 2),
        };
        let out = t.disks.iter().filter(|d| d.out && !d.spare).count();
        let bears = u32::from(full).checked_sub(u32::try_from(out).unwrap_or(u32::MAX));
        let raw_bytes: u64 = t.disks.iter().filter(|d| !d.spare).map(|d| d.bytes).sum();
        let usable_bytes = raw_bytes * u64::from(data) / u64::from(t.columns);
        let taken = |(bytes, thick): &(u64, bool)| if *thick { *bytes } else { 0 };
        let allocated_bytes: u64 = t.volumes.values().map(taken).sum();
        let disk = |d: &DiskText| PoolDisk {
            member: d.member,
            id: d.id,
            serial: d.serial.clone(),
            path: d.path.clone().filter(|_| !d.out),
            bytes: d.bytes,
            pieces: 0,
            room: u32::try_from(d.bytes / PIECE).unwrap_or(u32::MAX),
            state: match (d.out, d.spare) {
                (true, _) => PoolDiskState::Out,
                (_, true) => PoolDiskState::Spare,
                _ => PoolDiskState::In,
            },
            behind_pieces: 0,
            read_errors: 0,
            write_errors: 0,
        };
        let volume = |(id, held): (&Uuid, &(u64, bool))| PoolVolumeReport {
            id: *id,
            bytes: held.0,
            allocated_bytes: taken(held),
            bears,
        };
        PoolReport {
            id: t.id,
            name: t.name.clone(),
            level,
            columns: t.columns,
            strip_bytes: t.strip_bytes,
            raw_bytes,
            usable_bytes,
            allocated_bytes,
            free_bytes: usable_bytes.saturating_sub(allocated_bytes),
            bears,
            disks: t.disks.iter().map(disk).collect(),
            volumes: t.volumes.iter().map(volume).collect(),
            behind_pieces: 0,
            scrub: self.scrubbed.borrow().clone(),
            broken: None,
        }
    }

    pub async fn add(&self, disk: &NewDisk, spare: bool) -> Result<(), PoolError> {
        let mut text = lock(&self.shared);
        let next = text.disks.iter().map(|d| d.member + 1).max().unwrap_or(0);
        text.disks.push(new_disk(disk, next, spare)?);
        write(&mut text)
    }

    pub async fn remove(&self, disk: &str) -> Result<(), PoolError> {
        let mut text = lock(&self.shared);
        let at = find(&text, disk)?;
        let left = text.disks.iter().filter(|d| !d.out && !d.spare).count();
        if !text.disks[at].out && !text.disks[at].spare && left <= usize::from(text.columns) {
            return Err(PoolError {
                no_space: true,
                ..PoolError::new("there are too few other disks")
            });
        }
        if let Some(path) = text.disks.remove(at).path {
            let zero = || fs::OpenOptions::new().write(true).open(&path)?.write_all(&[0; TEXT]);
            zero().map_err(failed(&path))?;
        }
        write(&mut text)
    }

    pub async fn replace(&self, disk: &str, with: &NewDisk) -> Result<(), PoolError> {
        let mut text = lock(&self.shared);
        let at = find(&text, disk)?;
        let next = text.disks.iter().map(|d| d.member + 1).max().unwrap_or(0);
        text.disks[at] = new_disk(with, next, false)?;
        write(&mut text)
    }

    pub fn scrub(&self) -> Result<(), PoolError> {
        let all_bytes = lock(&self.shared).disks.iter().map(|d| d.bytes).sum();
        let (running, done_bytes) = (false, all_bytes);
        let report = ScrubReport { running, done_bytes, all_bytes, repaired: 0, unrepairable: 0 };
        *self.scrubbed.borrow_mut() = Some(report);
        Ok(())
    }

    pub async fn create_volume(&self, what: &NewPoolVolume) -> Result<(), PoolError> {
        let free = self.report().free_bytes;
        if what.thick && what.bytes > free {
            return Err(PoolError { no_space: true, ..PoolError::new("there is no room") });
        }
        let mut text = lock(&self.shared);
        if text.volumes.insert(what.id, (what.bytes, what.thick)).is_some() {
            return Err(PoolError::new("it has that volume"));
        }
        write(&mut text)
    }

    pub async fn grow_volume(&self, id: Uuid, bytes: u64) -> Result<(), PoolError> {
        let mut text = lock(&self.shared);
        let held = text.volumes.get_mut(&id).ok_or_else(|| PoolError::new("no such volume"))?;
        held.0 = bytes.max(held.0);
        write(&mut text)
    }

    pub async fn delete_volume(&self, id: Uuid) -> Result<(), PoolError> {
        let mut text = lock(&self.shared);
        text.volumes.remove(&id);
        // It may never have been written.
        let _ = fs::remove_file(place(&text, id));
        write(&mut text)
    }

    pub fn handle(self: &Rc<Self>) -> PoolHandle {
        PoolHandle { shared: Arc::clone(&self.shared) }
    }
}

fn find(text: &Text, disk: &str) -> Result<usize, PoolError> {
    let is = |d: &DiskText| {
        let path = d.path.as_ref().is_some_and(|p| p == Path::new(disk));
        d.serial == disk || path || d.member.to_string() == disk
    };
    let found = text.disks.iter().position(is);
    found.ok_or_else(|| PoolError::new(format!("it has no disk {disk}")))
}

fn place(text: &Text, id: Uuid) -> PathBuf {
    let mut path = text.home.clone().into_os_string();
    path.push(format!(".{id}"));
    path.into()
}

#[derive(Clone)]
pub struct PoolHandle {
    shared: Shared,
}

pub struct PoolSeat {
    shared: Shared,
}

impl PoolSeat {
    pub async fn take(_core: &Core, handle: PoolHandle, _ring: u16) -> Result<Rc<Self>, PoolError> {
        Ok(Rc::new(Self { shared: handle.shared }))
    }

    pub async fn open(&self, volume: Uuid) -> Result<Dev, PoolError> {
        let text = lock(&self.shared);
        let (bytes, _) =
            text.volumes.get(&volume).ok_or_else(|| PoolError::new("no such volume"))?;
        LAST.set(place(&text, volume));
        Ok(Dev::new(Mem::new(MemOptions::new(512, bytes / 512))))
    }

    pub async fn close(&self) -> Result<(), PoolError> {
        Ok(())
    }
}

thread_local! {
    static LAST: RefCell<PathBuf> = RefCell::default();
}

/// What stands in for `file::Medium`.
pub struct Medium(PathBuf);

impl Medium {
    pub fn of(_dev: Dev, _name: &Path) -> Self {
        Self(LAST.with(|last| last.borrow().clone()))
    }
}

impl File {
    pub async fn create_on(core: &Core, medium: Medium, how: &Create) -> Result<Self, FileError> {
        Self::create(core, &medium.0, how).await
    }

    pub async fn open_on(core: &Core, medium: Medium, what: &Open) -> Result<Self, FileError> {
        Self::open(core, &medium.0, what).await
    }
}

#[derive(Clone, Debug, PartialEq)]
pub struct PoolReport {
    pub id: Uuid,
    pub name: String,
    pub level: Level,
    pub columns: u16,
    pub strip_bytes: u32,
    pub raw_bytes: u64,
    pub usable_bytes: u64,
    pub allocated_bytes: u64,
    pub free_bytes: u64,
    pub bears: Option<u32>,
    pub disks: Vec<PoolDisk>,
    pub volumes: Vec<PoolVolumeReport>,
    pub behind_pieces: u64,
    pub scrub: Option<ScrubReport>,
    pub broken: Option<String>,
}

#[derive(Clone, Debug, PartialEq)]
pub struct PoolDisk {
    pub member: u16,
    pub id: Uuid,
    pub serial: String,
    pub path: Option<PathBuf>,
    pub bytes: u64,
    pub pieces: u32,
    pub room: u32,
    pub state: PoolDiskState,
    pub behind_pieces: u64,
    pub read_errors: u64,
    pub write_errors: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PoolDiskState {
    In,
    Spare,
    Leaving,
    Out,
}

#[derive(Clone, Debug, PartialEq)]
pub struct PoolVolumeReport {
    pub id: Uuid,
    pub bytes: u64,
    pub allocated_bytes: u64,
    pub bears: Option<u32>,
}

#[derive(Clone, Debug, PartialEq)]
pub struct ScrubReport {
    pub running: bool,
    pub done_bytes: u64,
    pub all_bytes: u64,
    pub repaired: u64,
    pub unrepairable: u64,
}

pub async fn inspect(
    _core: &Core,
    path: &Path,
    _buffered: bool,
) -> Result<Option<Inspected>, PoolError> {
    let text = read(path)?;
    Ok(text.map(|t| {
        let serial = t.disks.iter().find(|d| d.member == t.member).map(|d| d.serial.clone());
        Inspected { pool: t.id, name: t.name, member: t.member, serial: serial.unwrap_or_default() }
    }))
}

pub struct Inspected {
    pub pool: Uuid,
    pub name: String,
    pub member: u16,
    pub serial: String,
}
