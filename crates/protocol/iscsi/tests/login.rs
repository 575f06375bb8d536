//! The login phase, clause by clause (RFC 7143 6, 11.12, 11.13, 13).

use iscsi::pdu::{LoginStage, LoginStatus, Opcode};
use iscsi::target::{Action, CloseReason, Config, LoginGrant, LoginReject};
use iscsi::testing::{Harness, Pdu, Portions};

const NAMES: [(&str, &str); 3] = [
    ("InitiatorName", "iqn.2026-01.com.example:host"),
    ("TargetName", "iqn.2026-01.com.example:disk"),
    ("SessionType", "Normal"),
];
const S: LoginStage = LoginStage::Security;
const O: LoginStage = LoginStage::Operational;
const F: LoginStage = LoginStage::FullFeature;

fn with<'a>(more: &[(&'a str, &'a str)]) -> Vec<(&'a str, &'a str)> {
    NAMES.iter().chain(more).copied().collect()
}

fn status(pdu: &Pdu) -> LoginStatus {
    assert_eq!(pdu.opcode(), Opcode::LoginResponse);
    LoginStatus(u16::from_be_bytes([pdu.header[36], pdu.header[37]]))
}

/// The one response, which refuses; the connection is closed.
fn refused(lab: &mut Harness, bytes: &[u8]) -> LoginStatus {
    let got = lab.say(bytes);
    assert_eq!(got.len(), 1, "{got:?}");
    let status = status(&got[0]);
    assert_eq!(lab.closed, Some(CloseReason::LoginRefused(status)));
    assert_eq!(got[0].header[1] & 0x80, 0, "no transit");
    status
}

fn one(lab: &mut Harness, bytes: &[u8]) -> Pdu {
    let mut got = lab.say(bytes);
    assert_eq!(got.len(), 1, "{got:?}");
    assert_eq!(status(&got[0]), LoginStatus::Success);
    got.remove(0)
}

/// RFC 7143 6.3: both stages, as Linux does it; every byte of the first request and of both
/// response headers is given.
#[test]
fn clause_6_3_a_login_byte_by_byte() {
    let mut lab = Harness::default();
    lab.initiator.exp_stat_sn = 0x0a0b_0c0d;
    let mut request = vec![
        0x43, 0x81, 0, 0, 0, 0, 0, 0, // I, login; T, CSG 0, NSG 1; versions 0
        0x40, 0, 1, 0x37, 0, 0, 0, 0, // ISID, TSIH
        0, 0, 0, 0x10, 0, 1, 0, 0, // ITT, CID
        0, 0, 0, 7, 0x0a, 0x0b, 0x0c, 0x0d, // CmdSN, ExpStatSN
        0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
    ];
    let text = b"InitiatorName=iqn.2026-01.com.example:host\0\
        TargetName=iqn.2026-01.com.example:disk\0SessionType=Normal\0AuthMethod=CHAP,None\0";
    request[7] = u8::try_from(text.len()).unwrap();
    request.extend(text);
    request.resize(request.len().next_multiple_of(4), 0);
    let first = one(&mut lab, &request);
    let mut expect = [0; 48];
    expect[..2].copy_from_slice(&[0x23, 0x81]);
    expect[7] = u8::try_from(b"TargetPortalGroupTag=1\0AuthMethod=None\0".len()).unwrap();
    expect[8..14].copy_from_slice(&[0x40, 0, 1, 0x37, 0, 0]);
    expect[19] = 0x10;
    expect[24..28].copy_from_slice(&[0x0a, 0x0b, 0x0c, 0x0d]);
    expect[31] = 7;
    expect[35] = 7 + 127;
    assert_eq!(first.header, expect);
    assert_eq!(first.data, b"TargetPortalGroupTag=1\0AuthMethod=None\0");

    lab.initiator.cmd_sn = 7;
    lab.initiator.cid = 1;
    let second = lab.initiator.login(O, Some(F), &[("HeaderDigest", "None")]);
    let second = one(&mut lab, &second);
    expect[1] = 0x87;
    expect[7] = second.header[7];
    expect[15] = 1; // TSIH
    expect[27] = 0x0e; // StatSN
    assert_eq!(second.header, expect);
    assert_eq!(second.data, b"HeaderDigest=None\0MaxRecvDataSegmentLength=262144\0");
    assert_eq!(lab.closed, None);
}

/// RFC 7143 6.3.1: the security stage may be skipped, and so may the operational one.
#[test]
fn clause_6_3_1_stages_may_be_skipped() {
    for (first, next) in [(O, F), (S, F)] {
        let mut lab = Harness::default();
        let login = lab.initiator.login(first, Some(next), &NAMES);
        let got = one(&mut lab, &login);
        assert_eq!(got.header[1], 0x83 | first.0 << 2);
        let declared = got.value("MaxRecvDataSegmentLength").is_some();
        assert_eq!(declared, first == O);
        assert_eq!(lab.target.params().target_max_segment, if declared { 262_144 } else { 8192 });
    }
}

/// RFC 7143 6.3: without T the stage goes on.
#[test]
fn clause_6_3_a_stage_lasts_until_both_want_to_leave() {
    let mut lab = Harness::default();
    let login = lab.initiator.login(S, None, &NAMES);
    assert_eq!(one(&mut lab, &login).header[1], 0x00);
    let login = lab.initiator.login(S, None, &[("AuthMethod", "None")]);
    assert_eq!(one(&mut lab, &login).header[1], 0x00);
    let login = lab.initiator.login(S, Some(O), &[]);
    assert_eq!(one(&mut lab, &login).header[1], 0x81);
    for value in ["Yes", "No"] {
        let key = if value == "Yes" { "InitialR2T" } else { "ImmediateData" };
        let login = lab.initiator.login(O, None, &[(key, value)]);
        let got = one(&mut lab, &login);
        assert_eq!((got.header[1], got.value(key).as_deref()), (0x04, Some(value)));
    }
    let login = lab.initiator.login(O, Some(F), &[]);
    assert_eq!(one(&mut lab, &login).header[1], 0x87);
    assert!(lab.target.params().initial_r2t && !lab.target.params().immediate_data);
}

/// RFC 7143 6.3.1 and 11.13.5: keys that the first request must have.
#[test]
fn clause_6_3_1_missing_names_are_refused() {
    for (pairs, expect) in [
        (&NAMES[1..], LoginStatus::MissingParameter),
        (&NAMES[..1], LoginStatus::MissingParameter),
        (&[("InitiatorName", "host"), NAMES[1]], LoginStatus::InitiatorError),
        (&[NAMES[0], ("TargetName", "disk")], LoginStatus::NotFound),
        (&[NAMES[0], ("TargetName", "iqn.2026-01.com.example:other")], LoginStatus::NotFound),
        (&[NAMES[0], NAMES[1], ("SessionType", "Odd")], LoginStatus::SessionTypeUnsupported),
    ] {
        let mut lab = Harness::default();
        let login = lab.initiator.login(S, Some(O), pairs);
        assert_eq!(refused(&mut lab, &login), expect, "{pairs:?}");
    }
}

/// RFC 7143 4.2.7.2: names reach the driver folded.
#[test]
fn clause_4_2_7_names_are_compared_in_lower_case() {
    let mut lab = Harness { manual: true, ..Harness::default() };
    let names = [("InitiatorName", "IQN.2026-01.com.Example:Host"), NAMES[1]];
    let login = lab.initiator.login(S, None, &names);
    assert!(lab.say(&login).is_empty());
    let Action::Login(who) = lab.action() else { panic!("who is it?") };
    assert_eq!(who.initiator.as_str(), "iqn.2026-01.com.example:host");
    assert_eq!((who.isid, who.tsih, who.cid), ([0x40, 0, 1, 0x37, 0, 0], 0, 0));
}

/// RFC 7143 11.12: headers that no login has.
#[test]
fn clause_11_12_malformed_headers_are_refused() {
    let change = |at: usize, value: u8, expect| {
        let mut lab = Harness::default();
        let mut login = lab.initiator.login(S, Some(O), &NAMES);
        login[at] = value;
        assert_eq!(refused(&mut lab, &login), expect, "byte {at} = {value:#x}");
    };
    change(3, 1, LoginStatus::UnsupportedVersion);
    for flags in [0x80, 0x82, 0x8c, 0x8b, 0x85, 0x84, 0xc1] {
        change(1, flags, LoginStatus::InitiatorError);
    }
}

/// RFC 7143 11.12.5 to 11.12.7, 6.3: what must not change between requests.
#[test]
fn clause_11_12_identity_and_stage_do_not_change() {
    for change in 0..4 {
        let mut lab = Harness::default();
        let login = lab.initiator.login(S, Some(O), &NAMES);
        one(&mut lab, &login);
        match change {
            0 => lab.initiator.isid[5] = 9,
            1 => lab.initiator.tsih = 9,
            2 => lab.initiator.cid = 9,
            _ => {}
        }
        let stage = if change == 3 { S } else { O };
        let login = lab.initiator.login(stage, Some(F), &[]);
        assert_eq!(refused(&mut lab, &login), LoginStatus::InitiatorError);
    }
}

/// RFC 7143 6.2: keys are negotiated once, and in their stage.
#[test]
fn clause_6_2_repeated_and_misplaced_keys_are_refused() {
    for (stage, more) in [
        (O, &[("MaxBurstLength", "8192"), ("MaxBurstLength", "4096")][..]),
        (O, &[("InitiatorName", "iqn.2026-01.com.example:host")]),
        (S, &[("HeaderDigest", "None")]),
        (O, &[("AuthMethod", "None")]),
        (O, &[("SendTargets", "All")]),
        (O, &[("MaxRecvDataSegmentLength", "100")]),
        (S, &[("CHAP_A", "5")]),
    ] {
        let mut lab = Harness::default();
        let login = lab.initiator.login(stage, None, &with(more));
        assert_eq!(refused(&mut lab, &login), LoginStatus::InitiatorError, "{more:?}");
    }
    // Names in a later request.
    let mut lab = Harness::default();
    let login = lab.initiator.login(S, Some(O), &NAMES);
    one(&mut lab, &login);
    let login = lab.initiator.login(O, Some(F), &[("SessionType", "Normal")]);
    assert_eq!(refused(&mut lab, &login), LoginStatus::InitiatorError);
}

/// RFC 7143 6.2: unknown keys, keys of targets, and offers of all kinds are answered in order.
#[test]
fn clause_6_2_every_offer_is_answered() {
    let mut lab = Harness::default();
    let offers = [
        ("InitiatorAlias", "host"),
        ("X-com.example.colour", "blue"),
        ("RDMAExtensions", "Yes"),
        ("TargetAlias", "mine"),
        ("HeaderDigest", "CRC32C,None"),
        ("DataDigest", "None"),
        ("InitialR2T", "No"),
        ("MaxOutstandingR2T", "1"),
        ("IFMarker", "No"),
        ("TaskReporting", "RFC3720"),
    ];
    let login = lab.initiator.login(O, Some(F), &with(&offers));
    let got = one(&mut lab, &login);
    let expect = "TargetPortalGroupTag=1\0X-com.example.colour=NotUnderstood\0\
        RDMAExtensions=NotUnderstood\0TargetAlias=Reject\0HeaderDigest=CRC32C\0DataDigest=None\0\
        InitialR2T=No\0MaxOutstandingR2T=1\0IFMarker=No\0TaskReporting=RFC3720\0\
        MaxRecvDataSegmentLength=262144\0";
    assert_eq!(String::from_utf8_lossy(&got.data), expect);
}

/// RFC 7143 6.1: what is not text.
#[test]
fn clause_6_1_malformed_text_is_refused() {
    for text in [&b"InitiatorName"[..], b"=\0", b"InitiatorName=\xff\xfe\0", b"A B=1\0", b"A=1"] {
        let mut lab = Harness::default();
        let login = lab.initiator.login_text(S, Some(O), false, text);
        assert_eq!(refused(&mut lab, &login), LoginStatus::InitiatorError, "{text:?}");
    }
}

/// RFC 7143 6.2 and 11.12.2: text over several requests, with C, cut anywhere.
#[test]
fn clause_6_2_text_goes_on_with_the_c_bit() {
    let mut lab = Harness::default();
    let text: Vec<u8> = with(&[("HeaderDigest", "CRC32C")])
        .iter()
        .flat_map(|(k, v)| format!("{k}={v}\0").into_bytes())
        .collect();
    for piece in text[..text.len() - 7].chunks(10) {
        let login = lab.initiator.login_text(O, None, true, piece);
        let got = one(&mut lab, &login);
        assert_eq!((got.header[1], got.data.len()), (0x04, 0));
    }
    let login = lab.initiator.login_text(O, Some(F), false, &text[text.len() - 7..]);
    let got = one(&mut lab, &login);
    assert_eq!((got.header[1], got.value("HeaderDigest").as_deref()), (0x87, Some("CRC32C")));
}

/// RFC 7143 6.2: 64 KiB of text are enough for all initiators, and no login goes on for ever.
#[test]
fn clause_6_2_text_and_requests_are_bounded() {
    let mut lab = Harness::default();
    let piece = vec![b'x'; 8192];
    for _ in 0..8 {
        let login = lab.initiator.login_text(S, None, true, &piece);
        one(&mut lab, &login);
    }
    let login = lab.initiator.login_text(S, None, true, &piece);
    assert_eq!(refused(&mut lab, &login), LoginStatus::InitiatorError);

    let mut lab = Harness::default();
    let login = lab.initiator.login_text(S, None, true, b"");
    for _ in 0..128 {
        one(&mut lab, &login);
        assert_eq!(lab.closed, None);
    }
    assert_eq!(refused(&mut lab, &login), LoginStatus::InitiatorError);

    let mut lab = Harness::default();
    let many: Vec<_> = (0..200).map(|i| format!("X-{i}")).collect();
    let many: Vec<_> = many.iter().map(|k| (k.as_str(), "1")).collect();
    let login = lab.initiator.login(O, Some(F), &with(&many));
    assert_eq!(refused(&mut lab, &login), LoginStatus::InitiatorError);
}

/// RFC 7143 6.2: an answer longer than the initiator receives goes on with C, and requests are
/// empty meanwhile.
#[test]
fn clause_6_2_long_answers_come_in_parts() {
    let keys: Vec<_> = (0..120).map(|i| format!("X-{i:060}")).collect();
    let pairs: Vec<_> = keys.iter().map(|k| (k.as_str(), "1")).collect();
    let text: Vec<u8> =
        with(&pairs).iter().flat_map(|(k, v)| format!("{k}={v}\0").into_bytes()).collect();
    let mut lab = Harness::default();
    let (first, rest) = text.split_at(4000);
    let login = lab.initiator.login_text(O, None, true, first);
    one(&mut lab, &login);
    let login = lab.initiator.login_text(O, Some(F), false, rest);
    let got = one(&mut lab, &login);
    assert_eq!((got.header[1], got.data.len()), (0x44, 8192));
    let mut all = got.data;
    let login = lab.initiator.login(O, Some(F), &[]);
    let got = one(&mut lab, &login);
    assert_eq!(got.header[1], 0x87);
    all.extend(got.data);
    let answers = all.split(|&b| b == 0).filter(|a| a.ends_with(b"=NotUnderstood")).count();
    assert_eq!(answers, 120);

    let mut lab = Harness::default();
    let login = lab.initiator.login_text(O, None, true, first);
    one(&mut lab, &login);
    let login = lab.initiator.login_text(O, Some(F), false, rest);
    one(&mut lab, &login);
    let login = lab.initiator.login(O, Some(F), &[("InitialR2T", "No")]);
    assert_eq!(refused(&mut lab, &login), LoginStatus::InitiatorError);
}

/// RFC 7143 6.3: anything but a login request ends the connection, silently before a login and
/// with "invalid during login" in it.
#[test]
fn clause_6_3_only_logins_may_come_before_the_login_is_done() {
    let mut lab = Harness::default();
    let ping = lab.initiator.ping(b"");
    assert!(lab.say(&ping).is_empty());
    assert_eq!(lab.closed, Some(CloseReason::NotALogin));

    let mut lab = Harness::default();
    let login = lab.initiator.login(S, Some(O), &NAMES);
    one(&mut lab, &login);
    let ping = lab.initiator.ping(b"");
    assert_eq!(refused(&mut lab, &ping), LoginStatus::InvalidDuringLogin);
}

/// RFC 7143 13.12: 8192 bytes are the most that may come before anything is declared.
#[test]
fn clause_13_12_long_segments_end_a_login() {
    let mut lab = Harness::default();
    let login = lab.initiator.login_text(S, None, true, &vec![b'x'; 8193]);
    assert!(lab.say(&login[..48]).is_empty());
    assert!(matches!(lab.closed, Some(CloseReason::Protocol(_))));
}

/// RFC 7143 6.3.5 and 11.13.5: what the driver says is what the initiator is told.
#[test]
fn clause_11_13_5_the_driver_decides() {
    for status in [LoginStatus::AuthorizationFailure, LoginStatus::ServiceUnavailable] {
        let mut lab = Harness { manual: true, ..Harness::default() };
        let login = lab.initiator.login(O, Some(F), &NAMES);
        lab.say(&login);
        assert!(matches!(lab.action(), Action::Login(_)));
        assert_eq!(lab.feed(&login), login.len(), "nothing is received before the decision");
        lab.target.login_decision(Err(status.into()));
        assert_eq!(refused(&mut lab, &[]), status);
    }
    for status in [LoginStatus::NoSession, LoginStatus::TooManyConnections] {
        let mut lab = Harness { manual: true, ..Harness::default() };
        lab.initiator.tsih = 77;
        let login = lab.initiator.login(O, Some(F), &NAMES);
        lab.say(&login);
        assert!(matches!(lab.action(), Action::Login(who) if who.tsih == 77));
        lab.target.login_decision(Ok(lab.driver.login_grant()));
        let Action::Establish(session) = lab.action() else { panic!("no session") };
        assert_eq!(session.login.target.unwrap().as_str(), "iqn.2026-01.com.example:disk");
        lab.target.session_established(Err(status.into()));
        assert_eq!(refused(&mut lab, &[]), status);
    }
}

/// RFC 7143 6.3.4: a connection that goes on with a session begins with what that has agreed on,
/// but for its own.
#[test]
fn clause_6_3_4_a_session_keeps_its_parameters() {
    let agreed = iscsi::params::Params {
        header_digest: true,
        data_digest: true,
        initial_r2t: false,
        immediate_data: false,
        initiator_max_segment: 4096,
        target_max_segment: 4096,
        max_burst: 65_536,
        first_burst: 4096,
        max_outstanding_r2t: 3,
        time2wait: 7,
        time2retain: 0,
    };
    let mut lab = Harness { manual: true, ..Harness::default() };
    lab.initiator.tsih = 77;
    let offers = [NAMES[0], NAMES[1], ("DataDigest", "CRC32C"), ("MaxBurstLength", "8192")];
    let login = lab.initiator.login(O, Some(F), &offers);
    lab.say(&login);
    lab.action();
    let grant = LoginGrant { session: Some(agreed.clone()), ..lab.driver.login_grant() };
    lab.target.login_decision(Ok(grant));
    let Action::Establish(session) = lab.action() else { panic!("no session") };
    let own = iscsi::params::Params::default();
    let expected = iscsi::params::Params {
        header_digest: false,
        data_digest: true,
        initiator_max_segment: own.initiator_max_segment,
        target_max_segment: session.params.target_max_segment,
        max_burst: 8192,
        ..agreed
    };
    assert_eq!(session.params, expected);
    assert_eq!(session.params.target_max_segment, 256 * 1024, "it was declared");
}

/// RFC 7143 11.13.5 and 13.8: redirection names the other place.
#[test]
fn clause_11_13_5_redirection_names_the_address() {
    let mut lab = Harness { manual: true, ..Harness::default() };
    let login = lab.initiator.login(O, Some(F), &NAMES);
    lab.say(&login);
    lab.action();
    let status = LoginStatus::MovedTemporarily;
    let moved_to = Some("[2001:db8::1]:3260".to_string());
    lab.target.login_decision(Err(LoginReject { status, redirect_address: moved_to }));
    let got = lab.pump();
    assert_eq!(got[0].header[36..38], [1, 1]);
    assert_eq!(got[0].value("TargetAddress").as_deref(), Some("[2001:db8::1]:3260"));
}

/// RFC 7143 13.6 and 13.9: the alias and the portal group come with the first response, and not
/// in discovery.
#[test]
fn clause_13_9_the_first_response_names_the_portal_group() {
    let mut lab = Harness { manual: true, ..Harness::default() };
    let login = lab.initiator.login(S, Some(O), &NAMES);
    lab.say(&login);
    lab.action();
    let alias = Some("the disk".to_string());
    lab.target.login_decision(Ok(LoginGrant {
        target_alias: alias,
        portal_group: 3,
        ..lab.driver.login_grant()
    }));
    let got = lab.pump();
    assert_eq!(got[0].data, b"TargetPortalGroupTag=3\0TargetAlias=the disk\0");
    let login = lab.initiator.login(O, None, &[]);
    assert_eq!(lab.say(&login)[0].value("TargetPortalGroupTag"), None);

    let mut lab = Harness::default();
    let login = lab.initiator.login(S, Some(O), &[NAMES[0], ("SessionType", "Discovery")]);
    assert_eq!(one(&mut lab, &login).value("TargetPortalGroupTag"), None);
}

/// A login that does not come to an end is ended.
#[test]
fn logins_have_a_time_limit() {
    let mut lab = Harness::new(Config::default());
    assert!(lab.wait(14).is_empty());
    let login = lab.initiator.login(S, Some(O), &NAMES);
    one(&mut lab, &login);
    assert_eq!(lab.closed, None);
    lab.wait(1);
    assert_eq!(lab.closed, Some(CloseReason::LoginTimeout));
}

/// Whatever the portions, the answers are the same.
#[test]
fn logins_may_come_in_any_portions() {
    let heard: Vec<_> = [Portions::Whole, Portions::Bytes(1), Portions::Random(3)]
        .into_iter()
        .map(|portions| {
            let mut lab = Harness { portions, ..Harness::default() };
            let first = lab.initiator.login(S, Some(O), &with(&[("AuthMethod", "None")]));
            one(&mut lab, &first);
            let second = lab.initiator.login(O, Some(F), &[("DataDigest", "CRC32C")]);
            one(&mut lab, &second);
            lab.bytes_received
        })
        .collect();
    assert_eq!(heard[0], heard[1]);
    assert_eq!(heard[0], heard[2]);
}
