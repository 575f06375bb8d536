//! Memory buffers for `s2n-tls`: it reads and writes only here.
#![allow(unsafe_code)]

use std::ffi::{c_int, c_void};
use std::slice;

use errno::{Errno, set_errno};
use s2n_tls::connection::Connection;

/// Ciphertext not yet read by `s2n-tls`, and ciphertext not yet sent.
#[derive(Debug, Default)]
pub(crate) struct CiphertextBuffers {
    pub(crate) input: ByteQueue,
    pub(crate) output: ByteQueue,
    /// The input has ended.
    pub(crate) has_ended: bool,
}

/// A byte queue.
#[derive(Debug, Default)]
pub(crate) struct ByteQueue {
    bytes: Vec<u8>,
    /// Number of consumed bytes at the front.
    consumed: usize,
}

impl ByteQueue {
    /// First removes consumed bytes, once they are half of all: otherwise a stream with constantly
    /// waiting data would grow for ever. So each byte is moved once at most, on average.
    pub(crate) fn push(&mut self, bytes: &[u8]) {
        if self.consumed > self.bytes.len() / 2 {
            self.bytes.drain(..self.consumed);
            self.consumed = 0;
        }
        self.bytes.extend_from_slice(bytes);
    }

    pub(crate) fn unread(&self) -> &[u8] {
        &self.bytes[self.consumed..]
    }

    pub(crate) fn consume(&mut self, n: usize) {
        self.consumed = (self.consumed + n).min(self.bytes.len());
        if self.consumed == self.bytes.len() {
            self.bytes.clear();
            self.consumed = 0;
        }
    }

    /// Allocated bytes.
    #[cfg(test)]
    pub(crate) fn capacity(&self) -> usize {
        self.bytes.capacity()
    }

    /// Frees the memory of an empty queue.
    pub(crate) fn release_if_empty(&mut self) {
        if self.bytes.is_empty() {
            self.bytes = Vec::new();
        }
    }
}

/// Makes a connection read and write through the buffers.
pub(crate) fn install_callbacks(connection: &mut Connection) -> Result<(), s2n_tls::error::Error> {
    connection
        .set_receive_callback(Some(receive_callback))?
        .set_send_callback(Some(send_callback))?;
    Ok(())
}

/// Calls `act` on a connection that reads and writes through `pipe` meanwhile.
pub(crate) fn with_buffers<T>(
    connection: &mut Connection,
    pipe: &mut CiphertextBuffers,
    act: impl FnOnce(&mut Connection) -> T,
) -> Result<T, s2n_tls::error::Error> {
    let context: *mut CiphertextBuffers = pipe;
    // SAFETY: the contexts are used only by `receive_callback` and `send_callback`, and these are
    // called only while a method of the connection runs; every method that reads or writes is
    // called within such an `act`, with a new context. While it runs, `pipe` is borrowed here and
    // used only through this pointer.
    unsafe {
        connection.set_receive_context(context.cast())?.set_send_context(context.cast())?;
    }
    Ok(act(connection))
}

/// Passes ciphertext to `s2n-tls`; 0 at its end, -1 when there is none for now.
unsafe extern "C" fn receive_callback(context: *mut c_void, into: *mut u8, len: u32) -> c_int {
    if context.is_null() || into.is_null() {
        return -1;
    }
    // SAFETY: `with_buffers` has set the context to buffers that are valid, and not used elsewhere,
    // until it returns.
    let pipe = unsafe { &mut *context.cast::<CiphertextBuffers>() };
    let left = pipe.input.unread();
    if left.is_empty() && !pipe.has_ended {
        set_errno(Errno(libc::EAGAIN));
        return -1;
    }
    let n = left.len().min(len as usize).min(c_int::MAX as usize);
    // SAFETY: `s2n-tls` provides `len` bytes of its own memory, which do not overlap the buffers.
    // They may be uninitialised: they are only written, and no reference to them is made.
    unsafe { into.copy_from_nonoverlapping(left.as_ptr(), n) };
    pipe.input.consume(n);
    n as c_int
}

/// Accepts all ciphertext from `s2n-tls`.
unsafe extern "C" fn send_callback(context: *mut c_void, from: *const u8, len: u32) -> c_int {
    if context.is_null() || from.is_null() || len > c_int::MAX as u32 {
        return -1;
    }
    // SAFETY: as above; `s2n-tls` provides `len` readable bytes.
    let (pipe, from) = unsafe {
        (&mut *context.cast::<CiphertextBuffers>(), slice::from_raw_parts(from, len as usize))
    };
    pipe.output.push(from);
    len as c_int
}
