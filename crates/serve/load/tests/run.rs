//! Jobs on real cores: in memory, in files, and over NVMe/TCP to our own server.

#[path = "../../initiator/tests/common/mod.rs"]
mod common;

use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use block::testing::faulty::{Effect, Faulty, OpKind, Rule};
use block::{Dev, Error, Layer, Lba, Mem, MemOptions};
use common::{HOSTNQN, SUBNQN, Site, TARGET, on_core};
use disk::RawDevice;
use load::benchmark::{Benchmark, BenchmarkPlan};
use load::engine::{JobRunner, Progress};
use load::job::{Dir, Job};
use load::measurement::{JobFailure, Measurement};
use load::open::{ExistingContents, HostIdentity, OpenSpec, inspect_path, lock_target, open};
use load::spec::JobSpec;
use load::verify::MismatchKind;
use rt::Core;
use rt::disk::OpenOptions;
use volume::Volume;

fn job(terms: &[(&str, &str)]) -> Job {
    let mut job = Job::default();
    terms.iter().for_each(|(name, value)| job.set(name, Some(value)).unwrap());
    job
}

async fn runner(core: &Core, dev: &Dev, terms: &[(&str, &str)]) -> JobRunner {
    let spec = JobSpec::new(&job(terms), 0, &dev.info(), 1).unwrap();
    JobRunner::new(core, dev.clone(), spec, Arc::new(Progress::default())).await.unwrap()
}

async fn measured(core: &Core, dev: &Dev, terms: &[(&str, &str)]) -> Measurement {
    let mut runner = runner(core, dev, terms).await;
    runner.run().await;
    runner.verify().await;
    runner.finish()
}

/// A size is moved, no more and no less, and all of it counts.
#[test]
fn a_size_is_moved_once_for_each_loop() {
    on_core(async |core| {
        let mem = Rc::new(Mem::new(MemOptions::new(512, 1 << 13)));
        let dev = Dev::shared(Rc::clone(&mem));
        for (rw, dir) in [
            ("write", Dir::Write),
            ("randread", Dir::Read),
            ("randwrite", Dir::Write),
            ("trim", Dir::Trim),
        ] {
            let terms = [("rw", rw), ("loops", "2"), ("iodepth", "7"), ("fsync", "100")];
            let found = measured(&core, &dev, &terms).await;
            assert_eq!(found.failure, None, "{rw}");
            assert_eq!(
                (found.direction(dir).ops, found.direction(dir).bytes),
                (2048, 8 << 20),
                "{rw}"
            );
            assert_eq!((found.ops(), found.direction(dir).latency.count()), (2048, 2048), "{rw}");
            let flushes = if dir == Dir::Read { 0 } else { 20 };
            assert_eq!(found.flushes.count(), flushes, "{rw}");
            assert!(found.elapsed > Duration::ZERO);
        }
        assert_eq!(mem.space_used(), 0, "all of it was trimmed");
        assert_eq!(core.buffer_pool().usage().overdrafts, 0, "memory was promised");
    });
}

/// Time decides, and the ramp does not count.
#[test]
fn a_time_is_kept_and_rates_are() {
    on_core(async |core| {
        let dev = Dev::new(Mem::new(MemOptions::new(4096, 1 << 10)));
        let terms = [
            ("rw", "randrw"),
            ("iodepth", "4"),
            ("runtime", "600ms"),
            ("ramp_time", "200ms"),
            ("time_based", "1"),
            ("rate_iops", "1000,500"),
        ];
        let begun = tokio::time::Instant::now();
        let found = measured(&core, &dev, &terms).await;
        let took = begun.elapsed();
        assert!(took >= Duration::from_millis(780), "{took:?}");
        assert!(found.elapsed <= Duration::from_millis(900), "{:?}", found.elapsed);
        // Half of a mixture waits for the other: each goes at the pace of the slower. On a busy
        // machine the measured time is longer.
        let most = u64::try_from(found.elapsed.as_millis()).unwrap() * 11 / 20;
        let (reads, writes) = (found.direction(Dir::Read).ops, found.direction(Dir::Write).ops);
        assert!((200..=most).contains(&writes), "{writes} in {:?} at 500 a second", found.elapsed);
        assert!(reads <= 2 * most, "{reads} in {:?} at 1000 a second", found.elapsed);
    });
}

/// What was written is found again, at any depth and size, also where reads and writes are mixed.
#[test]
fn what_was_written_is_verified() {
    on_core(async |core| {
        let dev = Dev::new(Mem::new(MemOptions::new(512, 1 << 13)));
        for terms in [
            &[("rw", "write"), ("bs", "64k"), ("iodepth", "4")][..],
            &[("rw", "randwrite"), ("bs", "4k"), ("iodepth", "32"), ("loops", "3")],
            &[("rw", "randrw"), ("bs", "4k"), ("iodepth", "32"), ("loops", "4")],
            &[("rw", "randrw"), ("bsrange", "1k-16k"), ("iodepth", "16"), ("norandommap", "1")],
            &[("rw", "rw"), ("bs", "2k"), ("iodepth", "64"), ("loops", "9")],
        ] {
            for method in ["crc32c", "md5", "meta", "pattern"] {
                let more = [("verify", method), ("verify_pattern", "0x12ab")];
                let found = measured(&core, &dev, &[terms, &more].concat()).await;
                assert_eq!(found.failure, None, "{terms:?} {method}");
                assert!(found.verified > 0, "{terms:?} {method}");
            }
        }
    });
}

/// Planted mistakes: a write that is acknowledged and lost, a bit that turns, blocks that change
/// places.
#[test]
fn corruption_is_detected_and_reported() {
    on_core(async |core| {
        let terms = [("rw", "randwrite"), ("verify", "crc32c"), ("iodepth", "8"), ("loops", "2")];
        let dev = Dev::new(Mem::new(MemOptions::new(512, 1 << 12)));
        let client = block::testing::TestClient::new(&dev, core.buffer_pool());
        let spoiled = async |what: &str| {
            let mut runner = runner(&core, &dev, &terms).await;
            let before = {
                let mut first = self::runner(&core, &dev, &terms[..3]).await;
                first.run().await;
                client.read(80, 8).await.unwrap().to_vec()
            };
            runner.run().await;
            let mut block = client.read(80, 8).await.unwrap().to_vec();
            match what {
                "lost" => block = before,
                "bit" => block[1000] ^= 0x10,
                "place" => block = client.read(160, 8).await.unwrap().to_vec(),
                _ => {}
            }
            client.write(80, &block, false).await.unwrap();
            runner.verify().await;
            match runner.finish().failure {
                Some(JobFailure::Mismatch(mismatch)) => {
                    assert_eq!((mismatch.at, mismatch.length), (80 * 512, 4096), "{what}");
                    Some(mismatch.kind)
                }
                None => None,
                other => panic!("{what}: {other:?}"),
            }
        };
        assert_eq!(spoiled("nothing").await, None);
        assert_eq!(
            spoiled("lost").await,
            Some(MismatchKind::WrongGeneration { found: 1, expected: 2 })
        );
        let bit = spoiled("bit").await.unwrap();
        assert!(matches!(bit, MismatchKind::WrongData { byte: 41_960, count: 1, .. }), "{bit:?}");
        assert_eq!(spoiled("place").await, Some(MismatchKind::WrongOffset { offset: 160 * 512 }));
    });
}

/// A device that fails ends the job, and says what has failed.
#[test]
fn an_error_ends_a_job() {
    on_core(async |core| {
        let (dev, faults) = Faulty::wrap(Dev::new(Mem::new(MemOptions::new(512, 1 << 13))), 1);
        let error = Error::Unreadable { at: Lba(0) };
        faults.add(Rule::new(Effect::Fail(error)).on(&[OpKind::Read]).times(1));
        let terms = [("rw", "read"), ("iodepth", "4"), ("runtime", "60"), ("time_based", "1")];
        let found = measured(&core, &dev, &terms).await;
        let failed = found.failure.unwrap();
        assert_eq!(failed, JobFailure::Operation { doing: "read", at: 0, error });
        assert_eq!(failed.to_string(), "read at byte 0: block 0 cannot be read");
    });
}

fn how(target: &str, writes: bool) -> OpenSpec {
    let host =
        Some(HostIdentity { nqn: HOSTNQN.to_owned(), id: [9; 16], secrets: None, tls_key: None });
    OpenSpec { target: target.parse().unwrap(), writes, direct: false, depth: 32, host, pin: None }
}

/// A device that drops what is written still has what an earlier run has left there.
#[test]
fn blocks_of_an_earlier_run_are_not_accepted() {
    on_core(async |core| {
        let mem = Rc::new(Mem::new(MemOptions::new(512, 1 << 13)));
        let terms = [("rw", "write"), ("size", "1m"), ("verify", "crc32c"), ("bs", "4k")];
        let run = async |dev: &Dev, chance: u64| {
            let spec = JobSpec::new(&job(&terms), 0, &dev.info(), chance).unwrap();
            let progress = Arc::new(Progress::default());
            let mut runner = JobRunner::new(&core, dev.clone(), spec, progress).await.unwrap();
            runner.run().await;
            runner.verify().await;
            runner.finish().failure
        };
        assert_eq!(run(&Dev::shared(Rc::clone(&mem)), 1).await, None);
        let (lossy, faults) = Faulty::wrap(Dev::shared(mem), 1);
        faults.add(Rule::new(Effect::Ignore).on(&[OpKind::Write]));
        let failed = run(&lossy, 2).await.expect("it is noticed");
        assert!(failed.to_string().contains("seed"), "{failed}");
    });
}

/// Two connections of their own, each with a job, to a volume of our own server.
#[test]
fn a_volume_is_measured_over_nvme_tcp() {
    on_core(async |core| {
        let site = Site::new(&core, 1 << 15).await;
        let uri = format!("nvme://{}/{SUBNQN}?nsid=1", site.at);
        let terms = [("rw", "randrw"), ("iodepth", "32"), ("verify", "crc32c"), ("size", "8m")];
        let one = open(&core, &how(&uri, true)).await.unwrap();
        let two = open(&core, &how(&uri, true)).await.unwrap();
        let other = [&terms[..3], &[("size", "4m"), ("offset", "8m"), ("bs", "64k")]].concat();
        let (a, b) = tokio::join!(measured(&core, &one, &terms), measured(&core, &two, &other));
        assert_eq!((a.failure.clone(), b.failure.clone()), (None, None));
        assert_eq!((a.ops(), b.ops()), (2048, 64));
        assert!(a.verified > 500 && b.verified > 10, "{} {}", a.verified, b.verified);
        for (uri, why) in [
            (format!("nvme://{}/{SUBNQN}?nsid=9", site.at), "there is no usable namespace 9"),
            (format!("nvme://{}/nqn.none", site.at), "nqn.none"),
            ("nvme://127.0.0.1:1/nqn.x".to_owned(), "127.0.0.1:1"),
            ("iscsi://127.0.0.1:1/iqn.x/0".to_owned(), "127.0.0.1:1"),
            ("iscsi://user@127.0.0.1/iqn.x/0".to_owned(), "the secret is missing"),
            ("nbd://127.0.0.1:1/x".to_owned(), "127.0.0.1:1"),
            ("nbd+unix:///x?socket=/nowhere".to_owned(), "/nowhere"),
        ] {
            let refused = open(&core, &how(&uri, false)).await.unwrap_err();
            assert!(refused.contains(why), "{refused}");
        }
    });
}

/// The same by iSCSI, and by NBD.
#[test]
fn a_volume_is_measured_over_iscsi_and_nbd() {
    on_core(async |core| {
        let site = Site::iscsi(&core, 1 << 15).await;
        let volume =
            Volume::new(Dev::new(Mem::new(MemOptions::new(512, 1 << 15))), block::Epoch::default());
        let at = nbd::Address::Tcp("127.0.0.1:0".parse().unwrap());
        let options = attach::nbd::Options::new("disk");
        let server = attach::nbd::Server::bind(&core, &volume, &at, options).await.unwrap();
        let nbd = format!("nbd://{}/disk", server.local_addr().unwrap());
        tokio::task::spawn_local(server.run(std::future::pending()));
        for uri in [format!("iscsi://{}/{TARGET}/1", site.at), nbd] {
            let terms = [("rw", "randrw"), ("iodepth", "32"), ("verify", "crc32c"), ("size", "8m")];
            let dev = open(&core, &how(&uri, true)).await.unwrap();
            let found = measured(&core, &dev, &terms).await;
            assert_eq!((found.failure.clone(), found.ops()), (None, 2048), "{uri}");
            assert!(found.verified > 500, "{uri}: {}", found.verified);
        }
    });
}

/// Several openings of a file by this process, and none by any other process.
#[test]
fn a_file_is_held_and_shared_by_jobs() {
    let dir = tempfile::tempdir().unwrap();
    on_core(async move |core| {
        let path = dir.path().join("file");
        let seen = inspect_path(&core, &path).await.unwrap();
        assert_eq!(seen.contents, ExistingContents::Absent);
        let how = how(path.to_str().unwrap(), true);
        let held = lock_target(&core, &path, &how, (&seen, Some(8 << 20))).await.unwrap();
        let seen = held.inspection(ExistingContents::Empty);
        let (one, two) = (open(&core, &how).await.unwrap(), open(&core, &how).await.unwrap());
        let terms = [("rw", "randwrite"), ("verify", "md5"), ("iodepth", "4"), ("size", "4m")];
        let other = [&terms[..], &[("offset", "4m")]].concat();
        let (a, b) = tokio::join!(measured(&core, &one, &terms), measured(&core, &two, &other));
        assert_eq!((a.failure, b.failure), (None, None));
        assert_eq!((a.verified, b.verified), (1024, 1024));
        let busy = lock_target(&core, &path, &how, (&seen, None)).await.unwrap_err();
        assert!(busy.contains("in use"), "{busy}");
        drop((held, one, two));
        let seen = inspect_path(&core, &path).await.unwrap();
        assert!(matches!(seen.contents, ExistingContents::Foreign(_)));
        // Another process, later, that only reads.
        let held = lock_target(&core, &path, &how, (&seen, None)).await.unwrap();
        let terms = [("rw", "randread"), ("verify", "md5"), ("iodepth", "4")];
        let again = measured(&core, &held.dev(), &terms).await;
        assert_eq!((again.failure, again.verified), (None, 2048));
    });
}

/// The layer itself, byte for byte what a file is.
#[test]
fn a_file_contains_what_was_written() {
    let dir = tempfile::tempdir().unwrap();
    on_core(async move |core| {
        let path = dir.path().join("file");
        let disk = core.open_disk(&path, OpenOptions::new().buffered(true).create(1 << 20)).await;
        let dev = Dev::new(RawDevice::new(disk.unwrap(), 512));
        let client = block::testing::TestClient::new(&dev, core.buffer_pool());
        assert_eq!((dev.info().blocks, dev.info().block_size), (2048, 512));
        client.write(3, &[7; 1024], true).await.unwrap();
        client.zero(4, 1, false).await.unwrap();
        client.flush().await.unwrap();
        let bytes = std::fs::read(&path).unwrap();
        assert_eq!(bytes.len(), 1 << 20);
        let expected = |i: usize| if (3 * 512..4 * 512).contains(&i) { 7 } else { 0 };
        assert!(bytes.iter().enumerate().all(|(i, b)| *b == expected(i)));
        assert_eq!(client.read(2048, 1).await.map(drop), Err(Error::OutOfRange));
        assert_eq!(
            Layer::name(&RawDevice::new(
                core.open_disk(
                    &path,
                    OpenOptions::new().buffered(true).read_only(true).shared(true)
                )
                .await
                .unwrap(),
                512
            )),
            "raw"
        );
    });
}

/// Who agreed to lose what was at a path has agreed to nothing else: not what comes there later,
/// nor what it is renamed to.
#[test]
fn a_file_that_appears_after_inspection_is_kept() {
    let dir = tempfile::tempdir().unwrap();
    let (path, other) = (dir.path().join("file"), dir.path().join("other"));
    let terms = [("rw", "write"), ("size", "1m"), ("direct", "0")];
    let run = |came: &dyn Fn()| {
        let job = Job { filename: Some(path.display().to_string()), ..job(&terms) };
        let plan = BenchmarkPlan {
            jobs: vec![job],
            cpus: vec![None],
            poll_window: Duration::ZERO,
            server: None,
            host: None,
        };
        let fleet = Benchmark::start(plan).unwrap();
        let wait = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        wait.block_on(async {
            let before = fleet.inspect(path.clone()).await.unwrap();
            came();
            (before, fleet.run(|_| true).await.map(drop))
        })
    };
    let precious = || std::fs::write(&path, [7; 1 << 20]).unwrap();
    let (before, refused) = run(&precious);
    assert_eq!(before, ExistingContents::Absent);
    assert!(refused.unwrap_err().contains("it did not exist"));
    let (before, refused) = run(&|| {
        std::fs::rename(&path, &other).unwrap();
        precious();
    });
    assert!(matches!(before, ExistingContents::Foreign(_) | ExistingContents::Empty), "{before:?}");
    assert!(refused.unwrap_err().contains("it has changed"));
    for kept in [&path, &other] {
        assert!(std::fs::read(kept).unwrap() == [7; 1 << 20], "{kept:?}");
    }
    assert_eq!(run(&|| {}).1, Ok(()));
    assert!(std::fs::read(&path).unwrap() != [7; 1 << 20]);
}

/// Each job opens what is held, whatever its name leads to by then.
#[test]
fn jobs_open_the_pinned_file() {
    let dir = tempfile::tempdir().unwrap();
    on_core(async move |core| {
        let (path, other) = (dir.path().join("file"), dir.path().join("other"));
        let how = how(path.to_str().unwrap(), true);
        let seen = inspect_path(&core, &path).await.unwrap();
        let held = lock_target(&core, &path, &how, (&seen, Some(1 << 20))).await.unwrap();
        std::fs::rename(&path, &other).unwrap();
        std::fs::write(&path, [7; 1 << 20]).unwrap();
        let how = OpenSpec { pin: Some(held.pin().clone()), ..how };
        let dev = open(&core, &how).await.unwrap();
        assert_eq!(measured(&core, &dev, &[("rw", "write")]).await.failure, None);
        assert!(std::fs::read(&path).unwrap() == [7; 1 << 20]);
    });
}
