"""What the datapath costs on this machine: ours beside a bare device and a tree made by hand, in one run."""
