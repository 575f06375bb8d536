//! The smallest useful layer: a device that is part of another device, beginning at a given block.
//!
//! Read this before you write a layer of your own. It shows the whole of what [`Layer`] asks for:
//! say what the device is ([`Layer::info`]), translate each of the six operations, pass on the
//! operation's context, translate the addresses in errors back. `tests/offset.rs` beside it runs
//! the conformance suite over it, as each layer's tests do.
//!
//! `cargo run -p block --example offset` writes and reads a block through it.

use std::error::Error as StdError;

use block::{Blocks, Ctx, Dev, Epoch, Error, Info, Layer, Lba, Mem, MemOptions, Op};
use rt::buf::{BufferPool, Bufs, MemoryClass};

/// The blocks of a device from `offset` on.
#[derive(Debug)]
pub struct Offset {
    below: Dev,
    /// In blocks of the device below.
    offset: u64,
}

impl Offset {
    /// The layer over `below` whose block 0 is block `offset` of it. An offset beyond the end makes
    /// an empty device.
    #[must_use]
    pub fn new(below: Dev, offset: u64) -> Self {
        Self { below, offset }
    }

    /// Where a block of this device lies on the device below. [`Dev`] has checked that the range
    /// is inside this device, so the sum cannot overflow.
    fn down(&self, at: Lba) -> Lba {
        Lba(at.0 + self.offset)
    }

    /// The same error in addresses of this device. The match names every variant: a new error
    /// must be looked at in every layer.
    fn up(&self, error: Error) -> Error {
        let up = |at: Lba| Lba(at.0.saturating_sub(self.offset));
        match error {
            Error::Unreadable { at } => Error::Unreadable { at: up(at) },
            Error::Corrupt { at } => Error::Corrupt { at: up(at) },
            Error::Unwritable { at } => Error::Unwritable { at: up(at) },
            Error::OutOfRange
            | Error::NoSpace
            | Error::ReadOnly
            | Error::Fenced
            | Error::Aborted
            | Error::Gone => error,
        }
    }
}

impl Layer for Offset {
    fn name(&self) -> &'static str {
        "offset"
    }

    fn info(&self) -> Info {
        let below = self.below.info();
        Info {
            blocks: below.blocks.saturating_sub(self.offset),
            // The blocks beside the volume are the lower device's own: this layer has none.
            metadata_blocks: 0,
            // Everything else is as below: a read costs no more memory, FUA is honoured or not.
            ..below
        }
    }

    async fn submit(&self, op: Op, ctx: Ctx) -> Result<Bufs, Error> {
        // No `_` arm: a new operation must fail to compile here.
        let op = match op {
            Op::Read { at, blocks } => Op::Read { at: self.down(at), blocks },
            Op::Write { at, data, fua } => Op::Write { at: self.down(at), data, fua },
            Op::Zero { at, blocks, unmap, fua } => {
                Op::Zero { at: self.down(at), blocks, unmap, fua }
            }
            Op::Unmap { at, blocks } => Op::Unmap { at: self.down(at), blocks },
            Op::BlockStatus { at, blocks } => Op::BlockStatus { at: self.down(at), blocks },
            Op::Flush => Op::Flush,
        };
        self.below.submit(op, &ctx).await.map_err(|error| self.up(error))
    }
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn StdError>> {
    let pool = BufferPool::new(1 << 20)?;
    let below = Dev::new(Mem::new(MemOptions::new(512, 2048)));
    let dev = Dev::new(Offset::new(below.clone(), 8));
    let credit = pool.account().credit(512, MemoryClass::LocalIo).await?;
    let ctx = Ctx::new(credit, Epoch::default());
    let data = rt::buf::copy_in(ctx.credit(), &[7; 512]);
    dev.submit(Op::Write { at: Lba(0), data, fua: false }, &ctx).await?;
    let read = below.submit(Op::Read { at: Lba(8), blocks: 1 }, &ctx).await?;
    assert_eq!(read.to_vec(), [7; 512]);
    let beyond = Blocks::new(Lba(2040), 1);
    println!("block 0 of the layer is block 8 below; {} is outside: {}", beyond.at, {
        !dev.info().contains(beyond)
    });
    Ok(())
}
