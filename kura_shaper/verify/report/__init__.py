"""A report for people, for programs, for CI, as a page with plots, and as a bundle that convinces somebody else."""
