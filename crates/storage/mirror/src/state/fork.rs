//! Copies of a state, for the search.

use std::rc::Rc;

use super::{ReplicaImage, ReplicaState};

impl ReplicaState {
    /// A copy in which the image is this one. Its locks are those of a copy of the table.
    pub(in super::super) fn fork(&self, image: Rc<dyn ReplicaImage>) -> Self {
        let range_locks = self.range_locks.fork();
        Self {
            image,
            prepared: self.prepared.fork(&range_locks),
            range_locks,
            pending_clear: None,
            me: self.me,
            settings: self.settings,
            now: self.now,
            membership: self.membership.clone(),
            local_writes: self.local_writes.clone(),
            view: self.view,
            view_began_at: self.view_began_at,
            active_view: self.active_view,
            start_view: self.start_view.clone(),
            collected_entries: self.collected_entries.clone(),
            sequencer: self.sequencer.clone(),
            joiners: self.joiners.clone(),
            join_requests: self.join_requests.clone(),
            newer_joiners: self.newer_joiners.clone(),
            join_attempt: self.join_attempt,
            join_wanted: self.join_wanted,
            join_allowed: self.join_allowed,
            join_backoff: self.join_backoff,
            inherited_generations: self.inherited_generations.clone(),
            lease_requests: self.lease_requests.clone(),
            lease_dedup: self.lease_dedup.clone(),
            last_heard: self.last_heard.clone(),
            unlinked_since: self.unlinked_since.clone(),
            unreachable_pairs: self.unreachable_pairs.clone(),
            reported_dirty: self.reported_dirty.clone(),
            last_generation: self.last_generation,
            no_space_at: self.no_space_at,
            free_space_checked_at: self.free_space_checked_at,
            leg_loss: self.leg_loss,
            leg_error: self.leg_error,
            was_serving: self.was_serving,
            holds_commands: self.holds_commands,
            is_closed: self.is_closed,
            awake_clock: self.awake_clock,
            config_polled_at: self.config_polled_at,
            put_count: self.put_count,
            store_silent_since: self.store_silent_since,
            declined_leaves: self.declined_leaves,
        }
    }

    /// What distinguishes this state from others, but for the membership and times.
    pub(in super::super) fn describe(&self) -> String {
        format!(
            "{:?} {:?} {:?} {:?} {} {:?} {:?} {:?} {:?} {:?} {:?} {:?}",
            self.view,
            self.active_view,
            self.start_view,
            self.collected_entries,
            self.prepared.describe(),
            self.sequencer,
            self.local_writes,
            self.joiners,
            self.join_attempt,
            self.inherited_generations,
            self.leg_loss,
            self.leg_error,
        )
    }

    /// What is known of the image.
    pub(in super::super) fn image(&self) -> &dyn ReplicaImage {
        &*self.image
    }

    /// Replaces what is known of the image.
    pub(in super::super) fn set_image(&mut self, image: Rc<dyn ReplicaImage>) {
        self.image = image;
    }
}
