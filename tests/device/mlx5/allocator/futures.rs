//! Queues of futures in memory from the program's own allocator.

use super::Watched;
use crate::env;
use crate::pair::gid;
use crate::tasks::{both, run};
use crate::verdict::{Stop, Verdict, trials};
use std::sync::Arc;
use tokio::task::LocalSet;
use uverbs::{QpType, ResourceType};

trials![queues_come_from_the_allocator];

/// A completion queue by builder, queue pairs and a shared receive queue of futures, of any thread and of one.
fn queues_come_from_the_allocator() -> Verdict {
    let context = crate::mlx5::open()?;
    let allocator = Arc::new(Watched::default());
    let pd = context.alloc_pd()?;
    let domain = pd.parent_domain_builder().allocator(allocator.clone()).build()?;
    let td = context.alloc_td()?;
    let builder = pd.parent_domain_builder().allocator(allocator.clone());
    let exclusive = builder.thread_domain(&td).build()?;
    let asked = |kinds: &[ResourceType]| {
        let kinds_asked = allocator.log(|log| {
            let mut kinds: Vec<_> = log.asked.drain(..).map(|(kind, ..)| kind).collect();
            kinds.dedup();
            kinds
        });
        assert_eq!(kinds_asked, kinds);
    };
    let (cq, qp, srq) = (
        [ResourceType::MLX5_CQ, ResourceType::MLX5_DBR],
        [ResourceType::MLX5_QP, ResourceType::MLX5_DBR],
        [ResourceType::MLX5_SRQ, ResourceType::MLX5_DBR],
    );
    run(0, async {
        // An entry of 128 bytes, and the last interrupt.
        let described = |domain| {
            let vector = context.completion_vectors() - 1;
            context.cq_builder(64).vector(vector).cqe_size(128).parent_domain(domain)
        };
        let (shared, _) = described(&domain).spawn()?;
        asked(&cq);
        shared.control().moderate(4, 10)?;
        let of_any = domain.qp_builder(&shared, &shared, QpType::RC).max_recv_wr(8).build()?;
        let of_any = shared.adopt(of_any)?;
        asked(&qp);
        let shared_srq = shared.adopt_srq(domain.srq_builder(8).build()?)?;
        asked(&srq);
        let worker = context.cq_builder(64).cqe_size(128).parent_domain(&exclusive);
        let worker = worker.build_worker(td)?;
        asked(&cq);
        LocalSet::new()
            .run_until(async {
                let (local, _) = worker.spawn_local()?;
                let of_one = exclusive.qp_builder(&local, &local, QpType::RC).max_send_wr(8);
                let of_one = local.adopt(of_one.build()?)?;
                asked(&qp);
                let local_srq = local.adopt_srq(exclusive.srq_builder(8).build()?)?;
                asked(&srq);
                let index = gid(&context)?;
                let (here, there) = (of_any.endpoint(&index)?, of_one.endpoint(&index)?);
                env::handshake(&of_any, &there)?;
                env::handshake(&of_one, &here)?;
                let pool = domain.buffer_pool_builder(64).build()?;
                let texts = exclusive.buffer_pool_builder(64).build()?;
                let mut inbox = of_any.inbox(&pool, 4);
                for number in 0..50u64 {
                    let text = texts.copy(&number.to_ne_bytes()).expect("a buffer");
                    let receive = async {
                        assert_eq!(inbox.next().await?.memory[..], number.to_ne_bytes());
                        Ok(())
                    };
                    both(receive, async { Ok(of_one.send(text).await.map(drop)?) }).await?;
                }
                drop((of_one, local_srq));
                Ok::<_, Stop>(())
            })
            .await?;
        drop((of_any, shared_srq, shared));
        Ok(())
    })?;
    drop((domain, exclusive));
    assert_eq!(context.leaked(), 0);
    allocator.settle();
    Ok(())
}
