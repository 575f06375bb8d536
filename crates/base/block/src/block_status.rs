//! How a range of blocks begins: mapped or unmapped.

use rt::buf::{Bufs, copy_in};

use crate::Ctx;

/// A run of blocks of equal status: the answer to [`Op::BlockStatus`](crate::Op::BlockStatus).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockStatus {
    /// Number of blocks, at least one.
    pub blocks: u32,
    /// Whether the blocks may hold data. If not, all of them read as zeroes.
    pub mapped: bool,
}

impl BlockStatus {
    /// Length in bytes of an encoded run.
    pub const BYTES: usize = 8;

    /// Encodes the run, in memory of `ctx`.
    #[must_use]
    pub fn into_bufs(self, ctx: &Ctx) -> Bufs {
        Self::to_bufs(&[self], ctx)
    }

    /// Encodes several runs, one after the other.
    #[must_use]
    pub fn to_bufs(runs: &[Self], ctx: &Ctx) -> Bufs {
        let bytes: Vec<u8> = runs.iter().flat_map(|run| run.to_bytes()).collect();
        copy_in(ctx.credit(), &bytes)
    }

    /// Decodes the runs in `data`. An incomplete run at the end is ignored.
    #[must_use]
    pub fn from_bufs(data: &Bufs) -> Vec<Self> {
        let bytes = data.to_vec();
        let (runs, _) = bytes.as_chunks::<{ Self::BYTES }>();
        runs.iter().map(|bytes| Self::from_bytes(*bytes)).collect()
    }

    fn to_bytes(self) -> [u8; Self::BYTES] {
        let [a, b, c, d] = self.blocks.to_be_bytes();
        [a, b, c, d, u8::from(self.mapped), 0, 0, 0]
    }

    fn from_bytes([a, b, c, d, mapped, ..]: [u8; Self::BYTES]) -> Self {
        Self { blocks: u32::from_be_bytes([a, b, c, d]), mapped: mapped != 0 }
    }
}

#[cfg(test)]
mod tests {
    use rt::buf::{BufferPool, MemoryClass};

    use super::*;
    use crate::Epoch;

    #[test]
    fn runs_travel_as_data() {
        let pool = BufferPool::new(1 << 16).unwrap();
        let credit = pool.account().try_credit(4096, MemoryClass::LocalIo).unwrap();
        let ctx = Ctx::new(credit, Epoch::default());
        let runs = [
            BlockStatus { blocks: u32::MAX, mapped: true },
            BlockStatus { blocks: 7, mapped: false },
        ];
        let data = BlockStatus::to_bufs(&runs, &ctx);
        assert_eq!(
            (data.len(), BlockStatus::from_bufs(&data)),
            (2 * BlockStatus::BYTES, runs.to_vec())
        );
        assert_eq!(
            BlockStatus::from_bufs(&data.slice(0..9)),
            runs[..1],
            "what is cut off is left out"
        );
    }
}
