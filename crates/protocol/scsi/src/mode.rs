//! Mode pages: MODE SENSE and MODE SELECT (SPC-4 6.11 to 6.14, 7.5; SBC-3 6.4).
//!
//! The pages are shared by all initiators on all nodes, and not saved: a reset restores the
//! defaults.

mod pages;

use arrayvec::ArrayVec;

use pages::{Id, Ids};

use crate::command::{AdmittedOp, Outcome, ParsedCommand};
use crate::mode_parameters::ModeParameters;
use crate::reply::Refusal;
use crate::sense::{Sense, SenseCode};
use crate::unit::LogicalUnit;

const ALL_PAGES: u8 = 0x3f;
const ALL_SUBPAGES: u8 = 0xff;

const MODE_SENSE_10: u8 = 0x5a;
const MODE_SELECT_10: u8 = 0x55;

/// MODE SENSE(6), (10).
pub(crate) fn sense(unit: &mut LogicalUnit, cmd: &ParsedCommand<'_>) -> Result<Outcome, Refusal> {
    const DBD: u8 = 0x08;
    const LLBAA: u8 = 0x10;
    let long_header = cmd.cdb.opcode() == MODE_SENSE_10;
    let (control, code, subpage) = (cmd.cdb.byte(2) >> 6, cmd.cdb.byte(2) & 0x3f, cmd.cdb.byte(3));
    let wanted = selected_pages(&unit.pages(), code, subpage)?;
    let long_descriptor = long_header && cmd.cdb.has(1, LLBAA);
    let descriptor =
        if cmd.cdb.has(1, DBD) { ArrayVec::new() } else { unit.block_descriptor(long_descriptor) };
    let features = unit.mode_features();
    let mut pages = Vec::new();
    for id in wanted {
        pages.extend(match control {
            0 => pages::values(id, &unit.modes, features),
            1 => pages::changeable(id, features),
            2 => pages::values(id, &ModeParameters::default(&unit.info), features),
            _ => return Err(Sense::illegal(SenseCode::SAVING_NOT_SUPPORTED).into()),
        });
    }
    let header = unit.mode_header(long_header, long_descriptor, descriptor.len(), pages.len());
    let data = header.into_iter().chain(descriptor).chain(pages).collect();
    let allocation = if long_header { cmd.cdb.u16(7) } else { u16::from(cmd.cdb.byte(4)) };
    Ok(Outcome::data(data, u64::from(allocation)))
}

/// The pages selected by a page code and a subpage code (SPC-4 6.13).
fn selected_pages(all: &Ids, code: u8, subpage: u8) -> Result<Ids, Sense> {
    let all_subpages = subpage == ALL_SUBPAGES;
    if code == ALL_PAGES && subpage != 0 && !all_subpages {
        return Err(Sense::field(3, None));
    }
    let asked = |&(c, s): &Id| (code == ALL_PAGES || c == code) && (all_subpages || s == subpage);
    let pages: Ids = all.iter().copied().filter(asked).collect();
    if !pages.is_empty() {
        return Ok(pages);
    }
    let known = all.iter().any(|&(c, _)| c == code);
    Err(if known { Sense::field(3, None) } else { Sense::field(2, Some(5)) })
}

impl LogicalUnit {
    /// Mode parameter header (SPC-4 7.5).
    fn mode_header(
        &self,
        long: bool,
        long_descriptor: bool,
        descriptor: usize,
        pages: usize,
    ) -> ArrayVec<u8, 8> {
        const WP: u8 = 0x80;
        const DPOFUA: u8 = 0x10;
        let protected = self.is_read_only() || self.modes.swp;
        let device_specific = DPOFUA | if protected { WP } else { 0 };
        let (descriptor, pages) = (descriptor as u16, pages as u16);
        let mut header = ArrayVec::new();
        if long {
            header.extend((6 + descriptor + pages).to_be_bytes());
            header.extend([0, device_specific, u8::from(long_descriptor), 0]);
            header.extend(descriptor.to_be_bytes());
        } else {
            header.extend([(3 + descriptor + pages) as u8, 0, device_specific, descriptor as u8]);
        }
        header
    }

    /// Mode parameter block descriptor, short or long LBA (SBC-3 6.4).
    fn block_descriptor(&self, long: bool) -> ArrayVec<u8, 16> {
        let mut out = ArrayVec::new();
        if long {
            out.extend(self.info.blocks.to_be_bytes());
            out.extend([0; 4]);
        } else {
            out.extend(u32::try_from(self.info.blocks).unwrap_or(u32::MAX).to_be_bytes());
        }
        // The short form has a byte of density code and three of length; sizes are below 2^24.
        out.extend(self.info.block_size.to_be_bytes());
        out
    }
}

/// MODE SELECT(6), (10). Pages must have the standard's format, and cannot be saved (SP is rejected
/// as a reserved bit).
pub(crate) fn select(unit: &mut LogicalUnit, cmd: &ParsedCommand<'_>) -> Result<Outcome, Refusal> {
    const PF: u8 = 0x10;
    let long_header = cmd.cdb.opcode() == MODE_SELECT_10;
    let length = if long_header { cmd.cdb.u16(7) } else { u16::from(cmd.cdb.byte(4)) };
    if length > 0 && !cmd.cdb.has(1, PF) {
        return Err(Sense::field(1, Some(4)).into());
    }
    unit.accept_list(AdmittedOp::ModeSelect { long_header }, u32::from(length), cmd)
}

const TOO_SHORT: Sense = Sense::illegal(SenseCode::PARAMETER_LIST_LENGTH_ERROR);

/// The mode parameters that a parameter list sets: all or nothing.
pub(crate) fn parse_mode_select(
    unit: &LogicalUnit,
    list: &[u8],
    long_header: bool,
) -> Result<ModeParameters, Sense> {
    let mut at = unit.check_header(list, long_header)?;
    let mut modes = unit.modes;
    let known = unit.pages();
    while at < list.len() {
        let (id, page) = next_page(&known, list, at)?;
        unit.check_page(id, page, at, &modes)?;
        modes = pages::with_page(modes, id, page, unit.mode_features());
        at += page.len();
    }
    Ok(modes)
}

/// The page that begins at `at`, with its header.
fn next_page<'a>(known: &Ids, list: &'a [u8], at: usize) -> Result<(Id, &'a [u8]), Sense> {
    const SPF: u8 = 0x40;
    let rest = list.get(at..).unwrap_or_default();
    let (id, len) = match *rest {
        [code, subpage, high, low, ..] if code & SPF != 0 => {
            ((code & !SPF, subpage), 4 + usize::from(u16::from_be_bytes([high, low])))
        }
        [code, len, ..] if code & SPF == 0 => ((code, 0), 2 + usize::from(len)),
        _ => return Err(TOO_SHORT),
    };
    if !known.contains(&id) {
        return Err(invalid_parameter(at));
    }
    Ok((id, rest.get(..len).ok_or(TOO_SHORT)?))
}

fn invalid_parameter(at: usize) -> Sense {
    Sense::parameter(u16::try_from(at).unwrap_or(u16::MAX), None)
}

impl LogicalUnit {
    /// Checks the header and the block descriptor; returns where the pages begin. The block
    /// descriptor must repeat the current values (SBC-3 6.4: zero blocks means no change).
    fn check_header(&self, list: &[u8], long: bool) -> Result<usize, Sense> {
        const LONGLBA: u8 = 0x01;
        let (descriptor_field, long_descriptor, length, at) = match (long, list) {
            (false, &[_, _, _, length, ..]) => (3, false, usize::from(length), 4),
            (true, &[_, _, _, _, flags, _, high, low, ..]) => {
                let length = usize::from(u16::from_be_bytes([high, low]));
                (6, flags & LONGLBA != 0, length, 8)
            }
            _ => return Err(TOO_SHORT),
        };
        if length == 0 {
            return Ok(at);
        }
        let current = self.block_descriptor(long_descriptor);
        if length != current.len() {
            return Err(invalid_parameter(descriptor_field));
        }
        let given = list.get(at..at + length).ok_or(TOO_SHORT)?;
        let count_len = length / 2;
        let (count, rest) = given.split_at(count_len);
        let same_count = count == &current[..count_len]
            || count.iter().all(|&b| b == 0)
            || count.iter().all(|&b| b == 0xff);
        if !same_count {
            return Err(invalid_parameter(at));
        }
        if rest != &current[count_len..] {
            return Err(invalid_parameter(at + count_len));
        }
        Ok(at + length)
    }

    /// Checks that a page differs from the current one only in changeable bits.
    fn check_page(
        &self,
        id: Id,
        page: &[u8],
        at: usize,
        modes: &ModeParameters,
    ) -> Result<(), Sense> {
        let current = pages::values(id, modes, self.mode_features());
        let mask = pages::changeable(id, self.mode_features());
        let header = if id.1 == 0 { 2 } else { 4 };
        if page.len() != current.len() {
            return Err(invalid_parameter(at + header - 1));
        }
        for i in header..page.len() {
            if (page[i] ^ current[i]) & !mask[i] != 0 {
                return Err(invalid_parameter(at + i));
            }
        }
        Ok(())
    }
}
