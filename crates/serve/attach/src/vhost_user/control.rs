//! The conversation with the monitor. The protocol's library blocks, so it has a thread of its own;
//! each message is executed on the volume's core while that thread waits, so nothing here is
//! shared.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use tokio::sync::{mpsc, oneshot};
use vhost::vhost_user::message::{
    VhostTransferStateDirection, VhostTransferStatePhase, VhostUserConfigFlags, VhostUserInflight,
    VhostUserLog, VhostUserMemoryRegion, VhostUserProtocolFeatures, VhostUserShMemConfig,
    VhostUserSharedMsg, VhostUserSingleMemoryRegion, VhostUserVringAddrFlags, VhostUserVringState,
};
use vhost::vhost_user::{BackendReqHandler, Error, GpuBackend, Result, VhostUserBackendReqHandler};

use super::config::Features;
use super::memory::{MAX_REGIONS, Region, RegionPlacement};
use super::session::{DiskSession, MonitorAddresses};

/// Supported protocol features (with REPLY_ACK, which the library adds).
const PROTOCOL: VhostUserProtocolFeatures = VhostUserProtocolFeatures::CONFIG
    .union(VhostUserProtocolFeatures::MQ)
    .union(VhostUserProtocolFeatures::INFLIGHT_SHMFD)
    .union(VhostUserProtocolFeatures::RESET_DEVICE)
    .union(VhostUserProtocolFeatures::CONFIGURE_MEM_SLOTS);

/// Work on the session, on its core.
pub(super) enum SessionJob {
    /// Run at once.
    Run(Box<dyn FnOnce(&mut DiskSession) + Send>),
    /// Stop a ring and return its position.
    Stop(u32, oneshot::Sender<Result<u16>>),
    /// Stop all rings and reset the device.
    Reset(oneshot::Sender<()>),
}

impl SessionJob {
    /// Whether it ends only when nothing is in flight at a ring.
    pub(super) fn waits_for_rings(&self) -> bool {
        matches!(self, Self::Stop(..) | Self::Reset(_))
    }

    /// Runs the job. Its sender may have ended.
    pub(super) async fn run(self, session: &mut DiskSession) {
        match self {
            Self::Run(job) => job(session),
            Self::Stop(index, answer) => {
                let _ = answer.send(session.stop(index).await);
            }
            Self::Reset(answer) => {
                session.reset().await;
                let _ = answer.send(());
            }
        }
    }
}

/// Talks to a monitor until it disconnects or violates the protocol; blocks.
pub(super) fn converse(stream: UnixStream, jobs: mpsc::Sender<SessionJob>) -> Error {
    let mut handler = BackendReqHandler::from_stream(stream, Arc::new(Control(jobs)));
    loop {
        if let Err(e) = handler.handle_request() {
            return e;
        }
    }
}

struct Control(mpsc::Sender<SessionJob>);

/// Error for a request that was not offered.
const NOT_OFFERED: Error = Error::InvalidOperation("the feature was not offered");

impl Control {
    fn now<T: Send + 'static>(
        &self,
        f: impl FnOnce(&mut DiskSession) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let (answer, result) = oneshot::channel();
        self.send(SessionJob::Run(Box::new(move |session| drop(answer.send(f(session))))))?;
        result.blocking_recv().unwrap_or(Err(Error::Disconnected))
    }

    fn send(&self, job: SessionJob) -> Result<()> {
        self.0.blocking_send(job).map_err(|_| Error::Disconnected)
    }
}

fn region_placement(region: &VhostUserMemoryRegion) -> RegionPlacement {
    RegionPlacement {
        guest: region.guest_phys_addr,
        monitor: region.user_addr,
        bytes: region.memory_size,
    }
}

fn map(region: &VhostUserMemoryRegion, file: File) -> Result<Region> {
    let mapped = Region::map(region_placement(region), file, region.mmap_offset);
    mapped.map_err(|e| Error::ReqHandlerError(std::io::Error::other(e)))
}

impl VhostUserBackendReqHandler for Control {
    fn set_owner(&self) -> Result<()> {
        Ok(())
    }

    /// Monitors differ in its meaning, and current ones do not use it.
    fn reset_owner(&self) -> Result<()> {
        Ok(())
    }

    fn reset_device(&self) -> Result<()> {
        let (answer, done) = oneshot::channel();
        self.send(SessionJob::Reset(answer))?;
        done.blocking_recv().map_err(|_| Error::Disconnected)
    }

    fn get_features(&self) -> Result<u64> {
        self.now(|s| Ok(s.offered().0))
    }

    fn set_features(&self, features: u64) -> Result<()> {
        self.now(move |s| s.set_features(Features(features)))
    }

    fn set_mem_table(
        &self,
        regions: &[VhostUserMemoryRegion],
        files: Vec<File>,
        _postcopy: Option<bool>,
    ) -> Result<Option<Vec<u64>>> {
        let regions = regions.iter().zip(files).map(|(region, file)| map(region, file));
        let regions = regions.collect::<Result<Vec<_>>>()?;
        self.now(move |s| s.set_memory(regions)).map(|()| None)
    }

    fn set_vring_num(&self, index: u32, num: u32) -> Result<()> {
        self.now(move |s| s.set_queue_size(index, num))
    }

    fn set_vring_addr(
        &self,
        index: u32,
        flags: VhostUserVringAddrFlags,
        descriptor: u64,
        used: u64,
        available: u64,
        _log: u64,
    ) -> Result<()> {
        if !flags.is_empty() {
            return Err(NOT_OFFERED);
        }
        let at = MonitorAddresses { table: descriptor, available, used };
        self.now(move |s| s.set_addresses(index, at))
    }

    fn set_vring_base(&self, index: u32, base: u32) -> Result<()> {
        self.now(move |s| s.set_base(index, base))
    }

    fn get_vring_base(&self, index: u32) -> Result<VhostUserVringState> {
        let (answer, base) = oneshot::channel();
        self.send(SessionJob::Stop(index, answer))?;
        let base = base.blocking_recv().unwrap_or(Err(Error::Disconnected))?;
        Ok(VhostUserVringState::new(index, base.into()))
    }

    fn set_vring_kick(&self, index: u8, fd: Option<File>) -> Result<()> {
        self.now(move |s| s.set_kick(index.into(), fd.map(OwnedFd::from)))
    }

    fn set_vring_call(&self, index: u8, fd: Option<File>) -> Result<()> {
        self.now(move |s| s.set_call(index.into(), fd.map(OwnedFd::from)))
    }

    fn set_vring_err(&self, index: u8, fd: Option<File>) -> Result<()> {
        self.now(move |s| s.set_error(index.into(), fd.map(OwnedFd::from)))
    }

    fn get_protocol_features(&self) -> Result<VhostUserProtocolFeatures> {
        Ok(PROTOCOL)
    }

    fn set_protocol_features(&self, features: u64) -> Result<()> {
        let ours = PROTOCOL | VhostUserProtocolFeatures::REPLY_ACK;
        if features & !ours.bits() == 0 { Ok(()) } else { Err(Error::FeatureMismatch) }
    }

    fn get_queue_num(&self) -> Result<u64> {
        self.now(|s| Ok(s.queue_count().into()))
    }

    fn set_vring_enable(&self, index: u32, enable: bool) -> Result<()> {
        self.now(move |s| s.enable(index, enable))
    }

    fn get_config(&self, offset: u32, size: u32, _: VhostUserConfigFlags) -> Result<Vec<u8>> {
        self.now(move |s| s.config(offset, size))
    }

    fn set_config(&self, offset: u32, buf: &[u8], _: VhostUserConfigFlags) -> Result<()> {
        let bytes = buf.to_vec();
        self.now(move |s| s.set_config(offset, &bytes))
    }

    fn set_gpu_socket(&self, _: GpuBackend) -> Result<()> {
        Err(NOT_OFFERED)
    }

    fn get_shared_object(&self, _: VhostUserSharedMsg) -> Result<File> {
        Err(NOT_OFFERED)
    }

    fn get_inflight_fd(&self, asked: &VhostUserInflight) -> Result<(VhostUserInflight, File)> {
        let (rings, places) = (asked.num_queues, asked.queue_size);
        let (bytes, file) = self.now(move |s| s.create_inflight(rings, places))?;
        Ok((VhostUserInflight::new(bytes, 0, rings, places), file))
    }

    fn set_inflight_fd(&self, given: &VhostUserInflight, file: File) -> Result<()> {
        let place = (given.mmap_size, given.mmap_offset);
        let shape = (given.num_queues, given.queue_size);
        self.now(move |s| s.set_inflight(file, place, shape))
    }

    fn get_max_mem_slots(&self) -> Result<u64> {
        Ok(MAX_REGIONS as u64)
    }

    fn add_mem_region(
        &self,
        region: &VhostUserSingleMemoryRegion,
        file: File,
        _postcopy: Option<bool>,
    ) -> Result<Option<u64>> {
        let region = map(region, file)?;
        self.now(move |s| s.add_memory(region)).map(|()| None)
    }

    fn remove_mem_region(&self, region: &VhostUserSingleMemoryRegion) -> Result<()> {
        let place = region_placement(region);
        self.now(move |s| s.remove_memory(place))
    }

    fn set_device_state_fd(
        &self,
        _: VhostTransferStateDirection,
        _: VhostTransferStatePhase,
        _: File,
    ) -> Result<Option<File>> {
        Err(NOT_OFFERED)
    }

    fn check_device_state(&self) -> Result<()> {
        Err(NOT_OFFERED)
    }

    fn get_shmem_config(&self) -> Result<VhostUserShMemConfig> {
        Err(NOT_OFFERED)
    }

    fn set_log_base(&self, _: &VhostUserLog, _: File) -> Result<()> {
        Err(NOT_OFFERED)
    }
}
