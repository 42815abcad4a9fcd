//! Commands of the connection manager as data, and whoever runs them.
//!
//! Pairs with `ucma_write` in `core/ucma.c`. As with [`uverbs`](crate::uverbs), no address appears in
//! a command: what the kernel reads or writes beside it is a slice until [`fd`](super::fd) turns it
//! into a pointer.

use rustix::io::Errno;
use std::fmt::Debug;
use std::mem::offset_of;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::panic::{RefUnwindSafe, UnwindSafe};
use uverbs_uapi::qp::ib_uverbs_qp_attr;
use uverbs_uapi::rdma_user_cm::*;
use zerocopy::{FromBytes, Immutable, IntoBytes};

/// What a command's address field is to point to.
#[derive(Debug)]
pub(crate) enum Buffer<'a> {
    None,
    /// For the kernel to read.
    In(&'a [u8]),
    /// For the kernel to write.
    Out(&'a mut [u8]),
}

/// A command to be written.
#[derive(Debug)]
pub(crate) struct Command<'a> {
    pub(super) number: u32,
    /// The command's struct, with 0 for the address.
    pub(super) request: &'a [u8],
    pub(super) buffer: Buffer<'a>,
    /// Where in the struct the address stands.
    pub(super) address_at: usize,
}

impl<'a> Command<'a> {
    pub(crate) fn new<T: IntoBytes + Immutable>(number: u32, request: &'a T) -> Self {
        Command { number, request: request.as_bytes(), buffer: Buffer::None, address_at: 0 }
    }

    fn answered<A: FromBytes + IntoBytes>(mut self, address_at: usize, answer: &'a mut A) -> Self {
        self.buffer = Buffer::Out(answer.as_mut_bytes());
        self.address_at = address_at;
        self
    }

    pub(crate) fn create_id(
        request: &'a rdma_ucm_create_id,
        answer: &'a mut rdma_ucm_create_id_resp,
    ) -> Self {
        Command::new(RDMA_USER_CM_CMD_CREATE_ID, request)
            .answered(offset_of!(rdma_ucm_create_id, response), answer)
    }

    pub(crate) fn destroy_id(
        request: &'a rdma_ucm_destroy_id,
        answer: &'a mut rdma_ucm_destroy_id_resp,
    ) -> Self {
        Command::new(RDMA_USER_CM_CMD_DESTROY_ID, request)
            .answered(offset_of!(rdma_ucm_destroy_id, response), answer)
    }

    pub(crate) fn get_event(
        request: &'a rdma_ucm_get_event,
        answer: &'a mut rdma_ucm_event_resp,
    ) -> Self {
        Command::new(RDMA_USER_CM_CMD_GET_EVENT, request)
            .answered(offset_of!(rdma_ucm_get_event, response), answer)
    }

    /// Asks for `RDMA_USER_CM_QUERY_ADDR` or `RDMA_USER_CM_QUERY_GID`.
    pub(crate) fn query(
        request: &'a rdma_ucm_query,
        answer: &'a mut rdma_ucm_query_addr_resp,
    ) -> Self {
        Command::new(RDMA_USER_CM_CMD_QUERY, request)
            .answered(offset_of!(rdma_ucm_query, response), answer)
    }

    pub(crate) fn init_qp_attr(
        request: &'a rdma_ucm_init_qp_attr,
        answer: &'a mut ib_uverbs_qp_attr,
    ) -> Self {
        Command::new(RDMA_USER_CM_CMD_INIT_QP_ATTR, request)
            .answered(offset_of!(rdma_ucm_init_qp_attr, response), answer)
    }

    pub(crate) fn set_option(request: &'a rdma_ucm_set_option, value: &'a [u8]) -> Self {
        Command {
            buffer: Buffer::In(value),
            address_at: offset_of!(rdma_ucm_set_option, optval),
            ..Command::new(RDMA_USER_CM_CMD_SET_OPTION, request)
        }
    }
}

/// The request that moves an id out of another file.
pub(crate) fn migration(id: u32, from: BorrowedFd<'_>) -> rdma_ucm_migrate_id {
    rdma_ucm_migrate_id { id, fd: from.as_raw_fd() as u32, ..Default::default() }
}

impl<'a> Command<'a> {
    pub(crate) fn migrate_id(
        request: &'a rdma_ucm_migrate_id,
        answer: &'a mut rdma_ucm_migrate_resp,
    ) -> Self {
        Command::new(RDMA_USER_CM_CMD_MIGRATE_ID, request)
            .answered(offset_of!(rdma_ucm_migrate_id, response), answer)
    }
}

/// An open file of the connection manager.
pub(crate) trait Kernel: Debug + Send + Sync + UnwindSafe + RefUnwindSafe {
    /// Runs a command; its answer is filled in on success.
    fn execute(&self, command: Command<'_>) -> Result<(), Errno>;

    /// The file itself, which is readable when there is an event.
    fn fd(&self) -> BorrowedFd<'_>;
}
