//! Mode pages: MODE SENSE and MODE SELECT (SPC-4 6.11 to 6.14, 7.5; SBC-3 6.4).
//!
//! The pages are shared by all initiators, at all nodes, and not saved: a reset brings back the defaults.

use arrayvec::ArrayVec;

use crate::reply::Refusal;
use crate::sense::{Code, Sense};
use crate::unit::{Incoming, LogicalUnit, Outcome, Todo};

/// What can be changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Modes {
    /// Sense data in descriptor format.
    pub(crate) d_sense: bool,
    /// Software write protect.
    pub(crate) swp: bool,
    /// TASK ABORTED for commands that another initiator aborts.
    pub(crate) tas: bool,
    /// Writes may complete in a volatile cache, where there is one.
    pub(crate) wce: bool,
}

impl Default for Modes {
    fn default() -> Self {
        Self { d_sense: false, swp: false, tas: false, wce: true }
    }
}

impl Modes {
    /// As all nodes keep them: a one for each that is not the default.
    pub(crate) fn bits(self) -> u32 {
        let bit = |set: bool, n: u32| u32::from(set) << n;
        bit(self.d_sense, 0) | bit(self.swp, 1) | bit(self.tas, 2) | bit(!self.wce, 3)
    }

    pub(crate) fn from_bits(bits: u32) -> Self {
        let bit = |n: u32| bits >> n & 1 == 1;
        Self { d_sense: bit(0), swp: bit(1), tas: bit(2), wce: !bit(3) }
    }
}

/// Page code and subpage code.
type Id = (u8, u8);

const RECOVERY: Id = (0x01, 0x00);
const CACHING: Id = (0x08, 0x00);
const CONTROL: Id = (0x0a, 0x00);
const CONTROL_EXTENSION: Id = (0x0a, 0x01);
const EXCEPTIONS: Id = (0x1c, 0x00);

/// In ascending order (SPC-4 6.13).
const PAGES: [Id; 5] = [RECOVERY, CACHING, CONTROL, CONTROL_EXTENSION, EXCEPTIONS];

const ALL_PAGES: u8 = 0x3f;
const ALL_SUBPAGES: u8 = 0xff;

const WCE: u8 = 0x04;
const D_SENSE: u8 = 0x04;
const SWP: u8 = 0x08;
const TAS: u8 = 0x40;

const PAGE_MAX: usize = 32;
type Page = ArrayVec<u8, PAGE_MAX>;

/// A page's header and zeroes behind it; `len` in bytes, all told.
fn blank((code, subpage): Id, len: u8) -> Page {
    const SPF: u8 = 0x40;
    let mut page = Page::new();
    if subpage == 0 {
        page.extend([code, len - 2]);
    } else {
        page.extend([SPF | code, subpage, 0, len - 4]);
    }
    while page.len() < usize::from(len) {
        page.push(0);
    }
    page
}

/// A page with these values. `cache`: whether there is a volatile cache.
fn values(id: Id, modes: Modes, cache: bool) -> Page {
    const AWRE_ARRE: u8 = 0xc0;
    const GLTSD: u8 = 0x02;
    const UNRESTRICTED_REORDERING: u8 = 0x10;
    const DEXCPT: u8 = 0x08;
    let mut page = changeable_values(id, modes, cache);
    match id {
        RECOVERY => page[2] = AWRE_ARRE,
        CONTROL => {
            page[2] |= GLTSD;
            page[3] |= UNRESTRICTED_REORDERING;
            page[8..10].fill(0xff); // commands may be refused with BUSY without limit of time
        }
        EXCEPTIONS => page[2] = DEXCPT,
        _ => {}
    }
    page
}

/// A page with a one for each bit that can be changed.
fn changeable(id: Id, cache: bool) -> Page {
    let everything = Modes { d_sense: true, swp: true, tas: true, wce: true };
    changeable_values(id, everything, cache)
}

/// A page with the bits that can be changed as `modes` has them, and zeroes else.
fn changeable_values(id: Id, modes: Modes, cache: bool) -> Page {
    let bit = |set: bool, bit: u8| if set { bit } else { 0 };
    match id {
        RECOVERY => blank(id, 12),
        CACHING => {
            let mut page = blank(id, 20);
            page[2] = bit(cache && modes.wce, WCE);
            page
        }
        CONTROL => {
            let mut page = blank(id, 12);
            page[2] = bit(modes.d_sense, D_SENSE);
            page[4] = bit(modes.swp, SWP);
            page[5] = bit(modes.tas, TAS);
            page
        }
        CONTROL_EXTENSION => blank(id, 32),
        _ => blank(id, 12),
    }
}

/// `modes` as a page whose changeable bits have been checked says.
fn with_page(mut modes: Modes, id: Id, page: &[u8], cache: bool) -> Modes {
    match id {
        CACHING if cache => modes.wce = page[2] & WCE != 0,
        CONTROL => {
            modes.d_sense = page[2] & D_SENSE != 0;
            modes.swp = page[4] & SWP != 0;
            modes.tas = page[5] & TAS != 0;
        }
        _ => {}
    }
    modes
}

const MODE_SENSE_10: u8 = 0x5a;
const MODE_SELECT_10: u8 = 0x55;

/// MODE SENSE(6), (10).
pub(crate) fn sense(unit: &mut LogicalUnit, cmd: &Incoming<'_>) -> Result<Outcome, Refusal> {
    const DBD: u8 = 0x08;
    const LLBAA: u8 = 0x10;
    let long_header = cmd.cdb.opcode() == MODE_SENSE_10;
    let (control, code, subpage) = (cmd.cdb.byte(2) >> 6, cmd.cdb.byte(2) & 0x3f, cmd.cdb.byte(3));
    let wanted = selected(code, subpage)?;
    let long_descriptor = long_header && cmd.cdb.has(1, LLBAA);
    let descriptor =
        if cmd.cdb.has(1, DBD) { ArrayVec::new() } else { unit.block_descriptor(long_descriptor) };
    let cache = unit.info.volatile_cache;
    let mut pages = Vec::new();
    for id in wanted {
        pages.extend(match control {
            0 => values(id, unit.modes, cache),
            1 => changeable(id, cache),
            2 => values(id, Modes::default(), cache),
            _ => return Err(Sense::illegal(Code::SAVING_NOT_SUPPORTED).into()),
        });
    }
    let header = unit.mode_header(long_header, long_descriptor, descriptor.len(), pages.len());
    let data = header.into_iter().chain(descriptor).chain(pages).collect();
    let allocation = if long_header { cmd.cdb.u16(7) } else { u16::from(cmd.cdb.byte(4)) };
    Ok(Outcome::data(data, u64::from(allocation)))
}

/// The pages that a page code and a subpage code ask for (SPC-4 6.13).
fn selected(code: u8, subpage: u8) -> Result<ArrayVec<Id, { PAGES.len() }>, Sense> {
    let all_subpages = subpage == ALL_SUBPAGES;
    if code == ALL_PAGES && subpage != 0 && !all_subpages {
        return Err(Sense::field(3, None));
    }
    let asked = |&(c, s): &Id| (code == ALL_PAGES || c == code) && (all_subpages || s == subpage);
    let pages: ArrayVec<Id, { PAGES.len() }> = PAGES.into_iter().filter(asked).collect();
    if !pages.is_empty() {
        return Ok(pages);
    }
    let known = PAGES.iter().any(|&(c, _)| c == code);
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

/// MODE SELECT(6), (10). Pages must have the standard's format, and cannot be saved (SP is
/// refused as a reserved bit).
pub(crate) fn select(unit: &mut LogicalUnit, cmd: &Incoming<'_>) -> Result<Outcome, Refusal> {
    const PF: u8 = 0x10;
    let long_header = cmd.cdb.opcode() == MODE_SELECT_10;
    let length = if long_header { cmd.cdb.u16(7) } else { u16::from(cmd.cdb.byte(4)) };
    if length > 0 && !cmd.cdb.has(1, PF) {
        return Err(Sense::field(1, Some(4)).into());
    }
    unit.accept_list(Todo::ModeSelect { long_header }, u32::from(length), cmd)
}

const TOO_SHORT: Sense = Sense::illegal(Code::PARAMETER_LIST_LENGTH_ERROR);

/// The mode pages as a parameter list wants them: all of it or nothing.
pub(crate) fn wanted(unit: &LogicalUnit, list: &[u8], long_header: bool) -> Result<Modes, Sense> {
    let mut at = unit.check_header(list, long_header)?;
    let mut modes = unit.modes;
    while at < list.len() {
        let (id, page) = next_page(list, at)?;
        unit.check_page(id, page, at, modes)?;
        modes = with_page(modes, id, page, unit.info.volatile_cache);
        at += page.len();
    }
    Ok(modes)
}

/// The page that begins at `at`, with its header.
fn next_page(list: &[u8], at: usize) -> Result<(Id, &[u8]), Sense> {
    const SPF: u8 = 0x40;
    let rest = list.get(at..).unwrap_or_default();
    let (id, len) = match *rest {
        [code, subpage, high, low, ..] if code & SPF != 0 => {
            ((code & !SPF, subpage), 4 + usize::from(u16::from_be_bytes([high, low])))
        }
        [code, len, ..] if code & SPF == 0 => ((code, 0), 2 + usize::from(len)),
        _ => return Err(TOO_SHORT),
    };
    let known = PAGES.contains(&id);
    if !known {
        return Err(wrong(at));
    }
    Ok((id, rest.get(..len).ok_or(TOO_SHORT)?))
}

fn wrong(at: usize) -> Sense {
    Sense::parameter(u16::try_from(at).unwrap_or(u16::MAX), None)
}

impl LogicalUnit {
    /// Checks the header and the block descriptor; returns where the pages begin. The block
    /// descriptor may but repeat what is (SBC-3 6.4: zero blocks means no change).
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
            return Err(wrong(descriptor_field));
        }
        let given = list.get(at..at + length).ok_or(TOO_SHORT)?;
        let count_len = length / 2;
        let (count, rest) = given.split_at(count_len);
        let same_count = count == &current[..count_len]
            || count.iter().all(|&b| b == 0)
            || count.iter().all(|&b| b == 0xff);
        if !same_count {
            return Err(wrong(at));
        }
        if rest != &current[count_len..] {
            return Err(wrong(at + count_len));
        }
        Ok(at + length)
    }

    /// Checks that a page differs from what is in effect in nothing but changeable bits.
    fn check_page(&self, id: Id, page: &[u8], at: usize, modes: Modes) -> Result<(), Sense> {
        let current = values(id, modes, self.info.volatile_cache);
        let mask = changeable(id, self.info.volatile_cache);
        let header = if id.1 == 0 { 2 } else { 4 };
        if page.len() != current.len() {
            return Err(wrong(at + header - 1));
        }
        for i in header..page.len() {
            if (page[i] ^ current[i]) & !mask[i] != 0 {
                return Err(wrong(at + i));
            }
        }
        Ok(())
    }
}
