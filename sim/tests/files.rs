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
    assert_eq!(try_write(file, cmd, request, room), Ok(()));
}

fn try_write<T: IntoBytes + Immutable>(
    file: &Arc<dyn HostFile>,
    cmd: u32,
    request: &T,
    room: u16,
) -> Result<(), Errno> {
    let r#in = size_of::<T>() as u16;
    let header = rdma_ucm_cmd_hdr { cmd, r#in, out: room };
    let bytes = [header.as_bytes(), request.as_bytes()].concat();
    // SAFETY: the answer's place is the caller's, with so much room.
    let written = unsafe { file.write(&bytes) }?;
    assert_eq!(written, bytes.len());
    Ok(())
}

/// The address of a value that a command fills in.
fn place<T>(value: &mut T) -> u64 {
    std::ptr::from_mut(value).expose_provenance() as u64
}

/// Creates an id and binds it to the address of the first device; returns its number.
fn bind(file: &Arc<dyn HostFile>) -> u32 {
    let mut answer = rdma_ucm_create_id_resp::new_zeroed();
    let response = place(&mut answer);
    let ps = rdma_ucm_port_space::RDMA_PS_TCP.0;
    let create = rdma_ucm_create_id { uid: 1, response, ps, ..Default::default() };
    write(file, RDMA_USER_CM_CMD_CREATE_ID, &create, size_of_val(&answer) as u16);
    let address = sockaddr_in { sin_family: 2, sin_addr: [10, 0, 0, 1], ..Default::default() };
    let mut bind = rdma_ucm_bind { id: answer.id, ..rdma_ucm_bind::new_zeroed() };
    bind.addr_size = size_of_val(&address) as u16;
    bind.addr[..size_of_val(&address)].copy_from_slice(address.as_bytes());
    write(file, RDMA_USER_CM_CMD_BIND, &bind, 0);
    bind.id
}

/// Resolves the first device's address, which is the id's own.
fn resolve_address(file: &Arc<dyn HostFile>, id: u32) {
    let to = sockaddr_in { sin_family: 2, sin_addr: [10, 0, 0, 1], ..Default::default() };
    let mut resolve = rdma_ucm_resolve_addr { id, ..rdma_ucm_resolve_addr::new_zeroed() };
    resolve.dst_size = size_of_val(&to) as u16;
    resolve.dst_addr[..size_of_val(&to)].copy_from_slice(to.as_bytes());
    write(file, RDMA_USER_CM_CMD_RESOLVE_ADDR, &resolve, 0);
    take_event(file, id);
}

/// Reads an event of the id, which tells no error.
fn take_event(file: &Arc<dyn HostFile>, id: u32) {
    let mut event = rdma_ucm_event_resp::new_zeroed();
    let get = rdma_ucm_get_event { response: place(&mut event) };
    write(file, RDMA_USER_CM_CMD_GET_EVENT, &get, size_of_val(&event) as u16);
    assert_eq!((event.id, event.status), (id, 0));
}

fn ids(system: &Arc<dyn HostSystem>) -> u64 {
    let counts = system.resources(0).unwrap();
    counts.into_iter().find(|(kind, _)| kind == "cm_id").unwrap().1
}

#[test]
fn ids_are_destroyed_with_the_last_descriptor_of_their_file() {
    let system = Fabric::new(1, Mode::Trapped).system();
    let file = system.open_rdma_cm().unwrap();
    bind(&file);
    assert_eq!(ids(&system), 1);
    let other: OwnedFd = file.fd().try_clone_to_owned().unwrap();
    drop(file);
    assert_eq!(ids(&system), 1, "while there is a descriptor");
    drop(other);
    assert_eq!(ids(&system), 0);
    // The port is free again, and the last handle closes a file without another descriptor.
    let file = system.open_rdma_cm().unwrap();
    bind(&file);
    drop(file);
    assert_eq!(ids(&system), 0);
}

#[test]
fn an_id_that_migrates_tells_how_many_events_were_read() {
    let system = Fabric::new(1, Mode::Trapped).system();
    let (old, new) = (system.open_rdma_cm().unwrap(), system.open_rdma_cm().unwrap());
    let id = bind(&old);
    resolve_address(&old, id);
    let mut moved = rdma_ucm_migrate_resp::new_zeroed();
    let fd = rustix::fd::AsRawFd::as_raw_fd(&old.fd()) as u32;
    let migrate = rdma_ucm_migrate_id { response: place(&mut moved), id, fd };
    write(&new, RDMA_USER_CM_CMD_MIGRATE_ID, &migrate, size_of_val(&moved) as u16);
    let mut gone = rdma_ucm_destroy_id_resp::new_zeroed();
    let destroy = rdma_ucm_destroy_id { response: place(&mut gone), id, ..Default::default() };
    write(&new, RDMA_USER_CM_CMD_DESTROY_ID, &destroy, size_of_val(&gone) as u16);
    assert_eq!((moved.events_reported, gone.events_reported), (1, 1));
}

#[test]
fn a_file_of_the_connection_manager_belongs_to_no_device() {
    let system = Fabric::new(1, Mode::Trapped).system();
    let (device, manager) = (system.open(0).unwrap(), system.open_rdma_cm().unwrap());
    assert_eq!(system.device_of(device.fd()), Ok(Some(0)));
    assert_eq!(system.device_of(manager.fd()), Err(Errno::NOTTY));
    let file = std::fs::File::open("/dev/null").unwrap();
    assert_eq!(system.device_of(rustix::fd::AsFd::as_fd(&file)), Ok(None));
}

/// A request to connect has 56 bytes beside the addresses.
#[test]
fn private_data_that_its_message_has_no_room_for_is_refused() {
    let file = Fabric::new(1, Mode::Trapped).system().open_rdma_cm().unwrap();
    let id = bind(&file);
    resolve_address(&file, id);
    let route = rdma_ucm_resolve_route { id, ..Default::default() };
    write(&file, RDMA_USER_CM_CMD_RESOLVE_ROUTE, &route, 0);
    take_event(&file, id);
    let mut connect = rdma_ucm_connect { id, ..rdma_ucm_connect::new_zeroed() };
    connect.conn_param.valid = 1;
    connect.conn_param.private_data_len = 57;
    assert_eq!(try_write(&file, RDMA_USER_CM_CMD_CONNECT, &connect, 0), Err(Errno::INVAL));
    connect.conn_param.private_data_len = 56;
    write(&file, RDMA_USER_CM_CMD_CONNECT, &connect, 0);
}
