//! Arbitrary bytes in the place of blocks that say what they are, and blocks that were changed.
//! Shared by the fuzz target and a property test. What must hold is asserted:
//!
//! * nothing panics, and what is told of a block is inside it;
//! * what was written is found right as it is;
//! * what says anything else of itself, as a block elsewhere or an older write does, is not, where
//!   the job has written.
#![allow(clippy::unwrap_used)]

use block::{BufferPool, Bufs, Info, MemoryClass};
use load::job::{Dir, Job};
use load::pattern::Io;
use load::spec::JobSpec;
use load::verify::{BlockVerifier, Mismatch, MismatchKind};
use rt::buf::copy_in;

/// Length of a block, and of an operation of four of them.
const UNIT: usize = 512;
const BYTES: usize = 4 * UNIT;

/// A target of 64 KiB.
const INFO: Info = Info {
    block_size: 512,
    blocks: 128,
    metadata_blocks: 0,
    physical_block_size: 4096,
    max_transfer_blocks: 128,
    unmap_granularity_blocks: 1,
    unmap_zeroes: true,
    volatile_cache: true,
    native_fua: false,
    read_only: false,
    overhead_bytes: 0,
};

fn blocks(method: &str, rw: &str) -> BlockVerifier {
    let mut job = Job::default();
    let keys = [("rw", rw), ("bs", "512"), ("verify", method), ("verify_pattern", "0x0102030405")];
    for (name, value) in keys {
        job.set(name, Some(value)).unwrap();
    }
    BlockVerifier::new(&JobSpec::new(&job, 0, &INFO, 0).unwrap()).unwrap()
}

fn judge(
    blocks: &mut BlockVerifier,
    pool: &BufferPool,
    io: &Io,
    bytes: &[u8],
) -> Result<u64, Mismatch> {
    let credit = pool.account().try_credit(BYTES, MemoryClass::LocalIo).unwrap();
    let judged = blocks.check(io, &copy_in(&credit, bytes));
    if let Err(mismatch) = &judged {
        let Mismatch { at, length, kind: found } = mismatch;
        assert!(*length == UNIT as u64 && (io.at..io.at + io.len).contains(at), "{mismatch:?}");
        assert!(!mismatch.to_string().is_empty());
        if let MismatchKind::WrongData { byte, found, expected, count } = found {
            assert!((*at..at + length).contains(byte) && (1..=UNIT).contains(count));
            assert_ne!(found, expected);
        }
    }
    judged
}

/// What the job writes there now.
fn written(blocks: &mut BlockVerifier, pool: &BufferPool, io: &Io) -> Vec<u8> {
    let credit = pool.account().try_credit(BYTES, MemoryClass::LocalIo).unwrap();
    let mut out = credit.alloc(BYTES);
    blocks.fill_write(io, &mut out);
    Bufs::from(out).to_vec()
}

/// Plays a script: how it is checked and where, and changes of what was written, of two bytes for
/// their place and one for what is put there; or all of the bytes.
pub(crate) fn run(script: &[u8]) {
    let Some((&[how, place], changes)) = script.split_first_chunk() else { return };
    let method = ["crc32c", "md5", "meta", "pattern"][usize::from(how % 4)];
    let io = Io { dir: Dir::Write, at: u64::from(place % 32) * BYTES as u64, len: BYTES as u64 };
    let pool = BufferPool::new(1 << 20).unwrap();
    // One that has written nothing and only looks; one that has.
    let (mut looks, mut writes) = (blocks(method, "read"), blocks(method, "write"));
    let good = written(&mut writes, &pool, &io);
    assert_eq!(judge(&mut looks, &pool, &io, &good), Ok(4), "{method}");
    assert_eq!(judge(&mut writes, &pool, &io, &good), Ok(4), "{method}");
    let mut bytes = good.clone();
    if how >= 0x80 {
        bytes.iter_mut().zip(changes).for_each(|(to, from)| *to = *from);
    } else {
        for &[a, b, value] in changes.as_chunks().0 {
            bytes[usize::from(u16::from_le_bytes([a, b])) % BYTES] ^= value;
        }
    }
    let (looked, judged) =
        (judge(&mut looks, &pool, &io, &bytes), judge(&mut writes, &pool, &io, &bytes));
    // Magic, length, method; offset, seed, generation. Sums may be met by who wants to.
    let said = |bytes: &[u8]| {
        let said = bytes.chunks(UNIT).map(|b| [&b[..13], &b[16..36]].concat());
        said.collect::<Vec<_>>()
    };
    if said(&bytes) != said(&good) {
        assert!(judged.is_err(), "{method}: what says something else is found right");
    }
    assert!(judged.is_err() || looked.is_ok(), "who knows more sees more");
    // A newer write of the same blocks: the older one is lost, and is known to be.
    written(&mut writes, &pool, &io);
    if method != "pattern" {
        assert!(judge(&mut writes, &pool, &io, &good).is_err(), "{method}: a lost write");
    }
}
