// The cluster as it is now: workers, routers, what waits, what happened. One snapshot a second at most, from
// `GET /cluster/live`; while the view is hidden there is no stream.

import { ApiError, request, serverSentEvents } from "./api.js";
import { drain, scale, SleepButton } from "./changes.js";
import { announce, h, s, setAttribute, setText } from "./dom.js";
import { bytes, clock, count, duration, percent, plural, rate } from "./format.js";
import { ModelList, RESIDENCIES } from "./models.js";

const HISTORY = 60; // snapshots whose speeds are drawn
const GHOST_MS = 60_000; // a worker that has gone stays in sight this long
const MISSED_S = 600; // one that was lost, longer
const SILENT_MS = 15_000; // without a sign of life for this long the stream is dead
const RETRY_MS = [500, 1000, 2000, 4000];
const SHOWN_EVENTS = 40;
const TOGETHER_S = 3; // events of several routers about one thing

const PAGE_STATES = ["used", "reserved", "cached", "free", "quarantined"];

const STATES = {
  ready: ["ok", "ready"],
  draining: ["warn", "draining"],
  syncing: ["warn", "joining"],
  connecting: ["bad", "not connected"],
  refused: ["bad", "refused"],
  gone: ["bad", "gone"],
};

export class ClusterView {
  /**
   * @param {() => object} session Returns the latest answer of `GET /session`.
   * @param {() => void} onBroken Called when the stream has broken.
   */
  constructor(session, onBroken) {
    this.session = session;
    this.onBroken = onBroken;
    this.cards = new Map(); // by worker
    this.status = null;
    this.stream = null;
    this.figures = h("dl", { class: "figures-grid" });
    this.stamp = h("p", { class: "hint stamp" });
    this.flows = h("ul", { class: "flows" });
    this.workers = h("div", { class: "workers" });
    this.models = new ModelList(session);
    this.routers = h("tbody");
    this.scaleRouters = h("button", {
      type: "button",
      class: "quiet",
      text: "Scale",
      "aria-label": "Scale routers",
      hidden: true,
      onclick: () => {
        const value = this.status.scaling.routers;
        scale("routers", [{ name: "routers", label: "Routers", value, least: 1 }]);
      },
    });
    this.events = h("ol", { class: "events" });
    this.planner = h("p", { class: "hint" });
    this.element = h(
      "div",
      { class: "cluster" },
      h("div", { class: "row spread" }, h("h1", { text: "Cluster" }), this.stamp),
      this.figures,
      this.models.element,
      h(
        "section",
        { "aria-labelledby": "workers-title" },
        h("h2", { id: "workers-title", text: "Workers" }),
        this.flows,
        this.workers,
        this.planner,
      ),
      h(
        "section",
        { "aria-labelledby": "routers-title" },
        h("div", { class: "row spread" }, h("h2", { id: "routers-title", text: "Routers" }), this.scaleRouters),
        h(
          "div",
          { class: "scroll", tabindex: "0", role: "group", "aria-label": "Routers" },
          h(
            "table",
            {},
            h(
              "thead",
              {},
              h(
                "tr",
                {},
                ["Router", "State", "Address", "Host"].map((head) => h("th", { scope: "col", text: head })),
                h("td"),
              ),
            ),
            this.routers,
          ),
        ),
      ),
      h("section", { "aria-labelledby": "events-title" }, h("h2", { id: "events-title", text: "Events" }), this.events),
    );
  }

  /** Follows the cluster from now on. */
  show() {
    if (this.stream) return;
    this.stream = new AbortController();
    this.#follow(this.stream.signal);
  }

  /** Stops following it. */
  hide() {
    this.stream?.abort();
    this.stream = null;
  }

  async #follow(signal) {
    let tries = 0;
    while (!signal.aborted) {
      const attempt = new AbortController();
      const abort = () => attempt.abort();
      signal.addEventListener("abort", abort);
      let silence = 0;
      const alive = () => {
        clearTimeout(silence);
        silence = setTimeout(abort, SILENT_MS);
      };
      try {
        alive();
        const response = await request("cluster/live", { signal: attempt.signal });
        for await (const data of serverSentEvents(response)) {
          alive();
          tries = 0;
          this.#receive(data === null ? this.status : JSON.parse(data));
        }
      } catch (error) {
        if (error instanceof ApiError && (error.status === 401 || error.status === 403)) {
          setText(this.stamp, error.message);
          return;
        }
        if (!(error instanceof ApiError) && error.name !== "AbortError") throw error;
      } finally {
        clearTimeout(silence);
        signal.removeEventListener("abort", abort);
      }
      if (signal.aborted) return;
      if (tries === 0) this.onBroken();
      await new Promise((resolve) => setTimeout(resolve, RETRY_MS[Math.min(tries, RETRY_MS.length - 1)]));
      tries += 1;
    }
  }

  #receive(status) {
    const now = performance.now();
    const seconds = this.receivedAt ? (now - this.receivedAt) / 1000 : 0;
    this.receivedAt = now;
    this.status = status;
    this.#showWorkers(status, seconds);
    this.#showFigures(status);
    this.models.show(status);
    this.#showFlows(status);
    this.#showRouters(status);
    this.#showEvents(status);
    setText(this.stamp, `as of ${clock(Date.now())}`);
    setText(this.planner, status.plan ? `Planner: ${status.plan.reason ?? "no change"}` : "");
  }

  // ---- workers ----

  #showWorkers(status, seconds) {
    const now = performance.now();
    for (const worker of status.workers) {
      if (!this.cards.has(worker.id)) this.cards.set(worker.id, this.#newCard(worker.id));
      const sleepsAlone = worker.residency && status.workers.filter(({ model }) => model === worker.model).length > 1;
      this.cards.get(worker.id).show(worker, status.models.length > 1, sleepsAlone, seconds, now);
    }
    const present = new Set(status.workers.map(({ id }) => id));
    const missed = missedWorkers(status);
    for (const id of missed.keys()) if (!this.cards.has(id)) this.cards.set(id, this.#newCard(id));
    for (const [id, card] of this.cards) {
      if (present.has(id)) continue;
      card.gone(missed.get(id) ?? `not seen for ${duration(now - card.seenAt)}`);
      if (!missed.has(id) && now - card.seenAt > GHOST_MS) this.cards.delete(id);
    }
    const order = { prefill: 0, combined: 1 };
    const cards = [...this.cards.values()].sort(
      (one, other) => order[one.role] - order[other.role] || one.id.localeCompare(other.id, "en", { numeric: true }),
    );
    const wanted = cards.map(({ element }) => element);
    wanted.forEach(
      (element, at) =>
        this.workers.children[at] !== element && this.workers.insertBefore(element, this.workers.children[at] ?? null),
    );
    while (this.workers.children.length > wanted.length) this.workers.lastChild.remove();
  }

  #newCard(id) {
    return new WorkerCard(id, this.session, () => this.#drain(id, "worker"));
  }

  #showFigures(status) {
    const loads = status.workers.map(({ load }) => load).filter(Boolean);
    const sum = (of) => loads.reduce((total, load) => total + of(load), 0);
    const live = status.workers.filter(({ state }) => state === "ready").length;
    const all = status.workers.length + missedWorkers(status).size;
    const cards = [...this.cards.values()];
    const [cached, computed] = ["cachedTokens", "prefillTokens"].map((name) =>
      cards.reduce((total, card) => total + card.recent(name), 0),
    );
    const speed = cards.reduce((total, card) => total + card.speed, 0);
    const figures = [
      ["State", status.ready ? "ready" : "not ready", status.ready ? "ok" : "bad"],
      ["Workers", `${live} of ${all} ready`, live === all ? "" : "warn"],
      ["Running", count(sum((load) => load.running))],
      ["Waiting", count(sum((load) => load.waiting))],
      ["Tokens/s", rate(speed)],
      ["From a cache", cached + computed ? percent(cached / (cached + computed)) : "–"],
      ["Redis", status.redis.ok ? "answers" : "does not answer", status.redis.ok ? "" : "bad"],
      ["Predictions", status.trusted ? "trusted" : "mostly wrong", status.trusted ? "" : "warn"],
    ];
    if (this.figures.children.length !== figures.length)
      this.figures.replaceChildren(...figures.map(([name]) => h("div", {}, h("dt", { text: name }), h("dd"))));
    figures.forEach(([, text, tone = ""], at) => {
      const value = this.figures.children[at].lastChild;
      setText(value, text);
      setAttribute(value, "class", tone || null);
    });
  }

  #showFlows({ waiting }) {
    const lines = waiting.map(({ decode, prefill, prefix_source: source, requests }) => {
      const way = prefill ? `${prefill} → ${decode}` : source ? `${decode} (prefix from ${source})` : decode;
      return `${way}: ${requests}`;
    });
    const key = lines.join("\n");
    if (key === this.flowsKey) return;
    this.flowsKey = key;
    this.flows.replaceChildren(
      ...(lines.length
        ? [
            h("li", { class: "flows-title", text: "Before their first token:" }),
            ...lines.map((text) => h("li", { text })),
          ]
        : []),
    );
  }

  // ---- routers and events ----

  #showRouters({ routers, scaling }) {
    this.scaleRouters.hidden = !(scaling && this.session().operator);
    const key = JSON.stringify(routers);
    if (key === this.routersKey) return;
    this.routersKey = key;
    this.routers.replaceChildren(
      ...routers.map(({ id, ready, error, trusted, address, host }) => {
        const [tone, text] = error
          ? ["bad", error]
          : !ready
            ? ["warn", "not ready"]
            : trusted === false
              ? ["warn", "ready; predictions are mostly wrong"]
              : ["ok", "ready"];
        const drain = this.session().operator
          ? h("button", {
              type: "button",
              class: "quiet",
              text: "Drain",
              "aria-label": `Drain ${id}`,
              onclick: () => this.#drain(id, "router"),
            })
          : null;
        return h(
          "tr",
          {},
          h("th", { scope: "row", text: id }),
          h("td", {}, h("span", { class: `state ${tone}`, text })),
          h("td", { text: address }),
          h("td", { text: host }),
          h("td", { class: "to-right" }, drain),
        );
      }),
    );
  }

  #showEvents({ events }) {
    const merged = [];
    for (const event of events) {
      const same = merged.find(
        (one) =>
          one.kind === event.kind &&
          one.worker === event.worker &&
          event.at - one.at < TOGETHER_S &&
          !one.seenBy.has(event.router),
      );
      if (same) {
        same.requests += event.requests;
        same.seenBy.add(event.router);
      } else {
        merged.push({ ...event, seenBy: new Set([event.router]) });
      }
    }
    const shown = merged.slice(-SHOWN_EVENTS).reverse();
    const key = shown.map(({ at, requests }) => `${at} ${requests}`).join();
    if (key === this.eventsKey) return;
    const newest = shown[0];
    if (this.eventsKey !== undefined && newest && BAD_EVENTS.has(newest.kind)) announce(eventText(newest));
    this.eventsKey = key;
    this.events.replaceChildren(
      ...(shown.length ? shown : [null]).map((event) =>
        event
          ? h(
              "li",
              { class: BAD_EVENTS.has(event.kind) ? "bad" : null },
              h("time", { text: clock(event.at * 1000) }),
              h("span", { text: eventText(event) }),
            )
          : h("li", {}, h("span", { text: "Nothing has happened since the routers started." })),
      ),
    );
  }

  // ---- changes ----

  #drain(name, kind) {
    let warning = "";
    if (kind === "worker" && this.#isLastCombined(name))
      warning = " It is the last combined worker that is ready: nobody will answer requests.";
    else if (kind === "router" && this.status.routers.length === 1)
      warning = " It is the only router: the server and this page end with it.";
    return drain(name, warning);
  }

  #isLastCombined(name) {
    const ready = this.status.workers.filter(({ role, state }) => role === "combined" && state === "ready");
    return ready.length === 1 && ready[0].id === name;
  }
}

const BAD_EVENTS = new Set(["lost", "crashed", "request_crashes_workers"]);

// Workers that were lost lately and have not come back: why, by name.
function missedWorkers({ workers, events }) {
  const missed = new Map();
  for (const event of events) {
    if (event.kind === "lost" || event.kind === "crashed") {
      if (Date.now() / 1000 - event.at < MISSED_S) missed.set(event.worker, `${clock(event.at * 1000)}: ${event.text}`);
    } else if (event.kind === "joined" || event.kind === "left") {
      missed.delete(event.worker);
    }
  }
  for (const { id } of workers) missed.delete(id);
  return missed;
}

function eventText({ kind, worker, text, requests }) {
  const elsewhere = requests ? `; ${plural(requests, "request")} went on elsewhere` : "";
  switch (kind) {
    case "joined":
      return `${worker} joined: ${text}`;
    case "drains":
      return `${worker} drains and ${text}`;
    case "left":
      return `${worker} has ended in order${elsewhere}`;
    case "lost":
      return `${worker} was lost: ${text}${elsewhere}`;
    case "crashed":
      return `${worker} died: ${text}${elsewhere}`;
    case "role":
      return `${worker}: ${text}`;
    default:
      return text;
  }
}

// ---- one worker ----

class WorkerCard {
  constructor(id, session, drain) {
    this.id = id;
    this.role = "combined";
    this.history = []; // {at, decodeTokens, prefillTokens, cachedTokens} of the last snapshots
    this.speeds = [];
    this.speed = 0;
    this.seenAt = 0;
    const meter = (name) => {
      const bar = h("div", { class: "meter" }, h("i"));
      const value = h("span", { class: "meter-value" });
      return { row: h("div", { class: "meter-row" }, h("span", { text: name }), bar, value), bar, value };
    };
    this.state = h("span", { class: "state" });
    this.badge = h("span", { class: "badge" });
    this.reason = h("p", { class: "error" });
    this.batch = meter("Batch");
    this.pages = {
      bar: h(
        "div",
        { class: "meter pages" },
        PAGE_STATES.map((state) => h("i", { class: state })),
      ),
      text: h("p", { class: "hint" }),
      share: h("span", { class: "meter-value" }),
    };
    this.line = s("polyline", { class: "spark", fill: "none", "vector-effect": "non-scaling-stroke" });
    this.facts = h("dl", { class: "facts" });
    this.device = h("p", { class: "hint device" });
    const title = h("h3", { id: `worker-${id}`, text: id });
    this.element = h(
      "article",
      { class: "worker", "aria-labelledby": title.id, data: { worker: id } },
      h("div", { class: "row spread" }, title, this.badge),
      h(
        "div",
        { class: "row spread" },
        this.state,
        session().operator
          ? h(
              "div",
              { class: "row" },
              (this.sleep = new SleepButton(id)).element,
              (this.button = h("button", {
                type: "button",
                class: "quiet",
                text: "Drain",
                "aria-label": `Drain ${id}`,
                onclick: drain,
              })),
            )
          : null,
      ),
      this.reason,
      this.batch.row,
      h("div", { class: "meter-row" }, h("span", { text: "KV pages" }), this.pages.bar, this.pages.share),
      this.pages.text,
      this.facts,
      s(
        "svg",
        { class: "spark-box", viewBox: "0 0 100 24", preserveAspectRatio: "none", "aria-hidden": "true" },
        this.line,
      ),
      this.device,
    );
  }

  /**
   * Shows a worker of a snapshot that came `seconds` after the one before.
   * @param {boolean} sleepsAlone Its model has several workers that can sleep.
   */
  show(worker, severalModels, sleepsAlone, seconds, now) {
    this.seenAt = now;
    this.role = worker.role;
    const { load, info } = worker;
    const restarted = this.incarnation !== undefined && this.incarnation !== worker.incarnation;
    this.incarnation = worker.incarnation;
    if (restarted) this.history = [];
    this.#setState(worker.state, worker.reason, worker.residency?.state);
    setText(this.badge, severalModels ? `${worker.role} · ${worker.model}` : worker.role);
    this.element.dataset.role = worker.role;
    if (this.sleep) {
      this.sleep.element.hidden = !sleepsAlone;
      if (sleepsAlone) this.sleep.show(worker.residency.state, load ? load.running + load.waiting : 0);
    }
    if (!load || !info) {
      this.speed = 0;
      return;
    }
    this.element.dataset.known = "";
    this.#count(load, seconds, now);
    const most = info.max_num_seqs || Math.max(load.running, 1);
    this.#setMeter(this.batch, load.running / most, `${load.running} of ${info.max_num_seqs || "–"}`);
    this.#showPages(load.pages, info);
    const streams = Object.values(worker.routers).reduce((sum, view) => sum + view.sequences, 0);
    const facts = [
      ["Waiting", load.waiting ? `${load.waiting}, ${plural(load.waiting_tokens, "token")}` : "0"],
      ["Decoding", count(load.decodes)],
      ["Streams", count(streams)],
      ["Step", load.step_ms ? duration(load.step_ms) : "–"],
      ["Tokens/s", rate(this.speed)],
      ["Cached", this.#hitRate(load)],
    ];
    this.#setFacts(facts);
    const points = this.speeds.map(
      (speed, at) =>
        `${((100 * (HISTORY - this.speeds.length + at)) / (HISTORY - 1)).toFixed(1)},${(23 - (22 * speed) / Math.max(1, ...this.speeds)).toFixed(1)}`,
    );
    this.line.setAttribute("points", points.join(" "));
    const where = `${info.device || "device unknown"} · ${info.dtype} · pages by ${info.transport}`;
    const slow = load.slowdown > 1.25 ? ` · ${load.slowdown.toFixed(1)} times slower than predicted` : "";
    setText(this.device, `${where} · ${worker.host}, process ${worker.pid}${slow}`);
  }

  /** The worker is not in the last snapshot. */
  gone(reason) {
    this.speed = 0;
    if (this.sleep) this.sleep.element.hidden = true;
    this.#setState("gone", reason);
  }

  /** What was counted within the history, of `cachedTokens` or `prefillTokens`. */
  recent(name) {
    return this.history.length > 1 ? this.history.at(-1)[name] - this.history[0][name] : 0;
  }

  #setState(state, reason, residency) {
    const [tone, text] = (state === "ready" && RESIDENCIES[residency]) || (STATES[state] ?? ["warn", state]);
    setAttribute(this.state, "class", `state ${tone}`);
    setText(this.state, text);
    setText(this.reason, tone === "ok" ? "" : (reason ?? ""));
    this.reason.hidden = tone === "ok" || !reason;
    setAttribute(this.element, "data-state", state);
    if (this.button) this.button.disabled = state === "draining" || tone === "bad";
  }

  #count(load, seconds, now) {
    const last = this.history.at(-1);
    this.history.push({
      at: now,
      decodeTokens: load.decode_tokens,
      prefillTokens: load.prefill_tokens,
      cachedTokens: load.cached_tokens,
    });
    if (this.history.length > HISTORY) this.history.shift();
    this.speed = last && seconds ? Math.max(0, load.decode_tokens - last.decodeTokens) / ((now - last.at) / 1000) : 0;
    this.speeds.push(this.speed);
    if (this.speeds.length > HISTORY) this.speeds.shift();
  }

  #hitRate(load) {
    const recent = this.recent("cachedTokens") + this.recent("prefillTokens");
    const [cached, all] = recent
      ? [this.recent("cachedTokens"), recent]
      : [load.cached_tokens, load.cached_tokens + load.prefill_tokens];
    return all ? percent(cached / all) : "–";
  }

  #setMeter({ bar, value }, share, text) {
    bar.firstChild.style.width = `${Math.min(100, 100 * share)}%`;
    setText(value, text);
  }

  #showPages(pages, info) {
    PAGE_STATES.forEach(
      (state, at) => (this.pages.bar.children[at].style.width = `${(100 * pages[state]) / info.num_pages}%`),
    );
    setText(this.pages.share, percent((pages.used + pages.reserved + pages.quarantined) / info.num_pages));
    const told = PAGE_STATES.filter((state) => pages[state]).map((state) => `${count(pages[state])} ${state}`);
    setText(
      this.pages.text,
      `${told.join(", ")} of ${count(info.num_pages)} (${bytes(info.num_pages * info.page_bytes)})`,
    );
  }

  #setFacts(facts) {
    if (!this.facts.children.length)
      this.facts.append(...facts.map(([name]) => h("div", {}, h("dt", { text: name }), h("dd"))));
    facts.forEach(([, text], at) => setText(this.facts.children[at].lastChild, text));
  }
}
