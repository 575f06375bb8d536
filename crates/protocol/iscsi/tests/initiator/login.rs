//! Logins: against our own target, and against one that does not keep to the rules. Each test names
//! its clause of RFC 7143.

use std::sync::Arc;

use frame::Machine;
use iscsi::chap::Secret;
use iscsi::initiator::{CloseReason, Config, Connection, Credentials};
use iscsi::pdu::{BHS_LEN, FINAL, Header, LoginResponse, LoginStatus, Opcode, segment_len};
use iscsi::target::{self, Auth, ChapPolicy};
use iscsi::testing::ScriptedInitiator;
use iscsi::text::Pairs;

use super::pair::{Pair, config, fresh};
use testkit::machine::{feed, take};

fn secret(text: &str) -> Secret {
    Secret::new(text.as_bytes()).unwrap()
}

fn policy(mutual: bool) -> Auth {
    Auth::Chap(Box::new(ChapPolicy {
        user: "host".into(),
        secret: secret("twelve bytes of it"),
        mutual: mutual.then(|| ("disk".into(), secret("other twelve bytes"))),
        challenge: [7; 32],
        id: 3,
    }))
}

fn credentials(secret_text: &str, mutual: Option<&str>) -> Option<Credentials> {
    let mutual = mutual.map(|text| ("disk".to_owned(), secret(text)));
    Some(Credentials { user: "host".into(), secret: secret(secret_text), mutual })
}

fn log_in(auth: Auth, credentials: Option<Credentials>) -> Option<CloseReason> {
    let host = Config { credentials, ..config() };
    let mut pair = Pair::new(host, target::Config::default());
    pair.driver.auth = auth;
    pair.pump(&mut || 5);
    assert_eq!(pair.host.close_reason().is_none(), pair.host.params().is_some());
    pair.host.close_reason()
}

/// RFC 7143 12.1: none, CHAP, mutual CHAP; who is asked for less than he has goes in.
#[test]
fn clause_12_1_both_sides_prove_who_they_are() {
    let (right, theirs) = ("twelve bytes of it", "other twelve bytes");
    assert_eq!(log_in(Auth::None, None), None);
    assert_eq!(log_in(Auth::None, credentials(right, None)), None);
    assert_eq!(log_in(policy(false), credentials(right, None)), None);
    assert_eq!(log_in(policy(true), credentials(right, None)), None);
    assert_eq!(log_in(policy(true), credentials(right, Some(theirs))), None);
}

/// RFC 7143 12.1.3, 9.2.1: wrong secrets, missing ones, one for both ways, proofs that are left
/// out.
#[test]
fn clause_12_1_3_a_failed_proof_ends_the_login() {
    let (right, theirs) = ("twelve bytes of it", "other twelve bytes");
    let refused = Some(CloseReason::LoginRefused(LoginStatus::AuthenticationFailure));
    assert_eq!(log_in(policy(false), None), refused);
    assert_eq!(log_in(policy(false), credentials("another secret", None)), refused);
    assert_eq!(log_in(policy(false), credentials(right, Some(theirs))), refused);
    let wrong = Some(CloseReason::TargetAuthenticationFailed);
    assert_eq!(log_in(policy(true), credentials(right, Some("not that of disk"))), wrong);
    assert_eq!(log_in(policy(true), credentials(right, Some(right))), wrong);
    assert_eq!(log_in(Auth::None, credentials(right, Some(theirs))), refused);
}

/// A target whose every word is the test's.
struct Script {
    host: Connection,
    stat_sn: u32,
    itt: u32,
    /// Text of the last request, and its flags.
    said: Vec<(String, String)>,
    flags: u8,
}

impl Script {
    fn new(config: Config) -> Self {
        let host = Connection::new(Arc::new(config), fresh());
        let mut new = Self { host, stat_sn: 5, itt: 0, said: Vec::new(), flags: 0 };
        new.listen();
        new
    }

    fn listen(&mut self) {
        let bytes = take(&mut self.host, &mut || usize::MAX);
        let Some(header) = bytes.first_chunk::<BHS_LEN>() else { return };
        let header = Header::of(header);
        assert_eq!((header.opcode(), header.is_immediate()), (Opcode::LoginRequest, true));
        (self.itt, self.flags) = (header.itt.get(), header.flags);
        let text = &bytes[BHS_LEN..BHS_LEN + header.data_segment_len()];
        self.said = Pairs::of(text)
            .map(|p| p.map(|(k, v)| (k.to_owned(), v.to_owned())).unwrap())
            .collect();
    }

    fn value(&self, key: &str) -> Option<&str> {
        self.said.iter().find(|(k, _)| k == key).map(|(_, v)| v.as_str())
    }

    fn response(&mut self, flags: u8) -> LoginResponse {
        let mut pdu = LoginResponse::zeroed();
        (pdu.flags, pdu.itt) = (flags, self.itt.into());
        pdu.isid = [0x80, 1, 2, 3, 0, 0];
        pdu.tsih = 1.into();
        pdu.numbers.stat_sn = self.stat_sn.into();
        (pdu.numbers.exp_cmd_sn, pdu.numbers.max_cmd_sn) = (1.into(), 32.into());
        self.stat_sn += 1;
        pdu
    }

    fn send(&mut self, mut pdu: LoginResponse, text: &str) {
        let text = text.replace(' ', "\0");
        pdu.data_len = segment_len(text.len());
        let bytes = ScriptedInitiator::default().frame(pdu.as_bytes(), text.as_bytes());
        feed(&mut self.host, &bytes, &mut || 11);
        self.listen();
    }

    fn say(&mut self, flags: u8, text: &str) {
        let pdu = self.response(flags);
        self.send(pdu, text);
    }

    /// What was said last has ended the login so.
    #[track_caller]
    fn ends(&self, end: CloseReason) {
        assert_eq!(self.host.close_reason(), Some(end));
        assert!(self.host.is_closing() && self.host.params().is_none());
    }

    #[track_caller]
    fn violates(&self) {
        assert!(
            matches!(self.host.close_reason(), Some(CloseReason::Violation(_))),
            "{:?}",
            self.host.close_reason()
        );
        assert!(self.host.is_closing() && self.host.params().is_none());
    }
}

/// From security to operational, from there to the full feature phase.
const TO_OPERATIONAL: u8 = FINAL | 1;
const IN_OPERATIONAL: u8 = 1 << 2;
const TO_FULL: u8 = FINAL | 1 << 2 | 3;
const CONTINUES: u8 = 0x40;

/// In the operational stage, all offers made.
fn operational() -> Script {
    let mut script = Script::new(config());
    assert_eq!(script.value("AuthMethod"), Some("None"));
    assert_eq!(script.value("SessionType"), Some("Normal"));
    script.say(TO_OPERATIONAL, "AuthMethod=None TargetPortalGroupTag=1 ");
    assert_eq!(script.host.close_reason(), None);
    assert_eq!(script.flags, TO_FULL);
    script
}

/// RFC 7143 6.2: answers in parts, unknown keys, a target that is not ready at once.
#[test]
fn clause_6_2_a_target_takes_its_time() {
    let mut script = Script::new(config());
    script.say(0, "");
    assert_eq!(script.flags, TO_OPERATIONAL, "asked again");
    script.say(TO_OPERATIONAL, "AuthMethod=None ");
    script.say(IN_OPERATIONAL | CONTINUES, "HeaderDigest=CRC32C X-com.example.a=1 MaxBur");
    assert_eq!((script.flags, script.said.len()), (IN_OPERATIONAL, 0));
    script.say(IN_OPERATIONAL, "stLength=65536 ");
    assert_eq!(script.flags, TO_FULL);
    assert_eq!(script.value("X-com.example.a"), Some("NotUnderstood"));
    script.say(TO_FULL, "MaxRecvDataSegmentLength=4096 ");
    let params = script.host.params().expect("logged in");
    assert!(params.header_digest && !params.data_digest && params.initial_r2t);
    assert_eq!((params.max_burst, params.target_max_segment), (65_536, 4096));
}

/// RFC 7143 13: an answer outside the offer, a key twice, where it does not belong, of the
/// initiator.
#[test]
fn clause_13_unrequested_answers() {
    for text in [
        "MaxBurstLength=1048577 ",
        "MaxBurstLength=511 ",
        "FirstBurstLength=16777215 ",
        "MaxOutstandingR2T=0 ",
        "HeaderDigest=CRC64 ",
        "ErrorRecoveryLevel=2 ",
        "MaxConnections=4 ",
        "DataPDUInOrder=No ",
        "MaxRecvDataSegmentLength=1 ",
        "MaxBurstLength=512 MaxBurstLength=512 ",
        "AuthMethod=None ",
        "CHAP_A=5 ",
        "InitiatorName=iqn.2026-01.com.example:x ",
        "SendTargets=All ",
        "IFMarker=No ",
        "MaxBurstLength",
        "no pairs at all ",
        "=1 ",
    ] {
        let mut script = operational();
        script.say(TO_FULL, text);
        script.violates();
    }
}

/// RFC 7143 6.2, 11.13.1: text without end, keys without end, a login without end.
#[test]
fn clause_6_2_logins_are_bounded() {
    let mut script = operational();
    let piece = format!("TargetAlias={}", "x".repeat(4000));
    while script.host.close_reason().is_none() && script.stat_sn < 200 {
        script.say(IN_OPERATIONAL | CONTINUES, &piece);
    }
    script.violates();
    let mut script = operational();
    let many: String = (0..65).map(|i| format!("X-{i}=1 ")).collect();
    script.say(IN_OPERATIONAL, &many);
    script.violates();
    let mut script = operational();
    while script.host.close_reason().is_none() && script.stat_sn < 200 {
        script.say(IN_OPERATIONAL, "");
    }
    script.violates();
    assert!(script.stat_sn < 80);
}

/// RFC 7143 11.13: stages that were not asked for, T with C, another session, version, number or
/// task, no handle.
#[test]
fn clause_11_13_invalid_headers() {
    let spoilt: [&dyn Fn(&mut LoginResponse); 10] = [
        &|p| p.flags = FINAL | 3,
        &|p| p.flags = TO_FULL,
        &|p| p.flags = IN_OPERATIONAL,
        &|p| p.flags = TO_OPERATIONAL | CONTINUES,
        &|p| p.isid[5] = 1,
        &|p| p.version_active = 1,
        &|p| p.itt = 77.into(),
        &|p| p.first = Opcode::NopIn.0,
        &|p| p.first = Opcode::ScsiResponse.0,
        &|p| p.flags = 2 << 2,
    ];
    for spoil in spoilt {
        let mut script = Script::new(config());
        let mut pdu = script.response(TO_OPERATIONAL);
        spoil(&mut pdu);
        script.send(pdu, "AuthMethod=None ");
        script.violates();
    }
    let mut script = operational();
    script.stat_sn += 1;
    script.say(TO_FULL, "");
    script.violates();
    let mut script = operational();
    let mut pdu = script.response(TO_FULL);
    pdu.tsih = 0.into();
    script.send(pdu, "");
    script.violates();
    let mut script = Script::new(config());
    script.say(TO_OPERATIONAL, &format!("TargetAlias={} ", "x".repeat(8200)));
    script.violates();
}

/// RFC 7143 11.13.5: refusals, and redirections, of which the address is told.
#[test]
fn clause_11_13_5_refused_or_moved() {
    for status in [LoginStatus::NotFound, LoginStatus::OutOfResources, LoginStatus(0x0fff)] {
        let mut script = Script::new(config());
        let mut pdu = script.response(0);
        pdu.status = status.0.into();
        script.send(pdu, "");
        script.ends(CloseReason::LoginRefused(status));
    }
    for (status, for_good) in
        [(LoginStatus::MovedTemporarily, false), (LoginStatus::MovedPermanently, true)]
    {
        let mut script = Script::new(config());
        let mut pdu = script.response(0);
        pdu.status = status.0.into();
        script.send(pdu, "TargetAddress=[2001:db8::1]:3260,7 ");
        script.ends(CloseReason::Redirected { permanent: for_good });
        assert_eq!(script.host.redirect_address(), Some("[2001:db8::1]:3260,7"));
    }
    let mut script = Script::new(config());
    let mut pdu = script.response(0);
    pdu.status = LoginStatus::MovedTemporarily.0.into();
    script.send(pdu, "");
    script.violates();
}

/// RFC 7143 12.1.3: a target that asks for what there is not, or answers what was not asked.
#[test]
fn clause_12_1_3_a_target_that_cheats() {
    let both = || Config {
        credentials: credentials("twelve bytes of it", Some("other twelve bytes")),
        ..config()
    };
    let mut script = Script::new(config());
    script.say(0, "AuthMethod=CHAP ");
    script.ends(CloseReason::SecretMissing);
    for text in ["AuthMethod=SRP ", "AuthMethod=None CHAP_R=0x00 ", "CHAP_A=5 "] {
        let mut script = Script::new(config());
        script.say(TO_OPERATIONAL, text);
        script.violates();
    }
    // With a secret of the target, a target that proves nothing is none.
    for (flags, text) in [(0, "AuthMethod=None "), (0, "AuthMethod=None TargetAlias=x ")] {
        let mut script = Script::new(both());
        assert_eq!(script.value("AuthMethod"), Some("CHAP"));
        script.say(flags, text);
        script.ends(CloseReason::TargetNotAuthenticated);
    }
    let challenged = || {
        let mut script = Script::new(both());
        script.say(0, "AuthMethod=CHAP ");
        assert_eq!(script.value("CHAP_A"), Some("7,5"));
        script
    };
    for text in [
        "CHAP_A=6 CHAP_I=1 CHAP_C=0x1234 ",
        "CHAP_A=5 CHAP_I=256 CHAP_C=0x1234 ",
        "CHAP_A=5 CHAP_I=1 CHAP_C=1234 ",
        "CHAP_A=5 CHAP_I=1 ",
        "CHAP_A=5 CHAP_I=1 CHAP_C=0x1234 CHAP_N=disk ",
    ] {
        let mut script = challenged();
        script.say(0, text);
        script.violates();
    }
    let mut script = challenged();
    script.say(0, &format!("CHAP_A=5 CHAP_I=9 CHAP_C=0x{} ", "5c".repeat(32)));
    script.ends(CloseReason::TargetAuthenticationFailed);
    for (text, end) in [
        ("CHAP_N=disk CHAP_R=0x00 ", CloseReason::TargetAuthenticationFailed),
        ("CHAP_N=disk ", CloseReason::TargetNotAuthenticated),
        ("", CloseReason::TargetNotAuthenticated),
    ] {
        let mut script = challenged();
        script.say(0, "CHAP_A=5 CHAP_I=1 CHAP_C=0x1234 ");
        assert!(script.value("CHAP_R").is_some() && script.value("CHAP_C").is_some());
        assert_eq!(script.flags, TO_OPERATIONAL);
        script.say(TO_OPERATIONAL, text);
        script.ends(end);
    }
}
