"""Keeps a node's tree in step with its source, for as long as the node runs, and tells what it sees."""
