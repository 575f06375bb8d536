//! LOG SENSE (SPC-4 6.8, 7.3; SBC-3 6.3). No counter can be reset by initiators, so there is no LOG
//! SELECT.

use crate::command::{Outcome, ParsedCommand};
use crate::reply::Refusal;
use crate::sense::Sense;
use crate::space::{ThinSpace, threshold_sets};
use crate::unit::LogicalUnit;

/// Page code and subpage code.
type Id = (u8, u8);

const SUPPORTED: Id = (0x00, 0x00);
const SUPPORTED_SUBPAGES: Id = (0x00, 0xff);
const PROVISIONING: Id = (0x0c, 0x00);
const EXCEPTIONS: Id = (0x2f, 0x00);

/// In ascending order (SPC-4 7.3, supported log pages).
const PAGES: [Id; 4] = [SUPPORTED, SUPPORTED_SUBPAGES, PROVISIONING, EXCEPTIONS];

/// PC: cumulative values.
const CUMULATIVE: u8 = 0x1;

/// FORMAT AND LINKING of the parameter control byte: a list in binary.
const BINARY_LIST: u8 = 0x03;

const MAX_PARAMETER: usize = 12;

/// A log parameter: its code, and the complete parameter with its header.
type Parameter = (u16, arrayvec::ArrayVec<u8, MAX_PARAMETER>);

impl LogicalUnit {
    fn log_pages(&self) -> impl Iterator<Item = Id> {
        let has_space = self.space.is_some();
        PAGES.into_iter().filter(move |&page| page != PROVISIONING || has_space)
    }
}

/// LOG SENSE.
pub(crate) fn sense(unit: &mut LogicalUnit, cmd: &ParsedCommand<'_>) -> Result<Outcome, Refusal> {
    const POINTER_FIELD: u16 = 5;
    let (control, code, subpage) = (cmd.cdb.byte(2) >> 6, cmd.cdb.byte(2) & 0x3f, cmd.cdb.byte(3));
    let pointer = cmd.cdb.u16(5);
    let id = (code, subpage);
    if !unit.log_pages().any(|page| page == id) {
        let known = unit.log_pages().any(|(c, _)| c == code);
        let field = if known { Sense::field(3, None) } else { Sense::field(2, Some(5)) };
        return Err(field.into());
    }
    let body = match id {
        SUPPORTED if pointer == 0 => {
            unit.log_pages().filter(|&(_, s)| s == 0).map(|(c, _)| c).collect()
        }
        SUPPORTED_SUBPAGES if pointer == 0 => unit.log_pages().flat_map(|(c, s)| [c, s]).collect(),
        SUPPORTED | SUPPORTED_SUBPAGES => return Err(Sense::field(POINTER_FIELD, None).into()),
        _ if control != CUMULATIVE => return Err(Sense::field(2, Some(7)).into()),
        _ => {
            from_pointer(&unit.parameters(id), pointer).ok_or(Sense::field(POINTER_FIELD, None))?
        }
    };
    Ok(Outcome::data(page(id, body), u64::from(cmd.cdb.u16(7))))
}

/// A page with its header (SPC-4 7.3). Parameters are not saved (DS).
fn page((code, subpage): Id, body: Vec<u8>) -> Vec<u8> {
    const DS: u8 = 0x80;
    const SPF: u8 = 0x40;
    let mut flags = if code == 0 { 0 } else { DS };
    if subpage != 0 {
        flags |= SPF;
    }
    let mut out = vec![flags | code, subpage];
    out.extend(u16::try_from(body.len()).unwrap_or(u16::MAX).to_be_bytes());
    out.extend(body);
    out
}

/// The parameters from code `pointer` on; `None` if there are none.
fn from_pointer(parameters: &[Parameter], pointer: u16) -> Option<Vec<u8>> {
    let first = parameters.iter().position(|&(code, _)| code >= pointer)?;
    Some(parameters[first..].iter().flat_map(|(_, bytes)| bytes.iter().copied()).collect())
}

impl LogicalUnit {
    fn parameters(&self, id: Id) -> Vec<Parameter> {
        match (id, &self.space) {
            (PROVISIONING, Some(space)) => self.resources(space).to_vec(),
            _ => vec![exceptions()],
        }
    }

    /// Available and used LBA mapping resources, in threshold sets (SBC-3 6.3). Other volumes share
    /// the same disks.
    fn resources(&self, space: &ThinSpace) -> [Parameter; 2] {
        const AVAILABLE: u16 = 0x0001;
        const USED: u16 = 0x0002;
        const DEDICATED: u8 = 0x01;
        const SHARED: u8 = 0x02;
        let resource = |code: u16, blocks: u64, scope: u8| {
            let [a, b, c, d] = threshold_sets(blocks, self.info.block_size).to_be_bytes();
            parameter(code, &[a, b, c, d, scope, 0, 0, 0])
        };
        [resource(AVAILABLE, space.available, SHARED), resource(USED, space.used, DEDICATED)]
    }
}

/// Informational exceptions general (SPC-4 7.3): none is pending, and there is no thermometer.
fn exceptions() -> Parameter {
    const NO_TEMPERATURE: u8 = 0xff;
    parameter(0x0000, &[0, 0, NO_TEMPERATURE, 0])
}

fn parameter(code: u16, value: &[u8]) -> Parameter {
    let mut out = arrayvec::ArrayVec::new();
    out.extend(code.to_be_bytes());
    out.extend([BINARY_LIST, value.len() as u8]);
    out.extend(value.iter().copied());
    (code, out)
}
