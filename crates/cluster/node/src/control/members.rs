//! What there is to say of the members of the cluster's store.

use std::collections::{BTreeMap, BTreeSet};

use api::{Finding, Severity};
use cluster::joining;
use cluster::meta::MetaError;
use cluster::meta::etcd::{MemberAnswer, MemberHealth};
use cluster::nodes::{NodeView, Nodes};
use peer::NodeId;

use super::cluster::{called, member_name};
use super::reach::can_be_asked;
use super::status::finding;
use super::waits::MAJORITY_LOST;

/// Members with a vote that a store needs to outlive any one of them, and nodes of a cluster that run
/// them.
const SAFE_MEMBERS: usize = 3;

/// What findings of this kind are about.
const SUBJECT: &str = "metadata store";

/// The store as one node sees it.
#[derive(Clone, Debug, Default)]
pub struct Store {
    /// Why it does not answer, if it does not.
    pub error: Option<MetaError>,
    /// Whether the nodes run its members.
    pub own_members: bool,
    /// Its members, as they were a few seconds ago; none before they were first asked.
    pub members: Vec<MemberHealth>,
    /// The nodes whose member does not keep running, and why.
    pub troubles: BTreeMap<NodeId, String>,
    /// Nodes that are taken for alive, and of which nothing shows that they run: after an outage the store takes all for
    /// alive that were before it.
    pub silent: BTreeSet<NodeId>,
}

/// What is the matter with a member, if anything.
pub(super) fn problem(health: &MemberHealth) -> Option<String> {
    match &health.answer {
        MemberAnswer::Silent { why } => Some(format!("it does not answer: {why}")),
        MemberAnswer::Runs { leader: None, .. } => Some("it knows no leader".into()),
        MemberAnswer::NotAsked if has_never_started(health) => Some("it has never started".into()),
        MemberAnswer::Runs { .. } | MemberAnswer::NotAsked => None,
    }
}

/// The node that runs a member.
fn runner<'a>(health: &MemberHealth, nodes: &'a Nodes) -> Option<(&'a NodeId, &'a NodeView)> {
    let name = joining::called(&health.member);
    nodes.iter().find(|(node, _)| member_name(**node) == name)
}

fn has_never_started(health: &MemberHealth) -> bool {
    health.member.name.is_empty()
}

fn is_down(health: &MemberHealth) -> bool {
    // One that has a vote and has never started was added by hand.
    matches!(health.answer, MemberAnswer::Silent { .. }) || has_never_started(health)
}

impl Store {
    /// Whether no member but that of node `me` has answered when it was asked last.
    pub(super) fn nobody_answers(&self, me: NodeId) -> bool {
        let own = member_name(me);
        let others =
            self.members.iter().filter(|h| !self.own_members || joining::called(&h.member) != own);
        let mut answers = others.map(|health| &health.answer);
        !answers.any(|answer| matches!(answer, MemberAnswer::Runs { .. }))
    }

    /// Whether a node runs one of its members, which is asked how it is.
    pub(super) fn has_member_of(&self, node: NodeId) -> bool {
        let own = member_name(node);
        self.own_members && self.members.iter().any(|h| joining::called(&h.member) == own)
    }

    /// What there is to say of it to the nodes that there are.
    pub(super) fn findings(&self, nodes: &Nodes, findings: &mut Vec<Finding>) {
        if let Some(error) = &self.error {
            findings.push(silence(error));
        }
        let voters = self.members.iter().filter(|health| !health.member.is_learner);
        let (down, up): (Vec<_>, Vec<_>) = voters.partition(|health| is_down(health));
        let votes = Votes { all: down.len() + up.len(), up: up.len() };
        findings.extend(down.iter().map(|health| self.down(health, votes, nodes)));
        findings.extend(up.iter().filter_map(|health| self.unsteady(health, nodes)));
        self.leader_findings(&up, findings);
        findings.extend(self.too_few(votes, nodes));
        findings.extend(self.alarms());
        let learners = self.members.iter().filter(|health| health.member.is_learner);
        findings.extend(learners.filter(|health| is_down(health)).map(learner));
    }

    /// A member with a vote does not answer.
    fn down(&self, health: &MemberHealth, votes: Votes, nodes: &Nodes) -> Finding {
        let name = joining::called(&health.member);
        let why = problem(health).unwrap_or_default();
        let message = format!("member {name} is down: {why}");
        let hint = format!("{}; {}", self.next_step(health, nodes), votes.consequence());
        finding(Severity::Warning, SUBJECT, message, Some(&hint))
    }

    /// A member that answers has ended not long ago.
    fn unsteady(&self, health: &MemberHealth, nodes: &Nodes) -> Option<Finding> {
        let (node, view) = runner(health, nodes)?;
        let name = joining::called(&health.member);
        let message = format!("member {name} does not keep running: {}", self.troubles.get(node)?);
        let hint = format!("windrose on node {} starts it again until it stays", view.record.name);
        Some(finding(Severity::Warning, SUBJECT, message, Some(&hint)))
    }

    /// How to get a member back.
    fn next_step(&self, health: &MemberHealth, nodes: &Nodes) -> String {
        let name = joining::called(&health.member);
        if !self.own_members {
            return "start it".into();
        }
        let Some((number, view)) = runner(health, nodes) else {
            return format!(
                "no node of the cluster runs it; `windrose cluster leave --node {name} --force` removes it"
            );
        };
        let node = &view.record.name;
        match self.troubles.get(number) {
            // Who was alive when the store answered last may not be now.
            _ if self.error.is_some() || self.silent.contains(number) => format!(
                "look whether windrose runs on node {node}, and whether it is reached from here"
            ),
            _ if !view.alive => format!(
                "start windrose on node {node}, or mend its network; if it never comes back: windrose cluster leave --node {} --force",
                called(nodes, view)
            ),
            Some(why) => format!("windrose on node {node} says of its member: {why}"),
            // Its sign of life may be from before an outage of the store, and it cannot be asked.
            None if !can_be_asked(view) => format!(
                "look whether windrose runs on node {node}, and whether it is reached from here: its log says why its member \
                 does not answer"
            ),
            None => {
                format!("windrose runs on node {node}: its log says why its member does not answer")
            }
        }
    }

    /// Members that run and have nobody to follow.
    fn leader_findings(&self, up: &[&MemberHealth], findings: &mut Vec<Finding>) {
        let lost =
            up.iter().filter(|h| matches!(h.answer, MemberAnswer::Runs { leader: None, .. }));
        let lost: Vec<_> = lost.map(|h| joining::called(&h.member)).collect();
        if lost.is_empty() {
            return;
        }
        if lost.len() < up.len() {
            let names = lost.join(", ");
            let message =
                format!("member {names} runs and knows no leader: it is cut off from the others");
            let hint = "look at the network between the members (port 2380 unless set otherwise)";
            findings.push(finding(Severity::Warning, SUBJECT, message, Some(hint)));
        } else if self.error.is_none() {
            let message = "its members have no leader: nothing can be changed (I/O goes on)";
            let hint =
                "an election takes seconds; if this stays, bring back a majority of the members";
            findings.push(finding(Severity::Warning, SUBJECT, message, Some(hint)));
        }
    }

    /// It could not lose any one of its members.
    fn too_few(&self, votes: Votes, nodes: &Nodes) -> Option<Finding> {
        if self.own_members && nodes.len() < SAFE_MEMBERS {
            let message = format!(
                "it has {} of the {SAFE_MEMBERS} nodes that it takes to go on without any one of them",
                nodes.len()
            );
            let hint = "add a node (windrose cluster join) or a witness (windrose cluster witness)";
            return Some(finding(Severity::Warning, "cluster", message, Some(hint)));
        }
        if votes.all == 0 || votes.all >= SAFE_MEMBERS {
            return None;
        }
        let message = format!(
            "it has {} of the {SAFE_MEMBERS} members that it takes to go on without any one of them",
            votes.all
        );
        // Of the nodes that there are, one takes the place of a member that was removed.
        let has_member = |node: NodeId| {
            self.members.iter().any(|health| health.member.name == member_name(node))
        };
        let runs = |view: &NodeView| view.alive && !self.silent.contains(&view.record.node);
        let free = nodes.values().find(|view| runs(view) && !has_member(view.record.node));
        let hint = match free {
            _ if !self.own_members => "add members to etcd".to_owned(),
            _ if self.error.is_some() => {
                "once the store answers: a node that runs takes the free place by itself, or add \
                a witness (windrose cluster witness)"
                    .to_owned()
            }
            Some(view) => format!(
                "node {} takes the free place by itself within a minute; if it does not, its log says why",
                view.record.name
            ),
            None => "add a witness (windrose cluster witness)".to_owned(),
        };
        Some(finding(Severity::Warning, SUBJECT, message, Some(&hint)))
    }

    /// What members have raised alarms for. Each knows all of them.
    fn alarms(&self) -> Vec<Finding> {
        let alarms = self.members.iter().filter_map(|health| match &health.answer {
            MemberAnswer::Runs { alarms, .. } => Some(alarms.iter().map(|alarm| alarm.trim())),
            MemberAnswer::Silent { .. } | MemberAnswer::NotAsked => None,
        });
        let mut alarms: Vec<_> = alarms.flatten().collect();
        alarms.sort_unstable();
        alarms.dedup();
        let hint = "until it is cleared changes may be refused; after NOSPACE: \
                    etcdctl compact, defrag, alarm disarm";
        let tell = |alarm: &str| {
            finding(
                Severity::Warning,
                SUBJECT,
                format!("etcd raises an alarm: {alarm}"),
                Some(hint),
            )
        };
        alarms.into_iter().map(tell).collect()
    }
}

/// Members with a vote.
#[derive(Clone, Copy)]
struct Votes {
    all: usize,
    up: usize,
}

impl Votes {
    /// What comes of it that those who are up are no more.
    fn consequence(self) -> String {
        let majority = self.all / 2 + 1;
        match self.up.checked_sub(majority) {
            None => "until a majority is up nothing can be changed (I/O goes on)".into(),
            Some(0) => "one more loss stops changes (I/O goes on)".into(),
            Some(spare) => format!("{} more losses stop changes (I/O goes on)", spare + 1),
        }
    }
}

/// The store does not answer.
fn silence(error: &MetaError) -> Finding {
    let message = format!("{error}; volumes that serve go on, and nothing can be changed");
    let hint = match error {
        MetaError::Untrusted { .. } => super::DISTRUST.to_owned(),
        _ => format!(
            "bring back a majority of the members of the metadata store, or the network between them and this node; \
             {MAJORITY_LOST}"
        ),
    };
    finding(Severity::Warning, SUBJECT, message, Some(&hint))
}

/// A member that has no vote yet and does not get on. Nothing is lost by it, but nobody else can join.
fn learner(health: &MemberHealth) -> Finding {
    let name = joining::called(&health.member);
    let why = problem(health).unwrap_or_default();
    let message =
        format!("member {name} has no vote yet, and {why}: no other node can join meanwhile");
    let hint = format!(
        "start windrose on its node; if that does not come, `windrose cluster leave --node {name} --force`"
    );
    finding(Severity::Note, SUBJECT, message, Some(&hint))
}

#[cfg(test)]
pub(super) mod tests {
    use cluster::identity::{NodeIndex, Role};
    use cluster::meta::etcd::MemberInfo;
    use cluster::nodes::{NodePortals, NodeRecord};

    use super::*;

    pub(in super::super) fn node(number: u16, name: &str, alive: bool) -> (NodeId, NodeView) {
        let node = NodeId(number);
        let record = NodeRecord {
            node,
            index: NodeIndex::new(0).unwrap(),
            name: name.into(),
            role: Role::Data,
            data: Vec::new(),
            heartbeat: Vec::new(),
            portals: NodePortals::default(),
            data_dir: "/v".into(),
            join: None,
            failure_domain: String::new(),
            version: String::new(),
            drained: false,
        };
        (node, NodeView { record, alive })
    }

    const RUNS: MemberAnswer = MemberAnswer::Runs { leader: Some(1), alarms: Vec::new() };
    const LOST: MemberAnswer = MemberAnswer::Runs { leader: None, alarms: Vec::new() };

    fn silent() -> MemberAnswer {
        MemberAnswer::Silent { why: "http://c:2379: refused".into() }
    }

    fn member(number: u16, answer: MemberAnswer) -> MemberHealth {
        let member = MemberInfo {
            id: number.into(),
            name: format!("node-{number}"),
            peer_urls: vec![format!("http://m{number}:2380")],
            client_urls: Vec::new(),
            is_learner: false,
        };
        MemberHealth { member, answer }
    }

    /// The three nodes a, b and c, of which c may not run.
    fn nodes(c_runs: bool) -> Nodes {
        [node(1, "a", true), node(2, "b", true), node(3, "c", c_runs)].into()
    }

    fn store(answers: impl IntoIterator<Item = MemberAnswer>) -> Store {
        let members = (1..).zip(answers).map(|(number, answer)| member(number, answer)).collect();
        Store { own_members: true, members, ..Store::default() }
    }

    /// Severity, and message and hint as one text.
    fn found(store: &Store, nodes: &Nodes) -> Vec<(Severity, String)> {
        let mut findings = Vec::new();
        store.findings(nodes, &mut findings);
        let text = |f: Finding| format!("{}: {} ({})", f.subject, f.message, f.hint.unwrap());
        findings.into_iter().map(|f| (f.severity, text(f))).collect()
    }

    fn only(store: &Store, nodes: &Nodes) -> (Severity, String) {
        let mut found = found(store, nodes);
        assert_eq!(found.len(), 1, "{found:?}");
        found.remove(0)
    }

    #[test]
    fn three_members_that_run_are_nothing_to_tell() {
        assert_eq!(found(&store([RUNS, RUNS, RUNS]), &nodes(true)), []);
        // Nothing is said before anybody was asked.
        assert_eq!(found(&store([]), &nodes(true)), []);
    }

    #[test]
    fn a_member_that_is_down_is_named_with_the_next_step() {
        let store = store([RUNS, RUNS, silent()]);
        let text = "metadata store: member node-3 is down: it does not answer: http://c:2379: refused \
                    (start windrose on node c, or mend its network; if it never comes back: windrose cluster leave \
                    --node c --force; one more loss stops changes (I/O goes on))";
        assert_eq!(only(&store, &nodes(false)), (Severity::Warning, text.to_owned()));
        let (_, text) = only(&store, &nodes(true));
        assert!(text.contains("(windrose runs on node c: its log"), "{text}");
        let cut_off = Store { silent: [NodeId(3)].into(), ..store.clone() };
        let (_, text) = only(&cut_off, &nodes(true));
        assert!(
            text.contains("(look whether windrose runs on node c, and whether it is reached"),
            "{text}"
        );
        let mut witness = nodes(true);
        witness.get_mut(&NodeId(3)).unwrap().record.role = Role::Witness;
        let (_, text) = only(&store, &witness);
        assert!(text.contains("(look whether windrose runs on node c, and"), "{text}");
        let mut without = nodes(false);
        without.remove(&NodeId(3));
        without.extend([node(4, "d", true)]);
        let (_, text) = only(&store, &without);
        assert!(text.contains("cluster leave --node node-3 --force"), "{text}");
    }

    #[test]
    fn a_member_that_keeps_ending_is_told_with_what_it_says() {
        let mut store = store([RUNS, RUNS, silent()]);
        store.troubles = [(NodeId(3), "no space left".into())].into();
        let (_, text) = only(&store, &nodes(true));
        assert!(text.contains("(windrose on node c says of its member: no space left; "), "{text}");
        // It may answer for a moment.
        store.members[2].answer = RUNS;
        let text = "metadata store: member node-3 does not keep running: no space left \
                    (windrose on node c starts it again until it stays)";
        assert_eq!(only(&store, &nodes(true)), (Severity::Warning, text.to_owned()));
    }

    #[test]
    fn how_many_more_may_be_lost_is_counted() {
        let said = |answers: [MemberAnswer; 5]| found(&store(answers), &nodes(true)).remove(0).1;
        assert!(said([RUNS, RUNS, RUNS, RUNS, silent()]).contains("2 more losses stop changes"));
        assert!(said([RUNS, RUNS, RUNS, silent(), silent()]).contains("one more loss stops"));
        let text = said([LOST, LOST, silent(), silent(), silent()]);
        assert!(text.contains("until a majority is up"), "{text}");
    }

    #[test]
    fn a_member_that_is_cut_off_and_the_want_of_any_leader_differ() {
        let (severity, text) = only(&store([RUNS, LOST, RUNS]), &nodes(true));
        assert_eq!(severity, Severity::Warning);
        assert!(text.contains("member node-2 runs and knows no leader"), "{text}");
        let mut all = store([LOST, LOST, LOST]);
        assert!(only(&all, &nodes(true)).1.contains("no leader: nothing can be changed"));
        // Once is enough.
        all.error = Some(MetaError::Unreachable { store: "etcd".into(), why: "no leader".into() });
        assert!(only(&all, &nodes(true)).1.contains("volumes that serve go on"));
    }

    #[test]
    fn too_few_members_are_told_once_and_with_what_helps() {
        let mut two = nodes(true);
        two.remove(&NodeId(3));
        let (severity, text) = only(&store([RUNS, RUNS]), &two);
        assert_eq!(severity, Severity::Warning);
        assert!(text.contains("2 of the 3 nodes") && text.contains("witness"), "{text}");
        // A node that runs none takes the place; where there is no such node, another one has to come.
        let (_, text) = only(&store([RUNS, RUNS]), &nodes(true));
        assert!(text.contains("2 of the 3 members") && text.contains("node c takes"), "{text}");
        // Not if it only seems to run, and not while the store does not answer.
        let silent = Store { silent: [NodeId(3)].into(), ..store([RUNS, RUNS]) };
        assert!(!only(&silent, &nodes(true)).1.contains("takes the free place"));
        let why = "no leader".into();
        let error = Some(MetaError::Unreachable { store: "etcd".into(), why });
        let away = Store { error, ..store([RUNS, RUNS]) };
        let said = found(&away, &nodes(true));
        assert!(said.iter().any(|(_, text)| text.contains("once the store answers")), "{said:?}");
        let (_, text) = only(&store([RUNS, RUNS]), &nodes(false));
        assert!(text.contains("2 of the 3 members") && text.contains("witness"), "{text}");
        // Two nodes are enough with somebody else's etcd, but that may be too small itself.
        let elsewhere = |answers: Vec<MemberAnswer>| Store { own_members: false, ..store(answers) };
        assert_eq!(found(&elsewhere(vec![RUNS, RUNS, RUNS]), &two), []);
        assert_eq!(found(&elsewhere(vec![]), &two), []);
        let (_, text) = only(&elsewhere(vec![RUNS]), &two);
        assert!(text.contains("1 of the 3 members") && text.contains("to etcd"), "{text}");
    }

    #[test]
    fn a_learner_that_never_started_keeps_others_out_and_is_no_risk() {
        let mut store = store([RUNS, RUNS, RUNS, MemberAnswer::NotAsked]);
        let learner = &mut store.members[3].member;
        (learner.name, learner.is_learner) = (String::new(), true);
        let (severity, text) = only(&store, &nodes(true));
        assert_eq!(severity, Severity::Note);
        assert!(text.contains("it has never started: no other node can join"), "{text}");
        assert!(text.contains("cluster leave --node http://m4:2380 --force"), "{text}");
        store.members[3].answer = RUNS;
        store.members[3].member.name = "node-4".into();
        assert_eq!(found(&store, &nodes(true)), [], "it gets on");
    }

    #[test]
    fn an_alarm_and_a_bad_certificate_are_told() {
        let alarm =
            || MemberAnswer::Runs { leader: Some(1), alarms: vec!["alarm:NOSPACE ".into()] };
        let (_, text) = only(&store([alarm(), alarm(), RUNS]), &nodes(true));
        assert!(text.contains("alarm:NOSPACE (") && text.contains("defrag"), "{text}");
        let mut store = store([]);
        store.error = Some(MetaError::Untrusted { store: "etcd".into(), why: "Expired".into() });
        let (_, text) = only(&store, &nodes(true));
        assert!(text.contains("Expired") && text.contains("cluster.tls_ca"), "{text}");
        assert!(text.contains("leave --force") && !text.contains("cluster recover"), "{text}");
    }
}
