"""Sessions on a Ray cluster: their machines, places and leases."""
