//! Parsers of what targets and units report, as [`Session`](super::Session) and [`Lun`](super::Lun)
//! use them, for tests and fuzzing.

use std::net::SocketAddr;

use block::{Error, Lba};

use super::active_session::{self, MAX_LUN_LIST_BYTES, ScsiFailure};
use super::connect;
use super::discovery::{self, DiscoveredTarget};
use super::identity::{UnitDescription, UnitPages};
use super::response_action::{ResponseAction, is_not_started, response_action};
use super::sense::Sense;

/// Raw data of a unit: INQUIRY, the pages 83h, B0h and B2h, READ CAPACITY, MODE SENSE.
pub type RawPages = [Vec<u8>; 6];

/// Parses the data of a unit.
#[must_use]
pub fn described(read: RawPages) -> Option<UnitDescription> {
    let [inquiry, identification, limits, provisioning, capacity, caching] = read;
    UnitPages { inquiry, identification, limits, provisioning, capacity, caching }.describe()
}

/// Parses a LUN list read with a buffer of `room` bytes. `Some(None)` asks to read it again with
/// the largest buffer, whose size is returned as well.
#[must_use]
pub fn units(list: &[u8], room: u32) -> Option<(Option<Vec<u16>>, u32)> {
    Some((active_session::parse_lun_list(list, room).ok()?, MAX_LUN_LIST_BYTES))
}

/// Parses a SendTargets response.
#[must_use]
pub fn targets(text: &[u8], asked: SocketAddr) -> Option<Vec<DiscoveredTarget>> {
    discovery::parse(text, asked).ok()
}

/// Parses the address of a redirection.
#[must_use]
pub fn portal(text: &str) -> Option<SocketAddr> {
    connect::parse_portal(text)
}

/// Evaluates the answer to a command that begins at `at`: its sense data, whether the command was
/// not executed, and the error that is returned at once, if any.
#[must_use]
pub fn evaluated(
    (status, sense): (u8, &[u8]),
    at: Lba,
    writes: bool,
) -> (Option<Sense>, bool, Option<Error>) {
    let said = ScsiFailure { status, sense: Sense::parse(sense) };
    let error = match response_action(said, at, writes) {
        ResponseAction::Failed(error) => Some(error),
        _ => None,
    };
    (said.sense, is_not_started(said), error)
}
