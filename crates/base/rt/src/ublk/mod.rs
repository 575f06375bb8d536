//! Linux's driver for block devices that a process serves (`ublk_drv`, `linux/ublk_cmd.h`): its commands, given to it by
//! an io_uring of the core's own. What they mean is not decided here.
//!
//! Commands that take a request, or answer one, name no memory: a device is used with `UBLK_F_USER_COPY` alone, and its
//! requests' data is read and written at the character device. What a command of control names is kept by the ring.
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

use ring::{COMMAND_BYTES, Ring};

/// Most requests of one queue.
pub const MAX_DEPTH: u16 = 4096;

/// Most requests of all queues of a device that one core takes.
pub const MAX_REQUESTS: u16 = 2048;

/// Where the data of requests begins in the character device; queue and tag of one are above it.
const DATA_OFFSET: u64 = 0x8000_0000;
const TAG_SHIFT: u32 = 25;
const QUEUE_SHIFT: u32 = 41;

/// `UBLK_U_IO_FETCH_REQ`, `UBLK_U_IO_COMMIT_AND_FETCH_REQ`.
const FETCH: u32 = 0xc010_7520;
const COMMIT_AND_FETCH: u32 = 0xc010_7521;

/// What a command of control is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct About {
    /// The device; `u32::MAX` for none, or for one that has no number yet.
    pub device: u32,
    /// A number that belongs to the command.
    pub data: u64,
}

/// A core's way to the driver. Nothing moves unless [`Self::drive`] is polled.
pub struct Driver {
    ring: Rc<Ring>,
    control: Rc<File>,
}

impl fmt::Debug for Driver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Driver")
    }
}

impl Driver {
    /// Opens the driver. The core's thread counts as one that writes back what others have written from now on: when
    /// memory is short it does not wait for the very device that it serves.
    ///
    /// # Errors
    /// What the system reports; `NotFound` where the driver is not loaded.
    pub fn open(core: &Core, control: &Path) -> io::Result<Self> {
        let control = OpenOptions::new().read(true).write(true).open(control)?;
        let ring = Ring::new(core.clone())?;
        sys::serves_disks();
        Ok(Self { ring: Rc::new(ring), control: Rc::new(control) })
    }

    /// Gives commands to the kernel, and wakes those whose commands are through. Never ends.
    pub async fn drive(&self) {
        std::future::poll_fn(|cx| self.ring.drive(cx)).await;
    }

    /// Gives what has been asked for to the kernel now.
    pub fn turn(&self) {
        self.ring.turn();
    }

    /// A command of control, with memory that the driver reads or writes: its result, and the memory.
    pub async fn control(
        &self,
        command: u32,
        about: About,
        memory: Vec<u8>,
    ) -> (io::Result<()>, Vec<u8>) {
        let Ok(len) = u16::try_from(memory.len()) else {
            return (Err(io::ErrorKind::InvalidInput.into()), memory);
        };
        let header = |at: u64| control_header(about, len, at);
        let (result, done) =
            self.ring.send(&self.control, command, memory.into_boxed_slice(), header).await;
        (told(result), done.memory.into_vec())
    }

    /// The character device of a device, with `queues` queues of `depth` requests each.
    ///
    /// # Errors
    /// What the system reports.
    pub fn device(&self, at: &Path, (queues, depth): (u16, u16)) -> io::Result<Device> {
        let file = OpenOptions::new().read(true).write(true).open(at)?;
        let maps = (0..queues).map(|queue| Map::new(&file, queue, depth.min(MAX_DEPTH)));
        let maps = maps.collect::<io::Result<Vec<_>>>()?;
        Ok(Device { ring: Rc::clone(&self.ring), file: Rc::new(file), maps })
    }
}

/// `struct ublksrv_ctrl_cmd`.
#[expect(clippy::host_endian_bytes, reason = "the kernel reads it as the host writes it")]
fn control_header(about: About, len: u16, at: u64) -> [u8; COMMAND_BYTES] {
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

fn told(result: i32) -> io::Result<()> {
    if result < 0 { Err(io::Error::from_raw_os_error(-result)) } else { Ok(()) }
}

/// What the kernel says of a request (`struct ublksrv_io_desc`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct Descriptor {
    /// What is asked, and how.
    pub op_flags: u32,
    /// How many sectors of 512 bytes.
    pub sectors: u32,
    /// The first of them.
    pub start: u64,
    /// Not used: data is copied.
    pub address: u64,
}

/// A device that this process serves. As long as it lives nobody else can.
pub struct Device {
    ring: Rc<Ring>,
    file: Rc<File>,
    maps: Vec<Map>,
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Device").field("queues", &self.maps.len()).finish_non_exhaustive()
    }
}

impl Device {
    /// Answers the request that has this place, if there is one (bytes done, or an error's negative number), and waits for
    /// the next. The command is with the ring when this returns.
    ///
    /// # Errors
    /// What the driver reports; `ENODEV` when the device goes.
    pub fn next(
        &self,
        place: (u16, u16),
        answer: Option<i32>,
    ) -> impl Future<Output = io::Result<()>> + use<> {
        let (command, result) = answer.map_or((FETCH, -1), |result| (COMMIT_AND_FETCH, result));
        let next =
            self.ring.send(&self.file, command, Box::default(), |_| io_header(place, result));
        async { told(next.await.0) }
    }

    /// The request that has come at this place; `None` where there is no such place.
    #[must_use]
    pub fn descriptor(&self, (queue, tag): (u16, u16)) -> Option<Descriptor> {
        self.maps.get(usize::from(queue))?.get(tag)
    }

    /// Copies data of a write from its byte `at` on.
    ///
    /// # Errors
    /// What the driver reports.
    pub fn fetch(&self, place: (u16, u16), at: u64, into: &mut [u8]) -> io::Result<()> {
        self.file.read_exact_at(into, offset(place) + at)
    }

    /// Copies data of a read, from its byte `at` on.
    ///
    /// # Errors
    /// What the driver reports.
    pub fn bring(&self, place: (u16, u16), at: u64, data: &[u8]) -> io::Result<()> {
        self.file.write_all_at(data, offset(place) + at)
    }
}

fn offset((queue, tag): (u16, u16)) -> u64 {
    DATA_OFFSET + (u64::from(queue) << QUEUE_SHIFT) + (u64::from(tag) << TAG_SHIFT)
}

/// The descriptors of a queue, in memory that the kernel writes.
struct Map {
    at: NonNull<Descriptor>,
    depth: u16,
}

impl Map {
    fn new(file: &File, queue: u16, depth: u16) -> io::Result<Self> {
        let each = size_of::<Descriptor>();
        let page = sys::page_bytes();
        let offset = usize::from(queue) * (usize::from(MAX_DEPTH) * each).next_multiple_of(page);
        let offset = sys::offset(offset as u64)?;
        let (bytes, fd) = (usize::from(depth) * each, file.as_raw_fd());
        // SAFETY: a new mapping, where the system likes, of a descriptor that is open.
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
        Ok(Self { at, depth })
    }

    fn get(&self, tag: u16) -> Option<Descriptor> {
        // SAFETY: below `depth` it is inside the mapping, which lives as long as this. Any bytes are a descriptor, and the
        // kernel, which writes one before it tells of the request, is answered for by the volatile read.
        (tag < self.depth)
            .then(|| unsafe { self.at.as_ptr().add(usize::from(tag)).read_volatile() })
    }
}

impl Drop for Map {
    fn drop(&mut self) {
        let bytes = usize::from(self.depth) * size_of::<Descriptor>();
        // SAFETY: our own mapping, which nobody uses any more.
        unsafe { libc::munmap(self.at.as_ptr().cast(), bytes) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_are_laid_out_as_the_kernel_reads_them() {
        let header = control_header(About { device: 7, data: 0x1122 }, 64, 0xdead_beef);
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
