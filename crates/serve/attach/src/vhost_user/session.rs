//! The state of the disk that one monitor has set up, on the volume's core. Messages come one at a
//! time from [`super::control`].

use std::cell::Cell;
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::rc::Rc;

use rt::Core;
use rt::event::EventNotifier;
use vhost::vhost_user::{Error, Result};
use virtio_bindings::bindings::virtio_blk::VIRTIO_BLK_F_CONFIG_WCE;

use super::config::{Config, Features};
use super::disk::Disk;
use super::inflight::Inflight;
use super::memory::{Memory, Region, RegionPlacement};
use super::virtqueue::{Virtqueue, VirtqueueAddresses, VirtqueueSetup};
use super::{MAX_QUEUE_SIZE, MAX_QUEUES};

/// The state set by a monitor, with the negotiated protocol features.
pub(super) struct DiskSession {
    core: Core,
    disk: Rc<Disk>,
    features: Features,
    memory: Memory,
    inflight: Option<Inflight>,
    queues: Vec<QueueState>,
    /// The driver's write-cache setting.
    writeback: bool,
    write_through: Rc<Cell<bool>>,
}

/// A ring, running or not.
#[derive(Default)]
struct QueueState {
    queue_size: u16,
    addresses: Option<MonitorAddresses>,
    base: u16,
    enabled: bool,
    call: Option<Rc<EventNotifier>>,
    error: Option<Rc<EventNotifier>>,
    virtqueue: Option<Virtqueue>,
}

/// Monitor addresses of a ring's parts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct MonitorAddresses {
    pub(super) table: u64,
    pub(super) available: u64,
    pub(super) used: u64,
}

impl MonitorAddresses {
    fn translate(self, memory: &Memory) -> Option<VirtqueueAddresses> {
        Some(VirtqueueAddresses {
            table: memory.translate(self.table)?,
            available: memory.translate(self.available)?,
            used: memory.translate(self.used)?,
        })
    }
}

const QUEUE_IS_RUNNING: Error = Error::InvalidOperation("a ring cannot be changed while it runs");

impl DiskSession {
    pub(super) fn new(core: &Core, disk: Rc<Disk>) -> Self {
        let lines = (0..disk.queues).map(|_| QueueState::default()).collect();
        Self {
            core: core.clone(),
            disk,
            features: Features::default(),
            memory: Memory::default(),
            inflight: None,
            queues: lines,
            writeback: true,
            write_through: Rc::new(Cell::new(true)),
        }
    }

    /// Features that the disk offers.
    pub(super) fn offered(&self) -> Features {
        let info = self.disk.volume.info();
        Features::of(&info, self.disk.read_only || info.read_only, self.disk.queues)
    }

    pub(super) fn queue_count(&self) -> u16 {
        self.disk.queues
    }

    pub(super) fn set_features(&mut self, features: Features) -> Result<()> {
        if !features.is_subset_of(self.offered()) {
            return Err(Error::FeatureMismatch);
        }
        if features != self.features && self.queues.iter().any(|line| line.virtqueue.is_some()) {
            return Err(QUEUE_IS_RUNNING);
        }
        // Without protocol features, rings are enabled from the start (the specification, "Ring
        // states").
        if !features.has(Features::PROTOCOL) {
            self.queues.iter_mut().for_each(|line| line.enabled = true);
        }
        self.features = features;
        self.update_write_through();
        Ok(())
    }

    fn update_write_through(&self) {
        let chosen = self.features.has(VIRTIO_BLK_F_CONFIG_WCE) && !self.writeback;
        self.write_through.set(chosen || self.features.is_write_through());
    }

    /// A part of the configuration space.
    pub(super) fn config(&self, offset: u32, size: u32) -> Result<Vec<u8>> {
        let info = self.disk.volume.info();
        let config = Config::of(&info, self.writeback, self.disk.queues);
        config.part(offset, size).ok_or(Error::InvalidParam)
    }

    /// A write of the driver to the configuration space: only one field is writable.
    pub(super) fn set_config(&mut self, offset: u32, bytes: &[u8]) -> Result<()> {
        let writable = self.offered().has(VIRTIO_BLK_F_CONFIG_WCE);
        match (offset, bytes) {
            (Config::WRITEBACK, [value @ 0..=1]) if writable => {
                self.writeback = *value == 1;
                self.update_write_through();
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

    pub(super) fn remove_memory(&mut self, placement: RegionPlacement) -> Result<()> {
        let memory = self.memory.without(placement).map_err(refused)?;
        self.replace_memory(memory);
        Ok(())
    }

    fn replace_memory(&mut self, memory: Memory) {
        self.memory = memory;
        for line in &self.queues {
            if let (Some(ring), Some(at)) = (&line.virtqueue, line.addresses) {
                ring.remap(self.memory.guest(), at.translate(&self.memory));
            }
        }
    }

    /// Creates a record of requests in flight, for the monitor to keep.
    pub(super) fn create_inflight(&mut self, rings: u16, places: u16) -> Result<(u64, File)> {
        let created = Inflight::create(rings, places).map_err(Error::ReqHandlerError);
        let (_, file, bytes) = created?;
        Ok((bytes, file))
    }

    /// Takes the record that the monitor has kept.
    pub(super) fn set_inflight(
        &mut self,
        file: File,
        place: (u64, u64),
        shape: (u16, u16),
    ) -> Result<()> {
        if self.queues.iter().any(|line| line.virtqueue.is_some()) {
            return Err(QUEUE_IS_RUNNING);
        }
        let record = Inflight::open(file, place, shape).map_err(Error::ReqHandlerError)?;
        self.inflight = Some(record);
        Ok(())
    }

    fn queue(&mut self, index: u32) -> Result<&mut QueueState> {
        let line = usize::try_from(index).ok().and_then(|index| self.queues.get_mut(index));
        line.ok_or(Error::InvalidParam)
    }

    fn stopped_queue(&mut self, index: u32) -> Result<&mut QueueState> {
        let line = self.queue(index)?;
        if line.virtqueue.is_some() { Err(QUEUE_IS_RUNNING) } else { Ok(line) }
    }

    pub(super) fn set_queue_size(&mut self, index: u32, places: u32) -> Result<()> {
        let line = self.stopped_queue(index)?;
        let places = u16::try_from(places).map_err(|_| Error::InvalidParam)?;
        if places > MAX_QUEUE_SIZE || !places.is_power_of_two() {
            return Err(Error::InvalidParam);
        }
        line.queue_size = places;
        Ok(())
    }

    pub(super) fn set_addresses(&mut self, index: u32, at: MonitorAddresses) -> Result<()> {
        let line = self.queue(index)?;
        if line.virtqueue.is_some() && line.addresses != Some(at) {
            return Err(QUEUE_IS_RUNNING);
        }
        line.addresses = Some(at);
        Ok(())
    }

    pub(super) fn set_base(&mut self, index: u32, base: u32) -> Result<()> {
        self.stopped_queue(index)?.base = u16::try_from(base).map_err(|_| Error::InvalidParam)?;
        Ok(())
    }

    /// Starts a ring.
    pub(super) fn set_kick(&mut self, index: u32, kick: Option<OwnedFd>) -> Result<()> {
        let line = self.stopped_queue(index)?;
        let kick = kick.ok_or(Error::InvalidOperation("rings are not polled"))?;
        let at = line.addresses.ok_or(Error::InvalidOperation("the ring has no addresses yet"))?;
        let start =
            (line.queue_size, line.base, line.enabled, line.call.clone(), line.error.clone());
        let (places, base, enabled, call, error) = start;
        let index_16 = u16::try_from(index).map_err(|_| Error::InvalidParam)?;
        let record = match &self.inflight {
            None => None,
            Some(all) => Some(all.queue_record(index_16, places).ok_or(Error::InvalidParam)?),
        };
        let addresses = at.translate(&self.memory);
        let addresses = addresses.ok_or(Error::InvalidOperation("the ring is outside memory"))?;
        let ring = Virtqueue::start(
            &self.core,
            VirtqueueSetup {
                disk: Rc::clone(&self.disk),
                index: index_16,
                guest: self.memory.guest().clone(),
                addresses,
                queue_size: places,
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
        self.queue(index)?.virtqueue = Some(ring.map_err(refused)?);
        Ok(())
    }

    pub(super) fn set_call(&mut self, index: u32, call: Option<OwnedFd>) -> Result<()> {
        let call = signal(call)?;
        let line = self.queue(index)?;
        if let Some(ring) = &line.virtqueue {
            ring.set_call(call.clone());
        }
        line.call = call;
        Ok(())
    }

    pub(super) fn set_error(&mut self, index: u32, error: Option<OwnedFd>) -> Result<()> {
        let error = signal(error)?;
        let line = self.queue(index)?;
        if let Some(ring) = &line.virtqueue {
            ring.set_error(error.clone());
        }
        line.error = error;
        Ok(())
    }

    pub(super) fn enable(&mut self, index: u32, enable: bool) -> Result<()> {
        let line = self.queue(index)?;
        line.enabled = enable;
        if let Some(ring) = &line.virtqueue {
            ring.enable(enable);
        }
        Ok(())
    }

    /// Stops a ring: returns its position once nothing is in flight any more. Disconnects if
    /// requests remain in flight.
    pub(super) async fn stop(&mut self, index: u32) -> Result<u16> {
        let line = self.queue(index)?;
        if let Some(ring) = line.virtqueue.take() {
            line.base = ring.stop().await;
        }
        let base = line.base;
        // Unanswered requests stay in flight for the next process.
        if self.disk.is_out() { Err(Error::Disconnected) } else { Ok(base) }
    }

    /// Stops all rings after answering everything in flight, except requests that an outage leaves
    /// unanswered.
    pub(super) async fn stop_all(&mut self) {
        // None takes new requests from now on, whichever is awaited first.
        self.queues
            .iter()
            .filter_map(|line| line.virtqueue.as_ref())
            .for_each(|ring| ring.enable(false));
        for line in &mut self.queues {
            if let Some(ring) = line.virtqueue.take() {
                line.base = ring.stop().await;
            }
        }
    }

    /// Resets the device, except for its memory.
    pub(super) async fn reset(&mut self) {
        self.stop_all().await;
        for line in &mut self.queues {
            let (call, error) = (line.call.take(), line.error.take());
            *line = QueueState { call, error, ..QueueState::default() };
        }
        self.features = Features::default();
        self.writeback = true;
        self.update_write_through();
    }

    /// The monitor has disconnected: completes when nothing is in flight any more.
    pub(super) async fn hang_up(mut self) {
        let rings: Vec<Virtqueue> =
            self.queues.iter_mut().filter_map(|line| line.virtqueue.take()).collect();
        rings.iter().for_each(Virtqueue::mute);
        for ring in rings {
            ring.stop().await;
        }
        // Unmapping a large guest's memory takes a while.
        let memory = std::mem::take(&mut self.memory);
        let _ = self.core.run_blocking(move || drop(memory)).await;
    }
}

fn signal(fd: Option<OwnedFd>) -> Result<Option<Rc<EventNotifier>>> {
    let signal = fd.map(EventNotifier::new).transpose().map_err(Error::ReqHandlerError)?;
    Ok(signal.map(Rc::new))
}

fn refused(why: impl std::error::Error + Send + Sync + 'static) -> Error {
    Error::ReqHandlerError(io::Error::other(why))
}

const _: () =
    assert!(MAX_QUEUES <= 256, "rings are named by a byte where descriptors come with them");
