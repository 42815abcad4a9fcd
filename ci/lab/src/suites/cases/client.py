# Short-lived clients, one process each. Every second one ends without destroying anything, so that
# the kernel has to. Used by soak.rs; the argument is how many.
import os, sys
import pyverbs.enums as e
from pyverbs.cq import CQ, CompChannel
from pyverbs.device import Context
from pyverbs.mr import MR
from pyverbs.pd import PD
from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr
from pyverbs.srq import SRQ, SrqAttr, SrqInitAttr

def client(number):
    context = Context(name="mlx5_%d" % (number % 4 // 2))
    domain = PD(context)
    region = MR(domain, 65536, e.IBV_ACCESS_LOCAL_WRITE | e.IBV_ACCESS_REMOTE_WRITE)
    channel = CompChannel(context)
    queue = CQ(context, 64, None, channel, 0)
    shared = SRQ(domain, SrqInitAttr(SrqAttr(max_wr=64)))
    kind = [e.IBV_QPT_RC, e.IBV_QPT_UC, e.IBV_QPT_UD][number % 3]
    pair = QP(domain, QPInitAttr(qp_type=kind, scq=queue, rcq=queue, cap=QPCap()), QPAttr())
    if number % 2 == 0:
        for thing in (pair, shared, queue, channel, region, domain, context):
            thing.close()

for number in range(int(sys.argv[1])):
    child = os.fork()
    if child == 0:
        client(number)
        os._exit(0)
    if os.waitpid(child, 0)[1] != 0:
        sys.exit("client %d ended with a failure" % number)
