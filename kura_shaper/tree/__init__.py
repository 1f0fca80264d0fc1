"""The wanted tree and the actual one as values, and the plan that leads from one to the other.

Pure: no clock, no kernel, no third-party import.
"""
