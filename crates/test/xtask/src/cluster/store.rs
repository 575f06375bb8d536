//! The etcd processes of a cluster and their leader.

use crate::{node::Node, process::read_lossy};
use anyhow::{Context, Result, ensure};
use rustix::process::Pid;
use serde_json::Value;
use std::{fs, path::Path, process::Command};

/// The etcd processes that `node` runs: one or none.
pub(super) fn members_of(node: &Node) -> Result<Vec<Pid>> {
    let Ok(node) = node.process() else { return Ok(Vec::new()) };
    let mut members = Vec::new();
    for entry in fs::read_dir("/proc").context("no /proc")?.flatten() {
        let stat = read_lossy(&entry.path().join("stat")).unwrap_or_default();
        let Some((process, parent)) = etcd_of(&stat) else { continue };
        if u32::try_from(parent) == Ok(node) {
            members.extend(Pid::from_raw(process));
        }
    }
    Ok(members)
}

/// Makes one of `wanted`, which belong to one node, the leader of the etcd cluster with `members`.
pub(super) fn move_leader(members: &[Pid], wanted: &[Pid]) -> Result<()> {
    let members =
        members.iter().map(|member| StoreMember::of(*member)).collect::<Result<Vec<_>>>()?;
    let wanted = members.iter().find(|member| wanted.contains(&member.process));
    let wanted = wanted.context("the node runs no member of the store")?.id;
    let leader = members.iter().find(|member| member.id == member.leader);
    let leader = leader.context("no member leads the store")?;
    if leader.id != wanted {
        etcdctl(leader.process, &["move-leader", &format!("{wanted:x}")])?;
    }
    Ok(())
}

/// An etcd member, as reported by itself.
struct StoreMember {
    process: Pid,
    id: u64,
    /// Id of the leader.
    leader: u64,
}

impl StoreMember {
    fn of(process: Pid) -> Result<Self> {
        let output = etcdctl(process, &["endpoint", "status", "--write-out=json"])?;
        let (id, leader) =
            status_of(&output).with_context(|| format!("an odd answer: {output}"))?;
        Ok(Self { process, id, leader })
    }
}

/// The ids of the reporting member and of the leader, from `etcdctl endpoint status`.
fn status_of(output: &str) -> Option<(u64, u64)> {
    let output: Value = serde_json::from_str(output).ok()?;
    let status = output.get(0)?.get("Status")?;
    Some((status.pointer("/header/member_id")?.as_u64()?, status.get("leader")?.as_u64()?))
}

/// Runs etcdctl against the etcd process `process`, in its network and with its credentials.
fn etcdctl(process: Pid, words: &[&str]) -> Result<String> {
    let process = process.as_raw_nonzero().to_string();
    let line = read_lossy(&Path::new("/proc").join(&process).join("cmdline"))?;
    let mut command = Command::new("nsenter");
    command.args(["--target", &process, "--net", "etcdctl"]);
    for (flag, of) in [
        ("endpoints", "advertise-client-urls"),
        ("cacert", "trusted-ca-file"),
        ("cert", "cert-file"),
        ("key", "key-file"),
    ] {
        let flagged = |word: &str| word.strip_prefix(&format!("--{of}=")).map(str::to_owned);
        let value = line.split('\0').find_map(flagged);
        command.args(value.map(|value| format!("--{flag}={value}")));
    }
    let done = command.args(words).output().context("cannot run nsenter")?;
    let output = String::from_utf8_lossy(&done.stdout).into_owned();
    let why = String::from_utf8_lossy(&done.stderr);
    ensure!(done.status.success(), "etcdctl {}: {output}{why}", words.join(" "));
    Ok(output)
}

/// Process and parent of an etcd member, from its /proc/PID/stat.
fn etcd_of(stat: &str) -> Option<(i32, i32)> {
    let (process, rest) = stat.split_once(" (etcd) ")?;
    Some((process.parse().ok()?, rest.split_whitespace().nth(1)?.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn members_of_the_store_are_known_by_name_and_parent() {
        assert_eq!(etcd_of("17 (etcd) S 12 12 1 0"), Some((17, 12)));
        assert_eq!(etcd_of("17 (sh) S 12 12 1 0"), None);
    }

    #[test]
    fn a_member_tells_who_leads() {
        let output = r#"[{"Endpoint":"x","Status":{"header":{"member_id":13},"leader":18446744073709551615}}]"#;
        assert_eq!(status_of(output), Some((13, u64::MAX)));
        assert_eq!(status_of("[]"), None);
        assert_eq!(status_of("no"), None);
    }
}
