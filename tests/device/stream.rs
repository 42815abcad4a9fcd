//! Messages as a stream of the `futures` crates, through nothing but that trait.

use crate::tasks::{Half, pair, run};
use crate::verdict::{Verdict, trials};
use futures_core::{FusedStream, Stream};
use std::future::poll_fn;
use std::pin::Pin;
use uverbs::WcStatus;
use uverbs::aio::OpErrorKind;

trials![messages_come_in_order_and_end];

async fn next<S: Stream + Unpin>(stream: &mut S) -> Option<S::Item> {
    poll_fn(|cx| Pin::new(&mut *stream).poll_next(cx)).await
}

fn messages_come_in_order_and_end() -> Verdict {
    crate::env::rnr_wait()?;
    run(0, async {
        const MESSAGES: u32 = 40;
        let (a, b) = pair()?;
        let mut inbox = b.qp.inbox(&b.pool, 8);
        inbox.fill();
        let Half { qp, .. } = &a;
        let sender = tokio::spawn({
            let qp = qp.clone();
            async move {
                for n in 0..MESSAGES {
                    drop(qp.send_inline(&n.to_ne_bytes()).await);
                }
            }
        });
        for n in 0..MESSAGES {
            let message = next(&mut inbox).await.expect("a message")?;
            assert_eq!(message.memory[..], n.to_ne_bytes());
        }
        sender.await?;
        assert!(!inbox.is_terminated());
        b.qp.abort()?;
        // The stream reports the error once, and then ends.
        let end = next(&mut inbox).await.expect("an end").expect_err("nothing was sent");
        assert_eq!(end.kind, OpErrorKind::Status(WcStatus::WR_FLUSH_ERR));
        assert!(inbox.is_terminated());
        assert!(next(&mut inbox).await.is_none());
        Ok(())
    })
}
