"""`tongguan up`: an agent and a sidecar on this machine, one question asked, the record verified.

Everything it makes lies in the state directory: keys, `tongguan.toml`, logs, the audit chains. What
is there is used again. It starts `python -m agent` and `python -m proxy`, asks one question over
the SM4 channel, shows the audit record that the answer left, and verifies the chains with the same
`tongguan audit` a person would use. The answer goes to standard output, then a blank line and one
fact a line; progress goes to standard error.

It needs neither torch nor the engine itself, only its children do.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import signal
import sys
import time
import unicodedata
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

import click

from agent import plan as plans
from agent.acquaint import acquaint
from agent.children import Child, ChildError, wait_ready
from agent.plan import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_OK,
    Plan,
    UpError,
    last_lines,
    near,
    say,
)
from proxy.config import split_address

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import FrameType

    from proxy.ask import AskResult

QUESTION = "What is the capital of France?"
_RECORD_WAIT_S = 10.0
_RECORD_POLL_S = 0.2
_REDRAW_S = 0.5


def run(
    *,
    state: Path,
    base_port: int | None,
    question: str,
    max_tokens: int,
    oneshot: bool,
    ready_s: float,
) -> int:
    """Do it all; return the exit code."""
    # A script's background job ignores SIGINT and nohup SIGHUP; only the second one is meant.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _interrupt)
    try:
        plans.check_question(question)
        plans.check_variables(os.environ)
        lock = plans.lock(state)
        try:
            ready = plans.make(state, base_port, os.environ)
            plans.check_keys(ready)
            plans.check_ports(ready)
            return _run(ready, question, max_tokens, oneshot=oneshot, ready_s=ready_s)
        finally:
            os.close(lock)
    except UpError as problem:
        for line in problem.lines:
            click.secho(f"  {line}", err=True, dim=True)
        click.secho(f"tongguan up: {problem}", err=True, fg="red")
        return problem.code
    except KeyboardInterrupt:
        click.echo("\ntongguan up: interrupted", err=True)
        return EXIT_INTERRUPTED


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    del number, frame
    raise KeyboardInterrupt


def _run(plan: Plan, question: str, max_tokens: int, *, oneshot: bool, ready_s: float) -> int:
    agent, sidecar = _children(plan)
    try:
        started = time.monotonic()
        agent.start()
        if plan.sidecar.audit.seeds == "agent" and plan.agent.socket:
            acquaint(plan, agent, ready_s)
        sidecar.start()
        progress = Progress(sys.stderr if sys.stderr.isatty() else None, time.monotonic)
        try:
            wait_ready((agent, sidecar), ready_s, progress.show)
        finally:
            progress.clear()
        say(f"agent and sidecar are ready after {time.monotonic() - started:.1f} s")
        _ask_and_verify(plan, question, max_tokens)
        if not oneshot:
            _say_how(plan)
            try:
                _serve((agent, sidecar))
            except KeyboardInterrupt:
                click.echo("", err=True)
    except ChildError as problem:
        raise UpError(str(problem), EXIT_FAILED, problem.lines) from None
    finally:
        with contextlib.suppress(OSError):  # the terminal may be gone; the children must end
            say("stopping")
        # The sidecar first: it drains into an agent that still answers.
        sidecar_code = sidecar.stop()
        agent_code = agent.stop()
    for child, ended in ((sidecar, sidecar_code), (agent, agent_code)):
        if ended != 0:
            raise UpError(
                f"the {child.name} did not end cleanly (code {ended}); its log: {child.log}"
            )
    say(f"stopped cleanly; with the final record: {_verify(plan, live=False)}")
    return EXIT_OK


def _children(plan: Plan) -> tuple[Child, Child]:
    logs = plan.state / "logs"
    sidecar, agent = plan.sidecar, plan.agent
    return (
        Child(
            "agent",
            (sys.executable, "-m", "agent", "--config", str(plan.file)),
            split_address(agent.admin),
            logs / "agent.log",
            agent.grace_s + 10,
            plan.environ,
        ),
        Child(
            "sidecar",
            (sys.executable, "-m", "proxy", "--config", str(plan.file)),
            split_address(sidecar.doors.admin),
            logs / "sidecar.log",
            sidecar.timeouts.drain_s + 10,
            plan.environ,
        ),
    )


def _ask_and_verify(plan: Plan, question: str, max_tokens: int) -> None:
    """Ask over the SM4 channel, print the answer and its facts; raises `UpError`."""
    from proxy.ask import AskError, ask  # noqa: PLC0415 - httpx takes a moment

    say(f"asking over the SM4 channel: {question}")
    host, port = split_address(plan.sidecar.doors.sealed)
    terminal = sys.stdout.isatty()
    try:
        result = ask(
            question,
            base_url=f"http://{host}:{port}",
            keys_file=plan.client_keys,
            max_tokens=max_tokens,
            on_text=lambda text: click.echo(printable(text) if terminal else text, nl=False),
        )
    except AskError as problem:
        click.echo()
        raise UpError(f"no answer: {problem}") from None
    record = _record(plan, result.trace_id)
    click.echo("\n")
    for line in facts(result, record):
        click.echo(line)
    outcome = record.get("outcome", "unknown")
    if outcome != "ok":
        raise UpError(f"the audit record of {result.trace_id} says outcome {outcome}")
    click.echo(_verify(plan, live=True))


def printable(text: str) -> str:
    """Return `text` without what a terminal would obey: control characters but line ends and tabs.

    A model's output is nobody's to trust; elsewhere than on a terminal it is passed as it is.
    """
    return "".join(c for c in text if c in "\n\t" or unicodedata.category(c) not in ("Cc", "Cf"))


def facts(result: AskResult, record: Mapping[str, Any]) -> list[str]:
    """Return one line a fact about an answer and the record it left."""
    rate = f"{result.tokens_per_s:.1f}" if result.tokens_per_s else "-"
    lines = [
        f"trace_id {result.trace_id}",
        f"model {result.model}",
        f"qos {result.qos_class}",
        f"pool {result.pool}",
        f"ttft {result.ttft_ms:.0f} ms",
        f"tokens {result.tokens}",
        f"tokens/s {rate}",
    ]
    if result.finish_reason == "length":
        lines.append(f"finish length ({result.tokens} tokens)")
    lines += [
        f"{name} {record[name]}"
        for name in ("seq", "prompt_hash", "output_hash", "ids_commit", "outcome")
        if name in record
    ]
    return lines


def _record(plan: Plan, trace_id: str) -> dict[str, Any]:
    """Return the audit record of a request, once it is on the disk; raises `UpError`."""
    if not trace_id:
        raise UpError("the answer names no trace id (X-Trace-Id)")
    end = time.monotonic() + _RECORD_WAIT_S
    while True:
        command = plan.command(
            "audit",
            "show",
            plan.sidecar.audit.dir,
            "--trace-id",
            trace_id,
            "--auditor-key",
            str(plan.auditor_keys),
            "--json",
        )
        if command.returncode == 0:
            return dict(json.loads(command.stdout)["record"])
        # 1: not on the disk yet; anything else will not get better.
        if command.returncode != 1 or time.monotonic() > end:
            raise UpError(
                f"no audit record for {trace_id}", EXIT_FAILED, tuple(last_lines(command.stderr))
            )
        time.sleep(_RECORD_POLL_S)


def _verify(plan: Plan, *, live: bool) -> str:
    """Verify every chain of the state directory; return the verdict's line, raise `UpError`."""
    command = plan.command(*_verify_arguments(plan), *(["--live"] if live else []))
    if command.returncode != 0:
        raise UpError(
            f"the audit chains do not verify (code {command.returncode}); again: "
            + plan.shell(*_verify_arguments(plan)),
            EXIT_FAILED,
            tuple(last_lines(command.stdout) + last_lines(command.stderr)),
        )
    return command.stdout.partition("\n")[0].strip()


def _verify_arguments(plan: Plan) -> tuple[str, ...]:
    return ("audit", "verify", near(plan.sidecar.audit.dir), "--keys", near(plan.auditor_keys))


def _serve(children: tuple[Child, ...]) -> None:
    """Watch the children until Ctrl-C."""
    while True:
        for child in children:
            child.check()
        time.sleep(0.5)


class Progress:
    """One moving line on a terminal (None: there is none), drawn anew at most each 0.5 s."""

    def __init__(self, terminal: TextIO | None, clock: Callable[[], float]) -> None:
        self._terminal = terminal
        self._clock = clock
        self._next_s = clock()
        self._shown = ""

    def show(self, state: Mapping[str, str | None]) -> None:
        """Take why each child is not ready, in words; None: it is."""
        parts = [f"{name}: {reason or 'ready'}" for name, reason in state.items()]
        text = "   ".join(parts)[: shutil.get_terminal_size().columns - 1]
        now_s = self._clock()
        if self._terminal is None or text == self._shown or now_s < self._next_s:
            return
        self._shown, self._next_s = text, now_s + _REDRAW_S
        click.echo(f"\r\x1b[K{text}", file=self._terminal, nl=False)

    def clear(self) -> None:
        """Take the line away."""
        if self._terminal is not None:
            click.echo("\r\x1b[K", file=self._terminal, nl=False)


def _say_how(plan: Plan) -> None:
    doors = plan.sidecar.doors
    click.echo(how_to_call(doors.app, doors.sealed, doors.admin, plan))


def how_to_call(app: str, sealed: str, admin: str, plan: Plan) -> str:
    """Return what to type next, in the directory that this process runs in."""
    python = shlex.quote(near(sys.executable))
    keys = near(plan.client_keys)
    ask = plan.shell("ask", "--keys", keys, "--url", f"http://{sealed}", "Who are you?")
    return f"""
Serving until Ctrl-C. In another terminal:

  cd {shlex.quote(str(Path.cwd()))}
  curl http://{app}/v1/chat/completions -H 'Content-Type: application/json' \\
    -d '{{"messages": [{{"role": "user", "content": "Who are you?"}}]}}'
  {ask}
  {plan.shell(*_verify_arguments(plan), "--live")}
  curl http://{admin}/metrics

The OpenAI SDK: {plans.installed("pip", "pip")} install openai, then in {python}:

  import httpx
  from openai import OpenAI
  from proxy.client import Sm4Transport
  # plain: what an application beside the sidecar does
  client = OpenAI(base_url="http://{app}/v1", api_key="unused")
  # sealed with SM4: what a caller from elsewhere does
  channel = httpx.Client(transport=Sm4Transport({json.dumps(keys)}))
  client = OpenAI(base_url="http://{sealed}/v1", api_key="unused", http_client=channel)
  model = client.models.list().data[0].id
  question = [{{"role": "user", "content": "Who are you?"}}]
  print(client.chat.completions.create(model=model, messages=question).choices[0].message.content)
"""
