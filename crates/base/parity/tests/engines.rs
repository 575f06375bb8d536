//! Every engine of this machine against the definition.

#[path = "reference/check.rs"]
mod check;
mod reference;

use parity::{MAX_DATA_MEMBERS, Parity, SyndromeVerdict, engines};
use proptest::prelude::*;
use reference::Stripe;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// No length, less than any vector, one short of and one beyond each, several of them with a rest,
/// pages.
const LENGTHS: [usize; 24] = [
    0, 1, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 511, 1000,
    4096, 4099,
];

fn each(mut look: impl FnMut(Parity)) {
    for engine in engines() {
        println!("{}", engine.name());
        look(Parity::with_engine(engine));
    }
}

/// Deterministic bytes.
fn dice(mut seed: u64) -> impl FnMut() -> u8 {
    move || {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        u8::try_from(seed >> 56).expect("eight bits")
    }
}

/// Every member, and every two.
fn every_loss(parity: Parity, stripe: &Stripe, skew: usize) {
    for lost in 0..stripe.data.len() {
        check::recover_one(parity, stripe, lost, skew);
        for second in lost + 1..stripe.data.len() {
            check::recover_two(parity, stripe, [lost, second], skew);
        }
    }
}

#[test]
fn the_best_engine_is_available_and_every_machine_has_one() {
    let names: Vec<&str> = engines().map(parity::Engine::name).collect();
    assert_eq!(Parity::best().engine().name(), names[0]);
    assert_eq!(names.last(), Some(&"portable"));
}

/// `pq_gen` of ISA-L 2.30 (Debian 12) gave these for five members.
#[test]
fn isal_computes_the_same() {
    const P: &str = "8da41b3279a0d79e457cb3ea11d88fb6fd544b22e910478eb56c235a81c8ffa6";
    const Q: &str = "924214dec96c09766710a324fd06eed11e733641f81c995b2da94155d664f64e";
    let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    let byte = |place: usize, at: usize| u8::try_from((37 * place + 11 * at + 5) % 256).unwrap();
    let data: Vec<Vec<u8>> =
        (0..5).map(|place| (0..32).map(|at| byte(place, at)).collect()).collect();
    let data: Vec<&[u8]> = data.iter().map(|member| &member[..]).collect();
    each(|parity| {
        let (mut p, mut q) = ([0; 32], [0; 32]);
        parity.pq(&data, &mut p, &mut q);
        assert_eq!((hex(&p), hex(&q)), (P.to_owned(), Q.to_owned()));
    });
}

#[test]
fn every_length_and_number_of_members() {
    for bytes in LENGTHS {
        for members in 1..=6 {
            let stripe = Stripe::new(members, bytes, dice((bytes * 8 + members) as u64));
            each(|parity| {
                check::generation(parity, &stripe, bytes % 7);
                every_loss(parity, &stripe, bytes % 7);
                check::check(parity, &stripe);
                for place in 0..members {
                    let new: Vec<u8> = stripe.data[place].iter().map(|byte| byte ^ 0x5a).collect();
                    check::update(parity, &stripe, place, &new, bytes % 5);
                }
            });
        }
    }
}

#[test]
fn the_largest_number_of_members_for_q() {
    for members in [16, 17, MAX_DATA_MEMBERS] {
        let mut stripe = Stripe::new(members, 77, dice(members as u64));
        each(|parity| {
            check::generation(parity, &stripe, 0);
            for lost in [0, 1, members / 2, members - 1] {
                check::recover_one(parity, &stripe, lost, 0);
            }
            for lost in [[0, 1], [0, members - 1], [3, 9], [members - 2, members - 1]] {
                check::recover_two(parity, &stripe, lost, 0);
            }
            check::update(parity, &stripe, members - 1, &[7; 77], 0);
            check::locate_error(parity, &mut stripe, 70, 0x80);
        });
    }
}

#[test]
fn every_two_of_ten_members() {
    let stripe = Stripe::new(10, 200, dice(10));
    each(|parity| every_loss(parity, &stripe, 0));
}

/// Every value of a byte times every coefficient: by updating each single member with data of all
/// values.
#[test]
fn every_value_at_every_place() {
    let all: Vec<u8> = (0..=u8::MAX).collect();
    each(|parity| {
        for place in 0..MAX_DATA_MEMBERS {
            let mut q = [0; 256];
            parity.update_q(place, &[0; 256], &all, &mut q);
            let coefficient = reference::power(place);
            assert!(q.iter().zip(&all).all(|(q, byte)| *q == reference::mul(coefficient, *byte)));
        }
    });
}

#[test]
fn syndromes_locate_one_wrong_member() {
    for bytes in [1, 33, 64, 300] {
        let mut stripe = Stripe::new(9, bytes, dice(bytes as u64));
        each(|parity| {
            for at in [0, bytes / 2, bytes - 1] {
                check::locate_error(parity, &mut stripe, at, 1);
                check::locate_error(parity, &mut stripe, at, 0xff);
            }
        });
    }
}

#[test]
fn two_wrong_members_are_not_attributed_to_one() {
    let mut stripe = Stripe::new(4, 512, dice(4));
    for at in 100..200 {
        stripe.data[1][at] ^= 3;
        stripe.data[2][at] ^= 0x40 | u8::try_from(at & 15).unwrap();
    }
    let mut apart = Stripe::new(4, 512, dice(4));
    apart.data[0][5] ^= 1;
    apart.q[400] ^= 1;
    // The index of a member that does not exist.
    let mut no_member = Stripe::new(4, 512, dice(4));
    no_member.p[9] ^= 1;
    no_member.q[9] ^= reference::power(4);
    each(|parity| {
        for stripe in [&stripe, &apart, &no_member] {
            let verdict = parity.check_pq(&stripe.others(&[]), &stripe.p, &stripe.q);
            assert_eq!(verdict, SyndromeVerdict::Ambiguous);
        }
    });
}

/// These tests can fail: a stripe whose Q has one member at its neighbour's coefficient passes none
/// of them.
#[test]
fn a_wrong_coefficient_is_caught() {
    let mut wrong = Stripe::new(5, 64, dice(5));
    for (q, byte) in wrong.q.iter_mut().zip(&wrong.data[3]) {
        *q ^= reference::mul(reference::power(3) ^ reference::power(2), *byte);
    }
    each(|parity| {
        let fails = |look: fn(Parity, &Stripe)| {
            catch_unwind(AssertUnwindSafe(|| look(parity, &wrong))).is_err()
        };
        assert!(fails(|parity, stripe| check::generation(parity, stripe, 0)));
        assert!(fails(|parity, stripe| check::recover_one(parity, stripe, 1, 0)));
        assert!(fails(|parity, stripe| check::recover_two(parity, stripe, [0, 4], 0)));
        assert!(fails(check::check));
    });
}

#[test]
fn contract_violations_panic() {
    let panics =
        |look: &dyn Fn(Parity)| catch_unwind(AssertUnwindSafe(|| look(Parity::best()))).is_err();
    let one: &[u8] = &[0; 8];
    let short: &[u8] = &[0; 7];
    assert!(panics(&|parity| parity.xor(&[one, short], &mut [0; 8])));
    assert!(panics(&|parity| parity.pq(&[one], &mut [0; 8], &mut [0; 9])));
    assert!(panics(&|parity| parity.q(&vec![one; MAX_DATA_MEMBERS + 1], &mut [0; 8])));
    assert!(panics(&|parity| parity.update_p(one, short, &mut [0; 8])));
    assert!(panics(&|parity| parity.update_q(MAX_DATA_MEMBERS, one, one, &mut [0; 8])));
    assert!(panics(&|parity| parity.update_q(usize::MAX, one, one, &mut [0; 8])));
    assert!(panics(&|parity| parity.recover_data_from_p(&[one], short, &mut [0; 8])));
    assert!(panics(&|parity| parity.recover_data_from_q(2, &[one], one, &mut [0; 8])));
    let two = |lost| {
        panics(&|parity| {
            parity.recover_two_data(lost, &[one], [one, one], [&mut [0; 8], &mut [0; 8]]);
        })
    };
    assert!(two([1, 1]) && two([1, 0]) && two([0, 3]) && !two([0, 2]));
    assert!(panics(&|parity| _ = parity.check_p(&[one], short)));
    assert!(panics(&|parity| _ = parity.check_pq(&[one], one, short)));
}

#[test]
fn no_data_has_zero_parity() {
    each(|parity| {
        let (mut p, mut q) = ([1; 100], [1; 100]);
        parity.pq(&[], &mut p, &mut q);
        assert_eq!((p, q), ([0; 100], [0; 100]));
        assert_eq!(parity.check_pq(&[], &p, &q), SyndromeVerdict::Consistent);
    });
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn any_stripe(members in 1usize..20, bytes in 0usize..700, seed: u64, skew in 0usize..64) {
        let mut stripe = Stripe::new(members, bytes, dice(seed));
        let (first, second) = (seed as usize % members, (seed >> 20) as usize % members);
        let new: Vec<u8> = std::iter::repeat_with(dice(!seed)).take(bytes).collect();
        each(|parity| {
            check::generation(parity, &stripe, skew);
            check::update(parity, &stripe, first, &new, skew);
            check::recover_one(parity, &stripe, first, skew);
            if first != second {
                check::recover_two(parity, &stripe, [first.min(second), first.max(second)], skew);
            }
            check::check(parity, &stripe);
            if bytes > 0 {
                check::locate_error(parity, &mut stripe, seed as usize % bytes, new[0] | 1);
            }
        });
    }
}

/// The example in the documentation of the crate.
#[test]
fn two_lost_data_members_are_recovered_from_p_and_q() {
    let data: [&[u8]; 3] = [b"some", b"data", b"here"];
    let (mut p, mut q) = ([0; 4], [0; 4]);
    let parity = Parity::best();
    parity.pq(&data, &mut p, &mut q);

    let (mut first, mut third) = ([0; 4], [0; 4]);
    parity.recover_two_data([0, 2], &[data[1]], [&p, &q], [&mut first, &mut third]);
    assert_eq!((&first, &third), (b"some", b"here"));
}
