//! Raw disks, and parts of them, pass the conformance suite of all layers; so does an image on one.

use std::cell::{Cell, RefCell};
use std::path::{Path, PathBuf};

use block::testing::conformance::{self, MIN_BYTES, MIN_POOL, Subject};
use block::testing::faulty::OpKind;
use block::{BufferPool, Dev, Error};
use disk::{LABEL_AREA_BYTES, Medium, RawDevice};
use image::FlatImage;
use rt::Core;
use rt::disk::OpenOptions;
use rt::sim::{DiskControl, DiskSetup, Host, HostSetup};

use crate::common::{core_of, existing, mishap, succeed, thin};

/// Offset of a part on its disk, in bytes.
const BEGIN: u64 = 5 << 20;

/// Parts of simulated disks, with images on them or not.
struct Parts {
    host: Host,
    disk: DiskSetup,
    block_size: u32,
    with_image: bool,
    core: RefCell<Core>,
    made: Cell<u32>,
}

impl Parts {
    fn path(&self) -> PathBuf {
        format!("/disk-{}", self.made.get()).into()
    }

    fn control(&self) -> DiskControl {
        self.host.disk(self.path()).unwrap()
    }

    async fn part(&self) -> Dev {
        let core = self.core.borrow().clone();
        let disk = core.open_disk(&self.path(), OpenOptions::new()).await.unwrap();
        let bytes = MIN_BYTES + if self.with_image { LABEL_AREA_BYTES } else { 0 };
        Dev::new(RawDevice::new(disk, self.block_size).with_range(BEGIN, bytes))
    }
}

impl Subject for Parts {
    fn pool(&self) -> BufferPool {
        self.core.borrow().buffer_pool().clone()
    }

    async fn fresh(&self) -> Dev {
        self.made.set(self.made.get() + 1);
        self.host.add_disk(self.path(), self.disk.clone());
        let edges = [(BEGIN - 4096, 4096), (self.disk.bytes - 4096, 4096)];
        edges.iter().for_each(|&(at, len)| self.control().write_durable(at, &vec![9; len]));
        let part = self.part().await;
        if !self.with_image {
            return part;
        }
        let core = self.core.borrow().clone();
        let medium = Medium::from_dev(part, &self.path());
        Dev::new(FlatImage::create_on(&core, medium, &thin(MIN_BYTES)).await.unwrap())
    }

    async fn grow(&self) -> bool {
        for at in [BEGIN - 4096, self.disk.bytes - 4096] {
            assert_eq!(
                self.control().read_visible(at, 4096),
                [9; 4096],
                "what lies around is as it was"
            );
        }
        false
    }

    async fn space_used(&self) -> Option<u64> {
        None
    }

    async fn cut_power(&self, _seed: u64) -> Option<Dev> {
        self.host.power_cut();
        self.core.replace(core_of(&self.host).await);
        let part = self.part().await;
        if !self.with_image {
            return Some(part);
        }
        let core = self.core.borrow().clone();
        let medium = Medium::from_dev(part, &self.path());
        Some(Dev::new(FlatImage::open_on(&core, medium, &existing()).await.unwrap()))
    }

    async fn fail_next(&self, kind: OpKind, error: Error) -> bool {
        let mishap = mishap(kind, error);
        mishap.map(|mishap| self.control().script_fault(mishap)).is_some()
    }
}

fn parts_conform(disk: DiskSetup, block_size: u32, with_image: bool) {
    let setup = HostSetup { memory_bytes: MIN_POOL, ..HostSetup::default() };
    succeed(1, setup, |_, host| async move {
        let core = RefCell::new(core_of(&host).await);
        let parts = Parts { host, disk, block_size, with_image, core, made: Cell::new(0) };
        conformance::check(&parts, 1).await;
    });
}

/// A disk with something around the part.
fn disk(with_image: bool) -> DiskSetup {
    let label = if with_image { LABEL_AREA_BYTES } else { 0 };
    DiskSetup::device(BEGIN + MIN_BYTES + label + 4096)
}

#[test]
fn parts_of_disks() {
    for (block_size, logical) in [(512, 512), (4096, 512), (4096, 4096)] {
        parts_conform(disk(false).blocks(logical, 4096), block_size, false);
    }
    let less = DiskSetup { can_punch: false, can_zero: false, ..disk(false) };
    parts_conform(less, 4096, false);
}

#[test]
fn images_on_parts_of_disks() {
    for (block_size, logical) in [(512, 512), (4096, 512), (4096, 4096)] {
        parts_conform(disk(true).blocks(logical, 4096), block_size, true);
    }
}

#[test]
fn a_part_ends_with_its_disk_and_has_whole_blocks() {
    succeed(1, HostSetup::default(), |_, host| async move {
        let core = core_of(&host).await;
        let size = 10 * 4096 + 512;
        host.add_disk("/d", DiskSetup::device(size));
        let disk = core.open_disk(Path::new("/d"), OpenOptions::new()).await.unwrap();
        let blocks = |raw: RawDevice| Dev::new(raw).info().blocks;
        assert_eq!(blocks(RawDevice::new(disk.clone(), 512)), 81);
        assert_eq!(blocks(RawDevice::new(disk.clone(), 4096)), 10);
        let part = |at, bytes| blocks(RawDevice::new(disk.clone(), 4096).with_range(at, bytes));
        assert_eq!((part(4096, 8192), part(4096, 8191), part(4096, u64::MAX)), (2, 1, 9));
        assert_eq!((part(512, u64::MAX), part(1 << 20, 4096)), (10, 0));
    });
}
