//! Answers commands for addresses without a logical unit, or with one that is not available now,
//! and for the well-known logical unit REPORT LUNS (SAM-5 5.11, SPC-4 clause 8).

use crate::cdb::Cdb;
use crate::command::{Outcome, ParsedCommand, ReceivedCommand};
use crate::failure;
use crate::inquiry::{self, Peripheral};
use crate::lun::Address;
use crate::nexus::NexusId;
use crate::opcodes::TABLE;
use crate::power;
use crate::reply::{Refusal, Reply};
use crate::sense::{Sense, SenseCode, SenseFormat, SenseKey};
use crate::unit::UnitCapabilities;

const INQUIRY: u8 = 0x12;
const REPORT_LUNS: u8 = 0xa0;
const REQUEST_SENSE: u8 = 0x03;
const TEST_UNIT_READY: u8 = 0x00;

/// Why a mapped unit cannot be used. It must not be reported as gone: initiators would give it up
/// for good (RFD 0017, 2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unavailability {
    /// Temporarily: it is being opened.
    BecomingReady,
    /// For an unknown time: it cannot be opened here.
    Unavailable,
}

impl Unavailability {
    fn sense(self) -> Sense {
        match self {
            Self::BecomingReady => Sense::new(SenseKey::NotReady, SenseCode::BECOMING_READY),
            Self::Unavailable => failure::UNAVAILABLE,
        }
    }
}

/// The state of an absent unit.
struct AbsentUnit {
    peripheral: Peripheral,
    /// The sense data of failing commands.
    command_sense: Sense,
    /// The answer to REQUEST SENSE.
    request_sense: Sense,
    /// Whether TEST UNIT READY succeeds.
    ready: bool,
}

/// Answers a command whose address is not in [`ReceivedCommand::luns`].
#[must_use]
pub fn answer(address: Address, arrival: &ReceivedCommand<'_>) -> Reply {
    reply(
        arrival,
        &match address {
            Address::ReportLuns => AbsentUnit {
                peripheral: Peripheral::WellKnown,
                command_sense: Sense::illegal(SenseCode::INVALID_OPERATION_CODE),
                request_sense: Sense::new(SenseKey::NoSense, SenseCode::NONE),
                ready: true,
            },
            Address::Unit(_) | Address::Unsupported => AbsentUnit {
                peripheral: Peripheral::Absent,
                command_sense: NOT_SUPPORTED,
                request_sense: NOT_SUPPORTED,
                ready: false,
            },
        },
    )
}

/// Answers a command for a unit of [`ReceivedCommand::luns`] that is not available now.
#[must_use]
pub fn answer_unavailable(away: Unavailability, arrival: &ReceivedCommand<'_>) -> Reply {
    let (peripheral, sense) = (Peripheral::NotConnected, away.sense());
    reply(
        arrival,
        &AbsentUnit { peripheral, command_sense: sense, request_sense: sense, ready: false },
    )
}

fn reply(arrival: &ReceivedCommand<'_>, stand: &AbsentUnit) -> Reply {
    let cmd = ParsedCommand {
        cdb: Cdb::new(arrival.cdb),
        nexus: NexusId::NONE,
        expected_transfer: arrival.expected_transfer,
        luns: arrival.luns,
        rights: arrival.shared.rights,
    };
    match outcome(stand, &cmd) {
        Ok(Outcome::Done { data, full_transfer: wanted }) => {
            Reply::good(data, wanted, cmd.expected_transfer.data_in)
        }
        Ok(Outcome::Accept(_)) => Reply::check(&stand.command_sense, SenseFormat::Fixed),
        Err(refusal) => refusal.into_reply(SenseFormat::Fixed),
    }
}

const NOT_SUPPORTED: Sense = Sense::illegal(SenseCode::LOGICAL_UNIT_NOT_SUPPORTED);

fn outcome(stand: &AbsentUnit, cmd: &ParsedCommand<'_>) -> Result<Outcome, Refusal> {
    let &AbsentUnit { peripheral, command_sense: refusal, request_sense: sense, ready } = stand;
    let opcode = cmd.cdb.opcode();
    let answered = match opcode {
        INQUIRY | REPORT_LUNS | REQUEST_SENSE => true,
        TEST_UNIT_READY => ready,
        _ => false,
    };
    if !answered {
        return Err(refusal.into());
    }
    TABLE.lookup(cmd.cdb)?.check(cmd.cdb, UnitCapabilities::default())?;
    match opcode {
        REPORT_LUNS => inquiry::lun_list(cmd),
        REQUEST_SENSE => Ok(power::sense_data(&sense, cmd)),
        INQUIRY if cmd.cdb.byte(1) != 0 => Err(Sense::field(1, Some(0)).into()),
        INQUIRY if cmd.cdb.byte(2) != 0 => Err(Sense::field(2, None).into()),
        INQUIRY => {
            let data = inquiry::standard(peripheral, "", "", false);
            Ok(Outcome::data(data, u64::from(cmd.cdb.u16(3))))
        }
        _ => Ok(Outcome::GOOD),
    }
}
