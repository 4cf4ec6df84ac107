"""One rank of a training, in a process of its own: `examples.worker` in a process group. The environment is that of torchrun."""

from contextlib import ExitStack

from examples.sharding import ranks
from examples.training import Setting, Training
from examples.worker import serve


def main() -> None:
    """Serve as `examples.worker` does. Waits for the other ranks at the start."""
    with ExitStack() as group:

        def begin(line: str) -> Training:
            setting = Setting.model_validate_json(line)
            group.enter_context(ranks(setting.device))
            return Training(setting)

        serve(begin)


if __name__ == "__main__":
    main()
