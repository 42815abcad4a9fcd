//! What a device can do. Pairs with `ib_uverbs_ex_query_device` in `core/uverbs_cmd.c`.
use uverbs_uapi::device::ib_uverbs_ex_query_device_resp;

/// Limits and capabilities of a device.
#[doc(alias = "ibv_device_attr")]
#[doc(alias = "ibv_device_attr_ex")]
#[derive(Clone, Debug)]
pub struct DeviceAttr {
    raw: ib_uverbs_ex_query_device_resp,
}

impl DeviceAttr {
    pub(crate) fn new(raw: ib_uverbs_ex_query_device_resp) -> Self {
        DeviceAttr { raw }
    }
}
