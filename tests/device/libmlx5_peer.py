# The other side of VARs and of objects of DEVX: a program that calls libmlx5 itself, of a release with functions to
# export and import them. It takes commands over a socket that is its standard input.

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


class ContextAttributes(ctypes.Structure):
    _fields_ = [('flags', ctypes.c_uint32), ('comp_mask', ctypes.c_uint64), ('fds', ctypes.c_void_p)]


class Umem(ctypes.Structure):
    _fields_ = [('umem_id', ctypes.c_uint32)]


verbs = ctypes.CDLL(LIBRARIES + 'libibverbs.so.1', mode=ctypes.RTLD_GLOBAL, use_errno=True)
# libmlx5 registers itself, so that libibverbs searches for no other driver.
mlx5 = ctypes.CDLL(LIBRARIES + 'libmlx5.so.1', use_errno=True)
for function in (verbs.ibv_get_device_list, verbs.ibv_open_device, verbs.ibv_import_device):
    function.restype = ctypes.c_void_p
verbs.ibv_get_device_name.restype = ctypes.c_char_p
for function in (mlx5.mlx5dv_open_device, mlx5.mlx5dv_devx_obj_create, mlx5.mlx5dv_devx_obj_import):
    function.restype = ctypes.c_void_p
for function in (mlx5.mlx5dv_devx_umem_reg, mlx5.mlx5dv_devx_umem_import):
    function.restype = ctypes.POINTER(Umem)
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


def find(name):
    """The device of this name."""
    devices = some(verbs.ibv_get_device_list(None), 'get_device_list')
    each = ctypes.cast(devices, ctypes.POINTER(ctypes.c_void_p))
    at = 0
    while verbs.ibv_get_device_name(ctypes.c_void_p(some(each[at], name))).decode() != name:
        at += 1
    return ctypes.c_void_p(each[at])


def device_file():
    return next(number for number in map(int, os.listdir('/proc/self/fd')) if is_device(number))


def export_sizes():
    sizes = Sizes()
    mlx5._mlx5dv_get_export_sizes(ctypes.byref(sizes), ctypes.c_size_t(ctypes.sizeof(sizes)))
    return sizes


def give(name):
    """Allocates a VAR, and hands out the context and the export that names the VAR."""
    context = some(verbs.ibv_open_device(find(name)), 'open_device')
    file = device_file()
    sizes = export_sizes()
    var = some(mlx5.mlx5dv_alloc_var(ctypes.c_void_p(context), 0), 'alloc_var')
    data = ctypes.create_string_buffer(sizes.var)
    if mlx5.mlx5dv_var_export(var, data):
        raise OSError('var_export')
    socket.send_fds(wire, [f'{sizes.var} {data.raw.hex()}'.encode()], [file])
    bye(context, var, talk(file, var))


def checked(error, what):
    if error:
        raise OSError(error, what)


class Devx:
    """An object and a umem of DEVX, its own or imported."""

    def __init__(self, context):
        self.context = ctypes.c_void_p(context)
        self.object = self.umem = self.queue = None

    def make(self, command, length):
        out = ctypes.create_string_buffer(length)
        made = mlx5.mlx5dv_devx_obj_create(
            self.context, command, ctypes.c_size_t(len(command)), out, ctypes.c_size_t(length))
        return ctypes.c_void_p(some(made, 'obj_create')), out.raw

    def create(self, command):
        """An object, by a command, and a umem of two pages; answers the command's output and their exports."""
        self.object, out = self.make(command, 16)
        self.memory = mmap.mmap(-1, 8192)
        self.page = (ctypes.c_char * 8192).from_buffer(self.memory)
        self.umem = some(mlx5.mlx5dv_devx_umem_reg(
            self.context, self.page, ctypes.c_size_t(8192), ctypes.c_uint32(1)), 'umem_reg')
        sizes = export_sizes()
        data, place = (ctypes.create_string_buffer(size) for size in (sizes.object, sizes.umem))
        checked(mlx5.mlx5dv_devx_obj_export(self.object, data), 'obj_export')
        checked(mlx5.mlx5dv_devx_umem_export(self.umem, place), 'umem_export')
        return f'{out.hex()} {data.raw.hex()} {place.raw.hex()}'

    def take(self, data, place):
        """Imports both; answers the number of the umem."""
        self.object = ctypes.c_void_p(some(mlx5.mlx5dv_devx_obj_import(self.context, data), 'obj_import'))
        self.umem = some(mlx5.mlx5dv_devx_umem_import(self.context, place), 'umem_import')
        return f'{self.umem.contents.umem_id}'

    def query(self, command, length):
        out = ctypes.create_string_buffer(length)
        checked(mlx5.mlx5dv_devx_obj_query(
            self.object, command, ctypes.c_size_t(len(command)), out, ctypes.c_size_t(length)), 'obj_query')
        return out.raw.hex()

    def leave(self, word):
        if self.queue:
            checked(mlx5.mlx5dv_devx_obj_destroy(self.queue), 'destroy the queue')
        if word == 'destroy':
            checked(mlx5.mlx5dv_devx_obj_destroy(self.object), 'obj_destroy')
            checked(mlx5.mlx5dv_devx_umem_dereg(self.umem), 'umem_dereg')
        else:
            mlx5.mlx5dv_devx_obj_unimport(self.object)
            mlx5.mlx5dv_devx_umem_unimport(self.umem)
        verbs.ibv_close_device(self.context)
        return 'left'


def devx(context, file):
    """Carries out commands until one ends the conversation."""
    devx = Devx(context)
    while True:
        line = wire.recv(4096).decode()
        if not line:
            sys.exit()
        word, *rest = line.split()
        match word:
            case 'create':
                socket.send_fds(wire, [devx.create(bytes.fromhex(rest[0])).encode()], [file])
                continue
            case 'take':
                answer = devx.take(*map(bytes.fromhex, rest))
            case 'query':
                answer = devx.query(bytes.fromhex(rest[0]), int(rest[1]))
            case 'queue':
                devx.queue, out = devx.make(bytes.fromhex(rest[0]), 16)
                answer = out.hex()
            case _:
                wire.send(devx.leave(word).encode())
                return
        wire.send(answer.encode())


match sys.argv[1]:
    case 'give':
        give(sys.argv[2])
    case 'take':
        take()
    case 'devx' if len(sys.argv) > 2:
        while True:
            attributes = ContextAttributes(flags=1)
            opened = mlx5.mlx5dv_open_device(find(sys.argv[2]), ctypes.byref(attributes))
            devx(some(opened, 'open_device'), device_file())
    case 'devx':
        while True:
            _, files, _, _ = socket.recv_fds(wire, 4096, 1)
            if not files:
                break
            imported = verbs.ibv_import_device(os.dup(files[0]))
            devx(some(imported, 'import_device'), files[0])
            os.close(files[0])
