//! The limits that the device advertises: it grants them, and refuses one more.

use crate::capability::Capability;
use crate::env;
use crate::pair::{Config, Pair};
use crate::verdict::{Verdict, require, supported, trials};
use uverbs::{Errno, QpType, SendWr, WcOpcode};

trials![
    no_advertised_limit_is_zero,
    cq_holds_cqes_up_to_the_limit,
    cq_resize_works_up_to_the_limit,
    qp_holds_wqes_up_to_the_limit,
    qp_holds_sges_up_to_the_limit,
    srq_holds_wqes_up_to_the_limit,
    srq_holds_sges_up_to_the_limit,
    qp_takes_inline_data_up_to_the_limit,
    longest_inline_wqes_arrive_whole,
    srq_resize_works_up_to_the_limit,
];

/// The number of completions that soft-RoCE supports.
const MANY: u32 = 32767;

fn no_advertised_limit_is_zero() -> Verdict {
    let context = env::open()?;
    let attr = context.query_device()?;
    for (name, value) in [
        ("max_qp", attr.max_qp),
        ("max_qp_wr", attr.max_qp_wr),
        ("max_sge", attr.max_sge),
        ("max_cq", attr.max_cq),
        ("max_cqe", attr.max_cqe),
        ("max_mr", attr.max_mr),
        ("max_pd", attr.max_pd),
    ] {
        assert!(value > 0, "{name} is 0: {attr:?}");
    }
    assert!(attr.max_mr_size > 0 && attr.page_size_cap > 0, "{attr:?}");
    assert_eq!(attr.phys_port_cnt, context.device().port_count());
    Ok(())
}

fn cq_holds_cqes_up_to_the_limit() -> Verdict {
    let context = env::open()?;
    let max = context.query_device()?.max_cqe;
    // The advertised number needs more memory than a small machine has; a good part of it.
    let many = max.min(MANY);
    let cq = context.cq_builder(many).build()?;
    assert!(cq.capacity() >= many);
    drop(cq);
    for cqe in [max + 1, u32::MAX] {
        let error = context.cq_builder(cqe).build().unwrap_err();
        assert_eq!(error.errno(), Errno::INVAL);
        assert!(error.message().contains(&cqe.to_string()), "{error}");
    }
    Ok(())
}

fn cq_resize_works_up_to_the_limit() -> Verdict {
    let context = env::open()?;
    let max = context.query_device()?.max_cqe;
    let mut cq = context.cq_builder(10).build()?;
    let before = cq.capacity();
    assert_eq!(cq.resize(max + 1).unwrap_err().errno(), Errno::INVAL);
    assert_eq!(cq.capacity(), before);
    let many = max.min(MANY);
    cq.resize(many)?;
    assert!(cq.capacity() >= many);
    Ok(())
}

fn qp_holds_wqes_up_to_the_limit() -> Verdict {
    let context = env::open()?;
    let (pd, cq) = (context.alloc_pd()?, context.cq_builder(1).build()?);
    let max = context.query_device()?.max_qp_wr;
    for beyond in [max + 1, u32::MAX] {
        let builder = || pd.qp_builder(&cq, &cq, QpType::RC);
        for made in [builder().max_send_wr(beyond).build(), builder().max_recv_wr(beyond).build()] {
            match made {
                Err(error) => {
                    assert!(matches!(error.errno(), Errno::INVAL | Errno::NOMEM), "{error:?}");
                    assert!(error.message().contains(&beyond.to_string()), "{error}");
                }
                // The advertised limit holds for WQEs of any size; of small ones more fit.
                Ok(qp) => {
                    let caps = qp.caps();
                    assert!(caps.max_send_wr.max(caps.max_recv_wr) >= beyond, "{caps:?}");
                    assert!(mlx5(&context) && beyond == max + 1, "{caps:?}");
                }
            }
        }
    }
    // The advertised number needs more memory than a small machine has; a good part of it.
    let many = max.min(4096);
    let qp = pd.qp_builder(&cq, &cq, QpType::RC).max_send_wr(many).max_recv_wr(many).build()?;
    assert!(qp.caps().max_send_wr >= many && qp.caps().max_recv_wr >= many, "{:?}", qp.caps());
    Ok(())
}

fn qp_holds_sges_up_to_the_limit() -> Verdict {
    let context = env::open()?;
    let (pd, cq) = (context.alloc_pd()?, context.cq_builder(1).build()?);
    let max = context.query_device()?.max_sge;
    let builder = || pd.qp_builder(&cq, &cq, QpType::RC);
    for beyond in [max + 1, u32::MAX] {
        for made in [builder().max_send_sge(beyond).build(), builder().max_recv_sge(beyond).build()]
        {
            match made {
                Err(error) => {
                    assert_eq!(error.errno(), Errno::INVAL);
                    assert!(error.message().contains(&beyond.to_string()), "{error}");
                }
                // The advertised limit holds for all queues of all types; some take more.
                Ok(qp) => {
                    let caps = qp.caps();
                    assert!(caps.max_send_sge.max(caps.max_recv_sge) >= beyond, "{caps:?}");
                    assert!(mlx5(&context) && beyond == max + 1, "{caps:?}");
                }
            }
        }
    }
    let qp = pd.qp_builder(&cq, &cq, QpType::RC).max_send_sge(max).max_recv_sge(max).build()?;
    assert!(qp.caps().max_send_sge >= max && qp.caps().max_recv_sge >= max);
    Ok(())
}

fn qp_takes_inline_data_up_to_the_limit() -> Verdict {
    let context = env::open()?;
    let (pd, cq) = (context.alloc_pd()?, context.cq_builder(1).build()?);
    for beyond in [100_000, u32::MAX] {
        let build = pd.qp_builder(&cq, &cq, QpType::RC).max_inline_data(beyond).build();
        assert_eq!(build.unwrap_err().errno(), Errno::INVAL, "{beyond} bytes inline");
    }
    Ok(())
}

/// With the most inline data that any queue of its type has room for, and with a little less.
fn longest_inline_wqes_arrive_whole() -> Verdict {
    /// The global route header of a datagram.
    const HEADER: usize = 40;
    let context = env::open()?;
    let (pd, cq) = (context.alloc_pd()?, context.cq_builder(1).build()?);
    for config in [Config::rc(), Config::uc(), Config::ud()] {
        let takes = |inline| {
            let builder = pd.qp_builder(&cq, &cq, config.qp_type);
            builder.max_send_sge(config.sges).max_inline_data(inline).build().is_ok()
        };
        let (mut inline, mut beyond) = (config.inline, 100_000);
        while beyond - inline > 1 {
            let middle = inline.midpoint(beyond);
            if takes(middle) { inline = middle } else { beyond = middle }
        }
        let mut pair = Pair::new(Config { inline, ..config })?;
        let longest = pair.a.qp.caps().max_inline_data as usize;
        assert_eq!(longest, inline as usize, "there is room for more than may be asked for");
        for length in longest - 33..=longest {
            let bytes = crate::pattern::bytes(length as u64, length);
            let behind = HEADER + length;
            pair.b.poison(0..behind);
            pair.b.recv(1, 0..behind)?;
            let path = pair.path()?;
            let (wr, opcode, arrived, at) = match config.qp_type {
                QpType::UD => (SendWr::send(&[]), WcOpcode::SEND, WcOpcode::RECV, HEADER),
                // The remote address makes the WQE longer than that of a send.
                _ => {
                    let write = SendWr::write_imm(pair.b.remote(0), &[], 7);
                    (write, WcOpcode::WRITE, WcOpcode::RECV_WRITE_IMM, 0)
                }
            };
            pair.a.send(path.to(wr.inline(&bytes).id(2).signaled()))?;
            pair.a.expect(2, opcode)?;
            pair.b.expect(1, arrived)?;
            pair.b.check(at..at + length, length as u64);
        }
    }
    Ok(())
}

fn srq_holds_wqes_up_to_the_limit() -> Verdict {
    let context = env::open()?;
    let attr = context.query_device()?;
    require(attr.max_srq > 0, Capability::Srq, "max_srq is 0")?;
    let pd = context.alloc_pd()?;
    for beyond in [attr.max_srq_wr + 1, u32::MAX] {
        let error = pd.srq_builder(beyond).build().unwrap_err();
        assert_eq!(error.errno(), Errno::INVAL);
        assert!(error.message().contains(&beyond.to_string()), "{error}");
    }
    let many = attr.max_srq_wr.min(4096);
    assert!(pd.srq_builder(many).build()?.query()?.max_wr >= many);
    Ok(())
}

fn srq_holds_sges_up_to_the_limit() -> Verdict {
    let context = env::open()?;
    let attr = context.query_device()?;
    require(attr.max_srq > 0, Capability::Srq, "max_srq is 0")?;
    let pd = context.alloc_pd()?;
    let max = attr.max_srq_sge;
    assert!(pd.srq_builder(1).max_sge(max).build()?.query()?.max_sge >= max);
    let error = pd.srq_builder(1).max_sge(max + 1).build().unwrap_err();
    assert_eq!(error.errno(), Errno::INVAL);
    Ok(())
}

fn srq_resize_works_up_to_the_limit() -> Verdict {
    let context = env::open()?;
    let attr = context.query_device()?;
    require(attr.max_srq > 0, Capability::Srq, "max_srq is 0")?;
    let mut srq = context.alloc_pd()?.srq_builder(10).build()?;
    let before = srq.query()?;
    supported(srq.resize(10), Capability::SrqResize)?;
    assert_eq!(srq.resize(attr.max_srq_wr + 1).unwrap_err().errno(), Errno::INVAL);
    assert_eq!(srq.query()?, before);
    Ok(())
}

/// Whether the device's queues are sized by this library.
fn mlx5(context: &uverbs::Context) -> bool {
    context.device().driver() == Some(uverbs::device::DriverId::MLX5)
}
