"""The order of tests over xdist's workers, so that no device is idle by accident."""
