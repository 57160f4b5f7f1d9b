"""Shows the summary of a session in the CI system whose job runs it.

- GitHub Actions shows the file of ``GITHUB_STEP_SUMMARY``, and an annotation for each line ``::error ...::...``.
- Buildkite shows what ``buildkite-agent annotate`` reads.
- GitLab has no page for a summary; its log has sections that one can open.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence

from pytest_accel.core.record_events import PhaseReported
from pytest_accel.features.record.ci_summary import (
    LARGEST,
    cause_of,
    failures_of,
    plain_summary,
    printable,
    succeeded,
    summary,
)
from pytest_accel.features.record.timeline import Session, TestRun

_MOST_ANNOTATIONS = 10
"""Errors of a step that GitHub shows."""
_AGENT_TIMEOUT = 30.0  # Seconds. The agent sends the annotation to Buildkite.


def show(sessions: Sequence[Session], environment: Mapping[str, str], *, annotate: bool) -> Iterator[str]:
    """Show `sessions` in each system whose variables are in `environment`; yield the lines to write to the job's log.

    Without `annotate`, no failures are annotated on GitHub. A summary that cannot be shown is a line.
    """
    if path := environment.get("GITHUB_STEP_SUMMARY"):
        if (problem := append_summary(sessions, path)) is not None:
            yield f"accel: {problem}"
        if annotate:
            yield from error_lines(sessions, environment.get("GITHUB_WORKSPACE"))
    if environment.get("BUILDKITE") and (problem := annotate_build(sessions, environment)) is not None:
        yield f"accel: {problem}"
    if environment.get("GITLAB_CI"):
        yield from log_section(sessions)


def append_summary(sessions: Sequence[Session], path: str) -> str | None:
    """Append the summary to the file `path`, as far as GitHub's limit allows. Return what went wrong, or None."""
    try:
        with open(path, "ab") as file:
            before = b"\n\n" if file.tell() else b""  # A heading needs an empty line before it.
            text = summary(sessions, room=LARGEST - file.tell() - len(before))
            if text:
                file.write(before + text.encode())
    except OSError as error:
        return f"the job summary {path} cannot be written: {error.strerror}"
    return None if text else f"the job summary {path} has no room for this session: GitHub allows 1 MiB for a step"


def error_lines(sessions: Sequence[Session], workspace: str | None) -> Iterator[str]:
    """Yield the commands by which GitHub annotates the first failures. `workspace` is the repository's folder."""
    for session, test in failures_of(sessions)[:_MOST_ANNOTATIONS]:
        properties = {"title": printable(test.test)}
        if (found := _place(session, test, workspace)) is not None:
            properties = {"file": found[0], "line": str(found[1])} | properties
        shown = ",".join(f"{name}={_property(value)}" for name, value in properties.items())
        yield f"::error {shown}::{_data(printable(cause_of(test)))}"


def _place(session: Session, test: TestRun, workspace: str | None) -> tuple[str, int] | None:
    """Return file and line of the failure or else of the test, the first of both that is in the repository."""
    phase: PhaseReported | None = test.failure
    if phase is None:
        return None
    for file, line in (phase.place or ("", 1), (phase.file, phase.line or 1)):
        path = os.path.realpath(os.path.join(session.started.root, file))
        folder = os.path.realpath(workspace or session.started.root)
        if file and path.startswith(folder + os.sep):
            return os.path.relpath(path, folder), line
    return None


def _data(text: str) -> str:
    """Return `text` as the message of a workflow command, as GitHub's toolkit writes it."""
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    """Return `text` as a property of a workflow command, as GitHub's toolkit writes it."""
    return _data(text).replace(":", "%3A").replace(",", "%2C")


def annotate_build(
    sessions: Sequence[Session], environment: Mapping[str, str], *, timeout: float = _AGENT_TIMEOUT
) -> str | None:
    """Add the summary to the build's page. Return what went wrong; None also for a machine without the agent."""
    agent = shutil.which("buildkite-agent", path=environment.get("PATH"))
    if agent is None:
        return None
    # Each job has its own annotation, to which its later sessions append.
    context = "-".join(filter(None, ("accel", environment.get("BUILDKITE_JOB_ID"))))
    style = "info" if succeeded(sessions) else "error"
    text = "\n" + summary(sessions, room=LARGEST - 1, job=environment.get("BUILDKITE_LABEL", ""))
    try:
        done = subprocess.run(
            [agent, "annotate", "--style", style, "--context", context, "--append"],
            input=text.encode(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=timeout,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        why = f"took longer than {timeout:g} s" if isinstance(error, subprocess.TimeoutExpired) else error.strerror
        return f"buildkite-agent annotate: {why}"
    return f"buildkite-agent annotate: exit status {done.returncode}" if done.returncode else None


def log_section(sessions: Sequence[Session]) -> Iterator[str]:
    """Yield the lines of a section of GitLab's log that is closed at first."""
    name, start, stop = (f"accel_{sessions[0].started.session}", *(round(one) for one in sessions[0].span))
    yield f"\033[0Ksection_start:{start}:{name}[collapsed=true]\r\033[0Kaccel: summary of the session"
    yield from plain_summary(sessions).splitlines()
    yield f"\033[0Ksection_end:{stop}:{name}\r\033[0K"
