//! Buffer memory: how many volumes it supports, and findings when it is short (RFD 0037).

use api::{ApiError, ErrorCode, Finding, Severity};

use crate::finding;
use crate::node_facts::NodeFacts;

/// Buffer memory that a volume needs for one command at a time, in bytes: a data block, its
/// metadata, a page of its log, and an answer to another node.
const VOLUME_BYTES: u64 = 16 << 10;

/// How many volumes `cores` cores support, each with `pool_bytes` of buffer memory.
fn max_volumes(cores: usize, pool_bytes: u64) -> usize {
    usize::try_from(pool_bytes / VOLUME_BYTES).unwrap_or(usize::MAX).saturating_mul(cores)
}

/// The least `cores.memory` in MiB with which `cores` cores support `volumes` volumes.
fn min_memory_mib(volumes: usize, cores: usize) -> u64 {
    let each = volumes.div_ceil(cores.max(1)) as u64;
    each.saturating_mul(VOLUME_BYTES).div_ceil(1 << 20).max(16)
}

/// Fails if the memory does not support one volume more than `count`.
pub fn check_memory(count: usize, cores: usize, pool_bytes: u64) -> Result<(), ApiError> {
    let most = max_volumes(cores, pool_bytes);
    if count < most {
        return Ok(());
    }
    let each = pool_bytes >> 20;
    let message = format!(
        "{each} MiB of buffer memory per core is enough for {} on {}, and there are {count}",
        wire::plural(most, "volume"),
        wire::plural(cores, "core")
    );
    let least = min_memory_mib(count + 1, cores);
    Err(ApiError::new(ErrorCode::Conflict, message).with_hint(format!(
        "set cores.memory to \"{least}MiB\" or more in the configuration and restart the node, or \
         delete volumes"
    )))
}

/// Findings about short memory: waiting commands, and more volumes than it supports.
pub fn findings(facts: &NodeFacts, findings: &mut Vec<Finding>) {
    for core in &facts.cores {
        let Some(short) = core.memory.shortage_duration else { continue };
        let (waiting, refused) = (core.memory.waiting, core.memory.timed_out_waits);
        let message = format!(
            "buffer memory of core {} has been short for {} s: {} waiting for it, and {refused} \
             rejected with a retry status since the start",
            core.core,
            short.as_secs(),
            wire::plural(waiting, "command")
        );
        let hint = "raise cores.memory in the configuration and restart the node, or spread its \
                    volumes over more cores (cores.count) or nodes";
        findings.push(finding(Severity::Warning, node_subject(facts), message, Some(hint)));
    }
    let cores = facts.cores.len();
    let Some(pool_bytes) = facts.cores.iter().map(|core| core.memory.total).min() else { return };
    let (count, most) = (facts.volumes.len(), max_volumes(cores, pool_bytes));
    if count > most {
        let least = min_memory_mib(count, cores);
        let message = format!(
            "it has {}, and {} MiB of buffer memory per core on {} is enough for {most}: commands \
             will be rejected with a retry status",
            wire::plural(count, "volume"),
            pool_bytes >> 20,
            wire::plural(cores, "core")
        );
        let hint = format!("set cores.memory to \"{least}MiB\" or more, and restart the node");
        findings.push(finding(Severity::Warning, node_subject(facts), message, Some(&hint)));
    }
}

fn node_subject(facts: &NodeFacts) -> String {
    format!("node {}", facts.node.name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_volume_beyond_what_the_memory_serves_is_refused_with_the_setting_to_raise() {
        assert!(check_memory(1023, 1, 16 << 20).is_ok());
        let refused = check_memory(1024, 1, 16 << 20).unwrap_err();
        assert_eq!(
            refused.message,
            "16 MiB of buffer memory per core is enough for 1024 volumes on 1 core, and there are \
             1024"
        );
        assert!(refused.hint.is_some_and(|hint| hint.contains("cores.memory to \"17MiB\"")));
        assert!(check_memory(4000, 1, 256 << 20).is_ok(), "the default is no limit");
        assert!(check_memory(2047, 2, 16 << 20).is_ok());
    }
}
