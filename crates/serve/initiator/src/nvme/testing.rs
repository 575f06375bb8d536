//! What controllers say of themselves, read as [`Controller`](super::Controller) and [`Namespace`](super::Namespace) read
//! it: for tests and fuzzing.

use std::collections::BTreeMap;

use ::nvme::DiscoveryEntry;
use ::nvme::log::{AnaState, DiscoveryHeader, LogId};
use zerocopy::FromBytes;

use super::discovery::{entries, length};
use super::identity::{Abilities, Described, Identity};
use super::live::{self, Event, MOST_NAMESPACES};
use super::paths::Seen;

/// Reads Identify of the controller 9 of `subnqn`, and of its command set where it knows such a structure.
#[must_use]
pub fn abilities(
    controller: &[u8],
    command_set: Option<Vec<u8>>,
    (subnqn, is_discovery): (&str, bool),
    page_bytes: u64,
) -> Option<Abilities> {
    let mut abilities = Abilities::parse(controller, (9, subnqn, is_discovery), page_bytes).ok()?;
    abilities.limit(command_set, page_bytes);
    Some(abilities)
}

/// Reads Identify of a namespace, and its list of identifiers.
#[must_use]
pub fn described(namespace: &[u8], list: &[u8], abilities: &Abilities) -> Option<Described> {
    Described::parse(namespace, Identity::parse(list), abilities)
}

/// Whether a path to `now` may be used for a namespace that was opened as `before`.
#[must_use]
pub fn is_usable_for(before: &Described, now: &Described) -> bool {
    before.compare(now) == Seen::Same
}

/// What two controllers of one namespace can do both.
#[must_use]
pub fn least(a: &Described, b: &Described) -> Described {
    a.least(b)
}

/// Reads groups of the ANA log.
#[must_use]
pub fn states(groups: &[u8]) -> BTreeMap<u32, AnaState> {
    live::states(groups)
}

/// Reads lists of active namespaces, one after the other; whether all of them are read, and the most that there can be.
#[must_use]
pub fn namespaces(lists: &[&[u8]], highest: u32) -> Option<(Vec<u32>, usize)> {
    let mut out = Vec::new();
    for list in lists {
        if !live::go_on(&mut out, list, highest).ok()? {
            break;
        }
    }
    Some((out, MOST_NAMESPACES))
}

/// Reads dword 0 of an event: the log that it makes the host read, unless it is of namespaces or access states.
#[must_use]
pub fn event(result: u64) -> Option<LogId> {
    match Event::parse(result) {
        Event::Namespaces | Event::Ana => None,
        Event::Other(log) => Some(log),
    }
}

/// Reads a discovery log, of which `log` is header and records: how many bytes of records are asked for, and what those say
/// that are there.
#[must_use]
pub fn discovery(log: &[u8]) -> Option<(usize, Vec<DiscoveryEntry>)> {
    let (header, records) = DiscoveryHeader::read_from_prefix(log).ok()?;
    let asked = length(&header).ok()?;
    Some((asked, entries(&records[..records.len().min(asked)])))
}
