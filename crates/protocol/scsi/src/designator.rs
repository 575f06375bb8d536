//! Designators: the identity of a unit, its ports and its target (SPC-4 7.8).

use crate::text::hex;

/// T10 VENDOR IDENTIFICATION.
pub(crate) const VENDOR: [u8; 8] = *b"WINDROSE";

/// CODE SET.
pub(crate) const BINARY: u8 = 0x1;
pub(crate) const ASCII: u8 = 0x2;
pub(crate) const UTF_8: u8 = 0x3;

/// DESIGNATOR TYPE.
pub(crate) const T10_VENDOR_ID: u8 = 0x1;
pub(crate) const NAA: u8 = 0x3;
pub(crate) const RELATIVE_PORT: u8 = 0x4;
pub(crate) const PORT_GROUP: u8 = 0x5;
pub(crate) const NAME_STRING: u8 = 0x8;

/// A designator of a unit.
pub(crate) struct Designator {
    pub(crate) kind: u8,
    pub(crate) code_set: u8,
    pub(crate) id: Vec<u8>,
}

/// All designators of the unit of a volume.
pub(crate) fn unit_designators(uuid: &[u8; 16]) -> [Designator; 3] {
    let naa = naa(uuid);
    let mut vendor_id = VENDOR.to_vec();
    vendor_id.extend(hex(uuid).into_bytes());
    let unit_name = scsi_name_string(&format!("naa.{}", hex(&naa)));
    [
        Designator { kind: NAA, code_set: BINARY, id: naa.to_vec() },
        Designator { kind: T10_VENDOR_ID, code_set: ASCII, id: vendor_id },
        Designator { kind: NAME_STRING, code_set: UTF_8, id: unit_name },
    ]
}

/// An NAA IEEE registered extended designator (SPC-4 7.8) from a volume's UUID.
///
/// The project has no company identifier. The one here has the local bit set, which IEEE never
/// assigns, so it is no other vendor's; the 100 bits that follow are the UUID's, without the digits
/// that are the same in all UUIDs of a version.
fn naa(uuid: &[u8; 16]) -> [u8; 16] {
    const REGISTERED_EXTENDED: u8 = 0x6;
    const COMPANY: [u8; 6] = [0, 2, 5, 7, 5, 2];
    const VERSION_AND_VARIANT: [usize; 2] = [12, 16];
    let digits = uuid.iter().flat_map(|byte| [byte >> 4, byte & 0xf]);
    let random = digits
        .enumerate()
        .filter(|(i, _)| !VERSION_AND_VARIANT.contains(i))
        .map(|(_, digit)| digit);
    let mut nibbles = std::iter::once(REGISTERED_EXTENDED).chain(COMPANY).chain(random);
    std::array::from_fn(|_| {
        let (high, low) = (nibbles.next().unwrap_or(0), nibbles.next().unwrap_or(0));
        high << 4 | low
    })
}

/// A SCSI name string: null-terminated and padded to a multiple of four bytes (SPC-4 7.8).
pub(crate) fn scsi_name_string(text: &str) -> Vec<u8> {
    const MAX: usize = 251;
    let mut out = text.as_bytes().to_vec();
    out.truncate(MAX);
    out.resize((out.len() + 1).next_multiple_of(4), 0);
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_naa_is_the_uuid_without_its_fixed_digits() {
        let uuid = [
            0x01, 0x23, 0x45, 0x67, 0x89, 0xab, 0x4d, 0xef, 0x81, 0x23, 0x45, 0x67, 0x89, 0xab,
            0xcd, 0xef,
        ];
        assert_eq!(hex(&naa(&uuid)), "6025752".to_owned() + "0123456789abdef123456789a");
    }

    #[test]
    fn names_end_in_nulls() {
        assert_eq!(scsi_name_string("iqn"), b"iqn\0");
        assert_eq!(scsi_name_string("iqn."), b"iqn.\0\0\0\0");
        assert_eq!(scsi_name_string(&"x".repeat(400)).len(), 252);
    }
}
