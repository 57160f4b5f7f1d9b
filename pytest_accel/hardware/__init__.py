"""The devices of a machine, their order and state, and the masks that restrict a process to some of them."""
