use block::{BufferPool, Mem, MemOptions, Stats};

use super::*;

/// A device with this limit of blocks per transfer.
struct Narrow {
    below: Dev,
    most: u32,
}

impl block::Layer for Narrow {
    fn name(&self) -> &'static str {
        "narrow"
    }

    fn info(&self) -> Info {
        Info { max_transfer_blocks: self.most, ..self.below.info() }
    }

    async fn submit(&self, op: Op, ctx: Ctx) -> Result<Bufs, Error> {
        self.below.submit(op, &ctx).await
    }
}

fn medium(block_size: u32, most: u32) -> (Medium, Dev, Ctx) {
    let below = Dev::new(Mem::new(MemOptions::new(block_size, 1000)));
    let dev = Dev::new(Narrow { below, most });
    let pool = BufferPool::new(1 << 22).unwrap();
    let credit = pool.account().try_credit(1 << 20, MemoryClass::LocalIo).unwrap();
    (Medium::from_dev(dev.clone(), Path::new("m")), dev, Ctx::new(credit, Epoch::default()))
}

#[tokio::test]
async fn large_operations_are_split() {
    for (most, pieces) in [(1000, 1), (100, 1), (99, 2), (15, 13), (8, 13), (7, 15), (1, 100)] {
        let (medium, dev, ctx) = medium(512, most);
        let bytes: Vec<u8> = (0..100 * 512u32).map(|n| (n / 7) as u8).collect();
        let data = rt::buf::copy_in(ctx.credit(), &bytes);
        medium.write(512, data, &ctx).await.unwrap();
        let read = medium.read(512, bytes.len(), &ctx).await.unwrap();
        assert_eq!(read.to_vec(), bytes, "{most} at once");
        let changed = medium.read_mut(512, bytes.len(), &ctx).await.unwrap();
        assert_eq!(Bufs::from(changed).to_vec(), bytes);
        let Stats { writes, reads, .. } = dev.stats();
        assert_eq!((writes, reads), (pieces, 2 * pieces), "{most} at once");
    }
}

#[tokio::test]
async fn byte_ranges_must_be_whole_blocks() {
    let (medium, _, ctx) = medium(4096, 1000);
    let misaligned = MediumError::Disk(DiskError::new(DiskErrorKind::Misaligned));
    assert_eq!(medium.read(512, 4096, &ctx).await.map(drop), Err(misaligned));
    assert_eq!(medium.write(0, Bufs::zeroes(512), &ctx).await, Err(misaligned));
    assert_eq!(medium.zero(0, 512, &ctx).await, Err(misaligned));
    let outside = Err(MediumError::Dev(Error::OutOfRange));
    assert_eq!(medium.read(1000 << 12, 4096, &ctx).await.map(drop), outside);
    assert_eq!(medium.set_len(4096).await, Err(UNSUPPORTED));
    assert_eq!(medium.current_size().await, Ok(1000 << 12));
}

#[tokio::test]
async fn block_status_is_reported_in_bytes() {
    let (medium, _, ctx) = medium(4096, 1000);
    medium.write(8192, Bufs::zeroes(4096), &ctx).await.unwrap();
    for (at, bytes, expected, hole) in
        [(0, 1 << 20, 8192, true), (512, 1024, 1024, true), (9000, 9000, 3288, false)]
    {
        let found = medium.allocation_run(at, bytes, &ctx).await;
        assert_eq!(found, Ok(SparseRun { bytes: expected, is_hole: hole }), "{at}");
    }
    medium.punch(8192, 4096, &ctx).await.unwrap();
    assert!(medium.allocation_run(8192, 4096, &ctx).await.unwrap().is_hole);
}

#[test]
fn each_block_error_maps_to_a_disk_error() {
    let at = Lba(7);
    for (error, kind) in [
        (Error::Unreadable { at }, DiskErrorKind::Media),
        (Error::Corrupt { at }, DiskErrorKind::Media),
        (Error::Unwritable { at }, DiskErrorKind::Media),
        (Error::OutOfRange, DiskErrorKind::PastEnd),
        (Error::NoSpace, DiskErrorKind::NoSpace),
        (Error::ReadOnly, DiskErrorKind::ReadOnly),
        (Error::Fenced, DiskErrorKind::Gone),
        (Error::Aborted, DiskErrorKind::Other),
        (Error::Gone, DiskErrorKind::Gone),
    ] {
        assert_eq!(DiskError::from(MediumError::Dev(error)), DiskError::new(kind), "{error}");
    }
    let disk = DiskError::from_errno(5);
    assert_eq!(DiskError::from(MediumError::Disk(disk)), disk);
}
