//! The control path of rdma-core.

use crate::abi::{Context, Cq, Opaque, Pd, Qp};
use crate::cm::ByAddress;
use crate::endpoint;
use crate::verbs::{Made, Mlx5, Verbs};
use lab_bench::Failure;
use lab_bench::control::{Control, Thing};
use std::rc::Rc;
use std::sync::atomic::AtomicU64;

/// A device and the objects that others are made of.
pub(crate) struct Theirs {
    verbs: Rc<Verbs>,
    mlx5: Option<Mlx5>,
    context: Made<Context>,
    pd: Made<Pd>,
    td: Option<Made<Opaque>>,
    gid: (u8, [u8; 16]),
    by_address: Option<ByAddress>,
}

/// The objects of a connection, in the order in which they are destroyed.
pub(crate) struct Connected {
    qp: Made<Qp>,
    cq: Made<Cq>,
    pd: Made<Pd>,
    context: Made<Context>,
    verbs: Rc<Verbs>,
}

impl Control for Theirs {
    type Connected = Connected;

    fn list() -> Result<usize, Failure> {
        Ok(Verbs::load()?.devices()?.len())
    }

    fn first(device: &str) -> Result<(), Failure> {
        let verbs = Verbs::load()?;
        let context = verbs.open(device)?;
        let pd = verbs.alloc_pd(&context)?;
        verbs.dealloc_pd(pd)?;
        verbs.close(context)
    }

    fn first_by_address() -> Result<(), Failure> {
        ByAddress::first()
    }

    fn connect(&self, device: &str) -> Result<Connected, Failure> {
        let verbs = self.verbs.clone();
        let context = verbs.open(device)?;
        let pd = verbs.alloc_pd(&context)?;
        let cq = verbs.create_cq(&context, 16)?;
        let mut attr = endpoint::attr([cq.as_ptr(); 2], &endpoint::small(16));
        let qp = verbs.create_qp(&pd, &mut attr)?;
        verbs.query_port(&context)?;
        let index = self.gid.0;
        let gid = verbs.gid(&context, index).ok_or("the identifier has gone")?;
        endpoint::connect(&verbs, &qp, endpoint::qpn(&qp), (index, gid))?;
        Ok(Connected { qp, cq, pd, context, verbs })
    }

    fn close(connected: Connected) -> Result<(), Failure> {
        let Connected { qp, cq, pd, context, verbs } = connected;
        verbs.destroy_qp(qp)?;
        verbs.destroy_cq(cq)?;
        verbs.dealloc_pd(pd)?;
        verbs.close(context)
    }

    fn open(device: &str) -> Result<Self, Failure> {
        let verbs = Rc::new(Verbs::load()?);
        let context = verbs.open(device)?;
        let pd = verbs.alloc_pd(&context)?;
        let gid = verbs.ipv4_gid(&context)?;
        // Not every device has any.
        let td = verbs.alloc_td(&context).ok();
        let mlx5 = device.starts_with("mlx5").then(Mlx5::load).transpose()?;
        Ok(Theirs { verbs, mlx5, context, pd, td, gid, by_address: None })
    }

    fn region(&mut self, memory: &[AtomicU64]) -> Result<(), Failure> {
        let mr = self.verbs.reg_mr(&self.pd, memory)?;
        self.verbs.dereg_mr(mr)
    }

    fn thing(&mut self, thing: Thing) -> Result<(), Failure> {
        let Theirs { verbs, mlx5, context, pd, td, gid, by_address } = self;
        match thing {
            Thing::Domain => verbs.dealloc_pd(verbs.alloc_pd(context)?),
            Thing::ThreadDomain => verbs.dealloc_td(context, verbs.alloc_td(context)?),
            Thing::ParentDomain => {
                let td = td.as_ref().ok_or("no thread domains")?;
                verbs.dealloc_pd(verbs.alloc_parent_domain(context, pd, Some(td))?)
            }
            Thing::ByAddress => {
                let ends = match by_address {
                    Some(ends) => ends,
                    none => none.insert(ByAddress::open(verbs.clone())?),
                };
                let connected = ends.connect()?;
                ends.close(connected)
            }
            Thing::XrcDomain => verbs.close_xrcd(context, verbs.open_xrcd(context)?),
            Thing::Var => {
                let mlx5 = mlx5.as_ref().ok_or("not a device of mlx5")?;
                mlx5.free_var(mlx5.alloc_var(context)?);
                Ok(())
            }
            Thing::AddressHandle => verbs.destroy_ah(verbs.create_ah(pd, endpoint::path(*gid))?),
            Thing::Start | Thing::Connect | Thing::Region(_) => {
                Err(format!("{thing:?} is no thing to allocate").into())
            }
        }
    }
}
