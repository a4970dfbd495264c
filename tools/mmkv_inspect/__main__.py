"""`python -m mmkv_inspect`."""

from mmkv_inspect.cli import main

main()
