//! Stripe maps on the members: loaded when an extent is opened, saved after its stripes have moved.

use std::rc::Rc;

use block::{Buf, BufMut, Bufs, Error};
use futures_util::future::join_all;
use geometry::{Column, MAP_REGION, ROW_BYTES};
use rustc_hash::FxHashSet;

use super::array::{Array, MovedStripes};
use super::bounded_concurrency::run_bounded;
use super::extent::Extent;
use super::parity_log::LogPositions;
use super::stripe_map::LiveStripeMap;
use super::stripe_map_format::{self, MapOwner, ParsedMap};

const ROW: usize = ROW_BYTES as usize;

/// Number of extents whose stripe maps are saved at a time.
const MAX_CONCURRENT_MAP_SAVES: usize = 16;

impl Extent {
    /// The same, with the stripe map read from its columns.
    ///
    /// # Errors
    /// If no column can be read.
    pub async fn load_stripe_map(self, array: &Array) -> Result<Self, Error> {
        self.columns.iter().for_each(|column| array.adopt_column(column));
        let rows = stripe_map_format::map_rows(&self.geometry);
        if rows == 0 {
            return Ok(self);
        }
        // One current map is enough. One column more is read than may have lost an acknowledged
        // write.
        let mut needed = usize::from(self.geometry.redundancy().parity_strips()) + 1;
        let (mut newest, mut damaged, mut read_count) = (None, false, 0);
        for (_, column) in
            (0..).zip(&self.columns).filter(|(n, c)| self.has_current_map(array, *n, **c))
        {
            let _scratch = array.memory.acquire_scratch(rows).await;
            let mut halves = Vec::new();
            for which in [0, 1] {
                let at = self.map_row(*column, which);
                let read = array.read_member(column.member, at, rows, &array.memory.scratch).await;
                halves.extend(read.map(|data| data.to_vec()));
            }
            // The unreadable one may be the newer one, so another column is read.
            if halves.len() < 2 {
                damaged = true;
                needed = usize::MAX;
            }
            if halves.is_empty() {
                continue;
            }
            for half in &halves {
                match stripe_map_format::parse(half, &self.geometry, self.map_owner(array)) {
                    ParsedMap::Map { sequence, map } => {
                        let is_newer = newest.as_ref().is_none_or(|(known, _)| sequence > *known);
                        newest = if is_newer { Some((sequence, map)) } else { newest };
                    }
                    ParsedMap::Absent => {}
                    // Other columns may have the map that is damaged here, so all are read.
                    ParsedMap::Damaged => needed = usize::MAX,
                }
            }
            read_count += 1;
            if read_count >= needed {
                break;
            }
        }
        if read_count == 0 {
            tracing::error!(extent = self.number, damaged, "no disk has a readable stripe map");
            return Err(Error::Gone);
        }
        let (sequence, map) = newest.unwrap_or((0, self.map()));
        Ok(Self { stripe_map: Rc::new(LiveStripeMap::new(map, sequence)), ..self })
    }

    /// Whether the stripe map of a column is up to date.
    fn has_current_map(&self, array: &Array, number: u16, column: Column) -> bool {
        let is_stale = self.stale_slots.borrow().iter().any(|(stale, _)| *stale == number);
        !is_stale && !array.is_detached(column.member)
    }

    fn map_owner(&self, array: &Array) -> MapOwner {
        MapOwner { pool: array.members.pool_id(), extent: self.number }
    }
}

impl Array {
    /// Notes log positions of an entry that moved a stripe of this extent.
    pub(super) fn record_stripe_move(&self, extent: &Rc<Extent>, positions: LogPositions) {
        let mut moved = self.moved_stripes.borrow_mut();
        let known = moved.entry(extent.number()).or_insert_with(|| (Rc::clone(extent), Vec::new()));
        // Its columns may have been moved since.
        known.0 = Rc::clone(extent);
        known.1.push(positions);
        drop(moved);
        self.log_space_freed.notify_waiters();
    }

    /// Replaces an extent whose columns have changed: its map is saved to the new columns.
    pub(super) fn update_moved_extent(&self, extent: &Rc<Extent>) {
        let mut moved = self.moved_stripes.borrow_mut();
        moved.get_mut(&extent.number()).into_iter().for_each(|known| known.0 = Rc::clone(extent));
    }

    /// Saves the maps of all extents whose stripes have moved, and retires the entries of the
    /// moves. Whether there were any.
    pub(super) async fn save_maps(&self) -> Result<bool, Error> {
        // Another caller may have taken the moves that this one waits for.
        let _lock = self.map_save_lock.lock().await;
        let moved = self.moved_stripes.take();
        self.save_moved_maps(moved).await
    }

    /// As [`Self::save_maps`], for these extents, which may be read from the disks afterwards.
    ///
    /// # Errors
    /// If the detach of a member that failed could not be recorded.
    pub async fn save_maps_of(&self, extents: &FxHashSet<u64>) -> Result<(), Error> {
        let _lock = self.map_save_lock.lock().await;
        let moved = self
            .moved_stripes
            .borrow_mut()
            .extract_if(|number, _| extents.contains(number))
            .collect();
        self.save_moved_maps(moved).await.map(drop)
    }

    async fn save_moved_maps(&self, moved: MovedStripes) -> Result<bool, Error> {
        let any_moved = !moved.is_empty();
        let each = moved.into_values().map(|(extent, entries)| async move {
            let saved = self.save_stripe_map(&extent).await;
            saved.inspect_err(|why| self.stop_writes(*why))?;
            entries.iter().for_each(|positions| self.members.retire_entry(positions));
            self.log_space_freed.notify_waiters();
            Ok(())
        });
        run_bounded(each, MAX_CONCURRENT_MAP_SAVES).await?;
        Ok(any_moved)
    }

    /// Makes the stripe map of an extent durable.
    pub(super) async fn save_stripe_map(&self, extent: &Extent) -> Result<(), Error> {
        if stripe_map_format::map_rows(&extent.geometry) == 0 {
            return Ok(());
        }
        // One save at a time: the older of the two maps must stay intact.
        let mut saved = extent.stripe_map.saved_sequence.lock().await;
        self.mark_stale(extent, MAP_REGION).await?;
        let sequence = *saved + 1;
        let bytes = stripe_map_format::to_bytes(&extent.map(), sequence, extent.map_owner(self));
        let data: Bufs = bytes.chunks_exact(ROW).map(copy_to_page).collect();
        let each = extent.columns.iter().map(|column| {
            let at = extent.map_row(*column, sequence % 2);
            self.write_member(column.member, at, data.clone(), true)
        });
        join_all(each).await.into_iter().collect::<Result<(), Error>>()?;
        *saved = sequence;
        self.mark_stale(extent, MAP_REGION).await
    }
}

/// Copies into heap memory: tasks that wait for maps to be saved may hold all of the array's
/// memory.
fn copy_to_page(bytes: &[u8]) -> Buf {
    let mut page = BufMut::heap_page();
    page.copy_from_slice(bytes);
    page.freeze()
}
