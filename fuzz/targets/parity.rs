//! Parity: every engine of this machine matches the reference, for any number, length and contents
//! of members and any output alignment. The tests of `parity` share the checks.

use parity::{Parity, engines};
use reference::Stripe;

#[path = "../../crates/base/parity/tests/reference/check.rs"]
mod check;
#[path = "../../crates/base/parity/tests/reference/mod.rs"]
mod reference;

pub(crate) fn run(bytes: &[u8]) {
    crate::feed(bytes, |input: (u8, u16, u8, u8, u16, &[u8])| {
        let (members, bytes, first, second, at, contents) = input;
        let members = usize::from(members).max(1);
        // With many members the data is short: the reference is slow.
        let bytes = usize::from(bytes) % if members > 12 { 80 } else { 600 };
        let (first, second) = (usize::from(first) % members, usize::from(second) % members);
        // The contents, repeated, and different each time.
        let turns = (0..=u8::MAX).cycle();
        let mut given = turns.flat_map(|turn| contents.iter().map(move |byte| byte ^ turn));
        let mut next = || if contents.is_empty() { 0xff } else { given.next().unwrap_or(0) };
        let mut stripe = Stripe::new(members, bytes, &mut next);
        let new: Vec<u8> = (0..bytes).map(|_| next()).collect();
        let skew = usize::from(at) % 64;
        for engine in engines() {
            let parity = Parity::with_engine(engine);
            check::generation(parity, &stripe, skew);
            check::update(parity, &stripe, first, &new, skew);
            check::recover_one(parity, &stripe, first, skew);
            if first != second {
                check::recover_two(parity, &stripe, [first.min(second), first.max(second)], skew);
            }
            check::check(parity, &stripe);
            if bytes > 0 && members < 12 {
                check::locate_error(parity, &mut stripe, usize::from(at) % bytes, new[0] | 1);
            }
        }
    });
}
