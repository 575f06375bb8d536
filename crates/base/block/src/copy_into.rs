//! Copying data into buffers of other lengths.

use rt::buf::{Bufs, BufsMut};

/// Copies `data` into `into`, from byte `skip` on.
pub fn copy_into(into: &mut BufsMut, mut skip: usize, data: &Bufs) {
    let mut done = 0;
    for piece in into {
        let start = skip.min(piece.len());
        skip -= start;
        let n = (piece.len() - start).min(data.len() - done);
        data.slice(done..done + n).copy_to(&mut piece[start..start + n]);
        done += n;
    }
}
