//! XRC as futures: receives are awaited on shared receive queues that senders name.

use super::{connect_halves, context};
use crate::tasks::{both, run};
use crate::verdict::{Verdict, trials};
use tokio::task::LocalSet;
use uverbs::aio::{AsyncCompletionQueue, Locking};
use uverbs::owned::BufferPool;
use uverbs::{Context, ProtectionDomain, QpType, SendWr};

trials![messages_reach_a_queue_by_its_number, messages_reach_a_queue_of_one_thread];

/// An initiator, a target and two queues, all with futures on one completion queue.
async fn exchange<S: Locking>(
    context: &Context,
    cq: &AsyncCompletionQueue<S>,
    pd: &ProtectionDomain<S>,
) -> Verdict {
    let xrcd = context.xrcd_builder().build()?;
    let pool: BufferPool = pd.buffer_pool_builder(64).count(32).build()?;
    let target = xrcd.create_target()?;
    let initiator = pd.qp_builder(cq, cq, QpType::XRC_INI).max_send_wr(4).build()?;
    let initiator = cq.adopt(initiator)?;
    connect_halves(context, &initiator, &target)?;
    let builder = || pd.srq_builder(8).xrc(&xrcd, cq);
    let queues = [cq.adopt_srq(builder().build()?)?, cq.adopt_srq(builder().build()?)?];
    for (seed, srq) in (0..40u64).zip(queues.iter().cycle()) {
        let number = srq.number().expect("it is of an XRC domain");
        let received = srq.recv(pool.take().expect("a buffer"));
        let text = pool.copy(&seed.to_ne_bytes()).expect("a buffer");
        let sent = initiator.post(SendWr::send(&[]).to_srq(number), text);
        let receive = async {
            let received = received.await?;
            assert_eq!(received.memory[..], seed.to_ne_bytes());
            assert_eq!(received.outcome.qpn, target.qpn());
            Ok(())
        };
        both(receive, async { Ok(sent.await.map(drop)?) }).await?;
    }
    assert_eq!(cq.unmatched(), 0);
    drop((queues, initiator));
    assert_eq!((pool.idle(), context.leaked()), (32, 0));
    Ok(())
}

fn messages_reach_a_queue_by_its_number() -> Verdict {
    run(2, async {
        let context = context()?;
        let (cq, _) = context.cq_builder(128).spawn()?;
        exchange(&context, &cq, &context.alloc_pd()?).await
    })
}

fn messages_reach_a_queue_of_one_thread() -> Verdict {
    let on_one_thread = async {
        let context = context()?;
        let (pd, td) = (context.alloc_pd()?, context.alloc_td()?);
        let domain = pd.parent_domain_builder().thread_domain(&td).build()?;
        let (cq, _) = context.cq_builder(128).build_worker(td)?.spawn_local()?;
        exchange(&context, &cq, &domain).await
    };
    run(0, async { LocalSet::new().run_until(on_one_thread).await })
}
