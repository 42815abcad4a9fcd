//! Commands of the connection manager as data, and the trait that executes them.
//!
//! Pairs with `ucma_write` in `core/ucma.c`. As in [`uverbs`](crate::uverbs), a command contains no
//! address: memory that the kernel reads or writes beside the command is a slice until
//! [`fd`](super::rdma_cm_fd) turns it into a pointer.

use crate::platform::Platform;
use rustix::io::Errno;
use std::fmt::Debug;
use std::mem::offset_of;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::panic::{RefUnwindSafe, UnwindSafe};
use uverbs_uapi::qp::ib_uverbs_qp_attr;
use uverbs_uapi::rdma_user_cm::*;
use zerocopy::{FromBytes, Immutable, IntoBytes};

/// The memory behind a command's address field.
#[derive(Debug)]
pub(crate) enum CommandMemory<'a> {
    None,
    /// The kernel reads it.
    In(&'a [u8]),
    /// The kernel writes it.
    Out(&'a mut [u8]),
}

/// A command.
#[derive(Debug)]
pub(crate) struct UcmaCommand<'a> {
    pub(super) number: u32,
    /// The command's struct, with 0 for the address.
    pub(super) request: &'a [u8],
    pub(super) buffer: CommandMemory<'a>,
    /// The offset of the address field in the struct.
    pub(super) address_at: usize,
}

impl<'a> UcmaCommand<'a> {
    pub(crate) fn new<T: IntoBytes + Immutable>(number: u32, request: &'a T) -> Self {
        UcmaCommand {
            number,
            request: request.as_bytes(),
            buffer: CommandMemory::None,
            address_at: 0,
        }
    }

    fn answered<A: FromBytes + IntoBytes>(mut self, address_at: usize, answer: &'a mut A) -> Self {
        self.buffer = CommandMemory::Out(answer.as_mut_bytes());
        self.address_at = address_at;
        self
    }

    pub(crate) fn create_id(
        request: &'a rdma_ucm_create_id,
        answer: &'a mut rdma_ucm_create_id_resp,
    ) -> Self {
        UcmaCommand::new(RDMA_USER_CM_CMD_CREATE_ID, request)
            .answered(offset_of!(rdma_ucm_create_id, response), answer)
    }

    pub(crate) fn destroy_id(
        request: &'a rdma_ucm_destroy_id,
        answer: &'a mut rdma_ucm_destroy_id_resp,
    ) -> Self {
        UcmaCommand::new(RDMA_USER_CM_CMD_DESTROY_ID, request)
            .answered(offset_of!(rdma_ucm_destroy_id, response), answer)
    }

    pub(crate) fn join_mcast(
        request: &'a rdma_ucm_join_mcast,
        answer: &'a mut rdma_ucm_create_id_resp,
    ) -> Self {
        UcmaCommand::new(RDMA_USER_CM_CMD_JOIN_MCAST, request)
            .answered(offset_of!(rdma_ucm_join_mcast, response), answer)
    }

    pub(crate) fn leave_mcast(
        request: &'a rdma_ucm_destroy_id,
        answer: &'a mut rdma_ucm_destroy_id_resp,
    ) -> Self {
        UcmaCommand::new(RDMA_USER_CM_CMD_LEAVE_MCAST, request)
            .answered(offset_of!(rdma_ucm_destroy_id, response), answer)
    }

    pub(crate) fn get_event(
        request: &'a rdma_ucm_get_event,
        answer: &'a mut rdma_ucm_event_resp,
    ) -> Self {
        UcmaCommand::new(RDMA_USER_CM_CMD_GET_EVENT, request)
            .answered(offset_of!(rdma_ucm_get_event, response), answer)
    }

    /// Asks for `RDMA_USER_CM_QUERY_PATH` or `RDMA_USER_CM_QUERY_IB_SERVICE`.
    pub(crate) fn query_list(request: &'a rdma_ucm_query, answer: &'a mut [u8]) -> Self {
        UcmaCommand {
            buffer: CommandMemory::Out(answer),
            address_at: offset_of!(rdma_ucm_query, response),
            ..UcmaCommand::new(RDMA_USER_CM_CMD_QUERY, request)
        }
    }

    /// Asks for `RDMA_USER_CM_QUERY_ADDR` or `RDMA_USER_CM_QUERY_GID`.
    pub(crate) fn query(
        request: &'a rdma_ucm_query,
        answer: &'a mut rdma_ucm_query_addr_resp,
    ) -> Self {
        UcmaCommand::new(RDMA_USER_CM_CMD_QUERY, request)
            .answered(offset_of!(rdma_ucm_query, response), answer)
    }

    pub(crate) fn init_qp_attr(
        request: &'a rdma_ucm_init_qp_attr,
        answer: &'a mut ib_uverbs_qp_attr,
    ) -> Self {
        UcmaCommand::new(RDMA_USER_CM_CMD_INIT_QP_ATTR, request)
            .answered(offset_of!(rdma_ucm_init_qp_attr, response), answer)
    }

    pub(crate) fn set_option(request: &'a rdma_ucm_set_option, value: &'a [u8]) -> Self {
        UcmaCommand {
            buffer: CommandMemory::In(value),
            address_at: offset_of!(rdma_ucm_set_option, optval),
            ..UcmaCommand::new(RDMA_USER_CM_CMD_SET_OPTION, request)
        }
    }
}

/// The struct of the command that moves an id out of another file.
pub(crate) fn migration(id: u32, from: BorrowedFd<'_>) -> rdma_ucm_migrate_id {
    rdma_ucm_migrate_id { id, fd: from.as_raw_fd() as u32, ..Default::default() }
}

impl<'a> UcmaCommand<'a> {
    pub(crate) fn migrate_id(
        request: &'a rdma_ucm_migrate_id,
        answer: &'a mut rdma_ucm_migrate_resp,
    ) -> Self {
        UcmaCommand::new(RDMA_USER_CM_CMD_MIGRATE_ID, request)
            .answered(offset_of!(rdma_ucm_migrate_id, response), answer)
    }
}

/// An open file of the connection manager.
pub(crate) trait UcmaFile: Debug + Send + Sync + UnwindSafe + RefUnwindSafe {
    /// Executes a command and fills in its answer.
    fn execute(&self, command: UcmaCommand<'_>) -> Result<(), Errno>;

    /// The system that the file belongs to.
    fn platform(&self) -> Platform {
        Platform::LINUX
    }

    /// The file, which is readable while an event is pending.
    fn fd(&self) -> BorrowedFd<'_>;
}
