"""Launchers of many processes: scripts under one, and pytest itself under one."""
