//! Between `s2n-tls` and memory: what it reads and writes is here, and nowhere else.
#![allow(unsafe_code)]

use std::ffi::{c_int, c_void};
use std::slice;

use errno::{Errno, set_errno};
use s2n_tls::connection::Connection;

/// Ciphertext that `s2n-tls` has not read yet, and that nobody has sent yet.
#[derive(Debug, Default)]
pub(crate) struct Pipe {
    pub(crate) input: Bytes,
    pub(crate) output: Bytes,
    /// Nothing comes behind the input.
    pub(crate) has_ended: bool,
}

/// Bytes that are added at one end and taken at the other.
#[derive(Debug, Default)]
pub(crate) struct Bytes {
    bytes: Vec<u8>,
    /// How many of them were taken.
    taken: usize,
}

impl Bytes {
    /// Whatever was taken makes room first, once it is half of all: else a stream in which something always waits would
    /// grow for ever. So each byte is moved once at most, on average.
    pub(crate) fn add(&mut self, bytes: &[u8]) {
        if self.taken > self.bytes.len() / 2 {
            self.bytes.drain(..self.taken);
            self.taken = 0;
        }
        self.bytes.extend_from_slice(bytes);
    }

    pub(crate) fn left(&self) -> &[u8] {
        &self.bytes[self.taken..]
    }

    pub(crate) fn take(&mut self, n: usize) {
        self.taken = (self.taken + n).min(self.bytes.len());
        if self.taken == self.bytes.len() {
            self.bytes.clear();
            self.taken = 0;
        }
    }

    /// Bytes of memory that it holds.
    #[cfg(test)]
    pub(crate) fn capacity(&self) -> usize {
        self.bytes.capacity()
    }

    /// Gives memory back that nothing is in.
    pub(crate) fn rest(&mut self) {
        if self.bytes.is_empty() {
            self.bytes = Vec::new();
        }
    }
}

/// Has a connection read and write by pipes.
pub(crate) fn prepare(connection: &mut Connection) -> Result<(), s2n_tls::error::Error> {
    connection.set_receive_callback(Some(receive))?.set_send_callback(Some(send))?;
    Ok(())
}

/// Does something with a connection that reads and writes by `pipe` meanwhile.
pub(crate) fn with<T>(
    connection: &mut Connection,
    pipe: &mut Pipe,
    act: impl FnOnce(&mut Connection) -> T,
) -> Result<T, s2n_tls::error::Error> {
    let context: *mut Pipe = pipe;
    // SAFETY: the contexts are used by `receive` and `send` alone, and these are called only while a method of the
    // connection runs; each of those that read or write is called within such an `act`, with a context set anew. While
    // it runs, `pipe` is borrowed here and used through this pointer alone.
    unsafe {
        connection.set_receive_context(context.cast())?.set_send_context(context.cast())?;
    }
    Ok(act(connection))
}

/// Gives ciphertext to `s2n-tls`; 0 at its end, -1 when there is none for now.
unsafe extern "C" fn receive(context: *mut c_void, into: *mut u8, len: u32) -> c_int {
    if context.is_null() || into.is_null() {
        return -1;
    }
    // SAFETY: `with` has set the context to a pipe that lives, and that nobody else uses, until it returns.
    let pipe = unsafe { &mut *context.cast::<Pipe>() };
    let left = pipe.input.left();
    if left.is_empty() && !pipe.has_ended {
        set_errno(Errno(libc::EAGAIN));
        return -1;
    }
    let n = left.len().min(len as usize).min(c_int::MAX as usize);
    // SAFETY: `s2n-tls` gives room for `len` bytes that is its own, so it is none of the pipe's. What is in it may be
    // anything, also nothing that was ever written: it is written here, and no reference to it is made.
    unsafe { into.copy_from_nonoverlapping(left.as_ptr(), n) };
    pipe.input.take(n);
    n as c_int
}

/// Takes ciphertext from `s2n-tls`, all of it.
unsafe extern "C" fn send(context: *mut c_void, from: *const u8, len: u32) -> c_int {
    if context.is_null() || from.is_null() || len > c_int::MAX as u32 {
        return -1;
    }
    // SAFETY: as above; `s2n-tls` gives `len` bytes to be read.
    let (pipe, from) =
        unsafe { (&mut *context.cast::<Pipe>(), slice::from_raw_parts(from, len as usize)) };
    pipe.output.add(from);
    len as c_int
}
