//! What an image tells of its volume, for the day when nothing else does.

use disk::descriptor::{self, BadDescriptor, Descriptor};
use disk::{FileError, Reason, slots};
use rt::buf::copy_in;

use super::File;

impl File {
    /// What the image tells of its volume, if it does.
    ///
    /// # Errors
    /// [`Reason::BadDescriptor`]; that it cannot be read.
    pub async fn descriptor(&self) -> Result<Option<Descriptor>, FileError> {
        let copies = descriptor::read(&self.medium, &self.memory).await;
        let copies = copies.map_err(|e| Reason::from(e).at(self.path()))?;
        let chosen = descriptor::choose(&copies, self.label.get().volume);
        let chosen = chosen.map_err(|why| Reason::BadDescriptor(why).at(self.path()))?;
        Ok(chosen.cloned())
    }

    /// Has the image tell `text` of its volume. Durable when this returns; nothing is written if it does already.
    ///
    /// # Errors
    /// [`Reason::BadDescriptor`] of another version, which is left alone; that it cannot be written: what the image
    /// told before, or this, is there then.
    pub async fn describe(&self, text: &[u8]) -> Result<(), FileError> {
        let _alone = self.changing_label.lock().await;
        let described = self.describe_alone(text).await;
        self.judge(described)
    }

    async fn describe_alone(&self, text: &[u8]) -> Result<(), Reason> {
        let volume = self.label.get().volume;
        let copies = descriptor::read(&self.medium, &self.memory).await?;
        let before = match descriptor::choose(&copies, volume) {
            Ok(before) => before,
            Err(BadDescriptor::Damaged) => None,
            Err(why) => return Err(Reason::BadDescriptor(why)),
        };
        let told = |copy: &Result<Descriptor, _>| {
            copy.as_ref().is_ok_and(|d| d.volume == volume && d.text == text)
        };
        if copies.iter().all(told) {
            return Ok(());
        }
        let generation = before.map_or(0, |d| d.generation) + 1;
        let new = Descriptor { generation, volume, text: text.to_vec() };
        // The one that counts goes last.
        let newest = copies.iter().position(|copy| copy.as_ref().ok() == before);
        let order = if newest == Some(0) && before.is_some() { [1u16, 0] } else { [0, 1] };
        for copy in order {
            let bytes = new.to_bytes(copy).ok_or(Reason::Size("its description is too long"))?;
            let ctx = self.medium.ctx(&self.memory, bytes.len()).await;
            let data = copy_in(ctx.credit(), &bytes);
            self.medium.write(descriptor::PLACES[usize::from(copy)], data, &ctx).await?;
            drop(ctx);
            slots::sync(&self.medium, &self.memory).await?;
        }
        Ok(())
    }
}
