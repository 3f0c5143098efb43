"""How many requests an upstream takes before they wait there: a limit that follows its answers.

A gradient of the time to first byte, measured in windows: what a window took on average against
what such requests take at rest. By Little's law (waiting = rate x extra time) the excess over rest
says how many of the requests in flight only stood in the upstream's own queue; those, and a share
for the class that is never limited, are what the limit falls by. So the queue stays here, where
classes count.

    slow start  a window at the limit and nothing waits   -> half as much again
                something waits                           -> cut, hold
    holding     something waits                           -> cut, hold anew
                the hold is over                          -> probing
    probing     a window at the limit and nothing waits   -> a quarter more
                something waits                           -> cut, hold, twice as long if the limit
                                                             was found where it had been before

Work that has become slower by itself looks like a queue too. Cuts tell them apart: when fewer in
flight are hardly faster, the work has changed, what it takes now is what it takes at rest, and the
limit grows again. What may be chance is no evidence: a difference counts from three standard
errors. Pure: times are arguments. Bounds: `least` to `most`; one cut halves at most.
"""

from __future__ import annotations

_MS = 1_000_000
_S = 1_000 * _MS
SLACK_NS = 8 * _MS  # waiting shorter than this harms nobody, and may be this process's own
SAMPLES_MIN = 8
SAMPLES_CHECK = 24  # when it is judged whether a cut has helped
ERRORS = 3.0  # standard errors of a mean: less is chance
WAITING_MIN = 2
WAITING_SHARE = 0.15  # of what is in flight: fewer are noise
HOLD_LEAST_NS = 3 * _S
HOLD_MOST_NS = 48 * _S
WINDOW_LEAST_NS = 50 * _MS  # hiccups shorter than that are averaged out
DRIFT_NS = 120 * _S  # how slowly the time at rest follows what is no evidence
STALE_NS = 60 * _S  # a window this old says nothing of now
SETTLE_FACTOR = 4  # times the answer time: how long the old excess may take to leave


class AdaptiveLimit:
    """See the module. `limit` is the requests in flight, of all classes at that upstream."""

    __slots__ = (
        "_baseline_error_ns",
        "_before_ns",
        "_before_peak",
        "_begun_ns",
        "_count",
        "_found",
        "_headroom",
        "_hold_ns",
        "_hold_until_ns",
        "_least",
        "_least_ns",
        "_peak",
        "_rested",
        "_settle_until_ns",
        "_slow_start",
        "_squares",
        "_sum_ns",
        "_suspect_ns",
        "_tolerance",
        "baseline_ns",
        "cuts",
        "limit",
        "most",
        "recent_ns",
    )

    def __init__(
        self, *, initial: int, least: int, most: int, tolerance: float, headroom: float
    ) -> None:
        self._least = min(least, most)
        self.most = most
        self._tolerance = tolerance
        self._headroom = headroom
        self.limit = max(self._least, min(initial, most))
        self.baseline_ns = 0  # an answer's time at rest; 0: not known
        self._baseline_error_ns = 0.0
        self.recent_ns = 0  # the last window's mean
        self.cuts = 0
        self._slow_start = True
        self._rested = False  # a window without waiting was seen
        self._hold_until_ns = 0
        self._hold_ns = HOLD_LEAST_NS
        self._suspect_ns = 0  # the last window's mean, if something waited in it
        self._before_ns = 0  # the mean that caused the last cut, until that is judged
        self._before_peak = 0
        self._found = 0  # where the last cut went
        self._settle_until_ns = 0
        self._begun_ns = 0
        self._count = 0
        self._sum_ns = 0
        self._squares = 0.0
        self._least_ns = 0
        self._peak = 0

    def sample(self, sent_ns: int, now_ns: int, inflight: int) -> bool:
        """Take one first byte, of a request sent at `sent_ns`; True when the limit changed."""
        if self._settle_until_ns:
            if inflight > self.limit and now_ns < self._settle_until_ns:
                return False
            self._settle_until_ns = 0
            self._restart(now_ns + self.baseline_ns)
        if now_ns < self._begun_ns:
            return False
        if now_ns - self._begun_ns > STALE_NS:
            self._restart(now_ns)
        took_ns = now_ns - sent_ns
        if not self._count or took_ns < self._least_ns:
            self._least_ns = took_ns
        self._count += 1
        self._sum_ns += took_ns
        self._squares += float(took_ns) * took_ns
        self._peak = max(self._peak, inflight)
        least = SAMPLES_CHECK if self._before_ns else SAMPLES_MIN
        long = now_ns - self._begun_ns >= max(WINDOW_LEAST_NS, 2 * self.recent_ns)
        if self._count < least or not long:
            return False
        before = self.limit
        self._judge(now_ns)
        return self.limit != before

    def _restart(self, now_ns: int) -> None:
        self._begun_ns = now_ns
        self._count = self._sum_ns = self._least_ns = self._peak = 0
        self._squares = 0.0

    def _judge(self, now_ns: int) -> None:
        count, peak = self._count, self._peak
        mean_ns = self.recent_ns = self._sum_ns // count
        spread = max(0.0, self._squares / count - float(mean_ns) * mean_ns)
        error_ns = ERRORS * (spread / count) ** 0.5
        if not self.baseline_ns:
            self.baseline_ns = self._least_ns
        before_ns, self._before_ns = self._before_ns, 0
        fewer = peak / max(1, self._before_peak)
        queued_ns = max(float(self.baseline_ns), before_ns * fewer)  # if it had been a queue
        if before_ns and fewer <= 0.8 and mean_ns * 2 > before_ns + queued_ns:
            self.baseline_ns, self._baseline_error_ns = mean_ns, error_ns
            self._hold_until_ns = now_ns
            self._slow_start = True
        baseline_ns = self.baseline_ns
        extra_ns = mean_ns - baseline_ns
        waiting = count * extra_ns // max(1, now_ns - self._begun_ns)
        sure_ns = mean_ns - (error_ns**2 + self._baseline_error_ns**2) ** 0.5
        if (
            extra_ns > SLACK_NS
            and sure_ns > baseline_ns * self._tolerance
            and waiting >= max(WAITING_MIN, peak * WAITING_SHARE)
        ):
            last_ns, self._suspect_ns = self._suspect_ns, mean_ns
            if last_ns:
                self._cut(max(peak // 2, peak - waiting), mean_ns, last_ns, now_ns)
            else:
                self._restart(now_ns)  # a hiccup is over in the next window
            return
        self._suspect_ns = 0
        if mean_ns + error_ns < baseline_ns:
            self.baseline_ns, self._baseline_error_ns = baseline_ns + extra_ns // 4, error_ns
        else:
            part = min(1.0, (now_ns - self._begun_ns) / DRIFT_NS)
            self.baseline_ns += int(extra_ns * part)
            self._baseline_error_ns -= self._baseline_error_ns * part
        if extra_ns <= SLACK_NS or mean_ns <= baseline_ns * self._tolerance:
            self._rested = True
        if peak * 5 >= self.limit * 4 and now_ns >= self._hold_until_ns:
            step = self.limit // 2 if self._slow_start else self.limit // 4
            self.limit = min(self.most, self.limit + max(1, step))
            now_ns += mean_ns  # what comes until then was sent before
        self._restart(now_ns)

    def _cut(self, fits: int, mean_ns: int, last_ns: int, now_ns: int) -> None:
        limit = max(self._least, int(fits * (1.0 - self._headroom)))
        if limit >= self.limit:  # it is not the limit that lets them wait
            self._restart(now_ns)
            return
        same = abs(limit - self._found) * 4 <= limit
        self._hold_ns = min(self._hold_ns * 2, HOLD_MOST_NS) if same else HOLD_LEAST_NS
        self._found = limit
        if self._rested:  # else what it takes at rest was a guess, and so is this
            self._hold_until_ns = now_ns + self._hold_ns
            self._slow_start = False
        if mean_ns * 20 <= last_ns * 23:  # else the queue still grew, and all of it did not show
            self._before_ns, self._before_peak = mean_ns, self._peak
        self.limit = limit
        self.cuts += 1
        self._settle_until_ns = now_ns + SETTLE_FACTOR * mean_ns
