"""Sessions on a Ray cluster (``--accel-cluster ray``): their machines, places and leases.

A helper process talks to Ray, so that the controller never imports it. Ray reserves a place for each world, an actor on
each node that is used starts an agent there, and the agent joins the session as one of its machines and forks ranks.
A node is what Ray calls so: ``ray start`` makes one, and one machine may have several. For the session, each is a
machine of its own.

It stands on the feature `launchers`: the agents and their connections are those of launched processes.
"""
