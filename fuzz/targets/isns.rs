//! An iSNS server says anything, in any parts: the answer is understood or refused, and takes no more memory than it may.

use iscsi::isns::{Answer, Entity, HEADER, MAX_ANSWER};

pub(crate) fn run(bytes: &[u8]) {
    crate::feed(bytes, |input: &[u8]| {
        let asked = Entity::deregister("e", "iqn.2026-01.x:0", 7);
        let mut answer = Answer::to(&asked).expect("it was made there");
        let (mut rest, mut bytes) = (input, 0);
        while let Some((header, after)) = rest.split_first_chunk::<HEADER>() {
            let Ok((length, last)) = answer.part(header) else { return };
            let part = &after[..length.min(after.len())];
            bytes += part.len();
            assert!(bytes <= MAX_ANSWER);
            answer.add(part);
            rest = &after[part.len()..];
            if last {
                break;
            }
        }
        let _ = answer.outcome();
    });
}
