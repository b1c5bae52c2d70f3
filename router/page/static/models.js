// The models of the cluster: which are awake, how many workers each has, and buttons to change both.

import { PinButton, scale, SleepButton } from "./changes.js";
import { h, setAttribute, setText } from "./dom.js";
import { plural } from "./format.js";

/** Look and text for each state of a model on a shared device. */
export const RESIDENCIES = {
  serving: ["ok", "awake"],
  draining: ["warn", "going to sleep"],
  waking: ["warn", "waking"],
  asleep: ["asleep", "asleep"],
};

export class ModelList {
  /** @param {() => object} session Returns the latest answer of `GET /session`. */
  constructor(session) {
    this.session = session;
    this.rows = new Map(); // by model
    this.list = h("ul", { class: "models" });
    this.step = h("p", { class: "hint", role: "status" });
    this.error = h("p", { class: "error", role: "alert" });
    this.element = h(
      "section",
      { "aria-labelledby": "models-title" },
      h("h2", { id: "models-title", text: "Models" }),
      this.list,
      this.step,
      this.error,
    );
  }

  /** Shows a snapshot of the cluster. Its models neither come nor go. */
  show({ models, workers, scaling }) {
    for (const model of models) {
      if (!this.rows.has(model.name)) {
        const row = new ModelRow(model.name, this.session().operator);
        this.rows.set(model.name, row);
        this.list.append(row.element);
      }
      const numbers = scaling?.models.find((one) => one.model === model.name || !one.model);
      this.rows.get(model.name).show(
        model,
        workers.filter((worker) => worker.model === model.name),
        numbers,
      );
    }
    const step = scaling?.step ? `: ${scaling.step}` : "";
    setText(this.step, scaling?.changing ? `The cluster is being changed${step}…` : "");
    setText(this.error, scaling?.error ? `The cluster was not scaled: ${scaling.error}.` : "");
  }
}

class ModelRow {
  constructor(name, operator) {
    this.state = h("span", { class: "state" });
    this.facts = h("p", { class: "hint" });
    this.sleep = operator ? new SleepButton(name) : null;
    this.pin = operator ? new PinButton(name) : null;
    this.scale = operator
      ? h("button", {
          type: "button",
          class: "quiet",
          text: "Scale",
          "aria-label": `Scale ${name}`,
          onclick: () => scale(name, this.#fields(), this.numbers.model),
        })
      : null;
    this.buttons = [this.sleep?.element, this.pin?.element, this.scale].filter(Boolean);
    this.element = h(
      "li",
      { data: { model: name } },
      h("div", { class: "row" }, h("h3", { text: name }), this.state),
      h("div", { class: "row" }, this.buttons),
      this.facts,
    );
  }

  show(model, workers, numbers) {
    this.numbers = numbers;
    const shared = workers.filter(({ residency }) => residency);
    this.canPrefill = !shared.length; // on a shared device all workers are combined
    const [tone, text] = !model.ready
      ? workers.some(({ state }) => state === "draining")
        ? ["warn", "draining"]
        : ["bad", "no worker"]
      : (shared.length && RESIDENCIES[model.state]) || ["ok", "ready"];
    setAttribute(this.state, "class", `state ${tone}`);
    setText(this.state, text);
    const requests = sum(workers, ({ load }) => (load ? load.running + load.waiting : 0));
    const pinned = shared.length > 0 && shared.every(({ residency }) => residency.pinned);
    setText(this.facts, this.#told(workers, shared, requests, pinned, model.state));
    if (!this.buttons.length) return;
    for (const button of [this.sleep, this.pin]) button.element.hidden = !shared.length;
    this.sleep.show(model.state, requests);
    this.pin.show(pinned);
    this.scale.hidden = !numbers;
  }

  #told(workers, shared, requests, pinned, state) {
    const told = ["combined", "prefill"]
      .map((role) => [workers.filter((worker) => worker.role === role).length, role])
      .filter(([number]) => number)
      .map(([number, role]) => plural(number, `${role} worker`));
    told.push(plural(requests, "request"));
    const promises = shared.map(({ residency }) => residency.serves_in_s).filter(Boolean);
    if (state !== "serving" && promises.length) told.push(`awake within ${Math.ceil(Math.min(...promises))} s`);
    if (pinned) told.push("pinned");
    return told.join(" · ");
  }

  #fields() {
    const { combined, prefill } = this.numbers;
    const fields = [{ name: "combined", label: "Combined workers", value: combined, least: 1 }];
    if (this.canPrefill) fields.push({ name: "prefill", label: "Prefill workers", value: prefill, least: 0 });
    return fields;
  }
}

function sum(list, of) {
  return list.reduce((total, one) => total + of(one), 0);
}
