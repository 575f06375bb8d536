//! What targets and units say of themselves, read as [`Session`](super::Session) and [`Lun`](super::Lun) read it: for tests
//! and fuzzing.

use std::net::SocketAddr;

use block::{Error, Lba};

use super::connect;
use super::discovery::{self, Found};
use super::identity::{Described, Pages};
use super::live::{self, MOST_LUNS_BYTES, Refusal};
use super::sense::Sense;
use super::verdict::{Verdict, verdict, was_not_begun};

/// What was read of a unit: INQUIRY, the pages 83h, B0h and B2h, READ CAPACITY, MODE SENSE.
pub type Read = [Vec<u8>; 6];

/// Reads what a unit says of itself.
#[must_use]
pub fn described(read: Read) -> Option<Described> {
    let [inquiry, identification, limits, provisioning, capacity, caching] = read;
    Pages { inquiry, identification, limits, provisioning, capacity, caching }.describe()
}

/// Reads a list of units that was asked for with room for `room` bytes; `Some(None)` asks for it again, with the most room
/// that is ever given, which is told as well.
#[must_use]
pub fn units(list: &[u8], room: u32) -> Option<(Option<Vec<u16>>, u32)> {
    Some((live::units(list, room).ok()?, MOST_LUNS_BYTES))
}

/// Reads what SendTargets gives.
#[must_use]
pub fn targets(text: &[u8], asked: SocketAddr) -> Option<Vec<Found>> {
    discovery::parse(text, asked).ok()
}

/// Reads where a target leads to.
#[must_use]
pub fn portal(text: &str) -> Option<SocketAddr> {
    connect::portal(text)
}

/// Judges an answer to a command that begins at `at`: what its sense data says, whether the command has not begun, and the
/// error that is told at once, if it is one.
#[must_use]
pub fn judged(
    (status, sense): (u8, &[u8]),
    at: Lba,
    writes: bool,
) -> (Option<Sense>, bool, Option<Error>) {
    let said = Refusal { status, sense: Sense::parse(sense) };
    let error = match verdict(said, at, writes) {
        Verdict::Failed(error) => Some(error),
        _ => None,
    };
    (said.sense, was_not_begun(said), error)
}
