"""Pages over UCX (ucxx) with endpoint error handling; over TCP unless UCX is configured otherwise.

transport.py    what callers use, on the event loop
reactor.py      the thread that owns UCX
connection.py   one connection; outgoing.py its sender's side, incoming.py its receiver's side
memory.py       one-sided writes
"""
