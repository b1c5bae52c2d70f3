// One message as it is shown: its text, what can be done with it, and for an answer what was measured and its time line.

import { newMeasured, tokensPerSecond } from "./completion.js";
import { copyButton, h, iconButton, setText } from "./dom.js";
import { count, duration, plural, rate } from "./format.js";
import { Markdown } from "./markdown.js";
import { timeLine } from "./timeline.js";

const RENDER_SHARE = 0.2; // showing a growing answer takes at most this part of the time

const FINISHES = { length: "cut at the most tokens", tool_calls: "calls tools" };

/**
 * @typedef {object} Actions What a message asks of the chat.
 * @property {(node: object, text: string) => void} edit
 * @property {(node: object) => void} regenerate
 * @property {(node: object, id: string) => void} choose
 * @property {(node: object, results: string[]) => void} sendResults
 */

/** The view of a node of a conversation. */
export class MessageView {
  /** @param {Actions} actions */
  constructor(node, actions) {
    this.node = node;
    this.actions = actions;
    this.timer = 0;
    this.dirty = false;
    this.markdown = null;
    this.reasoningText = null;
    this.shownCalls = "";
    this.shownState = "";
    this.shownPlacements = undefined;
    this.branches = h("span", { class: "branches" });
    this.body = h("div", { class: "body" });
    this.foot = h("div", { class: "foot" });
    const name = { user: "You", assistant: node.model || "Answer", tool: "Result of a tool" }[node.role];
    this.element = h(
      "li",
      { class: `message ${node.role}`, data: { id: node.id, role: node.role } },
      h(
        "div",
        { class: "head" },
        h("h2", { class: "who", text: name }),
        this.branches,
        (this.tools = h("span", { class: "tools" })),
      ),
      this.body,
      this.foot,
    );
    if (node.role === "assistant") this.#buildAnswer();
    else this.#showQuestion();
  }

  /** Shows which of its alternatives the message is. */
  showBranches(ids) {
    const at = ids.indexOf(this.node.id);
    const key = `${at}/${ids.length}`;
    if (this.branchKey === key) return;
    this.branchKey = key;
    if (ids.length < 2) {
      this.branches.replaceChildren();
      return;
    }
    const step = (name, label, to) =>
      iconButton(name, label, () => this.actions.choose(this.node, ids[to]), { disabled: to < 0 || to >= ids.length });
    this.branches.replaceChildren(
      step("chevronLeft", "Earlier version", at - 1),
      h("span", { text: `${at + 1} of ${ids.length}` }),
      step("chevronRight", "Later version", at + 1),
    );
  }

  /** Offers to send the results of the answer's tool calls, if `open`. */
  showResults(open) {
    if (this.resultsOpen === open) return;
    this.resultsOpen = open;
    this.results.replaceChildren();
    if (!open) return;
    const areas = this.node.calls.map((call, at) => {
      const id = `result-${this.node.id}-${at}`;
      const area = h("textarea", { id, rows: 2, spellcheck: "false" });
      return {
        area,
        field: h("div", { class: "field" }, h("label", { for: id, text: `Result of ${call.function.name}` }), area),
      };
    });
    const form = h(
      "form",
      {
        class: "results",
        onsubmit: (event) => {
          event.preventDefault();
          this.actions.sendResults(
            this.node,
            areas.map(({ area }) => area.value),
          );
        },
      },
      areas.map(({ field }) => field),
      h("button", { class: "primary", text: areas.length > 1 ? "Send results" : "Send result" }),
    );
    this.results.append(form);
  }

  // ---- questions ----

  #showQuestion() {
    const { node } = this;
    this.body.replaceChildren(h("div", { class: "plain", text: node.content }));
    this.tools.replaceChildren(copyButton("Copy message", () => node.content));
    if (node.role === "user") this.tools.append(iconButton("edit", "Edit message", () => this.#edit()));
  }

  #edit() {
    const area = h("textarea", {
      rows: Math.min(12, this.node.content.split("\n").length + 1),
      "aria-label": "Edited message",
    });
    area.value = this.node.content;
    const end = () => this.#showQuestion();
    const form = h(
      "form",
      {
        class: "edit",
        onsubmit: (event) => {
          event.preventDefault();
          if (area.value.trim()) this.actions.edit(this.node, area.value);
          end();
        },
        onkeydown: (event) => event.key === "Escape" && end(),
      },
      area,
      h(
        "div",
        { class: "row end" },
        h("button", { type: "button", text: "Cancel", onclick: end }),
        h("button", { class: "primary", text: "Send" }),
      ),
    );
    this.body.replaceChildren(form);
    this.tools.replaceChildren();
    area.focus();
  }

  // ---- answers ----

  #buildAnswer() {
    const { node } = this;
    this.reasoning = h(
      "details",
      { class: "reasoning", hidden: true },
      (this.reasoningTitle = h("summary", { text: "Reasoning" })),
      (this.reasoningBody = h("div", { class: "plain" })),
    );
    this.text = h("div", { class: "markdown" });
    this.calls = h("div", { class: "calls" });
    this.results = h("div");
    this.waiting = h("div", { class: "waiting" });
    this.error = h("p", { class: "error" });
    this.figures = h("p", { class: "figures" });
    this.line = h("div");
    this.body.append(this.reasoning, this.text, this.waiting, this.calls, this.results);
    this.foot.append(this.error, this.figures, this.line);
    this.markdown = new Markdown(this.text);
    this.tools.append(
      copyButton("Copy answer", () => node.content),
      iconButton("retry", "Regenerate answer", () => this.actions.regenerate(node)),
    );
    this.changed();
  }

  /** Shows what has changed, with the next frame. A gigantic answer must not keep people from scrolling and typing. */
  changed() {
    this.dirty = true;
    this.timer ||= requestAnimationFrame(() => this.#render());
  }

  #render() {
    const began = performance.now();
    this.dirty = this.#showAnswer();
    const pauseMs = (performance.now() - began) / RENDER_SHARE;
    this.timer = setTimeout(() => {
      this.timer = 0;
      if (this.dirty) this.changed();
    }, pauseMs);
  }

  // Returns whether there is more to show.
  #showAnswer() {
    const more = this.markdown.update(this.node.content);
    this.#showReasoning();
    this.#showCalls();
    this.#showState();
    return more;
  }

  #showReasoning() {
    const { reasoning, content, state } = this.node;
    this.reasoning.hidden = !reasoning;
    if (!reasoning) return;
    if (this.reasoningText === null) {
      this.reasoningText = document.createTextNode("");
      this.reasoningBody.append(this.reasoningText);
    }
    if (reasoning.length > this.reasoningText.length)
      this.reasoningText.appendData(reasoning.slice(this.reasoningText.length));
    setText(this.reasoningTitle, state === "running" && !content ? "Reasoning…" : "Reasoning");
  }

  #showCalls() {
    const key = this.node.calls.map((call) => `${call.function.name}${call.function.arguments.length}`).join();
    if (key === this.shownCalls) return;
    this.shownCalls = key;
    this.calls.replaceChildren(
      ...this.node.calls.map(({ function: { name, arguments: text } }) =>
        h(
          "div",
          { class: "call" },
          h("div", { class: "call-name" }, "Calls ", h("code", { text: name })),
          h("pre", { tabindex: "0", role: "group", "aria-label": `Arguments of ${name}`, text: indented(text) }),
        ),
      ),
    );
  }

  #showState() {
    const { node } = this;
    this.waiting.hidden = node.state !== "running" || Boolean(node.content || node.reasoning || node.calls.length);
    setText(this.waiting, node.waking ? "The model is waking" : "Waiting for the first token");
    const key = `${node.state} ${node.error} ${node.measured?.tokens}`;
    if (key === this.shownState && node.placements === this.shownPlacements) return;
    this.shownState = key;
    this.shownPlacements = node.placements;
    this.element.dataset.state = node.state;
    this.element.setAttribute("aria-busy", node.state === "running");
    setText(this.error, node.error);
    this.error.hidden = !node.error;
    setText(this.figures, node.state === "running" ? "" : figuresOf(node));
    this.figures.hidden = node.state === "running";
    const { e2e, ttft, tokens } = node.measured ?? newMeasured();
    Object.assign(this.figures.dataset, { e2e: e2e ?? "", ttft: ttft ?? "", tokens: tokens ?? "" });
    this.line.replaceChildren(...(node.placements ? [timeLine(node.placements)] : []));
  }
}

function figuresOf({ measured, state, finish }) {
  if (!measured || measured.ttft === null) return state === "stopped" ? "Stopped before the first token." : "";
  const parts = [`first token after ${duration(measured.ttft)}`];
  const speed = tokensPerSecond(measured);
  if (speed !== null) parts.push(`${rate(speed)} tokens/s`);
  if (measured.tokens !== null) parts.push(plural(measured.tokens, "token"));
  if (measured.promptTokens !== null)
    parts.push(
      `${count(measured.promptTokens)} in the prompt${measured.cachedTokens ? `, ${count(measured.cachedTokens)} of them cached` : ""}`,
    );
  if (measured.worker)
    parts.push(measured.prefill ? `remote: ${measured.prefill} → ${measured.worker}` : `local: ${measured.worker}`);
  if (state === "stopped") parts.push("stopped");
  else if (FINISHES[finish]) parts.push(FINISHES[finish]);
  return parts.join(" · ");
}

function indented(text) {
  // numbers stay as they were written: the page's own have 53 bits
  const exact = (key, value, { source }) => (typeof value === "number" ? JSON.rawJSON(source) : value);
  try {
    return JSON.stringify(JSON.parse(text, exact), null, 2);
  } catch {
    return text; // not complete yet, or cut; or the browser is too old for `exact`
  }
}
