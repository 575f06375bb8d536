//! In-band authentication: DH-HMAC-CHAP (NVMe Base 2.0, 8.13).

mod fuzz_input;
mod pair;
mod refusals;
mod vectors;

use std::sync::Arc;

use nvme::auth::{
    AuthPolicy, BadSecret, Config, DhGroup, FailureExplanation, Hash, HostStep, Secret,
};
use proptest::prelude::*;

use pair::{HOST_SECRET, Pair, ROOM, WRONG_SECRET, config, policy, refused, secret};

/// NVMe Base 2.0, 8.13.5: every hash with every group. Larger groups with one hash, as they take
/// time.
#[test]
fn both_roles_agree() {
    for hash in Hash::ALL {
        for group in DhGroup::ALL {
            if group > DhGroup::Ffdhe3072 && hash != Hash::Sha384 {
                continue;
            }
            for mutual in [false, true] {
                let mut pair = Pair::alike(hash, group, mutual);
                let (success1, success2) = pair.complete();
                assert_eq!(success1.len(), 16 + hash.len());
                assert_eq!((success1[8], success2.is_some()), (u8::from(mutual), mutual));
                assert!(pair.responder.is_authenticated(), "{hash:?} {group:?} {mutual}");
                assert!(pair.prover.is_authenticated(), "{hash:?} {group:?} {mutual}");
                assert_eq!(pair.responder.failure(), None);
            }
        }
    }
}

/// NVMe Base 2.0, 8.13.5.2: of what the host offers, the controller takes what it prefers.
#[test]
fn the_controller_chooses() {
    let host = config(AuthPolicy::default(), false);
    let controller = config(policy(Hash::Sha384, DhGroup::Ffdhe2048), false);
    let mut pair = Pair::new(controller, host);
    let (challenge, _) = pair.challenged();
    assert_eq!((challenge[8], challenge[9]), (Hash::Sha384.id(), DhGroup::Ffdhe2048.id()));
}

/// NVMe Base 2.0, 8.13.1: a host may authenticate again. It goes on being authenticated meanwhile,
/// and not once that has failed.
#[test]
fn a_host_may_authenticate_again() {
    let mut pair = Pair::alike(Hash::Sha256, DhGroup::Null, true);
    pair.complete();
    pair.again();
    let (_, reply) = pair.challenged();
    assert!(pair.responder.is_authenticated());
    let success1 = pair.ask(&reply);
    let HostStep::Authenticated(Some(success2)) = pair.tell(&success1) else {
        panic!("not proved")
    };
    assert!(pair.send(&success2).is_none() && pair.responder.is_authenticated());
    // Once more, by another secret.
    let wrong = Config { host_secret: secret(WRONG_SECRET), ..(*pair.controller).clone() };
    pair.controller = Arc::new(wrong);
    pair.again();
    let (_, reply) = pair.challenged();
    assert!(pair.responder.is_authenticated());
    let answer = pair.ask(&reply);
    refused(&pair.responder, &answer, FailureExplanation::AuthenticationFailed);
}

/// A host that has got no answer begins anew, with another transaction.
#[test]
fn a_host_may_begin_anew() {
    for steps in 1..=3 {
        let mut pair = Pair::alike(Hash::Sha256, DhGroup::Null, true);
        let negotiate = pair.negotiate.clone();
        match steps {
            1 => assert!(pair.send(&negotiate).is_none()),
            2 => assert_eq!(pair.challenged().0.len(), 48),
            _ => {
                let (_, reply) = pair.challenged();
                pair.ask(&reply);
            }
        }
        pair.again();
        pair.complete();
        assert!(pair.responder.is_authenticated(), "{steps}");
    }
}

/// Linux 6.3 to 6.5 send Success2 also when the controller has not proved anything.
#[test]
fn an_unexpected_success2_changes_nothing() {
    let mut pair = Pair::alike(Hash::Sha256, DhGroup::Null, true);
    let (_, success2) = pair.complete();
    let mut pair = Pair::alike(Hash::Sha256, DhGroup::Null, false);
    pair.complete();
    assert!(pair.send(&success2.unwrap()).is_none());
    assert!(pair.responder.is_authenticated());
    assert_eq!(pair.responder.failure(), None);
}

/// Of a host that has not said what it prefers, the secret does.
#[test]
fn the_secret_suggests_its_hash() {
    let text = "DHHC-1:03:Idk0Db/Az+H/qTpY2Vk4iqA4j5Ht2HprncXlYYaNpCpvrx0vMjidkh97hFrJ6xNN4Dvk8RWGrEwNXKVOpHFiFoLmQDw=:";
    let plain = config(AuthPolicy::default(), false);
    let config = Config { host_secret: secret(text), ..plain.clone() };
    for (config, hash) in [(plain, Hash::Sha256), (config, Hash::Sha512)] {
        let mut pair = Pair::new(config.clone(), config);
        assert_eq!(pair.challenged().0[8], hash.id());
    }
}

/// A message waits until there is room for it.
#[test]
fn a_message_without_buffer_space_stays_pending() {
    let mut pair = Pair::alike(Hash::Sha512, DhGroup::Ffdhe2048, true);
    let work = pair.send(&pair.negotiate.clone()).unwrap();
    pair.responder.on_computed(work.run());
    assert_eq!(pair.responder.on_receive(335).unwrap_err().needed, 336);
    let challenge = pair.responder.on_receive(336).unwrap();
    let HostStep::Send(reply) = pair.tell(&challenge) else { panic!("no reply") };
    let work = pair.send(&reply).unwrap();
    pair.responder.on_computed(work.run());
    assert_eq!(pair.responder.on_receive(16).unwrap_err().needed, 80);
    let success1 = pair.responder.on_receive(80).unwrap();
    assert!(matches!(pair.tell(&success1), HostStep::Authenticated(Some(_))));
}

/// What came of work for a transaction that is gone changes nothing.
#[test]
fn results_of_abandoned_work_are_dropped() {
    let mut pair = Pair::alike(Hash::Sha256, DhGroup::Ffdhe2048, false);
    let old = pair.send(&pair.negotiate.clone()).unwrap();
    pair.again();
    let new = pair.send(&pair.negotiate.clone()).unwrap();
    pair.responder.on_computed(old.run());
    let Ok(answer) = pair.responder.on_receive(ROOM) else { panic!("no room") };
    refused(&pair.responder, &answer, FailureExplanation::IncorrectMessage);
    pair.responder.on_computed(new.run());
    refused(&pair.responder, &answer, FailureExplanation::IncorrectMessage);
}

/// NVMe Base 2.0, 8.13.5.8.
#[test]
fn secrets_are_read_and_never_shown() {
    for ok in SECRETS {
        Secret::parse(ok).unwrap();
        Secret::parse(ok.trim_end_matches(':')).unwrap();
    }
    let bad = [
        ("", BadSecret::Form),
        ("DHHC-1:00", BadSecret::Form),
        ("DHHC-2:00:ERgf:", BadSecret::Form),
        ("DHHC-1:04:ERgf:", BadSecret::Transform),
        ("DHHC-1:0:ERgf:", BadSecret::Transform),
        ("DHHC-1:00:ER gf:", BadSecret::Base64),
        ("DHHC-1:00:ERgf::", BadSecret::Base64),
        ("DHHC-1:00::", BadSecret::Length),
        ("DHHC-1:00:ERgfJi00O0I=:", BadSecret::Length),
        ("DHHC-1:00:ERgfJi00O0JJUFdeZWxzeoGIj5adpKuyucDHztXc4+oQKkVJ:", BadSecret::Checksum),
        ("DHHC-1:00:ERgfJi00O0JJUFdeZWxzeoGIj5adpKuyucDHztXc4+sQKkVI:", BadSecret::Checksum),
    ];
    for (text, why) in bad {
        assert_eq!(Secret::parse(text).unwrap_err(), why, "{text}");
    }
    let shown = format!("{:?}", config(policy(Hash::Sha256, DhGroup::Null), true));
    assert!(shown.contains("Secret") && !shown.contains("ERgf") && !shown.contains("17, 24"));
    assert!(Secret::parse(HOST_SECRET).is_ok());
}

/// Made by nvme-cli 2.3.
const SECRETS: [&str; 6] = [
    "DHHC-1:00:AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAACtVQoZ:",
    "DHHC-1:01:kcxKKkDGIyL6bvTQ4Bt9Ezc0BxjHs3BnOMW1NDVxqM+rLVUt:",
    "DHHC-1:02:Zhz7nSBcJMcQTyeKff9vvda5vOigtsXngpFUgZn+95ZNn+EvsQopqV/0vlOVlXGuzR35Qw==:",
    "DHHC-1:03:Idk0Db/Az+H/qTpY2Vk4iqA4j5Ht2HprncXlYYaNpCpvrx0vMjidkh97hFrJ6xNN4Dvk8RWGrEwNXKVOpHFiFoLmQDw=:",
    "DHHC-1:00:WlpaWlpaWlpaWlpaWlpaWlpaWlpaWlpaWlpaWlpaWlpaWlpaWlpaWlpaWlpaWlpaBgfU4w==:",
    "DHHC-1:00:w8PDw8PDw8PDw8PDw8PDw8PDw8PDw8PDw8PDw8PDw8PDw8PDw8PDw8PDw8PDw8PDw8PDw8PDw8PDw8PDw8PDwyhgzig=:",
];

/// That scripts get as far as there is to get: with a group or without, mutual or not.
#[test]
fn a_script_that_changes_nothing_authenticates() {
    let straight = [1, 4, 2, 3, 5, 1, 4, 2, 3, 1];
    for (setting, expected) in [(0, true), (1, true), (8, true), (9, true), (2, false), (4, false)]
    {
        // Success2 goes only where the controller has proved itself.
        let steps = if setting & 8 == 0 { &straight[..] } else { &straight[..9] };
        let script = [&[setting], steps].concat();
        assert_eq!(fuzz_input::run(&script), expected, "{setting}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    /// The fuzz target `nvme_auth` runs the same ones for longer.
    #[test]
    fn no_host_authenticates_without_the_secret(script in prop::collection::vec(any::<u8>(), 0..60)) {
        fuzz_input::run(&script);
    }
}
