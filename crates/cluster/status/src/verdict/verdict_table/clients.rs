//! Clients that fail authentication, and names that two hosts share.

use std::net::IpAddr;

use target::auth_throttle::{AuthMethod as Proof, FailingClient};
use target::{ClientReport, DuplicateName};

use super::*;

fn locked(method: VolumeAuthMethod) -> NodeFacts {
    let volume = "v".parse().unwrap();
    NodeFacts {
        unreadable_secrets: vec![UnreadableSecret { volume, method, why: "no key".into() }],
        ..alone(open())
    }
}

const ADDRESS: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(192, 0, 2, 7));

/// An unknown client fails authentication.
fn failing(method: Proof) -> NodeFacts {
    let mut facts = reported(|_| {});
    let failing = FailingClient {
        address: ADDRESS,
        method,
        name: "iqn.a".into(),
        target: facts.volumes[0].0.record.iscsi_target.clone(),
        times: 40,
        ago: Duration::from_secs(3),
    };
    let clients = ClientReport { failing_clients: vec![failing], ..ClientReport::default() };
    match method {
        Proof::Token | Proof::Join => facts.api_clients = clients,
        _ => facts.cores[0].clients = clients,
    }
    facts
}

/// A host that has authenticated before fails authentication.
fn failing_host(method: Proof) -> NodeFacts {
    let mut facts = failing(method);
    facts.api_clients.proven = [ADDRESS].into();
    facts
}

pub(super) const CLIENTS: &[Row] = &[
    Row {
        case: "the CHAP secrets of a volume cannot be read",
        facts: || locked(VolumeAuthMethod::Chap),
        verdict: UNAVAILABLE,
        shown: ONLINE,
        findings: &[(
            "its CHAP secrets cannot be read: no key",
            "windrose volume chap v USER:SECRET-FILE",
        )],
    },
    Row {
        case: "the secrets of its NVMe hosts cannot be read",
        facts: || locked(VolumeAuthMethod::Dhchap),
        verdict: UNAVAILABLE,
        shown: ONLINE,
        findings: &[(
            "its secrets of NVMe hosts cannot be read",
            "windrose volume dhchap v --host NQN",
        )],
    },
    Row {
        case: "the TLS keys of its NVMe hosts cannot be read",
        facts: || locked(VolumeAuthMethod::Tls),
        verdict: UNAVAILABLE,
        shown: ONLINE,
        findings: &[(
            "its TLS keys of NVMe hosts cannot be read",
            "windrose volume tls v --host NQN --key",
        )],
    },
    Row {
        case: "a host guesses CHAP secrets",
        facts: || failing(Proof::Chap),
        verdict: SAFE,
        shown: ONLINE,
        findings: &[(
            "192.0.2.7 (as iqn.a) failed to authenticate by CHAP 40 times",
            "windrose volume chap v USER:SECRET-FILE; otherwise block 192.0.2.7 in the firewall",
        )],
    },
    Row {
        case: "a host guesses DH-HMAC-CHAP secrets",
        facts: || failing(Proof::Dhchap),
        verdict: SAFE,
        shown: ONLINE,
        findings: &[(
            "failed to authenticate by DH-HMAC-CHAP",
            "windrose volume dhchap v --host NQN --secret FILE",
        )],
    },
    Row {
        case: "a host guesses TLS keys",
        facts: || failing(Proof::Tls),
        verdict: SAFE,
        shown: ONLINE,
        findings: &[(
            "failed to authenticate by a TLS key",
            "windrose volume tls v --host NQN --key FILE",
        )],
    },
    Row {
        case: "somebody guesses the token of the API",
        facts: || failing(Proof::Token),
        verdict: SAFE,
        shown: ONLINE,
        findings: &[("40 times", "windrose --token-file FILE")],
    },
    Row {
        case: "somebody guesses tokens to join",
        facts: || failing(Proof::Join),
        verdict: SAFE,
        shown: ONLINE,
        findings: &[(
            "failed to authenticate by a token to join 40 times",
            "give it a new token (windrose cluster token create --require-approval); otherwise block 192.0.2.7",
        )],
    },
    Row {
        case: "a host that came in before fails its CHAP secret",
        facts: || failing_host(Proof::Chap),
        verdict: AT_RISK,
        shown: ONLINE,
        findings: &[("failed to authenticate by CHAP", "windrose volume chap v USER:SECRET-FILE")],
    },
    Row {
        case: "an administrator's machine that came in before fails the token of the API",
        facts: || failing_host(Proof::Token),
        verdict: AT_RISK,
        shown: ONLINE,
        findings: &[("40 times", "windrose --token-file FILE")],
    },
    Row {
        case: "two hosts have one initiator name",
        facts: || {
            let mut facts = reported(|_| {});
            let shared = DuplicateName {
                initiator: "iqn.a".into(),
                target: facts.volumes[0].0.record.iscsi_target.clone(),
                addresses: [7, 8].map(|n| IpAddr::from([192, 0, 2, n])),
                times: 90,
                ago: Duration::from_secs(1),
            };
            facts.cores[0].clients.duplicate_names = vec![shared];
            facts
        },
        verdict: AT_RISK,
        shown: ONLINE,
        findings: &[(
            "the hosts at 192.0.2.7 and 192.0.2.8 use the same initiator name, iqn.a",
            "windrose volume allow v NAME",
        )],
    },
];
