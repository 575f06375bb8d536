//! Flat images pass the conformance suite of all layers: on real files, and on simulated disks of
//! every geometry that lose power.

use std::cell::{Cell, RefCell};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use block::testing::conformance::{self, MIN_BYTES, Subject};
use block::testing::faulty::OpKind;
use block::{BufferPool, Dev, Error, Layer};
use disk::{ImageErrorReason, Provisioning};
use image::{CreateImageOptions, FlatImage};
use rt::disk::{DiskKind, OpenOptions};
use rt::sim::{DiskControl, DiskSetup, Host, HostSetup};
use rt::{Core, DiskEngine};
use testkit::TestDir;

use crate::common::{core_of, existing, mishap, on_core, succeed, thin};
use testkit::system::{Loop, Mount, program, text};

/// Images in real files.
struct RealFiles {
    core: Core,
    dir: TestDir,
    how: CreateImageOptions,
    made: Cell<u32>,
    last: RefCell<Option<Rc<FlatImage>>>,
}

impl RealFiles {
    fn path(&self) -> PathBuf {
        self.dir.file(&format!("image-{}", self.made.get()))
    }

    fn last(&self) -> Rc<FlatImage> {
        self.last.borrow().clone().unwrap()
    }
}

impl Subject for RealFiles {
    fn pool(&self) -> BufferPool {
        self.core.buffer_pool().clone()
    }

    async fn fresh(&self) -> Dev {
        self.last.take();
        if self.made.get() > 0 {
            std::fs::remove_file(self.path()).unwrap();
        }
        self.made.set(self.made.get() + 1);
        let file = Rc::new(FlatImage::create(&self.core, &self.path(), &self.how).await.unwrap());
        self.last.replace(Some(Rc::clone(&file)));
        Dev::shared(file)
    }

    async fn grow(&self) -> bool {
        let file = self.last();
        let bytes = file.label().data_bytes + 3 * MIN_BYTES + 4096;
        file.grow(bytes).await.unwrap();
        true
    }

    async fn space_used(&self) -> Option<u64> {
        Some(self.last().allocated().await.unwrap())
    }

    async fn cut_power(&self, _seed: u64) -> Option<Dev> {
        None
    }

    async fn fail_next(&self, _kind: OpKind, _error: Error) -> bool {
        false
    }
}

fn real_files_conform(dir: fn() -> TestDir, engine: DiskEngine, how: CreateImageOptions) {
    on_core(engine, move |core| async move {
        let subject =
            RealFiles { core, dir: dir(), how, made: Cell::new(0), last: RefCell::default() };
        conformance::check(&subject, 1).await;
    });
}

#[test]
fn files_on_disk() {
    real_files_conform(TestDir::on_disk, DiskEngine::Auto, thin(MIN_BYTES));
}

#[test]
fn thick_files_on_disk_with_large_blocks() {
    let how = CreateImageOptions {
        block_size: 4096,
        provisioning: Provisioning::Thick,
        ..thin(MIN_BYTES)
    };
    real_files_conform(TestDir::on_disk, DiskEngine::Auto, how);
}

#[test]
fn files_on_disk_without_io_uring() {
    real_files_conform(TestDir::on_disk, DiskEngine::Threads, thin(MIN_BYTES));
}

#[test]
fn files_on_disk_through_the_page_cache() {
    let how = CreateImageOptions { allow_page_cache: true, ..thin(MIN_BYTES) };
    real_files_conform(TestDir::on_disk, DiskEngine::Auto, how);
}

#[test]
fn files_in_memory() {
    real_files_conform(TestDir::in_memory, DiskEngine::Auto, thin(MIN_BYTES));
}

/// A file system on a disk of 4-KiB sectors: direct I/O takes nothing smaller.
fn real_files_conform_on_large_sectors(mkfs: &'static [&'static str], how: CreateImageOptions) {
    let memory = TestDir::in_memory();
    let backing = memory.file("backing");
    std::fs::File::create(&backing).unwrap().set_len(512 << 20).unwrap();
    let Some(device) = Loop::new(&backing, &["--sector-size", "4096"]) else {
        println!("skipped: no right to make a loop device");
        return;
    };
    let made = program(mkfs[0], &[&mkfs[1..], &[text(device.path())]].concat());
    let mounted = made.and_then(|_| Mount::new(&[text(device.path())]));
    let Some(mount) = mounted else {
        println!("skipped: {} is not installed, or no right to mount", mkfs[0]);
        return;
    };
    let at = mount.file("");
    on_core(DiskEngine::Auto, move |core| async move {
        let dir = TestDir::new(at);
        let disk = core.open_disk(&dir.file("probe"), OpenOptions::new().create(8192)).await;
        assert_eq!(disk.unwrap().info().logical_block, 4096);
        let subject = RealFiles { core, dir, how, made: Cell::new(0), last: RefCell::default() };
        conformance::check(&subject, 2).await;
    });
}

#[test]
fn small_blocks_on_ext4_on_large_sectors() {
    real_files_conform_on_large_sectors(&["mkfs.ext4", "-q", "-b", "4096"], thin(MIN_BYTES));
}

#[test]
fn small_blocks_on_xfs_on_large_sectors() {
    let how = CreateImageOptions { provisioning: Provisioning::Thick, ..thin(MIN_BYTES) };
    real_files_conform_on_large_sectors(&["mkfs.xfs", "-q"], how);
}

/// Images on a real block device.
struct RealDevice {
    core: Core,
    device: Loop,
    backing: PathBuf,
    how: CreateImageOptions,
    last: RefCell<Option<Rc<FlatImage>>>,
}

impl RealDevice {
    fn last(&self) -> Rc<FlatImage> {
        self.last.borrow().clone().unwrap()
    }
}

impl Subject for RealDevice {
    fn pool(&self) -> BufferPool {
        self.core.buffer_pool().clone()
    }

    async fn fresh(&self) -> Dev {
        self.last.take();
        // The device's former contents must not show.
        let how = CreateImageOptions { overwrite: true, ..self.how };
        let file = Rc::new(FlatImage::create(&self.core, self.device.path(), &how).await.unwrap());
        self.last.replace(Some(Rc::clone(&file)));
        Dev::shared(file)
    }

    async fn grow(&self) -> bool {
        let file = self.last();
        let bytes = file.label().data_bytes + MIN_BYTES + 4096;
        let refused = file.grow(bytes).await.unwrap_err();
        assert!(matches!(refused.reason, ImageErrorReason::TooSmall { .. }), "{refused}");
        let backing = std::fs::File::options().write(true).open(&self.backing).unwrap();
        backing.set_len(bytes + (1 << 20)).unwrap();
        self.device.resized();
        file.grow(bytes).await.unwrap();
        true
    }

    /// Blocks that the device has freed are holes in the file below it.
    async fn space_used(&self) -> Option<u64> {
        let blocks = std::fs::metadata(&self.backing).unwrap().blocks();
        let gives_back = self.last().info().unmap_granularity_blocks > 0;
        gives_back.then_some(blocks * 512)
    }

    async fn cut_power(&self, _seed: u64) -> Option<Dev> {
        None
    }

    async fn fail_next(&self, _kind: OpKind, _error: Error) -> bool {
        false
    }
}

/// A device with sectors of this size over `backing`. Checks that it can free space as expected.
fn real_devices_conform(
    backing: PathBuf,
    sector: u32,
    engine: DiskEngine,
    block_size: u32,
    frees: bool,
) {
    std::fs::File::create(&backing).unwrap().set_len(MIN_BYTES + (1 << 20)).unwrap();
    let Some(device) = Loop::new(&backing, &["--sector-size", &sector.to_string()]) else {
        println!("skipped: no right to make a loop device");
        return;
    };
    let how = CreateImageOptions { block_size, ..thin(MIN_BYTES) };
    on_core(engine, move |core| async move {
        let last = RefCell::default();
        let subject = RealDevice { core, device, backing, how, last };
        subject.fresh().await;
        let file = subject.last();
        assert_eq!(file.info().unmap_granularity_blocks > 0, frees);
        assert_eq!(file.info().physical_block_size, sector.max(block_size));
        drop(file);
        conformance::check(&subject, 3).await;
    });
}

#[test]
fn block_devices_of_every_geometry() {
    let memory = TestDir::in_memory();
    for (sector, block_size) in [(512, 512), (512, 4096), (4096, 512), (4096, 4096)] {
        let backing = memory.file(&format!("{sector}-{block_size}"));
        real_devices_conform(backing, sector, DiskEngine::Auto, block_size, true);
    }
    let backing = memory.file("pool");
    real_devices_conform(backing, 4096, DiskEngine::Threads, 512, true);
}

#[test]
fn block_devices_without_discard() {
    // ramfs can punch no holes, and neither can a device over it.
    let Some(mount) = Mount::new(&["-t", "ramfs", "test"]) else {
        println!("skipped: no right to mount a file system");
        return;
    };
    real_devices_conform(mount.file("backing"), 512, DiskEngine::Auto, 512, false);
}

/// Images on simulated disks.
struct SimDisks {
    host: Host,
    disk: DiskSetup,
    how: CreateImageOptions,
    core: RefCell<Core>,
    made: Cell<u32>,
    last: RefCell<Option<Rc<FlatImage>>>,
}

impl SimDisks {
    async fn new(host: Host, disk: DiskSetup, how: CreateImageOptions) -> Self {
        let core = RefCell::new(core_of(&host).await);
        Self { host, disk, how, core, made: Cell::new(0), last: RefCell::default() }
    }

    fn path(&self) -> PathBuf {
        format!("/disk-{}", self.made.get()).into()
    }

    fn control(&self) -> DiskControl {
        self.host.disk(self.path()).unwrap()
    }

    fn serve(&self, file: FlatImage) -> Dev {
        let file = Rc::new(file);
        self.last.replace(Some(Rc::clone(&file)));
        Dev::shared(file)
    }
}

impl Subject for SimDisks {
    fn pool(&self) -> BufferPool {
        self.core.borrow().buffer_pool().clone()
    }

    async fn fresh(&self) -> Dev {
        self.last.take();
        self.made.set(self.made.get() + 1);
        if self.disk.kind == DiskKind::BlockDevice {
            self.host.add_disk(self.path(), self.disk.clone());
        }
        let core = self.core.borrow().clone();
        self.serve(FlatImage::create(&core, &self.path(), &self.how).await.unwrap())
    }

    async fn grow(&self) -> bool {
        let file = self.last.borrow().clone().unwrap();
        let bytes = file.label().data_bytes + MIN_BYTES + 4096;
        if self.disk.kind == DiskKind::BlockDevice {
            assert!(file.grow(bytes).await.is_err(), "the device is full");
            self.control().resize(self.disk.bytes + MIN_BYTES + 4096);
        }
        file.grow(bytes).await.unwrap();
        true
    }

    async fn space_used(&self) -> Option<u64> {
        (self.disk.kind == DiskKind::File).then(|| self.control().allocated())
    }

    async fn cut_power(&self, _seed: u64) -> Option<Dev> {
        self.host.power_cut();
        self.last.take();
        let core = core_of(&self.host).await;
        self.core.replace(core.clone());
        Some(self.serve(FlatImage::open(&core, &self.path(), &existing()).await.unwrap()))
    }

    async fn fail_next(&self, kind: OpKind, error: Error) -> bool {
        let mishap = mishap(kind, error);
        mishap.map(|mishap| self.control().script_fault(mishap)).is_some()
    }
}

fn simulated_disks_conform(seed: u64, disk: DiskSetup, how: CreateImageOptions) {
    succeed(seed, roomy(&disk), |_, host| async move {
        conformance::check(&SimDisks::new(host, disk, how).await, seed).await;
    });
}

fn roomy(disk: &DiskSetup) -> HostSetup {
    let pool_bytes = conformance::MIN_POOL;
    HostSetup { memory_bytes: pool_bytes, new_file_setup: disk.clone(), ..HostSetup::default() }
}

/// A device with room for the smallest volume.
fn device() -> DiskSetup {
    DiskSetup::device(MIN_BYTES + (1 << 20))
}

#[test]
fn simulated_disks_of_every_geometry() {
    let geometries = [(512, 512, 512), (512, 512, 4096), (512, 4096, 4096)];
    let large = [(4096, 512, 4096), (4096, 4096, 4096)];
    for (block_size, logical, physical) in geometries.into_iter().chain(large) {
        let how = CreateImageOptions { block_size, ..thin(MIN_BYTES) };
        for disk in [DiskSetup::file(0), device()] {
            simulated_disks_conform(1, disk.blocks(logical, physical), how);
        }
    }
}

#[test]
fn simulated_disks_with_fewer_features() {
    for (can_punch, can_zero) in [(false, true), (true, false), (false, false)] {
        for disk in [DiskSetup::file(0), device()] {
            let disk = DiskSetup { can_punch, can_zero, ..disk };
            simulated_disks_conform(2, disk, thin(MIN_BYTES));
        }
    }
    let full = CreateImageOptions { provisioning: Provisioning::Thick, ..thin(MIN_BYTES) };
    simulated_disks_conform(3, DiskSetup::file(0).blocks(4096, 4096), full);
}

#[test]
fn power_cuts_with_many_seeds() {
    for seed in 0..100 {
        let disk = if seed % 2 == 0 { device() } else { DiskSetup::file(0) };
        let disk = disk.blocks(if seed % 4 < 2 { 512 } else { 4096 }, 4096);
        succeed(seed, roomy(&disk), |_, host| async move {
            let subject = SimDisks::new(host, disk, thin(MIN_BYTES)).await;
            conformance::power_cuts(&subject, seed).await;
        });
    }
}

#[test]
fn without_a_size_the_whole_device_is_used() {
    succeed(1, HostSetup::default(), |_, host| async move {
        host.add_disk("/d", DiskSetup::device((9 << 20) + 512));
        let core = core_of(&host).await;
        let whole = CreateImageOptions { size_bytes: None, ..thin(0) };
        let file = FlatImage::create(&core, Path::new("/d"), &whole).await.unwrap();
        assert_eq!(file.label().data_bytes, (8 << 20) + 512);
    });
}
