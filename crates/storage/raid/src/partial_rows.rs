//! Writes that begin or end within a row: the row is read, and written completely.

use block::BufMut;
use geometry::{ROW_BYTES, StripRole};
use tokio::sync::SemaphorePermit;

use super::band::StripWrite;
use super::fragments::{StripFragment, split_fragments};
use super::stripe::{Stripe, StripeError};

const ROW: usize = ROW_BYTES as usize;

impl<'a> Stripe<'a> {
    /// The rows to write, with partial ones completed, and the permit for the memory of these.
    pub(super) async fn complete_rows(
        &self,
        fragments: &[StripFragment],
    ) -> Result<(Vec<StripWrite>, Option<SemaphorePermit<'a>>), StripeError> {
        let (mut writes, partial) = split_fragments(fragments);
        if partial.is_empty() {
            return Ok((writes, None));
        }
        let pages = u32::try_from(partial.len()).unwrap_or(u32::MAX);
        let permit = self.array.memory.acquire_partial_rows(pages).await;
        for ((strip, row), parts) in partial {
            let mut page = self.read_row(strip, row).await?;
            for (at, data) in parts {
                data.copy_to(&mut page[at..at + data.len()]);
            }
            writes.push(StripWrite { strip, rows: row..row + 1, data: page.into() });
        }
        Ok((writes, Some(permit)))
    }

    /// Reads one row of data, to be changed.
    async fn read_row(&self, strip: u16, row: u32) -> Result<BufMut, StripeError> {
        let (role, rows) = (StripRole::Data(strip), row..row + 1);
        let mut page = self.array.memory.scratch.credit().alloc_page(ROW);
        match self.read(role, &rows, &self.array.memory.scratch).await {
            Ok(data) => data.copy_to(&mut page),
            Err(failure) => {
                self.handle_read_failure(failure).await?;
                let data = self
                    .reconstruct_and_repair(strip, &rows, failure, &self.array.memory.scratch)
                    .await?;
                data.copy_to(&mut page);
            }
        }
        Ok(page)
    }
}
