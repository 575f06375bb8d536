//! Parsers of what controllers report, as [`Controller`](super::Controller) and
//! [`Namespace`](super::Namespace) use them, for tests and fuzzing.

use std::collections::BTreeMap;

use ::nvme::DiscoveryEntry;
use ::nvme::log::{AnaState, DiscoveryHeader, LogId};
use zerocopy::FromBytes;

use super::active_association::{self, Event, MAX_NAMESPACES};
use super::discovery::{entries, length};
use super::identity::{ControllerCapabilities, Identity, NamespaceDescription, PathIdentity};

/// Parses Identify data of the controller 9 of `subnqn`, and of its command set if supported.
#[must_use]
pub fn abilities(
    controller: &[u8],
    command_set: Option<Vec<u8>>,
    (subnqn, is_discovery): (&str, bool),
    page_bytes: u64,
) -> Option<ControllerCapabilities> {
    let mut abilities =
        ControllerCapabilities::parse(controller, (9, subnqn, is_discovery), page_bytes).ok()?;
    abilities.apply_command_set_limits(command_set, page_bytes);
    Some(abilities)
}

/// Parses Identify data of a namespace and its list of identifiers.
#[must_use]
pub fn described(
    namespace: &[u8],
    list: &[u8],
    abilities: &ControllerCapabilities,
) -> Option<NamespaceDescription> {
    NamespaceDescription::parse(namespace, Identity::parse(list), abilities)
}

/// Whether a path to `now` may be used for a namespace that was opened as `before`.
#[must_use]
pub fn is_usable_for(before: &NamespaceDescription, now: &NamespaceDescription) -> bool {
    before.match_volume(now) == PathIdentity::Same
}

/// The capabilities that two controllers of one namespace share.
#[must_use]
pub fn least(a: &NamespaceDescription, b: &NamespaceDescription) -> NamespaceDescription {
    a.intersection(b)
}

/// Parses groups of the ANA log.
#[must_use]
pub fn states(groups: &[u8]) -> BTreeMap<u32, AnaState> {
    active_association::parse_ana_groups(groups)
}

/// Parses consecutive lists of active namespaces. Returns also whether all were read, and the
/// maximum count.
#[must_use]
pub fn namespaces(lists: &[&[u8]], highest: u32) -> Option<(Vec<u32>, usize)> {
    let mut out = Vec::new();
    for list in lists {
        if !active_association::append_namespaces(&mut out, list, highest).ok()? {
            break;
        }
    }
    Some((out, MAX_NAMESPACES))
}

/// Parses dword 0 of an event; returns the log that the host reads then, unless it is that of
/// namespaces or access states.
#[must_use]
pub fn event(result: u64) -> Option<LogId> {
    match Event::parse(result) {
        Event::Namespaces | Event::Ana => None,
        Event::Other(log) => Some(log),
    }
}

/// Parses a discovery log; `log` is header and records. Returns how many bytes of records are
/// requested, and the parsed records.
#[must_use]
pub fn discovery(log: &[u8]) -> Option<(usize, Vec<DiscoveryEntry>)> {
    let (header, records) = DiscoveryHeader::read_from_prefix(log).ok()?;
    let asked = length(&header).ok()?;
    Some((asked, entries(&records[..records.len().min(asked)])))
}
