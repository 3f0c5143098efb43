"use strict";
// Asks for the summary every two seconds while the page is seen. Text goes in as text, never as markup.
(() => {
  const EVERY_MS = 2000;
  const HEAT_EVERY_MS = 10000;
  const at = (id) => document.getElementById(id);
  const none = "–";
  let before = null;
  let planned = null;
  let heatMs = -HEAT_EVERY_MS;

  const size = (bytes) => {
    if (bytes === null || bytes === undefined) return none;
    const units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let value = bytes, unit = 0;
    while (value >= 1024 && unit < units.length - 1) { value /= 1024; unit += 1; }
    return `${value.toFixed(unit > 1 ? 1 : 0)} ${units[unit]}`;
  };
  const ms = (value) => (value === null || value === undefined ? none : `${value.toFixed(value < 10 ? 1 : 0)} ms`);
  const percent = (share) => `${(100 * share).toFixed(0)} %`;

  const element = (name, text, kind) => {
    const made = document.createElement(name);
    made.textContent = text;
    if (kind) made.className = kind;
    return made;
  };
  const rows = (body, table) => {
    body.replaceChildren(...table.map((cells) => {
      const row = document.createElement("tr");
      cells.forEach((cell, index) => {
        const made = element(index ? "td" : "th", String(cell ?? none));
        if (!index) made.scope = "row";
        row.append(made);
      });
      return row;
    }));
  };
  const pairs = (list, facts) => {
    list.replaceChildren(...facts.map(([name, value]) => wrap(name, value)));
  };
  const wrap = (name, value) => {
    const box = document.createElement("div");
    box.append(element("dt", name), element("dd", String(value ?? none)));
    return box;
  };

  const state = (summary) => {
    const text = summary.ready ? "Ready" : `Not ready: ${summary.reasons.join("; ")}`;
    const line = at("state");
    if (line.textContent !== text) line.textContent = text;
    line.className = summary.ready ? "" : "bad";
  };
  const engine = (summary) => {
    const now = summary.engine, facts = [];
    if (summary.model) facts.push(["Model", `${summary.model.id} (${summary.model.dtype} on ${summary.model.device})`]);
    if (now) {
      let rate = null;
      if (before && before.engine && summary.at_unix_s > before.at_unix_s) {
        rate = (now.generation_tokens_total - before.engine.generation_tokens_total) / (summary.at_unix_s - before.at_unix_s);
      }
      facts.push(
        ["Running", `${now.running} of ${now.sequences_limit}`],
        ["Waiting", `${now.waiting} of ${now.waiting_limit}`],
        ["Tokens per second", rate === null ? none : rate.toFixed(0)],
        ["KV blocks held", `${now.kv_blocks_used} of ${now.kv_blocks_total}`],
        ["KV blocks cached", now.kv_blocks_cached],
        ["Prefix found", now.prefix_tokens_queried_total ? percent(now.prefix_tokens_hit_total / now.prefix_tokens_queried_total) : none],
        ["Preempted", now.preemptions_total],
      );
    }
    const memory = summary.memory;
    if (memory) {
      facts.push(["Memory limit", size(memory.limit_bytes)], ["Headroom", size(memory.headroom_bytes)], ["This process", size(memory.process_bytes)]);
    }
    pairs(at("engine"), facts);
  };
  const classes = (summary) => rows(at("classes"), summary.classes.map((c) => [
    c.class, c.requests_total, c.running, c.waiting,
    ms(c.ttft_p50_ms), ms(c.ttft_p99_ms), ms(c.inter_token_p50_ms), ms(c.inter_token_p99_ms),
  ]));
  const devices = (topology) => {
    rows(at("devices"), topology.devices.map((d) => [
      d.id, d.name, size(d.driver.used_bytes), size(d.driver.free_bytes),
      size(d.allocator && d.allocator.allocated_bytes), size(d.allocator && d.allocator.reserved_bytes), d.numa_node,
    ]));
    at("missing").textContent = topology.missing.length ? `Not seen: ${topology.missing.join("; ")}` : "";
  };
  // 0, 1, 2, 5 -> 0–2, 5
  const ranges = (numbers) => {
    const found = [];
    numbers.forEach((number) => {
      const last = found[found.length - 1];
      if (last && number === last[1] + 1) last[1] = number;
      else found.push([number, number]);
    });
    return found.map(([first, last]) => (first === last ? `${first}` : `${first}–${last}`)).join(", ");
  };
  const plan = (placed) => {
    rows(at("plan"), placed.operators.map((row) => [
      row.operator, row.precision, row.group, row.layers.length ? ranges(row.layers) : null,
      `${row.rows} × ${row.cols}`, size(row.bytes),
    ]));
    const ways = placed.schedule.map((way) => {
      const units = [...new Set([...way.first, ...way.each_layer, ...way.last].map((stage) => stage.unit))];
      return `${way.rows} rows: ${units.join(", ")}${way.one_call ? ", all layers in one call" : ""}`;
    });
    at("plan-words").textContent = `${size(placed.bytes)} of weights; keys and values ${placed.kv}, computed in ${placed.compute}. ${ways.join("; ")}.`;
  };
  const sections = (summary) => {
    at("sections").replaceChildren(...Object.entries(summary.sections).map(([name, facts]) => {
      const box = document.createElement("section");
      const title = element("h2", name[0].toUpperCase() + name.slice(1));
      title.id = `h-${name}`;
      box.setAttribute("aria-labelledby", title.id);
      const list = document.createElement("dl");
      if (facts === null) box.append(title, element("p", "not running in this agent"));
      else {
        pairs(list, Object.entries(facts).map(([key, value]) => [key, typeof value === "object" && value !== null ? JSON.stringify(value) : value]));
        box.append(title, list);
      }
      return box;
    }));
  };
  const heat = async () => {
    const table = await ask("v1/node/heatmap");
    const words = table.pools.map((row) => {
      const known = row.max.filter((share) => share !== null);
      return known.length ? `${row.pool} now ${percent(known[known.length - 1])}, at most ${percent(Math.max(...known))}` : "";
    }).filter(Boolean).join("; ");
    at("heat").src = `v1/node/heatmap.svg?t=${Date.now()}`;
    at("heat").alt = `Memory pressure over time: ${words || "no sample yet"}`;
    at("heat-words").textContent = words;
  };

  const ask = async (path) => {
    const answer = await fetch(path, { cache: "no-store" });
    if (!answer.ok) throw new Error(`${path}: ${answer.status}`);
    return answer.json();
  };
  const turn = async () => {
    if (!document.hidden) {
      try {
        const summary = await ask("v1/node/summary");
        state(summary); engine(summary); classes(summary); sections(summary);
        before = summary;
        if (summary.model && summary.model.id !== planned) { plan(await ask("v1/node/plan")); planned = summary.model.id; }
        if (summary.memory) {
          devices(await ask("v1/node/topology"));
          if (performance.now() - heatMs >= HEAT_EVERY_MS) { heatMs = performance.now(); await heat(); }
        }
      } catch (problem) {
        at("state").textContent = "The agent does not answer";
        at("state").className = "bad";
      }
    }
    setTimeout(turn, EVERY_MS);
  };
  turn();
})();
