"""Hypothesis in ranks: one seed and equal settings make all ranks run the same examples; a failure ends the test.

No API of Hypothesis reaches every test (decorators, bodies, state machines), so its class that runs a test is replaced.
"""

from __future__ import annotations

import hmac
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, reporting, settings
from hypothesis.strategies import DataObject

from pytest_accel.core.terminal_lines import warn
from pytest_accel.rank.context import RankContext

__hypothesistracebackhide__ = True  # Hides the frames of this module.
core: Any = sys.modules["hypothesis.core"]
providers: Any = sys.modules.get("hypothesis.internal.conjecture.providers")
_Base: Any = getattr(providers and core, "StateForActualGivenExecution", object)


@contextmanager
def pytest_accel_around_call(context: RankContext) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if context.spec.ranks > 1 and _Base is not object and hasattr(core, "failure_exceptions_to_catch"):
            patch.setattr(core, "StateForActualGivenExecution", _Execution)
            # The engine would repeat a failed example, on this rank alone: have the first error leave the engine.
            patch.setattr(core, "failure_exceptions_to_catch", lambda: ())
            if core.global_force_seed is None:
                seed = hmac.digest(context.spec.secret, b"%d" % context.tests, "sha256")
                patch.setattr(core, "global_force_seed", seed)
            # Hypothesis draws constants of the suite's modules that a rank has imported, and ranks may import others.
            patch.setattr(providers, "_get_local_constants", lambda: providers.Constants(), raising=False)
        elif context.spec.ranks > 1:
            warn("pytest-accel does not know this release of Hypothesis: each rank draws its own examples")
        yield


def _equal(own: Any) -> Any:
    """Return `own` without settings whose effect may differ between ranks; warn if the user has set them."""
    phases = tuple(phase for phase in own.phases if phase in (Phase.explicit, Phase.generate))
    changes: dict[str, Any] = {"database": None, "deadline": None, "phases": phases}
    for name, value in changes.items():
        if getattr(own, name) not in (value, getattr(settings.get_profile("default"), name)):
            warn(f"distributed tests do without {name}={getattr(own, name)!r} of Hypothesis's settings")
    health = [*own.suppress_health_check, HealthCheck.too_slow]
    return settings(own, suppress_health_check=health, report_multiple_bugs=False, **changes)


class _Execution(_Base):  # type: ignore[misc]
    """One run of Hypothesis in a rank."""

    def __init__(self, stuff: Any, test: Any, own: Any, *arguments: Any, **options: Any) -> None:
        @wraps(test)
        def noting(*args: Any, **kwargs: Any) -> Any:
            self._example = {name: value for name, value in kwargs.items() if name in stuff.given_kwargs}
            return test(*args, **kwargs)

        super().__init__(stuff, noting, _equal(own), *arguments, **options)

    def execute_once(self, data: Any, **options: Any) -> Any:
        lines, self._example = list[object](), dict[str, Any]()
        shows = dict.fromkeys({"print_example", "print_test_case"} & {*_Base.execute_once.__kwdefaults__}, True)
        try:
            with reporting.with_reporter(lines.append):  # Have Hypothesis print the example, as in its last run.
                return super().execute_once(data, **{**options, **shows, "is_final": True})
        except (Exception, pytest.fail.Exception) as error:
            line = f"@example({', '.join(f'{name}={value!r}' for name, value in self._example.items())})"
            if not self._example or any(isinstance(value, DataObject) for value in self._example.values()):
                line = f"@reproduce_failure({core.__version__!r}, {core.encode_failure(data.choices)!r})"
            hint = f"Ranks do not shrink. {line} above the test runs this example again; with distributed(1), "
            vars(error).setdefault("__notes__", []).extend([*lines, f"{hint}Hypothesis shrinks it."])
            raise
