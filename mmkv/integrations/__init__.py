"""Engines that mmkv knows, for their users to import: `transformers`. Nothing else of mmkv imports them."""
