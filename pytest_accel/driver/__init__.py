"""Marked items in the pytest process that reports them."""
