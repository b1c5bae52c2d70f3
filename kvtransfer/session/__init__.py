"""What the two ends of a connection agree on before and after pages move; how they move is the transport's.

frames.py      what they say to each other
sending.py     the sender's side: pushes become batches, offered, granted, sent
receiving.py   the receiver's side: who may connect, and what was granted to it
"""
