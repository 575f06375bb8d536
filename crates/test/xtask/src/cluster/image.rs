//! An image file with a replica of a volume.

use anyhow::{Context, Result, ensure};
use rustix::{fs::SeekFrom, io::Errno};
use std::{fs::File, os::unix::fs::FileExt, path::Path};

/// A replica of a volume: a file with a label (`docs/format/label.md`).
pub(super) struct Image {
    file: File,
    data: u64,
    length: u64,
}

impl Image {
    pub(super) fn open(path: &Path) -> Result<Self> {
        let file = File::open(path)?;
        let mut label = [0; 112];
        file.read_exact_at(&mut label, 0)?;
        ensure!(label.starts_with(b"WINDROSE LABEL\r\n"), "no label");
        Ok(Self { file, data: le_word(&label, 88), length: le_word(&label, 96) })
    }

    /// Pages its intent log has written (`docs/format/intent.md`): each cell counts its own writes,
    /// and a page's cells are written together.
    pub(super) fn log_writes(&self) -> Result<u64> {
        const PAGES: std::ops::Range<u64> = 0x83000..0xea000;
        const PAGE: usize = 4096;
        let mut written = 0;
        for at in PAGES.step_by(PAGE) {
            let mut cell = [0; 32];
            self.file.read_exact_at(&mut cell, at)?;
            if cell.starts_with(b"WRIC") {
                written += le_word(&cell, 24);
            }
        }
        Ok(written)
    }

    /// The first byte of the volume at or after `at` that is not in a hole of the file.
    fn next_data(&self, at: u64) -> Result<Option<u64>> {
        self.seek_next(SeekFrom::Data(self.data + at))
    }

    fn seek_next(&self, what: SeekFrom) -> Result<Option<u64>> {
        match rustix::fs::seek(&self.file, what) {
            Ok(found) => Ok(Some(found - self.data).filter(|found| *found < self.length)),
            Err(Errno::NXIO) => Ok(None),
            Err(error) => Err(error).context("holes cannot be told from data"),
        }
    }

    /// Bytes of the volume that are not in holes of the file.
    pub(super) fn allocated(&self) -> Result<u64> {
        let (mut allocated, mut next) = (0, 0);
        while let Some(at) = self.next_data(next)? {
            next = self.seek_next(SeekFrom::Hole(self.data + at))?.unwrap_or(self.length);
            allocated += next - at;
        }
        Ok(allocated)
    }

    /// The first byte of the volume that differs.
    pub(super) fn first_difference(&self, other: &Self) -> Result<Option<u64>> {
        const STEP: usize = 1 << 20;
        ensure!(self.length == other.length, "{} and {} bytes", self.length, other.length);
        let (mut mine, mut theirs) = (vec![0; STEP], vec![0; STEP]);
        let mut next = 0;
        while let Some(at) = self.next_data(next)?.into_iter().chain(other.next_data(next)?).min() {
            next = at + STEP as u64;
            let left = usize::try_from(self.length - at).unwrap_or(STEP).min(STEP);
            let (mine, theirs) = (&mut mine[..left], &mut theirs[..left]);
            self.file.read_exact_at(mine, self.data + at)?;
            other.file.read_exact_at(theirs, other.data + at)?;
            if mine != theirs {
                let index = mine.iter().zip(&*theirs).position(|(mine, their)| mine != their);
                return Ok(index.map(|index| at + index as u64));
            }
        }
        Ok(None)
    }
}

/// The little-endian number at `at`.
fn le_word(bytes: &[u8], at: usize) -> u64 {
    bytes[at..at + 8].iter().rev().fold(0, |n, b| n << 8 | u64::from(*b))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    fn image(path: &Path, offset: u64, data: &[u8]) -> Image {
        let mut bytes = vec![0; usize::try_from(offset).unwrap()];
        bytes[..16].copy_from_slice(b"WINDROSE LABEL\r\n");
        bytes[88..96].copy_from_slice(&offset.to_le_bytes());
        bytes[96..104].copy_from_slice(&(data.len() as u64).to_le_bytes());
        bytes.extend_from_slice(data);
        fs::write(path, bytes).unwrap();
        Image::open(path).unwrap()
    }

    #[test]
    fn images_are_compared_by_their_data() {
        let directory =
            std::env::temp_dir().join(format!("windrose-images-{}", std::process::id()));
        fs::create_dir_all(&directory).unwrap();
        let mut data = vec![7; 3 << 20];
        let one = image(&directory.join("one"), 4096, &data);
        let moved = image(&directory.join("moved"), 8192, &data);
        assert_eq!(one.first_difference(&moved).unwrap(), None);
        data[(2 << 20) + 5] = 8;
        let other = image(&directory.join("other"), 8192, &data);
        assert_eq!(one.first_difference(&other).unwrap(), Some((2 << 20) + 5));
        data.pop();
        let shorter = image(&directory.join("shorter"), 8192, &data);
        assert!(one.first_difference(&shorter).is_err());
        fs::remove_dir_all(&directory).unwrap();
    }

    #[test]
    fn holes_are_not_counted() {
        let path = std::env::temp_dir().join(format!("windrose-holes-{}", std::process::id()));
        let image = image(&path, 8192, &vec![0; 4 << 20]);
        let whole = image.allocated().unwrap();
        assert_eq!(whole, 4 << 20);
        let file = fs::OpenOptions::new().write(true).open(&path).unwrap();
        file.set_len(8192 + (1 << 20)).unwrap();
        file.set_len(8192 + (4 << 20)).unwrap();
        assert_eq!(image.allocated().unwrap(), 1 << 20);
        file.write_all_at(&[1; 8192], 8192 + (3 << 20)).unwrap();
        assert_eq!(image.allocated().unwrap(), (1 << 20) + 8192);
        fs::remove_file(&path).unwrap();
    }
}
