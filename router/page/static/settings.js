// The settings of a conversation: system prompt, sampling, tools.

import { h, setAttribute } from "./dom.js";

const NUMBERS = [
  { name: "temperature", label: "Temperature", min: 0, max: 2, step: 0.05, usual: 1 },
  { name: "top_p", label: "Top p", min: 0, max: 1, step: 0.01, usual: 1 },
  { name: "top_k", label: "Top k", min: 0, step: 1, usual: "off" },
  { name: "min_p", label: "Min p", min: 0, max: 1, step: 0.01, usual: 0 },
  { name: "max_tokens", label: "Most tokens", min: 1, step: 1, usual: "context" },
  { name: "presence_penalty", label: "Presence penalty", min: -2, max: 2, step: 0.1, usual: 0 },
  { name: "frequency_penalty", label: "Frequency penalty", min: -2, max: 2, step: 0.1, usual: 0 },
  { name: "repetition_penalty", label: "Repetition penalty", min: 0.01, max: 100, step: 0.05, usual: 1 },
  { name: "seed", label: "Seed", step: 1, usual: "random" },
];

const EFFORTS = ["", "none", "minimal", "low", "medium", "high"];

/** The fields of a request that the settings ask for. */
export function requestFields({ sampling, tools }) {
  const fields = { ...sampling };
  if (fields.stop) fields.stop = fields.stop.split("\n").filter(Boolean).slice(0, 4);
  const listed = parseTools(tools);
  if (listed.length) fields.tools = listed;
  return fields;
}

/**
 * The tools that a text lists.
 * @throws {SyntaxError} It is not a JSON list.
 */
export function parseTools(text) {
  if (!text.trim()) return [];
  const tools = JSON.parse(text);
  if (!Array.isArray(tools)) throw new SyntaxError("The tools must be a JSON list.");
  return tools;
}

/**
 * The panel with the settings.
 * @param {() => void} onChange Called after the conversation that `show` was given has changed.
 */
export function settingsPanel(onChange) {
  let conversation = null;
  const changed = (change) => {
    change();
    onChange();
  };
  const number = ({ name, label, usual, ...limits }) => {
    const input = h("input", {
      type: "number",
      id: `setting-${name}`,
      name,
      ...limits,
      oninput: () =>
        changed(() => {
          if (input.value === "" || !input.checkValidity()) delete conversation.sampling[name];
          else conversation.sampling[name] = Number(input.value);
        }),
    });
    return { name, usual, input, row: h("div", { class: "field" }, h("label", { for: input.id, text: label }), input) };
  };
  const numbers = NUMBERS.map(number);
  const area = (id, label, rows, hint, oninput) => {
    const input = h("textarea", {
      id,
      rows,
      spellcheck: "false",
      "aria-describedby": hint ? `${id}-hint` : null,
      oninput: () => changed(() => oninput(input)),
    });
    return {
      input,
      row: h(
        "div",
        { class: "field wide" },
        h("label", { for: id, text: label }),
        input,
        hint ? h("p", { class: "hint", id: `${id}-hint`, text: hint }) : null,
      ),
    };
  };
  const system = area("setting-system", "System prompt", 4, "", (input) => (conversation.system = input.value));
  const stop = area("setting-stop", "Stop strings", 2, "One a line, up to 4.", (input) => {
    if (input.value) conversation.sampling.stop = input.value;
    else delete conversation.sampling.stop;
  });
  const tools = area("setting-tools", "Tools", 4, "A JSON list, as in the field “tools” of the API.", (input) => {
    conversation.tools = input.value;
    checkTools();
  });
  const toolsError = h("p", { class: "error", id: "tools-error", role: "alert" });
  tools.row.append(toolsError);
  const effort = h(
    "select",
    {
      id: "setting-effort",
      onchange: () =>
        changed(() => {
          if (effort.value) conversation.sampling.reasoning_effort = effort.value;
          else delete conversation.sampling.reasoning_effort;
        }),
    },
    EFFORTS.map((one) => h("option", { value: one, text: one || "model’s own" })),
  );
  function checkTools() {
    let wrong = "";
    try {
      parseTools(tools.input.value);
    } catch (error) {
      wrong = error.message;
    }
    toolsError.textContent = wrong;
    setAttribute(tools.input, "aria-invalid", wrong ? "true" : null);
  }

  const element = h(
    "div",
    { class: "settings-fields" },
    system.row,
    h(
      "div",
      { class: "grid" },
      numbers.map((one) => one.row),
      h("div", { class: "field" }, h("label", { for: "setting-effort", text: "Reasoning" }), effort),
    ),
    stop.row,
    tools.row,
    h("p", {
      class: "hint",
      text: "What is left empty is as the model or the server has it. Settings belong to this conversation.",
    }),
  );

  return {
    element,
    /** Shows the settings of a conversation; `defaults` are the model's own. */
    show(shownConversation, defaults) {
      conversation = shownConversation;
      const { sampling } = conversation;
      const set = (input, value) => document.activeElement !== input && (input.value = value ?? "");
      for (const { name, usual, input } of numbers) {
        set(input, sampling[name]);
        setAttribute(input, "placeholder", String(defaults[name] ?? usual));
      }
      set(system.input, conversation.system);
      set(stop.input, sampling.stop);
      set(tools.input, conversation.tools);
      effort.value = sampling.reasoning_effort ?? "";
      checkTools();
    },
  };
}
