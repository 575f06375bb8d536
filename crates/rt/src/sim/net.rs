//! The simulated network behind [`crate::net`].

use std::io::{self, IoSlice};
use std::net::SocketAddr;
use std::pin::Pin;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// A simulated listener. None can be made yet.
#[derive(Debug)]
pub(crate) enum SimListener {}

impl SimListener {
    pub(crate) async fn accept(&self) -> io::Result<(SimStream, SocketAddr)> {
        match *self {}
    }

    pub(crate) fn local_addr(&self) -> io::Result<SocketAddr> {
        match *self {}
    }
}

/// A simulated connection; may move between the cores of its node. None can be made yet.
#[derive(Debug)]
pub(crate) enum SimStream {}

impl SimStream {
    pub(crate) fn peer_addr(&self) -> io::Result<SocketAddr> {
        match *self {}
    }

    pub(crate) fn local_addr(&self) -> io::Result<SocketAddr> {
        match *self {}
    }
}

impl AsyncRead for SimStream {
    fn poll_read(
        self: Pin<&mut Self>,
        _cx: &mut Context<'_>,
        _buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        match *self {}
    }
}

impl AsyncWrite for SimStream {
    fn poll_write(
        self: Pin<&mut Self>,
        _cx: &mut Context<'_>,
        _buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        match *self {}
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        _cx: &mut Context<'_>,
        _bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        match *self {}
    }

    fn poll_flush(self: Pin<&mut Self>, _cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match *self {}
    }

    fn poll_shutdown(self: Pin<&mut Self>, _cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match *self {}
    }
}
