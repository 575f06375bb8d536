//! Status findings about clients: failed authentication, and names that two hosts share.

use std::collections::BTreeMap;
use std::net::IpAddr;

use api::{Finding, Severity};
use records::record::VolumeRecord;
use target::DuplicateName;
use target::auth_throttle::{AuthMethod, FailingClient};

use crate::finding;
use crate::node_facts::NodeFacts;

pub(crate) fn findings(facts: &NodeFacts, findings: &mut Vec<Finding>) {
    for failing in merge_failing_clients(facts) {
        findings.push(authentication_finding(facts, &failing));
    }
    for shared in facts.cores.iter().flat_map(|core| &core.clients.duplicate_names) {
        findings.push(shared_name_finding(facts, shared));
    }
}

/// Clients that fail authentication, merged over all cores.
fn merge_failing_clients(facts: &NodeFacts) -> Vec<FailingClient> {
    let mut all: BTreeMap<(IpAddr, AuthMethod, String), FailingClient> = BTreeMap::new();
    let cores = facts.cores.iter().map(|core| &core.clients);
    for failing in cores.chain([&facts.api_clients]).flat_map(|clients| &clients.failing_clients) {
        let key = (failing.address.to_canonical(), failing.method, failing.target.clone());
        let known = all.entry(key).or_insert_with(|| FailingClient { times: 0, ..failing.clone() });
        known.times += failing.times;
        if failing.ago < known.ago {
            known.ago = failing.ago;
            known.name.clone_from(&failing.name);
        }
    }
    all.into_values().collect()
}

/// The volume whose target or subsystem has this name.
fn volume_of_target<'a>(facts: &'a NodeFacts, target: &str) -> Option<&'a VolumeRecord> {
    let mut records = facts.volumes.iter().map(|(stored, _)| &stored.record);
    records.find(|r| r.iscsi_target == target || r.nvme_subsystem == target)
}

fn authentication_finding(facts: &NodeFacts, failing: &FailingClient) -> Finding {
    let FailingClient { method, name, target, times, ago, .. } = failing;
    let address = failing.address.to_canonical();
    let volume = volume_of_target(facts, target);
    let subject = match (volume, method) {
        (Some(record), _) => format!("volume {}", record.name),
        (None, AuthMethod::Token) => "API".to_owned(),
        (None, AuthMethod::Join) => "joins".to_owned(),
        (None, _) => format!("node {}", facts.node.name),
    };
    let who = match name.as_str() {
        "" => address.to_string(),
        name => format!("{address} (as {name})"),
    };
    let message = format!(
        "{who} failed to authenticate by {method} {times} times, last {} s ago; its attempts are \
         delayed",
        ago.as_secs()
    );
    let volume = volume.map_or_else(|| "VOLUME".to_owned(), |record| record.name.to_string());
    let remedy = match method {
        AuthMethod::Chap => format!(
            "correct the secret on that host, or set a new one: windrose volume chap {volume} \
             USER:SECRET-FILE"
        ),
        AuthMethod::Dhchap => format!(
            "correct the secret on that host, or set a new one: windrose volume dhchap {volume} \
             --host NQN --secret FILE"
        ),
        AuthMethod::Tls => format!(
            "correct the key on that host, or set a new one: windrose volume tls {volume} --host \
             NQN --key FILE"
        ),
        AuthMethod::Token => {
            "give it the token of api.token_file: windrose --token-file FILE".to_owned()
        }
        AuthMethod::Join => {
            "give it a new token (windrose cluster token create --require-approval)".to_owned()
        }
    };
    let hint = match method {
        AuthMethod::Join => format!(
            "if you are adding a node from there, {remedy}; otherwise block {address} in the firewall"
        ),
        _ => {
            format!(
                "if it is one of your hosts, {remedy}; otherwise block {address} in the \
                     firewall"
            )
        }
    };
    // Any client can reach the port and fail there. A known host that fails now is out of service.
    let severity =
        if has_authenticated(facts, address) { Severity::Warning } else { Severity::Note };
    finding(severity, subject, message, Some(&hint))
}

/// Whether a client at this address has authenticated, on any core.
fn has_authenticated(facts: &NodeFacts, address: IpAddr) -> bool {
    let mut all = facts.cores.iter().map(|core| &core.clients).chain([&facts.api_clients]);
    all.any(|clients| clients.proven.contains(&address))
}

fn shared_name_finding(facts: &NodeFacts, shared: &DuplicateName) -> Finding {
    let DuplicateName { initiator, target, addresses: [one, other], times, ago } = shared;
    let volume = volume_of_target(facts, target).map(|record| record.name.to_string());
    let subject = volume.as_ref().map_or_else(|| target.clone(), |name| format!("volume {name}"));
    let volume = volume.unwrap_or_else(|| "VOLUME".to_owned());
    let where_seen = match one == other {
        true => format!("two hosts at {one}"),
        false => format!("the hosts at {one} and {other}"),
    };
    let message = format!(
        "{where_seen} use the same initiator name, {initiator}, and end each other's sessions: \
         {times} times, last {} s ago; their writes may be mixed up",
        ago.as_secs()
    );
    let hint = format!(
        "one host is probably a clone: give it its own name (iscsi-iname; in \
         /etc/iscsi/initiatorname.iscsi), allow that name (windrose volume allow {volume} NAME), \
         and log in again from it"
    );
    finding(Severity::Warning, subject, message, Some(&hint))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use api::Verdict;
    use target::ClientReport;

    use super::*;
    use crate::samples::{core, facts, open, volume};
    use crate::verdict::assess;

    fn merge_failing_clients(method: AuthMethod, target: &str) -> FailingClient {
        FailingClient {
            address: "::ffff:192.0.2.9".parse().unwrap(),
            method,
            name: "iqn.1993-08.org.debian:01:x".into(),
            target: target.into(),
            times: 40,
            ago: Duration::from_secs(3),
        }
    }

    #[test]
    fn who_guesses_is_named_with_address_name_and_volume() {
        let mut facts = facts(vec![volume("a", open())]);
        let record = facts.volumes[0].0.record.clone();
        facts.cores.push(core(record.id));
        facts.cores.push(core(record.id));
        let targets = [
            (AuthMethod::Chap, record.iscsi_target.as_str(), "volume a"),
            (AuthMethod::Dhchap, &record.nvme_subsystem, "volume a"),
            (AuthMethod::Tls, "", "node n"),
            (AuthMethod::Token, "", "API"),
            (AuthMethod::Join, "", "joins"),
        ];
        for (method, target, subject) in targets {
            let clients = ClientReport {
                failing_clients: vec![merge_failing_clients(method, target)],
                ..ClientReport::default()
            };
            // Two cores have seen it; API clients are counted separately.
            facts.api_clients = ClientReport::default();
            for core in &mut facts.cores {
                core.clients = ClientReport::default();
            }
            if matches!(method, AuthMethod::Token | AuthMethod::Join) {
                facts.api_clients = clients;
            } else {
                facts.cores[0].clients = clients.clone();
                facts.cores[1].clients = clients;
            }
            // An unknown client puts no data at risk.
            let status = assess(&facts);
            assert_eq!(status.verdict, Verdict::Safe);
            assert_eq!(status.findings[0].severity, Severity::Note);
            // A host that authenticated earlier, on another core, now fails.
            facts.cores[1].clients.proven = ["192.0.2.9".parse().unwrap()].into();
            let status = assess(&facts);
            assert_eq!(status.verdict, Verdict::AtRisk);
            let found = &status.findings[0];
            assert_eq!(found.subject, subject);
            let times = if matches!(method, AuthMethod::Token | AuthMethod::Join) {
                "40 times"
            } else {
                "80 times"
            };
            for part in ["192.0.2.9 (as iqn.1993-08.org.debian:01:x)", times, "3 s ago"] {
                assert!(found.message.contains(part), "{}", found.message);
            }
            let hint = found.hint.as_ref().unwrap();
            assert!(hint.contains("windrose ") && hint.contains("firewall"), "{hint}");
        }
    }

    #[test]
    fn a_name_that_two_hosts_have_is_named_with_both_addresses() {
        let mut facts = facts(vec![volume("a", open())]);
        let record = facts.volumes[0].0.record.clone();
        facts.cores.push(core(record.id));
        let shared = DuplicateName {
            initiator: "iqn.1993-08.org.debian:01:x".into(),
            target: record.iscsi_target.clone(),
            addresses: ["192.0.2.1".parse().unwrap(), "192.0.2.2".parse().unwrap()],
            times: 600,
            ago: Duration::ZERO,
        };
        facts.cores[0].clients.duplicate_names.push(shared);
        let status = assess(&facts);
        assert_eq!(status.verdict, Verdict::AtRisk);
        let found = &status.findings[0];
        assert_eq!(found.subject, "volume a");
        for part in ["192.0.2.1 and 192.0.2.2", "debian:01:x", "600 times"] {
            assert!(found.message.contains(part), "{}", found.message);
        }
        assert!(found.hint.as_ref().unwrap().contains("windrose volume allow a NAME"));
    }
}
