//! Memory for payloads of commands.

use rt::buf::{Account, BufferPool, Bufs, BufsMut, MemoryClass};

/// Memory in pieces that begin and end anywhere.
pub struct PayloadMemory(Account);

impl Default for PayloadMemory {
    fn default() -> Self {
        Self(BufferPool::new(64 << 20).unwrap().account())
    }
}

impl PayloadMemory {
    /// Empty memory.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Room for this many bytes.
    #[must_use]
    pub fn room(&self, bytes: usize) -> BufsMut {
        let mut room = BufsMut::new();
        let mut left = bytes;
        for piece in [1usize, 511, 3000, 4096].into_iter().cycle() {
            if left == 0 {
                break;
            }
            let credit = self.0.try_credit(4096, MemoryClass::LocalIo).expect("enough memory");
            room.extend(credit.alloc(piece.min(left)));
            left -= piece.min(left);
        }
        room
    }

    /// Memory that holds `bytes`.
    #[must_use]
    pub fn holding(&self, bytes: &[u8]) -> Bufs {
        let mut room = self.room(bytes.len());
        let mut left = bytes;
        for piece in &mut room {
            let (now, later) = left.split_at(piece.len());
            piece.copy_from_slice(now);
            left = later;
        }
        room.into()
    }
}

/// The contents, in one piece.
#[must_use]
pub fn flat(buffers: &BufsMut) -> Vec<u8> {
    buffers.iter().flat_map(|piece| piece.to_vec()).collect()
}
