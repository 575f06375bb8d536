//! Commands for addresses where there is no logical unit, or none for now, and for the well-known
//! logical unit REPORT LUNS (SAM-5 5.11, SPC-4 clause 8).

use crate::cdb::Cdb;
use crate::failure;
use crate::inquiry::{self, Peripheral};
use crate::lun::Address;
use crate::nexus::NexusId;
use crate::opcodes;
use crate::power;
use crate::reply::{Refusal, Reply};
use crate::sense::{Code, Format, Key, Sense};
use crate::unit::{Arrival, Incoming, Outcome};

const INQUIRY: u8 = 0x12;
const REPORT_LUNS: u8 = 0xa0;
const REQUEST_SENSE: u8 = 0x03;
const TEST_UNIT_READY: u8 = 0x00;

/// Why a unit that is mapped cannot be spoken to. It is not gone: initiators that hear that it is give it up for good
/// (RFD 0017, 2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Away {
    /// For a moment: it is being opened.
    Returning,
    /// Nobody knows for how long: it cannot be opened here.
    Unavailable,
}

impl Away {
    fn sense(self) -> Sense {
        match self {
            Self::Returning => Sense::new(Key::NotReady, Code::BECOMING_READY),
            Self::Unavailable => failure::UNAVAILABLE,
        }
    }
}

/// Who a command meets, where it meets no unit.
struct Stand {
    peripheral: Peripheral,
    /// How commands end that are not answered.
    refusal: Sense,
    /// What REQUEST SENSE tells.
    sense: Sense,
    /// Whether TEST UNIT READY ends well.
    ready: bool,
}

/// Answers a command whose address is not that of a unit in [`Arrival::luns`].
#[must_use]
pub fn answer(address: Address, arrival: &Arrival<'_>) -> Reply {
    reply(
        arrival,
        &match address {
            Address::ReportLuns => Stand {
                peripheral: Peripheral::WellKnown,
                refusal: Sense::illegal(Code::INVALID_OPERATION_CODE),
                sense: Sense::new(Key::NoSense, Code::NONE),
                ready: true,
            },
            Address::Unit(_) | Address::Nowhere => Stand {
                peripheral: Peripheral::Absent,
                refusal: NOT_THERE,
                sense: NOT_THERE,
                ready: false,
            },
        },
    )
}

/// Answers a command for a unit of [`Arrival::luns`] that is not there for now.
#[must_use]
pub fn answer_away(away: Away, arrival: &Arrival<'_>) -> Reply {
    let (peripheral, sense) = (Peripheral::Away, away.sense());
    reply(arrival, &Stand { peripheral, refusal: sense, sense, ready: false })
}

fn reply(arrival: &Arrival<'_>, stand: &Stand) -> Reply {
    let cmd = Incoming {
        cdb: Cdb::new(arrival.cdb),
        nexus: NexusId::NOBODY,
        window: arrival.window,
        luns: arrival.luns,
        rights: arrival.known.rights,
    };
    match outcome(stand, &cmd) {
        Ok(Outcome::Done { data, wanted }) => Reply::good(data, wanted, cmd.window.data_in),
        Ok(Outcome::Accept(_)) => Reply::check(&stand.refusal, Format::Fixed),
        Err(refusal) => refusal.into_reply(Format::Fixed),
    }
}

const NOT_THERE: Sense = Sense::illegal(Code::LOGICAL_UNIT_NOT_SUPPORTED);

fn outcome(stand: &Stand, cmd: &Incoming<'_>) -> Result<Outcome, Refusal> {
    let &Stand { peripheral, refusal, sense, ready } = stand;
    let opcode = cmd.cdb.opcode();
    let answered = match opcode {
        INQUIRY | REPORT_LUNS | REQUEST_SENSE => true,
        TEST_UNIT_READY => ready,
        _ => false,
    };
    if !answered {
        return Err(refusal.into());
    }
    opcodes::of(cmd.cdb)?.check(cmd.cdb, opcodes::Traits::default())?;
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
