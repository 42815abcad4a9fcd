//! Times it takes to write requests and to read completions.

use crate::{Lkey, RecvWr, Remote, Rkey, SendWr, Sge};
use divan::counter::ItemsCount;
use divan::{Bencher, black_box};

const BATCH: u32 = 64;
const SLOTS: u32 = 2 * BATCH;
const COMPLETIONS: u32 = 1024;
const SGE: Sge = Sge { addr: 0x1000, length: 4096, lkey: Lkey(7) };
const REMOTE: Remote = Remote { addr: 0x2000, rkey: Rkey(9) };

#[test]
#[ignore = "a benchmark: cargo test --release --lib -- --ignored --nocapture bench::rings::times"]
fn times() {
    divan::Divan::default().run_benches();
}

mod rxe {
    use super::*;
    use crate::bench::rxe::{Completed, Recvs, Sends};

    fn sends(bencher: Bencher<'_, '_>, wr: SendWr<'_>) {
        let mut queue = Sends::new(SLOTS).expect("a queue in memory");
        bencher.counter(ItemsCount::new(BATCH)).bench_local(|| queue.write(black_box(&wr), BATCH));
    }

    #[divan::bench]
    fn write_sends(bencher: Bencher<'_, '_>) {
        sends(bencher, SendWr::send(&[SGE]).id(1).signaled());
    }

    #[divan::bench]
    fn write_inline_sends(bencher: Bencher<'_, '_>) {
        sends(bencher, SendWr::send(&[]).id(1).inline(&[0x5a; 64]));
    }

    #[divan::bench]
    fn write_rdma_writes(bencher: Bencher<'_, '_>) {
        sends(bencher, SendWr::write(REMOTE, &[SGE]).id(1));
    }

    #[divan::bench]
    fn write_receives(bencher: Bencher<'_, '_>) {
        let mut queue = Recvs::new(SLOTS).expect("a queue in memory");
        let recv = RecvWr::new(&[SGE]).id(1);
        bencher
            .counter(ItemsCount::new(BATCH))
            .bench_local(|| queue.write(black_box(&recv), BATCH));
    }

    // One round per sample: all inputs of a sample are made before its first round.
    #[divan::bench(sample_size = 1)]
    fn read_completions(bencher: Bencher<'_, '_>) {
        let queue =
            std::cell::RefCell::new(Completed::new(2 * COMPLETIONS).expect("a queue in memory"));
        bencher
            .counter(ItemsCount::new(COMPLETIONS))
            .with_inputs(|| queue.borrow_mut().fill(COMPLETIONS).expect("room in the queue"))
            .bench_local_values(|()| {
                let mut sum = 0;
                queue.borrow_mut().drain(|completion| {
                    sum += completion.wr_id() + u64::from(completion.is_success());
                });
                sum
            });
    }
}

mod mlx5 {
    use super::*;
    use crate::bench::mlx5::{Completed, Recvs, Sends};

    /// Posts the same request again and again, `count` at once.
    fn sends(bencher: Bencher<'_, '_>, blueflame: bool, count: u32, wr: SendWr<'_>) {
        let mut queue = Sends::new(SLOTS, blueflame).expect("a queue in memory");
        bencher.counter(ItemsCount::new(count)).bench_local(|| queue.post(count, || black_box(wr)));
    }

    #[divan::bench(args = [1, 32])]
    fn write_by_doorbell(bencher: Bencher<'_, '_>, count: u32) {
        sends(bencher, false, count, SendWr::write(REMOTE, &[SGE]).id(1));
    }

    #[divan::bench]
    fn write_by_blueflame(bencher: Bencher<'_, '_>) {
        sends(bencher, true, 1, SendWr::write(REMOTE, &[SGE]).id(1));
    }

    #[divan::bench(args = [32, 200])]
    fn inline_by_blueflame(bencher: Bencher<'_, '_>, bytes: usize) {
        sends(bencher, true, 1, SendWr::send(&[]).id(1).inline(&[0x5a; 200][..bytes]));
    }

    #[divan::bench]
    fn gather_four(bencher: Bencher<'_, '_>) {
        sends(bencher, false, 1, SendWr::send(&[SGE; 4]).id(1));
    }

    #[divan::bench(args = [1, 32])]
    fn receives(bencher: Bencher<'_, '_>, count: u32) {
        let mut queue = Recvs::new(SLOTS).expect("a queue in memory");
        let recv = RecvWr::new(&[SGE]).id(1);
        bencher
            .counter(ItemsCount::new(count))
            .bench_local(|| queue.post(count, || black_box(recv)));
    }

    #[divan::bench]
    fn poll_empty(bencher: Bencher<'_, '_>) {
        let mut queue = Completed::new(COMPLETIONS).expect("a queue in memory");
        bencher.bench_local(|| {
            queue.poll(1, |completion| {
                black_box(completion);
            })
        });
    }

    // One round per sample: all inputs of a sample are made before its first round.
    #[divan::bench(sample_size = 1)]
    fn poll_completions(bencher: Bencher<'_, '_>) {
        let queue =
            std::cell::RefCell::new(Completed::new(COMPLETIONS).expect("a queue in memory"));
        bencher
            .counter(ItemsCount::new(COMPLETIONS))
            .with_inputs(|| queue.borrow_mut().fill(COMPLETIONS).expect("room in the queue"))
            .bench_local_values(|()| {
                let mut sum = 0;
                queue.borrow_mut().poll(COMPLETIONS, |completion| {
                    sum += completion.wr_id() + u64::from(completion.is_success());
                });
                sum
            });
    }
}
