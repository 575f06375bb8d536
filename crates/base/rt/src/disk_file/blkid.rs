//! Existing formats of a disk, by libblkid: the library of util-linux with which `wipefs` and
//! `mkfs` look for what they would overwrite. It is loaded on first use and optional.
#![allow(unsafe_code)]

use std::ffi::{CStr, c_char, c_int, c_void};
use std::fs::File;
use std::os::fd::{AsFd, AsRawFd};
use std::ptr;
use std::sync::OnceLock;

use libloading::Library;

use super::file::FileDisk;

/// The library's name, with the version of its ABI.
const LIBRARY: &str = "libblkid.so.1";

/// Most signatures reported for one disk: no real disk has so many at once.
const MAX_SIGNATURES: usize = 32;

/// Superblock values to report (`blkid.h`): label, type, magic offset, even with a wrong checksum.
const SUPERBLOCK_FLAGS: c_int = (1 << 1) | (1 << 5) | (1 << 9) | (1 << 10);
/// Partition table values to report: also a GPT without its protective MBR, and the magic offset.
const PARTITION_FLAGS: c_int = (1 << 1) | (1 << 3);

/// A format found on a disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Signature {
    /// libblkid's name of it, such as `xfs` or `gpt`.
    pub kind: String,
    /// Its label, if it has one.
    pub label: Option<String>,
    /// Whether it is a partition table.
    pub is_partition_table: bool,
    /// Offset of its magic number, in bytes from the start.
    pub magic_offset: Option<u64>,
}

type Probe = *mut c_void;
type SetFlag = unsafe extern "C" fn(Probe, c_int) -> c_int;

/// The functions that are used, as `blkid.h` declares them.
struct Blkid {
    new_probe: unsafe extern "C" fn() -> Probe,
    free_probe: unsafe extern "C" fn(Probe),
    set_device: unsafe extern "C" fn(Probe, c_int, i64, i64) -> c_int,
    enable_superblocks: SetFlag,
    set_superblocks_flags: SetFlag,
    enable_partitions: SetFlag,
    set_partitions_flags: SetFlag,
    do_probe: unsafe extern "C" fn(Probe) -> c_int,
    lookup_value:
        unsafe extern "C" fn(Probe, *const c_char, *mut *const c_char, *mut usize) -> c_int,
    /// Keeps the functions valid.
    _library: Library,
}

/// The library, if there is one.
fn loaded_library() -> Option<&'static Blkid> {
    static LOADED: OnceLock<Option<Blkid>> = OnceLock::new();
    let load = || {
        let loaded = Blkid::load(LIBRARY);
        loaded
            .inspect_err(|why| {
                tracing::warn!(library = LIBRARY, error = ?why, "libblkid not found: disks are checked against the built-in list of formats only; install libblkid1");
            })
            .ok()
    };
    LOADED.get_or_init(load).as_ref()
}

impl Blkid {
    fn load(name: &str) -> Result<Self, libloading::Error> {
        // SAFETY: libblkid runs no code when it is loaded, and the types are those of its header,
        // which its ABI version guarantees. The functions are kept no longer than the library.
        unsafe {
            let library = Library::new(name)?;
            Ok(Self {
                new_probe: *library.get(b"blkid_new_probe")?,
                free_probe: *library.get(b"blkid_free_probe")?,
                set_device: *library.get(b"blkid_probe_set_device")?,
                enable_superblocks: *library.get(b"blkid_probe_enable_superblocks")?,
                set_superblocks_flags: *library.get(b"blkid_probe_set_superblocks_flags")?,
                enable_partitions: *library.get(b"blkid_probe_enable_partitions")?,
                set_partitions_flags: *library.get(b"blkid_probe_set_partitions_flags")?,
                do_probe: *library.get(b"blkid_do_probe")?,
                lookup_value: *library.get(b"blkid_probe_lookup_value")?,
                _library: library,
            })
        }
    }

    /// The formats on an open file or device that can be read at any offset.
    fn signatures(&self, file: &File) -> Vec<Signature> {
        // SAFETY: no arguments; it returns null if there is no memory.
        let probe = unsafe { (self.new_probe)() };
        if probe.is_null() {
            return Vec::new();
        }
        let mut found = Vec::new();
        // SAFETY: `probe` was created by the library, is not freed yet and used by this thread
        // only; the file is open until it is freed.
        unsafe {
            let is_ready = (self.set_device)(probe, file.as_raw_fd(), 0, 0) == 0
                && (self.enable_superblocks)(probe, 1) == 0
                && (self.set_superblocks_flags)(probe, SUPERBLOCK_FLAGS) == 0
                && (self.enable_partitions)(probe, 1) == 0
                && (self.set_partitions_flags)(probe, PARTITION_FLAGS) == 0;
            while is_ready && found.len() < MAX_SIGNATURES && (self.do_probe)(probe) == 0 {
                found.extend(self.signature(probe));
            }
            (self.free_probe)(probe);
        }
        found
    }

    /// The latest result of a probe.
    ///
    /// # Safety
    /// The probe was created by the library, is not freed, and is used by this thread only.
    unsafe fn signature(&self, probe: Probe) -> Option<Signature> {
        // SAFETY: as the caller says.
        let value = |name: &CStr| unsafe { self.value(probe, name) };
        let (table, kind) = (value(c"PTTYPE"), value(c"TYPE"));
        let is_table = kind.is_none();
        let at = value(if is_table { c"PTMAGIC_OFFSET" } else { c"SBMAGIC_OFFSET" });
        Some(Signature {
            kind: kind.or(table)?,
            label: value(c"LABEL").filter(|label| !label.is_empty()),
            is_partition_table: is_table,
            magic_offset: at.and_then(|at| at.parse().ok()),
        })
    }

    /// A value of the latest result of a probe, without unprintable characters.
    ///
    /// # Safety
    /// As [`Self::signature`].
    unsafe fn value(&self, probe: Probe, name: &CStr) -> Option<String> {
        let (mut data, mut len) = (ptr::null(), 0);
        // SAFETY: the probe is valid as the caller says, the name is a C string, and the outputs
        // are local variables.
        let found =
            unsafe { (self.lookup_value)(probe, name.as_ptr(), &raw mut data, &raw mut len) };
        if found != 0 || data.is_null() {
            return None;
        }
        // SAFETY: the library returns `len` bytes that stay valid until the probe is used again.
        let bytes = unsafe { std::slice::from_raw_parts(data.cast::<u8>(), len) };
        let text = String::from_utf8_lossy(bytes);
        let text: String = text.chars().filter(|c| !c.is_control()).collect();
        Some(text.trim().to_owned())
    }
}

impl FileDisk {
    /// The formats that libblkid finds; `None` if it is missing, or cannot read the disk.
    pub(crate) fn signatures(&self) -> Option<Vec<Signature>> {
        let blkid = loaded_library()?;
        // Opened again, because the library reads at unaligned offsets, which direct I/O does not
        // allow.
        let path = format!("/proc/self/fd/{}", self.fd().as_fd().as_raw_fd());
        let file = File::open(path).ok()?;
        Some(blkid.signatures(&file))
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use super::*;

    fn found_in(write: impl Fn(&File)) -> Option<Vec<Signature>> {
        let file = tempfile::tempfile().unwrap();
        file.set_len(64 << 20).unwrap();
        write(&file);
        FileDisk::new(file).signatures()
    }

    /// Without the library there is nothing to test: the built-in list has its own tests.
    #[test]
    fn libblkid_reports_all_formats() {
        let Some(nothing) = found_in(|_| {}) else { return };
        assert_eq!(nothing, []);
        let found = found_in(|file| {
            file.write_all_at(b"\x0d\xd0\x01\xc0", 1 << 20).unwrap();
            // The library wants version and size of it.
            file.write_all_at(b"LUKS\xba\xbe\0\x01", 0).unwrap();
            file.write_all_at(b"SWAPSPACE2", 4086).unwrap();
        });
        let found = found.unwrap();
        let kinds: Vec<&str> = found.iter().map(|f| f.kind.as_str()).collect();
        assert!(kinds.contains(&"VMFS_volume_member"), "{found:?}");
        let vmfs = found.iter().find(|f| f.kind == "VMFS_volume_member").unwrap();
        assert_eq!((vmfs.magic_offset, vmfs.is_partition_table), (Some(1 << 20), false));
        assert!(kinds.len() > 1, "only one was named: {found:?}");
    }

    #[test]
    fn a_missing_library_is_named() {
        let why = format!("{:?}", Blkid::load("libblkid.so.none").err().unwrap());
        assert!(why.contains("libblkid.so.none"), "{why}");
    }
}
