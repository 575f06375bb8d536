//! What either role refuses, and how (NVMe Base 2.0, 8.13.4 and 8.13.5).

use nvme::auth::{
    AuthFailure, Config, DhGroup, FailureExplanation, Hash, HostStep, MAX_MESSAGE_BYTES,
};

use super::pair::{
    Pair, ROOM, WRONG_SECRET, config, host_refuses, of_host, policy, refused, secret,
};

const FAILED: FailureExplanation = FailureExplanation::AuthenticationFailed;
const PAYLOAD: FailureExplanation = FailureExplanation::IncorrectPayload;
const MESSAGE: FailureExplanation = FailureExplanation::IncorrectMessage;

/// Where the public value stands in messages with SHA-256: in Challenge, and in Reply.
const CHALLENGE_PUBLIC: usize = 16 + 32;
const REPLY_PUBLIC: usize = 16 + 2 * 32;

fn quick(mutual: bool) -> Pair {
    Pair::alike(Hash::Sha256, DhGroup::Null, mutual)
}

/// The controller refuses this Reply, which is made of a good one.
#[track_caller]
fn reply_refused(
    group: DhGroup,
    explanation: FailureExplanation,
    change: impl FnOnce(&[u8], &mut Vec<u8>),
) {
    let mut pair = Pair::alike(Hash::Sha256, group, true);
    let (challenge, mut reply) = pair.challenged();
    change(&challenge, &mut reply);
    let answer = pair.ask(&reply);
    refused(&pair.responder, &answer, explanation);
}

/// The controller refuses this AUTH_Negotiate, which is made of a good one.
#[track_caller]
fn negotiate_refused(explanation: FailureExplanation, change: impl FnOnce(&mut Vec<u8>)) {
    let mut pair = quick(false);
    let mut negotiate = pair.negotiate.clone();
    change(&mut negotiate);
    let answer = pair.ask(&negotiate);
    refused(&pair.responder, &answer, explanation);
}

/// The host refuses this Challenge, which is made of a good one.
#[track_caller]
fn challenge_refused(
    group: DhGroup,
    explanation: FailureExplanation,
    change: impl FnOnce(&mut Vec<u8>),
) {
    let mut pair = Pair::alike(Hash::Sha256, group, true);
    let negotiate = pair.negotiate.clone();
    let mut challenge = pair.ask(&negotiate);
    change(&mut challenge);
    let next = pair.tell(&challenge);
    let failure2 = host_refuses(&pair.prover, next, explanation);
    assert!(pair.send(&failure2).is_none());
    assert_eq!(pair.responder.failure(), Some(AuthFailure::RefusedByPeer(explanation)));
}

#[test]
fn a_host_with_the_wrong_secret_is_refused() {
    for group in [DhGroup::Null, DhGroup::Ffdhe2048] {
        let good = config(policy(Hash::Sha256, group), false);
        let host = Config { host_secret: secret(WRONG_SECRET), ..good.clone() };
        let mut pair = Pair::new(good, host);
        let (_, reply) = pair.challenged();
        let answer = pair.ask(&reply);
        refused(&pair.responder, &answer, FAILED);
        let HostStep::Failed(end, None) = pair.tell(&answer) else { panic!("not failed") };
        assert_eq!(end, AuthFailure::RefusedByPeer(FAILED));
    }
}

/// The names are part of what is proved.
#[test]
fn another_host_or_subsystem_is_refused() {
    let good = config(policy(Hash::Sha256, DhGroup::Null), false);
    let host = Config { host_nqn: "nqn.2014-08.org.example:h".into(), ..good.clone() };
    let subsystem = Config { subsystem_nqn: "nqn.2014-08.org.example:s".into(), ..good.clone() };
    for other in [host, subsystem] {
        let mut pair = Pair::new(good.clone(), other);
        let (_, reply) = pair.challenged();
        let answer = pair.ask(&reply);
        refused(&pair.responder, &answer, FAILED);
    }
}

#[test]
fn a_controller_with_the_wrong_secret_is_refused() {
    for group in [DhGroup::Null, DhGroup::Ffdhe2048] {
        let good = config(policy(Hash::Sha256, group), true);
        let wrong = Config { controller_secret: Some(secret(WRONG_SECRET)), ..good.clone() };
        let mut pair = Pair::new(wrong, good);
        let (_, reply) = pair.challenged();
        let success1 = pair.ask(&reply);
        let next = pair.tell(&success1);
        let failure2 = host_refuses(&pair.prover, next, FAILED);
        assert!(pair.send(&failure2).is_none());
        assert_eq!(pair.responder.failure(), Some(AuthFailure::RefusedByPeer(FAILED)));
        assert!(!pair.responder.is_authenticated());
    }
}

/// As Linux and SPDK do it.
#[test]
fn a_controller_without_a_secret_refuses_to_prove_itself() {
    let policy = policy(Hash::Sha256, DhGroup::Null);
    let mut pair = Pair::new(config(policy.clone(), false), config(policy, true));
    let (_, reply) = pair.challenged();
    let answer = pair.ask(&reply);
    refused(&pair.responder, &answer, FAILED);
}

/// 8.13.5.5: the proof that was asked for is not left out, and none comes unasked.
#[test]
fn a_controller_proves_itself_if_and_only_if_it_was_asked() {
    let mut pair = quick(true);
    let (_, reply) = pair.challenged();
    let mut success1 = pair.ask(&reply);
    success1[8] = 0;
    let next = pair.tell(&success1);
    host_refuses(&pair.prover, next, PAYLOAD);

    let mut pair = quick(false);
    let (_, reply) = pair.challenged();
    let mut success1 = pair.ask(&reply);
    success1[8] = 1;
    let next = pair.tell(&success1);
    host_refuses(&pair.prover, next, PAYLOAD);
}

#[test]
fn truncated_messages_are_refused() {
    for cut in 0..72 {
        negotiate_refused(PAYLOAD, |negotiate| negotiate.truncate(cut));
    }
    for cut in 0..80 {
        reply_refused(DhGroup::Null, PAYLOAD, |_, reply| reply.truncate(cut));
    }
    for cut in [0, 5, 6, 15, 16, 48, 80, 81, 335] {
        reply_refused(DhGroup::Ffdhe2048, PAYLOAD, |_, reply| reply.truncate(cut));
    }
    for cut in 0..48 {
        challenge_refused(DhGroup::Null, PAYLOAD, |challenge| challenge.truncate(cut));
    }
    for cut in 0..48 {
        let mut pair = quick(true);
        let (_, reply) = pair.challenged();
        let success1 = pair.ask(&reply);
        let next = pair.tell(&success1[..cut]);
        host_refuses(&pair.prover, next, PAYLOAD);
    }
    for cut in 0..16 {
        let mut pair = quick(true);
        let (_, reply) = pair.challenged();
        let success1 = pair.ask(&reply);
        let HostStep::Authenticated(Some(success2)) = pair.tell(&success1) else {
            panic!("not proved")
        };
        let answer = pair.ask(&success2[..cut]);
        refused(&pair.responder, &answer, PAYLOAD);
    }
    for cut in 0..8 {
        let mut pair = quick(false);
        let failure1 = pair.ask(&[0xff; 6]);
        let next = pair.tell(&failure1[..cut]);
        host_refuses(&pair.prover, next, PAYLOAD);
    }
}

/// What a host sends is as long as it says; what it receives may be followed by zeroes.
#[test]
fn overlong_messages_are_refused() {
    negotiate_refused(PAYLOAD, |negotiate| negotiate.push(0));
    negotiate_refused(PAYLOAD, |negotiate| negotiate.resize(MAX_MESSAGE_BYTES + 8, 0));
    reply_refused(DhGroup::Null, PAYLOAD, |_, reply| reply.push(0));
    let mut pair = quick(true);
    let negotiate = pair.negotiate.clone();
    let mut challenge = pair.ask(&negotiate);
    challenge.resize(ROOM, 0);
    let HostStep::Send(reply) = pair.tell(&challenge) else { panic!("no reply") };
    let mut success1 = pair.ask(&reply);
    success1.resize(ROOM, 0);
    assert!(matches!(pair.tell(&success1), HostStep::Authenticated(Some(_))));
}

/// Every message from the host, when another one is due.
#[test]
fn messages_out_of_turn_are_refused() {
    let mut pair = quick(true);
    let negotiate = pair.negotiate.clone();
    let (challenge, reply) = pair.challenged();
    let success1 = pair.ask(&reply);
    let HostStep::Authenticated(Some(success2)) = pair.tell(&success1) else {
        panic!("not proved")
    };
    let failure2 = [0, 0xf0, 0, 0, 0x34, 0x12, 1, 1].to_vec();
    let unknown = [1, 5, 0, 0, 0x34, 0x12, 0, 0].to_vec();
    let foreign = [2, 0, 0, 0, 0x34, 0x12, 0, 0].to_vec();
    let never = [&challenge, &success1, &unknown, &foreign];
    // What has been exchanged before, and what is not due then.
    let stages: [(usize, Vec<&Vec<u8>>); 4] = [
        (0, vec![&reply, &success2, &failure2]),
        (1, vec![&success2]),
        (2, vec![&reply]),
        (3, vec![&reply]),
    ];
    for (stage, mut wrong) in stages {
        wrong.extend(never);
        for message in wrong {
            let mut pair = quick(true);
            for sent in [&negotiate, &reply].into_iter().take(stage) {
                pair.ask(sent);
            }
            if stage == 3 {
                pair.send(&success2);
                assert!(pair.responder.is_authenticated());
            }
            let answer = pair.ask(message);
            refused(&pair.responder, &answer, MESSAGE);
            // It stays refused, whatever comes.
            let answer = pair.ask(&negotiate);
            refused(&pair.responder, &answer, MESSAGE);
        }
    }
}

/// Authentication Receive when there is nothing to fetch.
#[test]
fn a_host_that_receives_out_of_turn_is_refused() {
    let mut pair = quick(true);
    let answer = pair.responder.on_receive(ROOM).unwrap();
    refused(&pair.responder, &answer, MESSAGE);
    let mut pair = quick(true);
    pair.challenged();
    assert_eq!(pair.responder.on_receive(7).unwrap_err().needed, 8);
    let answer = pair.responder.on_receive(8).unwrap();
    refused(&pair.responder, &answer, MESSAGE);
}

/// Every message from the controller, when another one is due.
#[test]
fn a_host_refuses_messages_out_of_turn() {
    let mut pair = quick(true);
    let (challenge, reply) = pair.challenged();
    let success1 = pair.ask(&reply);
    let failure2 = [0, 0xf0, 0, 0, 0x34, 0x12, 1, 1].to_vec();
    for (stage, wrong) in [(0, &success1), (1, &challenge), (2, &success1)] {
        for message in [wrong, &pair.negotiate, &reply, &failure2] {
            let mut fresh = quick(true);
            for told in [&challenge, &success1].into_iter().take(stage) {
                fresh.tell(told);
            }
            let next = fresh.tell(message);
            host_refuses(&fresh.prover, next, MESSAGE);
            assert!(matches!(fresh.tell(&challenge), HostStep::Failed(_, None)));
        }
    }
    // While it calculates, nothing is due.
    let mut pair = Pair::alike(Hash::Sha256, DhGroup::Ffdhe2048, true);
    let negotiate = pair.negotiate.clone();
    let challenge = pair.ask(&negotiate);
    let HostStep::Compute(work) = pair.prover.receive(&challenge, of_host) else {
        panic!("no work")
    };
    let next = pair.prover.receive(&challenge, of_host);
    host_refuses(&pair.prover, next, MESSAGE);
    assert!(pair.prover.on_computed(work.run()).is_none());
}

/// 8.13.5.2.
#[test]
fn offers_without_a_common_algorithm_are_refused() {
    negotiate_refused(FailureExplanation::HashUnusable, |negotiate| negotiate[12] = 3);
    negotiate_refused(FailureExplanation::HashUnusable, |negotiate| negotiate[10] = 0);
    negotiate_refused(FailureExplanation::GroupUnusable, |negotiate| negotiate[42] = 1);
    negotiate_refused(FailureExplanation::GroupUnusable, |negotiate| negotiate[11] = 0);
    negotiate_refused(FailureExplanation::ProtocolUnusable, |negotiate| negotiate[8] = 2);
    negotiate_refused(FailureExplanation::ProtocolUnusable, |negotiate| {
        negotiate[7] = 0;
        negotiate.truncate(8);
    });
    negotiate_refused(PAYLOAD, |negotiate| negotiate[10] = 31);
    negotiate_refused(PAYLOAD, |negotiate| negotiate[11] = 31);
    for concatenation in [1, 2, 0xff] {
        negotiate_refused(FailureExplanation::ConcatenationMismatch, |n| n[6] = concatenation);
    }
    // The protocol may be one of several.
    let mut pair = quick(false);
    let descriptor = pair.negotiate.split_off(8);
    pair.negotiate[7] = 2;
    pair.negotiate.extend([&[2; 64], &descriptor[..]].concat());
    pair.complete();
    assert!(pair.responder.is_authenticated());
}

/// A host takes what it has offered.
#[test]
fn choices_that_were_not_offered_are_refused() {
    challenge_refused(DhGroup::Null, FailureExplanation::HashUnusable, |challenge| {
        challenge[8] = 2;
    });
    challenge_refused(DhGroup::Null, FailureExplanation::HashUnusable, |challenge| {
        challenge[8] = 9;
    });
    challenge_refused(DhGroup::Null, FailureExplanation::GroupUnusable, |challenge| {
        challenge[9] = 1;
    });
    challenge_refused(DhGroup::Null, PAYLOAD, |challenge| challenge[6] = 48);
    challenge_refused(DhGroup::Null, PAYLOAD, |challenge| challenge[12..16].fill(0));
    challenge_refused(DhGroup::Null, PAYLOAD, |challenge| {
        challenge[10] = 1;
        challenge.push(2);
    });
}

#[test]
fn other_transactions_are_refused() {
    reply_refused(DhGroup::Null, PAYLOAD, |_, reply| reply[4] ^= 1);
    challenge_refused(DhGroup::Null, PAYLOAD, |challenge| challenge[4] ^= 1);
    let mut pair = quick(true);
    let (_, reply) = pair.challenged();
    let success1 = pair.ask(&reply);
    let HostStep::Authenticated(Some(mut success2)) = pair.tell(&success1) else {
        panic!("not proved")
    };
    success2[5] ^= 1;
    let answer = pair.ask(&success2);
    refused(&pair.responder, &answer, PAYLOAD);
    // Failure1 says which transaction it is of.
    assert_eq!(answer[4..6], [0x34, 0x12]);
}

/// RFC 7919 5.1: 0, 1, p - 1 and p; more than p; and what is not as long as it may be.
#[test]
fn weak_public_values_are_refused() {
    let p = prime();
    let minus = |n: u8| {
        let mut value = p.clone();
        value[255] -= n;
        value
    };
    let small = |n: u8| [vec![0; 255], vec![n]].concat();
    for bad in [small(0), small(1), minus(1), minus(0), vec![0xff; 256]] {
        reply_refused(DhGroup::Ffdhe2048, PAYLOAD, |_, reply| {
            reply[REPLY_PUBLIC..].copy_from_slice(&bad);
        });
        challenge_refused(DhGroup::Ffdhe2048, PAYLOAD, |challenge| {
            challenge[CHALLENGE_PUBLIC..].copy_from_slice(&bad);
        });
    }
    for (len, value) in [(0u16, vec![]), (257, [vec![0], minus(2)].concat()), (2, vec![0, 1])] {
        reply_refused(DhGroup::Ffdhe2048, PAYLOAD, |_, reply| {
            reply[10..12].copy_from_slice(&len.to_le_bytes());
            reply.truncate(REPLY_PUBLIC);
            reply.extend(&value);
        });
        challenge_refused(DhGroup::Ffdhe2048, PAYLOAD, |challenge| {
            challenge[10..12].copy_from_slice(&len.to_le_bytes());
            challenge.truncate(CHALLENGE_PUBLIC);
            challenge.extend(&value);
        });
    }
    // A value that is allowed, and not the host's, leads to another secret.
    reply_refused(DhGroup::Ffdhe2048, FAILED, |_, reply| {
        reply[REPLY_PUBLIC..].copy_from_slice(&minus(2));
    });
    // Without a group there is none.
    reply_refused(DhGroup::Null, PAYLOAD, |_, reply| {
        reply[10] = 1;
        reply.push(2);
    });
}

/// A host that is asked what it has just asked, or is asked for a secure channel.
#[test]
fn a_controller_does_not_answer_its_own_challenge() {
    for group in [DhGroup::Null, DhGroup::Ffdhe2048] {
        reply_refused(group, FAILED, |challenge, reply| {
            reply[48..80].copy_from_slice(&challenge[16..48]);
        });
    }
    reply_refused(DhGroup::Null, PAYLOAD, |_, reply| reply[12..16].fill(0));
    reply_refused(DhGroup::Null, PAYLOAD, |_, reply| reply[8] = 2);
    reply_refused(DhGroup::Null, PAYLOAD, |_, reply| reply[6] = 48);
}

/// Linux before 6.5 numbers its Reply 0 when it asks for nothing.
#[test]
fn a_host_without_a_challenge_needs_no_sequence_number() {
    let mut pair = quick(false);
    let (_, mut reply) = pair.challenged();
    reply[12..16].fill(0);
    let success1 = pair.ask(&reply);
    assert_eq!(success1[..2], [1, 3]);
    assert!(pair.responder.is_authenticated());
}

/// 8.13.4: the host may give up, also after the last message.
#[test]
fn a_host_may_give_up() {
    let mut pair = quick(false);
    pair.complete();
    let failure2 = [0, 0xf0, 0, 0, 0x34, 0x12, 1, 6];
    assert!(pair.send(&failure2).is_none());
    assert_eq!(pair.responder.failure(), Some(AuthFailure::RefusedByPeer(PAYLOAD)));
    assert!(!pair.responder.is_authenticated());
    // A host that goes on nevertheless is told no more than that.
    let negotiate = pair.negotiate.clone();
    let answer = pair.ask(&negotiate);
    assert_eq!(answer[..2], [0, 0xf1]);
}

/// The prime of ffdhe2048.
fn prime() -> Vec<u8> {
    let hex: String = FFDHE2048.split_whitespace().collect();
    let digit = |i: usize| u8::from_str_radix(&hex[2 * i..2 * i + 2], 16).expect("hex");
    (0..256).map(digit).collect()
}

/// RFC 7919, appendix A.1.
const FFDHE2048: &str = "
    ffffffffffffffffadf85458a2bb4a9aafdc5620273d3cf1d8b9c583ce2d3695
    a9e13641146433fbcc939dce249b3ef97d2fe363630c75d8f681b202aec4617a
    d3df1ed5d5fd65612433f51f5f066ed0856365553ded1af3b557135e7f57c935
    984f0c70e0e68b77e2a689daf3efe8721df158a136ade73530acca4f483a797a
    bc0ab182b324fb61d108a94bb2c8e3fbb96adab760d7f4681d4f42a3de394df4
    ae56ede76372bb190b07a7c8ee0a6d709e02fce1cdf7e2ecc03404cd28342f61
    9172fe9ce98583ff8e4f1232eef28183c3fe3b1b4c6fad733bb5fcbc2ec22005
    c58ef1837d1683b2c6f34a26c1b2effa886b423861285c97ffffffffffffffff
";
