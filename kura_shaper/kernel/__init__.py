"""The only door to the kernel: netlink out, snapshots in, every operation read back."""
