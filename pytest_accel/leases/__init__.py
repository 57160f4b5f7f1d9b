"""Leases on devices and CPU slots: the policy, the broker that applies it, and the locks between sessions."""
