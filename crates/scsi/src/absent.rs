//! Commands for addresses where there is no logical unit, and for the well-known logical unit
//! REPORT LUNS (SAM-5 5.11, SPC-4 clause 8).

use crate::cdb::Cdb;
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

/// Answers a command whose address is not that of a unit in [`Arrival::luns`].
#[must_use]
pub fn answer(address: Address, arrival: &Arrival<'_>) -> Reply {
    let cmd = Incoming {
        cdb: Cdb::new(arrival.cdb),
        nexus: NexusId::NOBODY,
        window: arrival.window,
        luns: arrival.luns,
        rights: arrival.known.rights,
    };
    match outcome(address, &cmd) {
        Ok(Outcome::Done { data, wanted }) => Reply::good(data, wanted, cmd.window.data_in),
        Ok(Outcome::Accept(_)) => Reply::check(&NOT_THERE, Format::Fixed),
        Err(refusal) => refusal.into_reply(Format::Fixed),
    }
}

const NOT_THERE: Sense = Sense::illegal(Code::LOGICAL_UNIT_NOT_SUPPORTED);

fn outcome(address: Address, cmd: &Incoming<'_>) -> Result<Outcome, Refusal> {
    let well_known = address == Address::ReportLuns;
    let (peripheral, refusal, sense) = if well_known {
        let no_sense = Sense::new(Key::NoSense, Code::NONE);
        (Peripheral::WellKnown, Sense::illegal(Code::INVALID_OPERATION_CODE), no_sense)
    } else {
        (Peripheral::Absent, NOT_THERE, NOT_THERE)
    };
    let opcode = cmd.cdb.opcode();
    let answered = match opcode {
        INQUIRY | REPORT_LUNS | REQUEST_SENSE => true,
        TEST_UNIT_READY => well_known,
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
