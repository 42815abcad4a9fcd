# The other side of an import: a program of rdma-core's bindings, which takes commands over a socket
# that is its standard input.

import socket
import sys

from pyverbs.addr import AHAttr, GlobalRoute
from pyverbs.cq import CQ
from pyverbs.device import Context
from pyverbs.enums import (
    IBV_ACCESS_LOCAL_WRITE, IBV_ACCESS_REMOTE_READ, IBV_ACCESS_REMOTE_WRITE,
    IBV_QPT_RC, IBV_SEND_SIGNALED, IBV_WR_RDMA_WRITE)
from pyverbs.mr import MR
from pyverbs.pd import PD
from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr
from pyverbs.wr import SGE, SendWR

ACCESS = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE

wire = socket.socket(fileno=0)


def export(device, length):
    """Registers memory, and hands out the context and two handles."""
    context = Context(name=device)
    pd = PD(context)
    region = MR(pd, int(length), ACCESS)
    region.write('A' * int(length), int(length))
    text = f'{pd.handle} {region.handle} {region.lkey} {region.rkey} {region.buf}'
    socket.send_fds(wire, [text.encode()], [context.cmd_fd])
    while True:
        word = wire.recv(4096).decode()
        if word == 'leave':
            break
        wire.send(region.read(int(length), 0)[:4000])
    # The objects still exist, or this fails: no other process destroyed them.
    region.close()
    pd.close()
    context.close()
    wire.send(b'left')


def copy(context, pd, region, addr, half, port, gid_index, mtu):
    """Writes the first half of an imported region to its second."""
    cq = CQ(context, 4)

    def make():
        init = QPInitAttr(qp_type=IBV_QPT_RC, scq=cq, rcq=cq, cap=QPCap(max_send_wr=2))
        return QP(pd, init)

    def connect(queue, other):
        route = GlobalRoute(dgid=context.query_gid(port, gid_index), sgid_index=gid_index)
        attr = QPAttr(port_num=port)
        attr.qp_access_flags = ACCESS
        attr.dest_qp_num = other.qp_num
        attr.path_mtu = mtu
        attr.max_rd_atomic = 1
        attr.max_dest_rd_atomic = 1
        attr.min_rnr_timer = 12
        attr.timeout = 14
        attr.retry_cnt = 7
        attr.rnr_retry = 7
        # InfiniBand routes by LID; on Ethernet the port has none.
        lid = context.query_port(port).lid
        attr.ah_attr = AHAttr(port_num=port, dlid=lid, is_global=1, gr=route)
        queue.to_rts(attr)

    left, right = make(), make()
    connect(left, right)
    connect(right, left)
    request = SendWR(opcode=IBV_WR_RDMA_WRITE, send_flags=IBV_SEND_SIGNALED, num_sge=1,
                     sg=[SGE(addr, half, region.lkey)])
    request.set_wr_rdma(region.rkey, addr + half)
    left.post_send(request)
    found = []
    while not found:
        _, found = cq.poll()
    left.close()
    right.close()
    cq.close()
    return found[0].status


def take(port, gid_index, mtu):
    """Imports the objects that it is sent, works with them and forgets them."""
    text, files, _, _ = socket.recv_fds(wire, 4096, 1)
    pd_handle, region_handle, addr, half = (int(word) for word in text.decode().split())
    context = Context(cmd_fd=files[0])
    pd = PD(context, handle=pd_handle)
    region = MR(pd, handle=region_handle)
    keys = f'{region.lkey} {region.rkey}'
    status = copy(context, pd, region, addr, half, int(port), int(gid_index), int(mtu))
    region.unimport()
    pd.unimport()
    context.close()
    wire.send(f'{keys} {status}'.encode())


if sys.argv[1] == 'export':
    export(*sys.argv[2:])
else:
    take(*sys.argv[2:])
