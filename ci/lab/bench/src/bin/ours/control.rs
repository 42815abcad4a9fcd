//! The control path of this workspace's library.

use crate::cm::ByAddress;
use lab_bench::Failure;
use lab_bench::control::{Control, Thing};
use std::sync::atomic::AtomicU64;
use uverbs::mlx5::{Var, VarKind};
use uverbs::{
    Access, AddressVector, CompletionQueue, Context, Device, GidEntry, Handshake, ProtectionDomain,
    QpType, QueuePair, ThreadDomain, devices,
};

/// A device and the objects that others are made of.
pub(crate) struct Ours {
    context: Context,
    pd: ProtectionDomain,
    td: Option<ThreadDomain>,
    path: AddressVector,
    gid: GidEntry,
    by_address: Option<ByAddress>,
}

fn open(device: &str) -> Result<Context, Failure> {
    let found = devices()?.into_iter().find(|known| known.name() == device);
    let device: Device = found.ok_or_else(|| format!("there is no device {device}"))?;
    Ok(Context::open(&device)?)
}

impl Control for Ours {
    type Connected = (QueuePair, CompletionQueue);

    fn list() -> Result<usize, Failure> {
        Ok(devices()?.len())
    }

    fn first(device: &str) -> Result<(), Failure> {
        open(device)?.alloc_pd()?;
        Ok(())
    }

    fn first_by_address() -> Result<(), Failure> {
        ByAddress::first()
    }

    fn connect(&self, device: &str) -> Result<Self::Connected, Failure> {
        let context = open(device)?;
        let pd = context.alloc_pd()?;
        let cq = context.cq_builder(16).build()?;
        let qp = pd.qp_builder(&cq, &cq, QpType::RC).max_send_wr(16).max_recv_wr(16).build()?;
        let itself = qp.endpoint(&self.gid)?;
        qp.handshake(&itself, &Handshake::new())?;
        Ok((qp, cq))
    }

    fn close((qp, cq): Self::Connected) -> Result<(), Failure> {
        qp.destroy()?;
        cq.destroy()?;
        Ok(())
    }

    fn open(device: &str) -> Result<Self, Failure> {
        let context = open(device)?;
        let pd = context.alloc_pd()?;
        let gid = context.default_gid(1)?;
        // Not every device has any.
        let td = context.alloc_td().ok();
        let path = AddressVector::global(1, gid.index, gid.gid);
        Ok(Ours { context, pd, td, path, gid, by_address: None })
    }

    fn region(&mut self, memory: &[AtomicU64]) -> Result<(), Failure> {
        let start = memory.as_ptr().cast_mut().cast::<u8>();
        let length = size_of_val(memory);
        // SAFETY: the memory outlives the region, which ends here, and is atomics to everybody.
        let region =
            unsafe { self.pd.mr_builder().access(Access::ALL_REMOTE).register_raw(start, length) }?;
        region.destroy()?;
        Ok(())
    }

    fn thing(&mut self, thing: Thing) -> Result<(), Failure> {
        let Ours { context, pd, td, path, by_address, .. } = self;
        match thing {
            Thing::Domain => context.alloc_pd()?.destroy()?,
            Thing::ThreadDomain => context.alloc_td()?.destroy()?,
            Thing::ParentDomain => {
                let td = td.as_ref().ok_or("no thread domains")?;
                let parent = pd.parent_domain_builder().thread_domain(td).build()?;
                parent.destroy()?;
            }
            Thing::Var => drop(Var::alloc(context, VarKind::Virtio)?),
            Thing::AddressHandle => pd.create_ah(path)?.destroy()?,
            Thing::ByAddress => {
                let ends = match by_address {
                    Some(ends) => ends,
                    none => none.insert(ByAddress::open()?),
                };
                ends.connect()?.close()?;
            }
            Thing::XrcDomain => context.xrcd_builder().build()?.destroy()?,
            Thing::Start | Thing::Connect | Thing::Region(_) => {
                return Err(format!("{thing:?} is no thing to allocate").into());
            }
        }
        Ok(())
    }
}
