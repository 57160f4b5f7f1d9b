"""Other projects' plugins in sessions with marked tests.

A plugin that collects or writes something works on rank 0, and the other ranks have it read-only or not at all.

- `rows`: data that a plugin has collected on rank 0 and the driver adds to its own, a row for each plugin.
- `restrictions`: uses of a plugin that ranks other than 0, or all ranks, refuse.
- `refusals`: uses of plugins that cannot work with marked tests.
- `allure`, `benchmark`: plugins that need more.

These modules are imported only in sessions that have marked tests, and import no plugin before it is loaded. Other
plugins lose the data of ranks; a conftest can bring them to the driver with two hooks, as docs/reference/plugins.md
shows.
"""
