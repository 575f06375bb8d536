//! An iSNS server's responses, in any fragments: they parse or are rejected, in bounded memory.

use iscsi::isns::{Entity, HEADER_LEN, MAX_RESPONSE, ResponseAssembler};

pub(crate) fn run(bytes: &[u8]) {
    crate::feed(bytes, |input: &[u8]| {
        let asked = Entity::deregister("e", "iqn.2026-01.x:0", 7);
        let mut answer = ResponseAssembler::awaiting(&asked).expect("it was made there");
        let (mut rest, mut bytes) = (input, 0);
        while let Some((header, after)) = rest.split_first_chunk::<HEADER_LEN>() {
            let Ok((length, last)) = answer.part(header) else { return };
            let part = &after[..length.min(after.len())];
            bytes += part.len();
            assert!(bytes <= MAX_RESPONSE);
            answer.add(part);
            rest = &after[part.len()..];
            if last {
                break;
            }
        }
        let _ = answer.outcome();
    });
}
