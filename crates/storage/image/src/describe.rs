//! The descriptor of a volume that its image holds.

use disk::descriptor::{self, Descriptor, DescriptorError};
use disk::{ImageError, ImageErrorReason, label_copies};
use rt::buf::copy_in;

use super::FlatImage;

impl FlatImage {
    /// Reads the descriptor; `None` if the image has none.
    ///
    /// # Errors
    /// [`ImageErrorReason::InvalidDescriptor`]; or it cannot be read.
    pub async fn read_descriptor(&self) -> Result<Option<Descriptor>, ImageError> {
        let copies = descriptor::read_copies(&self.medium, &self.memory).await;
        let copies = copies.map_err(|e| ImageErrorReason::from(e).at_path(self.path()))?;
        let chosen = descriptor::newest_valid(&copies, self.label.get().volume_id);
        let chosen =
            chosen.map_err(|why| ImageErrorReason::InvalidDescriptor(why).at_path(self.path()))?;
        Ok(chosen.cloned())
    }

    /// Writes `text` as the volume's descriptor. Durable when this returns; does nothing if both
    /// copies hold it already.
    ///
    /// # Errors
    /// [`ImageErrorReason::InvalidDescriptor`] if one of a newer version is there, which is kept;
    /// or it cannot be written: then the image holds the old text or the new one.
    pub async fn write_descriptor(&self, text: &[u8]) -> Result<(), ImageError> {
        let _guard = self.label_lock.lock().await;
        let described = self.write_descriptor_locked(text).await;
        self.note_label_result(described)
    }

    async fn write_descriptor_locked(&self, text: &[u8]) -> Result<(), ImageErrorReason> {
        let volume = self.label.get().volume_id;
        let copies = descriptor::read_copies(&self.medium, &self.memory).await?;
        let before = match descriptor::newest_valid(&copies, volume) {
            Ok(before) => before,
            Err(DescriptorError::Damaged) => None,
            Err(why) => return Err(ImageErrorReason::InvalidDescriptor(why)),
        };
        let is_current = |copy: &Result<Descriptor, _>| {
            copy.as_ref().is_ok_and(|d| d.volume == volume && d.text == text)
        };
        if copies.iter().all(is_current) {
            return Ok(());
        }
        let generation = before.map_or(0, |d| d.generation) + 1;
        let new = Descriptor { generation, volume, text: text.to_vec() };
        // The current copy is overwritten last.
        let newest = copies.iter().position(|copy| copy.as_ref().ok() == before);
        let order = if newest == Some(0) && before.is_some() { [1u16, 0] } else { [0, 1] };
        for copy in order {
            let bytes = new
                .to_bytes(copy)
                .ok_or(ImageErrorReason::InvalidSize("its description is too long"))?;
            let ctx = self.medium.ctx(&self.memory, bytes.len()).await;
            let data = copy_in(ctx.credit(), &bytes);
            self.medium.write(descriptor::COPY_OFFSETS[usize::from(copy)], data, &ctx).await?;
            drop(ctx);
            label_copies::sync(&self.medium, &self.memory).await?;
        }
        Ok(())
    }
}
