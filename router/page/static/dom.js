// Builds and updates elements. Text is always set as text; nothing here, or elsewhere in the page, parses HTML.

const SVG = "http://www.w3.org/2000/svg";

/**
 * Creates an element.
 * @param {string} tag
 * @param {object} props Attributes; `class`; `text`; `data` (an object); `onclick` and the like add listeners. A value of
 *     null, undefined or false leaves the attribute out, and true gives it an empty value.
 * @param {...(Node|string|null|undefined|false|Array)} children
 */
export function h(tag, props = {}, ...children) {
  const element = document.createElement(tag);
  setProps(element, props);
  element.append(...children.flat(Infinity).filter((child) => child || child === 0));
  return element;
}

/** As `h`, for SVG. */
export function s(tag, props = {}, ...children) {
  const element = document.createElementNS(SVG, tag);
  setProps(element, props);
  element.append(...children.flat(Infinity).filter(Boolean));
  return element;
}

function setProps(element, props) {
  for (const [name, value] of Object.entries(props)) {
    if (name === "text") element.textContent = value;
    else if (name === "data") for (const [key, one] of Object.entries(value)) element.dataset[key] = one;
    else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else setAttribute(element, name, value);
  }
}

/** Sets an attribute if it has another value; null, undefined and false remove it. */
export function setAttribute(element, name, value) {
  const wanted = value === true ? "" : value;
  if (wanted === null || wanted === undefined || wanted === false) element.removeAttribute(name);
  else if (element.getAttribute(name) !== String(wanted)) element.setAttribute(name, wanted);
}

/** Sets an element's text if it is another one, so that selections and screen readers are left alone. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** Tells people who use a screen reader. */
export function announce(text) {
  document.getElementById("announcer").textContent = text;
}

const ICONS = {
  check: "M4 12.5l5 5L20 6.5",
  chevronDown: "M5 9l7 7 7-7",
  chevronLeft: "M15 5l-7 7 7 7",
  chevronRight: "M9 5l7 7-7 7",
  close: "M5 5l14 14M19 5L5 19",
  copy: "M9 9h11v11H9zM5 15H4V4h11v1",
  edit: "M4 20h4L19 9l-4-4L4 16zM13 7l4 4",
  menu: "M4 6h16M4 12h16M4 18h16",
  plus: "M12 4v16M4 12h16",
  retry: "M20 11a8 8 0 1 0-2.3 6.3M20 4v7h-7",
  send: "M12 20V4M5 11l7-7 7 7",
  sliders: "M4 8h9M19 8h1M4 16h1M11 16h9M16 5v6M8 13v6",
  stop: "M7 7h10v10H7z",
  theme: "M12 3a9 9 0 1 0 0 18zM12 3a9 9 0 0 1 0 18",
  trash: "M4 7h16M9 7V4h6v3M6 7l1 13h10l1-13",
};

export function icon(name) {
  return s(
    "svg",
    { class: "icon", viewBox: "0 0 24 24", "aria-hidden": "true", focusable: "false" },
    s("path", { d: ICONS[name] }),
  );
}

/** A button with an icon; `label` is its name for those who can't see the icon, and its tooltip. */
export function iconButton(name, label, onclick, props = {}) {
  return h(
    "button",
    { type: "button", class: "icon-button", "aria-label": label, title: label, onclick, ...props },
    icon(name),
  );
}

/** Tells something that must be read before going on. */
export function tell(text) {
  return showDialog(text, [["OK", "primary"]]);
}

/** Asks a yes-or-no question; resolves to whether the answer was yes. */
export async function confirmDialog(question, yes) {
  return (await showDialog(question, [["Cancel"], [yes, "danger"]])) === yes;
}

/** Closes the dialogs that are open, as if nothing had been chosen. */
export function closeDialogs() {
  for (const dialog of document.querySelectorAll("dialog")) dialog.close();
}

/**
 * Asks for whole numbers; resolves to those that were changed by name, or to null if none was.
 * @param {string} title
 * @param {string} hint
 * @param {Array<{name, label, value, least}>} fields
 * @param {string} yes The button.
 */
export async function numbersDialog(title, hint, fields, yes) {
  const inputs = fields.map(({ name, value, least }) =>
    h("input", { id: `number-${name}`, type: "number", inputmode: "numeric", min: least, step: 1, required: true, value }),
  );
  const form = h(
    "form",
    {
      class: "numbers",
      onsubmit: (event) => {
        event.preventDefault();
        form.closest("dialog").close(yes);
      },
    },
    h("h2", { text: title }),
    fields.map(({ name, label }, at) => [h("label", { for: `number-${name}`, text: label }), inputs[at]]),
    h("p", { class: "hint", text: hint }),
    h("div", { class: "row end" }, closing("Cancel"), h("button", { class: "primary", text: yes })),
  );
  if ((await openDialog(title, form)) !== yes) return null;
  const changed = fields
    .map(({ name, value }, at) => [name, inputs[at].valueAsNumber, value])
    .filter(([, wanted, value]) => wanted !== value);
  return changed.length ? Object.fromEntries(changed) : null;
}

// Resolves to the text of the chosen button, or to "".
function showDialog(text, buttons) {
  const row = buttons.map(([name, look]) => closing(name, look));
  return openDialog(text, h("p", { text }), h("div", { class: "row end" }, row));
}

// A button that closes the dialog that it is in.
function closing(name, look) {
  return h("button", {
    type: "button",
    class: look,
    text: name,
    onclick: (event) => event.target.closest("dialog").close(name),
  });
}

function openDialog(label, ...content) {
  return new Promise((resolve) => {
    const dialog = h(
      "dialog",
      { class: "question", "aria-label": label, onclose: () => (dialog.remove(), resolve(dialog.returnValue)) },
      content,
    );
    document.body.append(dialog);
    dialog.showModal();
  });
}

/** Copies text; also where the page is not served over HTTPS, and browsers have no clipboard. */
export async function copyText(text) {
  if (navigator.clipboard) {
    await navigator.clipboard.writeText(text);
    return;
  }
  const area = h("textarea", { class: "visually-hidden", "aria-hidden": "true" });
  area.value = text;
  document.body.append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
}

/** A button that copies what `text()` returns, and says so. */
export function copyButton(label, text) {
  const button = iconButton("copy", label, async () => {
    await copyText(text());
    button.replaceChildren(icon("check"));
    announce("Copied.");
    setTimeout(() => button.replaceChildren(icon("copy")), 1500);
  });
  return button;
}
