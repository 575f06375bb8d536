//! Random scripts of commands, failures and events.

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::test_runner::Config;

use crate::oracle;

/// A command for the script, mostly of a kind that gets far.
fn command() -> impl Strategy<Value = Vec<u8>> {
    let shaped = (vec(any::<u8>(), 6), vec(any::<u8>(), 42))
        .prop_map(|(head, data)| [&[0][..], &head, &data].concat());
    let opcodes = vec![
        0x00, 0x03, 0x04, 0x12, 0x15, 0x16, 0x17, 0x1a, 0x1b, 0x1c, 0x1d, 0x1e, 0x25, 0x37, 0x42,
        0x4d, 0x55, 0x5a, 0x83, 0x84, 0x9e, 0xa0, 0xa3, 0xb7,
    ];
    let opcode = prop_oneof![9 => prop::sample::select(opcodes), 1 => any::<u8>()];
    let field = prop_oneof![12 => Just(0u8), 2 => 0u8..20, 1 => any::<u8>()];
    let raw = (any::<[u8; 2]>(), opcode, vec(field, 15), vec(any::<u8>(), 42)).prop_map(
        |(windows, opcode, fields, data)| {
            [&[255][..], &windows, &[opcode], &fields, &data].concat()
        },
    );
    let what = prop_oneof![2 => shaped, 1 => raw];
    let kind = prop_oneof![1 => 0u8..10, 12 => Just(10u8)];
    (kind, any::<u8>(), what).prop_map(|(kind, who, what)| [&[kind, who][..], &what].concat())
}

proptest! {
    #![proptest_config(Config { cases: 400, failure_persistence: None, ..Config::default() })]

    #[test]
    fn nothing_breaks_the_rules(head in any::<[u8; 2]>(), commands in vec(command(), 1..60)) {
        oracle::run(&[&head[..], &commands.concat()].concat());
    }

    #[test]
    fn not_even_noise(script in vec(any::<u8>(), 0..4000)) {
        oracle::run(&script);
    }
}
