// Changes of the cluster that an operator makes: each asks first where people would notice, and shows an error in words.

import { ApiError, json } from "./api.js";
import { announce, confirmDialog, h, numbersDialog, setAttribute, setText, tell } from "./dom.js";
import { plural } from "./format.js";

/** Drains a worker or router. `warning` is what to know before. */
export async function drain(name, warning) {
  const question = `Drain ${name}? It takes no new requests, finishes its own, and is not started again.${warning}`;
  if (await confirmDialog(question, "Drain")) await change("drain", { name }, `${name} drains.`);
}

/**
 * Asks for other numbers of processes.
 * @param {string} whose What is scaled, for people.
 * @param {Array<{name, label, value, least}>} fields Names are those of the API.
 * @param {string} model Name of the model, if the API needs it.
 */
export async function scale(whose, fields, model = "") {
  const hint = "New ones are ready before others go. What goes ends its requests first, or moves them.";
  const wanted = await numbersDialog(`Scale ${whose}`, hint, fields, "Scale");
  if (wanted) await change("scale", model ? { ...wanted, model } : wanted, `${whose} is being scaled.`);
}

/** A button that sends a model, or one of its workers, to sleep while it is awake, and else wakes it. */
export class SleepButton {
  /** @param {string} name Of the model or worker. */
  constructor(name) {
    this.name = name;
    this.element = h("button", { type: "button", class: "quiet", hidden: true, onclick: () => this.#press() });
  }

  /**
   * @param {string} state Its residency.
   * @param {number} requests Those that it has.
   */
  show(state, requests) {
    this.requests = requests;
    this.awake = state === "serving";
    setText(this.element, this.awake ? "Sleep" : "Wake");
    setAttribute(this.element, "aria-label", `${this.awake ? "Sleep" : "Wake"} ${this.name}`);
    setAttribute(this.element, "aria-disabled", state === "waking" ? "true" : null); // it keeps the focus
    if (this.wanted === state) {
      announce(`${this.name} is ${this.awake ? "awake" : state}.`);
      this.wanted = null;
    }
  }

  async #press() {
    const { name, requests } = this;
    if (this.element.getAttribute("aria-disabled")) return;
    if (!this.awake) {
      if (await change("wake", { name }, `${name} wakes when it is its turn.`)) this.wanted = "serving";
      return;
    }
    const question =
      `Send ${name} to sleep? ${plural(requests, "request")} there may go on for a while (drain_timeout)` +
      " and then stand still until the next wake. The next request wakes it.";
    if (requests && !(await confirmDialog(question, "Sleep"))) return;
    if (await change("sleep", { name }, `${name} goes to sleep.`)) this.wanted = "asleep";
  }
}

/** A button that pins a model, so that no other one displaces it, or ends that. */
export class PinButton {
  constructor(name) {
    this.name = name;
    this.element = h("button", { type: "button", class: "quiet", onclick: () => this.#press() });
  }

  show(pinned) {
    this.pinned = pinned;
    setText(this.element, pinned ? "Unpin" : "Pin");
    setAttribute(this.element, "aria-label", `${pinned ? "Unpin" : "Pin"} ${this.name}`);
  }

  #press() {
    const pinned = !this.pinned;
    const done = pinned ? "is pinned: no other model displaces it." : "is no longer pinned.";
    return change("pin", { name: this.name, pinned }, `${this.name} ${done}`);
  }
}

// Calls a route below /cluster; resolves to whether it succeeded.
async function change(route, query, done) {
  try {
    await json(`cluster/${route}?${new URLSearchParams(query)}`, { method: "POST" });
    announce(done);
    return true;
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    if (error.status !== 401) await tell(error.message); // else the sign-in says it
    return false;
  }
}
