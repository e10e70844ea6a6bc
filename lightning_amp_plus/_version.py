"""The version of the package: its only source, read by the build backend and by ``lightning_amp_plus.__version__``."""

__version__ = "0.1.0"
