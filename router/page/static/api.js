// Calls of the router's API, with the key that the person has entered. The key is kept in this tab's session only.

const KEY = "cpd-key";

let key = sessionStorage.getItem(KEY) ?? "";
let onUnauthorized = () => {};

/** True if the server asks for keys; the router writes it into the page. */
export const needsKey = document.documentElement.dataset.keys === "yes";

export function hasKey() {
  return key !== "";
}

/** Sets the key, or forgets it if it is empty. */
export function setKey(value) {
  key = value;
  if (value) sessionStorage.setItem(KEY, value);
  else sessionStorage.removeItem(KEY);
}

/** Calls `callback` with a message whenever the server does not accept the key. */
export function whenUnauthorized(callback) {
  onUnauthorized = callback;
}

/** An error response of the server. `status` is 0 if there was no response at all. */
export class ApiError extends Error {
  constructor(status, code, message, retryAfterS = null) {
    super(message);
    this.status = status;
    this.code = code;
    this.retryAfterS = retryAfterS;
  }
}

/**
 * Sends a request; resolves to the response if it succeeded.
 * @throws {ApiError}
 * @throws {DOMException} `AbortError`, if `signal` aborts it.
 */
export async function request(path, { method = "GET", body, headers = {}, signal } = {}) {
  const sent = { ...headers };
  const used = key;
  if (used) sent.authorization = `Bearer ${utf8(used)}`;
  if (body !== undefined) sent["content-type"] = "application/json";
  const options = { method, headers: sent, signal, cache: "no-store" };
  let response;
  try {
    response = await fetch(path, { ...options, body: body === undefined ? undefined : JSON.stringify(body) });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "no_connection", "The server can't be reached.");
  }
  if (response.ok) return response;
  const error = await readError(response);
  if (response.status === 401 && used === key) onUnauthorized(error.message); // else somebody has signed out meanwhile
  throw error;
}

// Headers take bytes: `fetch` throws at other characters.
function utf8(text) {
  return String.fromCharCode(...new TextEncoder().encode(text));
}

async function readError(response) {
  const retryAfter = response.headers.get("retry-after");
  let detail = {};
  try {
    detail = (await response.json()).error ?? {};
  } catch {
    // not one of the router's own responses, such as a proxy's
  }
  const message = detail.message ?? `The server answered with status ${response.status}.`;
  return new ApiError(response.status, detail.code ?? "", message, retryAfter === null ? null : Number(retryAfter));
}

/** Sends a request; resolves to the JSON document of the response. */
export async function json(path, options) {
  return (await request(path, options)).json();
}

/**
 * Reads server-sent events: yields the data of each one, and null for a comment.
 * @throws {ApiError} The connection broke.
 */
export async function* serverSentEvents(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      rest += value;
      let start = 0;
      for (let end = rest.indexOf("\n\n"); end !== -1; end = rest.indexOf("\n\n", start)) {
        const event = rest.slice(start, end);
        start = end + 2;
        yield event.startsWith("data: ") ? event.slice(6) : null;
      }
      rest = rest.slice(start);
    }
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "no_connection", "The connection to the server broke.");
  } finally {
    reader.cancel().catch(() => {});
  }
}
