//! Random scripts of commands, failures and events.

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::test_runner::Config;

use crate::oracle;

/// A command for the script: mostly ones that exist, with few bits set, so that many get through.
fn command() -> impl Strategy<Value = Vec<u8>> {
    let opcodes = [
        0x00, 0x03, 0x08, 0x0a, 0x12, 0x15, 0x16, 0x17, 0x1a, 0x1b, 0x1e, 0x25, 0x28, 0x2a, 0x2e,
        0x2f, 0x34, 0x35, 0x41, 0x42, 0x55, 0x56, 0x57, 0x5a, 0x88, 0x89, 0x8a, 0x8e, 0x8f, 0x90,
        0x91, 0x93, 0x9e, 0xa0, 0xa3, 0xa8, 0xaa, 0xae, 0xaf,
    ];
    let opcode = prop_oneof![9 => prop::sample::select(opcodes.to_vec()), 1 => any::<u8>()];
    let field = || prop_oneof![12 => Just(0u8), 2 => 0u8..20, 1 => any::<u8>()];
    let kind = prop_oneof![1 => 0u8..10, 12 => Just(10u8)];
    (kind, any::<u8>(), opcode, vec(field(), 15), any::<[u8; 2]>(), vec(field(), 42)).prop_map(
        |(kind, who, opcode, fields, windows, rest)| {
            [&[kind, who, opcode][..], &fields, &windows, &rest].concat()
        },
    )
}

proptest! {
    #![proptest_config(Config { cases: 400, failure_persistence: None, ..Config::default() })]

    #[test]
    fn nothing_breaks_the_rules(head in any::<[u8; 2]>(), commands in vec(command(), 1..60)) {
        oracle::play(&[&head[..], &commands.concat()].concat());
    }

    #[test]
    fn not_even_noise(script in vec(any::<u8>(), 0..4000)) {
        oracle::play(&script);
    }
}
