// The chat: the kept conversations, the messages of one of them, and what is written next.

import { ApiError, json } from "./api.js";
import { complete, newMeasured, newRequestId } from "./completion.js";
import {
  addAnswer,
  addNode,
  applyDelta,
  choose,
  messagesFor,
  newConversation,
  openCalls,
  shown,
  siblings,
} from "./conversation.js";
import { announce, confirmDialog, h, icon, iconButton, setAttribute } from "./dom.js";
import { plural } from "./format.js";
import { MessageView } from "./message.js";
import { requestFields, settingsPanel } from "./settings.js";
import { keptPlacements } from "./timeline.js";

const KEEP_EVERY_MS = 3000; // a running answer is kept this often
const NEAR_END_PX = 80;
const PLACEMENTS_TRIES = 3; // a stopped request ends on the server a moment later

export class Chat {
  /**
   * @param {import("./storage.js").Storage} storage
   * @param {() => object} session Returns the latest answer of `GET /session`.
   * @param {(error: ApiError) => void} onNoConnection Called when the server can't be reached.
   */
  constructor(storage, session, onNoConnection) {
    this.storage = storage;
    this.session = session;
    this.onNoConnection = onNoConnection;
    this.conversation = newConversation("");
    this.live = new Map([[this.conversation.id, this.conversation]]); // those with running answers, and the shown one
    this.running = new Map(); // AbortControllers, by node
    this.drafts = new Map(); // by conversation
    this.views = new Map(); // of the shown conversation, by node
    this.sticks = true; // the newest text stays in sight
    this.closed = false;
    this.#build();
    storage.onChange((id) => this.#changedElsewhere(id));
  }

  async start() {
    await this.#showList();
    this.sessionChanged();
    this.#show();
  }

  /** Ends what runs, and keeps what has come of it. */
  close() {
    this.closed = true;
    for (const conversation of this.live.values()) {
      const running = this.#runningIn(conversation);
      for (const node of running) {
        this.running.get(node.id).abort();
        node.state = "stopped";
      }
      if (running.length) this.#keep(conversation);
    }
    this.storage.close();
  }

  /** Takes note of a new answer of `GET /session`. */
  sessionChanged() {
    const { models } = this.session();
    const key = JSON.stringify(models);
    if (key === this.modelsKey) return;
    this.modelsKey = key;
    this.model.replaceChildren(
      ...models.map(({ name, ready, state }) =>
        h("option", { value: name, text: modelText(name, ready, state) }),
      ),
    );
    if (!models.some(({ name }) => name === this.conversation.model))
      this.conversation.model = (models.find(({ ready }) => ready) ?? models[0])?.name ?? "";
    this.model.value = this.conversation.model;
    this.settings.show(this.conversation, this.#defaults());
  }

  // ---- elements ----

  #build() {
    this.list = h("ul", { class: "conversations" });
    this.sidebar = h(
      "section",
      {
        class: "sidebar",
        id: "sidebar",
        "aria-label": "Conversations",
        onkeydown: (event) => event.key === "Escape" && this.#openSidebar(false),
      },
      h(
        "div",
        { class: "row" },
        h("button", { type: "button", class: "new-chat", onclick: () => this.#new() }, icon("plus"), "New chat"),
        iconButton("close", "Close conversations", () => this.#openSidebar(false), {
          class: "icon-button only-narrow",
        }),
      ),
      this.list,
      h(
        "div",
        { class: "sidebar-foot" },
        h("p", {
          class: "hint",
          text: this.storage.lasting
            ? "Kept in this browser only."
            : "This browser keeps nothing: conversations end with the page.",
        }),
        h("button", { type: "button", class: "quiet", text: "Delete all", onclick: () => this.#deleteAll() }),
      ),
    );
    this.model = h("select", { id: "model", onchange: () => this.#changeModel() });
    this.settings = settingsPanel(() => this.#keep(this.conversation));
    this.settingsPane = h(
      "section",
      {
        class: "settings",
        id: "settings",
        "aria-label": "Settings of this conversation",
        hidden: true,
        onkeydown: (event) => event.key === "Escape" && this.#openSettings(false),
      },
      h(
        "div",
        { class: "row spread" },
        h("h2", { text: "Settings" }),
        iconButton("close", "Close settings", () => this.#openSettings(false)),
      ),
      this.settings.element,
    );
    this.sidebarButton = iconButton("menu", "Conversations", () => this.#openSidebar(true), {
      class: "icon-button only-narrow",
      "aria-expanded": "false",
      "aria-controls": "sidebar",
    });
    this.settingsButton = h(
      "button",
      {
        type: "button",
        class: "with-icon",
        "aria-expanded": "false",
        "aria-controls": "settings",
        onclick: () => this.#openSettings(this.settingsPane.hidden),
      },
      icon("sliders"),
      "Settings",
    );
    this.messages = h("ol", { class: "messages" });
    this.empty = h(
      "div",
      { class: "empty" },
      h("h2", { text: "What shall the model answer?" }),
      h("p", {
        text: "Under each answer you will see where its time went: queue, prefill, the way of its KV pages, and each token.",
      }),
    );
    this.thread = h(
      "div",
      { class: "thread", tabindex: "-1", onscroll: () => this.#scrolled() },
      this.empty,
      this.messages,
    );
    this.toEnd = h(
      "button",
      { type: "button", class: "to-end", hidden: true, onclick: () => this.#scrollToEnd() },
      icon("chevronDown"),
      "To the end",
    );
    this.input = h("textarea", {
      id: "message",
      rows: 1,
      placeholder: "Message",
      oninput: () => this.#typed(),
      onkeydown: (event) => this.#keyInInput(event),
    });
    this.submit = h("button", { class: "submit", "aria-label": "Send", title: "Send" }, icon("send"));
    const composer = h(
      "form",
      {
        class: "composer",
        onsubmit: (event) => {
          event.preventDefault();
          this.#submitted();
        },
      },
      h("label", { for: "message", class: "visually-hidden", text: "Message" }),
      this.input,
      this.submit,
    );
    this.element = h(
      "div",
      { class: "chat" },
      h("h1", { class: "visually-hidden", text: "Chat" }),
      this.sidebar,
      h(
        "section",
        { class: "thread-pane", "aria-label": "Conversation" },
        h(
          "div",
          { class: "thread-head" },
          this.sidebarButton,
          h("label", { for: "model", text: "Model" }),
          this.model,
          h("span", { class: "space" }),
          this.settingsButton,
        ),
        this.thread,
        h("div", { class: "below" }, this.toEnd, composer),
      ),
      this.settingsPane,
    );
  }

  // Only where the page is narrow; elsewhere the conversations are always there.
  #openSidebar(open) {
    this.element.classList.toggle("sidebar-open", open);
    setAttribute(this.sidebarButton, "aria-expanded", String(open));
    if (open) this.sidebar.querySelector("button").focus();
    else if (this.sidebar.contains(document.activeElement)) this.sidebarButton.focus();
  }

  #openSettings(open) {
    this.settingsPane.hidden = !open;
    setAttribute(this.settingsButton, "aria-expanded", String(open));
    if (open) this.settingsPane.querySelector("textarea").focus();
    else this.settingsButton.focus();
  }

  // ---- conversations ----

  async #showList() {
    const kept = await this.storage.list();
    this.list.replaceChildren(
      ...kept.map(({ id, title }) => {
        const current = id === this.conversation.id;
        return h(
          "li",
          { class: current ? "current" : null },
          h("button", {
            type: "button",
            class: "title",
            "aria-current": current ? "true" : null,
            text: title || "Untitled",
            onclick: () => this.#open(id),
          }),
          iconButton("trash", `Delete “${title || "Untitled"}”`, () => this.#delete(id, title)),
        );
      }),
    );
  }

  async #open(id) {
    const conversation = this.live.get(id) ?? (await this.storage.read(id));
    if (!conversation) return;
    for (const node of Object.values(conversation.nodes)) {
      if (node.state === "running" && !this.running.has(node.id)) {
        node.state = "failed";
        node.error ||= "The page was closed before the answer's end.";
      }
    }
    this.#switchTo(conversation);
    this.#openSidebar(false);
  }

  #new() {
    this.#switchTo(newConversation(this.conversation.model, this.conversation));
    this.#openSidebar(false);
    this.input.focus();
  }

  #switchTo(conversation) {
    this.drafts.set(this.conversation.id, this.input.value);
    if (!this.#runningIn(this.conversation).length) this.live.delete(this.conversation.id);
    this.conversation = conversation;
    this.live.set(conversation.id, conversation);
    this.input.value = this.drafts.get(conversation.id) ?? "";
    this.modelsKey = "";
    this.views.clear();
    this.sticks = true;
    this.sessionChanged();
    this.#show();
    this.#typed();
    this.#showList();
  }

  async #delete(id, title) {
    if (!(await confirmDialog(`Delete “${title || "Untitled"}”?`, "Delete"))) return;
    if (id === this.conversation.id) this.#new();
    this.#forget(id);
    await this.storage.remove(id);
    await this.#showList();
  }

  async #deleteAll() {
    if (!(await confirmDialog("Delete all conversations in this browser?", "Delete all"))) return;
    this.#new();
    for (const id of [...this.live.keys()]) if (id !== this.conversation.id) this.#forget(id);
    await this.storage.clear();
    await this.#showList();
  }

  #forget(id) {
    const conversation = this.live.get(id);
    if (!conversation) return;
    for (const node of this.#runningIn(conversation)) this.running.get(node.id).abort();
    conversation.removed = true;
    this.live.delete(id);
  }

  async #keep(conversation) {
    if (conversation.removed || !Object.keys(conversation.nodes).length) return;
    await this.storage.write(conversation);
  }

  async #changedElsewhere(id) {
    await this.#showList();
    if (id !== this.conversation.id || this.#runningIn(this.conversation).length) return;
    const conversation = await this.storage.read(id);
    if (!conversation) return;
    this.conversation = conversation;
    this.live.set(id, conversation);
    this.views.clear();
    this.modelsKey = "";
    this.sessionChanged();
    this.#show();
  }

  #runningIn(conversation) {
    return Object.values(conversation.nodes).filter((node) => this.running.has(node.id));
  }

  // ---- messages ----

  #show() {
    const { conversation } = this;
    const nodes = shown(conversation);
    this.empty.hidden = nodes.length > 0;
    const elements = nodes.map((node) => {
      const view = this.views.get(node.id) ?? new MessageView(node, this.#actions());
      this.views.set(node.id, view);
      view.showBranches(siblings(conversation, node));
      if (node.role === "assistant") view.showResults(openCalls(conversation, node).length > 0);
      return view.element;
    });
    // elements that stay are not moved, so that what has the focus keeps it
    elements.forEach(
      (element, at) =>
        this.messages.children[at] !== element &&
        this.messages.insertBefore(element, this.messages.children[at] ?? null),
    );
    while (this.messages.children.length > elements.length) this.messages.lastChild.remove();
    this.#showSubmit();
    this.#follow();
  }

  #actions() {
    return {
      edit: (node, text) => this.#ask(addNode(this.conversation, node.parent, { role: "user", content: text })),
      regenerate: (node) => this.#answer(node.parent),
      choose: (node, id) => {
        choose(this.conversation, node, id);
        this.#keep(this.conversation);
        this.#show();
        this.views.get(id)?.branches.querySelector("button:not([disabled])")?.focus();
      },
      sendResults: (node, results) => {
        let last = node;
        node.calls.forEach((call, at) => {
          last = addNode(this.conversation, last.id, { role: "tool", callId: call.id, content: results[at] });
        });
        this.#answer(last.id);
      },
    };
  }

  #ask(node) {
    this.#answer(node.id);
  }

  #changeModel() {
    this.conversation.model = this.model.value;
    this.settings.show(this.conversation, this.#defaults());
    this.#keep(this.conversation);
  }

  #defaults() {
    return this.session().models.find(({ name }) => name === this.conversation.model)?.defaults ?? {};
  }

  // Lets the model answer below a node.
  async #answer(parent) {
    const { conversation } = this;
    const controller = new AbortController();
    const node = addAnswer(conversation, parent, {
      model: conversation.model,
      requestId: newRequestId(),
      measured: newMeasured(),
    });
    this.running.set(node.id, controller);
    this.sticks = true;
    this.#show();
    this.#keep(conversation).then(() => this.#showList());
    let keptAt = performance.now();
    const changed = () => {
      if (conversation === this.conversation) {
        this.views.get(node.id)?.changed();
        this.#follow();
      }
      if (performance.now() - keptAt > KEEP_EVERY_MS) {
        keptAt = performance.now();
        this.#keep(conversation);
      }
    };
    try {
      const body = {
        model: conversation.model,
        messages: messagesFor(conversation, parent),
        ...requestFields(conversation),
      };
      const onDelta = (delta) => {
        applyDelta(node, delta);
        changed();
      };
      const onWaking = () => {
        node.waking = true;
        changed();
      };
      node.finish = await complete(body, node.requestId, controller.signal, node.measured, onDelta, onWaking);
      node.state = "done";
    } catch (error) {
      this.#failed(node, error);
    }
    this.running.delete(node.id);
    if (this.closed) return;
    if (conversation === this.conversation) {
      this.#show();
      announce(spoken(node));
    } else if (!this.#runningIn(conversation).length) {
      this.live.delete(conversation.id);
    }
    changed();
    await this.#keep(conversation);
    await this.#readPlacements(node);
    changed();
    await this.#keep(conversation);
  }

  #failed(node, error) {
    if (error.name === "AbortError") {
      node.state = "stopped";
      return;
    }
    node.state = "failed";
    if (error instanceof SyntaxError) {
      node.error = `The tools can't be read: ${error.message}`;
    } else if (!(error instanceof ApiError)) {
      node.error = `The page failed: ${error.message}`;
      reportError(error);
    } else {
      const after = node.measured.ttft !== null ? " What came before is above; regenerate to get a whole answer." : "";
      const retry = error.retryAfterS ? ` Try again in ${plural(error.retryAfterS, "second")}.` : "";
      node.error = `${error.message}${after}${retry}`;
      if (error.code === "no_connection" || error.code === "stream_broke") this.onNoConnection(error);
    }
  }

  // Asks for the time line of an answer.
  async #readPlacements(node) {
    if (node.measured.ttft === null && node.state !== "stopped") return; // it was refused before it was placed
    for (let tries = 0; tries < PLACEMENTS_TRIES; tries += 1) {
      try {
        const placements = keptPlacements(await json(`requests/${node.requestId}`));
        const over = placements.every(({ outcome }) => outcome !== "running");
        if (placements.length) node.placements = placements;
        node.measured.tokens ??= placements.reduce((sum, { actual }) => sum + (actual?.outputs ?? 0), 0); // without the stream's end
        if (over) return;
      } catch (error) {
        if (error.status !== 404) return; // the router that knew it may be gone
      }
      await new Promise((resolve) => setTimeout(resolve, 200));
    }
  }

  // ---- writing ----

  #typed() {
    this.input.style.height = "auto";
    this.input.style.height = `${Math.min(this.input.scrollHeight, innerHeight * 0.4)}px`;
    this.#showSubmit();
  }

  #keyInInput(event) {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    if (!this.#runningShown().length) this.#submitted();
  }

  #showSubmit() {
    const running = this.#runningShown().length > 0;
    const label = running ? "Stop" : "Send";
    if (this.submit.getAttribute("aria-label") !== label) {
      setAttribute(this.submit, "aria-label", label);
      setAttribute(this.submit, "title", label);
      this.submit.replaceChildren(icon(running ? "stop" : "send"));
    }
    this.submit.disabled = !running && !this.input.value.trim();
  }

  #runningShown() {
    return shown(this.conversation).filter((node) => this.running.has(node.id));
  }

  #submitted() {
    const running = this.#runningShown();
    if (running.length) {
      for (const node of running) this.running.get(node.id).abort();
      return;
    }
    const text = this.input.value;
    if (!text.trim()) return;
    this.input.value = "";
    this.#typed();
    this.#ask(addNode(this.conversation, shown(this.conversation).at(-1)?.id ?? "", { role: "user", content: text }));
  }

  // ---- scrolling ----

  #scrolled() {
    const { scrollHeight, scrollTop, clientHeight } = this.thread;
    this.sticks = scrollHeight - scrollTop - clientHeight < NEAR_END_PX;
    this.toEnd.hidden = this.sticks;
  }

  #follow() {
    if (!this.sticks || this.following) return;
    this.following = requestAnimationFrame(() => {
      this.following = requestAnimationFrame(() => {
        this.following = 0;
        if (this.sticks) this.#scrollToEnd();
      });
    });
  }

  #scrollToEnd() {
    this.thread.scrollTop = this.thread.scrollHeight;
  }
}

function modelText(name, ready, state) {
  if (!ready) return `${name} (no worker is ready)`;
  return state && state !== "serving" ? `${name} (${state})` : name;
}

function spoken(node) {
  if (node.state === "failed") return `The answer failed: ${node.error}`;
  const words = node.measured.tokens !== null ? ` It has ${plural(node.measured.tokens, "token")}.` : "";
  return node.state === "stopped" ? "The answer was stopped." : `The answer is complete.${words}`;
}
