//! Flow actions: IPsec transformations. `rdma/ib_user_ioctl_cmds.h`, `rdma/ib_user_ioctl_verbs.h`.

use crate::enumeration::ids;
use crate::layout::layouts;

layouts! {
    const LAYOUTS = "rdma/ib_user_ioctl_verbs.h";

    /// Key material for AES-GCM.
    struct ib_uverbs_flow_action_esp_keymat_aes_gcm[56] {
        iv: u64 = 0,
        iv_algo: u32 = 8,
        salt: u32 = 12,
        icv_len: u32 = 16,
        key_len: u32 = 20,
        aes_key: [u32; 8] = 24,
    }

    /// Replay window kept as a bitmap.
    struct ib_uverbs_flow_action_esp_replay_bmp[4] {
        size: u32 = 0,
    }

    /// One layer of encapsulation; the pointers are addresses of this process.
    struct ib_uverbs_flow_action_esp_encap[24] {
        val_ptr: u64 = 0,
        next_ptr: u64 = 8,
        len: u16 = 16,
        r#type: u16 = 18,
        padding: [u8; 4] = 20,
    }

    /// Attributes of an ESP action.
    struct ib_uverbs_flow_action_esp[24] {
        spi: u32 = 0,
        seq: u32 = 4,
        tfc_pad: u32 = 8,
        flags: u32 = 12,
        hard_limit_pkts: u64 = 16,
    }
}

ids! {
    const IDS = "rdma/ib_user_ioctl_cmds.h";

    enum uverbs_methods_actions_flow_action_ops: u16 {
        UVERBS_METHOD_FLOW_ACTION_ESP_CREATE = 0,
        UVERBS_METHOD_FLOW_ACTION_DESTROY = 1,
        UVERBS_METHOD_FLOW_ACTION_ESP_MODIFY = 2,
    }

    enum uverbs_attrs_create_flow_action_esp: u16 {
        UVERBS_ATTR_CREATE_FLOW_ACTION_ESP_HANDLE = 0,
        UVERBS_ATTR_FLOW_ACTION_ESP_ATTRS = 1,
        UVERBS_ATTR_FLOW_ACTION_ESP_ESN = 2,
        UVERBS_ATTR_FLOW_ACTION_ESP_KEYMAT = 3,
        UVERBS_ATTR_FLOW_ACTION_ESP_REPLAY = 4,
        UVERBS_ATTR_FLOW_ACTION_ESP_ENCAP = 5,
    }

    enum uverbs_attrs_modify_flow_action_esp: u16 {
        UVERBS_ATTR_MODIFY_FLOW_ACTION_ESP_HANDLE = 0,
    }

    enum uverbs_attrs_destroy_flow_action_esp: u16 {
        UVERBS_ATTR_DESTROY_FLOW_ACTION_HANDLE = 0,
    }
}

ids! {
    const ESP = "rdma/ib_user_ioctl_verbs.h";

    enum ib_uverbs_flow_action_esp_keymat: u32 {
        IB_UVERBS_FLOW_ACTION_ESP_KEYMAT_AES_GCM = 0,
    }

    enum ib_uverbs_flow_action_esp_keymat_aes_gcm_iv_algo: u32 {
        IB_UVERBS_FLOW_ACTION_IV_ALGO_SEQ = 0,
    }

    enum ib_uverbs_flow_action_esp_replay: u32 {
        IB_UVERBS_FLOW_ACTION_ESP_REPLAY_NONE = 0,
        IB_UVERBS_FLOW_ACTION_ESP_REPLAY_BMP = 1,
    }

    enum ib_uverbs_flow_action_esp_flags: u32 {
        IB_UVERBS_FLOW_ACTION_ESP_FLAGS_INLINE_CRYPTO = 0,
        IB_UVERBS_FLOW_ACTION_ESP_FLAGS_FULL_OFFLOAD = 1,
        IB_UVERBS_FLOW_ACTION_ESP_FLAGS_TUNNEL = 0,
        IB_UVERBS_FLOW_ACTION_ESP_FLAGS_TRANSPORT = 2,
        IB_UVERBS_FLOW_ACTION_ESP_FLAGS_DECRYPT = 0,
        IB_UVERBS_FLOW_ACTION_ESP_FLAGS_ENCRYPT = 4,
        IB_UVERBS_FLOW_ACTION_ESP_FLAGS_ESN_NEW_WINDOW = 8,
    }
}
