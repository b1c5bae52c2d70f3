// The time line of an answer, from what `GET /requests/{id}` tells: where each ms went, beside what was predicted.

import { h, s } from "./dom.js";
import { sentences } from "./explain.js";
import { count, duration } from "./format.js";

const LEAST_STALL_MS = 30;
const STALL_FACTOR = 3; // a gap of this many usual ones is a stall
const SHOWN_STALLS = 50;
const SHOWN_OPTIONS = 8;

/** The part of the document that the page keeps. */
export function keptPlacements(document) {
  return document.placements.map((placement) => ({ ...placement, options: placement.options.slice(0, SHOWN_OPTIONS) }));
}

/**
 * @typedef {{kind: string, from: number, to: number, worker: string}} Phase Times in ms since the call arrived.
 * @typedef {{phases: Phase[], first: number|null, total: number, ticks: number[], stalls: object[], meanGap: number|null}} Line
 */

/**
 * Puts the placements of a request on one line.
 * @param {object[]} placements As in `GET /requests/{id}`.
 * @returns {Line} `first` is the time of the first token, `total` that of the last thing known. The phases have no gaps
 *     between them, so their lengths add up to `total`.
 */
export function lineOf(placements) {
  const phases = [];
  let at = 0;
  let first = null;
  const ticks = [];
  const until = (kind, to, worker = "") => {
    if (to > at) phases.push({ kind, from: at, to, worker });
    at = Math.max(at, to);
  };
  for (const placement of placements) {
    const { actual } = placement;
    until(placement.attempt === 0 ? "router" : "replaced", placement.placed_ms);
    if (!actual) {
      if (placement.ended_ms !== null) until("attempt", placement.ended_ms);
      continue;
    }
    const decode = actual.decode;
    const computing = actual.prefill || decode;
    const begins = placement.placed_ms;
    const firstAt = begins + actual.ttft_ms;
    if (actual.fetched) until("fetch", Math.min(firstAt, begins + actual.fetched.waited_ms), actual.prefix_source);
    const queued = Math.max(at, begins);
    if (actual.wake_ms) until("wake", Math.min(firstAt, queued + actual.wake_ms), decode);
    until("queue", Math.min(firstAt, queued + actual.queue_ms), computing);
    until("prefill", firstAt, computing);
    first ??= firstAt;
    const second = firstAt + (actual.first_gap_ms ?? 0);
    if (actual.landed && actual.first_gap_ms !== null)
      until("transfer", Math.min(second, firstAt + actual.landed.waited_ms), decode);
    until("decode", actual.last_ms, decode);
    for (const tick of actual.ticks_ms ?? []) ticks.push(tick);
  }
  const meanGap = ticks.length > 1 ? (ticks.at(-1) - ticks[0]) / (ticks.length - 1) : null;
  return { phases, first, total: at, ticks, stalls: stallsIn(ticks, placements), meanGap };
}

function stallsIn(ticks, placements) {
  const gaps = ticks.slice(1).map((tick, index) => tick - ticks[index]);
  if (!gaps.length) return [];
  const usualGap = [...gaps].sort((one, other) => one - other)[Math.floor(gaps.length / 2)];
  const least = Math.max(LEAST_STALL_MS, STALL_FACTOR * usualGap);
  return gaps
    .map((gap, index) => ({ from: ticks[index], to: ticks[index + 1], gap, token: index + 2 }))
    .filter(({ gap }) => gap > least)
    .slice(0, SHOWN_STALLS)
    .map((stall) => ({ ...stall, why: whyStalled(stall, placements) }));
}

function whyStalled(stall, placements) {
  const moved = placements.find((one) => one.attempt > 0 && one.placed_ms >= stall.from && one.placed_ms <= stall.to);
  if (moved) return "placed";
  const { actual } = placements[0];
  return actual?.landed && stall.token === 2 ? "pages" : "";
}

const NAMES = {
  router: "router",
  replaced: "waiting for another worker",
  attempt: "given back",
  fetch: "fetching a prefix",
  wake: "waking the model",
  queue: "queue",
  prefill: "prefill",
  transfer: "pages on their way",
  decode: "decode",
};

/** What is shown under an answer. */
export function timeLine(placements) {
  const line = lineOf(placements);
  const predicted = predictedLine(placements[0].predicted, line);
  const told = sentences(placements, line);
  const early = { to: line.first ?? line.total, from: 0 };
  const scale = Math.max(early.to, predicted.first);
  const details = h(
    "details",
    {},
    h("summary", { text: "Why it took this long" }),
    h(
      "ul",
      { class: "told" },
      told.map((sentence) => h("li", { text: sentence })),
    ),
    phaseTable(line),
    optionsTable(placements[0]),
  );
  const panels = h(
    "div",
    { class: "panels", role: "img", "aria-label": `Time line: ${summary(line)}` },
    panel(`to the first token: ${duration(early.to)}`, [
      ["was", bars(line.phases, 0, early.to, scale)],
      ["predicted", bars(predicted.early, 0, scale, scale)],
    ]),
    line.first !== null && line.total > line.first ? decodePanel(line, predicted) : null,
  );
  return h(
    "div",
    { class: "time-line", data: { total: line.total.toFixed(2), first: (line.first ?? 0).toFixed(2) } },
    panels,
    legend(line),
    details,
  );
}

function decodePanel(line, predicted) {
  const length = line.total - line.first;
  const scale = Math.max(length, predicted.decodeMs);
  const was = bars(line.phases, line.first, line.total, scale);
  was.append(tickMarks(line.ticks, line.first, scale));
  for (const stall of line.stalls) was.append(mark("stall", stall.from - line.first, stall.to - line.first, scale));
  const rows = [["was", was]];
  if (predicted.decodeMs)
    rows.push(["predicted", bars([{ kind: "decode", from: 0, to: predicted.decodeMs }], 0, scale, scale)]);
  return panel(`then ${duration(length)}`, rows);
}

function predictedLine(predicted, line) {
  const { cost } = predicted;
  const early = [];
  let at = 0;
  const parts = cost
    ? [
        ["wake", cost.wake_ms],
        ["queue", cost.wait_ms],
        ["prefill", cost.prefill_ms],
        ["router", cost.handoff_ms],
      ]
    : [["prefill", predicted.ttft_ms]]; // what other tenants' requests add is not told apart
  for (const [kind, length] of parts) {
    if (length > 0) early.push({ kind, from: at, to: at + length });
    at += Math.max(0, length);
  }
  return { early, first: at, decodeMs: Math.max(0, line.ticks.length - 1) * predicted.itl_ms };
}

function panel(title, rows) {
  return h(
    "div",
    { class: "panel" },
    h("div", { class: "panel-title", text: title }),
    rows.map(([name, bar]) => [h("span", { class: "row-name", text: name }), bar]),
  );
}

function bars(phases, from, to, scale) {
  const shown = phases.filter((phase) => phase.from < to && phase.to > from);
  return h(
    "div",
    { class: "bar" },
    shown.map((phase) => mark(phase.kind, Math.max(from, phase.from) - from, Math.min(to, phase.to) - from, scale)),
  );
}

function mark(kind, from, to, scale) {
  const element = h("i", { class: `phase ${kind}` });
  element.style.left = `${(100 * from) / scale}%`;
  element.style.width = `${(100 * (to - from)) / scale}%`;
  return element;
}

function tickMarks(ticks, first, scale) {
  const path = ticks.map((tick) => `M${((1000 * (tick - first)) / scale).toFixed(1)} 0V10`).join("");
  return s(
    "svg",
    { class: "ticks", viewBox: "0 0 1000 10", preserveAspectRatio: "none" },
    s("path", { d: path, "vector-effect": "non-scaling-stroke" }),
  );
}

function legend(line) {
  const kinds = [...new Set(line.phases.map((phase) => phase.kind))];
  const entries = kinds.map((kind) => h("li", {}, h("i", { class: `key ${kind}` }), NAMES[kind]));
  if (line.stalls.length) entries.push(h("li", {}, h("i", { class: "key stall" }), "stall"));
  return h("ul", { class: "legend", "aria-hidden": "true" }, entries);
}

function summary(line) {
  return line.phases
    .map(
      (phase) => `${NAMES[phase.kind]}${phase.worker ? ` on ${phase.worker}` : ""} ${duration(phase.to - phase.from)}`,
    )
    .join(", ");
}

function phaseTable(line) {
  const rows = line.phases.map(({ kind, from, to, worker }) =>
    h(
      "tr",
      {},
      h("th", { scope: "row", text: NAMES[kind] }),
      h("td", { text: worker }),
      h("td", { class: "to-right", text: duration(from) }),
      h("td", { class: "to-right", text: duration(to - from) }),
    ),
  );
  rows.push(
    h(
      "tr",
      { class: "sum" },
      h("th", { scope: "row", text: "sum" }),
      h("td"),
      h("td"),
      h("td", { class: "to-right", text: duration(line.total) }),
    ),
  );
  return table("Phases", ["Phase", "Worker", "Begins", "Takes"], rows, 2);
}

function optionsTable({ predicted, options }) {
  if (!options.length || !options[0].cost) return null;
  const rows = options.map((option) => {
    const chosen =
      option.decode === predicted.decode &&
      option.prefill === predicted.prefill &&
      option.prefix_source === predicted.prefix_source;
    const way = option.prefill
      ? `${option.prefill} → ${option.decode}`
      : option.prefix_source
        ? `${option.decode} with the cache of ${option.prefix_source}`
        : option.decode;
    const figures = [
      count(option.uncached_tokens),
      duration(option.ttft_ms),
      duration(option.gaps_ms),
      duration(option.cost_ms),
    ];
    return h(
      "tr",
      { class: chosen ? "chosen" : null },
      h("th", { scope: "row" }, way, chosen ? " (chosen)" : ""),
      figures.map((figure) => h("td", { class: "to-right", text: figure })),
    );
  });
  return table(
    "What each way was predicted to cost",
    ["Way", "New tokens", "First token", "Later delays", "Cost"],
    rows,
    1,
  );
}

function table(caption, heads, rows, firstNumber) {
  return h(
    "div",
    { class: "scroll", tabindex: "0", role: "group", "aria-label": caption },
    h(
      "table",
      {},
      h("caption", { text: caption }),
      h(
        "thead",
        {},
        h(
          "tr",
          {},
          heads.map((head, at) => h("th", { scope: "col", class: at >= firstNumber ? "to-right" : null, text: head })),
        ),
      ),
      h("tbody", {}, rows),
    ),
  );
}
