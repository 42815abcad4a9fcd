//! Domains that only have a number: protection, XRC and transport domains.
//!
//! Commands that allocate and free domains.

use uverbs_uapi::mlx5::prm::object::{
    alloc_pd_out, alloc_transport_domain_out, alloc_xrcd_out, dealloc_pd_in,
    dealloc_transport_domain_in, dealloc_xrcd_in,
};
use uverbs_uapi::mlx5::prm::{Bits, Layout};

use crate::command_error::CommandError;
use crate::device::Device;
use crate::object::domain::Domain;

macro_rules! domain {
    ($alloc:ident, $dealloc:ident, $table:ident, $out:ident.$out_field:ident, $in:ident) => {
        pub(crate) fn $alloc(device: &mut Device, uid: u32) -> Result<Vec<u8>, CommandError> {
            let number = device.objects.$table.insert_owned(uid, Domain)?;
            let mut out = Bits::<$out, _>::new(vec![0; $out::SIZE]);
            out.set($out::$out_field, number.into());
            Ok(out.into_inner())
        }

        pub(crate) fn $dealloc(
            device: &mut Device,
            uid: u32,
            input: &[u8],
        ) -> Result<Vec<u8>, CommandError> {
            let number = Bits::<$in, _>::new(input).get32($in::$out_field);
            device.objects.$table.owned_mut(uid, number)?;
            device.objects.$table.remove(number)?;
            Ok(vec![])
        }
    };
}

domain!(alloc_pd, dealloc_pd, pds, alloc_pd_out.pd, dealloc_pd_in);
domain!(alloc_xrcd, dealloc_xrcd, xrcds, alloc_xrcd_out.xrcd, dealloc_xrcd_in);
domain!(
    alloc_transport_domain,
    dealloc_transport_domain,
    transport_domains,
    alloc_transport_domain_out.transport_domain,
    dealloc_transport_domain_in
);
