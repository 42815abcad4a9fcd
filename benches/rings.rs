//! What the data path costs without a kernel: writing requests into rxe's queues and reading
//! completions out of one.
//!
//! `cargo bench -p uverbs --features bench`

use divan::counter::ItemsCount;
use divan::{Bencher, black_box};
use uverbs::bench::{Completed, Recvs, Sends};
use uverbs::{Lkey, Recv, Remote, Rkey, SendWr, Sge};

const BATCH: u32 = 64;
const SLOTS: u32 = 2 * BATCH;
const COMPLETIONS: u32 = 1024;
const SGE: Sge = Sge { addr: 0x1000, length: 4096, lkey: Lkey(7) };

fn main() {
    divan::main();
}

fn sends(bencher: Bencher<'_, '_>, wr: SendWr<'_>) {
    let queue = Sends::new(SLOTS).expect("a queue in memory");
    bencher.counter(ItemsCount::new(BATCH)).bench(|| queue.write(black_box(&wr), BATCH));
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
    let remote = Remote { addr: 0x2000, rkey: Rkey(9) };
    sends(bencher, SendWr::write(remote, &[SGE]).id(1));
}

#[divan::bench]
fn write_receives(bencher: Bencher<'_, '_>) {
    let mut queue = Recvs::new(SLOTS).expect("a queue in memory");
    let recv = Recv { wr_id: 1, sges: &[SGE] };
    bencher.counter(ItemsCount::new(BATCH)).bench_local(|| queue.write(black_box(&recv), BATCH));
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
