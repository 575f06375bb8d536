//! Writes of strips without parity to all their copies.

use futures_util::future::join_all;
use geometry::StripRole;
use smallvec::SmallVec;

use super::band::RowBand;
use super::intent_locks::IntentRegion;
use super::log_batch::EntryKind;
use super::member_bits::{MemberBits, member_bit};
use super::mistake::Mistake;
use super::new_contents::NewStrip;
use super::stripe::{Stripe, StripeError};

/// Rows of a strip's copies that one write intent covers: 1 MiB.
const INTENT_REGION_ROWS: u32 = 256;

impl Stripe<'_> {
    /// Writes strips without parity to all their copies.
    pub(super) async fn write_copies(
        &self,
        band: &RowBand,
        new: &[NewStrip],
        fua: bool,
    ) -> Result<(), StripeError> {
        let is_single = self.geometry.redundancy().fault_tolerance() == 0;
        let regions: SmallVec<[(IntentRegion, MemberBits); 2]> =
            if is_single || self.array.makes_mistake(Mistake::SkipsWriteIntents) {
                SmallVec::new()
            } else {
                band.changed()
                    .iter()
                    .map(|strip| (self.intent_region(strip), self.members_with_copy(strip)))
                    .collect()
            };
        let intent = |(_, first, strip): IntentRegion| {
            let stripes = self.intent_region_stripes().min(self.geometry.stripes() - first);
            EntryKind::WriteIntent { stripes, changed: [strip].into_iter().collect() }
        };
        self.array.lock_copies(&regions, intent).await?;
        let region = self.geometry.region_bit(self.slot);
        self.array.mark_stale_before_write(&self.extent, region).await?;
        let row = band.rows.start;
        let write =
            |new: &NewStrip| self.write(StripRole::Data(new.strip), row, new.data.clone(), fua);
        let written = match new {
            [only] => write(only).await,
            several => join_all(several.iter().map(write)).await.into_iter().collect(),
        };
        let ended = self.check_written(band.changed(), written);
        let regions: SmallVec<[IntentRegion; 2]> =
            regions.into_iter().map(|(region, _)| region).collect();
        self.array.unlock_copies(&regions, region, fua).await?;
        ended
    }

    /// Members that have an available copy of a strip.
    fn members_with_copy(&self, strip: u16) -> MemberBits {
        let columns = self.available_columns(StripRole::Data(strip));
        columns.fold(0, |all, column| all | member_bit(column.member))
    }

    /// Stripes of an intent region.
    fn intent_region_stripes(&self) -> u32 {
        (INTENT_REGION_ROWS / self.geometry.strip_rows()).max(1)
    }

    fn intent_region(&self, strip: u16) -> IntentRegion {
        let first = self.slot / self.intent_region_stripes() * self.intent_region_stripes();
        (self.extent.number, first, strip)
    }
}
