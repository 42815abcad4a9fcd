//! Memberships in multicast groups, as the kernel counts them. The tests of datagrams test the
//! delivery to members.

use crate::capability::Capability;
use crate::leaks::rounds;
use crate::pair::{Config, Pair, Side};
use crate::verdict::{Verdict, supported, trials};
use std::net::{Ipv4Addr, Ipv6Addr};
use uverbs::{Errno, Gid, McastMembership, ObjectKind, QpType};

trials![
    second_attachment_is_refused,
    memberships_of_one_group_end_separately,
    memberships_outlive_the_dropped_queue_pair,
    member_beyond_the_limit_is_refused,
    memberships_leave_nothing,
];

/// On InfiniBand groups have local identifiers as well.
const LID: u16 = 0xc001;

fn attach(side: &Side, gid: Gid) -> Verdict<McastMembership> {
    supported(side.qp.attach_mcast(gid, LID), Capability::Multicast)
}

fn groups() -> [Gid; 3] {
    let v6: Ipv6Addr = Ipv6Addr::new(0xff12, 0, 0, 0, 0, 0, 0, 0x4711);
    [Gid::from(Ipv4Addr::new(239, 9, 9, 1)), Gid::from(Ipv4Addr::new(239, 9, 9, 2)), Gid::from(v6)]
}

fn second_attachment_is_refused() -> Verdict {
    let pair = Pair::new(Config::ud())?;
    for gid in groups() {
        let membership = attach(&pair.a, gid)?;
        assert_eq!((membership.gid(), membership.lid()), (gid, LID));
        let error = pair.a.qp.attach_mcast(gid, LID).unwrap_err();
        assert_eq!(error.errno(), Errno::EXIST);
        membership.detach()?;
        // The kernel has removed it, too, or it would refuse this attachment.
        attach(&pair.a, gid)?.detach()?;
    }
    Ok(())
}

fn memberships_of_one_group_end_separately() -> Verdict {
    let Pair { a, b, .. } = Pair::new(Config::ud())?;
    let gid = groups()[0];
    let (one, other) = (attach(&a, gid)?, attach(&b, gid)?);
    one.detach()?;
    a.qp.destroy()?;
    let (qp, error) = b.qp.destroy().unwrap_err().into_parts();
    assert_eq!(error.errno(), Errno::BUSY);
    drop(other);
    qp.destroy()?;
    Ok(())
}

fn memberships_outlive_the_dropped_queue_pair() -> Verdict {
    let Pair { a, .. } = Pair::new(Config::ud())?;
    let memberships = groups().map(|gid| attach(&a, gid));
    drop(a.qp);
    let context = a.context;
    drop(memberships);
    assert_eq!(context.leaked(), 0);
    Ok(())
}

fn member_beyond_the_limit_is_refused() -> Verdict {
    let pair = Pair::new(Config::ud())?;
    let Side { pd, cq, context, .. } = &pair.a;
    let limit = context.query_device()?.max_mcast_qp_attach;
    if limit == 0 || limit > 256 {
        // Too many to try.
        return Ok(());
    }
    let gid = groups()[1];
    let mut members = Vec::new();
    for _ in 0..limit {
        let qp = pd.qp_builder(cq, cq, uverbs::QpType::UD).build()?;
        members.push(supported(qp.attach_mcast(gid, LID), Capability::Multicast)?);
    }
    let error = pair.a.qp.attach_mcast(gid, LID).unwrap_err();
    assert_eq!(error.errno(), Errno::NOMEM, "{error}");
    assert!(error.message().contains("groups or members"), "{error}");
    drop(members);
    attach(&pair.a, gid)?.detach()?;
    Ok(())
}

fn memberships_leave_nothing() -> Verdict {
    rounds(&[ObjectKind::QP], |context| {
        let pd = context.alloc_pd()?;
        let cq = context.cq_builder(4).build()?;
        let qp = pd.qp_builder(&cq, &cq, QpType::UD).build()?;
        let mut groups = groups().into_iter().cycle();
        Ok(Box::new(move || {
            let gid = groups.next().expect("it has no end");
            let membership = supported(qp.attach_mcast(gid, LID), Capability::Multicast)?;
            membership.detach()?;
            Ok(())
        }))
    })
}
