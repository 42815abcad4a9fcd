//! [`Inbox`], [`AsyncListener`] and `Events` as streams of the `futures` crates, for `StreamExt` and the like.

use super::cm::AsyncListener;
use super::inbox::{Inbox, Message};
use super::locking::Locking;
use super::op::OpError;
use crate::cm::ConnectRequest;
use crate::owned::Buffer;
use futures_core::{FusedStream, Stream};
use std::pin::Pin;
use std::task::{Context, Poll};

/// Ends after the error that says why no more messages come.
impl<S: Locking> Stream for Inbox<S> {
    type Item = Result<Message, OpError<Buffer>>;

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

/// Ends after the first error, for example when the driver has ended.
impl Stream for AsyncListener {
    type Item = crate::Result<ConnectRequest>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        if self.is_over() {
            return Poll::Ready(None);
        }
        AsyncListener::poll_next(&mut self, cx).map(Some)
    }
}

impl FusedStream for AsyncListener {
    fn is_terminated(&self) -> bool {
        self.is_over()
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
