//! Building blocks of wire and disk formats: CRC-32C, open enums, total parsing; and plurals in
//! messages.
//!
//! Integers of foreign byte order are `zerocopy::{big_endian, little_endian}`; format structs
//! derive zerocopy's traits and assert their size where they are declared.
#![no_std]

pub mod embedded_checksum;
mod plural;
mod short_text;

use crc_fast::{CrcAlgorithm, Digest};
pub use plural::{Plural, plural};
pub use short_text::{SHORT_TEXT_BYTES, ShortText};
pub use zerocopy;

/// CRC-32C (Castagnoli, RFC 3720 appendix B.4) of bytes that arrive in pieces.
#[derive(Clone, Copy, Debug, Default)]
pub struct Crc32c(u32);

impl Crc32c {
    /// The checksum of nothing.
    #[must_use]
    pub const fn new() -> Self {
        Self(0)
    }

    /// The checksum with `bytes` appended.
    #[must_use]
    pub fn update(self, bytes: &[u8]) -> Self {
        // A checksum is the initial state of the next piece, inverted. Combining the checksums of
        // two pieces would cost as much as that of many kilobytes.
        let state = u64::from(!self.0);
        let mut digest = Digest::new_with_init_state(CrcAlgorithm::Crc32Iscsi, state);
        digest.update(bytes);
        Self(u32::try_from(digest.finalize()).unwrap_or_default())
    }

    /// The checksum.
    #[must_use]
    pub const fn value(self) -> u32 {
        self.0
    }
}

/// CRC-32C of `bytes`.
#[must_use]
pub fn crc32c(bytes: &[u8]) -> u32 {
    crc_fast::crc32_iscsi(bytes)
}

/// Declares an enumeration that keeps unknown values, as formats require: parsing is total, and the
/// reader decides what to do with them.
#[macro_export]
macro_rules! open_enum {
    ($(#[$meta:meta])* $vis:vis enum $name:ident : $int:ty {
        $($(#[$vmeta:meta])* $variant:ident = $value:expr),* $(,)?
    }) => {
        $(#[$meta])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        $vis struct $name(pub $int);
        #[allow(non_upper_case_globals, unreachable_pub)]
        impl $name {
            $($(#[$vmeta])* pub const $variant: Self = Self($value);)*
        }
        impl core::fmt::Debug for $name {
            fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
                match *self {
                    $(Self::$variant => f.write_str(stringify!($variant)),)*
                    Self(other) => write!(f, concat!(stringify!($name), "({:#x})"), other),
                }
            }
        }
    };
}

#[cfg(test)]
mod tests {
    use super::*;

    /// RFC 3720 appendix B.4.
    #[test]
    fn crc32c_gives_the_published_values() {
        assert_eq!(crc32c(&[0; 32]), 0x8a91_36aa);
        assert_eq!(crc32c(&[0xff; 32]), 0x62a8_ab43);
        assert_eq!(crc32c(b"123456789"), 0xe306_9283);
    }

    #[test]
    fn checksums_can_be_computed_in_pieces() {
        let bytes = [7u8; 300];
        for cut in 0..300 {
            let two = Crc32c::new().update(&bytes[..cut]).update(&bytes[cut..]);
            assert_eq!(two.value(), crc32c(&bytes));
        }
    }

    open_enum! {
        /// An example.
        enum Colour : u8 { Red = 1 }
    }

    #[test]
    fn open_enums_keep_unknown_values() {
        extern crate std;
        assert_eq!(std::format!("{:?} {:?}", Colour::Red, Colour(9)), "Red Colour(0x9)");
    }
}
