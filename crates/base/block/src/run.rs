//! How a range of blocks begins: with or without space behind it.

use rt::buf::{Bufs, copy_in};

use crate::Ctx;

/// Blocks in a row that are alike: what [`Op::Map`](crate::Op::Map) answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// How many blocks, one at least.
    pub blocks: u32,
    /// Whether there may be something. If not, all of them read as zeroes.
    pub mapped: bool,
}

impl Run {
    /// Length in bytes of a run that travels as data.
    pub const BYTES: usize = 8;

    /// The run as data, out of the memory of `ctx`.
    #[must_use]
    pub fn into_bufs(self, ctx: &Ctx) -> Bufs {
        Self::all_into_bufs(&[self], ctx)
    }

    /// Runs, one behind the other, as data.
    #[must_use]
    pub fn all_into_bufs(runs: &[Self], ctx: &Ctx) -> Bufs {
        let bytes: Vec<u8> = runs.iter().flat_map(|run| run.to_bytes()).collect();
        copy_in(ctx.credit(), &bytes)
    }

    /// The runs that `data` is. What is no whole run is left out.
    #[must_use]
    pub fn all_of(data: &Bufs) -> Vec<Self> {
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
    use rt::buf::{Class, Pool};

    use super::*;
    use crate::Epoch;

    #[test]
    fn runs_travel_as_data() {
        let pool = Pool::new(1 << 16).unwrap();
        let credit = pool.account().try_credit(4096, Class::Immediate).unwrap();
        let ctx = Ctx::new(credit, Epoch::default());
        let runs = [Run { blocks: u32::MAX, mapped: true }, Run { blocks: 7, mapped: false }];
        let data = Run::all_into_bufs(&runs, &ctx);
        assert_eq!((data.len(), Run::all_of(&data)), (2 * Run::BYTES, runs.to_vec()));
        assert_eq!(Run::all_of(&data.slice(0..9)), runs[..1], "what is cut off is left out");
    }
}
