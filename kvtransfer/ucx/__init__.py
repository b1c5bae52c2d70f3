"""Pages over UCX (ucxx), endpoint error handling on: TCP unless UCX is told otherwise.

transport.py    what callers see, on the event loop
reactor.py      the thread that owns UCX
connection.py   one connection; outgoing.py its sender's side, incoming.py its receiver's side
"""
