//! Text in fields of fixed length, and bytes as text (SPC-4 4.4.1).

use std::fmt::Write;

/// The printable ASCII characters of `text`, at most `max` (SPC-4 4.4.1).
pub(crate) fn printable(text: &str, max: usize) -> impl Iterator<Item = u8> {
    text.bytes().filter(|b| (0x20..=0x7e).contains(b)).take(max)
}

/// Left-aligned and filled with spaces (SPC-4 4.4.1).
pub(crate) fn ascii<const N: usize>(text: &str) -> [u8; N] {
    let mut out = [b' '; N];
    for (to, byte) in out.iter_mut().zip(printable(text, N)) {
        *to = byte;
    }
    out
}

/// `bytes` as hexadecimal digits in lower case.
pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut out, byte| {
        write!(out, "{byte:02x}").expect("a string takes everything");
        out
    })
}
