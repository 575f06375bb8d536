//! Self-describing blocks, and what is wrong with a mismatching one.
//!
//! A block (of the smallest operation's size) that a verifying job writes begins with a header, all
//! of it little-endian:
//!
//! ```text
//!  0  magic       8 bytes   "WRLOAD1\n"
//!  8  length      4         of the block in bytes, header included
//! 12  method      1         1 crc32c, 2 md5, 3 meta
//! 13  0           3
//! 16  offset      8         of the block in bytes, from the start of the target
//! 24  seed        8         of the job
//! 32  generation  4         how often the job has written this block, this time included
//! 36  checksum    4         CRC-32C of the header, this field taken for 0
//! 40  sum        16         of the data behind the header: CRC-32C and zeroes, MD5, or zeroes
//! 56  0           8
//! ```
//!
//! The rest are numbers from seed, offset and generation, so the whole block can be recomputed: a
//! job that has written blocks tracks the generation of each, and so detects a lost write, or an
//! old block in the place of a newer one, which a checksum alone does not. `verify=pattern` has no
//! header and cannot detect that.

use std::fmt;

use block::Bufs;
use md5::{Digest, Md5};
use rt::buf::BufMut;
use wire::crc32c;
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::job::Verify;
use crate::pattern::Io;
use crate::random::{SplitMix64, mix};
use crate::spec::JobSpec;

const MAGIC: [u8; 8] = *b"WRLOAD1\n";

/// See the [module](self).
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct Header {
    magic: [u8; 8],
    length: U32,
    method: u8,
    zero: [u8; 3],
    offset: U64,
    seed: U64,
    generation: U32,
    checksum: U32,
    sum: [u8; 16],
    zeroes: [u8; 8],
}

const HEADER: usize = size_of::<Header>();
const _: () = assert!(HEADER == 64);

/// What is wrong with a block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mismatch {
    /// First byte of the block, from the start of the target.
    pub at: u64,
    /// Length of the block in bytes.
    pub length: u64,
    /// Kind of the mismatch.
    pub kind: MismatchKind,
}

/// Kind of a mismatch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MismatchKind {
    /// No header: never written by such a job, or destroyed.
    NoHeader {
        /// The first bytes.
        bytes: [u8; 8],
    },
    /// A header whose checksum is wrong.
    TornHeader {
        /// The stored checksum.
        found: u32,
        /// The computed checksum.
        expected: u32,
    },
    /// A block of another offset.
    WrongOffset {
        /// The offset in its header, in bytes.
        offset: u64,
    },
    /// A block of another length or verification method.
    WrongFormat {
        /// Its length in bytes.
        length: u32,
        /// Verification method in the header.
        method: u8,
    },
    /// A block of another job.
    WrongSeed {
        /// The seed found.
        found: u64,
        /// The seed of this job.
        expected: u64,
    },
    /// An older write, or one that never happened.
    WrongGeneration {
        /// The generation found.
        found: u32,
        /// The generation that was written last.
        expected: u32,
    },
    /// Wrong data.
    WrongData {
        /// First byte that differs, from the start of the target.
        byte: u64,
        /// The byte found.
        found: u8,
        /// The byte written.
        expected: u8,
        /// How many bytes of the block differ.
        count: usize,
    },
}

impl fmt::Display for Mismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { at, length, kind: found } = self;
        write!(f, "verify: block of {length} bytes at byte {at}: ")?;
        match found {
            MismatchKind::NoHeader { bytes } => {
                write!(f, "expected a header, found bytes {bytes:02x?}")
            }
            MismatchKind::TornHeader { found, expected } => {
                write!(f, "the header's checksum is {found:#010x}, expected {expected:#010x}")
            }
            MismatchKind::WrongOffset { offset } => {
                write!(f, "found the block that belongs at byte {offset}")
            }
            MismatchKind::WrongFormat { length, method } => {
                write!(f, "found a block of {length} bytes, checked by method {method}")
            }
            MismatchKind::WrongSeed { found, expected } => {
                write!(f, "expected a block of seed {expected:#x}, found one of {found:#x}")
            }
            MismatchKind::WrongGeneration { found, expected } => {
                write!(f, "expected write {expected} of this block, found write {found}")
            }
            MismatchKind::WrongData { byte, found, expected, count } => write!(
                f,
                "{} wrong, the first at byte {byte}: expected {expected:#04x}, found \
                 {found:#04x}",
                wire::plural(*count, "byte")
            ),
        }
    }
}

/// Generates blocks and checks them.
#[derive(Debug)]
pub struct BlockVerifier {
    method: Verify,
    pattern: Vec<u8>,
    unit: usize,
    start: u64,
    seed: u64,
    /// Generation of each block; empty for jobs that write nothing.
    generations: Vec<u32>,
    /// A block as expected, and one as found.
    expected: Vec<u8>,
    actual: Vec<u8>,
}

impl BlockVerifier {
    /// The verifier of a job; `None` if it does not verify.
    #[must_use]
    pub fn new(spec: &JobSpec) -> Option<Self> {
        let method = spec.verify?;
        let unit = usize::try_from(spec.unit).ok()?;
        let count = if spec.rw.write { spec.length / spec.unit } else { 0 };
        Some(Self {
            method,
            pattern: spec.verify_pattern.clone(),
            unit,
            start: spec.start,
            seed: spec.content_seed,
            generations: vec![0; usize::try_from(count).ok()?],
            expected: vec![0; unit],
            actual: vec![0; unit],
        })
    }

    /// Generates write data: fills `out`, which is as long as the operation.
    pub fn fill_write(&mut self, io: &Io, out: &mut [BufMut]) {
        let (mut piece, mut filled) = (0, 0);
        for at in self.block_offsets(io) {
            let index = self.index(at);
            let generation = match self.generations.get_mut(index) {
                Some(generation) => {
                    *generation = generation.wrapping_add(1).max(1);
                    *generation
                }
                None => 1,
            };
            self.fill_expected(at, self.seed, generation);
            let mut rest = &self.expected[..];
            while !rest.is_empty() && piece < out.len() {
                let room = &mut out[piece][filled..];
                let n = room.len().min(rest.len());
                room[..n].copy_from_slice(&rest[..n]);
                (filled, rest) = (filled + n, &rest[n..]);
                if filled == out[piece].len() {
                    (piece, filled) = (piece + 1, 0);
                }
            }
        }
    }

    /// Checks read data. Ignores blocks that this job should have written but has not.
    ///
    /// # Errors
    /// The first mismatching block.
    pub fn check(&mut self, io: &Io, data: &Bufs) -> Result<u64, Mismatch> {
        let mut checked = 0;
        for (n, at) in self.block_offsets(io).enumerate() {
            let generation = self.generations.get(self.index(at)).copied();
            if generation == Some(0) {
                continue;
            }
            data.slice(n * self.unit..(n + 1) * self.unit).copy_to(&mut self.actual);
            let length = self.unit as u64;
            self.check_block(at, generation).map_err(|found| Mismatch {
                at,
                length,
                kind: found,
            })?;
            checked += 1;
        }
        Ok(checked)
    }

    /// The blocks that this job has written, as byte offsets in order.
    pub fn written(&self) -> impl Iterator<Item = u64> + '_ {
        let places = self.generations.iter().zip(0u64..).filter(|(g, _)| **g != 0);
        places.map(|(_, n)| self.start + n * self.unit as u64)
    }

    /// The first such block from byte `at` on.
    #[must_use]
    pub fn written_from(&self, at: u64) -> Option<u64> {
        let first = self.index(at);
        let found = self.generations.get(first..)?.iter().position(|g| *g != 0)?;
        Some(self.start + ((first + found) * self.unit) as u64)
    }

    fn block_offsets(&self, io: &Io) -> impl Iterator<Item = u64> + use<> {
        (io.at..io.at + io.len).step_by(self.unit)
    }

    fn index(&self, at: u64) -> usize {
        usize::try_from((at - self.start) / self.unit as u64).unwrap_or(usize::MAX)
    }

    /// Fills [`Self::expected`] with the expected contents.
    fn fill_expected(&mut self, at: u64, seed: u64, generation: u32) {
        if self.method == Verify::Pattern {
            // Starts anew in every block, as in fio.
            let pattern = self.pattern.iter().cycle();
            self.expected.iter_mut().zip(pattern).for_each(|(byte, wanted)| *byte = *wanted);
            return;
        }
        let (head, data) = self.expected.split_at_mut(HEADER);
        SplitMix64::new(mix(seed ^ mix(at)) ^ u64::from(generation)).fill(data);
        let mut header = Header {
            magic: MAGIC,
            length: U32::new(u32::try_from(self.unit).unwrap_or(u32::MAX)),
            method: method_code(self.method),
            zero: [0; 3],
            offset: U64::new(at),
            seed: U64::new(seed),
            generation: U32::new(generation),
            checksum: U32::ZERO,
            sum: data_checksum(self.method, data),
            zeroes: [0; 8],
        };
        header.checksum = U32::new(crc32c(header.as_bytes()));
        head.copy_from_slice(header.as_bytes());
    }

    /// Checks [`Self::actual`]. `generation` is that of the block if this job has written it.
    fn check_block(&mut self, at: u64, generation: Option<u32>) -> Result<(), MismatchKind> {
        if self.method == Verify::Pattern {
            self.fill_expected(at, self.seed, 0);
            return self.compare(at, 0);
        }
        let (head, data) = self.actual.split_at(HEADER);
        let bytes = head.first_chunk().copied().unwrap_or_default();
        let Ok(header) = Header::read_from_bytes(head) else {
            return Err(MismatchKind::NoHeader { bytes });
        };
        if header.magic != MAGIC {
            return Err(MismatchKind::NoHeader { bytes });
        }
        let expected = crc32c(Header { checksum: U32::ZERO, ..header }.as_bytes());
        if header.checksum.get() != expected {
            return Err(MismatchKind::TornHeader { found: header.checksum.get(), expected });
        }
        let (length, method) = (header.length.get(), header.method);
        if length as usize != self.unit || method != method_code(self.method) {
            return Err(MismatchKind::WrongFormat { length, method });
        }
        if header.offset.get() != at {
            return Err(MismatchKind::WrongOffset { offset: header.offset.get() });
        }
        if let Some(expected) = generation {
            let (seed, found) = (header.seed.get(), header.generation.get());
            if seed != self.seed {
                return Err(MismatchKind::WrongSeed { found: seed, expected: self.seed });
            }
            if found != expected {
                return Err(MismatchKind::WrongGeneration { found, expected });
            }
        }
        if self.method != Verify::Meta && header.sum != data_checksum(self.method, data) {
            self.fill_expected(at, header.seed.get(), header.generation.get());
            return self.compare(at, HEADER);
        }
        Ok(())
    }

    /// Compares both blocks from byte `from` on.
    fn compare(&self, at: u64, from: usize) -> Result<(), MismatchKind> {
        if self.expected[from..] == self.actual[from..] {
            return Ok(());
        }
        let pairs = self.expected.iter().zip(&self.actual).enumerate().skip(from);
        let mut wrong = pairs.filter(|(_, (a, b))| a != b);
        match wrong.next() {
            None => Ok(()),
            Some((n, (&expected, &found))) => {
                let (byte, count) = (at + n as u64, 1 + wrong.count());
                Err(MismatchKind::WrongData { byte, found, expected, count })
            }
        }
    }
}

fn method_code(method: Verify) -> u8 {
    match method {
        Verify::Crc32c => 1,
        Verify::Md5 => 2,
        Verify::Meta => 3,
        Verify::Pattern => 0,
    }
}

fn data_checksum(method: Verify, data: &[u8]) -> [u8; 16] {
    let mut out = [0; 16];
    match method {
        Verify::Crc32c => out[..4].copy_from_slice(&crc32c(data).to_le_bytes()),
        Verify::Md5 => out.copy_from_slice(&Md5::digest(data)),
        Verify::Meta | Verify::Pattern => {}
    }
    out
}

#[cfg(test)]
mod tests;
