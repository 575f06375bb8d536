//! CHAP, clause by clause (RFC 7143 9.2.1, 12.1, 12.1.3).

use iscsi::chap::{Algorithm, Secret};
use iscsi::pdu::{LoginStage, LoginStatus};
use iscsi::target::{Auth, ChapPolicy, CloseReason};
use iscsi::testing::{Harness, Pdu};
use iscsi::value::{Hex, binary};

const S: LoginStage = LoginStage::Security;
const O: LoginStage = LoginStage::Operational;
const CHALLENGE: [u8; 32] = [0xc7; 32];

fn secret(bytes: &[u8]) -> Secret {
    Secret::new(bytes).expect("long enough")
}

fn policy() -> ChapPolicy {
    ChapPolicy {
        user: "host".into(),
        secret: secret(b"initiator secret"),
        mutual: Some(("disk".into(), secret(b"the target's own"))),
        challenge: CHALLENGE,
        id: 0x5a,
    }
}

fn lab(policy: ChapPolicy) -> Harness {
    let mut lab = Harness::default();
    lab.driver.auth = Auth::Chap(Box::new(policy));
    lab
}

fn say(lab: &mut Harness, next: Option<LoginStage>, pairs: &[(&str, &str)]) -> Pdu {
    let login = lab.initiator.login(S, next, pairs);
    let mut got = lab.say(&login);
    assert_eq!(got.len(), 1, "{got:?}");
    got.remove(0)
}

const NAMES: [(&str, &str); 3] = [
    ("InitiatorName", "iqn.2026-01.com.example:host"),
    ("TargetName", "iqn.2026-01.com.example:disk"),
    ("AuthMethod", "CHAP,None"),
];

/// Up to the challenge, which is returned.
fn challenged(lab: &mut Harness, algorithms: &str) -> Pdu {
    let got = say(lab, Some(O), &NAMES);
    assert_eq!(got.value("AuthMethod").as_deref(), Some("CHAP"));
    assert_eq!(got.header[1], 0x00, "no transit before the proof");
    say(lab, None, &[("CHAP_A", algorithms)])
}

fn response(algorithm: Algorithm, secret: &Secret, id: u8, challenge: &[u8]) -> String {
    Hex(algorithm.response(id, secret, challenge).as_bytes()).to_string()
}

fn status(pdu: &Pdu) -> LoginStatus {
    LoginStatus(u16::from_be_bytes([pdu.header[36], pdu.header[37]]))
}

fn refused(lab: &Harness, pdu: &Pdu, expect: LoginStatus) {
    assert_eq!(status(pdu), expect);
    assert_eq!(lab.closed, Some(CloseReason::LoginRefused(expect)));
}

/// RFC 7143 12.1.3: with the first algorithm of the initiator's list that we have.
#[test]
fn clause_12_1_3_the_initiator_proves_who_it_is() {
    for (offer, number, algorithm) in [
        ("5", "5", Algorithm::Md5),
        ("8,7,5", "7", Algorithm::Sha256),
        ("6,5", "5", Algorithm::Md5),
    ] {
        let mut lab = lab(policy());
        let got = challenged(&mut lab, offer);
        assert_eq!(got.value("CHAP_A").as_deref(), Some(number));
        assert_eq!(got.value("CHAP_I").as_deref(), Some("90"));
        assert_eq!(binary(&got.value("CHAP_C").unwrap()).unwrap(), CHALLENGE);
        let response = response(algorithm, &policy().secret, 0x5a, &CHALLENGE);
        let got = say(&mut lab, Some(O), &[("CHAP_N", "host"), ("CHAP_R", &response)]);
        assert_eq!((status(&got), got.header[1]), (LoginStatus::Success, 0x81));
        assert!(got.data.is_empty());
    }
}

/// RFC 7143 12.1.3: mutual authentication, with hexadecimal and base64 challenges.
#[test]
fn clause_12_1_3_the_target_proves_who_it_is() {
    for challenge in ["0x0102030405060708090a0b0c0d0e0f10", "0bAQIDBAUGBwgJCgsMDQ4PEA=="] {
        let mut lab = lab(policy());
        challenged(&mut lab, "5");
        let proof = response(Algorithm::Md5, &policy().secret, 0x5a, &CHALLENGE);
        let keys = [
            ("CHAP_N", "host"),
            ("CHAP_R", proof.as_str()),
            ("CHAP_I", "0x17"),
            ("CHAP_C", challenge),
        ];
        let got = say(&mut lab, Some(O), &keys);
        assert_eq!(got.header[1], 0x81);
        assert_eq!(got.value("CHAP_N").as_deref(), Some("disk"));
        let bytes: Vec<u8> = (1..=16).collect();
        let expect = response(Algorithm::Md5, &secret(b"the target's own"), 0x17, &bytes);
        assert_eq!(got.value("CHAP_R"), Some(expect));
    }
}

/// RFC 7143 12.1.3 and 11.13.5: what proves nothing.
#[test]
fn clause_12_1_3_wrong_proofs_are_refused() {
    let right = response(Algorithm::Md5, &policy().secret, 0x5a, &CHALLENGE);
    let wrong = response(Algorithm::Md5, &secret(b"another secret"), 0x5a, &CHALLENGE);
    let failed = LoginStatus::AuthenticationFailure;
    for (keys, expect) in [
        (&[("CHAP_N", "host"), ("CHAP_R", wrong.as_str())][..], failed),
        (&[("CHAP_N", "guest"), ("CHAP_R", &right)], failed),
        (&[("CHAP_N", "host"), ("CHAP_R", &right[..right.len() - 2])], failed),
        (&[("CHAP_N", "host"), ("CHAP_R", "0x")], failed),
        (&[("CHAP_N", "host"), ("CHAP_R", "zz")], failed),
        (&[("CHAP_N", "host")], LoginStatus::MissingParameter),
        (&[("CHAP_R", &right)], LoginStatus::MissingParameter),
        (&[], LoginStatus::MissingParameter),
        (&[("CHAP_N", "host"), ("CHAP_R", &right), ("CHAP_I", "1")], LoginStatus::MissingParameter),
        (&[("CHAP_N", "host"), ("CHAP_R", &right), ("CHAP_I", "256"), ("CHAP_C", "0x01")], failed),
        (&[("CHAP_N", "host"), ("CHAP_R", &right), ("CHAP_I", "1"), ("CHAP_C", "0x")], failed),
        (&[("CHAP_A", "5"), ("CHAP_N", "host"), ("CHAP_R", &right)], LoginStatus::InitiatorError),
    ] {
        let mut lab = lab(policy());
        challenged(&mut lab, "5");
        let got = say(&mut lab, Some(O), keys);
        refused(&lab, &got, expect);
    }
}

/// RFC 7143 12.1: no common method or algorithm, or no attempt at all.
#[test]
fn clause_12_1_required_authentication_cannot_be_skipped() {
    let failed = LoginStatus::AuthenticationFailure;
    for (stage, method) in [(S, Some("None")), (S, Some("SRP,KRB5")), (S, None), (O, None)] {
        let mut lab = lab(policy());
        let mut pairs = NAMES[..2].to_vec();
        pairs.extend(method.map(|m| ("AuthMethod", m)));
        let login = lab.initiator.login(stage, Some(LoginStage::FullFeature), &pairs);
        let got = lab.say(&login);
        refused(&lab, &got[0], failed);
    }
    let mut lab = lab(policy());
    say(&mut lab, Some(O), &NAMES);
    let got = say(&mut lab, None, &[("CHAP_A", "6,8")]);
    refused(&lab, &got, failed);
}

/// RFC 7143 6.3.2: the steps come in their order, and T does not skip them.
#[test]
fn clause_6_3_2_no_step_is_skipped() {
    let right = response(Algorithm::Md5, &policy().secret, 0x5a, &CHALLENGE);
    let mut early = lab(policy());
    say(&mut early, Some(O), &NAMES);
    let got = say(&mut early, Some(O), &[("CHAP_N", "host"), ("CHAP_R", &right)]);
    refused(&early, &got, LoginStatus::MissingParameter);

    let mut skipping = lab(policy());
    challenged(&mut skipping, "5");
    let login = skipping.initiator.login(O, Some(LoginStage::FullFeature), &[]);
    let got = skipping.say(&login);
    refused(&skipping, &got[0], LoginStatus::InitiatorError);

    let mut twice = lab(policy());
    challenged(&mut twice, "5");
    say(&mut twice, None, &[("CHAP_N", "host"), ("CHAP_R", &right)]);
    let got = say(&mut twice, Some(O), &[("CHAP_N", "host"), ("CHAP_R", &right)]);
    refused(&twice, &got, LoginStatus::InitiatorError);
}

/// RFC 7143 9.2.1: a target answers neither its own challenge nor with the initiator's secret.
#[test]
fn clause_9_2_1_reflections_are_refused() {
    let right = response(Algorithm::Md5, &policy().secret, 0x5a, &CHALLENGE);
    let reflected = Hex(&CHALLENGE).to_string();
    let same = ChapPolicy { mutual: Some(("disk".into(), policy().secret)), ..policy() };
    let none = ChapPolicy { mutual: None, ..policy() };
    for (policy, challenge) in [(policy(), reflected.as_str()), (same, "0x0102"), (none, "0x0102")]
    {
        let mut lab = lab(policy);
        challenged(&mut lab, "5");
        let keys = [("CHAP_N", "host"), ("CHAP_R", &right), ("CHAP_I", "1"), ("CHAP_C", challenge)];
        let got = say(&mut lab, Some(O), &keys);
        refused(&lab, &got, LoginStatus::AuthenticationFailure);
        assert!(got.data.is_empty(), "nothing is given away");
    }
}

/// RFC 7143 12.1: an initiator that has nothing to prove says so.
#[test]
fn clause_12_1_none_is_negotiated_without_secrets() {
    let mut lab = Harness::default();
    assert_eq!(say(&mut lab, Some(O), &NAMES).value("AuthMethod").as_deref(), Some("None"));
    let mut only_chap = Harness::default();
    let mut names = NAMES;
    names[2].1 = "CHAP";
    let got = say(&mut only_chap, Some(O), &names);
    refused(&only_chap, &got, LoginStatus::AuthenticationFailure);
}
