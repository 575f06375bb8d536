//! The cluster's store as one node sees it, and findings about its members.

use std::collections::{BTreeMap, BTreeSet};

use api::{Finding, Severity};
use cluster::node_membership::{member_label, store_member_name};
use cluster::nodes::{NodeView, Nodes};
use cluster::store::StoreError;
use cluster::store::etcd::{MemberHealth, MemberResponse};
use peer::NodeId;

use crate::nodes::{can_be_probed, node_argument};
use crate::startup_wait::LOST_QUORUM_HINT;
use crate::{UNTRUSTED_STORE_HINT, finding};

/// Voters that a store needs to survive the loss of any one of them, and nodes of a cluster that
/// run them.
const SAFE_MEMBERS: usize = 3;

/// The subject of these findings.
const SUBJECT: &str = "metadata store";

/// The store as one node sees it.
#[derive(Clone, Debug, Default)]
pub struct StoreView {
    /// Why it does not answer, if it does not.
    pub error: Option<StoreError>,
    /// Whether the nodes run its members.
    pub runs_own_members: bool,
    /// Its members, as of a few seconds ago; empty before the first query.
    pub members: Vec<MemberHealth>,
    /// The nodes whose store member does not stay up, and why.
    pub member_errors: BTreeMap<NodeId, String>,
    /// Nodes that are alive by the store although nothing proves that they run: after an outage the
    /// store considers all nodes alive that were so before.
    pub unproven_nodes: BTreeSet<NodeId>,
}

/// The problem of a member, if any.
pub fn member_problem(health: &MemberHealth) -> Option<String> {
    match &health.response {
        MemberResponse::Unreachable { why } => Some(format!("it does not respond: {why}")),
        MemberResponse::Running { leader: None, .. } => Some("it has no leader".into()),
        MemberResponse::NotQueried if has_never_started(health) => {
            Some("it has never started".into())
        }
        MemberResponse::Running { .. } | MemberResponse::NotQueried => None,
    }
}

/// The node that runs a member.
fn node_running<'a>(health: &MemberHealth, nodes: &'a Nodes) -> Option<(&'a NodeId, &'a NodeView)> {
    let name = member_label(&health.member);
    nodes.iter().find(|(node, _)| store_member_name(**node) == name)
}

fn has_never_started(health: &MemberHealth) -> bool {
    health.member.name.is_empty()
}

fn is_down(health: &MemberHealth) -> bool {
    // A voter that has never started was added by hand.
    matches!(health.response, MemberResponse::Unreachable { .. }) || has_never_started(health)
}

impl StoreView {
    /// Whether no member but that of node `me` responded to the last query.
    pub(crate) fn no_other_member_answers(&self, me: NodeId) -> bool {
        let own = store_member_name(me);
        let others = self
            .members
            .iter()
            .filter(|h| !self.runs_own_members || member_label(&h.member) != own);
        let mut answers = others.map(|health| &health.response);
        !answers.any(|answer| matches!(answer, MemberResponse::Running { .. }))
    }

    /// Whether a node runs a member whose health is queried.
    pub(crate) fn has_member_of(&self, node: NodeId) -> bool {
        let own = store_member_name(node);
        self.runs_own_members && self.members.iter().any(|h| member_label(&h.member) == own)
    }

    /// Findings about the store, given the nodes.
    pub fn findings(&self, nodes: &Nodes, findings: &mut Vec<Finding>) {
        if let Some(error) = &self.error {
            findings.push(unreachable_finding(error));
        }
        let voters = self.members.iter().filter(|health| !health.member.is_learner);
        let (down, up): (Vec<_>, Vec<_>) = voters.partition(|health| is_down(health));
        let votes = Votes { all: down.len() + up.len(), up: up.len() };
        findings.extend(down.iter().map(|health| self.down_finding(health, votes, nodes)));
        findings.extend(up.iter().filter_map(|health| self.restarting_finding(health, nodes)));
        self.leader_findings(&up, findings);
        findings.extend(self.redundancy_finding(votes, nodes));
        findings.extend(self.alarm_findings());
        let learners = self.members.iter().filter(|health| health.member.is_learner);
        findings.extend(learners.filter(|health| is_down(health)).map(learner_finding));
    }

    /// The finding that a voter does not respond.
    fn down_finding(&self, health: &MemberHealth, votes: Votes, nodes: &Nodes) -> Finding {
        let name = member_label(&health.member);
        let why = member_problem(health).unwrap_or_default();
        let message = format!("member {name} is down: {why}");
        let hint = format!("{}; {}", self.recovery_hint(health, nodes), votes.quorum_text());
        finding(Severity::Warning, SUBJECT, message, Some(&hint))
    }

    /// The finding that a member has restarted recently.
    fn restarting_finding(&self, health: &MemberHealth, nodes: &Nodes) -> Option<Finding> {
        let (node, view) = node_running(health, nodes)?;
        let name = member_label(&health.member);
        let message =
            format!("member {name} does not keep running: {}", self.member_errors.get(node)?);
        let hint = format!("windrose on node {} keeps restarting it", view.record.name);
        Some(finding(Severity::Warning, SUBJECT, message, Some(&hint)))
    }

    /// The hint for restarting a member.
    fn recovery_hint(&self, health: &MemberHealth, nodes: &Nodes) -> String {
        let name = member_label(&health.member);
        if !self.runs_own_members {
            return "start it".into();
        }
        let Some((number, view)) = node_running(health, nodes) else {
            return format!(
                "no node of the cluster runs it; to remove it: `windrose cluster leave --node \
                 {name} --force`"
            );
        };
        let node = &view.record.name;
        match self.member_errors.get(number) {
            // A node that was alive when the store last answered may be down now.
            _ if self.error.is_some() || self.unproven_nodes.contains(number) => {
                format!("check whether windrose runs on node {node} and can be reached from here")
            }
            _ if !view.is_alive => format!(
                "start windrose on node {node}, or fix its network; if it is lost for good: \
                 windrose cluster leave --node {} --force",
                node_argument(nodes, view)
            ),
            Some(why) => format!("windrose on node {node} reports: {why}"),
            // Its lease may date from before an outage of the store, and it cannot be probed.
            None if !can_be_probed(view) => format!(
                "check whether windrose runs on node {node} and can be reached from here: its log \
                 shows why its member does not respond"
            ),
            None => {
                format!(
                    "windrose runs on node {node}: its log shows why its member does not respond"
                )
            }
        }
    }

    /// Findings about running members without a leader.
    fn leader_findings(&self, up: &[&MemberHealth], findings: &mut Vec<Finding>) {
        let leaderless = up
            .iter()
            .filter(|h| matches!(h.response, MemberResponse::Running { leader: None, .. }));
        let leaderless: Vec<_> = leaderless.map(|h| member_label(&h.member)).collect();
        if leaderless.is_empty() {
            return;
        }
        if leaderless.len() < up.len() {
            let names = leaderless.join(", ");
            let message =
                format!("member {names} runs but has no leader: it is cut off from the others");
            let hint = "check the network between the members (port 2380 by default)";
            findings.push(finding(Severity::Warning, SUBJECT, message, Some(hint)));
        } else if self.error.is_none() {
            let message = "its members have no leader: nothing can be changed (I/O continues)";
            let hint =
                "an election takes seconds; if this persists, restore a majority of the members";
            findings.push(finding(Severity::Warning, SUBJECT, message, Some(hint)));
        }
    }

    /// The finding that the store would not survive the loss of a member.
    fn redundancy_finding(&self, votes: Votes, nodes: &Nodes) -> Option<Finding> {
        if self.runs_own_members && nodes.len() < SAFE_MEMBERS {
            let message = format!(
                "it has {} of the {SAFE_MEMBERS} nodes needed to survive the loss of any one",
                nodes.len()
            );
            let hint = "add a node (windrose cluster join) or a witness (windrose cluster witness)";
            return Some(finding(Severity::Warning, "cluster", message, Some(hint)));
        }
        if votes.all == 0 || votes.all >= SAFE_MEMBERS {
            return None;
        }
        let message = format!(
            "it has {} of the {SAFE_MEMBERS} members needed to survive the loss of any one",
            votes.all
        );
        // An existing node replaces a member that was removed.
        let has_member = |node: NodeId| {
            self.members.iter().any(|health| health.member.name == store_member_name(node))
        };
        let runs =
            |view: &NodeView| view.is_alive && !self.unproven_nodes.contains(&view.record.node);
        let free = nodes.values().find(|view| runs(view) && !has_member(view.record.node));
        let hint = match free {
            _ if !self.runs_own_members => "add members to etcd".to_owned(),
            _ if self.error.is_some() => {
                "once the store responds, a running node adds a member automatically; or add a \
                 witness (windrose cluster witness)"
                    .to_owned()
            }
            Some(view) => format!(
                "node {} adds a member automatically within a minute; if it does not, its log \
                 shows why",
                view.record.name
            ),
            None => "add a witness (windrose cluster witness)".to_owned(),
        };
        Some(finding(Severity::Warning, SUBJECT, message, Some(&hint)))
    }

    /// Findings about alarms of members. Each member knows all alarms.
    fn alarm_findings(&self) -> Vec<Finding> {
        let alarms = self.members.iter().filter_map(|health| match &health.response {
            MemberResponse::Running { alarms, .. } => Some(alarms.iter().map(|alarm| alarm.trim())),
            MemberResponse::Unreachable { .. } | MemberResponse::NotQueried => None,
        });
        let mut alarms: Vec<_> = alarms.flatten().collect();
        alarms.sort_unstable();
        alarms.dedup();
        let hint = "changes may be refused until the alarm is cleared; after NOSPACE: etcdctl \
            compact, defrag, alarm disarm";
        let alarm_finding = |alarm: &str| {
            finding(
                Severity::Warning,
                SUBJECT,
                format!("etcd raises an alarm: {alarm}"),
                Some(hint),
            )
        };
        alarms.into_iter().map(alarm_finding).collect()
    }
}

/// The voters.
#[derive(Clone, Copy)]
struct Votes {
    all: usize,
    up: usize,
}

impl Votes {
    /// What happens when no more voters than those are up.
    fn quorum_text(self) -> String {
        let majority = self.all / 2 + 1;
        match self.up.checked_sub(majority) {
            None => "until a majority is up, nothing can be changed (I/O continues)".into(),
            Some(0) => "one more loss stops changes (I/O continues)".into(),
            Some(spare) => format!("{} more losses stop changes (I/O continues)", spare + 1),
        }
    }
}

/// The finding that the store does not answer.
fn unreachable_finding(error: &StoreError) -> Finding {
    let message = format!("{error}; volumes that serve continue to, but nothing can be changed");
    let hint = match error {
        StoreError::TlsRejected { .. } => UNTRUSTED_STORE_HINT.to_owned(),
        _ => format!(
            "restore a majority of the members of the metadata store, or the network between them \
             and this node; {LOST_QUORUM_HINT}"
        ),
    };
    finding(Severity::Warning, SUBJECT, message, Some(&hint))
}

/// The finding about a learner that makes no progress. Nothing is lost, but no other node can join.
fn learner_finding(health: &MemberHealth) -> Finding {
    let name = member_label(&health.member);
    let why = member_problem(health).unwrap_or_default();
    let message =
        format!("member {name} has no vote yet, and {why}: until it has, no other node can join");
    let hint = format!(
        "start windrose on its node; if that node will not join: `windrose cluster leave --node \
         {name} --force`"
    );
    finding(Severity::Note, SUBJECT, message, Some(&hint))
}

#[cfg(test)]
mod tests {
    use cluster::identity::Role;
    use cluster::store::etcd::MemberInfo;

    use super::*;
    use crate::samples::node;

    const RUNS: MemberResponse = MemberResponse::Running { leader: Some(1), alarms: Vec::new() };
    const LOST: MemberResponse = MemberResponse::Running { leader: None, alarms: Vec::new() };

    fn silent() -> MemberResponse {
        MemberResponse::Unreachable { why: "http://c:2379: refused".into() }
    }

    fn member(number: u16, answer: MemberResponse) -> MemberHealth {
        let member = MemberInfo {
            id: number.into(),
            name: format!("node-{number}"),
            peer_urls: vec![format!("http://m{number}:2380")],
            client_urls: Vec::new(),
            is_learner: false,
        };
        MemberHealth { member, response: answer }
    }

    /// The three nodes a, b and c; `c_runs` says whether c is up.
    fn nodes(c_runs: bool) -> Nodes {
        [node(1, "a", true), node(2, "b", true), node(3, "c", c_runs)].into()
    }

    fn store(answers: impl IntoIterator<Item = MemberResponse>) -> StoreView {
        let members = (1..).zip(answers).map(|(number, answer)| member(number, answer)).collect();
        StoreView { runs_own_members: true, members, ..StoreView::default() }
    }

    /// Severity, and message and hint as one text.
    fn found(store: &StoreView, nodes: &Nodes) -> Vec<(Severity, String)> {
        let mut findings = Vec::new();
        store.findings(nodes, &mut findings);
        let text = |f: Finding| format!("{}: {} ({})", f.subject, f.message, f.hint.unwrap());
        findings.into_iter().map(|f| (f.severity, text(f))).collect()
    }

    fn only(store: &StoreView, nodes: &Nodes) -> (Severity, String) {
        let mut found = found(store, nodes);
        assert_eq!(found.len(), 1, "{found:?}");
        found.remove(0)
    }

    #[test]
    fn three_members_that_run_are_nothing_to_tell() {
        assert_eq!(found(&store([RUNS, RUNS, RUNS]), &nodes(true)), []);
        // No findings before the first query.
        assert_eq!(found(&store([]), &nodes(true)), []);
    }

    #[test]
    fn a_member_that_is_down_is_named_with_the_next_step() {
        let store = store([RUNS, RUNS, silent()]);
        let text = "metadata store: member node-3 is down: it does not respond: http://c:2379: \
            refused (start windrose on node c, or fix its network; if it is lost for good: \
            windrose cluster leave --node c --force; one more loss stops changes (I/O continues))";
        assert_eq!(only(&store, &nodes(false)), (Severity::Warning, text.to_owned()));
        let (_, text) = only(&store, &nodes(true));
        assert!(text.contains("(windrose runs on node c: its log"), "{text}");
        let cut_off = StoreView { unproven_nodes: [NodeId(3)].into(), ..store.clone() };
        let (_, text) = only(&cut_off, &nodes(true));
        assert!(
            text.contains("(check whether windrose runs on node c and can be reached"),
            "{text}"
        );
        let mut witness = nodes(true);
        witness.get_mut(&NodeId(3)).unwrap().record.role = Role::Witness;
        let (_, text) = only(&store, &witness);
        assert!(text.contains("(check whether windrose runs on node c and"), "{text}");
        let mut without = nodes(false);
        without.remove(&NodeId(3));
        without.extend([node(4, "d", true)]);
        let (_, text) = only(&store, &without);
        assert!(text.contains("cluster leave --node node-3 --force"), "{text}");
    }

    #[test]
    fn a_member_that_keeps_ending_is_told_with_what_it_says() {
        let mut store = store([RUNS, RUNS, silent()]);
        store.member_errors = [(NodeId(3), "no space left".into())].into();
        let (_, text) = only(&store, &nodes(true));
        assert!(text.contains("(windrose on node c reports: no space left; "), "{text}");
        // It may respond for a moment.
        store.members[2].response = RUNS;
        let text = "metadata store: member node-3 does not keep running: no space left (windrose \
            on node c keeps restarting it)";
        assert_eq!(only(&store, &nodes(true)), (Severity::Warning, text.to_owned()));
    }

    #[test]
    fn how_many_more_may_be_lost_is_counted() {
        let said = |answers: [MemberResponse; 5]| found(&store(answers), &nodes(true)).remove(0).1;
        assert!(said([RUNS, RUNS, RUNS, RUNS, silent()]).contains("2 more losses stop changes"));
        assert!(said([RUNS, RUNS, RUNS, silent(), silent()]).contains("one more loss stops"));
        let text = said([LOST, LOST, silent(), silent(), silent()]);
        assert!(text.contains("until a majority is up"), "{text}");
    }

    #[test]
    fn a_member_that_is_cut_off_and_the_want_of_any_leader_differ() {
        let (severity, text) = only(&store([RUNS, LOST, RUNS]), &nodes(true));
        assert_eq!(severity, Severity::Warning);
        assert!(text.contains("member node-2 runs but has no leader"), "{text}");
        let mut all = store([LOST, LOST, LOST]);
        assert!(only(&all, &nodes(true)).1.contains("no leader: nothing can be changed"));
        // One finding is enough.
        all.error = Some(StoreError::Unreachable { store: "etcd".into(), why: "no leader".into() });
        assert!(only(&all, &nodes(true)).1.contains("volumes that serve continue to"));
    }

    #[test]
    fn too_few_members_are_told_once_and_with_what_helps() {
        let mut two = nodes(true);
        two.remove(&NodeId(3));
        let (severity, text) = only(&store([RUNS, RUNS]), &two);
        assert_eq!(severity, Severity::Warning);
        assert!(text.contains("2 of the 3 nodes") && text.contains("witness"), "{text}");
        // A node without a member replaces it; if there is no such node, another one has to join.
        let (_, text) = only(&store([RUNS, RUNS]), &nodes(true));
        assert!(text.contains("2 of the 3 members") && text.contains("node c adds"), "{text}");
        // Not a node that only seems to run, and not while the store does not answer.
        let silent = StoreView { unproven_nodes: [NodeId(3)].into(), ..store([RUNS, RUNS]) };
        assert!(!only(&silent, &nodes(true)).1.contains("adds a member automatically"));
        let why = "no leader".into();
        let error = Some(StoreError::Unreachable { store: "etcd".into(), why });
        let away = StoreView { error, ..store([RUNS, RUNS]) };
        let said = found(&away, &nodes(true));
        assert!(said.iter().any(|(_, text)| text.contains("once the store responds")), "{said:?}");
        let (_, text) = only(&store([RUNS, RUNS]), &nodes(false));
        assert!(text.contains("2 of the 3 members") && text.contains("witness"), "{text}");
        // Two nodes are enough with an external etcd, but that one may be too small itself.
        let elsewhere =
            |answers: Vec<MemberResponse>| StoreView { runs_own_members: false, ..store(answers) };
        assert_eq!(found(&elsewhere(vec![RUNS, RUNS, RUNS]), &two), []);
        assert_eq!(found(&elsewhere(vec![]), &two), []);
        let (_, text) = only(&elsewhere(vec![RUNS]), &two);
        assert!(text.contains("1 of the 3 members") && text.contains("to etcd"), "{text}");
    }

    #[test]
    fn a_learner_that_never_started_keeps_others_out_and_is_no_risk() {
        let mut store = store([RUNS, RUNS, RUNS, MemberResponse::NotQueried]);
        let learner = &mut store.members[3].member;
        (learner.name, learner.is_learner) = (String::new(), true);
        let (severity, text) = only(&store, &nodes(true));
        assert_eq!(severity, Severity::Note);
        assert!(
            text.contains("it has never started: until it has, no other node can join"),
            "{text}"
        );
        assert!(text.contains("cluster leave --node http://m4:2380 --force"), "{text}");
        store.members[3].response = RUNS;
        store.members[3].member.name = "node-4".into();
        assert_eq!(found(&store, &nodes(true)), [], "it gets on");
    }

    #[test]
    fn an_alarm_and_a_bad_certificate_are_told() {
        let alarm =
            || MemberResponse::Running { leader: Some(1), alarms: vec!["alarm:NOSPACE ".into()] };
        let (_, text) = only(&store([alarm(), alarm(), RUNS]), &nodes(true));
        assert!(text.contains("alarm:NOSPACE (") && text.contains("defrag"), "{text}");
        let mut store = store([]);
        store.error = Some(StoreError::TlsRejected { store: "etcd".into(), why: "Expired".into() });
        let (_, text) = only(&store, &nodes(true));
        assert!(text.contains("Expired") && text.contains("cluster.tls_ca"), "{text}");
        assert!(text.contains("leave --force") && !text.contains("cluster recover"), "{text}");
    }
}
