"""The sidecar's side of one witness: one submission at a time, from a thread of its own.

A submission is tried again until the witness has decided: an answer that was lost may have been
kept there, so the same note goes again, and 409 with its very size means it was. The data loop only
reads plain attributes; nothing here can hold it up.

C2SP tlog-witness over HTTP/1.1, one request a connection (there is one in ten seconds).
"""

from __future__ import annotations

import base64
import logging
import queue
import threading
import time
from typing import TYPE_CHECKING

from proxy.audit.agent_call import AgentAddress
from proxy.audit.checkpoint import Answer, Submission, cosigned_note
from proxy.audit.note import NoteError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from proxy.audit.note import Keyset

PATH = "/witness/add-checkpoint"
RETRY_S = 2.0

log = logging.getLogger(__name__)


class WitnessClient:
    """A `checkpoint.Witness` over HTTP; each has a thread, so none waits for another.

    `name` is what it is called in readyz, metrics and alarms. `trusted`: only cosignatures of these
    keys count, else any. `late_s` is how long nothing may be decided before that is an alarm.
    """

    def __init__(
        self,
        address: tuple[str, int] | str,
        keys: Sequence[str],
        *,
        name: str = "",
        authorization: bytes = b"",
        trusted: Keyset | None = None,
        late_s: float,
        clock: Callable[[], float] = time.monotonic,
        retry_s: float = RETRY_S,
    ) -> None:
        self._agent = AgentAddress(address, authorization)
        self.name = name or (address if isinstance(address, str) else f"{address[0]}:{address[1]}")
        self._keys = ", ".join(keys)
        self._trusted = trusted
        self._late_s = late_s
        self._clock = clock
        self._retry_s = retry_s
        self._jobs: queue.SimpleQueue[Submission | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[Answer] = queue.SimpleQueue()
        self._stop = threading.Event()
        self._asked_s: float | None = None  # since when an answer is waited for
        self._alarmed = False
        self.refusal = ""
        self.cosigned = 0
        self.failures = 0
        self.closing = False
        self._thread = threading.Thread(target=self._run, name="audit-witness", daemon=True)
        self._thread.start()

    # The writer's sync thread.

    def submit(self, submission: Submission) -> None:
        """See `checkpoint.Witness.submit`."""
        if self._asked_s is None:
            self._asked_s = self._clock()
        self._jobs.put(submission)

    def poll(self) -> Answer | None:
        """See `checkpoint.Witness.poll`."""
        try:
            return self._answers.get_nowait()
        except queue.Empty:
            return None

    def wait(self, seconds: float) -> Answer | None:
        """As `poll`, but wait for an answer that is under way."""
        try:
            return self._answers.get(timeout=seconds)
        except queue.Empty:
            return None

    def stop(self) -> None:
        """End the thread; an answer under way is given up."""
        self._stop.set()
        self._jobs.put(None)

    # Anybody.

    @property
    def late(self) -> bool:
        """Whether nothing was decided for longer than is allowed."""
        asked_s = self._asked_s
        return asked_s is not None and self._clock() - asked_s > self._late_s

    @property
    def trouble(self) -> str:
        """Return what is wrong, as a word for readyz; "" if nothing is."""
        if self.refusal:
            return "witness_refused"
        return "witness_unreachable" if self.late else ""

    def alarm(self) -> str:
        """Return the text of an alarm record, once for each trouble; "" if none is due."""
        trouble = self.trouble
        if not trouble:
            self._alarmed = False
        elif not self._alarmed:
            self._alarmed = True
            return f"{trouble}: {self.name}" + (f": {self.refusal}" if self.refusal else "")
        return ""

    # Its own thread.

    def _run(self) -> None:
        while (submission := self._jobs.get()) is not None and not self._stop.is_set():
            answer = None
            while answer is None and not self._stop.is_set():
                answer = self._ask(submission)
                if answer is None:
                    self.failures += 1
                    self._stop.wait(self._retry_s)
            if answer is not None:
                self._answers.put(answer)

    def _ask(self, submission: Submission) -> Answer | None:
        """Return what the witness decided; None: it did not."""
        try:
            status, body = self._post(submission)
        except (OSError, ValueError) as problem:
            log.debug("witness %s: %s", self.name, problem)
            return None
        if status == 200:
            try:
                cosigned = cosigned_note(submission.note, body, self._trusted)
            except NoteError:
                return None
            self._decided("" if cosigned else "its cosignature is by no key of audit.witness_keys")
            self.cosigned += bool(cosigned)
            return Answer(submission.size, submission.size, cosigned)
        if status == 409 and body.strip().isdecimal():
            known = int(body)
            if known in (0, submission.size) and known != submission.old_size:
                # It kept what its answer to was lost; or it lost what it had kept.
                self._decided("")
                return Answer(submission.size, known, "")
        if status in (401, 403, 404, 409, 413, 422):
            self._decided(f"{status} {body[:200].strip()}")
            return Answer(submission.size, -1, "")
        return None

    def _decided(self, refusal: str) -> None:
        if refusal and refusal != self.refusal:
            log.error("the witness %s does not cosign a checkpoint: %s", self.name, refusal)
        self.refusal = refusal
        self._asked_s = None

    def _post(self, submission: Submission) -> tuple[int, str]:
        proof = "".join(f"{base64.b64encode(node).decode()}\n" for node in submission.proof)
        body = f"old {submission.old_size}\n{proof}\n{submission.note}".encode()
        fields = [f"Tongguan-Log-Key: {self._keys}"]
        if self.closing:
            fields.append("Tongguan-Log-Closed: yes")
        return self._agent.post(PATH, body, *fields)
