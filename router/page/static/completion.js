// One answer of the model: the streamed call of /v1/chat/completions, and what the page measures of it.

import { ApiError, request, serverSentEvents } from "./api.js";

/** A new id for a request; the answer's time line is asked for by it. */
export function newRequestId() {
  const random = crypto.getRandomValues(new Uint8Array(16));
  return `page_${Array.from(random, (byte) => byte.toString(16).padStart(2, "0")).join("")}`;
}

/**
 * What is measured of an answer. Times are in ms since the call was made.
 * @typedef {{ttft: number|null, e2e: number|null, last: number|null, tokens: number|null, promptTokens: number|null,
 *     cachedTokens: number|null, worker: string, prefill: string}} Measured
 */

/** @returns {Measured} */
export function newMeasured() {
  return {
    ttft: null,
    e2e: null,
    last: null,
    tokens: null,
    promptTokens: null,
    cachedTokens: null,
    worker: "",
    prefill: "",
  };
}

/** Tokens a second between the first and the last token; null if there are fewer than two. */
export function tokensPerSecond(measured) {
  const { tokens, ttft, last } = measured;
  return tokens > 1 && last > ttft ? ((tokens - 1) * 1000) / (last - ttft) : null;
}

/**
 * Calls the model.
 * @param {object} body The request's body, without what streaming needs.
 * @param {string} requestId
 * @param {AbortSignal} signal
 * @param {Measured} measured Filled in as the answer comes.
 * @param {(delta: object) => void} onDelta Gets each delta of the message.
 * @param {() => void} onWaking Called while the answer waits for the model to wake.
 * @returns {Promise<string>} The finish reason.
 * @throws {ApiError} The call failed, or the stream broke before its end.
 * @throws {DOMException} `AbortError`, if `signal` stopped it.
 */
export async function complete(body, requestId, signal, measured, onDelta, onWaking) {
  const began = performance.now();
  const headers = { "x-request-id": requestId, "x-cpd-ticks": "1" };
  let finish = "";
  let done = false;
  const response = await request("v1/chat/completions", {
    method: "POST",
    body: { ...body, stream: true, stream_options: { include_usage: true } },
    headers,
    signal,
  });
  measured.worker = response.headers.get("x-cpd-decode-worker") ?? "";
  measured.prefill = response.headers.get("x-cpd-prefill-worker") ?? "";
  for await (const data of serverSentEvents(response)) {
    if (data === null) {
      onWaking(); // the only comment in an answer
      continue;
    }
    const now = performance.now() - began;
    if (data === "[DONE]") {
      measured.e2e = now;
      done = true;
      break;
    }
    const chunk = parsed(data);
    if (chunk.error) throw new ApiError(0, chunk.error.code, chunk.error.message);
    if (chunk.usage) {
      measured.tokens = chunk.usage.completion_tokens;
      measured.promptTokens = chunk.usage.prompt_tokens;
      measured.cachedTokens = chunk.usage.prompt_tokens_details?.cached_tokens ?? 0;
    }
    const choice = chunk.choices[0];
    if (!choice) continue;
    const delta = choice.delta;
    if (delta.content || delta.reasoning_content || delta.tool_calls) {
      measured.ttft ??= now;
      measured.last = now;
      onDelta(delta);
    }
    finish = choice.finish_reason ?? finish;
  }
  if (!done) throw new ApiError(0, "stream_broke", "The stream broke before the answer's end.");
  return finish;
}

function parsed(data) {
  try {
    return JSON.parse(data);
  } catch {
    throw new ApiError(0, "stream_broke", "The stream has something in it that is not an answer.");
  }
}
