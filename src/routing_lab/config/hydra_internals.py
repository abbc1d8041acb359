"""Everything this package takes from Hydra's private modules: a new version of Hydra is met here and nowhere else."""

from __future__ import annotations

from hydra._internal.callbacks import Callbacks
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.utils import create_config_search_path, get_args_parser

__all__ = ["BasicSweeper", "Callbacks", "ConfigLoaderImpl", "create_config_search_path", "get_args_parser"]
