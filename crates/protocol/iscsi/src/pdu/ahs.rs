//! Additional header segments (RFC 7143 11.2.2).
//!
//! ```text
//!    0 | AHSLength                     | AHSType       | specific    |
//!    4 | specific, padded to a multiple of four bytes                |
//! ```
//!
//! `AHSLength` counts the bytes behind `AHSType`, without padding. Type 1 extends the command
//! descriptor block (one reserved byte, then the bytes from the 17th on); type 2 is the expected
//! read length of a bidirectional command (one reserved byte, then four bytes).

/// Longest command descriptor block (SPC-4 4.2.3: variable-length CDBs).
pub const MAX_CDB: usize = 260;

const EXTENDED_CDB: u8 = 1;
const BIDIRECTIONAL_READ: u8 = 2;

/// What the additional header segments of a SCSI command say.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AdditionalHeaders<'a> {
    /// The command descriptor block from its 17th byte on.
    pub cdb: Option<&'a [u8]>,
    /// Bytes that a bidirectional command is expected to read.
    pub bidirectional_read: Option<u32>,
}

/// The segments do not fit into each other, or are of unknown types.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("invalid additional header segments")]
pub struct BadSegments;

impl<'a> AdditionalHeaders<'a> {
    /// Reads the additional header segments of a SCSI command.
    ///
    /// # Errors
    /// `BadSegments` for lengths that do not fit, types that are not defined (their meaning
    /// could change the command's) and segments that come twice.
    pub fn parse(mut bytes: &'a [u8]) -> Result<Self, BadSegments> {
        let mut out = Self::default();
        while !bytes.is_empty() {
            let (&[a, b, kind], rest) = bytes.split_first_chunk().ok_or(BadSegments)?;
            let len = usize::from(u16::from_be_bytes([a, b]));
            let (_, content) = rest.get(..len).and_then(<[u8]>::split_first).ok_or(BadSegments)?;
            match kind {
                EXTENDED_CDB if out.cdb.is_none() && content.len() <= MAX_CDB - 16 => {
                    out.cdb = Some(content);
                }
                BIDIRECTIONAL_READ if out.bidirectional_read.is_none() => {
                    let len = content.try_into().map_err(|_| BadSegments)?;
                    out.bidirectional_read = Some(u32::from_be_bytes(len));
                }
                _ => return Err(BadSegments),
            }
            bytes = bytes.get((3 + len).next_multiple_of(4)..).unwrap_or_default();
        }
        Ok(out)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// RFC 7143 11.2.2.3: `AHSLength` of an extended CDB is its length less 15.
    #[test]
    fn an_extended_cdb_and_a_bidirectional_length_are_found() {
        let bytes = [0, 5, 1, 0, b'a', b'b', b'c', b'd', 0, 5, 2, 0, 0, 0, 2, 1];
        let got = AdditionalHeaders::parse(&bytes).unwrap();
        assert_eq!(got.cdb, Some(&b"abcd"[..]));
        assert_eq!(got.bidirectional_read, Some(0x201));
        assert_eq!(AdditionalHeaders::parse(&[]), Ok(AdditionalHeaders::default()));
    }

    /// RFC 7143 11.2.2.
    #[test]
    fn invalid_segments_are_refused() {
        for bytes in [
            &[0, 5, 1][..],
            &[0, 0, 1, 0],
            &[0, 9, 1, 0, 1, 2, 3, 4],
            &[0, 5, 7, 0, 1, 2, 3, 4],
            &[0, 4, 2, 0, 1, 2, 3, 4],
            &[0, 1, 1, 0, 0, 1, 1, 0],
            &[0xff, 0xff, 1, 0],
        ] {
            assert_eq!(AdditionalHeaders::parse(bytes), Err(BadSegments), "{bytes:?}");
        }
    }
}
