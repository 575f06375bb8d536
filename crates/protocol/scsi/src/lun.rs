//! Logical unit numbers on the wire (SAM-5 4.7).

/// Number of a logical unit of a target: 0 to [`Lun::MAX`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Lun(u16);

impl Lun {
    /// The largest number of flat space addressing.
    pub const MAX: u16 = 0x3fff;

    /// The unit of number `n`; `None` beyond [`Lun::MAX`].
    #[must_use]
    pub const fn new(n: u16) -> Option<Self> {
        if n <= Self::MAX { Some(Self(n)) } else { None }
    }

    /// The number.
    #[must_use]
    pub const fn get(self) -> u16 {
        self.0
    }

    /// The eight bytes: peripheral device addressing to 255, flat space addressing beyond
    /// (SAM-5 4.7).
    #[must_use]
    pub fn to_bytes(self) -> [u8; 8] {
        let [high, low] = self.0.to_be_bytes();
        let first = if self.0 < 0x100 { 0 } else { FLAT | high };
        [first, low, 0, 0, 0, 0, 0, 0]
    }
}

const METHOD: u8 = 0xc0;
const PERIPHERAL: u8 = 0x00;
const FLAT: u8 = 0x40;

/// The well-known logical unit REPORT LUNS (SPC-4 clause 8).
pub(crate) const REPORT_LUNS_UNIT: [u8; 8] = [0xc1, 0x01, 0, 0, 0, 0, 0, 0];

/// The address of a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Address {
    /// A logical unit, which may not exist.
    Unit(Lun),
    /// The well-known logical unit REPORT LUNS.
    ReportLuns,
    /// An address of a form that no unit here has.
    Unsupported,
}

impl Address {
    /// Decodes the eight bytes. Total: an unknown form is [`Address::Unsupported`].
    #[must_use]
    pub fn parse(bytes: [u8; 8]) -> Self {
        if bytes == REPORT_LUNS_UNIT {
            return Self::ReportLuns;
        }
        let [first, low, deeper @ ..] = bytes;
        if deeper != [0; 6] {
            return Self::Unsupported;
        }
        match (first & METHOD, first & !METHOD) {
            // The other bits are a bus number; there is only bus 0.
            (PERIPHERAL, 0) => Self::Unit(Lun(u16::from(low))),
            (FLAT, high) => Self::Unit(Lun(u16::from_be_bytes([high, low]))),
            _ => Self::Unsupported,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_number_survives_the_wire() {
        for n in 0..=Lun::MAX {
            let lun = Lun::new(n).unwrap();
            assert_eq!(Address::parse(lun.to_bytes()), Address::Unit(lun));
        }
        assert_eq!(Lun::new(Lun::MAX + 1), None);
    }

    /// SAM-5 4.7: both forms of a small number, the well-known unit, and nothing else.
    #[test]
    fn addresses_of_other_forms_are_nowhere() {
        let parse = |b: &[u8]| {
            let mut bytes = [0; 8];
            bytes[..b.len()].copy_from_slice(b);
            Address::parse(bytes)
        };
        assert_eq!(parse(&[0, 5]), Address::Unit(Lun(5)));
        assert_eq!(parse(&[0x40, 5]), Address::Unit(Lun(5)));
        assert_eq!(parse(&[0x41, 5]), Address::Unit(Lun(0x105)));
        assert_eq!(parse(&[0xc1, 1]), Address::ReportLuns);
        for nowhere in [&[0x01, 5][..], &[0x80, 5], &[0xc1, 2], &[0xd2, 0, 0, 5], &[0, 5, 1]] {
            assert_eq!(parse(nowhere), Address::Unsupported, "{nowhere:x?}");
        }
    }
}
