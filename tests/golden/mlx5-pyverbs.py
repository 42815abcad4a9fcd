# Posts what rdma-core's programs do not, through libmlx5, between two queue pairs of mlx5_0. Lay
# this directory over the guest's root and run each function by itself:
#
#   cargo ci exec --device mlx5 --python --overlay tests/golden --record DIR -- sh -c \
#     'for name in immediate datagram window window1 access protection not_ready length; do
#        python3 /mlx5-pyverbs.py $name; done'
#
# Likewise mlx5-short.txt, of what comes in completions of both sizes and of raw packets, as root:
#
#   for size in 64 128; do MLX5_CQE_SIZE=$size python3 /mlx5-pyverbs.py scatter; done
#   for name in packet heard; do python3 /mlx5-pyverbs.py $name; done
#
# mlx5-pyverbs.txt is what `connectx golden` made of DIR/function0.record.
import os
import socket
import sys
import time

import pyverbs.enums as e
from pyverbs.addr import AH, AHAttr, GlobalRoute
from pyverbs.cq import CQ
from pyverbs.device import Context
from pyverbs.flow import Flow, FlowAttr
from pyverbs.mr import MR, MW, MWBind, MWBindInfo
from pyverbs.pd import PD
from pyverbs.qp import QP, QPAttr, QPCap, QPEx, QPInitAttr, QPInitAttrEx
from pyverbs.spec import EthSpec
from pyverbs.wr import SGE, RecvWR, SendWR

SIGNALED, FENCE = e.IBV_SEND_SIGNALED, e.IBV_SEND_FENCE
SOLICITED, INLINE = e.IBV_SEND_SOLICITED, e.IBV_SEND_INLINE
GID_INDEX = 3
QKEY = 0x22222222
REMOTE, LANDING = 16384, 32768
ACCESS = (e.IBV_ACCESS_LOCAL_WRITE | e.IBV_ACCESS_REMOTE_WRITE | e.IBV_ACCESS_REMOTE_READ
          | e.IBV_ACCESS_REMOTE_ATOMIC | e.IBV_ACCESS_MW_BIND)
CAP = QPCap(max_send_wr=64, max_recv_wr=16, max_send_sge=8, max_recv_sge=4, max_inline_data=128)


class Pair:
    """Two queue pairs of one kind, connected to each other."""

    def __init__(self, kind=e.IBV_QPT_RC, extended=None, signal_all=0):
        self.signal_all = signal_all
        self.ctx = Context(name='mlx5_0')
        self.pd = PD(self.ctx)
        self.cq = CQ(self.ctx, 128)
        self.mr = MR(self.pd, 65536, ACCESS)
        self.kind = kind
        gid = self.ctx.query_gid(1, GID_INDEX)
        route = GlobalRoute(dgid=gid, sgid_index=GID_INDEX)
        self.path = AHAttr(port_num=1, is_global=True, gr=route, dlid=1)
        self.qps = [self.queue_pair(extended) for _ in range(2)]
        if kind == e.IBV_QPT_UD:
            self.ah = AH(self.pd, attr=self.path)
            return
        for qp, peer in zip(self.qps, reversed(self.qps)):
            attr = QPAttr(port_num=1)
            attr.qp_access_flags = ACCESS
            attr.dest_qp_num = peer.qp_num
            attr.path_mtu = e.IBV_MTU_1024
            attr.max_dest_rd_atomic = attr.max_rd_atomic = 1
            attr.min_rnr_timer, attr.timeout = 12, 14
            attr.retry_cnt, attr.rnr_retry = 3, 2
            attr.ah_attr = self.path
            qp.to_rts(attr)

    def queue_pair(self, extended):
        if extended is not None:
            mask = e.IBV_QP_INIT_ATTR_PD | e.IBV_QP_INIT_ATTR_SEND_OPS_FLAGS
            init = QPInitAttrEx(qp_type=self.kind, scq=self.cq, rcq=self.cq, cap=CAP, pd=self.pd,
                                sq_sig_all=0, comp_mask=mask, send_ops_flags=extended)
            return QPEx(self.ctx, init)
        init = QPInitAttr(qp_type=self.kind, scq=self.cq, rcq=self.cq, cap=CAP,
                          sq_sig_all=self.signal_all)
        if self.kind != e.IBV_QPT_UD:
            return QP(self.pd, init)
        attr = QPAttr(port_num=1)
        attr.qkey = QKEY
        return QP(self.pd, init, attr)

    def piece(self, at, length, key=None):
        return SGE(self.mr.buf + at, length, self.mr.lkey if key is None else key)

    def receive(self, count=1, length=4096, side=1):
        for _ in range(count):
            self.qps[side].post_recv(RecvWR(num_sge=1, sg=[self.piece(LANDING, length)]))

    def poll(self, quiet=0.15):
        end = time.time() + quiet
        while time.time() < end:
            count, completions = self.cq.poll(8)
            for completion in completions:
                print('status', completion.status, 'queue pair', completion.qp_num)
            if count:
                end = time.time() + quiet

    def post(self, opcode, pieces, flags=SIGNALED, imm=0, rkey=None):
        wr = SendWR(opcode=opcode, num_sge=len(pieces), sg=pieces, imm_data=imm, send_flags=flags)
        if self.kind == e.IBV_QPT_UD:
            wr.set_wr_ud(self.ah, self.qps[1].qp_num, QKEY)
        if opcode in (e.IBV_WR_RDMA_WRITE, e.IBV_WR_RDMA_WRITE_WITH_IMM, e.IBV_WR_RDMA_READ):
            wr.set_wr_rdma(self.mr.rkey if rkey is None else rkey, self.mr.buf + REMOTE)
        self.qps[0].post_send(wr)
        self.poll()

    def build(self, make, side=0):
        qp = self.qps[side]
        qp.wr_start()
        qp.wr_id, qp.wr_flags = 1, SIGNALED
        make(qp)
        qp.wr_complete()
        self.poll()


def immediate():
    pair = Pair()
    pair.receive(12)
    one, two = [pair.piece(0, 16)], [pair.piece(0, 16), pair.piece(64, 32)]
    short = [pair.piece(0, 5), pair.piece(64, 7)]
    pair.post(e.IBV_WR_SEND_WITH_IMM, one, imm=0x12345678)
    pair.post(e.IBV_WR_SEND, one, SIGNALED | SOLICITED)
    pair.post(e.IBV_WR_SEND, one, SIGNALED | FENCE)
    pair.post(e.IBV_WR_SEND, one, 0)
    pair.post(e.IBV_WR_SEND, two)
    pair.post(e.IBV_WR_SEND, [pair.piece(n * 64, 8 + n) for n in range(5)])
    pair.post(e.IBV_WR_SEND, short, SIGNALED | INLINE)
    pair.post(e.IBV_WR_SEND_WITH_IMM, short, SIGNALED | INLINE, imm=0x12345678)
    pair.post(e.IBV_WR_RDMA_WRITE_WITH_IMM, one, imm=0x12345678)
    pair.post(e.IBV_WR_RDMA_WRITE_WITH_IMM, short, SIGNALED | INLINE | SOLICITED, imm=0x12345678)
    pair.post(e.IBV_WR_RDMA_WRITE, two)
    pair.post(e.IBV_WR_RDMA_WRITE, short, SIGNALED | INLINE)
    pair.post(e.IBV_WR_RDMA_READ, two, SIGNALED | FENCE)


def datagram():
    pair = Pair(e.IBV_QPT_UD)
    pair.receive(4)
    one, short = [pair.piece(0, 16)], [pair.piece(0, 5), pair.piece(64, 7)]
    pair.post(e.IBV_WR_SEND_WITH_IMM, one, imm=0x12345678)
    pair.post(e.IBV_WR_SEND, one, SIGNALED | SOLICITED)
    pair.post(e.IBV_WR_SEND, short, SIGNALED | INLINE)


def window():
    pair = Pair(extended=e.IBV_QP_EX_WITH_BIND_MW | e.IBV_QP_EX_WITH_SEND_WITH_INV
                | e.IBV_QP_EX_WITH_LOCAL_INV | e.IBV_QP_EX_WITH_SEND)
    pair.receive(2)
    window = MW(pair.pd, e.IBV_MW_TYPE_2)
    rights = e.IBV_ACCESS_REMOTE_WRITE | e.IBV_ACCESS_REMOTE_READ
    info = MWBindInfo(pair.mr, pair.mr.buf + 4096, 8192, rights)
    key = window.rkey
    for side in range(2):
        key = key & ~0xff | key + 1 & 0xff
        pair.build(lambda qp: qp.wr_bind_mw(window, key, info), side)
        if side == 0:
            pair.build(lambda qp: qp.wr_local_inv(key))

    def send(qp):
        qp.wr_send_inv(key)
        qp.wr_set_sge(pair.piece(0, 16))

    pair.build(send)
    # Without any data.
    pair.build(lambda qp: qp.wr_send())


def window1():
    pair = Pair()
    window = MW(pair.pd, e.IBV_MW_TYPE_1)
    info = MWBindInfo(pair.mr, pair.mr.buf + 4096, 8192, e.IBV_ACCESS_REMOTE_WRITE)
    pair.qps[0].bind_mw(window, MWBind(info, SIGNALED))
    pair.poll()


def access():
    pair = Pair()
    pair.receive(2)
    pair.receive(2, side=0)
    pair.post(e.IBV_WR_RDMA_WRITE, [pair.piece(0, 16)], rkey=pair.mr.rkey ^ 1)
    pair.post(e.IBV_WR_SEND, [pair.piece(0, 16)])


def protection():
    pair = Pair()
    pair.post(e.IBV_WR_SEND, [pair.piece(0, 16, pair.mr.lkey ^ 1)])


def not_ready():
    pair = Pair()
    pair.post(e.IBV_WR_SEND, [pair.piece(0, 16)])
    pair.poll(1)


def length():
    pair = Pair()
    pair.receive(length=8)
    pair.post(e.IBV_WR_SEND, [pair.piece(0, 16)])


def scatter():
    pair = Pair(signal_all=1)
    data = bytes(range(1, 65))
    for at in (0, REMOTE):
        pair.mr.write(data, len(data), at)
    pair.receive(2)
    for size in (16, 48):
        pair.post(e.IBV_WR_SEND, [pair.piece(0, size)])
        pair.post(e.IBV_WR_RDMA_READ, [pair.piece(0, size)])
    wr = SendWR(opcode=e.IBV_WR_ATOMIC_FETCH_AND_ADD, num_sge=1, sg=[pair.piece(0, 8)],
                send_flags=SIGNALED)
    wr.set_wr_atomic(pair.mr.rkey, pair.mr.buf + REMOTE, 5, 0)
    pair.qps[0].post_send(wr)
    pair.poll()


def packet():
    ctx = Context(name='mlx5_0')
    pd = PD(ctx)
    cq = CQ(ctx, 128)
    mr = MR(pd, 65536, ACCESS)
    init = QPInitAttr(qp_type=e.IBV_QPT_RAW_PACKET, scq=cq, rcq=cq, cap=CAP, sq_sig_all=0)
    qp = QP(pd, init, QPAttr(port_num=1))
    ethernet = bytes([0xff] * 6 + [2, 0, 0, 0, 0, 1, 0x88, 0xb5])
    internet = bytes.fromhex('4500002800000000401100000a0000010a0000020001000200140000')
    frame = ethernet[:12] + bytes([8, 0]) + internet + bytes(range(12))
    mr.write(frame, len(frame))
    qp.post_recv(RecvWR(num_sge=1, sg=[SGE(mr.buf + LANDING, 4096, mr.lkey)]))

    def post(pieces, flags=SIGNALED):
        sges = [SGE(mr.buf + at, length, mr.lkey) for at, length in pieces]
        qp.post_send(SendWR(opcode=e.IBV_WR_SEND, num_sge=len(sges), sg=sges, send_flags=flags))
        end = time.time() + 0.15
        while time.time() < end:
            cq.poll(8)

    whole = [(0, len(frame))]
    post(whole)
    post(whole, 0)
    post(whole, SIGNALED | e.IBV_SEND_IP_CSUM)
    post(whole, SIGNALED | SOLICITED)
    post([(0, 14), (14, len(frame) - 14)])
    post([(0, 5), (5, 20), (25, len(frame) - 25)], SIGNALED | e.IBV_SEND_IP_CSUM)
    post(whole, SIGNALED | INLINE)
    post([(0, 20), (20, len(frame) - 20)], SIGNALED | INLINE | e.IBV_SEND_IP_CSUM)


def heard():
    ctx = Context(name='mlx5_0')
    pd = PD(ctx)
    cq = CQ(ctx, 128)
    mr = MR(pd, 65536, ACCESS)
    init = QPInitAttr(qp_type=e.IBV_QPT_RAW_PACKET, scq=cq, rcq=cq, cap=CAP, sq_sig_all=0)
    qp = QP(pd, init, QPAttr(port_num=1))
    two = [SGE(mr.buf + LANDING, 20, mr.lkey), SGE(mr.buf + LANDING + 64, 4000, mr.lkey)]
    qp.post_recv(RecvWR(num_sge=2, sg=two))
    qp.post_recv(RecvWR(num_sge=1, sg=two[1:]))
    attr = FlowAttr(num_of_specs=1, port=1)
    attr.specs.append(EthSpec(dst_mac='ff:ff:ff:ff:ff:ff', ether_type=0x88b5))
    flow = Flow(qp, attr)
    for name in sorted(os.listdir('/sys/class/infiniband/mlx5_1/device/net')):
        wire = socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
        wire.bind((name, 0))
        for _ in range(2):
            wire.send(bytes([0xff] * 6 + [2, 0, 0, 0, 0, 1, 0x88, 0xb5]) + bytes(46))
    end = time.time() + 0.5
    while time.time() < end:
        cq.poll(8)
    flow.close()


globals()[sys.argv[1]]()
