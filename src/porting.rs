//! For programs that were written to libibverbs: the name of each verb here, and the differences beside the names.
//!
//! The documentation's search knows each function of C in these tables: `ibv_post_send` finds
//! [`send_batch`](crate::QueuePair::send_batch).
//!
//! # From the C verb to ours
//!
//! A function named `x_builder` returns a builder, whose `build` creates the object. A region's builder has, in
//! place of `build`, the verb that names the memory ([`register`](crate::MrBuilder::register),
//! [`allocate`](crate::MrBuilder::allocate) …). For futures, a completion queue's builder has
//! [`build_async`](crate::CqBuilder::build_async) and [`build_worker`](crate::CqBuilder::build_worker) besides.
//! The layers [`owned`](crate::owned) and [`aio`](crate::aio) create no queue pairs or shared receive queues: they
//! take over what the builders here made, by `adopt`, `adopt_srq`, or
//! [`OwnedSharedReceiveQueue::new`](crate::owned::OwnedSharedReceiveQueue::new). A verb without options creates at
//! once. Objects of the verbs have `destroy`, which returns the error, if any (a multicast membership `detach`, an
//! import `unimport`); dropping does the same silently.
//!
//! ## Devices and contexts
//!
//! | C | here |
//! |---|---|
//! | `ibv_get_device_list`, `ibv_free_device_list` | [`devices`](crate::devices), a `Vec`; [`Device::by_name`](crate::Device::by_name) |
//! | `ibv_get_device_name`, `ibv_get_device_guid`, `ibv_get_device_index` | [`Device::name`](crate::Device::name), [`node_guid`](crate::Device::node_guid), [`index`](crate::Device::index) |
//! | `ibv_open_device`, `ibv_close_device` | [`Context::open`](crate::Context::open); the last clone that is dropped closes |
//! | `ibv_import_device` | [`Context::import`](crate::Context::import) |
//! | `ibv_query_device`, `ibv_query_device_ex` | [`Context::query_device`](crate::Context::query_device) |
//! | `ibv_query_port`, `ibv_query_port_speed` | [`Context::query_port`](crate::Context::query_port), [`Context::query_port_speed`](crate::Context::query_port_speed) |
//! | `ibv_query_gid`, `ibv_query_gid_ex`, `ibv_query_gid_type` | [`Context::query_gid`](crate::Context::query_gid) |
//! | `ibv_query_gid_table` | [`Context::gid_table`](crate::Context::gid_table); [`default_gid`](crate::Context::default_gid) chooses |
//! | `ibv_query_pkey` | [`Context::query_pkey`](crate::Context::query_pkey) |
//! | `ibv_fork_init`, `ibv_is_fork_initialized` | not needed; [`System::copy_on_fork`](crate::device::System::copy_on_fork) tells |
//! | `ibv_query_rt_values_ex`, `mlx5dv_get_clock_info`, `mlx5dv_ts_to_ns` | [`mlx5::Clock`](crate::mlx5::Clock), whose [`system_time`](crate::mlx5::Clock::system_time) is a time of day |
//! | `ibv_wc_status_str`, `ibv_event_type_str`, `ibv_node_type_str`, `ibv_port_state_str` | `Display` of [`WcStatus`](crate::WcStatus), [`EventType`](crate::EventType), [`NodeType`](crate::device::NodeType), [`PortState`](crate::PortState) |
//!
//! ## Protection domains and memory
//!
//! | C | here |
//! |---|---|
//! | `ibv_alloc_pd`, `ibv_dealloc_pd` | [`Context::alloc_pd`](crate::Context::alloc_pd), [`destroy`](crate::ProtectionDomain::destroy) |
//! | `ibv_alloc_td`, `ibv_dealloc_td` | [`Context::alloc_td`](crate::Context::alloc_td), [`destroy`](crate::ThreadDomain::destroy) |
//! | `ibv_alloc_parent_domain` | [`ProtectionDomain::parent_domain_builder`](crate::ProtectionDomain::parent_domain_builder) |
//! | `ibv_reg_mr` of memory that the program keeps accessing itself | [`register_unowned`](crate::MrBuilder::register_unowned), a region with keys alone |
//! | `ibv_reg_mr` of memory to be allocated | [`MrBuilder::allocate`](crate::MrBuilder::allocate) |
//! | `ibv_reg_mr` of memory that the region may take over | [`register`](crate::MrBuilder::register) takes a vector, box or mapping; [`register_raw`](crate::MrBuilder::register_raw) takes a pointer |
//! | `ibv_reg_mr_iova`, `ibv_reg_mr_iova2`, `IBV_ACCESS_*` | [`ProtectionDomain::mr_builder`](crate::ProtectionDomain::mr_builder) |
//! | `ibv_reg_mr` of all memory (implicit ODP) | [`MrBuilder::register_address_space`](crate::MrBuilder::register_address_space) |
//! | `ibv_reg_dmabuf_mr` | [`register_dmabuf`](crate::MrBuilder::register_dmabuf) |
//! | `ibv_alloc_null_mr` | [`ProtectionDomain::alloc_null_mr`](crate::ProtectionDomain::alloc_null_mr) |
//! | `ibv_reg_dm_mr` | [`register_dm`](crate::MrBuilder::register_dm) |
//! | `ibv_rereg_mr` | [`MemoryRegion::rereg`](crate::MemoryRegion::rereg); other memory: [`exchange`](crate::MemoryRegion::exchange) |
//! | `ibv_dereg_mr` | [`MemoryRegion::destroy`](crate::MemoryRegion::destroy), which gives the memory back |
//! | `ibv_advise_mr` | [`ProtectionDomain::advise`](crate::ProtectionDomain::advise) |
//! | `ibv_alloc_mw`, `ibv_dealloc_mw` | [`ProtectionDomain::alloc_mw`](crate::ProtectionDomain::alloc_mw), [`destroy`](crate::MemoryWindow::destroy) |
//! | `ibv_bind_mw`, `ibv_inc_rkey` | [`MemoryWindow::bind`](crate::MemoryWindow::bind) makes a binding, with the new key, for [`SendWr::bind_mw`](crate::SendWr::bind_mw) |
//! | `ibv_dm_export_dmabuf_fd` | [`DeviceMemory::export_dma_buf`](crate::DeviceMemory::export_dma_buf) |
//! | `ibv_alloc_dm`, `ibv_free_dm` | [`Context::alloc_dm`](crate::Context::alloc_dm), [`destroy`](crate::DeviceMemory::destroy) |
//! | `ibv_memcpy_to_dm`, `ibv_memcpy_from_dm` | [`DeviceMemory::copy_from`](crate::DeviceMemory::copy_from), [`copy_to`](crate::DeviceMemory::copy_to) |
//! | `ibv_import_pd`, `ibv_import_mr`, `ibv_import_dm` | [`import_pd`](crate::Context::import_pd), [`import_mr`](crate::ProtectionDomain::import_mr), [`import_dm`](crate::Context::import_dm) check an [`Envelope`](crate::Envelope); [`import_pd_raw`](crate::Context::import_pd_raw) and the like take a bare handle |
//! | `ibv_unimport_pd`, `ibv_unimport_mr`, `ibv_unimport_dm` | [`Imported::unimport`](crate::Imported::unimport) |
//!
//! ## Completions and events
//!
//! | C | here |
//! |---|---|
//! | `ibv_create_cq`, `ibv_create_cq_ex`, `mlx5dv_create_cq` | [`Context::cq_builder`](crate::Context::cq_builder) |
//! | `ibv_poll_cq` | [`CompletionQueue::poll`](crate::CompletionQueue::poll) lends completions, [`poll_into`](crate::CompletionQueue::poll_into) fills an array of [`Wc`](crate::Wc) |
//! | `ibv_start_poll`, `ibv_next_poll`, `ibv_end_poll` | [`poll`](crate::CompletionQueue::poll), [`Completions::next`](crate::Completions::next), dropping [`Completions`](crate::Completions) |
//! | `ibv_wc_read_opcode`, `ibv_wc_read_byte_len`, `ibv_wc_read_vendor_err` | [`Completion::opcode`](crate::Completion::opcode), [`byte_len`](crate::Completion::byte_len), [`vendor_err`](crate::Completion::vendor_err) |
//! | `ibv_wc_read_imm_data`, `ibv_wc_read_invalidated_rkey` | [`Completion::imm`](crate::Completion::imm), [`invalidated_rkey`](crate::Completion::invalidated_rkey) |
//! | `ibv_wc_read_qp_num`, `ibv_wc_read_src_qp`, `ibv_wc_read_slid`, `ibv_wc_read_sl`, `ibv_wc_read_dlid_path_bits` | [`Completion::qpn`](crate::Completion::qpn), [`src_qpn`](crate::Completion::src_qpn), [`src_lid`](crate::Completion::src_lid), [`service_level`](crate::Completion::service_level), [`path_bits`](crate::Completion::path_bits) |
//! | `ibv_wc_read_wc_flags` | [`Completion::has_grh`](crate::Completion::has_grh); `Some` of [`imm`](crate::Completion::imm) and the like |
//! | `ibv_wc_read_completion_wallclock_ns` | [`mlx5::real_time`](crate::mlx5::real_time) of a queue with [`real_time_timestamps`](crate::CqBuilder::real_time_timestamps), [`mlx5::Clock::system_time`](crate::mlx5::Clock::system_time) of others |
//! | `ibv_wc_read_completion_ts`, `ibv_wc_read_cvlan`, `ibv_wc_read_flow_tag` | [`Completion::timestamp`](crate::Completion::timestamp), [`vlan`](crate::Completion::vlan), [`flow_tag`](crate::Completion::flow_tag) |
//! | `struct ibv_wc`, `wc.status != IBV_WC_SUCCESS` | [`Wc`](crate::Wc), [`Completion::ok`](crate::Completion::ok), [`Wc::ok`](crate::Wc::ok) |
//! | `ibv_resize_cq` | [`CompletionQueue::resize`](crate::CompletionQueue::resize) |
//! | `ibv_modify_cq` | [`CqControl::moderate`](crate::CqControl::moderate) |
//! | `ibv_destroy_cq` | [`CompletionQueue::destroy`](crate::CompletionQueue::destroy) |
//! | `ibv_create_comp_channel`, `ibv_destroy_comp_channel` | [`Context::create_comp_channel`](crate::Context::create_comp_channel), [`destroy`](crate::CompletionChannel::destroy) |
//! | `ibv_req_notify_cq` | [`CompletionQueue::req_notify`](crate::CompletionQueue::req_notify) |
//! | `ibv_get_cq_event`, `ibv_ack_cq_events` | [`CompletionChannel::wait`](crate::CompletionChannel::wait), [`try_next`](crate::CompletionChannel::try_next); nothing is acknowledged |
//! | `ibv_get_async_event`, `ibv_ack_async_event` | [`Context::next_event`](crate::Context::next_event), [`try_next_event`](crate::Context::try_next_event); nothing is acknowledged |
//!
//! ## Queue pairs
//!
//! | C | here |
//! |---|---|
//! | `ibv_create_qp`, `ibv_create_qp_ex`, `mlx5dv_create_qp` | [`ProtectionDomain::qp_builder`](crate::ProtectionDomain::qp_builder) |
//! | `ibv_modify_qp`, `ibv_modify_qp_rate_limit`, `enum ibv_qp_attr_mask` | [`QpControl::modify`](crate::QpControl::modify) with a [`QpAttr`](crate::QpAttr), whose setters are the mask |
//! | `ibv_modify_qp` three times, and addresses over TCP | [`endpoint`](crate::QpControl::endpoint), [`handshake`](crate::QpControl::handshake) |
//! | `ibv_modify_qp` to `RESET` | [`QueuePair::reset`](crate::QueuePair::reset), which also empties the queues |
//! | `ibv_query_qp` | [`QpControl::query`](crate::QpControl::query) |
//! | `ibv_query_ece`, `ibv_set_ece` | [`QpControl::query_ece`](crate::QpControl::query_ece), [`set_ece`](crate::QpControl::set_ece) |
//! | `ibv_destroy_qp` | [`QueuePair::destroy`](crate::QueuePair::destroy) |
//! | `ibv_create_srq`, `ibv_create_srq_ex` | [`ProtectionDomain::srq_builder`](crate::ProtectionDomain::srq_builder) |
//! | `ibv_modify_srq`, `ibv_query_srq` | [`set_limit`](crate::SharedReceiveQueue::set_limit), [`resize`](crate::SharedReceiveQueue::resize), [`query`](crate::SharedReceiveQueue::query) |
//! | `ibv_get_srq_num` | [`SharedReceiveQueue::number`](crate::SharedReceiveQueue::number) |
//! | `ibv_destroy_srq` | [`SharedReceiveQueue::destroy`](crate::SharedReceiveQueue::destroy) |
//! | `ibv_open_xrcd`, `ibv_close_xrcd` | [`Context::xrcd_builder`](crate::Context::xrcd_builder), [`destroy`](crate::XrcDomain::destroy) |
//! | `IBV_QPT_XRC_RECV`, `ibv_open_qp` | [`XrcDomain::create_target`](crate::XrcDomain::create_target), [`open_target`](crate::XrcDomain::open_target) |
//! | `ibv_init_ah_from_wc`, `ibv_create_ah_from_wc` | [`Context::reply_path`](crate::Context::reply_path) |
//! | `ibv_create_ah`, `ibv_destroy_ah` | [`ProtectionDomain::create_ah`](crate::ProtectionDomain::create_ah), [`destroy`](crate::AddressHandle::destroy) |
//! | `ibv_attach_mcast`, `ibv_detach_mcast` | [`attach_mcast`](crate::QpControl::attach_mcast), [`detach`](crate::McastMembership::detach) |
//! | `ibv_create_flow`, `ibv_destroy_flow` | [`create_flow`](crate::QpControl::create_flow), [`destroy`](crate::Flow::destroy) |
//!
//! ## Posting
//!
//! | C | here |
//! |---|---|
//! | `ibv_post_send` with a list | [`send_batch`](crate::QueuePair::send_batch), [`push`](crate::SendBatch::push) each request, [`ring`](crate::SendBatch#what-the-caller-of-ring-promises) once |
//! | `ibv_post_recv`, `ibv_post_srq_recv` | [`recv_batch`](crate::QueuePair::recv_batch), [`SharedReceiveQueue::batch`](crate::SharedReceiveQueue::batch) |
//! | `struct ibv_send_wr`, `IBV_WR_*` | [`SendWr`](crate::SendWr), one constructor for each opcode |
//! | `wr_id`, `IBV_SEND_*` | [`id`](crate::SendWr::id), [`signaled`](crate::SendWr::signaled), [`solicited`](crate::SendWr::solicited), [`fence`](crate::SendWr::fence), [`inline`](crate::SendWr::inline) |
//! | `struct ibv_recv_wr` | [`RecvWr`](crate::RecvWr) |
//! | `struct ibv_sge` | [`Sge`](crate::Sge), made by [`MemoryRegion::sge`](crate::MemoryRegion::sge) |
//! | `wr.rdma.remote_addr`, `rkey` | [`Remote`](crate::Remote), made by [`MemoryRegion::remote`](crate::MemoryRegion::remote) |
//! | `wr.ud`, `ibv_wr_set_ud_addr` | [`SendWr::to`](crate::SendWr::to) a [`Destination`](crate::Destination) |
//! | `ibv_wr_set_xrc_srqn` | [`SendWr::to_srq`](crate::SendWr::to_srq) |
//! | `ibv_wr_set_inline_data`, `ibv_wr_set_inline_data_list` | [`SendWr::inline`](crate::SendWr::inline), [`inline_list`](crate::SendWr::inline_list) |
//! | `ibv_wr_start`, `ibv_wr_complete` | [`SendQueue::batch`](crate::SendQueue::batch), [`ring`](crate::SendBatch#what-the-caller-of-ring-promises) |
//! | `ibv_wr_send`, `ibv_wr_send_imm`, `ibv_wr_send_inv` | [`SendWr::send`](crate::SendWr::send), [`send_imm`](crate::SendWr::send_imm), [`send_inv`](crate::SendWr::send_inv) |
//! | `ibv_wr_rdma_write`, `ibv_wr_rdma_write_imm`, `ibv_wr_rdma_read` | [`SendWr::write`](crate::SendWr::write), [`write_imm`](crate::SendWr::write_imm), [`read`](crate::SendWr::read) |
//! | `ibv_wr_atomic_cmp_swp`, `ibv_wr_atomic_fetch_add`, `ibv_wr_atomic_write` | [`SendWr::compare_swap`](crate::SendWr::compare_swap), [`fetch_add`](crate::SendWr::fetch_add), [`atomic_write`](crate::SendWr::atomic_write) |
//! | `ibv_wr_flush`, `ibv_wr_local_inv`, `ibv_wr_bind_mw` | [`SendWr::flush`](crate::SendWr::flush), [`local_inv`](crate::SendWr::local_inv), [`bind_mw`](crate::SendWr::bind_mw) |
//! | `ibv_wr_abort` | dropping the batch |
//!
//! ## Connection management
//!
//! | C | here |
//! |---|---|
//! | `rdma_create_ep`, `rdma_connect`, `rdma_get_request`, `rdma_accept` | [`cm::Connector`](crate::cm::Connector), [`cm::Listener`](crate::cm::Listener) |
//! | the other functions of librdmacm, one by one | ids with a type for each state: [`cm`](crate::cm#calls-of-librdmacm) has the table |
//! | the same in an event loop | [`aio::cm`](crate::aio::cm) |
//!
//! ## mlx5dv
//!
//! | C | here |
//! |---|---|
//! | `mlx5dv_query_device`, `struct mlx5dv_cqe_comp_caps` | [`mlx5::query_device`](crate::mlx5::query_device), a [`ContextAttr`](crate::mlx5::ContextAttr) |
//! | `mlx5dv_init_obj` of queues: `struct mlx5dv_qp`, `struct mlx5dv_cq`, `struct mlx5dv_srq` | [`mlx5::RawQueuePair`](crate::mlx5::RawQueuePair), [`mlx5::RawCompletionQueue`](crate::mlx5::RawCompletionQueue), [`mlx5::RawSharedReceiveQueue`](crate::mlx5::RawSharedReceiveQueue), whose `layout` has addresses and numbers |
//! | `struct mlx5dv_ah`, `struct mlx5dv_dm`, `struct mlx5dv_pd` | [`mlx5::address_vector`](crate::mlx5::address_vector), [`mlx5::device_memory_address`](crate::mlx5::device_memory_address), [`mlx5::pd_number`](crate::mlx5::pd_number) |
//! | `mlx5dv_devx_alloc_uar`, `mlx5dv_devx_free_uar` | [`mlx5::Uar`](crate::mlx5::Uar) |
//! | `mlx5dv_devx_uar_export_dmabuf_fd` | [`mlx5::Uar::export_dma_buf`](crate::mlx5::Uar::export_dma_buf) |
//! | `mlx5dv_devx_general_cmd`, `mlx5dv_devx_query_eqn` | [`devx::general_command`](crate::mlx5::devx::general_command), [`general_command_unchecked`](crate::mlx5::devx::general_command_unchecked), [`query_eqn`](crate::mlx5::devx::query_eqn) |
//! | `mlx5dv_devx_obj_create`, `mlx5dv_devx_obj_destroy`, `struct mlx5dv_devx_obj` | [`DevxObject::create`](crate::mlx5::devx::DevxObject::create), [`destroy`](crate::mlx5::devx::DevxObject::destroy) |
//! | `mlx5dv_devx_obj_query`, `mlx5dv_devx_qp_query`, `mlx5dv_devx_cq_query`, `mlx5dv_devx_srq_query` | [`devx::query`](crate::mlx5::devx::query) of a [`DevxTarget`](crate::mlx5::devx::DevxTarget) |
//! | `mlx5dv_devx_obj_modify`, `mlx5dv_devx_qp_modify`, `mlx5dv_devx_cq_modify`, `mlx5dv_devx_srq_modify` | [`devx::modify`](crate::mlx5::devx::modify) |
//! | `mlx5dv_devx_umem_reg`, `mlx5dv_devx_umem_reg_ex`, `mlx5dv_devx_umem_dereg`, `struct mlx5dv_devx_umem` | [`devx::Umem::builder`](crate::mlx5::devx::Umem::builder), [`Umem::destroy`](crate::mlx5::devx::Umem::destroy) |
//! | `mlx5dv_devx_create_event_channel`, `mlx5dv_devx_destroy_event_channel`, `struct mlx5dv_devx_event_channel` | [`devx::DevxEvents`](crate::mlx5::devx::DevxEvents) |
//! | `mlx5dv_devx_subscribe_devx_event`, `mlx5dv_devx_subscribe_devx_event_fd` | [`subscribe`](crate::mlx5::devx::DevxEvents::subscribe), [`subscribe_eventfd`](crate::mlx5::devx::DevxEvents::subscribe_eventfd) |
//! | `mlx5dv_devx_create_cmd_comp`, `mlx5dv_devx_destroy_cmd_comp`, `mlx5dv_devx_obj_query_async`, `mlx5dv_devx_get_async_cmd_comp` | [`devx::DevxQueries`](crate::mlx5::devx::DevxQueries) |
//! | `mlx5dv_devx_obj_export`, `mlx5dv_devx_obj_import`, `mlx5dv_devx_obj_unimport` | [`DevxObject::export_rdma_core`](crate::mlx5::devx::DevxObject::export_rdma_core), [`import_rdma_core`](crate::mlx5::devx::DevxObject::import_rdma_core) |
//! | `mlx5dv_devx_umem_export`, `mlx5dv_devx_umem_import`, `mlx5dv_devx_umem_unimport` | [`Umem::export_rdma_core`](crate::mlx5::devx::Umem::export_rdma_core), [`import_rdma_core`](crate::mlx5::devx::Umem::import_rdma_core) |
//! | `mlx5dv_devx_get_event` | [`try_next`](crate::mlx5::devx::DevxEvents::try_next), [`wait`](crate::mlx5::devx::DevxEvents::wait) |
//! | `mlx5dv_modify_qp_udp_sport`, and of an address handle | [`mlx5::set_udp_source_port`](crate::mlx5::set_udp_source_port), [`mlx5::set_ah_udp_source_port`](crate::mlx5::set_ah_udp_source_port) |
//! | `mlx5dv_query_qp_lag_port`, `mlx5dv_modify_qp_lag_port` | [`mlx5::query_lag_port`](crate::mlx5::query_lag_port), [`mlx5::set_lag_port`](crate::mlx5::set_lag_port) |
//! | `mlx5dv_reg_dmabuf_mr`, `mlx5dv_get_data_direct_sysfs_path` | [`MrBuilder::data_direct`](crate::MrBuilder::data_direct), [`mlx5::data_direct_path`](crate::mlx5::data_direct_path) |
//! | `mlx5dv_alloc_var`, `mlx5dv_free_var` | [`mlx5::Var`](crate::mlx5::Var) |
//! | `mlx5dv_var_export`, `mlx5dv_var_import`, `mlx5dv_get_export_sizes` | [`Var::export_rdma_core`](crate::mlx5::Var::export_rdma_core), [`Var::import_rdma_core`](crate::mlx5::Var::import_rdma_core), [`mlx5::export_sizes`](crate::mlx5::export_sizes) |
//! | `mlx5dv_var_unimport` | [`Imported::unimport`](crate::Imported::unimport) of an [`ImportedVar`](crate::mlx5::ImportedVar) |
//! | `MLX5DV_QP_CREATE_ALLOW_SCATTER_TO_CQE`, and without `MLX5DV_QP_CREATE_DISABLE_SCATTER_TO_CQE` | [`QpBuilder::scatter_to_cqe`](crate::QpBuilder::scatter_to_cqe), [`scatter_received_to_cqe`](crate::QpBuilder::scatter_received_to_cqe); nothing is scattered unless asked for |
//! | `MLX5DV_QP_CREATE_OOO_DP`, `struct mlx5dv_ooo_recv_wrs_caps` | [`QpBuilder::out_of_order_placement`](crate::QpBuilder::out_of_order_placement), [`mlx5::query_out_of_order`](crate::mlx5::query_out_of_order) |
//! | `IBV_CREATE_CQ_ATTR_IGNORE_OVERRUN` | [`RawCompletionQueue::ignoring_overrun`](crate::mlx5::RawCompletionQueue::ignoring_overrun) |
//! | `MLX5DV_CQ_INIT_ATTR_*` | [`CqBuilder::cqe_size`](crate::CqBuilder::cqe_size), [`pad`](crate::CqBuilder::pad) |
//!
//! ## Not here
//!
//! Of libibverbs: work queues and indirection tables (`ibv_create_wq`), counter objects, flow actions, tag matching,
//! TSO, DMA handles and completion counters.
//!
//! Of the functions of libmlx5 as of rdma-core 65:
//!
//! - `mlx5dv_is_supported`, `mlx5dv_open_device`, `mlx5dv_set_context_attr`: there is nothing to ask for. A context has DEVX
//!   wherever the kernel grants it, and a [`Device`](crate::Device) names its driver.
//! - `mlx5dv_qp_ex_from_ibv_qp_ex`: a queue pair has one type.
//! - `mlx5dv_map_ah_to_qp`: an address handle needs no queue pair.
//! - The layouts behind `mlx5dv_get_cqe_*`, `mlx5dv_set_cqe_owner`, `mlx5dv_set_*_seg` and `mlx5dv_x86_set_*_seg` are
//!   structs of `uverbs_uapi::mlx5`, in `cqe` and `wqe`: a program fills their fields. `mlx5dv_wr_raw_wqe`: a
//!   [`RawQueuePair`](crate::mlx5::RawQueuePair) is posted to by its own program.
//! - Not yet, memory keys that are made and changed by requests: `mlx5dv_create_mkey`, `mlx5dv_destroy_mkey`,
//!   `mlx5dv_mkey_check`, `mlx5dv_wr_mkey_configure`, `mlx5dv_wr_set_mkey_*`, `mlx5dv_wr_mr_list`,
//!   `mlx5dv_wr_mr_interleaved`.
//! - Not yet, the transport DC: `mlx5dv_wr_set_dc_addr`, `mlx5dv_wr_set_dc_addr_stream`, `mlx5dv_dci_stream_id_reset`.
//! - Work queues, whose packets flow rules would direct: `mlx5dv_create_wq`, `mlx5dv_devx_wq_query`,
//!   `mlx5dv_devx_wq_modify`, `mlx5dv_devx_ind_tbl_query`, `mlx5dv_devx_ind_tbl_modify`. Each object is one of
//!   [`DevxObject`](crate::mlx5::devx::DevxObject).
//! - Vports of a switch between virtual functions: `mlx5dv_query_port`, for steering.
//! - Steering: `mlx5dv_dr_*` and `mlx5dv_dump_dr_*`, whose tables software keeps; `mlx5dv_create_flow`,
//!   `mlx5dv_create_flow_matcher`, `mlx5dv_destroy_flow_matcher`, `mlx5dv_create_flow_action_esp`,
//!   `mlx5dv_create_flow_action_modify_header`, `mlx5dv_create_flow_action_packet_reformat`,
//!   `mlx5dv_create_steering_anchor`, `mlx5dv_destroy_steering_anchor`, and the memory that `mlx5dv_alloc_dm` allocates
//!   for it. Rules of the verbs are [`QpControl::create_flow`](crate::QpControl::create_flow).
//! - Operations in device memory, and copies by the device: `mlx5dv_dm_map_op_addr`, `mlx5dv_wr_memcpy`.
//! - Scheduling and pacing: `mlx5dv_sched_*`, `mlx5dv_modify_qp_sched_elem`, `mlx5dv_pp_alloc`, `mlx5dv_pp_free`.
//! - Encryption: `mlx5dv_crypto_*`, `mlx5dv_dek_*`. Reserved numbers of queue pairs: `mlx5dv_reserved_qpn_alloc`,
//!   `mlx5dv_reserved_qpn_dealloc`. Taking posted requests back: `mlx5dv_qp_cancel_posted_send_wrs`.
//! - Drivers in the process by VFIO: `mlx5dv_get_vfio_device_list`, `mlx5dv_vfio_get_events_fd`,
//!   `mlx5dv_vfio_process_events`, `mlx5dv_devx_alloc_msi_vector`, `mlx5dv_devx_free_msi_vector`,
//!   `mlx5dv_devx_create_eq`, `mlx5dv_devx_destroy_eq`.
//!
//! # Differences beside the names
//!
//! **A program's own memory is registered for keys alone.** A program for libibverbs goes on reading and
//! writing the memory that it registered, registers it on several devices, or has memory that no processor can
//! reach (a GPU's). [`register_unowned`](crate::MrBuilder::register_unowned) is for that: its caller promises
//! that the range stays mapped until the region is gone, and the region has keys and no access. All other
//! registrations take the memory over, and give it back when the region is destroyed.
//!
//! **A full queue is no `ENOMEM`.** `push` returns [`PostError::Full`](crate::PostError::Full), and
//! [`room`](crate::SendBatch::room) tells how many requests still fit. Every other fault of a request has a
//! variant of [`PostError`](crate::PostError), too.
//!
//! **`bad_wr` is a count.** A request that `push` refuses leaves the batch as it was, and
//! [`len`](crate::SendBatch::len) says how many requests were taken. Ring the batch to send those, or drop it
//! to send none.
//!
//! **An error of `ring` is not one of `push`.** After
//! [`RingError::StillQueued`](crate::RingError::StillQueued) the requests stay in the queue: do not free the
//! memory. mlx5 has no such error. A [`RingError`](crate::RingError) does not convert into a
//! [`PostError`](crate::PostError): after `push` returned one, the memory is the caller's.
//!
//! **Nothing locks.** Posting and polling take `&mut self`, where libibverbs takes a lock for each call. A
//! queue that several threads use goes into a `Mutex`; [`QueuePair::split`](crate::QueuePair::split) gives
//! the send and the receive queue to different threads, and [`CqControl`](crate::CqControl) names a
//! completion queue that another thread owns. Everything else takes `&self` and works from any thread.
//!
//! **`ring` is `unsafe`,** because nothing else keeps the memory of a request alive and unborrowed until it
//! completes. [`owned`](crate::owned) and [`aio`](crate::aio) post without `unsafe`.
//!
//! **Buffers of a pool serve raw batches, too.** A [`BufferPool`](crate::owned::BufferPool) registers once
//! and hands out slices; [`Buffer::sge`](crate::owned::Buffer::sge) names one in any
//! [`SendWr`](crate::SendWr) or [`RecvWr`](crate::RecvWr). The program keeps the buffer until the request has
//! completed:
//!
//! ```no_run
//! # fn f(pd: &uverbs::ProtectionDomain, qp: &mut uverbs::QueuePair) -> Result<(), Box<dyn std::error::Error>> {
//! use uverbs::SendWr;
//!
//! let pool = pd.buffer_pool_builder(4096).count(16).build()?;
//! let buffer = pool.copy(b"hello")?;
//! let mut batch = qp.send_batch()?;
//! batch.push(SendWr::send(&[buffer.sge()]).id(1).signaled())?;
//! // SAFETY: `buffer` is kept, and not written, until the completion with this number was polled.
//! unsafe { batch.ring() }?;
//! # std::mem::forget(buffer); Ok(()) }
//! ```
//!
//! **Immediate data is a number,** in host byte order at both ends: no `htonl`. So is the result of an atomic.
//!
//! ***The completion of a failed request has only `wr_id`, `qpn`, `status` and `vendor_err`,** as in C;
//! the opcode is undefined. [`Completion::ok`](crate::Completion::ok) gives them as an error,
//! [`WcError`](crate::WcError).
//!
//! **Completions of a destroyed queue pair are discarded,** on every device: do not wait for them.
//!
//! **Events are not acknowledged.** An event names its object by an [`ObjectKey`](crate::ObjectKey), not by a
//! pointer, so destroying an object waits for no acknowledgement, and events of objects that are gone are
//! dropped and [counted](crate::Context::dead_events).
//!
//! **Channels do not block.** [`try_next`](crate::CompletionChannel::try_next) returns `None` at once,
//! [`wait`](crate::CompletionChannel::wait) waits, with a timeout if one is given. The file of a channel
//! and of asynchronous events can be given to `poll(2)`; the order stays that of C: arm, poll once more, then
//! sleep.
//!
//! **Order of destruction is free.** Everything keeps what it was made from. `destroy` of something that is
//! still in use fails with `EBUSY` and [gives it back](crate::ErrorWith).
//!
//! **Memory is freed only after DESTROY.** Memory that a device may reach is freed when the kernel has
//! confirmed that the object is gone. If the kernel refuses, the memory is leaked and
//! [counted](crate::Context::leaked).
//!
//! **A child of `fork` owns nothing.** Calls on inherited objects fail with an error for which
//! [`Error::is_forked`](crate::Error::is_forked) holds, and dropping them destroys nothing;
//! [`Context::reimport`](crate::Context::reimport) makes a context of its own on the same kernel file.
//!
//! **One errno for "not supported".** [`Error::is_unsupported`](crate::Error::is_unsupported) holds for
//! `EOPNOTSUPP`, `EPROTONOSUPPORT`, `ENOTTY` and `ENOSYS` alike;
//! [`kernel_errno`](crate::Error::kernel_errno) has the original.
