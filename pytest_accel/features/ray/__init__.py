"""Sessions on a Ray cluster (``--accel-cluster ray``): their machines, places and leases.

A helper process talks to Ray, so that the controller never imports it. Ray reserves a place for each world. An actor on
each node that is used starts an agent there, which joins the session as one of its machines and forks ranks.
Node is Ray's term: ``ray start`` makes a node, and a machine may have several. For the session, each node is a machine.

This feature uses the agents of the feature `launchers` and their connections.
"""
