//! What a node waits for on its way into its cluster, and what helps.

use ::cluster::identity::{Identity, Stage};
use ::cluster::joining::JoinError;
use ::cluster::member::Defect;
use ::cluster::meta::MetaError;
use api::{ApiError, Code};

use super::{Control, DISTRUST};
use crate::part::PartError;

/// For a node whose cluster lives on without it.
pub(super) const JOIN_ANEW: &str = "if the cluster goes on without this node: `windrose cluster leave --force` here, then \
    `windrose cluster join` with a new token (`windrose cluster token` at a node of the cluster). Images stay where they are";

const TRIES_ON: &str = "the node tries on by itself; `windrose cluster nodes` shows how it gets on";

/// For a store of whose members most are lost for good, at a node that still runs.
pub(super) const MAJORITY_LOST: &str = "if a majority of its members is lost for good, and the cluster goes on nowhere \
    else: restart windrose on this node (systemctl restart windrose), which ends what it serves, then `windrose cluster \
    recover --plan` here (docs/guides/recovery.md)";

/// What a node waits for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Waits {
    /// What that is.
    pub what: String,
    /// What helps.
    pub next: String,
    /// Whether the cluster is known to go on, and this node to be no part of it any more.
    pub is_outside: bool,
}

impl Waits {
    /// For what ends by itself.
    pub(super) fn by_itself(what: impl Into<String>) -> Self {
        Self { what: what.into(), next: TRIES_ON.to_owned(), is_outside: false }
    }

    /// For a store that a member cannot read its volumes from.
    pub(super) fn for_store(error: &MetaError) -> Self {
        let waits = Self::by_itself(error.to_string());
        match error {
            MetaError::Unreachable { .. } => {
                Self { next: format!("{TRIES_ON}; {MAJORITY_LOST}"), ..waits }
            }
            MetaError::Untrusted { .. } => Self { next: DISTRUST.to_owned(), ..waits },
            _ => waits,
        }
    }

    /// For the end of `error`, which is told as `what`, at the node `name`.
    pub(super) fn after(error: &PartError, what: String, identity: &Identity, name: &str) -> Self {
        let (next, is_outside) = match error {
            PartError::Join(JoinError::Removed | JoinError::OtherCluster { .. }) => {
                (JOIN_ANEW.to_owned(), true)
            }
            PartError::Join(JoinError::Store(MetaError::Untrusted { .. })) => {
                (DISTRUST.to_owned(), true)
            }
            PartError::Defect(Defect::Removed) => (JOIN_ANEW.to_owned(), true),
            PartError::Defect(Defect::AlreadyBootstrapped | Defect::Corrupt { .. }) => {
                (lost_member(name), false)
            }
            _ if identity.stage != Stage::Member => {
                (format!("{TRIES_ON}; `windrose cluster leave --force` gives it up"), false)
            }
            PartError::Join(
                JoinError::NoCluster | JoinError::Store(MetaError::Unreachable { .. }),
            ) => {
                let next = "the node tries on by itself; `windrose cluster nodes` shows who there is. A store that is lost \
                            for good, of a cluster that goes on nowhere else: windrose cluster recover --plan";
                (next.to_owned(), false)
            }
            _ => (TRIES_ON.to_owned(), false),
        };
        Self { what, next, is_outside }
    }
}

/// What helps a node whose member of the store cannot be used any more.
fn lost_member(name: &str) -> String {
    format!(
        "if the other members of the store run: `windrose cluster leave --node {name} --force` at another node, then \
         `windrose cluster leave --force` here, and `windrose cluster join` with a new token. If they are lost for good \
         too: windrose cluster recover --plan. Images stay where they are"
    )
}

impl Control {
    /// Why nothing can be changed at this node now, as the API tells it.
    pub(super) fn not_serving(&self) -> ApiError {
        match self.waiting() {
            Some(waits) => {
                let message = format!("this node waits for its cluster: {}", waits.what);
                ApiError::new(Code::Unavailable, message).hint(waits.next)
            }
            None => ApiError::new(Code::Unavailable, "the node is starting or stopping")
                .hint("try again in a moment"),
        }
    }
}

#[cfg(test)]
mod tests {
    use ::cluster::identity::{ClusterSecret, Protection, Role};
    use peer::NodeId;
    use uuid::Uuid;

    use super::*;

    fn identity(stage: Stage) -> Identity {
        Identity {
            stage,
            cluster: Uuid::from_u128(1),
            node: NodeId(2),
            index: None,
            role: Role::Data,
            secret: ClusterSecret::new([1; 32]),
            protection: Protection::Plain,
            rotation: None,
            endpoints: Vec::new(),
            member: None,
        }
    }

    fn after(error: impl Into<PartError>, stage: Stage) -> Waits {
        let error = error.into();
        Waits::after(&error, error.to_string(), &identity(stage), "b")
    }

    fn store(error: impl FnOnce(String, String) -> MetaError) -> PartError {
        PartError::from(error("etcd".into(), "refused".into()))
    }

    fn away() -> PartError {
        store(|store, why| MetaError::Unreachable { store, why })
    }

    fn joins_anew(waits: &Waits) {
        let Waits { next, is_outside, .. } = waits;
        assert!(is_outside, "{waits:?}");
        assert!(next.contains("`windrose cluster leave --force` here"), "{next}");
        assert!(next.contains("windrose cluster join") && !next.contains("recover"), "{next}");
    }

    #[test]
    fn a_node_whose_cluster_goes_on_without_it_is_told_to_leave_and_to_join_anew() {
        for stage in [Stage::Member, Stage::Joining] {
            joins_anew(&after(store(|store, why| MetaError::Untrusted { store, why }), stage));
            let found = Uuid::from_u128(9);
            joins_anew(&after(PartError::Join(JoinError::OtherCluster { found }), stage));
            joins_anew(&after(PartError::Join(JoinError::Removed), stage));
            let removed = after(PartError::Defect(Defect::Removed), stage);
            joins_anew(&removed);
            assert!(removed.what.contains("this node was removed from the cluster"), "{removed:?}");
        }
    }

    #[test]
    fn only_a_member_whose_store_is_gone_or_empty_is_told_of_recovery() {
        for error in [away(), PartError::Join(JoinError::NoCluster)] {
            let waits = after(error, Stage::Member);
            assert!(waits.next.contains("windrose cluster recover --plan"), "{waits:?}");
            assert!(waits.next.contains("goes on nowhere else") && !waits.is_outside, "{waits:?}");
        }
        for stage in [Stage::Joining, Stage::Leaving, Stage::Moving] {
            let waits = after(away(), stage);
            assert!(!waits.next.contains("recover"), "{waits:?}");
            assert!(waits.next.contains("windrose cluster leave --force"), "{waits:?}");
        }
        let setting = JoinError::Setting { setting: "cluster.lease_ms", here: 1, there: 2 };
        assert_eq!(after(PartError::Join(setting), Stage::Member).next, TRIES_ON);
    }

    #[test]
    fn a_member_that_lost_the_store_before_it_had_read_it_is_told_to_restart_and_recover() {
        let lost = |why: &str| MetaError::Unreachable { store: "etcd".into(), why: why.into() };
        let waits = Waits::for_store(&lost("no leader"));
        assert!(waits.what.contains("no leader"), "{waits:?}");
        let (restart, recover) = ("systemctl restart windrose", "windrose cluster recover --plan");
        assert!(waits.next.contains(restart) && waits.next.contains(recover), "{waits:?}");
    }

    #[test]
    fn a_member_of_the_store_that_is_lost_is_replaced_and_no_directory_is_cleared() {
        for defect in [Defect::AlreadyBootstrapped, Defect::Corrupt { why: "torn".into() }] {
            let waits = after(PartError::Defect(defect), Stage::Member);
            assert!(waits.next.contains("leave --node b --force` at another node"), "{waits:?}");
            assert!(!format!("{waits:?}").contains("clear"), "{waits:?}");
        }
    }
}
