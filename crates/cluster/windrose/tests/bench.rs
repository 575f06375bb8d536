//! `windrose bench`: what it measures, and what it must not destroy.

use std::path::Path;

use crate::common::{TestNode, cli, texts};
use serde_json::Value;

/// Exit code, standard output, standard error.
fn bench(args: &[&str]) -> (Option<i32>, String, String) {
    let out = cli("unix:/nowhere", &[&["bench"], args].concat());
    let (stdout, stderr) = texts(&out);
    (out.status.code(), stdout, stderr)
}

fn refused(code: i32, args: &[&str], why: &str) {
    let (found, _, stderr) = bench(args);
    assert_eq!(found, Some(code), "{args:?}: {stderr}");
    assert!(stderr.contains(why), "{args:?}: {stderr}");
}

fn path(dir: &Path, name: &str) -> String {
    dir.join(name).to_str().unwrap().to_owned()
}

#[test]
fn a_file_is_made_measured_and_verified() {
    let dir = tempfile::tempdir().unwrap();
    let file = path(dir.path(), "file");
    let options = ["--direct=0", "--rw", "randrw", "--size", "4m", "--iodepth", "8", "--json"];
    let (code, stdout, stderr) = bench(&[&[&*file, "--verify"], &options[..]].concat());
    assert_eq!(code, Some(0), "{stderr}");
    let report: Value = serde_json::from_str(&stdout).unwrap();
    let job = &report["jobs"][0];
    let ops = |dir: &str| job[dir]["total_ios"].as_u64().unwrap();
    assert_eq!(ops("read") + ops("write"), 1024, "{stdout}");
    assert!(job["write"]["lat_ns"]["percentile"]["99.000000"].as_u64().unwrap() > 0);
    assert!(job["verified_blocks"].as_u64().unwrap() >= ops("write"));
    assert!(report["client_cpu"]["us_per_io"].as_f64().unwrap() > 0.0);
    // Now it exists.
    refused(2, &[&[&*file], &options[..]].concat(), "would be lost to writes");
    let before = std::fs::read(&file).unwrap();
    let (code, stdout, _) = bench(&[&*file, "--direct=0", "--rw", "read", "--bs=128k"]);
    assert_eq!(code, Some(0));
    assert!(stdout.contains("IOPS") && stdout.contains("client CPU"), "{stdout}");
    assert_eq!(std::fs::read(&file).unwrap(), before, "reading changes nothing");
    let (code, _, stderr) = bench(&[&[&*file, "--yes"], &options[..]].concat());
    assert_eq!(code, Some(0), "{stderr}");
    assert!(stderr.contains("is lost to writes"), "{stderr}");
}

/// A foreign write into a verified file.
#[test]
fn corruption_makes_it_fail() {
    let dir = tempfile::tempdir().unwrap();
    let file = path(dir.path(), "file");
    let (code, _, stderr) =
        bench(&[&file, "--direct=0", "--rw=write", "--size=1m", "--verify=md5"]);
    assert_eq!(code, Some(0), "{stderr}");
    let mut bytes = std::fs::read(&file).unwrap();
    bytes[123_456] ^= 1;
    std::fs::write(&file, bytes).unwrap();
    let (code, stdout, _) = bench(&[&file, "--direct=0", "--rw=read", "--verify=md5"]);
    assert_eq!(code, Some(1));
    let output = "1 byte wrong, the first at byte 123456";
    assert!(
        stdout.contains("FAILED: verify: block of 4096 bytes at byte 122880")
            && stdout.contains(output),
        "{stdout}"
    );
}

#[test]
fn a_job_file_runs_section_by_section() {
    let dir = tempfile::tempdir().unwrap();
    let (file, jobs) = (path(dir.path(), "file"), path(dir.path(), "jobs.fio"));
    let text = format!(
        "[global]\nioengine=libaio\ndirect=0\nfilename={file}\nsize=1m\n[fill]\nrw=write\nbs=64k\n\
         [use]\nstonewall\nrw=randread\nnumjobs=3\ngroup_reporting\n"
    );
    std::fs::write(&jobs, text).unwrap();
    let (code, stdout, stderr) = bench(&["--job-file", &jobs, "--json", "--bs=32k"]);
    assert_eq!(code, Some(0), "{stderr}");
    assert!(stderr.contains("ioengine=libaio has no effect"), "{stderr}");
    let report: Value = serde_json::from_str(&stdout).unwrap();
    assert_eq!(
        report["jobs"][0]["write"]["total_ios"], 32,
        "the command line goes before the file"
    );
    assert_eq!(
        (&report["jobs"][1]["read"]["total_ios"], &report["jobs"][1]["jobs"]),
        (&96.into(), &3.into())
    );
    std::fs::write(&jobs, "[a]\nrw=read\nzonemode=zbd\n").unwrap();
    refused(
        2,
        &["--job-file", &jobs],
        "jobs.fio: line 3: zonemode: a key of fio that windrose bench does not",
    );
}

#[test]
fn what_cannot_be_is_refused() {
    refused(2, &["x", "--bs=4KiB"], "write 4k");
    refused(2, &["ftp://host/x"], "ftp:// is unknown");
    refused(2, &["/nowhere", "--rw=randwrite", "--numjobs=2", "--verify"], "offset_increment");
    refused(
        1,
        &["/nowhere/x", "--rw=read"],
        "/nowhere/x: no such file or device; give size to create a file",
    );
    refused(1, &["iscsi://127.0.0.1:1/iqn.2026-01.x:y/0"], "127.0.0.1:1");
    refused(2, &["nvme://127.0.0.1:1/nqn.x", "--rw=write"], "its data would be lost to writes");
    refused(1, &["nvme://127.0.0.1:1/nqn.x", "--rw=read"], "127.0.0.1:1");
}

/// Measures a node's volume over NVMe/TCP, with the node's processor time; writing to its image is
/// refused.
#[test]
fn a_volume_of_a_node_is_measured() {
    let test_node = TestNode::new("");
    let node = test_node.start();
    test_node.ok(&["volume", "create", "web", "--size", "16M", "--allow", "any"]);
    let shown = test_node.json(&["volume", "show", "web"]);
    let word = |value: &Value| value.as_str().unwrap().to_owned();
    let (portal, nqn) = (word(&shown["nvme"]["portals"][0]), word(&shown["nvme"]["subsystem"]));
    let image = word(&shown["replicas"][0]["backing"]["path"]);
    let (uri, socket) = (format!("nvme://{portal}/{nqn}"), path(test_node.path(), "api.sock"));
    let options =
        ["--rw=randrw", "--iodepth=16", "--numjobs=2", "--size=8m", "--offset_increment=8m"];
    let (code, stdout, stderr) =
        bench(&[&[&*uri, "--yes", "--verify", "--node", &socket], &options[..]].concat());
    assert_eq!(code, Some(0), "{stderr}");
    assert!(
        stdout.contains("blocks verified") && stdout.contains("server CPU (the node at"),
        "{stdout}"
    );
    assert_eq!(node.stop(), Some(0));
    let before = std::fs::read(&image).unwrap();
    refused(1, &[&image, "--rw=write", "--yes", "--direct=0"], "contains a volume of Windrose");
    assert_eq!(std::fs::read(&image).unwrap(), before);
}
