//! ROD tokens: they represent data, and initiators pass them on (SPC-4 5.17.6; RFD 0018).

use std::fmt;

use zerocopy::big_endian::{U16, U32, U64, U128};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::cscd::{CSCD_LEN, Cscd, cscd_descriptor, parse_cscd};
use crate::designator::unit_designators;

/// Length of a token in bytes.
pub const ROD_TOKEN_LEN: usize = 512;

/// Point in time copy, change vulnerable: the first change of its data invalidates a token of this
/// type.
pub(crate) const CHANGE_VULNERABLE: u32 = 0x0080_0001;

/// Any point in time copy, at the copy manager's choice.
pub(crate) const ANY_POINT_IN_TIME: u32 = 0x0080_ffff;

/// Block device zero ROD token: represents zeroes, and needs no creation (SBC-3).
pub(crate) const ZEROES: u32 = 0xffff_0001;

/// ROD TOKEN LENGTH: the length of the rest.
const LENGTH: u16 = ROD_TOKEN_LEN as u16 - 8;

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned, Clone)]
#[repr(C)]
struct RodTokenLayout {
    kind: U32,
    reserved: [u8; 2],
    length: U16,
    id: U64,
    /// Identification descriptor of the unit with the data.
    creator: [u8; CSCD_LEN],
    bytes: U128,
    reserved_too: [u8; 32],
    /// For block devices: LOGICAL BLOCK LENGTH first.
    block_length: U32,
    device: [u8; 28],
    target_device: [u8; 128],
    /// Extended ROD token data: must not be guessable.
    secret: [U64; 4],
    rest: [u8; 224],
}

const _: () = assert!(size_of::<RodTokenLayout>() == ROD_TOKEN_LEN);

/// A token for data of a volume. The copy manager that created it knows which; all others only pass
/// it on.
#[derive(Clone, PartialEq, Eq)]
pub struct RodToken(Box<[u8; ROD_TOKEN_LEN]>);

/// A token presented by an initiator.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PresentedToken {
    /// Zeroes, any number of them.
    Zeroes,
    /// Data of a volume, if the token is known.
    Data(RodToken),
}

impl RodToken {
    /// A token for `bytes` bytes of the volume with this identity, in blocks of `block_size` bytes.
    /// `random`: the first number distinguishes tokens, and none may be guessable.
    #[must_use]
    pub fn new(uuid: &[u8; 16], bytes: u64, block_size: u32, random: [u64; 5]) -> Self {
        let [id, secret @ ..] = random;
        let layout = RodTokenLayout {
            kind: U32::new(CHANGE_VULNERABLE),
            reserved: [0; 2],
            length: U16::new(LENGTH),
            id: U64::new(id),
            creator: cscd_descriptor(&unit_designators(uuid)[0], block_size),
            bytes: U128::new(u128::from(bytes)),
            reserved_too: [0; 32],
            block_length: U32::new(block_size),
            device: [0; 28],
            target_device: [0; 128],
            secret: secret.map(U64::new),
            rest: [0; 224],
        };
        let mut token = Box::new([0; ROD_TOKEN_LEN]);
        token.copy_from_slice(layout.as_bytes());
        Self(token)
    }

    /// The encoded token.
    #[must_use]
    pub fn bytes(&self) -> &[u8; ROD_TOKEN_LEN] {
        &self.0
    }

    /// The unit that it claims has its data.
    #[must_use]
    pub fn creator(&self) -> Option<Cscd> {
        let layout = RodTokenLayout::ref_from_bytes(&self.0[..]).ok()?;
        parse_cscd(&layout.creator)
    }
}

impl fmt::Debug for RodToken {
    /// Omits the secret.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("RodToken").field(&&self.0[8..16]).finish()
    }
}

/// Why a token is invalid.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TokenParseError {
    Type,
    Length,
}

/// Parses a token presented by an initiator.
pub(crate) fn parse(bytes: &[u8; ROD_TOKEN_LEN]) -> Result<PresentedToken, TokenParseError> {
    let layout = RodTokenLayout::ref_from_bytes(&bytes[..]).map_err(|_| TokenParseError::Length)?;
    match layout.kind.get() {
        ZEROES | CHANGE_VULNERABLE if layout.length.get() != LENGTH => Err(TokenParseError::Length),
        ZEROES => Ok(PresentedToken::Zeroes),
        CHANGE_VULNERABLE => Ok(PresentedToken::Data(RodToken(Box::new(*bytes)))),
        _ => Err(TokenParseError::Type),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// SPC-4 5.17.6: the positions of the fields.
    #[test]
    fn a_token_is_what_the_standard_says() {
        let token = RodToken::new(&[7; 16], 8192, 512, [1, 2, 3, 4, 5]);
        let bytes = token.bytes();
        assert_eq!(bytes[..8], [0, 0x80, 0, 1, 0, 0, 0x01, 0xf8]);
        assert_eq!(bytes[8..16], 1u64.to_be_bytes());
        assert_eq!(bytes[16..24], [0xe4, 0, 0, 0, 1, 3, 0, 16]);
        assert_eq!(bytes[48..64], 8192u128.to_be_bytes());
        assert_eq!(bytes[96..100], 512u32.to_be_bytes());
        assert_eq!(parse(bytes), Ok(PresentedToken::Data(token.clone())));
        let creator = token.creator().expect("a descriptor");
        assert!(creator.identifies(&[7; 16]) && !creator.identifies(&[8; 16]));
        assert!(!format!("{token:?}").contains('5'), "nothing of the secret");
    }

    #[test]
    fn invalid_tokens_are_refused() {
        let mut bytes = [0; ROD_TOKEN_LEN];
        assert_eq!(parse(&bytes), Err(TokenParseError::Type));
        bytes[..4].copy_from_slice(&ZEROES.to_be_bytes());
        assert_eq!(parse(&bytes), Err(TokenParseError::Length));
        bytes[6..8].copy_from_slice(&LENGTH.to_be_bytes());
        assert_eq!(parse(&bytes), Ok(PresentedToken::Zeroes));
        bytes[..4].copy_from_slice(&CHANGE_VULNERABLE.to_be_bytes());
        let Ok(PresentedToken::Data(token)) = parse(&bytes) else { panic!("a token") };
        assert_eq!(token.creator(), None);
    }
}
