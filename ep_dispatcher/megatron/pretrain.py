"""Launcher: Megatron's GPT pre-training with ep_dispatcher as the token dispatcher.

    torchrun --nproc-per-node 8 -m ep_dispatcher.megatron.pretrain <usual Megatron arguments> \
        --ep-dispatcher-config job.yaml --ep-dispatcher num_sms=24 precision=exact

The YAML file holds our section (`ep_dispatcher: {num_sms: 24}`); single settings on the command
line come on top. Give Megatron `--moe-token-dispatcher-type alltoall`, or `flex` together with
`--moe-flex-dispatcher-backend hybridep`; which of them makes no difference.

Needs megatron-core 0.17 or later, whose wheels carry `megatron.training`, and a GPU.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml

from ep_dispatcher.errors import ConfigError, UnavailableError
from ep_dispatcher.megatron.compat import leave_sms
from ep_dispatcher.megatron.options import MegatronOptions

SECTION = "ep_dispatcher"


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add our arguments to Megatron's parser (its `extra_args_provider`)."""
    group = parser.add_argument_group("ep_dispatcher")
    group.add_argument(
        "--ep-dispatcher-config",
        metavar="PATH",
        help=f"YAML file with a mapping {SECTION!r}; other keys in it are ignored",
    )
    group.add_argument(
        "--ep-dispatcher",
        metavar="KEY=VALUE",
        nargs="*",
        default=[],
        help="settings on top of the file, for example num_sms=24 tier=device",
    )
    return parser


def options_from_args(args: argparse.Namespace) -> MegatronOptions:
    """Options from the file and the single settings.

    Raises:
        ConfigError: a file without the section, a malformed setting, an unknown key, or a value
            out of its range.
    """
    section: dict[str, Any] = {}
    if args.ep_dispatcher_config is not None:
        section |= read_section(Path(args.ep_dispatcher_config))
    return MegatronOptions.from_section(section | parse_settings(args.ep_dispatcher))


def read_section(path: Path) -> dict[str, Any]:
    """The `ep_dispatcher:` mapping of a YAML file; an empty one gives defaults.

    Raises:
        ConfigError: the file cannot be read as YAML, or has no such mapping.
    """
    try:
        content = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"--ep-dispatcher-config {path}: {error}") from error
    if not isinstance(content, dict) or SECTION not in content:
        raise ConfigError(f"--ep-dispatcher-config {path} has no mapping {SECTION!r}")
    section = content[SECTION]
    if section is not None and not isinstance(section, dict):
        raise ConfigError(f"{SECTION!r} in {path} is {section!r}; it must be a mapping")
    return dict(section or {})


def parse_settings(settings: Sequence[str]) -> dict[str, Any]:
    """Read settings such as "num_sms=24"; values are YAML.

    Raises:
        ConfigError: a setting without "=".
    """
    section = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals:
            raise ConfigError(f"--ep-dispatcher got {setting!r}; it must be KEY=VALUE")
        section[key] = yaml.safe_load(value)
    return section


def require_training() -> None:
    """Check that this megatron-core carries `megatron.training`.

    Raises:
        UnavailableError: it does not, as 0.16 does not, or there is none.
    """
    try:
        found = importlib.util.find_spec("megatron.training") is not None
    except ModuleNotFoundError:
        found = False
    if not found:
        raise UnavailableError(
            "this launcher needs megatron.training, which the wheels of megatron-core carry from "
            "0.17 on (Python 3.12): pip install 'megatron-core>=0.17,<0.20', or call "
            "ep_dispatcher.megatron.swap_dispatchers in your own script"
        )


def skip_needless_compilation() -> None:
    """Let `pretrain` start from a wheel.

    It runs `make` on the dataset helpers and exits where that fails; the wheels (seen in 0.17.0,
    0.18.0 and 0.19.2) bring the helpers compiled, but no makefile. In that case, and only in this
    launcher, the step is left out. It is the one thing of Megatron that is replaced here.
    """
    from megatron.core.datasets import utils

    compiled = importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is not None
    if compiled and not Path(utils.__file__).with_name("Makefile").exists():
        utils.compile_helpers = lambda: None


def start(
    pretrain: Callable[..., object],
    parse: Callable[[Callable[..., Any]], argparse.Namespace] | None,
    make_container: Callable[[argparse.Namespace], object] | None,
    job: dict[str, Any],
) -> None:
    """Call Megatron's `pretrain` in the form that this version has.

    Up to 0.17 `pretrain` parses the arguments itself. From 0.18 on the caller parses them and
    hands over a container of configs made from them. The other arguments have kept their names.

    Args:
        pretrain: Megatron's.
        parse: `parse_and_validate_args`, with our provider as argument; None up to 0.17.
        make_container: `pretrain_cfg_container_from_args`; None up to 0.17.
        job: dataset provider, model provider, model type and forward step, by pretrain's names.
    """
    parameters = inspect.signature(pretrain).parameters
    if "cfg_container" in parameters:
        assert parse is not None
        assert make_container is not None
        args = parse(add_arguments)
        pretrain(cfg_container=make_container(args), **job)
    else:
        pretrain(extra_args_provider=add_arguments, **job)


def main() -> None:
    """Run the job with Megatron's own command line and ours."""
    require_training()
    skip_needless_compilation()
    from megatron.core.enums import ModelType
    from megatron.training import arguments, pretrain

    from ep_dispatcher.megatron import gpt_job

    job = {
        "train_valid_test_dataset_provider": gpt_job.build_datasets,
        "model_provider": LazyModelProvider(),
        "model_type": ModelType.encoder_or_decoder,
        "forward_step_func": gpt_job.forward_step,
    }
    start(pretrain, getattr(arguments, "parse_and_validate_args", None), _container(), job)


class LazyModelProvider:
    """Builds model chunks that share one plug-in, made from Megatron's arguments at first use.

    Up to 0.17 there are no arguments before `pretrain` runs, hence not earlier.
    """

    @functools.cached_property
    def plugin(self) -> Any:  # noqa: ANN401
        """The job's plug-in, after checking its arguments."""
        from megatron.training import get_args

        from ep_dispatcher.megatron import gpt_job
        from ep_dispatcher.megatron.plugin import EpPlugin

        args = get_args()
        gpt_job.check_args(args)
        options = options_from_args(args)
        leave_sms(options.num_sms)
        return EpPlugin(options)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        """One chunk; arguments as Megatron passes them."""
        from ep_dispatcher.megatron import gpt_job

        return gpt_job.build_model(*args, plugin=self.plugin, **kwargs)


def _container() -> Callable[[argparse.Namespace], object] | None:
    """Megatron's maker of the config container, where it has one."""
    try:
        from megatron.training.argument_utils import pretrain_cfg_container_from_args
    except ImportError:
        return None
    make: Callable[[argparse.Namespace], object] = pretrain_cfg_container_from_args
    return make


if __name__ == "__main__":
    main()
