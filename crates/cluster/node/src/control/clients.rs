//! What the status says of clients: who fails to prove who it is, and which names two hosts have.

use std::collections::BTreeMap;
use std::net::IpAddr;

use api::{Finding, Severity};
use target::SharedName;
use target::guesses::{Failing, Method};

use super::Facts;
use super::status::finding;
use crate::record::VolumeRecord;

pub(super) fn findings(facts: &Facts, findings: &mut Vec<Finding>) {
    for failing in failing(facts) {
        findings.push(of_failing(facts, &failing));
    }
    for shared in facts.cores.iter().flat_map(|core| &core.clients.shared_names) {
        findings.push(of_shared(facts, shared));
    }
}

/// Who fails, whichever cores have seen it.
fn failing(facts: &Facts) -> Vec<Failing> {
    let mut all: BTreeMap<(IpAddr, Method, String), Failing> = BTreeMap::new();
    let cores = facts.cores.iter().map(|core| &core.clients);
    for failing in cores.chain([&facts.api_clients]).flat_map(|clients| &clients.failing) {
        let key = (failing.address.to_canonical(), failing.method, failing.target.clone());
        let known = all.entry(key).or_insert_with(|| Failing { times: 0, ..failing.clone() });
        known.times += failing.times;
        if failing.ago < known.ago {
            known.ago = failing.ago;
            known.name.clone_from(&failing.name);
        }
    }
    all.into_values().collect()
}

/// The volume whose target or subsystem has this name.
fn volume<'a>(facts: &'a Facts, target: &str) -> Option<&'a VolumeRecord> {
    let mut records = facts.volumes.iter().map(|(stored, _)| &stored.record);
    records.find(|r| r.iscsi_target == target || r.nvme_subsystem == target)
}

fn of_failing(facts: &Facts, failing: &Failing) -> Finding {
    let Failing { method, name, target, times, ago, .. } = failing;
    let address = failing.address.to_canonical();
    let volume = volume(facts, target);
    let subject = match (volume, method) {
        (Some(record), _) => format!("volume {}", record.name),
        (None, Method::Token) => "API".to_owned(),
        (None, Method::Join) => "joins".to_owned(),
        (None, _) => format!("node {}", facts.node.name),
    };
    let who = match name.as_str() {
        "" => address.to_string(),
        name => format!("{address} (as {name})"),
    };
    let message = format!(
        "{who} does not prove by {method} who it is: {times} times, the last time {} s ago; it has to wait between \
         attempts",
        ago.as_secs()
    );
    let volume = volume.map_or_else(|| "VOLUME".to_owned(), |record| record.name.to_string());
    let mend = match method {
        Method::Chap => format!(
            "correct the secret there, or set it anew: windrose volume chap {volume} USER:SECRET-FILE"
        ),
        Method::Dhchap => format!(
            "correct the secret there, or set it anew: windrose volume dhchap {volume} --host NQN --secret FILE"
        ),
        Method::Tls => format!(
            "correct the key there, or set it anew: windrose volume tls {volume} --host NQN --key FILE"
        ),
        Method::Token => {
            "give it the token of api.token_file: windrose --token-file FILE".to_owned()
        }
        Method::Join => "give it a new token (windrose cluster token create --approve)".to_owned(),
    };
    let hint = match method {
        Method::Join => format!(
            "if you are adding a node from there, {mend}; otherwise block {address} in the firewall"
        ),
        _ => format!("if it is one of your hosts, {mend}; else keep {address} out in the firewall"),
    };
    // Anybody can reach the port and fail there. One of the hosts that fails now is out of service.
    let severity = if is_proven(facts, address) { Severity::Warning } else { Severity::Note };
    finding(severity, subject, message, Some(&hint))
}

/// Whether somebody at this address has proved who it is, at whichever core.
fn is_proven(facts: &Facts, address: IpAddr) -> bool {
    let mut all = facts.cores.iter().map(|core| &core.clients).chain([&facts.api_clients]);
    all.any(|clients| clients.proven.contains(&address))
}

fn of_shared(facts: &Facts, shared: &SharedName) -> Finding {
    let SharedName { initiator, target, addresses: [one, other], times, ago } = shared;
    let volume = volume(facts, target).map(|record| record.name.to_string());
    let subject = volume.as_ref().map_or_else(|| target.clone(), |name| format!("volume {name}"));
    let volume = volume.unwrap_or_else(|| "VOLUME".to_owned());
    let places = match one == other {
        true => format!("two hosts behind {one}"),
        false => format!("the hosts at {one} and {other}"),
    };
    let message = format!(
        "{places} have one initiator name, {initiator}, and end each other's sessions: {times} times, the last time \
         {} s ago; what they write may be mixed",
        ago.as_secs()
    );
    let hint = format!(
        "one is a clone: give it a name of its own (iscsi-iname; in /etc/iscsi/initiatorname.iscsi), allow that \
         (windrose volume allow {volume} NAME), and log in again there"
    );
    finding(Severity::Warning, subject, message, Some(&hint))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use api::Verdict;
    use target::Clients;

    use super::super::assess;
    use super::super::status::tests::{core, facts, open, volume};
    use super::*;

    fn failing(method: Method, target: &str) -> Failing {
        Failing {
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
            (Method::Chap, record.iscsi_target.as_str(), "volume a"),
            (Method::Dhchap, &record.nvme_subsystem, "volume a"),
            (Method::Tls, "", "node n"),
            (Method::Token, "", "API"),
            (Method::Join, "", "joins"),
        ];
        for (method, target, subject) in targets {
            let clients = Clients { failing: vec![failing(method, target)], ..Clients::default() };
            // Two cores have seen it, but for what comes to the API.
            facts.api_clients = Clients::default();
            for core in &mut facts.cores {
                core.clients = Clients::default();
            }
            if matches!(method, Method::Token | Method::Join) {
                facts.api_clients = clients;
            } else {
                facts.cores[0].clients = clients.clone();
                facts.cores[1].clients = clients;
            }
            // A stranger puts no data at risk.
            let status = assess(&facts);
            assert_eq!(status.verdict, Verdict::Safe);
            assert_eq!(status.findings[0].severity, Severity::Note);
            // A host that has proved who it is, at another core, does not come in any more.
            facts.cores[1].clients.proven = ["192.0.2.9".parse().unwrap()].into();
            let status = assess(&facts);
            assert_eq!(status.verdict, Verdict::AtRisk);
            let found = &status.findings[0];
            assert_eq!(found.subject, subject);
            let times = if matches!(method, Method::Token | Method::Join) {
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
        let shared = SharedName {
            initiator: "iqn.1993-08.org.debian:01:x".into(),
            target: record.iscsi_target.clone(),
            addresses: ["192.0.2.1".parse().unwrap(), "192.0.2.2".parse().unwrap()],
            times: 600,
            ago: Duration::ZERO,
        };
        facts.cores[0].clients.shared_names.push(shared);
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
