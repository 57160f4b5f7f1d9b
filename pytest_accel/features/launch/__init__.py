"""The `launch` fixture: it runs a script under a launcher, such as torchrun, on the devices of a test."""
