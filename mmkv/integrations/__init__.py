"""Engines that mmkv knows: one module each, imported by who uses it."""
