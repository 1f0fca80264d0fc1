"""`python -m kura_shaper` is the command `kura-shaper`."""

from kura_shaper.cli.main import run

run()
