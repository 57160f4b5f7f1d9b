"""Vendors: one module for each kind of device, and helpers that several of them use."""
