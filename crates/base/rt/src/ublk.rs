//! Linux's driver for block devices served by a process (`ublk_drv`, `linux/ublk_cmd.h`): its
//! commands, sent through an io_uring of the core. Their meaning is defined by the caller.
//!
//! Commands that fetch or answer a request name no memory: devices are used with `UBLK_F_USER_COPY`
//! only, and requests' data is read and written through the character device. The ring keeps the
//! memory that a control command names.
#![allow(unsafe_code)]

mod ring;

use std::fmt;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::ptr::NonNull;
use std::rc::Rc;

use crate::Core;
use crate::sys;

use ring::{COMMAND_BYTES, CommandRing};

/// Most requests of one queue.
pub const MAX_DEPTH: u16 = 4096;

/// Most requests of all queues of a device on one core.
pub const MAX_REQUESTS: u16 = 2048;

/// Offset of the data of requests in the character device; queue and tag are encoded above it.
const DATA_OFFSET: u64 = 0x8000_0000;
const TAG_SHIFT: u32 = 25;
const QUEUE_SHIFT: u32 = 41;

/// `UBLK_U_IO_FETCH_REQ`, `UBLK_U_IO_COMMIT_AND_FETCH_REQ`.
const FETCH: u32 = 0xc010_7520;
const COMMIT_AND_FETCH: u32 = 0xc010_7521;

/// Parameters of a control command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ControlTarget {
    /// The device; `u32::MAX` for none, or for one without a number yet.
    pub device: u32,
    /// Command-specific data.
    pub data: u64,
}

/// A core's access to the driver. Nothing is sent unless [`Self::run`] is polled.
pub struct Driver {
    ring: Rc<CommandRing>,
    control: Rc<File>,
}

impl fmt::Debug for Driver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Driver")
    }
}

impl Driver {
    /// Opens the driver. From now on the core's thread counts as one that serves a block device:
    /// when memory is short it does not wait for the very device that it serves.
    ///
    /// # Errors
    /// What the system reports; `NotFound` if the driver is not loaded.
    pub fn open(core: &Core, control: &Path) -> io::Result<Self> {
        let control = OpenOptions::new().read(true).write(true).open(control)?;
        let ring = CommandRing::new(core.clone())?;
        sys::set_io_flusher();
        Ok(Self { ring: Rc::new(ring), control: Rc::new(control) })
    }

    /// Submits commands to the kernel, and wakes the callers of completed ones. Never ends.
    pub async fn run(&self) {
        std::future::poll_fn(|cx| self.ring.poll_drive(cx)).await;
    }

    /// Submits queued commands to the kernel now.
    pub fn submit_now(&self) {
        self.ring.submit_and_wake();
    }

    /// A control command, with memory that the driver reads or writes: returns its result, and the
    /// memory.
    pub async fn control(
        &self,
        command: u32,
        about: ControlTarget,
        memory: Vec<u8>,
    ) -> (io::Result<()>, Vec<u8>) {
        let Ok(len) = u16::try_from(memory.len()) else {
            return (Err(io::ErrorKind::InvalidInput.into()), memory);
        };
        let header = |at: u64| control_header(about, len, at);
        let (result, done) =
            self.ring.send(&self.control, command, memory.into_boxed_slice(), header).await;
        (to_io_result(result), done.memory.into_vec())
    }

    /// The character device of a device, with `queues` queues of `depth` requests each.
    ///
    /// # Errors
    /// What the system reports.
    pub fn device(&self, at: &Path, (queues, depth): (u16, u16)) -> io::Result<Device> {
        let file = OpenOptions::new().read(true).write(true).open(at)?;
        let maps = (0..queues).map(|queue| DescriptorMap::new(&file, queue, depth.min(MAX_DEPTH)));
        let maps = maps.collect::<io::Result<Vec<_>>>()?;
        Ok(Device { ring: Rc::clone(&self.ring), file: Rc::new(file), descriptor_maps: maps })
    }
}

/// `struct ublksrv_ctrl_cmd`.
#[expect(clippy::host_endian_bytes, reason = "the kernel reads it as the host writes it")]
fn control_header(about: ControlTarget, len: u16, at: u64) -> [u8; COMMAND_BYTES] {
    let mut out = [0; COMMAND_BYTES];
    out[..4].copy_from_slice(&about.device.to_ne_bytes());
    out[4..6].copy_from_slice(&u16::MAX.to_ne_bytes());
    out[6..8].copy_from_slice(&len.to_ne_bytes());
    out[8..16].copy_from_slice(&at.to_ne_bytes());
    out[16..24].copy_from_slice(&about.data.to_ne_bytes());
    out
}

/// `struct ublksrv_io_cmd`.
#[expect(clippy::host_endian_bytes, reason = "the kernel reads it as the host writes it")]
fn io_header((queue, tag): (u16, u16), result: i32) -> [u8; COMMAND_BYTES] {
    let mut out = [0; COMMAND_BYTES];
    out[..2].copy_from_slice(&queue.to_ne_bytes());
    out[2..4].copy_from_slice(&tag.to_ne_bytes());
    out[4..8].copy_from_slice(&result.to_ne_bytes());
    out
}

fn to_io_result(result: i32) -> io::Result<()> {
    if result < 0 { Err(io::Error::from_raw_os_error(-result)) } else { Ok(()) }
}

/// The kernel's description of a request (`struct ublksrv_io_desc`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct Descriptor {
    /// Operation and flags.
    pub op_flags: u32,
    /// Number of 512-byte sectors.
    pub sectors: u32,
    /// First sector.
    pub start: u64,
    /// Unused: data is copied.
    pub address: u64,
}

/// A device served by this process. While it exists no other process can serve it.
pub struct Device {
    ring: Rc<CommandRing>,
    file: Rc<File>,
    descriptor_maps: Vec<DescriptorMap>,
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Device")
            .field("queues", &self.descriptor_maps.len())
            .finish_non_exhaustive()
    }
}

impl Device {
    /// Answers the request with this queue and tag, if there is one (bytes done, or a negative
    /// error number), and fetches the next. The command is in the ring when this returns.
    ///
    /// # Errors
    /// What the driver reports; `ENODEV` when the device is removed.
    pub fn answer_and_fetch(
        &self,
        queue_tag: (u16, u16),
        answer: Option<i32>,
    ) -> impl Future<Output = io::Result<()>> + use<> {
        let (command, result) = answer.map_or((FETCH, -1), |result| (COMMIT_AND_FETCH, result));
        let next =
            self.ring.send(&self.file, command, Box::default(), |_| io_header(queue_tag, result));
        async { to_io_result(next.await.0) }
    }

    /// The request that has arrived with this queue and tag; `None` if they do not exist.
    #[must_use]
    pub fn descriptor(&self, (queue, tag): (u16, u16)) -> Option<Descriptor> {
        self.descriptor_maps.get(usize::from(queue))?.get(tag)
    }

    /// Copies the data of a write, from its byte `at` on.
    ///
    /// # Errors
    /// What the driver reports.
    pub fn read_request_data(
        &self,
        queue_tag: (u16, u16),
        at: u64,
        into: &mut [u8],
    ) -> io::Result<()> {
        self.file.read_exact_at(into, offset(queue_tag) + at)
    }

    /// Supplies the data of a read, from its byte `at` on.
    ///
    /// # Errors
    /// What the driver reports.
    pub fn write_request_data(
        &self,
        queue_tag: (u16, u16),
        at: u64,
        data: &[u8],
    ) -> io::Result<()> {
        self.file.write_all_at(data, offset(queue_tag) + at)
    }
}

fn offset((queue, tag): (u16, u16)) -> u64 {
    DATA_OFFSET + (u64::from(queue) << QUEUE_SHIFT) + (u64::from(tag) << TAG_SHIFT)
}

/// The descriptors of a queue, in memory that the kernel writes.
struct DescriptorMap {
    base: NonNull<Descriptor>,
    depth: u16,
}

impl DescriptorMap {
    fn new(file: &File, queue: u16, depth: u16) -> io::Result<Self> {
        let each = size_of::<Descriptor>();
        let page = sys::page_bytes();
        let offset = usize::from(queue) * (usize::from(MAX_DEPTH) * each).next_multiple_of(page);
        let offset = sys::offset(offset as u64)?;
        let (bytes, fd) = (usize::from(depth) * each, file.as_raw_fd());
        // SAFETY: a new mapping of an open descriptor, at an address of the system's choice.
        let at = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                bytes,
                libc::PROT_READ,
                libc::MAP_SHARED | libc::MAP_POPULATE,
                fd,
                offset,
            )
        };
        if at == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let at = NonNull::new(at.cast()).ok_or(io::ErrorKind::InvalidData)?;
        Ok(Self { base: at, depth })
    }

    fn get(&self, tag: u16) -> Option<Descriptor> {
        // SAFETY: an index below `depth` is inside the mapping, which lives as long as this. Any
        // bytes are a valid descriptor; the kernel writes one before it announces the request, and
        // the read is volatile.
        (tag < self.depth)
            .then(|| unsafe { self.base.as_ptr().add(usize::from(tag)).read_volatile() })
    }
}

impl Drop for DescriptorMap {
    fn drop(&mut self) {
        let bytes = usize::from(self.depth) * size_of::<Descriptor>();
        // SAFETY: our own mapping, which is no longer used.
        unsafe { libc::munmap(self.base.as_ptr().cast(), bytes) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_are_laid_out_as_the_kernel_reads_them() {
        let header = control_header(ControlTarget { device: 7, data: 0x1122 }, 64, 0xdead_beef);
        let expected: [u8; 32] = [
            7, 0, 0, 0, 0xff, 0xff, 64, 0, 0xef, 0xbe, 0xad, 0xde, 0, 0, 0, 0, 0x22, 0x11, 0, 0, 0,
            0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
        ];
        assert_eq!(header[..32], expected);
        assert_eq!(header[32..], [0; 48]);
        let header = io_header((1, 2), -5);
        assert_eq!(header[..16], [1, 0, 2, 0, 0xfb, 0xff, 0xff, 0xff, 0, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(size_of::<Descriptor>(), 24);
        assert_eq!(offset((1, 2)), 0x8000_0000 + (1 << 41) + (2 << 25));
    }
}
