# The other side of a VAR: a program that calls libmlx5 itself, of a release with functions for it. It
# takes commands over a socket that is its standard input.

import ctypes
import mmap
import os
import socket
import sys

LIBRARIES = f'/opt/rdma-core/usr/lib/{os.uname().machine}-linux-gnu/'


class Var(ctypes.Structure):
    _fields_ = [('page_id', ctypes.c_uint32), ('length', ctypes.c_uint32),
                ('mmap_off', ctypes.c_int64), ('comp_mask', ctypes.c_uint64)]


class Sizes(ctypes.Structure):
    _fields_ = [('var', ctypes.c_uint32), ('umem', ctypes.c_uint32), ('object', ctypes.c_uint32)]


verbs = ctypes.CDLL(LIBRARIES + 'libibverbs.so.1', mode=ctypes.RTLD_GLOBAL, use_errno=True)
# libmlx5 registers itself, so that libibverbs searches for no other driver.
mlx5 = ctypes.CDLL(LIBRARIES + 'libmlx5.so.1', use_errno=True)
for function in (verbs.ibv_get_device_list, verbs.ibv_open_device, verbs.ibv_import_device):
    function.restype = ctypes.c_void_p
verbs.ibv_get_device_name.restype = ctypes.c_char_p
for function in (mlx5.mlx5dv_alloc_var, mlx5.mlx5dv_var_import):
    function.restype = ctypes.POINTER(Var)

wire = socket.socket(fileno=0)


def some(answer, what):
    if not answer:
        raise OSError(ctypes.get_errno(), what)
    return answer


def ring(file, var, value):
    """Writes a doorbell if there is a value, and returns the value in the page."""
    with mmap.mmap(file, var.length, mmap.MAP_SHARED, offset=var.mmap_off) as page:
        word = ctypes.c_uint32.from_buffer(page)
        if value is not None:
            word.value = value
        seen = word.value
        del word
        return seen


def talk(file, var):
    """Carries out commands until one ends the conversation; returns that one."""
    while True:
        word, *rest = wire.recv(4096).decode().split()
        if word == 'ring':
            wire.send(f'{ring(file, var.contents, int(rest[0]))}'.encode())
        elif word == 'look':
            wire.send(f'{ring(file, var.contents, None)}'.encode())
        else:
            return word


def bye(context, var, word):
    if word == 'free':
        mlx5.mlx5dv_free_var(var)
    else:
        mlx5.mlx5dv_var_unimport(var)
    verbs.ibv_close_device(ctypes.c_void_p(context))
    wire.send(b'left')


def take():
    """Imports the VAR that it is sent."""
    blob, files, _, _ = socket.recv_fds(wire, 4096, 1)
    # libibverbs takes ownership of a descriptor.
    context = some(verbs.ibv_import_device(os.dup(files[0])), 'import_device')
    data = ctypes.create_string_buffer(bytes.fromhex(blob.decode()), 24)
    var = some(mlx5.mlx5dv_var_import(ctypes.c_void_p(context), data), 'var_import')
    told = var.contents
    wire.send(f'{told.page_id} {told.length} {told.mmap_off}'.encode())
    bye(context, var, talk(files[0], var))


def is_device(number):
    try:
        return os.readlink(f'/proc/self/fd/{number}').startswith('/dev/infiniband/uverbs')
    except FileNotFoundError:
        return False


def give(name):
    """Allocates a VAR, and hands out the context and the export that names the VAR."""
    devices = some(verbs.ibv_get_device_list(None), 'get_device_list')
    each = ctypes.cast(devices, ctypes.POINTER(ctypes.c_void_p))
    at = 0
    while verbs.ibv_get_device_name(ctypes.c_void_p(some(each[at], name))).decode() != name:
        at += 1
    context = some(verbs.ibv_open_device(ctypes.c_void_p(each[at])), 'open_device')
    file = next(number for number in map(int, os.listdir('/proc/self/fd')) if is_device(number))
    sizes = Sizes()
    mlx5._mlx5dv_get_export_sizes(ctypes.byref(sizes), ctypes.c_size_t(ctypes.sizeof(sizes)))
    var = some(mlx5.mlx5dv_alloc_var(ctypes.c_void_p(context), 0), 'alloc_var')
    data = ctypes.create_string_buffer(sizes.var)
    if mlx5.mlx5dv_var_export(var, data):
        raise OSError('var_export')
    socket.send_fds(wire, [f'{sizes.var} {data.raw.hex()}'.encode()], [file])
    bye(context, var, talk(file, var))


if sys.argv[1] == 'give':
    give(sys.argv[2])
else:
    take()
