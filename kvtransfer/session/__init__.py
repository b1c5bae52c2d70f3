"""What the two ends of a connection tell each other before and after pages move, shared by ucx and nixl.

frames.py      the messages
sending.py     the sender's side: pushes become batches, which are offered, granted and sent
receiving.py   the receiver's side: who may connect, and which batches were granted
"""
