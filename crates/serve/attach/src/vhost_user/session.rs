//! What one monitor has told: the state of its disk, on the volume's core. Messages come here one after the other
//! from [`super::control`].

use std::cell::Cell;
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::rc::Rc;

use rt::Core;
use rt::event::Signal;
use vhost::vhost_user::{Error, Result};
use virtio_bindings::bindings::virtio_blk::VIRTIO_BLK_F_CONFIG_WCE;

use super::config::{Config, Features};
use super::disk::Disk;
use super::inflight::Inflight;
use super::memory::{Memory, Place, Region};
use super::ring::{Addresses, Ring, Start};
use super::{MAX_RING_SIZE, MAX_RINGS};

/// Features of the protocol that the monitor has asked for, and all else that it has told.
pub(super) struct Session {
    core: Core,
    disk: Rc<Disk>,
    features: Features,
    memory: Memory,
    inflight: Option<Inflight>,
    lines: Vec<Line>,
    /// What the driver has written to the configuration.
    writeback: bool,
    write_through: Rc<Cell<bool>>,
}

/// A ring, running or not.
#[derive(Default)]
struct Line {
    places: u16,
    at: Option<MonitorAddresses>,
    base: u16,
    enabled: bool,
    call: Option<Rc<Signal>>,
    error: Option<Rc<Signal>>,
    ring: Option<Ring>,
}

/// Where a ring's parts are, for the monitor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct MonitorAddresses {
    pub(super) table: u64,
    pub(super) available: u64,
    pub(super) used: u64,
}

impl MonitorAddresses {
    fn translate(self, memory: &Memory) -> Option<Addresses> {
        Some(Addresses {
            table: memory.translate(self.table)?,
            available: memory.translate(self.available)?,
            used: memory.translate(self.used)?,
        })
    }
}

const RUNS: Error = Error::InvalidOperation("a ring cannot be changed while it runs");

impl Session {
    pub(super) fn new(core: &Core, disk: Rc<Disk>) -> Self {
        let lines = (0..disk.rings).map(|_| Line::default()).collect();
        Self {
            core: core.clone(),
            disk,
            features: Features::default(),
            memory: Memory::default(),
            inflight: None,
            lines,
            writeback: true,
            write_through: Rc::new(Cell::new(true)),
        }
    }

    /// What the disk offers.
    pub(super) fn offered(&self) -> Features {
        let info = self.disk.volume.info();
        Features::of(&info, self.disk.read_only || info.read_only, self.disk.rings)
    }

    pub(super) fn rings(&self) -> u16 {
        self.disk.rings
    }

    pub(super) fn set_features(&mut self, features: Features) -> Result<()> {
        if !features.is_within(self.offered()) {
            return Err(Error::FeatureMismatch);
        }
        if features != self.features && self.lines.iter().any(|line| line.ring.is_some()) {
            return Err(RUNS);
        }
        // Without the protocol's features nobody enables rings (the specification, "Ring states").
        if !features.has(Features::PROTOCOL) {
            self.lines.iter_mut().for_each(|line| line.enabled = true);
        }
        self.features = features;
        self.note_cache();
        Ok(())
    }

    fn note_cache(&self) {
        let chosen = self.features.has(VIRTIO_BLK_F_CONFIG_WCE) && !self.writeback;
        self.write_through.set(chosen || self.features.is_write_through());
    }

    /// A part of the configuration space.
    pub(super) fn config(&self, offset: u32, size: u32) -> Result<Vec<u8>> {
        let info = self.disk.volume.info();
        let config = Config::of(&info, self.writeback, self.disk.rings);
        config.part(offset, size).ok_or(Error::InvalidParam)
    }

    /// The driver writes to the configuration space: there is one field that it may.
    pub(super) fn set_config(&mut self, offset: u32, bytes: &[u8]) -> Result<()> {
        let writable = self.offered().has(VIRTIO_BLK_F_CONFIG_WCE);
        match (offset, bytes) {
            (Config::WRITEBACK, [value @ 0..=1]) if writable => {
                self.writeback = *value == 1;
                self.note_cache();
                Ok(())
            }
            _ => Err(Error::InvalidParam),
        }
    }

    pub(super) fn set_memory(&mut self, regions: Vec<Region>) -> Result<()> {
        let memory = Memory::new(regions).map_err(refused)?;
        self.replace_memory(memory);
        Ok(())
    }

    pub(super) fn add_memory(&mut self, region: Region) -> Result<()> {
        let memory = self.memory.with(region).map_err(refused)?;
        self.replace_memory(memory);
        Ok(())
    }

    pub(super) fn remove_memory(&mut self, place: Place) -> Result<()> {
        let memory = self.memory.without(place).map_err(refused)?;
        self.replace_memory(memory);
        Ok(())
    }

    fn replace_memory(&mut self, memory: Memory) {
        self.memory = memory;
        for line in &self.lines {
            if let (Some(ring), Some(at)) = (&line.ring, line.at) {
                ring.remap(self.memory.guest(), at.translate(&self.memory));
            }
        }
    }

    /// A record of what is in flight, for the monitor to keep.
    pub(super) fn create_record(&mut self, rings: u16, places: u16) -> Result<(u64, File)> {
        let created = Inflight::create(rings, places).map_err(Error::ReqHandlerError);
        let (_, file, bytes) = created?;
        Ok((bytes, file))
    }

    /// The monitor gives the record that it has kept.
    pub(super) fn set_record(
        &mut self,
        file: File,
        place: (u64, u64),
        shape: (u16, u16),
    ) -> Result<()> {
        if self.lines.iter().any(|line| line.ring.is_some()) {
            return Err(RUNS);
        }
        let record = Inflight::open(file, place, shape).map_err(Error::ReqHandlerError)?;
        self.inflight = Some(record);
        Ok(())
    }

    fn line(&mut self, index: u32) -> Result<&mut Line> {
        let line = usize::try_from(index).ok().and_then(|index| self.lines.get_mut(index));
        line.ok_or(Error::InvalidParam)
    }

    fn still(&mut self, index: u32) -> Result<&mut Line> {
        let line = self.line(index)?;
        if line.ring.is_some() { Err(RUNS) } else { Ok(line) }
    }

    pub(super) fn set_places(&mut self, index: u32, places: u32) -> Result<()> {
        let line = self.still(index)?;
        let places = u16::try_from(places).map_err(|_| Error::InvalidParam)?;
        if places > MAX_RING_SIZE || !places.is_power_of_two() {
            return Err(Error::InvalidParam);
        }
        line.places = places;
        Ok(())
    }

    pub(super) fn set_addresses(&mut self, index: u32, at: MonitorAddresses) -> Result<()> {
        let line = self.line(index)?;
        if line.ring.is_some() && line.at != Some(at) {
            return Err(RUNS);
        }
        line.at = Some(at);
        Ok(())
    }

    pub(super) fn set_base(&mut self, index: u32, base: u32) -> Result<()> {
        self.still(index)?.base = u16::try_from(base).map_err(|_| Error::InvalidParam)?;
        Ok(())
    }

    /// The ring begins.
    pub(super) fn set_kick(&mut self, index: u32, kick: Option<OwnedFd>) -> Result<()> {
        let line = self.still(index)?;
        let kick = kick.ok_or(Error::InvalidOperation("rings are not polled"))?;
        let at = line.at.ok_or(Error::InvalidOperation("the ring has no place yet"))?;
        let start = (line.places, line.base, line.enabled, line.call.clone(), line.error.clone());
        let (places, base, enabled, call, error) = start;
        let index_16 = u16::try_from(index).map_err(|_| Error::InvalidParam)?;
        let record = match &self.inflight {
            None => None,
            Some(all) => Some(all.ring(index_16, places).ok_or(Error::InvalidParam)?),
        };
        let addresses = at.translate(&self.memory);
        let addresses = addresses.ok_or(Error::InvalidOperation("the ring is outside memory"))?;
        let ring = Ring::start(
            &self.core,
            Start {
                disk: Rc::clone(&self.disk),
                index: index_16,
                guest: self.memory.guest().clone(),
                addresses,
                places,
                base,
                event_index: self.features.has_event_index(),
                enabled,
                kick,
                call,
                error,
                record,
                write_through: Rc::clone(&self.write_through),
            },
        );
        self.line(index)?.ring = Some(ring.map_err(refused)?);
        Ok(())
    }

    pub(super) fn set_call(&mut self, index: u32, call: Option<OwnedFd>) -> Result<()> {
        let call = signal(call)?;
        let line = self.line(index)?;
        if let Some(ring) = &line.ring {
            ring.set_call(call.clone());
        }
        line.call = call;
        Ok(())
    }

    pub(super) fn set_error(&mut self, index: u32, error: Option<OwnedFd>) -> Result<()> {
        let error = signal(error)?;
        let line = self.line(index)?;
        if let Some(ring) = &line.ring {
            ring.set_error(error.clone());
        }
        line.error = error;
        Ok(())
    }

    pub(super) fn enable(&mut self, index: u32, enable: bool) -> Result<()> {
        let line = self.line(index)?;
        line.enabled = enable;
        if let Some(ring) = &line.ring {
            ring.enable(enable);
        }
        Ok(())
    }

    /// Ends a ring: says where it has come to when nothing is in flight any more. Hangs up where something stays in flight.
    pub(super) async fn stop(&mut self, index: u32) -> Result<u16> {
        let line = self.line(index)?;
        if let Some(ring) = line.ring.take() {
            line.base = ring.stop().await;
        }
        let base = line.base;
        // What is not answered is in flight yet, for whoever serves the ring next.
        if self.disk.is_lost() { Err(Error::Disconnected) } else { Ok(base) }
    }

    /// Ends all rings, with all that is in flight answered, but for what a volume that is out of reach leaves.
    pub(super) async fn stop_all(&mut self) {
        // Each takes no more from now on, whichever is waited for first.
        self.lines.iter().filter_map(|line| line.ring.as_ref()).for_each(|ring| ring.enable(false));
        for line in &mut self.lines {
            if let Some(ring) = line.ring.take() {
                line.base = ring.stop().await;
            }
        }
    }

    /// The device is as it was in the beginning, but for its memory.
    pub(super) async fn reset(&mut self) {
        self.stop_all().await;
        for line in &mut self.lines {
            let (call, error) = (line.call.take(), line.error.take());
            *line = Line { call, error, ..Line::default() };
        }
        self.features = Features::default();
        self.writeback = true;
        self.note_cache();
    }

    /// The monitor has gone: ends when nothing of it is in flight any more.
    pub(super) async fn hang_up(mut self) {
        let rings: Vec<Ring> = self.lines.iter_mut().filter_map(|line| line.ring.take()).collect();
        rings.iter().for_each(Ring::mute);
        for ring in rings {
            ring.stop().await;
        }
        // A large guest's memory takes a while to be unmapped.
        let memory = std::mem::take(&mut self.memory);
        let _ = self.core.offload(move || drop(memory)).await;
    }
}

fn signal(fd: Option<OwnedFd>) -> Result<Option<Rc<Signal>>> {
    let signal = fd.map(Signal::new).transpose().map_err(Error::ReqHandlerError)?;
    Ok(signal.map(Rc::new))
}

fn refused(why: impl std::error::Error + Send + Sync + 'static) -> Error {
    Error::ReqHandlerError(io::Error::other(why))
}

const _: () =
    assert!(MAX_RINGS <= 256, "rings are named by a byte where descriptors come with them");
