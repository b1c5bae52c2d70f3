// The page: sign-in, the bar at the top, and the views below it.

import { ApiError, hasKey, json, needsKey, setKey, whenUnauthorized } from "./api.js";
import { Chat } from "./chat.js";
import { ClusterView } from "./cluster.js";
import { announce, closeDialogs, h, iconButton, setAttribute, setText } from "./dom.js";
import { clock } from "./format.js";
import { Storage } from "./storage.js";

const ASK_MS = 15_000; // the server is asked this often for the state of its models
const RETRY_MS = [500, 1000, 2000, 4000];
const TOLD_MS = 5000; // time for which "connected again" is shown
const THEMES = ["auto", "light", "dark"];

const root = document.getElementById("app");
let page = null;

whenUnauthorized(leave);

/** The page of somebody whose key is accepted, or of anybody if there are none. */
class Page {
  constructor(session) {
    this.session = session;
    this.version = session.version; // of the server that the page comes from
    this.failures = 0;
    this.timer = 0;
    this.bannerTimer = 0;
    this.lostAt = 0;
    this.closed = new AbortController();
  }

  async open() {
    const storage = await Storage.open(this.session.tenant);
    this.chat = new Chat(
      storage,
      () => this.session,
      () => this.#broke(),
    );
    this.cluster = this.session.admin
      ? new ClusterView(
          () => this.session,
          () => this.#broke(),
        )
      : null;
    this.banner = h("div", { class: "banner", role: "status", hidden: true });
    this.main = h("main", { id: "main", tabindex: "-1" });
    const link = (view, text) => h("a", { href: `#${view}`, data: { view }, text });
    this.links = h(
      "nav",
      { "aria-label": "Views" },
      link("chat", "Chat"),
      this.cluster ? link("cluster", "Cluster") : null,
    );
    const { tenant, keys } = this.session;
    root.replaceChildren(
      h("a", {
        class: "skip",
        href: "#main",
        text: "Skip to the content",
        onclick: (event) => (event.preventDefault(), this.main.focus()),
      }),
      h(
        "header",
        {},
        h("span", { class: "brand", text: "CPD" }),
        this.links,
        h("span", { class: "space" }),
        keys ? h("span", { class: "tenant", text: tenant }) : null,
        themeButton(),
        keys ? h("button", { type: "button", class: "quiet", text: "Sign out", onclick: signOut }) : null,
      ),
      this.banner,
      this.main,
    );
    const { signal } = this.closed;
    addEventListener("hashchange", () => this.#showView(), { signal });
    addEventListener("online", () => this.#ask(), { signal });
    document.addEventListener("visibilitychange", () => (this.#showView(), document.hidden || this.#ask()), { signal });
    await this.chat.start();
    this.#showView();
    this.#askLater(ASK_MS);
  }

  close() {
    this.closed.abort();
    clearTimeout(this.timer);
    this.cluster?.hide();
    this.chat.close();
  }

  #showView() {
    const view = this.cluster && location.hash === "#cluster" ? "cluster" : "chat";
    const { element } = this[view];
    if (this.main.firstChild !== element) this.main.replaceChildren(element);
    this.main.dataset.view = view;
    document.title = view === "cluster" ? "Cluster · CPD" : "CPD";
    for (const link of this.links.children)
      setAttribute(link, "aria-current", link.dataset.view === view ? "page" : null);
    // nobody looks at a hidden view: it costs the server nothing
    if (view === "cluster" && !document.hidden) this.cluster.show();
    else this.cluster?.hide();
  }

  // Asks for the state of the models, and finds out whether the server is there.
  async #ask() {
    if (this.asking) return;
    this.asking = true;
    try {
      const session = await json("session");
      if (this.closed.signal.aborted) return;
      this.#isConnected(session);
      this.session = session;
      this.chat.sessionChanged();
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      if (this.closed.signal.aborted) return;
      this.#isLost();
    } finally {
      this.asking = false;
    }
    this.#askLater(this.failures ? RETRY_MS[Math.min(this.failures, RETRY_MS.length) - 1] : ASK_MS);
  }

  #askLater(ms) {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => (document.hidden && !this.failures ? this.#askLater(ms) : this.#ask()), ms);
  }

  // A stream has broken: the server may have restarted, or be about to.
  #broke() {
    this.#isLost();
    this.#ask();
  }

  #isConnected(session) {
    if (session.version !== this.version)
      this.#say(`The server has another version now (${session.version}); reload the page.`, "warn");
    else if (this.failures) {
      this.#say("Connected again.", "ok");
      this.bannerTimer = setTimeout(() => (this.banner.hidden = true), TOLD_MS);
    }
    this.failures = 0;
  }

  #isLost() {
    this.failures += 1;
    if (this.failures === 1) this.lostAt = Date.now();
    this.#say(`No connection to the server since ${clock(this.lostAt)}. Trying again…`, "bad");
  }

  #say(text, tone) {
    clearTimeout(this.bannerTimer);
    setText(this.banner, text);
    setAttribute(this.banner, "class", `banner ${tone}`);
    this.banner.hidden = false;
  }
}

// ---- sign-in ----

function signIn(message = "") {
  const input = h("input", {
    id: "key",
    type: "password",
    required: true,
    autocomplete: "off",
    spellcheck: "false",
    "aria-describedby": "key-error key-hint",
  });
  const error = h("p", { class: "error", id: "key-error", role: "alert" });
  const submit = h("button", { class: "primary", text: "Sign in" });
  const form = h(
    "form",
    {
      class: "sign-in",
      onsubmit: async (event) => {
        event.preventDefault();
        submit.disabled = true;
        setKey(input.value.trim());
        await start();
      },
    },
    h("h1", { text: "CPD" }),
    h("p", { text: "This server asks for an API key." }),
    h("label", { for: "key", text: "API key" }),
    input,
    error,
    submit,
    h("p", { class: "hint", id: "key-hint", text: "The key stays in this tab, until you close it or sign out." }),
  );
  document.title = "Sign in · CPD";
  root.replaceChildren(h("main", { class: "sign-in-page" }, form));
  input.focus();
  error.textContent = message;
}

function signOut() {
  leave();
  announce("Signed out.");
}

// Forgets the key and asks for another one.
function leave(message = "") {
  if (!hasKey() && root.querySelector("form.sign-in")) return; // what was left still asked something
  page?.close();
  page = null;
  setKey("");
  closeDialogs();
  signIn(message);
}

// ---- theme ----

function themeButton() {
  const label = () => `Colours: ${theme()}`;
  const button = iconButton("theme", label(), () => {
    const next = THEMES[(THEMES.indexOf(theme()) + 1) % THEMES.length];
    localStorage.setItem("cpd-theme", next);
    applyTheme();
    setAttribute(button, "aria-label", label());
    setAttribute(button, "title", label());
  });
  return button;
}

function theme() {
  const kept = localStorage.getItem("cpd-theme");
  return THEMES.includes(kept) ? kept : "auto";
}

function applyTheme() {
  setAttribute(document.documentElement, "data-theme", theme() === "auto" ? null : theme());
}

// ---- start ----

async function start() {
  if (needsKey && !hasKey()) {
    signIn();
    return;
  }
  for (let tries = 0; ; tries += 1) {
    try {
      page = new Page(await json("session"));
      await page.open();
      return;
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      if (error.status === 401) return; // the sign-in is shown
      root.replaceChildren(
        h("main", { class: "sign-in-page" }, h("p", { role: "status", text: `${error.message} Trying again…` })),
      );
      await new Promise((resolve) => setTimeout(resolve, RETRY_MS[Math.min(tries, RETRY_MS.length - 1)]));
    }
  }
}

applyTheme();
await start();
