//! What a node waits for while it enters its cluster, and the next step.

use cluster::etcd_member::PermanentFailure;
use cluster::identity::{ClusterIdentity, MembershipStage};
use cluster::join_error::JoinError;
use cluster::store::StoreError;
use status::UNTRUSTED_STORE_HINT;
use status::startup_wait::{REJOIN_HINT, RETRIES_HINT, StartupWait};

use membership::MembershipError;

/// A wait for `error` to end, described by `what`, at the node `name`.
pub(super) fn wait_after_error(
    error: &MembershipError,
    what: String,
    identity: &ClusterIdentity,
    name: &str,
) -> StartupWait {
    let (next, is_outside) = match error {
        MembershipError::Join(JoinError::Removed | JoinError::OtherCluster { .. }) => {
            (REJOIN_HINT.to_owned(), true)
        }
        MembershipError::Join(JoinError::Store(StoreError::TlsRejected { .. })) => {
            (UNTRUSTED_STORE_HINT.to_owned(), true)
        }
        MembershipError::StoreMemberDefect(PermanentFailure::Removed) => {
            (REJOIN_HINT.to_owned(), true)
        }
        MembershipError::StoreMemberDefect(
            PermanentFailure::DataLost | PermanentFailure::Corrupt { .. },
        ) => (lost_store_member_hint(name), false),
        _ if identity.stage != MembershipStage::Member => {
            (format!("{RETRIES_HINT}; to give up: `windrose cluster leave --force`"), false)
        }
        MembershipError::Join(
            JoinError::NoCluster | JoinError::Store(StoreError::Unreachable { .. }),
        ) => {
            let next = "the node retries automatically; `windrose cluster nodes` shows the \
                nodes. If the store is lost for good, and no other node has recovered the \
                cluster: windrose cluster recover --dry-run";
            (next.to_owned(), false)
        }
        _ => (RETRIES_HINT.to_owned(), false),
    };
    StartupWait { reason: what, next_step: next, is_removed_from_cluster: is_outside }
}

/// The hint for a node whose store member is lost.
fn lost_store_member_hint(name: &str) -> String {
    format!(
        "if the other members of the store run: `windrose cluster leave --node {name} --force` at \
         another node, then `windrose cluster leave --force` here, and `windrose cluster join` \
         with a new token. If they are lost for good too: windrose cluster recover --dry-run. \
         Images are kept"
    )
}

#[cfg(test)]
mod tests {
    use cluster::identity::{ClusterSecret, Role, TransportSecurity};
    use peer::NodeId;
    use uuid::Uuid;

    use super::*;

    fn identity(stage: MembershipStage) -> ClusterIdentity {
        ClusterIdentity {
            stage,
            cluster: Uuid::from_u128(1),
            node: NodeId(2),
            index: None,
            role: Role::Data,
            secret: ClusterSecret::new([1; 32]),
            transport_security: TransportSecurity::PlainText,
            rotation: None,
            endpoints: Vec::new(),
            member: None,
        }
    }

    fn after(error: impl Into<MembershipError>, stage: MembershipStage) -> StartupWait {
        let error = error.into();
        wait_after_error(&error, error.to_string(), &identity(stage), "b")
    }

    fn store(error: impl FnOnce(String, String) -> StoreError) -> MembershipError {
        MembershipError::from(error("etcd".into(), "refused".into()))
    }

    fn away() -> MembershipError {
        store(|store, why| StoreError::Unreachable { store, why })
    }

    fn joins_anew(waits: &StartupWait) {
        let StartupWait { next_step: next, is_removed_from_cluster: is_outside, .. } = waits;
        assert!(is_outside, "{waits:?}");
        assert!(next.contains("`windrose cluster leave --force` here"), "{next}");
        assert!(next.contains("windrose cluster join") && !next.contains("recover"), "{next}");
    }

    #[test]
    fn a_node_whose_cluster_goes_on_without_it_is_told_to_leave_and_to_join_anew() {
        for stage in [MembershipStage::Member, MembershipStage::Joining] {
            joins_anew(&after(store(|store, why| StoreError::TlsRejected { store, why }), stage));
            let found = Uuid::from_u128(9);
            joins_anew(&after(MembershipError::Join(JoinError::OtherCluster { found }), stage));
            joins_anew(&after(MembershipError::Join(JoinError::Removed), stage));
            let removed =
                after(MembershipError::StoreMemberDefect(PermanentFailure::Removed), stage);
            joins_anew(&removed);
            assert!(
                removed.reason.contains("this node was removed from the cluster"),
                "{removed:?}"
            );
        }
    }

    #[test]
    fn only_a_member_whose_store_is_gone_or_empty_is_told_of_recovery() {
        for error in [away(), MembershipError::Join(JoinError::NoCluster)] {
            let waits = after(error, MembershipStage::Member);
            assert!(waits.next_step.contains("windrose cluster recover --dry-run"), "{waits:?}");
            assert!(
                waits.next_step.contains("no other node has recovered the cluster")
                    && !waits.is_removed_from_cluster,
                "{waits:?}"
            );
        }
        for stage in [MembershipStage::Joining, MembershipStage::Leaving, MembershipStage::Creating]
        {
            let waits = after(away(), stage);
            assert!(!waits.next_step.contains("recover"), "{waits:?}");
            assert!(waits.next_step.contains("windrose cluster leave --force"), "{waits:?}");
        }
        let setting =
            JoinError::SettingMismatch { setting: "cluster.lease_ms", local: 1, cluster: 2 };
        assert_eq!(
            after(MembershipError::Join(setting), MembershipStage::Member).next_step,
            RETRIES_HINT
        );
    }

    #[test]
    fn a_member_that_lost_the_store_before_it_had_read_it_is_told_to_restart_and_recover() {
        let lost = |why: &str| StoreError::Unreachable { store: "etcd".into(), why: why.into() };
        let waits = StartupWait::for_store(&lost("no leader"));
        assert!(waits.reason.contains("no leader"), "{waits:?}");
        let (restart, recover) =
            ("systemctl restart windrose", "windrose cluster recover --dry-run");
        assert!(
            waits.next_step.contains(restart) && waits.next_step.contains(recover),
            "{waits:?}"
        );
    }

    #[test]
    fn a_member_of_the_store_that_is_lost_is_replaced_and_no_directory_is_cleared() {
        for defect in [PermanentFailure::DataLost, PermanentFailure::Corrupt { why: "torn".into() }]
        {
            let waits = after(MembershipError::StoreMemberDefect(defect), MembershipStage::Member);
            assert!(
                waits.next_step.contains("leave --node b --force` at another node"),
                "{waits:?}"
            );
            assert!(!format!("{waits:?}").contains("clear"), "{waits:?}");
        }
    }
}
