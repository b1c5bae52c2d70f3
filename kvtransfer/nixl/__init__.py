"""Pages by one-sided writes, straight into the receiver's reserved pages.

transport.py   what callers see, on the event loop
link.py        one connection: frames over TCP; outgoing.py its sender's side, incoming.py its receiver's side
farewell.py    what a sender says when its end of a connection that broke is gone
details.py     what these frames say that other transports' don't
writer.py      the thread on which a connection writes, through a door:
neighbour.py   the kernel, into the host memory of a process of the same machine
agent.py       NIXL's UCX back end: from GPU to GPU, and by RDMA or TCP to another machine; every call into it
process.py     which process is at the other end, and when it is gone

Nobody can refuse a one-sided write. So a sender writes only what was granted, and a landing that was given up stays
unsettled until the sender has said that this connection is over, or its process is gone; over a network it is enough
that the receiver's NIXL agent, one a connection, is destroyed. See docs/decisions/0013 and, for GPUs, 0023.
"""
