//! Flat images on block devices: they pass the conformance suite of all layers, inherit the
//! device's limits and errors, and need no zeroing.

use std::cell::RefCell;
use std::path::Path;
use std::rc::Rc;

use block::testing::conformance::{self, MIN_BYTES, Subject};
use block::testing::faulty::{Effect, Faults, Faulty, OpKind, Rule};
use block::testing::{Rng, TestClient};
use block::{Blocks, BufferPool, Bufs, Ctx, Dev, Error, Info, Layer, Lba, Mem, MemOptions, Op};
use disk::{
    ExistingData, ImageError, ImageErrorReason, LABEL_AREA_BYTES, LOG_AREA, Medium, Provisioning,
};
use futures_util::future::join_all;
use image::{CreateImageOptions, FlatImage, OpenImageOptions, inspect_on};
use intent_log::IntentLog;
use rt::disk::DiskErrorKind;
use rt::{Core, DiskEngine};
use uuid::Uuid;

use crate::common::{VOLUME, client, existing, on_core, thin};

const MIB: u64 = 1 << 20;

/// A device with small transfers that uses all of its overhead memory.
struct Greedy {
    below: Dev,
    overhead: u32,
    max_transfer: u32,
}

impl Layer for Greedy {
    fn name(&self) -> &'static str {
        "greedy"
    }

    fn info(&self) -> Info {
        let below = self.below.info();
        let max_transfer_blocks = self.max_transfer / below.block_size;
        Info { max_transfer_blocks, overhead_bytes: self.overhead, ..below }
    }

    async fn submit(&self, op: Op, ctx: Ctx) -> Result<Bufs, Error> {
        let _scratch = ctx.alloc(self.overhead as usize);
        tokio::task::yield_now().await;
        let is_read = matches!(op, Op::Read { .. });
        let data = self.below.submit(op, &ctx).await?;
        if !is_read {
            return Ok(data);
        }
        let mut copy = ctx.alloc(data.len());
        let mut done = 0;
        for piece in &mut copy {
            let len = piece.len();
            data.slice(done..done + len).copy_to(piece);
            done += len;
        }
        Ok(copy.into())
    }
}

/// A device in memory with scripted faults.
struct Bottom {
    mem: Rc<Mem>,
    faults: RefCell<Faults>,
    overhead: u32,
    max_transfer: u32,
}

impl Bottom {
    fn new(block_size: u32, bytes: u64) -> Self {
        let options = MemOptions::new(block_size, bytes / u64::from(block_size));
        let mem = Rc::new(Mem::new(MemOptions { volatile_cache: true, ..options }));
        let faults = RefCell::new(Faults::new(1));
        Self { mem, faults, overhead: 8192, max_transfer: 48 << 10 }
    }

    fn dev(&self) -> Dev {
        let (dev, faults) = Faulty::wrap(Dev::shared(Rc::clone(&self.mem)), 1);
        self.faults.replace(faults);
        let (overhead, max_transfer) = (self.overhead, self.max_transfer);
        Dev::new(Greedy { below: dev, overhead, max_transfer })
    }

    fn medium(&self) -> Medium {
        Medium::from_dev(self.dev(), Path::new("pool/volume"))
    }

    fn fail(&self, rule: Rule) {
        self.faults.borrow().add(rule);
    }

    async fn create(
        &self,
        core: &Core,
        how: &CreateImageOptions,
    ) -> Result<Rc<FlatImage>, ImageError> {
        FlatImage::create_on(core, self.medium(), how).await.map(Rc::new)
    }

    async fn open(
        &self,
        core: &Core,
        what: &OpenImageOptions,
    ) -> Result<Rc<FlatImage>, ImageError> {
        FlatImage::open_on(core, self.medium(), what).await.map(Rc::new)
    }
}

/// Images on devices in memory.
struct OnDevs {
    core: Core,
    dev_block: u32,
    how: CreateImageOptions,
    bottom: RefCell<Rc<Bottom>>,
    last: RefCell<Option<Rc<FlatImage>>>,
}

impl OnDevs {
    fn bottom(&self) -> Rc<Bottom> {
        Rc::clone(&self.bottom.borrow())
    }

    fn serve(&self, file: Rc<FlatImage>) -> Dev {
        self.last.replace(Some(Rc::clone(&file)));
        Dev::shared(file)
    }
}

impl Subject for OnDevs {
    fn pool(&self) -> BufferPool {
        self.core.buffer_pool().clone()
    }

    async fn fresh(&self) -> Dev {
        self.last.take();
        self.bottom.replace(Rc::new(Bottom::new(self.dev_block, MIN_BYTES + LABEL_AREA_BYTES)));
        self.serve(self.bottom().create(&self.core, &self.how).await.unwrap())
    }

    async fn grow(&self) -> bool {
        let file = self.last.borrow().clone().unwrap();
        let bytes = file.label().data_bytes + MIN_BYTES + 4096;
        let refused = file.grow(bytes).await.unwrap_err();
        assert!(matches!(refused.reason, ImageErrorReason::TooSmall { .. }), "{refused}");
        self.bottom().mem.grow((LABEL_AREA_BYTES + bytes) / u64::from(self.dev_block));
        file.grow(bytes).await.unwrap();
        true
    }

    async fn space_used(&self) -> Option<u64> {
        Some(self.bottom().mem.space_used())
    }

    async fn cut_power(&self, seed: u64) -> Option<Dev> {
        if self.how.block_size > self.dev_block {
            // The block may be torn, and the image warns of that.
            return None;
        }
        self.last.take();
        let mut rng = Rng::new(seed);
        self.bottom().mem.cut_power(|n| rng.below(n as u64) as usize);
        Some(self.serve(self.bottom().open(&self.core, &existing()).await.unwrap()))
    }

    async fn fail_next(&self, kind: OpKind, error: Error) -> bool {
        self.bottom().fail(Rule::new(Effect::Fail(error)).on(&[kind]).times(1));
        true
    }
}

fn images_conform(dev_block: u32, how: CreateImageOptions) {
    on_core(DiskEngine::Threads, move |core| async move {
        let bottom = RefCell::new(Rc::new(Bottom::new(dev_block, 0)));
        let subject = OnDevs { core, dev_block, how, bottom, last: RefCell::default() };
        conformance::check(&subject, 1).await;
        for seed in 0..20 {
            conformance::power_cuts(&subject, seed).await;
        }
    });
}

#[test]
fn small_blocks_on_small_blocks() {
    images_conform(512, thin(MIN_BYTES));
}

#[test]
fn large_blocks_on_small_blocks() {
    images_conform(512, CreateImageOptions { block_size: 4096, ..thin(MIN_BYTES) });
}

#[test]
fn small_blocks_on_large_blocks() {
    images_conform(4096, thin(MIN_BYTES));
}

#[test]
fn large_blocks_on_large_blocks() {
    let how = CreateImageOptions {
        block_size: 4096,
        provisioning: Provisioning::Thick,
        ..thin(MIN_BYTES)
    };
    images_conform(4096, how);
}

#[test]
fn a_created_image_can_be_opened() {
    on_core(DiskEngine::Threads, |core| async move {
        let bottom = Bottom::new(4096, 3 * MIB + LABEL_AREA_BYTES);
        let none = bottom.open(&core, &existing()).await.unwrap_err();
        assert_eq!(none.to_string(), "pool/volume: holds no volume");
        let whole = CreateImageOptions { size_bytes: None, ..thin(0) };
        let file = bottom.create(&core, &whole).await.unwrap();
        let label = file.label();
        assert_eq!((label.data_bytes, label.block_size), (3 * MIB, 512));
        client(&core, &file).write(7, &[7; 1024], true).await.unwrap();
        drop(file);
        assert_eq!(inspect_on(&core, &bottom.medium()).await.unwrap(), label);
        let again = bottom.create(&core, &whole).await.unwrap_err();
        assert_eq!(again.reason, ImageErrorReason::HoldsVolume { volume: VOLUME });
        let other = OpenImageOptions { volume_id: Uuid::from_u128(1), ..existing() };
        let refused = bottom.open(&core, &other).await.unwrap_err();
        assert!(matches!(refused.reason, ImageErrorReason::WrongVolume { .. }), "{refused}");
        let file = bottom.open(&core, &existing()).await.unwrap();
        assert_eq!(file.label(), label);
        let c = client(&core, &file);
        assert_eq!(
            c.read(6, 4).await.unwrap().to_vec(),
            [[0; 512], [7; 512], [7; 512], [0; 512]].concat()
        );
        assert!(
            c.block_status(0, 32).await.unwrap().mapped
                && !c.block_status(16, 32).await.unwrap().mapped
        );
    });
}

#[test]
fn opening_and_reading_an_image_writes_nothing() {
    on_core(DiskEngine::Threads, |core| async move {
        let bottom = Bottom::new(4096, 4 * MIB);
        drop(bottom.create(&core, &thin(3 * MIB)).await.unwrap());
        let reading = OpenImageOptions { read_only: true, ..existing() };
        let medium = bottom.dev();
        let file =
            FlatImage::open_on(&core, Medium::from_dev(medium.clone(), Path::new("m")), &reading)
                .await;
        let file = Rc::new(file.unwrap());
        assert!(file.info().read_only);
        assert_eq!(client(&core, &file).write(0, &[1; 512], false).await, Err(Error::ReadOnly));
        let area = file.log_area().await.unwrap();
        let refused = area.write(LOG_AREA.start, &[1; 4096]).await.unwrap_err();
        assert_eq!(refused.kind, DiskErrorKind::ReadOnly);
        assert_eq!((medium.stats().writes, medium.stats().zeroes), (0, 0));
    });
}

#[test]
fn a_creation_writes_only_before_the_data() {
    on_core(DiskEngine::Threads, |core| async move {
        for provisioning in [Provisioning::Thin, Provisioning::Thick] {
            let bottom = Bottom::new(4096, 64 * MIB);
            let dev = bottom.dev();
            let medium = Medium::from_dev(dev.clone(), Path::new("m"));
            let how = CreateImageOptions { provisioning, ..thin(63 * MIB) };
            let file = FlatImage::create_on(&core, medium, &how).await.unwrap();
            let stats = dev.stats();
            assert!(stats.write_bytes <= MIB + 4 * 4096 && stats.zeroes <= 1, "{stats:?}");
            drop(file);
        }
        let bottom = Bottom::new(4096, 2 * MIB);
        let refused = bottom.create(&core, &thin(2 * MIB)).await.unwrap_err();
        assert_eq!(refused.reason, ImageErrorReason::TooSmall { bytes: 2 * MIB, needed: 3 * MIB });
    });
}

#[test]
fn a_forced_creation_erases_the_old_contents() {
    on_core(DiskEngine::Threads, |core| async move {
        let bottom = Bottom::new(4096, 5 * MIB);
        let file = bottom.create(&core, &thin(4 * MIB)).await.unwrap();
        for at in [0, 3000, 8191] {
            client(&core, &file).write(at, &[1; 512], true).await.unwrap();
        }
        drop(file);
        // Smaller than before, so that it grows into the old one's data.
        let how = CreateImageOptions { overwrite: true, ..thin(MIB) };
        let file = bottom.create(&core, &how).await.unwrap();
        file.grow(4 * MIB).await.unwrap();
        for at in [0, 3000, 8191] {
            assert_eq!(client(&core, &file).read(at, 1).await.unwrap().to_vec(), [0; 512]);
        }
        drop(file);
        let c = TestClient::new(&bottom.dev(), core.buffer_pool());
        c.zero(0, 1280, true).await.unwrap();
        c.write(0, &[&b"XFSB"[..], &[0; 4092]].concat(), true).await.unwrap();
        let refused = bottom.create(&core, &thin(MIB)).await.unwrap_err();
        assert_eq!(
            refused.reason,
            ImageErrorReason::HoldsOtherData(ExistingData::KnownFormats(vec![
                "an XFS file system".to_owned()
            ]))
        );
    });
}

#[test]
fn a_creation_that_fails_can_be_repeated() {
    on_core(DiskEngine::Threads, |core| async move {
        for kind in [OpKind::Write, OpKind::Flush] {
            let mut failed = 0;
            for n in 0.. {
                let bottom = Bottom::new(4096, 4 * MIB);
                let medium = bottom.medium();
                let error = Error::Unwritable { at: Lba(0) };
                bottom.fail(Rule::new(Effect::Fail(error)).on(&[kind]).after(n).times(1));
                let Err(e) = FlatImage::create_on(&core, medium, &thin(3 * MIB)).await else {
                    break;
                };
                failed += 1;
                assert!(matches!(e.reason, ImageErrorReason::Disk(_)), "{e}");
                if kind == OpKind::Write {
                    let none = bottom.open(&core, &existing()).await.unwrap_err();
                    assert_eq!(none.reason, ImageErrorReason::NoLabel, "write {n}");
                    bottom.create(&core, &thin(3 * MIB)).await.unwrap();
                }
                let force = CreateImageOptions { overwrite: true, ..thin(3 * MIB) };
                bottom.create(&core, &force).await.unwrap();
                bottom.open(&core, &existing()).await.unwrap();
            }
            assert!(failed >= 5, "{failed} of {kind:?}");
        }
    });
}

/// An image of 3 MiB on blocks of 4096 bytes.
async fn image(core: &Core, block_size: u32) -> (Bottom, Rc<FlatImage>, TestClient) {
    let bottom = Bottom::new(4096, 4 * MIB);
    let how = CreateImageOptions { block_size, ..thin(3 * MIB) };
    let file = bottom.create(core, &how).await.unwrap();
    let client = client(core, &file);
    (bottom, file, client)
}

#[test]
fn errors_carry_addresses_of_the_volume() {
    on_core(DiskEngine::Threads, |core| async move {
        let (bottom, _file, c) = image(&core, 512).await;
        let anywhere = Lba(0);
        // Block 2 of the data contains blocks 16 to 23 of the volume.
        let bad = Blocks::new(Lba(256 + 2), 1);
        let fail = |kind, error| {
            bottom.fail(Rule::new(Effect::Fail(error)).on(&[kind]).within(bad).times(1));
        };
        for (at, blocks, first) in [(0, 100, 16), (16, 8, 16), (19, 2, 19), (17, 40, 17)] {
            fail(OpKind::Read, Error::Unreadable { at: anywhere });
            let found = c.read(at, blocks).await.unwrap_err();
            assert_eq!(found, Error::Unreadable { at: Lba(first) });
            fail(OpKind::Read, Error::Corrupt { at: anywhere });
            let found = c.read(at, blocks).await.unwrap_err();
            assert_eq!(found, Error::Corrupt { at: Lba(first) });
        }
        fail(OpKind::Write, Error::Unwritable { at: anywhere });
        let found = c.write(8, &[1; 8192], false).await.unwrap_err();
        assert_eq!(found, Error::Unwritable { at: Lba(16) });
        // The rest of the block that is written cannot be read.
        fail(OpKind::Read, Error::Corrupt { at: anywhere });
        let found = c.write(18, &[1; 512], false).await.unwrap_err();
        assert_eq!(found, Error::Unwritable { at: Lba(18) });
        for error in [Error::NoSpace, Error::ReadOnly, Error::Fenced] {
            fail(OpKind::Write, error);
            assert_eq!(c.write(16, &[1; 4096], false).await, Err(error));
        }
        c.write(0, &[1; 8192], true).await.unwrap();
        bottom.fail(Rule::new(Effect::Fail(Error::Gone)).times(1));
        assert_eq!(c.read(0, 1).await.map(drop), Err(Error::Gone));
        bottom.faults.borrow().clear();
        assert_eq!(c.read(0, 1).await.map(drop), Err(Error::Gone), "it stays so");
    });
}

#[test]
fn a_failed_flush_fails_the_image() {
    on_core(DiskEngine::Threads, |core| async move {
        for error in [Error::Gone, Error::NoSpace, Error::Unwritable { at: Lba(9) }] {
            let (bottom, file, c) = image(&core, 4096).await;
            let area = file.log_area().await.unwrap();
            c.write(1, &[1; 4096], false).await.unwrap();
            bottom.fail(Rule::new(Effect::Fail(error)).on(&[OpKind::Flush]).times(1));
            assert_eq!(c.flush().await, Err(Error::Gone));
            bottom.faults.borrow().clear();
            assert_eq!(c.flush().await, Err(Error::Gone), "a failed flush is not retried");
            assert_eq!(c.read(1, 1).await.map(drop), Err(Error::Gone));
            assert_eq!(c.write(1, &[1; 4096], false).await, Err(Error::Gone));
            assert_eq!(area.sync().await, Err(Error::Gone));
            let gone = area.read(LOG_AREA.start, 4096).await.unwrap_err();
            assert_eq!(gone.kind, DiskErrorKind::Gone);
            let gone = area.declare_log().await.unwrap_err();
            let lost = |e: &ImageError| matches!(e.reason, ImageErrorReason::Disk(e) if e.kind == DiskErrorKind::Gone);
            assert!(lost(&gone), "{gone}");
        }
    });
}

#[test]
fn a_log_lies_on_a_device() {
    on_core(DiskEngine::Threads, |core| async move {
        let (bottom, file, c) = image(&core, 4096).await;
        let area = file.log_area().await.unwrap();
        let page = |n: u64| LOG_AREA.start + n * 4096;
        let many = (0..32).map(|n| {
            let area = &area;
            async move {
                area.write(page(n), &[n as u8; 4096]).await.unwrap();
                area.sync().await.unwrap();
                assert_eq!(area.read(page(n), 4096).await.unwrap(), [n as u8; 4096]);
            }
        });
        join_all(many).await;
        let most = disk::LOG_TRANSFER_MAX;
        let all = area.read(page(0), most).await.unwrap();
        assert!(all.iter().zip(0..).all(|(&byte, at)| byte == (at / 4096) as u8));
        area.write(page(32), &vec![3; most]).await.unwrap();
        c.write(0, &[9; 4096], false).await.unwrap();
        area.sync().await.unwrap();
        bottom.fail(Rule::new(Effect::Fail(Error::Unreadable { at: Lba(0) })).times(1));
        let failed = area.read(page(0), 4096).await.unwrap_err();
        assert_eq!(failed.kind, DiskErrorKind::Media);
        let past = area.read(LOG_AREA.end, 4096).await.unwrap_err();
        assert_eq!(past.kind, DiskErrorKind::PastEnd);
        drop((area, file, c));
        bottom.mem.cut_power(|_| 0);
        let file = bottom.open(&core, &existing()).await.unwrap();
        let area = file.log_area().await.unwrap();
        assert_eq!(area.read(page(32), most).await.unwrap(), vec![3; most]);
        assert_eq!(client(&core, &file).read(0, 1).await.unwrap().to_vec(), [9; 4096]);
        assert_eq!(core.buffer_pool().usage().overdrafts, 0);
    });
}

#[test]
fn an_intent_log_opens_where_it_was_created() {
    on_core(DiskEngine::Threads, |core| async move {
        let (bottom, file, _) = image(&core, 4096).await;
        let area = file.log_area().await.unwrap();
        drop(IntentLog::create(&core, area).await.unwrap());
        drop(file);
        let file = bottom.open(&core, &existing()).await.unwrap();
        assert!(file.label().has_intent_log);
        let area = file.log_area().await.unwrap();
        let boot = area.disk_session(&core);
        IntentLog::open(&core, area, boot).await.unwrap();
        assert_eq!(core.buffer_pool().usage().overdrafts, 0);
    });
}
