//! Buffer memory: how many volumes it serves, and what is said when it is short (RFD 0037).

use api::{ApiError, Code, Finding, Severity};

use super::status::{Facts, finding};

/// What a volume has to be able to get of its core's buffer memory for one command at a time: a
/// block of data, what goes with it, a page of its log, and an answer to another node.
const VOLUME_BYTES: u64 = 16 << 10;

/// How many volumes `cores` cores serve, each with `pool_bytes` of buffer memory.
fn volumes_for(cores: usize, pool_bytes: u64) -> usize {
    usize::try_from(pool_bytes / VOLUME_BYTES).unwrap_or(usize::MAX).saturating_mul(cores)
}

/// The least `cores.pool` in MiB with which `cores` cores serve `volumes`.
fn least_pool_mib(volumes: usize, cores: usize) -> u64 {
    let each = volumes.div_ceil(cores.max(1)) as u64;
    each.saturating_mul(VOLUME_BYTES).div_ceil(1 << 20).max(16)
}

/// Whether there is room for one volume beside the `count` that there are.
pub(super) fn check_room(count: usize, cores: usize, pool_bytes: u64) -> Result<(), ApiError> {
    let most = volumes_for(cores, pool_bytes);
    if count < most {
        return Ok(());
    }
    let each = pool_bytes >> 20;
    let message = format!(
        "buffer memory of {each} MiB a core serves {} on {}, and there are {count}",
        wire::count(most, "volume"),
        wire::count(cores, "core")
    );
    let least = least_pool_mib(count + 1, cores);
    Err(ApiError::new(Code::Conflict, message).hint(format!(
        "set cores.pool to \"{least}MiB\" or more in the configuration and restart the node, or \
         delete volumes"
    )))
}

/// Memory that is too short for what is asked of it, and volumes that it is too small for.
pub(super) fn findings(facts: &Facts, findings: &mut Vec<Finding>) {
    for core in &facts.cores {
        let Some(short) = core.pool.short_for else { continue };
        let (waiting, refused) = (core.pool.waiting, core.pool.refused);
        let message = format!(
            "buffer memory of core {} has been short for {} s: {} waiting for it, and {refused} told \
             to try again since the start",
            core.core,
            short.as_secs(),
            wire::count(waiting, "command")
        );
        let hint = "raise cores.pool in the configuration and restart the node, or spread its \
                    volumes over more cores (cores.count) or nodes";
        findings.push(finding(Severity::Warning, node(facts), message, Some(hint)));
    }
    let cores = facts.cores.len();
    let Some(pool_bytes) = facts.cores.iter().map(|core| core.pool.total).min() else { return };
    let (count, most) = (facts.volumes.len(), volumes_for(cores, pool_bytes));
    if count > most {
        let least = least_pool_mib(count, cores);
        let message = format!(
            "it has {}, and buffer memory of {} MiB a core on {} serves {most}: commands will be \
             told to try again",
            wire::count(count, "volume"),
            pool_bytes >> 20,
            wire::count(cores, "core")
        );
        let hint = format!("set cores.pool to \"{least}MiB\" or more, and restart the node");
        findings.push(finding(Severity::Warning, node(facts), message, Some(&hint)));
    }
}

fn node(facts: &Facts) -> String {
    format!("node {}", facts.node.name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_volume_beyond_what_the_memory_serves_is_refused_with_the_setting_to_raise() {
        assert!(check_room(1023, 1, 16 << 20).is_ok());
        let refused = check_room(1024, 1, 16 << 20).unwrap_err();
        assert_eq!(
            refused.message,
            "buffer memory of 16 MiB a core serves 1024 volumes on 1 core, and there \
             are 1024"
        );
        assert!(refused.hint.is_some_and(|hint| hint.contains("cores.pool to \"17MiB\"")));
        assert!(check_room(4000, 1, 256 << 20).is_ok(), "the default is no limit");
        assert!(check_room(2047, 2, 16 << 20).is_ok());
    }
}
