"""Pages by one-sided writes, directly into the receiver's reserved pages.

transport.py     what callers use, on the event loop
connection.py    one connection: frames over TCP; outgoing.py its sender's side, incoming.py its receiver's side
handshake.py     what the two ends tell each other when they connect
close_notice.py  tells a receiver that nothing is being written over a broken connection
writer.py        the thread on which a connection writes, through one of two back ends:
same_host.py     the kernel, into the host memory of another process of this machine
agent.py         NIXL: from GPU to GPU, and by RDMA or TCP to another machine; every call into it
page_stream.py   without either: pages as frames of the connection, copied by both ends
process.py       which process is at the other end, and when it has ended

A receiver cannot refuse a one-sided write. So a sender writes only what was granted, and a landing that was given up
stays unsettled until the sender has given notice that the connection is closed, or its process has ended. Over a
network it is enough to destroy the receiver's NIXL agent (each connection has one). See docs/decisions/0013 and, for
GPUs, 0023.

A process with ucxx has such a transport as well, without NIXL, for peers that use nixl. See docs/decisions/0033.
"""
