//! [`Inbox`], [`PostAll`], [`AsyncListener`], [`AsyncConnection`] and `Events` as streams of the `futures` crates, for
//! `StreamExt` and the like.

use super::cm::{AsyncConnection, AsyncListener};
use super::inbox::Inbox;
use super::locking::Locking;
use super::op::{OpError, Request};
use super::post_all::PostAll;
use crate::cm::{ConnectRequest, ConnectionEvent};
use crate::owned::{Buffer, Finished, Lend};
use futures_core::{FusedStream, Stream};
use std::pin::Pin;
use std::task::{Context, Poll};

/// Ends after the error that says why no more messages come.
impl<S: Locking> Stream for Inbox<S> {
    type Item = Result<Finished<Buffer>, OpError<Buffer>>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        if self.is_over() {
            return Poll::Ready(None);
        }
        Inbox::poll_next(&mut self, cx).map(Some)
    }
}

impl<S: Locking> FusedStream for Inbox<S> {
    fn is_terminated(&self) -> bool {
        self.is_over()
    }
}

/// The ends of the requests, in their order. It ends after the last one, and goes on after
/// [`extend`](Extend::extend).
impl<L: Lend, S: Locking, R: Request> Stream for PostAll<L, S, R> {
    type Item = Result<Finished<L>, OpError<L>>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        PostAll::poll_next(&mut self, cx)
    }
}

/// Ends after the first error, for example when the driver has ended.
impl Stream for AsyncListener {
    type Item = crate::Result<ConnectRequest>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        if self.is_over {
            return Poll::Ready(None);
        }
        let request = AsyncListener::poll_next(&self, cx);
        self.is_over = matches!(request, Poll::Ready(Err(_)));
        request.map(Some)
    }
}

impl FusedStream for AsyncListener {
    fn is_terminated(&self) -> bool {
        self.is_over
    }
}

/// Ends after the event that ends the connection ([`closed_by`](crate::cm::Connection::closed_by)), whichever task
/// takes it, and after an error.
impl Stream for AsyncConnection {
    type Item = crate::Result<ConnectionEvent>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        if self.is_terminated() {
            return Poll::Ready(None);
        }
        let event = self.poll_event(cx);
        self.is_over = matches!(event, Poll::Ready(Err(_)));
        match event {
            // Another task took the event before this one was listed.
            Poll::Pending if self.is_closed() => Poll::Ready(None),
            event => event.map(Some),
        }
    }
}

impl FusedStream for AsyncConnection {
    fn is_terminated(&self) -> bool {
        self.is_over || self.is_closed()
    }
}

#[cfg(feature = "tokio")]
mod events {
    use super::*;
    use crate::aio::tokio::Events;
    use crate::error::Result;
    use crate::events::async_event::AsyncEvent;

    /// Ends after the first error, for example `EIO` of a device that is gone.
    impl Stream for Events {
        type Item = Result<AsyncEvent>;

        fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
            if self.is_over() {
                return Poll::Ready(None);
            }
            Events::poll_next(&mut self, cx).map(Some)
        }
    }

    impl FusedStream for Events {
        fn is_terminated(&self) -> bool {
            self.is_over()
        }
    }
}
