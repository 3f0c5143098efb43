"""Every metric name and label of the sidecar, made from its counters when somebody asks.

Names are API: `tongguan_proxy_<noun>_<unit>[_total]`. No label value comes from a client. Runs on
the admin door's thread and only reads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
)

from kernels.wire import AVAILABLE
from proxy.metrics import built
from proxy.qos.pools import STATE_NAMES
from proxy.scrape_audit import opening_families
from proxy.scrape_keys import key_families
from proxy.scrape_qos import qos_families
from proxy.scrape_spans import span_families
from proxy.sm4.cipher import tier

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from prometheus_client.core import Metric

    from proxy.audit.checkpoint import Witness
    from proxy.context import Context
    from proxy.keys.watch import KeyWatch


class Collector:
    """Renders a context's counters; registered once, asked at each scrape."""

    def __init__(self, context: Context, keys: KeyWatch | None = None) -> None:
        self._current = context.current
        self._keys = keys

    @property
    def _context(self) -> Context:
        return self._current.context

    def collect(self) -> Iterator[Metric]:
        """Yield every family."""
        yield from self._requests()
        yield from qos_families(self._context)
        yield from self._pools()
        yield from self._endpoints()
        yield from self._channel()
        yield from self._tls()
        if self._keys is not None:
            yield from key_families(self._keys, self._context.clock.wall_ms())
        yield from self._audit()
        yield from span_families(self._context.tracer)

    def _requests(self) -> Iterator[Metric]:
        counters = self._context.counters
        started = CounterMetricFamily(
            "tongguan_proxy_requests_started", "Requests that were classed.", labels=["qos"]
        )
        for qos, count in counters.started.items():
            started.add_metric([qos], count)
        yield started
        finished = CounterMetricFamily(
            "tongguan_proxy_requests", "Finished requests.", labels=["qos", "outcome"]
        )
        for (qos, outcome), count in list(counters.outcomes.items()):
            finished.add_metric([qos, outcome], count)
        yield finished
        for name, text, table in (
            ("duration", "Head received to end of answer.", counters.duration),
            ("first_byte", "Head received to first body byte from upstream.", counters.first_byte),
        ):
            family = HistogramMetricFamily(
                f"tongguan_proxy_request_{name}_seconds", text, labels=["qos"]
            )
            for qos, histogram in table.items():
                family.add_metric([qos], histogram.buckets(), histogram.sum_ns / 1e9)
            yield family
        refused = CounterMetricFamily(
            "tongguan_proxy_refused_heads", "Heads refused or too late.", labels=["door"]
        )
        for door, count in counters.refused_heads.items():
            refused.add_metric([door], count)
        yield refused
        hits = CounterMetricFamily(
            "tongguan_proxy_limit_hits", "Times a limit was hit.", labels=["limit"]
        )
        for limit, count in list(counters.limit_hits.items()):
            hits.add_metric([limit], count)
        hits.add_metric(["doors.connections"], counters.connections_refused)
        lender = self._context.lender
        hits.add_metric(["limits.lent_streams"], lender.refused_total if lender else 0)
        hits.add_metric(["audit.observed_bytes"], self._context.observing.unobserved)
        timeouts = sum(r.upstreams.connect_timeouts for r in self._context.routes.values())
        hits.add_metric(["timeouts.connect_s"], timeouts)
        hits.add_metric(["limits.event_bytes"], self._context.observing.long_events)
        yield hits
        for name, text, value in (
            ("request_body_bytes", "Request body bytes received.", counters.request_bytes),
            ("answer_body_bytes", "Answer body bytes from upstream.", counters.answer_bytes),
            ("retries", "Requests sent a second time.", counters.retries),
            ("tunnels", "Connections that were upgraded.", counters.tunnels),
            (
                "lent_streams",
                "Event streams lent to the native pump.",
                lender.lent_total if lender else 0,
            ),
            ("alarms", "Alarm lines logged.", counters.alarms),
            (
                "admin_turned_out",
                "Connections to the admin door that made room for newer ones.",
                counters.admin_turned_out,
            ),
        ):
            yield CounterMetricFamily(f"tongguan_proxy_{name}", text, value=value)
        reloads = CounterMetricFamily(
            "tongguan_proxy_reload", "Reloads of settings and keys.", labels=["result"]
        )
        for result, count in counters.reloads.items():
            reloads.add_metric([result], count)
        yield reloads
        yield GaugeMetricFamily(
            "tongguan_proxy_reload_last_success_timestamp_seconds",
            "When the settings and keys in use were read.",
            value=counters.loaded_wall_s,
        )
        open_connections = GaugeMetricFamily(
            "tongguan_proxy_connections", "Open client connections.", labels=["door"]
        )
        for door, connections in self._context.connections.items():
            open_connections.add_metric([door], len(connections))
        yield open_connections
        yield GaugeMetricFamily(
            "tongguan_proxy_tunnels_open", "Upgraded connections.", value=counters.tunnels_open
        )
        yield GaugeMetricFamily(
            "tongguan_proxy_lent_streams_open",
            "Event streams the native pump passes on now.",
            value=len(lender.lent) if lender else 0,
        )
        yield GaugeMetricFamily(
            "tongguan_proxy_loop_lag_seconds",
            "How late the data loop's last tick was.",
            value=counters.loop_lag_ns / 1e9,
        )

    def _pools(self) -> Iterator[Metric]:
        context = self._context
        gauges = {
            "inflight": "Requests in flight.",
            "inflight_limit": "Bound of the requests in flight.",
            "idle_connections": "Idle upstream connections.",
        }
        totals = {
            "refused": "Requests refused because the pool was full.",
            "connects": "Connections opened.",
            "connect_failures": "Connections that could not be opened.",
            "late_closes": "Connections dropped because bytes came outside an answer.",
            "found_closed": "Idle connections found closed when they were to be used.",
            "overflows": "Requests that another pool took.",
        }
        rows = {}
        for name, route in context.routes.items():
            pool, upstreams = route.state, route.upstreams
            rows[name] = {
                "inflight": pool.inflight,
                "inflight_limit": pool.inflight_max,
                "idle_connections": upstreams.idle_count(),
                "refused": pool.refused,
                "connects": upstreams.connects,
                "connect_failures": upstreams.connect_failures,
                "late_closes": upstreams.late_closes,
                "found_closed": upstreams.found_closed,
                "overflows": pool.overflows,
            }
        for kind, names in ((GaugeMetricFamily, gauges), (CounterMetricFamily, totals)):
            for noun, text in names.items():
                family = kind(f"tongguan_proxy_pool_{noun}", text, labels=["pool"])
                for name, row in rows.items():
                    family.add_metric([name], row[noun])
                yield family

    def _endpoints(self) -> Iterator[Metric]:
        routes = self._context.routes
        for noun, text, label in (
            ("retries", "Requests sent again, or to another endpoint.", "reason"),
            ("retries_denied", "Lost requests that could not be sent again.", "reason"),
            ("ejections", "Endpoints left alone for a while.", "reason"),
            ("probes", "Requests that tried an endpoint that was not healthy.", "result"),
        ):
            family = CounterMetricFamily(
                f"tongguan_proxy_pool_{noun}", text, labels=["pool", label]
            )
            for name, route in routes.items():
                tables: dict[str, Iterable[tuple[str, int]]] = {
                    "retries": route.retries.made.items(),
                    "retries_denied": route.retries.denied.items(),
                    "ejections": route.state.ejections.items(),
                    "probes": route.state.probes.items(),
                }
                for value, count in tables[noun]:
                    family.add_metric([name, value], count)
            yield family
        labels = ["pool", "endpoint"]
        state = GaugeMetricFamily(
            "tongguan_proxy_endpoint_state",
            "1 for the state it is in; of several workers, how many see it so.",
            labels=[*labels, "state"],
        )
        outstanding = GaugeMetricFamily(
            "tongguan_proxy_endpoint_outstanding", "Cost of the requests it holds.", labels=labels
        )
        first_byte = GaugeMetricFamily(
            "tongguan_proxy_endpoint_first_byte_seconds",
            "Moving average, where there are several.",
            labels=labels,
        )
        for name, route in routes.items():
            for endpoint in route.state.endpoints:
                row = [name, endpoint.url]
                for kind, kind_name in STATE_NAMES.items():
                    state.add_metric([*row, kind_name], int(endpoint.state is kind))
                outstanding.add_metric(row, endpoint.outstanding)
                first_byte.add_metric(row, endpoint.first_byte_ns / 1e9)
        yield from (state, outstanding, first_byte)

    def _channel(self) -> Iterator[Metric]:
        context = self._context
        counters = context.counters
        failures = CounterMetricFamily(
            "tongguan_proxy_envelope_failures",
            "Envelopes refused, by outcome class.",
            labels=["reason"],
        )
        for reason, count in list(counters.envelope_failures.items()):
            failures.add_metric([reason], count)
        yield failures
        yield from self._sealing()
        yield CounterMetricFamily(
            "tongguan_proxy_envelopes_opened",
            "Envelopes opened.",
            value=counters.envelopes_opened,
        )
        yield GaugeMetricFamily(
            "tongguan_proxy_unverified_bytes",
            "Sealed bytes held before verification.",
            value=context.budget.held_bytes,
        )
        yield CounterMetricFamily(
            "tongguan_proxy_signatures_verified",
            "Signatures that were verified, good or bad.",
            value=context.signatures.verified,
        )
        yield GaugeMetricFamily(
            "tongguan_proxy_signatures_pending",
            "Signatures waiting to be verified.",
            value=context.signatures.pending,
        )
        yield InfoMetricFamily("tongguan_proxy_sm4", "Cipher tier.", value={"tier": tier()})
        yield InfoMetricFamily("tongguan_proxy_path", "The data path.", value={"built": built()})
        readers = "c" if AVAILABLE else "pure"
        yield InfoMetricFamily("tongguan_proxy_readers", "Who reads.", value={"wire": readers})
        if context.receiver is not None:
            replay, ring = context.receiver.replay, context.receiver.keyring
            yield GaugeMetricFamily(
                "tongguan_proxy_replay_entries", "Replay cache entries.", value=replay.entries
            )
            yield GaugeMetricFamily(
                "tongguan_proxy_replay_entries_limit", "Their bound.", value=replay.limit
            )
            store = context.shared_replay
            if store is not None:
                yield GaugeMetricFamily(
                    "tongguan_proxy_replay_store_available",
                    "1 while the shared replay store answers.",
                    value=int(store.available),
                )
                yield GaugeMetricFamily(
                    "tongguan_proxy_replay_store_pending",
                    "Envelopes waiting for its answer.",
                    value=store.pending,
                )
                yield CounterMetricFamily(
                    "tongguan_proxy_replay_store_losses", "Times it was lost.", value=store.losses
                )
                yield CounterMetricFamily(
                    "tongguan_proxy_replay_store_busy",
                    "Envelopes refused because too many waited for it.",
                    value=store.refusals,
                )
            live = ring.live(context.clock.wall_ms())
            yield GaugeMetricFamily("tongguan_proxy_live_kids", "Key ids in time.", value=live)

    def _tls(self) -> Iterator[Metric]:
        counters = self._context.counters
        if not counters.tls_certificate_ends_s:
            return
        handshakes = CounterMetricFamily(
            "tongguan_proxy_tls_handshakes",
            "TLS handshakes by how they ended: ok, failed, late, left, refused.",
            labels=["outcome"],
        )
        for outcome, count in list(counters.tls_handshakes.items()):
            handshakes.add_metric([outcome], count)
        yield handshakes
        yield GaugeMetricFamily(
            "tongguan_proxy_tls_handshakes_pending",
            "TLS handshakes that are under way.",
            value=counters.tls_pending,
        )
        yield GaugeMetricFamily(
            "tongguan_proxy_tls_certificate_expiry_timestamp_seconds",
            "When the sealed door's certificate ends.",
            value=counters.tls_certificate_ends_s,
        )

    def _sealing(self) -> Iterator[Metric]:
        """What is sealed on the way out."""
        context = self._context
        sealed = CounterMetricFamily(
            "tongguan_proxy_sealed_requests", "Requests sealed to the next hop.", labels=["pool"]
        )
        for pool, count in list(context.counters.requests_sealed.items()):
            sealed.add_metric([pool], count)
        refused = CounterMetricFamily(
            "tongguan_proxy_answer_failures",
            "Answers of the next hop that were no good envelope, by outcome class.",
            labels=["pool", "reason"],
        )
        for row, count in list(context.counters.answer_failures.items()):
            refused.add_metric(list(row), count)
        expiry = GaugeMetricFamily(
            "tongguan_proxy_sealing_key_expiry_timestamp_seconds",
            "When the last key to seal with to an endpoint ends.",
            labels=["pool", "endpoint"],
        )
        for name, route in context.routes.items():
            for url, recipient in route.recipients.items():
                expiry.add_metric([name, url], recipient.until_ms() / 1000)
        yield from (sealed, refused, expiry)
        yield GaugeMetricFamily(
            "tongguan_proxy_sealing_held_bytes",
            "Large bodies held until they are sealed.",
            value=context.sealing.held_bytes,
        )

    def _audit(self) -> Iterator[Metric]:
        audit = self._context.audit
        yield GaugeMetricFamily(
            "tongguan_proxy_audit_available",
            "1 while records can be written.",
            value=int(audit is not None and audit.available),
        )
        if audit is None:
            return
        if self._context.settings.audit.sync.opens:
            yield from opening_families(self._context.counters)
        stats = audit.stats
        for name, text in (
            ("records", "Records appended."),
            ("bytes", "Bytes appended."),
            ("syncs", "Group syncs."),
            ("lost", "Records lost and declared."),
            ("failures", "Failed writes and syncs."),
            ("checkpoints", "Checkpoints signed."),
            ("pruned_records", "Records removed by retention."),
            ("pruned_bytes", "Bytes removed by retention."),
            ("rotations", "Keys that the chain went on to."),
        ):
            value = getattr(stats, name)
            yield CounterMetricFamily(f"tongguan_proxy_audit_{name}", text, value=value)
        yield CounterMetricFamily(
            "tongguan_proxy_audit_sync_seconds",
            "Time spent in writes and group syncs.",
            value=stats.sync_seconds_total,
        )
        yield GaugeMetricFamily(
            "tongguan_proxy_observed_bytes",
            "Body bytes held until their record is made.",
            value=self._context.observing.held_bytes,
        )
        yield GaugeMetricFamily(
            "tongguan_proxy_audit_pending", "Records not yet durable.", value=stats.pending
        )
        yield GaugeMetricFamily(
            "tongguan_proxy_audit_unsigned",
            "Durable records behind the last checkpoint.",
            value=max(0, stats.head_seq - stats.checkpoint_seq),
        )
        yield from witness_families(audit.witnesses)


def witness_families(witnesses: Iterable[Witness]) -> Iterator[Metric]:
    """Yield what is known of each witness, by its address."""
    trouble = GaugeMetricFamily(
        "tongguan_proxy_audit_witness_trouble",
        "1 while the witness refuses, or has decided nothing for too long.",
        labels=["witness"],
    )
    cosigned = CounterMetricFamily(
        "tongguan_proxy_audit_witness_cosigned", "Checkpoints it cosigned.", labels=["witness"]
    )
    failures = CounterMetricFamily(
        "tongguan_proxy_audit_witness_failures",
        "Times it was asked and decided nothing.",
        labels=["witness"],
    )
    for witness in witnesses:
        trouble.add_metric([witness.name], int(bool(witness.trouble)))
        cosigned.add_metric([witness.name], witness.cosigned)
        failures.add_metric([witness.name], witness.failures)
    yield from (trouble, cosigned, failures)
