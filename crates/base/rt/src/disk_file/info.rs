//! What is known of a disk.

/// The kind of a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DiskKind {
    /// A regular file.
    File,
    /// A block device.
    BlockDevice,
}

/// The current properties of a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DiskInfo {
    /// Size in bytes. A file's may end within a logical block; that part cannot be accessed.
    pub size: u64,
    /// Addresses and lengths are multiples of this many bytes: 512 or 4096.
    pub logical_block: u32,
    /// Size in bytes of an atomic unit of the medium; a multiple of `logical_block`.
    pub physical_block: u32,
    /// Buffers start on multiples of this many bytes.
    pub memory_align: u32,
    /// File or block device.
    pub kind: DiskKind,
    /// Whether [`crate::disk::Disk::punch`] works. Determined by the first attempt.
    pub can_punch: bool,
    /// Whether [`crate::disk::Disk::zero`] works. Determined by the first attempt.
    pub can_zero: bool,
    /// Whether completed writes may be lost at power loss until [`crate::disk::Disk::sync`].
    pub has_volatile_cache: bool,
    /// Whether the medium rotates; `None` if the system does not report it.
    pub is_rotational: Option<bool>,
    /// Whether writes are refused.
    pub read_only: bool,
    /// Whether another machine may access it at the same time: a block device, or a file of a file
    /// system that machines may share and that is read without this machine's page cache.
    pub is_shareable: bool,
    /// Number of the medium's attachment since boot: if two opens have different numbers, it may
    /// have lost power between them. 0 if the system does not report it.
    pub attachment_number: u64,
}

/// How a range of a disk begins: with a hole or with data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SparseRun {
    /// Length of the run in bytes, at least one.
    pub bytes: u64,
    /// Whether it is a hole, which reads as zeroes.
    pub is_hole: bool,
}

/// The engine that serves a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Engine {
    /// An io_uring of the core.
    Uring,
    /// Plain calls on the core: memory file systems, which never wait for a device.
    Inline,
    /// A small pool of blocking threads.
    Threads,
    /// The simulator.
    Sim,
}
