// A time line in words.

import { bytes, count, duration, plural } from "./format.js";

/**
 * @param {object[]} placements As in `GET /requests/{id}`.
 * @param {import("./timeline.js").Line} line
 * @returns {string[]}
 */
export function sentences(placements, line) {
  const first = placements[0];
  const started = placements.find((one) => one.actual);
  return [
    where(first),
    started && computed(started),
    started?.actual.wake_ms && woke(started.actual),
    started && waited(started),
    started?.actual.fetched && fetched(started.actual),
    started?.actual.landed && moved(started.actual),
    started && firstToken(started),
    alternative(first),
    ...placements.slice(1).map((placement, at) => again(placements[at], placement)),
    decoded(placements, line),
    stalled(line),
  ].filter(Boolean);
}

function where({ predicted, prompt_tokens: prompt, streams, options, actual }) {
  const uncached = plural(predicted.uncached_tokens, "uncached token");
  if (predicted.decode === undefined) return null; // not told to this key; `computed` says where it went
  if (!predicted.prefill) {
    const source = predicted.prefix_source ? `, after fetching what ${predicted.prefix_source} had cached` : "";
    return `The prompt stayed on ${predicted.decode}${source}: ${uncached} of ${count(prompt)}${besides(streams)}.`;
  }
  const local = options.find((one) => !one.prefill && !one.prefix_source && one.decode === predicted.decode);
  const spared = local && streams ? local.cost.stall_ms / streams : 0;
  const stall = spared >= 1 ? `; computed there, it would have made each of them wait for ${duration(spared)}` : "";
  const went =
    actual && actual.prefill !== predicted.prefill ? `meant for ${predicted.prefill}` : `sent to ${predicted.prefill}`;
  return `The prompt was ${went}: ${uncached} of ${count(prompt)}, to decode on ${predicted.decode}${besides(streams)}${stall}.`;
}

function besides(streams) {
  return streams ? `, beside ${plural(streams, "stream")}` : ", with no other stream there";
}

function computed({ actual, prompt_tokens: prompt }) {
  const by = actual.prefill || actual.decode;
  const cached = actual.cached_tokens
    ? `${count(actual.cached_tokens)} of ${plural(prompt, "prompt token")} came from a cache`
    : "none of the prompt was cached";
  return `${by} computed the prompt; ${cached}.`;
}

function woke({ wake_ms: ms, decode }) {
  return `The model did not serve on ${decode}: ${duration(ms)} went by until it did.`;
}

function waited({ actual }) {
  const ms = actual.queue_ms - (actual.wake_ms ?? 0);
  return ms >= 1 ? `It waited ${duration(ms)} in the queue of ${actual.prefill || actual.decode}.` : null;
}

function fetched({ fetched: { pages, bytes: size, waited_ms: ms }, prefix_source: source }) {
  return `${plural(pages, "KV page")} (${bytes(size)}) of the prefix came from ${source} within ${duration(ms)}.`;
}

function moved({ landed: { pages, bytes: size, waited_ms: ms, alone_ms: alone }, decode }) {
  const what = `${plural(pages, "KV page")} (${bytes(size)}) went to ${decode}`;
  const hidden = alone > 0 ? Math.max(0, 1 - ms / alone) : 0;
  if (ms < 1) return `${what}, all of it while the prompt was computed.`;
  const part =
    hidden > 0.05 ? `: about ${Math.round(100 * hidden)} % of that was hidden behind the computation, and` : ";";
  return `${what}${part} the last of them came ${duration(ms)} after the first token.`;
}

function firstToken({ actual, predicted }) {
  return `The first token was predicted after ${duration(predicted.ttft_ms)} and came after ${duration(actual.ttft_ms)}.`;
}

function alternative({ predicted, options, why }) {
  if (why) return `Why this way: ${why}.`;
  const others = options.filter((one) => one.route !== predicted.route);
  const names = { local: "on one worker", remote: "with a prefill worker", fetched: "after fetching a prefix" };
  return others.length
    ? `${others.map((one) => `Predicted ${names[one.route]}: first token after ${duration(one.ttft_ms)}`).join(". ")}.`
    : null;
}

function again(before, placement) {
  const outcome = before.outcome;
  const gap = placement.placed_ms - (before.actual?.last_ms ?? before.ended_ms ?? placement.placed_ms);
  const where = placement.actual?.decode ?? placement.predicted.decode ?? "another worker";
  const reason =
    outcome === "worker lost"
      ? `${before.actual?.decode ?? before.predicted.decode ?? "Its worker"} was lost`
      : outcome.startsWith("parked")
        ? `The answer moved${outcome.replace(/^parked(, to move)?/, "")}`
        : `It was placed again (${outcome})`;
  return `${reason}; ${where} went on ${duration(Math.max(0, gap))} later${placement.actual ? `, with a token after another ${duration(placement.actual.ttft_ms)}` : ""}.`;
}

function decoded(placements, line) {
  if (line.meanGap === null) return null;
  const { predicted } = placements.at(-1);
  return `Then a token came every ${duration(line.meanGap)} on average (predicted ${duration(predicted.itl_ms)}).`;
}

function stalled({ stalls }) {
  if (!stalls.length) return null;
  const reasons = { placed: " (its worker changed)", pages: " (waiting for its pages)", "": "" };
  const longest = [...stalls].sort((one, other) => other.gap - one.gap).slice(0, 3);
  const told = longest
    .map(({ gap, token, why }) => `${duration(gap)} before token ${count(token)}${reasons[why]}`)
    .join(", ");
  return `${plural(stalls.length, "stall")}: ${told}${stalls.length > 3 ? ", …" : ""}.`;
}
