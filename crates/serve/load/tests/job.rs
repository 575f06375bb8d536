//! Job files, with any contents, and the operations that jobs are made of.

mod fuzz_input;

use std::collections::BTreeSet;

use block::{Info, Layer, Mem, MemOptions};
use load::job::{Dir, Job, KEYS};
use load::pattern::{Io, Pattern};
use load::spec::JobSpec;
use proptest::prelude::*;

fn value() -> impl Strategy<Value = String> {
    let sensible = prop::sample::select(vec![
        "0",
        "1",
        "4k",
        "8k,",
        "4k,8k,12k",
        "512-64k",
        "1m",
        "50%",
        "100%",
        "randrw",
        "write",
        "randtrim",
        "crc32c",
        "pattern",
        "0xabcd",
        "\"ab\"",
        "10s",
        "18446744073709551615",
    ]);
    prop_oneof![4 => sensible.prop_map(str::to_owned), 1 => "[ -~]{0,12}"]
}

proptest! {
    #[test]
    fn arbitrary_text_does_not_panic(text in ".*") {
        fuzz_input::run(&text);
    }

    #[test]
    fn job_file_like_text_does_not_panic(
        lines in prop::collection::vec((prop::sample::select(KEYS), value()), 0..12),
    ) {
        let keys: String = lines.iter().map(|(key, value)| format!("{}={value}\n", key.name)).collect();
        fuzz_input::run(&format!("[global]\n{keys}[job]\n"));
        fuzz_input::run(&format!("[job]\n{keys}"));
        // One key at a time is refused less often.
        for (key, value) in lines {
            fuzz_input::run(&format!("[job]\nrw=randrw\n{}={value}\n", key.name));
        }
    }
}

fn info() -> Info {
    Mem::new(MemOptions::new(512, 1 << 15)).info()
}

fn job(terms: &[(&str, &str)]) -> Job {
    let mut job = Job::default();
    terms.iter().for_each(|(name, value)| job.set(name, Some(value)).unwrap());
    job
}

fn spec(terms: &[(&str, &str)]) -> Result<JobSpec, String> {
    JobSpec::new(&job(terms), 0, &info(), 0)
}

fn ios(terms: &[(&str, &str)]) -> Vec<Io> {
    Pattern::new(&spec(terms).unwrap()).collect()
}

/// fio's map: each block once in a pass, in an order that looks like none.
#[test]
fn random_places_come_once_in_a_pass() {
    let terms = [("rw", "randread"), ("size", "1m"), ("offset", "64k"), ("loops", "3")];
    let ios = ios(&terms);
    assert_eq!(ios.len(), 3 * 256);
    let all: BTreeSet<u64> = (0..256).map(|n| (64 << 10) + n * 4096).collect();
    for pass in ios.chunks(256) {
        assert_eq!(pass.iter().map(|io| io.at).collect::<BTreeSet<_>>(), all);
    }
    assert_ne!(ios[..256], ios[256..512], "another order in each pass");
    let [drawn, seeded] = [("norandommap", "1"), ("randseed", "5")]
        .map(|more| self::ios(&[&terms[..], &[more]].concat()));
    assert!(drawn[..256].iter().map(|io| io.at).collect::<BTreeSet<_>>().len() < 200);
    assert_ne!(seeded, ios);
    assert_eq!(self::ios(&terms), ios, "the same seed does the same");
}

#[test]
fn sequential_directions_go_each_its_own_way() {
    let ios = ios(&[("rw", "rw"), ("size", "64k"), ("bs", "4k,8k"), ("io_size", "256k")]);
    for dir in [Dir::Read, Dir::Write] {
        let mut at = 0;
        for io in ios.iter().filter(|io| io.dir == dir) {
            assert_eq!(io.at, at);
            at = if at + io.len == 64 << 10 { 0 } else { at + io.len };
        }
    }
    assert!(ios.iter().map(|io| io.len).sum::<u64>() >= 256 << 10);
}

#[test]
fn a_mixture_is_what_was_asked_for() {
    let ios = ios(&[("rw", "randrw"), ("rwmixread", "70"), ("loops", "10"), ("bs", "512")]);
    let reads = ios.iter().filter(|io| io.dir == Dir::Read).count();
    let share = reads * 1000 / ios.len();
    assert!((690..=710).contains(&share), "{share} of a thousand");
}

#[test]
fn sizes_of_a_range_all_come() {
    let ios = ios(&[("rw", "randwrite"), ("bsrange", "4k-16k"), ("loops", "4")]);
    let lens: BTreeSet<u64> = ios.iter().map(|io| io.len).collect();
    assert_eq!(lens, [4096, 8192, 12288, 16384].into());
}

/// No end is a very late one.
#[test]
fn any_amount_may_be_asked_for() {
    let spec = spec(&[("rw", "read"), ("size", "64k"), ("io_size", "18446744073709551615")]);
    let ios: Vec<Io> = Pattern::new(&spec.unwrap()).take(40).collect();
    assert!(ios.iter().all(|io| io.len == 4096) && ios.len() == 40);
}

#[test]
fn unsuitable_settings_are_reported() {
    for (terms, expected) in [
        (&[("bs", "1000")][..], "bs=1000: the target has blocks of 512 bytes"),
        (&[("bs", "2m")], "bs=2097152: the target moves at most 1 MiB at once"),
        (
            &[("size", "1g")],
            "size=1073741824: the target has 16777216 bytes, of which 16777216 come behind the offset",
        ),
        (&[("offset", "16m")], "offset: it is past the end of the target, which has 16 MiB"),
        (&[("offset", "512")], "offset=512: it is not a multiple of the block size, 4096"),
        (&[("size", "512")], "size=512: it is too small for one operation of 4096 bytes"),
        (&[("time_based", "1")], "time_based needs runtime"),
        (&[("rw", "rw"), ("bs", "4k,6k")], "bs=6144 is not a multiple of the smallest bs, 4096"),
        (&[("verify", "pattern")], "verify=pattern needs verify_pattern"),
        (
            &[("rw", "trim"), ("verify", "md5")],
            "verify: trimmed blocks cannot be distinguished from lost ones",
        ),
        (
            &[("bs", "1m"), ("iodepth", "65536")],
            "iodepth and bs take 64 GiB of memory; at most 8 GiB are taken",
        ),
    ] {
        let found = spec(terms).unwrap_err();
        let same = found == expected
            || expected.starts_with("iodepth") && found.starts_with("iodepth and bs take");
        assert!(same, "{found}");
    }
    let read_only = Info { read_only: true, ..info() };
    let refused = JobSpec::new(&job(&[("rw", "write")]), 0, &read_only, 0).unwrap_err();
    assert_eq!(refused, "the target is read-only");
}
