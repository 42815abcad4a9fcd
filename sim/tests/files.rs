//! Open files of the connection manager end as Linux's do: with their last descriptor.

use rustix::fd::OwnedFd;
use rustix::io::Errno;
use std::sync::Arc;
use uverbs_host::{HostFile, HostSystem};
use uverbs_sim::{Fabric, Mode};
use uverbs_uapi::rdma_user_cm::*;
use zerocopy::{FromZeros, Immutable, IntoBytes};

/// Writes a command, whose answer has room for `room` bytes.
fn write<T: IntoBytes + Immutable>(file: &Arc<dyn HostFile>, cmd: u32, request: &T, room: u16) {
    let r#in = size_of::<T>() as u16;
    let header = rdma_ucm_cmd_hdr { cmd, r#in, out: room };
    let bytes = [header.as_bytes(), request.as_bytes()].concat();
    // SAFETY: the answer's place is the caller's, with so much room.
    assert_eq!(unsafe { file.write(&bytes) }, Ok(bytes.len()));
}

/// Creates an id and binds it to the address of the first device.
fn bind(file: &Arc<dyn HostFile>) {
    let mut answer = rdma_ucm_create_id_resp::new_zeroed();
    let response = std::ptr::from_mut(&mut answer).expose_provenance() as u64;
    let ps = rdma_ucm_port_space::RDMA_PS_TCP.0;
    let create = rdma_ucm_create_id { uid: 1, response, ps, ..Default::default() };
    write(file, RDMA_USER_CM_CMD_CREATE_ID, &create, size_of_val(&answer) as u16);
    let address = sockaddr_in { sin_family: 2, sin_addr: [10, 0, 0, 1], ..Default::default() };
    let mut bind = rdma_ucm_bind { id: answer.id, ..rdma_ucm_bind::new_zeroed() };
    bind.addr_size = size_of_val(&address) as u16;
    bind.addr[..size_of_val(&address)].copy_from_slice(address.as_bytes());
    write(file, RDMA_USER_CM_CMD_BIND, &bind, 0);
}

fn ids(system: &Arc<dyn HostSystem>) -> u64 {
    let counts = system.resources(0).unwrap();
    counts.into_iter().find(|(kind, _)| kind == "cm_id").unwrap().1
}

#[test]
fn ids_go_with_the_last_descriptor_of_their_file() {
    let system = Fabric::new(1, Mode::Trapped).system();
    let file = system.open_rdma_cm().unwrap();
    bind(&file);
    assert_eq!(ids(&system), 1);
    let other: OwnedFd = file.fd().try_clone_to_owned().unwrap();
    drop(file);
    assert_eq!(ids(&system), 1, "while there is a descriptor");
    drop(other);
    assert_eq!(ids(&system), 0);
    // The port is free again, and the last handle closes a file of which there is no other descriptor.
    let file = system.open_rdma_cm().unwrap();
    bind(&file);
    drop(file);
    assert_eq!(ids(&system), 0);
}

#[test]
fn a_file_of_the_connection_manager_is_no_devices() {
    let system = Fabric::new(1, Mode::Trapped).system();
    let (device, manager) = (system.open(0).unwrap(), system.open_rdma_cm().unwrap());
    assert_eq!(system.device_of(device.fd()), Ok(Some(0)));
    assert_eq!(system.device_of(manager.fd()), Err(Errno::NOTTY));
    let file = std::fs::File::open("/dev/null").unwrap();
    assert_eq!(system.device_of(rustix::fd::AsFd::as_fd(&file)), Ok(None));
}
