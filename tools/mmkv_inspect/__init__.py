"""mmkv-inspect: see what a pool holds and drop what it should not, also while its engine runs."""
