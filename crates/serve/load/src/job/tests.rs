use super::*;

const FILE: &str = "\
; a comment
[global]
ioengine=libaio
direct=1
bs=4k            # what most use
runtime=30
time_based

[database]
filename=/dev/shm/x
rw=randrw
rwmixread=70
iodepth=32
numjobs=4
group_reporting

[log]
stonewall
filename=nvme://host/nqn.x
bs=8k,64k
rw=write
size=1g
fsync=1
";

#[test]
fn a_job_file_is_read() {
    let jobs = parse(FILE).unwrap();
    let [database, log] = &jobs[..] else { panic!("{jobs:?}") };
    assert_eq!(database.name, "database");
    assert_eq!(database.filename.as_deref(), Some("/dev/shm/x"));
    assert_eq!(database.rw, Rw { read: true, write: true, trim: false, random: true });
    assert_eq!((database.rwmixread, database.iodepth, database.numjobs), (70, 32, 4));
    assert!(database.time_based && database.group_reporting && !database.stonewall);
    assert_eq!(database.runtime, Some(Duration::from_secs(30)));
    assert_eq!(database.notes.len(), 1, "ioengine has no effect, and that is said");
    assert_eq!(log.bs, [(8192, 8192), (65536, 65536), (65536, 65536)]);
    assert_eq!((log.size, log.fsync, log.stonewall), (Some(Amount::Bytes(1 << 30)), 1, true));
    assert_eq!(log.iodepth, 1, "what a section sets is its own");
}

#[test]
fn errors_name_their_line() {
    for (text, expected) in [
        (
            "[a]\nrw=read\nzonemode=zbd",
            "line 3: zonemode: a key of fio that windrose bench does not support",
        ),
        ("[a]\nfoo=1", "line 2: foo: unknown key"),
        (
            "[a]\nbs=4q",
            "line 2: bs: \"4q\" is not a size: use a number of bytes, or of k, m, g, t, p",
        ),
        ("[a]\nbs", "line 2: bs needs a value: bs=SIZE[,SIZE[,SIZE]]"),
        ("[a]\niodepth=0", "line 2: iodepth: 0 is not between 1 and 65536"),
        ("[a]\nbsrange=8k-4k", "line 2: bsrange: \"8k-4k\" ends before it begins"),
        (
            "[a]\nrw=trimwrite",
            "line 2: rw: trimwrite: fio supports it, but windrose bench does not",
        ),
        (
            "[a]\nioengine=psync",
            "line 2: ioengine: psync does one operation at a time; leave it out, and write iodepth=1",
        ),
        ("[a]\nsize=${SIZE}", "line 2: variables (${NAME}) are not supported"),
        ("[a]\ninclude b.fio", "line 2: include is not supported"),
        ("rw=read", "line 1: a line before the first section"),
        ("[a", "line 1: the section lacks its closing ]"),
        ("[global]\nrw=read", "there is no job: add a section besides [global]"),
    ] {
        assert_eq!(parse(text).map(drop).map_err(|e| e.to_string()), Err(expected.to_owned()));
    }
}

/// No key is both supported and refused, or listed twice.
#[test]
fn unknown_and_unsupported_keys_differ() {
    let mut names: Vec<&str> =
        KEYS.iter().flat_map(|k| [Some(k.name), k.alias]).flatten().collect();
    names.extend(FIO_ONLY);
    let all = names.len();
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), all);
}

#[test]
fn patterns_are_bytes() {
    let mut job = Job::default();
    for (text, expected) in [
        ("0xdeadbeef", &[0xde, 0xad, 0xbe, 0xef][..]),
        ("0xabc", &[0x0a, 0xbc]),
        ("\"abc\"", b"abc"),
        ("511", &[0xff, 1]),
        ("0", &[0]),
    ] {
        job.set("verify_pattern", Some(text)).unwrap();
        assert_eq!(job.verify_pattern, expected, "{text}");
    }
    for bad in ["0x", "0xg", "x", "", "0x\u{e9}"] {
        job.set("verify_pattern", Some(bad)).expect_err(bad);
    }
}
