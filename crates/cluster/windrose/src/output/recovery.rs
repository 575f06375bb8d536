//! Formats recovery findings and plans for people.

use api::{
    ImportablePools, OrphanedImages, PlannedReplica, PlannedVolume, RecoveryPlan, Size, VolumeName,
};

use super::table;

/// What the search does not cover.
const NOT_SEARCHED_NOTE: &str = "Images in files outside the data directory (volumes created with \
    --path) are not searched for. To adopt one:\n  windrose volume adopt PATH";

/// `windrose volume orphans`.
pub(crate) fn orphans(found: &OrphanedImages) -> String {
    if found.images.is_empty() {
        return format!(
            "Every image that was found on this node is referenced by a \
             record.\n{NOT_SEARCHED_NOTE}"
        );
    }
    let rows = found.images.iter().map(|image| {
        let name =
            image.name.as_ref().map_or_else(|| image.volume.to_string(), VolumeName::to_string);
        let state = match (&image.existing_volume, &image.problem) {
            (Some(volume), _) => format!("a former replica of volume {volume}"),
            (None, Some(problem)) => problem.clone(),
            (None, None) => "no record of its volume".to_owned(),
        };
        vec![name, Size(image.size_bytes).to_string(), image.image.clone(), state]
    });
    let rows = table(&["VOLUME", "SIZE", "IMAGE", "STATE"], &[1], rows);
    let next = found.images.iter().map(|image| format!("\n{}:\n  {}", image.image, image.hint));
    format!("{rows}\n{}\n\n{NOT_SEARCHED_NOTE}", next.collect::<String>())
}

/// `windrose pool import` without a name.
pub(crate) fn importable(found: &ImportablePools) -> String {
    if found.pools.is_empty() {
        return "No block device holds a pool that this node does not know. For disks that are \
            files, use --disk."
            .to_owned();
    }
    let rows = found.pools.iter().map(|pool| {
        let disks: Vec<_> = pool.disks.iter().map(|d| d.display().to_string()).collect();
        let problem = pool.problem.clone().unwrap_or_default();
        vec![pool.name.clone(), pool.id.to_string(), disks.join(", "), problem]
    });
    let rows = table(&["POOL", "IDENTITY", "DISKS", ""], &[], rows);
    format!("{rows}\n\nTo import one:\n  windrose pool import NAME")
}

/// What is planned for a volume.
pub(crate) fn planned(plan: &PlannedVolume) -> String {
    let name = plan.name.as_ref().map_or_else(|| plan.volume.to_string(), VolumeName::to_string);
    let mut text = format!("Volume {name} ({})", Size(plan.size_bytes));
    match &plan.source {
        Some(primary) => text.push_str(&format!(" uses {}", replica_text(primary))),
        None => text.push_str(" is not changed"),
    }
    for replica in &plan.resync_replicas {
        text.push_str(&format!("\n  resynced from it: {}", replica_text(replica)));
    }
    if let Some(doubt) = &plan.ambiguity {
        text.push_str(&format!("\n  NOT DECIDED: {doubt}"));
    }
    for note in &plan.notes {
        text.push_str(&format!("\n  note: {note}"));
    }
    text
}

fn replica_text(replica: &PlannedReplica) -> String {
    let state = match (replica.epoch, replica.in_sync) {
        (Some(epoch), true) => format!(" (in sync in epoch {epoch})"),
        (Some(epoch), false) => format!(" (not in sync in epoch {epoch})"),
        (None, _) => String::new(),
    };
    format!("{} on {}{state}", replica.image, replica.node)
}

/// `windrose cluster recover`.
pub(crate) fn recovery(plan: &RecoveryPlan) -> String {
    let mut parts = Vec::new();
    if let Some(store) = &plan.store {
        parts.push(format!(
            "The store of cluster {} is lost: {}.\nNode {} begins a new cluster, with a store, an \
             identity and a secret of its own. The old members ({}) must not run again: the new \
             cluster refuses members of the old one, but a majority of them would serve the \
             volumes a second time. Switch them off, or first run windrose cluster leave --force \
             at each.\nThe images are kept; the old member's data is moved aside in the data \
             directory.",
            store.replaced_cluster,
            store.reason,
            plan.node,
            store.lost_members.join(", "),
        ));
    }
    parts.extend(plan.volumes.iter().map(planned));
    if parts.is_empty() && !plan.unresponsive_nodes.is_empty() {
        parts.push(format!(
            "There is nothing to recover on the nodes that respond. These nodes did not respond: \
             {}. Start windrose there, and try again.",
            plan.unresponsive_nodes.join(", ")
        ));
    }
    if parts.is_empty() {
        parts.push(
            "There is nothing to recover: every image that was found on the nodes is referenced by \
             a record."
                .to_owned(),
        );
    }
    parts.push(NOT_SEARCHED_NOTE.to_owned());
    parts.join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Such images are in places that no record names.
    #[test]
    fn images_in_files_elsewhere_are_not_said_to_be_found() {
        let mut found = OrphanedImages { images: Vec::new() };
        assert!(orphans(&found).contains("windrose volume adopt PATH"), "{}", orphans(&found));
        found.images.push(api::OrphanedImage {
            image: "/v/web.img".into(),
            volume: uuid::Uuid::nil(),
            name: None,
            size_bytes: 1 << 20,
            existing_volume: None,
            epoch: None,
            problem: None,
            hint: "windrose volume adopt /v/web.img --force --name NAME".into(),
        });
        let text = orphans(&found);
        assert!(text.contains("/v/web.img:\n  windrose volume adopt /v/web.img --force"), "{text}");
        assert!(text.ends_with("windrose volume adopt PATH"), "{text}");
        let (store, volumes, silent) = (None, Vec::new(), Vec::new());
        let plan = RecoveryPlan {
            node: "a".into(),
            store,
            volumes,
            unresponsive_nodes: silent,
            applied: false,
        };
        assert!(recovery(&plan).ends_with("windrose volume adopt PATH"));
    }

    #[test]
    fn nothing_is_to_be_recovered_only_where_all_nodes_have_said_what_they_have() {
        let mut plan = RecoveryPlan {
            node: "a".into(),
            store: None,
            volumes: Vec::new(),
            unresponsive_nodes: Vec::new(),
            applied: false,
        };
        assert!(recovery(&plan).contains("every image that was found"));
        plan.unresponsive_nodes = vec!["b".into()];
        let text = recovery(&plan);
        assert!(text.contains("These nodes did not respond: b."), "{text}");
        assert!(!text.contains("every image that was found"), "{text}");
    }

    #[test]
    fn a_plan_names_what_leads_what_follows_and_what_is_not_decided() {
        let on = |node: &str, in_sync| PlannedReplica {
            node: node.into(),
            image: "/v/web.img".into(),
            epoch: Some(7),
            in_sync,
        };
        let mut plan = PlannedVolume {
            volume: uuid::Uuid::from_u128(7),
            name: Some("web".parse().unwrap()),
            size_bytes: 1 << 30,
            source: Some(on("a", true)),
            resync_replicas: vec![on("b", false)],
            notes: vec!["set CHAP anew".into()],
            ambiguity: None,
        };
        insta::assert_snapshot!(planned(&plan), @r"
        Volume web (1 GiB) uses /v/web.img on a (in sync in epoch 7)
          resynced from it: /v/web.img on b (not in sync in epoch 7)
          note: set CHAP anew
        ");
        plan = PlannedVolume {
            source: None,
            resync_replicas: Vec::new(),
            notes: Vec::new(),
            ambiguity: Some("why".into()),
            ..plan
        };
        insta::assert_snapshot!(planned(&plan), @r"
        Volume web (1 GiB) is not changed
          NOT DECIDED: why
        ");
    }
}
