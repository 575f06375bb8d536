use block::{BufferPool, Info, MemoryClass};
use rt::buf::copy_in;

use super::*;
use crate::job::{Dir, Job};

fn info() -> Info {
    use block::{Layer, Mem, MemOptions};
    Mem::new(MemOptions::new(512, 1 << 12)).info()
}

fn blocks(method: &str) -> BlockVerifier {
    let mut job = Job::default();
    for (name, value) in
        [("rw", "write"), ("bs", "1k"), ("verify", method), ("verify_pattern", "0x0102030405")]
    {
        job.set(name, Some(value)).unwrap();
    }
    BlockVerifier::new(&JobSpec::new(&job, 0, &info(), 0).unwrap()).unwrap()
}

/// Write data of the four blocks from byte 4096 on.
fn written(blocks: &mut BlockVerifier, pool: &BufferPool) -> Vec<u8> {
    let credit = pool.account().try_credit(4096, MemoryClass::LocalIo).unwrap();
    let mut out = credit.alloc(4096);
    blocks.fill_write(&IO, &mut out);
    Bufs::from(out).to_vec()
}

const IO: Io = Io { dir: Dir::Write, at: 4096, len: 4096 };

fn found(blocks: &mut BlockVerifier, pool: &BufferPool, bytes: &[u8]) -> Result<u64, Mismatch> {
    let credit = pool.account().try_credit(4096, MemoryClass::LocalIo).unwrap();
    blocks.check(&IO, &copy_in(&credit, bytes))
}

#[test]
fn verification_detects_each_change() {
    let pool = BufferPool::new(1 << 20).unwrap();
    for (method, from) in [("crc32c", 0), ("md5", 0), ("pattern", 0), ("meta", 0)] {
        let mut blocks = blocks(method);
        let good = written(&mut blocks, &pool);
        assert_eq!(found(&mut blocks, &pool, &good), Ok(4), "{method}");
        let all = if method == "meta" { 64 } else { 1024 };
        for byte in from..all {
            let mut bad = good.clone();
            bad[1024 + byte] ^= 4;
            let mismatch = found(&mut blocks, &pool, &bad).expect_err(method);
            assert_eq!((mismatch.at, mismatch.length), (5120, 1024), "{method}");
            if byte >= 64 || method == "pattern" {
                let byte = byte as u64 + 5120;
                let was = good[(byte - 4096) as usize];
                let expected =
                    MismatchKind::WrongData { byte, found: was ^ 4, expected: was, count: 1 };
                assert_eq!(mismatch.kind, expected, "{method}");
            }
        }
    }
}

#[test]
fn valid_but_wrong_blocks_are_reported() {
    let pool = BufferPool::new(1 << 20).unwrap();
    let mut writer = blocks("crc32c");
    let first = written(&mut writer, &pool);
    let second = written(&mut writer, &pool);
    assert_eq!(found(&mut writer, &pool, &second), Ok(4));
    let mut tell = |bytes: &[u8]| found(&mut writer, &pool, bytes).expect_err("wrong").kind;
    assert_eq!(
        tell(&first),
        MismatchKind::WrongGeneration { found: 1, expected: 2 },
        "a lost write"
    );
    let moved = [&second[1024..], &second[..1024]].concat();
    assert_eq!(tell(&moved), MismatchKind::WrongOffset { offset: 5120 });
    assert_eq!(tell(&[0; 4096]), MismatchKind::NoHeader { bytes: [0; 8] });
    let md5 = written(&mut blocks("md5"), &pool);
    assert_eq!(tell(&md5), MismatchKind::WrongFormat { length: 1024, method: 2 });
    let mut other = blocks("crc32c");
    other.seed = 7;
    let other = written(&mut other, &pool);
    assert!(matches!(tell(&other), MismatchKind::WrongSeed { found: 7, .. }));
    let text = Mismatch { at: 5120, length: 1024, kind: tell(&first) }.to_string();
    assert_eq!(
        text,
        "verify: block of 1024 bytes at byte 5120: expected write 2 of this block, found write 1"
    );
}

/// A reading job accepts any intact block, of whatever job and generation.
#[test]
fn a_reader_needs_no_memory_of_the_writer() {
    let pool = BufferPool::new(1 << 20).unwrap();
    let mut writer = blocks("md5");
    writer.seed = 99;
    let good = written(&mut writer, &pool);
    let mut reader = blocks("md5");
    reader.generations.clear();
    assert_eq!(found(&mut reader, &pool, &good), Ok(4));
    let mut bad = good.clone();
    bad[4000] ^= 1;
    let mismatch = found(&mut reader, &pool, &bad).expect_err("changed");
    assert!(
        matches!(mismatch.kind, MismatchKind::WrongData { byte: 8096, count: 1, .. }),
        "{mismatch}"
    );
    assert_eq!(blocks("md5").written().count(), 0);
    assert_eq!(writer.written().collect::<Vec<_>>(), [4096, 5120, 6144, 7168]);
    assert_eq!((writer.written_from(5121), writer.written_from(8192)), (Some(5120), None));
}
